"""Any cutting of a text into steps, alone or beside other sequences, gives the same bits.

At 121 tokens and more every window has wrapped, the index drops entries at both ratios, and
candidate blocks are dropped too.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepdraft.models.deepseek_v41 import DeepseekV41
from deepdraft.models.state import SequenceState
from tests.models.conftest import assert_same, snapshot

N = 121
Run = tuple[Tensor, Tensor, dict[str, object]]

drawn = settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def run_chunks(model: DeepseekV41, text: Sequence[int], sizes: Sequence[int]) -> Run:
    """Logits and taps of all rows, and the state, of a text in steps of these sizes."""
    pool = model.new_pool(2, 161, slack=max(sizes))
    pool.open()  # so that the sequence under test does not lie at row 0
    state, at, logits, taps = pool.open(), 0, [], []
    for size in sizes:
        out = model.step([(state, text[at : at + size])])
        assert out.logits is not None and out.taps is not None
        model.feed_drafter(state, out.taps, at)
        logits.append(out.logits)
        taps.append(out.taps)
        at += size
    assert at == len(text)
    return torch.cat(logits), torch.cat(taps), snapshot(state)


def cut(total: int, size: int) -> list[int]:
    sizes = [size] * (total // size)
    return [*sizes, total % size] if total % size else sizes


@pytest.fixture(scope="module")
def one_shot(load: Callable[[str], DeepseekV41], text: list[int]) -> Callable[[str], Run]:
    done: dict[str, Run] = {}

    def get(mode: str) -> Run:
        if mode not in done:
            done[mode] = run_chunks(load(mode), text[:N], [N])
        return done[mode]

    return get


@pytest.mark.parametrize("mode", ["exact", "quant"])
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(cut(N, 1), id="token by token"),
        pytest.param(cut(N, 2), id="pairs"),
        pytest.param([1, *cut(N - 1, 2)], id="pairs, cut at odd lengths"),
        pytest.param(cut(N, 7), id="sevens"),
        pytest.param(cut(N, 16), id="one window"),
        pytest.param(cut(N, 17), id="one window and one"),
        pytest.param([15, 1, 1, 31, 3, 64, 6], id="around window and index sizes"),
        pytest.param([63, 1, 57], id="an odd boundary, then one row"),
    ],
)
def test_chunked_is_one_shot(
    mode: str,
    sizes: list[int],
    load: Callable[[str], DeepseekV41],
    text: list[int],
    one_shot: Callable[[str], Run],
) -> None:
    logits, taps, state = run_chunks(load(mode), text[:N], sizes)
    whole_logits, whole_taps, whole_state = one_shot(mode)
    assert torch.equal(logits, whole_logits)
    assert torch.equal(taps, whole_taps)
    assert_same(state, whole_state)


def test_selection_prunes_in_these_texts(model: DeepseekV41, text: list[int]) -> None:
    """Otherwise the tests here would show less than they claim."""
    state = model.new_pool(1, N, slack=N).open()
    record: dict[str, dict[str, Tensor]] = {}
    model.step([(state, text[:N])], record=record)
    for layer in model.args.index_source_layer_ids:
        ratio = model.args.compress_ratios[layer]
        chosen = record[f"L{layer}"]["topk"][-1].tolist()
        assert -1 not in chosen and chosen != list(range(N // ratio))[-16:] != chosen
        assert len(chosen) < N // ratio
    kept = record[f"L{model.args.candidate_source_layer_id}"]["kept"][-1]
    assert 0 < int(kept.sum()) == 6 < -(-N // 4)


@drawn
@given(data=st.data())
def test_random_cuts(
    data: st.DataObject, model: DeepseekV41, text: list[int], one_shot: Callable[[str], Run]
) -> None:
    sizes: list[int] = []
    while sum(sizes) < N:
        left = N - sum(sizes)
        sizes.append(min(left, data.draw(st.one_of(st.integers(1, 6), st.integers(7, 70)))))
    logits, taps, state = run_chunks(model, text[:N], sizes)
    whole_logits, whole_taps, whole_state = one_shot("exact")
    assert torch.equal(logits, whole_logits)
    assert torch.equal(taps, whole_taps)
    assert_same(state, whole_state)


@pytest.mark.parametrize("slack", [5, 64])
def test_prefill_is_steps(
    slack: int, model: DeepseekV41, text: list[int], one_shot: Callable[[str], Run]
) -> None:
    pool = model.new_pool(1, 161, slack=slack)
    state = pool.open()
    first = model.prefill(state, text[:37], final=False, feed_drafter=True)
    assert first.logits is None
    last = model.prefill(state, text[37:N], feed_drafter=True)
    assert last.logits is not None
    assert torch.equal(last.logits, one_shot("exact")[0][-1:])
    assert_same(snapshot(state), one_shot("exact")[2])


def test_recording_changes_nothing(model: DeepseekV41, text: list[int]) -> None:
    pool = model.new_pool(2, 161, slack=64)
    plain, noted = pool.open(), pool.open()
    for piece in (text[:20], text[20:21], text[21:80], text[80:81]):
        a = model.step([(plain, piece)])
        b = model.step([(noted, piece)], record={})
        assert torch.equal(a.logits, b.logits)  # type: ignore[arg-type]
    assert_same(snapshot(plain), snapshot(noted))


def test_asking_for_fewer_logits_changes_none(model: DeepseekV41, text: list[int]) -> None:
    def run(logits: str) -> list[Tensor | None]:
        pool = model.new_pool(3, 161, slack=64)
        states = [pool.open() for _ in range(3)]
        outs = []
        for pieces in (([3], [9], [4]), ([1], [1], [1]), ([2], [1], [5]), ([1], [7], [1])):
            work = []
            for state, [n] in zip(states, pieces, strict=True):
                work.append((state, text[state.num_tokens : state.num_tokens + n]))
            outs.append(model.step(work, logits=logits).logits)  # type: ignore[arg-type]
        alone = model.step([(states[0], text[:1])], logits=logits).logits  # type: ignore[arg-type]
        return [*outs, alone]

    everything, last, none = run("all"), run("last"), run("none")
    assert none == [None] * 5
    ends = [[2, 11, 15], [0, 1, 2], [1, 2, 7], [0, 7, 8], [0]]
    for rows, few, pick in zip(everything, last, ends, strict=True):
        assert rows is not None and few is not None
        assert torch.equal(rows[pick], few)


def single(model: DeepseekV41, texts: list[list[int]]) -> list[tuple[Tensor, dict[str, object]]]:
    pool = model.new_pool(1, 161, slack=161)
    out = []
    for ids in texts:
        state = pool.open()
        rows = model.step([(state, ids)])
        assert rows.logits is not None and rows.taps is not None
        model.feed_drafter(state, rows.taps, 0)
        out.append((rows.logits, snapshot(state)))
        pool.close(state)
    return out


@drawn
@given(data=st.data())
def test_sequences_side_by_side(data: st.DataObject, model: DeepseekV41, text: list[int]) -> None:
    """Steps that take ragged rows of several sequences, in any order, equal lone sequences."""
    count = data.draw(st.integers(2, 4))
    starts = [data.draw(st.integers(0, 40)) for _ in range(count)]
    texts = [text[s : s + data.draw(st.integers(30, 110))] for s in starts]
    alone = single(model, texts)
    pool = model.new_pool(count, 161, slack=40)
    states = [pool.open() for _ in range(count)]
    logits: list[list[Tensor]] = [[] for _ in range(count)]
    while any(s.num_tokens < len(t) for s, t in zip(states, texts, strict=True)):
        left = [i for i in range(count) if states[i].num_tokens < len(texts[i])]
        chosen = data.draw(st.permutations(left))[: data.draw(st.integers(1, len(left)))]
        work: list[tuple[SequenceState, list[int]]] = []
        for i in chosen:
            n = states[i].num_tokens
            size = data.draw(st.one_of(st.integers(1, 6), st.integers(7, 40)))
            work.append((states[i], texts[i][n : n + size]))
        out = model.step(work)
        assert out.logits is not None and out.taps is not None
        at = 0
        for i, (state, ids) in zip(chosen, work, strict=True):
            rows = slice(at, at + len(ids))
            logits[i].append(out.logits[rows])
            model.feed_drafter(state, out.taps[rows], state.num_tokens - len(ids))
            at += len(ids)
    for i, (rows, state) in enumerate(alone):
        assert torch.equal(torch.cat(logits[i]), rows)
        assert_same(snapshot(states[i]), state)


def test_a_used_pool_is_as_good_as_a_new_one(model: DeepseekV41, text: list[int]) -> None:
    """Rows that an earlier sequence left behind are never read."""
    pool = model.new_pool(1, 161, slack=64)
    state = pool.open()
    model.prefill(state, text[40:140], feed_drafter=True)
    pool.close(state)
    pool.window.fill_(1e30)
    pool.window[:, -1] = 0.0  # the sink's key
    for rows in (*pool.main.values(), *pool.index.values(), *pool.pending.values()):
        rows.fill_(1e30)
    state = pool.open()
    out = model.prefill(state, text[:50], logits="all", feed_drafter=True)
    [(rows, clean)] = single(model, [text[:50]])
    assert torch.equal(out.logits, rows)  # type: ignore[arg-type]
    assert_same(snapshot(state), clean)
