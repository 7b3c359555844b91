"""What a peer sent becomes an entry of this store.

Owns: which chunks need not be sent because they are here, and the making of the entry.
Knows nothing of: sockets, who sent what.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepdraft.kv.cache import KvCache
from deepdraft.kv.prefix import Path
from deepdraft.kv.snapshot import ChunkRef, Manifest
from deepdraft.kv.store import CheckpointData, Chunk


class Ahead:
    """Names of chunks and the way through the index of a request's tokens, made while its peer
    answers: what is fetched mostly begins with the same tokens."""

    def __init__(self, cache: KvCache, token_ids: np.ndarray) -> None:
        self.index = cache.index[True]
        self.names = cache.chunk_keys(token_ids)
        self.path = self.index.path(token_ids)

    def names_of(self, manifest: Manifest) -> list[bytes]:
        """Of a manifest that `fetch.shorten` cut: its last chunk may go on with other tokens."""
        return self.names[: len(manifest.chunks) - 1]

    def path_of(self, manifest: Manifest, shared: int) -> Path | None:
        """None: the manifest has more than the `shared` tokens."""
        more = manifest.num_tokens > shared
        return None if more else self.index.start_of(self.path, manifest.num_tokens)


def names_of(cache: KvCache, manifest: Manifest, known: Sequence[bytes] = ()) -> list[bytes]:
    """Names of a manifest's whole chunks of global KV; approximated ones have none. `known`: of
    `KvCache.chunk_keys`."""
    return cache.chunk_keys(manifest.token_ids, known) if manifest.exact else []


def known_chunks(cache: KvCache, manifest: Manifest, names: Sequence[bytes]) -> list[Chunk | int]:
    """For each chunk of a peer's manifest the same chunk here, held once more, or -1."""
    refs = manifest.all_chunks()
    out: list[Chunk | int] = [-1] * len(refs)
    with cache.lock:
        for number, (name, ref) in enumerate(zip(names, refs, strict=False)):
            chunk = cache.memory.shared(name)
            if chunk is not None and chunk.digest == ref.digest:
                cache.memory.hold([chunk])
                out[number] = chunk
    return out


def adopt(
    cache: KvCache,
    manifest: Manifest,
    parts: Sequence[int | Chunk],
    names: Sequence[bytes],
    path: Path | None = None,
) -> int:
    """The entry's number.

    `manifest`: checked, with the cache's chunk size; `parts`: for each of its chunks in stored
    order a reserved slot whose bytes have the manifest's digest, or one of `known_chunks`, whose
    hold is taken over. `names`: `names_of` the manifest; `path`: of
    `KvCache.publish`.
    """
    free = iter(parts)

    def chunks(refs: Sequence[ChunkRef], called: Sequence[bytes] = ()) -> list[Chunk]:
        out = []
        for number, ref in enumerate(refs):
            part = next(free)
            if isinstance(part, int):
                name = called[number] if number < len(called) else None
                part = cache.memory.chunk(part, ref.length, name)
                part.digest = ref.digest
                cache.memory.hold([part])
            out.append(part)
        return out

    entry = cache.memory.add(
        manifest.token_ids,
        exact=manifest.exact,
        chunks=chunks(manifest.chunks, names),
        checkpoints=[CheckpointData(c.info, chunks(c.chunks)) for c in manifest.checkpoints],
    )
    assert next(free, None) is None, "a slot without a chunk"
    entry.fetched = True
    cache.publish(entry, path)
    return entry.id
