"""`RunRecord`: what a run says to its record, wherever that is written.

Promises
- What one call says is committed together or not at all, and calls are committed in the order in which they were made.
- After `flush` returns, everything said before it survives ``kill -9``. (Power loss may cost what was committed in the
  last 100 ms, never the order; ``sync="full"`` excludes that too, at the price of a disk flush per commit.)
- Memory is bounded: with ``max_pending`` calls waiting the next one waits as well. That wait has a bound and a name.
- An error where it is written is raised by the next call, whoever makes it. Calls before the failed one are committed,
  it and those after it are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, Self

from nearpolicy.records import (
    ROLLBACK,
    Admission,
    Batch,
    Branch,
    Event,
    Fate,
    Group,
    StepReport,
    VersionRecord,
)
from nearpolicy.store.calls import Call, Said, key_of, left
from nearpolicy.store.folder import RunFolder
from nearpolicy.store.payload import encode_json
from nearpolicy.store.recycled import Recycled
from nearpolicy.store.schema import EvaluatedSample
from nearpolicy.store.tokens import TokenCounts


class Writer(Protocol):
    """Who writes it. From any thread."""

    def say(self, call: Said) -> None:
        """Returns at once unless too many wait."""
        ...

    def flush(self, *, durable: bool) -> None: ...

    def release(self, oldest: int) -> None:
        """No resume goes back further than to the weights that contain so many steps."""
        ...

    def close(self) -> None:
        """Commit what was said, let go of the folder; nothing the second time."""
        ...


class RunRecord:
    """Implements `nearpolicy.roles.RunStore`. Thread-safe, but for what concerns groups: that is one thread's."""

    def __init__(self, folder: RunFolder, writer: Writer, *, wall_anchor: float, tokens: TokenCounts) -> None:
        self.folder = folder
        self.wall_anchor = wall_anchor
        """Wall time of the run's time zero, stored once; see `nearpolicy.telemetry.events.Recorder`."""
        self.recycled = Recycled()
        """What attempts of this life go on from."""
        self._writer = writer
        self._say = writer.say
        self._tokens = tokens

    # Every method returns at once unless the queue is full.

    def admitted(self, admission: Admission) -> None:
        self._say(admission)

    def filled(self, group: Group) -> None:
        self._say_of([group], group)
        self._tokens.filled(group)

    def consumed(self, batch: Batch, report: StepReport, fates: Mapping[tuple[int, int], Mapping[Fate, int]]) -> None:
        """``fates`` names every rollout that the step used up, also of groups that left their place empty."""
        frozen = {key: dict(value) for key, value in fates.items()}
        unsaid = tuple(group for group in batch.groups if not self._tokens.is_held(group))
        self._say_of(batch.groups, Call("consumed", (batch, report, frozen, unsaid)))
        self._tokens.ended(batch.groups, frozen.values())
        self._tokens.replayed(batch.step, report.rows or batch.rows)

    def discarded(self, group: Group, fate: Fate, reason: str) -> None:
        """All tokens of the group end with ``fate``; it needs not have been filled before."""
        told = left(group, is_held=self._tokens.is_held(group))
        self._say_of([group], Call("discarded", (told, fate, reason)))
        self._tokens.discarded(group, fate)

    def retried(self, group: Group, fate: Fate = Fate.FAILED, reason: str | None = None) -> None:
        """An attempt that came to nothing, and that another one follows: one transaction, so that no admission is ever
        without. ``reason``: the group's failure, if left out."""
        told = left(group, is_held=self._tokens.is_held(group))
        why = (group.failure or "") if reason is None else reason
        self._say_of([group], Call("retried", (told, fate, why)))
        self._tokens.discarded(group, fate)

    def branched(self, branch: Branch, stale: Sequence[Group]) -> None:
        """Weights from some version on are others than those that were recorded. ``stale`` are groups that wait for a
        step and hold tokens of the old ones: they expire, and their admissions go on as their next attempt. Nothing
        goes on from tokens of the old ones that were recycled, and after a rollback from none. After a rollback the
        steps that led to the old weights do not count any more."""
        expired = tuple(left(group, is_held=self._tokens.is_held(group)) for group in stale)
        withdrawn = self.recycled.withdraw(0 if branch.kind == ROLLBACK else branch.first)
        self._say(Call("branched", (branch, expired, [key_of(group.admission) for group in withdrawn])))
        self._tokens.given_up(withdrawn)
        for group in stale:
            self._tokens.discarded(group, Fate.EXPIRED)
        if branch.kind == ROLLBACK:
            self._tokens.undone(branch.first - 1)

    def lost(
        self,
        admissions: Sequence[Admission],
        reason: str,
        *,
        stopped: Sequence[Group] = (),
        recycled: Sequence[Group] = (),
    ) -> None:
        """Attempts that were running when a process ended, and of which nothing is recorded. Each goes on as its next
        attempt; one that had ended as aborted is opened again.

        ``stopped``: what is stored of some of these admissions. ``recycled``: those of them, or the rollouts of them,
        that the next attempts go on from: their tokens are in flight again."""
        wanted = {group.index for group in recycled}
        given_up = [group for group in stopped if group.index not in wanted]
        samples = {key_of(group.admission): [int(r.sample) for r in group.rollouts] for group in recycled}
        keys = [key_of(group.admission) for group in given_up]
        self._say(Call("lost", (tuple(admissions), reason, keys, samples)))
        self._tokens.given_up(given_up)
        self._tokens.recycled(recycled)
        self.recycled.keep(recycled)

    def published(self, record: VersionRecord, wall_s: float) -> None:
        self._say(Call("published", (record, wall_s)))

    def event(self, event: Event) -> None:
        self._say(event)

    def evaluated(self, samples: Sequence[EvaluatedSample]) -> None:
        """Held-out samples of one evaluation; saying the same ones again replaces them."""
        self._say(Call("evaluated", (tuple(samples),)))

    def note(self, key: str, value: Any) -> None:
        """A fact about the run as a whole, as JSON; the last value counts."""
        self._say(Call("noted", (key, encode_json(value))))

    def ledger(self) -> dict[Fate, int]:
        """Tokens by fate, as `RunReader.ledger` tells them once all that was said is committed."""
        return self._tokens.told()

    def checkpointed(self, oldest: int) -> None:
        """The oldest checkpoint that is kept contains so many steps: what came before may be moved or dropped, if
        `store.retention` says so."""
        self._writer.release(oldest)

    def flush(self, *, durable: bool = False) -> None:
        """Returns when everything said so far is committed; ``durable``: and survives a power cut."""
        self._writer.flush(durable=durable)

    def close(self) -> None:
        """Commit what was said, move what was released, let go of the folder. A second call does nothing."""
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def _say_of(self, groups: Iterable[Group], call: Said) -> None:
        """A call that stores these groups, unless they are stored already; what they go on from moves with it."""
        found = [resolved for resolved in map(self.recycled.resolve, groups) if resolved is not None]
        self._say(Call("resolved", (found, call)) if found else call)
        self._tokens.resolved(found)
