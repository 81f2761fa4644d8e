"""The diffs of `docs/extending.md` are those that made the code as it is."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()


def hunks() -> Iterator[tuple[str, str]]:
    """File and lines of every hunk."""
    for diff in re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL):
        for of_file in diff.split("+++ ")[1:]:
            file, *found = re.split(r"\n@@\n", of_file)
            yield from ((file.strip(), hunk) for hunk in found)


HUNKS = list(hunks())


@pytest.mark.parametrize(("file", "hunk"), HUNKS, ids=[f"{file} {i}" for i, (file, _) in enumerate(HUNKS)])
def test_the_code_is_what_a_diff_makes(file: str, hunk: str) -> None:
    text = (ROOT / file).read_text() + "\n"
    lines = hunk.splitlines()
    assert {line[0] for line in lines} <= {"+", "-"}
    added, removed = ("".join(f"{line[1:]}\n" for line in lines if line[0] == sign) for sign in "+-")
    assert f"\n{added}" in f"\n{text}"
    assert not removed or f"\n{removed}" not in f"\n{text}"


def test_every_way_to_add_something_shows_its_diff() -> None:
    shown = {
        title
        for title, body in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
        if "```diff" in body
    }
    assert shown == {
        "A model of the Llama family",
        "A family of Hugging Face",
        "A kind of attention",
        "An optimizer",
        "A kernel",
        "A pipeline schedule",
    }
