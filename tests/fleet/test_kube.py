"""The RayService's application as Ray itself reads it (`make test-fleet`; skipped without Ray). No
cluster is started: the schema is Ray's own, and so is what calls the builder."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Ray's own modules
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="Ray is not installed here: make test-fleet has it",
    ),
]


def test_ray_takes_the_serve_config_and_the_builder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray  # type: ignore[import-not-found]
    import yaml
    from ray.serve import schema  # type: ignore[import-not-found]
    from ray.serve._private import api  # type: ignore[import-not-found]

    from deepdraft.server import fleet_kube

    manifest = Path(__file__).parents[2] / "deploy" / "rayservice.yaml"
    [config_map, service] = yaml.safe_load_all(manifest.read_text())
    config = schema.ServeDeploySchema(**yaml.safe_load(service["spec"]["serveConfigV2"]))
    [application] = config.applications
    assert application.import_path == "deepdraft.server.fleet_kube:app"
    file = tmp_path / "fleet.toml"
    file.write_text(
        config_map["data"]["fleet.toml"]
        .replace('model = "/models/deepseek-v41"', "")
        .replace("/etc/deepdraft/tls", str(tmp_path))
    )
    context: Any = SimpleNamespace(gcs_address="10.0.0.1:6379")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    args = {**application.args, "file": str(file)}
    built = api.call_user_app_builder_with_args_if_necessary(fleet_kube.app, args)
    front = built._bound_deployment
    assert front.name == "Front" and front.num_replicas == 2
    fleet = front.init_args[0]
    assert fleet.name == application.name and fleet.ray.address == "10.0.0.1:6379"
    assert fleet.of_replica("x", "10.0.0.7").fleet.advertise == "10.0.0.7"
