"""Gemma's norms, activation, caps and angles train in every layout as in one process."""

import pytest
from ranks import Ranks

from megalite.commands.verify import compare
from megalite.config.layout import Layout
from megalite.config.model_schema import Adapter, Attention, Model, RopeScaling
from megalite.config.parallel_schema import Context, DataParallel, Parallel, Pipeline
from megalite.config.rules.validate import validate
from megalite.config.schema import Batch, Config, Data, Optim, Train

CASES = {  # name -> layout, schedule, mode, method, recompute, optimizer, norm of queries and keys, tied, adapter
    "tp 4, zero3, norms of all heads": (
        Layout(dp_shard=2, tp=4), "1f1b", "zero3", "ring", "selective", "adamw", "all", False, None,
    ),
    "ring, tp 2, full recompute, tied": (
        Layout(cp=2, tp=2), "1f1b", "zero1", "ring", "full", "muon", "head", True, None,
    ),
    "zb_h1, tp 2, tied": (
        Layout(pp=2, dp_shard=2, tp=2), "zb_h1", "zero2", "ring", "none", "adamw", "head", True, None,
    ),
    "zbv, all_gather, no norms of queries": (
        Layout(pp=2, cp=2), "zbv", "zero1", "all_gather", "none", "muon", None, False, None,
    ),
    "adapters, tp 2": (
        Layout(dp_shard=2, tp=2), "1f1b", "zero2", "ring", "none", "adamw", "head", False, Adapter(3, 6.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_one_process(case: str, ranks: Ranks) -> None:
    layout, schedule, mode, method, recompute, optimizer, qk_norm, tied, adapter = CASES[case]
    model = Model(
        layers=4,
        width=12,
        heads=8,
        kv_heads=4,
        head_width=6,
        ffn=20,
        vocab_size=41,
        sequence_length=16,
        rope_scaling=RopeScaling("linear", 3.0),
        norm="both",
        norm_gain="one_plus_weight",
        activation="gelu",
        tie_embeddings=tied,
        qk_norm=qk_norm is not None,
        qk_norm_width=qk_norm or "head",
        attention=Attention(5, 2, window_rope_theta=50.0, scale=0.7, softcap=2.0),
        init_std=0.2,
        embedding_multiplier=3.0,
        logits_softcap=1.5,
    )
    config = Config(
        model=model,
        parallel=Parallel(*layout.shape, pipeline=Pipeline(schedule), context=Context(method), data=DataParallel(mode)),
        batch=Batch(2, 2 * layout.dp * (2 if layout.pp == 1 else 4)),
        train=Train(3, "fp64", recompute=recompute),
        optim=Optim(optimizer, lr=0.01, weight_decay=0.3, clip_norm=0.01),
        data=Data(mask_documents=True, reset_positions=True, end_of_document=3),
        adapter=adapter,
    )
    assert validate(config, layout.world_size) == []
    told = ranks.run(compare, config, 2, 1e-10)  # losses and norms must then agree to 1e-12, gradients to 1e-11
    assert [difference for difference in told[0] if not difference.passed] == []
