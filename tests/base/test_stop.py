"""Signals to a command that is not under way yet."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pytest

from megalite.base.stop_signals import STOP_SIGNALS, held_up, listen, restore

BEGIN = """
import importlib, os, sys, time
sys.argv[1:] = {arguments}
from {package} import {name}

def import_slowly(module):
    try:
        os.kill(os.getpid(), {number})
        time.sleep(60)
    except BaseException:  # as some modules do while they are imported
        print("lost", flush=True)

importlib.import_module = sys.modules["{package}"].import_module = import_slowly
{name}()
"""


@pytest.fixture
def ignored() -> Iterator[signal.Signals]:
    """A signal that is ignored, as SIGHUP is under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield signal.SIGHUP
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("package", "name", "arguments", "number", "code"),
    [
        *(
            ("megalite.__main__", "main", ["show"], number, 130 if number == signal.SIGINT else 3)
            for number in STOP_SIGNALS
        ),
        ("megalite.__main__", "main", ["train"], signal.SIGINT, 3),
        ("megalite_tools.commands", "prepare_data", [], signal.SIGINT, 130),
        ("megalite_tools.commands", "prepare_data", [], signal.SIGHUP, 3),
    ],
)
def test_a_signal_while_modules_are_imported_ends_a_command_with_one_line(
    package: str, name: str, arguments: list[str], number: signal.Signals, code: int
) -> None:
    program = BEGIN.format(package=package, name=name, arguments=arguments, number=int(number))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"megalite: stopped by {number.name}\n")


def test_a_signal_that_was_held_up_from_before_the_start_is_heard() -> None:
    program = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
os.kill(os.getpid(), signal.SIGUSR1)
from megalite.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (3, "megalite: stopped by SIGUSR1\n")


def test_what_was_ignored_stays_ignored_and_the_rest_is_put_back(ignored: signal.Signals) -> None:
    heard: list[int] = []
    before = listen(lambda number, _: heard.append(number))
    assert before.keys() == set(STOP_SIGNALS) - {ignored}
    for number in STOP_SIGNALS:
        os.kill(os.getpid(), number)
    restore(before)
    assert set(heard) == set(STOP_SIGNALS) - {ignored}
    assert {number: signal.getsignal(number) for number in before} == before


def test_signals_that_are_held_up_come_at_the_end_whichever_thread_takes_them() -> None:
    def take() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        signal.raise_signal(signal.SIGTERM)

    heard: list[int] = []
    before = listen(lambda number, _: heard.append(number))
    ours = [signal.getsignal(number) for number in STOP_SIGNALS], signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with held_up():
        thread = Thread(target=take)
        thread.start()
        thread.join()
        signal.raise_signal(signal.SIGUSR1)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) >= set(
            STOP_SIGNALS
        )  # as processes that are started inherit it
        assert heard == []
    assert ([signal.getsignal(number) for number in STOP_SIGNALS], signal.pthread_sigmask(signal.SIG_BLOCK, ())) == ours
    restore(before)
    assert sorted(heard) == sorted([signal.SIGTERM, signal.SIGUSR1])


def test_another_thread_may_hold_signals_up_too() -> None:
    def hold() -> bool:
        with held_up():
            return signal.pthread_sigmask(signal.SIG_BLOCK, ()) >= set(STOP_SIGNALS)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(hold).result()
