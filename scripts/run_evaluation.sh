#!/usr/bin/env bash
# One evaluation job. See --help.
set -euo pipefail

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    cat <<'EOF'
usage: bash scripts/run_evaluation.sh [--precision_mode ARM ...] [--seed S ...] [--config FILE.yaml] [FLAGS OF run_experiments.py]

Makes the environment if needed, then measures the trained policy of each arm and seed named (scripts/run_training.sh makes
it) against the base policy, which is evaluated once and kept. A finished evaluation is not repeated.

  bash scripts/run_evaluation.sh --precision_mode bf16 --seed 2
  bash scripts/run_evaluation.sh --precision_mode fp32 bf16 --seed 1 2 3 --eval_args limit=64
  PRECISION_MODE=bf16 SEED=2 CONFIG=configs/smollm2_135m.yaml bash scripts/run_evaluation.sh

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
        --config) [ $# -ge 2 ] || { echo "run_evaluation: --config needs a file" >&2; exit 2; }; config="$2"; shift ;;
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
exec bash "$here/setup_env.sh" -- run_experiments.py --mode eval --config "${config#"$root/"}" \
    --precision_modes "${arms[@]}" --seeds "${seeds[@]}" ${rest[@]+"${rest[@]}"}
