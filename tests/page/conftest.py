"""Fixtures: a headless Chromium, the page of a served toy, and a stranger who counts visits."""

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.server.conftest import Live, make_live, make_toy
from tests.server.toy import reply

__all__ = ["make_live", "make_toy"]

CHROMIUM = next(
    (
        path
        for path in (
            os.environ.get("DEEPDRAFT_CHROMIUM"),
            "/usr/lib/chromium/chromium",
            shutil.which("chromium"),
            shutil.which("google-chrome"),
        )
        if path and os.access(path, os.X_OK)
    ),
    None,
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium. For one module: while it is open, nothing in this thread can use asyncio.run."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip extra test")
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium, or name one in DEEPDRAFT_CHROMIUM")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Opened:
    """The page of a live toy in a browser tab of its own."""

    def __init__(self, live: Live, context: Any) -> None:
        self.live, self.context = live, context
        self.toy = live.toy
        self.page = context.new_page()
        self.complaints: list[str] = []
        """Errors and warnings of the console."""
        self.page.on(
            "console",
            lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None,
        )
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(live.url)
        self.page.wait_for_selector(".dot.up", state="attached")

    def say(self, answer: str) -> None:
        """What the toy answers; tokenised once, as the fake runner asks for it at every row."""
        ids = reply(self.toy.tokenizer, answer)
        self.toy.runner.script = lambda prompt: ids

    def feed(self, answer: str) -> None:
        """What the next answers are, in one piece and without the toy: for long ones."""
        delta = {"content": answer, "reasoning_content": None}
        choice = {"index": 0, "delta": delta, "finish_reason": "stop"}
        chunk = json.dumps({"choices": [choice]})
        self.stream(f"data: {chunk}\n\ndata: [DONE]\n\n")

    def stream(self, body: str) -> None:
        """The event stream that the next answers are, without the toy."""
        self.page.unroute("**/v1/chat/completions")
        self.page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(body=body, content_type="text/event-stream"),
        )

    def send(self, text: str = "Hi") -> None:
        """Asks, as by hand."""
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def ask(self, text: str = "Hi", answer: str | None = None) -> Any:
        """Asks and waits for the answer's end; returns the last answer's article."""
        if answer is not None:
            self.say(answer)
        count = self.page.locator("article.answer").count()
        self.send(text)
        self.page.locator("article.answer").nth(count).wait_for()
        self.finished()
        return self.page.locator("article.answer").last

    def finished(self) -> None:
        """Waits until nothing is streamed."""
        self.page.wait_for_selector("html:not(.busy)")

    def nothing_runs(self) -> None:
        """Waits until the server has ended every request."""
        for _ in range(1500):
            if not self.toy.runner.open_handles:
                return
            self.page.wait_for_timeout(20)
        raise AssertionError("the server runs a request that nobody waits for")


@pytest.fixture
def open_page(browser: Any, make_live: Callable[..., Live]) -> Iterator[Callable[..., Opened]]:
    """Opens the page of a new toy. Thinking is off unless a test switches it on."""
    contexts = []

    def opened(
        *,
        drafts: bool = True,
        thinking: bool = False,
        context: dict[str, Any] | None = None,
        **options: Any,
    ) -> Opened:
        contexts.append(browser.new_context(**(context or {})))
        contexts[-1].set_default_timeout(60_000)
        live = make_live(drafts=drafts, **options)
        tab = Opened(live, contexts[-1])
        tab.page.set_checked("#thinking", thinking)
        return tab

    yield opened
    for context in contexts:
        context.close()


class Stranger:
    """A server of another origin that counts who comes. `pages`: what it serves, by path."""

    def __init__(self) -> None:
        self.visits: list[str] = []
        self.pages: dict[str, str] = {}
        stranger = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stranger.visits.append(self.path.split("?")[0])
                body = stranger.pages.get(self.path, "").encode()
                self.send_response(200)
                self.send_header("content-type", "text/html; charset=utf-8")
                self.send_header("access-control-allow-origin", "*")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                """A browser that leaves in the middle is no error."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    """Another origin."""
    server = Stranger()
    yield server
    server.close()
