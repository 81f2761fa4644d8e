"""Converting random weights between Hugging Face and megalite, beside loading and saving them with transformers.

Every way runs in processes of its own, in turn, so that time includes starting Python, and peak memory is that of the
process. Written files reach the disk: megalite flushes its own, and the benchmark those of transformers.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from megalite.base.entry import exit_code
from megalite.base.errors import InputError
from megalite.base.exit_codes import ExitCode
from megalite.base.files import as_json, is_folder, write_object
from megalite.checkpoint.weights.formats.safetensors import ONE_FILE, header
from megalite.checkpoint.weights.maps.families import CONFIG, FAMILIES, family_of
from megalite.config.load import load
from megalite.plan.model.size import model_parameters
from megalite.plan.model.weights import weights
from megalite_launch.base.texts import memory_text, scaled
from megalite_tools.report_file import add_out
from megalite_tools.terminal import Terminal

COMMAND = "megalite-bench-convert"
SHARD_SIZE = "1GB"
LARGE_MODEL = "llama3_405b"
PEER_SCRIPT = """
import sys
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
model.save_pretrained(sys.argv[2], max_shard_size=sys.argv[3])
"""


MEMORY_SCRIPT = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(done.returncode)
"""  # by a process that is small itself: a peak counts the memory of the process that started it


@dataclass(frozen=True)
class Result:
    """One way of taking the weights of a model elsewhere."""

    model: str
    way: str
    bytes: int  # written
    seconds: float  # median
    peak: int  # bytes of memory, the largest of all rounds

    @property
    def rate(self) -> float:
        return self.bytes / self.seconds


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark. Returns the exit code."""
    return exit_code(COMMAND, lambda: _run(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    add = parser.add_argument
    presets = ["smollm2_135m", "llama3.2_1b"]
    add("--models", nargs="+", default=presets, metavar="YAML", help="models of that size (default: 135M and 1B)")
    add("--rounds", type=int, default=3, help="rounds of every way (default: %(default)s)")
    add("--workers", type=int, default=2, help="files that megalite writes at a time (default: %(default)s)")
    add("--folder", default=".", help="a folder on the disk to be measured (default: the working directory)")
    add_out(parser, "convert_cpu.json")
    return parser


def _run(options: argparse.Namespace) -> int:
    if min(options.rounds, options.workers) < 1:
        raise InputError("--rounds and --workers must be at least 1")
    if not is_folder(options.folder):
        raise InputError(f"--folder {options.folder}: no such folder")
    results: list[Result] = []
    with TemporaryDirectory(dir=options.folder) as folder:
        for preset in options.models:
            results += _measure(preset, Path(folder), options.rounds, options.workers)
    _print(results)
    large = 2 * model_parameters(load([LARGE_MODEL]).model).total
    last = [result for result in results if result.model == results[-1].model]  # starting takes the time of small ones
    slowest = min(result.rate for result in last if result.way != "transformers")
    estimate = large / slowest
    print(
        f"Estimate for Llama 3.1 405B in bf16, {scaled(large, 'B')}, at the lowest of these rates: {estimate:,.0f} s."
    )
    found = {"torch": torch.__version__, "cores": os.cpu_count(), "workers": options.workers, "rounds": options.rounds}
    rows = [{**asdict(result), "bytes_per_second": result.rate} for result in results]
    write_object(Path(options.out), {**found, "results": rows, "estimated_seconds_405b": estimate})
    return ExitCode.DONE


def _measure(preset: str, folder: Path, rounds: int, workers: int) -> list[Result]:
    name, source = Path(preset).name.removesuffix(".yaml"), folder / "source"
    size = _make(preset, source)
    convert = [sys.executable, "-m", "megalite_tools.checkpoint.convert", "--workers", str(workers)]
    there, back, peer = folder / "there", folder / "back", folder / "peer"
    ways: dict[str, Sequence[str]] = {
        "hf to megalite": [*convert, "--from", f"hf:{source}", "--to", f"megalite:{there}"],
        "megalite to hf": [*convert, "--from", f"megalite:{there}", "--to", f"hf:{back}", "--shard-size", SHARD_SIZE],
        "transformers": [sys.executable, "-c", PEER_SCRIPT, str(source), str(peer), SHARD_SIZE],
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    peaks: dict[str, list[int]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, command in ways.items():
            took, peak = _timed(command)
            seconds[way].append(took)
            peaks[way].append(peak)
        for made in (there, back, peer):
            shutil.rmtree(made)
    shutil.rmtree(source)
    return [Result(name, way, size, statistics.median(seconds[way]), max(peaks[way])) for way in ways]


def _timed(command: Sequence[str]) -> tuple[float, int]:
    """Seconds until what the command wrote is on the disk, and its peak of memory in bytes."""
    os.sync()
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", MEMORY_SCRIPT, *command], capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"{' '.join(command[:4])} failed: {done.stderr[-500:]}")
    os.sync()
    return time.perf_counter() - began, int(done.stdout) * 1024


def _make(preset: str, folder: Path) -> int:
    """Random weights in bf16, in one file; their bytes."""
    model = load([preset]).model
    family = family_of(model)
    table = FAMILIES[family.model_type].table(model)
    folder.mkdir()
    (folder / CONFIG).write_text(as_json(family.config(model, "bfloat16")))
    start, order = header({name: ("bfloat16", theirs.shape) for name, theirs in table.items()})
    generator = torch.Generator().manual_seed(0)
    with (folder / ONE_FILE).open("wb") as file:
        file.write(start)
        for name in order:
            rows = torch.randn(table[name].elements, generator=generator).bfloat16()
            file.write(rows.view(torch.uint8).numpy().data)
    return 2 * sum(weight.elements for weight in weights(model).values())


def _print(results: Sequence[Result]) -> None:
    rows = [
        (each.model, each.way, f"{each.seconds:.1f}", f"{scaled(each.rate, 'B')}/s", memory_text(each.peak))
        for each in results
    ]
    Terminal().table(("model:", "way:", "seconds", "rate", "peak memory"), rows)


if __name__ == "__main__":
    sys.exit(main())
