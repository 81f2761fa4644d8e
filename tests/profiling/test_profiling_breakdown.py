"""Where the time of profiled steps goes, in traces whose numbers are known."""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_cases import EVENTS, F, content, event, kernel, nccl, note

from megalite.base.errors import InputError
from megalite.profiling.breakdown import Breakdown, breakdown
from megalite.profiling.kinds import AXES, OTHER
from megalite.profiling.tables import LABELS
from megalite.profiling.trace_file import read_trace, trace_of


def broken_down(events: list[dict[str, Any]], **about: object) -> Breakdown:
    return breakdown(trace_of(content(events, **about)))


def microseconds(parts: Mapping[str, int]) -> dict[str, float]:
    return {name: time / 1000 for name, time in parts.items()}


def test_a_gpus_step_is_told_by_kind_and_by_axis() -> None:
    found = broken_down(EVENTS)
    assert microseconds(found.parts) == {
        "optimizer": 100,  # told by where it was launched, not by its name
        "attention": 100,
        "matmul": 200,
        "fused": 30,
        "copy": 20,
        "pointwise": 20,
        "tp": 90,
        "pp": 40,
        "dp": 80,  # not those 50 µs in which tp is exposed too
        "data wait": 100,
        "host gap": 220,
    }
    axes = {axis: (each.total / 1000, each.hidden / 1000) for axis, each in found.axes.items()}
    assert axes == {"tp": (100, 10), "pp": (40, 0), "dp": (260, 180)}


def test_saves_and_evaluations_are_no_part_of_a_step() -> None:
    saved = [note(f"{F} (entry 1 of 1)", 1000, 1200), note("evaluating", 1200, 1300), note("saving", 1300, 1400)]
    saved.append(kernel("gemm", 7, 1010, 1190, 0))
    later = [note("reading a batch", 1400, 1450), note("updating the weights", 1500, 1600), note("saving", 1600, 1700)]
    before = note("saving", -100, 0)
    found = broken_down([note("profiled steps", -100, 1700), before, *EVENTS[1:], *saved, *later], last=6)
    assert found.whole == 1_200_000
    assert found.data_wait == 150_000
    assert found.compute["matmul"] == 200_000


def test_a_group_of_all_processes_is_that_of_the_axis_that_has_them_all() -> None:
    events = [*EVENTS, nccl("AllReduce", 32, 910, 930, "0", "default_pg")]
    assert broken_down(events).axes["all"].exposed == 20_000
    assert broken_down(events, axes={"0": "dp"}).axes["dp"].exposed == 100_000


def test_kernels_beside_each_other_count_once() -> None:
    events = [note("profiled steps", 0, 100), kernel("gemm", 7, 10, 60, 1), kernel("elementwise", 8, 40, 90, 2)]
    assert {kind: time for kind, time in microseconds(broken_down(events).compute).items() if time} == {
        "matmul": 50,
        "pointwise": 30,
    }


CPU = [
    note("profiled steps", 0, 100),
    event("cpu_op", "aten::linear", 99, 10, 40),
    event("cpu_op", "aten::addmm", 99, 15, 35),
    event("cpu_op", "aten::copy_", 99, 16, 20),
    event("user_annotation", "group: 4", 99, 40, 70),
    event("cpu_op", "autograd::engine::evaluate_function: Gathered", 99, 40, 72),  # waits for the collective
    event("cpu_op", "c10d::allreduce_", 99, 41, 42),
    event("user_annotation", "gloo:all_reduce", 201, 43, 69),
    event("cpu_op", "aten::copy_", 201, 45, 50),  # gloo's own
    event("user_annotation", "group: 5", 99, 70, 80),
    event("user_annotation", "gloo:all_reduce", 201, 72, 74),  # began late: the thread is that of tp all the same
    event("user_annotation", "group: 4", 99, 74, 75),
    event("user_annotation", "gloo:all_reduce", 201, 75, 76),
    event("user_annotation", "gloo:all_reduce", 301, 76, 78),
    event("user_annotation", "group: 2", 99, 80, 82),
    event("user_annotation", "gloo:recv", 99, 81, 95),
    event("cpu_op", "aten::mul", 99, 84, 90),
    event("cpu_op", "mkldnn::_linear_pointwise", 99, 95, 99),
]


def test_a_cpus_step_is_told_by_operators_and_threads_of_gloo() -> None:
    found = broken_down(CPU)
    told = {name: time for name, time in microseconds(found.parts).items() if time}
    assert told == {"matmul": 34, "pointwise": 6, "tp": 31, "pp": 8, "host gap": 21}
    assert found.axes["pp"].total == 14_000


times = st.tuples(st.integers(0, 90), st.integers(1, 40))
kernels = st.lists(st.tuples(st.sampled_from(["gemm", "flash", "elementwise"]), st.integers(7, 9), times), max_size=8)
collectives = st.lists(st.tuples(st.sampled_from(["2", "3", "4", "9"]), times), max_size=8)


@given(kernels, collectives, st.lists(times, max_size=2))
def test_the_parts_add_up_to_the_step_whatever_overlaps(some: list[Any], talks: list[Any], waits: list[Any]) -> None:
    events = [note("profiled steps", 10, 110), kernel("elementwise", 7, 0, 1, 0)]
    events += [kernel(name, stream, start, start + took, 0) for name, stream, (start, took) in some]
    named = ((kernel("ncclDevKernel_X", 20, start, start + took, 0), group) for group, (start, took) in talks)
    for each, group in named:
        each["args"]["Process Group Name"] = group
        events.append(each)
    events += [
        note("reading a batch", 10, 11),
        *(note("reading a batch", start, start + took) for start, took in waits),
    ]
    found = broken_down(events)
    assert sum(found.parts.values()) == found.whole == 100_000
    assert all(0 <= each.exposed <= each.total for each in found.axes.values())
    assert all(each.hidden + each.exposed == each.total for each in found.axes.values())


@pytest.mark.parametrize("text", ["{}", '{"megalite": 3}', '{"megalite": {"rank": 0}, "traceEvents": []}', "[", "[1]"])
def test_what_is_no_trace_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json.gz"
    path.write_bytes(gzip.compress(text.encode()))
    with pytest.raises(InputError, match=r"rank-0\.json\.gz: is not the trace of a run"):
        read_trace(path)
    path.write_bytes(text.encode())
    with pytest.raises(InputError, match=r"rank-0\.json\.gz: cannot be read"):
        read_trace(path)


@pytest.mark.parametrize(
    "about",
    [
        {"first": float("inf")},
        {"last": 4},
        {"pp": None},
        {"coordinates": []},
        {"coordinates": {"pp": "a"}},
        {"axes": 3},
        {"axes": {"2": []}},
        {"expected": {}},
        {"expected": 3},
    ],
)
def test_additions_of_another_kind_are_refused(about: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"rank-0\.json\.gz: is not the trace of a run"):
        read_trace(written(content(**about), tmp_path))


@pytest.mark.parametrize(
    "change", [{"ts": 1e999}, {"ts": 10**400}, {"args": 3}, {"pid": []}, {"args": {"correlation": []}}, {"cat": []}]
)
def test_events_of_another_kind_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"rank-0\.json\.gz: is not the trace of a run"):
        read_trace(written(content([kernel("gemm", 7, 0, 1, 0) | change]), tmp_path))


def test_a_name_may_have_bytes_that_json_does_not_allow(tmp_path: Path) -> None:
    path = written(content([note("profiled steps", 0, 9), kernel("gemm BAD", 7, 0, 1, 0)]), tmp_path)
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(b"BAD", b"\x01\xff\n")))
    assert [event.name for event in read_trace(path).events if event.name.startswith("gemm")] == ["gemm \x01\ufffd\n"]


def written(trace: dict[str, Any], folder: Path) -> Path:
    path = folder / "rank-0.json.gz"
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    return path


def test_every_axis_has_a_row() -> None:
    assert {*AXES, OTHER} <= LABELS.keys()
