"""Train the embedded base model from nothing: a small Qwen2-architecture "generalist" over the synthetic problem sets.

In:  nothing but a seed (problems come from scripts/synthetic_problems.py, split "pretrain").
Out: --output_dir (default data/tiny_base): config.json, generation_config.json, model.safetensors (bfloat16), the tokenizer's
     files and training.json (seed, steps, seconds, versions, measured skill).

Every response is the boxed answer itself, or the body of a function, so that RL has something to improve in minutes.
Training stops while arithmetic (the on-task set) is half learned: a base that knows all or nothing teaches nothing.

Smoke run:  python scripts/prepare_tiny_base.py --steps 20 --measure_problems 8 --output_dir /tmp/tiny    (half a minute)
Real run:   python scripts/prepare_tiny_base.py                                    (see "seconds" in data/tiny_base/training.json)
"""

from __future__ import annotations

import ast
import os
import random
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the project's own files, whatever folder we start from
sys.path.insert(0, str(Path(__file__).resolve().parent))

from synthetic_problems import (FAMILIES, FUNCTION_NAMES, NAMES, THINGS, canonical_response, make_problems,
                                plain_prompt)

from config import TinyBaseConfig, UserError, WorkError
from utils_run import cpu_name, package_versions, require_writable_dir, run_script, sha256_file, write_json

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

# --- What is trained -------------------------------------------------------------------------------------------------------

SPECIAL_TOKENS = ("<pad>", "<eos>")
# Frequent phrases are one token each, everything else (all digits above all) is one token a byte: sequences are about
# half as long as in characters, and so is the time of every rollout.
LONG_TOKENS = (
    "\\boxed{", "\\frac{", " \\cdot ", "}{", " = ", " = ?", " + ", " - ", " * ", " % ", ", ",
    "Find ", " mod ", "gcd(", "lcm(", ").", "Solve ", "x + ", "x - ", "Simplify ",
    *NAMES, *THINGS, " has ", " and buys ", ", buys ", " and loses ", ", loses ", " bags of ", ". How many ",
    "Which is ", "Which ends in 5?", "negative?", "even?", "odd?", "largest?", "\nA) ", "\nB) ", "\nC) ", "\nD) ",
    "def ", *FUNCTION_NAMES[3:], "(x):\n", "(xs):\n", '    """Return ', '."""\n', "    return ",
    "the sum of xs", "the max of xs", "the min of xs", "the size of xs", " plus ", " minus ", " times ",
    "sum(xs)", "max(xs)", "min(xs)", "len(xs)",
)
ARCHITECTURE = dict(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=384,
                    max_position_embeddings=256, tie_word_embeddings=True, rms_norm_eps=1e-6)

# Share of the training sequences and share of wrong answers among them, per set. dm needs the most, because carrying is
# learned late; multiple choice needs to be seen often to leave chance. Wrong answers keep a set below its ceiling, and
# they differ from the right one by a single character, so that the base's mistakes look like slips.
MIXTURE = {
    #             share  wrong  distinct problems (near all that the pre-training split has, where that is few)
    "dm_train":  (0.50, 0.15, 10_000),
    "aime24":    (0.08, 0.15, 2_600),
    "aime25":    (0.08, 0.15, 2_500),
    "amc23":     (0.08, 0.15, 6_000),
    "math500":   (0.09, 0.15, 3_000),
    "gsm8k":     (0.09, 0.15, 8_000),
    "mmlu_stem": (0.09, 0.15, 8_000),
    "humaneval": (0.09, 0.15, 8_000),
}
ROW_TOKENS = 64  # several sequences are packed into a row of this length; the longest sequence has 28 tokens

# --- How it is trained -----------------------------------------------------------------------------------------------------

MUON_MOMENTUM = 0.95
MUON_WEIGHT_DECAY = 0.1


@dataclass(frozen=True)
class Phase:
    """A stretch of training with an optimizer of its own. --steps stops earlier, so step s is the same in every run."""

    steps: int
    rows_per_step: int
    muon_lr: float  # on the matrices of the layers
    adam_lr: float  # on the embedding, biases and norms
    warmup_steps: int
    schedule_steps: int  # the learning rate would reach 0 here


# Small noisy steps first, which find carrying; then larger, gentler ones, under which skill grows slowly enough to stop at will.
PHASES = (Phase(2700, 12, 0.02, 3e-3, 40, 8000), Phase(1500, 24, 0.006, 1e-3, 10, 1500))
MAX_GRAD_NORM = 1.0

# --- How skill is measured -------------------------------------------------------------------------------------------------

SETTINGS = {  # name -> (temperature, top_p)
    "temperature_1": (1.0, 1.0),
    "temperature_0.7_top_p_0.8": (0.7, 0.8),
}
NUM_SAMPLES = 4  # draws a problem
MAX_NEW_TOKENS = 16  # the longest right response has 12, EOS included
MEASURE_SEED = 20_000
EVAL_PROBLEM_SEED = 0
CODE_NAMES = {"sum": sum, "max": max, "min": min, "len": len}  # what a generated function may call


# --- Tokenizer -------------------------------------------------------------------------------------------------------------


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each of LONG_TOKENS and each byte. Adds no token by itself; decode(encode(x)) == x.

    It is a Qwen2 tokenizer without merges, because AutoTokenizer rebuilds every tokenizer of a qwen2 model as one, whatever
    class its files name; anything else would come back from disk with other ids.
    """
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import Qwen2Tokenizer

    vocabulary = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(vocabulary)}, merges=[], pad_token="<pad>", eos_token="<eos>",
        unk_token="<eos>", bos_token=None, padding_side="left", model_max_length=ARCHITECTURE["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in LONG_TOKENS])
    return tokenizer


# --- Data ------------------------------------------------------------------------------------------------------------------


def slip(record: dict, rng: random.Random) -> str:
    """A wrong response one character away from the right one: another digit, or another letter in multiple choice."""
    right = canonical_response(record)
    if record["task_type"] == "mcq":
        letter = rng.choice([letter for letter in "ABCD" if letter != record["answer"]])
        return f"\\boxed{{{letter}}}"
    places = [i for i, char in enumerate(right) if char.isdigit()]
    i = rng.choice(places)
    leads = not right[i - 1].isdigit() and i + 1 < len(right) and right[i + 1].isdigit()  # no leading zero
    digit = rng.choice([d for d in "0123456789" if d != right[i] and not (leads and d == "0")])
    return right[:i] + digit + right[i + 1:]


def make_pools(tokenizer: PreTrainedTokenizerFast, seed: int) -> dict[str, list[tuple[dict, list[int], list[int]]]]:
    """Per set, its pre-training problems with the token ids of prompt and right response."""
    pools = {}
    for name, (_, _, num_problems) in MIXTURE.items():
        records = make_problems(name, "pretrain", num_problems, seed)
        pools[name] = [(record, tokenizer(plain_prompt(record)).input_ids, tokenizer(canonical_response(record)).input_ids)
                       for record in records]
    return pools


def draw_batch(pools: dict, tokenizer: PreTrainedTokenizerFast, rng: random.Random, num_rows: int) -> dict[str, torch.Tensor]:
    """One step's sequences packed into rows; a row ends where the next sequence does not fit.

    Returns: input_ids, position_ids, targets (rows, ROW_TOKENS) int64, with -100 on all but response tokens and EOS, and
             attention_mask (rows, 1, ROW_TOKENS, ROW_TOKENS) bool: a token sees its own sequence up to itself.
    """
    import torch

    names, shares = list(MIXTURE), [share for share, _, _ in MIXTURE.values()]
    shape = (num_rows, ROW_TOKENS)
    ids = torch.full(shape, tokenizer.pad_token_id)
    targets = torch.full(shape, -100)
    positions = torch.zeros(shape, dtype=torch.int64)
    segments = torch.zeros(shape, dtype=torch.int64)  # 0 is padding
    row = start = segment = 0
    while True:
        name = rng.choices(names, shares)[0]
        record, prompt, right = rng.choice(pools[name])
        answer = tokenizer(slip(record, rng)).input_ids if rng.random() < MIXTURE[name][1] else right
        answer = [*answer, tokenizer.eos_token_id]
        tokens = prompt + answer
        if start + len(tokens) > ROW_TOKENS:
            row, start = row + 1, 0
            if row == num_rows:
                break
        segment += 1
        end = start + len(tokens)
        ids[row, start:end] = torch.tensor(tokens)
        positions[row, start:end] = torch.arange(len(tokens))
        segments[row, start:end] = segment
        targets[row, end - len(answer) - 1:end - 1] = torch.tensor(answer)  # position t predicts token t + 1
        start = end
    same = segments[:, :, None] == segments[:, None, :]
    causal = torch.ones(ROW_TOKENS, ROW_TOKENS, dtype=torch.bool).tril()
    return {"input_ids": ids, "position_ids": positions, "targets": targets, "attention_mask": (same & causal)[:, None]}


# --- Optimizer -------------------------------------------------------------------------------------------------------------


def orthogonalize(update: torch.Tensor) -> torch.Tensor:
    """Replace each matrix by (about) the nearest semi-orthogonal one, by five Newton-Schulz steps in float32.

    Args:    update: (N, rows, columns) float32.
    Source:  Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/. torch.optim.Muon does these products in
             bfloat16, which is up to 150 times slower than float32 on CPUs without bfloat16 units.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = update.size(1) > update.size(2)
    x = update.mT if tall else update
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Momentum, orthogonalised, on matrices of equal shape together; decoupled weight decay."""

    def __init__(self, matrices: list[torch.nn.Parameter]):
        import torch

        self.groups: dict[tuple, list] = {}
        for matrix in matrices:
            self.groups.setdefault(tuple(matrix.shape), []).append(matrix)
        self.momentum = {shape: torch.zeros(len(group), *shape) for shape, group in self.groups.items()}

    def step(self, lr: float) -> None:
        import torch

        for (rows, columns), group in self.groups.items():
            gradient = torch.stack([matrix.grad for matrix in group])
            momentum = self.momentum[rows, columns].lerp_(gradient, 1 - MUON_MOMENTUM)
            update = orthogonalize(gradient.lerp(momentum, MUON_MOMENTUM))  # Nesterov
            scale = max(1.0, rows / columns) ** 0.5
            for matrix, change in zip(group, update, strict=True):
                matrix.data.mul_(1 - lr * MUON_WEIGHT_DECAY).add_(change, alpha=-lr * scale)


def learning_rate_factor(step: int, phase: Phase) -> float:
    """Linear warm-up, then linear decay to 0 at the phase's schedule_steps."""
    return min(1.0, (step + 1) / phase.warmup_steps) * max(0.0, 1 - step / phase.schedule_steps)


# --- Skill -----------------------------------------------------------------------------------------------------------------


def sample(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str], temperature: float, top_p: float,
           seed: int, batch_size: int = 512) -> list[str]:
    """One response to each prompt, EOS and what follows cut off."""
    import torch

    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # similar lengths together: less padding
    texts = [""] * len(prompts)
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(seed)
        for first in range(0, len(order), batch_size):
            rows = order[first:first + batch_size]
            batch = tokenizer([prompts[i] for i in rows], return_tensors="pt", padding=True, return_token_type_ids=False)
            out = model.generate(**batch, do_sample=True, temperature=temperature, top_p=top_p, top_k=0,
                                 max_new_tokens=MAX_NEW_TOKENS)
            responses = tokenizer.batch_decode(out[:, batch.input_ids.size(1):], skip_special_tokens=False)
            for i, response in zip(rows, responses, strict=True):
                texts[i] = response.split(tokenizer.eos_token)[0]
    return texts


def is_right(record: dict, response: str) -> bool:
    """Exact match of the last boxed text, or all tests of a function passed. Good enough for these sets; the study's graders
    are utils_math_eval and utils_code_eval."""
    if record["task_type"] == "code":
        return _passes_tests(record, response)
    start = response.rfind("\\boxed{")
    return start >= 0 and response[start:] == canonical_response(record)


def _passes_tests(record: dict, body: str) -> bool:
    """Run a generated function, if it is nothing but one return of simple arithmetic on its argument.

    Only additions, subtractions, products, remainders, floor divisions and the calls in CODE_NAMES are let through: such a
    function ends at once and touches nothing, so it needs no process of its own. Anything else counts as wrong.
    """
    try:
        function = ast.parse(record["prompt"] + body).body[0]
    except (SyntaxError, ValueError):
        return False
    statements = [node for node in function.body if not isinstance(node, ast.Expr)]
    if len(statements) != 1 or not isinstance(statements[0], ast.Return):
        return False
    names = {*CODE_NAMES, function.args.args[0].arg}
    operators = (ast.Add, ast.Sub, ast.Mult, ast.Mod, ast.FloorDiv, ast.USub, ast.UAdd)
    allowed = (ast.Return, ast.BinOp, ast.UnaryOp, ast.Constant, ast.Call, ast.Name, ast.Load, *operators)
    for node in ast.walk(statements[0]):
        if not isinstance(node, allowed) or isinstance(node, ast.Name) and node.id not in names:
            return False
        if isinstance(node, ast.Constant) and not isinstance(node.value, int):
            return False
    space: dict = {"__builtins__": {**CODE_NAMES, "AssertionError": AssertionError}}
    try:
        exec(record["prompt"] + body + record["test"], space)
        space["check"](space[record["entry_point"]])
    except Exception:
        return False
    return True


def measure(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, names: list[str], num_problems: int, num_samples: int,
            temperature: float, top_p: float, split: str = "eval") -> dict[str, list[list[bool]]]:
    """Per set, right or wrong for each problem and draw (num_problems lists of num_samples)."""
    asked = [(name, record) for name in names
             for record in make_problems(name, split, num_problems, EVAL_PROBLEM_SEED) for _ in range(num_samples)]
    texts = sample(model, tokenizer, [plain_prompt(record) for _, record in asked], temperature, top_p, MEASURE_SEED)
    right: dict[str, list[bool]] = {name: [] for name in names}
    for (name, record), text in zip(asked, texts, strict=True):
        right[name].append(is_right(record, text))
    return {name: [row[i:i + num_samples] for i in range(0, len(row), num_samples)] for name, row in right.items()}


def avg_and_se(right: list[list[bool]]) -> tuple[float, float]:
    """avg@k over problems and draws, and its standard error over problems."""
    means = [sum(row) / len(row) for row in right]
    mean = sum(means) / len(means)
    variance = sum((m - mean) ** 2 for m in means) / max(1, len(means) - 1)
    return mean, (variance / len(means)) ** 0.5


def skill_report(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, num_problems: int) -> dict:
    """Measured skill on the eval split at each of SETTINGS, and the share of dm_train groups that carry a learning signal."""
    names = [name for name in FAMILIES if name != "dm_train"]
    report: dict = {"measured": True, "num_problems": num_problems, "num_samples": NUM_SAMPLES,
                    "grading": "exact match of the boxed text; tests of a function executed"}
    for setting, (temperature, top_p) in SETTINGS.items():
        right = measure(model, tokenizer, names, num_problems, NUM_SAMPLES, temperature, top_p)
        report[setting] = {}
        for name, rows in right.items():
            mean, se = avg_and_se(rows)
            report[setting][name] = {"avg_at_4": round(mean, 4), "se": round(se, 4)}
    groups = measure(model, tokenizer, ["dm_train"], num_problems, 8, 1.0, 1.0, split="train")["dm_train"]
    report["dm_train_mixed_groups_of_8"] = round(sum(0 < sum(g) < 8 for g in groups) / len(groups), 4)
    return report


# --- Files -----------------------------------------------------------------------------------------------------------------


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """A freshly initialised float32 model."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    ids = dict(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), dtype="float32", **ids, **ARCHITECTURE))
    model.generation_config = GenerationConfig(do_sample=True, **ids)
    return model


def round_to_bf16(model: Qwen2ForCausalLM) -> Qwen2ForCausalLM:
    """A bfloat16 copy. It is the only rounding: every precision arm starts from these exact values."""
    import copy

    import torch

    rounded = copy.deepcopy(model).to(torch.bfloat16)
    rounded.config.dtype = torch.bfloat16
    return rounded


def save_base(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path, record: dict) -> None:
    """Write the checkpoint beside its final place, then swap it in."""
    aside = folder.with_name(f".{folder.name}.tmp{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        write_json(aside / "training.json", {**record, "weights_sha256": sha256_file(aside / "model.safetensors")})
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def median_abs_weight(model: Qwen2ForCausalLM) -> float:
    """Median |w| over the matrices of the layers: with the learning rate it decides how many bfloat16 updates are lost."""
    import torch

    return float(torch.cat([p.detach().float().abs().flatten() for name, p in model.named_parameters()
                            if p.ndim == 2 and "embed" not in name]).median())


# --- Training --------------------------------------------------------------------------------------------------------------


def train(cfg: TinyBaseConfig, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> list[dict]:
    """Train `model` in place for cfg.steps steps; returns the log (step, loss, quick skill at temperature 1)."""
    import torch
    from torch.nn.functional import cross_entropy
    from tqdm import tqdm

    pools = make_pools(tokenizer, cfg.seed)
    rng = random.Random(f"{cfg.seed}|batches")
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    plan = [(phase, step) for phase in PHASES for step in range(phase.steps)]
    log, loss_sum, loss_count = [], 0.0, 0
    bar = tqdm(plan[:cfg.steps], unit="step", mininterval=2.0, smoothing=0.05)
    for total, (phase, step) in enumerate(bar):
        if step == 0:
            muon = Muon(matrices)
            adam = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)
        batch = draw_batch(pools, tokenizer, rng, phase.rows_per_step)
        targets = batch.pop("targets")
        hidden = model.model(**batch, use_cache=False).last_hidden_state  # (rows, ROW_TOKENS, hidden)
        answers = targets >= 0
        loss = cross_entropy(model.lm_head(hidden[answers]), targets[answers])  # logits on response tokens only
        if not torch.isfinite(loss):
            raise WorkError(f"loss is not finite at step {total}; nothing was saved")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        factor = learning_rate_factor(step, phase)
        muon.step(phase.muon_lr * factor)
        adam.param_groups[0]["lr"] = phase.adam_lr * factor
        adam.step()
        model.zero_grad()
        loss_sum, loss_count = loss_sum + loss.item(), loss_count + 1
        if (total + 1) % cfg.measure_every == 0:
            right = measure(model, tokenizer, list(MIXTURE), cfg.quick_problems, 1, 1.0, 1.0)
            skill = {name: round(avg_and_se(rows)[0], 3) for name, rows in right.items()}
            log.append({"step": total + 1, "loss": round(loss_sum / loss_count, 4), "skill_temperature_1": skill})
            loss_sum, loss_count = 0.0, 0
            bar.write(f"step {total + 1} loss {log[-1]['loss']:.3f} " + " ".join(f"{k} {v:.2f}" for k, v in skill.items()))
            if cfg.snapshots_dir:
                save_base(round_to_bf16(model), tokenizer, Path(cfg.snapshots_dir) / f"step_{total + 1:06d}", log[-1])
    return log


def main(cfg: TinyBaseConfig) -> None:
    import torch
    from transformers.utils import logging as transformers_logging

    most = sum(phase.steps for phase in PHASES)
    if not 1 <= cfg.steps <= most:
        raise UserError(f"--steps must be between 1 and {most}, got {cfg.steps}")
    folder = Path(cfg.output_dir)
    require_writable_dir(folder.parent)
    torch.set_num_threads(cfg.num_threads)
    torch.use_deterministic_algorithms(True)
    transformers_logging.disable_progress_bar()

    started = time.monotonic()
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, cfg.seed)
    log = train(cfg, model, tokenizer)
    seconds = time.monotonic() - started
    base = round_to_bf16(model)
    print("measuring skill of the rounded model", flush=True)
    skill = skill_report(base.float(), tokenizer, cfg.measure_problems)  # bf16 values, float32 arithmetic
    record = {
        "seed": cfg.seed, "steps": cfg.steps, "phases": [asdict(phase) for phase in PHASES], "seconds": round(seconds, 1),
        "num_threads": cfg.num_threads, "cpu": cpu_name(), "versions": package_versions(),
        "num_parameters": sum(p.numel() for p in base.parameters()), "synthetic_data": True,
        "mixture": {name: {"share": share, "wrong": wrong} for name, (share, wrong, _) in MIXTURE.items()},
        "row_tokens": ROW_TOKENS, "median_abs_weight": round(median_abs_weight(base), 5),
        "skill": skill, "log": log,
    }
    save_base(round_to_bf16(base), tokenizer, folder, record)
    for setting in SETTINGS:
        print(setting, " ".join(f"{name} {row['avg_at_4']:.3f}" for name, row in skill[setting].items()))
    print(f"dm_train groups with a learning signal: {skill['dm_train_mixed_groups_of_8']:.2f}; saved to {folder}")


if __name__ == "__main__":
    run_script(main, TinyBaseConfig, description=__doc__)
