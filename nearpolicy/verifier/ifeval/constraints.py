"""The instructions of a row, and which of them a response follows: strictly, or in the loose form of the paper.

A row names its instructions and gives each its arguments, in one order:

    {"instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
     "kwargs": [{}, {"relation": "at least", "num_words": 300}]}

Arguments that are null are not there (tables have a column for each argument of any kind).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nearpolicy.errors import described, nearest
from nearpolicy.verifier.ifeval.kinds import KINDS
from nearpolicy.verifier.ifeval.texts import seen


class ConstraintError(ValueError):
    """An instruction that cannot be checked; the message names it and says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """One instruction of a row, with its arguments as its check takes them."""

    kind: str
    arguments: Mapping[str, Any]

    def problem(self, text: str) -> str | None:
        """What is wrong with a text that is `texts.seen`; None if it follows. A blank text follows nothing."""
        return KINDS[self.kind].check(text, **self.arguments) if text.strip() else "the response is empty"


def read(identifiers: Any, kwargs: Any) -> list[Constraint]:
    """The constraints of a row from its two columns: lists, or the JSON text of lists."""
    identifiers, kwargs = _list(identifiers, "instructions"), _list(kwargs, "kwargs")
    if not identifiers:
        raise ConstraintError("there are no instructions")
    if len(identifiers) != len(kwargs):
        raise ConstraintError(
            f"{len(identifiers)} instructions have {len(kwargs)} kwargs; each needs its own, perhaps {{}}"
        )
    return [_constraint(identifier, given) for identifier, given in zip(identifiers, kwargs, strict=True)]


def _list(value: Any, what: str) -> Sequence[Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConstraintError(f"the {what} are text that is no JSON: {described(error, 100)}") from None
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConstraintError(f"the {what} should be a list, found {type(value).__name__}")
    return value


def _constraint(identifier: Any, given: Any) -> Constraint:
    if not isinstance(identifier, str) or identifier not in KINDS:
        close = nearest(str(identifier), list(KINDS))
        hint = f"; did you mean {close!r}?" if close else ""
        raise ConstraintError(f"there is no instruction {str(identifier)[:80]!r}{hint}")
    kind = KINDS[identifier]
    if not isinstance(given, Mapping | None):
        raise ConstraintError(f"{identifier}: its kwargs should be a mapping, found {type(given).__name__}")
    given = {name: value for name, value in (given or {}).items() if value is not None}
    if missing := [name for name in kind.arguments if name not in given]:
        raise ConstraintError(f"{identifier}: its kwargs lack {', '.join(missing)}")
    if unknown := [str(name) for name in given if name not in kind.arguments]:
        takes = ", ".join(kind.arguments) or "none"
        raise ConstraintError(f"{identifier}: it does not take {', '.join(unknown)[:80]}; its kwargs are: {takes}")
    arguments = {}
    for name, reader in kind.arguments.items():
        try:
            arguments[name] = reader(given[name])
        except ValueError as error:
            raise ConstraintError(f"{identifier}: {name} is {repr(given[name])[:80]}; it {error}") from None
    if (why := kind.impossible(**arguments)) is not None:
        raise ConstraintError(f"{identifier}: {why}")
    return Constraint(kind=identifier, arguments=arguments)


def problems(constraints: Sequence[Constraint], response: str, *, loose: bool) -> list[str | None]:
    """What is wrong, for each constraint; None where it is followed.

    ``loose``: a constraint is followed if any of the `forms` of the response follows it; what is told is then wrong
    with the response as it is.
    """
    text = seen(response)
    others = forms(text)[1:] if loose else []
    return [_without_problem(constraint, text, others) for constraint in constraints]


def _without_problem(constraint: Constraint, text: str, others: Sequence[str]) -> str | None:
    problem = constraint.problem(text)
    if problem is not None and any(constraint.problem(other) is None for other in others):
        return None
    return problem


def forms(text: str) -> list[str]:
    """A text as it is; without its first line, its last line, both; and each of these without asterisks.

    So an opening such as "Sure, here it is:" does no harm, nor does Markdown emphasis. Equal forms come once.
    """
    lines = text.split("\n")
    cut = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return list(dict.fromkeys([*cut, *(form.replace("*", "") for form in cut)]))


def parts(constraints: Sequence[Constraint], found: Sequence[str | None]) -> dict[str, float]:
    """By name: ``all`` (1 if every constraint is followed), ``share`` of them followed, and the share of each kind."""
    followed = [problem is None for problem in found]
    by_kind: dict[str, list[bool]] = {}
    for constraint, is_followed in zip(constraints, followed, strict=True):
        by_kind.setdefault(constraint.kind, []).append(is_followed)
    shares = {kind: sum(marks) / len(marks) for kind, marks in by_kind.items()}
    return {"all": float(all(followed)), "share": sum(followed) / len(followed), **shares}


def not_followed(constraints: Sequence[Constraint], found: Sequence[str | None]) -> Iterator[str]:
    """A clause for each constraint that is not followed."""
    for constraint, problem in zip(constraints, found, strict=True):
        if problem is not None:
            yield f"{constraint.kind} ({problem})"
