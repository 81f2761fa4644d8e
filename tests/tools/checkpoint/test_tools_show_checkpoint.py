"""`megalite-inspect-checkpoint show`, on checkpoints of real jobs."""

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from toy_jobs import MODEL, config_of, make, one_rank, parts, restorer

from megalite.config.layout import Layout

Inspect = Callable[..., tuple[int, str, str]]


def test_show_tells_what_a_checkpoint_holds(run: Path, inspect: Inspect) -> None:
    path = run / "checkpoints/step-00000002"
    code, out, err = inspect("show", path)
    assert (code, err) == (0, "")
    for text in ("2, 2 of which changed the weights", "128", "16", "1 rank", f"torch {version('torch')}"):
        assert text in out
    rows = {line.split()[0]: line.split(maxsplit=1)[1].strip() for line in out.splitlines() if "float64 [" in line}
    assert rows["model.embed.weight"].split() == ["float64", "[32,", "16]", "4,096"]
    assert rows["optimizer.exp_avg.embed.weight"].split() == ["float64", "[32,", "16]", "4,096"]
    assert "norm" not in rows
    code, out, _ = inspect("show", run, "--json", "-")  # a run: its newest
    told = json.loads(out)
    assert (code, told["path"]) == (0, str(path))
    assert told["progress"]["samples"] == 16
    assert told["learning_rate"] == pytest.approx(0.01 * 2 / 3)  # of the second step, before the end of warm-up
    assert told["config"]["model"]["width"] == MODEL.width
    assert {"name": "progress.left_out", "shape": [0, 2], "dtype": "int64", "bytes": 0} in told["tensors"]


def test_show_values(run: Path, inspect: Inspect) -> None:
    path = run / "checkpoints/step-00000002"
    code, out, err = inspect("show", path, "--values", "--json", "-")
    assert (code, err) == (0, "")
    told = {tensor["name"]: tensor for tensor in json.loads(out)["tensors"]}
    with one_rank():
        job = make(config_of(Layout()))
        restorer(job).all(path)
        expected = parts(job)
    for name, part in expected.items():
        weight, _, moment = name.partition(" ")
        tensor = told[f"optimizer.{moment}.{weight}" if moment else f"model.{weight}"]
        assert tensor["norm"] == pytest.approx(part.values.norm().item())
        assert tensor["largest"] == part.values.abs().max().item()
        assert (tensor["nan"], tensor["infinite"]) == (0, 0)
    assert len(told) > len(expected), "the progress is there too"
    assert "all values are finite" in inspect("show", path, "--values", "--tensors", "model.*")[1]


def test_show_counts_what_is_not_finite(trained: Path, inspect: Inspect) -> None:
    path, name = trained / "checkpoints/step-00000003", "model.layers.1.mlp.up.weight"
    code, out, _ = inspect("show", path, "--values", "--tensors", "model.*")
    assert code == 1
    assert "1 NaN, 2 infinite" in next(line for line in out.splitlines() if name in line)
    assert "1 of 27 tensors hold values that are not finite" in out
    assert inspect("show", path, "--values", "--tensors", "*.embed.*")[0] == 0
    assert inspect("show", path)[0] == 0, "the values are not read"
    told = json.loads(inspect("show", path, "--values", "--tensors", name, "--json", "-")[1])["tensors"][0]
    assert (told["nan"], told["infinite"]) == (1, 2)
    assert 0 < told["largest"] <= told["norm"]
