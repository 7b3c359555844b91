"""Web pages and a server without API keys; large requests that wait for a thread."""

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from deepdraft.errors import Overloaded
from deepdraft.server.app import Handlers

from .conftest import Client
from .toy import Toy

PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize")
PAGE = "https://page.example"
BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4})


def post(client: Client, path: str = PATHS[0], **headers: str) -> int:
    """The status of what a page can send without asking: a text."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    sent = {"content-type": "text/plain", **named}
    response = client.request("POST", path, content=BODY, headers=sent)
    if response.status_code == 403:
        assert "server.cors_origins" in response.text and response.headers["x-request-id"]
    return response.status_code


@pytest.mark.parametrize(
    "origin", [PAGE, "http://localhost:3000", "null", "http://toy.evil.example"]
)
def test_no_other_page_can_start_anything(client: Client, origin: str) -> None:
    before = client.toy.service.stats()["requests"]
    for path in PATHS:
        assert post(client, path, origin=origin) == 403
        assert post(client, path, origin=origin, sec_fetch_site="cross-site") == 403
    deleted = client.request("DELETE", "/v1/responses/resp_1", headers={"origin": origin})
    assert deleted.status_code == 403
    assert client.toy.service.stats()["requests"] == before


def test_its_own_page_programs_and_named_pages_can(make_client: Callable[..., Client]) -> None:
    client = make_client()
    client.toy.say("ok")
    assert post(client) == post(client, origin="http://toy") == 200
    # A proxy may send another name than the browser sees.
    assert post(client, origin="https://ai.example", sec_fetch_site="same-origin") == 200
    assert post(client, origin="app://desk") == post(client, origin="vscode-webview://1") == 200
    for origins in ((PAGE,), ("*",)):
        named = make_client(server={"cors_origins": origins})
        named.toy.say("ok")
        assert post(named, origin=PAGE) == 200
    assert post(make_client(server={"cors_origins": (PAGE,)}), origin="https://b.example") == 403
    keyed = make_client(server={"api_keys": ("secret",)})
    keyed.toy.say("ok")
    assert post(keyed, origin=PAGE) == 401 and post(keyed, origin=PAGE, x_api_key="secret") == 200


def get(client: Client, host: str, path: str = "/v1/models") -> int:
    return client.request("GET", path, headers={"host": host}).status_code


def test_names_that_point_here_are_refused_on_loopback(make_client: Callable[..., Client]) -> None:
    client = make_client()
    for host in (
        "evil.example", "evil.example:8000", "EVIL.example.", "127.0.0.1.evil.example",
        "localhost.evil.example", "[evil.example]", "a:b:c", "[::1", "1.2.3.4.5", "local.evil",
    ):  # fmt: skip
        assert get(client, host) == get(client, host, "/") == 403, host
        assert post(client, host=host, origin=f"http://{host}") == 403, host
        assert get(client, host, "/healthz") == get(client, host, "/metrics") == 200
    for host in (
        "127.0.0.1", "127.0.0.1:8000", "[::1]:8000", "localhost:8000", "LOCALHOST", "10.1.2.3:80",
        "deepdraft:8000", "box.local", "a.svc.cluster.local", "x.localhost:1", "a.docker.internal",
    ):  # fmt: skip
        assert get(client, host) == 200, host
    assert get(make_client(server={"host": "0.0.0.0"}), "ai.example") == 200
    assert get(make_client(server={"cors_origins": (PAGE,)}), "page.example:8000") == 200
    keyed = make_client(server={"api_keys": ("secret",)})
    assert get(keyed, "evil.example") == 401


# Large requests that wait for a thread


def test_the_time_to_read_begins_with_the_reading(make_toy: Callable[..., Toy]) -> None:
    """A crowd of large requests waits for threads: none of them is told that it is too much."""
    handlers = Handlers(make_toy(server={"compile_timeout_s": 2.0}).service)

    async def run() -> None:
        loop, gate = asyncio.get_running_loop(), threading.Event()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, gate.wait, 60)
        waiting = asyncio.ensure_future(handlers._read_apart(b"text", bytes.upper))
        await asyncio.sleep(2.1)
        assert not waiting.done() and handlers._held == 4
        gate.set()
        assert await busy and await waiting == b"TEXT" and handlers._held == 0

    asyncio.run(run())


def test_no_free_thread_for_long(
    make_toy: Callable[..., Toy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepdraft.server.app._READ_QUEUE_S", 0.05)
    handlers, read = Handlers(make_toy().service), []

    async def run() -> None:
        loop, gate = asyncio.get_running_loop(), threading.Event()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, gate.wait, 60)
        try:
            with pytest.raises(Overloaded, match="wait to be read"):
                await handlers._read_apart(b"text", read.append)
            await asyncio.sleep(0)  # the loop takes it from the thread's queue in its next turn
        finally:
            gate.set()
        assert await busy and handlers._held == 0

    asyncio.run(run())
    assert read == []
