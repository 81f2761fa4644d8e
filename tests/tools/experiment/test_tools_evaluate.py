"""`megalite-evaluate`: tasks and perplexity of a run."""

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import in_process
from toy_jobs import make, one_rank, save
from warm_start import run as start

from megalite.config.model_schema import Experts, Model
from megalite.config.parallel_schema import Parallel
from megalite.config.schema import Batch, Config, Data, Train
from megalite.data.store_writer import StoreWriter
from megalite.data.tokenizer import load_tokenizer
from megalite.train.folder.lock import Lock
from megalite.train.folder.records import read_records
from megalite.train.folder.starts import keep_tokenizer
from megalite_tools.experiment.evaluate import MODULE, main

MODEL = Model(
    layers=2,
    width=16,
    heads=2,
    kv_heads=2,
    ffn=24,
    vocab_size=512,
    sequence_length=24,
    init_std=0.5,
    experts=Experts(4, width=16),
)
Evaluate = Callable[..., tuple[int, str, str]]
TEXTS = ["The quick brown fox", "jumps over the lazy dog. " * 5, "Pack my box", "def area(width, height):"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tokenizer_file: Path) -> Path:
    """A run with a checkpoint of step 3 and metrics, and a token store."""
    folder = tmp_path_factory.mktemp("run")
    data = Data(tokenizer=str(tokenizer_file))
    parallel, train = Parallel(pp=1, dp_shard=1), Train(precision="fp32")
    with one_rank():
        save(make(Config(model=MODEL, parallel=parallel, batch=Batch(1, 1), train=train, data=data)), folder, 3)
    (folder / "checkpoints").mkdir()
    (folder / "step-00000003").rename(folder / "checkpoints/step-00000003")
    keep_tokenizer(tokenizer_file, folder, folder / "starts/001.tokenizer")
    tokenizer = load_tokenizer(tokenizer_file)
    with StoreWriter(folder / "store", "<u2", end_of_document=tokenizer.eod) as writer:
        for text in TEXTS:
            writer.add(np.array([*tokenizer.encode(text), tokenizer.eod]))
    return folder


@pytest.fixture
def run(made: Path) -> Path:
    """That run, whose metrics end in half a line."""
    (made / "metrics.jsonl").write_text('{"step": 3, "time": 1.0, "loss": 5.0}\n{"step": 4, "lo')
    return made


@pytest.fixture
def evaluate(capsys: pytest.CaptureFixture[str]) -> Evaluate:
    """Runs the command; its exit code and what it printed to stdout and stderr."""

    return in_process(main, capsys)


def test_perplexity_is_shown_written_and_recorded(evaluate: Evaluate, run: Path, tmp_path: Path) -> None:
    code, text, errors = evaluate(run, "--data", run / "store", "--json", tmp_path / "found.json")
    assert (code, errors) == (0, "")
    assert "perplexity" in text
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["step"], found["tasks"]) == (3, {})
    store = found["data"][str(run / "store")]
    assert store["documents"] == 4
    assert 4 < store["loss"] < 12
    assert store["perplexity"] == pytest.approx(math.exp(store["loss"]))
    first, record = read_records(run / "metrics.jsonl")
    assert first["loss"] == 5.0
    assert (record["step"], record[f"eval_loss/{run / 'store'}"]) == (3, store["loss"])
    assert record[f"eval_bits_per_byte/{run / 'store'}"] == store["bits_per_byte"]


def test_a_run_that_goes_on_keeps_its_metrics_for_itself(evaluate: Evaluate, run: Path) -> None:
    lock = Lock.take(run)
    before = (run / "metrics.jsonl").read_bytes()
    try:
        code, text, errors = evaluate(run, "--data", run / "store", "--limit", 2)
    finally:
        lock.free()
    assert code == 0
    assert "perplexity" in text
    assert "warning: the run's metrics stay as they are: " in errors
    assert "another job trains in this folder" in errors
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.timeout(180)
def test_ranks_share_the_work(evaluate: Evaluate, run: Path, tmp_path: Path) -> None:
    """Tasks too, on two replicas of two ranks each, which share out the experts."""
    pytest.importorskip("lm_eval")
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "toy.yaml").write_text(f"""
task: toy
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "data.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: [" fox", " dog", "return"]
doc_to_target: 1
metric_list: [{{metric: acc}}]
""")
    options = [run, "--data", run / "store", "--tasks", "toy", "--task-folder", tmp_path, "--device", "cpu"]
    ranks = ["--tp", "2", "--dp", "2", "--ep", "4", "--json", tmp_path / "shared.json"]
    offline = {**os.environ, "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    done = start(["-m", MODULE, *map(str, [*options, *ranks])], 150, env=offline)
    assert done.returncode == 0, done.stderr
    shared = json.loads((tmp_path / "shared.json").read_text())
    assert 0 <= shared["tasks"]["toy"]["acc,none"] <= 1
    assert "eval/toy/acc" in read_records(run / "metrics.jsonl")[-1]
    assert evaluate(run, "--data", run / "store", "--json", tmp_path / "alone.json")[0] == 0
    (alone,) = json.loads((tmp_path / "alone.json").read_text())["data"].values()
    (together,) = shared["data"].values()
    assert together == {name: value if isinstance(value, list) else near(value) for name, value in alone.items()}


def near(value: Any) -> Any:
    return {name: near(number) for name, number in value.items()} if isinstance(value, dict) else pytest.approx(value)


def test_without_the_harness_the_command_says_what_to_install(
    evaluate: Evaluate, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "megalite.inference.harness", None)
    code, _, errors = evaluate(run, "--tasks", "any")
    assert code == 2
    assert "--tasks needs lm-eval: pip install 'megalite[eval]'" in errors
    assert evaluate(run, "--data", run / "store")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --tasks, --data or --logprobs, or several of them"),
        (["--data", "a", "a"], "--data: names a token store twice"),
        (["--data", "nowhere"], "nowhere.idx: no such file"),
        (["--data", "a", "--limit", "0"], "--limit 0: must be at least 1"),
        (["--data", "a", "--fewshot", "-1"], "--fewshot -1: must be at least 0"),
        (["--data", "a", "--dp", "0"], "--tp, --pp, --ep and --dp must be at least 1"),
        (["--data", "a", "--dp", "3", "--ep", "2"], "--dp 3: must be a multiple of 2, the copies that share out"),
        (["--data", "a", "--json", "."], "is a folder"),
        (["--tasks", "a", "--task-folder", "nowhere"], "--task-folder nowhere: no such folder"),
    ],
)
def test_bad_input_exits_with_2(evaluate: Evaluate, run: Path, arguments: list[str], message: str) -> None:
    code, text, errors = evaluate(run, *arguments)
    assert (code, text) == (2, "")
    assert errors.startswith("megalite-evaluate: error: ")
    assert message in errors
