"""Traces that nobody's run has written: each is refused in one message, with its file and a fix, or read right."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import in_process
from trace_cases import EVENTS, F, content, event, kernel, note

from megalite.commands.main import main
from megalite.config.layout import Layout
from megalite.profiling import trace_file
from megalite.profiling.actions import actions
from megalite.profiling.trace_file import trace_of

Profile = Callable[..., tuple[int, str, str]]
MARKUP = "<script>alert(1)</script>\x1b]0;x\x07"


ODD: list[tuple[dict[str, Any], str]] = [  # changes of an event, and what is told of it
    ({"ts": 1e305}, "ts = 1e+305: must be microseconds"),
    ({"ts": -1e16}, "ts = -1e+16: must be microseconds"),
    ({"ts": float("nan")}, "ts = nan: must be microseconds"),
    ({"ts": "1"}, "ts = '1': must be microseconds"),
    ({"ts": True}, "ts = True: must be microseconds"),
    ({"dur": float("inf")}, "dur = inf: must be microseconds"),
    ({"dur": -1}, "dur = -1: must not be negative"),
    ({"name": 3}, "name: must be text"),
    ({"args": None}, "None: must be an object"),
    ({"pid": 0.5}, "pid = 0.5: must be a whole number or text"),
    ({"args": {"correlation": []}}, "correlation = []: must be a whole number or text"),
]


def memory(at: float, size: Any) -> dict[str, Any]:
    return {"name": "[memory]", "ts": at, "args": {"Device Type": 1, "Total Allocated": size}}


def expected(**told: Any) -> dict[str, Any]:
    return {"cluster": "c", "seconds": 1, "parts": {}, "times": [[1, 2, 1, 1]], "transfer": 0} | told


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "profile/step-000005"
    made.mkdir(parents=True)
    return made


@pytest.fixture
def profiled(folder: Path, capsys: pytest.CaptureFixture[str]) -> Profile:
    """Runs `megalite profile` on traces of ranks 0, 1, …"""

    def run(*traces: dict[str, Any]) -> tuple[int, str, str]:
        for rank, trace in enumerate(traces):
            (folder / f"rank-{rank}.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))
        code, out, error = in_process(main, capsys)("profile", folder.parents[1])
        assert (code == 0) != error.startswith("megalite: error: ")
        assert "Traceback" not in error
        return code, out, error

    return run


def rest(**members: Any) -> dict[str, Any]:
    return {**content(), **members}


@pytest.mark.parametrize(
    ("trace", "told"),
    [
        (rest(traceEvents=[1]), "traceEvents[0]: 1: must be an object"),
        (rest(distributedInfo=[]), "[]: must be an object"),
        (rest(distributedInfo={"pg_config": [{}]}), "has no 'pg_name'"),
        ({"traceEvents": EVENTS}, "has no 'megalite'"),
        ({"megalite": content()["megalite"]}, "no event that takes time has the name 'note: profiled steps'"),
        (content([]), "no event that takes time has the name 'note: profiled steps'"),
        *((content([kernel("k", 7, 0, 1, 0) | change]), f"traceEvents[0]: {told}") for change, told in ODD),
        (content([{"ph": "X", "cat": "kernel"}]), "traceEvents[0]: ts = None: must be microseconds"),
        (content([memory(1, 10**320)]), "must be a whole number below 2**63"),
        (content([memory(1, 1.5)]), "Total Allocated = 1.5: must be a whole number below 2**63"),
        (content([{"name": "[memory]", "ts": 1}]), "traceEvents[0]: has no 'args'"),
        (content(rank=True), "megalite: 'rank' = True: must be a whole number"),
        (content(first=" 5 "), "megalite: 'first' = ' 5 ': must be a whole number"),
        (content(last=10**400), "megalite: 'last' = "),
        (content(last=4), "last must be at least first"),
        (content(pp=0), "megalite: 'pp' = 0: must be a whole number from 1"),
        (content(coordinates={**Layout().coordinates(0), "pp": 1}), "pp of coordinates below pp"),
        (content(coordinates={"pp": 0}), "megalite: 'coordinates': 'dp_replicate' is missing"),
        (content(axes={"3": MARKUP}), r"must be one of tp, cp, ep, pp, dp, all"),
        (content(expected=expected(seconds=float("nan"))), "'seconds' = nan: must be seconds from 0"),
        (content(expected=expected(parts={"products": -1})), "'products' = -1: must be seconds from 0"),
        (content(expected=expected(times=[[1, 2, 1]])), "must be 4 times, each seconds from 0"),
        (content(expected=expected(times=[[1, 2, 1, float("inf")]])), "must be 4 times, each seconds from 0"),
    ],
)
def test_what_no_run_writes_is_refused(trace: dict[str, Any], told: str, profiled: Profile) -> None:
    code, _, error = profiled(trace)
    assert code == 2
    assert "rank-0.json.gz: is not the trace of a run: " in error
    assert told in error
    assert error.endswith("; profile it again\n")
    assert "\x1b" not in error


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            {"rank": 2},
            "rank-1.json.gz: is of rank 2 and of steps from 5 on, not of those that its path says; remove it",
        ),
        ({"first": 4}, "rank-1.json.gz: is of rank 1 and of steps from 4 on, not of those that its path says"),
        ({"last": 6}, "rank-1.json.gz: is of another job than rank-0.json.gz"),
        ({"pp": 2}, "rank-1.json.gz: is of another job than rank-0.json.gz"),
        ({"coordinates": Layout().coordinates(0)}, "rank-1.json.gz: is of another job than rank-0.json.gz"),
    ],
)
def test_traces_that_do_not_belong_together_are_refused(more: dict[str, Any], told: str, profiled: Profile) -> None:
    about: dict[str, Any] = {"rank": 1, "coordinates": Layout(tp=2).coordinates(1)} | more
    code, _, error = profiled(content(), content(**about))
    assert code == 2
    assert told in error


TURNS = [(100, 110), (110, 115), (115, 120), (120, 122), (122, 125)]


def ran(*names: str) -> dict[str, Any]:
    """A trace of one rank with these actions."""
    notes = [note(f"{name} (entry 1 of 1)", 100 + at, 101 + at) for at, name in enumerate(names)]
    return content([*EVENTS[:2], *notes, *EVENTS[4:]])


@pytest.mark.parametrize(
    "names",
    [
        ["B(stage 0, micro-batch 0)"],
        ["W(stage 0, micro-batch 0)", F],
        [F, "B(stage 0, micro-batch 0)", F],
        ["F(stage 1, micro-batch 0)"],
    ],
)
def test_actions_that_cannot_have_run_are_refused(names: list[str], profiled: Profile) -> None:
    code, _, error = profiled(ran(*names))
    assert code == 2
    assert "profile/step-000005: its traces tell of actions that cannot have run so: " in error
    assert error.endswith("; profile the steps again\n")


@pytest.mark.parametrize(
    "trace",
    [
        content([*EVENTS, memory(5, 0)]),
        content([*EVENTS, memory(5, -10), memory(9, -3)]),
        content([*EVENTS, memory(0, 10)]),
        content(expected=expected(times=[[0, 0, 0, 0]])),
        content(expected=expected(cluster=MARKUP)),
        content([*EVENTS, kernel(MARKUP, 7, 5, 9, 1), note(MARKUP, 5, 9)], axes={MARKUP: "tp"}),
        ran("F(stage 0, micro-batch 999999999)"),
        content([*EVENTS, *EVENTS]),  # numbers of calls, twice
        content([*EVENTS[:2], *([EVENTS[2]] * 3), *EVENTS[4:]]),
    ],
)
def test_what_is_odd_is_read_and_shown_without_markup(trace: dict[str, Any], folder: Path, profiled: Profile) -> None:
    code, out, _ = profiled(trace)
    assert code == 0
    shown = out + "".join((folder / name).read_text() for name in ("index.html", "timeline.svg"))
    assert "<script" not in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (os.mkfifo, "cannot be read: is no regular file; profile it again"),
        (os.mkdir, "cannot be read: is no regular file; profile it again"),
        (lambda path: os.symlink("/dev/zero", path), "cannot be read: is no regular file; profile it again"),
        (lambda path: os.symlink("nowhere", path), "cannot be read: No such file"),
        (lambda path: path.write_bytes(gzip.compress(b"{}" * 99)[:-9]), "is not the trace of a run: "),
        (lambda path: path.write_bytes(gzip.compress(b"{}") + b"rest"), "cannot be read: Not a gzipped file"),
        (
            lambda path: path.write_bytes(gzip.compress(b'{"a":' + b"[" * 100_000)),
            "is not the trace of a run: is nested too deep; profile",
        ),
    ],
)
def test_what_is_no_file_of_a_trace_is_refused(
    make: Callable[[Path], Any], told: str, folder: Path, profiled: Profile
) -> None:
    make(folder / "rank-0.json.gz")
    code, _, error = profiled()
    assert code == 2
    assert f"rank-0.json.gz: {told}" in error


@pytest.mark.parametrize("name", ["rank-00.json.gz", "rank-\u0660.json.gz", "rank--1.json.gz"])
def test_other_names_are_not_those_of_traces(name: str, folder: Path, profiled: Profile) -> None:
    (folder / name).write_bytes(b"")
    (folder.parent / "step-9").mkdir()
    (folder.parent / "step-00000\u0669").mkdir()
    assert profiled(content())[0] == 0


def test_a_file_in_place_of_the_latest_profile_is_refused(folder: Path, profiled: Profile) -> None:
    (folder.parent / "step-000006").write_text("")
    code, _, error = profiled(content())
    assert code == 2
    assert "step-000006: is no folder of profiled steps; remove it, or give it another name" in error


def test_events_without_end_are_refused(profiled: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "MAX_EVENTS", len(EVENTS))
    assert profiled(content(EVENTS))[0] == 0
    code, _, error = profiled(content([*EVENTS, {}]))
    assert code == 2
    assert f"has more than {len(EVENTS)} events; set profile.steps=1" in error


def test_an_event_is_kept_without_what_nobody_reads() -> None:
    (kept,) = (
        each
        for each in trace_of(content([EVENTS[0], event("cpu_op", "x" * 9999, 1, 0, 1, Call_stack="y" * 9999)])).events
        if each.category == "cpu_op"
    )
    assert len(repr(kept)) < trace_file.MAX_NAME + 200


def test_actions_that_took_turns_come_one_after_the_other() -> None:
    names = [F, "B(stage 1, micro-batch 0)"] * 2 + [F]
    notes = [note(f"{name} (entry 1 of 1)", *times) for name, times in zip(names, TURNS, strict=True)]
    on_cpu = [event for event in EVENTS[4:] if event.get("cat") != "kernel"]
    found = actions(trace_of(content([*EVENTS[:2], *notes, *on_cpu])))
    assert [(str(span.action)[:10], span.start, span.end) for span in found] == [
        ("F(stage 0,", 100_000, 118_000), ("B(stage 1,", 118_000, 125_000),
    ]  # fmt: skip


def test_a_kernel_belongs_to_one_action() -> None:
    """Notes that overlap, as no run's do, would otherwise have each action look at all kernels."""
    both = [note(f"{name} (entry 1 of 1)", 100, 300) for name in (F, "B(stage 0, micro-batch 0)")]
    found = actions(trace_of(content([*EVENTS[:2], *both, *EVENTS[4:]])))
    assert [(span.start, span.end) for span in found] == [(120_000, 660_000), (100_000, 300_000)]
