"""V4's next-token prediction layer as a drafter, against a second, naive forward of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy as entropy

from deepdraft.checkpoint.families import parse_model_args
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.engine.runner import Runner
from deepdraft.errors import CheckpointError, StateError
from deepdraft.kv import codec
from deepdraft.kv.cache import KvCache
from deepdraft.kv.settings import StoreSettings
from deepdraft.kv.snapshot import fingerprint
from deepdraft.models import model_class
from deepdraft.models.mtp import BLOCK
from deepdraft.proof.tiny_families import tiny_config, tiny_tensors
from deepdraft.proof.tiny_write import write_directory, write_tiny
from tests.families.drafting import (
    SMALL_V4,
    check_drafted_is_plain,
    check_refined,
    following,
    stats_of_trained,
    text,
    train,
)
from tests.families.naive_v4 import NaiveV4
from tests.families.test_dspark_v4 import naive_of

CONFIG = tiny_config("v4", mtp="next")


@pytest.fixture(scope="module")
def v4(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(write_tiny(tmp_path_factory.mktemp("mtp") / "m", "v4", mtp="next"))


@pytest.fixture(scope="module")
def runner(v4: Checkpoint) -> Runner:
    return Runner.from_checkpoint(v4, None, max_context=256, num_sequences=4, drafter=True)


@pytest.mark.parametrize("cut", [1, 33, 50])
def test_drafts_are_the_naive_ones(v4: Checkpoint, cut: int) -> None:
    """Behind texts shorter and longer than the window, fed by prefill and by steps that are partly
    taken back; beside another sequence."""
    model = model_class(v4.args)(v4.args, v4, dtype=torch.float64, drafter=True)
    ids, drafts = text(60), [50, 60]
    pool = model.new_pool(2, 128, slack=8)
    sequence, other = pool.open(), pool.open()
    model.prefill(other, text(12)[::-1], feed_drafter=True)
    model.prefill(sequence, ids[:cut], feed_drafter=True)
    for first in range(cut, 59, 5):
        part = ids[first : min(first + 5, 59)]
        out = model.step([(sequence, [*part, 9, 9])])
        sequence.truncate(first + len(part))
        model.drafter.feed_all([(sequence, out.taps[: len(part)], first)])
    expected = naive_of(v4).next_drafts(ids, drafts)
    starts = model.drafter.start([(sequence, ids[59]), (other, 5)], BLOCK)
    check_refined(model.drafter, starts, ids[59], drafts, expected)


@pytest.mark.parametrize("numerics", ["exact", "quant"])
def test_drafted_is_plain(numerics: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_tiny(tmp_path / "m", "v4", mtp="next", storage="published"))
    check_drafted_is_plain(checkpoint, block_size=BLOCK, tokens=16, numerics=numerics)


def test_parked_and_undone_sequences_draft_on(runner: Runner) -> None:
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
    b.truncate(36)
    with pytest.raises(StateError, match="not known to the drafter"):
        runner.draft([(b, 8)])
    runner.step([(b, [4, 4])])  # and goes on behind the next step
    assert len(runner.draft([(b, 8)])) == 1
    for sequence in (a, b):
        runner.close_sequence(sequence)
    pool: Any = runner.pool
    assert all(not rows.any() for rows in pool.rows.values())


def test_a_stored_conversation_drafts_on(runner: Runner) -> None:
    """All but the last entry of the layer comes back."""
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
    pool: Any = runner.pool
    layer, kind = pool.rows["window"][-1], pool.kinds["window"]
    sequences: list[Any] = [state, copy]
    held = [layer[s.address(kind, torch.arange(45, 69).numpy())] for s in sequences]
    assert torch.equal(*held) and bool(held[0].any(-1).all())
    for sequence in (state, copy):
        runner.prefill(sequence, [9], final=True)
    assert len(runner.draft([(state, 8), (copy, 8)])) == 2
    for sequence in (state, copy):
        runner.close_sequence(sequence)


def test_the_layer_is_accounted_for(tmp_path: Path) -> None:
    """An export may leave it out, but not a part of it; copies of embedding and head may be there;
    of a layer that compresses nothing is known, and its tensors stay unread."""
    tensors = tiny_tensors(CONFIG)
    rest = {name: t for name, t in tensors.items() if not name.startswith("mtp.")}
    copies = {
        "mtp.0.emb.tok_emb.weight": tensors["embed.weight"].clone(),
        "mtp.0.head.weight": tensors["head.weight"].clone(),
    }

    def opened(name: str, tensors: dict[str, Tensor], **config: Any) -> Checkpoint:
        write_directory(tmp_path / name, CONFIG | config, tensors)
        return Checkpoint.open(tmp_path / name)

    plain = opened("a", rest)
    runner = Runner.from_checkpoint(plain, None, max_context=64, drafter=True)
    assert runner.model.drafter is None and runner.block_size > BLOCK
    names = {name for name in tensors if name.startswith("mtp.")}
    assert set(opened("b", tensors | copies).skipped["mtp"]) == names | set(copies)
    part = {name: t for name, t in tensors.items() if name != "mtp.0.hnorm.weight"}
    with pytest.raises(CheckpointError, match=r"missing: mtp\.0\.hnorm\.weight"):
        opened("c", part)
    other = opened(
        "d", rest | {"mtp.0.any": torch.ones(3)}, compress_ratios=[*CONFIG["compress_ratios"], 4]
    )
    assert other.skipped["mtp"] == ["mtp.0.any"]
    runner = Runner.from_checkpoint(other, None, max_context=64, drafter=True)
    assert runner.model.drafter is None


def test_a_trained_layer_drafts_far_above_chance(tmp_path: Path) -> None:
    """Trained with the naive forward on texts in which each token follows from the one before."""
    config = CONFIG | SMALL_V4
    args: Any = parse_model_args(config)
    w = {name: t.clone().requires_grad_() for name, t in tiny_tensors(config, 1).items()}
    naive, generator = NaiveV4(args, w), torch.Generator().manual_seed(0)

    def loss() -> Tensor:
        ids = following(10, generator)
        streams = naive.streams(ids[:-1])[-1]
        h = naive.norm(naive.head_mix(streams, "hc_head_"), w["norm.weight"])
        own = entropy(h @ w["head.weight"].T, torch.tensor(ids[1:]))
        out = naive.predicted(ids[1:-1], streams[:-1])
        return own + entropy(naive.predicted_logits(out), torch.tensor(ids[2:]))

    train(w, loss, steps=40, lr=1e-2)
    prompt = following(12, generator)
    stats = stats_of_trained(tmp_path / "m", config, w, prompt, tokens=60, num_drafts=1)
    share = stats["spec_accepted_1"] / stats["spec_verified"]
    assert share > 0.6, f"{share=}, chance is 1/16"
