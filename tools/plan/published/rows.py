"""Published training runs, as rows of a CSV file, in the terms of the planner. Imports no torch.

A row names its source, the program, the sizes of the model, the layout, the GPUs, and what was measured. Speed is given
as seconds of a step, tokens/s/GPU, FLOP/s/GPU or MFU; all are turned into seconds of a step here, by the row's own
convention of counting. Each column has numbers or one of a few words, so that no row is read as what it is not.
"""

import csv
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import get_args

from megalite.base.errors import InputError, counted
from megalite.config.layers import Heads, Latent, Mixture, SwiGLU
from megalite.config.parallel_schema import DataMode
from megalite.cost.cluster import Cluster, Level, Link, known_clusters, load_cluster
from megalite.cost.program import Dispatch
from megalite_tools.plan.published.fields import number, whole, word
from megalite_tools.plan.published.kept_memory import Counted
from megalite_tools.plan.published.profiles import Profile
from megalite_tools.plan.published.releases import program_of
from megalite_tools.plan.published.work import Recompute, Work

COLUMNS = [
    "source",
    "program",
    "version",
    "options",
    "model",
    "experts",
    "gated",
    "tied",
    "layers",
    "hidden",
    "ffn",
    "heads",
    "kv_heads",
    "vocab",
    "seq",
    "gpu",
    "node_gpus",
    "network_gbit",
    "link_gb",
    "power_w",
    "memory_gib",
    "bandwidth_tb",
    "n_gpus",
    "tp",
    "pp",
    "vpp",
    "cp",
    "sharding",
    "shards",
    "micro_batch",
    "global_batch",
    "recompute",
    "precision",
    "iter_time_s",
    "tps_per_gpu",
    "tflops_per_gpu",
    "mfu",
    "flops",
    "mem_gib",
    "mem_counts",
    "status",
    "provenance",
    "notes",
]
# Columns that a file need not have. head_size: where it is not the width over the heads.
EXPERT_COLUMNS = [
    "head_size",
    "query_rank",
    "key_rank",
    "rotary_width",
    "value_width",
    "window",
    "full_every",
    "top_k",
    "expert_ffn",
    "shared_ffn",
    "dense_layers",
    "predicting",
    "ep",
    "dispatcher",
    "ep_overlap",
    "routing",
    "rounds",
]
MAX_FILE_BYTES = 1 << 24  # bytes of a file
GPT_VOCABULARY = 51_200  # as in Megatron's GPT models, where a row of a model without gates has no number
VECTOR = 128  # Megatron-LM, megatron/training/arguments.py: --make-vocab-size-divisible-by
HEAD = 128  # elements of the width for each head, where a row does not say how many there are
# In the names of models: 30B-A3B and 8x7B, and of families that have nothing else.
EXPERTS = r"moe|experts|\d+x\d+b|-a\d+(?:\.\d+)?b\b|mixtral|kimi.?k2|gpt.?oss|deepseek.?v[234]|llama.?4|glm.?4\.5"
ROUTINGS = ("balanced", "natural", "unsaid")
PRECISIONS = {"bf16": "bf16", "fp16": "bf16", "fp8": "fp8", "mxfp8": "fp8"}  # and what the planner takes them as
FLOPS = ("model", "model causal", "hardware", "hardware causal")
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)  # sizes of micro-batches that are tried, where a row does not say
JEAN_ZAY = "jean_zay_a100"
# Its nodes have two boards of four GPUs, in each of which all are connected: README of bigscience-workshop/bigscience,
# "Using NVLink 4 inter-gpu connects, 4 OmniPath links". A ring among four uses two of the three links of a GPU: a third
# ring would need links of the first two.
JEAN_ZAY_LEVELS = Level(4, Link(200e9, 6e-6)), Level(8, Link(25e9, 6e-6))


@dataclass(frozen=True)
class Row:
    """A published run. line: of the file, for messages.

    seconds: of a step; None if no speed was published. memory: bytes of the fullest GPU, counted as `counts` says;
    None if none were published, or with experts, whose memory other programs hold in ways of their own. routing: how
    experts were chosen, "" without any. fits: whether the run did not run out of memory. micro: whether the size of
    micro-batches was published. group: what is the same for runs whose layouts can be compared.
    """

    file: str
    line: int
    source: str
    work: Work
    batch: int
    program: Profile
    cluster: Cluster
    seconds: float | None
    memory: float | None
    routing: str
    counts: Counted
    fits: bool
    micro: bool
    virtual: bool
    group: tuple[object, ...]

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def read_rows(path: Path) -> tuple[list[Row], list[str]]:
    """The rows of a file, and why each row that is left out cannot be predicted. Raises InputError for another file."""
    lines = lines_of(path)
    rows, left_out = [], []
    columns = [column.strip() for column in next(lines, (0, []))[1]]
    _check(path, columns)
    for line, values in lines:
        if not values:
            continue
        try:
            if len(values) != len(columns):
                raise ValueError(
                    f"has {counted(len(values), 'field')}, but the first line names {len(columns)} columns"
                )
            fields = dict.fromkeys(EXPERT_COLUMNS, "") | dict(zip(columns, values, strict=True))
            rows.append(_row(path.name, line, fields))
        except ValueError as error:
            left_out.append(f"{path}:{line}: {error}")
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
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise InputError(f"{path}: has more than {MAX_FILE_BYTES:,} bytes; give a file of published runs")
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
    if not whole(fields, "experts", least=0) and re.search(EXPERTS, fields["model"].lower()):
        raise ValueError(f"model = {fields['model']!r:.100}: has experts, by its name; the column experts must tell")
    cluster = _cluster(fields)
    work, batch = _work(fields)
    program = program_of(fields, work.mode == "zero3", work.precision == "fp8")
    if work.experts:
        program = replace(
            program,
            dispatch=word(fields, "dispatcher", get_args(Dispatch), "all_to_all"),
            dispatch_overlaps=word(fields, "ep_overlap", ("yes", "no"), "no") == "yes",
        )
    memory = number(fields, "mem_gib", 1e6)
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
        memory=None if memory is None or work.experts else memory * 2**30,
        routing=word(fields, "routing", ROUTINGS, "unsaid") if work.experts else "",
        counts=word(fields, "mem_counts", get_args(Counted), program.kept.counts),
        fits=word(fields, "status", ("ok", "oom")) == "ok",
        micro=bool(fields["micro_batch"].strip()),
        virtual=bool(fields["vpp"].strip()),
        group=(fields["source"], sizes, work.gpus, cluster.name, given),
    )


def _cluster(fields: Mapping[str, str]) -> Cluster:
    """The cluster of a row's GPUs, with what the row gives of its network, links, power and memory."""
    name = word(fields, "gpu", (*known_clusters(), JEAN_ZAY))
    cluster = _shipped("a100_80gb" if name == JEAN_ZAY else name)
    if (gpus := whole(fields, "node_gpus", cluster.gpus_per_node)) != cluster.gpus_per_node:
        inside = tuple(level for level in cluster.levels[:-1] if level.gpus < gpus)
        cluster = replace(cluster, levels=(*inside, replace(cluster.levels[-1], gpus=gpus)))
    if rate := number(fields, "network_gbit", 1e5):
        cluster = replace(cluster, network=replace(cluster.network, bandwidth=rate / 8 * 1e9))
    gpu = cluster.gpu
    if watts := number(fields, "power_w", 1e4):
        gpu = replace(gpu, power=watts)
    if rate := number(fields, "bandwidth_tb", 1e3):
        gpu = replace(gpu, bandwidth=rate * 1e12)
    if size := number(fields, "memory_gib", 1e4):
        gpu = replace(gpu, memory=size * 2**30)
    cluster = replace(cluster, gpu=gpu)
    if rate := number(fields, "link_gb", 1e5):
        of_node = cluster.levels[-1].link.bandwidth
        levels = (replace(each, link=each.link.faster(rate * 1e9 / of_node)) for each in cluster.levels)
        cluster = replace(cluster, levels=tuple(levels))
    return replace(cluster, levels=JEAN_ZAY_LEVELS) if name == JEAN_ZAY else cluster


@cache
def _shipped(name: str) -> Cluster:
    """A cluster that megalite comes with; rows name few of them."""
    return load_cluster(name)


def _work(fields: Mapping[str, str]) -> tuple[Work, int]:
    """Read the work of a step, and the sequences of its batch."""
    gated, tied = (word(fields, key, ("yes", "no")) == "yes" for key in ("gated", "tied"))
    layers, width, sequence, gpus = (whole(fields, key) for key in ("layers", "hidden", "seq", "n_gpus"))
    heads = whole(fields, "heads", max(1, width // HEAD))
    tp, pp, virtual, cp = (whole(fields, key, 1) for key in ("tp", "pp", "vpp", "cp"))
    dp, rest = divmod(gpus, tp * pp * cp)
    if rest:
        raise ValueError(f"tp = {tp}, pp = {pp}, cp = {cp}: {tp * pp * cp} GPUs are no divisor of n_gpus = {gpus}")
    if heads > width or tp > width or cp > sequence or pp * virtual > layers + 2:
        raise ValueError(f"heads = {heads}, tp = {tp}, cp = {cp}, pp = {pp}, vpp = {virtual}: cut the model too small")
    kv_heads = whole(fields, "kv_heads", heads)
    if heads % kv_heads or (fields["heads"].strip() and (width % heads or heads % tp)):
        raise ValueError(
            f"heads = {heads}, kv_heads = {kv_heads}: must divide hidden = {width}, "
            f"and be a multiple of kv_heads and of tp = {tp}"
        )
    if virtual > 1 and pp == 1:
        raise ValueError(f"vpp = {virtual}: must be 1 or empty where pp = 1, as no pipeline has virtual stages")
    mode = word(fields, "sharding", get_args(DataMode))
    if mode == "ddp" and fields["shards"].strip():
        raise ValueError(f"shards = {fields['shards'].strip()!r:.40}: must be empty with ddp, which shards nothing")
    shards = whole(fields, "shards", dp)
    if dp % shards:
        raise ValueError(f"shards = {shards}: is no divisor of the {dp} data-parallel ranks")
    experts, ep = _experts(fields, dp * cp * tp, tp)
    head_size, full_every = (
        whole(fields, key, each) for key, each in (("head_size", width // heads), ("full_every", 0))
    )
    micro = whole(fields, "micro_batch", 1)
    batch = whole(fields, "global_batch", micro * dp)
    if batch % (micro * dp) and fields["micro_batch"].strip():
        raise ValueError(f"global_batch = {batch}: is no multiple of micro_batch = {micro} on {dp} data-parallel ranks")
    work = Work(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        ffn=whole(fields, "ffn", None if gated else 4 * width),
        vocab=_padded(whole(fields, "vocab", None if gated else GPT_VOCABULARY), tp),
        sequence=sequence,
        gated=gated,
        tied=tied,
        tp=tp,
        pp=pp,
        virtual=virtual,
        cp=cp,
        dp=dp,
        shards=shards if shards < dp else None,
        mode=mode,
        micro=micro,
        micro_batches=max(1, round(batch / (dp * micro))),
        rounds=whole(fields, "rounds", 1),
        recompute=word(fields, "recompute", get_args(Recompute)),
        window=whole(fields, "window", 0) or None,
        full_every=full_every,
        latent=_latent(fields, heads, head_size),
        experts=experts,
        dense_layers=whole(fields, "dense_layers", 0),
        predicting=whole(fields, "predicting", 0),
        ep=ep,
        precision="fp8" if PRECISIONS[word(fields, "precision", PRECISIONS)] == "fp8" else "bf16",
    )
    return work, batch


def _experts(fields: Mapping[str, str], ranks: int, tp: int) -> tuple[Mixture | None, int]:
    """Experts of every layer, and how many ranks share them out."""
    count, ep = whole(fields, "experts", least=0), whole(fields, "ep", 1)
    if count % ep or ranks % ep or (ep > 1 and ep % tp):
        raise ValueError(f"ep = {ep}: must divide {count} experts and {ranks} ranks, and be a multiple of tp = {tp}")
    if not count:
        return None, ep
    shared = whole(fields, "shared_ffn", 0)
    shared_one = SwiGLU(shared) if shared else None
    return Mixture(count, whole(fields, "top_k"), whole(fields, "expert_ffn"), shared=shared_one), ep


def _latent(fields: Mapping[str, str], heads: int, head_size: int) -> Latent | None:
    """Latent attention, where the ranks of its latents are told."""
    if not fields["key_rank"].strip():
        return None
    rotary, values = whole(fields, "rotary_width"), whole(fields, "value_width")
    queries = whole(fields, "query_rank", 0) or None
    return Latent(Heads(heads, heads, head_size, rotary, values), queries, whole(fields, "key_rank"))


def _seconds(fields: Mapping[str, str], work: Work, batch: int, cluster: Cluster) -> float | None:
    """Seconds of a step, from whatever speed was published."""
    if seconds := number(fields, "iter_time_s", 1e6):
        return seconds
    if tokens := number(fields, "tps_per_gpu", 1e9):
        return batch * work.sequence / work.gpus / tokens
    rate = (number(fields, "tflops_per_gpu", 1e5) or 0.0) * 1e12
    if share := number(fields, "mfu", 100):
        if share < 1:
            raise ValueError(f"mfu = {share:g}: must be in percent, as {100 * share:g}")
        rate = share / 100 * cluster.gpu.peak["bf16"]
    if not rate:
        return None
    return counted_flops(word(fields, "flops", FLOPS), work) * batch * work.sequence / (rate * work.gpus)


def counted_flops(convention: str, work: Work) -> float:
    """Operations for a token as a source counts them: with recomputation or without, with all of attention or half."""
    passes = 4 if "hardware" in convention else 3
    seen = 0.5 if "causal" in convention else 1.0
    return passes * work.forward_flops(seen) + 3 * 2 * work.width * work.vocab


def _padded(vocab: int, tp: int) -> int:
    """The vocabulary as tensor-parallel programs pad it: a multiple of VECTOR on every rank."""
    return vocab if tp == 1 else -(-vocab // (VECTOR * tp)) * VECTOR * tp


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
