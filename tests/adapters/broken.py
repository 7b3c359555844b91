"""A server that answers as a test says: well, or in one of the ways in which engines fail."""

import contextlib
import http.server
import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

Handler = http.server.BaseHTTPRequestHandler
WORDS = ("The ", "quick ", "brown ", "fox.")


class Broken:
    """`mode`, or `modes` one after the other, say what a completion request gets."""

    def __init__(self) -> None:
        self.mode = "good"
        self.modes: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.words: tuple[str, ...] = WORDS
        self.delay_s = 0.0
        self.ready = True
        self.cancelled = threading.Event()
        """A client went away in mode `endless` or `slow`."""
        self.stop = threading.Event()
        self.url = ""

    def next_mode(self) -> str:
        return self.modes.pop(0) if self.modes else self.mode


def chunk(text: str | None = None, *, finish: str | None = None, chat: bool = False) -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    if chat:
        choice["delta"] = {} if text is None else {"content": text}
    else:
        choice["text"] = text or ""
    return frame({"choices": [choice]})


def frame(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


class _Answers(Handler):
    @property
    def state(self) -> Broken:
        server = self.server
        assert isinstance(server, _Server)
        return server.state

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path.endswith("/models"):
            self._whole(200, {"data": [{"id": "broken"}]})
        elif self.path in ("/readyz", "/health"):
            self._whole(200 if self.state.ready else 503, {})
        else:
            self._whole(404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.state.bodies.append(body)
        self.state.paths.append(self.path)
        chat = "messages" in body
        getattr(self, "_" + self.state.next_mode())(body, chat)

    def _whole(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _open(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True

    def _good(self, body: Any, chat: bool) -> None:
        self._open()
        for word in self.state.words:
            time.sleep(self.state.delay_s)
            self.wfile.write(chunk(word, chat=chat))
            self.wfile.flush()
        self.wfile.write(chunk(finish="stop", chat=chat))
        usage = {"completion_tokens": len(self.state.words), "prompt_tokens": 3}
        self.wfile.write(frame({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")

    def _no_switches(self, body: Any, chat: bool) -> None:
        if "thinking" in body:
            self._whole(400, {"error": {"message": "unknown field thinking"}})
        else:
            self._good(body, chat)

    def _unavailable(self, body: Any, chat: bool) -> None:
        self._whole(503, {"error": {"message": "loading"}})

    def _refuses(self, body: Any, chat: bool) -> None:
        self._whole(400, {"error": {"message": "prompt too long"}})

    def _error_whole(self, body: Any, chat: bool) -> None:
        self._whole(200, {"error": {"message": "out of memory"}})

    def _error_inside(self, body: Any, chat: bool) -> None:
        self._open()
        self.wfile.write(chunk("The ", chat=chat))
        self.wfile.write(frame({"error": {"message": "engine died", "code": 500}}))
        self.wfile.write(b"data: [DONE]\n\n")

    def _error_first(self, body: Any, chat: bool) -> None:
        self._open()
        self.wfile.write(frame({"error": {"message": "engine died", "code": 500}}))

    def _truncated(self, body: Any, chat: bool) -> None:
        self._open()
        self.wfile.write(chunk("The ", chat=chat))

    def _no_json(self, body: Any, chat: bool) -> None:
        self._open()
        self.wfile.write(b"data: <html>\n\n")

    def _no_choices(self, body: Any, chat: bool) -> None:
        self._open()
        self.wfile.write(frame({"hello": 1}))

    def _html(self, body: Any, chat: bool) -> None:
        self._whole(200, {"hello": 1})

    def _drops(self, body: Any, chat: bool) -> None:
        self.connection.close()
        self.close_connection = True

    def _endless(self, body: Any, chat: bool) -> None:
        self._forever(lambda: chunk("again ", chat=chat), 0.0)

    def _slow(self, body: Any, chat: bool) -> None:
        self._forever(lambda: chunk("slowly ", chat=chat), 0.05)

    def _drip(self, body: Any, chat: bool) -> None:
        self._forever(lambda: b"d", 0.05)

    def _hangs(self, body: Any, chat: bool) -> None:
        self.state.stop.wait(30)

    def _forever(self, piece: Callable[[], bytes], pause_s: float) -> None:
        self._open()
        try:
            while not self.state.stop.is_set():
                self.wfile.write(piece())
                self.wfile.flush()
                time.sleep(pause_s)
        except OSError:
            self.state.cancelled.set()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, state: Broken) -> None:
        self.state = state
        super().__init__(("127.0.0.1", 0), _Answers)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients go away in these tests


@contextlib.contextmanager
def broken_server() -> Iterator[Broken]:
    """Serves on a free port."""
    state = Broken()
    server = _Server(state)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.stop.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
