"""The cost table: reading between points, medians, and what it refuses."""

import math
from typing import Any

import pytest

from deepdraft.errors import ConfigError
from deepdraft.spec.costs import CostTable, StepCosts


def test_reading_between_and_beyond_points() -> None:
    table = CostTable(rows=(2, 4, 8), ms=((10.0, 14.0, 16.0),))
    read = {1: 10.0, 2: 10.0, 3: 12.0, 4: 14.0, 6: 15.0, 8: 16.0, 10: 17.0}
    assert {n: table.step_ms(n) for n in read} == read
    assert CostTable(rows=(1,), ms=((5.0,),)).step_ms(9) == 5.0
    falling = CostTable(rows=(1, 2), ms=((6.0, 5.0),))
    assert falling.step_ms(20) == 5.0, "more rows are never predicted to be cheaper"


def test_padded_rows_cost_the_next_count() -> None:
    table = CostTable(rows=(1, 2, 4), ms=((10.0, 11.0, 15.0),), padded=True)
    assert [table.step_ms(n) for n in (1, 2, 3, 4)] == [10.0, 11.0, 15.0, 15.0]
    assert table.step_ms(5) == math.inf


def test_loads_are_read_linearly_and_held_outside() -> None:
    table = CostTable(rows=(1, 2), loads=(0.0, 10.0, 30.0), ms=((1.0, 2.0), (3.0, 6.0), (4.0, 8.0)))
    assert [table.step_ms(1, x) for x in (-5.0, 0.0, 5.0, 10.0, 20.0, 30.0, 99.0)] == [
        1.0, 1.0, 2.0, 3.0, 3.5, 4.0, 4.0,
    ]  # fmt: skip
    assert table.step_ms(2, 5.0) == 4.0


def test_tables_from_samples_take_medians() -> None:
    samples = [(1, 0.0, 9.0), (1, 0.0, 10.0), (1, 0.0, 500.0), (6, 0.0, 15.0)]
    assert CostTable.from_samples(samples) == CostTable(rows=(1, 6), ms=((10.0, 15.0),))
    with pytest.raises(ConfigError, match=r"no sample of 6 rows at load 5"):
        CostTable.from_samples([*samples, (1, 5.0, 11.0)])
    with pytest.raises(ConfigError, match="not be empty"):
        CostTable.from_samples([])


def test_tables_survive_json() -> None:
    table = CostTable(rows=(1, 2), loads=(0.0, 4.0), ms=((1.0, 2.0), (3.0, 4.0)), padded=True)
    assert CostTable.from_dict(table.to_dict()) == table
    assert CostTable.from_dict({"rows": [1], "ms": [[2]]}) == CostTable(rows=(1,), ms=((2.0,),))


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"rows": [1, 2]},
        {"rows": 3, "ms": [[1.0]]},
        {"rows": [], "ms": [[]]},
        {"rows": [2, 1], "ms": [[1.0, 2.0]]},
        {"rows": [1, 1], "ms": [[1.0, 2.0]]},
        {"rows": [0, 1], "ms": [[1.0, 2.0]]},
        {"rows": [1, 2], "ms": [[1.0]]},
        {"rows": [1], "ms": [[1.0]], "loads": [0.0, 1.0]},
        {"rows": [1], "ms": [[0.0]]},
        {"rows": [1], "ms": [[1.0]], "loads": [math.nan]},
        {"rows": [1], "ms": [[math.nan]]},
        {"rows": [1], "ms": [[math.inf]]},
        {"rows": [1], "ms": [["x"]]},
        {"rows": [1, math.inf], "ms": [[1.0, 2.0]]},
        {"rows": [1], "ms": [[10**400]]},
    ],
)
def test_senseless_tables_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cost table"):
        CostTable.from_dict(bad)


def test_short_blocks_cost_a_part_of_whole_ones() -> None:
    table = CostTable(rows=(1, 16), ms=((4.0, 10.0),))
    costs = StepCosts(verify=table, draft=table, short_draft=0.7)
    parts = [costs.draft_ms(16, size, 5) for size in (2, 3, 4, 5)]
    assert parts == pytest.approx([7.0, 8.0, 9.0, 10.0])
    assert costs.draft_ms(16, 2, 2) == costs.draft_ms(16, 1, 1) == 10.0
    assert StepCosts.from_dict(costs.to_dict()) == costs
    values = costs.to_dict()
    del values["short_draft"]  # a table of before: nothing is known to be saved
    assert StepCosts.from_dict(values).draft_ms(16, 2, 5) == 10.0
    for bad in (0.0, 1.01, math.nan):
        with pytest.raises(ConfigError, match="short_draft"):
            StepCosts(verify=table, draft=table, short_draft=bad)
