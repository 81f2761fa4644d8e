"""The page of a run: it has what the folder tells, loads nothing, and no folder is too damaged for it."""

import json
import os
import re
import stat
import sys
from html import unescape
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))

from made_up_run import MadeUp, made_up
from page_cases import Page

from megalite.checkpoint.store.disk import measure
from megalite.checkpoint.store.manifest import Manifest, Source
from megalite.commands.main import main
from megalite.commands.report.run_facts import MAX_STARTS
from megalite.config.convert import to_plain
from megalite.config.load import dump, load
from megalite.config.rules.validate import check
from megalite.cost.cluster import load_cluster
from megalite.cost.predict import predict
from megalite.cost.texts import step_text
from megalite.plan.model.size import model_parameters
from megalite_launch.base.texts import lasting
from megalite_launch.watch.run import open_run
from megalite_launch.watch.summary import summary

HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J"
LAYOUT = {"pp": 2, "dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 2}
OVERRIDES = (
    "parallel.pp=2", "parallel.tp=2", "parallel.dp_shard=4", "parallel.data.mode=zero1", "batch.global=64",
    "batch.micro=4", "run.cluster=h100_sxm", "data.train=[{path: data/web}, {path: data/code, weight: 3}]",
)  # fmt: skip


def folder_of(path: Path) -> Path:
    """A run that was resumed twice, with two checkpoints of which one is cut short, on GPUs that are known."""
    made_up(path)
    config = load(["small_60m"], OVERRIDES)
    record = {
        "time": "2026-09-21T14:23:28+00:00", "host": "n001", "ranks": 16, "steps": 2000, "layout": LAYOUT,
        "devices": {"n001": {"NVIDIA H100 80GB HBM3": 8}}, "commit": "0123456789abcdef0123-dirty", "python": "3.11.7",
        "packages": {"torch": "2.13.0", "unheard-of": "1"}, "environment": {"NCCL_DEBUG": "INFO"},
        "tokenizer": {"path": "data/tok.model", "hash": "ab12"}, "resumed": {"step": 700, "from": "checkpoints"},
    }  # fmt: skip
    (path / "starts/002.json").write_text(json.dumps(record))
    (path / "starts/002.yaml").write_text(dump(config))
    for step in (1100, 1200):
        checkpoint = path / "checkpoints" / f"step-{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "index.bin").write_bytes(b"1" * 3 * 2**20)
        files = {"index.bin": measure(checkpoint, "index.bin")}
        sources = (Source("data/web", 1.0, 123_456_789, "00ff" * 8),)
        manifest = Manifest(step, step * 4096, record["time"], 16, LAYOUT, {"torch": "2.13.0"}, to_plain(config),
                            sources, files)  # fmt: skip
        (checkpoint / "manifest.json").write_text(manifest.render())
    os.truncate(path / "checkpoints/step-00001100/index.bin", 5)
    return path


def test_a_page_has_all_that_the_folder_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder_of(tmp_path / "pretrain")
    assert main(["report", str(path)]) == 0
    assert capsys.readouterr().out.strip() == str(path / "report.html")
    text = (path / "report.html").read_text()
    found = Page(text)
    assert found.loaded == []
    config = check(load(["small_60m"], OVERRIDES))
    for words in (
        f"{model_parameters(config.model).total:,}", "1,200 of 2,000", "data/code",
        "123,456,789", "00ff00ff00ff00ff", "pp 2, dp_shard 4, tp 2", "3.00 MiB",
        "complete", "index.bin has 5 bytes", "0123456789ab-dirty", "torch 2.13.0", "NCCL_DEBUG INFO", "hash ab12",
        "n001: NVIDIA H100 80GB HBM3 8", "predicted on h100_sxm", "measured / predicted", "vocab_size: 32000",
        "700", "broken upright line: resumed", "resumed at step 400", "resumed at step 700", "Where time went",
    ):  # fmt: skip
        assert words in found.text, words
    assert "unheard-of" not in found.text
    assert step_text(predict(config, load_cluster("h100_sxm"))) in found.text
    assert stat.S_IMODE((path / "report.html").stat().st_mode) & 0o077 == 0, "it has paths and settings"


def test_experts_that_routers_do_not_choose_are_told(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "run")
    config = load(["tiny_moe"], [*OVERRIDES, "parallel.ep=2", "model.experts.force_balance=true"])
    (path / "starts/002.yaml").write_text(dump(config))
    assert main(["report", str(path)]) == 0
    assert "tokens take experts in turn, whatever routers say" in Page((path / "report.html").read_text()).text


def row_of(text: str, *first: str) -> list[str]:
    """The cells of the table's row that begins with `first`."""
    rows = [[unescape(cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)] for row in text.split("<tr>")]
    (found,) = [row for row in rows if tuple(row[: len(first)]) == first]
    return found


def test_numbers_stand_in_their_columns(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "run")
    assert main(["report", str(path)]) == 0
    text = (path / "report.html").read_text()
    moment, axes = "2026-09-21T14:23:28+00:00", "pp 2, dp_shard 4, tp 2"
    header = ["step", "saved", "tokens", "size", "ranks", "layout", "state"]
    assert row_of(text, "step", "saved") == header
    assert row_of(text, "1200") == ["1200", moment, f"{1200 * 4096:,}", "3.00 MiB", "16", axes, "complete"]
    assert row_of(text, "start", "time") == ["start", "time", "from step", "ranks", "layout", "host", "commit"]
    assert row_of(text, "002") == ["002", moment, "700", "16", axes, "n001", "0123456789ab-dirty"]
    assert row_of(text, "training", "data/web") == ["training", "data/web", "1", "123,456,789", "00ff00ff00ff00ff"]
    assert row_of(text, "training", "data/code") == ["training", "data/code", "3", "", ""]
    watched = open_run(str(path))
    watched.update()
    usual = summary(watched)["usual_step_seconds"]
    seconds = predict(check(load(["small_60m"], OVERRIDES)), load_cluster("h100_sxm")).seconds
    assert f"<dt>measured / predicted</dt><dd>{usual / seconds:.3g}</dd>" in text
    assert f"<dt>a step, usually</dt><dd>{lasting(usual)}</dd>" in text
    assert re.search(r"<title>loss: 2\.\d+ at step 1,200</title>", text), "the made-up loss ends near 2"
    assert re.search(r"<title>a step: [12]\.\d+ s at step 1,\d+</title>", text)


def test_events_of_a_run_are_told(tmp_path: Path) -> None:
    """What was rolled back, resumed and skipped is on the page, and no curve goes back."""
    run = MadeUp(tmp_path / "run")
    for step, values in (
        (10, {"loss": 5.0}), (10, {"valid_loss": 7.125}), (20, {"loss": 4.0}), (20, {"valid_loss": 6.5}),
        (21, {"event": "bad_step", "answer": "rollback"}), (10, {"event": "rollback", "taken_back": 21}),
        (11, {"event": "bad_step", "answer": "skip"}), (12, {"loss": 4.5}), (12, {"event": "spike", "answer": "warn"}),
        (10, {"event": "resumed"}), (15, {"loss": 3.0}), (15, {"event": "done"}),
    ):  # fmt: skip
        run.now += 5
        run.metric(step, **({"step_seconds": 0.5} if "loss" in values else {}), **values)
    assert main(["report", str(tmp_path / "run")]) == 0
    text = (tmp_path / "run/report.html").read_text()
    found = Page(text)
    for words in (
        "training: bad step at step 21: rollback", "training: rollback at step 10",
        "training: bad step at step 11: skip", "training: spike at step 12: warn",
        "rolled back at step 10", "resumed at step 10",
        "broken upright line: rolled back; broken upright line: resumed", "loss: 3 at step 15",
        "valid loss: 7.12 at step 10",
    ):  # fmt: skip
        assert words in found.text, words
    assert "6.5" not in found.text


def test_the_latest_starts_are_told(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "run")
    for name in range(3, MAX_STARTS + 4):
        (path / f"starts/{name:03d}.json").write_text("{}")
    assert main(["report", str(path)]) == 0
    text = (path / "report.html").read_text()
    assert "3 older starts left out" in text
    assert f"As start {MAX_STARTS + 3:03d} found it" in text


def test_speed_stands_beside_the_prediction_for_another_cluster(tmp_path: Path) -> None:
    path, out = folder_of(tmp_path / "run"), tmp_path / "page.html"
    assert main(["report", str(path), "--cluster", "h200", "--html", str(out)]) == 0
    assert not (path / "report.html").exists()
    text = Page(out.read_text()).text
    assert "predicted on h200" in text
    assert "broken line: predicted, " in text


def test_a_page_has_no_secrets_of_the_configuration(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "run")
    secrets = ("log.wandb=https://me:precious@host", "data.train=[{path: 'http://me:precious@host/store'}]")
    (path / "starts/002.yaml").write_text(dump(load(["small_60m"], [*OVERRIDES, *secrets])))
    assert main(["report", str(path)]) == 0
    text = (path / "report.html").read_text()
    assert (text.count("://***@host"), "precious" in text) == (3, False)


def test_texts_of_others_are_escaped(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "run")
    record = json.loads((path / "starts/002.json").read_text())
    keys = ("time", "host", "commit", "python", "platform", "driver")
    record |= dict.fromkeys(keys, HOSTILE) | {"layout": {HOSTILE: 2}, "devices": {HOSTILE: {HOSTILE: HOSTILE}}}
    record |= {"packages": {"torch": HOSTILE}, "environment": {HOSTILE: HOSTILE}, "tokenizer": {"path": HOSTILE}}
    (path / "starts/002.json").write_text(json.dumps(record))
    config = load(["small_60m"], [*OVERRIDES, f'data.train=[{{path: "{HOSTILE[:-4]}"}}]'])
    (path / "starts/002.yaml").write_text(dump(config))
    assert main(["report", str(path)]) == 0
    text = (path / "report.html").read_text()
    assert Page(text).loaded == []
    assert "\x1b" not in text
    assert Page(text).text.count("<img src=x onerror=alert(1)>") >= 12


def _no_config(path: Path) -> None:
    (path / "starts/002.yaml").unlink()


def _other_keys(path: Path) -> None:
    (path / "starts/002.yaml").write_text("model: {layres: 3}\n")


def _including(path: Path) -> None:
    (path / "starts/002.yaml").write_text("include: /etc/hostname\n")


def _pipes(path: Path) -> None:
    for name in ("starts/002.json", "starts/002.yaml"):
        (path / name).unlink()
        os.mkfifo(path / name)
    os.mkfifo(path / "config.yaml")


def _wrong_kinds(path: Path) -> None:
    kinds = {key: [{"a": None}, 1e999] for key in json.loads((path / "starts/002.json").read_text())}
    (path / "starts/002.json").write_text(json.dumps(kinds))


def _half_written(path: Path) -> None:
    for name in ("starts/002.json", "starts/002.yaml", "metrics.jsonl", "events.jsonl"):
        os.truncate(path / name, (path / name).stat().st_size // 2 + 3)


def _no_checkpoints(path: Path) -> None:
    (path / "checkpoints").rename(path / "kept")
    (path / "checkpoints").write_text("")


def _empty(path: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl", "starts/001.json", "starts/002.json"):
        os.truncate(path / name, 0)


def _huge_model(path: Path) -> None:
    text = (path / "starts/002.yaml").read_text()
    (path / "starts/002.yaml").write_text(text.replace("  layers: ", "  layers: 999999999"))


def _endless_step(path: Path) -> None:
    text = (path / "starts/002.yaml").read_text()
    (path / "starts/002.yaml").write_text(text.replace("  global: 64", "  global: 1000000"))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_no_config, "No configuration could be read"),
        (_other_keys, "layres"),
        (_including, "include"),
        (_pipes, "is no regular file"),
        (_wrong_kinds, "Starts"),
        (_half_written, "Missing or damaged"),
        (_no_checkpoints, "a folder of checkpoints is expected"),
        (_empty, "No step has been reported"),
        (_huge_model, "model.layers"),
        (_endless_step, "too long to be simulated here"),
    ],
)
def test_a_damaged_folder_has_a_page(damage: object, told: str, tmp_path: Path) -> None:
    path = folder_of(tmp_path / "run")
    damage(path)  # type: ignore[operator]
    assert main(["report", str(path)]) == 0
    assert told in Page((path / "report.html").read_text()).text


def test_what_is_no_run_or_cannot_be_written_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder_of(tmp_path / "run")
    (tmp_path / "other.html").write_text("mine")
    (path / "report.html").symlink_to(tmp_path / "other.html")
    (tmp_path / "empty").mkdir()
    for arguments, words in (
        ([], "takes one run folder, not 0"),
        ([str(path), str(path)], "not 2"),
        ([str(tmp_path / "nowhere")], "is no folder"),
        ([str(tmp_path / "empty")], "give the folder of a run"),
        ([str(path)], "is a link, and stays one"),
        ([str(path), "--html", str(tmp_path)], "is a folder; name a file in it"),
        ([str(path), "--cluster", "abacus"], "abacus"),
    ):
        assert main(["report", *arguments]) == 2
        told = capsys.readouterr().err
        assert words in told
        assert told.count("error:") == 1
    assert (tmp_path / "other.html").read_text() == "mine"
