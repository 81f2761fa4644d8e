"""Layers with experts train in every layout as in one process: outputs, both losses, and experts without tokens."""

from dataclasses import replace

import pytest
import torch
from ranks import Ranks
from toy_jobs import Parts, advance, make, one_rank, parts

from megalite.commands.verify import compare, random_batch
from megalite.config.layout import Layout
from megalite.config.model_schema import Experts, Model
from megalite.config.parallel_schema import DataParallel, Parallel, Pipeline
from megalite.config.rules.validate import validate
from megalite.config.schema import Batch, Config, Optim, Train
from megalite.train.step import gradients, update

MODES = {  # pure, or replicas of shards
    "ddp": ("ddp", Layout(dp_shard=2)),
    "zero1": ("zero1", Layout(dp_shard=2)),
    "zero2": ("zero2", Layout(dp_shard=2)),
    "zero3": ("zero3", Layout(dp_shard=2)),
    "hybrid": ("zero3", Layout(dp_replicate=2, dp_shard=2)),
}
SCHEDULES = {"": 1, "1f1b": 2, "zbv": 2, "dualpipev": 2}
GATED = {"shared_width": 6, "shared_gate": True}
KINDS = {
    "softmax": Experts(5, 2, 7, first_dense=1, balance_loss=0.1, z_loss=0.01),
    "sigmoid": Experts(6, 3, 9, scores="sigmoid", every=2, scale=1.5, balance_loss=0.2, shared_width=10),
    "groups": Experts(
        6, 3, 9, first_dense=1, scores="sigmoid", groups=3, active_groups=2, correction_rate=0.05, **GATED
    ),
    "many": Experts(64, 2, 5, normalize=False, balance_loss=0.1, z_loss=0.02),  # most have no token of a micro-batch
}


def configuration(mode: str, cp: int, schedule: str, kind: str, recompute: str, optimizer: str) -> Config:
    how, layout = MODES[mode]
    layout = replace(layout, pp=SCHEDULES[schedule], cp=cp)
    pipeline = Pipeline(schedule or "1f1b")
    return Config(
        model=Model(2 if layout.pp == 1 else 4, 12, 2, 2, None, 20, 40, 16, experts=KINDS[kind], init_std=0.2),
        parallel=Parallel(*layout.shape, pipeline=pipeline, data=DataParallel(how)),
        batch=Batch(1, layout.dp * (2 if layout.pp == 1 else 4)),
        train=Train(3, "fp64", recompute=recompute),
        optim=Optim(optimizer, lr=0.01, weight_decay=0.3, clip_norm=0.01),
    )


CASES = [  # each mode with and without context parallelism, every schedule with every way to recompute
    ("ddp", 2, "", "groups", "none", "adamw"),
    ("ddp", 1, "zbv", "many", "full", "muon"),
    ("zero1", 1, "1f1b", "sigmoid", "none", "adamw"),
    ("zero1", 2, "dualpipev", "softmax", "selective", "muon"),
    ("zero2", 1, "dualpipev", "many", "full", "adamw"),
    ("zero2", 2, "zbv", "groups", "selective", "muon"),
    ("zero3", 1, "", "sigmoid", "full", "muon"),
    ("zero3", 2, "1f1b", "many", "selective", "adamw"),
    ("zero3", 2, "zbv", "sigmoid", "selective", "adamw"),
    ("hybrid", 2, "", "many", "selective", "muon"),
    ("hybrid", 1, "1f1b", "groups", "full", "adamw"),
    ("hybrid", 1, "dualpipev", "sigmoid", "none", "muon"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(map(str, case)))
def test_training_is_that_of_one_process(case: tuple, ranks: Ranks) -> None:
    config = configuration(*case)
    assert validate(config, config.parallel.layout.world_size) == []
    told = ranks.run(compare, config, 2, 1e-11)  # losses and norms must then agree to 1e-13, gradients to 1e-12
    assert [difference for difference in told[0] if not difference.passed] == []


def losses_and_weights(config: Config) -> tuple[list[float], Parts]:
    job = make(config)
    return advance(job, 0, 3), parts(job)


@pytest.mark.parametrize("case", [("bf16", "none"), ("bf16", "selective"), ("bf16", "full"), ("fp32", "full")], ids=str)
def test_one_rank_with_copies_trains_as_with_fsdp2_to_the_last_bit(case: tuple[str, str]) -> None:
    precision, recompute = case
    config = configuration("zero1", 1, "", "many", recompute, "adamw")
    config = replace(config, train=replace(config.train, precision=precision), batch=Batch(1, 3))
    with one_rank():
        modes = [DataParallel(mode) for mode in ("zero1", "zero3")]
        ours, theirs = (losses_and_weights(replace(config, parallel=Parallel(dp_shard=1, data=mode))) for mode in modes)
    assert ours[0] == theirs[0]
    assert all(part.values.equal(theirs[1][name].values) for name, part in ours[1].items())


@pytest.mark.parametrize("kind", KINDS)
def test_losses_depend_on_no_micro_batches(kind: str) -> None:
    """Gradients of one micro-batch are those of four, with both losses."""
    config = configuration("ddp", 1, "", kind, "none", "adamw")
    with one_rank():
        each = []
        for micro in (4, 2, 1):
            job = make(replace(config, parallel=Parallel(dp_shard=1), batch=Batch(micro, 4)))
            gradients(job, random_batch(job, 0))
            each.append({name: param.grad.to_local() for name, param in job.named_parameters()})
    for found in each[1:]:
        torch.testing.assert_close(found, each[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_experts_without_tokens_only_decay(optimizer: str) -> None:
    config = configuration("ddp", 1, "", "many", "none", optimizer)
    with one_rank():
        job = make(replace(config, parallel=Parallel(dp_shard=1), batch=Batch(1, 1)))
        gate = next(param for name, param in job.named_parameters() if "experts.gate" in name)
        before = gate.to_local().detach().clone()
        loss = gradients(job, random_batch(job, 0))
        idle = ~gate.grad.to_local().flatten(1).any(1)
        assert 20 < idle.sum() < 64
        update(job, loss, 0)
        states = [each.to_local() for name, each in job.optimizer.states_of(gate).items() if name != "step"]
        (rate,) = {group["lr"] for group in job.optimizer.param_groups}
        left = before * (1 - rate * config.optim.weight_decay)
        torch.testing.assert_close(gate.to_local()[idle], left[idle], rtol=1e-14, atol=0)
        assert not any(state[idle].any() for state in states)
        assert all(state[~idle].any() for state in states)
        assert (gate.to_local() - left)[~idle].abs().amax((1, 2)).min() > 0
