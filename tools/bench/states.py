"""Reading and writing optimizer states in a file as a step does, beside `dd` with O_DIRECT on the same drive.

A pass reads all states into host memory and writes them back, bucket by bucket, as a step does for a GPU; a step is
AdamW's on this CPU. `dd` writes a file as large and reads it. Rounds of all take turns; medians are told.
"""

import argparse
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from megalite.base.entry import exit_code
from megalite.base.errors import InputError
from megalite.base.exit_codes import ExitCode
from megalite.base.files import is_folder, write_object
from megalite.optim.scratch_file import ScratchFile
from megalite.optim.states import FileStates
from megalite.optim.streamed_adamw import StreamedAdamW
from megalite.optim.streams import Bucket
from megalite.plan.model.optimizer_states import ADAMW_STATES
from megalite.plan.state_streams import BUCKET_BYTES
from megalite_kernels import fused_adamw
from megalite_tools.report_file import add_out, header
from megalite_tools.terminal import Terminal

COMMAND = "megalite-bench-states"
CPU = torch.device("cpu")
ELEMENTS = 16 << 20  # elements of a parameter, whose moments take four buckets
GOAL = 0.8  # share of the rate of `dd` that passes are to reach


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark. Returns the exit code."""
    return exit_code(COMMAND, lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--folder", default=".", help="on the drive to measure (default: here)")
    parser.add_argument("--parameters", type=int, default=4, help=f"of {ELEMENTS:,} elements each (default: 4)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: 5)")
    add_out(parser, "states_cpu.json")
    options = parser.parse_args(arguments)
    if options.parameters < 1 or options.rounds < 1:
        raise InputError("--parameters and --rounds must be at least 1")
    if not is_folder(options.folder):
        raise InputError(f"--folder {options.folder}: no such folder")
    if shutil.which("dd") is None:
        raise InputError("there is no dd, beside which states are measured; install coreutils")
    with TemporaryDirectory(prefix=f"{COMMAND}-", dir=options.folder) as folder:
        report = header(shlex.join([COMMAND, *arguments])) | _measured(folder, options.parameters, options.rounds)
    _show(report)
    write_object(Path(options.out), report)
    return ExitCode.DONE


def _measured(folder: str, parameters: int, rounds: int) -> dict[str, Any]:
    size = parameters * ELEMENTS * 2 * 4
    file = ScratchFile(folder, size, "--folder")
    states = FileStates(file)
    params = [torch.nn.Parameter(torch.ones(ELEMENTS)) for _ in range(parameters)]
    optimizer = StreamedAdamW([{"params": params}], 1e-3, (0.9, 0.95), 1e-8, states, fused_adamw)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()  # makes the states, and gives the file its blocks
    moments = [optimizer.state[param][name].view(-1) for param in params for name in ADAMW_STATES]
    half = BUCKET_BYTES // len(ADAMW_STATES) // 4
    pairs = zip(moments[::2], moments[1::2], strict=True)
    buckets = [[each[first : first + half] for each in pair] for pair in pairs for first in range(0, ELEMENTS, half)]
    other = f"{folder}/dd"
    ways: dict[str, Callable[[], object]] = {
        "dd, write": lambda: _dd("if=/dev/zero", f"of={other}", "oflag=direct", "conv=notrunc", f"count={size >> 22}"),
        "dd, read": lambda: _dd(f"if={other}", "of=/dev/null", "iflag=direct"),
        "states, a pass": lambda: _pass(states, buckets),
        "states, a step": optimizer.step,
    }
    ways["dd, write"]()  # gives the file its blocks
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            began = time.monotonic()
            run()
            times[way].append(time.monotonic() - began)
    seconds = {way: statistics.median(each) for way, each in times.items()}
    dd = 2 * size / (seconds["dd, write"] + seconds["dd, read"])
    rates = {way: size / seconds[way] for way in ways if way.startswith("dd")}
    rates |= {way: 2 * size / seconds[way] for way in ways if not way.startswith("dd")}
    return {
        "bytes": size,
        "bucket_bytes": BUCKET_BYTES,
        "direct": file.direct,
        "seconds": times,
        "bytes_per_second": rates | {"dd, write then read": dd},
        "share_of_dd": rates["states, a pass"] / dd,
        "goal": GOAL,
    }


def _pass(states: FileStates, buckets: Sequence[Bucket]) -> None:
    source = states.source(buckets)
    for number in range(len(buckets)):
        source.ready(number)
        source.changed(number, None)
    source.end()


def _dd(*operands: str) -> None:
    done = subprocess.run(["dd", *operands, "bs=4M"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"dd {' '.join(operands)}: {done.stderr.strip()}")


def _show(report: dict[str, Any]) -> None:
    terminal = Terminal()
    terminal.line(f"{report['bytes'] / 1e6:,.0f} MB of states; O_DIRECT: {'yes' if report['direct'] else 'no'}")
    rows = [(way, f"{rate / 1e6:,.0f}") for way, rate in report["bytes_per_second"].items()]
    terminal.table((":", "MB/s read and written"), rows)
    terminal.line(f"A pass reaches {report['share_of_dd']:.2f} of dd (goal: {report['goal']}).")


if __name__ == "__main__":
    sys.exit(main())
