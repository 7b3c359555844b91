"""A file for results that cannot be written is refused before anything is measured."""

import os
from pathlib import Path

import pytest

from deepdraft.cli.main import main
from deepdraft.cli.options import OutputFile

COMMANDS = (
    ("bench", "speed", "--out"),
    ("bench", "accept", "--svg"),
    ("bench", "speed", "--html"),
    ("bench", "serve", "--target", "http://127.0.0.1:1", "--out"),
    ("bench", "serve", "--target", "http://127.0.0.1:1", "--html"),
    ("bench", "fleet", "--servers", "1", "--out"),
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("name", ["", "file/x.json", "a\0b"])
def test_it_is_refused_at_once(
    command: tuple[str, ...], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("kept")
    assert main([*command, f"{tmp_path}/{name}"]) == 2
    said = capsys.readouterr().err
    assert command[-1] in said and "cannot be written" in said
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "kept"


def test_what_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    new, old, pipe = tmp_path / "a" / "b" / "new", tmp_path / "old", tmp_path / "pipe"
    old.write_text("kept")
    os.mkfifo(pipe)
    for path in (new, old, pipe, Path("/dev/null")):
        assert OutputFile().convert(str(path), None, None) == str(path)
    assert new.parent.is_dir() and not new.exists() and old.read_text() == "kept"
