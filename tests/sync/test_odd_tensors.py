"""Tensors that no model has, and pieces of some have: they travel like all others."""

from __future__ import annotations

import sys
from typing import ClassVar

import pytest
import torch
from sharded import cut_as_fsdp2
from shipping_cases import by_ranks, record_of, tensors_of

from nearpolicy.launch.ray import object_store
from nearpolicy.models.weights import digests
from nearpolicy.roles import Weights
from nearpolicy.sync.files import FileReceiver, FileSender
from nearpolicy.sync.shared_memory import SharedMemoryReceiver, SharedMemorySender
from nearpolicy.sync.shipping import arrived, ship


class Store:
    """Of Ray, in this process."""

    class exceptions:
        RayError = ConnectionError

    objects: ClassVar[list] = []

    @classmethod
    def put(cls, value):
        cls.objects.append(value)
        return len(cls.objects) - 1

    @classmethod
    def get(cls, reference):
        return cls.objects[reference]


def odd() -> dict[str, torch.Tensor]:
    """Every second element, of which a piece is a single one; turned round; nothing."""
    return tensors_of(1) | {
        "f.strided": torch.randn(6)[::2],
        "g.turned": torch.randn(3, 5).T,
        "h.half": torch.randn(10).half()[::2],
        "i.nothing": torch.empty(0),
        "j.deep": torch.empty(2, 0, 2),
    }


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("way", ["shared_memory", "files", "object_store"])
def test_strides_and_emptiness_change_nothing(way, ranks, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", Store)
    tensors = odd()
    held = cut_as_fsdp2(tensors, ranks)
    unknown = Weights(record=record_of(1, {}), tensors={}, digests={})
    receiver = {
        "shared_memory": SharedMemoryReceiver,
        "files": lambda: FileReceiver("near"),
        "object_store": object_store.ObjectStoreReceiver,
    }[way]()

    def act(rank, peers):
        sender = {
            "shared_memory": lambda: SharedMemorySender("run", peers=peers, folder=tmp_path),
            "files": lambda: FileSender(str(tmp_path), "run", timeout_s=60.0, peers=peers),
            "object_store": lambda: object_store.ObjectStoreSender(peers=peers),
        }[way]()
        for _ in range(2):
            parts = peers.exchange("sent", ship(unknown, sender, held[rank]))
        sent, shown = object_store.of_all_ranks(parts), None
        if rank == 0:
            with arrived(sent, receiver) as here:
                shown = digests(here.tensors)
        peers.exchange("read", None)
        sender.close()
        return shown

    assert by_ranks(ranks, act)[0] == digests({name: tensor.contiguous() for name, tensor in tensors.items()})
