import sentencepiece
from tokenizer_cases import LINES, piece_model

from megalite.data.sentence_piece import (
    BYTE_PIECE,
    CONTROL_PIECE,
    STEPS,
    UNKNOWN_PIECE,
    USER_DEFINED_PIECE,
    read_model,
    with_short_scores,
)
from megalite_tools.data.train_tokenizer import train_model


def opened(content: bytes) -> sentencepiece.SentencePieceProcessor:
    model = sentencepiece.SentencePieceProcessor()
    model.load_from_serialized_proto(content)
    return model


def test_a_model_is_read_as_sentencepiece_reads_it() -> None:
    content = piece_model("unigram", user_defined_symbols=["abc"], normalization_rule_name="nmt_nfkc")
    ours, theirs = read_model(content), opened(content)
    assert len(ours.pieces) == theirs.vocab_size()
    for token, (name, score, kind) in enumerate(ours.pieces):
        assert (name, score) == (theirs.id_to_piece(token), theirs.get_score(token))
        told = theirs.is_unknown(token), theirs.is_control(token), theirs.is_byte(token), name == "abc"
        assert told == (kind == UNKNOWN_PIECE, kind == CONTROL_PIECE, kind == BYTE_PIECE, kind == USER_DEFINED_PIECE)
    assert (ours.kind, ours.to_bytes, ours.prefix, ours.one_blank) == (1, True, True, False)
    assert len(ours.charsmap) > 100_000
    other = read_model(
        piece_model("bpe", byte_fallback=False, add_dummy_prefix=False, remove_extra_whitespaces=True, unk_surface="?")
    )
    assert (other.kind, other.to_bytes, other.prefix, other.one_blank) == (2, False, False, True)
    assert (other.unknown, other.charsmap) == ("?", b"")


def test_only_scores_are_shortened() -> None:
    content = piece_model("unigram")
    shortened = with_short_scores(content)
    before, after = read_model(content), read_model(shortened)
    assert any(score * STEPS % 1 for _, score, _ in before.pieces)
    for (name, score, kind), (same, short, kept) in zip(before.pieces, after.pieces, strict=True):
        assert (name, kind, round(score * STEPS) / STEPS) == (same, kept, short)
    assert opened(shortened).encode("of a page") == opened(content).encode("of a page")
    assert with_short_scores(shortened) == shortened


def test_a_unigram_model_made_here_has_short_scores() -> None:
    made = read_model(train_model(LINES, 400, "unigram", 10_000))
    assert all(score * STEPS % 1 == 0 for _, score, _ in made.pieces)
