"""A folder in which `megalite train toy.yaml` begins a run without an end, and programs that start ranks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megalite.data.store_writer import StoreWriter

TOY: dict[str, dict[str, Any]] = {
    "run": {"dir": "runs", "device": "cpu"},
    "model": {
        "layers": 2,
        "width": 16,
        "heads": 2,
        "kv_heads": 2,
        "ffn": 24,
        "vocab_size": 16,
        "sequence_length": 16,
    },
    "batch": {"micro": 2, "global": 8},
    "train": {"steps": 1_000_000, "precision": "fp32", "timeout": 60},
    "data": {"train": [{"path": "data/train"}]},
    "log": {"tensorboard": False},
}


def make_toy(folder: Path, **changes: Mapping[str, Any]) -> None:
    """Write `toy.yaml` and data that repeats itself. changes: by section, keys in place of, or beside, those of TOY."""
    with StoreWriter(folder / "data/train", "<u2") as writer:
        writer.add(np.arange(2000) * 3 % 16)
    config = {name: {**TOY.get(name, {}), **changes.get(name, {})} for name in {**TOY, **changes}}
    (folder / "toy.yaml").write_text(yaml.safe_dump(config))


def launching(module: str, ranks: int, shared: str | None = "megalite.train.worker") -> str:
    """A program that starts a module on some ranks of this machine, with its own arguments.

    shared: what the ranks, forks of that program, import once for all; None has each of them start and import on its
    own, which takes that much longer.
    """
    return f"""
import sys
from pathlib import Path
from megalite.distributed.start.local import launch
sys.exit(launch({module!r}, sys.argv[1:], {ranks}, Path(), {shared!r}))
"""
