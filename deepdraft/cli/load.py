"""`deepdraft bench serve` and `bench fleet`: their flags.

Owns: names, defaults and checks of the flags. Knows nothing of: how the load is made.
"""

from pathlib import Path
from typing import Any

import click

from deepdraft.cli.ending import clean_end
from deepdraft.cli.options import OutputFile


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
@click.option("--out", type=OutputFile(), metavar="FILE", help="Write the result there, too.")
@click.option("--html", type=OutputFile(), metavar="FILE", help="Write a page with plots there.")
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


_SHARING = {"on": (True,), "off": (False,), "both": (True, False)}


@click.command("fleet")
@click.argument("model", metavar="[MODEL]", required=False)
@click.option("--servers", metavar="N,N", help="Plain servers with one directory; no Ray.")
@click.option("--replicas", metavar="N,N", help="Fleets on a Ray of their own (`fleet up`).")
@click.option("--url", metavar="URL", help="A fleet that runs, of so many --replicas [1].")
@click.option("--simulate", metavar="COSTS", help="Measure nothing: simulate --replicas.")
@click.option("--costs", metavar="COSTS", help="Measured costs: predict every fleet, too.")
@click.option("--calibrate", is_flag=True, help="Measure the costs first, and predict.")
@click.option(
    "--sharing",
    type=click.Choice(tuple(_SHARING)),
    default="on",
    show_default=True,
    help="Whether servers fetch conversations from each other.",
)
@click.option(
    "--routing",
    type=click.Choice(("random", "sticky", "own", "both")),
    help="Of turns: any server, always the same one, as the fleet itself does. both: the first "
    "that can be had, and sticky [servers: random; others: own].",
)
@click.option(
    "--conversations", type=click.IntRange(1, 100_000), default=60, show_default=True, metavar="N"
)
@click.option(
    "--rate", type=float, default=1.0, show_default=True, metavar="R", help="That begin a second."
)
@click.option(
    "--turns", type=float, default=6.7, show_default=True, metavar="N", help="On average."
)
@click.option("--most-turns", type=int, default=20, show_default=True, metavar="N")
@click.option(
    "--chars", type=int, default=2400, show_default=True, metavar="N", help="Of the first text."
)
@click.option(
    "--tokens", type=int, default=24, show_default=True, metavar="N", help="Of each answer."
)
@click.option(
    "--pause", type=float, default=1.0, show_default=True, metavar="S", help="Between turns."
)
@click.option("--seed", type=int, default=0, show_default=True, metavar="N")
@click.option(
    "--per-machine",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    metavar="N",
    help="simulate: replicas on each machine.",
)
@click.option(
    "--limit-ms",
    type=click.FloatRange(0, min_open=True),
    metavar="MS",
    help="simulate: find the --rate at which 95 of 100 later turns have a first token within this.",
)
@click.option("--kv-memory", metavar="SIZE", help="simulate: of each replica [no limit].")
@click.option("--runs", type=click.IntRange(1, 100), default=3, show_default=True, metavar="N")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--out",
    type=OutputFile(),
    metavar="FILE",
    help="Write the result there, too, fleet by fleet.",
)
@clean_end()
def bench_fleet(model: str | None, url: str | None, **options: Any) -> int:
    """Play conversations of 2 to 20 turns on 1 to N replicas of MODEL, by default the bundled one.

    Times to the first token, where caches came from and how much was reused, by turn; bytes
    fetched; imbalance. With --calibrate or --costs each fleet is simulated as well, and the
    prediction compared. Exit code 1 if a request had a fault.
    """
    from deepdraft.cli.options import model_directory
    from deepdraft.config import parse_bytes
    from deepdraft.proof.bench_fleet import cases, check_counts, main
    from deepdraft.proof.fleet_trace import TracePlan

    given = {n: options.pop(n) for n in ("servers", "replicas")}
    simulated, costs = options.pop("simulate"), options.pop("costs")
    if (simulated or url) and given["servers"]:
        raise click.UsageError("--servers are started here; --url and --simulate take --replicas")
    if (simulated and url) or (given["servers"] and given["replicas"]):
        raise click.UsageError("choose one of --servers, --replicas, --url and --simulate")
    if url and (options["calibrate"] or options["sharing"] != "on"):
        raise click.UsageError("--calibrate and --sharing are for fleets that are started here")
    if options["calibrate"] and (costs or simulated):
        raise click.UsageError("--calibrate measures what --costs and --simulate read")
    kind = "url" if url else "servers" if given["servers"] else "replicas"
    counts = check_counts(given["servers"] or given["replicas"] or "1", f"--{kind}")
    if url and len(counts) > 1:
        raise click.UsageError("--url is one fleet: give one number of --replicas")
    routing = options.pop("routing") or ("random" if kind == "servers" else "own")
    if kind == "servers" and routing == "own":
        raise click.UsageError("plain servers have no routing of their own: random or sticky")
    if kind != "servers" and not simulated:
        if routing == "random" or (url and routing != "own"):
            raise click.UsageError("turns of --replicas and --url are routed by the fleet itself")
    plan = TracePlan(
        conversations=options.pop("conversations"),
        rate=options.pop("rate"),
        mean_turns=options.pop("turns"),
        most_turns=options.pop("most_turns"),
        document_chars=options.pop("chars"),
        max_tokens=options.pop("tokens"),
        pause_s=options.pop("pause"),
        seed=options.pop("seed"),
    )
    wanted = cases(
        kind,
        counts,
        _SHARING[options.pop("sharing")],
        ("own" if kind == "replicas" and not simulated else "random", "sticky")
        if routing == "both"
        else (routing,),
    )
    size, limit_ms = options.pop("kv_memory"), options["limit_ms"]
    if (size or limit_ms) and not simulated:
        raise click.UsageError("--limit-ms and --kv-memory are for --simulate")
    if size:
        options["kv_bytes"] = float(parse_bytes("--kv-memory", size))
    path, _ = model_directory(model)
    return main(
        wanted,
        plan,
        simulate_only=simulated,
        costs=costs,
        model=None if model is None else str(path),
        url=url,
        **options,
    )
