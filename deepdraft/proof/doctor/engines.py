"""What other engines need of a checkpoint: keys, families, sizes. Facts of docs/doctor.md.

Owns: the checks of `doctor --engine` for engines that are not ours; nothing of them is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deepdraft.arch import DeepseekV2Args, DeepseekV3Args, LlamaArgs, V4Args, V41Args
from deepdraft.checkpoint.layouts import Layout
from deepdraft.checkpoint.section import show
from deepdraft.checkpoint.spec import ModelSpec
from deepdraft.checkpoint.spec_styles import missing_for
from deepdraft.proof.doctor.finding import Finding

ENGINES = ("native", "vllm", "lmdeploy", "triton")


def engine_checks(
    spec: ModelSpec, original: dict[str, Any], engine: str, layout: Layout = "published"
) -> Iterator[Finding]:
    """Findings for `engine`; `original`: config.json as it is written; `layout` of the tensors."""
    if engine == "native":
        return
    for key, value in missing_for(engine, original).items():
        yield Finding(
            "engine",
            key,
            f"{engine} reads {key}, which is missing (transformers leaves it out when it saves)",
            f"{spec.config['model_type']} has one value only: {show(value)}",
            f"add {show(key)}: {show(value)} to config.json",
        )
    args: Any = spec.args
    if engine in ("vllm", "lmdeploy") and "rope_parameters" in original:
        yield Finding(
            "engine",
            "rope_parameters",
            f"{engine} with an older transformers reads rope_theta and rope_scaling",
            "config.json has the keys of transformers 5 only",
            "write both styles, or check the engine's transformers version",
            "warning",
        )
    if engine in ("vllm", "lmdeploy") and layout == "stacked":
        yield _stacks(args, engine)
    if engine == "lmdeploy" and isinstance(args, V41Args):
        yield _cannot("lmdeploy", "model_type", "has no DeepSeek-V4.1 (0.18)")
    if engine == "vllm":
        yield from _vllm_cpu(args)


def _stacks(args: Any, engine: str) -> Finding:
    """Neither engine reads stacks by itself; our adapters split them for V2 and V3."""
    severity, fix = "warning", f"`deepdraft {engine} up` brings what splits them; without drafts"
    if getattr(args, "index_topk", 0):
        severity = "error"
        fix = "save it with save_pretrained of transformers, which writes experts one by one"
    return Finding(
        "engine",
        "model.layers.*.mlp.experts.gate_up_proj",
        f"all experts of a layer are one tensor, which {engine} does not know",
        "the layout that transformers 5 has in memory; published files hold experts one by one",
        fix,
        severity,
    )


def _vllm_cpu(args: Any) -> Iterator[Finding]:
    """Limits of vLLM's CPU build; on a GPU they do not hold, so they are warnings."""
    if isinstance(args, DeepseekV3Args) and args.index_topk:
        yield _cannot("vllm", "model_type", "has no sparse attention on a CPU (0.32, 0.33)")
    elif isinstance(args, V4Args | V41Args):
        yield _cannot("vllm", "model_type", "serves this family on GPUs only (0.32)")
    elif isinstance(args, DeepseekV2Args | DeepseekV3Args):
        sizes = (args.kv_lora_rank, args.qk_rope_head_dim)
        if sizes != (512, 64):
            yield _cannot(
                "vllm",
                "kv_lora_rank",
                f"has CPU kernels for latents of 512 + 64 only, this model has {sizes}",
            )
    elif isinstance(args, LlamaArgs) and args.head_dim % 32:
        yield _cannot("vllm", "head_dim", "wants head sizes that are multiples of 32 on a CPU")


def _cannot(engine: str, key: str, what: str) -> Finding:
    return Finding("engine", key, f"{engine} {what}", "", "run it elsewhere", "warning")
