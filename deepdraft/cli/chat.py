"""`deepdraft chat`: a conversation in the terminal.

Owns: the loop of questions and answers, the slash commands, what Ctrl-C means.
Knows nothing of: where answers come from.
"""

import contextlib
import re
import signal
from collections.abc import Callable
from typing import Any

import click

from deepdraft.cli.backend import Backend, Json, LocalBackend, RemoteBackend
from deepdraft.cli.options import (
    ENGINE_FIELDS,
    body_fields,
    engine_options,
    model_argument,
    model_directory,
    sampling_options,
)
from deepdraft.config import load_config
from deepdraft.errors import DeepdraftError

HELP = """\
/help          this list
/reset         forget the conversation
/think on|off  think before answering, or not
/exit          leave (so does Ctrl-D)
Ctrl-C stops an answer."""


@click.command()
@model_argument
@click.option("--url", metavar="URL", help="Talk to a server instead of loading a model.")
@click.option("--model-name", metavar="NAME", help="The model to ask that server for.")
@click.option("--system", metavar="TEXT", help="Opens the conversation with instructions.")
@sampling_options
@engine_options
def chat(
    model: str | None, url: str | None, model_name: str | None, system: str | None, **options: Any
) -> None:
    """Talk to a model in the terminal, by default to the bundled one.

    Thinking is shown dim. Ctrl-C stops an answer, Ctrl-D leaves; /help lists the rest.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    # Some shells start background jobs with SIGINT ignored; Ctrl-C must always stop an answer.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.closing(open_backend(model, url, model_name, options)) as backend:
        session = Chat(backend, body_fields(options), system)
        click.echo("Ask something; /help lists the commands.")
        session.loop(lambda: input("> "))


def open_backend(
    model: str | None, url: str | None, model_name: str | None, options: dict[str, Any]
) -> Backend:
    """The server at `url`, or the model loaded here."""
    if url is not None:
        if model is not None:
            raise click.UsageError("give MODEL or --url, not both")
        return RemoteBackend(url, model_name)
    if model_name is not None:
        raise click.UsageError("--model-name goes with --url")
    path, name = model_directory(model)
    engine = {key: options[key] for key in ENGINE_FIELDS}
    # One answer at a time: no memory is set aside for more, and none are timed at the start.
    return LocalBackend(path, name, load_config(engine={**engine, "max_running": 1}))


class Chat:
    """One conversation."""

    def __init__(self, backend: Backend, fields: Json, system: str | None = None) -> None:
        self.fields = fields
        self.messages: list[Json] = []
        self._backend = backend
        self._system = system

    def loop(self, read_line: Callable[[], str]) -> None:
        """Reads lines until there are no more. A failed answer is reported and forgotten."""
        while True:
            try:
                line = read_line().strip()
            except EOFError:
                click.echo()
                return
            except KeyboardInterrupt:
                click.echo("\nCtrl-D or /exit leaves.")
                continue
            if line in ("/exit", "/quit"):
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self.ask(line)

    def _command(self, line: str) -> None:
        match line.split():
            case ["/help"]:
                click.echo(HELP)
            case ["/reset"]:
                self.messages.clear()
                click.echo("The conversation is forgotten.")
            case ["/think", ("on" | "off") as switch]:
                kind = "enabled" if switch == "on" else "disabled"
                self.fields["thinking"] = {"type": kind}
                click.echo(f"Thinking is {switch}.")
            case _:
                click.echo(f"Unknown command {line!r}.\n{HELP}")

    def ask(self, question: str) -> None:
        """Streams one answer and keeps it. Ctrl-C keeps what has come so far."""
        self.messages.append({"role": "user", "content": question})
        system = [{"role": "system", "content": self._system}] if self._system else []
        body = {
            **self.fields,
            "messages": [*system, *self.messages],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        printer = Printer()
        chunks = self._backend.answer("chat", body)
        try:
            for chunk in chunks:
                printer.show(chunk)
        except KeyboardInterrupt:
            printer.end()
            click.echo("(stopped)")
        except DeepdraftError as error:
            printer.end()
            click.echo(f"Error: {error.message}", err=True)
        else:
            printer.end()
            if printer.finish_reason == "length":
                click.echo("(cut off: the length limit is reached)")
        finally:
            close = getattr(chunks, "close", None)
            if close is not None:
                close()
        if printer.content or printer.finish_reason == "stop":
            self.messages.append({"role": "assistant", "content": printer.content})
        else:
            self.messages.pop()


# To a terminal they are orders: it would clear the screen, change its title or fill the clipboard.
# Halves of surrogate pairs cannot be written at all.
_SIGNS = {c: f"\\x{c:02x}" for c in range(160) if not 32 <= c < 127}
_SIGNS |= {ord("\t"): "\t", ord("\n"): "\n", ord("\r"): ""}
_HALVES = re.compile(r"[\ud800-\udfff]")


def harmless(text: str) -> str:
    """A text of a model with the characters that a terminal would obey spelled out."""
    return _HALVES.sub("\ufffd", text.translate(_SIGNS))


class Printer:
    """Writes chunks as they come, reasoning dim, and remembers the content."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.finish_reason: str | None = None

    def show(self, chunk: Json) -> None:
        """Writes the text of one chunk."""
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta") or {}
            thought = delta.get("reasoning_content") or delta.get("reasoning")
            if thought:
                self.reasoning += thought
                click.echo(click.style(harmless(thought), dim=True), nl=False)
            text = delta.get("content")
            if text:
                if self.reasoning and not self.content:
                    click.echo("\n")
                self.content += text
                click.echo(harmless(text), nl=False)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def end(self) -> None:
        """Ends the last line."""
        if (self.content or self.reasoning) and not self.content.endswith("\n"):
            click.echo()
