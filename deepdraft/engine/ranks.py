"""One engine, several ranks: rank 0 tells the others which calls it makes of its runner.

Owns: the commands, the runner that sends them, the loop that follows them.
Knows nothing of: requests, how ranks exchange tensors, processes' ends (`parallel.rank`).

Every rank makes the same calls in the same order, so the exchanges inside them meet. A call that is
refused before it begins (StateError) is refused alike everywhere. After any other failure the ranks
are no longer at the same place, and the process ends.
"""

from __future__ import annotations

import json
import os
import struct
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from torch import Tensor

from deepdraft.arch import V41Args
from deepdraft.checkpoint.presharded import is_presharded, shard_plan
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.config import EngineConfig
from deepdraft.engine.runner import Draft, Runner
from deepdraft.errors import ConfigError, DeepdraftError, StateError
from deepdraft.models.state import SequenceState
from deepdraft.parallel.group import ProcessGroup
from deepdraft.parallel.plan import check_size
from deepdraft.parallel.rank import PeerLost, Rank
from deepdraft.parallel.shards import Shards
from deepdraft.text.tokenizer import Tokenizer

T = TypeVar("T")
_LENGTH = struct.Struct("<I")
_MAX_COMMAND = 64 << 20


class Parked:
    """A sequence that was parked on every rank; what it is lies with each rank's runner."""

    def __init__(self, number: int, parked: Any) -> None:
        self.number, self.parked = number, parked


class LeadDraft(Draft):
    """A draft whose refinement every rank takes part in."""

    def __init__(self, runner: Leading, draft: Draft, number: int) -> None:
        super().__init__(draft._drafter, draft.start)
        self._runner, self.number = runner, number

    def refine(self, i: int, previous: int) -> tuple[Tensor, float]:
        """Logits [V] of draft i and its raw confidence, given the token before it."""
        logits_QV, raw = self._runner.refine([self], i, [previous])
        return logits_QV[0], raw[0]


class Leading(Runner):
    """Rank 0's side of any runner. `lead` comes before the first call."""

    def lead(self, me: Rank, check: Callable[[], None] = lambda: None) -> None:
        """From now on the other ranks follow. `check` raises where an exchange of the last call
        failed on the device."""
        self._me, self._check = me, check
        self.joint_rows, self.shortens = 0, False  # no commands of the others
        self.computes_here = False  # it waits for the others
        self._numbers: dict[SequenceState, int] = {}
        self._next = 0
        self._dropped: list[int] = []

    def _number(self, thing: Any) -> int:
        """A new number; the other ranks forget what it stands for when `thing` is gone here."""
        self._next += 1
        if not isinstance(thing, SequenceState):  # sequences are closed by a call
            weakref.finalize(thing, self._dropped.append, self._next)
        return self._next

    def _call(self, name: str, arguments: Sequence[Any], work: Callable[[], T]) -> T:
        dropped = []
        while self._dropped:
            dropped.append(self._dropped.pop())
        raw = json.dumps((name, arguments, dropped), separators=(",", ":")).encode()
        frame = _LENGTH.pack(len(raw)) + raw
        try:
            for fd in self._me.commands:
                view = memoryview(frame)
                while view:
                    view = view[os.write(fd, view) :]
            with self._me.pulse.step():
                made = work()
                self._check()
            return made
        except StateError:
            self._me.pulse.set_state("idle")
            raise
        except BaseException as error:
            end_by(self._me, error)

    def open_sequence(self) -> SequenceState:
        """A new, empty sequence; StateError when all are in use."""
        number = self._next + 1
        sequence = self._call("open", (number,), super().open_sequence)
        self._numbers[sequence] = self._number(sequence)
        return sequence

    def close_sequence(self, sequence: SequenceState, *, scrub: bool = False) -> None:
        """Give a sequence's memory back on every rank."""
        number = self._numbers.pop(sequence)
        self._call(
            "close", (number, scrub), lambda: Runner.close_sequence(self, sequence, scrub=scrub)
        )

    def park(self, sequence: SequenceState) -> Any:
        """Close a sequence and return what every rank needs to open it again."""
        number, slot = self._numbers[sequence], self._next + 1

        def work() -> Any:
            parked = sequence.save(), self._taps.get(sequence, [])
            Runner.close_sequence(self, sequence)
            return parked

        parked = Parked(slot, self._call("park", (number, slot), work))
        self._number(parked)
        del self._numbers[sequence]
        return parked

    def unpark(self, parked: Any) -> SequenceState:
        """A parked sequence, opened again; StateError when all are in use."""
        number = self._next + 1
        sequence = self._call(
            "unpark", (parked.number, number), lambda: Runner.unpark(self, parked.parked)
        )
        self._numbers[sequence] = self._number(sequence)
        return sequence

    def prefill(
        self, sequence: SequenceState, token_ids: Sequence[int], *, final: bool
    ) -> Tensor | None:
        """Append a chunk of the prompt; logits [V] after its last token when `final`."""
        return self._call(
            "prefill",
            (self._numbers[sequence], list(token_ids), final),
            lambda: Runner.prefill(self, sequence, token_ids, final=final),
        )

    def step(self, batch: Sequence[tuple[SequenceState, Sequence[int]]]) -> Tensor:
        """Append tokens to each sequence; logits [rows, V]."""
        told = [(self._numbers[sequence], list(ids)) for sequence, ids in batch]
        return self._call("step", (told,), lambda: Runner.step(self, batch))

    def commit(self, sequence: SequenceState, num_tokens: int) -> None:
        """The first `num_tokens` tokens stand; the rest of the last step is taken back."""
        self._call(
            "commit",
            (self._numbers[sequence], num_tokens),
            lambda: Runner.commit(self, sequence, num_tokens),
        )

    def draft(
        self, batch: Sequence[tuple[SequenceState, int]], size: int | None = None
    ) -> list[Draft]:
        """Begin a block of drafts for each sequence, all of `block_size`."""
        told = [(self._numbers[sequence], token_id) for sequence, token_id in batch]
        begun = self._call("draft", (told, self._next + 1), lambda: Runner.draft(self, batch))
        drafts: list[Draft] = []
        for draft in begun:
            drafts.append(one := LeadDraft(self, draft, self._next + 1))
            self._number(one)
        return drafts

    def refine(
        self, drafts: Sequence[Draft], i: int, previous: Sequence[int]
    ) -> tuple[Tensor, list[float]]:
        """Draft i of several blocks at once."""
        numbers = [draft.number for draft in drafts if isinstance(draft, LeadDraft)]
        return self._call(
            "refine",
            (numbers, i, list(previous)),
            lambda: Runner.refine(self, drafts, i, previous),
        )

    def feed_pending(self, *sequences: SequenceState) -> None:
        """Tell the drafter of confirmed tokens. Within `draft` every rank does so by itself."""
        Runner.feed_pending(self, *sequences)


class Follower:
    """Another rank's side: its runner, and what the numbers stand for."""

    def __init__(self, me: Rank, runner: Runner, check: Callable[[], None] = lambda: None) -> None:
        self._me, self._runner, self._check = me, runner, check
        self._things: dict[int, Any] = {}

    def run(self) -> None:
        """Follows until rank 0 ends."""
        (fd,) = self._me.commands
        self._me.pulse.set_state("idle")
        with os.fdopen(fd, "rb") as pipe:
            while head := pipe.read(_LENGTH.size):
                if len(head) < _LENGTH.size:
                    raise PeerLost("rank 0 ended in the middle of a command")
                (length,) = _LENGTH.unpack(head)
                raw = pipe.read(length)
                if len(raw) < length or length > _MAX_COMMAND:
                    raise PeerLost("rank 0 ended in the middle of a command")
                name, arguments, dropped = json.loads(raw)
                for number in dropped:
                    self._things.pop(number, None)
                self._follow(name, arguments)

    def _follow(self, name: str, arguments: Sequence[Any]) -> None:
        try:
            with self._me.pulse.step():
                getattr(self, f"_{name}")(*arguments)
                self._check()
        except StateError:
            self._me.pulse.set_state("idle")  # rank 0 was refused alike

    def _open(self, number: int) -> None:
        self._things[number] = self._runner.open_sequence()

    def _close(self, number: int, scrub: bool) -> None:
        self._runner.close_sequence(self._things.pop(number), scrub=scrub)

    def _park(self, number: int, slot: int) -> None:
        self._things[slot] = self._runner.park(self._things[number])
        del self._things[number]

    def _unpark(self, slot: int, number: int) -> None:
        self._things[number] = self._runner.unpark(self._things[slot])

    def _prefill(self, number: int, token_ids: list[int], final: bool) -> None:
        self._runner.prefill(self._things[number], token_ids, final=final)

    def _step(self, batch: list[tuple[int, list[int]]]) -> None:
        self._runner.step([(self._things[number], ids) for number, ids in batch])

    def _commit(self, number: int, num_tokens: int) -> None:
        self._runner.commit(self._things[number], num_tokens)

    def _draft(self, batch: list[tuple[int, int]], first: int) -> None:
        drafts = self._runner.draft([(self._things[number], i) for number, i in batch])
        self._things.update(enumerate(drafts, first))

    def _refine(self, numbers: list[int], i: int, previous: list[int]) -> None:
        self._runner.refine([self._things[number] for number in numbers], i, previous)


class LeadRunner(Leading):
    """Rank 0's runner of the torch model."""


def open_rank_runner(
    me: Rank, checkpoint: Checkpoint, tokenizer: Tokenizer, options: EngineConfig, **more: Any
) -> Runner:
    """This rank's runner; rank 0's leads. The checkpoint is published or this rank's part; `more`:
    of `Runner.from_checkpoint`. Waits for the other ranks. Raises ConfigError."""
    check_splits(checkpoint.args, me.size)
    me.pulse.set_state("loading")
    if options.device == "cuda":
        from deepdraft.engine.gpu_ranks import open_gpu_rank

        return open_gpu_rank(
            me,
            checkpoint,
            tokenizer,
            prefill=options.prefill,
            prefill_chunk=options.prefill_chunk,
            **more,
        )
    group = ProcessGroup(me.rank, me.size, me.store, pulse=me.pulse)
    shards = Shards(shard_plan(checkpoint.args, me.size), group)
    kind = Runner if me.rank else LeadRunner
    runner = kind.from_checkpoint(
        checkpoint,
        tokenizer,
        numerics=options.numerics,
        prefill=options.prefill,
        shards=shards,
        source=part_of(checkpoint, shards),
        **more,
    )
    if isinstance(runner, Leading):
        runner.lead(me)
    return runner


def part_of(checkpoint: Checkpoint, shards: Shards) -> Any:
    """A source of this rank's parts: a converted checkpoint holds them, a published one is cut."""
    return checkpoint if is_presharded(checkpoint.path) else shards.source(checkpoint)


def check_splits(args: Any, size: int) -> None:
    """Raises ConfigError for a family or a size that cannot be split."""
    if not isinstance(args, V41Args):
        raise ConfigError(
            f"tensor parallelism (--tp {size}) covers DeepSeek-V4.1; run this model with --tp 1"
        )
    check_size(args, size)


def follow(path: Path, options: EngineConfig, me: Rank) -> None:
    """Loads this rank's part of a model and follows rank 0 until it ends."""
    from deepdraft.engine.load import load_runner

    runner, *_ = load_runner(path, options, me)
    Follower(me, runner, getattr(runner, "check_exchanges", lambda: None)).run()


def end_by(me: Rank, error: BaseException) -> NoReturn:
    """Ends this process with the error's message for the parent."""
    if isinstance(error, DeepdraftError):
        me.end(error.message, peer_lost=isinstance(error, PeerLost))
    lost = isinstance(error, BrokenPipeError)
    me.end(f"{type(error).__name__}: {error}", peer_lost=lost)
