"""A learner of several processes: the layout that FSDP2 really makes, and the exchange between its ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shipping_cases import record_of, weights_of
from torch import nn

from nearpolicy.errors import SyncError
from nearpolicy.models.weights import digests, fingerprint
from nearpolicy.roles import Shard, Weights
from nearpolicy.sync.config import SyncConfig
from nearpolicy.sync.shipping import ProcessPeers, arrived, ship
from nearpolicy.sync.transports import make_receiver, make_sender


def model() -> nn.Module:
    """17 rows on two ranks are 9 and 8; a single one is 1 and none."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 17), nn.Linear(17, 5, bias=False), nn.Linear(5, 1))


def begin(rank: int, path: str, transport: str) -> None:
    """In a helper: a rank of a learner with FSDP2."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as offsets

    global _sender, _shards
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"file://{path}/rendezvous", rank=rank, world_size=2)
    sharded = model()
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)
    _shards = {}
    for name, parameter in sharded.named_parameters():
        _, start = offsets(parameter.shape, parameter.device_mesh, parameter.placements)
        _shards[name] = Shard(parameter.to_local().detach(), tuple(parameter.shape), tuple(start))
    config = SyncConfig(timeout_s=30, transport=transport, **({"path": path} if transport == "files" else {}))
    from pathlib import Path

    _sender = make_sender(config, transport, run="run", peers=ProcessPeers(), folder=Path(path))


def send(version: int) -> Weights:
    return ship(Weights(record=record_of(version, {}), tensors={}, digests={}), _sender, _shards)


def deliver(shipped: Weights) -> Any:
    return _sender.deliver(shipped.shipment, ["r"])


def end() -> None:
    import torch.distributed as dist

    _sender.close()
    dist.destroy_process_group()


@pytest.mark.parametrize("transport", ["shared_memory", "broadcast", "files"])
def test_what_the_ranks_of_an_fsdp2_learner_hold_arrives_as_whole_tensors(transport, helpers, tmp_path):
    expected = digests({name: p.detach() for name, p in model().named_parameters()})
    receiver = make_receiver(transport, "r")
    for answer in [h.ask(begin, rank, str(tmp_path), transport) for rank, h in enumerate(helpers)]:
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
