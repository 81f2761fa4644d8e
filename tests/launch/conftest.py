import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megalite.data.store_writer import StoreWriter

CONFIG = """
run: {device: cpu}
model: {layers: 2, width: 32, heads: 2, kv_heads: 2, ffn: 64, vocab_size: 128, sequence_length: 16}
parallel: {pp: 2, tp: 2}
batch: {micro: 1, global: 4}
train: {steps: 4, precision: fp32, timeout: 60}
data: {train: [{path: tokens}]}
log: {tensorboard: false}
"""


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A folder with a configuration of four ranks and its data, and what to run commands in it."""
    folder = tmp_path_factory.mktemp("launch")
    (folder / "config.yaml").write_text(CONFIG)
    with StoreWriter(folder / "tokens", np.uint16) as store:
        store.add(np.random.default_rng(0).integers(0, 128, 4000))
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",  # the order of sums may depend on it
    }

    def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {**environment, **variables}
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)

    def losses(name: str) -> list[float]:
        records = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").open()]
        return [record["loss"] for record in records if "loss" in record]

    return SimpleNamespace(folder=folder, environment=environment, run=run, losses=losses)


@pytest.fixture(scope="session")
def expected(work: SimpleNamespace) -> list[float]:
    """The losses under megalite's own launcher."""
    done = work.run("megalite", "train", "config.yaml", "run.name=local")
    assert done.returncode == 0, done.stderr
    return work.losses("local")
