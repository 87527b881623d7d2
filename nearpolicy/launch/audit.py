"""``nearpolicy audit RUN``: rewarded completions that look as if they had not earned it, for a person to read.

The last line is one JSON object: how many there are, by sign, and what holds for the run as a whole.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from nearpolicy.launch.words import count
from nearpolicy.visible import visible


def command(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    limit: Annotated[int, typer.Option(help="Completions shown, at most.", min=0)] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines instead of panels.")] = False,
) -> None:
    """Rank rewarded completions by signs that they did not earn it."""
    from nearpolicy.store.reader import RunReader
    from nearpolicy.telemetry.suspicion import overview, suspects

    with RunReader(run) as reader:
        completions = [judged for group in reader.groups() for judged in _judged(group)]
    found = suspects(completions)
    for suspect in found[:limit]:
        if as_json:
            print(json.dumps(_as_json(suspect)))
        else:
            _show(suspect)
    signs = Counter(_kind(sign) for suspect in found for sign in suspect.signs)
    figures = {name: round(value, 4) for name, value in overview(completions).items()}
    if not as_json:
        print(f"{count(len(found), 'completion')} with signs, of {len(completions):,} that were judged")
    whole = {"run": str(run), "judged": len(completions), "with_signs": len(found), "signs": dict(signs.most_common())}
    print(json.dumps(whole | {"figures": figures}, allow_nan=False))


def _judged(group: Any) -> list[Any]:
    """The samples of a group that have a reward."""
    from nearpolicy.store.schema import prompt_text
    from nearpolicy.telemetry.suspicion import Judged

    prompt = group.admission.prompt
    return [
        Judged(
            group=group.index,
            sample=rollout.sample,
            task=prompt.task,
            prompt=prompt_text(prompt),
            text=rollout.text,
            reward=reward,
            length=rollout.num_sampled,
            columns=prompt.columns,
            values={name: verdict.value for name, verdict in verdicts.items() if verdict.value is not None},
            parts={f"{name}/{part}": v for name, verdict in verdicts.items() for part, v in verdict.parts.items()},
        )
        for rollout, verdicts, reward in zip(group.rollouts, group.verdicts, group.rewards, strict=True)
        if reward is not None
    ]


def _kind(sign: str) -> str:
    """A sign without its figures and quotations, so that it can be counted."""
    words = re.split(r": | \(", sign)[0].split()
    return " ".join("N" if any(character.isdigit() for character in word) else word for word in words)


def _as_json(suspect: Any) -> dict[str, Any]:
    judged = suspect.judged
    return {
        "group_id": judged.group,
        "sample": judged.sample,
        "task": judged.task,
        "reward": judged.reward,
        "weight": round(suspect.weight, 2),
        "signs": dict(suspect.signs),
        "completion": judged.text,
    }


def _show(suspect: Any) -> None:
    from rich.console import Console, Group
    from rich.panel import Panel
    from rich.text import Text

    judged = suspect.judged
    signs = [Text(f"{weight:>4g}  {visible(sign)}", "yellow") for sign, weight in suspect.signs.items()]
    body = Group(*signs, Text(visible(judged.prompt[-300:]), style="dim"), Text(visible(judged.text[:1500])))
    title = f"group {judged.group} sample {judged.sample} · {judged.task} · reward {judged.reward:g}"
    Console().print(Panel(body, title=Text(visible(title)), title_align="left"))
