"""The sweep over the sizes of kernels' programs, without a device: what it compares, times and reports."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu
from rounding import DEVICE, random

from megalite_kernels.backend import Program
from megalite_kernels.benchmarks import __main__ as command
from megalite_kernels.benchmarks import sweep
from megalite_kernels.benchmarks.inputs import TINY_MODEL
from megalite_kernels.benchmarks.measure import AGREEMENT
from megalite_kernels.benchmarks.sweep import MAX_THREAD_ELEMENTS, Pass, Trial, programs
from megalite_kernels.benchmarks.sweep_report import comparison_table, comparisons, sweep_page
from megalite_kernels.benchmarks.timing import Spread
from megalite_kernels.rms_norm import launch_backward, launch_forward

COPY = 1e9  # bytes per second


@pytest.fixture
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer programs, that which ships among them: in the interpreter, all numbers of warps run alike."""
    monkeypatch.setattr(sweep, "PROGRAM", Program(1024, 4))
    monkeypatch.setattr(sweep, "WARPS", (4,))
    monkeypatch.setattr(sweep, "ELEMENTS", (1024, 4096))


def _cells(table: str) -> list[list[str]]:
    """The rows of a table of Markdown, without its heads."""
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.usefixtures("_few")
def test_programs_of_all_sizes_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--sweep", "--check"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"On {DEVICE}.\n")
    assert [[op, part, result] for op, part, _, _, result in _cells(out)] == [
        ["add_rms_norm", "forward", "3 of 3 agree"],
        ["add_rms_norm", "backward", "3 of 3 agree"],
        ["swiglu", "forward", "3 of 3 agree"],
        ["swiglu", "backward", "3 of 3 agree"],
        ["cross_entropy", "forward", "3 of 3 agree"],
        ["cross_entropy", "backward", "3 of 3 agree"],
        ["adamw", "whole", "2 of 2 agree"],
    ]


@pytest.mark.parametrize("elements", [512, 1024, 4096])
def test_norms_of_rows_in_several_tiles(elements: int) -> None:
    """Rows wider than a program's block, unlike those of the tiny model."""
    x, add, dy, dtotal = (random(3, 1200, dtype=torch.float32, seed=seed) for seed in range(4))
    weight = random(1200, dtype=torch.float32, seed=4)
    shipped, found = (launch_forward(x, add, weight, 1e-5, given) for given in (None, Program(elements, 4)))
    torch.testing.assert_close(found, shipped)
    _, total, inverse = shipped
    shipped, found = (
        launch_backward(total, weight, inverse, dy, dtotal, given) for given in (None, Program(elements, 4))
    )
    torch.testing.assert_close(found, shipped)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_threads_load_16_bytes_and_hold_few_elements(itemsize: int) -> None:
    shipped = Program(1024, 4)
    first, *others = programs(Pass("forward", 4096, itemsize, shipped, lambda given: ()))
    assert first == shipped
    assert shipped not in others
    assert len(set(others)) == len(others) >= 17
    for elements, warps in others:
        assert elements // (32 * warps) * itemsize >= 16
        assert elements // (32 * warps) <= MAX_THREAD_ELEMENTS


def _plant(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any], of_block: int) -> None:
    """Let programs of swiglu with blocks of that size be launched by `change`."""

    def planted(correct: Callable[..., Any], *given: Any) -> Any:
        return change(correct, *given) if given[-1].elements == of_block else correct(*given)

    for name in ("launch_swiglu", "launch_swiglu_backward"):
        monkeypatch.setattr(sweep, name, partial(planted, getattr(sweep, name)))


def _gate_for_up(launch: Callable[..., Any], gate: torch.Tensor, up: torch.Tensor, *rest: Any) -> Any:
    return launch(gate, gate, *rest)


def _fail(*_: object) -> None:
    raise RuntimeError("out of resource: shared memory\nand more")


@pytest.mark.parametrize(
    ("change", "block", "code", "said"),
    [
        (_gate_for_up, 1024, 1, "differs: result 0 is "),
        (_fail, 1024, 0, "failed: RuntimeError: out of resource: shared memory"),
        (_fail, 2048, 1, "failed: RuntimeError: out of resource: shared memory"),
    ],
)
@pytest.mark.usefixtures("_few")
def test_wrong_programs_are_reported(
    change: Callable[..., Any],
    block: int,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A program that does not ship may fail. If the one of 2048 elements, which ships, fails, nothing is compared."""
    _plant(monkeypatch, change, block)
    assert command.main(["--sweep", "--check", "--ops", "swiglu"]) == code
    rows = _cells(capsys.readouterr().out)
    counts = [result for *_, name, result in rows if not name]
    others = [(name, result) for *_, name, result in rows if name]
    wrong = {2048, 1024, 4096} if block == 2048 else {block}
    assert counts == [f"{3 - len(wrong)} of 3 agree"] * 2
    assert {name for name, _ in others} == {f"4 warps, {elements} elements" for elements in wrong}
    assert all(result.startswith(said) for _, result in others)


@pytest.fixture
def _fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "Gpu", lambda device: FakeGpu(ticks=1e-5))
    monkeypatch.setattr(command, "device_facts", lambda device: {"name": "none"})
    monkeypatch.setattr(command, "has_cuda", lambda: True)
    monkeypatch.setattr(command, "USES_INTERPRETER", False)
    monkeypatch.setitem(command.MODELS, "8B", replace(TINY_MODEL, name="8B"))
    monkeypatch.setattr(sweep, "_compile", lambda one: None)  # the interpreter knows no threads


@pytest.mark.usefixtures("_few", "_fake_gpu")
def test_a_whole_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A program that differs is not timed; one that overwrites its inputs finds them restored."""
    _plant(monkeypatch, _gate_for_up, 1024)
    monkeypatch.setattr(sweep, "FINALISTS", 1)
    out = tmp_path / "new" / "sweep.json"
    arguments = ["--sweep", "--ops", "swiglu", "adamw", "--models", "8B", "--rounds", "4", "--out", str(out)]
    assert command.main(arguments) == 1
    data = json.loads(out.read_text())
    assert data["device"] == {"name": "none"}
    rounds = {
        (row["part"], row["elements"]): row["seconds"] and row["seconds"]["rounds"]
        for row in data["rows"]
        if row["status"] == AGREEMENT
    }
    assert rounds == {
        ("forward", 2048): 4,
        ("forward", 4096): 4,
        ("backward", 2048): 4,
        ("backward", 4096): 4,
        ("whole", 1024): 4,
        ("whole", 4096): 4,
    }
    differing = [row for row in data["rows"] if row["status"].startswith("differs")]
    assert [(row["part"], row["elements"], row["seconds"]) for row in differing] == [
        ("forward", 1024, None),
        ("backward", 1024, None),
    ]
    streams = capsys.readouterr()
    assert streams.out in out.with_suffix(".md").read_text()
    assert "swiglu 8B forward, 4 warps, 2048 elements (ships): 10.0 µs\n" in streams.err


@pytest.mark.usefixtures("_few", "_fake_gpu")
def test_a_program_that_fails_while_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(given: Program) -> torch.Tensor:
        runs.append(given)
        if runs.count(given) > 1 and given.elements == 4096:
            raise RuntimeError("out of memory")
        return torch.ones(1)

    runs: list[Program] = []
    monkeypatch.setitem(sweep.SWEEPS, "swiglu", lambda _: [Pass("forward", 80, 2, Program(2048, 4), run)])
    (case,) = sweep.swept_cases(["swiglu"], [TINY_MODEL], 1 << 20)
    ((shipped, small, large),) = sweep.measure(case, FakeGpu(ticks=1e-5), 2, lambda text: None)
    assert large.status == "failed: RuntimeError: out of memory"
    assert large.seconds is None
    assert [trial.seconds and trial.seconds.rounds for trial in (shipped, small)] == [2, 2]
    assert not any(trial.is_fault for trial in (shipped, small, large))


def _trial(warps: int, micros: float | None, **changes: object) -> Trial:
    seconds = None if micros is None else Spread(micros * 0.9e-6, micros * 1e-6, micros * 1.1e-6, 50)
    row = Trial("swiglu", "8B", "forward", 14336, 2048, warps, False, AGREEMENT, seconds, True, 900)
    return replace(row, **changes)


def test_the_best_is_one_of_those_timed_in_turns() -> None:
    shipped = _trial(4, 1.25, is_shipped=True)
    early = _trial(1, 0.5, is_finalist=False)
    (found,) = comparisons([shipped, _trial(8, 1.0), _trial(16, 1.1), early])
    assert (found.best.warps, found.gain) == (8, pytest.approx(0.2))
    (found,) = comparisons([shipped, _trial(8, 1.3), early])
    assert (found.best, found.gain) == (shipped, 0)


def test_report_of_made_up_trials() -> None:
    failed = "failed: OutOfResources: shared | memory"
    trials = [
        _trial(4, 1.25, is_shipped=True),
        _trial(8, 1.0),
        _trial(16, None, status=failed, is_finalist=False),
        _trial(4, None, part="backward", is_shipped=True, status=failed, is_finalist=False),
    ]
    assert _cells(comparison_table(trials, COPY)) == [
        ["swiglu", "forward", "14336", *("4", "2048", "1.2", "72"), *("8", "2048", "1.0", "90"), "20.0 %"],
        ["swiglu", "backward", "14336", *("4", "2048", "–", "–"), *("–",) * 4, failed.replace("|", "/")],
    ]
    page = sweep_page({"command": "run"}, trials, {"copy": COPY})
    assert "- command: run\n- copy: 1 GB/s" in page
    assert "| swiglu | forward | 14336 | 4 | 2048 | 1.2 | 72 | 50 | agrees, ships |" in page
    assert "| swiglu | forward | 14336 | 16 | 2048 | – | – | – | failed: OutOfResources: shared / memory |" in page


def test_ops_that_are_not_swept(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--sweep", "--check", "--ops", "swiglu", "rope"]) == 2
    assert "--sweep knows add_rms_norm, swiglu, cross_entropy, adamw, not rope" in capsys.readouterr().err
