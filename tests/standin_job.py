"""Stands in for every child script of run_experiments.py; the tests copy it under each script's name.

It takes the same flags, writes files of the same form, resumes from a checkpoint and stops on SIGTERM like the real ones, in
milliseconds. A file ``behaviour.json`` beside it makes chosen jobs misbehave: {"train/bf16_seed1": ["exit1", "ok"]} fails the first
attempt and lets the second one work (the last entry repeats). ``events.jsonl`` logs start and end of every job.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HOUSE = Path(__file__).resolve().parent
HOUSE = HOUSE.parent if HOUSE.name == "scripts" else HOUSE
sys.path.insert(0, str(HOUSE))

from config import TrainConfig, config_dict, parse_config, resolve_arm, run_name  # noqa: E402
from utils_run import append_jsonl, read_json, sha256_file, write_json  # noqa: E402

SETTINGS = json.loads((HOUSE / "standin.json").read_text())  # seconds of work by stage
script, argv = Path(__file__).name, sys.argv[1:]


def flag(name: str) -> str | None:
    return argv[argv.index(name) + 1] if name in argv else None


def job_name() -> str:
    if script == "train_rlvr.py":
        return f"train/{Path(flag('--output_dir')).name}"
    if script == "eval_policy.py":
        return f"eval/{Path(flag('--output_path')).stem}" if flag("--ft_ckpt") else "base"
    if script == "utils_bf16_sparsity.py":
        return f"sparsity/{Path(flag('--output_path')).stem.removesuffix('_sparsity')}"
    return {"prepare_data.py": "data", "prepare_model.py": "model", "analyze_results.py": "analysis"}[script]


def event(what: str) -> None:
    append_jsonl(HOUSE / "events.jsonl", {"job": NAME, "what": what, "time": time.time(), "pid": os.getpid(),
                                          "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
                                          "threads": os.environ.get("OMP_NUM_THREADS"), "argv": argv})


def behave(before_output: bool) -> None:
    """Misbehave as behaviour.json says, counting the attempts of this job in events.jsonl."""
    path = HOUSE / "behaviour.json"
    plans = json.loads(path.read_text()) if path.exists() else {}
    plan = plans.get(NAME, ["ok"])
    what = plan[min(ATTEMPT, len(plan) - 1)]
    if what.startswith("late_"):
        if before_output:
            return
        what = what.removeprefix("late_")
    elif not before_output:
        return
    if what == "exit1":
        print("error: the work failed on purpose", file=sys.stderr)
        sys.exit(1)
    if what == "exit2":
        print("error: --flag is wrong on purpose", file=sys.stderr)
        sys.exit(2)
    if what == "traceback":
        raise ValueError("a bug on purpose")
    if what == "hang":
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("helper", helper.pid, flush=True)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if what == "leave_helper":
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("helper", helper.pid, flush=True)
    if what == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "eat_memory":
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        hoard = [bytearray(64 << 20) for _ in range(64)]
        print(len(hoard))
    if what == "eat_cgroup":
        Path(os.environ["STANDIN_CGROUP"], "cgroup.procs").write_text(str(os.getpid()))
        hoard = [bytearray(os.urandom(1 << 20) * 8) for _ in range(64)]
        print(len(hoard))
    if what == "no_gpu":
        listed = HOUSE / "gpus.txt"
        listed.write_text("".join(g for g in listed.read_text().splitlines(True) if g.strip() != os.environ["CUDA_VISIBLE_DEVICES"]))
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")
    if what in ("fill_disk", "fill_disk_and_leave"):
        big = Path(flag("--output_dir")) / "big"
        try:
            with open(big, "wb", buffering=0) as handle:
                while True:
                    if handle.write(os.urandom(1 << 12)) < 1 << 12:
                        handle.write(b"x")
        finally:
            if what == "fill_disk":
                big.unlink()
    if what == "no_output":
        event("end")
        sys.exit(0)


def write_model(folder: Path, state: str, identity: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data = state.encode()
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    (folder / "config.json").write_text("{}")
    write_json(folder / "rlvr_run.json", identity)


def train() -> None:
    cfg = parse_config(TrainConfig, argv)
    folder = Path(cfg.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    behave(True)
    write_json(folder / "config.json", {**config_dict(cfg), "train_dataset_sha256": sha256_file(cfg.train_dataset_path)})
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    checkpoint = folder / "checkpoints" / "state.json"
    begun = read_json(checkpoint) if checkpoint.exists() else {"step": 0, "state": f"{cfg.precision_mode} {cfg.seed} {cfg.noise_replicate}"}
    event(f"from step {begun['step']}")
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines()[:begun["step"]] if metrics.exists() else []
    metrics.write_text("".join(line + "\n" for line in lines))
    state = begun["state"]
    for step in range(begun["step"] + 1, cfg.num_steps + 1):
        time.sleep(SETTINGS["train"] / cfg.num_steps)
        state = hashlib.sha256(f"{state} {step} {cfg.learning_rate}".encode()).hexdigest()
        append_jsonl(metrics, {"step": step, "state": state})
        if step % cfg.save_every == 0 or stop:
            write_json(checkpoint, {"step": step, "state": state})
        if stop and step < cfg.num_steps:
            event("interrupted")
            print(f"error: stopped after step {step}, checkpoint written", file=sys.stderr)
            sys.exit(3)
        behave(False)
    arm, overrides = resolve_arm(cfg)
    run = run_name(cfg.precision_mode, overrides, cfg.seed, cfg.noise_replicate)
    write_model(folder / "final_model", state, {"arm": run.rpartition("_seed")[0], "seed": cfg.seed,
                                                "noise_replicate": cfg.noise_replicate, "num_steps": cfg.num_steps})


def result() -> None:
    behave(True)
    time.sleep(SETTINGS.get(NAME.split("/")[0], 0))
    if NAME == "data":
        for name in ("train", "val", "other"):
            problems = [{"id": f"{name}{i}", "problem": "1 + 1", "answer": "2", "task_type": "math", "source": "synthetic"} for i in range(3)]
            write_json(Path(flag("--output_dir")) / f"{name}.json", problems)
    elif NAME == "model":
        write_model(Path(flag("--output_dir")), "base", {})
    elif NAME == "analysis":
        results = sorted(p.name for p in Path(flag("--results_dir")).glob("*.json") if p.name != "base.json")
        write_json(Path(flag("--output_dir")) / "full_analysis.json", {"results": results})
        print("VERDICT TABLE of", len(results), "files")
    elif NAME == "base":
        write_json(flag("--output_path"), {"key": {"score": 0.5}})
    else:
        state = (Path(flag("--ft_ckpt")) / "model.safetensors").read_bytes()
        identity = read_json(Path(flag("--ft_ckpt")) / "rlvr_run.json")
        write_json(flag("--output_path"), {**identity, "tasks": {"val": hashlib.sha256(state).hexdigest()}})
    behave(False)


NAME = job_name()
events = HOUSE / "events.jsonl"
ATTEMPT = sum(json.loads(line)["job"] == NAME and json.loads(line)["what"] == "start"
              for line in events.read_text().splitlines()) if events.exists() else 0
event("start")
train() if NAME.startswith("train/") else result()
event("end")
