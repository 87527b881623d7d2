"""The roles of one run as actors: started in the order the session asks for, watched, and ended with the run.

    controller (this process)   pipeline, queue, environments, telemetry: the data flow; that which was started, or an
                                actor
    actor of the record         the only writer of the run's store, and keeper of its tokens; if it dies another session
                                goes on from what it had committed
    actor of a generator        an engine and its thread; a lost one is started again, and joins once it has shown the
                                present weights
    actor of a learner's rank   a rank; if one dies all begin anew, from the record
    actor of verifiers          a verifier and its worker processes; a lost one is started again

Ray itself restarts none of them: who comes back is brought up to date first.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from nearpolicy.config import RunConfig
from nearpolicy.errors import ConfigError, EngineError, described
from nearpolicy.launch.colocated import TakesTurns
from nearpolicy.launch.ray.calls import Answer, Place, require_same_versions, why_lost
from nearpolicy.launch.ray.cluster import Cluster
from nearpolicy.launch.ray.generators import GeneratorMember
from nearpolicy.launch.ray.hosts import GeneratorHost, LearnerHost, Loaded, VerifierHost
from nearpolicy.launch.ray.joining import Joining, name_of
from nearpolicy.launch.ray.learner import LearnerRanks
from nearpolicy.launch.ray.memory import require_memory
from nearpolicy.launch.ray.parcels import Keeper
from nearpolicy.launch.ray.record import ActorRecord
from nearpolicy.launch.ray.transports import Whereabouts, chosen, require_reached
from nearpolicy.launch.ray.verifiers import Demand, VerifierPools
from nearpolicy.launch.runtime import Functions, RunVerifier, Say
from nearpolicy.launch.sizes import model_shape
from nearpolicy.launch.words import count
from nearpolicy.machine import collect_garbage_rarely
from nearpolicy.placement import Rooms
from nearpolicy.store.folder import RunFolder
from nearpolicy.store.retention import Retention
from nearpolicy.verifier.config import reads_tokens
from nearpolicy.verifier.service import OnEvent, VerifierService
from nearpolicy.waits import waiting

if TYPE_CHECKING:
    from nearpolicy.generator.fleet import Fleet
    from nearpolicy.launch.build import Language
    from nearpolicy.launch.meter import Meter
    from nearpolicy.sync.publisher import Publisher


LOOKS_EVERY_S = 0.2
"""For a generator, while none is there."""
PEAKS_WITHIN_S = 5.0
"""A role that does not say in this time what memory it had is left out."""


class RayRuntime:
    """Implements `nearpolicy.launch.runtime.Runtime`."""

    def __init__(self, config: RunConfig, functions: Functions, say: Say) -> None:
        self._config = config
        self._functions = functions
        self._say = say
        self._folder = os.getcwd()
        generators = {"replicas": config.generator.replicas, "most_replicas": config.generator.most}
        self._rooms = Rooms.of_roles(config.runtime, ranks=config.learner.ranks, **generators)
        self._shape = model_shape(config.model)
        self._cluster: Cluster | None = None
        self._connecting = asyncio.Lock()
        self._generators: dict[int, Any] = {}
        self._ranks: list[Any] = []
        self._rank_places: Sequence[Place] = ()
        self._generator_places: dict[int, Place] = {}
        self._record: Any = None
        self._verifiers: dict[int, Any] = {}
        self._ranks_are_used = False
        self._fleet: Fleet | None = None
        self.publisher: Publisher | None = None
        self._garbage_as_before: Callable[[], None] = lambda: None
        self._joining: Joining | None = None
        self._said: set[str] = set()

    @property
    def _num_ranks(self) -> int:
        return self._config.learner.ranks

    def _process(self, role: str, place: int) -> Any:
        return self._cluster.process(self._rooms.of[role][place], role)

    async def _connected(self) -> Cluster:
        async with self._connecting:
            if self._cluster is None:
                rooms, address = self._rooms, self._config.runtime.address
                self._say("Ray starts on this machine" if address is None else f"joining the Ray cluster at {address}")
                cluster = await Cluster.connect(self._config.runtime, rooms.total)
                self._cluster = cluster
                await cluster.make_room(rooms.bundles)
            return self._cluster

    # Verifiers.

    def verifier(self, tell: OnEvent) -> RunVerifier:
        rewards = {task.name: task.rewards for task in self._config.tasks}
        runtime = self._config.runtime
        if not runtime.verifiers:
            return VerifierService(rewards, self._config.verifier, at_hand=self._functions, on_event=tell)
        self._pools = VerifierPools(
            self._spawn_verifier,
            Demand(runtime.verifiers, runtime.most, self._config.verifier.workers),
            lambda task: [reward.source for reward in rewards[task]],
            tell,
            self._say,
            silence_s=runtime.silence_s,
            reads_tokens=lambda task: reads_tokens(rewards[task]),
        )
        return self._pools

    async def _spawn_verifier(self, place: int) -> Any:
        cluster = await self._connected()
        if (before := self._verifiers.pop(place, None)) is not None:
            cluster.kill(before)
        actor = self._verifiers[place] = self._process("verifier", place)
        host = VerifierHost, self._config, dict(self._functions)
        await self._started(f"verifier {place} to begin", actor.become.remote(self._folder, *host))
        await self._started(f"verifier {place} to start", actor.do.remote("start"))
        return actor

    # The model.

    async def load(self, language: Language) -> None:
        cluster = await self._connected()
        self._record = cluster.record()  # it begins while models are loaded
        ranks, replicas = range(self._num_ranks), range(self._config.generator.replicas)
        self._ranks = [self._process("learner", rank) for rank in ranks]
        self._generators = {place: self._process("generator", place) for place in replicas}
        at_ranks, at_generators = await asyncio.gather(
            self._places_of(self._ranks), self._places_of(self._generators.values())
        )
        require_same_versions([*at_ranks, *at_generators])
        self._rank_places, self._generator_places = at_ranks, dict(enumerate(at_generators))
        self._transport = chosen(self._config, self._whereabouts())
        self._say(self._placed())
        if (shape := self._shape) is not None:
            require_memory(self._config, shape, at_ranks, at_generators, self._transport)
        found = await asyncio.gather(*map(self._load_rank, ranks), *map(self._load_generator, replicas))
        self._settle_numerics(found)

    def _placed(self) -> str:
        """Who is where, in a line."""
        there = self._whereabouts()
        nodes = len({place.node_id for place in there.everybody})
        ranks, generators = count(len(there.ranks), "rank"), count(len(there.generators), "generator")
        return f"{ranks} of the learner and {generators} on {count(nodes, 'node')}; weights go by {self._transport}"

    async def _places_of(self, actors: Iterable[Any]) -> list[Place]:
        return await asyncio.gather(*(self._started("an actor to begin", each.here.remote()) for each in actors))

    def _whereabouts(self) -> Whereabouts:
        return Whereabouts(self._rank_places, self._generator_places, self._cluster.num_nodes())

    def _settle_numerics(self, found: Sequence[Loaded]) -> None:
        """What all of them can keep: exact if all are, and then the strictest rule of all."""
        from nearpolicy.models.numerics import FAST

        if all(loaded.mode == "exact" for loaded in found):
            rules = [loaded.numerics for loaded in found]
            rows, threads = max(rule.min_rows for rule in rules), min(rule.max_threads for rule in rules)
            self._mode, self._rule = "exact", replace(rules[0], min_rows=rows, max_threads=threads)
        else:
            self._mode, self._rule = "fast", FAST
        self._bound = next(loaded.bound for loaded in found if loaded.mode == self._mode)

    @property
    def numerics(self) -> str:
        return self._mode

    async def _load_rank(self, rank: int) -> Loaded:
        actor, host = self._ranks[rank], (LearnerHost, self._config, rank, self._num_ranks)
        return await self._load_there(_rank_name(rank), actor, host)

    async def _load_generator(self, place: int) -> Loaded:
        actor, host = self._generators[place], (GeneratorHost, self._config, name_of(place))
        return await self._load_there(name_of(place), actor, host)

    async def _load_there(self, name: str, actor: Any, host: tuple[Any, ...]) -> Loaded:
        await self._started(f"{name} to begin", actor.become.remote(self._folder, *host))
        return await self._started(f"{name} to load the model", actor.do.remote("load_model"))

    async def _started(self, what: str, answer: Any) -> Any:
        """A step of the start; `ConfigError` if it takes too long or its actor dies."""
        from ray.exceptions import RayError, RayTaskError

        limit = self._config.runtime.start_timeout_s
        try:
            with waiting("the run", what):
                async with asyncio.timeout(limit):
                    found = await answer
        except TimeoutError:
            raise ConfigError(f"{what}: not within {limit:g} s (runtime.start_timeout_s)") from None
        except RayTaskError as error:  # the call itself: what was sent cannot be read there, say
            raise ConfigError(f"{what}: {described(error, 600)}") from error
        except RayError as error:
            raise ConfigError(
                f"{what}: its process ended ({why_lost(error, 600)}). If memory was short there, `nearpolicy check` "
                "says what a role needs"
            ) from error
        if not isinstance(found, Answer):
            return found
        for text in found.said:
            if text not in self._said:  # all of a kind say the same
                self._said.add(text)
                self._say(text)
        return found.result()

    # The record.

    def create_store(self, folder: RunFolder, config: Mapping[str, Any], packages: Mapping[str, str]) -> ActorRecord:
        return ActorRecord.create(self._record, folder, config=config, packages=packages, **self._of_store())

    def open_store(self, folder: RunFolder) -> ActorRecord:
        return ActorRecord.open(self._record, folder, **self._of_store())

    def _of_store(self) -> dict[str, Any]:
        config = self._config
        return {
            "sync": config.store.sync,
            "retention": Retention.of(config.store),
            "end": partial(self._cluster.end_record, self._record),
            "limit_s": config.runtime.start_timeout_s,
        }

    # Generator, learner, publication.

    async def start(self, tell: OnEvent) -> None:
        from nearpolicy.generator.fleet import Fleet
        from nearpolicy.sync.publisher import Publisher

        config = self._config
        self._tell = tell
        self._keeper = Keeper(self._record)
        self.learner = self._learner = LearnerRanks(
            self._fresh_ranks, partial(tell, "learner"), self._say, rank_timeout_s=config.runtime.rank_timeout_s
        )
        self._fleet = self.generator = Fleet(
            patience_s=config.runtime.start_timeout_s, silence_s=config.runtime.silence_s, on_event=self._of_fleet
        )
        self._any = AnyMember(self._fleet, config.runtime.start_timeout_s)
        if config.runtime.placement == "colocated":
            self.learner = TakesTurns(self._learner, self._fleet)
        begun = await asyncio.gather(
            self._learner.start(), *(self._member(place, actor) for place, actor in self._generators.items())
        )
        for member in begun[1:]:
            self._fleet.join(member)
        self.publisher = Publisher(
            self.learner,
            {link.member.name: link for link in self._fleet.links},
            timeout_s=config.sync.timeout_s,
            lost_come_back=True,
            deliver=self._learner.deliver,
            on_event=partial(tell, "sync"),
            on_behind=lambda name, reason: self._say(f"{name} is behind: {reason}"),
        )
        self._joining = Joining(
            self._fleet, self.publisher, begin=self._new_generator, end=self._end_generator, say=self._say
        )
        for place in range(config.generator.replicas, config.generator.most):
            bundle = self._rooms.of["generator"][place].bundle
            self._joining.add(place, self._cluster.more_room(bundle, self._rooms.more[bundle]))
        self._garbage_as_before = collect_garbage_rarely()

    async def _member(self, place: int, actor: Any) -> GeneratorMember:
        name = name_of(place)
        found = await self._started(f"{name} to start", actor.do.remote("start", self._mode, self._rule, self._keeper))
        return GeneratorMember(name, actor, found)

    def _of_fleet(self, kind: str, **fields: Any) -> None:
        self._tell("generator", kind, **fields)
        if kind == "lost" and self._joining is not None:
            self._joining.replace(_place(fields["name"]), fields["reason"])

    async def _new_generator(self, place: int) -> GeneratorMember:
        """One that may join; `ConfigError` if it lives where the run cannot go on as it began."""
        name, actor = name_of(place), self._process("generator", place)
        self._generators[place] = actor
        where: Place = await self._started(f"{name} to begin", actor.here.remote())
        require_same_versions([where])
        require_reached(self._transport, place, where, self._rank_places)
        self._generator_places[place] = where
        if self._shape is not None:
            require_memory(self._config, self._shape, [], [where], self._transport)
        self._require_as_exact(name, where, await self._load_generator(place))
        return await self._member(place, actor)

    def _end_generator(self, place: int) -> None:
        self._generator_places.pop(place, None)
        self._cluster.kill(self._generators.get(place))

    def _require_as_exact(self, name: str, where: Place, loaded: Loaded) -> None:
        """`ConfigError` for a node where the numerics of the run are not to be had."""
        rule, found = self._rule, loaded.numerics
        weaker = found.min_rows > rule.min_rows or found.max_threads < rule.max_threads
        if self._mode == "exact" and (loaded.mode != "exact" or weaker):
            raise ConfigError(
                f"{name} on {where.node}: its processor does not give the bits of the others; set "
                "run.numerics: fast to mix kinds of machines"
            )

    async def _fresh_ranks(self) -> Sequence[Any]:
        """Those that have loaded the model, the first time; later new ones in their places."""
        cluster = await self._connected()
        if self._ranks_are_used:
            for actor in self._ranks:
                cluster.kill(actor)
            self._ranks = [self._process("learner", rank) for rank in range(self._num_ranks)]
            await self._settle_ranks()
            await asyncio.gather(*map(self._load_rank, range(self._num_ranks)))
        self._ranks_are_used = True
        address = None
        if self._num_ranks > 1:
            address = await self._started("ranks of the learner to meet", self._ranks[0].do.remote("meeting_place"))
        starts = [actor.do.remote("start", self._rule, self._transport, address, self._keeper) for actor in self._ranks]
        names = map(_rank_name, range(self._num_ranks))
        await asyncio.gather(*(self._started(f"{n} to start", s) for n, s in zip(names, starts, strict=True)))
        return self._ranks

    async def _settle_ranks(self) -> None:
        """Those in the place of lost ones may be on other nodes, from which weights go another way."""
        places = await self._places_of(self._ranks)
        require_same_versions(places)
        self._rank_places = places
        self._transport = chosen(self._config, self._whereabouts())
        if self._shape is not None:
            require_memory(self._config, self._shape, places, [], self._transport)

    def remember(self, bring_back: Callable[[int], Awaitable[None]]) -> None:
        self._learner.bring_back = bring_back

    def meter(self, language: Language, tell: Callable[..., None]) -> Meter:
        from nearpolicy.launch import build

        config = self._config
        return build.make_meter(config, language, self.generator, self._any, self.learner, self._bound, tell, self._say)

    def usage(self) -> dict[str, float]:
        return self._fleet.usage()

    async def memory(self) -> dict[str, float]:
        """Of one generator and the first rank."""
        from nearpolicy.launch import build

        engine, learner = await asyncio.gather(self._any.examine(build.engine_memory), self._learner.memory())
        return engine | learner

    async def peaks(self) -> dict[str, float]:
        """Of those that are there and answer."""
        actors = {f"learner {rank}": actor for rank, actor in enumerate(self._ranks)}
        actors |= {name_of(place): actor for place, actor in self._generators.items()}
        actors |= {f"verifier {place}": actor for place, actor in self._verifiers.items()}
        peaks = await asyncio.gather(*map(_peak_of, actors.values()))
        return {name: peak for name, peak in zip(actors, peaks, strict=True) if peak is not None}

    async def stop(self) -> None:
        fleet, self._fleet = self._fleet, None
        if fleet is not None:
            self._garbage_as_before()
        joining, self._joining = self._joining, None
        if joining is not None:
            await joining.close()
        if fleet is not None:
            if self.publisher is not None:
                await self.publisher.close()
            await fleet.close()

    async def close(self) -> None:
        await self.stop()
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            await cluster.close()


@dataclass(frozen=True, slots=True)
class AnyMember:
    """Whatever generator is there, for a look inside; another one if it dies."""

    fleet: Fleet
    patience_s: float

    async def examine(self, look: Callable[..., Any]) -> Any:
        """`EngineError` if there is none for so long."""
        from ray.exceptions import RayError, RayTaskError

        limit = self.patience_s
        try:
            with waiting("a look at a generator", "one that holds the present weights"):
                async with asyncio.timeout(limit):
                    while True:
                        for link in self.fleet.up_to_date:
                            try:
                                return await link.member.examine(look)
                            except RayTaskError:
                                raise
                            except RayError:
                                pass  # the fleet hears of it
                        await asyncio.sleep(LOOKS_EVERY_S)
        except TimeoutError:
            raise EngineError(f"no generator could be looked at for {limit:g} s (runtime.start_timeout_s)") from None


async def _peak_of(actor: Any) -> float | None:
    from ray.exceptions import RayError

    try:
        async with asyncio.timeout(PEAKS_WITHIN_S):
            return await actor.peak_memory_mb.remote()
    except (RayError, TimeoutError):
        return None


def _place(name: str) -> int:
    return int(name.rpartition(" ")[2])


def _rank_name(rank: int) -> str:
    return f"rank {rank} of the learner"
