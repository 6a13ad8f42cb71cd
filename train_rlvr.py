"""Train one policy with DAPO in one precision arm.

In:  a base model (folder or hub id), a problem file. Out, under ``--output_dir`` (default RESULTS_ROOT/train_logs/RUN):
config.json, env.json (versions, machine, precision audit), metrics.jsonl (one line a step), training_curves.png,
lost_updates.png, checkpoints/step_*/ and final_model/ (masters, in Hugging Face format, with rlvr_run.json).

CPU, about a minute:   python train_rlvr.py --config configs/tiny.yaml --precision_mode bf16 --seed 1
The study, on GPUs:    python train_rlvr.py --config configs/qwen2.5_math_7b.yaml --precision_mode bf16 --seed 1
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config import (PrecisionArm, TrainConfig, UserError, WorkError, arm_name, config_dict, config_hash, resolve_arm,
                    run_name)
from utils_run import (Interrupted, append_jsonl, environment_info, read_json, read_jsonl, require_memory, require_writable_dir,
                       run_script, sha256_file, write_json, write_jsonl)

# May differ between a run and its resumption; num_steps may only grow. Where things lie does not change what is computed.
RESUME_MAY_DIFFER = ("config", "results_root", "output_dir", "num_steps", "save_every", "keep_checkpoints", "report_to")
KL_STREAM, EVAL_STREAM, ROLLOUT_STREAM = 101, 102, 100  # first element of the sampling stream: which use of random numbers
EVAL_SAMPLES = 4  # draws a problem for eval_every


# --------------------------------------------------------------------------------------------------------------------
# One rollout batch

@dataclass
class Batch:
    """Rows kept by dynamic sampling, in prompt order, group by group: everything the optimizer steps need."""

    prompts: list[list[int]]
    responses: list[list[int]]
    rollout_logprobs: list[list[float]]
    advantages: Any   # (rows,) float32
    in_loss: list[bool]  # False where overlong filtering masks a truncated response
    group_size: int

    def minibatches(self, prompts_per_minibatch: int) -> list[list[int]]:
        """Row indices of each optimizer step: whole groups, in order."""
        rows = prompts_per_minibatch * self.group_size
        return [list(range(i, min(i + rows, len(self.prompts)))) for i in range(0, len(self.prompts), rows)]


def micro_batches(rows: list[int], lengths: list[int], micro_batch_size: int, max_tokens: int) -> list[list[int]]:
    """Split one optimizer step's rows, in order, into forward passes.

    Args: lengths: prompt + response tokens of every row of the batch. max_tokens: rows x longest length stays within it (0: off);
          one row alone may exceed it.
    """
    parts: list[list[int]] = []
    for row in rows:
        part = parts[-1] if parts else None
        if part is not None and len(part) < micro_batch_size:
            longest = max(lengths[i] for i in part + [row])
            if not max_tokens or longest * (len(part) + 1) <= max_tokens:
                part.append(row)
                continue
        parts.append([row])
    return parts


def step_prompts(num_problems: int, count: int, seed: int, step: int, gen_batch: int) -> list[int]:
    """Problem indices of generation batch ``gen_batch`` of ``step``: a function of (seed, step, gen_batch) alone.

    The batches of one step are consecutive slices of one permutation, so that no problem occurs twice in a step (unless the
    step asks for more than there are).
    """
    import numpy as np
    wanted = range(gen_batch * count, (gen_batch + 1) * count)
    orders: dict[int, Any] = {}
    for epoch in {i // num_problems for i in wanted}:
        orders[epoch] = np.random.default_rng([seed, step, epoch]).permutation(num_problems)
    return [int(orders[i // num_problems][i % num_problems]) for i in wanted]


# --------------------------------------------------------------------------------------------------------------------
# Trainer

class Trainer:
    """Holds model, optimizer, engine and data of one run; ``step`` is one DAPO step."""

    def __init__(self, cfg: TrainConfig, arm: PrecisionArm, model, tokenizer, problems: list[dict], numerics) -> None:
        from utils_data import format_prompt
        from utils_math_eval import GradePool
        from utils_precision import LossScaler, MasterAdamW
        from utils_rollout import problem_key
        self.cfg, self.arm, self.model, self.tokenizer, self.numerics = cfg, arm, model, tokenizer, numerics
        self.device = numerics.device
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        prompts = [format_prompt(p, cfg.prompt_template, tokenizer) for p in problems]
        kept = [i for i, ids in enumerate(prompts) if len(ids) <= cfg.max_prompt_length]
        self.dropped_prompts = len(prompts) - len(kept)
        if not kept:
            raise UserError(f"{cfg.train_dataset_path}: every prompt is longer than max_prompt_length {cfg.max_prompt_length}")
        self.problems, self.prompts = [problems[i] for i in kept], [prompts[i] for i in kept]
        self.keys = [problem_key(p["id"]) for p in self.problems]
        self.optimizer = MasterAdamW(model, arm, cfg.learning_rate, (cfg.adam_beta1, cfg.adam_beta2), cfg.adam_eps,
                                     cfg.weight_decay, seed=cfg.seed)
        self.scaler = LossScaler(arm.compute_dtype)
        self.engine = make_engine(cfg, arm, model, tokenizer, numerics, self.optimizer.masters)
        self.graders = GradePool(workers=1, timeout_s=5.0)
        self.counters = {"nonfinite_steps": 0, "empty_steps": 0, "loss_scale_retries": 0}
        self.audits: dict[str, Any] = {}
        self.last_grad_dtypes: dict[str, Any] = {}
        self.last_stats = None

    # --- rollout ----------------------------------------------------------------------------------------------------

    def grade(self, responses: list[list[int]], problem_index: list[int]) -> list[bool]:
        """Strict grading of the training reward: only a boxed final answer counts."""
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        items = [(text, self.problems[i]["answer"], self.problems[i]["task_type"]) for text, i in zip(texts, problem_index)]
        return [grade.outcome == "correct" for grade in self.graders.grade(items, strict=True)]

    def collect(self, step: int, metrics: dict[str, Any]) -> Batch | None:
        """Generate, grade and filter until prompts_per_step groups carry a signal or max_gen_batches were drawn."""
        import torch

        from utils_dapo import group_advantages, mixed_groups, overlong_penalty
        from utils_rollout import SamplingParams
        cfg, size = self.cfg, self.cfg.group_size
        sampling = SamplingParams(cfg.temperature, cfg.top_p, cfg.max_response_length, cfg.seed)
        rows: list[tuple] = []
        all_correct, all_lengths, truncated = [], [], 0
        token_hash = hashlib.sha256()  # tells at which step two runs first sampled another token
        seconds = {"rollout": 0.0, "grade": 0.0}
        for gen_batch in range(cfg.max_gen_batches):
            index = step_prompts(len(self.problems), cfg.gen_prompts or cfg.prompts_per_step, cfg.seed, step, gen_batch)
            start = time.perf_counter()
            out = self.engine.generate([self.prompts[i] for i in index], size, sampling, (ROLLOUT_STREAM, step, gen_batch),
                                       [self.keys[i] for i in index])
            seconds["rollout"] += time.perf_counter() - start
            token_hash.update(repr(out.responses).encode())
            start = time.perf_counter()
            correct = torch.tensor(self.grade(out.responses, [i for i in index for _ in range(size)])).view(-1, size)   # (N, G)
            seconds["grade"] += time.perf_counter() - start
            lengths = torch.tensor([len(r) for r in out.responses]).view(-1, size)
            all_correct.append(correct)
            all_lengths.append(lengths)
            truncated += sum(reason == "length" for reason in out.finish_reasons)
            for g in mixed_groups(correct).nonzero()[:, 0].tolist():
                rows.append((slice(g * size, (g + 1) * size), out, correct[g], lengths[g]))
            if len(rows) >= cfg.prompts_per_step:
                break
        drawn = gen_batch + 1
        correct, lengths = torch.cat(all_correct), torch.cat(all_lengths)
        wrong = {"pm1": -1.0, "01": 0.0}[cfg.reward_values]
        rewards = torch.where(correct, 1.0, wrong) + overlong_penalty(lengths, cfg.max_response_length, cfg.overlong_buffer_len)
        metrics.update({
            "train/reward_mean": float(rewards.mean()), "train/accuracy": float(correct.double().mean()),
            "train/groups_all_right_share": float(correct.all(1).double().mean()),
            "train/groups_all_wrong_share": float((~correct.any(1)).double().mean()),
            "train/gen_batches": drawn, "train/groups_kept": min(len(rows), cfg.prompts_per_step), "train/groups_drawn": len(correct),
            "train/response_length_mean": float(lengths.double().mean()), "train/response_length_max": int(lengths.max()),
            "train/rollout_hash": token_hash.hexdigest()[:16], "train/truncated_share": truncated / lengths.numel(), "train/rollout_tokens": int(lengths.sum()),
            "seconds/rollout": seconds["rollout"], "seconds/grade": seconds["grade"],
        })
        if len(rows) < cfg.prompts_per_step and cfg.on_exhausted == "stop":
            raise WorkError(f"step {step}: {len(rows)} of {cfg.prompts_per_step} prompts had a learning signal after "
                            f"{drawn} generation batches (on_exhausted stop)")
        rows = rows[:cfg.prompts_per_step]
        if not rows:
            return None
        correct = torch.stack([row[2] for row in rows])
        lengths = torch.stack([row[3] for row in rows])
        rewards = torch.where(correct, 1.0, wrong) + overlong_penalty(lengths, cfg.max_response_length, cfg.overlong_buffer_len)
        advantages = group_advantages(rewards, cfg.advantage_ddof, cfg.advantage_eps)
        gather = lambda name: [value for part, out, _, _ in rows for value in getattr(out, name)[part]]  # noqa: E731
        in_loss = [not (cfg.overlong_filtering and reason == "length") for reason in gather("finish_reasons")]
        return Batch(gather("prompts"), gather("responses"), gather("logprobs"), advantages.flatten(), in_loss, size)

    # --- update -----------------------------------------------------------------------------------------------------

    def padded(self, batch: Batch, micro: list[int]):
        from utils_kl import pad_rows
        return pad_rows([batch.prompts[i] for i in micro], [batch.responses[i] for i in micro], self.pad_id, self.device)

    def update(self, batch: Batch, step: int, metrics: dict[str, Any]) -> None:
        """Old log-probabilities, then one optimizer step per minibatch."""
        import torch

        from utils_dapo import LossStats, dapo_loss_sum, mismatch_metrics
        from utils_kl import token_logprobs
        from utils_precision import clip_grad_norm
        cfg = self.cfg
        lengths = [len(p) + len(r) for p, r in zip(batch.prompts, batch.responses)]
        plan = []
        for k, rows in enumerate(batch.minibatches(cfg.prompts_per_minibatch)):
            if cfg.noise_replicate:  # the same sum in another order: mathematically equal, different in the last bits
                import numpy as np
                order = np.random.default_rng([cfg.noise_replicate, cfg.seed, step, k]).permutation(len(rows))
                rows = [rows[i] for i in order]
            plan.append([(micro, self.padded(batch, micro)) for micro in
                         micro_batches(rows, lengths, cfg.micro_batch_size, cfg.max_tokens_per_micro_batch)])

        # Old log-probabilities come from the trainer, under the partition of the update, so that the first ratio is exactly 1.
        start = time.perf_counter()
        old, entropy_sum, pairs = {}, 0.0, []
        self.model.train()
        with torch.no_grad():
            for k, micros in enumerate(plan):
                for j, (micro, padded) in enumerate(micros):
                    old[k, j], entropy = token_logprobs(self.model, padded, cfg.temperature, with_entropy=True)
                    entropy_sum += float(entropy.sum())
                    sampled = [x for i in micro for x in batch.rollout_logprobs[i]]
                    pairs.append((old[k, j][padded.response_mask].cpu(), torch.tensor(sampled)))
        trainer_logprobs, sampler_logprobs = (torch.cat(side) for side in zip(*pairs))
        if cfg.top_p == 1.0:
            metrics.update(mismatch_metrics(trainer_logprobs, sampler_logprobs, cfg.clip_ratio_low, cfg.clip_ratio_high))
        metrics["train/entropy_nats_per_token"] = entropy_sum / len(trainer_logprobs)
        metrics["seconds/logprob"] = time.perf_counter() - start

        start = time.perf_counter()
        first, later, norms, learning_rates, losses = LossStats(), LossStats(), [], [], []
        done_updates = 0
        for k, micros in enumerate(plan):
            masks = [padded.response_mask & torch.tensor([batch.in_loss[i] for i in micro], device=self.device)[:, None]
                     for micro, padded in micros]
            num_tokens = sum(int(mask.sum()) for mask in masks)  # of this optimizer step: independent of micro_batch_size
            if num_tokens == 0:
                self.counters["empty_steps"] += 1
                continue
            while True:  # once, or again at half the loss scale after a float16 overflow
                self.optimizer.zero_grad()
                stats, loss_value = LossStats(), 0.0
                for j, (micro, padded) in enumerate(micros):
                    logprobs, _ = token_logprobs(self.model, padded, cfg.temperature)                   # (B, R) float32
                    weights = self.importance_weights(batch, micro, padded, old[k, j])
                    loss_sum, counts = dapo_loss_sum(logprobs, old[k, j], batch.advantages[micro].to(self.device), masks[j],
                                                     cfg.clip_ratio_low, cfg.clip_ratio_high, cfg.dual_clip, weights)
                    self.scaler.scale(loss_sum / num_tokens).backward()
                    stats, loss_value = stats + counts, loss_value + float(loss_sum.detach()) / num_tokens
                grad_norm = clip_grad_norm(self.optimizer, cfg.max_grad_norm, self.scaler.value)
                finite = grad_norm == grad_norm and grad_norm != float("inf")
                if finite or not self.scaler.enabled or self.scaler.value < 2 ** -14:
                    break
                self.scaler.overflowed()
                self.counters["loss_scale_retries"] += 1
            self.last_grad_dtypes = {name: p.grad.dtype for name, p in self.optimizer.params.items() if p.grad is not None}
            self.logits_dtype = logprobs.dtype
            if not finite:
                self.counters["nonfinite_steps"] += 1
                if self.counters["nonfinite_steps"] >= cfg.max_nonfinite_steps:
                    raise WorkError(f"step {step}: {self.counters['nonfinite_steps']} optimizer steps had non-finite gradients "
                                    "(max_nonfinite_steps)")
                continue
            self.scaler.succeeded()
            learning_rate = cfg.learning_rate * min(1.0, (self.optimizer.step_count + 1) / max(1, cfg.warmup_steps))
            self.last_stats = self.optimizer.step(learning_rate)
            done_updates += 1
            norms.append(grad_norm)
            losses.append(loss_value)
            learning_rates.append(learning_rate)
            first, later = (first + stats, later) if k == 0 else (first, later + stats)
        self.optimizer.zero_grad()
        self.model.eval()
        metrics["seconds/update"] = time.perf_counter() - start
        metrics["train/updates"] = done_updates
        if not done_updates:
            return
        metrics.update({
            "train/grad_norm": sum(norms) / len(norms), "train/grad_norm_max": max(norms), "train/loss": sum(losses) / len(losses),
            "train/learning_rate": learning_rates[-1], "train/loss_tokens": int(first.tokens + later.tokens),
            "train/clip_low_share_first": first.clipped_low / max(first.tokens, 1),
            "train/clip_high_share_first": first.clipped_high / max(first.tokens, 1),
            "train/kl_old_new_first_nats_per_token": first.kl_k3 / max(first.tokens, 1),
        })
        if later.tokens:
            metrics.update({"train/clip_low_share_later": later.clipped_low / later.tokens,
                            "train/clip_high_share_later": later.clipped_high / later.tokens,
                            "train/kl_old_new_later_nats_per_token": later.kl_k3 / later.tokens})
        metrics.update(self.last_stats.reduce())

    def importance_weights(self, batch: Batch, micro: list[int], padded, old_logprobs):
        """Truncated token-level importance weights min(pi_trainer / pi_sampler, 2), or None."""
        import torch
        if self.cfg.rollout_is == "none":
            return None
        sampled = torch.zeros_like(old_logprobs)
        sampled[padded.response_mask] = torch.tensor([x for i in micro for x in batch.rollout_logprobs[i]], device=self.device)
        return (old_logprobs - sampled).clamp(-20, 20).exp().clamp(max=TIS_CAP)

    def step(self, step: int) -> dict[str, Any]:
        """One DAPO step: roll out, filter, update, measure. Returns the line for metrics.jsonl."""
        import torch
        torch.manual_seed((self.cfg.seed << 32) ^ step)  # dropout only; all sampling is hashed from indices
        metrics: dict[str, Any] = {"step": step}
        start = time.perf_counter()
        batch = self.collect(step, metrics)
        if batch is None:
            self.counters["empty_steps"] += 1
        else:
            self.update(batch, step, metrics)
        sync_start = time.perf_counter()
        self.engine.sync()
        metrics["seconds/sync"] = time.perf_counter() - sync_start
        if self.cfg.kl_every and step % self.cfg.kl_every == 0:
            metrics.update(self.measure_kl())
        if self.cfg.eval_every and step % self.cfg.eval_every == 0:
            metrics.update(self.evaluate())
        metrics.update({f"train/{name}": value for name, value in self.counters.items()})
        if self.scaler.enabled:
            metrics["train/loss_scale"] = self.scaler.value
        metrics["seconds/step"] = time.perf_counter() - start
        metrics["tokens_per_second"] = metrics["train/rollout_tokens"] / metrics["seconds/step"]
        metrics["memory/peak_bytes"] = peak_memory_bytes(self.device)
        return metrics

    # --- measurements along the way -----------------------------------------------------------------------------------

    def measure_kl(self) -> dict[str, float]:
        """Exact per-token KL to the base on one response to each of a fixed set of training prompts (Gate I)."""
        from utils_kl import exact_token_kl, pad_rows
        from utils_precision import load_model
        from utils_rollout import SamplingParams
        cfg = self.cfg
        index = list(range(min(cfg.kl_prompts, len(self.problems))))
        sampling = SamplingParams(1.0, 1.0, cfg.max_response_length, cfg.seed)
        out = self.engine.generate([self.prompts[i] for i in index], 1, sampling, (KL_STREAM,), [self.keys[i] for i in index])
        base = load_model(cfg.model_name_or_path, self.arm.compute_dtype, self.device, self.numerics, cfg.model_revision)
        total, tokens = 0.0, 0
        for start in range(0, len(index), cfg.micro_batch_size):
            part = slice(start, start + cfg.micro_batch_size)
            rows = pad_rows(out.prompts[part], out.responses[part], self.pad_id, self.device)
            total += float(exact_token_kl(self.model, base, rows).double().sum())
            tokens += int(rows.response_mask.sum())
        return {"kl/base_nats_per_token": total / tokens, "kl/base_nats_per_sequence": total / len(index)}

    def evaluate(self) -> dict[str, float]:
        """avg@k on the first problems of the validation set, at the rollout temperature, graded as the reward is."""
        from utils_data import format_prompt, load_problems
        from utils_rollout import SamplingParams, problem_key
        cfg = self.cfg
        if not hasattr(self, "eval_problems"):
            if not cfg.eval_dataset_path:
                raise UserError("eval_every needs --eval_dataset_path")
            self.eval_problems = load_problems(cfg.eval_dataset_path)[:cfg.eval_problems]
            self.eval_prompts = [format_prompt(p, cfg.prompt_template, self.tokenizer) for p in self.eval_problems]
        out = self.engine.generate(self.eval_prompts, EVAL_SAMPLES, SamplingParams(cfg.temperature, 1.0, cfg.max_response_length, cfg.seed),
                                   (EVAL_STREAM,), [problem_key(p["id"]) for p in self.eval_problems])
        texts = self.tokenizer.batch_decode(out.responses, skip_special_tokens=True)
        golds = [(p["answer"], p["task_type"]) for p in self.eval_problems for _ in range(EVAL_SAMPLES)]
        grades = self.graders.grade([(t, *gold) for t, gold in zip(texts, golds)], strict=True)
        return {"eval/val_avg": sum(g.outcome == "correct" for g in grades) / len(grades)}

    def run_audit(self, when: str) -> None:
        """Compare the formats in use with the arm's row; raises on any difference."""
        from utils_precision import audit
        after_update = when == "after_first_update"
        self.audits[when] = audit(self.model, self.optimizer, self.arm, self.numerics,
                                  logits_dtype=self.logits_dtype if after_update else None,
                                  grads=self.last_grad_dtypes if after_update else None,
                                  rollout_dtypes=list(self.engine.weight_dtypes()))


TIS_CAP = 2.0  # token-level truncated importance sampling, the cap of verl and Precision-RL


def peak_memory_bytes(device: str) -> int:
    """Peak resident set of this process, or peak allocated GPU memory."""
    if device == "cuda":
        import torch
        return torch.cuda.max_memory_allocated()
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def make_engine(cfg: TrainConfig, arm: PrecisionArm, model, tokenizer, numerics, masters: dict[str, Any]):
    """The sampler in the arm's rollout format: the trainer's own module where the formats agree, else a copy of the masters."""
    from utils_precision import load_model
    from utils_rollout import HFEngine, VLLMEngine
    if cfg.rollout_engine == "vllm":
        return VLLMEngine(cfg.model_name_or_path, tokenizer, arm.rollout_dtype, trainer=model,
                          gpu_memory_fraction=cfg.vllm_gpu_memory_fraction, tensor_parallel_size=cfg.vllm_tensor_parallel_size,
                          max_length=cfg.max_prompt_length + cfg.max_response_length)
    if arm.rollout_dtype == arm.compute_dtype:
        return HFEngine(model, tokenizer, cfg.rollout_batch_size)
    copy = load_model(cfg.model_name_or_path, arm.rollout_dtype, numerics.device, numerics, cfg.model_revision)
    return HFEngine(copy, tokenizer, cfg.rollout_batch_size, follow=masters)


# --------------------------------------------------------------------------------------------------------------------
# Checkpoints

def save_model(trainer: Trainer, folder: Path) -> None:
    """Masters in Hugging Face format, in the master's dtype, with tokenizer and generation config."""
    model, masters = trainer.model, trainer.optimizer.masters
    state = {name: masters[name] if name in masters else tensor for name, tensor in model.state_dict().items()}
    for name, source in tied_names(model).items():
        state[name] = state[source]
    dtype = next(iter(masters.values())).dtype
    kept = model.config.dtype
    model.config.dtype = dtype
    try:
        model.save_pretrained(folder, state_dict=state)
    finally:
        model.config.dtype = kept
    trainer.tokenizer.save_pretrained(folder)


def tied_names(model) -> dict[str, str]:
    """State-dict names that share storage with an earlier parameter -> that parameter's name."""
    first: dict[int, str] = {p.data_ptr(): name for name, p in model.named_parameters()}
    return {name: first[t.data_ptr()] for name, t in model.state_dict().items()
            if t.data_ptr() in first and first[t.data_ptr()] != name}


def save_checkpoint(trainer: Trainer, run_dir: Path, step: int) -> None:
    """Write checkpoints/step_{step}: aside, then renamed; afterwards only the newest keep_checkpoints stay."""
    from safetensors.torch import save_file
    root = run_dir / "checkpoints"
    aside, final = root / f".step_{step:06d}.tmp", root / f"step_{step:06d}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    save_model(trainer, aside)
    save_file({k: t.contiguous() for k, t in trainer.optimizer.state_tensors().items()}, aside / "optimizer.safetensors")
    files = {p.name: sha256_file(p) for p in sorted(aside.glob("*.safetensors"))}
    write_json(aside / "trainer_state.json", {"step": step, "optimizer_steps": trainer.optimizer.step_count,
                                              "loss_scaler": trainer.scaler.state(), "counters": trainer.counters, "sha256": files})
    shutil.rmtree(final, ignore_errors=True)
    os.replace(aside, final)
    for old in sorted(root.glob("step_*"))[:-max(1, trainer.cfg.keep_checkpoints)]:
        shutil.rmtree(old)


def load_checkpoint(trainer: Trainer, folder: Path) -> int:
    """Restore masters, moments, counters and step. Raises WorkError if a file is damaged."""
    from safetensors.torch import load_file
    try:
        state = read_json(folder / "trainer_state.json")
        for name, digest in state["sha256"].items():
            if sha256_file(folder / name) != digest:
                raise WorkError(f"{folder / name} is damaged (its hash differs from the one recorded)")
        weights: dict[str, Any] = {}
        for shard in sorted(folder.glob("model*.safetensors")):
            weights.update(load_file(shard))
        moments = load_file(folder / "optimizer.safetensors")
    except (UserError, OSError, KeyError) as error:
        raise WorkError(f"checkpoint {folder} cannot be read: {error}") from None
    masters = {name: weights[name] for name in trainer.optimizer.masters if name in weights}
    trainer.optimizer.load_state(masters, moments, state["optimizer_steps"])
    trainer.scaler.load_state(state["loss_scaler"])
    trainer.counters.update(state["counters"])
    trainer.engine.sync()
    return state["step"]


def resume(trainer: Trainer, run_dir: Path) -> int:
    """Load the newest whole checkpoint, cut later lines off metrics.jsonl; returns the step it was written at (0: none)."""
    step = 0
    for folder in sorted((run_dir / "checkpoints").glob("step_*"), reverse=True):
        try:
            step = load_checkpoint(trainer, folder)
            break
        except WorkError as error:
            print(f"warning: {error}; trying the one before", file=sys.stderr)
    metrics = run_dir / "metrics.jsonl"
    rows = read_jsonl(metrics, tolerate_last=True) if metrics.exists() else []
    write_jsonl(metrics, [row for row in rows if row["step"] <= step])
    return step


def check_resumable(run_dir: Path, settings: dict[str, Any]) -> None:
    """A run folder may only be continued with the settings that began it; UserError shows the keys that differ."""
    path = run_dir / "config.json"
    if not path.exists():
        return
    before = read_json(path)
    differing = [k for k in settings if k not in RESUME_MAY_DIFFER and before.get(k) != settings[k]]
    if differing:
        shown = "; ".join(f"{k}: {before.get(k)!r} -> {settings[k]!r}" for k in differing[:6])
        raise UserError(f"{run_dir} was begun with other settings ({shown}); use another --output_dir or remove it")
    if settings["num_steps"] < before["num_steps"]:
        raise UserError(f"{run_dir} was begun with num_steps {before['num_steps']}; it may grow, not shrink to {settings['num_steps']}")


# --------------------------------------------------------------------------------------------------------------------
# Plots

def plot_run(run_dir: Path, title: str) -> None:
    """training_curves.png and lost_updates.png from metrics.jsonl."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    rows = read_jsonl(run_dir / "metrics.jsonl", tolerate_last=True)

    def series(key: str) -> tuple[list, list]:
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        return [p[0] for p in points], [p[1] for p in points]

    panels = [("train/accuracy", "accuracy of rollouts"), ("train/response_length_mean", "response length (tokens)"),
              ("train/entropy_nats_per_token", "entropy (nats per token)"), ("train/grad_norm", "gradient norm"),
              ("mismatch/kl_k3_nats_per_token", "KL sampler-trainer (k3, nats per token)"),
              ("kl/base_nats_per_token", "KL to base (nats per token)")]
    figure, axes = plt.subplots(2, 3, figsize=(12, 6), layout="constrained")
    for axis, (key, label) in zip(axes.flat, panels):
        x, y = series(key)
        axis.plot(x, y, marker="." if len(x) < 30 else None)
        axis.set(xlabel="step", ylabel=label)
        if not x:
            axis.text(0.5, 0.5, "not measured", ha="center", transform=axis.transAxes)
    figure.suptitle(title)
    save_figure(figure, run_dir / "training_curves.png")

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for key, label in (("precision/lost_update_share", "updates lost to rounding"),
                       ("precision/changed_share_vs_base", "stored weights that differ from the base"),
                       ("precision/changed_share_vs_base_bf16", "the same, read in bf16")):
        left.plot(*series(key), label=label)
    left.set(xlabel="step", ylabel="share of elements", ylim=(-0.02, 1.02))
    left.legend()
    last = next((row["precision/update_over_ulp_histogram"] for row in reversed(rows)
                 if row.get("precision/update_over_ulp_histogram")), None)
    if last:
        edges = [last["log2_low"] + last["log2_step"] * i for i in range(len(last["counts"]))]
        right.bar(edges, last["counts"], width=last["log2_step"], align="edge")
        right.axvline(-1, color="black", linestyle="--", label="half an ULP")
        right.legend()
    right.set(xlabel="log2(|update| / ULP of the stored weight)", ylabel="elements, last step")
    figure.suptitle(title)
    save_figure(figure, run_dir / "lost_updates.png")
    plt.close("all")


def save_figure(figure, path: Path) -> None:
    from utils_run import atomic_path
    with atomic_path(path) as aside:
        figure.savefig(aside, format="png", dpi=110)


# --------------------------------------------------------------------------------------------------------------------
# Main

class StopSignal:
    """SIGTERM and Ctrl-C ask the loop to finish its step; a second one acts as usual."""

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        self.requested = True
        signal.signal(number, signal.SIG_DFL)
        print("stopping after this step; the state will be saved", file=sys.stderr, flush=True)


def make_tracker(cfg: TrainConfig, run_dir: Path, settings: dict[str, Any]):
    """accelerate's TensorBoard or W&B tracker, or None."""
    if cfg.report_to == "none":
        return None
    from accelerate import Accelerator
    try:
        accelerator = Accelerator(log_with=cfg.report_to, project_dir=str(run_dir), cpu=cfg.device == "cpu")
        accelerator.init_trackers("rlvr-precision", config={k: v for k, v in settings.items() if isinstance(v, (int, float, str, bool))})
    except (ImportError, ValueError) as error:
        raise UserError(f"--report_to {cfg.report_to}: {error} (pip install {cfg.report_to})") from None
    return accelerator


def run_identity(cfg: TrainConfig, overrides: dict[str, Any], settings: dict[str, Any], synthetic: bool) -> dict[str, Any]:
    """What rlvr_run.json says, so that a result's identity never hangs on a file name."""
    return {"study": cfg.study, "arm": arm_name(cfg.precision_mode, overrides), "precision_mode": cfg.precision_mode,
            "overrides": overrides, "seed": cfg.seed, "noise_replicate": cfg.noise_replicate, "factorial": cfg.factorial,
            "config_hash": config_hash(settings, ignore=("config", "results_root", "output_dir", "save_every", "keep_checkpoints",
                                                         "report_to")),
            "base_model": cfg.model_name_or_path, "base_sha256": settings["base_sha256"], "num_steps": cfg.num_steps,
            "synthetic_data": synthetic}


def base_hash(path: str) -> str | None:
    """SHA-256 over the base folder's safetensors shards; None for a hub id (its resolved commit is in env.json)."""
    shards = sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else []
    return config_hash({p.name: sha256_file(p) for p in shards}) if shards else None


def main(cfg: TrainConfig) -> int:
    arm, overrides = resolve_arm(cfg)
    name = run_name(cfg.precision_mode, overrides, cfg.seed, cfg.noise_replicate)
    check_settings(cfg)
    run_dir = Path(cfg.output_dir or Path(cfg.results_root) / "train_logs" / name)
    require_memory(cfg.model_name_or_path, {name: arm}, cfg.device)
    from utils_data import load_manifest_entry, load_problems
    problems = load_problems(cfg.train_dataset_path)
    if any(p["task_type"] == "code" for p in problems):
        raise UserError(f"{cfg.train_dataset_path}: training on code problems is not supported (math and mcq are)")
    manifest = load_manifest_entry(cfg.train_dataset_path)
    synthetic = bool(manifest["synthetic"]) if manifest else any(p["source"] == "synthetic" for p in problems)
    settings = {**config_dict(cfg), "arm": config_dict(arm), "overrides": overrides, "run": name,
                "train_dataset_sha256": sha256_file(cfg.train_dataset_path), "base_sha256": base_hash(cfg.model_name_or_path)}
    require_writable_dir(run_dir)
    check_resumable(run_dir, settings)
    identity = run_identity(cfg, overrides, settings, synthetic)
    if is_finished(run_dir, identity):
        print(f"{name}: already finished, {run_dir / 'final_model'}")
        return 0

    trainer, environment = set_up(cfg, arm, problems)
    write_json(run_dir / "config.json", settings)
    stop = StopSignal()
    last = resume(trainer, run_dir)
    trainer.run_audit("after_setup")
    environment["audit"] = trainer.audits
    write_json(run_dir / "env.json", environment)
    tracker = make_tracker(cfg, run_dir, settings)
    from tqdm import tqdm
    bar = tqdm(range(last + 1, cfg.num_steps + 1), initial=last, total=cfg.num_steps, desc=name, unit="step")
    for step in bar:
        metrics = trainer.step(step)
        if "after_first_update" not in trainer.audits and metrics.get("train/updates"):
            trainer.run_audit("after_first_update")
            write_json(run_dir / "env.json", environment)
        append_jsonl(run_dir / "metrics.jsonl", metrics)
        if tracker:
            tracker.log({k: v for k, v in metrics.items() if isinstance(v, (int, float))}, step=step)
        bar.set_postfix(acc=f"{metrics['train/accuracy']:.3f}", len=f"{metrics['train/response_length_mean']:.0f}", refresh=False)
        if step % cfg.save_every == 0 or step == cfg.num_steps or stop.requested:
            save_checkpoint(trainer, run_dir, step)
            plot_run(run_dir, title_of(name, cfg, synthetic))
        if stop.requested and step < cfg.num_steps:
            raise Interrupted(f"{name}: stopped after step {step}, checkpoint written; the same command goes on")
    if tracker:
        tracker.end_training()
    finish(trainer, run_dir, identity)
    print(f"{name}: done, {run_dir / 'final_model'}")
    return 0


def title_of(name: str, cfg: TrainConfig, synthetic: bool) -> str:
    return f"{name}, study {cfg.study}" + (" (SYNTHETIC DATA)" if synthetic else "")


def check_settings(cfg: TrainConfig) -> None:
    """UserError for options that contradict each other."""
    if cfg.rollout_is != "none" and cfg.top_p < 1.0:
        raise UserError("rollout_is token_tis needs top_p 1: below it the sampler's distribution is another one")
    if cfg.overlong_buffer_len > cfg.max_response_length:
        raise UserError(f"overlong_buffer_len {cfg.overlong_buffer_len} exceeds max_response_length {cfg.max_response_length}")
    if not cfg.temperature > 0:
        raise UserError("temperature must be above 0 for training: greedy rollouts carry no learning signal")
    for name in ("num_steps", "prompts_per_step", "group_size", "prompts_per_minibatch", "micro_batch_size", "max_gen_batches",
                 "max_response_length", "save_every"):
        if getattr(cfg, name) < 1:
            raise UserError(f"{name} must be at least 1, not {getattr(cfg, name)}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("training with several processes is not available yet; start one process")


def set_up(cfg: TrainConfig, arm: PrecisionArm, problems: list[dict]) -> tuple[Trainer, dict[str, Any]]:
    """Numerics, model, tokenizer, optimizer and engine; and what env.json says of them."""
    import torch

    from utils_precision import (check_base_on_bf16_grid, load_model, load_tokenizer, read_switches, resolve_device, set_dropout,
                                 setup_numerics)
    device = resolve_device(cfg.device)
    low = torch.float16 if "float16" in (arm.compute_dtype, arm.rollout_dtype) else torch.bfloat16
    numerics = setup_numerics(arm.deterministic, cfg.sdpa_backend, cfg.cpu_matmul, cfg.num_threads, device, low)
    torch.manual_seed(cfg.seed)
    # Checked in float32, before any arm's rounding: every arm must start from the same theta_0.
    model = load_model(cfg.model_name_or_path, "float32", device, numerics, cfg.model_revision)
    check_base_on_bf16_grid(model, cfg.model_name_or_path)
    if arm.compute_dtype != "float32":
        del model
        model = load_model(cfg.model_name_or_path, arm.compute_dtype, device, numerics, cfg.model_revision)
    context = int(getattr(model.config, "max_position_embeddings", 1 << 30))
    if cfg.max_prompt_length + cfg.max_response_length > context:
        raise UserError(f"max_prompt_length {cfg.max_prompt_length} + max_response_length {cfg.max_response_length} exceed the "
                        f"model's context of {context}")
    set_dropout(model, arm.dropout)
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tokenizer = load_tokenizer(cfg.model_name_or_path, cfg.model_revision)
    trainer = Trainer(cfg, arm, model, tokenizer, problems, numerics)
    environment = {**environment_info(), "numerics": numerics.to_dict(), "switches": read_switches(),
                   "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
                   "parameters": sum(p.numel() for p in model.parameters()), "engine": trainer.engine.describe(),
                   "prompts_dropped_as_too_long": trainer.dropped_prompts}
    return trainer, environment


def is_finished(run_dir: Path, identity: dict[str, Any]) -> bool:
    """True if final_model was written by these very settings."""
    path = run_dir / "final_model" / "rlvr_run.json"
    return path.exists() and read_json(path).get("config_hash") == identity["config_hash"]


def finish(trainer: Trainer, run_dir: Path, identity: dict[str, Any]) -> None:
    """Write final_model aside, then rename it."""
    aside, final = run_dir / ".final_model.tmp", run_dir / "final_model"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    save_model(trainer, aside)
    write_json(aside / "rlvr_run.json", identity)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(aside, final)
    trainer.graders.close()


if __name__ == "__main__":
    run_script(main, TrainConfig, description=__doc__)
