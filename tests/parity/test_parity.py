"""Parity: measures, bisection, references, the report; and that a right engine passes."""

import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.checkpoint.section import read_config
from deepdraft.cli.main import main
from deepdraft.errors import CheckpointError, ConfigError
from deepdraft.proof.native import decided_text, probe_length, probe_text, reach
from deepdraft.proof.parity.bisect import first_wrong, layer_errors
from deepdraft.proof.parity.compare import compare_greedy, measure
from deepdraft.proof.parity.diagnose import diagnose
from deepdraft.proof.parity.run import examine
from deepdraft.proof.parity.sources import from_golden, from_native, from_transformers
from deepdraft.proof.parity.target import Target, run
from deepdraft.proof.parity.wire import from_wire
from deepdraft.proof.tiny_families import KINDS
from deepdraft.proof.tiny_write import write_tiny
from deepdraft.text.tokenizer import Tokenizer
from tests.families.conftest import DATA, golden_copy


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("parity") / "llama", "llama")


def test_equal_logits() -> None:
    x = torch.randn(12, 30, generator=torch.Generator().manual_seed(0))
    found = measure(x.clone(), x)
    assert (found.dl, found.mean_kl, found.top1, found.first_bad) == (0.0, 0.0, 1.0, None)
    assert found.passed("float32") and found.passed("bfloat16")


def test_one_wrong_position_is_found() -> None:
    x = torch.randn(12, 30, generator=torch.Generator().manual_seed(0))
    y = x.clone()
    y[9, 4] += 1e-2
    found = measure(y, x)
    assert found.first_bad == 9 and not found.passed("float32") and found.passed("bfloat16")
    assert found.dl == pytest.approx(1e-2 / float(x.std()), rel=1e-3)
    assert found.dl_short == 0.0
    y[3] = torch.nan
    worse = measure(y, x)
    assert worse.not_finite == 1 and worse.first_bad == 3 and not worse.passed("bfloat16")


def test_values_that_are_not_told_do_not_count() -> None:
    x = torch.randn(6, 30, generator=torch.Generator().manual_seed(0))
    theirs = x.clone()
    theirs[:, 5:] = torch.nan
    ours = x.clone()
    ours[:, 7] += 100
    assert measure(ours, theirs).dl == 0.0
    ours[2, 3] += 1
    assert measure(ours, theirs).first_bad == 2


def test_a_greedy_difference_counts_where_the_reference_is_sure() -> None:
    logits = torch.zeros(3, 10)
    logits[0, 1], logits[1, 2], logits[2, 3] = 9.0, 9.0, 9.0
    assert compare_greedy([1, 2, 3], [1, 2, 3], logits).passed(0.0)
    sure = compare_greedy([1, 4, 3], [1, 2, 3], logits)
    assert sure.first_difference == 1 and not sure.passed(0.1)
    logits[1, 4] = 9.0
    assert compare_greedy([1, 4, 3], [1, 2, 3], logits).passed(0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_reach_what_only_long_texts_show(kind: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_tiny(tmp_path / "a", kind))
    count = probe_length(checkpoint.args)
    assert count >= 96 and all(length <= count for length in reach(checkpoint.args).values())
    ids = probe_text(checkpoint.args, count)
    assert len(ids) == count and len(set(ids)) > count // 4
    decided = decided_text(checkpoint, 64)
    assert 2 <= len(decided) <= 64


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "v41"])
def test_storage_and_style_change_nothing(kind: str, tmp_path: Path) -> None:
    """bfloat16 weights in three shards against the same weights in one file."""
    a = write_tiny(tmp_path / "a", kind, storage="bfloat16")
    b = write_tiny(tmp_path / "b", kind, storage="bfloat16", style="transformers5", shards=3)
    result = examine(b, "native", str(a), tokens=96, greedy=4)
    assert result.passed and result.measures is not None and result.measures.dl == 0.0
    assert result.greedy is not None and result.greedy.first_difference is None
    assert len(result.layers) == Checkpoint.open(a).args.num_hidden_layers


@pytest.mark.parametrize("kind", ["llama", "v32", "v4", "v41"])
def test_half_precision_of_clean_checkpoints(kind: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / kind, kind)
    result = examine(path, "native", str(path), tokens=96, greedy=2, dtype="bfloat16")
    assert result.passed, result.findings
    figures = result.dtypes["bfloat16"]
    assert figures["passed"] and 1e-6 < figures["mean_kl"] < 0.3
    assert figures["engine"] == f"deepdraft native ({'quant' if kind == 'v41' else 'bf16'})"


def test_an_overflow_of_ours_in_float16_is_the_finding(tmp_path: Path) -> None:
    """up times 2**18, down over 2**18: the same function, but not in float16."""
    path = write_tiny(tmp_path / "a", "llama")
    weights = load_file(path / "model.safetensors")
    for name in weights:
        if name.endswith("mlp.up_proj.weight"):
            weights[name] *= 2.0**18
            weights[name.replace("up_proj", "down_proj")] /= 2.0**18
    save_file(weights, path / "model.safetensors")
    fine = examine(path, "native", str(path), tokens=48, greedy=0, dtype="bfloat16")
    assert fine.passed and fine.dtypes["bfloat16"]["positions_not_finite"] == 0
    loud = examine(path, "native", str(path), tokens=48, greedy=0, dtype="float16")
    assert [(f.cause, f.what) for f in loud.findings] == [
        ("float16", "the model overflows in float16")
    ]
    assert "deepdraft native (fp16)" in loud.findings[0].evidence


@pytest.mark.parametrize("name", ["llama-gqa-yarn", "v3-plain-halves"])
def test_golden_data(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = golden_copy(name, tmp_path)
    command = ["parity", str(directory / "checkpoint"), str(directory), "--reference", "golden"]
    assert main(command) == 0
    assert "passed" in capsys.readouterr().out


def test_golden_logits_alone_name_a_wrong_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clean = DATA / "llama-gqa-yarn"
    wrong = golden_copy("llama-gqa-yarn", tmp_path, config={"rope_scaling": {"factor": 2.0}})
    page = tmp_path / "page.html"
    command = ["parity", str(wrong / "checkpoint"), str(clean), "--reference", "golden"]
    assert main([*command, "--json", "--html", str(page)]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["findings"][0]["cause"] == "rope_scaling.factor"
    assert "single repairs tried" in report["findings"][0]["evidence"]
    assert report["logits"]["first_bad_position"] is not None
    text = page.read_text()
    assert "rope_scaling.factor" in text and text.count("<svg") == 2 and "<script" not in text


def test_bisection_names_layer_and_part(llama: Path) -> None:
    checkpoint = Checkpoint.open(llama)
    target = Target.of(checkpoint, read_config(llama / "config.json"))
    ids = probe_text(checkpoint.args, 40)
    clean = from_native(llama, ids, greedy=0)
    for name, layer, part in (
        ("model.layers.1.self_attn.v_proj.weight", 1, "attention"),
        ("model.layers.2.mlp.down_proj.weight", 2, "MLP"),
        ("model.embed_tokens.weight", 0, "input"),
        ("lm_head.weight", -1, "head"),
    ):
        wrong = run(target.with_tensors({name: checkpoint.tensor(name) * 1.5}), ids, layers=True)
        place = first_wrong(layer_errors(wrong, clean), True)
        assert place is not None and (place.layer, place.part) == (layer, part)
    same = run(target, ids, layers=True)
    assert first_wrong(layer_errors(same, clean), False) is None


def test_a_factor_that_only_the_reference_has_is_the_cause(tmp_path: Path) -> None:
    """As transformers runs a V4 whose configuration does not write YaRN's factor."""
    path = write_tiny(tmp_path / "v4", "v4")
    checkpoint = Checkpoint.open(path)
    target = Target.of(checkpoint, read_config(path / "config.json"))
    scaled = target.spec.replaced("rope_scaling.attention_factor", 1.25)
    ids = probe_text(checkpoint.args, 40)
    theirs = run(target.with_spec(scaled), ids, layers=True)
    theirs.spec, theirs.factors = target.spec, {"compress_attention_scaling": 1.25}
    finding = diagnose(target, theirs, run(target, ids, layers=True), None)[0]
    assert finding.cause == "rope_scaling.attention_factor"
    assert "repairing it alone" in finding.evidence


def test_steps_of_a_long_text_are_one_trace(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepdraft.proof.parity import target as module

    checkpoint = Checkpoint.open(llama)
    target = Target.of(checkpoint, read_config(llama / "config.json"))
    ids = probe_text(checkpoint.args, 33)
    whole = run(target, ids, greedy=3, layers=True)
    monkeypatch.setattr(module, "_SLACK", 16)  # the last step has one row and its copy
    cut = run(target, ids, greedy=3, layers=True)
    assert torch.equal(whole.logits, cut.logits) and whole.greedy == cut.greedy
    for layer, note in whole.layers.items():
        assert note["attn_out"].shape[0] == 33
        assert all(torch.equal(note[key], cut.layers[layer][key]) for key in note)


def test_a_checkpoint_that_does_not_load_is_explained(llama: Path, tmp_path: Path) -> None:
    wrong = write_tiny(tmp_path / "wrong", "llama")
    values = json.loads((wrong / "config.json").read_text()) | {"num_key_value_heads": 4}
    (wrong / "config.json").write_text(json.dumps(values))
    result = examine(wrong, "native", str(llama))
    assert [f.cause for f in result.findings] == ["num_key_value_heads"] and not result.passed


def test_what_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reference 'other' is not known"):
        examine(llama, "other")
    with pytest.raises(ConfigError, match="needs the golden directory"):
        examine(llama, "golden")
    with pytest.raises(ConfigError, match="dtype bfloat16 needs whole logits"):
        examine(llama, "openai", "http://127.0.0.1:1", dtype="bfloat16")
    with pytest.raises(CheckpointError, match="is not a directory"):
        examine(tmp_path / "no", "native", str(llama))
    with pytest.raises(CheckpointError, match=r"has no tokens\.json"):
        from_golden(tmp_path, Checkpoint.open(llama).args)
    with pytest.raises(ConfigError, match="cannot start"):
        from_transformers(llama, [3, 4], greedy=0, python=str(tmp_path / "python"))
    v41 = write_tiny(tmp_path / "v41", "v41")
    with pytest.raises(ConfigError, match=r"transformers has no DeepSeek-V4\.1"):
        from_transformers(v41, [3, 4], greedy=0)


def test_an_interpreter_without_transformers(llama: Path, tmp_path: Path) -> None:
    """-S leaves out site-packages: nothing that the child needs is there."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')
    python.chmod(0o755)
    with pytest.raises(ConfigError, match="cannot import what the reference needs"):
        from_transformers(llama, [3, 4], greedy=0, python=str(python))


@pytest.mark.parametrize(
    ("does", "error", "says"),
    [
        ("exit 0", ConfigError, "without the reference's arrays"),
        ("kill -9 $$", CheckpointError, "it said nothing"),
        ("printf '\\377bad' >&2; exit 3", CheckpointError, "status 3.*bad"),
        ('echo "{}" > "$(dirname "$4")/trace.json"', ConfigError, "without the reference's arrays"),
    ],
)
def test_an_interpreter_that_is_none(
    llama: Path, tmp_path: Path, does: str, error: type[Exception], says: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{does}\n")
    python.chmod(0o755)
    with pytest.raises(error, match=says):
        from_transformers(llama, [3, 4], greedy=0, python=str(python))


@pytest.mark.parametrize("fault", ["nan", "no rows", "another vocabulary"])
def test_golden_logits_that_are_none(llama: Path, tmp_path: Path, fault: str) -> None:
    args = Checkpoint.open(llama).args
    logits = {"prompt_logits": torch.zeros(2, 512), "decode_logits": torch.zeros(1, 512)}
    made = {"nan": torch.full((1, 512), torch.nan), "no rows": torch.zeros(())}
    save_file(
        logits | {"decode_logits": made.get(fault, torch.zeros(1, 511))},
        tmp_path / "logits.safetensors",
    )
    (tmp_path / "tokens.json").write_text('{"prompt": [3, 4], "greedy_tokens": [5]}')
    with pytest.raises(CheckpointError, match=r"decode_logits .* must be finite rows of 512"):
        from_golden(tmp_path, args)


class _Server(BaseHTTPRequestHandler):
    """A completion endpoint that answers from a model of ours."""

    answer: Any = None
    models: Any = {"data": [{"id": "tiny"}]}  # noqa: RUF012

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["logprobs"] == 20 and body["temperature"] == 0
        self._send({"choices": [{"logprobs": type(self).answer}]})

    def do_GET(self) -> None:
        self._send(type(self).models)

    def _send(self, values: Any) -> None:
        raw = json.dumps(values).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Server)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


def told(path: Path, ids: list[int], count: int) -> dict[str, Any]:
    """What a server says of a greedy continuation."""
    tokenizer = Tokenizer.load(path)
    checkpoint = Checkpoint.open(path)
    trace = run(Target.of(checkpoint, read_config(path / "config.json")), ids, greedy=count)
    assert trace.greedy_logits is not None
    best = trace.greedy_logits.log_softmax(-1).topk(20, -1)
    return {
        "tokens": [tokenizer.decode([t]) for t in trace.greedy],
        "top_logprobs": [
            {tokenizer.decode([t]): v for t, v in zip(i, w, strict=True)}
            for i, w in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ],
    }


def test_a_server(llama: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = decided_text(Checkpoint.open(llama), 40)
    _Server.answer = told(llama, ids, 32)
    result = examine(llama, "openai", url, tokens=40)
    assert result.passed and result.measures is not None and result.measures.dl < 1e-5
    assert result.tokens > 40 and "tiny at 127.0.0.1" in result.reference
    wrong = write_tiny(tmp_path / "wrong", "llama")
    values = json.loads((wrong / "config.json").read_text()) | {"rope_theta": 10000}
    (wrong / "config.json").write_text(json.dumps(values))
    found = examine(wrong, "openai", url, tokens=40)
    assert [f.cause for f in found.findings] == ["rope_theta"]
    for answer in (
        None,
        {"tokens": None, "top_logprobs": None},
        {"tokens": ["a"], "top_logprobs": None},
        {"tokens": ["a"], "top_logprobs": [[1]]},
        {"tokens": ["a"], "top_logprobs": [{"a": "x"}]},
    ):
        _Server.answer = answer
        with pytest.raises(ConfigError, match="gave no log-probabilities"):
            from_wire(url, llama, ids, greedy=4)
    for models in ({}, [], {"data": []}, 3):
        monkeypatch.setattr(_Server, "models", models)
        with pytest.raises(ConfigError, match="lists no model"):
            from_wire(url, llama, ids, greedy=4)
    for bad in ("http://h:abc/v1", "http://[::1/v1", "http://"):
        with pytest.raises(ConfigError, match="is not an http or https URL"):
            from_wire(bad, llama, ids, greedy=4)
    with pytest.raises(ConfigError, match="is not an http or https URL"):
        examine(llama, "openai", "file:///etc/passwd", tokens=40)
