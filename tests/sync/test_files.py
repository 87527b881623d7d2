"""Versions as files: anchors and changes, whole or refused, and never removed under a reader."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import load_file
from sharded import cut_as_fsdp2
from shipping_cases import by_ranks, forget, record_of, take, tensors_of, weights_of

from nearpolicy.errors import SyncError
from nearpolicy.models.weights import digests, fingerprint
from nearpolicy.roles import Weights
from nearpolicy.sync.files import FileReceiver, FileSender, _Silence
from nearpolicy.sync.shipping import arrived, ship


def sender_in(folder, **options) -> FileSender:
    return FileSender(str(folder), "run", **{"timeout_s": 60.0, "anchor_every": 4} | options)


def drifting(version: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """A few elements more are others in each version; one tensor never changes."""
    tensors = tensors_of(0, dtype)
    tensors["f.large"] = torch.randn(200, 300, generator=torch.Generator().manual_seed(3)).to(dtype)
    for v in range(1, version + 1):
        at = torch.randperm(60_000, generator=torch.Generator().manual_seed(v))[:500]
        tensors["f.large"].view(-1)[at] += 0.01
        tensors["a.weight"] = tensors["a.weight"] + 0.01
    return tensors


def shown(receiver, sent: Weights) -> dict[str, str]:
    with arrived(sent, receiver) as here:
        return digests(here.tensors)


def kinds(folder: Path) -> dict[int, str]:
    found = sorted((folder / "run").glob("0*/manifest.json"))
    return {int(path.parent.name): json.loads(path.read_text())["kind"] for path in found}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_anchors_and_changes_make_the_weights_of_every_version(tmp_path, helper, dtype):
    sender, near = sender_in(tmp_path), FileReceiver("near")
    for version in range(6):
        weights = weights_of(version, drifting(version, dtype))
        sent = ship(weights, sender)
        assert shown(near, sent) == weights.digests
        assert helper.do(take, "far", lambda: FileReceiver("far"), sent) == weights.digests
    assert kinds(tmp_path) == {1: "full", 2: "delta", 3: "delta", 4: "delta", 5: "full", 6: "delta"}
    full, small = (sum(f.stat().st_size for f in (tmp_path / f"run/0000000{n}").iterdir()) for n in (5, 6))
    assert small < 0.06 * full
    helper.do(forget, "far")


def test_an_anchor_is_an_ordinary_safetensors_file(tmp_path):
    weights = weights_of(0)
    ship(weights, sender_in(tmp_path))
    held = load_file(tmp_path / "run/00000001/model.safetensors")
    assert digests(held) == {name: d for name, d in weights.digests.items() if name != "c.nothing"}


def test_a_receiver_that_missed_versions_catches_up_from_what_it_holds_or_from_an_anchor(tmp_path):
    sender, early = sender_in(tmp_path), FileReceiver("early")
    sent = [ship(weights_of(v, drifting(v)), sender) for v in range(2)]
    assert shown(early, sent[0]) == sent[0].digests
    sent += [ship(weights_of(v, drifting(v)), sender) for v in range(2, 4)]
    (tmp_path / "run/00000001/model.safetensors").unlink()  # from what it holds: the anchor is not read again
    assert shown(early, sent[3]) == sent[3].digests
    sent += [ship(weights_of(v, drifting(v)), sender) for v in range(4, 7)]
    for number in (2, 3, 4):
        (tmp_path / f"run/0000000{number}/manifest.json").unlink()  # from the second anchor
    assert shown(early, sent[6]) == shown(FileReceiver("new"), sent[6]) == sent[6].digests


def test_without_delta_every_version_is_whole_and_nobody_keeps_a_copy(tmp_path):
    sender, receiver = sender_in(tmp_path, delta=False), FileReceiver("r")
    for version in range(3):
        weights = weights_of(version, drifting(version))
        assert shown(receiver, ship(weights, sender)) == weights.digests
    assert set(kinds(tmp_path).values()) == {"full"} and not sender._last and not receiver._held


def test_a_change_larger_than_the_whole_is_written_whole(tmp_path):
    sender = sender_in(tmp_path)
    for version in range(2):
        ship(weights_of(version, {"w": torch.randint(0, 256, (5000,), dtype=torch.uint8)}), sender)
    assert kinds(tmp_path) == {1: "full", 2: "full"}


def test_weights_of_another_shape_begin_with_an_anchor(tmp_path):
    sender, receiver = sender_in(tmp_path), FileReceiver("r")
    for version, size in enumerate((3000, 4000)):
        weights = weights_of(version, {"w": torch.randn(size)})
        assert shown(receiver, ship(weights, sender)) == weights.digests
    assert kinds(tmp_path) == {1: "full", 2: "full"}


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["00000001/model.safetensors", "00000002/delta-0.bin"])
def test_a_damaged_file_is_named_and_what_is_held_stays_what_it_was(tmp_path, file):
    sender, holds, new = sender_in(tmp_path), FileReceiver("holds"), FileReceiver("new")
    sent = [ship(weights_of(0, drifting(0)), sender)]
    shown(holds, sent[0])
    sent.append(ship(weights_of(1, drifting(1)), sender))
    good = (tmp_path / "run" / file).read_bytes()
    damage(tmp_path / "run" / file)
    with pytest.raises(SyncError, match=f"{file} is not what was written there"):
        shown(new, sent[1])
    if file.startswith("00000002"):
        with pytest.raises(SyncError, match=file):
            shown(holds, sent[1])
        (tmp_path / "run" / file).write_bytes(good)
    assert shown(holds, sent[1]) == sent[1].digests


def test_weights_that_come_out_otherwise_are_named_and_the_next_time_taken_from_an_anchor(tmp_path):
    sender, receiver = sender_in(tmp_path), FileReceiver("r")
    sent = [ship(weights_of(0, drifting(0)), sender)]
    shown(receiver, sent[0])
    receiver._held["f.large"][0, 0] += 1  # as a fault of memory would
    sent.append(ship(weights_of(1, drifting(1)), sender))
    with pytest.raises(SyncError, match=r"'f.large' and 0 more .* differ from what was sent"):
        shown(receiver, sent[1])
    assert shown(receiver, sent[1]) == sent[1].digests


def test_a_version_without_its_manifest_is_none(tmp_path):
    sender = sender_in(tmp_path)
    sent = ship(weights_of(0), sender)
    (tmp_path / "run/00000001/manifest.json").unlink()
    with pytest.raises(SyncError, match=r"version 0 is not in .* any more, or cannot be seen from here"):
        shown(FileReceiver("r"), sent)


def test_the_last_two_anchors_and_what_follows_them_stay(tmp_path):
    sender = sender_in(tmp_path, anchor_every=2)
    sent = [ship(weights_of(v, drifting(v)), sender) for v in range(7)]
    assert list(kinds(tmp_path)) == [5, 6, 7]
    for version in (4, 5, 6):
        assert shown(FileReceiver("r"), sent[version]) == sent[version].digests
    with pytest.raises(SyncError, match="version 3 is not in"):
        shown(FileReceiver("r"), sent[3])


def test_what_a_receiver_reads_stays_while_it_reads(tmp_path):
    sender = sender_in(tmp_path, anchor_every=1)
    sent = [ship(weights_of(0), sender)]
    slow = FileReceiver("slow")
    reads, go = threading.Event(), threading.Event()
    plain = slow._fetched

    def fetched(*arguments):
        reads.set()
        go.wait(30)
        return plain(*arguments)

    slow._fetched = fetched
    found = []
    thread = threading.Thread(target=lambda: found.append(shown(slow, sent[0])))
    thread.start()
    reads.wait(30)
    for version in range(1, 5):
        ship(weights_of(version), sender)
    assert list(kinds(tmp_path)) == [1, 2, 3, 4, 5]
    go.set()
    thread.join(30)
    assert found == [sent[0].digests]
    ship(weights_of(5), sender)
    assert list(kinds(tmp_path)) == [5, 6]


def test_a_reader_that_says_nothing_new_for_too_long_is_given_up():
    now = [0.0]
    silence = _Silence(lambda: now[0])
    said = {"a.json": json.dumps({"folder": 3, "count": 1})}
    assert silence.heard(said, 10.0) == [3]
    now[0] = 10.0
    assert silence.heard(said, 10.0) == [3]
    now[0] = 10.1
    assert silence.heard(said, 10.0) == []
    assert silence.heard({"a.json": json.dumps({"folder": 3, "count": 2})}, 10.0) == [3]


def test_a_sender_after_a_killed_one_goes_on_with_an_anchor_behind_its_last_folder(tmp_path):
    first, receiver = sender_in(tmp_path), FileReceiver("r")
    for version in range(3):
        shown(receiver, ship(weights_of(version, drifting(version)), first))
    (tmp_path / "run/00000004").mkdir()  # begun, and killed
    second = sender_in(tmp_path)
    for version in range(2, 4):
        weights = weights_of(version, drifting(version), lineage=1)
        assert shown(receiver, ship(weights, second)) == weights.digests
    assert kinds(tmp_path)[5] == "full" and kinds(tmp_path)[6] == "delta"


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_each_rank_writes_its_pieces_and_their_changes(tmp_path, wire):
    def act(rank, peers):
        sender, receiver, found = sender_in(tmp_path, peers=peers, wire=wire), FileReceiver(f"r{rank}"), []
        for version in range(3):
            held = cut_as_fsdp2(drifting(version, torch.float32), 2)[rank]
            sent = ship(Weights(record=record_of(version, {}), tensors={}, digests={}), sender, held)
            found.append((shown(receiver, sent), sent.record.fingerprint))
        return found

    for found in by_ranks(2, act):
        for version, (held, print_of) in enumerate(found):
            tensors = drifting(version, torch.float32)
            travels = {n: t.to(wire) if wire and t.is_floating_point() else t for n, t in tensors.items()}
            assert held == digests(travels) and print_of == fingerprint(held)
    assert set(kinds(tmp_path).values()) == {"full", "delta"}


def test_an_object_store_will_do():
    path = "memory://weights-of-a-test"
    sender, receiver = FileSender(path, "run", timeout_s=60, anchor_every=2), FileReceiver("r")
    for version in range(5):
        weights = weights_of(version, drifting(version))
        assert shown(receiver, ship(weights, sender)) == weights.digests
    files = fsspec.filesystem("memory")
    folders = sorted(p.rpartition("/")[2] for p in files.ls("/weights-of-a-test/run", detail=False))
    assert folders[:3] == ["00000003", "00000004", "00000005"]
    files.rm("/weights-of-a-test", recursive=True)


def test_a_path_that_cannot_be_used_is_named(tmp_path):
    with pytest.raises(SyncError, match=r"sync.path 'nonsense://x/run' cannot be used"):
        FileSender("nonsense://x", "run", timeout_s=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(SyncError, match=r"sync.path .*/file/run' cannot be read"):
        sender_in(tmp_path / "file")
    sender = sender_in(tmp_path)
    (tmp_path / "run").write_text("")
    with pytest.raises(SyncError, match=r"weights cannot be written to .*/run/00000001/model.safetensors"):
        ship(weights_of(0), sender)


def test_a_version_that_could_not_be_written_is_no_base_for_the_next(tmp_path, monkeypatch):
    sender, receiver = sender_in(tmp_path), FileReceiver("near")
    assert shown(receiver, ship(weights_of(0, drifting(0)), sender))

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with pytest.raises(SyncError, match="cannot be written"):
            ship(weights_of(1, drifting(1)), sender)
    sent = ship(weights_of(2, drifting(2)), sender)
    assert kinds(tmp_path)[3] == "delta"
    assert shown(receiver, sent) == shown(FileReceiver("new"), sent) == sent.digests


def test_after_another_dtype_changes_are_written_again(tmp_path):
    sender, receiver = sender_in(tmp_path, anchor_every=16), FileReceiver("near")
    for version, dtype in enumerate([torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16]):
        weights = weights_of(version, drifting(version, dtype))
        assert shown(receiver, ship(weights, sender)) == weights.digests
    assert kinds(tmp_path) == {1: "full", 2: "full", 3: "delta", 4: "delta"}


def test_ranks_that_exchange_pieces_of_one_shape_begin_with_an_anchor(tmp_path):
    tensors = {"a": torch.randn(8, 300)}
    held = cut_as_fsdp2(tensors, 2)
    unknown = Weights(record=record_of(1, {}), tensors={}, digests={})
    receiver = FileReceiver("near")

    def act(rank, peers):
        sender, found = sender_in(tmp_path, peers=peers), []
        for mine in (rank, 1 - rank):
            sent = ship(unknown, sender, held[mine])
            found += [shown(receiver, sent)] if rank == 0 else []
            peers.exchange("read", None)
        return found

    assert by_ranks(2, act)[0] == [digests(tensors)] * 2
    assert kinds(tmp_path) == {1: "full", 2: "full"}


def test_a_reader_that_was_killed_while_it_wrote_holds_up_nobody(tmp_path):
    sender = sender_in(tmp_path, delta=False)
    ship(weights_of(0), sender)
    (tmp_path / "run/readers").mkdir(exist_ok=True)
    (tmp_path / "run/readers/near.json.part").touch()
    for version in range(1, 4):
        ship(weights_of(version), sender)
    assert set(kinds(tmp_path)) == {3, 4}
