"""Training adapters in every layout, beside one process in float64, and beside the same model with merged weights."""

from dataclasses import replace
from typing import Any

import pytest
from ranks import Ranks
from toy_jobs import MODEL, config_of

from megalite.commands.verify import compare
from megalite.config.layout import Layout
from megalite.config.schema import Adapter, Attention, Config, DataParallel, Experts, Latent, Model

ALL = Adapter(rank=4, alpha=8.0)
SOME = Adapter(rank=3, alpha=2.0, rslora=True, targets=["query", "value", "down"])
ENDS = Adapter(rank=3, alpha=6.0, targets=["embedding", "head", "query", "down"])
ENDS_ALONE = replace(ENDS, targets=["embedding", "head"])
PADDED = replace(MODEL, vocab_size=30, kv_heads=4)
DROPPING = Adapter(rank=4, alpha=8.0, dropout=0.4)
DORA = Adapter(rank=4, alpha=8.0, dora=True)
NF4 = Adapter(rank=4, alpha=8.0, base="nf4")
BLOCKS = replace(MODEL, width=64, heads=4, kv_heads=4, head_width=32, ffn=128)  # rows that tp cuts into whole blocks
EXPERTS = replace(MODEL, experts=Experts(8, 2, width=8, shared_width=12, biases=True, gate="clamped"))
LATENT = replace(
    MODEL,
    kv_heads=4,
    head_width=6,
    rotary_width=2,
    qkv_bias=False,
    attention=Attention(latent=Latent(query_rank=10, key_rank=6, value_width=4)),
)


def adapted(
    layout: Layout,
    adapter: Adapter = ALL,
    model: Model = MODEL,
    schedule: str = "1f1b",
    mode: str = "zero3",
    **changes: Any,
) -> Config:
    config = replace(config_of(layout, model, schedule), adapter=adapter)
    config = replace(config, parallel=replace(config.parallel, data=DataParallel(mode)))
    train = replace(config.train, recompute=changes.get("recompute", "none"))
    return replace(config, train=train, optim=replace(config.optim, name=changes.get("optimizer", "adamw")))


LAYOUTS = {
    "tp": adapted(Layout(tp=4, dp_shard=2), model=replace(MODEL, kv_heads=4), mode="zero1"),
    "tp, some, muon": adapted(Layout(tp=2, cp=2, dp_shard=2), SOME, optimizer="muon"),
    "zb_h1, zero2": adapted(Layout(pp=2, tp=2, dp_shard=2), schedule="zb_h1", mode="zero2"),
    "zbv, selective": adapted(Layout(pp=2, tp=2, cp=2), SOME, schedule="zbv", recompute="selective"),
    "dropout, tp, cp": adapted(Layout(tp=2, cp=2, dp_shard=2), DROPPING),
    "dropout, zb_h1, full": adapted(Layout(pp=2, tp=2, dp_shard=2), DROPPING, schedule="zb_h1", recompute="full"),
    "dropout, latent, zbv": adapted(Layout(pp=2, tp=2, dp_shard=2), DROPPING, LATENT, schedule="zbv", mode="zero2"),
    "stages without layers": adapted(Layout(pp=4, dp_shard=2), recompute="full", optimizer="muon"),
    "replicas": adapted(Layout(dp_replicate=2, dp_shard=2, cp=2)),
    "ddp, rslora": adapted(Layout(dp_shard=4, tp=2), SOME, mode="ddp"),
    "tied, post norms": adapted(Layout(pp=2, tp=4), model=replace(MODEL, tie_embeddings=True, norm="post", kv_heads=4)),
    "ends, padded vocabulary": adapted(Layout(tp=4, cp=2), ENDS, PADDED, mode="zero1"),
    "ends, zb_h1, muon": adapted(
        Layout(pp=2, tp=2, dp_shard=2), ENDS, schedule="zb_h1", mode="zero2", optimizer="muon"
    ),
    "ends, dropout": adapted(Layout(dp_replicate=2, dp_shard=2, cp=2), replace(DROPPING, targets=["embedding", "up"])),
    "ends alone": adapted(Layout(pp=4, dp_shard=2), ENDS_ALONE, recompute="full"),
    "latent": adapted(Layout(tp=4, cp=2), model=LATENT),
    "latent, zb_h1": adapted(Layout(pp=2, tp=2, dp_shard=2), model=LATENT, schedule="zb_h1", optimizer="muon"),
    "experts": adapted(Layout(tp=2, dp_shard=4, ep=4), model=EXPERTS),
    "experts, dualpipev": adapted(Layout(pp=2, dp_shard=4, ep=2), model=EXPERTS, schedule="dualpipev", mode="zero1"),
    "experts, muon, full": adapted(
        Layout(cp=2, dp_shard=2, tp=2, ep=2), model=EXPERTS, optimizer="muon", recompute="full"
    ),
    "nf4, tp, muon": adapted(Layout(tp=2, cp=2, dp_shard=2), NF4, BLOCKS, optimizer="muon"),
    "nf4, zb_h1, zero2": adapted(Layout(pp=2, tp=2, dp_shard=2), NF4, BLOCKS, "zb_h1", "zero2", recompute="full"),
    "nf4, zbv, ddp": adapted(Layout(pp=2, dp_shard=4), replace(NF4, targets=["value", "down"]), BLOCKS, "zbv", "ddp"),
    "nf4, latent": adapted(
        Layout(tp=2, dp_shard=2, cp=2),
        NF4,
        replace(BLOCKS, qkv_bias=False, rotary_width=2, attention=Attention(latent=Latent(64, 64, value_width=32))),
    ),
    "nf4, experts": adapted(
        Layout(pp=2, tp=2, dp_shard=2, ep=2), NF4, replace(BLOCKS, experts=Experts(8, 2, width=64, shared_width=128))
    ),
    "dora, tp, cp": adapted(Layout(tp=2, cp=2, dp_shard=2), DORA, replace(MODEL, out_bias=True), mode="zero1"),
    "dora, zb_h1, muon, full": adapted(
        Layout(pp=2, tp=2, dp_shard=2), DORA, schedule="zb_h1", mode="zero2", optimizer="muon", recompute="full"
    ),
    "dora, latent, zbv": adapted(
        Layout(pp=2, tp=2, dp_shard=2), DORA, LATENT, schedule="zbv", mode="ddp", recompute="selective"
    ),
    "dora, dropout, shared expert": adapted(
        Layout(tp=2, dp_shard=4, ep=4), replace(DORA, dropout=0.3, targets=["query", "down", "gate"]), EXPERTS
    ),
    "dora, nf4, zero3": adapted(Layout(tp=2, dp_shard=2, cp=2), replace(NF4, dora=True), BLOCKS),
    "experts alone": adapted(Layout(dp_shard=8, ep=8), Adapter(2, 4.0, targets=["experts"]), EXPERTS),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_train_as_one_process(name: str, ranks: Ranks) -> None:
    found = ranks.run(compare, LAYOUTS[name], 3, 1e-10)[0]
    assert [difference for difference in found if not difference.passed] == []
