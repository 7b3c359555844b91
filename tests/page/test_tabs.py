"""Several tabs of one browser at once."""

import threading
from collections.abc import Callable
from typing import Any

from .conftest import Opened


def test_two_tabs_answer_at_once(open_page: Callable[..., Opened]) -> None:
    first = open_page(drafts=False)
    second = Opened(first.live, first.context)
    together = threading.Event()
    steps = 0

    def step(sequences: Any) -> None:
        nonlocal steps
        steps += 1
        if len(sequences) > 1:
            together.set()
        elif steps > 12:
            together.wait(0.1)  # slow until the other has come

    first.toy.runner.step_fault = step
    first.toy.say(lambda prompt: ("b" if "Second" in prompt else "a") * 600)
    first.send("First")
    first.page.wait_for_selector("[data-track=content] .t >> nth=5")
    second.send("Second")
    first.finished()
    second.page.wait_for_selector("article.answer")
    second.finished()
    assert together.is_set()
    for tab, letter in ((first, "a"), (second, "b")):
        assert tab.page.inner_text("[data-track=content]") == letter * 600
        tab.page.reload()
        tab.page.wait_for_selector(".dot.up")
        assert tab.page.inner_text("[data-track=content]") == letter * 600, "each tab has its own"
        assert tab.complaints == []


def test_no_tab_undoes_the_settings_of_another(open_page: Callable[..., Opened]) -> None:
    first = open_page()
    second = Opened(first.live, first.context)
    first.page.fill("#p-top_k", "40")
    first.page.press("#p-top_k", "Tab")
    first.page.click("#theme")
    second.page.fill("#p-seed", "7")
    second.page.press("#p-seed", "Tab")
    second.page.click("#compare")
    third = Opened(first.live, first.context)
    assert third.page.input_value("#p-top_k") == "40" and third.page.input_value("#p-seed") == "7"
    assert third.page.get_attribute("html", "data-theme") == "light"
    assert third.page.get_attribute("#compare", "aria-pressed") == "true"
    assert not third.page.is_checked("#thinking"), "as the first tab was told"
