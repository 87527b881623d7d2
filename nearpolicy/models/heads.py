"""Hugging Face heads that score: sequence classification (one row of outputs per text) and token classification (one
per token). Frozen, without dropout, and with no weight that its files do not hold.

A text's score does not depend on the texts beside it, but for rounding: rows are padded on the right, where neither
causal attention nor a mask lets them look.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from nearpolicy.models.loading import load_weights

Level = Literal["sequence", "token"]


class ScoringHead:
    """A model with a classification head."""

    def __init__(self, model: Any, level: Level, pad: int | None) -> None:
        """``pad``: the tokenizer's padding token. Without one, and none in the config either, texts go one by one:
        which token of a padded row is the last could not be told."""
        self._model = model
        self._level = level
        if model.config.pad_token_id is None:
            model.config.pad_token_id = pad
        self._pad: int | None = model.config.pad_token_id

    @classmethod
    def load(cls, folder: Path, level: Level, dtype: torch.dtype, device: torch.device, pad: int | None) -> ScoringHead:
        """`ModelError` if the folder holds no such head: it would be made up, and score at random."""
        kind = {"sequence": "SequenceClassification", "token": "TokenClassification"}[level]
        return cls(load_weights(folder, kind, dtype).to(device).eval(), level, pad)

    @property
    def num_outputs(self) -> int:
        return int(self._model.config.num_labels)

    @property
    def max_length(self) -> int | None:
        length = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        return length if isinstance(length, int) and length > 0 else None

    def outputs(self, rows: Sequence[Sequence[int]], *, at_once: int, tokens: int) -> list[Tensor]:
        """[outputs] per row, or [T, outputs], in float32. At most ``at_once`` rows and ``tokens`` tokens in a pass."""
        found: dict[int, Tensor] = {}
        for places in self._batches([len(row) for row in rows], at_once, tokens):
            for place, output in zip(places, self._forward([rows[place] for place in places]), strict=True):
                found[place] = output
        return [found[place] for place in range(len(rows))]

    def _batches(self, lengths: Sequence[int], at_once: int, tokens: int) -> Iterator[list[int]]:
        """Rows of similar length together, so that little is padding."""
        batch: list[int] = []
        for place in sorted(range(len(lengths)), key=lambda i: lengths[i]):
            full = len(batch) >= at_once or lengths[place] * (len(batch) + 1) > tokens
            if batch and (full or self._pad is None):
                yield batch
                batch = []
            batch.append(place)
        if batch:
            yield batch

    @torch.inference_mode()
    def _forward(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        device, width = self._model.device, max(map(len, rows))
        ids = torch.full((len(rows), width), self._pad or 0, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row)
            mask[i, : len(row)] = 1
        logits = self._model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits.float().cpu()
        return [logits[i, : len(row)] if self._level == "token" else logits[i] for i, row in enumerate(rows)]
