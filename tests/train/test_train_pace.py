"""The comparison of a run's first steps with the predicted step time."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_jobs import MODEL, config_of, make, one_rank, restorer, saver
from toy_runs import Notebook, Notes

from megalite.base.files import write_whole
from megalite.checkpoint.store.progress import Progress
from megalite.commands.main import main
from megalite.config.layout import Layout
from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.config.schema import Checkpoint, Config, Eval, Train
from megalite.cost.cluster import known_clusters, load_cluster
from megalite.cost.gpu_names import DEVICE_PATTERNS, cluster_of
from megalite.cost.predict import Prediction, predict
from megalite.plan.batches import GlobalBatch
from megalite.train.folder.records import WARM_UP_STEPS
from megalite.train.loop import Batches, train
from megalite.train.metrics import Meter
from megalite.train.pace import COMPARISON_STEPS, MeasuredPace, Pace, judged

CLUSTER = """
gpu: {{name: a CPU, peak: {{bf16: {rate}, fp32: {rate}, fp64: {rate}}}, multiprocessors: 1, memory: 16,
      bandwidth: {rate}, power: 100, host: 100}}
node: {{gpus: 1, bandwidth: 10, latency: 1}}
network: {{bandwidth: 10, latency: 1}}
price: 1
sources: {{price: "made up"}}
"""


def toy(folder: Path, rate: float, **sections: object) -> Config:
    """A job that trains on a CPU, with a cluster whose GPUs have so many TFLOP/s and GB/s."""
    path = folder / "cpu.yaml"
    write_whole(path, CLUSTER.format(rate=rate))
    base = config_of(Layout(), replace(MODEL, layers=1))
    run = replace(base.run, cluster=str(path))
    return replace(base, run=run, train=Train(steps=WARM_UP_STEPS + 8, precision="fp64"), **sections)  # type: ignore[arg-type]


def trained(config: Config, folder: Path) -> Notes:
    with one_rank():
        job, notes = make(config), Notes()
        batches, reload = Batches(Notebook(job), Notebook(job)), partial(restorer(job).newest, folder, notes.say)
        pace = Pace.of(job, 0, notes)
        followers = [pace.stepped] if pace is not None else []
        with saver(job, folder) as writer:
            notes.code = train(job, batches, Progress(), writer, reload, notes, followers)
    return notes


@pytest.mark.parametrize(("rate", "verdict"), [(1e6, "slower"), (1e-3, "faster")])
def test_a_run_is_compared_with_its_cluster(rate: float, verdict: str, tmp_path: Path) -> None:
    others = {"eval": Eval(interval=7, steps=1), "checkpoint": Checkpoint(interval=6)}
    notes = trained(toy(tmp_path, rate, **others), tmp_path / "run")
    assert notes.code == 0
    assert notes.said[0].startswith("expected on cpu: ")
    ((step, told),) = notes.named("pace")
    assert (step, told["verdict"], told["steps"], told["cluster"]) == (13, verdict, 8, "cpu")
    each = list(notes.curve("step_seconds").values())[WARM_UP_STEPS:]
    assert min(each) / 2 < told["measured"] < 2 * max(each)  # type: ignore[operator]
    (text,) = [said for said in notes.said if said.startswith("step time ")]
    assert "(median of 8 steps up to step 13), expected " in text
    assert f" on cpu: {verdict}; " in text


def test_without_a_cluster_a_cpu_is_not_compared(tmp_path: Path) -> None:
    config = toy(tmp_path, 1.0)
    notes = trained(replace(config, run=replace(config.run, cluster=None)), tmp_path / "run")
    assert notes.named("pace") == []
    assert not [said for said in notes.said if said.startswith("expected")]


def test_a_prediction_that_fails_is_one_line_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of the planner")

    monkeypatch.setattr("megalite.train.pace.predict", fail)
    notes = trained(toy(tmp_path, 1.0), tmp_path / "run")
    assert notes.code == 0
    assert notes.said[0] == "step times are not compared with a prediction: of the planner"
    monkeypatch.undo()
    monkeypatch.setattr("megalite.train.pace.judged", fail)
    notes = trained(toy(tmp_path, 1.0), tmp_path / "again")
    assert notes.code == 0
    assert "step times are not compared with a prediction: of the planner" in notes.said


def prediction_of(overrides: tuple[str, ...] = ()) -> Prediction:
    return predict(check(load([], ["batch.global=64", *overrides]), 8), load_cluster("h100_sxm"))


class Clock:
    """Stands in for the meter: steps of so many seconds."""

    def __init__(self) -> None:
        self.at = self.waited_for = 0.0
        self.read = 0  # times

    def training_seconds(self) -> float:
        self.read += 1
        return self.at


def followed(seconds: list[float], config: tuple[str, ...], batch: GlobalBatch | None = None) -> Notes:
    prediction, clock, notes = prediction_of(config), Clock(), Notes()
    pace = Pace(prediction, 0, torch.device("cpu"))
    for step, each in enumerate(seconds, start=1):
        clock.at += each
        pace.stepped(step, batch or GlobalBatch(0, 64), clock, notes)  # type: ignore[arg-type]
    assert clock.read <= COMPARISON_STEPS  # nothing is kept of a long run
    return notes


def test_warm_up_is_left_out_and_a_long_run_is_compared_once() -> None:
    seconds = prediction_of().seconds
    steps = [100 * seconds] * WARM_UP_STEPS + [seconds] * (COMPARISON_STEPS - WARM_UP_STEPS) + [100 * seconds] * 30
    ((step, told),) = followed(steps, ("train.steps=1000",)).named("pace")
    assert (step, told["steps"], told["verdict"]) == (COMPARISON_STEPS, COMPARISON_STEPS - WARM_UP_STEPS, "as expected")
    assert told["measured"] == pytest.approx(seconds)


@pytest.mark.parametrize(("steps", "compared"), [(WARM_UP_STEPS + 2, 0), (WARM_UP_STEPS + 3, 1)])
def test_a_run_of_few_steps_is_compared_or_not(steps: int, compared: int) -> None:
    notes = followed([1.0] * steps, (f"train.steps={steps}",))
    assert [told["steps"] for _, told in notes.named("pace")] == [3] * compared


def test_steps_of_other_sizes_do_not_count() -> None:
    for batch in (GlobalBatch(0, 32), GlobalBatch(0, 64, pieces=2)):
        assert followed([1.0] * 20, ("train.steps=20",), batch).named("pace") == []


def test_pauses_are_no_training() -> None:
    mesh, load = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(layers=[], count=0)
    meter = Meter(SimpleNamespace(config=Config(), mesh=mesh, load=load))  # type: ignore[arg-type]
    before, began = meter.training_seconds(), time.perf_counter()
    with meter.paused():
        time.sleep(0.02)
    passed = time.perf_counter() - began
    assert meter.training_seconds() - before <= passed - 0.02


def measured(prediction: Prediction, times: float = 2.0, **others: object) -> MeasuredPace:
    seconds = (times * prediction.seconds,) * 95
    return replace(MeasuredPace(seconds, (0.0,) * 95, 0.0), **others)  # type: ignore[arg-type]


@given(st.floats(0.1, 10))
def test_the_verdict_is_that_of_the_interval(times: float) -> None:
    prediction = prediction_of()
    verdict, cause = judged(prediction, measured(prediction, times))
    seconds = times * prediction.seconds
    inside = prediction.low <= seconds <= prediction.high
    assert verdict == ("as expected" if inside else "faster" if seconds < prediction.low else "slower")
    assert bool(cause) != inside


def test_causes_that_were_measured_come_first() -> None:
    prediction = prediction_of()
    seconds = prediction.seconds
    found = [
        measured(prediction, waits=(0.5 * seconds,) * 95),
        measured(prediction, retries=0.5),
        measured(prediction, seconds=(2 * seconds,) * 80 + (6 * seconds,) * 15),
    ]
    for of, word in zip(
        found, ("waiting for data", "the allocator starts anew 0.5 times", "slowest tenth"), strict=True
    ):
        assert word in judged(prediction, of)[1]


def test_a_cpu_is_not_blamed_for_what_gpus_do() -> None:
    prediction = prediction_of(("train.deterministic=true",))
    _, cause = judged(prediction, measured(prediction, on="cpu"))
    assert cause == f"probably the CPU, as the prediction is for {prediction.cluster.gpu.name}"


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (("train.deterministic=true",), "train.deterministic, which the prediction does not count"),
        (("kernels=torch",), "PyTorch's kernels of rms_norm, rope, swiglu, cross_entropy in place of Triton's"),
        (("kernels=torch", "model.experts.count=2"), "rms_norm, rope, swiglu, experts, cross_entropy in place of"),
        (("parallel.tp=8", "model.heads=8", "model.kv_heads=8"), "nvidia-smi topo -m"),
    ],
)
def test_settings_and_large_parts_are_named(overrides: tuple[str, ...], word: str) -> None:
    prediction = prediction_of(overrides)
    assert word in judged(prediction, measured(prediction))[1]


def test_one_gpus_own_work_is_named_where_nothing_else_is_large() -> None:
    model = str(Path(__file__).parents[2] / "configs/model/llama3.2_1b.yaml")
    prediction = predict(check(load([model], [])), load_cluster("h100_sxm"))
    assert "the GPU's own work" in judged(prediction, measured(prediction))[1]


def test_every_known_cluster_has_a_device_and_only_one() -> None:
    assert set(DEVICE_PATTERNS) == set(known_clusters())
    for name, pattern in DEVICE_PATTERNS.items():
        assert cluster_of(pattern.removesuffix("( OAM)?")) == name


@pytest.mark.parametrize("device", ["NVIDIA H200 NVL", "NVIDIA GH200 480GB", "NVIDIA GeForce RTX 4090 D", "cpu", ""])
def test_other_devices_are_not_guessed(device: str) -> None:
    assert cluster_of(device) is None


def test_a_cluster_that_is_none_is_refused_before_the_start(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("gpu: {}")
    arguments = ["train", "--check", f"run.dir={tmp_path}", "run.device=cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megalite.commands.train.check_files", lambda config: None)
        assert main([*arguments, "run.cluster=h99"]) == 2
        assert "run.cluster = h99: is no file, and no cluster that megalite comes with" in capsys.readouterr().err
        assert main([*arguments, f"run.cluster={tmp_path}/bad.yaml"]) == 2
        assert "bad.yaml" in capsys.readouterr().err
    assert main([*arguments, "run.cluster=''"]) == 2
    assert "run.cluster" in capsys.readouterr().err
