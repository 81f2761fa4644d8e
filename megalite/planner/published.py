"""Published training runs, as rows of a CSV file, in the terms of the planner. Imports no torch.

A row names its source, the sizes of the model, the layout, the GPUs, and what was measured. Speed is given as seconds
of a step, tokens/s/GPU, FLOP/s/GPU or MFU; all are turned into seconds of a step here, by the row's own convention of
counting.
"""

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megalite.config.errors import InputError
from megalite.planner.hardware import Cluster, Level, Link, load_cluster
from megalite.planner.programs import PROGRAMS, Program
from megalite.planner.work import DataMode, Recompute, Work

COLUMNS = [
    "source",
    "model",
    "layers",
    "hidden",
    "ffn",
    "heads",
    "kv_heads",
    "vocab",
    "seq",
    "gpu",
    "n_gpus",
    "tp",
    "pp",
    "vpp",
    "cp",
    "dp",
    "fsdp_zero",
    "micro_batch",
    "global_batch",
    "recompute",
    "precision",
    "tflops_per_gpu",
    "mfu",
    "tps_per_gpu",
    "mem_gib",
    "iter_time_s",
    "flops_conv",
    "status",
    "provenance",
    "notes",
]
LARGEST = 1 << 24  # bytes of a file
GPT_VOCABULARY = 51_200  # of Megatron's GPT models, where a row does not tell
FAMILIES = (  # of GPUs: what a row's text must hold, and the cluster
    (r"GB300", "gb300"),
    (r"GB200", "gb200"),
    (r"B200", "b200"),
    (r"H200", "h200"),
    (r"H100.*PCIe", "h100_pcie"),
    (r"H100.*NVL\b", "h100_nvl"),
    (r"H100", "h100_sxm"),
    (r"A100.*40 ?GB", "a100_40gb"),
    (r"A100", "a100_80gb"),
    (r"MI300", "mi300x"),
    (r"L40S", "l40s"),
    (r"5090", "rtx5090"),
    (r"4090", "rtx4090"),
)
# Its nodes have two boards of four GPUs, in each of which all are connected: README of bigscience-workshop/bigscience,
# "Using NVLink 4 inter-gpu connects, 4 OmniPath links".
JEAN_ZAY = Level(4, Link(300e9, 6e-6)), Level(8, Link(25e9, 6e-6))


@dataclass(frozen=True)
class Row:
    """A published run. seconds: of a step; None if no speed was published. line: of the file, for messages.

    micro: whether the size of micro-batches was published. fits: whether the run did not run out of memory.
    """

    file: str
    line: int
    source: str
    work: Work
    batch: int
    program: Program
    cluster: Cluster
    seconds: float | None
    fits: bool
    micro: bool

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def read_rows(path: Path) -> tuple[list[Row], list[str]]:
    """The rows of a file, and why each row that is left out cannot be predicted. Raises InputError for another file."""
    try:
        if path.stat().st_size > LARGEST:
            raise InputError(f"{path}: has more than {LARGEST:,} bytes")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise InputError(f"{path}: cannot be read: {why}") from None
    reader = csv.DictReader(text.splitlines())
    missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise InputError(f"{path}: lacks the column {missing[0]}; the first line must name all of {', '.join(COLUMNS)}")
    rows, left_out = [], []
    for fields in reader:
        place = f"{path}:{reader.line_num}"
        try:
            rows.append(_row(path.name, reader.line_num, {key: fields[key] or "" for key in COLUMNS}))
        except ValueError as error:
            left_out.append(f"{place}: {error}")
    return rows, left_out


def _row(file: str, line: int, fields: Mapping[str, str]) -> Row:
    """Raises ValueError with what is missing or wrong."""
    gpt = "llama" not in fields["model"].lower()
    if "moe" in fields["model"].lower() or "deepseek" in fields["model"].lower():
        raise ValueError(f"model = {fields['model']}: has experts, which the planner does not know")
    sequence = int(_found(r"seq(\d+)", fields["notes"]) or _whole(fields, "seq"))
    cp = int(_found(r"cp(\d+)_", fields["notes"]) or _whole(fields, "cp", 1))
    heads, width = _whole(fields, "heads"), _whole(fields, "hidden")
    tp, pp = _whole(fields, "tp", 1), _whole(fields, "pp", 1)
    dp = max(1, _whole(fields, "n_gpus") // (tp * pp * cp))  # some tables give the product with other sizes here
    micro = _whole({**fields, "micro_batch": re.split(r"\D", fields["micro_batch"])[0]}, "micro_batch", 1)
    if "total" in fields["micro_batch"]:  # of a data-parallel rank
        batch, micro = micro * dp, 1
    else:
        batch = _whole(fields, "global_batch", micro * dp)
    work = Work(
        layers=_whole(fields, "layers"),
        width=width,
        heads=heads,
        kv_heads=_whole(fields, "kv_heads", heads),
        head_size=width // heads,
        ffn=_whole(fields, "ffn", 4 * width),
        vocab=_whole(fields, "vocab", GPT_VOCABULARY),
        sequence=sequence,
        gated=not gpt,
        tied=gpt,
        tp=tp,
        pp=pp,
        virtual=_whole(fields, "vpp", 1),
        cp=cp,
        dp=dp,
        mode=_mode(fields["fsdp_zero"]),
        micro=micro,
        micro_batches=max(1, round(batch / (dp * micro))),
        recompute=_recompute(fields["recompute"]),
        precision="fp8" if re.search(r"f(loat|p)8", fields["precision"]) else "bf16",
    )
    cluster = cluster_of(fields["gpu"])
    seconds = _seconds(fields, work, batch, cluster)
    fits = fields["status"] != "oom"
    known = bool(fields["micro_batch"])
    program = program_of(fields)
    return Row(file, line, fields["source"], work, batch, program, cluster, seconds, fits, known)


def program_of(fields: Mapping[str, str]) -> Program:
    """The profile of the program that a row is of, by its source and notes."""
    source, notes = fields["source"].lower(), fields["notes"].lower()
    sharded = fields["fsdp_zero"].lower().startswith(("zero3", "full", "shard"))
    if "torchtitan" in source:
        found = PROGRAMS["torchtitan_compiled" if "compile" in notes else "torchtitan"]
        found = replace(found, fp8=ROWWISE) if "rowwise" in fields["precision"] else found
        return replace(found, hidden=0.5) if re.search(r"async ?tp", notes) else found
    for word, name in WORDS.items():
        if word in source:
            if name == "megatron_2021" and sharded:
                return PROGRAMS["deepspeed_zero3"]
            if name == "megatron_2021" and "SP" in fields["recompute"]:
                return PROGRAMS["megatron_2022"]
            return PROGRAMS[name]
    return PROGRAMS["torchtitan" if sharded else "megatron_2025"]


ROWWISE = 0.55  # `Program.fp8` with a scale for every row: 1.10 times bf16 where one for a tensor reaches 1.25
WORDS = {  # in a source, and the program that it is of
    "simumax": "megatron_2025",
    "vtrain": "megatron_deepspeed",
    "bigscience": "megatron_deepspeed",
    "bloom": "megatron_deepspeed",
    "korthikanti": "megatron_2021",
    "sc21": "megatron_2021",
    "foundry": "llm_foundry",
    "mosaic": "llm_foundry",
    "playbook": "nanotron",
    "nanotron": "nanotron",
    "fsdp": "torchtitan_compiled",
    "nemo": "megatron_2025",
    "megatron": "megatron_2025",
}


def cluster_of(text: str) -> Cluster:
    """The cluster of a row's GPUs, with the network, the power and the memory's bandwidth that the text tells."""
    name = next((name for pattern, name in FAMILIES if re.search(pattern, text, re.IGNORECASE)), None)
    if name is None:
        raise ValueError(f"gpu = {text:.100}: is of no kind that the planner knows")
    cluster = load_cluster(name)
    if network := _network(text, cluster.gpus_per_node):
        cluster = replace(cluster, network=replace(cluster.network, bandwidth=network))
    gpu = cluster.gpu
    if watts := _found(r"(\d{3,4}) ?W\b", text):
        gpu = replace(gpu, power=float(watts))
    if rate := _found(r"(\d\.?\d*) ?TB/s", text):
        gpu = replace(gpu, bandwidth=float(rate) * 1e12)
    cluster = replace(cluster, gpu=gpu)
    return replace(cluster, levels=JEAN_ZAY) if "Jean Zay" in text else cluster


def _network(text: str, gpus: int) -> float | None:
    """Bytes/s of one GPU between nodes, where the text tells it in Gb/s: of an adapter, of a GPU, or of a node."""
    if found := re.search(r"(\d+) ?x ?(\d+) ?Gb", text):
        return int(found[1]) * int(found[2]) / 8 * 1e9 / gpus
    if found := re.search(r"(\d+) ?Gb(?:ps|/s)[^,]*per GPU", text):
        return int(found[1]) / 8 * 1e9
    if found := re.search(r"(\d+) ?Gb(?:ps|/s)[^,]*per node", text):
        return int(found[1]) / 8 * 1e9 / gpus
    return None


def _seconds(fields: Mapping[str, str], work: Work, batch: int, cluster: Cluster) -> float | None:
    """Seconds of a step, from whatever speed was published."""
    gpus = _whole(fields, "n_gpus")
    if fields["iter_time_s"]:
        return float(fields["iter_time_s"])
    if fields["tps_per_gpu"]:
        return batch * work.sequence / gpus / float(fields["tps_per_gpu"])
    rate = float(fields["tflops_per_gpu"]) * 1e12 if fields["tflops_per_gpu"] else 0.0
    if fields["mfu"]:
        rate = float(fields["mfu"]) / 100 * cluster.gpu.peak["bf16"]
    return counted_flops(fields["flops_conv"], work) * batch * work.sequence / (rate * gpus) if rate else None


def counted_flops(convention: str, work: Work) -> float:
    """Operations for a token as a source counts them: with recomputation or without, with all of attention or half."""
    passes = 4 if "hardware" in convention else 3
    seen = 0.5 if "causal" in convention and "not causal" not in convention else 1.0
    scores = 4 * work.sequence * work.q * seen
    return passes * work.layers * (2 * work.layer_parameters + scores) + 3 * 2 * work.width * work.vocab


def _mode(text: str) -> DataMode:
    text = text.lower()
    if text.startswith(("zero3", "full")):
        return "zero3"
    if text.startswith(("zero2", "shard_grad")):
        return "zero3" if text.startswith("shard") else "zero2"
    return "zero1" if text.startswith("zero1") else "ddp"


def _recompute(text: str) -> Recompute:
    return "full" if text.startswith("full") else "selective" if text.startswith("selective") else "none"


def _whole(fields: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = fields[key].strip()
    if not text and default is not None:
        return default
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{key} = {text!r:.40}: must be a number") from None
    if not 1 <= value < 1e12 or value != int(value):
        raise ValueError(f"{key} = {text!r:.40}: must be a whole number of at least 1")
    return int(value)


def _found(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None


def batches_of(row: Row) -> Iterator[Work]:
    """The row's work; where the size of micro-batches was not published, with each that divides the batch."""
    sizes = (row.work.micro,) if row.micro else (1, 2, 4, 8, 16, 32)
    for micro in sizes:
        count, rest = divmod(row.batch, row.work.dp * micro)
        if row.micro or (count and not rest):
            yield replace(row.work, micro=micro, micro_batches=max(1, count))
