"""`deepdraft fleet`: many replicas on Ray Serve, from one file.

Owns: the commands and what they print.
Knows nothing of: Ray; the module that does is imported when a command runs.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import click


@click.group()
def fleet() -> None:
    """Replicas of a server on Ray Serve, described by a TOML file (docs/fleet.md)."""


def _config(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.argument("file", metavar="CONFIG")(command)


def _load(file: str) -> Any:
    from deepdraft.cli.options import model_directory
    from deepdraft.server.fleet_config import load_fleet_file

    described = load_fleet_file(file)
    model_directory(described.model)
    return described


@fleet.command()
@_config
@click.option("--resume", is_flag=True, help="Go on elsewhere with streams of a lost replica.")
def up(file: str, resume: bool) -> None:
    """Start the replicas that CONFIG describes. With a Ray of its own it stays until interrupted;
    on the cluster of `ray.address` it returns when all are ready."""
    from deepdraft.server.fleet_ray import up as run

    described = _load(file)
    if resume:
        described = replace(described, replicas=replace(described.replicas, resume=True))
    run(described, lambda text: click.echo(text, err=True))


@fleet.command()
@_config
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(file: str, as_json: bool) -> int:
    """Show what the replicas are doing; exit code 1 unless all that are wanted run."""
    from deepdraft.server.fleet_config import load_fleet_file
    from deepdraft.server.fleet_metrics import replica_line
    from deepdraft.server.fleet_ray import status as ask

    found = ask(load_fleet_file(file))
    replicas = found["replicas"]
    if as_json:
        click.echo(json.dumps(found))
    else:
        states = ", ".join(f"{count} {name.lower()}" for name, count in replicas.items())
        click.echo(f"{found['name']} at {found['url']}: {found['state'].lower()}; {states}")
        for own in found["engines"]:
            click.echo(f"  {replica_line(own)}")
        if found["message"]:
            click.echo(found["message"])
    return 0 if replicas.get("RUNNING", 0) >= replicas["wanted"] else 1


@fleet.command()
@_config
@click.argument("replica", required=False)
def drain(file: str, replica: str | None) -> None:
    """End the fleet, or one REPLICA (as `status` and answers name it), which is replaced: no new
    requests, those at hand get `server.drain_s` to finish."""
    from deepdraft.server.fleet_config import load_fleet_file

    if replica is not None:
        from deepdraft.server.fleet_upgrade import drain_one

        drain_one(load_fleet_file(file), replica, lambda text: click.echo(text, err=True))
        return
    from deepdraft.server.fleet_ray import drain as run

    run(load_fleet_file(file))


@fleet.command()
@_config
@click.option(
    "--in-place",
    is_flag=True,
    help="An old replica leaves before a new one starts: for machines without room for one more.",
)
def upgrade(file: str, in_place: bool) -> None:
    """Replace the replicas, one after the other and under load, by those that CONFIG describes:
    another model, other settings, the code that is installed now."""
    from deepdraft.server.fleet_upgrade import upgrade as run

    run(_load(file), lambda text: click.echo(text, err=True), in_place=in_place)


@fleet.command()
@_config
def down(file: str) -> None:
    """End the fleet at once, and the requests at hand with it."""
    from deepdraft.server.fleet_config import load_fleet_file
    from deepdraft.server.fleet_ray import down as run

    run(load_fleet_file(file))
