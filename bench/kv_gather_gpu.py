"""Records of a GPU pool to stored chunks and back: kernels, copies, and a whole start from a peer:

    python bench/kv_gather_gpu.py [--tokens 100000] [--repeats 7] [--out FILE.json]

Needs a GPU. Sizes are the published ones; every byte that comes back is compared. On a CPU,
TRITON_INTERPRET=1 with --tokens 130 --repeats 0 shows that the script runs, not how fast.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.kv_transfer import COMPUTE_S, CONFIG, KEY, RECORD, own, tokens_of
from deepdraft.checkpoint.config import parse_args
from deepdraft.kernels import repack
from deepdraft.kv import codec, records
from deepdraft.kv.cache import KvCache
from deepdraft.kv.fetch import Fetcher, Peer
from deepdraft.kv.layout import Layout
from deepdraft.kv.placement import Pinned
from deepdraft.kv.settings import StoreSettings
from deepdraft.models.state import SequenceState
from deepdraft.models.v41_device import DevicePool
from deepdraft.proof.bench import provenance

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize() -> None:
    """Until the GPU has done all."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def seconds(repeats: int, run: Callable[[], None]) -> float:
    """Median, after one run that is not counted."""
    out = []
    for _ in range(repeats + 1):
        synchronize()
        begin = time.perf_counter()
        run()
        synchronize()
        out.append(time.perf_counter() - begin)
    return statistics.median(out[1:] or out)


def fill(state: SequenceState, token_ids: list[int]) -> None:
    """A sequence of random records that hold no NaN."""
    pool = state.pool
    for rows in (pool.window, *pool.main.values(), *pool.index.values()):
        rows.random_(0, 0x30)
    for rows in pool.pending.values():
        rows.normal_()
    state.token_ids[:] = token_ids
    state.decoder_tokens = state.drafter_tokens = state.written = len(token_ids)


class Measured:
    """One long sequence on the GPU, and host memory for all its chunks."""

    def __init__(self, num_tokens: int) -> None:
        self.args = parse_args(json.loads(CONFIG.read_text()))
        self.layout = Layout.of(self.args, packed=True)
        self.pool = DevicePool(
            self.args, num_sequences=1, max_tokens=num_tokens + 16, slack=16, device=DEVICE
        )
        self.state = self.pool.open()
        fill(self.state, tokens_of(num_tokens))
        self.per = StoreSettings.of(self.layout).chunk_blocks
        self.blocks = self.layout.num_blocks(num_tokens)
        self.info = codec.checkpoint_of(self.layout, self.state)
        size = self.layout.checkpoint_bytes(self.info.spans, self.info.pending)
        self.stored = np.zeros((self.blocks, self.layout.block_bytes), dtype=np.uint8)
        self.windows = np.zeros(size, dtype=np.uint8)

    @property
    def num_bytes(self) -> int:
        """Of all chunks and the checkpoint."""
        return self.stored.nbytes + self.windows.nbytes

    def capture(self) -> None:
        """All chunks and the checkpoint, to the host."""
        for first in range(0, self.blocks, self.per):
            out = self.stored[first : first + self.per]
            codec.capture_blocks(self.layout, self.state, first, out)
        codec.capture_checkpoint(self.layout, self.state, self.info, self.windows)

    def restore(self) -> None:
        """All of it, to the GPU."""
        n = self.state.num_tokens
        for first in range(0, self.blocks, self.per):
            source = self.stored[first : first + self.per]
            codec.restore_blocks(self.layout, self.state, first, source, n)
        codec.restore_checkpoint(self.layout, self.state, self.info, self.windows)

    def kernels(self) -> dict[str, Callable[[], None]]:
        """The kernels alone, into a buffer on the GPU."""
        n, layout, state = self.state.num_tokens, self.layout, self.state
        flat = torch.zeros(self.stored.size, dtype=torch.uint8, device=DEVICE)
        rings = torch.zeros(self.windows.size, dtype=torch.uint8, device=DEVICE)
        blocks = list(records.block_pieces(layout, state, 0, self.blocks, n))
        spans = self.info.spans, self.info.pending
        windows = list(records.checkpoint_pieces(layout, state, *spans))

        def move(call: Any, pieces: list[records.Piece], buffer: torch.Tensor) -> None:
            for pool, strip in pieces:
                if call is repack.gather:
                    call(pool, strip, buffer)
                else:
                    call(buffer, strip, pool)

        return {
            "gather_blocks": lambda: move(repack.gather, blocks, flat),
            "scatter_blocks": lambda: move(repack.scatter, blocks, flat),
            "gather_windows": lambda: move(repack.gather, windows, rings),
            "scatter_windows": lambda: move(repack.scatter, windows, rings),
        }

    def check(self) -> None:
        """There and back is the same: the pool is wiped in between."""
        self.capture()
        before = self.stored.copy(), self.windows.copy()
        for rows in (self.pool.window, *self.pool.main.values(), *self.pool.index.values()):
            rows.fill_(255)
        self.restore()
        self.stored[:], self.windows[:] = 0, 0
        self.capture()
        assert np.array_equal(self.stored, before[0]) and np.array_equal(self.windows, before[1])


def from_a_peer(num_tokens: int, repeats: int) -> dict[str, Any]:
    """Fetch, verify, and copy to the GPU: what a request that moved waits for."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    owner = context.Process(target=own, args=(theirs, num_tokens), daemon=True)
    owner.start()
    port, _, _ = pipe.recv()
    args = parse_args(json.loads(CONFIG.read_text()))
    layout = Layout.of(args, packed=True)
    pool = DevicePool(args, num_sequences=1, max_tokens=num_tokens + 16, slack=16, device=DEVICE)
    room = int(1.5 * num_tokens * layout.block_bytes / layout.block_tokens) + (64 << 20)
    cache = KvCache(
        pool,
        expected=b"f" * 32,
        layout=layout,
        max_bytes=room,
        settings=StoreSettings.of(layout),
        shared=True,
    )
    fetcher, wanted = Fetcher(cache), [*tokens_of(num_tokens), 1]
    times: dict[str, list[float]] = {"fetch_s": [], "resume_s": []}
    for _ in range(repeats + 1):
        got = fetcher.fetch(Peer("127.0.0.1", port), KEY, RECORD, wanted)
        assert got.outcome == "hit", got
        state = pool.open()
        synchronize()
        begin = time.perf_counter()
        resumed = cache.resume(wanted, state)
        synchronize()
        times["resume_s"].append(time.perf_counter() - begin)
        times["fetch_s"].append(got.seconds)
        assert resumed is not None and resumed.num_tokens == num_tokens
        pool.close(state)
        cache.memory.evict(cache.memory.slab.num_slots)
    pipe.send(0)
    owner.join(10)
    cache.close()
    sums = [f + r for f, r in zip(times["fetch_s"], times["resume_s"], strict=True)]
    whole = statistics.median(sums[1:] or sums)
    compute = COMPUTE_S * num_tokens / 100_000
    return {
        **{name: [round(s, 4) for s in values] for name, values in times.items()},
        "fetch_verify_resume_s": round(whole, 4),
        "faster_than_computing": {
            f"{gpus}_gpus": round(compute / gpus / whole, 1) for gpus in (1, 2, 4, 8)
        },
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out")
    options = parser.parse_args()
    one = Measured(options.tokens)
    result: dict[str, Any] = {
        "what": "records of a GPU pool to stored chunks and back, published sizes",
        **provenance(),
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "interpreter",
        "tokens": options.tokens,
        "bytes": one.num_bytes,
    }
    for name, run in one.kernels().items():
        taken = seconds(options.repeats, run)
        size = one.windows.nbytes if "windows" in name else one.stored.nbytes
        result[name] = {"us": round(1e6 * taken, 1), "GB_s": round(size / taken / 1e9, 2)}
    for pinned in (False, True) if DEVICE.type == "cuda" else (False,):
        held = [Pinned(x) for x in (one.stored, one.windows)] if pinned else []
        kind = "pinned" if pinned else "pageable"
        for name, run in (("capture", one.capture), ("restore", one.restore)):
            taken = seconds(options.repeats, run)
            rate = round(one.num_bytes / taken / 1e9, 2)
            result[f"{name}_{kind}"] = {"ms": round(1e3 * taken, 2), "GB_s": rate}
        for pin in held:
            pin.close()
    one.check()
    result["bytes_came_back_equal"] = True
    result["from_a_peer"] = from_a_peer(options.tokens, options.repeats)
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        Path(options.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
