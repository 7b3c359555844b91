"""Answers as they grow: the same as drawn at once, at a cost that does not grow with them."""

import random
from typing import Any

import pytest

from tests.server.conftest import Live

from .test_markdown import CASES as MARKDOWN
from .test_markdown import DRAW_IN_PIECES

# Draws each source at once and in pieces; returns those that differ.
COMPARE = f"""async (cases) => {{
  {DRAW_IN_PIECES}
  const markup = (...how) => draw(...how).innerHTML;
  return cases.filter(([source, ...how]) => markup(source, [], false) !== markup(source, ...how));
}}"""

# Draws a source in steps of 80 characters, four of them a token; returns the most characters drawn,
# the most characters of text parsed, and the most elements made by one step.
WORK = """async (sources) => {
  const { MarkdownView } = await import("./page/markdown.js");
  const { Inline } = await import("./page/inline.js");
  const { Track } = await import("./page/tokens.js");
  let parsed = 0, made = 0;
  const parse = Inline.prototype.parse;
  Inline.prototype.parse = function (i, end, depth) {
    parsed += end - i;
    return parse.call(this, i, end, depth);
  };
  const create = document.createElement;
  document.createElement = function (name) {
    made++;
    return create.call(document, name);
  };
  const found = {};
  for (const [name, source] of Object.entries(sources)) {
    const track = new Track();
    let drawn = 0;
    track.draw = (parent, a, b) => {
      drawn += Math.max(0, b - a);
      Track.prototype.draw.call(track, parent, a, b);
    };
    const view = new MarkdownView(document.createElement("div"), track, () => {});
    const most = { drawn: 0, parsed: 0, made: 0 };
    for (let i = 0; i < source.length; i += 80) {
      const piece = source.slice(i, i + 80);
      track.append(piece);
      for (const text of piece.match(/[^]{1,4}/g)) {
        track.push({ text, origin: "plain", step: { index: 0 } });
      }
      track.align(false);
      drawn = parsed = made = 0;
      view.update(false);
      most.drawn = Math.max(most.drawn, drawn);
      most.parsed = Math.max(most.parsed, parsed);
      most.made = Math.max(most.made, made);
    }
    found[name] = most;
  }
  document.createElement = create;
  Inline.prototype.parse = parse;
  return found;
}"""

LINES = """text words here|more **bold** and `code`|| |- item|  - nested|    - deeper|  continued
1. one|2. two|2024. It was|> quote|> > deep|> - in quote|> ```|> code|> |```|```py|~~~|x = 1
# Head|## Head ##|### a # b|---|***|* * *|_ _ _|____________________________|<!doctype html>
________________________ab|<html>|</html>|<div class="a_b">|   ```|    indented|-|-x|+ plus|#
10) ten|#x|**open|*em|em*|`tick|https://e.example/a_b|[l](https://e.example/)|=== |🙂 smile"""
TABLES = [
    "| a | b |",
    "|---|--:|",
    "| 1 | **2** |",
    "|x|",
    "a | b",
    "--|--",
    "| a \\| b | c\\",
    "|",
    "| |",
]

NUM = 6000


def many(line: str) -> str:
    """`line` again and again, numbered."""
    return "".join(line.replace("@", str(i)) for i in range(NUM // len(line) + 1))[:NUM]


def repeated(mark: str) -> str:
    return "a " + mark * (NUM // len(mark))


SHAPES = {
    "prose": many("word@ and it goes on "),
    "lines": many("line @\n"),
    "a quote": many("> line @ of the **quote**\n"),
    "a quote of paragraphs": many("> line @\n>\n"),
    "a quote of one line": "> " + many("word@ "),
    "a list": "- top\n" + many("  - item @ *x*\n"),
    "a deep list": "- a\n  - b\n    - c\n" + many("      - item @\n"),
    "an item of one line": "1. " + many("word@ "),
    "a list in a quote": many("> - item @\n"),
    "a table": "| a | b |\n|---|--:|\n" + many("| row @ | **x@** |\n"),
    "a table in a quote": "> | a | b |\n> |---|--:|\n" + many("> | row @ | x |\n"),
    "one cell": "| a | b |\n|---|---|\n| x | " + many("word@ "),
    "headings": many("\n## Part @\n\n"),
    "one heading": "# " + many("word@ "),
    "code": "```js\n" + many("line @;\n"),
    "code of one line": "```js\n" + many("x@;"),
    "code in a list": "- a\n  ```\n" + many("  line @\n"),
    "HTML as text": many('<div class="a_@"><p>text @</p></div>\n'),
    "HTML as text, one line": many('<li><a href="https://e.example/@">@</a></li>'),
    "a page": "<!doctype html>\n" + many("<p>@</p>\n"),
    "lines with bars": many("a | b @\n"),
}
HOSTILE = {
    mark: repeated(mark) for mark in ("*", "_", "`", "[", "*a", "**a ", "~~", "|", "<", "\\")
} | {
    "links": many("[a@](https://e.example/@)"),
    "one address": "https://e.example/" + many("x@"),
    "quotes": "> " * (NUM // 2),
}


@pytest.fixture
def page(browser: Any, make_live: Any) -> Any:
    live: Live = make_live()
    context = browser.new_context()
    page = context.new_page()
    page.goto(live.url)
    yield page
    context.close()


def test_text_and_small_blocks(page: Any) -> None:
    """Cut anywhere, with tokens laid over it and without."""
    rng = random.Random(7)
    long = " ".join(
        f"word{i} *em {i}* `code {i}`" if i % 9 == 0 else f"word{i}" for i in range(300)
    )
    sources = [source for source, _ in MARKDOWN.values()] + [
        "\n\n".join(s for s, _ in MARKDOWN.values() if not s.startswith("```py")),
        long,
        f"{long}\nnext line\n\n{long} **open",
        "- " + long + "\n- b",
    ]
    cases: list[list[Any]] = []
    for source in sources:
        every = list(range(1, len(source), max(1, len(source) // 150)))
        cases += [[source, [], True], [source, every, False], [source, every, True]]
        for _ in range(3):
            cuts = sorted(rng.sample(range(len(source) + 1), min(len(source), 9)))
            cases.append([source, cuts, rng.random() < 0.5])
    assert page.evaluate(COMPARE, cases) == []


def test_blocks_of_every_kind_in_each_other(page: Any) -> None:
    """Cut anywhere, what is drawn for good must mean the same with all that comes later."""
    rng = random.Random(5)
    lines = LINES.replace("\n", "|").split("|") + TABLES
    cases = []
    for _ in range(120):
        parts = []
        for _ in range(rng.randrange(1, 14)):
            line = rng.choice(lines)
            if rng.random() < 0.15:
                line = rng.choice(["> ", "- ", "  ", "    ", "> > "]) + line
            if rng.random() < 0.03:
                line += rng.choice("*_`~[<|h") * rng.choice([1990, 2003, 2500, 4100])
            if rng.random() < 0.05:
                line += " word" * rng.choice([9, 120])
            parts.append(line)
        source = "\n".join(parts) + rng.choice(["", "\n"])
        length = len(source.encode("utf-16-le")) // 2
        every = list(range(1, length, 1 if length < 400 else 61))
        cases.append([source, every, rng.random() < 0.5])
        cases.append([source, [i for i in every if rng.random() < 0.15], rng.random() < 0.5])
    assert page.evaluate(COMPARE, cases) == []


def test_a_step_costs_what_it_adds(page: Any) -> None:
    """Of a long answer no more than a tail is drawn again, whatever stands in it.

    Times are measured by bench/page_figures.py; here the work is counted. 400 characters is how
    long a text is drawn anew, 2,000 how far the end of a mark is looked for, in 8 levels.
    """
    for name, most in page.evaluate(WORK, SHAPES).items():
        assert max(most["drawn"], most["parsed"], most["made"]) <= 700, (name, most)
    for name, most in page.evaluate(WORK, HOSTILE).items():
        assert max(most["drawn"], most["made"]) <= 2 * 2100, (name, most)
        assert most["parsed"] <= (1 + 8) * 2100, (name, most)


def test_much_at_once_is_drawn_in_parts(page: Any) -> None:
    """As behind a tab that was hidden: no frame has to draw all of it."""
    found = page.evaluate(
        """async (text) => {
          const { MarkdownView } = await import("./page/markdown.js");
          const { Track } = await import("./page/tokens.js");
          const root = document.createElement("div");
          const track = new Track();
          const view = new MarkdownView(root, track, () => {});
          track.append(text);
          const lengths = [];
          let left = true;
          while (left) {
            left = view.update(false);
            lengths.push(root.textContent.length);
          }
          return [lengths, root.textContent === text];
        }""",
        "🙂x" * 4000,
    )
    lengths, same = found
    assert same and max(b - a for a, b in zip([0, *lengths], lengths, strict=False)) <= 4001
    assert len(lengths) >= 3
