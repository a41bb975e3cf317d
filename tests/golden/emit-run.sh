#!/usr/bin/env bash
# gpt-95l on 16 x dgx-a100, 128 a100-80gb:
# tp=8,pp=4,dp=4,cp=1,ep=1,etp=1,hsdp=1,mbs=2,interleave=1,zero=1,schedule=1f1b,sp=1,recompute=selective,offload=none,layers_per_stage=3*24/23
# For the planner's own trainer.
# On every host at once: bash run.sh NUMBER ADDRESS [PORT], with its number from 0 to 15,
# the address of host 0, and a port that is free there. All hosts see this folder.

if (( $# < 2 )); then
  echo "usage: bash run.sh NUMBER ADDRESS [PORT]" >&2
  exit 2
fi
set -euo pipefail
cd "$(dirname "$0")"
ranks=8
exec torchrun --nnodes=16 --nproc-per-node="$ranks" --node-rank="$1" \
  --master-addr="$2" --master-port="${3:-29500}" \
  --max-restarts=0 -m planner.trainer plan.json --output=run '--data=/data/a b.txt' --steps=500
