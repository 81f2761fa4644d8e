"""Compiled layers."""

import shutil
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch._dynamo.utils import counters
from toy_jobs import MODEL, advance, config_of, make, one_rank

from megalite.config.layout import Layout
from megalite.config.schema import Data

Recompute = Literal["none", "full"]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs a C++ compiler")


@needs_compiler
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_layers_compute_what_eager_ones_do(recompute: Recompute) -> None:
    assert graphs(Data(), recompute) == [1, 1]
    assert not counters["graph_break"]


@needs_compiler
@pytest.mark.filterwarnings("ignore")
def test_attention_inside_of_documents_stays_outside_of_graphs() -> None:
    """And new documents do not cause a new compilation."""
    first, later = graphs(Data(mask_documents=True, reset_positions=True, end_of_document=0))
    assert first == later
    assert counters["graph_break"]


def graphs(data: Data, recompute: Recompute = "none") -> list[int]:
    """How many graphs there are after one step and after three, whose losses must be those of eager mode."""
    config = config_of(Layout(), replace(MODEL, layers=1))
    config = replace(config, data=data, train=replace(config.train, precision="fp32", recompute=recompute))
    with one_rank():
        eager = advance(make(config), 0, 3)
        torch.compiler.reset()
        counters.clear()
        job, losses, found = make(replace(config, train=replace(config.train, compile=True))), [], []
        for first, last in ((0, 1), (1, 3)):
            losses += advance(job, first, last)
            found.append(counters["stats"]["unique_graphs"])
    assert losses == pytest.approx(eager, rel=1e-5)
    return found
