"""A long JSON text is read piece by piece, as `json` reads it, in bounded memory."""

import gzip
import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.profiling import stream
from megalite.profiling.stream import Stream

values = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def read(text: bytes) -> tuple[dict[str, Any], list[Any]]:
    items = list[Any]()
    with gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(text, 1))) as file:
        return Stream(file).members(("kept",), "items", items.append), items


@given(values, st.lists(values), st.integers(1, 9), st.sampled_from([None, 1]))
def test_values_are_those_of_json_however_the_text_is_cut(kept: Any, items: list[Any], cut: int, indent: Any) -> None:
    content = {"other": items, "items": items, "kept": kept, "more": kept}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stream, "CHUNK", cut)
        text = json.dumps(content, indent=indent, ensure_ascii=False).encode()
        assert read(text) == ({"items": None, "kept": kept}, items)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "ends too early"),
        ('{"items": [1, 2', "ends too early"),
        ('{"items": [1, 2]', "ends too early"),
        ('{"kept": 12', "ends too early"),
        ("[]", r"has '\[' in place of \{"),
        ('{"items": {}}', r"has '\{' in place of \["),
        ('{"items": [1 2]}', r"has '2' in place of , or \]"),
        ('{"items": [1.x]}', "has '.' after a value"),
        ('{"items": [1,]}', "is no JSON: Expecting value"),
        ('{"kept": 1}}', "goes on after its end"),
        ('{"kept": 1, "kept": 2}', "has 'kept' twice"),
        ('{"items": [], "items": []}', "has 'items' twice"),
        ('{"kept": ' + "9" * 5000 + "}", "Exceeds the limit"),
    ],
)
def test_other_texts_are_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read(text.encode())


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(RecursionError):
        read(b'{"other": ' + b"[" * 100_000)


@pytest.mark.parametrize("value", [b'"' + b"a" * 3000 + b'"', b"[" + b"[]," * 1000 + b"0]", b" " * 9000 + b"0"])
@pytest.mark.parametrize("where", [b'{"other": %s}', b'{"items": [%s]}', b'{"kept": %s}'])
def test_what_could_fill_memory_is_refused(value: bytes, where: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    read(where % value)
    for name, most in (("CHUNK", 100), ("MAX_VALUE", 1500), ("MAX_BYTES", 6000)):
        monkeypatch.setattr(stream, name, most)
    with pytest.raises(ValueError, match=r"has a value of more than 1,500 characters|is longer than 6,000 bytes"):
        read(where % value)
