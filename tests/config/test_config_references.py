"""References are filled in as OmegaConf does, but in bounded time and depth, and all that is wrong is told at once."""

import pytest
from omegaconf import OmegaConf

from megalite.base.errors import InputError
from megalite.config.load import load
from megalite.config.references import MAX_STEPS, fill_in

VALUES = {"width": 3, "none": None, "yes": True, "share": 0.1, "split": [1, 2], "model": {"width": "${width}"}}


@pytest.mark.parametrize(
    "text",
    [
        "${width}",
        "x${width}y${share}",
        "${yes}, ${none}",
        "${none}",
        "${model}",
        "${model.width}",
        "${split[1]}",
        "${split.1}",
        "\\${width}",
        "\\\\${width}",
        "\\\\\\${width} ${width}",
        "a\\b\\",
        "${oc.env:MEGALITE_TEST}",
        "${oc.env:MEGALITE_NONE,abc}",
        "x${oc.env:MEGALITE_NONE, a b }",
        "${oc.env:MEGALITE_NONE,'a b'}",
        "${oc.env:MEGALITE_NONE,null}",
    ],
)
def test_values_are_filled_in_as_omegaconf_does(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGALITE_TEST", "${width}\\")
    plain = {**VALUES, "text": text}
    assert fill_in(plain) == (OmegaConf.to_container(OmegaConf.create(plain), resolve=True), [])


@pytest.mark.parametrize("forwards", [True, False])
@pytest.mark.parametrize("links", [MAX_STEPS - 3, 1500])
def test_a_chain_leads_only_so_far(links: int, forwards: bool) -> None:
    """The top, data, train and an item are steps as well."""
    ends = range(1, links + 1) if forwards else range(links)
    paths = [f"${{data.train[{end}].path}}" for end in ends]
    paths = [*paths, "x"] if forwards else ["x", *paths]
    _, problems = fill_in({"data": {"train": [{"path": path} for path in paths]}})
    (told,) = map(str, problems)
    assert "leads to a value in more than 32 steps" in told
    assert told.startswith(f"data.train[{0 if forwards else MAX_STEPS - 3}].path: ")
    assert "].path refers to data.train[" in told
    assert len(told) < 300


def test_nesting_and_references_together_lead_only_so_far() -> None:
    nested = ["[" * 25 + f"'${{x{number + 1}}}'" + "]" * 25 for number in range(40)]
    with pytest.raises(InputError, match="in more than 32 steps"):
        load([], [*(f"x{number}={value}" for number, value in enumerate(nested)), "x40=1"])


@pytest.mark.timeout(20)
def test_thousands_of_references_take_little() -> None:
    filled, problems = fill_in({"a": "x", "one": "${a}" * 10_000, "each": ["${a}"] * 10_000})
    assert problems == []
    assert filled == {"a": "x", "one": "x" * 10_000, "each": ["x"] * 10_000}


def test_a_section_is_no_part_of_a_text() -> None:
    with pytest.raises(InputError) as caught:
        load([], ["run.name=a${model}", "run.dir=${unclosed", "model.layers=${run.dir}", "model.heads=x"])
    assert [str(problem) for problem in caught.value.problems] == [
        'run.dir = "${unclosed": has a reference that cannot be read; '
        "write ${section.key}, ${oc.env:NAME}, or \\${ for a ${",
        'run.name = "a${model}": refers to model inside of a text; name a key with one value',
        'model.heads = "x": must be a whole number',
    ]
