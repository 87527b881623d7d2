"""Kinds of learners beside the plain one, in one process and on ranks, and what a rank does in tests of failures."""

from __future__ import annotations

import gc
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learner_cases import EXACT, SHAPE, batch_of, learner, model_folder, random_rows
from test_critic import random_rewards, rewarded
from torch.distributed.distributed_c10d import _set_pg_timeout

from nearpolicy.config import config_from_dict
from nearpolicy.errors import ModelError
from nearpolicy.launch import build
from nearpolicy.learner.checkpoint import load_checkpoint, load_saved_weights, save_checkpoint, save_weights
from nearpolicy.learner.config import CriticConfig, LearnerConfig
from nearpolicy.learner.gradients import GradientSketch, group_gradients
from nearpolicy.learner.parallel import Ranks
from nearpolicy.learner.step import PolicyLearner
from nearpolicy.models.files import WeightFiles
from nearpolicy.models.fitness import check_fitness
from nearpolicy.models.loading import load_policy, outline_policy, resolve
from nearpolicy.models.lora import LoraPolicy
from nearpolicy.models.pieces import in_pieces, local
from nearpolicy.models.value import ValueModel
from nearpolicy.objectives.config import ObjectiveConfig
from nearpolicy.objectives.objective import Objective, Supervised

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kind of learner."""

    family: str = "llama"
    init: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    lora: bool = False
    objective: dict[str, Any] = field(default_factory=dict)
    reference: str | None = None
    """other, own (a second copy), or adapter_off."""
    critic: CriticConfig | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    warm: bool = False

    @property
    def folder(self) -> Path:
        return resolve(f"random:{self.family}", SHAPE | self.init, seed=3)


FULL_KL = {"kl_coef": 0.1, "kl_estimator": "full"}
CASES = {
    "tied and checkpointed": Case(
        family="qwen3", init={"tie_word_embeddings": True}, settings={"activation_checkpointing": True}
    ),
    "untied, of uneven pieces": Case(family="qwen3", init={"tie_word_embeddings": False, "vocab_size": 277}),
    "bfloat16": Case(dtype=torch.bfloat16, settings={"max_grad_norm": 0.5}),
    "mixture of experts": Case(family="qwen3_moe", init=MIXTURE),
    "adapter": Case(lora=True, objective=FULL_KL | {"reference": "adapter_off"}, reference="adapter_off"),
    "adapter on bfloat16": Case(lora=True, dtype=torch.bfloat16),
    "full KL": Case(objective=FULL_KL, reference="other"),
    "full KL in the reward": Case(objective=FULL_KL | {"kl_in": "reward"}, reference="other"),
    "initial reference": Case(objective={"kl_coef": 0.1, "reference": "initial"}, reference="own", warm=True),
    "critic": Case(
        objective={"advantage": "gae", "scale_rewards": "none"},
        critic=CriticConfig(learning_rate=2e-3, pretraining_steps=1),
        warm=True,
    ),
    "critic of a bfloat16 policy": Case(
        dtype=torch.bfloat16, objective={"advantage": "gae", "scale_rewards": "none"}, critic=CriticConfig()
    ),
    "chosen tokens in minibatches": Case(
        objective={"loss": "kl_cov"}, settings={"num_iterations": 2, "minibatches": 2}
    ),
    "all offloaded": Case(settings={"offload": "parameters"}),
    "moments offloaded": Case(settings={"offload": "optimizer"}),
}


THREE_LAYERS = Case(init={"num_hidden_layers": 3})


def make(case: Case, ranks: Ranks | None = None, replicas: int = 1, *, whole: bool = False) -> PolicyLearner:
    """As a run makes it: several ranks read their pieces alone, unless they are to cut ``whole`` models."""
    in_pieces = ranks is not None and ranks.size > 1 and not whole
    load = outline_policy if in_pieces else partial(load_policy, known_to_fit=True)
    policy = load(case.folder, case.dtype)
    if case.lora:
        how = {"rank": 4, "alpha": 8.0, "target_modules": ["all-linear"], "seed": 1}
        policy = LoraPolicy(policy.model, **how, files=policy.files)
    reference = None
    if case.reference == "adapter_off":
        reference = policy.without_adapter()
    elif case.reference is not None:
        other = model_folder(initializer_range=0.2) if case.reference == "other" else case.folder
        reference = load(other, case.dtype).requires_grad_(False)
    value_model = None if case.critic is None else ValueModel(load(case.folder, case.dtype))
    shared = {} if ranks is None else {"ranks": ranks.size, "replicas": replicas}
    alone = {} if ranks is not None and ranks.size > 1 else {"offload": "none"}  # as the recipe would have to say
    usual = {"learning_rate": 1e-3, "max_grad_norm": None, "max_tokens_per_microbatch": 60}
    return PolicyLearner(
        policy,
        Objective(ObjectiveConfig(**case.objective), 12),
        LearnerConfig(**usual | case.settings | shared | alone),
        EXACT,
        temperature=1.0,
        total_steps=10,
        reference=reference,
        value_model=value_model,
        critic=case.critic,
        ranks=ranks,
    )


def batch(step: int) -> Any:
    rows = random_rows(step, groups=3)
    near = [replace(row, segment=replace(row.segment, behavior_logprobs=_near(row, step))) for row in rows]
    return rewarded(near, random_rewards(near, step), step=step)


def _near(row: Any, step: int) -> np.ndarray:
    """Log-probabilities near to those of a uniform policy, so that no ratio is cut."""
    noise = np.random.default_rng(step).normal(0.0, 0.1, len(row.segment.token_ids))
    return np.where(row.segment.mask, -5.6 + noise, 0.0).astype(np.float32)


@dataclass(frozen=True)
class Life:
    """What has become of a learner: all of it the same on every rank, but for ``weights``, which rank 0 shows."""

    began: str
    metrics: list[dict[str, float]]
    saved: str
    ended: str
    resumed: str
    pieces: list[str]
    weights: torch.Tensor | None
    values: torch.Tensor | None


def life(ranks: Ranks | None, name: str, folder: str, replicas: int = 1) -> Life:
    """Perhaps a warm start, two steps, a checkpoint, a third step; and the third step again from the checkpoint."""
    case = CASES[name]
    own = make(case, ranks, replicas)
    began = _fingerprint(own)
    if case.warm:
        rows = random_rows(50)
        own.supervised_step([replace(r, advantages=r.trained.astype(np.float32)) for r in rows], Supervised(), 1e-3)
        own.begin()
    metrics = [_step(own), _step(own)]
    path, saved = save_checkpoint(own, Path(folder), keep_last=1), _fingerprint(own)
    metrics.append(_step(own))
    again = make(case, ranks, replicas)
    if case.warm and case.reference == "own":
        rows = random_rows(50)
        again.supervised_step([replace(r, advantages=r.trained.astype(np.float32)) for r in rows], Supervised(), 1e-3)
        again.begin()
    load_checkpoint(again, path, expected=[] if case.lora else [saved])
    last = _step(again)
    assert last == metrics[-1], (last, metrics[-1])
    first = ranks is None or ranks.rank == 0
    weights = torch.cat([t.float().flatten() for _, t in own.policy.whole_weights()])
    values = None if own.critic is None else torch.from_numpy(np.concatenate(own.critic.annotate(random_rows(9))))
    held = list(own.shards())
    return Life(began, metrics, saved, _fingerprint(own), _fingerprint(again), held, weights if first else None, values)


def _fingerprint(own: PolicyLearner) -> str:
    return own.weights(None, keep=False).record.fingerprint


def _step(own: PolicyLearner) -> dict[str, float]:
    metrics = own.step(batch(own.version)).metrics
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


def curve_fingerprint(ranks: Ranks | None) -> str:
    """Of the weights after three steps."""
    own = make(Case(), ranks)
    for _ in range(3):
        _step(own)
    return _fingerprint(own)


def same_pieces(ranks: Ranks, name: str, replicas: int) -> list[str]:
    """What of a learner's models, read in pieces, differs from those that were loaded whole and cut."""
    read, cut = (_tensors(make(CASES[name], ranks, replicas, whole=whole)) for whole in (False, True))
    assert list(read) == list(cut)
    ties = ([[x is y for y in side.values()] for x in side.values()] for side in (read, cut))
    assert next(ties) == next(ties)
    return [name for name in read if not _is_same(read[name], cut[name])]


def _tensors(own: PolicyLearner) -> dict[str, torch.Tensor]:
    models = {"policy": own.policy, "reference": own.reference, "critic": own.critic and own.critic.model}
    found = {}
    for role, model in models.items():
        for kind in ("parameters", "buffers") if model is not None else ():
            named = getattr(model, f"named_{kind}")(remove_duplicate=False)
            found |= {f"{role} {kind} {name}": tensor for name, tensor in named}
    return found


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    alike = (type(a), a.dtype, a.shape, a.requires_grad) == (type(b), b.dtype, b.shape, b.requires_grad)
    return alike and torch.equal(local(a), local(b)) and local(a).device == local(b).device


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank while a learner is made."""

    read: int
    """From the files, in all."""
    largest: int
    """Of one read."""
    held: int
    """Of weights in the end, padding included."""
    peak: int
    """Of all tensors that were there at a time, beyond those before."""


def memory_while_loading(ranks: Ranks, folder: str, whole: bool) -> Memory:
    reads, censuses = [0], [0]
    gc.collect()  # what earlier cases have left must not go away meanwhile
    plain, before = WeightFiles._read, _all_tensors()

    def reading(files: WeightFiles, *what: Any) -> torch.Tensor:
        tensor = plain(files, *what)
        reads.append(tensor.nbytes)
        if len(reads) % 8 == 0:  # a census takes its time
            censuses.append(_all_tensors())
        return tensor

    WeightFiles._read = reading
    try:
        policy = load_policy(folder, known_to_fit=True) if whole else outline_policy(folder)
        censuses.append(_all_tensors())
        ranks.shard(policy, replicas=1, offload=False)
        censuses.append(_all_tensors())
    finally:
        WeightFiles._read = plain
    held = {local(p).untyped_storage().data_ptr(): local(p).untyped_storage().nbytes() for p in policy.parameters()}
    return Memory(sum(reads), max(reads), sum(held.values()), max(censuses) - before)


def _all_tensors() -> int:
    """Bytes of every tensor in this process that has memory, views of one counted once."""
    storages = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor) and not in_pieces(each) and each.device.type == "cpu" and each.numel():
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(storages.values())


def fitness(ranks: Ranks, folder: str, value_model: bool) -> str:
    """The largest gap of a model that was read in pieces, in nats; or why it does not fit."""
    policy = outline_policy(folder)
    model = ValueModel(policy) if value_model else policy
    ranks.shard(model, replicas=1, offload=False)
    try:
        gap = f"{check_fitness(model, folder):.3g}"
    except ModelError as error:
        return str(error)
    assert all(in_pieces(p) for p in model.parameters() if p.dim() and p is not getattr(model, "weight", None))
    return gap


def refused_at_the_start(ranks: Ranks, recipe: dict[str, Any], settings: list[str]) -> str:
    """What `make_ranked_learner` says of a recipe."""
    config = config_from_dict(recipe, where="test", overrides=settings)
    words = build.Words.of(config)
    said: list[str] = []
    how = {"ranks": ranks, "own_threads": 1, "on_event": lambda *_, **__: None, "say": said.append}
    return _said(lambda: build.make_ranked_learner(config, words, EXACT, **how)) or "; ".join(said)


def annotations(ranks: Ranks | None) -> list[np.ndarray]:
    return make(Case(), ranks).annotate(random_rows(2, groups=5))


def gradients_by_group(ranks: Ranks | None) -> tuple[np.ndarray, np.ndarray]:
    own = make(Case(), ranks)
    found = group_gradients(own, batch(0), GradientSketch(own.policy))
    return found.gradients, found.losses


# Failures.


def plain(ranks: Ranks, **settings: Any) -> PolicyLearner:
    return learner(ranks=ranks, **{"max_tokens_per_microbatch": 40} | settings)


class LossThatFails:
    """An objective whose loss cannot be had on one rank."""

    def __init__(self, inner: Objective, fails: bool) -> None:
        self._inner, self._fails = inner, fails

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def token_losses(self, tokens: Any) -> Any:
        if self._fails:
            raise ArithmeticError("no loss for these tokens")
        return self._inner.token_losses(tokens)


def impatient(ranks: Ranks) -> Ranks:
    """They have met; from now on two seconds are enough."""
    ranks.timeout_s = 2.0
    _set_pg_timeout(timedelta(seconds=ranks.timeout_s))
    return ranks


def a_loss_fails(ranks: Ranks, failing: int) -> tuple[str, bool, int]:
    """What is said on this rank; whether the weights stayed; the version after one more, good step."""
    own = plain(ranks)
    before, good, said = _fingerprint(own), own.objective, ""
    own.objective = LossThatFails(good, ranks.rank == failing)
    try:
        own.step(batch_of(random_rows(0)))
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    stayed, own.objective = _fingerprint(own) == before, good
    own.step(batch_of(random_rows(0)))
    return said, stayed, own.version


def a_bad_number_on_one_rank(ranks: Ranks, failing: int) -> tuple[str, bool, int]:
    """As `a_loss_fails`, but the batch has reached one rank with a number that is none."""
    own, rows = plain(ranks), random_rows(0)
    before, good = _fingerprint(own), rows[4]
    if ranks.rank == failing:
        rows[4] = replace(good, advantages=good.advantages * np.nan)
    said = _said(lambda: own.step(batch_of(rows)))
    stayed, rows[4] = _fingerprint(own) == before, good
    own.step(batch_of(rows))
    return said, stayed, own.version


def another_batch(ranks: Ranks) -> str:
    own = plain(ranks)
    return _said(lambda: own.step(batch_of(random_rows(ranks.rank))))


def fails_alone(ranks: Ranks, failing: int) -> tuple[str, str]:
    """One rank fails inside a forward pass, where the others wait for it; what each says, then and later."""
    own = plain(impatient(ranks))
    if ranks.rank == failing:
        own.policy.model.get_decoder().layers[1].register_forward_pre_hook(_out_of_memory)
    return tuple(_said(lambda: own.step(batch_of(random_rows(0)))) for _ in range(2))


def _out_of_memory(*_: Any) -> None:
    raise MemoryError("no memory for the second layer")


def does_not_come(ranks: Ranks, missing: int) -> str:
    """One rank is in no call at all while the others make a step, until they have given up."""
    own = plain(impatient(ranks))
    if ranks.rank == missing:
        ranks._store.wait(["failed"], timedelta(seconds=60))
        return ""
    return _said(lambda: own.step(batch_of(random_rows(0))))


def dies(ranks: Ranks, dying: int) -> str:
    own = plain(ranks)
    if ranks.rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    return _said(lambda: own.step(batch_of(random_rows(0))))


def full_disk(ranks: Ranks, folder: str, full: int, room: int) -> tuple[str, list[str], str]:
    """A save while files of one rank cannot grow beyond ``room`` bytes; what is said, what lies there, and the newest
    checkpoint once there is room."""
    own = plain(ranks)
    own.step(batch_of(random_rows(0)))
    save_checkpoint(own, Path(folder), keep_last=1)
    own.step(batch_of(random_rows(1), step=1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ranks.rank == full:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        said = _said(lambda: save_checkpoint(own, Path(folder), keep_last=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    ranks.agree("what is left")
    left = sorted(path.name for path in Path(folder).iterdir())
    ranks.agree("that all have looked")
    return said, left, save_checkpoint(own, Path(folder), keep_last=1).name


def torn_pieces(ranks: Ranks, folder: str) -> tuple[str, bool]:
    """A checkpoint of which one byte has changed; what loading says, and whether the weights stayed."""
    own = plain(ranks)
    own.step(batch_of(random_rows(0)))
    path = save_checkpoint(own, Path(folder), keep_last=1)
    if ranks.rank == 0:
        file = sorted((path / "training_state").glob("__1_*"))[0]
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(bytes(content))
    ranks.agree("a changed file")
    other = plain(ranks)
    before = _fingerprint(other)
    return _said(lambda: load_checkpoint(other, path)), _fingerprint(other) == before


def changed_weights(ranks: Ranks, folder: str, how: str) -> tuple[str, bool]:
    """A checkpoint whose weights were changed after they were published, or cut off; what loading says, and whether the
    learner's own stayed."""
    own = make(Case(), ranks)
    _step(own)
    path, published = save_checkpoint(own, Path(folder), keep_last=1), _fingerprint(own)
    if ranks.rank == 0:
        file = path / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(bytes(content[:-40] if how == "cut off" else content))
    ranks.agree("changed weights")
    other = make(Case(), ranks)
    before = _fingerprint(other)
    return _said(lambda: load_checkpoint(other, path, expected=[published])), _fingerprint(other) == before


def weights_of_another_model(ranks: Ranks, path: str) -> tuple[str, bool]:
    """`load_saved_weights` of a model with more layers."""
    save_weights(make(THREE_LAYERS, ranks), Path(path))
    own = make(Case(), ranks)
    before = _fingerprint(own)
    return _said(lambda: load_saved_weights(own, Path(path))), _fingerprint(own) == before


def _said(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def exported(ranks: Ranks, name: str, folder: str) -> dict[str, str]:
    """The model of a case in many small files; its digests."""
    from nearpolicy.learner.export import save_model

    own = make(CASES[name], ranks)
    with ranks.agreement("a folder"):
        if ranks.rank == 0:
            Path(folder).mkdir()
    save_model(own.policy, Path(folder), ranks, file_bytes=50_000)
    return dict(own.weights(None, keep=False).digests)
