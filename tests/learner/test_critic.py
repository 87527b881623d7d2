"""The critic in a step: its values make the advantages, its loss and gradient are those of the formula, it learns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_cases import EXACT, batch_of, gradients, model_folder, random_rows, weights

from nearpolicy.errors import NearpolicyError
from nearpolicy.learner.config import CriticConfig, LearnerConfig
from nearpolicy.learner.critic import ValueStats
from nearpolicy.learner.selection import segment_places
from nearpolicy.learner.step import PolicyLearner
from nearpolicy.learner.tokens import Annotated
from nearpolicy.models.loading import load_policy, resolve
from nearpolicy.models.value import ValueModel
from nearpolicy.objectives.config import ObjectiveConfig
from nearpolicy.objectives.objective import Objective, Supervised
from nearpolicy.records import Batch, Finish, Rollout, Row
from nearpolicy.telemetry.batch import token_fates
from nearpolicy.telemetry.metrics import unknown_names


def make(
    objective: ObjectiveConfig | None = None,
    critic: CriticConfig | None = None,
    *,
    folder: Path | None = None,
    loud: bool = False,
    reference: Path | None = None,
    numerics=EXACT,
    threads: int = 1,
    **settings,
) -> PolicyLearner:
    """``loud``: a critic whose head is not 0 any more."""
    folder = folder or model_folder()
    learner = PolicyLearner(
        load_policy(folder, known_to_fit=True),
        Objective(objective or ObjectiveConfig(advantage="gae", scale_rewards="none"), 12),
        LearnerConfig(**{"learning_rate": 1e-3, "max_grad_norm": None} | settings),
        numerics,
        temperature=1.0,
        total_steps=20,
        reference=None if reference is None else load_policy(reference, known_to_fit=True).requires_grad_(False),
        value_model=ValueModel(load_policy(folder, known_to_fit=True)),
        critic=critic,
        threads=threads,
    )
    if loud:
        with torch.no_grad():
            numbers = torch.Generator().manual_seed(7)
            learner.critic.model.weight.copy_(0.1 * torch.randn(64, generator=numbers))
            learner.critic.model.bias.fill_(0.3)
    return learner


def rewarded(rows: Sequence[Row], rewards: Sequence[float | None], *, step: int = 0) -> Batch:
    """The rows as a batch whose rollouts have these rewards, in order."""
    plain = batch_of(rows, step=step)
    of_rollout = dict(zip(dict.fromkeys((row.group, row.sample) for row in rows), rewards, strict=True))
    groups = []
    for group in plain.groups:
        segments: dict[int, list] = {}
        for row in rows:
            if row.group == group.index:
                segments.setdefault(row.sample, []).append(row.segment)
        rollouts = tuple(
            Rollout(sample=s, segments=tuple(own), text="", numerics="exact") for s, own in segments.items()
        )
        own = tuple(of_rollout[group.index, sample] for sample in segments)
        groups.append(replace(group, rollouts=rollouts, verdicts=({},) * len(own), rewards=own))
    return replace(plain, groups=tuple(groups))


def random_rewards(rows: Sequence[Row], seed: int = 0) -> list[float]:
    return np.random.default_rng(seed).normal(size=len({(row.group, row.sample) for row in rows})).tolist()


def plain_critic(learner: PolicyLearner, folder: Path):
    """transformers' own model in float64, and the head of the learner's critic as leaves."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    own = learner.critic.model
    return model, *(p.detach().double().clone().requires_grad_() for p in (own.weight, own.bias))


def plain_values(parts, row: Row) -> torch.Tensor:
    """[T] before every token of the row."""
    model, weight, bias = parts
    context, tokens = row.segment.context_ids.tolist(), row.segment.token_ids.tolist()
    states = model.get_decoder()(torch.tensor([context + tokens])).last_hidden_state[0]
    return (states @ weight + bias)[len(context) - 1 : -1]


def bits(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


# Values.


def test_values_are_read_where_the_token_is_predicted_and_equal_a_plain_float64_forward():
    rows, learner = random_rows(1), make(loud=True)
    parts = plain_critic(learner, model_folder())
    with torch.no_grad():
        for row, found in zip(rows, learner.critic.annotate(rows), strict=True):
            right = plain_values(parts, row).numpy()
            np.testing.assert_allclose(found[row.trained], right[row.trained], atol=1e-5)
            assert not found[~row.trained].any()


def test_values_have_the_same_bits_in_every_packing_and_with_two_threads():
    rows = random_rows(2)
    results = []
    for threads, budget in ((1, 4096), (1, 1), (1, 40), (2, 4096)):
        torch.set_num_threads(threads)
        learner = make(loud=True, threads=threads, max_tokens_per_microbatch=budget)
        results.append(np.concatenate(learner.critic.annotate(rows)).tobytes())
        results.append(np.concatenate([learner.critic.annotate([row])[0] for row in rows]).tobytes())
    assert len(set(results)) == 1


def test_a_value_that_is_no_number_is_named_and_nothing_is_trained():
    rows, learner = random_rows(3), make()
    with torch.no_grad():
        learner.critic.model.bias.fill_(torch.nan)
    before = bits(learner.policy)
    with pytest.raises(NearpolicyError, match=r"group 0, sample 0, token 0: the critic's value is nan.*learning_rate"):
        learner.step(rewarded(rows, random_rewards(rows)))
    assert torch.equal(bits(learner.policy), before)


# Loss and gradient of the critic.


def known_of(learner: PolicyLearner, rows: Sequence[Row], seed: int = 0, moved: float = 0.0) -> Annotated:
    """Values as if the critic had moved away from them, and random targets."""
    numbers = np.random.default_rng(seed)
    values = [v + np.float32(moved) * numbers.normal(size=len(v)) for v in learner.critic.annotate(rows)]
    targets = [np.where(row.trained, numbers.normal(size=len(row.trained)), 0.0) for row in rows]
    return Annotated(values=[v.astype(np.float32) for v in values], targets=[t.astype(np.float32) for t in targets])


def value_update(
    learner: PolicyLearner, rows: Sequence[Row], known: Annotated
) -> tuple[float, torch.Tensor, ValueStats]:
    stats = ValueStats()
    everything = range(len(rows))
    assert learner.critic.forward_backward(everything, learner.objective, rows, known, stats)
    learner.critic.optimizer.normalise()
    return stats.loss_sum / stats.divisor, gradients(learner.critic.model), stats


AGGREGATIONS = ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


@pytest.mark.parametrize("agg", AGGREGATIONS)
@pytest.mark.parametrize("clip", [None, 0.2])
def test_loss_and_gradient_are_those_of_the_formula_on_a_plain_float64_forward(clip, agg):
    rows = random_rows(4)
    config = ObjectiveConfig(advantage="gae", loss_agg=agg)
    learner = make(config, CriticConfig(clip=clip), loud=True)
    known = known_of(learner, rows, moved=0.3)
    loss, gradient, stats = value_update(learner, rows, known)

    parts = plain_critic(learner, model_folder())
    total, clipped = torch.zeros((), dtype=torch.float64), 0
    tokens = sum(int(row.trained.sum()) for row in rows)
    for row, before, targets in zip(rows, known.values, known.targets, strict=True):
        kept = torch.from_numpy(row.trained.copy())
        v = plain_values(parts, row)[kept]
        old, r = (torch.from_numpy(array.astype(np.float64))[kept] for array in (before, targets))
        errors = (v - r) ** 2
        if clip is not None:
            held = (torch.minimum(torch.maximum(v, old - clip), old + clip) - r) ** 2
            clipped += int((held > errors).sum())
            errors = torch.maximum(errors, held)
        share = {
            "token_mean": 1 / tokens,
            "seq_mean_token_sum": 1 / len(rows),
            "seq_mean_token_mean": 1 / (len(v) * len(rows)),
            "seq_mean_token_sum_norm": 1 / (12 * len(rows)),
        }[agg]
        total = total + 0.5 * errors.sum() * share
    total.backward()
    model, weight, bias = parts
    of_decoder = [p.grad for p in model.get_decoder().parameters()]
    right = torch.cat([g.flatten() for g in (weight.grad, bias.grad, *of_decoder)])
    assert loss == pytest.approx(float(total.detach()), rel=1e-5)
    assert (gradient.double() - right).norm() <= 1e-5 * right.norm()
    assert stats.clipped == clipped and (clipped > 0) == (clip is not None)


@pytest.mark.parametrize("agg", AGGREGATIONS)
def test_how_an_update_is_cut_and_ordered_changes_neither_loss_nor_gradient(agg):
    rows = random_rows(5)
    config = ObjectiveConfig(advantage="gae", loss_agg=agg)
    whole = make(config, loud=True, max_tokens_per_microbatch=4096)
    known = known_of(whole, rows, moved=0.3)
    loss, gradient, _ = value_update(whole, rows, known)
    order = [*range(8, 12), *range(4, 8), *range(4)]
    ordered = Annotated(values=[known.values[i] for i in order], targets=[known.targets[i] for i in order])
    for budget in (1, 24, 60):
        cut = make(config, loud=True, max_tokens_per_microbatch=budget)
        for of_rows, of_known in ((rows, known), ([rows[i] for i in order], ordered)):
            again, other, _ = value_update(cut, of_rows, of_known)
            cut.critic.optimizer.zero_grad()
            assert again == pytest.approx(loss, rel=1e-5)
            assert (other - gradient).norm() <= 1e-5 * gradient.norm()


def test_an_update_of_the_critic_in_several_calls_is_one_update():
    rows = random_rows(5)
    whole, parts = make(loud=True), make(loud=True)
    known = known_of(whole, rows)
    _, gradient, _ = value_update(whole, rows, known)
    stats = ValueStats()
    for part in (range(4), range(4, 12)):
        parts.critic.forward_backward(part, parts.objective, rows, known, stats)
    parts.critic.optimizer.normalise()
    assert (gradients(parts.critic.model) - gradient).norm() <= 1e-5 * gradient.norm()


def test_checkpointed_activations_give_the_same_bits():
    rows = random_rows(6)
    plain, saving = make(loud=True), make(loud=True, activation_checkpointing=True)
    known = known_of(plain, rows)
    assert torch.equal(value_update(plain, rows, known)[1], value_update(saving, rows, known)[1])


def test_a_gradient_that_is_not_finite_is_counted_and_not_applied():
    rows, learner = random_rows(7), make(num_iterations=2)
    apply, poison = learner.critic.optim_step, [True, False]

    def poisoned(rate: float) -> float:
        if poison.pop(0):
            learner.critic.model.bias.grad.fill_(torch.nan)
        return apply(rate)

    learner.critic.optim_step = poisoned
    metrics = learner.step(rewarded(rows, random_rewards(rows))).metrics
    assert metrics["critic/skipped_updates"] == 1.0
    assert torch.isfinite(bits(learner.critic.model)).all()
    assert bits(learner.critic.model)[:64].any()  # the second one was applied


# What a step makes of the values.


def advantages_by_hand(
    batch: Batch, values: Sequence[np.ndarray], penalties: Sequence[np.ndarray], *, gamma: float, lam
) -> dict[tuple[int, int, int], np.ndarray]:
    """The definition in float64: A_t = sum over k >= 0 of (gamma lam)^k delta_{t+k}, over trained tokens."""
    found: dict[tuple[int, int, int], np.ndarray] = {}
    places = segment_places(batch.rows)
    rewards = {
        (g.index, r.sample): reward for g in batch.groups for r, reward in zip(g.rollouts, g.rewards, strict=True)
    }
    for rollout in dict.fromkeys(place[:2] for place in places):
        own = [i for i, place in enumerate(places) if place[:2] == rollout]
        tokens = [(i, t) for i in own for t in np.flatnonzero(batch.rows[i].trained)]
        v = [float(values[i][t]) for i, t in tokens] + [0.0]
        r = [-float(penalties[i][t]) for i, t in tokens]
        r[-1] += rewards[rollout]
        deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(tokens))]
        for i in own:
            found[places[i]] = np.zeros(len(batch.rows[i].trained))
        for t, (i, position) in enumerate(tokens):
            weight = gamma * lam(len(tokens))
            found[places[i]][position] = sum(weight**k * delta for k, delta in enumerate(deltas[t:]))
    return found


def two_segments(rows: Sequence[Row]) -> list[Row]:
    """The first rollout goes on in a second segment, after its first one and an answer to it."""
    first, second = rows[0], random_rows(99, groups=1, size=1)[0]
    context = np.concatenate([first.segment.context_ids, first.segment.token_ids, [7, 8]])
    more = replace(second, segment=replace(second.segment, context_ids=context))
    return [first, replace(more, group=first.group, sample=first.sample), *rows[1:]]


@pytest.mark.parametrize("whitened", [False, True])
@pytest.mark.parametrize("alpha", [None, 0.3])
@pytest.mark.parametrize("kl", [False, True])
def test_advantages_of_a_step_are_those_of_a_loop_from_the_formula(kl, alpha, whitened):
    rows = two_segments(random_rows(8))
    config = ObjectiveConfig(
        advantage="gae",
        gamma=0.97,
        scale_rewards="batch" if whitened else "none",
        **({"gae_lambda": 0.9} if alpha is None else {"gae_alpha": alpha}),
        **({"kl_coef": 0.1, "kl_in": "reward"} if kl else {}),
    )
    other = resolve("random:llama", {"initializer_range": 0.15, "hidden_size": 64}, seed=5)
    learner = make(config, loud=True, reference=other if kl else None)
    batch = rewarded(rows, random_rewards(rows))
    known = learner.known_at_start(rows)
    penalties = [np.zeros(len(row.trained)) for row in rows]
    if kl:
        penalties = [0.1 * (p - q) for p, q in zip(known.proximal, known.reference, strict=True)]
    lam = (lambda n: 0.9) if alpha is None else (lambda n: max(0.0, 1 - 1 / (alpha * n)))
    right = advantages_by_hand(batch, known.values, penalties, gamma=0.97, lam=lam)
    if whitened:
        flat = np.concatenate(
            [right[place][row.trained] for place, row in zip(segment_places(rows), rows, strict=True)]
        )
        right = {place: (of_row - flat.mean()) / flat.std(ddof=1) for place, of_row in right.items()}
    report = learner.step(batch)
    for place, row, before in zip(segment_places(rows), report.rows, rows, strict=True):
        np.testing.assert_allclose(row.advantages[before.trained], right[place][before.trained], atol=2e-6)
        assert not row.advantages[~before.trained].any()


@pytest.mark.parametrize("lam", [1.0, 0.5])
def test_the_critic_is_trained_towards_returns_of_its_own_lambda(lam):
    rows = random_rows(9)
    config = ObjectiveConfig(advantage="gae", gamma=0.9, gae_lambda=0.3)
    learner = make(config, CriticConfig(gae_lambda=lam), loud=True)
    batch = rewarded(rows, random_rewards(rows))
    known = learner.with_targets(batch, learner.known_at_start(rows))
    zeros = [np.zeros(len(row.trained)) for row in rows]
    right = advantages_by_hand(batch, known.values, zeros, gamma=0.9, lam=lambda n: lam)
    for place, row, values, targets in zip(segment_places(rows), rows, known.values, known.targets, strict=True):
        np.testing.assert_allclose(targets[row.trained], (right[place] + values)[row.trained], atol=1e-5)
        if lam == 1.0:  # the discounted reward alone, whatever the critic says
            reward = dict(zip([(r.group, r.sample) for r in rows], random_rewards(rows), strict=True))[place[:2]]
            powers = 0.9 ** np.arange(row.trained.sum())[::-1]
            np.testing.assert_allclose(targets[row.trained], reward * powers, atol=1e-6)


def test_with_lambda_1_gamma_1_and_a_fresh_critic_the_first_step_is_that_of_reinforce_bit_for_bit():
    rows = random_rows(10)
    rewards = random_rewards(rows)
    learner = make()
    report = learner.step(rewarded(rows, rewards))
    for row, reward in zip(report.rows, rewards, strict=True):
        assert (row.advantages[row.trained] == np.float32(reward)).all()
    plain = PolicyLearner(
        load_policy(model_folder(), known_to_fit=True),
        Objective(ObjectiveConfig(advantage="reinforce"), 12),
        learner.config,
        EXACT,
        temperature=1.0,
        total_steps=20,
    )
    of_reinforce = [
        replace(row, advantages=np.where(row.trained, reward, 0.0)) for row, reward in zip(rows, rewards, strict=True)
    ]
    plain.step(batch_of(of_reinforce))
    assert torch.equal(bits(learner.policy), bits(plain.policy))


def test_completions_without_a_reward_and_masked_ones_reach_neither_policy_nor_critic_nor_the_whitening():
    rows = random_rows(11)
    cut = replace(rows[2], segment=replace(rows[2].segment, finish=Finish.LENGTH))
    rows = [rows[0], rows[1], cut, *rows[3:]]
    nobody = {1: rows[1], 2: rows[2]}
    trained = [replace(row, trained=row.trained & (i not in nobody)) for i, row in enumerate(rows)]
    trained = [replace(row, advantages=np.where(row.trained, row.advantages, 0.0)) for row in trained]
    rewards = random_rewards(rows)
    rewards[1] = None
    config = ObjectiveConfig(advantage="gae", mask_truncated_completions=True)
    learner, fewer = make(config, loud=True), make(config, loud=True)
    report = learner.step(rewarded(trained, rewards))
    assert not any(report.rows[i].trained.any() for i in nobody)
    flat = np.concatenate([row.advantages[row.trained] for row in report.rows])
    assert flat.mean() == pytest.approx(0.0, abs=1e-6) and flat.std(ddof=1) == pytest.approx(1.0, rel=1e-5)
    left = [i for i in range(len(rows)) if i not in nobody]
    fewer.step(rewarded([rows[i] for i in left], [rewards[i] for i in left]))
    for mine, right in ((learner.policy, fewer.policy), (learner.critic.model, fewer.critic.model)):
        assert (bits(mine) - bits(right)).abs().max() <= 1e-6


def test_a_completion_cut_by_the_length_limit_ends_there_and_nothing_is_bootstrapped():
    rows = random_rows(12)
    cut = [replace(row, segment=replace(row.segment, finish=Finish.LENGTH)) for row in rows]
    rewards = random_rewards(rows)
    reports = [make(loud=True).step(rewarded(of_rows, rewards)) for of_rows in (rows, cut)]
    for a, b in zip(reports[0].rows, reports[1].rows, strict=True):
        assert np.array_equal(a.advantages, b.advantages)


def test_every_update_of_the_policy_has_one_of_the_critic_and_the_clip_acts_from_the_second_on():
    rows = random_rows(13, groups=4)
    once = make(learning_rate=0.01).step(rewarded(rows, [3.0] * 16)).metrics
    learner = make(num_iterations=3, minibatches=2, learning_rate=0.01)
    updates = []
    learner._emit = lambda phase, **numbers: phase == "optim" and updates.append(numbers.get("model"))
    report = learner.step(rewarded(rows, [3.0] * 16))
    assert updates == [None, "critic"] * 6
    assert once["critic/clip_share"] == 0.0 < report.metrics["critic/clip_share"] < 1.0
    plain = make(critic=CriticConfig(clip=None)).step(rewarded(rows, [3.0] * 16)).metrics
    assert "critic/clip_share" not in plain
    assert report.metrics["critic/loss"] < once["critic/loss"] == pytest.approx(4.5)  # half of 3 squared, before any
    assert unknown_names(report.metrics) == []


def test_a_step_without_rows_is_a_step_without_update_of_the_critic():
    learner = make(loud=True, weight_decay=0.5)
    before = bits(learner.critic.model)
    metrics = learner.step(batch_of([], places=3)).metrics
    assert torch.equal(bits(learner.critic.model), before)
    assert {name for name in metrics if name.startswith("critic/")} == {
        "critic/learning_rate",
        "critic/skipped_updates",
    }


def test_vtrace_compares_with_the_critic_where_there_is_one():
    from nearpolicy.objectives import credit

    rows = random_rows(14)
    rewards = random_rewards(rows)
    learner = make(ObjectiveConfig(advantage="vtrace", gamma=0.9), loud=True)
    known = learner.known_at_start(rows)
    batch = rewarded(rows, rewards)
    known = learner.with_targets(batch, known)
    report = learner.step(batch)
    for i, (row, reward) in enumerate(zip(rows, rewards, strict=True)):
        rewards_T = np.zeros(len(row.trained))
        rewards_T[np.flatnonzero(row.trained)[-1]] = reward
        log_rhos = known.proximal[i] - row.segment.behavior_logprobs
        targets, right = credit.vtrace(
            rewards_T, known.values[i], log_rhos, row.trained, gamma=0.9, rho_bar=1.0, c_bar=1.0
        )
        np.testing.assert_allclose(report.rows[i].advantages, right, atol=1e-6)
        np.testing.assert_allclose(known.targets[i], targets, atol=1e-6)


# Learning, pretraining, beginning.


def test_values_converge_to_a_constant_reward():
    rows = random_rows(15)
    learner = make(critic=CriticConfig(learning_rate=3e-3, clip=None), learning_rate=1e-6)
    for step in range(60):
        metrics = learner.step(rewarded(rows, [0.7] * 12, step=step)).metrics
    assert metrics["critic/value_mean"] == pytest.approx(0.7, abs=0.02)
    assert metrics["critic/loss"] < 1e-3
    assert "critic/explained_variance" not in metrics  # all targets are equal
    assert metrics["critic/target_mean"] == pytest.approx(0.7)


def test_a_critic_learns_which_prompts_are_easy_and_its_explained_variance_rises():
    rows = random_rows(16)
    easy = [1.0 if row.group == 1 else 0.0 for row in rows]
    learner = make(critic=CriticConfig(learning_rate=3e-3), learning_rate=1e-6)
    explained = [
        learner.step(rewarded(rows, easy, step=step)).metrics["critic/explained_variance"] for step in range(40)
    ]
    assert explained[0] == pytest.approx(0.0, abs=1e-6)
    assert explained[-1] > 0.95


def test_pretraining_trains_the_critic_alone_and_the_policys_schedule_begins_after_it():
    rows = random_rows(17)
    settings = {"learning_rate": 1e-3, "warmup_steps": 2, "num_iterations": 2}
    learner = make(critic=CriticConfig(pretraining_steps=3, learning_rate=2e-3), **settings)
    policy, critic = bits(learner.policy), bits(learner.critic.model)
    rates, critic_rates = [], []
    for step in range(5):
        batch = rewarded(rows, random_rewards(rows), step=step)
        assert learner.is_pretraining == (step < 3)
        report = learner.step(batch)
        rates.append(report.metrics["learner/learning_rate"])
        critic_rates.append(report.metrics["critic/learning_rate"])
        assert torch.equal(bits(learner.policy), policy) == (step < 3)
        assert (report.version, report.updates) == (step + 1, max(0, 2 * (step - 2)))
        assert not torch.equal(bits(learner.critic.model), critic)
        critic = bits(learner.critic.model)
        fates = token_fates(batch, report)  # tokens that trained the critic are trained
        assert {fate.value for of in fates.values() for fate in of} == {"trained"}
    assert rates == pytest.approx([0.0, 0.0, 0.0, 5e-4, 1e-3])
    assert critic_rates == pytest.approx([1e-3, 2e-3, 2e-3, 2e-3, 2e-3])


def test_after_a_warm_start_the_critic_begins_as_the_policy_of_version_0_unless_it_is_another_model():
    rows = random_rows(18)
    for path in (None, "elsewhere"):
        learner = make(critic=CriticConfig(path=path))
        first = bits(learner.critic.model.decoder)
        learner.supervised_step(rows, Supervised(), 1e-2)
        learner.begin()
        now = bits(learner.critic.model.decoder)
        assert torch.equal(now, bits(learner.policy.model.get_decoder())) == (path is None)
        assert torch.equal(now, first) == (path is not None)


def test_gae_without_a_value_model_and_a_value_model_without_use_are_refused():
    rows = random_rows(19)
    bare = PolicyLearner(
        load_policy(model_folder(), known_to_fit=True),
        Objective(ObjectiveConfig(advantage="gae"), 12),
        LearnerConfig(),
        EXACT,
        temperature=1.0,
        total_steps=1,
    )
    with pytest.raises(ValueError, match=r"objective\.advantage=gae needs values"):
        bare.step(rewarded(rows, random_rewards(rows)))
    with pytest.raises(ValueError, match=r"objective\.advantage=grpo has no use for a value_model"):
        make(ObjectiveConfig())


def test_the_policy_is_trained_as_if_the_advantages_had_come_with_the_batch():
    rows = random_rows(20, groups=4)
    settings = {"num_iterations": 2, "minibatches": 2}
    learner = make(ObjectiveConfig(advantage="gae", gae_lambda=0.9), loud=True, **settings)
    batch = rewarded(rows, random_rewards(rows))
    given = learner.revised(batch, learner.known_at_start(rows))
    report = learner.step(batch)
    plain = PolicyLearner(
        load_policy(model_folder(), known_to_fit=True),
        Objective(ObjectiveConfig(advantage="reinforce"), 12),
        learner.config,
        EXACT,
        temperature=1.0,
        total_steps=20,
    )
    assert plain.step(batch_of(given)).metrics["policy/loss"] == report.metrics["policy/loss"]
    assert torch.equal(weights(plain.policy), weights(learner.policy))
