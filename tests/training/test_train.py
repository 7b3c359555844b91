"""The training loop on a tiny model: it learns, resumes, quantises and exports."""

import dataclasses
import json
import time
from pathlib import Path

import pytest
import torch
from tiny import tiny_args, tiny_corpus

from deepdraft.checkpoint.config import parse_args
from deepdraft.checkpoint.reader import Checkpoint
from training import store
from training.export import published_config, published_tensors, worst_change
from training.model import Model
from training.train import Trainer, parse_options


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.json"
    record = {
        "args": dataclasses.asdict(tiny_args()),
        "token_map": [i % 90 for i in range(96)],
        "tokenizer_sha256": "0",
    }
    path.write_text(json.dumps(record))
    (tmp_path / "prompts.json").write_text(
        json.dumps([{"class": "count", "ids": [0, 20, 21, 22], "expected_ids": [23, 24, 25]}])
    )
    return path


def run(model_file: Path, out: Path, *extra: str) -> Trainer:
    options = parse_options(
        [
            *("--corpus", "unused", "--model", str(model_file), "--out", str(out)),
            *("--device", "cpu", "--batch", "4", "--length", "64", "--anchors", "6"),
            *("--eval-rows", "1", "--log-every", "5", "--sample-tokens", "2", "--minutes", "5"),
            *("--prompts", str(model_file.parent / "prompts.json")),
            *extra,
        ]
    )
    trainer = Trainer(options, tiny_corpus(), time.monotonic())
    trainer.train()
    trainer.finish()
    return trainer


def lines(out: Path, kind: str) -> list[dict[str, float]]:
    records = [json.loads(x) for x in (out / "log.jsonl").read_text().splitlines()]
    return [r for r in records if r["kind"] == kind]


def test_joint_then_quantised_then_drafter(model_file: Path, tmp_path: Path) -> None:
    first = tmp_path / "1"
    trainer = run(model_file, first, "--max-steps", "24", "--warmup", "4")
    losses = [r["ce"] for r in lines(first, "train")]
    assert losses[-1] < 0.6 * losses[0]
    assert trainer.steps == 24
    assert trainer.last_eval["accepted"] > 1.1

    second = tmp_path / "2"
    every = ("--index-from", "0", "--sparse-from", "0", "--quant-from", "0", "--replay-from", "0")
    # half the learning rate: the quantised model must keep what the first run learnt
    options = ("--init", str(first), "--max-steps", "5", "--muon-lr", "0.01", *every)
    run(model_file, second, *options)
    resumed = [r["ce"] for r in lines(second, "train")]
    assert resumed[0] < 1.3 * losses[-1]
    assert lines(second, "train")[-1]["index"] > 0

    third = tmp_path / "3"
    options = ("--phase", "drafter", "--init", str(second), "--max-steps", "3", *every)
    run(model_file, third, *options)
    before, after = store.read_weights(second), store.read_weights(third)
    moved = {k for k in before if not torch.equal(before[k], after[k])}
    assert moved and all(name.startswith("mtp.") for name in moved)


def test_export_is_what_training_used(model_file: Path, tmp_path: Path) -> None:
    from deepdraft.checkpoint.writer import write_checkpoint

    args = tiny_args()
    model = Model(args, [i % 90 for i in range(96)])
    model.initialise(3)
    store.save_weights(model, tmp_path / "w", {})
    weights = store.read_weights(tmp_path / "w")
    config = published_config(args)
    assert dataclasses.replace(parse_args(config), vision=()) == args
    write_checkpoint(tmp_path / "ck", config, published_tensors(args, weights))
    checkpoint = Checkpoint.open(tmp_path / "ck")
    assert worst_change(args, weights, checkpoint) == 0.0


def test_a_persistent_fault_is_raised_after_saving_is_possible(
    model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = parse_options(
        [
            *("--corpus", "unused", "--model", str(model_file), "--out", str(tmp_path / "o")),
            *("--device", "cpu", "--batch", "4", "--length", "64"),
        ]
    )
    trainer = Trainer(options, tiny_corpus(), time.monotonic())
    calls = []

    def fail(rows: object) -> None:
        calls.append(1)
        raise RuntimeError("broken")

    monkeypatch.setattr(trainer, "step", fail)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train()
    assert len(calls) == 3
    trainer.save()
    assert store.read_weights(tmp_path / "o")


def test_out_of_memory_halves_the_micro_batch(
    model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = parse_options(
        [
            *("--corpus", "unused", "--model", str(model_file), "--out", str(tmp_path / "o")),
            *("--device", "cpu", "--batch", "4", "--length", "64", "--anchors", "4"),
        ]
    )
    trainer = Trainer(options, tiny_corpus(), time.monotonic())
    backward = trainer.backward

    def scarce(batch: object, progress: float) -> object:
        if batch.tokens.shape[0] > 1:  # type: ignore[attr-defined]
            raise torch.cuda.OutOfMemoryError("no room")
        return backward(batch, progress)  # type: ignore[arg-type]

    monkeypatch.setattr(trainer, "backward", scarce)
    trainer.attempt(trainer.sampler.batch(4))
    assert trainer.micro == 4
    assert trainer.steps == 1


def test_a_broken_loss_returns_to_good_weights(model_file: Path, tmp_path: Path) -> None:
    options = parse_options(
        [
            *("--corpus", "unused", "--model", str(model_file), "--out", str(tmp_path / "o")),
            *("--device", "cpu", "--batch", "4", "--length", "64"),
        ]
    )
    trainer = Trainer(options, tiny_corpus(), time.monotonic())
    trainer.check({"ce": 1.0})
    good = trainer.model.params["head.weight"].detach().clone()
    with torch.no_grad():
        trainer.model.params["head.weight"].fill_(float("nan"))
    trainer.check({"ce": float("nan")})
    assert torch.equal(trainer.model.params["head.weight"], good)
    assert trainer.factor == 0.5
