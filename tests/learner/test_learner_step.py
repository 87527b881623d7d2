"""Loss, gradient and update depend on the samples, not on how they are cut; the numbers are those of plain float64."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from learner_cases import (
    FixedLogits,
    batch_of,
    constant_row,
    gradients,
    learner,
    model_folder,
    random_rows,
    reference,
    reference_logprobs,
    weights,
)

from nearpolicy.errors import NearpolicyError
from nearpolicy.generator.sampling import sampled_logprobs
from nearpolicy.learner.config import LearnerConfig
from nearpolicy.learner.optimizer import MasterAdamW
from nearpolicy.learner.report import TokenStats
from nearpolicy.learner.schedule import learning_rate
from nearpolicy.learner.step import PolicyLearner
from nearpolicy.learner.tokens import NOTHING_KNOWN
from nearpolicy.models.loading import resolve
from nearpolicy.objectives import aggregation
from nearpolicy.objectives.config import ObjectiveConfig
from nearpolicy.objectives.objective import Objective, Supervised, TokenLosses
from nearpolicy.records import Row
from nearpolicy.roles import Sampling


class GivenLosses:
    """Every token's loss is its advantage times a parameter ``w`` that starts at 1."""

    skips_zero_advantage = False
    whole_rollouts = True
    entropy_has_gradient = False
    same_support = False

    def __init__(self, loss_agg: str = "token_mean", max_length: int = 10) -> None:
        self.w = torch.nn.Parameter(torch.ones(()))
        self._loss_agg, self._max_length = loss_agg, max_length

    def shares(self, kept, sequences):
        return aggregation.shares(kept, sequences, self._loss_agg, self._max_length)

    def divisor(self, kept, sequences):
        return aggregation.divisor(kept, sequences, self._loss_agg)

    def token_losses(self, tokens):
        return TokenLosses(
            losses=tokens.advantages * self.w + 0.0 * tokens.logprobs,
            kept=torch.ones_like(tokens.advantages, dtype=torch.bool),
            named={"policy/kl_reference": tokens.advantages},
        )


def loss_and_slope(objective: GivenLosses, rows, budget: int) -> tuple[float, float, TokenStats]:
    stats = TokenStats()
    own = learner(policy=FixedLogits([0.0, 0.0]), objective=objective, max_tokens_per_microbatch=budget)
    own.forward_backward(range(len(rows)), objective, rows, NOTHING_KNOWN, stats)
    return stats.loss, float(objective.w.grad) / stats.divisor, stats


LAYOUTS = {"one batch": (0, 1, 100), "two micro-batches": (0, 1, 2), "B before A": (1, 0, 100)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("loss_agg", "right"), [("token_mean", 1.75), ("seq_mean_token_mean", 2.5), ("seq_mean_token_sum_norm", 0.7)]
)
def test_the_loss_is_the_documented_mean_in_every_layout(loss_agg, right, layout):
    first, second, budget = LAYOUTS[layout]
    rows = [constant_row(0, 6, 1.0), constant_row(1, 2, 4.0)]
    loss, slope, _ = loss_and_slope(GivenLosses(loss_agg), [rows[first], rows[second]], budget)
    assert (loss, slope) == (pytest.approx(right, abs=1e-6), pytest.approx(right, abs=1e-6))


@pytest.mark.parametrize("budget", [100, 6, 1])
def test_gradient_accumulation_never_changes_the_gradient(budget):
    rows = [constant_row(i, i, float(i)) for i in (1, 2, 3, 4)]
    assert loss_and_slope(GivenLosses(), rows, budget)[1] == pytest.approx(3.0, abs=1e-6)


@pytest.mark.parametrize("budget", [100, 6, 2, 1])
def test_a_logged_mean_is_a_mean_over_tokens_for_every_cut(budget):
    rows = [constant_row(0, 6, 0.1), constant_row(1, 2, 0.5)]
    stats = loss_and_slope(GivenLosses(), rows, budget)[2]
    assert stats.means()["policy/kl_reference"] == pytest.approx(0.2, abs=1e-6)


def update(rows, *, order=None, objective=None, **options) -> tuple[float, torch.Tensor, TokenStats]:
    """Loss, gradient and sums of one update over the rows."""
    rows = [rows[i] for i in order] if order is not None else rows
    own = learner(objective=objective, **options)
    stats = TokenStats()
    own.forward_backward(range(len(rows)), own.objective, rows, NOTHING_KNOWN, stats)
    own.normalise()
    return stats.loss, gradients(own.policy), stats


def close(found: tuple, right: tuple, tolerance: float = 1e-5) -> None:
    assert abs(found[0] - right[0]) <= tolerance * max(1e-3, abs(right[0]))
    gradient, exact = found[1].double(), right[1].double()
    assert (gradient - exact).norm() <= tolerance * exact.norm()


@pytest.mark.parametrize(
    ("loss_agg", "temperature"),
    [("token_mean", 1.0), ("seq_mean_token_mean", 0.7), ("seq_mean_token_sum_norm", 1.3)],
)
def test_loss_and_gradient_are_those_of_a_plain_float64_forward(loss_agg, temperature):
    rows = random_rows(1)
    right = reference(model_folder(), rows, temperature=temperature, loss_agg=loss_agg)
    close(update(rows, objective=ObjectiveConfig(loss_agg=loss_agg), temperature=temperature), right)


@pytest.mark.parametrize("budget", [1, 24, 60, 4096])
def test_the_micro_batch_budget_changes_nothing(budget):
    rows = random_rows(2)
    close(update(rows, max_tokens_per_microbatch=budget), reference(model_folder(), rows))


def test_the_order_of_rows_and_whether_they_share_their_context_changes_nothing():
    rows = random_rows(3)
    right = reference(model_folder(), rows)
    for seed in range(3):
        order = list(range(len(rows)))
        random.Random(seed).shuffle(order)
        close(update(rows, order=order), right)
    interleaved = sorted(range(len(rows)), key=lambda i: rows[i].sample)  # no two neighbours have one context
    close(update(rows, order=interleaved), right)


def test_rows_of_one_prompt_go_through_the_model_with_the_prompt_once():
    rows = random_rows(3, groups=1, size=4)
    own = learner()
    [packed] = own.passes.packed(rows, range(4))
    assert len(packed.input_ids) == len(rows[0].segment.context_ids) + sum(len(r.segment.token_ids) - 1 for r in rows)


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_an_update_has_the_same_bits_with_one_and_with_two_threads(max_norm):
    folder = model_folder(hidden_size=256, intermediate_size=512, num_attention_heads=4, head_dim=64)
    rows = random_rows(4)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        own = learner(folder=folder, threads=threads, max_grad_norm=max_norm)
        own.forward_backward(range(len(rows)), own.objective, rows, NOTHING_KNOWN, TokenStats())
        gradient = gradients(own.policy)
        norm = own.optim_step(1e-3)
        results.append((gradient, norm, weights(own.policy)))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert torch.equal(results[0][2], results[1][2])


def test_threads_that_come_and_go_between_microbatches_change_no_bit():
    rows, results = random_rows(4), []
    for answers in ([2, 2, 2, 2], [1, 2, 1, 2]):
        own = learner(threads=2, max_tokens_per_microbatch=20)
        asked = itertools.cycle(answers)
        used: list[int] = []
        own.passes.threads_now = lambda asked=asked, used=used: used.append(next(asked)) or used[-1]
        own.forward_backward(range(len(rows)), own.objective, rows, NOTHING_KNOWN, TokenStats())
        assert used[:4] == answers and torch.get_num_threads() == used[-1]
        results.append(gradients(own.policy))
    assert torch.equal(*results)


def test_activation_checkpointing_gives_the_same_bits():
    rows = random_rows(5)
    plain, saving = update(rows), update(rows, activation_checkpointing=True)
    assert plain[0] == saving[0]
    assert torch.equal(plain[1], saving[1])


def test_with_one_update_clipping_and_the_plain_policy_gradient_are_the_same():
    rows = random_rows(6)
    clip, plain = update(rows), update(rows, objective=ObjectiveConfig(loss="pg"))
    assert (clip[1] - plain[1]).norm() <= 1e-6 * plain[1].norm()
    assert clip[2].sums["policy/clip_low_share"] == clip[2].sums["policy/clip_high_share"] == 0.0


def on_policy(rows, own) -> list[Row]:
    """The same rows as if ``own`` had sampled them just now."""
    return [
        replace(row, segment=replace(row.segment, behavior_logprobs=values))
        for row, values in zip(rows, own.annotate(rows), strict=True)
    ]


class Watching(Objective):
    """Keeps what every call was given."""

    def token_losses(self, tokens):
        seen.append(
            (tokens.logprobs.detach().clone(), tokens.proximal_logprobs.clone(), tokens.behavior_logprobs.clone())
        )
        return super().token_losses(tokens)


seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []


@pytest.mark.parametrize(("num_iterations", "minibatches"), [(1, 1), (2, 2)])
def test_before_the_first_update_the_policy_agrees_with_itself(num_iterations, minibatches):
    seen.clear()
    own = learner(
        folder=model_folder(attention_dropout=0.1),
        objective=Watching(ObjectiveConfig(), 12),
        num_iterations=num_iterations,
        minibatches=minibatches,
        max_tokens_per_microbatch=4096,
    )
    rows = on_policy(random_rows(7, groups=4), own)
    report = own.step(batch_of(rows))
    now, proximal, behavior = seen[0]
    assert torch.equal(now, proximal)
    assert torch.equal(proximal, behavior)
    assert report.metrics["mismatch/logprob_diff_max"] == 0.0
    assert report.metrics["mismatch/ess"] == 1.0
    assert report.metrics["correction/weight_mean"] == 1.0
    if num_iterations == minibatches == 1:
        assert report.metrics["policy/clip_low_share"] == report.metrics["policy/clip_high_share"] == 0.0
    else:
        assert not torch.equal(seen[-1][0], seen[-1][1])  # by the last update the policy has moved


def test_a_model_with_dropout_agrees_with_itself_also_while_activations_are_recomputed():
    # Recomputing needs the module in training mode, in which dropout would act.
    folder = resolve("random:phi", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "tie_word_embeddings": False}, seed=3)
    own = learner(folder=folder, activation_checkpointing=True)
    rows = on_policy(random_rows(7), own)
    report = own.step(batch_of(rows))
    assert own.policy.model.training
    assert report.metrics["mismatch/logprob_diff_max"] == 0.0


def test_a_step_makes_iterations_times_minibatches_updates_against_its_own_start():
    seen.clear()
    objective = Watching(ObjectiveConfig(), 12)
    own = learner(objective=objective, num_iterations=3, minibatches=2, max_tokens_per_microbatch=4096)
    rows = random_rows(8, groups=4)
    for step in range(2):
        start = own.annotate(rows)
        report = own.step(batch_of(rows, step=step))
        assert (report.version, report.updates) == (step + 1, 6 * (step + 1))
        calls = seen[6 * step :]
        assert len(calls) == 6
        parts = [[i for i in range(len(rows)) if rows[i].group in groups] for groups in ((0, 1), (2, 3))]
        for number, (_, proximal, _) in enumerate(calls):
            wanted = np.concatenate([start[i][rows[i].trained] for i in parts[number % 2]])
            assert np.array_equal(proximal.numpy(), wanted)
    assert not torch.equal(seen[0][1], seen[6][1])  # the second step has a start of its own


def test_minibatches_divide_by_their_own_tokens():
    rows = random_rows(9, groups=2)
    own = learner(minibatches=2)
    halves = [[row for row in rows if row.group == group] for group in (0, 1)]
    expected = sum(reference(model_folder(), half)[0] for half in halves)
    found = []
    for half in ([0, 1, 2, 3], [4, 5, 6, 7]):
        stats = TokenStats()
        own.forward_backward(half, own.objective, rows, NOTHING_KNOWN, stats)
        found.append(stats.loss)
    assert sum(found) == pytest.approx(expected, rel=1e-5)


def thorough_objective() -> Objective:
    objective = Objective(ObjectiveConfig(), 12)
    object.__setattr__(objective, "skips_zero_advantage", False)
    return objective


def test_groups_without_signal_skip_the_forward_pass_and_change_nothing():
    rows = random_rows(10, groups=4, signal=[True, False, False, True])
    skipping, thorough = update(rows), update(rows, objective=thorough_objective())
    right = reference(model_folder(), rows)  # all tokens stay in the divisor
    close(skipping, right)
    close(thorough, right)
    useful = sum(int(row.trained.sum()) for row in rows if row.group in (0, 3))
    assert skipping[2].tokens == useful < thorough[2].tokens


@pytest.mark.parametrize("rows", [[], random_rows(11, signal=[False] * 3)], ids=["no row", "no signal"])
def test_a_batch_with_nothing_to_learn_is_a_step_without_update(rows):
    own = learner(weight_decay=0.5)
    before = weights(own.policy)
    report = own.step(batch_of(rows, places=3))
    assert (report.version, report.updates) == (1, 0)
    assert torch.equal(weights(own.policy), before)
    assert report.metrics["policy/loss"] == 0.0
    assert all(math.isfinite(value) for value in report.metrics.values())
    assert "policy/grad_norm" not in report.metrics


def test_a_minibatch_without_signal_leaves_nothing_to_the_update_after_it():
    rows = random_rows(11, groups=4, signal=[False, False, True, True])
    steps = [learner(minibatches=2).step(batch_of(rows)), learner().step(batch_of(rows[8:]))]
    norms = [report.metrics["policy/grad_norm"] for report in steps]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    own, fresh = learner(), learner()
    own.step(batch_of(random_rows(11, signal=[False] * 3)))  # a whole step without signal
    assert own.step(batch_of(rows, step=1)).metrics["policy/grad_norm"] == pytest.approx(
        fresh.step(batch_of(rows)).metrics["policy/grad_norm"], rel=1e-6
    )


def test_rows_whose_tokens_are_all_masked_do_no_harm():
    rows = random_rows(12)
    masked = [replace(r, trained=r.trained & False, advantages=r.advantages * 0) if r.group == 1 else r for r in rows]
    rest = [row for row in rows if row.group != 1]
    close(update(masked), reference(model_folder(), rest))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_counted_and_not_applied(bad):
    class Poisoned(Objective):
        def token_losses(self, tokens):
            found = super().token_losses(tokens)
            return replace(found, losses=found.losses * bad) if poison else found

    own, clean = (learner(objective=Poisoned(ObjectiveConfig(), 12)) for _ in range(2))
    rows = random_rows(13)
    before = weights(own.policy)
    poison = True
    report = own.step(batch_of(rows))
    assert torch.equal(weights(own.policy), before)
    assert (report.metrics["policy/skipped_updates"], report.updates, report.version) == (1.0, 0, 1)
    assert not math.isfinite(report.metrics["policy/grad_norm"])
    assert not any(row.trained.any() for row in report.rows)
    poison = False
    clean_report = own.step(batch_of(rows, step=1))
    assert clean_report.metrics["policy/skipped_updates"] == 0.0
    assert all(np.array_equal(row.trained, before.trained) for row, before in zip(clean_report.rows, rows, strict=True))
    clean.step(batch_of(rows))
    assert torch.equal(weights(own.policy), weights(clean.policy))  # nothing of it stays in the moments


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["advantages", "behavior_logprobs"])
@pytest.mark.parametrize("change", [{}, {"minibatches": 3, "num_iterations": 2}, {"max_tokens_per_microbatch": 40}])
def test_a_batch_with_a_number_that_is_none_never_reaches_the_optimizer(where, bad, change):
    """In the last row, after all that would have been learned before it: weights, moments and gradient stay."""
    own, clean = learner(**change), learner(**change)
    good = random_rows(13)
    for each in (own, clean):
        each.step(batch_of(good))
    rows, last = random_rows(14), random_rows(14)[-1]
    token = int(np.flatnonzero(last.trained)[-1])
    values = np.array(getattr(last if where == "advantages" else last.segment, where))
    values[token] = bad
    broken = {where: values} if where == "advantages" else {"segment": replace(last.segment, **{where: values})}
    before = [weights(own.policy), *moments(own)]
    with pytest.raises(NearpolicyError, match=rf"group 2, sample 3, token {token}: its {where} is {bad}; nothing is"):
        own.step(batch_of([*rows[:-1], replace(last, **broken)], step=1))
    assert all(torch.equal(a, b) for a, b in zip([weights(own.policy), *moments(own)], before, strict=True))
    assert (own.version, own.updates) == (clean.version, clean.updates)
    for each in (own, clean):
        each.step(batch_of(rows, step=1))
    assert torch.equal(weights(own.policy), weights(clean.policy))


def moments(own: PolicyLearner) -> list[torch.Tensor]:
    states = own.optimizer.state_dict()["adamw"]["state"].values()
    return [of[name].clone() for of in states for name in ("exp_avg", "exp_avg_sq")]


def test_a_group_is_untrained_only_if_each_of_its_updates_was_skipped():
    # Updates: groups 0 and 1, groups 2 and 3, and both once more.
    factors = iter([math.nan, math.nan, math.nan, 1.0])

    class PoisonedAtTimes(Objective):
        def token_losses(self, tokens):
            found = super().token_losses(tokens)
            return replace(found, losses=found.losses * next(factors))

    own = learner(objective=PoisonedAtTimes(ObjectiveConfig(), 12), num_iterations=2, minibatches=2)
    report = own.step(batch_of(random_rows(13, groups=4)))
    assert (report.metrics["policy/skipped_updates"], report.updates) == (3.0, 1)
    assert {row.group for row in report.rows if not row.trained.any()} == {0, 1}


def test_engine_and_learner_score_a_token_under_the_same_temperature():
    policy = FixedLogits([2.0, 1.0, 0.0])
    [[found]] = learner(policy=policy, temperature=0.5).annotate([constant_row(0, 1, 1.0)])
    drawn = sampled_logprobs(policy.logits.detach()[None], Sampling(temperature=0.5))[0, 0]
    assert found == pytest.approx(-0.142932, abs=1e-6)
    assert found == float(drawn)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_annotated_logprobs_are_those_of_plain_transformers_and_0_where_nothing_is_trained(temperature):
    from transformers import AutoModelForCausalLM

    rows = random_rows(14)
    model = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float64, attn_implementation="eager")
    with torch.no_grad():
        for row, found in zip(rows, learner(temperature=temperature).annotate(rows), strict=True):
            right = reference_logprobs(model, row, temperature).numpy()
            np.testing.assert_allclose(found[row.trained], right[row.trained], atol=1e-5)
            assert not found[~row.trained].any()


def test_supervised_loss_is_the_mean_negative_log_likelihood():
    from transformers import AutoModelForCausalLM

    rows = random_rows(15)
    model = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float64, attn_implementation="eager")
    with torch.no_grad():
        kept = [reference_logprobs(model, row)[torch.from_numpy(row.trained.copy())] for row in rows]
    own = learner()
    assert own.supervised_step(rows, Supervised(), 1e-2) == pytest.approx(-float(torch.cat(kept).mean()), rel=1e-5)
    assert (own.version, own.updates) == (0, 0)
    again = own.supervised_step(rows, Supervised(), 1e-2)
    assert again < -float(torch.cat(kept).mean()) - 0.01  # it learns


def test_a_supervised_step_needs_no_recorded_support_where_sampling_leaves_tokens_out():
    rows, restricted = random_rows(15), ObjectiveConfig(same_support=True)
    assert learner(objective=restricted).supervised_step(rows, Supervised(), 1e-2) == learner().supervised_step(
        rows, Supervised(), 1e-2
    )


def test_a_supervised_step_whose_gradient_is_not_finite_ends_the_run():
    class Infinite(Supervised):
        def token_losses(self, tokens):
            found = super().token_losses(tokens)
            return replace(found, losses=found.losses * math.inf)

    with pytest.raises(NearpolicyError, match=r"over 12 rows is not finite.*warm_start\.learning_rate"):
        learner().supervised_step(random_rows(15), Infinite(), 1e-2)


# The schedule and the optimizer.


def test_warm_up_reaches_the_peak_in_a_straight_line():
    rates = [learning_rate(step, peak=1e-3, schedule="constant", warmup_steps=10, total_steps=20) for step in range(12)]
    assert rates[6] == pytest.approx(7e-4)
    assert rates[0] == pytest.approx(1e-4)
    assert rates[9:] == pytest.approx([1e-3] * 3)


@pytest.mark.parametrize(
    ("schedule", "right"), [("linear", [1, 0.75, 0.5, 0.25, 0]), ("cosine", [1, 0.8535534, 0.5, 0.1464466, 0])]
)
def test_the_rate_falls_to_0_at_the_last_step(schedule, right):
    rates = [
        learning_rate(step, peak=1.0, schedule=schedule, warmup_steps=2, total_steps=10) for step in (2, 4, 6, 8, 10)
    ]
    assert rates == pytest.approx(right, abs=1e-6)


def test_the_learner_follows_its_schedule_and_says_so():
    own = learner(learning_rate=1e-3, warmup_steps=4, lr_schedule="linear", total_steps=8)
    rows = random_rows(16, groups=1)
    rates, moved = [], []
    for step in range(8):
        before = weights(own.policy)
        rates.append(own.step(batch_of(rows, step=step)).metrics["learner/learning_rate"])
        moved.append(float((weights(own.policy) - before).abs().max()))
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 7.5e-4, 5e-4, 2.5e-4])
    assert moved[0] == pytest.approx(2.5e-4, rel=1e-2)  # AdamW's first update moves a weight by the rate


class One(torch.nn.Module):
    def __init__(self, values, dtype=torch.float32) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(values, dtype=dtype))


def test_low_precision_weights_keep_float32_masters_so_that_small_updates_add_up():
    model = One([1.0], torch.bfloat16)
    adamw = MasterAdamW(model, LearnerConfig())
    for _ in range(50):
        model.w.grad = torch.ones_like(model.w)
        adamw.step(1e-3, None)  # each one is less than half the distance between two bfloat16 numbers
    [master] = adamw.state_dict()["masters"]
    assert float(master.detach()) == pytest.approx(0.95, abs=1e-4)
    assert torch.equal(model.w.detach(), master.to(torch.bfloat16))


def test_a_bfloat16_model_trains_with_masters():
    own = learner(dtype=torch.bfloat16, learning_rate=1e-5)
    rows = random_rows(17, groups=1)
    own.step(batch_of(rows))
    masters = own.optimizer.state_dict()["masters"]
    parameters = list(own.policy.parameters())
    assert len(masters) == len(parameters)
    assert all(m.dtype == torch.float32 for m in masters)
    assert all(torch.equal(p.detach(), m.to(torch.bfloat16)) for p, m in zip(parameters, masters, strict=True))
    assert any(not torch.equal(p.detach().float(), m) for p, m in zip(parameters, masters, strict=True))


def test_float32_weights_have_no_second_copy():
    assert MasterAdamW(One([1.0]), LearnerConfig()).state_dict()["masters"] == []


@pytest.mark.parametrize(("max_norm", "used"), [(1.0, (0.6, 0.8)), (None, (3.0, 4.0)), (10.0, (3.0, 4.0))])
def test_gradients_are_scaled_down_to_the_norm_and_the_norm_before_is_told(max_norm, used):
    model = One([0.0, 0.0])
    adamw = MasterAdamW(model, LearnerConfig(eps=1.0))
    model.w.grad = torch.tensor([3.0, 4.0])
    assert adamw.step(1.0, max_norm) == 5.0
    # The first update of AdamW is g / (|g| + eps).
    assert model.w.tolist() == pytest.approx([-g / (g + 1.0) for g in used], abs=1e-5)
    assert model.w.grad is None


def test_the_norm_of_a_gradient_as_large_as_an_embedding_has_the_same_bits_with_one_and_with_two_threads():
    gradient = torch.randn(49152, 576, generator=torch.Generator().manual_seed(0))
    norms = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        model = One([0.0])
        adamw = MasterAdamW(model, LearnerConfig())
        adamw._adamw.step = lambda: None  # the norm is the one thing here that adds up over elements
        model.w.data, model.w.grad = torch.zeros_like(gradient), gradient.clone()
        norms.append(adamw.step(0.0, None))
    assert norms[0] == norms[1]
    assert norms[0] == pytest.approx(float(torch.linalg.vector_norm(gradient.double())), rel=1e-2)


def test_weight_decay_is_decoupled():
    model = One([2.0])
    adamw = MasterAdamW(model, LearnerConfig(weight_decay=0.1))
    model.w.grad = torch.zeros(1)
    adamw.step(0.5, None)
    assert model.w.tolist() == pytest.approx([2.0 * (1 - 0.5 * 0.1)])
