"""Subcommands that prove a checkpoint: doctor, parity, tiny.

Owns: their flags. Knows nothing of: how the work is done; each imports its module when it runs.
"""

from typing import Any

import click

_KINDS = ("llama", "v2", "v2-lite", "v3", "v32", "v4", "v41")


@click.command()
@click.argument("family", type=click.Choice(_KINDS))
@click.argument("out", metavar="OUT")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N")
@click.option(
    "--style",
    type=click.Choice(("published", "transformers5", "vllm", "lmdeploy")),
    default="published",
    show_default=True,
    help="Keys of config.json.",
)
@click.option(
    "--storage",
    type=click.Choice(("float32", "bfloat16", "published")),
    default="float32",
    show_default=True,
    help="How weights are stored.",
)
@click.option("--shards", type=click.IntRange(1, 99), default=1, show_default=True, metavar="N")
@click.option("--real-latents", is_flag=True, help="Latent sizes that kernels are compiled for.")
@click.option("--mtp", is_flag=True, help="With a drafter (v3, v32, v4).")
@click.option("--mtp-next", is_flag=True, help="v4: with the first release's, one layer.")
def tiny(family: str, out: str, mtp_next: bool, **options: Any) -> int:
    """Write a tiny checkpoint of FAMILY with random weights into the directory OUT."""
    from deepdraft.proof.tiny_write import write_tiny

    if mtp_next:
        options["mtp"] = "next"
    click.echo(str(write_tiny(out, family, **options)))
    return 0


@click.command()
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.option(
    "--engine",
    type=click.Choice(("native", "vllm", "lmdeploy", "triton")),
    default="native",
    show_default=True,
    help="The engine that is to run it.",
)
@click.option("--static", "static_only", is_flag=True, help="Read headers only, no weight.")
@click.option("--full", is_flag=True, help="Read and run weights of any size.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--accept-key", "accept_keys", multiple=True, metavar="KEY", help="An unknown key to accept."
)
def doctor(checkpoint: str, **options: Any) -> int:
    """Say what is wrong with a checkpoint, by what it says about itself; exit code 1 on errors."""
    from deepdraft.proof.doctor.run import main

    return main(checkpoint, **options)


@click.command()
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.argument("at", metavar="[DIR|URL]", required=False)
@click.option(
    "--reference",
    type=click.Choice(("hf", "golden", "native", "openai", "vllm")),
    required=True,
    help="transformers; recorded data in DIR; our engine on DIR; a server at URL; vLLM.",
)
@click.option(
    "--environment",
    type=click.Choice(("vllm-cpu", "vllm")),
    default="vllm-cpu",
    show_default=True,
    help="vllm: where it runs (`deepdraft env create`).",
)
@click.option(
    "--reference-python", "python", metavar="FILE", help="hf, and vllm as a third: its interpreter."
)
@click.option("--tokens", type=click.IntRange(2), metavar="N", help="Length of the text.")
@click.option("--greedy", type=click.IntRange(0), default=16, show_default=True, metavar="N")
@click.option(
    "--dtype",
    type=click.Choice(("float32", "bfloat16", "float16")),
    default="float32",
    show_default=True,
    help="hf: also what this dtype costs.",
)
@click.option("--model-name", metavar="NAME", help="openai: the model to ask for.")
@click.option("--html", metavar="FILE", help="Write a page with plots there.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--accept-key", "accept_keys", multiple=True, metavar="KEY", help="An unknown key to accept."
)
def parity(checkpoint: str, at: str | None, environment: str, **options: Any) -> int:
    """Compare our engine on CHECKPOINT with a reference, and name what makes them differ.

    DIR or URL says where the reference is; with hf and vllm, a directory other than CHECKPOINT.
    Exit code 1 if they differ.
    """
    from deepdraft.proof.parity.run import main

    if options["reference"] == "vllm":
        from pathlib import Path

        from deepdraft.adapters.vllm_reference import VllmReference

        options["engine"] = VllmReference(Path(at or checkpoint), cpu=environment == "vllm-cpu")

    return main(checkpoint, at, **options)
