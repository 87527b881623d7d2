"""An adapter is PEFT's in value and place, its base is never written to, and its layers give the engine's bits."""

from __future__ import annotations

import families
import pytest
import torch
import torch.nn.functional as F
from driving import learner_logprobs, make_engine, make_request, run
from torch import nn

from nearpolicy.errors import ModelError
from nearpolicy.models.loading import load_policy
from nearpolicy.models.lora import LoraLinear, LoraPolicy, Switch, merged
from nearpolicy.models.policy import PolicyModel
from nearpolicy.models.rows import Node, RowContext
from nearpolicy.models.weights import digests, load_weights, named_weights

ALL = ("all-linear",)
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
TARGETS = {family: LATENT if "deepseek" in family else ALL for family in families.FIT}
"""What can have an adapter that PEFT loads again."""


def adapted(
    family: str = "llama", *, rank: int = 4, alpha: float = 8.0, target_modules=ALL, dtype=torch.float32, **options
) -> LoraPolicy:
    model = load_policy(families.folder(family, **options), dtype, known_to_fit=True).model
    return LoraPolicy(model, rank=rank, alpha=alpha, target_modules=target_modules)


@torch.no_grad()
def stir(policy: LoraPolicy, seed: int = 0, size: float = 0.1) -> LoraPolicy:
    """Random factors, as after training."""
    generator = torch.Generator().manual_seed(seed)
    policy.load_factors({n: torch.randn(t.shape, generator=generator) * size for n, t in policy.factors().items()})
    return policy


@torch.no_grad()
def scores(policy: PolicyModel, ids: torch.Tensor) -> torch.Tensor:
    """[T] log-probabilities of a sequence's own next tokens."""
    context = RowContext([Node(0, len(ids))], len(ids))
    return policy(ids, context.positions, context, torch.arange(len(ids)), ids.roll(-1)).logprobs


def with_peft(family: str, policy: LoraPolicy, **peft_options):
    """A plain model of transformers with PEFT's layers and this policy's factors, in float64."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(families.folder(family), attn_implementation="eager")
    options = {"r": policy.rank, "lora_alpha": policy.alpha, "target_modules": "all-linear"} | peft_options
    model = get_peft_model(plain, LoraConfig(task_type="CAUSAL_LM", **options)).double().eval()
    state = model.state_dict()
    for name, factor in policy.factors().items():
        state[f"base_model.model.{name}.default.weight"].copy_(factor)
    return model


@pytest.mark.parametrize(("rank", "alpha"), [(1, 1.0), (4, 8.0), (16, 2.5)])
def test_rank_and_alpha_give_what_they_give_in_peft(rank, alpha):
    policy, ids = stir(adapted(rank=rank, alpha=alpha)), families.random_ids(30, 1)
    with torch.no_grad():
        logits = with_peft("llama", policy)(ids[None]).logits[0]
    expected = torch.log_softmax(logits, -1).gather(1, ids.roll(-1)[:, None])[:, 0]
    found = scores(policy.double(), ids)
    assert float((found - expected).abs().max()) < 1e-6
    assert float((scores(policy.without_adapter(), ids) - expected).abs().max()) > 0.1


@pytest.mark.parametrize("family", [family for family in families.DENSE if "deepseek" not in family])
def test_all_linear_means_the_layers_that_it_means_in_peft(family):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(families.folder(family), attn_implementation="eager")
    model = get_peft_model(plain, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    theirs = {name.removeprefix("base_model.model.") for name, m in model.named_modules() if hasattr(m, "lora_A")}
    assert set(adapted(family).layers) == theirs


@pytest.mark.parametrize("target", [("q_proj",), ("self_attn.v_proj", "up_proj"), ("model.layers.1.mlp.down_proj",)])
def test_names_mean_the_layers_that_they_mean_in_peft(target):
    policy = adapted(target_modules=target)
    theirs = with_peft("llama", policy, target_modules=list(target))
    found = {name.removeprefix("base_model.model.") for name, m in theirs.named_modules() if hasattr(m, "lora_A")}
    assert set(policy.layers) == found


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", families.FIT)
def test_an_engine_with_the_published_weights_gives_the_bits_of_the_adapted_policy(family, threads):
    """Every family that fits; mixtures of experts agree as far as they do without an adapter."""
    policy, engine = stir(adapted(family, target_modules=TARGETS[family])), families.fresh(family)
    numerics = families.exact_numerics(engine, threads)
    load_weights(engine.model, policy.weights())
    torch.set_num_threads(threads)
    request = make_request(20, n=4, max_tokens=12)
    outcome = run(make_engine(engine, numerics, threads=threads), [request])
    completions = [outcome["r", i] for i in range(4)]
    sampled = torch.cat([torch.from_numpy(c.logprobs.copy()) for c in completions])
    with torch.no_grad():
        found = learner_logprobs(policy, numerics, threads, request, completions)
        without = learner_logprobs(policy.without_adapter(), numerics, threads, request, completions)
    if family in families.DENSE:
        assert torch.equal(found, sampled)
    else:
        assert float((found - sampled).abs().max()) <= 1e-5
    assert float((without - sampled).abs().max()) > 0.01


def test_the_merged_matrix_is_right_and_has_the_same_bits_on_any_number_of_threads():
    generator = torch.Generator().manual_seed(0)
    for out, into, rank in ((576, 192, 16), (52, 101, 8), (64, 64, 1)):
        base, a, b = (torch.randn(size, generator=generator) for size in ((out, into), (rank, into), (out, rank)))
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(merged(base, a, b, 0.5))
            assert torch.get_num_threads() == threads
        assert torch.equal(*found)
        expected = base.double() + 0.5 * b.double() @ a.double()
        assert torch.allclose(found[0].double(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_a_layers_gradients_are_those_of_plain_autograd_in_float64(bias):
    generator = torch.Generator().manual_seed(0)
    layer = LoraLinear(nn.Linear(6, 5, bias=bias).double(), 2, 1.7, Switch(), generator).requires_grad_(False)
    x, b, g = (torch.randn(size, generator=generator, dtype=torch.float64) for size in ((3, 4, 6), (5, 2), (3, 4, 5)))
    layer.lora_B.copy_(b)
    inputs = [x.requires_grad_(), layer.lora_A.requires_grad_(), layer.lora_B.requires_grad_()]
    plain = F.linear(x, layer.weight + 1.7 * layer.lora_B @ layer.lora_A, layer.bias)
    assert torch.allclose(layer(x), plain, rtol=1e-12, atol=0)
    for found, expected in zip(*(torch.autograd.grad(out, inputs, g) for out in (layer(x), plain)), strict=True):
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-14)


def test_base_plus_adapter_is_applied_exactly_once_however_often_it_is_published():
    """K24: base 1.0 and a contribution of 0.5 are 1.5, every time."""
    policy = adapted(rank=1, alpha=1.0, target_modules=("q_proj",))
    layers = policy.layers.values()
    with torch.no_grad():
        for layer in layers:
            layer.weight.fill_(1.0)
            layer.lora_A.fill_(0.5)
            layer.lora_B.fill_(1.0)
    for _ in range(3):
        published = policy.weights()
        assert all((published[f"{name}.weight"] == 1.5).all() for name in policy.layers)
        assert all((layer.weight == 1.0).all() for layer in layers)


def test_an_adapter_begins_as_no_change_and_reading_its_weights_changes_nothing():
    base = digests(named_weights(families.fresh().model))
    policy = adapted()
    assert digests(policy.weights()) == base
    stir(policy)
    for seed in range(3):
        stir(policy, seed)
        scores(policy, families.random_ids(9, 0))
        shown = digests(policy.weights())
    changed = {name for name in base if shown[name] != base[name]}
    assert changed == {f"{name}.weight" for name in policy.layers}
    assert policy.base_fingerprint == adapted().base_fingerprint


def test_where_an_adapter_begins_depends_on_the_seed_alone():
    def begun(seed: int, targets=ALL) -> dict[str, str]:
        model = families.fresh().model
        return digests(LoraPolicy(model, rank=4, alpha=8.0, target_modules=targets, seed=seed).factors())

    torch.manual_seed(5)
    first = begun(0)
    torch.manual_seed(6)
    assert begun(0) == first
    assert begun(1) != first
    assert begun(0, ("v_proj", "q_proj")) == begun(0, ("q_proj", "v_proj"))


def test_the_base_policy_is_the_model_without_its_adapter_and_leaves_it_on():
    policy, ids = stir(adapted()), families.random_ids(20, 2)
    before, base = scores(policy, ids), policy.without_adapter()
    assert torch.equal(scores(base, ids), scores(families.shared(), ids))
    assert torch.equal(scores(policy, ids), before)
    context = RowContext([Node(0, len(ids))], len(ids))
    assert not base(ids, context.positions, context, torch.arange(20), ids.roll(-1)).logprobs.requires_grad


def test_the_output_head_can_have_an_adapter_where_it_has_weights_of_its_own():
    policy = stir(adapted(tie_word_embeddings=False, target_modules=("all-linear", "lm_head")))
    ids = families.random_ids(20, 2)
    engine = families.fresh(tie_word_embeddings=False)
    assert torch.equal(scores(policy.without_adapter(), ids), scores(engine, ids))
    load_weights(engine.model, policy.weights())
    assert torch.equal(scores(policy, ids), scores(engine, ids))
    assert "lm_head" in policy.layers


def test_in_bfloat16_the_adapter_is_float32_and_the_engine_still_has_the_policys_bits():
    policy = stir(adapted(dtype=torch.bfloat16))
    assert {factor.dtype for factor in policy.factors().values()} == {torch.float32}
    engine = load_policy(families.folder("llama"), torch.bfloat16, known_to_fit=True)
    load_weights(engine.model, policy.weights())
    ids = families.random_ids(20, 2)
    assert torch.equal(scores(policy, ids), scores(engine, ids))


def test_only_factors_are_trained():
    policy = adapted()
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert trained == {f"model.{name}" for name in policy.factors()}
    assert len(trained) == 2 * 7 * 2


@pytest.mark.parametrize(
    ("family", "options", "target", "says"),
    [
        ("llama", {}, "q_porj", "no module `q_porj`; its linear layers are down_proj, gate_proj, k_proj, lm_head, o_"),
        ("llama", {}, "proj", "no module `proj`"),
        ("llama", {}, "embed_tokens", "`embed_tokens` is a Embedding, and only linear layers can have an adapter"),
        ("llama", {}, "mlp", "`mlp` is a LlamaMLP, and only linear"),
        ("llama", {}, "lm_head", "`lm_head` has one weight with model.embed_tokens.weight"),
        ("gpt2", {}, "c_attn", "`c_attn` is a Conv1D"),
        ("deepseek_v3", {}, "down_proj", "`down_proj` of a mixture of experts cannot have one that PEFT loads again"),
    ],
)
def test_targets_that_cannot_have_an_adapter_are_refused_by_name(family, options, target, says):
    from nearpolicy.models.loading import resolve

    folder = families.folder(family) if family in families.FIT else resolve(f"random:{family}")
    model = load_policy(folder, known_to_fit=True).model
    with pytest.raises(ModelError) as raised:
        LoraPolicy(model, rank=4, alpha=8.0, target_modules=("o_proj", target))
    assert says in str(raised.value)


def test_all_that_is_wrong_with_targets_is_said_at_once_and_the_model_is_left_as_it_was():
    model = families.fresh().model
    before = [type(m) for m in model.modules()]
    with pytest.raises(ModelError, match=r"rank 33 is more than `k_proj` \[32, 64\] can have.*rank 33.*`v_proj`"):
        LoraPolicy(model, rank=33, alpha=8.0, target_modules=ALL)
    assert [type(m) for m in model.modules()] == before
    assert all(p.requires_grad for p in model.parameters())


def test_factors_of_another_adapter_are_refused_by_name_and_shape():
    policy = adapted()
    with pytest.raises(ModelError, match=r"down_proj\.lora_A is \(2, 128\) there and \(4, 128\) here"):
        policy.load_factors(adapted(rank=2).factors())
    with pytest.raises(ModelError, match=r"lora_A is missing there and \(4, "):
        policy.load_factors(adapted(target_modules=("v_proj",)).factors())
