#!/usr/bin/env bash
# Sets up .venv once, then does what it is told. Needs git, Python 3.11 or 3.12 with venv and headers, and a C++ compiler.
set -euo pipefail
from=$PWD
cd "$(dirname "$0")"
root=$PWD
usage() {
  cat <<'END'
./run.sh                             measure PPO on HalfCheetah in every mode this machine has: a table and a picture
./run.sh test [PYTEST FLAGS]         the test suite that CI runs
./run.sh train SCRIPT [FLAGS]        train, e.g. ./run.sh train ppo_continuous_action_torchcompile --compile
./run.sh play POLICY.PT2 [FLAGS]     play a trained policy, e.g. ./run.sh play runs/.../policy.pt2 --video
./run.sh compare [SCRIPT...] [FLAGS] measure modes beside Stable-Baselines3 and SBX, e.g. --pairs 5 --steps 81920
./run.sh rllib                       make .venv-rllib, for the comparison of the scripts on Ray with RLlib
./run.sh sweep                       the commands behind every published number (days), and the documents anew
END
}
die() { echo "error: $*" >&2 && exit 1; }
python=${PYTHON:-python3} launch=

check_machine() { # one sentence for each thing that is missing, before anything is downloaded
  command -v "$python" >/dev/null || die "no $python found; install Python 3.11 or 3.12, or set PYTHON to one."
  "$python" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' ||
    die "$("$python" --version) does not fit; install Python 3.11 or 3.12, or set PYTHON to one."
  "$python" -c 'import ensurepip, venv' 2>/dev/null || die "$python lacks venv; install it (Debian: python3-venv)."
  "$python" -c 'import pathlib, sys, sysconfig; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' ||
    die "$python lacks its C headers, which torch.compile needs; install them (Debian: python3-dev)."
  command -v "${CXX:-g++}" >/dev/null || command -v clang++ >/dev/null ||
    die "no C++ compiler found, which torch.compile needs; install g++ or clang++, or set CXX."
}

install() { # install NAME REQUIREMENTS [VENV]: once for each content of the requirements, recorded when it is complete
  local venv=${3:-.venv} log=${3:-.venv}/setup.log done_mark
  done_mark=$venv/$1-$(cat requirements/*.txt | cksum | cut -d' ' -f1)
  [[ -e $done_mark ]] && return
  if ! compgen -G "$venv/core-*" >/dev/null; then # nothing there, or half-made
    check_machine
    rm -rf "$venv"
    "$python" -m venv "$venv" || die "$python could not make the virtual environment $venv."
  fi
  echo "Installing requirements/$2 into $venv, once (log: $log) ..." >&2
  "$venv/bin/pip" install --disable-pip-version-check -r "requirements/$2" >"$log" 2>&1 ||
    die "the installation failed: $(grep -i '^error' "$log" | head -1 || true) See $log, and try again."
  touch "$done_mark"
}

[[ ${1:-} =~ ^(help|-h|--help)$ ]] && usage && exit
[[ -z ${1:-} || $1 =~ ^(test|train|play|compare|rllib|sweep)$ ]] || { usage >&2 && die "no command '$1'."; }
[[ ${1:-} == rllib ]] || install core requirements-dev.txt
[[ ${1:-} =~ ^(compare|sweep)$ && " $* " != *" --no-peers "* ]] && install peers requirements-peers.txt
[[ ${1:-} =~ ^(rllib|sweep)$ ]] && install core requirements-rllib.txt .venv-rllib
export PATH=$PWD/.venv/bin:$PATH
if [[ ${1:-} != test ]]; then # settings of a process: docs/faq.md
  [[ -e /dev/nvidiactl ]] || export TORCHINDUCTOR_CPP_WRAPPER=1 TORCHINDUCTOR_CPP_USE_DECOMPOSE_TANH=1
  export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-5000} MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=2147483647
fi
case ${1:-} in
  '') exec python benchmark/compare.py ppo_continuous_action --no-peers --pairs 1 ;;
  test) OMP_NUM_THREADS=1 exec python -m pytest -n 2 --dist worksteal "${@:2}" ;; # two at once, of one thread each
  train)
    scripts=$(basename -s .py leanrl/*.py | grep -vx play) name=$(basename "${2:-}" .py)
    near='import difflib, sys; print(*difflib.get_close_matches(sys.argv[1], sys.argv[2:], 3, 0), sep=", ")'
    grep -qx -- "$name" <<<"$scripts" ||
      die "no script '$name'; the nearest: $(python -c "$near" "$name" $scripts). There are:" $scripts
    ranks='import torch; print("--standalone", "--nproc-per-node", torch.cuda.device_count() or 2)'
    [[ $name =~ ^(dqn|ppo_continuous|ppo_mujoco|ppo_rnn|ppo_torch|ppo$) ]] && export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # small layers: docs/faq.md
    [[ $name == *multigpu ]] && launch="-m torch.distributed.run $(python -c "$ranks")"
    cd "$from" && exec python $launch "$root/leanrl/$name.py" "${@:3}"
    ;;
  play) cd "$from" && exec python "$root/leanrl/play.py" "${@:2}" ;;
  compare) exec python benchmark/compare.py "${@:2}" ;;
  sweep) exec bash benchmark/sweep.sh ;;
esac
