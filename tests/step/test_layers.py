"""Every layer against the torch reference, fed with the reference's own inputs."""

import pytest

from deepdraft.proof.device_check import compare_layers
from tests.step import tiny

LIMITS = {
    "attn_in": 1e-3,
    "attn_o": 0.01,
    "attn_out": 0.04,
    "ffn_in": 0.03,
    "ffn_out": 0.06,
    "stream_out": 0.03,
}
"""Relative L2: below those of golden set A, one layer at a time, in the published arithmetic."""


@pytest.mark.full
def test_every_layer_agrees_with_the_reference():
    """24 tokens: the window of 8 has wrapped, entries exceed the index's 6 and 8 candidates."""
    found = compare_layers(tiny.reference(), tiny.step(), tiny.text(24), chunk=8, slot=1)
    for layer, errors in found.layers.items():
        got = {name: error.relative for name, error in errors.items()}
        assert all(got[name] <= limit for name, limit in LIMITS.items()), (layer, got)
    for layer, shares in found.overlap.items():
        assert sum(shares) >= len(shares) - 1, (layer, shares)


def test_layers_of_a_first_step_agree_with_the_reference():
    found = compare_layers(tiny.reference(), tiny.step(), tiny.text(7), chunk=8)
    for layer, errors in found.layers.items():
        got = {name: error.relative for name, error in errors.items()}
        assert all(got[name] <= limit for name, limit in LIMITS.items()), (layer, got)
