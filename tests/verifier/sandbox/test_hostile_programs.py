"""Programs that try to get a reward without solving their task, or out of the sandbox: the verdict in their header, on
every path of isolation, alone and eight at a time, as this user and as an ordinary one; and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hostile import CASES, children, header, judged, why_not

from nearpolicy.verifier.sandbox import kernel

PATHS = ("namespaces", "landlock", "bubblewrap")
PACKAGE = Path(kernel.__file__).parents[3]


def files_for(isolation: str, folder: Path = CASES, *, quick: bool = False) -> list[Path]:
    """A few attacks are on what one of the paths does not hide. ``quick``: of the slowest path fewer."""
    files = sorted(folder.glob("handed/*.py" if quick and isolation == "bubblewrap" else "*/*.py"))
    return [file for file in files if isolation in header(file).get("only on", isolation)]


def require(isolation: str) -> None:
    if (reason := why_not(isolation)) is not None:
        pytest.skip(reason)


def faults(found: dict[str, dict], files: list[Path], *, under_load: bool = False) -> list[str]:
    """What is not as the headers of the files say. ``under_load``: a program may get no processor time, which is no
    verdict on it."""
    wrong = []
    for file in files:
        expected = header(file)["expected verdict"].split(" or ")
        mine = found[file.name]
        told = list(zip(mine["verdicts"], mine["reasons"], strict=True))
        if under_load:
            told = [each for each in told if each[0] != "sandbox_failure" or "no processor time" not in each[1]]
        if not {verdict for verdict, _ in told} <= set(expected):
            wrong.append(f"{file.name}: {mine['verdicts']} {mine['reasons'][0]}, not {expected}")
        wrong += [f"{file.name}: {what}" for what in mine["reached"]]
    return wrong


@pytest.mark.parametrize("isolation", PATHS)
def test_every_case_gets_its_verdict_and_leaves_nothing(isolation):
    require(isolation)
    before = children()
    mounts = Path("/proc/self/mountinfo").read_text()
    files = files_for(isolation, quick=True)
    assert faults(asyncio.run(judged(isolation, 8, 1, files)), files) == []
    deadline = time.monotonic() + 5
    while children() - before and time.monotonic() < deadline:  # killed processes are taken back in their own time
        time.sleep(0.01)
    assert children() - before == set()
    assert Path("/proc/self/mountinfo").read_text() == mounts


@pytest.mark.parametrize("isolation", PATHS)
def test_every_case_gets_its_verdict_for_an_ordinary_user_too(isolation, tmp_path):
    require(isolation)
    if os.getuid() != 0:
        pytest.skip("this is an ordinary user already")
    python = ordinary_python()
    where = Path("/tmp") / f"np-ordinary-{os.getpid()}"
    shutil.copytree(PACKAGE / "nearpolicy", where / "nearpolicy", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(CASES.parent, where / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    try:
        subprocess.run(["chmod", "-R", "a+rX", where], check=True)
        files = files_for(isolation, where / "tests" / "cases", quick=True)
        done = subprocess.run(
            [python, where / "tests" / "hostile.py", isolation, "4", "1", *files],
            user=65534, group=65534, extra_groups=[], env={"PYTHONPATH": str(where), "PATH": os.environ["PATH"]},
            cwd="/", capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert faults(json.loads(done.stdout.splitlines()[-1]), files) == []
    finally:
        shutil.rmtree(where)


def ordinary_python() -> str:
    """An interpreter that others can read; the one of this process may lie in a private folder."""
    for candidate in (os.path.realpath(sys._base_executable), "/usr/bin/python3", "/usr/local/bin/python3"):
        asked = [candidate, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        try:
            if subprocess.run(asked, user=65534, group=65534, extra_groups=[], capture_output=True).returncode == 0:
                return candidate
        except OSError:
            continue
    pytest.skip("no interpreter here can be started by an ordinary user")


@pytest.mark.large
@pytest.mark.parametrize("isolation", PATHS)
def test_no_verdict_changes_in_twenty_repeats_under_load(isolation):
    require(isolation)
    files = files_for(isolation)
    quick = [file for file in files if header(file).get("limits", "-") == "-"]
    slow = [file for file in files if file not in quick]
    assert faults(asyncio.run(judged(isolation, 8, 20, quick)), quick, under_load=True) == []
    assert faults(asyncio.run(judged(isolation, 8, 3, slow)), slow, under_load=True) == []


@pytest.mark.large
@pytest.mark.parametrize("isolation", PATHS)
def test_every_case_gets_its_verdict_alone(isolation):
    require(isolation)
    files = files_for(isolation)
    assert faults(asyncio.run(judged(isolation, 1, 1, files)), files) == []
