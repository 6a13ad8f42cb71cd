r"""Grade answers of language models: extraction, equivalence, four outcomes, pass@k / avg@k / maj@k.

A response is graded in three steps. `extract_answer` cuts the answer out of the response (last box first). `compare_answers` reads
both answers with the small parser of this file and compares them exactly: strings, numbers, fractions, then lists, sets, tuples,
intervals, equations, matrices, and expressions by their values at fixed points with 60 digits. All of that runs in the calling
process and in bounded time. Only notation which this parser does not know goes to the math-verify library, in a worker process
that is killed and replaced when it takes longer than `timeout_s`.

Outcomes: `correct`, `wrong`, `unparsed` (no readable answer), `timeout`. All four stay in the denominator of every score.

    python utils_math_eval.py --input cases.jsonl --output graded.jsonl      (rows with gold, prediction, optional task_type)

The output has the input's rows with `outcome`, `extracted` and `rule` (which comparison decided) added. About 5,000 rows a second
where the parser knows the notation, about 50 a second and worker where math-verify must be asked.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import queue
import random
import re
import select
import subprocess
import sys
import threading
import time
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Callable, Iterable, Sequence

OUTCOMES = ("correct", "wrong", "unparsed", "timeout")
TASK_TYPES = ("math", "mcq")

ANSWER_TIMEOUT_S = 4.0     # nearly all answers take math-verify under 0.1 s; its own limit is 5 s for each of three stages
WORKER_START_S = 120.0     # importing sympy takes 1 s alone and far longer on a loaded machine
WORKER_MAX_ANSWERS = 500   # then the worker is replaced: the parser caches inside math-verify only grow
WORKER_MEMORY_BYTES = 2 << 30  # address space; a symbolic blow-up ends the worker and not the training run
MAX_ANSWER_CHARS = 4000    # longer "answers" are no answers; they can only match as equal strings
MAX_DEPTH = 40             # nesting; the recursive parser needs about 8 Python frames a level, the interpreter allows 1000
MAX_BITS = 400_000         # exact integers beyond this (10^120000) are compared as strings only
DIGITS = 60                # of the numeric comparison
TOLERANCE_DIGITS = 45      # agreement asked for; 15 digits are left for cancellation
FLOAT_DIGITS = 15          # a decimal with this many significant digits is a printed float64, not a rounded answer


@dataclass(frozen=True)
class Grade:
    """Verdict on one response.

    outcome: correct | wrong | unparsed | timeout. extracted: the answer as cut out of the response, None if there is none.
    rule: what decided (string, number, expression, list, ..., math_verify, no_box, empty, timeout, worker_died).
    """

    outcome: str
    extracted: str | None
    rule: str


class Unsupported(ValueError):
    """Notation outside this file's parser; math-verify is asked."""


class TooLarge(ValueError):
    """A number too large or an input too deep to be worked out; only equal strings match."""


# --------------------------------------------------------------------------------------------------------------------
# Extraction

_BOX = re.compile(r"(\\?)\\(?:boxed|fbox)(?![A-Za-z])\s*")
_ESCAPE_OR_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_UNBRACED = re.compile(r"[-+]?[\d.,]*\d|\\[A-Za-z]+|[^\s{}$\\]")
# The text after one of these belongs to another turn, which a base model goes on to write by itself.
_TURN_END = re.compile(r"<\|(?:im_end|endoftext|eot_id|end)\|>|</s>|<\|im_start\|>\s*user")
_JOINER_NOISE = re.compile(r"\\(?:text|mathrm|textrm|mbox)\s*\{|\\q?quad|\\[()\[\],;: ]|[${}\s~]")
_JOINER = re.compile(r"(?:[,;]|(?:[,;]?(?:and|or|&)))(?:[A-Za-z](?:_\w+)?=)?", re.IGNORECASE)
MAX_JOINER_CHARS = 60


def _find_boxes(text: str) -> list[tuple[int, int, str | None]]:
    r"""(start, end, content) of each outermost \boxed or \fbox; content None where the text breaks off inside it."""
    starts = list(_BOX.finditer(text))
    if not starts:
        return []
    closing, stack = {}, []
    for match in _ESCAPE_OR_BRACE.finditer(text, starts[0].start() + len(starts[0].group(1))):
        if match.group() == "{":
            stack.append(match.start())
        elif match.group() == "}" and stack:
            closing[stack.pop()] = match.start()
    boxes: list[tuple[int, int, str | None]] = []
    for match in starts:
        if boxes and match.start() < boxes[-1][1]:
            continue                                   # inside the previous box
        if text[match.end():match.end() + 1] == "{":
            close = closing.get(match.end())
            content = None if close is None else text[match.end() + 1:close]
            end = len(text) if close is None else close + 1
        else:
            bare = _UNBRACED.match(text, match.end())
            content, end = (bare.group(), bare.end()) if bare else (None, match.end())
        if content is not None and match.group(1):     # \\boxed: the text was escaped twice
            content = content.replace("\\\\", "\\")
        boxes.append((match.start(), end, content))
    return boxes


def _boxed_answer(text: str) -> tuple[bool, str | None]:
    """(is there a box, content of the last one); boxes joined by "and" or a comma are one list."""
    boxes = _find_boxes(text)
    if not boxes:
        return False, None
    contents = [boxes[-1][2]]
    for before, after in zip(reversed(boxes[:-1]), reversed(boxes)):
        between = text[before[1]:after[0]]
        if before[2] is None or len(between) > MAX_JOINER_CHARS or not _JOINER.fullmatch(_JOINER_NOISE.sub("", between)):
            break
        contents.insert(0, before[2])
    if contents[-1] is None:
        return True, None
    return True, contents[0] if len(contents) == 1 else ", ".join(contents)


_MARKER = re.compile(r"####|\banswers?\b[ \t]*(?:\*\*)?[ \t]*(?:is|are|:|=|would be|should be)(?![A-Za-z]|\s+not\b)", re.IGNORECASE)
# 1000 characters: without a bound, a response of openings alone would be searched to its end from each of them
_MATH_SPAN = re.compile(r"\$\$(.{1,1000}?)\$\$|\$([^$]{1,1000}?)\$|\\\((.{1,1000}?)\\\)|\\\[(.{1,1000}?)\\\]", re.DOTALL)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")
_REASON = re.compile(r"[,;]?\s+\b(?:because|since|where|when|which|so|as|after|if|with|by|that|for)\b.*", re.IGNORECASE | re.DOTALL)
_COPULA = re.compile(r"\b(?:is|are|be|equals|was|were|thus|therefore|to)\b[:,]?\s*", re.IGNORECASE)
_NUMBER_IN_TEXT = re.compile(
    r"(?<![\w.\\])(?:(?<![^\s(=:])[-\u2212])?(?:[$£€¥]\s?)?\d[\d,]*(?:\.\d+)?(?:\s?/\s?\d+)?(?::\d+)*"
    r"(?:\s?\\?%|\s?(?:percent|pct)\b|\s?°|(?:[kcm]?m|k?g)[²³]?(?!\w)|\s?[£€¥])?(?![A-Za-z_\d])")
_GROUP_IN_TEXT = re.compile(r"[\[({]\s*[-\w.,;/+^√π∞\\ ]{1,60}[,;][-\w.,;/+^√π∞\\ ]{1,60}[\])}]")     # (3, 4), [1, 3), {1, 2}
_PLAIN_WORDS = re.compile(r"\\[A-Za-z]+|(?:and|or|percent|pct|cm|mm|km|kg|degrees?)\b", re.IGNORECASE)
_PROSE = re.compile(r"[A-Za-z]{2,}")


def _strip_math(text: str) -> str:
    return re.sub(r"\\[()\[\]](?!\w)|\*\*|`", " ", text).strip(" \t\r\n:*")


def _last_item(text: str) -> str | None:
    """The last formula or number of a piece of prose; a formula without any digit or operator only if there is nothing else."""
    spans = [(m.start(), m.end(), next(g for g in m.groups() if g is not None)) for m in _MATH_SPAN.finditer(text)]
    outside = _MATH_SPAN.sub(lambda m: " " * len(m.group()), text)
    numbers = [(m.start(), m.end(), m.group()) for m in _GROUP_IN_TEXT.finditer(outside) if re.search(r"\d|∞", m.group())]
    outside = _GROUP_IN_TEXT.sub(lambda m: " " * len(m.group()), outside)
    numbers += [(m.start(), m.end(), m.group()) for m in _NUMBER_IN_TEXT.finditer(outside)]
    telling = [span for span in spans if re.search(r"\d|[-+=<>^]|\\(?:frac|sqrt|infty|pi|emptyset|le|ge|pm)", span[2])]
    items = sorted(telling + numbers) or spans[-1:]
    if not items:
        return None
    listed = items[-1:]
    while len(listed) < len(items):                    # "are $1$, $2$ and $3$" is one list
        before = items[-len(listed) - 1]
        between = text[before[1]:listed[0][0]]
        if len(between) > MAX_JOINER_CHARS or not _JOINER.fullmatch(_JOINER_NOISE.sub("", between)):
            break
        listed.insert(0, before)
    return ", ".join(item[2].strip() for item in listed)


def _first_sentence(text: str) -> str:
    """Text up to the end of the sentence or line; dots and line breaks inside formulas do not end it."""
    text = text.lstrip(" \t\r\n:*")
    masked = _MATH_SPAN.sub(lambda m: "x" * len(m.group()), text)
    end = _SENTENCE_END.search(masked)
    return text[:end.start()] if end else text


def _stated_answer(text: str) -> str | None:
    """The answer that a response without a box states last."""
    text = re.sub(r"[ \t]{2,}", " ", text)
    for match in reversed(list(_MARKER.finditer(text))):
        sentence = _first_sentence(text[match.end():])
        if not _strip_math(sentence):
            continue
        masked = _MATH_SPAN.sub(lambda m: "0" * len(m.group()), sentence)
        prose = _PROSE.search(_PLAIN_WORDS.sub(lambda m: " " * len(m.group()), masked))
        digit = re.search(r"\d", masked)
        if prose and digit and prose.start() < digit.start():          # "The largest $n$ is 34"
            copulas = list(_COPULA.finditer(masked))
            tail = sentence[copulas[-1].end():] if copulas else ""
            if re.match(r"[-\d$\\(]", tail):
                return _strip_math(_REASON.sub("", tail))
            return _last_item(sentence) or _strip_math(sentence)
        return _strip_math(_REASON.sub("", sentence))
    if not _PROSE.search(_PLAIN_WORDS.sub(" ", _MATH_SPAN.sub(" ", text))):
        return _strip_math(text) or None               # nothing but an answer
    if len(text) <= 40 and len(text.split()) <= 2 and "$" not in text:
        return _strip_math(text)                       # "yes", "5 apples"
    return _last_item(text)


def extract_answer(text: str, strict: bool = False) -> str | None:
    r"""Cut the final answer out of a response.

    The last complete \boxed (or \fbox) wins, whatever follows it; boxes joined by "and" or a comma are one list. A box in which the
    text breaks off is no answer, and nothing before it counts either. Without any box, and unless `strict`, the last stated answer
    counts: after `####`, `Answer:`, "answer is", else the last formula or number.

    Args:    text: the response. strict: only a box counts.
    Returns: the answer as written (LaTeX or plain text), "" for an empty box, None if there is none.
    """
    turn_end = _TURN_END.search(text)
    if turn_end and turn_end.start():
        text = text[:turn_end.start()]
    boxed, answer = _boxed_answer(text)
    if boxed or strict:
        return None if answer is None else answer.strip()
    return _stated_answer(text)


# --------------------------------------------------------------------------------------------------------------------
# Normal form of the notation: LaTeX and unicode variants become one spelling each

_CHARACTERS = {
    "−": "-", "‐": "-", "‑": "-", "‒": "-", "–": "-", "—": "-", "﹣": "-", "＋": "+", "×": "\\times ", "✕": "\\times ", "·": "\\times ",
    "⋅": "\\times ", "∙": "\\times ", "•": "\\times ", "∗": "*", "÷": "/", "⁄": "/", "∕": "/", "≤": "≤", "⩽": "≤", "≦": "≤", "⩾": "≥",
    "≧": "≥", "π": "\\pi ", "∛": "\\sqrt[3]", "∜": "\\sqrt[4]", "∖": "∖", "′": "'", "’": "'", "″": "''", "º": "°", "˚": "°", "∅": "\\emptyset ",
    "⌀": "\\emptyset ", "ø": "\\emptyset ", "⟨": "(", "⟩": ")", "〈": "(", "〉": ")", "⌊": "\\lfloor ", "⌋": "\\rfloor ", "⌈": "\\lceil ",
    "⌉": "\\rceil ", "∣": "|", "∧": "\\land ", "∨": "\\lor ", "“": "", "”": "", "：": ":", "，": ",", "；": ";", "℃": "°C", "℉": "°F", "…": "…",
    "⋯": "…", "\u200b": "", "\u200c": "", "\u200d": "", "\ufeff": "", "\u2060": "", "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ",
    "γ": "\\gamma ", "λ": "\\lambda ", "φ": "\\phi ", "ω": "\\omega ", "σ": "\\sigma ", "μ": "\\mu ", "δ": "\\delta ", "ε": "\\epsilon ",
    "∠": "\\angle ", "△": "\\triangle ",
}
# One internal character per relation or delimiter, so that later stages look at characters and not at spellings. Set braces are
# ⦃ ⦄ and the currency sign is ＄ because { } group and $ delimits formulas.
_COMMANDS = {
    "nicefrac": "\\frac", "sfrac": "\\frac", "leqslant": "≤", "leqq": "≤", "leq": "≤", "le": "≤", "geqslant": "≥", "geqq": "≥", "geq": "≥", "ge": "≥", "neq": "≠", "equiv": "=", "ne": "≠",
    "lt": "<", "gt": ">", "in": "∈", "cup": "∪", "bigcup": "∪", "cap": "∩", "setminus": "∖", "smallsetminus": "∖", "backslash": "∖",
    "pm": "±", "mp": "∓", "infty": "∞", "infin": "∞", "times": "×", "cdot": "×", "ast": "×", "bullet": "×", "div": "/", "colon": ":",
    "ldots": "…", "dots": "…", "cdots": "…", "dotsc": "…", "degree": "°", "textdegree": "°", "lbrace": "⦃", "rbrace": "⦄", "mid": "|",
    "vert": "|", "lvert": "|", "rvert": "|", "langle": "(", "rangle": ")", "lparen": "(", "rparen": ")", "lbrack": "[", "rbrack": "]",
    "pounds": "£", "textsterling": "£", "euro": "€", "texteuro": "€", "yen": "¥", "cent": "¢", "dollar": "＄", "textdollar": "＄",
    "varnothing": "\\emptyset ", "dfrac": "\\frac", "tfrac": "\\frac", "cfrac": "\\frac", "dbinom": "\\binom", "tbinom": "\\binom",
    "arctg": "\\arctan ", "tg": "\\tan ", "ctg": "\\cot ", "cosec": "\\csc ", "lg": "\\log_{10}",
    "prime": "'", "percent": "%", "land": " and ", "lor": " or ", "wedge": " and ", "vee": " or ", "varphi": "\\phi ",
    "varepsilon": "\\epsilon ", "vartheta": "\\theta ", "thinspace": " ", "quad": " ", "qquad": " ", "enspace": " ", "space": " ",
}
_DROPPED = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|scriptstyle|limits|nolimits|mathstrut|strut|hfill|newline|noindent|null|"
    r"mathopen|mathclose|mathrel|mathbin|mathord|square|Box|tiny|small|large|Large)(?![A-Za-z])\s?\.?|"
    r"\\(?:h?phantom|vphantom|label|tag\*?|hspace\*?|vspace\*?|color|textcolor|hskip|class|style)\s*\{[^{}]*\}|"
    r"\\begin\{(?:align|aligned|equation|gather|gathered|split|multline|eqnarray|cases)\*?\}|"
    r"\\end\{(?:align|aligned|equation|gather|gathered|split|multline|eqnarray|cases)\*?\}|\\!")
_UNWRAPPED = re.compile(
    r"\\(?:mathbf|boldsymbol|bm|mathit|mathsf|mathtt|mathcal|mathnormal|underline|boxed|fbox|ensuremath|overrightarrow|vec|hat|widehat|"
    r"tilde|widetilde|mathop|emph|uline|ul|operatorname\*|pmb|bf|it|rm)(?![A-Za-z])")
_TEXT_MACRO = re.compile(r"\\(?:text(?:rm|bf|it|sf|tt|normal|up|sc)?|mbox|hbox|mathrm|operatorname|textnormal)\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_BLACKBOARD = re.compile(r"\\mathbb\s*\{?\s*([A-Z])\s*\}?")
_COMMAND = re.compile(r"\\([A-Za-z]+)\s?")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:[ \u2009]\d{3})+(?![\d])")
_COMMA_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d|,\s?\d)")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot|widebar)\s*\{?\s*(\d+)\s*\}?")
_REPEATING_DOTS = re.compile(r"(\d*)\.(\d*)\\dot\{?(\d)\}?(\d*)\\dot\{?(\d)\}?")
_REPEATING_TAIL = re.compile(r"(\d*)\.(\d*?)(\d+?)\3{1,}(?:…|\.\.\.)")
_WORD_FUNCTIONS = ("arcsin", "arccos", "arctan", "arccot", "sinh", "cosh", "tanh", "sin", "cos", "tan", "cot", "sec", "csc", "ln", "log", "exp",
                   "gcd", "lcm", "max", "min", "det", "cis")


def _repeating_fraction(whole: str, fixed: str, period: str) -> str:
    scale = 10 ** len(fixed)
    nines = 10 ** len(period) - 1
    value = Fraction(int((whole or "0") + fixed), scale) + Fraction(int(period), nines * scale)
    return f"({value.numerator}/{value.denominator})" if value.denominator > 1 else str(value.numerator)


def _repeating_tail(match: re.Match) -> str:
    whole, fixed, period = match.group(1), match.group(2), match.group(3)
    # 0.33... could be a cut 0.3333; three equal digits or a period written twice are taken as meant
    digits = len(match.group()) - len(whole) - len(fixed) - (1 if match.group().endswith("…") else 3) - 1
    return _repeating_fraction(whole, fixed, period) if digits >= 3 else match.group()


def _spell_characters(text: str) -> str:
    """Unicode digits, fractions, powers, roots and signs as LaTeX or ASCII."""
    out: list[str] = []
    for ch in text:
        if ch < "\x80":
            out.append(ch)
            continue
        if ch in _CHARACTERS:
            out.append(_CHARACTERS[ch])
            continue
        if ch == "√":
            out.append("√")
            continue
        if ch == "\u0305" and out and out[-1].isdigit():   # combining overline: a repeating digit
            out[-1] = "\\overline{" + out[-1] + "}"
            continue
        kind, _, rest = unicodedata.decomposition(ch).partition(" ")
        plain = unicodedata.normalize("NFKC", ch)
        if kind == "<fraction>":
            top, _, bottom = plain.partition("\u2044")
            out.append(f"\\frac{{{top}}}{{{bottom}}}" if bottom else plain)
        elif kind in ("<super>", "<sub>") and len(plain) == 1:
            mark = "^{" if kind == "<super>" else "_{"
            plain = _CHARACTERS.get(plain, plain)
            if out and out[-1].startswith(mark):
                out[-1] = out[-1][:-1] + plain + "}"
            else:
                out.append(mark + plain + "}")
        elif ch.isspace():
            out.append(" ")
        elif ch.isdigit():
            out.append(str(unicodedata.digit(ch)))
        elif 0xFF00 <= ord(ch) < 0xFFF0 or 0x1D400 <= ord(ch) < 0x1D800:
            out.append(_CHARACTERS.get(plain, plain))
        else:
            out.append(ch)
    spelled = "".join(out)
    if "√" in spelled:
        spelled = re.sub(r"√\s*(\d+(?:\.\d+)?|[A-Za-z])", r"\\sqrt{\1}", spelled).replace("√", "\\sqrt")
    return re.sub(r"(\\overline\{\d)\}\\overline\{(?=\d\})", r"\1", spelled)


def _mark_text(match: re.Match) -> str:
    r"""Content of a text macro between the marks ⟦ ⟧; one letter or a function name in \mathrm is just that."""
    content = match.group(1).replace("$", " ")
    if match.group().startswith(("\\mathrm", "\\operatorname")):
        word = content.strip()
        if word in _WORD_FUNCTIONS and word not in ("min", "sec"):
            return f"\\{word} "
        if len(word) == 1 and word in "eidxyzNRZQC":
            return f" {word} "
    return "\\cis " if content.strip() == "cis" else f"⟦{content}⟧"


def _spell_escape(match: re.Match) -> str:
    r"""The non-letter escapes: \\ ends a row (⏎), \{ \} are set braces, \$ is a currency; the rest is space."""
    return {"\\": "⏎", "{": "⦃", "}": "⦄", "$": "＄", "%": "%", "&": "&", "|": "|", "!": ""}.get(match.group(1), " ")


def _spell_command(match: re.Match) -> str:
    name = match.group(1)
    if name in _COMMANDS:
        return _COMMANDS[name]
    glued = re.match(r"q?quad(?=.)", name)             # "\quadx_{2}", a lost space
    return " " + name[glued.end():] if glued else f"\\{name} "


def _join_thousands(text: str) -> str:
    """1,234 -> 1234. Inside ( ) [ ] and set braces a comma separates, unless others there are followed by a space."""
    if "," not in text:
        return text
    depth, opened, spaced = [], [-1], set()
    for i, ch in enumerate(text):
        if ch in "([⦃":
            opened.append(i)
        elif ch in ")]⦄" and len(opened) > 1:
            opened.pop()
        elif ch == "," and text[i + 1:i + 2] == " ":
            spaced.add(opened[-1])
        depth.append(opened[-1])
    return _COMMA_THOUSANDS.sub(
        lambda m: m.group().replace(",", "") if depth[m.start()] == -1 or depth[m.start()] in spaced else m.group(), text)


def normal_form(text: str, join_thousands: bool = True) -> str:
    """The answer with one spelling for each sign and without layout: input of the tokenizer, and the key of string equality."""
    text = _spell_characters(text)
    text = re.sub(r"(?<=\d)\{,\}(?=\d)|(?<=\d),\s*\\!\s*(?=\d{3})|(?<=\d)\\!,\s*(?=\d{3})", "", text)
    text = re.sub(r"\\\\(?:\[[^\]]{0,12}\])?", r"\\\\ ", text)
    text = re.sub(r"\\(\\|[^A-Za-z]|$)", _spell_escape, text)
    text = re.sub(r"\^\s*(?:\{\s*\\(?:circ|degree)\s*\}|\\(?:circ|degree)(?![A-Za-z]))", "°", text)
    text = re.sub(r"\\left\s*<(.*?)\\right\s*>", r"(\1)", text)
    text = _DROPPED.sub("", text.replace("$", " ").replace("~", " "))
    text = _TEXT_MACRO.sub(_mark_text, text)
    if "⟦" in text:
        text = re.sub(r"\\[dt]?frac\s*\{\s*⟦([^⟧]*)⟧\s*\}\s*\{\s*⟦([^⟧]*)⟧\s*\}", r"⟦\1⟧/⟦\2⟧", text)     # miles over hour
    text = re.sub(r"\b([ap])\.\s?m\b\.?", r"\1m", text)
    text = re.sub(r"\(?\s*\\p?(?:mod|bmod)\s*(?:\{\s*(\d+)\s*\}|(\d+))\s*\)?", lambda m: f"⟦mod⟧^{m.group(1) or m.group(2)}", text)
    text = re.sub(r"\\overline\s*\{\s*([A-Z]{2})\s*\}", r"\1", text)     # a segment
    text = _BLACKBOARD.sub(lambda m: "ℝℤℚℕℂ"["RZQNC".index(m.group(1))] if m.group(1) in "RZQNC" else m.group(1), text)
    text = _COMMAND.sub(_spell_command, _UNWRAPPED.sub("", text))
    for old, new in (("...", "…"), ("<=", "≤"), ("=<", "≤"), (">=", "≥"), ("!=", "≠"), ("\\not =", "≠"), ("\\not =", "≠"), ("+/-", "±"),
                     ("+-", "±"), ("**", "^"), ("==", "="), ("\\%", "%")):
        if old in text:
            text = text.replace(old, new)
    text = re.sub(r"\{([-+])\}", r"\1", text)
    text = re.sub(r"(?:⏎\s*)?&\s*=|⏎\s*=", "=", text)                            # the lines of an aligned chain
    text = re.sub(r"\^\s*\{?\s*⟦\s*(?:st|nd|rd|th)\s*⟧\s*\}?|(?<=\d)\^\{?(?:st|nd|rd|th)\b\}?", "⟦th⟧", text)
    text = re.sub(r"(?<=[\d)}])\s*[xX]\s*(?=10\s*\^)", "×", text)
    text = re.sub(r"\s+", " ", text).strip()
    if "." in text and "\\" in text:
        text = _REPEATING.sub(lambda m: _repeating_fraction(*m.groups()), text.replace("\\overline {", "\\overline{"))
        text = _REPEATING_DOTS.sub(lambda m: _repeating_fraction(m[1], m[2], m[3] + m[4] + m[5]), text)
    if "…" in text:
        text = _REPEATING_TAIL.sub(_repeating_tail, text)
    text = _SPACED_THOUSANDS.sub(lambda m: re.sub(r"\s", "", m.group()), text)
    return _join_thousands(text) if join_thousands else text


def _string_key(normal: str) -> str:
    return re.sub(r"[\s⟦⟧]", "", normal).strip(".,;:")


# --------------------------------------------------------------------------------------------------------------------
# Tokens: (kind, value) with kinds n number, v variable letter, c command, t text word, o other sign, m/e matrix begin/end

Token = tuple[str, str]
_TOKEN = re.compile(
    r"⟦(?P<text>[^⟧]*)⟧|\\begin\s*\{(?P<begin>[a-zA-Z]*\*?)\}(?:\s*\{[lcr|@ ]*\})?|\\end\s*\{(?P<end>[a-zA-Z]*\*?)\}|"
    r"\\(?P<cmd>[A-Za-z]+)|(?P<num>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|\.\d+)|(?P<word>[A-Za-z]+)|(?P<space>\s+)|(?P<other>.)", re.DOTALL)
_TEXT_PIECE = re.compile(r"(?P<num>\d+(?:\.\d+)?|\.\d+)|(?P<word>[A-Za-zÀ-ɏ]+(?:['’-][A-Za-z]+)*)|(?P<other>[^\s])")
_CONNECTORS = ("and", "or")
_PLAIN_COMMANDS = {"pi": "pi", "infinity": "∞", "infty": "∞", "inf": "∞", "sqrt": "sqrt", "theta": "theta", "alpha": "alpha"}

# Spellings of a unit -> canonical symbol. A word that is not here is its own unit, without its plural s.
_UNIT_SPELLINGS = {
    "cm": "centimeter centimetre cms", "mm": "millimeter millimetre", "km": "kilometer kilometre kms", "m": "meter metre", "in": "inch inche",
    "ft": "foot feet", "yd": "yard", "mi": "mile", "g": "gram gramme gm", "kg": "kilogram kilo kgs", "mg": "milligram", "lb": "pound lbs", "oz": "ounce",
    "l": "liter litre", "ml": "milliliter millilitre", "s": "second sec", "min": "minute mins", "h": "hour hr hrs", "day": "dy", "wk": "week",
    "yr": "year", "usd": "dollar ＄ buck", "¢": "cent", "€": "euro eur", "£": "gbp", "¥": "yen yuan rmb cny jpy", "₹": "rupee rs inr",
    "°": "degree deg", "rad": "radian", "%": "percent pct percentage", "mph": "mph", "k": "kelvin", "j": "joule", "n": "newton", "w": "watt",
    "pm": "p.m", "am": "a.m", "unit": "unit",
}
_UNITS = {alias: unit for unit, aliases in _UNIT_SPELLINGS.items() for alias in [unit, *aliases.split()]}
_BARE_UNITS = {"cm", "mm", "km", "kg", "mg", "ml", "mL", "ft", "lb", "lbs", "oz", "hr", "hrs", "mph", "mi", "yd", "usd", "USD", "pct", "min", "sec",
               "rad", "deg", "am", "pm", "in", "cents", "day", "days", "units", "unit", "feet", "foot", "inch"}
_MULTIPLIERS = {"hundred": 100, "thousand": 10 ** 3, "million": 10 ** 6, "billion": 10 ** 9, "trillion": 10 ** 12, "dozen": 12}
# With one of these words the text is a statement and no unit.
_NO_UNIT_WORDS = frozenset(
    "not no none is isn't are was be if when less more than least most fewer greater larger smaller up down wrong incorrect false except "
    "but root power approximately about around roughly nearly almost maybe perhaps either neither both any all every unless without".split())
_PREFIX_WORDS = frozenset("the answer is final option choice case solution solutions value total equals exactly therefore so thus hence "
                          "we get have".split())
_SHORT_WORDS = frozenset("yes no odd even may day one two six ten none red blue true all day hen dog cat box man men boy".split())


def _is_word(run: str) -> bool:
    """Is a bare run of letters a word and not a product of variables (xyz, NO, abcd)?"""
    low = run.lower()
    if low in _SHORT_WORDS or run in _BARE_UNITS or low in _MULTIPLIERS:
        return True
    if len(run) < 4 or not re.search(r"[aeiouy]", low) or run.isupper():
        return False
    return any(ord(b) - ord(a) != 1 for a, b in zip(low, low[1:]))


def tokenize(normal: str) -> list[Token]:
    tokens: list[Token] = []
    for match in _TOKEN.finditer(normal):
        kind, value = match.lastgroup, match.group(match.lastgroup)
        if kind == "text":
            for piece in _TEXT_PIECE.finditer(value):
                tokens.append(({"num": "n", "word": "t", "other": "o"}[piece.lastgroup], piece.group()))
        elif kind == "num":
            tokens.append(("n", value))
        elif kind == "word":
            if value in ("min", "sec") and match.end() == len(normal) and tokens and tokens[-1][0] == "n":
                tokens.append(("t", value))
            elif value in _WORD_FUNCTIONS:
                tokens.append(("c", value))
            elif value.lower() in _PLAIN_COMMANDS:
                plain = _PLAIN_COMMANDS[value.lower()]
                tokens.append(("o", plain) if plain == "∞" else ("c", plain))
            elif value.lower() in _CONNECTORS or _is_word(value):
                tokens.append(("t", value))
            else:
                tokens += [("v", letter) for letter in value]
        elif kind == "begin":
            tokens.append(("m", value))
        elif kind == "end":
            tokens.append(("e", value))
        elif kind == "cmd":
            tokens.append(("c", value))
        elif kind == "other":
            tokens.append(("o", value))
    return tokens


_OPENERS, _CLOSERS = frozenset("([{⦃"), frozenset(")]}⦄")


def _depths(tokens: Sequence[Token]) -> list[int]:
    """Nesting depth at each token; the brackets themselves have the depth outside them."""
    depth, out = 0, []
    for kind, value in tokens:
        if kind == "e" or (kind == "o" and value in _CLOSERS):
            depth -= 1
        out.append(depth)
        if kind == "m" or (kind == "o" and value in _OPENERS):
            depth += 1
            if depth > MAX_DEPTH:
                raise TooLarge("nested too deeply")
    return out


def _split(tokens: list[Token], is_separator: Callable[[Token], bool]) -> tuple[list[list[Token]], list[str]]:
    """Pieces of `tokens` between the separators at depth 0, and those separators."""
    pieces, separators = [[]], []
    for token, depth in zip(tokens, _depths(tokens)):
        if depth == 0 and is_separator(token):
            pieces.append([])
            separators.append(token[1].lower())
        else:
            pieces[-1].append(token)
    return pieces, separators


def _enclosed(tokens: list[Token], openers: str, closers: str) -> bool:
    """Is the whole of `tokens` one bracketed group?"""
    if len(tokens) < 2 or tokens[0][0] != "o" or tokens[0][1] not in openers or tokens[-1][0] != "o" or tokens[-1][1] not in closers:
        return False
    return all(depth > 0 for depth in _depths(tokens)[1:-1])


# --------------------------------------------------------------------------------------------------------------------
# Expressions: nested tuples  ("n", value, decimals, digits) ("s", symbol) ("k", constant) ("+", terms) ("*", factors, divisors)
#              ("^", base, exponent) ("f", function, argument, ...) ("d", degrees) ("p", percent)

Expr = tuple
_GREEK = frozenset("alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega Gamma Delta "
                   "Theta Lambda Xi Pi Sigma Phi Psi Omega ell hbar nabla partial".split())
_FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "arccot", "sinh", "cosh", "tanh", "ln", "log", "exp", "cis"}
_INVERSES = {"sin": "arcsin", "cos": "arccos", "tan": "arctan", "cot": "arccot"}
_LIST_FUNCTIONS = {"gcd", "lcm", "max", "min"}


def _number(literal: str) -> Expr:
    mantissa, _, power = literal.lower().partition("e")
    if power and abs(int(power)) > MAX_BITS // 4:
        raise TooLarge("power of ten")
    whole, _, decimals = mantissa.partition(".")
    return ("n", Fraction(literal), len(decimals), len((whole + decimals).lstrip("0")))


class _ExpressionParser:
    """Recursive descent over tokens. Raises Unsupported for anything that is not a plain expression."""

    def __init__(self, tokens: Sequence[Token]):
        self.tokens, self.at, self.level, self.bars = list(tokens), 0, 0, 0

    def peek(self, ahead: int = 0) -> Token:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else ("end", "")

    def accept(self, *values: str) -> bool:
        if self.peek()[0] == "o" and self.peek()[1] in values:
            self.at += 1
            return True
        return False

    def expect(self, value: str) -> None:
        if not self.accept(value):
            raise Unsupported(f"expected {value}")

    def whole(self) -> Expr:
        expr = self._stacked()
        if self.at < len(self.tokens):
            raise Unsupported(f"left over: {self.peek()[1]}")
        return expr

    def sum(self) -> Expr:
        self.level += 1
        if self.level > MAX_DEPTH:
            raise TooLarge("nested too deeply")
        terms = []
        sign = self._signs()
        while True:
            term = self.product()
            terms.append(("*", [("n", Fraction(-1), 0, 1), term], []) if sign < 0 else term)
            if self.peek() not in (("o", "+"), ("o", "-")):
                break
            sign = self._signs()
        self.level -= 1
        return terms[0] if len(terms) == 1 else ("+", terms)

    def _signs(self) -> int:
        sign = 1
        while self.peek() in (("o", "+"), ("o", "-")):
            sign = -sign if self.peek()[1] == "-" else sign
            self.at += 1
        return sign

    def product(self) -> Expr:
        over, under = [self.power()], []
        while True:
            if self.accept("×", "*"):
                over.append(self._signed_power())
            elif self.accept("/"):
                under.append(self._signed_power())
            elif self._starts_factor():
                over.append(self.power())
            else:
                return over[0] if len(over) == 1 and not under else ("*", over, under)

    def _signed_power(self) -> Expr:
        sign = self._signs()
        expr = self.power()
        return ("*", [("n", Fraction(-1), 0, 1), expr], []) if sign < 0 else expr

    def _starts_factor(self) -> bool:
        kind, value = self.peek()
        if kind == "n":
            return self.tokens[self.at - 1][0] != "n"      # "3 4" is no product
        if kind == "v":
            return True
        if kind == "c":
            return value in _GREEK or value in _FUNCTIONS or value in _LIST_FUNCTIONS or value in ("frac", "sqrt", "binom", "pi", "lfloor", "lceil")
        if kind == "o":
            return value in "({[ℤℚℕℂ" or value == "∞" or (value == "|" and self.bars == 0)
        return False

    def power(self) -> Expr:
        base = self._postfix(self.atom())
        while self.peek() == ("o", "^"):
            self.at += 1
            exponent = self.argument()
            base = self._postfix(("^", base, exponent))
        return base

    def _postfix(self, expr: Expr) -> Expr:
        while True:
            if self.accept("!"):
                expr = ("f", "factorial", expr)
            elif self.accept("°"):
                expr = ("d", expr)
            elif self.accept("%"):
                expr = ("p", expr)
            else:
                return expr

    def argument(self) -> Expr:
        """One exponent: a group, a signed number or an atom."""
        if self.peek() in (("o", "-"), ("o", "+")):
            sign = self._signs()
            inner = self.atom()
            return ("*", [("n", Fraction(sign), 0, 1), inner], [])
        return self.atom()

    def group(self, close: str) -> Expr:
        expr = self.sum()
        self.expect(close)
        return expr

    def brace_group(self) -> Expr:
        if self.accept("{"):
            return self.group("}")
        return self.atom()

    def _digit(self) -> Expr:
        """The argument of \\frac without braces is one digit: \\frac12 is 1/2, \\frac1{72} is 1/72."""
        kind, value = self.peek()
        if kind == "n" and value.isdigit() and len(value) > 1:
            self.tokens[self.at] = ("n", value[1:])
            return _number(value[0])
        return self.brace_group()

    def fraction(self) -> Expr:
        over = self._digit()
        return ("*", [over], [self._digit()])

    def atom(self) -> Expr:
        kind, value = self.peek()
        self.at += 1
        if kind == "n":
            return self._mixed(value)
        if kind == "v":
            return self._symbol(value)
        if kind == "o":
            return self._bracketed(value)
        if kind == "c":
            return self._command(value)
        raise Unsupported(f"no expression at {value!r}")

    def _mixed(self, value: str) -> Expr:
        """A number, or a mixed number: an integer right before a proper fraction of integers."""
        number = _number(value)
        if not value.isdigit():
            return number
        start = self.at
        if self.peek() == ("c", "frac"):
            self.at += 1
            saved = list(self.tokens)
            try:
                part = self.fraction()
            except Unsupported:
                part = None
            if part and part[1][0][0] == "n" == part[2][0][0] and 0 < part[1][0][1] < part[2][0][1] and part[1][0][2] == 0 == part[2][0][2]:
                return ("+", [number, part])
            self.tokens, self.at = saved, start
        elif self.peek()[0] == "n" and self.peek(1) == ("o", "/") and self.peek(2)[0] == "n":
            over, under = _number(self.peek()[1]), _number(self.peek(2)[1])
            if 0 < over[1] < under[1]:
                self.at += 3
                return ("+", [number, ("*", [over], [under])])
        return number

    def _symbol(self, name: str) -> Expr:
        if name in "fgh" and self.peek() == ("o", "("):
            self.at += 1
            return ("f", name + "()", self.group(")"))      # an unknown function, not f times what is in brackets
        if self.peek() == ("o", "_"):
            self.at += 1
            name += "_" + self._subscript()
        while self.accept("'"):
            name += "'"
        if name in ("e", "i"):
            return ("k", name)
        return ("s", name)

    def _subscript(self) -> str:
        if not self.accept("{"):
            self.at += 1
            return self.tokens[self.at - 1][1] if self.at <= len(self.tokens) else ""
        depth, parts = 1, []
        while depth and self.at < len(self.tokens):
            value = self.tokens[self.at][1]
            depth += (value == "{") - (value == "}")
            parts.append(value)
            self.at += 1
        return "".join(parts[:-1])

    def _bracketed(self, value: str) -> Expr:
        if value == "(":
            return self.group(")")
        if value == "[":
            return self.group("]")
        if value == "{":
            expr = self._stacked()
            self.expect("}")
            return expr
        if value == "|":
            self.bars += 1
            expr = self.sum()
            self.expect("|")
            self.bars -= 1
            return ("f", "abs", expr)
        if value == "∞":
            return ("k", "inf")
        if value in "ℤℚℕℂ":
            return ("s", value)
        raise Unsupported(f"no expression at {value!r}")

    def _stacked(self) -> Expr:
        """A sum, or one of the plain TeX forms {a \\over b} and {a \\choose b}."""
        expr = self.sum()
        if self.peek() in (("c", "over"), ("c", "choose")):
            name = self.peek()[1]
            self.at += 1
            below = self.sum()
            expr = ("*", [expr], [below]) if name == "over" else ("f", "binom", expr, below)
        return expr

    def _command(self, name: str) -> Expr:
        if name == "frac":
            return self.fraction()
        if name == "sqrt":
            degree = None
            if self.accept("["):
                degree = self.group("]")
            inside = self.brace_group()
            return ("f", "root", inside, degree) if degree else ("f", "sqrt", inside)
        if name == "binom":
            above = self._digit()
            return ("f", "binom", above, self._digit())
        if name == "pi":
            return ("k", "pi")
        if name in ("lfloor", "lceil"):
            inner = self.sum()
            if self.peek() != ("c", name.replace("l", "r", 1)):
                raise Unsupported("open floor or ceiling")
            self.at += 1
            return ("f", "floor" if name == "lfloor" else "ceil", inner)
        if name in _FUNCTIONS:
            return self._function(name)
        if name in _LIST_FUNCTIONS:
            self.expect("(")
            arguments = [self.sum()]
            while self.accept(","):
                arguments.append(self.sum())
            self.expect(")")
            return ("f", name, *arguments)
        if name in _GREEK:
            return self._symbol("\\" + name)
        raise Unsupported(f"\\{name}")

    def _function(self, name: str) -> Expr:
        base = power = None
        for _ in range(2):
            if name == "log" and self.peek() == ("o", "_"):
                self.at += 1
                base = self._digit()
            elif self.peek() == ("o", "^"):
                self.at += 1
                power = self.argument()
        if power is not None and name in _INVERSES and _constant(power) == -1:
            name, power = _INVERSES[name], None
        if self.peek()[0] == "o" and self.peek()[1] in "({[":
            inner = self._postfix(self.atom())
        else:
            inner = self._function_argument()
        expr = ("f", name, inner) if base is None else ("f", "logbase", inner, base)
        return expr if power is None else ("^", expr, power)

    def _function_argument(self) -> Expr:
        r"""Factors written side by side: \sin 2\pi x; an operator or another function ends them."""
        factors = [self._signed_power()]
        while self._starts_factor() and not (self.peek()[0] == "c" and self.peek()[1] in _FUNCTIONS):
            factors.append(self.power())
        return factors[0] if len(factors) == 1 else ("*", factors, [])


class NotExact(ValueError):
    """The value is not a rational number, or contains symbols."""


def _checked(value: Fraction) -> Fraction:
    if value.numerator.bit_length() + value.denominator.bit_length() > MAX_BITS:
        raise TooLarge("integer")
    return value


def _integer_root(n: int, degree: int) -> int:
    """Exact root of a non-negative integer, or NotExact."""
    if n.bit_length() > 4096:
        raise NotExact
    root = math.isqrt(n) if degree == 2 else round(n ** (1 / degree)) if n.bit_length() < 1000 else 0
    for candidate in (root - 1, root, root + 1):
        if candidate >= 0 and candidate ** degree == n:
            return candidate
    raise NotExact


def _rational_root(x: Fraction, degree: int) -> Fraction:
    if degree < 1 or degree > 64 or (x < 0 and degree % 2 == 0):
        raise NotExact
    sign = -1 if x < 0 else 1
    return sign * Fraction(_integer_root(abs(x.numerator), degree), _integer_root(x.denominator, degree))


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        base = _rational_root(base, exponent.denominator)
    n = exponent.numerator
    if base == 0 and n < 0:
        raise ZeroDivisionError
    if base not in (0, 1, -1):
        if abs(n) * max(base.numerator.bit_length(), base.denominator.bit_length()) > MAX_BITS:
            raise TooLarge("power")
    return base ** n if base not in (1, -1) else (base if n % 2 else Fraction(1))


def exact_value(expr: Expr) -> Fraction:
    """Value as a fraction. Raises NotExact (irrational or symbolic), ZeroDivisionError, TooLarge."""
    kind = expr[0]
    if kind == "n":
        return expr[1]
    if kind == "+":
        total = Fraction(0)
        for term in expr[1]:
            total = _checked(total + exact_value(term))
        return total
    if kind == "*":
        value = Fraction(1)
        for factor in expr[1]:
            value = _checked(value * exact_value(factor))
        for divisor in expr[2]:
            value = _checked(value / exact_value(divisor))
        return value
    if kind == "^":
        return _exact_power(exact_value(expr[1]), exact_value(expr[2]))
    if kind == "p":
        return exact_value(expr[1]) / 100
    if kind == "f":
        return _exact_function(expr[1], [exact_value(argument) for argument in expr[2:]])
    raise NotExact


def _exact_function(name: str, values: list[Fraction]) -> Fraction:
    x = values[0]
    if name == "sqrt":
        return _rational_root(x, 2)
    if name == "root" and values[1].denominator == 1:
        return _rational_root(x, values[1].numerator)
    if name == "abs":
        return abs(x)
    if name == "floor":
        return Fraction(math.floor(x))
    if name == "ceil":
        return Fraction(math.ceil(x))
    if name in ("max", "min"):
        return max(values) if name == "max" else min(values)
    if name == "logbase" and values[1] > 0 and values[1] != 1 and x > 0:
        guess = round((math.log(x.numerator) - math.log(x.denominator)) / (math.log(values[1].numerator) - math.log(values[1].denominator)))
        if abs(guess) < 4096 and _exact_power(values[1], Fraction(guess)) == x:
            return Fraction(guess)
        raise NotExact
    if all(v.denominator == 1 for v in values):
        if name == "factorial" and x >= 0:
            if x > 25_000:
                raise TooLarge("factorial")
            return _checked(Fraction(math.factorial(int(x))))
        if name == "binom" and 0 <= values[1]:
            if x < 0 or x > 100_000 or min(values[1], abs(x - values[1])) > 20_000:
                raise TooLarge("binomial")
            return _checked(Fraction(math.comb(int(x), int(values[1]))))
        if name in ("gcd", "lcm"):
            return Fraction(getattr(math, name)(*(int(v) for v in values)))
    raise NotExact


def _exact_or_none(expr: Expr) -> Fraction | None:
    try:
        return exact_value(expr)
    except NotExact:
        return None


def _constant(expr: Expr) -> Fraction | None:
    try:
        return exact_value(expr)
    except (NotExact, ZeroDivisionError):
        return None


def _symbols(expr: Any, into: set[str]) -> set[str]:
    if isinstance(expr, tuple) and expr and expr[0] == "s":
        into.add(expr[1])
        return into
    if isinstance(expr, tuple) and expr and expr[0] == "f" and expr[1].endswith("()"):
        into.add(expr[1])
    if not isinstance(expr, (tuple, list)):
        return into
    for part in expr:
        if isinstance(part, (tuple, list)):
            _symbols(part, into)
    return into


_local = threading.local()


def _context():
    """An mpmath context of this thread: its precision is state, and other code may use mpmath's global one."""
    if not hasattr(_local, "ctx"):
        from mpmath.ctx_mp import MPContext
        _local.ctx = MPContext()
        _local.ctx.dps = DIGITS
    return _local.ctx


def numeric_value(expr: Expr, values: dict[str, Any]):
    """Value with 60 digits (mpf or mpc) at the given values of the symbols. Raises ZeroDivisionError, TooLarge, ValueError."""
    ctx = _context()
    kind = expr[0]
    if kind == "n":
        return ctx.mpf(expr[1].numerator) / expr[1].denominator
    if kind == "s":
        return values[expr[1]]
    if kind == "k":
        return {"pi": ctx.pi, "e": ctx.e, "i": ctx.j, "inf": ctx.inf}[expr[1]] * ctx.one
    if kind == "+":
        return sum((numeric_value(term, values) for term in expr[1]), ctx.zero)
    if kind == "*":
        product = ctx.one
        for factor in expr[1]:
            product = product * numeric_value(factor, values)
        for divisor in expr[2]:
            product = product / numeric_value(divisor, values)
        return product
    if kind == "^":
        return _numeric_power(numeric_value(expr[1], values), numeric_value(expr[2], values), _constant(expr[2]))
    if kind == "d":
        return numeric_value(expr[1], values) * ctx.pi / 180
    if kind == "p":
        return numeric_value(expr[1], values) / 100
    arguments = [numeric_value(argument, values) for argument in expr[2:]]
    if expr[1] in values:                              # an unknown function: any fixed curve without symmetry will do
        return ctx.sin(_limited(arguments[0], 1e6) * values[expr[1]] + 1) + arguments[0] ** 2
    return _numeric_function(expr[1], arguments)


def _limited(x, limit: float):
    if not abs(x) < limit:
        raise TooLarge("argument")
    return x


def _real_root(x, degree: int):
    ctx = _context()
    if ctx.im(x) == 0 and ctx.re(x) < 0 and degree % 2:
        return -ctx.root(-ctx.re(x), degree)
    return ctx.root(x, degree)


def _numeric_power(base, exponent, exact: Fraction | None):
    ctx = _context()
    if base == 0:
        return ctx.one if exponent == 0 else (ctx.zero if ctx.re(exponent) > 0 else 1 / ctx.zero)
    if ctx.isinf(base) or ctx.isinf(exponent):
        return base ** exponent
    _limited(exponent * ctx.log(abs(base) + 1), 1e6)
    if exact is not None and exact.denominator % 2 and exact.denominator > 1 and exact.denominator < 64:
        return _real_root(base, exact.denominator) ** exact.numerator       # (-8)^{1/3} is -2
    return base ** exponent


def _numeric_function(name: str, x: list):
    ctx = _context()
    a = x[0]
    if name == "sqrt":
        return ctx.sqrt(a)
    if name == "root":
        if ctx.im(x[1]) != 0 or x[1] != ctx.floor(x[1]) or not 1 <= x[1] <= 64:
            return a ** (1 / x[1])
        return _real_root(a, int(x[1]))
    if name in ("abs", "floor", "ceil"):
        return {"abs": abs, "floor": ctx.floor, "ceil": ctx.ceil}[name](a)
    if name in ("max", "min"):
        return max(x, key=ctx.re) if name == "max" else min(x, key=ctx.re)
    if name == "ln" or name == "log":
        return ctx.log(a)
    if name == "logbase":
        return ctx.log(a) / ctx.log(x[1])
    _limited(a, 1e6)
    if name in ("exp", "cis"):
        return ctx.exp(a) if name == "exp" else ctx.exp(ctx.j * a)
    if name == "factorial":
        return ctx.factorial(_limited(a, 1e4))
    if name == "binom":
        return ctx.binomial(_limited(a, 1e4), _limited(x[1], 1e4))
    functions = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "arccot": "acot"}
    if name in _FUNCTIONS:
        return getattr(ctx, functions.get(name, name))(a)
    raise NotExact


def _points(symbols: Iterable[str], trial: int) -> dict[str, Any]:
    """Values of the symbols at one test point: the same for the same name in every process, positive in the first three trials."""
    ctx = _context()
    out = {}
    for name in symbols:
        rng = random.Random(f"{name!a}/{trial}")        # ascii: half a surrogate pair in a name has no bytes
        value = ctx.mpf(rng.randrange(3 * 10 ** 8, 3 * 10 ** 9)) / 10 ** 9
        out[name] = -value if trial > 2 and rng.random() < 0.6 else value
    return out


NUM_POINTS = 6


def _close(a, b) -> bool:
    ctx = _context()
    if ctx.isnan(a) or ctx.isnan(b):
        return False
    if ctx.isinf(a) or ctx.isinf(b):
        return bool(a == b)
    return bool(abs(a - b) <= ctx.mpf(10) ** -TOLERANCE_DIGITS * max(abs(a), abs(b), ctx.mpf(10) ** -9))


def _printed_float(literal: Expr, other: Fraction) -> bool:
    """Is `literal` the 15 or more digits a float64 print of the fraction `other` shows?"""
    return literal[0] == "n" and literal[3] >= FLOAT_DIGITS and abs(literal[1] - other) <= Fraction(1, 10 ** literal[2])


def expressions_equal(a: Expr, b: Expr) -> bool:
    """Exactly equal as fractions, else equal with 45 digits; expressions with symbols at six fixed points."""
    if a == b:
        return True
    try:
        exact_a, exact_b = _exact_or_none(a), _exact_or_none(b)
    except ZeroDivisionError:
        return False                                  # an undefined value equals nothing
    if exact_a is not None and exact_b is not None:
        return exact_a == exact_b or _printed_float(a, exact_b) or _printed_float(b, exact_a)
    symbols = _symbols(b, _symbols(a, set()))
    agreed = 0
    for trial in range(NUM_POINTS if symbols else 1):
        at = _points(symbols, trial)
        try:
            value_a, value_b = numeric_value(a, at), numeric_value(b, at)
        except (ZeroDivisionError, ValueError, OverflowError):
            continue
        ctx = _context()
        if trial > 2 and (abs(ctx.im(value_a)) > 1e-30 or abs(ctx.im(value_b)) > 1e-30) and agreed >= 3:
            continue                                  # 2 ln x and ln x^2 are compared where both are real
        if not _close(value_a, value_b):
            return False
        agreed += 1
    return agreed >= (2 if symbols else 1)


# --------------------------------------------------------------------------------------------------------------------
# Answers: what a whole answer can be

@dataclass(frozen=True)
class Text:
    words: str


@dataclass(frozen=True)
class Scalar:
    expr: Expr
    unit: str | None = None      # canonical, None where none is written
    percent: bool = False


@dataclass(frozen=True)
class Seq:
    """kind: list (no brackets), set, tuple. brackets: "()" and so on for tuples, which may be intervals."""
    kind: str
    items: tuple
    brackets: str = ""


@dataclass(frozen=True)
class Ratio:
    parts: tuple


@dataclass(frozen=True)
class Matrix:
    rows: tuple


@dataclass(frozen=True)
class Equation:
    name: str | None             # left side where it only names the value: x, f(x), AB, A:B
    value: Any                   # node of the last side
    left: Expr | None
    right: Expr | None
    chain: bool                  # three or more sides
    loose: bool                  # no digits on the left (a + b = 7) or no symbols at all: a prediction may state its value so


@dataclass(frozen=True)
class Chain:
    """Inequality that is not an interval in one variable: sides and relations."""
    sides: tuple
    relations: tuple


@dataclass(frozen=True)
class Region:
    """Set of reals: sorted break points, membership at each point and in each gap around them. variable: name or None."""
    points: tuple                # expressions
    at: tuple
    gaps: tuple
    variable: str | None = None


_RELATIONS = frozenset("=<>≤≥≠∈")
_FLIP = {"<": ">", ">": "<", "≤": "≥", "≥": "≤", "≠": "≠"}
_CURRENCIES = frozenset("＄£€¥₹¢")
_TRAILING = (("o", "."), ("o", ","), ("o", ";"), ("o", ":"), ("o", "⏎"), ("o", "&"))


def _trim(tokens: list[Token]) -> list[Token]:
    start, end = 0, len(tokens)
    while end > start and tokens[end - 1] in _TRAILING:
        end -= 1
    while start < end and tokens[start] in (*_TRAILING, ("o", "?")):
        start += 1
    return tokens[start:end]


def _unwrap(tokens: list[Token]) -> list[Token]:
    tokens = _trim(tokens)
    while _enclosed(tokens, "{", "}"):
        tokens = _trim(tokens[1:-1])
    return tokens


def _is_separator(token: Token) -> bool:
    return (token[0] == "o" and token[1] in ",;⏎") or (token[0] == "t" and token[1].lower() in _CONNECTORS)


def parse_nodes(tokens: list[Token]) -> Any:
    """Node of a whole answer."""
    tokens = _unwrap(tokens)
    if not tokens:
        raise Unsupported("empty")
    pieces, separators = _split(tokens, _is_separator)
    pieces = [p for p in map(_unwrap, pieces) if p]
    if not pieces:
        raise Unsupported("empty")
    if any(p[-1] == ("o", "…") or p[0] == ("o", "…") for p in pieces):
        raise Unsupported("ellipsis")
    nodes = [node for piece in pieces for node in _parse_item(piece)]
    if len(nodes) == 1:
        return nodes[0]
    if any(isinstance(n, Text) for n in nodes) and not all(isinstance(n, Text) for n in nodes):
        return Text(_words(tokens))
    if isinstance(nodes[0], Equation) and nodes[0].name and not any(isinstance(n, Equation) for n in nodes[1:]):
        nodes[0] = nodes[0].value                      # n = 1, 2, 3
    if len(pieces) > 1 and any(isinstance(n, Region) for n in nodes):
        regions = [_as_region(n) for n in nodes]
        if all(r is not None for r in regions):
            return _join_regions(regions, separators)
    return Seq("list", tuple(nodes))


def _join_regions(regions: list[Region], separators: list[str]) -> Region:
    """"or" is a union, "and" an intersection; a comma is an intersection unless that is empty (x < -1, x > 3)."""
    result = regions[0]
    for region in regions[1:]:
        both = _combine(result, region, lambda a, b: a and b)
        if "or" in separators or ("and" not in separators and not any(both.at) and not any(both.gaps)):
            both = _combine(result, region, lambda a, b: a or b)
        result = both
    return result


def _signs_expanded(tokens: list[Token]) -> list[list[Token]]:
    """All readings of ± (two signs are independent, unless ∓ ties them)."""
    marks = [i for i, token in enumerate(tokens) if token in (("o", "±"), ("o", "∓"))]
    if not marks:
        return [tokens]
    if len(marks) > 4:
        raise Unsupported("many ±")
    tied = any(tokens[i][1] == "∓" for i in marks)
    out = []
    for bits in range(2 if tied else 2 ** len(marks)):
        copy = list(tokens)
        for k, i in enumerate(marks):
            minus = bool(bits & 1) if tied else bool(bits >> k & 1)
            copy[i] = ("o", "-" if minus != (tokens[i][1] == "∓") else "+")
        out.append(copy)
    return out


def _parse_item(tokens: list[Token]) -> list[Any]:
    """Nodes of one list item: several where it has a ±."""
    tokens = _unwrap(tokens)
    if _enclosed(tokens, "⦃", "⦄"):
        return [_parse_set(tokens[1:-1])]
    variants = _signs_expanded(tokens)
    if len(variants) > 1 and ("o", "≠") in tokens:
        regions = [_parse_one(v) for v in variants]
        if all(isinstance(r, Region) for r in regions):
            return [_join_regions(regions, ["and"])]
    return [_parse_one(v) for v in variants]


def _parse_set(tokens: list[Token]) -> Any:
    if not _trim(tokens):
        return Seq("set", ())
    for bar in ("|", ":"):
        pieces, bars = _split(tokens, lambda t: t == ("o", bar))
        if len(bars) == 1 and pieces[0] and pieces[0][0][0] == "v" and any(t[1] in _RELATIONS for t in pieces[1] if t[0] == "o"):
            condition = parse_nodes(pieces[1])         # {x | x > 5}
            if isinstance(condition, Region):
                return condition
            raise Unsupported("set builder")
    inner = parse_nodes(tokens)
    if isinstance(inner, Seq) and inner.kind == "list":
        return Seq("set", inner.items)
    if isinstance(inner, Region):
        return inner
    return Seq("set", (inner,))


def _parse_one(tokens: list[Token]) -> Any:
    tokens = _unwrap(tokens)
    if not tokens:
        raise Unsupported("empty")
    pieces, unions = _split(tokens, lambda t: t == ("o", "∪"))
    if unions and all(any(t[0] == "o" and t[1] in "<>≤≥≠" for t in piece) for piece in pieces):
        regions = [_as_region(_parse_one(piece)) for piece in pieces]     # x < 1 ∪ x > 3
        if all(r is not None for r in regions):
            return _join_regions(regions, ["or"])
    sides, relations = _split(tokens, lambda t: t[0] == "o" and t[1] in _RELATIONS)
    if relations:
        return _parse_relation([_unwrap(s) for s in sides], relations)
    if _enclosed(tokens, "⦃", "⦄"):
        return _parse_set(tokens[1:-1])
    pieces, operators = _split(tokens, lambda t: t[0] == "o" and t[1] in "∪∩∖")
    if operators:
        return _parse_set_algebra(pieces, operators)
    pieces, colons = _split(tokens, lambda t: t == ("o", ":"))
    if colons and pieces[0] and all(kind == "t" for kind, _ in pieces[0]) and not any(k == "t" for k, _ in pieces[1]):
        return _parse_one(tokens[len(pieces[0]) + 1:])      # Area: 25
    if colons and all(pieces):
        return _parse_ratio(pieces)
    if _enclosed(tokens, "([", ")]"):
        return _parse_bracketed(tokens)
    if tokens[0][0] == "m":
        return _parse_matrix(tokens)
    if tokens == [("o", "ℝ")]:
        return Region((), (), (True,))
    if tokens == [("c", "emptyset")]:
        return Seq("set", ())
    return _parse_base(tokens) or _parse_scalar(tokens)


def _parse_bracketed(tokens: list[Token]) -> Any:
    inner = _trim(tokens[1:-1])
    pieces, commas = _split(inner, lambda t: t[0] == "o" and t[1] in ",;")
    if commas:
        items = tuple(_parse_one(piece) for piece in pieces)
        return Seq("tuple", items, tokens[0][1] + tokens[-1][1])
    if not inner:
        raise Unsupported("empty brackets")
    if inner[0][0] == "m" or tokens[0][1] + tokens[-1][1] in ("()", "[]"):
        return _parse_one(inner)
    raise Unsupported("half-open bracket without a comma")


def _parse_ratio(pieces: list[list[Token]]) -> Any:
    unit = None
    last = pieces[-1]
    if last[-1][0] == "t":                              # 12:30 p.m.
        last, unit_tokens = _split_unit(last)
        unit = _unit_name(unit_tokens)
    parts = tuple(Scalar(_ExpressionParser(p).whole()) for p in [*pieces[:-1], last])
    literal = tuple("".join(t[1] for t in p) for p in pieces)
    return Ratio((parts, literal, unit))


def _parse_matrix(tokens: list[Token]) -> Any:
    depth = _depths(tokens)
    if tokens[-1][0] != "e" or any(d == 0 for d in depth[1:-1]) or not (tokens[0][1].rstrip("*").endswith("matrix") or tokens[0][1] == "array"):
        raise Unsupported("matrix expression")
    if tokens[0][1].startswith(("v", "V")):
        raise Unsupported("determinant")
    rows, _ = _split(tokens[1:-1], lambda t: t == ("o", "⏎"))
    out = []
    for row in rows:
        if not row:
            continue
        cells, _ = _split(row, lambda t: t == ("o", "&"))
        out.append(tuple(_parse_one(cell) for cell in cells))
    if not out or len({len(row) for row in out}) != 1:
        raise Unsupported("ragged matrix")
    return Matrix(tuple(out))


_NUMBER_WORDS = {w: i for i, w in enumerate("zero one two three four five six seven eight nine ten eleven twelve".split())}


def _parse_base(tokens: list[Token]) -> Scalar | None:
    """204_5: digits in a base."""
    pieces, marks = _split(tokens, lambda t: t == ("o", "_"))
    if len(marks) != 1:
        return None
    digits, base = (_unwrap(p) for p in pieces)
    if _enclosed(digits, "(", ")"):
        digits = digits[1:-1]
    if len(base) != 1 or not digits:
        return None
    sign = -1 if digits[0] == ("o", "-") else 1
    digits = digits[1:] if sign < 0 else digits
    text = "".join(v for _, v in digits)
    radix = _NUMBER_WORDS.get(base[0][1].lower(), int(base[0][1]) if base[0][1].isdigit() and len(base[0][1]) < 3 else 0)
    if not 2 <= radix <= 36 or not re.search(r"\d", text) or not all(k in "nvt" for k, _ in digits):
        return None
    try:
        return Scalar(("n", Fraction(sign * int(text, radix)), 0, 1))
    except ValueError:
        return None


def _words(tokens: Sequence[Token]) -> str:
    """Text answer for comparison: no case, no punctuation, no leading article, no plural."""
    words = [v.casefold() for k, v in tokens if k != "o" or v in "+-/^<>=≤≥≠%°＄"]
    if len(words) > 1 and words[0] in ("the", "a", "an"):
        words = words[1:]
    return " ".join(w[:-1] if len(w) > 3 and w.endswith("s") and not w.endswith("ss") else w for w in words)


def _text_answer(tokens: Sequence[Token]) -> Any:
    """Text, or the value that a few fixed phrases stand for."""
    words = _words(tokens)
    if words in ("no solution", "no real solution", "empty set", "null set"):
        return Seq("set", ())
    if words in ("all real number", "all real", "real number"):
        return Region((), (), (True,))
    if words in _NUMBER_WORDS:
        return Scalar(("n", Fraction(_NUMBER_WORDS[words]), 0, 1))
    return Text(words)


def _singular(word: str) -> str:
    word = word.lower().rstrip(".")
    if word in _UNITS:
        return _UNITS[word]
    for ending in ("es", "s"):
        if word.endswith(ending) and word[:-len(ending)] in _UNITS:
            return _UNITS[word[:-len(ending)]]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 3 else word


def _unit_name(tokens: list[Token]) -> str:
    """Canonical unit: 15 square centimeters, 15 cm^2 and 15 sq. cm are all "cm^2"."""
    words, power = [], ""
    for i, (kind, value) in enumerate(tokens):
        low = value.lower().rstrip(".")
        if low in ("square", "sq", "squared", "cubic", "cubed", "cu"):
            exponent = "^2" if low.startswith("sq") else "^3"
            if low.endswith("ed") and words:
                words[-1] += exponent
            else:
                power = exponent
        elif low == "per" or value == "/":
            words.append("/")
        elif kind in "tv" and low not in ("of", "the", "a", "an", "in", "total") or (low == "in" and not words):
            words.append(_singular(value) + power)
            power = ""
        elif kind == "o" and value in "°＄£€¥₹¢%":
            words.append(_UNITS.get(value, value))
        elif kind == "n" and words:
            words[-1] += "^" + value
    name = "".join(words).replace("mi/h", "mph").replace("°c", "celsius").replace("°f", "fahrenheit")
    return "unit" if name in ("unit^2", "unit^3", "") else name


def _split_unit(tokens: list[Token]) -> tuple[list[Token], list[Token]]:
    """(value, unit) where the answer ends in a unit; Text raises Unsupported."""
    depths = _depths(tokens)
    first = next((i for i, (t, d) in enumerate(zip(tokens, depths)) if t[0] == "t" and d == 0), None)
    if first is None:
        # a bare m only with a power or per second: "5m" alone is more often five times the variable m
        tail = [v for _, v in tokens[-3:]]
        if len(tokens) > 3 and tail[0] == "m" and tokens[-4][0] == "n" and (tail[1:] in (["^", "2"], ["^", "3"], ["/", "s"])):
            return tokens[:-3], tokens[-3:]
        if len(tokens) > 5 and [v for _, v in tokens[-5:-3]] == ["m", "^"] and tail in (["{", "2", "}"], ["{", "3", "}"]):
            return tokens[:-5], [tokens[-5], tokens[-2]]
        return tokens, []
    value, unit = tokens[:first], tokens[first:]
    if value and value[-1] == ("o", "("):              # 12 (inches)
        value, unit = value[:-1], [t for t in unit if t not in (("o", "("), ("o", ")"))]
    for i, (kind, word) in enumerate(unit):
        if kind == "c" or word.lower() in _NO_UNIT_WORDS or (kind == "n" and (i == 0 or unit[i - 1][1] not in "^{")) or (
                kind == "o" and word not in "^{}./°-,()×"):
            raise Unsupported("statement")
    return value, [t for t in unit if t[1] not in "^{}"]


def _parse_scalar(tokens: list[Token]) -> Any:
    original = tokens
    while tokens and tokens[0][0] == "t" and tokens[0][1].lower() in _PREFIX_WORDS and len(tokens) > 1 and any(k != "t" for k, _ in tokens):
        tokens = _trim(tokens[1:])
    units: list[Token] = []
    sign: list[Token] = []
    if len(tokens) > 1 and tokens[0] in (("o", "-"), ("o", "+")) and tokens[1][1] in _CURRENCIES:
        sign, tokens = [tokens[0]], tokens[1:]
    while len(tokens) > 1 and (tokens[0][1] in _CURRENCIES or (tokens[0][0] == "t" and tokens[0][1].lower() in ("usd", "rs", "us", "eur", "gbp"))):
        units, tokens = [tokens[0]], _unwrap(tokens[1:])
    while len(tokens) > 1 and tokens[-1][1] in _CURRENCIES:
        units, tokens = [tokens[-1]], tokens[:-1]
    has_text = any(kind == "t" for kind, _ in tokens)
    try:
        value, unit = _split_unit(sign + tokens)
    except Unsupported:
        return _text_answer(original)
    if not value:
        return _text_answer(original)
    scale = 1
    while unit and unit[0][1].lower() in _MULTIPLIERS:
        scale *= _MULTIPLIERS[unit[0][1].lower()]
        unit = unit[1:]
    if len(value) > 2 and value[-1][0] == "v" and value[-2] == ("o", "°") and value[-1][1] in "CF":
        unit, value = [value[-2], value[-1]], value[:-2]     # 20 °C
    try:
        expr = _ExpressionParser(value).whole()
    except Unsupported:
        if has_text:
            return _text_answer(original)
        raise
    expr, marks = _without_marks(expr)
    if scale != 1:
        expr = ("*", [expr, ("n", Fraction(scale), 0, 1)], [])
    name = _unit_name([*units, *unit]) if units or unit else None
    percent = "p" in marks or name == "%"
    if "d" in marks and name is None:
        name = "°"
    return Scalar(expr, None if percent or name == "unit" else name, percent)


def _without_marks(expr: Expr) -> tuple[Expr, set[str]]:
    """The expression without degree and percent signs outside functions, and which of them it had: 90° - 50° is 40 with "d"."""
    kind = expr[0]
    if kind in "dp":
        inner, marks = _without_marks(expr[1])
        return inner, marks | {kind}
    if kind == "+":
        parts = [_without_marks(term) for term in expr[1]]
        return ("+", [p for p, _ in parts]), set().union(*(m for _, m in parts))
    if kind == "*":
        over, under = [_without_marks(f) for f in expr[1]], [_without_marks(f) for f in expr[2]]
        return ("*", [p for p, _ in over], [p for p, _ in under]), set().union(*(m for _, m in over + under))
    return expr, set()


# --------------------------------------------------------------------------------------------------------------------
# Relations: names, equations, inequalities, intervals

def _name_of(tokens: list[Token]) -> str | None:
    """Canonical name if the tokens only name a quantity: x, x_1, f(2), P(A), AB, NO/BO, A:B, (x,y), \\angle ABC, total cost."""
    if not tokens or not any(kind in "vt" or (kind == "c" and value in _GREEK) for kind, value in tokens):
        return None
    inside_brackets = 0
    after_subscript = False
    for i, (kind, value) in enumerate(tokens):
        if kind == "o":
            if value in "([":
                inside_brackets += 1
            elif value in ")]":
                inside_brackets -= 1
            elif value not in "{}_'/:|," and not inside_brackets and not (value == "^" and tokens[i + 1:i + 5] == [
                    ("o", "{"), ("o", "-"), ("n", "1"), ("o", "}")]) and not (value == "-" and i and tokens[i - 1] == ("o", "{")):
                return None
        elif kind == "n":
            inverse = tokens[max(0, i - 3):i] == [("o", "^"), ("o", "{"), ("o", "-")]
            if not inside_brackets and not after_subscript and not inverse:
                return None
        elif kind == "c" and value not in _GREEK and value not in _FUNCTIONS and value not in ("frac", "angle", "triangle", "overline", "bar", "pi"):
            return None
        elif kind in "me":
            return None
        if (kind, value) == ("o", "_"):
            after_subscript = True
        elif value not in "{" and not (kind == "n" and after_subscript):
            after_subscript = kind == "v" and after_subscript and i > 1 and tokens[i - 1] == ("o", "{")
    return "".join(v for _, v in tokens if v not in "{}")


def _try_expression(tokens: list[Token]) -> Expr | None:
    try:
        return _ExpressionParser(tokens).whole()
    except Unsupported:
        return None


def _parse_relation(sides: list[list[Token]], relations: list[str]) -> Any:
    if relations == ["∈"]:
        if sides[0] and _name_of(sides[0]) is None:
            raise Unsupported("membership of an expression")
        return _with_variable(parse_nodes(sides[1]), _name_of(sides[0]))
    if set(relations) == {"="}:
        return _parse_equation(sides)
    if not all(sides[1:]) or "∈" in relations or "=" in relations:
        raise Unsupported("mixed relations")
    exprs = [_ExpressionParser(side).whole() if side else ("s", "?") for side in sides]     # "> 5" is x > 5 without the x
    region = _solve_inequality(exprs, relations)
    return region if region is not None else Chain(tuple(exprs), tuple(relations))


def _parse_equation(sides: list[list[Token]]) -> Any:
    sides = [s for s in sides if s]
    if not sides:
        raise Unsupported("empty equation")
    if len(sides) == 1:                                # "= 5" or "x ="
        return _parse_one(sides[0])
    first, last = sides[0], sides[-1]
    name = _name_of(first)
    if len(sides) == 2 and name is None and _name_of(last):
        first, last, name = last, first, _name_of(last)     # 5 = x
    left = _try_expression(first)
    try:
        value = _parse_one(last)
    except Unsupported:
        value = None
    right = _try_expression(last)
    if value is None and (left is None or right is None):
        raise Unsupported("equation")
    numbers = left is not None and right is not None and not _symbols(left, _symbols(right, set()))
    loose = numbers or any(k == "m" for k, _ in first) or not any(k == "n" for k, _ in first)
    return Equation(name, value, left, right, len(sides) > 2, loose)


def _with_variable(node: Any, name: str | None) -> Any:
    if isinstance(node, Region):
        return Region(node.points, node.at, node.gaps, name)
    region = _as_region(node) if isinstance(node, Seq) and node.kind == "tuple" else None
    return Region(region.points, region.at, region.gaps, name) if region else node


def _real(expr: Expr) -> Any:
    """Real 60-digit value of a constant expression, or None."""
    if _symbols(expr, set()):
        return None
    try:
        value = numeric_value(expr, {})
    except (ZeroDivisionError, ValueError, OverflowError):
        return None
    ctx = _context()
    return ctx.re(value) if ctx.im(value) == 0 and not ctx.isnan(value) else None


def _simplified(points: list[Expr], at: list[bool], gaps: list[bool], variable: str | None) -> Region:
    """Without break points at which nothing changes."""
    kept = [i for i in range(len(points)) if not at[i] == gaps[i] == gaps[i + 1]]
    return Region(tuple(points[i] for i in kept), tuple(at[i] for i in kept), tuple([gaps[0], *(gaps[i + 1] for i in kept)]), variable)


def _combine(a: Region, b: Region, rule: Callable[[bool, bool], bool]) -> Region:
    """Set operation on two regions, point by point."""
    marks = [(_real(p), p) for p in (*a.points, *b.points)]
    marks.sort(key=lambda m: m[0])
    merged: list[tuple[Any, Expr]] = []
    for value, expr in marks:
        if not merged or not _close(merged[-1][0], value):
            merged.append((value, expr))

    def member(region: Region, value: Any, after: bool) -> bool:
        """Membership at `value`, or in the gap right after it (value None: before every point)."""
        below = 0
        for i, point in enumerate(region.points):
            here = _real(point)
            if value is not None and _close(here, value):
                return region.gaps[i + 1] if after else region.at[i]
            if value is not None and here < value:
                below = i + 1
        return region.gaps[below]

    at = [rule(member(a, v, False), member(b, v, False)) for v, _ in merged]
    gaps = [rule(a.gaps[0], b.gaps[0])] + [rule(member(a, v, True), member(b, v, True)) for v, _ in merged]
    variable = a.variable if a.variable == b.variable else a.variable or b.variable
    return _simplified([e for _, e in merged], at, gaps, variable)


def _interval(low: Expr, high: Expr, low_closed: bool, high_closed: bool, variable: str | None = None) -> Region | None:
    """Region between two constant ends; None where they are not real numbers in order."""
    a, b = _real(low), _real(high)
    if a is None or b is None or a > b or (a == b and not (low_closed and high_closed)):
        return None
    ctx = _context()
    points, at, gaps = [], [], []
    gaps.append(bool(ctx.isinf(a)))
    if not ctx.isinf(a):
        points.append(low)
        at.append(low_closed)
        if a != b:
            gaps.append(True)
    if not ctx.isinf(b) and a != b:
        points.append(high)
        at.append(high_closed)
    if not ctx.isinf(b):
        gaps.append(False)
    return Region(tuple(points), tuple(at), tuple(gaps), variable)


_MINUS_INF: Expr = ("*", [("n", Fraction(-1), 0, 1), ("k", "inf")], [])
_PLUS_INF: Expr = ("k", "inf")


def _as_region(node: Any) -> Region | None:
    """An interval, a set of numbers or a list of intervals as a region of the real line, else None."""
    if isinstance(node, Region):
        return node
    if isinstance(node, Equation) and node.name:
        return _as_region(node.value)
    if isinstance(node, Scalar) and node.unit is None and not node.percent:
        value = _real(node.expr)
        return None if value is None or _context().isinf(value) else Region((node.expr,), (True,), (False, False))
    if not isinstance(node, Seq):
        return None
    if node.kind == "tuple":
        ends = node.items
        if len(ends) != 2 or not all(isinstance(e, Scalar) and e.unit is None and not e.percent for e in ends):
            return None
        return _interval(ends[0].expr, ends[1].expr, node.brackets[0] == "[", node.brackets[1] == "]")
    parts = [_as_region(item) for item in node.items]
    if any(p is None for p in parts):
        return None
    return _join_regions(parts, ["or"]) if parts else Region((), (), (False,))


def _parse_set_algebra(pieces: list[list[Token]], operators: list[str]) -> Any:
    nodes = [parse_nodes(piece) for piece in pieces]
    if set(operators) == {"∪"} and all(isinstance(n, Seq) and n.kind == "set" for n in nodes):
        return Seq("set", tuple(item for n in nodes for item in n.items))
    regions = [_as_region(n) for n in nodes]
    if any(r is None for r in regions):
        raise Unsupported("set operation")
    result = regions[0]
    rules = {"∪": lambda a, b: a or b, "∩": lambda a, b: a and b, "∖": lambda a, b: a and not b}
    for operator, region in zip(operators, regions[1:]):
        result = _combine(result, region, rules[operator])
    return result


def _holds(relation: str, closed_at_root: bool) -> tuple[bool, bool, bool]:
    """Membership (below, at, above) of a relation f op 0 for increasing f."""
    return {"<": (True, False, False), ">": (False, False, True), "≤": (True, True, False), "≥": (False, True, True),
            "≠": (True, False, True)}[relation]


def _solve_pair(left: Expr, relation: str, right: Expr, symbol: str) -> Region | None:
    """Solution set of one inequality that is linear or quadratic in its only symbol; None for others."""
    if right[:2] == ("f", "abs") and left[:2] != ("f", "abs"):
        left, relation, right = right, _FLIP[relation], left
    if left[:2] == ("f", "abs") and not _symbols(right, set()) and relation != "≠":
        minus = ("*", [("n", Fraction(-1), 0, 1), right], [])
        upper, lower = _solve_pair(left[2], relation, right, symbol), _solve_pair(left[2], _FLIP[relation], minus, symbol)
        if upper is None or lower is None:
            return None
        return _combine(upper, lower, (lambda a, b: a and b) if relation in "<≤" else (lambda a, b: a or b))
    difference = _difference(left, right)
    if left == ("s", symbol) and not _symbols(right, set()):
        root, slope = right, 1
    elif right == ("s", symbol) and not _symbols(left, set()):
        root, slope = left, -1
    else:
        coefficients = _polynomial(difference, symbol)
        if coefficients is None:
            return None
        c, b, a = coefficients
        if a != 0:
            return _solve_quadratic(a, b, c, relation)
        if b == 0:
            return None
        root, slope = ("n", -c / b, 0, 1), 1 if b > 0 else -1
    value = _real(root)
    if value is None or _context().isinf(value):
        return Region((), (), (True,)) if value is not None and slope * (1 if relation in "<≤" else -1) * value > 0 else None
    below, at, above = _holds(relation, True)
    if slope < 0:
        below, above = above, below
    return Region((root,), (at,), (below, above))


def _polynomial(expr: Expr, symbol: str) -> tuple[Fraction, Fraction, Fraction] | None:
    """Coefficients (c, b, a) of c + b x + a x^2 if the expression is that with fractions, else None."""
    def value(x: Fraction) -> Fraction:
        return exact_value(_substituted(expr, symbol, ("n", x, 0, 1)))
    try:
        f0, f1, f2 = value(Fraction(0)), value(Fraction(1)), value(Fraction(2))
        a = (f2 - 2 * f1 + f0) / 2
        b = f1 - f0 - a
        checks = all(value(x) == f0 + b * x + a * x * x for x in (Fraction(-3), Fraction(7, 5), Fraction(-11, 4)))
    except (NotExact, ZeroDivisionError, TooLarge):
        return None
    return (f0, b, a) if checks else None


def _substituted(expr: Any, symbol: str, value: Expr) -> Any:
    if isinstance(expr, tuple):
        return value if expr[:2] == ("s", symbol) else tuple(_substituted(part, symbol, value) for part in expr)
    if isinstance(expr, list):
        return [_substituted(part, symbol, value) for part in expr]
    return expr


def _solve_quadratic(a: Fraction, b: Fraction, c: Fraction, relation: str) -> Region:
    discriminant = b * b - 4 * a * c
    outside, inside = (">", "<") if a > 0 else ("<", ">")
    def allowed(sign: str) -> bool:
        return relation == "≠" or relation in {"<": "<≤", ">": ">≥"}[sign]
    if discriminant < 0:
        return Region((), (), (allowed(outside),))
    at = relation in "≤≥"
    if discriminant == 0:
        return _simplified([("n", -b / (2 * a), 0, 1)], [at], [allowed(outside)] * 2, None)
    root = ("f", "sqrt", ("n", discriminant, 0, 1))
    ends = [("*", [("+", [("n", -b, 0, 1), ("*", [("n", Fraction(sign), 0, 1), root], [])])], [("n", 2 * a, 0, 1)]) for sign in (-1, 1)]
    if a < 0:
        ends.reverse()
    return Region(tuple(ends), (at, at), (allowed(outside), allowed(inside), allowed(outside)))


def _solve_inequality(exprs: list[Expr], relations: list[str]) -> Region | None:
    symbols: set[str] = set()
    for expr in exprs:
        _symbols(expr, symbols)
    if len(symbols) != 1:
        return None
    symbol = symbols.pop()
    result = None
    for left, relation, right in zip(exprs, relations, exprs[1:]):
        region = _solve_pair(left, relation, right, symbol)
        if region is None:
            return None
        result = region if result is None else _combine(result, region, lambda a, b: a and b)
    return Region(result.points, result.at, result.gaps, None if symbol == "?" else symbol)


# --------------------------------------------------------------------------------------------------------------------
# Equality of answers

def nodes_equal(gold: Any, pred: Any) -> bool:
    """Do two parsed answers have the same value? The gold decides what form is asked for."""
    if isinstance(gold, Equation) or isinstance(pred, Equation):
        return _equal_equations(gold, pred)
    if isinstance(gold, Text) or isinstance(pred, Text):
        return isinstance(gold, Text) and isinstance(pred, Text) and gold.words == pred.words
    if isinstance(gold, Scalar) and isinstance(pred, Scalar):
        return _equal_scalars(gold, pred)
    if isinstance(gold, Ratio) or isinstance(pred, Ratio):
        return _equal_ratios(gold, pred)
    if isinstance(gold, Chain) or isinstance(pred, Chain):
        return isinstance(gold, Chain) and isinstance(pred, Chain) and _equal_chains(gold, pred)
    if isinstance(gold, Matrix) or isinstance(pred, Matrix):
        return _equal_matrices(gold, pred)
    if isinstance(gold, Region) or isinstance(pred, Region):
        a, b = _as_region(gold), _as_region(pred)
        return a is not None and b is not None and not isinstance(gold, Scalar) and not isinstance(pred, Scalar) and _equal_regions(a, b)
    return _equal_sequences(gold, pred)


def _equal_scalars(gold: Scalar, pred: Scalar) -> bool:
    if gold.unit and pred.unit and gold.unit != pred.unit:
        return False
    if (gold.percent and pred.unit) or (pred.percent and gold.unit):
        return False
    if expressions_equal(gold.expr, pred.expr):
        return True
    for one, other in ((gold, pred), (pred, gold)):     # "3 m" reads as 3 times m until the other side says meters
        if one.unit and not other.unit and ("s", one.unit) in _factors(other.expr):
            return expressions_equal(one.expr, _substituted(other.expr, one.unit, ("n", Fraction(1), 0, 1)))
    hundred = [("n", Fraction(100), 0, 3)]
    if gold.percent != pred.percent:                    # 35 %, 35 and 0.35 are all accepted for one another
        a, b = (gold.expr, pred.expr) if gold.percent else (pred.expr, gold.expr)
        return expressions_equal(("*", [a], hundred), b)
    if (gold.unit == "°") != (pred.unit == "°"):        # 60° and pi/3
        a, b = (gold.expr, pred.expr) if gold.unit == "°" else (pred.expr, gold.expr)
        return expressions_equal(("*", [a, ("k", "pi")], [("n", Fraction(180), 0, 3)]), b)
    return False


def _factors(expr: Expr) -> list[Expr]:
    return expr[1] if expr[0] == "*" else [expr]


def _equal_ratios(gold: Any, pred: Any) -> bool:
    if isinstance(gold, Ratio) and isinstance(pred, Ratio):
        (a, literal_a, unit_a), (b, literal_b, unit_b) = gold.parts, pred.parts
        if len(a) != len(b) or (unit_a and unit_b and unit_a != unit_b):
            return False
        if all(nodes_equal(x, y) for x, y in zip(a, b)):
            return True
        times = any(re.fullmatch(r"0\d|\d0|00", part) for part in (*literal_a[1:], *literal_b[1:]))
        if times:                                       # 12:00 and 1:00 are times of day
            return False
        return all(expressions_equal(("*", [x.expr, b[0].expr], []), ("*", [y.expr, a[0].expr], [])) for x, y in zip(a, b))
    ratio, other = (gold, pred) if isinstance(gold, Ratio) else (pred, gold)
    parts, literal, _ = ratio.parts
    if not isinstance(other, Scalar) or len(parts) != 2 or literal[1].startswith("0"):
        return False
    return expressions_equal(("*", [parts[0].expr], [parts[1].expr]), other.expr)


def _difference(left: Expr, right: Expr) -> Expr:
    return ("+", [left, ("*", [("n", Fraction(-1), 0, 1), right], [])])


def _constant_ratio(f: Expr, g: Expr) -> Any:
    """f/g if it is the same nonzero number at every test point, else None."""
    symbols = _symbols(g, _symbols(f, set()))
    ratios = []
    for trial in range(NUM_POINTS):
        at = _points(symbols, trial)
        try:
            a, b = numeric_value(f, at), numeric_value(g, at)
            ratios.append(a / b)
        except (ZeroDivisionError, ValueError, OverflowError):
            continue
    if len(ratios) < 2 or ratios[0] == 0 or not all(_close(r, ratios[0]) for r in ratios):
        return None
    return ratios[0]


def _same_roots(f: Expr, g: Expr) -> bool:
    """Do f = 0 and g = 0 have the same solutions? Checked at roots found in each symbol from fixed starts, both ways."""
    ctx = _context()
    symbols = sorted(_symbols(f, set()))
    if not symbols or set(symbols) != _symbols(g, set()) or len(symbols) > 4:
        return False
    found = 0
    for a, b in ((f, g), (g, f)):
        for symbol in symbols:
            for trial in range(3):
                at = _points(symbols, trial)
                start = at[symbol]
                try:
                    root = ctx.findroot(lambda x: numeric_value(a, {**at, symbol: x}), (start, start + ctx.mpf("0.37")), tol=1e-50, maxsteps=60)
                    residual = numeric_value(b, {**at, symbol: root})
                except (ZeroDivisionError, ValueError, OverflowError, ArithmeticError):
                    continue
                if abs(residual) > 1e-20:
                    return False
                found += 1
    return found >= 4


_FUNCTION_NAME = re.compile(r"[a-zA-Z]\([a-zA-Z]\)|y")


def _solutions(equation: Equation) -> Seq | None:
    """Roots of an equation that is linear or quadratic in its only symbol, as a list; None for other equations."""
    if equation.left is None or equation.right is None:
        return None
    difference = _difference(equation.left, equation.right)
    symbols = _symbols(difference, set())
    coefficients = _polynomial(difference, next(iter(symbols))) if len(symbols) == 1 else None
    if coefficients is None or coefficients[1:] == (0, 0):
        return None
    c, b, a = coefficients
    if a == 0:
        return Seq("list", (Scalar(("n", -c / b, 0, 1)),))
    root = ("f", "sqrt", ("n", b * b - 4 * a * c, 0, 1))
    return Seq("list", tuple(Scalar(("*", [("+", [("n", -b, 0, 1), ("*", [("n", Fraction(sign), 0, 1), root], [])])], [("n", 2 * a, 0, 1)]))
                             for sign in (-1, 1)))


def _equal_equations(gold: Any, pred: Any) -> bool:
    if isinstance(gold, Equation) and isinstance(pred, Equation):
        values = gold.value is not None and pred.value is not None
        if gold.name and pred.name and values:
            if gold.name == pred.name or (_FUNCTION_NAME.fullmatch(gold.name) and _FUNCTION_NAME.fullmatch(pred.name)):
                return nodes_equal(gold.value, pred.value)
        if (gold.chain or pred.chain) and values:
            return nodes_equal(gold.value, pred.value)
        if None in (gold.left, gold.right, pred.left, pred.right):
            return False
        f, g = _difference(gold.left, gold.right), _difference(pred.left, pred.right)
        return _constant_ratio(f, g) is not None or _same_roots(f, g)
    if isinstance(gold, Equation):
        stated = gold.name or gold.chain or not _symbols(gold.left, _symbols(gold.right, set()))
        if not stated:
            roots = _solutions(gold)                    # x^2 = 4 and the list 2, -2
            return roots is not None and nodes_equal(roots, pred)
        return gold.value is not None and nodes_equal(gold.value, pred)
    if pred.value is not None and (pred.name or pred.chain or pred.loose):
        return nodes_equal(gold, pred.value)
    roots = _solutions(pred)
    return roots is not None and nodes_equal(gold, roots)


def _equal_chains(gold: Chain, pred: Chain) -> bool:
    for sides, relations in ((pred.sides, pred.relations), (pred.sides[::-1], tuple(_FLIP[r] for r in pred.relations[::-1]))):
        if relations == gold.relations and len(sides) == len(gold.sides) and all(
                expressions_equal(a, b) for a, b in zip(gold.sides, sides)):
            return True
    if len(gold.relations) == len(pred.relations) == 1:
        ratio = _constant_ratio(_difference(*gold.sides), _difference(*pred.sides))
        if ratio is not None and _context().im(ratio) == 0:
            expected = gold.relations[0] if _context().re(ratio) > 0 else _FLIP[gold.relations[0]]
            return pred.relations[0] == expected
    return False


def _equal_matrices(gold: Any, pred: Any) -> bool:
    if isinstance(gold, Matrix) and isinstance(pred, Matrix):
        return len(gold.rows) == len(pred.rows) and len(gold.rows[0]) == len(pred.rows[0]) and all(
            nodes_equal(a, b) for row_a, row_b in zip(gold.rows, pred.rows) for a, b in zip(row_a, row_b))
    matrix, other = (gold, pred) if isinstance(gold, Matrix) else (pred, gold)
    cells = [cell for row in matrix.rows for cell in row]
    if isinstance(other, Scalar):
        return len(cells) == 1 and nodes_equal(cells[0], other)
    if not isinstance(other, Seq) or other.kind == "set" or 1 not in (len(matrix.rows), len(matrix.rows[0])):
        return False
    return len(cells) == len(other.items) and all(nodes_equal(a, b) for a, b in zip(cells, other.items))


def _equal_regions(a: Region, b: Region) -> bool:
    if a.variable and b.variable and a.variable != b.variable:
        return False
    return a.at == b.at and a.gaps == b.gaps and all(expressions_equal(x, y) for x, y in zip(a.points, b.points))


def _items(node: Any) -> tuple:
    return node.items if isinstance(node, Seq) else (node,)


def _named_values(items: tuple) -> list | None:
    """x=3, y=4 -> the values in the order of the names; None unless every item is a different name's equation."""
    if not all(isinstance(i, Equation) and i.name and i.value is not None for i in items):
        return None
    names = [i.name for i in items]
    return [i.value for _, i in sorted(zip(names, items), key=lambda p: p[0])] if len(set(names)) == len(names) else None


def _equal_sequences(gold: Any, pred: Any) -> bool:
    a, b = _items(gold), _items(pred)
    if len(a) + len(b) > 400:
        raise TooLarge("list")
    tuples = [isinstance(n, Seq) and n.kind == "tuple" for n in (gold, pred)]
    if all(tuples):
        interval = len(a) == 2 and gold.brackets != pred.brackets
        return len(a) == len(b) and not interval and all(nodes_equal(x, y) for x, y in zip(a, b))
    if any(tuples):
        own, other = (gold, pred) if tuples[0] else (pred, gold)
        if isinstance(other, Seq) and len(other.items) == 1:
            return nodes_equal(own, other.items[0])     # the set {(1, 2)}
        if (isinstance(other, Seq) and other.kind == "set") or (len(own.items) == 2 and own.brackets != "()"):
            return False                                # {1, 2} is neither a pair nor an interval, [1, 2] is no list
        # a tuple against a list in the same order, x=3, y=4 included
        values = _named_values(_items(other)) or _items(other)
        return len(own.items) == len(values) and all(nodes_equal(x, y) for x, y in zip(own.items, values))
    named = [_all_named(n) for n in (a, b)]
    if not all(named):
        a, b = _values_if_named(a), _values_if_named(b)
    return _covers(a, b) and _covers(b, a, swap=True) and len(_distinct(a)) == len(_distinct(b))


def _all_named(items: tuple) -> bool:
    return all(isinstance(i, Equation) and i.name for i in items)


def _values_if_named(items: tuple) -> tuple:
    return tuple(i.value for i in items) if items and _all_named(items) and all(i.value is not None for i in items) else items


def _covers(a: tuple, b: tuple, swap: bool = False) -> bool:
    """Has every item of `a` an equal one in `b`?"""
    return all(any(nodes_equal(y, x) if swap else nodes_equal(x, y) for y in b) for x in a)


def _distinct(items: tuple) -> list:
    kept: list = []
    for item in items:
        if not any(nodes_equal(item, k) for k in kept):
            kept.append(item)
    return kept


# --------------------------------------------------------------------------------------------------------------------
# Two answers, in this process

_CHOICE = re.compile(r"(?:(?:the|correct|answer|option|choice|is)\s*:?\s*)*(?:[(\[]\s*([A-J])\s*[)\]]|([A-J])\s*(?:[.):\]]|$|(?=\s\d)))(.*)",
                     re.DOTALL | re.IGNORECASE)
_READABLE = re.compile(r"[^\W_]|∞|⦃")
_PLACEHOLDERS = frozenset(("answer", "youranswer", "finalanswer", "theanswer"))


def choice_letter(text: str) -> str | None:
    r"""Letter A to J that an answer such as `(A)`, `A.`, `\text{A}`, `\textbf{(A)}\ 12` or `option D` chooses, else None."""
    if len(text) > MAX_ANSWER_CHARS:
        return None
    plain = re.sub(r"[⟦⟧{}*]", "", normal_form(text)).strip()
    match = _CHOICE.fullmatch(plain) or re.fullmatch(r"()[^(]*[\s\d]\(([A-J])\)", plain)      # 12 (A)
    if not match:
        return None
    letter = match.group(1) or match.group(2)
    return letter.upper() if letter.isupper() or match.group(1) else None


def _is_choice_gold(gold: str) -> bool:
    plain = re.sub(r"[⟦⟧{}*\s.]", "", normal_form(gold))
    return bool(re.fullmatch(r"(?i:option|choice)?[(\[]?[A-J][)\]]?|\(?[A-J]\).+", plain))


@lru_cache(maxsize=4096)
def parse_answer(text: str) -> tuple:
    """Possible readings of an answer (two where a comma may group thousands or separate). Raises Unsupported, TooLarge."""
    if len(text) > MAX_ANSWER_CHARS:
        raise TooLarge("long text")
    forms = dict.fromkeys((normal_form(text), normal_form(text, join_thousands=False)))
    return tuple(parse_nodes(tokenize(form)) for form in forms)


def compare_answers(gold: str, pred: str) -> tuple[bool | None, str]:
    """Compare two extracted answers without math-verify.

    Args:    gold, pred: answers as written.
    Returns: (equal, rule); equal is None where the notation of one of them is not known here.
    """
    if gold == pred:
        return True, "string"
    if len(pred) > MAX_ANSWER_CHARS or len(gold) > MAX_ANSWER_CHARS:
        return False, "too_large"
    keys = [_string_key(normal_form(text)) for text in (gold, pred)]
    if keys[0] == keys[1]:
        return True, "string"
    if len(keys[0]) > 1 and keys[0].isalpha() and keys[0].casefold() == keys[1].casefold() and "⟦" in normal_form(gold) + normal_form(pred):
        return True, "text"
    if _is_choice_gold(gold):
        letter = choice_letter(pred)
        if letter:
            return letter == choice_letter(gold), "choice"
    nodes = []
    for text in (gold, pred):
        try:
            nodes.append(parse_answer(text))
        except Unsupported:
            nodes.append(None)
        except (TooLarge, RecursionError):
            return False, "too_large"
    if None in nodes:
        if nodes[1] is None and not _balanced(normal_form(pred)):
            return False, "unreadable"
        other = next((n for n in nodes if n is not None), None)
        return (False, "text") if other and all(isinstance(n, Text) for n in other) else (None, "unknown_notation")
    try:
        equal = any(nodes_equal(a, b) for a in nodes[0] for b in nodes[1])
    except (TooLarge, RecursionError):
        return False, "too_large"
    return equal, _rule_name(nodes[0][0])


def _balanced(normal: str) -> bool:
    """As many closing as opening brackets (half-open intervals mix the kinds) and braces: math-verify reads no others."""
    counts = {ch: normal.count(ch) for ch in "([{⦃)]}⦄"}
    return counts["("] + counts["["] == counts[")"] + counts["]"] and counts["{"] == counts["}"] and counts["⦃"] == counts["⦄"]


def _rule_name(node: Any) -> str:
    if isinstance(node, Scalar):
        return "number" if node.expr[0] == "n" or not _symbols(node.expr, set()) else "expression"
    return node.kind if isinstance(node, Seq) else type(node).__name__.lower()


_INTEGER = re.compile(r"[-+]?\d{1,30}")


def grade_in_process(prediction: str, gold: str, strict: bool, task_type: str) -> Grade | tuple[str, str]:
    """The verdict, or the pair (gold answer, predicted answer) where only math-verify knows the notation."""
    if task_type not in TASK_TYPES:
        raise ValueError(f"task_type {task_type!r} is none of {', '.join(TASK_TYPES)}")
    if task_type == "mcq":
        return _grade_choice(prediction, gold, strict)
    answer = extract_answer(prediction, strict)
    if answer is None:
        return Grade("unparsed", None, "open_box" if _BOX.search(prediction) else "no_box" if strict else "no_answer")
    gold = _gold_answer(gold)
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(gold):
        return Grade("correct" if int(answer) == int(gold) else "wrong", answer, "number")
    key = _string_key(normal_form(answer[:MAX_ANSWER_CHARS + 1]))
    if not _READABLE.search(key) or key.lower() in _PLACEHOLDERS:
        return Grade("unparsed", answer, "empty")
    equal, rule = compare_answers(gold, answer)
    if equal is None:
        return gold, answer
    return Grade("correct" if equal else "wrong", answer, rule)


def _gold_answer(gold: str) -> str:
    if "boxed" in gold:
        boxed, content = _boxed_answer(gold)
        if boxed and content is not None:
            return content.strip()
    return gold.strip()


# --------------------------------------------------------------------------------------------------------------------
# Multiple choice

_ANSWER_IS = re.compile(
    r"\b(?:answer|option|choice)s?\b\s*(?:\*\*)?\s*(?:is|:|=|would be|should be|must be)\s*:?\s*(?:therefore|thus|clearly)?\s*"
    r"(?:option|choice|answer)?\s*(?P<open>(?:\*\*|\$|\\text(?:bf)?\s*\{|\\mathrm\s*\{|\\\(|[(\[{])*)\s*(?P<letter>[A-Ja-j])(?![A-Za-z'])(?P<rest>\s*.?)",
    re.IGNORECASE)


def extract_choice(text: str, strict: bool = False) -> tuple[str | None, str]:
    """(letter or None, rule) of a multiple-choice response: last box, else the last "answer is (X)"; never a letter out of prose."""
    turn_end = _TURN_END.search(text)
    if turn_end and turn_end.start():
        text = text[:turn_end.start()]
    boxed, content = _boxed_answer(text)
    if boxed:
        letter = choice_letter(content) if content else None
        if letter is None and content and re.fullmatch(r"[a-j]", content.strip()):
            letter = content.strip().upper()
        return letter, "box"
    if strict:
        return None, "no_box"
    for match in reversed(list(_ANSWER_IS.finditer(re.sub(r"\s{2,}", " ", text)))):
        wrapped, letter = bool(match.group("open")), match.group("letter")
        rest = match.group("rest").strip()
        # "the answer is a prime": a bare lower-case letter, or a bare A or I before a word, is a word of the sentence
        if wrapped or (letter.isupper() and (letter not in "AI" or not rest or not rest.isalnum())):
            return letter.upper(), "answer_is"
    return None, "no_answer"


def _grade_choice(prediction: str, gold: str, strict: bool) -> Grade:
    wanted = choice_letter(_gold_answer(gold))
    if wanted is None:
        raise ValueError(f"the gold answer of a multiple-choice problem must be a letter A to J, not {gold!r}")
    letter, rule = extract_choice(prediction, strict)
    if letter is None:
        return Grade("unparsed", None, rule)
    return Grade("correct" if letter == wanted else "wrong", letter, rule)


# --------------------------------------------------------------------------------------------------------------------
# math-verify in worker processes

class _WorkerTimeout(Exception):
    pass


class _WorkerDied(Exception):
    pass


def _worker_loop() -> None:
    """Body of a worker process: one JSON request a line on stdin, one JSON reply a line on stdout."""
    import resource
    import signal
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)                                      # whatever a library prints must not reach the replies
    resource.setrlimit(resource.RLIMIT_AS, (WORKER_MEMORY_BYTES, WORKER_MEMORY_BYTES))
    import logging
    logging.disable(logging.CRITICAL)
    from math_verify import parse, verify
    # The first parse builds the parser's tables; it belongs to the start and not to the first answer's time.
    verify(parse("\\boxed{\\frac{1}{x}}", parsing_timeout=None), parse("\\boxed{x^{-1}}", parsing_timeout=None), timeout_seconds=None)
    replies.write("ready\n")
    for line in sys.stdin:
        gold, pred, limit_s = json.loads(line)
        # The parent kills a slow worker. If the parent itself is gone, the alarm's default action ends this process.
        signal.setitimer(signal.ITIMER_REAL, limit_s + 2)
        try:
            golds = parse(f"\\boxed{{{gold}}}", parsing_timeout=None)
            preds = parse(f"\\boxed{{{pred}}}", parsing_timeout=None)
            equal = bool(golds and preds and verify(golds, preds, timeout_seconds=None))
        except (Exception, RecursionError):            # any library error means: not shown to be equal
            equal = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(equal) + "\n")


class _Worker:
    """One grading process and the pipe to it."""

    def __init__(self) -> None:
        here = os.path.dirname(os.path.abspath(__file__))
        # hash seed 0: sympy orders arguments by hash in places, and two workers must agree
        env = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        code = "import sys; sys.path.insert(0, sys.argv[1]); import utils_math_eval; utils_math_eval._worker_loop()"
        # A fresh interpreter, not a fork: the caller may hold torch or CUDA threads and their locks.
        self.process = subprocess.Popen([sys.executable, "-c", code, here], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, env=env, start_new_session=True)
        self.buffer, self.answered, self.ready = b"", 0, False

    def wait_ready(self) -> None:
        """Wait until the imports are done; they do not count against the limit of an answer."""
        if not self.ready:
            try:
                self._read_line(WORKER_START_S)
            except (_WorkerDied, _WorkerTimeout):
                raise RuntimeError("the math-verify worker does not start; is the package math-verify installed?") from None
            self.ready = True

    def _read_line(self, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self.process.stdout, select.POLLIN)
        while b"\n" not in self.buffer:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise _WorkerTimeout
            if not poll.poll(left_s * 1000):
                continue
            chunk = os.read(self.process.stdout.fileno(), 65536)
            if not chunk:
                raise _WorkerDied
            self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line.decode()

    def ask(self, gold: str, pred: str, timeout_s: float) -> bool:
        self.answered += 1
        try:
            self.process.stdin.write((json.dumps([gold, pred, timeout_s]) + "\n").encode())
            self.process.stdin.flush()
        except OSError:
            raise _WorkerDied from None
        return json.loads(self._read_line(timeout_s))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            try:
                pipe.close()
            except OSError:                            # a half-written request in the buffer of a dead worker
                pass


class GradePool:
    """Grades many answers; workers for math-verify start when the first answer needs one.

    Use as a context manager, from any thread. `timeout_s` is the hard limit of one answer: a worker that exceeds it is killed and
    replaced, the answer counts as `timeout`, and the next one is graded. Results do not depend on `workers`.

    Args:    workers: processes at most, >= 1. timeout_s: seconds per answer, without the start of a worker (about 1 s).
    Raises:  ValueError for a limit below 1 worker or 0 seconds.
    """

    def __init__(self, workers: int = 1, timeout_s: float = ANSWER_TIMEOUT_S):
        if workers < 1 or not timeout_s > 0:
            raise ValueError("GradePool needs at least one worker and a positive time limit")
        self.workers, self.timeout_s = workers, timeout_s
        self._free = threading.Semaphore(workers)
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        self._closed = self._started = False

    def __enter__(self) -> "GradePool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all idle workers; a call of `grade` still running in another thread ends its own."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.close()

    def grade(self, items: Iterable[tuple[str, str, str]], strict: bool = False) -> list[Grade]:
        """Grade (prediction, gold, task_type) items, in order.

        Args:    items: task_type is "math" or "mcq". strict: only a boxed answer counts (the training reward).
        Returns: one Grade an item.
        Raises:  ValueError for an unknown task_type; RuntimeError if the pool is closed or math-verify cannot be started.
        """
        if self._closed:
            raise RuntimeError("this GradePool is closed")
        grades: list[Any] = []
        open_pairs: dict[tuple[str, str], list[int]] = {}
        for i, (prediction, gold, task_type) in enumerate(items):
            grade = grade_in_process(prediction, gold, strict, task_type)
            grades.append(grade)
            if not isinstance(grade, Grade):
                open_pairs.setdefault(grade, []).append(i)     # the same answer twice is asked once
                if len(open_pairs) == 1:
                    self._start_one()                          # its imports run while the other answers are compared here
        if open_pairs:
            for pair, (outcome, rule) in self._ask_all(list(open_pairs)).items():
                for i in open_pairs[pair]:
                    grades[i] = Grade(outcome, pair[1], rule)
        return grades

    def _start_one(self) -> None:
        with self._lock:
            if not self._started and not self._closed:
                self._idle.append(_Worker())
                self._started = True

    def _ask_all(self, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], tuple[str, str]]:
        results: dict[tuple[str, str], tuple[str, str]] = {}
        failures: list[BaseException] = []
        todo: queue.SimpleQueue = queue.SimpleQueue()
        for pair in pairs:
            todo.put(pair)

        def drain() -> None:
            try:
                while True:
                    pair = todo.get_nowait()
                    results[pair] = self._ask(*pair)
            except queue.Empty:
                pass
            except BaseException as error:             # handed to the caller below
                failures.append(error)

        threads = [threading.Thread(target=drain, daemon=True) for _ in range(min(self.workers, len(pairs)) - 1)]
        for thread in threads:
            thread.start()
        drain()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return results

    def _replace(self, worker: _Worker) -> None:
        """Start the successor of a hung worker at once, so that its imports do not delay the next answer."""
        worker.process.kill()
        with self._lock:
            if not self._closed:
                self._idle.append(_Worker())

    def _ask(self, gold: str, pred: str) -> tuple[str, str]:
        """(outcome, rule) from a worker. A worker that dies is tried once more: the system may have ended it."""
        for _ in range(2):
            with self._free:
                with self._lock:
                    worker = self._idle.pop() if self._idle else None
                worker = worker or _Worker()
                keep = False
                try:
                    worker.wait_ready()
                    equal = worker.ask(gold, pred, self.timeout_s)
                    keep = worker.answered < WORKER_MAX_ANSWERS
                    return ("correct" if equal else "wrong"), "math_verify"
                except _WorkerTimeout:
                    self._replace(worker)
                    return "timeout", "timeout"
                except _WorkerDied:
                    continue
                finally:
                    with self._lock:
                        keep = keep and not self._closed
                        if keep:
                            self._idle.append(worker)
                    if not keep:
                        worker.close()
        return "timeout", "worker_died"


_shared_pool: GradePool | None = None
_shared_lock = threading.Lock()


def _default_pool() -> GradePool:
    global _shared_pool
    with _shared_lock:
        if _shared_pool is None:
            _shared_pool = GradePool(1)
            atexit.register(_shared_pool.close)
        return _shared_pool


def grade_answer(prediction: str, gold: str, strict: bool = False, task_type: str = "math") -> Grade:
    """Grade one response; for many, `GradePool.grade` asks several workers at once.

    Args:    prediction: the whole response. gold: the answer alone. strict: only a boxed final answer counts.
             task_type: "math", or "mcq" with a letter as gold.
    Returns: Grade with outcome correct | wrong | unparsed | timeout.
    Raises:  ValueError for an unknown task_type or an mcq gold that is no letter.
    """
    return _default_pool().grade([(prediction, gold, task_type)], strict)[0]


# --------------------------------------------------------------------------------------------------------------------
# Scores of one problem

def avg_at_k(correct: Sequence[bool]) -> float:
    """Mean score of the k draws of one problem, between 0 and 1. Raises ValueError without draws."""
    if not correct:
        raise ValueError("avg_at_k needs at least one draw")
    return sum(map(bool, correct)) / len(correct)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k draws is correct.

    1 - C(n - c, k) / C(n, k), as a product of factors below 1, so that no binomial overflows.

    Args:    num_samples: n draws. num_correct: c of them correct. k: 1 <= k <= n.
    Returns: probability in [0, 1].
    Raises:  ValueError unless 0 <= c <= n and 1 <= k <= n.
    Source:  Chen et al. 2021, Evaluating Large Language Models Trained on Code, section 2.1.
    """
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"pass_at_k needs 0 <= correct <= samples and 1 <= k <= samples, not n={num_samples}, c={num_correct}, k={k}")
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_samples - num_correct + 1, num_samples + 1))


def answer_key(extracted: str) -> str:
    """Votes with the same key are votes for the same answer: the value of a number, else the normal form."""
    try:
        nodes = parse_answer(extracted)
        if isinstance(nodes[0], Scalar) and not nodes[0].percent and nodes[0].unit is None:
            value = exact_value(nodes[0].expr)
            return f"{value.numerator:x}/{value.denominator:x}"     # hexadecimal: Python limits decimal digits to 4300
    except (Unsupported, TooLarge, NotExact, ZeroDivisionError, RecursionError):
        pass
    return _string_key(normal_form(extracted[:MAX_ANSWER_CHARS])).casefold()


def maj_at_k(extracted: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Expected score of a majority vote over the k draws of one problem; ties are broken at random.

    Args:    extracted: answers as cut out; None and "" do not vote. correct: verdict on each draw.
    Returns: share of the leading answers that is correct, in [0, 1]; 0 where nothing was extracted.
    Raises:  ValueError without draws or for unequal lengths.
    """
    if not extracted or len(extracted) != len(correct):
        raise ValueError("maj_at_k needs one verdict per draw and at least one draw")
    votes: dict[str, list[bool]] = {}
    for answer, right in zip(extracted, correct):
        if answer:
            votes.setdefault(answer_key(answer), []).append(bool(right))
    if not votes:
        return 0.0
    most = max(map(len, votes.values()))
    leaders = [v for v in votes.values() if len(v) == most]
    return sum(sum(v) / len(v) for v in leaders) / len(leaders)


# --------------------------------------------------------------------------------------------------------------------
# Command line

CHUNK_ROWS = 256  # graded at a time, so that progress is seen


def grade_rows(rows: list[dict], workers: int, timeout_s: float, strict: bool, source: str) -> list[dict]:
    """Rows with `outcome`, `extracted` and `rule` added. Raises UserError naming the first row that cannot be graded."""
    from config import UserError
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("gold", "prediction")):
            raise UserError(f"{source} row {number}: needs the string fields gold and prediction")
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise UserError(f"{source} row {number}: holds half a surrogate pair, which no UTF-8 file can hold") from None
        if row.get("task_type", "math") not in TASK_TYPES:
            raise UserError(f"{source} row {number}: task_type {row['task_type']!r} is none of {', '.join(TASK_TYPES)}")
        if row.get("task_type") == "mcq" and choice_letter(_gold_answer(row["gold"])) is None:
            raise UserError(f"{source} row {number}: the gold answer of an mcq row must be a letter A to J, not {row['gold']!r}")
    graded = []
    with GradePool(workers, timeout_s) as pool:
        for start in range(0, len(rows), CHUNK_ROWS):
            chunk = rows[start:start + CHUNK_ROWS]
            grades = pool.grade([(r["prediction"], r["gold"], r.get("task_type", "math")) for r in chunk], strict)
            graded += [{**r, "outcome": g.outcome, "extracted": g.extracted, "rule": g.rule} for r, g in zip(chunk, grades)]
    return graded


def main(cfg: Any) -> int:
    from config import UserError
    from utils_run import read_jsonl, write_jsonl
    if not cfg.input or not cfg.output:
        raise UserError("--input and --output are needed: JSON-lines files to read and to write")
    if cfg.workers < 1 or not cfg.timeout_s > 0:
        raise UserError("--workers must be at least 1 and --timeout_s positive")
    rows = read_jsonl(cfg.input)
    started = time.monotonic()
    graded = grade_rows(rows, cfg.workers, cfg.timeout_s, cfg.strict, cfg.input)
    write_jsonl(cfg.output, graded)
    counts = {outcome: sum(row["outcome"] == outcome for row in graded) for outcome in OUTCOMES}
    print(f"{len(graded)} answers in {time.monotonic() - started:.1f} s: " + ", ".join(f"{n} {o}" for o, n in counts.items()))
    return 0


if __name__ == "__main__":
    from config import GradeConfig
    from utils_run import run_script
    run_script(main, GradeConfig, description=__doc__)
