"""Settings: defaults, the TOML file, flags, and the message for each wrong value."""

from pathlib import Path

import pytest

from deepdraft.config import Config, EngineConfig, ServerConfig, load_config
from deepdraft.errors import ConfigError


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        '[engine]\nmax_running = 7\nprefill_chunk = 99\n[server]\nserved_model_names = ["a", "b"]\n'
    )
    config = load_config(
        file, engine={"max_running": 2, "threads": None}, server={"port": 1, "host": None}
    )
    assert config == Config(
        engine=EngineConfig(max_running=2, prefill_chunk=99),
        server=ServerConfig(port=1, served_model_names=("a", "b")),
    )
    assert load_config() == Config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[engine]\nmax_runing = 3",
            "unknown setting engine.max_runing; did you mean engine.max_r",
        ),
        ("[server]\nzzz = 3", "unknown setting server.zzz; known: "),
        ("[kv]\na = 1", r"unknown table \[kv\] in .*settings.toml"),
        ("engine = 3", "engine in .* must be a table, got 3"),
        ("[engine\n", "not valid TOML"),
        ("[engine]\nnumerics = 'fast'", "numerics must be one of exact, bf16, fp16, qsim, quant"),
        ("[engine]\nmax_running = 0", "engine.max_running must be an integer >= 1, got 0"),
        ("[engine]\nmax_queue = true", "engine.max_queue must be an integer >= 1, got True"),
        ("[engine]\nmax_context = -1", "engine.max_context"),
        ("[engine]\ndrafts = -1", "engine.drafts must be an integer >= 0, or absent, got -1"),
        ("[engine]\nrule = 'best'", "engine.rule must be one of token, block, coupled, got"),
        ("[engine]\nschedule = 'x'", "engine.schedule must be one of cost, threshold, all, got"),
        ("[engine]\ndraft_threshold = 1.5", "engine.draft_threshold must be a number from 0 to 1"),
        ("[engine]\ncost_table = ''", "engine.cost_table must be a file name"),
        ("[server]\nport = 99999", r"server.port must be an integer in 0..65535"),
        ("[server]\nhost = ''", "server.host"),
        ("[server]\nserved_model_names = ['']", "server.served_model_names"),
        ("[server]\nkeep_alive_s = 0", "server.keep_alive_s must be a number from 0.01 to"),
        ("[server]\nmax_body_bytes = 3", "server.max_body_bytes must be an integer >= 1024"),
        ("[server]\nlog_level = 'loud'", "server.log_level must be one of debug"),
        ("[engine]\nkv_memory = '3 parsecs'", "engine.kv_memory must be a size such as 512MiB"),
        ("[engine]\nkv_memory = -1", "engine.kv_memory must be bytes, or a size"),
        ("[engine]\nkv_memory = true", "engine.kv_memory must be bytes, or a size"),
        ("[engine]\nkv_spill_bytes = 'auto'", "engine.kv_spill_bytes must be a size"),
        ("[engine]\nkv_spill = ''", "engine.kv_spill must be a directory"),
        ("[server]\nsession_policy = 'maybe'", "server.session_policy must be one of optional"),
        ("[server]\nsession_header = 'a b'", "server.session_header must be the name of a header"),
        ("[fleet]\nlisten = '8000'", "fleet.listen must be host:port"),
        ("[fleet]\nfetch = 'x'", "fleet.fetch must be one of auto, always, never"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(file)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot read the settings file /no/such\.toml"):
        load_config("/no/such.toml")


def test_settings_are_frozen() -> None:
    for record, name in ((EngineConfig(), "numerics"), (ServerConfig(), "port")):
        with pytest.raises(AttributeError):
            setattr(record, name, getattr(record, name))


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("4096", 4096), ("512MiB", 512 << 20), ("2g", 2 << 30), (" 1KB ", 1024), ("3b", 3)],
)
def test_sizes(text: str, size: int) -> None:
    assert load_config(engine={"kv_memory": text}).engine.kv_memory == size
