"""vLLM's drafts on a CPU: V3 with a next-token prediction layer that is right often, not always.

    python bench/vllm_drafts.py [--out FILE]

1 and 2 drafts a step, greedy, one prompt: vLLM's drafted text against its plain one and ours, and
the drafts it accepts against those of a naive forward in float64. That one keeps vLLM's two habits:
the first token's embedding is masked, and further drafts get the *normed* hidden state of the layer
(ours: every embedding, and the state as it is). The exit status is 1 where texts or counts differ.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deepdraft.adapters.vllm_reference import VllmReference
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.checkpoint.section import read_config
from deepdraft.engine.runner import Runner
from deepdraft.proof.bench import provenance
from deepdraft.proof.tiny_write import write_tiny
from deepdraft.types import GenerateRequest, SamplingParams
from tests.families.test_lookup import run
from tests.families.test_mtp import drafted_logits, hidden_states, layer, norm

PROMPT = (5, 6, 7, 9, 11, 200, 31)
TOKENS = 65
TIMEOUT_S = 3600.0


def write_drafting(path: Path) -> Path:
    """V3 whose blocks, the drafter's as well, add little to what they are given, and a drafter that
    begins with the token's embedding."""
    write_tiny(path, "v3", real_latents=True, mtp=True)
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= 0.005
    config = read_config(path / "config.json")
    at, width = f"model.layers.{config['num_hidden_layers']}", config["hidden_size"]
    tensors[f"{at}.enorm.weight"].fill_(1.0)
    tensors[f"{at}.shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    joined = tensors[f"{at}.eh_proj.weight"]
    joined[:, :width] = 0.02 * torch.eye(width)
    joined[:, width:] *= 0.002
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def ours(checkpoint: Checkpoint, drafts: int) -> tuple[list[int], list[int]]:
    """Our text; steps that drafted, those whose first draft was accepted, whose first two were."""
    runner = Runner.from_checkpoint(
        checkpoint, None, max_context=512, num_sequences=1, num_drafts=drafts, drafter=True
    )
    request = GenerateRequest(
        request_id="a",
        prompt_ids=PROMPT,
        max_new_tokens=TOKENS,
        sampling=SamplingParams(temperature=0.0),
        reuse=False,
    )
    ((text, _),), stats = run(runner, [request])
    counts = [stats.get(f"spec_accepted_{k}", 0) for k in range(1, drafts + 1)]
    return text, [stats["spec_drafted_steps"], *(sum(counts[k:]) for k in range(drafts))]


def naive(text: list[int], count: int, w: dict[str, Tensor], args: Any) -> list[int]:
    """Drafts behind a text, as vLLM makes them."""
    at, eps = f"model.layers.{args.num_hidden_layers}", args.rms_norm_eps
    h, tokens, made = hidden_states(torch.tensor(text[:-1]), w, args), text[1:], []
    for _ in range(count):
        embedded = w["model.embed_tokens.weight"][tokens]
        embedded[0] = 0.0
        both = [norm(embedded, w[f"{at}.enorm.weight"], eps), norm(h, w[f"{at}.hnorm.weight"], eps)]
        joined = torch.cat(both, -1) @ w[f"{at}.eh_proj.weight"].T
        out = layer(joined, w, args.num_hidden_layers, args)[-1:]
        made.append(int(drafted_logits(out, w, args).argmax()))
        again = norm(out, w[f"{at}.shared_head.norm.weight"], eps)
        tokens, h = [*tokens, made[-1]], torch.cat([h, again])
    return made


def expected(checkpoint: Checkpoint, drafts: int) -> list[int]:
    """Steps that draft, those whose first draft is right, whose first two are, until the text is
    there; the last step may go beyond it."""
    w = {name: checkpoint.tensor(name, torch.float64) for name in checkpoint.table}
    text, head = list(PROMPT), w["lm_head.weight"].T
    while len(text) < len(PROMPT) + TOKENS + drafts:
        h = hidden_states(torch.tensor(text), w, checkpoint.args)
        text.append(int((h[-1] @ head).argmax()))
    at, counts = len(PROMPT) + 1, [0] * (drafts + 1)
    while at < len(PROMPT) + TOKENS:
        made, right = naive(text[:at], drafts, w, checkpoint.args), 0
        counts[0] += 1
        while right < drafts and made[right] == text[at + right]:
            right += 1
            counts[right] += 1
        at += right + 1
    return counts


def measured(folder: Path) -> dict[str, Any]:
    """Both engines, plain and drafted."""
    path = write_drafting(folder / "v3")
    checkpoint = Checkpoint.open(path)
    (plain,) = VllmReference(path, timeout_s=TIMEOUT_S)([PROMPT], TOKENS)
    found: dict[str, Any] = {"engine": plain.engine}
    passed = True
    for drafts in (1, 2):
        vllm = VllmReference(path, drafts=drafts, timeout_s=TIMEOUT_S)
        (told,) = vllm([PROMPT], TOKENS)
        (text, accepted), wanted = ours(checkpoint, drafts), expected(checkpoint, drafts)
        equal = told.tokens == plain.tokens == text
        found[f"drafts_{drafts}"] = {
            "texts_equal": equal,
            "steps_and_accepted_vllm": vllm.accepted,
            "steps_and_accepted_naive": wanted,
            "steps_and_accepted_deepdraft": accepted,
        }
        passed &= equal and vllm.accepted == wanted and wanted[1] > 10
    return {**found, "passed": passed}


def main() -> int:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun = provenance()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder))
    record = {
        "what": "vLLM on a CPU drafts with V3's next-token prediction layer: texts, and steps that "
        "drafted with those whose first draft, first two, were accepted",
        "tokens": TOKENS,
        **found,
        **begun,
    }
    text = json.dumps(record, indent=2)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)
    return 0 if record["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
