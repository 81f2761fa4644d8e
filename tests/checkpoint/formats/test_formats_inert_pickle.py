"""Pickles as data: what is known comes back, and nobody can make little of it take much time or memory."""

import pickle
import struct
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.checkpoint.weights.formats.inert_pickle import Made, Named, read_pickle

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text(max_size=9) | st.integers(-9, 2**31 - 1), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=50, deadline=None)
@given(values, st.sampled_from([2, 3, 4, 5]))
def test_plain_values_come_back(value: object, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol)) == value


def test_names_and_calls_are_records() -> None:
    made = read_pickle(pickle.dumps(complex(1, 2), 4))
    assert isinstance(made, Made)
    assert (made.name, made.arguments, made.state) == ("builtins.complex", (1.0, 2.0), None)
    assert read_pickle(pickle.dumps(complex, 2)) == Named("__builtin__.complex")


def test_an_ordered_dictionary_is_a_dictionary() -> None:
    given = OrderedDict(b=1, a=OrderedDict())
    given.noted = "an attribute, as in the state of a module"  # type: ignore[attr-defined]
    found = read_pickle(pickle.dumps(given, 2))
    assert found == {"b": 1, "a": {}}
    assert list(found) == ["b", "a"]


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def dictionary(*keys: int) -> bytes:
    return (
        b"\x80\x04}(" + b"".join(b"\x8a\x10" + key.to_bytes(16, "little", signed=True) + b"N" for key in keys) + b"u."
    )


HOSTILE: dict[str, Callable[[], bytes]] = {
    "long names joined again and again": lambda: text("x" * 100_000) + b"\x94" + b"h\x00h\x00\x93" * 1000 + b".",
    "a long module": lambda: b"c" + b"x" * 1000 + b"\nname\n.",
    "keys of one hash": lambda: dictionary(*(number * (2**61 - 1) for number in range(8000))),
    "a large key": lambda: dictionary(2**31),
    "a small key": lambda: dictionary(-(2**31) - 1),
    "a key that is true": lambda: b"}\x88Ns.",
    "a tuple as a key": lambda: b"}(K\x01K\x02\x86Nu.",
    "a float as a key": lambda: b"}G" + bytes(8) + b"Ns.",
    "a list that holds itself as a key": lambda: b"}]\x94h\x00ah\x00s.",
    "a number of bytes without end": lambda: b"\x96" + b"\xff" * 7 + b"\x7f.",
    "bytes without end": lambda: b"\x8e" + b"\xff" * 7 + b"\x7f.",
    "text without end": lambda: b"X\xff\xff\xff\xff.",
    "doubled": lambda: b")\x94" + b"".join(b"h\x00h\x00\x86q\x00" for _ in range(10_000)) + b"c\nx\nR.",
}


@pytest.mark.parametrize("how", HOSTILE)
@pytest.mark.timeout(20)
def test_little_takes_little(how: str) -> None:
    content = HOSTILE[how]()
    tracemalloc.start()
    begin = time.process_time()
    try:
        with pytest.raises(ValueError, match=r"^(names a class|sets items|is no pickle: |calls what|ends with)"):
            read_pickle(content)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.process_time() - begin < 2
    assert most < 100 * len(content) + (1 << 20)
