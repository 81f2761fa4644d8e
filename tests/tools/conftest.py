import json
from pathlib import Path

import pytest

from megalite_tools.train_tokenizer import train_model

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
