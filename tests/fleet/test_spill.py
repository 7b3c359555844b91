"""Which folder a replica keeps conversations in, and what becomes of those of others."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deepdraft.errors import ConfigError
from deepdraft.server import fleet_spill
from deepdraft.server.fleet_spill import SpillFolder

ROOT = str(Path(__file__).parents[2])


def test_each_has_its_own_and_a_free_one_is_taken_again(tmp_path: Path) -> None:
    base = tmp_path / "deep" / "fleet"
    first, second = SpillFolder(base), SpillFolder(base)
    assert [f.path.name for f in (first, second)] == ["replica-0", "replica-1"]
    assert base.stat().st_mode & 0o777 == first.path.stat().st_mode & 0o777 == 0o700
    (first.path / "kept").touch()
    first.release()
    first.release()
    third = SpillFolder(base)
    assert third.path == first.path and (third.path / "kept").exists()
    second.release()
    third.release()


def test_the_folder_of_one_that_was_killed_is_free_at_once(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; "
        "from deepdraft.server.fleet_spill import SpillFolder; "
        f"f = SpillFolder(Path({str(tmp_path)!r})); print(f.path.name, flush=True); time.sleep(600)"
    )
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env={"PYTHONPATH": ROOT}) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"replica-0\n"
        beside = SpillFolder(tmp_path)
        assert beside.path.name == "replica-1", "a living one keeps its folder"
        other.send_signal(signal.SIGKILL)
        other.wait(60)
    after = SpillFolder(tmp_path)
    assert after.path.name == "replica-0"
    beside.release()
    after.release()


def test_what_other_models_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    folder, outside = SpillFolder(tmp_path / "base"), tmp_path / "outside"
    own, old, link = (folder.path / (c * 32) for c in "abc")
    for made in (own, old, outside, folder.path / "notes"):
        made.mkdir()
        (made / "x.ddkv").touch()
    link.symlink_to(outside)
    folder.keep_only(own)
    left = sorted(p.name for p in folder.path.iterdir())
    assert left == ["a" * 32, "c" * 32, "lock", "notes"]
    assert (own / "x.ddkv").exists() and (outside / "x.ddkv").exists()
    folder.release()


def test_what_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"engine\.kv_spill: .*file.* cannot be used"):
        SpillFolder(tmp_path / "file" / "base")
    base = tmp_path / "base"
    (base / "replica-0").mkdir(parents=True)
    os.symlink(tmp_path / "elsewhere", base / "replica-0" / "lock")
    with pytest.raises(ConfigError, match=r"lock cannot be used"):
        SpillFolder(base)
    monkeypatch.setattr(fleet_spill, "MOST_FOLDERS", 1)
    one = SpillFolder(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"all 1 folders in .*other are in use"):
        SpillFolder(tmp_path / "other")
    one.release()
