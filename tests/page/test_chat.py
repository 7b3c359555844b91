"""The page in a browser: chat, stream, stop, retry, tokens, side by side, keyboard, reload."""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import Live

from .conftest import Opened

TEXT = "The **quick** brown fox jumps over the lazy dog, again and again. Größe 東京 🙂."
SHOWN = TEXT.replace("**", "")


def test_load_and_chat(open_page: Callable[..., Opened]) -> None:
    tab = open_page()
    assert tab.page.inner_text("#state") == "toy"
    assert tab.page.locator("#legend li").count() == 4
    answer = tab.ask("Hello <b>there</b>", TEXT)
    assert answer.locator(".md strong").inner_text() == "quick"
    assert answer.locator("[data-track=content]").inner_text() == SHOWN
    assert tab.page.locator(".question p").inner_text() == "Hello <b>there</b>"
    assert not tab.page.is_visible("#welcome")
    assert "tokens" in answer.locator(".figures").inner_text()
    tab.ask("Second", "And so on.")
    tab.nothing_runs()
    assert tab.page.locator("article.answer").count() == 2
    # The gauges come from /metrics.
    tab.page.wait_for_selector("#g-memory:text-matches('[MG]B')")
    tab.page.wait_for_selector("#g-queue:text-is('0, 0')")
    assert tab.complaints == []


def test_the_gauges(open_page: Callable[..., Opened]) -> None:
    """Live, of a server that answers; the last prompt's from its usage."""
    tab = open_page(max_tokens=16384)
    page = tab.page
    tab.toy.runner.step_fault = lambda sequences: time.sleep(0.005)
    tab.say("word " * 3000)
    page.fill("#p-max_tokens", "16000")
    tab.send()
    page.wait_for_selector("#g-queue:text-is('1, 0')")
    for name, pattern in {"speed": "^[1-9]", "step": "^[1-9]", "length": "^[1-9][.]"}.items():
        page.wait_for_selector(f"#g-{name}:text-matches('{pattern}')")
        assert page.get_attribute(f".gauge:has(#g-{name}) polyline", "points")
    page.keyboard.press("Escape")
    tab.finished()
    for cached, told in ((0, "1,300 computed"), (1200, "1,200 of 1,300 cached, memory+disk")):
        details = {"cached_tokens": cached, "cache_source": "memory+disk"}
        usage = {"prompt_tokens": 1300, "prompt_tokens_details": details}
        body = json.dumps({"choices": [{"delta": {"content": "Fine."}}], "usage": usage})
        tab.stream(f"data: {body}\n\ndata: [DONE]\n\n")
        answer = tab.ask()
        assert page.inner_text("#g-cache") == told
    assert "prompt 1,300, 1,200 from the cache" in answer.locator(".figures").inner_text()
    assert tab.complaints == []


def test_how_far_a_long_prompt_is(
    open_page: Callable[..., Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told while it is read, gone with the first token."""
    monkeypatch.setattr("deepdraft.engine.reading.EVERY_S", 0.0)
    monkeypatch.setattr("deepdraft.engine.reading.SPACING", float("inf"))
    tab, go_on, parts = open_page(engine={"prefill_chunk": 16}), threading.Event(), []

    def third_waits(sequence: object, ids: list[int]) -> None:
        parts.append(ids)
        assert len(parts) < 3 or go_on.wait(60)

    tab.toy.runner.prefill_fault = third_waits
    tab.say("Read.")
    tab.send("word " * 40)
    told = "reading the prompt: 32 of [0-9]+ tokens, [0-9,]+ a second, [0-9,]+ s left"
    wait = tab.page.wait_for_selector(f".wait :text-matches('^{told}$')")
    go_on.set()
    tab.finished()
    assert not wait.is_visible()
    assert tab.page.inner_text("article.answer [data-track=content]") == "Read."
    assert tab.complaints == []


def test_the_history_is_sent(open_page: Callable[..., Opened]) -> None:
    tab = open_page()
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return "Fine."

    tab.toy.say(answer)
    tab.ask("First question")
    tab.page.click("#panel summary:text('Prompt')")
    tab.page.fill("#p-system", "Be brief.")
    tab.ask("Second question")
    assert "First question" in prompts[-1] and "Fine." in prompts[-1]
    assert "Second question" in prompts[-1] and "Be brief." in prompts[-1]


def test_tokens_and_steps(open_page: Callable[..., Opened]) -> None:
    tab = open_page()
    tab.toy.runner.error = 24.0  # type: ignore[attr-defined]
    answer = tab.ask(answer=TEXT)
    spans = answer.locator("[data-track=content] .t")
    kinds = set()
    for i in range(spans.count()):
        kinds |= set(spans.nth(i).get_attribute("class").split()) & {
            "accepted",
            "corrected",
            "bonus",
            "plain",
        }
    assert kinds == {"accepted", "corrected", "bonus", "plain"}
    assert "".join(spans.all_text_contents()) == SHOWN
    corrected = answer.locator(".t.corrected").first
    corrected.hover()
    tip = tab.page.locator("#tip")
    assert tip.is_visible()
    said = tip.inner_text()
    for what in ("corrected", "probability", "instead of", "its confidence", "0.953", "step "):
        assert what in said, said
    assert answer.locator(".t.hot").count() >= 1, "the step's tokens are marked"
    accepted = answer.locator(".t.accepted").first
    accepted.hover()
    assert "confidence" in tip.inner_text()
    tab.page.mouse.move(5, 400)
    assert not tip.is_visible()
    # Switched off, nothing is coloured; the spans stay.
    tab.page.click("#show-origins")
    colour = accepted.evaluate("node => getComputedStyle(node).backgroundColor")
    assert colour == "rgba(0, 0, 0, 0)"
    assert tab.complaints == []


def test_without_step_events(open_page: Callable[..., Opened]) -> None:
    tab = open_page()
    tab.page.click("#panel summary:text('Drafts')")
    tab.page.uncheck("#p-steps")
    answer = tab.ask(answer=TEXT)
    assert answer.locator("[data-track=content]").inner_text() == SHOWN
    assert answer.locator(".t").count() == 0
    assert not answer.locator(".strip").is_visible()


def test_thinking_is_folded(open_page: Callable[..., Opened]) -> None:
    tab = open_page(thinking=True)
    answer = tab.ask(answer="Let me see: *six* times seven.</think>It is 42.")
    assert answer.locator("[data-track=content]").inner_text() == "It is 42."
    fold = answer.locator("details.thinking")
    assert fold.get_attribute("open") is None
    assert "Thought for" in fold.locator("summary").inner_text()
    fold.locator("summary").click()
    assert fold.locator(".md").inner_text() == "Let me see: six times seven."
    assert "".join(fold.locator(".t").all_text_contents()) == "Let me see: six times seven."


def test_stream_stop_and_retry(open_page: Callable[..., Opened]) -> None:
    tab = open_page(drafts=False)
    gate = threading.Event()
    passed = 0

    def step(sequences: Any) -> None:
        nonlocal passed
        passed += 1
        if passed > 20:
            assert gate.wait(30)

    tab.toy.runner.step_fault = step
    tab.toy.say("x" * 400)
    tab.send()
    text = tab.page.locator("[data-track=content]")
    tab.page.wait_for_selector("[data-track=content] .t >> nth=15")
    assert tab.page.inner_text("#send") == "Stop"
    assert 15 < len(text.inner_text()) < 30, "it is drawn while it is streamed"
    tab.page.keyboard.press("Escape")
    tab.finished()
    gate.set()
    assert "Stopped." in tab.page.inner_text(".note")
    assert tab.page.inner_text("#send") == "Send"
    # The server has ended the request, too.
    tab.nothing_runs()
    tab.toy.say("Now this.")
    tab.page.click("button:text('Retry')")
    tab.page.wait_for_selector("text=Now this.")
    tab.finished()
    assert tab.page.locator("article.answer").count() == 1
    assert tab.complaints == []


def test_errors_are_shown(open_page: Callable[..., Opened]) -> None:
    tab = open_page(max_tokens=64)
    tab.page.fill("#p-max_tokens", "5000")
    tab.ask()
    note = tab.page.locator(".note.bad")
    assert "context is 64 tokens" in note.inner_text()
    assert tab.page.locator("button:text('Retry')").count() == 1
    # What the form can see itself is not sent.
    tab.page.fill("#p-temperature", "7")
    tab.send()
    tab.page.wait_for_selector("#hint.bad")
    assert "Temperature" in tab.page.inner_text("#hint")


def test_an_engine_that_fails_in_mid_stream(open_page: Callable[..., Opened]) -> None:
    tab = open_page(drafts=False)
    calls = 0

    def step(sequences: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 10:
            raise RuntimeError("broken")

    tab.toy.runner.step_fault = step
    answer = tab.ask(answer="y" * 50)
    assert "the model failed" in answer.locator(".note.bad").inner_text()
    assert len(answer.locator("[data-track=content]").inner_text()) >= 10


def test_parameters_reach_the_server(open_page: Callable[..., Opened]) -> None:
    tab = open_page()
    for group in ("Drafts", "Penalties and bias", "Where it ends"):
        tab.page.click(f"#panel summary:text('{group}')")
    values = {
        "temperature": "0.5",
        "top_p": "0.9",
        "top_k": "40",
        "min_p": "0.05",
        "seed": "7",
        "max_tokens": "30",
        "presence_penalty": "0.1",
        "frequency_penalty": "0.2",
        "repetition_penalty": "1.1",
        "stop": "END\nstop here",
        "stop_token_ids": "70, 71",
        "logit_bias": "72: -5\n73: 2.5",
        "drafts": "3",
    }
    for name, value in values.items():
        tab.page.fill(f"#p-{name}", value)
    tab.page.check("#p-ignore_eos")
    tab.page.select_option("#p-rule", "block")
    with tab.page.expect_request("**/v1/chat/completions") as sent:
        tab.ask(answer="abc")
    body = json.loads(sent.value.post_data)
    assert body["temperature"] == 0.5 and body["top_p"] == 0.9 and body["top_k"] == 40
    assert body["min_p"] == 0.05 and body["seed"] == 7 and body["max_tokens"] == 30
    assert body["presence_penalty"] == 0.1 and body["frequency_penalty"] == 0.2
    assert body["repetition_penalty"] == 1.1 and body["stop"] == ["END", "stop here"]
    assert body["stop_token_ids"] == [70, 71] and body["logit_bias"] == {"72": -5, "73": 2.5}
    assert body["ignore_eos"] is True
    assert body["speculation"] == {"drafts": 3, "rule": "block", "report": True, "steps": True}
    assert tab.page.locator(".note.bad").count() == 0, "and the server takes them"
    tab.page.reload()
    assert tab.page.input_value("#p-top_k") == "40", "they outlive a reload"


def test_what_the_page_does_not_know(open_page: Callable[..., Opened]) -> None:
    """Fields and kinds of a later server, or of a broken one, cost no answer."""
    tab = open_page()
    token = {"id": 1, "text": "Hello", "part": "content", "origin": "foretold", "later": [1]}
    steps: list[Any] = [
        {"index": 0, "tokens": [token], "rows": 1, "later": {"x": 1}},
        {"index": 1, "rows": 1e9, "accepted": -3, "ms": "slow", "tokens": [None, 7, {"id": "x"}]},
        {"tokens": [{**token, "text": " there", "origin": "constructor"}], "rejected": 7},
        {"index": 2, "tokens": "none"},
        "step",
        7,
    ]
    texts = ["Hello", "", " there", ".", "", ""]
    chunks = [
        {"choices": [{"delta": {"content": t, "later": 1}, "step": s, "more": None}]}
        for t, s in zip(texts, steps, strict=True)
    ]
    chunks += [{"later": 1}, {"choices": []}, {"choices": [{"finish_reason": "stop"}]}]
    body = ": note\n\nevent: later\n" + "".join(f"data: {json.dumps(c)}\n\n" for c in chunks)
    tab.stream(body + "data: [DONE]\n\n")
    answer = tab.ask()
    assert answer.locator("[data-track=content]").inner_text() == "Hello there."
    assert answer.locator(".note.bad").count() == 0
    answer.locator(".t").first.hover()
    assert "plain" in tab.page.inner_text("#tip")
    for _ in range(3):
        answer.locator(".strip-view").press("ArrowRight")
    assert answer.locator(".strip-view").get_attribute("aria-valuemax") == "2"
    # What is no JSON is told as what it is, and what is no message as it is.
    odd = {
        "{oh": "the server sent what is no JSON object",
        "null": "the server sent what is no JSON object",
        '{"error": {"message": {"a": [1]}}}': '{"a":[1]}',
        '{"error": 7}': "7",
    }
    for data, said in odd.items():
        tab.stream(f"data: {data}\n\n")
        assert tab.ask().locator(".note.bad").inner_text() == said
    assert tab.complaints == []


def test_storage_that_is_forbidden_or_broken(browser: Any, make_live: Callable[..., Live]) -> None:
    live = make_live()
    live.toy.say("Here.")
    forbid = """for (const name of ["localStorage", "sessionStorage"]) {
      Object.defineProperty(window, name, { get() { throw new DOMException("no"); } });
    }"""
    strange = """for (const store of [localStorage, sessionStorage]) {
      store.setItem("deepdraft.look", "[7"); store.setItem("deepdraft.params", '"x"');
      store.setItem("deepdraft.chat", '{"turns": [null, 7, {"question": {}}]}');
      store.setItem("deepdraft.access", '{"key": 5}');
    }"""
    full = "Storage.prototype.setItem = () => { throw new DOMException('full'); };"
    for script in (forbid, strange, full):
        context = browser.new_context()
        page = context.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
        page.add_init_script(script)
        page.goto(live.url)
        page.wait_for_selector(".dot.up", state="attached")
        page.click("#theme")
        page.uncheck("#thinking")
        page.fill("#p-max_tokens", "20")
        page.fill("#prompt", "Hi")
        page.press("#prompt", "Enter")
        page.wait_for_selector("text=Here.")
        page.click("#clear")
        assert errors == [], script
        context.close()


def test_an_answer_without_a_word_is_not_history(open_page: Callable[..., Opened]) -> None:
    """A conversation goes on after an answer that failed before it began."""
    tab = open_page()
    tab.page.route("**/v1/chat/completions", lambda route: route.abort())
    tab.ask("First")
    tab.page.unroute("**/v1/chat/completions")
    with tab.page.expect_request("**/v1/chat/completions") as sent:
        answer = tab.ask("Second", "Fine.")
    assert [m["role"] for m in json.loads(sent.value.post_data)["messages"]] == ["user", "user"]
    assert answer.locator("[data-track=content]").inner_text() == "Fine."


def test_text_of_both_directions(open_page: Callable[..., Opened]) -> None:
    """Each paragraph runs as its own first letter says; code runs from the left."""
    tab = open_page()
    tab.feed("مرحبا بالعالم\n\nHello\n\n- שלום עולם\n\n```\nx = 'مرحبا'\n```")
    answer = tab.ask("سؤال")
    sides = tab.page.evaluate(
        """() => [...document.querySelectorAll(".question p, .md p, .md code .lines")].map((n) => {
          const range = document.createRange();
          range.selectNodeContents(n);
          const text = range.getBoundingClientRect(), box = n.getBoundingClientRect();
          return Math.round(text.left - box.left) <= Math.round(box.right - text.right);
        })"""
    )
    # The question's box is as wide as its text; of the others the second and the code begin left.
    assert (
        tab.page.evaluate("() => getComputedStyle(document.querySelector('.question p')).direction")
        == "rtl"
    )
    assert sides[1:] == [False, True, False, True], answer.inner_html()


def test_keyboard_alone(open_page: Callable[..., Opened]) -> None:
    tab = open_page()
    tab.toy.say(TEXT)
    page = tab.page
    page.reload()
    page.wait_for_selector(".dot.up")
    assert page.evaluate("() => document.activeElement.id") == "prompt"
    page.keyboard.type("One line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("and another")
    page.keyboard.press("Enter")
    page.locator("article.answer").wait_for()
    tab.finished()
    assert page.locator(".question p").inner_text() == "One line\nand another"
    assert "Answered" in page.inner_text("#status")
    # Backwards from the question: the buttons of the answer, then its steps.
    seen = []
    for _ in range(8):
        page.keyboard.press("Shift+Tab")
        seen.append(page.evaluate("() => document.activeElement.className"))
        if seen[-1] == "strip-view":
            break
    assert seen[-1] == "strip-view", seen
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    slider = page.locator(".strip-view")
    said = slider.get_attribute("aria-valuetext")
    assert (
        said.startswith("step 1, ") and "accepted, confidence 0." in said and "probability" in said
    )
    assert page.locator(".t.hot").count() > 0
    page.keyboard.press("End")
    assert int(slider.get_attribute("aria-valuenow")) == int(slider.get_attribute("aria-valuemax"))
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # Retry
    page.wait_for_selector("html:not(.busy)")
    assert page.locator("article.answer").count() == 1
    assert tab.complaints == []


def test_names_roles_and_labels(open_page: Callable[..., Opened]) -> None:
    """What a screen reader goes by: every control has a name, ids are unique."""
    tab = open_page()
    tab.ask(answer="See:\n\n```html\n<html>x</html>\n```\n\n|a|b|\n|-|-|\n|1|2|\n")
    tab.page.click("button.run")
    nameless = tab.page.evaluate(
        """() => [...document.querySelectorAll(
            "button, input, select, textarea, iframe, [tabindex='0']")]
        .filter((node) => !(node.getAttribute("aria-label") || node.title || node.labels?.length
            || node.textContent.trim()))
        .map((node) => node.outerHTML)"""
    )
    assert nameless == []
    ids = tab.page.evaluate("() => [...document.querySelectorAll('[id]')].map((n) => n.id)")
    assert len(ids) == len(set(ids))
    assert tab.page.locator("[role=log]").count() == 1
    assert tab.page.locator("h1").count() == 1


def contrast(tab: Opened) -> list[dict[str, Any]]:
    """Texts whose contrast with what lies under them is below 4.5 to 1 (WCAG AA)."""
    return tab.page.evaluate(
        """() => {
        const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
        const light = ([r, g, b]) => {
          const f = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
          return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b);
        };
        const under = (node) => {
          for (let n = node; n; n = n.parentElement) {
            const c = rgb(getComputedStyle(n).backgroundColor);
            if (c.length < 4 || c[3] === 1) return c;
          }
          return [255, 255, 255];
        };
        const bad = [];
        for (const node of document.querySelectorAll("body *")) {
          const text = [...node.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
          if (!text || !node.checkVisibility()) continue;
          const [a, b] = [light(rgb(getComputedStyle(node).color)), light(under(node))];
          const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
          if (ratio < 4.5) bad.push({ node: node.outerHTML.slice(0, 80), ratio });
        }
        return bad;
        }"""
    )


def test_themes_and_contrast(open_page: Callable[..., Opened]) -> None:
    tab = open_page()
    tab.toy.runner.error = 24.0  # type: ignore[attr-defined]
    papers = set()
    assert contrast(tab) == []
    tab.ask(answer=TEXT + "\n\n> quoted `code`\n\n```html\n<html></html>\n```")
    for scheme in ("light", "dark"):
        tab.page.emulate_media(color_scheme=scheme)
        papers.add(tab.page.evaluate("() => getComputedStyle(document.body).backgroundColor"))
        assert contrast(tab) == [], scheme
        tab.page.locator(".t.accepted").first.hover()
        assert tab.page.locator(".t.hot").count() >= 1
        assert contrast(tab) == [], f"{scheme}, with the tokens of a step marked"
        tab.page.mouse.move(5, 400)
    assert len(papers) == 2
    tab.page.click("#theme")  # light, whatever the system says
    assert (
        tab.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        == "rgb(251, 250, 247)"
    )
    assert tab.complaints == []


def test_narrow_screens(open_page: Callable[..., Opened]) -> None:
    tab = open_page(context={"viewport": {"width": 360, "height": 640}})
    tab.ask(answer="A long line of code:\n\n```\n" + "x" * 300 + "\n```\n\n" + "word " * 60)
    wide = tab.page.evaluate("() => document.documentElement.scrollWidth")
    assert wide <= 360
    assert not tab.page.is_visible("#params")
    tab.page.click("#panel-toggle")
    tab.page.fill("#p-temperature", "0.5")
    tab.page.keyboard.press("Escape")
    assert tab.page.evaluate("() => document.activeElement.id") == "panel-toggle"
    assert not tab.page.is_visible("#params")


def test_a_reload_during_a_stream(open_page: Callable[..., Opened]) -> None:
    tab = open_page(drafts=False)
    gate = threading.Event()
    steps = 0

    def step(sequences: Any) -> None:
        nonlocal steps
        steps += 1
        if steps > 20:
            assert gate.wait(30)

    tab.toy.runner.step_fault = step
    tab.toy.say("z" * 200)
    tab.send("Go on")
    tab.page.wait_for_selector("[data-track=content] .t >> nth=15")
    tab.page.reload()
    gate.set()
    tab.page.wait_for_selector(".dot.up")
    assert tab.page.inner_text(".question p") == "Go on"
    kept = tab.page.inner_text("[data-track=content]")
    assert set(kept) == {"z"} and len(kept) >= 15
    assert "left before the end" in tab.page.inner_text(".note")
    tab.nothing_runs()
    tab.toy.say("Done.")
    tab.page.click("button:text('Retry')")
    tab.page.wait_for_selector("text=Done.")
    tab.page.click("#clear")
    tab.page.reload()
    assert tab.page.locator(".turn").count() == 0
    assert tab.complaints == []


def test_a_key_is_asked_for(browser: Any, make_live: Callable[..., Live]) -> None:
    live = make_live(server={"api_keys": ("secret",)})
    context = browser.new_context()
    page = context.new_page()
    page.goto(live.url)
    page.wait_for_selector("#access[open]")
    assert "API key" in page.inner_text("#state")
    page.fill("#p-key", "secret")
    page.keyboard.press("Tab")
    page.wait_for_selector(".dot.up")
    live.toy.say("Welcome.")
    page.uncheck("#thinking")
    page.fill("#prompt", "Hi")
    page.press("#prompt", "Enter")
    page.wait_for_selector("text=Welcome.")
    # It is kept for the tab, and nowhere else.
    assert page.evaluate("() => JSON.stringify(localStorage)").count("secret") == 0
    page.reload()
    page.wait_for_selector(".dot.up")
    context.close()


def test_a_model_that_is_still_loading(browser: Any, make_live: Callable[..., Live]) -> None:
    live = make_live(wait=False)
    page = browser.new_page()
    page.goto(live.url)
    page.wait_for_selector("#state:text('still loading')")
    assert page.locator(".dot.up").count() == 0
    live.toy.gate.set()
    page.wait_for_selector(".dot.up")
    assert page.inner_text("#state") == "toy"
    page.close()


def test_a_server_that_goes_away(open_page: Callable[..., Opened]) -> None:
    tab = open_page()
    tab.ask(answer="Once.")
    tab.live.stop()
    answer = tab.ask("And again?")
    assert "No answer" in answer.locator(".note.bad").inner_text()
    tab.page.wait_for_selector("#state:text('no connection')")
    assert tab.page.locator("article.answer").first.inner_text().startswith("Once.")


@pytest.mark.parametrize("tenths", [2, pytest.param(10, marks=pytest.mark.full)])
def test_ten_thousand_tokens(tenths: int, open_page: Callable[..., Opened]) -> None:
    """All of a long answer is drawn, in prose without a line break as well as in code.

    How smoothly is measured by bench/page_figures.py.
    """
    tab = open_page(max_tokens=16384)
    words = "".join(f"word{i} " for i in range(50 * tenths))
    code = "\n".join(f"line {i} = {i * i}" for i in range(36 * tenths))
    text = f"{words}\n\n```\n{code}\n```"
    assert len(text) > 800 * tenths, "one byte is one token"
    tab.page.fill("#p-max_tokens", "12000")
    tab.page.set_default_timeout(60_000)
    answer = tab.ask(answer=text)
    assert answer.locator("p").first.text_content().strip() == words.strip()
    assert answer.locator("pre").text_content() == code + "\n"
    assert answer.locator("[data-track=content] .t").count() > 700 * tenths
    assert tab.complaints == []
