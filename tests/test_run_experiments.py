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
        for name in ("run_experiments.py", "config.py", "utils_run.py", "utils_data.py", "utils_math_eval.py", "utils_code_eval.py"):
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
                                text=True, env={**os.environ, **env})

    def run(self, *flags: str, mode: str = "full", code: int | None = 0, **env: str) -> str:
        process = self.start(*flags, mode=mode, **env)
        output, _ = process.communicate(timeout=600)  # seconds on an idle machine; only a hang takes this long
        assert code is None or process.returncode == code, f"exit {process.returncode}\n{output}"
        return output

    def behave(self, **plans: list[str]) -> None:
        self.write("behaviour.json", {name.replace("__", "/"): plan for name, plan in plans.items()})

    def lines(self) -> list[dict]:
        """Everything the jobs did so far."""
        path = self.folder / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def events(self, what: str = "start") -> list[dict]:
        return [event for event in self.lines() if event["what"] == what]

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
    assert sorted(p for p in house.folder.rglob("*") if "__pycache__" not in str(p)) == before
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


def test_another_grader_grades_everything_again(finished):
    with open(finished.folder / "utils_math_eval.py", "a") as handle:
        handle.write("# another rule\n")
    finished.run("--seeds", "1")
    assert sorted(finished.started()) == ["base", "eval/bf16_seed1", "eval/fp32_seed1"]


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
    assert len(house.events("from step 5")) == 1  # not from the start
    fresh = House(new_folder(house.folder.with_name("fresh")))
    fresh.run("--seeds", "1", "--precision_modes", "fp32", "--train_args", "num_steps=8", mode="train")
    final = "train_logs/fp32_seed1/final_model/model.safetensors"
    assert fresh.results()[final] == house.results()[final]



# --------------------------------------------------------------------------------------------------------------------
# Failures

def only(state: str, rows: dict[str, dict]) -> set[str]:
    return {name for name, row in rows.items() if row["state"] == state}


def test_failed_training_is_named_and_the_others_finish(house):
    house.behave(train__bf16_seed1=["exit1"])
    output = house.run(code=1)
    rows = house.status()
    assert only("failed", rows) == {"train/bf16_seed1"}
    assert only("blocked", rows) == {"eval/bf16_seed1", "sparsity/bf16_seed1"}
    assert len(only("done", rows)) == len(rows) - 3
    assert rows["train/bf16_seed1"]["exit_code"] == 1 and rows["train/bf16_seed1"]["reason"] == "exit 1, the work failed on purpose"
    assert "failed: train/bf16_seed1: exit 1, the work failed on purpose (log: out/logs/train-bf16_seed1.log)" in output
    assert "VERDICT TABLE of 6 files" in output
    status = house.run(mode="status", code=1)
    assert re.search(r"bf16_seed1 +failed +blocked +blocked", status) and "the work failed on purpose" in status

    house.behave()
    house.forget()
    house.run()
    assert sorted(house.started()) == ["analysis", "eval/bf16_seed1", "sparsity/bf16_seed1", "train/bf16_seed1"]
    assert only("done", house.status()) == set(rows)


def test_retry_gives_a_job_another_chance_but_not_a_wrong_request(house):
    house.behave(train__fp32_seed1=["late_exit1", "ok"], train__bf16_seed1=["exit2"])
    output = house.run("--seeds", "1", "--retries", "2", mode="train", code=2)
    assert house.started().count("train/fp32_seed1") == 2 and house.started().count("train/bf16_seed1") == 1
    rows = house.status()
    assert rows["train/fp32_seed1"]["state"] == "done" and rows["train/fp32_seed1"]["attempts"] == 2
    assert "--flag is wrong on purpose" in output
    lines = (house.folder / "out/train_logs/fp32_seed1/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]


def test_keep_going_false_starts_nothing_after_a_failure(house):
    house.behave(train__fp32_seed1=["exit1"])
    house.run("--keep_going", "false", "--max_parallel", "1", mode="train", code=1)
    assert house.started() == ["data", "train/fp32_seed1"]
    assert only("blocked", house.status()) == {"train/bf16_seed1", "train/fp32_seed2", "train/bf16_seed2"}


def test_failed_base_evaluation_blocks_every_evaluation(house):
    house.behave(base=["traceback"])
    output = house.run("--seeds", "1", code=1)
    assert house.status()["base"]["reason"] == "exit 1, ValueError: a bug on purpose"
    assert "blocked: eval/bf16_seed1: base failed" in output


def test_output_that_is_missing_after_a_good_exit_is_a_failure(house):
    house.behave(eval__fp32_seed1=["no_output"])
    house.run("--seeds", "1", code=1)
    assert "ended well but out/eval_metrics/fp32_seed1.json does not exist" in house.status()["eval/fp32_seed1"]["reason"]


def test_hanging_job_is_stopped_with_its_helpers(house):
    house.behave(train__bf16_seed1=["hang"])
    output = house.run("--seeds", "1", "--stall_minutes", "0.1", mode="train", code=1)
    rows = house.status()
    assert rows["train/bf16_seed1"]["reason"] == "no progress for 0.1 minutes" and rows["train/fp32_seed1"]["state"] == "done"
    log = (house.folder / "out/logs/train-bf16_seed1.log").read_text()
    assert not alive(int(re.search(r"helper (\d+)", log).group(1))), output


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_helper_left_behind_by_a_finished_job_is_ended(house):
    house.behave(eval__bf16_seed1=["leave_helper"])
    house.run("--seeds", "1", mode="full")
    log = (house.folder / "out/logs/eval-bf16_seed1.log").read_text()
    assert not alive(int(re.search(r"helper (\d+)", log).group(1)))


def test_killed_job_is_tried_again_alone(house):
    house.write("standin.json", {"train": 4.0})  # longer than the wait before the second try
    house.behave(train__bf16_seed1=["late_sigkill", "ok"])
    house.run("--retries", "1", "--max_parallel", "2", mode="train")
    log = house.run(mode="status")
    assert re.search(r"bf16_seed1 +done", log)
    begun, ended = house.events(), {(e["job"]): e["time"] for e in house.events("end")}
    again = [e["time"] for e in begun if e["job"] == "train/bf16_seed1"][1]
    for e in begun:
        if e["job"] != "train/bf16_seed1":
            assert ended[e["job"]] < again or e["time"] > ended["train/bf16_seed1"]


def test_memory_limit_is_recognised(house):
    house.behave(train__bf16_seed1=["eat_memory"])
    house.run("--seeds", "1", mode="train", code=1)
    assert house.status()["train/bf16_seed1"]["reason"].startswith("exit 1, out of memory: MemoryError")


@pytest.fixture
def small_cgroup():
    """A cgroup limited to 64 MiB (either version), or skip where none can be made."""
    name = f"rlvr_test_{os.getpid()}"
    for parent, limit in ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max")):
        folder = parent / name
        try:
            folder.mkdir()
            (folder / limit).write_text(str(64 << 20))
        except OSError:
            continue
        yield folder
        time.sleep(0.2)  # the killed process leaves the group a moment after it is reaped
        folder.rmdir()
        return
    pytest.skip("no cgroup can be made here (needs root and a writable cgroup file system)")


def test_kill_by_the_kernels_memory_limit_is_recognised(house, small_cgroup):
    house.behave(train__bf16_seed1=["eat_cgroup"])
    house.run("--seeds", "1", mode="train", code=1, STANDIN_CGROUP=str(small_cgroup))
    assert house.status()["train/bf16_seed1"]["reason"] == "killed for memory by the kernel"
    assert house.status()["train/fp32_seed1"]["state"] == "done"


def mount_tmpfs(folder: Path, options: str) -> None:
    folder.mkdir(exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here (needs root)")


@pytest.fixture
def small_disk(house):
    """The results folder of the house on a file system of 1 MiB."""
    mount_tmpfs(house.folder / "out", "size=1m")
    yield house.folder / "out"
    subprocess.run(["umount", str(house.folder / "out")], check=True)


def test_full_disk_is_named_and_a_rerun_completes(house, small_disk):
    house.behave(train__bf16_seed1=["fill_disk"])
    house.run("--max_parallel", "1", code=1)
    rows = house.status()
    assert rows["train/bf16_seed1"]["reason"].startswith("exit 1, disk full: OSError: [Errno 28] No space left on device")
    assert only("failed", rows) == {"train/bf16_seed1"} and rows["eval/bf16_seed2"]["state"] == "done"
    house.behave()
    house.run()
    assert only("done", house.status()) == set(rows)


def test_disk_that_stays_full_stops_no_orchestrator(house, small_disk):
    house.behave(train__fp32_seed1=["late_fill_disk_and_leave"])
    output = house.run("--max_parallel", "1", "--seeds", "1", code=1)
    assert "train/fp32_seed1: FAILED" in output and "No space left on device" in output
    (small_disk / "train_logs/fp32_seed1/big").unlink()
    house.behave()
    house.run("--seeds", "1")
    assert only("done", house.status()) == set(house.status())


def test_grid_that_cannot_fit_on_the_disk_is_refused(house, small_disk):
    header = json.dumps({"w": {"dtype": "BF16", "shape": [100_000], "data_offsets": [0, 200_000]}}).encode()
    (house.folder / "base_model/model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(200_000))
    # fp32: 3 checkpoints of 12 bytes and a final model of 4; bf16: 3 of 10 and 2; two seeds of each: 144 bytes a parameter
    output = house.run(code=2)
    assert "4 training run(s) will write up to 0.0 GB" not in output
    assert re.search(r"4 training run\(s\) will write up to 14\.\d MB below out, and \d\.\d MB are free; with --prune", output)
    assert house.started() == []


def test_read_only_results_folder_is_refused(house):
    mount_tmpfs(house.folder / "out", "ro")
    try:
        output = house.run(code=2)
    finally:
        subprocess.run(["umount", str(house.folder / "out")], check=True)
    assert "output folder out is not writable: Read-only file system" in output and house.started() == []


def test_prune_keeps_models_and_metrics_only(house):
    house.run("--seeds", "1", "--prune")
    run = house.folder / "out/train_logs/bf16_seed1"
    assert sorted(p.name for p in run.iterdir()) == ["config.json", "final_model", "metrics.jsonl"]
    house.forget()
    house.run("--seeds", "1", "--prune")
    assert house.started() == []


@pytest.mark.parametrize("flags, message", [
    (["--precision_modes", "fp32", "bf61"], "'bf61' is not one of"),
    (["--mode", "ful"], "did you mean full?"),
    (["--seed", "1"], "unknown flag --seed (did you mean --seeds?)"),
    (["--seeds", "1", "1"], "--seeds: 1 is named twice"),
    (["--config", "configs/none.yaml"], "configs/none.yaml does not exist"),
    (["--train_args", "learning_rat=1"], "unknown option learning_rat (did you mean learning_rate?)"),
    (["--train_args", "seed=1"], "seed is set by the grid itself"),
    (["--train_args", "learning_rate=fast"], "expected float, got 'fast'"),
    (["--force", "bf16_sed1"], "no such run or job (did you mean bf16_seed1?)"),
    (["--eval_tasks_config", "configs/none.json"], "configs/none.json does not exist"),
    (["--data_source", "raw"], "--data_source raw needs --raw_dir"),
    (["--gpus", "0,7"], "--gpus 0,7: GPU 7 is not there (nvidia-smi finds: 0, 1, 2, 3)"),
    (["--gpus_per_job", "5"], "only 4 GPU(s) to use"),
    (["--model_name_or_path", "nobody/imaginary-9000B"], "use --config configs/tiny.yaml"),
])
def test_wrong_request_is_one_clear_line_and_starts_nothing(house, four_gpus, flags, message):
    output = house.run(*flags, code=2, **four_gpus)
    assert message in output and output.startswith("error: ") and len(output.splitlines()) == 1
    assert house.started() == [] and not (house.folder / "out").exists()


# --------------------------------------------------------------------------------------------------------------------
# GPUs

def add_gpus(house: House) -> dict[str, str]:
    """Environment in which nvidia-smi lists the GPUs of gpus.txt: 0 to 3."""
    (house.folder / "gpus.txt").write_text("0\n1\n2\n3\n")
    folder = house.folder / "bin"
    folder.mkdir()
    smi = folder / "nvidia-smi"
    smi.write_text('#!/bin/sh\ncase "$1" in *memory*) echo 141000;; *) sed "s/.*/&, GPU-uuid-&/" "$(dirname "$0")/../gpus.txt";; esac\n')
    smi.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture
def four_gpus(house) -> dict[str, str]:
    return add_gpus(house)


def leases(house: House) -> list[tuple[str, float, float]]:
    """(GPU, start, end) of every job that had one."""
    ended = {e["pid"]: e["time"] for e in house.events("end")}
    return [(gpu, e["time"], ended[e["pid"]]) for e in house.events() if e["gpus"] for gpu in e["gpus"].split(",")]


def test_gpus_are_never_shared_and_never_idle_while_work_waits(tmp_path):
    house = House(new_folder(tmp_path / "slow_house"), train=3.0)
    env = add_gpus(house)
    house.run("--seeds", "1", "2", "3", "4", "5", "6", "--gpus", "0,1,2,3", "--max_parallel", "0", mode="train", **env)
    spans = leases(house)
    assert len(spans) == 12 and {gpu for gpu, _, _ in spans} == {"0", "1", "2", "3"}
    for gpu in "0123":
        mine = sorted((start, end) for g, start, end in spans if g == gpu)
        assert len(mine) == 3 and all(a[1] <= b[0] for a, b in zip(mine, mine[1:], strict=False))
    rows = [row for row in house.status().values() if row["stage"] == "train"]
    wall = max(end for _, _, end in spans) - min(start for _, start, _ in spans)
    assert wall < 1.15 * sum(row["seconds"] for row in rows) / 4


def test_lost_gpu_is_not_used_again_and_its_job_moves(house, four_gpus):
    house.behave(train__bf16_seed1=["no_gpu", "ok"])
    output = house.run("--retries", "1", "--max_parallel", "0", mode="train", **four_gpus)
    used = [e["gpus"] for e in house.events() if e["job"] == "train/bf16_seed1"]
    assert len(used) == 2 and used[0] != used[1]
    assert f"GPU {used[0]} is gone" in output
    assert "GPU missing or broken: RuntimeError: CUDA error" in output


def test_without_any_gpu_left_the_waiting_jobs_fail_and_the_grid_ends(house, four_gpus):
    (house.folder / "gpus.txt").write_text("0\n")
    house.behave(train__fp32_seed1=["no_gpu"])
    house.run("--seeds", "1", "--retries", "1", "--max_parallel", "0", mode="train", code=1, **four_gpus)
    assert house.status()["train/bf16_seed1"]["reason"] == "needs 1 GPU(s), and 0 are left"


def test_cpu_jobs_see_no_gpu_and_several_gpus_start_under_torchrun(house, four_gpus):
    output = house.run("--seeds", "1", "--gpus_per_job", "2", "--dry_run", **four_gpus)
    train = next(line for line in output.splitlines() if "train_rlvr.py" in line)
    assert "-m torch.distributed.run --standalone --nproc_per_node=2 train_rlvr.py" in train
    house.run("--seeds", "1", **four_gpus)
    seen = {e["job"]: e["gpus"] for e in house.events()}
    assert seen["sparsity/bf16_seed1"] == "" and seen["analysis"] == "" and seen["train/bf16_seed1"] in "0123"
    house.forget()
    house.run("--seeds", "2", "--gpus", "none", mode="train", **four_gpus)
    assert {e["gpus"] for e in house.events()} == {""}


# --------------------------------------------------------------------------------------------------------------------
# Stopping, and starting again

def wait_for(condition, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def orphans(house: House) -> list[int]:
    """Processes of this house's jobs that are still there."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"RLVR_EXPERIMENT_JOB={house.folder}".encode() in (entry / "environ").read_bytes() and alive(int(entry.name)):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stop_signal_lets_jobs_write_a_checkpoint_and_a_rerun_goes_on(house, number):
    house.write("standin.json", {"train": 5.0})
    grid = house.start("--seeds", "1", mode="train")
    wait_for(lambda: len(list(house.folder.glob("out/train_logs/*/metrics.jsonl"))) == 2 and all(
        p.read_text() for p in house.folder.glob("out/train_logs/*/metrics.jsonl")))
    grid.send_signal(number)
    output, _ = grid.communicate(timeout=60)
    assert grid.returncode == 3, output
    assert len(house.events("interrupted")) == 2 and orphans(house) == []
    assert only("interrupted", house.status()) == {"train/fp32_seed1", "train/bf16_seed1"}
    house.write("standin.json", {"train": 0.1})
    house.run("--seeds", "1", mode="train")
    for path in house.folder.glob("out/train_logs/*/metrics.jsonl"):
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5]


def test_second_stop_signal_ends_everything_at_once(house):
    house.behave(train__fp32_seed1=["hang"], train__bf16_seed1=["hang"])
    grid = house.start("--seeds", "1", mode="train")
    wait_for(lambda: all("helper" in p.read_text() for p in house.folder.glob("out/logs/train-*.log"))
             and len(list(house.folder.glob("out/logs/train-*.log"))) == 2)
    grid.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert grid.poll() is None  # both ignore the gentle stop
    grid.send_signal(signal.SIGINT)
    grid.communicate(timeout=30)
    assert grid.returncode == 3 and orphans(house) == []


def test_only_one_orchestrator_works_on_a_results_folder(house):
    house.write("standin.json", {"train": 20.0})
    first = house.start("--seeds", "1", mode="train")
    wait_for(lambda: "train/fp32_seed1" in house.started())
    output = house.run("--seeds", "1", mode="train", code=2)
    assert f"process {first.pid} on" in output and "another run_experiments.py works on out" in output
    wait_for(lambda: re.search(r"fp32_seed1 +\d/5", house.run("--seeds", "1", mode="status")))
    status = house.run("--seeds", "1", mode="status")
    assert f"at work: process {first.pid}" in status
    first.kill()
    first.communicate()
    status = house.run("--seeds", "1", mode="status")
    assert "no run_experiments.py is at work" in status and re.search(r"fp32_seed1 +interrupted", status)
    house.write("standin.json", {"train": 0.1})
    house.run("--seeds", "1", mode="train")  # the lock of the dead one does not hold it up


def test_jobs_end_when_the_orchestrator_is_killed(house):
    house.write("standin.json", {"train": 20.0})
    grid = house.start("--seeds", "1", mode="train")
    wait_for(lambda: len(house.events("from step 0")) == 2)
    grid.kill()
    grid.communicate()
    wait_for(lambda: orphans(house) == [], seconds=20)
    assert len(house.events("interrupted")) == 2  # asked to stop, with a checkpoint


def test_process_left_behind_by_a_dead_orchestrator_is_ended_before_anything_starts(house):
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                            env={**os.environ, "RLVR_EXPERIMENT_JOB": f"{house.folder / 'out'}::train/bf16_seed1"})
    output = house.run(mode="prepare")
    assert "stopped 1 process(es)" in output and left.wait(timeout=5) == -signal.SIGTERM


def test_grid_killed_at_random_moments_ends_like_an_undisturbed_one(house):
    undisturbed = House(new_folder(house.folder.with_name("undisturbed")), train=1.0)
    undisturbed.run("--seeds", "1", "2")
    house.write("standin.json", {"train": 1.0, "eval": 0.3})
    rng = random.Random(0)
    for _ in range(8):
        seen, wanted = len(house.lines()), rng.randint(1, 12)
        grid = house.start("--seeds", "1", "2", "--max_parallel", "2")
        # by events, not by the clock, so that a busy machine is interrupted in the middle of its work too
        wait_for(lambda: grid.poll() is not None or len(house.lines()) >= seen + wanted)
        time.sleep(rng.uniform(0.0, 0.3))
        grid.kill()
        grid.communicate()
    house.run("--seeds", "1", "2")
    assert orphans(house) == []
    assert house.results() == undisturbed.results()
    assert len(house.started()) > len(undisturbed.started())  # the kills did interrupt something


REAL_GRID = ["--config", "configs/tiny.yaml", "--precision_modes", "fp32", "bf16_storage", "bf16", "--seeds", "1", "2",
             "--train_args", "num_steps=6", "save_every=2", "prompts_per_step=8", "prompts_per_minibatch=4",
             "--eval_args", "tasks=dm_val,gsm8k", "limit=8", "kl_num_samples=1"]
DETERMINISTIC_ARMS = ("fp32", "bf16_storage")
# What two runs of the same command may differ in: clocks, and the folder they were given.
CLOCKS_AND_PLACES = ("run_cost", "samples_dir", "ft_ckpt", "versions")


def real_results(root: Path) -> dict[str, object]:
    """Final weights, metrics and evaluations of the deterministic arms, clocks and places apart."""
    from utils_run import NON_DETERMINISTIC_FIELDS
    found: dict[str, object] = {}
    for arm in DETERMINISTIC_ARMS:
        for seed in (1, 2):
            run = f"{arm}_seed{seed}"
            found[f"{run} weights"] = (root / "train_logs" / run / "final_model/model.safetensors").read_bytes()
            rows = [json.loads(line) for line in (root / "train_logs" / run / "metrics.jsonl").read_text().splitlines()]
            found[f"{run} metrics"] = [{k: v for k, v in row.items() if not k.startswith(NON_DETERMINISTIC_FIELDS)} for row in rows]
            for name in (run, f"{run}_sparsity"):
                data = json.loads((root / "eval_metrics" / f"{name}.json").read_text())
                found[name] = {k: v for k, v in data.items() if k not in CLOCKS_AND_PLACES}
    return found


@pytest.mark.slow
def test_real_grid_killed_at_20_random_moments_ends_bit_for_bit_like_an_undisturbed_one(tmp_path):
    def start(root: Path) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "run_experiments.py", *REAL_GRID, "--results_root", str(root)], cwd=ROOT, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def finish(root: Path) -> None:
        process = start(root)
        output, _ = process.communicate(timeout=1800)
        assert process.returncode == 0, output

    finish(tmp_path / "undisturbed")
    rng = random.Random(0)
    for _ in range(20):
        process = start(tmp_path / "killed")
        time.sleep(rng.uniform(2.0, 20.0))
        process.kill()
        process.communicate()
    finish(tmp_path / "killed")
    expected, found = real_results(tmp_path / "undisturbed"), real_results(tmp_path / "killed")
    assert [name for name in expected if expected[name] != found[name]] == []
