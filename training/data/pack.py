"""Turn documents into packed token ids and write the corpus files.

Owns: cutting long documents, the file layout and its description. Files in the output folder:
`tokens.u16` (all documents back to back, little-endian), `doc_starts.u32` (first token of each
document), `docs.json` (sources with token ranges) and `pack.xz` (all three in one xz stream, read
by `training.data.load`).
"""

from __future__ import annotations

import json
import lzma
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

BOS, EOS = 0, 1
PIECE = 1000  # tokens of a piece, so that it fits a row of 1024 with its marks
LONG_PIECE = 4000
MAGIC = b"DDCORP1\n"


@dataclass
class Packed:
    """Growing corpus in memory."""

    parts: list[np.ndarray]
    starts: list[int]
    sources: list[dict[str, Any]]
    total: int = 0

    def add(self, ids: np.ndarray) -> None:
        """Append one document."""
        self.starts.append(self.total)
        self.parts.append(ids)
        self.total += len(ids)


def newline_table(tokenizer: Tokenizer) -> np.ndarray:
    """[V] bool: tokens that end a line."""
    table = np.zeros(tokenizer.get_vocab_size(), dtype=bool)
    for token, i in tokenizer.get_vocab().items():
        table[i] = token.endswith("\u010a")  # byte-level spelling of the newline
    return table


def cut(ids: np.ndarray, newline: np.ndarray, limit: int) -> list[np.ndarray]:
    """Pieces of at most `limit` tokens that end at a line end where there is one."""
    ends = np.flatnonzero(newline[ids]) + 1
    pieces, at = [], 0
    while len(ids) - at > limit:
        i = int(np.searchsorted(ends, at + limit, side="right")) - 1
        stop = int(ends[i]) if i >= 0 and ends[i] > at + limit // 3 else at + limit
        pieces.append(ids[at:stop])
        at = stop
    pieces.append(ids[at:])
    return pieces


def encode_all(tokenizer: Tokenizer, texts: list[str]) -> Iterable[np.ndarray]:
    """Token ids of each text, in batches to bound memory."""
    for i in range(0, len(texts), 256):
        for e in tokenizer.encode_batch_fast(texts[i : i + 256], add_special_tokens=False):
            yield np.array(e.ids, dtype=np.uint16)


def add_source(
    packed: Packed,
    tokenizer: Tokenizer,
    newline: np.ndarray,
    texts: list[str],
    *,
    chat: bool,
    limit: int,
    **about: Any,
) -> None:
    """Encode and append one source and split; chat texts carry their own control tokens."""
    start, first = packed.total, len(packed.starts)
    over = 0
    for ids in encode_all(tokenizer, texts):
        if chat:
            if len(ids) > limit + 24:
                over += 1
                continue
            packed.add(ids)
            continue
        pieces = cut(ids, newline, limit)
        for n, piece in enumerate(pieces):
            if len(piece) < 8 and n < len(pieces) - 1:
                continue
            tail = [EOS] if n == len(pieces) - 1 else []
            packed.add(np.concatenate([[BOS], piece, tail]).astype(np.uint16))
    packed.sources.append(
        {
            **about,
            "start": start,
            "end": packed.total,
            "docs": len(packed.starts) - first,
            "first_doc": first,
            "bytes_of_text": sum(len(t.encode()) for t in texts),
            "dropped_too_long": over,
        }
    )


def write(packed: Packed, out: Path, about: dict[str, Any], *, preset: int = 6) -> Path:
    """Write the corpus files; returns the path of pack.xz."""
    tokens = np.concatenate(packed.parts).astype("<u2")
    starts = np.array(packed.starts, dtype="<u4")
    description = json.dumps({**about, "tokens": len(tokens), "sources": packed.sources}, indent=1)
    tokens.tofile(out / "tokens.u16")
    starts.tofile(out / "doc_starts.u32")
    (out / "docs.json").write_text(description + "\n", encoding="utf-8")
    head = description.encode()
    with lzma.open(out / "pack.xz", "wb", preset=preset) as f:
        f.write(MAGIC + struct.pack("<QQQ", len(head), len(starts), len(tokens)))
        f.write(head)
        f.write(starts.tobytes())
        f.write(tokens.tobytes())
    return out / "pack.xz"
