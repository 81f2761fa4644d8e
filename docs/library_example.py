"""megalite as a library: a loop and data of one's own. The model learns to count in steps of 1 to 4.

python docs/library_example.py
torchrun --nproc-per-node 4 docs/library_example.py parallel.tp=2 parallel.pp=2
"""

import sys

import torch

from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.data.loader import Micros
from megalite.distributed.start.ranks import find_rank_info
from megalite.distributed.start.start import start, start_alone
from megalite.plan.resolved import resolve
from megalite.train.build import Job, build, build_mesh
from megalite.train.step import evaluate, train_step

DEFAULTS = [
    *("model.layers=2", "model.width=64", "model.ffn=128", "model.vocab_size=32", "model.sequence_length=16"),
    *("batch.micro=8", "batch.global=32", "optim.lr=0.005", "schedule.warmup=10", "train.precision=fp32"),
    *("train.steps=120", "run.device=cpu"),
]


def batch(job: Job, seed: int) -> Micros:
    """This rank's share `[m, b, s + 1]` of a global batch, which does not grow; `batch.micro` must be a number."""
    model, samples = job.config.model, job.config.batch.global_
    random = torch.Generator().manual_seed(seed)
    first = torch.randint(model.vocab_size, (samples, 1), generator=random)
    steps = torch.randint(1, 5, (samples, 1), generator=random)
    tokens = (first + steps * torch.arange(model.sequence_length + 1)) % model.vocab_size
    mine = tokens.chunk(job.mesh.layout.dp)[job.mesh.dp_rank]
    return Micros.cut_at(mine.unflatten(0, (-1, job.config.batch.micro_size)), None)


def main(overrides: list[str]) -> float:
    """Train, and return the loss per token on numbers that were not seen."""
    here = find_rank_info()
    config = check(load([], [*DEFAULTS, *overrides]), here.world_size if here else 1)
    device = start(here, config.run.device, timeout=60) if here else start_alone()
    mesh = build_mesh(config, device)
    assert mesh is not None, "`check` has compared the layout with the number of ranks"
    job = build(resolve(config), mesh)
    for step in range(config.train.steps):
        signs = train_step(job, batch(job, seed=step), step)
        if mesh.rank == 0 and step % 20 == 0:
            reading = signs.read()
            print(f"step {step:3d}  loss {reading.loss:.3f}  gradient norm {reading.norm:.3f}")
    return evaluate(job, [batch(job, seed=1_000_000)])


if __name__ == "__main__":
    loss = main(sys.argv[1:])
    if torch.distributed.get_rank() == 0:
        print(f"loss on new numbers {loss:.3f}")
    torch.distributed.destroy_process_group()
