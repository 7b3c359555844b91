"""The `deepdraft` command: its name, version, list of subcommands, and how errors end it.

Owns: the lazy group, exit codes.
Knows nothing of: what a subcommand does. `--help` and `--version` import neither torch nor any
subcommand's module.
"""

import importlib
import io
import sys
from collections.abc import Sequence

import click

from deepdraft import __version__
from deepdraft.errors import DeepdraftError

# Name: module, attribute, and the line that --help shows without importing the module.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "serve": ("deepdraft.cli.serve", "serve", "Serve a model over HTTP."),
    "top": ("deepdraft.cli.top", "top", "Show what a server does now."),
    "chat": ("deepdraft.cli.chat", "chat", "Talk to a model in the terminal."),
    "generate": ("deepdraft.cli.tools", "generate", "Answer one prompt and print it."),
    "inspect": ("deepdraft.cli.tools", "inspect", "Show what a checkpoint or config.json holds."),
    "convert": ("deepdraft.cli.convert", "convert", "Rewrite a checkpoint for several GPUs."),
    "golden": ("deepdraft.cli.tools", "golden", "Replay recorded data against its tolerances."),
    "doctor": ("deepdraft.cli.proof", "doctor", "Say what is wrong with a checkpoint."),
    "parity": ("deepdraft.cli.proof", "parity", "Compare a checkpoint with a reference."),
    "tiny": ("deepdraft.cli.proof", "tiny", "Write a tiny checkpoint with random weights."),
    "selftest": ("deepdraft.cli.tools", "selftest", "Check this machine's arithmetic."),
    "kv": ("deepdraft.cli.kv", "kv", "A fleet's files, stored conversations, counters."),
    "fleet": ("deepdraft.cli.fleet", "fleet", "Run replicas of a server on Ray Serve."),
    "env": ("deepdraft.cli.adapters", "env", "Environments of other engines."),
    "export": ("deepdraft.cli.adapters", "export", "Write a repository for another server."),
    "triton": ("deepdraft.cli.adapters", "triton", "Run the bundled Triton server."),
    "vllm": ("deepdraft.cli.engines", "vllm", "Run vLLM on a checkpoint."),
    "lmdeploy": ("deepdraft.cli.engines", "lmdeploy", "Settings and a check for LMDeploy."),
    "bench": ("deepdraft.cli.tools", "bench", "Measure speed or start-up."),
}


class LazyGroup(click.Group):
    """A group whose subcommands are imported when they run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the module of one subcommand."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        return getattr(importlib.import_module(module), attribute)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the table without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry[2]) for name, entry in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="deepdraft")
def cli() -> None:
    """An inference engine for DeepSeek models."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code.

    0 worked; 1 a check failed; 2 wrong usage, settings, files or requests, with one message; 3 a
    process of a tensor-parallel model died or hung; 130 stopped by Ctrl-C.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names from files may not be text
    try:
        given = sys.argv[1:] if arguments is None else list(arguments)
        # Kept for `serve`, which starts itself once more for each rank.
        result = cli.main(given, prog_name="deepdraft", standalone_mode=False, obj=given)
    except DeepdraftError as error:
        click.echo(f"Error: {error.message}", err=True)
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return 2
    except (click.Abort, KeyboardInterrupt):
        click.echo("Stopped.", err=True)
        return 130
    except BrokenPipeError:
        # The reader of our output has enough, as in `deepdraft inspect | head`.
        sys.stderr.close()
        return 0
    except OSError as error:
        # A path that no look-up expected: too long a name, links in a circle, a disk that fails.
        click.echo(f"Error: {error}", err=True)
        return 2
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(main())
