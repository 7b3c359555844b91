"""A server with the bundled model for clients that live in an environment of their own.

`make test-clients` sets that up: DEEPDRAFT_PYTHON is the interpreter that has deepdraft. In
deepdraft's own environment these clients are not installed, and their tests are skipped.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PYTHON = os.environ.get("DEEPDRAFT_PYTHON", sys.executable)


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that is ready."""
    log = tmp_path_factory.mktemp("server") / "log"
    command = [PYTHON, "-m", "deepdraft.cli.main", "serve", "--port", "0"]
    with log.open("w") as stream:
        process = subprocess.Popen(command, stderr=stream, cwd=Path(__file__).resolve().parents[2])
    try:
        end = time.monotonic() + 180
        while "ready after" not in log.read_text():
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        found = re.search(r"running on (http://[0-9.:]+)", log.read_text())
        assert found is not None
        yield found[1]
    finally:
        process.terminate()
        assert process.wait(60) == 0
