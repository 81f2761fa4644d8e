"""The profile of the program that a published row names, with its version and options. Imports no torch."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from megalite.base.errors import listing
from megalite.cost.program import Attention
from megalite_tools.plan.published.fields import word
from megalite_tools.plan.published.kept_memory import DEEPSPEED_FLOAT32_SUM
from megalite_tools.plan.published.profiles import (
    EAGER_SOFTMAX,
    NEMO,
    PROFILES,
    Profile,
    with_eager_norms,
    with_sequence_parallelism,
)

# By program, its profiles, and the month since which each holds. Since September 2024 NeMo is built on PyTorch 24.07,
# not 24.02: its Dockerfile and Dockerfile.ci.
RELEASES: Mapping[str, tuple[tuple[int, str], ...]] = {
    "automodel": ((0, "automodel"),),
    "deepspeed": ((0, "deepspeed_zero3"),),
    "fms-fsdp": ((0, "fms_fsdp"),),
    "internevo": ((0, "internevo"),),
    "kempnerforge": ((0, "torchtitan_2025"),),
    "llama-3": ((0, "llama_3"),),
    "llm-foundry": ((0, "llm_foundry"),),
    "megatron-bridge": ((0, "nemo"),),
    "megatron-deepspeed": ((0, "megatron_deepspeed"),),
    "megatron-lm": (
        (202101, "megatron_2021"),
        (202201, "megatron_2022"),
        (202301, "megatron_2023"),
        (202401, "megatron_2025"),
    ),
    "nanotron": ((0, "nanotron"),),
    "nemo": ((202201, "megatron_2022"), (202401, "nemo_2024"), (202409, "nemo_late_2024"), (202501, "nemo")),
    "other": ((0, "unknown"),),
    "scaling": ((0, "scaling"),),
    "torchtitan": ((202301, "torchtitan_compiled"), (202501, "torchtitan_2025")),
}
# The last month of whose code published runs are compared. Later code is as uncertain as that of an unknown program;
# so is a program of which no run is compared.
MAX_MONTHS = {"kempnerforge": 0, "megatron-bridge": 202606, "megatron-lm": 202512, "nemo": 202504, "torchtitan": 202506}
VERSION = r"(?:20)?(2\d)[.-](0?[1-9]|1[0-2])(?:\.\d{1,3})?|(20\d\d)"
ROWWISE_FP8 = 0.47  # `Program.fp8` with a scale for every row: 1.10 times bf16 where one for a tensor reaches 1.25
KERNELS: tuple[Attention, ...] = ("flash1", "flash2", "flash3", "cudnn", "unfused")
CHOICES = (*KERNELS, "eager_softmax"), ("sequence_parallel", "no_sequence_parallel")  # a row has one of each at most
COMPILED_PROGRAMS = ("torchtitan", "kempnerforge")  # if an option says so


def _with_overlap(program: Profile) -> Profile:
    """Switch on --tp-comm-overlap, --overlap-grad-reduce and --overlap-param-gather."""
    return replace(program, hidden=NEMO.hidden, reduces_beside=True, gathers_beside=True)


def _with_16_bit_gradients(program: Profile) -> Profile:
    """Switch on --grad-reduce-in-bf16."""
    return replace(program, gradient=2, moved=NEMO.moved, kept=replace(program.kept, gradient=2))


# Share of the host's time with CUDA graphs of attention, router and preparation of the exchange: Qwen3 30B with tp 2
# and ep 4 on H100 is then 1.29 times as fast (github.com/NVIDIA-NeMo/Megatron-Bridge at 067f987, card.yaml of CUDA
# graphs).
GRAPH_SHARE = 0.74


def _with_graphs(program: Profile) -> Profile:
    """Replay parts of layers with experts as CUDA graphs."""
    return replace(program, host=GRAPH_SHARE * program.host, experts_host=GRAPH_SHARE * program.experts_host)


COMMON_OPTIONS: Mapping[str, Callable[[Profile], Profile]] = {  # options of all programs
    **{kernel: lambda program, kernel=kernel: replace(program, attention=kernel) for kernel in KERNELS},  # type: ignore[misc]
    "eager_softmax": lambda program: replace(program, attention="unfused", scores=EAGER_SOFTMAX),
    "eager_norms": with_eager_norms,
    "untuned": lambda program: replace(program, known=False),  # as its source says: it tells little of the program
    "sequence_parallel": with_sequence_parallelism,
    "no_sequence_parallel": lambda program: replace(program, sequence_parallel=False, gathers_again=False),
}
TORCHTITAN_OPTIONS: Mapping[str, Callable[[Profile], Profile]] = {
    "compile": lambda program: program,  # `program_of` has taken the profile
    "async_tp": lambda program: replace(program, hidden=0.5),
    "rowwise": lambda program: replace(program, fp8=ROWWISE_FP8, gathers_fp8=False),
}
PROGRAM_OPTIONS: Mapping[str, Mapping[str, Callable[[Profile], Profile]]] = {  # options that one program alone has
    "kempnerforge": TORCHTITAN_OPTIONS,
    "torchtitan": TORCHTITAN_OPTIONS,
    "megatron-deepspeed": {"fp32_sums": lambda program: replace(program, kept=DEEPSPEED_FLOAT32_SUM)},
    "megatron-bridge": {"cuda_graphs": _with_graphs},
    "megatron-lm": {"overlap": _with_overlap, "bf16_gradients": _with_16_bit_gradients},
}


def program_of(fields: Mapping[str, str], sharded: bool, eight_bits: bool) -> Profile:
    """The profile by the columns program, version and options; raises ValueError for a word that is not known.

    sharded: weights are. eight_bits: products are.
    """
    name = word(fields, "program", RELEASES)
    options = fields["options"].lower().split()
    known = {**COMMON_OPTIONS, **PROGRAM_OPTIONS.get(name, {})}
    if unknown := [option for option in options if option not in known]:
        raise ValueError(f"options = {unknown[0]!r:.40}: of {name} must be of {listing(list(known))}")
    for choice in CHOICES:
        if len(both := [option for option in dict.fromkeys(options) if option in choice]) > 1:
            raise ValueError(f"options = {' '.join(both)!r:.40}: must have one at most of {listing(choice)}")
    if "rowwise" in options and not eight_bits:
        raise ValueError("options = 'rowwise': must have the precision fp8 or mxfp8, whose scales it is about")
    profile, date = _profile(name, fields["version"].strip())
    if name in COMPILED_PROGRAMS and "compile" not in options:
        profile = "torchtitan"
    elif name == "nemo" and profile == "megatron_2022" and eight_bits:  # it needs Transformer Engine
        profile = "nemo_2024"
    elif name == "other" and sharded:
        profile = "unknown_sharded"
    program = PROFILES[profile]
    for option in dict.fromkeys(options):
        program = known[option](program)
    return replace(program, known=False) if date > MAX_MONTHS.get(name, date) else program


def _profile(name: str, version: str) -> tuple[str, int]:
    """The profile that `version` of a program has, and the first month that it may be of."""
    profiles = RELEASES[name]
    if not version and len(profiles) == 1:
        return profiles[0][1], 1
    rule = "must be a release or a date, as 24.07, 2024-07 or 2024"
    if not (match := re.fullmatch(VERSION, version)):
        raise ValueError(f"version = {version!r:.40}: {rule}")
    year = 100 * int(match[3] or f"20{match[1]}")
    dates = (year + int(match[2]),) if match[2] else (year + 1, year + 12)  # a year alone may mean all of its months
    if dates[0] < profiles[0][0]:
        raise ValueError(f"version = {version!r:.40}: {name} is known since {profiles[0][0] // 100} only")
    found = {next(of for first, of in reversed(profiles) if first <= date) for date in dates}
    if len(found) > 1:
        raise ValueError(f"version = {version!r:.40}: {name} changed in that year; name the month, as in 2024-07")
    return found.pop(), dates[0]
