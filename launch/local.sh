#!/usr/bin/env bash
# Train on this machine under torchrun:  launch/local.sh CONFIG… [key=value…]
# Starts as many ranks as NPROC says, else as there are GPUs, else as the layout needs.
# Expects megalite's commands on the PATH.
set -euo pipefail

# Bad input is told here, once and at once, before every rank would find it.
ranks=${NPROC:-$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)}
if [[ $ranks != 0 ]]; then
    megalite show --world-size "$ranks" "$@" >/dev/null
else
    ranks=$(megalite show "$@" | awk '$1 == "ranks" { print $2 }')
fi

cores=$(getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}"
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # torchrun's own store outlives an attempt, with its addresses
# Signals that torchrun does not handle end it alone and leave its ranks behind.
exec torchrun --standalone --local-addr=localhost --nproc-per-node="$ranks" --max-restarts=0 \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2 --no-python megalite train "$@"
