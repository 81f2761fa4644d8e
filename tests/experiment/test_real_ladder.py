"""Three sizes times three budgets, really trained on the text of Python's library: the whole way to a law."""

import csv
import json
import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import yaml
from warm_program import warm_program
from warm_start import run

from megalite.data.store_writer import StoreWriter

BASE = {
    "run": {"device": "cpu"},
    "model": {
        "vocab_size": 256,
        "sequence_length": 128,
        "layers": 2,
        "heads": 2,
        "kv_heads": 2,
        "init_std": 0.1,
        "parametrization": "mup",  # else a rate that is best for one width is far from it for another
        "base": {"width": 32},
    },
    "batch": {"micro": 16, "global": 16},
    "train": {"precision": "fp32"},
    "optim": {"lr": 0.01, "weight_decay": 0.0},
    "schedule": {"warmup": 20, "floor": 0.0},
    "data": {"train": [{"path": "data/train"}], "valid": [{"path": "data/valid"}]},
    "eval": {"steps": 8},
    "log": {"interval": 20, "tensorboard": False},
}
LADDER = {
    "experiment": {"name": "ladder", "kind": "ladder", "base": "base.yaml"},
    "rungs": {
        "w32": {"model": {"width": 32, "ffn": 96}},
        "w56": {"model": {"width": 56, "ffn": 144}},
        "w96": {"model": {"width": 96, "heads": 3, "kv_heads": 3, "ffn": 256}},
    },
    "tokens": [1.0e5, 2.0e5, 4.0e5],
    "trunk": {"decay": 0.2},
    "fit": {"method": "approach3", "delta": 1.0e-2, "bootstrap": 50},
    "launch": {"parallel": 2},
}


def write_text(folder: Path) -> None:
    """Bytes of Python's own library as tokens; every twentieth file is for validation."""
    library = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests"}
    files = [path for path in sorted(library.rglob("*.py")) if not left_out & set(path.parts) and path.stat().st_size]
    folder.mkdir()
    for name, wanted in (("train", False), ("valid", True)):
        with StoreWriter(folder / name, np.uint16) as store:
            for number, path in enumerate(files):
                if (number % 20 == 0) == wanted:
                    store.add(np.frombuffer(path.read_bytes(), np.uint8))


@pytest.mark.timeout(1500)  # a machine may be busy: two minutes of two cores
def test_a_ladder_of_three_sizes_and_three_budgets(tmp_path: Path) -> None:
    write_text(tmp_path / "data")
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))
    (tmp_path / "ladder.yaml").write_text(yaml.safe_dump(LADDER))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with warm_program(tmp_path, "-m", "megalite") as megalite:
        for way, *options in (("launch", "--megalite", str(megalite)), ("fit",)):
            command = ["-m", "megalite_tools.experiment.sweep", way, "ladder.yaml", *options]
            done = run(command, 1400, cwd=tmp_path, env=environment)
            assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "experiments/ladder/results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["done"] * 9
    losses = np.array([float(row["loss_valid"]) for row in rows]).reshape(3, 3)
    assert (np.diff(losses, axis=1) < 0).all(), losses  # more tokens are better
    assert (np.diff(losses, axis=0) < 0).all(), losses  # and so are more parameters
    fit = json.loads((tmp_path / "experiments/ladder/fit.json").read_text())
    assert fit["fits"]["with_head"]["approach3"]["r2"] >= 0.99, fit
