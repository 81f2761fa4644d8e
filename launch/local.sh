#!/usr/bin/env bash
# Train on this machine under torchrun:  local.sh CONFIG… [key=value…].
# Starts as many ranks as NPROC says, else as there are GPUs, else as the layout needs.
# Expects megalite's commands on the PATH. See docs/launch.md for signals and exit codes.
set -euo pipefail

unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE # of a launcher around this one; torchrun sets them anew

# Bad input is told here, once and at once: torchrun would add a traceback of its own to every rank's message.
gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)
ranks=${NPROC:-${gpus/#0/}}
plan=$(megalite train --check ${ranks:+--world-size "$ranks"} "$@")
ranks=$(awk '$1 == "ranks" { print $2; exit }' <<<"$plan")
if [[ ! $ranks =~ ^[1-9][0-9]*$ || " $* " == *" --check "* ]]; then # --help, or a check only
    printf '%s\n' "$plan"
    exit
fi

cores=$(getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}"
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # torchrun's own store outlives an attempt, with its addresses
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}" # seconds for ranks to save and end

# Signals that torchrun does not handle end it alone and leave its ranks behind. Under nohup, it must not handle SIGHUP.
signals=SIGTERM,SIGINT,SIGQUIT,SIGUSR1,SIGUSR2
[[ -n $(trap -p SIGHUP) ]] || signals+=,SIGHUP
# A signal that comes before a rank can hear it waits until it can (GNU coreutils).
early=(env "--block-signal=TERM,INT,HUP,USR1,USR2")
"${early[@]}" true 2>/dev/null || early=(env)

exec torchrun --standalone --local-addr=localhost --nproc-per-node="$ranks" --max-restarts=0 \
    --signals-to-handle="$signals" --no-python "${early[@]}" megalite train "$@"
