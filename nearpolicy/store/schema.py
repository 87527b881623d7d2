"""What the tables of a run's store mean.

`PRAGMA user_version` is the schema's number: a reader takes its own and older ones, and refuses a newer one by name.
Columns marked *text* are blobs of UTF-8 with surrogates passed through: what a model samples may contain NUL or lone
surrogates, and SQLite's own text type is safe for neither. Columns marked *JSON* are blobs for the same reason (see
`nearpolicy.store.payload`).

    admissions --+-- groups --+-- rollouts -- verdicts
                 |            |       +------ fates        the sum of a rollout's fates is what it sampled
                 |            +-- payloads                 its arrays: segments, and rows as a step trained them
                 |            +-- moved                    that they are in a Parquet file now, or were dropped
                 +-- endings                               one row: every attempt at an admission ends exactly once
                 +-- consumption                           which group filled which place of which step
    steps, versions, branches, evaluations, events, run    `steps` and `consumption` hold what counts;
                                                           `undone` what was rolled back
"""

from __future__ import annotations

from dataclasses import dataclass

from nearpolicy.records import Prompt

SCHEMA_VERSION = 4
"""2: a group may have a greedy completion, a rollout with the sample -1. The tables are those of 1.
3: an admission knows the place of its prompt in the order of the data, a version the digests of its tensors.
4: the arrays of a group are one payload, which may be moved out of the database; branches of the weights, steps that
were rolled back, groups that were trained once more. What an older schema has written stays where it is: in
`rollouts.payload` and `trained_rows`, which stay empty for new groups."""
BRANCHES = """
-- Lineages of weights but the first: versions before `first` are the parent's.
CREATE TABLE branches (
    lineage INTEGER PRIMARY KEY,
    parent  INTEGER NOT NULL,
    first   INTEGER NOT NULL,
    kind    TEXT NOT NULL,               -- rollback, remade
    reason  BLOB NOT NULL                -- text
) WITHOUT ROWID;

-- Which group had filled which place of a step that was rolled back; `lineage` is the one that this opened. Such a
-- group has ended as consumed and comes again nowhere.
CREATE TABLE undone (
    lineage   INTEGER NOT NULL REFERENCES branches,
    step      INTEGER NOT NULL,
    place     INTEGER,
    admission INTEGER PRIMARY KEY,
    attempt   INTEGER NOT NULL
) WITHOUT ROWID;

-- Rows that a step trained once more, of groups that earlier steps had used up.
CREATE TABLE replayed (
    step      INTEGER NOT NULL REFERENCES steps,
    ordinal   INTEGER NOT NULL,
    admission INTEGER NOT NULL,
    attempt   INTEGER NOT NULL,
    sample    INTEGER NOT NULL,
    segment   INTEGER NOT NULL,
    tokens    INTEGER NOT NULL,          -- trained ones
    payload   BLOB NOT NULL,             -- safetensors: trained, advantages
    PRIMARY KEY (step, ordinal)
) WITHOUT ROWID;
"""
BRANCHES_BEFORE = (
    "SELECT lineage, lineage - 1 AS parent, min(version) AS first, 'remade' AS kind, x'' AS reason FROM versions "
    "WHERE lineage > 0 GROUP BY lineage"
)
"""Those of a run that was recorded before the table was there."""
PAYLOADS = """
-- Arrays of a group, as one safetensors container each (see payload.py). `what`: segments, or trained: the rows of
-- the step that used it up.
CREATE TABLE payloads (
    admission INTEGER NOT NULL,
    attempt   INTEGER NOT NULL,
    what      TEXT NOT NULL,
    payload   BLOB NOT NULL,
    PRIMARY KEY (admission, attempt, what)
);

-- Where payloads went that are not in `payloads` any more (`store.retention`): to the row group `part` of the file
-- payloads/FILE.parquet in the run folder; NULL: nowhere.
CREATE TABLE moved (
    admission INTEGER NOT NULL,
    attempt   INTEGER NOT NULL,
    what      TEXT NOT NULL,
    file      INTEGER,
    part      INTEGER,
    PRIMARY KEY (admission, attempt, what)
) WITHOUT ROWID;
"""
_ENDINGS_BY_KIND = "CREATE INDEX endings_by_kind ON endings (ending) WHERE ending <> 'consumed';"
"""Few groups end otherwise, and a resume asks for these alone."""
MIGRATIONS = {
    1: "",
    2: "ALTER TABLE admissions ADD COLUMN prompt_index INTEGER; ALTER TABLE versions ADD COLUMN digests BLOB;",
    3: f"{BRANCHES} INSERT INTO branches {BRANCHES_BEFORE}; {PAYLOADS} {_ENDINGS_BY_KIND}",
}
"""Schema -> what makes the next one of it; a run that goes on is brought up to date."""
APPLICATION_ID = 0x4E524C50
"""Marks the file as ours ("NRLP") for `file` and for the reader."""

SEGMENTS, TRAINED = "segments", "trained"
"""What a payload is: the segments of all rollouts of a group, or the rows that its step trained."""
CONSUMED, RECYCLED = "consumed", "recycled"
"""Endings of an attempt whose group was used up by a step, and of one that had been aborted and that the next attempt
goes on from; every other ending is the value of a `Fate`."""

IN_FLIGHT = f"""
SELECT admission, attempt, sum(sampled) AS tokens FROM
    (SELECT admission, attempt FROM groups EXCEPT SELECT admission, attempt FROM endings)
    JOIN rollouts USING (admission, attempt) GROUP BY admission, attempt
UNION ALL
SELECT admission, attempt, sum(sampled) FROM endings JOIN rollouts USING (admission, attempt)
    WHERE ending = '{RECYCLED}' AND ending <> 'consumed'
    AND NOT EXISTS (SELECT 1 FROM fates WHERE fates.admission = rollouts.admission
                    AND fates.attempt = rollouts.attempt AND fates.sample = rollouts.sample)
    GROUP BY admission, attempt
"""
"""Tokens of each attempt that have no fate yet."""

SCHEMA = f"""
{BRANCHES}
-- Facts about the run as a whole: config, wall_anchor, packages. One JSON value per key.
CREATE TABLE run (
    key   TEXT PRIMARY KEY,
    value BLOB NOT NULL
) WITHOUT ROWID;

-- Prompts that were given an index and a slot. A retry keeps its index and raises `attempt`. `prompt_index` is the
-- prompt's place in the order of the data, where that is not the index of the admission; else NULL.
CREATE TABLE admissions (
    admission INTEGER PRIMARY KEY,
    attempt   INTEGER NOT NULL,
    seed      INTEGER NOT NULL,
    version   INTEGER NOT NULL,          -- newest published version at admission
    task      BLOB NOT NULL,             -- text
    prompt    BLOB NOT NULL,             -- JSON: id, text, messages, columns
    prompt_index INTEGER
);

-- What came of one attempt at an admission: complete, or failed with a reason.
CREATE TABLE groups (
    admission INTEGER NOT NULL REFERENCES admissions,
    attempt   INTEGER NOT NULL,
    version   INTEGER NOT NULL,          -- newest published version at this attempt
    oldest    INTEGER NOT NULL,          -- smallest version among the group's tokens
    failure   BLOB,                      -- text, NULL if complete
    PRIMARY KEY (admission, attempt)
) WITHOUT ROWID;

CREATE TABLE rollouts (
    admission INTEGER NOT NULL,
    attempt   INTEGER NOT NULL,
    sample    INTEGER NOT NULL,          -- place in the group; -1: its greedy completion
    lineage   INTEGER NOT NULL,
    numerics  TEXT NOT NULL,
    sampled   INTEGER NOT NULL,          -- tokens the policy chose: what the fates add up to
    reward    REAL,                      -- NULL: nothing scored it
    text      BLOB NOT NULL,             -- text
    payload   BLOB NOT NULL,             -- empty; its segments if schema 3 or older wrote it
    PRIMARY KEY (admission, attempt, sample)
);
{PAYLOADS}
CREATE TABLE verdicts (
    admission INTEGER NOT NULL,
    attempt   INTEGER NOT NULL,
    sample    INTEGER NOT NULL,
    position  INTEGER NOT NULL,          -- order of the sources in the group's mapping
    source    BLOB NOT NULL,             -- text
    outcome   TEXT NOT NULL,
    value     REAL,
    parts     BLOB NOT NULL,             -- JSON
    reason    BLOB NOT NULL,             -- text
    seconds   REAL NOT NULL,
    arrays    BLOB,                      -- safetensors, NULL without any
    PRIMARY KEY (admission, attempt, sample, position)
) WITHOUT ROWID;

CREATE TABLE steps (
    step    INTEGER PRIMARY KEY,
    places  INTEGER NOT NULL,
    version INTEGER NOT NULL,            -- steps the weights contain afterwards
    updates INTEGER NOT NULL
);

-- Groups in the order in which steps used them up. A group that was used up but left its place empty has no place.
CREATE TABLE consumption (
    ordinal   INTEGER PRIMARY KEY,
    step      INTEGER NOT NULL REFERENCES steps,
    place     INTEGER,
    admission INTEGER NOT NULL,
    attempt   INTEGER NOT NULL,
    UNIQUE (admission)                   -- never trained twice
);
CREATE INDEX consumption_by_step ON consumption (step, ordinal);

-- What a learner trained on, if schema 3 or older wrote it: one row per segment of a batch.
CREATE TABLE trained_rows (
    admission INTEGER NOT NULL,
    sample    INTEGER NOT NULL,
    segment   INTEGER NOT NULL,
    payload   BLOB NOT NULL,             -- safetensors: trained, advantages
    PRIMARY KEY (admission, sample, segment)
);

CREATE TABLE endings (
    admission INTEGER NOT NULL,
    attempt   INTEGER NOT NULL,
    ending    TEXT NOT NULL,             -- consumed, recycled, or the fate of a discarded group
    reason    BLOB NOT NULL,             -- text
    PRIMARY KEY (admission, attempt)
) WITHOUT ROWID;
{_ENDINGS_BY_KIND}

-- Tokens of a rollout by what became of them. A stored rollout without rows here is in flight: its group has not ended
-- yet, or was recycled. A recycled rollout stays where it is until the attempt that goes on from it is stored, which
-- then holds its tokens: in the same transaction it is removed from here, `rollouts` and `verdicts`. If that attempt
-- does not hold them, they are aborted after all.
CREATE TABLE fates (
    admission INTEGER NOT NULL,
    attempt   INTEGER NOT NULL,
    sample    INTEGER NOT NULL,
    fate      TEXT NOT NULL,
    tokens    INTEGER NOT NULL,
    PRIMARY KEY (admission, attempt, sample, fate)
) WITHOUT ROWID;

CREATE TABLE versions (
    lineage     INTEGER NOT NULL,
    version     INTEGER NOT NULL,
    updates     INTEGER NOT NULL,
    fingerprint TEXT NOT NULL,
    parent      INTEGER,
    wall_s      REAL NOT NULL,           -- how long the publication took
    digests     BLOB,                    -- JSON: tensor -> digest; NULL where they were not kept
    PRIMARY KEY (lineage, version)       -- never names two weights
) WITHOUT ROWID;

CREATE TABLE events (
    ordinal   INTEGER PRIMARY KEY,
    time      REAL NOT NULL,             -- seconds since the run's wall_anchor, by the monotonic clock
    role      TEXT NOT NULL,
    kind      TEXT NOT NULL,
    instance  INTEGER NOT NULL,
    admission INTEGER,
    sample    INTEGER,
    segment   INTEGER,
    version   INTEGER,
    seconds   REAL,
    numbers   BLOB NOT NULL              -- JSON
);
CREATE INDEX events_by_kind ON events (kind, ordinal);

-- Held-out samples. Their tokens are counted here and never among the fates.
CREATE TABLE evaluations (
    ordinal  INTEGER PRIMARY KEY,
    lineage  INTEGER NOT NULL,
    version  INTEGER NOT NULL,
    task     BLOB NOT NULL,              -- text
    mode     TEXT NOT NULL,              -- accuracy, pass: the two ways in which one evaluation samples
    temperature REAL NOT NULL,
    row      INTEGER NOT NULL,           -- the held-out question
    sample   INTEGER NOT NULL,
    prompt   BLOB NOT NULL,              -- text
    text     BLOB NOT NULL,              -- text
    correct  INTEGER,                    -- NULL: nobody could judge it
    value    REAL,
    tokens   INTEGER NOT NULL,
    finish   TEXT NOT NULL,
    UNIQUE (lineage, version, task, mode, row, sample)
);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedSample:
    """One completion of one held-out question, judged."""

    task: str
    mode: str
    """What it was sampled for: ``accuracy``, or ``pass`` for pass@k."""
    temperature: float
    row: int
    """Which held-out question."""
    sample: int
    prompt: str
    """As `prompt_text` shows it."""
    text: str
    correct: bool | None
    """None if the verifier failed or abstained: it counts neither as right nor as wrong."""
    value: float | None
    """The score it was judged by."""
    num_tokens: int
    finish: str
    version: int = 0
    """Weights it was sampled under."""
    lineage: int = 0

    def __post_init__(self) -> None:
        if self.mode not in ("accuracy", "pass"):
            raise ValueError(f"an evaluation samples for accuracy or pass, not for {self.mode!r}")


def prompt_text(prompt: Prompt) -> str:
    """A prompt as people read it: the text, or what its messages say."""
    if prompt.text is not None:
        return prompt.text
    return "\n".join(str(message.get("content", "")) for message in prompt.messages or ())
