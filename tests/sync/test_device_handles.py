"""Handles to a device's memory, on the CPU: what is read is what was sent, and whoever is gone or slow harms nobody."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch
from broadcast_cases import large_tensors
from sharded import cut_as_fsdp2
from shipping_cases import by_ranks, forget, record_of, take, weights_of

from nearpolicy.errors import SyncError
from nearpolicy.models import device as devices
from nearpolicy.models.weights import digests, fingerprint
from nearpolicy.roles import Weights
from nearpolicy.sync import blocks, device_handles
from nearpolicy.sync.device_handles import DeviceHandlesReceiver, DeviceHandlesSender, parts_of, rank_of
from nearpolicy.sync.plan import Piece, plan
from nearpolicy.sync.shipping import arrived, canonical_layout, entries_of, ship

NAMES = ["generator 0", "generator 1"]


def sender_of(timeout_s: float = 40.0, **options) -> DeviceHandlesSender:
    return DeviceHandlesSender(timeout_s=timeout_s, bucket_mb=1.0, **options)


def taken(name: str, sent: Weights) -> dict[str, str]:
    return take(name, lambda: DeviceHandlesReceiver(name), sent)


def delivered(sender, sent, helpers, names=NAMES, awaited=None) -> tuple[list[str], list]:
    answers = [helper.ask(taken, name, sent) for helper, name in zip(helpers, names, strict=False)]
    return sender.deliver(sent.shipment, names, awaited), answers


def ended(sender, helpers, names=NAMES) -> None:
    for helper, name in zip(helpers, names, strict=False):
        helper.do(forget, name)
    sender.close()


def at_the_third_bucket(act) -> None:
    """In a helper: when it is about to read it."""
    plain = device_handles._stretches

    def counted(entries, block, begin):
        if begin >= 2 << 20:
            device_handles._stretches = plain
            act()
        return plain(entries, block, begin)

    device_handles._stretches = counted


def opened_so_far() -> int:
    """In a helper: blocks that it has opened since it was asked first."""
    if not hasattr(blocks, "counted"):
        blocks.counted, plain = 0, device_handles.opened

        def counted(*arguments):
            blocks.counted += 1
            return plain(*arguments)

        device_handles.opened = counted
    return blocks.counted


def test_every_generator_of_a_rank_holds_what_was_sent_and_opens_two_blocks_once(helpers):
    before = [helper.do(opened_so_far) for helper in helpers]
    sender, names = sender_of(), ["generator 0", "generator 2"]
    for version in range(3):
        weights = weights_of(version, large_tensors(version))
        got, answers = delivered(sender, ship(weights, sender), helpers, names)
        assert got == names
        assert [answer.result(60) for answer in answers] == [weights.digests] * 2
    assert [helper.do(opened_so_far) for helper in helpers] == [count + 2 for count in before]
    for helper, name in zip(helpers, names, strict=True):
        helper.do(forget, name)
    got, answers = delivered(sender, ship(weights_of(3), sender), helpers, names)  # new processes, less bytes
    assert got == names
    assert [answer.result(60) for answer in answers] == [weights_of(3).digests] * 2
    assert [block.memory.numel() for block in sender._blocks] == [576 + 128 + 8448 + 64 + 64]  # one bucket
    ended(sender, helpers, names)


@pytest.mark.parametrize("wire", [None, torch.bfloat16], ids=["as it is", "bfloat16"])
@pytest.mark.parametrize("generators", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_generator_gets_whole_tensors_from_the_rank_of_its_place(ranks, generators, wire):
    tensors = large_tensors(1)
    travels = {n: t.to(wire) if wire is not None and t.is_floating_point() else t for n, t in tensors.items()}
    held = cut_as_fsdp2(tensors, ranks)
    unknown = Weights(record=record_of(1, {}), tensors={}, digests={})
    shown, shipped, sending, names = {}, [], threading.Event(), NAMES[:generators]

    def receive(name: str) -> None:
        sending.wait(30)
        receiver = DeviceHandlesReceiver(name)
        with arrived(shipped[0], receiver) as here:
            shown[name] = digests(here.tensors), receiver._address
        receiver.close()

    def act(rank, peers):
        sender = sender_of(peers=peers, wire=wire)
        sent = ship(unknown, sender, held[rank])
        if rank == 0:
            shipped.append(sent)
            sending.set()
        got = sender.deliver(sent.shipment, names)
        sender.close()
        return got, sent.record.fingerprint

    receivers = [threading.Thread(target=receive, args=(name,)) for name in names]
    for receiver in receivers:
        receiver.start()
    assert by_ranks(ranks, act) == [(names, fingerprint(digests(travels)))] * ranks
    for receiver in receivers:
        receiver.join(60)
    places = shipped[0].shipment.place.ranks
    assert shown == {name: (digests(travels), places[rank_of(name, ranks)].address) for name in names}


def test_the_rank_of_a_generator_is_that_of_its_number():
    assert [rank_of(f"generator {place}", 4) for place in (0, 3, 5)] == [0, 3, 1]
    assert rank_of("engine", 4) == 0


def test_a_generator_that_dies_in_the_middle_costs_the_others_nothing(helpers):
    sender = sender_of()
    weights = weights_of(1, large_tensors(1))
    helpers[0].do(at_the_third_bucket, lambda: os._exit(1))
    got, answers = delivered(sender, ship(weights, sender), helpers)
    assert got == ["generator 1"] and answers[1].result(60) == weights.digests
    with pytest.raises(ConnectionError):
        answers[0].result(60)
    weights = weights_of(2, large_tensors(2))
    got, answers = delivered(sender, ship(weights, sender), helpers[1:], NAMES[1:])
    assert got == ["generator 1"] and answers[0].result(60) == weights.digests
    ended(sender, helpers[1:], NAMES[1:])


def test_a_generator_that_stands_still_is_given_up_in_a_quarter_of_the_time_and_comes_back_later(helpers):
    sender = sender_of(timeout_s=6.0)
    weights = weights_of(1, large_tensors(1))
    helpers[1].do(at_the_third_bucket, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    begin = time.monotonic()
    got, answers = delivered(sender, ship(weights, sender), helpers)
    assert got == ["generator 0"] and time.monotonic() - begin < 6.0
    assert answers[0].result(60) == weights.digests
    helpers[1].send_signal(signal.SIGCONT)
    with pytest.raises(SyncError, match="the rank that hands version 1 over is gone, or gave up"):
        answers[1].result(60)
    weights = weights_of(2, large_tensors(2))
    got, answers = delivered(sender, ship(weights, sender), helpers)
    assert got == NAMES and [answer.result(60) for answer in answers] == [weights.digests] * 2
    ended(sender, helpers)


_senders: list[DeviceHandlesSender] = []


def sends(weights: Weights) -> Weights:
    """In a helper, which is a rank."""
    _senders.append(sender_of())
    return ship(weights, _senders[-1])


def hands_over(sent: Weights, dies_at: int) -> list[str]:
    """``dies_at``: the bucket that it does not fill any more."""
    sender = _senders[-1]
    plain = sender._fill

    def fill(memory, begin, parts):
        if begin == dies_at << 20:
            os._exit(1)
        plain(memory, begin, parts)

    sender._fill = fill
    return sender.deliver(sent.shipment, ["generator 0"])


@pytest.mark.parametrize("dies_at", [0, 2])
def test_a_rank_that_dies_in_the_middle_leaves_an_error_and_no_weights(helper, dies_at):
    sent = helper.do(sends, weights_of(1, large_tensors(1)))
    receiver = DeviceHandlesReceiver("generator 0")
    answer = helper.ask(hands_over, sent, dies_at)
    with (
        pytest.raises(SyncError, match="the rank that hands version 1 over is gone, or gave up: it has ended"),
        arrived(sent, receiver) as here,
    ):
        digests(here.tensors)
    with pytest.raises(ConnectionError):
        answer.result(60)
    lost = pytest.raises(SyncError, match="version 1 is lost with the rank that held it")
    with lost, arrived(sent, receiver):
        pass
    sender = sender_of()  # of the rank in its place
    found = in_background(lambda: taken_by(receiver, ship(weights_of(2), sender), sender))
    assert found() == weights_of(2).digests
    receiver.close()
    sender.close()


def in_background(act):
    """What it gives is asked for later."""
    found = []
    thread = threading.Thread(target=lambda: found.append(act()))
    thread.start()

    def result():
        thread.join(60)
        return found[0]

    return result


def taken_by(receiver, sent, sender, names=("generator 0",)) -> dict[str, str]:
    got = in_background(lambda: sender.deliver(sent.shipment, list(names)))
    with arrived(sent, receiver) as here:
        shown = digests({n: t.clone() for n, t in here.tensors.items()})
    assert got() == list(names)
    return shown


def test_a_block_is_not_filled_again_before_all_have_read_it(monkeypatch):
    """Two generators of one rank; the first has read both blocks when the second still reads the first one."""
    sender, weights = sender_of(), weights_of(1, large_tensors(1))
    sent = ship(weights, sender)
    read_by_first, unread = threading.Event(), []
    plain = sender._fill

    def fill(memory, begin, parts):
        if begin == 2 << 20:
            unread.extend(sorted(reader.unread) for reader in sender._readers)
        plain(memory, begin, parts)

    def first() -> int:
        with arrived(sent, DeviceHandlesReceiver("generator 0")) as here:
            for count, _ in enumerate(here.tensors.rounds()):
                if count == 1:
                    read_by_first.set()
        return count

    monkeypatch.setattr(sender, "_fill", fill)
    got = in_background(lambda: sender.deliver(sent.shipment, ["generator 0", "generator 2"]))
    other = in_background(first)
    with arrived(sent, DeviceHandlesReceiver("generator 2")) as here:
        rounds = here.tensors.rounds()
        held = [(each.values.clone(), each.values) for each in next(rounds)]
        assert read_by_first.wait(60)
        assert all(torch.equal(then, now) for then, now in held)
        assert len([*rounds]) == 2
    assert got() == ["generator 0", "generator 2"] and other() == 2
    assert len(unread) == 2 and not any(0 in of_one for of_one in unread)
    sender.close()


def test_each_side_waits_for_its_device_before_it_says_that_a_block_is_filled_or_read(monkeypatch):
    done: dict[int, list[str]] = {}
    say = blocks.Line.say

    def noted(what: str) -> None:
        done.setdefault(threading.get_ident(), []).append(what)

    def saying(line, what, *more, **options):
        if what in ("filled", "read"):
            noted(what)
        say(line, what, *more, **options)

    monkeypatch.setattr(blocks.Line, "say", saying)
    monkeypatch.setattr(device_handles, "settle", lambda device: noted("waits"))
    sender, receiver = sender_of(), DeviceHandlesReceiver("generator 0")
    taken_by(receiver, ship(weights_of(1, large_tensors(1)), sender), sender)
    assert sorted(done.values()) == [["waits", "filled"] * 3, ["waits", "read"] * 3]
    receiver.close()
    sender.close()


def taken_alone(name: str, sent: Weights) -> dict[str, str]:
    with arrived(sent, DeviceHandlesReceiver(name)) as here:
        return digests(here.tensors)


def test_without_generators_the_delivery_ends_after_a_quarter_of_its_time_and_who_comes_late_is_told():
    sender = sender_of(timeout_s=0.4)
    sent = ship(weights_of(1), sender)
    with pytest.raises(SyncError, match="version 1 reached no generator: no generator was there"):
        sender.deliver(sent.shipment, ["generator 0"])
    with pytest.raises(SyncError, match="version 1 cannot be handed over any more"):
        sender.deliver(sent.shipment, ["generator 0"])
    receiver = DeviceHandlesReceiver("generator 0")
    nobody = pytest.raises(SyncError, match=r"not handed over within 0.8 s \(twice sync.timeout_s\)")
    with nobody, arrived(sent, receiver) as here:
        digests(here.tensors)
    again = ship(weights_of(2), sender)
    old = in_background(lambda: error_of(taken_alone, "generator 2", replaced(sent, timeout_s=60.0)))
    with pytest.raises(SyncError, match="version 2 reached no generator"):
        sender.deliver(again.shipment, ["generator 0"])  # who comes for the old one is heard meanwhile, or next time
    sender._timeout_s = 60.0
    third = ship(weights_of(3), sender)
    assert taken_by(receiver, third, sender) == weights_of(3).digests
    assert "version 1 was handed over without this generator" in str(old())
    sender.close()


def replaced(sent: Weights, **place) -> Weights:
    return replace(sent, shipment=replace(sent.shipment, place=replace(sent.shipment.place, **place)))


def error_of(act, *arguments) -> Exception | None:
    try:
        act(*arguments)
    except Exception as error:
        return error
    return None


def test_members_that_are_not_waited_for_come_along_if_they_are_here(helper):
    sender = sender_of(timeout_s=400.0)  # waiting for the missing one would be seen
    weights = weights_of(1)
    got, (answer,) = delivered(sender, ship(weights, sender), [helper], awaited=["generator 0"])
    assert got == ["generator 0"] and answer.result(60) == weights.digests
    ended(sender, [helper])


def test_a_generator_on_another_device_is_refused_by_both_names(monkeypatch):
    sender = sender_of()
    sent = ship(weights_of(1), sender)
    monkeypatch.setattr(device_handles, "identity", lambda device: "cuda GPU-5")
    message = "generator 0 computes on cuda GPU-5 and its rank of the learner on cpu of .*, and handles lead only to"
    with pytest.raises(SyncError, match=message), arrived(sent, DeviceHandlesReceiver("generator 0")):
        pass
    sender.close()


def test_ranks_that_lose_one_of_them_raise_and_the_generators_of_all_are_told():
    """The second rank fails at its second bucket."""
    weights = weights_of(1, large_tensors(1))
    held = cut_as_fsdp2(weights.tensors, 2)
    shipped, sending = [], threading.Event()

    def act(rank, peers):
        sender = sender_of(timeout_s=20.0, peers=peers)
        sent = ship(weights, sender, held[rank])
        plain = sender._fill

        def fill(memory, begin, parts):
            if rank == 1 and begin == 1 << 20:
                raise RuntimeError("no memory")
            plain(memory, begin, parts)

        sender._fill = fill
        if rank == 0:
            shipped.append(sent)
            sending.set()
        try:
            return error_of(sender.deliver, sent.shipment, NAMES)
        finally:
            sender.close()

    def receive(name):
        sending.wait(30)
        return error_of(taken_alone, name, shipped[0])

    told = [in_background(lambda name=name: receive(name)) for name in NAMES]
    failed = by_ranks(2, act)
    assert [str(error).partition(":")[0] for error in failed] == ["version 1 reached no generator"] * 2
    assert all("version 1 over is gone, or gave up" in str(error()) for error in told)


def test_pieces_that_are_no_stretch_of_their_tensor_are_refused_by_name():
    layout = canonical_layout({"w": (4, 6)}, {"w": "torch.float32"})
    halves = [Piece(h, (4, 6), ((0, 4), (3 * h, 3 * h + 3)), "torch.float32") for h in range(2)]
    entries = {entry.name: entry for entry in entries_of(layout)}
    with pytest.raises(SyncError, match=r"'w' of rank 0 is not cut along its first dimension only"):
        parts_of(plan({"w": halves}, layout), entries, 1 << 20, 96)


def test_buckets_cut_tensors_and_every_byte_is_of_one_of_them():
    layout = canonical_layout({"a": (5, 8), "b": (3,)}, {"a": "torch.float32", "b": "torch.int64"})
    entries = {entry.name: entry for entry in entries_of(layout, 64)}
    halves = [
        Piece(0, (5, 8), ((0, 3), (0, 8)), "torch.float32"),
        Piece(1, (5, 8), ((3, 5), (0, 8)), "torch.float32"),
    ]
    copies = plan({"a": halves, "b": [Piece(1, (3,), ((0, 3),), "torch.int64")]}, layout)
    found = [[(p.begin, p.end, p.copy.holder) for p in parts] for parts in parts_of(copies, entries, 128, 216)]
    assert found == [[(0, 96, 0), (96, 128, 1)], [(128, 160, 1), (192, 216, 1)]]


def test_a_block_ends_with_the_last_process_that_has_it(helper):
    block = blocks.Block(1 << 20, torch.device("cpu"))
    block.memory.fill_(7)
    own = os.dup(block.descriptors[0])
    memory = blocks.opened(block.handle(), [own], torch.device("cpu"))
    block.close()
    assert int(memory.sum()) == 7 << 20
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(own)


def test_a_line_to_nobody_is_gone_and_so_is_one_that_hangs_up():
    with pytest.raises(blocks.Gone, match="refused"):
        blocks.line_to("\0nearpolicy-nobody")
    listener = blocks.Listener()
    line = blocks.line_to(listener.address)
    other = listener.accept()
    line.say("a", 1)
    assert other.hear(1) == (("a", 1), [])
    with pytest.raises(TimeoutError):
        other.hear(0.01)
    line.close()
    with pytest.raises(blocks.Gone, match="it has ended, or hung up"):
        other.hear(1)
    with pytest.raises(blocks.Gone):
        other.say("b")
    with pytest.raises(blocks.Gone, match="Bad file descriptor"):  # as a load finds it that goes on once it is given up
        line.say("read", 1, 0)
    with pytest.raises(blocks.Gone, match="Bad file descriptor"):
        line.hear(1)
    listener.close()


@pytest.mark.parametrize("settings", ["expandable_segments:True,max_split_size_mb:64", "max_split_size_mb:64", ""])
def test_memory_that_others_may_open_is_not_of_segments_that_grow_and_settings_come_back(settings):
    get, put = torch._C._accelerator_getAllocatorSettings, torch._C._accelerator_setAllocatorSettings
    before = get()
    put(settings)
    try:
        with devices.allocations_of_their_own():
            inside = get()
        assert inside.endswith("expandable_segments:False") == ("expandable" in settings) and settings in inside
        assert get() == settings
    finally:
        put(before)


def cannot() -> torch.Tensor:
    raise RuntimeError("CUDA error: invalid device context")


@pytest.mark.parametrize(
    ("handle", "message"),
    [
        ((3, cannot), "the learner calls its device 3, and this generator calls the same one None"),
        ((None, cannot, ()), "memory of the learner cannot be opened on cpu: RuntimeError: CUDA error: invalid device"),
    ],
)
def test_memory_that_cannot_be_opened_is_refused_with_the_reason(handle, message):
    with pytest.raises(SyncError, match=message):
        blocks.opened(pickle.dumps((64, handle + ((),) * (3 - len(handle)))), [], torch.device("cpu"))
    with pytest.raises(SyncError, match="memory of meta cannot be opened by another process"):
        blocks.Block(64, torch.device("meta"))


def test_a_process_of_another_user_is_not_heard(monkeypatch):
    listener = blocks.Listener()
    monkeypatch.setattr(os, "getuid", lambda: -5)
    with pytest.raises(blocks.Gone, match=r"a process of user .* is there"):
        blocks.line_to(listener.address)
    with pytest.raises(blocks.Gone, match=r"a process of user .* is there"):
        listener.accept()
    listener.close()


def test_elsewhere_than_on_linux_it_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(blocks.sys, "platform", "darwin")
    with pytest.raises(SyncError, match=r"sync\.transport=device_handles needs Linux, and this is darwin"):
        sender_of()
