"""Half precision and the published quantised arithmetic of the families.

The judges: a second forward with every rounding written out (V4), the grid that values must lie on,
the row rule, and how much is lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.errors import ConfigError
from deepdraft.models import model_class
from deepdraft.models.arithmetic import Map, hadamard, make_arithmetic
from deepdraft.proof.native import probe_text
from deepdraft.proof.tiny_write import write_tiny
from tests.families import naive_v4

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CASES = [
    *((kind, "bf16") for kind in ("llama", "v2", "v3", "v32", "v4")),
    *((kind, "fp16") for kind in ("v2-lite", "v4")),
    *((kind, "qsim") for kind in ("v32", "v4")),
    *((kind, "quant") for kind in ("v3", "v32", "v4")),
]
NEVER_ROUNDED = {"csa_raw", "index_raw", "hca_raw"}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """The tiny model of a kind as published, in a numerics, loaded once."""
    paths: dict[str, Path] = {}
    models: dict[tuple[str, str, torch.dtype], Any] = {}

    def get(kind: str, numerics: str = "exact", dtype: torch.dtype = torch.float32) -> Any:
        if kind not in paths:
            paths[kind] = write_tiny(
                tmp_path_factory.mktemp("tiny") / kind, kind, storage="published"
            )
        key = (kind, numerics, dtype)
        if key not in models:
            checkpoint = Checkpoint.open(paths[kind])
            models[key] = model_class(checkpoint.args)(
                checkpoint.args, checkpoint, numerics=numerics, dtype=dtype
            )
        return models[key]

    return get


def run(model: Any, ids: list[int], sizes: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
    pool = model.new_pool(2, len(ids), slack=max(sizes))
    pool.open()
    sequence, at, logits = pool.open(), 0, []
    for size in sizes:
        logits.append(model.step([(sequence, ids[at : at + size])]).logits.clone())
        at += size
    assert at == len(ids)
    return torch.cat(logits), {name: sequence.live_rows(name) for name in pool.kinds}


def mean_kl(p: Tensor, q: Tensor) -> float:
    p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize(("kind", "numerics"), CASES)
def test_rows_and_cuts(kind: str, numerics: str, opened: Callable[..., Any]) -> None:
    """One shot, odd chunks and single tokens give the same bits, state included; a little is lost
    against exact, and not nothing."""
    model = opened(kind, numerics)
    ids = probe_text(model.args, 150)
    whole, state = run(model, ids, [150])
    for sizes in ([1] * 6 + [17, 64, 63], [40, 2, 3, 64, 1, 40]):
        logits, rows = run(model, ids, sizes)
        assert torch.equal(logits, whole)
        assert all(torch.equal(rows[name], state[name]) for name in state)
    assert whole.isfinite().all()
    exact = run(opened(kind), ids, [150])[0]
    # Selection by index scores of random weights is what rounding changes most.
    most = {"v32": 0.5, "v4": 0.3, "v3": 0.1}.get(kind, 0.03)
    assert 1e-9 < mean_kl(exact, whole) < most


@pytest.mark.parametrize(("kind", "numerics"), CASES)
def test_state_lies_on_the_grid(kind: str, numerics: str, opened: Callable[..., Any]) -> None:
    model = opened(kind, numerics)
    state = run(model, probe_text(model.args, 140), [140])[1]
    half = HALVES.get(numerics, torch.bfloat16)
    for name, rows in state.items():
        on_grid = torch.equal(rows, rows.to(half).float())
        if numerics != "qsim" and (kind, numerics, name) != ("v32", "quant", "index"):
            assert on_grid == (name not in NEVER_ROUNDED), name
        if numerics in ("qsim", "quant") and name in ("window", "csa", "hca"):
            rotary = model.args.qk_rope_head_dim
            plain = rows[..., :-rotary]
            assert torch.equal(naive_v4.fp8(plain, 64), plain), name
        if numerics in ("qsim", "quant") and name == "index" and kind == "v4":
            assert torch.equal(naive_v4.fp4(rows), rows)


def weights_of(model: Any, dtype: torch.dtype) -> tuple[dict[str, Tensor], frozenset[str]]:
    source = model.weights.source
    values, quantised = {}, set()
    for name, entry in source.table.items():
        if entry.format in ("scale", "block_scale"):
            continue
        ids = entry.format in ("i32", "i64")
        values[name] = source.tensor(name, torch.int64 if ids else dtype)
        if entry.format in ("fp8_block", "mxfp4"):
            quantised.add(name)
    return values, frozenset(quantised)


def test_v4_is_the_naive_forward(opened: Callable[..., Any]) -> None:
    """Exact numerics in float64, to rounding."""
    model = opened("v4", dtype=torch.float64)
    ids = probe_text(model.args, 140)
    naive = naive_v4.NaiveV4(model.args, weights_of(model, torch.float64)[0])
    ours, theirs = run(model, ids, [140])[0], naive.logits(ids)
    assert float((ours - theirs).abs().max() / theirs.std()) < 1e-10


@pytest.mark.parametrize("numerics", ["bf16", "qsim", "quant"])
def test_v4_rounds_as_the_naive_forward(numerics: str, opened: Callable[..., Any]) -> None:
    """Two orders of summation part at rounding boundaries, so the two do not agree to the bit; but
    each rounding that one of them lacks moves the logits by far more than these partings."""
    model, dtype = opened("v4", numerics), torch.float32
    ids = probe_text(model.args, 140)
    values, quantised = weights_of(model, dtype)
    quantised = quantised - {n for n in quantised if "compressor" in n or n.endswith("wo_a.weight")}
    if numerics == "bf16":
        quantised = frozenset()
        rounded = model.weights
        values = {n: rounded.vector(n) if v.ndim == 1 else v for n, v in values.items()}
        values = {n: v.bfloat16().float() if _is_map(n, v) else v for n, v in values.items()}
    naive = naive_v4.NaiveV4(model.args, values, half=numerics != "qsim", quantised=quantised)
    ours, theirs = run(model, ids, [140])[0], naive.logits(ids)
    exact = run(opened("v4"), ids, [140])[0]
    apart = (ours - theirs).abs().amax(-1).median()
    lost = (ours - exact).abs().amax(-1).median()
    assert apart < 0.4 * lost, (float(apart), float(lost))


def _is_map(name: str, value: Tensor) -> bool:
    return value.ndim == 2 and value.is_floating_point() and "hc_" not in name and "ape" not in name


def test_maps_of_unlike_storage() -> None:
    """Each part of joined maps has its own input: quantised where it is stored so."""
    g = torch.Generator().manual_seed(3)
    x, a, b = (torch.randn(n, m, generator=g) for n, m in ((5, 192), (192, 7), (192, 9)))
    num = make_arithmetic("quant", powers=True)
    got = Map([(a, True), (b, False)], num)(x)
    rounded = torch.cat([naive_v4.fp8(x, 128) @ a, x @ b], 1).bfloat16().float()
    assert float((got - rounded).abs().max()) <= float(rounded.abs().max()) * 2**-8
    assert (got == rounded).float().mean() > 0.9
    assert torch.equal(make_arithmetic("exact").act(x), x)


@pytest.mark.parametrize("size", [1, 32, 128])
def test_hadamard(size: int) -> None:
    x = torch.randn(3, 2, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(hadamard(x), x @ naive_v4.hadamard(size), atol=1e-14)
    assert torch.allclose(hadamard(hadamard(x)), x, atol=1e-14)


def test_scales_of_inputs(tmp_path: Path) -> None:
    """Powers of two where the configuration or stored E8M0 factors say so, else any float32."""
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(2))
    for kind, changes, powers in (
        ("v3", {}, False),
        ("v3", {"scale_fmt": "ue8m0"}, True),
        ("v4", {"scale_fmt": None}, True),
    ):
        at = write_tiny(tmp_path / f"{kind}{len(changes)}", kind, storage="published")
        config = json.loads((at / "config.json").read_text())
        config["quantization_config"] |= changes
        (at / "config.json").write_text(json.dumps(config))
        checkpoint = Checkpoint.open(at)
        model = model_class(checkpoint.args)(checkpoint.args, checkpoint, numerics="quant")
        expected = naive_v4.fp8(x, 128)
        assert torch.equal(model.num.fp8(x), expected) == powers, kind
        scale = x.abs().amax(-1, keepdim=True) / 448
        if not powers:
            codes = (x / scale).to(torch.float8_e4m3fn).float()
            assert torch.equal(model.num.fp8(x), codes * scale)


@pytest.mark.parametrize("numerics", ["qsim", "quant"])
@pytest.mark.parametrize("kind", ["llama", "v2", "v3"])
def test_nothing_to_quantise(kind: str, numerics: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_tiny(tmp_path / kind, kind, storage="bfloat16"))
    with pytest.raises(ConfigError, match=r"stored in FP8 or FP4.*use exact, bf16 or fp16"):
        model_class(checkpoint.args)(checkpoint.args, checkpoint, numerics=numerics)


def test_other_refusals(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_tiny(tmp_path / "v3", "v3"))
    with pytest.raises(ConfigError, match="numerics must be one of exact, bf16"):
        model_class(checkpoint.args)(checkpoint.args, checkpoint, numerics="int4")
    v41 = Checkpoint.open(write_tiny(tmp_path / "v41", "v41"))
    with pytest.raises(ConfigError, match="numerics must be exact, qsim or quant"):
        model_class(v41.args)(v41.args, v41, list(range(512)), numerics="bf16")


def test_fp16_overflows_as_it_would(tmp_path: Path) -> None:
    """Values beyond 65504 become infinite, in fp16 alone."""
    at = write_tiny(tmp_path / "llama", "llama")
    checkpoint = Checkpoint.open(at)

    class Loud:
        table = checkpoint.table

        def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
            x = checkpoint.tensor(name, dtype)
            return x * 2.0**18 if "layers.1.mlp.up_proj" in name else x

        packed = checkpoint.packed

    for numerics, finite in (("exact", True), ("bf16", True), ("fp16", False)):
        model = model_class(checkpoint.args)(checkpoint.args, Loud(), numerics=numerics)
        logits = run(model, probe_text(model.args, 20), [20])[0]
        assert bool(logits.isfinite().all()) == finite, numerics
