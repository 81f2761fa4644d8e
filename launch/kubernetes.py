"""The manifest of a run on Kubernetes: an Indexed Job, one pod per node, and the headless service by which pods meet.

Every pod is one machine, whose first process is `megalite-node`: it hands signals on, writes attempts down, and ends
with an exit code by which the Job's failure policy decides. See
https://kubernetes.io/docs/concepts/workloads/controllers/job/.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import UserError
from .journal import FINAL
from .layout import NODE
from .outcome import DONE, STOPPED
from .yaml_text import yaml_text

LABEL = re.compile(r"[a-z]([a-z0-9-]{0,51}[a-z0-9])?")  # room for the numbers that Kubernetes adds
CLAIM = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?):(/[^:]*)")
QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTP]i?)?")
PORT = 29400
MOST = 2**31 - 1  # of a backoffLimit
JOB = "MEGALITE_JOB"  # environment of pods: what distinguishes this Job from others of the same name
UID = "metadata.labels['batch.kubernetes.io/controller-uid']"


@dataclass(frozen=True)
class Pods:
    """What to ask Kubernetes for, and what to run there."""

    name: str
    image: str
    nodes: int
    ranks: int  # on each node
    gpu: str  # the resource that a rank takes one of; empty for CPUs
    cpus: str  # of each node; empty: no request
    memory: str  # of each node; empty: no request
    claims: Sequence[str]  # CLAIM:PATH, persistent volumes that all pods see
    retries: int  # failures of all pods together, after which the Job is given up
    grace: int  # seconds that a pod has to save when it must go
    directory: str  # in which the command runs, as pods see it
    run: str  # the folder of the run, as pods see it
    arguments: Sequence[str]  # of megalite train
    namespace: str | None = None


def manifest(pods: Pods) -> str:
    """The text of the manifest: a service and a job. Raises UserError for names that Kubernetes would refuse."""
    _check(pods)
    metadata: dict[str, Any] = {"name": pods.name, "labels": {"app": pods.name}}
    if pods.namespace is not None:
        metadata["namespace"] = pods.namespace
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": pods.name},
            "ports": [{"name": "master", "port": PORT}],
        },
    }
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": _job(pods)}
    head = "# Written by megalite-launch. Start it with:  kubectl apply -f THIS_FILE\n"
    return f"{head}{yaml_text(service)}---\n{yaml_text(job)}"


def _job(pods: Pods) -> dict[str, Any]:
    return {
        "completionMode": "Indexed",
        "completions": pods.nodes,
        "parallelism": pods.nodes,
        "backoffLimit": min(pods.retries * pods.nodes, MOST),  # which counts pods: a failure takes all with it
        "podReplacementPolicy": "Failed",  # a pod that is still saving has no second one beside it
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": _on_codes(set(FINAL) - {DONE})},
                {"action": "Ignore", "onExitCodes": _on_codes({STOPPED})},
            ]
        },
        "template": {"metadata": {"labels": {"app": pods.name}}, "spec": _pod(pods)},
    }


def _on_codes(codes: Collection[int]) -> dict[str, Any]:
    return {"containerName": "megalite", "operator": "In", "values": sorted(codes)}


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _pod(pods: Pods) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    for number, claim in enumerate(pods.claims):
        name, path = claim.split(":", 1)
        volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": name}})
        mounts.append({"name": f"claim-{number}", "mountPath": path})
    resources = {pods.gpu: pods.ranks} if pods.gpu else {}
    requests = {name: amount for name, amount in (("cpu", pods.cpus), ("memory", pods.memory)) if amount}
    return {
        "subdomain": pods.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": pods.grace,
        "containers": [
            {
                "name": "megalite",
                "image": pods.image,
                "workingDir": pods.directory,
                "env": [_field(JOB, UID), _field(NODE, "spec.nodeName")],
                # Without a shell around it: the first process of a container gets its signals.
                "command": [
                    *("megalite-node", "--nodes", str(pods.nodes), "--node-rank", "$(JOB_COMPLETION_INDEX)"),
                    *("--ranks", str(pods.ranks), "--master", f"{pods.name}-0.{pods.name}", "--port", str(PORT)),
                    *("--run", _plain(pods.run), "--job", f"$({JOB})", "--", "megalite", "train"),
                    *map(_plain, pods.arguments),
                ],
                "resources": {"limits": resources, "requests": {**resources, **requests}},
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }


def _plain(word: str) -> str:
    """A word of a command in which Kubernetes replaces nothing."""
    return word.replace("$", "$$")


def _check(pods: Pods) -> None:
    if not LABEL.fullmatch(pods.name):
        rule = "small letters, digits and dashes, at most 53, a letter first"
        raise UserError(f"--name {pods.name}: must be a name for Kubernetes: {rule}")
    if not pods.image or any(character.isspace() for character in pods.image):
        raise UserError(f"--image {pods.image!r}: must be an image that has megalite installed")
    for claim in pods.claims:
        if not CLAIM.fullmatch(claim):
            raise UserError(f"--claim {claim}: must be CLAIM:PATH, a persistent volume claim and where pods see it")
    for option, amount in (("--cpus", pods.cpus), ("--memory", pods.memory)):
        if amount and not QUANTITY.fullmatch(amount):
            raise UserError(f"{option} {amount}: must be a quantity, as in 96 or 1500Gi")
