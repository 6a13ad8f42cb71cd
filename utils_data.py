"""Problem records, task lists and prompt templates: what a benchmark is, and the tokens that a model is asked with.

In:  problem files (a JSON array, JSON lines or parquet), ``manifest.json`` beside them, a task list (JSON).
Out: validated records, the manifest's entry for a file, ``EvalTask`` rows, prompt token ids. No torch here.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config import UserError, nearest
from utils_run import read_json, read_jsonl, sha256_file

TASK_TYPES = ("math", "mcq", "code")
TEMPLATES = ("qwen_boxed", "chat_boxed", "plain")
MANIFEST_NAME = "manifest.json"
LETTERS = "ABCDEFGHIJ"  # at most ten choices a question

REQUIRED_FIELDS = ("id", "problem", "answer", "task_type", "source")
EXTRA_FIELDS = {"math": (), "mcq": ("choices",), "code": ("prompt", "entry_point", "test")}

# Qwen2.5-Math's own system turn (its evaluation's "qwen25-math-cot" prompt and the default of its chat template).
QWEN_SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
# Given for code, because Qwen2.5-Math's template would otherwise insert the \boxed{} instruction by itself.
QWEN_CODE_SYSTEM = "You are a helpful assistant."
CHAT_INSTRUCTION = "Solve the problem step by step. End your response with the final answer in \\boxed{}."
CODE_INSTRUCTION = "Complete the following Python function. Reply with the whole function in one ```python code block."


# --------------------------------------------------------------------------------------------------------------------
# Problem records

def load_problems(path: str | Path) -> list[dict[str, Any]]:
    """All problem records of a file, validated.

    Args:    path: a JSON array, JSON lines, or parquet; told apart by content, not by name.
    Returns: records with the fields of REQUIRED_FIELDS (and EXTRA_FIELDS of their task type); further fields are kept.
             A number given as id or answer becomes its text.
    Raises:  UserError naming the file and the record (index and id) or line that is wrong.
    """
    path = Path(path)
    records = _read_rows(path)
    if not records:
        raise UserError(f"{path} holds no problems")
    checked = [check_record(record, f"{path} record {i}") for i, record in enumerate(records)]
    first_seen: dict[str, int] = {}
    for i, record in enumerate(checked):
        if record["id"] in first_seen:
            raise UserError(f"{path} record {i}: id {record['id']!r} is already used by record {first_seen[record['id']]}")
        first_seen[record["id"]] = i
    return checked


def _read_rows(path: Path) -> list[Any]:
    """Rows of a problem file as plain Python values. Raises UserError for a missing or unreadable file."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a problem file in it")
    try:
        with open(path, "rb") as handle:
            start = handle.read(4096)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; scripts/prepare_data.py makes the problem files") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if start.startswith(b"PAR1"):
        return _read_parquet(path)
    if start.lstrip()[:1] == b"{":
        return read_jsonl(path)
    rows = read_json(path)
    if not isinstance(rows, list):
        raise UserError(f"{path}: expected an array of records, one JSON object a line, or parquet")
    return rows


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not valid parquet ({str(error).splitlines()[0]})") from None
    # A column that only some task types use (choices, test) is null in the other rows.
    return [{key: value for key, value in row.items() if value is not None} for row in rows]


def check_record(record: Any, where: str) -> dict[str, Any]:
    """A copy of ``record`` with text fields as text; UserError that names ``where``, the id and the field otherwise."""
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected an object, got {type(record).__name__}")
    record = dict(record)
    for field in ("id", "answer"):
        if isinstance(record.get(field), (int, float)) and not isinstance(record[field], bool):
            record[field] = str(record[field])
    if isinstance(record.get("id"), str):
        where = f"{where} (id {record['id']!r})"
    for field in REQUIRED_FIELDS:
        _require_text(record, field, where)
    task_type = record["task_type"]
    if task_type not in TASK_TYPES:
        raise UserError(f"{where}: task_type {task_type!r} is not one of {', '.join(TASK_TYPES)}{nearest(task_type, TASK_TYPES)}")
    for field in EXTRA_FIELDS[task_type]:
        if field == "choices":
            _check_choices(record, where)
        else:
            _require_text(record, field, where)
    return record


def _require_text(record: dict[str, Any], field: str, where: str) -> None:
    if field not in record:
        raise UserError(f"{where}: field {field!r} is missing")
    value = record[field]
    if not isinstance(value, str):
        raise UserError(f"{where}: field {field!r} must be text, got {type(value).__name__}")
    if not value.strip():
        raise UserError(f"{where}: field {field!r} is empty")


def _check_choices(record: dict[str, Any], where: str) -> None:
    choices = record.get("choices")
    if choices is None:
        raise UserError(f"{where}: field 'choices' is missing")
    if not isinstance(choices, list) or not all(isinstance(c, str) for c in choices):
        raise UserError(f"{where}: field 'choices' must be a list of texts")
    if not 2 <= len(choices) <= len(LETTERS):
        raise UserError(f"{where}: field 'choices' has {len(choices)} entries; 2 to {len(LETTERS)} are possible")
    letters = LETTERS[:len(choices)]
    if record["answer"] not in tuple(letters):
        raise UserError(f"{where}: answer {record['answer']!r} is not one of the letters {letters[0]} to {letters[-1]}")


def load_manifest_entry(path: str | Path) -> dict[str, Any] | None:
    """What ``manifest.json`` beside a problem file says about it, or None where there is no manifest or no entry.

    Returns: origin, revision, rows, sha256 (of the file as it is now), synthetic, ...; ``modified`` is True where the file
             no longer has the bytes that the manifest describes.
    Raises:  UserError if the manifest is malformed.
    """
    path = Path(path)
    manifest_path = path.parent / MANIFEST_NAME
    if not manifest_path.exists():
        return None
    files = read_manifest(manifest_path)
    if path.name not in files:
        return None
    entry = files[path.name]
    sha256 = sha256_file(path)
    return {**entry, "sha256": sha256, "modified": sha256 != entry["sha256"]}


def read_manifest(manifest_path: str | Path) -> dict[str, dict[str, Any]]:
    """Entries of a manifest by file name. Raises UserError if it lacks what other scripts read from it."""
    manifest = read_json(manifest_path)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict):
        raise UserError(f"{manifest_path}: expected an object with 'files'; scripts/prepare_data.py writes it")
    for name, entry in files.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("synthetic"), bool) or "sha256" not in entry:
            raise UserError(f"{manifest_path}: entry {name!r} needs 'sha256' and 'synthetic' (true or false)")
    return files


# --------------------------------------------------------------------------------------------------------------------
# Task lists

@dataclass(frozen=True)
class EvalTask:
    """One benchmark of an evaluation. ``path`` is relative to the working directory; ``max_new_tokens`` is a cap in tokens."""

    name: str
    path: str
    task_type: str
    on_task: bool
    num_samples: int
    temperature: float = 0.7
    top_p: float = 0.8
    max_new_tokens: int = 3072
    prompt_template: str = "qwen_boxed"


def load_tasks(path: str | Path) -> list[EvalTask]:
    """The tasks of a task list: a JSON array of objects, or an object with such an array under ``tasks``.

    Raises:  UserError for a missing file, an unknown or missing key, a value of the wrong type or range, a name used twice.
    """
    data = read_json(path)
    rows = data.get("tasks") if isinstance(data, dict) else data
    if not isinstance(rows, list) or not rows:
        raise UserError(f"{path}: expected a non-empty array of tasks")
    tasks = [_task(row, f"{path} task {i}") for i, row in enumerate(rows)]
    names = [task.name for task in tasks]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise UserError(f"{path} task {i}: name {name!r} is used twice")
    return tasks


def _task(row: Any, where: str) -> EvalTask:
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected an object, got {type(row).__name__}")
    if isinstance(row.get("name"), str):
        where = f"{where} ({row['name']})"
    fields = {field.name: field for field in dataclasses.fields(EvalTask)}
    for key in row:
        if key not in fields:
            raise UserError(f"{where}: unknown key {key!r}{nearest(key, fields)}")
    for name, field in fields.items():
        if name not in row and field.default is dataclasses.MISSING:
            raise UserError(f"{where}: key {name!r} is missing")
    kinds = {"str": (str,), "bool": (bool,), "int": (int,), "float": (int, float)}
    for key, value in row.items():
        kind = fields[key].type
        if not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "bool"):
            raise UserError(f"{where}: {key} must be {kind}, got {value!r}")
    task = EvalTask(**{key: float(value) if fields[key].type == "float" else value for key, value in row.items()})
    _check_task(task, where)
    return task


def _check_task(task: EvalTask, where: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", task.name):
        raise UserError(f"{where}: name {task.name!r} becomes a file name; use letters, digits, '.', '_' and '-'")
    for key, valid in (("task_type", TASK_TYPES), ("prompt_template", TEMPLATES)):
        value = getattr(task, key)
        if value not in valid:
            raise UserError(f"{where}: {key} {value!r} is not one of {', '.join(valid)}{nearest(value, valid)}")
    # With one draw a problem there is no sampling error to report; at temperature 0 all draws would be the same one.
    if task.num_samples < 2:
        raise UserError(f"{where}: num_samples must be at least 2, got {task.num_samples}")
    if not task.temperature > 0:
        raise UserError(f"{where}: temperature must be above 0, got {task.temperature}")
    if not 0 < task.top_p <= 1:
        raise UserError(f"{where}: top_p must be in (0, 1], got {task.top_p}")
    if task.max_new_tokens < 1:
        raise UserError(f"{where}: max_new_tokens must be at least 1, got {task.max_new_tokens}")


def load_task_problems(task: EvalTask) -> list[dict[str, Any]]:
    """The problems of a task. Raises UserError if a record's task type is not the task's."""
    records = load_problems(task.path)
    for i, record in enumerate(records):
        if record["task_type"] != task.task_type:
            raise UserError(f"{task.path} record {i} (id {record['id']!r}): task_type {record['task_type']!r}, "
                            f"but task {task.name} is {task.task_type!r}")
    return records


# --------------------------------------------------------------------------------------------------------------------
# Prompts

def resolved_template(template: str, tokenizer: Any) -> str:
    """The template that is really used, to be recorded: ``qwen_boxed``, or ``qwen_boxed_text`` without a chat template.

    Raises:  UserError for an unknown template.
    """
    if template not in TEMPLATES:
        raise UserError(f"prompt_template {template!r} is not one of {', '.join(TEMPLATES)}{nearest(template, TEMPLATES)}")
    if template == "plain" or getattr(tokenizer, "chat_template", None):
        return template
    return f"{template}_text"


def plain_text(record: dict[str, Any]) -> str:
    """The text that the response follows directly: problem, or problem and choices, or the start of a Python function."""
    if record["task_type"] == "code":
        return record["prompt"]
    return f"{_question(record)}\n"


def _question(record: dict[str, Any]) -> str:
    lines = [record["problem"]]
    if record["task_type"] == "mcq":
        lines += [f"{letter}) {choice}" for letter, choice in zip(LETTERS, record["choices"])]
    return "\n".join(lines)


def chat_messages(record: dict[str, Any], template: str) -> list[dict[str, str]]:
    """Turns of a boxed prompt, before any chat template.

    Args:    template: ``qwen_boxed`` (the instruction is the system turn, the bare question the user turn) or ``chat_boxed``
             (one user turn, question then instruction; the model's own default system turn stays). A code problem is
             asked for in a fenced block under both, and a choice for its letter in the box.
    """
    if record["task_type"] == "code":
        # The trailing newline goes: the closing fence follows. Inner indentation is the function's own and stays.
        user = f"{CODE_INSTRUCTION}\n\n```python\n{record['prompt'].strip(chr(10))}\n```"
    else:
        user = _question({**record, "problem": record["problem"].strip()})
    if record["task_type"] == "mcq":
        letters = ", ".join(LETTERS[:len(record["choices"])])
        user += f"\n\nThe answer in \\boxed{{}} must be only the letter of the correct choice ({letters})."
    if template == "chat_boxed":
        if record["task_type"] != "code":
            user += f"\n\n{CHAT_INSTRUCTION}"
        return [{"role": "user", "content": user}]
    system = QWEN_CODE_SYSTEM if record["task_type"] == "code" else QWEN_SYSTEM
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def prompt_text(record: dict[str, Any], template: str, tokenizer: Any) -> str:
    """The prompt as text; the chat template (if any) is applied here and nowhere else."""
    resolved = resolved_template(template, tokenizer)
    if resolved == "plain":
        return plain_text(record)
    messages = chat_messages(record, template)
    if resolved == template:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    # No chat template: the same instruction as plain text. The neutral system turn for code says nothing, so it goes.
    turns = [message["content"] for message in messages if message["content"] != QWEN_CODE_SYSTEM]
    return "\n\n".join(turns) + "\n"


def format_prompt(record: dict[str, Any], template: str, tokenizer: Any) -> list[int]:
    """Token ids of the prompt of one problem.

    Args:    record: a validated problem. template: one of TEMPLATES. tokenizer: a Hugging Face tokenizer.
    Returns: ids, with at most one BOS: a chat template writes its own, and only text outside a chat template gets the one
             that the tokenizer puts in front. No EOS at the end, so that the response continues the text.
    """
    ids = list(tokenizer(prompt_text(record, template, tokenizer), add_special_tokens=False)["input_ids"])
    if resolved_template(template, tokenizer) == template != "plain":
        return ids
    bos = tokenizer.bos_token_id
    wants_bos = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
    return [bos, *ids] if wants_bos and ids[:1] != [bos] else ids


# --------------------------------------------------------------------------------------------------------------------
# Comparing problems

_UNICODE_SIGNS = str.maketrans({"\u2212": "-", "\u2013": "-", "\u2014": "-", "\u2018": "'", "\u2019": "'", "\u201c": '"',
                                "\u201d": '"', "\u00d7": "*", "\u00b7": "*"})
_LATEX_LAYOUT = re.compile(r"\\(?:left|right|displaystyle|quad|qquad|[,;:! ])(?![a-z])|\\[\[\]()]|[$~`'\"]")
_DRAWING = re.compile(r"\[asy\].*?\[/asy\]|!\[[^\]]*\]\([^)]*\)", re.DOTALL)


def normalise_text(text: str) -> str:
    """A problem's text with everything taken out that does not change the problem, for duplicate and leak checks.

    Case, Unicode form, layout commands, ``$``, drawings, quotes, spaces around signs and sentence punctuation go; digits, letters and
    operators stay, and so does the space between two words or numbers ("lcm(1, 23)" is not "lcm(12, 3)").
    """
    text = unicodedata.normalize("NFKC", text).translate(_UNICODE_SIGNS).lower()
    text = _DRAWING.sub(" ", text)
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\cdot", "*").replace("\\times", "*")
    text = _LATEX_LAYOUT.sub(" ", text)
    text = re.sub(r"[,;:?]|\.(?!\d)", " ", text)  # not the point of 1.5
    text = re.sub(r"\s+", " ", text)
    return re.sub(r" ?([^\w\s]) ?", r"\1", text).strip()
