"""Names of metrics, means that are what their name says, and the lines of ``metrics.jsonl``.

Promises
- A logged mean is the mean over tokens or samples, as its name says, however the data was cut into micro-batches
  (`Mean`).
- Every line is strict JSON. A value that is not finite becomes null and is listed under ``not_finite``, so that it is
  seen as bad and spoils no other.
- A line is written whole: after ``kill -9`` the next writer cuts off the torn rest of the last one.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nearpolicy.store.metric_lines import UNDONE

METRICS: Mapping[str, str] = {
    "reward/mean": "mean reward of the scored rollouts in the batch",
    "reward/<source>/mean": "mean value of one reward source over the rollouts it scored, before its weight",
    "reward/<source>/<part>": "mean of one named part of a reward source",
    "reward/<source>/gated": "share of the rollouts scored by a source with `requires` in which a requirement was not "
    "met, so that its value added nothing to the reward",
    "reward/baseline_mean": "mean reward of the greedy completions that samples are compared with; they count in no "
    "other metric of rewards, lengths and tokens",
    "reward/zero_variance_share": "share of groups whose scored rollouts all have one reward (with `remax`: that of "
    "the greedy completion): they carry no signal",
    "reward/unscored": "rollouts of the batch that have no reward",
    "task/<task>/reward": "mean reward of the rollouts of one task",
    "queue/slots": "slots that new admissions may hold: all, unless `queue.adaptive_slots` or a monitor takes some",
    "batch/groups": "groups the step consumed",
    "batch/failed_groups": "groups that were given up as failed since the step before",
    "batch/filtered_groups": "groups that were left out for their rewards since the step before",
    "batch/expired_groups": "groups that were given up beyond the bound on staleness since the step before",
    "batch/tokens": "sampled tokens of the groups the step consumed",
    "completion/length_mean": "sampled tokens per rollout",
    "completion/length_max": "sampled tokens of the longest rollout",
    "completion/length_ratio": "mean length against the median of the 20 steps before; not in the first five",
    "completion/truncated_share": "share of rollouts cut by the length limit",
    "policy/loss": "value of the objective, per its aggregation",
    "policy/entropy": "mean entropy of the policy over computed tokens, in nats",
    "policy/entropy_ratio": "entropy against the mean of the first five steps",
    "policy/clip_low_share": "share of computed tokens clipped from below",
    "policy/clip_high_share": "share of computed tokens clipped from above",
    "policy/skipped_updates": "updates of the step whose gradient was not finite and was not applied",
    "policy/kl_reference": "mean KL from the policy to the reference over computed tokens, in nats",
    "policy/grad_norm": "gradient norm before clipping, the mean over the step's updates",
    "policy/grad_norm_ratio": "gradient norm against the median of the 20 steps before; not in the first five",
    "policy/advantage_logprob_covariance": "covariance of advantage and log-probability over computed tokens; entropy "
    "falls while it is positive",
    "policy/held_back_share": "share of computed tokens whose log-ratio was beyond what is exponentiated",
    "policy/off_policy_share": "share of computed tokens in sequences left out by off-policy masking",
    "policy/outside_trust_share": "share of computed tokens outside the trust region of DPPO",
    "policy/entropy_coef": "weight of the entropy bonus in the step, where `objective.entropy_target` moves it",
    "critic/loss": "value loss, aggregated as the policy's, the mean over the step's updates",
    "critic/grad_norm": "gradient norm of the critic before clipping, the mean over the step's updates",
    "critic/explained_variance": "share of the targets' variance that the values at the start of the step explain: 1 "
    "for a perfect critic, 0 for one that says the same of all tokens; left out where all targets are equal",
    "critic/value_mean": "mean value at the start of the step",
    "critic/target_mean": "mean of what the values are trained towards",
    "critic/clip_share": "share of tokens, over all updates, whose value has moved so far that `critic.clip` stops it",
    "critic/learning_rate": "learning rate of the critic in the step",
    "critic/skipped_updates": "updates of the critic whose gradient was not finite and was not applied",
    "learner/learning_rate": "learning rate of the policy in the step; 0 while a critic is trained alone",
    "learner/forward_tokens": "computed tokens, over all updates of the step",
    "learner/updates": "optimizer steps since the start of the run",
    "correction/raw_mean": "mean ratio of proximal to behaviour policy over computed tokens, before the correction",
    "correction/truncated_mean": "mean of that ratio, at most `objective.correction_cap`",
    "correction/weight_mean": "mean weight of the behaviour correction over computed tokens, after truncation",
    "correction/rejected_share": "share of computed tokens that the correction rejected",
    "mismatch/kl": "KL from the behaviour to the proximal policy, in nats per token, by the k3 estimate",
    "mismatch/prob_diff_mean": "mean absolute difference of the two policies' probabilities of the sampled tokens",
    "mismatch/logprob_diff_mean": "mean absolute difference of their log-probabilities, in nats",
    "mismatch/logprob_diff_p99": "its 99th percentile over tokens",
    "mismatch/logprob_diff_max": "its maximum over tokens",
    "mismatch/kl_k1": "its estimate k1, of either sign",
    "mismatch/kl_k2": "its estimate k2",
    "mismatch/chi_square": "chi-square divergence of the proximal from the behaviour policy, mean of ratio^2 - 1",
    "mismatch/weight_p<q>": "quantile of the ratio proximal / behaviour over computed tokens: 1, 50, 99 %",
    "mismatch/fresh_share": "share of computed tokens that were sampled under the proximal policy's own weights, all "
    "before them in their sequence too",
    "mismatch/fresh_tokens": "how many those are",
    "mismatch/engine_kl": "the estimate `mismatch/kl` over fresh tokens: what engine and learner compute differently",
    "mismatch/engine_logprob_diff_max": "the largest difference of log-probabilities over fresh tokens, in nats",
    "mismatch/probe_kl": "the estimate over a probe, where the batch before had too few fresh tokens: tokens sampled "
    "for this alone under the version that both hold (`telemetry.probe`); they are no rollouts and train nothing",
    "mismatch/probe_logprob_diff_max": "the largest difference over the probe",
    "mismatch/probe_tokens": "its tokens",
    "mismatch/kept_kv_kl": "the estimate over tokens that were sampled on keys and values of older weights "
    "(`generator.on_sync: continue`)",
    "mismatch/kept_kv_logprob_diff_max": "the largest difference over those",
    "mismatch/staleness_kl": "the estimate over tokens of older weights",
    "mismatch/staleness_logprob_diff_max": "the largest difference over those",
    "mismatch/ess": "effective sample size of the ratios proximal / behaviour, as a share: 1 if all are equal",
    "replay/groups": "groups of earlier steps whose successes the step trained once more (`queue.replay`)",
    "replay/tokens": "trained tokens of those; they count in no metric of rewards, lengths, staleness and mismatch",
    "replay/age_mean": "mean age of those groups, in steps since the oldest weights among their tokens",
    "replay/age_max": "the largest age among them",
    "replay/ess": "effective sample size of the ratios proximal / behaviour over their computed tokens, as a share",
    "ledger/<fate>_tokens": "sampled tokens with this fate since the start of the run; all but `replayed` add up to "
    "what was sampled and stored",
    "ledger/sampled_per_trained": "sampled tokens for each one that was trained with an advantage, since the start: "
    "what a token that moves the weights costs",
    "staleness/mean": "mean staleness of the consumed groups, in steps",
    "staleness/max": "largest staleness among the consumed groups, in steps",
    "staleness/updates_max": "largest lag of a token behind the weights it trained, in updates",
    "time/generate_s": "time in which the generator computed since the step before",
    "time/verify_s": "time in which verifiers worked since the step before, summed over rollouts",
    "time/learn_s": "time in the learner's step",
    "time/sync_s": "time in publishing weights since the step before",
    "time/wait_s": "time in which the learner waited for a batch",
    "time/step_s": "wall time of the step: waiting, learning, publishing",
    "throughput/tokens_per_s": "consumed tokens per second of wall time",
    "utilisation/<role>": "share of the step's wall time in which the role computed: generator, learner, verifier; "
    "with several replicas also of each, as `generator_0`",
    "bubble/<replica>": "share of the time in which a replica (`generator_0`) rested although requests waited for room",
    "throughput/<replica>_tokens_per_s": "tokens that a replica sampled per second of wall time",
    "generator/replicas": "replicas that belonged to the run at the end of the step",
    "generator/reissued": "requests issued again since the start, because their replica was lost or gave them back",
    "memory/peak_mb": "peak memory of the main process so far, in MiB",
    "integrity/duplicate_share": "share of completions whose text, white space apart, was also given to another prompt",
    "integrity/reward_length_correlation": "correlation of reward and length over the batch's completions",
    "integrity/reward_jump": "mean reward against that of the 10 steps before, in their standard deviations",
    "integrity/reward_per_sqrt_kl": "gain of the mean reward since the first five steps, per square root of the KL to "
    "the reference (nats per token), mean and median over the last ten steps",
    "integrity/reward_fall": "mean reward of the last ten steps below that of the best ten, in standard deviations of "
    "either; 0 unless the policy has moved on from its reference since",
    "integrity/<source>/held_out_gap": "of a source that decides what is right: its mean over the last ten steps minus "
    "that over the first five, minus the rise of held-out accuracy since the first evaluation; 0 where the mean has "
    "not risen by more than it varies",
    "integrity/<source>/held_out_fall": "held-out accuracy below that of the best evaluation; 0 where the mean of the "
    "source in training has not risen since by more than it varies",
    "verifier/<source>/flip_rate": "share of completions judged twice (`verifier.recheck`) that got another score",
    "verifier/unisolated": "1 if programs of the policy run with the rights of the trainer, 0 if they are kept in",
    "verifier/judged": "rollouts judged since the step before",
    "verifier/latency_p<q>_s": "quantile of the seconds from a rollout's end to its verdicts: 50, 95, 99 %",
    "verifier/queue_p95_s": "95 % quantile of the seconds that a rollout waited for a worker of the verifier",
    "verifier/<source>/failed_share": "share of the batch's verdicts of one reward source that failed",
    "evaluation/<task>/accuracy": "share of judged held-out answers that are right",
    "evaluation/<task>/pass@<k>": "chance that one of k samples is right, unbiased, averaged over questions",
}
"""Canonical name -> meaning. ``<word>`` stands for one part of a name.

A *computed* token is a trained one that went through the learner in the step: those of rollouts whose advantage is 0
are trained too, but add nothing and are skipped."""

FAMILIES: Mapping[str, str] = {
    "critic": (
        "Only where there is a critic (`objective.advantage: gae`, or `vtrace` with a section `critic`). Over all "
        "trained tokens of the step, those that the policy skips too."
    ),
    "mismatch": (
        "Behaviour policy: the weights that sampled a token, as the engine computed it. Proximal policy: the learner's "
        "weights at the start of the step. They differ by staleness (the versions in between) and by whatever engine "
        "and learner compute differently, stale groups included: nothing is left out. With exact numerics the second "
        "part is 0, so all of it is staleness, and it reads 0 where nothing is stale. Over computed tokens, of the "
        "first pass over the batch."
    ),
    "integrity": (
        "Whether rewards still mean what they should. Gao et al. 2022 (Scaling Laws for Reward Model Overoptimization) "
        "find that the true reward rises by d (alpha - beta log d), d being the square root of the KL to the initial "
        "policy: what is gained per d falls steadily, then the reward itself does, while d goes on growing. That is "
        "what `integrity/reward_per_sqrt_kl` and `integrity/reward_fall` look at; they need a reference "
        "(`objective.reference`). Those by source need evaluations (`evaluation.every`), stand in the line of an "
        "evaluation, and begin with the one that has ten steps behind it. `held_out_gap` is left out where the means "
        "of the source are not between 0 and 1."
    ),
    "evaluation": (
        "In a line of their own, whose `step` is the version of the weights that answered. Accuracy is greedy unless "
        "`evaluation.temperature` says otherwise; right is what a task's first reward gives 1 or more, or calls "
        "`correct`, where all that this reward `requires` is met."
    ),
    "staleness": "Of a group: steps completed when it is consumed, minus the oldest version among its tokens.",
    "time": "In seconds. Roles work at the same time, so these do not add up to the wall time.",
}
"""First part of a name -> what holds for all names that begin with it."""


def pattern(name: str) -> re.Pattern[str]:
    """What matches every metric that a name with placeholders stands for."""
    pieces = re.split(r"(<\w+>)", name)
    return re.compile("".join("[^/]+" if piece.startswith("<") else re.escape(piece) for piece in pieces))


_PATTERNS = [pattern(name) for name in METRICS]


def unknown_names(names: Iterable[str]) -> list[str]:
    """Those that are not canonical, for tests of whoever logs metrics."""
    return [name for name in names if not any(pattern.fullmatch(name) for pattern in _PATTERNS)]


class Mean:
    """A mean over items, put together from parts of different sizes.

    Six tokens with mean 0.1 and two with mean 0.5 have mean 0.2, not 0.3:

        kl = Mean()
        kl.add(0.1, weight=6)
        kl.add(0.5, weight=2)
        kl.value  # 0.2
    """

    __slots__ = ("total", "weight")

    def __init__(self) -> None:
        self.total = 0.0
        self.weight = 0.0

    def add(self, mean: float, *, weight: float) -> None:
        """``weight`` items (tokens, samples) whose mean is ``mean``. A part without items says nothing."""
        if weight < 0:
            raise ValueError(f"a mean over {weight} items makes no sense")
        if weight:
            self.total += float(mean) * weight
            self.weight += weight

    def add_sum(self, total: float, *, weight: float) -> None:
        """``weight`` items whose sum is ``total``."""
        if weight:
            self.add(float(total) / weight, weight=weight)

    def merge(self, other: Mean) -> None:
        self.total += other.total
        self.weight += other.weight

    @property
    def value(self) -> float | None:
        """The mean, or None over nothing: leave the metric out then; it is not 0."""
        return self.total / self.weight if self.weight else None


def split_finite(metrics: Mapping[str, Any]) -> tuple[dict[str, float | None], dict[str, str]]:
    """Plain numbers by name, null where one is not finite; and what those were: name -> nan, inf, -inf."""
    values: dict[str, float | None] = {}
    not_finite: dict[str, str] = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"metric {name!r} is {value!r}, which is not a number; leave it out if unknown") from error
        values[name] = number if math.isfinite(number) else None
        if not math.isfinite(number):
            not_finite[name] = str(number)
    return values, not_finite


def as_logged(line: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a line, with values that are not finite as they were."""
    bad = line.get("not_finite", {})
    names = [name for name in line if "/" in name]
    return {name: float(bad[name]) if name in bad else line[name] for name in names}


class MetricsWriter:
    """Appends one line per call to ``metrics.jsonl``: step, time (wall), the metrics, ``not_finite`` if any is not."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        _cut_torn_line(self._path)
        self._file = self._path.open("a", encoding="utf-8", newline="\n")

    def write(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the line as written."""
        values, not_finite = split_finite(metrics)
        line: dict[str, Any] = {"step": int(step), "time": time.time(), **values}
        if not_finite:
            line["not_finite"] = not_finite
        # One write call, flushed: a reader sees whole lines, or the torn last one that it skips.
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        return line

    def undo(self, step: int) -> None:
        """Lines of this step and of later ones do not count any more; evaluations of the weights before it do."""
        self._file.write(json.dumps({"step": int(step), "time": time.time(), UNDONE: True}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with path.open("r+b") as file:
            file.truncate(whole)
