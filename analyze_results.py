"""Results of a study -> verdicts on three hypotheses, JSON, plots and a report.

In:  RESULTS_DIR/{arm}_seed{S}[_rep{R}].json (eval_policy.py) and {run}_sparsity.json (utils_bf16_sparsity.py); beside that folder, where
     there, train_logs/{run}/metrics.jsonl and status.json. Files that only hold tasks.X.{ft_avg_score, delta_j, avg_kl} and
     sparsity.sparsity_percent are read too; arm and seed then come from the file name.
Out: OUTPUT_DIR/full_analysis.json, summary.csv, report.md, report.html (one file, plots inside) and the plots as PNG.

    python analyze_results.py --results_dir results/tiny/eval_metrics --output_dir results/tiny/analysis      # seconds
    python analyze_results.py --results_dir results/eval_metrics --output_dir results/analysis --on_task dm_val \\
        --off_task aime24 aime25 amc23 math500 mmlu_stem humaneval

Rules, fixed before any number is read (arm X against reference Y, level alpha = 0.05; one value per seed):
H1  on-task means are equal: two one-sided Welch tests within the margin (0.05), and both means are above 0 (one-sided t tests).
    Not supported: the interval of the difference lies wholly outside the margin, or a mean is shown to be below 0. Else inconclusive.
H2  off-task results spread more under X: joint permutation test over the off-task benchmarks (whole runs relabelled, Brown-Forsythe
    statistic on each task, their mean) p < 0.05, and the one-sided 95 % lower bound of the mean log variance ratio above 0.
    Not supported: the upper bound lies below log(1.5). Else, and always when the smallest attainable p is not below 0.05, inconclusive.
H3  on-task KL is equal: ratio of geometric means within [1/1.25, 1.25], two one-sided Welch tests on the log scale; and off-task log KL
    spreads more under X, by the rule of H2. Supported if both are, not supported if one is not supported, else inconclusive.
``overall_supported`` means that the verdict is "supported". The older point rules stay beside, under ``verification``.
"""

from __future__ import annotations

import base64
import csv
import html
import io
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Sequence

import numpy as np

import utils_stats as st
from config import AnalyzeConfig, UserError, arm_name, nearest
from utils_run import (atomic_path, git_state, package_versions, read_json, read_jsonl, require_writable_dir, run_script, write_json,
                       write_text)

RUN_NAME = re.compile(r"^(?P<arm>.+)_seed(?P<seed>-?\d+)(?:_rep(?P<rep>\d+))?$")
SPARSITY_SUFFIX = "_sparsity"
NOT_RESULTS = ("base.json", "status.json")
KL_ZERO = 1e-9  # nats; a KL at or below this is zero up to float32 rounding, and its logarithm means nothing

SUPPORTED, NOT_SUPPORTED, INCONCLUSIVE = st.SUPPORTED, st.NOT_SUPPORTED, st.INCONCLUSIVE
IN_WORDS = {SUPPORTED: "supported", NOT_SUPPORTED: "not supported", INCONCLUSIVE: "inconclusive"}

# What the study's own setting has: Qwen2.5-Math-7B at lr 1e-6 in bf16 masters. A step of 1e-6 registers only where half a bf16 ULP is smaller,
# that is |w| below about 5e-4 (ULP/|w| is 2^-8 to 2^-7), about 2 % of weights with a standard deviation near 0.02.
REFERENCE_7B = {"setting": "7B at learning rate 1e-6, bf16 masters (estimate)", "lost_update_share": 0.98}

SYNTHETIC_BANNER = "SYNTHETIC DATA - generated stand-ins, not the real benchmarks of these names"


# --------------------------------------------------------------------------------------------------------------------
# Reading

@dataclass
class Run:
    """One evaluated policy. ``tasks[name]`` holds plain numbers; ``scores[name]`` and ``kl_scores[name]`` (problems, draws)."""

    name: str
    arm: str
    seed: int
    replicate: int
    path: str
    study: str | None
    synthetic: bool | None
    tasks: dict[str, dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    scores: dict[str, np.ndarray] = field(default_factory=dict)
    kl_scores: dict[str, np.ndarray] = field(default_factory=dict)
    problem_ids: dict[str, tuple] = field(default_factory=dict)
    sparsity: dict[str, Any] | None = None
    metrics: list[dict[str, Any]] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int, int]:
        return self.arm, self.seed, self.replicate


@dataclass
class Study:
    """All runs in a fixed order (arm, seed, replicate), what is missing or odd, and what the report must say about the data."""

    runs: list[Run]
    missing: list[str]
    synthetic: bool
    arms: list[str]
    tasks: list[str]
    on_task: list[str]
    off_task: list[str]
    noise: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)  # filled by noise_block
    noise_floor: dict[str, list[dict[str, Any]]] = field(default_factory=dict)       # task -> re-evaluations of one policy

    def independent(self, arm: str) -> list[Run]:
        """One run per seed (the lowest replicate): runs that differ in the replicate alone share their seed's fate."""
        first: dict[int, Run] = {}
        for run in self.runs:
            if run.arm == arm:
                first.setdefault(run.seed, run)
        return list(first.values())

    def values(self, arm: str, task: str, key: str) -> dict[int, float]:
        """Seed -> value, over the independent runs that have it."""
        return {r.seed: r.tasks[task][key] for r in self.independent(arm) if r.tasks.get(task, {}).get(key) is not None}


def number(value: Any) -> float | None:
    """``value`` as float, or None where it is no finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def parse_run(path: Path, content: dict[str, Any], notes: list[str]) -> Run | None:
    """A Run from one result file, or None (with a note) where arm or seed cannot be known."""
    name = path.stem
    match = RUN_NAME.match(name)
    arm = content.get("arm") if isinstance(content.get("arm"), str) else content.get("precision_mode")
    seed = content.get("seed")
    if not isinstance(arm, str) or not isinstance(seed, int) or isinstance(seed, bool):
        if not match:
            notes.append(f"{path.name}: ignored, it names no arm and seed and its file name is not ARM_seedS.json")
            return None
        arm = arm if isinstance(arm, str) else match["arm"]
        seed = seed if isinstance(seed, int) and not isinstance(seed, bool) else int(match["seed"])
    overrides = content.get("overrides")
    if isinstance(overrides, dict) and overrides and "+" not in arm:
        arm = arm_name(arm, overrides)
    replicate = content.get("noise_replicate")
    if not isinstance(replicate, int) or isinstance(replicate, bool):
        replicate = int(match["rep"] or 0) if match else 0
    if match and (match["arm"], int(match["seed"])) != (arm, seed):
        notes.append(f"{path.name}: the file says arm {arm}, seed {seed}; that was used, not its name")
    synthetic = content.get("synthetic_data")
    run = Run(name=name, arm=arm, seed=seed, replicate=replicate, path=path.name,
              study=content.get("study") if isinstance(content.get("study"), str) else None,
              synthetic=synthetic if isinstance(synthetic, bool) else None, tasks={},
              settings={k: content[k] for k in ("base_ckpt", "sampling", "versions", "eval_dtype") if k in content})
    for task, entry in sorted(content["tasks"].items()):
        if not isinstance(entry, dict):
            notes.append(f"{path.name}: task {task} ignored, it is not an object")
            continue
        read_task(run, task, entry, notes)
    if not run.tasks:
        notes.append(f"{path.name}: ignored, it holds no task")
        return None
    return run


def read_task(run: Run, task: str, entry: dict[str, Any], notes: list[str]) -> None:
    """Fill ``run.tasks[task]`` and, where the file has them, the score matrices."""
    kept: dict[str, Any] = {k: number(v) for k, v in entry.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    for key in ("outcomes", "task_type", "on_task"):
        if key in entry:
            kept[key] = entry[key]
    for key in ("delta_j", "ft_avg_score", "avg_kl"):
        if key in entry and number(entry[key]) is None:
            notes.append(f"{run.path}: {task}.{key} is {entry[key]!r}, counted as missing")
            kept[key] = None
    if kept.get("delta_j") is None and kept.get("ft_avg_score") is not None and kept.get("base_avg_score") is not None:
        kept["delta_j"] = kept["ft_avg_score"] - kept["base_avg_score"]
    run.tasks[task] = kept
    scores = entry.get("scores")
    if isinstance(scores, dict) and scores.get("ft"):
        matrix = rectangular(scores["ft"])
        if matrix is None:
            notes.append(f"{run.path}: {task}.scores is not a full problems x draws table; its noise is not removed")
        else:
            run.scores[task] = matrix
            run.problem_ids[task] = tuple(map(str, scores.get("problem_ids") or range(len(matrix))))
    kl = entry.get("kl_scores")
    if isinstance(kl, dict) and kl.get("kl_exact_per_token"):
        per_token = rectangular(kl["kl_exact_per_token"])
        tokens = rectangular(kl["num_tokens"]) if kl.get("num_tokens") else None
        total = kept.get("kl_exact_per_token")
        if per_token is not None and total is not None:
            run.kl_scores[task] = kl_influence(per_token, tokens, total)


def rectangular(rows: Any) -> np.ndarray | None:
    """(problems, draws) float32 from nested lists, or None where rows differ in length or hold anything but finite numbers."""
    try:
        matrix = np.array(rows, dtype=np.float32)
    except (TypeError, ValueError):
        return None
    return matrix if matrix.ndim == 2 and matrix.size and np.isfinite(matrix).all() else None


def kl_influence(per_token: np.ndarray, tokens: np.ndarray | None, total: float) -> np.ndarray:
    """Per-draw values whose mean is the run's KL per token, however it was averaged.

    A mean over responses is taken as it is; a mean over tokens is a ratio of sums, and its linearisation is used.
    """
    if tokens is None or tokens.shape != per_token.shape or tokens.sum() == 0 or math.isclose(float(per_token.mean()), total, rel_tol=1e-4):
        return per_token
    ratio = float((per_token * tokens).sum() / tokens.sum())
    return ratio + (per_token - ratio) * tokens / tokens.mean()


def read_study(cfg: AnalyzeConfig, results_dir: Path, logs_dir: Path) -> Study:
    """Every run of ``results_dir`` with its sparsity and training log. Raises UserError for nothing to analyse, broken or mixed files."""
    if not results_dir.is_dir():
        raise UserError(f"results folder {results_dir} does not exist; evaluate a policy first or pass --results_dir")
    notes: list[str] = []
    runs: dict[tuple[str, int, int], Run] = {}
    sparsity: dict[str, dict[str, Any]] = {}
    for path in sorted(results_dir.glob("*.json")):
        if path.name in NOT_RESULTS or path.name.startswith("."):
            continue
        content = read_json(path)
        if path.stem.endswith(SPARSITY_SUFFIX):
            block = content.get("sparsity") if isinstance(content, dict) else None
            if isinstance(block, dict) and number(block.get("sparsity_percent")) is not None:
                sparsity[path.stem.removesuffix(SPARSITY_SUFFIX)] = content
            else:
                notes.append(f"{path.name}: ignored, it has no sparsity.sparsity_percent")
            continue
        if not isinstance(content, dict) or not isinstance(content.get("tasks"), dict):
            notes.append(f"{path.name}: ignored, it has no tasks")
            continue
        run = parse_run(path, content, notes)
        if run is None:
            continue
        if run.key in runs:
            same = runs[run.key].tasks == run.tasks
            if not same:
                raise UserError(f"{runs[run.key].path} and {run.path} both claim arm {run.arm}, seed {run.seed}, replicate {run.replicate} "
                                "and differ; remove one of them")
            notes.append(f"{run.path}: a copy of {runs[run.key].path}, counted once")
            continue
        runs[run.key] = run
    if not runs:
        raise UserError(f"no results to analyse in {results_dir} (expected files like fp32_seed1.json with a 'tasks' object)")
    ordered = [runs[key] for key in sorted(runs)]
    for run in ordered:
        run.sparsity = sparsity.pop(run.name, None)
        log = logs_dir / run.name / "metrics.jsonl"
        if log.is_file():
            run.metrics = [row for row in read_jsonl(log, tolerate_last=True) if isinstance(row, dict)]
    notes.extend(f"{name}{SPARSITY_SUFFIX}.json: no result file of that run" for name in sorted(sparsity))
    synthetic = check_mixture(cfg, ordered, notes)
    notes.extend(failed_jobs(results_dir.parent / "status.json"))
    if logs_dir.is_dir():
        evaluated = {run.name for run in ordered}
        notes.extend(f"{folder.name}: trained or begun, not evaluated" for folder in sorted(logs_dir.iterdir())
                     if folder.is_dir() and RUN_NAME.match(folder.name) and folder.name not in evaluated)
    study = arrange(cfg, ordered, notes, synthetic)
    study.noise_floor = read_noise_floor(results_dir.parent / "noise_floor", study.missing)
    return study


def read_noise_floor(folder: Path, notes: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Task -> how far the score of one and the same policy moved (``eval_policy.py --noise_floor``), one entry a file; {} without any."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        content = read_json(path)
        if not isinstance(content, dict) or not isinstance(content.get("tasks"), dict):
            notes.append(f"noise_floor/{path.name}: ignored, it has no tasks")
            continue
        for task, entry in sorted(content["tasks"].items()):
            if isinstance(entry, dict) and number(entry.get("sd_over_seeds")) is not None:
                found.setdefault(task, []).append({"file": path.name, **{k: number(entry.get(k)) for k in (
                    "sd_over_seeds", "expected_sd", "max_abs_difference_between_batch_sizes")}})
    return found


def check_mixture(cfg: AnalyzeConfig, runs: list[Run], notes: list[str]) -> bool:
    """Is any of the data synthetic? Raises UserError for a mixture (of data kinds or studies) that was not asked for."""
    kinds = {run.synthetic for run in runs}
    studies = sorted({run.study for run in runs if run.study})
    mixed_data = len(kinds) > 1 and True in kinds
    if mixed_data and not cfg.allow_mixed_data:
        fake = next(r.path for r in runs if r.synthetic)
        other = next(r.path for r in runs if not r.synthetic)
        raise UserError(f"synthetic and other data are mixed ({fake} is synthetic, {other} is not marked so); "
                        "separate them or pass --allow_mixed_data")
    if len(studies) > 1 and not cfg.allow_mixed_data:
        raise UserError(f"results of several studies are mixed ({', '.join(studies)}); separate them or pass --allow_mixed_data")
    if mixed_data:
        notes.append("synthetic and real data are mixed, as asked for by --allow_mixed_data")
    if len(studies) > 1:
        notes.append(f"several studies are mixed, as asked for by --allow_mixed_data: {', '.join(studies)}")
    return True in kinds


def failed_jobs(path: Path) -> list[str]:
    """Notes on jobs of status.json that did not succeed; an unreadable or unknown status file is a note too."""
    if not path.is_file():
        return []
    try:
        content = read_json(path)
    except UserError as error:
        return [str(error)]
    rows = content.get("jobs", content) if isinstance(content, dict) else content
    if isinstance(rows, dict):
        rows = [{"job": name, **row} for name, row in rows.items() if isinstance(row, dict)]
    notes = []
    for row in rows if isinstance(rows, list) else []:
        state = str(row.get("state", "")).lower() if isinstance(row, dict) else ""
        if state in ("failed", "error", "interrupted", "timeout", "skipped", "blocked", "stale"):
            name = row.get("job") or row.get("name") or row.get("id") or "job"
            notes.append(f"{name}: {state}" + (f", exit code {row['exit_code']}" if row.get("exit_code") is not None else "")
                         + (f", {row['reason']}" if row.get("reason") else "")
                         + (f", log {row.get('log') or row['log_path']}" if row.get("log") or row.get("log_path") else ""))
    return notes


def arrange(cfg: AnalyzeConfig, runs: list[Run], notes: list[str], synthetic: bool) -> Study:
    """Fix the order of arms and tasks and list which of those asked for are missing."""
    present = {run.arm for run in runs}
    if cfg.precision_modes:
        for arm in cfg.precision_modes:
            if arm not in present:
                notes.append(f"arm {arm}: no result{nearest(arm, present)}")
        left_out = sorted(present - set(cfg.precision_modes) - {cfg.reference})
        if left_out:
            notes.append(f"not asked for, left out: {', '.join(left_out)}")
        arms = [a for a in dict.fromkeys([cfg.reference, *cfg.precision_modes]) if a in present]
        if not present & set(cfg.precision_modes):
            raise UserError(f"none of the arms {', '.join(cfg.precision_modes)} is in the results (there are: {', '.join(sorted(present))})")
    else:
        usual = [cfg.reference, "bf16", "bf16_mixed", "bf16_storage"]
        arms = [a for a in usual if a in present] + sorted(present - set(usual))
    if cfg.reference not in present:
        notes.append(f"reference arm {cfg.reference}: no result{nearest(cfg.reference, present)}; nothing can be compared with it")
    runs = [run for run in runs if run.arm in arms]
    found = sorted({task for run in runs for task in run.tasks})
    off_task = list(cfg.off_task) or [task for task in found if task not in cfg.on_task]
    for task in [*cfg.on_task, *off_task]:
        if task not in found:
            notes.append(f"task {task}: in no result{nearest(task, found)}")
    unused = [t for t in found if t not in cfg.on_task and t not in off_task]
    if unused:
        notes.append(f"tasks in the results that were not asked for: {', '.join(unused)}")
    used = [t for t in [*cfg.on_task, *off_task] if t in found]
    seeds = {arm: sorted({r.seed for r in runs if r.arm == arm}) for arm in arms}
    every_seed = sorted({s for arm in arms for s in seeds[arm]})
    for arm in arms:
        absent = [str(s) for s in every_seed if s not in seeds[arm]]
        if absent:
            notes.append(f"arm {arm}: no seed {', '.join(absent)} (other arms have)")
    for run in runs:
        absent = [t for t in used if run.tasks.get(t, {}).get("delta_j") is None]
        if absent:
            notes.append(f"{run.name}: no result on {', '.join(absent)}")
    for task in used:
        sizes = {(int(r.tasks[task].get("num_problems") or 0), int(r.tasks[task].get("num_samples") or 0)) for r in runs if task in r.tasks}
        if len(sizes) > 1:
            notes.append(f"task {task}: runs differ in number of problems or draws ({', '.join(f'{p} x {k}' for p, k in sorted(sizes))})")
        bases = {round(b, 9) for r in runs if (b := r.tasks.get(task, {}).get("base_avg_score")) is not None}
        if len(bases) > 1:
            notes.append(f"task {task}: runs were compared with different base scores ({', '.join(f'{b:.4f}' for b in sorted(bases))})")
    return Study(runs=runs, missing=notes, synthetic=synthetic, arms=arms, tasks=used,
                 on_task=[t for t in cfg.on_task if t in found], off_task=[t for t in off_task if t in found])


# --------------------------------------------------------------------------------------------------------------------
# Blocks of the JSON: numbers, and null with a reason

def finite(block: Any, reason: str = "") -> Any:
    """Copy of ``block`` with NaN and infinity as null; a dict in which that happened carries ``reason``."""
    if isinstance(block, dict):
        copy = {k: finite(v, reason) for k, v in block.items()}
        lost = any(isinstance(v, (float, np.floating)) and not math.isfinite(v) for v in block.values())
        return {**copy, "reason": reason} if lost and reason and "reason" not in copy else copy
    if isinstance(block, (list, tuple)):
        return [finite(v, reason) for v in block]
    if isinstance(block, (np.floating, float)):
        return float(block) if math.isfinite(block) else None
    if isinstance(block, np.integer):
        return int(block)
    return block


def factor(log_ratio: float) -> float:
    """exp of a log ratio; infinity where it overflows (a jackknife bound without bound), which ``finite`` turns into null."""
    return math.exp(log_ratio) if log_ratio < 700 else math.inf


def as_factor(log_ratio: float) -> str:
    """A log ratio as a factor in words: two decimals, and no false digits far from 1."""
    return f"{factor(log_ratio):.2f}" if abs(log_ratio) < math.log(1000) else "over 1000" if log_ratio > 0 else "below 0.001"


def describe(values: dict[int, float]) -> dict[str, Any]:
    """Descriptive block of one arm on one task: population variance (the older keys) beside the sample variance and intervals."""
    x = np.array(list(values.values()))
    if x.size == 0:
        return {"n": 0, "mean": None, "std": None, "var": None, "reason": "no run has this value"}
    low, high = st.mean_interval(x)
    var_low, var_high = st.variance_interval(x)
    block = {"n": int(x.size), "mean": float(x.mean()), "std": float(x.std()), "var": float(x.var()),
             "sample_var": st.sample_variance(x) if x.size > 1 else math.nan, "mean_low": low, "mean_high": high,
             "var_low": var_low, "var_high": var_high, "values": {str(s): v for s, v in values.items()}}
    return finite(block, "one seed: descriptive only")


def noise_block(study: Study, arm: str, task: str, which: str) -> dict[str, Any]:
    """Variance between runs with the sampling of answers taken out, for one arm and task. ``which``: scores or kl_scores."""
    key = (arm, task, which)
    if key not in study.noise:
        study.noise[key] = measure_noise(study, arm, task, which)
    return dict(study.noise[key])


def measure_noise(study: Study, arm: str, task: str, which: str) -> dict[str, Any]:
    empty = {"noise_variance": None, "between_run_var": None}
    runs = [r for r in study.independent(arm) if task in r.tasks]
    have = [r for r in runs if task in getattr(r, which)]
    if len(have) < 2 or len(have) < len(runs):
        return {**empty, "reason": "noise not removed: " + ("fewer than two runs" if len(runs) < 2 else "no scores per problem and draw")}
    matrices = [getattr(r, which)[task] for r in have]
    if len({m.shape for m in matrices}) > 1 or len({r.problem_ids.get(task) for r in have}) > 1:
        return {**empty, "reason": "noise not removed: runs were evaluated on different problems or numbers of draws"}
    if matrices[0].shape[1] < 2:
        return {**empty, "reason": "noise not removed: one draw a problem"}
    noise = st.evaluation_noise(np.stack(matrices))
    key = "delta_j" if which == "scores" else "kl_exact_per_token"
    values = np.array([r.tasks[task][key] for r in have if r.tasks[task].get(key) is not None])
    if values.size < 2:
        return {**empty, "reason": f"noise not removed: no {key}"}
    moment = st.between_run_variance(values, noise["noise_variance"])
    block = {**noise, "between_run_var": moment, "noise_share": noise["noise_variance"] / st.sample_variance(values)
             if st.sample_variance(values) > 0 else math.nan}
    if noise["noise_variance"] > 0:
        low, high = st.q_profile_interval(values, noise["noise_variance"])
        block.update(reml_var=st.reml_variance(values, np.full(values.size, noise["noise_variance"])), q_profile_low=low, q_profile_high=high)
    return finite(block, "no spread between runs")


def resolution(study: Study, task: str) -> float:
    """Smallest step of a score on this task, 1 / (problems x draws), or NaN where it is not recorded."""
    steps = {r.tasks[task]["num_problems"] * r.tasks[task]["num_samples"] for r in study.runs
             if r.tasks.get(task, {}).get("num_problems") and r.tasks[task].get("num_samples")}
    return 1 / max(steps) if steps else math.nan


# --------------------------------------------------------------------------------------------------------------------
# Hypotheses

def verdict(kind: str, reason: str) -> dict[str, Any]:
    return {"verdict": kind, "verdict_reason": reason, "overall_supported": kind == SUPPORTED}


def paired(x: dict[int, float], y: dict[int, float]) -> tuple[np.ndarray, np.ndarray]:
    """Values of the seeds that both arms have, in the same order."""
    common = sorted(set(x) & set(y))
    return np.array([x[s] for s in common]), np.array([y[s] for s in common])


def two_arm_tests(x: dict[int, float], y: dict[int, float]) -> dict[str, Any]:
    """The older keys ``mean_test`` and ``variance_test`` for arm x against reference y."""
    too_few = "fewer than two seeds in an arm"
    if min(len(x), len(y)) < 2:
        return {"mean_test": {"t_statistic": None, "p_value": None, "reason": too_few},
                "variance_test": {"f_statistic": None, "p_value": None, "reason": too_few}}
    a, b = np.array(list(x.values())), np.array(list(y.values()))
    mean, f = st.welch(a, b), st.f_test(a, b)
    return {
        "mean_test": finite({"method": "Welch t test, two-sided", **mean, "student_p_value": st.student_p(a, b)}, "no spread in either arm"),
        "variance_test": finite({"method": "F test, ddof 1, two-sided", "p_value": f["p_value_two_sided"], **f}, "the reference arm has no spread"),
    }


def on_task_hypothesis(cfg: AnalyzeConfig, study: Study, arm: str, ref: str) -> dict[str, Any]:
    """H1 for one comparison."""
    tasks: dict[str, Any] = {}
    for task in study.on_task:
        x, y = study.values(arm, task, "delta_j"), study.values(ref, task, "delta_j")
        block: dict[str, Any] = {ref: describe(y), arm: describe(x), **two_arm_tests(x, y)}
        for name in (ref, arm):
            block[name]["noise"] = noise_block(study, name, task, "scores")
        a, b = np.array(list(x.values())), np.array(list(y.values()))
        if min(len(x), len(y)) < 2:
            block.update(equivalence=None, above_zero=None, paired=None,
                         **verdict(INCONCLUSIVE, f"{len(x)} and {len(y)} seeds: a test needs two in each arm; descriptive only"))
        else:
            tost = st.tost_welch(a, b, cfg.margin, cfg.alpha)
            named = {ref: b, arm: a}
            above = {name: {"p_above": st.mean_above(v), "p_below": st.mean_above(-v)} for name, v in named.items()}
            block.update(equivalence=finite(tost, "no spread in either arm"), above_zero=above, paired=paired_means(x, y, cfg.margin, cfg.alpha),
                         **mean_verdict(cfg, tost, named))
        block["verification"] = on_task_point_rules(cfg, block, ref, arm)
        block["supported"] = block["overall_supported"]
        tasks[task] = block
    kinds = [t["verdict"] for t in tasks.values()]
    overall = st.all_of(kinds)
    reason = "; ".join(f"{n}: {t['verdict_reason']}" for n, t in tasks.items()) or f"no on-task result ({', '.join(cfg.on_task)})"
    rules = [t["verification"] for t in tasks.values()]
    return {"statement": f"on-task performance does not depend on the arm ({arm} against {ref})", "tasks": tasks,
            "verification": {k: bool(rules) and all(r[k] is True for r in rules)
                             for k in ("means_positive", "means_similar", "variances_small", "variances_similar")},
            "num_tasks_supported": kinds.count(SUPPORTED), "total_tasks": len(kinds), **verdict(overall, reason)}


def mean_verdict(cfg: AnalyzeConfig, tost: dict[str, float], arms: dict[str, np.ndarray]) -> dict[str, Any]:
    """Verdict of H1 on one task, in words."""
    kind = st.decide_equal_means(tost, list(arms.values()), cfg.margin, cfg.alpha)
    size = (f"difference {tost['difference']:+.4f}, {100 * (1 - 2 * cfg.alpha):.0f} % interval {tost['low']:+.4f} to {tost['high']:+.4f}, "
            f"{position(tost, cfg.margin)} the margin of {cfg.margin:g}")
    negative = [name for name, v in arms.items() if st.mean_above(-v) < cfg.alpha]
    unshown = [name for name, v in arms.items() if not st.mean_above(v) < cfg.alpha]
    if kind == NOT_SUPPORTED and negative:
        return verdict(kind, f"the mean of {' and '.join(negative)} is below 0; {size}")
    if kind == INCONCLUSIVE and unshown:
        return verdict(kind, f"{size}; the mean of {' and '.join(unshown)} is not shown to be above 0")
    return verdict(kind, f"{size}; both means above 0" if kind == SUPPORTED else size)


def position(tost: dict[str, float], margin: float) -> str:
    """Where the interval lies: inside, outside, or not inside the margin."""
    if tost["low"] > margin or tost["high"] < -margin:
        return "wholly outside"
    return "inside" if -margin < tost["low"] and tost["high"] < margin else "not inside"


def paired_means(x: dict[int, float], y: dict[int, float], margin: float, alpha: float) -> dict[str, Any]:
    """Paired TOST and Pitman-Morgan on the seeds both arms have (shown beside the unpaired tests, which decide)."""
    a, b = paired(x, y)
    if a.size < 2:
        return {"num_pairs": int(a.size), "reason": "fewer than two seeds in common"}
    return {"num_pairs": int(a.size), "equivalence": finite(st.tost_paired(a - b, margin, alpha)),
            "pitman_morgan": finite(st.pitman_morgan(a, b), "fewer than three pairs, or no spread")}


def on_task_point_rules(cfg: AnalyzeConfig, block: dict[str, Any], ref: str, arm: str) -> dict[str, Any]:
    """The older point rules: looked at, not tested. None where a number they need is missing."""
    means, variances = [block[n]["mean"] for n in (ref, arm)], [block[n]["var"] for n in (ref, arm)]
    known = None not in means
    p_mean, p_var = block["mean_test"].get("p_value"), block["variance_test"].get("p_value")
    return {"means_positive": all(m > 0 for m in means) if known else None,
            "means_similar": p_mean > 0.05 if p_mean is not None else (abs(means[0] - means[1]) < cfg.margin if known else None),
            "variances_small": all(v < cfg.margin**2 for v in variances) if known else None,
            "variances_similar": p_var > 0.05 if p_var is not None else None,
            "rules": f"means > 0; mean_test p > 0.05; population variances < {cfg.margin:g} squared; variance_test p > 0.05"}


def spread_family(cfg: AnalyzeConfig, x: dict[str, dict[int, float]], y: dict[str, dict[int, float]], steps: dict[str, float],
                  label: str) -> dict[str, Any]:
    """Does arm x spread more than y over these tasks? Per task and jointly; the rule of H2.

    Args:    x, y: task -> seed -> value. steps: task -> smallest step of the value (NaN unknown). label: seeds the resampling, so that one
             test's random numbers do not depend on which others are run.
    """
    rng_seed = [cfg.seed, *label.encode()]
    seed = int(np.random.default_rng(rng_seed).integers(2**31))
    usable = [t for t in x if min(len(x[t]), len(y[t])) >= st.MIN_RUNS_FOR_SPREAD]
    seeds_x = sorted(set.intersection(*(set(x[t]) for t in usable))) if usable else []
    seeds_y = sorted(set.intersection(*(set(y[t]) for t in usable))) if usable else []
    tasks = {t: spread_of_task(cfg, x[t], y[t], steps[t], seed + i) for i, t in enumerate(x)}
    joint: dict[str, Any] = {"p_value": None, "tasks": usable, "seeds": [len(seeds_x), len(seeds_y)]}
    ratio: dict[str, Any] = {"estimate": None, "ratio": None, "lower_bound": None, "upper_bound": None, "tasks": []}
    if min(len(seeds_x), len(seeds_y)) >= st.MIN_RUNS_FOR_SPREAD:
        a = np.array([[x[t][s] for t in usable] for s in seeds_x])
        b = np.array([[y[t][s] for t in usable] for s in seeds_y])
        joint.update(finite(st.permutation_spread(a, b, cfg.num_resamples, seed), "no task has spread"))
        spread = [i for i in range(len(usable)) if st.sample_variance(a[:, i]) > 0 and st.sample_variance(b[:, i]) > 0]
        if spread:
            effect = st.log_variance_contrast([a[:, spread], b[:, spread]], [1, -1])
            ratio.update(finite({**effect, **{k: factor(effect[v]) for k, v in (
                ("ratio", "estimate"), ("ratio_low", "low"), ("ratio_high", "high"), ("ratio_lower_bound", "lower_bound"),
                ("ratio_upper_bound", "upper_bound"))}}, "too wide to be a number"), tasks=[usable[i] for i in spread])
        for t, p in zip(usable, joint.pop("per_task_p")):
            tasks[t]["permutation"].update(p_value=p, smallest_p=joint["smallest_p"])
    adjusted = st.holm([math.nan if tasks[t]["permutation"]["p_value"] is None else tasks[t]["permutation"]["p_value"] for t in tasks])
    for t, p in zip(tasks, adjusted):
        tasks[t]["permutation"]["p_holm"] = None if math.isnan(p) else p
        tasks[t].update(task_spread_verdict(cfg, tasks[t]))
        tasks[t]["supported"] = tasks[t]["overall_supported"]
    return {"tasks": tasks, "joint_test": joint, "mean_log_variance_ratio": ratio,
            "num_tasks_supported": sum(t["overall_supported"] for t in tasks.values()), "total_tasks": len(tasks),
            **family_spread_verdict(cfg, joint, ratio, len(tasks))}


def spread_of_task(cfg: AnalyzeConfig, x: dict[int, float], y: dict[int, float], step: float, seed: int) -> dict[str, Any]:
    """Variance ratio of one task with the F, Brown-Forsythe, bootstrap and paired tests; the permutation p is filled in by the family."""
    block: dict[str, Any] = {"permutation": {"p_value": None}, "variance_ratio": None}
    if min(len(x), len(y)) < 2:
        return {**block, "variance_test": {"f_statistic": None, "p_value": None, "reason": "fewer than two seeds in an arm"},
                "point_rule_larger": None}
    a, b = np.array(list(x.values())), np.array(list(y.values()))
    f = st.f_test(a, b)
    va, vb = st.sample_variance(a), st.sample_variance(b)
    block.update(
        variance_ratio=va / vb if vb > 0 else None,
        variance_test=finite({"method": "F test, ddof 1, one-sided", "p_value": f["p_value_greater"], **f}, "the reference arm has no spread"),
        brown_forsythe=finite(st.brown_forsythe(a, b), "no distance from the median varies"),
        bootstrap=finite(st.bootstrap_variance_ratio(a, b, cfg.num_resamples, seed), "fewer than three seeds, or an arm has no spread"),
        paired=paired_spread(x, y), point_rule_larger=bool(np.var(a) > np.var(b) and va > 0))
    if vb == 0:
        bound = st.ratio_bound_from_resolution(a, b.size, step)
        block.update(variance_ratio_reason="all values of the reference arm are identical",
                     variance_ratio_lower_bound=None if math.isnan(bound) else bound)
    if va > 0 and vb > 0 and min(a.size, b.size) >= st.MIN_RUNS_FOR_SPREAD:
        effect = st.log_variance_contrast([a[:, None], b[:, None]], [1, -1])
        block["log_variance_ratio"] = finite(effect)
    return block


def paired_spread(x: dict[int, float], y: dict[int, float]) -> dict[str, Any]:
    a, b = paired(x, y)
    if a.size < 3:
        return {"num_pairs": int(a.size), "reason": "fewer than three seeds in common"}
    return {"num_pairs": int(a.size), "pitman_morgan": finite(st.pitman_morgan(a, b), "a sum or difference is constant")}


def task_spread_verdict(cfg: AnalyzeConfig, task: dict[str, Any]) -> dict[str, Any]:
    p, upper = task["permutation"].get("p_holm"), (task.get("log_variance_ratio") or {}).get("upper_bound")
    if p is None:
        return verdict(INCONCLUSIVE, "no permutation test: fewer than three seeds in an arm, or no spread at all")
    if p < cfg.alpha:
        return verdict(SUPPORTED, f"permutation p after Holm {p:.4f}")
    if upper is not None and upper < math.log(cfg.ratio_margin) and task["permutation"]["smallest_p"] < cfg.alpha:
        return verdict(NOT_SUPPORTED, f"variance ratio at most {as_factor(upper)}")
    return verdict(INCONCLUSIVE, f"permutation p after Holm {p:.4f}")


def family_spread_verdict(cfg: AnalyzeConfig, joint: dict[str, Any], ratio: dict[str, Any], num_tasks: int) -> dict[str, Any]:
    """The rule of H2 on the joint test and the mean log variance ratio."""
    n = joint["seeds"]
    if num_tasks == 0:
        return verdict(INCONCLUSIVE, "no off-task result")
    if joint["p_value"] is None:
        few = min(n) < st.MIN_RUNS_FOR_SPREAD
        return verdict(INCONCLUSIVE, f"{n[0]} and {n[1]} complete seeds: a test of spread needs three in each arm" if few else
                       "no spread in either arm on any task")
    p = f"joint permutation p {joint['p_value']:.4f}"
    if joint["smallest_p"] >= cfg.alpha:
        return verdict(INCONCLUSIVE, f"with {n[0]} and {n[1]} seeds the smallest p that can be reached is 1/{joint['num_labellings']}, "
                       f"not below {cfg.alpha:g}: no data could decide ({p})")
    if ratio["estimate"] is None:
        return verdict(INCONCLUSIVE, f"{p}, but no task has spread in both arms, so there is no ratio to bound")
    size = (f"mean variance ratio {as_factor(ratio['estimate'])}, one-sided 95 % bounds {as_factor(ratio['lower_bound'])} "
            f"and {as_factor(ratio['upper_bound'])}")
    kind = st.decide_spread(joint["p_value"], joint["smallest_p"], ratio["lower_bound"], ratio["upper_bound"], cfg.alpha, cfg.ratio_margin)
    return verdict(kind, f"{size}: below {cfg.ratio_margin:g}; {p}" if kind == NOT_SUPPORTED else f"{p}; {size}")


def off_task_hypothesis(cfg: AnalyzeConfig, study: Study, arm: str, ref: str) -> dict[str, Any]:
    """H2 for one comparison."""
    x = {t: study.values(arm, t, "delta_j") for t in study.off_task}
    y = {t: study.values(ref, t, "delta_j") for t in study.off_task}
    family = spread_family(cfg, x, y, {t: resolution(study, t) for t in study.off_task}, f"H2 {arm} {ref}")
    for t, block in family["tasks"].items():
        family["tasks"][t] = {ref: {**describe(y[t]), "noise": noise_block(study, ref, t, "scores")},
                              arm: {**describe(x[t]), "noise": noise_block(study, arm, t, "scores")},
                              "mean_test": two_arm_tests(x[t], y[t])["mean_test"], **block}
    return {"statement": f"off-task performance varies more under {arm} than under {ref}", **family,
            "verification": spread_point_rule(family["tasks"]), "against_on_task": against_on_task(study, arm, ref)}


def spread_point_rule(tasks: dict[str, Any]) -> dict[str, Any]:
    """The older rule: larger variance in more than half of the tasks. Right by chance alone in a third of the studies without any effect."""
    larger = [t["point_rule_larger"] for t in tasks.values() if t.get("point_rule_larger") is not None]
    return {"num_tasks_variance_larger": sum(larger), "total_tasks": len(larger), "variance_larger_in_most": bool(larger) and 2 * sum(larger) > len(larger),
            "rules": "population variance larger than the reference's, in more than half of the tasks (says so in 34 to 46 % of studies without effect)"}


def against_on_task(study: Study, arm: str, ref: str) -> dict[str, Any]:
    """Off-task against on-task spread: normalised variances (descriptive) and the interaction of log variance ratios (testable)."""
    normalised = {}
    for name in (ref, arm):
        rows = {}
        for task in [*study.on_task, *study.off_task]:
            runs = [r.tasks[task] for r in study.independent(name) if task in r.tasks]
            values = list(study.values(name, task, "delta_j").values())
            p = [r["ft_avg_score"] for r in runs if r.get("ft_avg_score") is not None]
            problems = {r.get("num_problems") for r in runs}
            if len(values) > 1 and p and len(problems) == 1 and next(iter(problems)):
                unit = float(np.mean([q * (1 - q) for q in p])) / next(iter(problems))
                rows[task] = st.sample_variance(values) / unit if unit > 0 else None
        normalised[name] = rows
    tasks = [*study.on_task, *study.off_task]
    arms = []
    for name in (arm, ref):
        columns = [study.values(name, t, "delta_j") for t in tasks]
        common = sorted(set.intersection(*(set(c) for c in columns))) if columns else []
        arms.append(np.array([[c[s] for c in columns] for s in common]).reshape(len(common), len(tasks)))
    interaction: dict[str, Any] = {"estimate": None, "reason": "needs three seeds with every task, and spread everywhere"}
    if study.on_task and study.off_task and min(map(len, arms)) >= st.MIN_RUNS_FOR_SPREAD:
        spread = [all(st.sample_variance(a[:, i]) > 0 for a in arms) for i in range(len(tasks))]
        on = [i for i in range(len(study.on_task)) if spread[i]]
        off = [i for i in range(len(study.on_task), len(tasks)) if spread[i]]
        if on and off:
            weights = [-1 / len(on)] * len(on) + [1 / len(off)] * len(off)
            interaction = finite(st.log_variance_contrast([a[:, on + off] for a in arms], [1, -1], weights))
    return {"variance_over_binomial": normalised, "interaction": interaction,
            "note": "variance_over_binomial divides by mean p(1-p)/num_problems and is descriptive; the interaction is "
                    "log ratio off-task less log ratio on-task"}


def kl_measure(study: Study, arms: Sequence[str], task: str) -> tuple[str, str, str]:
    """(key, scale, why) of the KL that all runs of these arms have: exact per token on the log scale where possible."""
    runs = [r for a in arms for r in study.independent(a) if task in r.tasks]
    exact = [r.tasks[task].get("kl_exact_per_token") for r in runs]
    if exact and None not in exact:
        if min(exact) > KL_ZERO:
            return "kl_exact_per_token", "log", ""
        return "kl_exact_per_token", "raw", f"a value is at or below {KL_ZERO:g}: raw scale"
    return "avg_kl", "raw", "only avg_kl is there in every run: raw scale"


def kl_hypothesis(cfg: AnalyzeConfig, study: Study, arm: str, ref: str) -> dict[str, Any]:
    """H3 for one comparison."""
    on: dict[str, Any] = {}
    for task in study.on_task:
        key, scale, why = kl_measure(study, (arm, ref), task)
        x, y = study.values(arm, task, key), study.values(ref, task, key)
        on[task] = {ref: kl_describe(study, ref, task, y, key), arm: kl_describe(study, arm, task, x, key), **two_arm_tests(x, y),
                    "measure": key, "scale": scale, "scale_reason": why, **kl_equivalence(cfg, x, y, scale)}
        on[task]["supported"] = on[task]["overall_supported"]
    off_key = {t: kl_measure(study, (arm, ref), t) for t in study.off_task}
    def values(name: str, task: str) -> dict[int, float]:
        key, scale, _ = off_key[task]
        raw = study.values(name, task, key)
        return {s: math.log(v) for s, v in raw.items()} if scale == "log" else raw
    have = [t for t in study.off_task if values(arm, t) or values(ref, t)]
    family = spread_family(cfg, {t: values(arm, t) for t in have}, {t: values(ref, t) for t in have},
                           dict.fromkeys(have, math.nan), f"H3 {arm} {ref}")
    for t, block in family["tasks"].items():
        key, scale, why = off_key[t]
        x, y = study.values(arm, t, key), study.values(ref, t, key)
        family["tasks"][t] = {ref: kl_describe(study, ref, t, y, key), arm: kl_describe(study, arm, t, x, key),
                              "measure": key, "scale": scale, "scale_reason": why, **block}
    on_kinds = [t["verdict"] for t in on.values() if t[ref]["n"] and t[arm]["n"]]
    on_verdict = st.all_of(on_kinds)
    overall = st.all_of([on_verdict, family["verdict"]])
    on_reason = "; ".join(f"{n}: {t['verdict_reason']}" for n, t in on.items()) or "no on-task KL"
    off_part = {k: v for k, v in family.items() if k != "tasks"}
    point = spread_point_rule(family["tasks"])
    return {"statement": f"on-task KL is held equal while off-task KL spreads more under {arm} than under {ref}",
            "on_task": on, "off_task": family["tasks"], "tasks": {**on, **family["tasks"]}, "off_task_family": off_part,
            "verification": {"on_task_kl_similar": bool(on) and all(t["point_rule_similar"] is True for t in on.values()),
                             "off_task_kl_spread_larger": point["variance_larger_in_most"], **{f"off_task_{k}": v for k, v in point.items()}},
            "summary": {"on_task_kl_similar": on_verdict == SUPPORTED, "on_task_verdict": on_verdict,
                        "off_task_kl_spread_larger": family["verdict"] == SUPPORTED, "off_task_verdict": family["verdict"]},
            "num_tasks_supported": on_kinds.count(SUPPORTED) + family["num_tasks_supported"],
            "total_tasks": len(on_kinds) + family["total_tasks"],
            **verdict(overall, f"on-task {IN_WORDS[on_verdict]} ({on_reason}); off-task {IN_WORDS[family['verdict']]} ({family['verdict_reason']})")}


def kl_describe(study: Study, arm: str, task: str, values: dict[int, float], key: str) -> dict[str, Any]:
    """Descriptive block of a KL, with the geometric mean where it exists."""
    block = describe(values)
    x = np.array(list(values.values()))
    block["geometric_mean"] = float(np.exp(np.log(x).mean())) if x.size and x.min() > 0 else None
    block["unit"] = "nats per token" if key == "kl_exact_per_token" else "nats per sequence"
    if key == "kl_exact_per_token":
        block["noise"] = noise_block(study, arm, task, "kl_scores")
    return block


def kl_equivalence(cfg: AnalyzeConfig, x: dict[int, float], y: dict[int, float], scale: str) -> dict[str, Any]:
    """On-task part of H3 on one task."""
    a, b = np.array(list(x.values())), np.array(list(y.values()))
    similar = None if not (a.size and b.size and b.mean() > 0 and a.mean() > 0) else bool(1 / cfg.kl_margin <= a.mean() / b.mean() <= cfg.kl_margin)
    if min(a.size, b.size) < 2:
        return {"equivalence": None, "point_rule_similar": similar,
                **verdict(INCONCLUSIVE, f"{a.size} and {b.size} seeds: a test needs two in each arm")}
    if scale == "raw":
        tost = st.tost_ratio_of_means(a, b, cfg.kl_margin)
        block = {"equivalence": finite(tost, "the mean KL of the reference arm is not above 0"), "point_rule_similar": similar}
        if math.isnan(tost["p_value"]):
            return {**block, **verdict(INCONCLUSIVE, "the mean KL of the reference arm is not above 0, so there is no ratio")}
        size = f"ratio of means {tost['ratio']:.3f} (raw scale)"
        outside = 1 - max(tost["p_lower"], tost["p_upper"]) < cfg.alpha
    else:
        log_margin = math.log(cfg.kl_margin)
        tost = st.tost_welch(np.log(a), np.log(b), log_margin, cfg.alpha)
        ratios = {k: factor(tost[v]) for k, v in (("ratio", "difference"), ("ratio_low", "low"), ("ratio_high", "high"))}
        block = {"equivalence": finite({**tost, **ratios}, "no spread in either arm"), "point_rule_similar": similar,
                 "paired": paired_means({s: math.log(v) for s, v in x.items()}, {s: math.log(v) for s, v in y.items()}, log_margin, cfg.alpha)}
        size = f"ratio of geometric means {ratios['ratio']:.3f}, {100 * (1 - 2 * cfg.alpha):.0f} % interval {ratios['ratio_low']:.3f} to {ratios['ratio_high']:.3f}"
        outside = tost["low"] > log_margin or tost["high"] < -log_margin
    if tost["p_value"] < cfg.alpha:
        return {**block, **verdict(SUPPORTED, f"{size}, inside the margin of {cfg.kl_margin:g}")}
    if outside:
        return {**block, **verdict(NOT_SUPPORTED, f"{size}, wholly outside the margin of {cfg.kl_margin:g}")}
    return {**block, **verdict(INCONCLUSIVE, f"{size}, not inside the margin of {cfg.kl_margin:g}")}


# --------------------------------------------------------------------------------------------------------------------
# Sparsity, regime, decompositions

LOST_SHARE, ULP_RATIO = "precision/lost_update_share", "precision/update_over_ulp_median"


def sparsity_block(study: Study) -> dict[str, Any]:
    """Run -> sparsity of the update (the older key ``bf16_sparsity``)."""
    return {run.name: {"arm": run.arm, "seed": run.seed, **{k: finite(v) for k, v in run.sparsity["sparsity"].items()
                                                          if isinstance(v, (int, float, str, bool)) or v is None}}
            for run in study.runs if run.sparsity}


def run_mean(run: Run, key: str) -> float | None:
    """Mean of a logged key over the steps of a run."""
    values = [v for row in run.metrics if (v := number(row.get(key))) is not None]
    return float(np.mean(values)) if values else None


def regime(study: Study) -> dict[str, Any]:
    """Per arm, in which regime its numbers were obtained: lost updates, median |update| / ULP, sparsity; beside them the 7B estimate."""
    rows = {}
    for arm in study.arms:
        runs = study.independent(arm)
        row: dict[str, Any] = {"num_runs": len(runs)}
        for name, values in (("lost_update_share", [run_mean(r, LOST_SHARE) for r in runs]),
                             ("update_over_ulp_median", [run_mean(r, ULP_RATIO) for r in runs]),
                             ("sparsity_percent", [number(r.sparsity["sparsity"]["sparsity_percent"]) if r.sparsity else None for r in runs])):
            known = [v for v in values if v is not None]
            row[name] = float(np.mean(known)) if known else None
        rows[arm] = row
    return {"arms": rows, "reference_7b": REFERENCE_7B}


def seed_components(study: Study) -> dict[str, Any]:
    """Variance split into seed, float noise and evaluation noise, per arm and task; empty where no arm has replicates."""
    result: dict[str, Any] = {}
    for arm in study.arms:
        runs = [r for r in study.runs if r.arm == arm]
        if len({r.seed for r in runs}) == len(runs):
            continue
        for task in study.tasks:
            groups: dict[int, list[float]] = {}
            for r in runs:
                if r.tasks.get(task, {}).get("delta_j") is not None:
                    groups.setdefault(r.seed, []).append(r.tasks[task]["delta_j"])
            noise = noise_block(study, arm, task, "scores")["noise_variance"]
            parts = st.nested_components(list(groups.values()), math.nan if noise is None else noise)
            result.setdefault(arm, {})[task] = finite(parts, "needs two seeds, one with a replicate; evaluation noise needs scores per draw")
    return result


def factorial(study: Study) -> dict[str, Any]:
    """Storage, compute and their interaction where the four arms of the 2 x 2 are there; else {}."""
    if not set(st.FACTORIAL_ARMS) <= set(study.arms):
        return {}
    result: dict[str, Any] = {"cells": list(st.FACTORIAL_ARMS), "tasks": {}, "note":
                              "effects are bf16 minus float32; without --factorial in training, compute means compute + rollout + determinism"}
    for task in study.tasks:
        cells = [np.array(list(study.values(a, task, "delta_j").values())) for a in st.FACTORIAL_ARMS]
        if min(map(len, cells)) < 2:
            result["tasks"][task] = {"reason": "a cell has fewer than two seeds"}
            continue
        block = {"mean": {e: finite(st.contrast(cells, c), "no spread") for e, c in st.FACTORIAL_EFFECTS.items()}}
        if min(map(len, cells)) >= st.MIN_RUNS_FOR_SPREAD and all(st.sample_variance(c) > 0 for c in cells):
            block["log_variance"] = {e: finite(st.log_variance_contrast([c[:, None] for c in cells], s)) for e, s in st.FACTORIAL_EFFECTS.items()}
        else:
            block["log_variance"] = {"reason": "a cell has fewer than three seeds or no spread"}
        result["tasks"][task] = block
    return result


# --------------------------------------------------------------------------------------------------------------------
# Power

POWER_RATIOS = (2.0, 5.0, 20.0)
POWER_CURVE_SEEDS = (3, 4, 5, 6, 8, 10, 14, 20)
USUAL_CORRELATION = 0.3  # between tasks of one run, where too few runs are there to estimate it
POWER_CORRELATIONS = (0.0, 0.3, 0.6, 0.9)  # grid, so that comparisons share their simulations


def power_block(cfg: AnalyzeConfig, study: Study, arm: str, ref: str, h2: dict[str, Any]) -> dict[str, Any]:
    """What this many seeds could have found, and how many would be needed (80 % power, level alpha)."""
    n, m = len(study.independent(arm)), len(study.independent(ref))
    tasks = len(h2["tasks"])
    estimated = h2["mean_log_variance_ratio"].get("correlation")
    correlation = min(POWER_CORRELATIONS, key=lambda c: abs(c - (USUAL_CORRELATION if estimated is None else estimated)))
    on_task = {}
    for task in study.on_task:
        x, y = (np.array(list(study.values(name, task, "delta_j").values())) for name in (arm, ref))
        if min(x.size, y.size) < 2:
            on_task[task] = {"smallest_difference": None, "reason": "fewer than two seeds in an arm"}
            continue
        sd = math.sqrt(st.sample_variance(x)), math.sqrt(st.sample_variance(y))
        on_task[task] = {"sd": list(sd), "smallest_difference": st.smallest_difference(*sd, x.size, y.size, cfg.alpha),
                         "smallest_margin": st.smallest_margin(*sd, x.size, y.size, cfg.alpha),
                         "power_at_margin": st.tost_power(cfg.margin, *sd, x.size, y.size, cfg.alpha),
                         "seeds_for_margin": st.seeds_for_margin(cfg.margin, *sd, cfg.alpha)}
    one_task = {"smallest_ratio": st.smallest_ratio_f(n, m, cfg.alpha), "smallest_p": st.smallest_attainable_p(n, m, cfg.num_resamples),
                "seeds_for_ratio": {f"{r:g}": st.seeds_for_ratio_f(r, cfg.alpha) for r in POWER_RATIOS}}
    joint: dict[str, Any] = {"tasks": tasks, "correlation": correlation, "correlation_estimated": estimated}
    if tasks:
        joint.update(smallest_ratio=st.smallest_spread_ratio(n, m, tasks, correlation, cfg.alpha),
                     power={f"{r:g}": st.spread_rule_power(r, n, m, tasks, correlation, cfg.alpha) for r in POWER_RATIOS},
                     seeds_for_ratio={f"{r:g}": st.seeds_for_spread_ratio(r, tasks, correlation, cfg.alpha) for r in POWER_RATIOS})
    return {"seeds": [n, m], "on_task_means": on_task, "spread_of_one_task_f_test": finite(one_task, "fewer than two seeds in an arm"),
            "spread_over_off_task": finite(joint, "no ratio can be found with this many seeds"),
            "measured_size": st.measured_size(n, m, cfg.alpha) or {"reason": "fewer than three seeds in an arm"}}


# --------------------------------------------------------------------------------------------------------------------
# The whole analysis

def comparisons(study: Study, reference: str) -> list[tuple[str, str]]:
    """(arm, reference) pairs: every arm against the reference, and bf16 against bf16_mixed (storage alone) where both are there."""
    pairs = [(arm, reference) for arm in study.arms if arm != reference] if reference in study.arms else []
    if {"bf16", "bf16_mixed"} <= set(study.arms) and reference != "bf16_mixed":
        pairs.append(("bf16", "bf16_mixed"))
    return pairs


def analyse(cfg: AnalyzeConfig, study: Study) -> dict[str, Any]:
    """Everything that goes into full_analysis.json."""
    pairs = comparisons(study, cfg.reference)
    blocks = {}
    for arm, ref in pairs:
        blocks[f"{ref}:{arm}"] = {"arm": arm, "reference": ref, "hypothesis_1": on_task_hypothesis(cfg, study, arm, ref),
                                  "hypothesis_2": off_task_hypothesis(cfg, study, arm, ref), "hypothesis_3": kl_hypothesis(cfg, study, arm, ref)}
    for name in (f"{cfg.reference}:bf16", "bf16_mixed:bf16") if f"{cfg.reference}:bf16" in blocks else list(blocks)[:1]:
        if name in blocks:
            b = blocks[name]
            b["power"] = power_block(cfg, study, b["arm"], b["reference"], b["hypothesis_2"])
    # The seed's bundle first; where it is not there, the first comparison that is.
    primary = f"{cfg.reference}:bf16" if f"{cfg.reference}:bf16" in blocks else next(iter(blocks), None)
    result: dict[str, Any] = {
        "primary_comparison": primary, "synthetic_data": study.synthetic,
        "arms": {a: {"seeds": [r.seed for r in study.independent(a)], "num_runs": sum(r.arm == a for r in study.runs)} for a in study.arms},
        "on_task": study.on_task, "off_task": study.off_task, "missing": study.missing}
    if primary:
        result.update({k: blocks[primary][k] for k in ("hypothesis_1", "hypothesis_2", "hypothesis_3")})
    else:
        reason = "nothing to compare: " + (f"only arm {study.arms[0]} is there" if len(study.arms) == 1 else f"reference arm {cfg.reference} is missing")
        for n in (1, 2, 3):
            result[f"hypothesis_{n}"] = {"tasks": {}, "num_tasks_supported": 0, "total_tasks": 0, "verification": {}, **verdict(INCONCLUSIVE, reason)}
    result["summary"] = {"hypothesis_1": result["hypothesis_1"]["verdict"], "hypothesis_2": result["hypothesis_2"]["verdict"],
                         "hypothesis_3": result["hypothesis_3"]["verdict"],
                         **result["hypothesis_3"].get("summary", {"on_task_kl_similar": False, "off_task_kl_spread_larger": False})}
    result["bf16_sparsity"] = sparsity_block(study)
    result["expected_results"] = expected_results(cfg, study, result)
    result["comparisons"] = blocks
    result["descriptive"] = {a: {t: {"delta_j": {**describe(study.values(a, t, "delta_j")), "noise": noise_block(study, a, t, "scores")},
                                     "avg_kl": describe(study.values(a, t, "avg_kl")),
                                     "kl_exact_per_token": describe(study.values(a, t, "kl_exact_per_token"))} for t in study.tasks}
                             for a in study.arms}
    result["noise_floor"] = study.noise_floor
    result["regime"] = regime(study)
    result["variance_components"] = seed_components(study)
    result["factorial"] = factorial(study)
    result["settings"] = {k: v for k, v in vars(cfg).items() if k not in ("results_root", "results_dir", "output_dir", "train_logs_dir", "config")}
    result["versions"] = package_versions(("numpy", "scipy", "matplotlib"))
    result["code"] = git_state()
    return result


def expected_results(cfg: AnalyzeConfig, study: Study, result: dict[str, Any]) -> list[dict[str, Any]]:
    """The table of expected results: per row what each arm measured and a verdict from a test, never from the numbers' order."""
    primary = result["primary_comparison"]
    if not primary:
        return []
    ref, arm = primary.split(":")
    h1, h2, h3 = (result[f"hypothesis_{n}"] for n in (1, 2, 3))
    rows: list[dict[str, Any]] = []
    def add(quantity: str, expected: str, at_ref: str, at_arm: str, kind: str, reason: str) -> None:
        rows.append({"quantity": quantity, "expected": expected, ref: at_ref, arm: at_arm, "verdict": kind, "reason": reason})
    for task, t in h1["tasks"].items():
        add(f"mean dJ, {task} (on-task)", "above 0 and equal in both", *(f"{t[n]['mean']:+.4f}" if t[n]["n"] else "-" for n in (ref, arm)),
            t["verdict"], t["verdict_reason"])
        add(f"variance of dJ, {task} (on-task)", f"small in both (below {cfg.margin:g} squared)",
            *(scientific(t[n].get("sample_var")) for n in (ref, arm)), *small_variance(cfg, [t[ref], t[arm]]))
    add("variance of dJ, off-task (geometric mean)", f"{arm} larger", *(scientific(geometric_mean_variance(h2["tasks"], n)) for n in (ref, arm)),
        h2["verdict"], h2["verdict_reason"])
    interaction = h2["against_on_task"]["interaction"]
    add("variance ratio, off-task over on-task", "above 1 (the excess is off-task)", "1",
        "-" if interaction["estimate"] is None else as_factor(interaction["estimate"]), *sign_verdict(interaction))
    for task, t in h3["on_task"].items():
        add(f"KL, {task} (on-task, {t['measure']})", "equal in both", *(scientific(t[n]["mean"]) for n in (ref, arm)), t["verdict"], t["verdict_reason"])
    add("variance of KL, off-task (geometric mean)", f"{arm} larger", *(scientific(geometric_mean_variance(h3["off_task"], n)) for n in (ref, arm)),
        h3["off_task_family"]["verdict"], h3["off_task_family"]["verdict_reason"])
    shares = {n: np.array([v["sparsity_percent"] for v in result["bf16_sparsity"].values() if v["arm"] == n]) for n in (ref, arm)}
    add("weights unchanged in bf16 (%)", f"{arm} larger", *(f"{shares[n].mean():.2f}" if shares[n].size else "-" for n in (ref, arm)),
        *sparsity_verdict(cfg, shares[arm], shares[ref]))
    return rows


def geometric_mean_variance(tasks: dict[str, Any], arm: str) -> float | None:
    values = [t[arm]["sample_var"] for t in tasks.values() if t[arm].get("sample_var")]
    return float(np.exp(np.mean(np.log(values)))) if values else None


def small_variance(cfg: AnalyzeConfig, arms: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Are both variances below margin squared? By their 95 % intervals."""
    limit = cfg.margin**2
    if any(a.get("var_high") is None for a in arms):
        return INCONCLUSIVE, "fewer than two seeds in an arm"
    if all(a["var_high"] < limit for a in arms):
        return SUPPORTED, "both 95 % intervals lie below the limit"
    if any(a["var_low"] > limit for a in arms):
        return NOT_SUPPORTED, "a 95 % interval lies above the limit"
    return INCONCLUSIVE, "a 95 % interval reaches over the limit"


def sign_verdict(effect: dict[str, Any]) -> tuple[str, str]:
    """Verdict on "above 0" from one-sided 95 % bounds."""
    if effect["estimate"] is None:
        return INCONCLUSIVE, effect["reason"]
    words = f"95 % interval of the ratio {as_factor(effect['low'])} to {as_factor(effect['high'])}"
    return (SUPPORTED if effect["lower_bound"] > 0 else NOT_SUPPORTED if effect["upper_bound"] < 0 else INCONCLUSIVE), words


def sparsity_verdict(cfg: AnalyzeConfig, x: np.ndarray, y: np.ndarray) -> tuple[str, str]:
    if min(x.size, y.size) < 2:
        return INCONCLUSIVE, f"sparsity of {x.size} and {y.size} runs: a test needs two in each arm"
    test = st.welch(x, y)
    words = f"difference {test['difference']:+.2f} points, 95 % interval {test['low']:+.2f} to {test['high']:+.2f}"
    return (SUPPORTED if test["low"] > 0 else NOT_SUPPORTED if test["high"] < 0 else INCONCLUSIVE), words


def scientific(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


# --------------------------------------------------------------------------------------------------------------------
# Plots

# Okabe and Ito's palette (its pale yellow, faint on white, replaced by brown), readable with colour blindness; arms differ by marker too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D46")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)), "-.")  # curves that coincide stay visible: the gaps of one show the other
PNG_DPI = 130
LABEL_CHARS = 22  # longer arm and task names are wrapped at + _ - so that labels stay beside their mark


def wrapped(name: str, width: int = LABEL_CHARS) -> str:
    """``name`` over several lines of at most ``width`` characters, broken after + _ - where possible."""
    lines, line = [], ""
    for part in re.findall(r"[^+_\-]+[+_\-]?|[+_\-]", name):
        if line and len(line) + len(part) > width:
            lines.append(line)
            line = ""
        line += part
        while len(line) > width:
            lines.append(line[:width])
            line = line[width:]
    return "\n".join([*lines, line] if line else lines)


def style(arms: Sequence[str], arm: str) -> dict[str, Any]:
    i = list(arms).index(arm)
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}


def new_figure(study: Study, width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    """Figure and 2-D array of axes; a red banner on top where the data are synthetic."""
    from matplotlib.figure import Figure
    # A Figure without pyplot: no global state, no display, and memory is freed with it.
    fig = Figure(figsize=(width, height + (0.45 if study.synthetic else 0)), layout="constrained")
    axes = fig.subplots(rows, columns, squeeze=False)
    if study.synthetic:
        top = 0.36 / fig.get_figheight()
        fig.get_layout_engine().set(rect=(0, 0, 1, 1 - top))
        fig.text(0.5, 1 - top / 2, SYNTHETIC_BANNER if width >= 7 else SYNTHETIC_BANNER.split(" - ")[0], ha="center", va="center", color="white",
                 weight="bold", fontsize=10, bbox={"facecolor": "#B00020", "edgecolor": "none", "boxstyle": "square,pad=0.35"})
    return fig, axes


def save_figure(fig: Any, folder: Path, name: str, plot_format: str) -> str:
    """Write ``name``.png and, if asked for, ``name``.svg or .pdf; no dates inside, so that equal input gives equal bytes."""
    import matplotlib
    with matplotlib.rc_context({"svg.hashsalt": "rlvr", "svg.fonttype": "none"}):
        for kind in dict.fromkeys(("png", plot_format)):
            metadata = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None, "Producer": None, "Creator": None}}[kind]
            with atomic_path(folder / f"{name}.{kind}") as aside:
                fig.savefig(aside, format=kind, dpi=PNG_DPI, metadata=metadata)
    return f"{name}.png"


def grouped_axis(ax: Any, study: Study, tasks: Sequence[str]) -> Callable[[int, str], float]:
    """Label one group per task, on-task marked, and return (task index, arm) -> x."""
    ax.set_xticks(range(len(tasks)), [wrapped(t, 14) + ("\n(on-task)" if t in study.on_task else "") for t in tasks],
                  rotation=0 if max(map(len, tasks), default=0) <= 14 else 30, ha="center" if max(map(len, tasks), default=0) <= 14 else "right")
    ax.set_xlim(-0.5, len(tasks) - 0.5)
    for i in range(1, len(tasks)):
        ax.axvline(i - 0.5, color="0.88", lw=0.8, zorder=0)
    step = arm_step(study)
    return lambda i, arm: i + step * (study.arms.index(arm) - (len(study.arms) - 1) / 2)


def arm_step(study: Study) -> float:
    """Distance between neighbouring arms within a task's group, in units of the group's width."""
    return min(0.24, 0.8 / len(study.arms))


def group_width(study: Study, tasks: Sequence[str]) -> float:
    return max(7.0, 1.6 + len(tasks) * max(1.1, 0.32 * len(study.arms)))


def legend_below(fig: Any, ax: Any) -> None:
    handles, labels = ax.get_legend_handles_labels()
    unique = dict(zip(labels, handles))
    if unique:
        longest = max(len(line) for label in unique for line in label.split("\n"))
        columns = max(1, min(len(unique), int(fig.get_figwidth() * 12 / (longest + 8))))
        fig.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def plot_points(study: Study, tasks: Sequence[str], key: str, title: str, unit: str, log: bool) -> Any:
    """Each seed a dot; mean and 95 % t interval (geometric on a log axis)."""
    fig, axes = new_figure(study, group_width(study, tasks), 4.6)
    ax = axes[0, 0]
    at = grouped_axis(ax, study, tasks)
    positive = all(v > 0 for a in study.arms for t in tasks for v in study.values(a, t, key).values())
    log = log and positive
    for arm in study.arms:
        for i, task in enumerate(tasks):
            values = np.array(list(study.values(arm, task, key).values()))
            if not values.size:
                continue
            x, look = at(i, arm), style(study.arms, arm)
            jitter = np.linspace(-0.3, 0.3, values.size) * arm_step(study) if values.size > 1 else np.zeros(1)
            ax.plot(x + jitter, values, ls="", ms=4, alpha=0.45, mew=0, **look)
            scale = np.log(values) if log else values
            low, high = st.mean_interval(scale)
            centre = float(scale.mean())
            back = np.exp if log else (lambda v: v)
            if values.size > 1:
                ax.plot([x, x], back(np.array([low, high])), color=look["color"], lw=2, solid_capstyle="butt")
            ax.plot([x], [back(centre)], ms=8, mec="white", mew=0.8, ls="", label=wrapped(arm), zorder=3, **look)
    if log:
        ax.set_yscale("log")
    else:
        ax.axhline(0, color="0.3", lw=0.8)
    ax.set_ylabel(unit)
    ax.set_title(title, fontsize=11)
    legend_below(fig, ax)
    return fig


def plot_delta_j(study: Study) -> Any:
    seeds = max(len(study.independent(a)) for a in study.arms)
    return plot_points(study, study.tasks, "delta_j", "Change of score after training: each small mark a seed, large mark the mean"
                       + (",\nbar its 95 % interval" if seeds > 1 else " (one seed: no interval)"), "dJ, change of avg@k\n(share of answers correct)", log=False)


def plot_kl(study: Study) -> Any | None:
    """KL per task on a log axis; None where no run has any."""
    def has(key: str) -> list[str]:
        return [t for t in study.tasks if any(study.values(a, t, key) for a in study.arms)]
    exact = has("kl_exact_per_token")
    key, unit = ("kl_exact_per_token", "KL(trained || base)\nnats per token") if exact else ("avg_kl", "KL(trained || base)\nnats per sequence")
    tasks = exact or has("avg_kl")
    return plot_points(study, tasks, key, "Distance from the base policy (geometric mean and 95 % interval)", unit, log=True) if tasks else None


def plot_variance(study: Study) -> Any:
    """Sample variance of dJ on a log axis with chi-square intervals; the level of evaluation noise is marked."""
    tasks = study.tasks
    fig, axes = new_figure(study, group_width(study, tasks), 4.6)
    ax = axes[0, 0]
    at = grouped_axis(ax, study, tasks)
    drawn, zeros = [], []
    for arm in study.arms:
        look = style(study.arms, arm)
        for i, task in enumerate(tasks):
            values = np.array(list(study.values(arm, task, "delta_j").values()))
            if values.size < 2:
                continue
            variance, x = st.sample_variance(values), at(i, arm)
            if variance == 0:
                zeros.append((x, look))
                continue
            ax.plot([x, x], st.variance_interval(values), color=look["color"], lw=2, alpha=0.6, solid_capstyle="butt")
            ax.plot([x], [variance], ms=8, mec="white", mew=0.8, ls="", label=wrapped(arm), zorder=3, **look)
            drawn.append(variance)
            noise = noise_block(study, arm, task, "scores")["noise_variance"]
            if noise:
                half = 0.35 * arm_step(study)
                ax.plot([x - half, x + half], [noise, noise], color="black", lw=1.6, label="evaluation noise alone", zorder=4)
                drawn.append(noise)
    if drawn:
        ax.set_yscale("log")
        bottom = min(drawn) / 20
        ax.set_ylim(bottom=bottom)
        for x, look in zeros:
            ax.plot([x], [bottom * 1.3], ms=7, ls="", mfc="none", mec=look["color"], marker="v", label="zero (all seeds equal)", clip_on=False)
    else:
        ax.set_yticks([])
        ax.text(0.5, 0.5, "no spread to show: every arm has one seed, or identical values", transform=ax.transAxes, ha="center")
    ax.set_ylabel("variance of dJ between seeds\n(ddof 1)")
    ax.set_title("Spread between seeds (bar: 95 % interval for normal values)", fontsize=11)
    legend_below(fig, ax)
    return fig


def plot_decomposition(study: Study, components: dict[str, Any]) -> Any | None:
    """Shares of the variance between runs: seed, float noise, evaluation noise; None where nothing is known."""
    parts = ("seed", "float noise", "evaluation noise")
    colours = dict(zip(("between seeds", "float noise", "evaluation noise"), ("#0072B2", "#E69F00", "0.7")))
    bars: list[tuple[int, str, dict[str, float]]] = []
    for i, task in enumerate(study.tasks):
        for arm in study.arms:
            nested = components.get(arm, {}).get(task, {})
            noise = noise_block(study, arm, task, "scores")
            if nested.get("total") is not None and nested.get("evaluation_noise") is not None:
                values = (nested["seed"], nested["float_noise"], nested["evaluation_noise"])
            elif noise["between_run_var"] is not None:
                values = (noise["between_run_var"], 0.0, noise["noise_variance"])
            else:
                continue
            cut = [max(0.0, v) for v in values]
            if sum(cut) > 0:
                bars.append((i, arm, dict(zip(parts, (v / sum(cut) for v in cut)))))
    if not bars:
        return None
    fig, axes = new_figure(study, group_width(study, study.tasks), 4.4)
    ax = axes[0, 0]
    at = grouped_axis(ax, study, study.tasks)
    width = 0.8 * arm_step(study)
    for i, arm, shares in bars:
        bottom = 0.0
        for part, colour in zip(parts, colours.values()):
            if shares[part] > 0:
                name = "between seeds" if part == "seed" else part
                ax.bar(at(i, arm), 100 * shares[part], width, bottom=100 * bottom, color=colour, edgecolor="white", label=name)
            bottom += shares[part]
        index = study.arms.index(arm)
        ax.plot([at(i, arm)], [104], ls="", ms=6, color=COLOURS[index % len(COLOURS)], marker=MARKERS[index % len(MARKERS)], label=wrapped(arm), clip_on=False)
    ax.set_ylim(0, 109)
    ax.set_yticks(range(0, 101, 25))
    ax.set_ylabel("share of the variance of dJ\nbetween runs (%)")
    ax.set_title("Where the spread comes from (estimates below zero drawn as zero; marks on top: arm)", fontsize=11)
    legend_below(fig, ax)
    return fig


CURVES = (("train/reward_mean", "reward"), ("train/accuracy", "accuracy"), ("eval/val_avg", "avg@k on validation problems"), ("eval/dm_val_avg", "avg@k on dm_val"),
          ("train/response_length_mean", "response length (tokens)"), ("train/entropy_nats_per_token", "entropy (nats per token)"),
          ("train/grad_norm", "gradient norm"), ("kl/base_nats_per_token", "KL to base (nats per token)"))


def curve(run: Run, key: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of a logged key."""
    rows = [(row["step"], v) for row in run.metrics if number(row.get("step")) is not None and (v := number(row.get(key))) is not None]
    return np.array([r[0] for r in rows], dtype=float), np.array([r[1] for r in rows], dtype=float)


def draw_curves(ax: Any, study: Study, key: str) -> bool:
    """Each seed thin, each arm's mean thick (over the steps every seed has). Returns whether there was anything to draw."""
    drawn = False
    for arm in study.arms:
        colour, dashes = style(study.arms, arm)["color"], LINES[study.arms.index(arm) % len(LINES)]
        lines = [c for r in study.independent(arm) if (c := curve(r, key))[0].size]
        for steps, values in lines:
            ax.plot(steps, values, color=colour, lw=0.7, alpha=0.4)
        if lines:
            common = np.array(sorted(set.intersection(*(set(s) for s, _ in lines))))
            mean = np.mean([v[np.isin(s, common)] for s, v in (dedupe(*line) for line in lines)], axis=0)
            dots = "o" if common.size == 1 else ""
            ax.plot(common, mean, color=colour, lw=2, ls=dashes, marker=dots, label=wrapped(arm))
            drawn = True
    return drawn


def dedupe(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The last value of each step, in order of steps (a resumed log may hold a step twice)."""
    last = dict(zip(steps.tolist(), values.tolist()))
    order = sorted(last)
    return np.array(order), np.array([last[s] for s in order])


def plot_training(study: Study) -> Any | None:
    panels = [(key, label) for key, label in CURVES if any(curve(r, key)[0].size for r in study.runs)]
    if not panels:
        return None
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    fig, axes = new_figure(study, max(4.0 * columns, 6.0), 2.9 * rows, rows, columns)
    for ax, (key, label) in zip(axes.flat, panels):
        draw_curves(ax, study, key)
        ax.set_title(label, fontsize=10)
        ax.set_xlabel("DAPO step", fontsize=9)
    for ax in axes.flat[len(panels):]:
        ax.axis("off")
    legend_below(fig, axes[0, 0])
    return fig


def plot_lost_updates(study: Study) -> Any | None:
    panels = [(LOST_SHARE, "share of updates lost to rounding"), (ULP_RATIO, "median |update| / ULP of the weight"),
              ("precision/changed_share_vs_base", "share of weights that differ from the base")]
    panels = [(key, label) for key, label in panels if any(curve(r, key)[0].size for r in study.runs)]
    if not panels:
        return None
    fig, axes = new_figure(study, max(4.2 * len(panels), 6.0), 3.4, 1, len(panels))
    for ax, (key, label) in zip(axes[0], panels):
        draw_curves(ax, study, key)
        ax.set_title(label, fontsize=10)
        ax.set_xlabel("DAPO step", fontsize=9)
        if key == LOST_SHARE:
            ax.axhline(REFERENCE_7B["lost_update_share"], color="0.4", ls="--", lw=1, label="7B, lr 1e-6, bf16 masters (estimate)")
            ax.set_ylim(-0.03, 1.03)
        elif key == ULP_RATIO and all((curve(r, key)[1] > 0).all() for r in study.runs):
            ax.set_yscale("log")
    legend_below(fig, axes[0, 0])
    return fig


def plot_power(cfg: AnalyzeConfig, result: dict[str, Any]) -> Any | None:
    """Left: power of the rule of H2 against seeds. Right: power of showing equal on-task means within the margin, at the spread found."""
    primary = result["primary_comparison"]
    block = result["comparisons"][primary]["power"] if primary else None
    joint = block["spread_over_off_task"] if block else None
    if not joint or not joint["tasks"]:
        return None
    study = Study([], [], result["synthetic_data"], [], [], [], [])
    fig, axes = new_figure(study, 10, 3.9, 1, 2)
    left, right = axes[0]
    for i, ratio in enumerate(POWER_RATIOS):
        curve_y = [100 * st.spread_rule_power(ratio, n, n, joint["tasks"], joint["correlation"], cfg.alpha) for n in POWER_CURVE_SEEDS]
        left.plot(POWER_CURVE_SEEDS, curve_y, color=COLOURS[i], marker=MARKERS[i], ms=5, label=f"variance ratio {ratio:g}")
    left.set_title(f"H2 over {joint['tasks']} off-task benchmarks\n(normal values, correlation {joint['correlation']:g} between tasks, {st.POWER_STUDIES} simulations a point)", fontsize=10)
    seeds = np.arange(2, 21)
    for i, (task, t) in enumerate(block["on_task_means"].items()):
        if t.get("sd"):
            right.plot(seeds, [100 * st.tost_power(cfg.margin, *t["sd"], int(n), int(n), cfg.alpha) for n in seeds], color=COLOURS[3 + i % 4],
                       marker=MARKERS[3 + i % 4], ms=4, label=f"equal means on {wrapped(task)} (sd {t['sd'][1]:.3f} and {t['sd'][0]:.3f})")
    right.set_title(f"H1: equal means shown to be equal within {cfg.margin:g}\n(at the spread found between these seeds)", fontsize=10)
    for ax in (left, right):
        ax.axhline(100 * st.POWER, color="0.5", ls="--", lw=1)
        ax.axvline(min(block["seeds"]), color="0.5", ls=":", lw=1.5, label=f"seeds of this study ({min(block['seeds'])})")
        ax.set_ylim(-3, 103)
        ax.set_xlabel("seeds in each arm")
        ax.set_ylabel("power (%)")
        ax.set_xticks(range(2, 21, 2))
        ax.legend(fontsize=8, loc="lower right", framealpha=0.9)
    return fig


def plot_sparsity(study: Study) -> Any | None:
    rows = {a: [number(r.sparsity["sparsity"]["sparsity_percent"]) for r in study.runs if r.arm == a and r.sparsity] for a in study.arms}
    rows = {a: v for a, v in rows.items() if v}
    if not rows:
        return None
    fig, axes = new_figure(study, max(6.0, 1.4 + 1.5 * len(rows)), 4.2)
    ax = axes[0, 0]
    for i, (arm, values) in enumerate(rows.items()):
        look = style(study.arms, arm)
        ax.bar(i, np.mean(values), 0.5, color=look["color"], alpha=0.3)
        ax.plot(i + np.linspace(-0.1, 0.1, len(values)) if len(values) > 1 else [i], values, ls="", ms=6, mec="white", mew=0.6, **look)
        ax.annotate(f"{np.mean(values):.2f} %", (i, max(values)), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=9)
    ax.set_xticks(range(len(rows)), [wrapped(a, 16) for a in rows])
    ax.set_xlim(-0.6, len(rows) - 0.4)
    ax.set_ylim(0, 108)
    ax.set_yticks(range(0, 101, 20))
    ax.set_ylabel("weights unchanged after training,\nboth ends read as bf16 (%)")
    ax.set_title("Sparsity of the update (each mark a run, bar the mean)", fontsize=11)
    return fig


NEED_NO_TASK = ("training_curves", "sparsity_comparison", "lost_updates", "power")


def make_plots(cfg: AnalyzeConfig, study: Study, result: dict[str, Any], folder: Path) -> dict[str, str]:
    """Draw every plot that the data allow. Returns file name -> caption; what could not be drawn is added to ``study.missing``."""
    drawings: list[tuple[str, Callable[[], Any], str, str]] = [
        ("delta_j_comparison", lambda: plot_delta_j(study), "Change of score per task and arm.", ""),
        ("variance_comparison", lambda: plot_variance(study), "Spread between seeds per task and arm.", ""),
        ("kl_comparison", lambda: plot_kl(study), "KL to the base policy per task and arm.", "no run has a KL"),
        ("variance_decomposition", lambda: plot_decomposition(study, result["variance_components"]), "Where the spread between runs comes from.",
         "no run has scores per problem and draw"),
        ("training_curves", lambda: plot_training(study), "Training curves: seeds thin, mean of the arm thick.", "no training log was found"),
        ("sparsity_comparison", lambda: plot_sparsity(study), "Share of weights that did not change.", "no sparsity file was found"),
        ("lost_updates", lambda: plot_lost_updates(study), "Updates that rounding undid.", "no training log records lost updates"),
        ("power", lambda: plot_power(cfg, result), "What this many seeds could have found (dashed: 80 %).", "nothing to compare"),
    ]
    captions: dict[str, str] = {}
    for name, draw, caption, why_not in drawings:
        fig = draw() if study.tasks or name in NEED_NO_TASK else None
        if fig is None:
            study.missing.append(f"plot {name}: {why_not or 'no task to show'}")
        else:
            captions[save_figure(fig, folder, name, cfg.plot_format)] = caption
    if any(r.metrics for r in study.runs):
        unlogged = [key for key, _ in CURVES if key != "eval/dm_val_avg" and not any(curve(r, key)[0].size for r in study.runs)]
        if unlogged:
            study.missing.append(f"not in any training log: {', '.join(unlogged)}")
    return captions


# --------------------------------------------------------------------------------------------------------------------
# Report: one list of blocks, written as Markdown, as HTML and to the terminal

Block = tuple  # ("h", level, text) | ("p", text) | ("list", items) | ("table", header, rows) | ("img", file, caption) | ("warn", text)


def report_blocks(cfg: AnalyzeConfig, study: Study, result: dict[str, Any], captions: dict[str, str]) -> list[Block]:
    """The report's content in reading order: verdicts, what was expected, the numbers, plots, what is missing, settings."""
    blocks: list[Block] = [("h", 1, "Does the floating-point format of RLVR training change what is learned?")]
    if study.synthetic:
        blocks.append(("warn", SYNTHETIC_BANNER + ". Task names such as aime24 stand for generated problems."))
    primary = result["primary_comparison"]
    arms = ", ".join(f"{a} ({len(v['seeds'])} seed{'s' if len(v['seeds']) != 1 else ''})" for a, v in result["arms"].items())
    blocks.append(("p", f"Arms: {arms}. On-task: {', '.join(study.on_task) or 'none'}. Off-task: {', '.join(study.off_task) or 'none'}."))
    blocks.append(("h", 2, "Verdicts"))
    if not primary:
        blocks.append(("p", f"All three hypotheses: inconclusive. {result['hypothesis_1']['verdict_reason']}."))
    header = ["comparison", "hypothesis", "verdict", "why"]
    rows = [[f"{b['arm']} against {b['reference']}", f"H{n}: {b[f'hypothesis_{n}']['statement']}", IN_WORDS[b[f"hypothesis_{n}"]["verdict"]],
             b[f"hypothesis_{n}"]["verdict_reason"]] for b in ordered_comparisons(result) for n in (1, 2, 3)]
    if rows:
        blocks.append(("table", header, rows))
    blocks.append(("list", __doc__.split("Rules, fixed before any number is read ")[1].replace("\n    ", " ").split("``overall_supported``")[0].strip().split("\n")[1:]))
    if result["expected_results"]:
        blocks += [("h", 2, "Expected and measured"), ("table", *expected_table(result)), ("p", regime_sentence(result))]
    blocks += [("h", 2, "The regime these numbers come from"), ("table", *regime_table(result))]
    blocks += [("h", 2, "Change of score"), *images(captions, "delta_j_comparison"), ("table", *delta_table(study, result)), ("p", regime_sentence(result))]
    blocks += [("h", 2, "Spread between seeds"), *images(captions, "variance_comparison", "variance_decomposition")]
    for b in ordered_comparisons(result):
        blocks += [("h", 3, f"{b['arm']} against {b['reference']}"), ("table", *spread_table(b["hypothesis_2"], b["arm"], b["reference"]))]
        rule = b["hypothesis_2"]["verification"]
        blocks.append(("p", f"Older rule, shown beside: variance larger in {rule['num_tasks_variance_larger']} of {rule['total_tasks']} tasks "
                            f"({rule['rules']})."))
        interaction = b["hypothesis_2"]["against_on_task"]["interaction"]
        if interaction["estimate"] is not None:
            blocks.append(("p", f"Variance ratio off-task over variance ratio on-task: {as_factor(interaction['estimate'])} "
                                f"(95 % interval {as_factor(interaction['low'])} to {as_factor(interaction['high'])})."))
    blocks.append(("p", regime_sentence(result)))
    blocks += [("h", 2, "KL to the base policy"), *images(captions, "kl_comparison"), ("table", *kl_table(study, result)), ("p", regime_sentence(result))]
    blocks += extra_tables(result)
    blocks += power_report(cfg, result, captions)
    blocks += [("h", 2, "Weights and training"), *images(captions, "sparsity_comparison", "lost_updates", "training_curves")]
    blocks += [("h", 2, "What is missing"), ("list", study.missing) if study.missing else ("p", "Nothing: every run has every task.")]
    blocks += [("h", 2, "Where the results come from"), ("table", ["what", "value", "runs"], provenance(study))]
    settings = {**result["settings"], **{f"version of {k}": v for k, v in result["versions"].items()},
                "code": (result["code"]["commit"] or "no git checkout") + (" (with uncommitted changes)" if result["code"]["dirty"] else "")}
    blocks += [("h", 2, "Settings"), ("table", ["setting", "value"], [[k, ", ".join(map(str, v)) if isinstance(v, (list, tuple)) else str(v)]
                                                                      for k, v in settings.items()])]
    return blocks


def provenance(study: Study) -> list[list[str]]:
    """Rows (what, value, number of runs) of what the result files say about their making; a difference between runs shows as two rows."""
    counts: dict[tuple[str, str], int] = {}
    for run in study.runs:
        for name, value in {"study": run.study, "synthetic data": run.synthetic, **run.settings}.items():
            shown = ", ".join(f"{k} {v}" for k, v in sorted(value.items())) if isinstance(value, dict) else str("not recorded" if value is None else value)
            counts[name, shown] = counts.get((name, shown), 0) + 1
    return [[name, shown, str(count)] for (name, shown), count in counts.items()]


def ordered_comparisons(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Comparison blocks, the primary one first."""
    primary = result["primary_comparison"]
    return [result["comparisons"][k] for k in sorted(result["comparisons"], key=lambda k: k != primary)]


def images(captions: dict[str, str], *names: str) -> list[Block]:
    return [("img", f"{n}.png", captions[f"{n}.png"]) for n in names if f"{n}.png" in captions]


def expected_table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    ref, arm = result["primary_comparison"].split(":")
    return (["quantity", "expected", ref, arm, "verdict", "why"],
            [[r["quantity"], r["expected"], r[ref], r[arm], IN_WORDS[r["verdict"]], r["reason"]] for r in result["expected_results"]])


def regime_table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    def cell(value: float | None, form: str) -> str:
        return "not recorded" if value is None else format(value, form)
    rows = [[arm, cell(r["lost_update_share"], ".2%"), cell(r["update_over_ulp_median"], ".3g"), cell(r["sparsity_percent"], ".2f")]
            for arm, r in result["regime"]["arms"].items()]
    return (["arm", "updates lost to rounding", "median |update| / ULP", "weights unchanged in bf16 (%)"],
            [*rows, [REFERENCE_7B["setting"], f"about {REFERENCE_7B['lost_update_share']:.0%}", "-", "-"]])


def regime_sentence(result: dict[str, Any]) -> str:
    """One line that goes under every result table."""
    parts = [f"{arm} {r['lost_update_share']:.1%}" for arm, r in result["regime"]["arms"].items() if r["lost_update_share"] is not None]
    return ("Obtained with these shares of updates lost to rounding: " + (", ".join(parts) if parts else "not recorded")
            + f"; {REFERENCE_7B['setting']}: about {REFERENCE_7B['lost_update_share']:.0%}.")


def interval(block: dict[str, Any], low: str = "mean_low", high: str = "mean_high", form: str = "+.4f") -> str:
    return "-" if block.get(low) is None else f"{block[low]:{form}} to {block[high]:{form}}"


def delta_table(study: Study, result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for task in study.tasks:
        for arm in study.arms:
            d = result["descriptive"][arm][task]["delta_j"]
            noise = d["noise"]
            rows.append([task + (" (on-task)" if task in study.on_task else ""), arm, str(d["n"]), "-" if d["mean"] is None else f"{d['mean']:+.4f}",
                         interval(d), scientific(d.get("sample_var")), scientific(noise["noise_variance"]), scientific(noise["between_run_var"])
                         if noise["between_run_var"] is not None else noise.get("reason", "-")])
            if study.noise_floor:
                floor = [f["sd_over_seeds"] for f in study.noise_floor.get(task, [])]
                rows[-1].insert(5, f"{np.mean(floor):.4f}" if floor else "-")
    header = ["task", "arm", "seeds", "mean dJ", "95 % interval", "variance", "of it evaluation noise", "left between runs (not cut at 0)"]
    if study.noise_floor:
        header.insert(5, "noise floor (sd of one policy's score over sampling seeds)")
    return header, rows


def spread_table(h2: dict[str, Any], arm: str, ref: str) -> tuple[list[str], list[list[str]]]:
    rows = []
    for task, t in h2["tasks"].items():
        bound = t.get("variance_ratio_lower_bound")
        ratio = scientific(t["variance_ratio"]) if t["variance_ratio"] is not None else (f"above {bound:.3g}" if bound else "-")
        rows.append([task, scientific(t[ref].get("sample_var")), scientific(t[arm].get("sample_var")), ratio,
                     *(scientific(p) for p in (t["variance_test"].get("p_value"), t["permutation"]["p_value"], t["permutation"].get("p_holm"),
                                               (t.get("bootstrap") or {}).get("p_value_greater"))), IN_WORDS[t["verdict"]]])
    j, r = h2["joint_test"], h2["mean_log_variance_ratio"]
    rows.append(["all together", "", "", "-" if r["estimate"] is None else f"{as_factor(r['estimate'])} ({as_factor(r['low'])} to {as_factor(r['high'])})", "",
                 scientific(j["p_value"]), "", "", IN_WORDS[h2["verdict"]]])
    return ["task", f"variance {ref}", f"variance {arm}", "ratio", "p, F test", "p, permutation", "p after Holm", "p, bootstrap", "verdict"], rows


def kl_table(study: Study, result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for task in study.tasks:
        for arm in study.arms:
            d = result["descriptive"][arm][task]
            exact, plain = d["kl_exact_per_token"], d["avg_kl"]
            rows.append([task + (" (on-task)" if task in study.on_task else ""), arm, str(max(exact["n"], plain["n"])), scientific(exact["mean"]),
                         scientific(exact.get("sample_var")), scientific(plain["mean"]), scientific(plain.get("sample_var"))])
    return ["task", "arm", "seeds", "exact KL, nats per token", "its variance", "avg_kl, nats per sequence", "its variance"], rows


def power_report(cfg: AnalyzeConfig, result: dict[str, Any], captions: dict[str, str]) -> list[Block]:
    """What these seeds could have found, in words and one table."""
    blocks: list[Block] = [("h", 2, "What these seeds could have found"), *images(captions, "power")]
    rows, sizes = [], []
    def seeds(found: dict[str, int | None], ratio: str) -> str:
        return str(found[ratio]) if found.get(ratio) else "more than tried"
    for b in ordered_comparisons(result):
        if "power" not in b:
            continue
        name, p = f"{b['arm']} against {b['reference']}", b["power"]
        for task, t in p["on_task_means"].items():
            if t["smallest_difference"] is not None:
                rows.append([name, f"difference of means on {task}", f"{t['smallest_difference']:.4f}",
                             f"{t['seeds_for_margin'] or f'more than {st.MAX_SEEDS}'} seeds to show equality within {cfg.margin:g}", "-"])
        one, joint = p["spread_of_one_task_f_test"], p["spread_over_off_task"]
        rows.append([name, "variance ratio of one task (F test)", scientific(one["smallest_ratio"]),
                     f"ratio 2: {seeds(one['seeds_for_ratio'], '2')}, ratio 5: {seeds(one['seeds_for_ratio'], '5')} seeds", scientific(one["smallest_p"])])
        if joint["tasks"]:
            rows.append([name, f"variance ratio over {joint['tasks']} off-task benchmarks (rule of H2)", scientific(joint["smallest_ratio"]),
                         f"ratio 2: {seeds(joint['seeds_for_ratio'], '2')}, ratio 5: {seeds(joint['seeds_for_ratio'], '5')} seeds", scientific(one["smallest_p"])])
        for kind, size in p["measured_size"].items():
            if isinstance(size, dict):
                sizes.append([name, kind, *(f"{100 * size[k]:.1f}" for k in ("f_test", "brown_forsythe", "permutation", "bootstrap"))])
    if rows:
        blocks.append(("table", ["comparison", "effect", "smallest found with 80 % power", "needed in each arm", "smallest permutation p"], rows))
    if sizes:
        blocks += [("p", f"How often each test calls equal variances different at level {cfg.alpha:g} with this many seeds (simulated, %; right is "
                         f"{100 * cfg.alpha:g} or less)."),
                   ("table", ["comparison", "data", "F test", "Brown-Forsythe", "permutation", "bootstrap"], sizes)]
    return blocks


def extra_tables(result: dict[str, Any]) -> list[Block]:
    """Tables that only some studies have: replicates, the 2 x 2."""
    blocks: list[Block] = []
    if result["variance_components"]:
        rows = [[arm, task, *(scientific(v[k]) for k in ("seed", "float_noise", "evaluation_noise")), f"{v['num_seeds']} / {v['num_runs']}"]
                for arm, tasks in result["variance_components"].items() for task, v in tasks.items()]
        blocks += [("h", 2, "Variance of dJ by source (runs with replicates)"),
                   ("table", ["arm", "task", "seed", "float noise", "evaluation noise", "seeds / runs"], rows)]
    if result["factorial"]:
        rows = []
        for task, t in result["factorial"]["tasks"].items():
            for effect in st.FACTORIAL_EFFECTS:
                m, v = t.get("mean", {}).get(effect), t.get("log_variance", {}).get(effect)
                rows.append([task, effect, "-" if not m else f"{m['estimate']:+.4f} ({interval(m, 'low', 'high')})",
                             "-" if not v else f"{as_factor(v['estimate'])} ({as_factor(v['low'])} to {as_factor(v['high'])})"])
        blocks += [("h", 2, "Storage and compute, taken apart"), ("p", result["factorial"]["note"] + "."),
                   ("table", ["task", "effect", "on mean dJ (95 % interval)", "on the variance, as a factor (95 % interval)"], rows)]
    return blocks


def to_markdown(blocks: list[Block]) -> str:
    lines: list[str] = []
    for kind, *rest in blocks:
        if kind == "h":
            lines += ["#" * rest[0] + " " + rest[1], ""]
        elif kind == "p":
            lines += [rest[0], ""]
        elif kind == "warn":
            lines += [f"> **{rest[0]}**", ""]
        elif kind == "list":
            lines += [*(f"- {item}" for item in rest[0]), ""]
        elif kind == "img":
            lines += [f"![{rest[1]}]({rest[0]})", ""]
        else:
            def row(cells: Sequence[str]) -> str:
                return "| " + " | ".join(str(c).replace("|", "\\|") for c in cells) + " |"
            lines += [row(rest[0]), row(["---"] * len(rest[0])), *map(row, rest[1]), ""]
    return "\n".join(lines).rstrip() + "\n"


HTML_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>RLVR precision study</title><style>
body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;max-width:68rem;padding:1rem;color:#1a1a1a;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.2rem;margin-top:2rem;border-bottom:1px solid #ddd}h3{font-size:1rem}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem;margin:.5rem 0}
th,td{border:1px solid #ddd;padding:.3rem .5rem;text-align:left;vertical-align:top}th{background:#f4f4f4}td{min-width:4rem}
img{max-width:100%;height:auto}figure{margin:1rem 0}figcaption{font-size:.85rem;color:#555}
.warn{background:#b00020;color:#fff;font-weight:bold;padding:.7rem 1rem;position:sticky;top:0;z-index:1}
.supported{color:#00603f;font-weight:bold}.not{color:#a03800;font-weight:bold}.inconclusive{color:#555;font-weight:bold}
</style></head><body>
"""


def to_html(blocks: list[Block], folder: Path) -> str:
    """One self-contained page: plots are inside, wide tables scroll in their own box."""
    classes = {IN_WORDS[SUPPORTED]: "supported", IN_WORDS[NOT_SUPPORTED]: "not", IN_WORDS[INCONCLUSIVE]: "inconclusive"}
    def cell(text: Any) -> str:
        text = str(text)
        return f'<td class="{classes[text]}">{html.escape(text)}</td>' if text in classes else f"<td>{html.escape(text)}</td>"
    out = io.StringIO()
    out.write(HTML_HEAD)
    for kind, *rest in blocks:
        if kind == "h":
            out.write(f"<h{rest[0]}>{html.escape(rest[1])}</h{rest[0]}>\n")
        elif kind in ("p", "warn"):
            out.write(f"<p{' class=warn' if kind == 'warn' else ''}>{html.escape(rest[0])}</p>\n")
        elif kind == "list":
            out.write("<ul>" + "".join(f"<li>{html.escape(str(i))}</li>" for i in rest[0]) + "</ul>\n")
        elif kind == "img":
            data = base64.b64encode((folder / rest[0]).read_bytes()).decode()
            out.write(f'<figure><img alt="{html.escape(rest[1])}" src="data:image/png;base64,{data}"><figcaption>{html.escape(rest[1])}</figcaption></figure>\n')
        else:
            out.write('<div class="scroll"><table><thead><tr>' + "".join(f"<th>{html.escape(str(c))}</th>" for c in rest[0]) + "</tr></thead><tbody>")
            out.write("".join("<tr>" + "".join(map(cell, r)) + "</tr>\n" for r in rest[1]) + "</tbody></table></div>\n")
    out.write("</body></html>\n")
    return out.getvalue()


def summary_csv(study: Study, result: dict[str, Any]) -> str:
    """One row per arm and task."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["arm", "task", "on_task", "seeds", "delta_j_mean", "delta_j_low", "delta_j_high", "delta_j_sample_var", "noise_variance",
                     "between_run_var", "kl_exact_per_token_mean", "avg_kl_mean", "synthetic_data"])
    for arm in study.arms:
        for task in study.tasks:
            d = result["descriptive"][arm][task]
            j = d["delta_j"]
            row = [arm, task, task in study.on_task, j["n"], j["mean"], j.get("mean_low"), j.get("mean_high"), j.get("sample_var"),
                   j["noise"]["noise_variance"], j["noise"]["between_run_var"], d["kl_exact_per_token"]["mean"], d["avg_kl"]["mean"], study.synthetic]
            writer.writerow(["" if v is None else repr(v) if isinstance(v, float) else v for v in row])
    return out.getvalue()


def print_summary(study: Study, result: dict[str, Any], output_dir: Path) -> None:
    """Verdicts, the table of expected results and the paths, for the terminal."""
    line = "=" * 78
    print(line)
    if study.synthetic:
        print(f"*** {SYNTHETIC_BANNER} ***")
    print("Arms: " + ", ".join(f"{a} (seeds {' '.join(map(str, v['seeds']))})" for a, v in result["arms"].items()))
    for b in ordered_comparisons(result):
        print(f"\n{b['arm']} against {b['reference']}")
        for n in (1, 2, 3):
            h = b[f"hypothesis_{n}"]
            print(f"  Hypothesis {n}: {IN_WORDS[h['verdict']].upper()} ({h['num_tasks_supported']}/{h['total_tasks']} tasks)  {h['statement']}")
            print(f"    {h['verdict_reason']}")
    if not result["comparisons"]:
        print(f"\nNo comparison: {result['hypothesis_1']['verdict_reason']}")
    if result["expected_results"]:
        header, rows = expected_table(result)
        widths = [max(len(str(r[i])) for r in [header, *rows]) for i in range(5)]
        print("\nExpected results and what was measured")
        for r in [header, ["-" * w for w in widths], *rows]:
            print("  " + "  ".join(str(c).ljust(w) for c, w in zip(r[:5], widths)))
        print("  " + regime_sentence(result))
    if result["bf16_sparsity"]:
        print("\nWeights unchanged in bf16")
        for name, s in result["bf16_sparsity"].items():
            print(f"  {name}: {s['sparsity_percent']:.2f} %")
    if study.missing:
        print("\nMissing or odd")
        for note in study.missing:
            print(f"  - {note}")
    print(f"\nReport: {output_dir / 'report.html'}\nPlots:  {output_dir / 'delta_j_comparison.png'} and beside it\n{line}")


def main(cfg: AnalyzeConfig) -> None:
    root = Path(cfg.results_root)
    results_dir = Path(cfg.results_dir) if cfg.results_dir else root / "eval_metrics"
    output_dir = Path(cfg.output_dir) if cfg.output_dir else root / "analysis"
    logs_dir = Path(cfg.train_logs_dir) if cfg.train_logs_dir else results_dir.parent / "train_logs"
    study = read_study(cfg, results_dir, logs_dir)
    require_writable_dir(output_dir)
    result = analyse(cfg, study)
    captions = make_plots(cfg, study, result, output_dir)
    blocks = report_blocks(cfg, study, result, captions)
    write_text(output_dir / "report.md", to_markdown(blocks))
    write_text(output_dir / "report.html", to_html(blocks, output_dir))
    write_text(output_dir / "summary.csv", summary_csv(study, result))
    write_json(output_dir / "full_analysis.json", result)
    print_summary(study, result, output_dir)


if __name__ == "__main__":
    run_script(main, AnalyzeConfig, description=__doc__)
