"""The number of a model's weights: that of boxes adds up, and any change of a value or a place is another number."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.model.fingerprint import MODULUS, fingerprint

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@given(SHAPES, st.data())
def test_boxes_add_up_to_the_whole(shape: tuple[int, ...], data: st.DataObject) -> None:
    values = torch.randn(shape, dtype=torch.float64)
    dim = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(0, shape[dim]))
    first, second = values.split([cut, shape[dim] - cut], dim)
    offset = [cut if each == dim else 0 for each in range(len(shape))]
    parts = fingerprint("w", first, shape, [0] * len(shape)) + fingerprint("w", second, shape, offset)
    assert parts % MODULUS == fingerprint("w", values, shape, [0] * len(shape))


def test_values_places_and_names_count() -> None:
    values = torch.arange(12.0).view(3, 4)
    changed = values.clone()
    changed[2, 3] += 0.1
    others = (values.flip(0), values.T.reshape(3, 4), changed, -values)
    numbers = {fingerprint("w", each, (3, 4), (0, 0)) for each in (values, *others)}
    numbers.add(fingerprint("v", values, (3, 4), (0, 0)))
    assert len(numbers) == 6
    assert fingerprint("w", values.double(), (3, 4), (0, 0)) in numbers
