"""Workflows, CONTRIBUTING and the documentation name targets of the Makefile and files that are there."""

import re
from pathlib import Path

import pytest
import yaml

from megalite import __version__

ROOT = Path(__file__).parents[1]
TARGETS = set(re.findall(r"^([a-z][a-z-]*)\b.*:", (ROOT / "Makefile").read_text(), re.MULTILINE))
MADE_PAGES = ("cards.md", "soak.md")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_targets_of_the_makefile_alone(path: Path) -> None:
    for name, job in yaml.safe_load(path.read_text())["jobs"].items():
        commands = [step["run"] for step in job["steps"] if "run" in step]
        if commands == ["make ${{ matrix.target }}"]:
            commands = [f"make {each['target']}" for each in job["strategy"]["matrix"]["include"]]
        assert commands, name
        for command in commands:
            assert command.split()[:-1] == ["make"], name
            assert command.split()[-1] in TARGETS, name


def test_the_lowest_python_that_is_tested_is_the_lowest_allowed() -> None:
    lowest = re.search(r'requires-python = ">=(.*)"', (ROOT / "pyproject.toml").read_text())
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    assert lowest is not None
    assert jobs["test-fast"]["strategy"]["matrix"]["python"][0] == lowest[1]


def test_the_package_names_the_highest_python_that_is_tested() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert named[0] == jobs["test-fast"]["strategy"]["matrix"]["python"][0]
    assert named[-1] == jobs["test-fast"]["strategy"]["matrix"]["python"][-1]


def test_the_citation_and_the_changelog_have_the_version() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
    assert f"\n## {__version__} (" in (ROOT / "CHANGELOG.md").read_text()


def test_contributing_names_what_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)) <= TARGETS
    tour = text.partition("## A tour of the code")[2].partition("## Commands")[0]
    folders = set(re.findall(r"`((?:configs|megalite|kernels|launch|tools|tests|docs)/[\w/.]*)`", tour))
    assert len(folders) > 10
    assert [folder for folder in folders if not (ROOT / folder).exists()] == []
    assert [path for path in re.findall(r"pytest (tests/\S+)", text) if not (ROOT / path).exists()] == []


def test_the_tree_of_the_architecture_has_every_room() -> None:
    tree = (ROOT / "docs" / "architecture.md").read_text().split("```")[1]
    named = {name for path in re.findall(r"[\w/]+/", tree) for name in path.strip("/").split("/")}
    roots = [ROOT / name for name in ("megalite", "kernels", "launch", "tools")]
    rooms = {path.parent.name for root in roots for path in root.rglob("*.py")}
    assert sorted(rooms - named) == []


def test_prose_is_wrapped_alike_everywhere() -> None:
    """Tables, headings and code have the lines that they need; so have sentences with numbers that a program writes."""
    pages = [*ROOT.glob("*.md"), *(path for path in (ROOT / "docs").glob("*.md") if path.name not in MADE_PAGES)]
    for page in pages:
        prose = "".join(page.read_text().split("```")[::2]).splitlines()
        assert [line for line in prose if len(line) > 120 and not line.lstrip().startswith(("|", "#"))] == [], page.name


def test_generated_files_are_short() -> None:
    """A row of a record is a line: nobody reads a number on each, and changes of them hide others."""
    files = [
        path for name in ("docs", "kernels") for path in (ROOT / name).rglob("*") if path.suffix in (".json", ".svg")
    ]
    assert [path.name for path in files if path.read_text().count("\n") > 500] == []


def test_every_page_is_linked_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text().partition("## Documentation")[2]
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages - set(re.findall(r"\(docs/([\w-]+\.md)\)", text)) == set()


def test_every_page_is_in_the_site_once() -> None:
    docs = ROOT / "docs"
    named = re.findall(r"^ +- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    assert sorted(named) == sorted(page for page in pages if not page.startswith("benchmarks/"))
