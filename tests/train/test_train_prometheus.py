"""Metrics for Prometheus: parsed by its own client, scraped by a real one, and shown by the dashboard of docs/."""

import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalite.config.load import load
from megalite.config.rules.files import validate_files
from megalite.config.rules.validate import validate
from megalite.config.schema import Config, Log, Run, Train
from megalite.train.report import Report
from megalite.train.tracking import prometheus
from megalite.train.tracking.prometheus import GAUGES
from megalite_launch.base import files

pytest.importorskip("prometheus_client", reason="needs prometheus_client: pip install 'megalite[prometheus]'")
from prometheus_client.parser import text_string_to_metric_families

DASHBOARD = Path(__file__).parents[2] / "docs/grafana.json"
SCRAPED_WITHIN = 60.0  # seconds


def config_for(where: int | str) -> Config:
    return Config(run=Run(name="toy"), train=Train(steps=20), log=Log(tensorboard=False, prometheus=where))


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def got(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def samples(text: str) -> dict[str, float]:
    """Values by name; those of events by `name/event`. All are of the run `toy`."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["run"] == "toy"
            found["/".join([sample.name, *filter(None, [sample.labels.get("event")])])] = sample.value
    return found


def reported(report: Report) -> None:
    values = {"loss": 2.5, "tflops_per_device": 2.0, "mfu": 0.4, "tokens/data/a": 7.0, "data_wait_seconds": 0.5}
    report.record(3, dict.fromkeys(GAUGES, 1.0) | values)
    report.record(3, {"valid_loss": 2.75})
    report.event(3, "saved", "saved")
    report.event(3, "saved", "saved")


def check(found: dict[str, float], running: float, restarts: float) -> None:
    expected = {
        "megalite_loss": 2.5,
        "megalite_valid_loss": 2.75,
        "megalite_device_flops_per_second": 2e12,
        "megalite_mfu_ratio": 0.4,
        "megalite_data_wait_seconds": 0.5,
        "megalite_step": 3.0,
        "megalite_steps": 20.0,
        "megalite_running": running,
        "megalite_restarts_total": restarts,
        "megalite_events_total/saved": 2.0,
        "megalite_events_total/save_failed": 0.0,
    }
    assert {name: found[name] for name in expected} == expected
    assert abs(time.time() - found["megalite_report_timestamp_seconds"]) < 60
    assert not any("data/a" in name for name in found)


def test_a_file_is_replaced_as_a_whole_and_says_in_the_end_that_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics/toy.prom"
    path.parent.mkdir()
    (tmp_path / "starts").mkdir()
    for start in (1, 2, 3):
        (tmp_path / f"starts/00{start}.json").touch()
    replaced: list[dict[str, float]] = []

    def watched(path: Path, content: bytes, mode: int, durable: bool) -> None:
        replaced.append(samples(content.decode()))
        files.write_whole(path, content, mode, durable=durable)

    monkeypatch.setattr(prometheus, "write_whole", watched)
    foreseen = path.with_name(f"{path.name}.{os.getpid()}.{threading.current_thread().ident}")
    foreseen.symlink_to(tmp_path / "elsewhere")
    with Report(tmp_path, config_for(str(path)), 2) as report:
        assert samples(path.read_text())["megalite_step"] == 2
        reported(report)
        check(samples(path.read_text()), running=1, restarts=2)
    check(samples(path.read_text()), running=0, restarts=2)
    assert replaced[-1] == samples(path.read_text()), "it is written under another name, and renamed"
    foreseen.unlink()
    assert [found.name for found in path.parent.iterdir()] == ["toy.prom"]
    assert not (tmp_path / "elsewhere").exists()


def test_a_port_is_served_on_this_machine_alone_until_the_run_ends(tmp_path: Path) -> None:
    port = free_port()
    with Report(tmp_path, config_for(port), 0) as report:
        reported(report)
        check(samples(got(f"http://127.0.0.1:{port}/metrics")), running=1, restarts=0)
        with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.2", port), timeout=10):
            pass
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=10):
        pass


def test_an_address_is_served_where_it_says(tmp_path: Path) -> None:
    port = free_port()
    with Report(tmp_path, config_for(f"0.0.0.0:{port}"), 0) as report:
        reported(report)
        check(samples(got(f"http://127.0.0.2:{port}/metrics")), running=1, restarts=0)


def test_a_port_that_is_taken_and_a_folder_that_is_missing_are_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        for where in (port, str(tmp_path / "missing/toy.prom")):
            with Report(tmp_path, config_for(where), 0) as report:
                reported(report)
            said = capsys.readouterr().err
            assert said.count(f"log.prometheus = {where}: ") == said.count("the run goes on without it") == 1
    assert not (tmp_path / "missing").exists()


def test_a_file_that_cannot_be_written_any_more_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics/toy.prom"
    path.parent.mkdir()
    with caplog.at_level("INFO", logger="megalite"), Report(tmp_path, config_for(str(path)), 0) as report:
        shutil.rmtree(path.parent)
        reported(report)
    assert capsys.readouterr().err.count(f"log.prometheus = {path}: No such file or directory; the run goes on") == 1
    assert "works again" not in caplog.text


@pytest.mark.parametrize(
    "where", [0, 65536, "", "toy.txt", "host:0", "host:65536", "host:", ":9400", "9400", "a\n.prom"]
)
def test_what_is_neither_a_port_nor_a_file_is_refused(where: int | str) -> None:
    assert {problem.key for problem in validate(config_for(where))} == {"log.prometheus"}


def test_ports_addresses_and_files() -> None:
    for where in ("9400", "0.0.0.0:9400", "/var/lib/node_exporter/toy.prom", "null"):
        assert validate(load([], [f"log.prometheus={where}"])) == []


def test_the_missing_package_is_told_by_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite.config.rules.files.find_spec", lambda package: None)
    config = replace(config_for(9400), log=Log(prometheus=9400, mlflow="toys"))
    told = {problem.key: str(problem) for problem in validate_files(config) if problem.key.startswith("log.")}
    assert "pip install 'megalite[prometheus]'" in told["log.prometheus"]
    assert "pip install 'megalite[mlflow]'" in told["log.mlflow"]


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_the_dashboard_shows_all_metrics_that_are_exported_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / "toy.prom"
    with Report(tmp_path, config_for(str(path)), 0) as report:
        assert "megalite_valid_loss" not in samples(path.read_text()), "nothing is told before it is known"
        reported(report)
    exported = {name.partition("/")[0] for name in samples(path.read_text())}
    shown = {name for expression in expressions() for name in re.findall(r"megalite_\w+", expression)}
    assert shown == exported
    events = {name.partition("/")[2] for name in samples(path.read_text()) if "/" in name}
    known = {name for text in re.findall(r'event=~"([^"]+)"', " ".join(expressions())) for name in text.split("|")}
    assert known == events


def test_prometheus_scrapes_a_run_and_evaluates_the_dashboard(tmp_path: Path) -> None:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("needs Prometheus: apt-get install prometheus")
    port, own = free_port(), free_port()
    settings = {
        "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms"},
        "scrape_configs": [{"job_name": "megalite", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML
    command = [program, "--config.file=prometheus.yml", "--storage.tsdb.path=tsdb", "--log.level=error"]

    def asked(expression: str) -> list[Any]:
        query = urllib.parse.urlencode({"query": expression})
        answer = json.loads(got(f"http://127.0.0.1:{own}/api/v1/query?{query}"))
        assert answer["status"] == "success"
        return list(answer["data"]["result"])

    with Report(tmp_path, config_for(port), 0) as report:
        reported(report)
        with subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{own}"], cwd=tmp_path) as server:
            try:
                last = time.monotonic() + SCRAPED_WITHIN
                while time.monotonic() < last:
                    with suppress(urllib.error.URLError):  # it is not up yet
                        if asked("megalite_events_total[1m]") and len(asked("megalite_loss[1m]")[0]["values"]) > 1:
                            break
                    time.sleep(0.2)
                (loss,) = asked("megalite_loss")
                assert (loss["metric"]["run"], loss["value"][1]) == ("toy", "2.5")
                for expression in expressions():
                    assert asked(expression.replace("$run", "toy")), expression
            finally:
                server.kill()
