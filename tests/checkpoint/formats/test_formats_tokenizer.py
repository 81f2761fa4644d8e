"""Tokenizers of SentencePiece in an export: transformers splits text as they do."""

from pathlib import Path

import pytest

from megalite.checkpoint.formats.tokenizer import tokenizer_files
from megalite.data.tokenizer import load_tokenizer
from megalite_tools.data.train_tokenizer import main

transformers = pytest.importorskip("transformers")
DOCS = Path(__file__).parents[3] / "docs"
TEXTS = [
    "hello world",
    "two  blanks   and\ttabs \n\n  indented",
    " leading",
    "ünï 漢字 😀",
    "",
    (DOCS / "architecture.md").read_text(),
]


@pytest.mark.parametrize("begins", [False, True], ids=["plain", "with bos"])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_transformers_splits_text_alike(kind: str, begins: bool, tmp_path: Path) -> None:
    model = tmp_path / "one" / "tokenizer.model"
    model.parent.mkdir()
    text = (DOCS / "checkpoints.md").read_text() + "<p>of a <b>page</b></p>\n" * 200
    (tmp_path / "text.txt").write_text(text)
    assert main([str(tmp_path / "text.txt"), "--out", str(model), "--vocab-size", "500", "--type", kind]) == 0
    texts, copies = tokenizer_files(model, None)
    folder = tmp_path / "export"
    folder.mkdir()
    for name, content in texts.items():
        (folder / name).write_bytes(
            content.replace(b'"add_bos_token": false', b'"add_bos_token": true') if begins else content
        )
    for name, path in copies.items():
        (folder / name).write_bytes(path.read_bytes())
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(model)
    again = load_tokenizer(
        next(folder / name for name in ("tokenizer.json", "tokenizer.model") if (folder / name).exists())
    )
    if kind == "bpe":
        assert again.begin == ((theirs.bos_token_id,) if begins else ())
    for text in TEXTS:
        ids = ours.encode(text)
        assert again.encode(text) == ids
        assert theirs(text).input_ids == [*again.begin, *ids]
        assert theirs.decode(ids) == again.decode(ids) == text
    forged = "</s> <s> <0x0A>"  # which transformers takes for the tokens themselves
    assert again.encode(forged) == ours.encode(forged)
    assert theirs.eos_token_id == again.eod == ours.eod
