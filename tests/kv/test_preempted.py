"""Preemption and reuse of prefixes at once: the same tokens as alone and computed, and no leaks."""

from typing import Any

import pytest

from deepdraft.engine.reuse import Reuse
from deepdraft.errors import EngineError
from tests.engine.test_preemption import Manual
from tests.kv.conftest import ModelOf, Served, text

SHARED = text(1, 70)
WARM = [tuple(SHARED + text(90 + i, 24)) for i in range(2)]
"""The second one leaves a checkpoint where the shared beginning ends."""
CROWD = {name: tuple(SHARED + text(i, 20 + 8 * i)) for i, name in enumerate("xyz")}


def answers(served: Served, *, cached: bool, **options: Any) -> tuple[dict[str, list[int]], Manual]:
    """Two of one tenant run when a third of another asks."""
    reuse = Reuse(served.runner, served.cache) if cached else None
    one = Manual(served.runner, prefill_chunk=32, preempt_after_s=0.5, reuse=reuse, **options)
    for i, prompt in enumerate(WARM):
        one.ask(f"warm{i}", prompt, 2)
        one.finish()
    served.cache.flush()
    for tenant, (name, prompt) in zip("aab", CROWD.items(), strict=True):
        one.ask(name, prompt, 20, tenant=tenant)
        one.step(3)
    one.finish()
    assert set(one.reasons.values()) == {"length"}, one.errors
    return one.tokens, one


@pytest.mark.parametrize("mode", ["full", "encoder"])
@pytest.mark.parametrize("lost", [False, True])
def test_preempted_while_it_stands_on_a_stored_prefix(
    mode: str, lost: bool, model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parked and taken up again, or lost and computed again from the stored prefix. (In mode
    encoder an answer that is read again may differ from one that goes on, with or without the
    cache, so a lost one is compared with a lost one.)"""
    plain, served = (Served(model_of("exact"), mode=mode) for _ in range(2))
    if lost:

        def fault(parked: object) -> None:
            raise EngineError("gone")

        for each in (plain, served):
            monkeypatch.setattr(each.runner, "unpark", fault)
    crowd = {"max_running": 2, "max_parked": 1}
    again = lost and mode == "encoder"
    right, _ = answers(plain, cached=False, **(crowd if again else {"max_running": 1}))
    got, one = answers(served, cached=True, **crowd)
    assert got == right
    assert one.stat("preemptions") == 1 and one.stat("recomputed") == lost
    stats = served.cache.stats()
    # Each starts from the stored prefix, a lost one twice; the second warm one does by recompute.
    assert stats["hits"] == 3 + lost + (mode == "encoder")
    assert stats["pins"] == stats["leases"] == 0 and one.stat("kv_errors") == 0
    assert served.runner.num_free == 8
    served.cache.check()
    served.cache.memory.check()
