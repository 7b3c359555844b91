"""Where the engines of a fleet can be found, and the secret by which its processes know each other.

Owns: the entries in Ray's key-value store (its control service keeps it, also over a restart of
every process but that one).
Knows nothing of: connections. Ray is imported by the first call; every call may take a round trip.
"""

import importlib
import secrets
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from msgspec import Struct

_NAMESPACE = b"deepdraft-fleet"


class Entry(Struct, frozen=True):
    """One engine."""

    label: str
    incarnation: str
    host: str
    port: int


class Registry(Protocol):
    """What fronts and engines need of a place that all of them reach."""

    def put(self, entry: Entry) -> None:
        """An engine can be found."""
        ...

    def drop(self, incarnation: str) -> None:
        """It cannot any more."""
        ...

    def entries(self) -> list[Entry]:
        """All that can be found."""
        ...

    def secret(self) -> bytes:
        """The fleet's own, made by whoever asks first."""
        ...


class RayRegistry:
    """The entries of fleet `name` on the Ray that this process belongs to."""

    def __init__(self, name: str) -> None:
        self._seats = f"{name}/engine/".encode()
        self._secret = f"{name}/secret".encode()
        self._deployed = f"{name}/deployed".encode()
        self._leaving = f"{name}/leaving/".encode()

    def put(self, entry: Entry) -> None:
        """Adds or replaces."""
        key = self._seats + entry.incarnation.encode()
        self._kv("put")(key, msgspec.json.encode(entry), overwrite=True, namespace=_NAMESPACE)

    def drop(self, incarnation: str) -> None:
        """Unknown ones are fine."""
        self._kv("del")(self._seats + incarnation.encode(), namespace=_NAMESPACE)

    def entries(self) -> list[Entry]:
        """All of them; what cannot be read is left out."""
        found = []
        for key in self._kv("list")(self._seats, namespace=_NAMESPACE):
            value = self._kv("get")(key, namespace=_NAMESPACE)
            try:
                found.append(msgspec.json.decode(value or b"", type=Entry))
            except msgspec.DecodeError:
                continue
        return found

    def secret(self) -> bytes:
        """Of this fleet, until `clear`."""
        # Without overwriting, so that of two that ask at once both get the first one's.
        made = secrets.token_hex(32).encode()
        self._kv("put")(self._secret, made, overwrite=False, namespace=_NAMESPACE)
        return bytes(self._kv("get")(self._secret, namespace=_NAMESPACE))

    def clear(self) -> None:
        """Forgets engines and secret: before a fleet starts and after it has ended."""
        lists = (self._kv("list")(k, namespace=_NAMESPACE) for k in (self._seats, self._leaving))
        for key in (self._secret, self._deployed, *(key for keys in lists for key in keys)):
            self._kv("del")(key, namespace=_NAMESPACE)

    def keep(self, data: bytes) -> None:
        """What the fleet runs, for whoever changes it."""
        self._kv("put")(self._deployed, data, overwrite=True, namespace=_NAMESPACE)

    def kept(self) -> bytes | None:
        """What was kept last; None: nothing."""
        found = self._kv("get")(self._deployed, namespace=_NAMESPACE)
        return None if found is None else bytes(found)

    def ask_to_leave(self, incarnation: str) -> None:
        """The engine is to leave when it looks next."""
        key = self._leaving + incarnation.encode()
        self._kv("put")(key, b"1", overwrite=True, namespace=_NAMESPACE)

    def asked_to_leave(self, incarnation: str) -> bool:
        """Whether the engine is to leave; says so once."""
        key = self._leaving + incarnation.encode()
        asked = self._kv("get")(key, namespace=_NAMESPACE) is not None
        if asked:
            self._kv("del")(key, namespace=_NAMESPACE)
        return asked

    @staticmethod
    def _kv(call: str) -> Callable[..., Any]:
        module: Any = importlib.import_module("ray.experimental.internal_kv")
        return getattr(module, f"_internal_kv_{call}")


class LocalRegistry:
    """One process's own, for tests."""

    def __init__(self) -> None:
        self.found: dict[str, Entry] = {}
        self.leaving: set[str] = set()
        self._secret = secrets.token_bytes(32)

    def put(self, entry: Entry) -> None:
        """Adds or replaces."""
        self.found[entry.incarnation] = entry

    def drop(self, incarnation: str) -> None:
        """Unknown ones are fine."""
        self.found.pop(incarnation, None)

    def entries(self) -> list[Entry]:
        """All of them."""
        return list(self.found.values())

    def secret(self) -> bytes:
        """Made with the registry."""
        return self._secret

    def asked_to_leave(self, incarnation: str) -> bool:
        """Whether it is in `leaving`; says so once."""
        asked = incarnation in self.leaving
        self.leaving.discard(incarnation)
        return asked
