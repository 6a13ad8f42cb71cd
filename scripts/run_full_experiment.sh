#!/usr/bin/env bash
# The whole experiment with one command. See --help.
set -euo pipefail

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    cat <<'EOF'
usage: bash scripts/run_full_experiment.sh [--config FILE.yaml] [FLAGS OF run_experiments.py]

Makes the environment if needed, prepares the data, trains every arm and seed, evaluates and compares them, and ends with the
verdict table and the paths of report and plots. The default configs/tiny.yaml takes minutes on two CPU cores. Run it
again after a crash or Ctrl-C: only what is missing is done. Relative paths other than FILE are meant from the repository root.

  bash scripts/run_full_experiment.sh
  bash scripts/run_full_experiment.sh --precision_modes fp32 bf16 bf16_mixed --seeds 1 2 3 4 5
  bash scripts/run_full_experiment.sh --config configs/qwen2.5_math_7b.yaml --gpus 0,1,2,3

environment:
  CONFIG          the config when --config is not given (default: configs/tiny.yaml)
  RLVR_PYTHON, RLVR_VENV, RLVR_VLLM    see scripts/setup_env.sh --help
EOF
    exit 0
fi

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
config="${CONFIG:-configs/tiny.yaml}"
rest=()
while [ $# -gt 0 ]; do
    case "$1" in
        --config) [ $# -ge 2 ] || { echo "run_full_experiment: --config needs a file" >&2; exit 2; }; config="$2"; shift ;;
        --config=*) config="${1#--config=}" ;;
        *) rest+=("$1") ;;
    esac
    shift
done
# The experiment runs in the repository root; a config named from another folder is still found.
if [ -f "$config" ]; then config="$(cd "$(dirname "$config")" && pwd)/$(basename "$config")"; fi
# In the root itself the path stays as it was typed, because it is written into the results.
root="$(dirname "$here")"
exec bash "$here/setup_env.sh" -- run_experiments.py --mode full --config "${config#"$root/"}" ${rest[@]+"${rest[@]}"}
