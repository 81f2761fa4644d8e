"""`megalite show --memory`."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from memory_cases import APART, SIZES, WORST_CASE, configured

from megalite.commands.main import main
from megalite.commands.show import memory as show_memory
from megalite.commands.show.memory import memory_sections
from megalite.distributed.start.local import LAUNCHER
from megalite.plan.memory.peak import KINDS, rank_memory

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
MODEL = [f"model.{key}={value}" for key, value in SIZES.items()]


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, list[str]]:
    """The rows of all tables by their first cell."""
    assert main(["show", *MODEL, *arguments]) == 0
    lines = [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    return {cells[0]: cells[1:] for cells in lines}


def test_every_component_and_the_total(capsys: pytest.CaptureFixture[str]) -> None:
    rows = shown(capsys, "--memory", "train.precision=fp32")
    memory = rank_memory(configured({"train.precision": "fp32"}), 0)
    assert rows["total"] == [f"{memory.total / MIB:,.3f}", "100.0%"]
    weights = sum(memory.of("parameters").values())
    assert rows["parameters"] == [f"{weights / MIB:,.3f}", f"{weights / memory.total:.1%}"]
    assert rows["optimizer states"][0] == f"{2 * weights / MIB:,.3f}"
    assert {"embedding", "attention", "mlp", "norms", "head", "inputs"} <= rows.keys()
    assert "gathered weights" not in rows
    assert "Pipeline ranks, MiB" not in rows


def test_the_fullest_of_several_ranks_is_shown_in_detail(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = {"parallel.pp": 2, "train.precision": "fp32", "model.vocab_size": 65536}
    rows = shown(capsys, "--memory", *(f"{key}={value}" for key, value in overrides.items()))
    memories = [rank_memory(configured(overrides), pp) for pp in range(2)]
    assert memories[1].total > memories[0].total
    assert any(heading.startswith("Memory of pipeline rank 1, the fullest of 2: pp 2") for heading in rows)
    for memory in memories:
        assert rows[str(memory.pp)][0] == f"{memory.total / MIB:,.2f}"
    assert rows["total"][0] == f"{memories[1].total / MIB:,.3f}"


def test_a_split_that_lowers_the_peak_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    model = [
        str(ROOT / "configs/model/llama3_70b.yaml"),
        "model.layers=12",
        "parallel.pp=2",
        "parallel.tp=8",
        "batch.global=64",
    ]
    assert main(["show", "--memory", *model]) == 0
    told = "parallel.pipeline.split=[6, 6] would lower the peak from 149 GiB to"
    assert told not in capsys.readouterr().out
    assert main(["show", "--memory", *model, "parallel.tp=1"]) == 0
    output = capsys.readouterr().out
    assert "does not fit" in output
    assert f"{told} 130 GiB; its slowest stage takes 2% longer." in output


def test_bytes_of_both_kinds_of_buffers_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A rank has two of eight experts: of three that a token chooses, at most two are there."""
    overrides = {**APART, "parallel.ep": 4, **WORST_CASE}
    rows = shown(capsys, "--memory", *(f"{key}={value}" for key, value in overrides.items()))
    config = configured(overrides)
    tokens, width = config.model.sequence_length * config.batch.micro_size, config.model.width
    assert [int(rows[name][0].replace(",", "")) for name in ("exact", "worst_case")] == [3 * tokens, 4 * 2 * tokens]
    kept, sent = (float(each.split()[0]) * MIB for each in rows["worst_case"][1:])
    assert kept == pytest.approx(4 * 2 * tokens * (2 * (width + 3 * 1024) + 4), rel=0.01)
    # Tokens there and sums back, likewise gradients; scores, their gradients, and choices.
    assert sent == pytest.approx(3 * tokens * (4 * 2 * width + 3 * (4 + 4 + 8)), rel=0.01)
    assert "exact" not in shown(capsys, "--memory")


def test_equal_ranks_of_many_are_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    gpipe = ["model.layers=12", "parallel.pp=12", "batch.global=12", "parallel.pipeline.schedule=gpipe"]
    rows = shown(capsys, "--memory", *gpipe)
    assert {"0", "1-9", "10", "11"} <= rows.keys()


def test_measured_columns_come_from_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    rows = shown(capsys, "--memory", "--measure", "batch.global=2", "optim.placement=host")
    predicted, share, measured, difference = rows["total"]
    assert share == "100.0%"
    assert float(predicted) == pytest.approx(float(measured), rel=0.05)
    assert float(difference.rstrip("%")) == pytest.approx(100 * (float(predicted) / float(measured) - 1), abs=0.1)
    assert rows["parameters"][0] == rows["parameters"][2]
    assert rows["host memory"][0] == rows["host memory"][1]


def test_a_dry_run_knows_the_command_that_it_ends_with(monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"import os; assert os.environ['{LAUNCHER}'] == str(os.getppid()); print('{{\"bytes\": {{}}}}')"
    monkeypatch.setattr(show_memory, "dry_run_command", lambda *_: [sys.executable, "-c", program])
    assert main(["show", "--memory", "--measure"]) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends a process with its parent")
def test_a_dry_run_does_not_outlive_the_command() -> None:
    command, environment = [sys.executable, "-m", "megalite.dry_run", "--pp=0"], {**os.environ, LAUNCHER: "1"}
    assert subprocess.run(command, env=environment, timeout=60, check=False).returncode == -signal.SIGKILL


def test_what_a_dry_run_leaves_out_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command, program = show_memory.dry_run_command, """print('{"bytes": {}}')"""
    monkeypatch.setattr(show_memory, "dry_run_command", lambda *args: [command(*args)[0], "-c", program])
    unlike = ["data.mask_documents=true", "data.end_of_document=1", "train.compile=true"]
    for arguments, expected in (
        ([*unlike, "--measure"], "Measured with every sample as one document and layers that are not compiled."),
        (["train.compile=true", "--measure"], "Measured with layers that are not compiled."),
        (["--measure"], None),
        (unlike, None),
    ):
        assert main(["show", "--memory", *arguments]) == 0
        output = capsys.readouterr().out
        assert expected in output if expected else "Measured with" not in output


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_not_counted_is_said(device: str, pp: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--memory", f"run.device={device}", f"parallel.pp={pp}"]) == 0
    output = capsys.readouterr().out
    assert "Not counted" in output
    assert ("NCCL's buffers" in output) == (device == "cuda")
    assert ("With NCCL, buffers between" in output) == (device == "cuda" and pp == 2)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("import sys; sys.exit('Traceback\\n  somewhere\\nMemoryError: too large')", "MemoryError: too large"),
        ("import sys; print('parallel.pp = 3: rule', file=sys.stderr); sys.exit(2)", "parallel.pp = 3: rule"),
        ("import os; os._exit(7)", "exit code 7"),
    ],
)
def test_a_dry_run_that_fails_is_one_message(
    program: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = show_memory.dry_run_command
    monkeypatch.setattr(show_memory, "dry_run_command", lambda *args: [command(*args)[0], "-c", program])
    assert main(["show", "--memory", "--measure"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.strip() == f"megalite: error: --measure: the dry run failed: {expected}"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["model.layers=1000"], "1,000 layers forward and backward for up to 8 micro-batches, 8,000 passes, more than"),
        (
            ["model.sequence_length=1048576"],
            "would take the loss of 8,388,608 tokens, more than the 5,555,200 that take",
        ),
        (["parallel.dp_replicate=1048576", "batch.global=1048576"], "process groups of 1,048,576 ranks, more than the"),
    ],
)
def test_a_dry_run_that_would_not_end_is_refused(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with patch.object(show_memory.subprocess, "run", side_effect=AssertionError("started")):
        assert main(["show", "--memory", "--measure", "batch.global=8", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_measuring_needs_memory(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["show", "--measure"])
    assert ended.value.code == 2
    assert "--measure: needs --memory" in capsys.readouterr().err


def test_kinds_that_differ_though_the_total_agrees_are_explained() -> None:
    config, told = configured({}), "The total agrees, but not activations and temporaries: most likely"
    memory = rank_memory(config, 0)
    counted = {kind: sum(memory.of(kind).values()) for kind in KINDS}
    moved = memory.total // 20

    def notes(**changes: int) -> str:
        measured = {kind: size + changes.get(kind, 0) for kind, size in counted.items()}
        return str(dict(memory_sections(config, [memory], None, measured))["Conventions"])

    assert told not in notes()
    assert told in notes(activations=moved, temporaries=-moved)
    assert "agrees" not in notes(activations=moved)
    assert "agrees" not in notes(activations=memory.total // 200, temporaries=-(memory.total // 200))
