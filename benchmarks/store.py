"""What the durable record costs: groups a second against raw SQLite, and a run of a million rollouts.

    python -m benchmarks.store [--quick] [--rollouts 1000000]
    python -m benchmarks.store --overhead recipes/tiny.yaml [section.key=value]     see benchmarks/store_overhead.py

Groups of 8 rollouts x 100 tokens with one verdict each, in WAL mode and ``synchronous = NORMAL``. Raw: the same rows,
in bytes that are ready, by one thread that waits for each commit (single) or commits 64 groups at a time (batched),
pressed onto the disk as often as ours.
Ours: records in, through the writer's thread, with `flush` after each group or after 64. Both stores are read back and
compared first. Then what retention saves (benchmarks/store_retention.py). Then a store of --rollouts rollouts is made
(100,000 with --quick), opened, and asked what a resume and `nearpolicy inspect` ask. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sqlite3
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pairs import ratios
from benchmarks.store_retention import sizes
from nearpolicy.records import Admission, Finish, Group, Outcome, Prompt, Rollout, Segment, Verdict
from nearpolicy.store.database import DURABLE_WITHIN_S
from nearpolicy.store.folder import create_run_folder
from nearpolicy.store.position import position_of
from nearpolicy.store.reader import RunReader
from nearpolicy.store.schema import SCHEMA
from nearpolicy.store.writer import SqliteStore

SAMPLES, TOKENS, BATCH = 8, 100, 64
TABLES = ("admissions", "groups", "rollouts", "verdicts", "payloads")


def a_group(index: int) -> Group:
    numbers = np.random.default_rng(index)
    segments = [
        Segment(
            context_ids=np.arange(50),
            token_ids=numbers.integers(0, 50_000, TOKENS),
            mask=np.ones(TOKENS, bool),
            behavior_logprobs=-numbers.random(TOKENS),
            versions=np.full(TOKENS, index // 8),
            finish=Finish.STOP,
        )
        for _ in range(SAMPLES)
    ]
    prompt = Prompt(id=str(index), task="t", text="What is 2 + 2?", columns={"answer": "4"})
    return Group(
        admission=Admission(index=index, prompt=prompt, seed=0, version=index // 8),
        rollouts=tuple(
            Rollout(sample=i, segments=(segment,), text="The answer is 4. " * 10, numerics="exact")
            for i, segment in enumerate(segments)
        ),
        verdicts=({"number": Verdict(outcome=Outcome.SCORED, value=1.0, parts={"correct": 1.0})},) * SAMPLES,
        rewards=(1.0,) * SAMPLES,
    )


def ours(folder: Path, groups: list[Group], together: int) -> float:
    with SqliteStore.create(create_run_folder("", directory=folder), config={}) as store:
        store.flush()
        begin = time.perf_counter()
        for place, group in enumerate(groups, start=1):
            store.filled(group)
            if place % together == 0:
                store.flush()
        store.flush()
        return time.perf_counter() - begin


def raw(folder: Path, rows: list[list[tuple[str, tuple]]], together: int) -> float:
    folder.mkdir()
    connection = sqlite3.connect(folder / "store.sqlite", isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.executescript(SCHEMA)
    ended = threading.Event()
    pressing = threading.Thread(target=pressed, args=(folder / "store.sqlite-wal", ended))
    begin = time.perf_counter()
    pressing.start()
    for place, of_group in enumerate(rows):
        if place % together == 0:
            connection.execute("BEGIN IMMEDIATE")
        for statement, values in of_group:
            connection.execute(statement, values)
        if (place + 1) % together == 0 or place + 1 == len(rows):
            connection.execute("COMMIT")
    seconds = time.perf_counter() - begin
    ended.set()
    pressing.join()
    connection.close()
    return seconds


def pressed(log: Path, ended: threading.Event) -> None:
    """Onto the disk as often as our store does it."""
    while not ended.wait(DURABLE_WITHIN_S):
        with log.open("rb") as file:
            os.fsync(file.fileno())


def rows_of(store: Path, count: int) -> list[list[tuple[str, tuple]]]:
    """What `ours` has written, as statements by group."""
    connection = sqlite3.connect(store)
    found: list[list[tuple[str, tuple]]] = [[] for _ in range(count)]
    for table in TABLES:
        for values in connection.execute(f"SELECT * FROM {table}"):
            marks = ", ".join("?" * len(values))
            found[values[0]].append((f"INSERT INTO {table} VALUES ({marks})", values))
    return found


def dump(store: Path) -> list[list[tuple]]:
    connection = sqlite3.connect(store)
    return [connection.execute(f"SELECT * FROM {table}").fetchall() for table in TABLES]


def compared(base: Path, pairs: int, count: int) -> dict[str, Any]:
    groups = [a_group(index) for index in range(count)]
    ours(base / "first", groups, BATCH)
    rows = rows_of(base / "first" / "store.sqlite", count)
    raw(base / "first-raw", rows, BATCH)
    if dump(base / "first" / "store.sqlite") != dump(base / "first-raw" / "store.sqlite"):
        raise SystemExit("the two stores differ; nothing can be compared")
    found = {}
    for name, together in (("single", 1), ("batched", BATCH)):
        times: dict[str, list[float]] = {"ours": [], "raw": []}
        sides: dict[str, Callable[[Path], float]] = {
            "ours": lambda folder, together=together: ours(folder, groups, together),
            "raw": lambda folder, together=together: raw(folder, rows, together),
        }
        for pair in range(pairs):
            for side in ("ours", "raw") if pair % 2 == 0 else ("raw", "ours"):
                folder = base / f"{name}-{pair}-{side}"
                times[side].append(sides[side](folder))
                shutil.rmtree(folder)
        found[name] = ratios(times["ours"], times["raw"]) | {"equal_results": True}
        found[name]["groups_per_s"] = round(count / statistics.median(times["ours"]))
        found[name]["groups_per_s_raw"] = round(count / statistics.median(times["raw"]))
    return found


def large(base: Path, rollouts: int) -> dict[str, Any]:
    """A run of so many rollouts, all consumed but for the last two steps' groups."""
    folder, per_step = create_run_folder("", directory=base / "large"), 8
    SqliteStore.create(folder, config={}).close()
    sample = a_group(0)
    with tempfile.TemporaryDirectory(dir=base) as scratch:
        ours(Path(scratch) / "one", [sample], 1)
        one = rows_of(Path(scratch) / "one" / "store.sqlite", 1)[0]
    connection = sqlite3.connect(folder.store, isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("BEGIN")
    groups = rollouts // SAMPLES
    consumed = (groups // per_step - 2) * per_step
    for index in range(groups):
        for statement, values in one:
            connection.execute(statement, (index, *values[1:]))
        if index < consumed:
            connection.execute("INSERT INTO endings VALUES (?, 0, 'consumed', ?)", (index, b"step"))
            step = index // per_step
            if index % per_step == 0:
                connection.execute("INSERT INTO steps VALUES (?, ?, ?, ?)", (step, per_step, step + 1, step + 1))
                connection.execute("INSERT INTO versions VALUES (0, ?, ?, 'f', NULL, 0.1, NULL)", (step + 1, step + 1))
            columns = "INSERT INTO consumption (step, place, admission, attempt) VALUES (?, ?, ?, 0)"
            connection.execute(columns, (step, index % per_step, index))
            for place in range(SAMPLES):
                connection.execute("INSERT INTO fates VALUES (?, 0, ?, 'trained', ?)", (index, place, TOKENS))
    connection.execute("COMMIT")
    connection.close()

    def timed(ask: Callable[[], Any]) -> tuple[float, Any]:
        begin = time.perf_counter()
        answer = ask()
        return round(time.perf_counter() - begin, 3), answer

    opened, store = timed(lambda: SqliteStore.open(folder))
    store.close()
    with RunReader(folder.path) as run:
        resumed, found = timed(lambda: position_of(run))
        assert (found.steps, len(found.ready)) == (consumed // per_step, groups - consumed)
        first, shown = timed(lambda: list(run.rollouts(limit=8)))
        assert len(shown) == 8
        last, shown = timed(lambda: list(run.rollouts(step=found.steps - 1, limit=8)))
        assert len(shown) == 8
        one_group, _ = timed(lambda: list(run.rollouts(group=groups // 2)))
        ledger, fates = timed(run.ledger)
        assert sum(fates.values()) == groups * SAMPLES * TOKENS
    size = folder.store.stat().st_size / 2**20
    return {
        "rollouts": groups * SAMPLES, "size_mb": round(size), "open_s": opened, "resume_state_s": resumed,
        "inspect_first_s": first, "inspect_step_s": last, "inspect_group_s": one_group, "ledger_s": ledger,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two pairs instead of five")
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument(
        "--overhead", type=Path, metavar="RECIPE", help="run this and say what its record cost, no more"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for the recipe of --overhead")
    arguments = parser.parse_args()
    if arguments.overhead is not None:
        from benchmarks.store_overhead import overhead

        print(json.dumps(overhead(arguments.overhead, arguments.overrides)))
        return
    rollouts = min(100_000, arguments.rollouts) if arguments.quick else arguments.rollouts
    with tempfile.TemporaryDirectory() as folder:
        result = {"comparisons": compared(Path(folder), 2 if arguments.quick else 5, 256)}
        result["retention_mib"] = sizes(Path(folder), 60 if arguments.quick else 300)
        result["large"] = large(Path(folder), rollouts)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
