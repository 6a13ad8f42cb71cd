"""analyze_results.py: reading, verdicts, older format, odd data, outputs. Result folders are made here, rich and minimal."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import analyze_results as ar
from config import AnalyzeConfig, UserError

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



def analyse(results: Path, **options) -> tuple[ar.Study, dict]:
    """Read and analyse in this process, without plots."""
    cfg = AnalyzeConfig(results_dir=str(results), num_resamples=options.pop("num_resamples", 300), **options)
    study = ar.read_study(cfg, results, results.parent / "train_logs")
    return study, ar.analyse(cfg, study)


def command(*arguments: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "analyze_results.py", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True)


def strict(path: Path) -> dict:
    def reject(name: str):
        raise AssertionError(f"{name} in {path.name}")
    return json.loads(path.read_text(), parse_constant=reject)


def rewrite(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def rich(tmp_path_factory) -> Path:
    """Two arms, five seeds: off-task spread under bf16 five times as wide (standard deviation), on-task alike. Do not write into it."""
    return fake_study(tmp_path_factory.mktemp("rich"), {"fp32": 1, "bf16": 5}, range(1, 6), problems=60)


@pytest.fixture(scope="module")
def run(rich, tmp_path_factory) -> tuple[subprocess.CompletedProcess, Path]:
    """The command of the README on it."""
    out = tmp_path_factory.mktemp("out") / "analysis"
    return command("--results_dir", rich, "--output_dir", out, "--on_task", "dm_val",
                   "--off_task", "aime24", "aime25", "amc23", "math500", "mmlu_stem", "humaneval"), out


# --- the command

def test_command_writes_what_it_promises(run):
    done, out = run
    assert done.returncode == 0, done.stderr
    names = {p.name for p in out.iterdir()}
    plots = {f"{n}.png" for n in ("delta_j_comparison", "variance_comparison", "kl_comparison", "variance_decomposition", "training_curves",
                                  "sparsity_comparison", "lost_updates", "power")}
    assert names == plots | {"full_analysis.json", "summary.csv", "report.md", "report.html"}
    result = strict(out / "full_analysis.json")
    assert result["off_task"] == ["aime24", "aime25", "amc23", "math500", "mmlu_stem", "humaneval"]
    assert "tasks in the results that were not asked for: gsm8k" in result["missing"]
    for word in ("Hypothesis 1:", "Hypothesis 2:", "Hypothesis 3:", "Expected results", "report.html"):
        assert word in done.stdout
    assert len((out / "summary.csv").read_text().splitlines()) == 1 + 2 * 7


def test_older_keys_are_there(run):
    result = strict(run[1] / "full_analysis.json")
    task = result["hypothesis_1"]["tasks"]["dm_val"]
    assert {"mean", "std", "var"} <= task["fp32"].keys() and {"mean", "std", "var"} <= task["bf16"].keys()
    assert "p_value" in task["mean_test"] and {"f_statistic", "p_value"} <= task["variance_test"].keys()
    assert isinstance(result["hypothesis_1"]["verification"]["variances_small"], bool)
    for n in (1, 2, 3):
        assert isinstance(result[f"hypothesis_{n}"]["num_tasks_supported"], int) and isinstance(result[f"hypothesis_{n}"]["overall_supported"], bool)
    assert isinstance(result["summary"]["on_task_kl_similar"], bool)
    assert result["bf16_sparsity"]["bf16_seed1"]["sparsity_percent"] > 50


def test_planted_effects_are_found(run):
    result = strict(run[1] / "full_analysis.json")
    assert result["hypothesis_2"]["verdict"] == result["hypothesis_3"]["verdict"] == "supported"
    assert result["summary"]["on_task_kl_similar"] is True
    ratio = result["hypothesis_3"]["off_task_family"]["mean_log_variance_ratio"]
    assert ratio["ratio_low"] < 25 < ratio["ratio_high"]   # planted: standard deviation of log KL five times as large
    rows = {r["quantity"]: r["verdict"] for r in result["expected_results"]}
    assert rows["weights unchanged in bf16 (%)"] == "supported"
    assert set(rows.values()) <= {"supported", "not_supported", "inconclusive"}


def test_the_other_way_round_is_not_supported(rich):
    _, result = analyse(rich, reference="bf16")
    assert result["primary_comparison"] == "bf16:fp32"
    assert result["hypothesis_2"]["verdict"] == "not_supported" and not result["hypothesis_2"]["overall_supported"]


def red_banner(path: Path) -> bool:
    """Is there a row that is mostly the banner's red?"""
    from matplotlib.image import imread
    pixels = imread(path)[:, :, :3]
    red = np.abs(pixels - np.array([0xB0, 0x00, 0x20]) / 255).max(axis=2) < 0.02
    return bool(red.mean(axis=1).max() > 0.1)


def test_synthetic_data_are_marked_everywhere_and_real_data_nowhere(run, tmp_path, capsys):
    _, out = run
    assert all(red_banner(p) for p in out.glob("*.png"))
    assert "SYNTHETIC DATA" in (out / "report.md").read_text().splitlines()[2]
    assert (out / "report.html").read_text().index("SYNTHETIC DATA") < (out / "report.html").read_text().index("<table>")
    assert "SYNTHETIC DATA" in run[0].stdout
    real = fake_study(tmp_path / "real", {"fp32": 1, "bf16": 1}, range(1, 3), tasks=TASKS[:2], synthetic=False)
    ar.main(AnalyzeConfig(results_dir=str(real), output_dir=str(tmp_path / "out")))
    assert "SYNTHETIC" not in capsys.readouterr().out + (tmp_path / "out/report.html").read_text()
    assert not any(red_banner(p) for p in (tmp_path / "out").glob("*.png"))


def test_report_is_one_file(run):
    page = (run[1] / "report.html").read_text()
    assert page.count("<img ") == page.count('src="data:image/png;base64,') == 8
    assert "http" not in page.replace("<!doctype html>", "") and 'name="viewport"' in page
    assert "What is missing" in page and "Settings" in page


def test_same_seed_same_bytes(run, rich, tmp_path):
    done = command("--results_dir", rich, "--output_dir", tmp_path, "--off_task", "aime24", "aime25", "amc23", "math500", "mmlu_stem", "humaneval")
    assert done.returncode == 0
    def content(folder: Path, name: str) -> bytes:
        code = strict(folder / "full_analysis.json")["code"]  # the only part that may differ: a commit between the two runs
        return (folder / name).read_bytes().replace(str(code["commit"]).encode(), b"").replace(b" (with uncommitted changes)", b"").replace(
            f'"dirty": {json.dumps(code["dirty"])}'.encode(), b"")
    for path in run[1].iterdir():
        assert content(run[1], path.name) == content(tmp_path, path.name), path.name


def test_file_order_does_not_matter(rich, tmp_path):
    _, first = analyse(rich)
    shuffled = tmp_path / "eval_metrics"
    shuffled.mkdir()
    files = sorted(p for p in rich.glob("*.json") if "sparsity" not in p.name)
    for i, path in enumerate(reversed(files)):  # arm and seed are in the files, so that names only change the order of reading
        (shuffled / f"result{i:02d}.json").write_text(path.read_text())
    _, second = analyse(shuffled)
    for key in ("hypothesis_1", "hypothesis_2", "hypothesis_3", "descriptive", "comparisons"):
        assert first[key] == second[key]


@pytest.mark.parametrize("kind", ["svg", "pdf"])
def test_plots_also_as_vectors(kind, tmp_path):
    results = minimal_study(tmp_path / "eval_metrics", {a: {t: [0.05, 0.06, 0.07] for t in TASKS[:2]} for a in ("fp32", "bf16")})
    ar.main(AnalyzeConfig(results_dir=str(results), output_dir=str(tmp_path / "out"), plot_format=kind))
    assert (tmp_path / f"out/delta_j_comparison.{kind}").stat().st_size > 1000
    assert (tmp_path / "out/delta_j_comparison.png").is_file()


# --- the older minimal format

MINIMAL = {"fp32": {"dm_val": [0.061, 0.058, 0.066, 0.06], "aime24": [0.01, 0.02, 0.0, 0.01], "amc23": [0.02, 0.02, 0.01, 0.03]},
           "bf16": {"dm_val": [0.055, 0.063, 0.059, 0.065], "aime24": [0.05, -0.04, 0.0, 0.07], "amc23": [0.09, -0.03, 0.0, 0.02]}}


def test_minimal_format_gives_the_documented_values(tmp_path):
    _, result = analyse(minimal_study(tmp_path / "eval_metrics", MINIMAL))
    h1 = result["hypothesis_1"]["tasks"]["dm_val"]
    x, y = np.array(MINIMAL["bf16"]["dm_val"]), np.array(MINIMAL["fp32"]["dm_val"])
    assert h1["bf16"]["mean"] == pytest.approx(x.mean(), rel=1e-12) and h1["bf16"]["var"] == pytest.approx(np.var(x), rel=1e-12)
    assert h1["fp32"]["std"] == pytest.approx(np.std(y), rel=1e-12)
    f = np.var(x, ddof=1) / np.var(y, ddof=1)
    assert h1["variance_test"]["f_statistic"] == pytest.approx(f, rel=1e-12)
    assert h1["variance_test"]["p_value"] == pytest.approx(2 * min(stats.f.sf(f, 3, 3), stats.f.cdf(f, 3, 3)), rel=1e-9)
    assert h1["mean_test"]["p_value"] == pytest.approx(stats.ttest_ind(x, y, equal_var=False).pvalue, rel=1e-9)
    h2 = result["hypothesis_2"]["tasks"]["aime24"]
    x, y = np.array(MINIMAL["bf16"]["aime24"]), np.array(MINIMAL["fp32"]["aime24"])
    f = np.var(x, ddof=1) / np.var(y, ddof=1)
    assert h2["variance_test"]["f_statistic"] == pytest.approx(f, rel=1e-12) and h2["variance_test"]["p_value"] == pytest.approx(stats.f.sf(f, 3, 3), rel=1e-9)
    assert h2["bf16"]["var"] == pytest.approx(np.var(x), rel=1e-12)
    assert result["hypothesis_2"]["verification"] | {"rules": ""} == {
        "num_tasks_variance_larger": 2, "total_tasks": 2, "variance_larger_in_most": True, "rules": ""}
    assert result["bf16_sparsity"]["bf16_seed1"]["sparsity_percent"] == 90.0
    assert result["hypothesis_3"]["on_task"]["dm_val"]["measure"] == "avg_kl" and result["hypothesis_3"]["on_task"]["dm_val"]["scale"] == "raw"
    assert "noise not removed" in h2["bf16"]["noise"]["reason"]


# --- few, odd and missing data

def test_three_seeds_leave_h2_open_and_say_why(tmp_path):
    _, result = analyse(fake_study(tmp_path, {"fp32": 1, "bf16": 20}, range(1, 4), logs=False))
    h2 = result["hypothesis_2"]
    assert h2["verdict"] == "inconclusive" and "1/20" in h2["verdict_reason"] and not h2["overall_supported"]
    assert h2["joint_test"]["smallest_p"] == 0.05


def test_one_seed_is_descriptive_only(tmp_path):
    _, result = analyse(fake_study(tmp_path, {"fp32": 1, "bf16": 1}, range(1, 2), tasks=TASKS[:3]))
    for n in (1, 2, 3):
        assert result[f"hypothesis_{n}"]["verdict"] == "inconclusive"
    block = result["hypothesis_1"]["tasks"]["dm_val"]
    assert block["fp32"]["mean"] is not None and block["fp32"]["sample_var"] is None and "descriptive only" in block["verdict_reason"]
    assert block["mean_test"]["p_value"] is None and block["mean_test"]["reason"]


def test_one_arm_is_described_and_nothing_is_concluded(tmp_path):
    study, result = analyse(fake_study(tmp_path, {"bf16": 1}, range(1, 4), tasks=TASKS[:3]))
    assert result["comparisons"] == {} and all(result[f"hypothesis_{n}"]["verdict"] == "inconclusive" for n in (1, 2, 3))
    assert result["descriptive"]["bf16"]["dm_val"]["delta_j"]["n"] == 3
    assert any("reference arm fp32" in note for note in study.missing)


def test_no_on_task_and_no_off_task_result_conclude_nothing(tmp_path):
    results = minimal_study(tmp_path / "eval_metrics", MINIMAL)
    study, result = analyse(results, on_task=["dm_vall"], off_task=["aime24", "amc23"])
    assert result["hypothesis_1"]["verdict"] == "inconclusive" and result["hypothesis_1"]["total_tasks"] == 0
    assert not any(v for k, v in result["hypothesis_1"]["verification"].items() if k != "rules")
    assert any("dm_vall" in n and "did you mean dm_val?" in n for n in study.missing)
    _, result = analyse(results, off_task=["nothing"])
    assert result["hypothesis_2"]["verdict"] == result["hypothesis_3"]["verdict"] == "inconclusive"


def test_unequal_seeds_and_missing_tasks_are_used_and_listed(tmp_path):
    results = minimal_study(tmp_path / "eval_metrics", {"fp32": {t: [0.01 * (i + j) for i in range(6)] for j, t in enumerate(TASKS[:3])},
                                                        "bf16": {t: [0.02 * i * (j + 1) for i in range(4)] for j, t in enumerate(TASKS[:3])}})
    rewrite(results / "bf16_seed2.json", lambda c: c["tasks"].pop("aime25"))
    study, result = analyse(results)
    assert "arm bf16: no seed 5, 6 (other arms have)" in study.missing and "bf16_seed2: no result on aime25" in study.missing
    joint = result["hypothesis_2"]["joint_test"]
    assert joint["seeds"] == [3, 6] and joint["p_value"] is not None       # the run without aime25 is left out of the joint test only
    assert result["hypothesis_2"]["tasks"]["aime24"]["bf16"]["n"] == 4
    assert result["hypothesis_1"]["tasks"]["dm_val"]["paired"]["num_pairs"] == 4


def test_zero_variance_is_null_with_a_reason_and_a_bound(tmp_path):
    results = fake_study(tmp_path, {"fp32": 1, "bf16": 1}, range(1, 6), tasks=TASKS[:3], logs=False)
    for i in range(1, 6):
        def flatten(content):
            content["tasks"]["aime24"]["delta_j"] = 0.0125
        rewrite(results / f"fp32_seed{i}.json", flatten)
    _, result = analyse(results)
    task = result["hypothesis_2"]["tasks"]["aime24"]
    assert task["variance_ratio"] is None and "identical" in task["variance_ratio_reason"] and task["variance_ratio_lower_bound"] > 1
    assert task["variance_test"]["f_statistic"] is None and task["variance_test"]["reason"]
    assert result["hypothesis_2"]["mean_log_variance_ratio"]["tasks"] == ["aime25"]
    json.dumps(result, allow_nan=False)


def test_identical_values_everywhere_conclude_nothing_about_spread(tmp_path):
    flat = {t: [0.05] * 5 for t in TASKS[:3]}
    _, result = analyse(minimal_study(tmp_path / "eval_metrics", {"fp32": flat, "bf16": flat}))
    assert result["hypothesis_2"]["verdict"] == "inconclusive" and "no spread" in result["hypothesis_2"]["verdict_reason"]
    assert result["hypothesis_1"]["verdict"] == "supported"    # both exactly equal and above 0
    json.dumps(result, allow_nan=False)


def test_mixed_data_are_refused_unless_asked_for(tmp_path):
    results = fake_study(tmp_path, {"fp32": 1, "bf16": 1}, range(1, 4), tasks=TASKS[:2], logs=False)
    rewrite(results / "bf16_seed2.json", lambda c: c.update(synthetic_data=False))
    with pytest.raises(UserError, match="bf16_seed2.json.*--allow_mixed_data"):
        analyse(results)
    study, _ = analyse(results, allow_mixed_data=True)
    assert study.synthetic and any("mixed" in n for n in study.missing)
    rewrite(results / "bf16_seed2.json", lambda c: c.update(synthetic_data=True, study="another"))
    with pytest.raises(UserError, match="another, fake"):
        analyse(results)


def test_duplicates_are_counted_once_or_refused(tmp_path):
    results = fake_study(tmp_path, {"fp32": 1, "bf16": 1}, range(1, 4), tasks=TASKS[:2], logs=False)
    (results / "copy_of_seed_one.json").write_text((results / "fp32_seed1.json").read_text())
    study, result = analyse(results)
    assert any("counted once" in n for n in study.missing) and result["hypothesis_1"]["tasks"]["dm_val"]["fp32"]["n"] == 3
    rewrite(results / "copy_of_seed_one.json", lambda c: c["tasks"]["dm_val"].update(delta_j=0.5))
    with pytest.raises(UserError, match="copy_of_seed_one.json.*fp32_seed1.json|fp32_seed1.json.*copy_of_seed_one.json"):
        analyse(results)


def test_null_values_are_missing_values(tmp_path):
    results = minimal_study(tmp_path / "eval_metrics", MINIMAL)
    rewrite(results / "fp32_seed1.json", lambda c: c["tasks"]["dm_val"].update(delta_j=None))
    study, result = analyse(results)
    assert result["hypothesis_1"]["tasks"]["dm_val"]["fp32"]["n"] == 3 and any("dm_val.delta_j is None" in n for n in study.missing)


def test_ragged_or_single_draw_scores_leave_the_noise_in(tmp_path):
    results = fake_study(tmp_path, {"fp32": 1, "bf16": 1}, range(1, 4), tasks=TASKS[:2], draws=1, logs=False)
    _, result = analyse(results)
    noise = result["hypothesis_2"]["tasks"]["aime24"]["fp32"]["noise"]
    assert noise["between_run_var"] is None and "one draw" in noise["reason"]
    results = fake_study(tmp_path / "b", {"fp32": 1, "bf16": 1}, range(1, 4), tasks=TASKS[:2], logs=False)
    rewrite(results / "fp32_seed1.json", lambda c: c["tasks"]["aime24"]["scores"]["ft"][3].pop())
    study, result = analyse(results)
    assert any("fp32_seed1.json: aime24.scores" in n for n in study.missing)
    assert result["hypothesis_2"]["tasks"]["aime24"]["fp32"]["noise"]["noise_variance"] is None
    assert result["hypothesis_2"]["tasks"]["aime24"]["bf16"]["noise"]["noise_variance"] > 0


def test_kl_of_zero_falls_back_to_the_raw_scale(tmp_path):
    results = fake_study(tmp_path, {"fp32": 1, "bf16": 1}, range(1, 4), tasks=TASKS[:2], logs=False)
    rewrite(results / "fp32_seed1.json", lambda c: c["tasks"]["dm_val"].update(kl_exact_per_token=0.0))
    _, result = analyse(results)
    on = result["hypothesis_3"]["on_task"]["dm_val"]
    assert on["scale"] == "raw" and "1e-09" in on["scale_reason"] and result["hypothesis_3"]["off_task"]["aime24"]["scale"] == "log"


def test_failed_and_unevaluated_runs_are_listed(tmp_path):
    results = fake_study(tmp_path, {"fp32": 1, "bf16": 1}, range(1, 3), tasks=TASKS[:2])
    (tmp_path / "status.json").write_text(json.dumps([{"job": "train bf16_seed9", "state": "failed", "exit_code": 1, "log_path": "x.log"},
                                                      {"job": "train fp32_seed1", "state": "done", "exit_code": 0}]))
    (tmp_path / "train_logs" / "bf16_seed9").mkdir()
    study, _ = analyse(results)
    assert "train bf16_seed9: failed, exit code 1, log x.log" in study.missing
    assert "bf16_seed9: trained or begun, not evaluated" in study.missing
    assert not any("fp32_seed1: " in n for n in study.missing)


def test_noise_floor_stands_beside_every_delta(tmp_path):
    results = fake_study(tmp_path, {"fp32": 1, "bf16": 1}, range(1, 3), tasks=TASKS[:2], logs=False)
    (tmp_path / "noise_floor").mkdir()
    (tmp_path / "noise_floor" / "base.json").write_text(json.dumps({"tasks": {"dm_val": {"sd_over_seeds": 0.0123, "expected_sd": 0.01}}}))
    study, result = analyse(results)
    header, rows = ar.delta_table(study, result)
    column = next(i for i, h in enumerate(header) if h.startswith("noise floor"))
    assert [r[column] for r in rows] == ["0.0123", "0.0123", "-", "-"] and all(len(r) == len(header) for r in rows)


def test_a_log_cut_short_by_a_kill_is_read(tmp_path):
    results = fake_study(tmp_path, {"fp32": 1}, range(1, 2), tasks=TASKS[:2])
    log = tmp_path / "train_logs/fp32_seed1/metrics.jsonl"
    log.write_text(log.read_text()[:-20])
    study, _ = analyse(results)
    assert len(study.runs[0].metrics) == 39


# --- arms, replicates, the 2 x 2

def test_overrides_make_an_arm_of_their_own(tmp_path):
    study, _ = analyse(fake_study(tmp_path, {"fp32": 1, "bf16": 1, "bf16+optimizer_state_dtype-bfloat16": 1}, range(1, 3), tasks=TASKS[:2], logs=False))
    assert study.arms == ["fp32", "bf16", "bf16+optimizer_state_dtype-bfloat16"]


def test_asked_for_arms_only_and_a_misspelt_one_is_named(tmp_path):
    results = fake_study(tmp_path, {"fp32": 1, "bf16": 1, "bf16_kahan": 1}, range(1, 3), tasks=TASKS[:2], logs=False)
    study, result = analyse(results, precision_modes=["fp32", "bf16_kahn"])
    assert list(result["comparisons"]) == [] and any("did you mean bf16_kahan?" in n for n in study.missing)
    _, result = analyse(results, precision_modes=["bf16_kahan"])
    assert list(result["comparisons"]) == ["fp32:bf16_kahan"] and result["primary_comparison"] == "fp32:bf16_kahan"


def test_storage_comparison_and_factorial(tmp_path):
    results = fake_study(tmp_path, {"fp32": 1, "bf16": 3, "bf16_mixed": 1, "bf16_storage": 3}, range(1, 5), tasks=TASKS[:3], logs=False)
    _, result = analyse(results)
    assert set(result["comparisons"]) == {"fp32:bf16", "fp32:bf16_mixed", "fp32:bf16_storage", "bf16_mixed:bf16"}
    cells = {a: np.mean([v for v in result["descriptive"][a]["aime24"]["delta_j"]["values"].values()]) for a in ("fp32", "bf16", "bf16_mixed", "bf16_storage")}
    effect = result["factorial"]["tasks"]["aime24"]["mean"]
    assert effect["storage"]["estimate"] == pytest.approx((cells["bf16"] + cells["bf16_storage"] - cells["bf16_mixed"] - cells["fp32"]) / 2)
    assert effect["compute"]["estimate"] == pytest.approx((cells["bf16"] + cells["bf16_mixed"] - cells["bf16_storage"] - cells["fp32"]) / 2)
    assert effect["interaction"]["estimate"] == pytest.approx(cells["bf16"] - cells["bf16_mixed"] - cells["bf16_storage"] + cells["fp32"])


def test_replicates_split_the_variance_and_count_once_in_tests(tmp_path):
    results = fake_study(tmp_path, {"fp32": 1, "bf16": 1}, range(1, 4), tasks=TASKS[:2], replicates=3, logs=False)
    study, result = analyse(results)
    assert result["hypothesis_1"]["tasks"]["dm_val"]["fp32"]["n"] == 3
    parts = result["variance_components"]["fp32"]["dm_val"]
    assert parts["num_seeds"] == 3 and parts["num_runs"] == 9 and parts["evaluation_noise"] > 0
    chosen = {r.replicate for r in study.independent("fp32")}
    assert chosen == {0}


# --- bad requests

@pytest.mark.parametrize("prepare,arguments,message", [
    (lambda d: None, [], "does not exist"),
    (lambda d: d.mkdir(), [], "no results to analyse"),
    (lambda d: (d.mkdir(), (d / "fp32_seed1.json").write_text('{"tasks": {\n "dm_val": }')), [], "fp32_seed1.json line 2"),
    (lambda d: (d.mkdir(), (d / "notes.json").write_text("[1]")), [], "no results to analyse"),
    (lambda d: minimal_study(d, MINIMAL), ["--margin", "-1"], "--margin"),
    (lambda d: minimal_study(d, MINIMAL), ["--precison_modes", "fp32"], "did you mean --precision_modes"),
    (lambda d: minimal_study(d, MINIMAL), ["--precision_modes", "fp64"], "none of the arms fp64"),
    (lambda d: minimal_study(d, MINIMAL), ["--on_task", "dm_val", "--off_task", "dm_val"], "both in --on_task and in --off_task"),
    (lambda d: minimal_study(d, MINIMAL), ["--plot_format", "jpg"], "png, svg, pdf"),
])
def test_bad_requests_end_with_2_one_line_and_nothing_written(prepare, arguments, message, tmp_path):
    prepare(tmp_path / "results")
    done = command("--results_dir", tmp_path / "results", "--output_dir", tmp_path / "out", *arguments)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_wrapped_names_keep_every_character():
    name = "bf16+optimizer_state_dtype-bfloat16+update_rounding-stochastic"
    assert ar.wrapped(name).replace("\n", "") == name and max(map(len, ar.wrapped(name).split("\n"))) <= ar.LABEL_CHARS
    assert ar.wrapped("x" * 50, 20) == "\n".join(["x" * 20, "x" * 20, "x" * 10])


@pytest.mark.slow
def test_400_runs_in_twenty_seconds_and_a_gigabyte(tmp_path):
    import resource
    import time
    arms_of_400 = {a: 1 for a in ("fp32", "bf16", "bf16_mixed", "bf16_storage", "bf16_pure", "bf16_stochastic", "bf16_kahan", "fp16_mixed")}
    results = fake_study(tmp_path, arms_of_400, range(1, 51), problems=30, logs=False)
    start = time.perf_counter()
    done = command("--results_dir", results, "--output_dir", tmp_path / "out")
    seconds = time.perf_counter() - start
    assert done.returncode == 0, done.stderr
    peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert seconds < 20 and peak_kib < 1 << 20, (seconds, peak_kib)


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
