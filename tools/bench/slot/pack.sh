#!/usr/bin/env bash
# Collects in .slot/wheels what a GPU machine without a network may lack, for Linux on x86-64 and Python 3.12:
# megalite as it is in this checkout, its requirements but PyTorch, and the programs that it is compared with.
set -euo pipefail
cd "$(dirname "$0")/../../.."
python=${PYTHON:-python3}
most=$((48 * 1024 * 1024)) # bytes: a slot may carry 64 MiB with the checkout
packages=(omegaconf==2.4.0 xxhash sentencepiece PyYAML
    liger-kernel==0.8.5 torchtitan==0.2.2 torchao==0.17.0
    datasets torchdata==0.11.0 tyro typeguard docstring_parser dill multiprocess tomli einops
    hypothesis sortedcontainers pytest-timeout pytest-xdist execnet)

rm -rf .slot/wheels
mkdir -p .slot/wheels
# A copy of what git tracks or could: a folder `build` left by another build would end up in the wheel.
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents --no-dereference -t "$source" 2>/dev/null || true
"$python" -m pip wheel --quiet --no-deps --wheel-dir .slot/wheels "$source"
platforms=()
for version in 2_34 2_31 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${version}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
"$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${platforms[@]}" --dest .slot/wheels "${packages[@]}"
git describe --always --dirty --abbrev=12 --exclude='*' >.slot/COMMIT

size=$(cat .slot/wheels/*.whl | wc -c)
echo "$(find .slot/wheels -name '*.whl' | wc -l) wheels, $((size / 1024)) KiB, of commit $(cat .slot/COMMIT)"
if ((size > most)); then
    echo "pack.sh: error: more than $((most / 1024 / 1024)) MiB; leave a package out" >&2
    exit 1
fi
