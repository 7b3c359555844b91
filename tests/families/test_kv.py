"""Prefix reuse of the families: what a conversation starts with from the cache is, bit for bit,
what computing it gives; what cannot be kept is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepdraft.arch import StateKind
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.engine.runner import Runner
from deepdraft.errors import ConfigError, StateError
from deepdraft.kv import codec
from deepdraft.kv.cache import KvCache
from deepdraft.kv.layout import Layout
from deepdraft.kv.settings import StoreSettings
from deepdraft.kv.snapshot import fingerprint
from deepdraft.proof.native import probe_text
from deepdraft.proof.tiny_write import write_tiny

KINDS = ("llama", "v2-lite", "v3", "v32", "v4")
CONTEXT = 512


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Runner]:
    made: dict[tuple[str, bool], Runner] = {}

    def get(kind: str, mtp: bool = False) -> Runner:
        if (kind, mtp) not in made:
            path = write_tiny(tmp_path_factory.mktemp("tiny") / kind, kind, mtp=mtp)
            made[kind, mtp] = Runner.from_checkpoint(
                Checkpoint.open(path),
                None,
                max_context=CONTEXT,
                num_sequences=4,
                drafter=mtp,
            )
        return made[kind, mtp]

    return get


def cache_of(runner: Runner, **more: Any) -> KvCache:
    return KvCache(
        runner.pool,
        expected=fingerprint({"model": "tiny"}),
        layout=codec.layout_of(runner.pool),
        max_bytes=64 << 20,
        settings=StoreSettings.of(codec.layout_of(runner.pool)),
        **more,
    )


def converse(
    runner: Runner, cache: KvCache | None, prompt: list[int], steps: int
) -> tuple[torch.Tensor, list[int], int]:
    """Greedy steps after a prompt, as an engine runs them: logits, tokens, tokens reused."""
    state = runner.open_sequence()
    resumed = cache.resume(prompt, state) if cache else None
    at = start = resumed.num_tokens if resumed else 0
    captured = []
    for end in [p for p in cache.points(prompt) if p > at] if cache else []:
        runner.prefill(state, prompt[at:end], final=False)
        checkpoint = cache.capture(state) if cache else None
        assert checkpoint is not None
        captured.append(checkpoint)
        at = end
    logits = [runner.prefill(state, prompt[at:], final=True)]
    tokens: list[int] = []
    for _ in range(steps):
        assert logits[-1] is not None
        tokens.append(int(logits[-1].argmax()))
        # Two drafts, both taken back.
        rows = runner.step([(state, [tokens[-1], 5, 6])])
        logits.append(rows[0].clone())
        runner.commit(state, state.num_tokens - 2)
    if cache:
        cache.store(state, captured)
        cache.flush()
        cache.check()
    runner.close_sequence(state)
    return torch.stack([row for row in logits if row is not None]), tokens, start


@pytest.mark.parametrize("kind", KINDS)
def test_turns_are_bit_for_bit_those_of_computing(kind: str, runners: Any) -> None:
    """A conversation of three turns, an earlier branch of it, the same prompt once more."""
    runner = runners(kind)
    cache = cache_of(runner)
    text = probe_text(runner.model.args, 400)
    first = text[:230]  # the second group of 128 is open where turns begin
    _, answer, start = converse(runner, cache, first, 7)
    assert start == 0
    second = [*first, *answer, *text[230:270]]
    third_part = text[270:320]
    for prompt, least in (
        (second, 230),
        (first, 229),
        ([*second[:250], *third_part], 220),
        ([*first[:100], *third_part], 0 if kind == "v4" else 100),
    ):
        logits, tokens, start = converse(runner, cache, prompt, 5)
        plain, same, _ = converse(runner, None, prompt, 5)
        assert least <= start < len(prompt), (start, least)
        assert torch.equal(logits, plain) and tokens == same
    stats = cache.stats()
    assert stats["hits"] >= 3 and not stats.get("restore_failed") and not stats.get("store_refused")


@pytest.mark.parametrize("kind", ["llama", "v4"])
def test_from_disk(kind: str, runners: Any, tmp_path: Path) -> None:
    runner = runners(kind)
    text = probe_text(runner.model.args, 200)
    more = {"spill": tmp_path, "spill_bytes": 64 << 20}
    cache = cache_of(runner, **more)
    converse(runner, cache, text[:140], 3)
    cache.close()
    again = cache_of(runner, **more)
    logits, _, start = converse(runner, again, text[:140], 3)
    assert start == 139
    assert torch.equal(logits, converse(runner, None, text[:140], 3)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_computed_again(kind: str, runners: Any) -> None:
    runner = runners(kind)
    cache = cache_of(runner)
    prompt = probe_text(runner.model.args, 140)
    converse(runner, cache, prompt, 2)
    entry = next(iter(cache.memory.entries.values()))
    chunk = entry.chunks[0]
    cache.memory.slab.view(chunk.slot, chunk.length)[5] ^= 1
    logits, _, start = converse(runner, cache, prompt, 2)
    assert start == 0 and cache.stats()["restore_failed"] == 1
    assert torch.equal(logits, converse(runner, None, prompt, 2)[0])


def test_a_drafter_drafts_on(runners: Any) -> None:
    """Rows of V3's prediction layer are kept as well; the text is the same either way."""
    runner = runners("v3", mtp=True)
    cache = cache_of(runner)
    prompt = probe_text(runner.model.args, 140)
    state = runner.open_sequence()
    runner.prefill(state, prompt, final=True)
    cache.store(state)
    cache.flush()
    copy = runner.open_sequence()
    resumed = cache.resume(prompt, copy)
    assert resumed is not None and resumed.num_tokens == 139
    layer = runner.model.args.num_hidden_layers
    live = state.live_rows("latent")[layer, :138], copy.live_rows("latent")[layer, :138]
    assert torch.equal(*live) and live[0].any()
    runner.prefill(copy, prompt[139:], final=True)
    drafts = runner.draft([(copy, 7)])
    assert runner.refine(drafts, 0, [7])[0].isfinite().all()
    for sequence in (state, copy):
        runner.close_sequence(sequence)


def test_how_far_back_after_a_resume(runners: Any) -> None:
    """Rings come back with their last rows only, and say so."""
    runner = runners("v4")
    cache = cache_of(runner)
    prompt = probe_text(runner.model.args, 200)
    converse(runner, cache, prompt, 0)
    state = runner.open_sequence()
    assert cache.resume([*prompt, 7], state) is not None and state.num_tokens == 200
    with pytest.raises(StateError, match="cannot truncate 200 tokens to 190 exactly"):
        state.truncate(190)
    with pytest.raises(StateError, match="begin at 200, not at 199"):
        codec.checkpoint_of(cache.layout, state, 199)
    runner.step([(state, [4, 5, 6])])
    runner.commit(state, 201)
    assert state.num_tokens == 201
    runner.close_sequence(state)
    assert all(not rows.any() for rows in runner.pool.rows.values())


def test_layouts(runners: Any) -> None:
    v4 = codec.layout_of(runners("v4").pool)
    assert v4.rings and v4.window == 32 and v4.pending_rows == 128
    assert [len(v4.planes), len(v4.pending)] == [5, 5]
    assert not codec.layout_of(runners("v3").pool).rings
    assert codec.layout_of(runners("llama").pool).block_bytes == 128 * 3 * 2 * 2 * 32 * 4
    with pytest.raises(ConfigError, match="a cache block would take 16256 tokens"):
        Layout.of_kinds([StateKind("a", "a", 1, 4, ratio=127)])
    with pytest.raises(ConfigError, match="does not fit this model's state pool"):
        KvCache(
            runners("v3").pool,
            expected=b"x" * 32,
            layout=codec.layout_of(runners("llama").pool),
            max_bytes=1 << 20,
        )


def test_settings_of_layouts(runners: Any) -> None:
    """Chunks are one block at least, and hold a checkpoint of small models."""
    for kind in KINDS:
        layout = codec.layout_of(runners(kind).pool)
        settings = StoreSettings.of(layout)
        assert 1 <= settings.chunk_blocks <= 36
    huge = Layout.of_kinds([StateKind("latent", "latents", 61, 576)])
    assert StoreSettings.of(huge).chunk_blocks == 1
    assert np.prod([128, 61, 576, 4]) == huge.block_bytes
