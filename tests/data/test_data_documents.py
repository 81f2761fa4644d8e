"""Documents in packed sequences."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_data_tokenizer import sentence_piece_model

from megalite.config.errors import InputError
from megalite.config.schema import Data
from megalite.data.documents import boundaries, end_of_document


@given(st.lists(st.integers(1, 4), min_size=1), st.booleans())
def test_a_document_begins_after_every_end(lengths: list[int], whole: bool) -> None:
    tokens = np.concatenate([[7] * (length - 1) + [3] for length in lengths])
    expected = [0, *np.cumsum(lengths).tolist()]
    if not whole:  # the last document goes on in the next sample
        tokens = np.append(tokens, 7)
        expected.append(len(tokens))
    assert boundaries(tokens, 3) == tuple(expected)


def test_the_end_is_as_configured_or_as_the_tokenizer_says(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(sentence_piece_model(eos_id=2))
    assert end_of_document(Data(tokenizer=str(path)), 300) == 2
    assert end_of_document(Data(tokenizer=str(path), end_of_document=5), 300) == 5


def test_no_end_is_told_in_one_message(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(sentence_piece_model(eos_id=-1))
    with pytest.raises(InputError, match=r"knows no end-of-document token; set data\.end_of_document"):
        end_of_document(Data(tokenizer=str(path)), 300)
    path.write_bytes(sentence_piece_model(eos_id=2))
    with pytest.raises(InputError, match=r"token 2 is outside model\.vocab_size = 2"):
        end_of_document(Data(tokenizer=str(path)), 2)
    with pytest.raises(InputError, match=r"data\.end_of_document: is missing"):
        end_of_document(Data(), 300)
