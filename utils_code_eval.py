"""Code grading: take the function out of a response, run it in a sandbox, let the benchmark's own tests judge it.

In:  (completion, problem record) pairs; a record has `id, prompt, entry_point, test` (HumanEval style: `test` defines
     `check(candidate)`) and, as `answer`, the canonical solution.
Out: one CodeGrade(outcome, extracted, rule) a pair; outcome is correct | wrong | unparsed | timeout.

    python utils_code_eval.py --input samples.jsonl --problems humaneval.jsonl --output graded.jsonl     # minutes, CPU

How a completion is judged
  * `extract_code` turns the response (bare body, whole function, fenced, surrounded by prose) into one program.
  * Two processes run it. The *function process* executes the program; the *checker* holds the benchmark's test and its canonical
    solution. `candidate` in the checker is a proxy: arguments go out and results come back as plain data in the encoding below,
    so an object that claims to equal everything arrives as what it is, and a replaced builtin is replaced elsewhere. The test's
    text never enters the memory of a process that the function process is forked from.
  * A result is `correct` only when the checker itself says so after `check(candidate)` returned. No exit status counts.

The sandbox (one per worker) is an interpreter in namespaces of its own (user, mount, process, network, IPC, host name) that sees
read-only system libraries and this Python's standard library, an empty environment and nothing else. It forks per item, and each
function process gets in addition its own process namespace, session, empty temporary folder, limits, and no capabilities, so
items are as far apart as with a sandbox each, at a few milliseconds instead of a whole interpreter start.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import ctypes
import decimal
import errno
import fractions
import json
import math
import os
import platform
import re
import resource
import select
import signal
import socket
import struct
import sys
import textwrap
import time
import types
import warnings
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import queue
    import subprocess
    from collections.abc import Callable

# This file is also the program inside the sandbox. So config and utils_run, which do not exist there, are imported where used, and
# so are subprocess, queue, tempfile and concurrent.futures: they import threading or random, whose after-fork handlers would add
# 0.4 ms to each of the three forks of an item.


@dataclass(frozen=True)
class CodeLimits:
    """What one completion may use; each limit holds for the function process and for the checker separately.

    cpu_s: CPU seconds of a process (whole seconds, RLIMIT_CPU). Does not grow with the load of the machine.
    wall_s: seconds for the whole item, without those in which it was ready to run and got no processor (up to MAX_STRETCH).
    memory_mib: address space of a process. processes: processes and threads that exist at once.
    file_mib: size of one written file. temp_mib: size of the temporary folder (held in memory).
    message_mib: size of one encoded argument list or result.
    """

    cpu_s: int = 5
    wall_s: float = 15.0
    memory_mib: int = 2048
    processes: int = 32
    file_mib: int = 16
    temp_mib: int = 64
    message_mib: int = 16


@dataclass(frozen=True)
class CodeGrade:
    """outcome: correct | wrong | unparsed | timeout. extracted: the program that ran, or None. rule: why, in a few words."""

    outcome: str
    extracted: str | None
    rule: str


_STARVED = "wall limit on a busy machine"
ASLEEP_SHARE = 0.02           # without namespaces, where waiting is not measured: a program with less CPU than this share slept
OUTCOMES = ("correct", "wrong", "unparsed", "timeout")
MAX_PROGRAM_CHARS = 1 << 20   # a longer "solution" is not read: parsing it would cost the parent minutes
START_TIMEOUT_S = 60.0        # a sandbox that has not reported by then does not come up (an interpreter start under heavy load)
MAX_STRETCH = 3               # the wall limit at most grows by this factor on a busy machine; then the item is run once more, alone
ANSWER_SLACK_S = 20.0         # beyond that, before a silent sandbox itself is killed and replaced
MAX_REASON_CHARS = 200        # of an exception's text kept in `rule`


# --------------------------------------------------------------------------------------------------------------------
# 1. From a response to a program

_SPECIAL_TOKEN = re.compile(r"<\|[A-Za-z0-9_▁]{2,40}\|>|</s>\s*\Z")  # where a decoder left them in the text, the answer has ended
_FENCE = re.compile(r"^([ \t]{0,12})(`{3,}|~{3,})[ \t]*(.*)$")
_FENCE_TAG = re.compile(r"(?:\{?\.?)(?:python|python3|py|py3|ipython|pycon|code|text|plaintext)?\}?", re.IGNORECASE)
_MAX_STARTS = 50  # lines of prose that look like the start of code and are tried as such
_CODE_START = re.compile(r"(?:async[ \t]+def|def|class|import|from|@|if|try|for|[A-Za-z_]\w*[ \t]*(?::[^=\n]+)?=[^=])")


def extract_code(completion: str, prompt: str, entry_point: str) -> str | None:
    """The program to run for a completion of `prompt`: the prompt's imports and helpers, then the completion's code.

    Accepted, in this order: a bare continuation of the prompt (base style); a whole function, with helpers; a fenced block with
    or without tag, closed or not, holding a function or a body (the last one that defines the function wins); a function or an
    indented body with prose around it. Text after the code that is not Python is cut off, at top level only: a syntax error inside
    the function stays one. Reasoning between <think> tags and special tokens are dropped.

    Args:    completion: the response. prompt: the signature and docstring it continues. entry_point: the function's name.
    Returns: a program that is meant to define `entry_point` (it need not compile), or None where no code is found.
    """
    prompt, text = _newlines(prompt), _newlines(completion)
    text = text.rsplit("</think>", 1)[-1]
    if "<think>" in text:  # reasoning that never ended: nothing after it is an answer
        text = text.split("<think>", 1)[0]
    text = _SPECIAL_TOKEN.split(text, maxsplit=1)[0]
    if not text.strip() or len(text) > MAX_PROGRAM_CHARS:
        return None
    return (_as_it_is(text, prompt, entry_point) or _from_fences(text, prompt, entry_point)
            or _from_prose(text, prompt, entry_point) or _broken(text, prompt, entry_point))


def _newlines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _parse(source: str) -> ast.Module | SyntaxError:
    """The syntax tree, or the error; nesting too deep for the parser counts as a syntax error."""
    try:
        with warnings.catch_warnings():  # "invalid escape sequence" in a model's code is no news for the user's terminal
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except SyntaxError as error:
        return error
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes; nesting
        return SyntaxError(str(error) or type(error).__name__)


def _compiles(source: str) -> bool:
    return isinstance(_parse(source), ast.Module)


def _binds(statement: ast.stmt, name: str) -> bool:
    """Whether a top-level statement binds `name`; looks into if/try/with blocks, not into functions."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return statement.name == name
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return any(isinstance(node, ast.Name) and node.id == name for target in targets for node in ast.walk(target))
    inner = [child for field in ("body", "orelse", "finalbody") for child in getattr(statement, field, [])]
    inner += [child for handler in getattr(statement, "handlers", []) for child in handler.body]
    return any(_binds(child, name) for child in inner)


def _defines(source: str, entry_point: str) -> bool:
    tree = _parse(source)
    return isinstance(tree, ast.Module) and any(_binds(statement, entry_point) for statement in tree.body)


def _preamble(prompt: str, entry_point: str) -> str:
    """What the prompt has before the function to complete: imports, constants, helpers."""
    found = list(re.finditer(rf"^(?:@.*\n)*(?:async[ \t]+)?def[ \t]+{re.escape(entry_point)}\b", prompt, re.MULTILINE))
    before = prompt[:found[-1].start()] if found else prompt
    return before if _compiles(before) else ""


def _with_preamble(code: str, prompt: str, entry_point: str) -> str:
    """Preamble, then a whole function. `from __future__` lines move to the top, where Python demands them."""
    future = [line for line in code.split("\n") if line.startswith("from __future__ ")]
    rest = "\n".join("" if line.startswith("from __future__ ") else line for line in code.split("\n"))
    return "".join(line + "\n" for line in future) + _preamble(prompt, entry_point) + rest.rstrip() + "\n"


def _is_indented(text: str) -> bool:
    """Whether the first line that is neither blank nor a comment starts with white space."""
    lines = (line for line in text.split("\n") if line.strip() and not line.lstrip().startswith("#"))
    return next(lines, "x")[0] in " \t"


def _longest_program(lines: list[str], context: str = "") -> str | None:
    """The longest start of `lines` that compiles after `context`, cut only where a line begins at column 0.

    A start that still holds the line of the first syntax error cannot compile, so each attempt jumps before that line.
    """
    boundaries = [i for i, line in enumerate(lines) if i > 0 and line[:1].strip() and not line.startswith("#")] + [len(lines)]
    offset = context.count("\n")
    while boundaries:
        code = "\n".join(lines[:boundaries.pop()]) + "\n"
        tree = _parse(context + code)
        if isinstance(tree, ast.Module):
            return code if code.strip() else None
        error_line = (tree.lineno or 1) - 1 - offset  # index into lines
        while boundaries and boundaries[-1] > max(error_line, 0):
            boundaries.pop()
    return None


def _as_it_is(text: str, prompt: str, entry_point: str) -> str | None:
    """The response is code and nothing else: a continuation of the prompt, or a whole function."""
    within_line = prompt and not prompt.endswith("\n")  # such a prompt is continued where it stops
    continues = _is_indented(text) or within_line
    if continues and _compiles(prompt + text):
        return prompt + text
    if not _is_indented(text) and _defines(text, entry_point):
        return _with_preamble(text, prompt, entry_point)
    return None


def _fenced_blocks(text: str) -> tuple[list[str], str]:
    """Contents of the fenced blocks in order, and the text before the first fence. The last block may be unclosed."""
    blocks: list[str] = []
    before: list[str] = []
    block: list[str] | None = None
    margin, fence = "", ""
    for line in text.split("\n"):
        mark = _FENCE.match(line)
        if block is None:
            if not mark:
                if not blocks:
                    before.append(line)
                continue
            margin, fence, tag = mark[1], mark[2], mark[3].strip()
            # "```def f(x):" has no tag but code; a greedy tag would swallow it
            block = [] if _FENCE_TAG.fullmatch(tag.split(" ")[0] if tag else "") and " " not in tag else [tag]
            if tag and block and _FENCE_TAG.fullmatch(tag.split(" ")[0]):
                rest = tag.split(" ", 1)[1]
                block = [rest] if _CODE_START.match(rest) else []  # "python title=a.py" is no code
        elif mark and mark[2].startswith(fence) and not mark[3].strip():
            blocks.append("\n".join(block))
            block = None
        elif line.rstrip().endswith(fence):  # closed at the end of a line of code
            blocks.append("\n".join([*block, line.rstrip()[:-len(fence)]]))
            block = None
        else:
            block.append(line[len(margin):] if line.startswith(margin) else line)
    if block is not None and "".join(block).strip():
        blocks.append("\n".join(block))
    return blocks, "\n".join(before)


def _body_program(block: str, prompt: str, entry_point: str) -> str | None:
    """Program for a fenced block that holds a body: indented, or at column 0 with a `return` or `yield` of its own."""
    if _is_indented(block):
        return prompt + block if _compiles(prompt + block) else None
    tree = _parse("def _f():\n" + textwrap.indent(block, "    "))
    if not isinstance(tree, ast.Module) or len(tree.body) != 1:
        return None
    pending, returns = list(tree.body[0].body), False
    while pending:
        node = pending.pop()
        returns = returns or isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom))
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            pending.extend(ast.iter_child_nodes(node))
    program = prompt + textwrap.indent(block, "    ") + "\n"
    return program if returns and _compiles(program) else None


def _from_fences(text: str, prompt: str, entry_point: str) -> str | None:
    blocks, before = _fenced_blocks(text)
    if not blocks and before == text:
        return None
    for block in reversed(blocks):
        for code in (block, textwrap.dedent(block)):
            if _defines(code, entry_point):
                return _with_preamble(_with_helpers(code, blocks), prompt, entry_point)
    # The opening fence may have been part of the prompt: then the answer ends at the first fence of the response.
    for code in (_as_it_is(before, prompt, entry_point), *(_body_program(block, prompt, entry_point) for block in reversed(blocks))):
        if code:
            return code
    return None


def _with_helpers(code: str, blocks: list[str]) -> str:
    """`code`, after those other blocks of the same response that define names it uses and does not define itself."""
    tree = _parse(code)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    own = {name for name in used if any(_binds(statement, name) for statement in tree.body)}
    helpers = []
    for block in blocks:
        other = _parse(textwrap.dedent(block))
        if block is not code and isinstance(other, ast.Module) and _defines_any(other, used - own):
            helpers.append(textwrap.dedent(block))
    return "\n".join([*helpers, code])


def _defines_any(tree: ast.Module, names: set[str]) -> bool:
    return any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in names for node in tree.body)


def _from_prose(text: str, prompt: str, entry_point: str) -> str | None:
    """Code without fences and prose before or after it."""
    lines = text.split("\n")
    if _is_indented(text):
        body = _longest_program(lines, prompt)
        return prompt + body if body else None
    start, tries = 0, 0
    while start < len(lines) and tries < _MAX_STARTS:
        piece = None
        if _CODE_START.match(lines[start]):
            tries += 1
            piece = _longest_program(lines[start:])
            if piece and _defines(piece, entry_point):
                return _with_preamble(piece, prompt, entry_point)
        start += piece.count("\n") if piece else 1  # what compiles as a whole holds no better start
    # A body after a paragraph: the paragraph ends in a blank line and is itself no Python.
    for i in range(1, len(lines)):
        if lines[i][:1] in (" ", "\t") and lines[i].strip() and not lines[i - 1].strip() and not _compiles("\n".join(lines[:i])):
            body = _longest_program(lines[i:], prompt)
            return prompt + body if body else None
    return None


def _broken(text: str, prompt: str, entry_point: str) -> str | None:
    """What is meant as code and does not compile: kept, so that it counts as a wrong answer and not as a missing one."""
    blocks, _ = _fenced_blocks(text)
    for part in [*reversed(blocks), text]:
        found = re.search(rf"^[ \t]*(?:async[ \t]+)?def[ \t]+{re.escape(entry_point)}\b", part, re.MULTILINE)
        if found:
            return _with_preamble(part[found.start():], prompt, entry_point)
    return prompt + text if _is_indented(text) else None


# --------------------------------------------------------------------------------------------------------------------
# 2. Plain data: what crosses between the function and the checker
#
# JSON, in which None, bool, str, list, finite floats and 64-bit integers are themselves, and every other type is an object with
# one key, its tag. Decoding creates only the types below, never a class of the sender's choosing.

class NotPlainData(Exception):
    """A value that has no encoding, or text that is not one."""


_INT64 = 1 << 63
_DICT_VIEWS = {type({}.keys()): "dict_keys", type({}.values()): "dict_values", type({}.items()): "dict_items"}
_SUBCLASSES = (str, int, float, complex, bytes, bytearray, tuple, list, dict, set, frozenset, collections.deque)


def to_plain(value: object) -> object:
    """JSON-ready form of a value.

    Args:    value: None, bool, int (any size), float (nan and infinities too), complex, str, bytes, bytearray, list, tuple, dict,
             set, frozenset, deque, range, Fraction, Decimal, dict views and iterators (whose items are taken), nested. An instance
             of a subclass (named tuple, Counter, IntEnum, a str with its own __eq__) is sent as the data of its base.
    Raises:  NotPlainData for anything else; RecursionError for a value that contains itself.
    """
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -_INT64 <= value < _INT64 else {"int": hex(value)}  # hex: decimal text of big ints is quadratic and limited
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is list:
        return [to_plain(item) for item in value]
    if kind in (tuple, set, frozenset, collections.deque):
        return {kind.__name__: [to_plain(item) for item in value]}
    if kind is dict:
        return {"dict": [[to_plain(key), to_plain(item)] for key, item in value.items()]}
    if kind in (bytes, bytearray):
        return {kind.__name__: value.hex()}
    if kind is complex:
        return {"complex": [to_plain(value.real), to_plain(value.imag)]}
    if kind is range:
        return {"range": [to_plain(value.start), to_plain(value.stop), to_plain(value.step)]}
    if kind is fractions.Fraction:
        return {"Fraction": [to_plain(value.numerator), to_plain(value.denominator)]}
    if kind is decimal.Decimal:
        return {"Decimal": str(value)}
    if kind in _DICT_VIEWS:
        return {_DICT_VIEWS[kind]: [to_plain(item) for item in value]}
    if hasattr(kind, "__next__") and hasattr(kind, "__iter__"):
        return {"iterator": [to_plain(item) for item in value]}
    for base in _SUBCLASSES:
        if issubclass(kind, base):
            return to_plain(_base_value(value, base))
    raise NotPlainData(f"a value of type {kind.__name__} is not plain data")


def _base_value(value: object, base: type) -> object:
    """The data of an instance of a subclass, read with the base's methods so that no overridden one takes part."""
    if base is dict:
        return dict(zip(dict.keys(value), dict.values(value)))
    if base in (str, bytes, bytearray):
        return base.__getitem__(value, slice(None)) if base is bytearray else base.join(base(), [base.__getitem__(value, slice(None))])
    if base is int:
        return int.__add__(value, 0)
    if base is float:
        return float.__add__(value, 0.0) if float.__ne__(value, 0.0) else float.__pos__(value)  # -0.0 + 0.0 is 0.0
    if base is complex:
        return complex.__pos__(value)
    return base(base.__iter__(value))


def from_plain(data: object) -> object:
    """The value whose `to_plain` is `data`. Raises NotPlainData for anything that is not such a form."""
    if data is None or isinstance(data, (bool, str, int, float)):
        return data
    if isinstance(data, list):
        return [from_plain(item) for item in data]
    if not isinstance(data, dict) or len(data) != 1:
        raise NotPlainData("malformed data")
    (tag, content), = data.items()
    try:
        return _DECODERS[tag](content)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:  # ArithmeticError: zero denominator, bad Decimal
        raise NotPlainData(f"malformed {tag}: {type(error).__name__}") from None


def _pairs(content: list) -> list[tuple]:
    return [(from_plain(key), from_plain(value)) for key, value in content]


_DECODERS = {
    "int": lambda text: int(text, 16),
    "float": lambda text: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[text],
    "complex": lambda parts: complex(*map(from_plain, parts)),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "tuple": lambda items: tuple(map(from_plain, items)),
    "set": lambda items: set(map(from_plain, items)),
    "frozenset": lambda items: frozenset(map(from_plain, items)),
    "deque": lambda items: collections.deque(map(from_plain, items)),
    "dict": lambda content: dict(_pairs(content)),
    "dict_keys": lambda items: dict.fromkeys(map(from_plain, items)).keys(),
    "dict_values": lambda items: dict(enumerate(map(from_plain, items))).values(),
    "dict_items": lambda items: dict(map(from_plain, items)).items(),
    "range": lambda parts: range(*map(from_plain, parts)),
    "Fraction": lambda parts: fractions.Fraction(*map(from_plain, parts)),
    "Decimal": decimal.Decimal,
    "iterator": lambda items: iter([from_plain(item) for item in items]),
}


def _write_back(old: object, new: object) -> None:
    """Make a mutable argument equal to what the function left of it, in place, as a call in one process would have done."""
    if type(old) is not type(new):
        return
    if isinstance(old, list):
        if len(old) == len(new):
            for i, (before, after) in enumerate(zip(old, new)):
                if type(before) is type(after) and isinstance(before, (list, dict, set, bytearray, collections.deque)):
                    _write_back(before, after)
                else:
                    old[i] = after
        else:
            old[:] = new
    elif isinstance(old, bytearray):
        old[:] = new
    elif isinstance(old, (dict, set)):
        old.clear()
        old.update(new)
    elif isinstance(old, collections.deque):
        old.clear()
        old.extend(new)


class _Channel:
    """Length-prefixed JSON messages over a stream socket."""

    def __init__(self, sock: socket.socket, max_bytes: int):
        self.sock, self.max_bytes = sock, max_bytes

    def send(self, message: dict) -> None:
        data = json.dumps(message, separators=(",", ":")).encode()
        if len(data) > self.max_bytes:
            raise NotPlainData(f"more than {self.max_bytes >> 20} MiB of data")
        self.sock.sendall(struct.pack("<I", len(data)) + data)

    def receive(self) -> dict:
        """Raises EOFError when the other side is gone, NotPlainData when it sends something else."""
        size, = struct.unpack("<I", self._exactly(4))
        if size > self.max_bytes:
            raise NotPlainData(f"more than {self.max_bytes >> 20} MiB of data")
        try:
            message = json.loads(self._exactly(size))
        except (ValueError, RecursionError) as error:
            raise NotPlainData(f"malformed message: {type(error).__name__}") from None
        if not isinstance(message, dict):
            raise NotPlainData("malformed message")
        return message

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            try:
                part = self.sock.recv(min(size, 1 << 20))
            except OSError:
                part = b""
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


# --------------------------------------------------------------------------------------------------------------------
# 3. The two processes of an item (run inside the sandbox)

_PROCESS_ENDED = "the program's process ended"
_FRAMES = 12  # stack frames of this file under the program's own; added to the recursion limit so that the program keeps its 1000


def _function_process(channel: _Channel, payload: dict) -> None:
    """Execute the program, then answer calls of its entry point until the checker hangs up."""
    module = types.ModuleType("solution")  # not "__main__": an `if __name__ == "__main__":` demonstration is not part of the answer
    sys.modules["solution"] = module       # dataclasses and pickle look a class's module up
    sys.setrecursionlimit(sys.getrecursionlimit() + _FRAMES)
    _seed_random(payload["program"])
    try:
        exec(compile(payload["program"], "solution.py", "exec"), module.__dict__)
        function = module.__dict__[payload["entry_point"]]
    except KeyError as error:
        reply = {"raised": _describe(error)} if error.__traceback__.tb_next else {"missing": True}
    except BaseException as error:
        reply = {"raised": _describe(error)}
    else:
        reply = {"ready": True}
    channel.send(reply)
    while True:
        try:
            call = channel.receive()
        except EOFError:
            return
        try:
            args, kwargs = from_plain(call["args"]), from_plain(call["kwargs"])
            result = function(*args, **kwargs)
            # The result is encoded before the arguments: a generator does its work, and its mutations, only now.
            reply = {"result": to_plain(result)}
            after = to_plain(args)
            if after != call["args"]:
                reply["args"] = after
            channel.send(reply)
        except BaseException as error:
            channel.send({"raised": _describe(error)})


def _seed_random(code: str) -> None:
    """Same random numbers in every run; not imported for the many programs that need none (1 ms)."""
    if "random" in code:
        import random
        random.seed(0)


def _describe(error: BaseException) -> dict:
    """Class names from the exception's own up to BaseException, and its text."""
    try:
        text = str(error)
    except BaseException:  # __str__ is the program's
        text = ""
    return {"names": [cls.__name__ for cls in type(error).__mro__], "text": text[:MAX_REASON_CHARS]}


class _Ended(BaseException):
    """The item is over, whatever the test does with exceptions (hence not an Exception). `rule` says why."""

    def __init__(self, rule: str):
        self.rule = rule


class ProgramError(Exception):
    """Stands in the checker for an exception of the program that is not one of Python's own."""


class _Candidate:
    """What the test calls: sends the arguments to the function process and returns, or raises, what comes back."""

    def __init__(self, channel: _Channel, name: str):
        self.channel, self.__name__, self.over = channel, name, None

    def __call__(self, *args, **kwargs):
        if self.over:
            raise _Ended(self.over)
        try:
            self.channel.send({"args": to_plain(list(args)), "kwargs": to_plain(kwargs)})
            reply = self.channel.receive()
            result = None if "raised" in reply else from_plain(reply["result"])
            after = from_plain(reply["args"]) if "args" in reply else None
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._end(_PROCESS_ENDED)
        except (NotPlainData, KeyError, RecursionError) as error:
            self._end(f"returned no plain data ({error})")
        if after is not None:
            _write_back(list(args), after)
        if "raised" in reply:
            raise self._exception(reply["raised"])
        return result

    def _end(self, rule: str):
        self.over = rule
        raise _Ended(rule)

    def _exception(self, raised: object) -> BaseException:
        """An exception of the nearest class that Python itself defines; ending the process counts as ending it."""
        names, text = (raised.get("names"), raised.get("text")) if isinstance(raised, dict) else (None, None)
        if not isinstance(names, list) or not isinstance(text, str):
            self._end("returned no plain data (malformed exception)")
        if "NotPlainData" in names:
            self._end(f"returned no plain data ({text})")
        import builtins
        for name in names:
            cls = getattr(builtins, name, None) if isinstance(name, str) else None
            if not (isinstance(cls, type) and issubclass(cls, BaseException)):
                continue
            if not issubclass(cls, Exception):
                self._end(f"the program raised {name}")
            try:
                return cls(text)
            except TypeError:  # UnicodeDecodeError and others want more than a text
                continue
        return ProgramError(f"{str(names[:1])}: {text}")


def _checker_process(channel: _Channel, payload: dict) -> dict:
    """Run the benchmark's test against the function process. Returns {"outcome", "rule"}.

    The test sees the prompt's helpers and the canonical solution under the entry point's name (HumanEval/33 calls it), so what it
    compares with is never the code under test. Random inputs are the same in every run (seed 0).
    """
    _seed_random(payload["test"])
    candidate = _Candidate(channel, payload["entry_point"])
    try:
        first = channel.receive()
        if first.get("missing"):
            return {"outcome": "wrong", "rule": f"{payload['entry_point']} is not defined"}
        if "raised" in first:
            raised = candidate._exception(first["raised"])
            return {"outcome": "wrong", "rule": f"{type(raised).__name__} on loading: {raised}"[:MAX_REASON_CHARS]}
        names: dict = {"__name__": "test", payload["entry_point"]: candidate}
        exec(compile(payload["reference"], "reference.py", "exec"), names)
        exec(compile(payload["test"], "test.py", "exec"), names)
        names["check"](candidate)
    except _Ended as ended:
        return {"outcome": "wrong", "rule": ended.rule}
    except EOFError:
        return {"outcome": "wrong", "rule": _PROCESS_ENDED}
    except NotPlainData as error:
        return {"outcome": "wrong", "rule": f"sent no plain data ({error})"}
    except AssertionError:
        return {"outcome": "wrong", "rule": "assertion failed"}
    except BaseException as error:
        return {"outcome": "wrong", "rule": f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS]}
    if candidate.over:  # the test swallowed it
        return {"outcome": "wrong", "rule": candidate.over}
    return {"outcome": "correct", "rule": "passed"}


# --------------------------------------------------------------------------------------------------------------------
# 4. The sandbox program (`serve`): sets up the isolation once, then forks the two processes of each item

_CLONE = {"user": 0x10000000, "mount": 0x20000, "process": 0x20000000, "network": 0x40000000, "ipc": 0x08000000, "uts": 0x04000000}
_MS = {"rdonly": 1, "nosuid": 2, "nodev": 4, "noexec": 8, "remount": 32, "noatime": 1024, "nodiratime": 2048, "bind": 4096,
       "rec": 16384, "private": 1 << 18, "relatime": 1 << 21}
_ST_TO_MS = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}  # statvfs flags a remount has to keep, as mount flags
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_SET_CHILD_SUBREAPER = 1, 4, 38, 36
_MNT_DETACH = 2
_MAX_FDS = 64  # descriptors of the sandbox program; it limits itself to this, so that a fork closes all by closing these few
SANDBOX_UID = 64200  # used instead of root: root is exempt from the process limit and owns the files of the machine

# Importing these once in the sandbox saves each program the import (typing alone takes 3 ms).
_PRELOADED = ("bisect", "copy", "datetime", "functools", "hashlib", "heapq", "itertools", "operator", "string", "typing")

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *args) -> None:
    """A libc function that returns 0 or sets errno. Raises OSError naming it."""
    if getattr(_libc, name)(*args) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encode = [None if text is None else text.encode() for text in (source, target, kind, data)]
    try:
        _call("mount", encode[0], encode[1], encode[2], ctypes.c_ulong(flags), encode[3])
    except OSError as error:
        raise OSError(error.errno, f"mount {target}: {os.strerror(error.errno)}") from None


def _prctl(option: int, value: int) -> None:
    _call("prctl", option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


def _unshare(*names: str) -> None:
    _call("unshare", sum(_CLONE[name] for name in names))


def _system_paths() -> dict[str, str]:
    """What programs need of the machine, as {path in the sandbox: real path}: system libraries and tools, and this Python.

    Nothing of any user, except where the interpreter itself is installed in a user's folder; then that installation alone.
    """
    paths = [path for path in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/nix/store") if os.path.exists(path)]
    for prefix in (sys.base_prefix, sys.base_exec_prefix, os.path.realpath(sys.base_prefix)):
        if not any(prefix == path or prefix.startswith(path + "/") for path in paths):
            paths.append(prefix)
    return {path: os.path.realpath(path) for path in paths}


def _build_root() -> None:
    """Make a small read-only tree the root of this mount namespace, and let go of the machine's."""
    _mount(None, "/", None, _MS["rec"] | _MS["private"])
    _mount("tmpfs", "/tmp", "tmpfs", _MS["nosuid"] | _MS["nodev"], "mode=755,size=1m")
    os.mkdir("/tmp/old")
    paths = _system_paths()
    _call("pivot_root", b"/tmp", b"/tmp/old")
    os.chdir("/")
    for path, real in paths.items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if real != path and any(real.startswith(other + "/") for other in paths):  # /lib -> usr/lib
            os.symlink(real, path)
        else:
            _bind("/old" + real, path)
    os.makedirs("/dev")
    for name in ("null", "zero", "full", "random", "urandom"):
        _bind("/old/dev/" + name, "/dev/" + name)
    os.symlink("/tmp", "/dev/shm")
    os.makedirs("/tmp", exist_ok=True)
    _call("umount2", b"/old", _MNT_DETACH)
    os.rmdir("/old")


def _bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, target, None, _MS["bind"] | _MS["rec"])


def _seal_root(proc: int) -> None:
    """Remount everything read-only and without set-uid; keep the flags that a user namespace may not take away."""
    with open(os.open("self/mountinfo", os.O_RDONLY, dir_fd=proc), encoding="utf-8", errors="surrogateescape") as handle:
        targets = [re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), line.split(" ")[4]) for line in handle]
    for target in targets:
        kept = sum(flag for bit, flag in _ST_TO_MS.items() if os.statvfs(target).f_flag & bit)
        device = 0 if target.startswith("/dev/") else _MS["nodev"]
        _mount(None, target, None, _MS["remount"] | _MS["bind"] | _MS["rdonly"] | _MS["nosuid"] | device | kept)


def _write_at(directory: int, path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY, dir_fd=directory)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _enter_namespaces() -> int:
    """Leave the machine's namespaces, as root or as any user. Returns a handle on the machine's /proc.

    Root first builds the tree (it may reach a Python inside a private folder), then becomes SANDBOX_UID; a user needs the user
    namespace first, because only there it may mount.
    """
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    as_root = os.geteuid() == 0
    if as_root:
        _unshare("mount")
        _build_root()
        _seal_root(proc)
        os.setgroups([])
        os.setresgid(SANDBOX_UID, SANDBOX_UID, SANDBOX_UID)
        os.setresuid(SANDBOX_UID, SANDBOX_UID, SANDBOX_UID)
        _prctl(_PR_SET_DUMPABLE, 1)  # a change of user hides /proc/self from its owner, and the maps below are written there
    uid, gid = os.geteuid(), os.getegid()
    _unshare("user", "mount", "network", "ipc", "uts", "process")
    _write_at(proc, "self/uid_map", f"{uid} {uid} 1")
    _write_at(proc, "self/setgroups", "deny")
    _write_at(proc, "self/gid_map", f"{gid} {gid} 1")
    if not as_root:
        _build_root()
        _seal_root(proc)
    with contextlib.suppress(OSError):  # absent on some kernels; the programs have no capabilities either way
        _write_at(proc, "sys/user/max_user_namespaces", "0")
    return proc


def _drop_privileges(isolation: str) -> None:
    """No capabilities, and no way to get any by executing a set-uid file."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    header = struct.pack("<Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    _call("capset", header, bytes(24))
    with contextlib.suppress(OSError):  # one more layer where the kernel has it; what it adds is measured by sandbox_status
        _filter_calls(isolation)


# System calls that no solution of a programming problem makes and that attacks on a kernel start with, by number.
_DENIED_CALLS = {
    "x86_64": {"ptrace": 101, "mount": 165, "umount2": 166, "pivot_root": 155, "unshare": 272, "setns": 308, "add_key": 248,
               "request_key": 249, "keyctl": 250, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "process_vm_readv": 310,
               "process_vm_writev": 311, "kcmp": 312, "open_by_handle_at": 304},
    "aarch64": {"ptrace": 117, "mount": 40, "umount2": 39, "pivot_root": 41, "unshare": 97, "setns": 268, "add_key": 217,
                "request_key": 218, "keyctl": 219, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "process_vm_readv": 270,
                "process_vm_writev": 271, "kcmp": 272, "open_by_handle_at": 265},
}
_DENIED_EVERYWHERE = {"io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430, "pidfd_getfd": 438,
                      "mount_setattr": 442}  # newer calls have one number on all machines
_SOCKET_CALL = {"x86_64": 41, "aarch64": 198}
_SIGNAL_CALLS = {"x86_64": (62, 200, 234, 129, 297, 424), "aarch64": (129, 130, 131, 138, 240, 424)}  # kill, tkill, tgkill, rt_*, pidfd_*
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def _filter_program(machine: str, families: tuple[int, ...], own_pid: int | None) -> bytes:
    """A seccomp filter in classic BPF: the calls above and sockets outside `families` fail; another architecture's calls kill.

    With `own_pid`, signals to any other process fail: without a process namespace, kill(-1, SIGKILL) would end all this user runs.
    """
    load, equal, at_least, back = 0x20, 0x15, 0x35, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_RET|K
    allow, kill, refuse = 0x7FFF0000, 0x80000000, 0x00050000
    code = [(load, 0, 0, 4), (equal, 1, 0, _AUDIT_ARCH[machine]), (back, 0, 0, kill), (load, 0, 0, 0)]
    if machine == "x86_64":
        code += [(at_least, 0, 1, 0x40000000), (back, 0, 0, kill)]  # the x32 numbers
    for number in (*_DENIED_CALLS[machine].values(), *_DENIED_EVERYWHERE.values()):
        code += [(equal, 0, 1, number), (back, 0, 0, refuse | errno.EPERM)]
    if own_pid is not None:
        for number in _SIGNAL_CALLS[machine]:
            code += [(equal, 0, 4, number), (load, 0, 0, 16), (equal, 1, 0, own_pid), (back, 0, 0, refuse | errno.EPERM),
                     (back, 0, 0, allow)]
    code += [(equal, 0, 2 + 2 * len(families), _SOCKET_CALL[machine]), (load, 0, 0, 16)]
    for family in families:
        code += [(equal, 0, 1, family), (back, 0, 0, allow)]
    code += [(back, 0, 0, refuse | errno.EAFNOSUPPORT), (back, 0, 0, allow)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def _filter_calls(isolation: str) -> None:
    """Install the filter for this process and all it starts. Raises OSError where the kernel has none; needs no privilege."""
    machine = platform.machine()
    if machine not in _AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"no system call filter for {machine}")
    # Internet sockets lead nowhere in an empty network namespace; other families (vsock, to the host of a virtual machine) may not
    # belong to a network namespace at all.
    families = (socket.AF_UNIX,) if isolation == "none" else (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
    own_pid = None if isolation == "namespaces" else os.getpid()
    program = ctypes.create_string_buffer(_filter_program(machine, tuple(map(int, families)), own_pid))
    descriptor = struct.pack("@HxxxxxxP", (len(program) - 1) // 8, ctypes.addressof(program))
    _call("prctl", 22, ctypes.c_ulong(2), descriptor, ctypes.c_ulong(0), ctypes.c_ulong(0))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def _set_limits(limits: dict, process_base: int) -> None:
    def both(which: int, value: int) -> None:
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))

    both(resource.RLIMIT_CPU, limits["cpu_s"])
    both(resource.RLIMIT_AS, limits["memory_mib"] << 20)
    both(resource.RLIMIT_FSIZE, limits["file_mib"] << 20)
    both(resource.RLIMIT_NPROC, process_base + limits["processes"])
    both(resource.RLIMIT_CORE, 0)
    both(resource.RLIMIT_MEMLOCK, 0)
    both(resource.RLIMIT_MSGQUEUE, 0)


def _become(role: str, limits: dict, keep: list[int], server: dict) -> None:
    """Turn a fresh fork of the sandbox into the process that runs one part of an item; `keep` are its descriptors (3, 4, ...)."""
    os.setsid()
    if server["proc"] is not None:
        with contextlib.suppress(OSError):
            _write_at(server["proc"], "self/oom_score_adj", "1000")  # should memory run out, the program goes first
    moved = [os.dup2(fd, _MAX_FDS - 1 - i, inheritable=False) for i, fd in enumerate(keep)]
    for i, fd in enumerate(moved):
        os.dup2(fd, 3 + i, inheritable=False)
    os.closerange(3 + len(moved), _MAX_FDS)
    os.environ.clear()
    _set_limits(limits, server["process_base"])
    _drop_privileges(server["isolation"])
    if role == "checker":
        _prctl(_PR_SET_DUMPABLE, 0)  # no process of the same user may look into it or take its descriptors


def _read_payload(fd: int) -> dict:
    with open(fd, "rb") as handle:
        return json.loads(handle.read())


def _fork_function(fds: list[int], limits: dict, server: dict) -> int:
    """Start the function process; returns its pid. In namespaces it is process 1 of a new process namespace.

    A process can start only one process namespace, so a helper does it and exits; the sandbox, as the first process of its own
    namespace, inherits the child.
    """
    if not server["namespaces"]:
        pid = os.fork()
        if pid == 0:
            _run_role("function", fds, limits, server)
        return pid
    reader, writer = os.pipe()
    helper = os.fork()
    if helper == 0:
        try:
            _unshare("process", "mount", "ipc")
            _mount("tmpfs", "/tmp", "tmpfs", _MS["nosuid"] | _MS["nodev"], f"mode=700,nr_inodes=4096,size={limits['temp_mib']}m")
            pid = os.fork()
            if pid == 0:
                _run_role("function", fds, limits, server)
            os.write(writer, struct.pack("<i", pid))
        except OSError as error:
            os.write(writer, struct.pack("<i", -(error.errno or errno.EIO)))
        finally:
            os._exit(0)
    os.close(writer)
    data = os.read(reader, 4)
    os.close(reader)
    os.waitpid(helper, 0)
    pid = struct.unpack("<i", data)[0] if len(data) == 4 else -errno.EIO
    if pid < 0:
        raise OSError(-pid, f"starting the function process: {os.strerror(-pid)}")
    return pid


def _run_role(role: str, fds: list[int], limits: dict, server: dict) -> None:
    """Body of a forked process; never returns."""
    try:
        if server["proc"] is not None:
            os.write(server["births"], (os.readlink("self", dir_fd=server["proc"]) + "\n").encode())
        os.chdir("/tmp" if server["namespaces"] or not limits.get("folder") else limits["folder"])
        _become(role, limits, fds, server)
        payload = _read_payload(3)  # only now: the sandbox itself, from which the next program is forked, never holds a test
        channel = _Channel(socket.socket(fileno=4), limits["message_mib"] << 20)
        if role == "function":
            _function_process(channel, payload)
        else:
            os.write(5, json.dumps(_checker_process(channel, payload)).encode())
    finally:
        os._exit(0)


def _run_item(limits: dict, program_fd: int, test_fd: int, control: socket.socket, server: dict) -> dict:
    """Fork the two processes, wait for the verdict, the time limit or the caller's end, and kill whatever is left."""
    ours, theirs = socket.socketpair()
    verdict_reader, verdict_writer = os.pipe()
    births_reader, births_writer = os.pipe()  # the two processes tell their ids on the machine
    server["births"], server["hosts"] = births_writer, []
    started = time.monotonic()
    pids = {}
    try:
        pids["function"] = _fork_function([program_fd, theirs.fileno()], limits, server)
        theirs.close()
        checker = os.fork()
        if checker == 0:
            _run_role("checker", [test_fd, ours.fileno(), verdict_writer], limits, server)
        pids["checker"] = checker
        ours.close()
        os.close(verdict_writer)
        os.close(births_writer)
        verdict_writer = births_writer = -1
        verdict, stretched_s = _await_verdict(verdict_reader, control, started, limits["wall_s"], lambda: _kept_waiting(births_reader, server))
    finally:
        for fd in (verdict_writer, verdict_reader, births_reader, births_writer):
            if fd >= 0:
                os.close(fd)
        ours.close()
        theirs.close()
        ends = {role: _kill(pid, server) for role, pid in pids.items()}
    if verdict == _HUNG_UP:
        raise EOFError
    return {"verdict": verdict, "wall_s": time.monotonic() - started, "stretched_s": stretched_s, "ends": ends}


_LATE, _HUNG_UP = {"late": True}, {"hung_up": True}  # instead of a verdict: the time is over; the caller is gone


def _await_verdict(reader: int, control: socket.socket, started: float, wall_s: float,
                   kept_waiting: Callable[[], float]) -> tuple[dict | None, float]:
    """The checker's verdict (None where it died without one, or _LATE, or _HUNG_UP), and the seconds granted beyond `wall_s`.

    Seconds in which the processes were ready to run and got no processor do not count, up to MAX_STRETCH times the limit, so that
    the load of the machine does not turn a right answer into a timeout.
    """
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    poll.register(control, 0)  # only its hang-up
    data, stretch = b"", 0.0
    while True:
        left = started + wall_s + stretch - time.monotonic()
        if left <= 0:
            more = min(kept_waiting(), (MAX_STRETCH - 1) * wall_s) - stretch
            if more < 0.05:  # not worth another turn
                return _LATE, stretch
            stretch += more
            continue
        for fd, _ in poll.poll(left * 1000):
            if fd != reader:
                return _HUNG_UP, stretch
            part = os.read(reader, 65536)
            if not part:
                return (json.loads(data) if data else None), stretch
            data += part


def _kept_waiting(births: int, server: dict) -> float:
    """Seconds that an item's two processes have spent ready to run without a processor (second field of schedstat, ns)."""
    server["hosts"] = server["hosts"] + os.read(births, 1024).decode().split()
    total = 0
    for pid in server["hosts"]:
        with contextlib.suppress(OSError), open(os.open(f"{pid}/schedstat", os.O_RDONLY, dir_fd=server["proc"])) as handle:
            total += int(handle.read().split()[1])
    return total / 1e9


def _kill(pid: int, server: dict) -> dict:
    """Kill a process with everything it started; returns how it ended and the CPU seconds it used."""
    if not server["namespaces"]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # of a namespace's first process: the kernel kills all others in it
    _, status, usage = os.wait4(pid, 0)
    return {"status": status, "cpu_s": usage.ru_utime + usage.ru_stime}


def _sweep() -> None:
    """Without process namespaces: kill what outlived its session. Orphans become children of the sandbox (a subreaper)."""
    for _ in range(1000):  # a fork bomb is smaller than its process limit; each round kills a generation
        with open(f"/proc/self/task/{os.getpid()}/children") as handle:
            children = [int(pid) for pid in handle.read().split()]
        if not children:
            return
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _process_base(namespaces: bool) -> int:
    """Processes that already count against the limit: since Linux 5.14 the sandbox's own, before that all of this user."""
    release = tuple(int(number) for number in re.findall(r"\d+", platform.release())[:2])
    if namespaces and release >= (5, 14):
        return 8
    uid, count = os.geteuid(), 8
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                count += len(os.listdir(f"/proc/{entry.name}/task"))
    return count


def serve(control_fd: int, isolation: str) -> None:
    """The sandbox's main program: isolate, report, then serve items until the other end of `control_fd` closes."""
    import gc
    import importlib
    os.dup2(control_fd, 3, inheritable=False)
    os.closerange(4, 1 << 16)
    control = socket.socket(fileno=3)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_FDS, _MAX_FDS))
    sys.dont_write_bytecode = True
    for name in _PRELOADED:
        importlib.import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the caller's business
    server = {"isolation": isolation, "namespaces": isolation == "namespaces", "proc": None, "process_base": 8}
    try:
        if isolation != "bubblewrap":
            server["process_base"] = _process_base(isolation == "namespaces")
        if isolation == "namespaces":
            server["proc"] = _enter_namespaces()
            child = os.fork()  # the first process of the new process namespace
            if child:
                control.close()
                os.waitpid(child, 0)
                os._exit(0)
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        elif isolation == "none" and os.geteuid() == 0:
            _leave_root()
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        _prctl(_PR_SET_DUMPABLE, 0)
    except OSError as error:
        control.send(json.dumps({"error": error.strerror or str(error)}).encode())
        os._exit(1)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page
    control.send(json.dumps({"ready": True}).encode())
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1 << 16, 2)
        if not message:
            os._exit(0)
        try:
            result = _run_item(json.loads(message), *fds, control, server)
            if isolation == "none":
                _sweep()
        except OSError as error:
            result = {"error": error.strerror or str(error)}
        except EOFError:
            os._exit(0)
        for fd in fds:
            os.close(fd)
        control.send(json.dumps(result).encode())


def _leave_root() -> None:
    """Become SANDBOX_UID. Raises OSError where this Python's library would not be readable for it.

    Without namespaces a program that stays root is not held by the process limit and may signal or overwrite anything.
    """
    folder = os.path.dirname(os.__file__)
    while folder != "/":
        if not os.stat(folder).st_mode & 0o001:
            raise OSError(errno.EACCES, f"Python is installed in {folder}, which only root may enter")
        folder = os.path.dirname(folder)
    os.setgroups([])
    os.setresgid(SANDBOX_UID, SANDBOX_UID, SANDBOX_UID)
    os.setresuid(SANDBOX_UID, SANDBOX_UID, SANDBOX_UID)


# --------------------------------------------------------------------------------------------------------------------
# 5. The caller's side: sandboxes, pool, grading

class _SandboxDied(Exception):
    """The sandbox process ended or stopped answering."""


class _Sandbox:
    """One sandbox process and the socket to it. Not for use by two threads at once."""

    def __init__(self, isolation: str):
        self.isolation = isolation
        self.process: subprocess.Popen | None = None
        self.control: socket.socket | None = None

    def start(self) -> None:
        """Raises OSError where the isolation cannot be set up."""
        import subprocess
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        here = os.path.dirname(os.path.abspath(__file__))
        prefix: list[str] = []
        if self.isolation == "bubblewrap":
            prefix, here = _bubblewrap_command(os.path.abspath(__file__)), "/sandbox"
        # sys.path[0] is the working directory; the project's folder takes its place for one import and then goes
        program = (f"import sys; sys.path[0] = {here!r}; import utils_code_eval; del sys.path[0]; "
                   f"utils_code_eval.serve({theirs.fileno()}, {self.isolation!r})")
        python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
        self.process = subprocess.Popen(
            [*prefix, python, "-s", "-S", "-c", program], pass_fds=[theirs.fileno()], cwd="/", start_new_session=True,
            env={"PYTHONHASHSEED": "0"},  # sets of strings in one order, so that a program gives the same result in every run
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        theirs.close()
        self.control = ours
        report = self._receive(START_TIMEOUT_S)
        if "error" in report:
            self.close()
            raise OSError(errno.EPERM, report["error"])

    def run(self, program: bytes, test: bytes, limits: CodeLimits) -> dict:
        """Result of one item. Raises _SandboxDied, and OSError where the sandbox could not start the item's processes."""
        import shutil
        import tempfile
        if self.process is None:
            self.start()
        settings, folder = asdict(limits), None
        if self.isolation == "none":
            folder = settings["folder"] = tempfile.mkdtemp(prefix="code_eval_")
            os.chmod(folder, 0o777)  # the program may run as another user
        fds = [_sealed_file(program), _sealed_file(test)]
        try:
            socket.send_fds(self.control, [json.dumps(settings).encode()], fds)
            result = self._receive(limits.wall_s * MAX_STRETCH + ANSWER_SLACK_S)
        except OSError:
            self.close()
            raise _SandboxDied from None
        finally:
            for fd in fds:
                os.close(fd)
            if folder:
                shutil.rmtree(folder, ignore_errors=True)
        result["isolation"] = self.isolation
        if self.isolation == "bubblewrap":
            self.close()  # a sandbox of its own for each item
        if "error" in result:
            self.close()
            raise OSError(result["error"])
        return result

    def _receive(self, timeout_s: float) -> dict:
        self.control.settimeout(timeout_s)
        try:
            data = self.control.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self.close()
            raise _SandboxDied
        return json.loads(data)

    def close(self) -> None:
        """End the sandbox; everything in its namespaces dies with it."""
        if self.process is not None:
            self.control.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process = self.control = None


def _sealed_file(data: bytes) -> int:
    """Descriptor of a file in memory that holds `data`, at its start."""
    fd = os.memfd_create("payload")
    with open(fd, "wb", closefd=False) as handle:
        handle.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _bubblewrap_command(source: str) -> list[str]:
    import shutil
    command = [shutil.which("bwrap"), "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--dev", "/dev", "--tmpfs", "/tmp",
               "--chdir", "/tmp", "--ro-bind", source, "/sandbox/utils_code_eval.py"]
    for path, real in _system_paths().items():
        if real != path and os.path.islink(path):
            command += ["--symlink", real, path]
        else:
            command += ["--ro-bind", real, path]
    return [*command, "--remount-ro", "/"]


_isolation_found: tuple[str, str] | None = None


def _find_isolation() -> tuple[str, str]:
    """The strongest isolation that works here (namespaces | bubblewrap | none), found by trying, and why no stronger one did.

    Raises: UserError where not even the limits can be enforced.
    """
    from config import UserError
    import shutil
    global _isolation_found
    if _isolation_found is None:
        reasons = []
        for name in ("namespaces", "bubblewrap", "none"):
            if name == "bubblewrap" and (os.geteuid() == 0 or not shutil.which("bwrap")):  # root there is exempt from the process limit
                reasons.append("bubblewrap: not for root" if os.geteuid() == 0 else "bubblewrap: not installed")
                continue
            sandbox = _Sandbox(name)
            try:
                sandbox.start()
            except (OSError, _SandboxDied) as error:
                reasons.append(f"{name}: {getattr(error, 'strerror', None) or 'does not start'}")
                continue
            finally:
                sandbox.close()
            _isolation_found = (name, "; ".join(reasons))
            return _isolation_found
        raise UserError(f"generated code cannot be run here, not even unprotected: {'; '.join(reasons)}; use another user than root")
    return _isolation_found


# What an intruder would try, as programs that return True where it works. {port} is a listening socket and {path} a readable file
# of the caller, {pid} the caller.
_PROBES = {
    "network": """
import socket
def probe():
    try:
        socket.create_connection(("127.0.0.1", {port}), timeout=2).close()
    except OSError:
        return False
    return True
""",
    "files": """
import os
def probe():
    return os.path.exists({path!r})
""",
    "processes": """
import os
def probe():
    return os.path.exists("/proc/{pid}/cmdline") or os.getsid(0) == {sid}
""",
}
_MISSING = {"network": "the network is reachable", "files": "the user's files are readable",
            "processes": "other processes of the machine are visible"}

_status: dict | None = None


def sandbox_status() -> dict:
    """What protects this machine from generated code, measured by trying each intrusion in the sandbox (once per process).

    Returns: {"isolation": namespaces | bubblewrap | none, "network", "files", "processes": True where protected,
             "missing": list of sentences, "reason": why no stronger isolation is in use, or ""}.
    Raises:  UserError where not even the limits can be enforced (root, no namespaces, Python in a folder of root's own).
    """
    import tempfile
    global _status
    if _status is None:
        isolation, reason = _find_isolation()
        with socket.create_server(("127.0.0.1", 0)) as listener, tempfile.NamedTemporaryFile() as secret:
            os.chmod(secret.name, 0o644)
            facts = {"port": listener.getsockname()[1], "path": secret.name, "pid": os.getpid(), "sid": os.getsid(0)}
            sandbox = _Sandbox(isolation)
            try:
                safe = {name: _judge(sandbox, probe.format(**facts), _PROBE_RECORD, CodeLimits()).outcome == "correct"
                        for name, probe in _PROBES.items()}
            finally:
                sandbox.close()
        _status = {"isolation": isolation, **safe, "missing": [_MISSING[name] for name in safe if not safe[name]], "reason": reason}
    return dict(_status)


_PROBE_RECORD = {"id": "probe", "prompt": "", "entry_point": "probe", "answer": "def probe(): return False",
                 "test": "def check(candidate):\n    assert candidate() is False\n"}


def _judge(sandbox: _Sandbox, program: str, record: dict, limits: CodeLimits) -> CodeGrade:
    """Run one program against its record's test. Raises WorkError where the sandbox itself fails twice."""
    from config import WorkError
    payload = json.dumps({"program": program, "entry_point": record["entry_point"]}).encode()
    test = json.dumps({"entry_point": record["entry_point"], "reference": _reference(record), "test": record["test"]}).encode()
    for attempt in (1, 2):
        try:
            return _grade_from(sandbox.run(payload, test, limits), program, limits)
        except _SandboxDied:
            if attempt == 2:  # twice on fresh sandboxes: it is this program's doing
                return CodeGrade("wrong", program, "the program brought its sandbox down")
        except OSError as error:
            if attempt == 2:
                raise WorkError(f"the code sandbox cannot start processes: {error}; free memory or lower --workers") from None
            time.sleep(1.0)
    raise AssertionError("unreachable")


def _reference(record: dict) -> str:
    """Trusted code for the checker: the prompt's helpers and, where the record has it, the canonical solution."""
    solution = record.get("answer")
    code = extract_code(solution, record["prompt"], record["entry_point"]) if isinstance(solution, str) else None
    return code if code and _compiles(code) else _preamble(_newlines(record["prompt"]), record["entry_point"])


def _grade_from(result: dict, program: str, limits: CodeLimits) -> CodeGrade:
    verdict, ends = result["verdict"], result["ends"]
    if verdict and verdict.get("outcome") == "correct":
        return CodeGrade("correct", program, verdict["rule"])
    if verdict and verdict.get("late"):
        used = sum(end["cpu_s"] for end in ends.values())
        starved = (result["stretched_s"] >= (MAX_STRETCH - 1) * limits.wall_s if result["isolation"] == "namespaces"
                   else used > ASLEEP_SHARE * limits.wall_s)
        return CodeGrade("timeout", program, _STARVED if starved else "wall limit")
    for role in ("function", "checker"):
        # RLIMIT_CPU counts clock ticks, the usage is exact: on a busy machine the kernel's kill came at 0.8 of the limit
        killed = os.WIFSIGNALED(ends[role]["status"]) and os.WTERMSIG(ends[role]["status"]) == signal.SIGKILL
        if killed and ends[role]["cpu_s"] >= 0.5 * limits.cpu_s and (not verdict or verdict["rule"] == _PROCESS_ENDED):
            return CodeGrade("timeout", program, "CPU limit" if role == "function" else "CPU limit of the test")
    if verdict is None:
        return CodeGrade("wrong", program, "the checker's process ended")
    status = ends["function"]["status"]
    rule = verdict["rule"]
    if rule == _PROCESS_ENDED and os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL:
        rule += f" ({signal.Signals(os.WTERMSIG(status)).name})"
    return CodeGrade("wrong", program, rule)


class CodePool:
    """Sandboxes that stay up between calls; a context manager. `grade` may be called from any thread, one call at a time each.

    Args:    workers: items run at once; default: cores of this process. limits: see CodeLimits.
             allow_unsafe: run even where `sandbox_status()["missing"]` is not empty.
    Raises:  UserError where protections are missing and allow_unsafe is False.
    """

    def __init__(self, workers: int | None = None, limits: CodeLimits = CodeLimits(), allow_unsafe: bool = False):
        import queue
        self.limits, self.allow_unsafe = limits, allow_unsafe
        self.workers = workers or len(os.sched_getaffinity(0))
        self.idle: queue.SimpleQueue[_Sandbox] = queue.SimpleQueue()

    def __enter__(self) -> CodePool:
        from config import UserError
        status = sandbox_status()
        if status["missing"] and not self.allow_unsafe:
            raise UserError(f"generated code is not run here, because {', '.join(status['missing'])} ({status['reason']}); allow user "
                            "namespaces or install bubblewrap, or pass --allow_unsafe_code_execution to run it all the same")
        for _ in range(self.workers):
            self.idle.put(_Sandbox(status["isolation"]))  # starts with its first item
        return self

    def __exit__(self, *exc) -> None:
        for _ in range(self.workers):
            self.idle.get().close()

    def grade(self, items: list[tuple[str, dict]]) -> list[CodeGrade]:
        """Grades in the order of `items` (completion, record). Identical programs for one record run once.

        An item that reaches the wall limit because it got no processor is run once more, alone. CPU seconds do not grow with load,
        so the CPU limit is final.
        """
        from concurrent.futures import ThreadPoolExecutor
        programs = [extract_code(completion, record["prompt"], record["entry_point"]) for completion, record in items]
        jobs: dict[tuple, tuple[str, dict]] = {}
        keys = [None if program is None else (program, record["entry_point"], record["prompt"], record["test"], record.get("answer"))
                for program, (_, record) in zip(programs, items)]
        for key, program, (_, record) in zip(keys, programs, items):
            if key is not None:
                jobs.setdefault(key, (program, record))
        with ThreadPoolExecutor(max_workers=self.workers) as threads:
            grades = dict(zip(jobs, threads.map(lambda job: self._run(*job), jobs.values())))
        if self.workers > 1:
            for key, grade in grades.items():
                if grade.rule == _STARVED:
                    grades[key] = self._run(*jobs[key])
        missing = CodeGrade("unparsed", None, "no code found")
        return [missing if key is None else grades[key] for key in keys]

    def _run(self, program: str, record: dict) -> CodeGrade:
        error = _parse(program)
        if isinstance(error, SyntaxError):
            return CodeGrade("wrong", program, f"syntax error: {error.msg}"[:MAX_REASON_CHARS])
        sandbox = self.idle.get()
        try:
            return _judge(sandbox, program, record, self.limits)
        finally:
            self.idle.put(sandbox)


def grade_code(items: list[tuple[str, dict]], workers: int | None = None, limits: CodeLimits = CodeLimits(),
               allow_unsafe: bool = False) -> list[CodeGrade]:
    """Grade completions by running them.

    Args:    items: (completion, record) pairs; a record has prompt, entry_point, test and may have the canonical solution as answer.
             workers: items at once. limits: per item. allow_unsafe: run without some protections.
    Returns: one CodeGrade an item, in order; they do not depend on `workers`.
    Raises:  UserError where the sandbox lacks protections; WorkError where it cannot start processes.
    """
    with CodePool(workers, limits, allow_unsafe) as pool:
        return pool.grade(items)


def check_canonical(records: list[dict], workers: int | None = None, limits: CodeLimits = CodeLimits(),
                    allow_unsafe: bool = False) -> dict:
    """Run the benchmark's own solutions; a benchmark that fails its own tests, or a machine on which they fail, gives no scores.

    Returns: {"num_problems", "num_passed", "seconds", "isolation"}, with num_passed == num_problems.
    Raises:  UserError naming the problems that fail and why, or that have no canonical solution.
    """
    from config import UserError
    without = [str(record["id"]) for record in records if not isinstance(record.get("answer"), str) or not record["answer"].strip()]
    if without:
        raise UserError(f"no canonical solution in `answer` of {_some(without)}; code problems are scored only after their own "
                        "solutions have passed their tests")
    started = time.monotonic()
    grades = grade_code([(record["answer"], record) for record in records], workers, limits, allow_unsafe)
    failed = [f"{record['id']} ({grade.rule})" for record, grade in zip(records, grades) if grade.outcome != "correct"]
    if failed:
        raise UserError(f"{len(failed)} of {len(records)} canonical solutions fail their own tests, so nothing is scored: {_some(failed)}")
    return {"num_problems": len(records), "num_passed": len(records), "seconds": round(time.monotonic() - started, 3),
            "isolation": sandbox_status()["isolation"]}


def _some(names: list[str], at_most: int = 5) -> str:
    return ", ".join(names[:at_most]) + (f" and {len(names) - at_most} more" if len(names) > at_most else "")


# --------------------------------------------------------------------------------------------------------------------
# 6. Command line

def as_code_record(row: object, where: str) -> dict:
    """A problem under the project's field names; HumanEval's own (`task_id`, `canonical_solution`) are accepted.

    Args:    row: an object of a problem file. where: "file record i", for the message.
    Returns: a copy with id, prompt, entry_point, test (str) and, if there is a canonical solution, answer.
    Raises:  UserError naming the field that is missing or wrong.
    """
    from config import UserError
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected an object, found {type(row).__name__}")
    record = dict(row)
    for ours, theirs in (("id", "task_id"), ("answer", "canonical_solution")):
        if ours not in record and theirs in record:
            record[ours] = record[theirs]
    if not isinstance(record.get("id"), (str, int)):
        raise UserError(f"{where}: needs an `id` (or `task_id`)")
    for field in ("prompt", "entry_point", "test"):
        if not isinstance(record.get(field), str):
            raise UserError(f"{where} ({record['id']}): needs `{field}`, a text")
    if not record["entry_point"].isidentifier():
        raise UserError(f"{where} ({record['id']}): `entry_point` {record['entry_point']!r} is not a function name")
    if not _defines(_newlines(record["test"]), "check"):
        raise UserError(f"{where} ({record['id']}): `test` is not Python that defines check(candidate)")
    return record


def _first_character(path: str) -> str:
    """First character that is not white space; "" where the file cannot be read, which the real reader then reports."""
    try:
        with open(path, encoding="utf-8") as handle:
            return handle.read(4096).lstrip()[:1]
    except (OSError, UnicodeDecodeError):
        return ""


def load_code_problems(path: str) -> dict[str, dict]:
    """Problem records of a JSON array or JSON-lines file, by id (as text). Raises UserError naming file and record."""
    from config import UserError
    from utils_run import read_json, read_jsonl
    lines = _first_character(path) != "["
    rows = read_jsonl(path) if lines else read_json(path)
    problems: dict[str, dict] = {}
    for i, row in enumerate(rows):
        record = as_code_record(row, f"{path} record {i}")
        if str(record["id"]) in problems:
            raise UserError(f"{path} record {i}: id {record['id']!r} appears twice")
        problems[str(record["id"])] = record
    if not problems:
        raise UserError(f"{path} holds no problems")
    return problems


def _read_completions(path: str, problems: dict[str, dict]) -> list[dict]:
    from config import UserError
    from utils_run import read_jsonl
    rows = read_jsonl(path)
    for i, row in enumerate(rows):
        where = f"{path} row {i + 1}"
        if not isinstance(row, dict) or "task_id" not in row or not isinstance(row.get("completion"), str):
            raise UserError(f"{where}: needs `task_id` and `completion`, a text")
        if str(row["task_id"]) not in problems:
            raise UserError(f"{where}: task_id {row['task_id']!r} is not in the problem file")
    if not rows:
        raise UserError(f"{path} holds no completions")
    # JSON can hold half a character (a lone surrogate), as a response cut between bytes does; a UTF-8 file cannot
    return [{**row, "completion": row["completion"].encode("utf-8", "replace").decode()} for row in rows]


def main(cfg) -> None:
    """Grade a file of completions (CodeEvalConfig) and print the counts."""
    from config import UserError
    from utils_run import write_jsonl
    for field in ("input", "problems", "output"):
        if getattr(cfg, field) is None:
            raise UserError(f"--{field} is required")
    for field in ("cpu_s", "wall_s", "memory_mib"):
        if getattr(cfg, field) <= 0:
            raise UserError(f"--{field} must be above 0")
    limits = CodeLimits(cpu_s=cfg.cpu_s, wall_s=cfg.wall_s, memory_mib=cfg.memory_mib)
    problems = load_code_problems(cfg.problems)
    rows = _read_completions(cfg.input, problems)
    workers, unsafe = cfg.workers or None, cfg.allow_unsafe_code_execution
    if cfg.check_canonical:
        checked = check_canonical(list(problems.values()), workers, limits, unsafe)
        print(f"canonical solutions: {checked['num_passed']}/{checked['num_problems']} pass (sandbox: {checked['isolation']})", flush=True)
    started = time.monotonic()
    grades = grade_code([(row["completion"], problems[str(row["task_id"])]) for row in rows], workers, limits, unsafe)
    write_jsonl(cfg.output, [{**row, "outcome": g.outcome, "rule": g.rule, "extracted": g.extracted} for row, g in zip(rows, grades)])
    counts = collections.Counter(grade.outcome for grade in grades)
    print(f"{len(rows)} completions in {time.monotonic() - started:.1f} s: "
          + ", ".join(f"{outcome} {counts[outcome]}" for outcome in OUTCOMES), flush=True)


if __name__ == "__main__":
    from config import CodeEvalConfig
    from utils_run import run_script
    run_script(main, CodeEvalConfig)
