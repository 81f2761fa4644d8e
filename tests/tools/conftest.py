import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from toy_jobs import advance, config_of, make, one_rank, save

from megalite.config.layout import Layout
from megalite_tools.checkpoint.inspect_checkpoint import main
from megalite_tools.data.train_tokenizer import train_model

Inspect = Callable[..., tuple[int, str, str]]
TEXTS = [
    "The quick brown fox jumps over the lazy dog.\nPack my box with five dozen liquor jugs.\n",
    "def area(width, height):\n    if width < 0:\n        return 0\n    return width * height\n",
    "class Node:\n\tdef __init__(self, value):\n\t\tself.value = value  # tabs\n",
]


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece tokenizer of 320 pieces."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(train_model(TEXTS, vocab_size=320, kind="bpe", lines=1000))
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An empty folder to write to."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


@pytest.fixture
def corpus_texts() -> list[str]:
    return [f"document {i} says " + "hello " * (i % 7) for i in range(300)]


@pytest.fixture
def corpus(tmp_path: Path, corpus_texts: list[str]) -> Path:
    """A file of JSON Lines with these texts."""
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in corpus_texts))
    return path


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 1 and 2, and one of step 3 with values that are not finite."""
    folder = tmp_path_factory.mktemp("trained")
    config = config_of(Layout())
    config.checkpoint.keep = 0
    with one_rank():
        job = make(config)
        for step in (1, 2):
            advance(job, step - 1, step)
            save(job, folder / "checkpoints", step)
        weight = dict(job.named_parameters())["layers.1.mlp.up.weight"]
        with torch.no_grad():
            weight.to_local()[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        with patch("megalite.checkpoint.run.save.refuse_poisoned"):  # as an earlier version has saved it
            save(job, folder / "checkpoints", 3)
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of that run, without step 3."""
    shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000003")
    return tmp_path / "run"


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Inspect:
    """Runs the command, which may make no process group; its exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        with monkeypatch.context() as patch:
            patch.setattr(dist, "init_process_group", None)
            code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call
