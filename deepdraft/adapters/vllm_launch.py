"""How vLLM is started on a checkpoint: its arguments, its variables, and what it cannot serve.

Owns: facts about vLLM 0.32 and 0.33 as code. Knows nothing of: processes, the engine's modules;
nothing of vLLM is imported here.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepdraft.adapters.environments import Environment, clean_environ
from deepdraft.arch import DeepseekV2Args, DeepseekV3Args, LlamaArgs, V4Args, V41Args
from deepdraft.checkpoint.section import read_config
from deepdraft.checkpoint.spec import ModelSpec
from deepdraft.checkpoint.spec_styles import missing_for
from deepdraft.errors import ConfigError

_CPU_LATENTS = (512, 64)
_MODULE = "vllm.entrypoints.openai.api_server"
_KV_GIB = 1


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

    def command(self, environment: Environment, port: int, name: str) -> list[str]:
        """The server, by its module: the `vllm` command of the CPU wheel does not start."""
        words = [str(environment.python), "-m", _MODULE, "--host", "127.0.0.1"]
        words += ["--port", str(port), "--served-model-name", name]
        for key, value in self.engine_options().items():
            flag = "--" + key.replace("_", "-")
            if value is True:
                words.append(flag)
            elif isinstance(value, dict):
                words += [flag, json.dumps(value)] if value else []
            else:
                words += [flag, str(value)]
        return words

    def variables(self) -> dict[str, str]:
        """Environment variables: no network, no statistics sent, little memory on a CPU."""
        more = {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        if self.cpu:
            more |= {"VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB), "VLLM_TARGET_DEVICE": "cpu"}
        return clean_environ(**more)


def plan(
    checkpoint: Path,
    *,
    cpu: bool,
    dtype: str = "float32",
    max_model_len: int | None = None,
    drafts: int = 0,
) -> Launch:
    """Settings that serve a checkpoint. Raises ConfigError for what vLLM cannot serve there.

    `drafts`: tokens drafted a step by the checkpoint's own next-token prediction layer.
    """
    try:
        config = read_config(checkpoint / "config.json")
    except ConfigError as error:
        raise ConfigError(f"{checkpoint} has no readable config.json: {error}") from error
    spec = ModelSpec.of(config)
    args: Any = spec.args
    if cpu:
        refuse_on_cpu(args, config)
    if not any((checkpoint / n).is_file() for n in ("tokenizer.json", "tokenizer.model")):
        raise ConfigError(
            f"{checkpoint} has no tokenizer.json; vLLM makes a prompt when it warms up and ends "
            "without one"
        )
    latents = isinstance(args, DeepseekV2Args | DeepseekV3Args)
    length = int(config.get("max_position_embeddings", 4096))
    return Launch(
        checkpoint=checkpoint,
        cpu=cpu,
        dtype=dtype,
        max_model_len=min(length, max_model_len or 4096),
        # The default on hosts with AMX is AMX_MLA, which computes in bfloat16 whatever is asked.
        attention_backend="CPU_MLA" if cpu and latents and dtype == "float32" else None,
        hf_overrides=missing_for("vllm", config),
        speculative=speculative(config, drafts),
    )


def refuse_on_cpu(args: Any, config: dict[str, Any]) -> None:
    """Says in milliseconds what the CPU build would say after a minute. Raises ConfigError."""
    kind = config.get("model_type")
    if isinstance(args, V4Args | V41Args):
        raise ConfigError(
            f"vLLM has no CPU kernels for {kind}: it loads every weight and fails in the first "
            "step. Serve it with deepdraft, or with vLLM on a GPU"
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


def speculative(config: dict[str, Any], drafts: int) -> dict[str, Any] | None:
    """--speculative-config for the next-token prediction layer of V3, V3.2 and V4."""
    if not drafts:
        return None
    if not config.get("num_nextn_predict_layers"):
        raise ConfigError("this checkpoint announces no next-token prediction layer to draft with")
    if config["model_type"] not in ("deepseek_v3", "deepseek_v32", "deepseek_v4"):
        raise ConfigError(f"vLLM drafts with no layer of {config['model_type']}")
    return {"method": "mtp", "num_speculative_tokens": drafts}
