"""eval_policy.py: the command on a tiny random model, its numbers against brute force, its cache, its resume, its refusals."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import eval_policy
from config import EvalConfig, UserError, WorkError, config_hash

LETTERS = ["\n", " ", "+", "=", "?", *"0123456789", *"ABCD", ")", *"xyz"]
PHRASES = ["\\boxed{1}", "\\boxed{2}", "\\boxed{3}", "\\boxed{A}", "\\boxed{B}", "    return 1\n", "    return 2\n"]
WORDS = ["<pad>", "<eos>", "<unk>", *LETTERS, *PHRASES]
EOS = WORDS.index("<eos>")
TASKS = ("calc", "choice", "program")


@pytest.fixture(autouse=True)
def restore_numerics():
    """An evaluation sets process-wide switches; other tests must not inherit them."""
    import torch
    cuda = torch.backends.cuda
    before = (torch.are_deterministic_algorithms_enabled(), cuda.math_sdp_enabled(), cuda.flash_sdp_enabled(),
              cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled(), torch.get_num_threads())
    yield
    torch.use_deterministic_algorithms(before[0])
    for enable, value in zip((cuda.enable_math_sdp, cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_cudnn_sdp), before[1:5]):
        enable(value)
    torch.set_num_threads(before[5])


def make_tokenizer():
    """A Qwen2 tokenizer without merges: AutoTokenizer rebuilds that class for every qwen2 model, whatever its files say."""
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer
    byte_level = {"\n": "\u010a", " ": "\u0120"}  # how byte-level vocabularies spell them
    vocabulary = ["<pad>", "<eos>", "<unk>", *(byte_level.get(c, c) for c in LETTERS)]
    tokenizer = Qwen2Tokenizer(vocab={w: i for i, w in enumerate(vocabulary)}, merges=[], eos_token="<eos>", pad_token="<pad>",
                               unk_token="<unk>", bos_token=None)
    tokenizer.add_tokens([AddedToken(phrase, normalized=False, special=False) for phrase in PHRASES])
    return tokenizer


def make_model(seed: int = 0, context: int = 128):
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    torch.manual_seed(seed)
    # logits of standard deviation near 2: some answers come out often and others seldom, responses have 1 to 12 tokens
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(WORDS), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                         num_attention_heads=2, num_key_value_heads=1, initializer_range=0.25, max_position_embeddings=context,
                                         eos_token_id=EOS, bos_token_id=None, pad_token_id=0, tie_word_embeddings=False))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16().float())
    return model.eval()


def move(model, scale: float):
    import torch
    other = copy.deepcopy(model)
    torch.manual_seed(7)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(scale * torch.randn_like(p))
    return other


def problems(kind: str, count: int) -> list[dict]:
    if kind == "program":
        return [{"id": f"p{i}", "problem": f"program {i}", "task_type": "code", "source": "test", "entry_point": "f", "answer": "    return 1\n",
                 "prompt": "x = 1\ndef f(x):\n", "test": f"def check(candidate):\n    assert candidate({i}) == 1\n"} for i in range(count)]
    if kind == "choice":
        return [{"id": f"c{i}", "problem": f"{i} = ?", "answer": "AB"[i % 2], "task_type": "mcq", "source": "test", "choices": ["1", "2"]}
                for i in range(count)]
    return [{"id": f"m{i}", "problem": f"{i} + 1 = ?", "answer": str(1 + i % 3), "task_type": "math", "source": "test"} for i in range(count)]


def write_tasks(folder: Path, count: int = 8, **changes) -> Path:
    """Three tasks, one of each type, and a manifest that calls two of them synthetic."""
    rows, manifest = [], {}
    for name, kind in (("calc", "math"), ("choice", "mcq"), ("program", "code")):
        path = folder / f"{name}.json"
        path.write_text(json.dumps(problems(name, count)))
        manifest[path.name] = {"sha256": eval_policy.sha256_file(path), "synthetic": name != "program", "rows": count}
        rows.append({"name": name, "path": str(path), "task_type": kind, "on_task": name == "calc", "num_samples": 3, "temperature": 0.7,
                     "top_p": 0.8, "max_new_tokens": 12, "prompt_template": "plain", **changes})
    (folder / "manifest.json").write_text(json.dumps({"files": manifest}))
    tasks = folder / "tasks.json"
    tasks.write_text(json.dumps(rows))
    return tasks


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> Path:
    """Base and trained policy, tasks."""
    root = tmp_path_factory.mktemp("world")
    base = make_model()
    for name, model in (("base", base), ("ft", move(base, 0.02))):
        model.save_pretrained(root / name)
        make_tokenizer().save_pretrained(root / name)
    (root / "ft" / "rlvr_run.json").write_text(json.dumps({
        "study": "toy", "arm": "bf16+update_rounding-kahan", "precision_mode": "bf16", "overrides": {"update_rounding": "kahan"}, "seed": 3,
        "noise_replicate": 2, "config_hash": "c0ffee", "synthetic_data": True}))
    write_tasks(root)
    return root


def config(world: Path, out: Path, **changes) -> EvalConfig:
    values = dict(base_ckpt=str(world / "base"), ft_ckpt=str(world / "ft"), eval_tasks_config=str(world / "tasks.json"),
                  output_path=str(out / "eval_metrics" / "run.json"), eval_dtype="float32", device="cpu", num_threads=1, grading_workers=1,
                  kl_num_samples=3, eval_base=True)
    return EvalConfig(**(values | changes))


def flags(cfg: EvalConfig) -> list[str]:
    default = EvalConfig()
    changed = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg) if getattr(cfg, f.name) != getattr(default, f.name)}
    return [part for name, value in changed.items()
            for part in ([f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}", str(value)])]


def command(root: Path, cfg: EvalConfig) -> list[str]:
    return [sys.executable, str(root / "eval_policy.py"), *flags(cfg)]


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="session")
def evaluated(world, repo_root, tmp_path_factory) -> tuple[Path, dict, str]:
    """The command of the README, run once: its folder, its result and what it printed."""
    out = tmp_path_factory.mktemp("evaluated")
    done = subprocess.run(command(repo_root, config(world, out)), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return out, json.loads((out / "eval_metrics" / "run.json").read_text()), done.stdout


def again(evaluated, tmp_path: Path) -> Path:
    """A copy of the finished evaluation that a test may change."""
    return Path(shutil.copytree(evaluated[0], tmp_path / "again"))


# --------------------------------------------------------------------------------------------------------------------
# The command

def test_the_command_writes_every_promised_file_and_field(evaluated):
    out, result, printed = evaluated
    assert {p.name for p in (out / "eval_metrics").iterdir() if not p.name.startswith(".")} == {"run.json", "base.json"}
    assert not list(out.rglob("*.partial")) and not list(out.rglob("*.tmp*"))
    assert {p.name for p in (out / "eval_samples" / "run").glob("*.jsonl")} == {f"{t}.jsonl" for t in TASKS}
    for field in ("study", "arm", "precision_mode", "overrides", "seed", "noise_replicate", "base_ckpt", "ft_ckpt", "synthetic_data",
                  "sampling", "versions", "settings_hash"):
        assert field in result, field
    for name in TASKS:
        task = result["tasks"][name]
        for field in ("task_type", "on_task", "num_problems", "num_samples", "base_avg_score", "ft_avg_score", "delta_j", "delta_j_se",
                      "ft_sampling_se", "avg_kl", "avg_kl_se", "kl_per_token", "kl_k3_per_token", "kl_exact_per_token",
                      "logratio_on_graded_samples", "outcomes", "truncated_fraction", "context_limited_fraction", "mean_response_tokens"):
            assert field in task, (name, field)
        assert sum(task["outcomes"].values()) == task["num_problems"] * task["num_samples"] == 24
        assert name in printed
        rows = read_lines(out / "eval_samples" / "run" / f"{name}.jsonl")
        assert len(rows) == 24
        assert set(rows[0]) >= {"problem_id", "sample", "prompt", "response", "token_ids", "finish_reason", "outcome", "extracted", "rule"}


def test_identity_comes_from_the_run_file_and_not_from_the_files_name(evaluated):
    result = evaluated[1]
    assert (result["arm"], result["precision_mode"], result["seed"], result["noise_replicate"]) == ("bf16+update_rounding-kahan", "bf16", 3, 2)
    assert result["study"] == "toy" and result["overrides"] == {"update_rounding": "kahan"} and result["identity_source"] == "rlvr_run.json"


def test_scores_and_errors_can_be_recomputed_from_the_file(evaluated):
    result = evaluated[1]
    informative = 0
    for name, task in result["tasks"].items():
        base, ft = np.array(task["scores"]["base"], float), np.array(task["scores"]["ft"], float)
        assert base.shape == ft.shape == (8, 3) and len(task["scores"]["problem_ids"]) == 8
        difference = ft.mean(1) - base.mean(1)
        assert task["delta_j"] == pytest.approx(difference.mean(), abs=1e-12)
        assert task["delta_j"] == pytest.approx(task["ft_avg_score"] - task["base_avg_score"], abs=1e-12)
        assert task["delta_j_se"] == pytest.approx(difference.std(ddof=1) / np.sqrt(8), abs=1e-12)
        assert task["ft_sampling_se"] == pytest.approx(np.sqrt((ft.var(axis=1, ddof=1) / 3).sum()) / 8, abs=1e-12)
        assert task["outcomes"]["correct"] == ft.sum() and task["base_outcomes"]["correct"] == base.sum()
        assert task["pass_at_k"]["1"] == pytest.approx(ft.mean(), abs=1e-12) and set(task["pass_at_k"]) == {"1", "2"}
        rows = read_lines(evaluated[0] / "eval_samples" / "run" / f"{name}.jsonl")
        assert [r["outcome"] == "correct" for r in rows] == [bool(c) for c in ft.ravel()]
        assert task["truncated_fraction"] == np.mean([r["finish_reason"] == "length" for r in rows])
        assert task["mean_response_tokens"] == np.mean([len(r["token_ids"]) for r in rows])
        for row in rows:
            assert (row["token_ids"][-1] == EOS) == (row["finish_reason"] == "stop") and len(row["token_ids"]) <= 12
        informative += 0 < ft.mean() < 1
    assert informative >= 2  # otherwise these equalities would hold for a grader that says the same to everything
    assert result["tasks"]["program"]["maj_at_k"] is None


def log_probabilities(model, prompt: list[int], response: list[int]):
    """float64 log-distribution before each response token: (len(response), V)."""
    import torch
    with torch.no_grad():
        logits = copy.deepcopy(model).double()(torch.tensor([prompt + response])).logits[0]
    return logits.log_softmax(-1)[len(prompt) - 1:-1]


def test_kl_equals_brute_force_on_its_own_samples(evaluated, world):
    import torch

    from utils_data import format_prompt, load_problems
    base, ft = make_model(), move(make_model(), 0.02)
    out, result, _ = evaluated
    tokenizer = make_tokenizer()
    for name in TASKS:
        prompts = {p["id"]: format_prompt(p, "plain", tokenizer) for p in load_problems(world / f"{name}.json")}
        rows = read_lines(out / "eval_samples" / "run" / "kl" / f"{name}.jsonl")
        assert len(rows) == 24
        log_ratio, exact, k3, lengths = [], [], [], []
        for row in rows:
            p, q = (log_probabilities(m, prompts[row["problem_id"]], row["token_ids"]) for m in (ft, base))
            d = (p - q).gather(1, torch.tensor(row["token_ids"])[:, None])[:, 0]
            log_ratio.append(d.sum().item())
            k3.append((torch.expm1(-d) + d).sum().item())
            exact.append((p.exp() * (p - q)).sum().item())
            lengths.append(len(d))
        task = result["tasks"][name]
        # float32 forwards of a two-layer model against float64: 1e-6 a token, KL values near 1e-2
        assert task["avg_kl"] == pytest.approx(np.mean(log_ratio), abs=2e-5)
        by_problem = np.array(log_ratio).reshape(8, 3).mean(1)
        assert task["avg_kl_se"] == pytest.approx(by_problem.std(ddof=1) / np.sqrt(8), abs=2e-5)
        for field, values in (("kl_per_token", log_ratio), ("kl_exact_per_token", exact), ("kl_k3_per_token", k3)):
            assert task[field] == pytest.approx(sum(values) / sum(lengths), abs=1e-5), field
        assert task["kl_exact_per_token"] > 1e-3
        assert np.array(task["kl_scores"]["logratio"]).ravel() == pytest.approx(np.array(log_ratio), abs=5e-5)
        assert np.array(task["kl_scores"]["kl_exact_per_token"]).ravel() == pytest.approx(np.array(exact) / lengths, abs=1e-5)
        assert np.array(task["kl_scores"]["num_tokens"]).ravel().tolist() == lengths


def test_logratio_on_graded_samples_is_that_of_the_graded_samples(evaluated, world):
    import torch

    from utils_data import format_prompt, load_problems
    base, ft = make_model(), move(make_model(), 0.02)
    prompts = {p["id"]: format_prompt(p, "plain", make_tokenizer()) for p in load_problems(world / "calc.json")}
    values = []
    for row in read_lines(evaluated[0] / "eval_samples" / "run" / "calc.jsonl"):
        p, q = (log_probabilities(m, prompts[row["problem_id"]], row["token_ids"]) for m in (ft, base))
        values.append((p - q).gather(1, torch.tensor(row["token_ids"])[:, None]).sum().item())
    task = evaluated[1]["tasks"]["calc"]
    assert task["logratio_on_graded_samples"] == pytest.approx(np.mean(values), abs=2e-5)
    assert task["logratio_on_graded_samples"] != pytest.approx(task["avg_kl"], rel=0.05)  # it is no KL


# --------------------------------------------------------------------------------------------------------------------
# What must not matter

def test_batch_size_changes_no_sampled_token_in_float32(evaluated, world, tmp_path):
    eval_policy.main(config(world, tmp_path, batch_size=5, logprob_tokens=64, tasks=["calc", "choice"]))
    other = json.loads((tmp_path / "eval_metrics" / "run.json").read_text())
    for name in ("calc", "choice"):
        ours = [r["token_ids"] for r in read_lines(tmp_path / "eval_samples" / "run" / f"{name}.jsonl")]
        assert ours == [r["token_ids"] for r in read_lines(evaluated[0] / "eval_samples" / "run" / f"{name}.jsonl")]
        assert other["tasks"][name]["scores"] == evaluated[1]["tasks"][name]["scores"]
        # other batches of the forward pass: float32 rounding of sums near 0.1
        assert other["tasks"][name]["avg_kl"] == pytest.approx(evaluated[1]["tasks"][name]["avg_kl"], abs=1e-5)
    assert other["settings_hash"] != evaluated[1]["settings_hash"]


def test_a_policy_equal_to_the_base_differs_in_nothing(world, tmp_path):
    eval_policy.main(config(world, tmp_path, ft_ckpt=str(world / "base"), output_path=str(tmp_path / "eval_metrics" / "fp32_seed4.json")))
    result = json.loads((tmp_path / "eval_metrics" / "fp32_seed4.json").read_text())
    assert (result["arm"], result["seed"], result["noise_replicate"], result["identity_source"]) == ("fp32", 4, 0, "file name")
    for task in result["tasks"].values():
        # common random numbers: the very same responses, so every difference is 0 and not merely small
        assert task["scores"]["base"] == task["scores"]["ft"] and task["delta_j"] == task["delta_j_se"] == 0
        assert [task[f] for f in ("avg_kl", "kl_per_token", "kl_k2_per_token", "kl_k3_per_token", "kl_exact_per_token",
                                  "logratio_on_graded_samples")] == [0.0] * 6


def test_policies_are_evaluated_in_eval_dtype_whatever_the_checkpoint_stores(world, tmp_path):
    base = make_model()  # on the bf16 grid
    import torch
    ft = copy.deepcopy(base)
    with torch.no_grad():
        for p in ft.parameters():
            p.mul_(1 + 2.0 ** -12)  # rounds back to the base in bf16
    ft.save_pretrained(tmp_path / "ft")
    results = {}
    for dtype in ("float32", "bfloat16"):
        out = tmp_path / dtype
        eval_policy.main(config(world, out, ft_ckpt=str(tmp_path / "ft"), eval_dtype=dtype, tasks=["calc"]))
        results[dtype] = json.loads((out / "eval_metrics" / "run.json").read_text())["tasks"]["calc"]
    assert results["float32"]["kl_exact_per_token"] > 0
    assert results["bfloat16"]["kl_exact_per_token"] == 0 and results["bfloat16"]["delta_j"] == 0


@pytest.mark.parametrize("room_on_disk", [True, False])
def test_one_model_at_a_time_gives_the_same_kl_or_a_reason(evaluated, world, tmp_path, monkeypatch, capsys, room_on_disk):
    if not room_on_disk:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10 ** 6, 10 ** 6, 100))
    eval_policy.main(config(world, tmp_path, kl_models="one_by_one", tasks=["calc"]))
    ours = json.loads((tmp_path / "eval_metrics" / "run.json").read_text())["tasks"]["calc"]
    together = evaluated[1]["tasks"]["calc"]
    for field in ("avg_kl", "kl_per_token", "kl_k3_per_token", "logratio_on_graded_samples"):
        assert ours[field] == together[field], field  # the same batches through the same kernels
    error = capsys.readouterr().err
    if room_on_disk:
        assert ours["kl_exact_per_token"] == together["kl_exact_per_token"] and "GB of hidden states" in error
    else:
        assert ours["kl_exact_per_token"] is None and "do not fit on the disk" in ours["kl_exact_reason"] and "null" in error
    assert not list(tmp_path.rglob(".kl_hidden*"))


def test_a_stage_in_a_process_of_its_own_gives_the_same_samples(evaluated, world, tmp_path):
    plan = eval_policy.make_plan(config(world, tmp_path, tasks=["calc"], kl_num_samples=0))
    plan.samples.mkdir(parents=True)
    plan.output.parent.mkdir(parents=True)
    eval_policy.run_stage(eval_policy.sample_policy, plan, isolated=True)
    name = "calc.jsonl"
    assert (plan.samples / name).read_text() == (evaluated[0] / "eval_samples" / "run" / name).read_text()


# --------------------------------------------------------------------------------------------------------------------
# Cache and resume

def spy_on_models(monkeypatch) -> list[str]:
    """Names of the checkpoints that a sampler is opened for from now on."""
    opened: list[str] = []
    original = eval_policy.open_engine
    monkeypatch.setattr(eval_policy, "open_engine", lambda plan, path, *rest: opened.append(Path(path).name) or original(plan, path, *rest))
    return opened


def test_a_valid_cached_base_is_used_and_not_sampled_again(evaluated, world, tmp_path, monkeypatch):
    out = again(evaluated, tmp_path)
    opened = spy_on_models(monkeypatch)
    before = (out / "eval_metrics" / "base.json").read_text()
    eval_policy.main(config(world, out, eval_base=False))
    assert opened == ["ft"] and (out / "eval_metrics" / "base.json").read_text() == before
    result = json.loads((out / "eval_metrics" / "run.json").read_text())
    assert result == evaluated[1] | {"versions": result["versions"]}  # the checkout may have changed meanwhile, the numbers may not


def test_base_alone_fills_the_cache_and_a_second_run_adds_nothing(world, tmp_path, monkeypatch, capsys):
    cfg = config(world, tmp_path, ft_ckpt=None, output_path=str(tmp_path / "eval_metrics" / "base.json"), tasks=["calc"])
    opened = spy_on_models(monkeypatch)
    assert eval_policy.main(cfg) == 0 and eval_policy.main(cfg) == 0
    assert opened == ["base"] and "calc" in capsys.readouterr().out
    entries = json.loads((tmp_path / "eval_metrics" / "base.json").read_text())["entries"]
    assert [e["task"] for e in entries.values()] == ["calc"]


def test_every_setting_that_the_base_scores_depend_on_is_in_the_cache_key(world, tmp_path, monkeypatch):
    def keys(tasks_file: Path = world / "tasks.json", **changes) -> dict:
        plan = eval_policy.make_plan(config(world, tmp_path, eval_tasks_config=str(tasks_file), **changes))
        return {name: config_hash(key) for name, key in plan.base_keys.items()}

    reference = keys()
    assert keys() == reference
    assert keys(kl_num_samples=1, kl_max_problems=2, grading_workers=2, ft_ckpt=str(world / "base")) == reference  # not the base's business
    for changes in ({"limit": 5}, {"num_samples": 2}, {"eval_seed": 5}, {"eval_dtype": "bfloat16"}, {"batch_size": 7},
                    {"sdpa_backend": "flash"}, {"base_ckpt": str(world / "ft")}):
        assert not set(keys(**changes).values()) & set(reference.values()), changes
    for changes in ({"temperature": 0.6}, {"top_p": 0.7}, {"max_new_tokens": 11}, {"prompt_template": "chat_boxed"}):
        folder = tmp_path / "_".join(changes)
        folder.mkdir()
        assert not set(keys(write_tasks(folder, **changes)).values()) & set(reference.values()), changes
    (tmp_path / "data").mkdir()
    changed = write_tasks(tmp_path / "data")
    (tmp_path / "data" / "calc.json").write_text(json.dumps(problems("calc", 8)[::-1]))
    assert [name for name, key in keys(changed).items() if key not in reference.values()] == ["calc"]
    for name, value in (("grader_version", lambda task_type: "newer"), ("package_versions", lambda names=(): dict.fromkeys(names, "9.9"))):
        with monkeypatch.context() as patch:
            patch.setattr(eval_policy, name, value)
            assert not set(keys().values()) & set(reference.values()), name


def test_a_stale_cache_is_refused_and_the_difference_named(evaluated, world, tmp_path):
    out = again(evaluated, tmp_path)
    with pytest.raises(UserError, match="differs in eval_seed.*--eval_base"):
        eval_policy.main(config(world, out, eval_base=False, eval_seed=77, output_path=str(out / "eval_metrics" / "other.json")))
    assert not (out / "eval_metrics" / "other.json").exists()


def test_killed_in_the_middle_it_finishes_with_the_same_file_and_repeats_no_task(repo_root, tmp_path, world):
    data = tmp_path / "data"
    data.mkdir()
    rows = json.loads(write_tasks(data).read_text())[:2]
    # the last task takes long enough to be killed in: 400 problems x 32 draws
    (data / "long.json").write_text(json.dumps(problems("calc", 400)))
    rows.append({**rows[0], "name": "long", "path": str(data / "long.json"), "num_samples": 32})
    (data / "tasks.json").write_text(json.dumps(rows))

    def run_config(out: Path) -> EvalConfig:
        return config(world, out, eval_tasks_config=str(data / "tasks.json"), kl_num_samples=2, kl_max_problems=8)

    killed, whole = tmp_path / "killed", tmp_path / "whole"
    assert subprocess.run(command(repo_root, run_config(whole)), capture_output=True, timeout=600).returncode == 0
    shutil.copytree(whole / "eval_metrics", killed / "eval_metrics", ignore=shutil.ignore_patterns("run.json"))  # the cached base
    shutil.copytree(whole / "eval_samples" / "base", killed / "eval_samples" / "base")
    partial = killed / "eval_metrics" / ".run.partial"
    process = subprocess.Popen(command(repo_root, run_config(killed)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        if partial.exists() and len(json.loads(partial.read_text())["graded"]) == 2:
            break
        time.sleep(0.02)
    assert process.poll() is None, "it ended before it could be killed"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "eval_metrics" / "run.json").exists()
    written = {name: os.stat(killed / "eval_samples" / "run" / f"{name}.jsonl").st_mtime_ns for name in ("calc", "choice")}
    assert subprocess.run(command(repo_root, run_config(killed)), capture_output=True, timeout=600).returncode == 0
    assert written == {name: os.stat(killed / "eval_samples" / "run" / f"{name}.jsonl").st_mtime_ns for name in written}
    a, b = (json.loads((root / "eval_metrics" / "run.json").read_text()) for root in (killed, whole))
    assert a["tasks"] == b["tasks"] and a["settings_hash"] == b["settings_hash"]
    assert a == b | {"versions": a["versions"]}
    for name in ("calc.jsonl", "long.jsonl", "kl/long.jsonl"):
        assert (killed / "eval_samples" / "run" / name).read_bytes() == (whole / "eval_samples" / "run" / name).read_bytes()
    assert not partial.exists()


def test_a_partial_file_of_other_settings_or_weights_is_not_used(world, tmp_path):
    plan = eval_policy.make_plan(config(world, tmp_path))
    plan.partial.parent.mkdir(parents=True)
    mine = {"key": {"settings_hash": plan.settings_hash, "ft_weights": plan.ft_weights}, "graded": {"calc": {}}, "kl": {}}
    for key, value, used in (("settings_hash", plan.settings_hash, True), ("settings_hash", "0", False), ("ft_weights", "0", False)):
        plan.partial.write_text(json.dumps({**mine, "key": {**mine["key"], key: value}}))
        assert bool(eval_policy.read_partial(plan)["graded"]) is used
    plan.partial.write_text('{"key": ')
    assert eval_policy.read_partial(plan)["graded"] == {}


# --------------------------------------------------------------------------------------------------------------------
# Regrade and noise floor

def test_regrading_restores_damaged_outcomes_and_updates_base_and_result(evaluated, world, tmp_path, monkeypatch):
    out = again(evaluated, tmp_path)
    samples = out / "eval_samples" / "run" / "calc.jsonl"
    rows = read_lines(samples)
    samples.write_text("".join(json.dumps({**r, "outcome": "wrong"}) + "\n" for r in rows))
    base = next((out / "eval_samples" / "base").glob("calc.*.jsonl"))
    base.write_text("".join(json.dumps({**r, "outcome": "correct"}) + "\n" for r in read_lines(base)))
    monkeypatch.setattr(eval_policy, "grader_version", lambda task_type: "a newer grader")
    eval_policy.main(EvalConfig(regrade=str(samples.parent), grading_workers=1))
    assert read_lines(samples) == rows
    assert read_lines(base) == read_lines(next((evaluated[0] / "eval_samples" / "base").glob("calc.*.jsonl")))
    result = json.loads((out / "eval_metrics" / "run.json").read_text())
    for name in TASKS:
        assert result["tasks"][name] == evaluated[1]["tasks"][name] | {"grader": "a newer grader"}
    eval_policy.base_scores(eval_policy.make_plan(config(world, out, eval_base=False)))  # the cache is valid under the new grader


def test_regrading_the_base_alone_renews_its_cache(evaluated, world, tmp_path, monkeypatch):
    out = again(evaluated, tmp_path)
    monkeypatch.setattr(eval_policy, "grader_version", lambda task_type: "a newer grader")
    plan = eval_policy.make_plan(config(world, out, eval_base=False))
    with pytest.raises(UserError, match="differs in grader"):
        eval_policy.base_scores(plan)
    eval_policy.main(EvalConfig(regrade=str(out / "eval_samples" / "base"), grading_workers=1))
    assert set(eval_policy.base_scores(plan)) == set(TASKS)


@pytest.mark.parametrize("folder", ["nowhere", "."])
def test_regrading_a_folder_without_samples_is_refused(tmp_path, folder):
    with pytest.raises(UserError, match="no such folder|no folder of eval_samples"):
        eval_policy.main(EvalConfig(regrade=str(tmp_path / folder)))


def test_noise_floor_varies_seeds_and_batch_sizes_and_nothing_else(evaluated, world, tmp_path):
    output = tmp_path / "floor.json"
    eval_policy.main(config(world, tmp_path, noise_floor=3, output_path=str(output), tasks=["calc"], batch_size=16))
    floor = json.loads(output.read_text())
    task = floor["tasks"]["calc"]
    assert floor["seeds"] == [1234, 1235, 1236] and floor["batch_sizes"] == [16, 8] and np.shape(task["scores"]) == (2, 3)
    assert task["scores"][0][0] == evaluated[1]["tasks"]["calc"]["ft_avg_score"]
    assert len(set(task["scores"][0])) > 1 and task["sd_over_seeds"] == pytest.approx(np.std(task["scores"][0], ddof=1))
    assert task["share_of_responses_that_differ"] == 0 == task["max_abs_difference_between_batch_sizes"]  # float32, hf engine
    assert task["expected_sd"] > 0
    assert not (tmp_path / "eval_metrics").exists()


# --------------------------------------------------------------------------------------------------------------------
# Pieces

def test_paired_difference_by_hand():
    def summary(correct):
        return {"correct": correct, "problem_ids": ["a", "b"], "outcomes": {}, **dict.fromkeys(eval_policy.SIDE_FIELDS)}
    fields = eval_policy.score_fields(summary([[1, 0], [0, 0]]), summary([[1, 1], [0, 1]]))
    # both problems gain 1/2: the difference is certain although both scores are not
    assert fields["delta_j"] == 0.5 and fields["delta_j_se"] == 0.0
    assert fields["ft_score_se"] == pytest.approx(0.25) and fields["base_score_se"] == pytest.approx(0.25)
    # problem b's draws alone differ: variance 1/2 over 2 draws, 2 problems
    assert fields["ft_sampling_se"] == pytest.approx(np.sqrt(0.5 / 2) / 2)
    single = eval_policy.score_fields({**summary([[1, 0]])}, {**summary([[1, 1]])})
    assert single["delta_j"] == 0.5 and single["delta_j_se"] is None


def test_context_leaves_less_room_to_long_prompts_and_it_is_counted(world, tmp_path):
    assert eval_policy.response_caps([[0] * 10, [0] * 40, [0] * 120, [0] * 128, [0] * 200], 100, 128) == [100, 64, 8, 0, -72]
    base = make_model(context=24)
    base.save_pretrained(tmp_path / "short")
    make_tokenizer().save_pretrained(tmp_path / "short")
    data = tmp_path / "data"
    data.mkdir()
    tasks = json.loads(write_tasks(data).read_text())[:1]
    rows = problems("calc", 4)
    for row in rows[2:]:
        row["problem"] += "x" * 10  # 19 characters and a newline: 4 tokens are left of 24
    (data / "calc.json").write_text(json.dumps(rows))
    (data / "tasks.json").write_text(json.dumps(tasks))
    out = tmp_path / "out"
    eval_policy.main(config(world, out, base_ckpt=str(tmp_path / "short"), ft_ckpt=str(tmp_path / "short"),
                            eval_tasks_config=str(data / "tasks.json")))
    task = json.loads((out / "eval_metrics" / "run.json").read_text())["tasks"]["calc"]
    assert task["context_limited_fraction"] == 0.5
    lengths = {r["problem_id"]: r["max_new_tokens"] for r in read_lines(out / "eval_samples" / "run" / "calc.jsonl")}
    assert lengths == {"m0": 12, "m1": 12, "m2": 4, "m3": 4}
    rows[0]["problem"] = "x" * 30
    (data / "calc.json").write_text(json.dumps(rows))
    with pytest.raises(UserError, match="task calc, problem m0.*fills the model's context of 24"):
        eval_policy.main(config(world, tmp_path / "other", base_ckpt=str(tmp_path / "short"), ft_ckpt=None,
                                eval_tasks_config=str(data / "tasks.json")))
    with pytest.raises(UserError, match="run.json is no cache of base evaluations"):
        eval_policy.main(config(world, out, base_ckpt=str(tmp_path / "short"), ft_ckpt=None, eval_tasks_config=str(data / "tasks.json")))


def test_run_names_are_read_back(tmp_path):
    for stem, arm, mode, seed, replicate in (("bf16_seed1", "bf16", "bf16", 1, 0), ("bf16_mixed_seed12_rep3", "bf16_mixed", "bf16_mixed", 12, 3),
                                             ("bf16+update_rounding-kahan_seed2", "bf16+update_rounding-kahan", "bf16", 2, 0)):
        found = eval_policy.run_identity(str(tmp_path), Path(f"{stem}.json"))
        assert (found["arm"], found["precision_mode"], found["seed"], found["noise_replicate"]) == (arm, mode, seed, replicate)
    unknown = eval_policy.run_identity(str(tmp_path), Path("result.json"))
    assert unknown["arm"] is unknown["seed"] is unknown["source"] is None


def test_compact_json_is_the_same_value_with_scores_on_one_line():
    value = {"scores": [[1, 0], [0.5, -1e-9]], "text": 'a "[\n 1\n]" b', "empty": [], "names": ["x, y", "z"], "nested": [{"a": [1]}]}
    text = eval_policy.compact_json(value)
    assert json.loads(text) == value and "[1, 0]" in text and '["x, y", "z"]' in text
    with pytest.raises(ValueError, match="scores"):
        eval_policy.compact_json({"scores": [float("nan")]})


def test_saved_samples_with_a_missing_draw_are_noticed():
    rows = [{"problem_id": p, "sample": s} for p in "ab" for s in range(2)]
    assert [[r["sample"] for r in d] for d in eval_policy.by_problem(rows[::-1], ["a", "b"])] == [[0, 1], [0, 1]]
    for broken in (rows[:-1], [], [*rows, {"problem_id": "c", "sample": 0}]):
        with pytest.raises(WorkError):
            eval_policy.by_problem(broken, ["a", "b"])


def test_every_response_is_in_exactly_one_batch_within_the_limit():
    generator = np.random.default_rng(0)
    own = eval_policy.Sequences([[1] * n for n in (5, 300, 20, 8)], [], [], [], [])
    for p, count in ((0, 3), (1, 4), (2, 6), (3, 50)):
        for _ in range(count):
            own.owners.append(p)
            own.responses.append([2] * int(generator.integers(1, 30)))
    plan = eval_policy.plan_batches(own, 700)
    assert sorted(i for batch in plan for i in batch.sequences) == list(range(63))
    for batch in plan:
        if not batch.packed:
            lengths = [len(own.prompts[own.owners[i]]) + len(own.responses[i]) for i in batch.sequences]
            assert max(lengths) * len(lengths) <= 700
    assert {own.owners[i] for batch in plan if batch.packed for i in batch.sequences} == {0, 2}


def test_synthetic_data_anywhere_marks_the_result(evaluated):
    assert evaluated[1]["synthetic_data"] is True and evaluated[1]["tasks"]["program"]["synthetic"] is False
    assert eval_policy.overall_synthetic([False, False], None) is False
    assert eval_policy.overall_synthetic([False, None], None) is None
    assert eval_policy.overall_synthetic([False], True) is True


# --------------------------------------------------------------------------------------------------------------------
# Bad requests

@pytest.mark.parametrize("changes, message", [
    ({"ft_ckpt": None, "eval_base": False}, "--ft_ckpt, or --eval_base"),
    ({"base_ckpt": "results/nowhere/final_model"}, "results/nowhere/final_model"),
    ({"ft_ckpt": "WORLD"}, r"has no \*.safetensors"),
    ({"eval_tasks_config": "nowhere.json"}, "nowhere.json does not exist"),
    ({"tasks": ["clac"]}, "--tasks clac.*did you mean calc"),
    ({"output_path": "WORLD"}, "is a folder"),
    ({"output_path": "WORLD/tasks.json/x.json"}, "not writable"),
    ({"output_path": "WORLD/base.json"}, "kept for the base policy"),
    ({"output_path": None, "ft_ckpt": "WORLD/base"}, "rlvr_run.json"),
    ({"eval_base": False}, "no valid base evaluation of task calc .*none is cached.*--eval_base"),
])
def test_a_wrong_request_is_refused_before_anything_is_written(world, tmp_path, changes, message):
    changes = {k: v.replace("WORLD", str(world)) if isinstance(v, str) else v for k, v in changes.items()}
    with pytest.raises(UserError, match=message) as caught:
        eval_policy.main(config(world, tmp_path, **changes))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_code_is_not_run_without_a_sandbox_unless_asked(world, tmp_path, monkeypatch):
    import utils_code_eval
    monkeypatch.setattr(utils_code_eval, "sandbox_status", lambda: {"isolation": "none", "missing": ["the network is reachable"], "reason": "test"})
    with pytest.raises(UserError, match="--allow_unsafe_code_execution"):
        eval_policy.make_plan(config(world, tmp_path))
    eval_policy.make_plan(config(world, tmp_path, tasks=["calc"]))
    eval_policy.make_plan(config(world, tmp_path, allow_unsafe_code_execution=True))


def test_a_benchmark_that_fails_its_own_tests_gives_no_scores(world, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    tasks = json.loads(write_tasks(data).read_text())
    rows = problems("program", 3)
    rows[1]["test"] = "def check(candidate):\n    assert candidate(1) == 5\n"
    (data / "program.json").write_text(json.dumps(rows))
    with pytest.raises(UserError, match="canonical solutions fail.*p1"):
        eval_policy.main(config(world, tmp_path / "out", eval_tasks_config=str(data / "tasks.json"), tasks=[tasks[2]["name"]]))
    # folder.json only says whose samples the folder is for; there is neither a score nor a sample
    assert {p.name for p in (tmp_path / "out").rglob("*.json*")} <= {eval_policy.FOLDER_FILE}


@pytest.mark.parametrize("arguments, message", [
    (["--limit", "-1"], "--limit"), (["--num_samples", "1"], "--num_samples"), (["--noise_floor", "1"], "--noise_floor"),
    (["--eval_dtpye", "float32"], "did you mean --eval_dtype"), (["--base_ckpt", "nowhere/at/all", "--eval_base"], "nowhere/at/all"),
])
def test_the_command_ends_with_two_and_one_line(repo_root, tmp_path, arguments, message):
    done = subprocess.run([sys.executable, str(repo_root / "eval_policy.py"), "--results_root", str(tmp_path), *arguments],
                          capture_output=True, text=True, timeout=120, cwd=repo_root)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
