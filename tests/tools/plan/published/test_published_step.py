"""The time of a step: what follows from layouts and settings."""

from dataclasses import replace

import pytest
from published_cases import LLAMA3_8B

from megalite.cost.cluster import load_cluster
from megalite.cost.layer import LayerModel
from megalite.cost.network import Group
from megalite_tools.plan.published.profiles import PROFILES
from megalite_tools.plan.published.step import StepModel, StepTime
from megalite_tools.plan.published.work import Work

CLUSTER = load_cluster("h100_sxm")
PROGRAM = PROFILES["megatron_2025"]
LLAMA = replace(LLAMA3_8B, micro_batches=4)


def step(work: Work, program: str = "megatron_2025", cluster: str = "h100_sxm") -> StepTime:
    return StepModel(work, PROFILES[program], load_cluster(cluster)).step()


def test_a_step_is_the_sum_of_its_parts() -> None:
    found = step(replace(LLAMA, pp=4, tp=2, dp=4, mode="zero1"))
    assert found.total == pytest.approx(sum(vars(found).values()))
    assert min(vars(found).values()) > 0


def test_a_pipeline_of_equal_stages_has_the_bubble_of_the_formula() -> None:
    """The embedding and the head, which only the ends have, are made small."""
    model = StepModel(replace(LLAMA, pp=4, micro_batches=8, vocab=8, mode="ddp"), PROGRAM, CLUSTER)
    found = model.step()
    assert found.bubble / found.pipeline == pytest.approx(3 / 8, rel=0.01)
    virtual = StepModel(replace(LLAMA, pp=4, virtual=2, micro_batches=8, vocab=8, mode="ddp"), PROGRAM, CLUSTER).step()
    assert virtual.bubble == pytest.approx(found.bubble / 2)
    assert virtual.transfers > found.transfers


def test_recompute_costs_what_it_makes_again() -> None:
    times = {mode: step(replace(LLAMA, recompute=mode)).pipeline for mode in ("none", "selective", "full")}  # type: ignore[arg-type]
    assert times["none"] < times["selective"] < times["full"]
    assert 1.2 < times["full"] / times["none"] < 4 / 3


def test_sharded_weights_are_gathered_beside_compute_where_that_takes_longer() -> None:
    alone = step(replace(LLAMA, dp=1, mode="zero3"))
    node = step(replace(LLAMA, dp=8, mode="zero3"))
    assert alone.pipeline < node.pipeline < 1.25 * alone.pipeline
    small = replace(LLAMA, sequence=128, dp=64, mode="zero3")
    assert step(small).pipeline > 2 * step(replace(small, dp=1)).pipeline  # too little compute to hide behind


def test_tensor_parallelism_is_worth_less_than_its_ranks() -> None:
    times = [step(replace(LLAMA, tp=tp)).pipeline for tp in (1, 2, 4, 8)]
    for tp, time in zip((2, 4, 8), times[1:], strict=True):
        assert times[0] / tp < time < times[0]


def test_small_layers_take_as_long_as_the_host_needs_to_launch_them() -> None:
    tiny = replace(LLAMA, width=256, heads=4, kv_heads=4, head_size=64, ffn=512, vocab=512, sequence=128)
    layer = StepModel(tiny, PROFILES["megatron_deepspeed"], CLUSTER).parts.layer()
    assert layer.forward.total == pytest.approx(PROFILES["megatron_deepspeed"].host, rel=0.01)


def test_fp8_makes_products_faster_and_nothing_else() -> None:
    wide, narrow = StepModel(LLAMA, PROGRAM, CLUSTER), StepModel(replace(LLAMA, precision="fp8"), PROGRAM, CLUSTER)
    assert narrow.parts.layer().forward.total < wide.parts.layer().forward.total
    assert narrow.parts.head() == wide.parts.head()


@pytest.mark.parametrize("faster", ["h100_sxm", "b200"])
def test_a_faster_gpu_is_faster(faster: str) -> None:
    assert step(LLAMA, cluster=faster).total < step(LLAMA, cluster="a100_80gb").total


def test_states_that_a_node_shards_are_gathered_in_it() -> None:
    """Among 512 ranks. What a rank updates grows, and where gradients are scattered in the node, their parts are summed
    over the nodes."""
    work = replace(LLAMA, dp=512, mode="zero1")
    whole, node = step(work, "internevo"), step(replace(work, shards=8), "internevo")
    assert node.data < whole.data
    assert node.optimizer == pytest.approx(64 * whole.optimizer)
    model = StepModel(replace(work, shards=8), PROGRAM, CLUSTER)
    count, parameters = work.layers, work.layers * work.layer_parameters + work.vocab * work.width
    parts = (
        model.net.collective("reduce_scatter", 4 * parameters / count, Group(8, 1)),
        model.net.collective("all_reduce", 4 * parameters / count / 8, Group(64, 8)),
        model.net.collective("all_gather", 2 * parameters / count, Group(8, 1)),
    )
    assert model.step().data == pytest.approx(count * sum(parts))


def test_broadcasts_by_each_rank_start_as_often_as_there_are_ranks() -> None:
    model = StepModel(replace(LLAMA, dp=512, mode="zero1"), PROFILES["internevo"], CLUSTER)
    group = model.shards
    alone = model._broadcasts(0.0, group)
    assert alone == pytest.approx(512 * model.net.collective("all_gather", 0.0, group))
    assert model._broadcasts(1e9, group) - alone == pytest.approx(1e9 / model.net.bandwidth(group))
    assert step(replace(LLAMA, dp=512, mode="zero1"), "internevo").data > alone


def test_casts_to_8_bits_count_for_each_element_and_gathers_for_half_their_bytes() -> None:
    work = replace(LLAMA, tp=8, precision="fp8", mode="zero3", dp=8)
    program = PROFILES["torchtitan_compiled"]
    plain = replace(program, casts=(0, 0), gathers_fp8=False)
    found, without = (StepModel(work, each, CLUSTER).parts.layer() for each in (program, plain))
    width, q, k, f = work.width, work.q / 8, work.k / 8, work.ffn / 8
    inputs, results = width + q + width + f, q + 2 * k + width + 2 * f + width
    kernels = StepModel(work, program, CLUSTER).kernels
    cast = kernels.passes(program.casts[0] * work.tokens * inputs)
    assert found.forward.passes - without.forward.passes == pytest.approx(cast)
    cast = kernels.passes(program.casts[1] * work.tokens * (inputs + results))
    assert found.backward.passes - without.backward.passes == pytest.approx(cast)
    assert found.forward.tensor == pytest.approx(0.75 * without.forward.tensor)
    assert found.backward.tensor == pytest.approx(2.5 / 3 * without.backward.tensor)
    wide = replace(work, precision="bf16")
    assert StepModel(wide, program, CLUSTER).parts.layer() == StepModel(wide, plain, CLUSTER).parts.layer()


def test_whole_gradients_are_reduced_in_buckets_and_scattered_ones_apart() -> None:
    """There are as many collectives as buckets of 16-bit gradients; more of them start later."""
    work, program = replace(LLAMA, dp=512), replace(PROFILES["nanotron"], reduces_beside=False)
    parameters = work.layers * work.layer_parameters + work.vocab * work.width
    count = -(-2 * parameters // (25 * 2**20))
    model = StepModel(replace(work, mode="ddp"), program, CLUSTER)
    expected = count * model.net.collective("all_reduce", 4 * parameters / count, model.data)
    assert model.step().data == pytest.approx(expected)
    sharded = replace(work, mode="zero1")
    plain = StepModel(sharded, replace(program, buckets=None), CLUSTER).step()
    assert StepModel(sharded, program, CLUSTER).step() == plain


def test_logits_that_all_ranks_have_cost_as_much_as_without_tensor_parallelism() -> None:
    plain = PROFILES["scaling"]
    work = replace(LLAMA, tp=8, mode="zero1")
    whole, parts = (
        LayerModel(work.share, replace(plain, gathers_logits=gathers), CLUSTER).head() for gathers in (True, False)
    )
    more = whole[0] + whole[1] - parts[0] - parts[1]
    model = LayerModel(work.share, plain, CLUSTER)
    logits = work.tokens * work.vocab
    gathered = model.net.collective("all_gather", 2 * logits, Group(8, 1))
    assert more == pytest.approx(model.kernels.passes(plain.logit * logits * 7 / 8) + gathered)


def test_serial_transfers_take_both_directions_with_each_neighbour() -> None:
    plain = replace(PROFILES["scaling"], serial=False)
    for pp, times in ((2, 2), (4, 4)):
        work = replace(LLAMA, pp=pp, mode="zero1")
        serial, batched = (StepModel(work, replace(plain, serial=each), CLUSTER).step() for each in (True, False))
        ends = 2 * (pp - 1)  # of transfers that fill and drain the pipeline
        assert serial.transfers / batched.transfers == pytest.approx((4 * times + ends) / (4 + ends))


def test_a_host_that_waits_does_so_once_more_where_layers_are_recomputed() -> None:
    program = replace(PROFILES["scaling"], waits=0.001)
    for recompute, backward in (("none", 0.0), ("full", 0.001)):
        work = replace(LLAMA, recompute=recompute)
        with_, without = (
            LayerModel(work.share, replace(program, waits=each), CLUSTER).layer() for each in (0.001, 0.0)
        )
        assert with_.forward.total - without.forward.total == pytest.approx(0.001)
        assert with_.backward.total - without.backward.total == pytest.approx(backward)
