"""What each call writes: rows of the run's database, inside a transaction that somebody else begins and ends.

What comes one after another of admissions and of groups is written together, and one statement writes up to 64 rows:
SQLite gives the interpreter lock away for every statement, and beside busy threads getting it back costs more than a
row. I2 is checked here: each attempt at an admission ends once, and a rollout's fates add up to its tokens.
"""

from __future__ import annotations

import functools
import itertools
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from nearpolicy.errors import NearpolicyError
from nearpolicy.records import (
    ROLLBACK,
    Admission,
    Batch,
    Branch,
    Event,
    Fate,
    Group,
    Outcome,
    Rollout,
    StepReport,
    Verdict,
    VersionRecord,
)
from nearpolicy.store.calls import Key, Left, Said, Step, key_of, prompt_data, step_of
from nearpolicy.store.payload import Trained, encode_arrays, encode_group, encode_json, encode_rows, encode_text
from nearpolicy.store.recycled import Resolved
from nearpolicy.store.retention import Moved
from nearpolicy.store.schema import CONSUMED, RECYCLED, SEGMENTS, TRAINED, EvaluatedSample

_T = TypeVar("_T")


class Statements:
    """Over a connection; not for threads."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    def apply(self, calls: Sequence[Said]) -> None:
        """What comes one after another of admissions and of groups is written together, admissions first: they do not
        depend on groups. Nothing in a commit depends on its events."""
        admissions: list[Admission] = []
        groups: list[Group] = []
        events: list[Event] = []
        alike: Mapping[type, list[Any]] = {Admission: admissions, Group: groups, Event: events}

        def write() -> None:
            self._put_admissions(admissions)
            self._put_groups(groups)
            admissions.clear()
            groups.clear()

        for call in calls:
            if (others := alike.get(type(call))) is not None:
                others.append(call)
            else:
                write()
                getattr(self, call.verb)(*call.arguments)
        write()
        self.happened(events)

    # Verbs of calls, in one transaction.

    def consumed(
        self,
        batch: Batch,
        report: StepReport,
        fates: Mapping[tuple[int, int], Mapping[Fate, int]],
        unsaid: Sequence[Group],
    ) -> None:
        self.used(step_of(batch, report), fates, unsaid)

    def used(self, step: Step, fates: Mapping[tuple[int, int], Mapping[Fate, int]], unsaid: Sequence[Group]) -> None:
        self._run("INSERT INTO steps VALUES (?, ?, ?, ?)", step.step, step.places, step.version, step.updates)
        self._put_groups(unsaid)
        attempts = dict(step.groups)
        placed: list[tuple[int | None, int, int]] = [(place, *key) for place, key in enumerate(step.groups)]
        if further := sorted({index for index, _ in fates} - attempts.keys()):
            newest = dict(sorted(self._found("SELECT admission, attempt FROM groups", further)))
            for index in further:
                if index not in newest:
                    raise NearpolicyError(f"step {step.step} used up group {index}, which was never filled")
            attempts |= newest
            placed += [(None, index, newest[index]) for index in further]
        self._end_all([(index, attempt) for _, index, attempt in placed], CONSUMED, f"step {step.step}")
        consumption = [(step.step, *where) for where in placed]
        self._insert("consumption (step, place, admission, attempt)", consumption)
        by_group: dict[Key, dict[int, Mapping[Fate, int]]] = {key: {} for key in attempts.items()}
        for (index, sample), of_sample in fates.items():
            by_group[index, attempts[index]][sample] = of_sample
        self._put_fates(by_group)
        self._insert("payloads", [(*key, TRAINED, encode_rows(rows)) for key, rows in step.trained])
        replayed = [
            (step.step, ordinal, *key, row.sample, row.place, tokens, _arrays_of(row))
            for ordinal, (key, tokens, row) in enumerate(step.replayed)
        ]
        self._insert("replayed", replayed)

    def discarded(self, group: Left, fate: Fate, reason: str) -> None:
        if group.unsaid is not None:
            self._put_groups([group.unsaid])
        self._end_all([group.key], fate.value, reason)
        self._put_fates({group.key: {sample: {fate: tokens} for sample, tokens in group.sampled.items()}})

    def retried(self, group: Left, fate: Fate, reason: str) -> None:
        self.discarded(group, fate, reason)
        self._put_admissions([replace(group.admission, attempt=group.admission.attempt + 1)])

    def branched(self, branch: Branch, stale: Sequence[Left], withdrawn: Sequence[Key]) -> None:
        self._run(
            "INSERT INTO branches VALUES (?, ?, ?, ?, ?)",
            *(branch.lineage, branch.parent, branch.first, branch.kind, encode_text(branch.reason)),
        )
        for group in stale:
            self.retried(group, Fate.EXPIRED, f"{branch.kind}: {branch.reason}")
        self._put_given_up(withdrawn)
        if branch.kind == ROLLBACK:
            self._undo_steps(branch)

    def lost(
        self,
        admissions: Sequence[Admission],
        reason: str,
        stopped: Sequence[Key],
        recycled: Mapping[Key, Sequence[int]],
    ) -> None:
        """``recycled``: samples of each attempt whose tokens are in flight again."""
        for admission in admissions:
            query = "SELECT 1 FROM endings WHERE admission = ? AND attempt = ?"
            if not one(self._db, query, admission.index, admission.attempt):
                self._end_all([(admission.index, admission.attempt)], Fate.LOST.value, reason)
            self._put_admissions([replace(admission, attempt=admission.attempt + 1)])
        self._put_given_up(stopped)
        for key, samples in recycled.items():
            self._run("UPDATE endings SET ending = ? WHERE admission = ? AND attempt = ?", RECYCLED, *key)
            for sample in samples:
                query = "DELETE FROM fates WHERE admission = ? AND attempt = ? AND sample = ?"
                self._run(query, *key, sample)

    def resolved(self, found: Iterable[Resolved], call: Said) -> None:
        """What the attempts that are stored now hold is there alone; the rest is aborted."""
        for each in found:
            key = (each.index, each.attempt)
            for sample in each.moved:
                for table in ("fates", "verdicts", "rollouts"):
                    self._run(f"DELETE FROM {table} WHERE admission = ? AND attempt = ? AND sample = ?", *key, sample)
            self._put_left(key)
        self.apply([call])

    def published(self, record: VersionRecord, wall_s: float) -> None:
        query = "SELECT fingerprint FROM versions WHERE lineage = ? AND version = ?"
        known = one(self._db, query, record.lineage, record.version)
        if known is not None and known != record.fingerprint:
            raise NearpolicyError(
                f"version {record.version} of lineage {record.lineage} has fingerprint {known}; the same name cannot "
                f"be given to weights with fingerprint {record.fingerprint}: open a new lineage"
            )
        self._run(
            "INSERT OR IGNORE INTO versions (lineage, version, updates, fingerprint, parent, wall_s, digests) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            *(record.lineage, record.version, record.updates, record.fingerprint, record.parent, float(wall_s)),
            encode_json(record.digests) if record.digests else None,
        )

    def evaluated(self, samples: Iterable[EvaluatedSample]) -> None:
        for s in samples:
            self._run(
                "INSERT OR REPLACE INTO evaluations (lineage, version, task, mode, temperature, row, sample, prompt, "
                "text, correct, value, tokens, finish) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                *(s.lineage, s.version, encode_text(s.task), s.mode, float(s.temperature), s.row, s.sample),
                *(encode_text(s.prompt), encode_text(s.text)),
                *(None if s.correct is None else int(s.correct), s.value, s.num_tokens, s.finish),
            )

    def noted(self, key: str, data: bytes) -> None:
        self._run("INSERT OR REPLACE INTO run VALUES (?, ?)", key, data)

    def happened(self, events: Sequence[tuple[Any, ...]]) -> None:
        """Events, or what is left of them on a way between processes."""
        self._insert(_EVENTS, [(*values, encode_json(numbers)) for *values, numbers in events])

    def moved(self, rows: Sequence[Moved]) -> None:
        told = [(row.admission, row.attempt, row.what, row.file, row.part) for row in rows]
        self._db.executemany("INSERT INTO moved VALUES (?, ?, ?, ?, ?)", told)
        query = "DELETE FROM payloads WHERE admission = ? AND attempt = ? AND what = ?"
        self._db.executemany(query, [row[:3] for row in told])

    def failed(self, error: Exception) -> None:
        """Something beside the writer cannot go on, and neither may the run."""
        raise error

    # What they are made of.

    def _put_admissions(self, admissions: Sequence[Admission]) -> None:
        rows = []
        for admission in admissions:
            prompt = admission.prompt
            numbers = (admission.index, admission.attempt, admission.seed, admission.version)
            rows.append((*numbers, encode_text(prompt.task), prompt_data(prompt), admission.prompt_index))
        later = "ON CONFLICT (admission) DO UPDATE SET attempt = max(attempt, excluded.attempt)"
        self._insert("admissions", rows, later)

    def _put_groups(self, groups: Sequence[Group]) -> None:
        """Idempotent, so that whoever ends a group can be sure that it is there."""
        by_key = {key_of(group.admission): group for group in reversed(groups)}  # the first of a key stays
        indices = sorted({index for index, _ in by_key})
        there = set(self._found("SELECT admission, attempt FROM groups", indices))
        new = {key: by_key[key] for key in reversed(by_key) if key not in there}
        if not new:
            return
        attempts = dict(self._found("SELECT admission, attempt FROM admissions", indices))
        self._put_admissions([g.admission for (index, attempt), g in new.items() if attempts.get(index, -1) < attempt])
        rows: dict[str, list[tuple[Any, ...]]] = {"groups": [], "rollouts": [], "verdicts": [], "payloads": []}
        for key, group in new.items():
            failure = None if group.failure is None else encode_text(group.failure)
            rows["groups"].append((*key, group.admission.version, group.oldest_version, failure))
            # A failed group may hold rollouts that nobody has judged.
            judged = list(group.verdicts or ({},) * len(group.rollouts))
            rewards = list(group.rewards or (None,) * len(group.rollouts))
            if group.baseline is not None:
                judged, rewards = [*judged, group.baseline.verdicts], [*rewards, group.baseline.reward]
            for rollout, of_it, reward in zip(group.everything, judged, rewards, strict=True):
                rows["rollouts"].append(_rollout_row(key, rollout, reward))
                sample = (*key, int(rollout.sample))
                rows["verdicts"] += [_verdict_row(sample, *told) for told in enumerate(of_it.items())]
            rows["payloads"].append((*key, SEGMENTS, encode_group(group.everything)))
        for table, of_table in rows.items():
            self._insert(table, of_table)

    def _undo_steps(self, branch: Branch) -> None:
        first, reason = branch.first - 1, f"{branch.kind}: {branch.reason}"
        columns = "step, place, admission, attempt"
        self._run(
            f"INSERT INTO undone (lineage, {columns}) SELECT ?, {columns} FROM consumption WHERE step >= ?",
            *(branch.lineage, first),
        )
        self._run(
            "UPDATE endings SET reason = ? WHERE (admission, attempt) IN "
            "(SELECT admission, attempt FROM consumption WHERE step >= ?)",
            *(encode_text(reason), first),
        )
        self._run("DELETE FROM consumption WHERE step >= ?", first)
        self._run("DELETE FROM replayed WHERE step >= ?", first)
        self._run("DELETE FROM steps WHERE step >= ?", first)

    def _put_given_up(self, keys: Iterable[Key]) -> None:
        """Aborted, those too that had been recycled."""
        for key in keys:
            query = "UPDATE endings SET ending = ? WHERE admission = ? AND attempt = ? AND ending = ?"
            self._run(query, Fate.ABORTED.value, *key, RECYCLED)
            self._put_left(key)

    def _put_left(self, key: Key) -> None:
        """Rollouts of an attempt without a fate are aborted."""
        self._run(
            "INSERT INTO fates SELECT admission, attempt, sample, ?, sampled FROM rollouts WHERE admission = ? AND "
            "attempt = ? AND sampled > 0 AND sample NOT IN "
            "(SELECT sample FROM fates WHERE admission = ? AND attempt = ?)",
            *(Fate.ABORTED.value, *key, *key),
        )

    def _end_all(self, keys: Sequence[Key], ending: str, reason: str) -> None:
        told = self._found("SELECT admission, attempt, ending FROM endings", [index for index, _ in keys])
        before = {(index, attempt): ended for index, attempt, ended in told}
        for index, attempt in keys:
            if (index, attempt) in before:
                found = before[index, attempt]
                raise NearpolicyError(f"admission {index} (attempt {attempt}) ended as {found} and again as {ending}")
            before[index, attempt] = ending
        self._insert("endings", [(*key, ending, encode_text(reason)) for key in keys])

    def _put_fates(self, by_group: Mapping[Key, Mapping[int, Mapping[Fate, int]]]) -> None:
        """Every rollout of each group at once, and I2 checked: what the fates say is what was sampled."""
        sampled: dict[tuple[int, int], dict[int, int]] = {}
        query = "SELECT admission, attempt, sample, sampled FROM rollouts"
        for index, attempt, sample, tokens in self._found(query, [index for index, _ in by_group]):
            sampled.setdefault((index, attempt), {})[sample] = tokens
        rows = []
        for (index, attempt), fates in by_group.items():
            _require_sum(index, sampled.get((index, attempt), {}), fates)
            rows += [
                (int(index), int(attempt), int(sample), fate.value, int(tokens))
                for sample, of_sample in fates.items()
                for fate, tokens in of_sample.items()
                if tokens
            ]
        self._insert("fates", rows)

    def _insert(self, into: str, rows: Sequence[tuple[Any, ...]], otherwise: str = "") -> None:
        """In order, many rows by one statement. ``into``: table, with its columns unless all are given."""
        for part in _parts(rows):
            values = itertools.chain.from_iterable(part)
            self._run(_insertion(into, len(part[0]), len(part), otherwise), *values)

    def _found(self, select: str, admissions: Sequence[int]) -> list[tuple[Any, ...]]:
        """What ``select`` finds of these admissions, of all their attempts."""
        found: list[tuple[Any, ...]] = []
        for part in _parts(admissions):
            found += self._run(f"{select} WHERE admission IN ({', '.join('?' * len(part))})", *part)
        return found

    def _run(self, sql: str, *values: Any) -> sqlite3.Cursor:
        # Counters often come out of numpy, whose scalars sqlite3 refuses.
        return self._db.execute(sql, [v.item() if isinstance(v, np.generic) else v for v in values])


_EVENTS = f"events ({', '.join(Event._fields)})"
_TOGETHER = (64, 16, 4, 1)
"""Rows in one statement: few lengths, so that SQLite has all of them prepared."""


def _parts(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    begin = 0
    while begin < len(items):
        count = next(size for size in _TOGETHER if size <= len(items) - begin)
        yield items[begin : begin + count]
        begin += count


@functools.lru_cache(maxsize=256)
def _insertion(into: str, columns: int, rows: int, otherwise: str) -> str:
    marks = f"({', '.join('?' * columns)})"
    return f"INSERT INTO {into} VALUES {', '.join([marks] * rows)} {otherwise}"


def _require_sum(index: int, sampled: Mapping[int, int], fates: Mapping[int, Mapping[Fate, int]]) -> None:
    told = {sample: sum(of_sample.values()) for sample, of_sample in fates.items()}
    wrong = {s for s in sampled.keys() | told.keys() if sampled.get(s, 0) != told.get(s, 0)}
    if wrong:
        lines = [f"sample {s}: {sampled.get(s, 0)} sampled, {told.get(s, 0)} told" for s in sorted(wrong)]
        raise NearpolicyError(f"the fates of group {index} do not add up ({'; '.join(lines)})")
    if any(Fate.IN_FLIGHT in of_sample for of_sample in fates.values()):
        raise NearpolicyError(f"group {index} ended with tokens in flight; that is not an ending")


def _arrays_of(row: Trained) -> bytes:
    return encode_arrays({"trained": row.trained, "advantages": row.advantages})


def _rollout_row(key: Key, rollout: Rollout, reward: float | None) -> tuple[Any, ...]:
    admission, attempt = key
    told = None if reward is None else float(reward)
    sampled, text = rollout.num_sampled, encode_text(rollout.text)
    return admission, attempt, int(rollout.sample), int(rollout.lineage), rollout.numerics, sampled, told, text, b""


def _verdict_row(key: tuple[int, int, int], position: int, told: tuple[str, Verdict]) -> tuple[Any, ...]:
    source, verdict = told
    value = None if verdict.value is None else float(verdict.value)
    parts = encode_json(verdict.parts) if verdict.parts else _NO_PARTS
    arrays = encode_arrays(verdict.arrays) if verdict.arrays else None
    outcome, reason = _OUTCOMES[verdict.outcome], encode_text(verdict.reason)
    return (*key, position, encode_text(source), outcome, value, parts, reason, float(verdict.seconds), arrays)


_NO_PARTS = encode_json({})
_OUTCOMES = {outcome: outcome.value for outcome in Outcome}


def one(connection: sqlite3.Connection, sql: str, *values: Any) -> Any:
    row = connection.execute(sql, values).fetchone()
    return None if row is None else row[0]
