"""``python -m nearpolicy.launch.reference``: write docs/recipe-reference.md and docs/metrics.md.

Every key of a recipe is explained by its docstring in the config models, every metric by its entry in the table of
names, so that code and page cannot disagree; a test fails when a page is old."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from nearpolicy.config import RunConfig
from nearpolicy.launch.train import StepLine
from nearpolicy.recipe_keys import models_in
from nearpolicy.telemetry.metrics import FAMILIES, METRICS

FOLDER = Path("docs")

_OPENING = """# Recipe reference

<!-- Written by `python -m nearpolicy.launch.reference` from the config models. Do not edit. -->

A recipe is a YAML (1.2) file with the sections below. Any value can be set on the command line as `section.key=value`,
the value read as YAML; entries of lists by their number: `tasks.0.weight=2`. Every key is used or refused, and all
problems are reported at once. `nearpolicy check RECIPE` says what a recipe amounts to.
"""


def reference() -> str:
    """The whole page."""
    parts = [_OPENING]
    for name, field in RunConfig.model_fields.items():
        models = models_in(field.annotation)
        heading = f"`{name}` (a list)" if get_origin(field.annotation) is list else f"`{name}`"
        parts += [f"## {heading}", *_section(models[0], f"{name}.N" if "list" in heading else name)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _section(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """The docstring, a table of keys, and a part for each kind of what is nested inside."""
    yield " ".join((model.__doc__ or "").split())
    yield "\n".join(
        ["| key | value | default | meaning |", "|---|---|---|---|", *map(_row, model.model_fields.items())]
    )
    for name, field in model.model_fields.items():
        for inner in models_in(field.annotation):
            place = f"{prefix}.{name}{'.M' if get_origin(field.annotation) is tuple else ''}"
            if get_origin(field.annotation) is dict:
                place += ".NAME"
            kinds = get_args(inner.model_fields["kind"].annotation) if "kind" in inner.model_fields else ()
            yield f"### `{place}`" + "".join(f" with `kind: {kind}`" for kind in kinds[:1])
            yield from _section(inner, place)


def _row(item: tuple[str, FieldInfo]) -> str:
    name, field = item
    meaning = " ".join((field.description or "").split())
    cells = (f"`{name}`", _value(field), _default(field), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _value(field: FieldInfo) -> str:
    kind, null, _ = _type(field.annotation).partition(" or `null`")
    limits = [limit for part in field.metadata for limit in _limits(part)]
    return " ".join([kind, *limits]) + null


def _type(annotation: Any) -> str:
    """A type as people say it; models are described below their table."""
    if models_in(annotation):
        return "entries, see below" if get_origin(annotation) in (tuple, dict) else "see below"
    arguments = [part for part in get_args(annotation) if part is not type(None)]
    origin = get_origin(annotation)
    if origin is Literal:
        return " or ".join(f"`{word}`" for word in arguments)
    if origin in (list, tuple):
        inner = list(dict.fromkeys(map(_type, arguments)))
        fixed = origin is tuple and Ellipsis not in arguments
        return f"{len(arguments)} of: {inner[0]}" if fixed else f"list of: {inner[0]}"
    if origin is dict:
        return "mapping"
    if hasattr(annotation, "__metadata__"):
        limits = [limit for part in annotation.__metadata__ for limit in _limits(part)]
        return " ".join([_type(annotation.__origin__), *limits])
    if arguments:
        return " or ".join(map(_type, arguments)) + (" or `null`" if type(None) in get_args(annotation) else "")
    return {int: "integer", float: "number", str: "text", bool: "`true` or `false`"}.get(annotation, "any")


FAR_BOUND = 1000
"""Bounds from here on only catch a slip of the hand; the page leaves them out."""


def _limits(constraint: Any) -> Iterator[str]:
    if isinstance(constraint, FieldInfo):
        for part in constraint.metadata:
            yield from _limits(part)
    for kind, name, sign in (
        (annotated_types.Gt, "gt", ">"),
        (annotated_types.Ge, "ge", ">="),
        (annotated_types.Lt, "lt", "<"),
        (annotated_types.Le, "le", "<="),
    ):
        if isinstance(constraint, kind) and abs(bound := getattr(constraint, name)) < FAR_BOUND:
            yield f"{sign} {bound}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory_takes_validated_data:
        return "see meaning"
    value = field.get_default(call_default_factory=True)
    return "" if value is None or isinstance(value, BaseModel) else f"`{json.dumps(value)}`"


_METRICS_OPENING = """# Metrics

<!-- Written by `python -m nearpolicy.launch.reference` from nearpolicy/telemetry/metrics.py. Do not edit. -->

`metrics.jsonl` in the run folder has one JSON object per line: `step`, `time` (seconds since 1970) and metrics under
the names below. Steps count from 0, here, in the terminal, in `nearpolicy inspect` and in the report; step s makes
version s + 1 of the weights, and version 0 is what the run starts from. An evaluation has a line of its own; its `step`
is the version that was evaluated.

A metric that nobody can tell is left out: without a group that carries signal there is no gradient norm, for example.
A value that is not finite is `null` and stands under `not_finite` with what it was.

A *computed* token is a trained one that went through the learner in the step. Rollouts whose advantage is 0 are trained
too, but add nothing to the gradient, and are skipped.
"""


def metrics_page() -> str:
    """The whole page."""
    parts = [_METRICS_OPENING, "## Columns in the terminal", "\n".join(_columns())]
    families = dict.fromkeys(name.split("/")[0] for name in METRICS)
    for family in families:
        names = [name for name in METRICS if name.split("/")[0] == family]
        rows = [f"| `{name}` | {METRICS[name]} |" for name in names]
        parts += [f"## `{family}/`", FAMILIES.get(family, ""), "\n".join(["| name | meaning |", "|---|---|", *rows])]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _columns() -> Iterator[str]:
    yield "| column | metric | meaning |"
    yield "|---|---|---|"
    yield "| step | `step` | which step, from 0 |"
    yield "| version | | the version of the weights that the step made, of the steps asked for |"
    for title, name, _, _ in StepLine.COLUMNS:
        meaning = METRICS[name]
        if name == "mismatch/logprob_diff_max":
            meaning = "largest absolute difference of log-probabilities, behaviour against proximal policy (below)"
        yield f"| {title} | `{name}` | {meaning}{', in seconds' if name.endswith('_s') else ''} |"


def pages() -> dict[str, str]:
    """File name -> text."""
    return {"recipe-reference.md": reference(), "metrics.md": metrics_page()}


def main() -> None:
    """Write the pages."""
    parser = argparse.ArgumentParser(prog="python -m nearpolicy.launch.reference", description=main.__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="where to; docs unless given")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")
        print(f"wrote {folder / name}")


if __name__ == "__main__":
    main()
