"""Kernels of attention as they are tried: what does not run is told, and the next of the table is taken."""

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from megalite.base.errors import InputError
from megalite.config.attention_kernels import ORDER, Kernel, Machine, Need, choose
from megalite.config.layers import Heads
from megalite.config.model_schema import Model
from megalite.config.schema import Config, Kernels
from megalite.parallel import settled_attention
from megalite.parallel.settled_attention import attention_kernels, machine

CUDA = torch.device("cuda")
EVERYTHING = Machine((9, 0), frozenset(ORDER))
ALTERNATING = Config(model=Model())
ALTERNATING.model.attention.window, ALTERNATING.model.attention.full_every = 100, 2


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator["Device"]:
    found = Device()
    monkeypatch.setattr(settled_attention, "machine", lambda device: EVERYTHING if device.type == "cuda" else None)
    monkeypatch.setattr(settled_attention, "_try", found.run)
    monkeypatch.setattr(settled_attention, "activate_flash_attention_impl", found.activate)
    monkeypatch.setattr(settled_attention, "restore_flash_attention_impl", found.restore)
    monkeypatch.setattr(settled_attention, "current_flash_attention_impl", lambda: found.active)
    settled_attention.settled.cache_clear()
    yield found
    settled_attention.settled.cache_clear()


class Device:
    """A GPU on which some kernels do not run."""

    def __init__(self) -> None:
        self.refuses: dict[tuple[Kernel, bool], Exception] = {}  # by kernel, and whether there is a window
        self.broken: Exception | None = None  # the error of a package's import
        self.active: str | None = None
        self.tried: list[tuple[Kernel, str | None]] = []

    def run(self, kernel: Kernel, need: Need, heads: Heads, device: torch.device) -> None:
        self.tried.append((kernel, self.active))
        if (error := self.refuses.get((kernel, need.window))) is not None:
            raise error

    def activate(self, name: str) -> None:
        if self.broken is not None:
            raise self.broken
        self.active = name

    def restore(self, _raise_warn: bool) -> None:
        self.active = None


def test_flash_attention_of_a_package_is_what_pytorch_calls(device: Device) -> None:
    assert {choice.kernel for choice in attention_kernels(ALTERNATING, CUDA).values()} == {"flash3"}
    assert device.tried == [("flash3", "FA3")] * 2


def test_what_does_not_run_for_a_window_is_used_for_no_layer(device: Device) -> None:
    device.refuses = {("flash3", True): RuntimeError("no windows\nand a trace")}
    found = attention_kernels(ALTERNATING, CUDA)
    assert {kind.window: choice.kernel for kind, choice in found.items()} == {100: "flash", None: "cudnn"}
    assert all("flash3 does not run here: no windows; " in choice.reason for choice in found.values())
    assert device.active is None


def test_a_package_that_cannot_be_imported_is_told(device: Device) -> None:
    device.broken = ImportError("libcudart.so.11: cannot open")
    device.refuses = {("cudnn", False): RuntimeError("No available kernel. Aborting execution.")}
    (choice,) = attention_kernels(Config(), CUDA).values()
    assert choice.kernel == "flash"
    assert choice.reason == (
        "flash3 does not run here: libcudart.so.11: cannot open; flash4 is for compute capability 10; "
        "cudnn does not run here: No available kernel. Aborting execution"
    )


def test_a_kernel_that_is_asked_for_is_taken_or_refused(device: Device) -> None:
    asked = replace(Config(), kernels=Kernels(attention="cudnn"))
    (choice,) = attention_kernels(asked, CUDA).values()
    assert str(choice) == "cudnn (as kernels.attention asks)"
    settled_attention.settled.cache_clear()
    device.refuses = {("cudnn", False): RuntimeError("No available kernel. Aborting execution.")}
    with pytest.raises(InputError) as error:
        attention_kernels(asked, CUDA)
    assert str(error.value.problems[0]) == (
        'kernels.attention = "cudnn": does not run here: No available kernel. Aborting execution; '
        "use auto, which takes the first of its table that runs"
    )


def test_nothing_is_tried_on_a_cpu(device: Device) -> None:
    assert {choice.kernel for choice in attention_kernels(Config(), torch.device("cpu")).values()} == {"flash"}
    with pytest.raises(InputError, match="needs a CUDA device"):
        attention_kernels(replace(Config(), kernels=Kernels(attention="cudnn")), torch.device("cpu"))
    assert device.tried == []


def test_a_cpu_is_no_machine_of_the_table() -> None:
    assert machine(torch.device("cpu")) is None


def test_another_cudnn_in_the_way_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def incompatible() -> int:
        raise RuntimeError("cuDNN version incompatibility: found 9.1.0\nmore")

    monkeypatch.setattr(torch.backends.cudnn, "version", incompatible)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    choice = choose("auto", Need(), machine(CUDA))
    assert choice.kernel == "flash"
    assert "cudnn does not run here: cuDNN version incompatibility: found 9.1.0" in choice.reason


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
def test_a_trial_is_what_attention_takes(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, by its own kernels."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    given = [Need(precision), Need(precision, window=True), Need(precision, documents=True)]
    with patch.object(settled_attention, "attention", wraps=settled_attention.attention) as tried:
        for need in given:
            settled_attention._try("flash", need, Heads(4, 2, 16, 16, 16), torch.device("cpu"))
    found = [(documents, scores.window, kernel) for *_, documents, scores, kernel in (c.args for c in tried.mock_calls)]
    assert found == [(None, None, "flash"), (None, 128, "flash"), ([(0, 256)], None, "flash")]
