"""What a peer sent becomes an entry of this store.

Owns: which chunks need not be sent because they are here, and the making of the entry.
Knows nothing of: sockets, who sent what.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepdraft.kv.cache import KvCache
from deepdraft.kv.snapshot import ChunkRef, Manifest
from deepdraft.kv.store import CheckpointData, Chunk


def known_chunks(cache: KvCache, manifest: Manifest) -> list[Chunk | int]:
    """For each chunk of a peer's manifest the same chunk here, held once more, or -1."""
    keys = cache.chunk_keys(manifest.token_ids) if manifest.exact else []
    refs = manifest.all_chunks()
    out: list[Chunk | int] = [-1] * len(refs)
    with cache.lock:
        for number, (key, ref) in enumerate(zip(keys, refs, strict=False)):
            chunk = cache.memory.shared(key)
            if chunk is not None and chunk.digest == ref.digest:
                cache.memory.hold([chunk])
                out[number] = chunk
    return out


def adopt(cache: KvCache, manifest: Manifest, parts: Sequence[int | Chunk]) -> int:
    """The entry's number.

    `manifest`: checked, with the cache's chunk size; `parts`: for each of its chunks in stored
    order a reserved slot whose bytes have the manifest's digest, or one of `known_chunks`, whose
    hold is taken over.
    """
    keys = cache.chunk_keys(manifest.token_ids) if manifest.exact else []
    free = iter(parts)

    def chunks(refs: Sequence[ChunkRef], names: Sequence[bytes] = ()) -> list[Chunk]:
        out = []
        for number, ref in enumerate(refs):
            part = next(free)
            if isinstance(part, int):
                name = names[number] if number < len(names) else None
                part = cache.memory.chunk(part, ref.length, name)
                part.digest = ref.digest
                cache.memory.hold([part])
            out.append(part)
        return out

    entry = cache.memory.add(
        manifest.token_ids,
        exact=manifest.exact,
        chunks=chunks(manifest.chunks, keys),
        checkpoints=[CheckpointData(c.info, chunks(c.chunks)) for c in manifest.checkpoints],
    )
    assert next(free, None) is None, "a slot without a chunk"
    entry.fetched = True
    cache.publish(entry)
    return entry.id
