"""Runs in an environment of LMDeploy, without a GPU: loads a checkpoint into its own classes.

Order (`child`): {"checkpoint": DIR, "overrides": keys over those of config.json, "map": FILE or
null, "words": its command line, "rows": N, "positions": [...]}. Answer: {"version", "turbomind":
whether its other engine takes the architecture, "class", "unloaded": parameters that nothing wrote,
"softmax_scale": null or a number, "eps": {module: eps}, "options": what its parser made of the
words}. Beside it weights.safetensors (its parameters) and probes.safetensors: cos and sin of the
positions, and for each router LAYER.x [N, D] random rows, LAYER.experts, LAYER.weights.

Every parameter is filled with NaN first, so that one that is not loaded shows.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_SEED = 11


def main(folder: Path) -> None:
    """One checkpoint."""
    order = json.loads((folder / "order.json").read_text())
    import torch
    from safetensors.torch import save_file

    _pretend(torch)
    import lmdeploy  # pyrefly: ignore[missing-import]

    model = _build(torch, order)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    _load(model, order["checkpoint"])
    parameters = {n: p.detach().contiguous().clone() for n, p in model.named_parameters()}
    save_file(parameters, folder / "weights.safetensors")
    probes = _rope(torch, model.model.rotary_emb, order["positions"])
    probes |= _routers(torch, model, order["rows"])
    save_file(probes, folder / "probes.safetensors")
    attention: Any = model.model.layers[0].self_attn
    answer = {
        "version": lmdeploy.__version__,
        "turbomind": _turbomind(order["checkpoint"]),
        "class": type(model).__name__,
        "unloaded": [n for n, p in parameters.items() if bool(p.isnan().any())],
        "softmax_scale": getattr(attention, "softmax_scale", None),
        "eps": {n: m.eps for n, m in model.named_modules() if isinstance(_eps(m), float)},
        "options": _options(order["words"]),
    }
    (folder / "answer.json").write_text(json.dumps(answer))


def _pretend(torch: Any) -> None:
    """Answers what it asks of the GPU while it builds, as for an H100; nothing runs there."""
    about = SimpleNamespace(
        multi_processor_count=132,
        major=9,
        minor=0,
        name="none",
        warp_size=32,
        total_memory=80 << 30,
    )
    torch.cuda.get_device_capability = lambda *a, **k: (9, 0)
    torch.cuda.get_device_properties = lambda *a, **k: about
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_name = lambda *a: "none"


def _build(torch: Any, order: dict[str, Any]) -> Any:
    from lmdeploy.pytorch.config import ModelConfig  # pyrefly: ignore[missing-import]
    from lmdeploy.pytorch.model_inputs import (  # pyrefly: ignore[missing-import]
        BuildModelContext,
    )
    from lmdeploy.pytorch.models.patch import (  # pyrefly: ignore[missing-import]
        build_patched_model,
        update_custom_module_map,
    )

    if order["map"]:
        update_custom_module_map(order["map"])
    config = ModelConfig.from_pretrained(
        order["checkpoint"],
        dtype="float32",
        hf_overrides=order["overrides"] or None,
        device_type="cuda",
    )
    return build_patched_model(
        config, device=torch.device("cpu"), build_model_ctx=BuildModelContext()
    )


def _load(model: Any, checkpoint: str) -> None:
    from lmdeploy.pytorch.weight_loader.model_weight_loader import (  # pyrefly: ignore
        load_model_weights,
    )

    load_model_weights(model, checkpoint)


def _eps(module: Any) -> Any:
    return getattr(module, "eps", None)


def _rope(torch: Any, rotary: Any, positions: list[int]) -> dict[str, Any]:
    """cos and sin [positions, channels] as a step would take them."""
    x, at = torch.zeros(1, len(positions), 1), torch.tensor([positions])
    cos, sin = rotary(x, at)
    return {"cos": cos[0].contiguous(), "sin": sin[0].contiguous()}


def _routers(torch: Any, model: Any, rows: int) -> dict[str, Any]:
    """Its gates on random rows, by the torch code that its GPU kernels stand for."""
    from lmdeploy.pytorch.backends.default.moe_router import (  # pyrefly: ignore[missing-import]
        DefaultRouterNoauxTCImpl,
    )

    told: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(_SEED)
    for number, layer in enumerate(model.model.layers):
        gate = getattr(layer.mlp, "gate", None)
        if gate is None:
            continue
        if hasattr(gate, "noaux_tc_router"):
            impl = gate.noaux_tc_router.impl
            impl.forward = DefaultRouterNoauxTCImpl.forward.__get__(impl)
        x = torch.randn(rows, gate.weight.shape[1], generator=generator)
        weights, experts = gate(x)
        told[f"{number}.x"] = x
        told[f"{number}.experts"] = experts.long().contiguous()
        told[f"{number}.weights"] = weights.float().contiguous()
    return told


def _turbomind(checkpoint: str) -> bool:
    from lmdeploy.turbomind.supported_models import (  # pyrefly: ignore[missing-import]
        is_supported,
    )

    return bool(is_supported(checkpoint))


def _options(words: list[str]) -> dict[str, Any]:
    """The command line as its own parser reads it."""
    from lmdeploy.cli.cli import CLI  # pyrefly: ignore[missing-import]
    from lmdeploy.cli.serve import SubCliServe  # pyrefly: ignore[missing-import]

    SubCliServe.add_parsers()
    parsed = CLI.parser.parse_args(words)
    engine = ("backend", "dtype", "session_len", "hf_overrides", "speculative_algorithm")
    server = ("speculative_num_draft_tokens", "server_name", "server_port", "model_name")
    return {key: getattr(parsed, key) for key in (*engine, *server)}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
