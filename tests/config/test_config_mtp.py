"""Rules of multi-token prediction."""

from dataclasses import replace

import pytest

from megalite.config.model_schema import Adapter, Base, Model, MultiToken
from megalite.config.parallel_schema import Parallel
from megalite.config.rules.validate import validate
from megalite.config.schema import Config, Train

MODEL = Model(layers=4, mtp=MultiToken(2))
CONFIG = Config(model=MODEL, parallel=Parallel(dp_shard=1))


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (CONFIG, []),
        (replace(CONFIG, model=replace(MODEL, mtp=MultiToken(0))), ["model.mtp.depth = 0: must be at least 1"]),
        (
            replace(CONFIG, model=replace(MODEL, mtp=MultiToken(1, 0.0))),
            ["model.mtp.weight = 0.0: must be at least 1e-06: its layers would learn nothing"],
        ),
        (
            replace(CONFIG, model=replace(MODEL, sequence_length=2)),
            ["model.mtp.depth = 2: must be less than model.sequ"],
        ),
        (
            replace(CONFIG, model=replace(MODEL, parametrization="mup", base=Base(64))),
            ['model.parametrization = "mup": cannot be used with model.mtp'],
        ),
        (replace(CONFIG, adapter=Adapter()), ["model.mtp.depth = 2: cannot be used with adapter"]),
        (replace(CONFIG, train=Train(precision="fp8")), ['train.precision = "fp8": cannot be used with model.mtp']),
    ],
)
def test_rules(config: Config, told: list[str]) -> None:
    problems = [str(problem) for problem in validate(config, 1)]
    assert len(problems) == len(told), problems
    assert all(problem.startswith(each) for problem, each in zip(problems, told, strict=True)), problems


def test_an_explicit_split_is_of_the_other_layers() -> None:
    """Those of multi-token prediction are on the last stage whatever it says."""
    parallel = Parallel(pp=2, dp_shard=1)
    for split, problems in (([2, 2], 0), ([4, 0], 0), ([2, 4], 1)):
        parallel.pipeline.split = split
        assert len(validate(replace(CONFIG, parallel=parallel), 2)) == problems
