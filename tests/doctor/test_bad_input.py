"""Checkpoints made to harm: refused with the reason, without much time or memory.

Nothing here may hang, and the memory that a check takes is traced.
"""

import json
import os
import shutil
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepdraft.checkpoint.families import parse_model_args
from deepdraft.checkpoint.names import Entry
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.checkpoint.relayout import relayout
from deepdraft.checkpoint.section import read_config
from deepdraft.cli.main import main
from deepdraft.errors import CheckpointError, ConfigError, DeepdraftError
from deepdraft.proof.doctor.finding import Finding
from deepdraft.proof.doctor.run import examine
from deepdraft.proof.doctor.values import value_checks
from deepdraft.proof.tiny_families import tiny_config
from deepdraft.proof.tiny_write import write_tiny
from tests.doctor.sparse import write_shard, write_sparse

INDEX = "model.safetensors.index.json"
_MOST_BYTES = 256 << 20


@contextmanager
def bounded_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < _MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="session")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("templates")
    write_tiny(root / "v3", "v3")
    write_tiny(root / "sharded", "v3", shards=2)
    write_tiny(root / "v41", "v41")
    return root


@pytest.fixture
def model(templates: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(templates / "v3", tmp_path / "model"))


def refused(path: Path) -> Finding:
    """The first error of doctor; the loader must refuse the checkpoint as well."""
    with bounded_memory():
        with pytest.raises(DeepdraftError):
            Checkpoint.open(path)
        report = examine(path, static_only=True)
    assert report.exit_code == 1
    return report.errors[0]


def change(path: Path, **keys: Any) -> None:
    values = json.loads((path / "config.json").read_text())
    for key, value in keys.items():
        place = values
        *parents, last = key.split("__")
        for part in parents:
            place = place[part]
        place[last] = value
    (path / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("keys", "cause", "says"),
    [
        ({"hidden_size": -128}, "hidden_size", "must be in 1.."),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers", "must be in 1..1024"),
        ({"num_hidden_layers": 10**400}, "num_hidden_layers", "must be in 1..1024"),
        ({"n_routed_experts": 65536}, "num_hidden_layers", "expert tensors; supported: at most"),
        ({"vocab_size": 2.5}, "vocab_size", "must be an integer"),
        ({"vocab_size": True}, "vocab_size", "must be an integer"),
        ({"rope_theta": -1}, "rope_theta", "must be finite and above 1"),
        ({"rope_theta": 1e39}, "rope_theta", "must be finite and above 1"),
        ({"rope_theta": 10**400}, "rope_theta", "must be finite and above 1"),
        ({"rope_scaling": [1]}, "rope_scaling", "must be a JSON object"),
        ({"rope_scaling__factor": 1e308 * 10}, "config.json", "Infinity"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps", "must be a number"),
        ({"model_type": "gpt"}, "model_type", "is not supported"),
        ({"model_type": ["deepseek_v3"]}, "model_type", "is not supported"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor", "must be finite and above 0"),
        ({"surprise": 1}, "surprise", "not known and might change the model"),
    ],
)
def test_configurations(model: Path, keys: dict[str, Any], cause: str, says: str) -> None:
    change(model, **keys)
    finding = refused(model)
    assert finding.cause == cause and says in finding.what


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"text_config__n_routed_experts": 65536}, "expert tensors; supported: at most"),
        ({"text_config__engram_n_heads": 1 << 24}, "hashes; supported: at most"),
        ({"text_config__num_hidden_layers": 1 << 20}, "must be in 1..1024"),
        (
            {"vision_config": None, "text_config__compress_ratios": [0] * 5000},
            "a list of at most 4096",
        ),
    ],
)
def test_configurations_of_v41(
    templates: Path, tmp_path: Path, keys: dict[str, Any], says: str
) -> None:
    path = Path(shutil.copytree(templates / "v41", tmp_path / "model"))
    change(path, **keys)
    assert says in refused(path).what


@pytest.mark.parametrize(
    ("section", "key", "value", "says"),
    [
        ("vision_config", "num_hidden_layers", 1 << 23, "must be at most 1024"),
        ("text_config", "dspark_n_routed_experts", 65536, "expert tensors; supported: at most"),
    ],
)
def test_published_v41_with_towers(section: str, key: str, value: int, says: str) -> None:
    path = Path(__file__).parents[1] / "checkpoint" / "data" / "v41-config.json"
    config = json.loads(path.read_text())
    config[section][key] = value
    with pytest.raises(DeepdraftError, match=says):
        parse_model_args(config)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"[" * 200_000, "not valid JSON"),
        (b'{"a":' * 200_000, "not valid JSON"),
        (b"\xff\xfe{}", "is not UTF-8"),
        (b"", "not valid JSON"),
        (b"[1, 2]", "must hold a JSON object"),
        (b'{"vocab_size": 1, "vocab_size": 2}', "sets vocab_size twice"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b" " * (2 << 20), "is larger than"),
    ],
    ids=["lists", "objects", "bytes", "empty", "list", "twice", "digits", "large"],
)
def test_texts_that_are_no_configuration(model: Path, raw: bytes, says: str) -> None:
    (model / "config.json").write_bytes(raw)
    finding = refused(model)
    assert finding.cause == "config.json" and says in finding.what


def header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrites the header of a shard, its data staying behind it."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    values = json.loads(raw[8 : 8 + length])
    change(values)
    new = json.dumps(values).encode()
    path.write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + length :])


EMBED = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda h: h[EMBED]["data_offsets"].__setitem__(slice(None), [0, 262144]), "overlaps"),
        (
            lambda h: h[EMBED]["data_offsets"].__setitem__(
                slice(None), [1 << 40, (1 << 40) + 262144]
            ),
            "ends at byte",
        ),
        (lambda h: h[EMBED]["data_offsets"].__setitem__(0, -8), "is malformed"),
        (lambda h: h[EMBED].update(shape=[1 << 60, 4]), "is malformed"),
        (lambda h: h[EMBED].update(shape=[1] * 5000), "is malformed"),
        (lambda h: h[EMBED].update(shape=[-512, -128]), "is malformed"),
        (lambda h: h[EMBED].update(dtype="F7"), "unknown dtype"),
        (lambda h: h[EMBED].update(shape=[511, 128]), "its offsets"),
        (lambda h: h.update({EMBED: None}), "is malformed"),
    ],
)
def test_headers(model: Path, damage: Callable[[dict[str, Any]], object], says: str) -> None:
    header(model / "model.safetensors", damage)
    finding = refused(model)
    assert finding.cause == "model.safetensors" and says in finding.what


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (struct.pack("<Q", 1 << 62) + b"{}", "claims"),
        (struct.pack("<Q", 8) + b'{"\xff\xfe":1}', "is not JSON"),
        (struct.pack("<Q", 6) + b"\xff" * 6, "is not JSON"),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "is not JSON"),
        (b"\x80\x04pickle", "safetensors"),
        (b"", "truncated"),
    ],
    ids=["length", "name", "bytes", "depth", "pickle", "empty"],
)
def test_files_that_are_no_safetensors(model: Path, raw: bytes, says: str) -> None:
    (model / "model.safetensors").write_bytes(raw)
    finding = refused(model)
    assert finding.cause == "model.safetensors" and says in finding.what


@pytest.fixture
def sharded(templates: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(templates / "sharded", tmp_path / "model"))


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "sub/model.safetensors",
        INDEX,
        "",
        ".",
        "..",
        "model\x00.safetensors",
        "a" * 5000,
    ],
)
def test_an_index_that_leads_elsewhere(sharded: Path, name: str) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"][EMBED] = name
    (sharded / INDEX).write_text(json.dumps(index))
    finding = refused(sharded)
    assert "no shard of" in finding.what or "lacks" in finding.what


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{}", "has no weight_map"),
        ('{"weight_map": {"a": {"b": "c"}}}', "must map tensor names to file names"),
        ('{"weight_map": ["a"]}', "has no weight_map"),
        ('{"weight_map": ' + "[" * 100_000, "is not JSON"),
    ],
)
def test_an_index_that_is_none(sharded: Path, content: str, says: str) -> None:
    (sharded / INDEX).write_text(content)
    assert says in refused(sharded).what


def test_an_index_with_very_many_shards(sharded: Path) -> None:
    names = {f"t{i}": f"model-{i}.safetensors" for i in range(5000)}
    (sharded / INDEX).write_text(json.dumps({"weight_map": names}))
    assert "names more than 4096 shards" in refused(sharded).what


def test_an_index_of_another_download(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    first, second = sorted(set(index["weight_map"].values()))
    swapped = {first: second, second: first}
    index["weight_map"] = {n: swapped[f] for n, f in index["weight_map"].items()}
    (sharded / INDEX).write_text(json.dumps(index))
    finding = refused(sharded)
    assert finding.cause == INDEX and "other shards than hold them" in finding.what


LINKED = ("model.safetensors", "config.json", "tokenizer.json")


@pytest.mark.parametrize("file", LINKED)
def test_links_out_of_the_directory(model: Path, tmp_path: Path, file: str) -> None:
    outside = tmp_path / "outside"
    (model / file).rename(outside)
    (model / file).symlink_to(outside)
    report = examine(model)
    assert "is a link out of the checkpoint's directory" in report.errors[0].what
    if file != "tokenizer.json":
        with pytest.raises(DeepdraftError, match="link out of"):
            Checkpoint.open(model)


@pytest.mark.parametrize("file", LINKED)
def test_links_in_a_circle(model: Path, file: str) -> None:
    (model / file).unlink()
    (model / file).symlink_to(model / "other")
    (model / "other").symlink_to(model / file)
    assert examine(model).exit_code == 1


def test_links_inside_and_the_hubs_cache_are_fine(tmp_path: Path) -> None:
    snapshot = write_tiny(tmp_path / "models--a--b" / "snapshots" / "0123", "llama")
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / f"{number:064x}")
        file.symlink_to(Path("../../blobs") / f"{number:064x}")
    assert not examine(snapshot, static_only=True).findings
    plain = write_tiny(tmp_path / "plain", "llama")
    (plain / "model.safetensors").rename(plain / "weights.bin")
    (plain / "model.safetensors").symlink_to("weights.bin")
    assert not examine(plain, static_only=True).findings
    elsewhere = tmp_path / "elsewhere"
    elsewhere.symlink_to(plain)
    assert not examine(elsewhere, static_only=True).findings


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_pipe_is_not_waited_for(model: Path, file: str) -> None:
    (model / file).unlink()
    os.mkfifo(model / file)
    assert examine(model, static_only=True).exit_code == 1


def test_a_hundred_thousand_foreign_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model"
    write_sparse(path, tiny_config("v3"), 1, index=False)
    names = [f"x.{i}.weight" for i in range(100_000)]
    write_shard(
        path / "model-00001-of-00001.safetensors",
        [Entry(name, (2,), "f32", "", "text") for name in names],
    )
    report = examine(path, static_only=True)
    causes = {f.cause: f for f in report.errors}
    assert "100000 tensors have no place" in causes["x.*.weight"].what


def test_names_that_are_not_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "model"
    write_sparse(path, tiny_config("v3"), 1, index=False)
    odd = ["\ud800", "a\u0000b", "\u202eevil", "x" * 100_000, "\x1b[31m"]
    write_shard(
        path / "model-00001-of-00001.safetensors",
        [Entry(name, (2,), "f32", "", "text") for name in odd],
    )
    report = examine(path, static_only=True)
    assert report.exit_code == 1
    text = json.dumps(report.as_json())
    assert len(text) < 400_000 and "\x1b" not in text


def test_old_files_are_refused_with_the_way_out(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    finding = refused(model)
    assert "pickles" in finding.what and "weights_only=True" in finding.what


TOKENIZERS = {
    "missing": None,
    "empty": b"",
    "deep": b"[" * 200_000,
    "no vocabulary": b'{"model": {}}',
    "a list": b"[]",
    "other ids": b'{"model": {"vocab": {"a": -1}}}',
    "ids of text": b'{"model": {"vocab": {"a": "b"}}}',
    "added tokens": b'{"model": {"vocab": {"a": 1}}, "added_tokens": [1]}',
}


@pytest.mark.parametrize("content", TOKENIZERS.values(), ids=TOKENIZERS)
def test_tokenizers(model: Path, content: bytes | None) -> None:
    (model / "tokenizer.json").unlink()
    if content is not None:
        (model / "tokenizer.json").write_bytes(content)
    report = examine(model, static_only=True)
    assert [f.cause for f in report.findings] == ["tokenizer.json"] and report.exit_code == 1


def test_there_is_no_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "nothing")]) == 2
    assert "is not a directory" in capsys.readouterr().err
    file = tmp_path / "file"
    file.write_text("")
    assert main(["doctor", str(file)]) == 2
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["doctor", str(empty)]) == 1
    assert "there is no config.json" in capsys.readouterr().out


def test_a_name_that_is_no_text_is_shown(model: Path) -> None:
    """JSON can say lone surrogates, which no terminal can: escaped, never an exception."""
    change(model, **{"bad\ud800key": 1})
    done = subprocess.run(
        [sys.executable, "-m", "deepdraft.cli.main", "doctor", "--static", str(model)],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
    )
    assert done.returncode == 1 and b"bad\\ud800key" in done.stdout and not done.stderr


def test_a_configuration_that_is_a_pipe(model: Path) -> None:
    """Reading one would wait for ever."""
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    with pytest.raises(ConfigError, match="is not a plain file"):
        read_config(model / "config.json")


@pytest.mark.parametrize(
    ("rope", "says"),
    [
        ({"rope_theta": 1.0}, "rope_theta must be finite and above 1"),
        ({"beta_slow": 1e-320}, "beta_slow = .* must be at least"),
        ({"attention_factor": 0}, "attention_factor must be finite and above 0"),
        ({"mscale": 3e38, "mscale_all_dim": 3e38}, "supported: at most"),
    ],
)
def test_rotation_beyond_floating_point(rope: dict[str, float], says: str) -> None:
    config = tiny_config("v2")
    config["rope_theta"] = rope.pop("rope_theta", 10000.0)
    yarn = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
    with pytest.raises(ConfigError, match=says):
        parse_model_args(config | {"rope_scaling": yarn | rope})


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ('{"eos_token_id": [1, 999999]}', "what is no token"),
        ('{"eos_token_id": true}', "what is no token"),
        ("{", "no JSON object"),
    ],
)
def test_generation_settings_that_serving_refuses(model: Path, told: str, says: str) -> None:
    (model / "generation_config.json").write_text(told)
    (found,) = examine(model, static_only=True).errors
    assert found.cause == "generation_config.json" and says in found.what


def test_any_of_several_end_tokens_may_be_the_tokenizers(model: Path) -> None:
    ends = json.loads((model / "config.json").read_text())["eos_token_id"]
    change(model, eos_token_id=[5, ends])
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert not examine(model, static_only=True).findings


def test_a_shard_whose_name_is_too_long_for_a_file(model: Path) -> None:
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": "a" * 300 + ".safetensors"}}))
    assert "which is no shard" in refused(model).what


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_convert_copies_no_file_from_elsewhere(model: Path, tmp_path: Path, name: str) -> None:
    (model / name).rename(tmp_path / name)
    (model / name).symlink_to(tmp_path / name)
    with pytest.raises(CheckpointError, match="is a link out of"):
        relayout(model, tmp_path / "out", layout="published")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["v3", "v4"])
def test_a_drafter_that_is_no_number(tmp_path: Path, kind: str) -> None:
    """Its tensors are read to draft, so doctor reads them, too; as they are they are silent."""
    path = write_tiny(tmp_path / kind, kind, mtp="next" if kind == "v4" else True)
    assert not value_checks(Checkpoint.open(path))
    tensors = load_file(path / "model.safetensors")
    (name,) = [n for n in tensors if n.endswith("enorm.weight")]
    save_file(tensors | {name: tensors[name] * torch.nan}, path / "model.safetensors")
    (found,) = value_checks(Checkpoint.open(path))
    assert found.cause == name and "NaN" in found.what
