"""Preparation in shards: the same bytes by every engine, whatever is lost in between."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from megalite.data.exclusive_file import claim
from megalite.data.shards import Shard, write_shards
from megalite.data.store import TokenStore
from megalite.data.store_writer import StoreWriter
from megalite_launch.base.slurm import Answer
from megalite_tools.data import engines, shard_task, sharded
from megalite_tools.data.merge_data import main as merge
from megalite_tools.data.prepare_data import main

STORE = (".bin", ".idx", ".json")


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A folder of seven files of different sizes, one of them without a document."""
    folder = tmp_path / "inputs"
    folder.mkdir()
    for number in range(7):
        texts = [f"file {number} line {line} " + "hello " * (line % 5) for line in range(40 * (number % 4) + 5)]
        lines = [] if number == 3 else [json.dumps({"text": text}) + "\n" for text in texts]
        (folder / f"{number}.jsonl").write_text("".join(lines) or "\n" * 4000)
    return folder


def command(inputs: Path | str, tokenizer_file: Path, prefix: Path, *more: str) -> list[str]:
    return [str(inputs), "--tokenizer", str(tokenizer_file), "--out", str(prefix), "--workers", "1", *more]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def merged_is_one_store(inputs: Path | str, tokenizer_file: Path, prefix: Path, *more: str) -> None:
    folder = prefix.parent.parent
    assert main(command(inputs, tokenizer_file, folder / "one", *more)) == 0
    assert merge([str(folder / "merged"), str(prefix)]) == 0
    for suffix in (*STORE, *((".mask",) if "--chat" in more else ())):
        assert Path(f"{folder}/merged{suffix}").read_bytes() == Path(f"{folder}/one{suffix}").read_bytes()


def test_workers_change_nothing_and_merged_it_is_one_store(inputs: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    for workers in ("1", "3"):
        more = ("--shards", "7", "--workers", workers)
        assert main(command(inputs, tokenizer_file, tmp_path / workers / "p", *more)) == 0
    assert content(tmp_path / "1") == content(tmp_path / "3")
    listed = json.loads((tmp_path / "1/p.shards").read_text())["shards"]
    assert [shard["path"] for shard in listed] == [f"p-{n:05d}-of-00007" for n in range(7)]
    merged_is_one_store(inputs, tokenizer_file, tmp_path / "1/p")


def test_conversations_have_masks(inputs: Path, tokenizer_file: Path, out: Path) -> None:
    for path in inputs.iterdir():
        rows = [
            {"prompt": "Say hello: ", "completion": "hello " * (n + 1) + "."} for n in range(path.stat().st_size % 9)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(command(inputs, tokenizer_file, out / "p", "--chat", "--shards", "4")) == 0
    merged_is_one_store(inputs, tokenizer_file, out / "p", "--chat")


def test_whole_shards_are_kept_and_others_made_anew(
    inputs: Path, tokenizer_file: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []
    write = shard_task.write_stores

    def noted(settings, files, prefixes, *more, **named):  # type: ignore[no-untyped-def]
        made.append(prefixes[0][-10])
        return write(settings, files, prefixes, *more, **named)

    monkeypatch.setattr(shard_task, "write_stores", noted)
    given = command(inputs, tokenizer_file, out / "p", "--shards", "7")
    assert main(given) == 0
    expected, _ = content(out), made.clear()
    assert main(given) == 0
    assert made == []
    (out / "p-00002-of-00007.idx").unlink()
    (out / "p-00004-of-00007.bin").write_bytes(b"")
    damaged = out / "p-00006-of-00007.bin"
    damaged.write_bytes(b"\x09" + damaged.read_bytes()[1:])  # of the same size
    (out / "p-00005-of-00007.record").unlink()
    assert main(given) == 2  # a store without a record may be anybody's
    assert "p-00005-of-00007.bin: exists already" in capsys.readouterr().err
    for suffix in STORE:
        Path(f"{out}/p-00005-of-00007{suffix}").unlink()
    (out / "p.shards").unlink()
    assert main(given) == 0
    assert made == ["2", "4", "5", "6"]
    assert content(out) == expected

    made.clear()
    changed = inputs / "1.jsonl"
    changed.write_bytes(changed.read_bytes().replace(b"hello", b"hallo"))  # of the same size
    assert main(given) == 2
    assert "p.shards: " in capsys.readouterr().err
    assert content(out) == expected
    (out / "p.shards").unlink()
    assert main(given) == 0
    assert made == ["1"]
    changed_names = {name for name, held in content(out).items() if held != expected[name]}
    assert {"p-00001-of-00007.bin", "p-00001-of-00007.record"} <= changed_names
    assert all(name.startswith(("p-00001-", "p.shards")) for name in changed_names)
    merged_is_one_store(inputs, tokenizer_file, out / "p")


def test_input_that_changes_or_goes_away_is_told_and_finished_shards_stay(
    inputs: Path, tokenizer_file: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given, hashed = command(inputs, tokenizer_file, out / "p", "--shards", "7"), shard_task._hash
    changes = [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(kept * 2),
        lambda path: os.utime(path, ns=(1, 1)),
    ]
    last = inputs / "6.jsonl"
    kept = last.read_bytes()
    for change, message in zip(changes, ("cannot be read any more", "had", "while it was read"), strict=True):

        def then_changed(inputs, change=change):  # type: ignore[no-untyped-def]
            found = hashed(inputs)
            if last in [each.path for each in inputs]:
                change(last)
            return found

        monkeypatch.setattr(shard_task, "_hash", then_changed)
        assert main(given) == 2
        assert message in capsys.readouterr().err
        assert not (out / "p.shards").exists()
        assert not (out / "p-00006-of-00007.idx").exists()
        assert (out / "p-00005-of-00007.idx").exists()
        last.write_bytes(kept)
    monkeypatch.setattr(shard_task, "_hash", hashed)
    assert main(given) == 0
    merged_is_one_store(inputs, tokenizer_file, out / "p")


def dies_once(task: shard_task.ShardTask) -> "shard_task.Record | str":
    """Make the shard, but kill this process, once, in the middle of shard 2."""
    flag = Path(f"{task.out}.died")
    if task.number == 2 and not flag.exists():
        flag.touch()
        Path(task.prefix).with_name(f".{Path(task.prefix).name}.partial.bin").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    return shard_task.make_shard(task)


def test_a_killed_worker_is_replaced(
    inputs: Path, tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(command(inputs, tokenizer_file, tmp_path / "calm/p", "--shards", "5")) == 0
    monkeypatch.setattr(engines, "attempt", dies_once)
    assert main(command(inputs, tokenizer_file, tmp_path / "died/p", "--shards", "5", "--workers", "2")) == 0
    (tmp_path / "died/p.died").unlink()
    assert content(tmp_path / "calm") == content(tmp_path / "died")


def dies(task: shard_task.ShardTask) -> None:
    os._exit(1)


def test_workers_that_die_again_and_again_end_it(
    inputs: Path, tokenizer_file: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engines, "attempt", dies)
    assert main(command(inputs, tokenizer_file, out / "p", "--shards", "2", "--workers", "2")) == 2
    assert "workers died 3 times" in capsys.readouterr().err


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", folder], capture_output=True)
    if made.returncode:
        pytest.skip(f"cannot mount: {made.stderr.decode()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True, timeout=30)


def test_wherever_a_disk_is_full_shards_are_whole_and_the_same_command_goes_on(
    inputs: Path, tokenizer_file: Path, tmp_path: Path, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk grows page by page until all shards have room, and is then full again when the list is written."""
    assert main(command(inputs, tokenizer_file, tmp_path / "calm/p", "--shards", "4")) == 0
    given, size, failed = command(inputs, tokenizer_file, disk / "p", "--shards", "4"), 8, list[str]()
    going_on = "No space left on device; make room, and the same command goes on: finished shards are kept\n"
    while main(given) == 2:
        error = capsys.readouterr().err
        assert error.endswith(going_on)
        failed.append(error)
        assert not [name for name in content(disk) if name.startswith(".")]
        for index in disk.glob("*.idx"):
            TokenStore(index.with_suffix("")).verify()
        size += 4
        subprocess.run(["mount", "-o", f"remount,size={size}k", disk], check=True, timeout=30)
    assert any("cannot write the store" in error for error in failed)
    assert any(".record: cannot be written" in error for error in failed)
    (disk / "p.shards").unlink()
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    assert main(given) == 2
    assert capsys.readouterr().err.endswith(f"p.shards: cannot be written: {going_on}")
    (disk / "filler").unlink()
    assert main(given) == 0
    assert content(disk) == content(tmp_path / "calm")


def hangs(task: shard_task.ShardTask) -> str:
    """Hold shard 1 with half a store, until shard 0 fails and this process is killed."""
    if task.number == 1:
        half = StoreWriter(task.prefix, "uint16").hidden[0]
        with claim(half, "half"), claim(task.lock, "lock"):
            time.sleep(60)
    while not Path(f"{task.out}-00001-of-00002").with_name(".p-00001-of-00002.lock").exists():
        time.sleep(0.01)
    return "shard 0 has failed"


def test_workers_that_are_killed_for_another_shard_leave_nothing(
    inputs: Path, tokenizer_file: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engines, "attempt", hangs)
    assert main(command(inputs, tokenizer_file, out / "p", "--shards", "2", "--workers", "2")) == 2
    assert "shard 0 has failed" in capsys.readouterr().err
    assert list(out.iterdir()) == []


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A Ray cluster of two nodes beside its head, and these by the names that their tasks find as RAY_NODE."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster  # noqa: PLC0415

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))  # workers import this module
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        nodes = {name: cluster.add_node(num_cpus=1, env_vars={"RAY_NODE": name}) for name in ("one", "other")}
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster, nodes
    finally:
        cluster.shutdown()


@pytest.mark.timeout(180)
def test_ray_of_two_nodes_with_a_killed_worker(
    two_nodes: object, inputs: Path, tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(command(inputs, tokenizer_file, tmp_path / "calm/p", "--shards", "5")) == 0
    monkeypatch.setattr(engines, "attempt", dies_once)
    assert main(command(inputs, tokenizer_file, tmp_path / "ray/p", "--shards", "5", "--engine", "ray")) == 0
    (tmp_path / "ray/p.died").unlink()
    assert content(tmp_path / "calm") == content(tmp_path / "ray")


def waits_once(task: shard_task.ShardTask) -> shard_task.Record:
    """Wait at the third shard for the node to be lost, the first time."""
    mark = Path(f"{task.out}.waits")
    if task.number == 2 and not mark.exists():
        mark.write_text(os.environ["RAY_NODE"])
        time.sleep(120)
    return shard_task.make_shard(task)


@pytest.mark.timeout(180)
def test_ray_goes_on_where_a_node_is_lost(
    two_nodes: tuple[Any, dict[str, Any]],
    inputs: Path,
    tokenizer_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (cluster, nodes), out = two_nodes, tmp_path / "ray/p"
    waiting = Path(f"{out}.waits")
    assert main(command(inputs, tokenizer_file, tmp_path / "calm/p", "--shards", "5")) == 0
    monkeypatch.setattr(engines, "attempt", waits_once)

    def lose() -> None:
        while not (waiting.exists() and waiting.read_text()):
            time.sleep(0.05)
        cluster.remove_node(nodes[waiting.read_text()], allow_graceful=False)

    losing = Thread(target=lose, daemon=True)
    losing.start()
    assert main(command(inputs, tokenizer_file, out, "--shards", "5", "--engine", "ray")) == 0
    losing.join()
    assert len(cluster.worker_nodes) == 1
    waiting.unlink()
    assert content(tmp_path / "calm") == content(tmp_path / "ray")


def test_an_array_of_slurm_whose_tasks_run_in_any_order(
    inputs: Path,
    tokenizer_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(command(inputs, tokenizer_file, tmp_path / "calm/p", "--shards", "5")) == 0
    asked: list[list[str]] = []

    def slurm(words):  # type: ignore[no-untyped-def]
        asked.append(list(words))
        return Answer(0, "7\n", "")

    monkeypatch.setattr(engines.submit_slurm, "__defaults__", (slurm,))
    more = ("--shards", "5", "--engine", "slurm", "--sbatch", "partition=cpu", "--workers", "2")
    given, script = command(inputs, tokenizer_file, tmp_path / "slurm/p", *more), tmp_path / "slurm/p.sbatch"
    assert main(given) == 0
    assert asked == [["sbatch", "--parsable", str(script)]]
    assert "submitted as job 7: 2 tasks for 5 shards" in capsys.readouterr().out
    text = script.read_text()
    assert "#SBATCH --array=0-1%2" in text
    assert "#SBATCH --partition=cpu" in text
    for task in ("1", "0"):
        assert not (tmp_path / "slurm/p.shards").exists()
        environment = {**os.environ, "SLURM_ARRAY_TASK_ID": task}
        subprocess.run(["bash", str(script)], env=environment, timeout=120, check=True)
    assert main(given) == 0
    assert len(asked) == 1  # all of it is there
    script.unlink()
    assert content(tmp_path / "slurm") == content(tmp_path / "calm")


def test_two_tasks_of_an_array_that_end_at_the_same_time_agree(
    inputs: Path, tokenizer_file: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def after_another(prefix: str, shards: list[Shard]) -> None:
        write_shards(prefix, shards)
        write_shards(prefix, shards)

    monkeypatch.setattr(sharded, "write_shards", after_another)
    assert main(command(inputs, tokenizer_file, out / "p", "--shards", "2")) == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--shards", "8"), "--shards 8: a shard has whole files, and 1 to 7 are possible"),
        (("--shards", "0"), "--shards 0: "),
        (("--shards", "2", "--valid-fraction", "0.1"), "megalite-split-data"),
        (("--shards", "2", "--pack", "64"), "megalite-merge-data"),
        (("--shards", "2", "--sbatch", "partition=cpu"), "--sbatch is for --engine slurm"),
        (("--engine", "slurm", "--sbatch", "no/option=1"), "no option of sbatch"),
    ],
)
def test_options_that_contradict(
    inputs: Path,
    tokenizer_file: Path,
    out: Path,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
    message: str,
) -> None:
    assert main(command(inputs, tokenizer_file, out / "p", *more)) == 2
    assert message in capsys.readouterr().err
    assert list(out.iterdir()) == []


def test_a_second_preparation_of_a_shard_is_refused(
    inputs: Path, tokenizer_file: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with shard_task.claim(out / ".p-00001-of-00003.lock", "p"):
        assert main(command(inputs, tokenizer_file, out / "p", "--shards", "3")) == 2
    assert "p-00001-of-00003: is being written by another process" in capsys.readouterr().err
