"""Runs a checkpoint in transformers and writes what it computed: a program of its own.

Owns: loading with transformers (local files only, safetensors only, no remote code), one
teacher-forced pass with the outputs of all sublayers, a free greedy continuation.
Knows nothing of: deepdraft. It is run as a file by the interpreter of an environment that has
torch, safetensors and transformers, and gets one JSON object: checkpoint, ids, greedy, dtype, out.

Writes out/trace.safetensors (arrays), out/weights.safetensors (parameters under transformers'
names, if they are small), out/trace.json.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

MAX_WEIGHT_BYTES = 1 << 30
"""Parameters are written for comparison up to this size in all."""


def main(request_file: str) -> None:
    """Does what the request file asks for."""
    for key in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ[key] = "1"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    start = time.perf_counter()
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        request["checkpoint"],
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=getattr(torch, request["dtype"]),
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    model.eval()
    out = Path(request["out"])
    arrays: dict[str, Any] = {}
    handles = list(_hooks(torch, model, arrays))
    ids = torch.tensor([request["ids"]])
    with torch.inference_mode():
        loaded = time.perf_counter()
        arrays["logits"] = model(ids, use_cache=False).logits[0].float()
        for handle in handles:
            handle.remove()
        forward = time.perf_counter()
        greedy, steps = _greedy(torch, model, ids, request["greedy"])
    if steps is not None:
        arrays["greedy_logits"] = steps
    save = importlib.import_module("safetensors.torch").save_file
    save({k: v.contiguous().clone() for k, v in arrays.items()}, out / "trace.safetensors")
    weights = {k: v for k, v in model.state_dict().items() if "inv_freq" not in k}
    small = sum(v.numel() * v.itemsize for v in weights.values()) <= MAX_WEIGHT_BYTES
    if small:
        save({k: v.contiguous().clone() for k, v in weights.items()}, out / "weights.safetensors")
    config = json.loads(model.config.to_json_string(use_diff=False))
    about = {
        "engine": f"transformers {transformers.__version__}",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "config": config,
        "greedy": greedy,
        "frequencies": _frequencies(model),
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "seconds": {
            "load": loaded - start,
            "forward": forward - loaded,
            "greedy": time.perf_counter() - forward,
        },
    }
    (out / "trace.json").write_text(json.dumps(about), encoding="utf-8")


def _greedy(torch: Any, model: Any, ids: Any, count: int) -> tuple[list[int], Any]:
    """Greedy continuation with a cache, and the logits that chose each token."""
    if not count:
        return [], None
    out = model(ids, use_cache=True)
    tokens, rows = [], []
    for _ in range(count):
        row = out.logits[0, -1].float()
        rows.append(row)
        tokens.append(int(row.argmax()))
        if len(tokens) < count:
            past = getattr(out, "past_key_values", None)
            cache = {"past_key_values": past} if past is not None else {"cache": out.cache}
            out = model(torch.tensor([tokens[-1:]]), use_cache=True, **cache)
    return tokens, torch.stack(rows)


def _hooks(torch: Any, model: Any, arrays: dict[str, Any]) -> Any:
    """Hooks that keep what enters a layer and what its sublayers give."""

    def first(value: Any) -> Any:
        return value[0] if isinstance(value, tuple | list) else value

    def entering(name: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            arrays[name] = (args[0] if args else kwargs["hidden_states"])[0].float()

        return hook

    def leaving(name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            x = first(output).float()
            arrays[name] = x[0] if x.ndim > 2 else x

        return hook

    def routing(prefix: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            values = [v for v in (*args, *kwargs.values()) if torch.is_tensor(v)]
            picks = [v for v in values if not v.is_floating_point()]
            weights = [v for v in values if v.is_floating_point() and v.shape == picks[0].shape]
            arrays[f"{prefix}.experts"] = picks[0].long()
            arrays[f"{prefix}.weights"] = weights[0].float()

        return hook

    for number, layer in enumerate(model.model.layers):
        at = f"L{number}"
        yield layer.register_forward_pre_hook(entering(f"{at}.stream_in"), with_kwargs=True)
        yield layer.self_attn.register_forward_hook(leaving(f"{at}.attn_out"))
        yield layer.mlp.register_forward_hook(leaving(f"{at}.ffn_out"))
        experts = getattr(layer.mlp, "experts", None)
        if experts is not None:
            yield experts.register_forward_pre_hook(routing(at), with_kwargs=True)


def _frequencies(model: Any) -> dict[str, list[float]]:
    """Rotary frequencies by the name of their buffer."""
    found: dict[str, list[float]] = {}
    for name, value in model.model.named_buffers():
        if name.endswith("inv_freq") and "original" not in name and name.startswith("rotary_emb"):
            found[name.removeprefix("rotary_emb.")] = value.double().tolist()
    return found


if __name__ == "__main__":
    main(sys.argv[1])
