"""Rules of adapters, and the configuration of a model that has them."""

from dataclasses import replace

import pytest

from megalite.config.convert import from_plain, keys, kind, options, to_plain
from megalite.config.layers import layer_kinds
from megalite.config.model_schema import Adapter, Attention, Experts, Latent, Model
from megalite.config.parallel_schema import Parallel
from megalite.config.rules.validate import validate
from megalite.config.schema import Batch, Checkpoint, Config, Train

MODEL = Model(6, 16, 4, 2, None, 24, 32, 8)
CONFIG = Config(model=MODEL, adapter=Adapter(), parallel=Parallel(dp_shard=1), batch=Batch(1, 4))


BLOCKS = Model(6, 64, 4, 2, 32, 192, 32, 8)
NF4 = replace(CONFIG, model=BLOCKS, adapter=Adapter(base="nf4"))


def adapted(**keys: object) -> Config:
    return replace(CONFIG, adapter=replace(Adapter(), **keys))


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (adapted(rank=0), "adapter.rank = 0: must be at least 1"),
        (adapted(alpha=0.0), "adapter.alpha = 0.0: must be at least"),
        (adapted(dropout=1.0), "adapter.dropout = 1.0: must be at most 0.99"),
        (
            replace(adapted(dropout=0.1), model=replace(MODEL, experts=Experts(4, 2))),
            "adapter.dropout = 0.1: cannot be",
        ),
        (replace(adapted(dropout=0.1), train=Train(compile=True)), "adapter.dropout = 0.1: cannot be used with train."),
        (adapted(targets=[]), "adapter.targets = []: must name something"),
        (adapted(targets=["query", "up", "query"]), "names something twice; name each once"),
        (adapted(targets=["query", "experts"]), 'adapter.targets = "experts": names what the model does not have'),
        (adapted(targets=["latent"]), 'adapter.targets = "latent": names what the model does not have'),
        (
            replace(adapted(targets=["head"]), model=replace(MODEL, tie_embeddings=True)),
            "cannot have head with model.tie_embeddings",
        ),
        (
            adapted(targets=["query", "head"], dora=True),
            "adapter.dora = true: cannot be used with factors of head",
        ),
        (
            replace(adapted(dora=True), model=replace(MODEL, experts=Experts(4, 2))),
            "factors of experts, as in PEFT; use false, or adapter.targets without experts",
        ),
        (adapted(targets=["head"], dropout=0.1), "cannot be used with factors of the head"),
        (
            replace(NF4, parallel=Parallel(dp_shard=1, tp=2)),
            "model.ffn = 192: must be cut into blocks of 64 inputs for adapter.base=nf4, and by tp between these; "
            "use adapter.base=compute, or a smaller parallel.tp",
        ),
        (replace(NF4, model=replace(BLOCKS, width=96)), "model.width = 96: must be cut into blocks of 64 inputs"),
        (replace(NF4, model=replace(BLOCKS, heads=3, kv_heads=3, head_width=20)), "heads · head_width = 60: must be"),
        (replace(NF4, model=replace(BLOCKS, experts=Experts(4, 2, width=32))), "model.experts.width = 32: must be cut"),
        (  # three ranks may share the inputs of up projections alone
            replace(
                NF4,
                model=replace(BLOCKS, width=192, experts=Experts(4, 2, width=64)),
                parallel=Parallel(dp_shard=3),
            ),
            "so that all hold as much; with adapter.base=nf4, their number or both widths, so that blocks stay whole",
        ),
        (replace(NF4, train=Train(product="a:b")), 'train.product = "a:b": cannot be used with adapter.base=nf4'),
        (replace(CONFIG, train=Train(precision="fp8")), 'train.precision = "fp8": cannot be used with adapter'),
        (
            replace(CONFIG, adapter=None, checkpoint=Checkpoint(export="peft")),
            'checkpoint.export = "peft": is for runs with adapter; use hf, or set adapter.rank',
        ),
    ],
)
def test_broken_rules_are_told(config: Config, told: str) -> None:
    assert told in "\n".join(map(str, validate(config)))


def test_whole_blocks_are_taken() -> None:
    assert validate(NF4) == []
    assert validate(replace(NF4, parallel=Parallel(dp_shard=1, tp=2), model=replace(BLOCKS, ffn=128))) == []


def test_both_kinds_of_exports_are_taken() -> None:
    for form in ("hf", "peft"):
        assert validate(replace(CONFIG, checkpoint=Checkpoint(export=form))) == []


def test_targets_that_a_model_has_are_taken() -> None:
    latent = Attention(latent=Latent(None, 8, 4))
    model = replace(MODEL, kv_heads=4, rotary_width=2, attention=latent, experts=Experts(4, 2, shared_width=8))
    targets = ["query", "latent", "gate", "experts", "embedding", "head"]
    assert validate(replace(CONFIG, model=model, adapter=Adapter(targets=targets))) == []


def test_a_model_has_the_adapter_of_its_configuration_alone() -> None:
    plain = replace(CONFIG, adapter=None)
    assert MODEL.adapter is None
    assert layer_kinds(plain.model)[0].adapter is None
    kind = layer_kinds(CONFIG.model)[0].adapter
    assert kind is not None
    assert kind.scale == 2.0
    assert kind.targets >= {"query", "down"}
    changed = replace(CONFIG, model=replace(CONFIG.model, layers=2))
    assert changed.model.adapter is CONFIG.adapter
    assert from_plain(to_plain(CONFIG)) == (CONFIG, [])
    assert layer_kinds(adapted(rslora=True).model)[0].adapter.scale == 8.0  # type: ignore[union-attr]


def test_every_type_has_a_name_in_messages() -> None:
    """Such as that of `adapter.targets`, a list of either of two."""
    assert [key for key, hint in keys().items() if not all(map(kind, options(hint)))] == []
    _, (problem,) = from_plain({"adapter": {"targets": 3}})
    assert "must be a list, each item query, " in str(problem)
