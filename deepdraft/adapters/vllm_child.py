"""Runs in an environment of vLLM: log-probabilities of prompts and of their greedy continuations.

Order (`child`): {"options": engine options, "prompts": [[ids]], "tokens": n, "best": how many
log-probabilities of a position are told (-1: all), "vocab": V}. Answer: {"version", "tokens":
[[ids]], "accepted": [steps that drafted, those whose first draft was accepted, whose first two
were, ...], empty where nothing drafts}. Beside it arrays.safetensors with i.prompt [N, V], whose
row j follows token j of prompt i, and i.greedy [n, V], whose row j chose the continuation's token
j; NaN was not told.
"""

import json
import sys
from pathlib import Path
from typing import Any


def main(folder: Path) -> None:
    """One engine, one batch."""
    order = json.loads((folder / "order.json").read_text())
    import numpy as np
    import vllm  # pyrefly: ignore[missing-import]
    from safetensors.numpy import save_file

    def rows(told: list[dict[int, Any]]) -> Any:
        out = np.full((len(told), order["vocab"]), np.nan, np.float32)
        for row, known in zip(out, told, strict=True):
            for token, value in known.items():
                row[token] = value.logprob
        return out

    best = order["best"]
    drafts = "speculative_config" in order["options"]
    engine = vllm.LLM(**order["options"], max_logprobs=best, disable_log_stats=not drafts)
    params = vllm.SamplingParams(
        temperature=0.0,
        max_tokens=order["tokens"],
        ignore_eos=True,
        prompt_logprobs=best,
        logprobs=best,
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": ids} for ids in order["prompts"]]
    tokens, arrays = [], {}
    for i, output in enumerate(engine.generate(prompts, params, use_tqdm=False)):
        first = output.outputs[0]
        tokens.append(list(first.token_ids))
        arrays[f"{i}.prompt"] = rows([*output.prompt_logprobs[1:], first.logprobs[0]])
        arrays[f"{i}.greedy"] = rows(list(first.logprobs))
    save_file(arrays, folder / "arrays.safetensors")
    answer = {"version": vllm.__version__, "tokens": tokens, "accepted": []}
    if drafts:
        told = {metric.name: metric for metric in engine.get_metrics()}
        accepted = told["vllm:spec_decode_num_accepted_tokens_per_pos"].values
        answer["accepted"] = [told["vllm:spec_decode_num_drafts"].value, *accepted]
    (folder / "answer.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
