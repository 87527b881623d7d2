"""From the pieces that learner ranks hold to the tensors of a generator, and back.

    pieces (canonical name, holder, box) --plan--> copies --carry_out--> parts of a generator
                                                                             |
    canonical tensors  <------------------------ canonical ------------------+

Promise: every element of every tensor of the generator is written by exactly one copy, from a holder that has it, or
there is an error that names the tensor and the reason, and no copy. Proof: `Layout` admits only places that cover each
of its tensors exactly once, `plan` only pieces that cover each canonical tensor exactly once (replicas apart, of which
it takes one); the copies of a place are its box cut by those pieces, so they cover the place exactly once.

Nothing here knows of processes: boxes and names only, and tensors where copies are carried out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from nearpolicy.errors import SyncError
from nearpolicy.models.weights import bytes_of
from nearpolicy.roles import Shard

Box = tuple[tuple[int, int], ...]
"""First index, and the one behind the last, per dimension."""
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a canonical tensor, in the memory of one holder."""

    holder: int
    shape: Shape
    """Of the whole tensor."""
    box: Box
    dtype: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where a box of a canonical tensor lies in a generator."""

    part: int
    tensor: str
    box: Box
    """Of the canonical tensor."""
    at: tuple[int, ...]
    """First index in the generator's tensor. Dimensions that it has more than the canonical one come first, and the
    box takes one index of each."""

    @property
    def there(self) -> Box:
        """The box of the generator's tensor."""
        sizes = (1,) * (len(self.at) - len(self.box)) + tuple(high - low for low, high in self.box)
        return tuple((at, at + size) for at, size in zip(self.at, sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements that go from one holder to one part of a generator."""

    name: str
    holder: int
    source: Box
    """Of the holder's piece."""
    part: int
    tensor: str
    destination: Box
    """Of the part's tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The tensors of a generator, and which canonical box lies where. `SyncError` unless every element of every tensor
    has exactly one origin, and every canonical element at least one place."""

    shapes: Mapping[str, Shape]
    """Of the canonical tensors."""
    dtypes: Mapping[str, str]
    """Of the canonical tensors; those of the generator follow."""
    parts: tuple[Mapping[str, Shape], ...]
    """Of each part: tensor -> shape."""
    places: Mapping[str, tuple[Place, ...]]
    """Of each canonical tensor."""

    def __post_init__(self) -> None:
        there: dict[tuple[int, str], list[Box]] = defaultdict(list)
        for name, places in self.places.items():
            for place in places:
                there[place.part, place.tensor].append(place.there)
            found = _miscovered([place.box for place in places], self.shapes[name], at_most=None)
            if found is not None:
                raise SyncError(f"{name!r} {_text(found[0])} has no place in this generator")
        for part, tensors in enumerate(self.parts):
            for tensor, shape in tensors.items():
                found = _miscovered(there[part, tensor], shape)
                if found is not None:
                    box, count = found
                    filled = "is filled by nothing" if not count else f"is filled {count} times"
                    raise SyncError(f"{tensor!r} {_text(box)} of part {part} {filled}")


def plan(pieces: Mapping[str, Sequence[Piece]], layout: Layout) -> list[Copy]:
    """The copies that fill a generator. Of several holders of the same box it takes the one that sends least so far."""
    unwanted = sorted(pieces.keys() - layout.places.keys())
    if unwanted:
        raise SyncError(f"{unwanted[0]!r} has no place in this generator; build its layout from this model")
    sent: dict[int, int] = defaultdict(int)
    copies = []
    for name, places in layout.places.items():
        held = _held(name, layout, pieces.get(name, ()))
        for place in places:
            for box, holders in held.items():
                common = _common(box, place.box)
                if common is None:
                    continue
                holder = min(holders, key=lambda holder: (sent[holder], holder))
                sent[holder] += math.prod(high - low for low, high in common)
                inside = Place(place.part, place.tensor, common, _moved(place, common))
                copies.append(Copy(name, holder, _relative(common, box), place.part, place.tensor, inside.there))
    return copies


def _held(name: str, layout: Layout, pieces: Sequence[Piece]) -> dict[Box, list[int]]:
    """Box -> holders. `SyncError` unless the boxes cover the tensor exactly once."""
    shape, dtype = layout.shapes[name], layout.dtypes[name]
    if not pieces:
        raise SyncError(f"{name!r} is held by nobody")
    held: dict[Box, list[int]] = defaultdict(list)
    owners: set[int] = set()
    for piece in pieces:
        who = f"{name!r} of rank {piece.holder}"
        if piece.shape != shape:
            raise SyncError(f"{who} is a piece of {list(piece.shape)}, and the generator's is {list(shape)}")
        if piece.dtype != dtype:
            raise SyncError(f"{who} is {piece.dtype}, and the generator's is {dtype}; send it as {dtype}")
        if any(not 0 <= low <= high <= size for (low, high), size in zip(piece.box, shape, strict=True)):
            raise SyncError(f"{who} {_text(piece.box)} reaches beyond the tensor's {list(shape)}")
        if piece.holder in owners:
            raise SyncError(f"{who} is in two pieces; a rank holds one box of a tensor")
        owners.add(piece.holder)
        held[piece.box].append(piece.holder)
    solid = [box for box in held if all(low < high for low, high in box)]
    found = _miscovered(solid, shape)
    if found is not None:
        box, count = found
        if count:
            owners = sorted(h for b, hs in held.items() if _common(b, box) is not None for h in hs)
            raise SyncError(
                f"{name!r} {_text(box)} is held by ranks {owners} in boxes that overlap without being equal"
            )
        raise SyncError(f"{name!r} {_text(box)} is held by nobody")
    return {box: held[box] for box in solid}


def _miscovered(boxes: Sequence[Box], shape: Shape, at_most: int | None = 1) -> tuple[Box, int] | None:
    """The first box of a tensor that no box covers, or more than ``at_most``; and how many do."""
    if not shape:
        return None if boxes and (at_most is None or len(boxes) <= at_most) else ((), len(boxes))
    if not boxes and 0 not in shape:
        return tuple((0, size) for size in shape), 0
    for low, high in pairwise(sorted({0, shape[0], *(edge for box in boxes for edge in box[0])})):
        here = [box[1:] for box in boxes if box[0][0] <= low and high <= box[0][1]]
        found = _miscovered(here, shape[1:], at_most)
        if found is not None:
            return ((low, high), *found[0]), found[1]
    return None


def _common(a: Box, b: Box) -> Box | None:
    """What lies in both; None if that is nothing."""
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return both if all(low < high for low, high in both) else None


def _relative(box: Box, to: Box) -> Box:
    return tuple((low - base, high - base) for (low, high), (base, _) in zip(box, to, strict=True))


def _moved(place: Place, inner: Box) -> tuple[int, ...]:
    """First index, in the generator's tensor, of a box inside a place's."""
    extra = len(place.at) - len(inner)
    moved = (at + low - base for at, (low, _), (base, _) in zip(place.at[extra:], inner, place.box, strict=True))
    return (*place.at[:extra], *moved)


def _text(box: Box) -> str:
    return f"[{', '.join(f'{low}:{high}' for low, high in box)}]"


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in box)


def pieces_of(ranks: Sequence[Mapping[str, Shard]]) -> dict[str, list[Piece]]:
    """What the ranks of a learner hold, by name; the holder is the place in ``ranks``."""
    found: dict[str, list[Piece]] = defaultdict(list)
    for holder, shards in enumerate(ranks):
        for name, shard in shards.items():
            found[name].append(Piece(holder, tuple(shard.shape), box_of(shard), str(shard.tensor.dtype)))
    return dict(found)


def box_of(shard: Shard) -> Box:
    sizes = zip(shard.start, shard.tensor.shape, strict=True)
    return tuple((start, start + size) for start, size in sizes)


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Shard]:
    """What a learner of one rank holds."""
    return {
        name: Shard(tensor=tensor, shape=tuple(tensor.shape), start=(0,) * tensor.ndim)
        for name, tensor in tensors.items()
    }


def allocate(layout: Layout) -> list[dict[str, Tensor]]:
    """Memory for every part of a generator, not yet filled. `SyncError` where a tensor would need several dtypes."""
    dtypes: dict[tuple[int, str], str] = {}
    for name, places in layout.places.items():
        for place in places:
            other = dtypes.setdefault((place.part, place.tensor), layout.dtypes[name])
            if other != layout.dtypes[name]:
                raise SyncError(f"{place.tensor!r} would hold {other} and {layout.dtypes[name]} ({name!r}) at once")
    return [
        {tensor: torch.empty(shape, dtype=dtype_called(dtypes[part, tensor])) for tensor, shape in tensors.items()}
        for part, tensors in enumerate(layout.parts)
    ]


def dtype_called(name: str) -> torch.dtype:
    """The dtype whose text is ``name``."""
    return getattr(torch, name.removeprefix("torch."))


@torch.no_grad()
def carry_out(
    copies: Iterable[Copy], ranks: Sequence[Mapping[str, Shard]], parts: Sequence[Mapping[str, Tensor]]
) -> None:
    """The copies of a plan, within one process."""
    for copy in copies:
        source = ranks[copy.holder][copy.name].tensor[slices(copy.source)]
        target = parts[copy.part][copy.tensor][slices(copy.destination)]
        target.copy_(source.reshape(target.shape))


@torch.no_grad()
def canonical(layout: Layout, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What a generator holds, under canonical names: the way back, for digests. `SyncError` where places that hold the
    same elements differ."""
    found = {}
    for name, places in layout.places.items():
        held = [parts[place.part][place.tensor][slices(place.there)] for place in places]
        tensor = torch.empty(layout.shapes[name], dtype=held[0].dtype)
        for place, piece in zip(reversed(places), reversed(held), strict=True):  # the first of several copies stays
            tensor[slices(place.box)] = piece.reshape([high - low for low, high in place.box]).cpu()
        for place, piece in zip(places, held, strict=True):
            there = tensor[slices(place.box)]
            if not _same_bytes(there, piece.reshape(there.shape).cpu()):
                raise SyncError(f"{place.tensor!r} of part {place.part} differs from another copy of {name!r}")
        found[name] = tensor
    return found


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    """Of values only, -0.0 equals 0.0 and a NaN nothing."""
    return torch.equal(bytes_of(a.contiguous()), bytes_of(b.contiguous()))
