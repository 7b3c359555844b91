"""The drafter's own texts: prefixes, generation, files, rows, and training on them; restoring."""

import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from test_train import lines, model_file  # noqa: F401
from tiny import tiny_args, tiny_corpus

from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.checkpoint.writer import write_checkpoint
from deepdraft.engine.runner import Runner
from deepdraft.models import model_class
from training import continuations, losses, store
from training.continuations import GIVEN, KINDS, Continuations, Prefixes, Writer, generate
from training.evaluate import to_batch
from training.export import drafter_of, export, published_config, published_tensors
from training.restore import restore
from training.train import Trainer, parse_options


def files(folder: Path, split: str, count: int = 3) -> None:
    """Texts that count upwards, 20 tokens given of 60."""
    rng = np.random.default_rng(len(split))
    writer = Writer(folder, f"{split}-0")
    for k in range(count * len(KINDS)):
        ids = [0, *((int(rng.integers(80)) + np.arange(60)) % 80 + 10).tolist()]
        writer.add(continuations._Text(None, k % len(KINDS), ids, 20, 61, 0.0))
    writer.flush()


def test_prefixes_come_from_their_split() -> None:
    corpus = tiny_corpus()
    ends = next(s for s in corpus.sources if s["split"] == "val")
    for split in ("train", "val"):
        prefixes = Prefixes(corpus, split, np.random.default_rng(0))
        inside = (
            corpus.tokens[ends["start"] :] if split == "val" else corpus.tokens[: ends["start"]]
        )
        text = " ".join(map(str, inside.tolist()))
        for _ in range(50):
            kind, ids = prefixes.next()
            assert KINDS[kind] == "code"
            assert 16 <= len(ids) <= 160 and ids[0] == 0
            assert " ".join(map(str, ids[1:])) in text


def test_files_give_rows_with_the_prefix_marked(tmp_path: Path) -> None:
    files(tmp_path, "train")
    source = Continuations(tmp_path, 128, 8, 2, seed=1)
    rows = source.next_rows(4)
    ids, pos, seg, own = continuations.split_given(rows)
    assert ids.max() < 96 and set(np.unique(own)) == {0, 1}
    inside = seg >= 0
    assert np.array_equal(own[inside] == 1, pos[inside] >= 20)
    batch = to_batch(np.stack([ids, pos, seg, own]), torch.device("cpu"))
    _, weight = losses.next_tokens(batch)
    anchors, valid = losses.pick_anchors(batch, weight, 30)
    chosen = batch.pos.gather(1, anchors)[valid]
    assert len(chosen) and int(chosen.min()) >= 20


def test_new_files_are_taken_up(tmp_path: Path) -> None:
    source = Continuations(tmp_path, 128, 8, 2, seed=1, every=0.0)
    assert source.next_rows(2) == [] and source.held_out() == {}
    files(tmp_path, "train")
    assert len(source.next_rows(2)) == 2
    before = source.tokens
    shutil.copy(tmp_path / "train-0-0.npz", tmp_path / "train-1-0.npz")
    source.next_rows(1)
    assert source.tokens == 2 * before
    files(tmp_path, "val")
    held = source.held_out()
    assert set(held) == set(KINDS)
    assert all(len(tokens) == 3 * 61 and len(starts) == 3 for tokens, starts in held.values())


@pytest.fixture
def checkpoint(model_file: Path, tmp_path: Path) -> Path:  # noqa: F811
    """A tiny published checkpoint of random weights, after one round of quantisation."""
    out = tmp_path / "weights"
    options = parse_options(
        [
            *("--corpus", "-", "--model", str(model_file), "--out", str(out)),
            *("--device", "cpu", "--length", "64"),
        ]
    )
    trainer = Trainer(options, tiny_corpus(), 0.0)
    trainer.save()
    tensors = published_tensors(tiny_args(), store.read_weights(out))
    write_checkpoint(tmp_path / "checkpoint", published_config(tiny_args()), tensors)
    return tmp_path / "checkpoint"


def test_restore_is_the_inverse_of_export(
    checkpoint: Path,
    model_file: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    restore(checkpoint, model_file, tmp_path / "init")
    worst, _ = export(tmp_path / "init", model_file, checkpoint, tmp_path / "again")
    assert worst == 0
    export(tmp_path / "init", model_file, checkpoint, tmp_path / "kept", checkpoint)
    first, second = Checkpoint.open(checkpoint), Checkpoint.open(tmp_path / "again")
    kept = Checkpoint.open(tmp_path / "kept")
    names = [name for name, entry in first.table.items() if not name.endswith(".scale")]
    assert len(names) > 100
    for name in names:
        assert torch.equal(first.tensor(name), second.tensor(name)), name
        if not name.startswith("mtp."):
            assert torch.equal(first.packed(name).values, kept.packed(name).values), name
    weights = store.read_weights(tmp_path / "init")
    weights["layers.0.attn.wq_a.weight"] *= 2
    with pytest.raises(ValueError, match=r"layers.0.attn.wq_a"):
        drafter_of(first, published_tensors(tiny_args(), weights))


def test_generated_texts_are_the_models_own(checkpoint: Path, tmp_path: Path) -> None:
    args = tiny_args()
    token_map = [i % 90 for i in range(96)]
    model = model_class(args)(args, Checkpoint.open(checkpoint), token_map, drafter=False)
    runner = Runner(model, max_context=256, num_sequences=3)
    writer = Writer(tmp_path, "train-0")
    steps = iter(range(40))
    generate(
        runner,
        Prefixes(tiny_corpus(), "train", np.random.default_rng(3)),
        writer,
        rng=np.random.default_rng(4),
        eos=1,
        rows=3,
        temperatures=(0.0,),
        flush_every=1e9,
        until=lambda: next(steps, None) is None,
    )
    tokens, starts, kinds = continuations.read_files(sorted(tmp_path.glob("train-*.npz")))
    assert len(starts) == len(kinds) >= 3
    ends = np.append(starts[1:], len(tokens))
    for a, b in zip(starts, ends, strict=True):
        given = int((tokens[a:b] >= GIVEN).sum())
        ids = (tokens[a:b] & (GIVEN - 1)).tolist()
        sequence = runner.open_sequence() if runner.num_free else None
        if sequence is None:
            break
        logits = runner.prefill(sequence, ids[:given], final=True)
        for token in ids[given:]:
            assert logits is not None and int(logits.argmax()) == token
            logits = runner.step([(sequence, [token])])[-1]
        runner.close_sequence(sequence)


def test_the_drafter_trains_on_them(model_file: Path, tmp_path: Path) -> None:  # noqa: F811
    first = tmp_path / "1"
    base = [
        *("--corpus", "-", "--model", str(model_file), "--device", "cpu", "--batch", "4"),
        *("--length", "64", "--anchors", "6", "--eval-rows", "1", "--log-every", "5"),
        *("--max-steps", "3", "--minutes", "5"),
    ]
    Trainer(parse_options([*base, "--out", str(first)]), tiny_corpus(), 0.0).save()
    own, out = tmp_path / "own", tmp_path / "2"
    own.mkdir()
    files(own, "train")
    files(own, "val")
    more = ["--init", str(first), "--phase", "drafter", "--continuations", str(own)]
    trainer = Trainer(
        parse_options([*base, *more, "--out", str(out), "--draft-reach", "0.7"]),
        tiny_corpus(),
        time.monotonic(),
    )
    assert trainer.next_batch().shape == (4, 4, 64)
    trainer.train()
    trainer.finish()
    assert {f"own-{k}" for k in KINDS} <= set(lines(out, "eval")[-1]["sources"])
    before, after = store.read_weights(first), store.read_weights(out)
    moved = {k for k in before if not torch.equal(before[k], after[k])}
    assert moved and all(name.startswith("mtp.") for name in moved)
