"""What can go wrong, in two kinds that never mix.

A *failure* is data: a completion that could not be made, a verdict that could not be reached. It travels in a record
(``Verdict.reason``, ``Group.failure``), is counted, and costs at most its group. An *error* ends the run. Every error a
person can cause and repair derives from `UserError`: the command line prints its message without a traceback and exits
with status 2. A `StandstillError` is printed alike, with status 3.
"""

from __future__ import annotations


class NearpolicyError(Exception):
    """Root of all errors raised on purpose."""


class UserError(NearpolicyError):
    """Bad input; the message names the thing, what was found, and what to do."""


class ConfigError(UserError):
    """A recipe or an override that is refused before anything heavy starts."""


class DataError(UserError):
    """A data set that is refused; the message names file, row and column."""


class ModelError(UserError):
    """A model that cannot be loaded or whose architecture the packed attention does not fit."""


class RunFolderError(UserError):
    """A run folder that cannot be written, is occupied, or is not a run."""


class RolloutsError(UserError):
    """Group after group fails, so that nothing will ever be trained; the message names the last reason."""


class ObjectiveError(UserError, ValueError):
    """Rewards or ratios for which the objective has no number; the message names them."""


class VerifierError(UserError):
    """A reward that never gives an answer, so that nothing can be judged; the message names it and the last reason."""


class StalenessError(NearpolicyError):
    """A broken staleness invariant; it names the group and the versions."""


class SyncError(NearpolicyError):
    """Weights that do not fit or do not match after a publication; it names the tensors."""


class StandstillError(NearpolicyError):
    """A named wait ran past its bound; the message says who waits for whom."""


class RecordLost(NearpolicyError):
    """The process that writes the record has died. The session ends; what was committed is kept, and another session
    goes on from there."""


class ControllerLost(NearpolicyError):
    """The actor that a session ran in has died, or its node has. What was recorded is kept."""


class EngineError(NearpolicyError):
    """The generator cannot go on (not: one request failed, which is data)."""


def first_error(error: BaseException) -> BaseException:
    """The error itself, or the first one inside a group: the one to report."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def described(error: BaseException, limit: int = 300) -> str:
    """Kind and text of any exception on one line; the text is foreign code's too, and may raise or be endless."""
    try:
        text = " ".join(str(error)[: 20 * limit].split())
    except Exception:
        text = "its text cannot be had"
    text = text if len(text) <= limit else text[: limit - 3] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def nearest(word: str, known: list[str]) -> str | None:
    """The closest of ``known`` to a misspelt ``word``, or None if nothing is close."""
    import difflib

    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return matches[0] if matches else None
