#!/usr/bin/env bash
# Proves and measures the GPU side on a CUDA machine without network: checks first, then speed, minutes each.
#
#   bash benchmark/cuda.sh OUT            # PYTHONPATH holds what requirements/ lists, besides torch >= 2.11 and pytest
#   bash benchmark/cuda.sh OUT tests dqn  # some parts only: tests, learning, ranks (two GPUs), or a script's name
#   PYTEST_ADDOPTS="-k atari" bash benchmark/cuda.sh OUT tests  # some tests only
#
# Leaves OUT/tests.log, OUT/learning.log, OUT/ranks.log, OUT/SCRIPT.json and OUT/SCRIPT.png, and prints the tables last.
set -euo pipefail
out=$(realpath -m "${1:?usage: cuda.sh OUT [PART...]}")
parts=" ${*:2} "
cd "$(dirname "$0")/.."
mkdir -p "$out"
export PYTHONUNBUFFERED=1
wanted() { [[ $parts == "  " || $parts == *" $1 "* ]]; }

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || echo "no GPU: the CPU side only"
gpu=$(nvidia-smi -L 2>/dev/null | head -1 || true)
python3 -c 'import torch, tensordict, gymnasium, sys; print(sys.version.split()[0], torch.__version__, tensordict.__version__, gymnasium.__version__)'

export TORCH_CUDAGRAPH_GC=1 # a graph that is freed while another is captured would break the capture
failed=0 # a part that fails does not keep the rest from being measured
check() { # check PART FILE: what needs a GPU where there is one
  wanted "$1" || return 0
  # -W default: a warning of that machine's libraries is no failure; -s INT: pytest then tells what has failed so far
  timeout -s INT -k 15 560 python3 -m pytest "tests/$2" ${gpu:+-m cuda} -v -W default --show-capture=no -p no:cacheprovider 2>&1 |
    tee "$out/$1.log" || { echo "FAILED: $1" | tee -a "$out/$1.log" && failed=1; }
}
check tests test_cuda.py
check learning test_learning.py
check ranks test_multigpu.py # all skipped on one GPU

speed() { # speed SCRIPT STEPS [FLAGS OF compare.py]
  wanted "$1" || return 0
  timeout 480 python3 benchmark/compare.py "$1" --steps "$2" --no-peers --pairs 1 --slices 1 --out "$out" "${@:3}" 2>"$out/progress.log" ||
    { echo "FAILED: $1" && tail -c 2000 "$out/progress.log" && failed=1; }
}
# Off-policy, learning starts after 1,000 steps.
speed ppo_continuous_action 16384
speed td3_continuous_action 5000
speed sac_continuous_action 4000
speed dqn 40000
if [[ $gpu ]]; then
  speed ppo_atari_envpool 32768 --modes eager compile+cudagraphs{,+groups,+groups+bf16}
  speed ppo_atari_multigpu 16384
else
  speed ppo_atari_envpool 8192 --modes eager compile
  speed ppo_atari_multigpu 8192 --modes "1 rank" "2 ranks"
fi
exit $failed
