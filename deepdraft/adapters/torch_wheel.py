"""Which wheel of torch an environment gets: a file that is there, never a silent download.

Owns: the order in which places are looked at, the choice of a file by its name.
Knows nothing of: installing.

A resolver that is left alone takes torch from the public index: a CUDA build of several GB.
"""

import os
import re
import subprocess
import sys
import sysconfig
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deepdraft.adapters.environments import Environment
from deepdraft.errors import ConfigError

_NAME = re.compile(
    r"torch-(?P<version>[^-]+)-(?P<python>[^-]+)-(?P<abi>[^-]+)-(?P<platform>[^-]+)\.whl"
)
_PIP_S = 60.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where wheels may lie, and who said so."""

    path: Path
    source: str


def find_wheel(environment: Environment, given: str | None, python: str) -> Path:
    """The wheel of the environment's torch for `python` ("3.11").

    `given`: --torch, a wheel or a directory. Raises ConfigError that says which build is needed.
    """
    wanted = environment.torch
    assert wanted is not None
    looked = []
    for place in [Place(Path(given), "--torch")] if given else places():
        looked.append(f"{place.path} ({place.source})")
        if place.path.is_file():
            if fits(place.path.name, wanted, python):
                return place.path.absolute()
            continue
        for file in sorted(place.path.glob("torch-*.whl")):
            if fits(file.name, wanted, python):
                return file.absolute()
    tag = "cp" + python.replace(".", "")
    raise ConfigError(
        f"{environment.name} needs torch {wanted}, a wheel such as torch-{wanted}-{tag}-{tag}-"
        f"{_platform()}.whl, and there is none in "
        f"{'; '.join(looked) or 'any place (no find-links are configured)'}. Give it with "
        "--torch WHEEL|DIR, or name its folder in PIP_FIND_LINKS. PyTorch's makers publish CPU "
        "builds on their own wheel index, by platform (their installation page: pip, compute "
        "platform CPU); the public index has CUDA builds of several GB"
    )


def fits(name: str, wanted: str, python: str) -> bool:
    """Whether a file name is a wheel of that version, for that Python, for this machine."""
    match = _NAME.fullmatch(urllib.parse.unquote(name))
    if match is None or match["version"] != wanted:
        return False
    if match["python"] != "cp" + python.replace(".", ""):
        return False
    machine = sysconfig.get_platform().partition("-")[2].rpartition("-")[2]
    return sys.platform in match["platform"] and match["platform"].endswith(machine)


def _platform() -> str:
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def places() -> list[Place]:
    """Local folders of PIP_FIND_LINKS, UV_FIND_LINKS and pip's configuration, in that order."""
    found = []
    for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS"):
        found += [Place(path, name) for path in _local(os.environ.get(name, ""))]
    if not found:
        found = [Place(path, "pip's configuration") for path in _local(pip_setting("find-links"))]
    return found


def _local(text: str) -> Iterator[Path]:
    """Folders among links; addresses of other machines are left out."""
    for link in re.split(r"[\s,]+", text.strip()):
        if link.startswith("file:"):
            yield Path(urllib.request.url2pathname(urllib.parse.urlsplit(link).path))
        elif link and "://" not in link:
            yield Path(link)


def pip_setting(name: str) -> str:
    """A setting of pip, from any of its files; empty where there is none."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"],
            capture_output=True, text=True, timeout=_PIP_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    values = []
    for line in done.stdout.splitlines():
        key, equals, value = line.partition("=")
        if equals and key in (f"global.{name}", f"install.{name}", f":env:.{name}"):
            values.append(value.strip().strip("'\""))
    return " ".join(values)
