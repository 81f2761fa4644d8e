"""Compiled layers."""

import shutil
from dataclasses import replace

import pytest
from torch._dynamo.utils import counters
from toy_jobs import MODEL, advance, config_of, make, one_rank

from megalite.config.layout import Layout


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_compute_what_eager_ones_do() -> None:
    config = config_of(Layout(), replace(MODEL, layers=1))
    train = replace(config.train, precision="fp32")
    with one_rank():
        eager = advance(make(replace(config, train=train)), 0, 3)
        counters.clear()
        compiled = advance(make(replace(config, train=replace(train, compile=True))), 0, 3)
    assert compiled == pytest.approx(eager, rel=1e-5)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
