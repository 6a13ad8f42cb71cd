"""J_k, delta J_k and KL_k of one policy against the base, on every benchmark of a task list.

In:  a base policy, a trained policy, a task list (configs/eval_tasks*.json) with its problem files.
Out: eval_metrics/{run}.json (scores per problem and draw, differences, KL, errors, outcomes), eval_samples/{run}/{task}.jsonl (one
     graded response a line), eval_metrics/base.json (the base policy's scores, kept for every later run with the same settings).

The embedded model on a CPU, under a minute:
    python eval_policy.py --config configs/tiny.yaml --ft_ckpt results/tiny/train_logs/bf16_seed1/final_model --eval_base
The study on one GPU, hours:
    python eval_policy.py --base_ckpt Qwen/Qwen2.5-Math-7B --ft_ckpt results/train_logs/bf16_seed1/final_model \
        --eval_tasks_config configs/eval_tasks_config.json --output_path results/eval_metrics/bf16_seed1.json --eval_base

Three stages, each over all tasks, so that one model at a time need be in the sampler: base policy (unless cached), trained policy,
KL. Finished tasks are kept in eval_metrics/.{run}.partial; the same command after a kill repeats none of them.

J_k is avg@k at the task's temperature and top-p, the same random numbers for every policy. KL_k has samples of its own at temperature
1 and top-p 1: its expectation is over the policy itself. It is computed by float32 forwards of the weights as evaluated (rounded to
eval_dtype, whatever the checkpoint stores).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterator

from config import EvalConfig, UserError, WorkError, config_hash, run_name
from utils_data import (EvalTask, format_prompt, load_manifest_entry, load_task_problems, load_tasks, prompt_text,
                        resolved_template)
from utils_run import (EXIT_BAD_REQUEST, EXIT_FAILED, git_state, package_versions, read_json, read_jsonl, require_writable_dir,
                       run_script, sha256_file, strict_json, write_jsonl, write_text)

if TYPE_CHECKING:
    import numpy as np

ROOT = Path(__file__).resolve().parent
RESULT_FORMAT = 1  # of the files written here; a cached base of another format is not used
OUTCOMES = ("correct", "wrong", "unparsed", "timeout")
FOLDER_FILE = "folder.json"  # in a samples folder: which result, or base cache, its samples belong to
KL_STREAM = 1  # second element of the random stream: KL draws share no random numbers with graded ones
# Prompts that leave less room than max_new_tokens are sampled in groups of one cap, rounded down to this: a batch has one cap.
CONTEXT_STEP = 64
SIGNIFICANT_DIGITS = 8  # of stored per-draw KL values: float32 has 7.2
RUN_NAME = re.compile(r"(?P<arm>(?P<mode>[A-Za-z0-9_]+)(?:\+.+?)?)_seed(?P<seed>\d+)(?:_rep(?P<rep>\d+))?")
# Problems that need at most MAX_PACKED_TOKENS, prompt and all responses together, are packed into rows of PACKED_ROW_TOKENS or of the
# longest such problem. Attention is quadratic in the row. Measured on the embedded model: 0.45 of the time of one response a row.
PACKED_ROW_TOKENS = 128
MAX_PACKED_TOKENS = 256
FORWARD_TOKENS = {"cpu": 4096, "cuda": 16384}  # a forward pass; on CPUs larger ones leave the cache and were half as fast
# Room left beside two float32 models for activations and logits before they are held one after the other.
KL_HEADROOM_BYTES = {"cpu": 1 << 30, "cuda": 8 << 30}


# --------------------------------------------------------------------------------------------------------------------
# What is evaluated

@dataclass(frozen=True)
class TaskInput:
    """One benchmark, ready to sample from."""

    task: EvalTask
    problems: list[dict[str, Any]]
    prompts: list[list[int]]  # token ids
    template: str  # as really used: a tokenizer without chat template falls back to text
    data_sha256: str
    synthetic: bool | None  # None: no manifest says

    @property
    def ids(self) -> list[str]:
        return [p["id"] for p in self.problems]


@dataclass(frozen=True)
class Plan:
    """Everything a stage needs, checked before anything is written."""

    cfg: EvalConfig
    inputs: list[TaskInput]
    tokenizer: Any
    numerics: Any
    base: str
    ft: str | None
    ft_weights: str | None
    run: str
    identity: dict[str, Any]
    output: Path | None  # None: base only
    cache: Path
    samples: Path
    base_samples: Path
    base_keys: dict[str, dict[str, Any]]  # per task: what a cached base evaluation depends on
    settings: dict[str, Any]

    @property
    def partial(self) -> Path:
        return self.output.with_name(f".{self.output.stem}.partial")

    @property
    def settings_hash(self) -> str:
        return config_hash(self.settings)


def checkpoint_folder(path: str) -> str:
    """The folder that holds the model's config.json: ``path`` itself or its ``model`` folder; hub ids unchanged."""
    inner = Path(path) / "model"
    return str(inner) if not (Path(path) / "config.json").exists() and (inner / "config.json").exists() else path


def weights_id(path: str, revision: str | None = None) -> str:
    """What identifies a policy's weights: SHA-256 over the files that define it, or a hub id with its resolved commit.

    generation_config.json counts, because the end-of-sequence ids are read from it.
    Raises: UserError if the folder holds no model or the hub does not know the id.
    """
    folder = Path(path)
    if folder.is_dir():
        weights = sorted(folder.glob("*.safetensors"))
        if not weights or not (folder / "config.json").is_file():
            raise UserError(f"model folder {path} has no {'config.json' if weights else '*.safetensors'}")
        files = [*weights, folder / "config.json", folder / "generation_config.json"]
        return config_hash({f.name: sha256_file(f) for f in files if f.exists()})
    from transformers.utils.hub import cached_file
    try:
        return f"{path}@{Path(cached_file(path, 'config.json', revision=revision)).parent.name}"
    except (OSError, ValueError) as error:
        raise UserError(f"model {path} is no folder here and cannot be had from the hub: {str(error).splitlines()[0]}") from None


def run_identity(ft_ckpt: str, output: Path | None) -> dict[str, Any]:
    """Study, arm, seed and replicate of the trained policy: from its rlvr_run.json, else from the output file's name, else null."""
    for folder in (Path(ft_ckpt), Path(ft_ckpt).parent):
        if (folder / "rlvr_run.json").is_file():
            found = read_json(folder / "rlvr_run.json")
            if not isinstance(found, dict):
                raise UserError(f"{folder / 'rlvr_run.json'}: expected an object")
            return {"study": found.get("study"), "arm": found.get("arm"), "precision_mode": found.get("precision_mode"),
                    "overrides": found.get("overrides") or {}, "seed": found.get("seed"),
                    "noise_replicate": found.get("noise_replicate") or 0, "train_config_hash": found.get("config_hash"),
                    "train_synthetic": found.get("synthetic_data"), "source": "rlvr_run.json"}
    match = RUN_NAME.fullmatch(output.stem) if output else None
    return {"study": None, "arm": match["arm"] if match else None, "precision_mode": match["mode"] if match else None,
            "overrides": None if match is None or "+" in match["arm"] else {}, "seed": int(match["seed"]) if match else None,
            "noise_replicate": int(match["rep"] or 0) if match else None, "train_config_hash": None, "train_synthetic": None,
            "source": "file name" if match else None}


def name_of_run(identity: dict[str, Any], ft_ckpt: str) -> str:
    """Name of the result file where --output_path is not given. Raises UserError if nothing names the run."""
    if identity["arm"] is not None and identity["overrides"] is not None and identity["seed"] is not None:
        return run_name(identity["precision_mode"], identity["overrides"], identity["seed"], identity["noise_replicate"])
    raise UserError(f"{ft_ckpt} has no rlvr_run.json that names arm and seed; give --output_path .../ARM_seedS.json")


def load_input(task: EvalTask, cfg: EvalConfig, tokenizer: Any) -> TaskInput:
    """Problems and prompts of one task, with the overrides of the command line."""
    if cfg.num_samples:
        task = dataclasses.replace(task, num_samples=cfg.num_samples)
    problems = load_task_problems(task)[:cfg.limit or None]
    entry = load_manifest_entry(task.path)
    return TaskInput(task, problems, [format_prompt(p, task.prompt_template, tokenizer) for p in problems],
                     resolved_template(task.prompt_template, tokenizer), sha256_file(task.path),
                     entry["synthetic"] if entry else None)


def select_tasks(cfg: EvalConfig) -> list[EvalTask]:
    """Tasks of the list, or those named by --tasks. Raises UserError for a name that is not in the list."""
    from config import nearest
    tasks = load_tasks(cfg.eval_tasks_config)
    names = [t.name for t in tasks]
    for name in cfg.tasks:
        if name not in names:
            raise UserError(f"--tasks {name}: not in {cfg.eval_tasks_config}{nearest(name, names)}; it has {', '.join(names)}")
    return [t for t in tasks if not cfg.tasks or t.name in cfg.tasks]


def grader_version(task_type: str) -> str:
    """What graded: the source of the grader and, for mathematics, math-verify's version. Other grader, other scores."""
    source = "utils_code_eval.py" if task_type == "code" else "utils_math_eval.py"
    version = "" if task_type == "code" else f"+math-verify {package_versions(('math-verify',))['math-verify']}"
    return sha256_file(ROOT / source)[:16] + version


def engine_id(cfg: EvalConfig, numerics: Any) -> dict[str, Any]:
    """Engine, versions and numerical settings that sampled tokens depend on."""
    versions = package_versions(("torch", "transformers", "vllm"))
    kept = {"hf": ("torch", "transformers"), "vllm": ("torch", "vllm")}[cfg.rollout_engine]
    return {"engine": cfg.rollout_engine, **{name: versions[name] for name in kept}, "dtype": cfg.eval_dtype,
            "device": numerics.device, "sdpa_backend": numerics.sdpa_backend, "cpu_matmul": numerics.cpu_matmul,
            "batch_size": cfg.batch_size}


def task_settings(item: TaskInput, cfg: EvalConfig) -> dict[str, Any]:
    """What a task's scores depend on, the policy apart."""
    digest = hashlib.sha256(json.dumps(item.prompts).encode()).hexdigest()
    return {"task": item.task.name, "task_type": item.task.task_type, "template": item.template,
            "data_sha256": item.data_sha256, "token_ids_sha256": digest, "num_problems": len(item.problems), "limit": cfg.limit,
            "num_samples": item.task.num_samples, "temperature": item.task.temperature, "top_p": item.task.top_p,
            "max_new_tokens": item.task.max_new_tokens, "eval_seed": cfg.eval_seed, "grader": grader_version(item.task.task_type)}


def samples_folder(cfg: EvalConfig, metrics: Path, run: str) -> Path:
    """eval_samples/RUN beside eval_metrics, or beside the result file where its folder has another name."""
    root = metrics.parent if metrics.name == "eval_metrics" else metrics
    return root / "eval_samples" / run


def relative(path: Path, start: Path) -> str:
    """``path`` as seen from folder ``start``, so that a results folder can be moved as a whole."""
    return os.path.relpath(path.resolve(), start.resolve())


def make_plan(cfg: EvalConfig) -> Plan:
    """Resolve and check the request. Raises UserError for anything that is wrong with it; writes nothing."""
    base, ft = cfg.base_ckpt or cfg.model_name_or_path, cfg.ft_ckpt and checkpoint_folder(cfg.ft_ckpt)
    if not ft and not cfg.eval_base:
        raise UserError("nothing to evaluate: give --ft_ckpt, or --eval_base for the base policy alone")
    tasks = select_tasks(cfg)
    given = Path(cfg.output_path) if cfg.output_path else None
    if given and given.is_dir():
        raise UserError(f"--output_path {given} is a folder; name a JSON file in it")
    base_id, ft_id = weights_id(base, cfg.model_revision), weights_id(ft) if ft else None
    identity = run_identity(cfg.ft_ckpt, given) if ft else {}
    metrics = given.parent if given else Path(cfg.results_root) / "eval_metrics"
    output = None if not ft else given or metrics / f"{name_of_run(identity, cfg.ft_ckpt)}.json"
    cache = given if given and not ft else metrics / "base.json"
    run = output.stem if output else "base"
    if output and output.name == cache.name:
        raise UserError(f"--output_path {output}: this name is kept for the base policy's scores; choose another")

    from transformers.utils.logging import disable_progress_bar

    from utils_precision import DTYPES, load_tokenizer, resolve_device, setup_numerics
    disable_progress_bar()  # of weight loading: it is short, and would cut our own bars into pieces
    tokenizer = load_tokenizer(base, cfg.model_revision)
    inputs = [load_input(task, cfg, tokenizer) for task in tasks]
    check_code_tasks(inputs, cfg)
    low = DTYPES[cfg.eval_dtype if cfg.eval_dtype != "float32" else "bfloat16"]
    numerics = setup_numerics(True, cfg.sdpa_backend, cfg.cpu_matmul, cfg.num_threads, resolve_device(cfg.device), low)
    engine = engine_id(cfg, numerics)
    per_task = {item.task.name: task_settings(item, cfg) for item in inputs}
    keys = {name: {"format": RESULT_FORMAT, "weights": base_id, **engine, **settings} for name, settings in per_task.items()}
    settings = {"format": RESULT_FORMAT, "base_weights": base_id, "engine": engine, "tasks": per_task, "kl_num_samples":
                cfg.kl_num_samples, "kl_max_problems": cfg.kl_max_problems}
    samples = Path(cfg.samples_dir) if cfg.samples_dir else samples_folder(cfg, metrics, run)
    base_samples = samples if not ft else samples_folder(cfg, metrics, "base")
    return Plan(cfg, inputs, tokenizer, numerics, base, ft, ft_id, run, identity, output, cache, samples, base_samples, keys, settings)


def check_code_tasks(inputs: list[TaskInput], cfg: EvalConfig) -> None:
    """UserError if generated code may not be run here."""
    if any(item.task.task_type == "code" for item in inputs):
        from utils_code_eval import CodePool
        with CodePool(1, allow_unsafe=cfg.allow_unsafe_code_execution):
            pass


# --------------------------------------------------------------------------------------------------------------------
# Sampling and grading

def open_engine(plan: Plan, path: str, revision: str | None = None) -> Any:
    """The sampler for one policy, with weights in eval_dtype."""
    cfg = plan.cfg
    if cfg.rollout_engine == "vllm":
        from utils_rollout import VLLMEngine
        return VLLMEngine(path, plan.tokenizer, cfg.eval_dtype, None, cfg.vllm_gpu_memory_fraction, cfg.vllm_tensor_parallel_size,
                          context_length(path, revision), revision)
    from utils_precision import load_model
    from utils_rollout import HFEngine
    return HFEngine(load_model(path, cfg.eval_dtype, plan.numerics.device, plan.numerics, revision), plan.tokenizer, cfg.batch_size)


def context_length(path: str, revision: str | None) -> int:
    from transformers import AutoConfig
    return int(AutoConfig.from_pretrained(path, revision=revision).max_position_embeddings)


@dataclass(frozen=True)
class Samples:
    """Responses of one task: [problem][draw]. caps: new tokens each problem was allowed."""

    responses: list[list[list[int]]]
    finish_reasons: list[list[str]]
    caps: list[int]


def response_caps(prompts: list[list[int]], max_new_tokens: int, context: int) -> list[int]:
    """New tokens allowed after each prompt: max_new_tokens, or what the context leaves, rounded down to CONTEXT_STEP."""
    caps = []
    for prompt in prompts:
        room = context - len(prompt)
        caps.append(max_new_tokens if room >= max_new_tokens else max(room // CONTEXT_STEP * CONTEXT_STEP, min(room, CONTEXT_STEP)))
    return caps


def draw(engine: Any, item: TaskInput, num_samples: int, temperature: float, top_p: float, seed: int, stream: tuple[int, ...],
         count: int, progress: Callable[[int], Any]) -> Samples:
    """``num_samples`` responses to each of the first ``count`` problems.

    Random numbers depend on (seed, stream, problem id, draw, position, token) alone, so every policy meets the same ones.
    """
    from utils_rollout import SamplingParams, problem_key
    prompts, ids = item.prompts[:count], item.ids[:count]
    caps = response_caps(prompts, item.task.max_new_tokens, engine.context)
    for problem_id, cap, prompt in zip(ids, caps, prompts):
        if cap < 1:
            raise UserError(f"task {item.task.name}, problem {problem_id}: its prompt of {len(prompt)} tokens fills the model's "
                            f"context of {engine.context}")
    responses: list[Any] = [None] * len(prompts)
    reasons: list[Any] = [None] * len(prompts)
    for cap in sorted(set(caps), reverse=True):
        rows = [i for i, c in enumerate(caps) if c == cap]
        out = engine.generate([prompts[i] for i in rows], num_samples, SamplingParams(temperature, top_p, cap, seed), stream,
                              [problem_key(ids[i]) for i in rows], progress=progress)
        for k, i in enumerate(rows):
            responses[i] = out.responses[k * num_samples:(k + 1) * num_samples]
            reasons[i] = out.finish_reasons[k * num_samples:(k + 1) * num_samples]
    return Samples(responses, reasons, caps)


class Graders:
    """Both graders, started when first needed; a context manager. Code benchmarks must pass their own solutions first."""

    def __init__(self, workers: int, allow_unsafe: bool) -> None:
        self.workers, self.allow_unsafe = workers, allow_unsafe
        self.stack = contextlib.ExitStack()
        self.math = self.code = None

    def __enter__(self) -> Graders:
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.close()

    def grade(self, texts: list[str], problems: list[dict[str, Any]], task_type: str) -> list[Any]:
        """One grade (outcome, extracted, rule) per text; equal texts for one problem are graded once."""
        places: dict[tuple[str, str], int] = {}
        index = [places.setdefault((p["id"], t), len(places)) for t, p in zip(texts, problems)]
        first: dict[int, int] = {}
        for row, place in enumerate(index):
            first.setdefault(place, row)
        unique = [(texts[row], problems[row]) for row in first.values()]
        if task_type == "code":
            grades = self._code_pool().grade(unique)
        else:
            grades = self._math_pool().grade([(text, p["answer"], task_type) for text, p in unique], strict=False)
        return [grades[place] for place in index]

    def check_benchmark(self, item: TaskInput) -> None:
        """UserError if a code benchmark's own solutions fail here."""
        if item.task.task_type == "code":
            from utils_code_eval import check_canonical
            check_canonical(item.problems, self.workers, allow_unsafe=self.allow_unsafe)

    def _math_pool(self) -> Any:
        if self.math is None:
            from utils_math_eval import GradePool
            self.math = self.stack.enter_context(GradePool(self.workers))
        return self.math

    def _code_pool(self) -> Any:
        if self.code is None:
            from utils_code_eval import CodePool
            self.code = self.stack.enter_context(CodePool(self.workers, allow_unsafe=self.allow_unsafe))
        return self.code


def graded_rows(item: TaskInput, samples: Samples, tokenizer: Any, graders: Graders) -> list[dict[str, Any]]:
    """One row a response, as written to eval_samples."""
    draws = item.task.num_samples
    flat = [ids for per_problem in samples.responses for ids in per_problem]
    texts = tokenizer.batch_decode(flat, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    problems = [p for p in item.problems for _ in range(draws)]
    grades = graders.grade(texts, problems, item.task.task_type)
    prompts = [prompt_text(p, item.task.prompt_template, tokenizer) for p in item.problems]
    reasons = [r for per_problem in samples.finish_reasons for r in per_problem]
    return [{"task": item.task.name, "problem_id": p["id"], "sample": i % draws, "prompt": prompts[i // draws], "response": text,
             "token_ids": ids, "finish_reason": reason, "max_new_tokens": samples.caps[i // draws], "outcome": g.outcome,
             "extracted": g.extracted, "rule": g.rule}
            for i, (p, text, ids, reason, g) in enumerate(zip(problems, texts, flat, reasons, grades))]


def by_problem(rows: list[dict[str, Any]], ids: list[str]) -> list[list[dict[str, Any]]]:
    """Rows as [problem][draw]. Raises WorkError unless every problem has the same number of draws."""
    table: dict[str, list[dict[str, Any]]] = {i: [] for i in ids}
    for row in rows:
        table.setdefault(row["problem_id"], []).append(row)
    lengths = {len(v) for v in table.values()}
    if len(table) != len(ids) or len(lengths) != 1 or lengths == {0}:
        raise WorkError("saved samples do not hold the same number of draws for each problem of the task")
    return [sorted(table[i], key=lambda row: row["sample"]) for i in ids]


def score_summary(rows: list[dict[str, Any]], ids: list[str], task: EvalTask) -> dict[str, Any]:
    """Scores and counts of one policy on one task, from its graded rows."""
    from utils_math_eval import maj_at_k, pass_at_k
    table = by_problem(rows, ids)
    correct = [[int(row["outcome"] == "correct") for row in draws] for draws in table]
    draws = len(correct[0])
    powers = [k for k in (1 << e for e in range(draws.bit_length())) if k <= draws]
    mean = _mean
    return {
        "problem_ids": ids, "correct": correct,
        "outcomes": {o: sum(row["outcome"] == o for row in rows) for o in OUTCOMES},
        "pass_at_k": {str(k): mean([pass_at_k(draws, sum(c), k) for c in correct]) for k in powers},
        # a vote needs answers that can be equal; two programs are hardly ever the same text
        "maj_at_k": None if task.task_type == "code" else {str(draws): mean(
            [maj_at_k([row["extracted"] for row in d], c) for d, c in zip(table, correct)])},
        "truncated_fraction": mean([row["finish_reason"] == "length" for row in rows]),
        "context_limited_fraction": mean([row["max_new_tokens"] < task.max_new_tokens for row in rows]),
        "mean_response_tokens": mean([len(row["token_ids"]) for row in rows]),
    }


def _mean(values: list[Any]) -> float:
    return sum(values) / len(values)


def task_stream(name: str) -> int:
    """The integer that names a task in the sampling hash."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") >> 1


@contextlib.contextmanager
def progress_bar(total: int, label: str, unit: str) -> Iterator[Any]:
    """A bar with rate and time left on standard error; a line every half minute where that is no terminal."""
    from tqdm import tqdm
    interval = 0.5 if sys.stderr.isatty() else 30.0
    with tqdm(total=total, desc=label, unit=unit, mininterval=interval, maxinterval=interval, dynamic_ncols=True) as bar:
        yield bar


# --------------------------------------------------------------------------------------------------------------------
# Stage 1: base policy, cached

def read_cache(path: Path) -> dict[str, Any]:
    """Cached base evaluations by the hash of their key; empty where there is no cache or it has another format."""
    if not path.exists():
        return {}
    content = read_json(path)
    if not isinstance(content, dict) or "tasks" in content:
        raise UserError(f"{path} is no cache of base evaluations (a result file?); give another --output_path")
    return content.get("entries", {}) if content.get("format") == RESULT_FORMAT else {}


def add_to_cache(path: Path, entry: dict[str, Any], replaces: str | None = None) -> None:
    """Add one task's base scores. Other processes may do the same at the same time: under a lock, then renamed."""
    with open(path.with_name(f".{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries = read_cache(path)
        entries.pop(replaces, None)
        entries[config_hash(entry["key"])] = entry
        write_text(path, compact_json({"format": RESULT_FORMAT, "entries": dict(sorted(entries.items()))}))


def why_missing(entries: dict[str, Any], key: dict[str, Any]) -> str:
    """In what the nearest cached evaluation of the task differs."""
    same_task = [e["key"] for e in entries.values() if e["task"] == key["task"]]
    if not same_task:
        return "none is cached"
    differing = min(([k for k in key if other.get(k) != key[k]] for other in same_task), key=len)
    return f"the cached one differs in {', '.join(differing)}"


def base_scores(plan: Plan) -> dict[str, dict[str, Any]]:
    """Cache entry of every task, or UserError that names --eval_base."""
    entries = read_cache(plan.cache)
    for name, key in plan.base_keys.items():
        if config_hash(key) not in entries:
            raise UserError(f"no valid base evaluation of task {name} in {plan.cache} ({why_missing(entries, key)}); add --eval_base")
    return {name: entries[config_hash(key)] for name, key in plan.base_keys.items()}


def evaluate_base(plan: Plan) -> None:
    """Sample and grade the base policy on every task that is not in the cache yet."""
    entries = read_cache(plan.cache)
    todo = [item for item in plan.inputs if config_hash(plan.base_keys[item.task.name]) not in entries]
    if not todo:
        return
    require_writable_dir(plan.base_samples)
    write_text(plan.base_samples / FOLDER_FILE, strict_json({"cache": relative(plan.cache, plan.base_samples)}) + "\n")
    cfg = plan.cfg
    with Graders(cfg.grading_workers, cfg.allow_unsafe_code_execution) as graders:
        for item in todo:
            graders.check_benchmark(item)
        engine = open_engine(plan, plan.base, cfg.model_revision)
        total = sum(len(item.problems) * item.task.num_samples for item in todo)
        with progress_bar(total, "base policy", "response") as bar:
            for item in todo:
                bar.set_postfix_str(item.task.name, refresh=False)
                key = plan.base_keys[item.task.name]
                rows = sample_and_grade(engine, item, plan, graders, bar.update)
                # one file per key: a quick look with --limit must not replace the samples of the full evaluation
                file = plan.base_samples / f"{item.task.name}.{config_hash(key)}.jsonl"
                write_jsonl(file, rows)
                add_to_cache(plan.cache, {"task": item.task.name, "key": key, "scores": score_summary(rows, item.ids, item.task),
                                          "eval_task": dataclasses.asdict(item.task), "samples": relative(file, plan.cache.parent)})


def sample_and_grade(engine: Any, item: TaskInput, plan: Plan, graders: Graders, progress: Callable[[int], Any]) -> list[dict]:
    task = item.task
    samples = draw(engine, item, task.num_samples, task.temperature, task.top_p, plan.cfg.eval_seed, (task_stream(task.name),),
                   len(item.problems), progress)
    return graded_rows(item, samples, plan.tokenizer, graders)


# --------------------------------------------------------------------------------------------------------------------
# Stage 2: trained policy

def kl_problem_count(item: TaskInput, cfg: EvalConfig) -> int:
    return min(len(item.problems), cfg.kl_max_problems or len(item.problems))


def read_partial(plan: Plan) -> dict[str, Any]:
    """Finished tasks of an interrupted evaluation with these very settings and weights; else empty."""
    key = {"settings_hash": plan.settings_hash, "ft_weights": plan.ft_weights}
    empty = {"key": key, "graded": {}, "kl": {}}
    if not plan.partial.exists():
        return empty
    try:
        found = read_json(plan.partial)
    except UserError:
        return empty
    return found if isinstance(found, dict) and found.get("key") == key else empty


def sample_policy(plan: Plan) -> None:
    """Graded and KL samples of the trained policy for every task that is not finished."""
    cfg, partial = plan.cfg, read_partial(plan)
    todo = [item for item in plan.inputs if item.task.name not in partial["graded"] or not samples_exist(plan, item)]
    if not todo:
        return
    write_text(plan.samples / FOLDER_FILE, strict_json({"result": relative(plan.output, plan.samples)}) + "\n")
    with Graders(cfg.grading_workers, cfg.allow_unsafe_code_execution) as graders:
        engine = open_engine(plan, plan.ft)
        total = sum(len(item.problems) * item.task.num_samples + kl_problem_count(item, cfg) * cfg.kl_num_samples for item in todo)
        with progress_bar(total, plan.run, "response") as bar:
            for item in todo:
                bar.set_postfix_str(item.task.name, refresh=False)
                rows = sample_and_grade(engine, item, plan, graders, bar.update)
                write_jsonl(plan.samples / f"{item.task.name}.jsonl", rows)
                if cfg.kl_num_samples:
                    write_jsonl(kl_samples_path(plan, item), kl_rows(engine, item, plan, bar.update))
                partial["graded"][item.task.name] = score_summary(rows, item.ids, item.task)
                write_text(plan.partial, strict_json(partial, indent=None))


def samples_exist(plan: Plan, item: TaskInput) -> bool:
    """True if the sample files of a finished task are still there: the KL stage reads them."""
    return (plan.samples / f"{item.task.name}.jsonl").exists() and (not plan.cfg.kl_num_samples or kl_samples_path(plan, item).exists())


def kl_samples_path(plan: Plan, item: TaskInput) -> Path:
    return plan.samples / "kl" / f"{item.task.name}.jsonl"


def kl_rows(engine: Any, item: TaskInput, plan: Plan, progress: Callable[[int], Any]) -> list[dict[str, Any]]:
    """Samples at temperature 1 and top-p 1, one row a response."""
    cfg = plan.cfg
    count = kl_problem_count(item, cfg)
    samples = draw(engine, item, cfg.kl_num_samples, 1.0, 1.0, cfg.eval_seed, (task_stream(item.task.name), KL_STREAM), count, progress)
    return [{"task": item.task.name, "problem_id": problem_id, "sample": j, "token_ids": ids, "finish_reason": reason}
            for problem_id, responses, reasons in zip(item.ids, samples.responses, samples.finish_reasons)
            for j, (ids, reason) in enumerate(zip(responses, reasons))]


# --------------------------------------------------------------------------------------------------------------------
# Stage 3: KL

@dataclass
class Sequences:
    """Distinct responses of one task and which of them each draw is. Equal draws are computed once."""

    prompts: list[list[int]]  # of each problem
    owners: list[int]  # problem of each distinct response
    responses: list[list[int]]
    kl: list[list[int]]  # [problem][draw] -> distinct response
    graded: list[list[int]]


def collect_sequences(plan: Plan, item: TaskInput) -> Sequences:
    """KL samples, and as many graded samples of the same problems, read back from disk."""
    cfg, count = plan.cfg, kl_problem_count(item, plan.cfg)
    ids = item.ids[:count]
    index: dict[tuple[int, tuple[int, ...]], int] = {}

    def place(rows: list[dict[str, Any]]) -> list[list[int]]:
        return [[index.setdefault((p, tuple(row["token_ids"])), len(index)) for row in draws]
                for p, draws in enumerate(by_problem(rows, ids))]

    kl = place(read_jsonl(kl_samples_path(plan, item)))
    wanted = set(ids)
    graded = place([row for row in read_jsonl(plan.samples / f"{item.task.name}.jsonl")
                    if row["problem_id"] in wanted and row["sample"] < cfg.kl_num_samples])
    return Sequences(item.prompts[:count], [p for p, _ in index], [list(r) for _, r in index], kl, graded)


@dataclass(frozen=True)
class Batch:
    """Distinct responses of one forward pass; packed where their problems are short."""

    sequences: list[int]
    packed: bool


def plan_batches(own: Sequences, max_tokens: int) -> list[Batch]:
    """Short problems with all their responses packed into rows, long responses one a row with similar lengths together.

    Each batch holds at most ``max_tokens`` tokens, pads included, or one row.
    """
    from utils_kl import packed_length
    members: dict[int, list[int]] = {}
    for i, p in enumerate(own.owners):
        members.setdefault(p, []).append(i)
    size = {p: packed_length(own.prompts[p], [own.responses[i] for i in m]) for p, m in members.items()}
    out: list[Batch] = []
    used = max_tokens
    for p in sorted((p for p in members if size[p] <= MAX_PACKED_TOKENS), key=lambda p: -size[p]):
        if used + size[p] > max_tokens:
            out.append(Batch([], True))
            used = 0
        out[-1].sequences.extend(members[p])
        used += size[p]
    length = {i: len(own.prompts[p]) + len(own.responses[i]) for p, m in members.items() if size[p] > MAX_PACKED_TOKENS for i in m}
    longest = 0
    for i in sorted(length, key=lambda i: -length[i]):
        if not longest or longest * (len(out[-1].sequences) + 1) > max_tokens:
            out.append(Batch([], False))
            longest = length[i]
        out[-1].sequences.append(i)
    return out


def build_rows(plan: Plan, own: Sequences, batch: Batch) -> Any:
    """The batch as tensors on the device; their ``sequence`` counts within the batch."""
    from utils_kl import pack_rows, packed_length, pad_rows
    pad, device = plan.tokenizer.pad_token_id or 0, plan.numerics.device
    if not batch.packed:
        return pad_rows([own.prompts[own.owners[i]] for i in batch.sequences], [own.responses[i] for i in batch.sequences], pad, device)
    groups: dict[int, list[list[int]]] = {}
    for i in batch.sequences:  # responses of one problem are neighbours, so the order of sequences is kept
        groups.setdefault(own.owners[i], []).append(own.responses[i])
    packed = [(own.prompts[p], responses) for p, responses in groups.items()]
    return pack_rows(packed, max(PACKED_ROW_TOKENS, *(packed_length(*group) for group in packed)), pad, device)


@dataclass
class SequenceSums:
    """Sums over the response tokens of each distinct sequence, float64, and the largest |log-ratio| of a token."""

    exact: np.ndarray  # nats; NaN where it could not be computed
    log_ratio: np.ndarray
    k2: np.ndarray
    k3: np.ndarray
    largest: np.ndarray

    @classmethod
    def empty(cls, count: int) -> SequenceSums:
        import numpy as np
        return cls(*(np.zeros(count) for _ in range(5)))

    def add(self, batch: list[int], row: Any, exact: Any, logprobs: Any, ref_logprobs: Any) -> None:
        """Reduce per-token values (N,) of one batch over ``row`` (N,), the place of each token's sequence in it; exact may be None."""
        import torch

        from utils_kl import expm1_minus
        log_ratio = logprobs - ref_logprobs

        def sums(values: Any) -> Any:
            return torch.zeros(len(batch), dtype=torch.float64, device=values.device).index_add_(0, row, values.double()).cpu().numpy()

        self.exact[batch] = sums(exact) if exact is not None else float("nan")
        self.log_ratio[batch], self.k2[batch] = sums(log_ratio), sums(log_ratio.square() / 2)
        self.k3[batch] = sums(expm1_minus(-log_ratio))
        largest = torch.zeros(len(batch), device=log_ratio.device).scatter_reduce_(0, row, log_ratio.abs(), "amax")
        self.largest[batch] = largest.cpu().numpy()


def load_float32(plan: Plan, path: str, revision: str | None = None) -> Any:
    """The policy as evaluated (weights rounded to eval_dtype), with float32 forwards."""
    from utils_precision import load_model
    return load_model(path, plan.cfg.eval_dtype, plan.numerics.device, plan.numerics, revision).float()


def available_bytes(device: str) -> int:
    """Memory that a further model could take."""
    if device == "cuda":
        import torch
        return torch.cuda.mem_get_info()[0]
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    return 0


def forward_tokens(plan: Plan) -> int:
    return plan.cfg.logprob_tokens or FORWARD_TOKENS[plan.numerics.device]


def measure_kl(plan: Plan) -> None:
    """KL of every task that is not finished, into the partial file."""
    partial = read_partial(plan)
    todo = [item for item in plan.inputs if item.task.name not in partial["kl"]]
    if not todo or not plan.cfg.kl_num_samples:
        return
    import torch
    sequences = {item.task.name: collect_sequences(plan, item) for item in todo}

    def finish(item: TaskInput, sums: SequenceSums, reason: str | None) -> None:
        partial["kl"][item.task.name] = kl_summary(sequences[item.task.name], sums, item.ids[:kl_problem_count(item, plan.cfg)], reason)
        write_text(plan.partial, strict_json(partial, indent=None))

    with torch.no_grad(), progress_bar(sum(len(s.responses) for s in sequences.values()), "KL", "response") as bar:
        policy = load_float32(plan, plan.ft)
        size = sum(p.numel() * p.element_size() for p in policy.parameters())
        fits = size + KL_HEADROOM_BYTES[plan.numerics.device] <= available_bytes(plan.numerics.device)
        if plan.cfg.kl_models == "together" or (plan.cfg.kl_models == "auto" and fits):
            kl_together(plan, todo, sequences, policy, finish, bar)
        else:
            kl_one_by_one(plan, todo, sequences, policy, finish, bar)


def kl_together(plan: Plan, todo: list[TaskInput], sequences: dict[str, Sequences], policy: Any, finish: Callable, bar: Any) -> None:
    """Both models in memory: one pass over the sequences."""
    from utils_kl import compare_tokens, output_head, response_hidden
    base = load_float32(plan, plan.base, plan.cfg.model_revision)
    check_vocabularies(policy, base)
    for item in todo:
        bar.set_postfix_str(item.task.name, refresh=False)
        own = sequences[item.task.name]
        sums = SequenceSums.empty(len(own.responses))
        for batch in plan_batches(own, forward_tokens(plan)):
            rows = build_rows(plan, own, batch)
            exact, logprobs, ref = compare_tokens(output_head(policy), output_head(base), response_hidden(policy, rows),
                                                  response_hidden(base, rows), rows.targets)
            sums.add(batch.sequences, rows.sequence, exact, logprobs, ref)
            bar.update(len(batch.sequences))
        finish(item, sums, None)


def kl_one_by_one(plan: Plan, todo: list[TaskInput], sequences: dict[str, Sequences], policy: Any, finish: Callable, bar: Any) -> None:
    """One model at a time: the policy's final hidden states wait on disk for the base, where the disk has room for them."""
    import gc
    import shutil

    import numpy as np
    import torch

    from utils_kl import compare_tokens, head_logprobs, output_head, response_hidden
    device, width = plan.numerics.device, policy.config.hidden_size
    tokens = {name: sum(len(r) for r in s.responses) for name, s in sequences.items()}
    need, free = 4 * width * sum(tokens.values()), shutil.disk_usage(plan.samples).free
    reason = None
    if need > 0.9 * free:
        reason = (f"both models do not fit into memory together, and hidden states of {need / 1e9:.1f} GB do not fit on the disk "
                  f"({free / 1e9:.1f} GB free); lower --kl_max_problems or --kl_num_samples")
        print(f"kl_exact_per_token will be null: {reason}", file=sys.stderr)
    else:
        print(f"KL: one model at a time; {need / 1e9:.3f} GB of hidden states are written to {plan.samples} and removed at the end",
              file=sys.stderr)
    bar.total *= 2
    own_logprobs: dict[str, list[Any]] = {}
    head = output_head(policy)
    spill = plan.samples / ".kl_hidden.tmp"
    try:
        with open(spill, "wb") as file:
            for item in todo:
                bar.set_postfix_str(f"{item.task.name}, policy", refresh=False)
                own = sequences[item.task.name]
                own_logprobs[item.task.name] = []
                for batch in plan_batches(own, forward_tokens(plan)):
                    rows = build_rows(plan, own, batch)
                    hidden = response_hidden(policy, rows)
                    own_logprobs[item.task.name].append(head_logprobs(head, hidden, rows.targets)[0].cpu())
                    if reason is None:
                        hidden.cpu().numpy().tofile(file)
                    bar.update(len(batch.sequences))
        del policy, hidden
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        base = load_float32(plan, plan.base, plan.cfg.model_revision)
        with open(spill, "rb") as file:
            for item in todo:
                bar.set_postfix_str(f"{item.task.name}, base", refresh=False)
                own = sequences[item.task.name]
                sums = SequenceSums.empty(len(own.responses))
                for batch, logprobs in zip(plan_batches(own, forward_tokens(plan)), own_logprobs[item.task.name]):
                    rows = build_rows(plan, own, batch)
                    ref_hidden = response_hidden(base, rows)
                    logprobs = logprobs.to(device)
                    if reason is None:
                        values = np.fromfile(file, dtype=np.float32, count=len(rows.targets) * width)
                        hidden = torch.from_numpy(values.reshape(-1, width)).to(device)
                        exact, _, ref = compare_tokens(head, output_head(base), hidden, ref_hidden, rows.targets)
                    else:
                        exact, ref = None, head_logprobs(output_head(base), ref_hidden, rows.targets)[0]
                    sums.add(batch.sequences, rows.sequence, exact, logprobs, ref)
                    bar.update(len(batch.sequences))
                finish(item, sums, reason)
    finally:
        spill.unlink(missing_ok=True)


def check_vocabularies(policy: Any, base: Any) -> None:
    sizes = [m.get_output_embeddings().weight.shape[0] for m in (policy, base)]
    if sizes[0] != sizes[1]:
        raise UserError(f"the trained policy's vocabulary has {sizes[0]} entries, the base's {sizes[1]}: not the same model family")


def kl_summary(sequences: Sequences, sums: SequenceSums, ids: list[str], reason: str | None) -> dict[str, Any]:
    """KL_k of one task with its errors, from sums per sequence.

    Returns: avg_kl (nats a sequence, plain mean of log-ratios), kl_per_token and its k2, k3 and exact forms (nats a token, every token
             weighs the same), kl_exact (nats a sequence), each with its standard error over problems; values per draw.
    """
    import numpy as np

    from utils_kl import estimate_mean, estimate_ratio
    index, graded = np.array(sequences.kl), np.array(sequences.graded)                   # (P, K)
    tokens = np.array([len(r) for r in sequences.responses], dtype=np.float64)
    lengths = tokens[index]
    sequence = estimate_mean(sums.log_ratio[index])
    out: dict[str, Any] = {
        "avg_kl": sequence.mean, "avg_kl_se": sequence.se, "avg_kl_sampling_se": sequence.sampling_se,
        "kl_num_problems": len(ids), "kl_num_samples": index.shape[1], "kl_mean_tokens": float(lengths.mean()),
        "logratio_on_graded_samples": estimate_mean(sums.log_ratio[graded]).mean,
        "kl_max_abs_token_logratio": float(sums.largest[index].max()),
    }
    for name, values in (("kl_per_token", sums.log_ratio), ("kl_k2_per_token", sums.k2), ("kl_k3_per_token", sums.k3)):
        estimate = estimate_ratio(values[index], lengths)
        out |= {name: estimate.mean, f"{name}_se": estimate.se}
    scores: dict[str, Any] = {"problem_ids": ids, "kl_exact_per_token": None, "logratio": digits(sums.log_ratio[index]),
                              "num_tokens": lengths.astype(int).tolist()}
    if reason is None:
        per_token, per_sequence = estimate_ratio(sums.exact[index], lengths), estimate_mean(sums.exact[index])
        out |= {"kl_exact_per_token": per_token.mean, "kl_exact_per_token_se": per_token.se,
                "kl_exact_per_token_sampling_se": per_token.sampling_se, "kl_exact": per_sequence.mean, "kl_exact_se": per_sequence.se}
        scores["kl_exact_per_token"] = digits(sums.exact[index] / lengths)
    else:
        out |= {"kl_exact_per_token": None, "kl_exact_per_token_se": None, "kl_exact_per_token_sampling_se": None, "kl_exact": None,
                "kl_exact_se": None, "kl_exact_reason": reason}
    return {**out, "kl_scores": scores}


def digits(values: np.ndarray) -> list[list[float]]:
    return [[float(f"{v:.{SIGNIFICANT_DIGITS}g}") for v in row] for row in values.tolist()]


# --------------------------------------------------------------------------------------------------------------------
# Result

def score_fields(base: dict[str, Any], ft: dict[str, Any]) -> dict[str, Any]:
    """Scores of both policies, their paired difference, errors and counts, from two score summaries of one task."""
    import numpy as np

    from utils_kl import estimate_mean
    before, after = np.array(base["correct"]), np.array(ft["correct"])                   # (P, K)
    base_score, ft_score = estimate_mean(before), estimate_mean(after)
    delta = estimate_mean((after.mean(axis=1) - before.mean(axis=1))[:, None])           # paired by problem
    return {
        "base_avg_score": base_score.mean, "ft_avg_score": ft_score.mean, "delta_j": delta.mean, "delta_j_se": delta.se,
        "base_score_se": base_score.se, "ft_score_se": ft_score.se,
        "base_sampling_se": base_score.sampling_se, "ft_sampling_se": ft_score.sampling_se,
        "outcomes": ft["outcomes"], "base_outcomes": base["outcomes"],
        **{key: ft[key] for key in SIDE_FIELDS}, **{f"base_{key}": base[key] for key in SIDE_FIELDS},
        "scores": {"problem_ids": ft["problem_ids"], "base": base["correct"], "ft": ft["correct"]},
    }


def task_result(item: TaskInput, base_samples: str, base: dict[str, Any], ft: dict[str, Any], kl: dict[str, Any] | None) -> dict[str, Any]:
    """One entry of ``tasks``."""
    task = item.task
    off = {key: None for key in ("avg_kl", "avg_kl_se", "kl_per_token", "kl_k3_per_token", "kl_exact_per_token",
                                 "logratio_on_graded_samples")} | {"kl_reason": "switched off (--kl_num_samples 0)"}
    return {
        "task_type": task.task_type, "on_task": task.on_task, "num_problems": len(item.problems), "num_samples": task.num_samples,
        "data_path": task.path, "data_sha256": item.data_sha256, "synthetic": item.synthetic, "base_samples": base_samples,
        "sampling": {"temperature": task.temperature, "top_p": task.top_p, "max_new_tokens": task.max_new_tokens,
                     "prompt_template": item.template},
        "eval_task": dataclasses.asdict(task), "grader": grader_version(task.task_type), **score_fields(base, ft), **(kl or off),
    }


SIDE_FIELDS = ("pass_at_k", "maj_at_k", "truncated_fraction", "context_limited_fraction", "mean_response_tokens")


def overall_synthetic(evaluated: list[bool | None], trained: bool | None) -> bool | None:
    """True if any data set is synthetic, False if all evaluated ones are known to be real, None where nobody says."""
    return True if trained or any(evaluated) else None if None in evaluated else False


def write_result(plan: Plan) -> dict[str, Any]:
    """Assemble and write {run}.json, then drop the partial file."""
    partial, base, identity = read_partial(plan), base_scores(plan), plan.identity
    tasks = {}
    for item in plan.inputs:
        name = item.task.name
        file = relative(plan.cache.parent / base[name]["samples"], plan.output.parent)
        tasks[name] = task_result(item, file, base[name]["scores"], partial["graded"][name], partial["kl"].get(name))
    cfg = plan.cfg
    result = {
        "format": RESULT_FORMAT, "study": identity["study"] or cfg.study,
        **{k: identity[k] for k in ("arm", "precision_mode", "overrides", "seed", "noise_replicate")},
        "identity_source": identity["source"], "train_config_hash": identity["train_config_hash"],
        "base_ckpt": plan.base, "base_weights": plan.settings["base_weights"], "ft_ckpt": cfg.ft_ckpt, "ft_weights": plan.ft_weights,
        "synthetic_data": overall_synthetic([i.synthetic for i in plan.inputs], identity["train_synthetic"]),
        "eval_dtype": cfg.eval_dtype, "eval_tasks_config": cfg.eval_tasks_config,
        "sampling": {"eval_seed": cfg.eval_seed, "limit": cfg.limit, **plan.settings["engine"],
                     "kl": {"num_samples": cfg.kl_num_samples, "max_problems": cfg.kl_max_problems, "temperature": 1.0, "top_p": 1.0,
                            "weights_dtype": cfg.eval_dtype, "forward_dtype": "float32"}},
        "versions": {**package_versions(), **git_state()}, "settings_hash": plan.settings_hash, "samples_dir": relative(plan.samples, plan.output.parent),
        "tasks": tasks,
    }
    write_text(plan.output, compact_json(result))
    plan.partial.unlink(missing_ok=True)
    return result


def compact_json(value: Any) -> str:
    """Strict JSON, indented, with each innermost list on one line (scores per draw would fill a line a number)."""
    text = strict_json(value)
    # only structure has raw newlines: inside a JSON string a newline is escaped
    return re.sub(r"\[\n\s*([^\[\]{}]*?)\n\s*\]", lambda m: "[" + re.sub(r"\n\s*", " ", m.group(1)) + "]", text) + "\n"


def number(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)


def print_table(result: dict[str, Any]) -> None:
    print(f"{'task':<14}{'n x k':>10}{'base':>8}{'tuned':>8}{'delta':>9}{'se':>8}{'KL/token':>11}{'unparsed':>10}{'truncated':>10}")
    for name, t in result["tasks"].items():
        unparsed = t["outcomes"]["unparsed"] / sum(t["outcomes"].values())
        print(f"{name:<14}{t['num_problems']:>6} x{t['num_samples']:>2}{t['base_avg_score']:>8.4f}{t['ft_avg_score']:>8.4f}"
              f"{t['delta_j']:>+9.4f}{number(t['delta_j_se']):>8}{number(t['kl_exact_per_token'], '.3e'):>11}{unparsed:>10.3f}"
              f"{t['truncated_fraction']:>10.3f}")


def print_base_table(entries: dict[str, dict[str, Any]]) -> None:
    print(f"{'task':<14}{'n x k':>10}{'base':>8}{'unparsed':>10}{'truncated':>10}")
    for name, entry in entries.items():
        s = entry["scores"]
        flat = [c for draws in s["correct"] for c in draws]
        print(f"{name:<14}{len(s['correct']):>6} x{len(s['correct'][0]):>2}{_mean(flat):>8.4f}{s['outcomes']['unparsed'] / len(flat):>10.3f}"
              f"{s['truncated_fraction']:>10.3f}")


# --------------------------------------------------------------------------------------------------------------------
# Grading saved samples again

def regrade(cfg: EvalConfig) -> int:
    """Grade the samples in a folder again, and rewrite them, their result file and the base cache with the new outcomes."""
    folder = Path(cfg.regrade)
    if not folder.is_dir():
        raise UserError(f"--regrade {folder}: no such folder")
    if not (folder / FOLDER_FILE).exists():
        raise UserError(f"--regrade {folder}: has no {FOLDER_FILE}, so it is no folder of eval_samples")
    info = read_json(folder / FOLDER_FILE)
    with Graders(cfg.grading_workers, cfg.allow_unsafe_code_execution) as graders:
        if "cache" in info:
            cache = folder / info["cache"]
            for entry in read_cache(cache).values():
                regrade_base(cache, entry, graders)
            return 0
        output = folder / info["result"]
        result = read_json(output)
        cache = output.parent / "base.json"
        by_file = {os.path.abspath(cache.parent / e["samples"]): e for e in read_cache(cache).values()}
        tasks, graded = {}, {}
        for name, old in result["tasks"].items():
            entry = by_file.get(os.path.abspath(output.parent / old["base_samples"]))
            if entry is None:
                raise UserError(f"{cache} no longer holds the base evaluation of task {name} that {output} was compared with; "
                                "evaluate again with --eval_base")
            task = EvalTask(**old["eval_task"])
            path = folder / f"{name}.jsonl"
            graded[path] = regrade_rows(path, task, old["data_sha256"], graders)
            scores = score_summary(graded[path], old["scores"]["problem_ids"], task)
            base = regrade_base(cache, entry, graders)
            tasks[name] = {**old, "grader": grader_version(task.task_type), **score_fields(base, scores)}
    for path, rows in graded.items():
        write_jsonl(path, rows)
    write_text(output, compact_json({**result, "tasks": tasks}))
    print_table({"tasks": tasks})
    return 0


def regrade_base(cache: Path, entry: dict[str, Any], graders: Graders) -> dict[str, Any]:
    """Score summary of a cached base evaluation under the present grader; samples and cache are rewritten where it changed."""
    task, key = EvalTask(**entry["eval_task"]), entry["key"]
    if key["grader"] == grader_version(task.task_type):
        return entry["scores"]
    path = cache.parent / entry["samples"]
    rows = regrade_rows(path, task, key["data_sha256"], graders)
    scores = score_summary(rows, entry["scores"]["problem_ids"], task)
    write_jsonl(path, rows)
    add_to_cache(cache, {**entry, "key": {**key, "grader": grader_version(task.task_type)}, "scores": scores}, replaces=config_hash(key))
    return scores


def regrade_rows(path: Path, task: EvalTask, data_sha256: str, graders: Graders) -> list[dict[str, Any]]:
    """Saved rows with new outcomes; says how many changed. Raises UserError if the problem file is another one by now."""
    rows = read_jsonl(path)
    if sha256_file(task.path) != data_sha256:
        raise UserError(f"{task.path} is not the file that {path} was sampled from (its SHA-256 differs)")
    problems = {p["id"]: p for p in load_task_problems(task)}
    grades = graders.grade([r["response"] for r in rows], [problems[r["problem_id"]] for r in rows], task.task_type)
    changes: dict[str, int] = {}
    for row, grade in zip(rows, grades):
        if row["outcome"] != grade.outcome:
            change = f"{row['outcome']} -> {grade.outcome}"
            changes[change] = changes.get(change, 0) + 1
    print(f"{path}: {sum(changes.values())} of {len(rows)} outcomes changed" + "".join(f"; {n} {c}" for c, n in sorted(changes.items())))
    return [{**row, "outcome": g.outcome, "extracted": g.extracted, "rule": g.rule} for row, g in zip(rows, grades)]


# --------------------------------------------------------------------------------------------------------------------
# Noise floor

def noise_floor(cfg: EvalConfig) -> int:
    """The same weights with N sampling seeds and two batch sizes: how far a score moves when nothing about the policy does."""
    plan = make_plan(dataclasses.replace(cfg, eval_base=True, output_path=None if not cfg.ft_ckpt else cfg.output_path))
    output = Path(cfg.output_path) if cfg.output_path else Path(cfg.results_root) / "noise_floor" / f"{plan.run}.json"
    require_writable_dir(output.parent)
    seeds = [cfg.eval_seed + i for i in range(cfg.noise_floor)]
    tasks = {}
    with Graders(cfg.grading_workers, cfg.allow_unsafe_code_execution) as graders:
        for item in plan.inputs:
            graders.check_benchmark(item)
        engine = open_engine(plan, plan.ft or plan.base, None if plan.ft else cfg.model_revision)
        # vLLM forms its batches by itself; there only the seeds are varied
        sizes = [cfg.batch_size, max(1, cfg.batch_size // 2)] if cfg.rollout_engine == "hf" else [cfg.batch_size]
        total = len(seeds) * len(sizes) * sum(len(i.problems) * i.task.num_samples for i in plan.inputs)
        with progress_bar(total, "noise floor", "response") as bar:
            for item in plan.inputs:
                bar.set_postfix_str(item.task.name, refresh=False)
                runs = {}
                for size in sizes:
                    engine.batch_size = size
                    for seed in seeds:
                        seeded = dataclasses.replace(plan, cfg=dataclasses.replace(cfg, eval_seed=seed))
                        runs[size, seed] = sample_and_grade(engine, item, seeded, graders, bar.update)
                tasks[item.task.name] = spread(item, runs, sizes, seeds)
    result = {"format": RESULT_FORMAT, "study": cfg.study, "run": plan.run, "ckpt": plan.ft or plan.base, "seeds": seeds,
              "batch_sizes": sizes, "settings": plan.settings, "versions": package_versions(), "tasks": tasks}
    write_text(output, compact_json(result))
    print(f"{'task':<14}{'mean':>8}{'sd over seeds':>15}{'expected':>10}{'other batch size: score':>25}{'responses':>11}")
    for name, t in tasks.items():
        print(f"{name:<14}{t['mean']:>8.4f}{t['sd_over_seeds']:>15.4f}{t['expected_sd']:>10.4f}"
              f"{number(t['max_abs_difference_between_batch_sizes']):>25}{number(t['share_of_responses_that_differ']):>11}")
    print(f"noise floor: {output}")
    return 0


def spread(item: TaskInput, runs: dict[tuple[int, int], list[dict[str, Any]]], sizes: list[int], seeds: list[int]) -> dict[str, Any]:
    """Scores [batch size][seed] of one task and how far they differ.

    expected_sd: what the draws of a run alone say its score should vary by (mean over runs of the sampling standard error).
    """
    import statistics

    from utils_kl import estimate_mean
    estimates = {key: estimate_mean(score_summary(rows, item.ids, item.task)["correct"]) for key, rows in runs.items()}
    scores = [[estimates[size, seed].mean for seed in seeds] for size in sizes]
    differ = [a["token_ids"] != b["token_ids"] for size in sizes[1:] for seed in seeds
              for a, b in zip(runs[sizes[0], seed], runs[size, seed])]
    return {"num_problems": len(item.problems), "num_samples": item.task.num_samples, "scores": scores,
            "mean": statistics.fmean(scores[0]), "sd_over_seeds": statistics.stdev(scores[0]),
            "range_over_seeds": max(scores[0]) - min(scores[0]),
            "expected_sd": statistics.fmean(e.sampling_se for e in estimates.values()),
            "max_abs_difference_between_batch_sizes":
                max((abs(a - b) for other in scores[1:] for a, b in zip(scores[0], other)), default=None),
            "share_of_responses_that_differ": _mean(differ) if differ else None}


# --------------------------------------------------------------------------------------------------------------------

def run_stage(stage: Callable[[Plan], None], plan: Plan, isolated: bool) -> None:
    """Run a stage here, or in a process of its own whose end returns all of the GPU memory (vLLM keeps its own until then)."""
    if not isolated:
        stage(plan)
        return
    import multiprocessing
    process = multiprocessing.get_context("spawn").Process(target=_stage_process, args=(stage.__name__, plan.cfg))
    process.start()
    process.join()
    if process.exitcode in (EXIT_FAILED, EXIT_BAD_REQUEST):
        sys.exit(process.exitcode)  # it has said why
    if process.exitcode:
        raise WorkError(f"the process of stage {stage.__name__} ended with exit code {process.exitcode}")


def _stage_process(name: str, cfg: EvalConfig) -> None:
    try:
        globals()[name](make_plan(cfg))
    except (UserError, WorkError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_BAD_REQUEST if isinstance(error, UserError) else EXIT_FAILED)


def main(cfg: EvalConfig) -> int:
    if cfg.regrade:
        return regrade(cfg)
    if cfg.noise_floor:
        return noise_floor(cfg)
    plan = make_plan(cfg)
    if not cfg.eval_base:
        base_scores(plan)  # before anything is sampled
    for folder in (plan.cache.parent, plan.samples):
        require_writable_dir(folder)
    isolated = cfg.rollout_engine == "vllm"
    if cfg.eval_base:
        run_stage(evaluate_base, plan, isolated)
    entries = base_scores(plan)
    if plan.output is None:
        print_base_table(entries)
        print(f"base policy: {plan.cache}")
        return 0
    run_stage(sample_policy, plan, isolated)
    measure_kl(plan)
    print_table(write_result(plan))
    print(f"{plan.run}: {plan.output}")
    return 0


if __name__ == "__main__":
    run_script(main, EvalConfig, description=__doc__)
