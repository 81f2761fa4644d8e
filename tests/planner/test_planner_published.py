"""Published runs: rows of CSV files in the planner's terms, and how far its predictions are from them."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.config.errors import InputError
from megalite.planner.constants import BOUNDS, FITTED
from megalite.planner.published import COLUMNS, Row, batches_of, cluster_of, read_rows
from megalite.planner.score import by_source, fit, loss, score, timed

FOLDER = Path(__file__).with_name("published")
FILES = sorted(FOLDER.glob("*.csv"))


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [row for file in FILES for row in read_rows(file)[0]]


def test_step_times_are_predicted_as_well_as_the_documentation_says(rows: list[Row]) -> None:
    found = score(timed(rows))
    assert found is not None
    assert found.rows == 386
    assert found.mean_abs_error < 0.065
    assert found.p90 < 0.125
    assert abs(found.bias) < 0.02
    assert 0.8 <= found.inside_interval <= 0.95


def test_no_source_is_far_off(rows: list[Row]) -> None:
    for source, group in by_source(timed(rows)).items():
        found = score(group)
        assert found is not None
        assert found.mean_abs_error < 0.11, source


def test_fitted_constants_are_within_their_bounds() -> None:
    assert all(least <= getattr(FITTED, name) <= most for name, (least, most) in BOUNDS.items())


def test_a_fit_finds_its_way_back(rows: list[Row]) -> None:
    few = [row for row in rows if row.source.startswith(("Korthikanti", "SimuMax"))]
    start = replace(FITTED, memory=0.5, network=0.3)
    found = fit(few, start, finest=0.1)
    assert loss(few, found) < 0.8 * loss(few, start)


def test_rates_and_times_that_a_source_gives_both_agree(rows: list[Row], tmp_path: Path) -> None:
    """Megatron's table has FLOP/s by its own formula; its seconds were derived from them by somebody else."""
    of = {row.line: row for row in rows if row.file == "megatron_sc21.csv"}
    with (FOLDER / "megatron_sc21.csv").open() as file:
        for number, fields in enumerate(csv.DictReader(file), 2):
            if fields["iter_time_s"]:
                ((row,), _) = read_rows(write(tmp_path, **{**fields, "iter_time_s": ""}))
                assert row.seconds == pytest.approx(of[number].seconds, rel=0.005)


def write(folder: Path, **fields: str) -> Path:
    plain = dict.fromkeys(COLUMNS, "") | {
        "source": "a program",
        "model": "llama",
        "layers": "32",
        "hidden": "4096",
        "heads": "32",
        "kv_heads": "8",
        "ffn": "14336",
        "vocab": "128256",
        "seq": "8192",
        "gpu": "H100 SXM",
        "n_gpus": "64",
        "tp": "2",
        "pp": "2",
        "fsdp_zero": "zero3",
        "micro_batch": "1",
        "global_batch": "64",
        "tps_per_gpu": "6000",
        "status": "ok",
    }
    path = folder / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerow(plain | fields)
    return path


def test_a_row_in_the_planners_terms(tmp_path: Path) -> None:
    ((row,), left_out) = read_rows(write(tmp_path))
    work = row.work
    assert not left_out
    assert (work.dp, work.micro_batches, work.mode, work.gated, work.gpus) == (16, 4, "zero3", True, 64)
    assert row.seconds == pytest.approx(64 * 8192 / 64 / 6000)


def test_where_micro_batches_are_unknown_all_are_tried(tmp_path: Path) -> None:
    ((row,), _) = read_rows(write(tmp_path, micro_batch=""))
    assert [(work.micro, work.micro_batches) for work in batches_of(row)] == [(1, 4), (2, 2), (4, 1)]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"layers": ""}, "layers = '': must be a number"),
        ({"heads": "many"}, "heads = 'many': must be a number"),
        ({"hidden": "-1"}, "hidden = '-1': must be a whole number of at least 1"),
        ({"gpu": "TPU v5"}, "gpu = TPU v5: is of no kind"),
        ({"model": "deepseekv2"}, "has experts"),
    ],
)
def test_what_cannot_be_predicted_is_left_out_with_the_reason(fields: dict[str, str], why: str, tmp_path: Path) -> None:
    found, left_out = read_rows(write(tmp_path, **fields))
    assert not found
    assert why in left_out[0]
    assert ":2: " in left_out[0]


@pytest.mark.parametrize(
    ("text", "network", "power", "bandwidth"),
    [
        ("A100-80GB (Selene DGX, 8x200Gb HDR IB)", 25e9, 400, 2039e9),
        ("A100-80GB, 8/node, 800 Gbps IB per node", 12.5e9, 400, 2039e9),
        ("H100-SXM 96GB HBM2e 500W, 2.4TB/s, 400Gb/s RDMA per GPU", 50e9, 500, 2.4e12),
        ("a100_40gb / 1600 Gbps RoCE per node", 25e9, 400, 1555e9),
        ("B200-SXM 180GB, single node NVLink5", 50e9, 1000, 7700e9),
    ],
)
def test_a_cluster_is_told_in_words(text: str, network: float, power: float, bandwidth: float) -> None:
    cluster = cluster_of(text)
    assert cluster.network.bandwidth == pytest.approx(network)
    assert (cluster.gpu.power, cluster.gpu.bandwidth) == (power, bandwidth)


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("source,model\nx,y\n")
    with pytest.raises(InputError, match=r"a\.csv: lacks the column layers"):
        read_rows(tmp_path / "a.csv")
    with pytest.raises(InputError, match=r"none\.csv: cannot be read: No such file"):
        read_rows(tmp_path / "none.csv")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="is not UTF-8 text"):
        read_rows(tmp_path / "b.csv")
