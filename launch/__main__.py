"""`python3 launch PROGRAM …` in a checkout, or `python3 -m megalite_launch PROGRAM …`: no installation is needed."""

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

NAME = "megalite_launch"


def _import_from_here() -> None:
    """Make this folder the package `megalite_launch`, unless Python has found it as that."""
    if __package__ == NAME:
        return
    folder = Path(__file__).resolve().parent
    spec = spec_from_file_location(NAME, folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec is not None
    assert spec.loader is not None
    package = module_from_spec(spec)
    sys.modules[NAME] = package
    spec.loader.exec_module(package)


def main() -> int:
    _import_from_here()
    commands = import_module(f"{NAME}.commands")
    names = sys.argv[1:2]
    if names and names[0] in commands.PROGRAMS:
        code: int = commands.run(names[0], sys.argv[2:])
        return code
    told = "".join(f"  {name:<10} {summary}\n" for name, (_, summary) in commands.PROGRAMS.items())
    text = f"usage: python3 {sys.argv[0]} PROGRAM …\n\nprograms; each has --help:\n{told}"
    asked = names in (["-h"], ["--help"])
    print(text, end="", file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
