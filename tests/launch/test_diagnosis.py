"""Faults between engine and learner are told apart by name; what is clean is named nothing, and nothing is changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from learner_cases import EXACT, learner, model_folder
from torch import nn

from nearpolicy.distant import Distant
from nearpolicy.generator.engine import Engine, EngineLimits
from nearpolicy.generator.runner import EngineRunner
from nearpolicy.launch.diagnosis import EXACT as NO_GAP
from nearpolicy.launch.diagnosis import bound_of, diagnose, nearest_temperature, wrong_stops
from nearpolicy.launch.inline import LearnerInThread, RoleThread
from nearpolicy.launch.meter import Meter
from nearpolicy.launch.probe import Probe, Scoring
from nearpolicy.messages import pack, unpack
from nearpolicy.models.loading import load_policy, resolve
from nearpolicy.models.lora import LoraPolicy
from nearpolicy.models.weights import digests, named_weights
from nearpolicy.objectives.config import ObjectiveConfig
from nearpolicy.objectives.objective import Objective
from nearpolicy.records import Finish, Row, Segment, StepReport
from nearpolicy.roles import Sampling

SAMPLING = Sampling(temperature=1.0, max_tokens=7, stop_token_ids=(257,))
PROMPTS = [np.random.default_rng(place).integers(3, 256, 70 + place).astype(np.int32) for place in range(3)]
"""Longer than a page of keys and values, so that there is something to find in the cache."""
TENSOR = "model.layers.1.mlp.up_proj.weight"


@dataclass(eq=False)
class Pair:
    """An engine and a learner with the same weights."""

    engine: Engine
    runner: EngineRunner
    learner: LearnerInThread

    @property
    def policy(self):
        return self.learner.inner.policy

    def probe(self, sampling: Sampling) -> Probe:
        return Probe(generator=self.runner, scoring=Scoring(self.learner), sampling=sampling, seed=0)

    async def publish(self) -> None:
        await self.runner.load(await self.learner.weights(None))

    def move(self, by: float = 0.3) -> None:
        """An update."""
        numbers = torch.Generator().manual_seed(self.learner.inner.version)
        with torch.no_grad():
            for parameter in self.policy.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.0 + by * torch.rand(parameter.shape, generator=numbers))
        self.learner.inner.version += 1


@pytest.fixture
def pair(request):
    folder, lora = model_folder(), getattr(request, "param", False)
    policy = None
    if lora:
        model = load_policy(folder, known_to_fit=True).model
        policy = LoraPolicy(model, rank=4, alpha=8.0, target_modules=["q_proj", "up_proj"], seed=1)
        numbers = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for layer in policy.layers.values():
                layer.lora_B.normal_(0.0, 0.2, generator=numbers)
    engine = Engine(load_policy(folder, known_to_fit=True), EngineLimits(32, 200, 512), EXACT)
    runner, thread = EngineRunner(engine), RoleThread("learner", 1)
    yield Pair(engine, runner, LearnerInThread(lambda: learner(folder=folder, policy=policy), thread))
    runner.close()
    thread.close()


async def named(pair: Pair, *, sampling: Sampling = SAMPLING, publish: bool = True):
    if publish:
        await pair.publish()
    probe = pair.probe(sampling)
    return await diagnose(probe, pair.runner, PROMPTS, pair.learner.inner.version, NO_GAP)


# Faults


def hotter_engine(pair: Pair) -> None:
    sample_at(pair, 1.5)


def sample_at(pair: Pair, temperature: float) -> None:
    submit = pair.engine.submit
    pair.engine.submit = lambda request: submit(
        replace(request, sampling=replace(request.sampling, temperature=temperature))
    )


def hotter_learner(pair: Pair) -> None:
    pair.learner.inner.passes._temperature = 0.5


def after_load(change: Callable[[Pair], None]) -> Callable[[Pair], None]:
    """Change the engine's memory behind every load, where the digests have been shown already."""

    def inject(pair: Pair) -> None:
        load = pair.engine.load

        @torch.no_grad()
        def wrong(weights, **how):
            shown = load(weights, **how)
            change(pair)
            return shown

        pair.engine.load = wrong

    return inject


def keep_one_tensor(pair: Pair) -> None:
    before = named_weights(pair.engine.policy.model)[TENSOR].clone()
    after_load(lambda pair: named_weights(pair.engine.policy.model)[TENSOR].copy_(before))(pair)
    pair.move()


def keep_prefixes(pair: Pair) -> None:
    pair.engine.scheduler.prefix_pages.forget_all = lambda: None
    asyncio.run(named(pair))  # computes the prompts under the weights before
    pair.move()


@after_load
def round_weights(pair: Pair) -> None:
    for tensor in named_weights(pair.engine.policy.model).values():
        tensor.copy_(tensor.bfloat16().float())


def narrow_products(side: str) -> Callable[[Pair], None]:
    def inject(pair: Pair) -> None:
        policy = pair.engine.policy if side == "engine" else pair.policy
        for layer in [each for each in policy.modules() if isinstance(each, nn.Linear)]:
            layer.forward = lambda x, w=layer.weight: F.linear(x.bfloat16(), w.bfloat16()).float()

    return inject


def adapter_in_memory(times: float) -> Callable[[Pair], None]:
    def change(pair: Pair) -> None:
        weights = named_weights(pair.engine.policy.model)
        for name, layer in pair.policy.layers.items():
            more = (times - 1.0) * layer.scaling * layer.lora_B @ layer.lora_A
            weights[f"{name}.weight"].add_(more)

    return after_load(change)


def adapter_in_products(pair: Pair) -> None:
    """The engine holds what was published, and adds the adapter again where it computes."""
    layers = dict(pair.engine.policy.model.named_modules())
    for name, ours in pair.policy.layers.items():
        theirs = layers[name]
        theirs.forward = lambda x, w=theirs.weight, o=ours: F.linear(x, w + o.scaling * o.lora_B @ o.lora_A)


def adapter_left_out_by_learner(pair: Pair) -> None:
    pair.policy.switch.on = False


def louder_logits(pair: Pair) -> None:
    head = pair.engine.policy.head

    def other(hidden):
        logits = head(hidden).clone()
        logits[:, ::2] += 0.7
        return logits

    pair.engine.policy.head = other


FAULTS = {
    "another temperature in the engine": (hotter_engine, False, "temperature", {"engine": 1.5, "learner": 1.0}),
    "another temperature at the learner": (hotter_learner, False, "temperature", {"engine": 1.0, "learner": 0.5}),
    "a missed tensor": (keep_one_tensor, False, "missed_sync", {"tensors": [TENSOR]}),
    "a stale prefix": (keep_prefixes, False, "stale_prefix", {"unseen_gap": 0.0}),
    "weights rounded to bfloat16": (round_weights, False, "low_precision", {"side": "engine", "dtype": "bfloat16"}),
    "products in bfloat16": (narrow_products("engine"), False, "low_precision", {"side": "engine"}),
    "products in bfloat16 at the learner": (narrow_products("learner"), False, "low_precision", {"side": "learner"}),
    "an adapter twice in memory": (adapter_in_memory(2.0), True, "adapter", {"times": 2.0, "side": "engine"}),
    "an adapter missing in memory": (adapter_in_memory(0.0), True, "adapter", {"times": 0.0, "side": "engine"}),
    "an adapter twice in products": (adapter_in_products, True, "adapter", {"times": 2.0, "side": "engine"}),
    "an adapter the learner leaves out": (adapter_left_out_by_learner, True, "adapter", {"side": "learner"}),
    "something else": (louder_logits, False, "unknown", {}),
}


@pytest.mark.parametrize(
    ("pair", "fault"), [(lora, fault) for fault, (_, lora, _, _) in FAULTS.items()], indirect=["pair"],
    ids=list(FAULTS),
)  # fmt: skip
def test_a_fault_is_recognised_by_its_name(pair, fault):
    inject, _, cause, numbers = FAULTS[fault]
    inject(pair)
    found = asyncio.run(named(pair))
    assert found.cause == cause, found.text
    for name, value in numbers.items():
        assert found.numbers[name] == (pytest.approx(value, rel=1e-3, abs=1e-9) if isinstance(value, float) else value)


@pytest.mark.parametrize("pair", [False, True], indirect=True, ids=["all weights", "an adapter"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}], ids=["", "cooler"])
def test_what_agrees_is_named_nothing(pair, sampling):
    pair.learner.inner.passes._temperature = sampling.get("temperature", 1.0)
    found = asyncio.run(named(pair, sampling=replace(SAMPLING, **sampling)))
    assert found.cause == "unknown" and found.numbers["gap"] == 0.0 and "is over" in found.text


def test_an_engine_that_completes_nothing_is_said_to(pair):
    with torch.no_grad():
        pair.policy.model.get_output_embeddings().weight.fill_(float("nan"))
    found = asyncio.run(named(pair))
    assert found.cause == "unknown" and "completes none of 3 prompts" in found.text


def test_a_temperature_is_found_where_only_some_tokens_can_be_drawn(pair):
    folder = model_folder()
    inner = learner(folder=folder, objective=Objective(ObjectiveConfig(same_support=True), 12))
    pair.learner.inner = inner
    hotter_engine(pair)
    found = asyncio.run(named(pair, sampling=replace(SAMPLING, top_k=20, record_support=True)))
    assert found.cause == "temperature" and found.numbers["engine"] == pytest.approx(1.5, rel=1e-3)


@pytest.mark.parametrize("pair", [True], indirect=True)
def test_a_diagnosis_leaves_everything_as_it_was(pair):
    adapter_in_products(pair)
    asyncio.run(pair.publish())
    inner = pair.learner.inner
    before = digests(inner.policy.weights()), inner.policy.factors().keys(), torch.random.get_rng_state()
    scaling = [layer.scaling for layer in inner.policy.layers.values()]
    asyncio.run(named(pair, publish=False))
    assert digests(inner.policy.weights()) == before[0] and torch.equal(torch.random.get_rng_state(), before[2])
    assert [layer.scaling for layer in inner.policy.layers.values()] == scaling
    assert not any(module._forward_hooks for module in (*inner.policy.modules(), *pair.engine.policy.modules()))
    assert all(p.grad is None for p in inner.policy.parameters()) and pair.engine.scheduler.is_idle


def test_the_nearest_temperature_is_found_over_the_whole_range():
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(0)) * 3
    for wanted in (0.05, 0.7, 1.0, 1.001, 20.0):
        at = lambda t: torch.log_softmax(logits / t, dim=-1)[:, 3].double().numpy()  # noqa: E731
        assert nearest_temperature(at, at(wanted)) == pytest.approx(wanted, rel=1e-4)


# End tokens

END = 9


def segment(*ids: int, finish: Finish = Finish.STOP, mask: list[bool] | None = None) -> Segment:
    mask = mask or [True] * len(ids)
    return Segment(
        context_ids=np.array([1, 2]), token_ids=np.array(ids), mask=np.array(mask),
        behavior_logprobs=np.zeros(len(ids)), versions=np.zeros(len(ids)), finish=finish,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("segments", "behind", "stopped"),
    [
        ([segment(4, END, 5, finish=Finish.LENGTH)], [END], []),
        ([segment(4, 3)], [], [3]),
        ([segment(4, END), segment(END, 4, 3)], [END], [3]),
    ],
    ids=["goes on behind it", "stops elsewhere", "both"],
)
def test_a_wrong_end_token_is_named(segments, behind, stopped):
    found = wrong_stops(segments, [END])
    assert found.cause == "wrong_stop"
    assert (found.numbers["behind"], found.numbers["stopped"]) == (behind, stopped)


def test_right_ends_are_named_nothing():
    ends_well = [
        segment(4, END), segment(4, 5, finish=Finish.LENGTH), segment(END), segment(4, 3, finish=Finish.ABORTED)
    ]  # fmt: skip
    assert wrong_stops(ends_well, [END, 8]) is None
    observed = segment(4, END, 5, END, mask=[True, True, False, True])
    assert wrong_stops([observed], [END]) is None
    assert wrong_stops([segment(4, 3)], [END], strings=True) is None


# What is no fault


def test_what_is_allowed_depends_on_what_can_be_kept():
    plain, experts = (resolve(f"random:{family}") for family in ("llama", "qwen3_moe"))
    llama, mixture = (load_policy(folder, known_to_fit=True) for folder in (plain, experts))
    assert bound_of("exact", llama).value == 0.0
    assert bound_of("fast", llama) is bound_of("exact", mixture)
    assert bound_of("fast", llama, narrow=True).metric == "kl"


def test_a_number_that_is_none_is_beyond_any_bound():
    assert NO_GAP.exceeded_by({"mismatch/engine_logprob_diff_max": float("nan")})
    assert NO_GAP.exceeded_by({"mismatch/probe_logprob_diff_max": 0.0}) is False
    assert NO_GAP.exceeded_by({"policy/loss": 1.0}) is None


def test_ends_are_looked_at_where_the_learner_is():
    """Whoever directs the run does not fetch the tokens of its batches for it."""

    class Parcel:
        def read(self) -> np.ndarray:
            raise AssertionError("tokens came to the controller")

    class Learner:
        async def call(self, function: Callable, *arguments: object) -> object:
            message = pack(arguments)
            return function(None, *unpack(message.head, [np.array([4, 3], np.int32).view(np.uint8)]))

    there = Distant(Parcel(), 0, (2,), np.dtype(np.int32))
    elsewhere = replace(segment(4, 3), token_ids=there)
    row = Row(group=0, sample=0, segment=elsewhere, trained=np.ones(2, bool), advantages=np.ones(2))
    told: list[dict[str, object]] = []
    meter = Meter(
        probe=Probe(generator=None, scoring=Scoring(Learner()), sampling=SAMPLING, seed=0), engine=None, bound=NO_GAP,
        ends=[END], tokens=0, diagnoses=True, tell=lambda kind, **fields: told.append(fields), say=told.append,
    )  # fmt: skip
    asyncio.run(meter.published(StepReport(version=1, updates=1, metrics={}, rows=(row,)), ended=False))
    assert (told[0]["cause"], told[0]["stopped"]) == ("wrong_stop", [3])
