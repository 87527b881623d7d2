r"""Where in a completion the answer stands. Pure, linear in the length of the text, and no text makes it raise.

    completion -> what is said after thinking -> box | tag | final-answer mark | bare answer | last value -> Extraction

Of several candidates of one form the last complete one counts. Candidates that are offered side by side
(``\boxed{3} or \boxed{4}``, ``7, 8 or 9``) are one answer with several values, which equals no single one.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from nearpolicy.verifier.config import ExtractionForm

MOST_CANDIDATES = 20
"""Values side by side that are still one answer; more are a list of guesses."""


@dataclass(frozen=True, slots=True)
class Extraction:
    """The answer of a completion, as it is written there; or why there is none."""

    answer: str | None
    how: str
    """The rule that found it, or the reason why there is no answer."""


def extract(text: str, form: ExtractionForm = "auto") -> Extraction:
    """The answer in a completion. ``form`` says which forms count; `auto` takes the first that is there."""
    said = without_thinking(text)
    if form == "auto":
        return _auto(said)
    found = _FORMS[form](said)
    return found or Extraction(None, _NOTHING[form])


def gold_answer(text: str) -> str:
    r"""The answer in a right answer of the data: its last box, what follows its last ``####`` or, in a worked solution
    of several lines, its last final-answer mark; otherwise all of it."""
    box = _boxed(text)
    if box and box.answer is not None:
        return box.answer
    mark = _marked(text) if "####" in text or "\n" in text.strip() else None
    return mark.answer if mark and mark.answer is not None else text.strip()


_THINKING = re.compile(r"<(/?)(?:think|thinking|thought|reasoning)>", re.IGNORECASE)


def without_thinking(text: str) -> str:
    """The text without its thinking parts. One that never ends takes the rest along; an end without a beginning takes
    all before it, because chat templates open the first one in the prompt."""
    kept: list[str] = []
    begin, inside = 0, False
    for mark in _THINKING.finditer(text):
        if not mark[1]:
            if not inside:
                kept.append(text[begin : mark.start()])
            inside = True
            continue
        if not inside:
            kept.clear()
        begin, inside = mark.end(), False
    if not inside:
        kept.append(text[begin:])
    return "".join(kept)


def _auto(said: str) -> Extraction:
    for form in (_boxed, _tagged, _marked, _bare, _last_value):
        found = form(said)
        if found is not None:
            return found
    return Extraction(None, "the completion holds no answer in any form")


# Boxes


@dataclass(frozen=True, slots=True)
class _Box:
    start: int
    end: int
    content: str


_BRACES = re.compile(
    r"""
    (?P<open>\\(?:boxed|fbox|framebox)\s*\{)
    | \\(?:boxed|fbox|framebox)\s*(?P<bare>-?[0-9]+(?:[.,/][0-9]+)*(?:\\?%)?  # without braces: one number,
        | [A-Za-z](?![A-Za-z]) | \\[A-Za-z]+(?:\{[^{}]{0,200}\})*)                   # symbol or command
    | \\. | [{}]
    """,
    re.VERBOSE | re.DOTALL,
)


def _boxes(text: str) -> tuple[list[_Box], bool]:
    """The complete boxes that lie in no other complete box, in order; and whether one after them was never closed."""
    opened: list[tuple[int, int] | None] = []  # a box's start and the start of its content; None for other braces
    found: list[_Box] = []
    for token in _BRACES.finditer(text):
        if token["open"]:
            opened.append(token.span())
        elif token["bare"]:
            found.append(_Box(token.start(), token.end(), token["bare"]))
        elif token[0] == "{":
            opened.append(None)
        elif token[0] == "}" and opened and (box := opened.pop()):
            while found and found[-1].start > box[0]:
                found.pop()
            found.append(_Box(box[0], token.end(), text[box[1] : token.start()]))
    last = found[-1].end if found else 0
    return found, any(box and box[0] >= last for box in opened)


_HEDGE = r"or|alternatively|maybe|perhaps|possibly"
_GLUE = r"\s|\$|~|\*|\\[()\[\],;:!\ ]|\\q?quad|\\text\s*\{|[{}]|[A-Za-z]\w{0,3}\s*="
_BETWEEN_BOXES = re.compile(
    rf"(?:{_GLUE}|[,;/&]|\b(?:and|either|else|also|even|could|might|may|be|it|{_HEDGE})\b|\.\s*(?=(?:{_HEDGE})\b))*",
    re.IGNORECASE,
)
_JOINS = re.compile(rf"[,;/&]|\b(?:and|{_HEDGE})\b", re.IGNORECASE)
_OFFERS = re.compile(rf"/|\b(?:{_HEDGE})\b", re.IGNORECASE)
_LONGEST_GAP = 80


def _boxed(said: str) -> Extraction | None:
    r"""The last complete box; with the boxes and values that are offered beside it (``\boxed{3} or 4``), if any."""
    boxes, left_open = _boxes(said)
    if not boxes:
        return Extraction(None, "a box was opened and never closed") if left_open else None
    first = len(boxes) - 1
    gaps: list[str] = []
    while first > 0:
        gap = said[boxes[first - 1].end : boxes[first].start]
        if len(gap) > _LONGEST_GAP or not _JOINS.search(gap) or not _BETWEEN_BOXES.fullmatch(gap):
            break
        gaps.append(gap)
        first -= 1
    beside = [_value_before(said, boxes[first].start), _value_after(said, boxes[-1].end)]
    values = [*filter(None, beside[:1]), *(box.content for box in boxes[first:]), *filter(None, beside[1:])]
    offered = any(beside) or any(_OFFERS.search(gap) for gap in gaps)
    return _joined([value.strip() for value in values], offered, "the last box")


def _joined(values: list[str], offered: bool, how: str) -> Extraction:
    """One answer of several values. ``offered``: as alternatives, and not as a list."""
    if len(values) > MOST_CANDIDATES:
        return Extraction(None, f"more than {MOST_CANDIDATES} candidates side by side")
    if len(values) > 1:
        how += f" and {len(values) - 1} more beside it"
    return Extraction((r" \text{ or } " if offered else ", ").join(values), how)


_OFFER_BEFORE = re.compile(
    rf"[\s$]*,?[\s$]*\b(?:{_HEDGE})\b[\s$]*(?:(?:maybe|perhaps|possibly|even|else)\b[\s$]*)?[($\\\[]*$", re.IGNORECASE
)
_OFFER_AFTER = re.compile(
    rf"[ \t$,.)\]*\\]*\(?\b(?:{_HEDGE})\b[ \t]*"
    r"(?:(?:maybe|perhaps|possibly|even|else|equivalently|simply|just|it|could|might|may|be|is)\b[ \t]*)*",
    re.IGNORECASE,
)


def _value_before(said: str, place: int) -> str | None:
    """The value in ``3 or \boxed{4}``."""
    before = said[max(0, place - _LONGEST_GAP) : place]
    offer = _OFFER_BEFORE.search(before)
    values = list(_VALUE.finditer(before[: offer.start() + 1])) if offer else []
    return values[-1][0] if values and values[-1].end() >= offer.start() else None


def _value_after(said: str, place: int) -> str | None:
    r"""The value in ``\boxed{3}, or maybe 4``."""
    after = said[place : place + 4 * _LONGEST_GAP]
    offer = _OFFER_AFTER.match(after)
    value = _VALUE.match(after, offer.end()) if offer else None
    return value[0] if value else None


# Tags


_TAG = re.compile(r"<(/?)answer(?:\s[^<>]{0,80})?>", re.IGNORECASE)


def _tagged(said: str) -> Extraction | None:
    """What the last complete ``<answer>...</answer>`` holds; within it, a box or a final-answer mark if it has one."""
    begin: int | None = None
    content: str | None = None
    for tag in _TAG.finditer(said):
        if not tag[1]:
            begin = tag.end()
        elif begin is not None:
            content, begin = said[begin : tag.start()].strip(), None
    if content is None:
        return Extraction(None, "an <answer> tag was opened and never closed") if begin is not None else None
    inner = _boxed(content) or _marked(content)
    if inner is not None:
        return Extraction(inner.answer, f"{inner.how} in the last <answer> tag")
    return Extraction(_unwrapped(content), "the last <answer> tag")


# Final-answer marks


_MARK = re.compile(
    r"""
    (?P<hash>\#{4,}[ \t]*)
    | ^[ \t>*_\#-]*(?:(?:final[ ]answer|answer|ans)[ \t*_]*[:=] | (?P<letter>(?-i:A))[ \t*_]*:)[ \t*_]*
    | \banswers?\b(?:[ \t]+(?:to|for|of|in)\b[^.\n:?!]{0,80}?)?[ \t*_]*
      (?:\b(?:is|are|was|should[ ]be|must[ ]be|will[ ]be|would[ ]be)\b(?:[ \t]+(?:therefore|thus|simply|just|then)\b)?
         [ \t]*:? | [:=])[ \t*_]*
    """,
    re.VERBOSE | re.IGNORECASE | re.MULTILINE,
)
_CLAUSE_END = re.compile(
    r"""[.?](?=[\s$*"')\]]|$) | \n | ;\s
    | (?:,\s?|\s)(?:because|since|which|where|when|as|so|therefore|thus|hence|given|for)\b""",
    re.VERBOSE | re.IGNORECASE,
)
_LONGEST_CLAUSE = 1000
_MOST_MARKS = 50
_OPTION_B = re.compile(r"^[ \t>*_-]*B[ \t*_]*:", re.MULTILINE)
_STARTS_LIKE_A_VALUE = re.compile(r"[-+\u2212$\\({\[.|0-9]|[A-Za-z]\w{0,2}\s*=|[A-Za-z](?![A-Za-z])")
_NEGATED = re.compile(r"(?:not|never|neither)\b", re.IGNORECASE)
_CORRECTED = re.compile(r"(?:\bit\s+is|\bit's|\bbut(?:\s+rather)?|\brather|\binstead)\s+", re.IGNORECASE)


def _marked(said: str) -> Extraction | None:
    """What follows the last of ``####``, ``A:``, ``Answer:`` and ``the answer is``, to the end of its clause."""
    for mark in reversed(deque(_MARK.finditer(said), maxlen=_MOST_MARKS)):
        clause = _clause(said, mark.end(), next_line=mark["hash"] is None)
        heading = mark["hash"] and not _STARTS_LIKE_A_VALUE.match(clause)
        option = mark["letter"] and _OPTION_B.search(said, mark.end(), mark.end() + _LONGEST_CLAUSE)
        if clause and not heading and not option:
            return _after_mark(said, mark, clause)
    return None


def _after_mark(said: str, mark: re.Match[str], clause: str) -> Extraction:
    """A clause begins with its answer (``12, found twice``) or ends with it (``that she has 12``)."""
    how = f"after {' '.join(mark[0].split())!r}"
    if _NEGATED.match(clause):
        sentence = said[mark.end() : mark.end() + _LONGEST_CLAUSE].partition("\n")[0]
        correction = _CORRECTED.search(sentence)
        clause = _clause(sentence, correction.end(), next_line=False) if correction else ""
        if not clause:
            return Extraction(None, f"{how} the answer is denied")
    if (box := _boxed(clause)) is not None:
        return replace(box, how=f"{box.how} {how}")
    if _answers_alone(clause):
        return Extraction(_unwrapped(clause), how)
    if _VALUE.match(clause):
        return replace(_first_value(clause), how=how)
    found = _last_value(clause)
    return replace(found, how=how) if found and found.answer else found or Extraction(_unwrapped(clause), how)


def _clause(text: str, begin: int, *, next_line: bool) -> str:
    """What is said from ``begin`` to the end of the clause; from the next line on, if there is nothing on this one."""
    rest = text[begin : begin + _LONGEST_CLAUSE]
    line, _, below = rest.partition("\n")
    if not line.strip(" \t*_:$") and next_line:
        line = below.lstrip().partition("\n")[0]
    line = line.strip(" \t*_:")
    formula = _FORMULA.match(line)
    end = _CLAUSE_END.search(line, formula.end() if formula else 0)
    return (line[: end.start()] if end else line).strip()


_WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"), ('"', '"'), ("'", "'"))


def _unwrapped(text: str) -> str:
    """Without the marks around all of it: formula signs, emphasis, quotes, and a full stop."""
    before = None
    while text != before:
        before = text
        text = text.strip().strip("*_").strip()
        while text and text[-1] in ".,:; " and text[-2:-1] not in ("\\", "."):
            text = text[:-1]
        for left, right in _WRAPPERS:
            inner = text[len(left) : -len(right)]
            wrapped = text.startswith(left) and text.endswith(right) and inner and inner[-1] != "\\"
            if wrapped and not any(mark in inner.replace("\\$", "") for mark in (left, right)):
                text = inner
    return text


# Answers without any mark


_SPAN = r"""
    \$\$[^$]{1,600}\$\$
    | \$(?!\s)(?:[^$\n\\]|\\.){1,600}(?<!\s)\$(?![0-9])          # '$5 and $6' is no formula,
    | \$(?=\s+[^\s0-9$])(?:[^$\n\\]|\\.){1,600}\$(?![0-9])       # '$ x + 1$' is one,
    | \$(?=\s)(?:[^$\n\\]|\\.){1,600}(?<=\s)\$(?![0-9])          # and so is '$ 5 $'
    | \\\((?:[^\\]|\\(?![()])){1,600}\\\)
    | \\\[(?:[^\\]|\\(?![\[\]])){1,600}\\\]
"""
_COMMANDS = r"""
    (?:[-+0-9a-z(\[][ ]?){0,8}\\(?:[dtc]?frac|sqrt|d?binom|pi|log|ln|sin|cos|tan|infty)(?![A-Za-z])   # not in a formula
    (?:\\[A-Za-z]+ | [^A-Za-z\\\n$.,;] | [.,](?=[0-9]) | [A-Za-z](?![A-Za-z])){0,300}
"""
_PLAIN = r"(?:[-+0-9\s.,/^*\u2212\u221e\u03c0]|(?<![a-z])[a-z](?![a-z]))"
_FORMULA = re.compile(_SPAN, re.VERBOSE)
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_VALUE = re.compile(
    rf"""
    {_SPAN}
    | {_COMMANDS}
    | (?<![A-Za-z])[(\[](?=[^)\]]{{0,80}}[0-9]){_PLAIN}{{0,80}}?,{_PLAIN}{{1,80}}?[)\]]
    | (?<![A-Za-z0-9_{{^])(?<![0-9][.])
      (?:(?<![A-Za-z0-9_)\]}}])[-+\u2212])?(?:\\?\$|[€£])?(?:{_DIGITS})
      (?:[eE][-+]?[0-9]{{1,3}}(?![0-9]) | (?:\ [0-9]{{1,6}})?/[0-9]{{1,12}}(?![0-9]))?
      (?:\s?\\?%)?
    """,
    re.VERBOSE,
)
_BETWEEN_VALUES = re.compile(
    rf"[\s$(*]*(?:[,;&]|\b(?:and|{_HEDGE})\b)(?:[\s$(*]|\b(?:and|also|even|else|{_HEDGE})\b)*", re.IGNORECASE
)
_REFUSED_BEFORE = re.compile(
    r"(?:\b(?:not|never|neither|nor|cannot)|\w+n't)\s+(?:(?!but\b)\w+\s+){0,2}[$(\s]*$|(?:\\neq?|!=|\u2260)\s*[$(]*$",
    re.IGNORECASE,
)
_REFUSED_AFTER = re.compile(rf"[ \t$)*,]*(?:\?|\b(?:{_HEDGE})\b)", re.IGNORECASE)


def _last_value(said: str) -> Extraction | None:
    """The last number, pair or formula of a text, together with those that stand beside it as a list or as
    alternatives. One that is denied, questioned, or followed by 'or' is no answer."""
    values = deque(_VALUE.finditer(said), maxlen=MOST_CANDIDATES + 1)
    if not values:
        return None
    chain = [values.pop()]
    while values and _side_by_side(said, values[-1], chain[0]):
        chain.insert(0, values.pop())
    return _of_chain(said, chain, "the last value")


def _first_value(said: str) -> Extraction:
    """The value that a text begins with, together with those beside it."""
    values = itertools.islice(_VALUE.finditer(said), MOST_CANDIDATES + 1)
    chain = [next(values)]
    for value in values:
        if not _side_by_side(said, chain[-1], value):
            break
        chain.append(value)
    return _of_chain(said, chain, "the first value")


def _side_by_side(said: str, left: re.Match[str], right: re.Match[str]) -> bool:
    gap = said[left.end() : right.start()]
    return len(gap) <= _LONGEST_GAP and _BETWEEN_VALUES.fullmatch(gap) is not None


def _of_chain(said: str, chain: list[re.Match[str]], how: str) -> Extraction:
    before = said[max(0, chain[0].start() - _LONGEST_GAP) : chain[0].start()]
    if _REFUSED_BEFORE.search(before) or _REFUSED_AFTER.match(said, chain[-1].end()):
        return Extraction(None, f"{how}, {chain[-1][0][:40]!r}, is denied or in doubt")
    gaps = (said[left.end() : right.start()] for left, right in itertools.pairwise(chain))
    return _joined([_unwrapped(value[0]) for value in chain], any(map(_OFFERS.search, gaps)), how)


_FORMULA_WORDS = re.compile(
    r"\\(?:begin|end)\s*\{\w+\}|\\[A-Za-z]+\s*(?:\{[A-Za-z .,\-]{0,80}\})?"
    r"|\b(?:sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|pi|and|or|infinity)\b"
    r"|\b[A-Za-z]{1,3}(?=\s*=)|(?<=[0-9])[a-z]{1,3}(?![A-Za-z])",
    re.IGNORECASE,
)
_WORD = re.compile(r"[A-Za-z]{2,}")
_LONGEST_BARE = 300
_MOST_WORDS = 5


def _answers_alone(text: str) -> bool:
    """Whether a text is nothing but an answer: a value with what belongs to it (``8 apples``), or a few words."""
    if len(text) > _LONGEST_BARE or len(text.split()) > 60:
        return False
    bare = _FORMULA_WORDS.sub(" ", _FORMULA.sub(" 0 ", text))
    words = list(_WORD.finditer(bare))
    if not words:
        return True
    digits = [place for place, char in enumerate(bare) if char.isdigit()]
    if len(words) > _MOST_WORDS:
        return False
    return not digits or digits[-1] < words[0].start()


def _bare(said: str) -> Extraction | None:
    """All of a completion that says nothing but an answer."""
    text = said.strip()
    if not text:
        return Extraction(None, "the completion says nothing")
    one_line = "\n" not in text or "\\begin" in text
    return Extraction(_unwrapped(text), "all of the completion") if one_line and _answers_alone(text) else None


def _whole(said: str) -> Extraction | None:
    return Extraction(_unwrapped(said), "all of the completion") if said.strip() else None


_AFTER_HASHES = re.compile(r"(?<!\#)\#{4,}+[ \t]*+(?P<number>-?\$?-?[0-9][0-9,]*(?:\.[0-9]+|/[0-9]+)?|-?\$?\.[0-9]+)")


def _hashed(said: str) -> Extraction | None:
    """The number right after the last ``####``, as GSM8K's own grader reads it: nothing after it counts."""
    last = deque(_AFTER_HASHES.finditer(said), maxlen=1)
    if not last or "####" in said[last[0].end() :]:
        return None
    return Extraction(last[0]["number"].rstrip(","), "the number after the last '####'")


_FORMS: Mapping[str, Callable[[str], Extraction | None]] = {
    "boxed": _boxed,
    "tag": _tagged,
    "final_answer": _marked,
    "hash": _hashed,
    "last_number": _last_value,
    "whole": _whole,
}
_NOTHING = {
    "boxed": "the completion holds no complete box",
    "tag": "the completion holds no complete <answer> tag",
    "final_answer": "the completion holds no '####', 'A:' or 'the answer is'",
    "hash": "the completion holds no number after its last '####'",
    "last_number": "the completion holds no number",
    "whole": "the completion says nothing",
}
