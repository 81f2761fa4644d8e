"""Layouts of up to 8 ranks, with every feature, train as one process does.

The layouts are all products of up to 8 over the five axes, pp up to 4. Each comes at least once, with one setting of
every feature; settings are chosen, and layouts repeated, until every pair of settings that matter in one layout
meets in one of them, whether an axis is used counting as a setting too. Layouts take turns. A candidate for a layout
takes features in random order, each with the setting that makes the most pairs not yet seen with those before it; of a
few candidates the best is taken (AETG: Cohen et al. 1997, IEEE Trans. Software Eng. 23(7)). A layout that has nothing
new to offer is passed over.
"""

import random
from dataclasses import replace
from functools import cache
from itertools import combinations, product

import pytest
from ranks import SIZE, Ranks

from megalite.commands.verify import compare
from megalite.config.layers import targets_of
from megalite.config.layout import AXES, Layout
from megalite.config.model_schema import Adapter, Attention, Base, Experts, Latent, Model, MultiToken, RopeScaling
from megalite.config.parallel_schema import (
    Context,
    DataParallel,
    ExpertParallel,
    Parallel,
    Pipeline,
    Placement,
    TensorParallel,
)
from megalite.config.rules.validate import validate
from megalite.config.schema import Batch, Config, Data, Optim, Train

FEATURES = {
    "schedule": ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zbv", "dualpipev"),
    "split": ("balanced", "uneven", "explicit"),
    "micro_batches": ("few", "multiple", "ragged"),
    "micro": (1, 2),
    "heads": ("multi", "grouped"),
    "tie_embeddings": (False, True),
    "norm": ("pre", "post"),
    "qk_norm": ("none", "head", "all"),
    "qkv_bias": (False, True),
    "mode": ("ddp", "zero1", "zero2", "zero3"),
    "method": ("ring", "ulysses", "all_gather"),
    "overlap": ("pieces", "symmetric"),
    "documents": ("packed", "masked", "reset"),
    "attention": ("full", "window", "alternating windows", "alternating positions", "capped"),
    "recompute": ("none", "selective", "full", "full of every second"),
    "offload": (False, True),  # of activations
    "optimizer": ("adamw", "muon"),
    "states": ("device", "host", "updated on the host"),
    "parameters": ("device", "host"),
    "clip_norm": (0.0, 0.01),
    "kind": ("standard", "mup", "completep", "latent", "latent, experts", "experts", "groups", "biases"),
    "sinks": (False, True),
    "ep": ("least", "more", "all"),
    "buffers": ("exact", "worst_case"),
    "trained": ("every token", "some tokens"),
    "adapter": ("none", "all", "some", "dropping"),
    "mtp": (0, 1, 2),
}
ATTENTION = {
    "full": Attention(),
    "window": Attention(window=5),
    "alternating windows": Attention(window=3, full_every=2, window_rope_theta=50.0),
    "alternating positions": Attention(nope_every=2),
    "capped": Attention(softcap=0.5),
}
FACTORS = {"embedding_multiplier": 3.0, "logits_multiplier": 5.0}
SCALED = {
    "mup": {"parametrization": "mup", "base": Base(4, None, 3), **FACTORS},
    "completep": {"parametrization": "completep", "base": Base(4, 3, 3), **FACTORS},
}
EXPERTS = {  # of 8, so that ranks of every axis can share them out
    "latent, experts": Experts(
        8, 3, 5, first_dense=1, scores="sigmoid", groups=4, active_groups=2, correction_rate=0.1
    ),
    "experts": Experts(8, 2, 7, balance_loss=0.1, z_loss=0.01),
    "groups": Experts(8, 2, 5, every=2, groups=2, balance_loss=0.1, correction_rate=0.1, shared_width=8),
    "biases": Experts(8, 3, 6, scores="sigmoid", gate="clamped", biases=True, shared_width=16, shared_gate=True),
}
ADAPTERS = {
    "none": None,
    "all": Adapter(3, 6.0),
    "some": Adapter(2, 3.0, rslora=True, targets=["query", "down", "experts"]),
    "dropping": Adapter(4, 4.0, targets=["query", "value", "latent", "attention_output", "up"], dropout=0.3, dora=True),
}
# Only where one of the axes is used:
MATTERS = {
    "split": ("pp",),
    "mode": ("dp_replicate", "dp_shard", "cp"),
    "method": ("cp",),
    "overlap": ("tp",),
    "ep": ("dp_shard", "cp", "tp"),
    "buffers": ("dp_shard", "cp", "tp"),
}
# Only with some settings of another feature:
NOT_LATENT = {"kind": [each for each in FEATURES["kind"] if "latent" not in each]}
OF_EXPERTS = {"kind": list(EXPERTS)}
NEEDS = {
    **dict.fromkeys(("qk_norm", "qkv_bias", "sinks"), NOT_LATENT),
    **dict.fromkeys(("ep", "buffers"), OF_EXPERTS),
    "parameters": {"mode": ["zero1", "zero2", "zero3"]},
    "mtp": {"adapter": ["none"], "kind": [each for each in FEATURES["kind"] if each not in SCALED]},
}
LAYOUTS = [Layout(*sizes) for sizes in product((1, 2, 4), *[(1, 2, 4, 8)] * 4)]
LAYOUTS = [layout for layout in LAYOUTS if layout.world_size <= SIZE]
CANDIDATES = 3
Setting = tuple[str, object]
Row = dict[str, object]  # one setting of every feature


def used(layout: Layout) -> dict[str, bool]:
    return {axis: getattr(layout, axis) > 1 for axis in AXES}


def matters(feature: str, layout: Layout) -> bool:
    return feature not in MATTERS or any(used(layout)[axis] for axis in MATTERS[feature])


def allowed(name: str, row: Row) -> bool:
    """Whether a feature has a meaning beside the settings of others, as far as these are chosen."""
    needs = NEEDS.get(name, {})
    return all(row.get(other) is None or row[other] in settings for other, settings in needs.items())


def pairs(layout: Layout, row: Row) -> set[tuple[Setting, Setting]]:
    """Every two settings that meet in `layout` and both matter there."""
    here = {name: value for name, value in row.items() if matters(name, layout)}
    met = ((name, value) for name, value in here.items() if allowed(name, here))
    return set(combinations([*used(layout).items(), *met], 2))


@cache
def possible_pairs() -> set[tuple[Setting, Setting]]:
    found = set()
    for layout in LAYOUTS:
        levels = {axis: (value,) for axis, value in used(layout).items()}
        levels |= {name: values for name, values in FEATURES.items() if matters(name, layout)}
        for one, other in combinations(levels, 2):
            met = product(levels[one], levels[other])
            found |= {((one, a), (other, b)) for a, b in met if allowed(one, {other: b}) and allowed(other, {one: a})}
    return found


def candidate(layout: Layout, missing: set[tuple[Setting, Setting]], choose: random.Random) -> Row:
    """Settings of all features, chosen one after the other for the pairs that they make with those before."""
    row: Row = {}
    for name in choose.sample(list(FEATURES), len(FEATURES)):
        values, before = choose.sample(FEATURES[name], len(FEATURES[name])), [*used(layout).items()]
        before += [(other, value) for other, value in row.items() if matters(other, layout)]

        def new(value: object, name: str = name, before: list[Setting] = before) -> int:
            setting = (name, value)
            return sum((other, setting) in missing or (setting, other) in missing for other in before)

        row[name] = max(values, key=new) if matters(name, layout) else values[0]
    if row["parameters"] == "host" and not matters("mode", layout):
        row["mode"] = "zero3"  # other modes keep weights on the only rank
    if row["parameters"] == "host" and row["adapter"] == "none" and row["states"] == "device":
        row["states"] = "host"  # parameters are trained there, and no factors on the device
    return {name: row[name] for name in FEATURES}


@cache
def cases() -> list[tuple[Layout, Row]]:
    """Layouts with their features."""
    choose = random.Random(12)  # of twelve, the one that takes the fewest ranks
    missing, chosen = set(possible_pairs()), []
    for turn in range(10):
        for layout in sorted(LAYOUTS, key=lambda layout: -layout.world_size):
            candidates = [candidate(layout, missing, choose) for _ in range(CANDIDATES)]
            best = max(candidates, key=lambda row: len(pairs(layout, row) & missing))
            if turn == 0 or pairs(layout, best) & missing:
                chosen.append((layout, best))
                missing -= pairs(layout, best)
    return chosen


def experts_shared_by(layout: Layout, how: object) -> int:
    """Ranks that share out experts: as few as can be, as few as can be but more than these, or all that can."""
    inner = layout.dp_shard * layout.cp
    parts = {"least": 1, "more": next((part for part in (2, 4, 8) if inner % part == 0), 1), "all": inner}
    return layout.tp * parts[str(how)]


def layers(split: object, stages: int) -> tuple[int, list[int] | None]:
    """The number of layers, and an explicit split."""
    if split != "explicit":
        return max(2, stages) + (split == "uneven"), None
    inner = [2, *[1] * (stages - 3)] if stages > 2 else []
    explicit = [0, *inner, 0] if inner else [2, *[0] * (stages - 1)]
    return sum(explicit), explicit


def configuration(layout: Layout, row: Row) -> Config:
    """A model as small as can be; few of its dimensions divide evenly over FSDP's ranks, and some leave ranks empty."""
    pipeline = Pipeline(row["schedule"])
    count, pipeline.split = layers(row["split"], layout.pp * pipeline.stages_per_rank)
    kv_heads, kind = max(2, layout.tp), str(row["kind"])
    latent = Latent(7, 5, 4) if "latent" in kind else None
    shared = 2 if row["heads"] == "grouped" else 1
    if latent is not None:  # all heads have keys of their own
        kv_heads, shared = max(kv_heads * shared, layout.tp * layout.cp), 1
    model = Model(
        layers=count,
        width=10,
        heads=max(kv_heads * shared, layout.tp * layout.cp),  # Ulysses shares out the heads of a tp rank
        kv_heads=kv_heads,
        head_width=6,
        ffn=24,
        vocab_size=37,  # padded at any tp
        sequence_length=16,
        tie_embeddings=row["tie_embeddings"],
        norm=row["norm"],
        rotary_width=None if latent is None else 2,
        qk_norm=row["qk_norm"] != "none" and latent is None,
        qk_norm_width="all" if row["qk_norm"] == "all" and latent is None else "head",
        qkv_bias=row["qkv_bias"] and latent is None,
        out_bias=row["qkv_bias"] and latent is None,
        attention=replace(ATTENTION[row["attention"]], latent=latent, sinks=row["sinks"] and latent is None),
        experts=EXPERTS.get(kind),
        mtp=MultiToken(row["mtp"]) if row["mtp"] and allowed("mtp", row) else None,
        **SCALED.get(kind, {}),
    )
    micro_batches = {"few": max(1, layout.pp - 1), "multiple": 2 * layout.pp, "ragged": 2 * layout.pp + 1}
    ep = experts_shared_by(layout, row["ep"]) if kind in EXPERTS else 1
    experts = ExpertParallel(row["buffers"] if ep > 1 else "exact")
    placement = Placement(str(row["parameters"]) if row["mode"] != "ddp" else "device")
    data = DataParallel(row["mode"])
    parallel = Parallel(*layout.shape, ep, pipeline, Context(row["method"]), data, experts, placement)
    parallel.tensor = TensorParallel(row["overlap"])
    recompute, *every = str(row["recompute"]).split(" ", 1)
    train = Train(3, "fp64", recompute=recompute, recompute_every=1 + len(every), offload_activations=row["offload"])
    masked, adapter = row["documents"] != "packed", ADAPTERS[str(row["adapter"])]
    if adapter is not None and adapter.targets != "all":
        adapter = replace(adapter, targets=[name for name in targets_of(model) if name in adapter.targets])
    return Config(
        model=model,
        parallel=parallel,
        batch=Batch(row["micro"], row["micro"] * layout.dp * micro_batches[row["micro_batches"]]),
        train=train,
        optim=Optim(
            str(row["optimizer"]),
            clip_norm=row["clip_norm"],
            placement="device" if row["states"] == "device" else "host",
            update_on="host" if row["states"] == "updated on the host" else "device",
        ),
        data=Data(mask_documents=masked, reset_positions=row["documents"] == "reset", end_of_document=3),
        adapter=adapter,
    )


def test_the_configurations_cover_every_pair_of_settings() -> None:
    met = set().union(*(pairs(layout, row) for layout, row in cases()))
    assert possible_pairs() - met == set()
    assert len({layout for layout, _ in cases()}) == len(LAYOUTS) >= 40


@pytest.mark.parametrize(("layout", "row"), cases(), ids=[f"{layout} {n}" for n, (layout, _) in enumerate(cases())])
def test_layout_trains_as_one_process(layout: Layout, row: Row, ranks: Ranks) -> None:
    config = configuration(layout, row)
    assert validate(config, layout.world_size) == []
    masked = row["trained"] == "some tokens"
    told = ranks.run(
        compare, config, 2, 1e-10, masked
    )  # the second has what the first leaves behind: moments, buffers, slots
    assert all(differences == told[0] for differences in told)
    tolerances = {difference.quantity: difference.tolerance for difference in told[0]}
    required = {
        "loss": 1e-12,
        "gradient norm": 1e-12,
        "initial weights": 0.0,
        "gradients": 1e-11,
        "weights after 2 steps": 1e-10,
    }
    required |= {} if config.model.experts is None else {"routing": 0.0}
    required |= {f"mtp_loss/{k}": 1e-12 for k in range(1, config.model.depth + 1)}
    assert tolerances == pytest.approx(required, rel=1e-9, abs=0.0)
    assert [difference for difference in told[0] if not difference.passed] == []


def test_three_stages_on_a_rank(ranks: Ranks) -> None:
    """More than the two that the layouts above have; and a step more."""
    row = cases()[0][1] | {"schedule": "interleaved_1f1b", "micro_batches": "ragged", "documents": "packed"}
    config = configuration(Layout(pp=2, dp_shard=2), row)
    pipeline = Pipeline("interleaved_1f1b", virtual_stages=3)
    config = replace(
        config, model=replace(config.model, layers=7), parallel=replace(config.parallel, pipeline=pipeline)
    )
    assert validate(config, 4) == []
    assert [difference for difference in ranks.run(compare, config, 3, 1e-10)[0] if not difference.passed] == []


@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling("longrope", original_length=7, short_factors=[1.0] * 3, long_factors=[1.0, 3.0, 9.0]),
        RopeScaling("dynamic", original_length=7),
    ],
    ids=lambda scaling: scaling.kind,
)
def test_angles_that_depend_on_the_length_of_whole_sequences(scaling: RopeScaling, ranks: Ranks) -> None:
    """A rank has shorter parts of them. Only a part of every head turns."""
    row = cases()[0][1] | {"documents": "packed", "qk_norm": "head"}
    config = configuration(Layout(cp=2, tp=2), row)
    model = replace(config.model, head_width=8, rotary_width=6, rope_scaling=scaling)
    assert 7 < model.sequence_length <= 28
    config = replace(config, model=model)
    assert validate(config, 4) == []
    assert [difference for difference in ranks.run(compare, config, 2, 1e-10)[0] if not difference.passed] == []
