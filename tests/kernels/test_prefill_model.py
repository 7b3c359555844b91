"""Prompts in chunks on the kernels: against the torch reference, cut anywhere, resumed, stopped."""

import pytest
import torch

from deepdraft.errors import StateError
from deepdraft.models.v41_prefill_chunk import make_chunk
from deepdraft.models.v41_prefill_layers import Flow
from deepdraft.ops import cache
from deepdraft.quant import records
from tests.kernels import prefill_tiny as tiny


def encode(prefill, state, ids, **options):
    with torch.inference_mode():
        return prefill.encode(state, ids, **options)


def replay(prefill, state):
    with torch.inference_mode():
        return prefill.replay(state, all_rows=False)[0]


def held(pool, state):
    """Every byte of a sequence that counts: entries, keys, windows by position, open pairs."""
    n, found = state.num_tokens, {}
    for source, ratio in pool.ratios.items():
        at = state.slot * pool.entries[source]
        for name, part in (("main", pool.main), ("index", pool.index)):
            found[name, source] = part[source][at : at + n // ratio]
    window = torch.arange(max(0, n - pool.args.sliding_window), n)
    rows = state.slot * pool.ring + window % pool.ring
    for layer in range(pool.args.decoder_start):
        found["window", layer] = pool.window[layer][rows]
    if n % 2:
        at = state.slot * pool.pending_ring + (n - 1) % pool.pending_ring
        found |= {("pending", s): p[at] for s, p in pool.pending.items()}
    return found


def same(one, two):
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(value, two[name]), name


def relative(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


def padded(x, rows, dtype):
    out = torch.zeros(rows, *x.shape[1:], dtype=dtype, device=tiny.DEVICE)
    out[: len(x)] = x.to(tiny.DEVICE, dtype)
    return out


@pytest.mark.parametrize(
    "layers", [(1, 3), pytest.param(tuple(range(6)), marks=[pytest.mark.full], id="all")]
)
def test_layers_from_the_inputs_of_the_reference(layers):
    """Each layer is fed with the reference's streams; what it adds to them is compared."""
    reference, text = tiny.reference(), tiny.text(8)
    state, record = reference.new_pool(1, 32, slack=16).open(), {}
    reference.step([(state, text)], logits="none", record=record)
    pool, prefill = tiny.make(8)
    # The record's streams are those behind Engram.
    prefill.layers._inject = lambda *_: None
    n = len(text)
    with torch.inference_mode():
        chunk = make_chunk(pool.caches, text, slot=0, first=0, floors=(0, 0), write_from=0)
        rows, (_, table_rows) = chunk.rows, prefill.layers.start(chunk)
        for layer in layers:
            want = record[f"L{layer}"]
            x = padded(want["stream_in"][:n], rows, torch.bfloat16)
            flow = Flow(x, pre=padded(want["premix_in"][:n].flatten(1), rows, torch.float32))
            prefill.layers.run(chunk, flow, range(layer, layer + 1), table_rows=table_rows)
            norm = prefill.layers.weights.layers[layer].ffn_norm
            out = prefill.layers._enter(flow, norm, None)
            assert relative(out.x[:n].cpu(), want["stream_out"][:n]) < 0.02, layer
            if layer in chunk.selected:
                ours, theirs = chunk.selected[layer].entries[:n].cpu().long(), want["topk"][:n]
                shared = sum(
                    len({*a} & {*b}) / max(1, len({*b}))
                    for a, b in zip(ours.tolist(), theirs.tolist(), strict=True)
                )
                assert shared / n > 0.95, layer


@pytest.mark.full
def test_a_prompt_has_the_same_bits_wherever_it_is_cut():
    text = tiny.text(15)
    reference = tiny.reference()
    wanted = reference.new_pool(1, 32, slack=16)
    state = wanted.open()
    reference.prefill(state, text, mode="encoder")
    pool, prefill = tiny.make(16)
    whole = pool.open()
    assert encode(prefill, whole, text) == 15
    got = held(pool, whole)
    for source, ratio in pool.ratios.items():
        # Random weights: a last bit moves a code, and layers behind it follow.
        limit = 0.05 if ratio == 2 else 0.3
        for kind, part in (("main", wanted.main), ("index", wanted.index)):
            ours = cache.unpack(kind, got[kind, source]).cpu()
            assert relative(ours, part[source][: 15 // ratio]) < limit, (kind, source)
    exact = wanted.window[0][torch.arange(7, 15) % wanted.ring]
    assert torch.equal(cache.unpack("window", got["window", 0]).cpu(), exact)
    last = replay(prefill, whole)
    assert whole.decoder_tokens == 15 and whole.decoder_floor == 7 and whole.tail is None
    # Chunks of 8 rows, a part of 3 before them: other boundaries, odd ones.
    pool, prefill = tiny.make(8)
    cut = pool.open()
    for part in (text[:3], text[3:]):
        encode(prefill, cut, part)
    same(held(pool, cut), got)
    assert torch.equal(replay(prefill, cut), last)


@pytest.mark.full
def test_what_is_unpacked_first_changes_no_bit():
    """Weights, entries and keys; chunks long enough for it and shorter ones."""
    text, held_of = tiny.text(27, seed=6), []
    for plans, chunk in ((tiny.PLANS, 16), (tiny.UNPACKED, 16), (tiny.UNPACKED, 32)):
        pool, prefill = tiny.make(chunk, plans=plans)
        pool.open()  # so that the sequence's entries are not the first ones
        state = pool.open()
        encode(prefill, state, text)
        held_of.append((held(pool, state), replay(prefill, state)))
    for other, logits in held_of[1:]:
        same(other, held_of[0][0])
        assert torch.equal(logits, held_of[0][1])


@pytest.mark.full
def test_the_replay_from_the_state_of_the_reference():
    """Its streams of the last window and its entries: logits of all rows. One row's route may flip
    in random weights, half of them do not."""
    text = tiny.text(21, seed=3)
    reference = tiny.reference()
    wanted = reference.new_pool(1, 32, slack=32)
    state = wanted.open()
    reference.prefill(state, text, mode="encoder", final=False)
    x, pre = state.tail
    pool, prefill = tiny.make(24)
    ours = pool.open()
    ours.token_ids[:] = text
    ours.tail = x.bfloat16().to(tiny.DEVICE), pre.flatten(1).float().to(tiny.DEVICE)
    source = tiny.args().decoder_start
    pack = {"main": records.pack_fp4_e4m3_group16, "index": records.pack_mxfp4_group32}
    for kind, theirs, mine in (
        ("main", wanted.main, pool.main),
        ("index", wanted.index, pool.index),
    ):
        at = ours.slot * pool.entries[source]
        mine[source][at : at + 21] = pack[kind](theirs[source][:21]).to(tiny.DEVICE)
    logits = reference.prefill(state, [], mode="encoder", logits="all").logits
    with torch.inference_mode():
        got, taps, first = prefill.replay(ours, all_rows=True)
    assert first == 13 and taps is not None and len(taps) == len(got) == len(logits) == 8
    errors = [relative(a, b) for a, b in zip(got.cpu(), logits, strict=True)]
    assert sorted(errors)[3] < 0.1, errors


def test_an_empty_chunk_has_an_entry_that_empty_places_can_read():
    pool, prefill = tiny.make(8, plans=tiny.UNPACKED)
    chunk = make_chunk(
        pool.caches, [], slot=1, first=0, floors=(0, 0), write_from=0, rows_at_least=8
    )
    with torch.inference_mode():
        main, keys = prefill.layers._entry_values(tiny.args().roles[1], chunk)
    assert len(main) == len(keys) == 1 and not main.isnan().any()


@pytest.mark.full
def test_an_empty_chunk_runs():
    """What a server runs when it starts, with everything unpacked first."""
    pool, prefill = tiny.make(8, plans=tiny.UNPACKED)
    state = pool.open()
    before = pool.window.clone()
    with torch.inference_mode():
        prefill.warm()
    assert torch.equal(before, pool.window)
    encode(prefill, state, tiny.text(3))
    assert state.num_tokens == 3


@pytest.mark.full
def test_stopped_and_resumed():
    text = tiny.text(40, seed=1)
    pool, prefill = tiny.make(16)
    whole, stopped = pool.open(), pool.open()
    encode(prefill, whole, text)
    seen = []

    def watch(progress):
        seen.append((progress.done, progress.total))
        assert progress.tokens_per_second > 0 and progress.seconds_left is not None
        return len(seen) < 2

    assert encode(prefill, stopped, text, watch=watch) == 32
    assert seen == [(16, 40), (32, 40)] and stopped.token_ids == text[:32]
    encode(prefill, stopped, text[32:])
    same(held(pool, stopped), held(pool, whole))
    assert torch.equal(replay(prefill, stopped), replay(prefill, whole))


def test_a_copied_sequence_has_the_tokens_that_its_hash_looks_back_to(monkeypatch):
    """Its slot on the device has seen other ones, or none."""
    text, found = tiny.text(30, seed=8), []
    pool, prefill = tiny.make(16)
    start = prefill.layers.start

    def stop(chunk):
        found.append(start(chunk)[1][:, : chunk.count].clone())
        raise InterruptedError

    monkeypatch.setattr(prefill.layers, "start", stop)
    for known in (text, tiny.text(30, seed=9)):
        state = pool.open()
        pool.caches.tokens[state.slot, :30] = torch.tensor(known, dtype=torch.int32)
        state.token_ids[:] = text[:24]
        state.keep_global(24)
        assert state.replay_from == 16
        with pytest.raises(InterruptedError):
            encode(prefill, state, text[24:])
    assert torch.equal(*found)


@pytest.mark.full
def test_a_prefix_is_resumed_from_its_global_entries():
    """As the reference: the last window runs again and writes no entry of the prefix."""
    text = tiny.text(30, seed=2)
    reference = tiny.reference()
    wanted = reference.new_pool(1, 64, slack=16)
    state = wanted.open()
    reference.prefill(state, text[:24], mode="encoder")
    pool, prefill = tiny.make(16)
    ours = pool.open()
    encode(prefill, ours, text[:24])
    replay(prefill, ours)
    before = {name: v.clone() for name, v in held(pool, ours).items() if name[0] != "window"}
    for one in (state, ours):
        one.keep_global(20)
    reference.prefill(state, text[20:], mode="encoder")
    encode(prefill, ours, text[20:])
    replay(prefill, ours)
    after = held(pool, ours)
    for name, value in before.items():
        kept = value[: 20 // pool.ratios[name[1]]]
        assert torch.equal(after[name][: len(kept)], kept), name
    exact = wanted.window[0][torch.arange(22, 30) % wanted.ring]
    assert torch.equal(cache.unpack("window", after["window", 0]).cpu(), exact)
    for name in ("encoder_floor", "decoder_floor", "decoder_tokens", "origin", "written"):
        assert getattr(ours, name) == getattr(state, name), name


def test_what_cannot_run_is_refused():
    with pytest.raises(StateError, match="multiple of 8"):
        tiny.make(12)
    pool, prefill = tiny.make(8)
    with pytest.raises(StateError, match="at least one token"):
        replay(prefill, pool.open())
