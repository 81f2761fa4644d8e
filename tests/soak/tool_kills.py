"""The kill test of tools: preparing packed conversations, converting a model, and exporting a run's checkpoint.

Each is killed with SIGKILL at random moments. What it leaves is either the whole result, to the byte, or nothing that
is taken for one; and the same command, run again, makes the whole result and leaves nothing beside it.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "tools/data"))

import torch
from chat_families import MARKED, write_tokenizer
from toy_jobs import config_of, make, one_rank, save
from violation import Violation

from megalite.base.errors import InputError
from megalite.checkpoint.weights.export import export
from megalite.config.layout import Layout
from megalite.config.model_schema import Model
from megalite.config.schema import Config
from megalite.data.store import TokenStore
from megalite_tools.checkpoint import convert
from megalite_tools.data import prepare_data

MODEL = Model(8, 128, 4, 2, None, 384, 2048, 64)
CHATS = 4000
Call = Callable[[], int | None]


@dataclass(frozen=True)
class Tool:
    """One command: what it runs, the folder that it writes to, and the file or folder that makes its result whole."""

    name: str
    call: Call
    out: Path
    whole: Path


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=10, help="of each tool (default: 10)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, early, done in kill_all(Path(folder), options.kills, random.Random(options.seed)):
                print(f"{name}: {early + done} kills, {done} of them when the result was whole", flush=True)
        except Violation as violation:
            print(f"violation: {violation}")
            return 1
    return 0


def kill_all(folder: Path, kills: int, rng: random.Random) -> Iterator[tuple[str, int, int]]:
    """For each tool its name, and how many kills came before and after its result was whole. Raises Violation."""
    torch.set_num_threads(1)  # so that this process may fork
    for tool in _tools(folder):
        yield tool.name, *_kill(tool, kills, rng)


def _tools(folder: Path) -> list[Tool]:
    tokenizer = write_tokenizer(folder / "tokenizer", MARKED["chatml"])
    turn = {"role": "user", "content": "What is 1 + 1?"}
    rows = ([turn, {"role": "assistant", "content": "two " * (1 + row % 20)}] for row in range(CHATS))
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    checkpoint = folder / "run/checkpoints/step-00000001"
    found = config_of(Layout(), MODEL)
    config = replace(found, checkpoint=replace(found.checkpoint, export="hf"))
    if _Child(lambda: _saved(config, checkpoint.parent)).wait() != 0:
        raise Violation("there is no checkpoint to convert")
    stores, written, exports = (folder / name for name in ("stores", "written", "run/export"))
    prepare = [str(folder / "chats.jsonl"), "--chat", "--tokenizer", str(tokenizer), "--out", str(stores / "chats")]
    return [
        Tool(
            "prepare-data --chat --pack",
            lambda: prepare_data.main([*prepare, "--pack", "256", "--workers", "1"]),
            stores,
            stores / "chats.idx",
        ),
        Tool(
            "convert",
            lambda: convert.main(["--from", f"megalite:{checkpoint}", "--to", f"hf:{written / 'model'}"]),
            written,
            written / "model",
        ),
        Tool("export", lambda: export(checkpoint, config, lambda: None) and None, exports, exports / checkpoint.name),
    ]


def _saved(config: Config, folder: Path) -> None:
    with one_rank():
        save(make(config), folder, 1)


def _kill(tool: Tool, kills: int, rng: random.Random) -> tuple[int, int]:
    began = time.monotonic()
    expected = _run(tool)
    seconds, done = time.monotonic() - began, 0
    for _ in range(kills):
        _clear(tool)
        child = _Child(tool.call)
        time.sleep(rng.random() * seconds)
        child.kill()
        if tool.whole.exists():
            done += 1
            if {name: _content(tool)[name] for name in expected} != expected:
                raise Violation(f"{tool.name}: a kill has left a result that is not whole")
            continue
        if tool.whole.suffix == ".idx":
            _refuse_store(tool.whole.with_suffix(""))
        if (again := _run(tool)) != expected:
            raise Violation(
                f"{tool.name}: after a kill it has made {sorted(again)}, not {sorted(expected)} as they were"
            )
    return kills - done, done


def _refuse_store(prefix: Path) -> None:
    try:
        TokenStore(prefix)
    except InputError:
        return
    raise Violation(f"{prefix}: is opened, though it is not whole")


def _run(tool: Tool) -> dict[str, bytes]:
    """Run it to its end. Returns the content of all files in its folder."""
    tool.out.mkdir(exist_ok=True)
    if (code := _Child(tool.call).wait()) != 0:
        raise Violation(f"{tool.name}: exit code {code}")
    return _content(tool)


def _content(tool: Tool) -> dict[str, bytes]:
    return {str(path.relative_to(tool.out)): path.read_bytes() for path in tool.out.rglob("*") if path.is_file()}


def _clear(tool: Tool) -> None:
    shutil.rmtree(tool.out)
    tool.out.mkdir()


class _Child:
    """A process that does a call, with what this one has imported."""

    def __init__(self, call: Call) -> None:
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            code = call() or 0
        finally:
            os._exit(code)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.wait()


if __name__ == "__main__":
    sys.exit(main())
