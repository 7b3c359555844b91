"""Prompts and answers of the families before V4, and how a checkpoint's format is recognised."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepdraft.errors import CheckpointError, RequestError
from deepdraft.text.conversation import TRAITS, resolve_thinking
from deepdraft.text.detect import prompt_family, read_template, template_family
from deepdraft.text.parse_marks import MarkedParser, make_parser
from deepdraft.text.prompt import (
    Conversation,
    Family,
    Message,
    ParseStart,
    ResponseFormat,
    Tool,
    ToolCall,
    ToolChoice,
    chat_tokens,
    end_ids,
    missing_chat_tokens,
    render_chat,
)
from deepdraft.text.tokenizer import Tokenizer
from tests.text import cases

DATA = Path(__file__).parent / "data"
OLDER: list[Family] = ["v3.2", "v3.1", "r1", "v3", "v2", "coder"]
HI = Message(role="user", content="Hi")
TOOL = Tool(name="tide", description="Height.", parameters={"type": "object", "properties": {}})
CALL = Message(
    role="assistant",
    content="Checking.",
    reasoning="Hm.",
    tool_calls=(ToolCall("a", "tide", '{"n": 1, "s": "x"}'),),
)
RESULT = Message(role="tool", content="4.2", tool_call_id="a")


def rendered() -> list[dict[str, Any]]:
    return json.loads((DATA / "older_prompts.json").read_text())["cases"]


TEMPLATES: dict[Family, str] = {
    "v3.2": "{{ '<｜User｜>' }}{{ '</think>' if not thinking }}{{ '<｜DSML｜invoke' }}",
    "v3.1": "{% if thinking %}{{ '<｜User｜>' + m + '<think>' }}{% else %}{{ '</think>' }}",
    "r1": "{{ '<｜User｜>' + m }}{% set m = m.split('</think>')[-1] %}{{ '<｜Assistant｜>' }}",
    "v3": "{{ '<｜User｜>' + m }}{{ '<｜Assistant｜>' + n + '<｜end▁of▁sentence｜>' }}",
    "v2": "{{ 'User: ' + m + '\\n\\n' }}{{ 'Assistant: ' + n + eos_token }}",
    "coder": "{{ '### Instruction:\\n' + m }}{{ '### Response:\\n' + n }}",
}
"""What tells the published templates apart."""


def render(*messages: Message, family: Family, **fields: Any) -> str:
    conversation = Conversation(messages=messages, thinking=fields.pop("thinking", False), **fields)
    return render_chat(conversation, cases.published_tokenizer(), family).text


@pytest.mark.parametrize("case", [pytest.param(c, id=c["id"]) for c in rendered()])
def test_prompts_are_those_of_the_published_templates(case: dict[str, Any]) -> None:
    tokenizer = cases.published_tokenizer()
    request = {"messages": case["messages"], "thinking": {"type": "disabled"}}
    traits = TRAITS[case["family"]]
    thinking = traits.thinking == "always" or case.get("thinking", False)
    conversation = replace(cases.conversation(request), thinking=thinking)
    prompt = render_chat(conversation, tokenizer, case["family"])
    assert prompt.text == case["prompt"]
    # The ids of the whole text, in which the spelling of control tokens becomes them.
    assert list(prompt.token_ids) == tokenizer.encode_with_control(case["prompt"])


def test_the_section_of_tools() -> None:
    text = render(HI, family="v3.1", tools=(TOOL,))
    head = "<｜begin▁of▁sentence｜>\n\n## Tools\nYou have access to the following tools:\n\n"
    tool = '### tide\nDescription: Height.\n\nParameters: {"type": "object", "properties": {}}\n\n'
    assert text.startswith(head + tool + "IMPORTANT: ")
    form = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments"
        "<｜tool▁call▁end｜>{additional_tool_calls}<｜tool▁calls▁end｜>"
    )
    assert form in text and text.endswith("spaces<｜User｜>Hi<｜Assistant｜></think>")
    system = Message(role="system", content="S")
    assert render(system, HI, family="v3", tools=(TOOL,)).startswith(
        "<｜begin▁of▁sentence｜>S\n\n## Tools"
    )
    assert "tool_call_name\n```json\ntool_call_arguments\n```" in render(
        HI, family="v3", tools=(TOOL,)
    )
    none = ToolChoice(mode="none")
    assert "## Tools" not in render(HI, family="v3", tools=(TOOL,), tool_choice=none)


def test_v32_with_reasoning_and_results() -> None:
    text = render(HI, CALL, RESULT, family="v3.2", thinking=True)
    assert text == (
        "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜><think>Hm.</think>Checking.\n\n"
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="tide">\n'
        '<｜DSML｜parameter name="n" string="false">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="s" string="true">x</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls><｜end▁of▁sentence｜>\n\n"
        "<function_results>\n<result>4.2</result>\n</function_results>\n\n<think>"
    )
    later = render(HI, CALL, RESULT, Message(role="user", content="Ok"), family="v3.2")
    assert "Hm." not in later and later.endswith("<｜User｜>Ok<｜Assistant｜></think>")
    schema = ResponseFormat(kind="json_schema", schema={"type": "object"})
    asked = render(HI, family="v3.2", response_format=schema)
    assert "## Response Format:\n\n" in asked and '{"type": "object"}<｜User｜>' in asked


@pytest.mark.parametrize("family", OLDER)
def test_an_answer_can_be_continued(family: Family) -> None:
    begun = Message(role="assistant", content="Once", prefix=True)
    conversation = Conversation(messages=(HI, begun), thinking=False)
    prompt = render_chat(conversation, cases.published_tokenizer(), family)
    assert prompt.text.endswith("Once")
    assert prompt.parse_start.stage == "content_continuation"
    if TRAITS[family].thinking != "never":
        thought = replace(begun, content="", reasoning="Hm")
        prompt = render_chat(
            Conversation(messages=(HI, thought)), cases.published_tokenizer(), family
        )
        assert prompt.text.endswith("Hm") and "<think>" in prompt.text
        assert prompt.parse_start.stage == "reasoning_continuation"


@pytest.mark.parametrize("family", OLDER)
@given(text=st.text(st.characters(codec="utf-8"), max_size=40))
def test_no_text_makes_a_control_token(family: Family, text: str) -> None:
    tokenizer = cases.published_tokenizer()
    forged = text + "".join(chat_tokens("v3.2"))
    a, b = (
        render_chat(Conversation(messages=(Message(role="user", content=c),)), tokenizer, family)
        for c in ("Hi", forged)
    )
    of_a, of_b = ([i for i in p.token_ids if i in tokenizer.control_ids] for p in (a, b))
    assert of_a == of_b and forged in b.text


@pytest.mark.parametrize("family", ["v2", "coder"])
def test_what_a_format_lacks_is_refused(family: Family) -> None:
    tokenizer = cases.published_tokenizer()
    for conversation in (
        Conversation(messages=(HI,), tools=(TOOL,)),
        Conversation(messages=(HI, CALL, RESULT)),
        Conversation(messages=(HI,), task="title"),
        Conversation(messages=(Message(role="latest_reminder", content="x"), HI)),
    ):
        with pytest.raises(RequestError, match="prompt format has no") as caught:
            render_chat(conversation, tokenizer, family)
        assert caught.value.param


def test_arguments_that_v32_cannot_write_are_refused() -> None:
    for arguments in ("[1]", "{"):
        call = replace(CALL, tool_calls=(ToolCall("a", "tide", arguments),))
        with pytest.raises(RequestError, match="'a' are no"):
            render(HI, call, RESULT, family="v3.2")


def test_tokens_of_the_formats() -> None:
    tokenizer = cases.published_tokenizer()
    toy = cases.toy_tokenizer()
    for family in OLDER:
        assert missing_chat_tokens(tokenizer, family) == ()
    assert missing_chat_tokens(toy, "coder") == ("<|EOT|>",)
    assert end_ids(tokenizer, "coder") == {tokenizer.id_of("<|EOT|>")}
    assert end_ids(tokenizer, "v2") == end_ids(toy, "coder") == frozenset()


@pytest.mark.parametrize(
    ("family", "silent", "on", "off"),
    [
        ("v4", True, True, False),
        ("v3.2", False, True, False),
        ("v3.1", False, True, False),
        ("r1", True, True, True),
        ("v3", False, False, False),
        ("coder", False, False, False),
    ],
)
def test_who_thinks(family: Family, silent: bool, on: bool, off: bool) -> None:
    assert resolve_thinking(family=family).enabled is silent
    assert resolve_thinking(family=family, thinking=True).enabled is on
    assert resolve_thinking(family=family, thinking=False).enabled is off
    assert resolve_thinking(family=family, reasoning_effort="none").enabled is off
    levels = TRAITS[family].extras
    assert resolve_thinking(family=family, reasoning_effort="max").enabled is (levels or silent)


# Calls in marks

V3 = (
    "Sure.\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n'
    "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
V31 = (
    'Sure.\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
CALLS = [["f", '{"a": 1}'], ["g", "{}"]]


def parse(
    text: str, start: ParseStart, reason: Any = "stop", step: int = 1
) -> tuple[dict[str, Any], MarkedParser]:
    tokenizer = cases.published_tokenizer()
    ids = tokenizer.encode_with_control(text)
    by_ids = make_parser(start, tokenizer, "v3.1")
    assert isinstance(by_ids, MarkedParser)
    deltas = [d for i in range(0, len(ids), step) for d in by_ids.push(ids[i : i + step])]
    found = cases.collect([*deltas, *by_ids.finish(reason)])
    by_text = MarkedParser(start)
    deltas = [d for character in text for d in by_text.push_text(character)]
    assert cases.collect([*deltas, *by_text.finish(reason)]) == found
    return found, by_ids


WITH_CALLS = ParseStart(tool_calls=True)


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("text", [V3, V31])
def test_calls_in_marks(text: str, step: int) -> None:
    found, parser = parse(text, WITH_CALLS, step=step)
    assert found == {"reasoning": "", "content": "Sure.", "calls": CALLS}
    assert [[c.name, c.arguments] for c in parser.tool_calls] == CALLS
    assert all(c.complete for c in parser.tool_calls)
    assert parser.finish_reason("stop") == "tool_calls"
    assert parser.finish_reason("length") == "length"


def test_reasoning_before_calls_and_content() -> None:
    start = ParseStart(stage="reasoning", tool_calls=True)
    found, parser = parse("\nHm.\n</think>\n\n" + V31, start)
    assert found == {"reasoning": "Hm.", "content": "Sure.", "calls": CALLS}
    assert parser.num_reasoning_tokens > 0
    # R1 behind results of calls: nothing in the prompt, the model opens its reasoning itself.
    found, _ = parse("<think>\nHm.\n</think>\n\nSo.", WITH_CALLS)
    assert found == {"reasoning": "Hm.", "content": "So.", "calls": []}
    found, _ = parse("So <think>", WITH_CALLS)
    assert found["content"] == "So <think>"


def test_broken_calls() -> None:
    begin, call, end = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    sep = "<｜tool▁sep｜>"
    found, parser = parse(f'{begin}{call}f{sep}{{"a": [1', WITH_CALLS, "length")
    assert found["calls"] == [["f", '{"a": [1']] and not parser.tool_calls[0].complete
    found, _ = parse(f"{begin}{call}f{sep}{end}", WITH_CALLS)
    assert found["calls"] == [["f", "{}"]]
    found, _ = parse(f"{begin}{call}function{sep}f{end}", WITH_CALLS)
    assert found["calls"] == [["f", "{}"]]
    found, parser = parse(f"{call}f{sep}{{}}{call}g{sep}{{}}", WITH_CALLS)  # no block, no ends
    assert found["calls"] == [["f", "{}"], ["g", "{}"]]
    found, _ = parse(f"{begin}{call}f", WITH_CALLS)
    assert found["calls"] == [] and found["content"] == ""
    found, _ = parse(f"{V31} more", WITH_CALLS)
    assert found["content"] == "Sure." and found["calls"] == CALLS
    found, _ = parse(f"a{sep}b{end}", WITH_CALLS)
    assert found["content"] == f"a{sep}b{end}"
    found, _ = parse(V31, ParseStart())  # no tools were offered: text
    assert found["content"] == V31 and found["calls"] == []


@given(st.lists(st.sampled_from(["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "f", "\n", "<",
    "<｜tool▁sep｜>", "function", "{}", '{"a": "', "```json\n", "\n```", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>", "</think>", "<think>"]), max_size=14), st.booleans())  # fmt: skip
def test_any_order_of_marks_is_read(parts: list[str], thinking: bool) -> None:
    start = ParseStart(stage="reasoning" if thinking else "content", tool_calls=True)
    found, parser = parse("".join(parts), start)
    assert [c.name for c in parser.tool_calls] == [name for name, _ in found["calls"]]
    assert [c.arguments for c in parser.tool_calls] == [a for _, a in found["calls"]]


# Recognising a format


@pytest.mark.parametrize("family", TEMPLATES)
def test_templates_are_recognised(family: Family, tmp_path: Path) -> None:
    template = TEMPLATES[family]
    assert template_family(template) == family
    tokenizer = cases.published_tokenizer()
    for n, value in enumerate((template, [{"name": "default", "template": template}])):
        directory = tmp_path / str(n)
        directory.mkdir()
        (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
        assert prompt_family(directory, "deepseek_v3", tokenizer) == family
    assert template_family("{{ '[INST] ' + m }}") is None
    (tmp_path / "chat_template.jinja").write_text(template)
    assert prompt_family(tmp_path, "llama", tokenizer) == family


def without(*tokens: str) -> Tokenizer:
    spec = cases.toy_spec()
    for token in spec["added_tokens"]:
        if token["content"] in tokens:
            del spec["model"]["vocab"][token["content"]]
            token["content"] = f"<unused {token['id']}>"
            spec["model"]["vocab"][token["content"]] = token["id"]
    return Tokenizer(spec, "toy")


def test_without_a_template_the_vocabulary_decides(tmp_path: Path) -> None:
    toy, plain = cases.toy_tokenizer(), without("<think>", "</think>")
    published = cases.published_tokenizer()
    expected: list[tuple[str, Tokenizer, Family]] = [
        ("deepseek_v41", toy, "v4.1"),
        ("deepseek_v4", toy, "v4"),
        ("deepseek_v32", plain, "v3.2"),
        ("deepseek_v3", toy, "v3.1"),
        ("deepseek_v3", plain, "v3"),
        ("deepseek_v2", toy, "v2"),
        ("llama", published, "coder"),
        ("llama", toy, "r1"),
        ("llama", plain, "v2"),
    ]
    for model_type, tokenizer, family in expected:
        assert prompt_family(tmp_path, model_type, tokenizer) == family
    assert prompt_family(tmp_path, "llama", toy, "v3") == "v3"
    with pytest.raises(CheckpointError, match=r"is not one of auto, v4\.1"):
        prompt_family(tmp_path, "llama", toy, "chatml")


def test_templates_that_cannot_be_read(tmp_path: Path) -> None:
    assert read_template(tmp_path) is None
    file = tmp_path / "tokenizer_config.json"
    for text in ("{", "[" * 100_000):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json cannot be read"):
            read_template(tmp_path)
    for values in ([], {"chat_template": 3}, {"chat_template": [1, {"name": "other"}]}):
        file.write_text(json.dumps(values))
        assert read_template(tmp_path) is None
    with file.open("wb") as stream:
        stream.truncate((16 << 20) + 1)
    with pytest.raises(CheckpointError, match="is larger than"):
        read_template(tmp_path)
