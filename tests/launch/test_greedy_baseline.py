"""`objective.advantage: remax` from recipe to report: greedy completions are what they claim to be, and are compared
with, recorded and counted, never trained."""

from __future__ import annotations

import json

import numpy as np
import pytest

from nearpolicy.config import load_recipe
from nearpolicy.errors import UserError
from nearpolicy.launch.compare import command as compare
from nearpolicy.launch.inspect import inspect_run
from nearpolicy.launch.report import write_report
from nearpolicy.launch.session import Session, run_session
from nearpolicy.models.loading import resolve
from nearpolicy.records import BASELINE, Fate
from nearpolicy.store.reader import RunReader
from nearpolicy.telemetry.metrics import unknown_names

RECIPE = """\
run: {steps: 4, keep_versions: true}
model: {path: random:llama, init: {initializer_range: 0.15}}
sampling: {max_prompt_length: 16, max_completion_length: 5, num_generations: 3, temperature: 1.2, top_k: 50}
queue: {prompts_per_step: 3, max_staleness: 1}
objective: {loss: pg, advantage: remax, length_cost: 0.05}
learner: {learning_rate: 0.003}
tasks:
  - name: words
    source: {kind: jsonl, path: ROWS}
    prompt_column: question
    chat: false
    rewards: [{kind: regex, pattern: '[a-z]'}, {kind: regex, pattern: '[A-Z]', name: capital, weight: 0.5}]
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Load the recipe with overrides."""
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"question": f"word {i}:"}) + "\n" for i in range(12)))
    (folder / "words.yaml").write_text(RECIPE.replace("ROWS", str(folder / "rows.jsonl")))
    return lambda name, *overrides: load_recipe(folder / "words.yaml", [f"run.dir={folder / name}", *overrides])


def trained(config, **functions):
    session = Session(config=config, say=lambda text: None, **functions)
    summary = run_session(session)
    return session.folder.path, summary


@pytest.fixture(scope="module")
def recording(recipe):
    """(folder, summary) of a run of four steps with remax."""
    return trained(recipe("remax"))


@pytest.fixture(scope="module")
def without(recipe):
    """The folder of a run whose objective asked for no greedy completion."""
    return trained(recipe("grpo", "objective.advantage=grpo", "run.steps=2"))[0]


def test_every_advantage_is_the_reward_less_that_of_the_greedy_completion(recording):
    seen = set()
    with RunReader(recording[0]) as run:
        for step in range(4):
            batch = run.batch(step)
            groups = {group.index: group for group in batch.groups}
            assert [(row.group, row.sample) for row in batch.rows] == [(g, s) for g in sorted(groups) for s in range(3)]
            for row in batch.rows:
                group = groups[row.group]

                def priced(reward, rollout):
                    return reward - 0.05 * rollout.num_sampled

                reward = priced(group.rewards[row.sample], group.rollouts[row.sample])
                right = reward - priced(group.baseline.reward, group.baseline.rollout)
                np.testing.assert_allclose(row.advantages[row.trained], right, atol=1e-6)
                assert row.trained.all()
                seen.add(round(right, 3))
    assert len(seen) > 3  # and not all of them 0


def test_a_greedy_completion_is_the_likeliest_token_after_each_prefix_by_a_plain_forward(recording):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from nearpolicy.models.weights import load_weights

    folder = resolve("random:llama", {"initializer_range": 0.15})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with RunReader(recording[0]) as run:
        greedy = [group.baseline.rollout.segments[0] for group in run.groups()]
        assert len(greedy) == 12
        for segment in greedy:
            [version] = set(segment.versions.tolist())
            load_weights(model, load_file(run.folder.weights / f"version-{version}.safetensors"))
            context, tokens = segment.context_ids.tolist(), segment.token_ids.tolist()
            with torch.no_grad():
                logits = model(torch.tensor([context + tokens])).logits[0, len(context) - 1 : -1]
            chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            assert (logits.max(dim=-1).values - chosen).max() < 1e-4
            assert segment.behavior_logprobs.tolist() == [0.0] * len(tokens)
            assert not segment.extras  # the samples record what top_k left; nobody asks that of these
        assert len({tuple(segment.token_ids.tolist()) for segment in greedy}) > 1


def test_greedy_completions_are_in_the_ledger_once_and_in_no_statistic_of_the_samples(recording):
    folder, summary = recording
    with RunReader(folder) as run:
        groups, lines = list(run.groups()), run.metrics()
        items = list(run.rollouts())
        sampled = sum(event.numbers["sampled"] for event in run.events(role="generator") if "sampled" in event.numbers)
        sampled -= sum(event.numbers["tokens"] for event in run.events(kind="probe"))
        batches = [run.batch(step) for step in range(4)]
    greedy = [item for item in items if item.is_baseline]
    assert len(items) == 12 * 4 and len(greedy) == 12
    assert all(item.fates == {Fate.BASELINE: item.rollout.num_sampled} and not item.rows for item in greedy)
    assert sum(summary["ledger"].values()) == sampled == sum(item.rollout.num_sampled for item in items)
    assert summary["ledger"]["baseline"] == sum(item.rollout.num_sampled for item in greedy)
    for batch, line in zip(batches, lines, strict=True):
        rewards = [reward for group in batch.groups for reward in group.rewards]
        assert line["reward/mean"] == pytest.approx(np.mean(rewards))
        assert line["reward/baseline_mean"] == pytest.approx(np.mean([g.baseline.reward for g in batch.groups]))
        lengths = [rollout.num_sampled for group in batch.groups for rollout in group.rollouts]
        assert (line["batch/tokens"], line["completion/length_max"]) == (sum(lengths), max(lengths))
        assert unknown_names(set(line) - {"step", "time", "not_finite"}) == []
    assert all(set(group.baseline.verdicts) == {"regex", "capital"} for group in groups)


def test_one_sample_per_prompt_is_enough_and_groups_without_signal_are_those_that_equal_the_baseline(recipe):
    # Without a price of length, so that many samples have the reward of the greedy completion.
    options = ("sampling.num_generations=1", "objective.length_cost=0", "run.steps=3", "queue.prompts_per_step=4")
    folder, summary = trained(recipe("one", *options, "queue.drop_zero_variance_groups=true"))
    assert summary["steps"] == 3
    kept = 0
    with RunReader(folder) as run:
        for step in range(3):
            batch = run.batch(step)
            signal = {group.index: group.rewards[0] != group.baseline.reward for group in batch.groups}
            assert {row.group for row in batch.rows} == {index for index, differs in signal.items() if differs}
            assert run.metrics()[step]["reward/zero_variance_share"] == pytest.approx(
                1 - np.mean(list(signal.values()))
            )
            kept += len(batch.rows)
        ledger = run.ledger()
    assert 0 < kept < 12
    assert ledger.get(Fate.ZERO_ADVANTAGE) is None and min(ledger[Fate.FILTERED], ledger[Fate.BASELINE]) > 0


def test_reinforce_too_may_have_one_sample_per_prompt(recipe):
    options = ("objective.advantage=reinforce", "sampling.num_generations=1", "run.steps=1")
    folder, summary = trained(recipe("reinforce", *options))
    assert (summary["steps"], summary["ledger"]["baseline"]) == (1, 0)
    with RunReader(folder) as run:
        assert run.group(0).baseline is None


def test_inspect_and_the_report_mark_the_greedy_baseline(recording, capsys):
    folder, _ = recording
    inspect_run(folder, group=2)
    shown = capsys.readouterr().out
    assert shown.count("greedy baseline") == 1 and "group 2 · greedy baseline · step 0" in shown
    assert "fate: baseline" in shown
    inspect_run(folder, sample=BASELINE, limit=50, as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["group_id"] for line in lines] == list(range(12))
    assert all(line["baseline"] and line["sample"] == -1 and line["advantage"] == [None] for line in lines)
    inspect_run(folder, sample=0, limit=1, as_json=True)
    assert json.loads(capsys.readouterr().out)["baseline"] is False
    page = write_report(folder).read_text()
    assert page.count("greedy baseline") >= 2  # a curve beside the reward, and among the rollouts


def test_objectives_are_compared_with_remax_where_greedy_completions_were_recorded(recording, capsys):
    folder, _ = recording
    with RunReader(folder) as run:
        logged = run.metrics()
    compare(folder, ["advantage=rloo,loss=pg", "advantage=remax,loss=cispo,length_cost=0.05"], at=0, train=2)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    recorded = found["objectives"]["recorded"]
    assert recorded["loss"] == pytest.approx(logged[0]["policy/loss"], rel=1e-5, abs=1e-7)
    assert recorded["gradient_norm"] == pytest.approx(logged[0]["policy/grad_norm"], rel=1e-5)
    assert recorded["importance_sampling"]["bias"] == pytest.approx(0.0, abs=1e-5)  # nothing is stale yet
    assert found["cosines"]["recorded"]["advantage=remax,loss=cispo,length_cost=0.05"] == pytest.approx(1.0, abs=1e-6)
    assert abs(found["cosines"]["recorded"]["advantage=rloo,loss=pg"]) < 0.999
    for step in range(2):
        assert found["trained"]["recorded"]["steps"][step]["policy/loss"] == logged[step]["policy/loss"]  # bit for bit


def test_remax_on_a_recording_without_greedy_completions_is_refused_by_name_with_a_remedy(without):
    with pytest.raises(UserError) as error:
        compare(without, ["loss=gspo", "advantage=remax"])
    assert str(error.value).startswith("advantage=remax: objective.advantage=remax compares with a greedy completion")
    assert "Train with objective.advantage=remax" in str(error.value) and "rloo" in str(error.value)
    assert str(without) in str(error.value)
