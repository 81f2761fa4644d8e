"""Sinks, biases, and the clamped gate train in every layout as in one process; so do experts without tokens."""

from dataclasses import replace

import pytest
from ranks import Ranks
from toy_jobs import advance, make, one_rank, parts

from megalite.commands.verify import compare
from megalite.config.layout import Layout
from megalite.config.model_schema import Attention, Experts, Model
from megalite.config.parallel_schema import Context, DataParallel, Parallel, Pipeline
from megalite.config.rules.validate import validate
from megalite.config.schema import Batch, Config, Data, Optim, Train

KINDS = {"few": Experts(8, 2, 7, gate="clamped", biases=True), "many": Experts(64, 2, 5, gate="clamped", biases=True)}
CASES = [  # ranks along ep, layout, data mode, schedule, context method, documents, experts, recompute, optimizer
    (1, Layout(dp_shard=2), "ddp", "1f1b", "ring", True, "many", "none", "adamw"),
    (2, Layout(tp=2), "zero1", "1f1b", "ring", False, "few", "none", "adamw"),
    (2, Layout(dp_shard=2, cp=2), "zero3", "1f1b", "ring", True, "many", "full", "muon"),
    (4, Layout(cp=2, tp=2), "zero1", "1f1b", "ulysses", False, "few", "selective", "adamw"),
    (4, Layout(dp_shard=2, cp=2, tp=2), "zero3", "1f1b", "all_gather", False, "many", "none", "adamw"),
    (2, Layout(pp=2, dp_shard=2, tp=2), "zero1", "zbv", "ring", True, "few", "none", "muon"),
    (4, Layout(pp=2, dp_shard=4), "zero3", "zbv", "ring", False, "many", "full", "adamw"),
]


def configuration(
    ep: int,
    layout: Layout,
    mode: str,
    schedule: str,
    method: str,
    documents: bool,
    kind: str,
    recompute: str,
    optimizer: str,
) -> Config:
    attention = Attention(window=5, full_every=2, sinks=True)
    return Config(
        model=Model(
            2 if layout.pp == 1 else 4, 12, 4, 2, 6, 20, 40, 16, qkv_bias=True, out_bias=True, attention=attention,
            experts=KINDS[kind], init_std=0.2,
        ),
        parallel=Parallel(*layout.shape, ep, Pipeline(schedule), Context(method), DataParallel(mode)),
        batch=Batch(1, layout.dp * (2 if layout.pp == 1 else 4)),
        train=Train(3, "fp64", recompute=recompute),
        optim=Optim(optimizer, lr=0.01, weight_decay=0.3, clip_norm=0.01),
        data=Data(mask_documents=documents, end_of_document=3),
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(map(str, case)))
def test_training_is_that_of_one_process(case: tuple, ranks: Ranks) -> None:
    config = configuration(*case)
    assert validate(config, config.parallel.layout.world_size) == []
    told = ranks.run(compare, config, 2, 1e-11)  # losses and norms must then agree to 1e-13, gradients to 1e-12
    assert [difference for difference in told[0] if not difference.passed] == []


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_one_rank_with_copies_trains_as_with_fsdp2_to_the_last_bit(precision: str, recompute: str) -> None:
    config = configuration(1, Layout(), "zero1", "1f1b", "ring", True, "many", recompute, "adamw")
    config = replace(config, train=replace(config.train, precision=precision))
    found = []
    with one_rank():
        for mode in ("zero1", "zero3"):
            job = make(replace(config, parallel=Parallel(dp_shard=1, data=DataParallel(mode))))
            found.append((advance(job, 0, 3), parts(job)))
    (losses, ours), (their_losses, theirs) = found
    assert losses == their_losses
    assert all(part.values.equal(theirs[name].values) for name, part in ours.items())
    assert all(ours[name].values.any() for name in ours if name.endswith(("bias", "sinks")))  # they are trained
