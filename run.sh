#!/usr/bin/env bash
# Sets up .venv once, then does what it is told. Needs git, python3 >= 3.11 with venv and headers, and a C++ compiler.
set -euo pipefail
cd "$(dirname "$0")"
usage() {
  cat <<'END'
./run.sh                             measure PPO on HalfCheetah in every mode this machine has: a table and a picture
./run.sh test [PYTEST FLAGS]         the test suite that CI runs
./run.sh train SCRIPT [FLAGS]        train, e.g. ./run.sh train ppo_continuous_action_torchcompile --compile
./run.sh play POLICY.PT2 [FLAGS]     play a trained policy, e.g. ./run.sh play runs/.../policy.pt2 --video
./run.sh compare [SCRIPT...] [FLAGS] measure modes beside Stable-Baselines3 and SBX, e.g. --pairs 5 --steps 81920
./run.sh sweep                       the commands behind every published number (hours), and the documents anew
END
}
die() { echo "error: $*" >&2 && exit 1; }
python=${PYTHON:-python3} log=.venv/setup.log launch=

check_machine() { # one sentence for each thing that is missing, before anything is downloaded
  command -v "$python" >/dev/null || die "no $python found; install Python 3.11 or newer, or set PYTHON to one."
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "$("$python" --version) is too old; install Python 3.11 or newer, or set PYTHON to one."
  "$python" -c 'import ensurepip, venv' 2>/dev/null || die "$python lacks venv; install it (Debian: python3-venv)."
  "$python" -c 'import pathlib, sys, sysconfig; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' ||
    die "$python lacks its C headers, which torch.compile needs; install them (Debian: python3-dev)."
  command -v "${CXX:-g++}" >/dev/null || command -v clang++ >/dev/null ||
    die "no C++ compiler found, which torch.compile needs; install g++ or clang++, or set CXX."
}

install() { # install NAME REQUIREMENTS: once for each content of the requirements, recorded only when it is complete
  local done_mark=.venv/$1-$(cat requirements/*.txt | cksum | cut -d' ' -f1)
  [[ -e $done_mark ]] && return
  if ! compgen -G '.venv/core-*' >/dev/null; then # nothing there, or half-made
    check_machine
    rm -rf .venv
    "$python" -m venv .venv || die "$python could not make the virtual environment .venv."
  fi
  echo "Installing requirements/$2 into .venv, once (log: $log) ..." >&2
  .venv/bin/pip install --disable-pip-version-check -r "requirements/$2" >"$log" 2>&1 ||
    die "the installation failed: $(grep -i '^error' "$log" | head -1 || true) See $log, and try again."
  touch "$done_mark"
}

[[ ${1:-} =~ ^(help|-h|--help)$ ]] && usage && exit
[[ -z ${1:-} || $1 =~ ^(test|train|play|compare|sweep)$ ]] || { usage >&2 && die "no command '$1'."; }
install core requirements-dev.txt
[[ ${1:-} =~ ^(compare|sweep)$ ]] && install peers requirements-peers.txt
export PATH=$PWD/.venv/bin:$PATH
case ${1:-} in
  '') exec python benchmark/compare.py ppo_continuous_action --no-peers --pairs 1 ;;
  test) OMP_NUM_THREADS=1 exec python -m pytest -n 2 --dist worksteal "${@:2}" ;; # two at once, of one thread each
  train)
    [[ -f leanrl/${2:-}.py ]] || die "no script '${2:-}'; there are: $(cd leanrl && echo *.py | sed 's/\.py//g')"
    ranks='import torch; print("--standalone", "--nproc-per-node", torch.cuda.device_count() or 2)'
    [[ $2 == *multigpu ]] && launch="-m torch.distributed.run $(python -c "$ranks")"
    exec python $launch "leanrl/$2.py" "${@:3}"
    ;;
  play) exec python leanrl/play.py "${@:2}" ;;
  compare) exec python benchmark/compare.py "${@:2}" ;;
  sweep)
    for out in cpu "cpu-one-thread ppo_device_env a2c_device_env --threads 1" "cpu-1024-envs a2c_device_env --flags=--num-envs=1024"; do python benchmark/compare.py --out benchmark/results/$out; done
    for tool in phases ablate scale; do python benchmark/$tool.py --out benchmark/results/$tool; done
    for tool in saving steps efficiency; do python benchmark/$tool.py; done; python benchmark/scans.py --out benchmark/results/scans.json
    run="python benchmark/returns.py" modes="--modes eager compile compile+bf16" jax="--modes compile jax"
    $run ppo_continuous_action --env-ids HalfCheetah-v4 Walker2d-v4 Hopper-v4; $run ppo_continuous_action_ray
    $run ppo_continuous_action --modes eager --seeds 1
    $run ppo_continuous_action --modes compile eager sbx --seeds 1 --out benchmark/results/race
    for script in {td3,sac}_continuous_action; do $run $script --total-timesteps 200000 $modes; done
    $run dqn --env-ids CartPole-v1 --total-timesteps 500000 --seeds $(seq 10)
    memory=$(echo --total-timesteps 300000 --env-ids popgym:popgym-{RepeatPrevious{Easy,Medium},{PositionOnlyCartPole,CountRecall,Autoencode}Easy}-v0)
    for patch in "" "--patch benchmark/ablations/ppo_lru/no-memory.patch"; do $run ppo_lru $memory --seeds $(seq 5) $patch; done
    $run ppo_rnn $memory --modes compile sb3-contrib
    slices="dqn_lru --env-ids popgym:popgym-PositionOnlyCartPoleEasy-v0 no_velocity:CartPoleNoVel-v1"
    for patch in "" "--patch benchmark/ablations/dqn_lru/no-memory.patch"; do $run $slices --total-timesteps 300000 $patch; done
    $run ppo_device_env --env-ids MinAtar/Breakout-v1 --total-timesteps 10000000 $jax
    for of in "ppo_device_env --total-timesteps 2000000" "a2c_device_env --total-timesteps 5000000"; do $run $of --env-ids CartPole-v1 --seeds $(seq 5) $jax; done
    $run ppo_atari_envpool --env-ids Breakout-v5 --total-timesteps 150000 --modes compile compile+bf16 --seeds $(seq 10)
    for n in 1000000 2500000; do $run ppo_atari_envpool --env-ids Pong-v5 --total-timesteps $n $modes; done; $run ppo_atari_ray --env-ids Pong-v5
    $run ppo_atari_multigpu --env-ids Pong-v5 --total-timesteps 1000000 --modes "2 ranks" --seeds 1
    exec python benchmark/plot.py ;;
esac
