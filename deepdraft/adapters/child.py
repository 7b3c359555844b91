"""One question to a program that runs in another engine's environment.

Owns: its process (on the leash, so that nothing of it is left), the files by which it is asked and
answers, the reason where it fails. Knows nothing of: engines.

The program gets one argument, a folder: it reads order.json there and writes answer.json.
"""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from deepdraft.errors import EngineError

_LEASH = Path(__file__).with_name("leash.py")
_GRACE_S = 5.0
_MAX_ANSWER = 64 << 20
_MAX_LOG = 4 << 20
_SAID = 3
_MOST_LINE = 400
_PREFIX = re.compile(r"(\(\S+ pid=\d+\) )?([A-Z]+ [\d-]+ [\d:]+ \[[^]]*\] )?")
"""How vLLM begins a line: `(process pid=1) ERROR date time [file:line] `."""
_FRAMES = ("Traceback", "File ", "During handling", "The above")


def ask(
    what: str,
    python: Path,
    program: str,
    order: dict[str, Any],
    *,
    folder: Path,
    environ: dict[str, str],
    timeout_s: float,
) -> dict[str, Any]:
    """The answer. `folder` is empty and the caller's; `what` names the program in messages.

    Raises EngineError with what the program said, or when its time is over.
    """
    (folder / "order.json").write_text(json.dumps(order))
    log, answer = folder / "log", folder / "answer.json"
    leash = [sys.executable, "-I", "-S", str(_LEASH), str(_GRACE_S)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            # -P: beside the program lie modules that a script's path would put first.
            [*leash, str(python), "-P", program, str(folder)],
            stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
            env={**environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise EngineError(f"{what} took more than {timeout_s:g} s and was ended") from error
        finally:
            process.stdin.close()
            process.wait()
    if status or not answer.is_file() or answer.stat().st_size > _MAX_ANSWER:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _MAX_LOG))
            said = file.read().decode("utf-8", "replace")
        raise EngineError(f"{what} failed: {reason(said) or f'status {status}'}")
    return json.loads(answer.read_text())


def reason(log: str) -> str:
    """The exceptions in a log with a line or two of what they say, else its last lines."""
    lines = [_PREFIX.sub("", line).strip()[:_MOST_LINE] for line in log.splitlines()]
    lines = [line for line in lines if line]
    raised = {}
    for i, line in enumerate(lines):
        if line.split(":")[0].endswith(("Error", "Exception")):
            more = itertools.takewhile(lambda text: not text.startswith(_FRAMES), lines[i + 1 :])
            raised[line] = " ".join([line, *itertools.islice(more, 2)])
    return " / ".join(list(raised.values())[:_SAID] or lines[-_SAID:])[:1500]
