"""Planted faults: each replaces one function by a plausible mistake, and `golden` must fail.

The mixed model is used: it is small, and every mistake shows in it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepdraft.models import csa, deepseek_v41
from deepdraft.models.csa import Compressor, Indexer, Rotation
from deepdraft.models.deepseek_v41 import Block, DeepseekV41
from deepdraft.models.engram import EngramHash
from deepdraft.ops import elementwise
from deepdraft.ops import index as index_ops
from deepdraft.ops import moe as moe_ops
from deepdraft.ops.elementwise import HyperMix
from deepdraft.proof.golden import check_directory, main
from deepdraft.quant import formats
from tests.golden.make import stale_index_keys

Patch = pytest.MonkeyPatch


def sinkhorn_rows_last(patch: Patch) -> None:
    right = HyperMix.__init__

    def init(self: HyperMix, *args: Any, **kwargs: Any) -> None:
        right(self, *args, **kwargs)
        self.row_sum, self.col_sum = self.col_sum, self.row_sum

    patch.setattr(HyperMix, "__init__", init)


def mix_of_the_same_sublayer(patch: Patch) -> None:
    """Collapses for attention with this sublayer's own coefficients, as V4 does."""
    right = Block.attn_in

    def attn_in(self: Block, x: Tensor, p: Tensor) -> Tensor:
        return right(self, x, self.mix_attn(x, self.eps)[0])

    patch.setattr(Block, "attn_in", attn_in)


def residual_mix_transposed(patch: Patch) -> None:
    right = elementwise.expand
    patch.setattr(
        deepseek_v41, "expand", lambda y, x, post, comb: right(y, x, post, comb.transpose(1, 2))
    )


def no_inverse_rotation(patch: Patch) -> None:
    patch.setattr(Rotation, "back", lambda self, x: x)


def high_nibble_first(patch: Patch) -> None:
    right = formats.unpack_nibbles
    patch.setattr(
        formats,
        "unpack_nibbles",
        lambda packed: right(packed).unflatten(-1, (-1, 2)).flip(-1).flatten(-2),
    )


def tap_after_the_layer(patch: Patch) -> None:
    right = DeepseekV41._run

    def run(self: DeepseekV41, x: Tensor, p: Tensor, rows: Any, layers: range, *args: Any) -> Any:
        taps = []
        for layer in layers:
            x, p, _ = right(self, x, p, rows, range(layer, layer + 1), *args)
            if self.blocks[layer].role.tap:
                taps.append(x.mean(1))
        return x, p, taps

    patch.setattr(DeepseekV41, "_run", run)


def fill_up_outside_candidates(patch: Patch) -> None:
    """The published code's second defect: a set that is not full takes entries of score -inf."""

    def select_top(scores: Tensor, k: int) -> Tensor:
        return (
            torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values
        )

    right, indices = index_ops.select_top, Indexer.select

    def select(self: Indexer, *args: Any, **kwargs: Any) -> Any:
        patch.setattr(index_ops, "select_top", select_top if self.role.restricted else right)
        return indices(self, *args, **kwargs)

    patch.setattr(Indexer, "select", select)


def candidates_ignored(patch: Patch) -> None:
    patch.setattr(index_ops, "restrict_to_blocks", lambda scores, kept, *, block: scores)


def newest_block_not_forced(patch: Patch) -> None:
    right = index_ops.candidate_blocks
    patch.setattr(
        index_ops,
        "candidate_blocks",
        lambda scores, reach, **kw: right(scores, torch.zeros_like(reach), **kw),
    )


def index_keys_of_the_rotated_latent(patch: Patch) -> None:
    right = Compressor.latents

    def write(self: Compressor, raw: Tensor, rows: Any, skip_below: list[int]) -> Tensor:
        turn = rows.rotate_main if self.ratio == 1 else rows.rotate_pair
        turned = elementwise.rotate(right(self, raw, rows), *turn.rows)
        where = rows.entry_write(self.layer, skip_below)
        key = elementwise.rms_norm(turned @ self.wk, self.k_norm, self.eps)
        rows.pool.index[self.layer].index_copy_(0, where, elementwise.rotate(key, *turn.index_rows))
        rows.pool.main[self.layer].index_copy_(0, where, turned)
        return right(self, raw, rows)

    patch.setattr(Compressor, "write", write)


def pair_rotated_at_its_second_token(patch: Patch) -> None:
    right = csa.StepRows.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        right(self, *args, **kwargs)
        self.rotate_pair = self.rotate_main

    patch.setattr(csa.StepRows, "__init__", init)


def bias_in_the_routing_weights(patch: Patch) -> None:
    def route(
        x: Tensor, gate_t: Tensor, bias: Tensor, *, k: int, scale: float, temperature: float
    ) -> tuple[Tensor, Tensor]:
        scores = elementwise.softplus(x @ gate_t).sqrt() + bias
        weights, picks = scores.topk(k, dim=-1)
        return picks, weights / weights.sum(-1, keepdim=True) * scale

    patch.setattr(moe_ops, "route", route)


def hash_without_the_start(patch: Patch) -> None:
    """Look-backs before the text's beginning take token 0, not the pad id."""
    right = EngramHash.rows
    patch.setattr(EngramHash, "rows", lambda self, history: right(self, history.clip(min=0)))


def stale_keys(patch: Patch) -> None:
    patch.setattr(Indexer, "_keys", stale_index_keys)


FAULTS: dict[Callable[[Patch], None], set[str]] = {
    sinkhorn_rows_last: {"logits-exact", "layers31-exact", "dspark-exact", "replay-exact"},
    mix_of_the_same_sublayer: {"logits-exact", "layers31-exact"},
    residual_mix_transposed: {"logits-exact", "layers31-exact"},
    no_inverse_rotation: {"logits-exact", "layers31-exact"},
    high_nibble_first: {"logits-exact", "layers31-exact"},
    tap_after_the_layer: {"dspark-exact", "replay-exact"},
    fill_up_outside_candidates: {"logits-exact", "indexer-exact"},
    candidates_ignored: {"indexer-exact"},
    newest_block_not_forced: {"indexer-exact"},
    index_keys_of_the_rotated_latent: {"kv-exact", "indexer-exact"},
    pair_rotated_at_its_second_token: {"kv-exact", "logits-exact"},
    bias_in_the_routing_weights: {"router-exact", "logits-exact"},
    hash_without_the_start: {"engram-exact"},
    stale_keys: {"logits-exact", "indexer-exact", "decode-unmodified-exact"},
}


def test_no_fault_passes(mixed_dir: Path) -> None:
    assert check_directory(mixed_dir, modes=["exact"]).passed


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_fault_is_found(
    fault: Callable[[Patch], None],
    mixed_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with torch.inference_mode():
        fault(monkeypatch)
    assert main(str(mixed_dir), modes=["exact"]) == 1
    failed, file = set(), ""
    for line in capsys.readouterr().out.splitlines():
        file = file if line.startswith(" ") else line
        if line.startswith("  fail"):
            failed.add(file)
    assert FAULTS[fault] <= failed
