"""Entry of a dry run as a process: it ends with its parent, and imports PyTorch with the garbage collector at rest."""

import sys

from megalite.base.late_import import import_for_good
from megalite.distributed.start.signals import die_with_launcher

if __name__ == "__main__":
    die_with_launcher()
    sys.exit(import_for_good("megalite.dry_run.run").main(sys.argv[1:]))
