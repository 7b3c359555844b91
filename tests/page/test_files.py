"""The page's files and headers; no browser needed."""

import re
from collections.abc import Callable

import pytest

from deepdraft.server.page import DIRECTORY, page_files
from tests.server.conftest import Client, make_client, make_toy

__all__ = ["make_client", "make_toy"]


@pytest.fixture
def client(make_client: Callable[..., Client]) -> Client:
    return make_client(server={"api_keys": ("secret",)})


def test_every_file_is_served_without_a_key(client: Client) -> None:
    for name, file in page_files().items():
        answer = client.get(f"/page/{name}")
        assert answer.status_code == 200 and answer.content == file.content, name
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = client.request(
            "GET", f"/page/{name}", headers={"if-none-match": file.headers["etag"]}
        )
        assert again.status_code == 304 and not again.content
    assert client.get("/").content == page_files()["index.html"].content
    assert client.get("/v1/models").status_code == 401


@pytest.mark.parametrize("path", ["/page/", "/page/x.js", "/page/..%2fapp.py", "/page/a/b.js"])
def test_no_other_file_is(client: Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


def test_policies(client: Client) -> None:
    def policy(path: str) -> dict[str, str]:
        text = client.get(path).headers["content-security-policy"]
        return dict(part.split(" ", 1) for part in text.split("; "))

    page = policy("/")
    assert page["default-src"] == "'none'" and page["script-src"] == "'self'"
    assert page["style-src"] == "'self'" and page["connect-src"] == "'self'"
    assert page["require-trusted-types-for"] == "'script'" and page["trusted-types"] == "'none'"
    assert not any("unsafe" in value or "http" in value for value in page.values())
    preview = policy("/page/preview.html")
    assert preview["sandbox"] == "allow-scripts"
    assert preview["default-src"] == "'none'" and "connect-src" not in preview
    assert not any("self" in v for k, v in preview.items() if k != "frame-ancestors")


def test_weight_and_self_sufficiency() -> None:
    files = page_files()
    assert sum(len(f.content) for f in files.values()) < 300_000
    served = {p.name for p in DIRECTORY.iterdir()}
    assert served == set(files), "a file of an unknown kind would not be served"
    for name, file in files.items():
        text = file.content.decode()
        # Addresses of namespaces and patterns are no requests; nothing else names another host.
        rest = text.replace("http://www.w3.org/2000/svg", "").replace("https?:\\/\\/", "")
        assert not re.search(r"https?://\w|//cdn|@import|url\(", rest), name
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text, name
        assert "eval(" not in text and "new Function" not in text, name
        if name != "preview.html":
            assert "document.write" not in text
            assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|style=\"|<style", text), name


def test_every_import_exists() -> None:
    files = page_files()
    for name, file in files.items():
        for target in re.findall(r'from "\./([\w.]+)"', file.content.decode()):
            assert target in files, (name, target)
    index = files["index.html"].content.decode()
    modules = {n for n in files if n.endswith(".js")}
    preloaded = set(re.findall(r'href="page/(\w+\.js)"', index)) | {"app.js"}
    assert preloaded == modules, "what is not preloaded costs a round trip"


def test_models_say_what_a_request_gets(make_client: Callable[..., Client]) -> None:
    client = make_client(drafts=True, defaults={"temperature": 0.6})
    (model,) = client.get("/v1/models").json()["data"]
    assert model["sampling_defaults"] == {"temperature": 0.6}
    assert model["speculation"] == {"drafts": 5, "rule": "coupled"}
    assert "process_resident_memory_bytes" in client.get("/metrics").text
