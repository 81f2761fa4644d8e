"""How tokens are drawn."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.inference.draw import NO_TOKEN, Draw, nucleus

CHANCES = [0.1, 0.4, 0.2, 0.3]
DRAWS = 4000


@pytest.mark.parametrize(
    ("vocabulary", "temperature", "top_k", "top_p", "expected"),
    [
        (4, 1.0, 0, 1.0, [0.1, 0.4, 0.2, 0.3]),
        (4, 1.0, 9, 1.0, [0.1, 0.4, 0.2, 0.3]),
        (4, 1.0, 2, 1.0, [0, 4 / 7, 0, 3 / 7]),
        (3, 1.0, 0, 1.0, [1 / 7, 4 / 7, 2 / 7, 0]),
        (4, 0.5, 0, 1.0, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        (4, 0.0, 0, 1.0, [0, 1, 0, 0]),
        (4, 1e-320, 0, 1.0, [0, 1, 0, 0]),
        (4, 1.0, 0, 0.65, [0, 4 / 7, 0, 3 / 7]),
        (4, 1.0, 0, 0.75, [0, 4 / 9, 2 / 9, 3 / 9]),
        (4, 1.0, 2, 0.5, [0, 1, 0, 0]),
        (4, 1.0, 0, 1e-9, [0, 1, 0, 0]),
    ],
)
def test_tokens_are_drawn_as_often_as_they_are_likely(
    vocabulary: int, temperature: float, top_k: int, top_p: float, expected: list[float]
) -> None:
    draw = Draw(temperature, top_k, top_p)
    logits = torch.tensor(CHANCES).log()[:vocabulary].expand(DRAWS, -1)
    drawn = draw(logits, [(0, 0, step) for step in range(DRAWS)])
    assert [(drawn == token).sum().item() / DRAWS for token in range(4)] == pytest.approx(expected, abs=0.03)


def test_rows_are_drawn_alike_wherever_they_stand() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    keys = [(row, 0, 5) for row in range(6)]
    for draw in (Draw(1.0), Draw(0.8, 10), Draw(1.2, 0, 0.7), Draw(0)):
        together = draw(logits, keys).tolist()
        order = [4, 2, 0, 5, 1, 3]
        assert draw(logits[order], [keys[row] for row in order]).tolist() == [together[row] for row in order]
    others = [Draw(1.0, seed=seed)(logits, keys).tolist() for seed in range(4)]
    assert len(set(map(tuple, others))) == 4


def test_likelihoods_of_zero_are_never_drawn() -> None:
    """Not even where the random number is the largest there is, or all others are tiny."""
    logits = torch.tensor([[0.0, -3e38, -200.0, -3e38]]).expand(500, -1)
    assert Draw(1.0)(logits, [(row,) for row in range(500)]).unique().tolist() == [0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("draw", [Draw(0), Draw(1.0), Draw(1.0, 2, 0.5)])
def test_rows_that_are_not_finite_are_told(bad: float, draw: Draw) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    drawn = draw(logits, [(0,), (1,), (2,)]).tolist()
    assert drawn[1] == NO_TOKEN
    assert min(drawn[0], drawn[2]) >= 0


@given(
    st.lists(st.lists(st.floats(-40, 40), min_size=7, max_size=7), min_size=1, max_size=3),
    st.floats(0, 1, exclude_min=True),
)
def test_a_nucleus_is_the_fewest_of_the_likeliest_that_reach_its_share(logits: list[list[float]], share: float) -> None:
    rows = torch.tensor(logits, dtype=torch.float64).sort(descending=True).values.softmax(-1)
    for chances, found in zip(rows, nucleus(rows, share), strict=True):
        kept = int((found > 0).sum())
        assert kept >= 1
        assert torch.equal(found[:kept], chances[:kept]), "they stay as they are"
        assert not found[kept:].any()
        assert chances[:kept].sum() >= share - 1e-12
        assert kept == 1 or chances[: kept - 1].sum() < share + 1e-12
