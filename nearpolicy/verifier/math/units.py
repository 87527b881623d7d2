"""Units and labels beside a value. A measuring unit has one name here, however it is written; any other word is a label
(``8 apples``), which says nothing about the value."""

from __future__ import annotations

import re
from fractions import Fraction

from nearpolicy.verifier.math.notation import names

_NAMES = {
    "mm": "mm millimeter millimetre",
    "cm": "cm centimeter centimetre",
    "dm": "dm decimeter decimetre",
    "m": "m meter metre",
    "km": "km kilometer kilometre",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard",
    "mi": "mi mile",
    "mg": "mg milligram",
    "g": "g gram gramme",
    "kg": "kg kilogram kilo",
    "lb": "lb lbs pound",
    "oz": "oz ounce",
    "ml": "ml milliliter millilitre",
    "l": "l liter litre",
    "gal": "gal gallon",
    "s": "s sec second",
    "min": "min minute",
    "h": "h hr hrs hour",
    "day": "day",
    "week": "week wk",
    "month": "month",
    "year": "year yr",
    "ms": "ms millisecond",
    "dollar": "dollar usd $ buck",
    "cent": "cent ¢",
    "euro": "euro eur €",
    "pound sterling": "gbp £",
    "yen": "yen jpy ¥",
    "rupee": "rupee inr rs ₹",
    "degree": "degree deg °",
    "radian": "radian rad",
    "%": "% percent pct percentage",
    "n": "newton",
    "j": "joule",
    "w": "watt",
    "v": "volt",
    "hz": "hertz hz",
    "pa": "pascal",
    "am": "am a.m.",
    "pm": "pm p.m.",
}
MEASURES = {spelling: name for name, spellings in _NAMES.items() for spelling in spellings.split()}
_WHOLE = {
    "mph": "mi/h",
    "kph": "km/h",
    "kmh": "km/h",
    "kmph": "km/h",
    "fps": "ft/s",
    "per cent": "%",
    "percentage points": "%",
}
PLAIN_SYMBOLS = names("mm cm dm km ft yd mi mg kg lb lbs oz ml gal sec min hr hrs mph kph kmh usd eur gbp hz")
"""Units that are recognised right after a number, without a blank and outside ``\\text{}``: ``5cm``."""
SINGLE_LETTERS = names("m g s h l L N J W V K C F")
"""Symbols that are units where the right answer has no symbol: ``8 m``."""

MULTIPLES = {
    "hundred": Fraction(10**2),
    "thousand": Fraction(10**3),
    "million": Fraction(10**6),
    "billion": Fraction(10**9),
    "trillion": Fraction(10**12),
    "dozen": Fraction(12),
}
"""Words that multiply the number before them."""

_NOT_LABELS = names(
    "not no never nor neither either is are was were be isn't aren't wrong incorrect false than less fewer between "
    "maybe perhaps possibly about except without but if unless plus minus times over divided anything any "
    "something nothing unknown else other another to from at least most where when"
)
_MOST_WORDS = 6
_WORD = re.compile(r"[A-Za-z][A-Za-z.\-']*|[$€£¢¥₹%°]")


def unit_of(words: list[str]) -> str | None:
    """The name of a unit or label, from its words and the signs ``/`` and ``^2`` between them; None if it is none."""
    if len(words) > 2 * _MOST_WORDS or any(word.lower() in _NOT_LABELS for word in words):
        return None
    said = " ".join(words).lower()
    if said in _WHOLE:
        return _WHOLE[said]
    parts: list[str] = []
    power = ""
    for word in (_WHOLE.get(word.lower(), word.lower()) for word in words):
        if word in ("square", "sq", "cubic", "cu"):
            power = "^3" if word in ("cubic", "cu") else "^2"
        elif word in ("per", "/", "an", "a", "each") and parts:
            parts.append("/" if word in ("per", "/") else "")
        elif word.startswith("^"):
            parts.append(word)
        elif _WORD.fullmatch(word) or "/" in word:
            parts.append(_singular(word) + power)
            power = ""
        else:
            return None
    if power:
        parts.append("unit" + power)
    return re.sub(r" ?(/|\^) ?", r"\1", " ".join(filter(None, parts)))


def _singular(word: str) -> str:
    for spelling in (word, word.removesuffix("s"), word.removesuffix("es"), word.removesuffix(".")):
        if spelling in MEASURES:
            return MEASURES[spelling]
    return word.removesuffix("s") if len(word) > 3 else word


def is_measure(unit: str) -> bool:
    """Whether all of a unit's names are measuring units, so that another one makes another answer."""
    names = [name for name in re.split(r"[ /]|\^[0-9{}-]+", unit) if name]
    return bool(names) and all(name in _NAMES for name in names)


def agree(gold: str, answer: str) -> bool:
    """Whether two units may stand for the same: they are equal, one is missing, or one is only a label."""
    if gold == answer or not gold or not answer:
        return True
    if gold.split()[0] == answer.split()[0] == "degree":
        return "degree" in (gold, answer)
    return not (is_measure(gold) and is_measure(answer))
