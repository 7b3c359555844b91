"""transformers' `generate` as a target of `bench serve`: hf:CHECKPOINT.

Owns: the child's process. Knows nothing of: what it answers (`serve_hf_child`), loads.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator
from pathlib import Path

from deepdraft.errors import ConfigError

PREFIX = "hf:"
_CHILD = Path(__file__).with_name("serve_hf_child.py")
_LOAD_S = 600.0
_END_S = 10.0


@contextlib.contextmanager
def served(directory: Path, python: str | None) -> Generator[tuple[str, str]]:
    """URL and name of the engine, while the block runs. Raises ConfigError where it cannot be had.

    `python`: an interpreter with torch, transformers and tokenizers [ours].
    """
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{PREFIX}{directory} is no checkpoint directory: it has no config.json")
    command = python or sys.executable
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="deepdraft-hf-"))
        wrong = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
        # Run from a copy: beside the original lie modules that a script's path would put first.
        child = shutil.copy(_CHILD, folder)
        try:
            process = subprocess.Popen(
                [command, "-W", "ignore", child, str(directory.resolve()), directory.name],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=wrong, text=True,
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(f"cannot start {command}: {error.strerror}") from error
        assert process.stdin is not None and process.stdout is not None
        late = threading.Timer(_LOAD_S, process.kill)
        late.start()
        try:
            line = process.stdout.readline()
            late.cancel()
            if not line:
                wrong.seek(0)
                raise ConfigError(_why(command, wrong.read()))
            about = json.loads(line)
            yield f"http://127.0.0.1:{about['port']}", about["engine"]
        finally:
            late.cancel()
            process.stdin.close()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def _why(python: str, text: str) -> str:
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "it ended")
    advice = ""
    if "No module named" in last:
        advice = "; give an interpreter that has transformers with --reference-python"
    return f"transformers cannot serve this, run by {python}: {last[:600]}{advice}"
