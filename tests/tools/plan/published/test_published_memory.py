"""Memory of other programs: what follows from sharding, layouts and recompute, and from figures that papers print."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from published_cases import LLAMA3_8B

from megalite.config.parallel_schema import DataMode
from megalite_tools.plan.published.memory import NON_TENSOR_BYTES, RESERVATION_FACTOR, counted, fits, layer_kept, memory
from megalite_tools.plan.published.profiles import PROFILES, Profile
from megalite_tools.plan.published.work import Recompute, Work

MEGATRON = PROFILES["megatron_2025"]
LLAMA = replace(LLAMA3_8B, dp=8, mode="zero1", micro_batches=8)
PARAMETERS = LLAMA.layers * LLAMA.layer_parameters + 2 * LLAMA.vocab * LLAMA.width
works = st.builds(
    replace,
    st.just(LLAMA),
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 3, 4, 8]),
    virtual=st.sampled_from([1, 2, 4]),
    dp=st.integers(1, 64),
    cp=st.sampled_from([1, 2, 4]),
    micro=st.integers(1, 8),
    micro_batches=st.integers(1, 32),
    recompute=st.sampled_from(["none", "selective", "full"]),
    mode=st.sampled_from(["ddp", "zero1", "zero2", "zero3"]),
)
programs = st.sampled_from([PROFILES[name] for name in sorted(PROFILES)])


@pytest.mark.parametrize(
    ("mode", "bytes_of_a_parameter"),
    [("ddp", 2 + 4 + 12), ("zero1", 2 + 4 + 12 / 8), ("zero3", (4 + 4 + 8) / 8)],
)
def test_states_by_sharding(mode: DataMode, bytes_of_a_parameter: float) -> None:
    found = memory(replace(LLAMA, mode=mode), MEGATRON)
    states = found.weights + found.gradients + found.optimizer
    assert states == pytest.approx(bytes_of_a_parameter * PARAMETERS)
    assert (found.gathered > 0) == (mode == "zero3")


def test_states_are_divided_among_the_ranks_that_share_them() -> None:
    found, node = (memory(replace(LLAMA, dp=64, shards=shards), MEGATRON) for shards in (None, 8))
    assert node.optimizer == pytest.approx(8 * found.optimizer) == pytest.approx(12 / 8 * PARAMETERS)


def test_an_optimizer_may_have_the_lower_half_of_float32_weights_only() -> None:
    assert memory(LLAMA, PROFILES["nemo_2024"]).optimizer == pytest.approx(10 / 8 * PARAMETERS)


def test_zero2_shards_gradients() -> None:
    found = memory(replace(LLAMA, mode="zero2"), MEGATRON)
    assert found.gradients == pytest.approx(4 * PARAMETERS / 8 + 2 * LLAMA.layer_parameters)


GPT = Work(
    layers=48,
    width=6144,
    heads=64,
    kv_heads=64,
    head_size=96,
    ffn=24576,
    vocab=51200,
    sequence=2048,
    gated=False,
    tied=True,
    tp=8,
    micro=4,
    mode="ddp",
)


@pytest.mark.parametrize(
    ("program", "recompute", "expected"),
    [
        ("megatron_2021", "none", 10 + 24 / 8 + 5 * 64 * 2048 / (6144 * 8)),  # equation 2 of arXiv 2205.05198
        ("megatron_2022", "none", (34 + 5 * 64 * 2048 / 6144) / 8),  # equation 4
        ("megatron_2022", "selective", 34 / 8),  # equation 6
    ],
)
def test_a_layer_keeps_what_korthikanti_et_al_count(program: str, recompute: Recompute, expected: float) -> None:
    work = replace(GPT, recompute=recompute)
    assert layer_kept(work, PROFILES[program]) == pytest.approx(expected * 4 * 2048 * 6144)


@pytest.mark.parametrize(
    ("micro_batches", "virtual", "held"),
    [(1, 1, 1), (8, 1, 4), (64, 1, 4), (64, 3, 4 * (1 + 3 / (4 * 3))), (2, 3, 2)],
)
def test_the_first_rank_holds_as_many_micro_batches_as_its_schedule_has_under_way(
    micro_batches: int, virtual: int, held: float
) -> None:
    work = replace(LLAMA, pp=4, micro_batches=micro_batches, virtual=virtual, vocab=128)
    assert memory(work, MEGATRON).activations == pytest.approx(held * 8 * layer_kept(work, MEGATRON))


def test_full_recompute_keeps_inputs_of_layers_and_one_layer() -> None:
    work = replace(LLAMA, recompute="full", vocab=128)
    found = memory(work, MEGATRON)
    assert found.activations == 32 * 2 * 8192 * 4096
    assert found.moment == pytest.approx(layer_kept(work, MEGATRON) + 2 * 8192 * 3 * 14336)


def test_the_last_rank_counts_if_logits_take_more_than_micro_batches_under_way() -> None:
    tall, wide = replace(LLAMA, pp=2, micro_batches=1, vocab=8), replace(LLAMA, pp=2, micro_batches=1, vocab=1 << 20)
    assert memory(wide, MEGATRON).moment == 6 * 8192 * (1 << 20)
    assert memory(tall, MEGATRON).moment < memory(wide, MEGATRON).moment


@given(works, programs)
def test_more_to_hold_is_never_less(work: Work, program: Profile) -> None:
    total = memory(work, program).total
    assert min(vars(memory(work, program)).values()) >= 0
    assert memory(replace(work, micro=2 * work.micro), program).total >= total
    assert memory(replace(work, vocab=2 * work.vocab), program).total >= total
    assert memory(replace(work, ffn=2 * work.ffn), program).total >= total
    assert memory(replace(work, recompute="none"), program).total >= 0.999 * memory(
        replace(work, recompute="full"), program
    ).total - layer_kept(replace(work, recompute="none"), program)


@given(works, programs)
def test_sharding_over_more_ranks_never_takes_more(work: Work, program: Profile) -> None:
    if work.dp * work.cp > 1:
        assert memory(replace(work, dp=2 * work.dp), program).total <= memory(work, program).total


@given(works, programs)
# This program gives layers to ranks by the vocabulary too.
@example(replace(LLAMA, pp=3, micro=2, micro_batches=3), PROFILES["scaling"])
def test_what_is_counted_grows_from_tensors_to_the_device(work: Work, program: Profile) -> None:
    of = {what: counted(work, program, what) for what in ("formula", "unsaid", "allocated", "reserved", "device")}
    assert of["formula"] <= of["allocated"] == of["unsaid"] < of["reserved"] < of["device"]
    assert of["device"] == pytest.approx(RESERVATION_FACTOR * of["allocated"] + NON_TENSOR_BYTES)


@given(works, programs)
def test_a_step_fits_into_what_it_needs(work: Work, program: Profile) -> None:
    needed = memory(work, program).total / program.kept.usable
    assert fits(work, program, 1.001 * needed)
    assert not fits(work, program, 0.999 * needed)


def test_a_pipeline_with_fsdp2_keeps_weights_and_gradients_whole() -> None:
    work = replace(LLAMA, mode="zero3", pp=2)
    whole = memory(work, PROFILES["torchtitan"])
    assert whole.gathered == pytest.approx((2 + 4) * (16 * LLAMA.layer_parameters + LLAMA.vocab * LLAMA.width))
    assert memory(work, PROFILES["llm_foundry"]).gathered < whole.gathered


def test_logits_that_all_tensor_parallel_ranks_have_are_not_divided() -> None:
    work = Work(
        layers=2, width=1024, heads=8, kv_heads=8, head_size=128, ffn=4096, vocab=131072, sequence=4096, mode="zero1"
    )
    whole, parts = (
        memory(replace(work, tp=4), replace(PROFILES["scaling"], gathers_logits=gathers)).moment
        for gathers in (True, False)
    )
    assert whole == 18 * 4096 * 131072 == 4 * parts
