"""Where a fleet's own Ray is found, one `up` at a time, addresses where there is no Ray; without
Ray."""

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator
from pathlib import Path

import pytest

from deepdraft.cli.main import main
from deepdraft.errors import ConfigError
from deepdraft.server import fleet_home, fleet_ray
from deepdraft.server.fleet_config import FleetFile, RayConfig
from deepdraft.server.fleet_home import (
    address_of,
    check_reached,
    forget,
    held,
    lives,
    new_token,
    outer_directory,
)

FLEET = FleetFile()
SETTINGS_FRAME = bytes((0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 5, 0, 0, 64, 0))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(fleet_home, "_TRY_S", 0.05)
    return tmp_path / "deepdraft"


def test_a_fleet_is_found_while_its_process_lives() -> None:
    with pytest.raises(ConfigError, match="no fleet deepdraft was started"):
        address_of(FLEET)
    with held("deepdraft"):
        with pytest.raises(ConfigError, match="just starting"):
            address_of(FLEET)
        fleet_home.write_state(FLEET, "127.0.0.1:1234")
        assert address_of(FLEET) == "127.0.0.1:1234"
        assert not lives("other")
        with pytest.raises(ConfigError, match="a fleet deepdraft runs already"), held("deepdraft"):
            pass
        with held("other"):
            assert lives("other")
    with pytest.raises(ConfigError, match="no fleet deepdraft was started"):
        address_of(FLEET)
    assert address_of(FleetFile(ray=RayConfig(address="a:1"))) == "a:1"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"address": 3}', "\ufffd", '{"url": "x"}'])
def test_a_state_that_cannot_be_read(text: str, home: Path) -> None:
    with held("deepdraft"):
        fleet_home.state_file("deepdraft").write_text(text)
        if text == '{"address": 3}':
            assert address_of(FLEET) == "3"
            return
        with pytest.raises(ConfigError, match="just starting"):
            address_of(FLEET)


def test_the_lock_of_one_that_was_killed_is_free(home: Path) -> None:
    code = (
        "from deepdraft.server.fleet_home import held, new_token\n"
        "with held('deepdraft'):\n    new_token('deepdraft'); print('held', flush=True); input()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"held\n"
    assert lives("deepdraft")
    child.kill()
    child.communicate()
    with held("deepdraft"):
        token = new_token("deepdraft")
        assert token.stat().st_mode & 0o777 == 0o600 and len(token.read_text()) == 64
    forget("deepdraft")
    forget("deepdraft")
    assert [file.name for file in home.iterdir()] == ["fleet-deepdraft.lock"]


def test_a_second_up_touches_nothing_of_the_first(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also while the first one still starts: it has no address and listens nowhere."""
    monkeypatch.setattr(fleet_ray, "check_ray", lambda: None)
    (tmp_path / "fleet.toml").write_text("")
    with held("deepdraft"):
        token = new_token("deepdraft").read_text()
        assert main(["fleet", "up", str(tmp_path / "fleet.toml")]) == 2
        said = capsys.readouterr().err
        assert said == "Error: a fleet deepdraft runs already: deepdraft fleet down CONFIG\n"
        assert fleet_home.token_file("deepdraft").read_text() == token


def test_a_state_directory_that_is_a_file(home: Path) -> None:
    home.write_text("")
    with pytest.raises(ConfigError, match="set XDG_STATE_HOME"), held("deepdraft"):
        pass


@contextlib.contextmanager
def listener(says: bytes | None) -> Generator[str]:
    """Something that answers everybody with these bytes; None: with nothing, and stays."""
    over = threading.Event()

    def serve() -> None:
        line, _ = server.accept()
        with line:
            line.recv(100)
            if says is None:
                over.wait()
            else:
                line.sendall(says)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        over.set()
        thread.join()


def test_an_address_where_there_is_no_ray_is_named_at_once() -> None:
    with listener(SETTINGS_FRAME) as address:
        check_reached(address)
    for says in (b"HTTP/1.1 400 Bad Request\r\n\r\n", b"-ERR\r\n", b"", b"\0\0"):
        with listener(says) as address, pytest.raises(ConfigError, match="is no Ray"):
            check_reached(address)
    with listener(None) as address, pytest.raises(ConfigError, match=f"{address}: no answer"):
        check_reached(address, dial_s=0.1)
    with pytest.raises(ConfigError, match=f"no Ray answers at {address}: Connection refused"):
        check_reached(address)
    for nonsense in ("127.0.0.1:99999", "a..b:1", "[::1:2"):
        with pytest.raises(ConfigError, match="no Ray answers at"):
            check_reached(nonsense)


def test_commands_on_a_cluster_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fleet_ray, "check_ray", lambda: None)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        file = tmp_path / "fleet.toml"
        file.write_text(f"[ray]\naddress = {json.dumps(address)}\n")
        for words in (["up"], ["status"], ["drain"], ["drain", "x"], ["down"], ["upgrade"]):
            command, *rest = words
            assert main(["fleet", command, str(file), *rest]) == 2
            assert f"no Ray answers at {address}" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://h", "redis:/x", "redis://h:port", "h:6379", "/tmp/s"])
def test_an_address_that_is_no_directory_is_refused_without_its_password(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fleet_ray, "check_ray", lambda: None)
    file = tmp_path / "fleet.toml"
    file.write_text(f'[fleet]\ndirectory = "{url.replace("//", "//:hidden@")}"\n')
    for command in ("up", "upgrade"):
        assert main(["fleet", command, str(file)]) == 2
        said = capsys.readouterr().err
        assert "fleet.directory must be an address such as redis://" in said
        assert "hidden" not in said


def test_nobody_else_enters_the_directory_of_rays_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray opens its own to all users of the machine: logs and sockets lie in it."""
    made = Path(outer_directory(None))
    assert made.stat().st_mode & 0o777 == 0o700
    made.rmdir()
    kept = tmp_path / "kept"
    for _ in range(2):
        assert outer_directory(str(kept)) == str(kept)
        assert kept.stat().st_mode & 0o777 == 0o700 and (kept / fleet_home.INNER).is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"choose another ray\.directory"):
        outer_directory(str(tmp_path / "file"))
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    made = Path(outer_directory(None))
    assert len(str(made)) <= 36, "the paths of sockets have room for no more"
    made.rmdir()
