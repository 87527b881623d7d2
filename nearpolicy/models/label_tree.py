"""Allowed answers as a tree of tokens, and the probability of each as constrained decoding would draw it.

    "1" = [7], "2" = [8], "10" = [7, 3], end = [0]

    ()  -> 7, 8          two tokens to choose from: one distribution is asked for
    (7) -> 3, end        "1" is a prefix of "10", so its end decides
    (8)                  nothing to choose: "2" is complete

Only nodes with a choice need the model. A label's probability is the product along its path, each factor renormalised
over the tokens that are allowed there; over all labels they add up to 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


class LabelTree:
    """The labels of one question."""

    def __init__(self, labels: Mapping[str, Sequence[int]], end: int) -> None:
        """``labels``: each with its tokens. ``end``: the token that ends an answer. ValueError if two labels are the
        same tokens, or one has none."""
        paths = {label: tuple(ids) for label, ids in labels.items()}
        if len(set(paths.values())) != len(paths) or () in paths.values():
            raise ValueError(f"the labels {', '.join(labels)} are not told apart by their tokens")
        prefixes = {path[:cut] for path in paths.values() for cut in range(len(path))}
        self._paths = {label: (*path, end) if path in prefixes else path for label, path in paths.items()}
        allowed: dict[tuple[int, ...], set[int]] = {}
        for path in self._paths.values():
            for cut, token in enumerate(path):
                allowed.setdefault(path[:cut], set()).add(token)
        self.choices = {prefix: tuple(sorted(tokens)) for prefix, tokens in sorted(allowed.items()) if len(tokens) > 1}
        """Prefix -> the tokens of which one comes next."""

    def probabilities(self, logprobs: Mapping[tuple[int, ...], Mapping[int, float]]) -> dict[str, float]:
        """Label -> probability, from the log-probabilities of the allowed tokens at every node with a choice."""
        shares = {prefix: _shares(logprobs[prefix], tokens) for prefix, tokens in self.choices.items()}
        found = {}
        for label, path in self._paths.items():
            found[label] = math.prod(
                shares[path[:cut]][token] for cut, token in enumerate(path) if path[:cut] in shares
            )
        return found


def _shares(logprobs: Mapping[int, float], tokens: Sequence[int]) -> dict[int, float]:
    """exp, renormalised; equal shares if the model gives all of them no chance at all."""
    values = [logprobs.get(token, -math.inf) for token in tokens]
    top = max(values)
    weights: list[Any] = [math.exp(value - top) if top > -math.inf else 1.0 for value in values]
    return {token: weight / sum(weights) for token, weight in zip(tokens, weights, strict=True)}
