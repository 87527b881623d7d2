"""Which fault explains that engine and learner disagree about tokens sampled under weights they share.

    ask anew        prompts of the last batch, and the same with another first token, which no cached prefix fits
    look            the engine's memory against the learner's weights, tensor by tensor
    compute         what the engine would have said under each fault, from the learner's model
    compare         the fault whose numbers the engine's are; `unknown` if none leaves less than a tenth of the gap

Everything is computed beside the run: weights, moments, random numbers and running sequences stay as they are, so that
a run with a diagnosis has the bits of one without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearpolicy.generator.engine import Engine
from nearpolicy.launch.probe import Holder, Probe, Probed, flat, logprobs_of, mean_gap
from nearpolicy.learner.passes import Passes
from nearpolicy.models.fitness import TOLERANCE as ROUNDING
from nearpolicy.models.lora import LoraLinear, LoraPolicy
from nearpolicy.models.policy import IMPOSSIBLE, PolicyModel, Support, log_softmax, restricted
from nearpolicy.models.shapes import is_mixture
from nearpolicy.models.weights import differing, digests, named_weights
from nearpolicy.records import Finish, Row, Segment

CAUSES: Mapping[str, str] = {
    "temperature": "the two divide logits by different temperatures",
    "missed_sync": "a tensor is another one in the engine's memory than at the learner",
    "stale_prefix": "keys and values of a cached prefix belong to other weights",
    "wrong_stop": "completions go on behind an end token, or stop at a token that is none",
    "low_precision": "one side computes in narrower numbers than the other",
    "adapter": "one side applies the adapter twice, or not at all",
    "rounding": "the last bits of float32: products whose bits depend on their neighbours",
    "unknown": "none of these explains it",
}
"""What a diagnosis can say."""

EXPLAINED = 0.1
"""Share of the gap that may be left by a fault that explains it."""
EXPLAINED_BY_ROUNDING = 0.5
"""The same for low precision: roundings are repeated, but not always in the same order."""
COLDEST, HOTTEST, SAME_TEMPERATURE = 0.02, 50.0, 1e-3
MAX_PROMPTS, SAMPLES, TOKENS_EACH = 8, 2, 8
NARROW = (torch.bfloat16, torch.float16)
T = TypeVar("T")


class Examines(Protocol):
    """An `EngineRunner`, or one somewhere else."""

    async def examine(self, look: Callable[[Engine], T]) -> T:
        """What ``look``, which may travel, finds at the engine between two forward passes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A name from `CAUSES`, what was found, and what to do."""

    cause: str
    text: str
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """How far engine and learner may be apart on tokens sampled under weights they share."""

    metric: str
    """``logprob_diff_max`` or ``kl``."""
    value: float

    def exceeded_by(self, metrics: Mapping[str, float]) -> bool | None:
        """None of a line that does not say."""
        told = [metrics.get(f"mismatch/{part}_{self.metric}") for part in ("engine", "probe")]
        told = [value for value in told if value is not None]
        return any(not value <= self.value for value in told) if told else None  # NaN is beyond any


EXACT = Bound(metric="logprob_diff_max", value=0.0)
FLOAT32 = Bound(metric="logprob_diff_max", value=1e-3)
LOW_PRECISION = Bound(metric="kl", value=0.05)
"""With exact numerics; with float32 on both sides (measured: 2e-5 nats), and for experts always; with narrower numbers
on a side by the recipe (measured: 0.002 on SmolLM2, 0.015 on a tiny mixture of experts, whose routing flips)."""


def bound_of(numerics: str, policy: PolicyModel, *, narrow: bool = False) -> Bound:
    """``narrow``: the engine computes in less than the numbers of the ``policy``."""
    if narrow or next(policy.parameters()).dtype != torch.float32:
        return LOW_PRECISION
    return EXACT if numerics == "exact" and not is_mixture(policy) else FLOAT32


async def diagnose(
    probe: Probe, engine: Examines, prompts: Sequence[np.ndarray], version: int, bound: Bound
) -> Diagnosis:
    """Both hold ``version``, and keep it until this returns. ``prompts``: of the batch that disagreed."""
    shape = {"n": SAMPLES, "tokens": TOKENS_EACH}
    prompts, learner_place = prompts[:MAX_PROMPTS], probe.scoring.learner
    asked = await probe.measure(prompts, version, **shape, name="diagnosis")
    if not asked.rows:
        text = f"asked again under version {version}, the engine completes none of {len(prompts)} prompts"
        return Diagnosis(cause="unknown", text=f"{text}: look at why requests fail (nearpolicy inspect)")
    if not bound.exceeded_by(asked.metrics):
        text = (
            f"asked again under version {version}, engine and learner agree over {len(asked.engine)} tokens (mean "
            f"difference {asked.gap:.2g} nats): what was wrong before is over. Look at what happened around the "
            "publication before (events of kind load and swap in the store)"
        )
        return Diagnosis(cause="unknown", text=text, numbers={"gap": asked.gap})
    learner = await learner_place.call(_of_learner, asked.rows)
    unseen = [_unseen(prompt, version, learner.logits.shape[-1]) for prompt in prompts]
    apart = await probe.measure(unseen, version, **shape, name="diagnosis-unseen")
    look = partial(_of_engine, passes=learner.passes, same_support=learner.allowed is not None)
    memory = await engine.examine(partial(look, rows=asked.rows, wanted=learner.digests))
    case = _Case(asked, apart, learner, memory, probe.sampling.temperature, bound)
    return await learner_place.call(_explained, case)


# What is computed on each side


@dataclass(frozen=True, slots=True, eq=False)
class _Learner:
    """What the learner's model gives for the asked tokens."""

    logits: Tensor
    """[N, V]."""
    targets: Tensor
    allowed: Tensor | None
    """[N, V] bool where probabilities are over the tokens that could be drawn."""
    digests: Mapping[str, str]
    narrow: Mapping[torch.dtype, np.ndarray]
    """Log-probabilities [N] with products in narrower numbers, at the learner's temperature."""
    passes: Passes
    """As they go through a model there."""
    adapter: Mapping[float, np.ndarray]
    """Log-probabilities [N] with the adapter counted so many times."""

    def at(self, temperature: float) -> np.ndarray:
        return _logprobs(self.logits, self.targets, temperature, self.allowed)


@dataclass(frozen=True, slots=True, eq=False)
class _Memory:
    """What is found in the engine."""

    differing: Sequence[str]
    tensors: Mapping[str, Tensor]
    """Of the engine, by name: those that differ."""
    logits: Tensor
    """[N, V] of its modules, computed the learner's way."""
    narrow: Mapping[torch.dtype, np.ndarray]
    """Log-probabilities [N] of its modules with products in narrower numbers."""


def _of_learner(holder: Holder, rows: Sequence[Row]) -> _Learner:
    policy, passes = holder.policy, holder.passes
    targets = torch.from_numpy(np.concatenate([row.segment.token_ids for row in rows]).astype(np.int64))
    logits = _logits(policy, passes, rows)
    adapter = {}
    if isinstance(policy, LoraPolicy):
        for times in (0.0, 2.0):
            with policy.scaled(times):
                adapter[times] = flat(logprobs_of(holder, rows))
    return _Learner(
        logits=logits,
        targets=targets.to(logits.device),
        allowed=_allowed(rows, logits) if holder.same_support else None,
        digests=digests(policy.weights()),
        narrow=_narrow(policy, passes, rows, same_support=holder.same_support),
        passes=passes.shared(),
        adapter=adapter,
    )


def _of_engine(
    engine: Engine, *, passes: Passes, same_support: bool, rows: Sequence[Row], wanted: Mapping[str, str]
) -> _Memory:
    weights = named_weights(engine.policy.model)
    names = differing(wanted, digests(weights))
    return _Memory(
        differing=names,
        tensors={name: weights[name].clone() for name in names if name in weights},
        logits=_logits(engine.policy, passes, rows),
        narrow=_narrow(engine.policy, passes, rows, same_support=same_support),
    )


@torch.no_grad()
def _logits(policy: PolicyModel, passes: Passes, rows: Sequence[Row]) -> Tensor:
    return policy.head(torch.cat(passes.hidden(policy, rows, range(len(rows)))))


def _narrow(
    policy: PolicyModel, passes: Passes, rows: Sequence[Row], *, same_support: bool
) -> dict[torch.dtype, np.ndarray]:
    found = {}
    for dtype in NARROW:
        with _narrowed(policy, dtype):
            logprobs = passes.logprobs(policy, rows, range(len(rows)), same_support=same_support)
        found[dtype] = flat(logprobs)
    return found


@contextmanager
def _narrowed(policy: PolicyModel, dtype: torch.dtype) -> Iterator[None]:
    """Products of linear layers with factors and results rounded to ``dtype``, as if they were computed in it."""

    def round(x: Tensor) -> Tensor:
        return x.to(dtype).to(x.dtype)

    def product(module: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        weight = module.merged() if isinstance(module, LoraLinear) else module.weight
        return round(F.linear(round(inputs[0]), round(weight), module.bias))

    hooks = [each.register_forward_hook(product) for each in policy.modules() if isinstance(each, nn.Linear)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _logprobs(logits: Tensor, targets: Tensor, temperature: float, allowed: Tensor | None) -> np.ndarray:
    logprobs = log_softmax(logits, temperature)
    if allowed is not None:
        logprobs = restricted(logprobs, allowed, IMPOSSIBLE)
    return logprobs.gather(1, targets[:, None])[:, 0].double().cpu().numpy()


def _allowed(rows: Sequence[Row], logits: Tensor) -> Tensor:
    sizes, ids = (
        torch.from_numpy(np.concatenate([row.segment.extras[name] for row in rows]).astype(np.int64)).to(logits.device)
        for name in ("support_sizes", "support_ids")
    )
    return Support(sizes, ids).mask(logits.shape[-1])


# What explains the gap


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    asked: Probed
    apart: Probed
    """The same prompts with another first token."""
    learner: _Learner
    memory: _Memory
    temperature: float
    """Of the recipe."""
    bound: Bound

    @property
    def held(self) -> np.ndarray:
        """[N] what the learner's computation gives with the engine's modules."""
        return _logprobs(self.memory.logits, self.learner.targets, self.temperature, self.learner.allowed)

    def left(self, explained: np.ndarray, told: np.ndarray | None = None) -> float:
        """Share of the gap that is left if the engine's numbers (or those ``told``) should have been these."""
        return mean_gap(self.asked.engine if told is None else told, explained) / self.asked.gap

    @property
    def limit(self) -> float:
        """What a fault may leave that explains the gap: where roundings are wanted, those as well."""
        wanted = self.bound is LOW_PRECISION
        rounding = mean_gap(self.asked.learner, self.learner.narrow[torch.bfloat16]) if wanted else 0.0
        return min(EXPLAINED + rounding / self.asked.gap, EXPLAINED_BY_ROUNDING)


def _explained(holder: Holder, case: _Case) -> Diagnosis:
    if not math.isfinite(case.asked.gap):
        return _unknown(case, "numbers that are not finite. Look at the weights (NaN after an update?)")
    if case.memory.differing:
        return _by_memory(case, holder.policy)
    candidates = [*_by_temperature(case), *_by_adapter(case)]
    if candidates:
        return min(candidates, key=lambda each: each.numbers["residual"])
    agrees = case.bound.exceeded_by(case.apart.metrics) is False
    if agrees or (case.apart.rows and case.apart.gap <= EXPLAINED * case.asked.gap):
        return _stale_prefix(case)
    return _by_precision(case) or _unknown(
        case,
        f"{case.asked.gap:.3g} nats per token, and neither a temperature, nor the adapter, a cached prefix, the "
        "weights in the engine's memory or lower precision explains it. Compare what computes: versions of packages, "
        "attention, kernels",
    )


def _unknown(case: _Case, what: str) -> Diagnosis:
    text = f"over {len(case.asked.engine)} tokens {what}"
    return Diagnosis(cause="unknown", text=text, numbers={"gap": case.asked.gap})


def _by_temperature(case: _Case) -> Iterator[Diagnosis]:
    learner, asked, wanted = case.learner, case.asked, case.temperature
    engines = nearest_temperature(learner.at, asked.engine)
    residual = case.left(learner.at(engines))
    if residual > case.limit:
        return
    learners = nearest_temperature(learner.at, asked.learner)
    if abs(math.log(engines / learners)) < SAME_TEMPERATURE:
        return
    wrong = "engine" if _further(engines, learners, wanted) else "learner"
    yield Diagnosis(
        cause="temperature",
        text=f"the engine's log-probabilities are those of temperature {engines:.3g}, the learner's of "
        f"{learners:.3g}, and sampling.temperature is {wanted:g}. The {wrong} leaves it out or takes it from somewhere "
        "else: ratios of the two policies mean nothing until both divide by the same",
        numbers={"engine": engines, "learner": learners, "residual": residual, "gap": asked.gap},
    )


def _further(a: float, b: float, target: float) -> bool:
    return abs(math.log(a / target)) > abs(math.log(b / target))


def nearest_temperature(logprobs_at: Callable[[float], np.ndarray], told: np.ndarray) -> float:
    """The temperature at which log-probabilities are nearest to those told, by least squares."""

    def loss(log_temperature: float) -> float:
        return float(np.square(logprobs_at(math.exp(log_temperature)) - told).mean())

    grid = np.linspace(math.log(COLDEST), math.log(HOTTEST), 40)
    best = int(np.argmin([loss(x) for x in grid]))
    low, high = grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(36):
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if loss(left) < loss(right) else (left, high)
    return math.exp((low + high) / 2)


_TIMES = {0.0: "not at all", 2.0: "twice"}


def _by_adapter(case: _Case) -> Iterator[Diagnosis]:
    """The engine's memory is right: what is wrong is added, or left out, where one of them computes."""
    for times, explained in case.learner.adapter.items():
        if (residual := case.left(explained)) <= case.limit:
            yield _adapter("engine", times, {"residual": residual, "gap": case.asked.gap})
    if case.learner.adapter and case.left(case.held) <= case.limit:
        for times, explained in case.learner.adapter.items():
            if (residual := case.left(explained, case.asked.learner)) <= case.limit:
                yield _adapter("learner", times, {"residual": residual, "gap": case.asked.gap})


def _adapter(side: str, times: float, numbers: Mapping[str, Any]) -> Diagnosis:
    return Diagnosis(
        cause="adapter",
        text=f"the {side}'s numbers are those of the model with its adapter applied {_TIMES[times]}. The weights it "
        "starts from contain the adapter already, or it is left out of what is computed: base plus adapter, exactly "
        "once, on both sides",
        numbers={"times": times, "side": side, **numbers},
    )


def _by_memory(case: _Case, policy: PolicyModel) -> Diagnosis:
    """The engine does not hold what the learner would publish now: that alone is a fault, and its kind can be seen."""
    names, held = case.memory.differing, case.memory.tensors
    numbers = {"tensors": list(names), "residual": case.left(case.held), "gap": case.asked.gap}
    ours = policy.weights()
    pairs = [(ours[n], held[n]) for n in names if n in ours and n in held and ours[n].shape == held[n].shape]
    complete = len(pairs) == len(names)
    for dtype in NARROW:
        if complete and (side := _rounded_side(pairs, dtype)):
            return Diagnosis(
                cause="low_precision",
                text=f"the {side}'s weights are the other side's rounded to {_name(dtype)}, in all {len(pairs)} "
                "tensors that differ. Hold them in the same numbers (model.dtype), or set run.numerics: fast and let "
                "objective.correction correct for it",
                numbers=numbers | {"dtype": _name(dtype), "side": side},
            )
    if complete and (times := _times_applied(policy, held)) is not None:
        return _adapter("engine", times, numbers)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    share = f"{max(0.0, 1.0 - numbers['residual']):.0%}"
    return Diagnosis(
        cause="missed_sync",
        text=f"{', '.join(names[:5])}{more}: the engine's memory does not hold what the learner has under the same "
        f"version{_how_far(pairs)}; that explains {share} of the difference. The publication leaves it out, or "
        "something writes to it afterwards",
        numbers=numbers,
    )


def _rounded_side(pairs: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype) -> str | None:
    """Which of (learner's, engine's) tensors are the other's, rounded."""
    sides = {"engine": pairs, "learner": [(theirs, ours) for ours, theirs in pairs]}
    for side, of_side in sides.items():
        if all(torch.equal(whole.to(dtype).to(rounded.dtype), rounded) for whole, rounded in of_side):
            return side
    return None


def _times_applied(policy: PolicyModel, tensors: Mapping[str, Tensor]) -> float | None:
    """How often these matrices contain the adapter, if that is all that is wrong with them."""
    adapter = policy.adapter()
    if adapter is None or not tensors.keys() <= adapter.factors.keys():
        return None
    layers = {f"{name}.weight": layer for name, layer in policy.layers.items()}
    for times in (0.0, 2.0):
        near = []
        for name, theirs in tensors.items():
            base, change = layers[name].weight, layers[name].merged() - layers[name].weight
            allowed = 0.01 * float(change.abs().max()) + 1e-6 * float(base.abs().max())
            near.append(float((theirs - base - times * change).abs().max()) <= allowed)
        if all(near):
            return times
    return None


def _how_far(pairs: Sequence[tuple[Tensor, Tensor]]) -> str:
    if not pairs:
        return ""
    furthest = max(float((ours.float() - theirs.float()).abs().max()) for ours, theirs in pairs)
    return f" (numbers differ by up to {furthest:.2g})"


def _unseen(prompt: np.ndarray, version: int, vocabulary: int) -> np.ndarray:
    """The prompt with another first token: nothing that was computed for it is used again."""
    changed = prompt.copy()
    changed[0] = (int(prompt[0]) + 1 + version) % vocabulary
    if changed[0] == prompt[0]:
        changed[0] = (int(prompt[0]) + 1) % vocabulary
    return changed


def _stale_prefix(case: _Case) -> Diagnosis:
    asked, apart = case.asked, case.apart
    return Diagnosis(
        cause="stale_prefix",
        text=f"prompts of the last batch differ by {asked.gap:.3g} nats per token, and by {apart.gap:.2g} when their "
        "first token is another one, so that nothing computed before fits them: the engine uses keys and values of "
        "prefixes from other weights. It must forget all of them when weights arrive",
        numbers={"gap": asked.gap, "unseen_gap": apart.gap},
    )


def _by_precision(case: _Case) -> Diagnosis | None:
    asked, learner, memory = case.asked, case.learner, case.memory
    gap = {"gap": asked.gap}
    if (largest := float(np.abs(asked.engine - asked.learner).max())) <= ROUNDING:
        return Diagnosis(
            cause="rounding",
            text=f"at most {largest:.2g} nats apart, as float32 results are that were added up in another order: on "
            "this machine products depend on what stands beside them. Set run.numerics: fast, and it is measured and "
            "corrected; nearpolicy doctor says what this machine can keep",
            numbers=gap,
        )
    for dtype in NARROW:
        sides = {
            "engine": (asked.engine, learner.narrow[dtype], asked.learner),
            "learner": (asked.learner, memory.narrow[dtype], asked.engine),
        }
        for side, (told, narrow, other) in sides.items():
            residual = case.left(narrow, told)
            if residual <= EXPLAINED_BY_ROUNDING or _is_noise_of(told - other, narrow - other):
                return Diagnosis(
                    cause="low_precision",
                    text=f"the {side} computes as in {_name(dtype)}: the difference ({asked.gap:.2g} nats per token) "
                    f"has the size of its roundings and no direction. Compute both in the same numbers (model.dtype, "
                    "generator.weights), or set run.numerics: fast and let objective.correction correct for it",
                    numbers=gap | {"residual": residual, "dtype": _name(dtype), "side": side},
                )
    return None


def _is_noise_of(found: np.ndarray, of_rounding: np.ndarray) -> bool:
    """Whether a difference is as large as that which rounding makes, and leans to neither side."""
    size, usual = (float(np.sqrt(np.square(each).mean())) for each in (found, of_rounding))
    centred = abs(float(found.mean())) <= 3.0 * size / math.sqrt(len(found))
    return bool(np.isfinite(usual)) and usual > 0 and 0.25 <= size / usual <= 4.0 and centred


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Where completions end


def wrong_stops_of(holder: Holder, segments: Sequence[Segment], ends: Sequence[int], strings: bool) -> Diagnosis | None:
    """`wrong_stops` where the learner is, which has the tokens."""
    return wrong_stops(segments, ends, strings=strings)


def wrong_stops(segments: Iterable[Segment], ends: Sequence[int], *, strings: bool = False) -> Diagnosis | None:
    """Completions against the end tokens of model and tokenizer. ``strings``: they may end with any token as well."""
    behind: list[int] = []
    stopped: list[int] = []
    for segment in segments:
        ids, mask = segment.token_ids, segment.mask
        if not len(ids):
            continue
        went_on = np.isin(ids[:-1], ends) & mask[:-1] & mask[1:]
        behind += ids[:-1][went_on].tolist()
        if segment.finish is Finish.STOP and not strings and int(ids[-1]) not in ends:
            stopped.append(int(ids[-1]))
    if not behind and not stopped:
        return None
    found = []
    if behind:
        found.append(f"went on behind the end token {_tokens(behind)} {len(behind)} times")
    if stopped:
        found.append(f"stopped {len(stopped)} times at {_tokens(stopped)}, which is no end token")
    return Diagnosis(
        cause="wrong_stop",
        text=f"completions of the batch {' and '.join(found)}; those of model and tokenizer are {_tokens(ends)}. Give "
        "the engine these (generation_config.json, the tokenizer's eos_token)",
        numbers={"behind": sorted(set(behind)), "stopped": sorted(set(stopped)), "ends": [int(id) for id in ends]},
    )


def _tokens(ids: Iterable[int]) -> str:
    return ", ".join(str(int(id)) for id in sorted(set(ids)))
