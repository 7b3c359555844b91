"""bench/native_sass.py: what it reads of machine code. (It runs where NVRTC is.)"""

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import native_sass

    yield native_sass
    sys.modules.pop("native_sass", None)


def listing(*lines):
    """As nvdisasm prints them: text, scoreboard of the result, scoreboards waited for."""
    out = []
    for i, (text, scoreboard, *waits) in enumerate(lines):
        mask = sum(1 << n for n in waits)
        high = (mask << 11 | scoreboard << 5) << 41
        out.append(f"        /*{16 * i:04x}*/  {text} ;  /* 0x{0:016x} */")
        out.append(f"                          /* 0x{high:016x} */")
    return "\n".join(out)


LOADS = ("LDS.128 R36, [R84]", 0), ("LDS.128 R32, [R84+0x200]", 1)
ARRIVAL = "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R69+URZ], RZ"


def test_an_arrival_before_its_loads_have_come_is_found(script):
    code = script.parse(listing(*LOADS, (ARRIVAL, 7), ("HMMA R4", 7, 0, 1), (ARRIVAL, 7)))
    assert [one.scoreboard for one in code[:3]] == [0, 1, 7] and code[3].waits == 3
    (found,) = script.early_arrivals(code)
    assert found.startswith("0x20 @!P0") and "R36" in found and "R32" in found
    code = script.parse(listing(*LOADS, ("HMMA R4", 7, 0), (ARRIVAL, 7)))
    assert "R36" not in script.early_arrivals(code)[0]


def test_arrivals_that_wait_are_not(script):
    for lines in (
        [*LOADS, (ARRIVAL, 7, 0, 1)],
        [*LOADS, ("LOP3.LUT R1, R36, R32", 7, 0, 1), (ARRIVAL, 7)],
        [*LOADS, ("FENCE.VIEW.ASYNC.S", 7), (ARRIVAL, 7)],
        [*LOADS, ("EXIT", 7), (ARRIVAL, 7)],
        [("@!PT LDS RZ, [RZ]", 0), (ARRIVAL, 7)],
    ):
        assert script.early_arrivals(script.parse(listing(*lines))) == []


def test_every_plan_with_bulk_copies_is_looked_at(script):
    wanted = dict(script.variants())
    assert {"dense 5120x8192", "expert 4608x5120", "expert 5120x2304"} <= wanted.keys()
    assert all(made["BULK"] for made in wanted.values())
    assert wanted["dense 8192x4096"]["KIND"] == 2 and wanted["expert 5120x2304"]["KIND"] == 4
