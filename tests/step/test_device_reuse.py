"""The KV cache of an engine on a GPU: the runner's pool of records, wired as `serve` wires it."""

from typing import Any

import numpy as np
import pytest
import torch

from deepdraft.config import EngineConfig, FleetConfig
from deepdraft.engine.engine import Engine
from deepdraft.engine.gpu_runner import GpuRunner
from deepdraft.engine.load import LoadedModel
from deepdraft.engine.request import Request
from deepdraft.engine.reuse import Reuse, open_reuse
from deepdraft.errors import ConfigError
from deepdraft.models.state import SequenceState
from deepdraft.models.v41_device import DeviceV41
from deepdraft.types import GenerateRequest, SamplingParams
from tests.kernels.interpreter import DEVICE
from tests.step import tiny


def runner() -> GpuRunner:
    model = DeviceV41(tiny.args(), tiny.source(), list(range(tiny.VOCABULARY)), device=DEVICE)
    return GpuRunner(model, max_context=96, num_sequences=3)


def loaded(runner: Any) -> LoadedModel:
    return LoadedModel(
        runner=runner,
        tokenizer=None,  # type: ignore[arg-type]
        args=tiny.args(),
        name="tiny",
        eos_token_id=1,
        bos_token_id=None,
        fingerprint="fp_tiny",
    )


def options(**more: Any) -> EngineConfig:
    return EngineConfig(device="cuda", numerics="quant", kv_memory=64 << 20, **more)


def request(prompt: list[int], count: int = 2) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        prompt_ids=tuple(prompt),
        max_new_tokens=count,
        sampling=SamplingParams(temperature=0.0),
    )


def fill(state: SequenceState, token_ids: list[int], seed: int) -> None:
    """Random records; those of its slot alone."""
    generator = torch.Generator().manual_seed(seed)
    pool, n = state.pool, len(token_ids)
    window = pool.window[:, state.slot * pool.ring : (state.slot + 1) * pool.ring]
    for rows in (window, *(r[k * state.slot : k * (state.slot + 1)] for r, k in entries(state))):
        rows.copy_(torch.randint(0, 0x30, rows.shape, generator=generator, dtype=torch.uint8))
    for rows in pool.pending.values():
        own = rows[state.slot * pool.pending_ring : (state.slot + 1) * pool.pending_ring]
        own.copy_(torch.randn(own.shape, generator=generator))
    state.token_ids[:] = token_ids
    state.decoder_tokens = state.drafter_tokens = state.written = n


def entries(state: SequenceState) -> list[tuple[torch.Tensor, int]]:
    pool = state.pool
    return [(rows[s], k) for s, k in pool.entries.items() for rows in (pool.main, pool.index)]


def equal_rows(a: SequenceState, b: SequenceState) -> bool:
    """All that a later token of either may read, looked up by position."""
    n, pool = a.num_tokens, a.pool
    last = np.arange(n - pool.args.sliding_window, n)
    same = [torch.equal(pool.window[:, a.ring_row(last)], pool.window[:, b.ring_row(last)])]
    for source, size in pool.entries.items():
        live = n // pool.ratios[source]
        for rows in (pool.main[source], pool.index[source]):
            x, y = (rows[s.slot * size : s.slot * size + live] for s in (a, b))
            same.append(torch.equal(x, y))
    at = np.arange(n - 2, n) % pool.pending_ring
    for rows in pool.pending.values():
        x, y = (rows[s.slot * pool.pending_ring + at] for s in (a, b))
        same.append(torch.equal(x, y))
    return all(same)


def test_what_a_request_leaves_starts_the_next_one_with_the_same_records() -> None:
    own = runner()
    reuse = open_reuse(loaded(own), options())
    assert isinstance(reuse, Reuse) and reuse.cache.rebuilder is None and reuse.cache.drafter
    prompt, answer = tiny.text(39), tiny.text(6, seed=1)
    first = Request(request(prompt), lambda event: None)
    first.handle, first.output_ids = own.open_sequence(), answer
    first.num_computed = len(prompt)
    fill(first.handle, [*prompt, *answer[:-1]], seed=1)
    reuse.finish(first, "stop")
    reuse.cache.flush()
    second = Request(request([*prompt, *answer, 3, 4]), lambda event: None)
    own.open_sequence()  # so that the slots differ by more than one
    second.handle = own.open_sequence()
    fill(second.handle, [], seed=2)
    second.handle.truncate(0)
    assert not equal_rows(first.handle, second.handle)
    reuse.begin(second)
    assert second.cached is not None and second.cached.provenance == "exact"
    assert second.num_computed == second.handle.num_tokens == first.handle.num_tokens == 44
    assert second.handle.drafter_tokens == 44 and equal_rows(first.handle, second.handle)
    # Between checkpoints nothing can be started: windows are not computed again on a GPU.
    third = Request(request([*prompt[:35], 9, 9, 9]), lambda event: None)
    third.handle = second.handle
    third.handle.truncate(0)
    reuse.begin(third)
    assert third.cached is None and third.handle.num_tokens == 0
    reuse.close()


def test_where_a_gpu_has_no_cache_it_is_said(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = runner()
    monkeypatch.setattr(own, "prefill_mode", "encoder")
    assert open_reuse(loaded(own), options(prefill="encoder")) is None
    with pytest.raises(ConfigError, match="--prefill full has one"):
        open_reuse(loaded(own), options(prefill="encoder", kv_spill=str(tmp_path)))
    with pytest.raises(ConfigError, match="several ranks"):
        open_reuse(loaded(own), options(tp=2), FleetConfig(directory="redis://127.0.0.1"))
    monkeypatch.undo()
    assert open_reuse(loaded(own), options(tp=2)) is None


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the engine's thread; see conftest
def test_turns_have_the_answers_of_an_engine_without_a_cache() -> None:
    """Prompts, steps and drafts by the real kernels; the answers are decoded on the device."""
    answers, used = [], []
    for cached in (False, True):
        own = runner()
        reuse = open_reuse(loaded(own), options()) if cached else None
        engine = Engine(own, reuse=reuse)
        engine.start()
        history = tiny.text(34)
        for turn in range(2):
            found = list(engine.generate(request(history, count=3)))
            assert found[-1].error is None
            tokens = [t for event in found for t in event.token_ids]
            answers.append(tokens)
            used.append(None if found[-1].cached is None else found[-1].cached.num_tokens)
            history = [*history, *tokens, *tiny.text(3, seed=turn + 5)]
            if reuse is not None:
                reuse.cache.flush()
        engine.close()
    assert answers[:2] == answers[2:]
    assert used == [None, None, None, 36]
