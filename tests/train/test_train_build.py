"""Compiled layers, and kernels that cannot run."""

import shutil
import sys
from dataclasses import replace
from types import ModuleType
from typing import Literal

import pytest
import torch
from torch._dynamo.utils import counters
from toy_jobs import MODEL, advance, config_of, make, one_rank

from megalite.base.errors import InputError
from megalite.config.layout import Layout
from megalite.config.schema import Data, Kernels
from megalite.train.build import check_compiler, check_kernels

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
def test_kernels_are_called_from_inside_of_graphs() -> None:
    """Eager mode here has PyTorch's operations."""
    assert graphs(Data(), "full", "triton") == [1, 1]
    assert not counters["graph_break"]


@needs_compiler
@pytest.mark.filterwarnings("ignore")
def test_attention_inside_of_documents_stays_outside_of_graphs() -> None:
    """And new documents do not cause a new compilation."""
    first, later = graphs(Data(mask_documents=True, reset_positions=True, end_of_document=0))
    assert first == later
    assert counters["graph_break"]


def graphs(data: Data, recompute: Recompute = "none", kernels: Literal["auto", "triton"] = "auto") -> list[int]:
    """How many graphs there are after one step and after three, whose losses must be those of eager mode."""
    config = config_of(Layout(), replace(MODEL, layers=2, qk_norm=kernels == "triton"))
    config = replace(config, data=data, train=replace(config.train, precision="fp32", recompute=recompute))
    with one_rank():
        eager = advance(make(config), 0, 3)
        torch.compiler.reset()
        counters.clear()
        job = make(replace(config, train=replace(config.train, compile=True), kernels=kernels))
        losses, found = [], []
        for first, last in ((0, 1), (1, 3)):
            losses += advance(job, first, last)
            found.append(counters["stats"]["unique_graphs"])
    assert losses == pytest.approx(eager, rel=1e-5)
    return found


@pytest.mark.parametrize("operation", ["rms_norm", "adamw"])
def test_apex_that_is_not_there_is_refused(operation: str) -> None:
    config = replace(config_of(Layout()), kernels=Kernels(**{operation: "apex"}))
    told = rf"^kernels\.{operation} = apex: apex is asked for, but .* cannot be loaded .* pip install"
    with pytest.raises(InputError, match=told):
        check_kernels(config, torch.device("cuda"))


def test_apex_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amp_C", ModuleType("amp_C"))
    config = replace(config_of(Layout()), kernels=Kernels(adamw="apex"))
    with pytest.raises(InputError, match=r"kernels\.adamw = apex: apex is asked for, but tensors are on cpu"):
        check_kernels(config, torch.device("cpu"))
    check_kernels(config, torch.device("cuda"))


def test_compiling_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    check_compiler(torch.device("cuda"))
    with pytest.raises(
        InputError, match=r"train.compile = true: needs a C\+\+ compiler .* there is no no-such-compiler"
    ):
        check_compiler(torch.device("cpu"))
