"""How vLLM is started on a checkpoint: its arguments, its variables, and what it cannot serve.

Owns: facts about vLLM 0.32 and 0.33 as code. Knows nothing of: processes, the engine's modules;
nothing of vLLM is imported here.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepdraft.adapters.environments import Environment, clean_environ
from deepdraft.arch import DeepseekV2Args, DeepseekV3Args, LlamaArgs, V4Args, V41Args
from deepdraft.checkpoint.layouts import read
from deepdraft.checkpoint.spec_styles import missing_for
from deepdraft.errors import ConfigError

_CPU_LATENTS = (512, 64)
_MODULE = "vllm.entrypoints.openai.api_server"
_KV_GIB = 1
_STACKED = {
    "deepseek_v2": "DeepdraftV2ForCausalLM",
    "deepseek_v3": "DeepdraftV3ForCausalLM",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """vLLM's engine settings for one checkpoint."""

    checkpoint: Path
    cpu: bool
    dtype: str
    max_model_len: int
    attention_backend: str | None
    hf_overrides: dict[str, Any]
    speculative: dict[str, Any] | None = None
    plugin: bool = False
    """Whether it needs our plugin (`vllm_plugin`)."""

    def engine_options(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's own engine."""
        options: dict[str, Any] = {
            "model": str(self.checkpoint),
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "hf_overrides": self.hf_overrides,
        }
        if self.attention_backend:
            options["attention_backend"] = self.attention_backend
        if self.cpu:
            options["enforce_eager"] = True
        if self.speculative:
            options["speculative_config"] = self.speculative
        return options

    def words(self) -> list[str]:
        """The same as flags of its command line."""
        words = []
        for key, value in self.engine_options().items():
            flag = "--" + key.replace("_", "-")
            if value is True:
                words.append(flag)
            elif isinstance(value, dict):
                words += [flag, json.dumps(value)] if value else []
            else:
                words += [flag, str(value)]
        return words

    def command(self, environment: Environment, port: int, name: str) -> list[str]:
        """The server, by its module: the `vllm` command of the CPU wheel does not start."""
        words = [str(environment.python), "-m", _MODULE, "--host", "127.0.0.1"]
        return [*words, "--port", str(port), "--served-model-name", name, *self.words()]

    def variables(self, plugin: Path | None = None) -> dict[str, str]:
        """Environment variables: no network, no statistics sent, little memory on a CPU.

        `plugin`: where our package lies.
        """
        more = {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        if self.cpu:
            more |= {"VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB), "VLLM_TARGET_DEVICE": "cpu"}
        if plugin is not None:
            more["PYTHONPATH"] = str(plugin)
        return clean_environ(**more)


def plan(
    checkpoint: Path,
    *,
    cpu: bool,
    dtype: str | None = "float32",
    max_model_len: int | None = None,
    drafts: int = 0,
    accept_unknown: Iterable[str] = (),
) -> Launch:
    """Settings that serve a checkpoint. `drafts`: tokens drafted a step by its own layers; `dtype`
    None: the one that config.json names, which vLLM by itself lowers where it is float32.

    Raises ConfigError for what vLLM cannot serve there, CheckpointError for a checkpoint that is
    not whole.
    """
    config, spec, layout = read(checkpoint, accept_unknown=accept_unknown)
    args: Any = spec.args
    if cpu:
        refuse_on_cpu(args, config)
    if not any((checkpoint / n).is_file() for n in ("tokenizer.json", "tokenizer.model")):
        raise ConfigError(
            f"{checkpoint} has no tokenizer.json; vLLM makes a prompt when it warms up and ends "
            "without one"
        )
    overrides = missing_for("vllm", config)
    if layout == "stacked":
        overrides["architectures"] = [_stacked_architecture(config["model_type"], drafts)]
    dtype = dtype or str(config.get("dtype") or config.get("torch_dtype") or "auto")
    latents = isinstance(args, DeepseekV2Args | DeepseekV3Args)
    length = args.max_position_embeddings
    return Launch(
        checkpoint=checkpoint,
        cpu=cpu,
        dtype=dtype,
        max_model_len=min(length, max_model_len or 4096),
        # The default on hosts with AMX is AMX_MLA, which computes in bfloat16 whatever is asked.
        attention_backend="CPU_MLA" if cpu and latents and dtype == "float32" else None,
        hf_overrides=overrides,
        speculative=speculative(args, config, drafts),
        plugin=layout == "stacked",
    )


def _stacked_architecture(kind: str, drafts: int) -> str:
    """The class of our plugin that loads expert stacks."""
    if kind not in _STACKED:
        raise ConfigError(
            f"this {kind} checkpoint holds all experts of a layer in one tensor; our plugin splits "
            f"them for {' and '.join(_STACKED)} only"
        )
    if drafts:
        raise ConfigError(
            "vLLM reads the next-token prediction layer by itself, past our plugin, and does not "
            "know expert stacks; start it without drafts"
        )
    return _STACKED[kind]


def refuse_on_cpu(args: Any, config: dict[str, Any]) -> None:
    """Says in milliseconds what the CPU build would say after a minute. Raises ConfigError."""
    kind = config.get("model_type")
    if isinstance(args, V4Args | V41Args):
        lacks = "has no classes for CPUs" if isinstance(args, V41Args) else "calls Triton kernels"
        raise ConfigError(
            f"vLLM cannot serve {kind} on a CPU: its model {lacks}, so it loads every weight and "
            "fails in the first step. Serve it with deepdraft, or with vLLM on a GPU"
        )
    if isinstance(args, DeepseekV3Args) and args.index_topk:
        raise ConfigError(
            f"vLLM refuses {kind} on a CPU: it has no sparse attention there (0.32, 0.33). Serve "
            "it with deepdraft, or with vLLM on a GPU"
        )
    if isinstance(args, DeepseekV2Args | DeepseekV3Args):
        sizes = (args.kv_lora_rank, args.qk_rope_head_dim)
        if sizes != _CPU_LATENTS:
            raise ConfigError(
                f"vLLM's CPU kernels take latents of 512 + 64 only, and this model has "
                f"kv_lora_rank {sizes[0]}, qk_rope_head_dim {sizes[1]}"
            )
    if isinstance(args, LlamaArgs) and args.head_dim % 32:
        raise ConfigError(
            f"vLLM's CPU kernels take head sizes that are multiples of 32, this is {args.head_dim}"
        )


def speculative(args: Any, config: dict[str, Any], drafts: int) -> dict[str, Any] | None:
    """--speculative-config for the checkpoint's own drafting layers. Raises ConfigError.

    V3, V3.2 and V4 have next-token prediction layers, of which vLLM runs the same one several
    times; V4.1 (and V4 with `dspark_block_size`) drafts a block at a time with DSpark.
    """
    if drafts < 0:
        raise ConfigError(f"drafts must be 0 or more, got {drafts}")
    if not drafts:
        return None
    block = getattr(args, "dspark_block_size", 0)
    if block:
        if drafts > block:
            raise ConfigError(
                f"the DSpark layers of this checkpoint draft at most {block} tokens, got {drafts}"
            )
        return {"method": "dspark", "num_speculative_tokens": drafts}
    layers = config.get("num_nextn_predict_layers")
    if not layers:
        raise ConfigError("this checkpoint announces no next-token prediction layer to draft with")
    if config["model_type"] not in ("deepseek_v3", "deepseek_v32", "deepseek_v4"):
        raise ConfigError(f"vLLM drafts with no layer of {config['model_type']}")
    if drafts > layers and drafts % layers:
        raise ConfigError(
            f"vLLM takes at most {layers} drafts, or a multiple of it, for {layers} prediction "
            f"layers; got {drafts}"
        )
    return {"method": "mtp", "num_speculative_tokens": drafts}
