"""What makes two configurations the same."""

import random
from copy import deepcopy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from megalite.config.convert import to_plain
from megalite.config.identity import digest_of, run_id
from megalite.config.schema import Config


def shuffled(value: Any, source: random.Random) -> Any:
    if not isinstance(value, dict):
        return value
    items = list(value.items())
    source.shuffle(items)
    return {key: shuffled(inner, source) for key, inner in items}


@given(st.randoms(use_true_random=False), st.booleans())
def test_identity_knows_no_order(source: random.Random, keeps_layout: bool) -> None:
    plain = to_plain(Config())
    plain["optim"]["lr"] = source.random()
    assert run_id(shuffled(plain, source), keeps_layout) == run_id(plain, keeps_layout)


@given(
    st.sampled_from([("optim", "lr"), ("model", "width"), ("train", "steps"), ("run", "seed"), ("data", "tokenizer")])
)
def test_identity_knows_every_value(place: tuple[str, str]) -> None:
    plain, changed = to_plain(Config()), deepcopy(to_plain(Config()))
    changed[place[0]][place[1]] = 7
    assert run_id(changed, False) != run_id(plain, False)


def test_keys_of_later_versions_change_no_run_id() -> None:
    plain = to_plain(Config())
    del plain["optim"]["muon"], plain["model"]["parametrization"]
    assert run_id(plain, False) == run_id(to_plain(Config()), False)


def test_a_run_keeps_its_id_in_later_versions() -> None:
    plain = to_plain(Config())
    plain["optim"]["lr"] = 0.5
    assert run_id(plain, False) == "c0c40414da"


def test_a_digest_has_as_many_digits_as_asked() -> None:
    assert digest_of("a") == "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"
    assert digest_of("a", 10) == "ca978112ca"
