"""Which version of a fleet runs: what is kept of it, and when two versions are the same.

Owns: the name of a version, what is written where Ray keeps its own state.
Knows nothing of: Ray, how one version replaces another.
"""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

import deepdraft
from deepdraft import __version__
from deepdraft.errors import ConfigError
from deepdraft.server.fleet_config import FleetFile, RayConfig, Replicas

_MODEL_FILES = ("*.safetensors", "*.json")
_COUNTED = ("count", "min_count", "max_count", "busy", "wait_s", "up_s", "down_s", "fronts")
"""Settings of `replicas` that say how many there are, not what they are."""


@dataclass(frozen=True)
class Deployed:
    """What a fleet runs: kept where its Ray keeps its own state, for the way back."""

    fleet: FleetFile
    name: str
    """Of the version: `version_of` where it was deployed."""
    program: str
    """The deepdraft that deployed it."""

    def encode(self) -> bytes:
        """JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "Deployed":
        """Raises ConfigError."""
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"what the fleet runs was written by another deepdraft ({error}); end it and start "
                "it again"
            ) from None


def code_digest() -> str:
    """SHA-256 over the program's files, as they lie there now."""
    total, root = hashlib.sha256(), Path(deepdraft.__file__).parent
    for file in sorted(root.rglob("*.py")):
        total.update(file.relative_to(root).as_posix().encode() + b"\0")
        total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()


def version_of(fleet: FleetFile) -> str:
    """A name that differs where replicas must be replaced: the program, its settings, the model's
    files as far as this machine has them. Not how many replicas there are."""
    plain = {name: getattr(Replicas(), name) for name in _COUNTED}
    same = replace(fleet, replicas=replace(fleet.replicas, **plain), ray=RayConfig())
    total = hashlib.sha256(msgspec.json.encode(same))
    total.update(bytes.fromhex(code_digest()))
    model = None if fleet.model is None else Path(fleet.model)
    for file in sorted(f for kind in _MODEL_FILES for f in model.glob(kind)) if model else ():
        about = file.stat()
        total.update(f"{file.name} {about.st_size} {about.st_mtime_ns}\n".encode())
    return f"{__version__}-{total.hexdigest()[:16]}"
