"""The loop in your own hands: the roles of a run as verbs, in the order you like. About half a minute on two cores.

    .venv/bin/python examples/own_loop.py

Here each step samples twice as many groups as it needs and keeps those that carry a signal.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from nearpolicy.config import load_recipe
from nearpolicy.machine import prepare_environment
from nearpolicy.records import Admission
from nearpolicy.verifier.combining import weighted_reward
from nearpolicy.verifier.service import VerifierService

STEPS, LEARNING_RATE = 15, 1e-3


async def main() -> list[float]:
    """Returns the mean reward of every step."""
    config = load_recipe(Path(__file__).parents[1] / "recipes" / "tiny.yaml")
    task = config.tasks[0]
    verifier = VerifierService({task.name: task.rewards}, config.verifier)
    await verifier.start()  # worker processes first, torch after

    from nearpolicy.environments.single_turn import SingleTurn
    from nearpolicy.launch import build, warm_start
    from nearpolicy.learner.report import TokenStats
    from nearpolicy.learner.step import PolicyLearner
    from nearpolicy.learner.tokens import NOTHING_KNOWN
    from nearpolicy.objectives.assign import assign_advantages
    from nearpolicy.objectives.objective import Supervised
    from nearpolicy.sync.publisher import Publisher

    language = build.Language.of(config)
    model = build.load_model(config, language, print)
    engine = build.start_engine(config, language, model, lambda *_, **__: None, print)
    learner = build.start_learner(config, language, model, engine, lambda *_, **__: None, print)
    verbs, rewards = learner.inner, []
    publisher = Publisher(learner, [engine.runner], timeout_s=60)
    environment = SingleTurn(
        engine.runner,
        verifier,
        render=language.renderer.prompt_ids,
        decode=language.decode,
        reward_of=lambda verdicts, _: weighted_reward(verdicts, task.rewards),
        sampling=language.sampling,
        n=config.sampling.num_generations,
    )
    for rows in warm_start.supervised_batches(language.mixture, config.tasks, config.warm_start, language.renderer):
        await learner.call(PolicyLearner.supervised_step, rows, Supervised(), config.warm_start.learning_rate)
    await publisher.publish()

    for step in range(STEPS):
        admissions = [
            Admission(index=i, prompt=language.mixture.prompt(i), seed=0, version=step)
            for i in range(step * 16, (step + 1) * 16)
        ]
        groups = await asyncio.gather(*map(environment.run, admissions))  # sample and verify
        useful = [group for group in groups if group.has_signal][:8]
        rows = assign_advantages(useful, config.objective)
        await learner.call(
            PolicyLearner.forward_backward, range(len(rows)), verbs.objective, rows, NOTHING_KNOWN, TokenStats()
        )
        norm = await learner.call(PolicyLearner.optim_step, LEARNING_RATE)
        verbs.version += 1
        await publisher.publish()  # the engine shows that it holds these weights
        rewards.append(sum(r for g in groups for r in g.rewards if r is not None) / (16 * len(groups[0].rewards)))
        print(f"step {step}: reward {rewards[-1]:.3f}, {len(useful)} groups used, gradient norm {norm:.2f}")

    print(f"reward {rewards[0]:.3f} in step 0, {rewards[-1]:.3f} in step {STEPS - 1}")
    engine.runner.close()
    learner.close()
    await verifier.close()
    return rewards


if __name__ == "__main__":
    prepare_environment()
    asyncio.run(main())
