"""Where the Ray of a fleet is: its address, the token that it asks for, whether its `up` lives.

Owns: the files of fleets that this user has started, the lock that ends with their process, the
directory around Ray's, the first look at an address.
Knows nothing of: Ray, which needs minutes to say that nothing answers.
"""

import contextlib
import fcntl
import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

from deepdraft.errors import ConfigError
from deepdraft.server.fleet_config import FleetFile

INNER = "r"
"""Of Ray's own directory, short as its sockets' paths are bounded."""
_MOST_TEMPORARY = 20
"""Characters of the path of a temporary directory that leaves room for those."""
_DIAL_S = 5.0
_TRY_S = 1.0
"""So long a lock is asked for: `lives` of another process holds it for a moment."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""A client's first words in HTTP/2, which gRPC is: the preface and empty SETTINGS (RFC 9113)."""
_SETTINGS = 4
"""The kind of frame that a server of HTTP/2 must begin with; its fourth byte."""


def state_file(name: str) -> Path:
    """Where `up` leaves the address of the Ray it started."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "deepdraft" / f"fleet-{name}.json"


def token_file(name: str) -> Path:
    """What lets a process of this user talk to that Ray; mode 0600."""
    return state_file(name).with_suffix(".token")


@contextlib.contextmanager
def held(name: str) -> Generator[None]:
    """While this lasts no other process of this user starts a fleet of this name. Raises
    ConfigError where one runs."""
    file = state_file(name)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(
            f"cannot write to {file.parent}, where a fleet's address is kept ({error.strerror}); "
            "set XDG_STATE_HOME to a directory of yours"
        ) from error
    try:
        until = time.monotonic() + _TRY_S
        while not _locked(lock, fcntl.LOCK_EX):
            if time.monotonic() > until:
                raise ConfigError(f"a fleet {name} runs already: deepdraft fleet down CONFIG")
            time.sleep(0.02)
        yield
    finally:
        os.close(lock)


def lives(name: str) -> bool:
    """Whether the process that started fleet `name` on this machine lives."""
    try:
        lock = os.open(state_file(name).with_suffix(".lock"), os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _locked(lock, fcntl.LOCK_SH)
    finally:
        os.close(lock)


def _locked(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def new_token(name: str) -> Path:
    """Makes a token that nobody else can read; returns its file."""
    token = token_file(name)
    token.unlink(missing_ok=True)
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    return token


def write_state(fleet: FleetFile, address: str) -> None:
    """Tells the user's other processes where the fleet's Ray is."""
    state_file(fleet.name).write_text(json.dumps({"address": address, "url": fleet.url}))


def forget(name: str) -> None:
    """The fleet has ended."""
    state_file(name).unlink(missing_ok=True)
    token_file(name).unlink(missing_ok=True)


def outer_directory(kept: str | None) -> str:
    """A directory that only this user may enter, with Ray's own in it, which Ray opens to all.
    Raises ConfigError."""
    try:
        if kept is None:
            short = len(tempfile.gettempdir()) <= _MOST_TEMPORARY
            return tempfile.mkdtemp(prefix="ddfleet-", dir=None if short else "/tmp")
        Path(kept).mkdir(mode=0o700, parents=True, exist_ok=True)
        Path(kept, INNER).mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"Ray's directory {error.filename or kept} cannot be used ({error.strerror}): choose "
            "another ray.directory"
        ) from error
    return kept


def address_of(fleet: FleetFile) -> str:
    """The Ray on which the fleet runs. Raises ConfigError where there is none."""
    if fleet.ray.address is not None:
        return fleet.ray.address
    try:
        if lives(fleet.name):
            return str(json.loads(state_file(fleet.name).read_text())["address"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"the fleet {fleet.name} is just starting; try again later") from None
    raise ConfigError(
        f"no fleet {fleet.name} was started on this machine by this user: deepdraft fleet up CONFIG"
    )


def check_reached(address: str, *, dial_s: float = _DIAL_S) -> None:
    """Raises ConfigError where nothing at `address` (host:port) speaks gRPC, as every Ray does."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=dial_s) as line:
            if os.environ.get("RAY_USE_TLS", "0") == "1":
                return
            line.sendall(_PREFACE)
            head = b""
            while len(head) < 4 and (more := line.recv(4 - len(head))):
                head += more
    except TimeoutError:
        why = f"no answer within {dial_s:g} s"
    except (OSError, OverflowError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
    else:
        if len(head) == 4 and head[3] == _SETTINGS:
            return
        why = "what listens there is no Ray"
    raise ConfigError(f"no Ray answers at {address}: {why}; `ray status` on its head says where")
