"""Importing modules by name, late and fast."""

import gc
import importlib
from types import ModuleType


def import_for_good(name: str) -> ModuleType:
    """Import a module that stays until the process ends, as everything it imports does.

    The garbage collector rests meanwhile, and never looks at what is there now again: over the some 300,000 objects of
    PyTorch it would spend a fifth of the import, and most of the interpreter's shutdown.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        if collects:
            gc.enable()
