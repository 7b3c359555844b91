"""A fleet that changes while it serves: another model, other settings, other code.

Owns: what may change, the watch over the change, the way back.
Knows nothing of: how a replica is drained (`fleet_replica`), how fronts tell versions apart
(`fleet_router`). Ray Serve replaces the replicas: a new one must be ready, its self-test included,
before an old one is told to leave; after `fleet_ray.STARTS` failed starts it stops and keeps the
old ones.
"""

import time
from collections.abc import Callable

from deepdraft import __version__
from deepdraft.errors import ConfigError, EngineError
from deepdraft.server import fleet_ray
from deepdraft.server.fleet_config import FleetFile
from deepdraft.server.fleet_registry import RayRegistry
from deepdraft.server.fleet_version import Deployed, version_of

_CALM_S = 20.0
"""Where a replica has left, and Ray neither starts nor stops any for so long, the fleet is to be
smaller."""
_FIXED = ("host", "port", "tls_cert", "tls_key")
"""Of `server`: they belong to Ray Serve's proxies, which outlive a version."""
Say = Callable[[str], None]


def check_change(old: FleetFile, new: FleetFile) -> None:
    """Raises ConfigError where a running fleet cannot become `new`."""
    for name in _FIXED:
        was, wanted = getattr(old.config.server, name), getattr(new.config.server, name)
        if was != wanted:
            raise ConfigError(
                f"server.{name} cannot change while the fleet serves: it is {was!r}, CONFIG says "
                f"{wanted!r}; end the fleet and start it again"
            )


def upgrade(new: FleetFile, say: Say, *, in_place: bool = False) -> None:
    """Replaces the replicas of the fleet that runs, one after the other, and returns when all are
    new. `in_place`: an old one leaves first, for machines without room for one more.

    Raises ConfigError where nothing can begin, EngineError where new replicas do not become ready;
    then the old ones serve on.
    """
    fleet_ray.check_before(new)
    with fleet_ray.connected(new):
        old = running(new)
        check_change(old.fleet, new)
        wanted = Deployed(new, version_of(new), __version__)
        if wanted == old:
            say(f"{new.name} runs {wanted.name} already")
            return
        if wanted.name != old.name and not in_place:
            _check_room(new)
        fleet_ray.deploy(wanted, again=True, in_place=in_place)
        why = _watch(wanted, say)
        if why is None:
            RayRegistry(new.name).keep(wanted.encode())
            return
        if fleet_ray.application(new.name) is None:
            raise EngineError(f"the upgrade to {wanted.name} is stopped: {why}")
        say(f"going back to {old.name}")
        fleet_ray.deploy(old, again=True, in_place=in_place)
        back = _watch(old, say)
        state = f"{old.name} serves" if back is None else f"and not all of {old.name} serve: {back}"
        raise EngineError(f"the upgrade to {wanted.name} is stopped, {state}: {why}")


def drain_one(fleet: FleetFile, replica: str, say: Say) -> None:
    """Has one replica leave, and returns when another has taken its place. `replica`: its label.

    Raises ConfigError where there is no such replica, EngineError where it does not leave in time.
    """
    fleet_ray.check_ray()
    with fleet_ray.connected(fleet):
        registry = RayRegistry(fleet.name)
        found = {entry.label: entry for entry in registry.entries()}
        if replica not in found:
            names = ", ".join(sorted(found)) or "none"
            raise ConfigError(f"no replica {replica} runs; those that do: {names}")
        registry.ask_to_leave(found[replica].incarnation)
        say(f"{replica} leaves")
        changed = time.monotonic()
        until = changed + fleet_ray.leaving_s(fleet) + fleet.ray.start_s
        before = ""
        while True:
            labels = {entry.label for entry in registry.entries()}
            state = fleet_ray.application(fleet.name)
            if replica not in labels and (new := labels - set(found)):
                say(f"{', '.join(sorted(new))} is there in its place")
                return
            if state is None:
                raise EngineError("the fleet was ended meanwhile")
            now, states = time.monotonic(), fleet_ray.states(state)
            if replica in labels or states != before or state.status.value != "RUNNING":
                before, changed = states, now
            elif now - changed > _CALM_S:
                say(f"it has left, and none comes in its place: {states}")
                return
            if now > until:
                raise EngineError(f"no replica has taken its place: {states}")
            time.sleep(fleet_ray.LOOK_S)


def running(fleet: FleetFile) -> Deployed:
    """What the fleet runs. Raises ConfigError where there is none, or it is just changing."""
    found = fleet_ray.application(fleet.name)
    data = RayRegistry(fleet.name).kept()
    if found is None or data is None:
        raise ConfigError(f"no fleet {fleet.name} runs there: deepdraft fleet up CONFIG")
    state = str(found.status.value)
    if state in ("DEPLOYING", "DELETING"):
        raise ConfigError(f"the fleet {fleet.name} is just changing ({state}); try again later")
    return Deployed.decode(data)


def _check_room(fleet: FleetFile) -> None:
    if not fleet_ray.room(fleet_ray.free_of_nodes(), fleet):
        replicas = fleet.replicas
        raise ConfigError(
            f"there is no room for one more replica ({replicas.cpus:g} CPUs, {replicas.gpus} GPUs) "
            "beside those that run: add a node, or give --in-place, by which an old replica leaves "
            "before a new one starts"
        )


def _watch(wanted: Deployed, say: Say) -> str | None:
    """Waits until every replica is of this version; None, or why that does not happen."""
    fleet, last = wanted.fleet, ""
    began = time.monotonic()
    moved = began
    while True:
        found = fleet_ray.application(fleet.name)
        if found is None:
            return "the fleet was ended meanwhile"
        state = str(found.status.value)
        if state == "RUNNING":
            say(f"all replicas run {wanted.name} after {time.monotonic() - began:.0f} s")
            return None
        if state == "DEPLOY_FAILED":
            return fleet_ray.why(found)
        text = fleet_ray.states(found)
        if text != last:
            last, moved = text, time.monotonic()
            say(text)
        if time.monotonic() - moved > fleet.ray.start_s:
            return f"nothing has moved within ray.start_s = {fleet.ray.start_s:g} s: {text}"
        time.sleep(fleet_ray.LOOK_S)
