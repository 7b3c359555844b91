"""`deepdraft kv`: a fleet's files, stored conversations, counters."""

import json
import os
from pathlib import Path

import pytest

from deepdraft.cli.main import main
from tests.kv.conftest import text
from tests.kv.test_faults import Kept
from tests.server.conftest import Live


def test_init_fleet_makes_files_and_adds_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cryptography")
    place = tmp_path / "fleet"
    assert main(["kv", "init-fleet", str(place), "--node", "a", "--host", "127.0.0.1"]) == 0
    assert f"a: --kv-files {place / 'nodes' / 'a'}" in capsys.readouterr().out
    ca = (place / "ca.pem").read_bytes()
    assert main(["kv", "init-fleet", str(place), "--node", "b"]) == 0
    assert (place / "ca.pem").read_bytes() == ca
    names = {f.name for f in (place / "nodes" / "b").iterdir()}
    assert names == {"ca.pem", "cert.pem", "key.pem", "manifest.key"}
    capsys.readouterr()
    assert main(["kv", "init-fleet", str(place), "--node", "b"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["kv", "init-fleet", str(place)]) == 2  # a node is needed


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A directory with two stored conversations."""
    kept = Kept(spill=tmp_path / "spill")
    for seed in (1, 2):
        kept.store(text(seed, 30 + seed))
    kept.cache.close()
    return tmp_path / "spill"


def test_inspect_shows_sizes_and_no_tokens(
    stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kv", "inspect", "--json", str(stored)]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(s["tokens"] for s in shown) == [31, 32]
    assert all(s["exact"] and s["block_tokens"] == 8 and s["format"] == "f32" for s in shown)
    assert main(["kv", "inspect", shown[0]["file"]]) == 0
    out = capsys.readouterr().out
    assert str(shown[0]["tokens"]) in out and str(text(1, 31)[:3])[1:-1] not in out


def test_verify_finds_one_damaged_byte(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv", "verify", str(stored)]) == 0
    assert "2 whole, 0 damaged" in capsys.readouterr().out
    file = sorted(stored.rglob("*.ddkv"))[0]
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)
    assert main(["kv", "verify", str(stored)]) == 1
    out = capsys.readouterr().out
    assert "1 whole, 1 damaged" in out and "is damaged" in out and str(file) in out


def test_a_file_that_is_no_snapshot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.ddkv").write_text("hello")
    assert main(["kv", "inspect", str(tmp_path / "x.ddkv")]) == 2
    assert "no deepdraft snapshot" in capsys.readouterr().err
    assert main(["kv", "inspect", str(tmp_path / "nowhere.ddkv")]) == 2
    assert "nowhere.ddkv cannot be read" in capsys.readouterr().err


def test_what_cannot_be_read_does_not_hide_the_rest(
    stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (stored / "a.ddkv").write_text("hello")
    (stored / "b.ddkv").mkdir()
    (stored / "c.ddkv").symlink_to(stored / "nowhere")
    os.mkfifo(stored / "d.ddkv")  # opening it would wait for a writer
    assert main(["kv", "inspect", "--json", str(stored)]) == 2
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2 and len(err.splitlines()) == 4
    for line, name in zip(err.splitlines(), "abcd", strict=True):
        assert f"{name}.ddkv" in line
    assert main(["kv", "verify", str(stored)]) == 1
    assert "2 whole, 4 damaged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--node", "a", "--node", "a"], "named twice"),
        (["--node", "a", "--host", "ü.example"], "international names as xn--"),
        (["--node", "a", "--host", "x\ny"], "a host is an IP address or a name"),
        (["--node", "a", "--host", ""], "a host is an IP address or a name"),
        (["--node", "../a"], "a node's name"),
    ],
)
def test_init_fleet_refuses_before_it_makes_anything(
    options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cryptography")
    assert main(["kv", "init-fleet", str(tmp_path / "f"), *options]) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "f").exists()


@pytest.mark.parametrize("key", [b"", b"junk", b"-----BEGIN PRIVATE KEY-----\nAAAA\n"])
def test_an_authority_whose_key_is_damaged(
    key: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cryptography")
    (tmp_path / "ca.key").write_bytes(key)
    assert main(["kv", "init-fleet", str(tmp_path), "--node", "a"]) == 2
    assert "ca.key holds no private key" in capsys.readouterr().err
    assert not (tmp_path / "nodes").exists()


@pytest.mark.parametrize("url", ["http://h:99999", "http://[bad", "http://h:x"])
def test_stats_of_no_address(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv", "stats", url]) == 2
    assert "is no address" in capsys.readouterr().err


def test_stats_of_a_running_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.server.toy import Toy

    toy = Toy(tmp_path, server={"port": 0})
    live = Live(toy)
    live.start()
    url = live.url
    try:
        assert toy.service.wait(30)
        assert main(["kv", "stats", url]) == 0
        assert "keeps no conversations" in capsys.readouterr().out
        engine = toy.service._engine
        assert engine is not None
        engine.counters.add("kv_hits", 7)
        assert main(["kv", "stats", url]) == 0
        assert capsys.readouterr().out.split() == ["hits", "7"]
    finally:
        live.stop()
    assert main(["kv", "stats", url]) == 2
    assert "no counters from" in capsys.readouterr().err
    assert main(["kv", "stats", "ftp://x"]) == 2
    assert "no http or https address" in capsys.readouterr().err
