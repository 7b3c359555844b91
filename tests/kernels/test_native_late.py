"""Blocks of the experts' up map that start later than others have less to do; no bit changes."""

from unittest import mock

import pytest
import torch

from deepdraft.kernels import gemv, moe
from deepdraft.kernels.native import fragments, stream
from deepdraft.kernels.runtime import pad_rows
from tests.kernels.cases import rows_of
from tests.kernels.emulated import on_cpu
from tests.kernels.test_native import (
    EXPERTS,
    LIMIT,
    expert_weights,
    needs_machine,
    routing,
    streamed_experts,
)

DENSE = torch.zeros(96, 320, dtype=torch.uint8), torch.full((3, 10), 120, dtype=torch.uint8)


@pytest.mark.parametrize("bulk", [0, 1])
@needs_machine
@on_cpu
def test_every_unit_is_made_once_however_the_work_is_shared(bulk):
    shape, fold = EXPERTS[0]
    w13, _ = streamed_experts(expert_weights(shape), fold, bulk)
    x = gemv.quantize_rows(pad_rows(rows_of(6, shape[2], seed=1)))
    picks, weights = routing(8, shape[0], shape[1])
    listed = moe.expert_list(picks.int())
    beside = fragments.stream_fp8(*DENSE, fragments.StreamPlan(10, 2, 1, 16, 1, 2))

    def run(late, less):
        made = torch.full((8 * shape[1], w13.rows // 2), float("nan"), dtype=torch.bfloat16)
        with (
            mock.patch.object(stream, "kept_from", lambda w: late),
            mock.patch.object(stream, "LATE", less),
            mock.patch.object(torch, "empty", lambda *size, **_: made.to(listed.experts.device)),
        ):
            return moe.routed_up(x, listed, weights, w13, limit=LIMIT, beside=beside)

    want = moe.routed_up(x, listed, weights, w13, limit=LIMIT)
    for late, less in ((0, 66), (1, 66), (2, 100), (1, 255)):
        assert torch.equal(run(late, less).view(torch.int16), want.view(torch.int16)), (late, less)


def test_blocks_that_another_product_keeps():
    with mock.patch.object(stream, "_multiprocessors", lambda device: 4):
        for plan, kept in (
            ((10, 2, 1, 16, 1, 2), 1),  # all units in one block
            ((10, 2, 1, 1, 1, 2), 0),  # two blocks a multiprocessor
            ((5, 1, 1, 16, 2, 2), 2),
            ((10, 2, 16, 1, 1, 2), 3),
            ((2, 2, 16, 1, 5, 2), 0),  # more tasks than multiprocessors
        ):
            made = fragments.stream_fp8(*DENSE, fragments.StreamPlan(*plan))
            assert stream.kept_from(made) == kept, plan
