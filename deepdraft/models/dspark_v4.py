"""V4's DSpark drafter: the layers stored with a later release of the model (docs/families.md).

Conditioning: mean streams behind some layers, of confirmed tokens, become window keys in a ring of
each drafter layer. A draft runs the last token and noise tokens through the layers at once, every
row seeing the window and the whole block; then a Markov correction is added token by token. Other
than V4.1's (`dspark`): V4's blocks, all experts, a learned mix of its own behind the last layer.

Several sequences are drafted together; a sequence's bits do not depend on the others.

Letters: B drafts of a block, Q sequences, R = Q * B rows, S streams, D hidden, V vocabulary, W
window, N places.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from deepdraft.arch import V4Args
from deepdraft.errors import StateError
from deepdraft.models.arithmetic import FamilyWeights
from deepdraft.models.dspark import DraftStart, Refined
from deepdraft.models.sequence import Sequence as State
from deepdraft.models.v4_layers import Attention, Block, HeadMix, Turn
from deepdraft.ops.blocked import whole_blocks
from deepdraft.ops.elementwise import rms_norm
from deepdraft.ops.rope import RopeTable

KIND = "drafter"


def present(args: V4Args, weights: FamilyWeights) -> bool:
    """Whether the checkpoint holds DSpark layers."""
    table = getattr(weights.source, "table", {})
    return args.dspark_block_size > 0 and "mtp.0.main_proj.weight" in table


class Drafter:
    """All drafter layers and the heads on top of them."""

    def __init__(
        self,
        args: V4Args,
        weights: FamilyWeights,
        ropes: dict[str, RopeTable],
        *,
        embed: Tensor,
        head: Tensor,
    ) -> None:
        count = args.num_nextn_predict_layers
        self.args, self.act, self.eps = args, weights.num.act, args.rms_norm_eps
        self.block_size = args.dspark_block_size
        self.rope, self.embed, self.head = ropes["window"], embed, head
        self.blocks = [
            Block(
                args,
                weights,
                f"mtp.{number}",
                Attention(args, weights, f"mtp.{number}.attn", ropes, layer=number),
            )
            for number in range(count)
        ]
        last = f"mtp.{count - 1}"
        self.main_proj = weights.map("mtp.0.main_proj.weight")
        self.main_norm = weights.vector("mtp.0.main_norm.weight")
        self.ring_kv = [weights.map(f"mtp.{n}.attn.wkv.weight") for n in range(count)]
        self.head_mix = HeadMix(args, weights, f"{last}.")
        self.norm = weights.vector(f"{last}.norm.weight")
        self.markov_embed = self.act(weights.vector(f"{last}.markov_head.markov_w1.weight"))
        self.markov_head = weights.linear(f"{last}.markov_head.markov_w2.weight")
        self.confidence = weights.vector(f"{last}.confidence_head.proj.weight").view(-1)

    # ---- what is known ---------------------------------------------------------------------

    @torch.inference_mode()
    def feed_all(self, feeds: Sequence[tuple[State, Tensor, int]]) -> None:
        """Taps [n, targets * D] of confirmed tokens of each sequence, from a position on."""
        feeds = [feed for feed in feeds if feed[1].shape[0]]
        if not feeds:
            return
        pool = feeds[0][0].pool
        kind, size = pool.kinds[KIND], pool.entries[KIND]
        kept, positions, rows = [], [], []
        for sequence, taps, first in feeds:
            end = first + taps.shape[0]
            if end > sequence.num_tokens:
                raise StateError(
                    f"drafter rows up to position {end - 1}, but only {sequence.num_tokens} tokens "
                    "are confirmed"
                )
            skip = max(0, taps.shape[0] - size)  # these would be overwritten at once
            places = np.arange(first + skip, end)
            kept.append(taps[skip:])
            positions.append(places)
            rows.append(sequence.address(kind, places))
        taps, to = torch.cat(kept), torch.cat(rows)
        at = torch.from_numpy(np.concatenate(positions)).to(taps.device)
        if taps.shape[0] == 1:  # a product of one row takes another path, with other bits
            taps, at, to = taps.expand(2, -1), at.repeat(2), to.repeat(2)
        main = self.act(rms_norm(self.main_proj(taps), self.main_norm, self.eps))
        turn = self.rope.table(at)
        for number, block in enumerate(self.blocks):
            kv = block.attention.window_key(self.ring_kv[number](main), turn)
            pool.rows[KIND][number].index_copy_(0, to, kv)
        for sequence, taps, first in feeds:
            if first > sequence.fed[1]:
                sequence.fed = first, first  # a gap: what lies below cannot be reached
            sequence.fed = sequence.fed[0], first + taps.shape[0]

    # ---- drafts ----------------------------------------------------------------------------

    @torch.inference_mode()
    def start(self, batch: Sequence[tuple[State, int]], size: int) -> list[DraftStart]:
        """The layers' pass over a block of `size` drafts of each sequence; the token stands right
        after the confirmed ones. Raises StateError where the drafter was not told of them all."""
        args, pool = self.args, batch[0][0].pool
        rows, window = max(size, 2), args.sliding_window  # a single row is padded by a second one
        back = np.arange(window - 1, -1, -1)
        zero = pool.rows[KIND].shape[1] - 1
        extra = whole_blocks(window + 1 + rows) - window - 1 - rows
        # Window by position, the sink's zero key, the block itself, places that fill the last.
        tail = np.concatenate([np.zeros(1 + size), np.full(rows - size + extra, -np.inf)])
        address, bias, positions, ids = [], [], [], []
        for sequence, token_id in batch:
            n = sequence.num_tokens
            if sequence.fed[1] != n or not n:
                raise StateError(f"the drafter was told of {sequence.fed[1]} of {n} tokens")
            look = n - 1 - back
            slots = sequence.address(pool.kinds[KIND], np.maximum(look, 0))
            address.append(torch.cat([slots, torch.tensor([zero], device=slots.device)]))
            there = np.where(look >= max(0, sequence.fed[0]), 0.0, -np.inf)
            bias.append(np.concatenate([there, tail]))
            positions.append(np.arange(n, n + rows))
            ids.extend([token_id] + [args.dspark_noise_token_id] * (rows - 1))
        device = self.embed.device
        places = torch.from_numpy(np.stack(bias)).to(device, pool.dtype).repeat_interleave(rows, 0)
        turn = self.rope.table(torch.from_numpy(np.concatenate(positions)).to(device))
        token_ids = torch.tensor(ids, device=device)
        x = self.embed.index_select(0, token_ids).unsqueeze(1)
        x = x.expand(-1, args.hc_mult, -1).contiguous()
        where = torch.cat(address)
        for number, block in enumerate(self.blocks):
            context = (
                pool.rows[KIND][number].index_select(0, where).view(len(batch), window + 1, -1)
            )

            def attend(
                u: Tensor, attn: Attention = block.attention, seen: Tensor = context
            ) -> Tensor:
                return self._attend(attn, u, turn, seen, places, extra)

            x = block.run(x, attend, token_ids, len(ids))
        h = self.head_mix(x)
        base = torch.mm(self.act(rms_norm(h, self.norm, self.eps)), self.head)
        return [
            DraftStart(
                sequence.num_tokens + 1,
                base[i * rows : i * rows + size],
                h[i * rows : i * rows + size],
            )
            for i, (sequence, _) in enumerate(batch)
        ]

    def _attend(
        self, attn: Attention, u: Tensor, turn: Turn, context: Tensor, places: Tensor, extra: int
    ) -> Tensor:
        """u [R, D] over context [Q, W + 1, C] and the block's own keys; places [R, N]: 0 where
        there is a key."""
        _, q, kv = attn.latents(u, turn)
        count = context.shape[0]
        rows = u.shape[0] // count
        keys = torch.cat([context, kv.view(count, rows, -1)], 1)
        keys = torch.nn.functional.pad(keys, (0, 0, 0, extra)).repeat_interleave(rows, 0)
        bias = places.unsqueeze(1).repeat(1, attn.heads, 1)
        bias[:, :, context.shape[1] - 1] = attn.sink
        return attn.attend(q, keys, bias, turn)

    @torch.inference_mode()
    def refine(self, starts: Sequence[DraftStart], i: int, previous: Sequence[int]) -> Refined:
        """Draft i of each block, given the token before it."""
        e = self.markov_embed[torch.tensor(previous, device=self.embed.device)]
        hidden = torch.stack([start.hidden[i] for start in starts])
        bias = torch.mm(e.expand(2, -1) if len(starts) == 1 else e, self.markov_head)
        logits = torch.stack([start.base_logits[i] for start in starts]).add_(bias[: len(starts)])
        return Refined(logits, torch.cat([hidden, e], 1).mul_(self.confidence).sum(1))
