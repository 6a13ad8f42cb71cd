"""analyze_results.py: reading, verdicts, older format, odd data, outputs. Result folders are made here, rich and minimal."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
TASKS = ("dm_val", "aime24", "aime25", "amc23", "math500", "gsm8k", "mmlu_stem", "humaneval")


def fake_study(folder: Path, arms: dict[str, float], seeds: range, tasks=TASKS, problems: int = 40, draws: int = 4, gain: float = 0.06,
               synthetic: bool = True, replicates: int = 1, kl: bool = True, logs: bool = True, rng_seed: int = 0, study: str = "fake") -> Path:
    """A study in the rich format: ``arms`` maps a name to the factor of its off-task standard deviation. Returns the results folder."""
    rng = np.random.default_rng(rng_seed)
    results = folder / "eval_metrics"
    results.mkdir(parents=True)
    difficulty = {t: rng.beta(1.2, 1.8, (problems, 1)) for t in tasks}
    shared = {t: rng.random((problems, draws)) for t in tasks}
    base = {t: (shared[t] < difficulty[t]).astype(int) for t in tasks}
    for arm, factor in arms.items():
        for seed in seeds:
            for rep in range(replicates):
                name = f"{arm}_seed{seed}" + (f"_rep{rep}" if rep else "")
                entries = {}
                for task in tasks:
                    on = task == tasks[0]
                    shift = (gain if on else 0.0) + 0.02 * (1 if on else factor) * rng.standard_normal()
                    own = rng.random((problems, draws)) < 0.3    # 30 % of draws are decorrelated from the shared random numbers
                    u = np.where(own, rng.random((problems, draws)), shared[task])
                    ft = (u < difficulty[task] + shift).astype(int)
                    delta = ft.mean() - base[task].mean()
                    entry = {"task_type": "math", "on_task": on, "num_problems": problems, "num_samples": draws,
                             "base_avg_score": float(base[task].mean()), "ft_avg_score": float(ft.mean()), "delta_j": float(delta),
                             "delta_j_se": 0.01, "ft_sampling_se": 0.01,
                             "scores": {"problem_ids": [f"{task}-{i}" for i in range(problems)], "base": base[task].tolist(), "ft": ft.tolist()}}
                    if kl:
                        level = 0.002 * math.exp(0.05 * rng.standard_normal() if on else 0.2 * factor * rng.standard_normal())
                        tokens = rng.integers(20, 60, (problems, draws))
                        per_token = level * rng.gamma(20, 1 / 20, (problems, draws))
                        entry.update(kl_exact_per_token=float((per_token * tokens).sum() / tokens.sum()),
                                     avg_kl=float((per_token * tokens).sum(1).mean()), kl_per_token=level,
                                     kl_scores={"problem_ids": [f"{task}-{i}" for i in range(problems)], "num_tokens": tokens.tolist(),
                                                "kl_exact_per_token": per_token.tolist(), "logratio": per_token.tolist()})
                    entries[task] = entry
                content = {"study": study, "arm": arm.split("+")[0], "precision_mode": arm.split("+")[0],
                           "overrides": dict(part.split("-", 1) for part in arm.split("+")[1:]), "seed": seed, "noise_replicate": rep,
                           "synthetic_data": synthetic, "tasks": entries}
                (results / f"{name}.json").write_text(json.dumps(content))
                sparse = 20.0 if arm.startswith("fp32") else 85.0
                (results / f"{name}_sparsity.json").write_text(json.dumps(
                    {"sparsity": {"sparsity_percent": sparse + float(rng.normal()), "num_changed": 5, "num_params": 100, "eta": 1e-3},
                     "definitions": {"extra": 1}}))
                if logs:
                    run = folder / "train_logs" / name
                    run.mkdir(parents=True)
                    rows = []
                    for step in range(1, 41):
                        lost = 0.02 if arm.startswith("fp32") else 0.95
                        rows.append({"step": step, "train/reward_mean": -0.2 + 0.01 * step + 0.05 * rng.standard_normal(),
                                     "train/accuracy": 0.4 + 0.004 * step + 0.02 * rng.standard_normal(), "train/grad_norm": 1 + rng.random(),
                                     "train/response_length_mean": 30 + rng.random(), "train/entropy_nats_per_token": 0.5 - 0.003 * step,
                                     "precision/lost_update_share": lost, "precision/update_over_ulp_median": 1 - lost,
                                     "precision/changed_share_vs_base": (1 - lost) * step / 40, "eval/dm_val_avg": 0.4 if step % 10 == 0 else None})
                    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return results


def minimal_study(folder: Path, values: dict[str, dict[str, list[float]]], kl: float = 0.01) -> Path:
    """A study in the older minimal format: values[arm][task] lists dJ by seed (1, 2, ...)."""
    folder.mkdir(parents=True, exist_ok=True)
    for arm, tasks in values.items():
        for i in range(max(map(len, tasks.values()))):
            entries = {t: {"ft_avg_score": 0.4 + v[i], "delta_j": v[i], "avg_kl": kl * (1 + 0.01 * i)} for t, v in tasks.items() if i < len(v)}
            (folder / f"{arm}_seed{i + 1}.json").write_text(json.dumps({"tasks": entries}))
            (folder / f"{arm}_seed{i + 1}_sparsity.json").write_text(json.dumps({"sparsity": {"sparsity_percent": 90.0 if arm == "bf16" else 10.0}}))
    return folder


if __name__ == "__main__":  # python tests/test_analyze_results.py FOLDER: folders to look at
    out = Path(sys.argv[1])
    fake_study(out / "two", {"fp32": 1, "bf16": 3}, range(1, 4))
    fake_study(out / "one", {"fp32": 1}, range(1, 4))
    fake_study(out / "one_seed", {"fp32": 1, "bf16": 1}, range(1, 2))
    fake_study(out / "five", {"fp32": 1, "bf16": 3, "bf16_mixed": 1, "bf16_storage": 2, "bf16_kahan": 1}, range(1, 6), synthetic=False)
    fake_study(out / "long", {"fp32": 1, "bf16": 3, "bf16+optimizer_state_dtype-bfloat16+update_rounding-stochastic": 2}, range(1, 6),
               tasks=("dm_val", "a_benchmark_with_a_very_long_name_indeed", "another-benchmark-of-some-length", "humaneval"))
    fake_study(out / "reps", {"fp32": 1, "bf16": 3}, range(1, 6), replicates=3)
    minimal_study(out / "minimal" / "eval_metrics", {a: {t: list(0.05 + s * np.random.default_rng(i).standard_normal(5)) for i, t in enumerate(TASKS)}
                                                     for a, s in (("fp32", 0.01), ("bf16", 0.03))})
