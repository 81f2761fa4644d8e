"""Latent attention trains in every layout as in one process."""

from dataclasses import replace

import pytest
from ranks import Ranks

from megalite.commands.verify import compare
from megalite.config.layout import Layout
from megalite.config.model_schema import Attention, Latent, Model, RopeScaling
from megalite.config.parallel_schema import Context, DataParallel, Parallel, Pipeline
from megalite.config.rules.validate import validate
from megalite.config.schema import Batch, Config, Data, Optim, Train

MODEL = Model(
    layers=4,
    width=12,
    heads=4,
    kv_heads=4,
    head_width=10,
    rotary_width=4,
    ffn=20,
    vocab_size=40,
    sequence_length=16,
    rope_scaling=RopeScaling("yarn", 4.0, original_length=4, mscale=1.0, mscale_all_dim=0.7),
    init_std=0.2,
)
BOTH, KEYS = Latent(query_rank=7, key_rank=5, value_width=6), Latent(query_rank=None, key_rank=5, value_width=6)
CASES = {  # name -> layout, schedule, mode, method, latent, recompute, optimizer, and more of attention
    "tp 2": (Layout(tp=2), "1f1b", "zero1", "ring", BOTH, "none", "adamw", {}),
    "tp 4, zero3": (Layout(tp=4, dp_shard=2), "1f1b", "zero3", "ring", KEYS, "full", "muon", {}),
    "tp 2, pp 2, zbv": (Layout(pp=2, tp=2), "zbv", "zero1", "ring", BOTH, "selective", "muon", {}),
    "ring": (Layout(cp=2, tp=2), "1f1b", "zero1", "ring", KEYS, "none", "muon", {"nope_every": 2}),
    "ring, window": (Layout(cp=4), "1f1b", "zero3", "ring", BOTH, "full", "adamw", {"window": 5, "full_every": 2}),
    "all_gather, capped": (
        Layout(cp=2, dp_shard=2),
        "1f1b",
        "zero2",
        "all_gather",
        BOTH,
        "none",
        "adamw",
        {"softcap": 0.5},
    ),
    "ulysses, tp 2": (Layout(cp=2, tp=2), "1f1b", "zero3", "ulysses", BOTH, "selective", "adamw", {}),
    "1f1b, ddp, ulysses": (Layout(pp=2, dp_shard=2, cp=2), "1f1b", "ddp", "ulysses", KEYS, "none", "adamw", {}),
    "zb_h1, ring, hybrid": (Layout(pp=2, dp_replicate=2, cp=2), "zb_h1", "zero2", "ring", BOTH, "full", "muon", {}),
    "dualpipev, tp 2, cp 2": (Layout(pp=2, tp=2, cp=2), "dualpipev", "zero1", "all_gather", KEYS, "none", "adamw", {}),
}


WHOLE = ("tp 2", "ring", "all_gather, capped", "ulysses, tp 2")  # also without documents, in every method


@pytest.mark.parametrize(("case", "documents"), [*((case, True) for case in CASES), *((case, False) for case in WHOLE)])
def test_training_is_that_of_one_process(case: str, documents: bool, ranks: Ranks) -> None:
    layout, schedule, mode, method, latent, recompute, optimizer, more = CASES[case]
    parallel = Parallel(*layout.shape, pipeline=Pipeline(schedule), context=Context(method), data=DataParallel(mode))
    config = Config(
        model=replace(MODEL, layers=2 if layout.pp == 1 else 4, attention=Attention(latent=latent, **more)),
        parallel=parallel,
        batch=Batch(2, 2 * layout.dp * (2 if layout.pp == 1 else 4)),
        train=Train(3, "fp64", recompute=recompute),
        optim=Optim(optimizer, lr=0.01, weight_decay=0.3, clip_norm=0.01),
        data=Data(mask_documents=documents, reset_positions=documents, end_of_document=3),
    )
    assert validate(config, layout.world_size) == []
    told = ranks.run(compare, config, 2, 1e-11)  # losses and norms must then agree to 1e-13, gradients to 1e-12
    assert [difference for difference in told[0] if not difference.passed] == []
