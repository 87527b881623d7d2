"""Segments in shared memory: whole or refused, used again, never left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from sharded import cut_as_fsdp2
from shipping_cases import by_ranks, forget, record_of, take, tensors_of, weights_of

from nearpolicy.errors import SyncError
from nearpolicy.models.weights import digests, fingerprint
from nearpolicy.roles import Adapter, Weights
from nearpolicy.sync.shared_memory import SharedMemoryReceiver, SharedMemorySender, _Segment
from nearpolicy.sync.shipping import arrived, ship


@pytest.fixture
def sender(tmp_path):
    sender = SharedMemorySender("run/1", folder=tmp_path)
    yield sender
    sender.close()
    assert list(tmp_path.iterdir()) == []


def segments(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".owner")


def test_a_generator_in_another_process_holds_what_was_sent_version_after_version(sender, helper, tmp_path):
    for version in range(3):
        weights = weights_of(version)
        sent = ship(weights, sender)
        assert not sent.tensors and sent.nbytes == weights.nbytes
        for name in ("one", "other"):
            assert helper.do(take, name, SharedMemoryReceiver, sent) == weights.digests
        assert len(segments(tmp_path)) == 1  # the same one each time
    for name in ("one", "other"):
        helper.do(forget, name)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_each_rank_writes_its_pieces_and_the_whole_has_the_learners_digests(ranks, wire, tmp_path):
    tensors = tensors_of(1)
    travels = {n: t.to(wire) if wire is not None and t.is_floating_point() else t for n, t in tensors.items()}
    held = cut_as_fsdp2(tensors, ranks)
    unknown = Weights(record=record_of(1, {}), tensors={}, digests={})

    def act(rank, peers):
        sender = SharedMemorySender("run", peers=peers, wire=wire, folder=tmp_path)
        for _ in range(2):  # the second time as planned before
            sent = ship(unknown, sender, held[rank])
        with arrived(sent, SharedMemoryReceiver()) as here:
            shown = digests(here.tensors)
        peers.exchange("arrived", None)
        sender.close()
        return shown, sent

    for shown, sent in by_ranks(ranks, act):
        assert shown == sent.digests == digests(travels)
        assert sent.record.fingerprint == fingerprint(digests(travels))
    assert list(tmp_path.iterdir()) == []


def test_digests_that_the_first_rank_has_are_taken_by_all_and_not_made_again(tmp_path):
    tensors = tensors_of(1)
    held, known = cut_as_fsdp2(tensors, 2), digests(tensors)

    def act(rank, peers):
        sender = SharedMemorySender("run", peers=peers, folder=tmp_path)
        sender._digested = None  # would be called
        parts = known if rank == 0 else {}
        sent = ship(Weights(record=record_of(1, parts), tensors={}, digests=parts), sender, held[rank])
        peers.exchange("sent", None)
        sender.close()
        return sent.digests

    assert by_ranks(2, act) == [known, known]


def test_ranks_whose_pieces_do_not_fit_together_all_say_so(tmp_path):
    held = cut_as_fsdp2(tensors_of(1), 2)
    del held[1]["b.weight"]
    unknown = Weights(record=record_of(1, {}), tensors={}, digests={})

    def act(rank, peers):
        return ship(unknown, SharedMemorySender("run", peers=peers, folder=tmp_path), held[rank])

    found = by_ranks(2, act)
    assert [type(error) for error in found] == [SyncError] * 2
    assert all("'b.weight' [32:64, 0:33] is held by nobody" in str(error) for error in found)


def test_a_generator_of_low_precision_gets_its_own_dtype_and_digests_over_it(tmp_path):
    sender = SharedMemorySender("run", wire=torch.bfloat16, folder=tmp_path)
    weights = weights_of(1)
    sent = ship(weights, sender)
    with arrived(sent, SharedMemoryReceiver()) as here:
        assert here.tensors["b.weight"].dtype == torch.bfloat16 and here.tensors["e.counts"].dtype == torch.int64
        assert digests(here.tensors) == sent.digests == here.digests
        assert torch.equal(here.tensors["b.weight"], weights.tensors["b.weight"].bfloat16())
    assert sent.record.fingerprint == weights.record.fingerprint
    sender.close()


def test_an_adapter_alone_arrives_as_an_adapter(sender):
    a, b = torch.randn(2, 8), torch.randn(6, 2)
    parts = (digests({"": a})[""], digests({"": b})[""])
    adapter = Adapter(scaling=0.5, factors={"x.weight": (a, b)}, digests={"x.weight": parts})
    held = {"x.weight": "of the merged weights", "y.weight": "too"}
    sent = ship(Weights(record=record_of(1, held), tensors={}, digests=held, adapter=adapter), sender)
    assert sent.adapter is None and sent.nbytes == a.nbytes + b.nbytes
    with arrived(sent, SharedMemoryReceiver()) as here:
        assert not here.tensors and here.digests == held
        assert here.adapter.scaling == 0.5 and here.adapter.digests == adapter.digests
        assert all(torch.equal(x, y) for x, y in zip(here.adapter.factors["x.weight"], (a, b), strict=True))


def test_whoever_still_reads_a_version_keeps_it_and_the_next_goes_elsewhere(sender, tmp_path):
    first = weights_of(1)
    slow, sent = SharedMemoryReceiver(), ship(first, sender)
    with arrived(sent, slow) as here:
        again = ship(weights_of(2), sender)
        assert digests(here.tensors) == first.digests
        assert again.shipment.place != sent.shipment.place and len(segments(tmp_path)) == 1
    with (
        pytest.raises(SyncError, match="version 1 is not in shared memory any more"),
        arrived(sent, SharedMemoryReceiver()),
    ):
        pass
    with arrived(again, slow) as here:
        assert digests(here.tensors) == weights_of(2).digests


def test_a_version_that_was_overwritten_or_is_being_written_is_refused(sender):
    sent = ship(weights_of(1), sender)
    receiver = SharedMemoryReceiver()
    with arrived(sent, receiver):
        pass
    ship(weights_of(2), sender)
    with pytest.raises(SyncError, match="version 1 is not in shared memory any more"), arrived(sent, receiver):
        pass
    sent = ship(weights_of(3), sender)
    sender._prepared(record_of(4, {}), sender._segment.size)  # begun, and not whole
    with pytest.raises(SyncError, match="version 3 is not in shared memory any more"), arrived(sent, receiver):
        pass
    sender._segment.unlock()
    with pytest.raises(SyncError, match="version 3 is not in shared memory any more"), arrived(sent, receiver):
        pass


def test_segments_of_a_killed_run_are_removed_by_the_next_and_those_of_a_living_one_stay(sender, tmp_path):
    mine = ship(weights_of(1), sender)
    killed = SharedMemorySender("other", folder=tmp_path)
    ship(weights_of(1), killed)
    SharedMemorySender("next", folder=tmp_path).close()
    assert len(segments(tmp_path)) == 2  # both live
    os.close(killed._owner)  # what the kernel does
    SharedMemorySender("next", folder=tmp_path).close()
    assert segments(tmp_path) == [Path(mine.shipment.place).name]


def test_a_full_memory_file_system_is_named_before_anything_is_written(sender, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SyncError, match=r"weights need .* MB in .*--shm-size in a container"):
        ship(weights_of(1), sender)


def test_a_path_of_another_host_is_named(sender):
    sent = ship(weights_of(1), sender)
    Path(sent.shipment.place).unlink()
    with pytest.raises(SyncError, match="is this the learner's host"), arrived(sent, SharedMemoryReceiver()):
        pass


def test_a_segment_of_another_size_takes_no_memory_beside_the_one_that_it_replaces(sender, tmp_path, monkeypatch):
    create, held = _Segment.create.__func__, []

    def watched(cls, path, size):
        held.append(sum(os.fstat(file.fileno()).st_blocks for file in mapped))
        return create(cls, path, size)

    monkeypatch.setattr(_Segment, "create", classmethod(watched))
    receiver, mapped = SharedMemoryReceiver(), []
    for version, size in enumerate((1 << 20, 1 << 21, 1 << 19)):
        weights = weights_of(version, {"a": torch.randn(size)})
        sent = ship(weights, sender)
        with open(sent.shipment.place, "rb") as file, arrived(sent, receiver) as here:
            assert digests(here.tensors) == weights.digests
            mapped.append(os.fdopen(os.dup(file.fileno()), "rb"))
    assert held == [0, 8, 16]  # blocks of 512 bytes: a header each
    for file in mapped:
        file.close()


def test_who_still_maps_a_segment_that_was_given_back_is_refused(sender):
    sent = ship(weights_of(1), sender)
    receiver = SharedMemoryReceiver()
    with arrived(sent, receiver):
        pass
    ship(weights_of(2, {"a": torch.randn(1 << 16)}), sender)
    with pytest.raises(SyncError, match="version 1 is not in shared memory any more"), arrived(sent, receiver):
        pass


def test_pieces_that_did_not_fit_once_are_planned_anew_the_next_time(tmp_path):
    good, other = cut_as_fsdp2(tensors_of(1), 2), cut_as_fsdp2({"z": torch.randn(6, 2), **tensors_of(1)}, 2)
    del other[1]["b.weight"]
    unknown = Weights(record=record_of(1, {}), tensors={}, digests={})

    def act(rank, peers):
        sender = SharedMemorySender("run", peers=peers, folder=tmp_path)
        ship(unknown, sender, good[rank])
        with pytest.raises(SyncError, match="is held by nobody"):
            ship(unknown, sender, other[rank])
        sent = ship(unknown, sender, good[rank])
        peers.exchange("sent", None)
        sender.close()
        return sent.digests

    assert by_ranks(2, act) == [digests(tensors_of(1))] * 2


def test_a_segment_that_is_used_again_takes_other_tensors_of_the_same_size(sender):
    receiver, paths = SharedMemoryReceiver(), set()
    layouts = [{"a": (8, 4), "b": (2, 16)}, {"b": (2, 16), "a": (8, 4)}, {"b": (16, 2), "c": (4, 8)}]
    for version, shapes in enumerate(layouts):
        weights = weights_of(version, {name: torch.randn(shape) for name, shape in shapes.items()})
        sent = ship(weights, sender)
        paths.add(sent.shipment.place)
        with arrived(sent, receiver) as here:
            assert digests(here.tensors) == weights.digests
    assert len(paths) == 1
