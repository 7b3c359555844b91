"""`deepdraft convert`: its flags.

Owns: what the user sees of a conversion. Knows nothing of: how the files are made.
"""

import json
from pathlib import Path
from typing import Any

import click

from deepdraft.checkpoint.progress import Bar
from deepdraft.errors import CheckpointError


@click.command()
@click.argument("checkpoint")
@click.argument("out", required=False)
@click.option("--tp", type=click.IntRange(1), metavar="N", help="Ranks to convert for.")
@click.option(
    "--layout",
    type=click.Choice(("published", "transformers5")),
    help="Names and configuration as published, or as transformers 5 saves them.",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    metavar="[PATTERN=]DTYPE",
    help="bfloat16, float16 or float32 for all matrices, or for the tensors or group of a pattern.",
)
@click.option("--json", "as_json", is_flag=True, help="--layout, --dtype: print JSON.")
@click.option("--check", is_flag=True, help="Compare a conversion with its digests; write nothing.")
@click.option(
    "--accept-key", "accept_keys", multiple=True, metavar="KEY", help="An unknown key to accept."
)
def convert(
    checkpoint: str,
    out: str | None,
    tp: int | None,
    layout: Any,
    dtypes: tuple[str, ...],
    as_json: bool,
    check: bool,
    accept_keys: tuple[str, ...],
) -> None:
    """Write CHECKPOINT into OUT: for --tp N ranks, or in another --layout or --dtype.

    --tp writes a file per rank and layer, read at full speed (DeepSeek-V4.1); started again after
    an interruption it goes on where it was, and --check reads it again and compares every file's
    digest. --layout and --dtype are for all other families; a later --dtype overrides an earlier
    one, and the error that each change makes is printed by group.
    """
    other = bool(layout or dtypes)
    if check:
        from deepdraft.checkpoint.convert import verify

        if out is not None or tp is not None or other:
            raise click.UsageError("--check takes the converted directory alone")
        read = verify(Path(checkpoint), progress=Bar("checked"))
        click.echo(f"{checkpoint}: {read:,} bytes, every digest as it was written")
        return
    if out is None or (tp is not None) == other:
        raise click.UsageError("give OUT and --tp N, or OUT and --layout or --dtype, or --check")
    if not Path(checkpoint).is_dir():
        raise CheckpointError(f"no checkpoint directory at {checkpoint}")
    if other:
        _relayout(Path(checkpoint), Path(out), layout, dtypes, as_json, accept_keys)
        return
    from deepdraft.checkpoint.convert import convert as work
    from deepdraft.checkpoint.reader import Checkpoint

    assert tp is not None
    source = Checkpoint.open(checkpoint, accept_unknown=accept_keys)
    manifest = work(source, Path(out), tp, progress=Bar("written"))
    total = sum(size for size, _ in manifest.files.values())
    click.echo(f"{out}: {tp} ranks, {len(manifest.files)} files, {total:,} bytes")


def _relayout(
    source: Path,
    out: Path,
    layout: Any,
    dtypes: tuple[str, ...],
    as_json: bool,
    accept_keys: tuple[str, ...],
) -> None:
    from deepdraft.checkpoint.relayout import read_formats, relayout

    report = relayout(
        source,
        out,
        layout=layout,
        formats=read_formats(dtypes),
        accept_unknown=accept_keys,
        progress=Bar("written"),
    )
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=2))
        return
    click.echo(
        f"{out}: {report.layout} layout, {report.tensors} tensors in {report.files} files, "
        f"{report.num_bytes:,} bytes"
    )
    for name, error in report.errors.items():
        click.echo(
            f"  {name}: {error.tensors} tensors, {', '.join(sorted(error.formats))}, relative "
            f"error {error.relative_rms:.2g} (rms), "
            f"at most {error.worst:.3g} of {error.largest:.3g}"
        )
    if report.left_out:
        click.echo(f"  left out, no name in this layout: {len(report.left_out)} tensors (mtp.*)")
