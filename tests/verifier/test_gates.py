"""Gates between reward sources: what counts, what adds nothing, what nobody can say, and which recipes are refused."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from ruamel.yaml import YAML

from nearpolicy.errors import ConfigError
from nearpolicy.records import Admission, Batch, Group, Outcome, Prompt, Rollout, Verdict
from nearpolicy.telemetry.batch import batch_metrics
from nearpolicy.telemetry.metrics import unknown_names
from nearpolicy.verifier.combining import GATED, Gate, counts, gates, weighted_reward, with_gates_shown
from nearpolicy.verifier.config import NumberReward, RegexReward, Rewards, VerifierConfig
from nearpolicy.verifier.service import VerifierService

MANY = TypeAdapter(Rewards)
ABSTAINED, FAILED = Verdict.abstained("nothing to say"), Verdict.failed("crash")
scored = Verdict.scored


def rewards_of(**sources):
    """Sources by name, each with the settings of a function (whose values may be any number)."""
    return MANY.validate_python(
        [{"kind": "function", "path": "here:f", "name": name, **fields} for name, fields in sources.items()]
    )


TWO = rewards_of(math={"requires": ["form"]}, form={"weight": 0.1})


@pytest.mark.parametrize(
    ("math", "form", "reward", "gate"),
    [
        (scored(1.0), scored(1.0), 1.1, Gate.OPEN),
        (scored(1.0), scored(0.0), 0.0, Gate.CLOSED),
        (scored(1.0), scored(0.999), 0.1 * 0.999, Gate.CLOSED),
        (scored(0.0), scored(1.0), 0.1, Gate.OPEN),
        (ABSTAINED, scored(1.0), 0.1, Gate.OPEN),
        (ABSTAINED, scored(0.0), 0.0, Gate.CLOSED),
        (scored(1.0), ABSTAINED, None, Gate.UNKNOWN),
        (ABSTAINED, ABSTAINED, None, Gate.UNKNOWN),
        (scored(1.0), FAILED, None, Gate.UNKNOWN),
        (FAILED, scored(0.0), None, Gate.CLOSED),
        (FAILED, scored(1.0), None, Gate.OPEN),
    ],
)
def test_a_source_counts_where_what_it_requires_is_met(math, form, reward, gate):
    verdicts = {"math": math, "form": form}
    assert weighted_reward(verdicts, TWO) == (None if reward is None else pytest.approx(reward))
    assert gates(verdicts, TWO) == {"math": gate, "form": Gate.OPEN}
    assert counts(verdicts, TWO, "math") is {Gate.OPEN: True, Gate.CLOSED: False, Gate.UNKNOWN: None}[gate]
    assert counts(verdicts, TWO, "form") is True


def test_an_abstaining_requirement_leaves_the_rest_of_the_reward_alone():
    three = rewards_of(math={"requires": ["form"]}, form={}, other={"weight": 2.0})
    verdicts = {"math": scored(1.0), "form": ABSTAINED, "other": scored(0.25)}
    assert weighted_reward(verdicts, three) == 0.5


def test_thresholds_are_values_before_weights_and_the_list_means_one():
    several = rewards_of(
        a={"requires": {"b": 0.25, "c": -2.0}}, b={"weight": -3.0}, c={"weight": 0.0}, d={"requires": ["b"]}
    )
    assert dict(several[3].requires) == {"b": 1.0}
    rest = {"a": scored(1.0), "d": scored(1.0)}
    assert gates({**rest, "b": scored(0.25), "c": scored(-2.0)}, several)["a"] is Gate.OPEN
    assert gates({**rest, "b": scored(0.24), "c": scored(-2.0)}, several)["a"] is Gate.CLOSED
    assert gates({**rest, "b": scored(0.25), "c": scored(-2.1)}, several)["a"] is Gate.CLOSED
    assert weighted_reward({**rest, "b": scored(0.25), "c": scored(5.0)}, several) == 1.0 - 0.75


def test_one_missed_requirement_closes_whatever_the_others_say():
    three = rewards_of(a={"requires": ["b", "c"]}, b={}, c={})
    assert gates({"a": scored(1.0), "b": ABSTAINED, "c": scored(0.0)}, three)["a"] is Gate.CLOSED
    assert gates({"a": scored(1.0), "b": ABSTAINED, "c": scored(1.0)}, three)["a"] is Gate.UNKNOWN


def test_a_requirement_that_does_not_count_itself_is_not_met():
    chain = rewards_of(style={"requires": ["math"]}, math={"requires": ["form"]}, form={})
    verdicts = {"style": scored(1.0), "math": scored(1.0), "form": scored(0.0)}
    assert gates(verdicts, chain) == {"style": Gate.CLOSED, "math": Gate.CLOSED, "form": Gate.OPEN}
    assert weighted_reward(verdicts, chain) == 0.0
    assert gates({**verdicts, "form": ABSTAINED}, chain)["style"] is Gate.UNKNOWN
    assert weighted_reward({**verdicts, "form": scored(1.0)}, chain) == 3.0


def test_a_penalty_behind_a_closed_gate_takes_nothing_away():
    penalty = rewards_of(math={}, long={"weight": -0.5, "requires": ["math"]})
    assert weighted_reward({"math": scored(0.0), "long": scored(1.0)}, penalty) == 0.0
    assert weighted_reward({"math": scored(1.0), "long": scored(1.0)}, penalty) == 0.5


VERDICTS = st.sampled_from([ABSTAINED, FAILED, scored(0.0), scored(0.5), scored(1.0)])


@given(st.lists(VERDICTS, min_size=5, max_size=5), st.lists(st.sets(st.integers(0, 4)), min_size=5, max_size=5))
@settings(max_examples=200, deadline=None)
def test_a_failure_never_becomes_a_number_and_gates_only_take_contributions_away(found, wishes):
    names = "abcde"
    required = {name: [n for n in names[:place] if names.index(n) in wishes[place]] for place, name in enumerate(names)}
    gated = rewards_of(**{name: {"requires": required[name]} for name in reversed(names)})
    verdicts = dict(zip(names, found, strict=True))
    reward, states = weighted_reward(verdicts, gated), gates(verdicts, gated)
    if any(verdict.outcome is Outcome.FAILED for verdict in found):
        assert reward is None
        return
    open_values = [v.value for n, v in verdicts.items() if v.value is not None and states[n] is Gate.OPEN]
    known = [n for n, v in verdicts.items() if v.value is not None and states[n] is not Gate.UNKNOWN]
    assert reward == (sum(open_values) if known else None)
    for name in names:
        met = all(verdicts[n].value == 1.0 and states[n] is Gate.OPEN for n in required[name])
        assert (states[name] is Gate.OPEN) == met


# What is shown


def test_values_stay_as_they_were_said_and_a_closed_gate_shows_as_a_part():
    verdicts = {"math": scored(1.0, correct=1.0), "form": scored(0.0)}
    shown = with_gates_shown(verdicts, TWO)
    assert shown["form"] == verdicts["form"]
    assert (shown["math"].value, dict(shown["math"].parts)) == (1.0, {"correct": 1.0, GATED: 1.0})
    assert with_gates_shown({**verdicts, "form": scored(1.0)}, TWO)["math"].parts[GATED] == 0.0
    for form in (ABSTAINED, FAILED):
        assert with_gates_shown({**verdicts, "form": form}, TWO)["math"] == verdicts["math"]
    assert with_gates_shown({"math": ABSTAINED, "form": scored(0.0)}, TWO)["math"] == ABSTAINED


def test_the_service_shows_gates_and_metrics_tell_their_share():
    sources = MANY.validate_python(
        [
            {"kind": "number", "requires": ["tagged"]},
            {"kind": "regex", "name": "tagged", "pattern": "<answer>", "weight": 0.0},
        ]
    )

    async def run():
        service = VerifierService({"t": sources}, VerifierConfig())
        await service.start()
        try:
            prompt = Prompt(id="p", task="t", text="q", columns={"answer": 4})
            rollouts = [Rollout(sample=0, segments=(), text=text, numerics="exact") for text in ("4", "<answer>4", "5")]
            return prompt, rollouts, [await service.score(prompt, rollout) for rollout in rollouts]
        finally:
            await service.close()

    prompt, rollouts, verdicts = asyncio.run(run())
    assert [v["number"].value for v in verdicts] == [1.0, 1.0, 0.0]
    assert [v["number"].parts[GATED] for v in verdicts] == [1.0, 0.0, 1.0]
    rewards = tuple(weighted_reward(v, sources) for v in verdicts)
    assert rewards == (0.0, 1.0, 0.0)
    group = Group(
        admission=Admission(index=0, prompt=prompt, seed=0, version=0),
        rollouts=tuple(rollouts),
        verdicts=tuple(verdicts),
        rewards=rewards,
    )
    metrics = batch_metrics(Batch(step=0, places=1, groups=(group,), rows=()))
    assert metrics["reward/mean"] == pytest.approx(1 / 3)
    assert metrics["reward/number/mean"] == metrics["reward/number/gated"] == pytest.approx(2 / 3)
    assert "reward/tagged/gated" not in metrics
    assert unknown_names(metrics) == []


# Recipes

FORM = {"kind": "regex", "name": "form", "pattern": "a"}


@pytest.mark.parametrize(
    ("rewards", "says"),
    [
        ([{"kind": "number", "requires": ["fom"]}, FORM], "'number' requires 'fom', which is no source.*mean 'form'"),
        ([{"kind": "number", "requires": ["zzzzzz"]}, FORM], "no source of this task; there are 'number', 'form'"),
        ([{"kind": "number", "requires": ["number"]}], "'number' requires 'number'; take one"),
        (
            [{"kind": "number", "requires": ["form"]}, {**FORM, "requires": ["number"]}],
            "wait for each other: '(number|form)' requires '(form|number)' requires '(number|form)'",
        ),
        (
            [{"kind": "number", "requires": {"form": 1.5}}, FORM],
            "1.5 or more, but that source gives values from 0 to 1",
        ),
        ([{"kind": "number", "requires": {"form": 0}}, FORM], "0 or more, but that source gives values from 0 to 1"),
        (
            [{"kind": "number", "requires": "form"}, FORM],
            r"as a list, or each with its smallest value: \{format: 1.0\}",
        ),
        ([{"kind": "number", "requires": [["form"]]}, FORM], "write the names of sources as a list"),
        ([{"kind": "number", "requires": {"form": "high"}}, FORM], "valid number"),
        ([{"kind": "number", "requires": {"form": float("nan")}}, FORM], "finite number"),
    ],
)
def test_gates_that_cannot_work_are_refused_by_name(rewards, says):
    with pytest.raises(ValidationError) as caught:
        MANY.validate_python(rewards)
    assert re.search(says, str(caught.value))


def test_a_long_chain_is_no_problem_and_a_long_cycle_is_named():
    chain = [{**FORM, "name": f"n{i}", "requires": [f"n{i + 1}"]} for i in range(2000)]
    several = MANY.validate_python([*chain, {**FORM, "name": "n2000"}])
    verdicts = {reward.source: scored(1.0) for reward in several}
    assert weighted_reward(verdicts, several) == 2001.0
    assert weighted_reward({**verdicts, "n2000": scored(0.0)}, several) == 0.0
    with pytest.raises(ValidationError, match="wait for each other"):
        MANY.validate_python([*chain, {**FORM, "name": "n2000", "requires": ["n0"]}])


def test_rewards_put_together_in_python_are_checked_too():
    gated = (NumberReward(requires={"form": 1.0}), RegexReward(pattern="a"))
    with pytest.raises(ConfigError, match="task 't': the reward 'number' requires 'form'"):
        VerifierService({"t": gated}, VerifierConfig())


def test_the_rewards_in_the_documentation_are_ones_that_a_recipe_may_have():
    page = (Path(__file__).parents[2] / "docs" / "getting-started.md").read_text(encoding="utf-8")
    section = page.split("## Several rewards")[1].split("\n## ")[0]
    blocks = re.findall(r"\n    rewards:\n((?:      .*\n)+)", section)
    assert len(blocks) == 2
    for block in blocks:
        found = MANY.validate_python(YAML(typ="safe").load(block))
        assert any(reward.requires for reward in found)
