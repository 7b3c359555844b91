"""Bodies of the Messages and Responses APIs with something wrong anywhere: never a 500."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .conftest import Client
from .test_messages import PROMPTS as MESSAGES
from .test_messages import USER
from .test_responses import PROMPTS as RESPONSES
from .toy import Toy

JUNK: list[Any] = [
    *(None, True, 0, -1, 1.5, 1e300, 2**70, "", "x", "type", "::", "a::b", "\x00", "é🎉"),
    *([], {}, [[]], [None], {"type": "text"}, {"type": None}, {"a": {"b": [1]}}, ["a"] * 20),
]
BODIES = [
    *(("/v1/messages", {"messages": [USER], "max_tokens": 8, **b}) for b in MESSAGES.values()),
    *(
        ("/v1/messages/count_tokens", {"messages": [USER], **b})
        for b in list(MESSAGES.values())[::4]
    ),
    *(("/v1/responses", {"input": "Hi", "max_output_tokens": 8, **b}) for b in RESPONSES.values()),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in inner:
        yield (*path, key)
        if isinstance(one, dict | list):
            yield from places(one, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


PARTS = [at(body, path) for _, body in BODIES for path in places(body)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    toy = Toy(tmp_path_factory.mktemp("toy"), max_tokens=20_000)
    toy.say("r</think>ok")
    toy.service.start()
    assert toy.service.wait(30)
    yield Client(toy)
    toy.service.close()
    assert not toy.runner.open_handles


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_wrong_part_never_breaks_the_server(shared: Client, data: st.DataObject) -> None:
    path, body = data.draw(st.sampled_from(BODIES))
    body = copy.deepcopy(body)
    for _ in range(data.draw(st.integers(1, 2))):
        where = data.draw(st.sampled_from(list(places(body))))
        parent, key = at(body, where[:-1]), where[-1]
        if data.draw(st.integers(0, 7)) == 0:
            del parent[key]
            if not body:
                break
        else:
            parent[key] = copy.deepcopy(data.draw(st.sampled_from(JUNK) | st.sampled_from(PARTS)))
    stream = data.draw(st.booleans()) and not path.endswith("count_tokens")
    content = json.dumps({**body, "stream": True} if stream else body)
    response = shared.request("POST", path, content=content)
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error" and error["message"]
    elif stream:
        last = [frame for frame in response.text.split("\n\n") if frame][-1]
        assert last.startswith(
            ("event: message_stop", "event: response.completed", "event: response.incomplete")
        )
