"""Answers continue their prompts exactly, whatever the tokenizer does with blanks."""

import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import sentencepiece

from megalite.data.tokenizer import Tokenizer, load_tokenizer
from megalite.inference.generate import Drawn, Request
from megalite.inference.prompts import Prompt, requests
from megalite.inference.write import stream, write_lines

tokenizers = pytest.importorskip("tokenizers")

TEXTS = ["Once upon a time there was a fox.", "the fox jumps over the lazy dog", "two  blanks, a tab\tand a line\n"]
WHOLE = ["Once upon a time", "  two  blanks", "the fox\n jumps", "a €uro"]


def sentence_piece(**options: object) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS * 5),
            model_writer=model,
            vocab_size=300,
            byte_fallback=True,
            hard_vocab_limit=False,
            minloglevel=2,
            **{"model_type": "bpe", "normalization_rule_name": "identity", **options},
        )
        (folder / "tokenizer.model").write_bytes(model.getvalue())
        return folder / "tokenizer.model"

    return made


def hugging_face(pieces: str) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        model = tokenizers.Tokenizer(tokenizers.models.BPE())
        model.pre_tokenizer = getattr(tokenizers.pre_tokenizers, pieces)()
        model.decoder = getattr(tokenizers.decoders, pieces)()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=400, special_tokens=["</s>"], initial_alphabet=[*alphabet, "€", "\n"], show_progress=False
        )
        model.train_from_iterator(TEXTS, trainer)
        model.save(str(folder / "tokenizer.json"))
        return folder / "tokenizer.json"

    return made


KINDS = {
    "dummy prefix": sentence_piece(remove_extra_whitespaces=False),
    "unigram with a dummy prefix": sentence_piece(remove_extra_whitespaces=False, model_type="unigram"),
    "no prefix": sentence_piece(remove_extra_whitespaces=False, add_dummy_prefix=False),
    "blanks removed": sentence_piece(),
    "byte level": hugging_face("ByteLevel"),
    "metaspace": hugging_face("Metaspace"),
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(KINDS[request.param](tmp_path_factory.mktemp("tokenizer")))


def lines(tokenizer: Tokenizer, prompts: Sequence[Prompt], new: Sequence[Sequence[int]], samples: int) -> list[str]:
    """The texts written for two samples of every prompt."""
    asked, _ = requests(prompts, tokenizer, tokenizer.eod, 64, 60, samples)
    drawn = [item for request in asked for item in drawing(request, new[request.index])]
    written: list[str] = []
    write_lines(prompts, samples, tokenizer, drawn, written.append)
    return [json.loads(line)["text"] for line in written]


def drawing(request: Request, new: Sequence[int]) -> list[Drawn]:
    return [Drawn(request, token, "length" if number == len(new) else None) for number, token in enumerate(new, 1)]


@pytest.mark.parametrize("whole", WHOLE)
def test_answers_continue_their_prompts(tokenizer: Tokenizer, whole: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever a text is divided between two tokens, as one text and as several in JSON."""
    ids = tokenizer.encode(whole)
    known = tokenizer.decode(ids)  # without the blanks that the tokenizer drops
    for cut in range(1, len(ids)):
        before, after = tokenizer.decode(ids[:cut]), ids[cut:]
        if tokenizer.encode(before) != ids[:cut] or "\ufffd" in before:
            continue
        prompts = [Prompt("--prompt", before), Prompt("--prompts", None, tuple(ids[:cut]))]
        assert {before + text for text in lines(tokenizer, prompts, [after, after], 2)} == {known}
        (request,), _ = requests(prompts[:1], tokenizer, tokenizer.eod, 64, 60, 1)
        stream(tokenizer, prompts[0], drawing(request, after))
        assert before + capsys.readouterr().out == known + "\n"


def test_all_is_drawn_of_a_text_that_stops(tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    """What follows may wait for it: copies of the model that share out its experts."""
    (request,), _ = requests([Prompt("--prompt", "")], tokenizer, tokenizer.eod, 64, 60, 1)
    joined = []

    def drawn() -> Iterator[Drawn]:
        yield from (Drawn(request, 5, None), Drawn(request, 6, "stop"))
        joined.append(True)

    stream(tokenizer, Prompt("--prompt", ""), drawn())
    assert capsys.readouterr().out == tokenizer.decode([5]) + "\n"
    assert joined


def test_a_document_begins_without_a_blank(tokenizer: Tokenizer) -> None:
    """After nothing, and after the token that ends the document before."""
    end = tokenizer.eod
    assert end is not None
    text = tokenizer.decode(tokenizer.encode("Once upon"))
    for prompt in (Prompt("--prompt", ""), Prompt("--prompts", None, (end,)), Prompt("--prompts", None, (5, end))):
        assert lines(tokenizer, [prompt], [tokenizer.encode("Once upon")], 1) == [text]


def test_a_blank_that_the_tokenizer_drops_from_a_prompt_is_not_written_twice(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(KINDS["blanks removed"](tmp_path))
    new = tokenizer.encode("upon")
    assert lines(tokenizer, [Prompt("--prompt", "Once "), Prompt("--prompt", "Once")], [new, new], 1) == [
        "upon",
        " upon",
    ]


def test_a_character_that_a_prompt_breaks_off_is_whole_in_the_answer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(KINDS["no prefix"](tmp_path))
    ids = tokenizer.encode("a€b")
    assert lines(tokenizer, [Prompt("--prompts", None, tuple(ids[:-2]))], [ids[-2:]], 1) == ["€b"]
