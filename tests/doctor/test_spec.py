"""ModelSpec: styles say the same thing; effective values are compared; the right key is named."""

from typing import Any

import pytest

from deepdraft.checkpoint.spec import ModelSpec
from deepdraft.checkpoint.spec_styles import missing_for
from deepdraft.errors import ConfigError
from deepdraft.proof.tiny_families import KINDS, tiny_config


def spec(kind: str, **changes: Any) -> ModelSpec:
    made = ModelSpec.of(tiny_config(kind))
    for key, value in changes.items():
        made = made.replaced(key.replace("__", "."), value)
    return made


@pytest.mark.parametrize("style", ["published", "transformers5", "vllm", "lmdeploy"])
@pytest.mark.parametrize("kind", KINDS)
def test_styles_come_back(kind: str, style: Any) -> None:
    for real in (False, True):
        clean = ModelSpec.of(tiny_config(kind, real_latents=real))
        again = ModelSpec.of(clean.written(style))
        assert again.args == clean.args
        assert not again.differences(clean) and not again.causes(clean)
        assert ModelSpec.of(again.config).args == clean.args


def test_transformers5_really_is_another_style() -> None:
    for kind in KINDS:
        published = tiny_config(kind)
        five = ModelSpec.of(published).written("transformers5")
        assert (five == published) == (kind == "v41")
        if kind != "v41":
            assert "rope_parameters" in five and "rope_scaling" not in five
    five = ModelSpec.of(tiny_config("v4")).written("transformers5")
    assert five["mlp_layer_types"] == ["hash_moe", "moe", "moe", "moe"]
    assert five["layer_types"][2] == "heavily_compressed_attention"
    assert five["rope_parameters"]["compress"]["factor"] == 16
    assert five["rope_parameters"]["main"]["partial_rotary_factor"] == 0.25


def test_engines_get_the_keys_that_transformers_leaves_out() -> None:
    saved = tiny_config("v3")
    for key in ("topk_method", "scoring_func", "moe_layer_freq"):
        del saved[key]
    assert missing_for("vllm", saved) == {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
    }
    clean = ModelSpec.of(saved)
    assert clean.written("vllm")["topk_method"] == "noaux_tc"
    assert missing_for("vllm", clean.written("vllm")) == {}
    assert missing_for("vllm", tiny_config("v2")) == {}


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("llama", "rope_theta", 10000),
        ("llama", "rope_scaling.factor", 2.0),
        ("llama", "rope_scaling", None),
        ("llama", "rms_norm_eps", 1e-5),
        ("v2", "rope_scaling.mscale_all_dim", 0),
        ("v2", "rope_scaling.mscale", 1.0),
        ("v2", "rope_scaling.original_max_position_embeddings", 512),
        ("v2", "topk_method", "greedy"),
        ("v2", "n_group", 4),
        ("v3", "rope_interleave", False),
        ("v3", "norm_topk_prob", False),
        ("v32", "index_topk", 8),
        ("v4", "compress_rope_theta", 10000),
        ("v4", "sliding_window", 31),
        ("v41", "text_config.rope_theta", 20000),
        ("v41", "text_config.index_topk", 8),
    ],
)
def test_the_key_is_named(kind: str, key: str, value: Any) -> None:
    clean = spec(kind)
    wrong = clean.replaced(key, value)
    first = wrong.causes(clean)[0]
    assert first.key == key and first.alone
    assert all(d.in_logits for d in wrong.differences(clean))


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("v2", "rope_scaling.beta_fast", 8),
        ("v2", "norm_topk_prob", True),
        ("v2-lite", "n_group", 4),
        ("v3", "topk_method", None),
        ("llama", "torch_dtype", "bfloat16"),
        ("llama", "head_dim", 32),
        ("v4", "norm_topk_prob", None),
    ],
)
def test_a_key_without_effect_is_no_difference(kind: str, key: str, value: Any) -> None:
    clean = spec(kind)
    other = clean.replaced(key, value)
    assert other.config != clean.config
    assert not other.differences(clean) and not other.causes(clean)


def test_real_rotary_width_shows_beta_fast() -> None:
    clean = ModelSpec.of(tiny_config("v2", real_latents=True))
    wrong = clean.replaced("rope_scaling.beta_fast", 8)
    assert wrong.causes(clean)[0].key == "rope_scaling.beta_fast"


def test_two_wrong_keys_are_both_named() -> None:
    clean = spec("v3")
    wrong = clean.replaced("rope_theta", 1e5).replaced("routed_scaling_factor", 1.0)
    causes = wrong.causes(clean)
    assert {c.key for c in causes} == {"rope_theta", "routed_scaling_factor"}
    assert not any(c.alone for c in causes)


def test_limits_and_ends_are_not_in_logits() -> None:
    wrong = spec("v3", max_position_embeddings=1024, eos_token_id=5)
    found = {d.field: d.in_logits for d in wrong.differences(spec("v3"))}
    assert found == {"max_position_embeddings": False, "eos_token_id": False}


def test_what_a_style_cannot_say() -> None:
    five = ModelSpec.of(tiny_config("v4")).written("transformers5")
    five["compress_rates"] = {"compressed_sparse_attention": 8}
    with pytest.raises(ConfigError, match=r"compress_rates\.compressed_sparse_attention = 8"):
        ModelSpec.of(five)
    with pytest.raises(ConfigError, match="style 'old' is not known"):
        spec("v2").written("old")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is no object"):
        spec("v2").replaced("rope_theta.factor", 1)


def test_a_rotary_width_that_only_its_share_tells() -> None:
    config = tiny_config("v4")
    width, head = config["qk_rope_head_dim"], config["head_dim"]
    share = {k: v for k, v in config.items() if k != "qk_rope_head_dim"}
    spec = ModelSpec.of(share | {"partial_rotary_factor": width / head})
    assert spec.config["qk_rope_head_dim"] == width
    for style in ("published", "transformers5"):
        assert not ModelSpec.of(spec.written(style)).differences(ModelSpec.of(config))
