"""``nearpolicy verify KIND``: one text through one reward, in the same worker process and under the same limits as in
training, to see what it scores and why. Each kind is a module; here is what they share.

The last line is one JSON object: ``outcome`` (scored, abstained, failed), ``reward`` (null unless scored), ``reason``,
``parts``, ``seconds``. Every verdict ends with status 0, a failed one too: it is what training would have been told.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearpolicy.errors import ConfigError, UserError, VerifierError
from nearpolicy.visible import visible

if TYPE_CHECKING:
    from nearpolicy.records import Verdict
    from nearpolicy.verifier.config import RewardConfig

COMMANDS: dict[str, tuple[str, str]] = {
    "code": ("nearpolicy.launch.verify_code", "Run a program's tests in the sandbox (reward code)."),
    "math": ("nearpolicy.launch.verify_math", "Compare an answer with the right one (reward math_verify)."),
    "ifeval": ("nearpolicy.launch.verify_ifeval", "Check which instructions a response follows (reward ifeval)."),
}
"""As `cli.COMMANDS`."""

STANDARD_INPUT = "-"

Settings = Annotated[
    list[str] | None,
    typer.Argument(help="Settings of the reward as in a recipe: key=value, any number.", show_default=False),
]
TimeLimit = Annotated[float, typer.Option("--timeout-s", help="As verifier.timeout_s in a recipe.")]


def reward_from(kind: str, settings: Sequence[str]) -> RewardConfig:
    """The reward of a kind with settings ``key=value``; `ConfigError` names what is wrong with them."""
    from nearpolicy.config import parse_value

    given: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{setting}: write a setting of the reward as key=value")
        given[name.strip()] = parse_value(value, f"setting {setting}")
    return reward_of({**given, "kind": kind}, lambda place: f"setting {place} of the reward {kind}")


def reward_of(given: Mapping[str, Any], where: Callable[[str], str]) -> RewardConfig:
    """The reward that a mapping describes; `ConfigError` with a line for each fault. ``where``: what to call a place in
    it, ``a.b``."""
    from pydantic import TypeAdapter, ValidationError

    from nearpolicy.verifier.config import RewardConfig

    try:
        return TypeAdapter(RewardConfig).validate_json(json.dumps(given, default=str), strict=True)
    except ValidationError as error:
        problems = [(where(".".join(map(str, each["loc"][1:]))), _problem(each)) for each in error.errors()]
        raise ConfigError("\n".join(f"{place}: {what}" for place, what in problems)) from None


def _problem(problem: Any) -> str:
    unknown = problem["type"] == "extra_forbidden"
    return "there is no such setting; docs/recipe-reference.md lists them" if unknown else problem["msg"]


def judged(reward: RewardConfig, text: str, columns: Mapping[str, Any], *, timeout_s: float) -> Verdict:
    """The verdict of a reward on a text, for a row with these columns."""
    from nearpolicy.verifier.config import VerifierConfig
    from nearpolicy.verifier.service import judged_once
    from nearpolicy.verifier.workers import WorkerDied

    if not 0.001 <= timeout_s <= 1e6:
        raise ConfigError(f"--timeout-s is {timeout_s:g}; use something from 0.001 to 1000000 seconds")
    try:
        return asyncio.run(judged_once(reward, text, columns, VerifierConfig(timeout_s=timeout_s)))
    except WorkerDied as error:
        raise VerifierError(f"{error}, so nothing could be judged; see above for what it said, and try again") from None


def show(verdict: Verdict) -> None:
    """For people where a terminal listens; the last line is for programs."""
    if sys.stdout.isatty():
        value = "" if verdict.value is None else f" {verdict.value:g}"
        print(f"{verdict.outcome.value}{value} in {verdict.seconds:.3g} s")
        for name, part in verdict.parts.items():
            print(visible(f"  {name:<48} {part:g}"))
        if verdict.reason:
            print(visible(f"  {verdict.reason}"))
    found = {
        "outcome": verdict.outcome.value,
        "reward": verdict.value,
        "reason": verdict.reason,
        "parts": dict(verdict.parts),
        "seconds": verdict.seconds,
    }
    print(json.dumps(found, allow_nan=False))


# What is given as text, as a file, or through a pipe


def json_or_file(given: str, option: str) -> tuple[str, str]:
    """(the text, what to call its place) of an option that is JSON or names a file with it."""
    if given.lstrip().startswith(("{", "[")):
        return given, option
    return contents_of(given, option), f"{option} {given}"


def text_of(name: str, text: str | None, file: str | None) -> str:
    if (text is None) == (file is None):
        found = "neither" if text is None else "both"
        raise UserError(f"give --{name} TEXT or --{name}-file FILE ({STANDARD_INPUT} for standard input), not {found}")
    return text if text is not None else contents_of(str(file), f"--{name}-file")


def contents_of(file: str, option: str) -> str:
    """All of a file; bytes that are no UTF-8 come out as U+FFFD, as a decoder of tokens has it."""
    try:
        data = sys.stdin.buffer.read() if file == STANDARD_INPUT else Path(file).read_bytes()
    except (OSError, ValueError) as error:
        raise UserError(f"{option} {file}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    return data.decode(errors="replace")
