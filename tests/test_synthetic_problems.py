"""Tests of scripts/synthetic_problems.py."""

import importlib.util
import math
import re
from fractions import Fraction
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


synthetic = load_script("synthetic_problems")
EVAL_COUNT = 256  # what the tiny study evaluates
SETS = tuple(synthetic.FAMILIES)
MATH_SETS = tuple(name for name in SETS if name not in ("mmlu_stem", "humaneval"))


def problems(name, split, count=EVAL_COUNT, seed=0):
    return synthetic.make_problems(name, split, count, seed)


# --- Independent recomputation from the text alone ----------------------------------------------------------------------


def numbers(text):
    return [int(n) for n in re.findall(r"\d+", text)]


def solve_dm(text):
    return str(eval(text.removesuffix(" = ?")))


def solve_aime24(text):
    a, m = numbers(text)
    while a >= m:
        a -= m
    return str(a)


def solve_aime25(text):
    a, b = numbers(text)
    if "gcd" in text:
        return str(max(d for d in range(1, min(a, b) + 1) if a % d == b % d == 0))
    return str(min(m for m in range(1, a * b + 1) if m % a == m % b == 0))


def solve_amc23(text):
    left, right = text.removeprefix("Solve ").removesuffix(".").split(" = ")
    left = compile(left.replace("x", " * x"), "equation", "eval")
    found = [x for x in range(-200, 201) if eval(left, {"x": x}) == int(right)]
    assert len(found) == 1
    return str(found[0])


def solve_math500(text):
    as_python = re.sub(r"\\frac\{(\d+)\}\{(\d+)\}", r"Fraction(\1, \2)", text).replace("\\cdot", "*")
    value = eval(as_python.removeprefix("Simplify ").removesuffix(" = ?").removesuffix("."), {"Fraction": Fraction})
    return str(value.numerator) if value.denominator == 1 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def solve_gsm8k(text):
    a, b, *rest = numbers(text)
    if "bags of" in text:
        return str(a * b)
    if "buys" in text and "loses" in text:
        return str(a + b - rest[0])
    return str(a + b if "buys" in text else a - b)


SOLVERS = {"dm_train": solve_dm, "dm_val": solve_dm, "aime24": solve_aime24, "aime25": solve_aime25, "amc23": solve_amc23,
           "math500": solve_math500, "gsm8k": solve_gsm8k}


@pytest.mark.parametrize("name", MATH_SETS)
def test_gold_answers_equal_an_independent_solution(name):
    for split in synthetic.SPLITS:
        for record in problems(name, split):
            assert SOLVERS[name](record["problem"]) == record["answer"], record["problem"]


def test_exactly_one_choice_has_the_property_and_it_is_the_gold_letter():
    has = {"Which is negative?": lambda v, _: v < 0, "Which is even?": lambda v, _: v % 2 == 0,
           "Which is odd?": lambda v, _: v % 2 != 0, "Which ends in 5?": lambda v, _: str(v)[-1] == "5",
           "Which is largest?": lambda v, others: v == max(others)}
    records = problems("mmlu_stem", "eval")
    assert {record["problem"] for record in records} == set(has)
    for record in records:
        values = [int(choice) for choice in record["choices"]]
        right = ["ABCD"[i] for i, v in enumerate(values) if has[record["problem"]](v, values)]
        assert len(set(values)) == 4 and right == [record["answer"]]


def test_gold_letters_are_spread_evenly():
    letters = [record["answer"] for record in problems("mmlu_stem", "eval", 1000)]
    # binomial(1000, 1/4) has standard deviation 13.7: five of them; the seed is fixed, so this cannot flicker
    assert all(abs(letters.count(letter) - 250) < 69 for letter in "ABCD")


# --- Code ------------------------------------------------------------------------------------------------------------------


def run_check(record, body):
    space = {}
    exec(record["prompt"] + body + record["test"], space)
    space["check"](space[record["entry_point"]])


def test_every_canonical_body_passes_its_own_tests():
    for record in problems("humaneval", "eval") + problems("humaneval", "pretrain", 2000):
        run_check(record, record["answer"])


def test_no_wrong_constant_or_operator_passes_the_tests():
    caught = 0
    for record in problems("humaneval", "eval"):
        right = record["answer"]
        wrong = {re.sub(r"\d+$", lambda m: str(int(m[0]) + 1), right), right.replace("+", "-"), right.replace("-", "+"),
                 right.replace("sum", "max"), right.replace("max", "min"), right.replace("min", "len")} - {right}
        for body in wrong:
            with pytest.raises(AssertionError):
                run_check(record, body)
            caught += 1
    assert caught > EVAL_COUNT


# --- Splits, ids, sizes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in SETS if name != "dm_val"])
def test_no_text_is_in_two_splits(name):
    counts = {"pretrain": 2000, "train": 600, "eval": EVAL_COUNT}
    texts = {split: {synthetic.plain_prompt(r) for seed in (0, 1) for r in problems(name, split, count, seed)}
             for split, count in counts.items()}
    assert not texts["pretrain"] & texts["train"]
    assert not texts["pretrain"] & texts["eval"]
    assert not texts["train"] & texts["eval"]


def test_swapped_operands_share_a_split():
    def place(text):
        a, sign, b = text.split()
        return synthetic.split_of("arithmetic", f"{min(int(a), int(b))} {sign} {max(int(a), int(b))}")

    sums = [r["problem"].removesuffix(" = ?") for r in problems("dm_train", "train", 500) if "-" not in r["problem"]]
    assert sums and all(place(text) == "train" for text in sums)
    held_out = {r["problem"].removesuffix(" = ?") for r in problems("dm_val", "eval", 500)}
    assert not {" ".join(reversed(text.split())) for text in sums} & held_out


def test_dm_train_and_dm_val_are_one_family_without_overlap():
    train = {r["problem"] for r in problems("dm_train", "train", 2000)}
    val = {r["problem"] for r in problems("dm_val", "eval", 1000)}
    assert len(train) == 2000 and len(val) == 1000 and not train & val


def test_ids_are_unique_over_all_sets_and_splits():
    ids = [r["id"] for name in SETS for split in synthetic.SPLITS for r in problems(name, split, 50)]
    assert len(set(ids)) == len(ids)
    assert problems("aime24", "eval", 8)[7]["id"] == "aime24-0007"


@pytest.mark.parametrize("name", SETS)
def test_records_follow_the_contract_and_are_short(name):
    for record in problems(name, "eval"):
        assert {"id", "problem", "answer", "task_type", "source"} <= set(record)
        assert record["source"] == "synthetic" and isinstance(record["answer"], str)
        if record["task_type"] == "code":
            assert {"prompt", "entry_point", "test"} <= set(record)
        assert len(synthetic.plain_prompt(record)) <= 66  # characters; about 25 tokens of the tiny model
        assert len(synthetic.canonical_response(record)) <= 30


def test_same_arguments_give_the_same_problems_and_another_seed_others():
    assert problems("gsm8k", "eval", 40) == problems("gsm8k", "eval", 40)
    assert problems("gsm8k", "eval", 40) != problems("gsm8k", "eval", 40, seed=1)


def test_splits_have_about_their_share():
    keys = [f"{a} - {b}" for a in range(10, 100) for b in range(10, 100)]
    share = sum(synthetic.split_of("arithmetic", key) == "eval" for key in keys) / len(keys)
    # 8100 keys at 10 %: standard deviation 0.0033; four of them
    assert math.isclose(share, synthetic.SPLIT_SHARES["eval"], abs_tol=0.0134)


def test_an_exhausted_split_and_unknown_names_say_so():
    with pytest.raises(ValueError, match="aime24/eval has only about"):
        problems("aime24", "eval", 5000)
    with pytest.raises(ValueError, match="unknown synthetic set 'aime26'"):
        problems("aime26", "eval", 1)
    with pytest.raises(ValueError, match="unknown split 'test'"):
        problems("aime24", "test", 1)


def test_plain_prompt_is_the_one_the_study_uses():
    import utils_data
    for name in SETS:
        record = problems(name, "eval", 1)[0]
        assert utils_data.plain_text(record) == synthetic.plain_prompt(record)
