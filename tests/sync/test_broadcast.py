"""Collective broadcast: everybody who is there gets everything, and nobody who is not can harm the others."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from broadcast_cases import delivered, in_the_middle, large_tensors, sender_of, taken
from sharded import cut_as_fsdp2
from shipping_cases import by_ranks, forget, record_of, weights_of

from nearpolicy.errors import SyncError
from nearpolicy.models.weights import digests, fingerprint
from nearpolicy.roles import Weights
from nearpolicy.sync import broadcast
from nearpolicy.sync.broadcast import BroadcastReceiver
from nearpolicy.sync.plan import Piece, plan
from nearpolicy.sync.shipping import arrived, canonical_layout, entries_of, ship


def test_every_generator_holds_what_was_sent_and_the_group_lives_on(helpers):
    sender, names = sender_of(), ["g0", "g1"]
    groups = set()
    for version in range(3):
        weights = weights_of(version, large_tensors(version))
        sent = ship(weights, sender)
        got, answers = delivered(sender, sent, helpers, names)
        assert got == names
        assert [answer.result(60) for answer in answers] == [weights.digests] * 2
        groups.add(sender._number)
    assert groups == {1}
    for helper, name in zip(helpers, names, strict=False):
        helper.do(forget, name)
    got, answers = delivered(sender, ship(weights_of(3), sender), helpers, names)  # new processes, so to speak
    assert got == names and sender._number == 2
    assert [answer.result(60) for answer in answers] == [weights_of(3).digests] * 2
    for helper, name in zip(helpers, names, strict=False):
        helper.do(forget, name)
    sender.close()


def test_a_generator_that_stands_still_is_left_out_in_bounded_time_and_gets_an_error_later(helpers):
    sender, names = sender_of(timeout_s=6.0), ["s0", "s1"]
    weights = weights_of(1, large_tensors(1))
    helpers[1].do(in_the_middle, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    begin = time.monotonic()
    got, answers = delivered(sender, ship(weights, sender), helpers, names)
    assert got == ["s0"] and time.monotonic() - begin < 6.0
    assert answers[0].result(60) == weights.digests
    helpers[1].send_signal(signal.SIGCONT)
    with pytest.raises(SyncError, match="went on without this generator; before that"):
        answers[1].result(60)
    weights = weights_of(2, large_tensors(2))
    got, answers = delivered(sender, ship(weights, sender), helpers, names)
    assert got == names and [answer.result(60) for answer in answers] == [weights.digests] * 2
    for helper, name in zip(helpers, names, strict=False):
        helper.do(forget, name)
    sender.close()


def hiccup() -> None:
    raise RuntimeError("Connection reset by peer")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_connection_that_breaks_costs_an_attempt_and_nobody_is_left_out(ranks, helpers):
    weights = weights_of(1, large_tensors(1))
    held = cut_as_fsdp2(weights.tensors, ranks)
    helpers[0].do(in_the_middle, hiccup)
    answers, names = [], ["b0", "b1"]

    def act(rank, peers):
        sender = sender_of(peers=peers)
        sent = ship(weights, sender, held[rank])
        if rank == 0:
            answers.extend(h.ask(taken, name, sent) for h, name in zip(helpers, names, strict=True))
        got = sender.deliver(sent.shipment, names)
        sender.close()
        return got

    assert by_ranks(ranks, act) == [names] * ranks
    assert [answer.result(60) for answer in answers] == [weights.digests] * 2
    for helper, name in zip(helpers, names, strict=True):
        helper.do(forget, name)


def test_what_arrives_changed_is_named_and_not_applied(helper):
    sender = sender_of()
    weights = weights_of(1)
    sent = ship(weights, sender)
    sent.shipment.digests["b.weight"] = "0" * 32
    answer = helper.ask(taken, "c0", sent)
    assert sender.deliver(sent.shipment, ["c0"]) == ["c0"]  # all bytes are there
    with pytest.raises(SyncError, match=r"'b.weight' and 0 more arrived otherwise"):
        answer.result(60)
    sent = ship(weights, sender)
    answer = helper.ask(taken, "c0", sent)
    assert sender.deliver(sent.shipment, ["c0"]) == ["c0"] and answer.result(60) == weights.digests
    helper.do(forget, "c0")
    sender.close()


def test_without_receivers_the_delivery_ends_after_a_quarter_of_its_time():
    sender = sender_of(timeout_s=0.4)
    sent = ship(weights_of(1), sender)
    with pytest.raises(SyncError, match="version 1 reached no generator: no generator was there"):
        sender.deliver(sent.shipment, ["a", "b"])
    with pytest.raises(SyncError, match="went on without this generator"), arrived(sent, BroadcastReceiver("a")):
        pass
    again = ship(weights_of(2), sender)
    with pytest.raises(SyncError, match="version 1 cannot be broadcast any more"):
        sender.deliver(sent.shipment, ["a"])
    with pytest.raises(SyncError, match="did not begin to broadcast"), arrived(again, BroadcastReceiver("a")):
        pass
    sender.close()


def test_a_generator_that_waits_for_a_version_that_is_over_is_let_go_and_takes_the_next_one(helper):
    """As one that joins does, when the learner takes a step before it can broadcast the version once more."""
    sender = sender_of(timeout_s=400.0)  # a receiver that waits on would be seen
    waits = helper.ask(taken, "o0", ship(weights_of(1), sender))
    weights = weights_of(2)
    sent = ship(weights, sender)
    with pytest.raises(SyncError, match="version 1 went on without this generator"):
        waits.result(60)
    got, answers = delivered(sender, sent, [helper], ["o0"])
    assert got == ["o0"] and answers[0].result(60) == weights.digests
    helper.do(forget, "o0")
    sender.close()


def test_once_a_delivery_is_over_nobody_waits_for_another_attempt(helper):
    sender = sender_of()
    sent = ship(weights_of(1), sender)
    answer = helper.ask(taken, "f0", sent)
    assert sender.deliver(sent.shipment, ["f0"]) == ["f0"] and answer.result(60) == weights_of(1).digests
    table = broadcast._Table(sender._store, sent.shipment.place.serial)
    assert [table.group(attempt, 0.1) for attempt in range(1, 4)] == [((), 0)] * 3
    helper.do(forget, "f0")
    sender.close()


def test_members_that_are_not_waited_for_come_along_if_they_are_here(helper):
    sender = sender_of(timeout_s=400.0)  # waiting for the missing one would be seen
    weights = weights_of(1)
    sent = ship(weights, sender)
    answer = helper.ask(taken, "w0", sent)
    assert sender.deliver(sent.shipment, ["w0", "missing"], ["w0"]) == ["w0"]
    assert answer.result(60) == weights.digests
    helper.do(forget, "w0")
    sender.close()


@pytest.mark.parametrize(("ranks", "wire"), [(2, None), (2, torch.bfloat16), (4, torch.bfloat16)])
def test_each_rank_sends_its_pieces(ranks, wire):
    tensors = large_tensors(1)
    travels = {n: t.to(wire) if wire is not None and t.is_floating_point() else t for n, t in tensors.items()}
    held = cut_as_fsdp2(tensors, ranks)
    unknown = Weights(record=record_of(1, {}), tensors={}, digests={})
    shown, shipped, sending = [], [], threading.Event()

    def receive() -> None:
        sending.wait(30)
        with arrived(shipped[0], BroadcastReceiver("r")) as here:
            shown.append(digests(here.tensors))

    def act(rank, peers):
        sender = sender_of(peers=peers, wire=wire)
        sent = ship(unknown, sender, held[rank])
        if rank == 0:
            shipped.append(sent)
            sending.set()
        return sender.deliver(sent.shipment, ["r"]), sent.record.fingerprint, sender

    receiver = threading.Thread(target=receive)
    receiver.start()
    found = by_ranks(ranks, act)
    receiver.join(60)
    for got, shown_fingerprint, sender in found:
        assert got == ["r"] and shown_fingerprint == fingerprint(digests(travels))
        sender.close()
    assert shown == [digests(travels)]


def test_pieces_that_are_no_stretch_of_their_tensor_are_refused_by_name():
    layout = canonical_layout({"w": (4, 6)}, {"w": "torch.float32"})
    halves = [Piece(h, (4, 6), ((0, 4), (3 * h, 3 * h + 3)), "torch.float32") for h in range(2)]
    with pytest.raises(SyncError, match=r"'w' of rank 0 is not cut along its first dimension only"):
        broadcast.runs_of(plan({"w": halves}, layout), entries_of(layout), 1 << 20)


def test_a_learner_that_cannot_be_reached_is_named():
    sender = sender_of()
    sent = ship(weights_of(1), sender)
    place = sent.shipment.place
    gone = broadcast.Place(("127.0.0.1", 9), place.serial, "gloo", 1, 0.2, place.runs)
    object.__setattr__(sent.shipment, "place", gone)
    with (
        pytest.raises(SyncError, match=r"the learner at 127.0.0.1:9 cannot be reached"),
        arrived(sent, BroadcastReceiver("a")),
    ):
        pass
