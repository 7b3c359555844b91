"""`deepdraft vllm` and `deepdraft lmdeploy`: what they print, start and refuse."""

import dataclasses
import json
import shlex
import socket
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from deepdraft.adapters import child, lmdeploy_check, lmdeploy_up
from deepdraft.adapters.environments import ENVIRONMENTS, Environment
from deepdraft.adapters.lmdeploy_check import Checked, render
from deepdraft.adapters.lmdeploy_launch import plan as lmdeploy_plan
from deepdraft.adapters.supervisor import Rules, fetch
from deepdraft.adapters.vllm_launch import plan
from deepdraft.adapters.vllm_up import parsed, running
from deepdraft.cli.main import cli
from deepdraft.errors import ConfigError, EngineError
from deepdraft.proof.tiny_write import write_tiny
from tests.checkpoint.stacked import write_stacked


@pytest.fixture(scope="module")
def stacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v3")
    return write_stacked(write_tiny(folder / "p", "v3", real_latents=True), folder / "stacked")


def said(*words: str) -> tuple[str, str]:
    result = CliRunner().invoke(cli, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout, result.stderr


def test_plans_are_printed(stacked: Path) -> None:
    out, wrong = said("vllm", "plan", str(stacked), "--max-model-len", "64")
    words = shlex.split(out)
    assert words[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert words[words.index("--max-model-len") + 1] == "64"
    # As stored: vLLM by itself would lower it.
    assert words[words.index("--dtype") + 1] == "float32" and "needs our plugin" in wrong
    out, wrong = said("lmdeploy", "plan", str(stacked))
    assert shlex.split(out)[:3] == ["lmdeploy", "serve", "api_server"] and "--out DIR" in wrong


def test_a_server_for_stacked_experts_is_written(stacked: Path, tmp_path: Path) -> None:
    out, _ = said("lmdeploy", "plan", str(stacked), "--out", str(tmp_path / "out"))
    assert shlex.split(out) == ["python", str(tmp_path / "out" / "serve.py")]
    settings = json.loads((tmp_path / "out" / "serve.json").read_text())
    assert settings["checkpoint"] == str(stacked) and settings["name"] == "stacked"
    assert settings["engine"] == {"session_len": 512, "hf_overrides": {"pad_token_id": None}}
    for name in ("serve.py", "module_map.py", "deepdraft_stacks.py"):
        compile((tmp_path / "out" / name).read_text(), name, "exec")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write into"):
        said("lmdeploy", "plan", str(stacked), "--out", str(tmp_path / "file"))


def test_the_plugin_is_written(tmp_path: Path) -> None:
    out, _ = said("vllm", "plugin", str(tmp_path))
    assert Path(out.strip()).is_file() and out.strip().endswith("-py3-none-any.whl")


def test_a_check_that_fails_says_so(stacked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Checked("0.18.0", "Their", 3, 2, 1, 1e-6, {"1": {
        "same_experts": 0.5, "most_difference": 0.1,
    }}, problems=["x was not loaded"])  # fmt: skip
    monkeypatch.setattr(lmdeploy_check, "check", lambda launch: found)
    result = CliRunner().invoke(cli, ["lmdeploy", "check", str(stacked)], standalone_mode=False)
    assert result.return_value == 1
    for words in ("2 of 3 parameters", "for 50% of the rows", "error: x was not", "FAILED"):
        assert words in result.stdout
    assert render(dataclasses.replace(found, problems=[])).endswith("passed")


STAND_IN = """
import http.server, os, sys
flags = ("--port", "--server-port")
port = int(next((b for a, b in zip(sys.argv, sys.argv[1:]) if a in flags), sys.argv[-1]))
print("started with", *sys.argv[1:], flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        text = os.environ.get("PYTHONPATH", "").encode()
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def stand_in(folder: Path, python: Path) -> Path:
    """An interpreter that serves, whatever it is to run; asked for a version, it tells 0.18.0."""
    (folder / "stand_in.py").write_text(STAND_IN)
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(
        '#!/bin/sh\nif [ "$1" = -I ]; then echo 0.18.0; exit; fi\n'
        f'exec "{sys.executable}" {folder}/stand_in.py "$@"\n'
    )
    python.chmod(0o755)
    return python


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """Where vLLM would be: its interpreter runs the stand-in."""
    monkeypatch.setenv("DEEPDRAFT_ENVIRONMENTS", str(tmp_path))
    made = ENVIRONMENTS["vllm-cpu"]
    stand_in(tmp_path, made.python)
    return made


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_the_plugin_is_there_while_the_server_runs(
    stacked: Path, environment: Environment, port: int, tmp_path: Path
) -> None:
    launch = plan(stacked, cpu=True)
    logs = tmp_path / "logs"
    with running(launch, environment, port=port, name="m", logs=logs) as server:
        server.wait_ready(120)
        folder = Path(fetch(f"http://127.0.0.1:{port}/", timeout_s=30)[1].decode())
        assert (folder / "deepdraft_vllm" / "models.py").is_file()
        with pytest.raises(ConfigError, match=f"--port {port} is taken"):
            with running(launch, environment, port=port, name="m"):
                pass
    assert not folder.exists()
    words = (logs / "vllm.log").read_text().split()
    assert words[2:4] == ["-m", "vllm.entrypoints.openai.api_server"]


def test_a_server_that_does_not_start(stacked: Path, environment: Environment, port: int) -> None:
    environment.python.write_text("#!/bin/sh\necho no such model >&2\nexit 3\n")
    rules = Rules(backoff_s=0.01)
    launch = plan(stacked, cpu=True)
    with running(launch, environment, port=port, name="m", rules=rules) as server:
        with pytest.raises(EngineError, match=r"given up after 2 failures.*no such model"):
            server.wait_ready(120)


def test_options_are_handed_to_its_parser(
    stacked: Path, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = []

    def ask(what: str, python: Path, program: str, order: dict, **more: object) -> dict:
        orders.append((python, order))
        return {"speculative": None}

    monkeypatch.setattr(child, "ask", ask)
    launch = plan(stacked, cpu=True)
    assert parsed(launch, environment, ["--seed", "3"]) == {"speculative": None}
    ((python, order),) = orders
    assert python == environment.python and order["words"] == [*launch.words(), "--seed", "3"]


@pytest.mark.parametrize("layout", ["published", "stacked"])
def test_a_server_of_lmdeploy(
    stacked: Path, port: int, tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmdeploy_up, "has_cuda", lambda: True)
    python = str(stand_in(tmp_path, tmp_path / "python"))
    assert lmdeploy_up.installed_version(python) == lmdeploy_up.tried_version()
    launch = lmdeploy_plan(stacked if layout == "stacked" else stacked.parent / "p")
    extra = () if layout == "stacked" else ("--tp", "2")
    with lmdeploy_up.running(
        launch, python, port=port, name="m", extra=extra, logs=tmp_path
    ) as server:
        server.wait_ready(120)
    words = (tmp_path / "lmdeploy.log").read_text().splitlines()[0].split()[2:]
    if layout == "stacked":
        assert len(words) == 2 and words[0].endswith("serve.py") and words[1] == str(port)
        assert not Path(words[0]).exists()
        with pytest.raises(ConfigError, match="takes no --tp"):
            with lmdeploy_up.running(launch, python, port=port, name="m", extra=("--tp", "2")):
                pass
    else:
        server_words = launch.server_words(port, "m")
        wanted = ["-m", "lmdeploy", *launch.words(), *server_words, "--tp", "2"]
        assert words == " ".join(wanted).split()


def test_what_a_server_of_lmdeploy_needs(
    stacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    up = ("lmdeploy", "up", str(stacked), "--python")
    monkeypatch.setattr(lmdeploy_up, "has_cuda", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA driver"):
        said(*up, sys.executable)
    monkeypatch.setattr(lmdeploy_up, "has_cuda", lambda: True)
    with pytest.raises(ConfigError, match=r"has no LMDeploy; install lmdeploy==0\.18\.0"):
        said(*up, sys.executable)
    with pytest.raises(ConfigError, match="does not start"):
        said(*up, str(tmp_path / "none"))
