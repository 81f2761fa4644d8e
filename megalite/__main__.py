"""Where the command `megalite` begins: it hears signals before it imports anything that takes time."""

import sys
from importlib import import_module

from megalite.exit_codes import ExitCode
from megalite.stop import end_at_once


def main() -> int:
    """The exit code of `megalite.cli.main`."""
    end_at_once(ExitCode.STOPPED if sys.argv[1:2] == ["train"] else ExitCode.INTERRUPTED)
    code: int = import_module("megalite.cli").main()
    return code


if __name__ == "__main__":
    sys.exit(main())
