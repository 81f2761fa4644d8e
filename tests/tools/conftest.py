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
