"""`megalite train` as its users call it."""

import json
import math
import os
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from warm_start import Popen, run

from megalite.commands import train as train_command
from megalite.commands.main import main
from megalite.config.load import load
from megalite.data.store_writer import StoreWriter
from megalite.distributed.start.ranks import RankInfo
from megalite.schedule.file import read
from megalite.train.folder.lock import Lock

VOCABULARY = 16
TRAIN = ["-m", "megalite.commands.main", "train", "toy.yaml"]
CONFIG = """
run: {dir: runs, device: cpu}
model: {layers: 2, width: 16, heads: 2, kv_heads: 2, ffn: 24, vocab_size: 16, sequence_length: 16}
batch: {micro: 2, global: 8}
train: {steps: 8, precision: fp32, timeout: 60}
optim: {lr: 0.02}
schedule: {name: constant}
data: {train: [{path: data/train}], valid: [{path: data/valid}]}
"""
BASE = [
    "run.name=base",
    "parallel.pp=2",
    "parallel.dp_shard=2",
    "checkpoint.interval=4",
    "eval.interval=4",
    "eval.steps=1",
]


def train(work: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run([*TRAIN, *arguments], 200, cwd=work)


def write_store(prefix: Path, count: int, high: int = VOCABULARY) -> None:
    with StoreWriter(prefix, "<u2") as writer:
        writer.add(np.arange(count) * 3 % high)


def curve(folder: Path, name: str) -> dict[int, float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record[name] for record in records if name in record}


def tree(folder: Path) -> dict[str, bytes]:
    """The content of every file but logs and locks."""
    files = [path for path in folder.rglob("*") if path.is_file() and not {"logs", "lock"} & set(path.parts)]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration, data that repeats itself, and a finished run named base."""
    work = tmp_path_factory.mktemp("train")
    write_store(work / "data/train", 2000)
    write_store(work / "data/valid", 200)
    (work / "toy.yaml").write_text(CONFIG)
    done = train(work, *BASE)
    assert done.returncode == 0, done.stderr
    assert "base: pp 2 · dp_shard 2 zero3, " in done.stdout
    assert "done: 8 steps" in done.stdout
    return work


@pytest.fixture
def interrupted(work: Path, request: pytest.FixtureRequest) -> Path:
    """A run folder that holds the checkpoint of step 4 of base and nothing else."""
    folder = work / "runs" / request.node.name
    shutil.copytree(work / "runs/base/checkpoints/step-00000004", folder / "checkpoints/step-00000004")
    return folder


def test_the_run_folder_has_everything(work: Path) -> None:
    folder = work / "runs/base"
    assert {path.name for path in folder.iterdir()} == {
        "checkpoints",
        "config.yaml",
        "lock",
        "logs",
        "metrics.jsonl",
        "starts",
        "tensorboard",
    }
    assert sorted(path.name for path in (folder / "logs").iterdir()) == [f"rank_000{rank}.log" for rank in range(4)]
    assert all("layers" in path.read_text() for path in (folder / "logs").iterdir())
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000004", "step-00000008"]


def test_the_configuration_loads_back(work: Path) -> None:
    expected = load([str(work / "toy.yaml")], BASE)
    assert expected.parallel.data.mode == "auto"
    expected.parallel.data.mode = "zero3"  # of several ranks on CPUs
    assert load([str(work / "runs/base/config.yaml")]) == expected


def test_a_run_that_ended_well_says_so_last(work: Path) -> None:
    last = json.loads((work / "runs/base/metrics.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["step"]) == ("done", 8)


def test_a_start_tells_layout_command_and_devices(work: Path) -> None:
    start = json.loads((work / "runs/base/starts/001.json").read_text())
    assert start["layout"] == {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "ep": 1}
    assert start["ranks"] == 4
    assert start["command"][-len(BASE) :] == BASE
    assert start["devices"] == {socket.gethostname(): {"cpu": 4}}
    assert start["resumed"] is None


def test_the_loss_starts_at_chance_and_falls(work: Path) -> None:
    losses, valid = curve(work / "runs/base", "loss"), curve(work / "runs/base", "valid_loss")
    assert list(losses) == list(range(1, 9))
    assert list(valid) == [0, 4, 8]
    assert losses[1] == pytest.approx(math.log(VOCABULARY), rel=0.03)
    assert losses[8] < 0.8 * losses[1]
    assert valid[8] < valid[4] < valid[0]
    perplexity = curve(work / "runs/base", "valid_perplexity")
    assert perplexity == pytest.approx({step: math.exp(loss) for step, loss in valid.items()}, rel=1e-5)


def test_tensorboard_has_the_same_curves(work: Path) -> None:
    events = EventAccumulator(str(work / "runs/base/tensorboard"))
    events.Reload()
    for tag in events.Tags()["scalars"]:
        drawn = {event.step: event.value for event in events.Scalars(tag)}
        assert drawn == pytest.approx(curve(work / "runs/base", tag), rel=1e-6), tag


def test_a_resumed_run_repeats_every_bit(work: Path, interrupted: Path) -> None:
    done = train(work, *BASE, f"run.name={interrupted.name}")
    assert done.returncode == 0, done.stderr
    assert "resuming at step 4, sample 32" in done.stdout
    assert json.loads((interrupted / "starts/001.json").read_text())["resumed"]["step"] == 4
    for name in ("loss", "grad_norm", "valid_loss"):
        expected = {step: value for step, value in curve(work / "runs/base", name).items() if step > 4}
        assert curve(interrupted, name) == expected


def test_a_run_goes_on_from_another_runs_checkpoint_in_another_layout(work: Path) -> None:
    source = "runs/base/checkpoints/step-00000004"
    done = train(work, "run.name=branch", "parallel.tp=2", f"checkpoint.resume={source}")
    assert done.returncode == 0, done.stderr
    expected = {step: loss for step, loss in curve(work / "runs/base", "loss").items() if step > 4}
    assert curve(work / "runs/branch", "loss") == pytest.approx(expected, rel=1e-4)


def test_never_resuming_does_not_overwrite_a_run(work: Path) -> None:
    before = tree(work / "runs/base")
    done = train(work, "run.name=base", "checkpoint.resume=never")
    assert done.returncode == 2
    assert "checkpoint.resume = never" in done.stderr
    assert "step-00000008" in done.stderr
    assert "Traceback" not in done.stderr
    assert tree(work / "runs/base") == before


def test_going_back_does_not_overwrite_newer_checkpoints(work: Path) -> None:
    before = tree(work / "runs/base")
    done = train(work, "run.name=base", "checkpoint.resume=runs/base/checkpoints/step-00000004")
    assert done.returncode == 2
    assert "already holds step-00000008" in done.stderr
    assert tree(work / "runs/base") == before


def test_a_token_outside_the_vocabulary_is_told_once(work: Path) -> None:
    write_store(work / "data/bad", 2000, high=17)
    done = train(work, "run.name=bad_tokens", "parallel.dp_shard=2", "data.train=[{path: data/bad}]")
    assert done.returncode == 2
    assert done.stderr.count("data/bad.bin") == 1
    assert "token id 16" in done.stderr
    assert "model.vocab_size = 16" in done.stderr
    assert "Traceback" not in done.stderr


def test_training_outlives_everything_that_reports(work: Path) -> None:
    folder, full = work / "runs/unheard", 2**20  # the size of files that cannot grow
    (folder / "logs").mkdir(parents=True)
    for name in ("logs/rank_0000.log", "logs/rank_0001.log", "metrics.jsonl"):
        (folder / name).write_text(json.dumps({"step": 0, "event": "long", "text": "x" * full}) + "\n")
    call = shlex.join([sys.executable, *TRAIN, "run.name=unheard", "parallel.pp=2"])
    done = subprocess.run(
        ["sh", "-c", f"exec {call} >&- 2>/dev/full"],
        cwd=work,
        timeout=200,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (full, full)),
    )
    assert done.returncode == 0
    assert (folder / "checkpoints/step-00000008").exists()
    assert curve(folder, "loss") == {}


def test_data_that_does_not_fit_is_refused_before_any_rank_starts(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(work)
    monkeypatch.setattr("megalite.commands.train.launch", lambda *_: pytest.fail("ranks were started"))
    Path("junk.model").write_text("junk")
    write_store(Path("data/bare"), 2000, high=17)
    Path("data/bare.json").unlink()
    for override, message in (
        ("data.tokenizer=junk.model", "junk.model: not a SentencePiece model"),
        ("data.train=[{path: data/bare}]", "data/bare.bin holds token id 16, outside model.vocab_size = 16"),
    ):
        assert main(["train", "toy.yaml", "run.name=unfit", override]) == 2
        assert message in capsys.readouterr().err
    assert not Path("runs/unfit").exists()


def test_growing_batches_and_a_fitted_micro_batch_under_searched_orders(work: Path) -> None:
    searched = ["parallel.pipeline.schedule=auto", "run.cluster=l40s"]
    ramp = ["batch.rampup={start: 4, tokens: 256}", "batch.curriculum={start: 4, tokens: 512}"]
    done = train(work, "run.name=grown", "parallel.pp=2", "batch.micro=auto", "batch.memory=1", *ramp, *searched)
    assert done.returncode == 0, done.stderr
    assert "micro-batches of 4" in done.stdout  # the largest that leaves a micro-batch to each stage
    assert ", where stages take the time that is predicted on l40s, and a rank may hold the " in done.stdout
    assert read(work / "runs/grown/starts/001.schedule.yaml").micro_batches == 2
    assert load([str(work / "runs/grown/config.yaml")]).batch.micro == 4
    samples = [4, 8, 12, 16, 24, 32, 40, 48]  # 256 tokens are 16 samples, in two sizes
    assert curve(work / "runs/grown", "tokens") == {step: 16 * count for step, count in enumerate(samples, 1)}
    assert f"{48 / 124:.2f} epochs" in done.stdout
    losses = curve(work / "runs/grown", "loss")
    assert losses[8] < 0.9 * losses[1]


WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would be asked")


@pytest.mark.parametrize("device", ["cpu", pytest.param("auto", marks=WITHOUT_GPU)])
def test_a_micro_batch_cannot_be_fitted_to_unknown_memory(work: Path, device: str) -> None:
    name = f"unfitted_{device}"
    done = train(work, f"run.name={name}", f"run.device={device}", "batch.micro=auto", "parallel.dp_shard=2")
    assert done.returncode == 2
    assert done.stderr.count("batch.memory = null: is needed to fit batch.micro = auto") == 1
    assert "Traceback" not in done.stderr
    assert device == "auto" or not (work / "runs" / name).exists()


def test_a_bad_configuration_is_answered_at_once_and_in_full(work: Path) -> None:
    done = train(work, "run.name=bad_config", "model.heads=3", "parallel.pp=5", "batch.global=7", "optim.lr=-1")
    assert done.returncode == 2
    assert done.stdout == ""
    for key in ("model.heads", "parallel.pp", "batch.global", "optim.lr"):
        assert f"\n  {key} = " in done.stderr
    assert not (work / "runs/bad_config").exists()


@pytest.mark.parametrize("driver", [False, True])
@pytest.mark.parametrize("device", ["cpu", "auto", "cuda"])
def test_ranks_share_their_imports_where_they_have_no_gpu(
    device: str, driver: bool, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = device == "cpu" or (device == "auto" and not driver)
    monkeypatch.setattr("megalite.distributed.start.host.DRIVERS", ["/dev/no_such_device", *["/dev/null"] * driver])
    launched: list[object] = []
    monkeypatch.chdir(work)
    monkeypatch.setattr("megalite.commands.train.launch", lambda *given: launched.extend(given) or 0)
    arguments = ["train", "toy.yaml", f"run.name=on_{device}", f"run.device={device}", "parallel.pp=2"]
    assert main(arguments) == 0
    *ranks, shared, _ = launched
    assert ranks == ["megalite.commands.main", arguments, 2, Path("runs") / f"on_{device}" / "logs"]
    assert shared == ("megalite.train.worker" if shares else None)


def test_missing_data_makes_no_run_folder(work: Path) -> None:
    done = train(work, "run.name=no_data", "data.train=[{path: data/absent}]")
    assert done.returncode == 2
    assert "data/absent.bin" in done.stderr
    assert not (work / "runs/no_data").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_a_killed_rank_ends_the_job_and_is_named(work: Path) -> None:
    arguments = ["run.name=killed", "parallel.pp=2", "train.steps=1000000"]
    nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
    with Popen([*TRAIN, *arguments], cwd=work, stdout=nothing, stderr=pipe) as job:
        try:
            wait_for_line(work / "runs/killed/metrics.jsonl", job)
            ranks = children(job.pid)
            assert f'"pid": {ranks[0]},' in (work / "runs/killed/lock/2").read_text()
            os.kill(ranks[1], signal.SIGKILL)
            _, told = job.communicate(timeout=30)
        finally:
            job.kill()
    assert job.returncode == 5
    assert "rank 1 was killed by SIGKILL" in told
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert (work / "runs/killed/lock/2.free").exists()


def test_states_in_files_go_on_from_a_checkpoint_with_the_same_losses(
    work: Path, interrupted: Path, tmp_path: Path
) -> None:
    done = train(work, *BASE, f"run.name={interrupted.name}", f"optim.placement={tmp_path}")
    assert done.returncode == 0, done.stderr
    losses = curve(work / "runs/base", "loss")
    assert curve(interrupted, "loss") == {step: loss for step, loss in losses.items() if step > 4}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_a_killed_run_leaves_no_states_in_files_and_goes_on(work: Path, tmp_path: Path) -> None:
    arguments = ["run.name=killed_files", "parallel.pp=2", "checkpoint.interval=2", f"optim.placement={tmp_path}"]
    nothing = subprocess.DEVNULL
    checkpoints = work / "runs/killed_files/checkpoints"
    with Popen([*TRAIN, *arguments, "train.steps=1000000"], cwd=work, stdout=nothing, stderr=nothing) as job:
        try:
            wait_for_line(work / "runs/killed_files/metrics.jsonl", job)
            while not list(checkpoints.glob("step-????????/manifest.json")):
                time.sleep(0.05)
            for pid in [*children(job.pid), job.pid]:
                os.kill(pid, signal.SIGKILL)
        finally:
            job.kill()
    assert list(tmp_path.iterdir()) == []
    newest = max(int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-????????"))
    done = train(work, *arguments, f"train.steps={newest + 2}")
    assert done.returncode == 0, done.stderr
    assert f"resuming at step {newest}," in done.stdout
    assert f"done: {newest + 2} steps" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_folder_for_states_that_is_missing_is_told_once_and_nothing_begins(work: Path) -> None:
    done = train(work, *BASE, "run.name=no_folder", "optim.placement=./none")
    assert done.returncode == 2
    assert done.stderr.count("cannot be opened: No such file or directory") == 1
    assert not list((work / "runs/no_folder").glob("checkpoints/*"))


def test_a_second_job_is_refused_and_touches_nothing(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does a check, which tells of the first."""
    monkeypatch.chdir(work)
    write_store(Path("data/scanned"), 200)
    Path("data/scanned.json").unlink()
    folder, more = Path("runs/base"), ["train.steps=16", "data.valid=[{path: data/scanned}]"]
    held = Lock.take(folder)

    def changes() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))}

    before = changes()
    done = train(work, *BASE, *more)
    assert (done.returncode, done.stdout) == (2, "")
    told = f"megalite: error: runs/base: another job trains in this folder, process {os.getpid()} on "
    assert done.stderr.startswith(told)
    assert done.stderr.count("\n") == 1
    assert main(["train", "toy.yaml", "--check", *BASE, *more]) == 0
    assert f"megalite: warning: runs/base: process {os.getpid()} on " in capsys.readouterr().err
    assert changes() == before
    held.free()


def test_what_was_read_of_the_data_is_kept_or_a_warning_given(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(work)
    write_store(Path("data/unread"), 2000)
    Path("data/unread.json").unlink()
    monkeypatch.setattr("megalite.commands.train.launch", lambda *_: 0)
    arguments = ["train", "toy.yaml", "run.name=scanning", "data.train=[{path: data/unread}]", "data.valid=[]"]
    remembered = Path("runs/scanning/data.json")
    assert main([*arguments, "--check"]) == 0
    assert not Path("runs/scanning").exists()
    remembered.mkdir(parents=True)
    assert main(arguments) == 0
    assert "data.json: is a folder; name a file in it; the next start will read" in capsys.readouterr().err
    remembered.rmdir()
    assert main(arguments) == 0
    assert len(json.loads(remembered.read_text())["stores"]) == 1
    assert capsys.readouterr().err == ""


def wait_for_line(path: Path, job: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not (path.exists() and path.stat().st_size):
        assert job.poll() is None, "the job ended too early"
        assert time.monotonic() < deadline, "the job reported nothing"
        time.sleep(0.1)


def children(pid: int) -> list[int]:
    """The process id of every rank that `pid` started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_bf16_trains_on_a_cpu(work: Path) -> None:
    done = train(work, "run.name=bf16", "parallel.dp_shard=2", "train.precision=bf16", "train.steps=2")
    assert done.returncode == 0, done.stderr
    losses = curve(work / "runs/bf16", "loss")
    assert losses == pytest.approx(dict(list(curve(work / "runs/base", "loss").items())[:2]), rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["parallel.pp=2", "--world-size=4"], "ranks   4\nlayout  pp 2 · dp_shard 2\nfolder  {run}\nsteps   0 to 8\n"),
        (["run.name=base"], "ranks   1\nlayout  1 rank\nfolder  runs/base\nsteps   8 to 8\n"),
        (["train.steps=9", "checkpoint.resume=runs/base/checkpoints/step-00000008"], "steps   8 to 9\n"),
        (["parallel.pp=2", "--world-size=3"], "which must divide the job's 3; start 2 or 4 ranks"),
        (["model.sequence_length=2001"], "data/train.bin: 2000 tokens are too few"),
        (["data.valid=[{path: data/torn}]"], "data/torn.idx"),
        (["run.name=base", "model.width=32"], "model.width = 32: the checkpoint runs/base/checkpoints/step-00000008"),
        (["run.name=base", "model.attention.window=7"], "has null; use that, or begin a run with new weights"),
        (["run.name=base", "data.train=[{path: data/valid}]"], 'data.train[0].path = "data/valid": holds other'),
        (["run.name=base", "checkpoint.resume=never"], "checkpoint.resume = never"),
    ],
)  # fmt: skip
def test_a_check_tells_what_would_start_or_why_not(
    arguments: list[str], told: str, work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(work)
    monkeypatch.setattr("megalite.commands.train.launch", lambda *_: pytest.fail("started ranks"))
    Path("data/torn.bin").write_bytes(bytes(100))
    Path("data/torn.idx").write_bytes(bytes(10))
    code = main(["train", "toy.yaml", "--check", "run.name=checked", *arguments])
    shown = capsys.readouterr()
    assert code == (0 if told.endswith("\n") else 2), shown.err
    assert told.format(run="runs/checked") in (shown.out if code == 0 else shown.err)
    assert not Path("runs/checked").exists()


def test_bad_data_is_told_before_ranks_start(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    monkeypatch.setattr("megalite.commands.train.launch", lambda *_: pytest.fail("started ranks"))
    assert main(["train", "toy.yaml", "run.name=short", "model.sequence_length=2001"]) == 2
    assert not Path("runs/short").exists()


@pytest.mark.parametrize(("left", "code"), [("lock", 5), ("starts", 5), ("logs", 4)])
def test_a_run_whose_folder_was_removed_is_not_to_be_tried_again(
    left: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher would begin anew. The logs may be there again: whoever writes one makes their folder."""
    (tmp_path / left).mkdir()
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    train_command._end(RankInfo(0, 1, 0), tmp_path, "the lock of this run was removed")
    assert ended == [code]
    told = "the run folder was removed" if code == 4 else "the lock of this run was removed"
    assert told in capsys.readouterr().err
