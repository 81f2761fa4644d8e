"""The benchmarks that start ranks of their own, small enough for a test."""

import json
import subprocess
import time
from pathlib import Path

import pytest
import warm_start
from ranks import Ranks

from megalite.schedule.generate import NAMES
from megalite_tools.bench import checkpoint as bench_checkpoint
from megalite_tools.bench import context as bench_context
from megalite_tools.bench import exchanges as bench_exchanges
from megalite_tools.bench import pipeline as bench_pipeline
from megalite_tools.bench import ranks as bench_ranks
from megalite_tools.bench import schedules as bench_schedules

# Sleeps this short take no time beside the runner.
PATIENT = """
import sys
from megalite_tools.bench import pipeline
pipeline.TOLERANCE = pipeline.NOISE = 1000.0
sys.exit(pipeline.main(sys.argv[1:]))
"""


def run(*command: str) -> None:
    """Run a benchmark as a program: its ranks are forks of it, and of this process they cannot be."""
    done = warm_start.run(command, 280)
    assert done.returncode == 0, done.stderr


def test_every_schedule_is_measured_beside_its_simulation(tmp_path: Path) -> None:
    out = tmp_path / "pipeline.json"
    run("-c", PATIENT, "--unit", "1", "--micro-batches", "8", "--steps", "1", "--out", str(out))
    rows = json.loads(out.read_text())["schedules"]
    assert tuple(row["schedule"] for row in rows) == NAMES
    for row in rows:
        assert row["simulated_seconds"] > 0.024, "eight forwards and backwards"
        assert set(row["seconds"]) == {"megalite"} | (
            {"torch"} if row["schedule"] in bench_pipeline.TORCH_SCHEDULES else set()
        )
        assert min(map(min, row["seconds"].values())) > 0.024


def test_a_schedule_that_is_too_slow_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(name: str, seconds: float, ratio: float | None) -> dict[str, object]:
        return {"schedule": name, "simulated_seconds": 1.0, "seconds": {"megalite": [seconds]}, "time_ratio": ratio}

    rows = [row("a", 1.04, None), row("b", 1.06, 1.01), row("c", 1.01, 1.03)]
    out = tmp_path / "pipeline.json"
    out.write_text(json.dumps({"schedules": rows}))
    monkeypatch.setattr(bench_ranks, "launch", lambda *_: 0)
    assert bench_pipeline.main(["--out", str(out)]) == 1
    told = capsys.readouterr().err.splitlines()
    assert [line.split(":")[2].strip() for line in told] == ["b", "c"]
    assert "1.060 of its simulated time" in told[0]
    assert "1.030 of the time of torch's runner" in told[1]
    out.write_text(json.dumps({"schedules": rows[:1]}))
    assert bench_pipeline.main(["--out", str(out)]) == 0


def test_searched_orders_are_measured_beside_named_ones(ranks: Ranks) -> None:
    rows = ranks.run(bench_schedules.measure, 0.001, 1)[0]["measured"]
    assert [set(row["seconds"]) for row in rows] == [
        {"1f1b", "zb_h1", "auto"},
        {"1f1b", "auto"},
        {"1f1b", "zbv", "auto"},
    ]
    for row in rows:
        assert set(row["simulated_seconds"]) == set(row["time_ratios"]) == set(row["seconds"])
        assert min(map(min, row["seconds"].values())) > 0.036, "twelve forwards and backwards"
        assert row["simulated_seconds"]["auto"] > 0.036


def test_random_pipelines_are_compared_in_simulation() -> None:
    found = bench_schedules.compare_in_simulation(3, seed=0)
    assert (found["compared"], found["worse"]) == (3, 0)
    assert 0 <= found["mean_gain"] <= found["largest_gain"] < 1


def test_an_order_that_is_too_slow_is_told() -> None:
    def row(ours: float, ratio: float) -> dict[str, object]:
        return {
            "pipeline": "p",
            "simulated_seconds": {"auto": 1.0},
            "seconds": {"auto": [ours]},
            "time_ratios": {"1f1b": ratio},
        }

    fine = {"worse": 0, "compared": 9}
    assert bench_schedules.wrong_in([row(1.04, 0.9)], fine) == []
    assert len(bench_schedules.wrong_in([row(1.06, 0.9)], fine)) == 1
    assert len(bench_schedules.wrong_in([row(1.04, 1.01)], fine)) == 1
    assert bench_schedules.wrong_in([], {"worse": 2, "compared": 9}) == [
        "2 of 9 orders take longer than a named schedule"
    ]


def test_ranks_that_fail_are_not_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_ranks, "launch", lambda *_: 1)
    assert bench_pipeline.main(["--out", str(tmp_path / "pipeline.json")]) == 1


def test_every_method_sends_what_is_predicted(tmp_path: Path) -> None:
    out = tmp_path / "context.json"
    run("-m", "megalite_tools.bench.context", "--cp", "2", "--length", "64", "--rounds", "1", "--out", str(out))
    rows = {row["method"]: row for row in json.loads(out.read_text())["methods"]}
    assert set(rows) == {"ring", "ulysses", "all_gather"}
    assert all(row["sent"] == row["sent_predicted"] > 0 for row in rows.values())
    assert rows["ring"]["peak"] < rows["all_gather"]["peak"]


def test_exchanges_over_slow_links_are_measured_with_and_without_compute_beside_them(tmp_path: Path) -> None:
    out = tmp_path / "exchanges.json"
    run("-m", "megalite_tools.bench.exchanges", "--layers", "2", "--rates", "20", "--rounds", "1", "--out", str(out))
    fast, slow = json.loads(out.read_text())["links"]
    assert (fast["megabytes_per_second"], slow["megabytes_per_second"], fast["sending"]) == (None, 20, 0)
    # Half of two rows a token, and their scores, in two exchanges each way for a layer; a micro-batch has 256 tokens.
    rows = 8 * 2 * 2 * 256 * 2 // 2 * (2 * 256 + 1) * 4
    assert slow["sending"] == pytest.approx((rows + 8 * 2 * 4 * 8) / 20e6)
    assert min(slow["one after the other"]) > slow["sending"]


def test_every_way_to_save_and_load_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "checkpoint.json"
    small = ["--ranks", "2", "--layers", "1", "--width", "64", "--rounds", "1"]
    small += ["--folder", str(tmp_path), "--local", str(tmp_path)]
    run("-m", "megalite_tools.bench.checkpoint", *small, "--out", str(out))
    report = json.loads(out.read_text())
    weights = 2 * 4096 * 64 + 4 * 64 * 64 + 3 * 64 * 170 + 3 * 64
    assert report["bytes"] == 12 * weights, "weights and two moments in fp32"
    for what in ("save_seconds", "load_seconds"):
        assert set(report[what]) == {"megalite", "dcp", "torch.save"}
        assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in report[what].values())
    kept = {"dcp, kept stager"} if bench_checkpoint.KEPT_STAGER else set()
    assert set(report["asynchronous"]) == {"megalite", "dcp"} | kept
    assert set(report["load_peak_bytes"]) == {"megalite", "dcp"}
    tiers = {"shared": {"stall", "durable"}, "local": {"stall", "complete", "durable", "back"}}
    assert {way: set(seconds) for way, seconds in report["tiers"].items()} == tiers
    assert all(len(times) == 1 for seconds in report["tiers"].values() for times in seconds.values())
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.json"], "nothing else is left"


def test_how_long_training_stands_still_for_both_tiers(tmp_path: Path) -> None:
    """A second one is ended by a signal: neither leaves anything."""
    folder, local, out = tmp_path / "shared", tmp_path / "local", tmp_path / "tiers.json"
    folder.mkdir()
    local.mkdir()
    command = ["-m", "megalite_tools.bench.checkpoint", "--tiers", "--ranks", "2", "--layers", "1"]
    command += ["--width", "64", "--rounds", "1", "--every", "2", "--folder", str(folder), "--local", str(local)]
    run(*command, "--saves", "4", "--pause", "0.1", "--out", str(out))
    endless = [*command, "--saves", "1000000", "--pause", "0.1", "--out", str(tmp_path / "never.json")]
    found = json.loads(out.read_text())["standstill"]
    assert {way: len(each["stood_still"]) for way, each in found.items()} == {
        "shared": 4, "shared, rarely": 2, "local": 4,
    }  # fmt: skip
    assert all(0 < each["durable"] <= 4 and each["lost"] > 0 for each in found.values())
    with warm_start.Popen(endless, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not any(local.glob("*/*")) and time.monotonic() < deadline:  # a rank has saved
            time.sleep(0.05)
        process.terminate()
        _, told = process.communicate(timeout=60)
    assert (process.returncode, "SIGTERM" in told) == (3, True)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["local", "shared", "tiers.json"]


@pytest.mark.parametrize(
    ("main", "argument"),
    [
        (bench_pipeline.main, "--micro-batches=7"),
        (bench_pipeline.main, "--unit=0"),
        (bench_schedules.main, "--cases=0"),
        (bench_context.main, "--cp=3"),
        (bench_exchanges.main, "--rates=0"),
        (bench_checkpoint.main, "--width=100"),
    ],
)
def test_bad_input_is_refused(main: object, argument: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([argument, "--out", str(tmp_path / "out.json")]) == 2  # type: ignore[operator]
    assert argument.partition("=")[0] in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
