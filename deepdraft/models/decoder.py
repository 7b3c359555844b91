"""What all families but V4.1 share as models: steps, prefill, embedding and head, plain MLPs.

Owns: the checks of a step, its order, and the interface that the engine sees (the same as
`DeepseekV41`'s). A family's file owns its layers. Knows nothing of: files, requests, sampling.

A row's bits do not depend on the other rows of a step, so any cutting of a text into steps gives
the same state and logits, bit for bit (docs/numerics.md).

Letters: R rows, D hidden, F MLP width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Literal

import torch
from torch import Tensor

from deepdraft.arch import StateKind
from deepdraft.errors import CheckpointError, ConfigError, StateError
from deepdraft.models.arithmetic import (
    Arithmetic,
    FamilyWeights,
    check_numerics,
    make_arithmetic,
    scale_powers,
)
from deepdraft.models.deepseek_v41 import StepOutput
from deepdraft.models.layers import WeightSource
from deepdraft.models.sequence import Sequence, SequencePool, StepRows
from deepdraft.ops.elementwise import rms_norm, silu

Record = dict[str, dict[str, Tensor]]
Wanted = Literal["all", "last", "none"]
Work = Seq[tuple[Sequence, Seq[int]]]


class DecoderModel:
    """Base of the families' models. All methods run without gradients; one thread at a time.

    A family's class sets `names` (embedding, last norm, head), makes its layers in `build` and runs
    them in `layers`; what a sequence keeps, its args say.
    """

    names: tuple[str, str, str] = (
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    )
    drafter: Any = None

    def __init__(
        self,
        args: Any,
        source: WeightSource,
        token_map: list[int] | None = None,
        *,
        numerics: str = "exact",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        drafter: bool = False,
    ) -> None:
        """`token_map` is there for the engine, which makes all families alike: no family but V4.1
        has an n-gram memory. `drafter`: build the checkpoint's drafter, if it has one."""
        check_numerics(numerics, args, source)
        self.args = args
        self.device = device
        self.num = make_arithmetic(numerics, dtype, powers=scale_powers(args, source))
        self.dtype, self.eps = dtype, args.rms_norm_eps
        self.weights = FamilyWeights(source, self.num, device)
        embed, norm, head = self.names
        self.embed = self.weights.vector(embed)
        self.norm = self.weights.vector(norm)
        self.head = self._head(source, embed, head)
        self.drafting = drafter
        self.build()

    # ---- what a family owns ----------------------------------------------------------------

    def build(self) -> None:
        """Make the layers from `self.args` and `self.weights`."""
        raise NotImplementedError

    def layers(self, x: Tensor, rows: StepRows, record: Record | None) -> Tensor:
        """Embedded rows [R, D] through all layers -> [R, D] before the last norm."""
        raise NotImplementedError

    def taps(self, x: Tensor) -> Tensor:
        """What the drafter is told of rows [R, D] before the last norm: [R, ...]."""
        return self.num.act(rms_norm(x, self.norm, self.eps))

    # ---- step ------------------------------------------------------------------------------

    def _head(self, source: WeightSource, embed: str, head: str) -> Tensor:
        """[D, V]. A tied head that is stored as well must equal the embedding."""
        if not self.args.tie_word_embeddings:
            return self.weights.linear(head)
        table = getattr(source, "table", {})
        if head in table and not torch.equal(self.weights.vector(head), self.embed):
            raise CheckpointError(
                f"config.json sets tie_word_embeddings, but {head} differs from {embed}; one of "
                "the two is wrong"
            )
        return self.embed.t().contiguous()

    @property
    def state_kinds(self) -> tuple[StateKind, ...]:
        """What a sequence keeps."""
        return self.args.state_kinds

    def new_pool(self, num_sequences: int, max_tokens: int, slack: int = 16) -> SequencePool:
        """State for this many sequences; a step takes up to `slack` rows of each."""
        return SequencePool(
            self.state_kinds,
            max_positions=self.args.max_position_embeddings,
            num_sequences=num_sequences,
            max_tokens=max_tokens,
            slack=slack,
            dtype=self.dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def step(
        self, work: Work, *, logits: Wanted = "all", record: Record | None = None
    ) -> StepOutput:
        """Run the next tokens of each sequence through all layers and append them.

        work: (sequence, token ids) per sequence, each sequence once, at most `slack` ids each, all
        of one pool. `logits`: of all rows, of each sequence's last row, or of none.
        """
        self._check(work)
        rows = StepRows(work[0][0].pool, [(s, s.num_tokens, new) for s, new in work])
        x = self.layers(self.embed.index_select(0, rows.token_ids), rows, record)
        for sequence, new in work:
            sequence.token_ids.extend(new)
            sequence.written = max(sequence.written, sequence.num_tokens)
        n, taps = rows.num_rows, None
        if self.drafter is not None:
            taps = self.taps(x)[:n]
        if logits == "none":
            return StepOutput(None, taps)
        if logits == "last" and len(work) < n:
            ends = [span.end - 1 for span in rows.spans]
            pick = torch.tensor(ends if len(ends) > 1 else ends * 2, device=self.device)
            x, n = x.index_select(0, pick), len(work)
        scores = torch.mm(self.num.act(rms_norm(x, self.norm, self.eps)), self.head)
        return StepOutput(scores[:n], taps, x[:n])

    def _check(self, work: Work) -> None:
        """Refuse what a step cannot do, before anything is written."""
        if not work or len({id(s) for s, _ in work}) < len(work):
            raise StateError("a step takes at least one sequence, and each only once")
        if len({id(s.pool) for s, _ in work}) > 1:
            raise StateError("the sequences of a step must lie in one pool")
        for sequence, new in work:
            if not new or len(new) > sequence.pool.slack:
                raise StateError(
                    f"a step takes 1 to {sequence.pool.slack} tokens a sequence, got {len(new)}"
                )
            self._check_room(sequence, new)

    def _check_room(self, sequence: Sequence, ids: Seq[int]) -> None:
        """Refuse ids that are no tokens and texts that are too long."""
        limit, size = sequence.pool.max_tokens, self.args.vocab_size
        if sequence.num_tokens + len(ids) > limit:
            raise StateError(
                f"{sequence.num_tokens} + {len(ids)} tokens do not fit a sequence of at most "
                f"{limit}"
            )
        if min(ids) < 0 or max(ids) >= size:
            raise StateError(f"token ids must lie in 0..{size - 1}, got {min(ids)}..{max(ids)}")

    def prefill(
        self,
        sequence: Sequence,
        token_ids: Seq[int],
        *,
        mode: str = "full",
        final: bool = True,
        logits: Wanted = "last",
        feed_drafter: bool = False,
    ) -> StepOutput:
        """Append a chunk of a prompt of any length; the same bits as steps of any size.

        Returns logits after the last token (or of all rows) when `final`.
        """
        if mode != "full":
            raise ConfigError(
                f"prefill {mode!r} needs a model with an encoder half (DeepSeek-V4.1); "
                f"{self.args.family} models prefill in full"
            )
        if not token_ids:
            raise StateError("prefill needs at least one token")
        self._check_room(sequence, token_ids)
        out, parts, slack = StepOutput(None, None), [], sequence.pool.slack
        for at in range(0, len(token_ids), slack):
            piece = token_ids[at : at + slack]
            last = final and at + len(piece) == len(token_ids)
            out = self.step(
                [(sequence, piece)], logits="none" if logits == "last" and not last else logits
            )
            parts.append(out.logits)
            if feed_drafter and out.taps is not None:
                self.feed_drafter(sequence, out.taps, sequence.num_tokens - len(piece))
        if logits == "all":
            out.logits = torch.cat([part for part in parts if part is not None])
        return out

    def feed_drafter(self, sequence: Sequence, taps: Tensor, first: int) -> None:
        """Tell the drafter of confirmed tokens. Raises ConfigError where there is none."""
        if self.drafter is None:
            raise ConfigError(f"no drafter is built for {self.args.family} models")
        self.drafter.feed_all([(sequence, taps, first)])


class GatedMlp:
    """down(silu(gate x) * up x), without biases."""

    def __init__(self, weights: FamilyWeights, prefix: str) -> None:
        self.gate_up = weights.map(f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight")
        self.down = weights.map(f"{prefix}.down_proj.weight")
        self.act = weights.num.act

    def __call__(self, x: Tensor) -> Tensor:
        """x [R, D] -> [R, D]."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(self.act(silu(gate).mul_(up)))


def residual_block(
    x: Tensor,
    norms: tuple[Tensor, Tensor],
    eps: float,
    num: Arithmetic,
    attention: Callable[[Tensor], Tensor],
    mlp: Callable[[Tensor], Tensor],
    note: dict[str, Tensor] | None,
) -> Tensor:
    """A pre-norm block: x + attention(norm x), then plus mlp(norm of that). x [R, D]."""
    a = attention(num.act(rms_norm(x, norms[0], eps)))
    mid = num.act(x + a)
    m = mlp(num.act(rms_norm(mid, norms[1], eps)))
    if note is not None:
        note.update(stream_in=x, attn_out=a, ffn_out=m)
    return num.act(mid + m)
