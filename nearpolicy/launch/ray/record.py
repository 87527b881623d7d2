"""The run's record in an actor: what the run says goes there in bunches, and is written there.

    controller                                            actor, on the same node
    RunRecord -> Commits -> pack_calls  == message ==>    received -> StoreWriter
              <== answered when it is committed ==

Two messages are under way at most, so that one is packed while the other is written, and what is said meanwhile goes
together in the next one. The folder is read by the controller, so the actor is on its node, and its lock ends with the
actor's process. Ray does not start it again: what was said and not committed is lost with it, so that the run has to be
taken up from the record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from nearpolicy.errors import ConfigError, NearpolicyError, RecordLost, StandstillError
from nearpolicy.launch.ray.calls import Answer, answered, deaths_as
from nearpolicy.launch.ray.parcels import PARCELS, Sent, as_sent, kept, received
from nearpolicy.machine import collect_garbage_rarely
from nearpolicy.store.calls import Said
from nearpolicy.store.commits import MAX_PENDING, STALL_S, Commits
from nearpolicy.store.folder import RunFolder
from nearpolicy.store.record import RunRecord
from nearpolicy.store.tokens import TokenCounts
from nearpolicy.store.wire import pack_calls
from nearpolicy.store.writer import StoreWriter
from nearpolicy.waits import waiting

LOCK_WITHIN_S = 10.0
"""An actor that was killed, or whose controller was, may take a moment to end, and has the folder until then."""
GRACE_S = 10.0
"""How much longer than a commit may take an answer is waited for: the actor itself knows better what hangs."""


@dataclass(frozen=True, slots=True)
class Opened:
    """What the controller knows of a record."""

    wall_anchor: float
    tokens: TokenCounts


class RecordHost:
    """What runs inside the actor; never loads torch. It may have one record after the other."""

    def __init__(self) -> None:
        self._writer: StoreWriter | None = None
        self._failed: Answer | None = None

    def create(self, folder: RunFolder, options: Mapping[str, Any]) -> Answer:
        return answered(self._open, StoreWriter.create, folder, options)

    def open(self, folder: RunFolder, options: Mapping[str, Any]) -> Answer:
        return answered(self._open, StoreWriter.open, folder, options)

    def _open(self, make: Callable[..., StoreWriter], folder: RunFolder, options: Mapping[str, Any]) -> Opened:
        self.rest()
        self._writer = make(folder, **options)
        collect_garbage_rarely()  # of this process, which does nothing else
        return Opened(self._writer.database.wall_anchor, self._writer.database.tokens)

    def commit(self, calls: Sent) -> Answer:
        """In the order of the messages; after one that failed there is nothing more to commit."""
        if self._failed is None:
            answer = answered(self._commit, calls)
            if answer.error is None:
                return answer
            self._failed = answer
        return self._failed

    def _commit(self, calls: Sent) -> None:
        self._writer.commits.commit(received(calls))

    def flush(self, durable: bool) -> Answer:
        return answered(lambda: self._writer.flush(durable=durable))

    def release(self, oldest: int) -> None:
        self._writer.release(oldest)

    def keep(self, data: bytes) -> list[Any]:
        """A reference to a parcel, which holds as long as this actor lives. Does not wait for commits."""
        return kept(data)

    def close(self) -> Answer:
        writer, self._writer, self._failed = self._writer, None, None
        return answered(writer.close) if writer is not None else Answer()

    def rest(self) -> None:
        """Give up the record, if nobody has closed it."""
        self.close()


def start_record_actor(name: str | None = None) -> Any:
    """On the node of this process."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    made = ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={PARCELS: 1})(RecordHost)
    return made.options(name=name, scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False)).remote()


class ActorWriter:
    """Implements `nearpolicy.store.record.Writer`: what is said goes to the actor."""

    def __init__(
        self, actor: Any, folder: RunFolder, end: Callable[[], None], *, max_pending: int, stall_s: float
    ) -> None:
        """``end``: what becomes of the actor once it has let go of the folder."""
        self._actor = actor
        self._folder = folder
        self._end = end
        self._limit_s = stall_s + GRACE_S
        self.due: float | None = None
        self._under_way: deque[Any] = deque()
        """Answers to messages, the first one first."""
        self.commits = Commits(folder, self, max_pending=max_pending, stall_s=self._limit_s, most=max_pending // 4)
        self.say = self.commits.say

    # The sink of `commits`.

    def commit(self, calls: Sequence[Said], *, patient: bool) -> bool:
        try:
            packed = as_sent(pack_calls(calls))
        except Exception:
            if before := calls[: _first_that_fails(calls)]:
                self._send(as_sent(pack_calls(before)))
            self.finish()
            raise
        self._send(packed)
        while len(self._under_way) > 1:
            self._finish_first()
        return True

    def finish(self) -> None:
        while self._under_way:
            self._finish_first()

    def _send(self, packed: Sent) -> None:
        self._under_way.append(self._actor.commit.remote(packed))

    def _finish_first(self) -> None:
        self._answer(self._under_way.popleft(), self._limit_s)

    def settle(self, *, now: bool) -> None:
        """The actor presses onto the disk what it has committed."""

    # Of the record.

    def flush(self, *, durable: bool = False) -> None:
        self.commits.flush()
        with waiting("the run", "the record's actor to answer"):
            self._or_fail("flush", durable, limit_s=self._limit_s)

    def release(self, oldest: int) -> None:
        if not self.commits.is_closed:
            self._actor.release.remote(oldest)  # if it has died, the next call says so

    def close(self) -> None:
        if self.commits.is_closed:
            return
        try:
            self.commits.close()
            with waiting("the run", "the record's actor to close it"):
                self._or_fail("close", limit_s=None)  # it may have payloads to move
        finally:
            self._end()

    def _or_fail(self, verb: str, *arguments: Any, limit_s: float | None) -> None:
        """What goes wrong there is what every later call raises."""
        try:
            self._ask(verb, *arguments, limit_s=limit_s)
        except NearpolicyError as error:
            self.commits.fail(error)
        self.commits.check()

    def _ask(self, verb: str, *arguments: Any, limit_s: float | None) -> Any:
        return self._answer(getattr(self._actor, verb).remote(*arguments), limit_s)

    def _answer(self, reference: Any, limit_s: float | None) -> Any:
        import ray
        from ray.exceptions import GetTimeoutError

        try:
            with deaths_as(self._lost, 200):
                answer: Answer = ray.get(reference, timeout=limit_s)
        except GetTimeoutError:
            raise StandstillError(
                f"the actor that writes the record of {self._folder.path} has not answered for {limit_s:.0f} s"
            ) from None
        return answer.result()

    def _lost(self, why: str) -> RecordLost:
        return RecordLost(
            f"the actor that writes the record of {self._folder.path} has died ({why}). What it had committed is "
            f"there: `nearpolicy train --resume {self._folder.path}` goes on from that"
        )


def _first_that_fails(calls: Sequence[Said]) -> int:
    for place, call in enumerate(calls):
        try:
            pack_calls([call])
        except Exception:
            return place
    return len(calls)


class ActorRecord(RunRecord):
    """A record that is written by an actor; make one with `create` or `open`."""

    @classmethod
    def create(cls, actor: Any, folder: RunFolder, *, config: Mapping[str, Any], **options: Any) -> Self:
        """A new one in an existing folder that holds none; ``options`` as of `begun`, and of `StoreWriter.create`."""
        return cls.begun("create", actor, folder, config=config, **options)

    @classmethod
    def open(cls, actor: Any, folder: RunFolder, *, lock_within_s: float = LOCK_WITHIN_S, **options: Any) -> Self:
        """That of a run that goes on; ``options`` as of `begun`, and of `StoreWriter.open`."""
        return cls.begun("open", actor, folder, lock_within_s=lock_within_s, **options)

    @classmethod
    def begun(
        cls,
        verb: str,
        actor: Any,
        folder: RunFolder,
        *,
        end: Callable[[], None],
        limit_s: float,
        max_pending: int = MAX_PENDING,
        stall_s: float = STALL_S,
        **options: Any,
    ) -> Self:
        """``end``: what becomes of the actor once it has no record any more. ``limit_s``: for it to begin."""
        bounds = {"max_pending": max_pending, "stall_s": stall_s}
        try:
            with waiting("the run", "the actor of the record to begin"):
                opened = _opened(actor, verb, folder, options | bounds, limit_s)
        except BaseException:
            end()
            raise
        writer = ActorWriter(actor, folder, end, **bounds)
        return cls(folder, writer, wall_anchor=opened.wall_anchor, tokens=opened.tokens)


def _opened(actor: Any, verb: str, folder: RunFolder, options: Mapping[str, Any], limit_s: float) -> Opened:
    import ray
    from ray.exceptions import GetTimeoutError

    try:
        with deaths_as(lambda why: ConfigError(f"the actor of the record to begin: its process ended ({why})"), 600):
            answer: Answer = ray.get(getattr(actor, verb).remote(folder, dict(options)), timeout=limit_s)
    except GetTimeoutError:
        raise ConfigError(
            f"the actor of the record to begin: not within {limit_s:g} s (runtime.start_timeout_s)"
        ) from None
    return answer.result()
