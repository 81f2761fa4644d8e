#!/usr/bin/env bash
# Train a small model on the Python sources of this machine's standard library: real text, nothing to download.
# Most of the training is done by two processes; eight continue it in another layout. Arguments are overrides of both.
# Expects megalite's commands on the PATH. Results are left in data/quickstart and runs/quickstart.
set -euo pipefail
cd "$(dirname "$0")/.."
steps=${STEPS:-900}

# shellcheck source=launch/python_text.sh
source launch/python_text.sh
echo "Quick start: ${#sources[@]} Python files of $library"

rm -rf data/quickstart runs/quickstart
mkdir -p data/quickstart

echo; echo "1/6  Train a tokenizer"
megalite-train-tokenizer "${sources[@]}" --out data/quickstart/tokenizer.model --vocab-size 2048 --on-error skip

echo; echo "2/6  Tokenize"
megalite-prepare-data "${sources[@]}" --tokenizer data/quickstart/tokenizer.model --out data/quickstart/python \
    --valid-fraction 0.05 --on-error skip

echo; echo "3/6  Train on two processes, each with a copy of the model"
megalite train configs/run/quickstart.yaml "$@" train.steps=$((steps - steps / 12))

echo; echo "4/6  Go on with eight: two pipeline stages, two data-parallel ranks, tensor parallelism of two"
megalite train configs/run/quickstart.yaml "$@" train.steps="$steps" parallel.pp=2 parallel.tp=2 batch.micro=4

echo; echo "5/6  Draw the loss curve, with a mark where the layout changed"
megalite-plot-metrics runs/quickstart

echo; echo "6/6  Write some Python"
megalite-generate runs/quickstart --prompt $'def read_file(path):\n    ' --tokens 100 --temperature 0.5 --top-k 20 --seed 1
