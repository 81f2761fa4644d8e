"""`megalite-inspect-checkpoint diff`, on checkpoints of real jobs."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from ranks import Ranks
from toy_jobs import MODEL, config_of, make, one_rank, restorer, save

from megalite.checkpoint.run.tensors import Checkpoint
from megalite.config.layout import Layout
from megalite.config.schema import Config

Inspect = Callable[..., tuple[int, str, str]]


def test_diff_of_the_same(run: Path, inspect: Inspect) -> None:
    path = run / "checkpoints/step-00000002"
    code, out, err = inspect("diff", path, run)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].startswith("equal to the bit: ")
    assert len(out.splitlines()) == 3, "no table"


def test_diff_of_two_steps(run: Path, inspect: Inspect) -> None:
    one, two = (run / f"checkpoints/step-0000000{step}" for step in (1, 2))
    code, out, _ = inspect("diff", one, two, "--tensors", "model.*")
    assert code == 1
    assert out.splitlines()[-1].startswith("different: 27 of 27 tensors differ; at most ")
    code, out, _ = inspect("diff", one, two, "--tensors", "model.*", "--json", "-")
    told = json.loads(out)
    assert (code, told["equal"], told["config"]) == (1, False, [])
    a, b = Checkpoint(one), Checkpoint(two)
    for tensor in told["tensors"]:
        x, y = a.read(tensor["name"]), b.read(tensor["name"])
        gap = (x - y).abs().max().item()
        assert tensor["largest"] == gap > 0
        assert tensor["relative"] == pytest.approx(gap / max(x.abs().max().item(), y.abs().max().item()))
        assert not tensor["bitwise"]
    most = max(tensor["relative"] for tensor in told["tensors"])
    code, out, _ = inspect("diff", one, two, "--tensors", "model.*", "--tolerance", most * 1.001)
    assert code == 0
    assert "equal within" in out
    assert inspect("diff", one, two, "--tensors", "model.*", "--tolerance", most * 0.999)[0] == 1
    shown = [float(line.split()[-1]) for line in out.splitlines() if "float64 [" in line]
    assert shown == sorted(shown, reverse=True)


def test_diff_of_what_is_not_finite_is_valid_json(trained: Path, inspect: Inspect) -> None:
    two, three = (trained / f"checkpoints/step-0000000{step}" for step in (2, 3))
    name = "model.layers.1.mlp.up.weight"
    code, out, _ = inspect("diff", two, three, "--tensors", name, "--tolerance", 1e300, "--json", "-")
    told = json.loads(out, parse_constant=pytest.fail)
    assert (code, told["tensors"][0]["largest"], told["tensors"][0]["relative"]) == (1, None, None)


def test_diff_of_another_model(run: Path, tmp_path: Path, inspect: Inspect) -> None:
    with one_rank():
        other = save(make(config_of(Layout(), replace(MODEL, ffn=32, qkv_bias=False))), tmp_path / "other", 2)
    code, out, _ = inspect("diff", run, other, "--tolerance", 1e9)
    assert code == 1
    rows = {line.split()[0]: line.split(maxsplit=1)[1].strip() for line in out.splitlines() if " " in line.strip()}
    assert rows["model.ffn"].split() == ["24", "32"]
    assert rows["model.qkv_bias"].split() == ["true", "false"]
    assert rows["model.layers.0.mlp.up.weight"].split("  ")[0] == "float64 [24, 16]"
    assert rows["model.layers.0.mlp.up.weight"].endswith("float64 [32, 16]")
    assert rows["model.layers.0.attention.q.bias"].endswith("absent")
    assert "are in one only, or of another shape" in out.splitlines()[-1]


def save_again(config: Config, path: Path, folder: Path) -> None:
    job = make(config)
    save(job, folder, restorer(job).all(path).step)


def test_diff_of_another_layout(ranks: Ranks, run: Path, tmp_path: Path, inspect: Inspect) -> None:
    path = run / "checkpoints/step-00000002"
    ranks.run(save_again, config_of(Layout(pp=2, dp_shard=2, tp=2)), path, tmp_path / "sharded")
    code, out, _ = inspect("diff", path, tmp_path / "sharded", "--json", "-")
    told = json.loads(out)
    assert {"key": "parallel.tp", "a": 1, "b": 2} in told["config"]
    differ = [tensor["name"] for tensor in told["tensors"] if not tensor["bitwise"]]
    assert (code, differ) == (1, ["schedule.learning_rate"]), "which no step has set in the other job"
    assert inspect("diff", path, tmp_path / "sharded", "--tensors", "[!s]*")[0] == 0
    assert inspect("verify", tmp_path / "sharded")[0] == 0
