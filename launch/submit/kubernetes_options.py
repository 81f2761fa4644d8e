"""Options of `megalite-launch kubernetes`, and what follows from them.

Amounts that are not given are those of a node of GPUs, by its ranks: enough for what megalite does, and little enough
for machines of all kinds.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from ..base.arguments import cluster_options, count, pair
from .kubernetes import Pods
from .slurm_script import CORES

GRACE = 360  # seconds that a pod has to save: a step, a save and some reserve
MEMORY, SHM = 64, 8  # Gi of each rank


def kubernetes_options(kubernetes: argparse.ArgumentParser) -> None:
    cluster_options(kubernetes)
    add = kubernetes.add_argument
    add("--submit", action="store_true", help="apply the manifest once it is shown; else it is shown and written")
    add("--overlay", action="append", default=[], metavar="FILE",
        help="fields of your own, laid over by strategic merge as kustomize does (JSON, YAML); repeatable")  # fmt: skip
    add("--image", required=True, metavar="IMAGE", help="that has megalite installed")
    add("--name", metavar="NAME", help="of the job (default: that of the run)")
    add("--namespace", metavar="NAME", help="where to start it")
    add("--claim", action="append", default=[], metavar="CLAIM:PATH", help="a volume all pods see; repeatable")
    add("--gpu", default="nvidia.com/gpu", metavar="RESOURCE", help="default: nvidia.com/gpu; its taint is tolerated")
    add("--cpus", metavar="Q", help=f"requested for each node, as in 96 (default: {CORES} a GPU)")
    add("--memory", metavar="Q", help=f"of each node, as in 1500Gi: request and limit (default: {MEMORY}Gi a GPU)")
    add("--shm", metavar="Q", help=f"of each node, counts as memory: size of /dev/shm (default: {SHM}Gi a rank)")
    for name, what in (
        ("resource", "of each node: another resource, as vendor.com/device=8"),
        ("rdma", "likewise, as rdma/hca=8; pods may then lock memory (IPC_LOCK)"),
        ("env", "a variable, as NCCL_IB_HCA=mlx5"),
        ("node-label", "nodes must have it"),
        ("annotation", "of pods, as k8s.v1.cni.cncf.io/networks=NETWORK"),
    ):
        add(f"--{name}", action="append", type=pair, default=[], metavar="NAME=VALUE", help=f"{what}; repeatable")
    add("--host-network", action="store_true", help="pods use the network of their node")
    for name, word, what in (
        ("env-from", "SECRET", "each key of it is a variable, as WANDB_API_KEY"),
        ("toleration", "KEY[=VALUE][:EFFECT]", "as kubectl taint has it"),
        ("pull-secret", "SECRET", "for the registry of the image"),
    ):
        add(f"--{name}", action="append", default=[], metavar=word, help=f"{what}; repeatable")
    add("--priority", default="", metavar="CLASS", help="a priority class")
    add("--queue", default="", metavar="NAME", help="of Kueue")
    add("--service-account", default="", metavar="NAME", help="of pods")
    add("--user", default="", metavar="UID[:GID]", help="as whom pods run, without capabilities (default: the image's)")
    add("--retries", type=count, default=100, metavar="N", help="failures in all (default: 100)")
    add("--grace", type=count, default=GRACE, metavar="S", help=f"seconds that an evicted pod has to save ({GRACE})")


def pods_of(args: argparse.Namespace, run: Path) -> Pods:
    """Read from the options what to ask Kubernetes for, for a run whose folder is `run`."""
    ranks: int = args.gpus_per_node
    gpus = 0 if args.cpus_only else ranks
    return Pods(
        name=args.name or re.sub(r"[^a-z0-9-]+", "-", run.name.lower()).strip("-"),
        image=args.image,
        nodes=args.nodes,
        ranks=ranks,
        gpu=args.gpu if gpus else "",
        cpus=args.cpus or (f"{int(CORES) * gpus}" if gpus else ""),
        memory=args.memory or (f"{MEMORY * gpus}Gi" if gpus else ""),
        shm=args.shm or f"{SHM * ranks}Gi",
        claims=args.claim,
        retries=args.retries,
        grace=args.grace,
        directory=os.getcwd(),
        run=str(run),
        arguments=args.arguments,
        namespace=args.namespace,
        resources=dict(args.resource),
        rdma=dict(args.rdma),
        host_network=args.host_network,
        env=dict(args.env),
        secrets=args.env_from,
        tolerations=args.toleration,
        node_labels=dict(args.node_label),
        annotations=dict(args.annotation),
        priority=args.priority,
        queue=args.queue,
        pull_secrets=args.pull_secret,
        account=args.service_account,
        user=args.user,
    )
