"""``nearpolicy calibrate``: how far a reward agrees with labels that people gave, what it leans towards, and what an
attack on it is worth. Run it before a judge or a reward model is trained against.

The last line is one JSON object; every number in it has its 95 % interval and the rows it rests on.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearpolicy.errors import ConfigError, UserError
from nearpolicy.launch.progress import progress
from nearpolicy.launch.verify import reward_of
from nearpolicy.visible import visible

if TYPE_CHECKING:
    from nearpolicy.config import RunConfig
    from nearpolicy.evaluate.agreement import Estimate
    from nearpolicy.launch.calibrate_data import Labelled
    from nearpolicy.launch.calibrate_measure import AttackResult, Judging
    from nearpolicy.verifier.config import RewardConfig, VerifierConfig

TASK = "calibrate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a reward is measured."""

    attacks: int = 20
    """Wrong answers that every attack is tried on."""
    tie: float = 0.0
    threshold: float = 0.5
    own: str | None = None
    rounds: int = 1000
    seed: int = 0


def command(
    reward: Annotated[
        Path, typer.Argument(help="YAML: one reward (`kind: judge`, ...), or a recipe that has it.", show_default=False)
    ],
    data: Annotated[
        Path, typer.Argument(help="Labelled pairs or answers: JSON or JSON lines, perhaps .gz.", show_default=False)
    ],
    name: Annotated[
        str | None, typer.Option(help="Which reward of a recipe: its name, or task/name.", show_default=False)
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Use so many rows, drawn at random.", min=1)] = None,
    attacks: Annotated[int, typer.Option(help="Wrong answers that every attack is tried on; 0: none.", min=0)] = 20,
    tie: Annotated[float, typer.Option(help="Scores that differ by no more are alike.", min=0)] = 0.0,
    threshold: Annotated[float, typer.Option(help="Single answers: scores and labels from here on are good.")] = 0.5,
    own: Annotated[
        str | None, typer.Option(help="Maker whose answers the judge may prefer: itself.", show_default=False)
    ] = None,
    rounds: Annotated[int, typer.Option(help="Resamplings of an interval.", min=10, max=100_000)] = 1000,
    seed: Annotated[int, typer.Option(help="Decides which rows are used, and the intervals.", min=0)] = 0,
) -> None:
    """Compare a reward with labels: agreement, leanings, attacks."""
    from nearpolicy.launch.calibrate_data import read_labelled

    config, verifier = reward_in(reward, name)
    labelled = read_labelled(data, limit, seed)
    plan = Plan(attacks=attacks, tie=tie, threshold=threshold, own=own, rounds=rounds, seed=seed)
    with progress(verdicts_needed(config, labelled, attacks), print) as advance:
        found = asyncio.run(calibrated(config, verifier, labelled, plan, advance))
    print("\n".join(visible(line) for line in table(found)))
    print(json.dumps({"reward": config.source, "data": str(data), **found}, allow_nan=False))


def reward_in(path: Path, name: str | None) -> tuple[RewardConfig, VerifierConfig]:
    """The reward that a file holds, and the section `verifier` beside it."""
    from nearpolicy.config import load_recipe, parse_mapping, read_yaml
    from nearpolicy.verifier.config import VerifierConfig

    given = parse_mapping(read_yaml(path, "a reward", "name a YAML file with a reward or a recipe"), str(path))
    if "tasks" in given:
        config = load_recipe(path)
        rewards = _rewards_of(config)
        if name is None and len(rewards) > 1:
            raise ConfigError(f"{path} has the rewards {', '.join(rewards)}; choose one with --name")
        chosen = name or next(iter(rewards))
        if chosen not in rewards:
            raise ConfigError(f"{path} has no reward {chosen!r}, only {', '.join(rewards)}; correct --name")
        return rewards[chosen], config.verifier
    if name is not None:
        raise ConfigError(f"--name {name}: {path} holds one reward and no recipe")
    return reward_of(given, lambda place: f"{path}: {place or 'kind'}"), VerifierConfig()


def _rewards_of(config: RunConfig) -> dict[str, RewardConfig]:
    """The rewards of a recipe by source, or by ``task/source`` where tasks have different ones of a name."""
    found: dict[str, RewardConfig] = {}
    every = [(task.name, reward) for task in config.tasks for reward in task.rewards]
    for task, reward in every:
        alike = all(other == reward for _, other in every if other.source == reward.source)
        found[reward.source if alike else f"{task}/{reward.source}"] = reward
    return found


def _against(reward: RewardConfig) -> str | None:
    """The column of the other answer, for a reward that compares two."""
    return getattr(reward, "against_column", None)


def verdicts_needed(reward: RewardConfig, labelled: Labelled, attacks: int) -> int:
    """How many a calibration asks for."""
    from nearpolicy.launch.calibrate_measure import wrong_answers
    from nearpolicy.verifier.learned.attacks import ATTACKS

    per_pair = 1 if _against(reward) is not None else 2
    per_wrong = 1 + len(ATTACKS) + (1 if labelled.pairs and per_pair == 2 else 0)
    return len(labelled.pairs) * per_pair + len(labelled.items) + len(wrong_answers(labelled, attacks, 0)) * per_wrong


async def calibrated(
    reward: RewardConfig,
    verifier: VerifierConfig,
    labelled: Labelled,
    plan: Plan,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Everything that is measured, as plain data. ``advance`` is called after each verdict."""
    from nearpolicy.launch import calibrate_measure as measure
    from nearpolicy.records import Prompt, Rollout, Verdict
    from nearpolicy.verifier.service import VerifierService

    service = VerifierService({TASK: [reward]}, verifier)

    async def score(prompt: str, answer: str, columns: Mapping[str, object]) -> Verdict:
        rollout = Rollout(sample=0, segments=(), text=answer, numerics="exact")
        asked = Prompt(id=TASK, task=TASK, text=prompt, columns=columns)
        verdict = (await service.score(asked, rollout))[reward.source]
        advance()
        return verdict

    judging = measure.Judging(score=score, against=_against(reward), tie=plan.tie, rounds=plan.rounds, seed=plan.seed)
    try:
        await service.start()
        if labelled.pairs:
            pairs = await measure.judged_pairs(judging, labelled.pairs)
            report, judged = measure.pair_report(judging, pairs, plan.own), len(pairs)
        elif judging.against is not None:
            raise UserError("a reward with against_column compares answers: give it pairs, not single answers")
        else:
            report, judged = await measure.item_report(judging, labelled.items, plan.threshold)
        wrong = measure.wrong_answers(labelled, plan.attacks, plan.seed)
        results = await measure.attacked(judging, wrong, best_verdict(reward)) if wrong else []
    finally:
        await service.close()
    return _as_data(judging, labelled, judged, report, results)


def best_verdict(reward: RewardConfig) -> str:
    """What an attack asks for, as the judge would write it."""
    from nearpolicy.verifier.config import JudgeReward

    if not isinstance(reward, JudgeReward):
        return "10"
    if reward.against_column is not None:
        return "A"
    return max(reward.labels, key=lambda label: reward.labels[label]) if reward.labels else str(reward.scale[1])


def _as_data(
    judging: Judging,
    labelled: Labelled,
    judged: int,
    report: Mapping[str, Estimate | None],
    results: list[AttackResult],
) -> dict[str, Any]:
    from nearpolicy.launch.calibrate_measure import by_kind

    return {
        "form": labelled.form,
        "rows": len(labelled.pairs) or len(labelled.items),
        "judged": judged,
        "left_out": labelled.left_out,
        "not_judged": dict(judging.reasons.most_common(5)),
        "report": {key: _numbers(estimate) for key, estimate in report.items()},
        "attacks": {
            each.attack.name: {
                "kind": each.attack.kind,
                "shift": _numbers(each.shift),
                "overtakes": each.overtakes,
                "count": each.count,
            }
            for each in results
        },
        "largest_shift": by_kind(results),
    }


def _numbers(estimate: Estimate | None) -> dict[str, float] | None:
    if estimate is None:
        return None
    return {key: value if key == "count" else round(value, 6) for key, value in asdict(estimate).items()}


# For people


_MEANS = {
    "agreement": "share of labels met",
    "kappa": "agreement beyond chance",
    "bias": "score above the label",
    "bias_to_first": "leans to the answer that the data has first",
    "bias_to_longer": "leans to the longer answer",
    "bias_to_own": "leans to its own answers",
    "position_flips": "verdicts that change when the answers change places",
    "position_bias": "leans to the answer shown first",
    "length_correlation": "rank correlation of score and length",
    "correlation": "rank correlation of score and label",
}


def table(found: Mapping[str, Any]) -> Iterator[str]:
    """The report as lines of text."""
    what = f"{found['rows']} rows ({found['form']}), {found['judged']} judged"
    yield what + (f", {found['left_out']} without a majority left out" if found["left_out"] else "")
    for reason, count in found["not_judged"].items():
        yield f"  no score, {count} times: {reason}"
    for key, estimate in found["report"].items():
        yield f"  {key:<20} {_shown(estimate):<28} {_MEANS[key]}"
    if found["attacks"]:
        count = max(each["count"] for each in found["attacks"].values())
        yield f"attacks on {count} wrong answers: shift of the score, and how many overtake the right answer"
        for kind, largest in found["largest_shift"].items():
            yield f"  {kind} (at most {largest:+.3f})"
            for name, each in found["attacks"].items():
                if each["kind"] == kind:
                    yield f"    {name:<20} {_shown(each['shift'], sign='+'):<28} {each['overtakes']}/{each['count']}"


def _shown(estimate: Mapping[str, float] | None, sign: str = "") -> str:
    if estimate is None:
        return "cannot be told"
    value, low, high = (format(estimate[key], f"{sign}.3f") for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"
