"""``nearpolicy eval``: answer a recipe's held-out questions with a model, and say how sure one can be of the score."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearpolicy.errors import ConfigError, ModelError
from nearpolicy.launch.progress import progress

if TYPE_CHECKING:
    from nearpolicy.config import RunConfig
    from nearpolicy.store.schema import EvaluatedSample


def command(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe: its tasks, sampling and evaluation settings count.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value", show_default=False)] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="A checkpoint folder, in place of the recipe's model.", show_default=False)
    ] = None,
    show: Annotated[int, typer.Option(help="Print this many answers.", min=0)] = 0,
) -> None:
    """Evaluate on held-out questions: accuracy, unbiased pass@k. The last line is one JSON object."""
    from nearpolicy.config import load_recipe
    from nearpolicy.launch.check import refuse

    config = load_recipe(recipe, overrides or [])
    refuse(config, makes_run=False)
    if not any(task.held_out for task in config.tasks):
        raise ConfigError(
            f"{recipe}: no task holds out questions, so there is nothing to evaluate; set tasks.0.held_out"
        )
    if checkpoint is not None and not os.path.isfile(checkpoint / "config.json"):  # a name too long is no file either
        raise ModelError(f"--checkpoint {checkpoint} is not a Hugging Face model folder (it has no config.json)")
    samples = asyncio.run(evaluate(config, checkpoint))
    for sample in samples[:show]:
        mark = {True: "right", False: "wrong", None: "not judged"}[sample.correct]
        print(f"{mark:>10}  {sample.prompt!r} -> {sample.text!r}")
    print(json.dumps(scores_as_json(samples, config)))


async def evaluate(config: RunConfig, folder: Path | None) -> list[EvaluatedSample]:
    """All samples of one evaluation of a model folder (or the recipe's model), as version 0."""
    from nearpolicy.verifier.service import VerifierService

    verifier = VerifierService({task.name: task.rewards for task in config.tasks}, config.verifier)
    await verifier.start()
    try:
        from nearpolicy.launch import build

        language = build.Language.of(config, folder=folder)
        model = build.load_model(config, language, print)
        parts = build.start_engine(config, language, model, _silent, print)
        try:
            evaluator = build.make_evaluator(config, language, parts.runner, verifier)
            assert evaluator is not None  # refused above
            print(f"evaluating on {evaluator.plan(with_pass=True)}", flush=True)
            with progress(evaluator.size(with_pass=True), _say) as advance:
                samples = await evaluator.run(0, with_pass=True, on_answer=advance)
            evaluator.require_judged(samples)
            if evaluator.reasons:
                print(evaluator.not_judged(len(samples)))
            return samples
        finally:
            parts.runner.close()
    finally:
        await verifier.close()


def _say(text: str) -> None:
    print(text, flush=True)


def scores_as_json(samples: list[EvaluatedSample], config: RunConfig) -> dict[str, Any]:
    """Task -> accuracy with its 95 % interval, counts, pass@k."""
    from nearpolicy.evaluate.metrics import held_out_scores

    found: dict[str, dict[str, Any]] = {}
    for score in held_out_scores(samples):
        task = found.setdefault(score.task, {})
        if score.mode == "accuracy":
            low, high = score.interval
            task |= {"accuracy": score.accuracy, "interval": [low, high], "correct": score.correct}
            task |= {"count": score.count, "not_judged": score.unjudged}
        else:
            task |= {f"pass_at_{k}": score.pass_at(k) for k in config.evaluation.pass_k}
    return found


def _silent(*_: Any, **__: Any) -> None:
    """Nobody watches the time line of an evaluation outside a run."""
