"""`megalite-evaluate --logprobs` beside transformers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import in_process
from oracle import MODELS, oracle_of
from tokenizer_cases import write_tokenizer
from warm_start import run as start

from megalite.data.tokenizer import load_tokenizer
from megalite_tools.experiment.evaluate import MODULE, main

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
TEXTS = [("The quick ", "brown fox"), ("", "jumps over the lazy dog"), ("def area(width", ", height):")]


@pytest.mark.timeout(180)
def test_they_are_those_of_transformers_in_one_process_and_in_four(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within 1e-5 in fp32, for texts, of which the folder's tokenizer begins each with a token, and for tokens."""
    folder = write_tokenizer(tmp_path / "published", "carried").parent
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    begins = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    begins.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    begins.save(str(folder / "tokenizer.json"))
    size = load_tokenizer(folder / "tokenizer.json").vocab_size
    oracle = oracle_of("Llama", replace(MODELS["llama"][1], vocab_size=size, sequence_length=64)).float()
    oracle.save_pretrained(folder)
    given: list[dict[str, Any]] = [{"prompt": prompt, "completion": text} for prompt, text in TEXTS]
    given += [{"prompt": [1, 2, 3], "completion": [4, 5]}, {"completion": list(range(20))}]
    (tmp_path / "given.jsonl").write_text("".join(json.dumps(line) + "\n" for line in given))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def encoded(text: str) -> list[int]:
        tokens: list[int] = tokenizer(text)["input_ids"]
        return tokens

    def expected(line: dict[str, Any]) -> tuple[list[int], list[float | None]]:
        prompt, completion = line.get("prompt", ""), line["completion"]
        if isinstance(completion, str):
            whole, count = encoded(prompt + completion), len(encoded(prompt))
        else:
            whole, count = [*prompt, *completion], len(prompt)
        with torch.inference_mode():
            chances = oracle(torch.tensor([whole])).logits[0].log_softmax(-1)
        values = [None, *(chances[at - 1, whole[at]].item() for at in range(1, len(whole)))]
        return whole[count:], values[count:]

    def check(path: Path) -> None:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for found, line in zip(lines, given, strict=True):
            tokens, values = expected(line)
            assert found["tokens"] == tokens
            assert found["logprobs"] == pytest.approx(values, abs=1e-5)
            assert found["sum"] == pytest.approx(sum(value for value in values if value is not None), abs=1e-4)

    command = [f"hf:{folder}", "--device", "cpu", "--logprobs", tmp_path / "given.jsonl"]
    code, text, errors = in_process(main, capsys)(*command, tmp_path / "alone.jsonl", "--json", tmp_path / "all.json")
    assert (code, "megalite" in errors) == (0, False), errors
    assert "log-probabilities of completions" in text
    assert json.loads((tmp_path / "all.json").read_text())["model"] == str(folder)
    check(tmp_path / "alone.jsonl")
    done = start(["-m", MODULE, *map(str, [*command, tmp_path / "shared.jsonl", "--pp", 2, "--dp", 2])], 150)
    assert done.returncode == 0, done.stderr
    check(tmp_path / "shared.jsonl")


def test_what_cannot_be_written_is_told_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, errors = in_process(main, capsys)("hf:missing", "--logprobs", tmp_path / "missing.jsonl", tmp_path)
    assert code == 2
    assert f"{tmp_path}: is a folder; name a file in it" in errors
