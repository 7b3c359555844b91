"""bench/stress_gpu.py as far as it runs without a GPU: what it counts and what it keeps."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deepdraft.kernels.native import trials

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import stress_gpu

    with trials.using():
        yield stress_gpu
    for name in ("stress_gpu", "trials_gpu"):
        sys.modules.pop(name, None)


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
    found.p, found.plans = SimpleNamespace(bench=Bench(programmatic)), frozenset()
    return found


def test_replays_with_other_bits_are_counted(script, monkeypatch):
    bad = [(), [(2, 0), (5, 0)], (), [(5, 7)], ()]
    found = stressed(script, monkeypatch, bad).case(frozenset(), 6, 22, 120, 5)
    assert found["replays"] == 5 and found["logits_differ"] == 2 and found["state_differs"] == 1
    assert found["by_row"] == [0, 0, 1, 0, 0, 2] and found["plain_differ"] == 0
    assert not script.clean(found)
    # A row that only fills the tile may hold anything.
    same = stressed(script, monkeypatch, [[(7, 0)]] * 3)
    assert script.clean(same.case(frozenset(), 6, 22, 120, 3))
    assert same.p.bench.contexts == [120] and same.p.bench.context == 32768


def test_the_fastest_clean_form_is_kept(script):
    clean = dict.fromkeys(
        ("logits_differ", "state_differs", "plain_differ", "one_by_one_differ"), 0
    )
    forms = {"": clean | {"ms": 9.0}, "a": clean | {"ms": 8.0}, "b": clean | {"ms": 7.0}}
    assert script.fastest(forms) == "b"
    forms["b"] = forms["b"] | {"state_differs": 1}
    assert script.fastest(forms | {"c": None, "d": {"failed": "x"}}) == "a"
    assert script.fastest({"b": forms["b"]}) is None
    assert script.parted("") == frozenset() and script.parted("a+b") == {"a", "b"}
    for form in script.FORMS:
        assert script.parted(form) <= trials.NAMES.keys()
