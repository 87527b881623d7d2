"""Values start at 0, are those of a plain forward pass, and depend on their sequence alone, bit for bit."""

from __future__ import annotations

import families
import pytest
import torch

from nearpolicy.models.loading import load_policy
from nearpolicy.models.rows import Node, RowContext
from nearpolicy.models.value import ValueModel


def value_model(family: str = "llama", *, head: bool = True) -> ValueModel:
    model = ValueModel(families.fresh(family))
    if head:
        with torch.no_grad():
            model.weight.copy_(torch.randn(len(model.weight), generator=torch.Generator().manual_seed(1)))
            model.bias.fill_(0.25)
    return model


def values_of(model: ValueModel, sequences: list[list[int]], num_rows: int) -> list[torch.Tensor]:
    """[T] after every token of each sequence, all in one packed row."""
    nodes, ids = [], []
    for sequence in sequences:
        nodes.append(Node(len(ids), len(sequence)))
        ids += sequence
    context = RowContext(nodes, num_rows)
    padded = torch.tensor(ids + ids[-1:] * (num_rows - len(ids)))
    with torch.no_grad():
        found = model(padded, context.positions, context, torch.arange(num_rows))
    return [found[node.start : node.start + node.length] for node in nodes]


SEQUENCES = [list(range(10, 17)), list(range(40, 79)), [5, 6], list(range(100, 121))]


def test_every_value_starts_at_0_and_the_vocabulary_head_is_not_kept():
    policy = families.fresh("llama")
    model = ValueModel(policy)
    assert not torch.cat(values_of(model, SEQUENCES, 96)).any()
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {"decoder", "weight", "bias"}


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_a_value_is_the_head_on_the_last_hidden_state_of_a_plain_forward_pass(family):
    from transformers import AutoModelForCausalLM

    model = value_model(family)
    plain = AutoModelForCausalLM.from_pretrained(
        families.folder(family), dtype=torch.float64, attn_implementation="eager"
    )
    for sequence, found in zip(SEQUENCES, values_of(model, SEQUENCES, 96), strict=True):
        with torch.no_grad():
            states = plain.get_decoder()(torch.tensor([sequence])).last_hidden_state[0]
        right = states @ model.weight.detach().double() + model.bias.detach().double()
        torch.testing.assert_close(found.double(), right, atol=1e-4, rtol=1e-5)


def test_a_value_has_the_same_bits_whatever_stands_beside_it_and_however_many_threads_compute_it():
    model = value_model()
    numerics = families.exact_numerics(families.shared("llama"), 2)
    results = []
    for threads, order in ((1, [0, 1, 2, 3]), (2, [0, 1, 2, 3]), (1, [2, 0, 3, 1])):
        torch.set_num_threads(threads)
        together = values_of(model, [SEQUENCES[i] for i in order], numerics.rows(128, threads))
        results.append([together[order.index(i)] for i in range(4)])
        results.append([values_of(model, [s], numerics.rows(len(s), threads))[0] for s in SEQUENCES])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_the_head_is_float32_over_a_narrower_decoder_and_float64_over_a_wider_one():
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        model = ValueModel(load_policy(families.folder("llama"), dtype, known_to_fit=True))
        assert model.weight.dtype == model.bias.dtype == wide
        assert values_of(model, SEQUENCES, 96)[0].dtype == wide
