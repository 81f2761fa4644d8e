"""The benchmark of float32 products runs, and tells what it was given."""

import json
from pathlib import Path

import pytest

from megalite_kernels import products
from megalite_tools.bench.products import KINDS, main

pytestmark = pytest.mark.skipif(not products.HAS_ONEDNN, reason="this PyTorch has no oneDNN")


def test_every_product_has_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "PREFERS_ONEDNN", True)
    out = tmp_path / "products.json"
    assert main(["--layers", "8x4", "512x600", "--tokens", "8", "--rounds", "2", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    small, large = "PyTorch", "oneDNN"
    told = [(row["layer"], row["product"], row["chosen"]) for row in report["products"]]
    assert told == [("8x4", kind, small) for kind in KINDS] + [("512x600", kind, large) for kind in KINDS]
    assert all(row["PyTorch"] > 0 < row["oneDNN"] for row in report["products"])
    assert report["tokens"] == 8
    table = capsys.readouterr().out
    assert table.count("gradient") == 4
    assert (products.PREFERS_ONEDNN, products.LEAST_MULTIPLICATIONS) == (True, 1 << 21)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "8"], "--layers=8: must be numbers of inputs and outputs"),
        (["--layers", "8x0"], "--layers=8x0: must be"),
        (["--tokens", "0"], "--tokens=0: must be at least 1"),
        (["--rounds", "-1"], "--rounds=-1: must be at least 1"),
    ],
)
def test_bad_input_is_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--out", str(tmp_path / "out.json")]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
