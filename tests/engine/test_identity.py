"""The fingerprint of stored state: every field counts, unchanged files are read once."""

import json
from pathlib import Path
from typing import Any

import pytest

from deepdraft.engine import identity
from deepdraft.engine.identity import files_digest, fingerprint_fields
from deepdraft.kv.snapshot import fingerprint


class Fake:
    device, block_size, max_step_rows = "cpu", 5, 64


def fields(**changes: Any) -> dict[str, str | int | bool]:
    known: dict[str, Any] = {"numerics": "exact", "prefill": "full", "weights": "w", **changes}
    return fingerprint_fields(Fake(), **known)


def test_each_field_makes_another_fingerprint() -> None:
    own = fields()
    prints = {fingerprint(own)}
    for name, value in own.items():
        other = not value if isinstance(value, bool) else f"{value}x"
        prints.add(fingerprint({**own, name: other}))
    assert len(prints) == len(own) + 1
    assert fields(numerics="quant") != own != fields(prefill="encoder")
    assert {"weights", "numerics", "prefill", "torch", "device", "threads", "program"} <= set(own)


def test_another_state_of_the_program_is_another_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = fields()["program"]
    for package in identity._PROGRAM:
        (tmp_path / package / "inner").mkdir(parents=True)
    source = tmp_path / "ops" / "inner" / "sums.py"
    found = set()
    for text in ("a + b", "b + a"):
        source.write_text(text)
        monkeypatch.setattr(identity, "__file__", str(tmp_path / "engine" / "identity.py"))
        found.add(identity.program_digest.__wrapped__(*identity._PROGRAM))
    assert len(found) == 2 and not any(one in str(own) for one in found)


def model(directory: Path) -> Path:
    directory.mkdir()
    (directory / "a.safetensors").write_bytes(b"weights" * 1000)
    (directory / "config.json").write_text("{}")
    (directory / "notes.txt").write_text("not of the model")
    return directory


def test_every_byte_and_name_counts(tmp_path: Path) -> None:
    path = model(tmp_path / "m")
    own = files_digest(path)
    (path / "notes.txt").write_text("changed")
    assert files_digest(path) == own
    raw = bytearray((path / "a.safetensors").read_bytes())
    raw[3500] ^= 1  # neither the head nor the end of the file
    (path / "a.safetensors").write_bytes(raw)
    changed = files_digest(path)
    (path / "a.safetensors").rename(path / "b.safetensors")
    (path / "tokenizer.json").write_text("{}")
    assert len({own, changed, files_digest(path)}) == 3


def test_digests_are_remembered_until_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, memory = model(tmp_path / "m"), tmp_path / "memory"
    memory.mkdir()
    own = files_digest(path, memory)
    assert own == files_digest(path)
    assert len(json.loads((memory / identity.DIGESTS_FILE).read_text())) == 2

    def unread(file: Path) -> str:
        raise AssertionError(f"{file} is read again")

    monkeypatch.setattr(identity, "file_digest", unread)
    assert files_digest(path, memory) == own
    (path / "a.safetensors").write_bytes(b"weights" * 1001)
    with pytest.raises(AssertionError, match="read again"):
        files_digest(path, memory)


@pytest.mark.parametrize("junk", ["", "[]", "{", '{"x": 3}', '{"x": [1, 2]}'])
def test_a_damaged_memory_of_digests_is_ignored(junk: str, tmp_path: Path) -> None:
    path, memory = model(tmp_path / "m"), tmp_path / "memory"
    memory.mkdir()
    (memory / identity.DIGESTS_FILE).write_text(junk)
    assert files_digest(path, memory) == files_digest(path)


def test_a_memory_that_cannot_be_written(tmp_path: Path) -> None:
    path = model(tmp_path / "m")
    assert files_digest(path, tmp_path / "nowhere") == files_digest(path)
