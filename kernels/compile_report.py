"""Compile every kernel for sm_80, sm_90 and sm_100 without a GPU: `python -m megalite_kernels.compile_report`.

The functions behind the custom ops run on meta tensors of the shapes of published models. The kernels that they would
launch are compiled, with the same specialisation as for a launch on a GPU. Registers are read with the cuobjdump that
Triton includes, and instructions from the PTX. The command compares the results with the report beside this file. It
exits with 1 if a kernel spills registers, needs more shared memory than there is, has no 16-byte load, computes in
float64 or with atomics, or needs more than it did when the report was written. --write writes a new report, so that a
person can read what changed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from megalite_kernels.compile_cases import CompileCase
from megalite_launch.base.texts import markdown_table

OPS = (
    "adamw",
    "add_rms_norm",
    "cross_entropy",
    "float8",
    "grad_norm",
    "muon",
    "mxfp8",
    "nf4",
    "qk_norm_rope",
    "rms_norm",
    "rope",
    "routed_rows",
    "swiglu",
    "symmetric_product",
    "weighted_swiglu",
)
ARCHITECTURES = (80, 90, 100)
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes that a program may use
REPORT = Path(__file__).with_name("compile_report.json")
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
REGISTER_SLACK = 8  # registers: so many more are not reported


@dataclass(frozen=True)
class Compiled:
    """The result of compiling one kernel for the launches of `models`."""

    op: str
    kernel: str
    dtype: str
    architecture: int
    models: str
    warps: int
    registers: int
    shared: int  # bytes
    stack: int  # bytes: registers are spilled there
    wide_loads: int  # instructions that load 16 bytes
    narrow_loads: int  # instructions that load less from global memory
    doubles: int  # instructions of PTX on float64
    atomics: int  # instructions of PTX whose order may change a sum
    wants_wide_loads: bool

    @property
    def name(self) -> str:
        return f"{self.op}, {self.kernel}, {self.dtype}, sm_{self.architecture}, {self.models}"


class NoGpuDriver:
    """A Triton driver that knows a target architecture, but no device."""

    def __init__(self, architecture: int) -> None:
        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_device(self) -> int:
        return self.target.arch  # Triton's key for the kernels that it has compiled

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def compile_module(module: str, architecture: int) -> list[Compiled]:
    """The compiled kernels of the cases of an op's module; one entry if several models launch the same kernel."""
    driver.set_active(NoGpuDriver(architecture))
    found: dict[tuple[Any, ...], list[tuple[CompileCase, Any]]] = {}
    for case in import_module(module).compile_cases():
        for binary in _launched(case):
            found.setdefault((case.op, str(case.dtype), binary.hash), []).append((case, binary))
    return [_measure([case for case, _ in same], same[0][1], architecture) for same in found.values()]


def _launched(case: CompileCase) -> list[Any]:
    binaries = []
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        binaries.append(run(kernel, *args, grid=grid, warmup=True, **kwargs))

    JITFunction.run = compile_only
    try:
        case.launch()
    finally:
        JITFunction.run = run
    return binaries


def _measure(cases: Sequence[CompileCase], binary: Any, architecture: int) -> Compiled:
    registers, stack = resource_usage(binary.asm["cubin"])
    ptx = binary.asm["ptx"]
    loads = _bytes_of_loads(ptx)
    wide = sum(size >= 16 for size in loads)
    return Compiled(
        op=cases[0].op,
        kernel=binary.metadata.name,
        dtype=str(cases[0].dtype).removeprefix("torch."),
        architecture=architecture,
        models=", ".join(dict.fromkeys(case.model for case in cases)),
        warps=binary.metadata.num_warps,
        registers=registers,
        shared=binary.metadata.shared,
        stack=stack,
        wide_loads=wide,
        narrow_loads=len(loads) - wide,
        doubles=ptx.count(".f64"),
        atomics=len(re.findall(r"\b(?:atom|red)\.(?:global|shared|relaxed|acq|rel)", ptx)),
        wants_wide_loads=all(case.wide_loads for case in cases),
    )


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a compiled kernel, and bytes of its stack, to which others are spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    bytes_of = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return bytes_of["REG"], bytes_of["STACK"] + bytes_of["LOCAL"]


def _bytes_of_loads(ptx: str) -> list[int]:
    """The width of every load from global memory to registers or shared memory; the same as in the machine code."""
    direct = re.findall(r"\bld\.global[\w.:]*?(?:\.v(\d))?\.[bfsu](\d+)\b", ptx)
    copies = re.findall(r"\bcp\.async\.c[ag]\.shared\.global[^,]*,[^,]*,\s*(\w+)", ptx)
    return [int(vector or 1) * int(bits) // 8 for vector, bits in direct] + [int(size, 0) for size in copies]


def compile_all(processes: int) -> list[Compiled]:
    """The compiled kernels of every op for every architecture, compiled in `processes` new processes."""
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        tasks = [(f"megalite_kernels.{op}", architecture) for op, architecture in product(OPS, ARCHITECTURES)]
        return [kernel for kernels in pool.map(compile_module, *zip(*tasks, strict=True)) for kernel in kernels]


def faults(kernels: Iterable[Compiled]) -> list[str]:
    """Messages about kernels that break one of the rules for all kernels."""
    found = []
    for kernel in kernels:
        if kernel.stack:
            found.append(f"{kernel.name}: spills registers to {kernel.stack} bytes of stack")
        if kernel.shared > SHARED_BYTES[kernel.architecture]:
            found.append(
                f"{kernel.name}: {kernel.shared} bytes of shared memory, of {SHARED_BYTES[kernel.architecture]}"
            )
        if kernel.wants_wide_loads and not kernel.wide_loads:
            found.append(f"{kernel.name}: no 16-byte load, and {kernel.narrow_loads} narrower ones")
        if kernel.doubles:
            found.append(f"{kernel.name}: {kernel.doubles} instructions on float64")
        if kernel.atomics:
            found.append(f"{kernel.name}: {kernel.atomics} atomic instructions")
    return found


def regressions(kernels: Iterable[Compiled], before: Iterable[Compiled]) -> list[str]:
    """Messages about kernels that need more than before, with the same compiler, or are in only one of both reports."""
    old, new = ({kernel.name: kernel for kernel in some} for some in (before, kernels))
    found = [f"{name}: not in the report; write it anew" for name in new.keys() - old.keys()]
    found += [f"{name}: in the report, but compiled no more; write it anew" for name in old.keys() - new.keys()]
    for name in old.keys() & new.keys():
        for field, slack in (("registers", REGISTER_SLACK), ("shared", 0), ("narrow_loads", 0)):
            was, now = getattr(old[name], field), getattr(new[name], field)
            if now > was + slack:
                found.append(f"{name}: {field} {was} → {now}")
    return sorted(found)


def read_report(path: Path = REPORT) -> tuple[str, list[Compiled]]:
    """The version of Triton in the report, and the kernels that it compiled."""
    report = json.loads(path.read_text())
    return report["triton"], [Compiled(**kernel) for kernel in report["kernels"]]


def as_json(version: str, kernels: Sequence[Compiled]) -> str:
    """The report as JSON, a line for each kernel."""
    lines = ",\n".join(json.dumps(asdict(kernel)) for kernel in kernels)
    return f'{{"triton": {json.dumps(version)}, "kernels": [\n{lines}\n]}}\n'


def table(version: str, kernels: Sequence[Compiled]) -> str:
    """The report as a page of Markdown."""
    columns = [field.name for field in fields(Compiled) if field.name != "wants_wide_loads"]
    heads = [column.replace("_", " ") for column in columns]
    rows = ([getattr(kernel, column) for column in columns] for kernel in kernels)
    return f"""# Compiled kernels

Written by `python -m megalite_kernels.compile_report --write` with Triton {version}, without a GPU. Shared memory and
stack are bytes of one program; where there is a stack, registers are spilled. Wide loads are instructions that load 16
bytes, doubles instructions on float64.

{markdown_table(heads, rows)}"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m megalite_kernels.compile_report", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the report anew, if no kernel is at fault")
    parser.add_argument(
        "--processes",
        type=int,
        default=min(len(os.sched_getaffinity(0)), 4),
        help="processes that compile (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    if triton.knobs.runtime.interpret:
        print(
            f"{parser.prog}: error: TRITON_INTERPRET is set, and interpreted kernels compile to nothing",
            file=sys.stderr,
        )
        return 2
    kernels = compile_all(options.processes)
    problems = faults(kernels)
    if options.write and not problems:
        REPORT.write_text(as_json(triton.__version__, kernels))
        REPORT.with_suffix(".md").write_text(table(triton.__version__, kernels))
    elif not options.write:
        version, before = read_report()
        if version == triton.__version__:
            problems += regressions(kernels, before)
        else:
            print(f"not compared: the report is of Triton {version}, this is {triton.__version__}")
    print(*problems, f"{len(kernels)} kernels, {len(problems)} problems", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
