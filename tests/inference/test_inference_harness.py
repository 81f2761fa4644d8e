"""Tasks of lm-evaluation-harness on a model of ours have the results that its own `hf` models have."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import MODELS, copy_weights, oracle_of
from tokenizer_cases import odd_texts, write_tokenizer

from megalite.base.errors import InputError
from megalite.checkpoint.store.host_group import HostGroup
from megalite.checkpoint.weights.formats.tokenizer import tokenizer_files
from megalite.data.tokenizer import load_tokenizer
from megalite.distributed.mesh import Mesh
from megalite.inference.crew import Crew
from megalite.inference.engine import Engine

os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}  # before they are imported

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
pytest.importorskip("lm_eval")
evaluator = pytest.importorskip("lm_eval.evaluator")
huggingface = pytest.importorskip("lm_eval.models.huggingface")
harness = pytest.importorskip("megalite.inference.harness")

LENGTH = 96
TEXTS = ["the fox jumps over the dog", "a dog sleeps under the tree", "foxes and dogs are friends", "trees are green"]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
{more}
"""
TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{text}}:"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "fewshot_choice": """
output_type: multiple_choice
fewshot_split: test
num_fewshot: 2
doc_to_text: "{{text}}:"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}]
""",
    "empty_context": """
output_type: multiple_choice
doc_to_text: ""
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{long}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "writing": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: ["e", "\\n"], max_gen_toks: 16, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks, their data, and a tokenizer."""
    folder = tmp_path_factory.mktemp("tasks")
    documents = [
        {
            "text": text,
            "choices": [" dog", " a fox and a dog", " tree", f" {text[:9]}"],
            "answer": number % 4,
            "long": " ".join(TEXTS * (1 + 4 * number)),
        }
        for number, text in enumerate(TEXTS)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    for name, more in TASKS.items():
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=folder / "data.jsonl", more=more))
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(TEXTS, trainer)
    model.save(str(folder / "tokenizer.json"))
    begin = ("<s>", model.token_to_id("<s>"))
    model.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[begin])
    (folder / "begins").mkdir()
    model.save(str(folder / "begins" / "tokenizer.json"))
    return folder


@pytest.fixture(
    scope="module",
    params=[("llama_grouped_queries", True), ("qwen3_alternating_windows", False)],
    ids=["llama, texts begin with a token", "qwen3"],
)
def both(request: pytest.FixtureRequest, alone: Mesh, folder: Path) -> tuple[Crew, Any]:
    """Ours, and the harness's own model with the same weights."""
    name, begins = request.param
    file = folder / ("begins" if begins else "") / "tokenizer.json"
    tokenizer = load_tokenizer(file)
    family, model = MODELS[name]
    # The vocabulary has no padding: transformers draws from it, too.
    model = replace(model, vocab_size=tokenizer.vocab_size, sequence_length=LENGTH)
    oracle = oracle_of(family, model).float()
    engine = Engine(model, alone, torch.float32)
    copy_weights(engine.decoder, oracle)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(file),
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        **({"bos_token": "<s>"} if begins else {}),
    )
    crew = Crew(engine, HostGroup(), tokenizer, tokenizer.eod, begin=tokenizer.begin)
    assert len(crew.begin) == begins
    return crew, huggingface.HFLM(pretrained=oracle, tokenizer=theirs, batch_size=3, max_length=LENGTH)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the harness found in detail, of every evaluation."""
    found: list[Any] = []
    evaluate = evaluator.simple_evaluate

    def noting(*arguments: Any, **options: Any) -> Any:
        found.append(evaluate(*arguments, **{**options, "log_samples": True, "bootstrap_iters": 0}))
        return found[-1]

    monkeypatch.setattr(harness, "simple_evaluate", noting)
    return found


@pytest.mark.timeout(240)
def test_tasks_have_the_results_of_hf_models(both: tuple[Crew, Any], folder: Path, captured: list[Any]) -> None:
    crew, theirs = both
    found = harness.evaluate(crew, list(TASKS), str(folder), None, None)
    manager = harness.TaskManager(include_path=str(folder), include_defaults=False)
    expected = evaluator.simple_evaluate(theirs, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)
    assert found.keys() == set(TASKS)
    for task, metrics in expected["results"].items():
        for name, value in metrics.items():
            if isinstance(value, float):
                assert found[task][name] == pytest.approx(value, rel=1e-4), (task, name)
    (ours,) = captured
    for task, samples in expected["samples"].items():
        for mine, sample in zip(ours["samples"][task], samples, strict=True):
            assert mine["doc_id"] == sample["doc_id"]
            for one, other in zip(flat(mine["resps"]), flat(sample["resps"]), strict=True):
                assert one == (pytest.approx(other, rel=1e-4, abs=1e-4) if isinstance(other, float) else other)


def flat(found: Any) -> Iterator[Any]:
    if isinstance(found, (list, tuple)):
        for item in found:
            yield from flat(item)
    else:
        yield found


def test_unknown_tasks_and_missing_data_are_told(
    both: tuple[Crew, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = partial(harness.TaskManager, include_defaults=False)  # looking through all takes many seconds
    monkeypatch.setattr(harness, "TaskManager", lambda include_path, **_: own(include_path=include_path))
    with pytest.raises(InputError, match="lm-eval has no no_such_task"):
        harness.evaluate(both[0], ["no_such_task"], str(folder), None, None)
    (tmp_path / "lost.yaml").write_text(TASK.format(name="lost", data=tmp_path / "none.jsonl", more=TASKS["choice"]))
    with pytest.raises(InputError, match=r"--tasks lost: lm-eval: .*none\.jsonl"):
        harness.evaluate(both[0], ["lost"], str(tmp_path), None, None)


def test_what_a_model_cannot_be_asked_is_told(both: tuple[Crew, Any]) -> None:
    asked = harness.Harnessed(both[0])
    with pytest.raises(InputError, match="a continuation has 97 tokens"):
        asked._loglikelihood_tokens([(None, [1], [2] * 97)])
    (score,) = asked._loglikelihood_tokens([(None, [1] * 500, [2] * 96)])
    assert score[0] < 0


def asked(*pairs: tuple[str, str]) -> list[Any]:
    return [SimpleNamespace(args=pair) for pair in pairs]


def test_blank_contexts_are_scored_alike_whatever_else_is_asked(both: tuple[Crew, Any]) -> None:
    """As texts after the token that begins them, where the harness's own model fails."""
    crew, theirs = both
    ours = harness.Harnessed(crew)
    odd = [(" ", "fox"), ("\n", " dog"), ("  ", "a"), ("", " tree"), ("a ", "fox"), ("the", " ")]
    alone = [ours.loglikelihood(asked(pair))[0] for pair in odd]
    among = ours.loglikelihood(asked(("the fox", " jumps"), *odd, ("a dog", " sleeps")))[1:-1]
    for pair, one, other in zip(odd, alone, among, strict=True):
        context, continuation = pair
        after = (context, continuation) if context.strip() or crew.begin else ("", context + continuation)
        (expected,) = theirs.loglikelihood(asked(after), disable_tqdm=True)
        for found in (one, other):
            assert found == (pytest.approx(expected[0], rel=1e-4), expected[1]), pair


def rolling(model: Any, texts: list[str]) -> list[float]:
    return model.loglikelihood_rolling([SimpleNamespace(args=(text,)) for text in texts], disable_tqdm=True)


@pytest.mark.parametrize("kind", ["made, unigram", "bpe", "bpe, prefix", "carried"])
def test_an_export_has_the_rolling_perplexity_of_its_run(kind: str, alone: Mesh, tmp_path: Path) -> None:
    """In the harness's own run on the folder: texts follow the token that ends documents, as they were trained to."""
    file = write_tokenizer(tmp_path / "run", kind)
    tokenizer = load_tokenizer(file)
    model = replace(MODELS["llama"][1], vocab_size=tokenizer.vocab_size, sequence_length=LENGTH)
    oracle = oracle_of("Llama", model).float()
    engine = Engine(model, alone, torch.float32)
    copy_weights(engine.decoder, oracle)
    oracle.save_pretrained(tmp_path / "export")
    texts, copies = tokenizer_files(file, None)
    for name, content in [*texts.items(), *((name, path.read_bytes()) for name, path in copies.items())]:
        (tmp_path / "export" / name).write_bytes(content)
    theirs = huggingface.HFLM(pretrained=str(tmp_path / "export"), batch_size=4, max_length=LENGTH, device="cpu")
    texts = [text for text in odd_texts(300) if tokenizer.encode(text)]
    expected = pytest.approx(rolling(theirs, texts), rel=1e-4)
    assert rolling(harness.Harnessed(Crew(engine, HostGroup(), tokenizer, tokenizer.eod)), texts) == expected
    ours = load_tokenizer(tmp_path / "export" / "tokenizer.json")
    crew = Crew(engine, HostGroup(), ours, ours.eod, begin=ours.begin)
    assert rolling(harness.Harnessed(crew, tmp_path / "export"), texts) == expected


@pytest.mark.parametrize("settings", [{"bos_token": "<s>", "eos_token": "</s>"}, {"eos_token": "<pad>"}])
def test_a_published_folder_has_that_of_hf_models(settings: dict[str, str], alone: Mesh, tmp_path: Path) -> None:
    """A token that the folder names as a text's beginning stands before one, even if its tokenizer adds none."""
    file = write_tokenizer(tmp_path / "published", "carried")
    fields = json.loads(file.read_text())
    file.write_text(json.dumps(fields | {"post_processor": None}))
    (tmp_path / "published" / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(file)
    model = replace(MODELS["llama"][1], vocab_size=tokenizer.vocab_size, sequence_length=LENGTH)
    oracle = oracle_of("Llama", model).float()
    engine = Engine(model, alone, torch.float32)
    copy_weights(engine.decoder, oracle)
    oracle.save_pretrained(file.parent)
    theirs = huggingface.HFLM(pretrained=str(file.parent), batch_size=4, max_length=LENGTH, device="cpu")
    ours = harness.Harnessed(Crew(engine, HostGroup(), tokenizer, 1, begin=tokenizer.begin), file.parent)
    assert ours.prefix_token_id == theirs.prefix_token_id == (0 if "bos_token" in settings else 2)
    assert rolling(ours, TEXTS) == pytest.approx(rolling(theirs, TEXTS), rel=1e-4)


@pytest.mark.parametrize("context", ["", "the fox"])
def test_an_answer_without_text_is_told(both: tuple[Crew, Any], context: str) -> None:
    with pytest.raises(InputError, match=rf"the continuation '' of the context '{context}' has no tokens to score"):
        harness.Harnessed(both[0]).loglikelihood(asked((context, "")))
