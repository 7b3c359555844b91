"""The openai SDK's responses client against a running server."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from .conftest import Live
from .dialects import call, calls

OFF: Any = {"effort": "none"}
ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}


@pytest.fixture
def sdk(make_live: Callable[..., Live]) -> Iterator[tuple[openai.OpenAI, Live]]:
    live = make_live(max_tokens=20_000, server={"api_keys": ("secret-key",)})
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="secret-key", max_retries=0) as client:
        yield client, live


def test_a_response(sdk: tuple[openai.OpenAI, Live]) -> None:
    client, live = sdk
    live.toy.say("Let me see.</think>It is 4.")
    response = client.responses.create(
        model="toy", input="2+2?", instructions="Be brief.", temperature=0
    )
    assert response.output_text == "It is 4."
    thought, said = response.output
    assert thought.type == "reasoning" and thought.content is not None
    assert thought.content[0].text == "Let me see."
    assert said.type == "message" and said.phase == "final_answer"
    assert (response.status, response.model, response.error) == ("completed", "toy", None)
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 11
    again = client.responses.retrieve(response.id)
    assert again.output_text == "It is 4."
    further = client.responses.create(
        model="toy", input="And?", previous_response_id=response.id, temperature=0
    )
    assert further.previous_response_id == response.id
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_a_stream(sdk: tuple[openai.OpenAI, Live]) -> None:
    client, live = sdk
    live.toy.say("Hm.</think>It is 4.")
    # Not create(stream=True): this one also checks every event against the last.
    with client.responses.stream(model="toy", input="2+2?", temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == "It is 4."
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert kinds.count("response.reasoning_text.delta") == 3


def test_a_loop_of_a_coding_agent(sdk: tuple[openai.OpenAI, Live]) -> None:
    """As Codex does it: nothing kept, everything replayed, tools of all kinds."""
    client, live = sdk
    prompts = list[str]()
    patch = '*** Begin Patch\n*** Add File: a\n+"x"\n*** End Patch'

    def model(prompt: str) -> str:
        if prompt not in prompts:
            prompts.append(prompt)
        if "<tool_result>" in prompt:
            return "Good.</think>Done."
        return "I patch.</think>Patching.\n\n" + calls(
            call("apply_patch", ("input", True, patch)),
            call("files::read", ("path", True, "a")),
            call("add", ("a", False, "2")),
        )

    live.toy.say(model)
    tools: Any = [
        ADD,
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Patches.",
            "format": {
                "type": "grammar",
                "syntax": "lark",
                "definition": "start: /x/",
            },
        },
        {
            "type": "namespace",
            "name": "files",
            "description": "Files.",
            "tools": [
                {"type": "function", "name": "read", "parameters": {"type": "object"}},
            ],
        },
        {"type": "web_search"},
    ]
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "D"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "U"}]},
    ]
    kinds: list[str] = []
    for _ in range(3):
        stream = client.responses.create(
            model="toy",
            instructions="Agent.",
            input=items,
            tools=tools,
            tool_choice="auto",
            parallel_tool_calls=True,
            reasoning={"effort": "high", "summary": "auto"},
            include=["reasoning.encrypted_content"],
            store=False,
            stream=True,
            prompt_cache_key="k",
            temperature=0,
        )
        done = [e.item for e in stream if e.type == "response.output_item.done"]
        items += [item.model_dump(exclude_none=True) for item in done]
        kinds += [item.type for item in done]
        results: list[Any] = []
        for item in done:
            if item.type == "custom_tool_call":
                assert (item.name, item.input) == ("apply_patch", patch)
            elif item.type == "function_call":
                assert (item.name, item.namespace) in (("read", "files"), ("add", None))
                assert json.loads(item.arguments) in ({"path": "a"}, {"a": 2})
            else:
                continue
            output = {"type": f"{item.type}_output", "call_id": item.call_id, "output": "ok"}
            results.append(output)
        if not results:
            break
        items += results
    assert kinds == [
        *("reasoning", "message", "custom_tool_call", "function_call", "function_call"),
        *("reasoning", "message"),
    ]
    assert "<think>I patch.</think>Patching." in prompts[-1]
    assert f'name="input" string="true">{patch}<' in prompts[-1]
    assert 'invoke name="files::read"' in prompts[-1]


def test_errors(sdk: tuple[openai.OpenAI, Live]) -> None:
    client, live = sdk
    live.toy.say("abcdef")
    with pytest.raises(openai.NotFoundError, match="served: toy"):
        client.responses.create(model="other", input="Hi")
    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.create(model="toy", input="Hi", max_output_tokens=0)
    assert bad.value.param == "max_output_tokens"
    with pytest.raises(openai.AuthenticationError) as missing:
        client.with_options(api_key="wrong").responses.create(model="toy", input="Hi")
    assert missing.value.code == "invalid_api_key"

    def fault(sequences: Any) -> None:
        if sequences[0].num_tokens > sequences[0].num_prompt + 2:
            raise RuntimeError

    live.toy.runner.step_fault = fault
    stream = client.responses.create(
        model="toy", input="Hi", reasoning=OFF, stream=True, temperature=0
    )
    *_, last = stream
    assert last.type == "response.failed" and last.response.error is not None
    assert "the model failed" in last.response.error.message


def test_the_answer_fits_a_model_class(sdk: tuple[openai.OpenAI, Live]) -> None:
    """`parse` sends a strict schema and reads the answer by it."""
    import pydantic

    class Sum(pydantic.BaseModel):
        total: int

    client, live = sdk
    live.toy.say('{"total":4} and more')
    response = client.responses.parse(
        model="toy", input="2+2?", text_format=Sum, reasoning=OFF, temperature=0
    )
    assert response.output_parsed == Sum(total=4)
