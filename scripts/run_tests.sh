#!/usr/bin/env bash
# Installs what the tests need, then runs them. See --help.
set -euo pipefail

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    cat <<'EOF'
usage: bash scripts/run_tests.sh [PYTEST ARGUMENTS]

Makes the environment if needed (scripts/setup_env.sh --with-dev) and runs pytest in the repository root. Without arguments:
the default suite, minutes on two cores, no network, no GPU. For example:

  bash scripts/run_tests.sh -m slow                    the long ones
  bash scripts/run_tests.sh -m gpu                     those that need an NVIDIA GPU
  bash scripts/run_tests.sh tests/test_utils_kl.py     one file
EOF
    exit 0
fi

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
exec bash "$here/setup_env.sh" --with-dev -- -m pytest "$@"
