"""The device model used like the torch reference: sequences, cuts, drafts, and what it refuses."""

import pytest
import torch

from deepdraft.engine.runner import Runner
from deepdraft.errors import ConfigError, StateError
from deepdraft.models.v41_device import DeviceV41, _pieces
from tests.step import tiny
from tests.kernels.interpreter import DEVICE


def make() -> DeviceV41:
    model = DeviceV41(tiny.args(), tiny.source(), list(range(tiny.VOCABULARY)), device=DEVICE)
    return model


def test_a_runner_steps_takes_back_and_drafts():
    """A rejected draft leaves no trace: the step after it has the bits of one without it."""
    text = tiny.text(9)
    model = make()
    runner = Runner(model, max_context=48, num_sequences=2, step_rows=8)
    one, two = runner.open_sequence(), runner.open_sequence()
    last = runner.prefill(one, text[:6], final=True)
    assert last is not None and last.shape == (tiny.VOCABULARY,)
    logits = runner.step([(one, [text[6], 1, 2]), (two, [5])])
    assert logits.shape == (4, tiny.VOCABULARY)
    runner.commit(one, 7)
    assert one.num_tokens == 7
    draft = runner.draft([(one, text[7])])[0]
    row, raw = draft.refine(0, text[7])
    assert row.shape == (tiny.VOCABULARY,) and raw == raw
    again = runner.step([(one, text[7:9])])
    model.new_pool(1, 48)


def test_what_cannot_run_is_refused():
    model = make()
    pool = model.new_pool(1, 32, slack=8)
    state = pool.open()
    with pytest.raises(StateError, match="in use"):
        pool.open()
    with pytest.raises(StateError, match="a step takes"):
        model.step([(state, [])])
    with pytest.raises(ConfigError, match="no record"):
        model.step([(state, [1])], record={})
    with pytest.raises(ConfigError, match="full"):
        model.prefill(state, [1], mode="encoder")
    other = model.new_pool(1, 32, slack=8)
    with pytest.raises(StateError, match="made last"):
        model.step([(state, [1])])
    assert other.num_free == 1 and state.num_tokens == 0


def test_rows_are_cut_into_launches_in_order():
    items = [("a", 0, list(range(70))), ("b", 5, [1, 2])]
    pieces = _pieces(items)
    assert [sum(len(ids) for _, _, ids in p) for p in pieces] == [64, 8]
    assert pieces[1] == [("a", 64, list(range(64, 70))), ("b", 5, [1, 2])]
