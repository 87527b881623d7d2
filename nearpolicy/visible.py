"""Text of users and models as a terminal or a page may show it: what it says is seen, and does nothing."""

from __future__ import annotations

import re

_ACTS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, among them those that open escape sequences; not \n and \t
    "\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # turn or hide text
    "\ud800-\udfff]"  # halves of a character, which UTF-8 cannot say
)


def visible(text: str) -> str:
    r"""The same text with every character that would act on its surroundings written as an escape, such as ``\x1b``."""
    return _ACTS.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode(), text)
