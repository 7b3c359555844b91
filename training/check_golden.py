"""Compare the trainable model with recorded numbers of the published code (golden set v41-a).

Owns: loading a published checkpoint into the trainable model, and the comparison.
Run: `python -m training.check_golden GOLDEN_DIR [--float64]`; exit status 1 on disagreement.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from deepdraft.checkpoint.reader import Checkpoint
from training import drafter
from training.model import Batch, Model


def load_published(model: Model, checkpoint: Checkpoint) -> None:
    """Copy every tensor of a published checkpoint (dequantised) into the model."""
    with torch.no_grad():
        for p in model.table.values():
            parts = [checkpoint.tensor(name) for name in p.published]
            value = torch.stack(parts) if len(p.published) > 1 else parts[0]
            model.params[p.name].copy_(value)


def pad_rows(tokens: Tensor, multiple: int) -> Batch:
    """One document per row, padded behind with a document of its own."""
    bsz, length = tokens.shape
    extra = -length % multiple
    row = torch.arange(length + extra)
    return Batch(
        functional.pad(tokens, (0, extra)),
        row.expand(bsz, -1),
        (row >= length).int().expand(bsz, -1),
    )


def relative(got: Tensor, want: Tensor) -> float:
    """max |a - b| / max |b|."""
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


@torch.no_grad()
def compare(golden: Path, float64: bool = False) -> dict[str, float]:
    """Relative errors of the one-shot logits, the taps and ten draft steps (exact mode)."""
    checkpoint = Checkpoint.open(golden / "checkpoint")
    args = checkpoint.args
    maps = json.loads((golden / "engram-hash.json").read_text())
    model = Model(args, maps["token_map"])
    load_published(model, checkpoint)
    if float64:
        model.double()
        model.compute_dtype = torch.float64
    model.options.sparse = True
    tokens = json.loads((golden / "tokens.json").read_text())
    row = torch.tensor([tokens["prompt"] + tokens["greedy_tokens"]["exact"]])
    length = row.shape[1]
    batch = pad_rows(row, args.sliding_window * args.candidate_block_size)
    out = model(batch)
    logits = load_file(golden / "logits-exact.safetensors")
    result = {
        "oneshot_logits": relative(model.logits(out.hidden)[0, :length], logits["oneshot_logits"])
    }
    short = torch.tensor(tokens["short16"])
    got = model.logits(model(pad_rows(short, args.sliding_window * 8)).hidden)[:, : short.shape[1]]
    result["short16_logits"] = relative(got, logits["short16_logits"])
    # two documents in one row: the second must not see the first
    both = torch.cat((row[:, : length // 8 * 8], row), 1)
    packed = pad_rows(both, args.sliding_window * args.candidate_block_size)
    start = length // 8 * 8
    for name, value in (("pos", packed.pos), ("seg", packed.seg)):
        value = value.clone()
        value[:, start:] = value[:, start:] - start if name == "pos" else value[:, start:] + 2
        setattr(packed, name, value)
    got = model.logits(model(packed).hidden)[0, start : start + length]
    result["packed_logits"] = relative(got, logits["oneshot_logits"])

    want = load_file(golden / "dspark-exact.safetensors")
    result["taps"] = relative(out.taps[0, :length], want["main_hidden_oneshot"])
    anchors = (want["position"] + 1).long()[None]
    d = drafter.draft(model, batch, out.taps, anchors)
    result["draft_hidden"] = relative(d.hidden[0], want["hidden"])
    result["draft_base"] = relative(d.base[0], want["base_logits"])
    bias, e = drafter.markov(model, want["tokens"].long()[None, :, :-1])
    result["draft_logits"] = relative((d.base + bias)[0], want["logits"])
    result["confidence"] = relative(drafter.confidence(model, d.hidden, e)[0], want["confidence"])
    wrong = (d.base + bias)[0].argmax(-1) != want["tokens"][:, 1:]
    result["draft_tokens_wrong"] = float(wrong.sum())
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("golden", type=Path)
    parser.add_argument("--float64", action="store_true")
    opts = parser.parse_args()
    result = compare(opts.golden, opts.float64)
    for name, value in result.items():
        print(f"{name:20s} {value:.2e}")
    return int(max(result.values()) > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
