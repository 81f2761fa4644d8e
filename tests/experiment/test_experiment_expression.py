"""Expressions: what they mean, and that nothing else is run."""

import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.experiment.expression import MAX_LENGTH, Expression, ExpressionError, pow2

NAMES = {"D": 1e9, "N": 10, "batch.global": 64, "optim.lr": 0.01, "optim.name": "adamw", "tied": True}


def value(text: str) -> Any:
    return Expression.parse(text).value(NAMES.__getitem__)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 + 2 * 3 - 4 / 8", 6.5),
        ("2**10", 1024),
        ("2**-1", 0.5),
        ("-N + +N", 0),
        ("batch.global == 64 and optim.lr > 8e-3", True),
        ("not batch.global == 64 or 1 < 2 < 2", False),
        ("optim.name == 'adamw' and tied", True),
        ("optim.name != 'batch.global'", True),  # a text stays one
        ("min(3, N, 7) + max(1, 2)", 5),
        ("round(2.6) + round(sqrt(16)) + log2(8) + log(exp(1))", 11),
        ("pow2(0.58 * D**0.571 / 2048)", 32),
        ("9**300 > 1e286", True),  # a number beyond MOST_BITS is a float
    ],
)
def test_what_an_expression_means(text: str, expected: object) -> None:
    assert value(text) == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("__import__('os').system('true')", "kind Call"),
        ("open('x')", "kind Call"),
        ("().__class__", "kind Attribute"),
        ("(1).real", "kind Attribute"),
        ("[1] * 9**9", "kind List"),
        ("lambda: 1", "kind Lambda"),
        ("1 if tied else 2", "kind IfExp"),
        ("[x for x in (1, 2)]", "kind ListComp"),
        ("f'{N}'", "kind JoinedStr"),
        ("N if N else N", "kind IfExp"),
        ("(N := 3)", "kind NamedExpr"),
        ("1 // 2", "kind FloorDiv"),
        ("1 << 10**9", "kind LShift"),
        ("b'1'", "kind Constant"),
        ("1j", "kind Constant"),
        ("...", "kind Constant"),
        ("min(*N)", "gives min 1 values"),
        ("min(1, key=N)", "kind Call"),
        ("log(1, 2)", "gives log 2 values"),
        ("max", "without its value"),
        ("'a' * 10", "counts with 'a'"),
        ("tied + 1", "counts with True"),
        ("9**9**9", "too large"),
        ("1e308 * 10", "not a finite number"),
        ("1 / (N - 10)", "divides by zero"),
        ("(-8) ** 0.5", "cannot be computed"),
        ("log(0)", "cannot be computed"),
        ("M + 1", "has the name M, which is not known"),
        ("N.real", "has the name N.real, which is not known"),
        ("not N", "for true or false"),
        ("N <", "is no expression"),
        ("import os", "is no expression"),
        ("1\0", "is no expression"),
        ("", "is no expression"),
        ("(" * 240 + "1" + ")" * 240, "is no expression"),
        ("1+" * 200 + "1", "parts; at most"),
        ("1" * (MAX_LENGTH + 1), "characters; at most"),
    ],
)
def test_what_is_refused(text: str, told: str) -> None:
    with pytest.raises(ExpressionError, match=told.replace("(", r"\(").replace("*", r"\*")):
        value(text)


def test_conditions_and_numbers_are_told_apart() -> None:
    with pytest.raises(ExpressionError, match="neither true nor false"):
        Expression.parse("N").holds(NAMES.__getitem__)
    with pytest.raises(ExpressionError, match="which is no number"):
        Expression.parse("N > 1").number(NAMES.__getitem__)


TOKENS = ["N", "D", "optim.lr", "'a'", "1", "2.5", "9e99", "(", ")", "+", "-", "*", "/", "**", "<", "==", ",", "and"]
TOKENS += [
    "or",
    "not",
    "min",
    "log",
    "pow2",
    "exp",
    "__class__",
    ".",
    "[",
    "]",
    "lambda",
    "if",
    "else",
    ":",
    "tied",
    "=",
]


@given(st.lists(st.sampled_from(TOKENS), max_size=30).map(" ".join) | st.text(max_size=40))
def test_any_text_is_a_value_or_refused_at_once(text: str) -> None:
    began = time.process_time()
    try:
        found = value(text)
    except ExpressionError:
        found = 0
    assert isinstance(found, int | float | str)
    assert not isinstance(found, float) or math.isfinite(found)
    assert time.process_time() - began < 1  # not a timing: a hostile text takes minutes


@given(st.floats(1e-9, 1e15))
def test_a_power_of_two_is_the_nearest_in_ratio(number: float) -> None:
    found = pow2(number)
    assert math.log2(found).is_integer()
    assert 2**-0.5000001 <= found / number <= 2**0.5000001
