"""API keys: who passes, what the others are told, and that no key shows anywhere."""

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from deepdraft.cli.main import main
from deepdraft.config import Config, ServerConfig, load_config
from deepdraft.errors import ConfigError
from deepdraft.server.auth import KeyGate, named_keys, presented_keys

from .conftest import Client

KEYS = ("first-key", "second-key")
OPENAI = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/nothing"]
MESSAGES = ["/v1/messages", "/messages/count_tokens", "/anthropic/v1/messages", "/anthropic"]


@pytest.fixture
def client(make_client: Callable[..., Client]) -> Client:
    client = make_client(server={"api_keys": KEYS})
    client.toy.say("ok")
    return client


def chat(client: Client, headers: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "Hi"}], "thinking": False, "temperature": 0}
    return client.post("/v1/chat/completions", body, headers=headers)


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer first-key"},
        {"authorization": "bearer  second-key "},
        {"x-api-key": "second-key"},
        {"X-Api-Key": "first-key", "Authorization": "Bearer something-else"},
        [("authorization", "Bearer wrong"), ("authorization", "Bearer first-key")],
    ],
)
def test_a_valid_key_passes(client: Client, headers: Any) -> None:
    assert chat(client, headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "first-key"},
        {"authorization": "Basic first-key"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer first-key,second-key"},
        {"authorization": "Bearer FIRST-KEY"},
        {"x-api-key": ""},
        {"x-api-key": "first-ke"},
        {"x-api-key": b"first-key\xff"},
        {"api-key": "first-key"},
    ],
)
def test_anything_else_does_not(client: Client, headers: Any) -> None:
    response = chat(client, headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"].startswith("req-")
    given = chat(client, {**headers, "x-request-id": "mine/9"})
    assert given.status_code == 401 and given.headers["x-request-id"] == "mine/9"
    assert client.toy.runner.num_opened <= 1, "only the warm-up may have run"
    assert chat(client, {"x-api-key": "first-key"}).status_code == 200


@pytest.mark.parametrize("path", OPENAI + MESSAGES)
def test_the_refusal_has_the_shape_of_its_api(client: Client, path: str) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        response = client.request(method, path, headers={"x-api-key": "wrong-key"})
        assert response.status_code == 401
        body = response.json()
        assert "wrong-key" not in response.text and "first-key" not in response.text
        if path in MESSAGES:
            assert body["type"] == "error"
            assert body["error"]["type"] == "authentication_error"
        else:
            assert body["error"]["code"] == "invalid_api_key"
            assert body["error"]["type"] == "authentication_error"
            assert body["error"]["param"] is None


def test_health_needs_no_key(client: Client) -> None:
    for path in ("/healthz", "/readyz", "/metrics"):
        assert client.get(path).status_code == 200
    assert client.get("/v1/healthz").status_code == 401


def test_without_keys_everybody_passes(make_client: Callable[..., Client]) -> None:
    client = make_client()
    client.toy.say("ok")
    assert chat(client, {}).status_code == 200
    assert chat(client, {"authorization": "Bearer whatever"}).status_code == 200


def test_a_gate_needs_keys() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    with pytest.raises(ValueError, match="nobody"):
        KeyGate(app, ())
    assert presented_keys([(b"authorization", b"Bearer a"), (b"x-api-key", b" b ")]) == [b"a", b"b"]


def test_no_key_shows(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        chat(client, {"x-api-key": "first-key"})
        chat(client, {"x-api-key": "wrong-key"})
    settings = client.toy.service.config
    shown = caplog.text + repr(settings) + str(settings) + json.dumps(client.get("/healthz").json())
    assert "first-key" not in shown and "wrong-key" not in shown
    gate = KeyGate(lambda *_: None, named_keys(KEYS))  # type: ignore[arg-type, return-value]
    assert "first-key" not in repr(vars(gate))


@pytest.mark.parametrize("keys", [("",), ("a b",), ("schlüssel",), ("a\n",), (5,), "secret"])
def test_a_bad_key_is_an_error_that_does_not_show_it(keys: Any) -> None:
    with pytest.raises(ConfigError, match=r"server\.api_keys") as error:
        ServerConfig(api_keys=keys)
    for key in keys:
        assert len(str(key)) < 2 or str(key) not in error.value.message


def test_keys_of_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    configs: list[Config] = []

    def run(service: Any) -> None:
        configs.append(service.config)

    monkeypatch.setattr("deepdraft.server.run.serve", run)
    (tmp_path / "model").mkdir()
    command = ["serve", str(tmp_path / "model")]
    for arguments, env, keys in (
        ([], {}, ()),
        (["--api-key", "a", "--api-key", "b"], {}, ("a", "b")),
        ([], {"DEEPDRAFT_API_KEY": "c d"}, ("c", "d")),
        (["--api-key", "a"], {"DEEPDRAFT_API_KEY": "c"}, ("a",)),
    ):
        with monkeypatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            assert main([*command, *arguments]) == 0
        assert configs[-1].server.api_keys == keys
    file = tmp_path / "settings.toml"
    file.write_text('[server]\napi_keys = ["e"]\nresponse_retention_s = 5\n')
    settings = load_config(file).server
    assert (settings.api_keys, settings.response_retention_s) == (("e",), 5)
    for name, value in (("response_retention_s", -1), ("response_store_bytes", 0.5)):
        with pytest.raises(ConfigError, match=name):
            ServerConfig(**{name: value})  # type: ignore[arg-type]
