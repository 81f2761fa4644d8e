"""Programs that compute with a model's experts give what one process gives, whatever ranks share them out."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import in_process
from tampering import tamper
from toy_jobs import make, one_rank, save
from warm_start import run as start

from megalite.config.convert import to_plain
from megalite.config.model_schema import Experts, Model
from megalite.config.parallel_schema import Parallel
from megalite.config.schema import Batch, Config, Data, Train
from megalite.data.store_writer import StoreWriter
from megalite.data.tokenizer import load_tokenizer
from megalite.train.folder.starts import keep_tokenizer
from megalite_tools.checkpoint import generate
from megalite_tools.experiment import evaluate

# Strong weights, so that what follows depends on what came before; experts in layers 1 and 3.
EXPERTS = Experts(6, 2, 20, first_dense=1, every=2, balance_loss=0.1)
MODEL = Model(4, 16, 4, 2, None, 24, 512, 24, init_std=0.7, experts=EXPERTS)
TEXTS = ["The quick brown fox", "jumps over the lazy dog. " * 5, "Pack my box", "def area(width, height):"]
LAYOUTS = [["--tp", "2"], ["--pp", "2", "--tp", "2"]]
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tokenizer_file: Path) -> Path:
    """A run whose eight ranks shared out experts, and a token store."""
    folder = tmp_path_factory.mktemp("run")
    config = Config(
        model=MODEL,
        parallel=Parallel(dp_shard=1),
        batch=Batch(1, 1),
        train=Train(precision="fp32"),
        data=Data(tokenizer=str(tokenizer_file)),
    )
    with one_rank():
        path = save(make(config), folder / "checkpoints", 3)
    trained = replace(config, parallel=Parallel(pp=2, dp_shard=2, tp=2, ep=2), train=Train(precision="bf16"))
    tamper(path, lambda fields: fields.update(config=to_plain(trained)))
    keep_tokenizer(tokenizer_file, folder, folder / "starts/001.tokenizer")
    tokenizer = load_tokenizer(tokenizer_file)
    with StoreWriter(folder / "store", "<u2", end_of_document=tokenizer.eod) as writer:
        for text in TEXTS:
            writer.add(np.array([*tokenizer.encode(text), tokenizer.eod]))
    (folder / "prompts.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    return folder


@pytest.mark.timeout(240)
def test_texts_are_those_of_one_process(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [run, "--prompts", run / "prompts.txt", "--tokens", 8, "--samples", 2, "--batch", 3, "--dtype", "fp64"]
    code, expected, errors = in_process(generate.main, capsys)(*options)
    assert code == 0, errors
    assert len({line["text"] for line in map(json.loads, expected.splitlines())}) == 8
    for layout in LAYOUTS:
        done = start(["-m", generate.MODULE, *map(str, options), "--device", "cpu", *layout], 100)
        assert (done.returncode, done.stdout) == (0, expected), (layout, done.stderr)


@pytest.mark.timeout(240)
def test_losses_are_those_of_one_process(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [run, "--data", run / "store", "--dtype", "fp64", "--json", tmp_path / "found.json"]

    def found() -> Any:
        (store,) = json.loads((tmp_path / "found.json").read_text())["data"].values()
        return store

    assert in_process(evaluate.main, capsys)(*options)[0] == 0
    alone = found()
    for layout in (*LAYOUTS, ["--dp", "2", "--tp", "2"]):
        done = start(["-m", evaluate.MODULE, *map(str, options), "--device", "cpu", *layout], 100)
        assert done.returncode == 0, (layout, done.stderr)
        assert found()["loss"] == pytest.approx(alone["loss"], rel=1e-13)
        assert found()["document_loss"] == pytest.approx(alone["document_loss"], rel=1e-13)
