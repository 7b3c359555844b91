"""A device step over streamed weights: every product of its kind goes through stream.cu."""

from unittest import mock

import pytest
import torch

from deepdraft.kernels.native import stream
from deepdraft.kernels.native.fragments import Streamed
from deepdraft.models.v41_buffers import DeviceCaches, RowInputs
from deepdraft.models.v41_step import DeviceStep
from deepdraft.models.v41_weights import load_weights
from tests.kernels.emulated import CAN_RUN, on_cpu
from tests.kernels.interpreter import DEVICE
from tests.step import tiny


def logits(weights, ids):
    caches = DeviceCaches(tiny.args(), num_sequences=1, max_tokens=64, spare=8, device=DEVICE)
    inputs = RowInputs(len(ids), DEVICE)
    inputs.set([(0, 0, ids)])
    return DeviceStep(weights, caches).run(inputs).logits[: len(ids)]


@pytest.mark.full
@pytest.mark.skipif(not CAN_RUN, reason="needs a CUDA device, or g++")
@on_cpu
def test_a_step_over_streamed_weights():
    with mock.patch.object(stream, "chosen", lambda kind, device: True):
        weights = load_weights(
            tiny.args(), tiny.source(), range(tiny.VOCABULARY), device=DEVICE, drafter=False
        )
    layer = weights.layers[0]
    for w in (layer.attention.w_in, layer.attention.wo_b, layer.experts.w13, layer.experts.w2):
        assert isinstance(w, Streamed)
    ids = tiny.text(6)
    got, want = logits(weights, ids), logits(tiny.weights(), ids)
    # A last bit of a sum becomes another FP8 or FP4 code: as far apart as two orders of summation.
    assert float((got - want).norm() / want.norm()) < 0.05
    assert torch.isfinite(got).all()
