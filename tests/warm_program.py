"""Programs that commands start by their path, and that run as forks, see `warm_start`."""

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from warm_start import Popen

# Hands over what a process has of its own, and signals; ends as the fork does.
CLIENT = """\
#!{python} -IS
import json, os, signal, socket, sys

SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP
signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the fork that gets them is known
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
told = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(told).to_bytes(8, "little")], [0, 1, 2])
server.sendall(told)
answers = server.makefile()
pid = int(next(answers))
for number in SIGNALS:
    signal.signal(number, lambda number, _: os.kill(pid, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
code = int(next(answers))
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@contextmanager
def warm_program(folder: Path, *command: str) -> Iterator[Path]:
    """The path of a program, in `folder`, that is what Python is for `command` and more arguments."""
    program, address = folder / "warm", folder / "warm.socket"
    program.write_text(CLIENT.format(python=sys.executable, address=str(address)))
    program.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        threading.Thread(target=_serve, args=(listener, command), daemon=True).start()
        try:
            yield program
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def _serve(listener: socket.socket, command: Sequence[str]) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:  # the end
            return
        threading.Thread(target=_run, args=(client, command), daemon=True).start()


def _run(client: socket.socket, command: Sequence[str]) -> None:
    with client, client.makefile("rb") as given:
        head, streams, *_ = socket.recv_fds(client, 8, 3)
        arguments, folder, environment = json.loads(given.read(int.from_bytes(head, "little")))
        names = ("stdin", "stdout", "stderr")
        fork = Popen([*command, *arguments], cwd=folder, env=environment, **dict(zip(names, streams, strict=True)))
        for stream in streams:
            os.close(stream)
        client.sendall(f"{fork.pid}\n".encode())
        client.sendall(f"{fork.wait()}\n".encode())
