"""Every layout of up to 8 ranks trains as one process does.

The layouts are all products of up to 8 over pp, dp_replicate, dp_shard and tp of 1, 2 or 4. Each comes with one
setting of every feature, chosen so that every pair of settings that matter in one layout meets in one of them,
whether an axis is used counting as a setting too. A layout takes, from 100 random candidates, the one with the
most pairs not yet seen (the greedy algorithm of AETG: Cohen et al. 1997, IEEE Trans. Software Eng. 23(7)).
"""

import random
from functools import cache
from itertools import combinations, product

import pytest
from ranks import SIZE, Ranks

from megalite.config.layout import Layout
from megalite.config.schema import Batch, Config, DataParallel, Model, Optim, Parallel, Pipeline, Train
from megalite.config.validate import validate
from megalite.verify import compare

FEATURES = {
    "schedule": ("gpipe", "1f1b"),
    "split": ("balanced", "uneven", "explicit"),
    "micro_batches": ("few", "multiple", "ragged"),
    "micro": (1, 2),
    "heads": ("multi", "grouped"),
    "tie_embeddings": (False, True),
    "qk_norm": (False, True),
    "qkv_bias": (False, True),
    "mode": ("zero2", "zero3"),
    "reduce": ("step", "micro_batch"),
    "recompute": ("none", "full"),
    "clip_norm": (0.0, 0.01),
}
MATTERS = {"schedule": "pp", "split": "pp", "mode": "dp", "reduce": "dp"}  # only where the axis is used
LAYERS = {  # by split and pp: the number of layers, and an explicit split
    "balanced": {1: (2, None), 2: (2, None), 4: (4, None)},
    "uneven": {1: (2, None), 2: (3, None), 4: (5, None)},
    "explicit": {1: (2, [2]), 2: (2, [2, 0]), 4: (4, [0, 1, 2, 1])},
}
MICRO_BATCHES = {  # by name and pp: fewer than stages, a multiple of them, or neither
    "few": {1: 1, 2: 1, 4: 3},
    "multiple": {1: 2, 2: 2, 4: 4},
    "ragged": {1: 3, 2: 3, 4: 5},
}
LAYOUTS = [
    Layout(pp=pp, dp_replicate=replicate, dp_shard=shard, tp=tp)
    for pp, replicate, shard, tp in product((1, 2, 4), repeat=4)
    if pp * replicate * shard * tp <= SIZE
]
Setting = tuple[str, object]
Row = dict[str, object]  # one setting of every feature


def used(layout: Layout) -> dict[str, bool]:
    return {axis: getattr(layout, axis) > 1 for axis in ("pp", "dp_replicate", "dp_shard", "tp")}


def matters(feature: str, layout: Layout) -> bool:
    return feature not in MATTERS or getattr(layout, MATTERS[feature]) > 1


def pairs(layout: Layout, row: Row) -> set[tuple[Setting, Setting]]:
    """Every two settings that meet in `layout` and both matter there."""
    settings = [*used(layout).items(), *((name, value) for name, value in row.items() if matters(name, layout))]
    return set(combinations(settings, 2))


def possible_pairs() -> set[tuple[Setting, Setting]]:
    found = set()
    for layout in LAYOUTS:
        levels = {axis: (value,) for axis, value in used(layout).items()}
        levels |= {name: values for name, values in FEATURES.items() if matters(name, layout)}
        for one, other in combinations(levels, 2):
            found |= {((one, a), (other, b)) for a in levels[one] for b in levels[other]}
    return found


@cache
def rows() -> dict[Layout, Row]:
    """The features of every layout."""
    choose = random.Random(0)
    missing, chosen = possible_pairs(), {}
    for layout in sorted(LAYOUTS, key=lambda layout: -layout.world_size):
        candidates = [{name: choose.choice(values) for name, values in FEATURES.items()} for _ in range(100)]
        chosen[layout] = max(candidates, key=lambda row: len(pairs(layout, row) & missing))
        missing -= pairs(layout, chosen[layout])
    return chosen


def configuration(layout: Layout) -> Config:
    """A model as small as can be; few of its dimensions divide evenly over FSDP's ranks, and some leave ranks empty."""
    row = rows()[layout]
    layers, split = LAYERS[row["split"]][layout.pp]
    kv_heads = max(2, layout.tp)
    model = Model(
        layers=layers,
        width=10,
        heads=kv_heads * (2 if row["heads"] == "grouped" else 1),
        kv_heads=kv_heads,
        head_width=6,
        ffn=20,
        vocab_size=36,
        sequence_length=8,
        tie_embeddings=row["tie_embeddings"],
        qk_norm=row["qk_norm"],
        qkv_bias=row["qkv_bias"],
    )
    parallel = Parallel(
        layout.pp,
        layout.dp_replicate,
        layout.dp_shard,
        tp=layout.tp,
        pipeline=Pipeline(row["schedule"], split),
        data=DataParallel(row["mode"], row["reduce"]),
    )
    global_batch = row["micro"] * layout.dp * MICRO_BATCHES[row["micro_batches"]][layout.pp]
    return Config(
        model=model,
        parallel=parallel,
        batch=Batch(row["micro"], global_batch),
        train=Train(steps=3, precision="fp64", recompute=row["recompute"]),
        optim=Optim(clip_norm=row["clip_norm"]),
    )


def test_the_configurations_cover_every_pair_of_settings() -> None:
    met = set().union(*(pairs(layout, row) for layout, row in rows().items()))
    assert possible_pairs() - met == set()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layout_trains_as_one_process(layout: Layout, ranks: Ranks) -> None:
    config = configuration(layout)
    assert validate(config, layout.world_size) == []
    told = ranks.run(compare, config, 3, 1e-10)
    assert all(differences == told[0] for differences in told)
    tolerances = {difference.quantity: difference.tolerance for difference in told[0]}
    required = {
        "loss": 1e-12,
        "gradient norm": 1e-12,
        "initial weights": 0.0,
        "gradients": 1e-11,
        "weights after 3 steps": 1e-10,
    }
    assert tolerances == pytest.approx(required, rel=1e-9, abs=0.0)
    assert [difference for difference in told[0] if not difference.passed] == []
