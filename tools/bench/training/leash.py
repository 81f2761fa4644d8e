"""Becomes another program, which the kernel kills when the parent of this process is killed.

    python -S -E leash.py PARENT PROGRAM [ARGUMENT]...

Done before the program begins, in a process of its own: between fork and exec, a parent with threads may run no Python.
"""

import ctypes
import os
import signal
import sys

DEATH_SIGNAL_OPTION = 1  # PR_SET_PDEATHSIG of prctl(2), which exec keeps
NOT_FOUND_CODE = 127  # exit code, as a shell's

if __name__ == "__main__":
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(DEATH_SIGNAL_OPTION, signal.SIGKILL)
    if os.getppid() != int(parent):  # it was killed before
        sys.exit(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: cannot be started: {error.strerror}", file=sys.stderr)
        sys.exit(NOT_FOUND_CODE)
