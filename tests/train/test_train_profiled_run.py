"""A whole run on two ranks is profiled, told and drawn."""

from collections import Counter
from pathlib import Path

from toy_folder import make_toy
from warm_start import run

from megalite.profiling.measured_step import measured_step
from megalite.profiling.ranks import read_ranks
from megalite.profiling.trace_file import read_trace
from megalite.schedule.generate import build
from megalite_launch.base.line_files import parsed

PROFILE = {"start": 2, "steps": 2, "ranks": "all"}


def megalite(folder: Path, *arguments: str) -> str:
    done = run(["-m", "megalite", *arguments], 240, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_pipelines_steps_are_recorded_told_and_drawn(tmp_path: Path) -> None:
    make_toy(tmp_path, train={"steps": 3}, parallel={"pp": 2}, profile=PROFILE)
    out = megalite(tmp_path, "train", "toy.yaml")
    assert "profiled steps 2 to 3; megalite profile runs/run draws them" in out
    assert "pipeline messages, and waiting for stages" in out
    run = tmp_path / "runs/run"
    events = [event for line in (run / "metrics.jsonl").read_bytes().splitlines() if (event := parsed(line))]
    (told,) = (event for event in events if event.get("event") == "profiled")
    assert abs(sum(told["parts"].values()) - told["seconds"]) < 1e-9

    ranks = read_ranks(run / "profile/step-000002")
    assert [rank.about.rank for rank in ranks] == [0, 1]
    for rank in ranks:
        found = rank.parts
        assert sum(found.parts.values()) == found.whole > 0
        assert found.axes.keys() == {"pp"}  # which has all ranks
        assert all(0 <= each.exposed <= each.total == each.hidden + each.exposed for each in found.axes.values())
        assert rank.memory
    table = build("1f1b", 2, 4)
    assert tuple(tuple(span.action for span in rank.actions) for rank in ranks) == table.orders
    step = measured_step(ranks)
    assert step is not None
    assert min(step.simulated.makespan, step.measured.makespan) > 0

    shown = megalite(tmp_path, "profile", "runs/run")
    assert "no snapshot of memory: there is none on a CPU" in shown
    page = (run / "profile/step-000002/index.html").read_text()
    assert page.count("<h3>rank ") == 2
    assert page.count("<svg") == 2  # actions and memory


def test_passes_that_take_turns_are_recorded_in_both_threads(tmp_path: Path) -> None:
    experts = {"count": 4, "width": 8}
    parallel = {"dp_shard": 2, "ep": 2, "pipeline": {"schedule": "dualpipev"}}
    model, batch = {"experts": experts}, {"micro": 1, "global": 8}
    make_toy(tmp_path, train={"steps": 3}, parallel=parallel, profile=PROFILE, model=model, batch=batch)
    assert "exchanges of experts' rows" in megalite(tmp_path, "train", "toy.yaml")
    ranks = read_ranks(tmp_path / "runs/run/profile/step-000002")
    table = build("dualpipev", 1, 4, paired=True)
    assert len(table.pairs) == 6
    for rank in ranks:
        assert tuple(span.action for span in rank.actions) == table.orders[0]
    trace = read_trace(tmp_path / "runs/run/profile/step-000002/rank-0.json.gz")
    threads = Counter(event.lane for event in trace.events if event.category == "cpu_op" and event.name == "aten::mm")
    assert len(threads) == 2
