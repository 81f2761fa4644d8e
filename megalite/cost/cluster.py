"""Clusters: what their GPUs, nodes and network can do, read from a YAML file. Imports no torch.

The files in configs/cluster hold the figures of datasheets, each with its source. Rates are per GPU and, for links, in
one direction.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from megalite.base.errors import InputError, listing
from megalite.base.json_shape import TEXT, Each, OrNull, ValueKind, misfits
from megalite.config.presets import preset_or_file, presets
from megalite.config.yaml import read_mapping
from megalite.cost.slowest_gpu import MAX_SPREAD

LARGEST_RANGE = 1e9  # between the least and the largest value of a figure
MAX_PEAK_RATIO = 1.5  # times the peak: no product that is measured is as fast
RING_SHARE = 0.8  # share of NVLink's bandwidth in rings: 0.78 of NVLink 3, 0.81 of 4, 0.76 of 5 (configs/cluster)
DEFAULT_CLUSTERS = {"a100": "a100_80gb", "h100": "h100_sxm"}  # the cluster that a GPU's plain name means
PRECISIONS = ("bf16", "fp16", "fp8", "mxfp8", "fp32", "fp64")


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    peak: dense FLOP/s by precision. measured: the best that a matrix product has reached, where somebody measured it.
    multiprocessors: units that share the tiles of a matrix product. memory: bytes. bandwidth: of memory, bytes/s.
    power: its limit in watts. host: bytes/s to host memory, and as many from there. spread: relative standard deviation
    of the speeds of a cluster's GPUs; None where nobody has measured it.
    """

    name: str
    peak: Mapping[str, float]
    measured: Mapping[str, float]
    multiprocessors: int
    memory: float
    bandwidth: float
    power: float
    host: float
    spread: float | None = None


@dataclass(frozen=True)
class Link:
    """Connection between GPUs.

    bandwidth: bytes/s that each can send. latency: seconds that a collective takes to start. measured: bytes/s that
    large all-gathers and reductions have reached; without one, RING_SHARE of the bandwidth is taken.
    """

    bandwidth: float
    latency: float
    measured: float | None = None

    @property
    def reached(self) -> float:
        """Bytes/s of each GPU in large collectives."""
        return self.measured or RING_SHARE * self.bandwidth

    def faster(self, factor: float) -> "Link":
        """A link with `factor` times the rates."""
        measured = self.measured and self.measured * factor
        return replace(self, bandwidth=self.bandwidth * factor, measured=measured)


@dataclass(frozen=True)
class Level:
    """GPUs that lie together: groups of `gpus`, in which each reaches all others through `link`."""

    gpus: int
    link: Link


@dataclass(frozen=True)
class Drive:
    """The drives of a node, together, on which files of `optim.placement` lie.

    read, write: bytes/s. endurance: bytes that may be written before they are worn out, as their makers rate them.
    assumed: nobody has said which drives there are.
    """

    read: float
    write: float
    endurance: float
    assumed: bool = False


# One Samsung PM9D3a of 7.68 TB (PCIe 5.0, 1 drive write a day for five years), see
# https://www.syspartsdirect.com/en/product-detail/Samsung-MZWL67T6HBLC-PM9D3a-7.68TB-Enterprise-SSD-1170.html
ASSUMED_DRIVE = Drive(read=12e9, write=6.8e9, endurance=14_016e12, assumed=True)


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal GPUs.

    levels: from those that are nearest to each other (boards or pairs, where a node has any) to the node. network:
    between nodes. price: US dollars for a GPU and an hour. sources: of the figures, by key. drive: of every node.
    """

    name: str
    gpu: Gpu
    levels: tuple[Level, ...]
    network: Link
    price: float
    sources: Mapping[str, str]
    drive: Drive = ASSUMED_DRIVE

    @property
    def gpus_per_node(self) -> int:
        return self.levels[-1].gpus


def _at_most(most: float, unit: str) -> ValueKind:
    """A number in a unit in which no more than `most`, and not far less, is likely: others are in another unit."""
    least = most / LARGEST_RANGE
    return ValueKind(
        f"a number of {unit} from {least:g} to {most:,}",
        lambda value: type(value) in (int, float) and least <= value <= most,
    )


SPEED, BANDWIDTH, MEMORY = _at_most(1_000_000, "TFLOP/s"), _at_most(1_000_000, "GB/s"), _at_most(10_000, "GiB")
SPREAD = ValueKind(
    f"a number from 0 to {MAX_SPREAD}", lambda value: type(value) in (int, float) and 0 <= value <= MAX_SPREAD
)
COUNT = ValueKind("a whole number of at least 1", lambda value: type(value) is int and 1 <= value < 1 << 20)
LINK = {"bandwidth": BANDWIDTH, "latency": _at_most(1_000_000, "microseconds")}
FILE = {
    "gpu": {
        "name": TEXT,
        "peak": Each(SPEED),
        "measured": Each(SPEED),
        "multiprocessors": COUNT,
        "memory": MEMORY,
        "bandwidth": BANDWIDTH,
        "power": _at_most(10_000, "watts"),
        "host": BANDWIDTH,
        "spread": OrNull(SPREAD),
    },
    "island": OrNull({"gpus": COUNT, **LINK}),
    "node": {"gpus": COUNT, **LINK, "measured": OrNull(BANDWIDTH)},
    "network": LINK,
    "drive": OrNull({"read": BANDWIDTH, "write": BANDWIDTH, "endurance": _at_most(1_000_000, "TB")}),
    "price": _at_most(1_000_000, "US dollars"),
    "sources": Each(TEXT),
}


def known_clusters() -> tuple[str, ...]:
    """The names of the clusters that megalite comes with."""
    return tuple(presets("cluster"))


def load_cluster(name: str, asked_by: str = "--cluster ") -> Cluster:
    """The cluster of that name, or in the YAML file of that path. Raises InputError for a file that is none.

    asked_by: what stands before the name in a message.
    """
    return read_cluster(cluster_path(name, asked_by))


def cluster_path(name: str, asked_by: str = "--cluster ") -> Path:
    """The file at the path `name`, or of the cluster of that name. Raises InputError if it can be neither."""
    return preset_or_file(DEFAULT_CLUSTERS.get(name.lower(), name), ("cluster",), asked_by=asked_by)


def read_cluster(path: Path) -> Cluster:
    """The cluster in a file; units in files are TFLOP/s, GB/s, GiB, TB, watts and microseconds."""
    fields = read_mapping(path)
    fields.setdefault("island", None)
    fields.setdefault("drive", None)
    gpu = fields.get("gpu")
    if isinstance(gpu, dict):
        gpu.setdefault("measured", {})
        gpu.setdefault("spread", None)
    if isinstance(fields.get("node"), dict):
        fields["node"].setdefault("measured", None)
    if problem := next(misfits(fields, FILE, str(path)), None):
        raise InputError(problem)
    gpu = fields["gpu"]
    for key in ("peak", "measured"):
        if unknown := [name for name in gpu[key] if name not in PRECISIONS]:
            raise InputError(
                f"{path}: gpu: {key}: {unknown[0]!r:.100} is no precision; known are {listing(PRECISIONS)}"
            )
    if "bf16" not in gpu["peak"]:
        raise InputError(f"{path}: gpu: peak: bf16 is missing")
    for name in ("bf16", "fp8", "mxfp8"):  # float32 may be measured in TensorFloat-32, which has no peak here
        peak, measured = gpu["peak"].get(name, inf), gpu["measured"].get(name, 0)
        if measured > MAX_PEAK_RATIO * peak:
            rule = f"is more than {MAX_PEAK_RATIO} times its peak of {peak:g}; give both in TFLOP/s, without sparsity"
            raise InputError(f"{path}: gpu: measured: {name} = {measured:g}: {rule}")
    island, node = fields["island"], fields["node"]["gpus"]
    if island and (node % island["gpus"] or node == island["gpus"]):
        raise InputError(f"{path}: island: gpus = {island['gpus']}: must be a part of the {node} GPUs of a node")
    return Cluster(
        path.stem,
        Gpu(
            gpu["name"],
            _scaled(gpu["peak"], 1e12),
            _scaled(gpu["measured"], 1e12),
            gpu["multiprocessors"],
            gpu["memory"] * 2**30,
            gpu["bandwidth"] * 1e9,
            float(gpu["power"]),
            gpu["host"] * 1e9,
            gpu["spread"],
        ),
        tuple(Level(level["gpus"], _link(level)) for level in (fields["island"], fields["node"]) if level),
        _link(fields["network"]),
        float(fields["price"]),
        fields["sources"],
        _drive(fields["drive"]),
    )


def _drive(fields: Mapping[str, float] | None) -> Drive:
    if fields is None:
        return ASSUMED_DRIVE
    return Drive(fields["read"] * 1e9, fields["write"] * 1e9, fields["endurance"] * 1e12)


def _scaled(values: Mapping[str, float], unit: float) -> dict[str, float]:
    return {name: value * unit for name, value in values.items()}


def _link(fields: Mapping[str, Any]) -> Link:
    measured = fields.get("measured")
    return Link(fields["bandwidth"] * 1e9, fields["latency"] * 1e-6, measured and measured * 1e9)
