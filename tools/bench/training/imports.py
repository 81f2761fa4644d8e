"""Import all that measurements need, and say what is missing: the first case of a plan on an unknown machine.

Exit code 1 where something is missing that everything needs.
"""

import sys
from importlib import import_module

NEEDED_MODULES = (
    "torch", "numpy", "omegaconf", "yaml", "rich", "xxhash", "sentencepiece", "tensorboard", "megalite.commands.main",
    "megalite_kernels", "megalite_tools.bench.training.single", "megalite_tools.bench.device",
)  # fmt: skip
OPTIONAL_MODULES = (
    "triton",
    "transformers",
    "liger_kernel",
    "torchtitan.models.llama3",
    "torchao",
    "pytest",
    "hypothesis",
    "xdist",
)


def main() -> int:
    """Runs the program. Returns the exit code."""
    missing = []
    for name in (*NEEDED_MODULES, *OPTIONAL_MODULES):
        try:
            module = import_module(name)
        except Exception as error:  # noqa: BLE001 - whatever an import does, the others are looked at too
            missing.append(name)
            print(f"{name}: {type(error).__name__}: {error}")
        else:
            print(f"{name}: {getattr(module, '__version__', 'there')}")
    torch = sys.modules.get("torch")
    if torch is not None:
        print(f"CUDA devices: {torch.cuda.device_count()}")
    return int(any(name in NEEDED_MODULES for name in missing))


if __name__ == "__main__":
    sys.exit(main())
