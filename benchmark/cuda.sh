#!/usr/bin/env bash
# Proves and measures the GPU side on a CUDA machine without network: checks first, then speed.
#
#   bash benchmark/cuda.sh OUT             # PYTHONPATH holds what requirements/ lists, besides torch >= 2.11 and pytest
#   bash benchmark/cuda.sh OUT tests-dqn speed-dqn   # some parts only, so that each call stays below a time limit
#
# Parts: tests-X (modes compute the same), resume-X (a run that was killed goes on), learning-X (they learn) and speed-X,
# where X is a script with a twin, but not on Ray; tests-others; tests-ray (both on Ray); tests-ranks and
# speed-ppo_atari_multigpu (two GPUs). A part takes at most 9 minutes.
#
# Leaves OUT/PART.log, OUT/speed.json and OUT/SCRIPT.png, and prints the tables last.
set -euo pipefail
out=$(realpath -m "${1:?usage: cuda.sh OUT [PART...]}")
parts=" ${*:2} "
cd "$(dirname "$0")/.."
mkdir -p "$out"
export PYTHONUNBUFFERED=1
known=" "
wanted() { known+="$1 " && [[ $parts == "  " || $parts == *" $1 "* ]]; }

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || echo "no GPU: the CPU side only"
gpu=$(nvidia-smi -L 2>/dev/null | head -1 || true)
python3 -c 'import torch, tensordict, gymnasium, sys; print(sys.version.split()[0], torch.__version__, tensordict.__version__, gymnasium.__version__)'

export TORCH_CUDAGRAPH_GC=1 # a graph that is freed while another is captured would break the capture
failed=0 # a part that fails does not keep the rest from being measured
# -W default: a warning of that machine's libraries is no failure; -s INT: pytest then tells what has failed so far
tests() { timeout -s INT -k 15 $((until - SECONDS)) python3 -m pytest -W default --show-capture=no -p no:cacheprovider "$@" 2>&1; }
check() { # check PART FILE [EXPRESSION]: what needs a GPU where there is one
  wanted "$1" || return 0
  local until=$((SECONDS + 540)) test
  tests "tests/$2" ${gpu:+-m cuda} -k "${3:-test}" -v | tee "$out/$1.log" && return
  echo "FAILED: $1" | tee -a "$out/$1.log"
  failed=1
  # a capture that fails can spoil all that follows in its process: so each failed test, up to five, runs again, alone
  sed -n 's/^FAILED \(.*\)/\1/p' "$out/$1.log" | sed 's/ - .*//' | grep :: | head -5 | while read -r test; do
    ((SECONDS < until)) || break
    { echo "alone: $test" && tests "$test" -q; } | tee -a "$out/$1.log" || true
  done || true
}
scripts="dqn ppo sac_continuous_action td3_continuous_action ppo_continuous_action ppo_atari_envpool"
scripts+=" dqn_lru ppo_lru ppo_rnn ppo_device_env a2c_device_env pqn_device_env ppo_mujoco td3_mujoco"
for script in $scripts; do check "tests-$script" test_cuda.py "${script}_torchcompile"; done
check tests-others test_cuda.py "not (${scripts// /_torchcompile or }_torchcompile)"
check tests-ray test_ray.py
for script in $scripts; do check "resume-$script" test_checkpoints.py "${script}_torchcompile"; done
for script in $scripts; do check "learning-$script" test_learning.py "[$script-"; done
check tests-ranks test_multigpu.py # all skipped on one GPU

speed() { # speed SCRIPT [FLAGS OF compare.py]: each mode for ten seconds after its warm-up, ranks for enough steps
  wanted "speed-$1" || return 0
  timeout 540 python3 benchmark/compare.py "$1" --no-peers --pairs 1 --slices 1 --out "$out" "${@:2}" 2>&1 |
    tee "$out/speed-$1.log" || { echo "FAILED: speed-$1" && failed=1; }
}
clock=(--steps 1000000 --seconds 10)
speed ppo "${clock[@]}"
speed ppo_continuous_action "${clock[@]}"
speed td3_continuous_action "${clock[@]}"
speed sac_continuous_action "${clock[@]}"
# few random actions from the start: by the clock, a slow mode would end while most of its actions are random
for script in dqn dqn_lru; do speed $script "${clock[@]}" --flags="--start-e 0.05"; done
for script in ppo_lru ppo_rnn; do speed $script "${clock[@]}"; done
for script in ppo_device_env a2c_device_env pqn_device_env {ppo,td3}_mujoco; do speed $script --steps 1000000000 --seconds 10; done
if [[ $gpu ]]; then
  speed ppo_atari_envpool "${clock[@]}" --modes eager compile compile+cudagraphs{,+groups,+groups+bf16}
  speed ppo_atari_multigpu --steps 262144 # ranks would not end at the same report
else
  speed ppo_atari_envpool "${clock[@]}" --modes eager compile
  speed ppo_atari_multigpu --steps 8192 --modes "1 rank" "2 ranks"
fi
for part in "${@:2}"; do [[ $known == *" $part "* ]] || { echo "error: no part $part; there are:$known" && failed=1; }; done
exit $failed
