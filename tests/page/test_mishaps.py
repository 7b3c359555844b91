"""What goes wrong in a user's hands loses nothing: fields, keys, names, focus, selection, signs."""

import json
from collections.abc import Callable
from typing import Any

from tests.server.conftest import Live

from .conftest import Opened


def active(tab: Opened) -> str:
    return tab.page.evaluate("() => document.activeElement.id")


def test_settings_that_cannot_be_sent(open_page: Callable[..., Opened]) -> None:
    """Neither the question nor the conversation is lost, and the field is shown."""
    tab = open_page()
    for question in ("One", "Two", "Three"):
        tab.ask(question, "Fine.")
    page = tab.page
    bad = {"temperature": "7", "logit_bias": "72", "stop_token_ids": "x", "seed": "1" * 20}
    for name, value in bad.items():
        page.locator(f"#p-{name}").evaluate("(node, value) => { node.value = value; }", value)
        page.locator("button:text('Retry')").first.click()
        page.wait_for_selector("#hint.bad")
        assert active(tab) == f"p-{name}" and page.is_visible(f"#p-{name}")
        assert page.get_attribute(f"#p-{name}", "aria-invalid") == "true"
        tab.send("Four")
        assert page.input_value("#prompt") == "Four"
        assert page.locator(".turn").count() == page.locator("article.answer").count() == 3
        page.fill(f"#p-{name}", "")
    page.press("#prompt", "Enter")
    page.locator(".turn").nth(3).locator("text=Fine.").wait_for()
    assert page.locator("#hint.bad, [aria-invalid=true]").count() == 0
    assert tab.complaints == []


def test_a_key_that_no_header_takes(open_page: Callable[..., Opened]) -> None:
    """As a copied one with an invisible character is; it is told as what it is."""
    tab = open_page()
    tab.page.click("#access summary")
    tab.page.fill("#p-key", "sk-\u200babc")
    tab.page.press("#p-key", "Tab")
    tab.page.wait_for_selector("#state:text('character')")
    assert "type it anew" in tab.ask().locator(".note.bad").inner_text()
    tab.page.fill("#p-key", "sk-abc")
    tab.page.press("#p-key", "Tab")
    tab.page.wait_for_selector("#state:text('toy')")
    assert tab.complaints == []


def test_a_chosen_name_outlives_a_reload(browser: Any, make_live: Callable[..., Live]) -> None:
    live = make_live()
    context = browser.new_context()
    page = context.new_page()
    models = [{"id": name} for name in ("first", "second", "third")]
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": models}))
    page.goto(live.url)
    page.wait_for_selector(".dot.up")
    page.select_option("#p-model", "third")
    page.reload()
    page.wait_for_selector(".dot.up")
    assert page.input_value("#p-model") == "third"
    models.pop()
    page.reload()
    page.wait_for_selector(".dot.up")
    assert page.input_value("#p-model") == "", "it is served no more"
    context.close()


def test_focus_is_never_nowhere(open_page: Callable[..., Opened]) -> None:
    """Also where the button that was pressed is gone: the next one is what stops the answer."""
    tab = open_page()
    tab.toy.say("Fine.")
    tab.page.locator(".try").nth(1).focus()
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector("text=Fine.")
    tab.finished()
    assert active(tab) == "send"
    tab.page.locator("button:text('Retry')").focus()
    tab.page.keyboard.press("Enter")
    tab.finished()
    assert active(tab) == "send"
    tab.ask()
    assert active(tab) == "prompt", "who types goes on typing"


def test_what_is_selected_or_focused_stays_while_text_grows(browser: Any, make_live: Any) -> None:
    """With tokens and without, in the part that is drawn anew."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(make_live().url)
    for tokens in (True, False):
        for lead in ("", "word " * 110):
            found = page.evaluate(
                """async ([source, tokens]) => {
                const { MarkdownView } = await import("./page/markdown.js");
                const { Track } = await import("./page/tokens.js");
                const root = document.createElement("div");
                document.body.append(root);
                const track = new Track();
                const view = new MarkdownView(root, track, () => {});
                const grow = (text) => {
                  track.append(text);
                  if (tokens) track.push({ text, origin: "plain", step: { index: 0 } });
                  track.align(false);
                  view.update(false);
                };
                for (const word of source.match(/[^ ]+ ?/g)) grow(word);
                root.querySelector("a").focus();
                const last = document.createRange();
                const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
                while (!walker.nextNode().data.includes("these"));
                last.setStart(walker.currentNode, walker.currentNode.data.indexOf("these"));
                const link = root.querySelector("a").firstChild;
                last.setEnd(link.lastChild ?? link, 2);
                getSelection().removeAllRanges();
                getSelection().addRange(last);
                const before = String(getSelection());
                for (let i = 0; i < 20; i++) grow("more *or* less ");
                const focused = document.activeElement.localName;
                const after = String(getSelection());
                root.remove();
                return [before, after, focused];
                }""",
                [lead + "and these words [link](https://e.example/) here ", tokens],
            )
            assert found == ["these words li", "these words li", "a"], (tokens, len(lead))
    context.close()


def test_a_name_of_a_language_as_long_as_it_likes(open_page: Callable[..., Opened]) -> None:
    tab = open_page()
    tab.feed(f"```{'html' * 900}\ncode\n```")
    answer = tab.ask()
    bar = answer.locator(".code-bar").bounding_box()
    copy = answer.locator(".code-bar button").bounding_box()
    assert bar["height"] < 60 and copy["x"] + copy["width"] <= bar["x"] + bar["width"]
    assert len(answer.locator("pre").get_attribute("aria-label")) < 100


def test_signs_that_cannot_be_seen_are_named(open_page: Callable[..., Opened]) -> None:
    """In what is told of a single token."""
    tab = open_page()
    texts = ["a b\n\t", "\u202ea\u200b", "\u00a0", "\u0000", "🙂", "\ud83d", ""]
    shown = tab.page.evaluate(
        "async (texts) => texts.map((await import('./page/dom.js')).shown)", texts
    )
    assert shown == [
        "a·b↵⇥", "U+202EaU+200B", "U+00A0", "U+0000", "🙂", "U+D83D", "(part of a character)",
    ]  # fmt: skip


def trickle(tab: Opened, deltas: list[dict[str, str]], *, breaks: bool) -> None:
    """The next answer: deltas, each drawn before the next comes, and then an end or none."""
    tab.page.evaluate(
        """([deltas, breaks]) => {
        const frame = () => new Promise((done) => requestAnimationFrame(done));
        const say = (data) => new TextEncoder().encode(`data: ${data}\\n\\n`);
        const real = window.fetch;
        window.fetch = (address, options) => {
          if (!String(address).endsWith("completions")) return real(address, options);
          window.fetch = real;
          return Promise.resolve(new Response(new ReadableStream({
            async pull(stream) {
              for (let i = 0; i < 3; i++) await frame();
              const delta = deltas.shift();
              if (delta) return stream.enqueue(say(JSON.stringify({ choices: [{ delta }] })));
              if (breaks) return stream.error(new TypeError("network error"));
              stream.enqueue(say("[DONE]"));
              stream.close();
            },
          })));
        };
        }""",
        [deltas, breaks],
    )


def test_an_answer_that_breaks_off(open_page: Callable[..., Opened]) -> None:
    """What came is kept, sent with the next question, and not called no answer."""
    tab = open_page()
    trickle(tab, [{"content": "Half"}], breaks=True)
    answer = tab.ask("First")
    assert answer.locator("[data-track=content]").inner_text() == "Half"
    assert answer.locator(".note.bad").inner_text() == "Broken off: network error"
    with tab.page.expect_request("**/v1/chat/completions") as sent:
        tab.ask("Second", "Whole.")
    told = [m["content"] for m in json.loads(sent.value.post_data)["messages"]]
    assert told == ["First", "Half", "Second"]


def test_thoughts_among_the_words(open_page: Callable[..., Opened]) -> None:
    """Nothing of them is lost where they go on after the answer has begun."""
    tab = open_page()
    parts = [
        ("reasoning_content", "It is"),
        ("content", "So"),
        ("reasoning_content", " not\n\n- x"),
    ]
    trickle(tab, [{kind: text} for kind, text in [*parts, ("content", " be it.")]], breaks=False)
    answer = tab.ask()
    answer.locator("summary").click()
    assert answer.locator("[data-track=reasoning]").inner_text().split() == "It is not x".split()
    assert answer.locator("[data-track=content]").inner_text() == "So be it."
