#!/usr/bin/env bash
# gpt-95l on 16 x dgx-a100, 128 a100-80gb:
# tp=8,pp=4,dp=4,cp=1,ep=1,etp=1,hsdp=1,mbs=2,interleave=1,zero=1,schedule=1f1b,sp=1,recompute=selective,offload=none,layers_per_stage=24/24/24/23
# In a checkout of Megatron-LM, on every host at once: bash megatron.sh NUMBER ADDRESS PORT OPTIONS...
# with the host's number from 0 to 15, the address of host 0 and a free port there.
# OPTIONS describe model, data and optimizer; those below are what the plan decides.

if (( $# < 3 )); then
  echo "usage: bash megatron.sh NUMBER ADDRESS PORT OPTIONS..." >&2
  exit 2
fi
set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron-LM overlaps by the order of launches
exec torchrun --nnodes=16 --nproc-per-node=8 \
  --node-rank="$1" --master-addr="$2" --master-port="$3" pretrain_gpt.py \
  --tensor-model-parallel-size 8 --sequence-parallel \
  --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout 'Et*24|t*24|t*24|t*23L' \
  --context-parallel-size 1 \
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
  --micro-batch-size 2 --global-batch-size 1536 \
  --seq-length 2048 \
  --recompute-granularity selective \
  --bf16 \
  --attention-dropout 0 --hidden-dropout 0 \
  "${@:4}"
