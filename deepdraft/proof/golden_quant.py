"""Checks of the golden replay that belong to rounded numerics.

Owns: one layer at a time from recorded inputs (quant), the quantiser grids of caches, and the
comparison of qsim in float32 with qsim in float64, where single values fall on rounding boundaries.
Knows nothing of: files, printing.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepdraft.models.csa import StepRows
from deepdraft.models.deepseek_v41 import DeepseekV41
from deepdraft.models.layers import Numerics
from deepdraft.models.state import SequenceState
from deepdraft.proof.golden_run import STEP_ROWS, Arrays, Trace, layer_arrays
from deepdraft.quant import formats

_GRIDS: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    (r"after\d+\.(draft_)?window\.\d+", formats.fake_fp8_group32),
    (r"after\d+\.main\.\d+", formats.fake_fp4_e4m3_group16),
    (r"after\d+\.index_k\.\d+", formats.fake_mxfp4_group32),
)
_CHUNK = 16
BOUNDARY = 1e-4
"""Two inputs of a quantiser this close (of their group's largest) differ by rounding only."""


def off_grid(name: str, values: Tensor) -> int | None:
    """How many values of a cache are no quantiser's output; None: not a quantised cache.

    A group's values stay where they are when they are quantised again, as the scales that a
    second pass may choose are finer only where nothing is lost.
    """
    for pattern, quantise in _GRIDS:
        if re.fullmatch(pattern, name):
            x = values.float().contiguous()
            return int((quantise(x) != x).sum())
    return None


# ---- one layer at a time -------------------------------------------------------------------


@torch.inference_mode()
def layerwise(model: DeepseekV41, tokens: int, recorded: Arrays) -> dict[int, Arrays]:
    """Arrays of each layer when it is fed the recorded `stream_in` and `premix_in`.

    Layers that read another layer's entries or selection get those of our run of that layer, which
    was fed its own recorded input. Raises KeyError where an input is missing.
    """
    args = model.args
    pool = model.new_pool(1, tokens, slack=STEP_ROWS)
    state = pool.open()
    trace = Trace(
        (
            *("stream_in", "premix_in", "stream_mid", "stream_out", "attn_in", "attn_out"),
            *("ffn_in", "ffn_out", "q_latent", "attn_o", "latent", "topk"),
            *(f"{part}_{name}" for part in ("attn", "ffn") for name in ("pre", "post", "comb")),
        )
    )
    for at in range(0, tokens, STEP_ROWS):
        end = min(at + STEP_ROWS, tokens)
        rows = StepRows(pool, [(state, at, end - at)], model.rotary_window, model.rotary_main)
        record: dict[str, Arrays] = {}
        for layer, block in enumerate(model.blocks):
            x = recorded[f"L{layer}.stream_in"][at:end].to(pool.dtype)
            p = recorded[f"L{layer}.premix_in"][at:end].to(pool.dtype).unsqueeze(1)
            x = x.expand(rows.padded, -1, -1).contiguous() if rows.padded > end - at else x
            p = p.expand(rows.padded, -1, -1) if rows.padded > end - at else p
            block(x, p, rows, write_from=[at], record=record.setdefault(f"L{layer}", {}))
        trace.add(record, end - at)
    pool.close(state)
    return {layer: layer_arrays(args, trace, layer) for layer in range(args.num_hidden_layers)}


# ---- rounding boundaries -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Flip:
    """The first value of a text that float32 and float64 quantise to different codes."""

    position: int
    quantiser: str
    call: int
    """Which call of a quantiser within the step, counted from 0."""
    input32: float
    input64: float
    output32: float
    output64: float
    on_boundary: bool
    """Whether the inputs agree up to rounding; otherwise the difference came from elsewhere."""


class _Spy:
    """Keeps what a step's quantisers got and gave, in call order."""

    def __init__(self, numerics: Numerics) -> None:
        self.calls: list[tuple[str, Tensor, Tensor]] = []
        self.numerics = dataclasses.replace(
            numerics,
            fp8=self._wrap("fp8", numerics.fp8),
            window_kv=self._wrap("window_kv", numerics.window_kv),
            main_kv=self._wrap("main_kv", numerics.main_kv),
            index=self._wrap("index", numerics.index),
        )

    def _wrap(self, name: str, quantise: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def spied(x: Tensor) -> Tensor:
            y = quantise(x)
            self.calls.append((name, x, y))
            return y

        return spied

    def take(self) -> list[tuple[str, Tensor, Tensor]]:
        """The calls since the last time."""
        calls, self.calls = self.calls, []
        return calls


def _first_difference(
    position: int, ours: list[tuple[str, Tensor, Tensor]], oracle: list[tuple[str, Tensor, Tensor]]
) -> Flip | None:
    assert len(ours) == len(oracle), f"{len(ours)=} {len(oracle)=}"
    for call, ((name, x32, y32), (_, x64, y64)) in enumerate(zip(ours, oracle, strict=True)):
        differs = y32.double() != y64
        if not bool(differs.any()):
            continue
        # Of several values of one call, the one whose inputs are furthest apart.
        apart = (x32.double() - x64).abs()
        spread = torch.where(differs, apart, -1.0)
        at = tuple(int(i) for i in torch.unravel_index(spread.argmax(), spread.shape))
        largest = float(x64[at[:-1]].abs().max())
        return Flip(
            position,
            name,
            call,
            float(x32[at]),
            float(x64[at]),
            float(y32[at]),
            float(y64[at]),
            float(apart[at]) <= BOUNDARY * largest,
        )
    return None


@dataclass(frozen=True, slots=True)
class Followed:
    """float32 logits [N, V] of a text, and the first flip against float64 if there is one."""

    logits: Tensor
    first: Flip | None


class Follower:
    """Runs texts through one model in float32 and in float64, side by side."""

    def __init__(
        self,
        make: Callable[[Numerics], DeepseekV41],
        numerics32: Numerics,
        numerics64: Numerics,
    ) -> None:
        """`make(numerics)` loads the model."""
        self.spies = [_Spy(numerics32), _Spy(numerics64)]
        self.models = [make(spy.numerics) for spy in self.spies]

    def follow(self, ids: list[int]) -> Followed:
        """The text's logits in float32 and its first flip.

        Steps of many rows say whether there is one; a step that has one is taken back and done
        again token by token, which says where.
        """
        pools = [m.new_pool(1, len(ids), slack=_CHUNK) for m in self.models]
        states = [pool.open() for pool in pools]
        logits: list[Tensor] = []
        first: Flip | None = None
        for at in range(0, len(ids), _CHUNK):
            piece = ids[at : at + _CHUNK]
            # The float64 side is needed up to the first flip only.
            rows, flip = self._step(states if first is None else states[:1], piece, at)
            logits.append(rows)
            if flip is not None:
                for state in states:
                    state.truncate(at)
                for position, token in enumerate(piece, at):
                    flip = self._step(states, [token], position)[1]
                    first = first or flip
                assert first is not None, "a flip in many rows, but in none alone"
        return Followed(torch.cat(logits), first)

    def _step(
        self, states: list[SequenceState], ids: list[int], position: int
    ) -> tuple[Tensor, Flip | None]:
        outs = [m.step([(s, ids)]).logits for m, s in zip(self.models, states, strict=False)]
        calls = [spy.take() for spy in self.spies]
        assert outs[0] is not None
        flip = _first_difference(position, *calls) if len(states) > 1 else None
        return outs[0], flip
