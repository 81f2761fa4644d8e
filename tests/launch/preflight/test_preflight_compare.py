"""What nodes have measured, side by side: pure functions of files that nodes leave."""

from pathlib import Path
from statistics import stdev
from typing import Any

import pytest

from megalite_launch.base.errors import UserError
from megalite_launch.preflight.cluster import figures
from megalite_launch.preflight.compare import Verdict, compare, compare_folder
from megalite_launch.preflight.findings import Finding, Sheet, as_json, read_sheet, write_sheet
from megalite_launch.preflight.show import sheet_text, verdict_text
from megalite_launch.preflight.thresholds import load_thresholds

OURS = load_thresholds()
H100 = "NVIDIA H100 80GB HBM3"
NODES = ("n1", "n2", "n3", "n4")


def node(name: str, gpus: int = 8, gpu: str = H100) -> Sheet:
    """A healthy one of four."""
    sheet = Sheet(name, "full", gpu)
    sheet.add("nvidia-smi", "ok", 0.5, "answers in 10 s", "answered in 0.5 s")
    row = {"matmul": 700e12, "digest": "ab", "steady": True, "to_device": 55e9, "to_host": 54e9}
    place = NODES.index(name)
    sheet.measured = {
        "gpus": [dict(row) for _ in range(gpus)],
        "all_reduce": 465e9,
        "network": 400e9,
        "pairs": [{"partner": NODES[(place + step) % 4], "round": 0, "ranks": 8, "rate": 380e9} for step in (1, -1)],
        "clock": {"reference": "n1", "offset": 0.001 * place, "round_trip": 0.0001},
    }
    sheet.versions = {"commit": "c0", "torch": "2.13.0", "nccl": "2.28", "driver": "550", "python": "3.11.7"}
    return sheet


def four() -> dict[str, Sheet]:
    return {name: node(name) for name in NODES}


def compared(sheets: dict[str, Sheet]) -> Verdict:
    return compare(list(sheets.values()), OURS)


def the(verdict: Verdict, name: str, check: str) -> Finding:
    (finding,) = (finding for finding in verdict.sheets[name].findings if finding.check == check)
    return finding


def test_equal_nodes_are_all_fine() -> None:
    sheets = four()
    verdict = compared(sheets)
    assert (verdict.ok, verdict.bad) == (list(NODES), {})
    assert {found.result for sheet in verdict.sheets.values() for found in sheet.findings} == {"ok"}
    assert [found.check for found in verdict.sheets["n1"].findings] == [
        "nvidia-smi",
        "matmul",
        "copy to device",
        "copy to host",
        "result bits",
        "all-reduce in node",
        "pairs of nodes",
        "clock offset",
        *(f"{name} version" for name in ("commit", "torch", "nccl", "driver")),
    ]
    assert len(sheets["n1"].findings) == 1  # the originals stay


@pytest.mark.parametrize(
    ("key", "share", "check", "result"),
    [
        ("matmul", 0.951, "matmul", "ok"),
        ("matmul", 0.949, "matmul", "warn"),
        ("matmul", 0.899, "matmul", "fail"),
        ("to_device", 0.901, "copy to device", "ok"),
        ("to_device", 0.899, "copy to device", "warn"),
        ("to_host", 0.799, "copy to host", "fail"),
    ],
)
def test_a_slow_gpu_is_found_by_the_median_of_all(key: str, share: float, check: str, result: str) -> None:
    sheets = four()
    sheets["n3"].measured["gpus"][5][key] *= share
    verdict = compared(sheets)
    assert the(verdict, "n3", check).result == result
    assert the(verdict, "n3", check).text.startswith("GPU 5: ")
    assert list(verdict.bad) == ["n3"] * (result == "fail")


def test_a_gpu_that_computes_other_bits_is_named() -> None:
    sheets = four()
    sheets["n2"].measured["gpus"][7]["digest"] = "cd"
    assert compared(sheets).bad == {"n2": "result bits: GPU 7: other bits than most of 32"}


def test_bits_of_another_pytorch_are_not_compared() -> None:
    sheets = four()
    sheets["n2"].versions["torch"] = "2.12.0"
    for gpu in sheets["n2"].measured["gpus"]:
        gpu["digest"] = "cd"
    verdict = compared(sheets)
    assert verdict.bad == {"n2": "torch version: 2.12.0, on most nodes 2.13.0"}


@pytest.mark.parametrize(("rate", "result"), [(441e9, "ok"), (439e9, "warn"), (399e9, "fail")])
def test_an_all_reduce_of_eight_h100_has_a_figure_to_reach(rate: float, result: str) -> None:
    sheet = node("n1")
    sheet.measured["all_reduce"] = rate
    assert the(compare([sheet], OURS), "n1", "all-reduce in node").result == result


@pytest.mark.parametrize(("share", "result"), [(0.91, "ok"), (0.89, "warn"), (0.79, "fail")])
def test_where_there_is_no_figure_the_other_nodes_are_the_measure(share: float, result: str) -> None:
    sheets = {name: node(name, gpus=4) for name in NODES}
    sheets["n4"].measured["all_reduce"] *= share
    assert the(compared(sheets), "n4", "all-reduce in node").result == result


def pair(sheets: dict[str, Sheet], one: str, other: str, rate: float) -> None:
    for name, partner in ((one, other), (other, one)):
        for found in sheets[name].measured["pairs"]:
            if found["partner"] == partner:
                found["rate"] = rate


@pytest.mark.parametrize(("rate", "result"), [(321e9, "warn"), (319e9, "fail")])
def test_a_node_that_is_slow_with_both_partners_is_bad_and_they_are_not(rate: float, result: str) -> None:
    sheets = four()
    pair(sheets, "n2", "n1", rate)
    pair(sheets, "n2", "n3", rate)
    verdict = compared(sheets)
    assert {name: the(verdict, name, "pairs of nodes").result for name in NODES} == {
        "n1": "ok",
        "n2": result,
        "n3": "ok",
        "n4": "ok",
    }


def test_a_pair_that_failed_counts_as_slow_and_an_absent_partner_not_at_all() -> None:
    sheets = four()
    for name, partner in (("n2", "n1"), ("n1", "n2"), ("n2", "n3"), ("n3", "n2")):
        for found in sheets[name].measured["pairs"]:
            if found["partner"] == partner:
                del found["rate"]
                found["error"] = "ended with 1: NCCL error"
    assert list(compared(sheets).bad) == ["n2"]
    for found in sheets["n2"].measured["pairs"]:
        found["absent"] = "no pair:0:n1:n2:ready:0 after 60 s"
    assert compared(sheets).bad == {}


def test_without_known_adapters_the_median_of_pairs_is_the_measure() -> None:
    sheets = four()
    for sheet in sheets.values():
        sheet.measured["network"] = None
    pair(sheets, "n2", "n1", 300e9)
    pair(sheets, "n2", "n3", 300e9)
    finding = the(compared(sheets), "n2", "pairs of nodes")
    assert (finding.result, "the median of nodes is 380" in finding.text) == ("fail", True)


def test_of_two_nodes_nobody_can_tell_which_is_slow() -> None:
    sheets = {name: node(name) for name in ("n1", "n2")}
    for name, partner in (("n1", "n2"), ("n2", "n1")):
        sheets[name].measured["pairs"] = [{"partner": partner, "round": place, "rate": 100e9} for place in (0, 1)]
    verdict = compared(sheets)
    assert list(verdict.bad) == ["n1", "n2"]
    assert "no third node tells which" in verdict.bad["n1"]


@pytest.mark.parametrize(("offset", "result"), [(0.04, "ok"), (0.06, "warn"), (-0.06, "warn"), (0.6, "fail")])
def test_clocks_are_compared_with_the_median(offset: float, result: str) -> None:
    sheets = four()
    for sheet in sheets.values():
        sheet.measured["clock"]["offset"] = 3.0  # the reference itself may be wrong: it is then the one that differs
    sheets["n4"].measured["clock"]["offset"] += offset
    verdict = compared(sheets)
    assert the(verdict, "n4", "clock offset").result == result
    assert the(verdict, "n1", "clock offset").result == "ok"


def test_a_clock_is_not_blamed_for_a_slow_network() -> None:
    sheets = four()
    sheets["n4"].measured["clock"] = {"reference": "n1", "offset": 0.6, "round_trip": 1.2}
    assert compared(sheets).bad == {}


@pytest.mark.parametrize("name", ["commit", "torch", "nccl", "driver"])
def test_a_node_with_another_version_is_bad(name: str) -> None:
    sheets = four()
    sheets["n1"].versions[name] = "other"
    assert list(compared(sheets).bad) == ["n1"]
    sheets["n1"].versions[name] = None  # not known is not different
    assert compared(sheets).bad == {}


def test_a_node_with_other_gpus_is_bad() -> None:
    sheets = {**four(), "n2": node("n2", gpu="NVIDIA H200")}
    assert compared(sheets).bad == {"n2": "GPU kind: GPUs are NVIDIA H200, on most nodes NVIDIA H100 80GB HBM3"}


def test_a_file_says_all_and_is_read_again(tmp_path: Path) -> None:
    sheet = node("n1")
    sheet.add("GPU count", "fail", 7, "= 8", "7 GPUs of 8 expected")
    sheet.add("idle temperature", "warn", 60.0, "", "at most 60 degrees C (GPU 1)")
    sheet.add("Xid since boot", "unchecked", None, "", "cannot be read")
    path = write_sheet(tmp_path / "attempt", sheet)
    assert path.name == "preflight-n1.json"
    written = as_json(sheet)
    assert written["failures"] == [{"check": "GPU count", "value": 7, "rule": "= 8", "text": "7 GPUs of 8 expected"}]
    assert (written["passed"], written["node"], written["level"]) == (False, "n1", "full")
    assert as_json(read_sheet(path)) == written


def test_the_files_of_an_attempt_tell_which_nodes_are_bad(tmp_path: Path) -> None:
    sheets = four()
    sheets["n2"].add("GPU count", "fail", 7, "= 8", "7 GPUs of 8 expected")
    for name in ("n1", "n2", "n3"):
        write_sheet(tmp_path, sheets[name])
    (tmp_path / "preflight-n3.json").write_text("{")
    verdict = compare_folder(tmp_path, OURS, NODES)
    assert verdict.ok == ["n1"]
    assert verdict.bad["n2"] == "GPU count: 7 GPUs of 8 expected"
    assert "preflight-n3.json: is no file of megalite-preflight" in verdict.bad["n3"]
    assert verdict.bad["n4"] == "has not finished its preflight: it left no file"
    assert list(compare_folder(tmp_path, OURS).bad) == ["n2", "n3"]
    assert verdict.as_json()["bad"] == verdict.bad


@pytest.mark.parametrize(
    "damage",
    [{"node": 3}, {"node": "../x"}, {"level": "deep"}, {"measured": []}, {"versions": {"torch": 2}}, {"failures": [1]}],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: dict[str, Any]) -> None:
    sheet = node("n1")
    text = str(as_json(sheet) | damage).replace("'", '"').replace("True", "true").replace("None", "null")
    (tmp_path / "preflight-n1.json").write_text(text)
    with pytest.raises(UserError, match=r"preflight-n1.json: is no file of megalite-preflight"):
        read_sheet(tmp_path / "preflight-n1.json")


def test_strange_measurements_of_a_node_do_no_harm() -> None:
    sheets = four()
    sheets["n1"].measured = {"gpus": 3, "pairs": [4], "clock": "late", "all_reduce": True, "network": []}
    sheets["n2"].measured = {"gpus": [{"matmul": "fast"}, 5], "pairs": {"a": 1}, "clock": {"offset": None}}
    assert compared(sheets).ok == list(NODES)


def test_an_empty_folder_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no preflight-NODE"):
        compare_folder(tmp_path, OURS)
    with pytest.raises(UserError, match="cannot be read: No such file"):
        compare_folder(tmp_path / "none", OURS)


def test_tables_are_aligned_and_name_what_is_wrong() -> None:
    sheets = four()
    sheets["n2"].add("GPU count", "fail", 7, "= 8", "7 GPUs of 8 expected")
    verdict = compared(sheets)
    assert verdict_text(verdict).splitlines() == [
        "node       failed  warned  not checked  fine",
        "n1    ok                                12",
        "n2    BAD  1                            12",
        "n3    ok                                12",
        "n4    ok                                12",
        "",
        "node  result  check",
        "n2    FAIL    GPU count: 7 GPUs of 8 expected",
    ]
    sheet = Sheet("n1", "light", "cpu")
    sheet.add("write", "fail", None, "", "disk \x1b[31m " + "is full " * 20)
    lines = sheet_text(sheet).splitlines()
    assert lines[0] == "n1 · cpu · light"
    assert lines[2].startswith("write  FAIL    disk \\x1b[31m is full")
    assert lines[3][:15].isspace()
    assert lines[3][15:].startswith(("is ", "full "))
    assert lines[-2] == "1 failed, 0 warned, 0 not checked"
    assert lines[-1].startswith("FAILED: write: disk \\x1b[31m is full is full")


def test_the_spread_of_gpus_is_that_of_nodes_that_are_fine() -> None:
    sheets = four()
    for place, row in enumerate(sheets["n2"].measured["gpus"]):
        row["matmul"] = 700e12 * (0.98 if place % 2 else 1.02)
    for row in sheets["n3"].measured["gpus"]:
        row["matmul"] = 500e12  # below 0.90 of the median
    verdict = compared(sheets)
    assert "n3" in verdict.bad
    products = [700.0] * 16 + [686.0, 714.0] * 4
    assert figures(verdict)["spread"] == pytest.approx(stdev(products) / 700)
    few = {name: node(name, gpus=1) for name in NODES}
    assert figures(compared(few))["spread"] is None
    on_cpus = {name: node(name, gpu="cpu") for name in NODES}
    assert figures(compared(on_cpus))["spread"] is None
