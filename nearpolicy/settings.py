"""The strict base of every configuration section. It knows pydantic and nothing of the system."""

from __future__ import annotations

import os
import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class ConfigModel(BaseModel):
    """A section of a recipe: unknown keys are errors, values are checked, and nothing writes to it afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return pattern


RegularExpression = Annotated[str, AfterValidator(_compiles)]
"""Text that Python's `re` accepts."""

Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""What random numbers depend on; no larger than the store can hold."""

Seconds = Annotated[float, Field(ge=0.001, le=1e6)]
"""A limit on time: from a millisecond, below which no clock here is true, to eleven days."""


def _can_be_a_path(path: str) -> str:
    try:
        parts = [len(os.fsencode(part)) for part in path.split("/")]
    except UnicodeEncodeError:
        raise ValueError("holds half of a character, which no path can; write it again") from None
    if "\0" in path:
        raise ValueError(f"is {path!r}; no path can hold the character NUL")
    if max(parts) > 255 or sum(parts) > 4000:
        raise ValueError(f"is a path of {sum(parts)} bytes with a name of {max(parts)}; no file can be called so")
    return path


PathText = Annotated[str, AfterValidator(_can_be_a_path)]
"""Text that a file system takes for a path."""
