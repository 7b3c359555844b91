"""Makes the pictures of the README from the real page and a real report.

    python bench/page_pictures.py --report bench/results/h-speed.json

Needs a Chromium. Starts a server with the bundled model, asks it, and writes WebP files to
docs/pictures: the page in light, side by side in dark, and the report of the named result.
"""

import argparse
import base64
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from playwright.sync_api import sync_playwright  # noqa: E402

from deepdraft.proof.report import html_report  # noqa: E402
from deepdraft.proof.served import served  # noqa: E402
from tests.page.conftest import CHROMIUM  # noqa: E402

WEBP = """async ([png, quality]) => {
  const image = new Image();
  image.src = "data:image/png;base64," + png;
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = image.width;
  canvas.height = image.height;
  canvas.getContext("2d").drawImage(image, 0, 0);
  return canvas.toDataURL("image/webp", quality).split(",")[1];
}"""


def save(browser: Any, png: bytes, file: Path) -> None:
    """Writes a PNG as WebP; the browser converts it."""
    page = browser.new_page()
    webp = base64.b64decode(page.evaluate(WEBP, [base64.b64encode(png).decode(), 0.86]))
    page.close()
    file.write_bytes(webp)
    print(f"{file.name}: {len(webp)} bytes")


def open_page(browser: Any, url: str, scheme: str, width: int, height: int) -> Any:
    """The page in a fresh tab, thinking off, temperature 0."""
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,
        device_scale_factor=1.5,
    )
    page = context.new_page()
    page.set_default_timeout(300_000)
    page.goto(url)
    page.wait_for_selector(".dot.up")
    page.set_checked("#thinking", False)
    page.fill("#p-temperature", "0")
    return page


def ask(page: Any, question: str) -> None:
    """Asks and waits for the answer's end."""
    page.fill("#prompt", question)
    page.press("#prompt", "Enter")
    page.wait_for_selector("html.busy")
    page.wait_for_selector("html:not(.busy)")
    page.wait_for_timeout(1500)


def tetris(browser: Any, url: str) -> bytes:
    """The Tetris prompt answered, its page running below."""
    page = open_page(browser, url, "light", 1280, 1000)
    ask(page, "implement the tetris game. output HTML code directly - no explanation.")
    page.click("button.run")
    frame = page.frame_locator(".preview iframe")
    frame.locator("canvas").wait_for()
    for key in ("ArrowLeft", "ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
        page.wait_for_timeout(600)
    page.evaluate("""() => { document.querySelector(".code pre").style.maxHeight = "212px"; }""")
    page.evaluate("""() => { document.getElementById("log").scrollTop = 0; }""")
    page.wait_for_timeout(600)
    return page.screenshot()


def side_by_side(browser: Any, url: str) -> bytes:
    """One question answered twice, a token hovered."""
    page = open_page(browser, url, "dark", 1280, 860)
    page.click("#compare")
    ask(page, "Tell me a short story about a lighthouse.")
    page.evaluate("() => { document.getElementById('log').scrollTop = 0; }")
    page.locator(".versus article").nth(1).locator(".t.corrected").first.hover()
    page.wait_for_timeout(300)
    return page.screenshot()


def report(browser: Any, file: Path) -> bytes:
    """The top of the report of a result."""
    with tempfile.NamedTemporaryFile("w", suffix=".html") as page_file:
        page_file.write(html_report(json.loads(file.read_text())))
        page_file.flush()
        page = browser.new_page(
            viewport={"width": 920, "height": 1180}, device_scale_factor=1.5, color_scheme="light"
        )
        page.goto(f"file://{page_file.name}")
        return page.screenshot()


def main() -> int:
    """Makes all pictures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--report", type=Path, default=ROOT / "bench/results/h-speed.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/pictures")
    options = parser.parse_args()
    if CHROMIUM is None:
        print("no Chromium here", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        with served(None) as server:
            save(browser, tetris(browser, server.url), options.out / "page.webp")
            save(browser, side_by_side(browser, server.url), options.out / "side-by-side.webp")
        save(browser, report(browser, options.report), options.out / "report.webp")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
