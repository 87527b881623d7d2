"""``nearpolicy COMMAND``: a table of commands, each in a module that is imported when it runs and not before.

A `UserError` is a message on stderr and exit status 2, never a traceback; so is a `StandstillError`, with status 3.
``--help`` loads neither torch nor numpy nor pydantic: the table carries the help lines.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
import typer.core
import typer.main

from nearpolicy import __version__
from nearpolicy.errors import StandstillError, UserError
from nearpolicy.machine import prepare_environment
from nearpolicy.visible import visible

STANDSTILL = 3
"""Exit status of a run in which one part waited too long for another."""

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("nearpolicy.launch.train", "Run a recipe to its end; writes a run folder."),
    "eval": ("nearpolicy.launch.evaluate", "Evaluate a model on a recipe's held-out set."),
    "check": ("nearpolicy.launch.check", "Explain a recipe and refuse contradictions, without loading a model."),
    "inspect": ("nearpolicy.launch.inspect", "Show rollouts of a run: text, rewards, versions, advantages, fates."),
    "compare": ("nearpolicy.launch.compare", "Compare objectives on a run's recorded rollouts."),
    "report": ("nearpolicy.launch.report", "Write a run's report: one HTML file."),
}
"""Name -> (module with a function `command`, help line)."""


class _Slot(typer.core.TyperCommand):
    """Stands for a command in the list; becomes the real one when it is called."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        return _real_command(str(self.name)).make_context(*args, **kwargs)


def _real_command(name: str) -> Any:
    module, help_line = COMMANDS[name]
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name=name, help=help_line)(importlib.import_module(module).command)
    return typer.main.get_command(app)


class _Commands(typer.core.TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        return _Slot(name=cmd_name, short_help=COMMANDS[cmd_name][1])


app = typer.Typer(
    cls=_Commands, add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"nearpolicy {__version__}")
        raise typer.Exit


@app.callback()
def _nearpolicy(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Asynchronous RL post-training of language models that you can trust and take apart."""


def run(arguments: Sequence[str]) -> NoReturn:
    """Run a command line in this process; always ends with `SystemExit`."""
    try:
        app(args=list(arguments), prog_name="nearpolicy")
    except (UserError, StandstillError) as error:
        print(visible(f"nearpolicy: {error}"), file=sys.stderr)
        sys.exit(STANDSTILL if isinstance(error, StandstillError) else 2)
    sys.exit(0)


def main() -> NoReturn:
    """Entry point of the command line."""
    prepare_environment()
    run(sys.argv[1:])


if __name__ == "__main__":
    main()
