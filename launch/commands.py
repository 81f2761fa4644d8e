"""Entry points of the installed programs, and how each of them ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module

from .base.errors import UserError
from .base.free_space import FULL_DISK_ERRORS
from .base.outcome import BAD_INPUT, INTERRUPTED, STOPPED, UNHEALTHY
from .base.processes import Stopped, stoppable
from .base.texts import escaped

BROKEN_PIPE_CODE = 141  # as the shell gives it for SIGPIPE
PROGRAMS = {  # the module and the summary of each, by what `python3 launch` calls it
    "launch": ("submit.launch_command", "start a run on this machine, by Slurm or on Kubernetes"),
    "supervise": ("supervise.supervise_command", "look after the ranks of a job; batch scripts call it"),
    "preflight": ("preflight.preflight_command", "check the nodes of a job before it trains"),
    "status": ("status.status_command", "tell how a run does, and where its time went"),
    "logs": ("watch.logs", "show the first failure of a run in context"),
    "goodput": ("goodput.goodput_command", "simulate and account the share of time that trains"),
    "node": ("supervise.node", "start the ranks of one of several machines"),
}


def run(name: str, arguments: list[str]) -> int:
    """Run a program and return its exit code."""
    program = f"megalite-{name}"
    try:
        with stoppable():
            try:
                code: int = import_module(f".{PROGRAMS[name][0]}", __package__).main(arguments)
                return code
            finally:
                sys.stdout.flush()
    except UserError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return BAD_INPUT
    except Stopped as stopped:
        print(f"{program}: {stopped}", file=sys.stderr)
        return STOPPED
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes once more as it ends
        return BROKEN_PIPE_CODE
    except OSError as error:
        full = error.errno in FULL_DISK_ERRORS
        if error.filename is None and not full:
            raise
        print(f"{program}: error: {escaped(str(error.filename or 'a file'))}: {error.strerror}", file=sys.stderr)
        return UNHEALTHY if full else BAD_INPUT


def _program(name: str) -> Callable[[], int]:
    return lambda: run(name, sys.argv[1:])


launch = _program("launch")
preflight = _program("preflight")
status = _program("status")
logs = _program("logs")
goodput = _program("goodput")
node = _program("node")
