"""Rows to Parquet and back, a bounded number of rows and bytes in memory at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = Mapping[str, Any]

_ROWS_AT_A_TIME = 512
_BYTES_AT_A_TIME = 4 * 2**20
ARROW = {"INTEGER": pa.int64(), "REAL": pa.float64(), "TEXT": pa.string(), "BLOB": pa.binary()}
"""Type of a column in SQLite -> in Parquet."""


def table_schema(columns: Mapping[str, str]) -> pa.Schema:
    return pa.schema([(name, ARROW[kind]) for name, kind in columns.items()])


def write_rows(path: Path, schema: pa.Schema, rows: Iterable[Row]) -> list[int]:
    """Returns how many rows each row group of the file has got."""
    sizes = []
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for part in batches(rows):
            writer.write_batch(pa.RecordBatch.from_pylist(part, schema=schema))
            sizes.append(len(part))
    return sizes


def batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    part: list[Row] = []
    size = 0
    for row in rows:
        part.append(row)
        size += sum(len(value) for value in row.values() if isinstance(value, bytes))
        if len(part) == _ROWS_AT_A_TIME or size >= _BYTES_AT_A_TIME:
            yield part
            part, size = [], 0
    if part:
        yield part


def read_rows(path: Path) -> Iterator[Row]:
    with pq.ParquetFile(path) as file:
        for part in range(file.num_row_groups):
            yield from file.read_row_group(part).to_pylist()


def read_part(path: Path, part: int) -> list[Row]:
    """The rows of one row group."""
    with pq.ParquetFile(path) as file:
        return file.read_row_group(part).to_pylist()
