"""Load the packed corpus; needs numpy and the standard library only.

Reads `pack.xz` (or the folder that holds it or the three plain files) written by
`training.data.pack`. Knows nothing of tokenizers.
"""

from __future__ import annotations

import json
import lzma
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"DDCORP1\n"


@dataclass(frozen=True)
class Source:
    """One source and split: tokens[start:end], documents first_doc .. first_doc + docs - 1.

    `weight` is the share of training tokens in percent (0 for validation and for sources that
    are meant for a long-context phase); `chat` documents hold a prompt and an answer.
    """

    name: str
    license: str
    weight: float
    split: str
    start: int
    end: int
    docs: int
    first_doc: int
    chat: bool
    bytes_of_text: int


@dataclass(frozen=True)
class Corpus:
    """tokens [N] uint16, doc_starts [D] uint32 (ascending), sources, and the whole description."""

    tokens: np.ndarray
    doc_starts: np.ndarray
    sources: list[Source]
    about: dict[str, Any]

    def docs(self, source: Source) -> np.ndarray:
        """[docs, 2] int64 start and end of each document of a source."""
        first = self.doc_starts[source.first_doc : source.first_doc + source.docs].astype(np.int64)
        return np.stack([first, np.append(first[1:], source.end)], axis=1)


def _corpus(tokens: np.ndarray, starts: np.ndarray, about: dict[str, Any]) -> Corpus:
    names = Source.__dataclass_fields__
    sources = [Source(**{k: v for k, v in s.items() if k in names}) for s in about["sources"]]
    if sources[-1].end != len(tokens) or len(tokens) != about["tokens"]:
        raise ValueError("corpus: the description does not match the number of tokens")
    return Corpus(tokens, starts, sources, about)


def load(path: str | Path) -> Corpus:
    """Corpus from `pack.xz`, or from a folder; ValueError for a damaged file."""
    path = Path(path)
    if path.is_dir():
        if not (path / "tokens.u16").exists():
            return load(path / "pack.xz")
        about = json.loads((path / "docs.json").read_text(encoding="utf-8"))
        tokens = np.fromfile(path / "tokens.u16", dtype="<u2")
        return _corpus(tokens, np.fromfile(path / "doc_starts.u32", dtype="<u4"), about)
    raw = lzma.decompress(path.read_bytes())
    if raw[:8] != MAGIC:
        raise ValueError(f"{path}: not a corpus file")
    n_head, n_docs, n_tokens = struct.unpack("<QQQ", raw[8:32])
    at = 32 + n_head
    if len(raw) != at + 4 * n_docs + 2 * n_tokens:
        raise ValueError(f"{path}: truncated or damaged")
    about = json.loads(raw[32:at])
    starts = np.frombuffer(raw, dtype="<u4", count=n_docs, offset=at)
    tokens = np.frombuffer(raw, dtype="<u2", count=n_tokens, offset=at + 4 * n_docs)
    return _corpus(tokens, starts, about)
