"""Every objective through the learner: cut, packing and order change nothing; reference, teacher and entropy act."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from learner_cases import EXACT, batch_of, gradients, model_folder, random_rows, reference_logprobs, weights

from nearpolicy.errors import NearpolicyError
from nearpolicy.learner.config import LearnerConfig
from nearpolicy.learner.report import TokenStats
from nearpolicy.learner.step import PolicyLearner
from nearpolicy.learner.tokens import NOTHING_KNOWN, Annotated, tokens_of
from nearpolicy.models.loading import load_policy
from nearpolicy.objectives.catalogue import CORRECTIONS, LOSSES
from nearpolicy.objectives.config import ObjectiveConfig
from nearpolicy.objectives.objective import Objective
from nearpolicy.records import Admission, Batch, Group, Prompt, Rollout, Row
from nearpolicy.telemetry.batch import token_fates

OTHER = {"seed": 5}


def make(config: ObjectiveConfig, *, reference_seed: int | None = None, **settings) -> PolicyLearner:
    folder = model_folder()
    if config.reference == "none":
        reference = None
    elif reference_seed is None:
        reference = load_policy(folder, known_to_fit=True)
    else:
        reference = load_policy(other_folder(), known_to_fit=True)
    return PolicyLearner(
        load_policy(folder, known_to_fit=True),
        Objective(config, 12),
        LearnerConfig(**{"learning_rate": 1e-3, "max_grad_norm": None} | settings),
        EXACT,
        temperature=1.0,
        total_steps=10,
        reference=None if reference is None else reference.requires_grad_(False),
    )


def other_folder():
    from learner_cases import SHAPE

    from nearpolicy.models.loading import resolve

    return resolve("random:llama", SHAPE, seed=5)


def logprobs(learner: PolicyLearner, model: torch.nn.Module, rows) -> list[np.ndarray]:
    return learner.passes.logprobs(model, rows, range(len(rows)), same_support=False)


def near_rows(seed: int, **options) -> list[Row]:
    """Rows whose behaviour policy is near the tiny model, some tokens further away than others."""
    rows = random_rows(seed, **options)
    own = make(ObjectiveConfig())
    noise = np.random.default_rng(seed)
    return [
        replace(
            row,
            segment=replace(
                row.segment,
                behavior_logprobs=np.where(
                    row.segment.mask, own_logprobs + noise.normal(0, 0.3, len(own_logprobs)), 0.0
                ),
            ),
        )
        for row, own_logprobs in zip(rows, logprobs(own, own.policy, rows), strict=True)
    ]


def one_update(learner: PolicyLearner, rows, order=None) -> tuple[float, torch.Tensor]:
    rows = rows if order is None else [rows[i] for i in order]
    everything = list(range(len(rows)))
    start = learner.known_at_start(rows)
    drift = [p + np.float32(0.05) * row.trained for p, row in zip(learner.annotate(rows), rows, strict=True)]
    known = learner.with_choice(everything, rows, replace(start, proximal=drift))
    stats = TokenStats()
    learner.forward_backward(everything, learner.objective, rows, known, stats)
    learner.normalise()
    return stats.loss, gradients(learner.policy)


OBJECTIVES = {
    **{f"loss {name}": {"loss": name} for name in LOSSES if name != "opd"},
    "loss opd": {"loss": "opd", "reference": "elsewhere"},
    **{f"correction {name}": {"correction": name} for name in CORRECTIONS},
    "interpolated": {"loss": "decoupled_ppo", "proximal": "interpolated"},
    "off-policy masking": {"off_policy_threshold": 0.1},
    "kl k3": {"kl_coef": 0.1},
    "kl full": {"kl_coef": 0.1, "kl_estimator": "full"},
    "entropy": {"entropy_coef": 0.1},
    **{
        f"sequence_mask, {agg}": {"correction": "sequence_mask", "correction_cap": 1.2, "loss_agg": agg}
        for agg in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
    },
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_objective_depends_on_how_an_update_is_cut_or_ordered(name):
    config = ObjectiveConfig(**OBJECTIVES[name])
    rows = near_rows(1)
    loss, gradient = one_update(make(config, reference_seed=5), rows)
    assert gradient.norm() > 0
    order = [*range(8, 12), *range(4, 8), *range(4)] if name != "loss clip_cov" else None  # drawn in the order of rows
    for budget, ordered in ((1, None), (40, None), (4096, order)):
        again, other = one_update(make(config, reference_seed=5, max_tokens_per_microbatch=budget), rows, ordered)
        assert again == pytest.approx(loss, rel=1e-5, abs=1e-7)
        assert (other - gradient).norm() <= 1e-5 * gradient.norm()


@pytest.mark.parametrize("agg", ["token_mean", "seq_mean_token_mean"])
def test_tokens_that_a_correction_rejects_leave_sum_and_divisor_and_are_told_as_masked(agg):
    rows = near_rows(2)
    config = ObjectiveConfig(loss="pg", correction="token_mask", correction_cap=1.2, correction_floor=0.8, loss_agg=agg)
    learner = make(config)
    own = learner.annotate(rows)
    ratios = [np.exp(o - row.segment.behavior_logprobs) for row, o in zip(rows, own, strict=True)]
    kept = [row.trained & (ratio <= 1.2) & (ratio >= 0.8) for row, ratio in zip(rows, ratios, strict=True)]
    values = [-np.exp(o - r.segment.behavior_logprobs) * r.advantages * o for o, r in zip(own, rows, strict=True)]
    if agg == "token_mean":
        right = sum(v[k].sum() for v, k in zip(values, kept, strict=True)) / sum(k.sum() for k in kept)
    else:
        right = np.mean([v[k].mean() for v, k in zip(values, kept, strict=True) if k.any()])
    groups = tuple(
        Group(
            admission=Admission(index=i, prompt=Prompt(id="", task="t", text="?"), seed=0, version=0),
            rollouts=tuple(
                Rollout(sample=r.sample, segments=(r.segment,), text="", numerics="exact") for r in rows if r.group == i
            ),
        )
        for i in range(3)
    )
    batch = Batch(step=0, places=3, groups=groups, rows=tuple(rows))
    report = learner.step(batch)
    assert report.metrics["policy/loss"] == pytest.approx(float(right), rel=1e-5)
    fates = token_fates(batch, report)
    total = sum(n for of in fates.values() for fate, n in of.items() if fate.value == "trained")
    assert 0 < total == sum(k.sum() for k in kept) < sum(row.trained.sum() for row in rows)
    assert sum(n for of in fates.values() for n in of.values()) == sum(row.segment.num_sampled for row in rows)
    rejected = report.metrics["correction/rejected_share"]
    assert rejected == pytest.approx(1 - total / sum(row.trained.sum() for row in rows))


def test_an_update_whose_tokens_are_all_rejected_is_not_made():
    rows = near_rows(3)
    learner = make(ObjectiveConfig(correction="token_mask", correction_floor=1.0, correction_cap=1.0), weight_decay=0.5)
    before = weights(learner.policy)
    report = learner.step(batch_of(rows))
    assert torch.equal(weights(learner.policy), before)
    assert (report.updates, report.metrics["policy/loss"]) == (0, 0.0)
    assert not any(row.trained.any() for row in report.rows)
    learner.objective = Objective(ObjectiveConfig(), 12)
    fresh = make(ObjectiveConfig(), weight_decay=0.5)
    learner.step(batch_of(rows, step=1)), fresh.step(batch_of(rows))
    assert torch.equal(weights(learner.policy), weights(fresh.policy))  # nothing of the rejected update is left


@pytest.mark.parametrize("estimator", ["k2", "k3", "full"])
def test_before_the_first_update_the_policy_is_its_own_reference(estimator):
    learner = make(ObjectiveConfig(kl_coef=0.1, kl_estimator=estimator))
    report = learner.step(batch_of(near_rows(4)))
    assert report.metrics["policy/kl_reference"] == pytest.approx(0.0, abs=1e-9 if estimator != "full" else 1e-6)
    report = learner.step(batch_of(near_rows(4), step=1))
    assert report.metrics["policy/kl_reference"] > 1e-7


@pytest.mark.parametrize("estimator", ["k2", "k3", "full"])
def test_the_penalty_has_the_value_and_the_gradient_of_a_plain_float64_forward(estimator):
    from transformers import AutoModelForCausalLM

    rows = [replace(row, advantages=row.advantages * 0) for row in near_rows(5)]
    config = ObjectiveConfig(loss="pg", correction="none", kl_coef=0.5, kl_estimator=estimator)
    loss, gradient = one_update(make(config, reference_seed=5), rows)
    model, other = (
        AutoModelForCausalLM.from_pretrained(f, dtype=torch.float64, attn_implementation="eager")
        for f in (model_folder(), other_folder())
    )
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        kept = torch.from_numpy(row.trained.copy())
        if estimator == "full":
            context, tokens = row.segment.context_ids.tolist(), row.segment.token_ids.tolist()
            ids = torch.tensor([context + tokens])
            p, q = (torch.log_softmax(m(ids).logits[0, len(context) - 1 : -1], -1) for m in (model, other))
            values = (p.exp() * (p - q.detach())).sum(-1)[kept]
        else:
            d = (reference_logprobs(other, row).detach() - reference_logprobs(model, row))[kept]
            values = 0.5 * d**2 if estimator == "k2" else torch.exp(d) - 1 - d
        total, count = total + values.sum(), count + int(kept.sum())
    (0.5 * total / count).backward()
    right = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert loss == pytest.approx(0.5 * float(total.detach()) / count, rel=1e-5)
    assert (gradient.double() - right).norm() <= 2e-5 * right.norm()


def test_the_entropy_bonus_raises_entropy_and_its_coefficient_follows_the_target():
    rows = [replace(row, advantages=row.advantages * 0) for row in near_rows(6)]
    learner = make(ObjectiveConfig(loss="pg", entropy_coef=1.0), learning_rate=1e-3)
    entropies = [learner.step(batch_of(rows, step=i)).metrics["policy/entropy"] for i in range(4)]
    assert entropies == sorted(entropies) and entropies[-1] > entropies[0]
    for target, signs in ((100.0, 1), (1e-6, -1)):
        learner = make(ObjectiveConfig(entropy_coef=0.01, entropy_target=target, entropy_step=0.002))
        found = [learner.step(batch_of(rows, step=i)).metrics["policy/entropy_coef"] for i in range(3)]
        assert found == pytest.approx([0.01 + signs * 0.002 * i for i in range(3)])
        fresh = make(ObjectiveConfig(entropy_coef=0.01, entropy_target=target, entropy_step=0.002))
        fresh.load_state(learner.state())
        assert fresh.objective.entropy_weight == pytest.approx(found[-1] + signs * 0.002)


def test_a_teacher_is_approached_on_what_the_student_has_sampled():
    rows = near_rows(7, groups=2)
    groups = tuple(
        Group(
            admission=Admission(index=i, prompt=Prompt(id="", task="t", text="?"), seed=0, version=0),
            rollouts=tuple(
                Rollout(sample=r.sample, segments=(r.segment,), text="", numerics="exact") for r in rows if r.group == i
            ),
            verdicts=({},) * 4,
            rewards=(0.0,) * 4,
        )
        for i in range(2)
    )
    learner = make(ObjectiveConfig(loss="opd", reference="elsewhere"), reference_seed=5)
    theirs = logprobs(learner, learner.reference, rows)
    own = logprobs(learner, learner.policy, rows)
    report = learner.step(Batch(step=0, places=2, groups=groups, rows=tuple(rows)))
    for row, t, o in zip(report.rows, theirs, own, strict=True):
        assert row.advantages[row.trained].tolist() == pytest.approx((t - o)[row.trained].tolist(), abs=1e-6)


def test_version_0_is_the_initial_reference_also_after_a_warm_start():
    from nearpolicy.objectives.objective import Supervised

    rows = near_rows(8)
    learner = make(ObjectiveConfig(kl_coef=0.1))
    learner.supervised_step(rows, Supervised(), 1e-2)
    learner.begin()
    assert learner.step(batch_of(rows)).metrics["policy/kl_reference"] == pytest.approx(0.0, abs=1e-9)


def test_segments_of_one_rollout_stay_in_one_micro_batch_where_the_loss_needs_it():
    base = near_rows(9, groups=1, size=2)
    second = replace(base[0].segment, context_ids=np.concatenate([base[0].segment.context_ids, [1, 2]]))
    rows = [base[0], replace(base[0], segment=second), base[1]]
    whole = make(ObjectiveConfig(loss="gspo"), max_tokens_per_microbatch=1)
    packed = list(whole.passes.packed(rows, range(3), whole.objective.whole_rollouts))
    assert [sorted(set(p.row_index.tolist())) for p in packed] == [[0, 1], [2]]
    free = list(whole.passes.packed(rows, range(3), False))
    assert [sorted(set(p.row_index.tolist())) for p in free] == [[0], [1], [2]]
    scores = whole.passes.score(whole.policy, rows, packed[0], same_support=False)
    tokens = tokens_of(rows, packed[0], scores, NOTHING_KNOWN, 0)
    assert tokens.sequences.count == 1


def test_nothing_is_annotated_that_nobody_asked_for():
    learner = make(ObjectiveConfig())
    known = learner.known_at_start(near_rows(10))
    assert known == Annotated()


@pytest.mark.parametrize(
    ("name", "value"), [("behavior_logprobs", np.nan), ("behavior_logprobs", -np.inf), ("advantages", np.inf)]
)
def test_a_number_that_is_none_is_named_with_its_place_and_never_trained_on(name, value):
    rows = near_rows(11)
    array = np.array(rows[5].advantages if name == "advantages" else rows[5].segment.behavior_logprobs)
    place = int(np.flatnonzero(rows[5].trained)[-1])
    array[place] = value
    rows[5] = (
        replace(rows[5], advantages=array)
        if name == "advantages"
        else replace(rows[5], segment=replace(rows[5].segment, behavior_logprobs=array))
    )
    learner = make(ObjectiveConfig())
    before = weights(learner.policy)
    with pytest.raises(NearpolicyError, match=rf"group 1, sample 1, token {place}: its {name} is"):
        learner.step(batch_of(rows))
    assert torch.equal(weights(learner.policy), before)


def test_arrays_that_do_not_fit_are_refused_by_name_and_shape():
    from nearpolicy.objectives.objective import Tokens
    from nearpolicy.objectives.sequences import Sequences

    three, two = torch.zeros(3), torch.zeros(2)
    with pytest.raises(ValueError, match=r"3 tokens need arrays of shape \(3,\), but advantages has \(2,\)"):
        Tokens(
            logprobs=three,
            entropies=three,
            proximal_logprobs=three,
            behavior_logprobs=three,
            advantages=two,
            sequences=Sequences.of_lengths([3]),
        )
