"""The commands of README.md and of the pages in docs/ do what they say, and their links lead somewhere."""

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from wheel_install import at

from megalite.commands.main import main
from megalite.config.load import load
from megalite.config.rules.validate import check

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TESTED_PAGES = ("layout", "clusters", "extending")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", page.read_text()) if "://" not in link]
    assert [link for link in links if link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", TESTED_PAGES)
def test_commands_of_the_pages_work(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another; of those that compute, the configuration is checked."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL)
    commands = [shlex.split(line) for block in blocks for line in block.splitlines() if line.strip()]
    assert commands
    for program, command, *arguments in commands:
        assert program == "megalite"
        if command == "show":
            assert main([command, *arguments]) == 0
        else:
            assert check(load(arguments[:1], arguments[1:]))


def test_the_timeline_is_what_show_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (ROOT / "docs/images/draw.sh").read_text()
    (line,) = [line for line in script.splitlines() if line.startswith("megalite show")]
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(line.replace("$images/", ""))[1:]) == 0
    assert (tmp_path / "dualpipev.svg").read_text() == (ROOT / "docs/images/dualpipev.svg").read_text()


def test_every_make_command_has_a_target() -> None:
    targets = [shlex.split(line)[1] for line in COMMANDS if line.startswith("make ")]
    assert targets == ["quickstart", "test"]
    for target in targets:
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", [line for line in COMMANDS if "launch/" in line])
def test_launched_configurations_are_valid_for_their_cluster(line: str) -> None:
    words = shlex.split(line)
    launcher = next(word for word in words if word.startswith("launch/"))
    assert os.access(ROOT / launcher, os.R_OK)
    ranks = 64 if "--nodes=8" in words else 8
    assert check(load([words[-1]]), ranks)


@pytest.mark.timeout(240)
def test_commands_of_the_tour_work_one_after_another(tmp_path: Path, installed: Path) -> None:
    """In the order of the page, with what the wheel installs, where nothing of a checkout is; training is cut short."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in ("argparse", "ast", "asyncio/base_events", "calendar", "codecs", "configparser", "csv", "datetime"):
        source = Path(sysconfig.get_path("stdlib")) / f"{name}.py"
        shutil.copy(source, texts / f"{source.stem}.txt")
    environment = {**at(installed), "PYTHONWARNINGS": "error::FutureWarning"}
    tour = [line for line in COMMANDS if line.startswith("megalite")]
    assert len(tour) == 24
    outputs, shown = {}, []
    for line in tour:
        words = shlex.split(line)
        if words[:2] == ["megalite", "train"]:
            longer = [int(word.partition("=")[2]) for word in words if word.startswith("train.steps=")]
            assert all(steps > load(["small"]).train.steps for steps in longer)
            steps = 4 if longer else 2
            words += [f"train.steps={steps}", "schedule.warmup=1", "eval.steps=1", "log.interval=1"]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        outputs[" ".join(words[:2])] = done.stdout
        shown += [done.stdout] * (words[:2] == ["megalite", "show"])
    assert "resuming at step 2, sample " in outputs["megalite train"]
    assert "step 4/4" in outputs["megalite train"]
    assert "step-00000004: intact" in outputs["megalite-inspect-checkpoint verify"]
    assert "finished" in outputs["megalite-status runs/small"]
    assert "16,384" in outputs["megalite-goodput simulate"]
    assert (tmp_path / "timeline.svg").read_text().startswith("<svg")
    assert "measured" in shown[-2]
    assert "NVIDIA H100" in shown[-1]
    planned = outputs["megalite plan"]  # as the page shows it
    assert "1  dp 64 zero2 · micro 2 · recompute selective " in planned
    assert "9,879" in planned
    assert (tmp_path / "runs/small/loss.png").stat().st_size > 10_000
    assert outputs["megalite-generate runs/small"].startswith("Once")
    assert outputs["megalite-generate hf:runs/small_hf"].startswith("Once")
    assert "differ by 0 of the largest" in outputs["megalite-convert --from"]
    assert "20 runs" in outputs["megalite-sweep expand"]
    assert "data/corpus_valid" in outputs["megalite-evaluate runs/small"]
