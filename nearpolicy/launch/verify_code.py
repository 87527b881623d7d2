"""``nearpolicy verify code``: a program through its tests, in the sandbox that training would use."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearpolicy.errors import ConfigError, DataError, UserError
from nearpolicy.launch.verify import contents_of, json_or_file
from nearpolicy.visible import visible

if TYPE_CHECKING:
    from nearpolicy.verifier.config import CodeLimits, VerifierConfig
    from nearpolicy.verifier.sandbox.grading import CodeTask, Grade
    from nearpolicy.verifier.sandbox.runs import Limits


def command(
    program: Annotated[
        str | None, typer.Argument(help="A file with the program; - for standard input.", show_default=False)
    ] = None,
    tests: Annotated[
        str | None,
        typer.Option(
            help="JSON, or a file with it: a list of {stdin, stdout}, of {args, result} or of test code; or an object "
            "with tests and, as needed, kind, entry, setup, limits.",
            show_default=False,
        ),
    ] = None,
    case: Annotated[
        str | None,
        typer.Option(help="Instead of both: a program that begins with `# key: value` lines.", show_default=False),
    ] = None,
    entry: Annotated[str | None, typer.Option(help="The function that is tested.", show_default=False)] = None,
    extract: Annotated[
        bool, typer.Option(help="The file is a completion: take the program out of it as training does.")
    ] = False,
    isolation: Annotated[str, typer.Option(help="As verifier.isolation in a recipe.")] = "auto",
    sandbox_url: Annotated[str | None, typer.Option(help="As verifier.sandbox_url.", show_default=False)] = None,
    allow_unisolated: Annotated[bool, typer.Option(help="As verifier.allow_unisolated.")] = False,
    allow_weak_trust: Annotated[
        bool, typer.Option(help="Run test code in one process with the program, which can then cheat it.")
    ] = False,
    package: Annotated[
        list[str] | None, typer.Option(help="What the program may import, as verifier.packages (default: numpy).")
    ] = None,
    every_test: Annotated[bool, typer.Option(help="Go on after a test that is not passed, and count.")] = False,
    output: Annotated[bool, typer.Option(help="Tell what the run that decided printed, too.")] = False,
) -> None:
    """Run a program's tests in the sandbox."""
    from nearpolicy.verifier.code import limits_of, program_of

    text, asked = _asked(program, tests, case)
    if extract:
        text = program_of(text)
    task, limits = _task(asked, text, entry, allow_weak_trust)
    given = {"isolation": isolation, "sandbox_url": sandbox_url, "allow_unisolated": allow_unisolated}
    settings = _settings(given | ({"packages": tuple(package)} if package is not None else {}))
    found, used = asyncio.run(_graded(text, task, limits_of(limits), settings, every_test))
    _show(found, used, output)


def _asked(program: str | None, tests: str | None, case: str | None) -> tuple[str, Mapping[str, Any]]:
    """The program, and what is said about its tests."""
    if case is not None:
        if program is not None or tests is not None:
            raise UserError("--case holds the program and its tests: give nothing else of these")
        text = contents_of(case, "--case")
        return text, _header(text, case)
    if program is None or tests is None:
        raise UserError("give a program and --tests TESTS, or --case FILE")
    found, where = json_or_file(tests, "--tests")
    data = _json(found, where)
    asked = data if isinstance(data, dict) else {"tests": data}
    unknown = asked.keys() - {"tests", "kind", "entry", "setup", "limits"}
    if unknown or "tests" not in asked:
        problem = f"knows no {', '.join(sorted(unknown))}" if unknown else "has no tests"
        raise DataError(f"{where}: {problem}; an object holds tests, kind, entry, setup, limits")
    return contents_of(program, "PROGRAM"), asked


def _header(text: str, file: str) -> dict[str, Any]:
    found: dict[str, str] = {}
    for line in text.split("\n"):
        if not line.startswith("# "):
            break
        key, _, value = line[2:].partition(":")
        found[key.strip()] = value.strip()
    if "tests" not in found:
        raise DataError(f"--case {file}: its first lines hold no `# tests: [...]`")
    asked = {key: found[key] for key in ("kind", "entry") if found.get(key, "-") != "-"}
    read = {
        key: _json(found[key], f"--case {file}: {key}") for key in ("tests", "limits") if found.get(key, "-") != "-"
    }
    return asked | read


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: is no JSON ({error})") from None


def _task(asked: Mapping[str, Any], text: str, entry: str | None, together: bool) -> tuple[CodeTask, CodeLimits]:
    from pydantic import ValidationError

    from nearpolicy.verifier.code import only_function, task_of
    from nearpolicy.verifier.config import CodeLimits
    from nearpolicy.verifier.rewards import RowError

    kind = asked.get("kind")
    if kind not in (None, "stdin", "function", "tests"):
        raise DataError(f"kind is {kind!r}; use stdin, function or tests")
    try:
        named = entry or asked.get("entry")
        if not named and kind != "stdin":
            named = only_function(text)
        task = task_of(asked["tests"], kind=kind, entry=named, setup=asked.get("setup") or "", together=together)
        return task, CodeLimits.model_validate(asked.get("limits") or {})
    except RowError as error:
        raise DataError(f"{error}") from None
    except ValidationError as error:
        problems = "; ".join(f"limits.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise DataError(problems) from None


def _settings(given: dict[str, Any]) -> VerifierConfig:
    from pydantic import ValidationError

    from nearpolicy.verifier.config import VerifierConfig

    try:
        return VerifierConfig(**given)
    except ValidationError as error:
        problems = [" ".join([*map("--{}:".format, each["loc"]), each["msg"]]) for each in error.errors()]
        raise ConfigError("; ".join(problems)) from None


async def _graded(
    text: str, task: CodeTask, limits: Limits, settings: VerifierConfig, every_test: bool
) -> tuple[Grade, str]:
    from nearpolicy.verifier.code import CodeGrader
    from nearpolicy.verifier.sandbox.grading import CannotSplitError
    from nearpolicy.verifier.sandbox.ladder import opened

    sandbox = await opened(
        settings.isolation,
        workers=1,
        packages=settings.packages,
        allow_unisolated=settings.allow_unisolated,
        url=settings.sandbox_url,
    )
    try:
        grader = CodeGrader.of(sandbox, settings)
        return await grader.grade(text, task, limits, every_test=every_test), sandbox.isolation
    except CannotSplitError as error:
        raise DataError(f"{error}: such tests need --allow-weak-trust") from None
    finally:
        await sandbox.close()


def _show(found: Grade, isolation: str, output: bool) -> None:
    from nearpolicy.verifier.code import verdict_of

    verdict = verdict_of(found, "all")
    if sys.stdout.isatty():
        print(visible(f"{found.verdict}{f', {found.reason}' if found.reason else ''}"))
    told: dict[str, Any] = {
        "outcome": verdict.outcome.value,
        "verdict": str(found.verdict),
        "reward": verdict.value,
        "reason": found.reason or "",
        "passed": found.passed,
        "tests": found.tests,
        "isolation": isolation,
        "usage": {
            "runs": found.usage.runs,
            "cpu_s": round(found.usage.cpu_s, 4),
            "wall_s": round(found.usage.wall_s, 4),
            "memory_mib": round(found.usage.memory_mib, 1),
        },
    }
    if output:
        told |= {"stdout": found.stdout.decode(errors="replace"), "stderr": found.stderr.decode(errors="replace")}
    print(json.dumps(told, allow_nan=False))
