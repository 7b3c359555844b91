"""Subcommands that do one thing and end: generate, inspect, golden, selftest, bench.

Owns: their flags.
Knows nothing of: how the work is done; each command imports its module when it runs.
"""

import contextlib
import json
from typing import Any, get_args

import click
from click.core import ParameterSource

from deepdraft.cli.options import (
    OutputFile,
    body_fields,
    engine_options,
    model_argument,
    model_directory,
    sampling_options,
)
from deepdraft.config import Numerics


@click.command()
@model_argument
@click.option("-p", "--prompt", required=True, metavar="TEXT", help="What to answer.")
@click.option("--raw", is_flag=True, help="Continue the text itself, without the chat format.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
@click.option("--url", metavar="URL", help="Ask a server instead of loading a model.")
@click.option("--model-name", metavar="NAME", help="The model to ask that server for.")
@sampling_options
@engine_options
def generate(
    model: str | None,
    prompt: str,
    raw: bool,
    as_json: bool,
    url: str | None,
    model_name: str | None,
    **options: Any,
) -> None:
    """Answer one prompt with a model, by default the bundled one, and print the answer.

    Thinking goes to stderr, so that the answer alone can be piped on.
    """
    from deepdraft.cli.chat import open_backend

    fields = body_fields(options)
    if raw:
        if options["think"] is not None:
            raise click.UsageError("--think and --no-think belong to chat, not to --raw")
        body = {**fields, "prompt": prompt}
    else:
        body = {**fields, "messages": [{"role": "user", "content": prompt}]}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    with contextlib.closing(open_backend(model, url, model_name, options)) as backend:
        chunks = backend.answer("completions" if raw else "chat", body)
        result = _collect(chunks, quiet=as_json)
    if as_json:
        click.echo(json.dumps(result, ensure_ascii=False))


def _collect(chunks: Any, *, quiet: bool) -> dict[str, Any]:
    """Puts an answer together and, unless `quiet`, writes it as it comes."""
    text, reasoning, finish, usage, model = "", "", None, None, None
    for chunk in chunks:
        usage, model = chunk.get("usage") or usage, chunk.get("model", model)
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {"content": choice.get("text")}
            thought, piece = delta.get("reasoning_content") or "", delta.get("content") or ""
            if not quiet:
                if thought:
                    click.echo(click.style(thought, dim=True), nl=False, err=True)
                if piece and reasoning and not text:
                    click.echo("\n", err=True)
                click.echo(piece, nl=False)
            text, reasoning = text + piece, reasoning + thought
            finish = choice["finish_reason"] or finish
    if not quiet and not text.endswith("\n"):
        click.echo()
    return {
        "model": model,
        "text": text,
        "reasoning": reasoning or None,
        "finish_reason": finish,
        "usage": usage,
    }


@click.command()
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--gpus", "--tp", type=click.IntRange(1), metavar="N", help="What fits on N GPUs.")
@click.option("--gpu-gb", type=click.FloatRange(0, min_open=True), metavar="GB", help="Their size.")
@click.option(
    "--accept-key", "accept_keys", multiple=True, metavar="KEY", help="An unknown key to accept."
)
def inspect(path: str, **options: Any) -> int:
    """Show what a checkpoint directory, or a config.json alone, holds.

    Tensors, parameters and bytes per group and format, bytes per token of context, and with --gpus
    and --gpu-gb what fits.
    """
    from deepdraft.proof.inspect import main

    return main(path, **options)


@click.command()
@click.argument("directory", metavar="DIR")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def golden(directory: str, as_json: bool) -> int:
    """Replay the recorded data in DIR with its checkpoint; exit code 0 only if all pass."""
    from deepdraft.proof.golden import main

    return main(directory, as_json=as_json)


@click.command()
@click.option("--device", type=click.Choice(("cpu", "cuda")), default="cpu", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def selftest(device: str, as_json: bool) -> int:
    """Check that this machine's arithmetic is what the engine relies on."""
    from deepdraft.proof.selftest import main

    return main(device, as_json=as_json)


def _bench_step(
    model: str | None, options: dict[str, Any], *, layers: int | None, expert_pool: int | None,
    rows: str | None,
) -> int:  # fmt: skip
    from deepdraft.proof.bench_step_main import CONTEXT, ROWS, main

    given = click.get_current_context().get_parameter_source("context")
    wanted = ROWS if rows is None else _numbers(rows, "--rows", "1,6,8")
    return main(
        model,
        layers=layers,
        expert_pool=expert_pool,
        rows=wanted,
        context=CONTEXT if given == ParameterSource.DEFAULT else options["context"],
        as_json=options["as_json"],
        out=options["out"],
    )


def _numbers(text: str, option: str, example: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise click.UsageError(f"{option} takes numbers such as {example}, got {text!r}") from error


def _bench_prefill(
    model: str | None, options: dict[str, Any], *, layers: int | None, expert_pool: int | None,
    rows: str | None,
) -> int:  # fmt: skip
    from deepdraft.proof.bench_prefill_main import LENGTHS, TOKENS, main

    given = click.get_current_context().get_parameter_source("context")
    lengths, chunk = options["prefill"], _numbers(rows, "--rows", "8192") if rows else (None,)
    if len(chunk) > 1:
        raise click.UsageError("bench prefill takes one number of --rows: those of a chunk")
    return main(
        model,
        layers=layers,
        expert_pool=expert_pool,
        rows=chunk[0],
        context=TOKENS if given == ParameterSource.DEFAULT else options["context"],
        lengths=LENGTHS if lengths is None else _numbers(lengths, "--prefill", "1024,8192"),
        as_json=options["as_json"],
        out=options["out"],
    )


class _Bench(click.Command):
    """`bench serve` and `bench fleet` have flags of their own; the other measurements share those
    of `bench`."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **x: Any
    ) -> click.Context:
        if args[:1] in (["serve"], ["fleet"]):
            from deepdraft.cli import load

            command = load.bench_serve if args[0] == "serve" else load.bench_fleet
            return command.make_context(f"{info_name} {args[0]}", args[1:], parent, **x)
        return super().make_context(info_name, args, parent, **x)


@click.command(cls=_Bench)
@click.argument(
    "what",
    type=click.Choice(
        (
            "speed",
            "startup",
            "costs",
            "drafted",
            "accept",
            "lossless",
            "step",
            "prefill",
            "load",
            "compare",
        )
    ),
)
@model_argument
@click.argument("other", required=False, metavar="[B.json]")
@click.option("--context", type=click.IntRange(1), default=600, show_default=True, metavar="N")
@click.option("--tokens", type=click.IntRange(1), metavar="N", help="Tokens of an answer.")
@click.option("--runs", type=click.IntRange(1), default=5, show_default=True, metavar="N")
@click.option("--numerics", type=click.Choice(get_args(Numerics)), default="exact")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--out", type=OutputFile(), metavar="FILE", help="Write the result there, too.")
@click.option("--svg", type=OutputFile(), metavar="FILE", help="accept: write a plot there.")
@click.option("--prompts", metavar="FILE", help="Prompts as JSON [bundled ones].")
@click.option("--num-prompts", type=click.IntRange(1), metavar="N", help="How many of them.")
@click.option("--quick", is_flag=True, help="accept: leave out block sizes and thresholds.")
@click.option(
    "--streams",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="accept, drafted: answers at a time.",
)
@click.option("--suite", metavar="CLASSES", help="speed: classes of the suite, all or none.")
@click.option("--url", "urls", multiple=True, metavar="[NAME=]URL", help="speed: a further server.")
@click.option("--remote-only", is_flag=True, help="speed: start no server, measure --url alone.")
@click.option("--prefill", metavar="N,N", help="speed, prefill: lengths of prompts.")
@click.option("--concurrency", metavar="N,N", help="speed: streams at a time, or none.")
@click.option("--temperature", type=click.FloatRange(0, 2), default=0.0, help="speed: [0].")
@click.option("--html", type=OutputFile(), metavar="FILE", help="speed: write the report there.")
@click.option(
    "--layers", type=click.IntRange(1), metavar="N", help="step, prefill: so many layers."
)
@click.option(
    "--expert-pool", type=click.IntRange(1), metavar="N", help="The same: experts a layer."
)
@click.option("--rows", metavar="N,N", help="step: rows of a step; prefill: of a chunk.")
def bench(what: str, model: str | None, other: str | None, **options: Any) -> int:
    """Measure a model, by default the bundled one.

    speed: plain decoding, and the Tetris prompt through a server; with --suite, --url, --prefill,
    --concurrency or --html answers of servers alone, in classes. compare: two written results,
    A.json and B.json. startup: a server's start. costs: of steps and drafts, for --cost-table.
    drafted: with drafts against plain. accept: how many drafts stand. lossless: drafted text is
    plain text. step: one decode step on a GPU, random weights of the published sizes or of MODEL's
    config.json. prefill: chunks of a prompt at several contexts, and whole prompts, likewise. load:
    one rank's part of a converted checkpoint onto the device, against the same reads into scratch
    buffers. serve, fleet: load on running servers, conversations on replicas; see `bench serve
    --help` and `bench fleet --help`.
    """
    step = {name: options.pop(name) for name in ("layers", "expert_pool", "rows")}
    if what == "step":
        return _bench_step(model, options, **step)
    if what == "prefill":
        return _bench_prefill(model, options, **step)
    if any(value is not None for value in step.values()):
        raise click.UsageError("--layers, --expert-pool and --rows are for bench step and prefill")
    if what == "compare":
        if model is None or other is None:
            raise click.UsageError("bench compare needs two files: A.json B.json")
        from deepdraft.proof.compare import main as compare

        return compare(model, other, as_json=options["as_json"])
    if other is not None:
        raise click.UsageError(f"bench {what} takes one model, got {other!r} as well")
    from deepdraft.proof.bench import main

    path, name = model_directory(model)
    return main(what, path, model_name=name, **options)
