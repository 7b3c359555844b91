"""What `speculation.steps` costs: the same answers with and without step events, in turn.

    python bench/steps_cost.py [--pairs 30] [--out bench/results/h-steps-cost.json]

240 tokens an answer: 30 pairs take about three minutes on a quiet machine of two cores.

One server process, one stream at a time, temperature 0. Both answers of a pair have the same
tokens, so the ratio of their times (first byte of the answer to the last) is the cost; that of the
server's processor times says the same on a busy machine. The client only looks for the end of the
stream, so that parsing longer chunks is not counted against the server.
"""

import argparse
import http.client
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from deepdraft.proof.bench import provenance  # noqa: E402
from deepdraft.proof.served import served  # noqa: E402

QUESTIONS = {
    "templates": "implement the tetris game. output HTML code directly - no explanation.",
    "prose": "Describe a market on a rainy morning.",
}


def seconds(port: int, question: str, tokens: int, steps: bool) -> tuple[float, int]:
    """Time from the first byte of the body to its end, and its length."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "temperature": 0,
        "thinking": {"type": "disabled"},
        "max_tokens": tokens,
        "ignore_eos": True,
        "speculation": {"steps": steps},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        assert response.status == 200, response.read(1000)
        length = len(response.read1(1 << 16))
        begin = time.perf_counter()
        while piece := response.read1(1 << 16):
            length += len(piece)
        return time.perf_counter() - begin, length
    finally:
        connection.close()


def processor_seconds(pid: int) -> float:
    """User and system time of a process so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % of the medians of resampled pairs."""
    rng = random.Random(1)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[1949]


def main() -> int:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=240)
    options = parser.parse_args()
    begun = provenance()
    rows = {}
    with served(None) as server:
        port = int(server.url.rsplit(":", 1)[1])
        for name, question in QUESTIONS.items():
            seconds(port, question, options.tokens, True)
            seconds(port, question, options.tokens, False)
            times: dict[bool, list[float]] = {False: [], True: []}
            busy: dict[bool, list[float]] = {True: [], False: []}
            lengths: dict[bool, int] = {}
            for pair in range(options.pairs):
                for steps in (False, True) if pair % 2 else (True, False):
                    before = processor_seconds(server.pid)
                    took, lengths[steps] = seconds(port, question, options.tokens, steps)
                    times[steps].append(took)
                    busy[steps].append(processor_seconds(server.pid) - before)
            ratios = [on / off for on, off in zip(times[True], times[False], strict=True)]
            low, high = interval(ratios)
            rows[name] = {
                "tokens_per_s_off_best": round(options.tokens / min(times[False]), 1),
                "tokens_per_s_on_best": round(options.tokens / min(times[True]), 1),
                "tokens_per_s_off_median": round(
                    options.tokens / statistics.median(times[False]), 1
                ),
                "tokens_per_s_on_median": round(options.tokens / statistics.median(times[True]), 1),
                "cost_of_best_runs": round(min(times[True]) / min(times[False]) - 1, 4),
                "cost_median_of_pairs": round(statistics.median(ratios) - 1, 4),
                "cost_interval_95": [round(low - 1, 4), round(high - 1, 4)],
                "processor_cost": round(sum(busy[True]) / sum(busy[False]) - 1, 4),
                "processor_cost_median_of_pairs": round(
                    statistics.median(on / off for on, off in zip(*busy.values(), strict=True)) - 1,
                    4,
                ),
                "bytes_a_token_off": round(lengths[False] / options.tokens, 1),
                "bytes_a_token_on": round(lengths[True] / options.tokens, 1),
            }
    record = {
        "what": "cost of step events",
        "pairs": options.pairs,
        "tokens_per_answer": options.tokens,
        "rows": rows,
        **begun,
    }
    text = json.dumps(record, indent=2)
    print(text)
    if options.out:
        Path(options.out).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
