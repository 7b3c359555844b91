"""A part of the planted faults, on shorter texts; bench/results/f-faults.json has all of them."""

from pathlib import Path

import pytest

from deepdraft.proof.faults import FAULTS, KINDS, Fault
from deepdraft.proof.faults_pitfalls import PITFALLS, Pitfall
from deepdraft.proof.faults_run import Clean, logits_only, make_clean, run_fault
from deepdraft.proof.parity.sources import from_native

NUMBERS = {f.number: f for f in FAULTS}
# One of each kind of cause; the other numbers are like one of these.
IN_CHECKPOINT = (1, 7, 17, 25, 43, 47)
IN_ENGINE = (3, 16, 28, 34, 40, 49)
BY_LOGITS = (4, 14, 22)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Clean]:
    root = tmp_path_factory.mktemp("clean")
    return {
        kind: make_clean(root, kind, lambda d, ids: from_native(d, ids, greedy=0), tokens=192)
        for kind in ("coder", "v2", "v3")
    }


def test_the_table() -> None:
    assert [f.number for f in FAULTS] == list(range(1, 55))
    assert [f.number for f in FAULTS if f.silent] == [25, 28]
    assert {f.kind for f in FAULTS} == set(KINDS)
    assert all(bool(f.config) != bool(f.tensors) for f in FAULTS)


QUICK = [(n, "checkpoint") for n in IN_CHECKPOINT] + [(n, "engine") for n in IN_ENGINE]
REST = [
    pytest.param(f.number, planted, marks=pytest.mark.full)
    for f in FAULTS
    for planted in ("checkpoint", "engine")
    if f.kind in ("coder", "v2", "v3") and (f.number, planted) not in QUICK
]


@pytest.mark.parametrize(("number", "planted"), [*QUICK, *REST])
def test_the_cause_is_named_first(number: int, planted: str, clean: dict[str, Clean]) -> None:
    fault: Fault = NUMBERS[number]
    verdict = run_fault(fault, clean[fault.kind], clean[fault.kind].trace, planted=planted)
    if fault.silent:
        assert not verdict.detected and verdict.dl == 0.0
    else:
        assert verdict.detected and verdict.named, verdict


@pytest.mark.parametrize("number", BY_LOGITS)
def test_logits_alone_name_it(number: int, clean: dict[str, Clean]) -> None:
    fault = NUMBERS[number]
    trace = logits_only(clean[fault.kind].trace)
    verdict = run_fault(fault, clean[fault.kind], trace, planted="checkpoint")
    assert verdict.detected and verdict.named, verdict


@pytest.mark.parametrize("pitfall", PITFALLS, ids=[p.name for p in PITFALLS])
def test_named_pitfalls(pitfall: Pitfall, tmp_path: Path) -> None:
    found = pitfall.run(tmp_path)
    assert pitfall.named(found), found
