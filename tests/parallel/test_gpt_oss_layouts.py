"""Sinks, biases, and the clamped gate train in every layout as in one process; so do experts without tokens."""

import pytest
from ranks import Ranks

from megalite.commands.verify import compare
from megalite.config.layout import Layout
from megalite.config.rules.validate import validate
from megalite.config.schema import (
    Attention,
    Batch,
    Config,
    Context,
    Data,
    DataParallel,
    Experts,
    Model,
    Optim,
    Parallel,
    Pipeline,
    Train,
)

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


@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(map(str, case)))
def test_training_is_that_of_one_process(case: tuple, ranks: Ranks) -> None:
    ep, layout, mode, schedule, method, documents, kind, recompute, optimizer = case
    attention = Attention(window=5, full_every=2, sinks=True)
    config = Config(
        model=Model(
            4, 12, 4, 2, 6, 20, 40, 16, qkv_bias=True, out_bias=True, attention=attention, experts=KINDS[kind],
            init_std=0.2,
        ),
        parallel=Parallel(*layout.shape, ep, Pipeline(schedule), Context(method), DataParallel(mode)),
        batch=Batch(1, layout.dp * (3 if layout.pp == 1 else 4)),
        train=Train(3, "fp64", recompute=recompute),
        optim=Optim(optimizer, lr=0.01, weight_decay=0.3, clip_norm=0.01),
        data=Data(mask_documents=documents, end_of_document=3),
    )  # fmt: skip
    assert validate(config, layout.world_size) == []
    told = ranks.run(compare, config, 3, 1e-11)  # losses and norms must then agree to 1e-13, gradients to 1e-12
    assert [difference for difference in told[0] if not difference.passed] == []
