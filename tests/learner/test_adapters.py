"""A learner that trains an adapter: its gradient is that of plain autograd, its engine has its bits, its base stays."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import families
import numpy as np
import pytest
import torch
from driving import learner_logprobs, make_engine, make_request, run
from learner_cases import EXACT, batch_of, learner, model_folder, random_rows, reference_logprobs
from test_lora import TARGETS, stir
from test_lora import adapted as lora_of

from nearpolicy.errors import ModelError, SyncError
from nearpolicy.generator.engine import Engine
from nearpolicy.learner.adapters import save_adapter
from nearpolicy.learner.checkpoint import load_saved_weights, load_state, save_checkpoint, save_weights
from nearpolicy.learner.report import TokenStats
from nearpolicy.learner.step import PolicyLearner
from nearpolicy.learner.tokens import NOTHING_KNOWN
from nearpolicy.models.loading import load_policy
from nearpolicy.models.lora import LoraPolicy
from nearpolicy.models.weights import digests
from nearpolicy.objectives.config import ObjectiveConfig
from nearpolicy.objectives.objective import Supervised
from nearpolicy.sync.publisher import Publisher


def adapted_policy(folder=None, *, dtype=torch.float32, rank=4, alpha=8.0, targets=("all-linear",)) -> LoraPolicy:
    model = load_policy(folder or model_folder(), dtype, known_to_fit=True).model
    return LoraPolicy(model, rank=rank, alpha=alpha, target_modules=targets, seed=1)


def adapted(policy: LoraPolicy | None = None, **options) -> PolicyLearner:
    """A learner with an adapter on every linear layer, unless a policy is given."""
    return learner(policy=policy or adapted_policy(), **{"learning_rate": 1e-2} | options)


def trained(steps: int, own: PolicyLearner | None = None) -> PolicyLearner:
    own = own or adapted()
    for step in range(own.version, steps):
        own.step(batch_of(random_rows(step, groups=2), step=step))
    return own


def factors(own: PolicyLearner) -> torch.Tensor:
    return torch.cat([factor.flatten() for factor in own.policy.factors().values()]).clone()


def gradient_of(own: PolicyLearner, rows) -> torch.Tensor:
    """Of one update, divided."""
    own.forward_backward(range(len(rows)), own.objective, rows, NOTHING_KNOWN, TokenStats())
    own.normalise()
    found = torch.cat([p.grad.flatten() for p in own.policy.parameters() if p.requires_grad])
    own.forget_gradient()
    return found


def plain_gradient(policy: LoraPolicy, rows) -> torch.Tensor:
    """The same in float64, by autograd through a model of transformers whose matrices are W0 + scaling * B @ A."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float64, attn_implementation="eager")
    own = {name: factor.double().requires_grad_() for name, factor in policy.factors().items()}
    changed = {
        f"{name}.weight": model.get_submodule(name).weight.detach()
        + policy.alpha / policy.rank * own[f"{name}.lora_B"] @ own[f"{name}.lora_A"]
        for name in policy.layers
    }
    total, tokens = torch.zeros((), dtype=torch.float64), sum(int(row.trained.sum()) for row in rows)

    def call(ids):
        return torch.func.functional_call(model, changed, (ids,))

    for row in rows:
        kept = torch.from_numpy(row.trained.copy())
        logprobs = reference_logprobs(call, row)[kept]
        behavior = torch.from_numpy(row.segment.behavior_logprobs.astype(np.float64))[kept]
        advantages = torch.from_numpy(row.advantages.astype(np.float64))[kept]
        weight = (logprobs.detach() - behavior).exp().clamp(max=2.0)
        total = total - (weight * advantages * logprobs).sum() / tokens
    total.backward()
    return torch.cat([factor.grad.flatten() for factor in own.values()])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
@pytest.mark.parametrize("targets", [("all-linear",), ("v_proj", "down_proj")])
def test_the_gradient_of_a_and_b_is_that_of_plain_autograd(dtype, tolerance, targets):
    """Norms and rotations are float32 inside transformers, so that float64 is not reached here."""
    own = trained(2, adapted(adapted_policy(targets=targets, rank=3, alpha=6.0)))
    own = adapted(own.policy.to(dtype))
    rows = random_rows(7)
    expected = plain_gradient(own.policy, rows)
    assert torch.linalg.norm(gradient_of(own, rows).double() - expected) <= tolerance * torch.linalg.norm(expected)


@pytest.mark.parametrize("change", [{"max_tokens_per_microbatch": 64}, {"activation_checkpointing": True}])
def test_the_gradient_does_not_depend_on_how_it_is_computed(change):
    rows = random_rows(7)
    usual = gradient_of(adapted(trained(2).policy), rows)
    other = gradient_of(adapted(trained(2).policy, **change), rows)
    assert torch.linalg.norm(usual - other) <= 1e-5 * torch.linalg.norm(usual)


def test_an_update_has_the_same_bits_on_two_threads():
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(factors(trained(3, adapted(threads=threads))))
    assert torch.equal(*found)


def test_only_the_adapter_has_gradients_and_moments():
    own = trained(1)
    count = sum(factor.numel() for factor in own.policy.factors().values())
    moments = own.optimizer.state_dict()["adamw"]["state"].values()
    assert sum(of["exp_avg"].numel() for of in moments) == count < 20_000
    rows = random_rows(1)
    own.forward_backward(range(len(rows)), own.objective, rows, NOTHING_KNOWN, TokenStats())
    assert all((p.grad is not None) == p.requires_grad for p in own.policy.parameters())
    own.forget_gradient()


@pytest.mark.parametrize("adapter_only", [False, True])
def test_after_every_publication_the_engine_has_the_learners_bits_and_the_base_is_untouched(adapter_only):
    """K24, and that nothing drifts: the result is that of one merge, after three publications as after one."""
    own, folder = adapted(), model_folder()
    base, events = own.policy.base_fingerprint, []
    engine = make_engine(load_policy(folder, known_to_fit=True), EXACT)
    told = lambda kind, **numbers: events.append((kind, numbers))  # noqa: E731
    publisher = Publisher(Direct(own), [Loads(engine)], timeout_s=9, adapter_only=adapter_only, on_event=told)
    for step in range(3):
        trained(step + 1, own)
        record = asyncio.run(publisher.publish())
        request = make_request(12, n=4, max_tokens=9, id=str(step))
        outcome = run(engine, [request])
        completions = [outcome[request.id, i] for i in range(4)]
        sampled = torch.cat([torch.from_numpy(c.logprobs.copy()) for c in completions])
        with torch.no_grad():
            assert torch.equal(learner_logprobs(own.policy, EXACT, 1, request, completions), sampled)
        assert record.fingerprint == own.weights(None).record.fingerprint
        assert own.policy.base_fingerprint == base
    sent = [numbers["bytes"] for kind, numbers in events if kind == "export"]
    whole = sum(p.nbytes for p in engine.policy.parameters())
    assert sent == 3 * ([sum(f.nbytes for f in own.policy.factors().values())] if adapter_only else [whole])
    assert engine.base_bytes == (sum(x.weight.nbytes for x in own.policy.layers.values()) if adapter_only else 0)


class Direct:
    """A learner on this thread."""

    def __init__(self, own: PolicyLearner) -> None:
        self.own = own

    async def weights(self, parent):
        return self.own.weights(parent)


class Loads:
    """An engine on this thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def load(self, weights):
        return self.engine.load(weights)


def only_the_adapter(own: PolicyLearner):
    return replace(own.weights(None), tensors={})


def test_an_adapter_that_arrives_otherwise_than_it_was_sent_is_refused_by_name():
    own = trained(1)
    weights = only_the_adapter(own)
    name = next(iter(weights.adapter.factors))
    weights.adapter.factors[name][1][0, 0] += 1.0
    engine = make_engine(load_policy(model_folder(), known_to_fit=True), EXACT)
    with pytest.raises(SyncError, match=rf"the adapter that arrived for '{name}' does not hold version 1.*'B' differ"):
        engine.load(weights)


def test_an_adapter_on_another_base_is_not_proved():
    """An engine that was loaded with another model, or got whole weights in between, would compute something else."""
    own = trained(1)
    engine = make_engine(load_policy(model_folder(), known_to_fit=True), EXACT)
    engine.load(own.weights(None))  # the adapter is in there
    with pytest.raises(SyncError, match="the engine does not hold version 1"):
        engine.load(only_the_adapter(own))
    narrow = make_engine(load_policy(model_folder(hidden_size=32), known_to_fit=True), EXACT)
    with pytest.raises(SyncError, match="does not fit what is here"):
        narrow.load(only_the_adapter(own))


@pytest.mark.parametrize(("kl_in", "estimator"), [("loss", "k3"), ("loss", "full"), ("reward", "k1")])
def test_the_kl_to_the_policy_without_its_adapter_is_0_at_first_and_grows(kl_in, estimator):
    objective = ObjectiveConfig(kl_coef=0.1, kl_in=kl_in, kl_estimator=estimator, reference="adapter_off")
    own = adapted(adapted_policy(targets=("all-linear", "lm_head"), folder=untied()), objective=objective)
    own.reference = own.policy.without_adapter()
    copy = learner(policy=load_policy(untied(), known_to_fit=True))
    for step in range(3):
        rows = random_rows(step, groups=2)
        known = own.known_at_start(rows)
        expected = copy.annotate(rows)
        assert all(np.array_equal(a, b) for a, b in zip(known.reference, expected, strict=True))
        if kl_in == "loss":
            kl = own.step(batch_of(rows, step=step)).metrics["policy/kl_reference"]
            assert kl == pytest.approx(0.0, abs=1e-9) if step == 0 else kl > 1e-4
        else:
            gaps = [np.abs(o - r).max() for o, r in zip(own.annotate(rows), known.reference, strict=True)]
            assert max(gaps) == 0.0 if step == 0 else max(gaps) > 1e-3
            own.supervised_step(rows, Supervised(), 1e-2)
            own.version += 1


def untied():
    return model_folder(tie_word_embeddings=False)


def test_after_a_warm_start_the_initial_policy_is_a_copy_with_the_adapter_in_it():
    own = adapted(objective=ObjectiveConfig(kl_coef=0.1))
    own.reference = load_policy(model_folder(), known_to_fit=True).requires_grad_(False)
    own.supervised_step(random_rows(3), Supervised(), 1e-2)
    own.begin()
    assert digests(own.reference.weights()) == digests(own.policy.weights())
    assert own.step(batch_of(random_rows(4))).metrics["policy/kl_reference"] == pytest.approx(0.0, abs=1e-9)


def logits_of(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids[None]).logits[0]


def test_a_checkpoint_loads_as_a_plain_model_and_its_adapter_with_peft(tmp_path):
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM

    own = trained(2, adapted(adapted_policy(alpha=2.5)))
    path = save_checkpoint(own, tmp_path, keep_last=1)
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    for name, tensor in own.policy.weights().items():
        assert torch.equal(plain.state_dict()[name], tensor), name
    ids = torch.arange(3, 40)
    expected = logits_of(plain, ids)
    base = AutoModelForCausalLM.from_pretrained(model_folder(), attn_implementation="eager")
    assert (logits_of(base, ids) - expected).abs().max() > 0.01
    assert (logits_of(PeftModel.from_pretrained(base, path / "adapter"), ids) - expected).abs().max() < 1e-4
    alone = AutoPeftModelForCausalLM.from_pretrained(path / "adapter", attn_implementation="eager")
    assert (logits_of(alone, ids) - expected).abs().max() < 1e-4
    config = json.loads((path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["bias"], config["lora_dropout"]) == (4, 2.5, "none", 0.0)


@pytest.mark.parametrize("family", TARGETS)
def test_peft_loads_the_adapter_of_every_family(family, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    policy = stir(lora_of(family, target_modules=TARGETS[family]))
    save_adapter(policy, tmp_path / "adapter")
    policy.save_pretrained(tmp_path / "merged")
    ids = families.random_ids(20, 1)
    plain, merged = (
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        for folder in (families.folder(family), tmp_path / "merged")
    )
    before, expected = logits_of(plain, ids), logits_of(merged, ids)
    found = logits_of(PeftModel.from_pretrained(plain, tmp_path / "adapter"), ids)
    assert (found - expected).abs().max() < 1e-4 < (before - expected).abs().max()


def test_training_goes_on_bit_for_bit_from_the_base_and_the_saved_state(tmp_path):
    at_once, first = trained(4), trained(2)
    path = save_checkpoint(first, tmp_path, keep_last=1)
    second = adapted()
    load_state(second, path)
    assert torch.equal(factors(second), factors(first))
    trained(4, second)
    assert torch.equal(factors(second), factors(at_once))
    assert second.weights(None).record == at_once.weights(None).record


def test_a_checkpoints_own_weights_are_no_base_for_its_adapter(tmp_path):
    """K24: the adapter would count twice."""
    path = save_checkpoint(trained(2), tmp_path, keep_last=1)
    with pytest.raises(ModelError, match=r"load the model that the run began with.*would count twice"):
        load_state(adapted(adapted_policy(folder=path)), path)


def test_a_state_of_another_kind_of_training_is_refused(tmp_path):
    with_adapter = save_checkpoint(trained(1), tmp_path / "with", keep_last=1)
    without = save_checkpoint(trained(1, learner()), tmp_path / "without", keep_last=1)
    with pytest.raises(ModelError, match="of a run with an adapter, and this learner has none"):
        load_state(learner(), with_adapter)
    with pytest.raises(ModelError, match="of a run without an adapter, and this learner has one"):
        load_state(adapted(), without)
    with pytest.raises(ModelError, match=r"set learner\.lora\.rank and target_modules as they were"):
        load_state(adapted(adapted_policy(rank=2)), with_adapter)


def test_kept_versions_hold_the_adapter_alone_and_come_back(tmp_path):
    own = trained(2)
    save_weights(own, tmp_path / "version-2.safetensors")
    again = adapted()
    load_saved_weights(again, tmp_path / "version-2.safetensors")
    assert again.weights(None).digests == own.weights(None).digests
    whole = sum(p.nbytes for p in own.policy.parameters())
    assert (tmp_path / "version-2.safetensors").stat().st_size < 0.5 * whole
