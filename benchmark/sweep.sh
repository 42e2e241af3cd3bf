#!/usr/bin/env bash
# The commands behind every published number, by ./run.sh sweep. They take hours, and go on where they stopped.
set -euo pipefail
python benchmark/compare.py --out benchmark/results/cpu
for tool in phases ablate scale; do python benchmark/$tool.py --out benchmark/results/$tool; done
for tool in saving steps scans; do python benchmark/$tool.py; done
run="python benchmark/returns.py"
$run ppo_continuous_action --env-ids HalfCheetah-v4 Walker2d-v4 Hopper-v4
$run ppo_continuous_action --modes eager --seeds 1
$run ppo_continuous_action --modes compile eager sbx --seeds 1 --out benchmark/results/race
$run td3_continuous_action --total-timesteps 200000 --modes eager compile compile+bf16
$run sac_continuous_action --total-timesteps 200000 --modes eager compile compile+bf16
$run dqn --env-ids CartPole-v1 --total-timesteps 500000 --seeds $(seq 10)
$run ppo_atari_envpool --env-ids Breakout-v5 --total-timesteps 150000 --modes compile compile+bf16 --seeds $(seq 10)
$run ppo_atari_envpool --env-ids Pong-v5 --total-timesteps 1000000 --modes eager compile compile+bf16 --seeds 1 2
$run ppo_atari_envpool --env-ids Pong-v5 --total-timesteps 1000000 --seeds 3
$run ppo_atari_envpool --env-ids Pong-v5 --total-timesteps 2500000 --modes eager compile compile+bf16 --seeds 1
$run ppo_atari_multigpu --env-ids Pong-v5 --total-timesteps 1000000 --modes "2 ranks" --seeds 1
easy=$(echo popgym:popgym-{RepeatPreviousEasy,PositionOnlyCartPoleEasy}-v0)
hard=$(echo popgym:popgym-{RepeatPreviousMedium,CountRecallEasy,AutoencodeEasy}-v0)
forget="--patch benchmark/ablations/ppo_lru/no-memory.patch"
$run ppo_lru --env-ids $easy --total-timesteps 300000 --seeds 1 2 3 4 5
$run ppo_lru --env-ids $easy --total-timesteps 300000 $forget
$run ppo_lru --env-ids $hard
$run ppo_lru --env-ids $hard --seeds 1 $forget
exec python benchmark/plot.py
