"""Prompts from files of unknown content."""

import json
from pathlib import Path

import pytest
from inference_cases import Letters

from megalite.base.errors import InputError
from megalite.inference.prompts import MAX_PROMPT_BYTES, Prompt, read_prompts, requests

LETTERS = Letters(Path("letters"))
LETTERS.vocab_size = 128


def written(folder: Path, content: bytes, name: str = "prompts.jsonl") -> str:
    path = folder / name
    path.write_bytes(content)
    return str(path)


def test_json_lines_are_texts_or_tokens(tmp_path: Path) -> None:
    lines = b'{"prompt": "a\\nb", "id": 7}\n\n  \n{"tokens": [1, 2]}\r\n{"prompt": ""}'
    found = read_prompts(written(tmp_path, lines))
    assert [(prompt.text, prompt.tokens) for prompt in found] == [("a\nb", ()), (None, (1, 2)), ("", ())]
    assert found[1].where.endswith("line 4")


def test_lines_of_text_are_prompts(tmp_path: Path) -> None:
    found = read_prompts(written(tmp_path, ' one\r\n\n{"prompt": 2}\nthrée'.encode(), "prompts.txt"))
    assert [prompt.text for prompt in found] == [" one", '{"prompt": 2}', "thrée"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no prompt"),
        (b"\n \n", "has no prompt"),
        (b'{"prompt": "a"}\n{"prompt": 1}', 'line 2: is not {"prompt"'),
        (b"text", "but no JSON; name a file of lines of text .txt"),
        (b'{"prompt": "a\xff"}', "but no JSON"),
        (b"[1]", "line 1: is not"),
        (b"{}", "line 1: is not"),
        (b'{"prompt": "a", "tokens": [1]}', "line 1: is not"),
        (b'{"prompt": "\\ud800"}', "the prompt is no text"),
        (b'{"tokens": []}', "tokens must be whole numbers of at least 0, at least one"),
        (b'{"tokens": [true]}', "tokens must be whole numbers"),
        (b'{"tokens": [-1]}', "tokens must be whole numbers"),
        (b'{"tokens": [1.0]}', "tokens must be whole numbers"),
        (b'{"tokens": "ab"}', "tokens must be whole numbers"),
        (b"[" * 100_000, "but no JSON"),
        (b'{"tokens": [' + b"1," * (1 << 20) + b"1]}", "but no JSON"),
        (b'{"prompt": "' + b"a" * MAX_PROMPT_BYTES + b'"}', "line 1: is longer than"),
    ],
    ids=range(17),
)
def test_what_is_no_prompt_is_refused_with_its_line(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as told:
        read_prompts(written(tmp_path, content))
    assert message in str(told.value)
    assert len(str(told.value)) < 500


def test_text_that_is_no_utf8_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"line 2: is no UTF-8 at byte 1"):
        read_prompts(written(tmp_path, b"one\nt\xffo\n", "prompts.txt"))


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_a_file_that_cannot_be_read_is_told(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(str(tmp_path / name))


@pytest.mark.parametrize(
    ("text", "count", "seen", "most", "told"),
    [
        ("abc", 4, "abc", 4, ""),
        ("", 4, "\0", 4, ""),
        ("abcdef", 4, "abcdef", 3, "the text ends before --tokens 4"),
        ("abcdefgh", 4, "abcdefgh", 1, "the text ends before --tokens 4"),
        ("abcdefghijk", 4, "ghijk", 4, "the model sees the last 5 tokens only"),
        ("abcdefghijk", 100, "hijk", 5, "the model sees the last 4 tokens only"),
        ("abcdefghijk", 1, "defghijk", 1, "the model sees the last 8 tokens only"),
    ],
)
def test_what_a_model_of_eight_tokens_sees(text: str, count: int, seen: str, most: int, told: str) -> None:
    (request,), warnings = requests([Prompt("--prompt", text)], LETTERS, 0, 8, count, 1)
    assert ("".join(map(chr, request.tokens)), request.most) == (seen, most)
    assert told in "; ".join(warnings)
    assert bool(told) == bool(warnings)


def test_warnings_count_prompts() -> None:
    prompts = [Prompt("", "a" * length) for length in (2, 7, 8, 9, 10)]
    asked, warnings = requests(prompts, LETTERS, 0, 8, 5, 2)
    assert [(request.index, request.sample) for request in asked] == [(i, n) for i in range(5) for n in range(2)]
    assert warnings == [
        "of 2 prompts, the model sees the last 4 tokens only",
        "2 texts end before --tokens 5, where the model's sequence of 8 tokens does",
    ]


def test_prompts_that_a_model_cannot_be_given_are_refused() -> None:
    with pytest.raises(InputError, match="here: token 128 is outside the tokenizer's 128"):
        requests([Prompt("here", None, (1, 128))], LETTERS, 0, 8, 1, 1)
    with pytest.raises(InputError, match="here: is empty, and letters has no end-of-document token"):
        requests([Prompt("here", "")], LETTERS, None, 8, 1, 1)


def test_a_json_line_that_was_written_is_read(tmp_path: Path) -> None:
    text = "é\u2028\x85 \x00"
    assert read_prompts(written(tmp_path, json.dumps({"prompt": text}).encode()))[0].text == text
