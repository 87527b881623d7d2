"""Back to the weights and the training state that a run's record leads to: after an end, and after a rollback.

    a checkpoint, or the initial weights -> recorded batches after it, learned again -> published to the generators

What is learned again is compared, at every version that was published, by fingerprint. A checkpoint of steps that do
not count is set aside.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nearpolicy.config import RunConfig
from nearpolicy.errors import RunFolderError
from nearpolicy.launch.rows import as_learned
from nearpolicy.launch.words import count
from nearpolicy.records import REMADE, ROLLBACK, Group, Position, VersionRecord
from nearpolicy.store.folder import RunFolder
from nearpolicy.store.lineages import Lineages
from nearpolicy.store.reader import RunReader
from nearpolicy.store.record import RunRecord
from nearpolicy.telemetry.batch import batch_metrics
from nearpolicy.telemetry.events import Recorder

if TYPE_CHECKING:
    from nearpolicy.launch.places import LearnerPlace
    from nearpolicy.learner.step import PolicyLearner
    from nearpolicy.rollout_queue.queue import StalenessBoundedQueue
    from nearpolicy.sync.publisher import Publisher


@dataclass(eq=False)
class Recovery:
    """What it takes; of a run that is under way."""

    config: RunConfig
    folder: RunFolder
    learner: LearnerPlace
    publisher: Publisher
    store: RunRecord
    telemetry: Recorder
    say: Callable[[str], None]
    warm_start: Callable[[], Awaitable[None]]
    """Make version 0 of the learner's initial weights."""
    warm_again: Callable[[], Awaitable[bool]]
    """The same of a learner that was lost. False: that was in the middle of it, it is there again, and goes on."""
    _undone_after: int | None = field(default=None, init=False)
    """While steps are undone: the last one that counts. What comes after it cannot be learned again."""

    async def take_up(self, found: Position) -> tuple[Position, int]:
        """The learner as it was after ``found.steps``. One version goes to the generators, the newest that was due: its
        number, and where the run stands now that groups of other weights have expired."""
        begin, steps = time.monotonic(), found.steps
        lineages = Lineages(found.branches)
        with RunReader(self.folder.path) as run:
            lines, counting = run.metrics(), {record.version: record for record in run.versions()}
        if any(line["step"] >= steps and "policy/loss" in line for line in lines):
            self.telemetry.undo(steps)  # told of, and lost: they happen again
        self._set_aside_weights(steps)  # a kill may have come before a rollback did
        await self._settle_warm_start()
        started = await self._load_checkpoint(steps, counting)
        if started is None and not self._warm_first:
            await self.warm_start()
        started = started or 0
        every = self.config.sync.weight_sync_steps
        due = steps if steps == self.config.run.steps else steps // every * every
        published = 0 if found.published is None else found.published.version
        due = max(due, published, self.learner.version)
        logged = {line["step"] for line in lines if "policy/loss" in line or "batch/groups" in line}
        stale = await self._learn_again(steps, lineages, counting, logged=logged, publish=due, ready=found.ready)
        if stale:  # as in `found`: the attempts that came to nothing; the next ones are open already
            ready = tuple(group for group in found.ready if group not in stale)
            ended = tuple(group.admission for group in stale)
            found = replace(found, ready=ready, unfinished=(*found.unfinished, *ended))
        begun = len(self.store.recycled.oldest_versions())
        anew = len(found.unfinished) - begun
        self.telemetry.event(
            "learner", "resume", seconds=time.monotonic() - begin, version=steps, step=steps, checkpoint=started,
            anew=anew, begun=begun,
        )  # fmt: skip
        self.say(
            f"taken up at step {steps}: {_where(started)}, "
            f"{count(steps - started, 'recorded step')} learned again; {count(len(found.ready), 'group')} wait for a "
            f"step, {count(begun, 'group')} go on from what was sampled, {count(anew, 'group')} begin anew"
        )
        return found, due

    async def roll_back(self, queue: StalenessBoundedQueue, version: int, reason: str) -> bool:
        """Undo the steps from ``version`` on. The decision is in the store before the learner or a generator hears of
        it. False, and nothing done, if what has to be learned again was dropped."""
        begin = time.monotonic()
        self.store.flush()
        with RunReader(self.folder.path) as run:
            before, versions = run.lineages, run.versions()
            num_taken = run.num_taken(version)
            if any(run.is_dropped(each.admission, each.attempt) for each in run.consumption() if each.step < version):
                self.say(
                    f"no way back to step {version}: store.retention has dropped what may have to be learned again"
                )
                return False
        branch = before.next(version + 1, ROLLBACK, reason)
        stale = queue.roll_back(version, num_taken, f"{ROLLBACK}: {reason}")  # no await between this and the flush
        self.store.branched(branch, stale)
        self.store.flush()
        self.telemetry.undo(version)
        lineages, counting = before.with_branch(branch), {r.version: r for r in versions if r.version <= version}
        self._set_aside_weights(version)
        self._undone_after = version
        if await self._load_checkpoint(version, counting) is None:
            await self.learner.begin_anew()
            await self.warm_start()
        self._undone_after = None
        of_other_bits = await self._learn_again(
            version, lineages, counting, logged=range(version), publish=version, ready=queue.ready
        )
        queue.begin_anew(of_other_bits, version)
        queue.retire(version)
        self.telemetry.event(
            "learner", "rollback", seconds=time.monotonic() - begin, version=version, step=version, reason=reason
        )
        self.say(
            f"rolled back to step {version}, as lineage {branch.lineage}: {reason}; "
            f"{count(len(stale) + len(of_other_bits), 'group')} that waited for a step began anew"
        )
        return True

    async def bring_back(self, version: int) -> None:
        """A learner that was lost and has the initial weights now, to where it was. Nothing is published: generators
        hold what they had. `RunFolderError` if it does not come back to the same bits, since what was sampled in the
        meantime is of other weights then: a resume sorts that out."""
        begin = time.monotonic()
        if self._undone_after is not None:
            version = min(version, self._undone_after)
        self.store.flush()
        with RunReader(self.folder.path) as run:
            lineages, counting = run.lineages, {r.version: r for r in run.versions() if r.version <= version}
        whole = await self.warm_again() if self._warm_first else True
        started = await self._load_checkpoint(version, counting, sets_aside=False) if whole else None
        if started is None and not self._warm_first:
            whole = await self.warm_again()
        if whole:
            await self._learn_again(version, lineages, counting, logged=range(version), publish=None)
        self.telemetry.event(
            "learner", "resume", seconds=time.monotonic() - begin, version=version, step=version,
            checkpoint=started or 0, anew=0, begun=0,
        )  # fmt: skip
        self.say(f"the learner is back at step {version}, from {_where(started)}")

    def _set_aside_weights(self, version: int) -> None:
        """Of `run.keep_versions`."""
        for path in self.folder.weights.glob("version-*.safetensors"):
            number = path.stem.removeprefix("version-")
            if number.isdecimal() and int(number) > version:
                path.rename(path.with_name(f"undone-{path.stem}-{time.time_ns()}{path.suffix}"))

    def rollbacks(self) -> int:
        """So far, in all lives of the run."""
        self.store.flush()
        with RunReader(self.folder.path) as run:
            return sum(branch.kind == ROLLBACK for branch in run.branches())

    @property
    def _warm_first(self) -> bool:
        """The reference is what the warm start makes, also where a checkpoint follows."""
        return self.config.objective.reference == "initial"

    async def _settle_warm_start(self) -> None:
        if self._warm_first:
            await self.warm_start()

    async def _load_checkpoint(
        self, steps: int, counting: Mapping[int, VersionRecord], *, sets_aside: bool = True
    ) -> int | None:
        """Steps that the learner's weights contain then; None if no checkpoint serves."""
        from nearpolicy.learner.checkpoint import load_checkpoint

        for version, path in self._usable_checkpoints(steps, sets_aside=sets_aside):
            try:
                expected = {counting[version].fingerprint} if version in counting else set()
                await self.learner.call(partial(load_checkpoint, checkpoint=path, expected=expected))
                return self.learner.version
            except RunFolderError as error:
                self.say(f"warning: {error}; going on from the one before it")
        return None

    def _usable_checkpoints(self, steps: int, *, sets_aside: bool) -> list[tuple[int, Path]]:
        """By version, newest first. ``sets_aside``: those of more steps, which do not count."""
        from nearpolicy.learner.checkpoint import checkpoints

        found = checkpoints(self.folder.checkpoints)
        for version, path in found if sets_aside else ():
            if version > steps:
                aside = path.with_name(f"undone-{path.name}-{time.time_ns()}")
                path.rename(aside)
                self.say(f"{path.name} is of steps that do not count; it is set aside as {aside.name}")
        return [(version, path) for version, path in reversed(found) if version <= steps]

    async def _learn_again(
        self,
        steps: int,
        lineages: Lineages,
        counting: Mapping[int, VersionRecord],
        *,
        logged: Container[int],
        publish: int | None,
        ready: Sequence[Group] = (),
    ) -> list[Group]:
        """Recorded batches up to ``steps``; the version ``publish`` goes to the generators. Where weights come out with
        other bits than those recorded they get a lineage of their own; those of the ``ready`` groups that hold tokens
        of the others are given back. With nothing to publish other bits are a `RunFolderError`."""
        learner, stale = self.learner, []
        with RunReader(self.folder.path) as run:
            while True:
                version = learner.version
                if await self._differs(counting.get(version)):
                    if publish is None:
                        raise RunFolderError(
                            f"version {version} learned again is not the recorded one to the bit (another kind of "
                            "processor, or numerics that do not repeat); `nearpolicy train --resume` goes on from what "
                            "was recorded, as a new lineage"
                        )
                    branch = lineages.next(version, REMADE, "recorded batches learned again gave other bits")
                    stale = [group for group in ready if group.newest_version >= version]
                    self.store.branched(branch, stale)
                    lineages, counting = lineages.with_branch(branch), {}
                    self.say(
                        f"version {version} learned again is not the recorded one to the bit (another kind of "
                        f"processor, or other package versions); going on as lineage {branch.lineage}"
                    )
                if version == publish:
                    await learner.call(_set_lineage, lineages.of(version))
                    await self._publish()
                if version == steps:
                    break
                batch = as_learned(self.config, run.batch(version))
                report = await self.learner.step(batch)
                if version not in logged:
                    self.telemetry.log_step(version, {**batch_metrics(batch), **report.metrics})
        await learner.call(_set_lineage, lineages.newest)
        return stale

    async def _differs(self, known: VersionRecord | None) -> bool:
        """Whether the learner's weights are not those that were published as this version."""
        if known is None:
            return False
        made = await self.learner.call(_fingerprint)
        if made != known.fingerprint and not known.version:
            raise RunFolderError(
                f"{self.folder.path} began with other weights than {self.config.model.path} holds now (fingerprints "
                f"{known.fingerprint} and {made}). Restore the model, or begin a new run"
            )
        return made != known.fingerprint

    async def _publish(self) -> None:
        begin = time.monotonic()
        record = await self.publisher.publish()
        self.store.published(record, time.monotonic() - begin)


def _where(started: int | None) -> str:
    return f"checkpoint step-{started}" if started else "the beginning"


def _set_lineage(learner: PolicyLearner, lineage: int) -> None:
    learner.lineage = lineage


def _fingerprint(learner: PolicyLearner) -> str:
    return learner.weights(None).record.fingerprint
