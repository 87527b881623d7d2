"""Generators in actors: members of a fleet, and places where a lost one comes to life again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nearpolicy.errors import EngineError
from nearpolicy.generator.wire import unpack_told
from nearpolicy.launch.ray.calls import deaths_as
from nearpolicy.launch.ray.parcels import losses_told, sent
from nearpolicy.roles import Capabilities, Placed, Told, Weights


class GeneratorMember:
    """Implements `nearpolicy.roles.Member` over an actor that holds a `GeneratorHost`."""

    num_replicas = 1

    def __init__(self, name: str, actor: Any, capabilities: Capabilities) -> None:
        self.name = name
        self.actor = actor
        self._capabilities = capabilities

    async def submit_many(self, placed: Sequence[Placed]) -> None:
        with losses_told():
            await self._do("submit_many", sent(list(placed)))

    async def abort_many(self, tickets: Sequence[int]) -> None:
        await self._do("abort_many", tickets)

    async def collect(self, spacing_s: float) -> Told:
        with losses_told():
            head, parcel = await self._do("collect", spacing_s)
        return unpack_told(head, parcel)

    async def pause(self) -> None:
        await self._do("pause")

    async def sleep(self) -> None:
        await self._do("sleep")

    async def resume(self) -> None:
        await self._do("resume")

    async def load(self, weights: Weights) -> Mapping[str, str]:
        return (await self._do("take", weights)).result()

    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def examine(self, look: Callable[..., Any]) -> Any:
        return (await self.actor.do.remote("examine", look)).result()

    async def _do(self, verb: str, *arguments: Any) -> Any:
        """`EngineError` where Ray says that the actor is no more."""
        with deaths_as(EngineError):
            return await self.actor.do.remote(verb, *arguments)
