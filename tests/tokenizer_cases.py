"""Tokenizers of every kind that a run may have, and odd texts to tell them apart by."""

import io
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from megalite.data.odd_texts import ODD_TEXTS
from megalite.data.sentence_piece import with_short_scores
from megalite_tools.data.train_tokenizer import train_model

tokenizers = pytest.importorskip("tokenizers")

DOCS = Path(__file__).parents[1] / "docs"
LINES = ((DOCS / "checkpoints.md").read_text() + "<p>of a <b>page</b></p>\n" * 200).split("\n")
PARTS = (
    *(" ", "  ", "\t", "\n", "\r\n", "\x00", "\u00a0", "\u2581", "\u200d", "e\u0301", "é", "漢", "😀", "0", "12", "ﬁ"),
    *("</s>", "<s>", "<unk>", "<mask>", "<0x41>", "abc", "the ", "of a ", "checkpoint", "-" * 29, " " * 37),
)


def odd_texts(count: int) -> list[str]:
    """Texts with blanks, runs, special tokens, marks and characters of all kinds; always the same."""
    draw, whole = random.Random(0), "\n".join(LINES)
    texts = list(ODD_TEXTS)
    while len(texts) < count:
        start, length = draw.randrange(len(whole)), draw.randint(1, 20)
        anything = (
            draw.choice((draw.randrange(0x300), draw.randrange(0xD800), draw.randrange(0xE000, 0x110000)))
            for _ in "a" * length
        )
        texts += [
            "".join(draw.choices((*PARTS, *ODD_TEXTS), k=draw.randint(1, 8))),
            draw.choice(" -=a\n\u2581#<") * draw.randint(1, 90) + draw.choice(("", "a", " b")),
            whole[start : start + 5 * length],
            "".join(map(chr, anything)),
        ]
    return texts[:count]


def piece_model(kind: str, **options: object) -> bytes:
    """A SentencePiece model that does not change text before it splits it, unless `options` of the trainer say so."""
    model = io.BytesIO()
    plain = {
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "byte_fallback": True,
        "vocab_size": 600,
        "hard_vocab_limit": False,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, model_type=kind, **(plain | options)
    )
    return model.getvalue()


def byte_level(texts: Sequence[str], size: int, special: Sequence[str]) -> Any:
    """A byte-level BPE that cuts and pads texts, as published ones may."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    model.enable_truncation(4)
    model.enable_padding(length=64)
    return model


def carried() -> bytes:
    """A `tokenizer.json` that also puts tokens around texts."""
    model = byte_level(LINES, 500, ["<s>", "</s>", "<pad>"])
    model.add_tokens(["abc"])
    special = [("<s>", 0), ("</s>", 1)]
    model.post_processor = tokenizers.processors.TemplateProcessing("<s> $A </s>", special_tokens=special)
    return str(model.to_str()).encode()


# Kinds that transformers is to read exactly as we do.
EXACT: dict[str, Callable[[], bytes]] = {
    "made, bpe": lambda: train_model(LINES, 500, "bpe", 10_000),
    "made, unigram": lambda: train_model(LINES, 500, "unigram", 10_000),
    "bpe": lambda: piece_model("bpe", add_dummy_prefix=False, allow_whitespace_only_pieces=True),
    "bpe, prefix": lambda: piece_model("bpe", allow_whitespace_only_pieces=True),
    "bpe, own pieces": lambda: piece_model(
        "bpe", user_defined_symbols=["<mask>", "abc", "\u2581\u2581"], control_symbols=["<sep>"]
    ),
    "unigram, prefix": lambda: with_short_scores(piece_model("unigram")),  # long ones leave ties to rounding
    "characters": lambda: piece_model("char"),
    "carried": carried,
}


def write_tokenizer(folder: Path, kind: str) -> Path:
    """The file of a tokenizer; a carried one has settings beside it that a run does not follow."""
    folder.mkdir()
    file = folder / ("tokenizer.json" if kind == "carried" else "tokenizer.model")
    file.write_bytes(EXACT[kind]())
    if kind == "carried":
        settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "tokenizer_class": "LlamaTokenizer"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"clean_up_tokenization_spaces": True}))
    return file
