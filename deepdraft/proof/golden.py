"""`deepdraft golden DIR`: replay recorded data of a model and compare every array.

Owns: the order of the checks over a directory, the report, the exit status.
Knows nothing of: how arrays are made (`golden_run`), what they must satisfy (`golden_compare`).

Exit status: 0 all arrays pass, 1 one does not (or none was compared), 2 the directory is damaged.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepdraft.arch import V41Args
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.engine.runner import checked_token_map
from deepdraft.errors import CheckpointError, DeepdraftError
from deepdraft.models.deepseek_v41 import DeepseekV41
from deepdraft.models.layers import Numerics, make_numerics
from deepdraft.ops.elementwise import Rotary
from deepdraft.ops.engram_hash import engram_tables
from deepdraft.proof import golden_compare as compare
from deepdraft.proof.golden_compare import Arrays, Outcome
from deepdraft.proof.golden_family import check_family, is_family_directory
from deepdraft.proof.golden_files import MODES, GoldenDir, as_positions, read_consistency
from deepdraft.proof.golden_quant import Flip, Follower, layerwise, off_grid
from deepdraft.proof.golden_run import Inputs, Replay, replay, replay_production
from deepdraft.text.tokenizer import Tokenizer

_DEFECT_SHOWS = 1e-3
"""Least difference, of a row's largest logit, that the published defect makes where it shows."""

_ENGRAM_KEYS = ("token_map", "pad_id", "primes", "offsets", "multipliers", "layer_ids")


@dataclass(slots=True)
class Report:
    """All outcomes of a directory."""

    directory: str
    outcomes: list[Outcome] = field(default_factory=list)
    flips: list[dict[str, Any]] = field(default_factory=list)
    """qsim in float32: texts of which a value falls on a rounding boundary, and what it moves."""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def compared(self) -> int:
        """Arrays that were compared with recorded ones."""
        return sum(1 for o in self.outcomes if o.rule != "structure")

    @property
    def passed(self) -> bool:
        """Whether something was compared and nothing failed."""
        return self.compared > 0 and not any(o.verdict == "fail" for o in self.outcomes)

    def counts(self) -> dict[str, int]:
        """Outcomes by verdict."""
        return {v: sum(o.verdict == v for o in self.outcomes) for v in ("pass", "fail", "info")}

    def worst(self) -> list[Outcome]:
        """The largest error of each mode, rule and tolerance, and where."""
        found: dict[tuple[str, str, float | None], Outcome] = {}
        for o in self.outcomes:
            key = (o.mode, o.rule, o.tolerance)
            if o.error is not None and (key not in found or o.error > (found[key].error or 0.0)):
                found[key] = o
        kept = sorted(found.items(), key=lambda item: (item[0][0], item[0][1], item[0][2] or 0.0))
        return [o for key, o in kept if key[2]]

    def as_json(self) -> dict[str, Any]:
        """The report as data."""
        return {
            "directory": self.directory,
            "passed": self.passed,
            "compared": self.compared,
            "counts": self.counts(),
            "seconds": {k: round(v, 2) for k, v in self.seconds.items()},
            "worst": [_plain(o) for o in self.worst()],
            "rounding_boundaries": self.flips,
            "arrays": [_plain(o) for o in self.outcomes],
        }


def _plain(outcome: Outcome) -> dict[str, Any]:
    """An outcome as JSON: three digits, null for what is not finite."""
    values = dataclasses.asdict(outcome)
    for key, value in values.items():
        if isinstance(value, float):
            values[key] = float(f"{value:.3g}") if math.isfinite(value) else None
    return values


class Golden:
    """The checks of one directory."""

    def __init__(self, directory: Path) -> None:
        """Opens the checkpoint and the recorded data; errors say what is wrong with which file."""
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is not a directory")
        self.checkpoint = Checkpoint.open(directory / "checkpoint")
        self.args: V41Args = self.checkpoint.args
        self.data = GoldenDir.open(directory, self.args)
        self.consistency = read_consistency(directory)
        self.token_map = None
        if self.args.engram_layer_ids:
            tokenizer = Tokenizer.load(directory / "checkpoint")
            self.token_map = checked_token_map(self.checkpoint, tokenizer)
        texts = self.data.texts
        self.prefix_stem = f"layers{texts.prefix_label}"
        self.leading = frozenset({16, self.args.sliding_window, len(texts.shorts[0])})
        self.report = Report(directory.resolve().name)

    def run(self, modes: Iterable[str] | None = None) -> Report:
        """Checks of these modes, or of all that are there."""
        chosen = self.data.modes if modes is None else list(modes)
        for mode in chosen:
            if mode not in self.data.modes:
                raise CheckpointError(f"{self.report.directory} has no data of mode {mode!r}")
            start = time.perf_counter()
            self._mode(mode)
            self.report.seconds[mode] = time.perf_counter() - start
        self._hash_tables()
        return self.report

    def model(self, numerics: Numerics) -> DeepseekV41:
        """The checkpoint's model with these numerics."""
        return DeepseekV41(self.args, self.checkpoint, self.token_map, numerics=numerics)

    # ---- one mode --------------------------------------------------------------------------

    def _mode(self, mode: str) -> None:
        dtype = torch.float64 if mode == "qsim" else torch.float32
        model = self.model(make_numerics(mode, dtype))
        ours = replay(model, self.data.texts, mode, self._inputs(mode))
        stems = [s for s in ours.arrays if s != "tokens"]
        if mode == "exact":
            if self.data.texts.replay_greedy:
                ours.arrays |= (extra := replay_production(model, self.data.texts)).arrays
                ours.required |= extra.required
            stems.append("replay")
        if mode == "quant":
            self._layers_one_at_a_time(model, ours)
        for stem in stems:
            self._file(mode, stem, ours)
        self._greedy(mode, ours)
        self._unmodified(mode, ours.arrays["logits"]["decode_logits"])
        for stem in self.data.stems(mode):
            if stem not in (*stems, "decode-unmodified"):
                note = "no file of this model in this format"
                self._add(Outcome(mode, f"{stem}-{mode}", "*", "fail", "structure", note=note))
        if mode == "qsim":
            self._qsim_float32()

    def _inputs(self, mode: str) -> Inputs:
        """Positions that the recorded files chose; ours are computed at the same ones."""
        texts = self.data.texts
        whole = len(texts.prompt) + len(texts.greedy[mode])
        queries = (self.data.arrays("indexer", mode) or {}).get("positions")
        drafts = (self.data.arrays("dspark", mode) or {}).get("position")
        return Inputs(
            as_positions(queries, whole, f"indexer-{mode} positions"),
            as_positions(drafts, whole, f"dspark-{mode} position"),
        )

    def _add(self, outcome: Outcome) -> None:
        self.report.outcomes.append(outcome)

    def _file(self, mode: str, stem: str, ours: Replay) -> None:
        golden = self.data.arrays(stem, mode)
        roles = enumerate(self.args.roles)
        restricted = [layer for layer, role in roles if role.restricted] if mode == "quant" else []
        free = frozenset(f"{n}.{layer}" for layer in restricted for n in ("score", "score_gap"))
        outcomes = compare.compare_file(
            mode,
            stem,
            ours,
            golden,
            self._rules(mode, stem, ours),
            leading=self.leading,
            free_infinities=free,
        )
        if stem == "kv" and mode != "exact":
            outcomes = [self._on_grid(o, ours.arrays[stem], golden or {}) for o in outcomes]
        self.report.outcomes.extend(outcomes)

    def _rules(self, mode: str, stem: str, ours: Replay) -> Callable[[str, Tensor], compare.Rule]:
        texts = self.data.texts
        if mode == "exact":
            return compare.exact_rules(compare.EXACT_REL, ours.operands)
        if mode == "qsim":
            return compare.exact_rules(compare.QSIM64_REL, ours.operands)
        if stem == self.prefix_stem:
            measured = self.consistency.get("layerwise_quant_vs_fp32_arithmetic")
            return compare.layer_rules(measured if isinstance(measured, dict) else {})
        return compare.quant_rules(
            f"short{texts.short_label}_logits",
            f"after{len(texts.prefix)}.window.0",
            self.args.kv_source_layer_ids[0],
            self._drift(),
        )

    def _drift(self) -> dict[str, Any]:
        """How far quant may lie from qsim on a long text, as the data's makers measured it."""
        key = f"prompt{len(self.data.texts.prompt)}_quant_vs_qsim"
        drift = self.consistency.get(key)
        return drift if isinstance(drift, dict) else {}

    @staticmethod
    def _on_grid(outcome: Outcome, ours: Arrays, golden: Arrays) -> Outcome:
        """A cache's outcome, failed where a value of either side is off the quantiser's grid."""
        if outcome.verdict == "fail" or outcome.array not in ours:
            return outcome
        stray = [off_grid(outcome.array, side[outcome.array]) for side in (ours, golden)]
        if stray == [None, None]:
            return outcome
        note = f"{stray[0]} computed, {stray[1]} recorded values off the grid"
        if any(stray):
            return dataclasses.replace(outcome, verdict="fail", note=note)
        # Lying on the grid is a target of its own: the array is judged, not just measured.
        verdict = "pass" if outcome.verdict == "info" else outcome.verdict
        return dataclasses.replace(outcome, verdict=verdict, note="on the grid")

    def _layers_one_at_a_time(self, model: DeepseekV41, ours: Replay) -> None:
        """Replaces the layers file's arrays by those made from recorded inputs (quant)."""
        golden = self.data.arrays(self.prefix_stem, "quant") or {}
        mine = ours.arrays[self.prefix_stem]
        inputs = [f"L{i}.{n}" for i in range(len(model.blocks)) for n in ("stream_in", "premix_in")]
        bad = [n for n in inputs if n not in golden or golden[n].shape != mine[n].shape]
        if bad:
            file = f"{self.prefix_stem}-quant"
            note = f"layers cannot be run one at a time without {bad[0]}"
            self._add(Outcome("quant", file, "*", "fail", "structure", note=note))
            return
        for layer, arrays in layerwise(model, len(self.data.texts.prefix), golden).items():
            for name in arrays.keys() - {"stream_in", "premix_in"}:
                mine[f"L{layer}.{name}"] = arrays[name]

    def _greedy(self, mode: str, ours: Replay) -> None:
        """Greedy tokens of tokens.json against the largest of our logits."""
        texts = self.data.texts
        recorded = list(texts.greedy[mode])
        if mode in texts.next_after_last:
            recorded.append(texts.next_after_last[mode])
        mine = ours.arrays["tokens"]["greedy_tokens"][: len(recorded)]
        rule = compare.agreement if mode == "quant" else compare.identical
        name = f"greedy_tokens.{mode}"
        self._add(compare.check(mode, "tokens", name, mine, torch.tensor(recorded), rule))

    def _unmodified(self, mode: str, decode_logits: Tensor) -> None:
        """The published defect: recorded where it shows, and not ours (notes 11.3)."""
        file, name = f"decode-unmodified-{mode}", "decode_logits"
        recorded = self.data.arrays("decode-unmodified", mode)
        right = (self.data.arrays("logits", mode) or {}).get(name)
        if recorded is None or name not in recorded or right is None:
            note = "missing in the file" if recorded is not None else "the file is missing"
            self._add(Outcome(mode, file, name, "fail", "structure", note=note))
            return
        if len(recorded) > 1:
            note = f"arrays besides {name}: {sorted(set(recorded) - {name})[:3]}"
            self._add(Outcome(mode, file, "*", "fail", "structure", note=note))
        first = first_stale_step(self.args, len(self.data.texts.prompt), decode_logits.shape[0])

        def rule(ours: Tensor, wrong: Tensor) -> compare.Measure:
            apart = compare.relative_rows(wrong, right)
            before = float(apart[:first].max()) if first else 0.0
            ok, where = before <= compare.EXACT_REL, "never shows"
            if first < len(apart):
                step = first + int(apart[first:].argmax())
                far = float(apart[step])
                if mode != "quant":  # there ours drifts from both
                    far = min(far, float(compare.relative_rows(ours, wrong)[step]))
                ok = ok and far > _DEFECT_SHOWS
                where = f"shows from step {first} on; ours is {far:.2f} away at step {step}"
            return compare.Measure("before it shows", before, compare.EXACT_REL, ok, where)

        self._add(compare.check(mode, file, name, decode_logits, recorded[name], rule))

    # ---- qsim in float32 -------------------------------------------------------------------

    def _qsim_float32(self) -> None:
        """Logits in float32: equal up to the first value that falls on a rounding boundary."""
        texts, recorded = self.data.texts, self.data.arrays("logits", "qsim") or {}
        short = f"short{texts.short_label}_logits"
        names = ("prompt_logits", "decode_logits", short)
        expected = {
            "prompt_logits": len(texts.prompt),
            "decode_logits": len(texts.greedy["qsim"]),
            short: len(texts.shorts) * len(texts.shorts[0]),
        }
        for name in names:
            rows = recorded[name].flatten(0, -2).shape[0] if name in recorded else None
            if rows != expected[name]:
                note = "not recorded, or with another number of rows"
                file = ("qsim-float32", "logits-qsim")
                self._add(Outcome(*file, name, "fail", "structure", note=note))
                return
        follower = Follower(self.model, make_numerics("qsim"), make_numerics("qsim", torch.float64))
        n = len(texts.prompt)
        long = follower.follow([*texts.prompt, *texts.greedy["qsim"]])
        wanted = torch.cat([recorded["prompt_logits"], recorded["decode_logits"]])
        first = len(wanted) if long.first is None else long.first.position
        rows = compare.relative_rows(long.logits, wanted)
        self._note_flip("prompt and decode", 0, long.first, rows)
        for name, at, end in (("prompt_logits", 0, n), ("decode_logits", n, len(wanted))):
            rule = _up_to(max(0, first - at), long.first, self._drift())
            self._check_float32(name, long.logits[at:end], wanted[at:end], rule)
        shorts, right = [], 0
        strays: list[str] = []
        for number, ids in enumerate(texts.shorts):
            run = follower.follow(ids)
            shorts.append(run.logits)
            rows = compare.relative_rows(run.logits, recorded[short][number])
            self._note_flip(f"{short}[{number}]", number, run.first, rows)
            right += int((rows <= compare.EXACT_REL).sum())
            clean = len(ids) if run.first is None else run.first.position
            if bool((rows[:clean] > compare.EXACT_REL).any()) or _strange(run.first):
                strays.append(f"prompt {number}")
        total = expected[short]
        least = int(total * compare.SHORT_ROWS_SHARE)

        def short_rule(ours: Tensor, golden: Tensor) -> compare.Measure:
            note = f"{right} of {total} rows within {compare.EXACT_REL:g} (at least {least})"
            if strays:
                note += f"; not explained by a rounding boundary: {', '.join(strays)}"
            ok = right >= least and not strays
            return compare.Measure("rows off", float(total - right), float(total - least), ok, note)

        self._check_float32(short, torch.stack(shorts), recorded[short], short_rule)

    def _check_float32(self, name: str, ours: Tensor, golden: Tensor, rule: compare.Rule) -> None:
        self._add(compare.check("qsim-float32", "logits-qsim", name, ours, golden, rule))

    def _note_flip(self, text: str, number: int, flip: Flip | None, rows: Tensor) -> None:
        off = (rows > compare.EXACT_REL).nonzero().flatten().tolist()
        if flip is not None or off:
            self.report.flips.append(
                {
                    "text": text,
                    "first_boundary": None if flip is None else dataclasses.asdict(flip),
                    "rows_off": len(off),
                    "positions_off": off,
                }
            )

    # ---- engram-hash.json ------------------------------------------------------------------

    def _hash_tables(self) -> None:
        """Hash constants and rotary angles, which belong to no mode."""
        recorded, file = self.data.hash_tables, "engram-hash.json"
        if recorded is None:
            self._add(Outcome("-", file, "*", "fail", "structure", note="the file is missing"))
            return
        ours = hash_table_values(self.args, self.token_map)
        unused = set() if self.args.engram_layer_ids else set(_ENGRAM_KEYS)
        for name in sorted((ours.keys() | recorded.keys()) - unused):
            if name not in recorded or name not in ours:
                note = "missing in the file" if name in ours else "not known in this format"
                self._add(Outcome("-", file, name, "fail", "structure", note=note))
                continue
            mine, rule = ours[name]
            try:
                theirs = torch.tensor(recorded[name])
                if mine.is_floating_point():
                    theirs = theirs.to(mine.dtype)
            except (TypeError, ValueError, RuntimeError, OverflowError):
                note = "not an array of numbers"
                self._add(Outcome("-", file, name, "fail", "structure", note=note))
                continue
            if theirs.ndim == mine.ndim - 1 and mine.ndim == 3:
                mine = mine.flatten(1)
            self._add(compare.check("-", file, name, mine, theirs, rule))


def _strange(flip: Flip | None) -> bool:
    return flip is not None and not flip.on_boundary


def _up_to(clean: int, flip: Flip | None, drift: dict[str, Any]) -> compare.Rule:
    """Rows before `clean` within tolerance, the others as in quant mode."""

    def rule(ours: Tensor, golden: Tensor) -> compare.Measure:
        rows = compare.relative_rows(ours, golden)
        error = float(rows[:clean].max()) if clean and len(rows) else 0.0
        ok = error <= compare.EXACT_REL and not _strange(flip)
        off = int((rows > compare.EXACT_REL).sum())
        note = f"{min(clean, len(rows))} of {len(rows)} rows before the first boundary; {off} off"
        if clean < len(rows):
            rest = compare.far_rule(drift)(ours[clean:], golden[clean:])
            ok = ok and rest.ok
            note += f", afterwards rel L2 {rest.error:.3f}, {rest.note}"
        return compare.Measure("rel of each row", error, compare.EXACT_REL, ok, note)

    return rule


def first_stale_step(args: V41Args, prompt: int, steps: int) -> int:
    """The first decode step at which the published code scores against another layer's keys.

    That is a step at an even position, where a ratio-2 indexer completes no entry, with more
    entries than it selects. `steps` when there is none.
    """
    pairs = any(role.runs_indexer and role.ratio == 2 for role in args.roles)
    for step in range(steps if pairs and len(args.kv_source_layer_ids) > 1 else 0):
        position = prompt + step
        if position % 2 == 0 and (position + 1) // 2 > args.index_topk:
            return step
    return steps


def hash_table_values(
    args: V41Args, token_map: Sequence[int] | None
) -> dict[str, tuple[Tensor, compare.Rule]]:
    """Our values of engram-hash.json by key, with the rule of each."""
    values: dict[str, tuple[Tensor, compare.Rule]] = {}
    if token_map is not None:
        tables = engram_tables(args)
        integers = (
            list(token_map),
            token_map[args.engram_pad_token_id],
            tables.primes.tolist(),
            tables.offsets.tolist(),
            tables.multipliers.tolist(),
            list(args.engram_layer_ids),
        )
        for name, value in zip(_ENGRAM_KEYS, integers, strict=True):
            values[name] = torch.tensor(value, dtype=torch.int64), compare.identical
    yarn = (
        args.rope_factor,
        args.rope_beta_fast,
        args.rope_beta_slow,
        args.rope_original_max_positions,
    )
    for name, theta, scaling in (
        ("window_only", args.rope_theta, None),
        ("compressed", args.compress_rope_theta, yarn),
    ):
        dim = args.qk_rope_head_dim
        rotary = Rotary(
            dim=dim, rope_dim=dim, theta=theta, yarn=scaling, dtype=torch.float32, device="cpu"
        )
        key = f"rope_angle_at_position_1_{name}_layers"
        values[key] = rotary.freq[::2].clone(), compare.within(compare.QSIM64_REL)
    return values


# ---- output --------------------------------------------------------------------------------


def check_directory(directory: str | Path, modes: Iterable[str] | None = None) -> Report:
    """Replays a golden directory. CheckpointError or ConfigError where it is damaged."""
    path = Path(directory)
    with torch.inference_mode():
        if is_family_directory(path):
            return Report(path.resolve().name, *_family(path, modes))
        return Golden(path).run(modes)


def _family(
    path: Path, modes: Iterable[str] | None
) -> tuple[list[Outcome], list[dict[str, Any]], dict[str, float]]:
    """Data of an earlier family has one mode, exact."""
    other = sorted(set(modes or ()) - {"exact"})
    if other:
        raise CheckpointError(f"{path.name} has no data of mode {other[0]!r}")
    outcomes, seconds = check_family(path)
    return outcomes, [], seconds


def main(directory: str, as_json: bool = False, modes: Sequence[str] | None = None) -> int:
    """`deepdraft golden DIR [--json]`; returns the exit status."""
    try:
        report = check_directory(directory, modes)
    except DeepdraftError as error:
        if as_json:
            print(json.dumps({"directory": Path(directory).name, "error": error.message}))
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    if as_json:
        from deepdraft.proof.bench import commit, machine

        print(json.dumps({"machine": machine(), "commit": commit(), **report.as_json()}))
    else:
        _print(report)
    return 0 if report.passed else 1


def _print(report: Report) -> None:
    file = None
    for o in report.outcomes:
        if (o.mode, o.file) != file:
            file = (o.mode, o.file)
            print(f"{o.file}{' (float32)' if o.mode == 'qsim-float32' else ''}")
        error = "" if o.error is None else f"{o.error:.1e}"
        bound = "" if o.tolerance is None else f"<= {o.tolerance:.1e}"
        print(f"  {o.verdict:4}  {o.array:32} {o.rule:18} {error:>8} {bound:11} {o.note}".rstrip())
    for flip in report.flips:
        first = flip["first_boundary"]
        at = f"position {first['position']}, {first['quantiser']}" if first else "not found"
        print(f"rounding boundary in {flip['text']}: {at}; {flip['rows_off']} rows off")
    counts = report.counts()
    took = ", ".join(f"{mode} {s:.1f} s" for mode, s in report.seconds.items())
    print(
        f"{report.directory}: {report.compared} arrays compared, {counts['pass']} pass, "
        f"{counts['info']} without a target, {counts['fail']} FAIL ({took})"
    )
    if not report.compared:
        print("nothing was compared: that is a failure")


__all__ = ["MODES", "Golden", "Report", "check_directory", "main"]
