"""What follows from nvidia-smi and from the kernel's log: a fake nvidia-smi tells of GPUs healthy and sick."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_smi import FakeSmi

from megalite_launch.preflight.findings import Finding, Sheet
from megalite_launch.preflight.gpus import check_gpus
from megalite_launch.preflight.kernel_log import check_xids
from megalite_launch.preflight.thresholds import Limits, Thresholds, load_thresholds

OURS = load_thresholds()


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSmi:
    fake = FakeSmi(tmp_path)
    fake.on_path(monkeypatch)
    return fake


def checked(expected: int | None = 2, before: dict[str, float] | None = None, seconds: float = 10.0) -> Sheet:
    sheet = Sheet("n1", "light")
    quick = {**OURS.sections, "all": {**OURS.sections["all"], "smi_seconds": seconds}}
    check_gpus(sheet, expected, Thresholds(quick), before or {}, 2 * seconds)
    return sheet


def the(sheet: Sheet, check: str) -> Finding:
    (finding,) = (finding for finding in sheet.findings if finding.check == check)
    return finding


def test_healthy_gpus_pass_every_check(smi: FakeSmi) -> None:
    sheet = checked()
    assert sheet.gpu == "NVIDIA H100 80GB HBM3"
    assert sheet.versions == {"driver": "550.54.15"}
    assert sheet.measured == {"corrected": dict.fromkeys(smi.uuids, 3.0)}
    assert {finding.check: finding.result for finding in sheet.findings} == {
        "nvidia-smi": "ok",
        "GPU count": "ok",
        "ECC uncorrectable": "ok",
        "ECC SRAM": "ok",
        "ECC corrected": "ok",
        "row remap": "ok",
        "retired pages": "unchecked",  # these have row remapping instead
        "NVLink": "ok",
        "NVLink errors": "ok",
        "slowdown": "ok",
        "idle temperature": "ok",
        "memory in use": "ok",
        "foreign processes": "ok",
    }


@pytest.mark.parametrize(
    ("part", "column", "value", "check", "result", "text"),
    [
        ("ecc", "uncorrected", "1", "ECC uncorrectable", "fail", "GPU 1: 1 uncorrectable errors"),
        ("sram", "uncorrected", "4", "ECC SRAM", "ok", "at most 4 "),
        ("sram", "uncorrected", "5", "ECC SRAM", "fail", "GPU 1: 5 uncorrectable SRAM errors in its life"),
        ("remapped", "pending", "1", "row remap", "fail", "GPU 1: 1 of: remapping pending, remapping failed"),
        ("remapped", "failure", "Yes", "row remap", "fail", "GPU 1: 1 of:"),
        ("remapped", "correctable", "7", "row remap", "ok", "at most 0 "),
        ("slowdown", "hw", "Active", "slowdown", "fail", "GPU 1: the hardware holds clocks down"),
        ("slowdown", "thermal", "Active", "slowdown", "fail", "GPU 1: the hardware"),
        ("slowdown", "brake", "Active", "slowdown", "fail", "GPU 1: the hardware"),
        ("slowdown", "software", "Active", "slowdown", "warn", "GPU 1: the driver holds clocks down for heat"),
        ("base", "temperature", "54", "idle temperature", "ok", "at most 54 degrees C (GPU 1)"),
        ("base", "temperature", "55", "idle temperature", "warn", "at most 55 "),
        ("base", "temperature", "64", "idle temperature", "warn", "at most 64 "),
        ("base", "temperature", "65", "idle temperature", "fail", "at most 65 "),
        ("base", "memory", "199", "memory in use", "ok", "at most 199 MiB (GPU 1)"),
        ("base", "memory", "200", "memory in use", "warn", "at most 200 "),
        ("base", "memory", "500", "memory in use", "fail", "at most 500 "),
        ("base", "temperature", "[GPU requires reset]", "idle temperature", "fail", "nvidia-smi says [GPU requires"),
        ("ecc", "uncorrected", "[Unknown Error]", "ECC uncorrectable", "fail", "GPU 1 (00000000:1C:00.0): nvidia-smi"),
    ],
)
def test_a_sick_gpu_is_named(
    smi: FakeSmi, part: str, column: str, value: str, check: str, result: str, text: str
) -> None:
    smi.cell(part, 1, column, value)
    sheet = checked()
    assert (the(sheet, check).result, text in the(sheet, check).text) == (result, True), the(sheet, check)
    assert sheet.passed == (result != "fail")
    assert {found.check for found in sheet.findings if found.result in ("warn", "fail")} <= {check}


@pytest.mark.parametrize(
    ("single", "double", "result"), [("4", "6", "ok"), ("5", "6", "fail"), ("11", "[N/A]", "fail")]
)
def test_retired_pages_of_both_causes_count(smi: FakeSmi, single: str, double: str, result: str) -> None:
    for gpu in range(2):
        for column, value in (("single", "0"), ("double", "0"), ("pending", "No")):
            smi.cell("pages", gpu, column, value)
    smi.cell("pages", 0, "single", single)
    smi.cell("pages", 0, "double", double)
    assert the(checked(), "retired pages").result == result
    assert the(checked(), "pages pending").result == "ok"
    smi.cell("pages", 1, "pending", "Yes")
    assert the(checked(), "pages pending").result == "fail"


def test_corrected_errors_are_told_only_if_there_are_more_than_before(smi: FakeSmi) -> None:
    assert the(checked(before={smi.uuids[1]: 3.0}), "ECC corrected").result == "ok"
    smi.cell("ecc", 1, "corrected", "9")
    finding = the(checked(before=dict.fromkeys(smi.uuids, 3.0)), "ECC corrected")
    assert (finding.result, finding.text) == ("warn", "GPU 1: 6 more")


@pytest.mark.parametrize("status", ["<inactive>", "25 GB/s", "0 GB/s"])
def test_a_link_that_is_down_or_slow_is_told(smi: FakeSmi, status: str) -> None:
    smi.link(1, 17, status)
    finding = the(checked(), "NVLink")
    assert (finding.result, finding.text) == ("fail", "GPU 1: 17 of 18 links")


def test_a_gpu_without_any_link_is_told(smi: FakeSmi) -> None:
    smi.set("links", (smi.folder / "links").read_text().split("GPU 1")[0])
    finding = the(checked(), "NVLink")
    assert (finding.result, finding.text) == ("fail", "told of 1 of 2 GPUs")


def test_errors_of_links_are_a_warning_that_names_the_worst(smi: FakeSmi) -> None:
    smi.counter(0, 3, "Replay", 2353)
    smi.counter(1, 0, "CRC", 65535)
    finding = the(checked(), "NVLink errors")
    assert finding.result == "warn"
    assert finding.text == "GPU 1 link 0 CRC Errors: 65535, GPU 0 link 3 Replay Errors: 2353"


def test_bridges_of_a_kind_without_rule_need_only_be_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = FakeSmi(tmp_path, name="NVIDIA H100 PCIe")
    smi.on_path(monkeypatch)
    for gpu in range(2):
        smi.link(gpu, 4, "<inactive>")
    assert the(checked(), "NVLink").text == "17 active links per GPU"
    smi.link(1, 5, "<inactive>")
    assert (the(checked(), "NVLink").result, the(checked(), "NVLink").value) == ("warn", [17, 16])


def test_gpus_without_nvlink_have_none_to_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = FakeSmi(tmp_path, name="NVIDIA L40S", links=0)
    smi.on_path(monkeypatch)
    assert the(checked(), "NVLink").result == "ok"
    assert not [finding for finding in checked().findings if finding.check == "NVLink errors"]


def test_another_program_on_a_gpu_is_named(smi: FakeSmi) -> None:
    smi.set("processes", f"{smi.uuids[0]}, 4711, 58222, python train.py, --lr 3\n")
    finding = the(checked(), "foreign processes")
    assert (finding.result, finding.text) == ("fail", "others use these GPUs: 4711 python train.py, --lr 3")
    smi.set("processes", "No running processes found\n")
    assert the(checked(), "foreign processes").result == "ok"


@pytest.mark.parametrize(("expected", "result"), [(2, "ok"), (None, "ok"), (8, "fail")])
def test_gpus_are_counted(smi: FakeSmi, expected: int | None, result: str) -> None:
    assert the(checked(expected), "GPU count").result == result


def test_a_lost_gpu_and_another_kind_fail(smi: FakeSmi) -> None:
    smi.lose(1)
    assert the(checked(), "GPU count").text == "1 GPU of 2 expected"
    other = FakeSmi(smi.folder)
    other.cell("base", 1, "name", "NVIDIA H200")
    assert the(checked(), "GPU kind").text == "GPUs of several kinds: NVIDIA H100 80GB HBM3, NVIDIA H200"


def test_an_nvidia_smi_that_hangs_fails_and_is_not_waited_for(smi: FakeSmi) -> None:
    smi.hang("base")
    start = time.monotonic()
    sheet = checked(seconds=0.3)
    assert time.monotonic() - start < 5
    assert [found.text for found in sheet.findings] == ["nvidia-smi gave no answer in 0.3 s"]
    assert not sheet.passed


def test_a_question_that_hangs_leaves_the_others(smi: FakeSmi) -> None:
    smi.hang("errors")
    sheet = checked(seconds=0.5)
    assert the(sheet, "NVLink").result == "fail"  # every H100 has links
    assert "no answer" in the(sheet, "NVLink").text
    assert the(sheet, "ECC uncorrectable").result == "ok"


@pytest.mark.parametrize(
    ("break_it", "text"),
    [
        (lambda smi: (smi.folder / "nvidia-smi").unlink(), "nvidia-smi cannot be started"),
        (lambda smi: smi.set("base", "0, GPU-1\n"), "where 7 columns were asked"),
        (lambda smi: smi.set("base", "No devices were found\n"), "nvidia-smi printed 'No devices were found'"),
        (
            lambda smi: smi.fail("base", "Failed to initialize NVML: Driver/library version mismatch\n", 18),
            "nvidia-smi ended with 18: Failed to initialize NVML: Driver/library version mismatch",
        ),
    ],
)
def test_an_nvidia_smi_that_is_broken_fails(
    smi: FakeSmi, monkeypatch: pytest.MonkeyPatch, break_it: Callable[[FakeSmi], None], text: str
) -> None:
    break_it(smi)
    monkeypatch.setenv("PATH", f"{smi.folder}:/usr/bin:/bin")
    sheet = checked()
    assert the(sheet, "nvidia-smi").result == "fail"
    assert text in the(sheet, "nvidia-smi").text


def test_no_gpu_at_all_fails_even_if_none_was_asked_for(smi: FakeSmi) -> None:
    smi.set("base", "")
    assert not checked(None).passed


def test_a_field_that_a_driver_does_not_know_costs_only_its_check(smi: FakeSmi) -> None:
    smi.fail("sram", 'Field "ecc.errors.uncorrected.aggregate.sram" is not a valid field to query.\n', 2)
    sheet = checked()
    assert the(sheet, "ECC SRAM").result == "unchecked"
    assert "not a valid field" in the(sheet, "ECC SRAM").text
    assert the(sheet, "ECC uncorrectable").result == "ok"
    assert sheet.passed


def test_older_drivers_name_slowdowns_otherwise(smi: FakeSmi) -> None:
    smi.fail("slowdown", 'Field "clocks_event_reasons.hw_slowdown" is not a valid field to query.\n', 2)
    smi.set("throttle", "Not Active, Not Active, Not Active, Not Active\nActive, Not Active, Not Active, Not Active\n")
    assert the(checked(), "slowdown").text == "GPU 1: the hardware holds clocks down"


def test_gpus_without_ecc_are_not_judged(smi: FakeSmi) -> None:
    for gpu in range(2):
        for column in ("uncorrected", "corrected"):
            smi.cell("ecc", gpu, column, "[N/A]")
    sheet = checked()
    assert the(sheet, "ECC uncorrectable").result == "unchecked"
    assert sheet.measured == {}


DMESG = """[    0.000000] Linux version 6.8.0
[12345.678901] NVRM: Xid (PCI:0000:1b:00): {xid}, pid='<unknown>', name=<unknown>, some text
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Lets dmesg print a text, or fail; journalctl always fails."""

    def put(text: str, code: int = 0) -> None:
        (tmp_path / "text").write_text(text)
        for name, answer in (("dmesg", f"/bin/cat {tmp_path}/text; exit {code}"), ("journalctl", "exit 1")):
            (tmp_path / name).write_text(f"#!/bin/sh\n{answer}\n")
            (tmp_path / name).chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/nowhere")
    return put


def xids(files: tuple[Path, ...] = ()) -> Finding:
    sheet = Sheet("n1", "light")
    limits: Limits = OURS.of("NVIDIA H200")
    check_xids(sheet, limits, files)
    return the(sheet, "Xid since boot")


@pytest.mark.parametrize(
    ("xid", "result"), [(48, "fail"), (79, "fail"), (95, "fail"), (120, "fail"), (63, "warn"), (94, "warn"), (31, "ok")]
)
def test_xids_are_sorted_by_what_they_mean(log: Callable[[str], None], xid: int, result: str) -> None:
    log(DMESG.format(xid=xid))
    assert xids().result == result
    assert (f"Xid {xid} on 0000:1b:00 (dmesg)" == xids().text) == (result != "ok")


def test_a_log_that_may_not_be_read_is_said_to_be_so(log: Callable[[str, int], None]) -> None:
    log("dmesg: read kernel buffer failed: Operation not permitted\n", 1)
    assert xids().result == "unchecked"
    assert xids().text.startswith("cannot be read")


def test_of_a_file_only_lines_since_the_last_boot_count(log: Callable[[str, int], None], tmp_path: Path) -> None:
    log("", 1)
    path = tmp_path / "kern.log"
    path.write_text("Jan 1 n1 kernel: " + DMESG.format(xid=79) + "Jan 2 n1 kernel: Linux version 6.8.0\nmore\n")
    assert xids((tmp_path / "none", path)).result == "ok"
    path.write_text(path.read_text() + "Jan 2 n1 kernel: NVRM: Xid (PCI:0000:3b:00.0): 119, GSP timeout\n")
    assert xids((path,)).text == f"Xid 119 on 0000:3b:00.0 ({path})"
