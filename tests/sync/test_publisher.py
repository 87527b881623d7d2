"""A publication is proved on every generator, or it is an error that names the tensor."""

from __future__ import annotations

import asyncio

import pytest
import torch

from nearpolicy.errors import SyncError
from nearpolicy.models.weights import digests, fingerprint, load_weights
from nearpolicy.records import VersionRecord
from nearpolicy.roles import Weights
from nearpolicy.sync.publisher import Publisher


class Learner:
    """Two tensors that change with every version."""

    def __init__(self) -> None:
        self.version = 0

    async def weights(self, record_parent: int | None) -> Weights:
        tensors = {"a.w": torch.full((2, 3), float(self.version)), "b.w": torch.arange(4.0) * self.version}
        parts = digests(tensors)
        record = VersionRecord(
            lineage=0,
            version=self.version,
            updates=2 * self.version,
            fingerprint=fingerprint(parts),
            parent=record_parent,
        )
        return Weights(record=record, tensors=tensors, digests=parts)


class Generator:
    """Copies what it is sent, shows what it holds; may change a tensor, lose one, raise, or never answer."""

    def __init__(self, change=lambda held: None, error: Exception | None = None, never: bool = False) -> None:
        self.change, self.error, self.never = change, error, never
        self.held: dict[str, torch.Tensor] = {}

    async def load(self, weights: Weights):
        if self.never:
            await asyncio.Event().wait()
        if self.error:
            raise self.error
        self.held = {name: tensor.clone() for name, tensor in weights.tensors.items()}
        self.change(self.held)
        return digests(self.held)


def publish(*generators: Generator, timeout_s: float = 5.0, events: list | None = None) -> VersionRecord:
    told = (lambda kind, **fields: events.append((kind, fields["version"]))) if events is not None else None
    return asyncio.run(Publisher(Learner(), generators, timeout_s=timeout_s, on_event=told).publish())


def test_every_generator_holds_and_shows_the_weights_of_the_learner():
    generators, events = [Generator(), Generator()], []
    record = publish(*generators, events=events)
    assert all(fingerprint(digests(generator.held)) == record.fingerprint for generator in generators)
    assert events == [("export", 0), ("load", 0), ("compare", 0)]


def test_every_version_names_the_published_one_before_it():
    async def scenario() -> list[tuple[int, int | None, int]]:
        learner = Learner()
        publisher = Publisher(learner, [Generator()], timeout_s=5.0)
        records = []
        for learner.version in (0, 2, 4):
            records.append(await publisher.publish())
        return [(r.version, r.parent, r.updates) for r in records]

    assert asyncio.run(scenario()) == [(0, None, 0), (2, 0, 4), (4, 2, 8)]


def one_bit(held: dict[str, torch.Tensor]) -> None:
    held["b.w"][3] = -0.0


def loses_one(held: dict[str, torch.Tensor]) -> None:
    del held["a.w"]


def has_one_more(held: dict[str, torch.Tensor]) -> None:
    held["c.w"] = torch.zeros(1)


@pytest.mark.parametrize(("change", "named"), [(one_bit, "'b.w'"), (loses_one, "'a.w'"), (has_one_more, "'c.w'")])
def test_a_generator_that_holds_anything_else_stops_the_run_with_the_tensors_name(change, named):
    message = f"generator 0 does not hold version 0 after its load: {named} differ"
    with pytest.raises(SyncError, match=message):
        publish(Generator(change))


def test_many_differing_tensors_are_counted_rather_than_listed():
    def more(held):
        held.update({f"x{i}": torch.zeros(1) for i in range(8)})

    with pytest.raises(SyncError, match="'x0', 'x1', 'x2', 'x3', 'x4' and 3 more differ"):
        publish(Generator(more))


def test_a_generator_that_never_answers_is_named_after_a_bounded_wait():
    with pytest.raises(SyncError, match=r"generator 0 did not take version 0 within 0.02 s \(twice sync.timeout_s\)"):
        publish(Generator(never=True), timeout_s=0.01)


def test_an_error_of_a_generators_load_is_the_error_of_the_publication():
    with pytest.raises(SyncError, match=r"'b\.w' is not filled"):
        publish(Generator(error=SyncError("'b.w' is not filled by what was sent")))


def test_after_a_failed_publication_the_next_one_still_names_the_last_that_was_proved():
    async def scenario() -> VersionRecord:
        learner, generator = Learner(), Generator()
        publisher = Publisher(learner, [generator], timeout_s=5.0)
        await publisher.publish()
        learner.version, generator.change = 1, one_bit
        with pytest.raises(SyncError):
            await publisher.publish()
        learner.version, generator.change = 2, lambda held: None
        return await publisher.publish()

    assert asyncio.run(scenario()).parent == 0


class TwoTensors(torch.nn.Module):
    def __init__(self, names=("a", "b"), shape=(2, 3)) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, torch.nn.Module())
            getattr(self, name).w = torch.nn.Parameter(torch.zeros(shape))


def test_a_load_is_complete_or_an_error_that_names_every_tensor_and_applies_none():
    model = TwoTensors(("a", "c"))
    with pytest.raises(SyncError) as raised:
        load_weights(model, {"a.w": torch.ones(2, 3), "b.w": torch.ones(2, 3)})
    assert all(part in str(raised.value) for part in ("b.w", "c.w", "0 tensors applied"))
    assert not model.a.w.detach().any()
    with pytest.raises(SyncError, match=r"\[3, 2\]|\(3, 2\)"):
        load_weights(TwoTensors(("a",)), {"a.w": torch.ones(3, 2)})
