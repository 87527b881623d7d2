"""Parcels in Ray's object store: tokens go from the process that made them to those that compute with them, past the
one that directs the run.

Who has made a parcel hands it to its keeper before it tells anybody of it, so that whatever the controller hears of
outlives the generator that said it. The keeper's node holds the bytes; they go when no record refers to them any more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from nearpolicy.errors import RecordLost
from nearpolicy.launch.ray.calls import why_lost
from nearpolicy.messages import Message, pack, unpack

PARCELS = "parcels"
"""A thread of the keeper for them alone."""


@dataclass(frozen=True, slots=True)
class RayParcel:
    """Implements `nearpolicy.distant.Parcel`."""

    reference: Any

    def read(self) -> np.ndarray:
        import ray

        with _losses_named():
            return ray.get(self.reference)


class Keeper:
    """Where the actors of a run leave parcels. Travels to them."""

    def __init__(self, actor: Any) -> None:
        """``actor``: has a method ``keep``, in the concurrency group `PARCELS`, that answers what `kept` does."""
        self._actor = actor

    async def keep(self, data: bytes) -> RayParcel | None:
        """None if there is nothing to keep."""
        if not data:
            return None
        with _losses_named():
            [reference] = await self._asked(data)
        return RayParcel(reference)

    def keep_now(self, data: bytes) -> RayParcel | None:
        """`keep`, for a thread that may wait."""
        import ray

        if not data:
            return None
        with _losses_named():
            [reference] = ray.get(self._asked(data))
        return RayParcel(reference)

    def _asked(self, data: bytes) -> Any:
        return self._actor.keep.options(concurrency_group=PARCELS).remote(data)


@contextlib.contextmanager
def _losses_named() -> Iterator[None]:
    """What goes wrong with a parcel is the keeper's loss, whoever meets it first."""
    from ray.exceptions import RayError, RayTaskError

    try:
        yield
    except RayError as error:
        what, why = ("cannot keep more", error.cause) if isinstance(error, RayTaskError) else ("has died", error)
        raise RecordLost(
            f"tokens of the run are lost: the record's actor, which keeps them, {what} ({why_lost(why, 200)}). What "
            "was recorded is there: `nearpolicy train --resume` goes on from that"
        ) from error


@contextlib.contextmanager
def losses_told() -> Iterator[None]:
    """A `RecordLost` that was raised in another actor keeps its kind: nothing is wrong with that actor."""
    from ray.exceptions import RayTaskError

    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, RecordLost):
            raise error.cause from None
        raise


def kept(data: bytes) -> list[Any]:
    """Bytes as an object of this process, by reference; in a list, so that it is not followed on its way."""
    import ray

    return [ray.put(np.frombuffer(data, np.uint8))]


Sent = tuple[bytes, list[Any]]
"""A message as Ray passes it on: its head, and references of its parcels."""


def sent(value: Any) -> Sent:
    return as_sent(pack(value))


def as_sent(message: Message) -> Sent:
    return message.head, [parcel.reference for parcel in message.parcels]


def received(told: Sent) -> Any:
    """With arrays that are here; waits for them."""
    import ray

    head, references = told
    with _losses_named():
        return unpack(head, ray.get(references) if references else ())


async def awaited(told: Sent) -> Any:
    """As `received`, in an event loop."""
    head, references = told
    with _losses_named():
        return unpack(head, await asyncio.gather(*map(_fetched, references)) if references else ())


async def _fetched(reference: Any) -> np.ndarray:
    return await reference
