"""Probabilities of given answers: one factor per choice, renormalised over what is allowed, whoever else is asked."""

from __future__ import annotations

import math

import pytest
import torch

from nearpolicy.models.choices import ChoiceModel
from nearpolicy.models.label_tree import LabelTree
from nearpolicy.models.loading import load_policy, resolve

END = 0


def test_a_tree_asks_only_where_there_is_a_choice():
    tree = LabelTree({"1": [7], "2": [8], "10": [7, 3]}, END)
    assert tree.choices == {(): (7, 8), (7,): (END, 3)}
    assert LabelTree({"yes": [4, 5], "yet": [4, 6]}, END).choices == {(4,): (5, 6)}


def test_probabilities_are_products_of_renormalised_shares():
    tree = LabelTree({"1": [7], "2": [8], "10": [7, 3]}, END)
    found = tree.probabilities({(): {7: math.log(0.3), 8: math.log(0.1)}, (7,): {END: math.log(0.2), 3: math.log(0.6)}})
    assert found == pytest.approx({"1": 0.75 * 0.25, "2": 0.25, "10": 0.75 * 0.75})
    assert sum(found.values()) == pytest.approx(1.0)
    impossible = tree.probabilities({(): {7: -math.inf, 8: -math.inf}, (7,): {END: 0.0, 3: -math.inf}})
    assert impossible == pytest.approx({"1": 0.5, "2": 0.5, "10": 0.0})


@pytest.mark.parametrize("labels", [{"a": [1], "b": [1]}, {"a": []}])
def test_labels_that_cannot_be_told_apart_are_refused(labels):
    with pytest.raises(ValueError, match="not told apart"):
        LabelTree(labels, END)


def test_questions_in_one_pass_are_answered_as_alone_and_as_a_plain_forward_says():
    policy = load_policy(resolve("random:llama", {"initializer_range": 0.5}), known_to_fit=True)
    model = ChoiceModel(policy)
    tree, other = LabelTree({"1": [49], "2": [50], "10": [49, 48]}, 257), LabelTree({"a": [97], "b": [98]}, 257)
    questions = [(list(b"first question"), tree), (list(b"?"), other), (list(b"a third, longer question" * 3), tree)]
    together = model.decide(questions)
    for question, found in zip(questions, together, strict=True):
        [alone] = model.decide([question])
        assert found == pytest.approx(alone, abs=1e-5) and sum(found.values()) == pytest.approx(1.0)

    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(resolve("random:llama", {"initializer_range": 0.5})).eval()

    def after(ids):
        with torch.no_grad():
            return plain(torch.tensor([ids])).logits[0, -1].log_softmax(-1)

    first, second = after(questions[0][0]), after([*questions[0][0], 49])
    top = (first[49].exp() / (first[49].exp() + first[50].exp())).item()
    ten = (second[48].exp() / (second[48].exp() + second[257].exp())).item()
    assert together[0] == pytest.approx({"1": top * (1 - ten), "2": 1 - top, "10": top * ten}, abs=1e-5)
