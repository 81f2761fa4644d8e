"""`megalite-calibrate-cluster`: runs that a cluster with known figures would have made are told from each other."""

import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml
from commands import in_process

from megalite.config.load import dump, load
from megalite.config.rules.validate import check
from megalite.cost.cluster import Cluster, load_cluster, read_cluster
from megalite.cost.predict import predict
from megalite.train.folder.records import WARM_UP_STEPS, line_of
from megalite_tools.plan.calibrate_cluster import main
from megalite_tools.plan.calibration import FIGURES, scaled

ROOT = Path(__file__).parents[3]
H100 = load_cluster("h100_sxm")
LLAMA = str(ROOT / "configs/model/llama3_8b.yaml")
TRUE = {"gpu.measured": 0.8, "gpu.bandwidth": 0.7, "node.bandwidth": 0.7, "network.bandwidth": 0.5}
RUNS = {  # overrides and GPUs; each depends most on one figure
    "products": (["batch.global=64", "batch.micro=2"], 8),
    "memory": (["batch.global=1", "model.sequence_length=256"], 1),
    "node": (["batch.global=8", "model.sequence_length=512"], 8),
    "network": (["batch.global=64", "model.sequence_length=512", "parallel.tp=2"], 64),
}
Calibrate = Callable[..., tuple[int, str, str]]


@pytest.fixture
def calibrate(capsys: pytest.CaptureFixture[str]) -> Calibrate:
    return in_process(main, capsys)


def made(
    folder: Path,
    name: str,
    factors: Mapping[str, float],
    noise: float = 0.01,
    cluster: Cluster = H100,
    **changes: object,
) -> Path:
    """The folder of a run on a cluster with figures times `factors`, as training leaves it."""
    overrides, gpus = RUNS[name]
    config = check(load([LLAMA], ["train.recompute=full", *overrides]), gpus)
    seconds = predict(config, scaled(cluster, factors, {"bf16"})).seconds
    run, draw = folder / name, random.Random(name)
    (run / "starts").mkdir(parents=True)
    (run / "starts/001.yaml").write_text(dump(config))
    records = [
        {"step_seconds": seconds * (30 if step <= WARM_UP_STEPS else draw.gauss(1, noise)), "data_wait_seconds": 0.0}
        for step in range(1, 31)
    ]
    lines = [line_of(step, record | changes) for step, record in enumerate(records, start=1)]
    (run / "metrics.jsonl").write_bytes(b"".join(lines))
    return run


def factors_in(path: Path) -> dict[str, float]:
    """What the figures of a file are times those of the H100's."""
    found = read_cluster(path)
    return {
        "gpu.measured": found.gpu.measured["bf16"] / H100.gpu.measured["bf16"],
        "gpu.bandwidth": found.gpu.bandwidth / H100.gpu.bandwidth,
        "node.bandwidth": found.levels[-1].link.bandwidth / H100.levels[-1].link.bandwidth,
        "network.bandwidth": found.network.bandwidth / H100.network.bandwidth,
    }


def test_figures_of_a_true_cluster_are_found_again(tmp_path: Path, calibrate: Calibrate) -> None:
    runs = [made(tmp_path, name, TRUE) for name in RUNS]
    code, out, _ = calibrate("h100_sxm", *runs, "--out", tmp_path / "new.yaml")
    assert code == 0
    assert factors_in(tmp_path / "new.yaml") == pytest.approx(TRUE, rel=0.05)
    errors = [line.split()[-1] for line in out.splitlines() if line.strip().startswith(str(tmp_path))]
    assert len(errors) == 4
    assert all(abs(float(error.rstrip("%"))) < 1 for error in errors)
    sources = yaml.safe_load((tmp_path / "new.yaml").read_text())["sources"]
    for name in FIGURES:
        assert sources[name].startswith(H100.sources[name])
        assert str(tmp_path / "node") in sources[name]
    assert read_cluster(tmp_path / "new.yaml").price == H100.price


@pytest.mark.parametrize(("name", "figure"), list(zip(RUNS, FIGURES, strict=True)))
def test_one_run_tells_one_figure(name: str, figure: str, tmp_path: Path, calibrate: Calibrate) -> None:
    run = made(tmp_path, name, {figure: TRUE[figure]}, noise=0)
    code, out, _ = calibrate("h100_sxm", run, "--out", tmp_path / "new.yaml")
    assert code == 0
    found = factors_in(tmp_path / "new.yaml")
    assert found == pytest.approx(dict.fromkeys(FIGURES, 1.0) | {figure: TRUE[figure]}, rel=1e-3)
    assert len([line for line in out.splitlines() if " kept " in line]) == 3


def test_equal_runs_tell_no_more_than_one(tmp_path: Path, calibrate: Calibrate) -> None:
    runs = [made(tmp_path / copy, "products", TRUE) for copy in "ab"]
    code, out, _ = calibrate("h100_sxm", *runs, "--out", tmp_path / "new.yaml")
    assert code == 0
    assert "the runs do not tell it from gpu.measured" in out
    assert "no run depends on it enough" in out


def test_only_the_latest_start_counts(tmp_path: Path, calibrate: Calibrate) -> None:
    run = made(tmp_path, "products", {}, noise=0)
    again = made(tmp_path / "again", "products", {"gpu.measured": 0.9}, noise=0)
    metrics = (run / "metrics.jsonl").read_bytes() + line_of(2, {"event": "resumed"})  # it was killed and went back
    for step, line in enumerate((again / "metrics.jsonl").read_text().splitlines()[:15], start=3):
        metrics += line.replace(f'"step": {step - 2},', f'"step": {step},').encode() + b"\n"
    (run / "metrics.jsonl").write_bytes(metrics)
    assert calibrate("h100_sxm", run, "--out", tmp_path / "new.yaml")[0] == 0
    assert factors_in(tmp_path / "new.yaml")["gpu.measured"] == pytest.approx(0.9, rel=1e-3)


def test_waiting_for_the_slowest_gpu_stays_out_of_the_factors(tmp_path: Path, calibrate: Calibrate) -> None:
    fields = yaml.safe_load((ROOT / "configs/cluster/h100_sxm.yaml").read_text())
    fields["gpu"]["spread"] = 0.03
    (tmp_path / "unequal.yaml").write_text(yaml.safe_dump(fields))
    unequal = read_cluster(tmp_path / "unequal.yaml")
    runs = [made(tmp_path, name, TRUE, noise=0, cluster=unequal) for name in RUNS]
    assert calibrate(tmp_path / "unequal.yaml", *runs, "--out", tmp_path / "new.yaml")[0] == 0
    assert factors_in(tmp_path / "new.yaml") == pytest.approx(TRUE, rel=1e-3)
    assert read_cluster(tmp_path / "new.yaml").gpu.spread == 0.03


def test_an_island_is_scaled_with_its_node(tmp_path: Path, calibrate: Calibrate) -> None:
    fields = yaml.safe_load((ROOT / "configs/cluster/h100_sxm.yaml").read_text())
    fields["island"] = {"gpus": 4, "bandwidth": 450.0, "latency": 7.2}
    (tmp_path / "islands.yaml").write_text(yaml.safe_dump(fields))
    runs = [made(tmp_path, name, TRUE, noise=0) for name in RUNS]
    assert calibrate(tmp_path / "islands.yaml", *runs, "--out", tmp_path / "new.yaml")[0] == 0
    island, node = (level.link.bandwidth for level in read_cluster(tmp_path / "new.yaml").levels)
    assert island == pytest.approx(node) == pytest.approx(450e9 * TRUE["node.bandwidth"], rel=0.05)


def test_bad_runs_are_refused_with_one_message(tmp_path: Path, calibrate: Calibrate) -> None:
    def refused(told: str, *runs: Path) -> None:
        code, _, err = calibrate("h100_sxm", *runs, "--out", tmp_path / "new.yaml")
        assert code == 2
        assert told in err
        assert not (tmp_path / "new.yaml").exists()

    refused("none: is no folder", tmp_path / "none")
    waiting = made(tmp_path / "waiting", "products", {}, data_wait_seconds=100.0)
    refused("waits for data", waiting)
    far = made(tmp_path / "far", "products", {"gpu.measured": 0.05})
    refused("gpu.measured would have to be less than 0.25 times as large", far)
    short = made(tmp_path / "short", "products", {})
    lines = (short / "metrics.jsonl").read_text().splitlines(keepends=True)
    (short / "metrics.jsonl").write_text("".join(lines[: WARM_UP_STEPS + 2]))
    refused(f"has 2 records of step times after the first {WARM_UP_STEPS} steps", short)
    growing = made(tmp_path / "growing", "products", {})
    text = (growing / "starts/001.yaml").read_text()
    (growing / "starts/001.yaml").write_text(text.replace("rampup: null", "rampup: {start: 8, tokens: 1000000}"))
    refused("batch.rampup: steps of different sizes", growing)
    (growing / "starts/001.yaml").unlink()
    refused("config.yaml: is missing", growing)


def test_no_file_is_overwritten_and_no_cluster_guessed(tmp_path: Path, calibrate: Calibrate) -> None:
    run = made(tmp_path, "products", {})
    (tmp_path / "old.yaml").write_text("old")
    for arguments, told in (
        (["h100_sxm", run, "--out", tmp_path / "old.yaml"], "there is such a file already"),
        (["h100_sxm", run, "--out", tmp_path / "new.txt"], "must end in .yaml"),
        (["h99", run, "--out", tmp_path / "new.yaml"], "h99: is no file, and no cluster that megalite comes with"),
    ):
        code, _, err = calibrate(*arguments)
        assert code == 2
        assert told in err
    assert (tmp_path / "old.yaml").read_text() == "old"


def test_runs_that_no_factors_suit_are_named(tmp_path: Path, calibrate: Calibrate) -> None:
    fast = made(tmp_path / "a", "products", {"gpu.measured": 1.0})
    slow = made(tmp_path / "b", "products", {"gpu.measured": 0.4})
    code, out, _ = calibrate("h100_sxm", fast, slow, "--out", tmp_path / "new.yaml")
    assert code == 0
    assert "still off by more than the ±13%" in out
    code, out, _ = calibrate("h100_sxm", fast, "--out", tmp_path / "other.yaml")
    assert code == 0
    assert "still off" not in out
