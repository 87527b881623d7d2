r"""Tokens to answers, by recursive descent: the shapes around the formulas of `formulas`.

    answer    several things joined by , ; and or
    thing     sides joined by = < > \leq \geq \neq \approx \in
    side      parts joined by \cup \cap \setminus
    part      set, interval, point, matrix, ratio, words, or a formula with its unit

\pm makes two answers of one. What is not in this grammar raises `Unreadable`.
"""

from __future__ import annotations

import re

from nearpolicy.verifier.math import units
from nearpolicy.verifier.math.formulas import MOST_ITEMS, FormulaParser, is_base, with_sign
from nearpolicy.verifier.math.notation import (
    FUNCTIONS,
    GREEK,
    LONGEST,
    MATRICES,
    Token,
    Unreadable,
    bare,
    names,
    tokens_of,
    without_fonts,
)
from nearpolicy.verifier.math.tree import (
    Answer,
    Apply,
    Based,
    Bracketed,
    Choice,
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

_RELATIONS = frozenset(("=", "<", ">", "leq", "geq", "neq", "approx", "in"))
_CLOSING = {"(": (")", "]"), "[": ("]", ")"), "langle": ("rangle",)}
_GREETINGS = names("either about approximately approx roughly exactly only just simply")
_CURRENCIES = frozenset(("usd", "eur", "gbp", "us", "rs"))
_NONE = ("none", "no solution", "no solutions", "no real solution", "no real solutions", "empty set", "the empty set")
_ALL = ("all real numbers", "all reals", "all real x", "real numbers", "the real numbers", "the set of real numbers")
_SENTENCE = re.compile(r"[A-Za-z][A-Za-z'.\-]*(?:[ ,]+[A-Za-z][A-Za-z'.\-]*)*")
_CHOICE = re.compile(r"\s*(?:\(([A-Z])\)|([A-Z])[).:])\s*(?![\s=])(.+)", re.DOTALL)
_ANOTHER_CHOICE = re.compile(r"(?:^|\s)(?:\([A-Z]\)|[A-Z][).:])")
_OPTION = re.compile(r"\s*(?:option|choice|Option|Choice)\s+\(?([A-Z])\)?\s*")
_IN_BASE = re.compile(r"^([0-9A-Z]+)\s*\(?\s*(?:in\s+)?base[\s-]+([0-9]{1,2})\s*\)?$")
_BASED = re.compile(r"\s*(-?)\s*(?![A-Z]+\s*_)([0-9A-Z]+)\s*_\s*\{?\s*([0-9]{1,2})\s*\}?\s*")


def read(text: str, *, commas_group: bool = True, may_choose: bool = True) -> Answer:
    """The tree of an answer; `Unreadable` if it is not in this notation.

    ``commas_group``: outside brackets, a comma before three digits groups thousands. ``may_choose``: a letter may stand
    before the answer, as in (B) 12.
    """
    if len(text) > LONGEST:
        raise Unreadable(f"it has {len(text)} characters, more than {LONGEST}")
    text = bare(text)
    plain = _IN_BASE.sub(r"\1_\2", without_fonts(text))
    if may_choose and (choice := _CHOICE.fullmatch(plain)):
        if _ANOTHER_CHOICE.search(choice[3]):
            raise Unreadable("it lists several choices")
        return Choice(choice[1] or choice[2], read(choice[3], may_choose=False))
    if option := _OPTION.fullmatch(plain):
        return Value(Symbol(option[1]))
    if words := _words_only(plain):
        return words
    if (based := _BASED.fullmatch(plain)) and is_base(int(based[3]), based[2]):
        number = Based(based[2].lstrip("0") or "0", int(based[3]))
        return Value(Apply("neg", (number,)) if based[1] else number)
    tokens = _stripped(tokens_of(text, commas_group=commas_group))
    return _Parser(tokens).answer()


def _words_only(text: str) -> Answer | None:
    """An answer in words; None if it is a formula, or may be one (``xy``, ``pi``)."""
    if not _SENTENCE.fullmatch(text):
        return None
    said = re.sub(r"^(?:the|an?)\s+", "", " ".join(text.lower().rstrip(".").split()))
    if said in _NONE:
        return Set(())
    if said in _ALL:
        return Reals()
    if re.search(r"\b(?:or|and)\b|,", said) or not re.search(r"[A-Za-z]{2}", text):
        return None
    if (
        len(text) <= 2
        or re.fullmatch(r"[w-z]+", text)
        or said in ("infinity", "exp", "log")
        or text in GREEK
        or text in FUNCTIONS
        or text == "pi"
    ):
        return None
    return Text({"dne": "does not exist"}.get(said, said))


def _stripped(tokens: list[Token]) -> list[Token]:
    """Without brackets and braces around all of it, however many."""
    partner: dict[int, int] = {}
    opened: list[int] = []
    for place, token in enumerate(tokens):
        if token.text in ("(", "{"):
            opened.append(place)
        elif token.text in (")", "}") and opened:
            if tokens[opened[-1]].text != {")": "(", "}": "{"}[token.text]:
                break
            partner[opened.pop()] = place
    first, last = 0, len(tokens) - 2
    while first + 2 < last and partner.get(first + 1) == last - 1 and partner.get(first) == last:
        first, last = first + 1, last - 1
    return tokens[first : last + 1] + tokens[-1:]


class _Parser(FormulaParser):
    """Reads a whole answer."""

    # Several things

    def answer(self) -> Answer:
        if self._next.kind == "end":
            raise Unreadable("there is nothing in it")
        found = self._several("end")
        if self._next.kind != "end":
            raise Unreadable(f"{self._next.text!r} does not fit in")
        return found

    def _several(self, *closing: str) -> Answer:
        """One thing or several; those of \\pm count singly."""
        items, offered = self._items(closing)
        return items[0] if len(items) == 1 else Several(tuple(items), offered)

    def _items(self, closing: tuple[str, ...]) -> tuple[list[Answer], bool]:
        items: list[Answer] = []
        offered = False
        while True:
            while self._next.kind == "word" and self._next.text.lower() in _GREETINGS:
                self._take()
            items += _both_signs(self._thing())
            if len(items) > MOST_ITEMS:
                raise Unreadable(f"it has more than {MOST_ITEMS} parts")
            joined = False
            while self._at(",", ";", "and", "or"):
                offered = offered or self._at("or")
                self._take()
                joined = True
            if not joined:
                return items, offered
            if self._next.kind == "end" or self._at(*closing):
                raise Unreadable("it ends with a comma")

    def _thing(self) -> Answer:
        """A side, or a chain of sides."""
        self._skip("approx")
        sides = [self._side()]
        operators: list[str] = []
        while self._at(*_RELATIONS):
            operators.append(self._take().text)
            sides.append(self._side())
        return Relation(tuple(sides), tuple(operators)) if operators else sides[0]

    def _side(self) -> Answer:
        parts = [self._part()]
        operation = ""
        while self._at("cup", "cap", "setminus"):
            if operation and not self._at(operation):
                raise Unreadable("it mixes set operations")
            operation = self._take().text
            parts.append(self._part())
        return Region(operation, tuple(parts)) if operation else parts[0]

    # Parts

    def _part(self) -> Answer:
        token = self._next
        if token.kind == "command":
            if token.text == "emptyset":
                self._take()
                return Set(())
            if token.text == "mathbb R":
                self._take()
                return Reals()
            if token.text.startswith("begin "):
                return self._matrix()
        if self._at("(", "[") and self._peek(1).text.startswith("begin "):
            closing = {"(": ")", "[": "]"}[self._take().text]
            found = self._matrix()
            self._expect(closing)
            return found
        if self._at("\\{"):
            return self._set("\\{", "\\}")
        if self._at("{") and self._closes_after_comma():
            return self._set("{", "}")
        if token.kind == "letter" and token.text.isupper() and self._peek(1).text == "(" and self._is_bracketed(1):
            self._take()  # the name of a point: P(2, 5)
        if self._at("(", "[", "langle") and self._is_bracketed():
            return self._bracketed()
        if token.kind == "word" and (found := self._words()):
            return found
        return self._quantity()

    def _closes_after_comma(self) -> bool:
        """Whether the brace at hand holds a comma at its own level."""
        depth = 0
        for token in self._tokens[self._place :]:
            depth += {"{": 1, "(": 1, "[": 1, "\\{": 1, "}": -1, ")": -1, "]": -1, "\\}": -1}.get(token.text, 0)
            if depth == 0:
                return False
            if depth == 1 and token.text == ",":
                return True
        return False

    def _is_bracketed(self, ahead: int = 0) -> bool:
        """Whether the bracket at hand, or so far ahead, is a point or an interval, and not a factor of a product."""
        depth = 0
        comma = False
        for place in range(self._place + ahead, len(self._tokens)):
            text = self._tokens[place].text
            if text in ("(", "[", "\\{", "langle", "{"):
                depth += 1
            elif text in (")", "]", "\\}", "rangle", "}"):
                depth -= 1
                if depth == 0:
                    return comma
            comma = comma or (depth == 1 and text in (",", ";"))
        return False

    def _set(self, left: str, right: str) -> Answer:
        self._expect(left)
        if self._skip(right):
            return Set(())
        if self._next.kind == "letter" and self._peek(1).text in ("|", ":"):  # set-builder: {x | x > 2}
            self._take()
            found: Answer = Set(())
        else:
            found = self._deeper(lambda: self._several(right))
        if self._skip("|", ":"):
            found = self._deeper(self._thing)
        self._expect(right)
        if isinstance(found, Relation):
            return found
        return Set(found.items if isinstance(found, Several) else (found,))

    def _bracketed(self) -> Answer:
        left = self._take().text
        items, _ = self._deeper(lambda: self._items(_CLOSING[left]))
        right = self._expect(*_CLOSING[left]).text
        if left == "langle":
            left, right = "(", ")"
        return Bracketed(left, tuple(items), right)

    def _matrix(self) -> Answer:
        kind = self._take().text.removeprefix("begin ")
        if kind not in MATRICES:
            raise Unreadable(f"the environment {kind!r} is not read here")
        if kind == "array":
            while not self._skip("}"):
                if self._take().kind == "end":
                    raise Unreadable("the columns of an array are missing")
        rows: list[tuple[Answer, ...]] = []
        while not self._skip(f"end {kind}"):
            row = [self._deeper(self._thing)]
            while self._skip("&"):
                row.append(self._deeper(self._thing))
            rows.append(tuple(row))
            if len(rows) * len(row) > MOST_ITEMS:
                raise Unreadable(f"it has more than {MOST_ITEMS} parts")
            if not self._skip("\\\\") and not self._at(f"end {kind}"):
                raise Unreadable(f"{self._next.text!r} does not fit into a matrix")
        if not rows or len(set(map(len, rows))) != 1:
            raise Unreadable("the rows of a matrix have different lengths")
        return Matrix(tuple(rows))

    def _words(self) -> Answer | None:
        """Words up to the next sign of a list or relation; None if a formula goes on behind them."""
        place = self._place
        said: list[str] = []
        while self._next.kind in ("word", "letter"):
            said.append(self._take().text)
        joins = (",", ";", "and", "or", "=", "approx", ")", "]", "\\}", "}", "&", "\\\\", ":")
        plain_product = len(said) == 1 and len(said[0]) <= 3 and not self._tokens[place].roman
        if (self._next.kind == "end" or self._at(*joins)) and not plain_product:
            if self._at(":", "=", "approx") and units.unit_of(said) is None:  # "not x = 5"
                raise Unreadable(f"{' '.join(said)!r} is no name for a value")
            if self._skip(":") and self._next.kind != "end":
                return self._deeper(self._thing)  # a label before a value: "Total: 5"
            return Text(" ".join(said).lower())
        self._place = place
        return None

    # Values

    def _quantity(self) -> Answer:
        """A sum with its unit, or a ratio of sums."""
        self._currency = ""
        if self._next.kind == "word" and self._next.text.lower() in _CURRENCIES:
            self._currency = units.MEASURES.get(self._take().text.lower(), "dollar")
        expression = self._sum()
        if self._at(":"):
            return self._ratio(expression)
        if self._next.text.startswith("begin "):
            rows = self._matrix().rows
            return Matrix(tuple(tuple(_times(expression, entry) for entry in row) for row in rows))
        expression, unit = self._with_unit(expression)
        return Value(expression, unit)

    def _ratio(self, first: Expression) -> Answer:
        terms = [Value(first)]
        while self._skip(":"):
            terms.append(Value(self._sum()))
        _, unit = self._with_unit(first)
        return Ratio(tuple(terms), unit)

    def _with_unit(self, expression: Expression) -> tuple[Expression, str]:
        unit = self._currency
        if isinstance(expression, Apply) and expression.operation == "degrees":
            expression, unit = expression.arguments[0], "degree"
        elif isinstance(expression, Apply) and expression.operation == "neg":
            inner = expression.arguments[0]
            if isinstance(inner, Apply) and inner.operation == "degrees":
                expression, unit = Apply("neg", inner.arguments), "degree"
        if self._skip("%"):
            unit = "%"
        words: list[str] = []
        while self._next.kind in ("word", "letter") or (words and self._at("/", "^")):
            words.append(self._unit_word())
        while words and words[0].lower() in units.MULTIPLES:
            expression = Apply("*", (expression, Number(units.MULTIPLES[words.pop(0).lower()])))
        if words:
            found = units.unit_of(words)
            if found is None:
                raise Unreadable(f"{' '.join(words)!r} is neither a formula nor a unit")
            unit = f"{unit} {found}" if unit == "degree" else found
        return expression, unit

    def _unit_word(self) -> str:
        if self._skip("^"):
            braced = self._skip("{")
            power = ("-" if self._skip("-") else "") + self._take().text
            if braced:
                self._expect("}")
            return "^" + power
        return self._take().text


def _times(factor: Expression, entry: Answer) -> Answer:
    if not isinstance(entry, Value):
        raise Unreadable("an entry of a matrix is no value")
    return Value(Apply("*", (factor, entry.expression)), entry.unit)


def _both_signs(answer: Answer) -> list[Answer]:
    """An answer with \\pm as the two that it stands for; \\mp has the other sign in each."""
    if not _has(answer, "pm", "mp"):
        return [answer]
    return [_resolved(answer, upper="+"), _resolved(answer, upper="-")]


def _has(node: Answer | Expression, *operations: str) -> bool:
    match node:
        case Apply(operation, arguments):
            return operation in operations or any(_has(each, *operations) for each in arguments)
        case Value(expression):
            return _has(expression, *operations)
        case Relation(sides):
            return any(_has(side, *operations) for side in sides)
        case Bracketed(_, items):
            return any(_has(item, *operations) for item in items)
    return False


def _resolved(node: Answer | Expression, *, upper: str) -> Answer | Expression:
    match node:
        case Apply(("pm" | "mp") as operation, (inner,)):
            plus = (operation == "pm") == (upper == "+")
            return with_sign("+" if plus else "-", _resolved(inner, upper=upper))
        case Apply(operation, arguments):
            return Apply(operation, tuple(_resolved(each, upper=upper) for each in arguments))
        case Value(expression, unit):
            return Value(_resolved(expression, upper=upper), unit)
        case Relation(sides, operators):
            return Relation(tuple(_resolved(side, upper=upper) for side in sides), operators)
    return node
