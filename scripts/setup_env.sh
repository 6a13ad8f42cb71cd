#!/usr/bin/env bash
# Makes the Python environment of this project, once. See --help.
set -euo pipefail

usage() {
    cat <<'EOF'
usage: bash scripts/setup_env.sh [--with-dev] [--with-vllm | --without-vllm] [-- PYTHON ARGUMENTS]

Makes a virtual environment (.venv in the repository root) and installs the requirements into it. A second call with the
same requirement files and the same Python returns at once. Needs Python 3.11 or newer.

  --with-dev      also requirements-dev.txt (tests and lint)
  --with-vllm     also vllm: the GPU build where nvidia-smi works, else the CPU build
  --without-vllm  no vllm, even where there is an NVIDIA GPU (default: vllm only where nvidia-smi works)
  -- ARGUMENTS    then run the environment's Python with these arguments in the repository root

environment:
  RLVR_PYTHON     the Python to make the environment with (default: the first of python3.11 ... python that is new enough)
  RLVR_VENV       folder of the environment (default: .venv in the repository root)
  RLVR_VLLM       yes, no or auto: what the flags above say, for scripts that call this one (default: auto)
EOF
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${RLVR_VENV:-$root/.venv}"
case "$venv" in /*) ;; *) venv="$PWD/$venv" ;; esac
MIN_MINOR=11            # Python 3.11
INDEX_TIMEOUT_S=5       # how long to wait for PyTorch's own index before the normal one is used
LOG_TAIL_LINES=25       # shown when pip fails
torch_cpu_index="https://download.pytorch.org/whl/cpu"

fail() { echo "setup_env: $1" >&2; exit "${2:-1}"; }

with_dev=no
vllm="${RLVR_VLLM:-auto}"
while [ $# -gt 0 ]; do
    case "$1" in
        --with-dev) with_dev=yes ;;
        --with-vllm) vllm=yes ;;
        --without-vllm) vllm=no ;;
        -h|--help) usage; exit 0 ;;
        --) shift; break ;;
        *) fail "unknown option $1; see --help" 2 ;;
    esac
    shift
done

case "$vllm" in yes|no|auto) ;; *) fail "RLVR_VLLM=$vllm is none of yes, no, auto" 2 ;; esac

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }

# A name on PATH is no proof (a pyenv shim can exist for a version that is switched off), so every candidate is run.
new_enough() { "$1" -c "import sys; sys.exit(sys.version_info < (3, $MIN_MINOR))" >/dev/null 2>&1; }

find_python() {
    if [ -n "${RLVR_PYTHON:-}" ]; then
        new_enough "$RLVR_PYTHON" || fail "RLVR_PYTHON=$RLVR_PYTHON is not a working Python 3.$MIN_MINOR or newer" 2
        echo "$RLVR_PYTHON"
        return
    fi
    local candidate
    for candidate in python3.11 python3.12 python3.13 python3.14 python3 python; do
        if new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    local found
    found="$(python3 --version 2>/dev/null || python --version 2>/dev/null || echo "no Python")"
    fail "Python 3.$MIN_MINOR or newer is needed, found $found. Install it (for example:
  conda create -n rlvr python=3.11 && conda activate rlvr) or name one with RLVR_PYTHON=/path/to/python" 2
}

groups=(requirements)
[ "$with_dev" = yes ] && groups+=(requirements-dev)
if has_gpu; then
    [ "$vllm" != no ] && groups+=(requirements-vllm)
else
    [ "$vllm" = yes ] && groups+=(requirements-vllm-cpu)
fi

# What a finished installation of one requirement file depends on. The Python is the environment's own.
fingerprint() {
    { "$venv/bin/python" -c 'import sys; print(sys.version)'; cat "$root/requirements.txt" "$root/$1.txt"; } | cksum
}
stamp_of() { echo "$venv/.installed-$1"; }
installed() { [ -f "$(stamp_of "$1")" ] && [ "$(cat "$(stamp_of "$1")")" = "$(fingerprint "$1" 2>/dev/null)" ]; }
all_installed() {
    local group
    for group in "${groups[@]}"; do
        installed "$group" || return 1
    done
}
# The end of every good path: say where the environment is, then become the Python that was asked for.
finish() {
    if [ $# -eq 0 ]; then
        echo "environment ready: $venv ($("$venv/bin/python" --version))"
        exit 0
    fi
    cd "$root"
    exec "$venv/bin/python" "$@" 9<&-
}

if all_installed; then
    finish "$@"
fi

# One installation at a time: a second script started meanwhile waits here, then finds everything done.
mkdir -p "$(dirname "$venv")" || fail "cannot make the folder of $venv"
if command -v flock >/dev/null 2>&1; then
    exec 9<"$(dirname "$venv")"
    flock -n 9 || { echo "waiting for another installation ..."; flock 9; }
    if all_installed; then
        finish "$@"
    fi
fi

if [ ! -x "$venv/bin/python" ] || ! new_enough "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python="$(find_python)"
    if [ -d "$venv" ] && [ -n "$(ls -A "$venv")" ] && [ ! -f "$venv/pyvenv.cfg" ]; then
        fail "$venv exists and is no virtual environment; remove it or set RLVR_VENV" 2
    fi
    echo "making $venv with $("$python" --version) ..."
    "$python" -m venv --clear "$venv" \
        || fail "$python -m venv failed; install its venv module (on Debian and Ubuntu: apt install python3-venv)"
fi

log="$venv/setup.log"
: > "$log" || fail "cannot write $log"
pip_install() {  # a line for the user, then pip's arguments
    echo "$1 ..."
    shift
    # fd 9 (the lock) is closed for pip, so that a process it leaves behind cannot hold the lock
    "$venv/bin/python" -m pip install --progress-bar off --disable-pip-version-check "$@" >>"$log" 2>&1 9<&- && return
    tail -n "$LOG_TAIL_LINES" "$log" >&2
    fail "pip install $* failed (full log: $log); nothing is marked as installed, so the next call tries again"
}

# Without an NVIDIA GPU the CPU build of torch is the right one, and smaller by gigabytes. pip prefers it ("2.13.0+cpu" sorts
# above "2.13.0") once it sees PyTorch's own index; where that cannot be reached the normal index serves a build that works too.
extra_index=()
if ! has_gpu && ! installed requirements && "$venv/bin/python" - "$torch_cpu_index/torch/" "$INDEX_TIMEOUT_S" >/dev/null 2>&1 <<'EOF'
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=float(sys.argv[2])).read(1)
EOF
then
    extra_index=(--extra-index-url "$torch_cpu_index")
fi

for group in "${groups[@]}"; do
    installed "$group" && continue
    rm -f "$(stamp_of "$group")"
    pip_install "installing $group.txt (a few minutes the first time)" ${extra_index[@]+"${extra_index[@]}"} -r "$root/$group.txt"
    # An installation that cannot be imported is not done (a missing system library, an interrupted download).
    if [ "$group" = requirements ]; then
        "$venv/bin/python" -c 'import torch, transformers, math_verify, scipy, matplotlib, yaml' >>"$log" 2>&1 9<&- || {
            tail -n "$LOG_TAIL_LINES" "$log" >&2
            fail "the installed packages cannot be imported (full log: $log)"
        }
    fi
    fingerprint "$group" > "$(stamp_of "$group").part"
    mv "$(stamp_of "$group").part" "$(stamp_of "$group")"
done
finish "$@"
