"""The command line as typer sees it: a slot per command, filled when the command is called."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from nearpolicy import __version__
from nearpolicy.launch.cli import COMMANDS


class _Slot(typer.core.TyperCommand):
    """Stands for a command in the list; becomes the real one when it is called."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        return _real_command(str(self.name)).make_context(*args, **kwargs)


def _real_command(name: str) -> Any:
    path, help_line = COMMANDS[name]
    module = importlib.import_module(path)
    if hasattr(module, "app"):
        return typer.main.get_command(module.app)
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name=name, help=help_line)(module.command)
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
