"""Tests of utils_data.py: records, manifests, task lists, prompts, normalised text."""

import importlib.util
import json
from pathlib import Path

import pytest

from config import UserError
from utils_data import (EvalTask, format_prompt, load_manifest_entry, load_problems, load_task_problems, load_tasks,
                        normalise_text, prompt_text, resolved_template)

ROOT = Path(__file__).resolve().parent.parent

MATH = {"id": "m1", "problem": "What is 1 + 1?", "answer": "2", "task_type": "math", "source": "test"}
MCQ = {"id": "q1", "problem": "Which is even?", "answer": "B", "task_type": "mcq", "source": "test", "choices": ["1", "2", "3"]}
CODE = {"id": "c1", "problem": "Add one.", "answer": "    return x + 1\n", "task_type": "code", "source": "test",
        "prompt": 'def f(x):\n    """Add one."""\n', "entry_point": "f", "test": "def check(candidate):\n    assert candidate(1) == 2\n"}
TASK = {"name": "dm_val", "path": "data/dm_val.json", "task_type": "math", "on_task": True, "num_samples": 4}

CHATML = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def write(path, value):
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def make_tokenizer(chat_template=None, bos=False):
    """A tokenizer with one token a character; ``bos``: it puts <s> in front of every text, as Llama's does."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    characters = [chr(i) for i in range(32, 127)] + ["\n"]
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: i for i, token in enumerate(special + characters)}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.add_special_tokens(special)
    if bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = chat_template
    return tokenizer


# --- Records -----------------------------------------------------------------------------------------------------------

def test_array_lines_and_parquet_give_the_same_records(tmp_path):
    import pyarrow
    import pyarrow.parquet
    records = [MATH, MCQ, CODE]
    array = write(tmp_path / "a.json", records)
    lines = tmp_path / "b.jsonl"
    lines.write_text("\n".join(json.dumps(r) for r in records) + "\n\n", encoding="utf-8")
    table = tmp_path / "c.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{**dict.fromkeys(CODE | MCQ), **r} for r in records]), table)
    assert load_problems(array) == load_problems(lines) == load_problems(table) == records


def test_file_kind_is_told_by_content_not_by_name(tmp_path):
    path = tmp_path / "lines.json"
    path.write_text(json.dumps(MATH) + "\n" + json.dumps(MCQ) + "\n", encoding="utf-8")
    assert [r["id"] for r in load_problems(path)] == ["m1", "q1"]


def test_line_separators_inside_a_text_do_not_end_a_line(tmp_path):
    path = tmp_path / "lines.jsonl"
    record = {**MATH, "problem": "one\u2028two\x85three"}
    path.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
    assert load_problems(path) == [record]


def test_numbers_as_id_and_answer_become_text_and_further_fields_stay(tmp_path):
    [record] = load_problems(write(tmp_path / "a.json", [{**MATH, "id": 7, "answer": 2, "level": 5}]))
    assert (record["id"], record["answer"], record["level"]) == ("7", "2", 5)


@pytest.mark.parametrize("base, field", [(MATH, f) for f in ("problem", "answer", "task_type", "source")]
                         + [(MCQ, "choices"), (CODE, "prompt"), (CODE, "entry_point"), (CODE, "test")])
def test_missing_field_names_file_record_id_and_field(tmp_path, base, field):
    broken = {**base, "id": "the-broken-one"}
    del broken[field]
    path = write(tmp_path / "set.json", [MATH, broken])
    with pytest.raises(UserError) as error:
        load_problems(path)
    for part in ("set.json", "record 1", "the-broken-one", repr(field), "missing"):
        assert part in str(error.value)


@pytest.mark.parametrize("change, expected", [
    ({"id": None}, "field 'id' must be text"), ({"id": True}, "field 'id' must be text"),
    ({"problem": ["x"]}, "field 'problem' must be text, got list"), ({"answer": " "}, "field 'answer' is empty"),
    ({"task_type": "maths"}, "did you mean math?"),
    ({**MCQ, "answer": "D"}, "answer 'D' is not one of the letters A to C"), ({**MCQ, "answer": "AB"}, "letters A to C"),
    ({**MCQ, "answer": "b"}, "letters A to C"), ({**MCQ, "choices": ["1"]}, "has 1 entries"),
    ({**MCQ, "choices": [1, 2]}, "list of texts"), ({**MCQ, "choices": "12"}, "list of texts"),
])
def test_wrong_value_is_named(tmp_path, change, expected):
    path = write(tmp_path / "set.json", [{**MATH, **change}])
    with pytest.raises(UserError, match="record 0") as error:
        load_problems(path)
    assert expected in str(error.value)


def test_repeated_id_names_both_records(tmp_path):
    with pytest.raises(UserError, match="record 2: id 'm1' is already used by record 0"):
        load_problems(write(tmp_path / "set.json", [MATH, MCQ, MATH]))


@pytest.mark.parametrize("content, expected", [
    (b"[]", "holds no problems"), (b"", "not valid JSON"), (b"[\n{\"id\": 1,\n]", "line 3: not valid JSON"),
    (b"{\"id\": \"a\"}\n{\"id\": }\n", "line 2: not valid JSON"), (b"\"text\"", "expected an array"), (b"[1]", "record 0: expected an object"),
    (b"[{\"id\": NaN}]", "NaN is not valid JSON"), (b"PAR1 but not really", "not valid parquet"), (b"[\"\xff\"]", "cannot be read"),
])
def test_broken_file_is_one_clear_line(tmp_path, content, expected):
    path = tmp_path / "set.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        load_problems(path)
    assert "set.json" in str(error.value) and expected in str(error.value) and "\n" not in str(error.value)


def test_missing_file_names_the_remedy(tmp_path):
    with pytest.raises(UserError, match="does not exist; scripts/prepare_data.py"):
        load_problems(tmp_path / "absent.json")
    with pytest.raises(UserError, match="is a folder"):
        load_problems(tmp_path)


# --- Manifest ----------------------------------------------------------------------------------------------------------

def test_manifest_entry_is_found_and_an_edited_file_is_marked(tmp_path):
    import hashlib
    path = write(tmp_path / "dm.json", [MATH])
    assert load_manifest_entry(path) is None
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    write(tmp_path / "manifest.json", {"files": {"dm.json": {"origin": "x", "synthetic": True, "sha256": sha256}}})
    assert load_manifest_entry(path) == {"origin": "x", "synthetic": True, "sha256": sha256, "modified": False}
    write(path, [MATH, MCQ])
    entry = load_manifest_entry(path)
    assert entry["modified"] and entry["sha256"] != sha256 and entry["synthetic"] is True
    assert load_manifest_entry(write(tmp_path / "other.json", [MATH])) is None


@pytest.mark.parametrize("manifest", [[], {}, {"files": {"dm.json": {"sha256": "x"}}}, {"files": {"dm.json": {"synthetic": "yes", "sha256": "x"}}}])
def test_manifest_that_cannot_say_whether_data_is_synthetic_is_refused(tmp_path, manifest):
    path = write(tmp_path / "dm.json", [MATH])
    write(tmp_path / "manifest.json", manifest)
    with pytest.raises(UserError, match="manifest.json"):
        load_manifest_entry(path)


# --- Task lists --------------------------------------------------------------------------------------------------------

def test_study_task_list_has_the_settings_of_the_study():
    tasks = {task.name: task for task in load_tasks(ROOT / "configs/eval_tasks_config.json")}
    assert list(tasks) == ["dm_val", "aime24", "aime25", "amc23", "math500", "gsm8k", "mmlu_stem", "humaneval"]
    assert [name for name, task in tasks.items() if task.on_task] == ["dm_val"]
    assert {name: task.num_samples for name, task in tasks.items() if name != "dm_val"} == {
        "aime24": 64, "aime25": 64, "amc23": 32, "math500": 2, "gsm8k": 2, "mmlu_stem": 2, "humaneval": 4}
    for name, task in tasks.items():
        assert (task.temperature, task.top_p, task.prompt_template, task.path) == (0.7, 0.8, "qwen_boxed", f"data/{name}.json")
        assert 2048 <= task.max_new_tokens <= 4096
        assert task.task_type == {"mmlu_stem": "mcq", "humaneval": "code"}.get(name, "math")


@pytest.mark.parametrize("name, folder, template, on_task", [("tiny", "data/tiny", "plain", "dm_val"),
                                                             ("smollm2", "data/smollm2", "chat_boxed", "gsm8k")])
def test_small_task_lists_load(name, folder, template, on_task):
    tasks = load_tasks(ROOT / f"configs/eval_tasks_{name}.json")
    assert [task.name for task in tasks if task.on_task] == [on_task]
    assert all(Path(task.path).parent == Path(folder) and task.prompt_template == template for task in tasks)


def test_array_and_object_with_tasks_are_the_same_and_have_the_study_defaults(tmp_path):
    expected = [EvalTask("dm_val", "data/dm_val.json", "math", True, 4, 0.7, 0.8, 3072, "qwen_boxed")]
    assert load_tasks(write(tmp_path / "a.json", [TASK])) == load_tasks(write(tmp_path / "b.json", {"tasks": [TASK]})) == expected


@pytest.mark.parametrize("change, expected", [
    ({"num_sample": 4}, "unknown key 'num_sample' (did you mean num_samples?)"), ({"num_samples": 1}, "at least 2"),
    ({"num_samples": True}, "num_samples must be int"), ({"num_samples": 4.0}, "num_samples must be int"),
    ({"on_task": "yes"}, "on_task must be bool"), ({"task_type": "maths"}, "did you mean math?"),
    ({"prompt_template": "qwen"}, "did you mean qwen_boxed?"), ({"temperature": 0}, "temperature must be above 0"),
    ({"temperature": "0.7"}, "temperature must be float"), ({"top_p": 0.0}, "top_p must be in (0, 1]"), ({"top_p": 1.5}, "top_p"),
    ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"), ({"name": "a/b"}, "becomes a file name"),
])
def test_wrong_task_is_named(tmp_path, change, expected):
    path = write(tmp_path / "tasks.json", [{**TASK, **change}])
    with pytest.raises(UserError) as error:
        load_tasks(path)
    assert "tasks.json task 0" in str(error.value) and expected in str(error.value)


@pytest.mark.parametrize("key", TASK)
def test_missing_task_key_is_named(tmp_path, key):
    path = write(tmp_path / "tasks.json", [{k: v for k, v in TASK.items() if k != key}])
    with pytest.raises(UserError, match=f"key '{key}' is missing"):
        load_tasks(path)


def test_task_name_used_twice_and_empty_list_are_refused(tmp_path):
    with pytest.raises(UserError, match="task 1: name 'dm_val' is used twice"):
        load_tasks(write(tmp_path / "tasks.json", [TASK, TASK]))
    with pytest.raises(UserError, match="non-empty array of tasks"):
        load_tasks(write(tmp_path / "none.json", []))


def test_task_refuses_problems_of_another_type(tmp_path):
    path = write(tmp_path / "set.json", [MATH, MCQ])
    task = load_tasks(write(tmp_path / "tasks.json", [{**TASK, "path": str(path)}]))[0]
    with pytest.raises(UserError, match="record 1 .*'mcq', but task dm_val is 'math'"):
        load_task_problems(task)


# --- Prompts -----------------------------------------------------------------------------------------------------------

def test_plain_prompts_are_the_bare_texts():
    tokenizer = make_tokenizer()
    assert prompt_text(MATH, "plain", tokenizer) == "What is 1 + 1?\n"
    assert prompt_text(MCQ, "plain", tokenizer) == "Which is even?\nA) 1\nB) 2\nC) 3\n"
    assert prompt_text(CODE, "plain", tokenizer) == CODE["prompt"]
    assert tokenizer.decode(format_prompt(CODE, "plain", tokenizer)).replace(" ", "") == CODE["prompt"].replace(" ", "")


def test_plain_prompts_are_what_the_tiny_model_is_trained_on():
    spec = importlib.util.spec_from_file_location("synthetic_problems", ROOT / "scripts/synthetic_problems.py")
    synthetic = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(synthetic)
    for name in synthetic.FAMILIES:
        for record in synthetic.make_problems(name, "eval", 20, 0):
            assert prompt_text(record, "plain", None) == synthetic.plain_prompt(record)


def test_qwen_prompt_is_system_turn_and_bare_question_applied_once():
    tokenizer = make_tokenizer(CHATML)
    assert resolved_template("qwen_boxed", tokenizer) == "qwen_boxed"
    assert prompt_text({**MATH, "problem": " What is 1 + 1?\n"}, "qwen_boxed", tokenizer) == (
        "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
        "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n")
    ids = format_prompt(MATH, "qwen_boxed", tokenizer)
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3


def test_chat_prompt_leaves_the_system_turn_to_the_model():
    text = prompt_text(MATH, "chat_boxed", make_tokenizer(CHATML))
    assert text.startswith("<|im_start|>user\nWhat is 1 + 1?\n\n") and text.count("<|im_start|>") == 2
    assert text.count("\\boxed{}") == 1 and text.endswith("<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("template", ["qwen_boxed", "chat_boxed"])
def test_choice_prompt_lists_choices_and_asks_for_the_letter_in_a_box(template):
    text = prompt_text(MCQ, template, make_tokenizer(CHATML))
    assert "Which is even?\nA) 1\nB) 2\nC) 3" in text and "letter" in text and "(A, B, C)" in text and "\\boxed{}" in text


@pytest.mark.parametrize("template", ["qwen_boxed", "chat_boxed"])
def test_code_prompt_is_fenced_and_never_asks_for_a_box(template):
    text = prompt_text(CODE, template, make_tokenizer(CHATML))
    assert '```python\ndef f(x):\n    """Add one."""\n```' in text and "boxed" not in text


@pytest.mark.parametrize("chat_template", [None, "<s>" + CHATML])
@pytest.mark.parametrize("template", ["qwen_boxed", "chat_boxed", "plain"])
@pytest.mark.parametrize("record", [MATH, MCQ, CODE], ids=["math", "mcq", "code"])
def test_exactly_one_bos_with_a_tokenizer_that_wants_one(record, template, chat_template):
    tokenizer = make_tokenizer(chat_template, bos=True)
    ids = format_prompt(record, template, tokenizer)
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.eos_token_id not in ids


def test_no_bos_where_the_tokenizer_adds_none():
    tokenizer = make_tokenizer(CHATML)  # it has a bos token, but does not use it
    assert all(tokenizer.bos_token_id not in format_prompt(MATH, t, tokenizer) for t in ("qwen_boxed", "chat_boxed", "plain"))


def test_without_chat_template_the_same_instruction_goes_as_text_and_is_recorded():
    tokenizer = make_tokenizer()
    assert [resolved_template(t, tokenizer) for t in ("qwen_boxed", "chat_boxed", "plain")] == [
        "qwen_boxed_text", "chat_boxed_text", "plain"]
    assert prompt_text(MATH, "qwen_boxed", tokenizer) == (
        "Please reason step by step, and put your final answer within \\boxed{}.\n\nWhat is 1 + 1?\n")
    assert prompt_text(CODE, "qwen_boxed", tokenizer).startswith("Complete the following Python function.")


def test_unknown_template_is_named():
    with pytest.raises(UserError, match="'plane' is not one of .*did you mean plain"):
        format_prompt(MATH, "plane", make_tokenizer())


# --- Normalised text ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("a, b", [
    ("Find $x + 1$.", "find x+1"), ("$\\dfrac{1}{2}$ of it", "\\frac{1}{2}  of\nit"), ("\\left( 1,\\, 2 \\right)", "(1,2)"),
    ("What\u2019s 5 \u2212 3?", "what's 5 - 3"), ("\\[3 \\cdot 4\\]", "$3*4$"), ("Area?\n[asy]\ndraw((0,0)--(1,1));\n[/asy]", "area"),
    ("\uff11\uff12 cats", "12 cats"),
])
def test_typesetting_does_not_matter(a, b):
    assert normalise_text(a) == normalise_text(b)


@pytest.mark.parametrize("a, b", [
    ("12 + 3", "12 - 3"), ("lcm(1, 23)", "lcm(12, 3)"), ("1.5 cm", "15 cm"), ("5!", "5"), ("x^2", "x2"), ("a < b", "a > b"),
    ("\\frac{12}{3}", "\\frac{1}{23}"), ("a \\leftarrow b", "a \\arrow b"),
])
def test_different_problems_stay_different(a, b):
    assert normalise_text(a) != normalise_text(b)


def test_distinct_real_problems_stay_distinct(datasets_dir):
    rows = [json.loads(line) for line in (datasets_dir / "raw/gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len({normalise_text(row["question"]) for row in rows}) == len(rows) == 1319
