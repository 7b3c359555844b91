"""`deepdraft bench serve`: its flags.

Owns: names, defaults and checks of the flags. Knows nothing of: how the load is made.
"""

from pathlib import Path
from typing import Any

import click


@click.command("serve")
@click.option(
    "--target",
    "targets",
    multiple=True,
    required=True,
    metavar="[NAME=]URL",
    help="http://HOST:PORT of an OpenAI-compatible server, triton+http://HOST:PORT/MODEL, or "
    "hf:CHECKPOINT, transformers' generate; may be repeated.",
)
@click.option("--reference-python", "python", metavar="FILE", help="hf: its interpreter.")
@click.option(
    "--load",
    type=click.Choice(("fixed", "poisson", "conversations")),
    default="fixed",
    show_default=True,
    help="Streams at a time; arrivals a second; conversations of several turns.",
)
@click.option(
    "--levels", default="1", show_default=True, metavar="N,N", help="Streams, or arrivals a second."
)
@click.option(
    "--requests",
    type=click.IntRange(1, 1_000_000),
    default=32,
    show_default=True,
    metavar="N",
    help="Requests, or conversations, of each level.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1, 1 << 20),
    default=64,
    show_default=True,
    metavar="N",
    help="Of an answer, at most.",
)
@click.option(
    "--api",
    type=click.Choice(("chat", "completions")),
    default="chat",
    show_default=True,
    help="How targets are asked.",
)
@click.option("--model-name", metavar="NAME", help="The model to ask for [the first].")
@click.option("--trace", metavar="FILE", help="conversations: JSON Lines [made of the suite].")
@click.option(
    "--check",
    type=click.IntRange(0, 10_000),
    default=4,
    show_default=True,
    metavar="N",
    help="Questions whose greedy answers must be equal first.",
)
@click.option("--ignore-eos", is_flag=True, help="Answers of full length.")
@click.option(
    "--timeout",
    type=click.FloatRange(0, 86400, min_open=True),
    default=120.0,
    show_default=True,
    metavar="S",
    help="For one answer.",
)
@click.option("--seed", type=int, default=0, show_default=True, metavar="N")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--out", metavar="FILE", help="Write the result there, too.")
@click.option("--html", metavar="FILE", help="Write a page with plots there.")
def bench_serve(targets: tuple[str, ...], **options: Any) -> int:
    """Put the same load on endpoints that give the same answers.

    No figure is taken before all targets gave equal greedy answers. Exit code 1 if they did not, or
    if a request had a fault.
    """
    from deepdraft.proof.bench_serve import Plan, main, read_levels

    trace = options["trace"]
    plan = Plan(
        load=options["load"],
        levels=read_levels(options["levels"]),
        requests=options["requests"],
        max_tokens=options["tokens"],
        seed=options["seed"],
        check=options["check"],
        trace=None if trace is None else Path(trace),
    )
    return main(
        targets,
        plan,
        api=options["api"],
        model=options["model_name"],
        timeout_s=options["timeout"],
        ignore_eos=options["ignore_eos"],
        **{name: options[name] for name in ("as_json", "out", "html", "python")},
    )
