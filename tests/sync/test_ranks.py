"""Several processes: ranks of a learner that send together, and a receiver that dies."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from broadcast_cases import delivered, in_the_middle, large_tensors, sender_of
from sharded import cut_as_fsdp2
from shipping_cases import ProcessPeers, forget, record_of, weights_of
from torch import nn

from nearpolicy.errors import SyncError
from nearpolicy.models.weights import digests, fingerprint
from nearpolicy.roles import Shard, Weights
from nearpolicy.sync import shipping
from nearpolicy.sync.config import SyncConfig
from nearpolicy.sync.shipping import arrived, ship
from nearpolicy.sync.transports import make_receiver, make_sender


def model() -> nn.Module:
    """17 rows on two ranks are 9 and 8; a single one is 1 and none."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 17), nn.Linear(17, 5, bias=False), nn.Linear(5, 1))


def begin(rank: int, path: str, transport: str, cut: str) -> None:
    """In a helper: a rank of a learner, with FSDP2 or with tensors cut as it cuts them."""
    import torch.distributed as dist

    global _sender, _shards
    dist.init_process_group("gloo", init_method=f"file://{path}/rendezvous", rank=rank, world_size=2)
    tensors = {name: p.detach() for name, p in model().named_parameters()}
    _shards = cut_as_fsdp2(tensors, 2)[rank]
    if cut == "by fsdp2":
        real = cut_by_fsdp2()
        assert {n: (s.shape, s.start) for n, s in real.items()} == {n: (s.shape, s.start) for n, s in _shards.items()}
        _shards = real
    config = SyncConfig(timeout_s=30, transport=transport, **({"path": path} if transport == "files" else {}))
    _sender = make_sender(config, transport, run="run", peers=ProcessPeers(), folder=Path(path))


def cut_by_fsdp2() -> dict[str, Shard]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded = model()
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)
    found = {}
    for name, parameter in sharded.named_parameters():
        _, start = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
        found[name] = Shard(tensor=parameter.to_local().detach(), shape=tuple(parameter.shape), start=tuple(start))
    return found


def send(version: int) -> Weights:
    return ship(Weights(record=record_of(version, {}), tensors={}, digests={}), _sender, _shards)


def deliver(shipped: Weights) -> Any:
    return _sender.deliver(shipped.shipment, ["r"])


def end() -> None:
    import torch.distributed as dist

    _sender.close()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "cut",
    ["as fsdp2 cuts", pytest.param("by fsdp2", marks=pytest.mark.large)],  # which takes seconds to import
)
@pytest.mark.parametrize("transport", ["shared_memory", "broadcast", "device_handles", "files"])
def test_what_the_ranks_of_a_learner_hold_arrives_as_whole_tensors(transport, cut, helpers, tmp_path):
    expected = digests({name: p.detach() for name, p in model().named_parameters()})
    receiver = make_receiver(transport, "r")
    for answer in [h.ask(begin, rank, str(tmp_path), transport, cut) for rank, h in enumerate(helpers)]:
        answer.result(60)
    for version in range(2):
        first, second = [answer.result(60) for answer in [h.ask(send, version) for h in helpers]]
        assert first.digests == second.digests == expected
        assert first.record.fingerprint == fingerprint(expected)
        answers = [h.ask(deliver, first) for h in helpers]
        with arrived(first, receiver) as here:
            assert digests(here.tensors) == expected
        assert [list(answer.result(60)) for answer in answers] == [["r"], ["r"]]
    receiver.close()
    for answer in [h.ask(end) for h in helpers]:
        answer.result(60)


def test_a_transport_within_one_process_has_no_ends():
    for make in (lambda: make_sender(SyncConfig(), "direct", run="r"), lambda: make_receiver("direct", "g")):
        with pytest.raises(ValueError, match="direct has no ends"):
            make()


def test_weights_that_never_left_are_what_arrives():
    weights = weights_of(1)
    with arrived(weights, make_receiver("shared_memory", "g")) as here:
        assert here is weights


def test_a_shipment_that_a_receiver_turns_into_less_is_refused(tmp_path):
    sender = make_sender(SyncConfig(), "shared_memory", run="r", folder=tmp_path)
    sent = ship(weights_of(1), sender)

    class Loses:
        def receive(self, shipment):
            import contextlib

            return contextlib.nullcontext({"a.bias": torch.zeros(17)})

    with pytest.raises(SyncError, match=r"'a.weight' and 4 more of version 1 did not arrive"), arrived(sent, Loses()):
        pass
    sender.close()


def test_a_receiver_that_still_receives_refuses_the_next_version_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(shipping, "_STILL_BUSY_S", 0.01)
    sender = make_sender(SyncConfig(), "shared_memory", run="r", folder=tmp_path)
    receiver, sent = make_receiver("shared_memory", "g"), ship(weights_of(1), sender)
    message = "version 1 cannot be received: an earlier one still is"
    with arrived(sent, receiver), pytest.raises(SyncError, match=message), arrived(sent, receiver):
        pass
    with arrived(sent, receiver) as here:
        assert digests(here.tensors) == sent.digests
    sender.close()


def test_a_generator_that_dies_in_the_middle_costs_the_others_an_attempt_and_nothing_else(helpers):
    sender, names = sender_of(timeout_s=12.0), ["h0", "h1"]
    weights = weights_of(1, large_tensors(1))
    helpers[0].do(in_the_middle, lambda: os._exit(1))
    begin = time.monotonic()
    got, answers = delivered(sender, ship(weights, sender), helpers, names)
    assert got == ["h1"] and time.monotonic() - begin < 12
    assert answers[1].result(60) == weights.digests
    with pytest.raises(ConnectionError):
        answers[0].result(60)
    weights = weights_of(2, large_tensors(2))
    got, answers = delivered(sender, ship(weights, sender), helpers[1:], names[1:])
    assert got == ["h1"] and answers[0].result(60) == weights.digests
    helpers[1].do(forget, "h1")
    sender.close()
