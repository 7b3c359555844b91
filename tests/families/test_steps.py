"""Any cutting of a text into steps, alone or beside other sequences, gives the same bits; state can
be cut back, copied and given up."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepdraft.errors import ConfigError, StateError
from tests.families.conftest import SETS, VARIANTS, text_of

ALL = SETS + VARIANTS
Load = Callable[[str], Any]
Run = tuple[Tensor, dict[str, Tensor]]

drawn = settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def length(name: str) -> int:
    """Long enough to wrap windows, and of the golden set to complete a group of 128."""
    return 150 if name == "deepseek-v4-a" else 52


def snapshot(sequence: Any) -> dict[str, Tensor]:
    return {name: sequence.live_rows(name) for name in sequence.pool.kinds}


def run_chunks(model: Any, text: Sequence[int], sizes: Sequence[int]) -> Run:
    pool = model.new_pool(2, 400 if len(text) > 128 else 120, slack=max(sizes))
    pool.open()  # so that the sequence under test does not lie at row 0
    sequence, at, logits = pool.open(), 0, []
    for size in sizes:
        logits.append(model.step([(sequence, text[at : at + size])]).logits)
        at += size
    assert at == len(text) == sequence.num_tokens
    return torch.cat(logits), snapshot(sequence)


def cut(total: int, size: int) -> list[int]:
    return [size] * (total // size) + [total % size] * (total % size > 0)


def assert_same(a: Run, b: Run) -> None:
    assert torch.equal(a[0], b[0])
    assert a[1].keys() == b[1].keys()
    for name, rows in a[1].items():
        assert torch.equal(rows, b[1][name]), name


@pytest.fixture(scope="module")
def one_shot(load: Load) -> Callable[[str], Run]:
    done: dict[str, Run] = {}

    def get(name: str) -> Run:
        if name not in done:
            n = length(name)
            done[name] = run_chunks(load(name), text_of(name)[:n], [n])
        return done[name]

    return get


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [1, 2, 3, 17, 64])
def test_chunks_of_one_size(name: str, size: int, load: Load, one_shot: Any) -> None:
    n = length(name)
    assert_same(run_chunks(load(name), text_of(name)[:n], cut(n, size)), one_shot(name))


@pytest.mark.parametrize("name", ALL)
@drawn
@given(data=st.data())
def test_random_chunks(name: str, data: st.DataObject, load: Load, one_shot: Any) -> None:
    n, sizes = length(name), []
    while (rest := n - sum(sizes)) > 0:
        sizes.append(min(rest, data.draw(st.integers(1, 40))))
    assert_same(run_chunks(load(name), text_of(name)[:n], sizes), one_shot(name))


@pytest.mark.parametrize("name", ALL)
def test_beside_other_sequences(name: str, load: Load, one_shot: Any) -> None:
    """Three sequences at unlike places, in unlike steps; one is the text under test."""
    model, text, n = load(name), text_of(name), length(name)
    pool = model.new_pool(3, 400 if n > 128 else 120, slack=8)
    others = [pool.open(), pool.open()]
    sequence, logits, turn = pool.open(), [], 0
    model.prefill(others[0], text[5 : 5 + n // 2])
    while sequence.num_tokens < n:
        at = sequence.num_tokens
        piece = text[at : min(n, at + 1 + turn % 5)]
        work = [(sequence, piece)]
        for k, other in enumerate(others):
            if (turn + k) % 3 and other.num_tokens < n - 8:
                work.insert(k % 2, (other, text[turn % 7 : turn % 7 + 1 + (turn + k) % 4]))
        out = model.step(work).logits
        start = sum(len(ids) for s, ids in work[: [s for s, _ in work].index(sequence)])
        logits.append(out[start : start + len(piece)])
        turn += 1
    assert_same((torch.cat(logits), snapshot(sequence)), one_shot(name))


@pytest.mark.parametrize("name", ALL)
def test_last_rows_only(name: str, load: Load) -> None:
    model, text = load(name), text_of(name)
    pool = model.new_pool(4, 60, slack=16)
    a, b, c, d = (pool.open() for _ in range(4))
    every = model.step([(a, text[:5]), (b, text[3:6])]).logits
    last = model.step([(c, text[:5]), (d, text[3:6])], logits="last").logits
    assert torch.equal(last, every[[4, 7]])
    assert model.step([(c, text[5:6])], logits="none").logits is None
    assert c.num_tokens == 6


@pytest.mark.parametrize("name", ALL)
def test_prefill_in_pieces(name: str, load: Load, one_shot: Any) -> None:
    model, n = load(name), length(name)
    text = text_of(name)[:n]
    sequence = model.new_pool(1, n, slack=16).open()
    assert model.prefill(sequence, text[:20], final=False).logits is None
    out = model.prefill(sequence, text[20:])
    assert out.logits.shape[0] == 1 and torch.equal(out.logits[0], one_shot(name)[0][-1])


@pytest.mark.parametrize("name", ALL)
@drawn
@given(data=st.data())
def test_rejected_drafts(name: str, data: st.DataObject, load: Load, one_shot: Any) -> None:
    """Steps that are partly taken back leave no trace."""
    model, text, n = load(name), text_of(name), length(name)
    pool = model.new_pool(2, 400 if n > 128 else 120, slack=16)
    pool.open()
    sequence, logits = pool.open(), []
    model.prefill(sequence, text[: n - 30])
    while (at := sequence.num_tokens) < n:
        right = min(data.draw(st.integers(1, 4)), n - at)
        wrong = data.draw(st.integers(0, 12))
        drafts = [*text[at : at + right], *([(text[at] + 1) % 90 + 3] * wrong)]
        logits.append(model.step([(sequence, drafts)]).logits[:right])
        sequence.truncate(at + right)
    whole, state = one_shot(name)
    assert_same((torch.cat(logits), snapshot(sequence)), (whole[n - 30 :], state))


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("name", SETS)
def test_clone_goes_its_own_way(name: str, saved: bool, load: Load, one_shot: Any) -> None:
    model, text, n = load(name), text_of(name), length(name)
    pool = model.new_pool(3, 400 if n > 128 else 120, slack=16)
    sequence = pool.open()
    model.prefill(sequence, text[: n - 9])
    if saved:
        kept = sequence.save()
        pool.close(sequence)
        used = pool.open()
        model.prefill(used, text[5 : n - 20])
        pool.close(used)
        copy, sequence = pool.restore(kept), pool.open()
        assert kept.nbytes > 0
    else:
        copy = sequence.clone()
    model.step([(sequence, [7, 8, 9])])
    out = [model.step([(copy, [token])]).logits for token in text[n - 9 : n]]
    assert_same((torch.cat(out), snapshot(copy)), (one_shot(name)[0][n - 9 :], one_shot(name)[1]))


@pytest.mark.parametrize("name", SETS)
def test_a_broken_sequence_spoils_no_other(name: str, load: Load, one_shot: Any) -> None:
    """NaN in a sequence's rows reaches neither its slot's next user nor itself once cut back."""
    model, text, n = load(name), text_of(name), length(name)
    pool = model.new_pool(1, 400 if n > 128 else 120, slack=16)
    sequence = pool.open()
    model.prefill(sequence, text[: n - 8])
    good = sequence.num_tokens
    model.step([(sequence, text[good:n])])
    for kind in pool.kinds.values():
        size = pool.entries[kind.name]
        for entry in range(good // kind.ratio, -(-n // kind.ratio)):
            pool.rows[kind.name][:, entry % size] = float("nan")
    sequence.truncate(good)
    again = model.step([(sequence, text[good:n])]).logits
    assert torch.equal(again, one_shot(name)[0][good:])
    for kind in pool.kinds.values():
        written = min(pool.entries[kind.name], n // kind.ratio)
        pool.rows[kind.name][:, :written] = float("nan")
    pool.close(sequence)
    assert all(not rows.any() for rows in pool.rows.values())
    assert_same(
        (model.prefill(fresh := pool.open(), text[:n], logits="all").logits, snapshot(fresh)),
        one_shot(name),
    )


def test_how_far_back(load: Load) -> None:
    model, text = load("deepseek-v4-a"), text_of("deepseek-v4-a")
    sequence = model.new_pool(1, 400, slack=8).open()
    model.prefill(sequence, text[:200])
    before = snapshot(sequence)
    with pytest.raises(StateError, match=r"window KV.*At most 8 tokens can be undone"):
        sequence.truncate(150)
    with pytest.raises(StateError, match="cannot truncate a sequence of 200 tokens to 201"):
        sequence.truncate(201)
    assert all(torch.equal(rows, before[name]) for name, rows in snapshot(sequence).items())
    sequence.truncate(192)
    sequence.truncate(0)
    assert sequence.num_tokens == 0
    llama = load("llama-a").new_pool(1, 100, slack=8).open()
    load("llama-a").prefill(llama, text_of("llama-a"))
    llama.truncate(3)  # a cache of every token can be cut anywhere
    assert llama.num_tokens == 3


def test_inventory(load: Load) -> None:
    model, text = load("deepseek-v4-a"), text_of("deepseek-v4-a")
    sequence = model.new_pool(1, 300, slack=8).open()
    model.prefill(sequence, text[:150])
    items = {
        item.name: (item.rows, item.stored_bytes, item.truncatable) for item in sequence.items()
    }
    assert items == {
        "window KV": (4 * 31, 4 * 31 * 64 * 4, False),
        "entries, CSA": (2 * 37, 2 * 37 * 64 * 4, True),
        "index keys, CSA": (2 * 37, 2 * 37 * 32 * 4, True),
        "open groups, CSA": (2 * 6, 2 * 6 * 256 * 4, False),
        "open groups, index": (2 * 6, 2 * 6 * 128 * 4, False),
        "entries, HCA": (1, 64 * 4, True),
        "open groups, HCA": (22, 22 * 128 * 4, False),
        "token ids": (150, 150 * 8, True),
    }
    for name, rows in snapshot(sequence).items():
        assert rows.any(-1).all(), name
    assert [item.letter for item in sequence.items()] == list("ABCDEFGJ")


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([], "1 to 8 tokens a sequence, got 0"),
        ([3] * 9, "1 to 8 tokens a sequence, got 9"),
        ([3, 512], r"0\.\.511, got 3\.\.512"),
        ([-1], r"0\.\.511, got -1"),
        ([3] * 8, r"13 \+ 8 tokens do not fit a sequence of at most 20"),
    ],
)
def test_a_step_refuses(ids: list[int], says: str, load: Load) -> None:
    model = load("llama-a")
    sequence = model.new_pool(1, 20, slack=8).open()
    model.prefill(sequence, list(range(3, 16)))
    before = snapshot(sequence)
    with pytest.raises(StateError, match=says):
        model.step([(sequence, ids)])
    assert sequence.num_tokens == 13
    assert torch.equal(snapshot(sequence)["kv"], before["kv"])


def test_the_pool_refuses(load: Load) -> None:
    model = load("llama-a")
    with pytest.raises(StateError, match="positions end at 256"):
        model.new_pool(1, 257)
    pool = model.new_pool(1, 20)
    sequence = pool.open()
    with pytest.raises(StateError, match="all 1 sequences"):
        pool.open()
    with pytest.raises(StateError, match="each only once"):
        model.step([(sequence, [3]), (sequence, [4])])
    with pytest.raises(StateError, match="in one pool"):
        model.step([(sequence, [3]), (model.new_pool(1, 20).open(), [4])])
    pool.close(sequence)
    pool.close(sequence)
    assert pool.num_free == 1
    pool.check()


def test_what_other_families_have(load: Load) -> None:
    model = load("deepseek-v3-a")
    sequence = model.new_pool(1, 20).open()
    with pytest.raises(ConfigError, match="needs a model with an encoder half"):
        model.prefill(sequence, [3], mode="encoder")
    with pytest.raises(ConfigError, match="no drafter is built for deepseek_v3"):
        model.feed_drafter(sequence, torch.zeros(1, 1), 0)
    with pytest.raises(
        ConfigError, match="stored in FP8 or FP4, and this deepseek_v3 checkpoint has none"
    ):
        type(model)(model.args, model.weights.source, numerics="quant")
    assert model.drafter is None


def test_float64_is_close_to_float32(load: Load) -> None:
    """The same code in float64, as an oracle: rounding is all that differs."""
    for name in ("deepseek-v4-a", "deepseek-v32-a", "llama-gqa-yarn"):
        model, text = load(name), text_of(name)[:50]
        exact = type(model)(model.args, model.weights.source, dtype=torch.float64)
        a, b = (
            m.prefill(m.new_pool(1, 60, slack=64).open(), text, logits="all").logits
            for m in (model, exact)
        )
        assert b.dtype == torch.float64
        assert float((a - b).abs().max() / b.abs().max()) < 1e-5
