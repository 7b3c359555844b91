"""Any directory of the format: other sizes pass, damaged ones fail, with the right exit status."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepdraft.proof.golden import check_directory, main


@pytest.fixture
def damaged(bare_dir: Path, tmp_path: Path) -> Path:
    """A copy of the bare model's directory, to be damaged."""
    copy = tmp_path / "copy"
    shutil.copytree(bare_dir, copy)
    return copy


def change(directory: Path, stem: str, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    file = directory / f"{stem}-exact.safetensors"
    arrays = load_file(file)
    edit(arrays)
    save_file(arrays, file)


def only_failure(directory: Path) -> tuple[str, str, str]:
    report = check_directory(directory)
    assert not report.passed
    [o] = [o for o in report.outcomes if o.verdict == "fail"]
    return o.file, o.array, o.note


def test_other_sizes(mixed_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(str(mixed_dir), as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] and report["counts"]["fail"] == 0
    assert set(report["seconds"]) == {"exact", "qsim", "quant"}
    names = {(o["mode"], o["file"], o["array"]) for o in report["arrays"]}
    assert ("exact", "logits-exact", "short9_logits") in names
    assert ("qsim", "kv-qsim", "after31.pending_g.0") in names
    assert ("quant", "layers31-quant", "L6.attn_out") in names
    assert ("exact", "dspark-exact", "experts.M0") in names
    assert ("exact", "router-exact", "scores31.2") in names
    stored = sum(len(load_file(f)) for f in mixed_dir.glob("*.safetensors"))
    # qsim in float32 adds three, greedy tokens one a mode, and the hash tables eight.
    assert report["compared"] == stored + 3 + 3 + 8


def test_without_memory_and_drafter(bare_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(str(bare_dir)) == 0
    out = capsys.readouterr().out
    assert "0 FAIL" in out and "without a target" in out
    assert "  pass  oneshot_logits" in out


def test_missing_file_and_array(damaged: Path) -> None:
    (damaged / "router-exact.safetensors").rename(damaged.parent / "router")
    assert only_failure(damaged) == ("router-exact", "*", "the file is missing")
    (damaged.parent / "router").rename(damaged / "router-exact.safetensors")
    change(damaged, "kv", lambda a: a.pop("after70.main.1"))
    assert only_failure(damaged) == ("kv-exact", "after70.main.1", "missing in the file")


@pytest.mark.parametrize("gone", ["decode-unmodified", "replay"])
def test_missing_special_file(damaged: Path, gone: str) -> None:
    (damaged / f"{gone}-exact.safetensors").unlink()
    file, _, note = only_failure(damaged)
    assert (file, note) == (f"{gone}-exact", "the file is missing")


def test_array_that_is_not_computed(damaged: Path) -> None:
    change(damaged, "router", lambda a: a.update({"gap.7": torch.zeros(3)}))
    assert only_failure(damaged)[:2] == ("router-exact", "gap.7")


def test_file_that_is_not_computed(damaged: Path) -> None:
    save_file({"x": torch.zeros(1)}, damaged / "engram-exact.safetensors")
    assert only_failure(damaged)[0] == "engram-exact"


def _nan(a: dict[str, Tensor]) -> None:
    a["prompt_logits"][3, 4] = torch.nan


def _longer(a: dict[str, Tensor]) -> None:
    a["prompt_logits"] = torch.cat([a["prompt_logits"], a["prompt_logits"][:1]])


def _half(a: dict[str, Tensor]) -> None:
    a["prompt_logits"] = a["prompt_logits"].half()


def _off(a: dict[str, Tensor]) -> None:
    row = a["prompt_logits"][11]
    row[7] += 4e-5 * row.abs().max()


@pytest.mark.parametrize(
    ("edit", "note"),
    [
        (_nan, "NaN in the recorded array"),
        (_longer, "shape [71, 512] recorded, [70, 512] computed"),
        (_half, "stored as float16, expected float32"),
        (_off, "1 rows, first 11"),
    ],
)
def test_logits_damaged(damaged: Path, edit: Callable, note: str) -> None:
    change(damaged, "logits", edit)
    assert only_failure(damaged) == ("logits-exact", "prompt_logits", note)


def test_just_inside_the_tolerance(damaged: Path) -> None:
    def edit(a: dict[str, Tensor]) -> None:
        row = a["prompt_logits"][11]
        row[int(row.abs().argmin())] += 1.5e-5 * row.abs().max()

    change(damaged, "logits", edit)
    assert check_directory(damaged).passed


def test_infinity_of_the_other_sign_or_elsewhere(damaged: Path) -> None:
    def flip(a: dict[str, Tensor]) -> None:
        a["score.1.pos20"][-1].neg_()

    def move(a: dict[str, Tensor]) -> None:
        a["score.1.pos20"][-1] = 0.0

    change(damaged, "indexer", flip)
    where = ("indexer-exact", "score.1.pos20", "infinities at other places or of other sign")
    assert only_failure(damaged) == where
    change(damaged, "indexer", move)
    assert only_failure(damaged) == where


def test_one_selected_entry_and_one_route(damaged: Path) -> None:
    def entry(a: dict[str, Tensor]) -> None:
        a["topk.2"][50, 3] += 1

    change(damaged, "indexer", entry)
    assert only_failure(damaged) == ("indexer-exact", "topk.2", "first at [50, 3]")


@pytest.mark.parametrize(
    ("key", "value", "note"),
    [
        ("primes", lambda v: v[0][0][0] + 2, "1.0"),
        ("layer_ids", lambda v: [0.5, 2], "stored as float32, expected int64"),
        ("multipliers", lambda v: v[:1], "shape"),
        ("rope_angle_at_position_1_window_only_layers", lambda v: [1.001, *v[1:]], ""),
        ("pad_id", lambda v: "two", "not an array of numbers"),
        ("token_map", lambda v: None, "missing in the file"),
    ],
)
def test_hash_tables_damaged(
    mixed_dir: Path, tmp_path: Path, key: str, value: Callable, note: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(mixed_dir, copy)
    tables = json.loads((copy / "engram-hash.json").read_text())
    new = value(tables[key])
    if key == "primes":
        tables[key][0][0][0] = new
    elif new is None:
        del tables[key]
    else:
        tables[key] = new
    (copy / "engram-hash.json").write_text(json.dumps(tables))
    report = check_directory(copy, modes=["exact"])
    [o] = [o for o in report.outcomes if o.verdict == "fail"]
    assert (o.file, o.array) == ("engram-hash.json", key)
    assert note in f"{o.error} {o.note}"


def test_greedy_tokens_are_checked(damaged: Path) -> None:
    tokens = json.loads((damaged / "tokens.json").read_text())
    tokens["next_after_last"]["exact"] ^= 1
    (damaged / "tokens.json").write_text(json.dumps(tokens))
    assert only_failure(damaged)[:2] == ("tokens", "greedy_tokens.exact")


def test_nothing_compared_fails(damaged: Path) -> None:
    """Files that hold no array, and a directory of no mode."""
    report = check_directory(damaged, modes=[])
    report.outcomes.clear()
    assert report.compared == 0 and not report.passed
    for file in damaged.glob("*-exact.safetensors"):
        save_file({}, file)
    assert main(str(damaged)) == 1


def _truncate(file: Path, keep: float) -> None:
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])


def _shard(directory: Path) -> Path:
    return sorted((directory / "checkpoint").glob("*.safetensors"))[0]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda d: (d / "tokens.json").unlink(), "tokens.json"),
        (lambda d: (d / "tokens.json").write_text("{"), "tokens.json is not valid JSON"),
        (lambda d: (d / "tokens.json").write_text("[]"), "expected an object"),
        (lambda d: (d / "tokens.json").write_bytes(b"\xff\xfe{"), "tokens.json is not valid JSON"),
        (lambda d: (d / "engram-hash.json").write_text("nope"), "engram-hash.json is not valid"),
        (lambda d: shutil.rmtree(d / "checkpoint"), "checkpoint"),
        (lambda d: (d / "checkpoint" / "config.json").write_text("{}"), "model_type"),
        (lambda d: _truncate(_shard(d), 0.9), "safetensors"),
        (lambda d: _truncate(d / "logits-exact.safetensors", 0.7), "logits-exact.safetensors"),
        (lambda d: _truncate(d / "kv-exact.safetensors", 0.0), "kv-exact.safetensors"),
        (lambda d: save_file({}, d / "logits.safetensors"), "logits.safetensors"),
        (lambda d: save_file({}, d / "logits-qsim.safetensors"), "greedy_tokens"),
    ],
)
def test_damaged_directory(
    damaged: Path, damage: Callable, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(damaged)
    assert main(str(damaged)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        ({"prompt": [1, 2, 999]}, "prompt holds 999"),
        ({"prompt": []}, "prompt must be a list"),
        ({"prompt": [True]}, "prompt holds True"),
        ({"short9": [[1, 2], [3]]}, "short9 must hold one or more prompts of one length"),
        ({"short9": []}, "short9 must be a list that is not empty"),
        ({"short10": [[1]]}, "exactly one key like short16"),
        ({"prompt31": [9, 9]}, "prompt31 is not the beginning of prompt"),
        ({"greedy_tokens": {}}, "greedy_tokens must be a dict"),
        ({"greedy_tokens": {"fast": [1]}}, "'fast'"),
        ({"greedy_tokens": {"exact": [5] * 250}}, "max_position_embeddings"),
    ],
)
def test_texts_refused(
    damaged: Path, edit: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = json.loads((damaged / "tokens.json").read_text()) | edit
    (damaged / "tokens.json").write_text(json.dumps(tokens))
    assert main(str(damaged), as_json=True) == 2
    out = capsys.readouterr()
    assert says in out.err and says in json.loads(out.out)["error"]


def test_no_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(str(tmp_path / "none")) == 2
    assert "is not a directory" in capsys.readouterr().err


def test_mode_that_is_not_there(bare_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(str(bare_dir), modes=["quant"]) == 2
    assert "has no data of mode 'quant'" in capsys.readouterr().err
