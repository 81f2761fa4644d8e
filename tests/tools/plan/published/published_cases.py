"""Llama 3 8B as published runs describe it, and a file with one such run, for tests to change."""

import csv
from pathlib import Path

from megalite_tools.plan.published.rows import COLUMNS, EXPERT_COLUMNS
from megalite_tools.plan.published.work import Work

LLAMA3_8B = Work(layers=32, width=4096, heads=32, kv_heads=8, head_size=128, ffn=14336, vocab=128256, sequence=8192)


MIXTURE = {"model": "8x7B", "experts": "8", "top_k": "2", "expert_ffn": "14336", "ep": "4", "routing": "balanced"}


def write(folder: Path, **fields: str) -> Path:
    columns = [*COLUMNS, *(column for column in EXPERT_COLUMNS if column in fields)]
    plain = dict.fromkeys(columns, "") | {
        "source": "a program",
        "program": "other",
        "model": "llama",
        "experts": "0",
        "gated": "yes",
        "tied": "no",
        "layers": "32",
        "hidden": "4096",
        "heads": "32",
        "kv_heads": "8",
        "ffn": "14336",
        "vocab": "128256",
        "seq": "8192",
        "gpu": "h100_sxm",
        "n_gpus": "64",
        "tp": "2",
        "pp": "2",
        "sharding": "zero3",
        "micro_batch": "1",
        "global_batch": "64",
        "recompute": "none",
        "precision": "bf16",
        "tps_per_gpu": "6000",
        "status": "ok",
    }
    path = folder / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerow(plain | fields)
    return path
