"""Time and memory of a training step on CPU, beside Hugging Face transformers on the same weights and tokens.

Every variant runs in a separate process. Variants take their steps in turn, so that other load on the machine slows all
of them. A time ratio is that of two steps of the same round; the median over rounds is shown. Results are shown only if
losses and gradient norms agree.

With train.compile=true both compile their layers. With train.precision=bf16 both compute in bf16 and update float32
weights: transformers under autocast, as it is commonly trained on one device.
"""

import argparse
import resource
import shlex
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.base.entry import exit_code
from megalite.base.errors import InputError, listing
from megalite.base.exit_codes import ExitCode
from megalite.base.files import write_object
from megalite.config.layout import Layout
from megalite.config.load import files_and_overrides, load
from megalite.config.model_schema import Attention
from megalite.config.parametrization import Multipliers, multipliers
from megalite.config.rules.validate import check
from megalite.config.schema import Config
from megalite.cost.order_costs import costing_of
from megalite.data.loader import Micros
from megalite.distributed.mesh import Mesh
from megalite.distributed.start.allocator import keep_freed_memory
from megalite.distributed.start.start import start_alone
from megalite.plan.memory.fit import fitted
from megalite.train.build import Job, build
from megalite.train.recompute_costs import plan_for
from megalite.train.step import train_step
from megalite_tools.bench.peer import Step, build_peer, llama
from megalite_tools.bench.training.agreement import NORM_TOLERANCE
from megalite_tools.report_file import add_out, header
from megalite_tools.terminal import Terminal

COMMAND = "megalite-bench-step"
MODEL = "small_60m"
BASE_SETTINGS = (
    "model.sequence_length=256",
    "batch.micro=4",
    "batch.global=4",
    "train.precision=fp32",
    "schedule.name=constant",
)
MEGALITE, FUSED = "megalite", "transformers, fused AdamW"
PEERS: dict[str, dict[str, Any]] = {  # further arguments of torch.optim.AdamW
    "transformers, AdamW": {},
    FUSED: {"fused": True},
}
COMPARED_STEPS = 3  # the first steps: losses and gradient norms are compared; not timed, since they warm up
TOLERANCES = {  # by precision: relative differences of losses and of norms; bf16 rounds activations differently
    "fp32": {"loss": 1e-5, "norm": 1e-5},
    "bf16": {"loss": 2e-3, "norm": NORM_TOLERANCE},
}


@dataclass
class Variant:
    """One implementation, with its measurements."""

    name: str
    losses: list[float] = field(default_factory=list)  # losses of the compared steps
    norms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # seconds of the timed steps
    peak_bytes: int = 0  # growth of resident memory since the imports


class Disagreement(Exception):
    """The results of a variant differ from ours."""


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark. Returns the exit code: FAILED if the implementations disagree, or one died."""
    return exit_code(COMMAND, lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    try:
        config = _config(options)
        variants = _measure(config, options.steps, [FUSED] if options.fused else PEERS)
        report = _report(config, variants, shlex.join([COMMAND, *arguments]))
        _show(report)
        write_object(Path(options.out), report)
    except Disagreement as error:
        print(f"{COMMAND}: error: {error}; nothing is timed", file=sys.stderr)
        return ExitCode.FAILED
    except (EOFError, ConnectionError):
        print(f"{COMMAND}: error: a process died; what it said is above", file=sys.stderr)
        return ExitCode.FAILED
    return ExitCode.DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument(
        "inputs", nargs="*", metavar="CONFIG | key=value", help=f"as for megalite train (default: {MODEL})"
    )
    parser.add_argument("--steps", type=int, default=20, help="timed steps of every variant (default: %(default)s)")
    parser.add_argument(
        "--fused", action="store_true", help="compare with fused AdamW alone, which takes a process less of memory"
    )
    add_out(parser, "step_cpu.json")
    return parser


def _config(options: argparse.Namespace) -> Config:
    files, overrides = files_and_overrides(options.inputs)
    config = check(load(files or [MODEL], [*BASE_SETTINGS, *overrides]), world_size=1)
    config = fitted(config, costing=costing_of(config))
    if llama is None:
        raise InputError("transformers is not installed; pip install 'megalite[hf]'")
    model = config.model
    another = model.norm != "pre" or model.qk_norm or model.qkv_bias or model.rope_scaling or model.rotary_width
    another = another or model.out_bias or model.parametrization != "standard" or multipliers(model) != Multipliers()
    another = another or model.norm_gain != "weight" or model.activation != "silu" or model.logits_softcap is not None
    if another or model.attention != Attention():
        raise InputError(
            "model.norm must be pre, model.parametrization standard without multipliers, model.norm_gain and "
            "model.activation as they are by default, and model.qk_norm, model.qkv_bias, model.out_bias, "
            "model.rope_scaling, model.rotary_width, model.logits_softcap and what is in model.attention must be off, "
            "as in transformers' Llama"
        )
    if config.train.precision not in TOLERANCES or config.optim.clip_norm == 0:
        raise InputError(f"train.precision must be {listing([*TOLERANCES])}, and optim.clip_norm above 0")
    if options.steps < 1:
        raise InputError(f"--steps={options.steps}: must be at least 1")
    return config


def _measure(config: Config, steps: int, peers: Iterable[str]) -> list[Variant]:
    """Let all variants take their steps in turn, the order reversed every other round."""
    variants = [Variant(name) for name in (MEGALITE, *peers)]
    context = get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    try:
        for variant in variants:
            pipes[variant.name], remote = context.Pipe()
            processes.append(context.Process(target=_serve, args=(variant.name, config, remote)))
            processes[-1].start()
            remote.close()
            pipes[variant.name].recv()  # waits until the process is ready: two never work at the same time
        for step in range(COMPARED_STEPS + steps):
            for variant in variants if step % 2 else variants[::-1]:
                _take_step(variant, step, pipes[variant.name])
            if step == COMPARED_STEPS - 1:
                _compare(variants[0], variants[1:], TOLERANCES[config.train.precision])
        for variant in variants:
            pipes[variant.name].send(None)
            variant.peak_bytes = pipes[variant.name].recv()
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return variants


def _take_step(variant: Variant, step: int, pipe: Connection) -> None:
    pipe.send(step)
    seconds, loss, norm = pipe.recv()
    if step < COMPARED_STEPS:
        variant.losses.append(loss)
        variant.norms.append(norm)
    else:
        variant.seconds.append(seconds)


def _compare(ours: Variant, peers: Iterable[Variant], tolerances: Mapping[str, float]) -> None:
    for peer in peers:
        for quantity, expected, got in (("loss", peer.losses, ours.losses), ("norm", peer.norms, ours.norms)):
            for step, (a, b) in enumerate(zip(expected, got, strict=True)):
                if not abs(a - b) <= tolerances[quantity] * abs(a):
                    raise Disagreement(f"step {step}: the {quantity} is {b!r} in {ours.name}, {a!r} in {peer.name}")


def _serve(name: str, config: Config, pipe: Connection) -> None:
    """Tell the parent process when ready, take the steps that it asks for, and at the end tell it the peak memory."""
    imported = _peak_bytes()
    start_alone()
    mesh = Mesh.build(Layout(), torch.device("cpu"))
    assert mesh is not None
    job = build(plan_for(config, mesh), mesh)
    step = _ours(job) if name == MEGALITE else build_peer(job, PEERS[name])
    del job
    pipe.send(None)
    while (number := pipe.recv()) is not None:
        batch = _batch(config, number)
        start = time.perf_counter()
        loss, norm = step(batch, number)
        pipe.send((time.perf_counter() - start, loss, norm))
    pipe.send(_peak_bytes() - imported)
    dist.destroy_process_group()


def _ours(job: Job) -> Step:
    keep_freed_memory()  # as a rank does that trains

    def step(batch: Tensor, number: int) -> tuple[float, float]:
        reading = train_step(job, Micros.cut_at(batch, None), number).read()
        return reading.loss, reading.norm

    return step


def _batch(config: Config, step: int) -> Tensor:
    """The same random tokens for every variant, `[m, b, s + 1]`."""
    generator = torch.Generator().manual_seed(step)
    size = (config.batch.global_, config.model.sequence_length + 1)
    return torch.randint(config.model.vocab_size, size, generator=generator).unflatten(0, (-1, config.batch.micro_size))


def _peak_bytes() -> int:
    """The largest resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _report(config: Config, variants: Sequence[Variant], command: str) -> dict[str, Any]:
    tokens = config.batch.global_ * config.model.sequence_length
    return header(command, ("megalite", "torch", "transformers")) | {
        "model": asdict(config.model),
        "batch": {"micro": config.batch.micro, "global": config.batch.global_},
        "optim": asdict(config.optim),
        "precision": config.train.precision,
        "tolerances": TOLERANCES[config.train.precision],
        "threads": torch.get_num_threads(),
        "variants": [asdict(variant) | _summary(variants[0], variant, tokens) for variant in variants],
    }


def _summary(ours: Variant, variant: Variant, tokens: int) -> dict[str, float]:
    median = statistics.median(variant.seconds)
    return {
        "median_seconds": median,
        "fastest_seconds": min(variant.seconds),
        "tokens_per_second": tokens / median,
        "time_ratio": statistics.median(a / b for a, b in zip(ours.seconds, variant.seconds, strict=True)),
        "memory_ratio": ours.peak_bytes / max(1, variant.peak_bytes),
    }


def _show(report: dict[str, Any]) -> None:
    model, precision = report["model"], report["precision"]
    terminal, rows = Terminal(), []
    terminal.line(
        f"One training step in {precision}: {model['layers']} layers of {model['width']}, vocabulary "
        f"{model['vocab_size']:,}, {report['batch']['global']} × {model['sequence_length']} tokens; "
        f"{report['machine']['cpu']}, {report['threads']} threads. Ratios are megalite / row."
    )
    for row in report["variants"]:
        numbers = (row["median_seconds"], row["tokens_per_second"], row["time_ratio"])
        memory = (row["peak_bytes"] / 2**20, row["memory_ratio"])
        cells = ("{:.3f}", "{:,.0f}", "{:.3f}", "{:,.0f}", "{:.3f}")
        rows.append((row["name"], *(cell.format(value) for cell, value in zip(cells, numbers + memory, strict=True))))
    terminal.table((":", "median s", "tokens/s", "time ratio", "peak MiB", "memory ratio"), rows)


if __name__ == "__main__":
    sys.exit(main())
