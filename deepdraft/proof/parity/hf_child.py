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
    out = Path(request["out"])
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        _unquantised(torch, Path(request["checkpoint"]), out / "plain"),
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=getattr(torch, request["dtype"]),
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    model.eval()
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
        "factors": _factors(model),
        "missing": sorted(info["missing_keys"]),
        "seconds": {
            "load": loaded - start,
            "forward": forward - loaded,
            "greedy": time.perf_counter() - forward,
        },
    }
    (out / "trace.json").write_text(json.dumps(about), encoding="utf-8")


def _unquantised(torch: Any, checkpoint: Path, plain: Path) -> Path:
    """The directory, or a float32 copy where its weights are FP8 or FP4: transformers' own way
    needs a GPU. Written out by itself, so that it is a second opinion of how scales are read."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    if "quantization_config" not in config:
        return checkpoint
    files = importlib.import_module("safetensors.torch")
    stored: dict[str, Any] = {}
    for shard in sorted(checkpoint.glob("*.safetensors")):
        stored |= files.load_file(shard)
    made = {}
    for name, value in stored.items():
        stem = name.removesuffix("weight")
        scale = stored.get(f"{name}_scale_inv", stored.get(f"{stem}scale"))
        if name.endswith(("weight_scale_inv", ".scale")):
            continue
        if scale is None or value.dtype not in (torch.float8_e4m3fn, torch.int8, torch.uint8):
            made[name] = value
            continue
        if scale.dtype in (torch.float8_e8m0fnu, torch.uint8):
            scale = 2.0 ** (scale.view(torch.uint8).double() - 127)
        if value.dtype == torch.float8_e4m3fn:
            value = value.float().double()
            scale = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        else:
            value = _fp4(torch, value.view(torch.uint8))
            scale = scale.double().repeat_interleave(32, 1)
        made[name] = (value * scale[: value.shape[0], : value.shape[1]]).float()
    plain.mkdir()
    files.save_file(made, plain / "model.safetensors", metadata={"format": "pt"})
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return plain


def _fp4(torch: Any, packed: Any) -> Any:
    """Two E2M1 codes a byte, the lower half first -> float64."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    return sizes[codes & 7] * torch.where(codes > 7, -1.0, 1.0)


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


def _factors(model: Any) -> dict[str, float]:
    """What cos and sin are multiplied with, by attribute name."""
    rotary = getattr(model.model, "rotary_emb", None)
    return {
        name: float(value)
        for name, value in vars(rotary or object).items()
        if name.endswith("attention_scaling") and isinstance(value, int | float)
    }


if __name__ == "__main__":
    main(sys.argv[1])
