"""Tensors of the families: strict accounting, all published storage, tied heads, unread groups."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.errors import CheckpointError
from tests.families.conftest import SETS, Tensors, golden_copy, text_of
from tests.families.stored import (
    expand,
    linears,
    logits_of,
    quantise,
    table_of,
    write,
)

ONE = "deepseek-v3-a"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return golden_copy(ONE, tmp_path) / "checkpoint"


def change(directory: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    write(directory, tensors)


# ---- accounting ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETS)
def test_each_tensor_is_needed(name: str, tmp_path: Path) -> None:
    """Without one tensor, with another name, or with one more, opening fails and says which."""
    at = golden_copy(name, tmp_path) / "checkpoint"
    tensors = load_file(at / "model.safetensors")
    names = [n for n in tensors if "experts." not in n or "experts.0." in n]
    for victim in names[:: max(1, len(names) // 12)]:
        rest = {k: v for k, v in tensors.items() if k != victim}
        write(at, rest)
        with pytest.raises(CheckpointError) as caught:
            Checkpoint.open(at)
        assert f"missing: {victim}" in caught.value.message
        write(at, rest | {f"{victim}.more": tensors[victim]})
        with pytest.raises(CheckpointError, match=r"\(2 problems\)") as caught:
            Checkpoint.open(at)
        assert f"left over: {victim}.more" in caught.value.message


@pytest.mark.parametrize("name", SETS)
def test_each_shape_is_checked(name: str, tmp_path: Path) -> None:
    at = golden_copy(name, tmp_path) / "checkpoint"
    tensors = load_file(at / "model.safetensors")
    victims = list(tensors)[:: max(1, len(tensors) // 10)]
    for victim in victims:
        tensors[victim] = torch.cat([tensors[victim], tensors[victim][:1]])
    write(at, tensors)
    with pytest.raises(CheckpointError, match=rf"\({len(victims)} problems\)") as caught:
        Checkpoint.open(at)
    assert "wrong shape" in caught.value.message


def test_off_by_one_dense_layers(tmp_path: Path) -> None:
    at = golden_copy(ONE, tmp_path, config={"first_k_dense_replace": 2}) / "checkpoint"
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(at)
    assert "missing: model.layers.1.mlp.gate_proj.weight" in caught.value.message
    assert "left over: model.layers.1.mlp" in caught.value.message


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.uint8])
def test_wrong_dtypes(dtype: torch.dtype, directory: Path) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    change(directory, lambda t: t.update({name: t[name].to(dtype)}))
    with pytest.raises(CheckpointError, match=f"wrong dtype: {name}"):
        Checkpoint.open(directory)


def test_nan_is_found(directory: Path) -> None:
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    change(directory, lambda t: t[name].__setitem__(3, float("nan")))
    with pytest.raises(CheckpointError, match=f"{name}.*NaN"):
        Checkpoint.open(directory).tensor(name)


# ---- plain storage -------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETS)
def test_shards(name: str, tmp_path: Path) -> None:
    at = golden_copy(name, tmp_path) / "checkpoint"
    text = text_of(name)[:20]
    whole = logits_of(at, text)
    write(at, load_file(at / "model.safetensors"), shards=3)
    assert torch.equal(logits_of(at, text), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, directory: Path, tmp_path: Path) -> None:
    """Half-precision files are the model of those values, whatever mixture they hold."""
    tensors = load_file(directory / "model.safetensors")
    keep = "mlp.gate."
    write(directory, {n: t if keep in n else t.to(dtype) for n, t in tensors.items()})
    text = text_of(ONE)[:20]
    half = logits_of(directory, text)
    rounded = {n: t if keep in n else t.to(dtype).float() for n, t in tensors.items()}
    write(directory, rounded)
    assert torch.equal(logits_of(directory, text), half)
    entry = table_of(directory)["model.norm.weight"]
    assert entry.format == "f32" and entry.num_bytes == 512


# ---- FP8 and FP4 ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "e8m0"),
    [
        (ONE, False),
        ("deepseek-v2-a", False),
        ("v32-whole", False),
        ("deepseek-v4-a", True),
        ("deepseek-v4-a", False),
    ],
)
def test_fp8_blocks_are_the_model_of_their_values(name: str, e8m0: bool, tmp_path: Path) -> None:
    at = golden_copy(name, tmp_path) / "checkpoint"
    text = text_of(name)[:30]
    before = logits_of(at, text)
    quantise(at, e8m0=e8m0)
    table = table_of(at)
    formats = {table[n].format for n in linears(at) if n in table}
    assert formats == {"fp8_block"}
    scale = {table[e.scale_name].format for e in table.values() if e.scale_name}
    assert scale == {"scale" if e8m0 else "block_scale"}
    stored = load_file(at / "model.safetensors")
    got = logits_of(at, text)
    assert 1e-3 < float((got - before).abs().max() / before.abs().max()) < 1.5
    factors = {e.scale_name for e in table.values() if e.scale_name}
    plain = {}
    for key, tensor in stored.items():
        if key not in factors:
            scale_name = table[key].scale_name
            plain[key] = expand(tensor, stored[scale_name]) if scale_name else tensor
    write(at, plain)
    assert torch.equal(logits_of(at, text), got)


def test_fp4_experts(tmp_path: Path) -> None:
    at = golden_copy("deepseek-v4-a", tmp_path) / "checkpoint"
    before = load_file(at / "model.safetensors")
    quantise(at, e8m0=True, fp4=".experts.")
    table = table_of(at)
    name = "layers.2.ffn.experts.3.w1.weight"
    assert table[name].format == "mxfp4" and table[name].value_shape == (16, 128)
    assert table["layers.2.ffn.experts.3.w1.scale"].shape == (16, 4)
    got = Checkpoint.open(at).tensor(name)
    groups = before[name].view(16, 4, 32)
    step = torch.exp2((groups.abs().amax(-1) / 6).log2().ceil()).unsqueeze(-1)
    assert ((got.view(16, 4, 32) - groups).abs() <= step).all()
    assert logits_of(at, text_of("deepseek-v4-a")[:5]).isfinite().all()


def test_a_scale_is_needed_and_wanted(directory: Path) -> None:
    quantise(directory)
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    scale = f"{name}_scale_inv"
    tensors = load_file(directory / "model.safetensors")
    assert tensors[scale].shape == (2, 1)
    write(directory, {k: v for k, v in tensors.items() if k != scale})
    with pytest.raises(CheckpointError, match=f"missing: {scale}"):
        Checkpoint.open(directory)
    write(directory, tensors | {scale: tensors[scale][:1]})
    with pytest.raises(CheckpointError, match=f"wrong shape: {scale} is"):
        Checkpoint.open(directory)
    write(directory, tensors | {name: tensors[name].float()})
    with pytest.raises(CheckpointError, match=f"left over: {scale}"):
        Checkpoint.open(directory)
    write(directory, tensors)
    with pytest.raises(CheckpointError, match="ask for the weight"):
        Checkpoint.open(directory).tensor(scale)


def test_rows_are_read_in_whole_blocks(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepdraft.checkpoint import reader

    quantise(directory)
    name = "lm_head.weight"
    linear = "model.layers.0.mlp.gate_proj.weight"
    whole = {n: Checkpoint.open(directory).tensor(n) for n in (name, linear)}
    monkeypatch.setattr(reader, "_CHUNK_VALUES", 1)
    for n, value in whole.items():
        assert torch.equal(Checkpoint.open(directory).tensor(n), value)


def test_packed_bytes(directory: Path) -> None:
    quantise(directory)
    packed = Checkpoint.open(directory).packed("model.layers.0.mlp.up_proj.weight")
    assert packed.format == "fp8_block" and packed.values.dtype == torch.uint8
    assert packed.scales is not None and packed.scales.dtype == torch.float32
    assert packed.values.shape == (192, 128) and packed.scales.shape == (2, 1)


# ---- tied heads, stored frequencies, unread layers -----------------------------------------


def test_tied_heads(tmp_path: Path) -> None:
    name = "llama-tied-llama3"
    at = golden_copy(name, tmp_path) / "checkpoint"
    tensors = load_file(at / "model.safetensors")
    assert "lm_head.weight" not in tensors
    text = text_of(name)[:9]
    tied = logits_of(at, text)
    embed = tensors["model.embed_tokens.weight"]
    write(at, tensors | {"lm_head.weight": embed.clone()})
    assert torch.equal(logits_of(at, text), tied)
    write(at, tensors | {"lm_head.weight": embed.flip(0)})
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings.*lm_head\.weight differs"):
        logits_of(at, text)


def test_an_untied_head_is_needed(tmp_path: Path) -> None:
    at = golden_copy("llama-a", tmp_path) / "checkpoint"
    change(at, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        Checkpoint.open(at)


def test_stored_frequencies_stay_unread(tmp_path: Path) -> None:
    at = golden_copy("llama-a", tmp_path) / "checkpoint"
    text, name = text_of("llama-a")[:9], "model.layers.{}.self_attn.rotary_emb.inv_freq"
    before = logits_of(at, text)
    change(at, lambda t: t.update({name.format(i): torch.full((16,), 7.0) for i in range(2)}))
    assert torch.equal(logits_of(at, text), before)
    assert Checkpoint.open(at).skipped["derived"] == [name.format(0), name.format(1)]


def mtp_layer(tensors: Tensors, number: int = 3) -> Tensors:
    """A next-token prediction layer, made from the last layer."""
    at, last = f"model.layers.{number}.", "model.layers.2."
    extra = {n.replace(last, at): t.clone() for n, t in tensors.items() if n.startswith(last)}
    for name in ("enorm", "hnorm", "shared_head.norm"):
        extra[f"{at}{name}.weight"] = torch.ones(128)
    extra[f"{at}eh_proj.weight"] = torch.ones(128, 256)
    return extra


def test_prediction_layers_are_accounted_for(tmp_path: Path) -> None:
    at = golden_copy(ONE, tmp_path, config={"num_nextn_predict_layers": 1}) / "checkpoint"
    text, tensors = text_of(ONE)[:9], load_file(at / "model.safetensors")
    before = logits_of(at, text)  # an export may have left the layer out
    assert Checkpoint.open(at).skipped["mtp"] == []
    extra = mtp_layer(tensors)
    write(at, tensors | extra)
    checkpoint = Checkpoint.open(at)
    assert sorted(checkpoint.skipped["mtp"]) == sorted(extra)
    assert torch.equal(logits_of(at, text), before)
    name = next(name for name in extra if name.endswith("enorm.weight"))
    assert torch.equal(checkpoint.tensor(name), extra[name].float())  # read, to draft
    copies = {
        "model.layers.3.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.3.shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    write(at, tensors | extra | copies)
    assert len(Checkpoint.open(at).skipped["mtp"]) == len(extra) + 2
    del extra["model.layers.3.eh_proj.weight"]
    write(at, tensors | extra)
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.3\.eh_proj\.weight"):
        Checkpoint.open(at)


def test_prediction_layers_that_the_configuration_does_not_know(directory: Path) -> None:
    change(directory, lambda t: t.update(mtp_layer(t)))
    with pytest.raises(CheckpointError, match=r"left over: model\.layers\.3\."):
        Checkpoint.open(directory)


def test_v4_drafters_are_accounted_for(tmp_path: Path) -> None:
    at = golden_copy("deepseek-v4-a", tmp_path) / "checkpoint"
    text, tensors = text_of("deepseek-v4-a")[:9], load_file(at / "model.safetensors")
    before = logits_of(at, text)
    extra: dict[str, Tensor] = {"mtp.0.e_proj.weight": torch.ones(3, 5), "mtp.0.any": torch.ones(1)}
    write(at, tensors | extra)
    with pytest.raises(CheckpointError, match=r"left over: mtp\.0\."):
        Checkpoint.open(at)
    config = json.loads((at / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (at / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"left over: mtp\.0\.any"):
        Checkpoint.open(at)
    # Of a layer that compresses its past nothing is known.
    layers = config["num_hidden_layers"]
    config["compress_ratios"] = [*config["compress_ratios"][:layers], 4]
    (at / "config.json").write_text(json.dumps(config))
    assert sorted(Checkpoint.open(at).skipped["mtp"]) == sorted(extra)
    assert torch.equal(logits_of(at, text), before)
    write(at, tensors | {"mtp.1.any": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"left over: mtp\.1\.any"):
        Checkpoint.open(at)


def test_a_hash_table_that_names_no_expert(tmp_path: Path) -> None:
    at = golden_copy("deepseek-v4-a", tmp_path) / "checkpoint"
    name = "layers.0.ffn.gate.tid2eid"
    change(at, lambda t: t[name].__setitem__((3, 1), 6))
    with pytest.raises(CheckpointError, match=rf"{name} names experts 0\.\.6"):
        logits_of(at, [3])
    change(at, lambda t: t.update({name: (t[name] % 6).to(torch.int32)}))
    assert table_of(at)[name].format == "i32"
    assert logits_of(at, [3]).isfinite().all()


def test_files_of_another_layout(tmp_path: Path) -> None:
    """Names of a saved transformers V4 (prefix, other norms) are refused with the nearest ones."""
    at = golden_copy("deepseek-v4-a", tmp_path) / "checkpoint"
    tensors = load_file(at / "model.safetensors")
    save_file({f"model.{n}": t for n, t in tensors.items()}, at / "model.safetensors")
    with pytest.raises(CheckpointError, match="nearest left over: model") as caught:
        Checkpoint.open(at)
    assert "missing: embed.weight" in caught.value.message
