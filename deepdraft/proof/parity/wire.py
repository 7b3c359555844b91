"""A reference behind an OpenAI-compatible URL: a greedy continuation and its log-probabilities.

Owns: the request and reading the answer. Knows nothing of: comparing.

A server tells the log-probabilities of the few best tokens only, as text. Tokens are found by their
text in the checkpoint's own tokenizer; those that are not unique stay unknown.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from deepdraft.checkpoint.section import read_config
from deepdraft.checkpoint.spec import ModelSpec
from deepdraft.errors import CheckpointError, ConfigError
from deepdraft.proof.parity.reference import Trace
from deepdraft.text.tokenizer import Tokenizer

_BEST = 20
_TIMEOUT = 120.0
_MAX_ANSWER = 64 << 20


def from_wire(
    url: str, checkpoint: Path, ids: list[int], *, greedy: int, name: str | None = None
) -> Trace:
    """A continuation of `ids` by the server at `url` (up to and including /v1).

    Raises ConfigError where the server cannot be reached or does not tell log-probabilities.
    """
    base = url.rstrip("/")
    if not _is_web(base):
        raise ConfigError(f"{url!r} is not an http or https URL; give it up to and including /v1")
    tokenizer = Tokenizer.load(checkpoint)
    model = name or _first_model(base)
    body = {
        "model": model,
        "prompt": ids,
        "max_tokens": greedy,
        "temperature": 0,
        "logprobs": _BEST,
    }
    try:
        choice = _call(f"{base}/completions", body)["choices"][0]
        told = choice["logprobs"]
        steps = [
            (str(token), {str(text): float(value) for text, value in (options or {}).items()})
            for token, options in zip(told["tokens"], told["top_logprobs"], strict=False)
        ][:greedy]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{base} gave no log-probabilities for a completion; start it so that it does"
        ) from error
    by_text = _by_text(tokenizer)
    size: int = ModelSpec.of(read_config(checkpoint / "config.json")).effective["vocab_size"]
    chosen: list[int] = []
    rows = torch.full((len(steps), size), torch.nan)
    for row, (token, options) in enumerate(steps):
        for text, value in options.items():
            known = by_text.get(text)
            if known is not None and known < size:
                rows[row, known] = value
        found = by_text.get(token)
        if found is None:
            break  # what follows is continued from a token that we cannot name
        chosen.append(found)
    if not chosen:
        raise CheckpointError("the server's first token is not one of this tokenizer's")
    text = [*ids, *chosen[:-1]]
    logits = torch.full((len(text), size), torch.nan)
    logits[len(ids) - 1 :] = rows[: len(chosen)]
    return Trace(
        name=f"{model} at {urlsplit(base).netloc}",
        ids=text,
        logits=logits,
        first=len(ids) - 1,
        partial=True,
        notes=[
            f"the server tells {_BEST} log-probabilities a token, for {len(chosen)} tokens after "
            f"a prompt of {len(ids)}"
        ],
    )


def _is_web(base: str) -> bool:
    try:
        parts = urlsplit(base)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets or a port that are none
        return False


def _first_model(base: str) -> str:
    try:
        return str(_call(f"{base}/models", None)["data"][0]["id"])
    except (LookupError, TypeError) as error:
        raise ConfigError(f"{base}/models lists no model; name one with --model-name") from error


def _by_text(tokenizer: Tokenizer) -> dict[str, int]:
    """Text -> id, for texts that one token only stands for."""
    places: dict[str, list[int]] = defaultdict(list)
    for token in range(tokenizer.vocab_size):
        places[tokenizer.decode([token])].append(token)
    return {text: found[0] for text, found in places.items() if len(found) == 1}


def _call(url: str, body: dict[str, Any] | None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            return json.loads(answer.read(_MAX_ANSWER))
    except urllib.error.HTTPError as error:
        raise ConfigError(f"{url} answered {error.code}: {error.read(500)!r}") from error
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        raise ConfigError(f"{url} cannot be asked: {error}") from error
