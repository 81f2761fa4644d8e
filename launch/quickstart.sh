#!/usr/bin/env bash
# Train a small model on the Python sources of this machine's standard library: real text, nothing to download.
# Expects megalite's commands on the PATH. Results are left in data/quickstart and runs/quickstart.
set -euo pipefail
cd "$(dirname "$0")/.."

library=$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
mapfile -t sources < <(find "$library" -name '*.py' -size +1k \
    -not -path '*/site-packages/*' -not -path '*/dist-packages/*' -not -path '*/test/*' -not -path '*/tests/*' | LC_ALL=C sort)
echo "Quick start: ${#sources[@]} Python files of $library"

rm -rf data/quickstart runs/quickstart
mkdir -p data/quickstart

echo; echo "1/5  Train a tokenizer"
megalite-train-tokenizer "${sources[@]}" --out data/quickstart/tokenizer.model --vocab-size 2048 --on-error skip

echo; echo "2/5  Tokenize"
megalite-prepare-data "${sources[@]}" --tokenizer data/quickstart/tokenizer.model --out data/quickstart/python \
    --valid-fraction 0.05 --on-error skip

echo; echo "3/5  Train with two pipeline stages, two data-parallel shards and tensor parallelism of two"
megalite train configs/run/quickstart.yaml "$@"

echo; echo "4/5  Draw the loss curve"
megalite-plot-metrics runs/quickstart

echo; echo "5/5  Write some Python"
megalite-generate runs/quickstart --prompt $'def read_file(path):\n    """' --tokens 80
