"""Which folders a run may take."""

from __future__ import annotations

import json
import math

import pytest

from nearpolicy.errors import RunFolderError
from nearpolicy.store.folder import SUMMARY_KEYS, create_run_folder, refuse_unusable


def test_runs_are_numbered_after_the_highest(tmp_path):
    for taken in ("demo-1", "demo-7", "demo-x", "other-9"):
        (tmp_path / taken).mkdir()
    assert create_run_folder("demo", parent=tmp_path).name == "demo-8"
    assert create_run_folder("new.run", parent=tmp_path / "deep").path == (tmp_path / "deep" / "new.run-1").resolve()


def test_a_named_folder_is_taken_unless_it_holds_a_run(tmp_path):
    folder = create_run_folder("x", directory=tmp_path / "mine")
    folder.path.joinpath("notes.txt").write_text("not a run")
    assert create_run_folder("x", directory=tmp_path / "mine") == folder
    folder.metrics.write_text("")
    with pytest.raises(RunFolderError, match=r"already holds a run \(it has metrics.jsonl\)"):
        create_run_folder("x", directory=tmp_path / "mine")


def test_a_folder_that_cannot_be_written_is_refused_without_making_anything(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="is a file"):
        refuse_unusable(tmp_path / "file" / "runs" / "a")
    with pytest.raises(RunFolderError):
        create_run_folder("x", parent="/proc/nearpolicy")
    with pytest.raises(RunFolderError, match=r"run\.name"):
        create_run_folder("../x", parent=tmp_path)
    refuse_unusable(tmp_path / "new" / "deep")
    assert not (tmp_path / "new").exists()


def test_a_summary_is_whole_strict_json(tmp_path):
    folder = create_run_folder("x", parent=tmp_path)
    with pytest.raises(ValueError, match="lacks wall_s"):
        folder.write_summary({key: 0 for key in SUMMARY_KEYS if key != "wall_s"})
    folder.write_summary(dict.fromkeys(SUMMARY_KEYS, 0) | {"mismatch": {"mean": math.nan, "max": 1.0}})
    assert json.loads(folder.summary.read_text())["mismatch"] == {"mean": None, "max": 1.0}
    assert [path.name for path in folder.path.iterdir()] == ["summary.json"]
