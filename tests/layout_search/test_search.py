"""The search finds what looking at every layout finds, and no bound is above the simulated time."""

from dataclasses import replace
from operator import itemgetter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.config.schema import Config
from megalite.cost.cluster import load_cluster
from megalite.cost.layout_choice import Choice
from megalite.cost.stages import Timer
from megalite.layout_search import search as searching
from megalite.layout_search.search import Found, search
from megalite.layout_search.space import Space
from megalite.plan.memory.peak import memory_of_ranks

GIB = 2**30
TIMERS = {name: Timer(load_cluster(name)) for name in ("h100_sxm", "l40s", "rtx4090")}
PINS = {"parallel.cp": 1, "parallel.data.mode": "zero1", "batch.micro": 1}
SHARED = {"parallel.tp": 1, "parallel.cp": 1, "parallel.data.mode": "zero3", "batch.micro": 1}
IN_TURNS = {**PINS, "parallel.tp": 1, "parallel.ep": 4, "parallel.pp": 2, "train.recompute": "none"}
CASES = [  # model, keys, GPUs, cluster, GiB, pins, offload
    ("tiny_tied", ["batch.global=6"], 6, "h100_sxm", 72, {}, False),
    ("tiny_qwen", ["batch.global=12"], 4, "rtx4090", 21, PINS, False),
    ("mistral_7b_v0.1", ["batch.global=48", "model.layers=5"], 24, "l40s", 40, SHARED, False),
    ("llama3_8b", ["batch.global=4"], 4, "h100_sxm", 30, {**PINS, "parallel.pp": 2}, True),
    ("mixtral_8x7b", ["batch.global=16", "model.layers=5"], 8, "l40s", 40, {"batch.micro": 1, "parallel.cp": 8}, False),
    (
        "deepseek_v2_lite",
        ["batch.global=32", "model.layers=5"],
        8,
        "l40s",
        40,
        {"batch.micro": 1, "parallel.ep": 4},
        False,
    ),
]


def configured(model: str, keys: list[str], pins: dict[str, object]) -> Config:
    given = [f"{key}={value}" for key, value in pins.items()]
    return load([f"configs/model/{model}.yaml"], ["run.device=cuda", *keys, *given])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}, {case[2]} GPUs")
def test_the_search_finds_what_an_exhaustive_one_does(case: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    model, keys, gpus, cluster, gib, pins, offload = case
    config, timer, limit = configured(model, keys, pins), TIMERS[cluster], gib * GIB
    late: list[tuple[float, Choice]] = []  # by how much bounds are above simulated times
    simulated, closer = 0, searching._closer

    def compared(space: Space, node: searching.Node, room: float, found: Found):  # type: ignore[no-untyped-def]
        nonlocal simulated
        for seconds, child in closer(space, node, room, found):
            if child.level is searching.Level.ABOUT:
                simulated += 1
                bound = max(seconds, space.least.of_layout(node.shape, node.choice))
                assert child.trial is not None
                late.append((bound / child.trial.seconds, node.choice))
            yield seconds, child

    fast = search(config, gpus, timer, limit, pins, wanted=5, offload=offload)
    monkeypatch.setattr(searching, "_closer", compared)
    every = search(config, gpus, timer, limit, pins, wanted=5, offload=offload, exhaustive=True)
    assert simulated == every.timed > fast.timed > 0
    latest = max(late, key=itemgetter(0))
    assert latest[0] <= 1 + 1e-9, latest
    assert_same(fast, every)
    for result in fast.results:
        layout = check(result.choice.applied(config, pins), gpus)
        assert max(memory.total for memory in memory_of_ranks(layout)) == result.memory <= limit


def assert_same(fast: Found, every: Found) -> None:
    """Results of a search and of an exhaustive one: layouts that take equally long may be in any order."""
    seconds = [result.seconds for result in every.results[: len(fast.results)]]
    assert [result.seconds for result in fast.results] == pytest.approx(seconds, rel=1e-9)


SEARCHED_ORDER = {  # of few layouts, since each has a search of its own
    "parallel.pipeline.schedule": "auto",
    "parallel.data.mode": "zero1",
    "train.recompute": "none",
    "batch.micro": 1,
}


@settings(max_examples=20, deadline=None)
@given(
    model=st.sampled_from(["tiny", "tiny_gqa", "tiny_qwen", "tiny_tied", "tiny_moe", "llama3.2_1b", "mistral_7b_v0.1"]),
    layers=st.integers(1, 6),
    gpus=st.integers(1, 5),
    batch=st.integers(1, 3),
    cluster=st.sampled_from(sorted(TIMERS)),
    keys=st.sets(
        st.sampled_from(
            [
                "parallel.data.reduce_precision=bf16",
                "optim.name=muon",
                "train.precision=fp32",
                "train.compile=true",
                "model.vocab_size=1001",
                "model.mtp.depth=1",
                "parallel.placement.parameters=host optim.placement=host",
            ]
        ),
        max_size=2,
    ),
    pinned=st.sampled_from(
        [
            {},
            {"batch.micro": 1},
            {"parallel.data.mode": "zero2"},
            {"train.recompute": "none"},
            {**SEARCHED_ORDER, "parallel.pp": 2},
            {**SEARCHED_ORDER, "parallel.pipeline.virtual_stages": 2},
        ]
    ),
    room=st.floats(0.5, 1.2),
)
def test_it_does_so_for_any_small_cluster(
    model: str, layers: int, gpus: int, batch: int, cluster: str, keys: set[str], pinned: dict[str, object], room: float
) -> None:
    """The limit is a share of what the fastest layout needs, so that some fit and some do not."""
    overrides = " ".join([f"model.layers={layers}", f"batch.global={batch * gpus}", *sorted(keys)])
    config = configured(model, overrides.split(), pinned)
    timer = TIMERS[cluster]
    free = search(config, gpus, timer, float("inf"), pinned, wanted=1)
    assume(free.results)  # not every precision goes with every reduction, nor every model has two stages
    limit = room * free.results[0].memory
    fast = search(config, gpus, timer, limit, pinned, wanted=8)
    every = search(config, gpus, timer, limit, pinned, wanted=8, exhaustive=True)
    assert len(fast.results) == min(8, len(every.results))
    assert_same(fast, every)


def test_nothing_is_found_where_nothing_fits() -> None:
    found = search(configured("llama3_8b", ["batch.global=8"], PINS), 4, TIMERS["h100_sxm"], GIB, PINS)
    assert found.results == []
    assert found.tightest is not None
    assert found.tightest[0] > GIB


def test_a_result_is_what_its_configuration_is_predicted_to_take() -> None:
    pins = {**PINS, "parallel.tp": 2}
    config = configured("qwen3_8b", ["batch.global=16"], pins)
    found = search(config, 8, TIMERS["h100_sxm"], 70 * GIB, pins, wanted=2)
    for result in found.results:
        layout = check(result.choice.applied(config, pins), 8)
        assert layout == result.prediction.config
        assert layout.parallel.tp == 2


def test_tp_need_not_divide_a_vocabulary() -> None:
    pins = {**PINS, "parallel.tp": 2}
    config = configured("tiny", ["model.vocab_size=1001", "batch.global=4"], pins)
    assert search(config, 4, TIMERS["h100_sxm"], GIB, pins, wanted=1).results


def test_ranks_of_tp_have_whole_blocks_of_a_base_in_four_bits() -> None:
    for base, most in (("compute", 4), ("nf4", 2)):  # 384 hidden features are six blocks
        config = load(["configs/run/quickstart.yaml"], ["run.device=cuda", "adapter.rank=4", f"adapter.base={base}"])
        space = Space(config, 4, Timer(load_cluster("h100_sxm")), {}, False)
        assert max(shape.choice.tp for shape in space.shapes(float("inf"))) == most


def test_few_layouts_are_simulated() -> None:
    """Bounds that leave out gathers, reductions and the optimizer make it 130."""
    found = search(configured("llama3_8b", ["batch.global=16"], {}), 16, TIMERS["h100_sxm"], 71 * GIB, wanted=3)
    assert 3 <= found.walked <= found.timed <= 20
    assert len(found.results) == 3


def test_layouts_whose_passes_take_turns_are_the_fastest_where_rows_travel_slowly() -> None:
    config = configured("deepseek_v2_lite", ["batch.global=32", "model.layers=7"], IN_TURNS)
    seconds = []
    for overlap in (True, False):
        pipeline = replace(config.parallel.pipeline, overlap=overlap)
        asked = replace(config, parallel=replace(config.parallel, pipeline=pipeline))
        (best,) = search(asked, 8, TIMERS["l40s"], 30 * GIB, IN_TURNS, wanted=1).results
        assert (best.choice.schedule == "dualpipev") >= overlap
        seconds.append(best.seconds)
    assert seconds[0] < 0.98 * seconds[1]
