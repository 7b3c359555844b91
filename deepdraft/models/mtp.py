"""A next-token prediction layer as a drafter (docs/families.md, section Drafting): V3, V3.2, V4.

The layer makes h'_i of the model's hidden state h_i and token i+1, and its logits are those of
token i+2. Further drafts go through the same layer with h'_i in the place of the hidden state that
is not known yet. The layer has keys of its own: entry i holds what h_i and token i+1 give, so it is
one behind the text. Losing entries costs good drafts, never the text's law.

`NextTokenDrafter` keeps the books; a `PredictionLayer` is what a family puts in, here V3's.

Letters: R rows, Q sequences, D hidden, H a hidden state's values (D; in V4 all streams), V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from deepdraft.errors import StateError
from deepdraft.models.arithmetic import FamilyWeights
from deepdraft.models.deepseek_v2 import Block
from deepdraft.models.dspark import Refined
from deepdraft.models.mla import Turn
from deepdraft.models.sequence import Sequence as State
from deepdraft.models.sequence import StepRows
from deepdraft.ops.elementwise import rms_norm

BLOCK = 3
"""Drafts of a block, where nobody asks for another number; the layer was trained for the first."""


@dataclass(slots=True)
class MtpStart:
    """A block of drafts of one sequence, gone through in order."""

    sequence: State
    position: int
    """Entry of the first draft's input."""
    size: int
    hidden: list[Tensor] = field(default_factory=list)
    """h' [H] behind each draft made so far, the first draft's first."""

    def __len__(self) -> int:
        return self.size


class PredictionLayer(Protocol):
    """A family's layer. Hidden states are [R, H], one for each row of the step."""

    def store(self, rows: StepRows, hidden: Tensor) -> None:
        """Keep what the rows' tokens behind these hidden states leave in the layer's state."""
        ...

    def run(self, rows: StepRows, hidden: Tensor) -> Tensor:
        """h' [R, H]; state is kept as by `store`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """h' [R, H], two rows or more, to logits [R, V]."""
        ...


class NextTokenDrafter:
    """Which tokens the layer knows, and drafts of several sequences at once."""

    block_size = BLOCK

    def __init__(self, layer: PredictionLayer) -> None:
        self.layer = layer

    # ---- what is known ---------------------------------------------------------------------

    @torch.inference_mode()
    def feed_all(self, feeds: Sequence[tuple[State, Tensor, int]]) -> None:
        """Hidden states [n, H] of confirmed tokens of each sequence, from a position on."""
        work, hidden = [], []
        for sequence, taps, first in feeds:
            if sequence.tail is not None and sequence.tail[0] == first - 1:
                taps, first = torch.cat([sequence.tail[1].unsqueeze(0), taps]), first - 1
            last = first + taps.shape[0] - 1
            sequence.tail = last, taps[-1]
            if last > first:
                work.append((sequence, first, sequence.token_ids[first + 1 : last + 1]))
                hidden.append(taps[:-1])
        if not work:
            return
        rows = StepRows(work[0][0].pool, work)
        self.layer.store(rows, _filled(torch.cat(hidden), rows))

    # ---- drafts ----------------------------------------------------------------------------

    def start(self, batch: Sequence[tuple[State, int]], size: int) -> list[MtpStart]:
        """A block of `size` drafts for each sequence; the token stands behind its tokens.

        Raises StateError where the last hidden state is not known: nothing is changed then.
        """
        for sequence, _ in batch:
            if sequence.tail is None or sequence.tail[0] != sequence.num_tokens - 1:
                raise StateError("the hidden state of the last token is not known to the drafter")
        starts = [MtpStart(sequence, sequence.num_tokens - 1, size) for sequence, _ in batch]
        tails = [sequence.tail[1] for sequence, _ in batch if sequence.tail is not None]
        self._advance(starts, [token_id for _, token_id in batch], tails)
        return starts

    @torch.inference_mode()
    def refine(self, starts: Sequence[MtpStart], i: int, previous: Sequence[int]) -> Refined:
        """Draft i of each block, given the token before it: logits, and the log odds of the
        likeliest token as the confidence."""
        missing = [s for s in starts if len(s.hidden) == i]
        if missing:
            tokens = [p for s, p in zip(starts, previous, strict=True) if len(s.hidden) == i]
            self._advance(missing, tokens, [s.hidden[i - 1] for s in missing])
        h = torch.stack([s.hidden[i] for s in starts])
        if len(starts) == 1:  # a product of one row takes another path, with other bits
            h = h.expand(2, -1)
        logits = self.layer.logits(h)[: len(starts)]
        best = (logits.amax(-1) - logits.logsumexp(-1)).exp().clamp_(1e-6, 1.0 - 1e-6)
        return Refined(logits, torch.logit(best))

    @torch.inference_mode()
    def _advance(
        self, starts: Sequence[MtpStart], tokens: Sequence[int], hidden: Sequence[Tensor]
    ) -> None:
        """One row of each block through the layer."""
        work = [
            (s.sequence, s.position + len(s.hidden), [token])
            for s, token in zip(starts, tokens, strict=True)
        ]
        rows = StepRows(starts[0].sequence.pool, work)
        for sequence, position, _ in work:
            sequence.written = max(sequence.written, position + 1)
        out = self.layer.run(rows, _filled(torch.stack(list(hidden)), rows))
        for row, start in enumerate(starts):
            start.hidden.append(out[row])


def _filled(hidden: Tensor, rows: StepRows) -> Tensor:
    """[R, H] of fewer hidden states, where rows are padded."""
    return hidden.expand(rows.padded, -1) if hidden.shape[0] < rows.padded else hidden


class LatentPrediction:
    """The layer of V3 and V3.2:

    x_i = eh_proj [ enorm(embedding of token i+1) ; hnorm(h_i) ],  h_i the normed last hidden state
    h'_i = block(x_i),  logits of token i+2 = head( norm(h'_i) )

    Embedding and head are the model's.
    """

    def __init__(
        self,
        block: Block,
        weights: FamilyWeights,
        prefix: str,
        *,
        embed: Tensor,
        head: Tensor,
        eps: float,
        turns: Callable[[Tensor], tuple[Turn, ...]],
    ) -> None:
        """`turns`: rotations of the positions that are given."""
        self.block, self.eps, self.turns = block, eps, turns
        self.act = weights.num.act
        self.embed, self.head = embed, head
        self.enorm = weights.vector(f"{prefix}.enorm.weight")
        self.hnorm = weights.vector(f"{prefix}.hnorm.weight")
        self.norm = weights.vector(f"{prefix}.shared_head.norm.weight")
        self.w_in = weights.map(f"{prefix}.eh_proj.weight")

    def store(self, rows: StepRows, hidden: Tensor) -> None:
        """See `PredictionLayer`."""
        u = self.act(rms_norm(self._inputs(rows, hidden), self.block.norms[0], self.eps))
        self.block.store(u, rows, self.turns(rows.position))

    def run(self, rows: StepRows, hidden: Tensor) -> Tensor:
        """See `PredictionLayer`."""
        return self.block(self._inputs(rows, hidden), rows, self.turns(rows.position), None)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `PredictionLayer`."""
        return torch.mm(self.act(rms_norm(hidden, self.norm, self.eps)), self.head)

    def _inputs(self, rows: StepRows, hidden: Tensor) -> Tensor:
        """x [R, D]."""
        tokens = rms_norm(self.embed.index_select(0, rows.token_ids), self.enorm, self.eps)
        both = torch.cat([tokens, rms_norm(hidden, self.hnorm, self.eps)], 1)
        return self.w_in(self.act(both))
