"""Time and memory of a training step on CPU, beside Hugging Face transformers on the same weights and tokens.

Every variant lives in a process of its own. They take their steps in turn, so that drift of the machine meets
all of them, and a ratio is the median over rounds of two steps taken in the same round. No timing is shown
unless losses and gradient norms agree.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from megalite.config.errors import InputError
from megalite.config.layout import Layout
from megalite.config.load import is_override, load
from megalite.config.schema import Config, Model
from megalite.config.validate import check
from megalite.dist.mesh import Mesh
from megalite.train.build import Job, build
from megalite.train.step import mean_loss, train_step

COMMAND = "megalite-bench-step"
BASE = (
    "run.device=cpu",
    "parallel.dp_shard=1",
    "batch.micro=4",
    "batch.global=4",
    "model.sequence_length=256",
    "train.precision=fp32",
    "schedule.name=constant",
)
OURS = "megalite"
PEERS: dict[str, dict[str, Any]] = {  # arguments of torch.optim.AdamW
    "transformers, AdamW": {},
    "transformers, AdamW(fused=True)": {"fused": True},
}
COMPARED = 3  # steps whose losses and gradient norms are compared; they do not count for timing
TOLERANCE = 1e-5  # relative
OF_PEER = {  # Hugging Face's names of our modules
    "embed": "model.embed_tokens",
    "layers": "model.layers",
    "head.norm": "model.norm",
    "head.output": "lm_head",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention": "self_attn",
    **{name: f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")},
}

Step = Callable[[Tensor, int], tuple[float, float]]  # (batch [m, b, s + 1], number) → mean loss, gradient norm


@dataclass
class Variant:
    """One implementation and what was measured of it."""

    name: str
    losses: list[float] = field(default_factory=list)  # of the compared steps
    norms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of the timed steps
    peak_bytes: int = 0  # peak resident memory above that of the imported libraries


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: measured; 1: the implementations disagree, or one failed; 2: bad input."""
    options = _parser().parse_args(argv)
    try:
        config = _config(options.inputs)
        variants = _measure(config, options.steps)
    except InputError as error:
        print(f"{COMMAND}: error: {error}", file=sys.stderr)
        return 2
    except EOFError:
        print(f"{COMMAND}: error: a process died; its own message is above", file=sys.stderr)
        return 1
    if disagreement := _disagreement(variants):
        print(f"{COMMAND}: error: {disagreement}; nothing is timed", file=sys.stderr)
        return 1
    report = _report(config, variants, [COMMAND, *(sys.argv[1:] if argv is None else argv)])
    _show(report, Console())
    if options.out:
        _write(Path(options.out), report)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("inputs", nargs="+", metavar="CONFIG | key=value", help="as for `megalite train`")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of every variant (default: 20)")
    parser.add_argument("--out", metavar="JSON", help="write the measurements here")
    return parser


def _config(inputs: Sequence[str]) -> Config:
    overrides = [item for item in inputs if is_override(item)]
    config = check(load([item for item in inputs if item not in overrides], [*BASE, *overrides]), world_size=1)
    if config.model.qk_norm or config.model.qkv_bias or config.model.rope_scaling:
        raise InputError("model.qk_norm, model.qkv_bias and model.rope_scaling must be off to compare with Llama")
    if config.train.precision != "fp32" or config.optim.clip_norm == 0:
        raise InputError("train.precision must be fp32 and optim.clip_norm above 0 to compare like with like")
    return config


def _measure(config: Config, steps: int) -> list[Variant]:
    """Run all variants in turn, the order reversed every other round."""
    variants = [Variant(name) for name in (OURS, *PEERS)]
    context = get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    for variant in variants:
        pipes[variant.name], remote = context.Pipe()
        processes.append(context.Process(target=_serve, args=(variant.name, config, remote), daemon=True))
        processes[-1].start()
        remote.close()
    for step in range(COMPARED + steps):
        for variant in variants if step % 2 else variants[::-1]:
            pipes[variant.name].send(step)
            seconds, loss, norm = pipes[variant.name].recv()
            if step < COMPARED:
                variant.losses.append(loss)
                variant.norms.append(norm)
            else:
                variant.seconds.append(seconds)
        if step == COMPARED - 1 and _disagreement(variants):
            return variants
    for variant in variants:
        pipes[variant.name].send(None)
        variant.peak_bytes = pipes[variant.name].recv()
    for process in processes:
        process.join()
    return variants


def _disagreement(variants: Sequence[Variant]) -> str | None:
    """What is wrong when a variant does not compute what ours computes."""
    ours = variants[0]
    for peer in variants[1:]:
        for quantity, expected, got in (("loss", peer.losses, ours.losses), ("norm", peer.norms, ours.norms)):
            for step, (a, b) in enumerate(zip(expected, got, strict=True)):
                if not abs(a - b) <= TOLERANCE * abs(a):
                    return f"step {step}: the {quantity} is {b!r} here and {a!r} in {peer.name}"
    return None


def _serve(name: str, config: Config, pipe: Connection) -> None:
    """Take the steps that the parent asks for; at the end tell the peak memory."""
    before = _peak_bytes()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = Mesh.build(Layout(), torch.device("cpu"))
    assert mesh is not None
    job = build(config, mesh)
    step = _ours(job) if name == OURS else _peer(job, PEERS[name])
    del job
    while (number := pipe.recv()) is not None:
        batch = _batch(config, number)
        start = time.perf_counter()
        loss, norm = step(batch, number)
        pipe.send((time.perf_counter() - start, loss, norm))
    pipe.send(_peak_bytes() - before)
    dist.destroy_process_group()


def _peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _batch(config: Config, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    size = (config.batch.global_, config.model.sequence_length + 1)
    return torch.randint(config.model.vocab_size, size, generator=generator).unflatten(0, (-1, config.batch.micro))


def _ours(job: Job) -> Step:
    def step(batch: Tensor, number: int) -> tuple[float, float]:
        loss, norm = train_step(job, batch, number)
        return mean_loss(job, loss), norm.item()

    return step


def _peer(job: Job, arguments: dict[str, Any]) -> Step:
    """Hugging Face's Llama, which takes over the memory of our initial weights, with the same optimizer groups."""
    config = job.config
    model = LlamaForCausalLM(_peer_config(config.model))
    weights = {_peer_name(name): _plain(param) for name, param in job.stage.named_parameters()}
    if config.model.tie_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.train()
    optim = config.optim
    matrices = {"params": [param for param in model.parameters() if param.ndim > 1], "weight_decay": optim.weight_decay}
    vectors = {"params": [param for param in model.parameters() if param.ndim == 1], "weight_decay": 0.0}
    betas = (optim.betas[0], optim.betas[1])
    optimizer = torch.optim.AdamW([matrices, vectors], lr=optim.lr, betas=betas, eps=optim.eps, **arguments)

    def step(batch: Tensor, number: int) -> tuple[float, float]:
        total = 0.0
        for micro in batch:
            targets = micro[:, 1:].contiguous()
            loss = model(micro[:, :-1].contiguous(), labels=targets, shift_labels=targets).loss / len(batch)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return total, norm.item()

    return step


def _plain(param: Tensor) -> Tensor:
    assert isinstance(param, DTensor)
    return param.to_local().detach()


def _peer_config(model: Model) -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=model.layers,
        hidden_size=model.width,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_size,
        intermediate_size=model.ffn,
        vocab_size=model.vocab_size,
        max_position_embeddings=model.sequence_length,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        rms_norm_eps=model.norm_eps,
        tie_word_embeddings=model.tie_embeddings,
        attn_implementation="sdpa",
        use_cache=False,
    )


def _peer_name(name: str) -> str:
    """`layers.0.attention.q.weight` → `model.layers.0.self_attn.q_proj.weight`."""
    for ours in ("head.norm", "head.output"):
        if name.startswith(ours):
            return name.replace(ours, OF_PEER[ours])
    return ".".join(OF_PEER.get(part, part) for part in name.split("."))


def _report(config: Config, variants: Sequence[Variant], command: Sequence[str]) -> dict[str, Any]:
    ours = variants[0]
    tokens = config.batch.global_ * config.model.sequence_length
    rows = []
    for variant in variants:
        median = statistics.median(variant.seconds)
        rounds = [a / b for a, b in zip(ours.seconds, variant.seconds, strict=True)]
        rows.append(
            asdict(variant)
            | {
                "median_seconds": median,
                "fastest_seconds": min(variant.seconds),
                "tokens_per_second": tokens / median,
                "time_ratio": statistics.median(rounds),  # ours / this
                "memory_ratio": ours.peak_bytes / max(1, variant.peak_bytes),
            }
        )
    return {
        "command": " ".join(command),
        "model": asdict(config.model),
        "batch": {"micro": config.batch.micro, "global": config.batch.global_},
        "optim": asdict(config.optim),
        "tolerance": TOLERANCE,
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "versions": {"python": platform.python_version()}
        | {package: version(package) for package in ("megalite", "torch", "transformers")},
        "variants": rows,
    }


def _cpu() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _show(report: dict[str, Any], console: Console) -> None:
    model, machine = report["model"], report["machine"]
    shape = f"{model['layers']} layers of {model['width']}, vocabulary {model['vocab_size']:,}"
    batch = f"{report['batch']['global']} × {model['sequence_length']} tokens"
    title = f"One training step, fp32: {shape}; {batch}; {machine['cpu']}, {machine['threads']} threads"
    table = Table(title=title, title_justify="left", caption="ratios: megalite / this row", caption_justify="left")
    table.add_column("implementation")
    for column in (
        "median s",
        "fastest s",
        "tokens/s",
        "time ratio",
        "peak MiB",
        "memory ratio",
        "loss, last compared",
    ):
        table.add_column(column, justify="right")
    for row in report["variants"]:
        table.add_row(
            row["name"],
            f"{row['median_seconds']:.3f}",
            f"{row['fastest_seconds']:.3f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['time_ratio']:.3f}",
            f"{row['peak_bytes'] / 2**20:,.0f}",
            f"{row['memory_ratio']:.3f}",
            f"{row['losses'][-1]:.6f}",
        )
    console.print(table)


def _write(path: Path, report: dict[str, Any]) -> None:
    """All of the report or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".partial")
    with temporary.open("w") as file:
        json.dump(report, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
