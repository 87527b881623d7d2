"""What an engine computes with after a publication is what the learner holds, whatever became of the engine."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from driving import learner_logprobs, make_engine, make_request
from learner_cases import EXACT, learner, model_folder, random_rows

from nearpolicy.errors import SyncError
from nearpolicy.generator.runner import EngineRunner
from nearpolicy.learner.checkpoint import load_state, save_checkpoint
from nearpolicy.learner.report import TokenStats
from nearpolicy.learner.step import PolicyLearner
from nearpolicy.learner.tokens import NOTHING_KNOWN
from nearpolicy.models.loading import load_policy
from nearpolicy.models.lora import LoraPolicy
from nearpolicy.models.weights import digests, named_weights
from nearpolicy.roles import Completion, Request
from nearpolicy.sync.config import SyncConfig
from nearpolicy.sync.device_handles import DeviceHandlesReceiver, DeviceHandlesSender
from nearpolicy.sync.publisher import Publisher
from nearpolicy.sync.shipping import load_arrived, ship
from nearpolicy.sync.transports import make_receiver, make_sender


class Direct:
    """A learner on this thread."""

    def __init__(self, own: PolicyLearner) -> None:
        self.own = own

    async def weights(self, parent):
        return self.own.weights(parent)


def plain_sgd_step(own: PolicyLearner, rate: float) -> None:
    rows = random_rows(own.version)
    own.forward_backward(range(len(rows)), own.objective, rows, NOTHING_KNOWN, TokenStats())
    own.normalise()
    with torch.no_grad():
        for parameter in own.policy.parameters():
            parameter.sub_(rate * parameter.grad)
    own.forget_gradient()
    own.version += 1


async def sampled(runner: EngineRunner, request: Request) -> list[Completion]:
    return sorted([c async for c in runner.submit(request)], key=lambda c: c.sample)


@torch.no_grad()
def difference(own: PolicyLearner, request: Request, completions: list[Completion]) -> float:
    """Mean absolute difference of the log-probabilities that engine and learner give what was sampled."""
    engine = torch.cat([torch.from_numpy(c.logprobs.copy()) for c in completions])
    return float((learner_logprobs(own.policy, EXACT, 1, request, completions) - engine).abs().mean())


@pytest.mark.parametrize("before_it", ["nothing", "pause", "restart"])
def test_after_every_sync_the_engine_provably_holds_the_weights_of_the_learner(before_it):
    """K22: one plain SGD step that moves log-probabilities by more than 0.01, three times."""
    own = learner()

    def started() -> EngineRunner:
        return EngineRunner(make_engine(load_policy(model_folder(), known_to_fit=True), EXACT))

    async def scenario() -> None:
        runner = started()
        try:
            for step in range(3):
                request = make_request(12, n=4, max_tokens=9, id=str(step))
                record = await Publisher(Direct(own), [runner], timeout_s=30).publish()
                completions = await sampled(runner, request)
                assert {v for c in completions for v in c.versions.tolist()} == {step}
                assert difference(own, request, completions) <= 1e-4
                assert digests(named_weights(runner._engine.policy.model)) == record.digests
                plain_sgd_step(own, rate=3.0)
                assert difference(own, request, completions) > 0.01  # what old weights would show
                if before_it == "pause":
                    await runner.pause()
                    await runner.resume()
                elif before_it == "restart":
                    runner.close()
                    runner = started()
        finally:
            runner.close()

    asyncio.run(scenario())


class Shipping:
    """A learner whose tensors leave by a transport, and a generator that gets them by it."""

    def __init__(
        self, own: PolicyLearner, runner: EngineRunner, transport: str, path: Path, adapter_only: bool
    ) -> None:
        config = SyncConfig(timeout_s=60, transport=transport, **({"path": str(path)} if transport == "files" else {}))
        self.own, self.runner, self.adapter_only = own, runner, adapter_only
        self.sender = make_sender(config, transport, run="run", folder=path)
        self.receiver = make_receiver(transport, "generator 0")

    async def weights(self, parent):
        weights = self.own.weights(parent)
        return ship(replace(weights, tensors={}) if self.adapter_only else weights, self.sender)

    async def deliver(self, weights, members, awaited):
        return await asyncio.to_thread(self.sender.deliver, weights.shipment, members, awaited)

    async def load(self, weights):
        assert not weights.tensors and weights.adapter is None
        return await load_arrived(self.runner.load, weights, self.receiver)


@pytest.mark.parametrize("what", ["all", "merged", "adapter_only"])
@pytest.mark.parametrize("transport", ["shared_memory", "broadcast", "device_handles", "files"])
def test_whatever_way_the_weights_take_the_engine_holds_those_of_the_learner(transport, what, tmp_path):
    policy, adapter_only = None, what == "adapter_only"
    if what != "all":
        model = load_policy(model_folder(), known_to_fit=True).model
        policy = LoraPolicy(model, rank=2, alpha=4.0, target_modules=("q_proj", "down_proj"), seed=0)
    own = learner(policy=policy) if policy else learner()

    async def scenario() -> None:
        runner = EngineRunner(make_engine(load_policy(model_folder(), known_to_fit=True), EXACT))
        way = Shipping(own, runner, transport, tmp_path, adapter_only)
        publisher = Publisher(way, [way], timeout_s=60, adapter_only=adapter_only, deliver=way.deliver)
        try:
            for version in range(3):
                record = await publisher.publish()
                assert record.version == version and publisher.may_sample("generator 0")
                assert digests(named_weights(runner._engine.policy.model)) == own.weights(None).digests
                with torch.no_grad():
                    for parameter in own.policy.parameters():
                        if parameter.requires_grad:
                            parameter.add_(0.01)
                own.version += 1
        finally:
            runner.close()
            way.sender.close()
            way.receiver.close()

    asyncio.run(scenario())


def test_an_engine_whose_rank_is_lost_in_the_middle_samples_nothing_until_it_has_whole_weights(monkeypatch):
    """Buckets of 4 KB: the first ones are in the model when the rank fails."""
    own, filled = learner(), []
    sender = DeviceHandlesSender(timeout_s=60, bucket_mb=4096 / 2**20)
    receiver = DeviceHandlesReceiver("generator 0")
    plain = sender._fill

    def fill(memory, begin, parts):
        filled.append(begin)
        if len(filled) == 3:
            raise RuntimeError("it is lost")
        plain(memory, begin, parts)

    monkeypatch.setattr(sender, "_fill", fill)

    async def published(runner: EngineRunner) -> None:
        shipped = ship(own.weights(None), sender)
        delivery = asyncio.to_thread(sender.deliver, shipped.shipment, ["generator 0"])
        load = load_arrived(runner.load, shipped, receiver)
        for found in await asyncio.gather(load, delivery, return_exceptions=True):
            if isinstance(found, Exception):
                raise found

    async def scenario() -> None:
        runner = EngineRunner(make_engine(load_policy(model_folder(), known_to_fit=True), EXACT))
        try:
            await published(runner)
        except SyncError as error:
            assert "the rank that hands version 0 over is gone, or gave up" in str(error)
        else:
            raise AssertionError("a version of which three buckets came was taken")
        waiting = asyncio.create_task(sampled(runner, make_request(12, n=2, max_tokens=5, id="0")))
        plain_sgd_step(own, rate=3.0)
        await published(runner)
        completions = await waiting
        assert {v for c in completions for v in c.versions.tolist()} == {1}
        assert digests(named_weights(runner._engine.policy.model)) == own.weights(None).digests
        runner.close()

    asyncio.run(scenario())
    assert len(filled) > 3 + 5
    receiver.close()
    sender.close()


def test_sequences_that_last_longer_than_they_are_waited_for_do_not_cost_the_engine_the_version(monkeypatch):
    """The engine ends its last pass 0.1 s after the time that its rank counts."""
    own, comes = learner(), threading.Event()
    sender = DeviceHandlesSender(timeout_s=1.0)
    receiver = DeviceHandlesReceiver("generator 0")
    plain = sender._come

    def come(*names):
        comes.set()
        return plain(*names)

    monkeypatch.setattr(sender, "_come", come)

    async def scenario() -> None:
        runner = EngineRunner(make_engine(load_policy(model_folder(), known_to_fit=True), EXACT), sync_timeout_s=1.1)
        await runner.load(own.weights(None))
        endless = asyncio.create_task(sampled(runner, make_request(12, max_tokens=6000, id="0")))
        while not (runner._engine.scheduler.has_started_work or endless.done()):
            await asyncio.sleep(0)
        plain_sgd_step(own, rate=3.0)
        shipped = ship(own.weights(0), sender)
        delivery = asyncio.create_task(asyncio.to_thread(sender.deliver, shipped.shipment, ["generator 0"]))
        await asyncio.to_thread(comes.wait, 60)
        assert await load_arrived(runner.load, shipped, receiver) == shipped.digests
        assert await delivery == ["generator 0"] and not endless.done()
        endless.cancel()
        runner.close()

    asyncio.run(scenario())
    receiver.close()
    sender.close()


def base_of_ones(folder) -> None:
    policy = load_policy(model_folder(), known_to_fit=True)
    with torch.no_grad():
        for name, tensor in named_weights(policy.model).items():
            if name.endswith("q_proj.weight"):
                tensor.fill_(1.0)
    policy.save_pretrained(folder)


@pytest.mark.parametrize("adapter_only", [False, True])
def test_base_plus_adapter_is_applied_exactly_once_also_right_after_a_resume(tmp_path, adapter_only):
    """K24: base 1.0 and a contribution of 0.5 are 1.5 in the engine, before and after; the first rollout carries the
    version of the resume."""
    base = tmp_path / "base"
    base.mkdir()
    base_of_ones(base)

    def begun() -> PolicyLearner:
        model = load_policy(base, known_to_fit=True).model
        return learner(policy=LoraPolicy(model, rank=1, alpha=1.0, target_modules=("q_proj",), seed=0))

    async def shown(own: PolicyLearner) -> None:
        runner = EngineRunner(make_engine(load_policy(base, known_to_fit=True), EXACT))
        try:
            for again in range(2):
                await Publisher(Direct(own), [runner], timeout_s=30, adapter_only=adapter_only).publish()
                held = named_weights(runner._engine.policy.model)
                effective = {float(v) for n, t in held.items() if n.endswith("q_proj.weight") for v in t.unique()}
                assert effective == {1.5}
                request = make_request(12, n=4, max_tokens=9, id=str(again))
                completions = await sampled(runner, request)
                assert {v for c in completions for v in c.versions.tolist()} == {3}
                assert difference(own, request, completions) <= 1e-4
        finally:
            runner.close()

    own = begun()
    with torch.no_grad():
        for layer in own.policy.layers.values():
            layer.lora_A.fill_(0.5)
            layer.lora_B.fill_(1.0)
    own.version = 3
    asyncio.run(shown(own))
    path = save_checkpoint(own, tmp_path / "checkpoints", keep_last=1)
    resumed = begun()
    load_state(resumed, path)
    asyncio.run(shown(resumed))


@pytest.mark.parametrize("both_names", [False, True])
def test_tied_weights_stay_tied_across_a_sync(both_names):
    """K25: embedding [0, 0] goes from 0.1 to 0.2; the head of the engine follows, and the engine proves it."""
    folder = model_folder(tie_word_embeddings=True)
    own, engine = learner(folder=folder), make_engine(load_policy(folder, known_to_fit=True), EXACT)
    for value in (0.1, 0.2):
        with torch.no_grad():
            own.policy.model.get_input_embeddings().weight[0, 0] = value
        weights = own.weights(None)
        if both_names:
            embedding = own.policy.model.get_input_embeddings().weight.detach()
            names = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), embedding)
            weights = replace(weights, tensors={**weights.tensors, **names})
        assert engine.load(weights) == own.weights(None).digests
        model = engine.policy.model
        held = [m.weight[0, 0].item() for m in (model.get_input_embeddings(), model.get_output_embeddings())]
        assert held == pytest.approx([value, value], abs=1e-7)
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
        own.version += 1
