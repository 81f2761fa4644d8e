#!/usr/bin/env bash
# Make the pictures of README.md. Expects megalite's commands on the PATH, and the tokens that `make quickstart` makes.
# Every layout trains the same small model on the same data; one of them is killed and continued in another layout.
set -euo pipefail
cd "$(dirname "$0")/../.."
images=docs/images
layouts=("one process" "tp 2" "dp_shard 2, zero3" "cp 2, ring" "pp 2, zbv" "pp 2, dp_shard 2, tp 2, dualpipev" "tp 2, killed, then pp 2, tp 2")
export OMP_NUM_THREADS=1

megalite show parallel.pp=4 model.layers=8 batch.global=8 parallel.pipeline.schedule=dualpipev --schedule $images/dualpipev.svg

layout() { # NAME OVERRIDES...: trains in this layout
    megalite train quickstart run.name="$1" parallel.dp_shard=1 train.steps=60 schedule.warmup=10 \
        model.sequence_length=256 batch.micro=4 batch.global=8 \
        log.interval=1 log.tensorboard=false eval.steps=0 checkpoint.interval=20 "${@:2}"
}

rm -rf "${layouts[@]/#/runs/}"
layout "${layouts[0]}"
layout "${layouts[1]}" parallel.tp=2
layout "${layouts[2]}" parallel.dp_shard=2 parallel.data.mode=zero3
layout "${layouts[3]}" parallel.cp=2
layout "${layouts[4]}" parallel.pp=2 parallel.pipeline.schedule=zbv batch.micro=2
layout "${layouts[5]}" parallel.pp=2 parallel.dp_shard=2 parallel.tp=2 parallel.data.mode=zero1 \
    parallel.pipeline.schedule=dualpipev batch.micro=1

# Killed after step 30, and continued from the checkpoint of step 20.
layout "${layouts[6]}" parallel.tp=2 &
until grep -qs '"step": 30' "runs/${layouts[6]}/metrics.jsonl"; do sleep 0.1; done
kill -KILL "$(pgrep -P $!)" # the launcher; its ranks end with it
wait || true
layout "${layouts[6]}" parallel.pp=2 parallel.tp=2 batch.micro=2

python -m megalite_tools.experiment.plot_layouts "${layouts[@]/#/runs/}" --out $images/layouts.png
