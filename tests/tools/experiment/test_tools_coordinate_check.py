"""Coordinate checks: slopes that are flat or not, in every layout the same, and what the command says and writes."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks
from warm_start import run

from megalite.base.exit_codes import ExitCode
from megalite.config.layout import Layout
from megalite.config.model_schema import Base, Model  # fmt: skip
from megalite.config.parallel_schema import Context, DataParallel, Parallel, Pipeline
from megalite.config.rules.validate import check
from megalite.config.schema import Batch, Config, Data, LearningRate, Optim, Train
from megalite.distributed.mesh import Mesh
from megalite.train.build import build_mesh
from megalite_tools.experiment import coordinate_check
from megalite_tools.experiment.coordinate_check import _lines, _parser, _runs, main
from megalite_tools.experiment.coordinate_report import Line, slope
from megalite_tools.experiment.coordinates import MODULES, Sizes, sizes_in_training

STEPS = 4
SMALL = Config(
    model=Model(2, 32, 4, 2, None, 64, 64, 16, parametrization="mup", base=Base(32, 2), init_std=0.05),
    parallel=Parallel(dp_shard=1),
    batch=Batch(2, 4),
    train=Train(STEPS + 1, "fp64"),
    optim=Optim(lr=4e-3),
    schedule=LearningRate("constant"),
)
LAYOUTS = {
    "tp 2": Parallel(tp=2, dp_shard=1),
    "FSDP 2": Parallel(dp_shard=2),
    "pp 2": Parallel(pp=2, dp_shard=1),
    "cp 2 · tp 2, all-gather": Parallel(cp=2, tp=2, dp_shard=1, context=Context("all_gather")),
    "HSDP 2 · 2 with zero2": Parallel(dp_replicate=2, dp_shard=2, data=DataParallel("zero2")),
    "zero bubble, virtual stages": Parallel(pp=2, dp_shard=1, pipeline=Pipeline("zbv")),
}


def measured(config: Config) -> list[Sizes] | None:
    mesh = build_mesh(config, torch.device("cpu"))
    return None if mesh is None else sizes_in_training(config, mesh, STEPS)


def measured_alone_too(config: Config) -> tuple[list[Sizes] | None, list[Sizes] | None]:
    alone = replace(config, parallel=Parallel(dp_shard=1), train=replace(config.train, recompute="none"))
    mesh = Mesh.build(Layout(), torch.device("cpu"), config.parallel.data.sharded)
    return measured(config), None if mesh is None else sizes_in_training(alone, mesh, STEPS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_are_those_of_one_process(layout: str, ranks: Ranks) -> None:
    model = replace(SMALL.model, layers=4, parametrization="completep", norm="pre", qk_norm=True)
    recompute = "full" if "FSDP" in layout else "none"
    config = replace(
        SMALL, model=model, parallel=LAYOUTS[layout], batch=Batch(1, 4), train=replace(SMALL.train, recompute=recompute)
    )
    found = ranks.run(measured_alone_too, check(config, LAYOUTS[layout].layout.world_size))
    (alone,) = [sizes for _, sizes in found if sizes is not None]
    told = [sizes for sizes, _ in found if sizes is not None]
    assert len(told) == LAYOUTS[layout].layout.world_size
    for sizes in told:
        for step, expected in enumerate(alone):
            assert list(sizes[step]) == list(MODULES)
            assert sizes[step] == pytest.approx(expected, rel=1e-9)


def test_sizes_are_means_over_everything(alone: Mesh) -> None:
    """Before training: of embeddings √(2/π) · σ, and of logits as if the loss were computed in one piece."""
    config = replace(SMALL, batch=Batch(1, 8), data=Data(mask_documents=True, end_of_document=0))
    first = sizes_in_training(config, alone, 0)[0]
    assert first["embedding"] == pytest.approx(math.sqrt(2 / math.pi) * 0.05, rel=0.1)
    for module in MODULES:
        assert sizes_in_training(replace(config, batch=Batch(4, 8)), alone, 0)[0][module] == pytest.approx(
            first[module]
        )
    half = replace(config, model=replace(config.model, logits_multiplier=0.5))
    assert sizes_in_training(half, alone, 0)[0]["logits"] == pytest.approx(first["logits"] / 2)


def checked(alone: Mesh, config: Config, *arguments: str) -> dict[tuple[str, str], Line]:
    """As the command, in this process."""
    options = _parser().parse_args([*arguments, "--steps", "6"])
    runs = list(_runs(config, options))
    found = [sizes_in_training(run.config, alone, options.steps) for run in runs]
    lines = _lines(runs, found, config.model.parametrization)
    return {(line.axis, line.parametrization): line for line in lines}


def test_mup_is_flat_in_width_and_the_standard_is_not(alone: Mesh) -> None:
    wide = replace(SMALL, model=replace(SMALL.model, width=64, ffn=128, base=Base(64)), train=Train(1, "fp32"))
    found = checked(alone, wide, "--widths", "64,128,256", "--control", "--seeds", "1")
    assert found["width", "mup"].passed, found["width", "mup"].verdict
    control = found["width", "standard"]
    assert control.control
    assert control.passed
    assert control.steepest > 1
    assert not replace(control, control=False).passed


def test_muon_is_flat_in_width(alone: Mesh) -> None:
    model = replace(SMALL.model, width=64, ffn=128, base=Base(64))
    wide = replace(SMALL, model=model, train=Train(1, "fp32"), optim=Optim("muon", lr=4e-3))
    (line,) = checked(alone, wide, "--widths", "64,128,256", "--seeds", "1").values()
    assert line.passed, line.verdict


def test_wider_heads_begin_with_smaller_scores(alone: Mesh) -> None:
    """By 1/√m, since queries and keys are independent then; scores of 1/√e would begin as large, and grow."""
    model = replace(SMALL.model, width=64, ffn=128, base=Base(64, None, 16))
    wide = replace(SMALL, model=model, train=Train(1, "fp32"), optim=Optim("muon", lr=2e-2))
    (line,) = checked(alone, wide, "--widths", "64,128,256", "--seeds", "1", "--grow", "head-width").values()
    slopes = line.slopes("attention logits")
    assert slopes[0] == pytest.approx(-0.5, abs=0.05)
    assert slopes[0] + 0.1 < slopes[-1] < 0.25
    assert [module for module in MODULES if not line.within(module)] in ([], ["attention logits"])


def test_completep_is_flat_in_depth_and_the_standard_is_not(alone: Mesh) -> None:
    model = replace(SMALL.model, parametrization="completep", init_std=0.02)
    deep = replace(SMALL, model=model, train=Train(1, "fp32"))
    found = checked(alone, deep, "--depths", "2,6,18", "--control", "--seeds", "2")
    assert found["depth", "completep"].passed, found["depth", "completep"].verdict
    assert found["depth", "standard"].steepest > 0.5


@given(
    at=st.lists(st.integers(1, 4096), min_size=2, max_size=6, unique=True),
    power=st.floats(-3, 3), factor=st.floats(1e-3, 1e3),
)  # fmt: skip
def test_slopes_are_the_powers_of_power_laws(at: list[int], power: float, factor: float) -> None:
    assert slope(at, [factor * point**power for point in at]) == pytest.approx(power, abs=1e-9)


def test_values_that_are_not_finite_fail_the_check_and_are_null_in_files() -> None:
    means = {module: [[1.0, 1.0], [1.0, math.inf if module == "mlp" else 1.0]] for module in MODULES}
    line = Line("width", "mup", (64, 128), means)
    assert (line.passed, line.within("attention"), line.within("mlp"), line.steepest) == (False, True, False, math.inf)
    assert line.as_json()["modules"]["mlp"]["slopes"] == [0.0, None]
    assert "slopes of mlp are not within ±0.25" in line.verdict
    flat = {module: [[1.0, 2**-0.5 if module == "logits" else 1.0]] for module in MODULES}
    assert "take more --steps or a larger optim.lr" in Line("width", "mup", (64, 128), flat).verdict
    flat["logits"] = [[1.0, 1.0]]
    assert Line("width", "standard", (64, 128), flat, control=True).verdict.endswith("or the check tells nothing.")


def test_the_command(tmp_path: Path) -> None:
    """In two ranks, with a verdict that fails; the files tell what the tables do."""
    small = ["model.heads=2", "model.kv_heads=2", "model.ffn=32", "model.vocab_size=32", "model.sequence_length=8"]
    sizes = ["model.width=16", "model.layers=1", "batch.global=2", "train.precision=fp32", "model.init_std=0.3"]
    options = ["--widths", "16,32", "--steps", "1", "--seeds", "1", "parallel.tp=2", "run.device=cpu"]
    done = run(["-m", coordinate_check.MODULE, *small, *options, *sizes], 100, cwd=tmp_path)
    assert done.returncode == ExitCode.FAILED, done.stderr
    assert "standard: slopes of outputs on the width, 16 and 32" in done.stdout
    assert "too steep" in done.stdout
    report = json.loads((tmp_path / "coordinate_check.json").read_text())
    assert (report["layout"], report["tolerance"]) == ("tp 2", 0.25)
    (line,) = report["lines"]
    assert (line["points"], line["passed"], line["control"]) == ([16, 32], False, False)
    assert list(line["modules"]) == list(MODULES)
    assert (tmp_path / "coordinate_check.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--control"], "--control: compares with model.parametrization = standard, which is checked already"),
        (["--widths", "128,130"], "--widths 130: model.heads = 4 would be 4.0625, with model.width = 128"),
        (["--widths", "64,128", "parallel.tp=4"], "--widths 64: "),
        (["--depths", "2,4", "parallel.pp=4"], "--depths 2: "),
        (["--out", "."], "is a folder; name a file in it"),
        (["model.parametrization=mup"], "model.base.width = null: is needed for model.parametrization = mup"),
    ],
)
def test_bad_input(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "..png").mkdir()
    assert main(["run.device=cpu", *arguments]) == ExitCode.BAD_INPUT
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize("text", ["64", "64,64", "64,x", "0,64", "64,99999999", "٣,64", ""])
def test_sizes_that_are_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        coordinate_check._parser().parse_args([f"--widths={text}"])
    assert "--widths" in capsys.readouterr().err
