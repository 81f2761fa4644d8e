"""A process with two CUDA devices that hold nothing, on a machine without any.

PyTorch finds a device there that it can ask for streams and events, so its own code runs as far as operations go:
dispatch, schemas, autograd with its threads, FSDP2, the optimizer. Operations get fake tensors, which have shapes,
types and devices, and no values; collectives are answered at once. This cannot be undone, hence a process of its own,
in which PyTorch must not have been imported yet. This module imports no torch.
"""

import ctypes
import subprocess
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_suffix(".cpp")
LIMIT = 120.0  # seconds for one function


@contextmanager
def fake_cuda(folder: Path) -> Iterator[Callable[..., Any]]:
    """Calls functions in such a process: `call(function, *args)` returns what it does, or raises."""
    library = _compiled(folder)
    with get_context("spawn").Pool(1, _install, (library,)) as pool:
        yield lambda function, *args: pool.apply_async(_run, (function, *args)).get(LIMIT)


def _run(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except Exception:  # noqa: BLE001 - some of PyTorch's cannot be sent
        raise RuntimeError(traceback.format_exc()) from None


def _compiled(folder: Path) -> Path:
    library, torch = folder / "fake_cuda.so", _torch()
    include, libraries = f"-I{torch / 'include'}", [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
    flags = ["-std=c++20", "-O0", "-shared", "-fPIC", include]
    subprocess.run(["g++", *flags, SOURCE, "-o", library, *libraries], check=True)
    return library


def _install(library: Path) -> None:
    """What registers last counts, but PyTorch asks only once: between its libraries and its import."""
    for name in ("libtorch_cpu.so", "libtorch_cuda.so"):
        if (path := _torch() / "lib" / name).exists():
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library))
    import_module("fake_device").install()


def _torch() -> Path:
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
