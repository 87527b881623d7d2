"""``nearpolicy COMMAND``: a table of commands, each in a module that is imported when it runs and not before.

A `UserError` is a message on stderr and exit status 2, never a traceback; so is a `StandstillError`, with status 3.
``--help`` loads neither torch nor numpy nor pydantic: the table carries the help lines. Ctrl-C is listened to before
anything is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from nearpolicy.errors import StandstillError, UserError
from nearpolicy.launch import interrupts
from nearpolicy.machine import prepare_environment
from nearpolicy.visible import visible

STANDSTILL = 3
"""Exit status of a run in which one part waited too long for another."""

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("nearpolicy.launch.train", "Run a recipe to its end; writes a run folder."),
    "eval": ("nearpolicy.launch.evaluate", "Evaluate a model on a recipe's held-out set."),
    "check": ("nearpolicy.launch.check", "Explain a recipe and refuse contradictions, without loading a model."),
    "calibrate": ("nearpolicy.launch.calibrate", "Compare a reward with labels: agreement, leanings, attacks."),
    "verify": ("nearpolicy.launch.verify", "Judge one text as a reward does in training, and say why."),
    "inspect": ("nearpolicy.launch.inspect", "Show rollouts of a run: text, rewards, versions, advantages, fates."),
    "audit": ("nearpolicy.launch.audit", "Rank rewarded completions by signs that they did not earn it."),
    "replay": ("nearpolicy.launch.replay", "Train a run's recording again: the same weights, or where they differ."),
    "compare": ("nearpolicy.launch.compare", "Compare objectives on a run's recorded rollouts."),
    "why": ("nearpolicy.launch.why", "Say who waits for whom in a run, since when, with stacks; or how it ended."),
    "export": ("nearpolicy.launch.export", "Write a run's record as Parquet or JSONL, without loss."),
    "import": ("nearpolicy.launch.import_run", "Make a run folder of an exported record."),
    "doctor": ("nearpolicy.launch.doctor", "Examine this machine, or a model: what is wrong, and what to do."),
    "report": ("nearpolicy.launch.report", "Write a run's report: one HTML file."),
}
"""Name -> (module with a function `command`, or with a table `COMMANDS` of its own; help line)."""


def run(arguments: Sequence[str]) -> NoReturn:
    """Run a command line in this process; always ends with `SystemExit`."""
    from nearpolicy.launch.commands import app

    try:
        app(args=list(arguments), prog_name="nearpolicy")
    except (UserError, StandstillError) as error:
        print(visible(f"nearpolicy: {error}"), file=sys.stderr)
        sys.exit(STANDSTILL if isinstance(error, StandstillError) else 2)
    except Exception as error:
        if (type(error).__module__, type(error).__name__) != ("sqlite3", "DatabaseError"):
            raise
        print(f"nearpolicy: the store of the run is damaged: {error}. Restore it from a copy", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)


def main() -> NoReturn:
    """Entry point of the command line."""
    interrupts.listen()
    prepare_environment()
    run(sys.argv[1:])


if __name__ == "__main__":
    main()
