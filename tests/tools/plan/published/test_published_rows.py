"""Published runs: rows of CSV files in the planner's terms, and how far its predictions are from them."""

import csv
from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_cases import MIXTURE, write

from megalite.base.errors import InputError
from megalite_tools.plan.published.rows import COLUMNS, MAX_FILE_BYTES, Row, read_rows, works_of
from megalite_tools.plan.published.score import (
    judged,
    timed,
    weighed,
)

FOLDER = Path(__file__).with_name("runs")


def test_rates_and_times_that_a_source_gives_both_agree(rows: list[Row], tmp_path: Path) -> None:
    """Megatron's table has FLOP/s by its own formula; its seconds were derived from them by somebody else."""
    of = {row.line: row for row in rows if row.file == "megatron_sc21.csv"}
    with (FOLDER / "megatron_sc21.csv").open() as file:
        for number, fields in enumerate(csv.DictReader(file), 2):
            if fields["iter_time_s"]:
                ((row,), _) = read_rows(write(tmp_path, **{**fields, "iter_time_s": ""}))
                assert row.seconds == pytest.approx(of[number].seconds, rel=0.005)


def test_a_row_in_the_planners_terms(tmp_path: Path) -> None:
    ((row,), left_out) = read_rows(write(tmp_path))
    work = row.work
    assert not left_out
    assert (work.dp, work.micro_batches, work.mode, work.gated, work.gpus) == (16, 4, "zero3", True, 64)
    assert row.seconds == pytest.approx(64 * 8192 / 64 / 6000)


@pytest.mark.parametrize(
    ("fields", "network", "power", "bandwidth", "memory", "link"),
    [
        ({"gpu": "a100_80gb"}, 25e9, 400, 2039e9, 80, 300e9),
        ({"gpu": "A100_80GB", "network_gbit": "50"}, 6.25e9, 400, 2039e9, 80, 300e9),
        ({"power_w": "500", "bandwidth_tb": "2.4", "memory_gib": "95.04"}, 50e9, 500, 2.4e12, 95.04, 450e9),
        ({"gpu": "h100_sxm", "link_gb": "200"}, 50e9, 700, 3350e9, 79.65, 200e9),
        ({"gpu": "jean_zay_a100"}, 25e9, 400, 2039e9, 80, 25e9),
    ],
)
def test_the_gpus_of_a_row(
    fields: dict[str, str], network: float, power: float, bandwidth: float, memory: float, link: float, tmp_path: Path
) -> None:
    ((row,), _) = read_rows(write(tmp_path, **fields))
    gpu, nearest = row.cluster.gpu, row.cluster.levels[-1].link
    assert row.cluster.network.bandwidth == pytest.approx(network)
    assert (gpu.power, gpu.bandwidth) == (power, bandwidth)
    assert gpu.memory == pytest.approx(memory * 2**30, rel=0.003)
    assert nearest.bandwidth == pytest.approx(link)


def test_a_node_may_have_other_numbers_of_gpus(tmp_path: Path) -> None:
    usual, less, bridged = (
        read_rows(write(tmp_path, gpu=gpu, node_gpus=gpus))[0][0].cluster
        for gpu, gpus in (("h200", ""), ("h200", "4"), ("h100_nvl", "2"))
    )
    assert (usual.gpus_per_node, less.gpus_per_node) == (8, 4)
    assert less.levels[-1].link == usual.levels[-1].link
    assert [level.gpus for level in bridged.levels] == [2]


def test_what_rings_reach_falls_with_a_capped_link(tmp_path: Path) -> None:
    (((fast,), _), ((slow,), _)) = (read_rows(write(tmp_path, link_gb=link)) for link in ("", "225"))
    assert slow.cluster.levels[-1].link.reached == pytest.approx(fast.cluster.levels[-1].link.reached / 2)


@pytest.mark.parametrize(("told", "precision"), [("bf16", "bf16"), ("FP16", "bf16"), ("FP8", "fp8"), ("mxfp8", "fp8")])
def test_words_are_known_in_whatever_case(told: str, precision: str, tmp_path: Path) -> None:
    ((row,), _) = read_rows(write(tmp_path, precision=told, gated="No", tied="YES", sharding="ZeRO1", status="OK"))
    work = row.work
    assert (work.precision, work.gated, work.tied, work.mode, row.fits) == (precision, False, True, "zero1", True)


@pytest.mark.parametrize("program", ["other", "megatron-bridge", "scaling", "nanotron"])
def test_a_pipeline_may_have_ranks_for_the_embedding_and_the_head(program: str, tmp_path: Path) -> None:
    ((row,), left_out) = read_rows(write(tmp_path, program=program, layers="6", tp="1", pp="8", vpp=""))
    assert not left_out
    ((each,),) = (timed([row]),)
    assert each.predicted > 0
    assert len(judged([row])) == 1


def test_where_micro_batches_are_unknown_all_are_tried(tmp_path: Path) -> None:
    ((row,), _) = read_rows(write(tmp_path, micro_batch="", vpp="1"))
    assert [(work.micro, work.micro_batches) for work in works_of(row)] == [(1, 4), (2, 2), (4, 1)]
    ((row,), _) = read_rows(write(tmp_path, micro_batch="", global_batch="7"))
    assert [(work.micro, work.micro_batches) for work in works_of(row)] == [(1, 1)]


def test_where_the_stages_of_a_rank_are_unknown_all_equal_ones_are_tried(tmp_path: Path) -> None:
    def stages(**fields: str) -> list[int]:
        ((row,), _) = read_rows(write(tmp_path, **fields))
        return [work.virtual for work in works_of(row)]

    assert stages() == [1, 2, 4, 8, 16]  # 32 layers on two ranks, four micro-batches
    assert stages(vpp="4") == [4]
    assert stages(pp="1") == [1]
    assert stages(global_batch="48") == [1]  # three micro-batches of two ranks
    assert stages(layers="31") == [1]


def test_states_may_be_sharded_in_groups(tmp_path: Path) -> None:
    for group, shards in (("8", 8), ("16", None), ("", None)):
        ((row,), _) = read_rows(write(tmp_path, sharding="zero1", shards=group))
        assert (row.work.mode, row.work.dp, row.work.shards) == ("zero1", 16, shards)


def test_sizes_that_a_row_does_not_tell(tmp_path: Path) -> None:
    """Heads of 128 elements; a vocabulary of GPT's, as tensor-parallel ranks pad it."""
    ((row,), _) = read_rows(write(tmp_path, heads="", kv_heads="", ffn="", vocab="", gated="no", tp="4"))
    assert (row.work.heads, row.work.head_size, row.work.ffn, row.work.vocab) == (32, 128, 16384, 51200)
    ((row,), _) = read_rows(write(tmp_path, vocab="50257", tp="8"))
    assert row.work.vocab == 51200
    ((row,), _) = read_rows(write(tmp_path, vocab="50257", tp="1"))
    assert row.work.vocab == 50257


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"layers": ""}, "layers = '': must be a number"),
        ({"heads": "many"}, "heads = 'many': must be a number"),
        ({"hidden": "-1"}, "hidden = '-1': must be a whole number of at least 1"),
        ({"gpu": "TPU v5"}, "gpu = 'TPU v5': must be a100_40gb, a100_80gb, b200"),
        ({"experts": "160"}, "top_k = '': must be a number"),
        ({**MIXTURE, "ep": "6"}, "ep = 6: must divide 8 experts and 32 ranks, and be a multiple of tp = 2"),
        ({**MIXTURE, "routing": "skewed"}, "routing = 'skewed': must be balanced, natural"),
        ({**MIXTURE, "dispatcher": "deepep"}, "dispatcher = 'deepep': must be all_to_all or once"),
        ({"experts": ""}, "experts = '': must be a number"),
        ({"model": "Qwen3-30B-A3B"}, "model = 'Qwen3-30B-A3B': has experts, by its name"),
        ({"model": "Mixtral-8x7B"}, "has experts"),
        ({"model": "llama-moe"}, "has experts"),
        *[({"model": name}, "has experts") for name in ("Kimi-K2", "GPT-OSS 120B", "DeepSeek-V3", "Llama 4 Scout")],
        ({"n_gpus": "0"}, "n_gpus = '0': must be a whole number of at least 1"),
        ({"n_gpus": "1e7"}, "and at most 1,048,576"),
        ({"tp": "64"}, "tp = 64, pp = 2, cp = 1: 128 GPUs are no divisor of n_gpus = 64"),
        ({"tp": "3"}, "tp = 3, pp = 2, cp = 1: 6 GPUs are no divisor of n_gpus = 64"),
        (
            {"heads": "33"},
            "heads = 33, kv_heads = 8: must divide hidden = 4096, and be a multiple of kv_heads and of tp",
        ),
        ({"heads": "33", "kv_heads": ""}, "heads = 33, kv_heads = 33: must divide hidden = 4096"),
        ({"kv_heads": "7"}, "heads = 32, kv_heads = 7: must divide hidden = 4096"),
        ({"tp": "64", "pp": "1"}, "must divide hidden = 4096, and be a multiple of kv_heads and of tp = 64"),
        ({"pp": "1", "vpp": "4"}, "vpp = 4: must be 1 or empty where pp = 1"),
        ({"sharding": "ddp", "shards": "8"}, "shards = '8': must be empty with ddp, which shards nothing"),
        ({"shards": "32"}, "shards = 32: is no divisor of the 16 data-parallel ranks"),
        ({"shards": "group 8"}, "shards = 'group 8': must be a number"),
        ({"global_batch": "40"}, "global_batch = 40: is no multiple of micro_batch = 1 on 16 data-parallel ranks"),
        ({"ffn": ""}, "ffn = '': must be a number"),
        ({"vocab": ""}, "vocab = '': must be a number"),
        ({"pp": "32", "vpp": "2"}, "pp = 32, vpp = 2: cut the model too small"),
        ({"heads": "5000"}, "heads = 5000, tp = 2, cp = 1, pp = 2, vpp = 1: cut the model too small"),
        ({"mem_gib": "-3"}, "mem_gib = '-3': must be a number of at least 1e-09"),
        ({"mem_gib": "lots"}, "mem_gib = 'lots': must be a number"),
        ({"tps_per_gpu": "nan"}, "tps_per_gpu = 'nan': must be a number of at least 1e-09, and at most 1e+09"),
        ({"iter_time_s": "inf"}, "iter_time_s = 'inf': must be a number of at least 1e-09, and at most 1e+06"),
        ({"micro_batch": "-1"}, "micro_batch = '-1': must be a whole number"),
        ({"status": "hangs"}, "status = 'hangs': must be ok or oom"),
        ({"precision": "NVFP4"}, "precision = 'NVFP4': must be bf16, fp16, fp8 or mxfp8"),
        ({"precision": ""}, "precision = '': must be bf16"),
        ({"sharding": "zero1 group 8"}, "sharding = 'zero1 group 8': must be ddp, zero1, zero2 or zero3"),
        ({"recompute": "sometimes"}, "recompute = 'sometimes': must be none, selective or full"),
        ({"gated": "InternLM"}, "gated = 'InternLM': must be yes or no"),
        ({"tied": ""}, "tied = '': must be yes or no"),
        ({"mem_counts": "resident"}, "mem_counts = 'resident': must be allocated, reserved, device, formula or unsaid"),
        ({"tps_per_gpu": "", "mfu": "40", "flops": "full"}, "flops = 'full': must be model, model causal, hardware"),
        ({"tps_per_gpu": "", "mfu": "0.45", "flops": "model"}, "mfu = 0.45: must be in percent, as 45"),
        ({"program": "torchtian"}, "program = 'torchtian': must be automodel, deepspeed, fms-fsdp"),
    ],
)
def test_what_cannot_be_predicted_is_left_out_with_the_reason(fields: dict[str, str], why: str, tmp_path: Path) -> None:
    found, left_out = read_rows(write(tmp_path, **fields))
    assert not found
    assert why in left_out[0]
    assert ":2: " in left_out[0]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", r"lacks the column source; the first line must name all of source, program"),
        (b"source,model\nx,y\n", r"lacks the column program"),
        ((",".join(COLUMNS) + ",tp\n").encode(), r"has the column tp 2 times"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"#" * (MAX_FILE_BYTES + 1), "has more than 16,777,216 bytes"),
        ((",".join(COLUMNS) + "\n" + '"' + "x" * 200_000).encode(), r"a\.csv:2: is not CSV: field larger"),
    ],
    ids=["empty", "columns missing", "a column twice", "not text", "large", "a field without end"],
)
def test_another_file_is_refused(data: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(data)
    with pytest.raises(InputError, match=told) as caught:
        read_rows(tmp_path / "a.csv")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.csv: cannot be read: No such file"):
        read_rows(tmp_path / "none.csv")


def test_windows_line_ends_a_mark_of_utf_8_empty_lines_and_more_columns_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, notes="of two\nlines")
    ((plain,), _) = read_rows(path)
    first, rest = path.read_bytes().decode().split("\r\n", 1)
    path.write_bytes(b"\xef\xbb\xbf" + f"{first}, comment\r\n\r\n{rest.rstrip()},mine\r\n".encode())
    ((row,), left_out) = read_rows(path)
    assert not left_out
    assert replace(row, line=plain.line) == plain


@pytest.mark.parametrize(
    ("change", "count"),
    [(lambda line: line + ",9", len(COLUMNS) + 1), (lambda line: line[: line.rindex(",")], len(COLUMNS) - 1)],
)
def test_a_row_of_another_length_is_left_out(change: Callable[[str], str], count: int, tmp_path: Path) -> None:
    path = write(tmp_path)
    head, row = path.read_text().splitlines()
    path.write_text(f"{head}\n{change(row)}\n{row}\n")
    found, (why,) = read_rows(path)
    assert len(found) == 1
    assert f"runs.csv:2: has {count} fields, but the first line names {len(COLUMNS)} columns" in why


odd = st.sampled_from(
    ["", "0", "-1", "1", "8", "1e9", "1e400", "nan", "inf", "2.5", "x", "1/2", "full", "OOM", "nemo", "cudnn unfused"]
)


@given(st.dictionaries(st.sampled_from(COLUMNS), odd | st.text(max_size=12), max_size=6))
@settings(max_examples=150, deadline=None)
def test_whatever_a_row_says_it_is_predicted_or_left_out(fields: dict[str, str]) -> None:
    with TemporaryDirectory() as folder:
        rows, left_out = read_rows(write(Path(folder), **fields))
    assert len(rows) + len(left_out) == 1
    for found in (*timed(rows), *weighed(rows)):
        assert isfinite(found.error)
    assert len(judged(rows)) == len(rows)


def test_memory_is_counted_as_the_row_says_or_as_the_program_does(tmp_path: Path) -> None:
    for kind in ("allocated", "reserved", "device", "formula", "unsaid"):
        ((row,), _) = read_rows(write(tmp_path, program="torchtitan", version="2025", mem_counts=kind, mem_gib="60"))
        assert (row.counts, row.memory) == (kind, 60 * 2**30)
    for program, kind in (("megatron-bridge", "unsaid"), ("kempnerforge", "reserved")):
        ((row,), _) = read_rows(write(tmp_path, program=program, mem_gib="60"))
        assert row.counts == kind
