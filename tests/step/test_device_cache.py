"""The KV cache over the device model's pool of records: a stored prefix gives a cold run's bits."""

import pytest
import torch

from deepdraft.engine.runner import Runner
from deepdraft.kernels import repack as kernels
from deepdraft.kv import records
from deepdraft.kv.cache import KvCache
from deepdraft.kv.layout import Layout
from deepdraft.kv.settings import StoreSettings
from deepdraft.models.v41_device import DevicePool, DeviceV41
from tests.kernels.interpreter import DEVICE
from tests.step import tiny


def spoil(pool: DevicePool, slot: int) -> None:
    """What another sequence left in a slot."""
    ring, pending = pool.ring, pool.pending_ring
    pool.window[:, slot * ring : (slot + 1) * ring] = 77
    for source, size in pool.entries.items():
        for rows in (pool.main[source], pool.index[source]):
            rows[slot * size : (slot + 1) * size] = 77
    for rows in pool.pending.values():
        rows[slot * pending : (slot + 1) * pending] = 3.0


@pytest.mark.full
def test_a_stored_prefix_gives_the_bits_of_a_cold_run(monkeypatch):
    moved = []

    def mover(pool):
        moved.append(pool.shape)
        return kernels

    monkeypatch.setattr(records, "_mover", mover)  # on a CPU the reference would do it
    model = DeviceV41(tiny.args(), tiny.source(), list(range(tiny.VOCABULARY)), device=DEVICE)
    runner = Runner(model, max_context=48, num_sequences=3, step_rows=16)
    pool = runner.pool
    assert isinstance(pool, DevicePool)
    cache = KvCache(
        pool,
        expected=b"x" * 32,
        layout=Layout.of(tiny.args(), packed=True, block_tokens=4),
        max_bytes=1 << 20,
        settings=StoreSettings(chunk_blocks=1, min_tokens=1),
    )
    text = tiny.text(13)
    one = runner.open_sequence()
    runner.prefill(one, text[:11], final=True)
    assert cache.store(one) is not None
    two = runner.open_sequence()
    spoil(pool, two.slot)
    resumed = cache.resume(text[:12], two)
    assert resumed is not None and resumed.num_tokens == 11 and moved
    # Beside the sequence that was never interrupted, and one that reads everything again.
    three = runner.open_sequence()
    runner.prefill(three, text[:11], final=True)
    logits = runner.step([(state, text[11:13]) for state in (one, two, three)])
    assert torch.equal(logits[:2], logits[2:4]) and torch.equal(logits[:2], logits[4:])
