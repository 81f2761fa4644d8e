#!/usr/bin/env bash
# Measures a GPU by a part of plan.yaml, without a network, without make, and without writing outside of .slot and $OUT:
#
#   tools/bench/slot/run.sh 1 | 2 | 3 | all [OPTION of megalite-bench-training run]...
#
# What is worth keeping lies in $OUT (or .slot/out) at every moment. The same command goes on where it was ended. SLOT is
# another folder in place of .slot, SLOT_SECONDS other seconds than 520 for a part.
# Where megalite is not installed, it comes from .slot/wheels, which pack.sh fills. See docs/gpu.md.
set -euo pipefail
part=${1-}
[ $# -eq 0 ] || shift
case $part in
1 | 2 | 3) chosen=(--part "$part" --seconds "${SLOT_SECONDS:-520}") ;;
all) chosen=(--seconds "${SLOT_SECONDS:-7200}") ;;
*)
    echo "run.sh: error: the first argument is '$part'; it must be a part of the plan: 1, 2, 3 or all" >&2
    exit 2
    ;;
esac
cd "$(dirname "$0")/../../.."
slot=${SLOT:-$PWD/.slot} python=${PYTHON:-python3} began=$SECONDS
keep=${OUT:-$slot/out}
mkdir -p "$slot/tmp" "$slot/home" "$keep"
# Whatever a program writes without being asked goes where it may.
export HOME=$slot/home TMPDIR=$slot/tmp XDG_CACHE_HOME=$slot/cache PYTHONPYCACHEPREFIX=$slot/cache/pyc
export TRITON_CACHE_DIR=$slot/cache/triton TORCHINDUCTOR_CACHE_DIR=$slot/cache/inductor CUDA_CACHE_PATH=$slot/cache/cuda
export HYPOTHESIS_STORAGE_DIRECTORY=$slot/cache/hypothesis MPLCONFIGDIR=$slot/cache/matplotlib
export HF_HOME=$slot/cache/hf HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1

if ! (cd / && "$python" -c 'import megalite' 2>/dev/null); then
    site=$slot/site
    if [ ! -e "$site/installed" ] || [ "$slot/COMMIT" -nt "$site/installed" ]; then
        rm -rf "$site"
        # What this Python has already stays as it is.
        mapfile -t wheels < <(cd "$slot/wheels" && "$python" -c '
import glob, importlib.metadata as m
for wheel in sorted(glob.glob("*.whl")):
    name = wheel.partition("-")[0]
    try:
        m.version(name)
    except m.PackageNotFoundError:
        print(wheel)')
        (cd "$slot/wheels" && "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
            --target "$site" "${wheels[@]}")
        touch "$site/installed"
    fi
    programs() (cd "$1" && find . -name '*.py' -exec sha256sum {} + | sort -k 2)
    for pair in megalite:megalite kernels:megalite_kernels tools:megalite_tools launch:megalite_launch; do
        if ! diff <(programs "${pair%:*}") <(programs "$site/${pair#*:}") >&2; then
            echo "run.sh: error: .slot/wheels has another megalite than this checkout; run tools/bench/slot/pack.sh again" >&2
            exit 2
        fi
    done
    export PYTHONPATH=$site PATH=$site/bin:$PATH
    MEGALITE_COMMIT=$(cat "$slot/COMMIT")
    export MEGALITE_COMMIT
else
    PATH=$(dirname "$(command -v "$python")"):$PATH
    export PATH
fi
echo "ready after $((SECONDS - began)) s" >&2
exec "$python" -m megalite_tools.bench.training.command run --out "$slot/work" --keep "$keep" "${chosen[@]}" "$@"
