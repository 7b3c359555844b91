"""The container recipe: what it copies is there and is enough, what it runs exists."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KNOWN = ("ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "EXPOSE", "CMD", "LABEL")
TOOLS = {"python", "useradd", "/opt/venv/bin/pip", "/opt/venv/bin/deepdraft"}
"""Commands of the base image and of what the recipe has installed."""


def steps(text: str) -> list[tuple[str, str]]:
    """Instructions and their words, lines that go on joined, comments left out."""
    joined = re.sub(r"\\\n", " ", "\n".join(x for x in text.splitlines() if x[:1] != "#"))
    found = []
    for line in joined.splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            found.append((word, rest.strip()))
    return found


def faults(text: str, root: Path) -> list[str]:
    """What is wrong with a recipe that is built at `root`."""
    wrong: list[str] = []
    arguments: set[str] = set()
    begun = False
    for word, rest in steps(text):
        if word not in KNOWN:
            wrong.append(f"unknown instruction {word}")
        elif word == "ARG":
            arguments.add(rest.partition("=")[0])
        elif word == "FROM":
            begun = True
            wrong += [f"FROM names {rest}" for _ in [0] if rest not in ("${BASE_IMAGE}",)]
        elif not begun:
            wrong.append(f"{word} before FROM")
        elif word == "COPY":
            *sources, _ = rest.split()
            wrong += [f"{s} is not there" for s in sources if not (root / s).exists()]
        elif word == "RUN":
            for part in rest.split("&&"):
                command = shlex.split(part)[0]
                wrong += [f"{command} does not exist" for _ in [0] if command not in TOOLS]
        wrong += [
            f"${name} is no argument"
            for name in re.findall(r"\$\{(\w+)\}", rest)
            if name not in arguments and name != "PATH"
        ]
    return wrong


@pytest.fixture(scope="module")
def recipe() -> str:
    return (ROOT / "deploy" / "Containerfile").read_text()


def test_the_recipe_has_no_fault(recipe: str) -> None:
    assert faults(recipe, ROOT) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("COPY deepdraft ", "COPY deepdarft ", "deepdarft is not there"),
        ("ARG EXTRAS", "ARG EXTRA", "$EXTRAS is no argument"),
        ("RUN useradd", "RUN addusr", "addusr does not exist"),
        ("ARG BASE_IMAGE\n", "COPY deepdraft .\n", "COPY before FROM"),
        ("FROM ${BASE_IMAGE}", "FROM some/image", "FROM names some/image"),
        ("EXPOSE", "EXPOES", "unknown instruction EXPOES"),
    ],
)
def test_a_mistake_is_found(recipe: str, old: str, new: str, fault: str) -> None:
    assert old in recipe and fault in faults(recipe.replace(old, new), ROOT)


def test_what_is_copied_is_what_the_build_reads(recipe: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {
        "pyproject.toml",
        project["project"]["readme"],
        *project["project"]["license-files"],
        project["tool"]["hatch"]["version"]["path"].partition("/")[0],
        *project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"],
    }
    copied = {s for word, rest in steps(recipe) if word == "COPY" for s in rest.split()[:-1]}
    assert needed | {"constraints.txt"} == copied


def test_what_is_installed_and_started_exists(recipe: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    arguments = dict(
        rest.split("=", 1) for word, rest in steps(recipe) if word == "ARG" and "=" in rest
    )
    assert arguments["EXTRAS"].strip('"') in project["optional-dependencies"]
    assert arguments["TORCH"].strip('"') in project["dependencies"]
    [command] = [json.loads(rest) for word, rest in steps(recipe) if word == "CMD"]
    assert command[0] in project["scripts"]
    from click.testing import CliRunner

    from deepdraft.cli.main import cli

    shown = CliRunner().invoke(cli, [*command[1:2], "--help"])
    assert shown.exit_code == 0 and command[2] in shown.output


def test_it_runs_as_nobody_in_particular(recipe: str) -> None:
    users = [rest for word, rest in steps(recipe) if word == "USER"]
    assert users == ["1000"]
    manifest = (ROOT / "deploy" / "rayservice.yaml").read_text()
    assert f"runAsUser: {users[0]}" in manifest
