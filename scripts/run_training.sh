#!/usr/bin/env bash
# One training job. See --help.
set -euo pipefail

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    cat <<'EOF'
usage: bash scripts/run_training.sh [--precision_mode ARM ...] [--seed S ...] [--config FILE.yaml] [FLAGS OF run_experiments.py]

Makes the environment and the data if needed, then trains the policy of each arm and seed named. An interrupted training goes
on from its last checkpoint when the command is given again; a finished one is not repeated.

  bash scripts/run_training.sh --precision_mode bf16 --seed 2
  bash scripts/run_training.sh --precision_mode fp32 bf16 --seed 1 2 3 --train_args learning_rate=3e-5 num_steps=20
  PRECISION_MODE=bf16 SEED=2 CONFIG=configs/smollm2_135m.yaml bash scripts/run_training.sh

environment (flags win):
  PRECISION_MODE  arm or arms (default: fp32)
  SEED            seed or seeds (default: 1)
  CONFIG          config file (default: configs/tiny.yaml)
  RLVR_PYTHON, RLVR_VENV, RLVR_VLLM    see scripts/setup_env.sh --help
EOF
    exit 0
fi

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
config="${CONFIG:-configs/tiny.yaml}"
read -r -a arms <<< "${PRECISION_MODE:-fp32}"
read -r -a seeds <<< "${SEED:-1}"
rest=()
while [ $# -gt 0 ]; do
    case "$1" in
        --config) [ $# -ge 2 ] || { echo "run_training: --config needs a file" >&2; exit 2; }; config="$2"; shift ;;
        --config=*) config="${1#--config=}" ;;
        --precision_mode|--precision_modes) rest+=(--precision_modes) ;;
        --seed|--seeds) rest+=(--seeds) ;;
        *) rest+=("$1") ;;
    esac
    shift
done
# The job runs in the repository root; a config named from another folder is still found.
if [ -f "$config" ]; then config="$(cd "$(dirname "$config")" && pwd)/$(basename "$config")"; fi
root="$(dirname "$here")"
# Of a flag given twice the last one counts, so that flags win over the environment.
exec bash "$here/setup_env.sh" -- run_experiments.py --mode train --config "${config#"$root/"}" \
    --precision_modes "${arms[@]}" --seeds "${seeds[@]}" ${rest[@]+"${rest[@]}"}
