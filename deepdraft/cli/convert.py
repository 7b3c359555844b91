"""`deepdraft convert`: its flags.

Owns: what the user sees of a conversion. Knows nothing of: how the files are made.
"""

from pathlib import Path

import click

from deepdraft.checkpoint.progress import Bar
from deepdraft.errors import CheckpointError


@click.command()
@click.argument("checkpoint")
@click.argument("out", required=False)
@click.option("--tp", type=click.IntRange(1), metavar="N", help="Ranks to convert for.")
@click.option("--check", is_flag=True, help="Compare a conversion with its digests; write nothing.")
@click.option(
    "--accept-key", "accept_keys", multiple=True, metavar="KEY", help="An unknown key to accept."
)
def convert(
    checkpoint: str, out: str | None, tp: int | None, check: bool, accept_keys: tuple[str, ...]
) -> None:
    """Write CHECKPOINT into OUT for --tp N ranks: a file per rank and layer, read at full speed.

    Started again after an interruption it goes on where it was. --check reads a conversion again
    and compares every file's digest.
    """
    if check:
        from deepdraft.checkpoint.convert import verify

        if out is not None or tp is not None:
            raise click.UsageError("--check takes the converted directory alone")
        read = verify(Path(checkpoint), progress=Bar("checked"))
        click.echo(f"{checkpoint}: {read:,} bytes, every digest as it was written")
        return
    if out is None or tp is None:
        raise click.UsageError("give OUT and --tp N, or --check")
    if not Path(checkpoint).is_dir():
        raise CheckpointError(f"no checkpoint directory at {checkpoint}")
    from deepdraft.checkpoint.convert import convert as work
    from deepdraft.checkpoint.reader import Checkpoint

    source = Checkpoint.open(checkpoint, accept_unknown=accept_keys)
    manifest = work(source, Path(out), tp, progress=Bar("written"))
    total = sum(size for size, _ in manifest.files.values())
    click.echo(f"{out}: {tp} ranks, {len(manifest.files)} files, {total:,} bytes")
