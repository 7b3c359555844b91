"""Set A: the published code's own numbers (README of the data; issue a's figures)."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepdraft.models.csa import Indexer
from deepdraft.models.deepseek_v41 import DeepseekV41
from deepdraft.models.layers import make_numerics
from deepdraft.models.state import SequenceState
from deepdraft.proof import golden_compare as compare
from deepdraft.proof.golden import Golden, Report
from deepdraft.proof.golden_quant import layerwise, off_grid
from deepdraft.proof.golden_run import Replay, _prefix
from tests.golden.make import SET_A, stale_index_keys

EXCERPTS = Path(__file__).parent / "v41-a-excerpts"
ROWS = 12


def failures(report: Report) -> set[tuple[str, str]]:
    return {(o.file, o.array) for o in report.outcomes if o.verdict == "fail"}


def set_a_tables() -> dict[str, object]:
    return json.loads((SET_A / "engram-hash.json").read_text())


def test_exact() -> None:
    report = Golden(SET_A).run(["exact"])
    assert failures(report) == {("layers48-exact", "*")}  # left out of this copy
    found = {(o.file, o.array): o for o in report.outcomes}
    # Every stored array is compared, and the greedy tokens and the hash tables besides.
    stored = [load_file(f).keys() for f in SET_A.glob("*-exact.safetensors")]
    assert report.compared == sum(map(len, stored)) + 1 + len(set_a_tables())
    for name in ("prompt", "decode", "oneshot", "prompt48", "short16"):
        outcome = found["logits-exact", f"{name}_logits"]
        assert outcome.rule == "rel of each row"
        assert outcome.error is not None and 0 < outcome.error <= 2e-5
    for name in ("tokens", "experts.M2"):
        assert found["dspark-exact", name].rule == "identical"
    for layer in (1, 3, 4, 6):
        assert found["indexer-exact", f"decode_topk.{layer}"].rule == "identical"
    assert found["replay-exact", "draft_tokens"].verdict == "pass"
    assert found["tokens", "greedy_tokens.exact"].verdict == "pass"
    assert found["decode-unmodified-exact", "decode_logits"].note.startswith("shows from step 1 on")
    assert found["engram-hash.json", "multipliers"].rule == "identical"


def test_exact_layers(load: Callable[..., DeepseekV41], set_a: Golden) -> None:
    model, ours = load("exact"), Replay()
    pool = model.new_pool(1, 64, slack=64)
    _prefix(model, pool, set_a.data.texts, ours)
    golden = load_file(EXCERPTS / "layers48-exact.safetensors")
    mine = ours.arrays["layers48"]
    assert ours.required["layers48"] <= golden.keys() <= mine.keys()
    choose = compare.exact_rules(compare.EXACT_REL, {})
    for name, value in golden.items():
        pair = (mine[name][: value.shape[0]], value)
        outcome = compare.check("exact", "layers48", name, *pair, choose(name, value))
        assert outcome.verdict == "pass", outcome


def test_qsim() -> None:
    report = Golden(SET_A).run(["qsim"])
    left_out = {(f"{s}-qsim", "*") for s in ("layers48", "dspark", "engram", "router")}
    assert failures(report) == left_out
    worst = max(o.error or 0.0 for o in report.outcomes if o.mode == "qsim" and o.tolerance)
    assert worst <= 1e-6
    single = {o.array: o for o in report.outcomes if o.mode == "qsim-float32"}
    assert set(single) == {"prompt_logits", "decode_logits", "short16_logits"}
    for flip in report.flips:
        first = flip["first_boundary"]
        assert first["on_boundary"] and first["output32"] != first["output64"]
        assert all(p >= first["position"] for p in flip["positions_off"])


def test_quant() -> None:
    report = Golden(SET_A).run(["quant"])
    left_out = ("layers48", "dspark", "engram", "router", "indexer")
    missing = {(f"{s}-quant", "*") for s in left_out}
    assert failures(report) == missing | {("decode-unmodified-quant", "decode_logits")}
    found = {o.array: o for o in report.outcomes}
    assert found["short16_logits"].tolerance == 0.44
    assert found["after48.window.0"].tolerance == 0.06
    assert found["after48.main.1"].tolerance == 0.3
    for name in ("after161.draft_window.2", "after121.index_k.4", "after161.main.3"):
        assert (found[name].verdict, found[name].note) == ("pass", "on the grid")


def test_quant_layers(load: Callable[..., DeepseekV41], set_a: Golden) -> None:
    golden = load_file(EXCERPTS / "layers48-quant.safetensors")
    layers = layerwise(load("quant"), ROWS, golden)
    measured = set_a.consistency["layerwise_quant_vs_fp32_arithmetic"]
    choose, compared = compare.layer_rules(measured), 0
    for layer, arrays in layers.items():
        for name in arrays.keys() - {"stream_in", "premix_in"}:
            key = f"L{layer}.{name}"
            if key in golden:
                rule = choose(key, arrays[name])
                outcome = compare.check("quant", "layers48", key, arrays[name], golden[key], rule)
                assert outcome.verdict == "pass", outcome
                compared += 1
    assert compared > 100


def test_layers_one_at_a_time_as_the_data_says(load: Callable[..., DeepseekV41]) -> None:
    """The README measured float32 arithmetic with the same quantisers: ours is at its figures."""
    golden = load_file(EXCERPTS / "layers48-quant.safetensors")
    layers = layerwise(load("qsim"), ROWS, golden)
    errors = [compare.relative_l2(a["attn_in"], golden[f"L{i}.attn_in"]) for i, a in layers.items()]
    assert all(0.001 < e < 0.003 for e in errors)
    errors = [
        compare.relative_l2(a["attn_out"], golden[f"L{i}.attn_out"]) for i, a in layers.items()
    ]
    assert all(0.03 < e < 0.25 for e in errors)


def test_values_off_the_grid_are_found(load: Callable[..., DeepseekV41]) -> None:
    cache = load_file(SET_A / "kv-qsim.safetensors")
    for name in ("after48.window.3", "after121.main.1", "after161.index_k.4"):
        assert off_grid(name, cache[name]) == 0
        moved = cache[name].clone()
        moved[3, 5:7] = moved[3].abs().max() * 0.77
        assert off_grid(name, moved)
    assert off_grid("after121.pending_a.1", cache["after121.pending_a.1"]) is None


def test_published_defect_stale_index_keys(
    load: Callable[..., DeepseekV41], set_a: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the defect planted our decode gives what the published code gives; without, it does
    not (notes 11.3)."""
    model, texts = load("exact"), set_a.data.texts
    published = load_file(SET_A / "decode-unmodified-exact.safetensors")["decode_logits"]
    right = load_file(SET_A / "logits-exact.safetensors")["decode_logits"]
    pool = model.new_pool(2, 161, slack=64)
    state = pool.open()
    model.prefill(state, texts.prompt, logits="none")
    other = state.clone()

    def decode(sequence: SequenceState) -> torch.Tensor:
        rows = [model.step([(sequence, [t])]).logits for t in texts.greedy["exact"]]
        return torch.cat([row for row in rows if row is not None])

    ours = decode(state)
    monkeypatch.setattr(Indexer, "_keys", stale_index_keys)
    theirs = decode(other)
    assert compare.relative_rows(ours, right).max() <= 2e-5
    assert compare.relative_rows(theirs, published).max() <= 2e-5
    apart = compare.relative_rows(ours, published)
    assert apart[0] <= 2e-5 and bool((apart[1:] > 0.05).all())


@pytest.mark.parametrize("mode", ["exact", "quant"])
def test_published_defect_filling_up(mode: str, mixed_dir: Path) -> None:
    """Candidate blocks that hold fewer entries than the index takes: fewer are taken (notes 11.3).

    The mixed model's blocks hold 9 entries, its index takes 10.
    """
    golden = Golden(mixed_dir)
    model = golden.model(make_numerics(mode))
    args = model.args
    assert args.candidate_topk_blocks * args.candidate_block_size < args.index_topk
    state = model.new_pool(1, 80, slack=80).open()
    record: dict[str, dict[str, torch.Tensor]] = {}
    model.step([(state, golden.data.texts.prompt)], record=record)
    restricted = [i for i, role in enumerate(args.roles) if role.restricted]
    assert restricted
    for layer in restricted:
        chosen, kept = record[f"L{layer}"]["topk"], record[f"L{layer}"]["kept"]
        for row in (20, 45, 69):
            entries = [e for e in chosen[row].tolist() if e >= 0]
            inside = [e for e in range(row + 1) if kept[row, e // args.candidate_block_size]]
            assert entries == inside and len(entries) <= 9
