"""What is optimised: advantage x loss x correction x divisor x regularisers, and what shapes the reward before that.

`catalogue` says which part reads which setting and what it fixes. A setting that no chosen part reads, and one that a
part decides by itself, are refused by name: nothing is ignored and no weight is applied twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from nearpolicy.objectives.catalogue import AXES, Part, chosen, default_of
from nearpolicy.settings import ConfigModel

Share = Annotated[float, Field(gt=0, le=1)]


def _by_parts(key: str, otherwise: Any = None) -> Any:
    return Field(default_factory=lambda data: default_of(key, data, otherwise))


class ObjectiveConfig(ConfigModel):
    """Section `objective`: from rewards to a loss."""

    loss: Literal[
        "pg",
        "ppo_clip",
        "decoupled_ppo",
        "gspo",
        "gspo_token",
        "gmpo",
        "cispo",
        "sapo",
        "aipo",
        "kimi",
        "dppo",
        "clip_cov",
        "kl_cov",
        "opd",
    ] = "ppo_clip"
    """How a token's advantage becomes a loss; each is explained in `docs/objectives.md`. With one update per step
    `ppo_clip` has the gradient of `pg`."""
    advantage: Literal[
        "grpo",
        "dr_grpo",
        "rloo",
        "reinforce",
        "reinforce_baseline",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "opo",
        "grpo_passk",
        "gae",
        "vtrace",
        "teacher",
    ] = _by_parts("advantage", "grpo")
    """How rewards become advantages. `grpo` unless the loss decides it. `remax` has one greedy completion of each
    prompt generated and judged beside its samples; it is recorded and never trained."""
    scale_rewards: Literal["group", "batch", "none"] = _by_parts("scale_rewards", "none")
    """Divide advantages by the spread of rewards within the group, within the batch, or not at all. `grpo` may choose
    and takes `group`; `gae` takes `batch`, which whitens the advantages of all tokens of the step (mean 0, spread 1),
    or `none`; every other advantage decides it."""
    gamma: float | None = Field(default_factory=lambda data: default_of("gamma", data), gt=0, le=1)
    """Discount per token of `reinforce_plus_plus`, `gae` and `vtrace`; 1.0 unless set."""
    gae_alpha: PositiveFloat | None = _by_parts("gae_alpha")
    """Of `gae`: lambda by length, 1 - 1 / (alpha x tokens of the completion), at least 0, in place of `gae_lambda`
    (VAPO takes 0.05); none unless set."""
    gae_lambda: float | None = Field(
        default_factory=lambda data: None if data.get("gae_alpha") else default_of("gae_lambda", data), ge=0, le=1
    )
    """Of `gae`: lambda of the policy's advantages. 1 compares the return with the value, 0 each value with the next;
    1.0 unless set. That of the critic's targets is `critic.gae_lambda`."""
    pass_k: PositiveInt | None = _by_parts("pass_k")
    """k of `grpo_passk`, less than `sampling.num_generations`; 4 unless set."""
    vtrace_rho: PositiveFloat | None = _by_parts("vtrace_rho")
    """Cap of the ratio in front of each temporal difference of `vtrace`; 1.0 unless set."""
    vtrace_c: PositiveFloat | None = _by_parts("vtrace_c")
    """Cap of the ratios that carry later rewards back in `vtrace`, at most `vtrace_rho`; 1.0 unless set."""
    correction: Literal[
        "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"
    ] = _by_parts("correction", "token_truncate")
    """What is done about the difference between the policy that sampled a token and the policy at the start of the
    step. `token_truncate` weighs each token with their ratio, at most `correction_cap`; `none` only measures it."""
    correction_cap: PositiveFloat | None = _by_parts("correction_cap")
    """Largest ratio: beyond it the weight stays there (`*_truncate`) or the tokens are rejected (`*_mask`). Unless set:
    2.0 for tokens (5.0 for `token_mask` with `decoupled_ppo`), 5.0 for `sequence_truncate`, 3.0 for
    `sequence_mask`, 1.01 for `geometric_mask`."""
    correction_floor: NonNegativeFloat | None = _by_parts("correction_floor")
    """Smallest ratio, in the same sense. Unless set: 0.5 for `token_mask` (none with `decoupled_ppo`), 0.99 for
    `geometric_mask`, else none."""
    correction_weighted: bool | None = _by_parts("correction_weighted")
    """Whether what `token_mask` or `sequence_mask` keeps is weighed with its ratio; true unless set."""
    same_support: bool | None = None
    """Take the learner's log-probabilities over the tokens that could be sampled, as the engine's are; the engine then
    records those tokens. Left out: exactly where `sampling.top_p`, `top_k` or `min_p` leave some out."""
    clip_low: PositiveFloat | None = _by_parts("clip_low")
    """Distance below 1 at which the ratio is clipped (for `gmpo` in logarithms, for `dppo` of probabilities). The
    default depends on the loss: 0.2 for `ppo_clip`."""
    clip_high: PositiveFloat | None = _by_parts("clip_high")
    """Distance above 1 at which the ratio is clipped, in the same sense: 0.28 for `ppo_clip`."""
    dual_clip: float | None = Field(default_factory=lambda data: default_of("dual_clip", data), gt=1)
    """Bound on the ratio of tokens with a negative advantage in `ppo_clip` and `decoupled_ppo`; none unless set."""
    proximal: Literal["recomputed", "interpolated"] | None = _by_parts("proximal")
    """Of `decoupled_ppo`: the policy that the ratio is clipped around. `recomputed` takes a forward pass of its own
    where a step has several updates; `interpolated` lies between the sampling and the current policy and takes none."""
    sapo_temperature_positive: PositiveFloat | None = _by_parts("sapo_temperature_positive")
    """Of `sapo`: steepness of the gate for positive advantages; 1.0 unless set."""
    sapo_temperature_negative: PositiveFloat | None = _by_parts("sapo_temperature_negative")
    """Of `sapo`: steepness of the gate for negative advantages; 1.05 unless set."""
    aipo_cap: PositiveFloat | None = _by_parts("aipo_cap")
    """Of `aipo`: largest ratio of the current to the sampling policy; 2.0 unless set."""
    kimi_tau: PositiveFloat | None = _by_parts("kimi_tau")
    """Of `kimi`: weight of the squared log-ratio; 0.1 unless set."""
    cov_share: Share | None = _by_parts("cov_share")
    """Share of the tokens of an update that `clip_cov` (2e-4) or `kl_cov` (2e-3) acts on."""
    cov_low: float | None = _by_parts("cov_low")
    """Of `clip_cov`: smallest covariance of a token that may be chosen; 1 unless set."""
    cov_high: float | None = _by_parts("cov_high")
    """Of `clip_cov`: largest covariance of a token that may be chosen; 5 unless set."""
    kl_cov_coef: PositiveFloat | None = _by_parts("kl_cov_coef")
    """Of `kl_cov`: weight of the penalty; 1 unless set."""
    loss_agg: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"] = _by_parts(
        "loss_agg", "token_mean"
    )
    """Divisor: all trained tokens of the update; or the number of completions, over which each token counts fully, by
    its completion's length, or by `sampling.max_completion_length`."""
    kl_coef: NonNegativeFloat = Field(0.0, validation_alias=AliasChoices("kl_coef", "beta"))
    """Weight of the penalty for leaving the reference policy; 0 without one. Also accepted as `beta`."""
    kl_in: Literal["loss", "reward"] | None = Field(
        default_factory=lambda data: "loss" if data.get("kl_coef") else None
    )
    """Where the penalty is applied; `loss` unless set."""
    kl_estimator: Literal["k1", "k2", "k3", "full"] | None = Field(
        default_factory=lambda data: ("k1" if data.get("kl_in") == "reward" else "k3") if data.get("kl_coef") else None
    )
    """How the penalty is measured: `k3` in the loss and `k1` in the reward unless set. `k1` in the loss is refused: its
    expected gradient is zero. `full` is exact and costs a second product with the vocabulary."""
    reference: str = Field(default_factory=lambda data: "initial" if data.get("kl_coef") else "none", min_length=1)
    """The policy that must not be left: `initial` (the weights that the run starts from), `adapter_off` (with
    `learner.lora`: the model without its adapter, which takes no memory), or a model as in `model.path`; with
    `loss: opd` the teacher. `none` where nothing needs one."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the bonus for entropy; with `entropy_target`, the weight to begin with."""
    entropy_target: PositiveFloat | None = None
    """Mean entropy in nats: the weight of the bonus rises by `entropy_step` after each step below it, and falls after
    each step above."""
    entropy_step: PositiveFloat | None = Field(
        default_factory=lambda data: 0.005 if data.get("entropy_target") is not None else None
    )
    """Change of the weight per step with `entropy_target`; 0.005 unless set."""
    mask_truncated_completions: bool = False
    """Keep completions cut by the length limit out of the loss (they still count in their group's mean)."""
    off_policy_threshold: PositiveFloat | None = None
    """Leave out sequences with a negative advantage whose mean log-ratio of the sampling to the current policy is
    larger (off-policy sequence masking; a usual value is 0.5)."""
    overlong_buffer: PositiveInt | None = None
    """Length in tokens before `sampling.max_completion_length` over which a penalty rises from 0 to
    `overlong_penalty`."""
    overlong_penalty: PositiveFloat | None = Field(
        default_factory=lambda data: 1.0 if data.get("overlong_buffer") is not None else None
    )
    """Penalty at full length with `overlong_buffer`; 1.0 unless set."""
    length_cost: NonNegativeFloat = 0.0
    """Taken from the reward per sampled token."""
    length_reward: NonNegativeFloat = 0.0
    """Weight of a reward for answers shorter than others of their group; wrong answers can only lose by it."""
    diversity_bonus: NonNegativeFloat = 0.0
    """Weight of a reward for completions that share few three-token sequences with others of their group."""

    @model_validator(mode="after")
    def _parts_go_together(self) -> Self:
        problems = [
            *self._fixed_axes(),
            *self._settings_without_use(),
            *self._token_advantage_problems(),
            *self._regulariser_problems(),
            *self._reward_problems(),
            *self._baseline_problems(),
            *self._band_problems(),
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def needs_logprobs(self) -> bool:
        """Whether advantages depend on log-probabilities."""
        return self.kl_in == "reward" or self.advantage in ("vtrace", "teacher")

    @property
    def needs_annotations(self) -> bool:
        """Whether advantages depend on what only the learner knows, so that it has to assign them again."""
        return self.needs_logprobs or self.advantage == "gae"

    @property
    def by_group(self) -> bool:
        """Whether the advantages of a group depend on nothing but the group."""
        return self.scale_rewards != "batch" and self.advantage != "reinforce_baseline"

    @property
    def parts(self) -> dict[str, Part]:
        """Axis -> the chosen part."""
        return dict(chosen({axis: getattr(self, axis) for axis in AXES}))

    @property
    def greedy_baseline(self) -> bool:
        """Whether every group needs a greedy completion of its prompt."""
        return self.parts["advantage"].greedy_baseline

    def _fixed_axes(self) -> Iterator[str]:
        decided: dict[str, dict[str, Any]] = {}
        """Setting -> the parts that decide it, and what they decide."""
        for axis, part in self.parts.items():
            for key, value in part.fixes.items():
                decided.setdefault(key, {})[f"objective.{axis}={getattr(self, axis)}"] = value
        for key, by_part in decided.items():
            (part, value), *others = by_part.items()
            found = getattr(self, key)
            if conflict := next(((other, theirs) for other, theirs in others if theirs != value), None):
                yield (
                    f"{part} decides objective.{key}: {value}, and {conflict[0]} decides it: {conflict[1]}; they do "
                    "not go together, choose another of the two"
                )
            elif found != value:
                why = " (another weight would be applied twice)" if key == "correction" else ""
                yield (
                    f"objective.{key}={found} cannot be set with {part}, which decides it: {value}{why}; leave it out"
                )

    def _settings_without_use(self) -> Iterator[str]:
        parts = self.parts
        readers: dict[str, list[str]] = {}
        for axis, entries in AXES.items():
            for name, part in entries.items():
                for key in part.reads:
                    readers.setdefault(key, []).append(f"{axis}={name}")
        for key, who in readers.items():
            value = getattr(self, key)
            reading = [part for part in parts.values() if key in part.reads]
            fixed = any(key in part.fixes for part in parts.values())
            if not reading and not fixed and value is not None and value != default_of(key, {}, _NEUTRAL.get(key)):
                yield (
                    f"objective.{key}={value} has no effect with objective.loss={self.loss}, "
                    f"objective.advantage={self.advantage}, objective.correction={self.correction}; leave it out "
                    f"(it is read by {', '.join(who)})"
                )
            may_be_empty = key in ("correction_floor", "gae_lambda")
            if reading and value is None and reading[0].reads[key] is not None and not may_be_empty:
                yield f"objective.{key} is empty, but the objective needs it; leave it out for its default"

    def _token_advantage_problems(self) -> Iterator[str]:
        if self.parts["advantage"].by_token and self.parts["loss"].needs_one_advantage:
            yield (
                f"objective.loss={self.loss} needs one advantage for all tokens of a completion, and "
                f"objective.advantage={self.advantage} gives each token its own; use another loss"
            )
        if self.advantage == "gae":
            if self.scale_rewards == "group":
                yield (
                    "objective.scale_rewards=group divides by the spread of a group, which objective.advantage=gae "
                    "does not look at; use batch or none"
                )
            if self.gae_alpha is not None and self.gae_lambda is not None:
                yield (
                    f"objective.gae_lambda={self.gae_lambda} and objective.gae_alpha={self.gae_alpha} both decide "
                    "lambda; leave one of them out"
                )
            if self.gae_alpha is None and self.gae_lambda is None:
                yield "objective.gae_lambda is empty, but the objective needs it; leave it out for its default"

    def _regulariser_problems(self) -> Iterator[str]:
        needs_reference = "objective.kl_coef" if self.kl_coef else "objective.loss=opd" if self.loss == "opd" else None
        if self.advantage == "teacher" and self.loss != "opd":
            yield "objective.advantage=teacher belongs to objective.loss=opd; set that, or another advantage"
        if needs_reference and self.reference == "none":
            yield f"{needs_reference} needs a policy to compare with; set objective.reference"
        if self.loss == "opd" and self.reference in ("initial", "adapter_off"):
            yield "objective.loss=opd needs a teacher other than the policy; set objective.reference to its path"
        if not needs_reference and self.reference != "none":
            yield f"objective.reference={self.reference} has no effect without objective.kl_coef; leave it out"
        if not self.kl_coef:
            for key in ("kl_in", "kl_estimator"):
                if getattr(self, key) is not None:
                    yield f"objective.{key}={getattr(self, key)} has no effect with objective.kl_coef=0; leave it out"
        elif self.kl_in is None or self.kl_estimator is None:
            yield "objective.kl_coef needs objective.kl_in and objective.kl_estimator; leave both out"
        if self.kl_in == "loss" and self.kl_estimator == "k1":
            yield (
                "objective.kl_estimator=k1 has an expected gradient of zero in the loss: it would only add noise. Use "
                "k2, k3 or full, or objective.kl_in=reward"
            )
        for key, switch in (("entropy_step", "entropy_target"), ("overlong_penalty", "overlong_buffer")):
            if getattr(self, key) is not None and getattr(self, switch) is None:
                yield f"objective.{key} has no effect without objective.{switch}; leave it out or set that too"
            if getattr(self, key) is None and getattr(self, switch) is not None:
                yield f"objective.{key} is empty, but objective.{switch} needs it; leave it out for its default"

    def _reward_problems(self) -> Iterator[str]:
        """What changes rewards, beside an advantage that reads none or that cannot have them changed."""
        shaping = [key for key in SHAPING if getattr(self, key)]
        if self.loss == "opd":
            if self.kl_coef:
                yield (
                    f"objective.kl_coef={self.kl_coef} has no effect with objective.loss=opd, whose reference is the "
                    "teacher; leave it out"
                )
            for key in shaping:
                yield (
                    f"objective.{key}={getattr(self, key)} has no effect with objective.loss=opd, which trains on the "
                    "teacher's word and not on rewards; leave it out"
                )
        elif self.advantage == "grpo_passk":
            for key in [*shaping, *(["kl_in"] if self.kl_in == "reward" else [])]:
                yield (
                    f"objective.{key}={getattr(self, key)} changes rewards, and objective.advantage=grpo_passk needs "
                    "them to be 0 or 1; leave it out, or take another advantage"
                )

    def _band_problems(self) -> Iterator[str]:
        """Bounds that leave out what they should be around."""
        agree = "the ratio of a token on which the policies agree"
        if self.correction_cap is not None and self.correction_cap < 1:
            yield f"objective.correction_cap={self.correction_cap} lies below 1, {agree}; use 1 or more"
        if self.correction_floor is not None and self.correction_floor > 1:
            yield f"objective.correction_floor={self.correction_floor} lies above 1, {agree}; use 1 or less"
        if None not in (self.vtrace_rho, self.vtrace_c) and self.vtrace_c > self.vtrace_rho:
            yield (
                f"objective.vtrace_c={self.vtrace_c} lies above objective.vtrace_rho={self.vtrace_rho}, and V-trace is "
                "defined up to there; set it to at most that"
            )
        if None not in (self.cov_low, self.cov_high) and self.cov_low > self.cov_high:
            yield f"objective.cov_low={self.cov_low} lies above objective.cov_high={self.cov_high}; lower it"

    def _baseline_problems(self) -> Iterator[str]:
        """What compares the samples of a group with one another has no say over a completion that is none of them."""
        for key in ("length_reward", "diversity_bonus") if self.greedy_baseline else ():
            if getattr(self, key):
                yield (
                    f"objective.{key}={getattr(self, key)} depends on the other completions of a group, and the greedy "
                    f"one of objective.advantage={self.advantage} is none of them, so their rewards could not be "
                    "compared; leave it out, or use length_cost or overlong_buffer, which act on each alone"
                )


SHAPING = ("overlong_buffer", "length_cost", "length_reward", "diversity_bonus")
"""Settings that change rewards before they are compared."""
_NEUTRAL = {"scale_rewards": "none"}
"""Values that say nothing where no part reads the setting."""
