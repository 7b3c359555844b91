"""Engines that start one after the other in a process measure what their steps cost once for each
kind of runner: it takes seconds, and how fast a machine is today changes no answer."""

from collections.abc import Iterator
from typing import Any

import pytest

from deepdraft.engine import measure
from deepdraft.spec.costs import StepCosts

_measure = measure.measure_costs
_known: dict[Any, StepCosts] = {}


def _once(runner: Any, **options: Any) -> StepCosts:
    sizes = ("vocab_size", "block_size", "max_tokens", "max_step_rows", "num_free", "shortens")
    kind = (type(runner), *(getattr(runner, name, None) for name in sizes), repr(options))
    if kind not in _known:
        _known[kind] = _measure(runner, **options)
    return _known[kind]


@pytest.fixture(scope="session", autouse=True)
def costs_are_measured_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "measure_costs", _once)
        yield
