"""`deepdraft top`: what a server does now, in a terminal.

Owns: reading /metrics, what is shown of two readings, drawing.
Knows nothing of: the engine, torch.
"""

import http.client
import json
import re
import sys
import time
import urllib.parse
from collections.abc import Mapping

import click

from deepdraft.errors import DeepdraftError, RequestError

Reading = Mapping[str, float]
"""Samples of /metrics by name and labels, `deepdraft_` left out."""

_SAMPLE = re.compile(r"deepdraft_(\w+(?:\{[^}]*\})?) (\S+)\Z")
_BUCKET = re.compile(r'_bucket\{le="([^"]+)"\}\Z')
_BAR = 24
_MOST_BYTES = 4 << 20


@click.command()
@click.argument("url", default="http://127.0.0.1:8000")
@click.option(
    "--interval", type=click.FloatRange(0.1, 60.0), default=1.0, metavar="S", show_default=True
)
@click.option("--once", is_flag=True, help="Print one interval and end.")
def top(url: str, interval: float, once: bool) -> None:
    """Show what the server at URL does, anew every INTERVAL seconds.

    Ctrl-C ends it.
    """
    source = Source(url)
    old = source.read()
    if sys.stdout.isatty() and not once:
        click.clear()
    begin = time.monotonic()
    while True:
        time.sleep(interval)
        try:
            new, state = source.read(), source.state()
        except DeepdraftError as error:
            if once:
                raise
            _draw([f"{url}: {error.message}"])
            continue
        now = time.monotonic()
        lines = [f"{url}  {state}", *view(old, new, now - begin)]
        if once or not sys.stdout.isatty():
            click.echo("\n".join(lines))
        else:
            _draw(lines)
        if once:
            return
        old, begin = new, now


def _draw(lines: list[str]) -> None:
    """Home, each line with the rest of its row cleared, then everything below cleared."""
    click.echo("\x1b[H" + "\n".join(f"{line}\x1b[K" for line in lines) + "\x1b[J", nl=False)


class Source:
    """A server's /metrics and /healthz."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestError(f"{url!r} is no http or https address")
        self._parts, self._host = parts, parts.hostname

    def read(self) -> Reading:
        """The samples now. Raises DeepdraftError."""
        return parse(self._get("/metrics"))

    def state(self) -> str:
        """`ready`, `loading`, ... Raises DeepdraftError."""
        try:
            return str(json.loads(self._get("/healthz", any_status=True))["state"])
        except (ValueError, KeyError, TypeError):
            return "unknown"

    def _get(self, path: str, *, any_status: bool = False) -> str:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self._host, self._parts.port, timeout=5)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            text = response.read(_MOST_BYTES).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise DeepdraftError(f"no answer from {self._parts.netloc}: {reason}") from error
        finally:
            connection.close()
        if response.status != 200 and not any_status:
            raise DeepdraftError(f"{self._parts.netloc}{path} answers {response.status}")
        return text


def parse(text: str) -> Reading:
    """The samples of a Prometheus exposition that are deepdraft's own."""
    found = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is not None:
            try:
                found[match[1]] = float(match[2])
            except ValueError:
                continue
    return found


def view(old: Reading, new: Reading, seconds: float) -> list[str]:
    """The lines that tell two readings, taken `seconds` apart."""

    def gain(name: str) -> float:
        # A server that was started anew counts from 0.
        return max(0.0, new.get(name, 0.0) - old.get(name, 0.0))

    def rate(name: str) -> float:
        return gain(name) / seconds

    running, waiting = (new.get(f"num_requests_{n}", 0) for n in ("running", "waiting"))
    parked = new.get("num_requests_preempted", 0)
    steps, rows = gain("iterations_total"), gain("iteration_rows_total")
    spec_steps = sum(gain(n) for n in new if n.startswith("spec_decode_steps_total"))
    accepted = gain("spec_decode_num_accepted_tokens_total")
    verified = gain("spec_decode_num_draft_tokens_total")
    lines = [
        f"requests   {running:4.0f} running  {waiting:4.0f} waiting  {parked:3.0f} preempted"
        f"  {rate('requests_total'):6.1f} /s in  {rate('requests_rejected_total'):5.1f} /s refused",
        f"tokens     {rate('generation_tokens_total'):8.1f} /s answered"
        f"  {rate('prompt_tokens_total'):8.1f} /s read",
        f"steps      {steps / seconds:8.1f} /s  {_quotient(rows, steps):6.1f} rows each",
        f"drafting   {_quotient(spec_steps + accepted, spec_steps):6.2f} tokens a step of a request"
        f"  {100 * _quotient(accepted, verified):5.1f} % of verified drafts stood",
    ]
    parts = {n: gain(n) for n in new if n.startswith("iteration_seconds_total{")}
    total = sum(parts.values())
    for name, value in sorted(parts.items()):
        share = _quotient(value, total)
        label = name.partition('part="')[2].rstrip('"}')
        lines.append(f"  {label:<9}{100 * share:5.1f} %  {'#' * round(_BAR * share)}")
    for label, name in (
        ("in queue", "request_queue_time_seconds"),
        ("1st token", "time_to_first_token_seconds"),
        ("request", "e2e_request_latency_seconds"),
    ):
        lines.append(f"{label:<10} {_quantiles(old, new, name)}")
    ended = {
        n.partition('reason="')[2].rstrip('"}'): gain(n)
        for n in new
        if n.startswith("requests_finished_total{")
    }
    told = "  ".join(f"{value:.0f} {reason}" for reason, value in sorted(ended.items()) if value)
    lines.append(f"ended      {told or 'none'}")
    return lines


def _quotient(a: float, b: float) -> float:
    return a / b if b else 0.0


def _quantiles(old: Reading, new: Reading, name: str) -> str:
    """Median and 90th percentile of what was counted in between, as bounds of buckets."""
    counts: list[tuple[float, float]] = []
    for key, value in new.items():
        found = _BUCKET.search(key)
        if key.startswith(name) and found is not None:
            counts.append((float(found[1].replace("+Inf", "inf")), value - old.get(key, 0.0)))
    counts.sort()
    total = counts[-1][1] if counts else 0.0
    if total <= 0:
        return "      -"
    told = []
    for share in (0.5, 0.9):
        bound = next(b for b, count in counts if count >= share * total)
        last = max(b for b, _ in counts if b != float("inf"))
        text = f"> {last:g} s" if bound == float("inf") else f"<= {bound:g} s"
        told.append(f"{round(100 * share)} % {text}")
    return "  ".join(told) + f"  ({total:.0f})"
