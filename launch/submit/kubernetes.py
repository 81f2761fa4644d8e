"""The manifest of a run on Kubernetes: an Indexed Job, one pod per node, and the headless service by which pods meet.

Every pod is one machine, whose first process is `megalite-node`: it hands signals on, writes attempts down, and ends
with an exit code by which the Job's failure policy decides. See
https://kubernetes.io/docs/concepts/workloads/controllers/job/.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..base.errors import UserError
from ..base.outcome import DONE, STOPPED
from ..base.run_folder import NODE
from ..base.yaml_text import yaml_text
from ..supervise.attempts_without_supervisor import FINAL_CODES
from .overlay import overlaid

LABEL = re.compile(r"[a-z]([a-z0-9-]{0,51}[a-z0-9])?")  # room for the numbers that Kubernetes adds
CLAIM = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?):(/[^:]*)")
QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTP]i?)?")
OBJECT = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")  # the name of one
KEY = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")  # name of a label or a resource
WORD = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")  # value of a label
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
TAINT = re.compile(r"(?P<key>[^=:]+)(=(?P<value>[^=:]*))?(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?")
QUEUE = "kueue.x-k8s.io/queue-name"
PORT = 29400
CONTAINER = "megalite"
MAX_BACKOFF_LIMIT = 2**31 - 1  # largest value of a backoffLimit, which is an int32
JOB = "MEGALITE_JOB"  # environment of pods: what distinguishes this Job from others of the same name
UID = "metadata.labels['batch.kubernetes.io/controller-uid']"


@dataclass(frozen=True)
class Pods:
    """Request to Kubernetes, and the command to run there."""

    name: str
    image: str
    nodes: int
    ranks: int  # on each node
    gpu: str  # the resource that a rank takes one of; empty for CPUs
    cpus: str  # CPUs of each node; empty: no request
    memory: str  # memory of each node; empty: no request
    claims: Sequence[str]  # CLAIM:PATH, persistent volumes that all pods see
    retries: int  # failures of all pods together, after which the Job is given up
    grace: int  # seconds that a pod has to save when it must go
    directory: str  # in which the command runs, as pods see it
    run: str  # the folder of the run, as pods see it
    arguments: Sequence[str]  # arguments of megalite train
    shm: str  # size of /dev/shm on each node
    namespace: str | None = None
    resources: Mapping[str, str] = field(default_factory=dict)  # by name, on each node beside GPUs
    rdma: Mapping[str, str] = field(default_factory=dict)  # likewise, of the kind that registers memory
    host_network: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Sequence[str] = ()  # each of whose keys is a variable
    tolerations: Sequence[str] = ()  # KEY[=VALUE][:EFFECT]
    node_labels: Mapping[str, str] = field(default_factory=dict)  # required on nodes
    annotations: Mapping[str, str] = field(default_factory=dict)  # on pods
    priority: str = ""  # a class
    queue: str = ""  # name in Kueue
    pull_secrets: Sequence[str] = ()
    account: str = ""  # service account
    user: str = ""  # UID[:GID]; empty: the image's


def manifest(pods: Pods, overlays: Sequence[dict[str, Any]] = ()) -> str:
    """The text of the manifest: a service and a job. Raises UserError for names that Kubernetes would refuse.

    overlays: what `read_overlay` has found, to be laid over both.
    """
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
    queued = {**metadata, "labels": {**metadata["labels"], **({QUEUE: pods.queue} if pods.queue else {})}}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": queued, "spec": _job(pods)}
    documents = overlaid([service, job], overlays)
    containers = documents[1].get("spec", {}).get("template", {}).get("spec", {}).get("containers", [])
    if not any(container.get("name") == CONTAINER for container in containers):
        raise UserError(f"--overlay: Job: has removed the container {CONTAINER}, which trains")
    head = "# Written by megalite-launch. Start it with:  kubectl apply -f THIS_FILE\n"
    return head + "---\n".join(map(yaml_text, documents))


def _job(pods: Pods) -> dict[str, Any]:
    return {
        "completionMode": "Indexed",
        "completions": pods.nodes,
        "parallelism": pods.nodes,
        "backoffLimit": min(
            pods.retries * pods.nodes, MAX_BACKOFF_LIMIT
        ),  # which counts pods: a failure takes all with it
        "podReplacementPolicy": "Failed",  # a pod that is still saving has no second one beside it
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": _on_codes(set(FINAL_CODES) - {DONE})},
                {"action": "Ignore", "onExitCodes": _on_codes({STOPPED})},
            ]
        },
        "template": {
            "metadata": {
                "labels": {"app": pods.name},
                **({"annotations": dict(pods.annotations)} if pods.annotations else {}),
            },
            "spec": _pod(pods),
        },
    }


def _on_codes(codes: Collection[int]) -> dict[str, Any]:
    return {"containerName": CONTAINER, "operator": "In", "values": sorted(codes)}


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _pod(pods: Pods) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": pods.shm}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    for number, claim in enumerate(pods.claims):
        name, path = claim.split(":", 1)
        volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": name}})
        mounts.append({"name": f"claim-{number}", "mountPath": path})
    return {
        "subdomain": pods.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": pods.grace,
        **_place(pods),
        **_identity(pods),
        "containers": [
            {
                "name": CONTAINER,
                "image": pods.image,
                "workingDir": pods.directory,
                "env": [
                    *(_field(JOB, UID), _field(NODE, "spec.nodeName")),
                    *({"name": name, "value": _plain(value)} for name, value in pods.env.items()),
                ],
                **({"envFrom": [{"secretRef": {"name": name}} for name in pods.secrets]} if pods.secrets else {}),
                # Without a shell around it: the first process of a container gets its signals.
                "command": [
                    *("megalite-node", "--nodes", str(pods.nodes), "--node-rank", "$(JOB_COMPLETION_INDEX)"),
                    *("--ranks", str(pods.ranks), "--master", f"{pods.name}-0.{pods.name}", "--port", str(PORT)),
                    *("--run", _plain(pods.run), "--job", f"$({JOB})", "--", "megalite", "train"),
                    *map(_plain, pods.arguments),
                ],
                "resources": _resources(pods),
                "securityContext": _rights(pods),
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }


def _resources(pods: Pods) -> dict[str, Any]:
    # Memory is limited to what is requested, so that a pod is none of the first to be evicted. Cores are not limited: a
    # rank that is throttled holds up all others.
    bounded: dict[str, Any] = {**({pods.gpu: pods.ranks} if pods.gpu else {}), **pods.resources, **pods.rdma}
    bounded |= {"memory": pods.memory} if pods.memory else {}
    return {"limits": bounded, "requests": {**bounded, **({"cpu": pods.cpus} if pods.cpus else {})}}


def _place(pods: Pods) -> dict[str, Any]:
    """Place of pods: each runs on a node of its own, as `megalite-node` takes a pod for a machine."""
    apart = {"labelSelector": {"matchLabels": {"job-name": pods.name}}, "topologyKey": "kubernetes.io/hostname"}
    tolerations = [_toleration(text) for text in dict.fromkeys([*([pods.gpu] if pods.gpu else ()), *pods.tolerations])]
    return {
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}},
        **({"tolerations": tolerations} if tolerations else {}),
        **({"nodeSelector": dict(pods.node_labels)} if pods.node_labels else {}),
        **({"priorityClassName": pods.priority} if pods.priority else {}),
        **({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if pods.host_network else {}),
    }


def _toleration(text: str) -> dict[str, str]:
    found = TAINT.fullmatch(text)
    if not found or not KEY.fullmatch(found["key"]) or not WORD.fullmatch(found["value"] or ""):
        effects = "NoSchedule, PreferNoSchedule or NoExecute"
        raise UserError(
            f"--toleration {text}: must be KEY[=VALUE][:EFFECT], as kubectl taint has it; EFFECT: {effects}"
        )
    value = {"operator": "Exists"} if found["value"] is None else {"operator": "Equal", "value": found["value"]}
    return {"key": found["key"], **value, **({"effect": found["effect"]} if found["effect"] else {})}


def _identity(pods: Pods) -> dict[str, Any]:
    """User and rights of pods. Pods ask nothing of Kubernetes, so they get no token for it."""
    uid, _, gid = pods.user.partition(":")
    user = {"runAsNonRoot": uid != "0", "runAsUser": int(uid)} if uid else {}
    group = {"runAsGroup": int(gid), "fsGroup": int(gid), "fsGroupChangePolicy": "OnRootMismatch"} if gid else {}
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **({"serviceAccountName": pods.account} if pods.account else {}),
        **({"imagePullSecrets": [{"name": name} for name in pods.pull_secrets]} if pods.pull_secrets else {}),
        "securityContext": {**user, **group, "seccompProfile": {"type": "RuntimeDefault"}},
    }


def _rights(pods: Pods) -> dict[str, Any]:
    """Rights of pods: no more than the image's user has. Registering memory for RDMA takes the right to lock it.

    Root keeps its capabilities: without them it could not write to volumes of others.
    """
    capabilities = {**({"add": ["IPC_LOCK"]} if pods.rdma else {}), **({"drop": ["ALL"]} if pods.user else {})}
    return {"allowPrivilegeEscalation": False, **({"capabilities": capabilities} if capabilities else {})}


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
    amounts = [("--cpus", pods.cpus), ("--memory", pods.memory), ("--shm", pods.shm)]
    amounts += [(f"--resource {name}", amount) for name, amount in pods.resources.items()]
    amounts += [(f"--rdma {name}", amount) for name, amount in pods.rdma.items()]
    for option, amount in amounts:
        if amount and not QUANTITY.fullmatch(amount):
            raise UserError(f"{option} {amount}: must be a quantity, as in 96 or 1500Gi")
    names: dict[str, tuple[re.Pattern[str], Iterable[str]]] = {
        "--gpu": (KEY, [pods.gpu]), "--resource": (KEY, pods.resources), "--rdma": (KEY, pods.rdma),
        "--node-label": (KEY, pods.node_labels), "--annotation": (KEY, pods.annotations), "--env": (VARIABLE, pods.env),
        "--env-from": (OBJECT, pods.secrets), "--pull-secret": (OBJECT, pods.pull_secrets),
        "--queue": (OBJECT, [pods.queue]), "--priority": (OBJECT, [pods.priority]),
        "--service-account": (OBJECT, [pods.account]),
    }  # fmt: skip
    for option, (pattern, given) in names.items():
        for name in filter(None, given):
            if not pattern.fullmatch(name):
                raise UserError(f"{option} {name}: is no name that Kubernetes takes there")
    for name in pods.env.keys() & {JOB, NODE}:
        raise UserError(f"--env {name}: is set by megalite-launch; leave it out")
    for name, value in pods.node_labels.items():
        if not WORD.fullmatch(value):
            raise UserError(f"--node-label {name}={value}: must be the value of a label: letters, digits, - _ .")
    if pods.user and not re.fullmatch(r"\d{1,10}(:\d{1,10})?", pods.user):
        raise UserError(f"--user {pods.user}: must be UID or UID:GID, both numbers")
