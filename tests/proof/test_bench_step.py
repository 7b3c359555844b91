"""`bench step`: the byte model, the cases, forced routing, and what the command refuses."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from deepdraft.checkpoint.config import parse_args
from deepdraft.cli.tools import bench
from deepdraft.proof.step_bytes import distinct, step_bytes

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

import tests.kernels.interpreter  # noqa: F401  before any kernel is imported
from deepdraft.proof.bench_step import forced_picks
from deepdraft.proof.bench_step_main import PUBLISHED, cases, read_args

FIXTURE = Path(__file__).parents[1] / "checkpoint" / "data" / "v41-config.json"


@pytest.mark.parametrize(
    ("rows", "pool", "gigabytes"), [(1, 30, 13.05), (6, 30, 28.24), (6, 384, 37.63), (8, 30, 30.38)]
)
def test_bytes_of_a_step_are_those_of_the_design(rows, pool, gigabytes):
    """Design kernels.md 1.1, computed there by another program: TP1, 32K context."""
    args = parse_args(json.loads(FIXTURE.read_text()))
    counted = step_bytes(
        args, rows=rows, experts=distinct(rows, pool, 6), context=32768, draft=rows > 1
    )
    assert counted.per_rank() / 1e9 == pytest.approx(gigabytes, abs=0.005)
    assert counted.per_rank(2) > counted.per_rank() / 2


def test_the_packaged_sizes_are_the_published_ones():
    assert json.loads(PUBLISHED.read_text()) == json.loads(FIXTURE.read_text())


def test_both_routing_columns_within_the_pool():
    args = read_args(None)
    found = cases(args, args, (1, 6))
    assert found == [(1, 6, "observed"), (6, 22, "observed"), (6, 35, "even")]


@pytest.mark.parametrize("wanted", [6, 22, 36])
def test_forced_routing_hits_exactly_so_many_experts(wanted):
    picks = forced_picks(6, 6, 96, wanted, np.random.default_rng(1))
    live = picks[:6]
    assert len(np.unique(live)) == wanted and (live >= 0).all() and (picks[6:] == -1).all()
    assert all(len(set(row)) == 6 for row in live.tolist())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["step", "--rows", "x"], "--rows takes numbers such as"),
        (["speed", "--layers", "3"], "are for bench step"),
    ],
)
def test_wrong_use_is_told(arguments, says):
    result = CliRunner().invoke(bench, arguments)
    assert result.exit_code == 2 and says in result.output
