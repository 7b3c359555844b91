"""Prompts: thinking switches, control tokens, images, tools, tasks, stability."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import deepdraft
from deepdraft.errors import EngineError, RequestError
from deepdraft.text import prompt as prompt_module
from deepdraft.text.conversation import EFFORT_NAMES, TASKS
from deepdraft.text.prompt import (
    Conversation,
    Family,
    ImagePart,
    Message,
    ParseStart,
    RenderedPrompt,
    ResponseFormat,
    TextPart,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    missing_chat_tokens,
    render_chat,
    render_fim,
    resolve_thinking,
    tool_parameters,
)
from deepdraft.text.tokenizer import Tokenizer
from tests.text import cases

HI = Message(role="user", content="Hi")
TOOL = Tool(name="f", description="d", parameters={"type": "object"})
FAMILIES: list[Family] = ["v4.1", "v4"]


def render(*messages: Message, family: Family = "v4.1", **fields: Any) -> RenderedPrompt:
    conversation = Conversation(messages=messages or (HI,), **fields)
    return render_chat(conversation, cases.toy_tokenizer(), family)


# Thinking switches


@pytest.mark.parametrize(
    ("fields", "enabled", "effort"),
    [
        ({}, True, "high"),
        ({"default": False}, False, "high"),
        ({"thinking": {"type": "disabled"}}, False, "high"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}, "default": False}, True, "high"),
        ({"thinking": {"type": "adaptive"}}, True, "high"),
        ({"thinking": False}, False, "high"),
        ({"thinking": True, "default": False}, True, "high"),
        ({"reasoning_effort": "none"}, False, "high"),
        ({"reasoning_effort": "low", "default": False}, True, "low"),
        ({"reasoning_effort": 1}, True, 1),
        ({"reasoning_effort": 100}, True, 100),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, True, "high"),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "max"}, False, "max"),
        ({"chat_template_kwargs": {"thinking": False}}, False, "high"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, "high"),
        ({"chat_template_kwargs": {"enable_thinking": True}, "default": False}, True, "high"),
        ({"chat_template_kwargs": {"reasoning_effort": 30}}, True, 30),
        ({"chat_template_kwargs": {"reasoning_effort": "none"}}, False, "high"),
        (
            {"chat_template_kwargs": {"reasoning_effort": 30}, "reasoning_effort": "max"},
            True,
            "max",
        ),
        ({"chat_template_kwargs": {"thinking": True, "enable_thinking": False}}, True, "high"),
        ({"chat_template_kwargs": {"thinking": True}, "reasoning_effort": "none"}, True, "high"),
        ({"thinking": False, "chat_template_kwargs": {"thinking": True}}, False, "high"),
        ({"thinking": None, "reasoning_effort": None, "chat_template_kwargs": {}}, True, "high"),
        ({"chat_template_kwargs": {"other": 1}}, True, "high"),
    ],
)
def test_resolve_thinking(fields: dict[str, Any], enabled: bool, effort: object) -> None:
    assert resolve_thinking(**fields) == Thinking(enabled=enabled, effort=effort)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking": {"type": "x"}}, "thinking.type"),
        ({"thinking": {}}, "thinking.type"),
        ({"thinking": "on"}, "thinking"),
        ({"thinking": 1}, "thinking"),
        ({"chat_template_kwargs": {"thinking": "yes"}}, "chat_template_kwargs.thinking"),
        ({"chat_template_kwargs": {"enable_thinking": 0}}, "chat_template_kwargs.enable_thinking"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"reasoning_effort": 0}, "reasoning_effort"),
        ({"reasoning_effort": 101}, "reasoning_effort"),
        ({"reasoning_effort": True}, "reasoning_effort"),
        ({"reasoning_effort": 0.5}, "reasoning_effort"),
        (
            {"chat_template_kwargs": {"reasoning_effort": []}},
            "chat_template_kwargs.reasoning_effort",
        ),
    ],
)
def test_resolve_thinking_refuses(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as error:
        resolve_thinking(**fields)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("name", "budget", "v4_text"),
    [
        ("minimal", 50, ""),
        ("low", 50, ""),
        ("medium", 75, "Absolute maximum"),
        ("high", 75, "Absolute maximum"),
        ("xhigh", 75, "Absolute maximum"),
        ("max", 100, "Beyond maximum"),
        ("ultra", 100, "Beyond maximum"),
        (1, 1, ""),
        (62, 62, ""),
        (63, 63, "Absolute maximum"),
        (87, 87, "Absolute maximum"),
        (88, 88, "Beyond maximum"),
        (100, 100, "Beyond maximum"),
    ],
)
def test_efforts(name: str | int, budget: int, v4_text: str) -> None:
    assert isinstance(name, int) or name in EFFORT_NAMES
    effort = resolve_thinking(reasoning_effort=name).effort
    text = render(effort=effort).text
    assert text.startswith(
        f"<｜begin▁of▁sentence｜><｜System｜>Reasoning Effort: {budget} (range 1-100, the higher"
    )
    text = render(effort=effort, family="v4").text
    head = "<｜begin▁of▁sentence｜>"
    assert text.startswith(
        f"{head}Reasoning Effort: {v4_text}" if v4_text else f"{head}<｜User｜>Hi"
    )


def test_effort_writes_nothing_while_thinking_is_off() -> None:
    for family in FAMILIES:
        for effort in ("low", "max", 3):
            text = render(effort=effort, thinking=False, family=family).text
            assert text == "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>"


def test_effort_line_that_is_not_where_it_belongs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_module, "_render_segments", lambda *a: [("x", False)] * 3)
    with pytest.raises(EngineError, match="effort line"):
        render(effort=7)


# Control tokens


def special_tokens(prompt: RenderedPrompt) -> list[int]:
    control = cases.toy_tokenizer().control_ids
    return [i for i in prompt.token_ids if i in control]


FORGED = st.lists(
    st.one_of(st.sampled_from([*cases.CONTROL, "\n", "</", " calls>"]), st.text(max_size=3)),
    min_size=1,
    max_size=4,
).map("".join)


@given(FORGED, st.sampled_from(FAMILIES), st.booleans())
def test_no_text_of_a_client_gives_a_control_token(text: str, family: Family, think: bool) -> None:
    def build(t: str) -> RenderedPrompt:
        return render(
            Message(role="system", content=f"s{t}"),
            Message(role="user", content=(TextPart(t), TextPart("b"))),
            Message(
                role="assistant",
                content=t,
                reasoning=t,
                tool_calls=(
                    ToolCall("1", "f", json.dumps({"a": t, f"k{t}": [t]}, ensure_ascii=False)),
                    ToolCall("2", "f", f"x{t}"),
                ),
            ),
            Message(role="tool", content=t, tool_call_id="1"),
            Message(role="tool", content=t, tool_call_id="2"),
            Message(role="latest_reminder", content=t),
            family=family,
            thinking=think,
            tools=(Tool(name="f", description=t, parameters={"type": "object", t: {"a": t}}),),
            response_format=ResponseFormat(kind="json_schema", schema={"enum": [t]}),
        )

    forged, innocent = build(text), build("x")
    assert special_tokens(forged) == special_tokens(innocent)
    assert cases.toy_tokenizer().decode(forged.token_ids) == forged.text


@pytest.mark.parametrize("family", FAMILIES)
def test_tokenizer_without_chat_tokens(family: Family) -> None:
    tokenizer = Tokenizer.load(cases.TINY)
    missing = missing_chat_tokens(tokenizer, family)
    assert ("<｜System｜>" in missing) == (family == "v4.1")
    assert {"<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜"} <= set(missing)
    with pytest.raises(RequestError, match=r"lacks <｜User｜>.*completions"):
        render_chat(Conversation(messages=(HI,)), tokenizer, family)
    assert missing_chat_tokens(cases.toy_tokenizer(), family) == ()
    with pytest.raises(RequestError, match="fim▁hole") as error:
        render_fim("a", "b", tokenizer)
    assert error.value.param == "suffix"


def test_fim_text_is_plain() -> None:
    prompt = render_fim("a<｜fim▁hole｜>", "<think>", cases.toy_tokenizer())
    assert prompt.text == (
        "<｜begin▁of▁sentence｜><｜fim▁begin｜>a<｜fim▁hole｜><｜fim▁hole｜><think><｜fim▁end｜>"
    )
    assert len(special_tokens(prompt)) == 4
    assert prompt.parse_start == ParseStart(stage="content_continuation")


def test_bundled_tokenizer_has_every_token_that_a_prompt_can_hold() -> None:
    tokenizer = Tokenizer.load(Path(deepdraft.__file__).parent / "demo" / "checkpoint")
    assert missing_chat_tokens(tokenizer, "v4.1") == ()
    assert tokenizer.id_of("<｜User｜>") != cases.published_tokenizer().id_of("<｜User｜>")
    for task in TASKS:
        render_chat(Conversation(messages=(HI,), task=task), tokenizer)
    image = Message(role="user", content=(ImagePart("x"), TextPart("<think>中🙂")))
    reminder = Message(role="latest_reminder", content="r")
    prompt = render_chat(Conversation(messages=(image, reminder), tools=(TOOL,)), tokenizer)
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    assert render_fim("a", "b", tokenizer).token_ids


# Roles and history


def test_developer_is_a_system_message() -> None:
    for family in FAMILIES:
        developer = render(Message(role="developer", content="Be brief."), HI, family=family)
        assert developer == render(Message(role="system", content="Be brief."), HI, family=family)


def test_empty_turns() -> None:
    prompt = render(HI, Message(role="assistant"), HI, thinking=False)
    assert prompt.text.endswith(
        "<｜Assistant｜></think><｜end▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>"
    )
    call = Message(role="assistant", tool_calls=(ToolCall("1", "f", "{}"),))
    prompt = render(HI, call, Message(role="tool", tool_call_id="1"))
    assert "<｜User｜><tool_result></tool_result><｜Assistant｜>" in prompt.text


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_of_past_calls(family: Family) -> None:
    def build(arguments: str) -> RenderedPrompt:
        call = Message(role="assistant", tool_calls=(ToolCall("1", "f", arguments),))
        return render(HI, call, Message(role="tool", tool_call_id="1"), family=family)

    assert build("") == build(" ") == build("{}")
    assert 'parameter name="arguments" string="true">[1]</' in build("[1]").text


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_reasoning_is_like_empty_reasoning(family: Family) -> None:
    def build(reasoning: str | None) -> RenderedPrompt:
        call = Message(
            role="assistant", reasoning=reasoning, tool_calls=(ToolCall("1", "f", "{}"),)
        )
        result = Message(role="tool", content="r", tool_call_id="1")
        return render(HI, call, result, tools=(TOOL,), family=family)

    assert build(None) == build("")
    assert "<｜Assistant｜><think></think>" in build(None).text
    assert "<think>why</think>" in build("why").text


@pytest.mark.parametrize(
    ("message", "thinking", "stage"),
    [
        (Message(role="assistant", content="a", prefix=True), True, "content_continuation"),
        (Message(role="assistant", content="a", prefix=True), False, "content_continuation"),
        (Message(role="assistant", reasoning="r", prefix=True), True, "reasoning_continuation"),
        (Message(role="assistant", content="", prefix=True), True, "reasoning"),
        (Message(role="assistant", content="", prefix=True), False, "content"),
        (Message(role="assistant", content="a"), True, "reasoning"),
        (Message(role="assistant", content="a"), False, "content"),
    ],
)
def test_stage_after_a_last_assistant_message(message: Message, thinking: bool, stage: str) -> None:
    prompt = render(HI, message, thinking=thinking)
    assert prompt.parse_start.stage == stage
    # The stage must be where the prompt's text ends.
    tail = prompt.text.rpartition("<｜Assistant｜>")[2]
    closed = "</think>" in tail
    assert closed == (not stage.startswith("reasoning"))
    assert tail.endswith((message.reasoning or message.content or tail) if message.prefix else tail)


# Images


def test_images() -> None:
    image, other = ImagePart("data:image/png;base64,AA"), ImagePart("https://host/x.png", "low")
    spelled = TextPart("<｜deepseek_image｜> \x00image\x00")
    prompt = render(
        Message(role="system", content=(TextPart("s"), other)),
        Message(role="user", content=(spelled, image, TextPart("b"))),
        thinking=False,
    )
    assert prompt.images == (other, image)
    image_id = cases.toy_tokenizer().id_of("<｜deepseek_image｜>")
    assert special_tokens(prompt).count(image_id) == 2
    assert prompt.text == (
        "<｜begin▁of▁sentence｜><｜System｜>s\n\n<｜deepseek_image｜><｜User｜>"
        "<｜deepseek_image｜> \x00image\x00\n\n<｜deepseek_image｜>\n\nb<｜Assistant｜></think>"
    )
    assert cases.toy_tokenizer().decode(prompt.token_ids) == prompt.text


def test_images_are_a_note_in_v4() -> None:
    prompt = render(Message(role="user", content=(ImagePart("x"), TextPart("b"))), family="v4")
    assert "<｜User｜>[Unsupported Image]\n\nb<｜Assistant｜>" in prompt.text
    assert prompt.images == ()


def test_tokenizer_without_the_image_token() -> None:
    spec = cases.toy_spec()
    spec["added_tokens"] = [t for t in spec["added_tokens"] if "image" not in t["content"]]
    del spec["model"]["vocab"]["<｜deepseek_image｜>"]
    message = Message(role="user", content=(ImagePart("x"),))
    with pytest.raises(RequestError, match="takes no images"):
        render_chat(Conversation(messages=(message,)), Tokenizer(spec, "toy"))


# Tools


def tool_line(prompt: RenderedPrompt, index: int = 0) -> dict[str, Any]:
    lines = prompt.text.split("### Available Tool Schemas\n\n")[1].split("\n\n")[0].splitlines()
    return json.loads(lines[index])


def test_tools_are_printed_in_one_way() -> None:
    bare = render(tools=(Tool(name="f"), TOOL))
    assert list(tool_line(bare).items()) == [("name", "f"), ("description", ""), ("parameters", {})]
    assert tool_line(bare, 1)["description"] == "d"
    assert bare.parse_start == ParseStart(stage="reasoning", tool_calls=True)


def test_schema_of_a_strict_tool_is_completed() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    strict = render(tools=(Tool(name="f", parameters=schema, strict=True),))
    completed = tool_line(strict)["parameters"]
    assert completed["additionalProperties"] is False
    assert completed["required"] == ["a"]
    loose = render(tools=(Tool(name="f", parameters=schema, strict=False),))
    assert tool_line(loose)["parameters"] == schema
    with pytest.raises(RequestError, match="strict tool 'f'"):
        render(tools=(Tool(name="f", parameters={"type": "array"}, strict=True),))


def test_a_strict_tool_is_held_to_what_its_completion_drops() -> None:
    number = {"type": "integer", "enum": [1, 2]}
    schema = {
        "type": "object",
        "$defs": {"seven": {"type": "integer", "enum": [7]}},
        "properties": {
            "a": number,
            "b": {"type": "array", "items": {"type": "string", "const": "x"}, "maxItems": 2},
            "c": {"anyOf": [number, {"type": "null"}]},
            "f": {"$ref": "#/$defs/seven"},
            "d": {"type": "object", "properties": {"e": {"type": "string", "minLength": 2}}},
        },
    }
    held = tool_parameters(Tool(name="f", parameters=schema, strict=True))
    assert held is not None and held["$defs"] == schema["$defs"]
    d = {**schema["properties"]["d"], "additionalProperties": False, "required": ["e"]}
    assert held["properties"] == {**schema["properties"], "d": d}
    assert sorted(held["required"]) == ["a", "b", "c", "d", "f"]
    assert held["additionalProperties"] is False
    assert tool_parameters(Tool(name="f", parameters=schema)) == schema


def test_tool_choice() -> None:
    tools = (TOOL, Tool(name="g"))
    none = render(tools=tools, tool_choice=ToolChoice(mode="none"))
    assert none == render()
    for choice, names in (("required", ["f", "g"]), ("function", ["g"])):
        prompt = render(tools=tools, tool_choice=ToolChoice(mode=choice, name="g"), thinking=False)
        assert prompt.text.endswith("</think>\n\n<｜DSML｜ calls>\n")
        assert prompt.parse_start == ParseStart(tool_calls=True, in_tool_calls=True)
        assert [tool_line(prompt, i)["name"] for i in range(len(names))] == names
        # While the model thinks the block stays closed: a grammar forces the call afterwards.
        prompt = render(tools=tools, tool_choice=ToolChoice(mode=choice, name="g"))
        assert prompt.text.endswith("<think>")
        assert prompt.parse_start == ParseStart(stage="reasoning", tool_calls=True)
        assert [tool_line(prompt, i)["name"] for i in range(len(names))] == names


def _nested(depth: int) -> dict[str, Any]:
    return {"a": _nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    "parameters",
    [{"a": math.nan}, {"a": math.inf}, {"a": 10**30}, {1: 2}, {"a": object()}, _nested(200)],
    ids=["nan", "inf", "big", "key", "object", "deep"],
)
def test_schemas_that_json_cannot_hold(parameters: dict[Any, Any]) -> None:
    with pytest.raises(RequestError, match="cannot be written"):
        render(tools=(Tool(name="f", parameters=parameters),))


@pytest.mark.parametrize(
    "build",
    [
        lambda t: render(Message(role="user", content=t)),
        lambda t: render(HI, Message(role="assistant", content="a", reasoning=t), HI),
        lambda t: render(tools=(Tool(name="f", description=t),)),
        lambda t: render(tools=(Tool(name="f", parameters={"a": t}),)),
        lambda t: render(response_format=ResponseFormat(kind="json_schema", schema={"a": t})),
    ],
)
def test_lone_surrogates_are_a_request_error(build: Callable[[str], object]) -> None:
    with pytest.raises(RequestError, match=r"surrogate"):
        build("a\ud800")


def test_response_format() -> None:
    schema = {"type": "object", "b": 1, "a": 2.5}
    prompt = render(response_format=ResponseFormat(kind="json_schema", schema=schema))
    assert '\n{"type": "object", "b": 1, "a": 2.5}<｜User｜>Hi' in prompt.text
    assert not prompt.parse_start.json_output
    assert render(response_format=ResponseFormat(kind="json_object")).parse_start.json_output
    regex = render(response_format=ResponseFormat(kind="regex", regex="a+"))
    assert regex == render()


# Tasks


@pytest.mark.parametrize("task", sorted(TASKS - {"action"}))
def test_task_replaces_the_assistant_header(task: str) -> None:
    spec = cases.toy_spec()
    token = f"<｜{task}｜>"
    spec["model"]["vocab"][token] = 1000
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] != token]
    spec["added_tokens"].append({**spec["added_tokens"][0], "content": token, "id": 1000})
    prompt = render_chat(Conversation(messages=(HI,), task=task), Tokenizer(spec, "toy"))
    assert prompt.text.endswith(f"<｜User｜>Hi{token}")
    assert prompt.token_ids[-1] == 1000
    assert prompt.parse_start == ParseStart(stage="content")


def test_task_without_its_token() -> None:
    with pytest.raises(RequestError, match="lacks <｜domain｜>"):
        render(task="domain")
    with pytest.raises(RequestError, match="task is 'dance'"):
        render(task="dance")


# Stability


@pytest.mark.parametrize("family", FAMILIES)
def test_a_longer_conversation_extends_the_prompt(family: Family) -> None:
    """With tools, all reasoning is kept, so each prompt is a prefix of the next one."""
    messages = [Message(role="system", content="s"), HI]
    before = render(*messages, tools=(TOOL,), family=family)
    assert before == render(*messages, tools=(dataclasses.replace(TOOL),), family=family)
    messages += [Message(role="assistant", content="a", reasoning="r"), HI]
    after = render(*messages, tools=(TOOL,), family=family)
    assert after.text.startswith(before.text)
    assert after.token_ids[: len(before.token_ids)] == before.token_ids
