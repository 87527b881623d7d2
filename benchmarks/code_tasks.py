"""HumanEval and MBPP through the sandbox: reference solutions must pass, mutated ones must fail where tests can tell.

    python -m benchmarks.code_tasks [--quick] [--repeats 20] [--together]

The data are not part of this project: they are looked for in the folder $NEARPOLICY_DATA (humaneval/HumanEval.jsonl.gz,
mbpp/mbpp.jsonl.gz). Test code runs apart from the program; --together adds the rows that cannot be tested so, at the
weaker trust. A mutant is the reference solution with one operator swapped, one constant off by one, or its last return
giving None. With --repeats each reference solution is judged that often, at once with the others, and verdicts that
differ between repeats are counted as flips. --quick takes every tenth row. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import copy
import gzip
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nearpolicy.verifier.code import CodeGrader, task_of
from nearpolicy.verifier.sandbox.grading import CannotSplitError, CodeTask
from nearpolicy.verifier.sandbox.ladder import opened
from nearpolicy.verifier.sandbox.runs import Limits

SWAPPED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.And: ast.Or, ast.Or: ast.And, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


def rows(data: Path) -> dict[str, list[tuple[str, str, dict[str, Any]]]]:
    """Data set -> (name, reference solution, what `task_of` makes its tests of)."""

    def lines(file: str) -> Iterator[dict[str, Any]]:
        with gzip.open(data / file, "rt", encoding="utf-8") as text:
            yield from map(json.loads, text)

    human = [
        (r["task_id"], r["prompt"] + r["canonical_solution"], {"tests": r["test"], "entry": r["entry_point"]})
        for r in lines("humaneval/HumanEval.jsonl.gz")
    ]
    mbpp = [
        (f"MBPP/{r['task_id']}", r["code"], {"tests": r["test_list"], "setup": r["test_setup_code"]})
        for r in lines("mbpp/mbpp.jsonl.gz")
    ]
    return {"HumanEval": human, "MBPP": mbpp}


def mutants(program: str) -> dict[str, str]:
    """Kind -> the program with the first place changed that can be, from the end of the program on."""
    tree = ast.parse(program)
    return {
        kind: ast.unparse(changed)
        for kind, change in (("operator", _swap), ("off by one", _off_by_one), ("return None", _return_none))
        if (changed := _changed(tree, change)) is not None
    }


def _changed(tree: ast.Module, change: Any) -> ast.Module | None:
    copied = copy.deepcopy(tree)
    return next((copied for node in reversed(list(ast.walk(copied))) if change(node)), None)


def _swap(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPPED:
        node.op = SWAPPED[type(node.op)]()  # type: ignore[assignment]
        return True
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        node.ops[0] = SWAPPED[type(node.ops[0])]()  # type: ignore[call-overload]
        return True
    return False


def _off_by_one(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        node.value += 1
        return True
    return False


def _return_none(node: ast.AST) -> bool:
    if isinstance(node, ast.Return) and node.value is not None:
        node.value = ast.Constant(None)
        return True
    return False


async def verdict(grader: CodeGrader, program: str, task: CodeTask) -> str:
    try:
        return str((await grader.grade(program, task, Limits())).verdict)
    except CannotSplitError as error:
        return f"cannot be split: {error}"


async def judged(data: Path, step: int, repeats: int, together: bool) -> dict[str, Any]:
    sandbox = await opened("auto", workers=os.cpu_count() or 1, packages=["numpy"], allow_unisolated=False)
    grader = CodeGrader(sandbox, ("numpy",))
    result: dict[str, Any] = {"isolation": sandbox.isolation}
    try:
        for name, every in rows(data).items():
            chosen = every[::step]
            begin = time.perf_counter()
            result[name] = await _data_set(grader, chosen, repeats, together)
            result[name]["seconds"] = round(time.perf_counter() - begin, 1)
            _print(name, result[name])
    finally:
        await sandbox.close()
    return result


async def _data_set(grader: CodeGrader, chosen: list[Any], repeats: int, together: bool) -> dict[str, Any]:
    tasks = {name: task_of(**tests) for name, _, tests in chosen}
    programs = {name: program for name, program, _ in chosen}
    seen: dict[str, Counter[str]] = {name: Counter() for name in tasks}

    async def one(name: str) -> None:
        seen[name][await verdict(grader, programs[name], tasks[name])] += 1

    await asyncio.gather(*(one(name) for _ in range(repeats) for name in tasks))
    weak = {name: counts for name, counts in seen.items() if set(counts) != {"passed"}}
    found: dict[str, Any] = {
        "rows": len(tasks),
        "passed": len(tasks) - len(weak),
        "judged": repeats * len(tasks),
        "flips": sum(len(counts) > 1 for counts in seen.values()),
        "not passed": {name: next(iter(counts)) for name, counts in weak.items()},
    }
    if together:
        again = {n: task_of(**tests, together=True) for n, _, tests in chosen if n in weak}
        verdicts = {name: await verdict(grader, programs[name], task) for name, task in again.items()}
        found["passed at the weaker trust"] = [name for name, each in verdicts.items() if each == "passed"]
    kinds: dict[str, Counter[str]] = {}
    sound = [name for name in tasks if name not in weak]
    changed = [(kind, name, text) for name in sound for kind, text in mutants(programs[name]).items()]

    async def mutant(kind: str, name: str, text: str) -> None:
        kinds.setdefault(kind, Counter())[await verdict(grader, text, tasks[name])] += 1

    await asyncio.gather(*(mutant(*each) for each in changed))
    found["mutants"] = {kind: dict(counts.most_common()) for kind, counts in sorted(kinds.items())}
    return found


def _print(name: str, found: dict[str, Any]) -> None:
    print(f"{name}: {found['passed']} of {found['rows']} reference solutions pass, {found['flips']} flips", flush=True)
    for row, why in found["not passed"].items():
        print(f"  {row}: {why}")
    for kind, counts in found["mutants"].items():
        total = sum(counts.values())
        print(f"  mutants, {kind}: {total - counts.get('passed', 0)} of {total} fail", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="every tenth row")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--together", action="store_true")
    arguments = parser.parse_args()
    data = Path(os.environ.get("NEARPOLICY_DATA", "data"))
    if not (data / "humaneval").is_dir():
        raise SystemExit(f"no data at {data}: set NEARPOLICY_DATA to a folder that holds humaneval and mbpp")
    step = 10 if arguments.quick else 1
    print(json.dumps(asyncio.run(judged(data, step, arguments.repeats, arguments.together))))


if __name__ == "__main__":
    main()
