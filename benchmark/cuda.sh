#!/usr/bin/env bash
# Proves and measures the GPU side on a CUDA machine without network: checks first, then speed, in under 8 minutes.
#
#   bash benchmark/cuda.sh OUT        # PYTHONPATH holds what requirements/ lists, besides torch >= 2.11 and pytest
#
# Leaves OUT/tests.log, OUT/SCRIPT.json and OUT/SCRIPT.png, and prints the tables last.
set -euo pipefail
out=$(realpath -m "${1:?usage: cuda.sh OUT}")
cd "$(dirname "$0")/.."
mkdir -p "$out"
export PYTHONUNBUFFERED=1

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || echo "no GPU: the CPU side only"
python3 -c 'import torch, tensordict, gymnasium, sys; print(sys.version.split()[0], torch.__version__, tensordict.__version__, gymnasium.__version__)'

timeout 200 python3 -m pytest tests/test_cuda.py -q --show-capture=no -p no:cacheprovider 2>&1 | tee "$out/tests.log"

# PPO in 1,000s of steps; off-policy, learning starts after 1,000 of them.
for run in ppo_continuous_action:16384 ppo_atari_envpool:32768 td3_continuous_action:5000 sac_continuous_action:4000 dqn:40000; do
  timeout 100 python3 benchmark/compare.py "${run%:*}" --no-peers --pairs 1 --steps "${run#*:}" --out "$out" 2>"$out/progress.log" ||
    { tail -c 2000 "$out/progress.log" && exit 1; }
done
