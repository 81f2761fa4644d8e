"""Training adapters beside one process in float64: targets and bases of their own, and more than two features at once.

Adapters beside each setting of every other feature are among the layouts of `test_layouts`.
"""

from dataclasses import replace
from typing import Any

import pytest
from four_bits import skip_if_refused
from ranks import Ranks
from toy_jobs import MODEL, config_of, make, one_rank

from megalite.base.errors import InputError
from megalite.commands.verify import compare
from megalite.config.layout import Layout
from megalite.config.model_schema import Adapter, Attention, Experts, Latent, Model
from megalite.config.parallel_schema import DataParallel
from megalite.config.schema import Config
from megalite.parallel import fsdp

ALL = Adapter(rank=4, alpha=8.0)
ENDS = Adapter(rank=3, alpha=6.0, targets=["embedding", "head", "query", "down"])
ENDS_ALONE = replace(ENDS, targets=["embedding", "head"])
PADDED = replace(MODEL, vocab_size=30, kv_heads=4)
DROPPING = Adapter(rank=4, alpha=8.0, dropout=0.4)
DORA = Adapter(rank=4, alpha=8.0, dora=True)
NF4 = Adapter(rank=4, alpha=8.0, base="nf4")
BLOCKS = replace(MODEL, width=64, heads=4, kv_heads=4, head_width=32, ffn=128)  # rows that tp cuts into whole blocks
EXPERTS = replace(MODEL, experts=Experts(8, 2, width=8, shared_width=12, biases=True, gate="clamped"))


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
    "zb_h1, zero2": adapted(Layout(pp=2, tp=2, dp_shard=2), schedule="zb_h1", mode="zero2"),
    "dropout, tp, cp": adapted(Layout(tp=2, cp=2, dp_shard=2), DROPPING),
    "dropout, zb_h1, full": adapted(Layout(pp=2, tp=2, dp_shard=2), DROPPING, schedule="zb_h1", recompute="full"),
    "stages without layers": adapted(Layout(pp=4, dp_shard=2), recompute="full", optimizer="muon"),
    "ends, padded vocabulary": adapted(Layout(tp=4, cp=2), ENDS, PADDED, mode="zero1"),
    "ends, zb_h1, muon": adapted(
        Layout(pp=2, tp=2, dp_shard=2), ENDS, schedule="zb_h1", mode="zero2", optimizer="muon"
    ),
    "ends, dropout": adapted(Layout(dp_replicate=2, dp_shard=2, cp=2), replace(DROPPING, targets=["embedding", "up"])),
    "ends alone": adapted(Layout(pp=4, dp_shard=2), ENDS_ALONE, recompute="full"),
    "experts, dualpipev": adapted(Layout(pp=2, dp_shard=4, ep=2), model=EXPERTS, schedule="dualpipev", mode="zero1"),
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
    "dora, dropout, shared expert": adapted(
        Layout(tp=2, dp_shard=4, ep=4), replace(DORA, dropout=0.3, targets=["query", "down", "gate"]), EXPERTS
    ),
    "dora, nf4, zero3": adapted(Layout(tp=2, dp_shard=2, cp=2), replace(NF4, dora=True), BLOCKS),
    "experts alone": adapted(Layout(dp_shard=8, ep=8), Adapter(2, 4.0, targets=["experts"]), EXPERTS),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_train_as_one_process(name: str, ranks: Ranks) -> None:
    skip_if_refused(LAYOUTS[name])
    found = ranks.run(compare, LAYOUTS[name], 3, 1e-10)[0]
    assert [difference for difference in found if not difference.passed] == []


def test_where_integers_cannot_be_sharded_four_bits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp, "shards_integers", lambda: False)
    config = adapted(Layout(), NF4, BLOCKS)
    with one_rank(), pytest.raises(InputError, match=r"adapter\.base = nf4: .* use PyTorch 2\.12 or newer"):
        make(replace(config, train=replace(config.train, precision="bf16")))
