"""Every family against recorded logits, from configurations of both styles."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from deepdraft.checkpoint.families import parse_model_args
from deepdraft.proof.golden import check_directory, main
from tests.families.conftest import DATA, SETS, VARIANTS, config_of, golden_copy, text_of


@pytest.mark.parametrize("name", SETS + VARIANTS)
def test_recorded_logits(name: str, tmp_path: Path) -> None:
    report = check_directory(golden_copy(name, tmp_path))
    assert report.passed, [o for o in report.outcomes if o.verdict != "pass"]
    found = {(o.file, o.array): o for o in report.outcomes}
    assert set(found) == {
        ("logits", "prompt_logits"),
        ("logits", "decode_logits"),
        ("logits", "oneshot_logits"),
        ("tokens", "greedy_tokens"),
        ("cutting", "prefill of the text, bits"),
        ("cutting", "chunks of the text, bits"),
    }
    for array in ("prompt", "decode", "oneshot"):
        outcome = found["logits", f"{array}_logits"]
        assert outcome.tolerance == 2e-5
        assert outcome.error is not None and 0 < outcome.error <= 1e-5


@pytest.mark.parametrize("name", SETS)
def test_the_other_style_of_configuration(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = golden_copy(name, tmp_path)
    at = directory / "checkpoint"
    shutil.copy(at / "config-transformers5.json", at / "config.json")
    assert main(str(directory), as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["passed"]


@pytest.mark.parametrize("name", SETS + VARIANTS)
def test_both_styles_mean_the_same(name: str) -> None:
    published, five = (
        parse_model_args(config_of(name, file))
        for file in ("config.json", "config-transformers5.json")
    )
    assert published == five


def damaged(tmp_path: Path, **arrays: object) -> Path:
    directory = golden_copy("llama-gqa-yarn", tmp_path)
    logits = load_file(directory / "logits.safetensors")
    for name, change in arrays.items():
        if change is None:
            del logits[name]
        else:
            logits[name] = change(logits)  # type: ignore[operator]
    save_file(logits, directory / "logits.safetensors")
    return directory


@pytest.mark.parametrize(
    ("changes", "array", "note"),
    [
        ({"decode_logits": None}, "decode_logits", "missing in the file"),
        ({"more": lambda a: a["prompt_logits"] + 0}, "more", "not an array of this format"),
        (
            {"prompt_logits": lambda a: a["prompt_logits"][:-1].clone()},
            "prompt_logits",
            "shape [39, 96] recorded, [40, 96] computed",
        ),
        ({"prompt_logits": lambda a: a["prompt_logits"] * 1.0001}, "prompt_logits", "40 rows"),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, changes: dict[str, object], array: str, note: str
) -> None:
    report = check_directory(damaged(tmp_path, **changes))
    failed = [o for o in report.outcomes if o.verdict == "fail"]
    assert [o.array for o in failed] == [array] and failed[0].note.startswith(note)
    assert not report.passed


def test_another_continuation_fails(tmp_path: Path) -> None:
    directory = golden_copy("llama-gqa-yarn", tmp_path)
    tokens = json.loads((directory / "tokens.json").read_text())
    tokens["greedy_tokens"][3] ^= 1
    (directory / "tokens.json").write_text(json.dumps(tokens))
    failed = {o.array for o in check_directory(directory).outcomes if o.verdict == "fail"}
    assert "greedy_tokens" in failed and "prompt_logits" not in failed


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ({"prompt": [1, 96]}, "prompt holds 96; token ids lie in 0..95"),
        ({"prompt": [3] * 120}, "132 tokens of text, but the model's positions end at 128"),
        ({"greedy_tokens": []}, "greedy_tokens must be a list"),
    ],
)
def test_damaged_tokens(
    tmp_path: Path, tokens: dict, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = golden_copy("llama-gqa-yarn", tmp_path)
    values = json.loads((directory / "tokens.json").read_text()) | tokens
    (directory / "tokens.json").write_text(json.dumps(values))
    assert main(str(directory)) == 2
    assert says in capsys.readouterr().err


def test_a_mode_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(str(DATA / "llama-a"), modes=["qsim"]) == 2
    assert "no data of mode 'qsim'" in capsys.readouterr().err


def test_logits_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = golden_copy("llama-gqa-yarn", tmp_path)
    (directory / "logits.safetensors").unlink()
    assert main(str(directory)) == 2
    assert "has no logits.safetensors" in capsys.readouterr().err


def test_texts_reach_where_it_matters() -> None:
    """The sets prune selections, wrap windows, and pass the original context."""
    for name in SETS:  # of the variants, prompts and sizes are in reference.py
        config, text = config_of(name), text_of(name)
        scaling = config["rope_scaling"]
        assert len(text) > scaling.get("original_max_position_embeddings", 0)
        for key in ("index_topk", "sliding_window"):
            assert len(text) > 4 * config.get(key, 0)
    assert len(text_of("deepseek-v4-a")) > 2 * 128
