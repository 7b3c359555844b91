"""V4's DSpark layers as a drafter, against a second, naive forward of model and drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy as entropy

from deepdraft.checkpoint.families import parse_model_args
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.engine.runner import Runner
from deepdraft.errors import CheckpointError, ConfigError, StateError
from deepdraft.kv import codec
from deepdraft.kv.cache import KvCache
from deepdraft.kv.settings import StoreSettings
from deepdraft.kv.snapshot import fingerprint
from deepdraft.models import model_class
from deepdraft.proof.tiny_families import tiny_config, tiny_tensors
from deepdraft.proof.tiny_write import write_directory, write_tiny
from tests.families.drafting import (
    SMALL_V4,
    check_drafted_is_plain,
    following,
    stats_of_trained,
    text,
    train,
)
from tests.families.naive_v4 import NaiveV4


@pytest.fixture(scope="module")
def v4(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(write_tiny(tmp_path_factory.mktemp("dspark") / "m", "v4", mtp=True))


@pytest.fixture(scope="module")
def runner(v4: Checkpoint) -> Runner:
    return Runner.from_checkpoint(v4, None, max_context=256, num_sequences=4, drafter=True)


def naive_of(checkpoint: Checkpoint) -> NaiveV4:
    table = checkpoint.table.items()
    kinds = {n: torch.int64 if e.format in ("i32", "i64") else torch.float64 for n, e in table}
    return NaiveV4(checkpoint.args, {n: checkpoint.tensor(n, kind) for n, kind in kinds.items()})


@pytest.mark.parametrize(("cut", "size"), [(1, 4), (33, 4), (50, 1)])
def test_drafts_are_the_naive_ones(v4: Checkpoint, cut: int, size: int) -> None:
    """Behind texts shorter and longer than the window, fed by prefill and by steps that are partly
    taken back; beside another sequence."""
    model = model_class(v4.args)(v4.args, v4, dtype=torch.float64, drafter=True)
    naive, ids = naive_of(v4), text(60)
    pool = model.new_pool(2, 128, slack=8)
    sequence, other = pool.open(), pool.open()
    model.prefill(other, text(12)[::-1], feed_drafter=True)
    model.prefill(sequence, ids[:cut], feed_drafter=True)
    for first in range(cut, 59, 5):
        part = ids[first : min(first + 5, 59)]
        out = model.step([(sequence, [*part, 9, 9])])
        sequence.truncate(first + len(part))
        model.drafter.feed_all([(sequence, out.taps[: len(part)], first)])
    base, hidden = naive.block_logits(ids[:59], ids[59], size)
    before = [ids[59], 50, 60, 70][:size]
    expected, raw = naive.refined(base, hidden, before)
    starts = model.drafter.start([(sequence, ids[59]), (other, 5)], size)
    for i, token in enumerate(before):
        found = model.drafter.refine(starts, i, [token, 11 + i])
        error = (found.logits[0] - expected[i]).abs().max() / expected[i].abs().max()
        assert float(error) < 1e-10
        assert float(found.raw[0]) == pytest.approx(float(raw[i]), abs=1e-9)


def test_drafted_is_plain(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_tiny(tmp_path / "m", "v4", mtp=True, storage="published"))
    for numerics in ("exact", "quant"):
        check_drafted_is_plain(checkpoint, block_size=4, tokens=24, numerics=numerics)


def test_parked_cloned_and_undone_sequences_draft_on(runner: Runner) -> None:
    a, b = runner.open_sequence(), runner.open_sequence()
    for sequence in (a, b):
        runner.prefill(sequence, text(40), final=True)
        runner.step([(sequence, [5, 6, 7])])
        runner.commit(sequence, 42)
    b = runner.unpark(runner.park(b))
    logits, _ = runner.refine(runner.draft([(a, 8), (b, 8)]), 0, [8, 8])
    assert torch.equal(logits[0], logits[1])
    alone, _ = runner.refine(runner.draft([(a, 8)]), 0, [8])
    assert torch.equal(alone[0], logits[0])
    b.truncate(41)
    fresh = runner.open_sequence()
    runner.prefill(fresh, text(40), final=True)
    runner.step([(fresh, [5])])
    both, _ = runner.refine(runner.draft([(b, 9), (fresh, 9)]), 1, [4, 4])
    assert torch.equal(both[0], both[1])
    fresh.fed = 0, 5
    with pytest.raises(StateError, match="told of 5 of 41 tokens"):
        runner.draft([(fresh, 8)])
    for sequence in (a, b, fresh):
        runner.close_sequence(sequence)
    assert all(not rows.any() for rows in runner.pool.rows.values())


def test_a_stored_conversation_drafts_on(runner: Runner) -> None:
    layout = codec.layout_of(runner.pool)
    cache = KvCache(
        runner.pool,
        expected=fingerprint({"model": "tiny"}),
        layout=layout,
        max_bytes=64 << 20,
        settings=StoreSettings.of(layout),
    )
    prompt = text(70)
    state, copy = runner.open_sequence(), runner.open_sequence()
    runner.prefill(state, prompt, final=True)
    runner.feed_pending(state)
    cache.store(state)
    cache.flush()
    assert cache.resume([*prompt, 9], copy) is not None and copy.num_tokens == 70
    for sequence in (state, copy):
        runner.prefill(sequence, [9], final=True)
    logits, raw = runner.refine(runner.draft([(state, 8), (copy, 8)]), 0, [8, 8])
    assert torch.equal(logits[0], logits[1]) and raw[0] == raw[1]
    for sequence in (state, copy):
        runner.close_sequence(sequence)


def test_without_the_layers_the_text_drafts(tmp_path: Path) -> None:
    """An export may leave them out, but not a part of them."""
    config = tiny_config("v4", mtp=True)
    tensors = tiny_tensors(config)
    rest = {name: t for name, t in tensors.items() if not name.startswith("mtp.")}
    write_directory(tmp_path / "a", config, rest)
    runner = Runner.from_checkpoint(
        Checkpoint.open(tmp_path / "a"), None, max_context=64, drafter=True
    )
    assert runner.model.drafter is None and runner.block_size == 7
    tensors.pop("mtp.1.hc_head_fn")
    write_directory(tmp_path / "b", config, tensors)
    with pytest.raises(CheckpointError, match=r"missing: mtp\.1\.hc_head_fn"):
        Checkpoint.open(tmp_path / "b")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dspark_target_layer_ids": [3, 1]}, "must rise and lie in 0..3"),
        ({"dspark_target_layer_ids": [4]}, "must rise and lie in 0..3"),
        ({"compress_ratios": [0, 4, 128, 4, 0, 4]}, "must be 0: DSpark layers have windows only"),
        ({"dspark_noise_token_id": 512}, "dspark_noise_token_id"),
        ({"dspark_markov_rank": None}, "dspark_markov_rank"),
    ],
)
def test_wrong_sizes(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_model_args(tiny_config("v4", mtp=True) | changes)


def test_a_trained_drafter_drafts_far_above_chance(tmp_path: Path) -> None:
    """Trained with the naive forward on texts in which each token follows from the one before."""
    drafter = {
        "num_nextn_predict_layers": 1,
        "dspark_target_layer_ids": [0],
        "dspark_noise_token_id": 15,
        "dspark_block_size": 3,
    }
    config = tiny_config("v4", mtp=True) | SMALL_V4 | drafter
    args: Any = parse_model_args(config)
    w = {name: t.clone().requires_grad_() for name, t in tiny_tensors(config, 1).items()}
    naive, generator = NaiveV4(args, w), torch.Generator().manual_seed(0)

    def loss() -> torch.Tensor:
        ids = following(13, generator)
        own = entropy(naive.logits(ids[:-1]), torch.tensor(ids[1:]))
        base, h = naive.block_logits(ids[:9], ids[9], 3)
        logits, _ = naive.refined(base, h, ids[9:12])
        return own + entropy(logits, torch.tensor(ids[10:13]))

    train(w, loss, steps=50, lr=1e-2)
    stats = stats_of_trained(tmp_path / "m", config, w, following(12, generator), tokens=60)
    accepted = sum(k * stats.get(f"spec_accepted_{k}", 0) for k in range(1, 4))
    share = accepted / stats["spec_verified"]
    assert share > 0.4, f"{share=}, chance is 1/16"
