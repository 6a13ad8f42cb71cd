"""Tests of scripts/prepare_tiny_base.py and of the model committed under data/tiny_base."""

import dataclasses
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "prepare_tiny_base.py"
BASE = ROOT / "data" / "tiny_base"
MAX_BYTES = 4_000_000
EVAL_SETTING = "temperature_0.7_top_p_0.8"  # the study's evaluation settings
SMOKE_STEPS = 20


sys.path.insert(0, str(ROOT / "scripts"))
import prepare_tiny_base as tiny  # noqa: E402
import synthetic_problems as synthetic  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.build_tokenizer()


def command(folder, *flags):
    return [sys.executable, str(SCRIPT), "--output_dir", str(folder), "--steps", str(SMOKE_STEPS), "--measure_every", "10",
            "--quick_problems", "4", "--measure_problems", "4", "--num_threads", "1", *flags]


@pytest.fixture(scope="module")
def smoke_runs(tmp_path_factory):
    """The same command twice, side by side, in two folders."""
    folders = [tmp_path_factory.mktemp(name) / "base" for name in ("first", "second")]
    runs = [subprocess.Popen(command(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder.parent)
            for folder in folders]
    for run in runs:
        output, _ = run.communicate(timeout=300)
        assert run.returncode == 0, output
    return folders


# --- Tokenizer -------------------------------------------------------------------------------------------------------------


def test_round_trip_is_exact_on_every_problem_and_on_any_text(tokenizer):
    texts = [synthetic.plain_prompt(r) + synthetic.canonical_response(r) for name in synthetic.FAMILIES
             for split in synthetic.SPLITS for r in synthetic.make_problems(name, split, 200, 1)]
    alphabet = [*(chr(code) for code in range(32, 127)), *"\n\t\u00e9\u03c0\u221a\u6570\U0001f600", *tiny.LONG_TOKENS]
    rng = random.Random(0)
    texts += ["".join(rng.choices(alphabet, k=40)) for _ in range(500)]
    for text in texts:
        ids = tokenizer(text).input_ids
        assert not {tokenizer.pad_token_id, tokenizer.eos_token_id} & set(ids)  # unknown would be <eos>
        assert tokenizer.decode(ids) == text


def test_prompt_and_response_encode_apart_as_they_do_together(tokenizer):
    for name in synthetic.FAMILIES:
        for record in synthetic.make_problems(name, "eval", 100, 1):
            prompt, response = synthetic.plain_prompt(record), synthetic.canonical_response(record)
            apart = tokenizer(prompt).input_ids + tokenizer(response).input_ids
            assert apart == tokenizer(prompt + response).input_ids
            assert len(tokenizer(response).input_ids) < tiny.MAX_NEW_TOKENS  # EOS still fits
            assert len(apart) < tiny.ROW_TOKENS


def test_tokenizer_adds_nothing_and_keeps_digits_apart(tokenizer):
    assert tokenizer.convert_ids_to_tokens(tokenizer("\\boxed{123}").input_ids) == ["\\boxed{", "1", "2", "3", "}"]
    assert tokenizer.bos_token is None and tokenizer.chat_template is None


def test_auto_tokenizer_gives_the_same_ids_from_disk(tokenizer, tmp_path):
    # AutoTokenizer rebuilds any tokenizer of a qwen2 model as a Qwen2 tokenizer: another kind came back with other ids
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    tiny.build_model(tokenizer, 0).config.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    for name in synthetic.FAMILIES:
        for record in synthetic.make_problems(name, "eval", 50, 0):
            text = synthetic.plain_prompt(record) + synthetic.canonical_response(record)
            assert loaded(text).input_ids == tokenizer(text).input_ids and loaded.decode(loaded(text).input_ids) == text


# --- Training data ---------------------------------------------------------------------------------------------------------


def test_slips_are_wrong_and_one_character_away():
    rng = random.Random(0)
    for name in tiny.MIXTURE:
        for record in synthetic.make_problems(name, "pretrain", 200, 0):
            right, wrong = synthetic.canonical_response(record), tiny.slip(record, rng)
            assert len(right) == len(wrong) and sum(a != b for a, b in zip(right, wrong)) == 1
            assert tiny.is_right(record, right) and not tiny.is_right(record, wrong)


@pytest.fixture(scope="module")
def batch(tokenizer):
    return tiny.draw_batch(tiny.make_pools(tokenizer, 0), tokenizer, random.Random(0), num_rows=8)


def test_loss_falls_on_response_tokens_and_eos_only(tokenizer, batch):
    for ids, targets in zip(batch["input_ids"], batch["targets"]):
        for t in (targets >= 0).nonzero().flatten().tolist():
            if targets[t] == tokenizer.eos_token_id:
                assert ids[t + 1] == tokenizer.eos_token_id
                answer = tokenizer.decode([i for i in targets[:t].tolist() if i >= 0]).rsplit("<eos>", 1)[-1]
                assert answer.startswith(("\\boxed{", "    return "))
            else:
                assert ids[t + 1] == targets[t]


def test_packed_sequences_do_not_see_each_other(tokenizer, batch):
    model = tiny.build_model(tokenizer, 0).eval()
    batch = {key: value for key, value in batch.items() if key != "targets"}
    with torch.no_grad():
        packed = model(**batch).logits[0]
        start = int((batch["position_ids"][0] == 0).nonzero()[1])  # where the second sequence of the row begins
        end = start + int((batch["input_ids"][0, start:] == tokenizer.eos_token_id).nonzero()[0])
        alone = model(input_ids=batch["input_ids"][:1, start:end]).logits[0]
    # float32 sums in another order: observed differences below 1e-6 at logits of size 1
    torch.testing.assert_close(packed[start:end], alone, atol=1e-5, rtol=0)


def test_orthogonalize_flattens_singular_values():
    torch.manual_seed(0)
    for shape in ((3, 16, 40), (3, 40, 16)):
        singular = torch.linalg.svdvals(tiny.orthogonalize(torch.randn(shape)))
        # the five steps with these coefficients map singular values into about 0.68 to 1.13 (the source's own figure)
        assert singular.min() > 0.6 and singular.max() < 1.25


def test_schedule_warms_up_and_falls_in_each_phase():
    for phase in tiny.PHASES:
        factors = [tiny.learning_rate_factor(step, phase) for step in range(phase.steps)]
        top = factors.index(max(factors))
        # at the last warm-up step the decay has begun: at most warmup / schedule below 1
        assert 1 - phase.warmup_steps / phase.schedule_steps <= max(factors) <= 1 and abs(top - phase.warmup_steps) <= 1
        assert factors == [*sorted(factors[:top]), *sorted(factors[top:], reverse=True)] and min(factors) > 0


# --- Grading of the skill measurement --------------------------------------------------------------------------------------


def test_generated_functions_are_executed_and_nothing_dangerous_is():
    record = next(r for r in synthetic.make_problems("humaneval", "eval", 50, 0) if r["answer"].count("x") == 1)
    name, argument = record["entry_point"], record["prompt"].split("(")[1].split(")")[0]
    assert tiny.is_right(record, record["answer"])
    assert tiny.is_right(record, record["answer"].replace("return ", "return (") + ")")  # same value, another text
    for body in ("", "    return", f"    return {argument} ** 9 ** 9 ** 9", f"    return {name}({argument})", "    return open('x')",
                 "    return ().__class__", "    while 1: pass", "    return 1\nimport os", "\x00"):
        assert not tiny.is_right(record, body), body


def test_only_the_last_box_counts():
    record = {"task_type": "math", "answer": "7"}
    assert tiny.is_right(record, "\\boxed{8}\\boxed{7}")
    assert not any(tiny.is_right(record, text) for text in ("7", "\\boxed{7}\\boxed{8}", "\\boxed{7", "\\boxed{7} "))


def test_avg_and_standard_error_by_hand():
    # problem means 1, 0.5, 0: mean 0.5, variance 0.25, se sqrt(0.25 / 3)
    mean, se = tiny.avg_and_se([[True, True], [True, False], [False, False]])
    assert mean == 0.5 and se == pytest.approx((0.25 / 3) ** 0.5)


# --- The command -----------------------------------------------------------------------------------------------------------


def check_checkpoint(folder):
    """bf16, small, tied embedding stored once, loads as it says, ids in place."""
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with safe_open(folder / "model.safetensors", "pt") as tensors:
        names = list(tensors.keys())
        assert all(tensors.get_tensor(name).dtype == torch.bfloat16 for name in names)
        assert not any("lm_head" in name for name in names)
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MAX_BYTES
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == "qwen2" and model.dtype == torch.bfloat16
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    for config in (model.config, model.generation_config):
        assert (config.pad_token_id, config.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)
        assert config.bos_token_id is None
    assert tokenizer.get_vocab() == tiny.build_tokenizer().get_vocab()
    text = "Simplify \\frac{4}{6}.\n\\boxed{\\frac{2}{3}} x  =  y ,z"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    return model, tokenizer


def test_a_short_run_ends_in_a_loadable_checkpoint(smoke_runs):
    model, _ = check_checkpoint(smoke_runs[0])
    training = json.loads((smoke_runs[0] / "training.json").read_text())
    assert training["steps"] == SMOKE_STEPS and training["num_parameters"] == model.num_parameters()
    assert training["skill"]["measured"] is True and set(training["skill"][EVAL_SETTING]) == set(synthetic.FAMILIES) - {"dm_train"}
    losses = [row["loss"] for row in training["log"]]
    assert losses[1] < losses[0]
    assert [path.name for path in smoke_runs[0].parent.iterdir()] == ["base"]  # nothing left beside it


def test_the_same_command_gives_the_same_bits(smoke_runs):
    first, second = ((folder / "model.safetensors").read_bytes() for folder in smoke_runs)
    assert first == second


@pytest.mark.parametrize("flags, words", [
    (("--steps", "0"), "--steps must be between 1 and"),
    (("--sed", "3"), "--seed"),
])
def test_a_wrong_request_is_one_line_and_exit_code_2(tmp_path, flags, words):
    run = subprocess.run(command(tmp_path / "base", *flags), capture_output=True, text=True, timeout=120)
    assert run.returncode == 2 and words in run.stderr and len(run.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "base").exists()


# --- The committed model ---------------------------------------------------------------------------------------------------


def check_skill(avg):
    """The bounds that make the base a useful subject: every number can move both ways."""
    assert 0.25 <= avg["dm_val"] <= 0.70
    off_task = {name: value for name, value in avg.items() if name != "dm_val"}
    assert len(off_task) == 7 and sum(0.05 <= value <= 0.95 for value in off_task.values()) >= 5


def test_the_committed_model_is_small_bf16_and_loads():
    model, _ = check_checkpoint(BASE)
    training = json.loads((BASE / "training.json").read_text())
    assert training["num_parameters"] == model.num_parameters() < 1_000_000
    assert training["weights_sha256"] == tiny.sha256_file(BASE / "model.safetensors")


def test_the_committed_model_was_made_by_the_default_command():
    training = json.loads((BASE / "training.json").read_text())
    default = tiny.TinyBaseConfig()
    assert (training["seed"], training["steps"], training["num_threads"]) == (default.seed, default.steps, default.num_threads)
    assert training["phases"] == [dataclasses.asdict(phase) for phase in tiny.PHASES]
    assert training["mixture"] == {name: {"share": s, "wrong": w} for name, (s, w, _) in tiny.MIXTURE.items()}


def test_the_recorded_skill_leaves_room_both_ways():
    skill = json.loads((BASE / "training.json").read_text())["skill"]
    assert skill["measured"] is True and skill["num_problems"] == 256 and skill["num_samples"] == 4
    check_skill({name: row["avg_at_4"] for name, row in skill[EVAL_SETTING].items()})


@pytest.mark.slow
def test_the_recorded_skill_is_measured_again():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    names = [name for name in synthetic.FAMILIES if name != "dm_train"]
    right = tiny.measure(model, AutoTokenizer.from_pretrained(BASE), names, 256, 4, 0.7, 0.8)
    check_skill({name: tiny.avg_and_se(rows)[0] for name, rows in right.items()})
    recorded = json.loads((BASE / "training.json").read_text())["skill"][EVAL_SETTING]
    for name, rows in right.items():
        # same seed, but another machine may round otherwise and sample other tokens: five standard errors of a difference
        assert abs(tiny.avg_and_se(rows)[0] - recorded[name]["avg_at_4"]) <= 5 * 2**0.5 * recorded[name]["se"] + 1e-4
