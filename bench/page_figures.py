"""The page's figures in headless Chromium: weight, first paint, frames during a long answer.

    python bench/page_figures.py [--out bench/results/h-page.json] [--tokens 10000]

A scripted model answers (tests' fake runner, no weights), so that the stream comes as fast as the
server can send it: more than any model of this machine gives. Frames are measured by the gaps
between animation frames; a long task of the page shows as a long frame.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from playwright.sync_api import sync_playwright  # noqa: E402

from deepdraft.proof.bench import provenance  # noqa: E402
from deepdraft.server.page import page_files  # noqa: E402
from tests.page.conftest import CHROMIUM  # noqa: E402
from tests.server.conftest import Live  # noqa: E402
from tests.server.toy import Toy, reply  # noqa: E402

FRAMES = """() => {
  window.gaps = [];
  let last = performance.now();
  const tick = (now) => { gaps.push(now - last); last = now; requestAnimationFrame(tick); };
  requestAnimationFrame(tick);
}"""
PAINT = """() => Object.fromEntries(performance.getEntriesByType("paint")
  .map((entry) => [entry.name, entry.startTime]))"""


def answers(num_tokens: int) -> dict[str, str]:
    """Texts of `num_tokens` bytes, each one token of the toy, of every shape of Markdown."""

    def many(line: str, begin: str = "") -> str:
        text = begin + "".join(line.replace("@", str(i)) for i in range(num_tokens))
        return text[:num_tokens]

    mixed = "\n## Part @\n\nSome **bold** text and `code @` here.\n\n"
    mixed += "- one\n- two\n\n```py\nx = @\n```\n\n"
    row = "| row @ | **x@** | and `@` |\n"
    return {
        "one paragraph": many("word@ and *@* "),
        "paragraphs": many("Paragraph @ has a few words, and *some* of them are `loud`.\n\n"),
        "one code block": many("line @ = x;\n", "```js\n"),
        "mixed": many(mixed),
        "one quote": many("> line @ of a **long** quote\n"),
        "a quote of paragraphs": many("> Paragraph @ of a quote.\n>\n"),
        "a list": many("- item @ and *more* of it\n"),
        "nested lists": many("  - inner @\n    - innermost\n      goes on\n", "- outer\n"),
        "a table": many(row, "| a | b | c |\n|---|--:|:-:|\n"),
        "headings": many("\n## Part @\n\n"),
        "one heading": many("word and *more* ", "# "),
        "raw HTML": many('<div class="a_@"><p>text @ of it</p></div>\n'),
        "a page of HTML": many("<p class='a'>text @ of it</p>\n", "<!doctype html>\n"),
        "code in a list": many("  line @ = x;\n", "- a\n  ```\n"),
        "links": many("[link @](https://e.example/@) "),
        "marks without an end": many("a*b [x _y **z `"),
        "one mark": "a " + "*" * (num_tokens - 2),
    }


def paint(browser: Any, url: str, times: int) -> dict[str, float]:
    """Median milliseconds to the first paint, each time in a fresh profile."""
    seen: dict[str, list[float]] = {}
    for _ in range(times):
        context = browser.new_context()
        page = context.new_page()
        page.goto(url)
        page.wait_for_selector(".dot.up")
        page.wait_for_timeout(200)
        for name, value in page.evaluate(PAINT).items():
            seen.setdefault(name, []).append(value)
        context.close()
    return {name: round(statistics.median(values), 1) for name, values in seen.items()}


def long_answer(browser: Any, live: Live, text: str) -> dict[str, Any]:
    """Frames while one answer is streamed, everything drawn as it comes."""
    ids = reply(live.toy.tokenizer, text)
    live.toy.runner.script = lambda prompt: ids
    page = browser.new_page(viewport={"width": 1280, "height": 860})
    page.set_default_timeout(300_000)
    page.goto(live.url)
    page.wait_for_selector(".dot.up")
    page.set_checked("#thinking", False)
    page.fill("#p-max_tokens", str(len(ids) + 10))
    page.fill("#p-temperature", "0")
    page.evaluate(FRAMES)
    page.wait_for_timeout(500)
    page.evaluate("() => { gaps.length = 0; }")
    begin = time.perf_counter()
    page.fill("#prompt", "Go on")
    page.press("#prompt", "Enter")
    page.wait_for_selector("html.busy")
    page.wait_for_selector("html:not(.busy)")
    seconds = time.perf_counter() - begin
    page.wait_for_timeout(300)
    gaps = sorted(page.evaluate("() => gaps"))
    spans = page.locator(".md .t").count()
    page.close()
    return {
        "tokens": len(ids),
        "token_spans_in_the_page": spans,
        "tokens_per_s": round(len(ids) / seconds, 1),
        "frames": len(gaps),
        "longest_frame_ms": round(gaps[-1], 1),
        "frame_ms_p99": round(gaps[int(0.99 * (len(gaps) - 1))], 1),
        "frame_ms_p50": round(gaps[len(gaps) // 2], 1),
        "frames_over_200_ms": sum(gap > 200 for gap in gaps),
    }


def main() -> int:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--shapes", help="names apart by commas [all]")
    options = parser.parse_args()
    if CHROMIUM is None:
        print("no Chromium here", file=sys.stderr)
        return 2
    begun = provenance()
    files = page_files()
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as driver:
        toy = Toy(Path(directory), drafts=True, max_tokens=2 * options.tokens, server={"port": 0})
        live = Live(toy)
        live.start()
        toy.service.wait(30)
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        result = {
            "what": "the page in headless Chromium",
            "chromium": browser.version,
            "weight_bytes": sum(len(f.content) for f in files.values()),
            "files": {name: len(f.content) for name, f in files.items()},
            "paint_ms": paint(browser, live.url, 7),
            "long_answers": {
                name: long_answer(browser, live, text)
                for name, text in answers(options.tokens).items()
                if not options.shapes or name in options.shapes.split(",")
            },
        }
        browser.close()
        live.stop()
    text = json.dumps({**result, **begun}, indent=2)
    print(text)
    if options.out:
        Path(options.out).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
