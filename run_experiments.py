"""Run the grid of precision arms x seeds as jobs: prepare, train, evaluate, measure sparsity, analyse. Resumes, and tells where things stand.

In:  a config. Out, under RESULTS_ROOT: everything the other scripts write, logs/ (one a job), jobs/ (one record a job: the
settings that made its output), status.json. Rerunning the same command does only what is missing; Ctrl-C lets the jobs write a
checkpoint, a second Ctrl-C stops them at once.

CPU, minutes:          python run_experiments.py --mode full --config configs/tiny.yaml
The study, on GPUs:    python run_experiments.py --mode full --seeds 1 2 3 4 5 --gpus 0,1,2,3
Where things stand:    python run_experiments.py --mode status --config configs/tiny.yaml
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from config import (DTYPE_BYTES, ROOT, SECTIONS, ExperimentConfig, TrainConfig, UserError, config_dict, config_hash,
                    nearest, parse_config, resolve_arm, run_name)
from utils_run import (EXIT_BAD_REQUEST, EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, count_parameters, git_state, package_versions,
                       read_json, require_memory, require_writable_dir, run_script, sha256_file, write_json)

SCRIPTS = {"data": "scripts/prepare_data.py", "model": "scripts/prepare_model.py", "base": "eval_policy.py",
           "train": "train_rlvr.py", "eval": "eval_policy.py", "sparsity": "utils_bf16_sparsity.py",
           "analysis": "analyze_results.py"}
SECTION_OF = {"data": "data", "model": "prepare_model", "base": "eval", "train": "train", "eval": "eval", "sparsity": "sparsity",
              "analysis": "analyze"}
STAGES = tuple(SCRIPTS)  # also the order of preference among jobs that could start: long jobs early pack best
STAGES_OF_MODE = {"full": STAGES, "status": STAGES, "prepare": ("data", "model"), "train": ("data", "model", "train"),
                  "eval": ("data", "model", "base", "eval"), "sparsity": ("model", "sparsity"), "analyze": ("analysis",)}
# Options that change neither what a job computes nor what its output means. num_steps is kept: it is compared apart.
NEUTRAL = {"config", "results_root", "output_dir", "output_path", "samples_dir", "save_every", "keep_checkpoints", "report_to",
           "grading_workers", "vllm_gpu_memory_fraction", "plots", "results_dir", "train_logs_dir", "overwrite", "check_prompt",
           "base_ckpt", "ft_ckpt", "chunk_mib"}
RESERVED_ARGS = ("config", "precision_mode", "seed", "noise_replicate", "output_dir", "output_path", "base_ckpt", "ft_ckpt",
                 "results_root")

POLL_S = 0.1              # how often children are looked at
STATUS_EVERY_S = 2.0      # status.json is rewritten at least this often while jobs run
LINE_EVERY_S = 30.0       # a progress line this often where the output is no terminal
RETRY_WAIT_S = 3.0        # before another try, times the number of tries so far
KILL_GRACE_S = 60.0       # between SIGTERM and SIGKILL for a hung or left-over process; a checkpoint fits in
LOG_TAIL_BYTES = 65_536
HASH_WHOLE_BYTES = 256 << 20  # larger files are told apart by size and both ends: 15 GB of weights take a minute to read
HASH_END_BYTES = 1 << 20
CPU_JOBS_BESIDE_GPUS = 2  # sparsity and analysis jobs that may run while the GPUs train
MARKER = "RLVR_EXPERIMENT_JOB"  # environment variable by which the processes of a job, and their children, are found again

# Why a child died, from the end of its log: pattern, what is said, whether another try can help.
FAILURES = (
    (r"CUDA out of memory|torch\.OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED", "GPU out of memory", False),
    (r"No space left on device|Disk quota exceeded", "disk full", False),
    (r"\bMemoryError\b|[Cc]annot allocate memory|DefaultCPUAllocator", "out of memory", True),
    (r"No CUDA GPUs are available|CUDA error|CUDA driver|GPU is lost", "GPU missing or broken", True),
)


# --------------------------------------------------------------------------------------------------------------------
# Jobs

@dataclass
class Job:
    """One child process to run, and what is known about it."""

    name: str                   # data, model, base, train/RUN, eval/RUN, sparsity/RUN, analysis
    stage: str
    run: str                    # run name, "" for jobs of the whole grid
    argv: list[str]             # arguments of the stage's script
    output: Path                # its presence, whole, shows that the job ended
    settings: dict[str, Any]    # resolved options that decide what is computed
    inputs: Callable[[], dict[str, str | None]]  # role -> hash of what is read; None: not there yet
    needs: tuple[str, ...] = ()  # must be done before
    after: tuple[str, ...] = ()  # must have ended before, well or not
    gpus: int = 0
    num_steps: int = 0

    state: str = "waiting"      # waiting, done, todo, running, failed, blocked, stale, interrupted
    reason: str = ""            # why stale, failed, blocked or to be done again
    forced: bool = False
    attempts: int = 0
    exit_code: int | None = None
    seconds: float = 0.0        # over all attempts
    not_before: float = 0.0
    alone: bool = False         # after it ran out of memory: nothing else beside it
    lease: list[str] = field(default_factory=list)
    process: subprocess.Popen | None = None
    started: float = 0.0
    log_start: int = 0          # where this attempt begins in the log
    last_sign: float = 0.0      # when it last wrote something
    signs: tuple = ()
    step: int | None = None     # newest step in metrics.jsonl
    first_step: tuple[int, float] | None = None  # of this attempt, and when it was seen
    step_seen: float = 0.0
    stop_sent: float = 0.0
    stop_reason: str = ""
    oom_before: int = 0


ENDED = ("done", "failed", "blocked", "stale", "interrupted")


def script_path(stage: str) -> str:
    """Path of a stage's script, as it can be typed in the working directory."""
    path = ROOT / SCRIPTS[stage]
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def option_flags(pairs: list[str], stage: str, origin: str) -> list[str]:
    """``key=value`` words as flags of a stage's script. UserError for an unknown or reserved key."""
    known = {f.name for f in dataclasses.fields(SECTIONS[SECTION_OF[stage]])}
    flags = []
    for pair in pairs:
        key, equals, value = pair.partition("=")
        key = key.removeprefix("--")
        if not equals:
            raise UserError(f"{origin}: expected key=value, got {pair!r}")
        if key in RESERVED_ARGS:
            raise UserError(f"{origin}: {key} is set by the grid itself")
        if key not in known:
            raise UserError(f"{origin}: unknown option {key}{nearest(key, known)}")
        flags += [f"--{key}", *(value.split(",") if key == "tasks" else [value])]
    return flags


def shared_flags(cfg: ExperimentConfig, stage: str) -> list[str]:
    """--config, and those options of the grid that the stage's script would resolve to something else by itself."""
    section = SECTION_OF[stage]
    names = {f.name for f in dataclasses.fields(SECTIONS[section])}
    config = ["--config", cfg.config] if cfg.config else []
    if section in ("data", "prepare_model"):  # their defaults are checked together with their own flags, by themselves
        return config
    own = parse_config(SECTIONS[section], config)
    flags = list(config)
    for name in ("study", "results_root", "model_name_or_path", "model_revision", "train_dataset_path", "eval_tasks_config",
                 "num_threads"):
        if name in names and getattr(own, name) != getattr(cfg, name):
            flags += [f"--{name}", str(getattr(cfg, name)) if getattr(cfg, name) is not None else "none"]
    return flags


def resolved(stage: str, argv: list[str]) -> dict[str, Any]:
    """The options that a stage's script would run with. Raises UserError as the script itself would."""
    return config_dict(parse_config(SECTIONS[SECTION_OF[stage]], argv))


def kept(settings: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in settings.items() if k not in NEUTRAL}


def build_jobs(cfg: ExperimentConfig) -> dict[str, Job]:
    """The whole graph of a grid, by job name, whatever the mode."""
    from utils_data import load_tasks
    root, jobs = Path(cfg.results_root), {}
    tasks = load_tasks(cfg.eval_tasks_config)
    problem_files = list(dict.fromkeys([cfg.train_dataset_path, *(task.path for task in tasks)]))
    hasher = Hasher(root / "jobs" / "hashes.json")
    base = cfg.model_name_or_path

    def add(name: str, argv: list[str], output: Path, inputs: Callable[[], dict], settings: dict, **more: Any) -> None:
        stage, _, run = name.partition("/")
        jobs[name] = Job(name, stage, run, argv, output, kept(settings), inputs, **more)

    source = ["--source", cfg.data_source, *(["--raw_dir", cfg.raw_dir] if cfg.data_source == "raw" else [])]
    argv = [*shared_flags(cfg, "data"), "--output_dir", cfg.data_dir, *source]
    add("data", argv, Path(problem_files[0]), dict, {**resolved("data", argv), "files": problem_files})
    first = ("data",)
    if cfg.prepare_model:
        argv = [*shared_flags(cfg, "model"), *cfg.prepare_model]
        add("model", argv, Path(base), dict, resolved("model", argv))
        first = ("data", "model")

    def base_input() -> dict[str, str | None]:
        return {"base": hasher.model(base, cfg.model_revision, must_exist=bool(cfg.prepare_model))}

    def eval_inputs() -> dict[str, str | None]:
        return {**base_input(), "eval_tasks_config": hasher.file(cfg.eval_tasks_config), "engine and graders": graders(hasher),
                **{f"data {task.name}": hasher.file(task.path) for task in tasks}}

    eval_flags = [*shared_flags(cfg, "eval"), *option_flags(cfg.eval_args, "eval", "--eval_args"), "--base_ckpt", base]
    eval_flags.append("--eval_base")  # a valid cached base is used all the same; on another device it would not be valid
    argv = [*eval_flags, "--output_path", str(root / "eval_metrics" / "base.json")]
    eval_options = resolved("base", argv)
    eval_gpus = eval_options["vllm_tensor_parallel_size"] if eval_options["rollout_engine"] == "vllm" else 1
    add("base", argv, root / "eval_metrics" / "base.json", eval_inputs, eval_options, needs=first, gpus=eval_gpus)

    train_flags = option_flags(cfg.train_args, "train", "--train_args")
    for mode, seed, replicate in grid(cfg):
        argv = [*shared_flags(cfg, "train"), "--precision_mode", mode, "--seed", str(seed)]
        argv += ["--noise_replicate", str(replicate)] * bool(replicate) + train_flags
        options = parse_config(TrainConfig, argv)
        run = run_name(mode, resolve_arm(options)[1], seed, replicate)
        folder = root / "train_logs" / run
        final = folder / "final_model"
        argv += ["--output_dir", str(folder)]

        def train_inputs() -> dict[str, str | None]:
            return {"train_dataset_sha256": hasher.file(cfg.train_dataset_path, whole=True),
                    **({"base_sha256": hasher.base_sha256(base)} if Path(base).is_dir() else base_input())}

        def final_input(final: Path = final) -> str | None:
            return hasher.model(str(final), None, must_exist=True)

        def run_eval_inputs(final_input: Callable = final_input) -> dict[str, str | None]:
            return {**eval_inputs(), "final_model": final_input()}

        def sparsity_inputs(final_input: Callable = final_input) -> dict[str, str | None]:
            return {**base_input(), "final_model": final_input()}

        add(f"train/{run}", argv, final, train_inputs, config_dict(options), needs=first, gpus=cfg.gpus_per_job,
            num_steps=options.num_steps)
        output = root / "eval_metrics" / f"{run}.json"
        argv = [*eval_flags, "--ft_ckpt", str(final), "--output_path", str(output)]
        add(f"eval/{run}", argv, output, run_eval_inputs, resolved("eval", argv), needs=("base", f"train/{run}"), gpus=eval_gpus)
        output = root / "eval_metrics" / f"{run}_sparsity.json"
        argv = [*shared_flags(cfg, "sparsity"), "--base_ckpt", base, "--ft_ckpt", str(final), "--output_path", str(output)]
        add(f"sparsity/{run}", argv, output, sparsity_inputs, resolved("sparsity", argv), needs=(f"train/{run}",))

    def result_inputs() -> dict[str, str | None]:
        results = sorted((root / "eval_metrics").glob("*.json"))
        return {path.name: hasher.file(path) for path in results if path.name != "base.json"} or {"results": None}

    argv = [*shared_flags(cfg, "analysis"), "--results_dir", str(root / "eval_metrics"), "--output_dir", str(root / "analysis"),
            "--on_task", *(task.name for task in tasks if task.on_task)]
    add("analysis", argv, root / "analysis" / "full_analysis.json", result_inputs, resolved("analysis", argv),
        after=tuple(name for name, job in jobs.items() if job.stage in ("eval", "sparsity")))
    return jobs


def grid(cfg: ExperimentConfig) -> Iterator[tuple[str, int, int]]:
    """(arm, seed, replicate) with the seed outermost, so that a grid cut short holds every arm equally often."""
    for seed in cfg.seeds:
        for replicate in cfg.replicates:
            for mode in cfg.precision_modes:
                yield mode, seed, replicate


# --------------------------------------------------------------------------------------------------------------------
# What a job reads

class Hasher:
    """Hashes of files and model folders, remembered by (size, time of change) so that a large one is read once."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.known: dict[str, str] = {}
        with contextlib.suppress(UserError):
            self.known = read_json(store)

    def _remember(self, path: Path, kind: str, compute: Callable[[], str]) -> str:
        stat = path.stat()
        key = f"{kind} {path} {stat.st_size} {stat.st_mtime_ns}"
        if key not in self.known:
            self.known[key] = compute()
            if self.store.parent.is_dir():  # the folder of a grid that has begun; planning alone writes nothing
                with contextlib.suppress(OSError):
                    write_json(self.store, self.known)
        return self.known[key]

    def file(self, path: str | Path, whole: bool = False) -> str | None:
        """Hash of one file: SHA-256 of its bytes, for large ones (unless ``whole``) of size and both ends. None: no such file."""
        path = Path(path)
        if not path.is_file():
            return None
        if whole or path.stat().st_size <= HASH_WHOLE_BYTES:
            return self._remember(path, "sha256", lambda: sha256_file(path))
        return self._remember(path, "ends", lambda: hash_ends(path))

    def base_sha256(self, folder: str) -> str | None:
        """The trainer's own hash of a base folder: over the SHA-256 of every shard."""
        shards = sorted(Path(folder).glob("*.safetensors"))
        return config_hash({shard.name: self.file(shard, whole=True) for shard in shards}) if shards else None

    def model(self, name: str, revision: str | None, must_exist: bool) -> str | None:
        """Hash of a model folder (weights, configuration, tokenizer), or name and revision of a hub id."""
        folder = Path(name)
        if not folder.is_dir():
            return None if must_exist else f"hub {name} {revision or 'newest'}"
        files = sorted(p for p in folder.iterdir() if p.suffix == ".safetensors" or p.name == "config.json"
                       or "token" in p.name or p.name == "vocab.json")
        return config_hash({p.name: self.file(p) for p in files})


def graders(hasher: Hasher) -> str:
    """What sampled and graded: another version gives other scores, and the base policy and all runs must have the same."""
    sources = {name: hasher.file(ROOT / name) for name in ("utils_math_eval.py", "utils_code_eval.py")}
    return config_hash({**sources, **engine_versions()})


@functools.cache
def engine_versions() -> dict[str, str | None]:
    return package_versions(("torch", "transformers", "vllm", "math-verify"))


def hash_ends(path: Path) -> str:
    size = path.stat().st_size
    with open(path, "rb") as handle:
        head = handle.read(HASH_END_BYTES)
        handle.seek(-HASH_END_BYTES, os.SEEK_END)
        return config_hash({"size": size, "head": head.hex(), "tail": handle.read().hex()})


# --------------------------------------------------------------------------------------------------------------------
# Done, to do, or stale

def record_path(cfg: ExperimentConfig, job: Job) -> Path:
    return Path(cfg.results_root) / "jobs" / f"{job.name.replace('/', '-')}.json"


def log_path(cfg: ExperimentConfig, job: Job) -> Path:
    return Path(cfg.results_root) / "logs" / f"{job.name.replace('/', '-')}.log"


def read_record(cfg: ExperimentConfig, job: Job) -> dict[str, Any]:
    """The record of the job's last start, {} without one (or with one that cannot be read: it then proves nothing)."""
    try:
        record = read_json(record_path(cfg, job))
    except UserError:
        return {}
    return record if isinstance(record, dict) else {}


def differing(before: dict[str, Any], now: dict[str, Any]) -> str:
    """``learning_rate 1e-05 -> 3e-05, ...`` for the keys of ``now`` whose value changed, "" if none did."""
    changed = [k for k in now if before.get(k) != now[k]]
    shown = [f"{k} {_short(before.get(k))} -> {_short(now[k])}" for k in changed[:4]]
    return ", ".join(shown + [f"and {len(changed) - 4} more"] * (len(changed) > 4))


def _short(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 40 else text[:12] + "..."


def whole_json(path: Path, job: Job) -> str:
    """"" if ``path`` is a whole result of ``job``, else what is wrong with it."""
    try:
        data = read_json(path)
    except UserError as error:
        return str(error)
    if not isinstance(data, dict) or not data:
        return f"{path} holds no result"
    if job.stage == "eval":
        if not data.get("tasks"):
            return f"{path} holds no tasks"
        return wrong_identity(path, data, job)
    return ""


def wrong_identity(path: Path, data: dict[str, Any], job: Job) -> str:
    """"" if a file says that it belongs to the run of ``job`` (arm, seed, replicate), else the difference."""
    arm, _, rest = job.run.rpartition("_seed")
    seed, _, replicate = rest.partition("_rep")
    expected = {"arm": arm, "seed": int(seed), "noise_replicate": int(replicate or 0)}
    wrong = [f"{k} {data[k]!r} instead of {v!r}" for k, v in expected.items() if data.get(k, v) != v]
    return f"{path} belongs to another run: {', '.join(wrong)}" if wrong else ""


def whole_model(folder: Path, job: Job) -> str:
    """"" if ``folder`` is the finished model of ``job``, else what is wrong: identity, num_steps, length of each shard."""
    identity_file = folder / "rlvr_run.json"
    try:
        identity = read_json(identity_file)
    except UserError as error:
        return str(error)
    wrong = wrong_identity(identity_file, identity, job)
    if wrong:
        return wrong
    if identity.get("num_steps", job.num_steps) != job.num_steps:
        return f"{identity_file} has {identity['num_steps']} of {job.num_steps} steps"
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        return f"{folder} holds no weights"
    for shard in shards:
        try:
            with open(shard, "rb") as handle:
                size = int.from_bytes(handle.read(8), "little")
                header = json.loads(handle.read(size))
            ends = [t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"]
            whole = 8 + size + max(ends, default=0) == shard.stat().st_size
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            whole = False
        if not whole:
            return f"{shard} is cut short or damaged"
    return ""


def judge(cfg: ExperimentConfig, job: Job) -> tuple[str, str]:
    """(state, reason): done, todo, stale, or waiting where an input is not there yet."""
    if job.forced:
        return "todo", "forced"
    return {"data": judge_data, "model": judge_model, "train": judge_train}.get(job.stage, judge_result)(cfg, job)


def judge_data(cfg: ExperimentConfig, job: Job) -> tuple[str, str]:
    """Problem files that are all there are used, whoever made them, unless they are known to be of another kind."""
    from utils_data import load_manifest_entry
    record = read_record(cfg, job)
    if any(not Path(path).exists() for path in job.settings["files"]):
        return "todo", ""
    if record.get("state") == "done":
        changed = differing(record.get("settings", {}), {k: v for k, v in job.settings.items() if k != "files"})
        return ("stale", changed) if changed else ("done", "")
    if record.get("state") == "started":
        return "todo", ""
    for path in job.settings["files"]:
        entry = load_manifest_entry(path)
        if entry and entry["synthetic"] != (cfg.data_source == "sample"):
            kind = "synthetic sample" if entry["synthetic"] else "real"
            return "stale", (f"{path} holds {kind} problems and data_source is {cfg.data_source} "
                             f"(--data_source {'sample' if entry['synthetic'] else 'hub or raw'} uses them)")
    return "done", "made before"


def judge_model(cfg: ExperimentConfig, job: Job) -> tuple[str, str]:
    record = read_record(cfg, job)
    if not (job.output / "config.json").exists():
        return "todo", ""
    changed = differing(record["settings"], job.settings) if "settings" in record else ""
    return ("stale", changed) if changed else ("done", "")


def judge_train(cfg: ExperimentConfig, job: Job) -> tuple[str, str]:
    """The run folder's own config.json says with which settings, data and base it was begun."""
    inputs = job.inputs()
    config_file = job.output.parent / "config.json"
    if not config_file.exists():
        return ("waiting" if None in inputs.values() else "todo"), ""
    try:
        begun = read_json(config_file)
    except UserError as error:
        return "stale", str(error)
    wanted = {k: v for k, v in job.settings.items() if k != "num_steps"}
    wanted.update({k: v for k, v in inputs.items() if v is not None and k in begun})
    changed = differing(begun, wanted)
    if changed:
        return "stale", changed
    finished = (job.output / "rlvr_run.json").exists()
    if begun.get("num_steps", 0) > job.num_steps:
        return "stale", differing(begun, {"num_steps": job.num_steps})
    wrong = whole_model(job.output, job)
    if not wrong:
        return "done", ""
    if finished and begun.get("num_steps") == job.num_steps:  # not merely an extension under way
        return "todo", wrong
    if finished:
        return "stale", f"finished with {differing(begun, {'num_steps': job.num_steps})}; --force {job.run} goes on from its checkpoint"
    return ("waiting" if None in inputs.values() else "todo"), ""


def judge_result(cfg: ExperimentConfig, job: Job) -> tuple[str, str]:
    """base, eval, sparsity, analysis: the record holds the settings and inputs that made the output."""
    record, inputs = read_record(cfg, job), job.inputs()
    pending = None in inputs.values()
    if not job.output.exists():
        return ("waiting" if pending else "todo"), ""
    derived = job.stage in ("base", "analysis")  # a cache with keys of its own, and a pure function of the results
    if not record:
        return ("todo", "") if derived else ("stale", f"{job.output} exists and no record says which settings made it")
    changed = differing(record.get("settings", {}), job.settings)
    if changed:
        return ("todo", changed) if derived else ("stale", changed)
    if pending:
        return "waiting", ""
    if record.get("state") != "done":
        return "todo", ""
    changed = differing(record.get("inputs", {}), inputs)
    if changed or set(record.get("inputs", {})) != set(inputs):
        return "todo", f"input changed: {changed or 'fewer results'}"
    wrong = whole_json(job.output, job)
    return ("todo", wrong) if wrong else ("done", "")


# --------------------------------------------------------------------------------------------------------------------
# GPUs and CPU slots

def visible_gpus() -> list[str]:
    """Indices (and UUIDs, as second half of the list) that nvidia-smi names; [] where it does not work."""
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"], capture_output=True, text=True,
                              timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [line.split(",") for line in done.stdout.splitlines() if "," in line] if done.returncode == 0 else []
    return [row[0].strip() for row in rows] + [row[1].strip() for row in rows]


def choose_gpus(cfg: ExperimentConfig) -> list[str] | None:
    """GPU ids to lease; [] to hide all GPUs from the jobs; None on a machine without any. UserError for one that is missing."""
    if cfg.gpus == "none":
        return []
    there = visible_gpus()
    if cfg.gpus == "auto":
        if not there:
            return None
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        chosen = [g for g in shown.split(",") if g] if shown is not None else there[:len(there) // 2]
    else:
        chosen = [g.strip() for g in cfg.gpus.split(",") if g.strip()]
        missing = [g for g in chosen if g not in there]
        if missing:
            found = ", ".join(there[:len(there) // 2]) or "none"
            raise UserError(f"--gpus {cfg.gpus}: GPU {', '.join(missing)} is not there (nvidia-smi finds: {found})")
        if len(set(chosen)) != len(chosen) or not chosen:
            raise UserError(f"--gpus {cfg.gpus}: name each GPU once")
    if chosen and cfg.gpus_per_job > len(chosen):
        raise UserError(f"--gpus_per_job {cfg.gpus_per_job}: only {len(chosen)} GPU(s) to use ({', '.join(chosen)})")
    return chosen


class Slots:
    """What jobs occupy while they run: GPUs of their own, and one of a number of places."""

    def __init__(self, gpus: list[str] | None, max_parallel: int, num_threads: int) -> None:
        self.on_gpus = bool(gpus)
        self.hide_gpus = gpus is not None and not gpus
        self.free = list(gpus or [])
        cpu_places = max(1, (os.cpu_count() or 1) // num_threads) if num_threads else 1
        self.places = max_parallel or (len(self.free) + CPU_JOBS_BESIDE_GPUS if gpus else cpu_places)
        self.cpu_places = CPU_JOBS_BESIDE_GPUS if gpus else self.places
        self.cpu_running = 0

    def take(self, job: Job, running: int) -> bool:
        """Lease what ``job`` needs, or return False."""
        gpus = job.gpus if self.on_gpus else 0
        if running >= self.places or gpus > len(self.free) or (gpus == 0 and self.cpu_running >= self.cpu_places):
            return False
        job.lease, self.free = self.free[:gpus], self.free[gpus:]
        self.cpu_running += gpus == 0
        return True

    def give_back(self, job: Job, lost: Iterable[str] = ()) -> None:
        self.cpu_running -= not job.lease
        self.free = sorted([*self.free, *(gpu for gpu in job.lease if gpu not in set(lost))],
                           key=lambda gpu: (len(gpu), gpu))
        job.lease = []

    def environment(self, job: Job) -> dict[str, str]:
        """CUDA_VISIBLE_DEVICES of a job: what it leased, nothing for a CPU job, untouched where there are no GPUs."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(job.lease)} if self.on_gpus or self.hide_gpus else {}


# --------------------------------------------------------------------------------------------------------------------
# Processes

def job_environment(cfg: ExperimentConfig, job: Job, slots: Slots) -> dict[str, str]:
    """Environment variables that a job gets beside the caller's."""
    threads = {name: str(cfg.num_threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")} if cfg.num_threads else {}
    return {**threads, **slots.environment(job), "PYTHONUNBUFFERED": "1"}


def job_command(cfg: ExperimentConfig, job: Job, slots: Slots) -> list[str]:
    """The command line; a training job on several GPUs starts under torchrun, on a free port."""
    processes = job.gpus if job.stage == "train" and slots.on_gpus else 1
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    return [sys.executable, *launcher, script_path(job.stage), *job.argv]


def pasteable(command: list[str], environment: dict[str, str]) -> str:
    assignments = " ".join(f"{k}={shlex.quote(v)}" for k, v in environment.items() if k != "PYTHONUNBUFFERED")
    return f"{assignments} {shlex.join(command)}".strip()


PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with(parent: int) -> Callable[[], None] | None:
    """For Popen: the child is asked to stop (SIGTERM) when this process dies, even by SIGKILL. Linux only."""
    if LIBC is None:
        return None

    def set_signal() -> None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the line above
            os._exit(EXIT_INTERRUPTED)
    return set_signal


def marked_processes(marker: str) -> list[int]:
    """Ids of running processes whose environment carries ``MARKER`` beginning with ``marker``. Linux; [] elsewhere."""
    wanted, found = f"{MARKER}={marker}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (entry / "environ").read_bytes().split(b"\0")
            if any(v.startswith(wanted) for v in variables) and int(entry.name) != os.getpid():
                if (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    found.append(int(entry.name))
    return found


def end_processes(marker: str, grace_s: float) -> int:
    """SIGTERM, then after ``grace_s`` SIGKILL, to every process of a marker; returns how many there were. Waits for their end."""
    first = marked_processes(marker)
    for number, limit in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        left = marked_processes(marker)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        deadline = time.monotonic() + limit
        while left and time.monotonic() < deadline:
            time.sleep(POLL_S)
            left = marked_processes(marker)
    return len(first)


def kill_group(process: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def out_of_memory_kills() -> int:
    """Processes that the kernel killed for memory since boot; 0 where it does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def log_tail(path: Path, start: int = 0) -> str:
    """The end of a log, from byte ``start`` on, at most LOG_TAIL_BYTES of it."""
    try:
        with open(path, "rb") as handle:
            size = handle.seek(0, os.SEEK_END)
            handle.seek(max(start, size - LOG_TAIL_BYTES))
            return handle.read().decode("utf-8", errors="replace").replace("\r", "\n")
    except OSError:
        return ""


def last_error_line(text: str) -> str:
    """The line of a log that says what went wrong: a script's ``error:``, else an exception's last line, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for pattern in (r"error: ", r"(\w+\.)*\w*(Error|Exception|Interrupt|Exit)\b"):
        found = next((line for line in reversed(lines) if re.match(pattern, line)), None)
        if found:
            return found.removeprefix("error: ")
    return lines[-1] if lines else "nothing in the log"


def explain(job: Job, code: int, text: str) -> tuple[str, bool]:
    """(why a job failed, whether another try can help), from its exit code and the end of its log."""
    line = last_error_line(text)
    if job.stop_reason:
        return job.stop_reason, True
    if code == -signal.SIGKILL:
        counted = out_of_memory_kills() > job.oom_before
        job.alone = True
        return ("killed for memory by the kernel" if counted else "killed (SIGKILL; usually for memory)"), True
    if code < 0:
        return f"killed by {signal.Signals(-code).name}: {line}", True
    if code == EXIT_BAD_REQUEST:
        return line, False
    if code == EXIT_INTERRUPTED:
        return f"interrupted: {line}", True
    for pattern, said, again in FAILURES:
        if re.search(pattern, text):
            job.alone = job.alone or said == "out of memory"
            return f"{said}: {line}", again
    return line, True


# --------------------------------------------------------------------------------------------------------------------
# Progress and status

def last_step(job: Job) -> int | None:
    """The newest step in a training run's metrics.jsonl."""
    for line in reversed(log_tail(job.output.parent / "metrics.jsonl").splitlines()):
        with contextlib.suppress(ValueError):  # the first line may be cut at the front, the last one at its end
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                return row["step"]
    return None


def observe(cfg: ExperimentConfig, job: Job) -> None:
    """Note a running job's signs of life and, for training, its step and when the first new step was seen."""
    signs = []
    watched = [log_path(cfg, job)] + ([job.output.parent / "metrics.jsonl", job.output.parent / "checkpoints"]
                                      if job.stage == "train" else [])
    for path in watched:
        with contextlib.suppress(OSError):
            stat = path.stat()
            signs.append((stat.st_mtime_ns, stat.st_size))
    if tuple(signs) != job.signs:
        job.signs, job.last_sign = tuple(signs), time.monotonic()
    if job.stage == "train":
        step = last_step(job)
        if step is not None and step != job.step:
            job.step, job.step_seen = step, time.monotonic()
            job.first_step = job.first_step or (step, job.step_seen)


def rate_of(job: Job) -> float | None:
    """Steps a second between this attempt's first step and its newest, None before the second."""
    if job.process and job.first_step and job.step > job.first_step[0]:
        return (job.step - job.first_step[0]) / max(job.step_seen - job.first_step[1], 1e-9)
    return None


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def seconds_left(job: Job) -> float | None:
    """Until a training run's last step, from its rate; None before the rate is known."""
    rate = rate_of(job)
    return max(0.0, job.step_seen + (job.num_steps - job.step) / rate - time.monotonic()) if rate else None


def cell(job: Job | None) -> str:
    """One entry of the status table."""
    if job is None:
        return "-"
    if job.state == "running":
        rate, left = rate_of(job), seconds_left(job)
        if job.step is not None:
            pace = f" {rate:.2f}/s" if rate and rate >= 0.1 else f" {1 / rate:.0f} s/step" if rate else ""
            return f"{job.step}/{job.num_steps}{pace}" + (f", {clock(left)} left" if left is not None else "")
        return f"running {clock(time.monotonic() - job.started)}" if job.process else "running"
    if job.state == "done":
        return f"done {clock(job.seconds)}" if job.seconds else "done"
    return {"todo": "to do"}.get(job.state, job.state)


def status_table(jobs: dict[str, Job]) -> list[str]:
    """Lines of the table runs x stages, with the jobs of the whole grid above."""
    whole = [f"{name} {cell(jobs[name])}" for name in ("data", "model", "base", "analysis") if name in jobs]
    runs = list(dict.fromkeys(job.run for job in jobs.values() if job.run))
    stages = [stage for stage in ("train", "eval", "sparsity") if any(job.stage == stage for job in jobs.values())]
    rows = [["run", *stages]] + [[run, *(cell(jobs.get(f"{stage}/{run}")) for stage in stages)] for run in runs]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return ["; ".join(whole), *(table if runs else [])]


def problem_lines(cfg: ExperimentConfig, jobs: dict[str, Job]) -> list[str]:
    """One line for each job that failed or is stale, with reason and log."""
    lines = []
    for job in jobs.values():
        if job.state == "failed":
            tried = f" after {job.attempts} tries" if job.attempts > 1 else ""
            lines.append(f"failed: {job.name}{tried}: {job.reason} (log: {log_path(cfg, job)})")
        elif job.state in ("stale", "blocked"):
            lines.append(f"{job.state}: {job.name}: {job.reason}")
    return lines


def status_rows(cfg: ExperimentConfig, jobs: dict[str, Job]) -> list[dict[str, Any]]:
    rows = []
    for job in jobs.values():
        rate, left = rate_of(job), seconds_left(job)
        seconds = job.seconds + (time.monotonic() - job.started if job.process else 0)
        rows.append({"job": job.name, "stage": job.stage, "run": job.run or None, "state": job.state, "reason": job.reason or None,
                     "exit_code": job.exit_code, "attempts": job.attempts, "seconds": round(seconds, 1), "step": job.step,
                     "num_steps": job.num_steps or None, "steps_per_second": round(rate, 4) if rate else None,
                     "seconds_left": round(left, 1) if left is not None else None, "gpus": job.lease,
                     "pid": job.process.pid if job.process else None, "log": str(log_path(cfg, job))})
    return rows


class Display:
    """Lines for events; below them, on a terminal, a table that is redrawn; elsewhere a progress line now and then."""

    def __init__(self) -> None:
        self.live = sys.stdout.isatty()
        self.drawn = 0
        self.last = time.monotonic()

    def event(self, text: str) -> None:
        self._erase()
        print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)

    def refresh(self, jobs: dict[str, Job], left: float | None) -> None:
        now = time.monotonic()
        if now - self.last < (1.0 if self.live else LINE_EVERY_S):
            return
        self.last = now
        done = sum(job.state == "done" for job in jobs.values())
        running = [job for job in jobs.values() if job.state == "running"]
        about = f", about {clock(left)} left" if left is not None else ""
        if not self.live:
            names = "; ".join(f"{job.name} {cell(job)}" for job in running)
            self.event(f"{done} of {len(jobs)} jobs done{about} | {names}")
            return
        self._erase()
        width, height = shutil.get_terminal_size()
        lines = [f"{done} of {len(jobs)} jobs done, {len(running)} running{about}", *status_table(jobs)][:height - 2]
        print("\n".join(line[:width - 1] for line in lines), flush=True)
        self.drawn = len(lines)

    def _erase(self) -> None:
        if self.drawn:
            print(f"\033[{self.drawn}A\033[J", end="")
            self.drawn = 0


def time_left(jobs: dict[str, Job], parallel: int) -> float | None:
    """Seconds until the grid ends, from the mean time of finished jobs of a stage and the rate of running ones; None if unknown."""
    total = 0.0
    for stage in STAGES:
        of_stage = [job for job in jobs.values() if job.stage == stage]
        known = [job.seconds for job in of_stage if job.state == "done" and job.seconds]
        rates = [rate for job in of_stage if (rate := rate_of(job))]
        mean = sum(known) / len(known) if known else of_stage[0].num_steps * len(rates) / sum(rates) if rates else None
        for job in of_stage:
            if job.state in ENDED:
                continue
            if mean is None:
                if stage in ("train", "eval", "base"):  # the long ones: without them the sum would mislead
                    return None
                continue
            own = seconds_left(job)
            total += own if own is not None else max(0.0, mean - (time.monotonic() - job.started if job.process else 0))
    return total / parallel


# --------------------------------------------------------------------------------------------------------------------
# The loop

class Grid:
    """Runs jobs as their inputs appear, until nothing is left that can run."""

    def __init__(self, cfg: ExperimentConfig, jobs: dict[str, Job], slots: Slots) -> None:
        self.cfg, self.jobs, self.slots = cfg, jobs, slots
        self.display = Display()
        self.stops = 0            # Ctrl-C or SIGTERM received so far
        self.stops_sent = 0
        self.give_up = False      # a job failed and keep_going is off
        self.status_written = 0.0
        self.warned: set[str] = set()
        self.commit = git_state()["commit"]

    @property
    def running(self) -> list[Job]:
        return [job for job in self.jobs.values() if job.process]

    def run(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup stays in force
                signal.signal(number, self._on_signal)
        while True:
            if self.stops > self.stops_sent:
                self._stop_children()
            for job in self.running:
                if job.process.poll() is not None:
                    self._finish(job)
                else:
                    observe(self.cfg, job)
                    self._check_stalled(job)
            self._promote()
            self._launch()
            if not self.running and (self.stops or not self._pending_retry()):
                break
            self._write_status("running")
            self.display.refresh(self.jobs, time_left(self.jobs, min(self.slots.places, max(1, len(self.running)))))
            time.sleep(POLL_S)
        for job in self.jobs.values():
            if job.state in ("waiting", "todo") and (self.stops or self.give_up):
                job.state = "interrupted" if self.stops else "blocked"
                job.reason = "stopped" if self.stops else "not started after a failure (keep_going false)"
        end_processes(marker_of(self.cfg), grace_s=KILL_GRACE_S if self.stops < 2 else 0)
        self._write_status("interrupted" if self.stops else "ended", force=True)

    # --- what may start ---------------------------------------------------------------------------------------------

    def _promote(self) -> None:
        """Waiting jobs whose inputs are there become to do, done or stale; those whose inputs will never come are blocked."""
        changed = True
        while changed:
            changed = False
            for job in self.jobs.values():
                if job.state != "waiting":
                    continue
                lost = [n for n in job.needs if n in self.jobs and self.jobs[n].state in ("failed", "blocked", "stale", "interrupted")]
                if lost:
                    stopped = self.jobs[lost[0]].state == "interrupted"
                    job.state, job.reason = ("interrupted", "stopped") if stopped else ("blocked", f"{lost[0]} {self.jobs[lost[0]].state}")
                elif all(self.jobs[n].state == "done" for n in job.needs if n in self.jobs) and \
                        all(self.jobs[n].state in ENDED for n in job.after if n in self.jobs):
                    job.state, job.reason = judge(self.cfg, job)
                    if job.state == "waiting":  # nothing in this grid will make it
                        missing = [role for role, value in job.inputs().items() if value is None]
                        job.state, job.reason = "blocked", missing_text(self.cfg, job, missing)
                    elif job.state == "done":
                        self.display.event(f"{job.name}: already done" + (f" ({job.reason})" if job.reason else ""))
                    elif job.state == "stale":
                        self.display.event(f"{job.name}: stale, {job.reason}")
                else:
                    continue
                changed = True

    def _pending_retry(self) -> bool:
        return not self.give_up and any(job.state == "todo" for job in self.jobs.values())

    def _launch(self) -> None:
        if self.stops or self.give_up:
            return
        now = time.monotonic()
        ready = [job for job in self.jobs.values() if job.state == "todo" and job.not_before <= now]
        ready.sort(key=lambda job: STAGES.index(job.stage))  # stable: in the grid's order within a stage
        lonely = next((job for job in ready if job.alone), None)
        if lonely:
            ready = [lonely] if not self.running else []
        for job in ready:
            if any(other.alone for other in self.running):
                break
            if self.slots.take(job, len(self.running)):
                self._start(job)
        for job in ready:
            if job.state == "todo" and job.not_before <= now and not self.running:  # nothing will be given back any more
                self._fail(job, None, f"needs {job.gpus} GPU(s), and {len(self.slots.free)} are left", again=False)

    def _start(self, job: Job) -> None:
        cfg, log = self.cfg, log_path(self.cfg, job)
        if job.forced:
            discard(cfg, job)
            job.forced = False
        command, environment = job_command(cfg, job, self.slots), job_environment(cfg, job, self.slots)
        again = f", {job.reason}" if job.reason else ""
        job.attempts += 1
        job.exit_code, job.stop_sent, job.stop_reason, job.first_step, job.signs = None, 0.0, "", None, ()
        job.oom_before = out_of_memory_kills()
        job.started = job.last_sign = time.monotonic()
        try:
            self._write_record(job, "started", command)
            with open(log, "ab") as handle:
                handle.write(f"=== {time.strftime('%Y-%m-%d %H:%M:%S')} attempt {job.attempts}: "
                             f"{pasteable(command, environment)}\n".encode())
                handle.flush()
                job.log_start = handle.tell()
                job.process = subprocess.Popen(
                    command, stdout=handle, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                    env={**os.environ, **environment, MARKER: f"{marker_of(cfg)}{job.name}"}, preexec_fn=die_with(os.getpid()))
        except OSError as error:  # a full disk or one that turned read-only: the job cannot even begin
            self.slots.give_back(job)
            self._fail(job, None, f"cannot start: {error.strerror or error}", again=False)
            return
        job.state, job.reason = "running", ""
        where = f" on GPU {','.join(job.lease)}" if job.lease else ""
        self.display.event(f"{job.name}: started{where}{again}")

    # --- what ended -------------------------------------------------------------------------------------------------

    def _finish(self, job: Job) -> None:
        code = job.process.returncode
        kill_group(job.process, signal.SIGKILL)
        job.process = None
        job.exit_code = code
        job.seconds += time.monotonic() - job.started
        lost = [gpu for gpu in job.lease if gpu not in visible_gpus()] if job.lease and code not in (EXIT_DONE, EXIT_INTERRUPTED) else []
        if lost:
            self.display.event(f"GPU {', '.join(lost)} is gone; not used any more")
        self.slots.give_back(job, lost)
        text = log_tail(log_path(self.cfg, job), job.log_start)
        if code == EXIT_DONE:
            wrong = self._what_is_wrong(job)
            if wrong:
                self._fail(job, code, f"ended well but {wrong}", again=True)
                return
            try:
                self._write_record(job, "done")
            except OSError as error:
                self._fail(job, code, f"done, but its record cannot be written: {error.strerror or error}", again=False)
                return
            job.state, job.reason = "done", ""
            if job.stage == "train" and self.cfg.prune:
                prune(job)
            self.display.event(f"{job.name}: done in {clock(job.seconds)}")
        elif self.stops:
            job.state, job.reason = "interrupted", last_error_line(text) if code == EXIT_INTERRUPTED else "stopped"
            self.display.event(f"{job.name}: stopped")
        else:
            reason, again = explain(job, code, text)
            if lost and not self.slots.free and not any(other.lease for other in self.running):
                again = False
            self._fail(job, code, reason, again)

    def _what_is_wrong(self, job: Job) -> str:
        """"" if a child that exited with 0 left what it promised."""
        if job.stage == "train":
            return whole_model(job.output, job)
        if job.stage == "data":
            missing = [path for path in job.settings["files"] if not Path(path).exists()]
            return f"{missing[0]} is missing" if missing else ""
        if job.stage == "model":
            return "" if (job.output / "config.json").exists() else f"{job.output} holds no model"
        return whole_json(job.output, job)

    def _fail(self, job: Job, code: int | None, reason: str, again: bool) -> None:
        job.exit_code = code
        shown = f"exit {code}, {reason}" if code is not None and code > 0 else reason
        if again and job.attempts <= self.cfg.retries:
            job.state, job.reason = "todo", f"again after: {shown}"
            job.not_before = time.monotonic() + RETRY_WAIT_S * job.attempts
            self.display.event(f"{job.name}: {shown}; trying again")
            return
        job.state, job.reason = "failed", shown
        self.display.event(f"{job.name}: FAILED, {shown}")
        self.give_up = self.give_up or not self.cfg.keep_going

    def _check_stalled(self, job: Job) -> None:
        now, limit = time.monotonic(), self.cfg.stall_minutes * 60
        if limit and not job.stop_sent and now - job.last_sign > limit:
            job.stop_sent = now
            job.stop_reason = f"no progress for {self.cfg.stall_minutes:g} minutes"
            self.display.event(f"{job.name}: {job.stop_reason}; stopping it")
            kill_group(job.process, signal.SIGTERM)
        elif job.stop_reason and now - job.stop_sent > min(KILL_GRACE_S, limit):
            kill_group(job.process, signal.SIGKILL)

    # --- stopping ---------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: Any) -> None:
        self.stops += 1

    def _stop_children(self) -> None:
        self.stops_sent = self.stops
        running = self.running
        if self.stops == 1:
            self.display.event(f"stopping {len(running)} job(s), they write a checkpoint; once more to stop at once")
            for job in running:  # the leader alone: it ends its own helpers in good order
                with contextlib.suppress(ProcessLookupError):
                    job.process.terminate()
        else:
            self.display.event("stopping at once")
            for job in running:
                kill_group(job.process, signal.SIGKILL)

    # --- files ------------------------------------------------------------------------------------------------------

    def _write_record(self, job: Job, state: str, command: list[str] | None = None) -> None:
        """jobs/JOB.json: what the output is made from; written before the start and again after the end."""
        path = record_path(self.cfg, job)
        if command is None:
            record = {**read_record(self.cfg, job), "state": state, "seconds": round(job.seconds, 1), "attempts": job.attempts}
        else:
            inputs = job.inputs()
            record = {"job": job.name, "state": state, "settings": job.settings, "inputs": inputs, "command": command,
                      "settings_hash": config_hash({"settings": job.settings, "inputs": inputs}), "code_commit": self.commit,
                      "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        write_json(path, record)

    def _write_status(self, state: str, force: bool = False) -> None:
        """status.json; a disk that is full costs a warning here, never the grid."""
        if not force and time.monotonic() - self.status_written < STATUS_EVERY_S:
            return
        self.status_written = time.monotonic()
        path = Path(self.cfg.results_root) / "status.json"
        try:
            write_json(path, {"study": self.cfg.study, "state": state, "updated": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                              "owner": owner_info(), "jobs": status_rows(self.cfg, self.jobs)})
        except OSError as error:
            if "status" not in self.warned:
                self.warned.add("status")
                self.display.event(f"warning: {path} cannot be written: {error.strerror or error}")


def marker_of(cfg: ExperimentConfig) -> str:
    return f"{Path(cfg.results_root).resolve()}::"


def missing_text(cfg: ExperimentConfig, job: Job, roles: list[str]) -> str:
    """What a blocked job waits for and how to get it."""
    if job.stage == "analysis":
        return f"no results in {Path(cfg.results_root) / 'eval_metrics'}; --mode eval makes them"
    return f"missing: {', '.join(roles)}"


def discard(cfg: ExperimentConfig, job: Job) -> None:
    """Remove a forced job's output; a finished training that only grows in steps is kept, to go on from its checkpoint."""
    root = Path(cfg.results_root)
    job.forced = False
    if job.stage == "train":
        if "goes on from its checkpoint" not in judge(cfg, job)[1]:
            shutil.rmtree(job.output.parent, ignore_errors=True)
    elif job.stage in ("base", "eval", "sparsity"):
        job.output.unlink(missing_ok=True)
        if job.stage == "eval":
            shutil.rmtree(root / "eval_samples" / job.run, ignore_errors=True)
    record_path(cfg, job).unlink(missing_ok=True)


def prune(job: Job) -> None:
    """Delete the checkpoints of a finished training run; such a run can no longer be extended."""
    shutil.rmtree(job.output.parent / "checkpoints", ignore_errors=True)


# --------------------------------------------------------------------------------------------------------------------
# Lock

def owner_info() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": os.uname().nodename, "command": shlex.join(sys.argv)}


@contextlib.contextmanager
def only_one(root: Path) -> Iterator[None]:
    """Hold RESULTS_ROOT/orchestrator.lock. The kernel frees it when the owner dies, however it dies.

    Raises:  UserError naming the owner if another orchestrator holds it.
    """
    import fcntl
    path = root / "orchestrator.lock"
    with open(path, "a+", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another run_experiments.py works on {root}: {lock_owner(path)}; wait for it or stop it "
                            f"(--mode status shows where it stands)") from None
        handle.truncate(0)
        handle.write(json.dumps(owner_info()))
        handle.flush()
        yield


def lock_owner(path: Path) -> str:
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
        return f"process {owner['pid']} on {owner['host']} ({owner['command']})"
    except (OSError, ValueError, KeyError):
        return "unknown owner"


def is_locked(root: Path) -> bool:
    """True while an orchestrator of this machine works on ``root``."""
    import fcntl
    try:
        with open(root / "orchestrator.lock", encoding="utf-8") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


# --------------------------------------------------------------------------------------------------------------------
# Before anything starts

def apply_force(cfg: ExperimentConfig, jobs: dict[str, Job]) -> None:
    """Mark what --force names. UserError for a name that is neither a run nor a job."""
    runs = {job.run for job in jobs.values() if job.run}
    for name in cfg.force:
        if name not in {*runs, *jobs, "stale", "all"}:
            raise UserError(f"--force {name}: no such run or job{nearest(name, [*runs, *jobs, 'stale', 'all'])}")
        for job in jobs.values():
            if name in (job.name, job.run or None, "all") or (name == "stale" and judge(cfg, job)[0] == "stale"):
                job.forced = True


def first_look(cfg: ExperimentConfig, jobs: dict[str, Job]) -> None:
    """Set the state of every job from the files that are there; a job behind one that is still to do waits."""
    for job in jobs.values():
        record = read_record(cfg, job)
        job.seconds, job.attempts = (record.get("seconds", 0.0), 0) if record.get("state") == "done" else (0.0, 0)
        state, reason = judge(cfg, job)
        behind = [n for n in (*job.needs, *job.after) if n in jobs and jobs[n].state != "done"]
        job.state, job.reason = ("waiting", "") if state in ("todo", "done") and behind else (state, reason)
        job.exit_code = EXIT_DONE if job.state == "done" else None
        if job.stage == "train":
            job.step = last_step(job)


def refuse_stale(jobs: dict[str, Job]) -> None:
    """UserError if existing outputs were made with other settings: they are neither used nor overwritten unasked."""
    stale = [job for job in jobs.values() if job.state == "stale"]
    if stale:
        lines = "\n".join(f"  {job.name}: {job.reason}" for job in stale)
        raise UserError(f"{len(stale)} output(s) were made with other settings:\n{lines}\n"
                        f"--force stale (or --force NAME) makes them anew, another --results_root keeps them, and the old settings use them")


def training_bytes(job: Job, parameters: int) -> tuple[float, float]:
    """(bytes of its checkpoints, bytes of its final model) that one training run writes at most."""
    options = parse_config(TrainConfig, job.argv)
    arm, _ = resolve_arm(options)
    master = DTYPE_BYTES[arm.param_dtype]
    state = master + 2 * DTYPE_BYTES[arm.optimizer_state_dtype] + (2 if arm.update_rounding == "kahan" else 0)
    # one more than are kept: a new checkpoint is whole before the oldest goes
    return parameters * state * (max(1, options.keep_checkpoints) + 1.0), parameters * master


def size_text(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0


def require_disk(cfg: ExperimentConfig, jobs: dict[str, Job], parallel: int) -> None:
    """UserError if the training runs that are still to do would not fit on the disk of RESULTS_ROOT."""
    parameters = count_parameters(cfg.model_name_or_path)
    todo = [job for job in jobs.values() if job.stage == "train" and job.state != "done"]
    if not parameters or not todo:
        return
    sizes = [training_bytes(job, parameters) for job in todo]
    finals, checkpoints = sum(size[1] for size in sizes), sorted((size[0] for size in sizes), reverse=True)
    need_pruned = finals + sum(checkpoints[:parallel])
    need = need_pruned if cfg.prune else finals + sum(checkpoints)
    there = sum(folder_bytes(job.output.parent) for job in todo)
    root = Path(cfg.results_root)
    free = shutil.disk_usage(next(p for p in (root, *root.resolve().parents) if p.exists())).free
    if need - there > free:
        hint = "" if cfg.prune else f"; with --prune it would be {size_text(need_pruned - there)}"
        raise UserError(f"{len(todo)} training run(s) will write up to {size_text(need - there)} below {root}, and {size_text(free)} "
                        f"are free{hint}. Free some space, choose another --results_root, or keep fewer checkpoints "
                        f"(--train_args keep_checkpoints=1)")


def block_without_training(cfg: ExperimentConfig, jobs: dict[str, Job], every: dict[str, Job]) -> None:
    """In a mode that does not train, block what needs a training run that is not finished with these settings."""
    for job in jobs.values():
        for need in job.needs:
            if need not in jobs and every[need].stage == "train":
                state, reason = judge(cfg, every[need])
                if state != "done":
                    job.state = "blocked"
                    job.reason = f"{need} is stale: {reason}" if state == "stale" else f"{need} is not finished; --mode train makes it"


def preflight(cfg: ExperimentConfig, jobs: dict[str, Job], parallel: int) -> None:
    """UserError for what would only fail hours later: memory, disk, an output folder that cannot be written."""
    base = Path(cfg.model_name_or_path)
    # "data/tiny_base" could also be a hub id; it is meant as a folder where its first part is one
    is_folder = base.is_absolute() or cfg.model_name_or_path.startswith((".", "~")) or Path(base.parts[0]).is_dir()
    if is_folder and not (base / "config.json").exists() and not cfg.prepare_model:
        raise UserError(f"model folder {base} does not exist or holds no config.json; --model_name_or_path names another")
    trainings = [parse_config(TrainConfig, job.argv) for job in jobs.values() if job.stage == "train" and job.state != "done"]
    if trainings:
        require_memory(cfg.model_name_or_path, {t.precision_mode: resolve_arm(t)[0] for t in trainings}, trainings[0].device)
    require_disk(cfg, jobs, parallel)


# --------------------------------------------------------------------------------------------------------------------
# Main

def show_status(cfg: ExperimentConfig, jobs: dict[str, Job]) -> int:
    """Print the table from the files, overlaid with what the last or running orchestrator knew. Exit code 1 if a job failed."""
    root = Path(cfg.results_root)
    alive = is_locked(root)
    with contextlib.suppress(UserError):
        saved = read_json(root / "status.json")
        for row in saved.get("jobs", []):
            job = jobs.get(row["job"])
            if job is None or job.state in ("done", "stale"):
                continue
            job.attempts, job.exit_code, job.reason = row["attempts"], row["exit_code"], row["reason"] or ""
            if row["state"] in ("failed", "blocked", "interrupted"):
                job.state = row["state"]
            elif row["state"] == "running":
                job.state = "running" if alive else "interrupted"
    owner = lock_owner(root / "orchestrator.lock")
    print(f"{cfg.study}: {'at work: ' + owner if alive else 'no run_experiments.py is at work'}")
    print("\n".join([*status_table(jobs), *problem_lines(cfg, jobs)]))
    return EXIT_FAILED if any(job.state == "failed" for job in jobs.values()) else EXIT_DONE


def show_commands(cfg: ExperimentConfig, jobs: dict[str, Job], slots: Slots) -> int:
    """Print every job's command, those that are done as comments."""
    print(f"cd {shlex.quote(str(Path.cwd()))}")
    for job in jobs.values():
        command = pasteable(job_command(cfg, job, slots), job_environment(cfg, job, slots))
        print(f"# {job.name}: {cell(job)}" + (f" ({job.reason})" if job.reason else ""))
        print(f"# {command}" if job.state == "done" else command)
    return EXIT_DONE


def show_analysis(cfg: ExperimentConfig, job: Job) -> None:
    """The verdict table: what analyze_results.py printed the last time."""
    text = log_tail(log_path(cfg, job)).rpartition("\n=== ")[2] if log_path(cfg, job).exists() else ""
    print("\n".join(text.splitlines()[1:]) or f"analysis: {job.output}")


def exit_code(grid: Grid) -> int:
    """3 if stopped, 1 if a job failed (2 if each of them found its request wrong), else 0."""
    if grid.stops:
        return EXIT_INTERRUPTED
    bad = [job for job in grid.jobs.values() if job.state in ("failed", "stale", "blocked")]
    if not bad:
        return EXIT_DONE
    failed = [job for job in bad if job.state != "blocked"]
    return EXIT_BAD_REQUEST if all(job.exit_code == EXIT_BAD_REQUEST or job.state == "stale" for job in failed) else EXIT_FAILED


def main(cfg: ExperimentConfig) -> int:
    root = Path(cfg.results_root)
    wanted = STAGES_OF_MODE[cfg.mode]
    every = build_jobs(cfg)
    jobs = {name: job for name, job in every.items() if job.stage in wanted}
    apply_force(cfg, jobs)
    first_look(cfg, jobs)
    if cfg.mode == "status":
        return show_status(cfg, jobs)
    slots = Slots(choose_gpus(cfg), cfg.max_parallel, cfg.num_threads)
    if cfg.dry_run:
        return show_commands(cfg, jobs, slots)
    refuse_stale(jobs)
    preflight(cfg, jobs, slots.places)
    for folder in (root, root / "logs", root / "jobs"):
        require_writable_dir(folder)
    with only_one(root):
        left_over = end_processes(marker_of(cfg), KILL_GRACE_S)
        if left_over:
            print(f"stopped {left_over} process(es) that an orchestrator which died had left behind")
        first_look(cfg, jobs)
        block_without_training(cfg, jobs, every)
        if cfg.prune:
            for job in jobs.values():
                if job.stage == "train" and job.state == "done":
                    prune(job)
        grid = Grid(cfg, jobs, slots)
        grid.run()
    print("\n".join(status_table(jobs)))
    if "analysis" in jobs and jobs["analysis"].state == "done":
        show_analysis(cfg, jobs["analysis"])
    problems = problem_lines(cfg, jobs)
    if problems:
        print("\n".join(problems), file=sys.stderr)
    return exit_code(grid)


if __name__ == "__main__":
    run_script(main, ExperimentConfig, description=__doc__)
