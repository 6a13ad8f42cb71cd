"""Tests of scripts/prepare_data.py: conversion, duplicates, leaks, manifest, and the command itself."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from config import PrepareDataConfig, UserError, WorkError
from utils_data import load_manifest_entry, load_problems

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import prepare_data  # noqa: E402

SAMPLE_FILES = {f"{name}.json" for name in ("dm_train", "dm_val", "aime24", "aime25", "amc23", "math500", "gsm8k", "mmlu_stem", "humaneval")}
REAL_FILES = SAMPLE_FILES | {"gsm8k_train.json", "dapo_aime2024.json"}

DAPO_HEAD = ("Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
             "(without quotes) where $Answer is the answer to the problem.\n\n")
DAPO_TAIL = "\n\nRemember to put your answer on its own line after \"Answer:\"."


def dapo(problem, answer, head=DAPO_HEAD, tail=DAPO_TAIL):
    return {"prompt": [{"content": head + problem + tail, "role": "user"}], "reward_model": {"ground_truth": answer}}


def small_raw(**changed):
    """Rows by file name: a complete raw folder in miniature, all problems different; ``changed`` replaces whole files."""
    math = [{"problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(1, 9)]
    rows = {
        "dapo_math_sample": [dapo(f"Find the {i}-th prime.", str(i)) for i in range(1, 5)],
        "math_train": math,
        "gsm8k_train": [{"question": f"Tom has {i} eggs and buys 1. How many?", "answer": f"It is {i + 1}.\n#### {i + 1}"} for i in range(3)],
        "aime24": [{"id": 60, "problem": "Count the walks.", "answer": "025"}],
        "aime25": [{"id": "19", "problem": "Find the angle sum.", "answer": "336^\\circ"}],
        "amc23": [{"id": 0, "question": "Where do they meet?", "answer": "27.0"}],
        "math500": [{"problem": "Simplify $\\frac{2}{4}$.", "answer": "\\frac{1}{2}", "subject": "Algebra", "level": 1, "unique_id": "a"}],
        "gsm8k_test": [{"question": "A house costs $1,000 more. How much?", "answer": "First 5.\n#### 70,000"}],
        "mmlu_stem": [{"question": "Which is odd?", "subject": "astronomy", "choices": ["2", "4", "5", "6"], "answer": 2}],
        "humaneval": [{"task_id": "HumanEval/0", "prompt": "def f(x):\n", "canonical_solution": "    return x\n", "entry_point": "f",
                       "test": "def check(candidate):\n    assert candidate(1) == 1\n"}],
        "dapo_aime2024": [dapo("Count the walks.", "025")] * 3,
    }
    return {**rows, **changed}


def write_raw(folder, rows):
    folder.mkdir(exist_ok=True)
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


def prepare_raw(tmp_path, rows, **options):
    """Run the whole conversion on ``rows``; returns (output folder, manifest entries)."""
    raw, out = write_raw(tmp_path / "raw", rows), tmp_path / "out"
    prepare_data.main(PrepareDataConfig(source="raw", raw_dir=str(raw), output_dir=str(out), **{"val_problems": 2, **options}))
    return out, json.loads((out / "manifest.json").read_text())["files"]


def run_script(*arguments, **environment):
    return subprocess.run([sys.executable, str(ROOT / "scripts/prepare_data.py"), *map(str, arguments)], capture_output=True, text=True,
                          env={**os.environ, **environment}, cwd=ROOT)


def folder_bytes(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- One row -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text, expected", [
    (r"so $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"), (r"\boxed{1} and then \boxed{2}", "2"), (r"is \fbox{3}", "3"),
    (r"is \boxed 5.", "5"), (r"\boxed{a\{b\}c}", r"a\{b\}c"), (r"\boxed{1", None), ("no box", None), (r"\boxed{ x }", "x"),
])
def test_last_box_of_a_solution(text, expected):
    assert prepare_data.last_boxed(text) == expected


@pytest.mark.parametrize("text, expected", [("025", "25"), ("27.0", "27"), (r"336^\circ", "336"), (r"$73^{\circ}$", "73"), ("0", "0"), ("-4", "-4")])
def test_integer_answers_are_plain_integers(text, expected):
    assert prepare_data.integer_answer(text) == expected


@pytest.mark.parametrize("text", ["27.5", "1/2", "", "abc"])
def test_other_answers_are_refused_as_integers(text):
    with pytest.raises(UserError, match="not an integer"):
        prepare_data.integer_answer(text)


def test_dapo_instruction_goes_and_half_an_instruction_is_an_error():
    assert prepare_data.strip_dapo_wrapper(DAPO_HEAD + "What is $1$?\n\nExplain." + DAPO_TAIL) == "What is $1$?\n\nExplain."
    for broken in ("What is $1$?", DAPO_HEAD + "What is $1$?", "What is $1$?" + DAPO_TAIL):
        with pytest.raises(UserError, match="lacks DAPO's instruction"):
            prepare_data.strip_dapo_wrapper(broken)


def test_gsm8k_answer_is_the_number_after_the_hashes():
    row = prepare_data.gsm8k_row({"question": "q", "answer": "5 #### no\n2,000*3 = 6,000\n#### 1,206,000"})
    assert row["answer"] == "1206000"


def test_math_answer_comes_from_the_last_box_where_the_set_has_solutions():
    row = prepare_data.math_train_row({"problem": "p", "solution": r"$\boxed{1}$, no: $\boxed{\sqrt{2}}$", "level": "Level 2", "type": "Algebra"})
    assert (row["answer"], row["level"], row["type"]) == (r"\sqrt{2}", "Level 2", "Algebra")


def test_math_problem_whose_solution_boxes_nothing_is_left_out_and_counted():
    rows = [{"problem": "p", "solution": "by inspection"}, {"problem": "q", "solution": r"\boxed{3}"}]
    problems = prepare_data.convert("math_train", rows, {"name": "x", "revision": None}, "x")
    assert [r["answer"] for r in problems.records] == ["3"] and problems.origin[0]["rows_without_answer"] == 1


# --- Duplicates, leaks, split ----------------------------------------------------------------------------------------------

def test_problems_of_the_benchmarks_are_removed_from_dm_and_counted(tmp_path):
    rows = small_raw()
    rows["math_train"] += [{"problem": "simplify \\[ \\dfrac{2}{4} \\]", "answer": "\\frac{1}{2}"},     # MATH-500, typeset anew
                           {"problem": "Which is odd?", "answer": "5"}]                            # MMLU, without its choices
    rows["dapo_math_sample"] += [dapo("Count the  walks", "25")]
    out, entries = prepare_raw(tmp_path, rows)
    removed = entries["dm_train.json"]["removed_in_evaluation"]
    assert {name: n for name, n in removed.items() if n} == {"aime24": 1, "math500": 1, "mmlu_stem": 1}
    problems = [r["problem"] for f in ("dm_train.json", "dm_val.json") for r in load_problems(out / f)]
    assert len(problems) == 12 and not any("dfrac" in p or "odd" in p or "walks" in p for p in problems)
    assert set(entries["dm_train.json"]["leak_check"].values()) == {0} and "dm_val" in entries["dm_train.json"]["leak_check"]


def test_gsm8k_train_is_cleaned_too(tmp_path):
    rows = small_raw()
    rows["gsm8k_train"].append({"question": "A house costs 1,000 more. How much", "answer": "#### 70000"})
    out, entries = prepare_raw(tmp_path, rows)
    assert entries["gsm8k_train.json"]["removed_in_evaluation"]["gsm8k"] == 1 and entries["gsm8k_train.json"]["rows"] == 3


def test_duplicates_are_removed_once_and_conflicting_ones_altogether(tmp_path):
    rows = small_raw()
    rows["math_train"] += [{"problem": "what is $1+1$", "answer": "2"},                              # a repeat of the first row
                           {"problem": "What is 2+2?", "answer": "5"}]                              # contradicts the second row
    out, entries = prepare_raw(tmp_path, rows)
    entry = entries["dm_train.json"]
    assert (entry["removed_duplicates"], entry["removed_conflicting_answers"]) == (1, 2)
    problems = [r["problem"] for f in ("dm_train.json", "dm_val.json") for r in load_problems(out / f)]
    assert problems.count("What is 1 + 1?") == 1 and not any("2 + 2" in p or "2+2" in p for p in problems)


def test_validation_is_a_seeded_part_of_dm(tmp_path):
    ids = {}
    for seed in (0, 1):
        out, entries = prepare_raw(tmp_path, small_raw(), data_seed=seed, val_problems=3)
        train, val = ([r["id"] for r in load_problems(out / f)] for f in ("dm_train.json", "dm_val.json"))
        assert len(train) == 9 and len(val) == 3 and not set(train) & set(val)
        assert entries["dm_val.json"]["held_out"] == {"val_problems": 3, "seed": seed}
        ids[seed] = val
    assert ids[0] != ids[1]


def test_validation_must_leave_something_to_train_on(tmp_path):
    with pytest.raises(UserError, match="--val_problems 12 leaves nothing"):
        prepare_raw(tmp_path, small_raw(), val_problems=12)


def test_leak_check_finds_a_planted_problem():
    record = {"id": "a", "problem": "What is 1 + 1?", "answer": "2", "task_type": "math", "source": "t"}
    same = {**record, "id": "b", "problem": "what is $1+1$"}
    sets = {"dm_train": prepare_data.ProblemSet([record], [], False), "math500": prepare_data.ProblemSet([same], [], False)}
    with pytest.raises(WorkError, match="1 problems of math500 are also in dm_train"):
        prepare_data.check_leaks(sets)


def test_benchmark_repeats_stay_and_repeated_copies_of_one_problem_go(tmp_path):
    rows = small_raw()
    rows["mmlu_stem"] *= 2
    out, entries = prepare_raw(tmp_path, rows)
    assert entries["mmlu_stem.json"]["rows"] == 2
    assert entries["dapo_aime2024.json"]["rows"] == 1 and entries["dapo_aime2024.json"]["parts"][0]["exact_repeats"] == 2


# --- The three sources -------------------------------------------------------------------------------------------------

def test_sample_command_writes_the_nine_synthetic_sets_and_reruns_to_the_same_bytes(tmp_path):
    first, second = run_script("--output_dir", tmp_path / "a"), run_script("--output_dir", tmp_path / "b")
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert folder_bytes(tmp_path / "a").keys() == SAMPLE_FILES | {"manifest.json"}
    assert folder_bytes(tmp_path / "a") == folder_bytes(tmp_path / "b")
    for name in SAMPLE_FILES:
        records, entry = load_problems(tmp_path / "a" / name), load_manifest_entry(tmp_path / "a" / name)
        assert entry["synthetic"] is True and entry["modified"] is False and entry["rows"] == len(records)
        assert len(records) >= (2000 if name == "dm_train.json" else 256)
        assert entry["sha256"] == hashlib.sha256((tmp_path / "a" / name).read_bytes()).hexdigest()
    assert {r["task_type"] for r in load_problems(tmp_path / "a/mmlu_stem.json")} == {"mcq"}
    train, val = ({r["problem"] for r in load_problems(tmp_path / f"a/{n}.json")} for n in ("dm_train", "dm_val"))
    assert not train & val


def test_asking_for_more_samples_than_there_are_is_refused_and_nothing_is_written(tmp_path):
    done = run_script("--output_dir", tmp_path / "a", "--train_problems", 10**6)
    assert done.returncode == 2 and "--train_problems" in done.stderr and done.stderr.count("\n") == 1
    assert not list((tmp_path / "a").iterdir())


def test_small_raw_folder_gives_every_set(tmp_path):
    out, entries = prepare_raw(tmp_path, small_raw())
    assert set(entries) == REAL_FILES and {p.name for p in out.iterdir()} == REAL_FILES | {"manifest.json"}
    answer = {name: load_problems(out / name)[0]["answer"] for name in REAL_FILES}
    assert (answer["aime24.json"], answer["aime25.json"], answer["amc23.json"]) == ("25", "336", "27")
    assert (answer["gsm8k.json"], answer["mmlu_stem.json"], answer["math500.json"]) == ("70000", "C", "\\frac{1}{2}")
    assert load_problems(out / "humaneval.json")[0]["id"] == "HumanEval/0"
    assert all(entry["synthetic"] is False and entry["revision"] is None for entry in entries.values())
    before = folder_bytes(out)
    assert folder_bytes(prepare_raw(tmp_path, small_raw())[0]) == before


def test_only_the_asked_for_sets_are_written_but_training_is_checked_against_all(tmp_path):
    rows = small_raw()
    rows["gsm8k_train"].append({"question": "Where do they meet?", "answer": "#### 27"})
    out, entries = prepare_raw(tmp_path, rows, sets=["gsm8k_train", "gsm8k"])
    assert set(entries) == {"gsm8k.json", "gsm8k_train.json"}
    assert entries["gsm8k_train.json"]["removed_in_evaluation"]["amc23"] == 1


def test_later_run_keeps_the_manifest_entries_of_other_files(tmp_path):
    prepare_raw(tmp_path, small_raw(), sets=["gsm8k"])
    out, entries = prepare_raw(tmp_path, small_raw(), sets=["math500"])
    assert set(entries) == {"gsm8k.json", "math500.json"}
    (out / "gsm8k.json").unlink()
    assert set(prepare_raw(tmp_path, small_raw(), sets=["math500"])[1]) == {"math500.json"}


@pytest.mark.parametrize("name", ["humaneval", "dapo_math_sample", "gsm8k_train"])
def test_missing_raw_file_is_named_and_nothing_is_written(tmp_path, name):
    rows = small_raw()
    del rows[name]
    with pytest.raises(UserError, match=f"lacks {name}.jsonl"):
        prepare_raw(tmp_path, rows)
    assert not list((tmp_path / "out").iterdir())


def test_optional_raw_file_may_be_missing_unless_asked_for(tmp_path):
    rows = small_raw()
    del rows["dapo_aime2024"]
    assert set(prepare_raw(tmp_path, rows)[1]) == REAL_FILES - {"dapo_aime2024.json"}
    with pytest.raises(UserError, match="lacks dapo_aime2024.jsonl"):
        prepare_raw(tmp_path, rows, sets=["dapo_aime2024"])


@pytest.mark.parametrize("name, row, expected", [
    ("gsm8k_test", {"question": "q", "answer": "18"}, "row 0: the answer has no '#### ' line"),
    ("math500", {"problem": "p"}, "row 0: field 'answer' is missing"),
    ("math500", {"problem": "p", "answer": ""}, "row 0 (id 'math500-00000'): field 'answer' is empty"),
    ("mmlu_stem", {"question": "q", "choices": ["a", "b"], "answer": 2, "subject": "astronomy"}, "row 0: answer 2 is no index into 2"),
    ("dapo_math_sample", {"prompt": [], "reward_model": {}}, "row 0: a field has the wrong type"),
    ("dapo_math_sample", dapo("p", "1", head=""), "row 0: the prompt lacks DAPO's instruction"),
    ("aime24", {"problem": "p", "answer": "x"}, "row 0: answer 'x' is not an integer"),
])
def test_broken_row_is_named_with_its_file(tmp_path, name, row, expected):
    with pytest.raises(UserError) as error:
        prepare_raw(tmp_path, small_raw(**{name: [row]}))
    assert f"{name}.jsonl" in str(error.value) and expected in str(error.value)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("arguments, expected", [
    (("--source", "raw"), "--source raw needs --raw_dir"), (("--raw_dir", "x"), "--raw_dir is only for"),
    (("--source", "raw", "--raw_dir", "/nonexistent"), "is not a folder"), (("--source", "web"), "'web' is not one of"),
    (("--revision", "math500=abc"), "only for --source hub"), (("--source", "hub", "--revision", "math500"), "expected NAME=COMMIT"),
    (("--source", "hub", "--revision", "math50=abc"), "did you mean math500?"), (("--sets", "gsm8"), "did you mean gsm8k?"),
    (("--eval_problems", "0"), "must be at least 1"), (("--output_dirs", "x"), "did you mean --output_dir?"),
    (("--sets", "gsm8k_train"), "--source sample"),
])
def test_wrong_request_is_one_line_and_exit_code_2(tmp_path, arguments, expected):
    done = run_script("--output_dir", tmp_path, *arguments)
    assert done.returncode == 2 and expected in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_hub_out_of_reach_is_one_line_exit_code_1_and_nothing_written(tmp_path):
    done = run_script("--source", "hub", "--output_dir", tmp_path / "out", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hf"))
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "hub cannot be reached" in done.stderr
    assert not list((tmp_path / "out").iterdir())


def test_hub_reader_hands_the_same_rows_to_the_same_converter(tmp_path, monkeypatch):
    """`datasets` reads a local folder like a hub repository: nested fields arrive as they do from JSON lines."""
    import datasets
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [dapo("Find the 1-st prime.", "2")] * 3 + [dapo("Find the 2-nd prime.", "3")]
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    source = prepare_data.replace(prepare_data.SOURCES["dapo"], hub_id=str(tmp_path / "repo"))
    loaded = list(prepare_data.hub_rows(source, "main"))
    assert loaded == rows
    problems = prepare_data.convert("dapo", loaded, {"name": "x", "revision": "c"}, "x")
    assert [(r["problem"], r["answer"]) for r in problems.records] == [("Find the 1-st prime.", "2"), ("Find the 2-nd prime.", "3")]
    assert problems.origin[0]["rows"] == 4 and problems.origin[0]["exact_repeats"] == 2


def test_output_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    done = run_script("--output_dir", tmp_path / "file")
    assert done.returncode == 2 and "not writable" in done.stderr


# --- The real benchmarks -----------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def real(datasets_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("real")
    prepare_data.main(PrepareDataConfig(source="raw", raw_dir=str(datasets_dir / "raw"), output_dir=str(out)))
    return out


def test_real_row_counts_and_hashes_are_in_the_manifest(real):
    rows = {name: load_manifest_entry(real / name)["rows"] for name in REAL_FILES}
    # 55 + 1460 DM problems, of which 12 are also in MMLU STEM and 256 are held out
    assert rows == {"aime24.json": 30, "aime25.json": 30, "amc23.json": 40, "math500.json": 500, "gsm8k.json": 1319, "mmlu_stem.json": 3018,
                    "humaneval.json": 164, "gsm8k_train.json": 2000, "dapo_aime2024.json": 30, "dm_train.json": 1247, "dm_val.json": 256}
    for name, count in rows.items():
        assert len(load_problems(real / name)) == count and load_manifest_entry(real / name)["modified"] is False


def test_real_answers_are_normalised(real):
    answers = {name: [r["answer"] for r in load_problems(real / f"{name}.json")] for name in ("aime24", "aime25", "amc23", "gsm8k", "gsm8k_train")}
    assert all(0 <= int(a) <= 999 and a == str(int(a)) for name in ("aime24", "aime25") for a in answers[name])
    assert answers["aime25"][19] == "336" and "25" in answers["aime24"]
    assert all(re.fullmatch(r"-?\d+", a) for name in ("amc23", "gsm8k", "gsm8k_train") for a in answers[name])
    assert sum(int(a) >= 1000 for a in answers["gsm8k"]) > 14


def test_two_copies_of_aime_2024_agree(real):
    first, second = ({r["problem"][:40]: r["answer"] for r in load_problems(real / f"{n}.json")} for n in ("aime24", "dapo_aime2024"))
    shared = first.keys() & second.keys()
    assert len(shared) >= 20 and all(first[key] == second[key] for key in shared)


def test_no_dapo_instruction_is_left_in_real_problems(real):
    for name in ("dm_train", "dm_val", "dapo_aime2024"):
        assert not any("Answer:" in r["problem"] or "step by step" in r["problem"] for r in load_problems(real / f"{name}.json"))


def test_no_real_training_problem_is_in_a_benchmark_by_another_measure(real):
    """Letters and digits only, without a second use of our own normalisation."""
    def bare(text):
        return re.sub(r"[^a-z0-9]", "", text.lower())
    for train in ("dm_train", "gsm8k_train"):
        texts = {bare(r["problem"]) for r in load_problems(real / f"{train}.json")}
        for name in REAL_FILES - {"dm_train.json", "gsm8k_train.json"}:
            assert not [r["id"] for r in load_problems(real / name) if bare(r["problem"]) in texts], (train, name)
