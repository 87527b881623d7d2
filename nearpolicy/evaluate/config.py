"""When and how held-out questions are answered."""

from __future__ import annotations

from typing import Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from nearpolicy.settings import ConfigModel


class EvaluationConfig(ConfigModel):
    """Section `evaluation`: held-out accuracy, always under one fixed version of the weights. An answer is right if the
    task's first reward gives it 1 or more (before its weight), or says so in its part `correct`; and what that reward
    `requires` is met."""

    every: NonNegativeInt = 0
    """Steps between evaluations; 0 evaluates only before the first and after the last step."""
    prompts: PositiveInt = 200
    """Held-out prompts per task, at most."""
    temperature: float = Field(0.0, ge=0, le=100)
    """0 takes the most likely token: the same weights then give the same evaluation."""
    num_samples: PositiveInt = 1
    """Completions per prompt that accuracy is the mean over."""
    pass_k: list[PositiveInt] = Field(default_factory=list)
    """Report unbiased pass@k for these k, before and after training."""
    pass_samples: NonNegativeInt = Field(default_factory=lambda data: max(data.get("pass_k") or [0]))
    """Completions per prompt drawn for pass@k; the largest k unless set."""
    pass_temperature: float = Field(1.0, ge=0.001, le=100)
    """Temperature of those completions."""
    max_completion_length: PositiveInt | None = None
    """Longest completion in evaluation; left out: `sampling.max_completion_length`."""

    @model_validator(mode="after")
    def _samples_suffice(self) -> Self:
        if 0 < self.temperature < 0.001:
            raise ValueError(
                f"evaluation.temperature is {self.temperature:g}: logits divided by it leave the range of numbers; use "
                "0 for the most likely token, or at least 0.001"
            )
        if self.temperature == 0 and self.num_samples > 1:
            raise ValueError(
                f"evaluation.num_samples is {self.num_samples}, but at evaluation.temperature 0 all of them are the "
                "same; use num_samples: 1 or a temperature above 0"
            )
        if self.pass_samples < max(self.pass_k, default=0):
            raise ValueError(
                f"evaluation.pass_samples is {self.pass_samples}, but pass@{max(self.pass_k)} needs at least "
                f"{max(self.pass_k)} completions per prompt; raise evaluation.pass_samples"
            )
        if self.pass_samples and not self.pass_k:
            raise ValueError(f"evaluation.pass_samples is {self.pass_samples}, but evaluation.pass_k names no k")
        return self
