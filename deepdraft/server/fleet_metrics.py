"""Metrics of a fleet, as one of its fronts shows them: summed, and for each replica.

Owns: the sums over engines, those that have left among them; the names with `replica_` and the
labels `replica` and `front`; reading that text again for `fleet status`.
Knows nothing of: connections, HTTP, what single metrics mean (`metrics`).

Sums have the names that one server's metrics have, so that what reads those reads a fleet. A
replica's own stand under other names, or a sum over a name would count everything twice.
"""

import contextlib
import http.client
import ssl
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepdraft.server.fleet_flights import Seat
from deepdraft.server.metrics import metrics_text
from deepdraft.telemetry import Histogram

_ASK_S = 10.0
_MOST_BYTES = 16 << 20
_PREFIX = "deepdraft_"
_REPLICA = "deepdraft_replica_"
_NOW = frozenset({"waiting", "running", "parked", "to_read"})
"""Counts of this moment beside `kv_` ones: an engine that has left has none."""
_OF_MOST = frozenset({"kv_lease_most_milliseconds"})
_LOAD = {
    "state": ("state", "1 for the state that this front sees: ready, quiet, draining."),
    "requests": ("requests", "Requests that this front has there now."),
    "to_read": ("to_read_tokens", "Tokens of prompts that are still to be read."),
    "free": ("free_places", "Sequences that could run beside those that do."),
}
_KV_GAUGES = ("kv_entries", "kv_leases", "kv_pins", "kv_disk_", "kv_fetch_peers", "kv_preparing")
_KV_SLOTS = ("kv_slots_", "kv_slot_bytes")


class FleetMetrics:
    """The sums of one front. Counters never fall when an engine leaves."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, int]] = {}
        """Last counters of engines that are here, by incarnation."""
        self._left: Counter[str] = Counter()

    def sums(self, seats: Sequence[Seat]) -> dict[str, int]:
        """Counters of all engines since this front began, gauges of those that are here."""
        here: dict[str, dict[str, int]] = {}
        for seat in seats:
            key = seat.identity.incarnation
            # A connection that is new has told nothing yet.
            known = seat.stats or self._seen.get(key, {})
            here[key] = {k: v for k, v in known.items() if not k.startswith(("http_", "cut_"))}
        for key in self._seen.keys() - here.keys():
            self._left.update({k: v for k, v in self._seen[key].items() if not _is_gauge(k)})
        self._seen = here
        total = Counter(self._left)
        for stats in here.values():
            for name, value in stats.items():
                if name in _OF_MOST:
                    total[name] = max(total[name], value)
                elif name == "kv_slot_bytes":
                    continue
                else:
                    total[name] += value
        return dict(total) | self._slab(here.values())

    @staticmethod
    def _slab(stats: Any) -> dict[str, int]:
        """Slots differ in size between engines: their sum is one of bytes."""
        total: Counter[str] = Counter()
        for own in stats:
            for name, value in own.items():
                if name.startswith("kv_slots_"):
                    total[name] += value * own.get("kv_slot_bytes", 0)
        return {**total, "kv_slot_bytes": 1} if total else {}

    def text(
        self,
        seats: Sequence[Seat],
        own: Mapping[str, int],
        front: str,
        histograms: Mapping[str, Histogram],
    ) -> str:
        """The whole exposition. `own`: counters of the front `front` itself."""
        parts = [metrics_text(self.sums(seats), histograms)]
        parts.append(labelled(metrics_text(own), "front", front))
        families: dict[str, list[str]] = {}
        for seat in sorted(seats, key=lambda s: s.label):
            told = {k: v for k, v in seat.stats.items() if not k.startswith(("http_", "cut_"))}
            _gather(families, labelled(metrics_text(told), "replica", seat.label))
            _gather(families, _load_text(seat))
        parts.append("".join(f"{line}\n" for lines in families.values() for line in lines))
        return "".join(parts)


def _is_gauge(name: str) -> bool:
    return name in _NOW or name.startswith((*_KV_GAUGES, *_KV_SLOTS))


def _load_text(seat: Seat) -> str:
    label = f'replica="{seat.label}"'
    values: dict[str, tuple[str, float]] = {
        "state": (f'{{{label},state="{seat.state}",version="{seat.identity.version}"}}', 1),
        "requests": (f"{{{label}}}", len(seat.flights)),
        "to_read": (f"{{{label}}}", seat.load.to_read),
        "free": (f"{{{label}}}", seat.load.free),
    }
    lines = []
    for key, (labels, value) in values.items():
        name, text = _LOAD[key]
        lines.append(f"# HELP {_PREFIX}{name} {text}")
        lines.append(f"# TYPE {_PREFIX}{name} gauge")
        lines.append(f"{_PREFIX}{name}{labels} {value}")
    return "\n".join(lines) + "\n"


def labelled(text: str, label: str, value: str) -> str:
    """An exposition with one more label on every sample."""
    lines = []
    for line in text.splitlines():
        if line.startswith("#"):
            lines.append(line)
            continue
        name, _, number = line.rpartition(" ")
        base, brace, labels = name.partition("{")
        own = f'{label}="{value}"'
        inner = f"{labels[:-1]},{own}" if brace else own
        lines.append(f"{base}{{{inner}}} {number}")
    return "".join(f"{line}\n" for line in lines)


def _gather(families: dict[str, list[str]], text: str) -> None:
    """Adds samples to their families, under the names of single replicas."""
    for line in text.splitlines():
        renamed = line.replace(_PREFIX, _REPLICA, 1)
        words = renamed.split(" ")
        family = words[2] if line.startswith("#") else renamed.partition("{")[0]
        lines = families.setdefault(family, [])
        if not (line.startswith("#") and renamed in lines):
            lines.append(renamed)


def read_replicas(text: str) -> list[dict[str, Any]]:
    """What an exposition says of each replica: state, load, memory of the cache, reuse."""
    found: dict[str, dict[str, Any]] = {}
    for line in text.splitlines():
        if not line.startswith(_REPLICA):
            continue
        name, _, number = line.rpartition(" ")
        base, _, inner = name.removeprefix(_REPLICA).partition("{")
        parts = (part.partition("=") for part in inner.rstrip("}").replace('"', "").split(","))
        labels = {label: value for label, _, value in parts}
        with contextlib.suppress(ValueError, KeyError):
            own = found.setdefault(labels.pop("replica"), {})
            if base == "state":
                own |= {"state": labels["state"], "version": labels["version"]}
            else:
                key = base if not labels else f"{base}:{'/'.join(labels.values())}"
                own[key] = float(number)
    return [_replica(label, own) for label, own in sorted(found.items())]


def _replica(label: str, own: dict[str, Any]) -> dict[str, Any]:
    def whole(key: str) -> int:
        return int(own.get(key, 0))

    reused, computed = whole("kv_tokens_reused_total"), whole("kv_tokens_computed_total")
    states = ("free", "used", "condemned", "quarantined")
    slab = {state: whole(f"kv_slab_bytes:{state}") for state in states}
    return {
        "replica": label,
        "state": own.get("state", ""),
        "version": own.get("version", ""),
        "running": whole("num_requests_running"),
        "waiting": whole("num_requests_waiting"),
        "to_read_tokens": whole("to_read_tokens"),
        "prompt_tokens": whole("prompt_tokens_total"),
        "generated_tokens": whole("generation_tokens_total"),
        "kv_bytes": sum(slab.values()),
        "kv_used_bytes": sum(slab.values()) - slab["free"],
        "kv_conversations": whole("kv_entries"),
        "reused": round(reused / (reused + computed), 4) if reused + computed else None,
    }


def ask_replicas(url: str, cert: str | None) -> list[dict[str, Any]]:
    """The replicas as a front of the fleet at `url` sees them now; none where it does not answer.

    `cert`: the PEM file of the fleet's own certificate, where it speaks TLS. The answer is the
    fleet's own and holds no secret, so its name is not checked.
    """
    context = None
    if cert is not None:
        context = ssl.create_default_context(cadata=Path(cert).read_text())
        context.check_hostname = False
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=_ASK_S, context=context) as answer:
            return read_replicas(answer.read(_MOST_BYTES).decode("utf-8", "replace"))
    except (OSError, http.client.HTTPException):
        return []


def replica_line(own: Mapping[str, Any]) -> str:
    """One replica as `fleet status` prints it."""
    reused = "-" if own["reused"] is None else f"{100 * own['reused']:.0f} %"
    return (
        f"{own['replica']}: {own['state']}, {own['running']} running, {own['waiting']} waiting, "
        f"{own['to_read_tokens']} tokens to read; KV {own['kv_used_bytes'] >> 20} of "
        f"{own['kv_bytes'] >> 20} MiB, {own['kv_conversations']} conversations, {reused} of prompt "
        f"tokens reused; {own['generated_tokens']} tokens generated"
    )
