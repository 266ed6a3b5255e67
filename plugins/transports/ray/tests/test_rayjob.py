"""The RayJob of `examples/cluster`: its fields are those of KubeRay, and its command and run file are valid."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from click import Context
from packaging.specifiers import SpecifierSet

from rlhf_cli.commands.train import train
from rlhf_cli.main import cli
from rlhf_core.config.resolve import resolve
from rlhf_ray.config import RayConfig

ROOT = Path(__file__).parents[4]
FOLDER = ROOT / "examples" / "cluster"

# The parts of ray.io/v1 (KubeRay 1.7) that are not Kubernetes' own: field -> type.
JOB = {
    "activeDeadlineSeconds": int,
    "backoffLimit": int,
    "clusterSelector": dict,
    "deletionStrategy": dict,
    "entrypoint": str,
    "entrypointNumCpus": float,
    "entrypointNumGpus": float,
    "entrypointResources": str,
    "jobId": str,
    "managedBy": str,
    "metadata": dict,
    "preRunningDeadlineSeconds": int,
    "rayClusterSpec": dict,
    "runtimeEnvYAML": str,
    "shutdownAfterJobFinishes": bool,
    "submissionMode": str,
    "submitterConfig": dict,
    "submitterPodTemplate": dict,
    "suspend": bool,
    "ttlSecondsAfterFinished": int,
}
CLUSTER = {
    "autoscalerOptions": dict,
    "enableInTreeAutoscaling": bool,
    "gcsFaultToleranceOptions": dict,
    "headGroupSpec": dict,
    "rayVersion": str,
    "workerGroupSpecs": list,
}
HEAD = {"rayStartParams": dict, "template": dict, "headService": dict, "serviceType": str, "enableIngress": bool}
WORKERS = {
    "groupName": str,
    "idleTimeoutSeconds": int,
    "maxReplicas": int,
    "minReplicas": int,
    "numOfHosts": int,
    "rayStartParams": dict,
    "replicas": int,
    "scaleStrategy": dict,
    "suspend": bool,
    "template": dict,
}
POD = {"securityContext", "containers", "volumes"}
CONTAINER = {"name", "image", "env", "resources", "volumeMounts"}


def check(part: Mapping[str, Any], fields: Mapping[str, type]) -> None:
    for name, value in part.items():
        assert type(value) is fields[name], name


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    documents = yaml.safe_load_all((FOLDER / "rayjob.yaml").read_text(encoding="utf-8"))
    return {each["kind"]: each for each in documents}


@pytest.fixture(scope="module")
def job(parts: dict[str, Any]) -> Any:
    return parts["RayJob"]["spec"]


@pytest.fixture(scope="module")
def run(parts: dict[str, Any]) -> Any:
    return yaml.safe_load(parts["ConfigMap"]["data"]["run.yaml"])


def pods(job: Any) -> Iterator[Any]:
    cluster = job["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield group["template"]["spec"]


def test_its_fields_are_kuberays(parts: dict[str, Any], job: Any) -> None:
    assert parts.keys() == {"ConfigMap", "PersistentVolumeClaim", "RayJob"}
    assert parts["RayJob"].keys() == {"apiVersion", "kind", "metadata", "spec"}
    assert parts["RayJob"]["apiVersion"] == "ray.io/v1"
    check(job, JOB)
    check(job["rayClusterSpec"], CLUSTER)
    check(job["rayClusterSpec"]["headGroupSpec"], HEAD)
    for group in job["rayClusterSpec"]["workerGroupSpecs"]:
        check(group, WORKERS)
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    starts = [job["rayClusterSpec"]["headGroupSpec"], *job["rayClusterSpec"]["workerGroupSpecs"]]
    assert all(isinstance(value, str) for each in starts for value in each["rayStartParams"].values())
    assert job["submissionMode"] in ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")
    assert job["ttlSecondsAfterFinished"] == 0 or job["shutdownAfterJobFinishes"]


def test_what_its_pods_mount_exists(parts: dict[str, Any], job: Any) -> None:
    for pod in pods(job):
        assert pod.keys() <= POD
        volumes = {each["name"]: each for each in pod["volumes"]}
        assert (
            volumes["data"]["persistentVolumeClaim"]["claimName"] == parts["PersistentVolumeClaim"]["metadata"]["name"]
        )
        assert volumes["run"]["configMap"]["name"] == parts["ConfigMap"]["metadata"]["name"]
        for container in pod["containers"]:
            assert container.keys() <= CONTAINER
            assert {each["name"] for each in container["volumeMounts"]} <= volumes.keys()
            named = [each["name"] for each in container["env"] if re.search("TOKEN|KEY|SECRET", each["name"])]
            assert all("value" not in each for each in container["env"] if each["name"] in named)
    assert parts["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]


def test_all_nodes_have_one_image_and_the_pinned_ray(job: Any) -> None:
    assert len({container["image"] for pod in pods(job) for container in pod["containers"]}) == 1
    (pin,) = re.findall(r"^ray==(\S+)", (ROOT / "requirements" / "lock.txt").read_text(), re.MULTILINE)
    assert job["rayClusterSpec"]["rayVersion"] == pin
    manifest = tomllib.loads((ROOT / "plugins" / "transports" / "ray" / "pyproject.toml").read_text())
    (bounds,) = [each for each in manifest["project"]["dependencies"] if each.startswith("ray>")]
    assert job["rayClusterSpec"]["rayVersion"] in SpecifierSet(bounds.removeprefix("ray"))


def test_its_command_parses_and_its_paths_are_mounted(job: Any) -> None:
    program, command, *arguments = shlex.split(job["entrypoint"])
    assert (program, command) == ("rlhf", "train")
    with Context(train, parent=Context(cli)) as context:
        train.parse_args(context, list(arguments))
    assert context.params["transport"] == "ray" and context.params["resume"] == "auto"
    (container,) = next(pods(job))["containers"]
    mounts = tuple(each["mountPath"] + "/" for each in container["volumeMounts"])
    paths = [each for each in arguments if each.startswith("/")]
    assert len(paths) == 2 and all(path.startswith(mounts) for path in paths)


def test_its_run_file_is_valid_and_its_cluster_has_room_for_it(job: Any, run: Any) -> None:
    config = resolve(run).transport.config
    assert isinstance(config, RayConfig)
    assert config.trainer_restarts > 0
    wanted = config.num_makers * config.maker_gpus + config.num_trainers * config.trainer_gpus
    have = 0
    for group in job["rayClusterSpec"]["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        have += group["minReplicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert wanted == have
    assert job["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_its_image_is_built_on_a_target_of_the_projects() -> None:
    text = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    (base,) = re.findall(r"^ARG BASE=rlhf:(\w+)$", text, flags=re.M)
    assert f" AS {base}\n" in (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert "ray[default]==" in text and "ENTRYPOINT []" in text and text.rstrip().splitlines()[-3:][0] == "USER rlhf"
