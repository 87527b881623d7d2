"""Parts that go together, defaults that follow from the parts, and settings that are refused by name."""

from __future__ import annotations

import itertools

import pytest
from pydantic import ValidationError

from nearpolicy.objectives.catalogue import ADVANTAGES, CORRECTIONS, LOSSES, default_of
from nearpolicy.objectives.config import ObjectiveConfig


def refusal(**settings) -> str:
    with pytest.raises(ValidationError) as error:
        ObjectiveConfig(**settings)
    return str(error.value)


def built(loss: str, advantage: str, correction: str) -> ObjectiveConfig | None:
    """The combination, or None if a part refuses another."""
    extra = {"reference": "random:llama"} if loss == "opd" else {}
    try:
        return ObjectiveConfig(loss=loss, advantage=advantage, correction=correction, **extra)
    except ValidationError:
        return None


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_works_with_its_defaults(loss):
    config = ObjectiveConfig(loss=loss, **({"reference": "random:llama"} if loss == "opd" else {}))
    for key, value in LOSSES[loss].reads.items():
        assert getattr(config, key) == value
    for key, value in LOSSES[loss].fixes.items():
        assert getattr(config, key) == value


@pytest.mark.parametrize("advantage", [name for name in ADVANTAGES if name != "teacher"])
def test_every_advantage_works_with_its_defaults(advantage):
    config = ObjectiveConfig(advantage=advantage)
    for key, value in {**ADVANTAGES[advantage].reads, **ADVANTAGES[advantage].fixes}.items():
        assert getattr(config, key) == value


def test_no_combination_applies_two_weights_for_the_behaviour_policy():
    for loss, advantage, correction in itertools.product(LOSSES, ADVANTAGES, CORRECTIONS):
        config = built(loss, advantage, correction)
        if config is None:
            continue
        weighing = [
            config.correction != "none",
            config.advantage == "vtrace",
            config.loss in ("cispo", "aipo", "dppo"),
        ]
        assert sum(weighing) <= 1 or (config.advantage == "vtrace" and config.correction == "none"), config


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"loss": "cispo", "correction": "token_truncate"}, "objective.correction=token_truncate cannot be set"),
        ({"loss": "gspo", "loss_agg": "token_mean"}, "objective.loss_agg=token_mean cannot be set"),
        ({"advantage": "dr_grpo", "scale_rewards": "group"}, "objective.scale_rewards=group cannot be set"),
        ({"advantage": "vtrace", "correction": "token_mask"}, "another weight would be applied twice"),
        ({"loss": "kimi", "scale_rewards": "group"}, "objective.scale_rewards=group cannot be set"),
        ({"loss": "pg", "clip_low": 0.1}, "objective.clip_low=0.1 has no effect with objective.loss=pg"),
        ({"loss": "gspo", "dual_clip": 3.0}, "objective.dual_clip=3.0 has no effect"),
        ({"correction": "none", "correction_cap": 3.0}, "objective.correction_cap=3.0 has no effect"),
        (
            {"correction": "geometric_mask", "correction_weighted": True},
            "objective.correction_weighted=True has no effect",
        ),
        ({"correction": "token_mask", "correction_floor": 3.0}, "objective.correction_floor=3.0 lies above"),
        ({"gamma": 0.9}, "objective.gamma=0.9 has no effect"),
        ({"pass_k": 2}, "it is read by advantage=grpo_passk"),
        ({"clip_low": None}, "objective.clip_low is empty, but the objective needs it"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "k1 has an expected gradient of zero in the loss"),
        ({"kl_in": "reward"}, "objective.kl_in=reward has no effect with objective.kl_coef=0"),
        ({"reference": "initial"}, "objective.reference=initial has no effect without objective.kl_coef"),
        ({"kl_coef": 0.1, "reference": "none"}, "objective.kl_coef needs a policy to compare with"),
        ({"loss": "opd"}, "objective.loss=opd needs a policy to compare with"),
        ({"loss": "opd", "reference": "initial"}, "objective.loss=opd needs a teacher other than the policy"),
        ({"advantage": "gae", "scale_rewards": "group"}, "objective.scale_rewards=group divides by the spread of a gr"),
        ({"advantage": "gae", "gae_alpha": 0.05, "gae_lambda": 0.9}, "objective.gae_alpha=0.05 both decide lambda"),
        ({"advantage": "gae", "gae_lambda": None}, "objective.gae_lambda is empty, but the objective needs it"),
        ({"advantage": "gae", "gae_lambda": 1.1}, "less than or equal to 1"),
        ({"advantage": "gae", "loss": "gmpo"}, "objective.loss=gmpo needs one advantage for all tokens"),
        ({"advantage": "vtrace", "loss": "gmpo"}, "objective.advantage=vtrace gives each token its own"),
        ({"advantage": "gae", "loss": "kimi", "scale_rewards": "batch"}, "objective.scale_rewards=batch cannot be set"),
        ({"gae_lambda": 0.9}, "objective.gae_lambda=0.9 has no effect"),
        ({"advantage": "vtrace", "gae_alpha": 0.05}, "it is read by advantage=gae"),
        ({"advantage": "remax", "scale_rewards": "batch"}, "objective.scale_rewards=batch cannot be set"),
        ({"advantage": "remax", "length_reward": 0.1}, "objective.length_reward=0.1 depends on the other completions"),
        ({"advantage": "remax", "diversity_bonus": 0.1}, "objective.diversity_bonus=0.1 depends on the other"),
        ({"reference": "adapter_off"}, "objective.reference=adapter_off has no effect without objective.kl_coef"),
        ({"loss": "opd", "reference": "adapter_off"}, "objective.loss=opd needs a teacher other than the policy"),
        ({"advantage": "teacher"}, "objective.advantage=teacher belongs to objective.loss=opd"),
        ({"loss": "opd", "advantage": "grpo", "reference": "x"}, "objective.advantage=grpo cannot be set"),
        ({"entropy_step": 0.1}, "objective.entropy_step has no effect without objective.entropy_target"),
        ({"overlong_penalty": 1.0}, "objective.overlong_penalty has no effect without objective.overlong_buffer"),
        ({"correction": "sequence_mask", "correction_cap": 0.5}, "objective.correction_cap=0.5 lies below 1"),
        ({"advantage": "vtrace", "vtrace_c": 2.0}, "objective.vtrace_c=2.0 lies above objective.vtrace_rho=1.0"),
        ({"advantage": "vtrace", "vtrace_rho": 0.5}, "objective.vtrace_c=1.0 lies above objective.vtrace_rho=0.5"),
        (
            {"loss": "kimi", "advantage": "reinforce_plus_plus"},
            "objective.loss=kimi decides objective.scale_rewards: none, and objective.advantage=reinforce_plus_plus",
        ),
        ({"loss": "opd", "reference": "x", "length_cost": 0.1}, "objective.length_cost=0.1 has no effect"),
        ({"loss": "opd", "reference": "x", "overlong_buffer": 4}, "objective.overlong_buffer=4 has no effect"),
        ({"loss": "opd", "reference": "x", "kl_coef": 0.1}, "objective.kl_coef=0.1 has no effect with objective.loss"),
        ({"advantage": "grpo_passk", "diversity_bonus": 0.5}, "objective.diversity_bonus=0.5 changes rewards"),
        ({"advantage": "grpo_passk", "kl_coef": 0.1, "kl_in": "reward"}, "objective.kl_in=reward changes rewards"),
        ({"loss": "clip_cov", "cov_low": 6.0}, "objective.cov_low=6.0 lies above objective.cov_high"),
        ({"dual_clip": 0.5}, "greater than 1"),
        ({"kl_coef": -0.1}, "greater than or equal to 0"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(settings, named):
    assert named in refusal(**settings)


def test_a_resolved_objective_is_accepted_as_it_is():
    for loss, advantage, correction in itertools.product(LOSSES, ADVANTAGES, CORRECTIONS):
        config = built(loss, advantage, correction)
        if config is not None:
            assert ObjectiveConfig(**config.model_dump()) == config


def test_decoupled_ppo_takes_the_published_mask_and_yields_to_another():
    config = ObjectiveConfig(loss="decoupled_ppo")
    assert (config.correction, config.correction_cap, config.correction_floor) == ("token_mask", 5.0, None)
    assert ObjectiveConfig(loss="decoupled_ppo", correction="none").correction_cap is None
    assert default_of("correction_cap", {"loss": "ppo_clip", "correction": "token_mask"}) == 2.0


def test_decoupled_ppo_leaves_other_corrections_their_own_bounds():
    for correction, part in CORRECTIONS.items():
        config = ObjectiveConfig(loss="decoupled_ppo", correction=correction)
        if correction != "token_mask":
            assert (config.correction_cap, config.correction_floor) == (
                part.reads.get("correction_cap"),
                part.reads.get("correction_floor"),
            )


def test_lambda_is_one_number_or_follows_the_length():
    fixed, by_length = ObjectiveConfig(advantage="gae"), ObjectiveConfig(advantage="gae", gae_alpha=0.05)
    assert (fixed.gae_lambda, fixed.gae_alpha, fixed.scale_rewards) == (1.0, None, "batch")
    assert (by_length.gae_lambda, by_length.gae_alpha) == (None, 0.05)
    assert ObjectiveConfig(**by_length.model_dump()) == by_length
    assert ObjectiveConfig(advantage="gae", loss="kimi").scale_rewards == "none"


def test_the_penalty_takes_the_estimator_that_has_a_gradient_where_it_is_applied():
    in_loss, in_reward = ObjectiveConfig(kl_coef=0.1), ObjectiveConfig(beta=0.1, kl_in="reward")
    assert (in_loss.kl_in, in_loss.kl_estimator, in_loss.reference) == ("loss", "k3", "initial")
    assert (in_reward.kl_coef, in_reward.kl_estimator, in_reward.reference) == (0.1, "k1", "initial")


def test_only_remax_asks_for_a_greedy_completion_and_one_sample_is_enough_for_it():
    assert [name for name, part in ADVANTAGES.items() if part.greedy_baseline] == ["remax"]
    config = ObjectiveConfig(advantage="remax", length_cost=0.01, overlong_buffer=2)
    assert (config.greedy_baseline, config.parts["advantage"].smallest_group) == (True, 1)
    assert not ObjectiveConfig().greedy_baseline
