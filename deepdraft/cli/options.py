"""Options that several subcommands share.

Owns: names and help of the shared options; which model is meant.
Knows nothing of: HTTP, torch.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click

from deepdraft.config import Device, FetchRule, Load, Numerics, Prefill, ScheduleName, SessionPolicy
from deepdraft.errors import CheckpointError
from deepdraft.text.conversation import TRAITS
from deepdraft.types import Rule

DEMO_NAME = "demo"
ENGINE_FIELDS = (
    "numerics",
    "prefill",
    "device",
    "load",
    "expert_pool",
    "max_context",
    "threads",
    "tp",
    "chat_format",
    "accept_keys",
    "drafts",
    "rule",
    "schedule",
    "draft_threshold",
    "cost_table",
    "kv_memory",
    "kv_spill",
    "kv_spill_bytes",
)
"""The settings that `engine_options` gives."""

Decorated = Callable[..., Any]


class OutputFile(click.ParamType):
    """A file that a command writes at its end. One that cannot be written is refused before the
    work is done; its folder is made."""

    name = "file"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The path as it is."""
        path = Path(value)
        try:
            path.absolute().parent.mkdir(parents=True, exist_ok=True)
            new = not path.exists()
            if new or not (path.is_fifo() or path.is_char_device()):
                path.open("ab").close()
            if new:
                path.unlink()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            self.fail(f"{value!r} cannot be written ({why}); name a file that can", param, ctx)
        return value


def model_argument(command: Decorated) -> Decorated:
    """MODEL: a checkpoint directory, by default the bundled model."""
    return click.argument("model", required=False, metavar="[MODEL]")(command)


def engine_options(command: Decorated) -> Decorated:
    """How a model is loaded."""
    options = (
        click.option(
            "--numerics", type=click.Choice(get_args(Numerics)), help="Arithmetic [exact]."
        ),
        click.option(
            "--prefill", type=click.Choice(get_args(Prefill)), help="How prompts are read [full]."
        ),
        click.option(
            "--device", type=click.Choice(get_args(Device)), help="Where the model runs [cpu]."
        ),
        click.option(
            "--load",
            type=click.Choice(get_args(Load)),
            help="dummy: random weights of these sizes, to measure on a GPU [checkpoint].",
        ),
        click.option(
            "--expert-pool", type=int, metavar="N", help="--load dummy: experts of a layer at most."
        ),
        click.option(
            "--max-context", type=int, metavar="TOKENS", help="Prompt and answer together."
        ),
        click.option(
            "--chat-format",
            type=click.Choice(("auto", *TRAITS)),
            help="How conversations are written [as the checkpoint says].",
        ),
        click.option(
            "--drafts", type=int, metavar="N", help="Drafts a step at most; 0: none [the model's]."
        ),
        click.option(
            "--rule", type=click.Choice(get_args(Rule)), help="How drafts are verified [coupled]."
        ),
        click.option(
            "--schedule",
            type=click.Choice(get_args(ScheduleName)),
            help="How many drafts are verified [cost].",
        ),
        click.option(
            "--draft-threshold", type=float, metavar="C", help="For --schedule threshold [0.3]."
        ),
        click.option(
            "--cost-table", metavar="FILE", help="Measured costs [measured at the start]."
        ),
        click.option(
            "--threads",
            type=int,
            metavar="N",
            help="CPU threads of one operator [small models: 1].",
        ),
        click.option(
            "--tp", type=int, metavar="N", help="Processes (GPUs) that share the model [1]."
        ),
        click.option(
            "--kv-memory",
            metavar="SIZE",
            help="Host memory for conversations, as 512MiB; 0: none [an eighth of the machine's].",
        ),
        click.option(
            "--kv-spill", metavar="DIR", help="Keep conversations on disk too, over restarts."
        ),
        click.option("--kv-spill-bytes", metavar="SIZE", help="At most so much there [16GiB]."),
        click.option(
            "--accept-key",
            "accept_keys",
            multiple=True,
            callback=lambda _context, _option, keys: keys or None,
            metavar="KEY",
            help="An unknown config.json key to accept, as a path; may be repeated.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def fleet_options(command: Decorated) -> Decorated:
    """How conversations are shared between servers."""
    options = (
        click.option(
            "--kv-directory",
            envvar="DEEPDRAFT_KV_DIRECTORY",
            metavar="URL",
            help="Redis that says which server has a conversation; better given as "
            "DEEPDRAFT_KV_DIRECTORY where it holds a password [none: nothing is shared].",
        ),
        click.option("--kv-name", metavar="NAME", help="Of this server [the machine's]."),
        click.option(
            "--kv-listen", metavar="HOST:PORT", help="Where peers read from [127.0.0.1:0]."
        ),
        click.option("--kv-advertise", metavar="HOST", help="How peers reach it [as it listens]."),
        click.option(
            "--kv-files", metavar="DIR", help="This server's files of `kv init-fleet` [plain TCP]."
        ),
        click.option(
            "--kv-nixl",
            metavar="PYTHON",
            help="Chunks come by RDMA, from a sidecar that this interpreter runs; `env`: that of "
            "`deepdraft env create nixl` [TCP].",
        ),
        click.option(
            "--kv-fetch",
            type=click.Choice(get_args(FetchRule)),
            help="Whether a peer's cache is fetched [auto: where it pays].",
        ),
        click.option(
            "--kv-hand-over-s",
            type=float,
            metavar="S",
            help="Seconds in which a server that stops gives its conversations to the others [10].",
        ),
        click.option(
            "--session-policy",
            type=click.Choice(get_args(SessionPolicy)),
            help="Whether conversations of several turns must name their session [optional].",
        ),
        click.option(
            "--session-header", metavar="NAME", help="The header that names it [X-Session-ID]."
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def fleet_settings(flags: dict[str, Any]) -> dict[str, Any]:
    """Settings of the fleet from the flags of `fleet_options`."""
    names = ("directory", "name", "listen", "advertise", "files", "fetch", "nixl", "hand_over_s")
    settings = {name: flags[f"kv_{name}"] for name in names}
    if settings["nixl"] == "env":
        from deepdraft.adapters.environments import ready

        settings["nixl"] = str(ready("nixl").python)
    return settings


def sampling_options(command: Decorated) -> Decorated:
    """How an answer is drawn."""
    options = (
        click.option("--max-tokens", type=int, metavar="N", help="Length limit of the answer."),
        click.option("--temperature", type=float, metavar="T", help="0 takes the likeliest token."),
        click.option("--top-p", type=float, metavar="P", help="Nucleus filter."),
        click.option("--seed", type=int, metavar="N", help="Repeats an answer."),
        click.option("--think/--no-think", default=None, help="Switch thinking on or off."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def model_directory(model: str | None) -> tuple[Path, str]:
    """Directory and name of a model; None means the bundled one. Raises CheckpointError."""
    if model is None:
        from deepdraft.server.service import bundled_checkpoint

        path, name = bundled_checkpoint(), DEMO_NAME
        if not (path / "config.json").is_file():
            raise CheckpointError(
                "this installation has no bundled model; give a checkpoint directory as MODEL"
            )
        return path, name
    path = Path(model)
    if not path.is_dir():
        raise CheckpointError(
            f"no checkpoint directory at {model}; MODEL is the directory that holds config.json"
        )
    return path, path.resolve().name


def body_fields(options: dict[str, Any]) -> dict[str, Any]:
    """Fields of a request body from the options of `sampling_options`, given ones only."""
    fields = {
        name: options[name]
        for name in ("max_tokens", "temperature", "top_p", "seed")
        if options[name] is not None
    }
    if options["think"] is not None:
        fields["thinking"] = {"type": "enabled" if options["think"] else "disabled"}
    return fields
