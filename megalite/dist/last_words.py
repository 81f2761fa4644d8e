"""What a failing rank leaves behind: one message for the user, from the rank that knows the cause. Imports no torch."""

import json
import logging
import os
import socket
import sys
import time
from pathlib import Path

from megalite.dist.local import MEETING, error_file
from megalite.dist.ranks import Place

log = logging.getLogger("megalite")
log.addHandler(logging.NullHandler())  # until the rank's log file is open, nothing is logged


def tell(code: int, text: str, place: Place) -> None:
    """Tell the launcher of an error, if it shows the first one of the job, or else the user."""
    if MEETING in os.environ:
        tell_launcher(code, text, place)
    elif torchrun := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        report = {"message": text, "extraInfo": {"timestamp": int(time.time())}}
        Path(torchrun).write_text(json.dumps({"message": report}))
    else:
        print(f"megalite: rank {place.rank} on {socket.gethostname()}: {text}", file=sys.stderr)


def tell_launcher(code: int, text: str, place: Place) -> None:
    """Leave the local launcher a report; without text, `code` is a verdict that needs no explanation."""
    report = {"time": time.time(), "rank": place.rank, "code": code, "error": text}
    path = error_file(Path(os.environ[MEETING]), place.rank)
    partial = path.with_suffix(".partial")  # the launcher may stop this process at any moment
    partial.write_text(json.dumps(report))
    partial.rename(path)
