"""train_rlvr: what must not matter to the gradient, resuming bit for bit, files, exit codes, refusals."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import train_rlvr as tr
from config import PRECISION_MODES, TrainConfig, UserError, parse_config
from utils_run import NON_DETERMINISTIC_FIELDS, read_jsonl

ROOT = Path(__file__).resolve().parent.parent
BASE = ROOT / "data" / "tiny_base"
SMALL = ["--num_steps", "4", "--prompts_per_step", "8", "--prompts_per_minibatch", "4", "--group_size", "4", "--save_every", "2",
         "--max_gen_batches", "2", "--eval_every", "0", "--kl_every", "0"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A small training set of the tiny model's on-task family."""
    folder = tmp_path_factory.mktemp("data")
    done = subprocess.run([sys.executable, "scripts/prepare_data.py", "--output_dir", str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "dm_train.json"


def command(data: Path, out: Path, *flags: str) -> list[str]:
    return [sys.executable, "train_rlvr.py", "--config", "configs/tiny.yaml", "--train_dataset_path", str(data), "--output_dir", str(out),
            *SMALL, *flags]


def run(data: Path, out: Path, *flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(command(data, out, *flags), cwd=ROOT, capture_output=True, text=True, timeout=300)


def deterministic(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith(NON_DETERMINISTIC_FIELDS)} for row in rows]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file
    return load_file(folder / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


# --- pure helpers --------------------------------------------------------------------------------------------------------

def test_micro_batches_keep_order_and_budget():
    rows, lengths = [5, 6, 7, 8, 9], [0, 0, 0, 0, 0, 10, 20, 10, 50, 10]
    assert tr.micro_batches(rows, lengths, 2, 0) == [[5, 6], [7, 8], [9]]
    assert tr.micro_batches(rows, lengths, 9, 40) == [[5, 6], [7], [8], [9]]  # 2 x 20 fits, 3 x 20 does not; 50 alone exceeds
    assert tr.micro_batches(rows, lengths, 1, 0) == [[r] for r in rows]


def test_prompts_are_a_function_of_seed_step_and_batch():
    first = tr.step_prompts(100, 32, 1, 5, 0)
    assert first == tr.step_prompts(100, 32, 1, 5, 0)
    batches = [i for b in range(3) for i in tr.step_prompts(100, 32, 1, 5, b)]
    assert len(set(batches)) == 96  # no problem twice within a step
    assert first != tr.step_prompts(100, 32, 1, 6, 0) and first != tr.step_prompts(100, 32, 2, 5, 0)
    assert sorted(tr.step_prompts(10, 10, 1, 1, 3)) == list(range(10))  # beyond one permutation the next begins


# --- the step, in this process -------------------------------------------------------------------------------------------

def make_trainer(data: Path, mode: str = "fp32", **changes) -> tr.Trainer:
    from utils_data import load_problems
    cfg = parse_config(TrainConfig, ["--config", str(ROOT / "configs/tiny.yaml"), "--train_dataset_path", str(data), *SMALL])
    cfg = dataclasses.replace(cfg, model_name_or_path=str(BASE), precision_mode=mode, **changes)
    return tr.set_up(cfg, PRECISION_MODES[mode], load_problems(data))[0]


@pytest.fixture(scope="module")
def batch_and_gradient(data):
    """One fixed rollout batch, and a function that gives the first optimizer step's gradient under changed settings."""
    trainer = make_trainer(data)
    # Grades by a rule on the tokens: mixed groups whatever the model's skill.
    trainer.grade = lambda responses, index: [sum(response) % 2 == 0 for response in responses]
    batch = trainer.collect(1, {})

    def gradient(mode: str = "fp32", rows=None, **changes) -> tuple[dict[str, torch.Tensor], dict]:
        other = make_trainer(data, mode, max_grad_norm=0.0, prompts_per_minibatch=64, **changes)
        held, metrics = {}, {}
        step = other.optimizer.step

        def capture(lr):
            held.update({n: p.grad.clone() for n, p in other.optimizer.params.items()})
            return step(lr)

        other.optimizer.step = capture
        other.update(batch if rows is None else reorder(batch, rows), 1, metrics)
        return held, metrics
    return batch, gradient


def reorder(batch: tr.Batch, rows: list[int]) -> tr.Batch:
    pick = lambda values: [values[i] for i in rows]  # noqa: E731
    return tr.Batch(pick(batch.prompts), pick(batch.responses), pick(batch.rollout_logprobs), batch.advantages[rows], pick(batch.in_loss),
                    batch.group_size)


def relative_difference(a: dict, b: dict) -> float:
    norm = sum(float(t.double().norm() ** 2) for t in a.values()) ** 0.5
    return sum(float((a[k].double() - b[k].double()).norm() ** 2) for k in a) ** 0.5 / norm


def test_loss_ignores_micro_batch_size_and_token_budget(batch_and_gradient):
    batch, gradient = batch_and_gradient
    assert len({len(r) for r in batch.responses}) > 1  # ragged lengths, or a per-micro-batch mean would pass too
    reference, _ = gradient(micro_batch_size=1000)
    for changes in ({"micro_batch_size": 1}, {"micro_batch_size": 2}, {"micro_batch_size": 4}, {"micro_batch_size": 8},
                    {"micro_batch_size": 64, "max_tokens_per_micro_batch": 100}):
        # float32 sums of a few thousand terms in another order: about sqrt(n) 2^-24 = 4e-6
        assert relative_difference(reference, gradient(**changes)[0]) < 2e-5, changes


def test_gradient_equals_a_plain_float64_computation(batch_and_gradient):
    batch, gradient = batch_and_gradient
    from transformers import AutoModelForCausalLM
    found, _ = gradient()
    torch.use_deterministic_algorithms(False)
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float64, attn_implementation="eager")
    total, tokens = 0.0, sum(len(r) for r in batch.responses)
    for prompt, response, advantage in zip(batch.prompts, batch.responses, batch.advantages.double()):
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1:-1]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        total = total - (logprobs - logprobs.detach()).exp().sum() * advantage
    (total / tokens).backward()
    # the rotary frequencies and norms of a float64 model still pass through float32 in transformers: 1e-5 of the gradient
    assert relative_difference({n: p.grad for n, p in model.named_parameters()}, found) < 1e-4


def test_row_order_does_not_matter(batch_and_gradient):
    batch, gradient = batch_and_gradient
    reference, _ = gradient()
    shuffled, _ = gradient(rows=torch.randperm(len(batch.prompts), generator=torch.Generator().manual_seed(0)).tolist())
    assert relative_difference(reference, shuffled) < 2e-5  # as above


@pytest.mark.parametrize("mode", list(PRECISION_MODES))
def test_first_minibatch_has_ratio_exactly_one_in_every_arm(batch_and_gradient, mode):
    _, gradient = batch_and_gradient
    _, metrics = gradient(mode, micro_batch_size=8)
    assert metrics["train/clip_low_share_first"] == metrics["train/clip_high_share_first"] == 0.0
    assert metrics["train/kl_old_new_first_nats_per_token"] == 0.0


@pytest.mark.parametrize("mode, limit", [("fp32", 1e-6), ("bf16_mixed", 2e-2)])
def test_noise_replicates_differ_in_the_last_bits_only(batch_and_gradient, mode, limit):
    _, gradient = batch_and_gradient
    base, _ = gradient(mode, micro_batch_size=8)
    for replicate in (1, 2):
        other, _ = gradient(mode, micro_batch_size=8, noise_replicate=replicate)
        assert any(not torch.equal(base[k], other[k]) for k in base)
        assert relative_difference(base, other) < limit


@pytest.mark.parametrize("mode", list(PRECISION_MODES))
def test_memory_table_equals_the_bytes_held(data, mode):
    """Unique storages of weights, masters, gradients, moments and theta_0 after a backward pass, per parameter."""
    from utils_run import memory_per_parameter
    trainer = make_trainer(data, mode)
    optimizer, model = trainer.optimizer, trainer.model
    for p in model.parameters():
        p.grad = torch.zeros(p.shape, dtype=p.grad_dtype)
    held = {t.data_ptr(): t.nbytes for group in (optimizer.masters, optimizer.exp_avg, optimizer.exp_avg_sq, optimizer.compensation,
                                                 optimizer.base) for t in group.values()}
    held |= {t.data_ptr(): t.nbytes for p in model.parameters() for t in (p, p.grad)}
    assert sum(held.values()) == sum(p.numel() for p in model.parameters()) * sum(memory_per_parameter(PRECISION_MODES[mode]).values())


def test_truncated_rows_make_no_step_when_filtered(data):
    """Every response cut off and overlong filtering on: no update, one more empty step, nothing divided by zero."""
    trainer = make_trainer(data, max_response_length=1, overlong_filtering=True, overlong_buffer_len=0)
    before = {n: t.clone() for n, t in trainer.optimizer.masters.items()}
    batch = tr.Batch([trainer.prompts[0]] * 4, [[5]] * 4, [[-1.0]] * 4, torch.tensor([1.0, -1.0, 1.0, -1.0]), [False] * 4, 4)
    metrics: dict = {}
    trainer.update(batch, 1, metrics)
    assert metrics["train/updates"] == 0 and trainer.counters["empty_steps"] == 1
    assert all(torch.equal(before[n], t) for n, t in trainer.optimizer.masters.items())


def test_groups_that_never_mix_end_bounded(data, monkeypatch):
    trainer = make_trainer(data, max_gen_batches=3)
    monkeypatch.setattr(trainer, "grade", lambda responses, index: [False] * len(responses))
    metrics = trainer.step(1)
    assert metrics["train/gen_batches"] == 3 and metrics["train/groups_all_wrong_share"] == 1.0
    assert metrics["train/empty_steps"] == 1
    stopping = make_trainer(data, max_gen_batches=2, on_exhausted="stop")
    monkeypatch.setattr(stopping, "grade", lambda responses, index: [True] * len(responses))
    with pytest.raises(tr.WorkError, match="0 of 8 prompts had a learning signal after 2"):
        stopping.step(1)


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_nan_gradient_skips_the_step_and_is_counted(data, mode):
    trainer = make_trainer(data, mode, max_nonfinite_steps=3)
    trainer.grade = lambda responses, index: [sum(response) % 2 == 0 for response in responses]
    before = {n: t.clone() for n, t in trainer.optimizer.masters.items()}
    hook = next(trainer.model.parameters()).register_hook(lambda grad: grad * float("nan"))
    metrics = trainer.step(1)
    assert metrics["train/nonfinite_steps"] == 2 and metrics["train/updates"] == 0
    assert all(torch.equal(before[n], t) for n, t in trainer.optimizer.masters.items())
    with pytest.raises(tr.WorkError, match="max_nonfinite_steps"):
        trainer.step(2)
    hook.remove()


def test_float16_overflow_repeats_the_minibatch_at_half_the_scale(data):
    trainer = make_trainer(data, "fp16_mixed")
    trainer.grade = lambda responses, index: [sum(response) % 2 == 0 for response in responses]
    trainer.scaler.value = 2.0 ** 40  # overflows float16 gradients for certain
    metrics = trainer.step(1)
    assert metrics["train/loss_scale_retries"] > 0 and metrics["train/nonfinite_steps"] == 0
    assert metrics["train/updates"] == 2  # no update was lost


# --- the command ---------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def straight(data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("straight") / "run"
    done = run(data, out)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


def test_command_writes_the_files_it_promises(straight):
    for name in ("config.json", "env.json", "metrics.jsonl", "training_curves.png", "lost_updates.png", "final_model/config.json",
                 "final_model/model.safetensors", "final_model/tokenizer.json", "final_model/rlvr_run.json"):
        assert (straight / name).stat().st_size > 0, name
    rows = read_jsonl(straight / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    env = json.loads((straight / "env.json").read_text())
    assert {"after_setup", "after_first_update"} == set(env["audit"])
    identity = json.loads((straight / "final_model/rlvr_run.json").read_text())
    assert identity["arm"] == "fp32" and identity["seed"] == 1 and identity["synthetic_data"] is True
    from transformers import AutoModelForCausalLM
    loaded = AutoModelForCausalLM.from_pretrained(straight / "final_model", dtype="auto")
    assert loaded.dtype == torch.float32
    assert not same(weights(straight / "final_model"), weights(BASE))


def test_same_seed_twice_is_bit_identical_and_a_kill_changes_nothing(data, straight, tmp_path):
    """4 steps straight = killed (-9) after the checkpoint of step 2, then the same command again."""
    out = tmp_path / "run"
    process = subprocess.Popen(command(data, out), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = out / "metrics.jsonl"
    deadline = time.time() + 200
    while process.poll() is None and time.time() < deadline:
        if metrics.exists() and metrics.read_text().count("\n") >= 3:
            process.kill()
            break
        time.sleep(0.05)
    process.wait()
    assert (out / "checkpoints" / "step_000002").exists() and not (out / "final_model").exists()
    with open(metrics, "a") as handle:
        handle.write('{"step": 3, "cut sh')  # a line that the kill cut short
    done = run(data, out)
    assert done.returncode == 0, done.stderr[-2000:]
    assert same(weights(out / "final_model"), weights(straight / "final_model"))
    assert deterministic(read_jsonl(metrics)) == deterministic(read_jsonl(straight / "metrics.jsonl"))
    again = run(data, out)
    assert again.returncode == 0 and "already finished" in again.stdout


def test_sigterm_finishes_the_step_and_exits_3_and_a_damaged_checkpoint_is_skipped(data, capsys, tmp_path):
    out = tmp_path / "run"
    process = subprocess.Popen(command(data, out, "--num_steps", "400", "--save_every", "1"), cwd=ROOT, stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, text=True)
    deadline = time.time() + 200
    while not (out / "checkpoints" / "step_000002").exists() and time.time() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 3 and "checkpoint written" in stderr
    newest = sorted((out / "checkpoints").glob("step_*"))[-1]
    assert len(read_jsonl(out / "metrics.jsonl")) == int(newest.name[5:])
    (newest / "optimizer.safetensors").write_bytes(b"damaged")
    trainer = make_trainer(data)
    assert tr.resume(trainer, out) == int(newest.name[5:]) - 1  # the one before
    assert f"{newest / 'optimizer.safetensors'} is damaged" in capsys.readouterr().err
    assert read_jsonl(out / "metrics.jsonl")[-1]["step"] == int(newest.name[5:]) - 1


def test_changed_settings_refuse_to_resume(data, straight):
    done = run(data, straight, "--learning_rate", "0.5")
    assert done.returncode == 2
    assert "learning_rate" in done.stderr and "0.5" in done.stderr


@pytest.mark.parametrize("mode", ["bf16", "bf16_kahan", "bf16_storage"])
def test_final_model_has_the_masters_dtype(data, tmp_path, mode):
    done = run(data, tmp_path / "run", "--precision_mode", mode, "--num_steps", "1")
    assert done.returncode == 0, done.stderr[-2000:]
    assert {t.dtype for t in weights(tmp_path / "run" / "final_model").values()} == {torch.bfloat16}


@pytest.mark.parametrize("flags, message", [
    (["--model_name_or_path", "no/such/model"], "does not exist"),
    (["--train_dataset_path", "no_such.json"], "no_such.json does not exist"),
    (["--precision_mode", "bf61"], "did you mean bf16"),
    (["--lerning_rate", "1"], "did you mean --learning_rate"),
    (["--max_prompt_length", "100000"], "context"),
    (["--temperature", "0"], "temperature"),
    (["--model_name_or_path", "Qwen/Qwen2.5-Math-7B"], "configs/tiny.yaml"),
])
def test_bad_requests_are_one_line_and_exit_2(data, tmp_path, flags, message):
    done = run(data, tmp_path / "run", *flags)
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and message in lines[0]
    assert "Traceback" not in done.stderr and not (tmp_path / "run" / "metrics.jsonl").exists()


def test_malformed_data_names_file_and_line(data, tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text('[{"id": "a",\n "problem": }]')
    done = run(broken, tmp_path / "run")
    assert done.returncode == 2 and "broken.json line 2" in done.stderr


def test_unwritable_output_is_refused(data, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    done = run(data, blocker / "run")
    assert done.returncode == 2 and "not writable" in done.stderr


def test_contradicting_settings_are_refused():
    with pytest.raises(UserError, match="top_p"):
        tr.check_settings(TrainConfig(rollout_is="token_tis", top_p=0.9))
    with pytest.raises(UserError, match="overlong_buffer_len"):
        tr.check_settings(TrainConfig(overlong_buffer_len=99, max_response_length=10))
    os.environ.pop("WORLD_SIZE", None)
    tr.check_settings(TrainConfig())
