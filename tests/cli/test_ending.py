"""Commands that are told to end leave nothing behind."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from deepdraft.adapters import environment_build, triton_up
from deepdraft.cli.main import cli

PROGRAM = """
import os, signal, sys, tempfile
from deepdraft.cli.ending import clean_end
with clean_end(), tempfile.TemporaryDirectory(dir=sys.argv[1]):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    finally:
        os.kill(os.getpid(), signal.SIGTERM)  # once more, while it cleans up
"""


def test_folders_go_with_the_first_of_two_signals(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], timeout=60)
    assert done.returncode == 143 and not list(tmp_path.iterdir())


def test_commands_end_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def look(*_: Any, **__: Any) -> dict[str, Any]:
        seen.append(signal.getsignal(signal.SIGTERM))
        return {}

    monkeypatch.setattr(triton_up, "up", look)
    monkeypatch.setattr(environment_build, "create", look)
    ports = [w for p in ("http", "grpc", "metrics") for w in (f"--{p}-port", "0")]
    CliRunner().invoke(cli, ["triton", "up", "OUT", *ports])
    CliRunner().invoke(cli, ["env", "create", "triton", "--json"])
    assert len(seen) == 2 and signal.SIG_DFL not in seen
    assert signal.getsignal(signal.SIGTERM) not in seen
