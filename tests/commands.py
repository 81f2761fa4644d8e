"""Running commands of the tools in the test's own process."""

from collections.abc import Callable

import pytest
import torch.distributed as dist

Result = tuple[int, str, str]


def in_process(main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """A function that runs the command with arguments; its exit code and what it printed to stdout and stderr."""

    def call(*arguments: object) -> Result:
        try:
            code = main([str(argument) for argument in arguments])
        finally:
            if dist.is_initialized():  # the command leaves that to the end of its process
                dist.destroy_process_group()
        return code, *capsys.readouterr()

    return call
