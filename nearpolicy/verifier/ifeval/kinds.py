"""The 25 kinds: what each takes, and how a text is checked against it.

A check gets a text as it is `texts.seen`, not blank, and says what is wrong with it; None if the instruction is
followed. It takes time linear in the text and never raises. The rules are those of the published checkers but where
those can be met by a trick, are left to chance or read an instruction otherwise than people do: `docs/verify-ifeval.md`
lists each difference with its reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

from nearpolicy.verifier.ifeval import languages, texts

Check = Callable[..., str | None]
"""``check(text, **arguments)``."""
Reader = Callable[[Any], Any]
"""The value of an argument as its check takes it; ValueError says what it should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of instruction."""

    check: Check
    arguments: Mapping[str, Reader]
    """Name in a row's kwargs -> how its value is read; a row must give all of them."""
    impossible: Callable[..., str | None]
    """Why no text can follow an instruction with these arguments; None if one can."""


_kinds: dict[str, Kind] = {}
KINDS: Mapping[str, Kind] = MappingProxyType(_kinds)
"""Identifier, as rows have it -> kind."""


def _possible(**arguments: Any) -> None:
    """Of kinds whose arguments do not concern each other."""


def _kind(
    identifier: str, *, impossible: Callable[..., str | None] = _possible, **arguments: Reader
) -> Callable[[Check], Check]:
    def enter(check: Check) -> Check:
        _kinds[identifier] = Kind(check=check, arguments=MappingProxyType(arguments), impossible=impossible)
        return check

    return enter


# Arguments

AT_LEAST, LESS_THAN = "at least", "less than"


def _text(value: Any) -> str:
    found = texts.seen(value).strip() if isinstance(value, str) else ""
    if not found:
        raise ValueError("should be text")
    return found


def _words(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise ValueError("should be a list of words")
    return tuple(map(_text, value))


def _number(value: Any) -> int:
    """Some files have 3.0 where another row has none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1 or value < 1:
        raise ValueError("should be a whole number, 1 or more")
    return int(value)


def _relation(value: Any) -> str:
    if value not in (AT_LEAST, LESS_THAN):
        raise ValueError(f"should be {AT_LEAST!r} or {LESS_THAN!r}")
    return value


def _letter(value: Any) -> str:
    if not isinstance(value, str) or len(value.strip()) != 1:
        raise ValueError("should be one character")
    return value.strip().lower()


def _language(value: Any) -> str:
    code = str(value).lower()
    code = languages.OTHER_NAMES.get(code, code)
    if code not in languages.KNOWN:
        raise ValueError(f"should be one of {', '.join(languages.KNOWN)}")
    return code


def _phrase(value: Any) -> str:
    if not (phrase := _text(value).strip('"').strip()):
        raise ValueError("should hold more than quotation marks")
    return phrase


def _first_word(value: Any) -> str:
    if not (word := _leading_word(_text(value))):
        raise ValueError("should be a word")
    return word


# What several checks say


def _related(found: int, relation: str, wanted: int, what: str) -> str | None:
    right = found >= wanted if relation == AT_LEAST else found < wanted
    return None if right else f"{what}: {found}, asked for {relation} {wanted}"


def _enough(found: int, wanted: int, what: str) -> str | None:
    return _related(found, AT_LEAST, wanted, what)


def _exactly(found: int, wanted: int, what: str) -> str | None:
    return None if found == wanted else f"{what}: {found}, asked for {wanted}"


def _quoted(words: Sequence[str]) -> str:
    return ", ".join(map(repr, words))


# Keywords


@_kind("keywords:existence", keywords=_words)
def _keywords_exist(text: str, keywords: Sequence[str]) -> str | None:
    """Anywhere, inside other words too, in capitals or not."""
    lower = text.lower()
    absent = [keyword for keyword in keywords if keyword.lower() not in lower]
    return f"without {_quoted(absent)}" if absent else None


@_kind("keywords:frequency", keyword=_text, frequency=_number, relation=_relation)
def _keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> str | None:
    """Counted as above, no character twice."""
    return _related(text.lower().count(keyword.lower()), relation, frequency, repr(keyword))


@_kind("keywords:forbidden_words", forbidden_words=_words)
def _no_forbidden_words(text: str, forbidden_words: Sequence[str]) -> str | None:
    """As whole words, in capitals or not; signs wherever they stand."""
    lower = text.lower()
    found = [word for word in forbidden_words if re.search(_whole(word.lower()), lower)]
    return f"with {_quoted(found)}" if found else None


def _whole(word: str) -> str:
    """A pattern for a word that is no part of a longer one."""
    before = r"(?<!\w)" if re.match(r"\w", word[0]) else ""
    after = r"(?!\w)" if re.match(r"\w", word[-1]) else ""
    return before + re.escape(word) + after


@_kind("keywords:letter_frequency", letter=_letter, let_frequency=_number, let_relation=_relation)
def _letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> str | None:
    """Any character may be the letter."""
    return _related(text.lower().count(letter), let_relation, let_frequency, repr(letter))


# Language and case


@_kind("language:response_language", language=_language)
def _in_language(text: str, language: str) -> str | None:
    found = languages.language_of(text)
    return None if found == language else f"language: {found or 'cannot be told'}, asked for {language}"


@_kind("change_case:english_capital")
def _all_capitals(text: str) -> str | None:
    # In small letters, for capitals tell detectors little.
    return _in_language(text.lower(), "en") if text.isupper() else "not all letters are capitals"


@_kind("change_case:english_lowercase")
def _no_capitals(text: str) -> str | None:
    return _in_language(text, "en") if text.islower() else "not all letters are small"


@_kind("change_case:capital_word_frequency", capital_frequency=_number, capital_relation=_relation)
def _capital_words(text: str, capital_frequency: int, capital_relation: str) -> str | None:
    found = sum(word.isupper() for word in texts.spelt_words(text))
    return _related(found, capital_relation, capital_frequency, "words in capitals")


# Lengths


@_kind("length_constraints:number_sentences", num_sentences=_number, relation=_relation)
def _sentences(text: str, num_sentences: int, relation: str) -> str | None:
    return _related(texts.count_sentences(text), relation, num_sentences, "sentences")


@_kind("length_constraints:number_words", num_words=_number, relation=_relation)
def _number_of_words(text: str, num_words: int, relation: str) -> str | None:
    return _related(texts.count_words(text), relation, num_words, "words")


@_kind("length_constraints:number_paragraphs", num_paragraphs=_number)
def _paragraphs(text: str, num_paragraphs: int) -> str | None:
    """Separated by ``***``, with something in each; a divider may also open or close the text."""
    first, *rest = (part.strip() for part in text.split("***"))
    inner, last = rest[:-1], rest[-1:]
    if "" in inner:
        return "nothing between two dividers ***"
    return _exactly(len(inner) + sum(map(bool, (first, *last))), num_paragraphs, "paragraphs between ***")


def _beyond_the_last(num_paragraphs: int, nth_paragraph: int, first_word: str) -> str | None:
    return f"there is no paragraph {nth_paragraph} of {num_paragraphs}" if nth_paragraph > num_paragraphs else None


@_kind(
    "length_constraints:nth_paragraph_first_word",
    impossible=_beyond_the_last,
    num_paragraphs=_number,
    nth_paragraph=_number,
    first_word=_first_word,
)
def _nth_paragraph(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> str | None:
    """Paragraphs are what blank lines separate."""
    parts = texts.paragraphs(text)
    if len(parts) != num_paragraphs:
        return _exactly(len(parts), num_paragraphs, "paragraphs between blank lines")
    found = _leading_word(parts[nth_paragraph - 1])
    return None if found == first_word else f"paragraph {nth_paragraph} begins with {found!r}, not {first_word!r}"


def _leading_word(text: str) -> str:
    """The first word, in small letters, without quotation marks before it and without what follows its letters."""
    match = re.match(r"[\w-]{1,100}", text.lstrip().lstrip("\"'\u2018\u201c"))
    return match[0].lower() if match else ""


# Contents


@_kind("detectable_content:number_placeholders", num_placeholders=_number)
def _placeholders(text: str, num_placeholders: int) -> str | None:
    """Square brackets on one line with something in them."""
    found = 0
    for line in text.split("\n"):
        end = -1
        while (begin := line.find("[", end + 1)) >= 0 and (end := line.find("]", begin)) >= 0:
            found += bool(line[begin + 1 : end].strip())
    return _enough(found, num_placeholders, "placeholders in brackets")


@_kind("detectable_content:postscript", postscript_marker=_text)
def _postscript(text: str, postscript_marker: str) -> str | None:
    """The marker with or without white space between its letters, and words after it."""
    pieces = re.findall(r"[^.]*\.|[^.]+\Z", postscript_marker)
    begins = [match.end() for match in re.finditer(r"(?<!\w)" + r"\s?".join(map(re.escape, pieces)), text, re.I)]
    if not begins:
        return f"no {postscript_marker}"
    return None if re.search(r"\w", text[begins[0] :]) else f"nothing behind {postscript_marker}"


# Formats


@_kind("detectable_format:number_bullet_lists", num_bullets=_number)
def _bullets(text: str, num_bullets: int) -> str | None:
    """Lines that begin with one ``*`` or with ``-`` and hold something besides: ``---`` is a rule, not a bullet."""
    lines = (line.strip() for line in text.split("\n"))
    found = sum(
        (line.startswith("-") or (line.startswith("*") and not line.startswith("**"))) and bool(line.strip("*- \t"))
        for line in lines
    )
    return _exactly(found, num_bullets, "bullets")


ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


@_kind("detectable_format:constrained_response")
def _one_of_the_answers(text: str) -> str | None:
    """Exactly one of the three occurs."""
    found = [answer for answer in ANSWERS if answer in text]
    return None if len(found) == 1 else f"{'no' if not found else 'more than one'} allowed answer"


_HIGHLIGHT = re.compile(r"(\*\*|\*)([^*\n]++)\1")


@_kind("detectable_format:number_highlighted_sections", num_highlights=_number)
def _highlights(text: str, num_highlights: int) -> str | None:
    """``*so*`` or ``**so**``, on one line, with something inside."""
    found = sum(bool(match[2].strip()) for match in _HIGHLIGHT.finditer(text))
    return _enough(found, num_highlights, "highlighted sections")


@_kind("detectable_format:multiple_sections", section_spliter=_text, num_sections=_number)
def _sections(text: str, section_spliter: str, num_sections: int) -> str | None:
    """The word and a number behind it, each number counted once."""
    found = re.findall(re.escape(section_spliter) + r"\s?(\d{1,9})", text)
    return _enough(len({int(number) for number in found}), num_sections, f"{section_spliter} with a number")


@_kind("detectable_format:title")
def _title(text: str) -> str | None:
    """``<<so>>`` on one line, with something inside."""
    for line in text.split("\n"):
        begin, end = line.find("<<"), line.rfind(">>")
        if 0 <= begin < end and line[begin:end].strip("<> \t"):
            return None
    return "no <<title>>"


@_kind("detectable_format:json_format")
def _json(text: str) -> str | None:
    """All of it, perhaps in a Markdown fence."""
    body = text.strip()
    if body.startswith("```"):
        body = body[3:].removesuffix("```")
        body = body[4:] if body[:4].lower() == "json" else body
    try:
        json.loads(body, parse_int=str, parse_float=str, parse_constant=_no_constant)
    except ValueError as error:
        return f"not JSON: {error}"
    except RecursionError:
        return "not JSON that a parser reads: too deep"
    return None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no value of JSON")


# Combinations, beginning and end, punctuation


@_kind("combination:repeat_prompt", prompt_to_repeat=_text)
def _repeats_prompt(text: str, prompt_to_repeat: str) -> str | None:
    """The prompt first, in capitals or not, then an answer."""
    if not text.strip().lower().startswith(prompt_to_repeat.lower()):
        return "does not begin with the prompt"
    return None


@_kind("combination:two_responses")
def _two_responses(text: str) -> str | None:
    """Two different ones with ``******`` between them; the divider may also open or close the text."""
    first, *rest = (part.strip() for part in text.split("******"))
    if "" in rest[:-1]:
        return "nothing between two dividers ******"
    found = [part for part in (first, *rest) if part]
    if len(found) != 2:
        return _exactly(len(found), 2, "responses between ******")
    return None if found[0] != found[1] else "the two responses are the same"


@_kind("startend:end_checker", end_phrase=_phrase)
def _ends_with(text: str, end_phrase: str) -> str | None:
    """In capitals or not; quotation marks around the whole text do not count."""
    if text.strip().strip('"').rstrip().lower().endswith(end_phrase.lower()):
        return None
    return f"does not end with {end_phrase!r}"


@_kind("startend:quotation")
def _in_quotation_marks(text: str) -> str | None:
    """Around the whole text, and something between them."""
    body = text.strip()
    right = len(body) > 1 and body[0] == body[-1] == '"' and bool(body.strip('" \t\n'))
    return None if right else "not in double quotation marks"


_COMMAS = re.compile("[,\u060c\u3001\ufe50\uff0c]")


@_kind("punctuation:no_comma")
def _no_comma(text: str) -> str | None:
    """Those of Arabic, Chinese and Japanese are commas too."""
    found = sum(1 for _ in _COMMAS.finditer(text))
    return f"commas: {found}" if found else None
