"""`megalite-plot-metrics`: pictures of runs."""

import json
from pathlib import Path

import pytest
from matplotlib import image, pyplot

from megalite_tools.experiment.plot_load import read_loads
from megalite_tools.experiment.plot_metrics import draw, main, read_metrics


def write_run(folder: Path, *records: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        for record in records:
            file.write(json.dumps({"time": 1.0, **record}) + "\n")
    return folder


def records(scale: float = 1.0) -> list[dict[str, object]]:
    train = [{"step": step, "loss": scale * 4 / step, "grad_norm": 1.0 / step} for step in range(1, 9)]
    return [{"step": 0, "valid_loss": 5.0}, *train, {"step": 8, "valid_loss": scale}]


def test_a_run_is_drawn_into_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", *records())
    assert main([str(run)]) == 0
    assert capsys.readouterr() == (f"{run / 'loss.png'}\n", "")
    pixels = image.imread(run / "loss.png")
    assert pixels.shape[:2] == (900, 1200)
    assert pixels.std() > 0.01


def test_what_is_drawn_depends_on_the_numbers(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, *records(scale)) for name, scale in (("a", 1.0), ("b", 2.0))]
    for run in runs:
        assert main([str(run), "--out", str(run / "x.svg")]) == 0
    assert (runs[0] / "x.svg").read_text() != (runs[1] / "x.svg").read_text()


def test_several_runs_are_all_there_even_under_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [str(write_run(tmp_path / place / "run", *records())) for place in "ab"]
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    assert main([*runs, "--out", str(tmp_path / "both.png")]) == 0
    labels = [text.get_text() for text in figures[0].axes[0].get_legend().get_texts()]
    wanted = [f"{place}/run, {kind}" for place in "ab" for kind in ("training", "validation")]
    assert all(label.startswith(start) for label, start in zip(labels, wanted, strict=True)), labels
    assert not (tmp_path / "a/run/loss.png").exists()


def test_tokens_learning_rate_and_marks_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[dict[str, object]] = [
        {"step": step, "loss": 4 / step, "learning_rate": 0.1, "tokens": 1000 * step} for step in range(1, 9)
    ]
    lines[6:6] = [{"step": 6, "event": "resumed"}]
    lines[4:4] = [{"step": 4, "event": "rollback"}, {"step": 4, "event": "saved"}]
    run = write_run(tmp_path / "run", *lines)
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    assert main([str(run)]) == 0
    losses, _, rates = figures[0].axes
    assert figures[0].get_suptitle() == "run"
    (tokens,) = losses.child_axes
    assert tokens.get_xlabel() == "tokens"
    assert tokens.get_xlim() == pytest.approx([1000 * step for step in losses.get_xlim()])
    assert {line.get_label(): line.get_xdata()[0] for line in losses.lines[1:]} == {"rolled back": 4, "resumed": 6}
    assert list(rates.lines[0].get_ydata()) == [0.1] * 8


def test_runs_whose_steps_differ_in_tokens_have_no_axis_of_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [write_run(tmp_path / str(size), {"step": 1, "loss": 1.0, "tokens": size}) for size in (8, 16)]
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    assert main([*map(str, runs), "--out", str(tmp_path / "x.png")]) == 0
    assert figures[0].axes[0].child_axes == []


def test_steps_repeated_after_resuming_use_the_later_record(tmp_path: Path) -> None:
    before = [{"step": step, "loss": 10.0} for step in (1, 2, 3)]
    after = [{"step": step, "loss": 20.0} for step in (2, 3, 4)]
    curves = read_metrics(write_run(tmp_path, *before, *after) / "metrics.jsonl")
    assert curves["loss"] == [(1, 10.0), (2, 20.0), (3, 20.0), (4, 20.0)]


def test_what_a_run_went_back_on_is_not_drawn(tmp_path: Path) -> None:
    before = [{"step": step, "loss": 10.0} for step in (1, 2, 3)]
    after = [{"step": 1, "event": "rollback", "parameters": ["norm.weight"]}, {"step": 4, "loss": 20.0}]
    curves = read_metrics(write_run(tmp_path, *before, *after) / "metrics.jsonl")
    assert curves["loss"] == [(1, 10.0), (4, 20.0)]


def test_a_line_that_is_being_written_is_passed_over(tmp_path: Path) -> None:
    path = write_run(tmp_path, {"step": 1, "loss": 1.0}) / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert read_metrics(path)["loss"] == [(1, 1.0)]


def test_null_is_left_out(tmp_path: Path) -> None:
    curves = read_metrics(write_run(tmp_path, {"step": 1, "loss": None, "grad_norm": 2.0}) / "metrics.jsonl")
    assert curves == {"grad_norm": [(1, 2.0)]}


def test_a_run_that_has_only_begun_can_be_drawn(tmp_path: Path) -> None:
    assert main([str(write_run(tmp_path))]) == 0
    draw({"run": {}}, tmp_path / "x.png")


@pytest.mark.parametrize(
    "text",
    [
        *("{", "3", "[]", '{"loss": 1}', '{"step": 1, "loss": "low"}', '{"step": "x", "loss": 1}'),
        *('{"step": 1, "event": ["resumed"]}', f'{{"step": 1{"0" * 200}}}', '{"step": 1, "loss": -1e308}'),
    ],
)
def test_what_is_no_record_is_named_by_its_line(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path, *records())
    with (run / "metrics.jsonl").open("a") as file:
        file.write(text + "\n")
    assert main([str(run)]) == 2
    assert f"metrics.jsonl: line 11 is not a record of a run: {text[:80]}" in capsys.readouterr().err
    assert not (run / "loss.png").exists()


@pytest.mark.parametrize("name", ["m$\\frac$", "_under", "运行", "\x1b[31m", "a$b"])
def test_names_are_drawn_as_they_are(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    assert main([str(write_run(tmp_path / name, *records()))]) == 0
    assert capsys.readouterr().out.rstrip("\n").isprintable()
    assert not recwarn


def test_a_missing_run_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", *records())
    assert main([str(run), str(tmp_path / "absent")]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("megalite-plot-metrics: error: ")
    assert str(tmp_path / "absent/metrics.jsonl") in shown.err
    assert not (run / "loss.png").exists()


def loads(*steps: int) -> list[dict[str, object]]:
    return [
        {"step": step, "event": "expert_load", "layers": [1, 3], "load": [[4, 4, 4, 4], [step, 1, 0, 7]]}
        for step in steps
    ]


def test_the_load_of_experts_is_that_of_steps_that_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    back = {"step": 10, "event": "rollback"}
    run = write_run(tmp_path / "run", *loads(10, 20), back, *loads(30), *records())
    found = read_loads(run / "metrics.jsonl")
    assert (found.steps, found.layers, found.in_turn) == ([10, 30], [1, 3], False)
    assert found.shares[0].tolist() == [[1, 1, 1, 1], [40 / 18, 4 / 18, 0, 28 / 18]]
    assert main([str(run), "--experts"]) == 0
    assert capsys.readouterr() == (f"{run / 'expert_load.png'}\n", "")
    assert image.imread(run / "expert_load.png").std() > 0.01
    write_run(run, {"step": 30, "event": "experts_in_turn"})
    assert read_loads(run / "metrics.jsonl").in_turn
    assert not (run / "loss.png").exists()


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([{"step": 1, "loss": 1.0}], "tells no loads of experts"),
        (
            [{"step": 1, "event": "expert_load", "layers": [1], "load": [[1, 2], [3, 4]]}],
            "are not what megalite writes",
        ),
        ([{"step": 1, "event": "expert_load", "layers": [1], "load": [[1, "x"]]}], "are not what megalite writes"),
        ([{"step": 1, "event": "expert_load", "layers": [1], "load": [[0, 0]]}], "are not what megalite writes"),
        ([{"step": 1, "event": "expert_load"}], "are not what megalite writes"),
        (
            [*loads(1), {"step": 2, "event": "expert_load", "layers": [1], "load": [[1, 2]]}],
            "are not what megalite writes",
        ),
    ],
)
def test_loads_that_cannot_be_drawn_are_refused(
    lines: list[dict[str, object]], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", *lines)
    assert main([str(run), "--experts"]) == 2
    assert told in capsys.readouterr().err
    assert not (run / "expert_load.png").exists()


def test_the_load_is_that_of_a_single_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), str(tmp_path), "--experts"]) == 2
    assert "--experts draws a single run, not 2" in capsys.readouterr().err
