"""Fields of a table: numbers within bounds, and words of closed vocabularies."""

import pytest

from megalite_tools.plan.published.fields import number, whole, word


def test_words_and_numbers() -> None:
    fields = {"word": " Model Causal ", "empty": " ", "heads": "16.0", "mfu": "40.5", "experts": "0"}
    assert word(fields, "word", ("model", "model causal")) == "model causal"
    assert word(fields, "empty", ("model",), "model") == "model"
    assert whole(fields, "heads") == 16
    assert whole(fields, "empty", 3) == 3
    assert whole(fields, "experts", least=0) == 0
    assert number(fields, "mfu", 100) == 40.5
    assert number(fields, "empty", 100) is None


def test_what_is_neither_is_told_with_column_value_and_rule() -> None:
    fields = {"word": "models", "empty": "", "heads": "1.5", "mfu": "400", "text": "x"}
    for read, why in (
        (lambda: word(fields, "word", ("model", "hardware")), "word = 'models': must be model or hardware"),
        (lambda: word(fields, "empty", ("yes", "no")), "empty = '': must be yes or no"),
        (lambda: whole(fields, "heads"), "heads = '1.5': must be a whole number of at least 1, and at most 65,536"),
        (lambda: whole(fields, "empty"), "empty = '': must be a number"),
        (lambda: number(fields, "mfu", 100), "mfu = '400': must be a number of at least 1e-09, and at most 100"),
        (lambda: number(fields, "text", 100), "text = 'x': must be a number"),
    ):
        with pytest.raises(ValueError, match="must be") as caught:
            read()
        assert str(caught.value) == why
