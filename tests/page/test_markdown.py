"""Markdown: what is drawn, and how long text is parted (how answers grow: test_growing.py)."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import Live

DRAW_IN_PIECES = """
  const { MarkdownView } = await import("./page/markdown.js");
  const { Track } = await import("./page/tokens.js");
  const draw = (source, cuts, tokens) => {
    const root = document.createElement("div");
    const track = new Track();
    const view = new MarkdownView(root, track, () => {});
    let from = 0;
    for (const cut of [...cuts, source.length]) {
      track.append(source.slice(from, cut));
      if (tokens) for (let i = from; i < cut; i += 3) {
        const text = source.slice(i, Math.min(i + 3, cut));
        track.push({ text, origin: "plain", step: { index: 0 } });
      }
      from = cut;
      track.align(false);
      view.update(false);
    }
    track.align(true);
    view.update(true);
    for (const span of root.querySelectorAll(".t, .lines")) span.replaceWith(...span.childNodes);
    root.normalize();
    return root;
  };
"""

DRAW = f"""async ([source, cuts, tokens]) => {{
  {DRAW_IN_PIECES}
  const root = draw(source, cuts, tokens);
  for (const bar of root.querySelectorAll(".code-bar")) bar.remove();
  return root.innerHTML.replace(/ (tabindex|role|aria-label|class|target|rel|title)="[^"]*"/g, "");
}}"""

CASES = {
    "emphasis": (
        "*a* **b** ***c*** ~~d~~ _e_ __f__ `g` a*b*c snake_case_name 2*3*4 \\*no\\*",
        "<p><em>a</em> <strong>b</strong> <strong><em>c</em></strong> <del>d</del> <em>e</em> "
        "<strong>f</strong> <code>g</code> a<em>b</em>c snake_case_name 2<em>3</em>4 *no*</p>",
    ),
    "nesting": (
        "**bold *and* `code`** *a **b** c*",
        "<p><strong>bold <em>and</em> <code>code</code></strong> "
        "<em>a <strong>b</strong> c</em></p>",
    ),
    "unclosed": ("**a *b `c [d](e", "<p>**a *b `c [d](e</p>"),
    "headings": (
        "# One\n## Two ##\ntext\n####### no",
        "<h3>One</h3><h4>Two</h4><p>text\n####### no</p>",
    ),
    "lists": (
        "- a\n- b\n  - c\n    more\n- d\n\n1. one\n2. two\n\ntext",
        "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c\nmore</p></li></ul></li>"
        "<li><p>d</p></li></ul><ol><li><p>one</p></li><li><p>two</p></li></ol><p>text</p>",
    ),
    "a list that begins later": (
        "3. c\n4. d",
        '<ol start="3"><li><p>c</p></li><li><p>d</p></li></ol>',
    ),
    "quotes": (
        "> a\n> > b\n> - c\n\nd",
        "<blockquote><p>a</p><blockquote><p>b</p></blockquote>"
        "<ul><li><p>c</p></li></ul></blockquote><p>d</p>",
    ),
    "code": (
        "```py\nif a < b:\n\n    *c*\n```\ntext\n~~~\nopen",
        "<div><pre><code>if a &lt; b:\n\n    *c*\n</code></pre></div><p>text</p>"
        "<div><pre><code>open</code></pre></div>",
    ),
    "code in a list": (
        "- a\n  ```\n  x\n    y\n  ```\n- b",
        "<ul><li><p>a</p><div><pre><code>x\n  y\n</code></pre></div></li><li><p>b</p></li></ul>",
    ),
    "longer fences": ("````\n```\n````\nx", "<div><pre><code>```\n</code></pre></div><p>x</p>"),
    "tables": (
        "| a | b |\n|---|--:|\n| 1 | **2** |\n| x \\| y |\n\nend",
        "<div><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td>"
        "<td><strong>2</strong></td></tr><tr><td>x | y</td></tr></tbody></table></div><p>end</p>",
    ),
    "a cell that ends with a backslash": (
        "a | b\\\n-|-\n",
        "<div><table><thead><tr><th>a</th><th>b\\</th></tr></thead><tbody></tbody></table></div>",
    ),
    "links": (
        "[a](https://e.example/x) <https://e.example/> https://e.example/y, [b](/c) ![d](e.png)",
        '<p><a href="https://e.example/x">a</a> '
        '<a href="https://e.example/">https://e.example/</a> '
        '<a href="https://e.example/y">https://e.example/y</a>, <span>b</span> <span>d</span></p>',
    ),
    "addresses with brackets": (
        "(https://e.example/a_(b)_c) https://e.example/(x https://e.example/(.)",
        '<p>(<a href="https://e.example/a_(b)_c">https://e.example/a_(b)_c</a>) '
        '<a href="https://e.example/">https://e.example/</a>(x '
        '<a href="https://e.example/(.)">https://e.example/(.)</a></p>',
    ),
    "links in a link": (
        "[https://e.example/ *[a](https://e.example/a)* <https://e.example/>](https://e.example/x)",
        '<p><a href="https://e.example/x">https://e.example/ <em>[a](https://e.example/a)</em> '
        "&lt;https://e.example/&gt;</a></p>",
    ),
    "more cells than the head has": (
        "|a|\n|-|\n|`b|c`|\n",
        "<div><table><thead><tr><th>a</th></tr></thead><tbody><tr><td>`b</td><td>c`</td></tr>"
        "</tbody></table></div>",
    ),
    "tabs before what lists hold": (
        "- a\n\t- b\n\t\t1. c\n\t\t   d\n\n\te",
        "<ul><li><p>a</p><ul><li><p>b</p><ol><li><p>c\nd</p></li></ol></li></ul><p>e</p></li></ul>",
    ),
    "line ends of another system": (
        "a | b\r\n-|-\r\n1 | 2\r\n\r\n---\r\n-\r\n  c\r\n~~~ js `x`\r\nd\r\n~~~\r\n",
        "<div><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>2</td>"
        "</tr></tbody></table></div><hr><ul><li><p>c\r</p></li></ul>"
        "<div><pre><code>d\r\n</code></pre></div>",
    ),
    "rules": ("a\n\n---\n\n***\nb", "<p>a</p><hr><hr><p>b</p>"),
    "paragraphs": ("a\nb\n\n\n\nc\n", "<p>a\nb</p><p>c</p>"),
    "a page": (
        "Here:\n<!DOCTYPE html>\n<html>\n\n<p>*x*</p>\n</html>\nDone.",
        "<p>Here:</p><div><pre><code>"
        "&lt;!DOCTYPE html&gt;\n&lt;html&gt;\n\n&lt;p&gt;*x*&lt;/p&gt;\n"
        "&lt;/html&gt;</code></pre></div><p>Done.</p>",
    ),
    "nothing": ("", ""),
    "only space": ("\n \n", ""),
}


@pytest.fixture
def draw(browser: Any, make_live: Any) -> Iterator[Any]:
    """Draws a source that comes in pieces, and returns the markup without tokens and labels."""
    live: Live = make_live()
    context = browser.new_context()
    page = context.new_page()
    page.goto(live.url)

    def drawn(source: str, cuts: list[int] | None = None, tokens: bool = False) -> str:
        return page.evaluate(DRAW, [source, cuts or [], tokens])

    yield drawn
    context.close()


def test_what_is_drawn(draw: Any) -> None:
    for name, (source, expected) in CASES.items():
        assert draw(source) == expected, name


def test_long_hostile_marks(draw: Any) -> None:
    """Marks without another end do not make drawing quadratic: Playwright's limit would end it."""
    for mark in ("[", "*", "_", "`", "*_", "**a ", "[](", "~~", "> ", "|", "<", "![", "\\"):
        source = "a " + mark * (8000 // len(mark))
        drawn = draw(source, list(range(0, len(source), 1600)), True)
        assert len(drawn) > 1000, mark


LONG = 60_000
LINES = {
    "marks of a fence": "~" * LONG + "`",
    "name of a language": "~~~" + "a" * LONG + "`",
    "line of delimiters": "a|b\n-|-" + " " * LONG + "x",
    "rule": "- " * LONG + "x",
    "space in a rule": "---" + " " * LONG + "x",
    "heading": "#" + " " * LONG + "# " * LONG + "x",
    "item": "-" + " " * LONG + "x\n\n  y",
    "address": "https://" + "(.)" * LONG,
    "link": "[a](" + " " * LONG + '"',
}


def test_no_line_is_too_long_for_a_pattern(draw: Any, browser: Any) -> None:
    """Those that went back over a line again and again needed hours; the limit ends them."""
    page = browser.contexts[-1].pages[-1]
    page.evaluate(f"async () => {{ {DRAW_IN_PIECES} window.drawn = draw; }}")
    devtools = page.context.new_cdp_session(page)
    for name, line in LINES.items():
        expression = f"drawn({json.dumps(line)}, [], false).childNodes.length"
        answer = devtools.send("Runtime.evaluate", {"expression": expression, "timeout": 30_000})
        assert answer["result"].get("value", 0) > 0, (name, answer)


def test_a_long_paragraph_is_parted_where_nothing_is_torn(draw: Any) -> None:
    """It is appended to; what is drawn for good must mean the same with all that comes later."""
    for mark in ("*em 9*", "`code 9`", "[link 9](https://e.example/)", "**bold word 9**", "_a `b_"):
        source = "w " * 250 + mark + " tail` of it"
        for length in range(1, len(mark) + 1):
            assert draw(source, [500 + length], length % 2 == 1) == draw(source), (mark, length)
    # Texts without a space are parted, too.
    for part in ("東京は日本の首都です。*強調*と`コード`。", "x", "l\n", "🙂", "ahttps", "a*b*"):
        source = part * (900 // len(part))
        assert draw(source, list(range(397, len(source), 7)), True) == draw(source), part
    rng = random.Random(2)
    parts = (
        "word |*em ph*|**b c d**|`co de`|[li nk](https://e.example/)|https://e.example/a. |東京は"
    )
    pieces = [
        *parts.split("|"),
        "_x y_",
        "\n",
        "h",
        "\\*",
        "🙂",
        "*",
        "_",
        "`",
        "[",
        "a|b ",
        "مرحبا ",
    ]
    for _ in range(25):
        source = "".join(rng.choice(pieces) for _ in range(200))
        cuts = sorted(rng.sample(range(400, max(len(source), 460)), rng.choice([1, 2, 5, 40])))
        assert draw(source, cuts, rng.random() < 0.5) == draw(source), (source, cuts)
