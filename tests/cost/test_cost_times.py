"""Times of kernels and collectives: what holds of them whatever the constants are."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config.layers import layer_kinds
from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.cost.cluster import Level, Link, known_clusters, load_cluster
from megalite.cost.constants import FITTED_CONSTANTS
from megalite.cost.kernels import PEAK_SHARE, Kernels
from megalite.cost.layer import LayerModel, LayerTime
from megalite.cost.network import Group, Net
from megalite.cost.program import MEGALITE
from megalite.cost.share import share_of
from megalite_tools.plan.published.work import Work

H100 = load_cluster("h100_sxm")
KERNELS = Kernels(H100.gpu)
SIZES = st.integers(1, 2048).map(lambda number: 8 * number)


@given(SIZES, SIZES, SIZES, st.sampled_from(known_clusters()))
def test_no_product_is_faster_than_the_gpu_can_be(m: int, n: int, k: int, name: str) -> None:
    gpu = load_cluster(name).gpu
    time = Kernels(gpu).matmul(m, n, k)
    assert time >= 2 * m * n * k / gpu.peak["bf16"]
    assert time >= 2 * (m * k + k * n + m * n) / gpu.bandwidth


@given(SIZES, SIZES, SIZES, st.integers(1, 4))
def test_more_work_takes_no_less_time(m: int, n: int, k: int, times: int) -> None:
    time = KERNELS.matmul(m, n, k)
    assert KERNELS.matmul(m * times, n, k) >= time
    assert KERNELS.matmul(m, n * times, k) >= time
    assert KERNELS.matmul(m, n, k * times) >= time
    assert KERNELS.matmul(m, n, k, batch=times) >= time


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
def test_no_layer_nor_head_is_faster_than_its_precision(precision: str) -> None:
    work = Work(1, 4096, 32, 8, 128, 14336, 32000, 8192, precision=precision)  # type: ignore[arg-type]
    model, peak = LayerModel(work.share, MEGALITE, H100), H100.gpu.peak[precision]
    attention = 4 * work.tokens * work.sequence / 2 * work.q
    layer, (forward, backward, _) = model.layer(), model.head()
    assert layer.forward.total > (2 * work.tokens * work.layer_parameters + attention) / peak
    assert layer.backward.total > (4 * work.tokens * work.layer_parameters + 2 * attention) / peak
    least = 6 * work.tokens * work.width * work.vocab / peak
    assert forward + backward > least
    forward, backward, _ = LayerModel(replace(work.share, predicted=3), MEGALITE, H100).head()
    assert forward + backward > 3 * least


@pytest.mark.parametrize("tp", [1, 8])
def test_graphs_leave_the_host_nothing_to_launch(tp: int) -> None:
    def timed(graphs: bool) -> LayerTime:
        overrides = ["model.sequence_length=512", f"parallel.tp={tp}", f"train.cuda_graph={graphs}"]
        config = check(load(["llama3.2_1b"], overrides), tp)
        return LayerModel(share_of(config, layer_kinds(config.model)[0]), MEGALITE, H100).layer()

    before, after = timed(False).forward, timed(True).forward
    assert before.host > 1e-5
    assert after.host == pytest.approx(0, abs=1e-12)
    assert after.tensor == before.tensor
    assert (after.tensor > 0) == (tp > 1)
    assert after.total == pytest.approx(before.total - before.host)


def test_large_products_run_at_the_rate_that_clocks_allow() -> None:
    size = 16384
    rate = 2 * size**3 / KERNELS.matmul(size, size, size)
    assert 0.9 * KERNELS.rate("bf16") < rate <= KERNELS.rate("bf16")
    assert KERNELS.rate("bf16") < H100.gpu.measured["bf16"]


def test_a_card_with_less_power_is_slower() -> None:
    weaker = Kernels(replace(H100.gpu, power=500.0))
    assert weaker.rate("bf16") < KERNELS.rate("bf16")


@given(st.sampled_from(known_clusters()), st.sampled_from(["bf16", "fp8"]), st.floats(0.05, 20), st.floats(1, 8))
def test_rates_are_bounded_and_grow_with_the_peak_and_with_power(
    name: str, precision: str, power: float, more: float
) -> None:
    """Whatever the file says: one with a tenth of its watts has slow products, not any that take no time."""
    gpu = load_cluster(name).gpu
    gpu = replace(gpu, power=power * gpu.power)
    peak = {each: more * value for each, value in gpu.peak.items()}
    for measured in ({}, gpu.measured):
        before = Kernels(replace(gpu, measured=measured)).rate(precision)
        best = measured.get(precision, PEAK_SHARE * gpu.peak.get(precision, gpu.peak["bf16"]))
        assert 0 < before <= best
        assert Kernels(replace(gpu, measured=measured, peak=peak)).rate(precision) >= before * (1 - 1e-12)
        assert Kernels(replace(gpu, measured=measured, power=more * gpu.power)).rate(precision) >= before * (1 - 1e-12)


def test_sizes_that_cannot_be_loaded_in_vectors_take_longer() -> None:
    assert KERNELS.matmul(4096, 4096, 4095) > 1.5 * KERNELS.matmul(4096, 4096, 4096)


NET = Net(H100)


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (Group(8, 1), 361.4e9 * FITTED_CONSTANTS.node),  # in a node
        (Group(2, 4), 361.4e9 * FITTED_CONSTANTS.node),
        (Group(16, 8), 50e9 * FITTED_CONSTANTS.network),  # a rank of every node
        (Group(16, 4), 2 * 50e9 * FITTED_CONSTANTS.network),  # two ranks of every node, each with an adapter
        (Group(64, 1), min(361.4e9 * FITTED_CONSTANTS.node, 8 * 50e9 * FITTED_CONSTANTS.network)),
    ],
)
def test_a_group_runs_at_the_rate_of_what_it_spans(group: Group, expected: float) -> None:
    assert NET.bandwidth(group) == pytest.approx(expected)


def test_boards_in_a_node_are_crossed_by_as_many_lanes_as_they_have_members() -> None:
    boards = replace(H100, levels=(Level(4, Link(300e9, 7e-6)), Level(8, Link(25e9, 7e-6))))
    assert Net(boards).bandwidth(Group(4, 1)) == pytest.approx(0.8 * 300e9 * FITTED_CONSTANTS.node)
    assert Net(boards).bandwidth(Group(8, 1)) == pytest.approx(4 * 0.8 * 25e9 * FITTED_CONSTANTS.node)
    assert Net(boards).bandwidth(Group(2, 4)) == pytest.approx(0.8 * 25e9 * FITTED_CONSTANTS.node)


def test_an_all_to_all_and_messages_leave_a_node_by_each_gpus_own_adapter() -> None:
    adapter, inside = 50e9 * FITTED_CONSTANTS.network, 361.4e9 * FITTED_CONSTANTS.node
    whole, group = 1e9, Group(16, 1)  # eight of 16 equal parts are for the other node
    starts = NET.collective("all_to_all", 0.0, group)
    assert NET.collective("all_to_all", whole, group) - starts == pytest.approx(whole * 8 / 16 / adapter)
    assert NET.links("all_to_all", whole, group) == pytest.approx(
        (whole * 7 / 16 / inside + starts, whole / 2 / adapter + starts)
    )
    assert NET.bandwidth(group, "all_to_all") < NET.bandwidth(group) / 3
    assert NET.bandwidth(Group(8, 1), "all_to_all") == NET.bandwidth(Group(8, 1))
    assert NET.bandwidth(group, "messages") == pytest.approx(adapter)  # eight ranks nearer send none of its bytes
    assert NET.transfer(whole, group) == pytest.approx(whole / adapter + NET.transfer(0.0, group))
    assert NET.transfer(whole, Group(4, 4)) == NET.transfer(whole, group)  # stages of four ranks: every other message
    assert NET.transfer(whole, Group(2, 4)) < NET.transfer(whole, group) / 5


def test_an_all_to_all_starts_as_a_message_does_whatever_the_number_of_ranks() -> None:
    for size in (2, 8, 16, 64):
        start = NET.collective("all_to_all", 0.0, Group(size, 1))
        assert start == NET.transfer(0.0, Group(size, 1))
        assert start <= NET.collective("all_gather", 0.0, Group(size, 1))
    assert NET.collective("all_to_all", 0.0, Group(64, 1)) == NET.collective("all_to_all", 0.0, Group(16, 1))


def test_a_link_is_busy_as_long_as_its_slowest_collective() -> None:
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        for group in (Group(8, 1), Group(16, 8), Group(64, 1)):
            links = NET.links(kind, 1e8, group)  # type: ignore[arg-type]
            assert max(links) == pytest.approx(NET.collective(kind, 1e8, group))  # type: ignore[arg-type]
            assert (links[0] > 0, links[1] > 0) == (group.stride < 8, group.size * group.stride > 8)
    assert NET.links("all_gather", 1e8, Group(1, 1)) == NET.nothing


def test_gradients_of_keys_and_values_go_round_a_ring_in_float32() -> None:
    work = Work(1, 256, 64, 64, 128, 256, 1024, 65536, cp=2)
    model = LayerModel(
        work.share, MEGALITE, replace(H100, levels=(Level(1, Link(1e6, 1e-6)),), network=Link(1e6, 1e-6))
    )
    there, back = (each.context + each.attention for each in (model.layer().forward, model.layer().backward))
    assert back == pytest.approx(3 * there, rel=1e-2)  # keys and values again, and twice their bytes


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    group = Group(8, 1)
    parts = sum(NET.collective(kind, 1e8, group) for kind in ("all_gather", "reduce_scatter"))  # type: ignore[arg-type]
    assert NET.collective("all_reduce", 1e8, group) == pytest.approx(parts)
    assert NET.collective("all_reduce", 1e8, Group(1, 1)) == 0


@given(st.integers(2, 2048), st.integers(1, 64), st.floats(1, 1e12))
def test_collectives_take_longer_for_more_bytes_and_more_ranks_of_a_ring(size: int, stride: int, whole: float) -> None:
    group = Group(size, stride)
    time = NET.collective("all_gather", whole, group)
    assert time > 0
    assert NET.collective("all_gather", 2 * whole, group) >= time


def at_tp_2(**keys: object) -> tuple[LayerTime, float]:
    """A layer of the 8B model whose collectives start at once and slow no product, and seconds of one collective."""
    values = {"parallel.tp": 2, "batch.micro": 1, "train.precision": "bf16", "run.device": "cuda", **keys}
    config = check(load(["llama3_8b"], [f"{key}={value}" for key, value in values.items()]), 2)
    constants = replace(FITTED_CONSTANTS, launch=0.0, hop=0.0, overlap=0.0)
    share = share_of(config, layer_kinds(config.model)[0])
    model = LayerModel(share, MEGALITE, H100, constants)
    return model.layer(), model.net.collective("all_gather", share.element * share.tokens * share.width, model.tp)


@pytest.mark.parametrize(
    ("keys", "forward", "backward"),
    [
        ({"model.sequence_length": 8192}, 4 / 4, 2 / 4),
        ({"model.sequence_length": 4096}, 4 / 2, 2 / 2),
        ({"model.sequence_length": 8190}, 4, 2),  # 4,095 positions of a rank are no pieces
        ({"model.sequence_length": 2048}, 4, 2),
        ({"model.sequence_length": 8192, "train.compile": "true"}, 4, 6),
    ],
    ids=str,
)
def test_a_layer_waits_for_as_many_collectives_as_a_run_does(
    keys: dict[str, object], forward: float, backward: float
) -> None:
    """Of ten; the counts of eager runs are those of `megalite_tools.bench.step_counts.exposed_collectives`."""
    layer, whole = at_tp_2(**keys)
    assert layer.forward.tensor == pytest.approx(forward * whole)
    assert layer.backward.tensor == pytest.approx(backward * whole)
    assert layer.inputs.tensor == pytest.approx((backward + 4 if backward < 6 else 6) * whole)  # halves hide nothing


def test_of_latent_attention_latents_are_gathered() -> None:
    latent = "{query_rank: 1024, key_rank: 512, value_width: 128}"
    heads = {"model.kv_heads": 32, "model.head_width": 192, "model.rotary_width": 64}
    layer, whole = at_tp_2(**heads, **{"model.attention.latent": latent})
    assert layer.forward.tensor == pytest.approx((3 + (1024 + 512 + 64) / 4096) / 4 * whole)
    assert layer.backward.tensor == pytest.approx(2 / 4 * whole)


def test_for_experts_ranks_gather_nothing_but_what_attention_and_a_shared_expert_take() -> None:
    """Each of both has half of a dense layer's collectives."""
    experts = {"model.experts.count": 8, "model.experts.width": 1024, "parallel.ep": 2, "parallel.dp_shard": 1}
    for shared, halves in (("null", 1), (2048, 2)):
        layer, whole = at_tp_2(**experts, **{"model.experts.shared_width": shared})
        assert layer.forward.tensor == pytest.approx(halves * 2 / 4 * whole)
        assert layer.backward.tensor == pytest.approx(halves / 4 * whole)


def test_full_recompute_sends_rows_to_experts_once_more_and_results_back_where_a_program_does() -> None:
    keys = ["parallel.dp_shard=4", "parallel.ep=4", "batch.micro=1", "train.precision=bf16"]
    experts = ["model.experts.count=8", "model.experts.width=1024", "train.recompute=full"]
    config = check(load(["llama3_8b"], ["run.device=cuda", *keys, *experts]), 4)
    share = share_of(config, layer_kinds(config.model)[0], "full")
    for program, ways in ((MEGALITE, 3), (replace(MEGALITE, remade_results=True), 4)):
        layer = LayerModel(share, program, H100).layer()
        assert layer.forward.experts > 0
        assert layer.backward.experts == pytest.approx(ways / 2 * layer.forward.experts)


def test_kernels_that_pad_values_take_as_long_as_for_values_that_are_as_wide_as_keys() -> None:
    def attention(width: int, **more: object) -> float:
        latent = f"{{query_rank: 1024, key_rank: 512, value_width: {width}}}"
        heads = {"model.kv_heads": 32, "model.head_width": 192, "model.rotary_width": 64}
        return at_tp_2(**heads, **{"model.attention.latent": latent}, **more)[0].forward.attention

    padded = {"kernels.attention": "flash"}
    assert attention(128, **padded) == attention(192, **padded)
    assert attention(128) == pytest.approx((192 + 128) / (192 + 192) * attention(192))


def test_collectives_beside_products_slow_them() -> None:
    """Each byte that is not waited for, in its share; and on slow links, products hide no more than they take."""
    config = check(load(["llama3_8b"], ["parallel.tp=2", "batch.micro=1", "train.precision=bf16"]), 2)
    share, constants = share_of(config, layer_kinds(config.model)[0]), replace(FITTED_CONSTANTS, launch=0.0, hop=0.0)
    tensor = {}
    for overlap in (0.0, 0.25):
        model = LayerModel(share, MEGALITE, H100, replace(constants, overlap=overlap))
        tensor[overlap] = sum(each.tensor for each in (model.layer().forward, model.layer().backward))
    whole = model.net.collective("all_gather", share.element * share.tokens * share.width, model.tp)
    assert tensor[0.25] - tensor[0.0] == pytest.approx(0.25 * 8.5 * whole)
    slow = LayerModel(share, MEGALITE, replace(H100, levels=(Level(8, Link(1e9, 1e-6)),)), constants)
    waiting = LayerModel(share, replace(MEGALITE, overlaps=False), slow.cluster, constants)
    products = 3 * waiting.layer().forward.products
    for model in (slow, waiting):
        layer = model.layer()
        tensor[model is slow] = layer.forward.tensor + layer.backward.tensor
    assert tensor[False] - products < tensor[True] < tensor[False] - products / 2
