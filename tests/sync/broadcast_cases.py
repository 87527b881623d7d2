"""What tests of the broadcast share."""

from __future__ import annotations

import torch
from shipping_cases import take, tensors_of

from nearpolicy.roles import Weights
from nearpolicy.sync import broadcast
from nearpolicy.sync.broadcast import BroadcastReceiver, BroadcastSender


def sender_of(timeout_s: float = 40.0, **options) -> BroadcastSender:
    return BroadcastSender(timeout_s=timeout_s, bucket_mb=1.0, **options)


def large_tensors(version: int) -> dict[str, torch.Tensor]:
    """Larger than a bucket, and smaller ones between them."""
    generator = torch.Generator().manual_seed(version)
    shapes = [(700, 513), (3,), (40, 7), (1100, 300), (5,), (6,)]
    return {f"t{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)} | tensors_of(version)


def taken(name: str, sent: Weights) -> dict[str, str]:
    return take(name, lambda: BroadcastReceiver(name), sent)


def delivered(sender, sent, helpers, names) -> tuple[list[str], list]:
    answers = [helper.ask(taken, name, sent) for helper, name in zip(helpers, names, strict=True)]
    return sender.deliver(sent.shipment, names), answers


def in_the_middle(act) -> None:
    """In a helper: when it has begun to receive, and more is still to come."""
    plain, begun = broadcast.Group.broadcast, []

    def counted(group, memory, root):
        begun.append(memory)
        if len(begun) == 3:
            broadcast.Group.broadcast = plain
            act()
        return plain(group, memory, root)

    broadcast.Group.broadcast = counted
