"""The example of a loop of one's own trains, and does so alike in every layout."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "docs/library_example.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")


def loss_of(*command: str) -> float:
    call = [sys.executable, *command, "train.steps=60"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()
    assert last.startswith("loss on new numbers ")
    return float(last.split()[-1])


def test_it_learns_to_count_and_as_well_in_another_layout() -> None:
    alone = loss_of(str(EXAMPLE))
    assert alone < 0.5
    assert loss_of(*TORCHRUN, str(EXAMPLE), "parallel.tp=2", "parallel.pp=2") == alone


def test_it_trains_with_muon_on_several_ranks() -> None:
    assert loss_of(*TORCHRUN, str(EXAMPLE), "parallel.tp=2", "optim.name=muon") < 0.5


def test_it_is_as_short_as_the_docs_say() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60
