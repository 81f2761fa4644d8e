# shellcheck shell=bash disable=SC2034
# Sourced by the scripts beside it: real text that is on every machine. Sets `sources` to the Python files of the standard
# library, without tests and installed packages.
library=$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
mapfile -t sources < <(find "$library" -name '*.py' -size +1k \
    -not -path '*/site-packages/*' -not -path '*/dist-packages/*' -not -path '*/test/*' -not -path '*/tests/*' | LC_ALL=C sort)
