"""The strict base of every configuration section. It knows pydantic and nothing of the system."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict


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
