"""`speculation.steps`: what the stream says of each step, checked against the answer itself."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import Client

TEXT = "The quick brown fox jumps over the lazy dog, again and again. Größe 東京 🙂."


@pytest.fixture
def drafting(make_client: Callable[..., Client]) -> Client:
    client = make_client(drafts=True)
    client.toy.say(TEXT)
    return client


def stream(client: Client, path: str = "/v1/completions", **fields: Any) -> list[dict]:
    body = {"stream": True, "temperature": 0, "speculation": {"steps": True}, **fields}
    body |= (
        {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    )
    lines = client.post(path, body).text.split("\n\n")
    return [json.loads(x[6:])["choices"][0] for x in lines if x.startswith("data: {")]


def steps(choices: list[dict]) -> list[dict]:
    return [c["step"] for c in choices if "step" in c]


def texts(of: list[dict], part: str = "content") -> str:
    return "".join(t["text"] for s in of for t in s["tokens"] if t["part"] == part)


def test_off_by_default(drafting: Client) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        for speculation in (None, {}, {"steps": False}, {"report": True}):
            assert not steps(stream(drafting, path, speculation=speculation))


def test_steps_give_the_text_and_the_counters(drafting: Client) -> None:
    # Drafts that are wrong now and then, so that every origin comes.
    drafting.toy.runner.error = 24.0  # type: ignore[attr-defined]
    choices = stream(drafting, speculation={"steps": True, "report": True})
    seen = steps(choices)
    report = choices[-1]["speculation"]
    assert texts(seen) == "".join(c["text"] for c in choices) == TEXT
    assert [s["index"] for s in seen] == list(range(report["steps"] + 1))
    assert sum(s["accepted"] for s in seen) == report["accepted_drafts"] > 10
    assert sum(s["rows"] - 1 for s in seen[1:]) == report["verified_drafts"]
    assert sum(s["drafted"] for s in seen) == report["drafts"]
    origins = {t["origin"] for s in seen for t in s["tokens"]}
    assert origins == {"accepted", "corrected", "bonus", "plain"}
    for step in seen:
        *before, last = [t["origin"] for t in step["tokens"]]
        assert before == ["accepted"] * step["accepted"] or step is seen[-1]
        assert (last == "corrected") == (step["rejected"] is not None)
        assert last != "bonus" or step["accepted"] == step["rows"] - 1
        assert last != "plain" or step["rows"] == 1
        assert step["ms"] >= step["draft_ms"] >= 0
        for token in step["tokens"]:
            assert 0 < token["probability"] <= 1
            assert (token["confidence"] is None) == (token["origin"] != "accepted")
    # The fake drafter's raw confidence is 3, without a calibration its sigmoid counts.
    drafts = [t for s in seen for t in s["tokens"] if t["confidence"] is not None]
    assert {t["confidence"] for t in drafts} == {0.9526}
    fallen = [s["rejected"] for s in seen if s["rejected"]]
    assert all(f["confidence"] == 0.9526 and isinstance(f["text"], str) for f in fallen)
    assert seen[-1]["tokens"][-1]["part"] == "control", "the end token"


def test_probabilities_are_the_models_own(drafting: Client) -> None:
    """Temperature and filters do not change them; logprobs say the same."""
    fields = {"temperature": 1.5, "top_k": 3, "seed": 5, "logprobs": 0}
    drafting.toy.runner.strength = 6.0
    choices = stream(drafting, max_tokens=40, **fields)
    shown = [t["probability"] for s in steps(choices) for t in s["tokens"]]
    logs = [x for c in choices if c["logprobs"] for x in c["logprobs"]["token_logprobs"]]
    kept = [t for s in steps(choices) for t in s["tokens"] if t["part"] == "content"]
    assert len(kept) == len(logs) > 10
    for token, logprob in zip(kept, logs, strict=True):
        assert token["probability"] == pytest.approx(math.exp(logprob), abs=2e-4)
    assert len({round(p, 2) for p in shown}) > 3


def test_parts_of_a_chat(drafting: Client) -> None:
    drafting.toy.say("Let me see.</think>Here it is: 42.")
    choices = stream(drafting, "/v1/chat/completions", thinking={"type": "enabled"})
    seen = steps(choices)
    assert texts(seen, "reasoning") == "Let me see."
    assert texts(seen) == "Here it is: 42."
    assert texts(seen, "control") == "</think><｜end▁of▁sentence｜>"
    assert "".join(c["delta"].get("content") or "" for c in choices) == texts(seen)
    assert "".join(c["delta"].get("reasoning_content") or "" for c in choices) == "Let me see."


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stop_string_ends_the_steps_too(drafting: Client, path: str) -> None:
    fields = {"thinking": {"type": "disabled"}} if "chat" in path else {}
    choices = stream(drafting, path, stop="fox", **fields)
    assert texts(steps(choices)) == "The quick brown fox"
    assert choices[-1]["finish_reason"] == "stop"


def test_held_back_text_still_has_its_step(drafting: Client) -> None:
    """Every step comes as it is taken, though its text may be the beginning of a stop string."""
    choices = stream(drafting, stop=TEXT[:30] + "no", speculation={"steps": True, "drafts": 0})
    first = next(i for i, c in enumerate(choices) if c["text"])
    assert len(steps(choices[:first])) >= 29
    assert "".join(c["text"] for c in choices) == TEXT == texts(steps(choices))


def test_choices_have_steps_of_their_own(drafting: Client) -> None:
    body = {"prompt": "Hi", "n": 3, "stream": True, "seed": 1, "speculation": {"steps": True}}
    lines = drafting.post("/v1/completions", body).text.split("\n\n")
    choices = [json.loads(x[6:])["choices"][0] for x in lines if x.startswith("data: {")]
    for index in range(3):
        own = [c for c in choices if c["index"] == index]
        assert texts(steps(own)) == "".join(c["text"] for c in own) == TEXT


def test_only_in_streams(drafting: Client) -> None:
    answer = drafting.complete("Hi", speculation={"steps": True})
    assert answer.status_code == 400
    assert "speculation.steps needs stream: true" in answer.json()["error"]["message"]


def test_the_same_answer_with_and_without(drafting: Client) -> None:
    fields = {"temperature": 1.0, "seed": 3, "max_tokens": 50}
    drafting.toy.runner.strength = 5.0
    watched, plain = (
        "".join(c["text"] for c in stream(drafting, speculation={"steps": on}, **fields))
        for on in (True, False)
    )
    assert watched == plain and len(plain) > 20
