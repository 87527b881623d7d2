"""Weights by canonical Hugging Face name: what a model holds, its digests and fingerprint, and loading without gaps.

Tied tensors have several names and one memory; the first name in state-dict order is canonical, the others are aliases.
A load is complete or it is an error that names every tensor concerned.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from nearpolicy.errors import SyncError
from nearpolicy.machine import num_cores
from nearpolicy.models.pieces import fill, in_pieces

_CPU = torch.device("cpu")


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Canonical name -> tensor (parameters and persistent buffers), tied tensors once."""
    return {names[0]: tensor for names, tensor in _with_aliases(model)}


def _with_aliases(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    groups: dict[tuple[int, tuple[int, ...]], tuple[list[str], Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        # A tensor in pieces may have none here, and no address; one without memory has none in any case.
        plain = tensor.numel() and not tensor.is_meta and not in_pieces(tensor)
        key = (tensor.data_ptr(), tuple(tensor.shape)) if plain else (id(tensor), ())
        groups.setdefault(key, ([], tensor.detach()))[0].append(name)
    return list(groups.values())


def digest(tensor: Tensor) -> str:
    """xxh3-128 of the bytes of a tensor, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(memoryview(bytes_of(tensor.detach().cpu().contiguous()).numpy()))


def bytes_of(tensor: Tensor) -> Tensor:
    """[nbytes] uint8: the memory of a contiguous tensor. One of a single element is contiguous with any stride, which
    `view` would keep."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def digests(weights: Mapping[str, Tensor]) -> dict[str, str]:
    return _each(lambda _, tensor: digest(tensor), weights)


def _each(act: Callable[[str, Tensor], str], weights: Mapping[str, Tensor]) -> dict[str, str]:
    """``act`` on every tensor, on all cores, the largest first; neither copying nor digesting holds the interpreter."""
    order = sorted(weights, key=lambda name: -weights[name].nbytes)
    with ThreadPoolExecutor(num_cores(), thread_name_prefix="weights") as cores:
        found = dict(zip(order, cores.map(lambda name: act(name, weights[name]), order), strict=True))
    return {name: found[name] for name in weights}


def fingerprint(parts: Mapping[str, str]) -> str:
    """One digest for a whole set of weights: over names and digests, in name order."""
    total = xxhash.xxh3_128()
    for name in sorted(parts):
        total.update(f"{name}={parts[name]};".encode())
    return total.hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Some of the elements of a tensor, where they follow one another in its memory."""

    name: str
    begin: int
    """Of the first one."""
    values: Tensor
    """[n], in the dtype that was sent."""


class Arriving(Mapping[str, Tensor]):
    """Tensors that are still on their way, and come in stretches: each whole, in order, once. A model is filled with
    them as they come, so that nobody holds a second copy. Asked for one of them, as any mapping may be, this waits for
    all, in memory of their own."""

    def __init__(self, kinds: Mapping[str, tuple[Sequence[int], torch.dtype]], device: torch.device) -> None:
        """``kinds``: name -> shape and dtype. ``device``: where they come."""
        self.outline = {n: torch.empty(tuple(s), dtype=d, device="meta") for n, (s, d) in kinds.items()}
        """The tensors without their values."""
        self._device = device
        self._all: dict[str, Tensor] | None = None

    @abstractmethod
    def rounds(self) -> Iterator[Sequence[Stretch]]:
        """Stretches, at most one of each tensor at a time; their memory is used again when the next ones are asked for.
        `SyncError` once no more is to be had."""

    def __getitem__(self, name: str) -> Tensor:
        if self._all is None:
            found = {n: torch.empty_like(outline, device=self._device) for n, outline in self.outline.items()}
            for stretches in self.rounds():
                for each in stretches:
                    found[each.name].view(-1)[each.begin : each.begin + each.values.numel()] = each.values
            self._all = found
        return self._all[name]

    def __contains__(self, name: object) -> bool:
        return name in self.outline

    def __iter__(self) -> Iterator[str]:
        return iter(self.outline)

    def __len__(self) -> int:
        return len(self.outline)


@torch.no_grad()
def load_and_digest(model: nn.Module, incoming: Mapping[str, Tensor]) -> dict[str, str]:
    """`load_weights`, and the digests of the memory that the model computes from then."""
    if isinstance(incoming, Arriving) and _can_be_filled(model, incoming):
        return _filled(model, incoming)
    copies = {name: (target, source) for name, target, source in _fitting(model, incoming)}
    targets = {name: target for name, (target, _) in copies.items()}
    return _each(lambda name, _: _copied(*copies[name]), targets)


SLICE = 256 * 1024
"""Bytes that are copied and then digested before the next ones: few enough that the digest finds them in the cache, so
that the memory is read once for both."""


def _copied(target: Tensor, source: Tensor) -> str:
    """Copy, and the digest of what lies in ``target`` then."""
    if not target.is_contiguous():
        target.copy_(source)
        return digest(target)
    total = xxhash.xxh3_128()
    _copy_on(target, source, total)
    return total.hexdigest()


def _copy_on(target: Tensor, source: Tensor, total: xxhash.xxh3_128) -> None:
    """Copy into memory that is one stretch, and add what lies there then to a digest."""
    if not (target.device == source.device == _CPU and target.dtype == source.dtype):
        target.copy_(source)
        total.update(memoryview(bytes_of(target.cpu()).numpy()))
        return
    there, here = bytes_of(target).numpy(), bytes_of(source.contiguous()).numpy()
    for begin in range(0, there.size, SLICE):
        part = there[begin : begin + SLICE]
        np.copyto(part, here[begin : begin + SLICE])
        total.update(memoryview(part))


def _can_be_filled(model: nn.Module, incoming: Arriving) -> bool:
    """Whether each tensor of the model is one stretch of memory, and is sent under one name."""
    return all(
        target.is_contiguous() and sum(name in incoming for name in names) <= 1
        for names, target in _with_aliases(model)
    )


def _filled(model: nn.Module, incoming: Arriving) -> dict[str, str]:
    """Stretches into the model as they come, and the digests of what lies there then."""
    of = {id(outline): name for name, outline in incoming.outline.items()}
    totals, targets, names = {}, {}, {}
    for name, target, outline in _fitting(model, incoming.outline):
        sent = of[id(outline)]
        names[name], targets[sent], totals[sent] = sent, target.view(-1), xxhash.xxh3_128()

    def fill_in(each: Stretch) -> None:
        _copy_on(targets[each.name][each.begin : each.begin + each.values.numel()], each.values, totals[each.name])

    with ThreadPoolExecutor(num_cores(), thread_name_prefix="weights") as cores:
        for stretches in incoming.rounds():
            list(cores.map(fill_in, sorted(stretches, key=lambda each: -each.values.nbytes)))
    return {name: totals[sent].hexdigest() for name, sent in names.items()}


@torch.no_grad()
def load_weights(model: nn.Module, incoming: Mapping[str, Tensor]) -> None:
    """Copy ``incoming`` into the model in place; every tensor of the model must be given, under any of its names. Of a
    model in pieces each rank takes its own."""
    for _, target, source in _fitting(model, incoming):
        fill(target, source)


def require_fit(model: nn.Module, incoming: Mapping[str, Tensor]) -> None:
    """`SyncError` unless `load_weights` would take ``incoming``."""
    _fitting(model, incoming)


def _fitting(model: nn.Module, incoming: Mapping[str, Tensor]) -> list[tuple[str, Tensor, Tensor]]:
    """(canonical name, the model's tensor, what was sent) of each; `SyncError` unless all fit, and none is left."""
    problems, copies = [], []
    known: set[str] = set()
    for names, target in _with_aliases(model):
        known.update(names)
        given = [name for name in names if name in incoming]
        if not given:
            problems.append(f"{names[0]!r} is not filled by what was sent")
            continue
        source = incoming[given[0]]
        if source.shape != target.shape:
            problems.append(f"{given[0]!r} is {list(source.shape)} there and {list(target.shape)} here")
        elif any(incoming[name] is not source and not torch.equal(incoming[name], source) for name in given[1:]):
            problems.append(f"{' and '.join(given)} are one tensor here, but different ones were sent")
        else:
            copies.append((names[0], target, source))
    problems += [f"{name!r} was sent, but is unknown here" for name in incoming if name not in known]
    if problems:
        raise SyncError("weights do not fit, 0 tensors applied: " + "; ".join(problems))
    return copies


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Names whose digests differ or stand on one side only."""
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


def require_held(holder: str, version: int, wanted: Mapping[str, str], shown: Mapping[str, str]) -> None:
    """Raises `SyncError` with the names of the tensors that ``holder`` shows otherwise than they were sent."""
    wrong = differing(wanted, shown)
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise SyncError(
            f"{holder} does not hold version {version} after its load: "
            f"{', '.join(map(repr, wrong[:5]))}{more} differ from the learner's"
        )
