"""A packed row computes, and differentiates, what separate plain forwards compute."""

from __future__ import annotations

import families
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nearpolicy.models.attention import NAME, PAGE, QUERY_CHUNK
from nearpolicy.models.policy import HEAD_CHUNK, chosen_rows, log_softmax, score_tokens
from nearpolicy.models.rows import Node, RowContext


def plain_logprobs(policy, ids):
    """By transformers' own eager attention: log-probability of every next token."""
    policy.model.set_attn_implementation("eager")
    try:
        logits = policy.model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    finally:
        policy.model.set_attn_implementation(NAME)
    return torch.log_softmax(logits, dim=-1).gather(1, ids[1:, None])[:, 0]


def packed_logprobs(policy, ids, temperature=1.0):
    context = RowContext([Node(0, len(ids))], len(ids))
    return policy(ids, context.positions, context, torch.arange(len(ids) - 1), ids[1:], temperature)[0]


def gradient(policy, loss):
    policy.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


def relative(ours, theirs):
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


TREES = st.lists(st.tuples(st.integers(1, 150), st.lists(st.integers(1, 40), max_size=4)), min_size=1, max_size=4)


@settings(max_examples=25, deadline=None)
@given(trees=TREES, padding=st.integers(0, 9), seed=st.integers(0, 1000))
@torch.no_grad()
def test_prompts_shared_by_completions_in_one_row_score_as_separate_sequences(trees, padding, seed):
    """A tree is a prompt and its completions; the row holds each prompt once, and padding behind."""
    policy = families.shared("gemma2")
    ids, nodes, paths = [], [], []

    def add(length, parent=None):
        start = len(ids)
        ids.extend(families.random_ids(length, seed + start).tolist())
        nodes.append(Node(start, length, parent))
        own = list(range(start, start + length))
        paths.append(own if parent is None else paths[parent] + own)
        return len(nodes) - 1

    for prompt, completions in trees:
        parent = add(prompt)
        for completion in completions:
            add(completion, parent)
    row = torch.tensor(ids + [5] * padding)
    context = RowContext(nodes, len(row))
    logits = policy.logits(row, context.positions, context, torch.arange(len(row)))
    assert bool(logits.isfinite().all())
    packed = log_softmax(logits, 1.0)
    policy.model.set_attn_implementation("eager")
    try:
        for node, path in zip(nodes, paths, strict=True):
            own = policy.model(input_ids=row[path][None], use_cache=False).logits[0, -node.length :]
            assert float((packed[path[-node.length :]] - log_softmax(own, 1.0)).abs().max()) < 1e-5
    finally:
        policy.model.set_attn_implementation(NAME)


def test_positions_count_from_the_start_of_each_sequence():
    context = RowContext([Node(0, 3), Node(3, 2, parent=0), Node(5, 2, parent=1), Node(7, 2)], 10)
    assert context.positions.tolist()[:9] == [0, 1, 2, 3, 4, 5, 6, 0, 1]


@pytest.mark.parametrize("family", families.FIT)
def test_the_gradient_is_that_of_plain_autograd(family):
    policy = families.fresh(family)
    ids = families.random_ids(PAGE + 20, 1)
    ours = gradient(policy, packed_logprobs(policy, ids).mean())
    theirs = gradient(policy, plain_logprobs(policy, ids).mean())
    assert relative(ours, theirs) < 1e-5


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_a_row_longer_than_a_query_chunk_has_the_same_logprobs_and_gradient(family):
    policy = families.fresh(family)
    ids = families.random_ids(QUERY_CHUNK + 40, 2)
    ours, theirs = packed_logprobs(policy, ids), plain_logprobs(policy, ids)
    assert float((ours - theirs).detach().abs().max()) < 2e-5
    assert relative(gradient(policy, ours.mean()), gradient(policy, theirs.mean())) < 1e-5


def test_a_head_in_chunks_has_the_same_logprobs_and_gradient():
    """More rows than `HEAD_CHUNK` are scored in parts and computed again in backward."""
    policy = families.fresh()
    ids = families.random_ids(100, 3)
    rows = torch.arange(99).repeat(1 + HEAD_CHUNK // 99)
    assert len(rows) > HEAD_CHUNK

    def mean_of(rows):
        context = RowContext([Node(0, 100)], 100)
        logprobs, entropies, _ = policy(ids, context.positions, context, rows, ids[1:][rows], 0.7)
        assert not entropies.requires_grad
        return logprobs.mean(), entropies.mean()

    many, one = mean_of(rows), mean_of(rows[:99])
    assert many[0].item() == pytest.approx(one[0].item(), abs=1e-6)
    assert float(many[1]) == pytest.approx(float(one[1]), abs=1e-6)
    assert relative(gradient(policy, many[0]), gradient(policy, one[0])) < 1e-5


@pytest.mark.parametrize("family", families.DENSE)
def test_gradients_with_two_threads_equal_those_with_one_bit_for_bit(family):
    policy = families.fresh(family)
    families.exact_numerics(policy, 2)
    ids = families.random_ids(2 * PAGE + 8, 4)
    grads = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        grads.append(gradient(policy, packed_logprobs(policy, ids).mean()))
    assert torch.equal(*grads)


def test_temperature_divides_the_logits_and_entropy_is_of_the_same_distribution():
    policy = families.shared()
    ids = families.random_ids(30, 5)
    context = RowContext([Node(0, 30)], 30)
    with torch.no_grad():
        logits = policy.logits(ids, context.positions, context, torch.arange(29))
        logprobs, entropies, _ = policy(ids, context.positions, context, torch.arange(29), ids[1:], 0.5)
    expected = torch.distributions.Categorical(logits=(logits / 0.5).double())
    torch.testing.assert_close(logprobs.double(), expected.log_prob(ids[1:]), rtol=0, atol=1e-5)
    torch.testing.assert_close(entropies.double(), expected.entropy(), rtol=0, atol=1e-5)


def test_a_soft_capped_head_never_exceeds_its_cap():
    policy = families.shared("gemma2", std=1.0)
    context = RowContext([Node(0, 20)], 20)
    with torch.no_grad():
        logits = policy.logits(families.random_ids(20, 6), context.positions, context, torch.arange(20))
    assert 9.0 < float(logits.abs().max()) <= 10.0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("which", [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.3, -0.7, 2.0)])
def test_scores_and_their_gradients_are_those_of_the_definitions_written_out(which, temperature):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(7, 11, generator=generator, dtype=torch.float64).requires_grad_()
    theirs = torch.randn(7, 11, generator=generator, dtype=torch.float64).log_softmax(-1)
    targets = torch.randint(11, (7,), generator=generator)
    factors = [torch.randn(7, generator=generator, dtype=torch.float64) * weight for weight in which]

    def total(logprobs, entropies, kl):
        return sum((f * x).sum() for f, x in zip(factors, (logprobs, entropies, kl), strict=True))

    [ours] = torch.autograd.grad(total(*score_tokens(logits, targets, temperature, theirs)), logits)
    logp = (logits / temperature).log_softmax(-1)
    plain = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1), (logp.exp() * (logp - theirs)).sum(-1)
    torch.testing.assert_close(tuple(score_tokens(logits, targets, temperature, theirs)), plain, rtol=1e-12, atol=1e-12)
    [right] = torch.autograd.grad(total(*plain), logits)
    torch.testing.assert_close(ours, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_the_gradient_through_a_prompt_that_completions_share_is_that_of_separate_sequences(family):
    """Two full pages are read by two completions of one length together, and by a longer one by itself; the second
    tree is nested and shares one page."""
    policy = families.fresh(family)
    nodes = [Node(0, 2 * PAGE + 5)]
    nodes += [Node(133, 6, 0), Node(139, 7, 0), Node(146, 40, 0), Node(186, PAGE + 1)]
    nodes += [Node(251, 9, 4), Node(260, 5, 5), Node(265, 6, 5)]
    ids = families.random_ids(271, 7)
    paths = []
    for node in nodes:
        own = list(range(node.start, node.start + node.length))
        paths.append(own if node.parent is None else paths[node.parent] + own)
    context = RowContext(nodes, 280)
    row = torch.cat([ids, ids[:1].expand(9)])
    rows = torch.cat([torch.tensor(path[-node.length - 1 : -1]) for node, path in zip(nodes, paths, strict=True)])
    targets = torch.cat(
        [ids[path[-len(path[-node.length - 1 : -1]) :]] for node, path in zip(nodes, paths, strict=True)]
    )
    ours = policy(row, context.positions, context, rows, targets)[0].sum()
    theirs = sum(
        plain_logprobs(policy, ids[path])[-len(path[-node.length - 1 : -1]) :].sum()
        for node, path in zip(nodes, paths, strict=True)
    )
    assert float(ours.detach() - theirs.detach()) == pytest.approx(0.0, abs=1e-3)
    assert relative(gradient(policy, ours), gradient(policy, theirs)) < 1e-5


def test_the_gradient_of_a_row_that_many_completions_share_does_not_depend_on_threads():
    hidden = torch.randn(300, 1024, requires_grad=True)
    rows = torch.cat([torch.tensor([9, *range(10 + 18 * i, 28 + 18 * i)]) for i in range(16)])  # 16 completions
    above = torch.randn(len(rows), 1024)

    def gradient(threads: int) -> torch.Tensor:
        torch.set_num_threads(threads)
        hidden.grad = None
        (chosen_rows(hidden, rows) * above).sum().backward()
        return hidden.grad

    alone = gradient(1)
    assert all(torch.equal(gradient(2), alone) for _ in range(30))
