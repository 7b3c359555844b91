"""Every setting of a fleet's file with every kind of wrong value: refused by its name, or fit for
all that is made of it; without Ray."""

import dataclasses
from pathlib import Path

import pytest

from deepdraft.cli.main import main
from deepdraft.config import EngineConfig, FleetConfig, ServerConfig
from deepdraft.errors import ConfigError
from deepdraft.server import fleet_ray, fleet_version
from deepdraft.server.fleet_config import RayConfig, Replicas, load_fleet_file
from deepdraft.server.fleet_version import Deployed, version_of

TABLES = {
    "engine": EngineConfig,
    "server": ServerConfig,
    "fleet": FleetConfig,
    "replicas": Replicas,
    "ray": RayConfig,
}
HUGE = "1" + "0" * 40
VALUES = (
    *("true", "-1", "0", "1", "3", "1.5", "-0.5", "1e300", "inf", "-inf", "nan"),
    *("9223372036854775807", "9223372036854775808", HUGE, "2020-01-01"),
    *('""', '"x"', '" "', '"\\u0000"', '"a\\nb"', f'"{"x" * 5000}"'),
    *("[]", '["x"]', "[[1]]", "[1]", "[{}]", "{}", "{a = 1}"),
)


@pytest.mark.parametrize("table", TABLES)
def test_each_value_is_refused_by_name_or_fit_for_all_that_follows(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_version, "code_digest", lambda: "00")
    file, refused, taken = tmp_path / "fleet.toml", 0, 0
    for field in dataclasses.fields(TABLES[table]):
        for value in VALUES:
            file.write_text(f"[{table}]\n{field.name} = {value}\n")
            try:
                fleet = load_fleet_file(file)
            except ConfigError as error:
                refused += 1
                named = (f"{table}.{field.name}", f"{table}:", "replicas.", "engine.")
                assert any(name in error.message for name in named), error.message
                assert len(error.message) < 1000
                continue
            taken += 1
            made = Deployed(fleet, version_of(fleet), "1")
            assert Deployed.decode(made.encode()) == made
            fleet_ray.options_of(fleet)
            fleet_ray.front_options_of(fleet)
            fleet_ray.http_options(fleet)
            assert fleet.of_replica("x") and fleet.url
    assert refused > taken > 0


@pytest.mark.parametrize(
    "text",
    [
        *(f"a = {value}" for value in ("[" * 5000, "1" * 5000, "\ufffd\x00", '"')),
        *(f"replicas = {value}" for value in VALUES if value != "{}"),
        *(f"name = {value}" for value in VALUES if value not in ('"x"', '"a"')),
        "[[replicas]]\ncount = 1",
        "[server]\nport = 1\nport = 2",
    ],
    ids=lambda text: text[:20],
)
def test_the_command_says_in_one_line_what_is_wrong(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    assert main(["fleet", "status", str(file)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("Error: ") and len(said) < 1000


@pytest.mark.parametrize("kind", ["missing", "a directory", "no text"])
def test_a_file_that_cannot_be_read(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "fleet.toml"
    if kind == "a directory":
        file.mkdir()
    elif kind == "no text":
        file.write_bytes(b"\xff\xfe\x00a\x00")
    for command in ("up", "status", "drain", "down", "upgrade"):
        assert main(["fleet", command, str(file)]) == 2
        assert capsys.readouterr().err.startswith(("Error: cannot read", "Error: the settings"))


def test_paths_are_those_of_whoever_wrote_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas of a cluster run elsewhere, in a directory of Ray's."""
    (tmp_path / "cert.pem").write_text("")
    (tmp_path / "fleet.toml").write_text(
        'model = "models/a"\n[engine]\nkv_spill = "spill"\ncost_table = "costs.json"\n'
        '[server]\ntls_cert = "cert.pem"\ntls_key = "./cert.pem"\n[fleet]\nfiles = "own"\n'
    )
    monkeypatch.chdir(tmp_path)
    fleet = load_fleet_file("fleet.toml")
    config = fleet.config
    assert fleet.model == str(tmp_path / "models/a")
    assert config.engine.kv_spill == str(tmp_path / "spill")
    assert config.engine.cost_table == str(tmp_path / "costs.json")
    assert config.server.tls_cert == config.server.tls_key == str(tmp_path / "cert.pem")
    assert config.fleet.files == str(tmp_path / "own")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("quiet_s = 0.5", r"replicas\.quiet_s must be a number from 2 to"),
        ("hang_s = 3", r"replicas\.hang_s must be at least replicas\.quiet_s \(5\), got 3"),
        ("fronts = 1000000", r"replicas\.fronts must be an integer from 1 to 256"),
    ],
)
def test_what_cannot_work_together(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(f"[replicas]\n{text}\n")
    with pytest.raises(ConfigError, match=message):
        load_fleet_file(file)
