"""Cluster files with measured figures."""

from pathlib import Path
from typing import Any

import pytest

from megalite.base.errors import InputError
from megalite.cost.cluster import load_cluster
from megalite.cost.measured_cluster import write_measured

FIGURES = {
    "nodes": 4,
    "gpus": 8,
    "precision": "bf16",
    "matmul": 712.34e12,
    "host": 54e9,
    "node": 380e9,
    "network": 47.5e9,
}


def test_measured_figures_replace_those_of_datasheets(tmp_path: Path) -> None:
    write_measured("h100_sxm", tmp_path / "ours.yaml", FIGURES)
    ours, theirs = load_cluster(str(tmp_path / "ours.yaml")), load_cluster("h100_sxm")
    assert (ours.levels[-1].link.bandwidth, ours.network.bandwidth, ours.gpu.host) == (380e9, 47.5e9, 54e9)
    assert ours.gpu.measured == {"bf16": 712.34e12, "fp8": theirs.gpu.measured["fp8"]}
    assert (ours.gpu.peak, ours.price, ours.levels[-1].link.latency) == (
        *(theirs.gpu.peak, theirs.price),
        theirs.levels[-1].link.latency,
    )
    changed = {key for key, source in ours.sources.items() if "measured by megalite-preflight on 4 nodes" in source}
    assert changed == {"gpu.measured", "gpu.host", "node.gpus", "node.bandwidth", "network.bandwidth"}
    assert ours.sources["gpu.measured"].endswith(theirs.sources["gpu.measured"])


def test_a_spread_of_gpus_is_written_where_it_was_measured(tmp_path: Path) -> None:
    write_measured("h100_sxm", tmp_path / "ours.yaml", FIGURES | {"spread": 0.012345})
    ours = load_cluster(str(tmp_path / "ours.yaml"))
    assert ours.gpu.spread == 0.0123
    assert "on 4 nodes: relative standard deviation" in ours.sources["gpu.spread"]
    write_measured(str(tmp_path / "ours.yaml"), tmp_path / "equal.yaml", FIGURES | {"spread": 0.0})
    assert load_cluster(str(tmp_path / "equal.yaml")).gpu.spread == 0
    write_measured(str(tmp_path / "ours.yaml"), tmp_path / "kept.yaml", FIGURES | {"spread": None})
    assert load_cluster(str(tmp_path / "kept.yaml")).gpu.spread == 0.0123
    with pytest.raises(InputError, match=r"spread = 0.25: must be a number from 0 to 0.2; GPUs of several kinds"):
        write_measured("h100_sxm", tmp_path / "wild.yaml", FIGURES | {"spread": 0.25})
    assert not (tmp_path / "wild.yaml").exists()


def test_one_gpu_tells_of_itself_and_not_of_nodes(tmp_path: Path) -> None:
    figures = {
        "precision": "bf16",
        "matmul": 700e12,
        "products": {"fp8": 1300e12},
        "copy": 2.9e12,
        "name": "NVIDIA H100 of 500 W",
        "multiprocessors": 130,
        "memory": 79 * 2**30,
        "power": 500.0,
    }
    write_measured("h100_sxm", tmp_path / "ours.yaml", figures, "a bench", "one H100")
    ours, theirs = load_cluster(str(tmp_path / "ours.yaml")), load_cluster("h100_sxm")
    assert ours.gpu.measured == {"bf16": 700e12, "fp8": 1300e12}
    assert (ours.gpu.name, ours.gpu.multiprocessors) == ("NVIDIA H100 of 500 W", 130)
    assert (ours.gpu.memory, ours.gpu.power) == (79 * 2**30, 500)
    assert (ours.levels, ours.gpu.bandwidth, ours.gpu.host) == (theirs.levels, theirs.gpu.bandwidth, theirs.gpu.host)
    changed = {key for key, source in ours.sources.items() if "measured by a bench on one H100" in source}
    assert changed == {f"gpu.{key}" for key in ("measured", "bandwidth", "name", "multiprocessors", "memory", "power")}
    assert "copies read and write 2900.0 GB/s" in ours.sources["gpu.bandwidth"]
    assert (tmp_path / "ours.yaml").read_text().startswith("# h100_sxm.yaml, with figures that a bench has measured.")


def test_figures_of_another_gpu_write_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"bf16 = 712.34: is more than 1.5 times its peak"):
        write_measured("rtx4090", tmp_path / "ours.yaml", FIGURES)
    assert list(tmp_path.iterdir()) == []


def test_what_was_not_measured_stays(tmp_path: Path) -> None:
    write_measured("h200", tmp_path / "ours.yaml", FIGURES | {"host": None, "node": None, "network": None})
    ours, theirs = load_cluster(str(tmp_path / "ours.yaml")), load_cluster("h200")
    assert (ours.levels, ours.network, ours.gpu.host) == (theirs.levels, theirs.network, theirs.gpu.host)


def test_a_node_keeps_its_islands(tmp_path: Path) -> None:
    write_measured("h100_nvl", tmp_path / "ours.yaml", FIGURES | {"gpus": 3})
    assert load_cluster(str(tmp_path / "ours.yaml")).levels[0] == load_cluster("h100_nvl").levels[0]


@pytest.mark.parametrize(
    "change", [{"matmul": 0}, {"network": -1.0}, {"host": "fast"}, {"node": float("nan")}, {"products": {"fp8": 0}}]
)
def test_a_figure_that_is_none_writes_no_file(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="must be a number above 0"):
        write_measured("h100_sxm", tmp_path / "ours.yaml", FIGURES | change)
    assert list(tmp_path.iterdir()) == []
