"""Device memory of V4.1 sequences at fixed addresses, in the published record formats.

Owns: packed caches and rings, tokens, floors, rotary tables of up to `num_sequences` sequences; the
rows' inputs of one step. Kernels read lengths from these, so a captured graph stays valid.
Knows nothing of: weights, layers' arithmetic, requests.

Letters: S sequences, W window, C head width, Ci index width, P rotary pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepdraft.arch import V41Args
from deepdraft.errors import StateError
from deepdraft.kernels.cache import record_bytes
from deepdraft.kernels.runtime import padded_rows
from deepdraft.ops.elementwise import Rotary

ENCODER, DECODER, DRAFTER = range(3)
"""Columns of `floors`."""


class DeviceCaches:
    """window [layers + drafters][S * ring, C + C/32], views of window_rows; main and index
    {source: [S * entries, *]}; pending {source: float32 [S * pending_ring, 2C]} (ratio 2); all but
    that are bytes; tokens int32 [S, context]; floors int32 [S, 3]; turns float32 [context, 4, P].
    """

    def __init__(
        self,
        args: V41Args,
        *,
        num_sequences: int,
        max_tokens: int,
        spare: int,
        device: torch.device | str,
    ) -> None:
        """`spare`: rows of a ring beyond the window, at least the rows of one sequence in a step
        and the drafter's block."""
        if max_tokens > args.max_position_embeddings:
            raise StateError(
                f"a sequence of {max_tokens} tokens was asked for, but the model's positions end "
                f"at {args.max_position_embeddings} (max_position_embeddings)"
            )
        self.args, self.num_sequences, self.max_tokens = args, num_sequences, max_tokens
        self.ring = args.sliding_window + max(spare, args.dspark_block_size)
        self.pending_ring = spare + 2
        # A block may be drafted behind the last token that fits.
        self.context = max_tokens + args.dspark_block_size + 1
        self.entries = (max_tokens, -(-max_tokens // 2))
        layers = args.num_hidden_layers + args.num_nextn_predict_layers
        sources = args.kv_source_layer_ids
        ratio = {source: args.compress_ratios[source] for source in sources}

        def records(kind: str, count: int, channels: int) -> Tensor:
            size = (num_sequences * count, record_bytes(kind, channels))
            return torch.zeros(size, dtype=torch.uint8, device=device)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        size = (layers, num_sequences * self.ring, record_bytes("window", args.head_dim))
        self.window_rows = torch.zeros(size, dtype=torch.uint8, device=device)
        self.window = list(self.window_rows)
        self.main = {s: records("main", self.entries[ratio[s] - 1], args.head_dim) for s in sources}
        self.index = {
            s: records("index", self.entries[ratio[s] - 1], args.index_head_dim) for s in sources
        }
        shape = (num_sequences * self.pending_ring, 2 * args.head_dim)
        self.pending = {
            s: torch.zeros(shape, dtype=torch.float32, device=device)
            for s in sources
            if ratio[s] == 2
        }
        self.tokens = ints(num_sequences, self.context)
        self.floors = ints(num_sequences, 3)
        self.turns = rotary_turns(args, self.context).to(device)

    @property
    def nbytes(self) -> int:
        """Device memory of everything here."""
        parts = [
            self.window_rows,
            *self.main.values(),
            *self.index.values(),
            *self.pending.values(),
        ]
        return sum(t.nbytes for t in (*parts, self.tokens, self.floors, self.turns))


def rotary_turns(args: V41Args, count: int) -> Tensor:
    """cos and sin of the window's base, then of the main one, for positions 0..count-1: float32
    [count, 4, P], the numbers that the reference's tables hold."""
    yarn = (
        args.rope_factor,
        args.rope_beta_fast,
        args.rope_beta_slow,
        args.rope_original_max_positions,
    )
    turns = torch.empty(count, 4, args.qk_rope_head_dim // 2)
    for number, (theta, scaling) in enumerate(
        ((args.rope_theta, None), (args.compress_rope_theta, yarn))
    ):
        rotary = Rotary(
            dim=args.qk_rope_head_dim,
            rope_dim=args.qk_rope_head_dim,
            theta=theta,
            yarn=scaling,
            dtype=torch.float32,
            device="cpu",
        )
        cos, sin = rotary.table(torch.arange(count))
        turns[:, 2 * number] = cos[:, 1::2]
        turns[:, 2 * number + 1] = sin[:, 1::2]  # the odd member's sine has the plain sign
    return turns


class RowInputs:
    """ids, positions and slots int32 [R] of a step's rows, R a multiple of 8; position -1: none."""

    def __init__(self, rows: int, device: torch.device | str) -> None:
        count = padded_rows(rows)
        self.ids = torch.zeros(count, dtype=torch.int32, device=device)
        self.positions = torch.full((count,), -1, dtype=torch.int32, device=device)
        self.slots = torch.zeros(count, dtype=torch.int32, device=device)

    def __len__(self) -> int:
        return self.ids.shape[0]

    def set(self, work: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """work: (slot, first position, token ids) of each sequence, from the host."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for slot, first, new in work:
            ids.extend(new)
            positions.extend(range(first, first + len(new)))
            slots.extend([slot] * len(new))
        missing = len(self) - len(ids)
        assert missing >= 0, f"{len(ids)} rows for a step of {len(self)}"
        columns = (ids + [0] * missing, positions + [-1] * missing, slots + [0] * missing)
        staged = torch.tensor(columns, dtype=torch.int32)
        for target, source in zip((self.ids, self.positions, self.slots), staged, strict=True):
            target.copy_(source)
