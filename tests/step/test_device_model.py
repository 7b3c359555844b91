"""The device model used like the torch reference: sequences, cuts, drafts, and what it refuses."""

import pytest
import torch

from deepdraft.engine.runner import Runner
from deepdraft.errors import ConfigError, StateError
from deepdraft.models import v41_device
from deepdraft.models.v41_device import DeviceV41, _pieces
from tests.kernels.interpreter import DEVICE
from tests.step import tiny


def make() -> DeviceV41:
    model = DeviceV41(tiny.args(), tiny.source(), list(range(tiny.VOCABULARY)), device=DEVICE)
    return model


@pytest.mark.full
def test_a_runner_steps_takes_back_and_drafts():
    """A rejected draft leaves no trace: rows after it, alone or among others, have the bits of an
    undisturbed sequence's, and so has the drafter's proposal."""
    text = tiny.text(9)
    runner = Runner(make(), max_context=48, num_sequences=2, step_rows=16)
    one, two = runner.open_sequence(), runner.open_sequence()
    runner.prefill(one, text[:6], final=True)
    runner.step([(one, [text[6], 1, 2])])
    runner.commit(one, 7)
    logits = runner.step([(two, text[:7]), (one, text[7:9])])
    assert logits.shape == (9, tiny.VOCABULARY)
    whole = runner.step([(two, text[7:9])])
    assert torch.equal(logits[7:], whole)
    drafts = runner.draft([(one, 5), (two, 5)])
    refined, raw = runner.refine(drafts, 0, [5, 5])
    assert torch.equal(refined[0], refined[1]) and raw[0] == raw[1]
    alone, confidence = drafts[0].refine(0, 5)
    assert torch.equal(alone, refined[0]) and confidence == raw[0]
    parked = runner.park(one)
    again = runner.unpark(parked)
    assert torch.equal(runner.step([(again, [3])]), runner.step([(two, [3])]))


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
    with pytest.raises(ConfigError, match="prefill to encoder"):
        model.prefill(state, [1], mode="encoder")
    other = model.new_pool(1, 32, slack=8)
    with pytest.raises(StateError, match="made last"):
        model.step([(state, [1])])
    assert other.num_free == 1 and state.num_tokens == 0


def test_the_drafter_is_fed_as_many_rows_as_a_launch_takes(monkeypatch):
    """After many steps without drafts more rows wait than products have counters for."""
    model, taps = make(), torch.randn(21, 2 * tiny.args().hidden_size)
    rings = []
    for most in (64, 8):
        monkeypatch.setattr(v41_device, "MOST_ROWS", most)
        pool = model.new_pool(1, 48, slack=24)
        state = pool.open()
        state.token_ids.extend(range(21))
        assert model.drafter is not None and pool.ring >= 21
        sizes, feed = [], model.drafter.device_drafter.feed

        def counted(rows, *more, feed=feed, sizes=sizes):
            sizes.append(rows.shape[0])
            feed(rows, *more)

        monkeypatch.setattr(model.drafter.device_drafter, "feed", counted)
        model.drafter.feed_all([(state, taps, 0)])
        assert state.drafter_tokens == 21 and max(sizes) <= most and sum(sizes) == 24
        rings.append(pool.caches.window_rows.clone())
    assert torch.equal(*rings)


def test_rows_are_cut_into_launches_in_order():
    items = [("a", 0, list(range(70))), ("b", 5, [1, 2])]
    pieces = _pieces(items)
    assert [sum(len(ids) for _, _, ids in p) for p in pieces] == [64, 8]
    assert pieces[1] == [("a", 64, list(range(64, 70))), ("b", 5, [1, 2])]
