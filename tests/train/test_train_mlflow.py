"""Reports to mlflow, read back by mlflow from a store of files."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalite.base.errors import Unhealthy
from megalite.config.rules.validate import validate
from megalite.config.schema import Checkpoint, Config, Log, Run, Train
from megalite.train.report import Report
from megalite.train.tracking.mlflow_run import metric_name

CONFIG = Config(
    run=Run(name="toy"),
    train=Train(steps=20),
    checkpoint=Checkpoint(export_url="http://me:precious@host"),
    log=Log(tensorboard=False, mlflow="toys"),
)


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return pytest.importorskip("mlflow.tracking", reason="needs mlflow: pip install 'megalite[mlflow]'")


def stored(mlflow: Any, folder: Path, experiment: str = "toys") -> tuple[Any, list[Any]]:
    """mlflow's client of a store of files, and all runs of an experiment there."""
    client = mlflow.MlflowClient(tracking_uri=(folder / "mlflow").as_uri())
    return client, client.search_runs([client.get_experiment_by_name(experiment).experiment_id])


def test_mlflow_reads_back_what_was_reported(tmp_path: Path, mlflow: Any) -> None:
    with Report(tmp_path, CONFIG, 0) as report:
        report.record(1, {"loss": 2.5, "tokens//data/a=b": 7.0})
        report.record(2, {"loss": float("nan")})
        report.event(1, "rollback", "back to step 1")
        report.record(2, {"loss": 2.25})
    client, (run,) = stored(mlflow, tmp_path)
    losses = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "loss")]
    assert losses[::2] == [(1, 2.5), (2, 2.25)]
    assert losses[1][0] == 2
    assert losses[1][1] != losses[1][1]
    assert run.data.metrics["tokens/data/a_b"] == 7.0
    assert run.data.params["model.width"] == str(CONFIG.model.width)
    assert run.data.params["log.mlflow"] == "toys"
    assert run.data.params["checkpoint.export_url"] == "http://***@host"
    assert run.data.tags["event.rollback"] == "step 1: back to step 1"
    assert (run.info.run_name, run.info.status) == ("toy", "FINISHED")


def test_a_run_that_goes_on_continues_the_same_one_unless_the_experiment_is_another(
    tmp_path: Path, mlflow: Any
) -> None:
    def failed() -> None:
        with Report(tmp_path, CONFIG, 0) as report:
            report.record(1, {"loss": 3.0})
            raise Unhealthy("the loss is nan")

    with pytest.raises(Unhealthy):
        failed()
    _, (run,) = stored(mlflow, tmp_path)
    assert (run.info.status, run.data.tags["event.failed"]) == ("FAILED", "step 0: the loss is nan")
    longer = replace(CONFIG, train=Train(steps=30))  # a parameter that mlflow would not change
    with Report(tmp_path, longer, 1) as report:
        report.record(2, {"loss": 2.0})
    client, (run,) = stored(mlflow, tmp_path)
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(1, 3.0), (2, 2.0)]
    assert (run.info.status, run.data.params["train.steps"]) == ("FINISHED", "20")
    with Report(tmp_path, replace(CONFIG, log=Log(tensorboard=False, mlflow="others")), 2) as report:
        report.record(3, {"loss": 1.0})
    _, (other,) = stored(mlflow, tmp_path, "others")
    assert other.data.metrics == {"loss": 1.0}
    assert len(stored(mlflow, tmp_path)[1]) == 1


def test_a_run_that_is_gone_and_a_server_that_is_not_there_are_told_once(
    tmp_path: Path, mlflow: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mlflow.json").write_text(json.dumps({"project": "toys", "id": "0" * 32}))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for store, told in (("", "remove the file to begin a new run there"), ("http://127.0.0.1:9", "127.0.0.1")):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
        with Report(tmp_path, CONFIG, 0) as report:
            for step in (1, 2, 3):
                report.record(step, {"loss": 1.0})
        said = capsys.readouterr().err
        assert said.count("the run goes on without it") == 1
        assert told in said
    assert sum('"loss"' in line for line in (tmp_path / "metrics.jsonl").read_text().splitlines()) == 6


@pytest.mark.parametrize("name", ["loss", "valid_loss/data/a", "/x/../y", "a//b", "expert_load/3", "é: %"])
def test_names_are_as_mlflow_wants_them(name: str, mlflow: Any) -> None:
    validation = pytest.importorskip("mlflow.utils.validation")
    validation._validate_metric_name(metric_name(name))
    assert name != "valid_loss/data/a" or metric_name(name) == name


def test_an_experiment_has_a_printable_name() -> None:
    assert [problem.key for problem in validate(Config(log=Log(mlflow=" ")))] == ["log.mlflow"]
    assert validate(Config(log=Log(mlflow="/Users/me/toys: 1"))) == []
