"""vLLM as a reference of parity: what is asked, what an answer becomes, how failures read."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepdraft.adapters import child
from deepdraft.adapters.leash import descendants
from deepdraft.adapters.vllm_reference import VllmReference
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.checkpoint.section import read_config
from deepdraft.errors import ConfigError, EngineError
from deepdraft.proof.parity import run as parity
from deepdraft.proof.parity.reference import Trace
from deepdraft.proof.parity.run import examine, render
from deepdraft.proof.parity.sources import from_native
from deepdraft.proof.parity.target import Target, run
from deepdraft.proof.tiny_write import write_tiny


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("llama") / "checkpoint", "llama")


def engine_on(path: Path, *, shift: float = 0.0, best: int | None = None) -> Any:
    """Our own model as another engine; `best`: only so many log-probabilities are told."""
    target = Target.of(Checkpoint.open(path), read_config(path / "config.json"))

    def told(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.log_softmax(-1)
        if best is None:
            return rows
        return torch.where(rows >= rows.topk(best).values[:, -1:], rows, torch.nan)

    def engine(prompts: Sequence[Sequence[int]], tokens: int) -> list[Any]:
        trace = run(target, list(prompts[0]), greedy=tokens)
        logits, greedy = trace.logits.clone(), trace.greedy_logits
        assert greedy is not None
        logits[5, 7] += shift
        return [SimpleNamespace(
            engine="another 1.0", prompt=told(logits), tokens=trace.greedy, greedy=told(greedy)
        )]  # fmt: skip

    return engine


@pytest.mark.parametrize("best", [None, 20])
def test_an_engine_that_computes_the_same_passes(llama: Path, best: int | None) -> None:
    result = examine(llama, "vllm", engine=engine_on(llama, best=best), tokens=24)
    assert result.passed and result.greedy is not None
    assert result.greedy.first_difference is None and len(result.greedy.theirs) == 16
    assert result.about["text_log_probability_difference"] < 1e-6
    assert "another 1.0" in render(result) and "text's own tokens: at most" in render(result)


def test_an_engine_that_computes_otherwise_fails(llama: Path) -> None:
    other = engine_on(llama, shift=0.5)
    result = examine(llama, "vllm", engine=other, tokens=24, search=False)
    assert not result.passed and result.measures is not None
    assert result.measures.first_bad == 5


@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_transformers_as_a_third_side(
    llama: Path, shift: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its place our own model; a shift is the third side's fault, ours and vLLM's agree."""

    def third(path: Path, ids: list[int], *, greedy: int, python: str) -> Trace:
        trace = from_native(path, ids, greedy=greedy)
        trace.name, trace.logits = f"transformers of {python}", trace.logits.clone()
        trace.logits[7, ids[8]] += shift
        return trace

    monkeypatch.setattr(parity, "from_transformers", third)
    result = examine(llama, "vllm", engine=engine_on(llama), tokens=24, python="here")
    about = result.about["transformers of here"]
    assert about["first_difference"] is None and about["tokens"] == 16
    assert result.passed == (shift == 0) and "transformers of here against" in render(result)
    assert (about["text_log_probability_difference"] < 1e-6) == (shift == 0)
    if shift:
        assert [f.cause for f in result.findings] == ["engine: another 1.0"]


def test_a_reference_needs_its_engine(llama: Path) -> None:
    with pytest.raises(ConfigError, match="an engine is given with"):
        examine(llama, "vllm")


def test_refusals_come_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPDRAFT_ENVIRONMENTS", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot serve deepseek_v41 on a CPU"):
        VllmReference(write_tiny(tmp_path / "v41", "v41"))
    with pytest.raises(ConfigError, match="deepdraft env create vllm-cpu"):
        VllmReference(write_tiny(tmp_path / "llama", "llama"))


def asked(tmp_path: Path, body: str, timeout_s: float = 60.0) -> dict[str, Any]:
    program, folder = tmp_path / "program.py", tmp_path / "folder"
    program.write_text("import json, pathlib, subprocess, sys, time\n" + body)
    folder.mkdir()
    return child.ask(
        "the engine", Path(sys.executable), str(program), {"a": 1},
        folder=folder, environ={}, timeout_s=timeout_s,
    )  # fmt: skip


def test_a_program_is_asked(tmp_path: Path) -> None:
    body = (
        "here = pathlib.Path(sys.argv[1])\n"
        "order = json.loads((here / 'order.json').read_text())\n"
        "print('noise')\n"
        "(here / 'answer.json').write_text(json.dumps({'b': order['a'] + 1}))\n"
    )
    assert asked(tmp_path, body) == {"b": 2}


def test_a_program_that_fails_says_why(tmp_path: Path) -> None:
    body = (
        "try:\n    {}['x']\nexcept KeyError as e:\n    raise ValueError('no such model') from e\n"
    )
    with pytest.raises(EngineError, match=r"the engine failed: KeyError: 'x' / ValueError: no"):
        asked(tmp_path, body)


def test_reasons_are_found_in_the_log_of_an_engine() -> None:
    log = """INFO 11-30 10:00:00 [a.py:1] Starting
(EngineCore pid=7) ERROR 11-30 10:00:01 [core.py:99] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-30 10:00:01 [core.py:99]     raise error
(EngineCore pid=7) ERROR 11-30 10:00:01 [core.py:99] KeyError: 'layers.1.[x] y'
Traceback (most recent call last):
pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, architectures ['A', 'B'] are not supported
"""
    assert child.reason(log) == (
        "KeyError: 'layers.1.[x] y' / pydantic_core.ValidationError: 1 validation error for "
        "ModelConfig Value error, architectures ['A', 'B'] are not supported"
    )


def test_a_program_that_ends_without_an_answer(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="the engine failed: goodbye"):
        asked(tmp_path, "print('goodbye')\n")


def test_a_program_that_never_ends_is_ended_with_what_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    body = (
        "p = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"note = pathlib.Path({str(note)!r})\n"
        "note.with_suffix('.part').write_text(str(p.pid))\n"
        "note.with_suffix('.part').rename(note)\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(EngineError, match="took more than 3 s"):
        asked(tmp_path, body, timeout_s=3.0)
    if not note.exists():
        return  # a busy machine: its time was over before it had begun
    started, limit = int(note.read_text()), time.monotonic() + 30
    while started in descendants(1) and time.monotonic() < limit:
        time.sleep(0.05)
    assert started not in descendants(1)
