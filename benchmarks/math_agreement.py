"""How far the math verifier agrees with labelled answers: what docs/verify-math.md reports.

    python -m benchmarks.math_agreement [--data FOLDER] [--disagreements | --reasons SET]

FOLDER (default: $NEARPOLICY_DATA, or ../shared/data beside this repository) holds any of

    math-equivalence/pairs.jsonl         answer pairs with a verdict; contested rows are counted apart
    math-equivalence/extraction.jsonl    completions with the answer that should be found, and a verdict
    gsm8k/                               worked solutions against themselves; model solutions with `is_correct`
    math500/test.jsonl                   worked solutions against their answers
    aime-amc/                            answers against themselves
    math-train/math.json.gz              answers against themselves

Each row is judged as in training, in a worker process with a time limit. `--disagreements` prints the rows that are
judged otherwise, `--reasons "pairs, contested"` every row of a set with its reason. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearpolicy.records import Outcome, Prompt, Rollout, Verdict
from nearpolicy.verifier.config import ExtractionForm, MathVerifyReward, VerifierConfig
from nearpolicy.verifier.service import VerifierService

LIMIT_S = 10.0
AT_ONCE = 64
FORMS: dict[str, ExtractionForm] = {
    "last_boxed": "boxed",
    "gsm8k_hash": "hash",
    "answer_tag": "tag",
    "the_answer_is": "final_answer",
}
"""The conventions of extraction.jsonl as settings."""


@dataclass(frozen=True, slots=True)
class Case:
    """A row with the verdict that it should get."""

    name: str
    gold: str
    completion: str
    right: bool
    form: ExtractionForm


def rows_of(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text(encoding="utf-8")
    return json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines()]


def sets_in(folder: Path) -> Iterator[tuple[str, list[Case]]]:
    """Each set of cases that the folder holds, by the name of its line in the table."""
    if (path := folder / "math-equivalence" / "pairs.jsonl").is_file():
        for contested in (False, True):
            yield (
                f"pairs, {'contested' if contested else 'uncontested'}",
                [
                    Case(row["id"], row["gold"], row["prediction"], row["verdict"], "whole")
                    for row in rows_of(path)
                    if row["contested"] is contested
                ],
            )
    if (path := folder / "math-equivalence" / "extraction.jsonl").is_file():
        yield (
            "extraction",
            [
                Case(row["id"], row["gold"], row["response"], row["verdict"], FORMS[row["convention"]])
                for row in rows_of(path)
            ],
        )
    yield from _gsm8k(folder / "gsm8k")
    if (path := folder / "math500" / "test.jsonl").is_file():
        yield (
            "MATH-500 solutions",
            [Case(row["unique_id"], row["answer"], row["solution"], True, "boxed") for row in rows_of(path)],
        )
    for name in ("aime24.json", "aime25.jsonl", "amc.json"):
        if (path := folder / "aime-amc" / name).is_file():
            yield (
                f"{path.stem} answers",
                [
                    Case(f"{name} {place}", str(row["answer"]), f"\\boxed{{{float(row['answer']):g}}}", True, "boxed")
                    for place, row in enumerate(rows_of(path))
                ],
            )
    if (path := folder / "math-train" / "math.json.gz").is_file():
        answers = {str(row["answer"]) for row in rows_of(path) if (row["answer"] or "").strip()}
        yield (
            "MATH training answers",
            [Case(answer, answer, f"The answer is ${answer}$.", True, "auto") for answer in sorted(answers)],
        )


def _gsm8k(folder: Path) -> Iterator[tuple[str, list[Case]]]:
    for name in ("test.jsonl", "train.jsonl.gz"):
        if (path := folder / name).is_file():
            yield (
                f"GSM8K {name.partition('.')[0]} solutions",
                [
                    Case(f"{name} {place}", row["answer"], row["answer"], True, "auto")
                    for place, row in enumerate(rows_of(path))
                ],
            )
    if (path := folder / "example_model_solutions.jsonl.gz").is_file():
        for form in ("auto", "final_answer", "last_number"):
            yield (
                f"GSM8K models, {form}",
                [
                    Case(f"{place} {model}", row["ground_truth"], answer["solution"], answer["is_correct"], form)
                    for place, row in enumerate(rows_of(path))
                    for model, answer in row.items()
                    if isinstance(answer, dict)
                ],
            )


async def judged(cases: list[Case], workers: int) -> list[Verdict]:
    """The verdict of each case, from worker processes as in training."""
    tasks = {form: [MathVerifyReward(extract=form)] for form in {case.form for case in cases}}
    service = VerifierService(tasks, VerifierConfig(workers=workers, timeout_s=LIMIT_S))
    await service.start()
    places = asyncio.Semaphore(AT_ONCE)

    async def verdict(case: Case) -> Verdict:
        prompt = Prompt(id=case.name, task=case.form, text="", columns={"answer": case.gold})
        async with places:
            found = await service.score(prompt, Rollout(sample=0, segments=(), text=case.completion, numerics="exact"))
        return found["math_verify"]

    try:
        return list(await asyncio.gather(*map(verdict, cases)))
    finally:
        await service.close()


def main() -> None:
    default = os.environ.get("NEARPOLICY_DATA") or Path(__file__).parents[2] / "shared" / "data"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--disagreements", action="store_true", help="print every row that is judged otherwise")
    parser.add_argument("--reasons", metavar="SET", help="print every row of this set with its reason")
    arguments = parser.parse_args()
    report: dict[str, Any] = {}
    print(f"{'set':<26}{'rows':>7}{'agree':>8}{'share':>9}{'failed':>8}{'limit':>7}{'ms a row':>10}")
    for name, cases in sets_in(arguments.data):
        begin = time.perf_counter()
        verdicts = asyncio.run(judged(cases, arguments.workers))
        seconds = sum(verdict.seconds for verdict in verdicts)
        agree = [verdict.value == float(case.right) for case, verdict in zip(cases, verdicts, strict=True)]
        line = {
            "rows": len(cases),
            "agree": sum(agree),
            "failed": sum(verdict.outcome is Outcome.FAILED for verdict in verdicts),
            "time_limit": sum(verdict.reason == "time_limit" for verdict in verdicts),
            "ms_a_row": round(1000 * seconds / len(cases), 2),
            "seconds": round(time.perf_counter() - begin, 1),
            "disagree": [case.name for case, same in zip(cases, agree, strict=True) if not same],
        }
        report[name] = line
        print(
            f"{name:<26}{line['rows']:>7,}{line['agree']:>8,}{line['agree'] / line['rows']:>9.2%}"
            f"{line['failed']:>8}{line['time_limit']:>7}{line['ms_a_row']:>10.2f}"
        )
        for case, verdict, same in zip(cases, verdicts, agree, strict=True):
            if name == arguments.reasons or (arguments.disagreements and not same):
                print(f"    {case.name}: labelled {float(case.right)}, judged {verdict.value}. {verdict.reason}")
    if not report:
        sys.exit(f"no data under {arguments.data}; set NEARPOLICY_DATA or --data to a folder that holds some")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
