"""A fleet as Ray Serve starts it from a config of its own, as KubeRay's RayService does.

Owns: the builder that `import_path` names. Knows nothing of: Kubernetes; what is deployed is
`fleet_ray`'s.
"""

import importlib
import os
from dataclasses import replace
from typing import Any

from deepdraft import __version__
from deepdraft.errors import ConfigError
from deepdraft.server.fleet_config import FleetFile, RayConfig, load_fleet_file

DIRECTORY = "DEEPDRAFT_KV_DIRECTORY"
"""Variable with the address of the directory, which may hold a password."""


def app(args: dict[str, Any]) -> Any:
    """The application of the fleet that `args` describes: `file`, its TOML file on every node, and
    `version`, which is only there to be changed when the replicas are to be replaced.

    Raises ConfigError.
    """
    from deepdraft.server.fleet_ray import bound, check_ray
    from deepdraft.server.fleet_version import Deployed, version_of

    check_ray()
    ray: Any = importlib.import_module("ray")
    # A Ray that runs already: its nodes reach each other by their addresses, not by loopback.
    address = str(ray.get_runtime_context().gcs_address)
    fleet = replace(described(args), ray=RayConfig(address=address))
    name = f"{version_of(fleet)}-{args.get('version', '')}"
    return bound(Deployed(fleet, name, __version__))


def described(args: dict[str, Any]) -> FleetFile:
    """The fleet that the arguments describe. Raises ConfigError."""
    unknown = sorted(set(args) - {"file", "version"})
    if unknown or not isinstance(args.get("file"), str):
        raise ConfigError(
            "args of the application must be file, the path of a fleet's TOML file, and perhaps "
            f"version; got {sorted(args)}"
        )
    fleet = load_fleet_file(args["file"])
    url = os.environ.get(DIRECTORY)
    if url and fleet.config.fleet.directory is None:
        shared = replace(fleet.config.fleet, directory=url)
        fleet = replace(fleet, config=replace(fleet.config, fleet=shared))
    return fleet
