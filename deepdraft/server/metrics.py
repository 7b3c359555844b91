"""The server's and the engine's counters and times in the Prometheus text format.

Owns: metric names, labels and help. Knows nothing of: the engine, HTTP.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from deepdraft.server.metrics_kv import kv_families
from deepdraft.telemetry import Histogram

_COUNTERS = {
    "requests": ("requests_total", "Requests taken in."),
    "rejected": ("requests_rejected_total", "Requests that found a queue full."),
    "preemptions": ("preemptions_total", "Running requests that made room for others."),
    "recomputed": ("recomputations_total", "Preempted sequences that were lost and made anew."),
    "prompt_tokens": ("prompt_tokens_total", "Prompt tokens computed."),
    "prompt_parts": ("prefill_parts_total", "Parts in which prompts were read."),
    "generated_tokens": ("generation_tokens_total", "Tokens of answers."),
    "decode_steps": ("iterations_total", "Steps of decoding, of all running requests together."),
    "decode_rows": ("iteration_rows_total", "Rows of these steps: last tokens and drafts."),
    "spec_drafted_steps": (
        "spec_decode_num_drafts_total",
        "Blocks of drafts, one for a request and step.",
    ),
    "spec_drafts": ("spec_decode_num_proposed_tokens_total", "Drafts made."),
    "spec_verified": ("spec_decode_num_draft_tokens_total", "Drafts verified."),
}
_GAUGES = {
    "waiting": ("num_requests_waiting", "Requests in the queue."),
    "running": ("num_requests_running", "Requests that hold a sequence."),
    "tasks": ("http_tasks", "Tasks of the server's loop: some for itself, a few for each request."),
    "parked": ("num_requests_preempted", "Requests in the queue whose sequence is kept apart."),
}
_BY_LABEL = (
    ("finished_", "requests_finished_total", "reason", "Requests by how they ended."),
    (
        "http_",
        "http_responses_total",
        "status",
        "Answers by HTTP status, when they begin.",
    ),
    ("cut_", "connections_cut_total", "reason", "Connections cut for breaking a limit."),
    (
        "fleet_",
        "fleet_events_total",
        "what",
        "Requests and engines of a fleet, as a front saw them, by what came of them.",
    ),
    (
        "limit_",
        "key_limits_total",
        "what",
        "Requests that met a limit of their key, by what came of it.",
    ),
    (
        "spec_accepted_",
        "spec_decode_steps_total",
        "accepted",
        "Steps of single requests, by the number of drafts they accepted.",
    ),
)


_STATM = Path("/proc/self/statm")

_Family = Callable[[str, str, str, list[tuple[str, float]]], None]


_HISTOGRAMS = {
    "queue": ("request_queue_time_seconds", "From a request's arrival until it has a sequence."),
    "prefill": ("request_prefill_time_seconds", "From a request's sequence to its first token."),
    "first_token": ("time_to_first_token_seconds", "From a request's arrival to its first token."),
    "decode": ("request_decode_time_seconds", "From a request's first token to its end."),
    "request": ("e2e_request_latency_seconds", "From a request's arrival to its end."),
}


def metrics_text(
    stats: Mapping[str, int], histograms: Mapping[str, Histogram] | None = None
) -> str:
    """The exposition of counters as `Engine.stats` gives them, and of histograms; what is not known
    is left out."""
    lines: list[str] = []

    def family(name: str, kind: str, text: str, samples: list[tuple[str, float]]) -> None:
        if samples:
            lines.append(f"# HELP deepdraft_{name} {text}")
            lines.append(f"# TYPE deepdraft_{name} {kind}")
            lines.extend(f"deepdraft_{name}{labels} {_number(x)}" for labels, x in samples)

    for kind, table in (("gauge", _GAUGES), ("counter", _COUNTERS)):
        for key, (name, text) in table.items():
            family(name, kind, text, [("", stats[key])] if key in stats else [])
    for prefix, name, label, text in _BY_LABEL:
        values = {k.removeprefix(prefix): v for k, v in stats.items() if k.startswith(prefix)}
        family(
            name, "counter", text, [(f'{{{label}="{k}"}}', v) for k, v in sorted(values.items())]
        )
    parts = {k.removesuffix("_us"): v / 1e6 for k, v in stats.items() if k.endswith("_us")}
    reading = [("", parts.pop("prompt"))] if "prompt" in parts else []
    family("prefill_seconds_total", "counter", "Time in which prompts were read.", reading)
    samples = [(f'{{part="{k}"}}', v) for k, v in sorted(parts.items())]
    family("iteration_seconds_total", "counter", "Time of steps, by what was done.", samples)
    _averages(stats, parts, family)
    kv_families(stats, family)
    for key, histogram in (histograms or {}).items():
        lines += _histogram_lines(*_HISTOGRAMS[key], histogram)
    return "\n".join(lines) + "\n"


def _histogram_lines(name: str, text: str, histogram: Histogram) -> list[str]:
    counts, total_s = histogram.snapshot()
    lines = [f"# HELP deepdraft_{name} {text}", f"# TYPE deepdraft_{name} histogram"]
    so_far = 0
    for bound, count in zip((*histogram.bounds, "+Inf"), counts, strict=True):
        so_far += count
        lines.append(f'deepdraft_{name}_bucket{{le="{bound}"}} {so_far}')
    lines.append(f"deepdraft_{name}_sum {total_s:.6f}")
    lines.append(f"deepdraft_{name}_count {so_far}")
    return lines


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6f}"


def _averages(stats: Mapping[str, int], parts: Mapping[str, float], family: _Family) -> None:
    steps = stats.get("decode_steps", 0)
    if steps:
        ms = 1e3 * sum(parts.values()) / steps
        family("average_iteration_ms", "gauge", "Mean of all steps so far.", [("", ms)])
    prefix = "spec_accepted_"
    counts = {int(k.removeprefix(prefix)): v for k, v in stats.items() if k.startswith(prefix)}
    total = sum(counts.values())
    if total:
        accepted = sum(n * count for n, count in counts.items())
        cut = stats.get("spec_drafts", 0) - stats.get("spec_verified", 0)
        family(
            "spec_decode_num_accepted_tokens_total",
            "counter",
            "Drafts accepted.",
            [("", accepted)],
        )
        family(
            "spec_decode_num_cut_tokens_total",
            "counter",
            "Drafts that the schedule left out, by their confidence.",
            [("", cut)],
        )
        family(
            "average_accept_length",
            "gauge",
            "Accepted drafts of a step plus 1, mean of all steps so far.",
            [("", 1 + accepted / total)],
        )


def process_text() -> str:
    """The exposition of this process's memory, under Prometheus' usual name; empty elsewhere."""
    try:
        num_pages = int(_STATM.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return ""
    name = "process_resident_memory_bytes"
    return (
        f"# HELP {name} Memory of this process that is in RAM.\n# TYPE {name} gauge\n"
        f"{name} {num_pages * os.sysconf('SC_PAGE_SIZE')}\n"
    )
