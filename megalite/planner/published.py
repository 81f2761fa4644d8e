"""Published training runs, as rows of a CSV file, in the terms of the planner. Imports no torch.

A row names its source, the sizes of the model, the layout, the GPUs, and what was measured. Speed is given as seconds
of a step, tokens/s/GPU, FLOP/s/GPU or MFU; all are turned into seconds of a step here, by the row's own convention of
counting.
"""

import csv
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megalite.config.errors import InputError, counted
from megalite.planner.hardware import Cluster
from megalite.planner.kept import Counted
from megalite.planner.program import Program
from megalite.planner.words import cluster_of, counted_in, found, mode_of, program_of, unknown_words
from megalite.planner.work import Recompute, Work

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
VECTOR = 128  # Megatron-LM, megatron/training/arguments.py: --make-vocab-size-divisible-by
HEAD = 128  # elements of a head, where a row does not tell how many there are
MOST = {  # of what a row may say
    "layers": 1 << 14,
    "hidden": 1 << 20,
    "ffn": 1 << 24,
    "heads": 1 << 16,
    "kv_heads": 1 << 16,
    "vocab": 1 << 26,
    "seq": 1 << 30,
    "n_gpus": 1 << 20,
    "micro_batch": 1 << 20,
    "global_batch": 1 << 30,
}
EXPERTS = r"moe|mixtral|deepseek|dbrx|grok|experts"  # in the name of a model
GATED = r"llama|mistral|qwen|gemma|olmo|smollm|phi-?3|\byi\b"
FOUR_BITS = r"fp4|float4"
GROUPS = r"groups of ([1-9]\d{0,5})\b"  # of data-parallel ranks, of which each shards its states
LEAST = 1e-9  # of a speed, a time or a memory
OUT_OF_MEMORY = r"oom|out.of.memory"
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)  # that are tried, where a row does not tell


@dataclass(frozen=True)
class Row:
    """A published run. line: of the file, for messages.

    seconds: of a step; None if no speed was published. memory: bytes of the fullest GPU, counted as `counts` says;
    None if none were published. fits: whether the run did not run out of memory. micro: whether the size of
    micro-batches was published. group: what is the same for runs whose layouts can be compared. unknown: words that
    are not known, and what they are taken as.
    """

    file: str
    line: int
    source: str
    work: Work
    batch: int
    program: Program
    cluster: Cluster
    seconds: float | None
    memory: float | None
    counts: Counted
    fits: bool
    micro: bool
    virtual: bool
    group: tuple[object, ...]
    unknown: tuple[str, ...]

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def read_rows(path: Path) -> tuple[list[Row], list[str]]:
    """The rows of a file, and why each row that is left out cannot be predicted. Raises InputError for another file."""
    lines = lines_of(path)
    rows, left_out = [], []
    columns = [column.strip() for column in next(lines, (0, []))[1]]
    _check(path, columns)
    for number, values in lines:
        if not values:
            continue
        try:
            if len(values) != len(columns):
                raise ValueError(
                    f"has {counted(len(values), 'field')}, but the first line names {len(columns)} columns"
                )
            rows.append(_row(path.name, number, dict(zip(columns, values, strict=True))))
        except ValueError as error:
            left_out.append(f"{path}:{number}: {error}")
    return rows, left_out


def lines_of(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The lines of a CSV file, with their numbers. Raises InputError for a file that is too long or no CSV."""
    lines = csv.reader(io.StringIO(_text_of(path), newline=""))
    try:
        for values in lines:
            yield lines.line_num, values
    except csv.Error as error:
        raise InputError(f"{path}:{lines.line_num}: is not CSV: {error}") from None


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise InputError(f"{path}: has more than {LARGEST:,} bytes; give a file of published runs")
        return data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise InputError(f"{path}: cannot be read: {why}") from None


def _check(path: Path, columns: list[str]) -> None:
    every = f"the first line must name all of {', '.join(COLUMNS)}"
    for column in COLUMNS:
        if column not in columns:
            raise InputError(f"{path}: lacks the column {column}; {every}")
        if columns.count(column) > 1:
            raise InputError(f"{path}: has the column {column} {columns.count(column)} times; {every}, once")


def _row(file: str, line: int, fields: Mapping[str, str]) -> Row:
    """Raises ValueError with what is missing or wrong."""
    model = fields["model"].lower()
    if re.search(EXPERTS, model):
        raise ValueError(f"model = {fields['model']!r:.100}: has experts, which the planner does not know")
    fits = _fits(fields["status"].strip().lower())
    if re.search(FOUR_BITS, fields["precision"].lower()):
        raise ValueError(f"precision = {fields['precision']!r:.40}: products in 4 bits are none that the planner knows")
    cluster = cluster_of(fields["gpu"])
    program = program_of(fields)
    work, batch = _work(fields)
    together = _together(fields["fsdp_zero"].lower(), work, cluster)
    if together < work.dp and work.dp % together == 0:
        work = replace(work, shards=together)
    memory = _number(fields, "mem_gib", 1e6)
    given = batch if fields["global_batch"].strip() else None
    sizes = work.layers, work.width, work.heads, work.ffn, fields["vocab"], work.sequence
    return Row(
        file=file,
        line=line,
        source=fields["source"][:100],
        work=work,
        batch=batch,
        program=program,
        cluster=cluster,
        seconds=_seconds(fields, work, batch, cluster),
        memory=None if memory is None else memory * 2**30,
        counts=counted_in(fields, program),
        fits=fits,
        micro=bool(fields["micro_batch"].strip()),
        virtual=bool(fields["vpp"].strip()),
        group=(fields["source"], sizes, _whole(fields, "n_gpus"), cluster.name, given),
        unknown=tuple(unknown_words(fields)),
    )


def _together(words: str, work: Work, cluster: Cluster) -> int:
    """How many data-parallel ranks share their states: those of a group, with hsdp of a node, or all."""
    if group := found(GROUPS, words):
        return int(group)
    return max(1, cluster.gpus_per_node // (work.tp * work.cp)) if "hsdp" in words else work.dp


def _work(fields: Mapping[str, str]) -> tuple[Work, int]:
    """What a step does, and the sequences of its batch."""
    gated = re.search(GATED, fields["model"].lower()) is not None
    notes = fields["notes"]  # some tables tell in a test's name what their columns lack
    sequence = _whole({"seq": found(r"seq(\d{1,12})\b", notes) or fields["seq"]}, "seq")
    cp = _whole({"cp": found(r"cp(\d{1,12})_", notes) or fields["cp"]}, "cp", 1)
    layers, width, gpus = (_whole(fields, key) for key in ("layers", "hidden", "n_gpus"))
    heads = _whole(fields, "heads", max(1, width // HEAD))
    tp, pp, virtual = (_whole(fields, key, 1) for key in ("tp", "pp", "vpp"))
    if tp * pp * cp > gpus:
        raise ValueError(f"tp = {tp}, pp = {pp}, cp = {cp}: needs {tp * pp * cp} GPUs, but n_gpus = {gpus}")
    if heads > width or tp > width or cp > sequence or pp * virtual > layers + 2:
        raise ValueError(f"heads = {heads}, tp = {tp}, cp = {cp}, pp = {pp}, vpp = {virtual}: cut the model too small")
    dp = gpus // (tp * pp * cp)  # some tables give the product with other sizes here
    micro = _whole({"micro_batch": re.split(r"[ /]", fields["micro_batch"].strip())[0]}, "micro_batch", 1)
    if "total" in fields["micro_batch"]:  # of a data-parallel rank
        batch, micro = micro * dp, 1
    else:
        batch = _whole(fields, "global_batch", micro * dp)
    work = Work(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=_whole(fields, "kv_heads", heads),
        head_size=width // heads,
        ffn=_whole(fields, "ffn", 4 * width),
        vocab=_padded(_whole(fields, "vocab", GPT_VOCABULARY), tp),
        sequence=sequence,
        gated=gated,
        tied="untied" not in notes.lower() and (not gated or "tied embeddings" in notes.lower()),
        tp=tp,
        pp=pp,
        virtual=virtual,
        cp=cp,
        dp=dp,
        mode=mode_of(fields["fsdp_zero"]),
        micro=micro,
        micro_batches=max(1, round(batch / (dp * micro))),
        recompute=_recompute(fields["recompute"]),
        precision="fp8" if re.search(r"f(loat|p)8", fields["precision"]) else "bf16",
    )
    return work, batch


def _fits(status: str) -> bool:
    if status in ("", "ok"):
        return True
    if re.search(OUT_OF_MEMORY, status):
        return False
    raise ValueError(f"status = {status!r:.40}: must be ok or oom")


def _seconds(fields: Mapping[str, str], work: Work, batch: int, cluster: Cluster) -> float | None:
    """Seconds of a step, from whatever speed was published."""
    gpus = _whole(fields, "n_gpus")
    if seconds := _number(fields, "iter_time_s", 1e6):
        return seconds
    if tokens := _number(fields, "tps_per_gpu", 1e9):
        return batch * work.sequence / gpus / tokens
    rate = (_number(fields, "tflops_per_gpu", 1e5) or 0.0) * 1e12
    if share := _number(fields, "mfu", 100):
        rate = share / 100 * cluster.gpu.peak["bf16"]
    return counted_flops(fields["flops_conv"], work) * batch * work.sequence / (rate * gpus) if rate else None


def counted_flops(convention: str, work: Work) -> float:
    """Operations for a token as a source counts them: with recomputation or without, with all of attention or half."""
    passes = 4 if "hardware" in convention else 3
    seen = 0.5 if "causal" in convention and "not causal" not in convention else 1.0
    scores = 4 * work.sequence * work.q * seen
    return passes * work.layers * (2 * work.layer_parameters + scores) + 3 * 2 * work.width * work.vocab


def _padded(vocab: int, tp: int) -> int:
    """The vocabulary as tensor-parallel programs pad it: a multiple of VECTOR on every rank."""
    return vocab if tp == 1 else -(-vocab // (VECTOR * tp)) * VECTOR * tp


def _recompute(text: str) -> Recompute:
    return "full" if text.startswith("full") else "selective" if text.startswith("selective") else "none"


def _number(fields: Mapping[str, str], key: str, most: float) -> float | None:
    """A number above 0; None for an empty field."""
    text = fields[key].strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{key} = {text!r:.40}: must be a number") from None
    if not LEAST <= value <= most:
        raise ValueError(f"{key} = {text!r:.40}: must be a number of at least {LEAST:g}, and at most {most:g}")
    return value


def _whole(fields: Mapping[str, str], key: str, default: int | None = None) -> int:
    most = MOST.get(key, MOST["n_gpus"])
    text = fields[key].strip()
    if not text and default is not None:
        return default
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{key} = {text!r:.40}: must be a number") from None
    if not 1 <= value <= most or value != int(value):
        raise ValueError(f"{key} = {text!r:.40}: must be a whole number of at least 1, and at most {most:,}")
    return int(value)


def works_of(row: Row) -> Iterator[Work]:
    """The row's work; where micro-batches or the stages of a rank were not published, with each that divide evenly."""
    each = -(-row.batch // row.work.dp)  # sequences of a data-parallel rank
    micros = [micro for micro in MICRO_BATCHES if micro == 1 or each % micro == 0]
    for micro in [row.work.micro] if row.micro else micros:
        work = row.work if row.micro else replace(row.work, micro=micro, micro_batches=each // micro)
        for virtual in [work.virtual] if row.virtual else _stages(work):
            yield replace(work, virtual=virtual)


def _stages(work: Work) -> Iterator[int]:
    """Numbers of equal stages that each pipeline rank may have."""
    of_rank, rest = divmod(work.layers, work.pp)
    for virtual in range(1, max(1, of_rank) + 1):  # some ranks may have no layer but the embedding or the head
        whole = of_rank % virtual == 0 and not rest and work.micro_batches % work.pp == 0
        if virtual == 1 or (work.pp > 1 and whole):
            yield virtual
