"""A run's record out of its store and back: every row as it was, whatever it holds."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from synthetic_run import NASTY, admission, make_run, segment

from nearpolicy.errors import RunFolderError
from nearpolicy.records import Group, Outcome, Rollout, Verdict
from nearpolicy.store.export import FORMATS, export_run, import_run
from nearpolicy.store.folder import create_run_folder
from nearpolicy.store.reader import RunReader
from nearpolicy.store.schema import SCHEMA_VERSION
from nearpolicy.store.writer import SqliteStore


def dump(run: Path) -> dict[str, list[tuple]]:
    connection = sqlite3.connect(run / "store.sqlite")
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return {name: sorted(connection.execute(f"SELECT * FROM {name}").fetchall(), key=repr) for name in tables}


@pytest.fixture
def nasty(tmp_path: Path) -> Path:
    """Line separators, lone surrogates, NUL, numbers at their limits, and a completion of 100,000 tokens."""
    folder = create_run_folder("run", directory=tmp_path / "run")
    numbers = np.random.default_rng(0)
    long, empty = segment(100_000, 0, numbers), segment(0, 0, numbers)
    verdict = Verdict(outcome=Outcome.SCORED, value=-0.0, parts={NASTY: 5e-324}, arrays={"a": np.array([np.nan, -0.0])})
    rollouts = (
        Rollout(sample=0, segments=(long,), text=NASTY, numerics="exact"),
        Rollout(sample=1, segments=(empty,), text="\u2028\ud800\x00", numerics="exact"),
    )
    with SqliteStore.create(folder, config={NASTY: [1.5, None, NASTY]}) as store:
        store.filled(
            Group(admission=admission(0), rollouts=rollouts, verdicts=({NASTY: verdict}, {}), rewards=(1e308, None))
        )
        store.note("big", 2**70)
    return folder.path


@pytest.mark.parametrize("form", FORMATS)
def test_every_table_comes_back_as_it_was(tmp_path, nasty, form):
    rows = export_run(nasty, tmp_path / "out", form)
    assert import_run(tmp_path / "out", tmp_path / "back") == rows
    assert dump(tmp_path / "back") == dump(nasty)
    with RunReader(nasty) as before, RunReader(tmp_path / "back") as after:
        there, here = before.group(0), after.group(0)
        assert here.rollouts[0].text == there.rollouts[0].text == NASTY
        assert np.array_equal(here.rollouts[0].segments[0].token_ids, there.rollouts[0].segments[0].token_ids)
        assert after.fact("big") == 2**70


@pytest.mark.parametrize("form", FORMATS)
def test_a_whole_run_comes_back_with_its_batches(tmp_path, form):
    run = make_run(tmp_path / "run").path
    export_run(run, tmp_path / "out", form)
    import_run(tmp_path / "out", tmp_path / "back")
    assert dump(tmp_path / "back") == dump(run)


def test_rollouts_are_there_for_other_programs(tmp_path, nasty):
    export_run(nasty, tmp_path / "p")
    export_run(nasty, tmp_path / "j", "jsonl")
    table = pq.read_table(tmp_path / "p" / "rollouts.parquet").to_pylist()
    lines = [json.loads(line) for line in (tmp_path / "j" / "rollouts.jsonl").read_text().split("\n")[:-1]]
    for rows in (table, lines):
        assert [len(row["token_ids"][0]) for row in rows] == [100_000, 0]
        assert [row["reward"] for row in rows] == [1e308, None]
        assert rows[1]["text"] == "\u2028?\x00"


def test_nothing_is_overwritten_and_what_is_no_export_is_refused(tmp_path, nasty):
    export_run(nasty, tmp_path / "out")
    with pytest.raises(RunFolderError, match="exists already"):
        export_run(nasty, tmp_path / "out")
    with pytest.raises(RunFolderError, match="already holds a run"):
        import_run(tmp_path / "out", nasty)
    with pytest.raises(RunFolderError, match="not an exported run"):
        import_run(tmp_path, tmp_path / "back")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    for change, words in (
        ({"schema": SCHEMA_VERSION + 1}, "reads up to"),
        ({"format": "csv"}, "not an exported run"),
        ({"rows": manifest["rows"] | {"groups": 7}}, "groups has 1 rows, and the manifest tells of 7"),
        ({"rows": manifest["rows"] | {"groups; DROP TABLE run": 1}}, "no table of a run"),
    ):
        (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest | change))
        with pytest.raises(RunFolderError, match=words):
            import_run(tmp_path / "out", tmp_path / "back")
        assert not (tmp_path / "back" / "store.sqlite").exists()


def test_a_torn_file_is_refused(tmp_path, nasty):
    for form in FORMATS:
        export_run(nasty, tmp_path / form, form)
        file = tmp_path / form / "tables" / f"rollouts.{form}"
        file.write_bytes(file.read_bytes()[:-20])
        with pytest.raises(RunFolderError, match="cannot be read as an exported run"):
            import_run(tmp_path / form, tmp_path / f"back-{form}")
