"""Laws of every predicted step, on configurations and clusters that are drawn at random."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from megalite.base.errors import InputError
from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.config.schema import Config
from megalite.cost.cluster import Cluster, Gpu, Level, Link, known_clusters, load_cluster
from megalite.cost.flows import by_axis
from megalite.cost.link_clocks import groups, times, total
from megalite.cost.network import Links, Net
from megalite.cost.predict import Prediction, predict
from megalite.cost.stages import Timer
from megalite.plan.parts.sizes import Sizes
from megalite.plan.pipeline import micro_batches
from megalite.plan.split import balance
from megalite.plan.traffic.step import step_traffic
from megalite.schedule.generate import NAMES

TIMERS = {name: Timer(load_cluster(name)) for name in known_clusters()}
DRAWN = 40  # configurations of each law; all of them have been tested on 1,000
ROUNDING = 1 + 1e-9
POWERS = st.sampled_from([1, 2, 4])


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Config, str]:
    """A configuration that can run, and the name of a cluster. Many are bound by what they send."""
    tp, cp, pp, replicas, shards = (draw(POWERS) for _ in range(5))
    schedule = draw(st.sampled_from(NAMES)) if pp > 1 else "1f1b"
    virtual = draw(st.integers(2, 3)) if schedule == "interleaved_1f1b" else None
    stages = pp * (virtual or (2 if schedule in ("zbv", "dualpipev") else 1))
    rounds = draw(st.integers(1, 20)) * (pp if virtual else 1)
    micro = draw(st.sampled_from([1, 2]))
    kv_heads = tp * draw(POWERS)
    latent = draw(st.sampled_from([None, "{key_rank: 96}", "{query_rank: 256, value_width: 64}"]))
    kv_heads *= cp if latent else 1
    values: dict[str, Any] = {
        "model.layers": draw(st.integers(stages, stages + 6)),
        "model.width": 128 * draw(st.integers(2, 48)),
        "model.heads": kv_heads if latent else kv_heads * cp * draw(st.sampled_from([1, 2])),
        "model.kv_heads": kv_heads,
        "model.head_width": 128 if latent else draw(st.sampled_from([64, 128])),
        "model.rotary_width": 32 if latent else "null",
        "model.attention.latent": latent or "null",
        "model.ffn": 64 * tp * draw(st.integers(4, 60)),
        "model.vocab_size": 16 * tp * draw(st.integers(16, 4000)),
        "model.sequence_length": 2 ** draw(st.integers(7, 13)),
        "model.norm": draw(st.sampled_from(["pre", "post"])),
        "model.tie_embeddings": draw(st.booleans()),
        "model.qk_norm": not latent and draw(st.booleans()),
        "model.attention.window": draw(st.sampled_from(["null", 64, 1000])),
        "model.mtp": draw(st.sampled_from(["null", "{depth: 1}", "{depth: 3}"])),
        "parallel.tp": tp,
        "parallel.cp": cp,
        "parallel.pp": pp,
        "parallel.dp_replicate": replicas,
        "parallel.dp_shard": shards,
        "parallel.context.method": draw(st.sampled_from(["ring", "ulysses", "all_gather"])),
        "parallel.pipeline.schedule": schedule,
        "parallel.pipeline.virtual_stages": virtual or "null",
        "parallel.data.mode": draw(st.sampled_from(["ddp", "zero1", "zero2", "zero3"])),
        "parallel.data.reduce_precision": draw(st.sampled_from(["fp32", "bf16"])),
        "optim.name": draw(st.sampled_from(["adamw", "muon"])),
        "batch.micro": micro,
        "batch.global": micro * rounds * replicas * shards,
        "train.precision": "bf16",
        "train.recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "run.device": "cuda",
    }
    if draw(st.booleans()):
        ep = tp * draw(st.sampled_from([each for each in (1, 2, 4, 8) if cp * shards % each == 0]))
        values |= {
            "parallel.ep": ep,
            "model.experts.count": ep * draw(st.integers(2, 8)),
            "model.experts.active": 2,
            "model.experts.width": 64 * draw(st.integers(1, 30)),
            "model.experts.first_dense": draw(st.sampled_from([0, 1])),
            "model.experts.balance_loss": draw(st.sampled_from([0, 0.01])),
            "parallel.experts.buffers": draw(st.sampled_from(["exact", "worst_case"] if ep > 1 else ["exact"])),
        }
    gpus = tp * cp * pp * replicas * shards
    config = made([f"{key}={value}" for key, value in values.items()], gpus)
    split = balance(config.model, stages)  # which else depends on the length of sequences
    pipeline = replace(config.parallel.pipeline, split=split)
    return replace(config, parallel=replace(config.parallel, pipeline=pipeline)), draw(
        st.sampled_from(known_clusters())
    )


@st.composite
def drawn_in_turns(draw: st.DrawFn) -> tuple[Config, str]:
    """One whose passes take turns, with any shared expert and dense layers."""
    dp, pp, ep, m = *(draw(st.sampled_from([2, 4])) for _ in range(3)), draw(st.integers(4, 20))
    values = {
        "model.layers": 2 * pp + draw(st.integers(0, 6)),
        "model.width": 128 * draw(st.integers(2, 48)),
        "model.heads": 4,
        "model.kv_heads": 4,
        "model.ffn": 512,
        "model.sequence_length": 2 ** draw(st.integers(7, 13)),
        "model.experts.count": 16,
        "model.experts.active": draw(st.integers(1, 8)),
        "model.experts.width": 64 * draw(st.integers(1, 30)),
        "model.experts.shared_width": draw(st.sampled_from(["null", 512])),
        "model.experts.first_dense": draw(st.integers(0, 3)),
        "parallel.experts.buffers": draw(st.sampled_from(["exact", "worst_case"])),
        "parallel.pp": pp,
        "parallel.dp_shard": dp * ep,
        "parallel.ep": ep,
        "parallel.pipeline.schedule": "dualpipev",
        "parallel.data.mode": draw(st.sampled_from(["ddp", "zero1", "zero2", "zero3"])),
        "batch.micro": 1,
        "batch.global": dp * ep * m,
        "train.recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "run.device": "cuda",
    }
    config = made([f"{key}={value}" for key, value in values.items()], dp * ep * pp)
    return config, draw(st.sampled_from(known_clusters()))


def made(keys: list[str], gpus: int) -> Config:
    """The configuration with these keys; one that cannot run is not looked at."""
    try:
        return check(load([], keys), gpus)
    except InputError:
        assume(False)
        raise


def seconds(config: Config, cluster: Cluster | str) -> float:
    timer = TIMERS[cluster] if isinstance(cluster, str) else Timer(cluster)
    return predict(config, timer.cluster, timer).seconds


def tied_matrix_on_a_rank_with_both_ends() -> tuple[Config, str]:
    """A step that is mostly exchanges of both copies of a tied matrix, and of the norm, a group of its own."""
    keys = "layers=4 width=2304 heads=4 kv_heads=4 head_width=64 ffn=1024 vocab_size=15552 sequence_length=512"
    layout = "pp=2 dp_replicate=2 dp_shard=4 tp=4 pipeline.schedule=zbv pipeline.split=[1,1,2,0] data.mode=zero2"
    others = [
        "model.tie_embeddings=true",
        "batch.micro=1",
        "batch.global=80",
        "train.precision=bf16",
        "run.device=cuda",
    ]
    keys_of = [f"model.{key}" for key in keys.split()] + [f"parallel.{key}" for key in layout.split()]
    return check(load([], keys_of + others), 64), "a100_80gb"


def experts_that_muon_takes_to_their_owners() -> tuple[Config, str]:
    """A step that is mostly Muon's exchanges, in which ranks that hold experts whole send more than owners get."""
    keys = "layers=1 width=3200 heads=2 kv_heads=1 head_width=64 ffn=256 vocab_size=256 sequence_length=128"
    keys = f"{keys} experts.count=32 experts.active=2 experts.width=1536"
    layout = "dp_replicate=2 dp_shard=4 cp=2 ep=8 data.mode=zero1"
    others = ["batch.micro=1", "batch.global=8", "optim.name=muon", "train.precision=bf16", "run.device=cuda"]
    keys_of = [f"model.{key}" for key in keys.split()] + [f"parallel.{key}" for key in layout.split()]
    return check(load([], keys_of + others), 16), "l40s"


def a_matrix_that_tp_does_not_split_and_muon_takes_to_its_owner() -> tuple[Config, str]:
    """A step that is mostly the exchange back of the matrix of multi-token prediction, which all ranks have whole."""
    keys = "layers=1 width=512 heads=2 kv_heads=2 head_width=128 ffn=512 vocab_size=512 sequence_length=128 mtp.depth=1"
    layout = "dp_replicate=2 dp_shard=4 tp=2 data.mode=ddp"
    others = ["batch.micro=1", "batch.global=8", "optim.name=muon", "train.precision=bf16", "run.device=cuda"]
    keys_of = [f"model.{key}" for key in keys.split()] + [f"parallel.{key}" for key in layout.split()]
    return check(load([], keys_of + others), 16), "l40s"


@settings(max_examples=DRAWN, deadline=None)
@given(st.one_of(drawn(), drawn_in_turns()), st.integers(0, 3))
@example(a_matrix_that_tp_does_not_split_and_muon_takes_to_its_owner(), 0)
@example(tied_matrix_on_a_rank_with_both_ends(), 0)
@example(experts_that_muon_takes_to_their_owners(), 0)
def test_no_step_is_faster_than_what_it_sends_on_any_link(case: tuple[Config, str], rank: int) -> None:
    config, timer = case[0], TIMERS[case[1]]
    found = predict(config, timer.cluster, timer)
    pipeline_rank = rank % config.parallel.pp
    assert max(busy_links(found, timer.net, pipeline_rank)) <= found.seconds * ROUNDING
    for link, moved in bytes_sent(found, pipeline_rank).items():
        assert moved / link.bandwidth <= found.seconds * ROUNDING


def busy_links(found: Prediction, net: Net, pipeline_rank: int) -> Links:
    """Seconds of a step for which links are busy with all that a rank on a pipeline rank sends."""
    sent = [
        times(net.links(kind, each.bytes, groups(found.config)[axis]), each.times)
        for axis, mine in by_axis(found, pipeline_rank).items()
        for kind, each in mine
    ]
    return total([net.nothing, *sent])


def bytes_sent(found: Prediction, pipeline_rank: int) -> dict[Link, float]:
    """Bytes that a rank sends over each kind of link at least: without any constant or start."""
    config, cluster = found.config, found.cluster
    rank = config.parallel.layout.rank(pp=pipeline_rank, dp_replicate=0, dp_shard=0, cp=0, tp=0)
    sent = dict.fromkeys((*(level.link for level in cluster.levels), cluster.network), 0.0)
    for each in step_traffic(found.plan, rank, micro_batches(config)):
        if each.kind == "receive" or each.axis in ("world", "stage") or each.ranks == 1:
            continue
        group, near, link = groups(config)[each.axis], 1, cluster.network
        for level in cluster.levels:  # the outermost link that the group spans, and the ranks that are nearer than that
            if group.size <= level.gpus // group.stride:
                link = level.link
                break
            near = max(near, level.gpus // group.stride)
        if each.kind == "send":
            sent[link] += each.total
            continue
        moved = each.total * (group.size - 1) / group.size * (2 if each.kind == "all_reduce" else 1)
        further = (group.size - near) / (group.size - 1)
        sent[link] += moved * further if each.kind == "all_to_all" else moved / near
    return sent


def better(link: Link) -> Link:
    return replace(link.faster(2), latency=link.latency / 2)


def hotter(gpu: Gpu, factor: float) -> Gpu:
    return replace(gpu, peak={name: factor * value for name, value in gpu.peak.items()})


BETTER: dict[str, Callable[[Cluster], Cluster]] = {
    "network": lambda it: replace(it, network=better(it.network)),
    "node": lambda it: replace(it, levels=tuple(Level(level.gpus, better(level.link)) for level in it.levels)),
    "memory": lambda it: replace(it, gpu=replace(it.gpu, bandwidth=1.5 * it.gpu.bandwidth)),
    "power": lambda it: replace(it, gpu=replace(it.gpu, power=1.3 * it.gpu.power)),
    "peak": lambda it: replace(it, gpu=hotter(it.gpu, 1.5)),
    "twice the peak": lambda it: replace(it, gpu=hotter(it.gpu, 2)),
    "twice the GPU": lambda it: replace(
        it,
        gpu=replace(
            hotter(it.gpu, 2),
            measured={name: 2 * value for name, value in it.gpu.measured.items()},
            bandwidth=2 * it.gpu.bandwidth,
        ),
    ),
    "host": lambda it: replace(it, gpu=replace(it.gpu, host=2 * it.gpu.host)),
}


@settings(max_examples=DRAWN, deadline=None)
@given(st.one_of(drawn(), drawn_in_turns()), st.sampled_from(sorted(BETTER)))
def test_better_hardware_makes_no_step_slower(case: tuple[Config, str], what: str) -> None:
    config, cluster = case
    assert seconds(config, BETTER[what](load_cluster(cluster))) <= seconds(config, cluster) * ROUNDING


@settings(max_examples=DRAWN, deadline=None)
@given(drawn(), st.sampled_from(["sequence", "batch", "an odd length"]))
def test_fewer_tokens_make_no_step_slower(case: tuple[Config, str], what: str) -> None:
    config, cluster = case
    length, batch, parts = config.model.sequence_length, config.batch, config.parallel.sequence_parts
    fewer = {
        "sequence": replace(config, model=replace(config.model, sequence_length=length // 2)),
        "an odd length": replace(config, model=replace(config.model, sequence_length=length - parts)),
        "batch": replace(config, batch=replace(batch, global_=batch.global_ // 2)),
    }[what]
    if what == "an odd length":  # one that pieces do not divide is gathered whole, and waited for
        assume(Sizes(config).pieces == Sizes(fewer).pieces)
    if config.parallel.pipeline.schedule == "dualpipev":  # with fewer micro-batches it is another schedule
        assume(micro_batches(fewer) >= 2 * config.parallel.pp)
    window = config.model.attention.window
    if window is not None:  # a ring fetches what windows reach, and otherwise sends everything around
        shorter = fewer.model.sequence_length
        assume((window < length) == (window < shorter))
        chunk, small = (max(sequence // (2 * config.parallel.cp), 1) for sequence in (length, shorter))
        assume(-(-(window - 1) // chunk) == -(-(window - 1) // small))  # more chunks are more messages
    try:
        fewer = check(fewer, config.parallel.layout.world_size)
    except InputError:
        assume(False)
    assert seconds(fewer, cluster) <= seconds(config, cluster) * ROUNDING


@settings(max_examples=DRAWN, deadline=None)
@given(drawn_in_turns(), st.integers(0, 3), st.booleans())
def test_passes_in_turns_take_no_longer_than_alone(case: tuple[Config, str], rank: int, last: bool) -> None:
    """Nor are they faster than what they compute."""
    found = predict(case[0], TIMERS[case[1]].cluster, TIMERS[case[1]])
    mine = found.plan.stages_of(rank % case[0].parallel.pp)
    for one, other in (mine, mine[::-1]):
        first, second = found.stages[one], found.stages[other]
        both = first.forward + second.backward
        assert first.beside(second).total <= both.total * ROUNDING
        with_reduction = first.beside(second, True, last).total
        assert first.beside(second).total <= with_reduction * ROUNDING
        assert with_reduction <= (both.total + second.longer[last]) * ROUNDING
        assert sum(getattr(both, kind) for kind in ("products", "attention", "passes")) <= with_reduction * ROUNDING


@settings(max_examples=DRAWN, deadline=None)
@given(drawn())
def test_what_recomputes_more_is_never_faster(case: tuple[Config, str]) -> None:
    config, cluster = case
    modes = ("none", "selective", "full")
    each = [seconds(replace(config, train=replace(config.train, recompute=mode)), cluster) for mode in modes]
    assert each[0] <= each[1] * ROUNDING
    assert each[1] <= each[2] * ROUNDING
