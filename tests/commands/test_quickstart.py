"""`megalite quickstart`: which programs it runs in which order, and what it does when one of them fails."""

import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from megalite.commands import main, quickstart
from megalite.config.load import load
from megalite.config.presets import presets
from megalite.config.rules.validate import check
from megalite.config.schema import Config

PROGRAMS = ["train_tokenizer", "prepare_data", "main", "main", "plot_metrics", "generate"]
Calls = list[quickstart.Program]


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What is run, in place of running it."""
    noted: Calls = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, "call", lambda program: noted.append(program) or 0)
    return noted


def configured(call: quickstart.Program, ranks: int) -> Config:
    assert call[:4] == quickstart.TRAIN_COMMAND
    return check(load([call[3]], call[4:]), ranks)


def test_every_program_is_called_in_its_turn(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["quickstart"]) == 0
    assert [call[1] for call in calls] == PROGRAMS
    assert all(callable(getattr(import_module(call[0]), call[1])) for call in calls)
    assert len([word for word in calls[0] if word.endswith(".py")]) > 100
    shown = capsys.readouterr().out
    assert all(f"\n{part}/6  " in shown for part in range(1, 7))


def test_eight_ranks_continue_what_two_began(calls: Calls) -> None:
    assert main.main(["quickstart", "run.seed=7", "--steps", "120"]) == 0
    first, second = configured(calls[2], 2), configured(calls[3], 8)
    assert str(second.parallel.layout) == "pp 2 · dp_shard 2 · tp 2"
    assert (first.train.steps, second.train.steps) == (110, 120)
    assert first.run == second.run
    assert (first.run.seed, first.run.dir, first.run.name) == (7, "runs", "quickstart")
    assert (first.model, first.data, first.optim, first.schedule) == (
        second.model,
        second.data,
        second.optim,
        second.schedule,
    )
    assert calls[0][calls[0].index("--out") + 1] == first.data.tokenizer
    assert calls[1][calls[1].index("--out") + 1] + "_train" == first.data.train[0].path


def test_the_ladder_has_its_data_where_it_looks_for_it(calls: Calls) -> None:
    assert main.main(["quickstart", "--data"]) == 0
    assert [call[1] for call in calls] == 2 * PROGRAMS[:2]
    ladder = yaml.safe_load(presets("experiment")["ladder_5x4"].read_text())["set"]
    tokenizer, data = calls[2:]
    assert tokenizer[tokenizer.index("--out") + 1] == ladder["data"]["tokenizer"]
    assert tokenizer[tokenizer.index("--vocab-size") + 1] == str(ladder["model.vocab_size"])
    assert data[data.index("--out") + 1] + "_train" == ladder["data"]["train"][0]["path"]
    assert tokenizer[: tokenizer.index("--out")] == calls[0][: calls[0].index("--out")]  # the same text


def test_it_begins_anew_and_leaves_other_folders(calls: Calls, tmp_path: Path) -> None:
    for folder in ("data/quickstart", "runs/quickstart", "data/mine", "runs/mine", "data/ladder"):
        (tmp_path / folder).mkdir(parents=True)
    assert main.main(["quickstart"]) == 0
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["ladder", "mine", "mine"]


def test_it_removes_nothing_where_a_link_lies(calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("data/quickstart", "runs", "mine"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "runs/quickstart").symlink_to(tmp_path / "mine")
    assert main.main(["quickstart"]) == 2
    assert "runs/quickstart: is a link or a file" in capsys.readouterr().err
    assert (tmp_path / "data/quickstart").is_dir()
    assert calls == []


def test_the_first_failure_ends_it(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "call", lambda program: calls.append(program) or 3 * (len(calls) == 3))
    assert main.main(["quickstart"]) == 3
    assert [call[1] for call in calls] == PROGRAMS[:3]


def test_without_matplotlib_it_draws_nothing(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quickstart, "find_spec", lambda _: None)
    assert main.main(["quickstart"]) == 0
    assert [call[1] for call in calls] == [name for name in PROGRAMS if name != "plot_metrics"]
    assert "left out, since matplotlib is not installed (pip install 'megalite[plot]')" in capsys.readouterr().out


def test_a_configuration_is_bad_input(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["quickstart", "tiny"]) == 2
    assert "tiny: quickstart trains a configuration of its own; give KEY=VALUE alone" in capsys.readouterr().err
    assert calls == []


def test_a_signal_is_handed_on_and_the_programs_exit_code_returned(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import signal, sys, time\n"
        "def main():\n"
        "    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
    )
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from megalite.commands.quickstart import call\n"
        f"import os; os.environ['PYTHONPATH'] = os.pathsep.join(sys.path); sys.exit(call(('slow', 'main')))"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == "ready\n"
            parent.send_signal(signal.SIGTERM)
            assert parent.wait(30) == 3
        finally:
            parent.kill()
