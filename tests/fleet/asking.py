"""Turns of conversations as a fleet's clients send them, whole or as a stream."""

import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
Json = dict[str, Any]


class Failed(Exception):
    """A request that was not answered as it should be."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer, however it came."""

    text: str
    usage: Json
    replica: str
    gap_s: float = 0.0
    """The longest silence of a stream."""


def ask(client: httpx.Client, url: str, body: Json, session: str) -> Answered:
    """Sends one turn to the fleet at `url`. Raises Failed, or what httpx raises."""
    headers = {"X-Session-ID": session}
    if body.get("stream"):
        return _stream(client, f"{url}{CHAT}", body, headers)
    answer = client.post(f"{url}{CHAT}", json=body, headers=headers)
    if answer.status_code != 200:
        raise Failed(f"{answer.status_code} {answer.text[:200]}")
    got = answer.json()
    text = got["choices"][0]["message"]["content"] or ""
    return Answered(text, got["usage"], answer.headers["x-deepdraft-replica"])


def _stream(client: httpx.Client, url: str, body: Json, headers: dict[str, str]) -> Answered:
    body = {**body, "stream_options": {"include_usage": True}}
    text, last, gap, usage = "", "", 0.0, None
    with client.stream("POST", url, json=body, headers=headers) as answer:
        if answer.status_code != 200:
            raise Failed(f"{answer.status_code} {answer.read()[:200]!r}")
        replica, heard = answer.headers["x-deepdraft-replica"], time.monotonic()
        for line in answer.iter_lines():
            gap, heard = max(gap, time.monotonic() - heard), time.monotonic()
            last = line or last
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise Failed(f"error frame: {chunk['error']['message']}")
                text += "".join(c["delta"].get("content") or "" for c in chunk["choices"])
                usage = chunk["usage"] or usage
    if usage is None or last != "data: [DONE]":
        raise Failed("a stream that was cut without a word")
    return Answered(text, usage, replica, gap)
