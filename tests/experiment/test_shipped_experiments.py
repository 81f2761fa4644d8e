"""Every file of configs/experiment: it is expanded and budgeted, and what it sets is read."""

from pathlib import Path

import pytest

from megalite.experiment.cost import estimate
from megalite.experiment.expand import expand
from megalite.experiment.read import read_experiment

FILES = sorted((Path(__file__).parents[2] / "configs" / "experiment").glob("*.yaml"))
SPEED = 1e10  # model FLOP/s of one core; such models have reached 1.1e10 to 1.8e10
MINUTES, EXAMPLE = 20, 70  # of most, and of the worked example, whose larger models are faster than SPEED


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_experiment_takes_minutes_on_two_cores(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    setup = read_experiment(path)
    setup.experiment.launch.flops_per_second, setup.experiment.launch.startup = SPEED, 10
    expanded = expand(setup)
    costs = estimate(expanded, expanded.cells)
    assert not costs.unknown
    assert len(costs.costs) == len(expanded.cells) >= 3
    assert costs.seconds / 2 < 60 * (EXAMPLE if path.stem == "ladder_5x4" else MINUTES)
    assert max(cell.gpus for cell in expanded.cells) <= 2
    assert path.stem == setup.experiment.experiment.name
    assert "On GPUs:" in path.read_text()


def test_there_is_one_for_every_kind() -> None:
    assert {read_experiment(path).kind for path in FILES} == {"sweep", "ladder", "systems"}
    assert [path.stem for path in FILES] == [
        "isoflop",
        "ladder",
        "ladder_5x4",
        "mup_transfer",
        "rate_batch",
        "strong_scaling",
        "weak_scaling",
    ]
