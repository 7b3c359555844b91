"""What the tests of the Messages and Responses APIs share: reading streams, DeepSeek's own peer."""

import json
from collections.abc import Sequence
from typing import Any

import deepseek_recipe as recipe
import httpx

MODEL = "DeepSeek-V4.1-Flash"
CALLS_OPEN = "<｜DSML｜ calls>\n"
CALLS_CLOSE = "</｜DSML｜ calls>"


def call(name: str, *parameters: tuple[str, bool, str]) -> str:
    """One call as the model writes it; parameters are name, is text, value."""
    lines = [
        f'<｜DSML｜ parameter name="{key}" string="{str(text).lower()}">{value}'
        "</｜DSML｜ parameter>\n"
        for key, text, value in parameters
    ]
    return f'<｜DSML｜ invoke name="{name}">\n{"".join(lines)}</｜DSML｜ invoke>\n'


def calls(*each: str) -> str:
    """A block of calls."""
    return CALLS_OPEN + "".join(each) + CALLS_CLOSE


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream; each is named after its type."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = [f for f in response.text.split("\n\n") if f and not f.startswith(":")]
    found = []
    for frame in frames:
        first, second = frame.split("\n")
        event = json.loads(second.removeprefix("data: "))
        assert first == f"event: {event['type']}"
        found.append(event)
    return found


def peer_prompt(kind: str, body: dict[str, Any]) -> str:
    """The prompt that DeepSeek's own request conversion makes of a body."""
    request = _request_class(kind)({"model": MODEL, **body})
    converted = request.convert(recipe.ConversionOptions())
    return recipe.DeepseekV41Encoding().render_conversation(converted.conversation).prompt


def peer_events(
    kind: str, body: dict[str, Any], pieces: Sequence[str], *, cut: bool
) -> list[dict[str, Any]]:
    """The events that DeepSeek's own stream parser makes of an answer."""
    request = _request_class(kind)({"model": MODEL, "stream": True, **body})
    namespaces = echo = None
    if kind == "responses":
        namespaces = request.namespace_tool_map(recipe.ConversionOptions())
        echo = request.echo()
    converted = request.convert(recipe.ConversionOptions())
    generator: Any = _request_class(kind).chunk_generator(converted, "id", "model")
    if namespaces is not None:
        generator = generator.with_namespace_tool_map(namespaces).with_echo(echo)
    processor = recipe.StreamProcessor(generator, converted.parsing_options)
    reason = recipe.InferenceFinishReason.Length if cut else recipe.InferenceFinishReason.Stop
    chunks = [
        recipe.InferenceChunk.ready(prompt_usage=recipe.PromptUsage(prompt_tokens=1)),
        *(recipe.InferenceChunk.text(piece, 1) for piece in pieces),
        recipe.InferenceChunk.finish(reason),
    ]
    told: list[Any] = []
    for chunk in chunks:
        if not processor.finished:
            told += processor.push(chunk)
    told += processor.finish()
    return [json.loads(event.to_json()) for event in told]


def _request_class(kind: str) -> Any:
    return {"messages": recipe.MessagesRequest, "responses": recipe.ResponsesRequest}[kind]
