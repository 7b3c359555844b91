"""Rate of a fetch with verification against the same transport without, and what a fetch of 100,000
tokens costs at published sizes:

    python bench/kv_transfer.py [--tokens 100000] [--pairs 7] [--out bench/results/d-transfer.json]

The owner is a process of its own. Raw: the same connections, sendfile and recv_into, no digests.
"""

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deepdraft.checkpoint.config import parse_args
from deepdraft.kv import wire
from deepdraft.kv.cache import KvCache
from deepdraft.kv.codec import Checkpoint
from deepdraft.kv.directory import Record
from deepdraft.kv.fetch import Fetcher, Peer
from deepdraft.kv.layout import Layout, Span
from deepdraft.kv.prefix import token_array
from deepdraft.kv.settings import StoreSettings, TransferSettings
from deepdraft.kv.store import CheckpointData
from deepdraft.kv.transfer import Exporter
from deepdraft.models.state import StatePool
from deepdraft.proof.bench import provenance

CONFIG = Path(__file__).resolve().parents[1] / "tests" / "checkpoint" / "data" / "v41-config.json"
KEY, RECORD = "a" * 64, Record("epoch", 1, "owner")
COMPUTE_S = 6.0
"""100,000 tokens on one H200 at 40 % of its bf16 rate (kernels.md 1.4)."""


def cache_of(num_tokens: int, pool_tokens: int = 256) -> tuple[KvCache, StatePool]:
    """An empty cache of published sizes with room for a conversation and some more."""
    args = parse_args(json.loads(CONFIG.read_text()))
    layout = Layout.of(args, packed=True)
    pool = StatePool(args, num_sequences=1, max_tokens=pool_tokens)
    room = int(1.5 * num_tokens * layout.block_bytes / layout.block_tokens) + (64 << 20)
    settings = StoreSettings.of(layout)
    cache = KvCache(
        pool,
        expected=b"f" * 32,
        layout=layout,
        max_bytes=room,
        settings=settings,
        shared=True,
    )
    return cache, pool


def tokens_of(count: int) -> list[int]:
    """The conversation."""
    return np.random.default_rng(1).integers(0, 100_000, count).tolist()


def fill(cache: KvCache, token_ids: list[int]) -> int:
    """A conversation of random records that hold no NaN."""
    rng = np.random.default_rng(2)
    layout, memory, per = cache.layout, cache.memory, cache.settings.chunk_blocks
    blocks = layout.num_blocks(len(token_ids))
    n = len(token_ids)
    spans = tuple(Span(n - layout.window, n) if g.layers else Span(0, 0) for g in layout.windows)
    info = Checkpoint(n, spans, (0, 0, 0), Span(n - 2, n), decoder_replayed=False)  # type: ignore[arg-type]
    size = layout.checkpoint_bytes(info.spans, info.pending)
    sizes = [min(per, blocks - at) * layout.block_bytes for at in range(0, blocks, per)]
    slots = memory.reserve(len(sizes) + 1)
    chunks = []
    for slot, length in zip(slots, [*sizes, size], strict=True):
        memory.room(slot, length)[:] = rng.integers(0, 0x30, length, dtype=np.uint8)
        chunks.append(memory.chunk(slot, length))
    memory.hold(chunks)
    checkpoint = CheckpointData(info, chunks[-1:])
    entry = memory.add(token_ids, exact=True, chunks=chunks[:-1], checkpoints=[checkpoint])
    cache.publish(entry)
    return entry.id


def own(pipe: Connection, num_tokens: int, connections: int) -> None:
    """The owner's process: an exporter, and a sender of the same chunks without a protocol."""
    cache, _ = cache_of(num_tokens)
    number = fill(cache, tokens_of(num_tokens))
    exporter = Exporter(cache)
    exporter.own(KEY, RECORD, number)
    entry = cache.memory.entries[number]
    chunks, slab = entry.all_chunks(), cache.memory.slab
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send((exporter.start("127.0.0.1"), listener.getsockname()[1], [c.length for c in chunks]))

    def send(sock: socket.socket, part: int) -> None:
        link = wire.Link(sock, 10)
        for chunk in chunks[part::connections]:
            data = slab.view(chunk.slot, chunk.length).data
            link.send_bytes(data, slab.file, chunk.slot * slab.slot_bytes)
        link.close()

    while pipe.recv() == "raw":
        threads = []
        for part in range(connections):
            sock, _ = listener.accept()
            threads.append(threading.Thread(target=send, args=(sock, part)))
            threads[-1].start()
        for thread in threads:
            thread.join()
    exporter.close()


def raw_seconds(
    pipe: Connection, port: int, sizes: list[int], into: Any, connections: int
) -> float:
    """All chunks over plain connections into the reader's memory."""
    begin = time.perf_counter()
    pipe.send("raw")

    def receive(part: int) -> None:
        link = wire.Link(links[part], 10)
        for number in range(part, len(sizes), connections):
            link.fill(into.array[number, : sizes[number]].data)
        link.close()

    links = [socket.create_connection(("127.0.0.1", port)) for _ in range(connections)]
    threads = [threading.Thread(target=receive, args=(part,)) for part in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--connections", type=int, default=TransferSettings().connections)
    parser.add_argument("--restore", action="store_true", help="once, dequantised into a CPU pool")
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    args = (theirs, options.tokens, options.connections)
    owner = context.Process(target=own, args=args, daemon=True)
    owner.start()
    port, raw_port, sizes = pipe.recv()
    cache, pool = cache_of(options.tokens, options.tokens + 16 if options.restore else 256)
    settings = TransferSettings(connections=options.connections)
    fetcher = Fetcher(cache, settings=settings)
    wanted = token_array([*tokens_of(options.tokens), 1])  # as `Fleet.prepare` gives them
    memory = cache.memory
    slots = memory.reserve(len(sizes))  # touched once, so that neither way pays for new pages
    memory.slab.array[:] = 0
    memory.unreserve(slots)
    raw, fetched, restored = [], [], []
    total = sum(sizes)
    for _ in range(options.pairs):
        raw.append(raw_seconds(pipe, raw_port, sizes, memory.slab, options.connections))
        got = fetcher.fetch(Peer("127.0.0.1", port), KEY, RECORD, wanted)
        assert got.outcome == "hit" and got.num_bytes == total, got
        fetched.append(got.seconds)
        if options.restore and not restored:
            state = pool.open()
            begin = time.perf_counter()
            resumed = cache.resume(wanted.tolist(), state)
            restored.append(time.perf_counter() - begin)
            assert resumed is not None and resumed.num_tokens == options.tokens
            pool.close(state)
        memory.evict(memory.slab.num_slots)
    pipe.send("end")
    owner.join(10)
    fetch_s = statistics.median(fetched)
    spent = fetcher.counters.snapshot()
    phases = {
        name: round(spent[f"{name}_microseconds"] / 1e3 / options.pairs, 2)
        for name in ("open", "read", "verify")
    }
    scale = options.tokens / 100_000
    result = {
        "what": "fetch with verification against the same transport without, loopback, 2 processes",
        **provenance(),
        "tokens": options.tokens,
        "bytes": total,
        "connections": options.connections,
        "raw_s": [round(s, 4) for s in raw],
        "fetch_s": [round(s, 4) for s in fetched],
        "mean_ms_of_phases": phases,
        "raw_GB_s": round(total / statistics.median(raw) / 1e9, 3),
        "fetch_GB_s": round(total / fetch_s / 1e9, 3),
        "fetch_share_of_raw": round(
            statistics.median(r / f for r, f in zip(raw, fetched, strict=True)), 3
        ),
        "restore_to_cpu_pool_dequantised_s": round(restored[0], 2) if restored else None,
        "compute_s_on_one_h200": COMPUTE_S * scale,
        "fetch_and_verify_faster_than_computing": {
            f"{gpus}_gpus": round(COMPUTE_S * scale / gpus / fetch_s, 1) for gpus in (1, 2, 4, 8)
        },
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        Path(options.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
