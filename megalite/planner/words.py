"""What the free text of a published row tells: its GPUs and their network, its program, and what its memory counts.

Imports no torch.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from megalite.planner.hardware import Cluster, Level, Link, load_cluster
from megalite.planner.kept import DEEPSPEED_FLOAT32_SUM, Counted
from megalite.planner.program import Attention, Program
from megalite.planner.programs import (
    EAGER_SOFTMAX,
    NEMO,
    PROGRAMS,
    with_eager_norms,
    with_sequence_parallelism,
)
from megalite.planner.work import DataMode

FAMILIES = (  # of GPUs: what a row's text must hold, and the cluster
    (r"GB300", "gb300"),
    (r"GB200", "gb200"),
    (r"B200", "b200"),
    (r"H200", "h200"),
    (r"H100.*PCIe", "h100_pcie"),
    (r"H100.*NVL\b", "h100_nvl"),
    (r"H100", "h100_sxm"),
    (r"A100.*40 ?GB", "a100_40gb"),
    (r"H800", "h100_sxm"),
    (r"A[18]00", "a100_80gb"),
    (r"MI3(00|25)", "mi300x"),
    (r"L40S", "l40s"),
    (r"5090", "rtx5090"),
    (r"4090", "rtx4090"),
)
# Its nodes have two boards of four GPUs, in each of which all are connected: README of bigscience-workshop/bigscience,
# "Using NVLink 4 inter-gpu connects, 4 OmniPath links". A ring among four uses two of the three links of a GPU: a third
# ring would need links of the first two.
JEAN_ZAY = Level(4, Link(200e9, 6e-6)), Level(8, Link(25e9, 6e-6))
# A800 and H800 are A100 and H100 with 400 GB/s of NVLink, 200 in one direction: deepseek-ai/DeepSeek-V3, section 3.1
# of its report (arXiv 2412.19437), and NVIDIA's datasheet of the A800.
CAPPED = r"\b[AH]800\b"
CAPPED_LINK = 200e9
NAMED = 0.99  # of the memory that a GPU is sold with, in GiB, programs see: 79.3 of 80, 95.0 of 96
SAME = 0.08  # a size in words that is nearer to the measured one of the cluster's file tells nothing new
ROWWISE = 0.47  # `Program.fp8` with a scale for every row: 1.10 times bf16 where one for a tensor reaches 1.25
OVERLAPS = r"overlap|megatron.?core|nvidia/megatron-lm.*readme"  # NVIDIA's own tables of Megatron-LM, with its flags
REBASED = 9  # the month of 2024 since which NeMo is built on PyTorch 24.07, not 24.02: its Dockerfile, Dockerfile.ci
# The year and the month of a release, which may stand behind a word: NeMo Megatron 22.08, NeMo v24.12, NeMo_2024.
RELEASE = r"nemo(?:[\W_]{1,3}[a-z]{1,9})?[\W_]{0,3}v?(?:20)?(2[2-9])(?:\.(\d\d?))?(?![\w.]| gpu| run)"
FLOAT32_SUM = r"fp32 (grad )?acc"  # gradients that are added up in float32
NOT = r"\b(?:no|not|non|without|w/o|un)[ -]?"
OFF = r" (?:is )?(?:not|off)\b"
UNFUSED = (  # attention
    rf"{NOT}(?:fused )?(?:flash.?att\w*|attention(?! (?:dropout|mask|bias))|softmax)|flash.?att\w*{OFF}"
    r"|(?<!un)fused softmax(?![ -](?:cross|loss))"
)
FUSED_SOFTMAX = r"(?<!un)fused softmax"
FUSED_NORMS = r"(?<!un)(?<!no )(?<!not )fused\W+(?:rms|layer)?.?norms?\b|\brms(?:.?norm)? kernel"
SEQUENCE_PARALLEL = r"(?<!no )(?<!without )sequence.parallel(?!\w*[ =:]*(?:false|off|none|no\b))"
FLASH = (  # and its version
    r"(?<!no )(?<!not )(?<!non-)(?<!without )(?<!w/o )flash.?att[a-z]*+"
    rf"(?!{OFF})\W{{0,2}}(?:v|version )?([123]\b)?"
)
WORDS = {  # in a source, and the program that it is of
    "simumax": "megatron_2025",
    "vtrain": "megatron_deepspeed",
    "bigscience": "megatron_deepspeed",
    "bloom": "megatron_deepspeed",
    "megatron-deepspeed": "megatron_deepspeed",
    "neox": "megatron_deepspeed",  # which is built on both
    "internevo": "internevo",
    "korthikanti": "megatron_2021",
    "sc21": "megatron_2021",
    "hagemann": "scaling",
    "aleph": "scaling",
    "aa-scaling": "scaling",
    "parallelization layouts": "scaling",
    "megascale": "megatron_2023",
    "zero bubble": "megatron_2023",
    "vocabulary parallel": "megatron_2023",
    "fms-fsdp": "fms_fsdp",
    "foundry": "llm_foundry",
    "mosaic": "llm_foundry",
    "playbook": "nanotron",
    "nanotron": "nanotron",
    "fsdp": "torchtitan_compiled",
    "nemo long": "nemo_2024",
    "nemo": "nemo",
    "bridge": "nemo",
    "megatron": "megatron_2025",
    "llama 3": "llama_3",
    "llama3": "llama_3",
}
MODES: tuple[tuple[str, DataMode], ...] = (  # by how the words begin, without dashes and blanks
    (r"zero3|full|shard|fsdp|hsdp|3", "zero3"),
    (r"zero2|2", "zero2"),
    (r"zero1|dist|1", "zero1"),
)
KNOWN = {  # of columns, how the words begin that are told apart, or that have no meaning here
    "recompute": r"full|selective|none|no$|false|$",
    "precision": r"(amp_|mx)?(bf|fp|float|bfloat)(8|16)|$",
    "fsdp_zero": r"zero[ -]?[0-3]|[0-3]$|full|shard|fsdp|hsdp|dist|ddp|none|no$|no_shard|$",
}
COUNTED: tuple[tuple[str, Counted], ...] = (  # in notes, and which bytes the memory counts
    (r"formula|not measured", "formula"),
    (r"nvidia-smi|cuda context", "device"),
    (r"reserved", "reserved"),
    (r"allocated", "allocated"),
)


def found(pattern: str, text: str) -> str | None:
    """The first group of the first place in `text` that matches, if there is one."""
    match = re.search(pattern, text)
    return match[1] if match else None


def program_of(fields: Mapping[str, str]) -> Program:
    """The profile of the program that a row is of, by its source, precision and notes."""
    source, notes, precision = (fields[key].lower() for key in ("source", "notes", "precision"))
    sharded = mode_of(fields["fsdp_zero"]) == "zero3"
    if "torchtitan" in source:
        compiled = "torchtitan_2025" if re.search(r"\b202[5-9]\b", source) else "torchtitan_compiled"
        program = PROGRAMS[compiled if "compile" in notes else "torchtitan"]
        program = replace(program, fp8=ROWWISE, gathers_fp8=False) if "rowwise" in precision else program
        return replace(program, hidden=0.5) if re.search(r"async ?tp", notes) else program
    for word, name in WORDS.items():
        if word in source:
            if name == "megatron_2021" and sharded:
                return PROGRAMS["deepspeed_zero3"]
            if name == "megatron_2021" and "SP" in fields["recompute"]:
                return PROGRAMS["megatron_2022"]
            if name == "nemo" and (release := re.search(RELEASE, source)):
                return _nemo(int(release[1]), int(release[2] or 0), "8" in precision)
            if name == "megatron_2025":
                overlaps = re.search(OVERLAPS, " ".join((source, notes, fields["provenance"].lower())))
                return _flagged(PROGRAMS["megatron_overlap" if overlaps else name], notes)
            if name == "megatron_deepspeed" and re.search(FLOAT32_SUM, precision):
                return replace(PROGRAMS[name], kept=DEEPSPEED_FLOAT32_SUM)
            return _with_kernels(PROGRAMS[name], notes) if name == "scaling" else PROGRAMS[name]
    return _with_attention(PROGRAMS["unknown_sharded" if sharded else "unknown"], notes)


def _flagged(program: Program, notes: str) -> Program:
    """Megatron-LM with the flags that notes name."""
    if "--attention-backend fused" in notes:
        program = replace(program, attention="cudnn")
    if "--grad-reduce-in-bf16" in notes:
        program = replace(program, gradient=2, moved=NEMO.moved, kept=replace(program.kept, gradient=2))
    return program


def _nemo(year: int, month: int, eight_bits: bool) -> Program:
    """NeMo of a release. Before 2024 it had attention and overlap of Megatron-LM of 2022, unless it used Transformer
    Engine, which products in 8 bits need."""
    if year < 24:
        return PROGRAMS["nemo_2024" if eight_bits else "megatron_2022"]
    return PROGRAMS["nemo" if year > 24 else "nemo_2024" if month < REBASED else "nemo_late_2024"]


def _with_attention(program: Program, notes: str) -> Program:
    """The program with the attention that notes name. Where they name a FlashAttention, it is that one."""
    if flash := re.search(FLASH, notes):
        kinds: dict[str, Attention] = {"1": "flash1", "2": "flash2", "3": "flash3"}
        return replace(program, attention=kinds.get(flash[1], program.attention))
    return replace(program, attention="unfused") if re.search(UNFUSED, notes) else program


def _with_kernels(program: Program, notes: str) -> Program:
    """Aleph Alpha's Scaling with the kernels that notes name; where they name none, with those of its best runs."""
    program = _with_attention(program, notes)
    if program.attention == "unfused" and not re.search(FUSED_SOFTMAX, notes):
        program = replace(program, scores=EAGER_SOFTMAX)
    if re.search(rf"{FLASH}|{UNFUSED}|norm", notes) and not re.search(FUSED_NORMS, notes):
        program = with_eager_norms(program)
    return with_sequence_parallelism(program) if re.search(SEQUENCE_PARALLEL, notes) else program


def mode_of(text: str) -> DataMode:
    """How data-parallel ranks share their states."""
    plain = re.sub(r"[^a-z0-9]", "", text.lower())
    return next((mode for pattern, mode in MODES if re.match(pattern, plain)), "ddp")


def unknown_words(fields: Mapping[str, str]) -> list[str]:
    """Of columns that are read by their words: those whose words are not known, and what they are taken as."""
    taken = {"recompute": "none", "precision": "bf16", "fsdp_zero": "ddp"}
    return [
        f"{key} = {fields[key].strip()!r:.40} is taken as {taken[key]}"
        for key, known in KNOWN.items()
        if not re.match(known, fields[key].strip().lower())
    ]


def counted_in(fields: Mapping[str, str], program: Program) -> Counted:
    """Which bytes a row's memory counts: as its notes say, or else as its program reports."""
    notes = fields["notes"].lower()
    return next((what for pattern, what in COUNTED if re.search(pattern, notes)), program.kept.counts)


def cluster_of(text: str) -> Cluster:
    """The cluster of a row's GPUs, with the network, the power and the memory that the text tells.

    Raises ValueError for GPUs of no known kind.
    """
    name = next((name for pattern, name in FAMILIES if re.search(pattern, text, re.IGNORECASE)), None)
    if name is None:
        raise ValueError(f"gpu = {text!r:.100}: is of no kind that the planner knows")
    cluster = _shipped(name)
    if network := _network(text, cluster.gpus_per_node):
        cluster = replace(cluster, network=replace(cluster.network, bandwidth=network))
    gpu = cluster.gpu
    if watts := found(r"\b([1-9]\d{2,3}) ?W\b", text):
        gpu = replace(gpu, power=float(watts))
    if rate := found(r"\b([1-9]\d?\.?\d{0,3}) ?TB/s", text):
        gpu = replace(gpu, bandwidth=float(rate) * 1e12)
    if size := found(r"(?<!\d)([1-9]\d|[12]\d\d) ?Gi?B\b(?!/s)", text):
        named = NAMED * float(size) * 2**30
        gpu = replace(gpu, memory=named) if abs(named / gpu.memory - 1) > SAME else gpu
    cluster = replace(cluster, gpu=gpu)
    if re.search(CAPPED, text, re.IGNORECASE):
        levels = (replace(each, link=each.link.faster(CAPPED_LINK / each.link.bandwidth)) for each in cluster.levels)
        cluster = replace(cluster, levels=tuple(levels))
    return replace(cluster, levels=JEAN_ZAY) if "Jean Zay" in text else cluster


@cache
def _shipped(name: str) -> Cluster:
    """A cluster that megalite comes with; rows name few of them."""
    return load_cluster(name)


def _network(text: str, gpus: int) -> float | None:
    """Bytes/s of one GPU between nodes, where the text tells it in Gb/s: of an adapter, of a GPU, or of a node."""
    if match := re.search(r"\b([1-9]\d?) ?x ?([1-9]\d{0,3}) ?Gb", text):
        return int(match[1]) * int(match[2]) / 8 * 1e9 / gpus
    if rate := found(r"\b([1-9]\d{0,4}) ?Gb(?:ps|/s)[^,]*per GPU", text):
        return int(rate) / 8 * 1e9
    if rate := found(r"\b([1-9]\d{0,4}) ?Gb(?:ps|/s)[^,]*per node", text):
        return int(rate) / 8 * 1e9 / gpus
    return None
