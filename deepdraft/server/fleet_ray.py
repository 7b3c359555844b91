"""A fleet on Ray Serve: started, looked at, ended.

Owns: every call of Ray, the Ray that a fleet starts for itself.
Knows nothing of: engines, HTTP, how that Ray is found again (`fleet_home`). Ray (extra `fleet`) is
imported by the first function that needs it.
"""

import contextlib
import importlib
import importlib.metadata
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepdraft import __version__
from deepdraft.errors import ConfigError, EngineError
from deepdraft.server.fleet_config import FleetFile
from deepdraft.server.fleet_front import Front
from deepdraft.server.fleet_home import (
    INNER,
    address_of,
    check_reached,
    forget,
    held,
    new_token,
    outer_directory,
    token_file,
    write_state,
)
from deepdraft.server.fleet_metrics import ask_replicas
from deepdraft.server.fleet_ranks import check_split
from deepdraft.server.fleet_registry import RayRegistry
from deepdraft.server.fleet_replica import Replica, model_path
from deepdraft.server.fleet_version import Deployed, version_of

RAY_SERIES = "2.60"
"""What this was tried with; Ray Serve changes between its minor versions."""
INSTALL = f"pip install 'ray[serve]=={RAY_SERIES}.*'"
DEPLOYMENT, FRONTS = "Replica", "Front"
_STORE_BYTES = 100 << 20
"""Ray's own object store, which a fleet hardly uses."""
LOOK_S = 0.5
"""Seconds between two looks at what Ray does."""
_STARTS = 3
"""A replica that fails so often before it was ever ready ends the start of the fleet."""
_LAST_S = 15.0
"""Seconds beyond the grace period that an application may take to go."""
_PROXY_S = 30.0
"""Seconds that proxies get to listen after the replicas are ready."""
_OTHERS = 256
"""Requests of a front that need no engine: models, tokens, metrics."""
_FAILED = "DEPLOY_FAILED"
_POLICY = "deepdraft.server.fleet_scale:Policy"
Say = Callable[[str], None]


def check_ray() -> None:
    """Raises ConfigError where Ray is missing or of another version than this was tried with."""
    try:
        found = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"a fleet needs Ray, which is not installed: {INSTALL}") from None
    if not found.startswith(f"{RAY_SERIES}."):
        raise ConfigError(f"a fleet needs Ray {RAY_SERIES}, {found} is installed: {INSTALL}")


def check_before(fleet: FleetFile) -> None:
    """What can be told without a Ray. Raises ConfigError, CheckpointError."""
    check_ray()
    check_split(model_path(fleet), fleet.config.engine)
    if fleet.config.fleet.directory is not None:
        _directory(fleet.config.fleet.directory).close()


def check_this_machine(fleet: FleetFile) -> None:
    """What can be told before a Ray of our own starts. Raises ConfigError."""
    server, replicas = fleet.config.server, fleet.replicas
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((server.host, server.port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {server.host}:{server.port} ({error.strerror}): choose another "
                "server.port, or end what listens there"
            ) from error
    cpus = fleet.ray.cpus or os.cpu_count() or 1
    wanted = replicas.count * replicas.cpus
    if wanted > cpus:
        raise ConfigError(
            f"{replicas.count} replicas of {replicas.cpus:g} CPUs need {wanted:g}, there are "
            f"{cpus}: lower replicas.count or replicas.cpus, or raise ray.cpus"
        )


def room(nodes: Sequence[Mapping[str, float]], fleet: FleetFile) -> int:
    """Replicas that fit on nodes with these resources, each on one of them."""
    replicas = fleet.replicas
    each = {"CPU": replicas.cpus, "GPU": replicas.gpus}
    most = (min(node.get(kind, 0.0) // n for kind, n in each.items() if n) for node in nodes)
    return int(sum(most))


def check_nodes(nodes: list[dict[str, Any]], fleet: FleetFile) -> None:
    """Whether the replicas fit on the nodes of a Ray (`ray.nodes()`). Raises ConfigError."""
    replicas = fleet.replicas
    alive = [n.get("Resources", {}) for n in nodes if n.get("Alive")]
    if (fit := room(alive, fleet)) < replicas.count:
        cpus, gpus = (sum(n.get(kind, 0.0) for n in alive) for kind in ("CPU", "GPU"))
        raise ConfigError(
            f"{replicas.count} replicas of {replicas.cpus:g} CPUs and {replicas.gpus} GPUs each do "
            f"not fit: Ray has {cpus:g} CPUs and {gpus:g} GPUs on {len(alive)} nodes, room for "
            f"{fit}"
        )


def say_room(free: Sequence[Mapping[str, float]], fleet: FleetFile, say: Say) -> None:
    """Says where others hold what the replicas need: those that find no room wait for it."""
    if (fit := room(free, fleet)) < fleet.replicas.count:
        say(
            f"others use the nodes: there is room for {fit} of {fleet.replicas.count} replicas now "
            f"({fleet.replicas.cpus:g} CPUs, {fleet.replicas.gpus} GPUs each); the rest wait for it"
        )


def options_of(fleet: FleetFile, *, again: bool = False) -> dict[str, Any]:
    """The options of the deployment in Ray Serve's terms; see `deploy`."""
    replicas = fleet.replicas
    options: dict[str, Any] = {}
    if fleet.config.engine.tp > 1:  # one piece, so that its ranks share a node
        bundle = {"CPU": replicas.cpus, "GPU": replicas.gpus}
        options["placement_group_bundles"] = [{k: v for k, v in bundle.items() if v}]
        options["placement_group_strategy"] = "STRICT_PACK"
    return {
        **options,
        "name": DEPLOYMENT,
        **number_of(fleet, again=again),
        "ray_actor_options": {"num_cpus": replicas.cpus, "num_gpus": replicas.gpus},
        "max_constructor_retry_count": _STARTS,
        "health_check_period_s": replicas.look_s,
        "health_check_timeout_s": max(replicas.look_s, 10.0),
        "graceful_shutdown_timeout_s": leaving_s(fleet),
        "graceful_shutdown_wait_loop_s": LOOK_S,
    }


def number_of(fleet: FleetFile, *, again: bool = False) -> dict[str, Any]:
    """How many replicas, in Ray Serve's terms: a number, or bounds and who decides. `again`: as
    many as there are."""
    replicas = fleet.replicas
    if not replicas.scales:
        return {"num_replicas": replicas.count}
    low, high = replicas.bounds
    rules = {name: getattr(replicas, name) for name in ("busy", "wait_s", "up_s", "down_s")}
    rules |= {"min_count": low, "max_count": high, "capacity": fleet.config.engine.max_running}
    return {
        "autoscaling_config": {
            "min_replicas": low,
            "initial_replicas": None if again else replicas.count,
            "max_replicas": high,
            # Ours waits, and knows why.
            "upscale_delay_s": 0.0,
            "downscale_delay_s": 0.0,
            "metrics_interval_s": replicas.look_s,
            "look_back_period_s": 5 * replicas.look_s,
            "policy": {"policy_function": _POLICY, "policy_kwargs": rules},
        }
    }


def front_options_of(fleet: FleetFile) -> dict[str, Any]:
    """The options of the fronts' deployment."""
    replicas, engine = fleet.replicas, fleet.config.engine
    # Engines have queues of their own, which know tenants and priorities.
    most = replicas.bounds[1] * (engine.max_running + engine.max_queue) + _OTHERS
    return {
        "name": FRONTS,
        "num_replicas": replicas.fronts,
        "ray_actor_options": {"num_cpus": 0},
        "max_ongoing_requests": most,
        "max_constructor_retry_count": _STARTS,
        "health_check_period_s": replicas.look_s,
        "health_check_timeout_s": max(replicas.look_s, 10.0),
        "graceful_shutdown_timeout_s": fleet.config.server.drain_s + _LAST_S,
        "graceful_shutdown_wait_loop_s": LOOK_S,
    }


def bound(deployed: Deployed, *, again: bool = False, in_place: bool = False) -> Any:
    """The fleet as Ray Serve runs it: fronts, and the engines that they find for themselves. See
    `deploy`."""
    serve, fleet = _serve(), deployed.fleet
    # Rounded up: one at a time. A front takes no room worth the name.
    slowly = {"rolling_update_percentage": 0.01, "max_surge_percent": 1}
    change = {**slowly, "max_surge_percent": 0} if in_place else slowly
    engines = serve.deployment(**options_of(fleet, again=again), **change)(Replica)
    fronts = serve.deployment(**front_options_of(fleet), **slowly)(serve.ingress()(Front))
    for made in (engines, fronts):
        # Ray Serve replaces replicas whose version differs, and takes a new one each time where
        # there is none; it has no option for it any more.
        made._version = deployed.name
    return fronts.bind(fleet, deployed.program, engines.bind(fleet, deployed.program))


def deploy(deployed: Deployed, *, again: bool = False, in_place: bool = False) -> None:
    """Tells Ray Serve what is to run, and does not wait.

    `again`: a fleet runs, whose number of replicas stays what its load has made it. Replicas of
    another version are replaced: one more is started before one leaves, or with `in_place` one
    leaves first.
    """
    made = bound(deployed, again=again, in_place=in_place)
    target = _serve().RunTarget(target=made, name=deployed.fleet.name, route_prefix="/")
    try:
        _serve().run_many([target], wait_for_applications_running=False)
    except Exception as error:  # Ray has no class for it
        said = last_line(error)
        raise ConfigError(f"Ray Serve has no place for the fleet at /: {said}") from error


def free_of_nodes() -> list[dict[str, float]]:
    """CPUs and GPUs of each node that nobody has set aside."""
    state: Any = importlib.import_module("ray._private.state")
    return list(state.available_resources_per_node().values())


def last_line(error: Exception) -> str:
    """The end of Ray's words, where the error itself stands."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[-1][:300]


def states(found: Any) -> str:
    """How many replicas of an application are in which state, in words."""
    parts = []
    for name, deployment in found.deployments.items():
        counts = ((str(k).lower(), int(v)) for k, v in dict(deployment.replica_states).items())
        parts.append(f"{name}: " + ", ".join(f"{n} {state}" for state, n in sorted(counts) if n))
    return "; ".join(parts)


def leaving_s(fleet: FleetFile) -> float:
    """Seconds that a replica may take to leave."""
    return fleet.config.server.drain_s + fleet.config.fleet.hand_over_s + _LAST_S


def http_options(fleet: FleetFile) -> dict[str, Any]:
    """Ray Serve's proxy, as the server's settings say."""
    server = fleet.config.server
    options: dict[str, Any] = {"host": server.host, "port": server.port}
    if server.tls_cert is not None:
        options |= {"ssl_certfile": server.tls_cert, "ssl_keyfile": server.tls_key}
    return options


def up(fleet: FleetFile, say: Say) -> None:
    """Starts the fleet, and returns when all replicas are ready on a Ray that runs already. On one
    of its own it stays until SIGINT, SIGTERM, or until `drain` or `down` has ended the fleet.

    Raises ConfigError for what is missing, EngineError where a replica does not become ready,
    KeyboardInterrupt where it was stopped before the fleet on a Ray of others was ready; in all
    three nothing of it goes on.
    """
    check_before(fleet)
    with contextlib.ExitStack() as stack:
        own = fleet.ray.address is None
        if own:
            stack.enter_context(held(fleet.name))
            check_this_machine(fleet)
        ray = stack.enter_context(_own_ray(fleet, say) if own else connected(fleet))
        stop = stack.enter_context(_stops())
        _deploy(ray, fleet, stop, say)
        while own and not stop.wait(LOOK_S):
            if application(fleet.name) is None:
                say("the fleet was ended")
                return
        if stop.is_set():
            say(f"running requests get {fleet.config.server.drain_s:g} s to finish")
            _end(fleet)
            if not own:
                raise KeyboardInterrupt  # it is not ready


def status(fleet: FleetFile) -> dict[str, Any]:
    """State of the application, how many replicas are in which state, and what a front says of each
    one's load and cache. Raises ConfigError."""
    check_ray()
    with connected(fleet):
        found = _running(fleet)
        deployment = found.deployments.get(DEPLOYMENT)
        states = {} if deployment is None else dict(deployment.replica_states)
        message = found.message or ("" if deployment is None else deployment.message)
        return {
            "engines": ask_replicas(fleet.url, fleet.config.server.tls_cert),
            "name": fleet.name,
            "url": fleet.url,
            "state": str(found.status.value),
            # Where their number follows the load, the fewest.
            "replicas": {
                "wanted": fleet.replicas.bounds[0],
                **{k: int(v) for k, v in states.items()},
            },
            "message": message,
        }


def drain(fleet: FleetFile) -> None:
    """Ends the fleet: no new request, those at hand get `server.drain_s`. Raises ConfigError."""
    check_ray()
    with connected(fleet):
        _end(fleet)


def down(fleet: FleetFile) -> None:
    """Ends the fleet at once, with what it is doing. Raises ConfigError."""
    check_ray()
    with connected(fleet) as ray:
        _running(fleet)
        _serve().delete(fleet.name, _blocking=False)
        for name in _actors(fleet.name):
            with contextlib.suppress(ValueError):  # it has gone
                ray.kill(ray.get_actor(name, namespace="serve"))
        _wait_gone(fleet, _LAST_S)


def _serve() -> Any:
    try:
        return importlib.import_module("ray.serve")
    except ImportError as error:
        raise ConfigError(f"Ray is here without Ray Serve ({error}): {INSTALL}") from error


def _settle_environment(token: Path) -> None:
    """What Ray reads when it is imported. Its processes listen on all interfaces whatever they are
    told, so that strangers are kept out by a token: ours, unless the user has settled it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A replica whose engine is dead or hangs has nothing to finish.
    os.environ.setdefault("RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS", "1")
    if "RAY_AUTH_MODE" not in os.environ and token.is_file():
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)


@contextlib.contextmanager
def connected(fleet: FleetFile) -> Generator[Any]:
    address = address_of(fleet)
    check_reached(address)
    if fleet.ray.address is None:
        _settle_environment(token_file(fleet.name))
    ray: Any = importlib.import_module("ray")
    try:
        ray.init(address=address, log_to_driver=False, logging_level="warning")
    except Exception as error:  # Ray has a class for each way that this can fail
        raise ConfigError(
            f"no Ray answers at {address}: {type(error).__name__}: {str(error)[:500]}"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _own_ray(fleet: FleetFile, say: Say) -> Generator[Any]:
    """A Ray whose processes end with this one, also when this one is killed."""
    _settle_environment(new_token(fleet.name))
    ray: Any = importlib.import_module("ray")
    kept = fleet.ray.directory
    directory = outer_directory(kept)
    whole = False
    try:
        _start(ray, fleet.ray.cpus, f"{directory}/{INNER}")
        write_state(fleet, ray.get_runtime_context().gcs_address)
        yield ray
        whole = True
    finally:
        ray.shutdown()
        forget(fleet.name)
        if whole and kept is None:
            shutil.rmtree(directory, ignore_errors=True)
        elif not whole:
            say(f"logs of Ray and of the replicas: {directory}/{INNER}/session_latest/logs")


def _start(ray: Any, cpus: int | None, directory: str) -> None:
    """Starts a Ray on this machine, for which Ray itself allows half a minute: a busy machine gets
    a second one. Raises EngineError."""
    for last in (False, True):
        try:
            ray.init(
                address="local",  # else RAY_ADDRESS, or what it finds in the directory, is joined
                num_cpus=cpus,
                include_dashboard=False,
                object_store_memory=_STORE_BYTES,
                log_to_driver=False,
                logging_level="warning",
                _temp_dir=directory,
            )
            return
        except Exception as error:  # Ray has no class for it
            ray.shutdown()
            if last:
                text = f"{type(error).__name__}: {str(error)[:500]}"
                raise EngineError(f"Ray does not start on this machine: {text}") from error


def start_serve(fleet: FleetFile) -> None:
    """Ray Serve, which may run already, with its proxies where clients are to connect. Raises
    ConfigError where they cannot listen there, or listen elsewhere."""
    serve, server = _serve(), fleet.config.server
    context: Any = importlib.import_module("ray.serve.context")
    ran = context._get_global_client(raise_if_no_controller_running=False) is not None
    try:
        serve.start(proxy_location="EveryNode", http_options=http_options(fleet))
    except Exception as error:  # Ray has no class for it
        if not ran:
            serve.shutdown()  # else it stays, and keeps these options
        raise ConfigError(
            f"Ray Serve cannot listen on {server.host}:{server.port} ({last_line(error)}): choose "
            "another server.port, or end what listens there"
        ) from error
    there = context._get_global_client().http_config
    if (there.host, there.port) != (server.host, server.port):
        raise ConfigError(
            f"Ray Serve runs there already and listens on {there.host}:{there.port}: set "
            "server.host and server.port so, or end it (serve shutdown) with all that it serves"
        )


def listens(nodes: list[dict[str, Any]], fleet: FleetFile, waited_s: float, say: Say) -> bool:
    """Whether clients can connect; nodes whose proxy does not start within half a minute are named.
    `nodes`: `ray.nodes()`. Raises EngineError where it starts on none."""
    proxies = {k: str(v.value) for k, v in _serve().status().proxies.items()}
    down = [node for node, state in proxies.items() if state != "HEALTHY"]
    if proxies and not down:
        return True
    if waited_s < _PROXY_S:
        return False
    hosts = {n["NodeID"]: n.get("NodeManagerAddress", n["NodeID"]) for n in nodes}
    where = ", ".join(sorted(hosts.get(node, node) for node in down)) or "any node"
    said = f"Ray Serve's proxy does not listen on port {fleet.config.server.port} of {where}"
    if len(down) == len(proxies):
        raise EngineError(f"{said}: end what listens there, or choose another server.port")
    say(f"{said}; the other nodes take requests")
    return True


@contextlib.contextmanager
def _stops() -> Generator[threading.Event]:
    """An event that SIGINT and SIGTERM set."""
    stop = threading.Event()
    old = {n: signal.signal(n, lambda *_: stop.set()) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _deploy(ray: Any, fleet: FleetFile, stop: threading.Event, say: Say) -> None:
    check_nodes(ray.nodes(), fleet)
    if fleet.ray.address is not None:
        say_room(free_of_nodes(), fleet, say)
    serve = _serve()
    if application(fleet.name) is not None:
        raise ConfigError(f"a fleet {fleet.name} runs there already: deepdraft fleet down CONFIG")
    _say_directory(fleet, say)
    begin = time.monotonic()
    start_serve(fleet)
    registry = RayRegistry(fleet.name)
    registry.clear()
    deployed = Deployed(fleet, version_of(fleet), __version__)
    registry.keep(deployed.encode())
    try:
        deploy(deployed)
    except ConfigError:
        registry.clear()
        raise
    running_s = 0.0
    while not stop.is_set():
        found = application(fleet.name)
        state = "NOT_STARTED" if found is None else str(found.status.value)
        running_s = 0.0 if state != "RUNNING" else running_s + LOOK_S
        if state == "RUNNING" and listens(ray.nodes(), fleet, running_s, say):
            say(
                f"{fleet.replicas.count} replicas are ready at {fleet.url} "
                f"after {time.monotonic() - begin:.0f} s"
            )
            return
        late = time.monotonic() - begin > fleet.ray.start_s
        if state == _FAILED or late:
            cause = "" if found is None else why(found)
            serve.delete(fleet.name, _blocking=False)
            registry.clear()
            when = f"within ray.start_s = {fleet.ray.start_s:g} s" if late else "at all"
            raise EngineError(f"a replica does not become ready {when}: {cause}")
        stop.wait(LOOK_S)


def why(application: Any) -> str:
    """Ray's words about a failed start, the end of them: there the error itself stands."""
    texts = [application.message, *(d.message for d in application.deployments.values())]
    text = str(max((t for t in texts if t), key=len, default="Ray does not say why"))
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return " / ".join(line.strip() for line in lines[-3:])[-1500:]


def _say_directory(fleet: FleetFile, say: Say) -> None:
    """Says where nothing will be shared: replicas serve all the same, and compute."""
    url = fleet.config.fleet.directory
    if url is None:
        if fleet.replicas.count > 1:
            say("no fleet.directory: a turn on another replica than the last one is computed")
        return
    if fleet.config.engine.tp > 1:
        say("engines of several ranks keep no conversations: each turn is computed")
    try:
        with _directory(url) as client:
            client.ping()
    except Exception as error:
        # Without the address, which may hold a password.
        say(
            f"the KV directory (fleet.directory) does not answer ({type(error).__name__}); nothing "
            "is shared until it does"
        )


def _directory(url: str) -> Any:
    """A client of the directory at `url`, which may hold a password and is not repeated. Raises
    ConfigError."""
    try:
        redis: Any = importlib.import_module("redis")
        return redis.Redis.from_url(url, socket_timeout=2, socket_connect_timeout=2)
    except ImportError as error:
        raise ConfigError("fleet.directory needs the package redis: pip install redis") from error
    except ValueError:
        raise ConfigError(
            "fleet.directory must be an address such as redis://host:6379/0 (also rediss://, "
            "unix://)"
        ) from None


def application(name: str) -> Any:
    """What Ray Serve says of the fleet; None where it has none. Raises EngineError."""
    try:
        return _serve().status().applications.get(name)
    except Exception as error:
        raise EngineError(f"Ray Serve does not answer any more: {type(error).__name__}") from error


def _running(fleet: FleetFile) -> Any:
    found = application(fleet.name)
    if found is None:
        raise ConfigError(f"no fleet {fleet.name} runs there: deepdraft fleet up CONFIG")
    return found


def _actors(name: str) -> list[str]:
    ray: Any = importlib.import_module("ray")
    every = ray.util.list_named_actors(all_namespaces=True)
    begin = f"SERVE_REPLICA::{name}#"
    return [a["name"] for a in every if a["namespace"] == "serve" and a["name"].startswith(begin)]


def _end(fleet: FleetFile) -> None:
    _running(fleet)
    _serve().delete(fleet.name, _blocking=False)
    _wait_gone(fleet, leaving_s(fleet) + _LAST_S)


def _wait_gone(fleet: FleetFile, most_s: float) -> None:
    limit = time.monotonic() + most_s
    while application(fleet.name) is not None:
        if time.monotonic() > limit:
            raise EngineError(f"the fleet {fleet.name} does not end: deepdraft fleet down CONFIG")
        time.sleep(LOOK_S)
    RayRegistry(fleet.name).clear()
