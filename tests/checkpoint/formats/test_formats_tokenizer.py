"""A run's tokenizer in an export: transformers encodes and decodes as the run did."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizer_cases import DOCS, EXACT, odd_texts, piece_model, write_tokenizer

from megalite.base.errors import InputError
from megalite.checkpoint.weights.formats import tokenizer as exported
from megalite.checkpoint.weights.formats.sentence_piece import tokenizer_json
from megalite.checkpoint.weights.formats.tokenizer import doubts, tokenizer_files
from megalite.data.tokenizer import load_tokenizer

transformers = pytest.importorskip("transformers")


def write_export(folder: Path, file: Path, model_type: str = "llama") -> None:
    texts, copies = tokenizer_files(file, None)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    for name, content in [*texts.items(), *((name, path.read_bytes()) for name, path in copies.items())]:
        (folder / name).write_bytes(content)


def from_run(file: Path) -> Any:
    """Weights of a run with this tokenizer."""
    return SimpleNamespace(tokenizer=file, companions=())


@pytest.mark.parametrize("kind", EXACT)
def test_transformers_takes_odd_texts_as_we_do(kind: str, tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "run", kind)
    write_export(tmp_path / "export", file)
    ours, again = load_tokenizer(file), load_tokenizer(tmp_path / "export" / "tokenizer.json")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    for text in [*odd_texts(1000), (DOCS / "architecture.md").read_text()]:
        ids = ours.encode(text)
        assert theirs(text).input_ids == again.encode(text) == ids, ascii(text)
        assert theirs.decode(ids) == again.decode(ids) == ours.decode(ids), ascii(text)
    assert theirs.eos_token_id == again.eod == ours.eod
    assert (theirs.bos_token, again.begin) == (None, ())
    assert doubts(from_run(file)) == ()


@pytest.mark.parametrize("model_type", ["mistral", "qwen3", "smollm3", "olmo2", "phi3"])
def test_it_does_so_for_models_of_all_families(model_type: str, tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "run", "made, bpe")
    write_export(tmp_path / "export", file, model_type)
    ours, theirs = load_tokenizer(file), transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    assert [theirs(text).input_ids for text in odd_texts(200)] == [ours.encode(text) for text in odd_texts(200)]
    assert doubts(from_run(file), model_type) == ()


def test_transformers_takes_a_qwen2_for_what_it_is_not_which_is_told(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "run", "made, bpe")
    write_export(tmp_path / "export", file, "qwen2")
    ours = load_tokenizer(file)
    by_type = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    as_told = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "export")
    assert by_type(" a").input_ids != as_told(" a").input_ids == ours.encode(" a")
    (doubt,) = doubts(from_run(file), "qwen2")
    assert "open the export's with PreTrainedTokenizerFast.from_pretrained" in doubt
    assert exported.QWEN2_WORDS == transformers.models.qwen2.tokenization_qwen2.PRETOKENIZE_REGEX


ODD = {"normalized": ("bpe", "nmt_nfkc"), "words": ("word", "identity")}


@pytest.mark.parametrize("case", ODD)
def test_what_no_file_can_say_is_told_with_a_text(case: str, tmp_path: Path) -> None:
    kind, rule = ODD[case]
    file = tmp_path / "tokenizer.model"
    file.write_bytes(piece_model(kind, normalization_rule_name=rule, remove_extra_whitespaces=case == "normalized"))
    (doubt,) = doubts(from_run(file))
    assert "splits, for example, '" in doubt
    if case == "normalized":  # all but some marks on letters
        write_export(tmp_path / "export", file)
        ours, theirs = load_tokenizer(file), transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
        for text in ("  two  blanks ", "a\r\n\tb", "ﬁ ½ ① Ａ ㎏ ™", "e\u0301", "", " ", "\u00a0a"):
            assert theirs(text).input_ids == ours.encode(text)
            assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text))


@pytest.mark.parametrize("more", [b"\xa3\x06\xa4\x06", b"\x08\x05", b"\x10\x01", b"\x0a\x04\x0a\x02\xff\xfe"])
def test_a_model_with_fields_that_only_its_own_package_passes_over_is_refused(more: bytes, tmp_path: Path) -> None:
    """A group, numbers in the place of messages, and a piece that is no text."""
    file = write_tokenizer(tmp_path / "run", "bpe")
    with pytest.raises(InputError, match="has fields that no SentencePiece model has"):
        tokenizer_json(file, file.read_bytes() + more)
