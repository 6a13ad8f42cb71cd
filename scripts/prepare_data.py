"""Write the problem files of the study: synthetic samples, converted local copies, or downloads of the real benchmarks.

In:  nothing (``--source sample``), a folder of benchmark copies (``--source raw``), or hub data sets (``--source hub``).
Out: OUTPUT_DIR/{dm_train,dm_val,aime24,aime25,amc23,math500,gsm8k,mmlu_stem,humaneval}.json and OUTPUT_DIR/manifest.json
     (per file: origin, revision, rows, sha256, synthetic, what was removed); raw and hub add gsm8k_train and dapo_aime2024.

    python scripts/prepare_data.py --output_dir ./data                                        # synthetic, 1 s
    python scripts/prepare_data.py --source hub --output_dir ./data                           # real, downloads (not timed)
    python scripts/prepare_data.py --source raw --raw_dir DIR --output_dir data/smollm2       # real, local copies, 3 s

The training set "DM" is DAPO-Math-17k plus the train split of MATH. Problems that occur twice, or in any evaluation set,
are removed from it and counted; then dm_val is held out. All three sources share everything but the reading.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import PrepareDataConfig, UserError, WorkError, nearest  # noqa: E402
from utils_data import LETTERS, MANIFEST_NAME, check_record, normalise_text, read_manifest  # noqa: E402
from utils_run import read_jsonl, require_writable_dir, run_script, sha256_file, write_json  # noqa: E402

DM_SETS = ("dm_train", "dm_val")
BENCHMARKS = ("aime24", "aime25", "amc23", "math500", "gsm8k", "mmlu_stem", "humaneval")
SAMPLE_SETS = (*DM_SETS, *BENCHMARKS)
REAL_SETS = (*SAMPLE_SETS, "gsm8k_train", "dapo_aime2024")
OPTIONAL_RAW_SETS = ("dapo_aime2024",)  # AIME 2024 once more, in DAPO's wording: no result of the study needs it
TRAINING_SETS = ("dm_train", "gsm8k_train")

MMLU_STEM_SUBJECTS = (  # the 18 subjects of Qwen2.5-Math's mmlu_stem evaluation, in the hub's spelling
    "abstract_algebra", "astronomy", "college_biology", "college_chemistry", "college_computer_science",
    "college_mathematics", "college_physics", "computer_security", "conceptual_physics", "electrical_engineering",
    "elementary_mathematics", "high_school_biology", "high_school_chemistry", "high_school_computer_science",
    "high_school_mathematics", "high_school_physics", "high_school_statistics", "machine_learning")
MATH_SUBJECTS = ("algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra",
                 "precalculus")


# --------------------------------------------------------------------------------------------------------------------
# One row of a benchmark -> one problem record

def last_boxed(text: str) -> str | None:
    """Content of the last ``\\boxed{...}`` or ``\\fbox{...}`` (or ``\\boxed x``) of a worked solution, or None.

    Only for solutions that a data set's authors wrote; answers of a model are read by utils_math_eval.
    """
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].split("x", 1)[1] if text.startswith("\\fbox", start) else text[start + len("\\boxed"):]
    if not rest.lstrip().startswith("{"):
        match = re.match(r"\s+([^\s$.]+)", rest)
        return match.group(1) if match else None
    rest, depth = rest.lstrip(), 0
    for i, char in enumerate(rest):
        if char in "{}" and rest[i - 1:i] != "\\":
            depth += 1 if char == "{" else -1
        if depth == 0:
            return rest[1:i].strip()
    return None


def integer_answer(text: str) -> str:
    """An integer as AIME and AMC answers are meant: ``025`` -> 25, ``27.0`` -> 27, ``336^\\circ`` -> 336."""
    match = re.fullmatch(r"(-?\d+)(?:\.0*)?", text.replace("^\\circ", "").replace("^{\\circ}", "").strip(" $"))
    if not match:
        raise UserError(f"answer {text!r} is not an integer")
    return str(int(match.group(1)))


DAPO_PREFIX = re.compile(r"Solve the following math problem step by step\. The last line of your response should be of the form "
                         r"Answer: \$Answer \(without quotes\) where \$Answer is the answer to the problem\.\s*")
DAPO_SUFFIX = re.compile(r'\s*Remember to put your answer on its own line after "Answer:"\.\s*$')


def strip_dapo_wrapper(prompt: str) -> str:
    """The bare problem of a DAPO prompt. Its "Answer:" instruction would contradict the boxed templates and the grader."""
    head, tail = DAPO_PREFIX.match(prompt), DAPO_SUFFIX.search(prompt)
    if not head or not tail:
        raise UserError("the prompt lacks DAPO's instruction before or after the problem")
    return prompt[head.end():tail.start()].strip()


def _math(problem: str, answer: str) -> dict[str, Any]:
    return {"problem": problem.strip(), "answer": answer.strip(), "task_type": "math"}


def dapo_row(row: dict[str, Any]) -> dict[str, Any]:
    return _math(strip_dapo_wrapper(row["prompt"][0]["content"]), row["reward_model"]["ground_truth"])


def math_train_row(row: dict[str, Any]) -> dict[str, Any] | None:
    """None where the worked solution boxes nothing: such a problem cannot be graded, and is counted."""
    answer = row["answer"] if "answer" in row else last_boxed(row["solution"])
    if not answer:
        return None
    return {**_math(row["problem"], answer), **_kept(row, "level", "type")}


def aime_row(row: dict[str, Any]) -> dict[str, Any]:
    return _math(row["problem"], integer_answer(str(row["answer"])))


def dapo_aime_row(row: dict[str, Any]) -> dict[str, Any]:
    record = dapo_row(row)
    return {**record, "answer": integer_answer(record["answer"])}


def amc_row(row: dict[str, Any]) -> dict[str, Any]:
    return _math(row["question"], integer_answer(str(row["answer"])))


def math500_row(row: dict[str, Any]) -> dict[str, Any]:
    return {**_math(row["problem"], row["answer"]), **_kept(row, "subject", "level", "unique_id")}


def gsm8k_row(row: dict[str, Any]) -> dict[str, Any]:
    """The number after ``####``, without thousands separators; the worked solution before it is dropped."""
    if "####" not in row["answer"]:
        raise UserError("the answer has no '#### ' line")
    return _math(row["question"], row["answer"].rsplit("####", 1)[1].strip().replace(",", ""))


def mmlu_row(row: dict[str, Any]) -> dict[str, Any]:
    choices = [str(choice) for choice in row["choices"]]
    if not 0 <= row["answer"] < len(choices):
        raise UserError(f"answer {row['answer']!r} is no index into {len(choices)} choices")
    return {"problem": row["question"].strip(), "choices": choices, "answer": LETTERS[row["answer"]], "task_type": "mcq",
            **_kept(row, "subject")}


def humaneval_row(row: dict[str, Any]) -> dict[str, Any]:
    """The prompt stays as it is, spaces and final newline included: a base model continues it."""
    return {"id": row["task_id"], "problem": row["prompt"], "answer": row["canonical_solution"], "task_type": "code",
            **_kept(row, "prompt", "entry_point", "test")}


def _kept(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: row[name] for name in names if name in row}


# --------------------------------------------------------------------------------------------------------------------
# Where each set comes from

@dataclass(frozen=True)
class Source:
    """One real data set: its name in ``source`` fields, its local file, its hub address, and the converter of a row.

    hub_configs: configurations that are read one after the other. keep: which rows belong to the set.
    repeated: the origin holds each of its rows many times over; exact repeats are left out (and counted).
    """

    title: str
    raw_file: str
    hub_id: str
    hub_configs: tuple[str | None, ...]
    hub_split: str
    convert: Callable[[dict[str, Any]], dict[str, Any] | None]
    keep: Callable[[dict[str, Any]], bool] = lambda row: True
    repeated: bool = False


SOURCES: dict[str, Source] = {
    "dapo": Source("DAPO-Math-17k", "dapo_math_sample.jsonl", "BytedTsinghua-SIA/DAPO-Math-17k", (None,), "train", dapo_row,
                   repeated=True),
    # The 7,500 problems of MATH's own train split, so MATH-500 (drawn from its test split) is not in it by construction.
    "math_train": Source("MATH train", "math_train.jsonl", "EleutherAI/hendrycks_math", MATH_SUBJECTS, "train", math_train_row),
    "gsm8k_train": Source("GSM8K train", "gsm8k_train.jsonl", "openai/gsm8k", ("main",), "train", gsm8k_row),
    "aime24": Source("AIME 2024", "aime24.jsonl", "HuggingFaceH4/aime_2024", (None,), "train", aime_row),
    "aime25": Source("AIME 2025", "aime25.jsonl", "math-ai/aime25", (None,), "test", aime_row),
    "amc23": Source("AMC 2023", "amc23.jsonl", "math-ai/amc23", (None,), "test", amc_row),
    "math500": Source("MATH-500", "math500.jsonl", "HuggingFaceH4/MATH-500", (None,), "test", math500_row),
    "gsm8k": Source("GSM8K test", "gsm8k_test.jsonl", "openai/gsm8k", ("main",), "test", gsm8k_row),
    "mmlu_stem": Source("MMLU STEM", "mmlu_stem.jsonl", "cais/mmlu", ("all",), "test", mmlu_row,
                        keep=lambda row: row["subject"] in MMLU_STEM_SUBJECTS),
    "humaneval": Source("HumanEval", "humaneval.jsonl", "openai/openai_humaneval", (None,), "test", humaneval_row),
    "dapo_aime2024": Source("AIME 2024 (DAPO)", "dapo_aime2024.jsonl", "BytedTsinghua-SIA/AIME-2024", (None,), "train",
                            dapo_aime_row, repeated=True),
}


@dataclass(frozen=True)
class ProblemSet:
    """Records on their way to a file, and what the manifest will say about them."""

    records: list[dict[str, Any]]
    origin: list[dict[str, Any]]
    synthetic: bool
    removed: dict[str, Any] = field(default_factory=dict)

    def entry(self) -> dict[str, Any]:
        revisions = sorted({part["revision"] for part in self.origin if part["revision"]})
        return {"origin": " + ".join(part["name"] for part in self.origin),
                "revision": revisions[0] if len(self.origin) == 1 and revisions else None,
                "rows": len(self.records), "synthetic": self.synthetic, "parts": self.origin, **self.removed}


# --------------------------------------------------------------------------------------------------------------------
# Reading: the only part in which the three sources differ

def read_samples(cfg: PrepareDataConfig, wanted: tuple[str, ...]) -> dict[str, ProblemSet]:
    """Synthetic stand-ins: dm_train from the generator's split ``train``, every evaluation set from its split ``eval``."""
    from synthetic_problems import make_problems
    sets = {}
    for name in wanted:
        split, count = ("train", cfg.train_problems) if name == "dm_train" else ("eval", cfg.eval_problems)
        try:
            records = make_problems(name, split, count, cfg.data_seed)
        except ValueError as error:
            raise UserError(f"{error}; ask for fewer with --{'train' if split == 'train' else 'eval'}_problems") from None
        origin = {"name": f"scripts/synthetic_problems.py {name}, split {split}, seed {cfg.data_seed}", "revision": None}
        sets[name] = ProblemSet(records, [origin], synthetic=True)
    return sets


def read_raw(cfg: PrepareDataConfig, names: Iterable[str]) -> dict[str, ProblemSet]:
    """Local copies, one JSON object a line, in the field names of their hub originals."""
    folder = Path(cfg.raw_dir)
    if not folder.is_dir():
        raise UserError(f"--raw_dir {folder} is not a folder")
    sets = {}
    for name in names:
        path = folder / SOURCES[name].raw_file
        if not path.exists() and name in OPTIONAL_RAW_SETS and name not in cfg.sets:
            print(f"{name}: {path.name} is not in {folder}, skipped (optional)")
            continue
        if not path.exists():
            raise UserError(f"--raw_dir {folder} lacks {path.name}, needed for {name}")
        # The folder is the user's own business and differs between machines: only the file's name and hash are recorded.
        origin = {"name": f"local copy {path.name}", "revision": None, "sha256": sha256_file(path)}
        sets[name] = convert(name, read_jsonl(path), origin, str(path))
    return sets


def read_hub(cfg: PrepareDataConfig, names: Iterable[str]) -> dict[str, ProblemSet]:
    """Downloads, each at one commit: the asked-for revision, else the branch head as resolved now."""
    revisions = parse_revisions(cfg.revision)
    sets = {}
    for name in names:
        source = SOURCES[name]
        commit = hub_commit(source.hub_id, revisions.get(name))
        print(f"{name}: {source.hub_id} at {commit}", flush=True)
        origin = {"name": source.hub_id, "revision": commit, "split": source.hub_split}
        sets[name] = convert(name, hub_rows(source, commit), origin, source.hub_id)
    return sets


def parse_revisions(pairs: list[str]) -> dict[str, str]:
    """``--revision NAME=COMMIT ...`` as a dictionary. Raises UserError for an unknown name or a missing '='."""
    revisions = {}
    for pair in pairs:
        name, equals, revision = pair.partition("=")
        if not equals or not revision:
            raise UserError(f"--revision {pair}: expected NAME=COMMIT, for example math500=COMMIT")
        if name not in SOURCES:
            raise UserError(f"--revision {pair}: {name!r} is not one of {', '.join(SOURCES)}{nearest(name, SOURCES)}")
        revisions[name] = revision
    return revisions


def hub_commit(hub_id: str, revision: str | None) -> str:
    """The commit that ``revision`` (None: the default branch) stands for on the hub.

    Raises:  UserError if the hub says that the data set or the revision does not exist; WorkError if it cannot be asked.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
    try:
        return HfApi().dataset_info(hub_id, revision=revision).sha
    except RevisionNotFoundError:
        raise UserError(f"{hub_id} has no revision {revision!r} on the hub") from None
    except RepositoryNotFoundError:
        raise UserError(f"{hub_id} does not exist on the hub, or needs a login (huggingface-cli login)") from None
    except Exception as error:  # every other class is some way of not reaching the hub: proxy, DNS, offline switch, 5xx
        raise WorkError(f"the hub cannot be reached for {hub_id} ({first_line(error)}); use --source raw or --source sample") from None


def hub_rows(source: Source, commit: str) -> Iterable[dict[str, Any]]:
    """Rows of a hub data set at one commit, configuration after configuration, in the hub's order."""
    import datasets
    for config_name in source.hub_configs:
        try:
            table = datasets.load_dataset(source.hub_id, config_name, split=source.hub_split, revision=commit)
        except Exception as error:  # the loader wraps network, disk and format errors in many classes
            raise WorkError(f"{source.hub_id} at {commit} cannot be loaded ({first_line(error)})") from None
        yield from table


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


# --------------------------------------------------------------------------------------------------------------------
# Shared by raw and hub: rows -> records

def convert(name: str, rows: Iterable[dict[str, Any]], origin: dict[str, Any], where: str) -> ProblemSet:
    """Problem records of one data set, in its own order. A benchmark keeps its rows as published, repeats included.

    Args:    rows: in the hub's field names. origin: manifest part, completed here with the rows read, of another subject,
             without an answer, and repeated.
    Raises:  UserError naming ``where``, the row and what is wrong with it.
    """
    source, records, seen, total, other, unanswered, repeats = SOURCES[name], [], set(), 0, 0, 0, 0
    for i, row in enumerate(rows):
        total += 1
        try:
            if not source.keep(row):
                other += 1
                continue
            fields = source.convert(row)
        except KeyError as error:
            raise UserError(f"{where} row {i}: field {error} is missing") from None
        except (TypeError, AttributeError, IndexError) as error:
            raise UserError(f"{where} row {i}: a field has the wrong type ({error})") from None
        except UserError as error:
            raise UserError(f"{where} row {i}: {error}") from None
        if fields is None:
            unanswered += 1
            continue
        if source.repeated and (fields["problem"], fields["answer"]) in seen:
            repeats += 1
            continue
        seen.add((fields["problem"], fields["answer"]))
        record = {"id": f"{name}-{i:05d}", **fields, "source": source.title}
        records.append(check_record(record, f"{where} row {i}"))
    part = {**origin, "rows": total, "rows_of_other_subjects": other, "rows_without_answer": unanswered, "exact_repeats": repeats}
    return ProblemSet(records, [part], synthetic=False)


# --------------------------------------------------------------------------------------------------------------------
# Duplicates and leaks

def leak_keys(record: dict[str, Any]) -> set[str]:
    """Normalised texts under which a problem could turn up elsewhere: the question, and the question with its choices."""
    return {normalise_text(record["problem"]), duplicate_key(record)}


def duplicate_key(record: dict[str, Any]) -> str:
    """Equal for two records of one set that are the same problem."""
    return normalise_text("\n".join([record["problem"], *record.get("choices", ())]))


def remove_duplicates(records: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Each problem once (its first record); none of its records where they disagree on the answer, as no answer is sure.

    Returns: the kept records, and {"removed_duplicates", "removed_conflicting_answers"} in records.
    """
    answers: dict[str, set[str]] = {}
    for record in records:
        answers.setdefault(duplicate_key(record), set()).add(normalise_text(record["answer"]))
    kept, seen, conflicting = [], set(), 0
    for record in records:
        key = duplicate_key(record)
        if len(answers[key]) > 1:
            conflicting += 1
        elif key not in seen:
            kept.append(record)
        seen.add(key)
    return kept, {"removed_duplicates": len(records) - len(kept) - conflicting, "removed_conflicting_answers": conflicting}


def remove_leaks(records: list[dict[str, Any]], evaluation: dict[str, ProblemSet],
                 ) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Training records that occur in no evaluation set, and how many were removed for each set that had one."""
    owner: dict[str, str] = {}
    for name, problems in evaluation.items():
        for record in problems.records:
            for key in leak_keys(record):
                owner.setdefault(key, name)
    kept, removed = [], dict.fromkeys(evaluation, 0)
    for record in records:
        hit = next((owner[key] for key in sorted(leak_keys(record)) if key in owner), None)
        if hit:
            removed[hit] += 1
        else:
            kept.append(record)
    return kept, removed


def clean_training_set(name: str, problems: ProblemSet, evaluation: dict[str, ProblemSet]) -> ProblemSet:
    """A training set without repeats and without any problem of the evaluation sets; the counts go into the manifest."""
    records, counts = remove_duplicates(problems.records)
    records, leaks = remove_leaks(records, evaluation)
    if not records:
        raise UserError(f"{name}: no problem is left after removing duplicates and evaluation problems")
    return ProblemSet(records, problems.origin, problems.synthetic, {**counts, "removed_in_evaluation": leaks})


def hold_out(problems: ProblemSet, count: int, seed: int) -> tuple[ProblemSet, ProblemSet]:
    """A seeded split of a cleaned set into (training, validation with ``count`` problems), both in the set's own order."""
    if count >= len(problems.records):
        raise UserError(f"--val_problems {count} leaves nothing to train on: DM has {len(problems.records)} problems")
    chosen = set(random.Random(seed).sample(range(len(problems.records)), count))
    validation = [record for i, record in enumerate(problems.records) if i in chosen]
    training = [record for i, record in enumerate(problems.records) if i not in chosen]
    split = {"held_out": {"val_problems": count, "seed": seed}}
    return (ProblemSet(training, problems.origin, problems.synthetic, {**problems.removed, **split}),
            ProblemSet(validation, problems.origin, problems.synthetic, split))


def check_leaks(sets: dict[str, ProblemSet]) -> dict[str, dict[str, int]]:
    """Problems shared by each training and each evaluation set, counted anew on the finished sets.

    Returns: {training set: {evaluation set: 0}}.   Raises: WorkError if any count is not 0.
    """
    report: dict[str, dict[str, int]] = {}
    for train in [name for name in TRAINING_SETS if name in sets]:
        training_keys = set().union(*(leak_keys(record) for record in sets[train].records))
        report[train] = {name: sum(not training_keys.isdisjoint(leak_keys(record)) for record in problems.records)
                         for name, problems in sets.items() if name not in TRAINING_SETS}
        for name, count in report[train].items():
            if count:
                raise WorkError(f"{count} problems of {name} are also in {train}; nothing was written")
    return report


# --------------------------------------------------------------------------------------------------------------------
# Main

def wanted_sets(cfg: PrepareDataConfig) -> tuple[str, ...]:
    """Names of the files to write. Raises UserError for a set that the source does not have."""
    known = SAMPLE_SETS if cfg.source == "sample" else REAL_SETS
    for name in cfg.sets:
        if name not in known:
            raise UserError(f"--sets: --source {cfg.source} has no set {name!r}, only {', '.join(known)}{nearest(name, known)}")
    return tuple(cfg.sets) or known


def gather(cfg: PrepareDataConfig) -> dict[str, ProblemSet]:
    """The sets to write, by name, training sets cleaned and dm_val held out."""
    wanted = wanted_sets(cfg)
    # A training set is checked against every benchmark, so these are read even where they are not asked for.
    training = any(name in TRAINING_SETS + DM_SETS for name in wanted)
    needed = set(wanted) | set(BENCHMARKS if training else ())
    if cfg.source == "sample":
        if training:
            needed.add("dm_val")
        sets = read_samples(cfg, tuple(name for name in SAMPLE_SETS if name in needed))
    else:
        needed |= {"dapo", "math_train"} if needed.intersection(DM_SETS) else set()
        read = read_raw if cfg.source == "raw" else read_hub
        sets = read(cfg, [name for name in SOURCES if name in needed])
        if "dapo" in sets:
            parts = [sets.pop("dapo"), sets.pop("math_train")]
            dm = ProblemSet(sum((p.records for p in parts), []), sum((p.origin for p in parts), []), synthetic=False)
            evaluation = {name: problems for name, problems in sets.items() if name not in TRAINING_SETS}
            dm = clean_training_set("DM", dm, evaluation)
            sets["dm_train"], sets["dm_val"] = hold_out(dm, cfg.val_problems, cfg.data_seed)
    evaluation = {name: problems for name, problems in sets.items() if name not in TRAINING_SETS}
    already_clean = ("dm_train",) if cfg.source != "sample" else ()
    for name in [n for n in TRAINING_SETS if n in sets and n not in already_clean]:
        sets[name] = clean_training_set(name, sets[name], evaluation)
    for name, counts in check_leaks(sets).items():
        sets[name] = replace(sets[name], removed={**sets[name].removed, "leak_check": counts})
    return {name: sets[name] for name in REAL_SETS if name in sets and name in wanted}


def write_sets(output_dir: Path, sets: dict[str, ProblemSet]) -> None:
    """Problem files, then the manifest: entries of this run, and those of earlier runs whose files are untouched."""
    manifest_path = output_dir / MANIFEST_NAME
    entries = read_manifest(manifest_path) if manifest_path.exists() else {}
    entries = {name: entry for name, entry in entries.items() if (output_dir / name).exists()}
    for name, problems in sets.items():
        path = output_dir / f"{name}.json"
        write_json(path, problems.records)
        entries[path.name] = {**problems.entry(), "sha256": sha256_file(path)}
    write_json(manifest_path, {"files": dict(sorted(entries.items()))})


def print_summary(output_dir: Path, sets: dict[str, ProblemSet]) -> None:
    for name, problems in sets.items():
        removed = problems.removed.get("removed_in_evaluation")
        notes = []
        if removed is not None:
            hits = ", ".join(f"{count} in {other}" for other, count in removed.items() if count) or "none in an evaluation set"
            notes.append(f"removed: {problems.removed['removed_duplicates']} duplicates, "
                         f"{problems.removed['removed_conflicting_answers']} with conflicting answers, {hits}")
        if problems.synthetic:
            notes.append("synthetic")
        print(f"  {name + '.json':20} {len(problems.records):6} problems  {'; '.join(notes)}".rstrip())
    print(f"wrote {len(sets)} problem files and {MANIFEST_NAME} to {output_dir}; training and evaluation sets share no problem")


def main(cfg: PrepareDataConfig) -> None:
    wanted_sets(cfg)  # a wrong name is refused before anything is read or written
    output_dir = require_writable_dir(cfg.output_dir)
    sets = gather(cfg)
    write_sets(output_dir, sets)
    print_summary(output_dir, sets)


if __name__ == "__main__":
    run_script(main, PrepareDataConfig, description=__doc__)
