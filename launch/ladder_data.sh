#!/usr/bin/env bash
# The data of configs/experiment/ladder_5x4.yaml: the Python sources of this machine's standard library as 6 million tokens
# of a small vocabulary. Expects megalite's commands on the PATH. Leaves data/ladder.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=launch/python_text.sh
source launch/python_text.sh

rm -rf data/ladder
mkdir -p data/ladder
megalite-train-tokenizer "${sources[@]}" --out data/ladder/tokenizer.model --vocab-size 512 --on-error skip
megalite-prepare-data "${sources[@]}" --tokenizer data/ladder/tokenizer.model --out data/ladder/python \
    --valid-fraction 0.05 --on-error skip
