"""bench/stress_gpu.py as far as it runs without a GPU: what it counts and what it keeps."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import stress_gpu

    yield stress_gpu
    sys.modules.pop("stress_gpu", None)


class Bench:
    """A step whose replays give what `programmatic` says, one after another."""

    def __init__(self, programmatic):
        self.device, self.context = torch.device("cpu"), 32768
        self.weights, self.inputs = SimpleNamespace(device=self.device), None
        self.step = SimpleNamespace(weights=None, observer=None, lanes=None)
        empty = torch.zeros(2, 24, dtype=torch.uint8)
        self.caches = SimpleNamespace(
            window_rows=empty, main={0: empty}, index={}, pending={}, tokens=torch.zeros(3).int()
        )
        self.programmatic, self.rng = programmatic, np.random.default_rng(0)
        self.contexts = []

    def set_rows(self, rows, experts):
        self.contexts.append(self.context)

    def synchronize(self):
        pass

    def capture(self):
        from deepdraft.kernels import runtime

        logits = torch.zeros(8, 4)
        turns = iter(self.programmatic if runtime.programmatic_launch() else ())

        def replay():
            logits.zero_()
            self.caches.window_rows.zero_()
            for row, state in next(turns, ()):
                logits[row, 1] = -0.0  # other bits, an equal number
                self.caches.window_rows[1, 3] = state

        return SimpleNamespace(graph=SimpleNamespace(replay=replay), logits=logits)


def stressed(script, monkeypatch, programmatic):
    from deepdraft.kernels import runtime

    monkeypatch.setattr(runtime, "_programmatic", False)
    monkeypatch.setattr(
        runtime, "use_programmatic_launch", lambda on: setattr(runtime, "_programmatic", on)
    )
    found = script.Stress.__new__(script.Stress)
    found.p = SimpleNamespace(bench=Bench(programmatic))
    return found


def test_replays_with_other_bits_are_counted(script, monkeypatch):
    bad = [(), [(2, 0), (5, 0)], (), [(5, 7)], ()]
    found = stressed(script, monkeypatch, bad).case(6, 22, 120, 5)
    assert found["replays"] == 5 and found["logits_differ"] == 2 and found["state_differs"] == 1
    assert found["by_row"] == [0, 0, 1, 0, 0, 2] and found["plain_differ"] == 0
    assert not script.clean(found)
    # A row that only fills the tile may hold anything.
    same = stressed(script, monkeypatch, [[(7, 0)]] * 3)
    assert script.clean(same.case(6, 22, 120, 3))
    assert same.p.bench.contexts == [120] and same.p.bench.context == 32768


def test_what_is_clean(script):
    none = dict.fromkeys(("logits_differ", "state_differs", "plain_differ", "one_by_one_differ"), 0)
    assert script.clean(none) and script.clean(none | {"replays": 5, "ms": 1.0})
    assert not any(script.clean(none | {name: 1}) for name in none)
    assert not script.clean({"failed": "x"}) and not script.clean(None)


def test_every_kernel_of_the_step_is_built_before(script):
    files = {file for file, made in script.wanted() if made["SHARED_BYTES"] <= 227 * 1024}
    assert files == {"stream.cu", "attend.cu", "combine.cu", "boundary.cu", "route.cu"}
