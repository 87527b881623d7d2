"""Tokens to expressions, by recursive descent: a sum of terms, a term of factors, a factor of an atom and what follows
it. `grammar` reads the answers that are made of them.

Multiplication without a sign binds like one with it (1/2x is x/2), a function without brackets takes the factors up to
the next sign or function (\\sin 2x\\cos x), and an integer before a proper fraction makes a mixed number. Nothing is
evaluated here. What is not a formula raises `Unreadable`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

from nearpolicy.verifier.math import units
from nearpolicy.verifier.math.notation import FUNCTIONS, GREEK, Token, Unreadable
from nearpolicy.verifier.math.tree import Answer, Apply, Based, Constant, Expression, Number, Symbol

DEEPEST = 30
"""Levels of brackets, groups, roots and exponents."""
MOST_ITEMS = 100
_MOST_POSTFIXES = 4
_LONGEST_NUMBER = 1000
_LARGEST_EXPONENT = 1000
"""Of ten, in scientific notation."""
ONE = Number(Fraction(1))
UNKNOWN_FUNCTIONS = frozenset("fghFG")
"""Letters that are functions before a bracket; the others are factors."""
_ATOMS = FUNCTIONS | GREEK | {"pi", "infty", "frac", "binom", "lfloor", "lceil", "overline"}


class FormulaParser:
    """Reads formulas from a list of tokens; where it stands is state that `grammar` shares."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._place = 0
        self._depth = 0
        self._currency = ""
        """Unit that stood before a number of the sum being read."""

    # Tokens

    @property
    def _next(self) -> Token:
        return self._tokens[self._place]

    def _peek(self, ahead: int) -> Token:
        return self._tokens[min(self._place + ahead, len(self._tokens) - 1)]

    def _take(self) -> Token:
        token = self._tokens[self._place]
        if token.kind != "end":
            self._place += 1
        return token

    def _at(self, *texts: str) -> bool:
        token = self._next
        return token.text in texts and token.kind in ("mark", "command")

    def _skip(self, *texts: str) -> bool:
        if self._at(*texts):
            self._take()
            return True
        return False

    def _expect(self, *texts: str) -> Token:
        if not self._at(*texts):
            raise Unreadable(f"there is {self._next.text or 'nothing'!r} where {' or '.join(texts)} should be")
        return self._take()

    def _deeper(self, read: Callable[[], Expression | Answer]) -> Expression | Answer:
        self._depth += 1
        if self._depth > DEEPEST:
            raise Unreadable(f"it is nested more than {DEEPEST} levels deep")
        try:
            return read()
        finally:
            self._depth -= 1

    # Sums and products

    def _sum(self) -> Expression:
        terms = [self._signed(self._term)]
        while self._at("+", "-", "pm", "mp"):
            sign = self._take().text
            terms.append(with_sign(sign, self._term()))
            if len(terms) > 4 * MOST_ITEMS:
                raise Unreadable("it has too many terms")
        found = terms[0] if len(terms) == 1 else Apply("+", tuple(terms))
        if self._at("choose", "over"):  # {4 \choose 2}: each side reaches to the end of the group
            operation = {"choose": "binom", "over": "/"}[self._take().text]
            return Apply(operation, (found, self._deeper(self._sum)))
        return found

    def _signed(self, read: Callable[[], Expression]) -> Expression:
        """Signs before a term; there may be several, as in 3 + -4."""
        signs: list[str] = []
        while self._at("+", "-", "pm", "mp"):
            signs.append(self._take().text)
            if len(signs) > 2:
                raise Unreadable("it has too many signs")
        found = read()
        for sign in reversed(signs):
            found = with_sign(sign, found)
        return found

    def _term(self) -> Expression:
        factors = [self._factor()]
        while len(factors) <= 4 * MOST_ITEMS:
            if self._skip("*"):
                factors.append(self._signed(self._factor))
            elif self._at("/") and not self._unit_follows(1):
                self._take()
                factors.append(Apply("/", (ONE, self._signed(self._factor))))
            elif len(factors) == 1 and self._is_mixed(factors[0]):
                factors = [Apply("+", (factors[0], self._proper_fraction()))]
            elif self._factor_follows():
                factors.append(self._factor())
            else:
                return _product(factors)
        raise Unreadable("it has too many factors")

    def _unit_follows(self, ahead: int) -> bool:
        token = self._peek(ahead)
        return token.kind == "word" and (token.roman or token.text.lower() in units.MEASURES)

    def _factor_follows(self) -> bool:
        """Whether a product goes on without a sign. Two numbers side by side are none."""
        token = self._next
        if token.kind == "number":
            return self._tokens[self._place - 1].kind != "number" and not (
                token.spaced and self._tokens[self._place - 1].kind == "letter"
            )
        if token.kind in ("letter", "word"):
            return not self._is_unit(token)
        if token.kind == "command":
            return token.text in _ATOMS
        return token.text in ("(", "{", "[") and token.kind == "mark"

    def _is_unit(self, token: Token) -> bool:
        """Whether a word after a value is a unit or label, and not a product of symbols like ``xy``."""
        if token.roman:
            return token.text not in ("e", "i")
        if token.kind == "letter":
            return False
        lower = token.text.lower()
        if token.spaced:
            return lower in units.MEASURES or lower in ("sq", "cu") or _is_spoken(lower)
        return lower in units.PLAIN_SYMBOLS or len(lower) > 4

    def _is_mixed(self, found: Expression) -> bool:
        if not isinstance(found, Number) or found.value.denominator != 1:
            return False
        if self._tokens[self._place - 1].kind != "number" or "." in self._tokens[self._place - 1].text:
            return False
        if not self._at("frac") and self._next.kind != "number":
            return False
        place, tokens = self._place, self._tokens[:]
        try:
            return self._proper_fraction() is not None
        except Unreadable:
            return False
        finally:
            self._place, self._tokens = place, tokens

    def _proper_fraction(self) -> Expression:
        """``\\frac{1}{4}``, or ``1/4`` after a blank: an integer over a larger one."""
        if self._skip("frac"):
            above, below = self._argument(), self._argument()
        elif self._next.kind == "number" and self._next.spaced and self._peek(1).text == "/":
            above = self._number(self._take())
            self._take()
            below = self._number(self._take()) if self._next.kind == "number" else above
        else:
            raise Unreadable("no fraction")
        if not (_is_integer(above) and _is_integer(below) and above.value < below.value):
            raise Unreadable("no proper fraction")
        return Apply("/", (above, below))

    def _factor(self) -> Expression:
        found = self._atom()
        for _ in range(_MOST_POSTFIXES):
            if self._skip("!"):
                found = Apply("factorial", (found,))
            elif (self._at("^") and self._peek(1).text in ("circ", "{") and self._degrees()) or self._skip("circ"):
                found = Apply("degrees", (found,))
            elif self._skip("^"):
                return Apply("^", (found, self._exponent()))
            else:
                return found
        raise Unreadable("it has too many signs behind a number")

    def _degrees(self) -> bool:
        place = self._place
        self._expect("^")
        braced = self._skip("{")
        if self._skip("circ") and (not braced or self._skip("}")):
            return True
        self._place = place
        return False

    def _exponent(self) -> Expression:
        if self._at("{"):
            return self._argument()
        return self._deeper(lambda: self._signed(self._factor))

    # Atoms

    def _atom(self) -> Expression:
        token = self._take()
        if token.kind == "number":
            return self._subscripted(self._number(token), token.text)
        if token.kind == "letter":
            return self._letter(token)
        if token.kind == "word":
            return self._word_atom(token)
        if token.kind == "command" and token.text in _ATOMS:
            return self._command(token.text)
        if token.kind == "mark":
            if token.text in ("(", "[", "{"):
                found = self._deeper(self._sum)
                self._expect({"(": ")", "[": "]", "{": "}"}[token.text])
                return found
            if token.text == "|":
                found = self._deeper(self._sum)
                self._expect("|")
                return Apply("abs", (found,))
            if token.text in ("$", "€", "£", "¢", "¥", "₹") and not self._currency:
                self._currency = units.MEASURES[token.text]
                return self._atom()
        raise Unreadable(f"{token.text or 'its end'!r} is not what a formula goes on with")

    def _number(self, token: Token) -> Number:
        return Number(value_of(token.text))

    def _subscripted(self, number: Number, digits: str) -> Expression:
        """132_5 is a number in base 5."""
        if not self._at("_"):
            return number
        base = self._subscript()
        if not (base.isdecimal() and len(base) <= 2 and digits.isdecimal() and is_base(int(base), digits)):
            raise Unreadable("a number has a subscript that is not its base")
        return Based(digits.lstrip("0") or "0", int(base))

    def _subscript(self) -> str:
        self._expect("_")
        if not self._skip("{"):
            return self._take().text
        parts: list[str] = []
        while not self._skip("}"):
            token = self._take()
            if token.kind == "end" or len(parts) > 10:
                raise Unreadable("a subscript is too long")
            parts.append(token.text)
        return "".join(parts)

    def _letter(self, token: Token) -> Expression:
        if self._at("_"):
            return Symbol(f"{token.text}_{self._subscript()}")
        if token.text in ("e", "i"):
            return Constant(token.text)
        if token.text.rstrip("'") in UNKNOWN_FUNCTIONS and self._at("("):
            return Apply(token.text, self._arguments())
        return Symbol(token.text)

    def _word_atom(self, token: Token) -> Expression:
        """A product of symbols written together, ``xy``; longer words are none."""
        if token.roman or len(token.text) > 4 or not token.text.isalpha():
            raise Unreadable(f"the word {token.text!r} is no formula")
        letters = [Constant(char) if char in "ei" else Symbol(char) for char in token.text]
        if self._at("^"):  # xy^2 is x times y^2
            self._take()
            letters[-1] = Apply("^", (letters[-1], self._exponent()))
        return Apply("*", tuple(letters))

    def _arguments(self) -> tuple[Expression, ...]:
        self._expect("(")
        found = [self._deeper(self._sum)]
        while self._skip(","):
            found.append(self._deeper(self._sum))
        self._expect(")")
        return tuple(found)

    def _command(self, name: str) -> Expression:
        if name in ("pi", "infty"):
            return Constant(name)
        if name in GREEK:
            return Symbol(f"{name}_{self._subscript()}" if self._at("_") else name)
        if name == "frac":
            if self._at("("):
                above, below = self._two_arguments()
            else:
                above, below = self._argument(), self._argument()
            return Apply("/", (above, below))
        if name == "binom":
            return Apply("binom", self._two_arguments() if self._at("(") else (self._argument(), self._argument()))
        if name in ("lfloor", "lceil"):
            found = self._deeper(self._sum)
            self._expect("r" + name[1:])
            return Apply(name[1:], (found,))
        if name == "sqrt":
            return self._root()
        if name == "overline":
            return Apply("conjugate", (self._argument(),))
        return self._function(name)

    def _two_arguments(self) -> tuple[Expression, ...]:
        found = self._arguments()
        if len(found) != 2:
            raise Unreadable("two arguments should be there")
        return found

    def _root(self) -> Expression:
        degree: Expression | None = None
        if self._skip("["):
            degree = self._deeper(self._sum)
            self._expect("]")
        inner = self._deeper(self._atom) if not self._at("{") else self._argument()
        return Apply("sqrt", (inner,)) if degree is None else Apply("root", (inner, degree))

    def _function(self, name: str) -> Expression:
        """``\\sin^2 x``, ``\\log_2 8``, ``\\sin^{-1} x``."""
        base: Expression | None = None
        power: Expression | None = None
        if name == "log" and self._skip("_"):
            base = self._argument()
        if self._skip("^"):
            power = self._exponent()
        inner = self._deeper(self._function_argument)
        if name == "log" and base is not None:
            found: Expression = Apply("log_of_base", (inner, base))
        elif power == Apply("neg", (Number(Fraction(1)),)) and f"a{name}" in FUNCTIONS:
            found, power = Apply(f"a{name}", (inner,)), None
        else:
            found = Apply(name, (inner,))
        return found if power is None else Apply("^", (found, power))

    def _function_argument(self) -> Expression:
        if self._at("("):
            return self._factor_in_brackets()
        negative = self._skip("-")
        factors = [self._factor()]
        while self._factor_follows() and not (self._next.kind == "command" and self._next.text in FUNCTIONS - {"sqrt"}):
            factors.append(self._factor())
        found = _product(factors)
        return Apply("neg", (found,)) if negative else found

    def _factor_in_brackets(self) -> Expression:
        self._expect("(")
        found = self._deeper(self._sum)
        self._expect(")")
        return found

    def _argument(self) -> Expression:
        """What a command takes: a group, or else one token, of which a number gives its first digit only."""
        if self._skip("{"):
            found = self._deeper(self._sum)
            self._expect("}")
            return found
        token = self._next
        if token.kind == "number" and len(token.text) > 1 and token.text.isdigit():
            self._tokens[self._place] = replace(token, text=token.text[1:], spaced=False)
            return Number(Fraction(int(token.text[0])))
        if token.kind == "word" and not token.roman:
            rest = token.text[1:]
            kind = "letter" if len(rest) == 1 else "word"
            self._tokens[self._place] = replace(token, kind=kind, text=rest, spaced=False)
            return self._letter(replace(token, kind="letter", text=token.text[0]))
        return self._deeper(self._atom)


def value_of(number: str) -> Fraction:
    """The exact value of a number token: 1.25, 6.02e23, 0.1(6)."""
    mantissa, _, exponent = number.lower().partition("e")
    if len(mantissa) > _LONGEST_NUMBER or abs(int(exponent or 0)) > _LARGEST_EXPONENT:
        raise Unreadable("a number in it is too long")
    before, _, period = mantissa.rstrip(")").partition("(")
    value = Fraction(before)
    if period:
        places = len(before.partition(".")[2])
        value += Fraction(int(period), 10**places * (10 ** len(period) - 1))
    return value * Fraction(10) ** int(exponent or 0)


def _product(factors: list[Expression]) -> Expression:
    """One factor, a fraction, or a product of many: a chain is no deeper than a pair."""
    match factors:
        case [factor]:
            return factor
        case [above, Apply("/", (first, below))] if first is ONE:
            return Apply("/", (above, below))
    return Apply("*", tuple(factors))


def _is_spoken(word: str) -> bool:
    """Whether a word of a few letters may be spoken, as 'men' and unlike 'xyz'."""
    return len(word) > 3 or (len(word) == 3 and any(letter in "aeiou" for letter in word))


def is_base(base: int, digits: str) -> bool:
    """Whether digits, with A to Z beyond 9, can be a number in a base."""
    return 2 <= base <= 36 and all(int(digit, 36) < base for digit in digits)


def _is_integer(expression: Expression) -> bool:
    return isinstance(expression, Number) and expression.value.denominator == 1


def with_sign(sign: str, expression: Expression) -> Expression:
    if sign == "+":
        return expression
    return Apply({"-": "neg"}.get(sign, sign), (expression,))
