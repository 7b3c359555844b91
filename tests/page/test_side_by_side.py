"""Two answers side by side: drafted against plain."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import Opened
from .test_chat import TEXT


def test_side_by_side(open_page: Callable[..., Opened]) -> None:
    tab = open_page()
    tab.toy.runner.strength = 8.0
    tab.page.fill("#p-temperature", "1")
    tab.page.fill("#p-seed", "11")
    tab.page.fill("#p-max_tokens", "60")
    tab.page.click("#compare")
    bodies: list[dict[str, Any]] = []
    tab.page.on(
        "request", lambda r: bodies.append(json.loads(r.post_data)) if r.method == "POST" else None
    )
    running: list[int] = []
    tab.toy.runner.step_fault = lambda sequences: running.append(len(sequences))
    tab.toy.say(TEXT)
    tab.send()
    tab.page.wait_for_selector(".verdict[data-equal]")
    tab.finished()
    verdict = tab.page.locator(".verdict")
    assert verdict.get_attribute("data-equal") == "true"
    said = verdict.inner_text()
    assert "The same" in said and "times as fast" in said
    drafted, plain = bodies
    assert drafted["seed"] == plain["seed"] and drafted["messages"] == plain["messages"]
    assert drafted["speculation"]["rule"] == plain["speculation"]["rule"] == "coupled"
    assert plain["speculation"]["drafts"] == 0 and "drafts" not in drafted["speculation"]
    assert set(running) == {1}, "one after the other"
    texts = tab.page.locator(".versus [data-track=content]").all_text_contents()
    assert len(texts) == 2 and texts[0] == texts[1]
    assert tab.page.locator(".versus article").nth(0).locator(".t.plain").count() > 10
    assert tab.page.locator(".versus article").nth(1).locator(".t.accepted").count() > 5
    assert tab.complaints == []


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": "0"},
        {"temperature": "0.7", "top_p": "0.9", "top_k": "20"},
        {"temperature": "1.5", "min_p": "0.05", "rule": "block"},
        {"presence_penalty": "0.5", "frequency_penalty": "0.5", "repetition_penalty": "1.2"},
        {"logit_bias": "40: 2", "stop": "e"},
        {"drafts": "2", "rule": "token"},
    ],
    ids=lambda setting: " ".join(setting),
)
def test_side_by_side_under_every_setting(
    open_page: Callable[..., Opened], setting: dict[str, str]
) -> None:
    """Also where the page is told of a rule that has another text for each way: both are asked
    by `coupled`."""
    tab = open_page()
    tab.toy.runner.strength = 6.0
    tab.page.click("#compare")
    for name, value in {"temperature": "1", "seed": "5", "max_tokens": "30", **setting}.items():
        field = tab.page.locator(f"#p-{name}")
        field.evaluate(
            "field => { const fold = field.closest('details'); if (fold) fold.open = true; }"
        )
        if name == "rule":
            field.select_option(value)
        else:
            field.fill(value)
    tab.toy.say(TEXT)
    tab.send()
    tab.page.wait_for_selector(".verdict[data-equal]")
    tab.finished()
    assert tab.page.locator(".verdict").get_attribute("data-equal") == "true"
    assert tab.complaints == []


def test_side_by_side_says_where_answers_part(open_page: Callable[..., Opened]) -> None:
    tab = open_page()
    tab.page.click("#compare")
    tab.page.fill("#p-temperature", "0")
    tab.toy.say(lambda prompt: "abcdXfgh" if "Other" in prompt else "abcdefgh")

    def meddle(route: Any) -> None:
        body = json.loads(route.request.post_data)
        if body["speculation"].get("drafts") == 0:
            body["messages"][0]["content"] = "Other"
        route.continue_(post_data=body)

    tab.page.route("**/v1/chat/completions", meddle)
    tab.ask()
    tab.page.wait_for_selector(".verdict[data-equal=false]")
    assert "Different from token 5 on" in tab.page.inner_text(".verdict")


def test_side_by_side_of_one_token(open_page: Callable[..., Opened]) -> None:
    """From the first to the last there is no time, so none is told."""
    tab = open_page()
    tab.page.fill("#p-max_tokens", "1")
    tab.page.click("#compare")
    tab.say("abc")
    tab.send()
    tab.page.wait_for_selector(".verdict[data-equal=true]")
    assert tab.page.inner_text(".verdict") == "The same token, too few for a time."
    assert tab.complaints == []
