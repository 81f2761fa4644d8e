"""Check that options of `megalite plan` belong together."""

import argparse

from megalite.base.errors import InputError

# By kind of plan, the first that is asked for: options that it would not read.
UNREAD_OPTIONS = {
    "--dry-run": "compare top pick exhaustive explain schedule write html tokens days budget",
    "--compare": "as_is top pick exhaustive offload explain schedule write days budget",
    "--as-is": "top pick exhaustive offload days budget",
    "a range of GPUs or a limit": "top pick exhaustive explain schedule",
}


def is_front(args: argparse.Namespace) -> bool:
    """Return whether a row for each number of GPUs is asked for: there are several, or the run has a limit."""
    limited = args.days is not None or args.budget is not None
    return args.gpus is not None and (len(args.gpus) > 1 or limited)


def refuse_unread(args: argparse.Namespace) -> None:
    """Raises InputError for an option that the asked kind of plan would not read."""
    asked = (args.dry_run, args.compare, args.as_is, is_front(args))
    kind = next((kind for kind, wanted in zip(UNREAD_OPTIONS, asked, strict=True) if wanted), "")
    for name in UNREAD_OPTIONS.get(kind, "").split():
        if getattr(args, name) not in (None, False):
            raise InputError(f"--{name.replace('_', '-')}: is not read by {kind}; leave it out")
    for name in ("days", "budget"):
        if getattr(args, name) is not None and args.tokens is None:
            raise InputError(f"--{name}: is a limit of a whole run; give its --tokens too, as in --tokens 1T")
