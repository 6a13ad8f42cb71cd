"""Code grading: extraction, the encoding between the two processes, the sandbox and what it must withstand, the command line."""

from __future__ import annotations

import collections
import decimal
import fractions
import json
import math
import os
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import utils_code_eval as code_eval
from config import UserError
from utils_code_eval import CodeLimits, CodePool, check_canonical, extract_code, from_plain, grade_code, sandbox_status, to_plain

ROOT = Path(__file__).resolve().parent.parent
DATASETS = Path(os.environ.get("RLVR_TEST_DATASETS", ROOT.parent / "shared" / "datasets"))

# Short limits, so that the programs that run into them do not make the suite long; the machine may be busy.
QUICK = CodeLimits(cpu_s=1, wall_s=5.0, memory_mib=768)

ADD = {"id": "add", "prompt": "from typing import List\n\n\ndef add(x: int, y: int) -> int:\n    \"\"\"Add two numbers.\"\"\"\n",
       "entry_point": "add", "answer": "    return x + y\n",
       "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n    assert candidate(-1, 1) == 0\n"}


def rows(name: str) -> list[dict]:
    path = DATASETS / name
    if not path.exists():
        pytest.skip(f"{path} is absent; set RLVR_TEST_DATASETS to the folder that holds {name}")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def humaneval() -> dict[str, dict]:
    return {row["task_id"]: code_eval.as_code_record(row, "humaneval") for row in rows("raw/humaneval.jsonl")}


@pytest.fixture(scope="module")
def pool():
    if sandbox_status()["missing"]:
        pytest.skip(f"no sandbox on this machine: {sandbox_status()['missing']} ({sandbox_status()['reason']})")
    with CodePool(workers=2, limits=QUICK) as opened:
        yield opened


def record(test: str, entry_point: str = "f", prompt: str = "", answer: str | None = None) -> dict:
    body = "".join(f"    {line}\n" for line in test.strip().split("\n"))
    return {"id": "r", "prompt": prompt, "entry_point": entry_point, "test": f"def check(candidate):\n{body}", "answer": answer}


def one(pool, program: str, test: str = "assert candidate() == 1", **fields):
    return pool.grade([(program, record(test, **fields))])[0]


# --------------------------------------------------------------------------------------------------------------------
# Extraction

PROMPT = ("import math\nfrom typing import List\n\n\ndef helper(x):\n    return x + 1\n\n\n"
          "def f(xs: List[int]) -> int:\n    \"\"\"Sum of the numbers.\n    >>> f([1, 2])\n    3\n    \"\"\"\n")
BODY = "    total = 0\n    for x in xs:\n        total += x\n    return total\n"
FUNCTION = "def f(xs: List[int]) -> int:\n" + BODY
DEDENTED = "total = 0\nfor x in xs:\n    total += x\nreturn total\n"
SHAPES = {
    "body": BODY,
    "body with blank lines around": "\n\n" + BODY + "\n\n",
    "body after a comment": "    # add them up\n" + BODY,
    "body, then a helper it uses": "    return _go(xs)\n\n\ndef _go(xs):\n    return sum(xs)\n",
    "body, then prose": BODY + "\nThis adds the numbers one by one.\nIt is linear.\n",
    "body, then a function cut off": BODY + "\n\ndef g(x):\n    \"\"\"Multiply all the num",
    "body, then a closing fence and prose": BODY + "```\n\nThe function adds the numbers.",
    "body with CRLF": BODY.replace("\n", "\r\n"),
    "whole function": FUNCTION,
    "whole function with imports": "from typing import List\nimport itertools\n\n" + FUNCTION,
    "whole function with a future import": "from __future__ import annotations\n\n" + FUNCTION,
    "whole function, prompt repeated": PROMPT + BODY,
    "whole function that uses the prompt's helper and imports": "def f(xs: List[int]) -> int:\n    return helper(int(math.fsum(xs))) - 1\n",
    "whole function between prose": "Here is the code:\n\n" + FUNCTION + "\nIt takes linear time.\n",
    "import, function, prose": "Sure.\n\nimport functools\n\n" + FUNCTION + "\n\nHope this helps!\n",
    "fenced function with tag": f"```python\n{FUNCTION}```",
    "fenced function with short tag": f"```py\n{FUNCTION}```\n",
    "fenced function, capital tag": f"``` Python\n{FUNCTION}```\n",
    "fenced function without tag": f"```\n{FUNCTION}```\n",
    "fence in the line of the code": f"```{FUNCTION}```",
    "tag and code in one line": f"```python {FUNCTION}```",
    "fence closed at the end of a line": f"```python\n{FUNCTION.rstrip()}```",
    "fence not closed": f"Answer:\n```python\n{FUNCTION}",
    "tilde fence": f"~~~python\n{FUNCTION}~~~\n",
    "long fence": f"````python\n{FUNCTION}````\n",
    "fence with prose around": f"Let me think.\n\n```python\n{FUNCTION}```\n\nIt runs in linear time.",
    "fenced body": f"```python\n{BODY}```",
    "fenced body at column 0": f"```python\n{DEDENTED}```",
    "fenced and indented as in a list": "1. Do this:\n\n   ```python\n" + "".join(f"   {x}\n" for x in FUNCTION.split("\n")) + "   ```\n",
    "whole function indented in a fence": "```python\n" + "".join(f"    {x}\n" for x in FUNCTION.rstrip().split("\n")) + "```\n",
    "two fences, the second an example": f"```python\n{FUNCTION}```\nUse it so:\n```python\nprint(f([1, 2]))\n```\n",
    "two fences, the last one the better": f"```python\ndef f(xs):\n    return 0\n```\nThat is wrong. Better:\n```python\n{FUNCTION}```\n",
    "helper in a fence of its own": "```python\ndef go(xs):\n    return sum(xs)\n```\nthen\n```python\ndef f(xs):\n    return go(xs)\n```\n",
    "shell fence first": f"```bash\npip install nothing\n```\n```python\n{FUNCTION}```\n",
    "after thinking": f"<think>\nMaybe def f(xs): return 0?\n</think>\n\n```python\n{FUNCTION}```\n",
    "special token at the end": FUNCTION + "<|im_end|>",
    "special token and more": BODY + "<|endoftext|>def f(xs):\n    return 0\n",
    "lambda in a fence": "```python\nf = lambda xs: sum(xs)\n```",
    "decorated": "import functools\n\n@functools.lru_cache(None)\ndef go(n):\n    return n\n\n" + FUNCTION,
    "body in prose": "The missing lines are:\n\n" + BODY + "\nThat is all.\n",
    "main block that reads": FUNCTION + "\n\nif __name__ == '__main__':\n    print(f([int(input())]))\n",
    "docstring with a fence": "    \"\"\"\n    ```\n    f([1])\n    ```\n    \"\"\"\n" + BODY,
}


@pytest.mark.parametrize("name", SHAPES)
def test_extraction_finds_a_program_that_works(name):
    program = extract_code(SHAPES[name], PROMPT, "f")
    names: dict = {"__name__": "solution"}
    exec(compile(program, name, "exec"), names)
    assert names["f"]([1, 2, 4]) == 7
    assert names["helper"](1) == 2 and names["math"] is math  # the prompt's own context is kept


@pytest.mark.parametrize("text", ["", "  \n", "I am sorry, but I cannot help with that.", "# TODO", "<think>\ndef f(xs): return 1",
                                  "```python\nprint('hello')\n```", "The answer is 5."])
def test_extraction_says_none_where_there_is_no_code(text):
    assert extract_code(text, PROMPT, "f") is None


@pytest.mark.parametrize("text", ["    return (xs\n", "def f(xs):\n    return xs[\n", "```python\ndef f(xs)\n    return 1\n```",
                                  "    return sum(xs)\n  return 0\n", "    if xs:\n    return 1\n", "\treturn sum(xs)\n"])
def test_a_syntax_error_inside_the_function_is_not_repaired(text):
    program = extract_code(text, PROMPT, "f")
    assert program is not None
    with pytest.raises(SyntaxError):
        compile(program, "program", "exec")


def test_a_prompt_that_ends_within_a_line_is_continued_there():
    assert extract_code("return x\n", "def f(x):\n    ", "f") == "def f(x):\n    return x\n"


def test_extraction_survives_hostile_text_in_a_thread():
    hostile = ["(" * 200_000, "    return " + "-" * 100_000 + "1", "    return " + "[" * 5000, "    return " + "1+" * 50_000 + "1", "\0",
               "    return \0", "```" * 1000, "```python\n" * 500, "def f(x):\n" * 1000, "\ud800", "    return '\ud800'",
               "    if x:\n" * 2000, "    return f'" + "{" * 5000, "import os\n" * 2000 + "junk junk\n" * 10]
    done = []
    thread = threading.Thread(target=lambda: done.extend(extract_code(text, PROMPT, "f") for text in hostile))
    started = time.monotonic()
    thread.start()
    thread.join()
    assert len(done) == len(hostile)
    assert time.monotonic() - started < 30  # some seconds in practice; a quadratic search took minutes


# --------------------------------------------------------------------------------------------------------------------
# Plain data

VALUES = [None, True, False, 0, 1, -1, 2**62, -2**63, 2**63, 10**5000, -7**400, 0.0, -0.0, 1.5, 5e-324, math.inf, -math.inf, math.nan,
          "", "a\u2028b", "\ud800", "\x00", b"", b"\x00\xff", bytearray(b"ab"), 1 + 2j, complex(math.inf, -0.0), (), (1,), [], [1, [2, (3,)]],
          {}, {1: "a", "1": "b", (1, 2): [3], None: None}, {True: 1}, set(), {1, "a", (2,)}, frozenset({1}), {frozenset({1}): {2}},
          range(0), range(5, -5, -2), fractions.Fraction(1, 3), decimal.Decimal("1.20"), decimal.Decimal("NaN"), collections.deque([1, 2]),
          {"int": "ff"}, {"tuple": [1]}]


def same(a, b) -> bool:
    """Equal in value and in the types of all parts."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple, collections.deque)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items()))
    if isinstance(a, (set, frozenset)):
        return sorted(map(repr, a)) == sorted(map(repr, b))
    return repr(a) == repr(b) if not isinstance(a, int) else a == b  # repr: -0.0, nan; it is limited for big ints


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_plain_data_comes_back_with_value_and_type(value):
    assert same(from_plain(json.loads(json.dumps(to_plain(value)))), value)


def test_random_nested_data_comes_back():
    rng = random.Random(0)

    def make(depth: int):
        if depth == 0 or rng.random() < 0.3:
            return rng.choice([None, True, rng.randint(-2**70, 2**70), rng.random(), "x" * rng.randint(0, 3), b"y", 1j])
        kind = rng.choice([list, tuple, dict, set])
        items = [make(depth - 1) for _ in range(rng.randint(0, 4))]
        if kind is dict:
            return {f"k{i}": item for i, item in enumerate(items)}
        return {i for i in items if isinstance(i, (int, str))} if kind is set else kind(items)

    for _ in range(300):
        value = make(4)
        assert same(from_plain(json.loads(json.dumps(to_plain(value)))), value)


def test_subclasses_arrive_as_the_data_of_their_base():
    class Yes(str):
        def __eq__(self, other):
            return True
        __hash__ = str.__hash__

    class Zero(int):
        def __add__(self, other):
            return 7

    point = collections.namedtuple("point", "x y")
    for value, plain in ((Yes("ab"), "ab"), (Zero(3), 3), (point(1, 2), (1, 2)), (collections.Counter("aab"), {"a": 2, "b": 1}),
                         (collections.OrderedDict(a=1), {"a": 1}), (type("F", (float,), {})(-0.0), -0.0)):
        assert same(from_plain(to_plain(value)), plain)
    assert list(from_plain(to_plain(x for x in (1, 2)))) == [1, 2]
    assert from_plain(to_plain({"a": 1}.keys())) == {"a"}


@pytest.mark.parametrize("value", [object(), print, type, sys, [lambda: 1], {"a": object()}], ids=str)
def test_other_objects_are_refused(value):
    with pytest.raises(code_eval.NotPlainData):
        to_plain(value)


@pytest.mark.parametrize("data", [{}, {"set": [[1]]}, {"dict": [[[], 1]]}, {"int": "zz"}, {"int": 5}, {"float": "1"}, {"nosuch": 1}, {"a": 1, "b": 2},
                                  {"bytes": "g"}, {"Fraction": [1, 0]}, {"Decimal": "x"}, {"range": [1, 2, 0]}, {"complex": ["a", 1]},
                                  {"tuple": 5}, {"dict": [[1]]}], ids=str)
def test_malformed_data_is_refused(data):
    with pytest.raises(code_eval.NotPlainData):
        from_plain(data)


# --------------------------------------------------------------------------------------------------------------------
# What a test sees of the function

@pytest.mark.parametrize("program, test", [
    ("def f(x): return {'a': (1, [2.5]), 'b': {x}}", "assert candidate(3) == {'a': (1, [2.5]), 'b': {3}}"),
    ("def f(x): return (1, 2)", "assert candidate(0) != [1, 2]\nassert candidate(0) == (1, 2)"),
    ("def f(x): return x is True", "assert candidate(True) is True\nassert candidate(1) is False"),
    ("def f(*a, k=0): return sum(a) + k", "assert candidate(1, 2, k=4) == 7"),
    ("def f(x): return 2 ** x", "assert candidate(20000) == 1 << 20000"),
    ("def f(x): return x * float('nan')", "r = candidate(1)\nassert r != r"),
    ("def f(x): return map(str, x)", "assert tuple(candidate([1, 2])) == ('1', '2')"),
    ("def f(x):\n    yield from x", "assert list(candidate([1, 2])) == [1, 2]"),
    ("def f(x):\n    raise KeyError(x)", "try:\n    candidate('k')\nexcept KeyError:\n    return\nassert False"),
    ("class Odd(ValueError): pass\ndef f(x):\n    raise Odd", "try:\n    candidate(1)\nexcept ValueError:\n    return\nassert False"),
    ("def f(x): return x[5]", "try:\n    candidate([])\nexcept IndexError:\n    return\nassert False"),
    ("def f(x): return f(x + 1)", "try:\n    candidate(1)\nexcept RecursionError:\n    return\nassert False"),
    ("def f(x):\n    x.sort()\n    x.append(9)", "l = [3, 1]\nassert candidate(l) is None\nassert l == [1, 3, 9]"),
    ("def f(x):\n    x[0]['a'].add(5)", "inner = {'a': {1}}\ncandidate([inner, 2])\nassert inner == {'a': {1, 5}}"),
    ("def f(x, n=990): return x if n == 0 else f(x, n - 1)", "assert candidate(3) == 3"),  # as deep as in a plain script
    ("count = 0\ndef f():\n    global count\n    count += 1\n    return count", "assert [candidate(), candidate()] == [1, 2]"),
    ("from dataclasses import dataclass, astuple\n@dataclass\nclass P:\n    x: 'int'\ndef f(x): return astuple(P(x))", "assert candidate(1) == (1,)"),
    ("import random\ndef f(): return random.random()", "assert 0 <= candidate() < 1"),
    ("def f():\n    import tempfile, os\n    with tempfile.TemporaryFile() as t:\n        return t.write(b'abc')", "assert candidate() == 3"),
    ("def f(x): return x", "assert candidate.__name__ == 'f'"),
    ("import os\ndef f():\n    pid = os.fork()\n    if pid == 0: os._exit(3)\n    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])",
     "assert candidate() == 3"),
    ("import subprocess\ndef f(): return subprocess.run(['echo', 'hi'], capture_output=True, text=True).stdout", "assert candidate() == 'hi\\n'"),
    ("import subprocess, sys\ndef f(): return subprocess.run([sys.executable, '-c', 'print(5)'], capture_output=True).stdout",
     "assert candidate() == b'5\\n'"),
    ("from concurrent.futures import ThreadPoolExecutor\ndef f(x):\n    with ThreadPoolExecutor() as t: return list(t.map(abs, x))",
     "assert candidate([-1, 2]) == [1, 2]"),
    ("import multiprocessing\ndef g(x): return x * x\ndef f(x):\n    with multiprocessing.Pool(2) as p: return p.map(g, x)",
     "assert candidate([2, 3]) == [4, 9]"),
    ("import asyncio\nasync def g(): return 4\ndef f(): return asyncio.run(g())", "assert candidate() == 4"),
    ("import socket\ndef f():\n    with socket.socket() as s: return s.fileno() > 0", "assert candidate() is True"),
    ("import sqlite3, ssl, lzma, bz2, zlib, ctypes, csv, unittest\ndef f(): return 1", "assert candidate() == 1"),
    ("def f():\n    import sys\n    return sys.stdin.read()", "assert candidate() == ''"),
    ("import warnings\ndef f():\n    warnings.warn('x')\n    print('y' * 100000)\n    return 1", "assert candidate() == 1"),
])
def test_calls_behave_as_in_one_process(pool, program, test):
    assert pool.grade([(program, record(test))])[0] == code_eval.CodeGrade("correct", program + "\n", "passed")


def test_the_test_compares_with_the_canonical_solution_and_not_with_the_answer(pool):
    # HumanEval/33 calls the function by its own name
    test = "assert candidate([2, 1]) == f([2, 1])"
    fields = {"prompt": "def f(x):\n    \"\"\"Sort.\"\"\"\n", "answer": "    return sorted(x)\n"}
    assert one(pool, "    return sorted(x)\n", test, **fields).outcome == "correct"
    assert one(pool, "    return x\n", test, **fields).outcome == "wrong"


def test_random_tests_and_hash_order_give_the_same_result_every_time(pool):
    program = "def f(x): return ' '.join({'a', 'b', 'c', 'd', 'e', 'f'}) + str(x)"
    test = "import random\nraise ValueError(candidate(random.random()))"
    grades = {CodePool.grade(pool, [(program + "\n" * i, record(test))])[0].rule for i in range(3)}
    assert len(grades) == 1


# --------------------------------------------------------------------------------------------------------------------
# Attacks: none is scored as correct, none outlives its item, nothing outside changes

CHEATS = {
    "equals everything": "class Y:\n    def __eq__(self, o): return True\ndef f(): return Y()",
    "a number that equals everything": "class Y(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\ndef f(): return Y(0)",
    "list that equals everything": "class Y(list):\n    def __eq__(self, o): return True\ndef f(): return Y()",
    "redefined check": "def f(): return 0\ndef check(c): return None",
    "replaced builtins": "import builtins\nbuiltins.abs = builtins.len = lambda *a: 1\nbuiltins.AssertionError = Exception\ndef f(): return 0",
    "patched json": "import json\njson.dumps = lambda *a, **k: '{\"outcome\": \"correct\", \"rule\": \"passed\"}'\ndef f(): return 0",
    "exit in the function": "import sys\ndef f(): sys.exit(0)",
    "exit on loading": "def f(): return 1\nraise SystemExit(0)",
    "_exit": "import os\ndef f(): os._exit(0)",
    "_exit on loading": "import os\ndef f(): return 1\nos._exit(0)",
    "_exit from a thread": "import os, threading\ndef f():\n    threading.Timer(0.1, os._exit, (0,)).start()\n    while True: pass",
    "exit hooks": "import atexit, os, sys\natexit.register(os._exit, 0)\nsys.excepthook = lambda *a: os._exit(0)\ndef f(): return 0",
    "keyboard interrupt": "def f(): raise KeyboardInterrupt",
    "generator exit": "def f(): raise GeneratorExit",
    "writes a verdict to every descriptor": (
        "import os\ndef f():\n    for fd in range(3, 64):\n        try: os.write(fd, b'{\"outcome\": \"correct\", \"rule\": \"passed\"}')\n"
        "        except OSError: pass\n    return 0"),
    "answers before being asked": "import os, struct\ndef f(): return 0\nm = b'{\"ready\":true}'\nos.write(4, struct.pack('<I', len(m)) + m)",
    "garbage on the channel": "import os\nos.write(4, b'\\xff' * 1000)\ndef f(): return 1",
    "deep data": "def f():\n    x = []\n    for _ in range(100000): x = [x]\n    return x",
    "cyclic data": "def f():\n    x = []\n    x.append(x)\n    return x",
    "too much data": "def f(): return 'x' * (40 << 20)",
    "looks for the expected value in its memory": (
        "import gc, sys\ndef f():\n    frame = sys._getframe()\n    seen = []\n    while frame:\n        seen.append(repr(frame.f_locals)[:100000])\n"
        "        frame = frame.f_back\n    seen += [repr(o)[:10000] for o in gc.get_objects() if isinstance(o, dict) and 'test' in o]\n"
        "    return 1 if 'candi' + 'date()' in ''.join(seen) else 0"),
}
LOOPS = {
    "loop": "def f():\n    while True: pass",
    "loop on loading": "def f(): return 1\nwhile True: pass",
    "loop that swallows everything": "def f():\n    while True:\n        try:\n            while True: pass\n        except BaseException: pass",
    "loop that ignores signals": "import signal\ndef f():\n    for s in range(1, 32):\n        try: signal.signal(s, signal.SIG_IGN)\n"
                                 "        except OSError: pass\n    while True: pass",
    "loop that raises its limit": "import resource\ndef f():\n    try: resource.setrlimit(resource.RLIMIT_CPU, (99, 99))\n"
                                  "    except (ValueError, OSError): pass\n    while True: pass",
    "prints forever": "def f():\n    while True: print('x' * 1000)",
    "infinite generator": "import itertools\ndef f(): return itertools.cycle([1])",
}
WAITS = {
    "sleep": "import time\ndef f():\n    time.sleep(100)\n    return 1",
    "sleep in a child": "import os, time\ndef f():\n    if os.fork() == 0: time.sleep(100)\n    os.wait()\n    return 1",
    "thread that is joined": "import threading, time\ndef f():\n    t = threading.Thread(target=time.sleep, args=(100,))\n    t.start()\n    t.join()\n    return 1",
    "subprocess": "import subprocess\ndef f():\n    subprocess.run(['/bin/sleep', '100'])\n    return 1",
    "own session": "import os, time\ndef f():\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0: time.sleep(100)\n        os._exit(0)\n"
                   "    time.sleep(100)\n    return 1",
    "stops itself": "import os, signal\ndef f():\n    import time\n    os.kill(os.getpid(), signal.SIGSTOP)\n    time.sleep(100)\n    return 1",
}
BREAKS = {
    "reads stdin": "def f(): return int(input())",
    "recursion": "def f(): return f()",
    "stack overflow": "import sys\ndef f(n=0):\n    sys.setrecursionlimit(10 ** 9)\n    return f(n + 1)",
    "memory": "def f():\n    blocks = []\n    while True: blocks.append(bytearray(256 << 20))",
    "one huge allocation": "def f(): return len('x' * (1 << 40))",
    "segmentation fault": "import ctypes\ndef f(): return ctypes.string_at(0)",
    "abort": "import os\ndef f(): os.abort()",
    "big file": "def f():\n    with open('big', 'wb') as h: h.write(b'x' * (17 << 20))\n    return 1",
    "many files' worth": "def f():\n    for i in range(10):\n        with open(f'b{i}', 'wb') as h: h.write(b'x' * (10 << 20))\n    return 1",
    "kills everything": "import os\ndef f():\n    os.kill(-1, 9)\n    return 1",
}


@pytest.mark.parametrize("name", CHEATS)
def test_cheating_is_not_scored(pool, name):
    assert one(pool, CHEATS[name]).outcome == "wrong"


@pytest.mark.parametrize("name", BREAKS)
def test_breaking_programs_are_wrong_and_the_next_one_is_graded(pool, name):
    broken, fine = pool.grade([(BREAKS[name], record("assert candidate() == 1")), ("    return x + y\n", ADD)])
    assert broken.outcome in ("wrong", "timeout")  # filling the memory can take more than the CPU second
    assert fine.outcome == "correct"


def live_processes(root: int | None = None) -> set[str]:
    """Ids of the living descendants of a process (default: this one)."""
    found, parents = set(), {str(root or os.getpid())}
    parent_of = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent_of[entry.name] = (entry / "stat").read_text().rsplit(")", 1)[1].split()[1]
            except OSError:
                continue
    while parents:
        parents = {pid for pid, parent in parent_of.items() if parent in parents} - found
        found |= parents
    return found


def is_alive(pid: str) -> bool:
    """Whether a process runs; one that is dead and only not yet reaped (a container's first process may never do it) does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def test_endless_programs_end_with_all_they_started(pool):
    before = live_processes()
    started = time.monotonic()
    # loops meet the CPU limit long before the wall limit; programs that wait meet only the wall limit
    for programs, limits in ((LOOPS, CodeLimits(cpu_s=1, wall_s=30.0)), (WAITS, CodeLimits(cpu_s=1, wall_s=2.0))):
        with CodePool(workers=3, limits=limits) as opened:
            grades = opened.grade([(program, record("assert candidate() == 1")) for program in programs.values()])
            assert len(live_processes() - before) <= 2 * 3  # the sandboxes themselves: one starter and one server each
        assert {name: grade.outcome for name, grade in zip(programs, grades)} == dict.fromkeys(programs, "timeout")
        assert live_processes() <= before
    assert time.monotonic() - started < 120  # 7 CPU seconds and 4 s of waiting: 8 s on an idle machine, 50 s seen on a very busy one


def test_nothing_survives_a_killed_caller(pool):
    item = (WAITS["own session"], record("assert candidate() == 1"))
    program = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport utils_code_eval\nutils_code_eval.grade_code([{item!r}], 1)\n"
    caller = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + 60
    while len(live_processes(caller.pid)) < 5 and time.monotonic() < deadline:  # starter, server, checker, program, its children
        time.sleep(0.1)
    started = live_processes(caller.pid)
    caller.kill()
    caller.wait()
    assert len(started) >= 5
    while any(map(is_alive, started)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not list(filter(is_alive, started))


@pytest.mark.parametrize("kept_waiting_s, limit_s", [(0.0, 0.2), (0.2, 0.4), (99.0, 0.2 * code_eval.MAX_STRETCH)])
def test_waiting_for_a_processor_does_not_count(kept_waiting_s, limit_s):
    reader, writer = os.pipe()
    here, there = socket.socketpair()
    started = time.monotonic()
    verdict, stretch_s = code_eval._await_verdict(reader, here, started, 0.2, lambda: kept_waiting_s)
    assert verdict == {"late": True} and stretch_s == pytest.approx(limit_s - 0.2)
    assert time.monotonic() - started >= limit_s
    for fd in (reader, writer):
        os.close(fd)
    here.close()
    there.close()


def test_the_kernel_says_how_long_a_process_was_kept_waiting():
    proc = os.open("/proc", os.O_RDONLY)
    reader, writer = os.pipe()
    children = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(3 * len(os.sched_getaffinity(0)))]
    try:
        os.write(writer, "".join(f"{child.pid}\n" for child in children).encode())
        time.sleep(1.5)
        waited = code_eval._kept_waiting(reader, {"hosts": [], "proc": proc})
    finally:
        for child in children:
            child.kill()
            child.wait()
        for fd in (proc, reader, writer):
            os.close(fd)
    assert waited > 1.0  # three hogs a core for 1.5 s: each core keeps at least two waiting, 3 s in all


def test_a_fork_bomb_is_contained(pool):
    bomb = "import os\ndef f():\n    while True:\n        try: os.fork()\n        except OSError: pass"
    started = time.monotonic()
    assert grade_code([(bomb, record("assert candidate() == 1"))], 1, CodeLimits(cpu_s=1, wall_s=3.0))[0].outcome == "timeout"
    assert time.monotonic() - started < 30
    assert one(pool, "def f(): return 1").outcome == "correct"


def test_a_thread_left_behind_does_not_matter(pool):
    program = "import threading, time\ndef f():\n    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n    return 1"
    assert one(pool, program).outcome == "correct"


def test_nothing_outside_is_reached(pool, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("1")
    target = tmp_path / "written.txt"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        attempts = {
            "read": f"def f(): return int(open({str(secret)!r}).read())",
            "write": f"def f():\n    open({str(target)!r}, 'w').write('x')\n    return 1",
            "write to a system folder": "def f():\n    open('/usr/x', 'w').write('x')\n    return 1",
            "write to the root": "def f():\n    open('/x', 'w').write('x')\n    return 1",
            "connect": f"import socket\ndef f():\n    socket.create_connection(('127.0.0.1', {port}), timeout=1)\n    return 1",
            "re-imported socket": f"import importlib, _socket\ndef f():\n    s = _socket.socket(2, 1)\n    s.connect(('127.0.0.1', {port}))\n    return 1",
            "environment": f"import os\ndef f(): return 1 if os.environ.get({next(iter(os.environ))!r}) is not None else 0",
            "signal": f"import os\ndef f():\n    os.kill({os.getpid()}, 0)\n    return 1",
            "project": f"import os\ndef f(): return int(os.path.exists({str(ROOT)!r}))",
            "home": "import os\ndef f(): return int(os.path.exists('/home') or os.path.exists('/proc/1'))",
            "mount": "import ctypes\ndef f(): return int(ctypes.CDLL(None).mount(b't', b'/tmp', b'tmpfs', 0, None) == 0)",
            "namespace": "import ctypes\ndef f(): return int(ctypes.CDLL(None).unshare(0x10000000) == 0)",
            "other user": "import os\ndef f():\n    os.setuid(0)\n    return 1",
            "device": "import os\ndef f():\n    os.mknod('/tmp/d', 0o600 | 0o060000, os.makedev(254, 0))\n    return 1",
        }
        grades = pool.grade([(program, record("assert candidate() == 1")) for program in attempts.values()])
        with pytest.raises(TimeoutError):
            server.accept()
    assert {name: grade.outcome for name, grade in zip(attempts, grades)} == dict.fromkeys(attempts, "wrong")
    assert not target.exists()


def test_items_leave_nothing_for_the_next(pool):
    writer = "def f():\n    open('/tmp/left', 'w').write('x')\n    import builtins, sys\n    builtins.mark = sys.mark = 1\n    return 1"
    reader = "import builtins, os, sys\ndef f(): return len(os.listdir('/tmp') + os.listdir('.')) + 1 + hasattr(builtins, 'mark') + hasattr(sys, 'mark')"
    with CodePool(workers=1, limits=QUICK) as opened:
        assert [grade.outcome for grade in opened.grade([(writer, record("assert candidate() == 1")), (reader, record("assert candidate() == 1"))])] == [
            "correct", "correct"]


def test_probes_can_find_a_hole():
    # in this very process, which nothing protects, each intrusion works; so a status of True means something
    with socket.create_server(("127.0.0.1", 0)) as listener:
        facts = {"port": listener.getsockname()[1], "path": str(ROOT / "utils_code_eval.py"), "pid": os.getpid(), "sid": os.getsid(0)}
        for probe in code_eval._PROBES.values():
            names: dict = {}
            exec(probe.format(**facts), names)
            assert names["probe"]() is True


def test_missing_protections_need_the_flag(monkeypatch):
    monkeypatch.setattr(code_eval, "_status", {"isolation": "none", "network": False, "files": True, "processes": True,
                                               "missing": ["the network is reachable"], "reason": "no namespaces"})
    with pytest.raises(UserError, match="network is reachable.*--allow_unsafe_code_execution"):
        grade_code([("    return x + y\n", ADD)])


def test_limits_hold_without_namespaces(monkeypatch):
    sandbox = code_eval._Sandbox("none")
    try:
        sandbox.start()
    except OSError as error:
        pytest.skip(f"not possible for this user: {error}")
    finally:
        sandbox.close()
    monkeypatch.setattr(code_eval, "_status", {"isolation": "none", "missing": ["everything"], "reason": "test"})
    programs = ["def f(): return 1", "def f(): return 2", "def f():\n    while True: pass", WAITS["own session"]]
    before = live_processes()
    grades = grade_code([(program, record("assert candidate() == 1")) for program in programs], 2, QUICK, allow_unsafe=True)
    assert [grade.outcome for grade in grades] == ["correct", "wrong", "timeout", "timeout"]
    assert live_processes() <= before


# --------------------------------------------------------------------------------------------------------------------
# Pool, benchmark check, data sets

def test_results_do_not_depend_on_workers_order_or_repetition():
    items = [(f"    return x + y + {i % 3}\n", ADD) for i in range(12)] + [("", ADD), ("    return (x\n", ADD), ("    return z\n", ADD)]
    alone = grade_code(items, workers=1, limits=QUICK)
    assert [grade.outcome for grade in alone] == ["correct", "wrong", "wrong"] * 4 + ["unparsed", "wrong", "wrong"]
    assert grade_code(items, workers=3, limits=QUICK) == alone
    assert grade_code(items[::-1], workers=2, limits=QUICK) == alone[::-1]


def test_identical_programs_run_once(pool, monkeypatch):
    ran = []
    real = code_eval._Sandbox.run
    monkeypatch.setattr(code_eval._Sandbox, "run", lambda self, *args: ran.append(1) or real(self, *args))
    other = {**ADD, "test": "def check(candidate):\n    assert candidate(1, 1) == 2\n"}
    grades = pool.grade([("    return x + y\n", ADD)] * 20 + [("    return x + y\n", other)])
    assert [grade.outcome for grade in grades] == ["correct"] * 21 and len(ran) == 2


def test_grading_works_from_several_threads(pool):
    results: dict[int, list] = {}
    threads = [threading.Thread(target=lambda i=i: results.update({i: pool.grade([(f"    return x + y + {i}\n", ADD)])})) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[i][0].outcome for i in range(4)] == ["correct", "wrong", "wrong", "wrong"]


def test_a_sandbox_that_is_killed_is_replaced(pool):
    assert one(pool, "def f(): return 1 # first").outcome == "correct"
    for _ in range(pool.workers):
        sandbox = pool.idle.get()
        if sandbox.process:
            sandbox.process.kill()  # as the kernel would when memory runs out
        pool.idle.put(sandbox)
    assert one(pool, "def f(): return 1 # second").outcome == "correct"


def test_a_benchmark_that_fails_its_own_tests_is_refused():
    good, bad = ADD, {**ADD, "id": "bad/1", "answer": "    return x - y\n"}
    assert check_canonical([good], workers=1)["num_passed"] == 1
    with pytest.raises(UserError, match=r"1 of 2 canonical solutions.*bad/1 \(assertion failed\)"):
        check_canonical([good, bad], workers=1)
    with pytest.raises(UserError, match="no canonical solution in `answer` of bad/1"):
        check_canonical([good, {**bad, "answer": " "}], workers=1)


def test_all_humaneval_solutions_pass_with_twice_as_many_workers_as_cores():
    problems = list(humaneval().values())
    assert check_canonical(problems, workers=2 * len(os.sched_getaffinity(0)))["num_passed"] == len(problems) == 164


def test_labelled_cases_are_all_judged_as_labelled():
    problems, cases = humaneval(), rows("code/cases_dev.jsonl")
    # cpu_s 1: the slowest correct case needs 0.2 s; wall_s 6: it sleeps for 1 s, and the cases that hang do so for 30 s and more
    grades = grade_code([(case["completion"], problems[case["task_id"]]) for case in cases], workers=8, limits=CodeLimits(cpu_s=1, wall_s=6.0))
    wrong = [(case["id"], case["kind"], grade.rule) for case, grade in zip(cases, grades)
             if (grade.outcome == "correct") != case["expected_pass"]]
    assert not wrong


# --------------------------------------------------------------------------------------------------------------------
# Command line

def run_cli(*args) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(ROOT / "utils_code_eval.py"), *map(str, args)], capture_output=True, text=True, timeout=120)


def write_lines(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


RAW = {"task_id": "T/0", "prompt": ADD["prompt"], "entry_point": "add", "canonical_solution": ADD["answer"], "test": ADD["test"]}


def test_the_command_grades_a_file(tmp_path):
    texts = ["    return x + y\n", "    return '\ud800'\n", "no idea"]  # half a character, as a cut response can hold
    samples = write_lines(tmp_path / "in.jsonl", [{"task_id": "T/0", "completion": text, "mark": i} for i, text in enumerate(texts)])
    problems = write_lines(tmp_path / "problems.jsonl", [RAW])
    as_array = tmp_path / "problems.json"
    as_array.write_text(json.dumps([{**ADD, "id": "T/0"}], indent=1))
    for path in (problems, as_array):
        done = run_cli("--input", samples, "--problems", path, "--output", tmp_path / "out.jsonl")
        assert done.returncode == 0, done.stderr
        assert "canonical solutions: 1/1 pass" in done.stdout and "correct 1, wrong 1, unparsed 1, timeout 0" in done.stdout
        graded = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert [(row["mark"], row["outcome"], row["rule"]) for row in graded] == [
            (0, "correct", "passed"), (1, "wrong", graded[1]["rule"]), (2, "unparsed", "no code found")]


@pytest.mark.parametrize("change, message", [
    ({"input": [{"task_id": "T/9", "completion": ""}]}, "row 1: task_id 'T/9' is not in the problem file"),
    ({"input": [{"task_id": "T/0"}]}, "row 1: needs `task_id` and `completion`"),
    ({"input": []}, "holds no completions"),
    ({"problems": []}, "holds no problems"),
    ({"problems": [RAW, RAW]}, "id 'T/0' appears twice"),
    ({"problems": [{**RAW, "test": "assert True"}]}, "does not define|defines check"),
    ({"problems": [{k: v for k, v in RAW.items() if k != "prompt"}]}, "needs `prompt`"),
    ({"problems": [{**RAW, "canonical_solution": "    return 1\n"}]}, "canonical solutions fail their own tests"),
])
def test_a_wrong_request_is_one_line_and_writes_nothing(tmp_path, change, message):
    samples = write_lines(tmp_path / "in.jsonl", change.get("input", [{"task_id": "T/0", "completion": ""}]))
    problems = write_lines(tmp_path / "problems.jsonl", change.get("problems", [RAW]))
    done = run_cli("--input", samples, "--problems", problems, "--output", tmp_path / "out.jsonl")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not (tmp_path / "out.jsonl").exists()
    assert any(part in done.stderr for part in message.split("|")), done.stderr
