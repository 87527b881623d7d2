"""`RunReader`: the one way every tool reads a run, while it is being written and afterwards.

It holds no state beyond a read-only connection: each call sees what was committed when it was made. Groups, batches and
rollouts come back as the records that were written, arrays bit for bit, also where `store.retention` has moved these to
Parquet. Where it has dropped them, texts, rewards, verdicts and fates are there, and what needs tokens says so.

    with RunReader("runs/demo-1") as run:
        for item in run.rollouts(step=3):
            print(item.reward, item.rollout.text)
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from nearpolicy.errors import RunFolderError
from nearpolicy.records import (
    BASELINE,
    Admission,
    Baseline,
    Batch,
    Branch,
    Event,
    Fate,
    Group,
    Outcome,
    Prompt,
    Rollout,
    Row,
    Segment,
    Verdict,
    VersionRecord,
)
from nearpolicy.store.folder import RunFolder
from nearpolicy.store.lineages import Lineages
from nearpolicy.store.metric_lines import merged
from nearpolicy.store.moved import MovedPayloads
from nearpolicy.store.payload import (
    PayloadError,
    decode_arrays,
    decode_group,
    decode_json,
    decode_rows,
    decode_segments,
    decode_text,
    encode_text,
)
from nearpolicy.store.schema import (
    APPLICATION_ID,
    BRANCHES_BEFORE,
    RECYCLED,
    SCHEMA_VERSION,
    SEGMENTS,
    TRAINED,
    EvaluatedSample,
)
from nearpolicy.store.tokens import TokenCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A step that the store holds."""

    step: int
    places: int
    version: int
    """Steps the weights contain afterwards."""
    updates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumed:
    """One group that a step used up, in the order of consumption."""

    step: int
    place: int | None
    """Place in the batch; None if the group left its place empty (failed, filtered)."""
    admission: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredRollout:
    """One rollout with all that is known of it."""

    admission: Admission
    rollout: Rollout
    verdicts: Mapping[str, Verdict]
    reward: float | None
    ending: str | None
    """consumed, recycled, or the fate of a discarded group; None while it is in flight."""
    reason: str
    step: int | None
    """The step that used it up."""
    fates: Mapping[Fate, int]
    """Tokens by what became of them; all `Fate.IN_FLIGHT` until the group has ended."""
    rows: Mapping[int, Row]
    """By segment: what the learner trained on."""
    is_dropped: bool = False
    """`store.retention` has dropped its tokens: it has no segments and no rows here."""

    @property
    def is_baseline(self) -> bool:
        """Whether it is the greedy completion that the samples of its group are compared with."""
        return self.rollout.sample == BASELINE


class RunReader:
    """Reads ``run_dir``; raises `RunFolderError` if it is not a run or was written by a newer Nearpolicy."""

    def __init__(self, run_dir: str | Path) -> None:
        self.folder = RunFolder(Path(run_dir))
        self._db = check_store(self.folder)
        self._moved = MovedPayloads(self.folder)

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> RunReader:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()
        if isinstance(error, sqlite3.DatabaseError | PayloadError):
            raise RunFolderError(f"{self.folder.store} is damaged: {error}; fetch a copy of the run folder") from error

    # The run as a whole.

    @property
    def name(self) -> str:
        return self.folder.path.resolve().name

    @property
    def config(self) -> Any:
        """The resolved recipe."""
        return self.fact("config")

    @property
    def packages(self) -> dict[str, str]:
        return self.fact("packages", {})

    @property
    def wall_anchor(self) -> float:
        """Wall time at which the events' clock stood at zero."""
        return self.fact("wall_anchor")

    def fact(self, key: str, default: Any = None) -> Any:
        row = self._db.execute("SELECT value FROM run WHERE key = ?", (key,)).fetchone()
        return default if row is None else decode_json(row[0])

    def summary(self) -> dict[str, Any] | None:
        """What ``summary.json`` says, or None while the run goes on."""
        if not self.folder.summary.exists():
            return None
        try:
            return json.loads(self.folder.summary.read_text(encoding="utf-8"))
        except ValueError as error:
            raise RunFolderError(f"{self.folder.summary} cannot be read: {error}; remove it") from None

    def metrics(self) -> list[dict[str, Any]]:
        """One dict per step, in order: its lines merged, later ones over earlier ones (a resume repeats steps); without
        what was rolled back.

        Values that were not finite are None and are listed under ``not_finite``: name -> nan, inf or -inf.
        """
        if not self.folder.metrics.exists():
            return []
        lines = self.folder.metrics.read_bytes().split(b"\n")[:-1]  # the last piece is empty or being written
        return merged(lines, str(self.folder.metrics))

    def ledger(self) -> dict[Fate, int]:
        """Sampled tokens by fate; the values, but for those replayed, add up to all that was stored. Fates without
        tokens are left out."""
        return TokenCounts.of(self._db).told()

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """Inside, all that is asked is answered from one state of a run that may be going on."""
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            self._db.execute("ROLLBACK")

    # Prompts, groups, rollouts.

    def admission(self, index: int) -> Admission:
        row = self._db.execute("SELECT * FROM admissions WHERE admission = ?", (_bindable(index),)).fetchone()
        if row is None:
            raise KeyError(f"{self.folder.path} has no admission {index}")
        return _admission(row)

    def admissions(self) -> list[Admission]:
        return [_admission(row) for row in self._db.execute("SELECT * FROM admissions ORDER BY admission")]

    def unfinished(self) -> list[Admission]:
        """Admissions that have not ended: what a resume must finish, start again or call lost."""
        query = "SELECT admissions.* FROM admissions NATURAL LEFT JOIN endings WHERE ending IS NULL ORDER BY admission"
        return [_admission(row) for row in self._db.execute(query)]

    def last_admissions(self, count: int) -> list[Admission]:
        """The newest ones first."""
        rows = self._db.execute("SELECT * FROM admissions ORDER BY admission DESC LIMIT ?", (count,))
        return [_admission(row) for row in rows]

    def ended_as(self, fate: Fate) -> list[Admission]:
        """Admissions whose last attempt ended so."""
        query = (
            "SELECT admissions.* FROM endings NATURAL JOIN admissions WHERE ending = ? AND ending <> 'consumed' "
            "ORDER BY admission"
        )
        return [_admission(row) for row in self._db.execute(query, (fate.value,))]

    def is_filled(self, admission: Admission) -> bool:
        """Whether the group of this attempt is stored."""
        query = "SELECT 1 FROM groups WHERE admission = ? AND attempt = ?"
        return self._db.execute(query, (admission.index, admission.attempt)).fetchone() is not None

    def query(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        """Rows of a question of one's own; `nearpolicy.store.schema` says what the tables mean."""
        return self._db.execute(sql, values).fetchall()

    def each(self, sql: str) -> Iterator[sqlite3.Row]:
        """As `query`, one row at a time in memory."""
        yield from self._db.execute(sql)

    def moved_payloads(self) -> Iterator[dict[str, Any]]:
        """Rows as those of the table `payloads`, of what lies in files."""
        query = "SELECT admission, attempt, what, file, part FROM moved WHERE file IS NOT NULL ORDER BY file, part"
        for *key, file, part in self._db.execute(query) if self._has_payloads else ():
            payload = self._moved.read(file, part, tuple(key))
            yield dict(zip(("admission", "attempt", "what", "payload"), (*key, payload), strict=True))

    def group(self, index: int, attempt: int | None = None) -> Group:
        """The group as it was filled; by default of the last attempt. `RunFolderError` if its tokens were dropped."""
        row = self._db.execute(
            "SELECT attempt, version, failure FROM groups WHERE admission = ? AND attempt = coalesce(?, attempt) "
            "ORDER BY attempt DESC",
            (_bindable(index), _bindable(attempt)),
        ).fetchone()
        if row is None:
            raise KeyError(f"{self.folder.path} has no filled group {index}")
        attempt, version, failure = row
        query = "SELECT * FROM rollouts WHERE admission = ? AND attempt = ? ORDER BY sample"
        everything = self._db.execute(query, (index, attempt)).fetchall()
        stored = [row for row in everything if row["sample"] != BASELINE]
        verdicts = self._verdicts(index, attempt)
        if self.is_dropped(index, attempt):
            raise RunFolderError(
                f"the tokens of group {index} (attempt {attempt}) of {self.folder.path} were dropped, as its setting "
                "store.retention: drop asks; texts, rewards and fates are there (nearpolicy inspect). Runs with "
                "store.retention: parquet or keep can be read and trained again"
            )
        segments = self._segments(index, attempt)
        baselines = [
            Baseline(rollout=_rollout(row, segments), verdicts=verdicts[BASELINE], reward=row["reward"])
            for row in everything
            if row["sample"] == BASELINE
        ]
        return Group(
            admission=replace(self.admission(index), version=version, attempt=attempt),
            rollouts=tuple(_rollout(row, segments) for row in stored),
            verdicts=tuple(verdicts[row["sample"]] for row in stored),
            rewards=tuple(row["reward"] for row in stored),
            failure=None if failure is None else decode_text(failure),
            baseline=baselines[0] if baselines else None,
        )

    def groups(self) -> Iterator[Group]:
        """Every filled group, failed ones too, by index and attempt; one at a time in memory."""
        keys = self._db.execute("SELECT admission, attempt FROM groups ORDER BY admission, attempt").fetchall()
        return (self.group(index, attempt) for index, attempt in keys)

    def rollouts(
        self, *, step: int | None = None, group: int | None = None, sample: int | None = None, limit: int | None = None
    ) -> Iterator[StoredRollout]:
        """Rollouts by group and sample: those a step used up, of a group, of a place in it (`BASELINE` for the greedy
        completion), or all."""
        asked = {"step": _bindable(step), "admission": _bindable(group), "sample": _bindable(sample)}
        where = " AND ".join([f"{name} = :{name}" for name, value in asked.items() if value is not None] or ["true"])
        tables = "rollouts" if step is None else "consumption CROSS JOIN rollouts USING (admission, attempt)"
        keys = self._db.execute(
            f"SELECT admission, attempt, sample FROM {tables} WHERE {where} "
            "ORDER BY admission, attempt, sample LIMIT coalesce(:limit, -1)",
            asked | {"limit": _bindable(limit)},
        ).fetchall()
        by_group = groupby(keys, key=lambda key: (key["admission"], key["attempt"]))
        return chain.from_iterable(self._stored_rollouts(*key, {row["sample"] for row in of}) for key, of in by_group)

    def _stored_rollouts(self, index: int, attempt: int, samples: Collection[int]) -> Iterator[StoredRollout]:
        key = (index, attempt)
        group = self._db.execute(
            "SELECT groups.version, ending, reason, step FROM groups LEFT JOIN endings USING (admission, attempt) "
            "LEFT JOIN consumption USING (admission, attempt) WHERE admission = ? AND attempt = ?",
            key,
        ).fetchone()
        fates: dict[int, dict[Fate, int]] = defaultdict(dict)
        query = "SELECT sample, fate, tokens FROM fates WHERE admission = ? AND attempt = ?"
        for sample, fate, tokens in self._db.execute(query, key):
            fates[sample][Fate(fate)] = tokens
        is_dropped = self.is_dropped(index, attempt)
        segments = {} if is_dropped else self._segments(index, attempt)
        rows = {} if is_dropped or group["step"] is None else self._rows(index, attempt, segments)
        verdicts = self._verdicts(index, attempt)
        admission = replace(self.admission(index), version=group["version"], attempt=attempt)
        query = "SELECT * FROM rollouts WHERE admission = ? AND attempt = ? ORDER BY sample"
        for row in self._db.execute(query, key).fetchall():
            if row["sample"] in samples:
                yield StoredRollout(
                    admission=admission,
                    rollout=_rollout(row, segments),
                    verdicts=verdicts[row["sample"]],
                    reward=row["reward"],
                    ending=group["ending"],
                    reason="" if group["reason"] is None else decode_text(group["reason"]),
                    step=group["step"],
                    fates=fates.get(row["sample"]) or _without_fate(group["ending"], row["sampled"]),
                    rows=rows.get(row["sample"], {}),
                    is_dropped=is_dropped,
                )

    def is_dropped(self, index: int, attempt: int) -> bool:
        """Whether `store.retention` has dropped the tokens of this group."""
        return self._whereabouts(index, attempt, SEGMENTS) == (None, None)

    def _whereabouts(self, index: int, attempt: int, what: str) -> tuple[int | None, int | None] | None:
        """File and part that a payload was moved to; None for one that was not."""
        if not self._has_payloads:
            return None
        query = "SELECT file, part FROM moved WHERE admission = ? AND attempt = ? AND what = ?"
        row = self._db.execute(query, (index, attempt, what)).fetchone()
        return None if row is None else tuple(row)

    @property
    def _has_payloads(self) -> bool:
        """Schema 4; a run that goes on may become one of it while it is read."""
        return self._db.execute("PRAGMA user_version").fetchone()[0] >= 4

    def _payload(self, index: int, attempt: int, what: str) -> bytes | None:
        """None if there is none, or it was dropped."""
        if not self._has_payloads:
            return None
        query = "SELECT payload FROM payloads WHERE admission = ? AND attempt = ? AND what = ?"
        row = self._db.execute(query, (index, attempt, what)).fetchone()
        if row is not None:
            return row[0]
        file, part = self._whereabouts(index, attempt, what) or (None, None)
        return None if file is None else self._moved.read(file, part, (index, attempt, what))

    def _segments(self, index: int, attempt: int) -> dict[int, tuple[Segment, ...]]:
        """Sample -> its segments."""
        payload = self._payload(index, attempt, SEGMENTS)
        if payload is not None:
            return decode_group(payload)
        query = "SELECT sample, payload FROM rollouts WHERE admission = ? AND attempt = ?"  # of an older schema
        return {sample: decode_segments(data) for sample, data in self._db.execute(query, (index, attempt)) if data}

    def _verdicts(self, index: int, attempt: int) -> dict[int, dict[str, Verdict]]:
        query = "SELECT * FROM verdicts WHERE admission = ? AND attempt = ? ORDER BY sample, position"
        found: dict[int, dict[str, Verdict]] = defaultdict(dict)
        for row in self._db.execute(query, (index, attempt)):
            found[row["sample"]][decode_text(row["source"])] = Verdict(
                outcome=Outcome(row["outcome"]),
                value=row["value"],
                parts=decode_json(row["parts"]),
                reason=decode_text(row["reason"]),
                seconds=row["seconds"],
                arrays={} if row["arrays"] is None else decode_arrays(row["arrays"]),
            )
        return found

    def _rows(self, index: int, attempt: int, segments: Mapping[int, tuple[Segment, ...]]) -> dict[int, dict[int, Row]]:
        """Sample -> segment -> what was trained of it."""
        payload = self._payload(index, attempt, TRAINED)
        query = "SELECT sample, segment, payload FROM trained_rows WHERE admission = ?"  # of an older schema
        older = self._db.execute(query, (index,)) if payload is None else ()
        found = {(sample, place): decode_arrays(data) for sample, place, data in older}
        found |= {} if payload is None else decode_rows(payload)
        rows: dict[int, dict[int, Row]] = defaultdict(dict)
        for (sample, place), arrays in sorted(found.items()):
            rows[sample][place] = Row(group=index, sample=sample, segment=segments[sample][place], **arrays)
        return rows

    def successful_groups(self, oldest: int, min_reward: float) -> list[tuple[int, int]]:
        """(admission, attempt), in the order in which steps used them up: groups without a token of older weights, with
        a rollout of this reward or more, and not of one reward all. No step before ``oldest`` could have used them."""
        rows = self._db.execute(
            "SELECT consumption.admission, consumption.attempt FROM consumption "
            "JOIN groups USING (admission, attempt) JOIN rollouts USING (admission, attempt) "
            "WHERE step >= ?1 AND place IS NOT NULL AND oldest >= ?1 AND sample >= 0 "
            "GROUP BY ordinal HAVING max(reward) >= ?2 AND min(reward) < max(reward) ORDER BY ordinal",
            (oldest, min_reward),
        )
        return [(index, attempt) for index, attempt in rows]

    def num_lost(self) -> int:
        """Attempts that were under way when a process ended."""
        query = "SELECT count(*) FROM endings WHERE ending = ?"
        return self._db.execute(query, (Fate.LOST.value,)).fetchone()[0]

    def num_undone_tokens(self) -> int:
        """Trained tokens of steps that were rolled back."""
        query = "SELECT coalesce(sum(tokens), 0) FROM undone JOIN fates USING (admission, attempt) WHERE fate = ?"
        return self._db.execute(query, (Fate.TRAINED.value,)).fetchone()[0]

    # Steps.

    def steps(self) -> list[StepRecord]:
        rows = self._db.execute("SELECT step, places, version, updates FROM steps ORDER BY step")
        return [StepRecord(step=s, places=p, version=v, updates=u) for s, p, v, u in rows]

    def consumption(self, step: int | None = None) -> list[Consumed]:
        """Which groups were used up, in that order; by one step or by all."""
        query = "SELECT step, place, admission, attempt FROM consumption WHERE ?1 IS NULL OR step = ?1 ORDER BY ordinal"
        rows = self._db.execute(query, (_bindable(step),))
        return [Consumed(step=s, place=p, admission=a, attempt=t) for s, p, a, t in rows]

    def num_taken(self, before: int) -> int:
        """Groups that filled places of the steps before this one."""
        query = "SELECT count(*) FROM consumption WHERE place IS NOT NULL AND step < ?"
        return self._db.execute(query, (before,)).fetchone()[0]

    def batch(self, step: int) -> Batch:
        """The batch of a step as the learner saw it: same groups, same rows, same order, same bits."""
        found = self._db.execute("SELECT places FROM steps WHERE step = ?", (_bindable(step),)).fetchone()
        if found is None:
            raise KeyError(f"{self.folder.path} has no step {step}")
        groups = [self.group(c.admission, c.attempt) for c in self.consumption(step) if c.place is not None]
        rows = []
        for group in sorted(groups, key=lambda group: group.index):
            segments = {rollout.sample: rollout.segments for rollout in group.rollouts}
            of_group = self._rows(group.index, group.admission.attempt, segments)
            rows += [row for sample in sorted(of_group) for row in of_group[sample].values()]
        replayed, again = self._replayed(step)
        return Batch(step=step, places=found[0], groups=tuple(groups), rows=(*rows, *again), replayed=replayed)

    def _replayed(self, step: int) -> tuple[tuple[Group, ...], list[Row]]:
        if not self._has("replayed"):
            return (), []
        query = "SELECT admission, attempt, sample, segment, payload FROM replayed WHERE step = ? ORDER BY ordinal"
        groups: dict[int, Group] = {}
        rows = []
        for index, attempt, sample, place, payload in self._db.execute(query, (step,)).fetchall():
            group = groups[index] = groups.get(index) or self.group(index, attempt)
            segment = group.rollouts[sample].segments[place]
            rows.append(Row(group=index, sample=sample, segment=segment, replayed=True, **decode_arrays(payload)))
        return tuple(groups.values()), rows

    def _has(self, table: str) -> bool:
        """Whether the store is new enough for it."""
        query = "SELECT 1 FROM sqlite_master WHERE name = ?"
        return self._db.execute(query, (table,)).fetchone() is not None

    # Versions, events, evaluations.

    def branches(self) -> list[Branch]:
        """Of the weights, oldest first."""
        rows = self._db.execute("SELECT * FROM branches ORDER BY lineage" if self._has("branches") else BRANCHES_BEFORE)
        return [Branch(**dict(row) | {"reason": decode_text(row["reason"])}) for row in rows]

    @property
    def lineages(self) -> Lineages:
        return Lineages(self.branches())

    def versions(self) -> list[VersionRecord]:
        """Published weights that count, oldest first, without their digests."""
        counts = self.lineages.counts
        return [record for record in self.all_versions() if counts(record.lineage, record.version)]

    def all_versions(self) -> list[VersionRecord]:
        """Those too that were rolled back, or came out with other bits; by lineage."""
        query = "SELECT lineage, version, updates, fingerprint, parent FROM versions ORDER BY lineage, version"
        return [VersionRecord(**dict(row)) for row in self._db.execute(query)]

    def last_version(self, steps: int) -> VersionRecord | None:
        """The newest that counts and contains no more than so many steps."""
        query = (
            "SELECT lineage, version, updates, fingerprint, parent FROM versions "
            "WHERE lineage = ? AND version BETWEEN ? AND ? ORDER BY version DESC LIMIT 1"
        )
        for lineage, first, last in self.lineages.stretches():
            row = self._db.execute(query, (lineage, first, steps if last is None else min(last, steps))).fetchone()
            if row is not None:
                return VersionRecord(**dict(row))
        return None

    def digests(self, record: VersionRecord) -> dict[str, str]:
        """Tensor -> digest of published weights; empty if the run was recorded before they were kept."""
        if not any(column["name"] == "digests" for column in self._db.execute("PRAGMA table_info(versions)")):
            return {}
        query = "SELECT digests FROM versions WHERE lineage = ? AND version = ?"
        row = self._db.execute(query, (record.lineage, record.version)).fetchone()
        return {} if row is None or row["digests"] is None else decode_json(row["digests"])

    def events(self, kind: str | None = None, role: str | None = None) -> Iterator[Event]:
        """The time line in the order in which it was told."""
        rows = self._db.execute(
            "SELECT * FROM events WHERE (?1 IS NULL OR kind = ?1) AND (?2 IS NULL OR role = ?2) ORDER BY ordinal",
            (kind, role),
        )
        for row in rows:
            fields = dict(row)
            del fields["ordinal"]
            yield Event(**fields | {"numbers": decode_json(fields["numbers"])})

    def evaluations(self, task: str | None = None, version: int | None = None) -> list[EvaluatedSample]:
        """Of weights that count."""
        counts = self.lineages.counts
        rows = self._db.execute(
            "SELECT * FROM evaluations WHERE (?1 IS NULL OR task = ?1) AND (?2 IS NULL OR version = ?2) "
            "ORDER BY lineage, version, task, mode, row, sample",
            (None if task is None else encode_text(task), _bindable(version)),
        )
        return [
            EvaluatedSample(
                task=decode_text(row["task"]),
                mode=row["mode"],
                temperature=row["temperature"],
                row=row["row"],
                sample=row["sample"],
                prompt=decode_text(row["prompt"]),
                text=decode_text(row["text"]),
                correct=None if row["correct"] is None else bool(row["correct"]),
                value=row["value"],
                num_tokens=row["tokens"],
                finish=row["finish"],
                version=row["version"],
                lineage=row["lineage"],
            )
            for row in rows
            if counts(row["lineage"], row["version"])
        ]


def _without_fate(ending: str | None, sampled: int) -> dict[Fate, int]:
    """Of a rollout that has none in the store."""
    return {Fate.IN_FLIGHT: sampled} if ending in (None, RECYCLED) else {}


def _bindable(number: int | None) -> int | None:
    """A number that SQLite can compare with; beyond what it can hold there is none it could find."""
    return None if number is None else max(-(2**63), min(2**63 - 1, number))


def check_store(folder: RunFolder) -> sqlite3.Connection:
    """A read-only connection to a store that this version understands; else `RunFolderError`."""
    if not os.path.isfile(folder.store):  # unlike `Path.is_file` it takes a name that no file can have
        what = "holds no store.sqlite" if os.path.isdir(folder.path) else "is not a folder"
        raise RunFolderError(f"{folder.path} is not a run: it {what}. Name a run folder, such as runs/demo-1")
    try:
        connection = _connect_read_only(folder.store)
        schema = connection.execute("PRAGMA user_version").fetchone()[0]
        mark = connection.execute("PRAGMA application_id").fetchone()[0]
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # the latter in what sqlite says of a broken schema
        raise RunFolderError(f"{folder.store} cannot be read as the store of a run: {error}") from error
    if mark == APPLICATION_ID and 1 <= schema <= SCHEMA_VERSION:
        return connection
    connection.close()
    if mark == APPLICATION_ID:
        raise RunFolderError(
            f"{folder.store} has schema {schema}; this Nearpolicy reads up to {SCHEMA_VERSION}. Update it to read it"
        )
    raise RunFolderError(f"{folder.store} is a database, but not the store of a run")


def _connect_read_only(path: Path) -> sqlite3.Connection:
    def connect(query: str) -> sqlite3.Connection:
        uri = f"{path.resolve().as_uri()}?{query}"
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=30.0)
        connection.row_factory = sqlite3.Row
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return connection

    try:
        return connect("mode=ro")
    except sqlite3.OperationalError:
        # A WAL database wants a -shm file beside it. On a read-only disk there is none, and nobody writes either.
        if path.with_name(path.name + "-wal").exists():
            raise
        return connect("mode=ro&immutable=1")


def _admission(row: sqlite3.Row) -> Admission:
    prompt = decode_json(row["prompt"])
    return Admission(
        index=row["admission"],
        attempt=row["attempt"],
        seed=row["seed"],
        version=row["version"],
        prompt_index=row["prompt_index"] if "prompt_index" in row.keys() else None,  # noqa: SIM118
        prompt=Prompt(
            id=prompt["id"],
            task=decode_text(row["task"]),
            text=prompt["text"],
            messages=None if prompt["messages"] is None else tuple(prompt["messages"]),
            columns=prompt["columns"],
        ),
    )


def _rollout(row: sqlite3.Row, segments: Mapping[int, tuple[Segment, ...]]) -> Rollout:
    return Rollout(
        sample=row["sample"],
        segments=segments.get(row["sample"], ()),
        text=decode_text(row["text"]),
        numerics=row["numerics"],
        lineage=row["lineage"],
    )
