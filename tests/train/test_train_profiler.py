"""Profiled steps of a run: which are recorded, what is written, and that nothing about it ends a run."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from toy_jobs import MODEL, config_of, make, one_rank, restorer, saver
from toy_runs import Notebook, Notes

from megalite.base.exit_codes import ExitCode
from megalite.checkpoint.store.progress import Progress
from megalite.config.layout import Layout
from megalite.config.load import load
from megalite.config.rules.validate import validate
from megalite.config.schema import Checkpoint, Config, Eval, Profile
from megalite.distributed.health.activity import Activity
from megalite.profiling.about import About
from megalite.profiling.breakdown import breakdown
from megalite.profiling.trace import Trace
from megalite.profiling.trace_file import read_trace
from megalite.train import recording
from megalite.train.loop import Batches, train
from megalite.train.profiler import Profiler
from megalite.train.recording import Recording

CONFIG = replace(config_of(Layout(), replace(MODEL, layers=1)), profile=Profile(start=3, steps=2))


def run(config: Config, folder: Path, begun: int = 0) -> tuple[Notes, Profiler | None]:
    """A run of toy steps with its profiler, if it has one."""
    job, notes = make(config), Notes()
    progress = Progress(begun, begun, 8 * begun, 64 * begun)
    profiler = Profiler.of(job, folder, begun, lambda: None)
    followers = [profiler.stepped] if profiler else []
    with saver(job, folder) as writer:
        batches, reload = Batches(Notebook(job), Notebook(job)), restorer(job).newest
        if profiler is None:
            notes.code = train(job, batches, progress, writer, reload, notes, followers)
        else:
            with profiler:
                notes.code = train(job, batches, progress, writer, reload, notes, followers)
    assert job.activity.follower is None
    return notes, profiler


def trace_of(folder: Path, rank: int = 0) -> Trace:
    return read_trace(folder / f"profile/step-000003/rank-{rank}.json.gz")


def of_notes(trace: Trace, note: str) -> int:
    return sum(event.name == note for event in trace.notes)


@pytest.mark.parametrize("begun", [0, 2])
def test_the_asked_steps_are_recorded_with_all_that_was_noted(begun: int, tmp_path: Path) -> None:
    with one_rank():
        notes, _ = run(replace(CONFIG, eval=Eval(1, 1), checkpoint=Checkpoint(3)), tmp_path, begun)
    trace = trace_of(tmp_path)
    assert trace.about == About(0, 3, 4, 1, Layout().coordinates(0), {}, None)
    assert [of_notes(trace, note) for note in ("reading a batch", "updating the weights", "saving")] == [2, 2, 1]
    found = breakdown(trace)
    assert sum(found.parts.values()) == found.whole > 0
    assert min(found.compute[kind] for kind in ("matmul", "optimizer", "pointwise")) > 0
    ((step, told),) = notes.named("profiled")
    assert step == 4
    assert told["path"] == str(tmp_path / "profile/step-000003/rank-0.json.gz")
    assert sum(told["parts"].values()) == pytest.approx(told["seconds"])  # type: ignore[attr-defined]


def test_collectives_without_a_group_are_those_of_tensor_parallelism_where_graphs_have_them(tmp_path: Path) -> None:
    graphed = replace(CONFIG, train=replace(CONFIG.train, cuda_graph=True))
    capture = Mock(warming_up=nullcontext, graph_of=lambda work: work() or work)
    with one_rank(), patch("megalite.train.build.captures_on", lambda _: capture):
        run(graphed, tmp_path)
    assert trace_of(tmp_path).about.axes == {"": "tp"}


def test_steps_are_the_same_whether_profiled_or_not(tmp_path: Path) -> None:
    with one_rank():
        without, profiler = run(replace(CONFIG, profile=Profile()), tmp_path / "without")
        assert profiler is None
        assert run(CONFIG, tmp_path / "with")[0].curve("loss") == without.curve("loss")


@pytest.mark.parametrize(
    ("profile", "begun"), [(Profile(), 0), (Profile(3, 2, [1]), 0), (Profile(3, 2), 3), (Profile(3, 2, "all"), 5)]
)
def test_ranks_with_nothing_to_record_have_no_profiler(profile: Profile, begun: int, tmp_path: Path) -> None:
    with one_rank():
        job = make(replace(CONFIG, profile=profile))
        assert Profiler.of(job, tmp_path, begun, lambda: None) is None


def in_the_way(folder: Path) -> None:
    (folder / "profile").mkdir()
    (folder / "profile/step-000003").touch()


def there_already(folder: Path) -> None:
    (folder / "profile/step-000003").mkdir(parents=True)
    (folder / "profile/step-000003/rank-0.json.gz").touch()


def a_link(folder: Path) -> None:
    (folder / "profile/step-000003").mkdir(parents=True)
    (folder / "profile/step-000003/rank-0.json.gz").symlink_to(folder / "elsewhere")


def a_link_around_it(folder: Path) -> None:
    (folder / "other").mkdir()
    (folder / "profile").symlink_to("other")


@pytest.mark.parametrize(
    ("hinder", "why"),
    [
        (in_the_way, "cannot be written"),
        (there_already, "there is such a file already"),
        (a_link, "is a link"),
        (a_link_around_it, "profile: is a link, which is not followed"),
    ],
)
def test_a_trace_that_cannot_be_written_does_not_end_the_run(
    hinder: Callable[[Path], None], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hinder(tmp_path)
    with one_rank():
        notes, _ = run(CONFIG, tmp_path)
    assert notes.code == ExitCode.DONE
    assert list(notes.curve("loss")) == [1, 2, 3, 4, 5, 6]
    error = capsys.readouterr().err
    assert "megalite: warning: steps 3 to 4 are not profiled: " in error
    assert why in error
    assert not (tmp_path / "elsewhere").exists()
    assert not list(tmp_path.glob("other/*"))


def test_a_profiler_that_does_not_begin_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with one_rank(), patch.object(recording, "profile", Mock(side_effect=RuntimeError("busy"))):
        notes, _ = run(CONFIG, tmp_path)
    assert notes.code == ExitCode.DONE
    assert "steps 3 to 4 are not profiled: busy" in capsys.readouterr().err


def test_a_rollback_ends_the_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with one_rank():
        job = make(CONFIG)
        with Profiler(job, tmp_path, 2, lambda: None) as profiler:
            assert job.activity.follower is not None
            profiler.stepped(2, Mock(), Mock(), Mock())
    assert job.activity.follower is None
    assert "are not profiled, as the run went back before step 2" in capsys.readouterr().err


def test_a_step_that_is_taken_back_and_repeated_at_once_ends_the_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with checkpoint.interval=1: the step that is followed next has the number that would have been next."""
    with one_rank():
        job = make(CONFIG)
        before, after = (Mock(paused=nullcontext) for _ in range(2))
        with Profiler(job, tmp_path, 0, lambda: None) as profiler:
            for step, meter in ((1, before), (2, before), (3, before), (4, after)):
                profiler.stepped(step, Mock(), meter, Mock())
    assert "are not profiled, as the run went back before step 4" in capsys.readouterr().err
    assert not (tmp_path / "profile").exists()


def test_a_run_that_ends_before_leaves_nothing_switched_on(tmp_path: Path) -> None:
    calls = dist.ProcessGroup.__dict__["allreduce"]
    with one_rank():
        job = make(CONFIG)
        with Profiler(job, tmp_path, 2, lambda: None):
            assert dist.ProcessGroup.__dict__["allreduce"] is not calls
    assert dist.ProcessGroup.__dict__["allreduce"] is calls
    assert job.activity.follower is None
    assert not torch.autograd.profiler._is_profiler_enabled


def test_on_cuda_the_memorys_history_is_recorded_and_kept(tmp_path: Path) -> None:
    """The order of calls, on a device that is none."""
    calls = Mock()
    calls.memory._dump_snapshot.side_effect = lambda path: Path(path).write_bytes(b"history")
    with (
        patch.object(torch.cuda, "memory", calls.memory),
        patch.object(torch.cuda, "synchronize", calls.synchronize),
        patch.object(recording, "profile", calls.profile),
    ):
        made = Recording(Activity(), torch.device("cuda"))
        assert calls.profile.call_args.kwargs["activities"][1] == torch.profiler.ProfilerActivity.CUDA
        made.end()
    assert made.snapshot == b"history"
    assert [name for name, _, _ in calls.mock_calls] == [
        "memory._record_memory_history",
        "synchronize",
        "profile",
        "profile().start",
        "synchronize",
        "profile().stop",
        "memory._dump_snapshot",
        "memory._record_memory_history",
    ]
    assert calls.memory._record_memory_history.call_args.kwargs == {"enabled": None}


def record_layout(folder: Path) -> None:
    """On eight ranks: a run of pp 2, tp 2 and dp 2 is profiled."""
    layout = Layout(pp=2, dp_shard=2, tp=2)
    config = replace(config_of(layout), profile=Profile(3, 1, "all"))
    run(config, folder)


def test_communication_is_told_by_axis(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(record_layout, tmp_path)
    for rank in range(8):
        trace = trace_of(tmp_path, rank)
        assert trace.about.coordinates == Layout(pp=2, dp_shard=2, tp=2).coordinates(rank)
        found = breakdown(trace)
        assert found.axes.keys() == {"tp", "pp", "dp", "all"}
        assert all(each.total >= each.exposed >= 0 and each.total > 0 for each in found.axes.values())
        assert sum(found.parts.values()) == found.whole


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["profile.start=100", "profile.steps=2"],
            "profile.start = 100: with profile.steps = 2 ends at step 101, after train.steps = 100; begin earlier, "
            "or use 0, which profiles none",
        ),
        (
            ["profile.ranks=[0,4]"],
            "profile.ranks[1] = 4: must be a rank of the job: from 0 to 3; leave it out, or use all",
        ),
        (
            ["profile.ranks=[-1]"],
            "profile.ranks[0] = -1: must be a rank of the job: from 0 to 3; leave it out, or use all",
        ),
        (
            ["profile.ranks=[]"],
            "profile.ranks = []: must name a rank; use all, or profile.start=0, which profiles none",
        ),
        (["profile.steps=0"], "profile.steps = 0: must be at least 1"),
        (["profile.start=-1"], "profile.start = -1: must be at least 0"),
    ],
)
def test_what_cannot_be_profiled_is_refused(overrides: list[str], told: str) -> None:
    assert [str(problem) for problem in validate(load([], overrides), 4)] == [told]


def test_all_ranks_may_be_profiled() -> None:
    config = load([], ["profile.ranks=all", "profile.start=99"])
    assert (config.profile.ranks, validate(config, 4)) == ("all", [])
