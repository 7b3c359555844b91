"""The cache that an engine talks to: look up, resume, capture, store.

Owns: which conversations are indexed, where their bytes lie (memory or disk), and the promise that
a fault of any of them ends in computing again, never in an error or another answer.
Knows nothing of: requests, scheduling, sockets.

Only the thread that owns the sequences may call `resume`, `restore`, `capture` and `store`;
`lookup`, `stats` and `close` may be called from any thread.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from deepdraft.errors import ConfigError, StateError
from deepdraft.kv import codec
from deepdraft.kv.codec import Checkpoint, Pool, State
from deepdraft.kv.errors import SnapshotError, StoreFull
from deepdraft.kv.layout import Layout
from deepdraft.kv.placement import Pinned, nearest_nodes
from deepdraft.kv.plan import (
    Mode,
    Plan,
    Reuse,
    Wanted,
    best_first,
    plans,
)
from deepdraft.kv.prefix import TOKEN_BYTES, PrefixIndex, token_array, token_bytes
from deepdraft.kv.prefix import Path as TokenPath
from deepdraft.kv.reuse import Hit, Resumed, WindowRebuilder, covers, label_of, match_of, worth
from deepdraft.kv.settings import StoreSettings
from deepdraft.kv.slab import Slab
from deepdraft.kv.snapshot import (
    VERSION,
    ChunkRef,
    Manifest,
    SnapshotFile,
    StoredCheckpoint,
    digest,
    encode_tokens,
)
from deepdraft.kv.spill import SpillDir
from deepdraft.kv.store import CheckpointData, Chunk, Entry, EntryState, Store
from deepdraft.models.sequence import Sequence

logger = logging.getLogger(__name__)
NODE_BLOCKS = 8
"""Blocks of state that a node of the prefix tree stands for."""


class KvCache:
    """Stored conversations of one server."""

    def __init__(
        self,
        pool: Pool,
        *,
        expected: bytes,
        layout: Layout,
        max_bytes: int,
        mode: Mode = "full",
        reuse: Reuse = "exact",
        drafter: bool = False,
        rebuilder: WindowRebuilder | None = None,
        settings: StoreSettings | None = None,
        spill: Path | None = None,
        spill_bytes: int = 0,
        background: bool = False,
        shared: bool = False,
    ) -> None:
        """`expected`: this server's fingerprint. `drafter`: hits must restore the drafter too.
        `shared`: peers will read from this memory.
        `background`: hash in a thread of the cache's own; a conversation can be found once it is
        hashed."""
        if not codec.pool_matches(layout, pool):
            raise ConfigError("the KV layout table does not fit this model's state pool")
        self.settings = settings or StoreSettings()
        self.layout, self.expected, self.mode, self.reuse = layout, expected, mode, reuse
        self.drafter, self.rebuilder = drafter, rebuilder
        self.geometry = codec.geometry_of(pool)
        self.chunk_bytes = self.settings.chunk_blocks * layout.block_bytes
        device = codec.device_of(pool)
        slab = Slab(
            slot_bytes=self.chunk_bytes,
            num_slots=max_bytes // self.chunk_bytes,
            as_file=shared,
            nodes=nearest_nodes(device),
        )
        self._pinned = Pinned(slab.array) if device.type == "cuda" else None
        self.memory = Store(slab, self.settings, on_drop=self._dropped, trimmed=background)
        self.lock = self.memory.lock
        self.index = {e: PrefixIndex(NODE_BLOCKS * layout.block_tokens) for e in (True, False)}
        """By whether global KV is exact."""
        self.counters: Counter[str] = Counter()
        self._files: dict[int, SnapshotFile] = {}
        self._file_ids = itertools.count(-1, -1)
        self._seed = digest(expected + b"chunk" + self.settings.chunk_blocks.to_bytes(4, "little"))
        self._worker = ThreadPoolExecutor(1, "deepdraft-kv") if background else None
        self._pending: set[Future[None]] = set()
        self.spill = None
        if spill is not None:
            self.spill = SpillDir(spill, layout=layout, expected=expected, max_bytes=spill_bytes)
            for file in self.spill.files.values():
                self._index_file(file)

    # ---- looking up ------------------------------------------------------------------------

    def _wanted(self, num_tokens: int) -> Wanted:
        return Wanted(num_tokens, self.mode, self.reuse, self.drafter, self.rebuilder is not None)

    def _plans(self, token_ids: Seq[int] | np.ndarray) -> list[Plan]:
        wanted = self._wanted(len(token_ids))
        found: list[Plan] = []
        for exact, index in self.index.items():
            match = index.match(token_ids[:-1])
            found += plans(self.geometry, wanted, match, exact_entries=exact)
        least = self.settings.min_tokens
        return best_first([p for p in found if len(token_ids) - p.rows >= least])

    def saved(self, token_ids: Seq[int] | np.ndarray, manifest: Manifest | None = None) -> int:
        """Tokens of this request that need not be computed, from what is here; with a manifest
        from what a peer has instead."""
        n = len(token_ids)
        if manifest is None:
            with self.lock:
                found = self._plans(token_ids)
        else:
            match = match_of(manifest, token_ids[:-1])
            exact = manifest.exact
            found = list(plans(self.geometry, self._wanted(n), match, exact_entries=exact))
        most = max((n - plan.rows for plan in found), default=0)
        return most if most >= self.settings.min_tokens else 0

    def lookup(self, token_ids: Seq[int]) -> Hit | None:
        """The cheapest way to start this request from what is stored; None: from nothing.

        The hit must be given to `restore` or `release`.
        """
        self.counters["lookups"] += 1
        with self.lock:
            for plan in self._plans(token_ids):
                if plan.entry < 0:
                    file = self._files[plan.entry]
                    assert self.spill is not None
                    self.spill.touch(file)
                    return Hit(plan, len(token_ids), "disk", file)
                entry = self.memory.pin(plan.entry)
                if entry is not None:
                    source = "peer" if entry.fetched else "host"
                    return Hit(plan, len(token_ids), source, entry)
        return None

    def release(self, hit: Hit) -> None:
        """The hit is not used any more."""
        if isinstance(hit.entry, Entry):
            self.memory.unpin(hit.entry)

    def resume(self, token_ids: Seq[int], state: State) -> Resumed | None:
        """Look up and restore until it works or nothing is found. None: prefill from token 0.

        Afterwards the caller prefills `token_ids[resumed.num_tokens:]`, at least one token.
        """
        while (hit := self.lookup(token_ids)) is not None:
            resumed = self.restore(hit, token_ids, state)
            if resumed is not None:
                self.counters["hits"] += 1
                self.counters[f"hits_{hit.plan.kind}"] += 1
                self.counters["tokens_reused"] += resumed.cached_tokens
                self.counters["tokens_computed"] += len(token_ids) - resumed.cached_tokens
                return resumed
            if hit.refused:
                break  # trying it again would not end
        self.counters["misses"] += 1
        self.counters["tokens_computed"] += len(token_ids)
        return None

    # ---- restoring -------------------------------------------------------------------------

    def restore(self, hit: Hit, token_ids: Seq[int], state: State) -> Resumed | None:
        """Fill an empty sequence from a hit, and end the hit.

        None where stored bytes are damaged (the entry is dropped) or the sequence cannot take
        them: it is empty then, and the request is computed from the start.
        """
        plan, began = hit.plan, time.perf_counter()
        if state.num_tokens:
            self.release(hit)
            raise StateError("only an empty sequence can be filled from the cache")
        try:
            if plan.position > state.pool.max_tokens:
                raise StateError(f"{plan.position} tokens do not fit the sequence")
            self._fill(hit, list(token_ids[: plan.position]), state)
        except SnapshotError as error:
            logger.warning("a stored conversation is dropped: %s", error)
            self.counters["restore_failed"] += 1
            self._drop(hit)
            state.truncate(0)
            return None
        except StateError as error:
            logger.warning("a stored conversation cannot be used: %s", error)
            self.counters["restore_refused"] += 1
            hit.refused = True
            state.truncate(0)
            return None
        finally:
            self.release(hit)
            self.counters["restore_microseconds"] += round(1e6 * (time.perf_counter() - began))
        if not plan.exact:
            provenance = f"replayed at {plan.position}"
        else:
            provenance = "exact" if state.origin == "exact" else "whole"
        return Resumed(plan.position, hit.num_tokens - plan.rows, hit.source, provenance)

    def _fill(self, hit: Hit, token_ids: list[int], state: State) -> None:
        plan, layout = hit.plan, self.layout
        infos, read, tokens, per = self._reader(hit.entry)
        if not np.array_equal(tokens[: len(token_ids)], token_array(token_ids)):
            raise StateError("the hit belongs to another request: the tokens differ")
        blocks = layout.num_blocks(plan.position)
        for number, first in enumerate(range(0, blocks, per)):
            count = min(per, blocks - first)
            data = read(number)[: count * layout.block_bytes]
            codec.restore_blocks(layout, state, first, data, plan.position)
        source = hit.entry
        exact = source.exact if isinstance(source, Entry) else source.manifest.exact
        if isinstance(state, Sequence) and plan.kind == "prefix":
            codec.adopt_prefix(state, token_ids)
            return
        if plan.kind != "checkpoint":
            assert not isinstance(state, Sequence)
            assert plan.replay_from is not None
            codec.adopt_global(
                state, token_ids, replay_from=plan.replay_from, exact=exact and plan.exact
            )
            if self.mode == "full" and plan.kind == "recompute":
                assert self.rebuilder is not None
                self.rebuilder.rebuild_windows(state, feed_drafter=self.drafter)
            return
        at = -(-layout.num_blocks(len(tokens)) // per)
        for info, parts in infos:
            if info.position == plan.position:
                data = np.concatenate([read(at + i) for i in range(parts)])
                codec.restore_checkpoint(layout, state, info, data)
                codec.adopt_checkpoint(state, info, token_ids, decoder=plan.decoder, exact=exact)
                return
            at += parts
        raise SnapshotError(f"the checkpoint at {plan.position} is gone")

    def _reader(
        self, entry: Entry | SnapshotFile
    ) -> tuple[list[tuple[Checkpoint, int]], Callable[[int], np.ndarray], np.ndarray, int]:
        """Checkpoints with their chunk counts, a checked read of chunk i, tokens, blocks a
        chunk."""
        if isinstance(entry, SnapshotFile):
            manifest = entry.manifest
            infos = [(c.info, len(c.chunks)) for c in manifest.checkpoints]
            return infos, entry.reader(), manifest.token_ids, manifest.chunk_blocks
        chunks = entry.all_chunks()
        infos = [(c.info, len(c.chunks)) for c in entry.checkpoints]
        return (
            infos,
            lambda i: self.memory.read(chunks[i]),
            entry.token_ids,
            self.settings.chunk_blocks,
        )

    def _drop(self, hit: Hit) -> None:
        with self.lock:
            if isinstance(hit.entry, Entry):
                # Every entry that shares the damaged chunk would fail the same way, later.
                self.memory.condemn(hit.entry.id)
            else:
                self._forget_file(hit.entry)

    # ---- storing ---------------------------------------------------------------------------

    def points(self, token_ids: Seq[int]) -> list[int]:
        """Lengths at which prefilling this prompt should pause for a `capture`.

        Its end but for one token (the same prompt again, or one that goes on differently after
        it, starts there), and the end of what it shares with stored conversations (the next one
        that shares it starts there).
        """
        n = len(token_ids)
        if not self.layout.rings:
            return []
        with self.lock:
            match = self.index[True].match(token_ids[:-1])
        there = {m.position for m in match.marks} if match else set()
        wanted = {n - 1, match.length if match else 0}
        if self.mode == "encoder":
            wanted.add(n - self.geometry.window)
        return sorted(p for p in wanted - there if self.settings.min_tokens <= p < n)

    def capture(self, state: State, at: int | None = None) -> CheckpointData | None:
        """Copy the sequence's windows after its first `at` tokens (None: all, else at most the
        spare rows back); None where that is not possible.

        To be given to `store` with the same conversation, or to `discard`.
        """
        slots: list[int] = []
        try:
            info = codec.checkpoint_of(self.layout, state, at)
            size = self.layout.checkpoint_bytes(info.spans, info.pending)
            slot_bytes = self.memory.slab.slot_bytes
            sizes = [min(slot_bytes, size - at) for at in range(0, size, slot_bytes)]
            data = np.empty(size, dtype=np.uint8)
            codec.capture_checkpoint(self.layout, state, info, data)
            slots = self.memory.reserve(len(sizes))
        except StateError as error:
            self._not_stored(error)
            return None
        chunks, at = [], 0
        for slot, length in zip(slots, sizes, strict=True):
            self.memory.room(slot, length)[:] = data[at : at + length]
            chunks.append(self.memory.chunk(slot, length))
            at += length
        self.memory.hold(chunks)
        return CheckpointData(info, chunks)

    def discard(self, checkpoints: Iterable[CheckpointData]) -> None:
        """Give captured checkpoints back unused."""
        for checkpoint in checkpoints:
            self.memory.let_go(checkpoint.chunks)

    def store(
        self,
        state: State,
        checkpoints: Iterable[CheckpointData] = (),
        then: Callable[[int], None] = lambda entry: None,
    ) -> int | None:
        """Keep a conversation: its global KV, its windows now, and `checkpoints` (taken over).

        Returns the entry's number; None when it was not kept: why is counted and logged, never
        raised. `then` is called with the number once the entry can be read, on any thread.
        """
        captured = [c for c in checkpoints]
        if state.num_tokens < self.settings.min_tokens:
            self.discard(captured)
            return None
        entry = None
        try:
            entry = self._collect(state, captured)
        except StateError as error:
            self._not_stored(error)
            self.discard(captured)
        if entry is None:
            return None
        number = entry.id

        def finish(entry: Entry = entry) -> None:
            self.publish(entry)
            then(number)
            if self.memory.trimmed:
                self.memory.trim()  # here, not in the engine's thread: it may write to disk

        if self._worker is None:
            finish()
        else:
            future = self._worker.submit(finish)
            self._pending.add(future)
            future.add_done_callback(self._pending.discard)
        return number

    def _not_stored(self, error: StateError) -> None:
        self.counters["store_full" if isinstance(error, StoreFull) else "store_refused"] += 1
        logger.info("a conversation is not stored: %s", error)

    def _collect(self, state: State, captured: list[CheckpointData]) -> Entry | None:
        """Copy what is new into the slab and make the entry; on an error nothing is held."""
        tokens = token_array(state.token_ids)
        exact = state.origin != "encoder-replayed"
        n, now = len(tokens), codec.checkpoint_of(self.layout, state)
        mine = {c.info.position: c for c in captured}
        if max(mine, default=0) > n:
            raise StateError("a checkpoint lies beyond the end of its conversation")
        adopted = self._adopted(tokens, exact, mine)
        held = [c for cp in adopted for c in cp.chunks]
        try:
            there = max((worth(a.info) for a in adopted if a.info.position == n), default=None)
            if self.layout.rings and n not in mine and (there is None or there < worth(now)):
                last = self.capture(state)
                if last is not None:
                    captured.append(last)
                    mine[n] = last
            chunks = self._global_chunks(state, tokens, exact)
        except StateError:
            self.memory.let_go(held)
            raise
        best = {c.info.position: c for c in (*adopted, *captured)}
        kept = sorted(best.values(), key=lambda c: c.info.position)
        # The first one stands where a system prompt ends, the last ones where this one goes on.
        del kept[1 : 1 + max(0, len(kept) - self.settings.max_checkpoints)]
        self.discard(c for c in (*captured, *adopted) if c not in kept)
        return self.memory.add(tokens, exact=exact, chunks=chunks, checkpoints=kept)

    def _adopted(
        self, tokens: np.ndarray, exact: bool, mine: dict[int, CheckpointData]
    ) -> list[CheckpointData]:
        """Checkpoints that other entries hold on this conversation's path, held once more.

        Exact entries only: the windows after a replay depend on where it began.
        """
        if not exact:
            return []
        found: dict[int, CheckpointData] = {}
        with self.lock:
            match = self.index[True].match(tokens)
            for mark in match.marks if match else ():
                entry = self.memory.entries.get(mark.entry)
                if entry is None or mark.position in mine:
                    continue
                best = found.get(mark.position)
                for checkpoint in entry.checkpoints:
                    info = checkpoint.info
                    if info.position == mark.position and (
                        best is None or worth(info) > worth(best.info)
                    ):
                        found[mark.position] = checkpoint
            for checkpoint in found.values():
                self.memory.hold(checkpoint.chunks)
        return list(found.values())

    def _global_chunks(self, state: State, tokens: np.ndarray, exact: bool) -> list[Chunk]:
        layout, per = self.layout, self.settings.chunk_blocks
        blocks = layout.num_blocks(len(tokens))
        keys = self.chunk_keys(tokens) if exact else []
        chunks: list[Chunk | None] = []
        with self.lock:
            for number in range(-(-blocks // per)):
                there = self.memory.shared(keys[number]) if number < len(keys) else None
                if there is not None:
                    self.memory.hold([there])
                    self.counters["chunks_shared"] += 1
                chunks.append(there)
        out: list[Chunk] = [c for c in chunks if c is not None]
        slots: list[int] = []
        try:
            slots = self.memory.reserve(chunks.count(None))
            for number, there in enumerate(chunks):
                if there is not None:
                    continue
                length = min(per, blocks - number * per) * layout.block_bytes
                chunk = self.memory.chunk(
                    slots[-1], length, keys[number] if number < len(keys) else None
                )
                data = self.memory.room(chunk.slot, length)
                codec.capture_blocks(layout, state, number * per, data)
                slots.pop()
                self.memory.hold([chunk])
                out.append(chunk)
                chunks[number] = chunk
        except StateError:
            self.memory.unreserve(slots)
            self.memory.let_go(out)
            raise
        return [c for c in chunks if c is not None]

    def chunk_keys(self, tokens: Seq[int] | np.ndarray, known: Seq[bytes] = ()) -> list[bytes]:
        """Names of a conversation's whole chunks: a hash chain over tokens. `known`: the first."""
        size = self.settings.chunk_blocks * self.layout.block_tokens
        keys, array = list(known), token_array(tokens)
        for end in range((len(keys) + 1) * size, len(array) + 1, size):
            before = keys[-1] if keys else self._seed
            keys.append(digest(before, token_bytes(array[end - size : end])))
        return keys

    def publish(self, entry: Entry, path: TokenPath | None = None) -> None:
        """Seal an entry, make it findable (`path`: the index's), mark those that it contains."""
        digests = self.memory.hash(entry)
        with self.lock:
            self.memory.seal(entry, digests)
            index = self.index[entry.exact]
            match = index.match(path := path or index.path(entry.token_ids))
            marks = [(c.info.position, label_of(c.info)) for c in entry.checkpoints]
            index.insert(entry.id, path, marks)
            self.counters["stored"] += 1
            have = dict(marks)
            for other in match.entries if match else ():
                assert match is not None
                inside = len(index.tokens_of(other)) == match.length * TOKEN_BYTES
                old = self.memory.entries.get(other)
                if inside and old is not None and entry.exact and covers(have, old):
                    self.memory.supersede(other)

    def flush(self) -> None:
        """Wait until everything stored can be found."""
        for future in list(self._pending):
            future.result()

    # ---- memory to disk --------------------------------------------------------------------

    def manifest(self, entry: Entry) -> Manifest:
        """The portable description of a sealed entry."""

        def refs(chunks: list[Chunk]) -> tuple[ChunkRef, ...]:
            return tuple(ChunkRef(c.length, c.digest or b"") for c in chunks)

        return Manifest(
            VERSION,
            self.expected,
            entry.exact,
            self.layout,
            self.settings.chunk_blocks,
            encode_tokens(entry.token_ids),
            refs(entry.chunks),
            tuple(StoredCheckpoint(c.info, refs(c.chunks)) for c in entry.checkpoints),
        )

    def chunks_of(self, entry: Entry) -> Iterator[np.ndarray]:
        """A sealed entry's bytes in stored order, checked. Raises SnapshotError."""
        return (self.memory.read(c) for c in entry.all_chunks())

    def _dropped(self, entry: Entry, reason: str) -> None:
        if entry.fetched and not entry.uses:
            self.counters["fetched_for_nothing"] += 1
        index = self.index[entry.exact]
        if entry.id in index:
            index.remove(entry.id)
        if reason == "evicted" and entry.state is EntryState.SEALED:
            self._spill(entry)

    def _spill(self, entry: Entry) -> None:
        if self.spill is None:
            return
        file, gone = self.spill.write(self.manifest(entry), self.chunks_of(entry))
        for old in gone:
            self._forget_file(old)
        if file is None or any(f is file for f in self._files.values()):
            return
        whole = file.manifest.tokens
        for other in list(self._files.values()):
            inside = whole.startswith(other.manifest.tokens)
            if inside and other.manifest.exact and entry.exact:
                self.spill.remove(other)
                self._forget_file(other)
        self._index_file(file)

    def _index_file(self, file: SnapshotFile) -> None:
        number, manifest = next(self._file_ids), file.manifest
        self._files[number] = file
        marks = [(c.info.position, label_of(c.info)) for c in manifest.checkpoints]
        self.index[manifest.exact].insert(number, manifest.token_ids, marks)

    def _forget_file(self, file: SnapshotFile) -> None:
        with self.lock:
            for number, other in list(self._files.items()):
                if other is file:
                    del self._files[number]
                    self.index[file.manifest.exact].remove(number)
            if self.spill is not None:
                self.spill.remove(file)

    def close(self) -> None:
        """Finish what is being hashed and, with a spill directory, keep what is in memory."""
        self.flush()
        if self._worker is not None:
            self._worker.shutdown()
        with self.lock:
            entries = sorted(self.memory.entries.values(), key=lambda e: e.last_used)
            for entry in entries:
                if entry.state is EntryState.SEALED:
                    self._spill(entry)
        if self._pinned is not None:
            self._pinned.close()

    # ---- books -----------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Counters of the cache, the store and the disk."""
        with self.lock:
            disk = self.spill
            files = {"disk_files": len(disk.files), "disk_bytes": disk.total_bytes} if disk else {}
            more = {f"disk_{k}": v for k, v in disk.counters.items()} if disk else {}
            return {**self.memory.stats(), **files, **more, **self.counters}

    def check(self) -> None:
        """Raises AssertionError when index, store and disk disagree."""
        with self.lock:
            for exact, index in self.index.items():
                index.check()
                for entry in self.memory.entries.values():
                    findable = entry.state in (EntryState.SEALED, EntryState.SUPERSEDED)
                    assert (entry.id in index) == (findable and entry.exact == exact)
            assert len(self.index[True]) + len(self.index[False]) == len(self._files) + sum(
                e.state in (EntryState.SEALED, EntryState.SUPERSEDED)
                for e in self.memory.entries.values()
            )
            on_disk = set(self.spill.files) if self.spill else set()
            assert {f.path for f in self._files.values()} == on_disk
