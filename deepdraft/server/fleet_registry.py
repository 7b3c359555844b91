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
        for key in (self._secret, *self._kv("list")(self._seats, namespace=_NAMESPACE)):
            self._kv("del")(key, namespace=_NAMESPACE)

    @staticmethod
    def _kv(call: str) -> Callable[..., Any]:
        module: Any = importlib.import_module("ray.experimental.internal_kv")
        return getattr(module, f"_internal_kv_{call}")


class LocalRegistry:
    """One process's own, for tests."""

    def __init__(self) -> None:
        self.found: dict[str, Entry] = {}
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
