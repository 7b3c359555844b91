"""State of a sequence: roll-back, clones, resuming from global KV, encoder prefill, inventory."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deepdraft.checkpoint.config import parse_args
from deepdraft.errors import StateError
from deepdraft.models.deepseek_v41 import DeepseekV41
from deepdraft.models.state import SequenceState, StatePool
from tests.checkpoint.tiny import published_config
from tests.models.conftest import assert_same, snapshot
from tests.models.test_steps import drawn, given, st

W = 16


def prefilled(model: DeepseekV41, text: list[int], n: int, *, slack: int = 16) -> SequenceState:
    state = model.new_pool(3, 161, slack=slack).open()
    model.prefill(state, text[:n], feed_drafter=True, logits="none")
    return state


def step(model: DeepseekV41, state: SequenceState, ids: list[int]) -> Tensor:
    """Confirmed tokens: a step and the drafter's ring; logits of all rows."""
    first = state.num_tokens
    out = model.step([(state, ids)])
    assert out.logits is not None and out.taps is not None
    model.feed_drafter(state, out.taps, first)
    return out.logits


def draft(model: DeepseekV41, state: SequenceState, token: int) -> tuple[list[int], Tensor]:
    assert model.drafter is not None
    proposal = model.drafter.draft(state, token, lambda row, _: int(row.argmax()))
    return proposal.token_ids, proposal.logits


# ---- reused memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("left", [float("nan"), float("inf")])
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 60])
def test_a_slot_does_not_remember_its_last_owner(
    left: float, n: int, model: DeepseekV41, text: list[int]
) -> None:
    """Rows that a broken sequence filled with NaN are read under a mask, and 0 * NaN is NaN."""

    def answer(pool: StatePool) -> Tensor:
        state = pool.open()
        out = model.prefill(state, text[:n], logits="all", feed_drafter=True)
        assert out.logits is not None
        drafted = draft(model, state, text[n])[1]
        return torch.cat([out.logits, drafted, step(model, state, [text[n]])])

    used = model.new_pool(1, 161)
    with torch.inference_mode():
        for rows in (*used.main.values(), *used.index.values(), *used.pending.values()):
            rows.fill_(left)
        used.window[:, :-1] = left
    assert torch.equal(answer(used), answer(model.new_pool(1, 161)))


# ---- roll-back -----------------------------------------------------------------------------


@pytest.mark.parametrize("start", [15, 48, 121])
@pytest.mark.parametrize("accepted", range(6))
def test_rejected_drafts_leave_no_trace(
    start: int, accepted: int, model: DeepseekV41, text: list[int]
) -> None:
    """Verify a block of which `accepted` tokens are right, cut back, go on: as if never drafted."""
    drafted, plain = prefilled(model, text, start), prefilled(model, text, start)
    right = text[start : start + 7]
    block = [*right[: 1 + accepted], *[(t + 1) % 500 for t in right[1 + accepted : 6]]]
    out = model.step([(drafted, block)])
    keep = start + 1 + accepted
    drafted.truncate(keep)
    model.feed_drafter(drafted, out.taps[: 1 + accepted], start)  # type: ignore[index]
    rows = torch.cat([step(model, plain, [t]) for t in right[: 1 + accepted]])
    assert torch.equal(out.logits[: 1 + accepted], rows)  # type: ignore[index]
    assert_same(snapshot(drafted), snapshot(plain))
    assert draft(model, drafted, 5)[0] == draft(model, plain, 5)[0]
    after = text[keep : keep + 3]
    for token in after:
        assert torch.equal(step(model, drafted, [token]), step(model, plain, [token]))
    assert_same(snapshot(drafted), snapshot(plain))


@drawn
@given(data=st.data())
def test_speculative_decoding_of_several_sequences(
    data: st.DataObject, model: DeepseekV41, text: list[int]
) -> None:
    """Rounds of ragged blocks over several sequences, with chance accept counts."""
    count = data.draw(st.integers(2, 3))
    starts = [data.draw(st.integers(1, 60)) for _ in range(count)]
    pool = model.new_pool(count, 161, slack=16)
    states = [pool.open() for _ in range(count)]
    alone = model.new_pool(count, 161, slack=64)
    plain = [alone.open() for _ in range(count)]
    for state, other, n in zip(states, plain, starts, strict=True):
        model.prefill(state, text[:n], feed_drafter=True, logits="none")
        model.prefill(other, text[:n], feed_drafter=True, logits="none")
    for _ in range(data.draw(st.integers(2, 5))):
        work, accepts = [], []
        for state in states:
            n, size = state.num_tokens, data.draw(st.integers(1, 6))
            accepts.append(data.draw(st.integers(1, size)))
            wrong = [(t + 1) % 500 for t in text[n + accepts[-1] : n + size]]
            work.append((state, [*text[n : n + accepts[-1]], *wrong]))
        out = model.step(work)
        assert out.logits is not None and out.taps is not None
        at = 0
        for (state, block), kept, other in zip(work, accepts, plain, strict=True):
            n = state.num_tokens - len(block)
            state.truncate(n + kept)
            model.feed_drafter(state, out.taps[at : at + kept], n)
            rows = step(model, other, text[n : n + kept])
            assert torch.equal(out.logits[at : at + kept], rows)
            at += len(block)
    for state, other in zip(states, plain, strict=True):
        assert_same(snapshot(state), snapshot(other))
        assert torch.equal(draft(model, state, 7)[1], draft(model, other, 7)[1])


@pytest.mark.parametrize("back", [1, 2, 3, 15, 16])
def test_truncate_within_the_spare_rows(back: int, model: DeepseekV41, text: list[int]) -> None:
    long, short = prefilled(model, text, 60), prefilled(model, text, 60 - back)
    long.truncate(60 - back)
    assert_same(snapshot(long), snapshot(short))
    assert torch.equal(step(model, long, text[60:65]), step(model, short, text[60:65]))


def test_truncate_says_what_is_lost(model: DeepseekV41, text: list[int]) -> None:
    state = prefilled(model, text, 60)
    before = snapshot(state)
    with pytest.raises(StateError, match=r"E \(window.*F \(window.*G \(drafter.*H \(open") as error:
        state.truncate(41)
    assert "keep_global" in str(error.value)
    with pytest.raises(StateError, match="G ") as error:
        state.truncate(40)
    assert "H (" not in str(error.value)  # an even length has no open pair
    for wrong in (-1, 61):
        with pytest.raises(StateError, match="cannot truncate"):
            state.truncate(wrong)
    assert_same(snapshot(state), before)
    # Cutting back twice does not reach further than once: overwritten rows stay overwritten.
    state.truncate(50)
    with pytest.raises(StateError, match="E "):
        state.truncate(42)
    assert state.num_tokens == 50


def test_truncate_to_nothing_starts_again(model: DeepseekV41, text: list[int]) -> None:
    state = prefilled(model, text, 60)
    state.truncate(0)
    fresh = prefilled(model, text, 30)
    model.prefill(state, text[:30], feed_drafter=True)
    assert_same(snapshot(state), snapshot(fresh))


# ---- clone ---------------------------------------------------------------------------------


def saved_copy(state: SequenceState) -> SequenceState:
    """By way of the host, into another slot."""
    return state.pool.restore(state.save())


COPIES = {"clone": SequenceState.clone, "save": saved_copy}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("n", [9, 50, 121])
def test_clone_goes_its_own_way(n: int, how: str, model: DeepseekV41, text: list[int]) -> None:
    state = prefilled(model, text, n)
    state.pool.close(prefilled_in(model, state.pool, text[30:90]))  # the clone gets used rows
    other = COPIES[how](state)
    assert_same(snapshot(state), snapshot(other))
    before = snapshot(state)
    step(model, other, [4, 5, 6])
    assert_same(snapshot(state), before)
    other.truncate(n)
    for token in text[n : n + 4]:
        assert torch.equal(step(model, state, [token]), step(model, other, [token]))
    assert_same(snapshot(state), snapshot(other))


def prefilled_in(model: DeepseekV41, pool: StatePool, text: list[int]) -> SequenceState:
    state = pool.open()
    model.prefill(state, text, feed_drafter=True, logits="none")
    return state


@pytest.mark.parametrize("n", [1, 17, 60])
def test_a_saved_sequence_outlives_its_slot(n: int, model: DeepseekV41, text: list[int]) -> None:
    """Saved, its slot used by another one with other tokens, restored there: the same bits."""
    pool = model.new_pool(1, 161, slack=16)
    state = prefilled_in(model, pool, text[:n])
    before, saved = snapshot(state), state.save()
    assert saved.nbytes == sum(rows.nbytes for rows in saved.rows) > 0
    pool.close(state)
    pool.close(prefilled_in(model, pool, text[30:90]))
    again = pool.restore(saved)
    assert_same(snapshot(again), before)
    with pytest.raises(StateError, match="in use"):
        pool.restore(saved)
    twin = prefilled(model, text, n)
    for token in text[n : n + 4]:
        assert torch.equal(step(model, again, [token]), step(model, twin, [token]))
        assert draft(model, again, token)[0] == draft(model, twin, token)[0]


@pytest.mark.parametrize("how", COPIES)
def test_clone_in_the_middle_of_encoder_prefill(
    how: str, model: DeepseekV41, text: list[int]
) -> None:
    state = model.new_pool(2, 161, slack=16).open()
    model.prefill(state, text[:45], mode="encoder", final=False)
    other = COPIES[how](state)
    a = model.prefill(state, text[45:70], mode="encoder", feed_drafter=True)
    b = model.prefill(other, text[45:70], mode="encoder", feed_drafter=True)
    assert torch.equal(a.logits, b.logits)  # type: ignore[arg-type]
    assert_same(snapshot(state), snapshot(other))


# ---- encoder prefill -----------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5, 15, 16])
def test_encoder_mode_is_full_within_a_window(n: int, model: DeepseekV41, text: list[int]) -> None:
    pool = model.new_pool(2, 161, slack=16)
    full, encoder = pool.open(), pool.open()
    a = model.prefill(full, text[:n], feed_drafter=True, logits="all")
    b = model.prefill(encoder, text[:n], mode="encoder", feed_drafter=True, logits="all")
    assert torch.equal(a.logits, b.logits)  # type: ignore[arg-type]
    assert torch.equal(a.taps, b.taps)  # type: ignore[arg-type]
    assert_same(snapshot(full), snapshot(encoder))
    assert torch.equal(step(model, full, text[n : n + 3]), step(model, encoder, text[n : n + 3]))


def encoder_prefill(
    model: DeepseekV41, ids: list[int], sizes: list[int], slack: int
) -> tuple[Tensor, dict[str, object], SequenceState]:
    state, at = model.new_pool(1, 161, slack=slack).open(), 0
    out = None
    for size in sizes:
        last = at + size == len(ids)
        out = model.prefill(
            state, ids[at : at + size], mode="encoder", final=last, feed_drafter=last
        )
        at += size
    assert out is not None and out.logits is not None
    return out.logits, snapshot(state), state


@pytest.mark.parametrize("n", [17, 48, 121])
@pytest.mark.parametrize("slack", [5, 64])
def test_encoder_mode_whatever_the_chunks(
    n: int, slack: int, model: DeepseekV41, text: list[int]
) -> None:
    whole, state, _ = encoder_prefill(model, text[:n], [n], 64)
    for sizes in ([1] * n, [3, 4, n - 8, 1], [n - 1, 1], [n // 2, n - n // 2], [1, n - 1]):
        logits, other, _ = encoder_prefill(model, text[:n], sizes, slack)
        assert torch.equal(logits, whole)
        assert_same(other, state)


def test_encoder_mode_differs_where_it_must(model: DeepseekV41, text: list[int]) -> None:
    """Global KV and encoder windows are exact; the decoder's windows begin at the replay."""
    _, approximate, state = encoder_prefill(model, text[:121], [121], 64)
    exact = snapshot(prefilled(model, text, 121, slack=64))
    decoder = model.args.decoder_start
    for name, value in exact.items():
        part, _, place = name.partition(".")
        if (part == "window" and int(place) > decoder) or part == "draft_window":
            assert not torch.equal(approximate[name], value)  # type: ignore[arg-type]
        elif isinstance(value, Tensor):
            assert torch.equal(approximate[name], value), name  # type: ignore[arg-type]
    assert (state.origin, state.decoder_floor, state.encoder_floor) == ("decoder-replayed", 105, 0)
    with pytest.raises(StateError, match=r"exactly: F .*G "):
        state.truncate(119)


def test_encoder_mode_goes_on_from_rows_that_are_there(model: DeepseekV41, text: list[int]) -> None:
    """At most a window of new tokens after exact rows: nothing is approximated."""
    full, encoder = prefilled(model, text, 40, slack=64), prefilled(model, text, 40, slack=64)
    a = model.prefill(full, text[40:56], feed_drafter=True)
    b = model.prefill(encoder, text[40:56], mode="encoder", feed_drafter=True)
    assert torch.equal(a.logits, b.logits)  # type: ignore[arg-type]
    assert_same(snapshot(full), snapshot(encoder))


# ---- resuming from global KV ---------------------------------------------------------------


@pytest.mark.parametrize("keep", [2, 8, 16])
@pytest.mark.parametrize("mode", ["full", "encoder"])
def test_resume_within_a_window_is_exact(
    keep: int, mode: str, model: DeepseekV41, text: list[int]
) -> None:
    n = 16
    state = prefilled(model, text, 30)
    state.keep_global(keep)
    ids = text[keep:n] if keep < n else []
    out = model.prefill(state, ids, mode=mode, feed_drafter=True)  # type: ignore[arg-type]
    plain = model.new_pool(1, 161).open()
    whole = model.prefill(plain, text[:n], feed_drafter=True)
    assert torch.equal(out.logits, whole.logits)  # type: ignore[arg-type]
    assert_same(snapshot(state), snapshot(plain), skip=("origin",))
    assert state.origin == "encoder-replayed"


@pytest.mark.parametrize("keep", [18, 48, 100])
@pytest.mark.parametrize("mode", ["full", "encoder"])
def test_resume_rebuilds_windows_and_leaves_global_rows(
    keep: int, mode: str, model: DeepseekV41, text: list[int]
) -> None:
    n = keep + 21
    state = prefilled(model, text, 121, slack=64)
    exact = snapshot(prefilled(model, text, n, slack=64))
    state.keep_global(keep)
    pool = state.pool
    pool.window[:, :-1].fill_(1e30)  # what is lost is lost
    kept = {s: pool.main[s][: keep // r].clone() for s, r in pool.ratios.items()}
    keys = {s: pool.index[s][: keep // r].clone() for s, r in pool.ratios.items()}
    out = model.prefill(state, text[keep:n], mode=mode, feed_drafter=True)  # type: ignore[arg-type]
    for source in pool.ratios:
        assert torch.equal(pool.main[source][: len(kept[source])], kept[source])
        assert torch.equal(pool.index[source][: len(keys[source])], keys[source])
    resumed = snapshot(state)
    for name, value in exact.items():
        if isinstance(value, Tensor):
            mine = resumed[name]
            assert isinstance(mine, Tensor)
            assert mine.abs().max() < 1e6, name
            # Layer 0's window rows depend on tokens alone.
            if name == "window.0":
                assert torch.equal(mine, value)
    assert state.encoder_floor == max(0, keep - W)
    plain = prefilled(model, text, n - 1, slack=64)
    target = step(model, plain, text[n - 1 : n])
    assert out.logits is not None
    apart = float((out.logits - target).abs().max() / target.abs().max())
    assert 0 < apart < 0.6  # approximate by design, on random weights


@pytest.mark.parametrize("sizes", [[1] * 21, [20, 1], [7, 7, 7]])
def test_resume_in_chunks(sizes: list[int], model: DeepseekV41, text: list[int]) -> None:
    keep, results = 48, []
    for parts in ([21], sizes):
        state = prefilled(model, text, 121, slack=64)
        state.keep_global(keep)
        at, out = keep, None
        for size in parts:
            out = model.prefill(
                state,
                text[at : at + size],
                mode="encoder",
                final=at + size == keep + 21,
                feed_drafter=at + size == keep + 21,
            )
            at += size
        assert out is not None
        results.append((out.logits, snapshot(state)))
    assert torch.equal(results[0][0], results[1][0])  # type: ignore[arg-type]
    assert_same(results[0][1], results[1][1])


def test_keep_global_needs_an_even_length(model: DeepseekV41, text: list[int]) -> None:
    state = prefilled(model, text, 60)
    before = snapshot(state)
    with pytest.raises(StateError, match=r"even length only .* try 40"):
        state.keep_global(41)
    for wrong in (-2, 62):
        with pytest.raises(StateError, match="cannot keep"):
            state.keep_global(wrong)
    assert_same(snapshot(state), before)
    state.keep_global(0)
    assert snapshot(state)["num_tokens"] == 0 and state.origin == "exact"


# ---- errors change nothing -----------------------------------------------------------------

Case = tuple[str, Callable[[DeepseekV41, SequenceState, SequenceState], object]]

WRONG: list[Case] = [
    ("1 to 16 tokens", lambda m, s, _: m.step([(s, [])])),
    ("1 to 16 tokens", lambda m, s, _: m.step([(s, [3] * 17)])),
    ("at least one sequence", lambda m, s, _: m.step([])),
    ("only once", lambda m, s, _: m.step([(s, [3]), (s, [4])])),
    ("one pool", lambda m, s, o: m.step([(s, [3]), (o, [4])])),
    (r"token ids must lie in 0\.\.511", lambda m, s, _: m.step([(s, [3, 512])])),
    (r"token ids must lie in 0\.\.511", lambda m, s, _: m.step([(s, [-1])])),
    (r"token ids must lie in 0\.\.511", lambda m, s, _: m.prefill(s, [3] * 40 + [600])),
    ("token ids must lie in", lambda m, s, _: m.prefill(s, [3] * 40 + [-5], mode="encoder")),
    ("do not fit", lambda m, s, _: m.prefill(s, [3] * 131)),
    ("do not fit", lambda m, s, _: m.prefill(s, [3] * 131, mode="encoder")),
    ("at least one token", lambda m, s, _: m.prefill(s, [])),
    ("at least one token", lambda m, s, _: m.prefill(s, [], mode="encoder")),
    ("are confirmed", lambda m, s, _: m.feed_drafter(s, torch.zeros(2, 768), 30)),
    ("cannot truncate", lambda m, s, _: s.truncate(32)),
]


@pytest.mark.parametrize(("says", "wrong"), WRONG)
def test_refusals_change_nothing(
    says: str,
    wrong: Callable[[DeepseekV41, SequenceState, SequenceState], object],
    model: DeepseekV41,
    text: list[int],
) -> None:
    state, other = prefilled(model, text, 31), prefilled(model, text, 20)
    before, theirs = snapshot(state), snapshot(other)
    pending = {k: v.clone() for k, v in state.pool.pending.items()}
    with pytest.raises(StateError, match=says):
        wrong(model, state, other)
    assert_same(snapshot(state), before)
    assert_same(snapshot(other), theirs)
    assert all(torch.equal(v, pending[k]) for k, v in state.pool.pending.items())
    fresh = prefilled(model, text, 31)
    assert torch.equal(step(model, state, text[31:34]), step(model, fresh, text[31:34]))


def test_what_waits_for_prefill_takes_no_step(model: DeepseekV41, text: list[int]) -> None:
    state = prefilled(model, text, 60)
    state.keep_global(40)
    before = snapshot(state)
    with pytest.raises(StateError, match="waits for prefill"):
        model.step([(state, [3])])
    assert_same(snapshot(state), before)
    middle = model.new_pool(1, 161).open()
    model.prefill(middle, text[:40], mode="encoder", final=False)
    before = snapshot(middle)
    with pytest.raises(StateError, match="waits for prefill"):
        model.step([(middle, [3])])
    with pytest.raises(StateError, match="middle of an encoder prefill"):
        middle.truncate(39)
    assert_same(snapshot(middle), before)


def test_draft_needs_a_fed_ring(model: DeepseekV41, text: list[int]) -> None:
    state = prefilled(model, text, 31)
    model.step([(state, [3, 4])])
    with pytest.raises(StateError, match="fed 31 of 33"):
        draft(model, state, 5)


def test_pool_limits(model: DeepseekV41) -> None:
    pool = model.new_pool(2, 64)
    a, _ = pool.open(), pool.open()
    with pytest.raises(StateError, match="all 2 sequences"):
        pool.open()
    with pytest.raises(StateError, match="all 2 sequences"):
        a.clone()
    pool.close(a)
    pool.close(a)  # harmless
    pool.check()
    assert pool.num_free == 1
    with pytest.raises(StateError, match="max_position_embeddings"):
        model.new_pool(1, 2000)
    with pytest.raises(StateError, match="64"):
        model.prefill(pool.open(), [3] * 65)


# ---- inventory -----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 100, 128, 1000, 1001])
def test_inventory_of_the_published_model(n: int) -> None:
    """890 bytes a token of global KV, and the constant items of notes 8.1."""
    args = parse_args(published_config())
    state = StatePool(args, num_sequences=1, max_tokens=1024, slack=8).open()
    state.token_ids = [0] * n
    state.decoder_tokens = state.drafter_tokens = state.written = n
    items = {item.letter: item for item in state.items()}
    assert list(items) == list("ABCDEFGHIJ")
    assert sum(items[x].packed_bytes for x in "ABCD") == 890 * n - (534 if n % 2 else 0)
    assert [items[x].packed_bytes for x in "ABCD"] == [
        3 * (n // 2) * 288,
        3 * (n // 2) * 68,
        n * 288,
        n * 68,
    ]
    live = min(n, 128)
    assert [items[x].packed_bytes for x in "EFG"] == [20 * live * 528] * 2 + [3 * live * 528]
    assert items["H"].packed_bytes == (12_288 if n % 2 else 0)
    assert items["I"].rows == min(n, 3) and items["J"].rows == n
    assert [x for x in items if items[x].truncatable] == list("ABCDIJ")
    if live == 128:
        assert items["E"].packed_bytes == 1_351_680 and items["G"].packed_bytes == 202_752


def test_inventory_counts_what_is_there(model: DeepseekV41, text: list[int]) -> None:
    state = prefilled(model, text, 121, slack=64)
    stored = {item.letter: item.stored_bytes for item in state.items()}
    caches = {k: v for k, v in snapshot(state).items() if isinstance(v, Tensor)}

    def held(*starts: str) -> int:
        return sum(t.nbytes for name, t in caches.items() if name.rpartition(".")[0] in starts)

    assert stored["A"] + stored["C"] == held("main")
    assert stored["B"] + stored["D"] == held("index_k")
    assert stored["E"] + stored["F"] == held("window")
    assert stored["G"] == held("draft_window")
    assert stored["H"] == held("pending_a", "pending_g")
    state.keep_global(100)
    rows = {item.letter: item.rows for item in state.items()}
    assert [rows[x] for x in "EFGH"] == [0, 0, 0, 0] and rows["C"] == 100


def test_inventory_after_replay(model: DeepseekV41, text: list[int]) -> None:
    """Rows below a replay's start do not exist and are not counted."""
    state = prefilled(model, text, 60)
    state.keep_global(40)
    model.prefill(state, text[40:42], mode="encoder", feed_drafter=True)
    rows = {item.letter: item.rows for item in state.items()}
    decoder = model.args.num_hidden_layers - model.args.decoder_start
    assert rows["E"] == model.args.decoder_start * W
    assert rows["F"] == decoder * W
    assert rows["G"] == 3 * W


# ---- drafts --------------------------------------------------------------------------------


def test_a_block_of_one_sees_itself_only(
    model: DeepseekV41, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row that pads a lone draft is no key of it: what it holds changes nothing."""
    drafter, state = model.drafter, prefilled(model, text, 40)
    assert drafter is not None

    def logits(noise: int, size: int) -> Tensor:
        args = dataclasses.replace(model.args, dspark_noise_token_id=noise)
        monkeypatch.setattr(drafter, "args", args)
        return drafter.draft(state, 9, lambda row, _: int(row.argmax()), block_size=size).logits

    assert torch.equal(logits(508, 1), logits(77, 1))
    assert not torch.equal(logits(508, 2), logits(77, 2))


def test_drafts_after_a_gap_see_what_was_fed(model: DeepseekV41, text: list[int]) -> None:
    """Rings that were fed from position 30 on only: rows below do not exist."""
    state = model.new_pool(1, 161, slack=64).open()
    out = model.step([(state, text[:40])])
    state.pool.window[model.args.num_hidden_layers :, :-1].fill_(1e30)
    model.feed_drafter(state, out.taps[30:], 30)  # type: ignore[index]
    assert (state.drafter_tokens, state.drafter_floor) == (40, 30)
    assert draft(model, state, 9)[1].abs().max() < 1e6
    with pytest.raises(StateError, match=r"exactly: G \(drafter ring\)"):
        state.truncate(38)
