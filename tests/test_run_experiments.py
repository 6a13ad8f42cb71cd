"""run_experiments.py: the graph, resuming, leases, failures and stopping, with stand-ins for the child scripts.

A "house" is a folder with the real run_experiments.py and stand-in children (standin_job.py), so that no test needs a model.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CHILDREN = ("train_rlvr.py", "eval_policy.py", "utils_bf16_sparsity.py", "analyze_results.py", "scripts/prepare_data.py",
            "scripts/prepare_model.py")
TASK = {"task_type": "math", "num_samples": 2, "prompt_template": "plain"}
CONFIG = {"study": "grid", "results_root": "out", "model_name_or_path": "base_model", "num_threads": 1,
          "train_dataset_path": "problems/train.json", "eval_tasks_config": "configs/tasks.json",
          "experiment": {"data_dir": "problems", "data_source": "sample", "seeds": [1, 2], "max_parallel": 4, "retries": 0},
          "train": {"num_steps": 5, "save_every": 1}}


class House:
    """A folder with run_experiments.py and stand-ins, and ways to run it and to look at what happened."""

    def __init__(self, folder: Path, **seconds: float) -> None:
        self.folder = folder
        for name in ("run_experiments.py", "config.py", "utils_run.py", "utils_data.py"):
            shutil.copy(ROOT / name, folder)
        (folder / "scripts").mkdir()
        for name in CHILDREN:
            shutil.copy(ROOT / "tests" / "standin_job.py", folder / name)
        (folder / "configs").mkdir()
        self.write("configs/tasks.json", [{"name": "val", "path": "problems/val.json", "on_task": True, **TASK},
                                          {"name": "other", "path": "problems/other.json", "on_task": False, **TASK}])
        self.write("configs/grid.yaml", CONFIG)
        self.write("standin.json", {"train": 0.1, **seconds})
        base = folder / "base_model"
        base.mkdir()
        header = b'{"w":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]}}'
        (base / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
        (base / "config.json").write_text("{}")

    def write(self, name: str, value) -> None:
        (self.folder / name).write_text(json.dumps(value))

    def command(self, *flags: str, mode: str = "full") -> list[str]:
        return [sys.executable, "run_experiments.py", "--mode", mode, "--config", "configs/grid.yaml", *flags]

    def start(self, *flags: str, mode: str = "full", **env: str) -> subprocess.Popen:
        return subprocess.Popen(self.command(*flags, mode=mode), cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                text=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **env})

    def run(self, *flags: str, mode: str = "full", code: int | None = 0, **env: str) -> str:
        process = self.start(*flags, mode=mode, **env)
        output, _ = process.communicate(timeout=120)
        assert code is None or process.returncode == code, f"exit {process.returncode}\n{output}"
        return output

    def behave(self, **plans: list[str]) -> None:
        self.write("behaviour.json", {name.replace("__", "/"): plan for name, plan in plans.items()})

    def events(self, what: str = "start") -> list[dict]:
        path = self.folder / "events.jsonl"
        return [e for e in map(json.loads, path.read_text().splitlines()) if e["what"] == what] if path.exists() else []

    def started(self) -> list[str]:
        return [e["job"] for e in self.events()]

    def forget(self) -> None:
        (self.folder / "events.jsonl").unlink(missing_ok=True)

    def status(self) -> dict[str, dict]:
        return {row["job"]: row for row in json.loads((self.folder / "out" / "status.json").read_text())["jobs"]}

    def results(self) -> dict[str, bytes]:
        """Everything that a run computes, by path: models, metrics, evaluations; no records, logs or clocks."""
        root = self.folder / "out"
        files = [*root.glob("train_logs/*/final_model/*"), *root.glob("train_logs/*/metrics.jsonl"), *root.glob("eval_metrics/*"),
                 *root.glob("analysis/*")]
        return {str(path.relative_to(root)): path.read_bytes() for path in sorted(files)}


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(new_folder(tmp_path / "house"))


@pytest.fixture(scope="module")
def finished_once(tmp_path_factory) -> Path:
    """A house whose seed 1 is finished, made once; tests get copies."""
    house = House(new_folder(tmp_path_factory.mktemp("finished") / "house"))
    house.run("--seeds", "1")
    house.forget()
    return house.folder


@pytest.fixture
def finished(finished_once: Path, tmp_path: Path) -> House:
    house = House.__new__(House)
    house.folder = Path(shutil.copytree(finished_once, tmp_path / "house"))
    return house


def new_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


RUNS = ("fp32_seed1", "bf16_seed1", "fp32_seed2", "bf16_seed2")


# --------------------------------------------------------------------------------------------------------------------
# The graph

def test_full_grid_runs_every_job_once_in_the_order_of_its_inputs(house):
    output = house.run()
    started = house.started()
    expected = ["data", "base", "analysis"] + [f"{stage}/{run}" for stage in ("train", "eval", "sparsity") for run in RUNS]
    assert sorted(started) == sorted(expected)
    ended = {e["job"]: e["time"] for e in house.events("end")}
    begun = {e["job"]: e["time"] for e in house.events()}
    for run in RUNS:
        assert begun[f"train/{run}"] > ended["data"]
        assert begun[f"eval/{run}"] > max(ended["base"], ended[f"train/{run}"])
        assert begun[f"sparsity/{run}"] > ended[f"train/{run}"]
        assert begun["analysis"] > max(ended[f"eval/{run}"], ended[f"sparsity/{run}"])
    assert "VERDICT TABLE of 8 files" in output
    assert {row["state"] for row in house.status().values()} == {"done"}
    assert {e["threads"] for e in house.events()} == {"1"}
    assert all("--config" in e["argv"] for e in house.events())


def test_second_call_starts_nothing(finished):
    output = finished.run("--seeds", "1")
    assert finished.started() == []
    assert "VERDICT TABLE of 4 files" in output


@pytest.mark.parametrize("lost, redone", [
    ("out/eval_metrics/bf16_seed1.json", ["eval/bf16_seed1"]),
    ("out/train_logs/fp32_seed1/final_model/model.safetensors", ["train/fp32_seed1"]),
    ("out/eval_metrics/base.json", ["base"]),
    ("out/analysis/full_analysis.json", ["analysis"]),
    ("problems/val.json", ["data"]),
])
def test_rerun_makes_only_what_is_missing(finished, lost, redone):
    before = finished.results()
    (finished.folder / lost).unlink()
    finished.run("--seeds", "1")
    assert finished.started() == redone
    assert finished.results() == before


@pytest.mark.parametrize("path, job", [("out/eval_metrics/bf16_seed1.json", "eval/bf16_seed1"),
                                       ("out/train_logs/bf16_seed1/final_model/model.safetensors", "train/bf16_seed1")])
def test_corrupt_output_is_made_again(finished, path, job):
    before = finished.results()
    whole = (finished.folder / path).read_bytes()
    (finished.folder / path).write_bytes(whole[:len(whole) // 2])
    finished.run("--seeds", "1")
    assert finished.started() == [job]
    assert finished.results() == before


def test_modes_run_their_part_of_the_graph(house):
    house.run(mode="prepare")
    assert house.started() == ["data"]
    output = house.run(mode="eval", code=2)
    assert "train/fp32_seed1 is not finished; --mode train makes it" in output
    house.run("--seeds", "1", mode="train")
    house.run("--seeds", "1", mode="eval")
    house.run("--seeds", "1", mode="sparsity")
    assert sorted(house.started()) == sorted(["data", "base"] + [f"{s}/{r}" for s in ("train", "eval", "sparsity") for r in RUNS[:2]])
    assert "VERDICT TABLE of 4 files" in house.run(mode="analyze")


def test_new_seed_is_added_to_a_finished_grid(finished):
    finished.run("--seeds", "1", "2")
    assert sorted(finished.started()) == sorted(["analysis"] + [f"{s}/{r}" for s in ("train", "eval", "sparsity") for r in RUNS[2:]])


def test_replicates_and_overridden_cells_name_the_runs(house):
    house.run("--seeds", "1", "--replicates", "0", "1", "--precision_modes", "fp32", "--train_args", "update_rounding=nearest",
              "optimizer_state_dtype=bfloat16", mode="train")
    assert {p.name for p in (house.folder / "out/train_logs").iterdir()} == {
        "fp32+optimizer_state_dtype-bfloat16_seed1", "fp32+optimizer_state_dtype-bfloat16_seed1_rep1"}
    replicate = next(e for e in house.events() if e["job"].endswith("_rep1"))
    assert replicate["argv"][replicate["argv"].index("--noise_replicate") + 1] == "1"


def test_flags_of_the_grid_reach_the_children(house):
    house.run("--seeds", "1", "--results_root", "elsewhere", "--train_args", "learning_rate=3e-5", "num_steps=3", "--eval_args", "limit=7")
    train = next(e["argv"] for e in house.events() if e["job"] == "train/bf16_seed1")
    assert train[train.index("--learning_rate") + 1] == "3e-5" and train[train.index("--results_root") + 1] == "elsewhere"
    evaluation = next(e["argv"] for e in house.events() if e["job"] == "eval/bf16_seed1")
    assert evaluation[evaluation.index("--limit") + 1] == "7"
    assert (house.folder / "elsewhere/train_logs/bf16_seed1/final_model").is_dir() and not (house.folder / "out").exists()


def test_dry_run_prints_commands_that_work_when_pasted_and_writes_nothing(house):
    before = sorted(house.folder.rglob("*"))
    output = house.run("--dry_run", "--seeds", "1")
    assert sorted(house.folder.rglob("*")) == before
    commands = [line for line in output.splitlines() if not line.startswith("#")]
    for line in commands[1:]:  # the first one is cd
        subprocess.run(["bash", "-c", line], cwd=house.folder, check=True, capture_output=True)
    assert sorted(house.started()) == sorted(["data", "base", "analysis"] + [f"{s}/{r}" for s in ("train", "eval", "sparsity")
                                                                           for r in RUNS[:2]])
    assert shlex.split(commands[0]) == ["cd", str(house.folder)]


# --------------------------------------------------------------------------------------------------------------------
# Settings

def test_changed_settings_are_shown_and_neither_used_nor_overwritten(finished):
    before = finished.results()
    output = finished.run("--seeds", "1", "--train_args", "learning_rate=3e-5", code=2)
    assert "learning_rate 1e-06 -> 3e-05" in output and "--force stale" in output
    output = finished.run("--seeds", "1", "--eval_args", "limit=7", code=2)
    assert "eval/bf16_seed1: limit 0 -> 7" in output
    assert finished.started() == [] and finished.results() == before


def test_settings_that_change_no_result_do_not_make_it_stale(finished):
    finished.run("--seeds", "1", "--train_args", "save_every=3", "keep_checkpoints=1", "--eval_args", "grading_workers=4")
    assert finished.started() == []


def test_changed_training_data_make_the_runs_stale(finished):
    path = finished.folder / "problems/train.json"
    path.write_text(path.read_text().replace("1 + 1", "2 + 0"))
    assert "train_dataset_sha256" in finished.run("--seeds", "1", code=2)


def test_a_result_without_a_record_is_not_taken_for_this_grid(finished):
    (finished.folder / "out/jobs/eval-bf16_seed1.json").unlink()
    assert "no record says which settings made it" in finished.run("--seeds", "1", code=2)


def test_force_makes_one_run_anew(finished):
    finished.run("--seeds", "1", "--force", "bf16_seed1")
    assert sorted(finished.started()) == ["eval/bf16_seed1", "sparsity/bf16_seed1", "train/bf16_seed1"]


def test_force_stale_makes_anew_what_has_other_settings(finished):
    finished.run("--seeds", "1", "--force", "stale", "--train_args", "learning_rate=3e-5")
    assert set(finished.started()) == {"analysis"} | {f"{s}/{r}" for s in ("train", "eval", "sparsity") for r in RUNS[:2]}
    assert json.loads((finished.folder / "out/train_logs/bf16_seed1/config.json").read_text())["learning_rate"] == 3e-5


def test_more_steps_go_on_from_the_checkpoint_when_forced(house):
    house.run("--seeds", "1", "--precision_modes", "fp32", mode="train")
    assert "num_steps 5 -> 8" in house.run("--seeds", "1", "--precision_modes", "fp32", "--train_args", "num_steps=8", mode="train", code=2)
    house.run("--seeds", "1", "--precision_modes", "fp32", "--train_args", "num_steps=8", "--force", "fp32_seed1", mode="train")
    lines = (house.folder / "out/train_logs/fp32_seed1/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 9))
    fresh = House(new_folder(house.folder.with_name("fresh")))
    fresh.run("--seeds", "1", "--precision_modes", "fp32", "--train_args", "num_steps=8", mode="train")
    final = "train_logs/fp32_seed1/final_model/model.safetensors"
    assert fresh.results()[final] == house.results()[final]

