"""The manifests of deploy/ against schemas, and against what the fleet itself says of its file."""

import copy
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from deepdraft.errors import ConfigError
from deepdraft.server import fleet_kube
from deepdraft.server.fleet_config import FleetFile, load_fleet_file
from deepdraft.server.fleet_ray import RAY_SERIES
from tests.deploy.schemas import KINDS, SERVE

DEPLOY = Path(__file__).parents[2] / "deploy"
Json = dict[str, Any]


def objects(file: str) -> list[Json]:
    return list(yaml.safe_load_all((DEPLOY / file).read_text()))


def find(kind: str, file: str = "rayservice.yaml") -> Json:
    [found] = [o for o in objects(file) if o["kind"] == kind]
    return found


def check(thing: Json) -> None:
    """Raises jsonschema.ValidationError."""
    jsonschema.validate(thing, KINDS[thing["kind"]])


@pytest.fixture
def fleet(tmp_path: Path) -> FleetFile:
    """The fleet that the manifest describes."""
    file = tmp_path / "fleet.toml"
    file.write_text(find("ConfigMap")["data"]["fleet.toml"])
    return load_fleet_file(file)


def serve_config() -> Json:
    return yaml.safe_load(find("RayService")["spec"]["serveConfigV2"])


def pods() -> Iterator[tuple[str, Json]]:
    cluster = find("RayService")["spec"]["rayClusterConfig"]
    yield "head", cluster["headGroupSpec"]["template"]["spec"]
    for group in cluster["workerGroupSpecs"]:
        yield group["groupName"], group["template"]["spec"]
    yield "redis", find("Deployment", "redis.yaml")["spec"]["template"]["spec"]


@pytest.mark.parametrize("file", ["rayservice.yaml", "redis.yaml"])
def test_every_object_has_its_schema(file: str) -> None:
    found = objects(file)
    assert len(found) == 2
    for thing in found:
        check(thing)


def test_the_serve_config_has_its_schema() -> None:
    jsonschema.validate(serve_config(), SERVE)


def spoil(change: Callable[[Json], None]) -> Json:
    thing = copy.deepcopy(find("RayService"))
    change(thing)
    return thing


@pytest.mark.parametrize(
    "change",
    [
        lambda o: o.update(apiVersion="ray.io/v1alpha1"),
        lambda o: o["spec"].pop("serveConfigV2"),
        lambda o: o["spec"].update(serveConfig="x"),
        lambda o: o["spec"]["upgradeStrategy"].update(type="Rolling"),
        lambda o: o["spec"]["rayClusterConfig"].update(rayversion="2.60.0"),
        lambda o: o["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"].update(
            {"num-cpus": 0}
        ),
        lambda o: o["spec"]["rayClusterConfig"]["workerGroupSpecs"][0].pop("groupName"),
        lambda o: o["spec"]["rayClusterConfig"]["workerGroupSpecs"][0].update(replicas="8"),
        lambda o: o["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"].update(
            containers=[]
        ),
        lambda o: o["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["volumes"][
            0
        ].pop("configMap"),
    ],
)
def test_a_mistake_is_found(change: Callable[[Json], None]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        check(spoil(change))


def test_mounts_are_of_volumes_and_hold_what_is_read(fleet: FleetFile) -> None:
    for where, pod in pods():
        volumes = {v["name"] for v in pod["volumes"]}
        for container in pod["containers"]:
            mounts = container["volumeMounts"]
            assert {m["name"] for m in mounts} == volumes, where
            if where == "redis":
                continue
            paths = {m["mountPath"] for m in mounts}
            assert serve_config()["applications"][0]["args"]["file"] in paths
            assert fleet.config.fleet.files in paths
            assert str(Path(str(fleet.model)).parent) in paths


def test_the_fleet_fits_its_cluster(fleet: FleetFile) -> None:
    service = find("RayService")
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster["rayVersion"].startswith(f"{RAY_SERIES}.")
    [group] = cluster["workerGroupSpecs"]
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    [container] = group["template"]["spec"]["containers"]
    asked, most = container["resources"]["requests"], container["resources"]["limits"]
    gpus = int(most["nvidia.com/gpu"])
    assert asked["nvidia.com/gpu"] == most["nvidia.com/gpu"] and gpus >= fleet.replicas.gpus > 0
    each = min(gpus // fleet.replicas.gpus, int(asked["cpu"]) // int(fleet.replicas.cpus))
    assert each * group["replicas"] >= fleet.replicas.bounds[1]
    # Fronts need a CPU of Ray's each, beside the engines'.
    spare = group["replicas"] * int(asked["cpu"]) - fleet.replicas.count * fleet.replicas.cpus
    assert spare >= fleet.replicas.fronts
    assert int(fleet.config.engine.kv_memory) < int(asked["memory"].removesuffix("Gi")) << 30
    grace = group["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace >= fleet.config.server.drain_s + fleet.config.fleet.hand_over_s + 30


def test_ports_and_names_agree(fleet: FleetFile) -> None:
    config = serve_config()
    server = fleet.config.server
    assert config["http_options"] == {"host": server.host, "port": server.port}
    [application] = config["applications"]
    assert application["name"] == fleet.name
    [group] = find("RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    [container] = group["template"]["spec"]["containers"]
    assert {"name": "http", "containerPort": server.port} in container["ports"]
    redis = find("Service", "redis.yaml")
    deployment = find("Deployment", "redis.yaml")["spec"]
    assert redis["spec"]["selector"] == deployment["template"]["metadata"]["labels"]
    assert redis["spec"]["selector"] == deployment["selector"]["matchLabels"]
    [url] = [e["value"] for e in container["env"] if e["name"] == fleet_kube.DIRECTORY]
    assert f"@{redis['metadata']['name']}:{redis['spec']['ports'][0]['port']}/" in url
    assert url.startswith("rediss://") and f"ssl_ca_certs={fleet.config.fleet.files}/ca.pem" in url


def test_no_secret_stands_in_a_manifest() -> None:
    for file in ("rayservice.yaml", "redis.yaml"):
        text = (DEPLOY / file).read_text()
        assert "kind: Secret" not in text and "stringData" not in text
        assert text.count("secretKeyRef") >= 1
    for where, pod in pods():
        assert pod["securityContext"]["runAsNonRoot"] is True, where
        for container in pod["containers"]:
            for entry in container["env"]:
                if "PASSWORD" in entry["name"]:
                    assert "valueFrom" in entry, where


def test_the_import_path_is_a_builder() -> None:
    [application] = serve_config()["applications"]
    module, _, name = application["import_path"].partition(":")
    builder = getattr(importlib.import_module(module), name)
    assert list(inspect.signature(builder).parameters) == ["args"]  # what Ray Serve asks of it


def test_what_the_builder_deploys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text('name = "x"\n[replicas]\ncount = 3\n')
    monkeypatch.setenv(fleet_kube.DIRECTORY, "rediss://:secret@r:6379/0")
    fleet = fleet_kube.described({"file": str(file), "version": "2"})
    assert fleet.replicas.count == 3 and fleet.config.fleet.directory == "rediss://:secret@r:6379/0"
    assert "secret" not in repr(fleet)
    file.write_text('name = "x"\n[fleet]\ndirectory = "redis://own"\n')
    assert fleet_kube.described({"file": str(file)}).config.fleet.directory == "redis://own"
    for wrong in ({}, {"file": 3}, {"file": str(file), "versoin": "1"}):
        with pytest.raises(ConfigError, match="args of the application"):
            fleet_kube.described(wrong)
    with pytest.raises(ConfigError, match="cannot read"):
        fleet_kube.described({"file": str(tmp_path / "none.toml")})


def test_a_replica_of_many_nodes_tells_peers_its_address(fleet: FleetFile) -> None:
    assert fleet.of_replica("x", "10.1.2.3").fleet.advertise == "10.1.2.3"
    assert fleet.of_replica("x", "10.1.2.3").fleet.name == "replica"
