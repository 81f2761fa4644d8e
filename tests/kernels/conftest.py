"""Ranks are processes on the CPU, where kernels run in the interpreter alone."""

import pytest
from ranks import Ranks
from rounding import DEVICE


@pytest.fixture(scope="session")
def ranks(ranks: Ranks) -> Ranks:
    if DEVICE.type == "cuda":
        pytest.skip("ranks of the tests are on the CPU, where kernels run with TRITON_INTERPRET=1: see `make test`")
    return ranks
