"""The profile of a program by its name, version and options."""

from dataclasses import replace

import pytest

from megalite_tools.plan.published.kept_memory import DEEPSPEED_FLOAT32_SUM
from megalite_tools.plan.published.profiles import EAGER_NORMS, EAGER_SOFTMAX, PROFILES, Profile
from megalite_tools.plan.published.releases import RELEASES, program_of


def program(
    name: str, version: str = "", options: str = "", sharded: bool = False, eight_bits: bool = False
) -> Profile:
    return program_of({"program": name, "version": version, "options": options}, sharded, eight_bits)


@pytest.mark.parametrize(
    ("name", "version", "profile"),
    [
        ("torchtitan", "2024-12", "torchtitan"),
        ("megatron-lm", "2021", "megatron_2021"),
        ("Megatron-LM", "2022-05", "megatron_2022"),
        ("megatron-lm", "2023", "megatron_2023"),
        ("megatron-lm", "2025-12", "megatron_2025"),
        ("nemo", "22.08", "megatron_2022"),
        ("nemo", "2023", "megatron_2022"),
        ("nemo", "24.05", "nemo_2024"),
        ("nemo", "24.09", "nemo_late_2024"),
        ("nemo", "25.02", "nemo"),
        ("nemo", "25.04.01", "nemo"),
        ("megatron-bridge", "25.09", "nemo"),
        ("megatron-bridge", "", "nemo"),
        ("other", "", "unknown"),
    ],
)
def test_a_version_has_the_profile_of_its_time(name: str, version: str, profile: str) -> None:
    assert program(name, version) is PROFILES[profile]


def test_products_sharding_and_compilation_choose_a_profile() -> None:
    assert program("nemo", "23.11", eight_bits=True) is PROFILES["nemo_2024"]
    assert program("other", sharded=True) is PROFILES["unknown_sharded"]
    assert program("torchtitan", "2024-12", "compile") is PROFILES["torchtitan_compiled"]
    assert program("torchtitan", "2025-06", "compile") is PROFILES["torchtitan_2025"]


def test_code_that_no_published_run_is_compared_with_is_not_known() -> None:
    for name, version, options, profile in (
        ("kempnerforge", "", "compile", "torchtitan_2025"),
        ("torchtitan", "2026", "compile", "torchtitan_2025"),
        ("nemo", "25.05", "", "nemo"),
        ("megatron-lm", "2026-01", "", "megatron_2025"),
    ):
        assert program(name, version, options) == replace(PROFILES[profile], known=False)
    assert program("torchtitan", "2025", "compile").known


@pytest.mark.parametrize(
    ("name", "version", "options", "why"),
    [
        ("nemo", "24.x", "", "version = '24.x': must be a release or a date, as 24.07, 2024-07 or 2024"),
        ("nemo", "24.13", "", "version = '24.13': must be a release or a date"),
        ("nemo", "", "", "version = '': must be a release or a date"),
        ("nemo", "2024", "", "version = '2024': nemo changed in that year; name the month, as in 2024-07"),
        ("nemo", "2021", "", "version = '2021': nemo is known since 2022 only"),
        ("internevo", "latest", "", "version = 'latest': must be a release or a date"),
        ("scaling", "", "flash4", "options = 'flash4': of scaling must be of flash1, flash2, flash3, cudnn, unfused"),
        ("scaling", "", "compile", "options = 'compile': of scaling must be of flash1"),
        ("scaling", "", "flash1 flash2", "options = 'flash1 flash2': must have one at most of flash1, flash2"),
        ("nemo", "24.07", "cudnn eager_softmax", "options = 'cudnn eager_softmax': must have one at most of flash1"),
        (
            "megatron-lm",
            "2024",
            "sequence_parallel no_sequence_parallel",
            "options = 'sequence_parallel no_sequence_parallel': must have one at most of sequence_parallel",
        ),
        ("torchtitan", "2024-12", "compile rowwise", "options = 'rowwise': must have the precision fp8 or mxfp8"),
        ("megatron", "2024", "", "program = 'megatron': must be automodel, deepspeed, fms-fsdp"),
        ("", "", "", "program = '': must be automodel"),
    ],
)
def test_what_is_not_known_is_refused(name: str, version: str, options: str, why: str) -> None:
    with pytest.raises(ValueError, match=r"must|known|changed") as caught:
        program(name, version, options)
    assert str(caught.value).startswith(why)


def test_kernels_are_options_of_all_programs() -> None:
    for name, profiles in RELEASES.items():
        version = str(profiles[0][0] // 100 or "")
        for kernel in ("flash1", "flash2", "flash3", "cudnn", "unfused"):
            assert program(name, version, kernel).attention == kernel
    best = PROFILES["scaling"]
    eager = program("scaling", options="eager_softmax eager_norms")
    assert (eager.attention, eager.scores) == ("unfused", EAGER_SOFTMAX)
    assert (eager.forward - best.forward, eager.backward - best.backward) == EAGER_NORMS
    assert eager.kept.stream == best.kept.stream + 8


def test_sequence_parallelism_is_an_option() -> None:
    without, found = program("scaling"), program("scaling", options="sequence_parallel")
    assert (without.sequence_parallel, found.sequence_parallel) == (False, True)
    assert found.kept.gathered > without.kept.gathered
    assert found.scatters
    assert not found.gathers_again  # weights that are kept gathered are not gathered again
    assert program("nemo", "25.02", "sequence_parallel") == PROFILES["nemo"]
    baseline = program("megatron-lm", "2022", "no_sequence_parallel")
    assert not baseline.sequence_parallel
    assert not baseline.gathers_again


def test_options_of_one_program() -> None:
    overlap = program("megatron-lm", "2024", "overlap flash2")
    assert (overlap.attention, overlap.hidden, overlap.reduces_beside, overlap.gradient) == ("flash2", 0.8, True, 4)
    short = program("megatron-lm", "2025", "overlap bf16_gradients")
    assert (short.attention, short.gradient, short.kept.gradient) == ("cudnn", 2, 2)
    assert program("torchtitan", "2024-12", "compile async_tp").hidden == 0.5
    assert program("torchtitan", "2024-12", "compile").gathers_fp8
    assert not program("torchtitan", "2024-12", "compile rowwise", eight_bits=True).gathers_fp8
    assert program("megatron-deepspeed", options="fp32_sums").kept == DEEPSPEED_FLOAT32_SUM
    assert program("megatron-deepspeed").kept.gradient == 2
