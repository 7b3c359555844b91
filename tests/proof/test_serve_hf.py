"""transformers as a target of `bench serve`: its server and its process.

transformers itself is replaced by a module that has what the server calls; `bench serve --target
hf:CHECKPOINT` with the real one is docs/bench-serve.md's.
"""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from deepdraft.cli.main import cli
from deepdraft.errors import ConfigError
from deepdraft.proof.bench_serve import Plan, is_good, main
from deepdraft.proof.serve_client import Ask, Target
from deepdraft.proof.serve_hf import served
from deepdraft.proof.tiny_tokenizer import write_tokenizer
from deepdraft.text.tokenizer import Tokenizer

STAND_IN = '''
from types import SimpleNamespace as N
__version__ = "9.9"
logging = N(set_verbosity_error=lambda: None)

class Model:
    config = N(bos_token_id=0, eos_token_id=1)
    generation_config = N(eos_token_id=None)
    def eval(self):
        return self
    def generate(self, ids, *, max_new_tokens, eos_token_id, streamer, do_sample, **more):
        """Repeats the prompt's tokens backwards, then ends."""
        assert not do_sample and ids[0, 0] == 0
        streamer.put(ids)
        told = [*reversed(ids[0, 1:].tolist()), 1]
        if max_new_tokens == 13:
            raise RuntimeError("no memory")
        for token in told[:max_new_tokens]:
            streamer.put(ids.new_tensor([token]))
        streamer.end()

class AutoModelForCausalLM:
    @staticmethod
    def from_pretrained(directory, **options):
        assert options["trust_remote_code"] is False and options["use_safetensors"]
        return Model()
'''


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Our interpreter with the stand-in before everything else."""
    folder = tmp_path_factory.mktemp("python")
    (folder / "transformers.py").write_text(STAND_IN)
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "name"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    write_tokenizer(folder, 512)
    return folder


def test_answers_are_streamed_and_counted(python: str, checkpoint: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    backwards = tokenizer.decode(list(reversed(tokenizer.encode_text("abc def"))))
    with served(checkpoint, python) as (url, engine):
        assert engine == "transformers 9.9"
        target = Target("hf", url, api="completions")
        assert target.model == "name"
        answer = target.ask(Ask(("abc def",), 40))
        assert answer.fault is None and answer.finish == "stop" and answer.counted
        # The token of beginning in front, that of the end after.
        assert answer.text == backwards and answer.tokens == answer.prompt_tokens
        short = target.ask(Ask(("abcdefgh",), 1))
        assert short.tokens == 1 and short.finish == "length"
        broken = target.ask(Ask(("abc",), 13))
        assert broken.fault == "error" and "no memory" in broken.message
        assert target.ask(Ask(("abc",), 1 << 17)).fault == "refused"
        assert Target("hf", url, api="chat").ask(Ask(("abc",), 4)).fault == "refused"
    with pytest.raises(ConfigError, match="is a server there"):  # it ended with the block
        Target("hf", url, api="completions")


def test_a_benchmark_with_it(python: str, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    status = main(
        [f"hf:{checkpoint}"], Plan(requests=2, max_tokens=8, check=1),
        api="completions", model=None, timeout_s=60.0, ignore_eos=False, as_json=False,
        out=str(out), html=None, python=python,
    )  # fmt: skip
    record = json.loads(out.read_text())
    assert status == 0 and is_good(record)
    (target,) = record["targets"]
    assert (target["name"], target["kind"]) == ("transformers", "transformers")
    assert target["engine"] == "transformers 9.9"


def test_what_cannot_be_served_is_said(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"), served(tmp_path, None):
        pass
    with pytest.raises(ConfigError, match="cannot start"):
        with served(checkpoint, str(tmp_path / "python")):
            pass
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(ConfigError, match="give an interpreter that has transformers"):
        with served(checkpoint, str(bare)):
            pass
    command = ["bench", "serve", "--target", f"hf:{checkpoint}"]
    result = CliRunner().invoke(cli, command)
    assert isinstance(result.exception, ConfigError)
    assert "add --api completions" in result.exception.message
