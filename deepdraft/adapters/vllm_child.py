"""Runs in an environment of vLLM: greedy tokens and log-probabilities of prompts as token ids.

Reads one JSON object {"options": engine options, "prompts": [[ids]], "tokens": n} from standard
input; writes one {"version", "tokens": [[ids]], "prompt_logprobs": [[..]]} as the last line.
"""

import json
import sys


def main() -> None:
    """One engine, one batch."""
    order = json.load(sys.stdin)
    import vllm  # pyrefly: ignore[missing-import]

    engine = vllm.LLM(**order["options"], disable_log_stats=True)
    params = vllm.SamplingParams(
        temperature=0.0,
        max_tokens=order["tokens"],
        ignore_eos=True,
        prompt_logprobs=0,
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": ids} for ids in order["prompts"]]
    tokens, logprobs = [], []
    for ids, output in zip(
        order["prompts"], engine.generate(prompts, params, use_tqdm=False), strict=True
    ):
        tokens.append(list(output.outputs[0].token_ids))
        rows = output.prompt_logprobs[1:]
        logprobs.append([row[i].logprob for i, row in zip(ids[1:], rows, strict=True)])
    print(
        json.dumps({"version": vllm.__version__, "tokens": tokens, "prompt_logprobs": logprobs}),
        flush=True,
    )


if __name__ == "__main__":
    main()
