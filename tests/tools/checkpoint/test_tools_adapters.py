"""`--adapter` of `megalite-generate` and `megalite-evaluate`: several beside one base, one after another."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import in_process
from toy_jobs import MODEL, config_of, one_rank, train_and_save

from megalite.config.layout import Layout
from megalite.config.model_schema import Adapter
from megalite.config.schema import Checkpoint, Config
from megalite.data.store_writer import StoreWriter
from megalite_tools.checkpoint import convert, generate
from megalite_tools.experiment import evaluate

WIDE = replace(MODEL, vocab_size=512, sequence_length=24, init_std=0.5)
ADAPTERS = {"one": Adapter(4, 8.0), "other": Adapter(2, 4.0, targets=["query", "down"], dora=True)}
Call = Callable[..., str]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and beside its folder those of adapters that were trained beside it."""
    folder = tmp_path_factory.mktemp("base")
    found = config_of(Layout(), WIDE)
    config = replace(found, train=replace(found.train, precision="fp32"), optim=replace(found.optim, lr=0.1))
    with one_rank():
        train_and_save(config, folder, 1)
        weights = Checkpoint(weights=f"megalite:{folder / 'step-00000001'}")
        for name, adapter in ADAPTERS.items():
            train_and_save(Config(**vars(config) | {"adapter": adapter, "checkpoint": weights}), folder / name, 2)
    return folder / "step-00000001"


def adapters(base: Path) -> list[str]:
    return [f"megalite:{base.parent / name / 'step-00000002'}" for name in ADAPTERS]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls the `main` of a command, which must end well. Returns what it printed."""

    def called(main: Any, *words: Any) -> str:
        code, text, errors = in_process(main, capsys)(*words)
        assert code == 0, errors
        return text

    return called


def test_texts_of_several_are_those_of_each_merged(
    base: Path, call: Call, tokenizer_file: Path, tmp_path: Path
) -> None:
    words = "--prompt", "The quick", "--tokens", 8, "--tokenizer", tokenizer_file
    given = [word for adapter in adapters(base) for word in ("--adapter", adapter)]
    texts = call(generate.main, f"megalite:{base}", *given, *words)
    expected = []
    for number, adapter in enumerate(adapters(base)):
        call(convert.main, "--from", adapter, "--merge", "--to", f"hf:{tmp_path / str(number)}")
        expected.append(call(generate.main, f"hf:{tmp_path / str(number)}", *words))
    assert texts == "".join(f"── {adapter}\n{text}" for adapter, text in zip(adapters(base), expected, strict=True))
    assert len({*expected, call(generate.main, f"megalite:{base}", *words)}) == 3


def test_losses_of_several_are_those_of_each_alone(base: Path, call: Call, tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store", "<u2") as writer:
        for length in (5, 30, 12):
            writer.add(np.arange(length) * 7 % 512)

    def losses(*words: str) -> Any:
        call(evaluate.main, *words, "--data", tmp_path / "store", "--json", tmp_path / "found.json")
        return json.loads((tmp_path / "found.json").read_text())

    given = [word for adapter in adapters(base) for word in ("--adapter", adapter)]
    together = [each["data"] for each in losses(f"megalite:{base}", *given)["models"]]
    assert together == [losses(adapter)["data"] for adapter in adapters(base)]
    assert together[0] != together[1]
    assert losses(f"megalite:{base}")["data"] not in together
