"""Every kernel compiled without a GPU: what it needs, and that it needs no more than the report says."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import triton

from megalite_kernels.compile_report import (
    OPS,
    REPORT,
    Compiled,
    as_json,
    faults,
    main,
    read_report,
    regressions,
    table,
)

KERNEL = Compiled("op", "kernel", "bfloat16", 90, "8B", 8, 64, 1024, 0, 4, 1, 0, 0, True)


def _without_interpreter(*command: str, timeout: int = 290) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=timeout, env=environment)


def test_every_kernel_compiles_to_what_the_report_says() -> None:
    done = _without_interpreter("-m", "megalite_kernels.compile_report")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_report_and_its_table_are_written_so() -> None:
    assert REPORT.read_text() == as_json(*read_report())
    assert REPORT.with_suffix(".md").read_text() == table(*read_report())


def test_every_file_with_kernels_is_compiled() -> None:
    """And for both architectures."""
    folder = REPORT.parent
    assert {path.stem for path in folder.glob("*.py") if "\ndef compile_cases" in path.read_text()} == set(OPS)
    launched = {(kernel.kernel, kernel.architecture) for kernel in read_report()[1]}
    for path in folder.glob("*.py"):
        for part in path.read_text().split("\n@jit\ndef ")[1:]:
            name = part.partition("(")[0]
            if f"    {name}[" in path.read_text():
                assert {(name, 80), (name, 90)} <= launched


def test_faults_are_found() -> None:
    program = (
        "from megalite_kernels.compile_report import *; print(*faults(compile_module('bad_kernels', 90)), sep='\\n')"
    )
    done = _without_interpreter("-c", program)
    narrow, spills, doubles, atomics = done.stdout.splitlines()
    assert narrow.startswith("narrow, _copy, bfloat16, sm_90, : no 16-byte load, and 8 narrower ones")
    assert spills.startswith("spills, _keeps_too_much")
    assert "bytes of stack" in spills
    assert doubles.startswith("float64, _wide")
    assert atomics.startswith("atomic, _adds_in_any_order")


NARROW_ROWS = """
import sys, torch
from types import SimpleNamespace
from megalite_kernels.compile_cases import CompileCase, meta
from megalite_kernels.compile_report import SHARED_BYTES, compile_module
import megalite_kernels.add_rms_norm
norm = sys.modules["megalite_kernels.rms_norm"]
norm.shared_memory = lambda device: SHARED_BYTES[90]
x, weight, inverse = meta(65536, 1, dtype=torch.float64), meta(1, dtype=torch.float64), meta(65536, dtype=torch.float64)
launch = lambda: norm.launch_backward(x, weight, inverse, x, x)
case = CompileCase("norm", "", torch.float64, launch, False)
sys.modules["narrow_rows"] = SimpleNamespace(compile_cases=lambda: [case])
(kernel,) = compile_module("narrow_rows", 90)
print(kernel.shared <= SHARED_BYTES[90], kernel.shared)
"""


def test_rows_of_one_number_fit_into_shared_memory() -> None:
    """Their root mean squares take as much of it as the rows."""
    done = _without_interpreter("-c", NARROW_ROWS)
    assert done.stdout.startswith("True"), done.stdout + done.stderr


def test_faults_of_a_record() -> None:
    assert faults([KERNEL, replace(KERNEL, wide_loads=0, wants_wide_loads=False)]) == []
    bad = [
        replace(KERNEL, stack=8),
        replace(KERNEL, wide_loads=0),
        replace(KERNEL, doubles=1),
        replace(KERNEL, atomics=1),
        replace(KERNEL, shared=228 << 10),
    ]
    assert len(faults(bad)) == 5


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ([KERNEL], []),
        ([replace(KERNEL, registers=72, wide_loads=2, narrow_loads=0)], []),
        ([replace(KERNEL, registers=73)], ["registers 64 → 73"]),
        ([replace(KERNEL, shared=1040)], ["shared 1024 → 1040"]),
        ([replace(KERNEL, narrow_loads=2)], ["narrow_loads 1 → 2"]),
        ([], ["in the report, but compiled no more"]),
        ([KERNEL, replace(KERNEL, models="70B")], ["70B: not in the report"]),
    ],
)
def test_regressions(now: list[Compiled], said: list[str]) -> None:
    found = regressions(now, [KERNEL])
    assert len(found) == len(said)
    for line, part in zip(found, said, strict=True):
        assert part in line


def test_interpreted_kernels_are_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert main([]) == 2
    assert "error: TRITON_INTERPRET is set" in capsys.readouterr().err
