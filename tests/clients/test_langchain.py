"""langchain-deepseek as it is, against the bundled model."""

from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("default")
langchain_deepseek = pytest.importorskip(
    "langchain_deepseek", reason="make test-clients installs it", exc_type=ImportError
)


def model(url: str, **options: Any) -> Any:
    options = {"max_tokens": 60, "temperature": 0, "timeout": 300, **options}
    return langchain_deepseek.ChatDeepSeek(
        model="demo", api_base=f"{url}/v1", api_key="none", **options
    )


OFF = {"extra_body": {"thinking": {"type": "disabled"}}}


def test_an_answer_with_its_reasoning(url: str) -> None:
    answer = model(url).invoke("What is the capital of France?")
    assert answer.content or answer.additional_kwargs["reasoning_content"]
    assert answer.usage_metadata["total_tokens"] > 0
    plain = model(url, **OFF).invoke("What is the capital of France?")
    assert plain.content and not plain.additional_kwargs.get("reasoning_content")


def test_a_stream_says_what_the_answer_says(url: str) -> None:
    chat = model(url, **OFF)
    pieces = [chunk.content for chunk in chat.stream("Count to three.")]
    assert "".join(pieces) == chat.invoke("Count to three.").content


def test_a_loop_with_a_tool_and_thinking(url: str) -> None:
    """The client never sends the reasoning back; the server must not mind."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    chat = model(url, max_tokens=400).bind_tools([add], tool_choice="add", strict=True)
    messages: list[Any] = [HumanMessage("What is 2 + 3?")]
    answer = chat.invoke(messages)
    if answer.response_metadata["finish_reason"] == "length":
        pytest.skip("the small model thought to the limit")
    assert answer.tool_calls and set(answer.tool_calls[0]["args"]) == {"a", "b"}
    messages += [answer]
    messages += [ToolMessage("5", tool_call_id=call["id"]) for call in answer.tool_calls]
    last = model(url).bind_tools([add]).invoke(messages)
    assert last.response_metadata["finish_reason"] in ("stop", "length", "tool_calls")


def test_structured_output(url: str) -> None:
    from pydantic import BaseModel, Field

    class City(BaseModel):
        """A city."""

        name: str = Field(max_length=10)
        people: int = Field(ge=0, le=99)

    chat = model(url, max_tokens=200, **OFF).with_structured_output(City, method="json_schema")
    found = chat.invoke("Name a city.")
    assert isinstance(found, City)
