"""One script for a GPU host: check every kernel, its rows, time it, tune it.

    python bench/kernels_gpu.py --json FILE [--seconds 540] [--parts ...] [--only NAME] [--dry-run]

ceilings  copy and read rate, gap between tiny kernels
check     the tests of tests/kernels, large cases included (no pytest needed)
rows      bits of every kernel's rows for 1..16 rows, permuted, beside poisoned rows, and twice over
time      us, GB/s and the share of 4.3 TB/s; graphs, median of 7
programmatic  the same with programmatic launch, as are tune and best
tune      plans of the weight products; the best is to be frozen in deepdraft/kernels/layout.py
best      the same times with the best plan of each shape
pair      both GPUs: links, peer copies, symmetric memory; programmatic launch; compute-sanitizer

Every case runs in a child process (kernel_worker.py); one that hangs or breaks the device costs
itself alone, and what was measured is written after every part. Needs torch, triton, numpy,
safetensors, click. `--dry-run` runs everything with tiny sizes in Triton's interpreter on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
PARTS = ("ceilings", "check", "rows", "time", "programmatic", "tune", "best", "pair")
MODULES = {
    "test_moe": 3, "test_gemv": 3, "test_mhc": 2, "test_index": 2, "test_attention": 2,
    "test_step_ends": 1, "test_accept": 1, "test_markov": 2, "test_filters": 2,
    "test_cache": 1, "test_rounding": 1, "test_native": 10,
}  # fmt: skip
"""Test modules, and how many processes share each."""
COMPILES = {"time": 4, "rows": 2, "programmatic": 4, "tune": 12}
BUSY_UNTIL = 5
"""Seconds from the start during which other work may need the host's processors."""
FEW, MANY = 20, 24


class Run:
    """The results so far, the clock, and the file they are kept in."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.start = args, time.monotonic()
        self.results: dict = {"dry_run": args.dry_run, "incidents": []}
        self.lock = threading.Lock()
        self.folder = Path(tempfile.mkdtemp(prefix="kernels-"))

    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def left(self) -> float:
        return self.args.seconds - self.elapsed()

    def save(self) -> None:
        with self.lock:
            self.results["seconds"] = round(self.elapsed(), 1)
            if self.args.json:
                new = self.args.json.with_suffix(".new")
                new.write_text(json.dumps(self.results, indent=1))
                new.replace(self.args.json)

    def incident(self, text: str) -> None:
        print(f"INCIDENT {text}", flush=True)
        self.results["incidents"].append(text)


def read_lines(child: subprocess.Popen, lines: queue.Queue) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.put(line)
    lines.put(None)


def stop(child: subprocess.Popen) -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


class Outcome:
    """What one worker said: its cases, the one it was at, and how it ended."""

    def __init__(self, note: Callable[[dict], None]) -> None:
        self.note = note
        self.done: list[dict] = []
        self.started: str | None = None
        self.finished = False
        self.tail: deque[str] = deque(maxlen=12)

    def take(self, line: str) -> None:
        if not line.startswith("@ "):
            self.tail.append(line.rstrip()[:300])
            return
        fields = json.loads(line[2:])
        if "start" in fields:
            self.started = fields["start"]
        elif "case" in fields:
            self.add(fields)
        else:
            self.finished = True

    def add(self, fields: dict) -> None:
        self.done.append(fields)
        self.started = None
        self.note(dict(fields))

    def listen(self, child: subprocess.Popen, wait: Callable[[], float]) -> str:
        """Until the child ends or says nothing for `wait()` seconds; how it ended."""
        lines: queue.Queue = queue.Queue()
        threading.Thread(target=read_lines, args=(child, lines), daemon=True).start()
        while True:
            limit = max(0.05, wait())
            try:
                line = lines.get(timeout=limit)
            except queue.Empty:
                return f"nothing for {limit:.0f} s"
            if line is None:
                return f"ended with {child.wait()}"
            self.take(line)


def start(run: Run, part: str, options: tuple[str, ...]) -> subprocess.Popen:
    environment = dict(os.environ, OMP_NUM_THREADS="2", PYTHONUNBUFFERED="1")
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    environment["CUDA_VISIBLE_DEVICES"] = "" if run.args.dry_run else first
    command = [sys.executable, "-W", "ignore", str(HERE / "kernel_worker.py"), part, *options]
    command += ["--only", run.args.only, *(["--dry"] if run.args.dry_run else [])]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=environment, cwd=HERE.parent, start_new_session=True,
    )  # fmt: skip


def work(
    run: Run, part: str, *options: str, stall: float, until: float,
    note: Callable[[dict], None] = lambda line: None,
) -> list[dict]:  # fmt: skip
    """The cases of one worker, started again without a case that ended or stalled it. `until`: the
    second of the run at which it is stopped."""
    outcome = Outcome(note)
    skip = run.folder / f"skip-{part}-{threading.get_ident()}-{time.monotonic_ns()}.json"
    name = " ".join((part, *(o for o in options if not o.startswith("--"))))
    for _ in range(6):
        skip.write_text(json.dumps([d["case"] for d in outcome.done]))
        child = start(run, part, (*options, "--skip", str(skip)))
        why = outcome.listen(child, lambda: min(stall, until - run.elapsed()))
        stop(child)
        at = outcome.started
        if outcome.finished:
            break
        if run.elapsed() >= until - 0.1:
            run.incident(f"{name}: out of time at {at}, {len(outcome.done)} cases done")
            break
        if at is None and child.returncode != 3:
            run.incident(f"{name}: {why} between cases: {list(outcome.tail)}")
            break
        if at is not None:
            run.incident(f"{name}: {why} at {at}: {list(outcome.tail)[-4:]}")
            outcome.add({"case": at, "error": why})
    return outcome.done


# ---- parts ---------------------------------------------------------------------------------


def queued(run: Run, parts: set[str]) -> deque[tuple[str, list[str]]]:
    """Workers that may run side by side: checks, and compiles of other parts, in turn."""
    dry = run.args.dry_run
    checks, compiles = [], []
    for module, shards in MODULES.items() if "check" in parts else ():
        for i in range(1 if dry else shards):
            shard = f"{i}/{1 if dry else shards}"
            checks.append(("check", ["--module", module, "--shard", shard]))
    for what, shards in COMPILES.items() if not dry else ():
        for i in range(shards if what in parts else 0):
            programmatic = ["--pdl"] if what in ("tune", "programmatic") else []
            options = ["--module", what, "--shard", f"{i}/{shards}", *programmatic]
            compiles.append(("compile", options))
    tasks = deque()
    while checks or compiles:
        tasks.extend(checks[:1] + compiles[:1])
        checks, compiles = checks[1:], compiles[1:]
    return tasks


def side_by_side(run: Run, parts: set[str]) -> None:
    """Tests on the GPU ("check") and the compiling of the other parts."""
    tasks = queued(run, parts)
    found = run.results.setdefault("check", {"passed": 0, "failed": {}, "slowest": []})
    until = min(run.elapsed() + 0.48 * run.args.seconds, run.args.seconds)

    def tested(line: dict) -> None:
        with run.lock:
            if line.get("passed"):
                found["passed"] += 1
            else:
                found["failed"][line["case"]] = line["error"]
                print(f"FAILED {line['case']}: {line['error']}"[:700], flush=True)
            found["slowest"].append((line.get("seconds", 0), line["case"]))
            found["slowest"] = sorted(found["slowest"], reverse=True)[:8]

    def compiled(line: dict) -> None:
        if "error" in line:
            run.incident(f"{line['case']}: {line['error'][:300]}")

    def serve(delay: float) -> None:
        while tasks and run.elapsed() < delay:
            time.sleep(0.5)
        while run.elapsed() < until:
            try:
                part, options = tasks.popleft()
            except IndexError:
                return
            note = tested if part == "check" else compiled
            work(run, part, *options, stall=90, until=until, note=note)
            run.save()

    few, many = (1, 1) if run.args.dry_run else (FEW, MANY)
    threads = [
        threading.Thread(target=serve, args=(0 if i < few else BUSY_UNTIL,)) for i in range(many)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(
        f"check: {found['passed']} passed, {len(found['failed'])} failed; {run.elapsed():.0f} s",
        flush=True,
    )


def check_rows(run: Run) -> None:
    found = run.results["rows"] = {}

    def note(line: dict) -> None:
        name = line.pop("case")
        found[name] = line
        verdict = line.get("error") or line["wrong"][:4] or "equal"
        print(f"rows {name:20} {verdict}"[:500], flush=True)

    work(
        run,
        "rows",
        stall=60,
        until=min(run.elapsed() + 0.15 * run.args.seconds, run.args.seconds - 2),
        note=note,
    )


RATE = 4.3e12
"""Bytes a second that shares refer to: an H200 reads 4.4 and copies 4.2 (ceilings of each run)."""


def share(line: dict) -> dict:
    """A timed line with its share of RATE."""
    if "us" in line:
        line["share"] = round(line["MB"] * 1e12 / RATE / line["us"], 3)
    return line


def timed(run: Run, key: str, *options: str, until: float) -> None:
    found = run.results[key] = {}

    def note(line: dict) -> None:
        name = line.pop("case")
        line.pop("seconds", None)
        found[name] = share(line)
        if "error" in line:
            print(f"{key} {name}: {line['error']}"[:400], flush=True)
            return
        print(
            f"{key} {name:36} {line['us']:9.2f} us {line['MB']:9.2f} MB "
            f"{line['GB_per_s']:7.0f} GB/s {100 * line.get('share', 0):5.1f} %",
            flush=True,
        )

    work(run, "time", *options, stall=45, until=until, note=note)


def tune(run: Run, until: float) -> None:
    found = run.results["tune"] = {}

    def note(line: dict) -> None:
        if "error" in line:
            run.incident(f"tune {line['case']}: {line['error'][-200:]}")
            return
        line.pop("case")
        line.pop("seconds")
        line.pop("GB_per_s")
        found.setdefault(line.pop("shape"), []).append(share(line))

    work(run, "tune", "--pdl", stall=30, until=until, note=note)
    for name, tried in found.items():
        tried.sort(key=lambda r: r["us"])
        shown = [
            f"{r['us']:.1f} us {100 * r.get('share', 0):.0f} % "
            f"{r['tile']}/{r['step']}/{r['split']}/{r['warps']}/{r['stages']}/{r['registers']}"
            for r in tried[:3]
        ]
        print(f"tune {name} ({len(tried)} plans): {'; '.join(shown)}", flush=True)


def best(run: Run, until: float) -> None:
    plans = {name: tried[0] for name, tried in run.results.get("tune", {}).items() if tried}
    if not plans:
        return
    file = run.folder / "plans.json"
    file.write_text(json.dumps(plans))
    timed(run, "best", "--plans", str(file), "--pdl", until=until)


def pair(run: Run) -> None:
    command = [sys.executable, str(HERE / "gpu_pair.py"), "--seconds", str(int(run.left() - 4))]
    if run.args.dry_run:
        command.append("--dry-run")
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        cwd=HERE.parent, start_new_session=True,
    )  # fmt: skip
    found = run.results["pair"] = {}
    lines: queue.Queue = queue.Queue()
    threading.Thread(target=read_lines, args=(child, lines), daemon=True).start()
    while run.left() > 2:
        try:
            line = lines.get(timeout=max(0.05, run.left() - 2))
        except queue.Empty:
            break
        if line is None:
            break
        if line.startswith("@ "):
            found.update(json.loads(line[2:]))
            run.save()
        print(line.rstrip()[:600], flush=True)
    stop(child)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--seconds", type=float, default=540, help="stop before this many")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, interpreter, no GPU")
    run = Run(parser.parse_args())
    parts = run.args.parts.split(",")
    total = run.args.seconds

    def step(part: str, call: Callable[[], None]) -> None:
        if part in parts and run.left() > 8:
            begun = run.elapsed()
            try:
                call()
            except Exception as e:
                run.incident(f"{part}: {type(e).__name__}: {e}")
            run.results.setdefault("seconds_of", {})[part] = round(run.elapsed() - begun, 1)
            run.save()

    def ceilings() -> None:
        for line in work(run, "ceilings", stall=40, until=run.elapsed() + 45):
            run.results["ceilings"] = line
            print(line, flush=True)

    tail = 60 if "pair" in parts else 3
    step("ceilings", ceilings)
    # What is checked first is checked while the rest is compiled.
    early = "check" in parts[:2]
    side_by_side(run, set(parts) if early else set(parts) - {"check"})
    run.save()

    def soon(share: float) -> float:
        """The second of the run at which a part of this share of it ends."""
        return min(run.elapsed() + share * total, total - tail)

    calls = {
        "check": lambda: None if early else side_by_side(run, {"check"}),
        "rows": lambda: check_rows(run),
        "time": lambda: timed(run, "time", until=soon(0.2)),
        "programmatic": lambda: timed(run, "programmatic", "--pdl", until=soon(0.2)),
        "tune": lambda: tune(run, soon(0.4)),
        "best": lambda: best(run, soon(0.1)),
        "pair": lambda: pair(run),
    }
    for part in parts:
        if part in calls:
            step(part, calls[part])
    bad = list(run.results.get("check", {}).get("failed", {}))
    bad += [n for n, r in run.results.get("rows", {}).items() if r.get("error") or r.get("wrong")]
    print(f"{run.elapsed():.0f} s; " + (f"WRONG: {', '.join(bad)}"[:1500] if bad else "all right"))
    for text in run.results["incidents"]:
        print(f"incident: {text}"[:300])
    run.save()
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
