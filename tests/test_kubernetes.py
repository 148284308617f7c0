"""``deploy/kubernetes/`` has fields that KubeRay knows, and starts a fleet that mosstalk reads."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, require_package

from mosstalk.fleet.config import FleetConfig, read_config

FOLDER = ROOT / "deploy" / "kubernetes"
SERVICE, *OTHERS = yaml.safe_load_all((FOLDER / "fleet.yaml").read_text())
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
HEAD, (WORKERS,) = CLUSTER["headGroupSpec"], CLUSTER["workerGroupSpecs"]
PODS = [HEAD["template"]["spec"], WORKERS["template"]["spec"]]
WORKER_ENVIRONMENT = PODS[1]["containers"][0]["env"]
PASSWORD = "MOSSTALK_REDIS_PASSWORD"
FLEET = "host: 0.0.0.0\nreplicas: 2\nserve: {model: /models/M, codec: /models/C}\n"
"""A file as it may be mounted."""

# The fields of KubeRay 1.6.2 by its API reference (docs.ray.io, "KubeRay CRD API reference"): those
# of the resource itself. The pods' templates are Kubernetes' own.
Kinds = dict[str, type]
RAY_SERVICE: Kinds = {
    "rayClusterDeletionDelaySeconds": int, "serviceUnhealthySecondThreshold": int,
    "deploymentUnhealthySecondThreshold": int, "serveService": dict, "upgradeStrategy": dict,
    "managedBy": str, "serveConfigV2": str, "rayClusterConfig": dict,
    "excludeHeadPodFromServeSvc": bool,
}  # fmt: skip
RAY_CLUSTER: Kinds = {
    "upgradeStrategy": dict, "authOptions": dict, "suspend": bool, "managedBy": str,
    "autoscalerOptions": dict, "headServiceAnnotations": dict, "enableInTreeAutoscaling": bool,
    "gcsFaultToleranceOptions": dict, "headGroupSpec": dict, "rayVersion": str,
    "workerGroupSpecs": list,
}  # fmt: skip
GROUP: Kinds = {"template": dict, "resources": dict, "labels": dict, "rayStartParams": dict}
HEAD_GROUP: Kinds = GROUP | {"headService": dict, "enableIngress": bool, "serviceType": str}
WORKER_GROUP: Kinds = GROUP | {
    "suspend": bool, "groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int,
    "idleTimeoutSeconds": int, "scaleStrategy": dict, "numOfHosts": int,
}  # fmt: skip
FAULT_TOLERANCE: Kinds = {
    "redisUsername": dict, "redisPassword": dict, "externalStorageNamespace": str,
    "redisAddress": str,
}  # fmt: skip


@pytest.mark.parametrize(
    ("part", "kinds", "required"),
    [
        (SERVICE["spec"], RAY_SERVICE, ("serveConfigV2", "rayClusterConfig")),
        (CLUSTER, RAY_CLUSTER, ("headGroupSpec",)),
        (HEAD, HEAD_GROUP, ("template",)),
        (WORKERS, WORKER_GROUP, ("groupName", "template", "minReplicas", "maxReplicas")),
        (CLUSTER["gcsFaultToleranceOptions"], FAULT_TOLERANCE, ("redisAddress",)),
    ],
    ids=["RayService", "RayCluster", "head", "workers", "fault-tolerance"],
)
def test_every_field_is_one_of_kuberays(
    part: dict[str, Any], kinds: Kinds, required: tuple[str, ...]
) -> None:
    assert {name: type(value) for name, value in part.items()} == {
        name: kinds.get(name) for name in part
    }
    assert set(required) <= set(part)


def test_it_is_a_ray_service_of_the_version_of_ray_that_the_package_asks_for() -> None:
    assert (SERVICE["apiVersion"], SERVICE["kind"]) == ("ray.io/v1", "RayService")
    asked = re.search(r'"ray\[serve\]>=([\d.]+),', (ROOT / "pyproject.toml").read_text())
    assert asked
    assert CLUSTER["rayVersion"].startswith(f"{asked[1]}.")
    for group in (HEAD, WORKERS):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


def test_each_pod_is_started_with_what_ray_must_be_started_with(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET)
    config = read_config(tmp_path / "fleet.yaml")
    for pod in PODS:
        (container,) = pod["containers"]
        given = {each["name"]: each.get("value") for each in container["env"]}
        assert config.settings.items() <= given.items()
        (redis,) = [each for each in OTHERS if each["kind"] == "Service"]
        address = f"{redis['metadata']['name']}:{redis['spec']['ports'][0]['port']}"
        assert address in given["MOSSTALK_STORE"]
        assert address == CLUSTER["gcsFaultToleranceOptions"]["redisAddress"]


def test_everybody_has_the_password_of_redis_from_one_secret() -> None:
    secret = CLUSTER["gcsFaultToleranceOptions"]["redisPassword"]["valueFrom"]["secretKeyRef"]
    (deployment,) = [each for each in OTHERS if each["kind"] == "Deployment"]
    redis = deployment["spec"]["template"]["spec"]
    for pod in (*PODS, redis):
        (container,) = pod["containers"]
        names = [each["name"] for each in container["env"]]
        (password,) = [each for each in container["env"] if each["name"] == PASSWORD]
        assert password["valueFrom"]["secretKeyRef"] == secret
        # Kubernetes puts it in the place of $(NAME) where that comes later.
        assert "MOSSTALK_STORE" not in names[: names.index(PASSWORD)]
        assert "REDIS_PASSWORD" not in names  # KubeRay sets this one itself, and takes no other
    options = redis["containers"][0]["args"]
    assert options[options.index("--requirepass") + 1] == f"$({PASSWORD})"
    (store,) = [it["value"] for it in WORKER_ENVIRONMENT if it["name"] == "MOSSTALK_STORE"]
    assert store.startswith(f"redis://:$({PASSWORD})@")


@pytest.mark.slow  # it imports Ray, which only this extra brings
def test_ray_serve_reads_what_it_is_to_serve_and_finds_its_file_there() -> None:
    require_package("ray", "fleet")
    from ray.serve.schema import ServeDeploySchema

    served = ServeDeploySchema.model_validate(yaml.safe_load(SERVICE["spec"]["serveConfigV2"]))
    (application,) = served.applications
    module, _, name = application.import_path.partition(":")
    assert (module, name) == ("mosstalk.fleet", "app")
    path = Path(application.args["config"])
    for pod in PODS:
        (container,) = pod["containers"]
        mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        (volume,) = [each for each in pod["volumes"] if each["name"] == mounts[str(path.parent)]]
        assert "configMap" in volume
        assert served.http_options.port in [each["containerPort"] for each in container["ports"]]


def test_there_is_a_card_for_each_replica_and_time_to_finish_its_replies() -> None:
    (container,) = PODS[1]["containers"]
    cards = WORKERS["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert cards >= yaml.safe_load(FLEET)["replicas"]
    assert PODS[1]["terminationGracePeriodSeconds"] >= FleetConfig().drain_s
