"""Which runs an experiment has, and what makes two of them the same."""

from typing import Any

import pytest
from expanding import Expander
from hypothesis import given
from hypothesis import strategies as st

from megalite.base.errors import InputError
from megalite.experiment.cell import slug_of
from megalite.experiment.settings import read_axes

RATES = [0.01, 0.02, 0.04]


def ids(found: Any) -> list[str]:
    return [cell.id for cell in found.cells]


def test_a_grid_has_every_combination_once(expanded: Expander) -> None:
    found = expanded(grid={"optim.lr": RATES, "batch.global": [4, 8]}, experiment={"seeds": [0, 1]})
    assert len(set(ids(found))) == found.settings == 12
    assert {(c.config.optim.lr, c.config.batch.global_, c.seed) for c in found.cells} == {
        (rate, batch, seed) for rate in RATES for batch in (4, 8) for seed in (0, 1)
    }
    assert found.axes == ("optim.lr", "batch.global")


def test_zipped_keys_go_together(expanded: Expander) -> None:
    found = expanded(
        zip=[{"model.width": [16, 32], "model.heads": [2, 4], "model.kv_heads": [2, 4]}], grid={"optim.lr": RATES}
    )
    assert [(c.config.model.width, c.config.model.heads) for c in found.cells] == [(16, 2), (32, 4)] * 3


def test_a_range_of_exponents(expanded: Expander) -> None:
    found = expanded(grid={"optim.lr": {"log2": [-10, -9, 0.5]}})
    assert [cell.config.optim.lr for cell in found.cells] == [2**-10, 2**-9.5, 2**-9]
    whole = expanded(grid={"batch.global": {"log2": [2, 4]}})
    assert [cell.config.batch.global_ for cell in whole.cells] == [4, 8, 16]


def test_random_settings_are_the_same_again_and_more_of_them_begin_with_these(expanded: Expander) -> None:
    over = {"optim.lr": {"log2": [-10, -4]}, "optim.weight_decay": {"uniform": [0, 1]}, "batch.global": [4, 8]}
    few = expanded(random={"over": over, "count": 3, "seed": 5})
    assert ids(few) == ids(expanded(random={"over": over, "count": 3, "seed": 5}))
    assert ids(expanded(random={"over": over, "count": 6, "seed": 5}))[:3] == ids(few)
    assert ids(expanded(random={"over": over, "count": 3, "seed": 6})) != ids(few)
    assert all(2**-10 <= cell.config.optim.lr <= 2**-4 for cell in few.cells)


def test_settings_that_describe_one_run_are_one(expanded: Expander) -> None:
    found = expanded(grid={"optim.lr": [0.01, 0.010, 1e-2], "train.steps": [10]})
    assert (len(found.cells), found.settings) == (1, 3)


def test_runs_are_excluded_before_they_must_be_right(expanded: Expander) -> None:
    grid = {"model.heads": [2, 3], "model.kv_heads": [2, 3]}
    found = expanded(grid=grid, exclude=["model.width / model.heads == 16 / 3 or model.heads != model.kv_heads"])
    assert [cell.config.model.heads for cell in found.cells] == [2]
    assert found.excluded == 3
    with pytest.raises(InputError, match=r"exclude: leaves out all 4 runs"):
        expanded(grid=grid, exclude=["seed == 0"])


def test_references_of_the_base_follow_what_runs_change(expanded: Expander) -> None:
    found = expanded(base={"model": {"ffn": "${model.width}"}}, grid={"model.width": [16, 32]})
    assert [cell.config.model.ffn for cell in found.cells] == [16, 32]


def test_all_problems_are_told_at_once_with_file_key_and_run(expanded: Expander) -> None:
    with pytest.raises(InputError) as caught:
        expanded(grid={"model.heads": [2, 3], "optim.lr": [-1, 0.1]}, set={"train.recompute_every": 2})
    text = str(caught.value)
    assert "exp.yaml: " in text
    assert "axes: model.heads: model.heads = 3: must be divisible" in text
    assert "axes: optim.lr: optim.lr = -1" in text
    assert "set.train.recompute_every: train.recompute_every = 2: has no meaning" in text
    assert "and 3 more)" in text


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        (
            {"grid": {"optim.lrr": [1]}},
            r"grid\.optim\.lrr: is no key of a run's configuration; did you mean optim\.lr\?",
        ),
        ({"grid": {"optim": [1]}}, r"grid\.optim: is a section"),
        ({"grid": {"run.seed": [1]}}, r"grid\.run\.seed: is set by megalite-sweep itself; give experiment\.seeds"),
        ({"grid": {"optim.lr": 3}}, r"grid\.optim\.lr = 3: must be a list of values, or \{log2"),
        ({"grid": {"optim.lr": {"log2": [0, -5]}}}, r"grid\.optim\.lr\.log2 = .*ascending"),
        ({"grid": {"optim.lr": {"log2": [0, 5, 1e-9]}}}, r"grid\.optim\.lr\.log2"),
        ({"grid": {"optim.lr": [1]}, "zip": [{"optim.lr": [2]}]}, r"optim\.lr: is swept twice"),
        ({"zip": [{"optim.lr": [1, 2], "batch.global": [4]}]}, r"zip\[0\]: must have lists of one length"),
        ({"grid": {"optim.lr": list(range(200)), "optim.eps": list(range(200))}}, "makes 40,000 combinations"),
        ({"random": {"over": {"optim.lr": {"log2": [1]}}}}, r"random\.over\.optim\.lr"),
        ({"random": {"count": 3}}, r"random\.over: is empty"),
        ({"exclude": ["import os"]}, r"exclude\[0\] = \"import os\": is no expression"),
        ({"exclude": ["M > 1"]}, r"exclude: has the name M"),
        ({"rungs": {"a": {}}}, "rungs: is not read by an experiment of the kind sweep"),
        ({"gpus": [1]}, "gpus: is not read by an experiment of the kind sweep"),
        ({"launch": {"cores": -1}}, r"launch\.cores = -1: must be above 0"),
        ({"launch": {"sbatch": {"time": 3}}}, r"launch\.sbatch: is not read with launch\.kind = local"),
        (
            {"launch": {"cluster": "nowhere"}},
            r"launch\.cluster = nowhere: is no file, and no cluster that megalite comes with",
        ),
        ({"launched": {}}, r"launched: unknown key; did you mean launch\?"),
        ({"experiment": {"seeds": []}}, r"experiment\.seeds"),
        ({"experiment": {"name": "../x"}}, r"experiment\.name"),
        ({"experiment": {"dir": "a\nb"}}, r"experiment\.dir = .*: must be a path of printable characters"),
        ({"fit": {"colour": 1}}, r"fit\.colour: unknown key; fit has method, delta, min_steps, drop and bootstrap"),
        ({"fit": {"delta": 0, "bootstrap": -1}}, r"fit\.delta = 0.0: must be above 0[^$]*fit\.bootstrap = -1: must be"),
        ({"holdout": {"runs": []}}, r"holdout\.runs: unknown key; did you mean holdout\.rungs\?"),
        ({"parameters": {"report": ["all"]}}, r"parameters\.report\[0\] = \"all\": must be total, with_head"),
        ({"experiment": {"kind": "systems"}, "gpus": [1], "fit": {"drop": 1}}, "fit: is not read by an experiment"),
        ({"experiment": {"kind": "systems"}, "gpus": [1], "layouts": []}, r"layouts = \[\]: is empty"),
        (
            {"derive": {"batch.global": "4.4"}},
            r"derive\.batch\.global = \"4\.4\": comes to 4\.4, .* off by more than 5 %",
        ),
        ({"derive": {"optim.lr": "0.1 / (N - N)"}}, r"derive\.optim\.lr = .*: divides by zero"),
        ({"halving": {"steps": [5]}}, r"halving\.steps = \[5\]: must be two or more ascending"),
    ],
)
def test_bad_input_is_told(sections: dict[str, Any], told: str, expanded: Expander) -> None:
    with pytest.raises(InputError, match=told):
        expanded(**sections)


def test_derived_values_and_their_rounding(expanded: Expander) -> None:
    found = expanded(grid={"model.width": [16, 32]}, derive={"optim.lr": "0.1 * 16 / width", "batch.global": "8.1"})
    assert [(c.config.optim.lr, c.config.batch.global_) for c in found.cells] == [(0.1, 8), (0.05, 8)]
    later = expanded(derive={"batch.global": "16", "schedule.warmup": "round(batch.global / 4)"})
    assert later.cells[0].config.schedule.warmup == 4


def test_the_layout_and_where_a_run_is_shown_do_not_count(expanded: Expander) -> None:
    one = ids(expanded(grid={"optim.lr": RATES}))
    for changed in (
        {"parallel": {"tp": 2}},
        {"batch": {"micro": 2}},
        {"log": {"interval": 7}},
        {"checkpoint": {"interval": 5}},
        {"run": {"name": "other", "dir": "elsewhere"}},
    ):
        assert ids(expanded(base=changed, grid={"optim.lr": RATES})) == one
    for changed in ({"train": {"steps": 11}}, {"optim": {"eps": 1e-7}}, {"checkpoint": {"weights": "other/run"}}):
        assert not set(ids(expanded(base=changed, grid={"optim.lr": RATES}))) & set(one)


@given(st.dictionaries(st.text(), st.text() | st.floats() | st.integers(), max_size=5))
def test_a_slug_is_a_folder_name(parts: dict[str, Any]) -> None:
    slug = slug_of(parts)
    assert slug.replace(".", "").replace("-", "").replace("_", "").isalnum()
    assert slug.isascii()
    assert len(slug) <= 60
    assert slug[0] not in ".-"


@given(st.lists(st.lists(st.integers(1, 100), min_size=1, max_size=4, unique=True), min_size=1, max_size=3))
def test_axes_are_a_product(values: list[list[int]]) -> None:
    names = ["train.steps", "schedule.warmup", "log.interval"][: len(values)]
    problems: list[Any] = []
    axes = read_axes(dict(zip(names, values, strict=True)), (), None, problems)
    assert not problems
    rows = {tuple(point[name] for name in names) for point in axes.points}
    count = 1
    for each in values:
        count *= len(each)
    assert len(rows) == len(axes.points) == count
