"""The strict base of every configuration section. It knows pydantic and nothing of the system."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ConfigModel(BaseModel):
    """A section of a recipe: unknown keys are errors, values are checked, and nothing writes to it afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
