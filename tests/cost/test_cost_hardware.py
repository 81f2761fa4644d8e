"""Cluster files: those that megalite comes with, and what is refused of others."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megalite.base.errors import InputError
from megalite.config.presets import presets
from megalite.cost.cluster import ASSUMED_DRIVE, Drive, known_clusters, load_cluster

FILES = presets("cluster")


@pytest.mark.parametrize("name", known_clusters())
def test_a_shipped_cluster_has_a_source_for_every_figure(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    plain = yaml.safe_load(FILES[name].read_text())
    figures = {f"{section}.{key}" for section, keys in plain.items() if isinstance(keys, dict) for key in keys}
    wanted = {figure for figure in figures if not figure.startswith("sources.")} - {"gpu.name", "island.gpus"}
    assert wanted | {"price"} <= set(plain["sources"])
    assert all(len(source) > 10 for source in plain["sources"].values())


@pytest.mark.parametrize("name", known_clusters())
def test_its_figures_are_in_the_units_that_the_planner_takes(name: str) -> None:
    cluster = load_cluster(name)
    gpu = cluster.gpu
    assert 100e12 < gpu.peak["bf16"] < 1e16
    assert all(gpu.measured[precision] <= gpu.peak[precision] for precision in gpu.measured)
    assert 20 * 2**30 < gpu.memory < 400 * 2**30
    assert 800e9 < gpu.bandwidth < 2e13
    assert cluster.network.bandwidth < cluster.levels[-1].link.bandwidth <= gpu.bandwidth
    assert 1e-6 < cluster.levels[-1].link.latency <= cluster.network.latency < 1e-4


def plain() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(FILES["h100_sxm"].read_text())
    return found


REFUSED = {
    "a key too many": ({"gpus": 8}, r"'gpus' is unknown"),
    "a section that is missing": ({"network": None}, r"'network' = None: must be an object"),
    "text for a number": ({"price": "much"}, r"'price' = 'much': must be a number of US dollars"),
    "nothing": ({"price": 0}, r"'price' = 0: must be a number of US dollars from 0.001 to 1,000,000"),
    "next to nothing": ({"gpu": {"bandwidth": 1e-300}}, r"'bandwidth' = 1e-300: must be a number of GB/s from 0.001"),
    "memory in MiB": ({"gpu": {"memory": 81_559}}, r"'memory' = 81559: must be a number of GiB from 1e-05 to 10,000"),
    "FLOP/s": ({"gpu": {"peak": {"bf16": 989e12}}}, r"'bf16' = 989\d*.*: must be a number of TFLOP/s from 0.001 to"),
    "a GPU that beats itself": ({"gpu": {"measured": {"bf16": 1600}}}, r"gpu: measured: bf16 = 1600: is more than 1.5"),
    "an unknown precision": ({"gpu": {"peak": {"bf16": 1.0, "int3": 2.0}}}, r"peak: 'int3' is no precision"),
    "GPUs that are all different": ({"gpu": {"spread": 0.3}}, r"'spread' = 0.3: must be a number from 0 to 0.2"),
    "more than the peak in fp8": (
        {"gpu": {"measured": {"fp8": 19000.0}}},
        r"measured: fp8 = 19000: is more than 1.5 times its peak of \d+",
    ),
    "a drive without a rating": ({"drive": {"read": 1, "write": 1}}, r"'endurance' is missing"),
    "no bf16": ({"gpu": {"peak": {"fp8": 1.0}}}, r"peak: bf16 is missing"),
    "a board as large as the node": ({"island": {"gpus": 8, "bandwidth": 1, "latency": 1}}, r"island: gpus = 8"),
    "a board that does not divide it": ({"island": {"gpus": 3, "bandwidth": 1, "latency": 1}}, r"a part of the 8 GPUs"),
}


@pytest.mark.parametrize(("change", "told"), REFUSED.values(), ids=REFUSED)
def test_another_file_is_refused_with_one_line(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    fields = plain()
    for key, value in change.items():
        if isinstance(value, dict) and isinstance(fields.get(key), dict):
            fields[key] = {**fields[key], **value}
        else:
            fields[key] = value
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(fields))
    with pytest.raises(InputError, match=told) as caught:
        load_cluster(str(path))
    assert "\n" not in str(caught.value)


def test_a_file_of_ones_own_is_a_cluster(tmp_path: Path) -> None:
    fields = plain()
    fields["node"]["gpus"] = 4
    del fields["gpu"]["measured"]
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(fields))
    cluster = load_cluster(str(path))
    assert (cluster.name, cluster.gpus_per_node, cluster.gpu.measured) == ("mine", 4, {})
    assert cluster.drive == ASSUMED_DRIVE
    path.write_text(yaml.safe_dump({**fields, "drive": {"read": 20, "write": 10, "endurance": 500}}))
    assert load_cluster(str(path)).drive == Drive(20e9, 10e9, 500e12)


def test_an_unknown_name_is_told_with_those_near_to_it() -> None:
    with pytest.raises(InputError, match=r"--cluster h10: is no file, and no cluster .*; did you mean h200, h100_sxm"):
        load_cluster("h10")
