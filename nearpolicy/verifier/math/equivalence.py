r"""Whether an answer says what the right answer says: one rule for each pair of shapes.

    letters alike, or trees alike:  value = value    set = set    interval = inequality    x=6 = 6    (B) = B ...

`compare` decides what both texts say in the notation of `grammar`, and returns None for what only math-verify may be
able to read. The right answer sets the measure: an answer may leave out its unit, percent sign, base or ``x=``, and may
add a unit or ``x=`` of its own, but it may not offer a choice that the right answer does not offer.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from nearpolicy.verifier.math import evaluation, units
from nearpolicy.verifier.math.evaluation import TooLarge
from nearpolicy.verifier.math.formulas import ONE, UNKNOWN_FUNCTIONS
from nearpolicy.verifier.math.grammar import read
from nearpolicy.verifier.math.notation import LONGEST, Unreadable, bare, unknown_commands, without_fonts
from nearpolicy.verifier.math.regions import as_region, same_region
from nearpolicy.verifier.math.tree import (
    Answer,
    Apply,
    Based,
    Bracketed,
    Choice,
    Constant,
    Expression,
    Matrix,
    Number,
    Ratio,
    Reals,
    Region,
    Relation,
    Set,
    Several,
    Symbol,
    Text,
    Value,
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Whether two answers are equal, and the rule that says so."""

    equal: bool
    rule: str


def compare(gold: str, answer: str, *, tolerance: float = 0.0) -> Comparison | None:
    """What the notation read here says about two answers; None where it cannot read one of them."""
    letters = _letters(gold), _letters(answer)
    if letters[0] == letters[1] != "":
        return Comparison(True, "written alike")
    if not answer.strip():
        return Comparison(False, "the answer is empty")
    try:
        golds = _readings(gold)
    except Unreadable as error:
        if _is_formula(gold):
            return None
        return Comparison(_same_but_for_case(*letters), f"the right answer is compared letter by letter: {error}")
    try:
        answers = _readings(answer)
    except Unreadable as error:
        if needs_library(answer):
            return None
        return Comparison(_same_but_for_case(*letters), f"the answer is compared letter by letter: {error}")
    try:
        equal = any(same(one, other, tolerance=tolerance) for one in golds for other in answers)
    except TooLarge as error:
        if any(map(_is_too_large, golds)):
            return None
        return Comparison(False, f"time_limit: the answer would take too long to compute, {error}")
    return Comparison(equal, _rule(golds[0], answers[0]))


def same(gold: Answer, answer: Answer, *, tolerance: float = 0.0) -> bool:
    """Whether two trees say the same. May raise `TooLarge`."""
    return _Rules(tolerance).same(gold, answer)


def can_read(gold: str) -> bool:
    """Whether a right answer can be compared without math-verify: it is in this notation and not too large to
    compute, or it is no formula at all."""
    try:
        return not any(map(_is_too_large, _readings(gold)))
    except Unreadable:
        return not is_empty(gold) and not _is_formula(gold)


def is_empty(text: str) -> bool:
    return not _letters(text)


def _is_formula(text: str) -> bool:
    """Whether a text that cannot be read is a formula; if not, its letters are all that it says."""
    return re.search(r"[\\{}^_=]", without_fonts(bare(text[:LONGEST]))) is not None


_COMMANDS = re.compile(r"\\(?:begin|end|text|mathrm|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+")
_HEDGES = re.compile(r"\b(?:or|and|not|either|maybe)\b", re.IGNORECASE)


def looks_like_formula(text: str) -> bool:
    """Whether math-verify may be asked about a text: it is short, complete and without words."""
    if len(text) > LONGEST or text.count("{") != text.count("}") or _HEDGES.search(text):
        return False
    rest = _COMMANDS.sub(" ", text)
    return not re.search(r"[A-Za-z]{4}", rest) and re.search(r"[A-Za-z0-9\\]", text) is not None


_BLANKS = re.compile(r"(?<![A-Za-z0-9])\s+|\s+(?![A-Za-z0-9])")


def needs_library(text: str) -> bool:
    """Whether a text that cannot be read here is worth a question to math-verify."""
    return looks_like_formula(text) and unknown_commands(text)


def _letters(text: str) -> str:
    """The text without what only sets it: fonts, formula signs, and blanks that part no words or numbers."""
    text = without_fonts(bare(text)) if len(text) <= LONGEST else text
    return _BLANKS.sub("", text.strip())


def _same_but_for_case(gold: str, answer: str) -> bool:
    """Words may be written with other capitals; symbols may not."""
    return gold.casefold() == answer.casefold() and re.search(r"[A-Za-z]{3}", gold) is not None


def _readings(text: str) -> list[Answer]:
    """What a text may say. There are two ways to read 100,200: as a number, and as two."""
    readings = [read(text)]
    if re.search(r"[0-9],[0-9]{3}", text):
        with contextlib.suppress(Unreadable):
            readings.append(read(text, commas_group=False))
    return readings


def _rule(gold: Answer, answer: Answer) -> str:
    match gold, answer:
        case Value(first, unit), Value(second, other):
            if "%" in (unit, other):
                return "percentages"
            if _based(first) or _based(second):
                return "digits in a base"
            if not units.agree(unit, other):
                return "units"
            if _single_letter(gold) and _single_letter(answer):
                return "letters"
            exactly = evaluation.exact(first) is not None and evaluation.exact(second) is not None
            return "exact numbers" if exactly else f"values to {evaluation.DIGITS} digits"
    kinds = {type(gold).__name__.lower(), type(answer).__name__.lower()}
    return " and ".join(sorted(kinds))


def _is_too_large(node: Answer | Expression) -> bool:
    try:
        for expression in _expressions(node):
            evaluation.equal(expression, expression)
    except TooLarge:
        return True
    return False


def _expressions(node: Any) -> list[Expression]:
    if isinstance(node, Value):
        return [node.expression]
    if isinstance(node, tuple):
        return [found for each in node for found in _expressions(each)]
    parts = (getattr(node, name, ()) for name in ("items", "sides", "parts", "rows", "terms", "content"))
    return [found for part in parts for found in _expressions(part)]


class _Rules:
    """The rules, with the tolerance they go by."""

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance

    def same(self, gold: Answer, answer: Answer) -> bool:
        match gold, answer:
            case (Choice(), _) | (_, Choice()):
                return self._same_choice(gold, answer)
            case Value(), Value():
                return self._same_value(gold, answer)
            case Text(one), Text(other):
                return _words(one) == _words(other)
            case Matrix(rows), Matrix(others):
                return self._each(sum(rows, ()), sum(others, ())) and len(rows) == len(others)
            case (Ratio(), _) | (_, Ratio()):
                return self._same_ratio(gold, answer)
            case Bracketed(), Bracketed():
                same_brackets = (gold.left, gold.right) == (answer.left, answer.right)
                return same_brackets and self._each(gold.items, answer.items)
            case Bracketed("(", items, ")"), Several(others, False) if not _inequalities(others):
                return self._each(items, others)
            case Several(items, False), Bracketed("(", others, ")") if not _inequalities(items):
                return self._each(items, others)
            case Set(items), (Set(others) | Several(others)):
                return self._same_set(items, others)
            case Several(items), Set(others):
                return self._same_set(items, others)
            case Several(items), Several(others):
                return self._same_list(items, others) or self._same_region(gold, answer)
            case Set((item,)), Value():
                return self.same(item, answer)
            case Value(), Set((item,)):
                return self.same(gold, item)
        return self._same_relation(gold, answer)

    def _same_relation(self, gold: Answer, answer: Answer) -> bool:
        """What involves equations, inequalities, or a region on one side."""
        if isinstance(gold, Relation) and isinstance(answer, Relation):
            return self._same_relations(gold, answer)
        if isinstance(answer, Relation) and (sides := self._stands_for(answer)):
            return any(self.same(gold, side) for side in sides)
        if isinstance(gold, Relation) and (sides := self._stands_for(gold)):
            return any(self.same(side, answer) for side in sides)
        if isinstance(answer, Several) and answer.offered and not isinstance(gold, Region | Bracketed | Relation):
            return all(self.same(gold, item) for item in answer.items)
        return self._same_region(gold, answer)

    # Collections

    def _each(self, golds: Sequence[Answer], answers: Sequence[Answer]) -> bool:
        return len(golds) == len(answers) and all(map(self.same, golds, answers))

    def _same_list(self, golds: Sequence[Answer], answers: Sequence[Answer]) -> bool:
        """The same things as often, in any order."""
        left = list(answers)
        if len(golds) != len(left):
            return False
        for gold in golds:
            found = next((place for place, answer in enumerate(left) if self.same(gold, answer)), None)
            if found is None:
                return False
            del left[found]
        return True

    def _same_set(self, golds: Sequence[Answer], answers: Sequence[Answer]) -> bool:
        covered = all(any(self.same(gold, answer) for answer in answers) for gold in golds)
        return covered and all(any(self.same(gold, answer) for gold in golds) for answer in answers)

    def _same_region(self, gold: Answer, answer: Answer) -> bool:
        if isinstance(gold, Region) and isinstance(answer, Region) and gold.operation == answer.operation:
            alike = self._each if gold.operation == "setminus" else self._same_list
            if alike(gold.parts, answer.parts):
                return True
        if not any(isinstance(each, Region | Relation | Reals | Several) for each in (gold, answer)):
            return False
        one, other = as_region(gold), as_region(answer)
        return one is not None and other is not None and same_region(one, other)

    # Choices and ratios

    def _same_choice(self, gold: Answer, answer: Answer) -> bool:
        """A letter and what it stands for: either will do, unless both are given and one is wrong."""
        if isinstance(gold, Choice) and isinstance(answer, Choice):
            return gold.letter == answer.letter and self.same(gold.content, answer.content)
        choice, other = (gold, answer) if isinstance(gold, Choice) else (answer, gold)
        letter = _single_letter(other)
        if letter is not None:
            return letter.upper() == choice.letter
        return self.same(gold.content, answer) if choice is gold else self.same(gold, answer.content)

    def _same_ratio(self, gold: Answer, answer: Answer) -> bool:
        """3:5 is 6:10 and 3/5; with three terms, or a unit like p.m., each term counts."""
        match gold, answer:
            case Ratio(terms, unit), Ratio(others, other_unit):
                if not units.agree(unit, other_unit) or len(terms) != len(others):
                    return False
                if self._each(terms, others):
                    return True
                proportion = len(terms) == 2 and not (unit or other_unit)
                return proportion and self._same_value(_quotient(gold), _quotient(answer))
            case (Ratio((_, _)), Value()) | (Value(), Ratio((_, _))):
                values = (_quotient(each) if isinstance(each, Ratio) else each for each in (gold, answer))
                return self._same_value(*values)
            case Ratio(), Relation():
                return any(self.same(gold, side) for side in self._stands_for(answer) or ())
        return False

    # Values

    def _same_value(self, gold: Value, answer: Value) -> bool:
        if "%" in (gold.unit, answer.unit):
            return self._same_percentage(gold, answer)
        letter = _single_letter(gold)
        if letter is not None and "A" <= letter <= "J" and letter == (_single_letter(answer) or "").upper():
            return True
        if _based(gold.expression) or _based(answer.expression):
            return _same_digits(gold, answer)
        if units.agree(gold.unit, answer.unit) and self._equal(gold.expression, answer.expression):
            return True
        return self._same_with_unit_letters(gold, answer)

    def _same_with_unit_letters(self, gold: Value, answer: Value) -> bool:
        """``8 m`` may be a product. It is eight metres beside an 8, and beside 8 metres."""
        read_gold, read_answer = _unit_letters(gold), _unit_letters(answer)
        if read_answer and not evaluation.symbols_of(gold.expression):
            return units.agree(gold.unit, read_answer.unit) and self._equal(gold.expression, read_answer.expression)
        if read_gold and answer.unit:
            return read_gold.unit == answer.unit and self._equal(read_gold.expression, answer.expression)
        return False

    def _equal(self, gold: Expression, answer: Expression) -> bool:
        signs = evaluation.infinity_of(gold), evaluation.infinity_of(answer)
        if any(signs):
            return signs[0] == signs[1]
        return evaluation.equal(gold, answer, tolerance=self._tolerance)

    def _same_percentage(self, gold: Value, answer: Value) -> bool:
        """15 % is 0.15. Beside a right answer with the sign, a bare 15 is 15 %; beside one without it, 15 % is also 15,
        from 1 % on: 0.5 % is never 0.5."""
        if gold.unit == answer.unit:
            return self._equal(gold.expression, answer.expression)
        signed, plain = (gold, answer) if gold.unit == "%" else (answer, gold)
        if units.is_measure(plain.unit):
            return False
        value = Apply("/", (signed.expression, Number(Fraction(100))))
        pair = (value, plain.expression) if signed is gold else (plain.expression, value)
        if self._equal(*pair):
            return True
        number = evaluation.real_value(signed.expression)
        optional = signed is gold or (number is not None and abs(number) >= 1)
        return optional and self._equal(gold.expression, answer.expression)

    # Equations

    def _stands_for(self, relation: Relation) -> tuple[Answer, ...]:
        """What ``x = 6``, ``6 = x``, ``2 + 4 = 6`` and ``x = 2/3 \\approx 0.67`` stand for; nothing if sides differ."""
        if not set(relation.operators) <= {"=", "approx"}:
            return ()
        sides = list(relation.sides)
        operators = list(relation.operators)
        while len(sides) > 1 and _is_name(sides[0]):
            del sides[0], operators[0]
        if len(sides) == 2 and _is_name(sides[1]) and operators == ["="]:
            del sides[1], operators[0]
        for operator, left, right in zip(operators, sides, sides[1:], strict=False):
            if not (self.same(left, right) if operator == "=" else _rounds_to(left, right)):
                return ()
        return tuple(sides)

    def _same_relations(self, gold: Relation, answer: Relation) -> bool:
        golds, answers = self._stands_for(gold), self._stands_for(answer)
        if golds and answers and _may_be_one_name(gold.sides[0], answer.sides[0]):
            return any(self.same(one, other) for one in golds for other in answers)
        solved = golds and all(not evaluation.symbols_of(each) for side in golds for each in _expressions(side))
        if solved:  # x=6 is not answered by 2x=12
            return False
        return self._same_equation(gold, answer) or self._same_region(gold, answer)

    def _same_equation(self, gold: Relation, answer: Relation) -> bool:
        """Equal but for a factor, which must be positive in an inequality."""
        one, other = _difference(gold), _difference(answer)
        if one is None or other is None or one[0] != other[0]:
            return False
        factor = evaluation.ratio(one[1], other[1])
        return factor is not None and (factor > 0 or one[0] in ("=", "neq"))


# Shapes


def _inequalities(items: Sequence[Answer]) -> bool:
    return any(isinstance(item, Relation) and "=" not in item.operators for item in items)


def _words(text: str) -> str:
    return " ".join(re.sub(r"[^a-z0-9]+", " ", text).split())


def _single_letter(answer: Answer) -> str | None:
    match answer:
        case Value(Symbol(name) | Constant(name)) if len(name) == 1:
            return name
    return None


def _quotient(ratio: Ratio) -> Value:
    return Value(Apply("/", tuple(term.expression for term in ratio.terms)))


def _based(expression: Expression) -> Based | None:
    match expression:
        case Based() as number:
            return number
        case Apply("neg", (Based() as number,)):
            return number
    return None


def _same_digits(gold: Value, answer: Value) -> bool:
    """Digits and base must be those of the right answer; the base may be left out, and base 10 may be added."""
    one, other = _based(gold.expression), _based(answer.expression)
    if (gold.expression == one) != (answer.expression == other) and one and other:
        return False
    if one and other:
        return one == other
    number = evaluation.exact(answer.expression if one else gold.expression)
    if one:
        written = str(abs(number)) if number is not None else ""
        return one.digits == written and (number < 0) == (gold.expression != one)
    return other.base == 10 and number == evaluation.exact(answer.expression)


def _unit_letters(value: Value) -> Value | None:
    """A number times one-letter units, as a number with a unit."""
    match value.expression:
        case Apply("*", factors):
            pass
        case Apply("/", (Apply("*", factors), below)):
            factors = (*factors, Apply("/", (ONE, below)))
        case _:
            return None
    numbers = [factor for factor in factors if not evaluation.symbols_of(factor)]
    names = [_unit_name(factor) for factor in factors[len(numbers) :]]
    if value.unit or not numbers or not names or None in names or names[0].startswith("/"):
        return None
    unit = units.unit_of([part for name in names for part in name.split()])
    return Value(Apply("*", tuple(numbers)), unit) if unit else None


def _unit_name(factor: Expression) -> str | None:
    """A factor that may be a unit, in signs that `units.unit_of` reads: m, s ^2, / s ^2."""
    match factor:
        case Symbol(name) if name in units.SINGLE_LETTERS:
            return name
        case Apply("^", (Symbol(name), Number(power))) if name in units.SINGLE_LETTERS:
            return f"{name} ^{power}"
        case Apply("/", (Number(), below)) if (name := _unit_name(below)) is not None:
            return f"/ {name}"
    return None


def _is_name(answer: Answer) -> bool:
    """Whether something may stand before an equals sign to be given a value: x, f(x), AB, (x, y), area."""
    match answer:
        case Text():
            return True
        case Value(Symbol()):
            return True
        case Value(Apply(name)) if name in UNKNOWN_FUNCTIONS:
            return True
        case Value(Apply("*", factors)):
            return len(factors) <= 3 and all(isinstance(each, Symbol) and each.name.isupper() for each in factors)
        case Bracketed(_, items):
            return all(map(_is_name, items))
    return False


def _rounds_to(exactly: Answer, roughly: Answer) -> bool:
    """Whether a decimal is another number cut or rounded at its last digit. 2/3 \\approx 0.67 is one answer, and
    100 \\approx 101 would be two."""
    if not (isinstance(exactly, Value) and isinstance(roughly, Value) and units.agree(exactly.unit, roughly.unit)):
        return False
    rounded, number = evaluation.exact(roughly.expression), evaluation.real_value(exactly.expression)
    if rounded is None or number is None:
        return False
    places = next((n for n in range(30) if (rounded * 10**n).denominator == 1), None)
    if places is None:
        return False
    error = abs(number * 10**places - int(rounded * 10**places))
    return error < 1 if places else error <= 0.5


def _may_be_one_name(gold: Answer, answer: Answer) -> bool:
    if not (_is_name(gold) and _is_name(answer)):
        return True
    return gold == answer or isinstance(gold, Text) or isinstance(answer, Text)


_FLIPPED = {">": "<", "geq": "leq"}


def _difference(relation: Relation) -> tuple[str, Expression] | None:
    """A relation of two sides as one that compares a difference with 0."""
    match relation:
        case Relation((Value(left), Value(right)), (operator,)):
            if operator in _FLIPPED:
                left, right = right, left
            minus = Apply("neg", (right,))
            return _FLIPPED.get(operator, operator), Apply("+", (left, minus))
    return None
