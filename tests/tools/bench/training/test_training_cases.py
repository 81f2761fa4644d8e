"""Plans: the shipped one, on a GPU and in a rehearsal, and what is wrong with others."""

from pathlib import Path

import pytest
import yaml

from megalite.base.errors import InputError
from megalite.cost.cluster import load_cluster
from megalite_tools.bench.training import prediction
from megalite_tools.bench.training.cases import REHEARSAL_RANKS, Case, Target, read_plan
from megalite_tools.bench.training.parent import ENDING_SECONDS

ROOT = Path(__file__).parents[4]
SHIPPED = ROOT / "tools" / "bench" / "slot" / "plan.yaml"
GPU, CPU = Target("cuda", False), Target("cpu", True)
SECONDS = 520.0  # a part may take ten minutes, less the start and the end


@pytest.fixture
def in_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.usefixtures("in_checkout")
def test_the_shipped_plan() -> None:
    cases, tiny = read_plan(SHIPPED, GPU), read_plan(SHIPPED, CPU)
    assert [case.id for case in cases] == [case.id for case in tiny]
    assert {case.part for case in cases} == {1, 2, 3}
    assert {case.implementation for case in cases} == {"", "megalite", "transformers", "liger", "torchtitan"}
    assert [case.value for case in cases] == sorted((case.value for case in cases), reverse=True)
    assert all(case.limit + ENDING_SECONDS < SECONDS for case in cases), "or it is never started"
    assert max(case.ranks for case in tiny) == REHEARSAL_RANKS
    for case, small in zip(cases, tiny, strict=True):
        if case.implementation:
            model, rehearsed = case.config("cuda").model, small.config("cpu").model
            assert (model.vocab_size, model.sequence_length) in {(128_256, 8192), (128_256, 2048)}
            assert (rehearsed.width, rehearsed.sequence_length) in {(64, 64), (128, 64), (96, 64)}
            assert case.hash(GPU) != small.hash(CPU)
    groups: dict[tuple[str, int], list[str]] = {}
    for case in cases:
        if case.implementation:
            groups.setdefault((case.group(GPU), case.part), []).append(case.implementation)
    for (group, part), members in groups.items():
        if len(set(members)) > 1:
            assert "megalite" in members, f"nothing to compare with in {group} of part {part}"


@pytest.mark.usefixtures("in_checkout")
def test_every_step_of_the_shipped_plan_has_a_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "cluster", lambda _: load_cluster("h100_sxm"))
    found = {case.id: prediction.predicted(case, GPU) for case in read_plan(SHIPPED, GPU) if case.implementation}
    for name, told in found.items():
        assert told is not None, name
        assert 0.2 < told["C"] < told["F"] < 0.8, name
        assert told["spread"] > 0.1
    assert found["1b-short-megalite-graphed"]["step_ms"] < found["1b-short-megalite-eager"]["step_ms"]
    cut = found["8b8-megalite-compiled"]
    assert cut["F"] == pytest.approx(cut["C"] * 16.84 / 15.23, rel=1e-3), "GFLOP of a token: matrices and scores"
    monkeypatch.setattr(prediction, "cluster", lambda _: None)
    assert prediction.predicted(read_plan(SHIPPED, GPU)[0], GPU) is None


@pytest.mark.usefixtures("in_checkout")
def test_repeats_are_the_same_case_by_another_name() -> None:
    cases = {case.id: case for case in read_plan(SHIPPED, GPU)}
    repeats = [name for name in cases if name.endswith(("-r2", "-r3"))]
    assert len(repeats) == 5
    for name in repeats:
        first, again = cases[name[:-3]], cases[name]
        assert (first.inputs, first.implementation, first.tuned) == (again.inputs, again.implementation, again.tuned)


MODELS = {"m": {"inputs": ["model.layers=2"], "tiny": ["model.layers=1"]}}
GOOD = {"id": "a", "model": "m", "implementation": "megalite"}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({}, "cases must be a list"),
        ({"cases": []}, "cases must be a list"),
        ({"cases": [3]}, "cases[0]: must be a mapping"),
        ({"cases": [GOOD], "extra": 1}, "'extra' is no key of a plan"),
        ({"cases": [GOOD, GOOD], "models": MODELS}, "a is the id of two cases"),
        ({"cases": [{**GOOD, "id": "A b"}], "models": MODELS}, "cases[0]: 'id' = 'A b': must be at most 80 of"),
        ({"cases": [{**GOOD, "id": "../a"}], "models": MODELS}, "'id' = '../a': must be"),
        ({"cases": [{**GOOD, "id": "a/b"}], "models": MODELS}, "'id' = 'a/b': must be"),
        ({"cases": [{**GOOD, "limitt": 3}], "models": MODELS}, "'limitt' is unknown"),
        ({"cases": [{**GOOD, "limit": float("nan")}], "models": MODELS}, "'limit' = nan: must be a number"),
        ({"cases": [{**GOOD, "limit": 0}], "models": MODELS}, "'limit' = 0: must be a number of seconds above 0"),
        ({"cases": [{"id": "a", "command": []}]}, "'command' = []: must be a list of texts, the first a program"),
        ({"cases": [{"id": "a", "command": ["x"], "tiny": []}]}, "'tiny' = []: must be a list of texts, the first"),
        ({"cases": [{**GOOD, "limit": True}], "models": MODELS}, "'limit' = True: must be a number"),
        ({"cases": [{**GOOD, "ranks": 0}], "models": MODELS}, "'ranks' = 0: must be a whole number"),
        ({"cases": [{**GOOD, "model": "n"}], "models": MODELS}, "model = 'n': the plan's models are m"),
        ({"cases": [GOOD]}, "model = 'm': the plan's models are none"),
        ({"cases": [{**GOOD, "implementation": "x"}], "models": MODELS}, "implementation = 'x': must be megalite,"),
        ({"cases": [{**GOOD, "command": ["ls"]}], "models": MODELS}, "must have one of implementation, train and"),
        ({"cases": [{"id": "a"}]}, "must have one of implementation, train and command, and has 0"),
        ({"cases": [{"id": "a", "command": "ls -l"}]}, "'command' = 'ls -l': must be a list of texts"),
        ({"cases": [{**GOOD, "selective": True}], "models": MODELS}, "selective: is of torchtitan"),
        ({"cases": [{**GOOD, "inputs": ["model.lairs=3"]}], "models": MODELS}, "a: 1 problem in the configuration"),
        ({"cases": [GOOD], "models": {"m": {"inputs": []}}}, "'tiny' is missing"),
    ],
)
def test_what_is_wrong_with_a_plan_is_told_with_its_place(tmp_path: Path, plan: object, message: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(plan))
    with pytest.raises(InputError) as told:
        read_plan(path, CPU)
    assert str(told.value).startswith(str(path))
    assert message in str(told.value)


def test_cases_of_greater_value_come_first_and_equals_stay(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    cases = [{"id": name, "value": value, "command": ["x"]} for name, value in (("a", 1), ("b", 5), ("c", 1), ("d", 9))]
    path.write_text(yaml.safe_dump({"cases": cases}))
    assert [case.id for case in read_plan(path, GPU)] == ["d", "b", "a", "c"]


def test_a_rehearsal_has_its_own_command(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump({"cases": [{"id": "a", "command": ["large"], "tiny": ["small"]}]}))
    assert [read_plan(path, target)[0].command for target in (GPU, CPU)] == [("large",), ("small",)]


def test_labels_tell_what_fails_together() -> None:
    small = ("model.layers=1",)
    compiled = (*small, "train.compile=true")
    labels = [
        Case("a", implementation="megalite", inputs=small).label,
        Case("a", implementation="megalite", inputs=compiled).label,
        Case("a", implementation="torchtitan", tuned=True, inputs=compiled).label,
        Case("tests", command=("x",)).label,
    ]
    assert labels == ["megalite", "megalite, compiled", "torchtitan, tuned, compiled", "tests"]
