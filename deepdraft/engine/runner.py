"""A loaded model and the state of the sequences it serves.

Owns: the model, its state pool, the prefill mode, what the drafter has yet to be told. Only the
engine's thread calls it.
Knows nothing of: requests, text, sampling, verification.

A model without a drafter may draft from the text itself (`spec.ngram`), without any conditioning.

Drafting: `step` appends tokens, drafts among them, and keeps the drafter's conditioning (taps);
`commit` says how many tokens of a sequence stand and takes the rest back; `draft` first tells the
drafter of the positions confirmed since the last draft. So plain steps cost the drafter nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.errors import ConfigError, StateError
from deepdraft.models import model_class
from deepdraft.models.deepseek_v41 import DeepseekV41, PrefillMode
from deepdraft.models.dspark import Drafter, DraftStart
from deepdraft.models.layers import WeightSource
from deepdraft.models.state import SequenceState, StatePool
from deepdraft.parallel.shards import Shards
from deepdraft.spec.ngram import History
from deepdraft.text.tokenizer import Tokenizer, engram_token_map

STEP_ROWS = 64
"""Rows of one sequence that a step takes at most; a ring has this many spare rows."""

JOINT_ROWS = 96
"""Rows of one step that short parts of several prompts share; up to so many are proven to have the
same bits alone and together."""
MAX_DRAFTS = 15
"""Drafts of one sequence in a step at most."""
LOOKUP_DRAFTS = 7
"""Proposals from the text itself, unless `num_drafts` says otherwise."""


class Draft:
    """A block of proposals of one sequence, to be gone through in order."""

    def __init__(self, drafter: Drafter, start: DraftStart) -> None:
        self._drafter, self.start = drafter, start

    def __len__(self) -> int:
        return len(self.start)

    def refine(self, i: int, previous: int) -> tuple[Tensor, float]:
        """Logits [V] of draft i and its raw confidence, given the token before it."""
        refined = self._drafter.refine([self.start], i, [previous])
        return refined.logits[0], float(refined.raw[0])


class LookupDraft:
    """Proposals from the text itself: each is certain, and its confidence grows with the match."""

    def __init__(self, token_ids: list[int], match: int, like: Tensor) -> None:
        self.token_ids, self.match, self._like = token_ids, match, like

    def __len__(self) -> int:
        return len(self.token_ids)

    def refine(self, i: int, previous: int) -> tuple[Tensor, float]:
        """Logits [V] that allow token i alone, and the raw confidence of a match so long."""
        logits = torch.full_like(self._like, -torch.inf)
        if i < len(self.token_ids):
            logits[self.token_ids[i]] = 0.0
        # Its sigmoid is n / (n + 1) for a match of n tokens, those that were drafted included.
        return logits, math.log(max(self.match, 1) + i)


class Runner:
    """Runs prompts and steps of up to `num_sequences` sequences."""

    def __init__(
        self,
        model: DeepseekV41,
        *,
        prefill: PrefillMode = "full",
        max_context: int | None = None,
        num_sequences: int = 1,
        step_rows: int = STEP_ROWS,
        num_drafts: int | None = None,
        state_bytes: int | None = None,
        lookup: bool = False,
    ) -> None:
        """`state_bytes`: memory for sequences, which may allow fewer of them; None: any amount.
        `num_drafts`: proposals of a draft; None: what the checkpoint's drafter was trained for;
        0: the drafter is not used. `lookup`: a model without a drafter drafts from the text."""
        limit = model.args.max_position_embeddings
        if max_context is not None and not 2 <= max_context <= limit:
            raise ConfigError(
                f"max_context must lie in 2..{limit} (max_position_embeddings of the model), "
                f"got {max_context}"
            )
        if prefill not in ("full", "encoder"):
            raise ConfigError(f"prefill must be full or encoder, got {prefill!r}")
        lookup = lookup and model.drafter is None and num_drafts != 0
        own = LOOKUP_DRAFTS if lookup else 0
        if model.drafter is not None:
            own = getattr(model.drafter, "block_size", 0) or model.args.dspark_block_size
        if num_drafts is not None and not 0 <= num_drafts <= (MAX_DRAFTS if own else 0):
            raise ConfigError(
                f"drafts must lie in 0..{MAX_DRAFTS}, got {num_drafts}"
                if own
                else f"this model was loaded without a drafter; drafts must be 0, got {num_drafts}"
            )
        self.model = model
        self.block_size = own if num_drafts is None else num_drafts
        self.prefill_mode: PrefillMode = prefill
        self.vocab_size = model.args.vocab_size
        self.max_tokens = max_context or limit
        self.max_step_rows = step_rows
        self.device = model.device
        self.computes_here = torch.device(self.device).type == "cpu"
        """What a call takes is the calling thread's processor time."""
        on_cpu = type(model) is DeepseekV41
        self.joint_rows = JOINT_ROWS if on_cpu and prefill == "full" else 0
        """Rows of parts that `prefill_together` takes at once; 0: it takes none."""
        self.shortens = on_cpu and model.drafter is not None
        """`draft` makes blocks of a given size too."""
        if state_bytes is not None:
            num_sequences = self._that_fit(num_sequences, state_bytes)
        self.num_sequences = num_sequences
        self.pool: StatePool = model.new_pool(num_sequences, self.max_tokens, slack=step_rows)
        self._taps: dict[SequenceState, list[tuple[int, Tensor]]] = {}
        self._histories: WeakKeyDictionary[Any, History] | None = None
        if lookup:
            self._histories = WeakKeyDictionary()
            self._like = torch.empty(self.vocab_size, device=self.device)

    def _that_fit(self, num_sequences: int, state_bytes: int) -> int:
        """How many sequences there is room for. Raises ConfigError where that is none."""
        pool = self.model.new_pool(1, self.max_tokens, slack=self.max_step_rows)
        fitting = state_bytes // pool.allocated_bytes
        if not fitting:
            raise ConfigError(
                f"the state of one sequence of {self.max_tokens} tokens takes "
                f"{pool.allocated_bytes >> 20} MiB, and {state_bytes >> 20} MiB are set aside: "
                "raise state_memory, or lower max_context"
            )
        return min(num_sequences, fitting)

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer | None,
        *,
        numerics: str = "exact",
        prefill: PrefillMode = "full",
        max_context: int | None = None,
        num_sequences: int = 1,
        device: torch.device | str = "cpu",
        drafter: bool = False,
        num_drafts: int | None = None,
        state_bytes: int | None = None,
        shards: Shards | None = None,
        source: WeightSource | None = None,
    ) -> Self:
        """Load the model of a checkpoint. Errors name the tensor, key or file.

        `shards`: this rank's share of a model that several processes run; `source` then gives the
        rank's parts of the weights.
        """
        more = {} if shards is None else {"shards": shards}
        token_map = None
        if checkpoint.args.engram_layer_ids:
            if tokenizer is None:
                raise ConfigError("a model with Engram layers needs its tokenizer.json")
            token_map = checked_token_map(checkpoint, tokenizer)
        model = model_class(checkpoint.args)(
            checkpoint.args,
            source or checkpoint,
            token_map,
            numerics=numerics,
            device=device,
            drafter=drafter,
            **more,
        )
        return cls(
            model,
            prefill=prefill,
            max_context=max_context,
            num_sequences=num_sequences,
            num_drafts=num_drafts,
            state_bytes=state_bytes,
            lookup=drafter,
        )

    @property
    def num_free(self) -> int:
        """Sequences that can still be opened."""
        return self.pool.num_free

    def open_sequence(self) -> SequenceState:
        """A new, empty sequence; StateError when all are in use."""
        return self.pool.open()

    def close_sequence(self, sequence: SequenceState, *, scrub: bool = False) -> None:
        """Give a sequence's memory back. `scrub` where it may hold NaN or infinities."""
        self._taps.pop(sequence, None)
        if scrub:
            self.pool.scrub(sequence)
        self.pool.close(sequence)

    def park(self, sequence: SequenceState) -> tuple[Any, list[tuple[int, Tensor]]]:
        """Close a sequence and return all that it is, in host memory."""
        saved = sequence.save()
        taps = self._taps.get(sequence, [])
        self.close_sequence(sequence)
        return saved, taps

    def unpark(self, parked: tuple[Any, list[tuple[int, Tensor]]]) -> SequenceState:
        """A parked sequence, opened again; StateError when all are in use."""
        saved, taps = parked
        sequence = self.pool.restore(saved)
        if taps:
            self._taps[sequence] = taps
        return sequence

    def prefill(
        self, sequence: SequenceState, token_ids: Sequence[int], *, final: bool
    ) -> Tensor | None:
        """Append a chunk of the prompt; logits [V] after its last token when `final`."""
        out = self.model.prefill(
            sequence,
            token_ids,
            mode=self.prefill_mode,
            final=final,
            feed_drafter=self.block_size > 0,
        )
        return out.logits[-1] if out.logits is not None else None

    def joins(self, sequence: SequenceState, num_tokens: int) -> bool:
        """Whether `prefill_together` takes a part of so many tokens: it replays nothing."""
        waits = sequence.replay_from is not None or sequence.decoder_tokens < sequence.num_tokens
        return num_tokens <= min(self.max_step_rows, self.joint_rows) and not waits

    def prefill_together(
        self, batch: Sequence[tuple[SequenceState, Sequence[int]]]
    ) -> list[Tensor]:
        """`prefill` of several sequences in one step, with the bits that each has alone.

        Each part is one that `joins`; all have at most `joint_rows` tokens together. Returns logits
        [V] after the last token of each.
        """
        firsts = [sequence.num_tokens for sequence, _ in batch]
        out = self.model.step(batch, logits="last")
        assert out.logits is not None
        if self.block_size and out.taps is not None:
            taps = out.taps.split([len(token_ids) for _, token_ids in batch])
            feeds = [(s, t, n) for (s, _), t, n in zip(batch, taps, firsts, strict=True)]
            assert self.model.drafter is not None
            with torch.inference_mode():
                self.model.drafter.feed_all(feeds)
        return list(out.logits)

    def step(self, batch: Sequence[tuple[SequenceState, Sequence[int]]]) -> Tensor:
        """Append tokens to each sequence; logits [rows, V], row i after that token."""
        firsts = [sequence.num_tokens for sequence, _ in batch]
        out = self.model.step(batch)
        if self.block_size and out.taps is not None:
            at = 0
            for (sequence, token_ids), first in zip(batch, firsts, strict=True):
                self._note(sequence, first, out.taps[at : at + len(token_ids)])
                at += len(token_ids)
        assert out.logits is not None
        return out.logits

    def _note(self, sequence: SequenceState, first: int, taps: Tensor) -> None:
        notes = self._taps.setdefault(sequence, [])
        notes.append((first, taps))
        # What lies a whole ring back is out of the drafter's sight.
        while notes[0][0] + notes[0][1].shape[0] <= first - self.pool.ring:
            del notes[0]

    def commit(self, sequence: SequenceState, num_tokens: int) -> None:
        """The first `num_tokens` tokens stand; the rest of the last step is taken back."""
        sequence.truncate(num_tokens)
        notes = self._taps.get(sequence)
        if notes:
            first, taps = notes[-1]
            notes[-1] = (first, taps[: max(0, num_tokens - first)])

    def draft(
        self, batch: Sequence[tuple[SequenceState, int]], size: int | None = None
    ) -> list[Any]:
        """Begin a block of `size` drafts for each sequence, `block_size` unless it is given and
        `shortens`; the token stands right after the confirmed ones. Raises StateError, and the
        sequences are as they were."""
        if self._histories is not None:
            return [self._look_up(sequence, token_id) for sequence, token_id in batch]
        drafter = self.model.drafter
        if drafter is None or not self.block_size:
            raise StateError("there is no drafter here")
        self.feed_pending(*(sequence for sequence, _ in batch))
        return [Draft(drafter, start) for start in drafter.start(batch, size or self.block_size)]

    def _look_up(self, sequence: SequenceState, token_id: int) -> LookupDraft:
        assert self._histories is not None
        history = self._histories.setdefault(sequence, History())
        history.update(sequence.token_ids)
        return LookupDraft(*history.propose(token_id, self.block_size), self._like)

    def refine(
        self, drafts: Sequence[Any], i: int, previous: Sequence[int]
    ) -> tuple[Tensor, list[float]]:
        """Draft i of several blocks at once, with the bits that each has alone: logits [Q, V] and
        raw confidences, given the token before it in each."""
        if self._histories is not None:
            found = [d.refine(i, p) for d, p in zip(drafts, previous, strict=True)]
            return torch.stack([logits for logits, _ in found]), [raw for _, raw in found]
        drafter = self.model.drafter
        assert drafter is not None
        refined = drafter.refine([draft.start for draft in drafts], i, previous)
        return refined.logits, refined.raw.tolist()

    def feed_pending(self, *sequences: SequenceState) -> None:
        """Tell the drafter, if there is one, of the tokens confirmed since the last draft."""
        drafter = self.model.drafter
        if drafter is None or not self.block_size:
            return
        feeds, done = [], []
        for sequence in sequences:
            notes = self._taps.get(sequence)
            if notes:
                taps = notes[0][1] if len(notes) == 1 else torch.cat([t for _, t in notes])
                feeds.append((sequence, taps, notes[0][0]))
                done.append(notes)
        with torch.inference_mode():
            drafter.feed_all(feeds)
        for notes in done:
            notes.clear()


def checked_token_map(checkpoint: Checkpoint, tokenizer: Tokenizer) -> list[int]:
    """The Engram token map, checked against the size that the checkpoint was trained with."""
    token_map = engram_token_map(tokenizer)
    args = checkpoint.args
    size = max(token_map) + 1
    if size != args.engram_compressed_vocab_size:
        raise ConfigError(
            f"text_config.engram_compressed_vocab_size is {args.engram_compressed_vocab_size}, but "
            f"the tokenizer in {checkpoint.tokenizer_file} gives {size} compressed ids; the "
            f"tokenizer does not belong to this checkpoint"
        )
    if len(token_map) < args.vocab_size:
        token_map = token_map + [token_map[args.engram_pad_token_id]] * (
            args.vocab_size - len(token_map)
        )
    return token_map
