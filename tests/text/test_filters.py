"""Stop strings and the JSON filter, whatever the chunks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepdraft.text.filters import JsonFilter, StopMatcher, partial_suffix

CHUNKS = st.lists(st.text("abc", max_size=4), max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


def _first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The slow way: read character by character until the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(CHUNKS, STOPS)
def test_stop_matcher_against_the_slow_way(chunks: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    out = "".join(matcher.push(c) for c in chunks) + matcher.flush()
    assert (out, matcher.matched) == _first_stop("".join(chunks), stops)


@given(CHUNKS, STOPS)
def test_stop_matcher_passes_on_all_it_can(chunks: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = out = ""
    for chunk in chunks:
        text += chunk
        out += matcher.push(chunk)
        if matcher.matched is None:
            held = text[len(out) :]
            assert not held or any(s.startswith(held) and s != held for s in stops)


def test_stop_matcher_is_silent_after_a_match() -> None:
    matcher = StopMatcher(["STOP", "x"])
    assert matcher.push("one ST") == "one "
    assert matcher.push("OP two") == ""
    assert matcher.push("three x") == ""
    assert matcher.flush() == ""
    assert matcher.matched == "STOP"


def test_empty_stop_string() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def test_partial_suffix() -> None:
    assert partial_suffix("ab<", "</think>") == 1
    assert partial_suffix("ab</think", "</think>") == 7
    assert partial_suffix("ab</think>", "</think>") == 0
    assert partial_suffix("", "</think>") == 0


JSON_CASES = [
    ('{"a": 1}', '{"a": 1}'),
    ('Sure: {"a": 1} done', '{"a": 1} done'),
    ("[1, 2]\n", "[1, 2]\n"),
    ('Sure:\n```json\n{"a": 1}\n```\nDone {"b": 1}', '{"a": 1}'),
    ("```\n[1]\n```", "[1]"),
    ("```JSON \n[1]\n```", "[1]"),
    ("```json\n```", ""),
    ('```python\nfoo\n``` {"a": 1}', '{"a": 1}'),
    ('```json\n{"a": "``` x"}\n`', '{"a": "``` x"}\n`'),
    ("no JSON `` here", "no JSON `` here"),
    ("42", "42"),
    ("```js", "```js"),
    ("", ""),
]


@pytest.mark.parametrize(("text", "expected"), JSON_CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_json_filter(text: str, expected: str, size: int) -> None:
    json_filter = JsonFilter()
    out = "".join(json_filter.push(text[i : i + size]) for i in range(0, len(text), size))
    assert out + json_filter.flush() == expected


@given(st.lists(st.sampled_from(["```", "`", "json", "\n", "{", "a", " ", "]"]), max_size=12))
def test_json_filter_does_not_depend_on_chunks(pieces: list[str]) -> None:
    text = "".join(pieces)
    whole, split = JsonFilter(), JsonFilter()
    expected = whole.push(text) + whole.flush()
    assert "".join(split.push(c) for c in text) + split.flush() == expected
