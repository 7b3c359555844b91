"""The model's own continuations of training texts, for the drafter to learn from.

Owns: picking prefixes by kind of text, continuing them with the engine's own model in many
processes, the files they come in, and reading those files as rows.
Knows nothing of: losses, the training loop.

Why: at temperature 0 the drafter serves after the model's text, not after the data's.

A file `SPLIT-PROCESS-NUMBER.npz` holds `tokens` (uint16, documents back to back, `GIVEN` set in
those of the prefix), `starts` (uint32, first token of each document) and `kinds` (uint8, index into
`KINDS`). Files appear complete, while the processes still run.
Run: `python -m training.continuations --corpus .. --checkpoint .. --model .. --out .. --seconds ..`
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.engine.runner import Runner
from deepdraft.models import model_class
from training.batches import Row, Source, SourceRows, sources_of, stack
from training.prepare import read_model_file

GIVEN = 1 << 15
"""Set in the tokens of the prefix. A vocabulary stays below it."""

KINDS = ("docs", "code", "prose", "facts", "chat")
SHARES = (0.3, 0.3, 0.22, 0.08, 0.1)
PREFIX = (16, 160)
LENGTH = (200, 256)
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)

_PROSE = ("shakespeare", "moby", "state-of")
_DOCS = ("python-docs", "nodejs-docs", "postgresql-docs", "django-docs")


def kind_of(source: Source) -> str:
    """The kind of text of a source, by its name."""
    name = source.name.removeprefix("long-")
    if name.startswith(("wordnet", "chat-facts", "chat-terms")):
        return "facts"
    if name.startswith("chat"):
        return "chat"
    if name.startswith(_PROSE):
        return "prose"
    return "docs" if name in _DOCS else "code"


class Prefixes:
    """Random beginnings of documents of one split: half from their start, half from inside."""

    def __init__(self, corpus: Any, split: str, rng: np.random.Generator) -> None:
        self.rng = rng
        self.tokens = np.asarray(corpus.tokens)
        starts = np.asarray(corpus.doc_starts).astype(np.int64)
        found: dict[int, list[np.ndarray]] = {}
        for source in sources_of(corpus):
            if source.split == split:
                own = starts[(starts >= source.start) & (starts < source.end)]
                docs = np.stack([own, np.append(own[1:], source.end)], 1)
                docs = docs[docs[:, 1] - docs[:, 0] > PREFIX[0] + 2]
                if len(docs):
                    found.setdefault(KINDS.index(kind_of(source)), []).append(docs)
        if not found:
            raise ValueError(f"the corpus has no documents of {PREFIX[0]} tokens in split {split}")
        self.docs = {k: np.concatenate(v) for k, v in found.items()}
        shares = np.array([SHARES[k] for k in self.docs])
        self.shares = shares / shares.sum()

    def next(self) -> tuple[int, list[int]]:
        """Kind and token ids."""
        rng = self.rng
        kind = int(rng.choice(list(self.docs), p=self.shares))
        a, b = self.docs[kind][rng.integers(len(self.docs[kind]))]
        want = min(int(rng.integers(PREFIX[0], PREFIX[1] + 1)), int(b - a) - 1)
        at = 0 if rng.random() < 0.5 else int(rng.integers(0, b - a - want))
        ids = self.tokens[a + at : a + at + want].tolist()
        if at:
            ids[0] = int(self.tokens[a])  # what every document begins with
        return kind, ids


@dataclass
class _Text:
    sequence: Any
    kind: int
    ids: list[int]
    given: int
    length: int
    temperature: float
    next_id: int = 0


@dataclass
class Writer:
    """Collects finished texts and writes them file by file."""

    folder: Path
    name: str
    texts: list[_Text] = field(default_factory=list)
    number: int = 0
    tokens: int = 0

    def add(self, text: _Text) -> None:
        self.texts.append(text)
        self.tokens += len(text.ids) - text.given

    def flush(self) -> None:
        if not self.texts:
            return
        parts = []
        for t in self.texts:
            ids = np.array(t.ids, dtype=np.uint16)
            ids[: t.given] |= GIVEN
            parts.append(ids)
        path = self.folder / f"{self.name}-{self.number}.npz"
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            np.savez(
                file,
                tokens=np.concatenate(parts),
                starts=np.cumsum([0] + [len(p) for p in parts[:-1]]).astype(np.uint32),
                kinds=np.array([t.kind for t in self.texts], dtype=np.uint8),
            )
        os.replace(temporary, path)
        self.texts, self.number = [], self.number + 1


@torch.inference_mode()
def generate(
    runner: Runner,
    prefixes: Prefixes,
    writer: Writer,
    *,
    rng: np.random.Generator,
    eos: int,
    rows: int,
    temperatures: tuple[float, ...],
    flush_every: float,
    until: Callable[[], bool],
) -> None:
    """Continue prefixes, `rows` at a time, until asked to stop; unfinished texts are written too
    if they have at least 32 tokens of their own."""
    live: list[_Text] = []
    flushed = time.monotonic()

    def choose(texts: list[_Text], logits: torch.Tensor) -> None:
        heat = torch.tensor([t.temperature for t in texts])[:, None]
        noise = torch.from_numpy(rng.gumbel(size=tuple(logits.shape)).astype(np.float32))
        scores = torch.where(heat > 0, logits / heat.clamp(min=1e-3) + noise, logits)
        for t, token in zip(texts, scores.argmax(-1).tolist(), strict=True):
            t.next_id = token

    while not until():
        while len(live) < rows:
            kind, ids = prefixes.next()
            length = int(rng.integers(LENGTH[0], LENGTH[1] + 1))
            heat = float(rng.choice(temperatures))
            text = _Text(runner.open_sequence(), kind, ids, len(ids), len(ids) + length, heat)
            logits = runner.prefill(text.sequence, ids, final=True)
            assert logits is not None
            choose([text], logits[None])
            live.append(text)
        for t in live:
            t.ids.append(t.next_id)
        choose(live, runner.step([(t.sequence, [t.next_id]) for t in live]))
        for t in [t for t in live if t.ids[-1] == eos or len(t.ids) >= t.length]:
            live.remove(t)
            runner.close_sequence(t.sequence)
            writer.add(t)
        if time.monotonic() - flushed > flush_every:
            writer.flush()
            flushed = time.monotonic()
    for t in live:
        if len(t.ids) - t.given >= 32:
            writer.add(t)
    writer.flush()


def _work(number: int, corpus: Any, make: Callable[[], Runner], o: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    split = "val" if number % 14 == 13 or (o.processes == 1 and o.held_out) else "train"
    rng = np.random.default_rng([o.seed, number])
    runner = make()
    ends = o.born + o.seconds
    writer = Writer(o.out, f"{split}-{number}")
    generate(
        runner,
        Prefixes(corpus, split, rng),
        writer,
        rng=rng,
        eos=runner.model.args.eos_token_id,
        rows=o.rows,
        # Held-out texts show greedy acceptance.
        temperatures=(0.0,) if split == "val" else TEMPERATURES,
        flush_every=o.flush_every,
        until=lambda: time.monotonic() > ends or (o.out / "stop").exists(),
    )
    print(f"process {number}: {writer.tokens} tokens", flush=True)


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description="Continue training texts with the model itself.")
    p.add_argument("--corpus", type=Path, required=True)
    p.add_argument("--checkpoint", type=Path, required=True)
    p.add_argument("--model", type=Path, required=True, help="model.json of training.prepare")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--seconds", type=float, required=True)
    p.add_argument("--processes", type=int, default=1)
    p.add_argument("--rows", type=int, default=16, help="texts at a time in a process")
    p.add_argument("--flush-every", type=float, default=20.0, help="seconds")
    p.add_argument("--held-out", action="store_true", help="from held-out texts (one process)")
    p.add_argument("--seed", type=int, default=11)
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    born = time.monotonic()
    o = parse_options(argv)
    o.born = born
    from training.data.load import load

    torch.set_num_threads(1)
    o.out.mkdir(parents=True, exist_ok=True)
    corpus = load(o.corpus)
    args, token_map, _ = read_model_file(o.model)

    def make() -> Runner:
        checkpoint = Checkpoint.open(o.checkpoint)
        model = model_class(args)(args, checkpoint, token_map, drafter=False)
        return Runner(model, max_context=PREFIX[1] + LENGTH[1] + 8, num_sequences=o.rows)

    context = multiprocessing.get_context("fork")
    crew = [context.Process(target=_work, args=(k, corpus, make, o)) for k in range(o.processes)]
    for process in crew:
        process.start()
    for process in crew:
        process.join()
    return int(all(process.exitcode for process in crew))


# reading


def read_files(paths: list[Path]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, starts and kinds of some files together."""
    tokens, starts, kinds, total = [], [], [], 0
    for path in paths:
        with np.load(path, allow_pickle=False) as file:
            tokens.append(file["tokens"])
            starts.append(file["starts"].astype(np.int64) + total)
            kinds.append(file["kinds"])
            total += len(tokens[-1])
    return np.concatenate(tokens), np.concatenate(starts), np.concatenate(kinds)


def rows_of(
    tokens: np.ndarray, starts: np.ndarray, length: int, align: int, pad_id: int, seed: int
) -> SourceRows:
    """Rows of continuations; tokens of prefixes still carry `GIVEN`."""
    corpus = SimpleNamespace(tokens=tokens, doc_starts=starts)
    source = Source("continuations", "train", 1.0, 0, len(tokens))
    return SourceRows(corpus, source, length, align, pad_id, seed)


def split_given(rows: list[Row]) -> np.ndarray:
    """[4, B, T]: rows without the mark, and where it was not set."""
    ids, pos, seg = stack(rows)
    return np.stack([ids & (GIVEN - 1), pos, seg, ids < GIVEN]).astype(np.int32)


class Continuations:
    """Rows from a folder that may still be filling."""

    def __init__(
        self, folder: Path, length: int, align: int, pad_id: int, seed: int, every: float = 15.0
    ) -> None:
        self.folder, self.shape, self.seed = folder, (length, align, pad_id), seed
        self.every, self.looked = every, -every
        self.known = 0
        self.tokens = 0
        self.rows: SourceRows | None = None

    def refresh(self) -> None:
        """Take up new files, at most every so many seconds."""
        now = time.monotonic()
        if now - self.looked < self.every:
            return
        self.looked = now
        paths = sorted(self.folder.glob("train-*.npz"))
        if len(paths) > self.known:
            tokens, starts, _ = read_files(paths)
            self.rows = rows_of(tokens, starts, *self.shape, self.seed + len(paths))
            self.known, self.tokens = len(paths), len(tokens)

    def next_rows(self, count: int) -> list[Row]:
        """Up to `count` rows; none while there are no files."""
        self.refresh()
        return [self.rows.next_row() for _ in range(count)] if self.rows is not None else []

    def held_out(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Kind -> tokens and starts of the held-out continuations."""
        paths = sorted(self.folder.glob("val-*.npz"))
        if not paths:
            return {}
        tokens, starts, kinds = read_files(paths)
        ends = np.append(starts[1:], len(tokens))
        out = {}
        for k, name in enumerate(KINDS):
            parts = [tokens[a:b] for a, b in zip(starts[kinds == k], ends[kinds == k], strict=True)]
            if parts:
                first = np.cumsum([0] + [len(p) for p in parts[:-1]])
                out[name] = (np.concatenate(parts), first)
        return out


if __name__ == "__main__":
    sys.exit(main())
