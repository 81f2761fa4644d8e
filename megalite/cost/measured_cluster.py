"""A cluster file with figures that were measured in place of those of datasheets.

`python -m megalite.cost.measured_cluster BASE OUT` reads the figures of megalite-preflight from its standard input, as
JSON. megalite-bench-device calls `write_measured`.
"""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from megalite.base.errors import InputError, counted, listing
from megalite.base.exit_codes import ExitCode
from megalite.base.files import check_output, write_new
from megalite.config.yaml import read_mapping
from megalite.cost.cluster import cluster_path, read_cluster
from megalite.cost.slowest_gpu import MAX_SPREAD

# Properties of a GPU that its driver gives, with the unit of cluster files; none where the value is taken as it is.
PROPERTIES = {"name": None, "multiprocessors": None, "memory": float(2**30), "power": 1.0}


def main() -> int:
    """Runs the program. Returns the exit code."""
    try:
        base, out = sys.argv[1:]
        write_measured(base, Path(out), json.load(sys.stdin))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    print(json.dumps({"written": out}))
    return ExitCode.DONE


def write_measured(
    base: str, out: Path, figures: Mapping[str, Any], by: str = "megalite-preflight", on: str | None = None
) -> None:
    """Write the cluster `base` (a name or a file) to `out`, with measured figures.

    figures: precision and matmul (FLOP/s of a GPU); and, if measured or read, products (FLOP/s by further precisions),
    spread (standard deviation of matmul, relative), host (bytes/s of the slower direction), copy (bytes/s read and
    written by a copy in the GPU's memory), name, multiprocessors, memory (bytes) and power (limit in watts) of the GPU,
    gpus (of a node), node and network (bytes/s of bus bandwidth for a GPU). Unmeasured figures stay, and so does
    the bandwidth of the GPU's memory: planner constants, fitted on datasheets, give the part of it that can be reached.
    by: the program that has measured. on: what it has measured, which by default is the number of `nodes` in figures.
    Raises InputError if a file is none, a figure is no number above 0, or a spread is none that a cluster file takes.
    """
    path = cluster_path(base)
    read_cluster(path)  # raises InputError with a message on what is wrong with a file
    fields = read_mapping(path)
    gpu, node, network, sources = fields["gpu"], fields["node"], fields["network"], fields["sources"]
    said = f"measured by {by} on {on or counted(figures['nodes'], 'node')}"
    rates = {figures["precision"]: figures["matmul"], **figures.get("products", {})}
    products = {precision: _figure(rates, precision, 1e12, f"matmul in {precision}") for precision in rates}
    gpu["measured"] = {**gpu.get("measured", {}), **products}
    sources["gpu.measured"] = f"{listing(list(rates), 'and')}: {said}; before: {sources.get('gpu.measured', 'none')}"
    for key, unit in PROPERTIES.items():
        if figures.get(key) is not None:
            gpu[key] = figures[key] if unit is None else _figure(figures, key, unit)
            sources[f"gpu.{key}"] = said
    if figures.get("spread") is not None:
        gpu["spread"] = _spread(figures["spread"])
        sources["gpu.spread"] = f"{said}: relative standard deviation of the GPUs' matrix products"
    if figures.get("host") is not None:
        gpu["host"] = _figure(figures, "host", 1e9)
        sources["gpu.host"] = f"{said}, pinned copies, the slower direction"
    if figures.get("copy") is not None:
        text = f"{said}: copies read and write {_figure(figures, 'copy', 1e9)} GB/s, which does not replace it"
        sources["gpu.bandwidth"] = f"{sources.get('gpu.bandwidth', 'none')}; {text}"
    gpus = figures.get("gpus")
    if gpus is not None and (not fields.get("island") or gpus % fields["island"]["gpus"] == 0):
        node["gpus"], sources["node.gpus"] = gpus, said
    if figures.get("node") is not None:
        measured = _figure(figures, "node", 1e9)
        told = f"{said}: bus bandwidth of an all-reduce, {measured} GB/s"
        if measured > node["bandwidth"]:  # switches that add up (NVLS) make it seem more than a link can carry
            told += f", above the link's {node['bandwidth']}, which is kept"
        node["bandwidth"] = min(measured, node["bandwidth"])
        sources["node.bandwidth"] = told
    if figures.get("network") is not None:
        network["bandwidth"] = _figure(figures, "network", 1e9)
        sources["network.bandwidth"] = f"{said}: bus bandwidth of all-reduces over pairs of nodes, by GPUs of a node"
    check_output(out)
    text = f"# {path.name}, with figures that {by} has measured.\n"
    text += yaml.safe_dump(fields, sort_keys=False, allow_unicode=True, width=1000)
    write_new(out, text)
    try:
        read_cluster(out)
    except InputError:  # a figure that no GPU like that of `base` can have
        out.unlink()
        raise


def _spread(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= MAX_SPREAD:
        rule = f"must be a number from 0 to {MAX_SPREAD}; GPUs of several kinds or sick ones are among these"
        raise InputError(f"spread = {value!r:.40}: {rule}")
    return float(f"{value:.3g}")


def _figure(figures: Mapping[str, Any], key: str, unit: float, name: str = "") -> float:
    value = figures[key]
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        raise InputError(f"{name or key} = {value!r:.40}: must be a number above 0")
    return float(f"{value / unit:.5g}")


if __name__ == "__main__":
    sys.exit(main())
