"""Tries tokenizer files that come from outside, each in a process of its own with limits.

A file may make the packages that read it take all memory, or years: by normalizers that each double a text, a regular
expression, or words without a longest length.
"""

import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from megalite.base.errors import InputError
from megalite.base.exit_codes import ExitCode
from megalite.data.growth import MAX_GROWTH, growth
from megalite.data.odd_texts import ODD_TEXTS
from megalite.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_hash
from megalite_launch.base.texts import memory_text

MEMORY, MEMORY_PER_BYTE = 1 << 30, 20  # bytes, and so many more for each byte of the file
SECONDS, BYTES_PER_SECOND = 10, 1 << 19  # processor time, and one second more for so many bytes of the file
PATIENCE = 5  # times those seconds on a busy machine
RUN_LENGTH = 10_000  # characters that are the same
TEXTS = (*ODD_TEXTS, "".join(ODD_TEXTS), *(character * RUN_LENGTH + "!" for character in " a=.0\n"))
# One thread, since each takes addresses for more.
SINGLE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

_tried: set[tuple[str, str]] = set()  # suffixes and hashes of files that have passed


def open_tokenizer_file(path: str | Path, eod: str | None = None) -> Tokenizer:
    """Try a file from outside once, then load it by `load_tokenizer`. Raises InputError if the trial needs too much."""
    path = Path(path)
    key = path.suffix, tokenizer_hash(path)
    if key not in _tried:
        _try(path)
        _tried.add(key)
    return load_tokenizer(path, eod)


def _try(path: Path) -> None:
    size = path.stat().st_size
    memory, seconds = MEMORY + MEMORY_PER_BYTE * size, SECONDS + size // BYTES_PER_SECOND
    command = [sys.executable, "-m", "megalite.data.trial", str(path), str(memory), str(seconds)]
    try:
        done = subprocess.run(
            command,
            env=os.environ | SINGLE_THREAD,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # where an abort is told at length
            timeout=seconds * PATIENCE,
            start_new_session=True,  # Ctrl-C is for this process, which then ends that one
            check=False,
        )
    except subprocess.TimeoutExpired:
        code, said = -signal.SIGXCPU, b""
    else:
        code, said = done.returncode, done.stdout
    if code == ExitCode.DONE:
        return
    if code == ExitCode.BAD_INPUT:
        raise InputError(said.decode(errors="surrogatepass"))
    ended = f"ends with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
    what = "takes longer" if code == -signal.SIGXCPU else f"{ended}, as one that needs more memory does"
    limits = f"{memory_text(memory)} of memory and {seconds} s of a processor"
    raise InputError(f"{path}: this tokenizer, opened and tried on short texts with {limits}, {what}; use another one")


def _main(path: Path, memory: int, seconds: int) -> int:
    """Be the process that may fail."""
    limits = {resource.RLIMIT_AS: memory, resource.RLIMIT_CPU: seconds, resource.RLIMIT_CORE: 0}
    for kind, most in limits.items():
        with suppress(ValueError, OSError):  # a lower limit is in force already, or the system has none
            resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
    try:
        if path.suffix == ".json" and (times := growth(path.read_bytes())) > MAX_GROWTH:
            rule = (
                f"its normalizers or decoders may make a text {times:.3g} times as long, and {MAX_GROWTH:,} is the most"
            )
            raise InputError(f"{path}: {rule}; use another tokenizer")
        tokenizer = load_tokenizer(path)
    except InputError as error:
        if isinstance(error.__cause__, MemoryError):
            return ExitCode.FAILED
        sys.stdout.buffer.write(str(error).encode(errors="surrogatepass"))
        return ExitCode.BAD_INPUT
    for text in TEXTS:
        try:
            tokenizer.decode(tokenizer.encode(text))
        except InputError as error:  # text that it cannot encode is told where it is met
            if isinstance(error.__cause__, MemoryError):
                return ExitCode.FAILED
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
