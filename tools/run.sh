#!/usr/bin/env bash
# The tour (`make run`): plan a large job, then plan, launch and measure a small one on this machine.
set -euo pipefail
cd "$(dirname "$0")/.."

# a new numbered folder each time: nothing is overwritten
number=1
while folder=runs/$(printf %03d "$number"); [[ -e "$folder" ]]; do number=$((number + 1)); done
mkdir -p "$folder"

say() { printf '\n# %s\n' "$1"; }
show() { printf '$ %s\n' "$*"; "$@"; }
small=(tiny-llama local-cpu --seq-len 128 --global-batch 32 --precision fp32)

say "How should GPT-3 175B be cut on 128 hosts with 8 A100 each?"
show planner plan gpt3-175b dgx-a100 --nodes 128 --seq-len 2048 --global-batch 1536

say "A plan for this machine, and its training run"
show planner plan "${small[@]}" -o "$folder/here.json"
show planner launch "$folder/here.json" --steps 10 --output "$folder/here"

say "The same model on 8 processes: tensor, pipeline and data parallel at once"
show planner plan "${small[@]}" --gpus 8 --pin tp=2,pp=2,dp=2 -o "$folder/cut.json"
show planner launch "$folder/cut.json" --steps 10 --output "$folder/cut"

say "Plans, metrics and checkpoints are in $folder"
