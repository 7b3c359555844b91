"""`deepdraft kv`: files of a fleet, stored conversations, counters of a running server.

Owns: the commands and what they print.
Knows nothing of: models, torch (reading a stored conversation imports it).
"""

import http.client
import json
import os
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from deepdraft.errors import DeepdraftError, RequestError

SUFFIX = "*.ddkv"


@click.group()
def kv() -> None:
    """The KV cache: make a fleet's files, look at stored conversations, show counters."""


@kv.command("init-fleet")
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option("--node", "nodes", multiple=True, required=True, metavar="NAME", help="A server.")
@click.option(
    "--host", "hosts", multiple=True, metavar="NAME", help="A host every certificate is valid for."
)
def init_fleet_command(directory: Path, nodes: tuple[str, ...], hosts: tuple[str, ...]) -> None:
    """Make a private authority, certificates for servers and the key of manifests in DIR.

    Give each server its own directory DIR/nodes/NAME. Run again to add servers.
    """
    from deepdraft.kv.fleet_files import init_fleet

    for place in init_fleet(directory, nodes, hosts):
        click.echo(f"{place.name}: --kv-files {place}")


@kv.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def inspect(paths: tuple[str, ...], as_json: bool) -> int:
    """Show what stored conversations are, without their tokens. PATH: a file or a directory. Exit
    code 2 where one cannot be read."""
    from deepdraft.kv.errors import SnapshotError

    failed = False
    for path in _paths(paths):
        try:
            file = _open(path)
        except SnapshotError as error:
            failed = True
            click.echo(f"Error: {error.message}", err=True)
            continue
        manifest = file.manifest
        about = {
            "file": str(path),
            "fingerprint": manifest.fingerprint.hex(),
            "tokens": manifest.num_tokens,
            "exact": manifest.exact,
            "bytes": manifest.data_bytes,
            "chunks": len(manifest.chunks),
            "block_tokens": manifest.layout.block_tokens,
            "window": manifest.layout.window,
            "format": manifest.layout.planes[0].format if manifest.layout.planes else "none",
            "checkpoints": [c.info.position for c in manifest.checkpoints],
        }
        if as_json:
            click.echo(json.dumps(about))
        else:
            for name, value in about.items():
                click.echo(f"{name:14}{value}")
            click.echo()
    return 2 if failed else 0


@kv.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
def verify(paths: tuple[str, ...]) -> int:
    """Check every byte of stored conversations; exit code 1 where one is damaged."""
    from deepdraft.kv.errors import SnapshotError

    damaged = whole = 0
    for path in _paths(paths):
        try:
            file = _open(path)
            read = file.reader()
            for number in range(len(file.manifest.all_chunks())):
                read(number)
            whole += 1
        except SnapshotError as error:
            damaged += 1
            click.echo(f"{path}: {error.message}")
    click.echo(f"{whole} whole, {damaged} damaged")
    return 1 if damaged else 0


@kv.command()
@click.argument("url", default="http://127.0.0.1:8000", metavar="[URL]")
def stats(url: str) -> None:
    """Show the cache's counters of a running server."""
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise RequestError(f"{url!r} is no address: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise RequestError(f"{url!r} is no http or https address")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, port, timeout=10)
    headers = {}
    if key := os.environ.get("DEEPDRAFT_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    try:
        connection.request("GET", parts.path.rstrip("/") + "/healthz", headers=headers)
        body = json.loads(connection.getresponse().read(1 << 20))
        counters = body["engine"]
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        raise DeepdraftError(f"no counters from {parts.netloc}: {type(error).__name__}") from error
    finally:
        connection.close()
    names = sorted(name for name in counters if name.startswith("kv_"))
    if not names:
        click.echo("this server keeps no conversations")
    for name in names:
        click.echo(f"{name.removeprefix('kv_'):32}{counters[name]}")


def _paths(paths: tuple[str, ...]) -> Iterator[Path]:
    for name in paths:
        path = Path(name)
        if path.is_dir():
            yield from sorted(path.rglob(SUFFIX))
        else:
            yield path


def _open(path: Path) -> Any:
    from deepdraft.kv.snapshot import SnapshotFile

    return SnapshotFile.open(path)
