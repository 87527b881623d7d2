"""The reward of code tasks: a completion -> a program -> runs in the sandbox -> a verdict.

What the completion says about itself counts for nothing: `sandbox.grading` decides by comparison, after the runs are
dead. A failure of the sandbox is a failed verdict, never a 0.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
from collections.abc import Mapping
from typing import Any

from nearpolicy.records import Outcome, Verdict
from nearpolicy.verifier.config import CodeLimits, CodeReward, VerifierConfig
from nearpolicy.verifier.rewards import RowError, Sample, brief, column_of
from nearpolicy.verifier.sandbox import values
from nearpolicy.verifier.sandbox.grading import (
    CallTest,
    CannotSplitError,
    CodeTask,
    CodeVerdict,
    Grade,
    StdinTest,
    grade,
)
from nearpolicy.verifier.sandbox.runs import Limits, Sandbox

_FENCE = re.compile(r"^[ \t]*+(```++|~~~++)[ \t]*+([A-Za-z0-9_+#.-]*+)[^\n`]*+$", re.MULTILINE)
"""Possessive: nothing that is taken is given back, or a long line that is no fence takes time by its square."""
_LONGEST_ENTRY = 1000
_PYTHON = {"", "python", "python3", "py", "py3"}


# The program of a completion


def program_of(text: str, extract: str = "auto") -> str:
    """The last fenced block that is Python or says nothing else; the whole text if there is none, or if asked for.

    A block that is not closed goes to the end of the text.
    """
    blocks = fenced_blocks(text) if extract == "auto" else []
    chosen = [code for language, code in blocks if language.lower() in _PYTHON] or [code for _, code in blocks]
    return chosen[-1] if chosen else text


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """(language, code) of every fenced block, in order. A fence is closed by one that is as long and bare."""
    blocks = []
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif fence[1].startswith(opened[1]) and not fence[2]:
            blocks.append((opened[2], text[opened.end() + 1 : fence.start()]))
            opened = None
    if opened is not None:
        blocks.append((opened[2], text[opened.end() + 1 :]))
    return blocks


def only_function(program: str) -> str | None:
    """The one function that a program defines at its top, if there is one."""
    try:
        found = [node.name for node in ast.parse(program).body if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return found[0] if len(found) == 1 else None


# The tests of a row


def task_of(tests: Any, *, kind: str | None = None, entry: str | None = None, setup: str = "", **more: Any) -> CodeTask:
    """Tests as a row or a file has them. `RowError` says what cannot be read.

    tests: a list of ``{"stdin", "stdout"}``, of ``{"args", "result"}`` (and ``kwargs``), or of test code; test code
    alone; or JSON text of any of these. kind: stdin, function or tests, if it shall not be told by the form.
    """
    tests = _read(tests)
    if isinstance(tests, str):
        tests = [tests]
    if not isinstance(tests, list | tuple) or not tests:
        raise RowError(f"tests are a list of at least one, not {brief(tests)}")
    forms = {_form(test) for test in tests}
    if len(forms) != 1 or (kind is not None and forms != {kind}):
        wanted = f"not {kind}" if kind else "and all must be of a kind"
        raise RowError(f"tests are {', '.join(sorted(forms))}, {wanted}")
    [form] = forms
    if form == "function" and not entry:
        raise RowError("tests that call a function need its name, in `entry`")
    if form != "stdin" and entry and not _is_path(entry):
        raise RowError(f"`entry` is the name of a function, or Class.method, not {brief(entry)}")
    if not isinstance(setup, str):
        raise RowError(f"the code before the tests is text, not {brief(setup)}")
    try:
        return CodeTask(tests=tuple(map(_MAKE[form], tests)), entry=entry or None, setup=setup, **more)
    except (ValueError, TypeError, AttributeError, values.NotPlain) as error:
        raise RowError(f"a test cannot be read: {error}") from None


def _is_path(entry: Any) -> bool:
    parts = entry.split(".") if isinstance(entry, str) and len(entry) <= _LONGEST_ENTRY else ()
    return bool(parts) and all(part.isidentifier() and not keyword.iskeyword(part) for part in parts)


def _read(tests: Any) -> Any:
    """JSON text as what it stands for; test code, which is no JSON, as it is."""
    if not isinstance(tests, str) or not tests.lstrip().startswith(("[", "{")):
        return tests
    try:
        return json.loads(tests)
    except (ValueError, RecursionError):
        return tests


def _form(test: Any) -> str:
    if isinstance(test, str):
        return "tests"
    if isinstance(test, Mapping) and "stdout" in test and test.keys() <= {"stdin", "stdout"}:
        return "stdin"
    if isinstance(test, Mapping) and "result" in test and test.keys() <= {"args", "kwargs", "result"}:
        return "function"
    raise RowError(f"a test is {{stdin, stdout}}, {{args, result}} or text of test code, not {brief(test)}")


def _stdin_test(test: Mapping[str, Any]) -> StdinTest:
    stdin, stdout = test.get("stdin", ""), test["stdout"]
    if not isinstance(stdin, str) or not isinstance(stdout, str):
        raise RowError(f"stdin and stdout of a test are text, not {brief(test)}")
    return StdinTest(stdin=stdin, stdout=stdout)


def _call_test(test: Mapping[str, Any]) -> CallTest:
    args, kwargs = test.get("args", []), test.get("kwargs", {})
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise RowError(f"args of a test are a list and kwargs an object, not {brief(test)}")
    made = CallTest(args=tuple(values.decode(args)), kwargs=values.decode(kwargs), result=values.decode(test["result"]))
    if not isinstance(made.kwargs, dict) or not all(isinstance(name, str) for name in made.kwargs):
        raise RowError(f"kwargs of a test are an object, not {brief(test)}")
    values.dumps({"args": list(made.args), "kwargs": made.kwargs, "result": made.result})  # if these can be called with
    return made


_MAKE: Mapping[str, Any] = {"stdin": _stdin_test, "function": _call_test, "tests": lambda test: test}


def row_task(reward: CodeReward, columns: Mapping[str, Any], column: str | None = None) -> CodeTask:
    """The tests of a row, or those of another ``column``; `RowError` if the row is at fault."""
    name = column or reward.tests_column
    tests = column_of(name, columns)
    entry = columns.get(reward.entry_column) if reward.entry_column else reward.entry
    setup = columns.get(reward.setup_column) if reward.setup_column else ""
    command = {"command": reward.command, "file": reward.file} if reward.command else {}
    try:
        task = task_of(tests, entry=entry, setup=setup or "", together=reward.trust == "together", **command)
    except RowError as error:
        raise RowError(f"the column {name!r}: {error}") from None
    if isinstance(task.tests[0], str):
        _readable_code(task)
    return task


def _readable_code(task: CodeTask) -> None:
    for part in (task.setup, *task.tests):
        try:
            ast.parse(str(part))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise RowError(f"the test code cannot be read: {error}") from None


def limits_of(config: CodeLimits) -> Limits:
    return Limits(**config.model_dump())


# The verdict


class CodeGrader:
    """Judges samples of code tasks in one sandbox."""

    def __init__(self, sandbox: Sandbox, packages: tuple[str, ...], *, most_s: float | None = None) -> None:
        """``most_s``: time that all runs of one program may take together, those of the audit too."""
        self._sandbox = sandbox
        self._most_s = most_s
        self._mentions = re.compile(r"\b(?:" + "|".join(map(re.escape, packages)) + r")\b") if packages else None

    @classmethod
    def of(cls, sandbox: Sandbox, config: VerifierConfig) -> CodeGrader:
        """As training has it. The deadline excuses a program: it has to rest on waiting, not on the program's time."""
        return cls(sandbox, config.packages, most_s=config.deadline_s / 2)

    async def score(self, reward: CodeReward, sample: Sample) -> Verdict:
        try:
            task = row_task(reward, sample.columns)
            audit = row_task(reward, sample.columns, reward.audit_column) if reward.audit_column else None
        except RowError as error:
            return Verdict.failed(str(error))
        program = program_of(sample.text, reward.extract)
        if reward.prefix_column:
            program = f"{sample.columns.get(reward.prefix_column) or ''}{program}"
        try:
            found = await self.grade(program, task, limits_of(reward.limits), every_test=reward.score == "share")
            if audit is None or found.verdict is not CodeVerdict.PASSED:
                return verdict_of(found, reward.score)
            second = await self._audited(program, audit, limits_of(reward.limits), found)
        except CannotSplitError as error:
            return Verdict.failed(f"{error}: such a row needs `trust: together`")
        return verdict_of(found, reward.score, audit=second)

    async def _audited(self, program: str, task: CodeTask, limits: Limits, first: Grade) -> Grade | None:
        """In the time that the first tests have left; None if it was not enough."""
        second = await self.grade(program, task, limits, spent_s=first.usage.wall_s)
        if self._most_s is not None and first.usage.wall_s + second.usage.wall_s >= self._most_s:
            return None if second.verdict is CodeVerdict.TIME_LIMIT else second
        return second

    async def grade(
        self, program: str, task: CodeTask, limits: Limits, *, every_test: bool = False, spent_s: float = 0.0
    ) -> Grade:
        """``spent_s``: time that runs of the program have taken already."""
        return await grade(
            self._sandbox, program, task, limits, packages=self._needs_packages(program), every_test=every_test,
            most_s=None if self._most_s is None else self._most_s - spent_s,
        )  # fmt: skip

    def _needs_packages(self, program: str) -> bool:
        return self._mentions is not None and self._mentions.search(program) is not None


def verdict_of(found: Grade, score: str, audit: Grade | None = None) -> Verdict:
    """Parts: 1 or 0 for each verdict there is, `share` of tests passed if all were run, and `audit` of those that
    passed."""
    if found.verdict is CodeVerdict.SANDBOX_FAILURE:
        return Verdict.failed(f"{found.verdict}: {found.reason}")
    passed = float(found.verdict is CodeVerdict.PASSED)
    share = found.passed / found.tests
    judged = [each for each in CodeVerdict if each is not CodeVerdict.SANDBOX_FAILURE]
    parts = {str(each): float(found.verdict is each) for each in judged}
    parts |= {"share": share} if score == "share" else {}
    if audit is not None and audit.verdict is not CodeVerdict.SANDBOX_FAILURE:
        parts["audit"] = float(audit.verdict is CodeVerdict.PASSED)
    reason = "" if passed else f"{found.verdict}" + (f": {found.reason}" if found.reason else "")
    return Verdict(
        outcome=Outcome.SCORED, value=share if score == "share" else passed, parts=parts, reason=reason,
        seconds=found.usage.wall_s,
    )  # fmt: skip
