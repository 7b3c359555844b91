"""What a GPU must have, said before anything is loaded; settings that do not go together."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from deepdraft.checkpoint.config import parse_args
from deepdraft.config import EngineConfig
from deepdraft.engine import gpu_runner
from deepdraft.engine.dummy import DummyWeights, dummy_args
from deepdraft.errors import ConfigError, EngineError
from deepdraft.models.v41_device import DeviceV41
from deepdraft.models.v41_joins import RankJoins
from deepdraft.text.tokenizer import Tokenizer
from tests.step import tiny

PUBLISHED = Path(__file__).parents[1] / "checkpoint" / "data" / "v41-config.json"


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of the given size and capability."""

    def has(free: float, capability: tuple[int, int] = (9, 0)) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(free), int(150e9)))

    return has


def test_a_gpu_that_cannot_run_the_model_is_refused_with_what_would(gpu, monkeypatch):
    args = parse_args(json.loads(PUBLISHED.read_text()))
    gpu(149e9)
    with pytest.raises(
        ConfigError, match=r"need 3\d\d\.\d GB, 149\.0 of 150\.0 GB.*on 3 such GPUs"
    ):
        gpu_runner.check_gpu(args, drafter=True)
    gpu_runner.check_gpu(dummy_args(args, expert_pool=96), drafter=True)
    gpu(149e9, (8, 0))
    with pytest.raises(ConfigError, match=r"a GPU has compute capability 8\.0"):
        gpu_runner.check_gpu(tiny.args(), drafter=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch finds no CUDA device"):
        gpu_runner.check_gpu(tiny.args(), drafter=True)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"device": "cuda"}, "engine.numerics must be"),
        (
            {"device": "cuda", "numerics": "quant", "load": "dummy", "tp": 2},
            "engine.load must be",
        ),
        ({"load": "dummy"}, "engine.load must be checkpoint on a CPU"),
        ({"device": "tpu"}, "engine.device must be one of cpu, cuda"),
        ({"expert_pool": 0}, "engine.expert_pool must be"),
    ],
)
def test_settings_that_do_not_go_together(settings, says):
    with pytest.raises(ConfigError, match=says):
        EngineConfig(**settings)


def test_a_model_is_cut_to_layers_a_pool_and_short_tables():
    args = parse_args(json.loads(PUBLISHED.read_text()))
    cut = dummy_args(args, layers=18, expert_pool=96, engram_rows=1000)
    assert (cut.num_hidden_layers, cut.n_routed_experts) == (18, 96)
    assert cut.kv_source_layer_ids == (2, 8, 14) and cut.engram_num_embeddings == (1000, 1000)
    assert cut.compress_ratios == (0, 0, *[2] * 16, 0, 0, 0)
    assert dummy_args(args, expert_pool=1000).n_routed_experts == args.n_routed_experts
    assert dummy_args(args) == args


def test_dummy_weights_are_seeded_by_name_and_hold_no_nan():
    args = dataclasses.replace(tiny.args(), n_routed_experts=2)
    one, two = (DummyWeights(args, device="cpu", seed=s) for s in (1, 2))
    name = "layers.1.ffn.experts.1.w1.weight"
    assert torch.equal(
        one.packed(name).values, DummyWeights(args, device="cpu", seed=1).packed(name).values
    )
    assert not torch.equal(one.packed(name).values, two.packed(name).values)
    assert all(
        bool(torch.isfinite(one.tensor(n)).all())
        for n, e in one.table.items()
        if e.format != "scale"
    )


def test_the_memory_of_prompts_is_planned_or_refused_with_what_would_fit():
    args = parse_args(json.loads(PUBLISHED.read_text()))
    assert gpu_runner.prefill_plan(args, 1 << 20, 20 << 30, None).rows == 8192
    assert gpu_runner.prefill_plan(args, 1 << 20, 20 << 30, 1000).rows == 1000
    small = gpu_runner.prefill_plan(args, 1 << 20, 3 << 30, None)
    assert 256 <= small.rows < 8192 and small.workspace + small.state <= 3 << 30
    with pytest.raises(ConfigError, match=r"does not fit: .* (\d+) tokens would fit") as caught:
        gpu_runner.prefill_plan(args, 1 << 20, 1 << 30, None)
    fitting = int(str(caught.value).split(" tokens would fit")[0].split()[-1])
    assert gpu_runner.prefill_plan(args, fitting, 1 << 30, None).rows == 256


def test_memory_that_is_gone_ends_a_prompt_with_what_to_do(monkeypatch):
    """Taken by others after it was planned: that prompt fails, its sequence is given back."""
    model = DeviceV41(
        tiny.args(), tiny.source(), list(range(tiny.VOCABULARY)), device="cpu", prefill_chunk=16
    )
    runner = gpu_runner.GpuRunner(model, prefill="encoder", max_context=64, num_sequences=1)
    assert (runner.prefill_rows, runner.least_rows) == (16, 256)

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(model._prefill, "encode", full)
    sequence = runner.open_sequence()
    with pytest.raises(EngineError, match=r"ran out while a prompt was read .*: lower max_context"):
        runner.prefill(sequence, [1, 2, 3], final=True)
    runner.close_sequence(sequence, scrub=True)
    assert runner.num_free == 1
    model.joins = RankJoins(None)
    with pytest.raises(ConfigError, match="share_prefill comes first"):
        model.new_pool(1, 64)


def test_dummy_weights_need_no_shards(tmp_path):
    """config.json and the tokenizer are enough; what runs has its own random bytes."""
    (tmp_path / "config.json").write_text(PUBLISHED.read_text())
    sizes = gpu_runner.Sizes(tmp_path)
    assert sizes.args.num_hidden_layers == 40
    demo = Path(gpu_runner.__file__).parents[1] / "demo" / "checkpoint"
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((demo / name).read_bytes())
    runner = gpu_runner.GpuRunner.from_checkpoint(
        gpu_runner.Sizes(tmp_path),
        Tokenizer.load(tmp_path),
        max_context=64,
        drafter=True,
        dummy=True,
        expert_pool=4,
        device="cpu",
    )
    assert runner.model.args.n_routed_experts == 4 and runner.block_size == 5
    assert runner.model.weights.layers[0].experts.w13.values.shape[0] == 4
