"""With and without the cache, the same request gives the same bits."""

import pytest
import torch

from deepdraft.kv.cache import KvCache
from deepdraft.kv.settings import StoreSettings
from deepdraft.models.deepseek_v41 import DeepseekV41
from tests.kv.conftest import SLACK, ModelOf, Served, text

W, LAYERS, ENCODER_LAYERS = 16, 8, 4
MODES = ["exact", "quant"]


def both(served: Served, prompt: list[int], *, keep: bool = True) -> str:
    """Serve a prompt cold and from the cache; all must agree. Returns how it was started."""
    cold, cold_logits, _, cold_state = served.answer(prompt, cached=False, keep=False)
    warm, warm_logits, resumed, warm_state = served.answer(prompt, keep=keep)
    assert warm == cold
    assert torch.equal(warm_logits, cold_logits)
    assert resumed is None or resumed.provenance == "exact"
    if served.runner.block_size:
        for a, b in zip(
            served.drafts(cold_state, cold[-1]), served.drafts(warm_state, warm[-1]), strict=True
        ):
            assert torch.equal(a, b)
    served.close(cold_state)
    served.close(warm_state)
    served.cache.check()
    return "none" if resumed is None else f"{resumed.num_tokens}/{resumed.cached_tokens}"


@pytest.mark.parametrize("numerics", MODES)
@pytest.mark.parametrize("mode", ["full", "encoder"])
def test_turns_of_a_conversation(numerics: str, mode: str, model_of: ModelOf) -> None:
    served = Served(model_of(numerics), mode=mode)
    history = text(1, 50)
    starts = [both(served, history)]
    for turn in range(2):
        tokens, _, _, state = served.answer(history, cached=False, keep=False)
        served.close(state)
        # The answer's last token has not passed the model: the cache ends before it.
        history = [*history, *tokens, *text(10 + turn, 20 + turn)]
        starts.append(both(served, history))
    assert starts[0] == "none"
    # In mode encoder only the encoder's part is taken, and the new turn is longer than a window.
    assert starts[1:] == ["53/53", "77/77"]


@pytest.mark.parametrize(
    ("numerics", "cut"),
    [
        *(("exact", cut) for cut in (1, 39, 40, 49, 50)),
        *(pytest.param("exact", cut, marks=pytest.mark.full) for cut in (2, 41, 47)),
        ("quant", 47),
    ],
)
def test_other_ways_on_from_a_stored_prompt(numerics: str, cut: int, model_of: ModelOf) -> None:
    """Diverging at any place gives the cold answer, whatever could be reused."""
    served = Served(model_of(numerics))
    stored = text(2, 50)
    both(served, stored)
    both(served, [*stored[:cut], *[(t + 1) % 256 for t in stored[cut:]], 9, 9])
    both(served, stored[:cut])


def test_the_same_prompt_again_computes_one_token(model: DeepseekV41) -> None:
    served, prompt = Served(model), text(3, 90)
    assert both(served, prompt) == "none"
    assert both(served, prompt) == "89/89"


def test_a_system_prompt_helps_from_the_third_conversation_on(model: DeepseekV41) -> None:
    served, system = Served(model, rebuild=False), text(4, 61)
    assert both(served, system + text(5, 30)) == "none"
    assert both(served, system + text(6, 30)) == "none"  # leaves a checkpoint where they part
    for other in range(7, 10):
        assert both(served, system + text(other, 30)) == "61/61"


@pytest.mark.parametrize(
    ("numerics", "shared"),
    [pytest.param("exact", 160, marks=pytest.mark.full), ("exact", 161), ("quant", 175)],
)
def test_windows_computed_again_where_there_is_no_checkpoint(
    numerics: str, shared: int, model_of: ModelOf
) -> None:
    served, stored = Served(model_of(numerics)), text(11, 180)
    both(served, stored)
    prompt = stored[:shared] + text(12, 9)
    even = shared // 2 * 2
    depth = LAYERS * (W - 1) + 1 + SLACK
    assert both(served, prompt, keep=False) == f"{even}/{even - depth}"


@pytest.mark.parametrize("suffix", [1, 15, 16, 17, 40])
def test_windows_of_the_encoder_computed_again(suffix: int, model: DeepseekV41) -> None:
    served, stored = Served(model, mode="encoder"), text(13, 160)
    both(served, stored)
    prompt = stored[:130] + text(14, suffix)
    out = min(130, len(prompt) - W)
    depth = ENCODER_LAYERS * (W - 1) + 1 + SLACK
    assert both(served, prompt, keep=False) == f"130/{out - depth}"


@pytest.mark.parametrize("new", [1, 5, 12, 13])
def test_a_short_turn_in_mode_encoder(new: int, model: DeepseekV41) -> None:
    """A cold run's decoder starts a window before the end; a later checkpoint does not help."""
    served, prompt = Served(model, mode="encoder"), text(31, 50)
    tokens, _, _, state = served.answer(prompt)
    served.close(state)
    turn = [*prompt, *tokens[:-1], *text(32, new)]
    start = both(served, turn, keep=False)
    assert start == "none" or int(start.split("/")[0]) <= len(turn) - W


def test_a_few_tokens_are_neither_stored_nor_looked_for(model: DeepseekV41) -> None:
    """All conversations begin alike; starting from there would cost more than it saves."""
    served = Served(model, settings=StoreSettings(chunk_blocks=2, min_tokens=32))
    cache, long = served.cache, text(41, 70)
    assert cache.points(long[:20]) == [] and cache.points(long[:33]) == [32]
    state = served.runner.open_sequence()
    served.runner.prefill(state, long[:31], final=True)
    captured = cache.capture(state)
    assert captured is not None and cache.store(state, [captured]) is None
    served.close(state)
    assert cache.stats()["slots_used"] == 0 and cache.stats().get("store_refused", 0) == 0
    both(served, long)
    other = [*long[:31], *text(42, 40)]
    assert cache.points(other) == [70] and cache.saved(other) == 0
    assert both(served, other) == "none"
    assert both(served, [*long[:50], *text(43, 9)]) == "none"  # no checkpoint there, too short
    assert both(served, [*long, 7]) == "69/69"


def test_windows_of_a_bounded_replay_are_not_used_in_mode_full(model: DeepseekV41) -> None:
    served, prompt = Served(model, mode="encoder", rebuild=False), text(33, 60)
    tokens, _, _, state = served.answer(prompt)
    assert state.origin == "decoder-replayed"
    served.close(state)
    served.cache.mode = served.runner.prefill_mode = "full"
    assert both(served, [*prompt, *tokens, 7], keep=False) == "none"


def test_a_shallower_recompute_would_be_wrong(
    model: DeepseekV41, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The depth is needed: with the windows of one layer less the bits differ."""
    served, stored = Served(model), text(11, 180)
    both(served, stored)
    prompt = stored[:160] + text(12, 9)
    monkeypatch.setattr(
        type(served.cache.geometry), "depth", lambda self, layers: (layers - 1) * (W - 1)
    )
    _, cold_logits, _, _ = served.answer(prompt, cached=False, keep=False)
    _, warm_logits, resumed, _ = served.answer(prompt, keep=False)
    assert resumed is not None and resumed.num_tokens == 160
    assert not torch.equal(cold_logits, warm_logits)


def test_replayed_windows_only_when_asked(model: DeepseekV41) -> None:
    stored, prompt = text(13, 100), text(13, 61) + text(14, 9)
    exact = Served(model)
    both(exact, stored)
    assert both(exact, prompt, keep=False) == "none"
    served = Served(model, reuse="replay")
    served.answer(stored)
    _, _, resumed, state = served.answer(prompt)
    assert resumed is not None
    assert (resumed.num_tokens, resumed.cached_tokens) == (60, 60 - W)
    assert resumed.provenance == "replayed at 60"
    assert state.origin == "encoder-replayed"
    # What such a conversation leaves behind is never used for an exact answer.
    served.cache.reuse = "exact"
    assert both(served, [*prompt, *text(15, 20)], keep=False) == "none"


def test_replay_equals_the_models_own(model: DeepseekV41) -> None:
    """Provenance `replayed at M`: the bits of one server that cut its own state back to M."""
    stored, tail = text(13, 100), text(14, 9)
    served = Served(model, reuse="replay")
    served.answer(stored)
    prompt = stored[:60] + tail
    _, logits, resumed, _ = served.answer(prompt, steps=3, keep=False)
    assert resumed is not None and resumed.num_tokens == 60
    own = served.runner.open_sequence()
    served.runner.prefill(own, stored, final=True)
    own.keep_global(60)
    first = served.runner.prefill(own, tail, final=True)
    assert first is not None and torch.equal(first, logits[0])


def test_whole_state_continues_an_encoder_conversation(model: DeepseekV41) -> None:
    """Reuse `whole`: as if the conversation had never been interrupted."""
    served = Served(model, mode="encoder", reuse="whole")
    prompt = text(16, 50)
    tokens, _, _, state = served.answer(prompt)
    more = text(17, 5)
    suffix = [tokens[-1], *more]
    expected = served.runner.prefill(state, suffix, final=True)
    _, logits, resumed, _ = served.answer([*prompt, *tokens, *more], steps=0, keep=False)
    assert resumed is not None and resumed.provenance == "whole"
    assert expected is not None and torch.equal(logits[0], expected)


def test_without_a_drafter(model: DeepseekV41) -> None:
    served, prompt = Served(model, num_drafts=0), text(18, 60)
    both(served, prompt)
    assert both(served, [*prompt, *text(19, 10)]) == "59/59"


def test_a_checkpoint_without_the_drafter_is_no_hit_for_one(model: DeepseekV41) -> None:
    served, prompt = Served(model, num_drafts=0, rebuild=False), text(18, 60)
    both(served, prompt)
    served.cache.drafter = True
    assert served.cache.lookup([*prompt, 5]) is None


def test_taking_tokens_back_after_a_resume(model: DeepseekV41) -> None:
    """Rejected drafts after a resume leave no trace, and nothing older than the windows can go."""
    served, prompt = Served(model), text(20, 80)
    both(served, prompt)
    for end in (79, 80):
        longer = [*prompt[:end], 77, 78]
        _, _, _, a = served.answer(longer, steps=0, cached=False, keep=False)
        _, _, resumed, b = served.answer(longer, steps=0, keep=False)
        assert resumed is not None
        logits = []
        for state in (a, b):
            served.runner.step([(state, [5, 6, 7, 8])])
            served.runner.commit(state, 83)
            logits.append(served.runner.step([(state, [9])]))
        assert torch.equal(*logits)
        with pytest.raises(Exception, match="cannot truncate"):
            b.truncate(77)  # needs a row before those that were stored
        served.close(a)
        served.close(b)


def test_background_hashing(model: DeepseekV41) -> None:
    served, prompt = Served(model, background=True), text(21, 60)
    assert both(served, prompt) == "none"
    assert both(served, [*prompt, 5]) == "59/59"
    served.cache.close()


def test_the_layout_must_fit_the_pool(model_of: ModelOf) -> None:
    exact = Served(model_of("exact"))
    with pytest.raises(Exception, match="does not fit"):
        KvCache(
            exact.runner.pool,
            expected=b"0" * 32,
            layout=Served(model_of("quant")).cache.layout.__class__.of(
                exact.model.args, packed=False, wide=True
            ),
            max_bytes=1 << 24,
        )
