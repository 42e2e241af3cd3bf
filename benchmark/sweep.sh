#!/usr/bin/env bash
# The commands behind every published number, and the documents anew; ./run.sh sweep runs it, for days.
# Tables of other processors are those of compare.py there.
set -euo pipefail

# speed
compare="python benchmark/compare.py --out benchmark/results"
$compare
for of in "impala --update-epochs=1 --no-norm-adv --gae-lambda=1" "appo --update-epochs=2"; do # as many passes as RLlib makes
  rllib=".venv-rllib/bin/python benchmark/rllib_peer.py ${of%% *} --steps {steps} --seed {seed}"
  $compare ppo_atari_ray --pairs 2 --steps 49152 --modes compile --flags="--num-minibatches=1 ${of#* }" --external "RLlib=$rllib"
done
$compare pqn_device_env --env-id MinAtar/Breakout-v1 --steps 204800 --flags="--num-minibatches 32"
for tool in phases ablate scans efficiency worlds saving steps lower; do python benchmark/$tool.py --out benchmark/results; done

# returns
run="python benchmark/returns.py" jax="--modes compile jax"
$run ppo --env-ids CartPole-v1 Acrobot-v1 --total-timesteps 500000 --seeds $(seq 5)
# LunarLander needs: pip install box2d==2.3.10
$run ppo --env-ids LunarLander-v3 MountainCar-v0 --seeds $(seq 5)
$run ppo_continuous_action --env-ids HalfCheetah-v4 Walker2d-v4 Hopper-v4
for script in ppo_continuous_action ppo_mujoco; do $run $script --env-ids HalfCheetah-v5 --seeds $(seq 5); done
$run ppo_mujoco --env-ids HalfCheetah-v5 --total-timesteps 20000000 --play 10
$run ppo_mujoco --env-ids Hopper-v5 Walker2d-v5 --total-timesteps 5000000 --play 10
for flags in "--num-steps 24 --ent-coef 0.005 --vf-coef 1 --clip-vloss --max-grad-norm 1" \
  "--num-minibatches 32 --update-epochs 4 --learning-rate 3e-4 --ent-coef 0.001" "--update-epochs 10" \
  "--num-minibatches 16 --learning-rate 3e-4"; do
  $run ppo_mujoco --env-ids HalfCheetah-v5 --flags="$flags" --out benchmark/results/sweep
done
hopper="--num-minibatches 4 --learning-rate 1e-3" # the defaults, which the published runs of Hopper do not have
$run ppo_mujoco --env-ids Hopper-v5 --total-timesteps 5000000 --flags="$hopper" --out benchmark/results/sweep
$run td3_mujoco --env-ids HalfCheetah-v5 --total-timesteps 1000000 --play 10
$run td3_continuous_action --env-ids HalfCheetah-v5 --total-timesteps 130000 --play 10
$run td3_continuous_action --env-ids HalfCheetah-v5 --total-timesteps 50000 --modes sb3
$run sac_continuous_action --total-timesteps 100000 --play 10
$run dqn --env-ids CartPole-v1 --total-timesteps 500000 --seeds $(seq 10)
$run dqn --env-ids Acrobot-v1 --total-timesteps 500000
memory="--total-timesteps 300000 --env-ids"
for env in RepeatPreviousEasy RepeatPreviousMedium PositionOnlyCartPoleEasy CountRecallEasy AutoencodeEasy; do
  memory+=" popgym:popgym-$env-v0"
done
for patch in "" "--patch benchmark/ablations/ppo_lru/no-memory.patch"; do $run ppo_lru $memory --seeds $(seq 5) $patch; done
$run ppo_rnn $memory --modes compile sb3-contrib
slices="dqn_lru --env-ids popgym:popgym-PositionOnlyCartPoleEasy-v0 no_velocity:CartPoleNoVel-v1 --total-timesteps 300000"
for patch in "" "--patch benchmark/ablations/dqn_lru/no-memory.patch"; do $run $slices $patch; done
$run dqn_lru --env-ids no_velocity:CartPoleNoVel-v1 --total-timesteps 300000 --seeds $(seq 4 10)
$run ppo_device_env --env-ids MinAtar/Breakout-v1 --total-timesteps 10000000 $jax
$run ppo_device_env --env-ids CartPole-v1 --total-timesteps 2000000 --seeds $(seq 5) $jax
$run pqn_device_env --env-ids MinAtar/Breakout-v1 --total-timesteps 10000000 $jax
# PQN in the Breakout of its authors; purejaxql_peer.py says what it needs
$run pqn_device_env --env-ids MinAtar/Breakout-v1 --total-timesteps 10000000 --patch benchmark/no-sticky-actions.patch
python benchmark/purejaxql_peer.py
$run pqn_device_env --env-ids CartPole-v1 --total-timesteps 2000000 --seeds $(seq 5) $jax
$run a2c_device_env --env-ids CartPole-v1 --total-timesteps 5000000 --seeds $(seq 5) $jax
$run ppo_atari_envpool --env-ids Breakout-v5 --total-timesteps 150000
$run ppo_continuous_action_ray

# the film of README
python leanrl/ppo_mujoco_torchcompile.py --compile --env-id Walker2d-v5 --total-timesteps 3000000 --exp-name film
python leanrl/play.py runs/Walker2d-v5__film__1__*/policy.pt2 --video --env-kwargs '{"camera_name": "track"}'
python benchmark/film.py runs/Walker2d-v5__film__1__*/videos/seed1-episode-0.mp4

exec python benchmark/plot.py
