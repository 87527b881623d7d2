"""Which language a text is in, by py3langid: counts of byte sequences and nothing random, so equal texts get equal
answers.

It chooses among the languages that the published checker can tell apart, under the codes used there.
"""

from __future__ import annotations

import functools
from typing import Any

_CODES = (
    "af ar bg bn ca cs cy da de el en es et fa fi fr gu he hi hr hu id it ja kn ko lt lv mk ml mr ne nl no pa pl pt ro "
    "ru sk sl so sq sv sw ta te th tl tr uk ur vi zh"
)
KNOWN = tuple(_CODES.split())
"""ISO 639-1 codes."""
OTHER_NAMES = {"zh-cn": "zh", "zh-tw": "zh", "nb": "no", "fil": "tl"}
"""Codes for what is told apart no further here."""
NO_LANGUAGE = "zxx"
"""Numbers, markup and the like."""
LONGEST = 10_000
"""Characters looked at."""
LEAST_SURE = 0.05
"""Probability below which nothing is said: a text without any known sequence gets the same for every language."""


def language_of(text: str) -> str | None:
    """The code of the likeliest language; None where there is too little to tell by. Short texts are often mistaken."""
    text = text[:LONGEST]
    if not any(map(str.isalpha, text)):
        return None
    code, _ = _identifier().classify(text)
    return code if code in KNOWN else None


@functools.cache
def _identifier() -> Any:
    """Imported and read late: the model takes most of a second."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True, min_confidence=LEAST_SURE)
    identifier.set_languages([*KNOWN, NO_LANGUAGE])
    return identifier


def preload() -> None:
    """Read the model now, so that no time limit pays for it."""
    language_of("hello")
