"""The command line as typer sees it: a slot per command, filled when the command is called."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from nearpolicy import __version__
from nearpolicy.launch.cli import COMMANDS

Table = Mapping[str, tuple[str, str]]
"""As `cli.COMMANDS`."""


class _Slot(typer.core.TyperCommand):
    """Stands for a command in the list; becomes the real one when it is called."""

    real: Callable[[], Any]

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        return self.real().make_context(*args, **kwargs)


class _Commands(typer.core.TyperGroup):
    """The commands of a table; none of their modules is loaded before it is called."""

    table: Table = COMMANDS

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.table:
            return None
        module, help_line = self.table[cmd_name]
        slot = _Slot(name=cmd_name, short_help=help_line)
        slot.real = partial(_real_command, cmd_name, module, help_line)
        return slot


def _real_command(name: str, path: str, help_line: str) -> Any:
    module = importlib.import_module(path)
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    if hasattr(module, "COMMANDS"):
        group = type("_CommandsOfOne", (_Commands,), {"table": module.COMMANDS})
        app.callback(cls=group, help=help_line, no_args_is_help=True)(_nothing)
    else:
        app.command(name=name, help=help_line)(module.command)
    return typer.main.get_command(app)


def _nothing() -> None:
    """What a command that holds others does by itself."""


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
