"""A run that outlives its sessions: where one ends because a process that it cannot do without has died, the next one
goes on from the record, as `nearpolicy train --resume` would.

    session -> lost -> its folder is let go -> another session, from the record -> ...

Lost: the process of the controller (`runtime.controller: actor`), that of the record, and a learner for which there is
no way back within its session. `MOST` sessions in a row may be lost without a new step; the next loss ends the run, as
every other error does. Of a session that is lost before version 0 is published nothing is worth keeping: what it left
in the folder is removed, and the run begins anew there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nearpolicy.errors import ControllerLost, NearpolicyError, RecordLost, RunFolderError
from nearpolicy.launch.ray.learner import LearnerLost
from nearpolicy.launch.session import Session, run_session
from nearpolicy.launch.why import comes_free
from nearpolicy.launch.words import count
from nearpolicy.store.folder import remove_run
from nearpolicy.store.reader import RunReader

MOST = 3
"""Sessions in a row that may be lost without a new step."""
LOST = (ControllerLost, RecordLost, LearnerLost)


def session_of(**given: Any) -> Session:
    """Where `runtime.controller` says; ``given`` are fields of `Session`."""
    if given["config"].runtime.controller == "actor":
        from nearpolicy.launch.ray.controller import SessionInActor

        return SessionInActor(**given)
    return Session(**given)


class Supervised:
    """A run, whichever session is at work."""

    def __init__(self, session: Session) -> None:
        self.session = session
        """The one at work: whoever wants to stop the run stops this one."""
        self.sessions = 1
        """So far."""
        self._steps: int | None = None
        """In the record when the last session was lost."""
        self._losses = 0

    def run(self) -> dict[str, Any]:
        """To the end; gives the summary."""
        while True:
            try:
                return run_session(self.session)
            except LOST as error:
                lost = self.session
                self.session = self._next(lost, error)
                self.session.stop_requested |= lost.stop_requested  # asked for in the meantime

    def _next(self, lost: Session, error: NearpolicyError) -> Session:
        """A session in the place of the one that was lost; raises ``error`` if there shall be none."""
        steps = recorded_steps(lost)
        self._losses = 1 if steps != self._steps else self._losses + 1
        self._steps = steps
        if lost.stop_requested:
            raise error
        if self._losses > MOST:
            raise type(error)(
                f"{error}. That was loss {self._losses} without a new step, so that the run ends"
            ) from error
        how = "Beginning anew" if steps is None else f"Going on from the record of {count(steps, 'step')}"
        lost.say(f"{error}. {how} by itself (loss {self._losses}; at most {MOST} without a new step)")
        self.sessions += 1
        return replace(lost, resumes=steps is not None, begun=False, opening=False)


def recorded_steps(lost: Session) -> int | None:
    """Of a session that was lost; None if it had published nothing, and then its folder is as it found it."""
    folder = lost.folder
    if folder is None:
        return None
    _wait_until_let_go(lost)
    was_recorded = lost.resumes or lost.begun
    if not folder.store.exists():
        if was_recorded:
            raise RunFolderError(
                f"{folder.path} is not to be seen from this machine, so that nobody can go on with the run from here; "
                f"`nearpolicy train --resume {folder.path}` where it is. (run.dir has to lie on storage that all nodes "
                "share)"
            )
        return None
    try:
        with RunReader(folder.path) as run:
            if was_recorded or run.versions():
                return len(run.steps())
    except RunFolderError:  # a store that had only begun to be one
        if was_recorded:
            raise
    remove_run(folder, made=False)
    return None


def _wait_until_let_go(lost: Session) -> None:
    """A process may need a moment to die, or be cut off and know nothing of it."""
    limit, folder = lost.config.runtime.start_timeout_s, lost.folder
    if not comes_free(folder, limit):
        raise RunFolderError(
            f"{folder.path} is still being written, {limit:g} s (runtime.start_timeout_s) after its controller was "
            f"lost: end that process (`nearpolicy why {folder.path}` knows it), then `nearpolicy train --resume "
            f"{folder.path}`"
        )
