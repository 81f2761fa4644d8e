"""Reports to Weights & Biases: a stand-in records what a run is told, and fails or hangs where a run must not care."""

import importlib.util
import json
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalite.base.errors import InputError, Unhealthy
from megalite.config.load import load
from megalite.config.rules.files import validate_files
from megalite.config.rules.validate import validate
from megalite.config.schema import Config, Data, Log, Run, Source, Train
from megalite.train.folder.records import read_records
from megalite.train.report import Report
from megalite.train.tracking.served import kept_id

CONFIG = Config(run=Run(name="toy"), train=Train(steps=20), log=Log(tensorboard=False, wandb="toys"))


class StandIn:
    """What a run uses of the package, and what it was told."""

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.points: list[dict[str, Any]] = []
        self.codes: list[int] = []
        self.axes: list[tuple[str, str]] = []
        self.let_go = threading.Event()
        self.offline, self.url, self.dir = False, "https://wandb.example/toys", ""

    def init(self, **given: Any) -> "StandIn":
        self.inits.append(given)
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes.append((name, step_metric))

    def log(self, point: dict[str, Any]) -> None:
        self.points.append(point)

    def finish(self, exit_code: int) -> None:
        self.codes.append(exit_code)

    def teardown(self) -> None:
        self.let_go.set()

    Settings = SimpleNamespace


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", stand_in)  # type: ignore[arg-type]
    return stand_in


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_it_is_told_no_secrets_of_the_configuration(tmp_path: Path, wandb: StandIn) -> None:
    secret = Source("http://user:precious@host/store")
    with Report(tmp_path, replace(CONFIG, data=Data(train=[secret])), 0):
        pass
    (told,) = wandb.inits
    assert told["config"]["data"]["train"][0]["path"] == "http://***@host/store"
    assert "precious" not in str(told)


def test_it_is_told_what_metrics_jsonl_is_told_in_order_by_step(tmp_path: Path, wandb: StandIn) -> None:
    with Report(tmp_path, CONFIG, 0) as report:
        report.record(1, {"loss": 2.5, "grad_norm": 1.0})
        report.record(2, {"loss": 2.0})
        report.event(1, "rollback", "back to step 1")
        report.record(2, {"loss": 2.25})
    assert wandb.points == [
        {"step": 1, "loss": 2.5, "grad_norm": 1.0},
        {"step": 2, "loss": 2.0},
        {"step": 1, "event/rollback": "back to step 1"},
        {"step": 2, "loss": 2.25},
    ]
    assert (wandb.axes, wandb.codes) == ([("*", "step")], [0])
    (given,) = wandb.inits
    assert (given["project"], given["name"], given["dir"]) == ("toys", "toy", str(tmp_path))
    assert given["config"]["batch"]["global"] == CONFIG.batch.global_
    assert (given["settings"].console, given["settings"].silent) == ("off", True)


def test_a_resumed_run_continues_the_same_one_unless_the_project_is_another(tmp_path: Path, wandb: StandIn) -> None:
    for step, project in ((0, "toys"), (1, "toys"), (2, "others")):
        with Report(tmp_path, replace(CONFIG, log=Log(tensorboard=False, wandb=project)), step) as report:
            report.record(step + 1, {"loss": 1.0})
    first, again, other = (given["id"] for given in wandb.inits)
    assert first == again != other
    assert [given["resume"] for given in wandb.inits] == ["allow"] * 3
    assert {"step": 1, "event/resumed": "resumed at step 1"} in wandb.points


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"id": 7}', '{"id": "a/b"}', '{"id": ""}', '{"id": "a\\n"}', "x" * 5000]
)
def test_a_damaged_id_is_told_and_left_alone(
    text: str, tmp_path: Path, wandb: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wandb.json").write_text(text)
    with pytest.raises(InputError, match=r"wandb\.json: "):
        kept_id(tmp_path / "wandb.json", "toys")
    with Report(tmp_path, CONFIG, 0) as report:
        report.record(1, {"loss": 1.0})
    told = capsys.readouterr().err
    assert told.count("the run goes on without it") == 1
    assert "wandb.json: " in told
    assert (tmp_path / "wandb.json").read_text() == text
    assert (wandb.inits, [line["loss"] for line in lines(tmp_path)]) == ([], [1.0])


@pytest.mark.parametrize("method", ["init", "define_metric", "log", "finish"])
def test_nothing_that_it_raises_ends_a_run(
    method: str, tmp_path: Path, wandb: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise LookupError("no such server")

    monkeypatch.setattr(wandb, method, fail)
    with Report(tmp_path, CONFIG, 0) as report:
        for step in (1, 2):
            report.record(step, {"loss": 1.0})
    assert capsys.readouterr().err.count("wandb: no such server; the run goes on without it") == 1
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


@pytest.mark.parametrize("method", ["init", "log", "finish"])
def test_a_server_that_hangs_holds_up_nothing(
    method: str, tmp_path: Path, wandb: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entered, released = threading.Event(), threading.Event()
    monkeypatch.setattr(wandb, method, lambda *_, **__: entered.set() or released.wait(60))
    monkeypatch.setattr("megalite.train.report.SENDING_SECONDS", 0.1)
    monkeypatch.setattr("megalite.train.tracking.served.MAX_REPORTS", 5)
    with Report(tmp_path, CONFIG, 0) as report:
        for step in range(1, 9):
            report.record(step, {"loss": 1.0})
            assert method == "finish" or entered.wait(30), "the first report takes its thread away"
    told = capsys.readouterr().err
    assert "not everything was sent in time" in told
    assert wandb.let_go.wait(30), "else the end of the process would wait for it"
    assert len(lines(tmp_path)) == 8
    if method != "finish":
        assert told.count("5 reports wait to be sent") == 1
    released.set()


def test_what_ended_a_run_is_reported_as_failed(tmp_path: Path, wandb: StandIn) -> None:
    def run() -> None:
        with Report(tmp_path, CONFIG, 0) as report:
            report.stepped(3)
            raise Unhealthy("the loss is nan")

    with pytest.raises(Unhealthy):
        run()
    (line,) = lines(tmp_path)
    assert (line["step"], line["event"], line["reason"]) == (3, "failed", "the loss is nan")
    assert read_records(tmp_path / "metrics.jsonl") == []
    assert wandb.points == [{"step": 3, "event/failed": "the loss is nan"}]
    assert wandb.codes == [1]


@pytest.mark.parametrize("project", ["", " ", "a/b", "a\\b", "a#b", "a?b", "a%b", "a:b", "a\nb", "a" * 129])
def test_a_project_has_the_name_of_one(project: str) -> None:
    config = Config(log=Log(wandb=project))
    assert [problem.key for problem in validate(config)] == ["log.wandb"]


def test_projects_that_are_none(tmp_path: Path) -> None:
    assert validate(load([], ["log.wandb=my project-1_x.y"])) == []
    assert validate(load([], ["log.wandb=null"])) == []
    assert validate(Config(log=Log(wandb="a" * 128))) == []


@pytest.mark.parametrize("folder", [False, True])
def test_a_missing_package_is_told_with_what_installs_it(
    folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if folder:  # wandb itself leaves folders of its name in working directories
        (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    (problem,) = (problem for problem in validate_files(CONFIG) if problem.key == "log.wandb")
    assert "pip install 'megalite[wandb]'" in str(problem)
    (tmp_path / "wandb.py").touch()
    importlib.invalidate_caches()
    assert "log.wandb" not in [problem.key for problem in validate_files(CONFIG)]


def test_the_package_itself_writes_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    try:
        with Report(tmp_path, CONFIG, 0) as report:
            report.record(1, {"loss": 2.5})
    finally:
        package.teardown()
    known = json.loads((tmp_path / "wandb.json").read_text())["id"]
    (written,) = tmp_path.glob(f"wandb/offline-run-*/run-{known}.wandb")
    assert all(word in written.read_bytes() for word in (b"loss", b"2.5", b"step"))
