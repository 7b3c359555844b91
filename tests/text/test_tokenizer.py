"""Tokenizer files, encoding of plain text, decoding of streams, the Engram map."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deepdraft.errors import CheckpointError, PromptTooLong, RequestError
from deepdraft.text.tokenizer import Tokenizer, engram_token_map
from tests.text import cases

TEXTS = st.lists(
    st.one_of(st.sampled_from([*cases.CONTROL, "</", "\n", " calls>", "<", ">"]), st.text())
).map("".join)


@given(TEXTS)
def test_plain_text_gives_no_control_token(text: str) -> None:
    tokenizer = cases.toy_tokenizer()
    ids = tokenizer.encode_text(text)
    assert tokenizer.control_ids.isdisjoint(ids)
    assert tokenizer.decode(ids) == text


def test_plain_text_gives_no_control_token_of_the_published_file() -> None:
    tokenizer = cases.published_tokenizer()
    assert len(tokenizer.control_ids) == 1283
    for token_id in sorted(tokenizer.control_ids):
        string = tokenizer.token_string(token_id)
        assert string
        for text in (string, f"a{string}", f" {string}\n", string * 2):
            ids = tokenizer.encode_text(text)
            assert tokenizer.control_ids.isdisjoint(ids), text
            assert tokenizer.decode(ids) == text
        assert tokenizer.encode_with_control(string) == [token_id]


def test_encoding_with_control_tokens() -> None:
    tokenizer = cases.toy_tokenizer()
    user = tokenizer.id_of("<｜User｜>")
    assert user == 7 + cases.CONTROL.index("<｜User｜>")
    assert tokenizer.encode_with_control("a<｜User｜>b") == [
        *tokenizer.encode_text("a"),
        user,
        *tokenizer.encode_text("b"),
    ]
    assert tokenizer.encode_text("") == []
    assert tokenizer.id_of("no such token") is None


@given(st.lists(st.integers(0, 600), max_size=60))
@example([199, 124])  # ED A1
def test_stream_decoder_gives_the_same_text_as_the_library(ids: list[int]) -> None:
    tokenizer = cases.toy_tokenizer()
    known = [i for i in ids if tokenizer.token_string(i) is not None]
    reference = tokenizer._full.decode(known, skip_special_tokens=False)
    assert tokenizer.decode(ids) == reference  # ids without a token stand for nothing
    decoder = tokenizer.incremental()
    streamed = "".join(decoder.push(i) for i in ids)
    # Held back at the end is at most the one incomplete character: a single U+FFFD, or two where
    # its first two bytes begin a surrogate, which Python's decoder waits for.
    assert reference in (streamed, streamed + "\ufffd", streamed + "\ufffd\ufffd")
    if reference == streamed + "\ufffd\ufffd":
        raw = b"".join(map(tokenizer.token_bytes, ids))
        assert raw[-2] == 0xED and 0xA0 <= raw[-1] <= 0xBF
    assert decoder.flush() == ""
    assert decoder.push(tokenizer.encode_text("a")[0]) == "a"


def test_stream_decoder_holds_back_an_incomplete_character() -> None:
    tokenizer = cases.toy_tokenizer()
    decoder = tokenizer.incremental()
    ids = tokenizer.encode_text("中🙂")
    assert len(ids) == 7
    assert [decoder.push(i) for i in ids] == ["", "", "中", "", "", "", "🙂"]


def test_token_bytes() -> None:
    tokenizer = cases.toy_tokenizer()
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode_text("é <"))) == "é <".encode()
    control = tokenizer.id_of("<｜User｜>")
    assert control is not None
    assert tokenizer.token_bytes(control) == "<｜User｜>".encode()
    for unknown in (-1, 0, tokenizer.vocab_size, 10**9):
        assert tokenizer.token_bytes(unknown) == b""
        assert tokenizer.token_string(unknown) is None


@pytest.mark.parametrize("encode", ["encode_text", "encode_with_control"])
def test_lone_surrogates_are_a_request_error(encode: str) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        getattr(cases.toy_tokenizer(), encode)("a\ud800b")


@given(TEXTS, st.integers(0, 40), st.integers(0, 3))
def test_only_text_that_cannot_fit_is_refused_unread(text: str, room: int, before: int) -> None:
    tokenizer = cases.toy_tokenizer()
    num = before + min(map(len, (tokenizer.encode_text(text), tokenizer.encode_with_control(text))))
    try:
        tokenizer.check_fits(text, room, before=before, param="prompt")
    except PromptTooLong as error:
        assert num > room
        assert error.param == "prompt" and f"context is {room}" in error.message
    else:
        assert len(text) <= room * max(len(s) * 3 for s in cases.CONTROL)


def test_text_that_may_shrink_is_never_refused_unread() -> None:
    spec = json.loads((cases.TINY / "tokenizer.json").read_text())
    spec["normalizer"] = {"type": "NFC"}
    Tokenizer(spec, "here").check_fits("a" * 10**6, 1, param="prompt")


def split_by(pattern: str) -> Tokenizer:
    spec = json.loads((cases.TINY / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    steps = [split | {"invert": False}, {**spec["decoder"], "use_regex": False}]
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    return Tokenizer(spec, "here")


def test_a_pattern_that_gives_up_is_a_request_error(capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = split_by("(x+x+)+y")
    assert tokenizer.encode_text("xxxy")
    with pytest.raises(RequestError, match="gave up"):
        tokenizer.encode_text("x" * 60)
    assert tokenizer.encode_text("xxxy")


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    tokenizer = cases.toy_tokenizer()
    gaps, done = [0.0], threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not done.wait(0.001):
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.monotonic()
    tokenizer.encode_text("aB1 _-" * 200_000)
    took = time.monotonic() - start
    done.set()
    thread.join()
    assert len(gaps) > 20 and max(gaps) < took / 2, (max(gaps), took)


def test_engram_map_of_the_golden_tokenizer() -> None:
    tokenizer = Tokenizer.load(cases.TINY)
    expected = json.loads((cases.TINY / "token-map.json").read_text())["token_map"]
    assert tokenizer.vocab_size == len(expected) == 512
    assert engram_token_map(tokenizer) == expected


def test_engram_map_of_the_published_vocabulary() -> None:
    token_map = engram_token_map(cases.published_tokenizer())
    assert len(token_map) == 129_280
    assert max(token_map) + 1 == 99_092
    assert token_map[2] == 2


def test_load_takes_a_directory_or_a_file() -> None:
    for path in (cases.TINY, str(cases.TINY), cases.TINY / "tokenizer.json"):
        assert Tokenizer.load(path).vocab_size == 512


def _write(path: Path, content: bytes | dict[str, Any]) -> Path:
    file = path / "tokenizer.json"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return file


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)


def test_truncated_file(tmp_path: Path) -> None:
    whole = (cases.TINY / "tokenizer.json").read_bytes()
    _write(tmp_path, whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="truncated or corrupt"):
        Tokenizer.load(tmp_path)


def test_file_that_is_not_text(tmp_path: Path) -> None:
    _write(tmp_path, b"\xff\xfe\x00garbage")
    with pytest.raises(CheckpointError, match="not JSON"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "no `model` section"),
        ({"model": {"type": "Unigram", "vocab": []}}, "only BPE"),
        ({"decoder": None}, "ByteLevel"),
        ({"decoder": {"type": "Metaspace"}}, "ByteLevel.*Metaspace"),
        ({"added_tokens": [{"id": "x"}]}, "added_tokens"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}, "not a usable"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}, "no token"),
    ],
)
def test_unusable_files(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    _write(tmp_path, cases.toy_spec() | change)
    with pytest.raises(CheckpointError, match=message) as error:
        Tokenizer.load(tmp_path)
    assert "tokenizer.json" in error.value.message


def test_too_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepdraft.text.tokenizer._MAX_FILE_BYTES", 100)
    _write(tmp_path, b" " * 101)
    with pytest.raises(CheckpointError, match="101 bytes"):
        Tokenizer.load(tmp_path)


def test_file_whose_merges_make_a_control_token_is_refused(tmp_path: Path) -> None:
    spec = cases.toy_spec()
    vocab = spec["model"]["vocab"]
    for left, right in (("<", "a"), ("<a", "b"), ("<ab", ">")):
        vocab[left + right] = max(vocab.values()) + 1
        spec["model"]["merges"].append([left, right])
    spec["pre_tokenizer"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    _write(tmp_path, spec)
    assert vocab["<ab>"] in Tokenizer.load(tmp_path).encode_text("<ab>")
    spec["added_tokens"].append({**spec["added_tokens"][0], "content": "<ab>", "id": vocab["<ab>"]})
    _write(tmp_path, spec)
    with pytest.raises(CheckpointError, match="could forge"):
        Tokenizer.load(tmp_path)


def test_file_whose_added_ids_contradict_its_vocabulary(tmp_path: Path) -> None:
    spec = cases.toy_spec()
    spec["added_tokens"].append({**spec["added_tokens"][0], "content": "<new>", "id": 5000})
    _write(tmp_path, spec)
    with pytest.raises(CheckpointError, match="'<new>' has id 5000"):
        Tokenizer.load(tmp_path)
