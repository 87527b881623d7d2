"""Payloads that were moved out of the database: Parquet files in the run folder, and how they are read.

    payloads/7.parquet      columns admission, attempt, what, payload, as in the table `payloads`; never changed again

A row of the table `moved` says in which row group of which file a payload is.
"""

from __future__ import annotations

from nearpolicy.errors import RunFolderError, described
from nearpolicy.store.folder import RunFolder

Key = tuple[int, int, str]
"""Admission, attempt, what."""


class MovedPayloads:
    """Reads them; keeps the row group it has read last, as neighbours are mostly asked for together."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._last: tuple[tuple[int, int], dict[Key, bytes]] | None = None

    def read(self, file: int, part: int, key: Key) -> bytes:
        """`RunFolderError` if it is not where it was put."""
        if self._last is None or self._last[0] != (file, part):
            self._last = ((file, part), self._part(file, part))
        try:
            return self._last[1][key]
        except KeyError:
            path = self._folder.moved_payloads(file)
            raise RunFolderError(f"{path} does not hold what it should of group {key[0]}; fetch a copy of it") from None

    def _part(self, file: int, part: int) -> dict[Key, bytes]:
        from nearpolicy.store.parquet import read_part

        path = self._folder.moved_payloads(file)
        try:
            return {(r["admission"], r["attempt"], r["what"]): r["payload"] for r in read_part(path, part)}
        except (OSError, ValueError, LookupError) as error:  # damaged files are all of these
            raise RunFolderError(
                f"{path} cannot be read ({described(error)}): it holds tokens that store.retention has moved out of "
                "the store. Fetch a copy of it"
            ) from error
