"""What any learner backend must do: a suite of claims, whatever the processes, devices and library behind it.

A *backend* says how a learner comes to be and where it runs; a *learner* has the verbs of
`nearpolicy.learner.step.PolicyLearner` (``forward_backward``, ``normalise``, ``optim_step``, ``learn_ahead``, ``step``,
``annotate``, ``weights``, ``shards``, ``version``, ``policy``) and works with `nearpolicy.learner.checkpoint`. All are
compared with `PolicyLearner` in one process, in float32.

    class Backend:
        def run(self, function, *arguments) -> list:
            '''``function(make, *arguments)`` in each process, all at the same time; results by rank.
            ``make(**settings)`` gives a learner of the tiny model (`learner_cases.model_folder`) with these settings
            of section learner. ``function`` is one of this module, arguments and results can be pickled.'''

    @pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
    def test_my_backend(claim, tmp_path):
        claim(MyBackend(), tmp_path)

The claims: gradients are those of one process within 1e-5, however the batch is cut (I4); twenty steps of AdamW with
clipping stay within 1e-4 of its losses, and every process reports the same; micro-batches that do not divide among the
processes never hang; an empty batch makes no update; a step begun ahead of its batch has the same bits; a checkpoint is
an ordinary model folder, from which training goes on to the bit, and which one process can read and write as well;
what is published has the digests of one process with the same weights; what is not a number is never applied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from learner_cases import batch_of, learner, random_rows

from nearpolicy.errors import NearpolicyError
from nearpolicy.learner.checkpoint import load_checkpoint, load_saved_weights, save_checkpoint, save_weights
from nearpolicy.learner.report import TokenStats
from nearpolicy.learner.step import PolicyLearner
from nearpolicy.learner.tokens import NOTHING_KNOWN
from nearpolicy.models.pieces import whole
from nearpolicy.models.weights import digest, digests

Make = Callable[..., PolicyLearner]


class Backend(Protocol):
    """Where a learner runs."""

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]: ...


@cache
def one_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `PolicyLearner` by itself makes of it; computed once for all backends."""
    return function(learner, *arguments)


# What the processes do.


def gradient(make: Make, seed: int, budget: int) -> tuple[torch.Tensor, tuple[float, float, int]]:
    """[parameters] the gradient of one update over random rows, and what was counted."""
    own, stats, rows = make(max_tokens_per_microbatch=budget), TokenStats(), random_rows(seed, groups=4)
    own.forward_backward(range(len(rows)), own.objective, rows, NOTHING_KNOWN, stats)
    own.normalise()
    return _gradient(own), (stats.loss, stats.divisor, stats.tokens)


def _gradient(own: PolicyLearner) -> torch.Tensor:
    return torch.cat([whole(p.grad).flatten() for p in own.policy.parameters()]).clone()


def in_two_calls(make: Make, seed: int, budget: int) -> torch.Tensor:
    """The same gradient, asked for in two parts."""
    own, rows = make(max_tokens_per_microbatch=budget), random_rows(seed, groups=4)
    for part in (range(5), range(5, len(rows))):
        own.forward_backward(part, own.objective, rows, NOTHING_KNOWN, TokenStats())
    own.normalise()
    return _gradient(own)


def taught(own: PolicyLearner, steps: int, **how: Any) -> list[dict[str, float]]:
    """Metrics of the steps up to that one."""
    found = []
    for step in range(own.version, steps):
        report = own.step(batch_of(random_rows(step, **{"groups": 3} | how), step=step))
        found.append({name: value for name, value in report.metrics.items() if not name.startswith("time/")})
    return found


def curve(make: Make, steps: int) -> tuple[list[dict[str, float]], str]:
    own = make(max_tokens_per_microbatch=80, max_grad_norm=0.5, num_iterations=2)
    return taught(own, steps, groups=2), own.weights(None).record.fingerprint


def ragged(make: Make, counts: tuple[int, ...]) -> list[float]:
    """Losses of steps over so many rows each, every row in a micro-batch of its own."""
    own = make(max_tokens_per_microbatch=1)
    rows = [random_rows(step, groups=count, size=1) for step, count in enumerate(counts)]
    return [own.step(batch_of(of_step, step=i, places=8)).metrics["policy/loss"] for i, of_step in enumerate(rows)]


def ahead(make: Make, known: tuple[int, ...], forgotten: bool = False) -> tuple[str, dict[str, float]]:
    """A step that began with the first so many rows of its batch, again and again. ``forgotten``: after another
    beginning that came to nothing."""
    own, rows = make(max_tokens_per_microbatch=30), random_rows(3, groups=6)
    if forgotten:
        own.learn_ahead(random_rows(4, groups=6))
        own.forget_gradient()
    for count in known:
        own.learn_ahead(rows[:count])
    metrics = own.step(batch_of(rows)).metrics
    return own.weights(None).record.fingerprint, {k: v for k, v in metrics.items() if not k.startswith("time/")}


def nothing_to_learn(make: Make) -> tuple[bool, int, int]:
    own = make()
    before = own.weights(None).record.fingerprint
    own.step(batch_of(random_rows(0, signal=[False] * 3)))
    own.step(replace(batch_of(random_rows(0)), rows=(), groups=(), places=3))
    return own.weights(None).record.fingerprint == before, own.version, own.updates


def clipped(make: Make, max_norm: float) -> tuple[float, torch.Tensor]:
    """The norm before clipping, and the weights after an update at rate 1 of plain gradient descent in sign."""
    own, rows = make(max_grad_norm=max_norm, max_tokens_per_microbatch=40, eps=1.0), random_rows(0)
    own.forward_backward(range(len(rows)), own.objective, rows, NOTHING_KNOWN, TokenStats())
    norm = own.optim_step(1.0)
    return norm, torch.cat([tensor.flatten() for _, tensor in own.policy.whole_weights()])


def published(make: Make) -> tuple[dict[str, str], str, dict[str, str], dict[str, Any], list[str]]:
    """Digests, fingerprint, digests of the tensors that came along, pieces, and digests of what is whole."""
    own = make()
    sent = own.weights(None)
    shown = [digest(tensor) for _, tensor in own.policy.whole_weights()]
    pieces = {name: (s.tensor.clone(), s.shape, s.start) for name, s in own.shards().items()}
    return dict(sent.digests), sent.record.fingerprint, digests(sent.tensors), pieces, shown


def saves(make: Make, folder: str, steps: int) -> tuple[str, list[dict[str, float]]]:
    """A checkpoint after ``steps``; fingerprint then, and the metrics of two more steps."""
    own = make(max_tokens_per_microbatch=60, warmup_steps=3)
    taught(own, steps)
    save_checkpoint(own, Path(folder), keep_last=1)
    save_weights(own, Path(folder) / "weights" / "version.safetensors")
    at = own.weights(None).record.fingerprint
    return at, [*taught(own, steps + 2), own.weights(None).record.fingerprint]


def loads(make: Make, folder: str, steps: int, expected: str) -> tuple[str, list[dict[str, float]]]:
    """What `saves` gives, from what it has saved."""
    own = make(max_tokens_per_microbatch=60, warmup_steps=3)
    load_checkpoint(own, Path(folder) / f"step-{steps}", expected=[expected])
    at = own.weights(None).record.fingerprint
    return at, [*taught(own, steps + 2), own.weights(None).record.fingerprint]


def loads_weights(make: Make, path: str) -> str:
    own = make()
    load_saved_weights(own, Path(path))
    return own.weights(None).record.fingerprint


def with_a_bad_number(make: Make) -> tuple[str, bool, float, int]:
    """What is said of a row with one; whether the weights stayed; the loss of the next step, and the updates."""
    own, rows = make(max_tokens_per_microbatch=30), random_rows(0)
    before, said = own.weights(None).record.fingerprint, ""
    advantages = rows[5].advantages.copy()
    advantages[0] = np.nan
    try:
        own.step(batch_of([*rows[:5], replace(rows[5], advantages=advantages), *rows[6:]]))
    except NearpolicyError as error:
        said = str(error)
    stayed = own.weights(None).record.fingerprint == before
    return said, stayed, own.step(batch_of(rows)).metrics["policy/loss"], own.updates


def with_a_bad_gradient(make: Make) -> tuple[bool, bool, int, float]:
    """Whether its norm is finite, whether the weights stayed, the updates then, the loss of the next step."""
    own, rows = make(), random_rows(0)
    before = own.weights(None).record.fingerprint
    own.forward_backward(range(len(rows)), own.objective, rows, NOTHING_KNOWN, TokenStats())
    own.optimizer.divisor = 1e-300
    finite = bool(np.isfinite(own.optim_step(1e-3)))
    stayed, updates = own.weights(None).record.fingerprint == before, own.updates
    return finite, stayed, updates, taught(own, 1)[0]["policy/loss"]


# What is claimed of that.


def close(found: dict[str, float], right: dict[str, float], tolerance: float) -> None:
    assert found.keys() == right.keys()
    for name, value in right.items():
        assert found[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name


def all_equal(results: list[Any]) -> Any:
    assert all(result == results[0] for result in results)
    return results[0]


def gradients_are_those_of_one_process_however_the_batch_is_cut(backend: Backend, _: Path) -> None:
    right, counted = one_process(gradient, 3, 1 << 20)
    for budget in (1 << 20, 60, 1):
        for found, seen in backend.run(gradient, 3, budget):
            assert (found - right).norm() <= 1e-5 * right.norm()
            assert seen[1:] == counted[1:]
            assert seen[0] == pytest.approx(counted[0], rel=1e-5)
    for found in backend.run(in_two_calls, 3, 60):
        assert (found - right).norm() <= 1e-5 * right.norm()


def twenty_steps_are_those_of_one_process(backend: Backend, _: Path) -> None:
    right, _ = one_process(curve, 20)
    found, _ = all_equal(backend.run(curve, 20))
    for mine, theirs in zip(found, right, strict=True):
        close(mine, theirs, 1e-4)


def micro_batches_that_do_not_divide_never_hang(backend: Backend, _: Path) -> None:
    counts = (1, 3, 5, 2, 8, 7)
    right = one_process(ragged, counts)
    assert all_equal(backend.run(ragged, counts)) == pytest.approx(right, rel=1e-4, abs=1e-5)


def a_step_begun_ahead_has_the_same_bits(backend: Backend, _: Path) -> None:
    at_once = all_equal(backend.run(ahead, ()))
    assert all_equal(backend.run(ahead, (4, 4, 12, 20, 24))) == at_once
    assert all_equal(backend.run(ahead, (20,), True)) == at_once
    close(at_once[1], one_process(ahead, ())[1], 1e-4)


def a_batch_without_signal_or_rows_makes_no_update(backend: Backend, _: Path) -> None:
    assert all_equal(backend.run(nothing_to_learn)) == (True, 2, 0)


def the_norm_that_clips_is_that_of_the_whole_gradient(backend: Backend, _: Path) -> None:
    norm, weights = one_process(clipped, 0.01)
    assert norm > 0.02
    for found, changed in backend.run(clipped, 0.01):
        assert found == pytest.approx(norm, rel=1e-5)
        assert (changed - weights).norm() <= 1e-6 * weights.norm()


def what_is_published_is_what_one_process_publishes(backend: Backend, _: Path) -> None:
    right, fingerprint, *_ = one_process(published)
    results = backend.run(published)
    pieces: dict[str, list[Any]] = {name: [] for name in right}
    for rank, (shown, mark, sent, held, again) in enumerate(results):
        assert (shown, mark, again) == (right, fingerprint, list(right.values()))
        assert sent == (right if rank == 0 else {}) or len(results) == 1
        for name, each in held.items():
            pieces[name].append(each)
    for name, parts in pieces.items():
        together = torch.full(parts[0][1], torch.nan)
        for tensor, shape, start in parts:
            assert shape == tuple(together.shape)
            box = tuple(slice(begin, begin + length) for begin, length in zip(start, tensor.shape, strict=True))
            together[box] = tensor
        assert digest(together) == right[name]


def training_goes_on_from_a_checkpoint_to_the_bit(backend: Backend, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    at, after = all_equal(backend.run(saves, str(folder), 2))
    assert all_equal(backend.run(loads, str(folder), 2, at)) == (at, after)
    assert all_equal(backend.run(loads_weights, str(folder / "weights" / "version.safetensors"))) == at
    plain = AutoModelForCausalLM.from_pretrained(folder / "step-2")
    assert digest(plain.get_input_embeddings().weight) in one_process(_digests_of, str(folder / "step-2"))


def _digests_of(make: Make, checkpoint: str) -> list[str]:
    own = make()
    load_checkpoint(own, Path(checkpoint))
    return list(own.weights(None).digests.values())


def one_process_reads_and_writes_its_checkpoints(backend: Backend, folder: Path) -> None:
    for writer, reader in ((backend.run, _alone), (_alone, backend.run)):
        here = folder / ("there" if reader is _alone else "back")
        at, after = all_equal(writer(saves, str(here), 2))
        found, later = all_equal(reader(loads, str(here), 2, at))
        assert found == at
        for mine, theirs in zip(later[:-1], after[:-1], strict=True):
            close(mine, theirs, 1e-4)
        assert all_equal(reader(loads_weights, str(here / "weights" / "version.safetensors"))) == at


def _alone(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    return [function(learner, *arguments)]


def what_is_not_a_number_is_named_and_never_applied(backend: Backend, _: Path) -> None:
    right = one_process(with_a_bad_number)
    said, stayed, loss, updates = all_equal(backend.run(with_a_bad_number))
    assert (right[0] in said, stayed, updates) == (True, True, 1)
    assert loss == pytest.approx(right[2], rel=1e-4)
    finite, stayed, updates, loss = all_equal(backend.run(with_a_bad_gradient))
    assert (finite, stayed, updates) == (False, True, 0)
    assert loss == pytest.approx(one_process(with_a_bad_gradient)[3], rel=1e-4)


CLAIMS = [
    gradients_are_those_of_one_process_however_the_batch_is_cut,
    twenty_steps_are_those_of_one_process,
    micro_batches_that_do_not_divide_never_hang,
    a_step_begun_ahead_has_the_same_bits,
    a_batch_without_signal_or_rows_makes_no_update,
    the_norm_that_clips_is_that_of_the_whole_gradient,
    what_is_published_is_what_one_process_publishes,
    training_goes_on_from_a_checkpoint_to_the_bit,
    one_process_reads_and_writes_its_checkpoints,
    what_is_not_a_number_is_named_and_never_applied,
]
