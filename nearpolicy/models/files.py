"""The weights of a model's folder, read when they are wanted and no further than wanted: some rows of one tensor.

    files.rows(name, begin, end)   of what a model of this folder has under that name, in its type

Most tensors lie in the files as the model has them, and their rows are read from there. Where files hold them otherwise
(experts one by one, say), transformers' own conversion puts them together: out of those experts alone that are asked
for, where it does no more than stack them; else out of the whole, one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nearpolicy.errors import ModelError, described
from nearpolicy.models.folders import weight_files


@dataclass(slots=True)
class _Source:
    """What one tensor of the model is made of, or several that are made together."""

    conversion: Any | None = None
    """None: it lies in the files as it is."""
    stacks: bool = False
    """Whether the rows of the model's tensor are tensors of the files, which the conversion only stacks."""
    parts: list[tuple[str, str]] = field(default_factory=list)
    """(Name in the files, pattern of the conversion that it belongs to), in the order of the conversion."""


class WeightFiles:
    """Of one folder, as a model of transformers wants them. Holds no weights."""

    def __init__(self, model: nn.Module, folder: Path, device: torch.device) -> None:
        """``model``: made from this folder and found to fit it, without memory for its weights. ``device``: where it is
        to compute."""
        self.model = model
        self.device = device
        self._folder = folder
        self._where: dict[str, Any] = {}
        """Name in the files -> the open file."""
        for file in weight_files(folder):
            opened = _opened(file)
            self._where |= dict.fromkeys(opened.keys(), opened)
        wanted = model.state_dict(keep_vars=True)
        self._shapes = {name: tensor.shape for name, tensor in wanted.items()}
        self._dtypes = {name: tensor.dtype for name, tensor in wanted.items()}
        self._sources = _sources(model, self._where, wanted)
        tied = {id(wanted[name]): source for name, source in self._sources.items() if source.conversion is None}
        for name, tensor in wanted.items():  # files have one of them
            if name not in self._sources and id(tensor) in tied:
                self._sources[name] = tied[id(tensor)]
        self._made: tuple[_Source | None, dict[str, Tensor]] = (None, {})
        """The last tensors that were converted whole: those that come of one conversion are asked for in a row."""

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def rows(self, name: str, begin: int = 0, end: int | None = None) -> Tensor:
        """Rows from ``begin`` up to ``end`` of a tensor of the model, in main memory; all of it without them. Memory of
        its own, and no more than that much. `ModelError` if they cannot be read."""
        source = self._sources[name]
        if end is not None and begin >= end:  # more ranks than rows
            return torch.empty(0, *self._shapes[name][1:], dtype=self._dtypes[name])
        try:
            if source.conversion is None:
                return self._read(source.parts[0][0], name, begin, end)
            if source.stacks and end is not None:
                return self._converted(source, name, begin, end)[name]
            if self._made[0] is not source:
                self._made = (None, {})  # before the next ones are there
                self._made = source, self._converted(source, name)
            found = self._made[1][name]
            return found if end is None else found[begin:end].clone()
        except ModelError:
            raise
        except Exception as error:  # foreign files: cut off since they were opened, say
            raise ModelError(
                f"model {str(self._folder)!r} comes with weights that cannot be read: {name}: {described(error)}; make "
                "the folder whole, or name another model"
            ) from error

    def close(self) -> None:
        """Nothing is read any more."""
        self._where, self._made = {}, (None, {})

    def _read(self, key: str, name: str, begin: int = 0, end: int | None = None) -> Tensor:
        lying = self._where[key].get_slice(key)
        tensor = lying[begin:end] if end is not None and lying.get_shape() else lying[...]
        return tensor.to(self._dtypes[name])

    def _converted(self, source: _Source, name: str, begin: int = 0, end: int | None = None) -> dict[str, Tensor]:
        conversion, seen = deepcopy(source.conversion), dict.fromkeys(source.conversion.source_patterns, 0)
        for key, pattern in source.parts:
            number, seen[pattern] = seen[pattern], seen[pattern] + 1
            if end is None or begin <= number < end:
                conversion.add_tensor(name, key, pattern, partial(self._read, key, name))
        return _results(conversion, name, self.model)


def _opened(file: Path) -> Any:
    from safetensors import safe_open

    try:
        # Read, not mapped: pages of a mapped file stay in this process as long as it is open.
        return safe_open(file, framework="pt", device="cpu", backend="pread")
    except Exception as error:
        raise ModelError(f"{file} cannot be read: {described(error)}; fetch or save the model again") from error


def _sources(model: nn.Module, keys: Mapping[str, Any], wanted: Mapping[str, Tensor]) -> dict[str, _Source]:
    """Name in the model -> what it is made of, sorted out as `transformers.core_model_loading` does, by its rules."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = getattr(model, "_weight_conversions", None) or []  # of those that it knows, the ones used here
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    found: dict[str, _Source] = {}
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, wanted)
        if name in wanted:
            conversion = None if pattern is None else by_pattern[pattern]
            found.setdefault(name, _Source(conversion)).parts.append((key, pattern or key))
    for name, source in list(found.items()):
        if source.conversion is not None:
            shapes = _tried(source, name, keys, model)
            source.stacks = _only_stacks(source, shapes.get(name))
            found |= dict.fromkeys(shapes, source)
    return found


def _tried(source: _Source, name: str, keys: Mapping[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """What a conversion makes, in tensors without memory."""
    conversion = deepcopy(source.conversion)
    for key, pattern in source.parts:
        shape = keys[key].get_slice(key).get_shape()
        conversion.add_tensor(name, key, pattern, partial(torch.empty, shape, device="meta"))
    return _results(conversion, name, model)


def _results(conversion: Any, name: str, model: nn.Module) -> dict[str, Tensor]:
    found = conversion.convert(name, model=model, config=model.config)
    return {target: each[0] if isinstance(each, list) else each for target, each in found.items()}


def _only_stacks(source: _Source, made: Tensor | None) -> bool:
    """Whether row i of the result is made of the i-th tensor of each pattern, and of no other."""
    from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

    first, *others = source.conversion.operations
    if made is None or not isinstance(first, MergeModulelist) or first.dim != 0:
        return False
    for each in others:
        dims = [each.dim] if isinstance(each, Concatenate) else []
        dims = [each.dim0, each.dim1] if isinstance(each, Transpose) else dims
        if not dims or any(dim % made.dim() == 0 for dim in dims):
            return False
    patterns = [pattern for _, pattern in source.parts]
    return all(patterns.count(pattern) == made.shape[0] for pattern in set(patterns))
