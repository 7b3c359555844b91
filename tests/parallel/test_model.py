"""The torch model on 1, 2, 4 and 8 ranks: processes, ranks in turn, and the whole model agree."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepdraft.checkpoint.convert import convert
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.errors import EngineError, RankError
from deepdraft.parallel.group import Alone, rank_order_sum, run_in_turn
from deepdraft.parallel.launch import Limits, run_ranks
from tests.parallel.tiny import CUTS, TEXT, Run, assert_equal, rank_of, run, write_of_eight

MAIN = Path(__file__).parent / "model_main.py"
ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As the processes have: a product cut over two threads may have other bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Checkpoint:
    return write_of_eight(tmp_path_factory.mktemp("published") / "of-eight")


@pytest.fixture(scope="module")
def in_turn(published) -> dict[int, list[Run]]:
    """What each rank gives when the ranks take turns in one process, by number of ranks."""
    return {n: run_in_turn(n, lambda group: run(rank_of(published, group))) for n in (2, 4, 8)}


@pytest.mark.parametrize("size", [2, 4, 8])
def test_all_ranks_hold_the_same_bits(size, in_turn):
    for other in in_turn[size][1:]:
        assert_equal(other, in_turn[size][0])


@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.full) for n in (4, 8))])
def test_processes_give_the_bits_of_ranks_in_turn(size, published, in_turn, tmp_path):
    """The processes load converted files, the ranks in turn slice the published ones."""
    convert(published, tmp_path / "converted", size)
    start(tmp_path, size)
    for rank in range(size):
        assert_equal(load_file(tmp_path / f"{rank}.safetensors"), in_turn[size][rank])


def start(tmp_path: Path, size: int, fault: str = "") -> None:
    env = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(MAIN), str(tmp_path / "converted"), str(tmp_path), fault]
    run_ranks(command, size, env=env, limits=Limits(step_s=300, beat_s=60))


def test_one_rank_is_the_whole_model(published):
    assert_equal(run(rank_of(published, Alone())), run(rank_of(published)))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_exact_numerics_differ_by_the_order_of_sums_only(size, published):
    """Whatever were cut wrongly would be off by far more than float32's last bits."""
    split = run_in_turn(size, lambda group: run(rank_of(published, group, "exact")))[0]
    whole = run(rank_of(published, None, "exact"))
    for name in ("logits", "taps", "draft", "confidence"):
        error = (split[name] - whole[name]).norm() / whole[name].norm()
        assert error < 1e-5, (name, error)
    assert torch.equal(split["tokens"], whole["tokens"])


def test_quant_numerics_agree_layer_by_layer(published):
    """Fed the same input, a layer's halves differ by roundings to bf16, before any code flips."""

    def first_layer(group):
        model, record = rank_of(published, group), {}
        state = model.new_pool(1, 64, slack=16).open()
        model.step([(state, TEXT[:9])], record=record)
        return record["L0"]

    split, whole = run_in_turn(4, first_layer)[0], first_layer(None)
    for name in ("attn_out", "stream_mid"):
        error = (split[name] - whole[name]).norm() / whole[name].norm()
        assert error < 4e-3, (name, error)
    error = (split["ffn_out"] - whole["ffn_out"]).norm() / whole["ffn_out"].norm()
    assert error < 3e-2, error


@pytest.mark.parametrize("size", [2, pytest.param(8, marks=pytest.mark.full)])
def test_a_rows_bits_do_not_depend_on_the_other_rows(size, published, in_turn):
    """Row by row, and beside another sequence: the same bits as in larger steps."""
    ones = [1] * sum(CUTS)
    alone = run_in_turn(size, lambda group: run(rank_of(published, group), ones))[0]
    assert_equal(alone, in_turn[size][0])
    beside = run_in_turn(size, lambda group: run(rank_of(published, group), others=2))[0]
    assert_equal(beside, in_turn[size][0])


def test_the_sum_is_in_rank_order():
    """Values whose sum depends on the order tell it apart."""
    parts = [torch.tensor([v]) for v in (1e8, 1.0, -1e8, 1.0)]
    assert rank_order_sum(parts).item() == 1.0
    assert rank_order_sum(parts[::-1]).item() == 0.0
    assert parts[0].item() == 1e8

    def late(group):
        return rank_order_sum(group.gather(parts[group.rank]))

    assert [x.item() for x in run_in_turn(4, late)] == [1.0] * 4


def test_nan_on_one_rank_in_turn(published):
    def broken(group):
        model = rank_of(published, group)
        if group.rank == 1:
            model.blocks[2].attention.wo_b[0, 0] = torch.nan
        return run(model)

    with pytest.raises(EngineError, match=r"^rank 1 produced NaN .*layers\.2\.attn\.wo_b"):
        run_in_turn(2, broken)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("nan", r"rank 1 produced NaN or infinity in layers\.2\.attn\.wo_b\.weight"),
        ("exit", r"rank 1 .*step 1.* ended with code 7"),
    ],
)
def test_a_fault_on_one_rank_ends_all(fault, told, published, tmp_path):
    """The other rank waits in an exchange meanwhile, or is cut off in one: not the cause."""
    convert(published, tmp_path / "converted", 2)
    with pytest.raises(RankError, match=told) as caught:
        start(tmp_path, 2, fault)
    assert caught.value.exit_code == 3
    assert not list(tmp_path.glob("*.safetensors"))
