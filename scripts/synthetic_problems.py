"""Nine small synthetic problem sets, one stand-in per benchmark of the study, for a model that fits on a laptop CPU.

In:  a set name, a split, a count and a seed.   Out: problem records (plain dictionaries; nothing is read or written).
Used by scripts/prepare_data.py (sample sets under data/) and scripts/prepare_tiny_base.py (pre-training text).

The sets borrow a benchmark's name and its kind of answer, never its content: synthetic "aime24" is remainders, not AIME.

| set                | problems                           | answer          |
|--------------------|------------------------------------|-----------------|
| dm_train, dm_val   | two-digit + and -, small products  | integer         |
| aime24             | remainders                         | integer         |
| aime25             | greatest common divisors and lcm   | integer         |
| amc23              | linear equations                   | integer         |
| math500            | fractions: +, -, product, simplify | \\frac{a}{b}     |
| gsm8k              | word problems of one or two steps  | integer         |
| mmlu_stem          | which of four numbers has property | letter A to D   |
| humaneval          | one-line Python functions          | Python, executed|

Try it: `python -c "import sys; sys.path.insert(0, 'scripts'); import synthetic_problems as s; print(s.make_problems('aime24', 'eval', 3, 0))"`
"""

import hashlib
import math
import random
from fractions import Fraction

# Share of all possible problems in each split. The rest is for pre-training, so that a policy trains with RL on problems
# its base never saw, and is evaluated on problems that neither saw.
SPLIT_SHARES = {"eval": 0.10, "train": 0.25}
SPLITS = ("pretrain", "train", "eval")
MAX_DRAWS_PER_PROBLEM = 400  # draws without a new problem before the set counts as exhausted
LETTERS = "ABCD"

NAMES = ("Ann", "Ben", "Eva", "Ida", "Kim", "Leo", "Max", "Mia", "Sam", "Tom")
THINGS = ("pens", "nuts", "eggs", "cups", "hats", "keys", "maps", "toys")
FUNCTION_NAMES = ("f", "g", "h", "run", "calc", "solve", "apply", "work", "make", "func")


# --- One generator per family: rng -> (fields of the record, key) ----------------------------------------------------------
# The key decides the split. It is the problem's text with whatever does not change the task put in order, so that
# "12 + 30" and "30 + 12", or one multiple-choice question with its choices shuffled, can never be in two splits.


def arithmetic(rng: random.Random) -> tuple[dict, str]:
    """Sum or difference of two-digit numbers, or a small product. Answers may be negative."""
    sign = rng.choice("++++----*")
    if sign == "*":
        a, b = rng.randint(2, 12), rng.randint(2, 19)
        value = a * b
    else:
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        value = a + b if sign == "+" else a - b
    key = f"{a} - {b}" if sign == "-" else f"{min(a, b)} {sign} {max(a, b)}"
    return _math(f"{a} {sign} {b} = ?", str(value)), key


def remainders(rng: random.Random) -> tuple[dict, str]:
    """Remainder of a number below 400 modulo 2 to 12."""
    a, m = rng.randint(13, 399), rng.randint(2, 12)
    return _math(f"Find {a} mod {m}.", str(a % m)), f"{a} mod {m}"


def divisors(rng: random.Random) -> tuple[dict, str]:
    """Greatest common divisor (2 to 15, so that always answering 1 earns nothing), or least common multiple."""
    if rng.random() < 0.25:
        a, b = rng.randint(2, 20), rng.randint(2, 20)
        return _math(f"Find lcm({a}, {b}).", str(math.lcm(a, b))), f"lcm {min(a, b)} {max(a, b)}"
    divisor = rng.randint(2, 15)
    x, y = rng.randint(1, 20), rng.randint(1, 20)
    while math.gcd(x, y) != 1:
        x, y = rng.randint(1, 20), rng.randint(1, 20)
    a, b = divisor * x, divisor * y
    return _math(f"Find gcd({a}, {b}).", str(divisor)), f"gcd {min(a, b)} {max(a, b)}"


def linear_equations(rng: random.Random) -> tuple[dict, str]:
    """a x + b = c or a x - b = c with an integer x from 1 to 20."""
    a, x, b = rng.randint(2, 9), rng.randint(1, 20), rng.randint(1, 30)
    sign = rng.choice("+-")
    text = f"Solve {a}x {sign} {b} = {a * x + (b if sign == '+' else -b)}."
    return _math(text, str(x)), text


def fractions(rng: random.Random) -> tuple[dict, str]:
    """Add or subtract (mostly with equal denominators), multiply or simplify fractions; the answer is in lowest terms."""
    kind = rng.choices(("like", "unlike", "product", "simplify"), (8, 3, 4, 5))[0]
    if kind == "simplify":
        value = _proper_fraction(rng, 12)
        factor = rng.randint(2, 8)
        text = f"Simplify {_frac(value.numerator * factor, value.denominator * factor)}."
        return _math(text, latex_fraction(value)), text
    if kind == "like":
        d = rng.randint(3, 19)
        (a, b), (c, e) = (rng.randint(1, d - 1), d), (rng.randint(1, d - 1), d)
    else:
        left, right = _proper_fraction(rng, 9), _proper_fraction(rng, 9)
        (a, b), (c, e) = (left.numerator, left.denominator), (right.numerator, right.denominator)
    sign = "\\cdot" if kind == "product" else rng.choice("+-")
    if sign == "-" and Fraction(a, b) < Fraction(c, e):
        a, b, c, e = c, e, a, b
    left, right = Fraction(a, b), Fraction(c, e)
    value = {"+": left + right, "-": left - right, "\\cdot": left * right}[sign]
    key = f"{a}/{b} - {c}/{e}" if sign == "-" else f"{sorted(((a, b), (c, e)))} {sign}"
    return _math(f"{_frac(a, b)} {sign} {_frac(c, e)} = ?", latex_fraction(value)), key


def word_problems(rng: random.Random) -> tuple[dict, str]:
    """Count things after buying, losing, packing, or two of these."""
    who, thing = rng.choice(NAMES), rng.choice(THINGS)
    kind = rng.choice(("buy", "lose", "bags", "both"))
    a, b, c = rng.randint(11, 60), rng.randint(2, 40), rng.randint(2, 10)
    if kind == "buy":
        text, value = f"{who} has {a} {thing} and buys {b}. How many {thing}?", a + b
    elif kind == "lose":
        text, value = f"{who} has {a + b} {thing} and loses {b}. How many {thing}?", a
    elif kind == "bags":
        text, value = f"{who} has {c} bags of {a % 11 + 2} {thing}. How many {thing}?", c * (a % 11 + 2)
    else:
        text, value = f"{who} has {a} {thing}, buys {b}, loses {c}. How many {thing}?", a + b - c
    return _math(text, str(value)), text


def multiple_choice(rng: random.Random) -> tuple[dict, str]:
    """Which of four two-digit numbers is even, odd, negative, a multiple of five, or the largest."""
    question, is_right = rng.choice(
        (
            ("Which is negative?", lambda v: v < 0),
            ("Which is even?", lambda v: v % 2 == 0),
            ("Which is odd?", lambda v: v % 2 == 1),
            ("Which ends in 5?", lambda v: v % 10 == 5),
            ("Which is largest?", None),
        )
    )
    if is_right is None:
        values = rng.sample(range(10, 100), 4)
        right = max(values)
    else:
        pool = range(-99, 100) if "negative" in question else range(10, 100)
        pool = [v for v in pool if abs(v) >= 10]
        right = rng.choice([v for v in pool if is_right(v)])
        values = [right, *rng.sample([v for v in pool if not is_right(v)], 3)]
    rng.shuffle(values)
    fields = {
        "problem": question,
        "choices": [str(v) for v in values],
        "answer": LETTERS[values.index(right)],
        "task_type": "mcq",
    }
    return fields, f"{question} {sorted(values)}"


def python_functions(rng: random.Random) -> tuple[dict, str]:
    """A function with a signature and one line of documentation; its body is one return statement.

    The expected values in `test` come from the Python closures below, not from the text of the answer.
    """
    name = rng.choice(FUNCTION_NAMES)
    first, code, start = rng.choice(_STARTS)
    a, b = rng.randint(2, 9), rng.randint(2, 49)
    words, template, finish = rng.choice(_FINISHES)
    if "mod" in words:  # of a list, a wrong divisor could agree with the right one on every tested list
        first, code, start = _STARTS[0]
    sentence = f"Return {words.format(first=first, a=a, b=b)}."
    argument = "xs" if "xs" in code else "x"
    body = f"    return {template.format(first=code, a=a, b=b)}"
    if argument == "xs":
        inputs = [[rng.randint(-9, 60) for _ in range(size)] for size in (1, 2, 3, 5, 8)]
    else:
        inputs = [0, 1, -3, rng.randint(2, 9), rng.randint(10, 99), rng.randint(-99, -10)]
    checks = [f"    assert candidate({value!r}) == {finish(start(value), a, b)!r}\n" for value in inputs]
    fields = {
        "problem": sentence,
        "prompt": f'def {name}({argument}):\n    """{sentence}"""\n',
        "entry_point": name,
        "test": "\n\ndef check(candidate):\n" + "".join(checks),
        "answer": body,
        "task_type": "code",
    }
    return fields, fields["prompt"]


# What a function starts from: words, code, meaning.
_STARTS = (
    ("x", "x", lambda x: x),
    ("x", "x", lambda x: x),
    ("the sum of xs", "sum(xs)", sum),
    ("the max of xs", "max(xs)", max),
    ("the min of xs", "min(xs)", min),
    ("the size of xs", "len(xs)", len),
)
# What is then done to it with the constants a and b: words, code, meaning.
_FINISHES = (
    ("{first} plus {b}", "{first} + {b}", lambda v, a, b: v + b),
    ("{first} minus {b}", "{first} - {b}", lambda v, a, b: v - b),
    ("{first} times {b}", "{first} * {b}", lambda v, a, b: v * b),
    ("{first} mod {b}", "{first} % {b}", lambda v, a, b: v % b),
    ("{first} times {a} plus {b}", "{first} * {a} + {b}", lambda v, a, b: v * a + b),
    ("{first} times {a} minus {b}", "{first} * {a} - {b}", lambda v, a, b: v * a - b),
)


def _math(problem: str, answer: str) -> dict:
    return {"problem": problem, "answer": answer, "task_type": "math"}


def _proper_fraction(rng: random.Random, max_denominator: int) -> Fraction:
    denominator = rng.randint(2, max_denominator)
    return Fraction(rng.randint(1, denominator - 1), denominator)


def latex_fraction(value: Fraction) -> str:
    """`\\frac{7}{12}`, or the plain integer where the denominator is 1."""
    return str(value.numerator) if value.denominator == 1 else _frac(value.numerator, value.denominator)


def _frac(numerator: int, denominator: int) -> str:
    return f"\\frac{{{numerator}}}{{{denominator}}}"


FAMILIES = {
    "dm_train": arithmetic,
    "dm_val": arithmetic,
    "aime24": remainders,
    "aime25": divisors,
    "amc23": linear_equations,
    "math500": fractions,
    "gsm8k": word_problems,
    "mmlu_stem": multiple_choice,
    "humaneval": python_functions,
}


# --- Splits and records ----------------------------------------------------------------------------------------------------


def split_of(generator_name: str, key: str) -> str:
    """The one split a problem belongs to, from a hash of its key.

    Args:    generator_name: name of the generating function, so that dm_train and dm_val share one partition.
             key: normalised text of the problem.
    Returns: "eval" (10 % of all keys), "train" (25 %) or "pretrain" (65 %).
    """
    digest = hashlib.sha256(f"{generator_name}|{key}".encode()).digest()
    u = int.from_bytes(digest[:8], "big") / 2**64
    if u < SPLIT_SHARES["eval"]:
        return "eval"
    return "train" if u < SPLIT_SHARES["eval"] + SPLIT_SHARES["train"] else "pretrain"


def make_problems(set_name: str, split: str, count: int, seed: int) -> list[dict]:
    """Distinct problems of one set and split; the same arguments always give the same list.

    Args:    set_name: a key of FAMILIES.
             split: "pretrain", "train" or "eval"; no problem text is in two of them.
             count: number of records.
             seed: picks which problems of the split are drawn, and their order.
    Returns: records with id, problem, answer, task_type, source; `mcq` adds choices; `code` adds prompt, entry_point,
             test, and its answer is the canonical body. Ids are unique over all sets and splits.
    Raises:  ValueError if the set or split is unknown, or the split holds fewer than `count` distinct problems.
    """
    if set_name not in FAMILIES:
        raise ValueError(f"unknown synthetic set {set_name!r}; choose from {', '.join(FAMILIES)}")
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; choose from {', '.join(SPLITS)}")
    generator = FAMILIES[set_name]
    usual_split = "train" if set_name == "dm_train" else "eval"
    prefix = set_name if split == usual_split else f"{set_name}-{split}"
    rng = random.Random(f"{seed}|{generator.__name__}|{split}")
    records, seen, misses = [], set(), 0
    while len(records) < count:
        fields, key = generator(rng)
        text = plain_prompt(fields)
        if text in seen or split_of(generator.__name__, key) != split:
            misses += 1
            if misses > MAX_DRAWS_PER_PROBLEM:
                raise ValueError(f"{set_name}/{split} has only about {len(records)} distinct problems, {count} were asked for")
            continue
        misses = 0
        seen.add(text)
        records.append({"id": f"{prefix}-{len(records):04d}", **fields, "source": "synthetic"})
    return records


def plain_prompt(record: dict) -> str:
    """The text a model without a chat template continues (the `plain` prompt template)."""
    if record["task_type"] == "code":
        return record["prompt"]
    lines = [record["problem"]]
    if record["task_type"] == "mcq":
        lines += [f"{letter}) {choice}" for letter, choice in zip(LETTERS, record["choices"], strict=True)]
    return "\n".join(lines) + "\n"


def canonical_response(record: dict) -> str:
    """The shortest right response: the boxed answer, or the body of the function."""
    return record["answer"] if record["task_type"] == "code" else f"\\boxed{{{record['answer']}}}"
