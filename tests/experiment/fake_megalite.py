"""A stand-in for the command `megalite` that trains nothing: it writes what training writes, and ends as it is told.

What to do stands in `script.json` of the working directory: by the slug of a run, a list of how its starts end, of
which the last one holds for all further ones; `"": [...]` is for all others. "seconds" is the time of a step. Every
start, and every end with a complete run, is a line of `journal`.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from megalite_launch.base.outcome import Failure, write_failure, write_outcome
from megalite_launch.base.run_folder import ATTEMPT, RunFolder

STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
FAILURES = {
    "oom": (
        1,
        "Traceback (most recent call last)\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
    ),
    "diverged": (4, "step 3: the loss is nan; use train.on_bad_step=skip or rollback to go past it"),
    "unsaved": (4, "4 checkpoints in a row could not be written: No space left on device; make room"),
    "bad": (2, "error: data/train.bin: is missing"),
    "crash": (1, "Traceback (most recent call last)\nRuntimeError: a bug"),
    "lost": (5, ""),
}
asked: list[int] = []


def note(path: Path, text: str) -> None:
    with path.open("ab") as file:
        file.write(f"{text}\n".encode())


def configuration(path: str) -> dict[str, dict[str, object]]:
    lines = Path(path).read_text().splitlines()
    return {key: json.loads(rest) for key, _, rest in (line.partition(": ") for line in lines if line[0] != "#")}


def main() -> int:
    for number in STOP:
        signal.signal(number, lambda number, _: asked.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)
    if os.environ.get("SLURM_PROCID", "0") != "0":
        return 0
    config = configuration(sys.argv[2])
    resume = dict(word.split("=", 1) for word in sys.argv[3:]).get("checkpoint.resume")
    name, steps, at = config["run"]["name"], config["train"]["steps"], config["checkpoint"]["at"]
    run, attempt = Path(str(config["run"]["dir"])) / str(name), Path(os.environ[ATTEMPT])
    script = json.loads(Path("script.json").read_text())
    said = script.get(str(name)[:-11], script.get("", ["done"]))
    before = [line for line in Path("journal").read_text().splitlines() if line == f"start {name}"]
    end = said[min(len(before), len(said) - 1)]
    if RunFolder(run).newest_step() < int(str(steps)):  # else there is nothing to train
        note(Path("journal"), f"start {name}")
    if resume is not None and not Path(resume).is_dir():
        write_failure(attempt, Failure(time.time(), 0, "node", 2, 0, f"error: {resume}: is missing"))
        return 2
    first = RunFolder(run).newest_step() or (int(resume[-8:]) if resume else 0)
    if first or (run / "metrics.jsonl").exists():
        note(run / "metrics.jsonl", json.dumps({"step": first, "time": time.time(), "event": "resumed"}))
    for step in range(first + 1, int(str(steps)) + 1):
        time.sleep(script.get("seconds", 0.0))
        if end in FAILURES and step > first + 2:
            code, text = FAILURES[end]
            write_failure(attempt, Failure(time.time(), 0, "node", code, step, text))
            return code
        while end == "hang" and not asked:
            time.sleep(0.05)
        if end == "lie":
            return 0
        loss = 2 + float(str(config["optim"]["lr"])) + 1 / step
        record = {"step": step, "time": time.time(), "loss": loss, "tokens_per_second": 1e4, "step_seconds": 0.01}
        note(run / "metrics.jsonl", json.dumps(record))
        if step in at or step == steps or asked:
            (run / "checkpoints" / f"step-{step:08d}").mkdir(parents=True, exist_ok=True)
        if asked and step < int(str(steps)):
            write_outcome(attempt, 3, step)
            return 3
    if config["eval"]["steps"]:
        note(run / "metrics.jsonl", json.dumps({"step": steps, "time": time.time(), "valid_loss": loss}))
    note(Path("journal"), f"end {name}")
    write_outcome(attempt, 0, int(str(steps)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
