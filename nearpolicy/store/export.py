"""A run's record as Parquet or JSONL files, and back, without loss.

    out/
        manifest.json                  format, schema, rows of each table
        tables/admissions.parquet ...  every table of `schema`, column by column: what `import_run` reads
        rollouts.parquet               one row per rollout for people and other programs: text, tokens, rewards, fates
        config.yaml metrics.jsonl summary.json   as they lie in the run folder, which weights and checkpoints stay in

In JSONL a blob that holds text or JSON is a string (lone surrogates as escapes; two that JSON would read as one
character make it ``{"$bytes": base64}``), any other is base64.
"""

from __future__ import annotations

import base64
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nearpolicy.errors import RunFolderError, described
from nearpolicy.store.folder import create_run_folder, finite
from nearpolicy.store.parquet import Row, read_rows, table_schema, write_rows
from nearpolicy.store.reader import RunReader, StoredRollout
from nearpolicy.store.schema import APPLICATION_ID, BRANCHES_BEFORE, MIGRATIONS, SCHEMA, SCHEMA_VERSION, prompt_text

FORMATS = ("parquet", "jsonl")
BESIDE = ("config.yaml", "metrics.jsonl", "summary.json")
_TEXT = {
    "run": {"value"}, "admissions": {"task", "prompt"}, "groups": {"failure"}, "rollouts": {"text"},
    "verdicts": {"source", "parts", "reason"}, "endings": {"reason"}, "events": {"numbers"}, "versions": {"digests"},
    "evaluations": {"task", "prompt", "text"}, "branches": {"reason"},
}  # fmt: skip
"""Blobs that are UTF-8 with surrogates passed through."""


def export_run(run_dir: Path, out: Path, form: str = "parquet") -> dict[str, int]:
    """Write ``out``, which must not exist; returns the rows of each table."""
    if form not in FORMATS:
        raise ValueError(f"a run is exported as one of {', '.join(FORMATS)}, not as {form!r}")
    if out.exists():
        raise RunFolderError(f"{out} exists already; name a folder that is not there")
    draft = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        with RunReader(run_dir) as run, run.snapshot():
            (draft / "tables").mkdir(parents=True)
            counts = {}
            for table, columns in _columns(run).items():
                rows = _rows_of(run, table)
                counts[table] = _WRITE[form](draft / "tables" / f"{table}.{form}", table, columns, rows)
            _write_rollouts(run, draft / f"rollouts.{form}", form)
            schema = run.query("PRAGMA user_version")[0][0]
            manifest = {"nearpolicy_run": run.folder.name, "format": form, "schema": schema, "rows": counts}
            (draft / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
            for name in BESIDE:
                if (run.folder.path / name).exists():
                    shutil.copy(run.folder.path / name, draft / name)
        draft.rename(out)
    except OSError as error:
        raise RunFolderError(f"{out} cannot be written: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return counts


def import_run(source: Path, run_dir: Path) -> dict[str, int]:
    """Make a run folder of what `export_run` wrote: every row of every table as it was. It cannot be trained any
    further without its checkpoints, but read, replayed and compared."""
    manifest = _manifest(source)
    folder = create_run_folder("", directory=run_dir)
    try:
        counts = _filled(folder.store, source, manifest)
        for name in BESIDE:
            if (source / name).exists():
                shutil.copy(source / name, folder.path / name)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, sqlite3.Error, pa.ArrowException) as error:
        for file in folder.path.glob("store.*"):
            file.unlink()
        raise RunFolderError(f"{source} cannot be read as an exported run: {described(error)}") from error
    return counts


def _manifest(source: Path) -> dict[str, Any]:
    try:
        found = json.loads((source / "manifest.json").read_text())
        form, schema, rows = found["format"], int(found["schema"]), found["rows"]
        if form not in FORMATS or not isinstance(rows, dict):
            raise ValueError(f"its format is {form!r}")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunFolderError(f"{source} is not an exported run: its manifest.json cannot be read ({error})") from None
    if schema > SCHEMA_VERSION:
        raise RunFolderError(f"{source} has schema {schema}; this Nearpolicy reads up to {SCHEMA_VERSION}. Update it")
    return found


def _filled(store: Path, source: Path, manifest: Mapping[str, Any]) -> dict[str, int]:
    form, schema = manifest["format"], manifest["schema"]
    connection = sqlite3.connect(store, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(f"BEGIN; {SCHEMA} PRAGMA application_id = {APPLICATION_ID};")
        counts = {}
        for table, told in manifest["rows"].items():
            known = [row[1] for row in connection.execute(f"PRAGMA table_info({_name(table)})")]
            counts[table] = 0
            for row in _READ[form](source / "tables" / f"{table}.{form}", table):
                if unknown := row.keys() - set(known):
                    raise ValueError(f"the table {table} has no column {', '.join(sorted(unknown))}")
                marks = ", ".join("?" * len(row))
                names = ", ".join(row)
                connection.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", tuple(row.values()))
                counts[table] += 1
            if counts[table] != told:
                raise ValueError(f"the table {table} has {counts[table]} rows, and the manifest tells of {told}")
        if "branches" not in counts:
            connection.execute(f"INSERT INTO branches {BRANCHES_BEFORE}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION if schema in (*MIGRATIONS, SCHEMA_VERSION) else 0}")
        connection.execute("COMMIT")
        return counts
    finally:
        connection.close()


def _name(table: str) -> str:
    if table not in {
        *_TEXT,
        "steps",
        "consumption",
        "undone",
        "replayed",
        "trained_rows",
        "fates",
        "payloads",
        "moved",
    }:
        raise ValueError(f"no table of a run is called {table!r}")
    return table


def _columns(run: RunReader) -> dict[str, dict[str, str]]:
    """Table -> column -> type."""
    tables = run.query("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
    return {
        _name(table): {row["name"]: row["type"] for row in run.query(f"PRAGMA table_info({table})")}
        for (table,) in tables
    }


def _rows_of(run: RunReader, table: str) -> Iterator[Row]:
    """Payloads that were moved to files stand in the table again; of dropped ones the row says that they were."""
    kept = "WHERE file IS NULL" if table == "moved" else ""
    for row in run.each(f"SELECT * FROM {table} {kept}"):
        yield dict(row)
    if table == "payloads":
        yield from run.moved_payloads()


# Parquet


def _write_parquet(path: Path, table: str, columns: Mapping[str, str], rows: Iterator[Row]) -> int:
    return sum(write_rows(path, table_schema(columns), rows))


def _read_parquet(path: Path, table: str) -> Iterator[Row]:
    return read_rows(path)


# JSONL


def _write_jsonl(path: Path, table: str, columns: Mapping[str, str], rows: Iterator[Row]) -> int:
    texts, total = _TEXT.get(table, set()), 0
    with path.open("w", encoding="ascii") as file:
        for row in rows:
            plain = {name: _as_json(value, name in texts) for name, value in row.items()}
            file.write(json.dumps(plain, allow_nan=False) + "\n")
            total += 1
    return total


def _as_json(value: Any, is_text: bool) -> Any:
    if not isinstance(value, bytes):
        return value
    as_base64 = base64.b64encode(value).decode("ascii")
    if not is_text:
        return as_base64
    text = value.decode("utf-8", "surrogatepass")
    return text if json.loads(json.dumps(text)) == text else {"$bytes": as_base64}


def _from_json(value: Any) -> bytes | None:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    return None if value is None else base64.b64decode(value["$bytes"], validate=True)


def _read_jsonl(path: Path, table: str) -> Iterator[Row]:
    texts, blobs = _TEXT.get(table, set()), _BLOBS.get(table, set())
    with path.open("rb") as file:  # split at line feeds alone: text may hold other separators
        for line in file:
            row = json.loads(line)
            for name in texts & row.keys():
                row[name] = _from_json(row[name])
            for name in blobs & row.keys():
                row[name] = None if row[name] is None else base64.b64decode(row[name], validate=True)
            yield row


_BLOBS = {
    "rollouts": {"payload"}, "verdicts": {"arrays"}, "trained_rows": {"payload"}, "payloads": {"payload"},
    "replayed": {"payload"},
}  # fmt: skip
_WRITE: Mapping[str, Callable[..., int]] = {"parquet": _write_parquet, "jsonl": _write_jsonl}
_READ: Mapping[str, Callable[..., Iterator[Row]]] = {"parquet": _read_parquet, "jsonl": _read_jsonl}


# For people

_ROLLOUT = pa.schema(
    [
        ("admission", pa.int64()), ("attempt", pa.int64()), ("sample", pa.int64()), ("step", pa.int64()),
        ("task", pa.string()), ("prompt", pa.string()), ("text", pa.string()), ("reward", pa.float64()),
        ("ending", pa.string()), ("reason", pa.string()), ("fates", pa.string()), ("verdicts", pa.string()),
        ("context_ids", pa.list_(pa.list_(pa.int32()))), ("token_ids", pa.list_(pa.list_(pa.int32()))),
        ("mask", pa.list_(pa.list_(pa.bool_()))), ("behavior_logprobs", pa.list_(pa.list_(pa.float32()))),
        ("versions", pa.list_(pa.list_(pa.int32()))), ("advantages", pa.list_(pa.list_(pa.float32()))),
    ]
)  # fmt: skip


def _write_rollouts(run: RunReader, path: Path, form: str) -> None:
    rows = (_for_people(item) for item in run.rollouts())
    if form == "parquet":
        write_rows(path, _ROLLOUT, rows)
        return
    with path.open("w", encoding="ascii") as file:
        for row in rows:
            file.write(json.dumps(finite(row), allow_nan=False) + "\n")


def _for_people(item: StoredRollout) -> Row:
    """Lone surrogates, which no Parquet string can hold, as replacement characters here; the tables have them."""
    segments = item.rollout.segments
    verdicts = {
        source: {"outcome": v.outcome.value, "value": v.value, "parts": dict(v.parts), "reason": v.reason}
        for source, v in item.verdicts.items()
    }

    def lists(arrays: Sequence[np.ndarray]) -> list[list[Any]]:
        return [array.tolist() for array in arrays]

    advantages = [item.rows[place].advantages if place in item.rows else np.zeros(0) for place in range(len(segments))]
    return {
        "admission": item.admission.index,
        "attempt": item.admission.attempt,
        "sample": item.rollout.sample,
        "step": item.step,
        "task": _clean(item.admission.prompt.task),
        "prompt": _clean(prompt_text(item.admission.prompt)),
        "text": _clean(item.rollout.text),
        "reward": item.reward,
        "ending": item.ending,
        "reason": _clean(item.reason),
        "fates": json.dumps({fate.value: tokens for fate, tokens in item.fates.items()}),
        "verdicts": json.dumps(finite(verdicts)),
        "context_ids": lists([s.context_ids for s in segments]),
        "token_ids": lists([s.token_ids for s in segments]),
        "mask": lists([s.mask for s in segments]),
        "behavior_logprobs": lists([s.behavior_logprobs for s in segments]),
        "versions": lists([s.versions for s in segments]),
        "advantages": lists(advantages),
    }


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")
