"""`megalite-bench-device` and its probe, rehearsed on a CPU at tiny sizes."""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalite.cost.cluster import load_cluster, read_cluster
from megalite_launch.preflight.smi import SmiError
from megalite_tools.bench import device as bench_device
from megalite_tools.bench.device import COMMAND, cluster_figures, main
from megalite_tools.bench.training import probe as probe_module
from megalite_tools.bench.training import probe_device
from megalite_tools.bench.training.probe import GROUPS, probe
from megalite_tools.bench.training.probe_figures import CallTimer, Figures

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
TINY = ["--device", "cpu", "--tiny"]
UNIT_KEYS = ("ms", "p10_ms", "p90_ms", "tflops", "bytes_per_s", "ms_per_billion")


@pytest.fixture(scope="module")
def notes() -> list[dict[str, Any]]:
    """What a probe has noted after each group."""
    found: list[dict[str, Any]] = []
    probe(CPU, True, lambda so_far: found.append(copy.deepcopy(so_far)))
    return found


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe with the groups that a cluster file needs, which are the quick ones."""
    for name in ("attention", "adamw", "cross_entropy"):
        monkeypatch.delitem(GROUPS, name)


def _figures(found: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for group in list(GROUPS)[1:]:
        for name, figure in found[group].items():
            yield group, name, figure


def test_every_group_is_noted_with_all_before_it(notes: list[dict[str, Any]]) -> None:
    assert [list(note)[1:] for note in notes] == [list(GROUPS)[: count + 1] for count in range(len(GROUPS))]
    assert list(notes[-1]["seconds"]) == list(GROUPS)
    json.dumps(notes[-1], allow_nan=False)


def test_figures_are_positive(notes: list[dict[str, Any]]) -> None:
    values = [
        (group, name, key, value)
        for group, name, figure in _figures(notes[-1])
        for key, value in figure.items()
        if key in UNIT_KEYS
    ]
    assert len(values) > 100
    assert [row for row in values if not row[-1] > 0] == []


def test_only_backends_that_a_cpu_lacks_fail(notes: list[dict[str, Any]]) -> None:
    failed = {name for _, name, figure in _figures(notes[-1]) if "ms" not in figure}
    lacking = {f"4 heads of 16, {name}, {part}" for name in ("cudnn", "efficient") for part in ("forward", "backward")}
    assert failed == lacking | {"4 heads of 16, chosen", "4 heads of 16, kernels"}
    attention = notes[-1]["attention"]
    assert all("No viable backend" in attention[name]["error"] for name in lacking)
    assert attention["4 heads of 16, chosen"] == {"backend": "FLASH_ATTENTION"}
    assert "flash_attention" in attention["4 heads of 16, kernels"]["backward"]


def test_rates_follow_from_times(notes: list[dict[str, Any]]) -> None:
    product = notes[-1]["gemm"]["tiny, gate and up"]
    assert product["sizes"] == [32, 2 * 96, 64]
    assert product["tflops"] == pytest.approx(2 * 32 * 192 * 64 / product["ms"] / 1e9, rel=1e-3)
    forward, backward = (notes[-1]["attention"][f"4 heads of 16, flash, {part}"] for part in ("forward", "backward"))
    assert forward["tflops"] == pytest.approx(4 * 64 * 64 * 64 / 2 / forward["ms"] / 1e9, rel=1e-3)
    work = [each["tflops"] * each["ms"] for each in (forward, backward)]
    assert work[1] / work[0] == pytest.approx(2.5, rel=1e-3)


def _broken(figures: Figures) -> None:
    figures.measure("one", lambda: {"ms": 1.0})
    figures.measure("two", lambda: {}["no such kernel"])
    figures.measure("three", lambda: {"ms": 3.0})
    raise RuntimeError("out of\n  memory")


def test_a_failure_leaves_the_other_figures_and_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "GROUPS", {"broken": _broken, "host": probe_device.host})
    found = probe(CPU, True, lambda _: None)
    assert found["broken"] == {
        "one": {"ms": 1.0},
        "two": {"error": "KeyError: 'no such kernel'"},
        "three": {"ms": 3.0},
        "error": "RuntimeError: out of memory",
    }
    assert found["host"]["to host"]["bytes_per_s"] > 0


def test_nothing_starts_when_time_is_up() -> None:
    notes: list[int] = []
    found = probe(CPU, True, lambda so_far: notes.append(len(so_far)), seconds=0)
    assert {name: found[name] for name in GROUPS} == {name: {"not_measured": "out of time"} for name in GROUPS}
    assert len(notes) == len(GROUPS)
    figures = Figures(CallTimer(CPU), True, deadline=float("inf"))
    figures.measure("short", lambda: {"ms": 1.0})
    figures.measure("long", lambda: {"ms": 1.0}, needs=float("inf"))
    assert figures.found == {"short": {"ms": 1.0}, "long": {"not_measured": "out of time"}}


@pytest.mark.usefixtures("few")
def test_a_cluster_file_has_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, report = tmp_path / "ours.yaml", tmp_path / "all.json"
    assert main([*TINY, "--base", "h100_sxm", "--out", str(out), "--json", str(report)]) == 0
    found, ours, theirs = json.loads(report.read_text()), read_cluster(out), load_cluster("h100_sxm")
    best = {
        precision: max(each["tflops"] for each in found["gemm"].values() if each["precision"] == precision)
        for precision in ("bf16", "fp8", "fp32")
    }
    assert ours.gpu.measured == pytest.approx({name: value * 1e12 for name, value in best.items()}, rel=1e-4)
    assert ours.gpu.host == pytest.approx(min(each["bytes_per_s"] for each in found["host"].values()), rel=1e-4)
    assert (ours.gpu.bandwidth, ours.gpu.power, ours.levels) == (theirs.gpu.bandwidth, theirs.gpu.power, theirs.levels)
    for key in ("gpu.measured", "gpu.host", "gpu.bandwidth", "gpu.name"):
        assert f"measured by {COMMAND} on a CPU" in ours.sources[key]
        assert "a rehearsal, whose figures mean nothing" in ours.sources[key]
    copied = max(each["bytes_per_s"] for each in found["copy"].values()) / 1e9
    assert ours.sources["gpu.bandwidth"].startswith(theirs.sources["gpu.bandwidth"])
    assert f"copies read and write {copied:.5g} GB/s" in ours.sources["gpu.bandwidth"]
    said = capsys.readouterr()
    assert [line.split(": ")[1] for line in said.err.splitlines()] == ["device", "copy", "host", "gemm"]
    assert "tiny, gate and up" in said.out


def test_facts_of_a_gpu_come_from_its_driver(monkeypatch: pytest.MonkeyPatch, notes: list[dict[str, Any]]) -> None:
    properties = SimpleNamespace(
        major=9, minor=0, multi_processor_count=132, total_memory=85017493504, L2_cache_size=52428800, uuid="b-2"
    )
    answer = "GPU-a-1, 81559, 580.10, 700.00, 1980, 2619\nGPU-b-2, 81559, 580.10, 500.00, 1980, [N/A]\n"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(probe_device, "ask", lambda *_: answer)
    facts = _facts()
    assert (facts["capability"], facts["multiprocessors"], facts["driver"]) == ("9.0", 132, "580.10")
    assert (facts["power_limit"], facts["max_mhz"], facts["max_memory_mhz"]) == (500.0, 1980.0, None)
    figures = cluster_figures({**notes[-1], "device": facts})
    assert figures is not None
    assert (figures["name"], figures["multiprocessors"]) == ("NVIDIA H100 80GB HBM3", 132)
    assert (figures["memory"], figures["power"]) == (81559 * 2**20, 500.0)
    monkeypatch.setattr(probe_device, "ask", _no_smi)
    assert {_facts()[key] for key in ("driver", "power_limit", "memory_bytes")} == {None}


def _facts() -> dict[str, Any]:
    figures = Figures(SimpleNamespace(device=GPU), tiny=False, deadline=0.0)  # type: ignore[arg-type]
    probe_device.describe(figures)
    return figures.found


def _no_smi(*_: object) -> str:
    raise SmiError("missing", "nvidia-smi cannot be started: No such file or directory")


@pytest.mark.usefixtures("few")
def test_without_a_product_no_cluster_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(GROUPS, "gemm", _broken)
    out, report = tmp_path / "ours.yaml", tmp_path / "all.json"
    assert main([*TINY, "--base", "h100_sxm", "--out", str(out), "--json", str(report)]) == 1
    assert "no product in bf16 was measured" in capsys.readouterr().err
    assert json.loads(report.read_text())["gemm"]["error"] == "RuntimeError: out of memory"
    assert not out.exists()


def _forbidden(*_: object) -> Callable[..., Any]:
    raise AssertionError("something is measured")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "{folder}/new.yaml"], "NVIDIA H900 with wings: no cluster is known with this device"),
        (["--out", "{folder}/old.yaml", "--base", "h100_sxm"], "there is such a file already"),
        (["--out", "{folder}/new.txt", "--base", "h100_sxm"], "must end in .yaml"),
        (
            ["--out", "{folder}/new.yaml", "--base", "h900"],
            "--base h900: is no file, and no cluster that megalite comes with",
        ),
        (["--json", "{folder}"], "is a folder"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(bench_device, "device_name", lambda _: "NVIDIA H900 with wings")
    monkeypatch.setattr(bench_device, "probe", _forbidden)
    (tmp_path / "old.yaml").write_text("old")
    assert main([*TINY, *(argument.format(folder=tmp_path) for argument in arguments)]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["old.yaml"]
    assert (tmp_path / "old.yaml").read_text() == "old"


def test_a_cpu_must_be_meant(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--device", "cuda"]) == 2
    assert "PyTorch finds no GPU" in capsys.readouterr().err
    assert main([]) == 2
    assert "add --tiny" in capsys.readouterr().err
