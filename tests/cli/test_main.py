"""The command: help and version without torch, exit codes, one message for each error."""

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepdraft import __version__
from deepdraft.cli.main import COMMANDS, main
from deepdraft.errors import CheckpointError


@pytest.mark.parametrize("argument", ["--help", "--version", "nonsense"])
def test_the_command_itself_is_quick_and_needs_no_torch(argument: str) -> None:
    code = (
        "import sys\nfrom deepdraft.cli.main import main\nmain([sys.argv[1]])\n"
        "heavy = {'torch', 'numpy', 'starlette', 'msgspec', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code, argument], capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    # Processor time, as the machine may be busy.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


@pytest.mark.parametrize("command", ["serve", "chat", "generate", "inspect", "golden", "bench"])
def test_help_of_a_subcommand_needs_no_torch(command: str) -> None:
    code = (
        "import sys\nfrom deepdraft.cli.main import main\ncode = main([sys.argv[1], '--help'])\n"
        "sys.exit(code or ('torch' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: deepdraft" in done.stdout


def test_help_lists_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, (_, _, line) in COMMANDS.items():
        assert name in shown and line in shown
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"deepdraft, version {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fly"], "No such command 'fly'"),
        (["serve", "--port", "x"], "'x' is not a valid integer"),
        (["serve", "--fast"], "No such option"),
        (["generate"], "Missing option '-p'"),
        (["serve", "/no/such/place"], "no checkpoint directory at /no/such/place"),
        (["serve", "--port", "70000"], "server.port must be an integer in 0..65535, got 70000"),
        (["serve", "--config", "/no/file"], "cannot read the settings file /no/file"),
        (["inspect", "/no/such/place"], "/no/such/place"),
        (["generate", "-p", "x", "--url", "ftp://a"], "'ftp://a' is no http or https address"),
        (["chat", "/tmp", "--url", "http://a"], "give MODEL or --url, not both"),
        (["chat", "--model-name", "m"], "--model-name goes with --url"),
        (["generate", "-p", "x", "--raw", "--think", "--url", "http://a"], "belong to chat"),
    ],
)
def test_an_error_is_one_message_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("command", ["inspect", "golden", "serve", "generate -p x"])
def test_a_path_that_cannot_be_looked_up_is_one_message(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = command.split()
    assert main([name, "x" * 5000, *options]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("Error: ") and "name too long" in shown


def test_an_empty_directory_is_no_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(tmp_path), "-p", "x"]) == 2
    shown = capsys.readouterr().err
    assert "config.json" in shown and "Traceback" not in shown


def test_a_missing_bundled_model_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from deepdraft.server import service

    monkeypatch.setattr(service, "bundled_checkpoint", lambda: tmp_path)
    assert main(["serve"]) == 2
    assert "no bundled model" in capsys.readouterr().err


def test_tools_pass_their_options_and_exit_codes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepdraft.proof import inspect

    seen: list[Any] = []

    def fake(*arguments: Any, **options: Any) -> int:
        seen.append((arguments, options))
        return 1

    monkeypatch.setattr(inspect, "main", fake)
    assert main(["inspect", "dir", "--json", "--gpus", "8", "--accept-key", "a.b"]) == 1
    options = {"as_json": True, "gpus": 8, "gpu_gb": None, "accept_keys": ("a.b",)}
    assert seen == [(("dir",), options)]

    def broken(*arguments: Any, **options: Any) -> int:
        raise CheckpointError("shard 2 is short")

    monkeypatch.setattr(inspect, "main", broken)
    assert main(["inspect", "dir"]) == 2


def test_ctrl_c_in_a_tool_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from deepdraft.proof import inspect

    def stopped(*arguments: Any, **options: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect, "main", stopped)
    assert main(["inspect", "dir"]) == 130
    assert "Stopped." in capsys.readouterr().err
