"""litellm as it is, against the bundled model."""

import json
from typing import Any

import pytest

# Its optional parts warn about themselves when they are imported.
pytestmark = pytest.mark.filterwarnings("default")
litellm = pytest.importorskip(
    "litellm", reason="make test-clients installs it", exc_type=ImportError
)

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ASK = [{"role": "user", "content": "What is the capital of France?"}]


def ask(url: str, **fields: Any) -> Any:
    options = {"messages": ASK, "max_tokens": 40, "temperature": 0, **fields}
    return litellm.completion(
        model="deepseek/demo", api_base=f"{url}/v1", api_key="none", timeout=300, **options
    )


def test_an_answer_and_its_usage(url: str) -> None:
    answer = ask(url, thinking={"type": "disabled"})
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_reasoning_comes_apart(url: str) -> None:
    answer = ask(url, thinking={"type": "enabled"}, max_tokens=30)
    message = answer.choices[0].message
    assert message.reasoning_content or message.content


def test_a_stream_says_what_the_answer_says(url: str) -> None:
    options = {"thinking": {"type": "disabled"}}
    whole = ask(url, **options).choices[0].message.content
    pieces = [c.choices[0].delta.content or "" for c in ask(url, stream=True, **options)]
    assert "".join(pieces) == whole


def test_a_forced_call_and_its_result(url: str) -> None:
    first = ask(
        url,
        tools=[TOOL],
        tool_choice="required",
        max_tokens=200,
        reasoning_effort="none",
    )
    (called, *_) = first.choices[0].message.tool_calls
    assert set(json.loads(called.function.arguments)) == {"city"}
    messages = [
        *ASK,
        first.choices[0].message.model_dump(),
        *(
            {"role": "tool", "tool_call_id": c.id, "content": "Rain."}
            for c in first.choices[0].message.tool_calls
        ),
    ]
    assert ask(url, tools=[TOOL], messages=messages).choices[0].finish_reason is not None


def test_an_error_is_the_clients_own(url: str) -> None:
    with pytest.raises(litellm.BadRequestError):
        ask(url, temperature=5)
    with pytest.raises(litellm.BadRequestError, match="context is 4096 tokens"):
        ask(url, messages=[{"role": "user", "content": "word " * 20_000}])
