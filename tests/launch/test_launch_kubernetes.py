"""The manifest for Kubernetes: its fields, by the API of 1.29 to 1.33, what options change, and a user's overlays."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_schema import wrong

from megalite_launch.base.errors import UserError
from megalite_launch.submit.kubernetes import manifest
from megalite_launch.submit.kubernetes_options import kubernetes_options, pods_of
from megalite_launch.submit.overlay import read_overlay

EVERYTHING = (
    "--rdma rdma/hca=8 --resource hugepages-2Mi=5Gi --env NCCL_IB_HCA=mlx5 --env NCCL_DEBUG=INFO --env-from tokens "
    "--toleration dedicated=train:NoSchedule --toleration spot --node-label pool=h100 --priority high --queue team "
    "--annotation k8s.v1.cni.cncf.io/networks=ib --pull-secret registry --service-account trainer --user 1000:2000 "
    "--cpus 96 --memory 1500Gi --shm 256Gi --host-network --namespace ours --claim shared:/shared"
)


def documents(words: str = "", *overlays: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    parser = argparse.ArgumentParser()
    kubernetes_options(parser)
    args = parser.parse_args(["--nodes", "2", "--image", "megalite:1", *words.split()])
    args.arguments = ["config.yaml"]
    text = manifest(pods_of(args, Path("/shared/runs/run")), [each for path in overlays for each in read_overlay(path)])
    service, job = yaml.safe_load_all(text)
    return service, job


def pod_of(job: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return pod, container


@pytest.mark.parametrize("words", ["", "--cpus-only", "--gpus-per-node 1", EVERYTHING])
def test_every_field_is_known_from_1_29_to_1_33(words: str) -> None:
    service, job = documents(words)
    assert [*wrong(service, "Service"), *wrong(job, "Job")] == []


def test_the_check_finds_what_the_api_refuses() -> None:
    _, job = documents()
    pod, container = pod_of(job)
    pod["tolerations"][0]["operater"] = "Exists"
    container["env"].append({"name": "SIZE", "value": 1})
    del container["name"]
    assert sorted(what.rpartition("]")[2] for what in wrong(job, "Job")) == [
        ".value: 1 is no string",
        ": Container needs name",
        ": Toleration has no operater",
    ]


def test_defaults_are_those_of_a_node_of_gpus() -> None:
    _, job = documents()
    pod, container = pod_of(job)
    bounded = {"nvidia.com/gpu": 8, "memory": "512Gi"}
    assert container["resources"] == {"limits": bounded, "requests": {**bounded, "cpu": "64"}}
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}} in pod["volumes"]
    (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert apart["labelSelector"]["matchLabels"] == {"job-name": job["metadata"]["name"]}
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)
    assert pod["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}
    assert container["securityContext"] == {"allowPrivilegeEscalation": False}
    _, alone = pod_of(documents("--cpus-only")[1])
    assert alone["resources"] == {"limits": {}, "requests": {}}


def test_every_option_has_its_field() -> None:
    service, job = documents(EVERYTHING)
    pod, container = pod_of(job)
    assert (service["metadata"]["namespace"], job["metadata"]["namespace"]) == ("ours", "ours")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert "kueue.x-k8s.io/queue-name" not in service["metadata"]["labels"]
    assert job["spec"]["template"]["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/networks": "ib"}
    bounded = {"nvidia.com/gpu": 8, "hugepages-2Mi": "5Gi", "rdma/hca": "8", "memory": "1500Gi"}
    assert container["resources"] == {"limits": bounded, "requests": {**bounded, "cpu": "96"}}
    assert container["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"], "drop": ["ALL"]}
    assert container["env"][2:] == [{"name": "NCCL_IB_HCA", "value": "mlx5"}, {"name": "NCCL_DEBUG", "value": "INFO"}]
    assert container["envFrom"] == [{"secretRef": {"name": "tokens"}}]
    assert pod["tolerations"][1:] == [
        {"key": "dedicated", "operator": "Equal", "value": "train", "effect": "NoSchedule"},
        {"key": "spot", "operator": "Exists"},
    ]
    assert pod["nodeSelector"] == {"pool": "h100"}
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert (pod["priorityClassName"], pod["serviceAccountName"]) == ("high", "trainer")
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    wanted = {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 2000, "fsGroup": 2000}
    assert wanted.items() <= pod["securityContext"].items()
    assert pod["volumes"][0]["emptyDir"]["sizeLimit"] == "256Gi"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--rdma rdma/hca=many", "--rdma rdma/hca many: must be a quantity"),
        ("--resource a/b/c=1", "--resource a/b/c: is no name"),
        ("--env 1A=x", "--env 1A: is no name"),
        ("--env MEGALITE_JOB=x", "--env MEGALITE_JOB: is set by megalite-launch"),
        ("--env-from A_b", "--env-from A_b: is no name"),
        ("--toleration a=b:Never", "--toleration a=b:Never: must be KEY[=VALUE][:EFFECT]"),
        ("--node-label pool=a/b", "--node-label pool=a/b: must be the value of a label"),
        ("--priority High", "--priority High: is no name"),
        ("--gpu nvidia/com/gpu", "--gpu nvidia/com/gpu: is no name"),
        ("--user root", "--user root: must be UID or UID:GID"),
        ("--shm big", "--shm big: must be a quantity"),
    ],
)
def test_bad_values_are_told_with_their_option(words: str, told: str) -> None:
    with pytest.raises(UserError, match="^" + told.replace("[", r"\[").replace("]", r"\]")):
        documents(words)


def test_an_overlay_has_the_last_word(tmp_path: Path) -> None:
    """Each of JSON and YAML, laid over one after another."""
    container = {
        "name": "megalite",
        "securityContext": {"privileged": True},
        "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
        "volumeMounts": [{"name": "ib", "mountPath": "/dev/infiniband"}],
    }
    volume = {"name": "ib", "hostPath": {"path": "/dev/infiniband"}}
    pod = {"containers": [container], "volumes": [volume], "affinity": None, "schedulerName": "volcano"}
    (tmp_path / "a.json").write_text(json.dumps({"kind": "Job", "spec": {"template": {"spec": pod}}}))
    (tmp_path / "b.yaml").write_text(
        "kind: Job\nspec: {suspend: true, template: {spec: {schedulerName: null}}}\n---\n"
        "apiVersion: v1\nkind: Service\nmetadata: {name: run, annotations: {a: b}}\n"
    )
    service, job = documents("--env NCCL_DEBUG=INFO --env A=$$(B)", tmp_path / "a.json", tmp_path / "b.yaml")
    assert [*wrong(service, "Service"), *wrong(job, "Job")] == []
    pod, container = pod_of(job)
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "privileged": True}
    assert [each.get("value") for each in container["env"] if each["name"] == "NCCL_DEBUG"] == ["WARN"]
    assert {"name": "A", "value": "$$$$(B)"} in container["env"]  # as Kubernetes writes a $ that is meant
    assert [each["mountPath"] for each in container["volumeMounts"]] == ["/dev/infiniband", "/dev/shm"]
    assert [each["name"] for each in pod["volumes"]] == ["ib", "shm"]
    assert container["command"][0] == "megalite-node"
    assert "affinity" not in pod
    assert "schedulerName" not in pod
    assert job["spec"]["suspend"] is True
    assert service["metadata"]["annotations"] == {"a": "b"}
