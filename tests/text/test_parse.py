"""The output parser: rules, odd output, chunks, and agreement with DeepSeek's own parser."""

import json
import re
from typing import Any

import deepseek_recipe as recipe
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepdraft.text.conversation import Stage
from deepdraft.text.parse import ContentDelta, OutputParser, ParsedCall, ReasoningDelta
from deepdraft.text.prompt import ParseStart
from tests.text import cases

D = "｜DSML｜"
THINKING = ParseStart(stage="reasoning", tool_calls=True)
PLAIN = ParseStart(stage="content", tool_calls=True)


def parameter(name: str, value: str, attributes: str = ' string="true"') -> str:
    return f'<{D} parameter name="{name}"{attributes}>{value}</{D} parameter>\n'


def invoke(name: str, *parameters: str) -> str:
    return f'<{D} invoke name="{name}">\n{"".join(parameters)}</{D} invoke>\n'


def block(*calls: str) -> str:
    return f"<{D} calls>\n{''.join(calls)}</{D} calls>"


def run(text: str, start: ParseStart = PLAIN, reason: Any = "stop") -> tuple[dict, OutputParser]:
    """Parse text whole and by character; both must agree."""
    whole, parser = cases.parse_text([text], start, reason)
    split, other = cases.parse_text(text, start, reason)
    assert whole == split
    assert parser.tool_calls == other.tool_calls
    return whole, parser


def arguments(text: str, reason: Any = "stop") -> list[ParsedCall]:
    return run(text, PLAIN, reason)[1].tool_calls


# Rows of interface.md 2.3 that the vectors do not hold
@pytest.mark.parametrize(
    ("text", "reason", "reasoning", "content", "calls", "finish"),
    [
        (
            "\n\nLet me add.\n</think>\n\nThe sum is 4.\n",
            "stop",
            "Let me add.",
            "The sum is 4.\n",
            [],
            "stop",
        ),
        ("</think>Answer.", "stop", "", "Answer.", [], "stop"),
        ("r</think>a</think>b", "stop", "r", "ab", [], "stop"),
        (
            "r</think>Checking both.\n\n"
            + block(
                invoke("a", parameter("x", "1", ' string="false"')),
                invoke("b", parameter("y", "z")),
            ),
            "stop",
            "r",
            "Checking both.",
            [["a", '{"x": 1}'], ["b", '{"y": "z"}']],
            "tool_calls",
        ),
        ("</think>" + block(invoke("a")) + "after", "stop", "", "", [["a", "{}"]], "tool_calls"),
        (
            f'</think><{D} calls>\n<{D} invoke name="a">\n'
            f'<{D} parameter name="n" string="true">abc',
            "length",
            "",
            "",
            [["a", '{"n": "abc']],
            "length",
        ),
        (f"</think>Hi\n\n<{D} cal", "length", "", "Hi", [], "length"),
        ("</think>Hi\n\n<｜DS", "length", "", "Hi\n\n<｜DS", [], "length"),
        ("a\n</think>b\n</think>\nc", "stop", "a", "b\n\nc", [], "stop"),
        ("r\n\n", "length", "r\n\n", "", [], "length"),
        ("x\n\n" + block(), "stop", "x", "", [], "stop"),
    ],
)
def test_rows(
    text: str, reason: Any, reasoning: str, content: str, calls: list, finish: str
) -> None:
    result, parser = run(text, THINKING, reason)
    assert result == {"reasoning": reasoning, "content": content, "calls": calls}
    assert parser.finish_reason(reason) == finish


def test_continuations_keep_leading_newlines() -> None:
    text = "\n\na</think>\n\nb"
    assert run(text, ParseStart(stage="reasoning_continuation"))[0]["reasoning"] == "\n\na"
    assert run(text, ParseStart(stage="reasoning_continuation"))[0]["content"] == "b"
    assert run("\n b", ParseStart(stage="content_continuation"))[0]["content"] == "\n b"
    assert run("\n b", ParseStart(stage="content"))[0]["content"] == " b"


def test_start_inside_the_block() -> None:
    start = ParseStart(tool_calls=True, in_tool_calls=True)
    result, parser = run(invoke("a", parameter("k", "v")) + f"</{D} calls>", start)
    assert result == {"reasoning": "", "content": "", "calls": [["a", '{"k": "v"}']]}
    assert parser.finish_reason("stop") == "tool_calls"


def test_without_tools_markup_is_text() -> None:
    text = "a\n\n" + block(invoke("a", parameter("k", "v")))
    assert run(text, ParseStart(stage="content"))[0]["content"] == text


@pytest.mark.parametrize("name", ["calls", "tool_calls", "toolcalls", "function_calls", "tool"])
@pytest.mark.parametrize("space", ["", " "])
def test_block_names(name: str, space: str) -> None:
    text = block(invoke("a", parameter("k", "v"))).replace(f"{D} ", f"{D}{space}")
    text = text.replace(f"{space}calls>", f"{space}{name}>")
    assert arguments(text) == [ParsedCall("a", '{"k": "v"}', True)]


# Arguments are always JSON


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("6", 6),
        (" [1, 2]\n", [1, 2]),
        ("null", None),
        ('{"a": "\\u00e9"}', {"a": "é"}),
        ("not json", "not json"),
        ("NaN", "NaN"),
        ("-Infinity", "-Infinity"),
        ("True", "True"),
        ("", ""),
        ("[" * 100_000, "[" * 100_000),
        ("1" * 10_000, "1" * 10_000),
        ("1 2", "1 2"),
        ('"a\nb"', '"a\nb"'),
    ],
)
@pytest.mark.parametrize("attributes", [' string="false"', ""], ids=["false", "missing"])
def test_values_that_are_json_or_not(value: str, expected: object, attributes: str) -> None:
    text = block(invoke("a", parameter("k", value, attributes)))
    parser = OutputParser(PLAIN)
    result = cases.collect([*parser.push_text(text), *parser.finish()])
    (call,) = parser.tool_calls
    assert call.complete
    assert json.loads(call.arguments) == json.loads(result["calls"][0][1]) == {"k": expected}


VALUE = st.text().filter(lambda t: D not in t)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["k", "q", "n m", 'a"b', "é"]),
            VALUE,
            st.sampled_from([' string="true"', ' string="false"', ""]),
        ),
        max_size=4,
    ),
    st.integers(0, 200),
)
def test_complete_calls_are_json(parameters: list[tuple[str, str, str]], cut: int) -> None:
    text = block(invoke("f", *(parameter(*p) for p in parameters)))
    is_cut = cut < len(text)  # also where the model stops by itself in the middle
    result, parser = run(text[:cut] if is_cut else text)
    assert is_cut or len(result["calls"]) == 1
    for (name, streamed), call in zip(result["calls"], parser.tool_calls, strict=True):
        assert (name, call.name, call.complete) == ("f", "f", True)
        values = json.loads(call.arguments)
        assert values == json.loads(streamed)
        if not is_cut:
            expected = {}
            for key, value, attributes in parameters:
                expected[key] = value
                if "true" not in attributes:
                    try:
                        expected[key] = json.loads(value, parse_constant=lambda name: 1 / 0)
                    except (ValueError, ZeroDivisionError):
                        pass
            assert values == expected


def test_repeated_parameter_keeps_the_last_value() -> None:
    text = block(invoke("a", parameter("k", "1"), parameter("j", "2"), parameter("k", "3")))
    result, parser = run(text)
    assert parser.tool_calls == [ParsedCall("a", '{"k": "3", "j": "2"}', True)]
    assert json.loads(result["calls"][0][1]) == {"k": "3", "j": "2"}


def test_attributes_in_another_order() -> None:
    tag = f'<{D} parameter string="false" name="k">1</{D} parameter>'
    assert arguments(block(invoke("a", tag))) == [ParsedCall("a", '{"k": 1}', True)]


def test_names_are_escaped() -> None:
    text = block(invoke("a", parameter('q"r>s', "2", ' string="false"'), parameter("b\\c", "x")))
    (call,) = arguments(text)
    assert json.loads(call.arguments) == {'q"r>s': 2, "b\\c": "x"}


# Broken structure


def test_missing_close_of_a_call() -> None:
    first = f'<{D} invoke name="a">\n' + parameter("k", "1")
    assert arguments(block(first, invoke("b", parameter("k", "2")))) == [
        ParsedCall("a", '{"k": "1"}', True),
        ParsedCall("b", '{"k": "2"}', True),
    ]
    assert arguments(block(first)) == [ParsedCall("a", '{"k": "1"}', True)]


def test_missing_close_of_a_parameter() -> None:
    open_parameter = f'<{D} parameter name="k" string="true">v'
    assert arguments(block(invoke("a", open_parameter))) == [ParsedCall("a", '{"k": "v"}', True)]
    both = open_parameter + f"</{D} calls>"
    assert arguments(f'<{D} calls>\n<{D} invoke name="a">\n' + both) == [
        ParsedCall("a", '{"k": "v"}', True)
    ]


@pytest.mark.parametrize("attributes", [' string="true"', ' string="false"'])
def test_stop_inside_a_call_closes_it_and_length_does_not(attributes: str) -> None:
    text = f'<{D} calls>\n<{D} invoke name="a">\n<{D} parameter name="k"{attributes}>[1, </'
    assert arguments(text, "stop") == [ParsedCall("a", '{"k": "[1, </"}', True)]
    quote = '"' if "true" in attributes else ""
    for reason in ("length", "abort", "error"):
        result, parser = run(text, PLAIN, reason)
        assert parser.tool_calls == [ParsedCall("a", f'{{"k": {quote}[1, </', False)]
        assert result["calls"] == [["a", f'{{"k": {quote}[1, </']]
        assert parser.finish_reason(reason) == reason


def test_call_without_a_block() -> None:
    result, _ = run("Hi\n\n" + invoke("a", parameter("k", "v")))
    assert result == {"reasoning": "", "content": "Hi", "calls": [["a", '{"k": "v"}']]}


@pytest.mark.parametrize("tag", ["foo>", " cats>", "", " ", "calls", " invoked name", "<"])
def test_unknown_tag_is_text(tag: str) -> None:
    text = f"Hi\n\n<{D}{tag} more</think>\n"
    expected = text.replace("</think>", "")
    assert run(text)[0] == {"reasoning": "", "content": expected, "calls": []}


def test_unknown_tag_in_reasoning_stays_reasoning() -> None:
    result, _ = run(f"a\n<{D}x\n</think>\nb", THINKING)
    assert result == {"reasoning": f"a\n<{D}x", "content": "b", "calls": []}


def test_marker_after_an_unknown_tag() -> None:
    result, _ = run(f"a<{D} <" + block(invoke("f"))[1:])
    assert result == {"reasoning": "", "content": f"a<{D} ", "calls": [["f", "{}"]]}


@pytest.mark.parametrize(
    "junk",
    ["junk", "<", f"{D}", f"<{D} other>", f"</{D} other>", f'<{D} invoke name="', "</think>"],
)
def test_junk_between_tags_is_ignored(junk: str) -> None:
    text = block(invoke("a", parameter("k", "v"), junk), junk)
    calls = arguments(text)
    assert calls[0] == ParsedCall("a", '{"k": "v"}', True)


def test_tag_that_never_ends() -> None:
    text = block(f'<{D} invoke name="' + "x" * 5000, invoke("b"))
    assert arguments(text) == [ParsedCall("b", "{}", True)]


def test_nameless_tags() -> None:
    text = block(
        f"<{D} invoke>\n" + parameter("k", "v"), invoke("b", f"<{D} parameter>x</{D} parameter>")
    )
    assert arguments(text) == [ParsedCall("b", "{}", True)]


def test_second_block_is_dropped() -> None:
    text = block(invoke("a")) + "\n" + block(invoke("b")) + "</think>x"
    assert run(text)[0] == {"reasoning": "", "content": "", "calls": [["a", "{}"]]}


def test_json_output() -> None:
    start = ParseStart(stage="reasoning", json_output=True)
    result, _ = run('{r}</think>Here:\n```json\n{"a": 1}\n```\nbye', start)
    assert result == {"reasoning": "{r}", "content": '{"a": 1}', "calls": []}
    result, _ = run("r</think>no, sorry", start)
    assert result["content"] == "no, sorry"


# Token ids


def ids_of(*parts: str) -> list[int]:
    """Ids of the toy tokenizer: control tokens in even parts, plain text in odd ones."""
    tokenizer = cases.toy_tokenizer()
    ids: list[int] = []
    for index, part in enumerate(parts):
        ids += tokenizer.encode_text(part) if index % 2 else tokenizer.encode_with_control(part)
    return ids


def parse_ids(ids: list[int], start: ParseStart = THINKING) -> tuple[dict, OutputParser]:
    whole, parser = cases.parse_ids([ids], start, cases.toy_tokenizer())
    split, other = cases.parse_ids([[i] for i in ids], start, cases.toy_tokenizer())
    assert whole == split
    assert parser.tool_calls == other.tool_calls
    assert parser.num_reasoning_tokens == other.num_reasoning_tokens
    return whole, parser


def test_markers_count_only_as_ids() -> None:
    call = block(invoke("a", parameter("k", "v")))
    result, parser = parse_ids(ids_of("", "r</think>", "</think>", f"c</think>{call}"))
    assert result == {"reasoning": "r</think>", "content": f"c</think>{call}", "calls": []}
    assert parser.num_reasoning_tokens == len(ids_of("r", "</think>"))
    value = f"</{D} parameter></think>"
    head = f'</think><{D} calls>\n<{D} invoke name="a">\n<{D} parameter name="k" string="true">'
    tail = f"</{D} parameter>\n</{D} invoke>\n</{D} calls>"
    result, parser = parse_ids(ids_of(head, value, tail))
    assert [json.loads(c.arguments) for c in parser.tool_calls] == [{"k": value}]


def test_end_of_sentence_is_skipped() -> None:
    ids = ids_of("r</think>abc<｜end▁of▁sentence｜>")
    assert parse_ids(ids)[0] == {"reasoning": "r", "content": "abc", "calls": []}


def test_other_control_tokens_are_text() -> None:
    assert parse_ids(ids_of("</think>a<｜User｜><think>"))[0]["content"] == "a<｜User｜><think>"


def test_character_split_over_tokens() -> None:
    tokenizer = cases.toy_tokenizer()
    parser = OutputParser(PLAIN, tokenizer)
    deltas = [parser.push([i]) for i in tokenizer.encode_text("é中")]
    assert deltas == [[], [ContentDelta("é")], [], [], [ContentDelta("中")]]
    parser.push(tokenizer.encode_text("中")[:2])
    assert parser.finish() == []


def test_reasoning_tokens_stop_at_the_marker() -> None:
    tokenizer = cases.toy_tokenizer()
    parser = OutputParser(THINKING, tokenizer)
    parser.push(tokenizer.encode_text("abc\n"))
    assert parser.num_reasoning_tokens == 4
    parser.push(ids_of("</think>xyz"))
    assert parser.num_reasoning_tokens == 4


def test_push_joins_deltas_of_one_kind() -> None:
    parser = OutputParser(THINKING, cases.toy_tokenizer())
    assert parser.push(ids_of("abc</think>def")) == [ReasoningDelta("abc"), ContentDelta("def")]


def test_push_needs_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        OutputParser(PLAIN).push([1])


# Chunks, and DeepSeek's own parser

PIECES = [
    *("a", "b ", "\n", "\n\n", "<", "</", "中", '"', "{", "</think>", "<think>", D, " calls>", ">"),
    *(f"<{D} calls>\n", f"<{D}tool_calls>\n", f'<{D} invoke name="f">\n', f"</{D} invoke>\n"),
    *(f'<{D} parameter name="k" string="true">', f'<{D} parameter name="j" string="false">'),
    *(f"</{D} parameter>\n", f"</{D} calls>", f"<{D}", f"</{D}"),
]
OUTPUT = st.lists(st.sampled_from(PIECES), max_size=25)
STAGES: list[Stage] = ["reasoning", "reasoning_continuation", "content", "content_continuation"]
START = st.builds(
    ParseStart,
    stage=st.sampled_from(STAGES),
    tool_calls=st.booleans(),
    in_tool_calls=st.booleans(),
    json_output=st.booleans(),
)


@given(OUTPUT, START, st.sampled_from(["stop", "length"]), st.data())
def test_text_chunks_do_not_matter(
    pieces: list[str], start: ParseStart, reason: str, data: st.DataObject
) -> None:
    text = "".join(pieces)
    whole, parser = cases.parse_text([text], start, reason)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    split, other = cases.parse_text(chunks, start, reason)
    assert split == whole
    assert other.tool_calls == parser.tool_calls


@given(OUTPUT, START, st.sampled_from(["stop", "length"]), st.data())
def test_id_chunks_do_not_matter(
    pieces: list[str], start: ParseStart, reason: str, data: st.DataObject
) -> None:
    tokenizer = cases.toy_tokenizer()
    spelled = data.draw(st.booleans())
    ids = [
        i
        for p in pieces
        for i in (tokenizer.encode_text(p) if spelled else tokenizer.encode_with_control(p))
    ]
    whole, parser = cases.parse_ids([ids], start, tokenizer, reason)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    chunks = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    split, other = cases.parse_ids(chunks, start, tokenizer, reason)
    assert split == whole
    assert other.tool_calls == parser.tool_calls
    assert other.num_reasoning_tokens == parser.num_reasoning_tokens


_RECIPE_STAGES = {
    "reasoning": recipe.ThinkingInitialStage.ReasoningStart,
    "reasoning_continuation": recipe.ThinkingInitialStage.ReasoningContinuation,
    "content_continuation": recipe.ThinkingInitialStage.ContentContinuation,
    "content": None,
}


def recipe_parse(text: str, start: ParseStart) -> dict[str, Any]:
    """The same answer through DeepSeek's own stream parser, cut by the length limit."""
    request = recipe.ConversationRequest(
        recipe.Conversation([recipe.UserMessage("x")]), recipe.ModelVersion.DeepseekV41Flash
    )
    processor = recipe.StreamProcessor(
        recipe.ChatCompletionRequest.chunk_generator(request, "id", "model"),
        recipe.ParsingOptions(
            parse_tool_calls=start.tool_calls,
            thinking_initial_stage=_RECIPE_STAGES[start.stage],
        ),
    )
    chunks = processor.push(recipe.InferenceChunk.ready())
    chunks += processor.push(recipe.InferenceChunk.text(text, 1))
    chunks += processor.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Length))
    chunks += processor.finish()
    response = recipe.ChatCompletionResponse("id", "model", 0, 0, 0)
    for chunk in chunks:
        response.accumulate(chunk)
    message = json.loads(response.to_json())["choices"][0]["message"]
    return {
        "reasoning": message.get("reasoning_content") or "",
        "content": message.get("content") or "",
        "calls": [
            [c["function"]["name"], c["function"]["arguments"]]
            for c in message.get("tool_calls") or []
        ],
    }


PLAIN_TEXT = st.lists(
    st.sampled_from(["a", "b\n", "\n", "\n\n", " ", "<", "</", "é", "</think>", "<think>", "{", D]),
    max_size=8,
).map(lambda pieces: "".join(pieces).replace(f"<{D}", ""))
GOOD_PARAMETER = st.one_of(
    st.builds(
        lambda value: (value, ' string="true"'),
        PLAIN_TEXT.map(lambda t: t.replace(D, "")),
    ),
    st.sampled_from(["1", "[1, 2]", "null", '{"a": "\\u00e9"}']).map(
        lambda value: (value, ' string="false"')
    ),
)


@given(
    PLAIN_TEXT,
    st.lists(st.lists(GOOD_PARAMETER, max_size=3), max_size=3),
    st.sampled_from(["", "after", "\n"]),
    st.sampled_from(STAGES),
    st.booleans(),
    st.booleans(),
)
def test_well_formed_answers_as_in_deepseek_recipe(
    text: str,
    calls: list[list[tuple[str, str]]],
    after: str,
    stage: Stage,
    tools: bool,
    v4: bool,
) -> None:
    if calls:
        text += block(
            *(
                invoke(f"f{n}", *(parameter(f"k{i}", *p) for i, p in enumerate(parameters)))
                for n, parameters in enumerate(calls)
            )
        )
        if v4:
            text = text.replace(f"{D} ", D).replace(f"{D}calls", f"{D}tool_calls")
        text += after
    # Before a marker recipe keeps a newline that follows a `<`; we drop all newlines there.
    text = re.sub(r"(</?)+(?=\n)", "", text)
    start = ParseStart(stage=stage, tool_calls=tools)
    assert run(text, start, "length")[0] == recipe_parse(text, start)
