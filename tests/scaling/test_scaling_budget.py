"""What a budget buys: shapes of the ladder's kind, and configurations that a run could begin with."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_experiments import SMALL, counts, ladder, model, sweep

from megalite.base.errors import InputError
from megalite.commands.fit import fit
from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.scaling.budget import _distance
from megalite.scaling.shapes import Rule, size_of
from megalite_tools.experiment.predict import main

SHAPES = ((64, 2), (96, 3), (128, 4), (192, 5), (256, 6))


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = ladder(tmp_path_factory.mktemp("ladder"), SHAPES, noise=0.001, fit={"bootstrap": 40}, folders=True)
    fit(folder)
    return folder


@pytest.fixture(scope="module")
def rates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = sweep(tmp_path_factory.mktemp("rates"))
    fit(folder)
    return folder


@settings(max_examples=40, deadline=None)
@given(st.floats(5e5, 1e12), st.sampled_from(["with_head", "total", "non_embedding"]))
def test_the_nearest_model_is_near_and_of_the_ladders_shape(size: float, definition: str):
    rule = Rule.of([model(*shape) for shape in SHAPES], definition)
    found = rule.nearest(size)
    smallest = size_of(model(32, 1), definition)
    assert size_of(found, definition) == pytest.approx(size, rel=0.35 if size < 8 * smallest else 0.12)
    assert found.width == found.heads * 32
    assert found.ffn % 96 == 0
    assert 0.49 < found.width / found.layers / rule.aspect(size) < 2.01


def test_definitions_are_those_of_results():
    of = model(128, 4)
    assert {f"n_{name}": size_of(of, name) for name in ("total", "with_head", "non_embedding")} == counts(of)


def test_a_rung_is_its_own_nearest():
    rule = Rule.of([model(*shape) for shape in SHAPES], "with_head")
    assert (rule.nearest(size_of(model(256, 6), "with_head")).width) == 256


def test_a_budget_buys_a_run(experiment: Path, rates: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "run.yaml"
    arguments = [str(experiment), "--rates", str(rates), "--gpus", "8", "--write", str(out)]
    assert main([*arguments, "--flops", "1e17"]) == 0
    told = capsys.readouterr().out
    config = check(load([str(out)]), 8)
    size = size_of(config.model, "with_head")
    assert size == pytest.approx(SMALL.optimum(1e17)[0], rel=0.3)
    tokens = config.train.steps * config.batch.global_ * config.model.sequence_length
    assert 6 * size * tokens == pytest.approx(1e17, rel=0.01)
    assert config.batch.global_ == 32
    assert config.optim.lr < 0.004
    assert config.run.device == "cuda"
    for words in ("GPU-hours", "interval of the law", "× the largest fitted", "beyond the N that it was fitted to"):
        assert words in told
    assert out.read_text().startswith("# ")
    assert main([*arguments, "--flops", "1e17"]) == 2
    assert "there is such a file already" in capsys.readouterr().err


@pytest.mark.parametrize("others", [["mup", "standard"], ["mup", "completep"]])
def test_the_rate_is_that_of_the_ladders_parametrization(others: list[str], experiment: Path, tmp_path: Path, capsys):
    fit(sweep(tmp_path / "rates", parametrizations=others))
    out = tmp_path / "run.yaml"
    arguments = [str(experiment), "--rates", str(tmp_path / "rates"), "--flops", "1e17", "--write", str(out)]
    assert main(arguments) == 0
    told, rate = capsys.readouterr().out, load([str(out)]).optim.lr
    other = "were fitted for other settings than the ladder's: model.parametrization mup; model.parametrization complet"
    assert (other in told) == ("standard" not in others)
    assert rate == 0.0003 if other in told else 0.0001 < rate < 0.004


def test_gpu_hours_are_used_up(experiment: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(experiment), "--gpu-hours", "2", "--gpus", "4"]) == 0
    run = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("run "))
    assert float(run.split("days, ")[1].split(" ")[0]) == pytest.approx(2, abs=0.1)


def test_without_laws_of_rate_and_batch_the_largest_rungs_are_named(experiment: Path, capsys):
    assert main([str(experiment), "--flops", "1e19"]) == 0
    told = capsys.readouterr().out
    assert "No law of optim.lr was fitted: 0.0003 is the largest rung's" in told
    assert "No law of batch.global was fitted: 16 is the largest rung's" in told
    assert "This leaves the runs that were fitted" in " ".join(told.split())


SPAN = {"flops": [1e15, 1e17], "parameters": [1e6, 1e8], "tokens": [1e8, 1e9]}


@pytest.mark.parametrize(
    ("flops", "size", "tokens", "left"),
    [
        (1e16, 1e7, 5e8, []),
        (1.04e17, 1.04e8, 0.96e8, []),
        (
            1e16,
            5e4,
            1e11,
            ["parameters 20 times below the smallest fitted, 1 M", "tokens 100 times the largest fitted"],
        ),
        (1e19, 1e7, 5e8, ["flops 100 times the largest fitted"]),
        (1e14, 1e7, 5e8, ["flops 10 times below the smallest fitted"]),
    ],
)
def test_a_prediction_that_leaves_the_runs_says_by_how_much(
    flops: float, size: float, tokens: float, left: list[str]
) -> None:
    told: list[str] = []
    stored = SimpleNamespace(fit={"data": {"span": SPAN}})
    times = _distance(stored, flops, size, tokens, told)  # type: ignore[arg-type]
    assert times == {"flops": flops / 1e17, "parameters": size / 1e8, "tokens": tokens / 1e9}
    assert len(told) == bool(left)
    for words in left:
        assert words in told[0]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--gpu-hours", "5"], "--gpu-hours: needs --gpus"),
        (["--flops", "1e17", "--cluster", "h100_sxm"], "--cluster: is read with --gpus only"),
        (["--flops", "1e17", "--gpus", "8-16"], "must be one number here"),
        (["--flops", "1e17", "--write", "run.txt"], "must end in .yaml"),
        (
            ["--flops", "1e17", "--gpus", "8", "--cluster", "nowhere"],
            "nowhere: is no file, and no cluster that megalite comes with",
        ),
        (["--flops", "1e17", "--rates", "nowhere"], "experiment.yaml: cannot be read"),
        (["--flops", "1e17", "--gpus", "7"], ""),
        (["--flops", "1e36"], "larger than any model"),
    ],
)
def test_bad_questions_are_refused(arguments: list[str], told: str, experiment: Path, capsys):
    assert main([str(experiment), *arguments]) == (2 if told else 0)
    assert told in capsys.readouterr().err


def test_a_ladder_without_fit_or_run_folders_is_refused(tmp_path: Path, capsys):
    folder = ladder(tmp_path, fit={"bootstrap": 0})
    assert main([str(folder), "--flops", "1e17"]) == 2
    assert "fit.json: is missing; megalite-sweep fit writes it" in capsys.readouterr().err
    fit(folder)
    capsys.readouterr()
    assert main([str(folder), "--flops", "1e17"]) == 2
    assert "no fitted run has its config.yaml there" in capsys.readouterr().err
    with pytest.raises(InputError, match="no models to take a shape from"):
        Rule.of([], "total")
