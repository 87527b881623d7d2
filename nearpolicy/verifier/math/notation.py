r"""The signs of an answer: plain text, LaTeX and Unicode become one list of tokens, in linear time.

    ``\dfrac{1}{2}\text{ cm}^{2}``  ->  frac { 1 } { 2 } "cm" ^ { 2 }
    ``1/2 cm²``                    ->  1 / 2 "cm" ^ { 2 }

Only signs that say nothing are dropped (spacing, fonts, ``\left``, ``\displaystyle``, zero-width characters). Letters
of other alphabets stay what they are: a Cyrillic а is no a.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

LONGEST = 2000
"""Characters of an answer that is read; a longer one is compared letter by letter."""


def names(text: str) -> frozenset[str]:
    """The words of a list."""
    return frozenset(text.split())


class Unreadable(Exception):
    """The text is not in a notation that is read here; the message says where reading ended."""


@dataclass(frozen=True, slots=True)
class Token:
    """A sign. ``spaced``: a blank stands before it; ``roman``: it stood in ``\\text{}`` or the like."""

    kind: str
    """number, letter (a symbol), word, command (a name of LaTeX), mark, or end."""
    text: str
    spaced: bool = False
    roman: bool = False


# Characters

_VULGAR = {
    ord(char): "\\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", char).split("\u2044"))
    for char in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
}
_SIGNS = {
    **dict.fromkeys(map(ord, "\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d"), "-"),
    **dict.fromkeys(map(ord, "\u00a0\u2007\u2009\u202f"), "\\,"),
    **dict.fromkeys(map(ord, "·⋅∙×✕⨯∗"), "*"),
    **dict.fromkeys(map(ord, "÷∕⁄"), "/"),
    **dict.fromkeys(map(ord, "‘’′"), "'"),
    **dict.fromkeys(map(ord, "“”"), '"'),
    **_VULGAR,
    ord("√"): "\\sqrt ",
    ord("∛"): "\\sqrt[3] ",
    ord("π"): "\\pi ",
    ord("θ"): "\\theta ",
    ord("∞"): "\\infty ",
    ord("±"): "\\pm ",
    ord("∓"): "\\mp ",
    ord("≤"): "\\leq ",
    ord("⩽"): "\\leq ",
    ord("≥"): "\\geq ",
    ord("⩾"): "\\geq ",
    ord("≠"): "\\neq ",
    ord("≈"): "\\approx ",
    ord("∈"): "\\in ",
    ord("∪"): "\\cup ",
    ord("∩"): "\\cap ",
    ord("∖"): "\\setminus ",
    ord("∅"): "\\emptyset ",
    ord("ℝ"): "\\mathbb{R}",
    ord("ℤ"): "\\mathbb{Z}",
    ord("°"): "^\\circ ",
    ord("⟨"): "\\langle ",
    ord("⟩"): "\\rangle ",
    ord("⌊"): "\\lfloor ",
    ord("⌋"): "\\rfloor ",
    ord("⌈"): "\\lceil ",
    ord("⌉"): "\\rceil ",
    ord("…"): "\\ldots ",
}
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")


def plain_characters(text: str) -> str:
    """Unicode's mathematical signs as LaTeX, invisible characters gone, full-width forms as ASCII."""
    if text.isascii():
        return text
    text = "".join(char for char in text if unicodedata.category(char) != "Cf")
    text = _RAISED.sub(lambda run: "^{" + unicodedata.normalize("NFKC", run[0]).replace("\u2212", "-") + "}", text)
    text = _LOWERED.sub(lambda run: "_{" + unicodedata.normalize("NFKC", run[0]) + "}", text)
    return unicodedata.normalize("NFKC", text.translate(_SIGNS)).translate(_SIGNS)


# Formula signs, fonts, emphasis, and a full stop

_PAIRED_DOLLARS = re.compile(
    r"\$\$(?P<display>[^$]*)\$\$"
    r"|(?<!\\)\$(?:(?!\s)(?=[^$]*[^$\s]\$)|(?=\s+[^\s0-9$])|(?=\s[^$]*\s\$))(?P<inline>(?:[^$\\]|\\.)+)\$(?![0-9])",
    re.DOTALL,
)


def bare(text: str) -> str:
    r"""The answer without the signs that only set it off: ``$...$``, ``\(...\)``, ``**...**``, a trailing ``\\`` or
    full stop. A dollar sign that begins no formula is money and becomes ``\$``."""
    text = plain_characters(text).strip()
    if len(text) > 2 and text[0] == text[-1] == "$" and "$" not in text[1:-1].replace("\\$", ""):
        text = text[1:-1]
    text = text.replace("\\(", " ").replace("\\)", " ").replace("\\[", " ").replace("\\]", " ").replace("`", " ")
    if text.startswith("**") and text.endswith("**") and len(text) > 4:
        text = text[2:-2]
    text = _PAIRED_DOLLARS.sub(lambda found: f" {found['display'] or found['inline'] or ''} ", text)
    text = re.sub(r"(?<!\\)\$", r"\\$", text).strip().removeprefix("=").strip()
    if len(text) > 2 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
    before = None
    while text != before:
        before, text = text, _unbraced(_without_ending(text.removeprefix("\\displaystyle").lstrip()))
    return text


def _without_ending(text: str) -> str:
    """Without blanks, line ends and punctuation at its end; an ellipsis stays."""
    while text:
        shorter = text.removesuffix("\\\\").removesuffix("\\,").removesuffix("\\ ")
        if shorter == text and text[-1] in ".,;: " and text[-2:-1] not in ("\\", "."):
            shorter = text[:-1]
        if shorter == text:
            break
        text = shorter.rstrip()
    return text


_OPENING = re.compile(
    r"(?:\\(?:boxed|fbox|framebox|mathbf|boldsymbol|bm|displaystyle|textstyle|ensuremath"
    r"|text|textbf|textit|mbox|mathrm)\s*)?\{"
)
_LEVELS = {"{": 1, "(": 1, "[": 1, "}": -1, ")": -1, "]": -1}


def _unbraced(text: str) -> str:
    """Without braces around all of it, and the fonts and boxes before them. ``{1, 2}`` is a set and stays."""
    opening = _OPENING.match(text)
    if not opening or not text.endswith("}"):
        return text
    braces = level = 0
    for place in range(opening.end() - 1, len(text)):
        level += _LEVELS.get(text[place], 0)
        if text[place - 1 : place] == "\\":
            continue
        braces += {"{": 1, "}": -1}.get(text[place], 0)
        if braces == 0 and place < len(text) - 1:
            return text
        if text[place] == "," and level == 1 and opening[0] == "{":
            return text
    return text[opening.end() : -1].strip() if braces == 0 else text


_FONTS = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|boxed|fbox)\s*\{([^{}]*)\}")


def without_fonts(text: str) -> str:
    """The text without font commands around it or its parts; only for texts that are compared as words."""
    return _FONTS.sub(r" \1 ", text).strip()


# Tokens

_SILENT = names(
    "left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr middle displaystyle textstyle "
    "scriptstyle limits nolimits mathbf mathit mathsf mathtt mathcal mathscr mathfrak boldsymbol bm pmb vec hat "
    "boxed fbox mathstrut strut hfill underline rm bf it sf tt ensuremath notag nonumber small large Large square "
    "blacksquare Box checkmark qed"
)
_SPACES = frozenset(("quad", "qquad", "enspace", "thinspace", "space", ",", ";", ":", ">", " ", "\n", "\t", "~"))
_ROMAN = names("text textbf textit textrm texttt textsf textup textnormal emph mbox hbox mathrm operatorname")
_SAME = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac"), "frac"),
    **dict.fromkeys(("dbinom", "tbinom"), "binom"),
    **dict.fromkeys(("le", "leqslant"), "leq"),
    **dict.fromkeys(("ge", "geqslant"), "geq"),
    "ne": "neq",
    "lt": "<",
    "gt": ">",
    **dict.fromkeys(("cdot", "times", "ast"), "*"),
    "div": "/",
    "colon": ":",
    **dict.fromkeys(("varnothing", "O"), "emptyset"),
    **dict.fromkeys(("lvert", "rvert", "vert", "mid"), "|"),
    **dict.fromkeys(("lbrace", "{"), "\\{"),
    **dict.fromkeys(("rbrace", "}"), "\\}"),
    **dict.fromkeys(("lbrack",), "["),
    **dict.fromkeys(("rbrack",), "]"),
    **dict.fromkeys(("ldots", "cdots"), "dots"),
    "backslash": "setminus",
    "simeq": "approx",
    "degree": "circ",
    "varphi": "phi",
    "varepsilon": "epsilon",
    "arccos": "acos",
    "arcsin": "asin",
    "arctan": "atan",
    "%": "%",
    "$": "$",
    "#": "#",
    "&": "&",
    "_": "_",
    "|": "|",
    "\\": "\\\\",
}
_MARKS = frozenset(("*", "/", ":", "<", ">", "|", "\\{", "\\}", "[", "]", "%", "$", "#", "&", "_", "\\\\"))
GREEK = names(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau phi chi psi omega Gamma "
    "Delta Theta Lambda Xi Sigma Phi Psi Omega"
)
FUNCTIONS = names("sin cos tan cot sec csc asin acos atan sinh cosh tanh log ln lg exp sqrt abs")
MATRICES = frozenset(("pmatrix", "bmatrix", "matrix", "Bmatrix", "smallmatrix", "array"))
_PLAIN_NAMES = {
    **{name: name for name in FUNCTIONS | GREEK},
    **{"arcsin": "asin", "arccos": "acos", "arctan": "atan", "pi": "pi"},
    **dict.fromkeys(("infinity", "inf", "infty"), "infty"),
    **{"union": "cup", "binom": "binom", "frac": "frac"},
}

_KNOWN = _SILENT | _ROMAN | GREEK | FUNCTIONS | frozenset(_SAME) | frozenset(_SAME.values()) | _SPACES
_KNOWN |= names(
    "frac binom pi infty pm mp cup cap setminus in approx neq leq geq emptyset langle rangle lfloor rfloor lceil "
    "rceil circ choose over overline bar dot phantom hphantom vphantom hspace label tag color "
    "textcolor mathbb begin end dots"
)


def unknown_commands(text: str) -> bool:
    """Whether a command or environment stands in a text that has no place in this notation: an integral, a sum."""
    environments = re.findall(r"\\begin\s*\{(\w+)", text)
    names = re.findall(r"\\([A-Za-z]+)", text)
    return not _KNOWN.issuperset(names) or any(name not in MATRICES for name in environments)


_GROUPING = r"\{,\}|,\\!\s?|\\[!,]"
_FRACTION_PART = (
    r"(?:\.(?P<fixed>[0-9]*)(?:\\(?:overline|bar|dot)\s?(?:\{(?P<period>[0-9]{1,40})\}|(?P<digit>[0-9]))"
    r"|(?<=\.)\((?P<round>[0-9]{1,40})\))?)?"
)
_NUMBER_IN_BRACKETS = re.compile(
    rf"(?P<whole>[0-9]{{1,3}}(?:(?:{_GROUPING})[0-9]{{3}})+(?![0-9])|[0-9]*){_FRACTION_PART}"
)
_NUMBER = re.compile(
    rf"(?P<whole>[0-9]{{1,3}}(?:(?:{_GROUPING}|,)[0-9]{{3}})+(?![0-9])|[0-9]{{1,3}}(?:\ [0-9]{{3}})+(?![0-9])|[0-9]*)"
    + _FRACTION_PART
)
_EXPONENT = re.compile(r"[eE](?:[0-9]{1,6}|\+[0-9]{2,6}|-0[0-9]{1,5})(?![0-9.])")
_SCIENTIFIC = re.compile(r"\s*[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]{1,6}\s*")
_DECIMALS = re.compile(r"\.(?:[0-9]|\\(?:overline|bar|dot))")
_TIMES_TEN = re.compile(r"\s*[xX]\s*(?=10\s*\^)")
_COMMAND = re.compile(r"\\(?:([A-Za-z]+)\*?|(.))", re.DOTALL)
_LETTERS = re.compile(r"(?P<dotted>[A-Za-z](?:\.[A-Za-z])+\.?)(?![A-Za-z])|[A-Za-z]+(?:'[A-Za-z]+)*'*")
_ABBREVIATED = re.compile(r"\.(?=\s|\}|$)")
_ARGUMENT = re.compile(r"\s*\{([^{}]*)\}")
_LETTER = re.compile(r"\s+([A-Z])(?![A-Za-z])")
"""An argument without braces."""
_DROPPED = re.compile(r"\s*(?:\{[^{}]*\}|\\?.)")
_ELLIPSIS = re.compile(r"\.\.\.+|\\[lc]?dots")


def tokens_of(text: str, *, commas_group: bool = True) -> list[Token]:
    """The tokens of an answer that `bare` has seen, with an end token. ``commas_group``: outside brackets, a comma
    before three digits groups thousands."""
    return _Lexer(text, commas_group).run()


class _Lexer:
    """One pass over the text."""

    def __init__(self, text: str, commas_group: bool) -> None:
        self._text = text
        self._commas_group = commas_group
        self._scientific = _SCIENTIFIC.fullmatch(text) is not None
        self._place = 0
        self._spaced = False
        self._brackets: list[str] = []
        self._roman_until: list[int] = []
        """Where the surrounding ``\\text{...}`` end."""
        self._tokens: list[Token] = []

    def run(self) -> list[Token]:
        while self._place < len(self._text):
            self._step(self._text[self._place])
        self._add("end", "")
        return self._tokens

    def _add(self, kind: str, text: str) -> None:
        self._tokens.append(Token(kind, text, self._spaced, bool(self._roman_until)))
        self._spaced = False

    def _step(self, char: str) -> None:
        if self._roman_until and self._place == self._roman_until[-1]:
            self._roman_until.pop()
            self._place += 1
            self._spaced = True
        elif char.isspace() or char == "~":
            self._spaced = True
            self._place += 1
        elif char in "0123456789" or (char == "." and _DECIMALS.match(self._text, self._place)):
            self._number()
        elif char == "\\":
            self._command()
        elif char.isascii() and char.isalpha():
            self._letters()
        elif char == "." and self._roman_until:
            self._place += 1
        elif self._text.startswith("**", self._place):
            self._mark("^", 2)
        else:
            self._mark(char, 1)

    def _mark(self, mark: str, length: int) -> None:
        self._place += length
        if mark in ("(", "[", "\\{", "{"):
            self._brackets.append(mark)
        elif mark in (")", "]", "\\}", "}") and self._brackets:
            self._brackets.pop()
        self._add("mark", mark)

    def _number(self) -> None:
        apart = self._brackets and self._brackets[-1] != "{"
        pattern = _NUMBER_IN_BRACKETS if apart or not self._commas_group else _NUMBER
        found = pattern.match(self._text, self._place)
        whole = re.sub(r"[^0-9]", "", found["whole"])
        period = found["period"] or found["digit"] or found["round"] or ""
        self._place = found.end()
        text = f"{whole or 0}.{found['fixed'] or ''}({period})" if period else f"{whole or 0}"
        if not period and found["fixed"]:
            text += f".{found['fixed']}"
            more = _ELLIPSIS.match(self._text, self._place)
            if more and len(found["fixed"]) > 2 and len(set(found["fixed"][-3:])) == 1:  # 0.333...
                text, self._place = f"{text}({text[-1]})", more.end()
        exponent = _EXPONENT.match(self._text, self._place)
        if self._scientific or (exponent and not period):
            end = len(self._text.rstrip()) if self._scientific else exponent.end()
            text, self._place = text + self._text[self._place : end].strip(), end
        self._add("number", text)
        if times := _TIMES_TEN.match(self._text, self._place):
            self._place = times.end()
            self._add("mark", "*")

    def _letters(self) -> None:
        found = _LETTERS.match(self._text, self._place)
        self._place = found.end()
        if found["dotted"]:  # p.m.
            self._add("word", found[0].replace(".", ""))
            return
        if len(found[0]) > 1 and _ABBREVIATED.match(self._text, self._place):  # sq. units
            self._place += 1
        self._named(found[0])

    def _named(self, letters: str) -> None:
        lower = letters.lower()
        if lower in ("or", "and") and letters in (lower, lower.upper(), lower.capitalize()):
            self._add("mark", lower)
        elif letters in _PLAIN_NAMES:
            self._add("command", _PLAIN_NAMES[letters])
        elif len(letters.rstrip("'")) == 1:
            self._add("letter", letters)
        else:
            self._add("word", letters)

    def _command(self) -> None:
        found = _COMMAND.match(self._text, self._place)
        if found is None:
            raise Unreadable("it ends with a backslash")
        self._place = found.end()
        name = found[1] or found[2]
        if name == "!":
            return
        if name in _SPACES:
            self._spaced = True
        elif name in _SILENT:
            if self._text.startswith(".", self._place) and name in ("left", "right"):
                self._place += 1
        elif name in _ROMAN:
            self._roman()
        elif name in ("phantom", "hphantom", "vphantom", "hspace", "label", "tag", "color"):
            self._drop_argument()
        elif name == "mathbb" and (letter := _LETTER.match(self._text, self._place)):
            self._place = letter.end()
            self._add("command", f"{name} {letter[1]}")
        elif name in ("begin", "end", "mathbb", "textcolor"):
            argument = self._argument()
            if name != "textcolor":
                self._add("command", f"{name} {argument}")
        else:
            name = _SAME.get(name, name)
            if name in _MARKS:
                self._mark(name, 0)
            else:
                self._add("command", name)

    def _roman(self) -> None:
        """Text inside a formula: read like the rest, but its letters are no product of symbols."""
        while self._text[self._place : self._place + 1] == " ":
            self._place += 1
        if not self._text.startswith("{", self._place):
            return
        depth, end = 0, self._place
        while end < len(self._text):
            depth += {"{": 1, "}": -1}.get(self._text[end], 0)
            if depth == 0:
                break
            end += 1
        if depth:
            raise Unreadable("a brace is never closed")
        self._place += 1
        self._roman_until.append(end)
        self._spaced = self._spaced or self._text[self._place : self._place + 1].isspace()

    def _argument(self) -> str:
        found = _ARGUMENT.match(self._text, self._place)
        if found is None:
            raise Unreadable("a command lacks its argument")
        self._place = found.end()
        return found[1].strip()

    def _drop_argument(self) -> None:
        found = _DROPPED.match(self._text, self._place)
        if found:
            self._place = found.end()
