"""Checks of `deepdraft selftest --device cuda` that belong to the kernels.

Owns: a tiny model of random weights, run by the kernels and by the torch reference.
Knows nothing of: the report.
"""

from __future__ import annotations

import torch

from deepdraft.engine.dummy import DummyWeights
from deepdraft.models.deepseek_v41 import DeepseekV41
from deepdraft.models.v41_buffers import DeviceCaches
from deepdraft.models.v41_draft import DeviceDrafter
from deepdraft.models.v41_loop import DeviceLoop, DeviceSettings
from deepdraft.models.v41_step import DeviceStep
from deepdraft.models.v41_weights import load_weights
from deepdraft.proof.device_check import compare_layers, decode, forced_accepts, step_logits
from deepdraft.proof.failed import Failed
from deepdraft.proof.tiny import tiny_args

LAYER_LIMITS = {"attn_in": 1e-3, "attn_o": 0.02, "attn_out": 0.08, "ffn_in": 0.06, "ffn_out": 0.15}
"""Relative L2 of a layer fed with the reference's input; below golden set A's (docs/golden.md)."""


def check_device_step(device: str, tokens: int = 100) -> str:
    """The kernels' step: layers near the reference, a row's bits its own, drafted text plain."""
    args = tiny_args()
    source, token_map = DummyWeights(args, device="cpu"), list(range(args.vocab_size))
    weights = load_weights(args, source, token_map, device=device)
    caches = DeviceCaches(args, num_sequences=3, max_tokens=512, spare=16, device=device)
    step = DeviceStep(weights, caches)
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(0, args.vocab_size, (tokens,), generator=generator).tolist()
    reference = DeepseekV41(args, source, token_map, numerics="quant")
    for layer, errors in compare_layers(reference, step, text).layers.items():
        for name, limit in LAYER_LIMITS.items():
            if errors[name].relative > limit:
                raise Failed(f"layer {layer}, {name}: {errors[name].relative:.3g}, most {limit}")
    base = step_logits(step, text, [8] * tokens)
    for size in (1, 3, 16):
        if not torch.equal(base, step_logits(step, text, [size] * tokens, slot=1)):
            raise Failed(f"steps of {size} rows and of 8 differ")
    wrong = forced_accepts(step, text, slot=2)
    if wrong:
        raise Failed(f"{len(wrong)} rows change with the drafts beside them: {wrong[0]}")
    texts = []
    for width in (1, 6):
        drafter = DeviceDrafter(weights, caches) if width > 1 else None
        settings = DeviceSettings(3, device)
        loop = DeviceLoop(step, settings, sequences=1, width=width, drafter=drafter)
        texts.append(decode(loop, text[:20], tokens, temperature=1.0, seed=3)[0])
    if texts[0] != texts[1]:
        raise Failed("drafted text is not plain text")
    return f"{args.num_hidden_layers} layers, {tokens} tokens, 1 to 16 rows"
