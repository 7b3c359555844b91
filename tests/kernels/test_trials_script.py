"""bench/trials_gpu.py as far as it runs without a GPU: what it keeps, plans exchanged in place."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from deepdraft.kernels.native import fragments, trials
from deepdraft.kernels.native.fragments import Streamed

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import trials_gpu

    yield trials_gpu
    sys.modules.pop("trials_gpu")


def test_forms_are_kept_while_they_gain(script):
    gains = {"a": 1.0, "b": 0.5, "c": -0.2, "d": 0.01}
    asked = []

    def time(names):
        asked.append(names)
        if "wrong" in names:
            return None
        both = 0.5 if {"a", "b"} <= names else 0.0  # b's gain is a's
        return 10.0 - sum(gains[n] for n in names) + both

    forms = [frozenset({n}) for n in ("c", "b", "wrong", "d", "a")]
    assert script.greedy(forms, time) == {"a"}
    assert asked[0] == frozenset() and frozenset({"a", "b"}) in asked
    assert script.greedy(forms, lambda names: None) == frozenset()


def test_every_form_is_known(script):
    names = frozenset().union(*map(script.parted, script.ALONE))
    assert names | {"lanes"} == trials.NAMES.keys()
    assert names >= script.SAME_BITS - {"lanes"}
    for file, made in script.wanted():
        assert file.endswith(".cu") and made["SHARED_BYTES"] <= 227 * 1024


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    w: Streamed
    more: tuple = ()


def test_plans_are_exchanged_in_place(script):
    rows, cols = 32768, 1280
    empty = torch.empty(0, dtype=torch.uint8)
    w = Streamed("fp8", rows, cols, fragments.dense_stream_plan(rows, cols), empty, empty, empty)
    other = dataclasses.replace(w, rows=96, cols=96, plan=fragments.dense_stream_plan(96, 96))
    part = Part("a", w, (Part("b", other),))
    with trials.using("query"):
        changed = script.replanned(part)
    assert changed.w.plan.bulk and changed.w.values is w.values
    assert changed.more[0].w.plan == other.plan
    with trials.using():
        assert script.replanned(changed).w.plan == w.plan
