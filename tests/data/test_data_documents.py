"""Documents in packed sequences."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megalite.data.documents import document_begins, documents_within

LENGTHS = st.lists(st.integers(1, 4), min_size=1)


@given(LENGTHS, st.booleans())
def test_a_document_begins_after_every_end(lengths: list[int], whole: bool) -> None:
    tokens = np.concatenate([[7] * (length - 1) + [3] for length in lengths])
    expected = np.cumsum(lengths).tolist()
    if whole:
        expected.pop()
    else:  # the last document goes on in the next sample
        tokens = np.append(tokens, 7)
    assert document_begins(tokens, 3).tolist() == expected
    assert not len(document_begins(tokens, None))


@given(LENGTHS, st.integers(1, 6))
def test_the_documents_of_pieces_are_those_of_the_whole(lengths: list[int], piece: int) -> None:
    ends = np.cumsum(lengths)
    for start in range(0, int(ends[-1]) - piece, piece):
        inside = [int(end) - start for end in ends if start < end < start + piece]
        assert documents_within(ends[:-1], start, piece) == (0, *inside, piece)
