"""A load is complete or an error that names everything; digests and fingerprint see every bit."""

from __future__ import annotations

import families
import pytest
import torch
import xxhash
from torch import nn

from nearpolicy.errors import SyncError
from nearpolicy.models.rows import Node, RowContext
from nearpolicy.models.weights import (
    SLICE,
    Arriving,
    Stretch,
    differing,
    digest,
    digests,
    fingerprint,
    load_and_digest,
    load_weights,
    named_weights,
)


class Pair(nn.Module):
    """Parameters of chosen names."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.add_module(name, nn.Module())
            getattr(self, name).w = nn.Parameter(torch.zeros(shape))


@torch.no_grad()
def scores(policy, ids):
    context = RowContext([Node(0, len(ids))], len(ids))
    return policy(ids, context.positions, context, torch.arange(len(ids)), ids.roll(-1))[0]


def test_after_a_step_and_a_sync_engine_and_learner_score_alike():
    """K22, three times: old weights would differ by more than 0.01."""
    learner, engine = families.fresh(), families.fresh()
    ids = families.random_ids(24, 0)
    for step in range(3):
        context = RowContext([Node(0, 24)], 24)
        learner(ids, context.positions, context, torch.arange(23), ids[1:])[0].mean().neg().backward()
        with torch.no_grad():
            for p in learner.parameters():
                p.sub_(0.1 * p.grad)
                p.grad = None
        stale = scores(engine, ids)
        load_weights(engine.model, named_weights(learner.model))
        assert digests(named_weights(engine.model)) == digests(named_weights(learner.model)), step
        assert torch.equal(scores(engine, ids), scores(learner, ids))
        assert float((stale - scores(learner, ids)).abs().mean()) > 0.01


def test_names_that_do_not_match_are_all_named_and_nothing_is_applied():
    """K23."""
    model = Pair(a=(2,), c=(2,))
    with pytest.raises(SyncError) as caught:
        load_weights(model, {"a.w": torch.ones(2), "b.w": torch.ones(2)})
    message = str(caught.value)
    assert "0 tensors applied" in message
    assert "'b.w' was sent, but is unknown here" in message
    assert "'c.w' is not filled by what was sent" in message
    assert "'a.w'" not in message
    assert model.a.w.tolist() == model.c.w.tolist() == [0, 0]


def test_a_load_without_any_matching_name_is_an_error():
    with pytest.raises(SyncError, match=r"0 tensors applied.*'a\.w' is not filled.*'x\.w' was sent"):
        load_weights(Pair(a=(2,)), {"x.w": torch.ones(2)})
    with pytest.raises(SyncError, match="0 tensors applied"):
        load_weights(Pair(a=(2,)), {})


def test_a_transposed_shape_is_named_and_nothing_is_applied():
    model = Pair(a=(3, 2), b=(2,))
    with pytest.raises(SyncError, match=r"0 tensors applied: 'a\.w' is \[2, 3\] there and \[3, 2\] here"):
        load_weights(model, {"a.w": torch.ones(2, 3), "b.w": torch.ones(2)})
    assert model.b.w.tolist() == [0, 0]


@pytest.mark.parametrize("names", [["model.embed_tokens.weight"], ["lm_head.weight"], None])
def test_tied_embeddings_stay_tied_whichever_of_their_names_is_sent(names):
    """K25."""
    engine = families.fresh(tie_word_embeddings=True)
    tied = ["model.embed_tokens.weight", "lm_head.weight"]
    incoming = dict(named_weights(engine.model))
    assert sum(name in incoming for name in tied) == 1
    value = torch.full_like(engine.model.lm_head.weight, 0.2)
    for name in tied:
        incoming.pop(name, None)
    incoming |= dict.fromkeys(names or tied, value)
    load_weights(engine.model, incoming)
    for module in (engine.model.get_input_embeddings(), engine.model.get_output_embeddings()):
        assert torch.equal(module.weight, value)
    assert engine.model.get_input_embeddings().weight is engine.model.get_output_embeddings().weight


def test_one_tied_tensor_sent_twice_with_different_values_is_an_error():
    engine = families.fresh(tie_word_embeddings=True)
    incoming = dict(named_weights(engine.model))
    (name,) = {"model.embed_tokens.weight", "lm_head.weight"} & incoming.keys()
    (other,) = {"model.embed_tokens.weight", "lm_head.weight"} - incoming.keys()
    incoming[other] = incoming[name] + 1
    with pytest.raises(SyncError, match="are one tensor here, but different ones were sent"):
        load_weights(engine.model, incoming)


def test_untied_embeddings_are_two_tensors():
    names = named_weights(families.fresh(tie_word_embeddings=False).model)
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= names.keys()


def test_a_digest_is_xxh3_of_the_bytes_whatever_the_strides():
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert digest(tensor) == xxhash.xxh3_128_hexdigest(tensor.numpy().tobytes())
    assert digest(tensor.t().contiguous().t()) == digest(tensor)
    assert digest(tensor.t()) == xxhash.xxh3_128_hexdigest(tensor.numpy().T.tobytes())
    half = tensor.bfloat16()
    assert digest(half) == xxhash.xxh3_128_hexdigest(half.view(torch.int16).numpy().tobytes())
    assert digest(torch.tensor(1.0)) == xxhash.xxh3_128_hexdigest(torch.tensor([1.0]).numpy().tobytes())


@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16, "transposed"])
def test_digests_taken_while_loading_are_those_of_what_the_model_holds_then(sent):
    module = nn.Linear(SLICE // 256, 257)  # of more than one slice, and a torn one at the end
    weight = torch.randn(257, SLICE // 256)
    weight = weight.T.contiguous().T if sent == "transposed" else weight.to(sent)
    shown = load_and_digest(module, {"weight": weight, "bias": torch.arange(257.0)})
    assert shown == digests(named_weights(module)) == digests({"weight": weight.float(), "bias": torch.arange(257.0)})


def test_the_fingerprint_changes_with_one_bit_and_with_a_name_and_not_with_the_order():
    weights = {"a": torch.ones(3), "b": torch.zeros(2)}
    parts = digests(weights)
    assert fingerprint(dict(reversed(parts.items()))) == fingerprint(parts)
    flipped = weights["a"].view(torch.int32).clone()
    flipped[1] ^= 1
    changed = parts | digests({"a": flipped.view(torch.float32)})
    assert fingerprint(changed) != fingerprint(parts)
    assert differing(changed, parts) == ["a"]
    assert fingerprint({"a": parts["b"], "b": parts["a"]}) != fingerprint(parts)
    assert fingerprint({"a": parts["a"], "c": parts["b"]}) != fingerprint(parts)
    assert differing({"a": "1"}, {"a": "1", "c": "2"}) == ["c"]


def test_minus_zero_is_another_weight_than_zero():
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))


class InStretches(Arriving):
    """Tensors cut into stretches of ``size`` elements, two at a time."""

    def __init__(self, tensors, size: int) -> None:
        super().__init__({n: (t.shape, t.dtype) for n, t in tensors.items()}, torch.device("cpu"))
        self.asked, self._tensors, self._size = 0, tensors, size

    def rounds(self):
        self.asked += 1
        memory = torch.empty(len(self._tensors), self._size)
        longest = max(t.numel() for t in self._tensors.values())
        for begin in range(0, longest, self._size):
            found = []
            for block, (name, tensor) in zip(memory, self._tensors.items(), strict=True):
                values = tensor.reshape(-1)[begin : begin + self._size]
                block.fill_(torch.nan)[: values.numel()] = values  # what was here is gone
                found.append(Stretch(name, begin, block[: values.numel()]))
            yield found


def model_of_three() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 11), nn.ReLU(), nn.Linear(11, 2))


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_model_is_filled_by_what_arrives_in_stretches_and_shows_its_digests(size):
    model = model_of_three()
    sent = {name: torch.randn(tensor.shape) for name, tensor in named_weights(model).items()}
    arriving = InStretches(sent, size)
    assert load_and_digest(model, arriving) == digests(sent) == digests(named_weights(model))
    assert arriving.asked == 1 and arriving._all is None  # nothing was put together beside it


def test_what_arrives_is_a_mapping_to_all_others():
    sent = {"a": torch.randn(3, 4), "b": torch.randn(2), "c": torch.zeros(0, 5)}
    arriving = InStretches(sent, 5)
    assert "b" in arriving and "d" not in arriving and list(arriving) == ["a", "b", "c"] and arriving.asked == 0
    assert digests(arriving) == digests(sent) and arriving.asked == 1


def test_what_arrives_and_does_not_fit_is_refused_before_it_is_asked_for():
    model = model_of_three()
    sent = dict(named_weights(model)) | {"0.bias": torch.zeros(3)}
    arriving, before = InStretches(sent, 5), digests(named_weights(model))
    with pytest.raises(SyncError, match=r"0 tensors applied: '0.bias' is \[3\] there and \[11\] here"):
        load_and_digest(model, arriving)
    assert arriving.asked == 0 and digests(named_weights(model)) == before


@pytest.mark.parametrize("how", ["tied and sent under both names", "not one stretch of memory"])
def test_a_model_that_cannot_be_filled_by_stretches_gets_whole_tensors(how):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    if how == "not one stretch of memory":
        model[0].weight = nn.Parameter(torch.randn(4, 4).t())
        sent = {"0.weight": torch.randn(4, 4), "1.weight": torch.randn(4, 4)}
    else:
        model[1].weight = model[0].weight
        sent = dict.fromkeys(("0.weight", "1.weight"), torch.randn(4, 4))
    shown = load_and_digest(model, InStretches(sent, 5))
    assert shown == {name: digests(sent)[name] for name in shown} and len(shown) == (2 if how[0] == "n" else 1)
    assert torch.equal(model[0].weight, sent["0.weight"])
