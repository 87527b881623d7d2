"""Losses against the true policy gradient, on a policy whose every sequence can be written down.

The policy is a softmax over three tokens after each prefix; token 0 ends a sequence, and so does its third token: 15
sequences, 7 prefixes. An expected gradient is a sum over the sequences, weighed with the probabilities of the policy
that sampled them, so "unbiased" means equal to rounding and a bias is a number and not a guess.

    python tests/objectives/test_truth_of_losses.py        prints `bias_table`
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from nearpolicy.objectives import aggregation, corrections, losses
from nearpolicy.objectives.corrections import Correction
from nearpolicy.objectives.distillation import reverse_kl, sampled_advantages
from nearpolicy.objectives.regularisers import k1, k2, k3
from nearpolicy.objectives.sequences import Sequences

NUM_TOKENS = 3


def sequences_of(depth: int) -> list[tuple[int, ...]]:
    found = []
    for length in range(1, depth + 1):
        for tokens in itertools.product(range(NUM_TOKENS), repeat=length):
            if 0 not in tokens[:-1] and (tokens[-1] == 0 or length == depth):
                found.append(tokens)
    return found


@dataclass(frozen=True, eq=False)
class Tree:
    """All sequences of a policy up to a depth, token by token: what [N] losses see, each sequence once."""

    depth: int = 3

    def __post_init__(self) -> None:
        all_ = sequences_of(self.depth)
        prefixes = sorted({tokens[:t] for tokens in all_ for t in range(len(tokens))})
        set_ = functools.partial(object.__setattr__, self)
        set_("all", all_)
        set_("prefixes", prefixes)
        set_("sequences", Sequences.of_lengths([len(tokens) for tokens in all_]))
        set_("at", torch.tensor([prefixes.index(tokens[:t]) for tokens in all_ for t in range(len(tokens))]))
        set_("token", torch.tensor([token for tokens in all_ for token in tokens]))

    def logprobs(self, logits: Tensor) -> Tensor:
        """[N] of every token of every sequence; ``logits``: [prefixes, tokens]."""
        return logits.log_softmax(-1)[self.at, self.token]

    def probabilities(self, logits: Tensor) -> Tensor:
        """[S] of whole sequences."""
        return self.sequences.sum(self.logprobs(logits)).exp()


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A current policy, a direction in which the sampling policy lies, and a reward per sequence."""

    tree: Tree
    logits: Tensor
    direction: Tensor
    rewards: Tensor

    @classmethod
    def of_seed(cls, seed: int, depth: int = 3) -> Problem:
        tree, numbers = Tree(depth), np.random.default_rng(seed)
        shape = (len(tree.prefixes), NUM_TOKENS)
        return cls(
            tree=tree,
            logits=torch.tensor(numbers.normal(size=shape), requires_grad=True),
            direction=torch.tensor(numbers.normal(size=shape)),
            rewards=torch.tensor(numbers.normal(size=len(tree.all))),
        )

    def behavior(self, distance: float) -> Tensor:
        """[prefixes, tokens] logits of the sampling policy."""
        return self.logits.detach() + distance * self.direction

    def advantages(self, distance: float) -> Tensor:
        """[S] rewards minus their mean among samples: the advantage of an infinite group."""
        return self.rewards - self.tree.probabilities(self.behavior(distance)) @ self.rewards

    def true_gradient(self, distance: float, *, by_length: bool) -> Tensor:
        """Of the expected advantage under the current policy; ``by_length``: of advantage per token of the sequence."""
        worth = self.advantages(distance) / (self.tree.sequences.sizes() if by_length else 1.0)
        [found] = torch.autograd.grad(self.tree.probabilities(self.logits) @ worth, self.logits)
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampled:
    """What a loss is given of every token: log-probabilities of the current, the sampling and a policy half-way."""

    now: Tensor
    behavior: Tensor
    halfway: Tensor
    advantages: Tensor
    sequences: Sequences

    @property
    def ones(self) -> Tensor:
        return torch.ones_like(self.behavior)


Loss = Callable[[Sampled], Tensor | tuple[Tensor, Tensor]]
"""[N] losses, and [N] kept where tokens may be rejected."""


def expected_descent(problem: Problem, loss: Loss, distance: float, *, by_length: bool = False) -> Tensor:
    """Minus the gradient of the loss of an infinite batch from the sampling policy.

    Sequences count alike, by the sum of their tokens or (``by_length``) their mean; rejected tokens leave both halves.
    """
    tree, mu = problem.tree, problem.behavior(distance)
    sampled = Sampled(
        now=tree.logprobs(problem.logits),
        behavior=tree.logprobs(mu),
        halfway=tree.logprobs(problem.behavior(distance / 2)),
        advantages=tree.sequences.spread(problem.advantages(distance)),
        sequences=tree.sequences,
    )
    found = loss(sampled)
    values, kept = found if isinstance(found, tuple) else (found, torch.ones_like(found, dtype=torch.bool))
    mode = "seq_mean_token_mean" if by_length else "seq_mean_token_sum"
    chances = tree.probabilities(mu)
    shares = aggregation.shares(kept, tree.sequences, mode, 1) * tree.sequences.spread(chances)
    divisor = float(chances @ (tree.sequences.sum(kept) > 0).double())
    [gradient] = torch.autograd.grad((shares * values).sum(), problem.logits)
    return -gradient / divisor if divisor else gradient  # all rejected: 0


def relative_error(found: Tensor, true: Tensor) -> float:
    return float((found - true).norm() / true.norm())


# The losses, each with the policies that it is meant for.


def corrected(correction: Callable[[Tensor, Tensor, Sequences], Correction]) -> Loss:
    """Policy gradient on the first update of a step: the learner's own policy is the proximal one."""

    def loss(s: Sampled) -> tuple[Tensor, Tensor]:
        found = correction(s.now, s.behavior, s.sequences)
        return losses.policy_gradient(s.now, s.advantages, found.weights), found.kept

    return loss


def by_token(correction, **settings) -> Loss:
    return corrected(lambda now, mu, _: correction(now, mu, **settings))


def by_sequence(correction, **settings) -> Loss:
    return corrected(lambda now, mu, sequences: correction(now, mu, sequences, **settings))


def decoupled(s: Sampled) -> tuple[Tensor, Tensor]:
    found = corrections.token_mask(s.halfway, s.behavior, cap=5.0, weighted=True)
    return losses.ppo_clip(s.now, s.halfway, s.advantages, found.weights, clip_low=0.2, clip_high=0.2), found.kept


def masked_off_policy(s: Sampled) -> tuple[Tensor, Tensor]:
    kept = losses.off_policy_sequences_kept(s.now, s.behavior, s.advantages, s.sequences, threshold=0.5)
    values = losses.ppo_clip(s.now, s.behavior, s.advantages, s.ones, **CLIP)
    return torch.where(kept, values, 0.0), torch.ones_like(kept)


def largest_covariances(s: Sampled) -> Tensor:
    return losses.kl_cov_penalised(losses.covariances(s.now, s.advantages), share=0.1)


CLIP = {"clip_low": 0.2, "clip_high": 0.28}
UNBOUNDED = float("inf")
TOKEN_SUMS: dict[str, Loss] = {
    "pg, no correction": by_token(lambda now, mu: corrections.none(now, mu)),
    "pg, token_truncate 2": by_token(corrections.token_truncate, cap=2.0),
    "pg, token_truncate inf": by_token(corrections.token_truncate, cap=UNBOUNDED),
    "pg, token_mask 0.5 2": by_token(corrections.token_mask, cap=2.0, floor=0.5, weighted=True),
    "pg, sequence_truncate 5": by_sequence(corrections.sequence_truncate, cap=5.0),
    "pg, sequence_truncate inf": by_sequence(corrections.sequence_truncate, cap=UNBOUNDED),
    "pg, sequence_mask 3": by_sequence(corrections.sequence_mask, cap=3.0, weighted=True),
    "pg, geometric_mask 0.5 2": by_sequence(corrections.geometric_mask, cap=2.0, floor=0.5),
    "pg, geometric_mask 0.99 1.01": by_sequence(corrections.geometric_mask, cap=1.01, floor=0.99),
    "ppo_clip": lambda s: losses.ppo_clip(s.now, s.behavior, s.advantages, s.ones, **CLIP),
    "ppo_clip, dual 3": lambda s: losses.ppo_clip(s.now, s.behavior, s.advantages, s.ones, **CLIP, dual_clip=3.0),
    "decoupled_ppo": decoupled,
    "ppo_clip, off-policy mask": masked_off_policy,
    "cispo": lambda s: losses.cispo(s.now, s.behavior, s.advantages, clip_low=1.0, clip_high=4.0),
    "sapo": lambda s: losses.sapo(
        s.now, s.behavior, s.advantages, s.ones, temperature_positive=1.0, temperature_negative=1.05
    ),
    "aipo": lambda s: losses.aipo(s.now, s.behavior, s.advantages, cap=2.0),
    "dppo": lambda s: losses.dppo(s.now, s.behavior, s.advantages, clip_low=0.2, clip_high=0.2),
    "kimi, tau 0": lambda s: losses.kimi(s.now, s.behavior, s.advantages, s.ones, s.sequences, tau=0.0),
    "kimi, tau 0.1": lambda s: losses.kimi(s.now, s.behavior, s.advantages, s.ones, s.sequences, tau=0.1),
    "kl_cov": lambda s: losses.kl_cov(s.now, s.behavior, s.advantages, s.ones, largest_covariances(s), coefficient=1.0),
    "clip_cov": lambda s: losses.clip_cov(s.now, s.behavior, s.advantages, s.ones, largest_covariances(s), **CLIP),
    "replayed_success": lambda s: losses.replayed_success(s.now, s.behavior, s.advantages, cap=UNBOUNDED),
}
"""Compared with the gradient of the expected advantage."""
TOKEN_MEANS: dict[str, Loss] = {
    "gspo": lambda s: losses.gspo(s.now, s.behavior, s.advantages, s.ones, s.sequences, clip_low=3e-4, clip_high=4e-4),
    "gspo, unclipped": lambda s: losses.gspo(
        s.now, s.behavior, s.advantages, s.ones, s.sequences, clip_low=1.0, clip_high=UNBOUNDED
    ),
    "gspo_token": lambda s: losses.gspo_token(
        s.now, s.behavior, s.advantages, s.ones, s.sequences, clip_low=3e-4, clip_high=4e-4
    ),
    "gmpo": lambda s: losses.gmpo(s.now, s.behavior, s.advantages, s.ones, s.sequences, clip_low=0.4, clip_high=0.4),
}
"""Compared with the gradient of the expected advantage per token: what a mean of sequence means ascends."""
LOSSES = TOKEN_SUMS | TOKEN_MEANS
ALWAYS_UNBIASED = {"pg, sequence_truncate inf"}
NEVER_UNBIASED = {"clip_cov", "replayed_success"}
JUMPS_AWAY_FROM_EQUALITY = {"kl_cov"}
"""|log r| has no gradient at r = 1 and one of full size beside it."""
NARROW = {"gspo", "gspo_token", "pg, geometric_mask 0.99 1.01"}
"""Their bands are narrower than the smallest distance here."""
DISTANCES = (0.0, 0.01, 0.1, 0.3, 1.0)
PROBLEMS = tuple(range(6))


@dataclass(frozen=True)
class Bias:
    error: float
    """|expected descent - true gradient| / |true gradient|, mean over problems."""
    cosine: float


@functools.cache
def bias_table() -> dict[str, tuple[Bias, ...]]:
    """Loss -> bias at each of `DISTANCES` between the sampling and the current policy."""
    table = {}
    for name, loss in LOSSES.items():
        by_length = name in TOKEN_MEANS
        rows = []
        for distance in DISTANCES:
            found = []
            for seed in PROBLEMS:
                problem = Problem.of_seed(seed)
                descent = expected_descent(problem, loss, distance, by_length=by_length)
                true = problem.true_gradient(distance, by_length=by_length)
                cosine = torch.cosine_similarity(descent.flatten(), true.flatten(), dim=0)
                found.append((relative_error(descent, true), float(cosine)))
            rows.append(Bias(*np.mean(found, axis=0).tolist()))
        table[name] = tuple(rows)
    return table


def divergence(distance: float) -> float:
    """KL(sampling || current) of whole sequences, mean over problems."""
    found = []
    for seed in PROBLEMS:
        problem = Problem.of_seed(seed)
        p, q = (problem.tree.probabilities(x).detach() for x in (problem.behavior(distance), problem.logits))
        found.append(float((p * (p / q).log()).sum()))
    return float(np.mean(found))


def printed() -> str:
    lines = ["relative error (cosine)".ljust(30) + "".join(f"{d:>16}" for d in DISTANCES)]
    lines.append("KL(sampling || current)".ljust(30) + "".join(f"{divergence(d):>16.2g}" for d in DISTANCES))
    for name, rows in bias_table().items():
        lines.append(name.ljust(30) + "".join(f"{row.error:>8.3f} ({row.cosine:5.3f})" for row in rows))
    return "\n".join(lines)


# The enumeration itself.


def test_the_sequences_are_all_there_and_their_probabilities_sum_to_one():
    tree = Tree()
    assert (len(tree.all), len(tree.prefixes)) == (15, 7)
    assert float(tree.probabilities(torch.randn(7, 3, dtype=torch.float64)).sum()) == pytest.approx(1.0)


def test_the_true_gradient_is_that_of_finite_differences_of_the_expected_reward():
    problem = Problem.of_seed(0)
    worth, at = problem.advantages(0.3), problem.logits.detach()
    for i, j in itertools.product(range(7), range(3)):
        step = torch.zeros_like(at)
        step[i, j] = 1e-6
        up, down = (float(problem.tree.probabilities(at + sign * step) @ worth) for sign in (1, -1))
        assert float(problem.true_gradient(0.3, by_length=False)[i, j]) == pytest.approx((up - down) / 2e-6, abs=1e-8)


# Unbiased, and where.


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - NEVER_UNBIASED))
def test_at_equal_policies_the_expected_descent_is_the_true_policy_gradient(name):
    for seed in PROBLEMS:
        problem = Problem.of_seed(seed)
        by_length = name in TOKEN_MEANS
        found = expected_descent(problem, LOSSES[name], 0.0, by_length=by_length)
        assert relative_error(found, problem.true_gradient(0.0, by_length=by_length)) < 1e-6


@pytest.mark.parametrize("distance", [0.01, 0.3, 1.0, 2.0])
@pytest.mark.parametrize("correction", [corrections.sequence_truncate, corrections.sequence_mask])
def test_full_importance_weights_of_sequences_are_unbiased_at_any_distance(correction, distance):
    settings = {} if correction is corrections.sequence_truncate else {"weighted": True}
    loss = by_sequence(correction, cap=UNBOUNDED, **settings)
    for seed, by_length in itertools.product(PROBLEMS, (False, True)):
        problem = Problem.of_seed(seed)
        found = expected_descent(problem, loss, distance, by_length=by_length)
        assert relative_error(found, problem.true_gradient(distance, by_length=by_length)) < 1e-6


@pytest.mark.parametrize("distance", [0.1, 1.0])
def test_weights_of_tokens_are_unbiased_for_single_tokens_and_not_for_sequences(distance):
    loss = by_token(corrections.token_truncate, cap=UNBOUNDED)
    for seed in PROBLEMS:
        single, longer = Problem.of_seed(seed, depth=1), Problem.of_seed(seed, depth=3)
        assert (
            relative_error(expected_descent(single, loss, distance), single.true_gradient(distance, by_length=False))
            < 1e-6
        )
        assert (
            relative_error(expected_descent(longer, loss, distance), longer.true_gradient(distance, by_length=False))
            > 1e-3
        )


def test_a_mean_of_sequence_means_ascends_advantage_per_token_and_not_advantage():
    """GRPO's length bias (Dr. GRPO, arXiv 2503.20783): it does not go away with more samples."""
    problem = Problem.of_seed(1)
    found = expected_descent(problem, TOKEN_SUMS["pg, no correction"], 0.0, by_length=True)
    assert relative_error(found, problem.true_gradient(0.0, by_length=True)) < 1e-6
    wrong = problem.true_gradient(0.0, by_length=False)
    assert float(torch.cosine_similarity(found.flatten(), wrong.flatten(), dim=0)) < 0.999


@pytest.mark.parametrize("seed", PROBLEMS)
def test_kimis_loss_is_at_rest_at_the_softmax_of_rewards_around_the_proximal_policy_whoever_sampled(seed):
    """pi = proximal exp(r / tau) / Z, with advantages r - tau log Z (arXiv 2501.12599, section 2.3)."""
    problem, tau = Problem.of_seed(seed), 0.7
    tree = problem.tree
    proximal = problem.behavior(0.4)
    target = tree.probabilities(proximal) * (problem.rewards / tau).exp()
    log_z = target.sum().log()
    mass = {prefix: torch.zeros(NUM_TOKENS, dtype=torch.float64) for prefix in tree.prefixes}
    for tokens, weight in zip(tree.all, target / target.sum(), strict=True):
        for t, token in enumerate(tokens):
            mass[tokens[:t]][token] += weight
    best = torch.stack([mass[prefix] for prefix in tree.prefixes]).log().requires_grad_()
    now = tree.logprobs(best)
    advantages = tree.sequences.spread(problem.rewards - tau * log_z)
    found = losses.kimi(now, tree.logprobs(proximal), advantages, torch.ones_like(now), tree.sequences, tau=tau)
    for sampler in (proximal, problem.logits.detach(), problem.behavior(-1.0)):
        weighed = found * tree.sequences.spread(tree.probabilities(sampler))
        [gradient] = torch.autograd.grad(weighed.sum(), best, retain_graph=True)
        assert gradient.abs().max() < 1e-12


# The table of biases.


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - ALWAYS_UNBIASED - NEVER_UNBIASED - JUMPS_AWAY_FROM_EQUALITY))
def test_a_bias_vanishes_with_the_distance_between_the_policies(name):
    at = {distance: row.error for distance, row in zip(DISTANCES, bias_table()[name], strict=True)}
    assert at[0.0] < 1e-6
    if ("gspo" in name and "unclipped" not in name) or "geometric" in name:
        return
    assert at[0.01] < 0.05
    assert at[0.01] < at[0.1] < at[1.0]


def test_a_bias_within_all_bounds_shrinks_in_proportion_to_the_distance():
    for name in ("pg, no correction", "pg, token_truncate inf", "cispo", "aipo", "kimi, tau 0.1", "gspo, unclipped"):
        errors = {
            d: relative_error(
                expected_descent(Problem.of_seed(2), LOSSES[name], d, by_length=name in TOKEN_MEANS),
                Problem.of_seed(2).true_gradient(d, by_length=name in TOKEN_MEANS),
            )
            for d in (1e-3, 1e-4)
        }
        assert errors[1e-3] / errors[1e-4] == pytest.approx(10.0, rel=0.05)


@pytest.mark.parametrize("index", range(1, len(DISTANCES)))
def test_biases_are_in_the_order_that_theory_says(index):
    error = {name: rows[index].error for name, rows in bias_table().items()}
    assert error["pg, sequence_truncate inf"] < 1e-6
    assert error["pg, token_truncate inf"] < error["pg, no correction"]
    assert error["pg, sequence_truncate 5"] <= error["pg, token_truncate 2"]
    assert error["kimi, tau 0"] == pytest.approx(error["pg, no correction"])
    assert error["pg, token_truncate inf"] <= error["aipo"] + 1e-12
    assert error["gspo, unclipped"] <= error["gspo"]


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"clip_cov", "kl_cov", "replayed_success"}))
def test_biased_losses_still_ascend_at_small_distances(name):
    assert bias_table()[name][1].cosine > (0.5 if name in NARROW else 0.99)


def test_replaying_successes_alone_is_biased_even_on_policy_and_goes_uphill():
    row = bias_table()["replayed_success"][0]
    assert row.error > 0.01
    assert row.cosine > 0


# Penalties and teachers over sequences.


def sampled_from_policy(problem: Problem, values: Tensor) -> Tensor:
    """Gradient of the mean of [N] values, summed over each sequence, over sequences of the current policy."""
    chances = problem.tree.probabilities(problem.logits).detach()
    [found] = torch.autograd.grad(
        (problem.tree.sequences.spread(chances) * values).sum(), problem.logits, retain_graph=True
    )
    return found


def position_by_position(problem: Problem, reference: Tensor, *, reverse: bool) -> Tensor:
    """Gradient of the divergences after each prefix, weighed with how often the policy comes there, which is taken as
    given: KL(pi || reference), or KL(reference || pi) if ``reverse``."""
    tree, log_p, log_q = problem.tree, problem.logits.log_softmax(-1), reference.log_softmax(-1)
    chances = tree.probabilities(problem.logits).detach()
    visits = torch.zeros(len(tree.prefixes), dtype=torch.float64)
    for tokens, chance in zip(tree.all, chances, strict=True):
        for t in range(len(tokens)):
            visits[tree.prefixes.index(tokens[:t])] += chance
    a, b = (log_q, log_p) if reverse else (log_p, log_q)
    [found] = torch.autograd.grad(visits @ (a.exp() * (a - b)).sum(-1), problem.logits)
    return found


def of_whole_sequences(problem: Problem, reference: Tensor) -> Tensor:
    p, q = problem.tree.probabilities(problem.logits), problem.tree.probabilities(reference)
    [found] = torch.autograd.grad((p * (p / q).log()).sum(), problem.logits)
    return found


@pytest.mark.parametrize("distance", [0.05, 0.7])
def test_estimators_in_the_loss_take_what_came_before_as_given(distance):
    for seed in PROBLEMS:
        problem = Problem.of_seed(seed)
        reference = problem.behavior(distance)
        now, theirs = problem.tree.logprobs(problem.logits), problem.tree.logprobs(reference)
        forward = position_by_position(problem, reference, reverse=False)
        reverse = position_by_position(problem, reference, reverse=True)
        assert sampled_from_policy(problem, k1(now, theirs)).abs().max() < 1e-12
        assert relative_error(sampled_from_policy(problem, k2(now, theirs)), forward) < 1e-6
        assert relative_error(sampled_from_policy(problem, k3(now, theirs)), reverse) < 1e-6
        full = reverse_kl(problem.logits.log_softmax(-1), reference.log_softmax(-1))[problem.tree.at]
        assert relative_error(sampled_from_policy(problem, full), forward) < 1e-6
        assert relative_error(forward, of_whole_sequences(problem, reference)) > 1e-3


@pytest.mark.parametrize("distance", [0.05, 0.7])
def test_k1_in_the_reward_gives_policy_gradient_the_divergence_of_whole_sequences(distance):
    """With all of a sequence's penalty credited to each of its tokens, or only what comes at or after it."""
    for seed in PROBLEMS:
        problem = Problem.of_seed(seed)
        sequences = problem.tree.sequences
        reference = problem.behavior(distance)
        now = problem.tree.logprobs(problem.logits)
        penalties = k1(now, problem.tree.logprobs(reference)).detach()
        whole = sequences.spread(sequences.sum(penalties))
        later = torch.cat([x.flip(0).cumsum(0).flip(0) for x in penalties.split(sequences.sizes().long().tolist())])
        true = of_whole_sequences(problem, reference)
        for credited in (whole, later):
            assert relative_error(sampled_from_policy(problem, credited * now), true) < 1e-6


def test_estimators_of_whole_sequences_have_the_divergence_of_sequences_as_their_mean():
    for seed in PROBLEMS:
        problem = Problem.of_seed(seed)
        reference = problem.behavior(0.5)
        p, q = (problem.tree.probabilities(x).detach() for x in (problem.logits, reference))
        now, theirs = problem.tree.logprobs(problem.logits).detach(), problem.tree.logprobs(reference)
        full = reverse_kl(problem.logits.detach().log_softmax(-1), reference.log_softmax(-1))[problem.tree.at]
        for values in (k1(now, theirs), k3(now, theirs), full):
            assert float(p @ problem.tree.sequences.sum(values)) == pytest.approx(float((p * (p / q).log()).sum()))


def test_distillation_from_sampled_tokens_descends_the_divergence_position_by_position():
    for seed in PROBLEMS:
        problem = Problem.of_seed(seed)
        teacher = problem.behavior(0.8)
        now, theirs = problem.tree.logprobs(problem.logits), problem.tree.logprobs(teacher)
        values = losses.policy_gradient(now, sampled_advantages(now, theirs), torch.ones_like(now))
        found = sampled_from_policy(problem, values)
        assert relative_error(found, position_by_position(problem, teacher, reverse=False)) < 1e-6


if __name__ == "__main__":
    print(printed())
