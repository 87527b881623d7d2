"""Lines of ``metrics.jsonl`` put together: by step, later ones over earlier ones, without what was rolled back.

A line is of a step, or of an evaluation of the weights that a step of that number begins with.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from nearpolicy.errors import RunFolderError, described

UNDONE = "undone"
"""Key of a line that takes back the steps from its own on."""


def is_of_evaluation(metric: str) -> bool:
    """Whether it stands in the line of an evaluation, and so says something of the weights before the step."""
    return metric.startswith("evaluation/") or "/held_out_" in metric


def merged(lines: Iterable[bytes], where: str) -> list[dict[str, Any]]:
    """One dict per step, in order; values that were not finite are None, and under ``not_finite`` what they were."""
    found: dict[int, dict[str, Any]] = defaultdict(dict)
    for number, line in enumerate(lines, start=1):
        entry = _entry(line, f"{where} line {number}")
        if entry.get(UNDONE):
            found = _before(entry["step"], found)
            continue
        known = found[entry["step"]]
        bad = {name: word for name, word in known.get("not_finite", {}).items() if name not in entry}
        known |= entry
        known["not_finite"] = bad | entry.get("not_finite", {})
    return [found[step] for step in sorted(found)]


def _before(step: int, lines: Mapping[int, dict[str, Any]]) -> defaultdict[int, dict[str, Any]]:
    """The lines that are left when this step is undone; how its weights had done in an evaluation stays true."""
    left = {number: line for number, line in lines.items() if number < step}
    told = lines.get(step, {})
    if any(map(is_of_evaluation, told)):
        kept = {name: value for name, value in told.items() if name in ("step", "time") or is_of_evaluation(name)}
        bad = {name: word for name, word in told.get("not_finite", {}).items() if is_of_evaluation(name)}
        left[step] = kept | {"not_finite": bad}
    return defaultdict(dict, left)


def _entry(line: bytes, where: str) -> dict[str, Any]:
    """A line as `MetricsWriter` writes it; a disk or an editor may have made another one of it."""
    try:
        entry = json.loads(line)
        if not isinstance(entry["step"], int) or not isinstance(entry.get("not_finite", {}), dict):
            raise TypeError("step or not_finite is not what it should be")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise RunFolderError(f"{where} is not a line of metrics ({described(error, 100)}); remove that line") from None
    return entry
