"""The anthropic SDK against a running server."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import pytest

from .conftest import Live
from .dialects import call, calls

OFF: Any = {"type": "disabled"}
USER: Any = [{"role": "user", "content": "2+2?"}]
COLD = {"temperature": 0}
TOOL: Any = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}


@pytest.fixture
def sdk(make_live: Callable[..., Live]) -> Iterator[tuple[anthropic.Anthropic, Live]]:
    live = make_live(server={"api_keys": ("secret-key",)})
    with anthropic.Anthropic(base_url=live.url, api_key="secret-key", max_retries=0) as client:
        yield client, live


def test_a_message(sdk: tuple[anthropic.Anthropic, Live]) -> None:
    client, live = sdk
    live.toy.say("Let me see.</think>It is 4.")
    message = client.messages.create(
        model="toy", max_tokens=100, messages=USER, system="Be brief.", extra_body=COLD
    )
    thought, text = message.content
    assert thought.type == "thinking" and thought.thinking == "Let me see."
    assert thought.signature == message.id
    assert text.type == "text" and text.text == "It is 4."
    assert (message.stop_reason, message.model) == ("end_turn", "toy")
    assert message.usage.output_tokens == 11 + 1 + 8 + 1
    assert message._request_id == message.id
    counted = client.messages.count_tokens(model="toy", messages=USER, system="Be brief.")
    assert counted.input_tokens == message.usage.input_tokens


def test_a_stream(sdk: tuple[anthropic.Anthropic, Live]) -> None:
    client, live = sdk
    live.toy.say("Hm.</think>It is 4. STOP no")
    with client.messages.stream(
        model="toy", max_tokens=100, messages=USER, extra_body=COLD, stop_sequences=["STOP"]
    ) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == "It is 4. "
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")
    assert message.usage.output_tokens == 3 + 1 + 13


def test_a_loop_with_a_tool_and_thinking(sdk: tuple[anthropic.Anthropic, Live]) -> None:
    client, live = sdk
    prompts = []

    def model(prompt: str) -> str:
        prompts.append(prompt)
        if "<tool_result>" in prompt:
            return "Now I know.</think>It is 4."
        return (
            "I must add.</think>Adding."
            + "\n\n"
            + calls(
                call("add", ("a", False, "2"), ("b", False, "2")),
                call("add", ("note", True, 'say "hi"\n')),
            )
        )

    live.toy.say(model)
    messages = list(USER)
    for _ in range(3):
        with client.messages.stream(
            model="claude-of-tomorrow",
            max_tokens=1000,
            messages=messages,
            tools=[TOOL],
            extra_body=COLD,
            thinking={"type": "enabled", "budget_tokens": 1024},
            extra_headers={"anthropic-beta": "interleaved-thinking-2025-05-14"},
        ) as stream:
            message = stream.get_final_message()
        # The SDK's own blocks go back as they came, signature included.
        messages.append({"role": "assistant", "content": message.content})
        uses = [block for block in message.content if block.type == "tool_use"]
        if message.stop_reason != "tool_use":
            break
        assert [use.input for use in uses] == [{"a": 2, "b": 2}, {"note": 'say "hi"\n'}]
        results: Any = [
            {"type": "tool_result", "tool_use_id": use.id, "content": f"result {i}"}
            for i, use in enumerate(uses)
        ]
        messages.append({"role": "user", "content": results})
    assert message.content[-1].type == "text" and message.content[-1].text == "It is 4."
    assert len(messages) == 4
    replay = prompts[-1]
    assert "<think>I must add.</think>Adding." in replay
    assert "<tool_result>result 0</tool_result>\n\n<tool_result>result 1</tool_result>" in replay


def test_errors(sdk: tuple[anthropic.Anthropic, Live]) -> None:
    client, live = sdk
    live.toy.say("abcdef")
    with pytest.raises(anthropic.NotFoundError, match="served: toy"):
        client.messages.create(model="other", max_tokens=9, messages=USER)
    with pytest.raises(anthropic.BadRequestError, match="temperature is 9"):
        client.messages.create(
            model="toy", max_tokens=9, messages=USER, extra_body={"temperature": 9}
        )
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(
            model="toy", max_tokens=9, messages=USER
        )

    def fault(sequences: Any) -> None:
        if sequences[0].num_tokens > sequences[0].num_prompt + 2:
            raise RuntimeError

    live.toy.runner.step_fault = fault
    stream = client.messages.create(
        model="toy", max_tokens=9, messages=USER, extra_body=COLD, thinking=OFF, stream=True
    )
    with pytest.raises(anthropic.APIStatusError, match="the model failed"):
        list(stream)


def test_a_bearer_token_opens_as_well(make_live: Callable[..., Live]) -> None:
    live = make_live(server={"api_keys": ("a", "b")})
    live.toy.say("ok")
    with anthropic.Anthropic(
        base_url=f"{live.url}/anthropic", auth_token="b", api_key=None, max_retries=0
    ) as client:
        message = client.messages.create(model="toy", max_tokens=9, messages=USER, thinking=OFF)
    assert message.content[0].type == "text"


def test_silence_is_filled_with_pings(make_live: Callable[..., Live]) -> None:
    live = make_live(server={"keep_alive_s": 0.02})
    live.toy.say("ok")
    live.toy.runner.prefill_fault = lambda sequence, ids: time.sleep(0.2)
    body = {"max_tokens": 9, "messages": USER, "stream": True, "thinking": OFF, "temperature": 0}
    text = httpx.post(f"{live.url}/v1/messages", json=body).text
    assert text.startswith('event: ping\ndata: {"type":"ping"}\n\n')
    with anthropic.Anthropic(base_url=live.url, api_key="any", max_retries=0) as client:
        with client.messages.stream(
            model="toy", max_tokens=9, messages=USER, thinking=OFF, extra_body=COLD
        ) as stream:
            assert stream.get_final_text() == "ok"
