"""What an expression is worth: exactly if it is rational, and otherwise to so many digits that no accident is left.

Two expressions are equal if they agree at every sample point to `DIGITS` digits. Precision grows with the magnitudes
that occur on the way, so that cancellation leaves as many. Sample points depend on the names of the symbols alone: a
verdict is the same every time. Nothing here simplifies, and what would take long to compute is refused before it is
begun (`TooLarge`), so the time is bounded by the length of the answer.
"""

from __future__ import annotations

import functools
import math
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from nearpolicy.verifier.math.tree import Apply, Based, Constant, Expression, Number, Symbol

DIGITS = 40
"""Digits in which equal values agree."""
NUM_POINTS = 6
LARGEST_BITS = 50_000
"""Of an exact number: 2^{4950} is computed, 9^{9^9} is not."""
LARGEST_DIGITS = 2000
"""Before the decimal point of a number that is not exact."""
MOST_WORK = 30_000
"""Functions times digits at one sample point."""
_LARGEST_FACTORIAL = 3000
_LARGEST_BINOMIAL = 10_000
_LOG = "the base of log"
"""``\\log`` without a base stands for any base: 2\\log 3 is \\log 9, and \\log 100 is 2 in one base only."""


class TooLarge(Exception):
    """A number in an expression is too large to compute; the message says which kind."""


class Undefined(Exception):
    """An expression has no value, as 1/0."""


# Exact values


def exact(expression: Expression) -> Fraction | None:
    """The value of a rational expression; None if it is not rational or not known to be. May raise `TooLarge`."""
    try:
        return _exact(expression)
    except (ZeroDivisionError, Undefined):
        return None


def _exact(expression: Expression) -> Fraction | None:
    match expression:
        case Number(value):
            return value
        case Based(digits, base):
            return Fraction(int(digits, base))
        case Apply(operation, arguments):
            rule = _EXACT.get(operation)
            if rule is None:
                return None
            values = [_exact(argument) for argument in arguments]
            if any(value is None for value in values):
                return None
            return _bounded(rule(*values))
    return None


def _bounded(value: Fraction | None) -> Fraction | None:
    if value is not None and _bits(value) > LARGEST_BITS:
        raise TooLarge("a number in it has too many digits")
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1:
        return None
    if base in (1, -1):
        return base ** int(exponent % 2)
    if (_bits(base) - 1) * abs(exponent) > LARGEST_BITS:
        raise TooLarge("a power in it has too many digits")
    return base ** int(exponent)


def _exact_root(value: Fraction, degree: Fraction = Fraction(2)) -> Fraction | None:
    """A root that is rational."""
    if degree != 2 or value < 0:
        return None
    root = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
    return root if root * root == value else None


def _exact_factorial(value: Fraction) -> Fraction | None:
    if value.denominator != 1 or value < 0:
        return None
    if value > _LARGEST_FACTORIAL:
        raise TooLarge("a factorial in it has too many digits")
    return Fraction(math.factorial(int(value)))


def _exact_binomial(above: Fraction, below: Fraction) -> Fraction | None:
    if above.denominator != 1 or below.denominator != 1 or above < 0 or below < 0:
        return None
    if above > _LARGEST_BINOMIAL:
        raise TooLarge("a binomial coefficient in it has too many digits")
    return Fraction(math.comb(int(above), int(below)))


_EXACT: Mapping[str, Callable[..., Fraction | None]] = {
    "+": lambda *terms: sum(terms, Fraction(0)),
    "*": lambda *factors: functools.reduce(lambda a, b: _bounded(a * b), factors),
    "/": lambda above, below: above / below,
    "neg": lambda value: -value,
    "^": _exact_power,
    "sqrt": _exact_root,
    "root": _exact_root,
    "abs": abs,
    "floor": lambda value: Fraction(math.floor(value)),
    "ceil": lambda value: Fraction(math.ceil(value)),
    "factorial": _exact_factorial,
    "binom": _exact_binomial,
    "conjugate": lambda value: value,
}


# Values at points


def symbols_of(expression: Expression) -> frozenset[str]:
    match expression:
        case Symbol(name):
            return frozenset((name,))
        case Apply(_, arguments):
            return frozenset().union(*map(symbols_of, arguments))
    return frozenset()


def infinity_of(expression: Expression) -> int:
    """1 and -1 for the two infinities, 0 for everything else."""
    match expression:
        case Constant("infty"):
            return 1
        case Apply("neg", (inner,)):
            return -infinity_of(inner)
    return 0


def equal(first: Expression, second: Expression, *, tolerance: float = 0.0) -> bool:
    """Whether two expressions have one value: exactly, or wherever both are defined as real numbers (as complex ones,
    if nowhere). ``tolerance``: relative difference that two real numbers may have."""
    exactly = exact(first), exact(second)
    if None not in exactly:
        return abs(exactly[0] - exactly[1]) <= Fraction(tolerance) * abs(exactly[0])
    names = symbols_of(first) | symbols_of(second)
    real, complex_ = [], []
    for point in _points(names):
        values = _value(first, point), _value(second, point)
        if None in values:
            continue
        agree = _close(*values, 0.0 if names else tolerance)
        are_real = all(_is_real(value) for value in values)
        if are_real and not agree:
            return False
        (real if are_real else complex_).append(agree)
    return bool(real) or (bool(complex_) and all(complex_))


def ratio(first: Expression, second: Expression) -> float | None:
    """c where first = c * second at every point, to `DIGITS` digits; None if there is no such number, or it is 0."""
    found: list[Any] = []
    for point in _points(symbols_of(first) | symbols_of(second)):
        values = _value(first, point), _value(second, point)
        if None in values:
            continue
        if 0 in values:
            return None
        found.append(values[0] / values[1])
    if not found or not all(_close(found[0], each, 0.0) for each in found) or not _is_real(found[0]):
        return None
    return float(found[0].real)


def real_value(expression: Expression) -> Any | None:
    """The value of an expression without symbols as a high-precision number; None if it is not real."""
    if symbols_of(expression):
        return None
    value = _value(expression, {})
    return value.real if value is not None and _is_real(value) else None


def same_number(first: Any, second: Any) -> bool:
    return _close(first, second, 0.0)


def _points(names: frozenset[str]) -> Iterator[Mapping[str, Fraction]]:
    """Small, large and negative values for each symbol; a single empty point if there is none."""
    for number in range(NUM_POINTS if names else 1):
        yield {name: _sample(name, number) for name in (*names, _LOG)}


@functools.lru_cache(maxsize=4096)
def _sample(name: str, number: int) -> Fraction:
    chance = random.Random(f"{name} {number}")
    low, high = ((0, 1), (0, 1), (1, 4), (1, 4), (-3, 3), (-3, 0))[number]
    value = low + (high - low) * Fraction(chance.randrange(1, 2**48), 2**48)
    return abs(value) + 2 if name == _LOG else value


def _close(first: Any, second: Any, tolerance: float) -> bool:
    size = max(abs(first), abs(second))
    allowed = max(size * first.context.mpf(10) ** -DIGITS, tolerance * abs(first))
    return abs(first - second) <= allowed


def _is_real(value: Any) -> bool:
    return abs(value.imag) <= abs(value) * value.context.mpf(10) ** -DIGITS


def _value(expression: Expression, point: Mapping[str, Fraction]) -> Any | None:
    """The value at a point as a complex number; None where it has none. May raise `TooLarge`."""
    digits = DIGITS + 15
    for _ in range(3):
        effort = _Effort(digits)
        try:
            value = _Numeric(_context(digits), point, effort).value(expression)
        except (Undefined, ZeroDivisionError, OverflowError, ValueError):
            return None
        needed = DIGITS + 15 + 2 * effort.spread
        if needed <= digits:
            return value
        digits = needed
    return value


_contexts = threading.local()


def _context(digits: int) -> Any:
    """A context of this thread alone: mpmath's own one is shared by all threads, and so is its precision."""
    import mpmath  # late: reading a config need not load it

    if not hasattr(_contexts, "own"):
        _contexts.own = mpmath.MPContext()
    _contexts.own.dps = digits
    return _contexts.own


class _Effort:
    """How far the numbers of a computation lie from 1, and how much work it has been; `TooLarge` if it is too much."""

    def __init__(self, digits: int) -> None:
        self._digits = digits
        self._spent = 0
        self.spread = 0
        """Largest distance from 1, in decimal digits."""

    def spend(self, functions: int) -> None:
        """Count the evaluation of so many functions such as sin; gamma is as slow as twenty."""
        self._spent += functions * self._digits
        if self._spent > MOST_WORK:
            raise TooLarge("too many functions of too large numbers are in it")

    def see(self, value: Any) -> None:
        size = abs(value)
        if not size.context.isfinite(size):
            raise Undefined
        if size == 0:
            return
        digits = int(abs((size.man_exp[1] + size.man_exp[0].bit_length()) * 0.30103))
        if digits > LARGEST_DIGITS:
            raise TooLarge("a number in it has too many digits")
        self.spread = max(self.spread, digits)


class _Numeric:
    """Evaluates a tree bottom-up, once per node."""

    def __init__(self, context: Any, point: Mapping[str, Fraction], effort: _Effort) -> None:
        self._context = context
        self._point = point
        self._effort = effort
        self._noise = context.mpf(10) ** (8 - context.dps)

    def value(self, expression: Expression) -> Any:
        found = self._context.mpc(self._raw(expression))
        found = self._context.mpc(self._cleared(found.real, abs(found)), self._cleared(found.imag, abs(found)))
        self._effort.see(found)
        return found

    def _cleared(self, value: Any, size: Any) -> Any:
        """0 for what rounding has left of a 0, where numbers of this size were computed with: sin(pi) is 0."""
        return self._context.mpf(0) if abs(value) <= size * self._noise else value

    def _raw(self, expression: Expression) -> Any:
        context = self._context
        match expression:
            case Number(value):
                return self._rational(value)
            case Based(digits, base):
                return context.mpf(int(digits, base))
            case Symbol(name):
                return self._rational(self._point[name])
            case Constant("pi"):
                return +context.pi
            case Constant("e"):
                return +context.e
            case Constant("i"):
                return context.mpc(0, 1)
            case Apply(operation, arguments):
                return self._applied(operation, [self.value(argument) for argument in arguments])
        raise Undefined

    def _rational(self, value: Fraction) -> Any:
        return self._context.mpf(value.numerator) / value.denominator

    def _applied(self, operation: str, values: list[Any]) -> Any:
        context = self._context
        match operation:
            case "+":
                return self._cleared(context.fsum(values), max(map(abs, values)))
            case "*":
                return context.fprod(values)
            case "/":
                return values[0] / values[1]
            case "neg":
                return -values[0]
            case "^":
                return self._power(*values)
            case "sqrt":
                return context.sqrt(values[0])
            case "root":
                return self._root(*values)
            case "degrees":
                return values[0] * context.pi / 180
            case "log_of_base":
                return self._named("log", values[0]) / self._named("log", values[1])
            case "log":
                return self._named("log", values[0]) / context.log(self._rational(self._point[_LOG]))
            case "exp":
                return self._power(context.e, values[0])
            case "factorial":
                return self._factorial(values[0])
            case "binom":
                n, k = values
                return self._factorial(n) / (self._factorial(k) * self._factorial(n - k))
            case "floor" | "ceil":
                return self._whole(operation, values[0].real)
        if operation in _NAMED:
            return self._named(_NAMED[operation], values[0])
        return self._unknown(operation, values)

    def _named(self, function: str, value: Any) -> Any:
        self._effort.spend(1)
        return self._cleared(getattr(self._context, function)(value), abs(value))

    def _whole(self, function: str, value: Any) -> Any:
        """Floor or ceiling; what is a whole number but for rounding is one."""
        nearest = self._context.nint(value)
        whole = self._cleared(value - nearest, max(abs(value), 1)) == 0
        return nearest if whole else getattr(self._context, function)(value)

    def _power(self, base: Any, exponent: Any) -> Any:
        if base == 0:
            if exponent.real > 0:
                return self._context.mpf(0)
            raise Undefined
        if abs(exponent) * abs(self._context.log(base)) > LARGEST_DIGITS * 2.4:
            raise TooLarge("a power in it has too many digits")
        if exponent.imag == 0 and exponent.real == int(exponent.real):
            return base ** int(exponent.real)
        self._effort.spend(1)
        return self._context.power(base, exponent)

    def _root(self, value: Any, degree: Any) -> Any:
        """The real root, if there is one: the cube root of -8 is -2."""
        if value.imag == 0 and value.real < 0 and degree.imag == 0 and degree.real % 2 == 1:
            return -self._power(-value, 1 / degree)
        return self._power(value, 1 / degree)

    def _factorial(self, value: Any) -> Any:
        if abs(value) > _LARGEST_FACTORIAL // 4:
            raise TooLarge("a factorial in it has too many digits")
        self._effort.spend(20)
        return self._context.gamma(value + 1)

    def _unknown(self, name: str, values: list[Any]) -> Any:
        """A function nothing is known of, as f in f(4 - x): some smooth function, always the same for a name."""
        total = self._context.mpf(0)
        for place, value in enumerate(values):
            if abs(value) > 1000:
                raise Undefined
            scale, shift = (self._rational(_sample(f"{name} {place} {part}", 2)) for part in ("scale", "shift"))
            total += self._context.sin(scale * value + shift) + scale * value
        return total


_NAMED = {
    **{name: name for name in ("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan")},
    **{name: name for name in ("sinh", "cosh", "tanh")},
    "ln": "log",
    "lg": "log10",
    "abs": "fabs",
    "conjugate": "conj",
}
