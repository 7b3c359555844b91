"""Rate of a fetch with verification against the same transport without, and what a fetch of 100,000
tokens costs at published sizes:

    python bench/kv_transfer.py [--tokens 100000 --tokens 1000000] [--pairs 7]
        [--connections 1 --connections 2] [--out bench/results/d-transfer.json]

The owner is a process of its own. Raw: the same connections into the same memory, sendfile and
recv_into of whole chunks, no protocol, no digests. Both include connecting; the fetch also the
manifest and making the entry.
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


def cache_of(num_tokens: int) -> tuple[KvCache, StatePool]:
    """An empty cache of published sizes with room for a conversation and some more."""
    args = parse_args(json.loads(CONFIG.read_text()))
    layout = Layout.of(args, packed=True)
    pool = StatePool(args, num_sequences=1, max_tokens=256)
    room = int(2.5 * num_tokens * layout.block_bytes / layout.block_tokens) + (64 << 20)
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


def own(pipe: Connection, num_tokens: int) -> None:
    """The owner's process: an exporter, and a sender of the same chunks without a protocol."""
    cache, _ = cache_of(num_tokens)
    number = fill(cache, tokens_of(num_tokens))
    exporter = Exporter(cache)
    exporter.own(KEY, RECORD, number)
    entry = cache.memory.entries[number]
    chunks, slab = entry.all_chunks(), cache.memory.slab
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send((exporter.start("127.0.0.1"), listener.getsockname()[1], [c.length for c in chunks]))

    def send(sock: socket.socket, part: int, connections: int) -> None:
        link = wire.Link(sock, 10)
        for chunk in chunks[part::connections]:
            data = slab.view(chunk.slot, chunk.length).data
            link.send_bytes(data, slab.file, chunk.slot * slab.slot_bytes)
        link.close()

    while connections := pipe.recv():
        threads = []
        for part in range(connections):
            sock, _ = listener.accept()
            threads.append(threading.Thread(target=send, args=(sock, part, connections)))
            threads[-1].start()
        for thread in threads:
            thread.join()
    exporter.close()


def raw_seconds(
    pipe: Connection, port: int, sizes: list[int], into: Any, connections: int
) -> float:
    """All chunks over plain connections into the reader's memory."""
    begin = time.perf_counter()
    pipe.send(connections)

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


def measure(
    pipe: Connection, ports: tuple[int, int], sizes: list[int], cache: KvCache, **options: Any
) -> dict[str, Any]:
    """Alternating pairs of both ways with some number of connections."""
    connections, pairs = options["connections"], options["pairs"]
    fetcher = Fetcher(cache, settings=TransferSettings(connections=connections))
    wanted = token_array([*tokens_of(options["tokens"]), 1])  # as `Fleet.prepare` gives them
    raw, fetched = [], []
    for _ in range(pairs):
        raw.append(raw_seconds(pipe, ports[1], sizes, cache.memory.slab, connections))
        got = fetcher.fetch(Peer("127.0.0.1", ports[0]), KEY, RECORD, wanted)
        assert got.outcome == "hit" and got.num_bytes == sum(sizes), got
        fetched.append(got.seconds)
        cache.memory.evict(cache.memory.slab.num_slots)
    spent = fetcher.counters.snapshot()
    phases = ("open", "read", "verify")
    ratios = [r / f for r, f in zip(raw, fetched, strict=True)]
    return {
        "raw_s": [round(s, 4) for s in raw],
        "fetch_s": [round(s, 4) for s in fetched],
        "mean_ms_of_phases": {
            name: round(spent[f"{name}_microseconds"] / 1e3 / pairs, 2) for name in phases
        },
        "raw_GB_s": round(sum(sizes) / statistics.median(raw) / 1e9, 3),
        "fetch_GB_s": round(sum(sizes) / statistics.median(fetched) / 1e9, 3),
        "fetch_share_of_raw": round(statistics.median(ratios), 3),
        "fetch_s_median": round(statistics.median(fetched), 4),
    }


def conversation(tokens: int, pairs: int, connections: list[int]) -> dict[str, Any]:
    """Both ways for a conversation of so many tokens."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    owner = context.Process(target=own, args=(theirs, tokens), daemon=True)
    owner.start()
    port, raw_port, sizes = pipe.recv()
    cache, _ = cache_of(tokens)
    memory = cache.memory
    slots = memory.reserve(len(sizes))  # touched once, so that neither way pays for new pages
    memory.slab.array[:] = 0
    memory.unreserve(slots)
    more = {"tokens": tokens, "pairs": pairs}
    measured = {
        str(count): measure(pipe, (port, raw_port), sizes, cache, connections=count, **more)
        for count in connections
    }
    pipe.send(0)
    owner.join(10)
    compute_s = COMPUTE_S * tokens / 100_000
    fetch_s = measured[str(connections[0])]["fetch_s_median"]
    return {
        "tokens": tokens,
        "bytes": sum(sizes),
        "by_connections": measured,
        "compute_s_on_one_h200": compute_s,
        "fetch_and_verify_faster_than_computing": {
            f"{gpus}_gpus": round(compute_s / gpus / fetch_s, 1) for gpus in (1, 2, 4, 8)
        },
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, action="append", help="may be given again")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--connections", type=int, action="append", help="beside the default")
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    usual = TransferSettings()
    counts = list(dict.fromkeys([usual.connections, *(options.connections or [])]))
    result = {
        "what": "fetch with verification against the same transport without, loopback, 2 processes",
        **provenance(),
        "default": {"connections": usual.connections, "check_beside": usual.check_beside},
        "conversations": [
            conversation(tokens, options.pairs, counts) for tokens in options.tokens or [100_000]
        ],
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        Path(options.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
