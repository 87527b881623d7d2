"""Where a run stands, as its store tells: all that a resume needs to know beside the weights.

admissions --+-- ended: consumed, failed, filtered, expired          nothing is left to do
             +-- filled, not ended                                   ready: waits for a step
             +-- the rest, and those aborted when the run stopped    unfinished: sampled anew under the same index,
                                                                     or gone on from what is stored
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from nearpolicy.records import Admission, Fate, Group, Position
from nearpolicy.store.payload import decode_text
from nearpolicy.store.schema import RECYCLED

if TYPE_CHECKING:
    from nearpolicy.store.reader import RunReader


_LAST = 64


def position_of(run: RunReader) -> Position:
    """Read it; the run must not be written meanwhile. Takes as long for a long run as for a short one, nearly."""

    def one(sql: str, *values: Any) -> Any:
        return run.query(sql, *values)[0][0]

    steps = one("SELECT count(*) FROM steps")
    # A kill may have come between a rollback and its publication: then newer ones do not count any more.
    published = run.last_version(steps)
    contained = 0 if published is None else published.version
    last = run.query("SELECT admission FROM consumption ORDER BY ordinal DESC LIMIT 1")
    undone = one("SELECT max(admission) FROM undone")  # of a batch that was found behind the one before it, too
    last_consumed = max((index for index in (*(row[0] for row in last), undone) if index is not None), default=None)
    ended = dict(
        run.query(
            "SELECT ending, count(*) FROM endings NATURAL JOIN admissions WHERE ending <> 'consumed' GROUP BY ending"
        )
    )
    filtered = run.query(
        "SELECT admission, reason FROM endings NATURAL JOIN admissions WHERE ending = ? AND ending <> 'consumed' "
        "AND admission > ?",
        *(Fate.FILTERED.value, -1 if last_consumed is None else last_consumed),
    )
    left = run.unfinished()
    ready = [admission for admission in left if run.is_filled(admission)]
    unfinished = tuple(a for a in (*left, *run.ended_as(Fate.ABORTED)) if a not in ready)
    return Position(
        steps=steps,
        published=published,
        branches=tuple(run.branches()),
        next_index=one("SELECT coalesce(max(admission), -1) + 1 FROM admissions"),
        num_prompts=one("SELECT coalesce(max(coalesce(prompt_index, admission)), -1) + 1 FROM admissions"),
        ready=tuple(run.group(admission.index, admission.attempt) for admission in ready),
        unfinished=unfinished,
        stopped=tuple(_stopped(run, unfinished)),
        consumed=dict(run.query("SELECT admission, step FROM consumption WHERE step >= ?", contained)),
        last_consumed=last_consumed,
        num_consumed=one("SELECT count(*) FROM consumption WHERE place IS NOT NULL"),
        num_undone=one("SELECT count(*) FROM undone WHERE place IS NOT NULL"),
        num_failed=ended.get(Fate.FAILED.value, 0),
        num_expired=ended.get(Fate.EXPIRED.value, 0),
        num_filtered=ended.get(Fate.FILTERED.value, 0),
        filtered={index: decode_text(reason) for index, reason in filtered},
        last_admissions=tuple(run.last_admissions(_LAST)),
        expired_prompts=_not_asked_again(run),
    )


def _stopped(run: RunReader, unfinished: Iterable[Admission]) -> Iterator[Group]:
    """The newest attempt that is stored, if it is the last one or was recycled, and its tokens are still there."""
    query = (
        "SELECT attempt, ending FROM groups JOIN endings USING (admission, attempt) WHERE admission = ? "
        "ORDER BY attempt DESC LIMIT 1"
    )
    for admission in unfinished:
        for attempt, ending in run.query(query, admission.index):
            is_wanted = attempt == admission.attempt or ending == RECYCLED
            if is_wanted and not run.is_dropped(admission.index, attempt):
                yield run.group(admission.index, attempt)


def _not_asked_again(run: RunReader) -> tuple[Admission, ...]:
    """Expired admissions whose prompt no later one has."""
    expired = run.ended_as(Fate.EXPIRED)
    if not expired:
        return ()
    places = run.query("SELECT coalesce(prompt_index, admission), max(admission) FROM admissions GROUP BY 1")
    latest = dict(places)
    return tuple(a for a in expired if latest[a.place] == a.index)
