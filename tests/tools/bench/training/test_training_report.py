"""The table, and what it is made of: agreement, kinds of kernels, sensors, reports of tests, files that are kept."""

import json
import math
import os
import random
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.base.errors import InputError
from megalite_tools.bench.training import junit
from megalite_tools.bench.training.agreement import apart, judged
from megalite_tools.bench.training.cases import Case
from megalite_tools.bench.training.keeping import Keeper, best_gemm, packed
from megalite_tools.bench.training.kernel_kinds import Kernel, attention_backend, kind_of, of_trace, summary
from megalite_tools.bench.training.report import page
from megalite_tools.bench.training.rows import Rows
from megalite_tools.bench.training.sensors import Sensors, readings

LOSS = [11.0, 10.0, 9.0]


def row(name: str, implementation: str = "megalite", ms: float = 100.0, **more: Any) -> dict[str, Any]:
    return {
        "id": name,
        "label": f"{implementation}, compiled",
        "implementation": implementation,
        "model": "8b8",
        "ranks": 1,
        "group": "8b8, batch 2 x 1",
        "status": "ok",
        "written": 1.0,
        "commit": "abc",
        "settings": {"mode": "zero1", "kernels": "auto", "recompute": "none"},
        "step_ms": {"median": ms, "p10": ms - 1, "p90": ms + 1},
        "tok_s": 1e6 / ms,
        "F": 60 / ms,
        "C": 50 / ms,
        "flops": {"full": 2e10, "causal": 1.6e10},
        "loss": LOSS,
        **more,
    }


def rows_of(*rows: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["id"]: each for each in rows}


def cells(text: str, begins: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {begins} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_table_of_all_that_can_happen() -> None:
    peers = {
        "slower": row("slower", "transformers", 125.0, predicted={"step_ms": 100.0, "spread": 0.35}, attention="cudnn"),
        "tie": row("tie", "torchtitan", 101.5),
        "wrong": row("wrong", "liger", 50.0, status="disagrees", reason="the loss of step 1 is 3, not the 11 of ours"),
        "late": {**row("late", "x"), "status": "timeout", "step_ms": None, "reason": "took longer than its limit"},
    }
    ours = row("ours", peak_alloc=3 << 30, compile_s=31.0, power_w={"median": 655.0, "max": 700}, sm_mhz=1755.0)
    text = page(
        {"ours": ours, **peers},
        [Case("missing", command=("x",))],
        {"gpus": [{"name": "NVIDIA H100"}], "best_gemm": 8e14, "command": "c"},
    )
    best = cells(text, "megalite, compiled, zero1")
    assert best[1:9] == ["100.0 (99.0–101.0)", "10,000", "60.0%", "50.0%", "25.0%", "3.0", "31", "–"]
    assert best[9:] == ["655", "1755", "11.000 → 9.000", "–", "1"]
    slower = cells(text, "transformers, compiled")
    assert slower[-2:] == ["100.0 ms ± 35% (0.80×)", "1.250"]
    assert slower[8] == "cudnn"
    assert cells(text, "torchtitan, compiled")[-1] == "1.015 (tie)"
    wrong = cells(text, "liger, compiled")
    assert wrong[1].startswith("disagrees: the loss of step 1")
    assert set(wrong[2:]) == {"–"}, "no time and no ratio of what computes something else"
    assert cells(text, "x, compiled")[1] == "timeout: took longer than its limit"
    assert "## Not run\n\nmissing\n" in text
    assert "One GPU cannot show" in text
    assert cells(text, "8b8, 1 rank | transformers | slower")[-1] == "1.250"
    assert "wrong" not in text.partition("The fastest that ran")[2].partition("##")[0]


def test_several_gpus_show_what_one_cannot() -> None:
    assert "One GPU cannot show" not in page({}, [], {"gpus": [{"name": "a"}, {"name": "b"}]})


def test_repeats_are_one_line_of_their_median() -> None:
    found = rows_of(row("a", ms=100.0), row("a-r2", ms=110.0), row("a-r3", ms=102.0), row("b-r2", "transformers"))
    text = page(found, [], {"best_gemm": 8e14})
    line = cells(text, "megalite, compiled, zero1, 3 runs")
    assert line[1:6] == ["102.0 (101.0–103.0)", "9,804", "58.8%", "49.0%", "24.5%"], "all of one run"
    assert text.count("megalite, compiled, zero1") == 1
    assert cells(text, "8b8, 1 rank | megalite | a-r3")[3] == "9,804"


def test_a_repeat_that_disagrees_is_not_hidden_by_the_others() -> None:
    wrong = row("a-r2", status="disagrees", reason="the loss of step 1 is 3")
    text = page(rows_of(row("a"), wrong, row("peer", "transformers")), [], {})
    assert cells(text, "megalite, compiled, zero1")[1] == "disagrees: the loss of step 1 is 3"
    assert cells(text, "transformers, compiled")[-1] == "–"


def test_programs_and_tests_have_a_table_of_their_own() -> None:
    program = {"id": "tests-gpu", "status": "failed", "seconds": 61.2, "reason": "exit code 1", "label": "tests-gpu"}
    program["tests"] = {"passed": 70, "failed": 1, "names": ["gpu::test_x"]}
    assert cells(page({"tests-gpu": program}, [], {}), "tests-gpu")[1:] == [
        "failed", "61", "70 passed, 1 failed: gpu::test_x", "exit code 1",
    ]  # fmt: skip


def test_overlap_other_than_in_pieces_is_named() -> None:
    pieces, symmetric = ({"mode": "zero1", "overlap": each} for each in ("pieces", "symmetric"))
    text = page(rows_of(row("a", settings=pieces), row("b", settings=symmetric, ms=90.0)), [], {})
    assert cells(text, "megalite, compiled, zero1")[-1] == "1.111"
    assert cells(text, "megalite, compiled, zero1, symmetric overlap")[-1] == "1"


def test_whole_training_stands_beside_the_bare_step() -> None:
    group, settings = "1b, batch 2 x 1", {"mode": "zero1", "compile": True}
    run = {
        "id": "1b-train",
        "label": "1b-train",
        "status": "ok",
        "seconds": 100.0,
        "group": group,
        "settings": settings,
    }
    run |= {"wall_ms": {"median": 330.0}, "starts": [{"seconds_to_first_step": 21.0}, {"seconds_to_first_step": 30.5}]}
    run["saves"] = [{"bytes": 14_900_000_000, "complete_seconds": 12.0, "stall_seconds": 0.345}]
    bare = row("bare", group=group, settings=settings, ms=300.0)
    other = row("eager", group=group, settings={**settings, "compile": False}, ms=200.0)
    assert cells(page(rows_of(run, bare, other), [], {}), "1b-train")[3] == (
        "330.0 ms a step with loader and reports, 1.100× the bare step; 14.9 GB saved in 12.0 s, "
        "training stood still for 0.34 s; started in 21.0 s; resumed in 30.5 s"
    )


def test_text_of_rows_cannot_break_the_table() -> None:
    nasty = {**row("a"), "status": "crash", "step_ms": None, "reason": "x | y\n| z |\x1b[31m"}
    text = page({"a": nasty}, [], {})
    assert "\x1b" not in text
    assert len([line for line in text.splitlines() if line.startswith("| megalite")]) == 1


@pytest.mark.parametrize(
    ("theirs", "differs"),
    [
        (LOSS, ""),
        ([11.009, 10.009, 9.009], ""),
        ([11.0, 10.0, 9.05], ""),  # 3 % of what the loss has fallen
        ([11.02, 10.0, 9.0], "step 1"),
        ([11.0, 10.0, 9.07], "step 3"),
        ([11.0, math.nan, 9.0], "step 2"),
        ([math.inf, 10.0, 9.0], "step 1"),
    ],
)
def test_losses_agree_as_far_as_roundings_go(theirs: list[float], differs: str) -> None:
    assert (differs in apart(LOSS, theirs)) if differs else apart(LOSS, theirs) == ""


@given(st.lists(st.floats(0, 20), min_size=1, max_size=20))
def test_a_curve_agrees_with_itself_and_with_no_curve_that_is_far(curve: list[float]) -> None:
    assert apart(curve, curve) == ""
    assert apart(curve, [loss + 1 for loss in curve]) != ""


def test_gradients_of_another_size_disagree_though_adamw_hides_them() -> None:
    norms = {"ours": [2.0, 1.0], "near": [2.05, 9.0], "mean": [4.0, 1.0], "lost": [math.nan, 1.0]}
    found = judged(
        rows_of(*(row(name, written=place, grad_norm=each) for place, (name, each) in enumerate(norms.items())))
    )
    statuses = [found[name]["status"] for name in norms]
    assert statuses == ["ok", "ok", "disagrees", "disagrees"]
    assert found["mean"]["reason"] == "the first gradients have the norm 4, not the 2 of ours"


def test_the_first_row_of_ours_is_what_a_group_is_compared_with() -> None:
    off = [loss + 0.5 for loss in LOSS]
    found = judged(
        rows_of(
            row("ours", written=2.0),
            row("again", written=3.0, loss=off),
            row("peer", "liger", written=1.0),
            row("elsewhere", "liger", group="another", loss=off),
            row("fixed", "liger", status="disagrees", reason="earlier"),
            {"id": "tests", "status": "ok"},
        )
    )
    assert {name: each["status"] for name, each in found.items()} == {
        "ours": "ok", "again": "disagrees", "peer": "ok", "elsewhere": "ok", "fixed": "ok", "tests": "ok",
    }  # fmt: skip
    assert "reason" not in found["fixed"]
    assert "not the 11.0000 of ours" in found["again"]["reason"]


# Names as CUDA 13, cuDNN 9.19, FlashAttention, Inductor, Liger and megalite give them.
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_TNT", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", "gemm"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)", "attention"),
        ("_rms_norm_forward", "norm"),
        ("_rms_norm_backward_kernel", "norm"),
        ("_swiglu_backward", "swiglu"),
        ("_rope", "rope"),
        ("_stats_kernel", "loss"),
        ("liger_cross_entropy_kernel", "loss"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<CopyFunctor<float>>", "copy"),
        ("_adamw_kernel", "optimizer"),
        ("_squares_kernel", "optimizer"),
        ("triton_red_fused_add_mean_mul_0", "compiled"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "pointwise"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>", "copy"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("void at::native::embedding_backward_feature_kernel", "embedding"),
        ("something else", "other"),
    ],
)
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    ("names", "backend"),
    [
        (["cudnn_generated_fort_native_sdpa_sm90_flash_fprop"], "cudnn"),
        (["void pytorch_flash::flash_fwd_kernel<>", "nvjet"], "flash2"),
        (["void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<>>>"], "flash3"),
        (["fmha_cutlassF_bf16_aligned"], "efficient"),
        (["nvjet", "_rope"], ""),
    ],
)
def test_attention_is_told_from_kernels(names: list[str], backend: str) -> None:
    assert attention_backend(Kernel(name, 1, 1.0) for name in names) == backend


def test_a_trace_gives_kernels_and_gaps() -> None:
    def event(name: str, begins: float, lasts: float, category: str = "kernel") -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": begins, "dur": lasts}

    events = [
        event("b", 1500, 500),
        event("a", 1000, 400),  # then nothing for 100
        event("a", 1800, 400),  # beside b
        event("Memcpy", 3000, 100, "gpu_memcpy"),  # after 800
        event("cudaLaunchKernel", 0, 9000, "cuda_runtime"),
        event("FSDP::all_gather", 0, 9000, "gpu_user_annotation"),
        {"ph": "M", "name": "process_name"},
    ]
    kernels, gap = of_trace(events)
    assert gap == pytest.approx(0.9)
    assert {(kernel.name, kernel.count, kernel.ms) for kernel in kernels} == {
        ("a", 2, 0.8), ("b", 1, 0.5), ("Memcpy", 1, 0.1),
    }  # fmt: skip
    found = summary(kernels, 2, gap)
    assert found["ms_by_kind"] == {"gap": 0.45, "other": 0.65, "copy": 0.05}
    assert found["kernels_per_step"] == 2
    assert of_trace([]) == ([], 0.0)


def test_readings_of_a_gpu() -> None:
    lines = ["650.10, 1755, 61\n", "700.00, 1700, 62\n", "[N/A], 1755, 61\n", "690.0, 17", "670.5, 1980, 60\n", ""]
    assert readings(lines) == {"power_w": {"median": 670.5, "max": 700.0}, "sm_mhz": 1755.0, "temp_c": 62.0}
    assert readings(["[N/A], [N/A], [N/A]"]) == {}


def test_sensors_are_read_while_something_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\nwhile echo "600.0, 1700, 50"; do sleep 0.01; done\n')
    smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with Sensors(0) as sensors:
        while not sensors.readings:
            pass
    assert sensors.readings["sm_mhz"] == 1700
    with Sensors(None) as nothing:
        pass
    assert nothing.readings == {}
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with Sensors(0) as missing:
        pass
    assert missing.readings == {}


XML = """<testsuites><testsuite name="pytest"><testcase classname="c" name="good"/>
<testcase classname="c" name="bad"><failure>no</failure></testcase>
<testcase classname="c" name="died"><error/></testcase>
<testcase classname="c" name="left"><skipped/></testcase></testsuite></testsuites>"""


def test_reports_of_tests_are_counted_and_joined(tmp_path: Path) -> None:
    good, half, joined = (tmp_path / name for name in ("good.xml", "half.xml", "joined.xml"))
    good.write_text(XML)
    half.write_text(XML[:90])
    expected = {"passed": 1, "failed": 2, "names": ["c::bad", "c::died"], "skipped": 1}
    assert junit.counts([good, half, tmp_path / "missing.xml"]) == expected
    joined.write_bytes(junit.merged([good, good, half]))
    assert junit.counts([joined])["passed"] == 2
    assert junit.counts([]) == {}


@pytest.mark.parametrize(
    "text", ["", "<a", '<?xml version="1.0" encoding="none"?><a/>', '<testsuite><testcase time="0"/></testsuite>']
)
def test_reports_that_are_none_count_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.xml"
    path.write_text(text)
    assert junit.counts([path]) == {}
    path.unlink()
    os.mkfifo(path)
    assert junit.counts([path]) == {}


def test_what_tests_print_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.xml"
    path.write_text(XML.replace("<skipped/>", f"<system-out>{'x' * 99_999}</system-out>").replace("no", "y" * 99_999))
    assert len(junit.merged([path])) < 10_000


def test_few_files_hold_all_that_is_kept(tmp_path: Path) -> None:
    out, keep = tmp_path / "out", tmp_path / "keep"
    (out / "traces").mkdir(parents=True)
    Rows(out / "rows").write("a", row("a"))
    (out / "tests.xml").write_text(XML)
    (out / "probe.json").write_text(json.dumps({"gemm": {"x": {"precision": "bf16", "tflops": 700.0}}}))
    (out / "traces" / "a.json.gz").write_bytes(b"trace")
    cases = [Case("t", command=("x",), keep=("tests.xml", "probe.json", "missing"))]
    keeper, rows = Keeper(out, keep, cases, [], "the command"), Rows(out / "rows").read()
    keeper.keep(rows)
    assert {path.name for path in keep.iterdir()} == {"rows.json", "table.md", "tests.xml", "files.tar.gz"}
    kept = json.loads((keep / "rows.json").read_text())
    assert kept["command"] == "the command"
    assert kept["best_gemm"] == 7e14
    assert [each["id"] for each in kept["rows"]] == ["a"]
    assert "28.6%" in (keep / "table.md").read_text(), "of the best product"
    with tarfile.open(keep / "files.tar.gz") as archive:
        assert archive.getnames() == ["probe.json", "a.json.gz"]
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (keep / "table.md").unlink()
    (keep / "table.md").symlink_to(victim)
    with pytest.raises(InputError, match=r"table\.md: is a link"):
        keeper.keep({**rows, "b": row("b")})
    assert len(json.loads((keep / "rows.json").read_text())["rows"]) == 2, "one output that fails stops no other"
    assert victim.read_text() == "precious"


def test_an_archive_leaves_out_what_makes_it_too_large(tmp_path: Path) -> None:
    sizes = {"a": 3000, "large": 200_000, "dense": 9000, "b": 3000}
    files = [tmp_path / name for name in sizes]
    for path in files:
        path.write_bytes(random.Random(path.name).randbytes(sizes[path.name]))
    (tmp_path / "part.tar.gz").write_bytes(packed(files, 8000))
    assert (tmp_path / "part.tar.gz").stat().st_size <= 8000
    with tarfile.open(tmp_path / "part.tar.gz") as archive:
        assert archive.getnames() == ["a", "b"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"gemm": []}', '{"gemm": {"a": 1}}', '{"gemm": {"x": {"error": "no"}}}']
)
def test_a_probe_without_products_gives_no_share(tmp_path: Path, text: str) -> None:
    (tmp_path / "probe.json").write_text(text)
    assert best_gemm(tmp_path / "probe.json") is None
