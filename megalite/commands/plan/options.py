"""Check that options of `megalite plan` belong together."""

import argparse

from megalite.base.errors import InputError

# By kind of plan, the first that is asked for: options that it would not read.
UNREAD_OPTIONS = {
    "--dry-run": "compare top pick exhaustive explain schedule write html tokens days budget",
    "--compare": "as_is top pick exhaustive offload explain schedule write days budget",
    "--as-is": "top pick exhaustive offload days budget",
    "a range of GPUs": "top pick exhaustive explain schedule",
    "a search on one number of GPUs": "days budget",
}


def refuse_unread(args: argparse.Namespace) -> None:
    """Raises InputError for an option that the asked kind of plan would not read."""
    asked = (args.dry_run, args.compare, args.as_is, args.gpus is not None and len(args.gpus) > 1, True)
    kind = next(kind for kind, wanted in zip(UNREAD_OPTIONS, asked, strict=True) if wanted)
    for name in UNREAD_OPTIONS[kind].split():
        if getattr(args, name) not in (None, False):
            raise InputError(f"--{name.replace('_', '-')}: is not read by {kind}; leave it out")
    for name in ("days", "budget"):
        if getattr(args, name) is not None and args.tokens is None:
            raise InputError(f"--{name}: is a limit of a whole run; give its --tokens too, as in --tokens 1T")
