"""Experiments with known truths: folders as `megalite-sweep collect` leaves them, without any training."""

import csv
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from megalite.config.load import dump
from megalite.config.model_schema import Model
from megalite.config.schema import Config
from megalite.experiment.folder import NUMBERS
from megalite.plan.model.size import flops_per_token, model_parameters
from megalite.scaling.law import Law
from megalite.scaling.table import TEXTS

TRUTH = Law(1.8172, 482.01, 2085.43, 0.3478, 0.3658)  # of Besiroglu et al. 2024, arXiv 2404.10102
SMALL = Law(0.9, 30.0, 4500.0, 0.44, 0.62)  # of small models on little text
SEQUENCE = 256


def model(width: int, layers: int, vocab: int = 4096) -> Model:
    heads = max(width // 32, 1)
    return Model(layers, width, heads, heads, ffn=3 * width, vocab_size=vocab, sequence_length=SEQUENCE)


def counts(of: Model) -> dict[str, int]:
    """N by its three definitions."""
    found = model_parameters(of)
    layers = found.attention + found.mlp + found.norms
    return {"n_total": found.total, "n_with_head": layers + found.head, "n_non_embedding": layers}


def row(name: str, kind: str, axes: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    digest = hashlib.sha256(json.dumps([name, dict(axes), values], default=str).encode()).hexdigest()[:10]
    return {
        "id": digest,
        "slug": name,
        "kind": kind,
        "status": "done",
        "seed": 0,
        "commit": "0123abc",
        **axes,
        **values,
    }


def write(folder: Path, settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Path:
    """An experiment's folder. YAML is a superset of JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "experiment.yaml").write_text(json.dumps(settings))
    own = [name for name in dict.fromkeys(key for each in rows for key in each) if name not in (*TEXTS, *NUMBERS)]
    with (folder / "results.csv").open("w", newline="") as file:
        out = csv.DictWriter(file, [*TEXTS[:4], *own, *NUMBERS, *TEXTS[4:]], restval="")
        out.writeheader()
        out.writerows({key: value for key, value in each.items() if key != "curve"} for each in rows)
    return folder


def ladder(
    folder: Path,
    shapes: Sequence[tuple[int, int]] = ((64, 2), (96, 3), (128, 4), (192, 5), (256, 6)),
    ratios: Sequence[float] = (5, 10, 20, 40),
    noise: float = 0.003,
    *,
    law: Law = SMALL,
    holdout: Sequence[str] = (),
    flops: Sequence[float] = (),
    fit: Mapping[str, Any] | None = None,
    folders: bool = False,
    seed: int = 0,
    tasks: bool = False,
    report: Sequence[str] = ("with_head",),
) -> Path:
    """Sizes × tokens per parameter, or sizes × budgets with `flops`. folders: with the runs' own, too."""
    generator, rows = np.random.default_rng(seed), []
    for width, layers in shapes:
        of = model(width, layers)
        numbers = counts(of)
        size = numbers["n_with_head"]
        budgets = [value / 6 / size for value in flops] or [ratio * size for ratio in ratios]
        for number, tokens in enumerate(budgets):
            batch = 16
            steps = max(round(tokens / batch / SEQUENCE), 1)
            loss = float(law.loss(size, tokens) * np.exp(noise * generator.standard_normal()))
            measured = {"eval/toy/acc": 0.25 + 0.7 / (1 + np.exp(6 * (loss - 1.1)))} if tasks else {}
            rows.append(
                row(
                    f"w{width}-{'c' if flops else 'r'}{number}",
                    "ladder",
                    {},
                    rung=f"w{width}",
                    **numbers,
                    tokens=tokens,
                    flops_full=flops_per_token(of, "full") * tokens,
                    flops_causal=flops_per_token(of) * tokens,
                    steps=steps,
                    sequence_length=SEQUENCE,
                    batch_global=batch,
                    gpus=1,
                    loss_train=loss * 0.99,
                    loss_valid=loss,
                    **measured,
                )
            )
            if folders:
                run_folder(folder, rows[-1], of, lambda at, s=size: float(law.loss(s, at)))
    settings = {"fit": dict(fit or {}), "holdout": {"rungs": list(holdout)}, "parameters": {"report": list(report)}}
    return write(folder, {"experiment": {"kind": "ladder", "name": "synthetic"}, **settings}, rows)


def sweep(
    folder: Path,
    rates: Iterable[float] = tuple(2.0**power for power in np.arange(-12, -5.9, 1)),
    batches: Iterable[int] = (16, 32, 64),
    widths: Iterable[int] = (64, 128, 256),
    noise: float = 0.0,
    seed: int = 0,
    parametrizations: Iterable[str] = (),
) -> Path:
    """Rates × batches × widths. The best rate is .004 (width / 64)^-1 (batch / 32)^.5; the best batch is 32.

    parametrizations: an axis of its own, with heads zipped to widths. Under `mup` the best rate has no width in it.
    """
    generator, rows = np.random.default_rng(seed), []
    for name, width in product(tuple(parametrizations) or ("",), widths):
        of = model(width, 3)
        numbers = counts(of)
        for batch in batches:
            for rate in rates:
                best = 0.004 * (1 if name == "mup" else 64 / width) * (batch / 32) ** 0.5
                loss = 1.5 + 20 / np.sqrt(numbers["n_with_head"])
                loss = loss * np.exp(0.01 * np.log(rate / best) ** 2 + 0.02 * np.log(batch / 32) ** 2)
                loss *= np.exp(noise * generator.standard_normal())
                zipped = {"model.parametrization": name, "model.width": width, "model.heads": width // 32}
                axes = (zipped if name else {"model.width": width}) | {"batch.global": batch, "optim.lr": float(rate)}
                diverged = np.log(rate / best) > 2.5
                rows.append(
                    row(
                        f"{name}w{width}-b{batch}-lr{rate:.2g}",
                        "sweep",
                        axes,
                        **numbers,
                        tokens=10e6,
                        flops_full=flops_per_token(of, "full") * 10e6,
                        flops_causal=flops_per_token(of) * 10e6,
                        steps=round(10e6 / batch / SEQUENCE),
                        sequence_length=SEQUENCE,
                        batch_global=batch,
                        gpus=1,
                        **({"status": "diverged"} if diverged else {"loss_train": loss, "loss_valid": loss}),
                    )
                )
    return write(folder, {"experiment": {"kind": "sweep", "name": "rates"}}, rows)


def systems(folder: Path, counts_of_gpus: Iterable[int] = (8, 16, 32, 64), scaling: str = "weak") -> Path:
    """Two layouts on several numbers of GPUs; one runs out of memory on few."""
    rows, of = [], model(1024, 24, 32000)
    numbers = counts(of)
    for tp, pp in ((1, 1), (2, 1), (2, 4)):
        for gpus in counts_of_gpus:
            speed = 12000 * gpus**-0.04 / (1 + 0.1 * (tp - 1) + 0.05 * (pp - 1))
            memory = 95 * 2**30 / tp / pp / gpus**0.2
            batch = 256 * gpus // 8 if scaling == "weak" else 256
            oom = memory > 60 * 2**30
            measured = {
                "tokens_per_second_per_gpu": speed,
                "tokens_per_second_per_gpu_low": speed * 0.97,
                "tokens_per_second_per_gpu_high": speed * 1.02,
                "mfu_full": speed * flops_per_token(of, "full") / 989e12,
                "mfu_causal": speed * flops_per_token(of) / 989e12,
                "peak_memory_bytes": round(memory),
            }
            rows.append(
                row(
                    f"tp{tp}-pp{pp}-g{gpus}",
                    "systems",
                    {"parallel.tp": tp, "parallel.pp": pp},
                    **numbers,
                    gpus=gpus,
                    steps=20,
                    batch_global=batch,
                    sequence_length=SEQUENCE,
                    **({"status": "oom"} if oom else measured),
                )
            )
    return write(folder, {"experiment": {"kind": "systems", "name": "weak-1b"}, "scaling": scaling}, rows)


def run_folder(folder: Path, of_row: Mapping[str, Any], of: Model, loss: Any) -> None:
    """The metrics and the configuration that a run would leave."""
    path = folder / "runs" / f"{of_row['slug']}-{of_row['id']}"
    path.mkdir(parents=True, exist_ok=True)
    base = Config()
    config = replace(
        base,
        model=of,
        batch=replace(base.batch, global_=int(of_row["batch_global"]), micro=1),
        train=replace(base.train, steps=int(of_row["steps"])),
    )
    (path / "config.yaml").write_text(dump(config))
    steps = np.unique(np.linspace(1, of_row["steps"], 60).astype(int))
    per = of_row["batch_global"] * SEQUENCE
    lines = [
        {"step": int(at), "time": 1.0, "tokens": int(at * per), "loss": loss(at * per) * 1.02, "learning_rate": 1e-3}
        for at in steps
    ]
    lines.append({"step": int(steps[-1]), "time": 2.0, "valid_loss": of_row["loss_valid"]})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
