"""What `export triton` writes and refuses; how an engine is read. Without a Triton server."""

import errno
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from deepdraft.adapters import triton_export
from deepdraft.adapters.triton_export import Export, config_text, read_note, write_repository
from deepdraft.adapters.triton_up import choose_ports
from deepdraft.cli.main import cli
from deepdraft.errors import ConfigError

from .broken import WORDS, Broken, broken_server

URL = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def stream() -> ModuleType:
    """The module of a written repository, loaded by its file."""
    file = triton_export._SOURCES / "engine_stream.py"
    spec = importlib.util.spec_from_file_location("engine_stream", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def engine() -> Iterator[Broken]:
    with broken_server() as server:
        yield server


def test_what_is_written(tmp_path: Path, stream: ModuleType) -> None:
    export = Export(name="m", engine_url=URL, engine="vllm", sampling={"temperature": 0})
    out = write_repository(tmp_path / "a" / "out", export)
    files = sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file())
    assert files == ["deepdraft.json", "m/1/engine_stream.py", "m/1/model.py", "m/config.pbtxt"]
    text = (out / "m" / "config.pbtxt").read_text()
    assert "decoupled: true" in text and "max_batch_size: 0" in text
    assert '"/health"' in text and '{\\"temperature\\": 0}' in text
    assert read_note(out) == export
    with pytest.raises(ConfigError, match="is there already"):
        write_repository(out, export)
    other = Export(name="n", engine_url=URL)
    write_repository(out, other, replace=True)
    assert not (out / "m").exists() and read_note(out) == other
    assert [p.name for p in out.parent.iterdir()] == ["out"], "no work folder is left"


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = write_repository(tmp_path / "out", Export(name="m", engine_url=URL))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(triton_export.shutil, "copyfile", full)
    for out in (old, tmp_path / "new"):
        with pytest.raises(ConfigError, match=f"cannot write {out}: No space left"):
            write_repository(out, Export(name="n", engine_url=URL), replace=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"] and read_note(old).name == "m"


def test_nothing_of_others_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(ConfigError, match="is there already"):
        write_repository(tmp_path, Export(name="m", engine_url=URL), replace=True)
    assert (tmp_path / "mine").read_text() == "x"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"name": "a/b"}, "no name"),
        ({"name": ""}, "no name"),
        ({"engine_url": "ftp://x"}, "no address"),
        ({"engine_url": "http://x:0"}, "no address"),
        ({"engine_url": "http://me:secret@x"}, "DEEPDRAFT_ENGINE_API_KEY"),
        ({"engine_url": None}, "checkpoint or the address"),
        ({"engine_url": None, "checkpoint": "/nowhere"}, "no config.json"),
        ({"engine": "other"}, "not known"),
        ({"deadline_s": 0.0}, "deadline_s"),
        ({"retries": -1}, "retries"),
    ],
)
def test_bad_exports(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Export(**{"name": "m", "engine_url": URL, **given})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 9}', '{"format": 1, "x": 1}'])
def test_bad_notes(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="no model repository"):
        read_note(tmp_path)
    (tmp_path / "deepdraft.json").write_text(text)
    with pytest.raises(ConfigError, match="export it again"):
        read_note(tmp_path)


def test_texts_are_quoted() -> None:
    export = Export(name="m", engine_url=URL, engine_model='a"b\\c\nd')
    assert '"a\\"b\\\\c\\nd"' in config_text(export, URL)


def test_command(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    ok = CliRunner().invoke(
        cli, ["export", "triton", "-", out, "--engine-url", URL, "--name", "x"],
        standalone_mode=False,
    )  # fmt: skip
    assert ok.return_value == 0 and read_note(Path(out)).name == "x"
    bad = ["export", "triton", "-", out + "2", "--engine-url", URL, "--sampling"]
    for text in ("{", "[]"):
        result = CliRunner().invoke(cli, [*bad, text], standalone_mode=False)
        assert isinstance(result.exception, ConfigError) and not Path(out + "2").exists()


def test_ports() -> None:
    import socket

    ports = choose_ports("127.0.0.1", 0, 0, 0)
    assert len({ports.http, ports.grpc, ports.metrics}) == 3
    with pytest.raises(ConfigError, match="must differ"):
        choose_ports("127.0.0.1", ports.http, ports.http, 0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"--grpc-port \d+ is taken"):
            choose_ports("127.0.0.1", 0, taken.getsockname()[1], 0)
    for host in ("203.0.113.7", "::1", "a" * 70):
        with pytest.raises(ConfigError, match="no IPv4 address or name of this machine"):
            choose_ports(host, 8000, 0, 0)


def read(stream: ModuleType, engine: Broken, deadline_s: float = 10.0, **given: Any) -> list[Any]:
    settings = stream.Settings.read({"engine_url": engine.url, "retry_wait_s": "0.01"})
    fields = stream.body(settings, "Hi", None, json.dumps({"max_tokens": 16}))
    return list(stream.Stream(settings, fields, deadline_s, **given).pieces())


def test_reading(stream: ModuleType, engine: Broken) -> None:
    pieces = read(stream, engine)
    assert [p.text for p in pieces] == [*WORDS, ""] and pieces[-1].finish == "stop"
    (whole,) = read(stream, engine, whole=True)
    assert whole.text == "".join(WORDS) and whole.usage["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("mode", "kind", "requests"),
    [
        ("unavailable", "unavailable", 3),
        ("drops", "unavailable", 3),
        ("refuses", "invalid", 1),
        ("error_whole", "internal", 1),
        ("error_first", "internal", 1),
        ("error_inside", "internal", 1),
        ("truncated", "unavailable", 1),
        ("no_json", "internal", 1),
        ("no_choices", "internal", 1),
        ("html", "internal", 1),
        ("endless", "internal", 1),
    ],
)
def test_faults(stream: ModuleType, engine: Broken, mode: str, kind: str, requests: int) -> None:
    engine.mode = mode
    with pytest.raises(stream.Fault) as caught:
        read(stream, engine)
    assert caught.value.kind == kind and len(engine.bodies) == requests


def test_an_engine_that_is_not_there(stream: ModuleType) -> None:
    with broken_server() as gone:
        pass
    with pytest.raises(stream.Fault, match="3 times in a row") as caught:
        read(stream, gone)
    assert caught.value.kind == "unavailable"
    assert not stream.is_ready(stream.Settings(gone.url))


def test_a_cut_ends_at_once(stream: ModuleType, engine: Broken) -> None:
    import threading

    engine.mode = "hangs"
    settings = stream.Settings(engine.url)
    fields = stream.body(settings, "Hi", None, None)
    one = stream.Stream(settings, fields, 10.0)
    threading.Timer(0.2, one.cut, ("cancelled", "gone")).start()
    with pytest.raises(stream.Fault, match="gone") as caught:
        list(one.pieces())
    assert caught.value.kind == "cancelled" and len(engine.bodies) == 1


def test_settings(stream: ModuleType) -> None:
    for bad in ({"retries": "x"}, {"sampling_parameters": "[]"}, {"sampling_parameters": "{"}):
        with pytest.raises(ValueError):
            stream.Settings.read({"engine_url": URL, **bad})
    settings = stream.Settings.read({"engine_url": URL, "sampling_parameters": '{"top_k": 3}'})
    assert stream.body(settings, None, "[]", '{"top_p": 1}')["top_k"] == 3
