"""Independent implementations of the same losses, asked in a process of their own.

verl and TRL are for comparison only. Their wheels alone will do (`pip install --no-deps verl==0.9.1 trl==1.16.0`): what
they import beside them and a loss never touches is stood in for, and since an import of theirs changes logging and the
environment, it happens in a child process that gets and gives NumPy arrays.

Padded arrays are [B, T]; every loss comes back with its gradient with respect to the current log-probabilities.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

NOT_NEEDED = ("ray", "tensordict", "omegaconf", "hydra", "codetiming", "orjson", "datasets", "pandas")


class _Nothing(types.ModuleType):
    """A module in which every name is an empty class."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        return importlib.machinery.ModuleSpec(fullname, self) if fullname.split(".")[0] in NOT_NEEDED else None

    def create_module(self, spec):
        return _Nothing(spec.name)

    def exec_module(self, module):
        pass


def peer(module: str) -> Any:
    """A module of a peer, in the child; the real dependencies are not asked for even where they are installed."""
    if not any(isinstance(finder, _StandIns) for finder in sys.meta_path):
        sys.meta_path.insert(0, _StandIns())
    return importlib.import_module(module)


@contextmanager
def process_of(package: str) -> Iterator[Callable[..., Any]]:
    """call(function, ...) in a child of its own; skips where the package is not installed."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_one_thread) as pool:
        yield lambda function, *args, **kwargs: pool.submit(function, *args, **kwargs).result()


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _doubles(*arrays):
    import torch

    return [None if x is None else torch.tensor(np.asarray(x, dtype=np.float64)) for x in arrays]


# verl


def _verl_config(settings: dict[str, Any], policy_loss: dict[str, Any]):
    actor = peer("verl.workers.config.actor")
    return actor.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        policy_loss=actor.PolicyLossConfig(**policy_loss),
        **settings,
    )


def verl_policy_loss(
    name: str, now, old, advantages, mask, *, loss_agg: str, weights=None, settings=None, policy_loss=None
) -> tuple[float, np.ndarray]:
    core = peer("verl.trainer.ppo.core_algos")
    now, old, advantages, mask, weights = _doubles(now, old, advantages, mask, weights)
    now.requires_grad_()
    loss, _ = core.get_policy_loss_fn(name)(
        old_log_prob=old,
        log_prob=now,
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode=loss_agg,
        config=_verl_config(settings or {}, policy_loss or {}),
        rollout_is_weights=weights,
    )
    loss.backward()
    return float(loss.detach()), now.grad.numpy()


def verl_kl(name: str, now, reference) -> tuple[np.ndarray, np.ndarray]:
    core = peer("verl.trainer.ppo.core_algos")
    now, reference = _doubles(now, reference)
    now.requires_grad_()
    found = core.kl_penalty(now, reference, name)
    found.sum().backward()
    return found.detach().numpy(), now.grad.numpy()


def verl_value_loss(values, old, returns, mask, *, clip: float, loss_agg: str) -> float:
    core = peer("verl.trainer.ppo.core_algos")
    values, old, returns, mask = _doubles(values, old, returns, mask)
    return float(core.compute_value_loss(values, returns, old, mask, clip, loss_agg)[0])


def verl_weights(log_ratio, mask, *, level: str, threshold: float | str) -> np.ndarray:
    helper = peer("verl.trainer.ppo.rollout_corr_helper")
    return helper.compute_rollout_correction_weights(*_doubles(log_ratio, mask), level, threshold)[0].numpy()


def verl_kept(log_ratio, mask, *, rule: str, threshold: str) -> np.ndarray:
    helper = peer("verl.trainer.ppo.rollout_corr_helper")
    return helper.compute_rollout_rejection_mask(*_doubles(log_ratio, mask), rule, threshold)[0].numpy()


def verl_advantages(name: str, token_rewards, mask, *, index=None, **arguments) -> tuple[np.ndarray, np.ndarray]:
    """(advantages, returns); ``arguments`` that are arrays become tensors, ``config`` an object with these fields."""
    core = peer("verl.trainer.ppo.core_algos")
    rewards, mask = _doubles(token_rewards, mask)
    if index is not None:
        arguments["index"] = np.asarray(index)
    for key in ("values", "reward_baselines"):
        if key in arguments:
            [arguments[key]] = _doubles(arguments[key])
    if "config" in arguments:
        arguments["config"] = types.SimpleNamespace(**arguments["config"])
    found = core.get_adv_estimator_fn(name)(token_level_rewards=rewards, response_mask=mask, **arguments)
    return tuple(x.numpy() for x in found)


# TRL: its losses are methods of trainers, called here on an object that has what they read.


class _Accelerator(types.SimpleNamespace):
    num_processes, device, sync_gradients = 1, "cpu", True

    def gather(self, x):
        return x.reshape(-1)

    def gather_for_metrics(self, x):
        return x.reshape(-1)

    def reduce(self, x, reduction):
        return x


def trl_grpo_loss(
    now,
    old,
    advantages,
    mask,
    *,
    loss_type: str,
    level: str = "token",
    low=0.2,
    high=0.28,
    sampling=None,
    reference=None,
    gmpo: bool = False,
    **settings,
) -> tuple[float, np.ndarray]:
    import torch

    trainer = (
        peer("trl.experimental.gmpo.gmpo_trainer").GMPOTrainer if gmpo else peer("trl.trainer.grpo_trainer").GRPOTrainer
    )
    now, old, advantages, mask, sampling, reference = _doubles(now, old, advantages, mask, sampling, reference)
    now.requires_grad_()
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :0],
        "prompt_mask": ids[:, :0],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
        **({} if sampling is None else {"sampling_per_token_logps": sampling}),
        **({} if reference is None else {"ref_per_token_logps": reference}),
    }
    options = {
        "delta": None,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "use_bias_correction_kl": False,
        "steps_per_generation": 1,
    }
    self = types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (now, torch.zeros_like(now), None),
        get_off_policy_mask=trainer.get_off_policy_mask,
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=low,
        epsilon_high=high,
        beta=settings.pop("beta", 0.0),
        off_policy_mask_threshold=settings.pop("off_policy_threshold", None),
        max_completion_length=settings.pop("max_completion_length", 10),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        model=types.SimpleNamespace(training=True),
        accelerator=_Accelerator(),
        args=types.SimpleNamespace(**{**options, **settings}),
        _metrics={"train": defaultdict(list)},
    )
    loss = trainer._compute_loss(self, None, inputs)
    loss.backward()
    return float(loss.detach()), now.grad.numpy()


def _outputs(logprobs):
    import torch

    zeros = torch.zeros_like(logprobs)
    return types.SimpleNamespace(log_probs=logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


def trl_dpo_loss(name: str, chosen, rejected, reference_chosen, reference_rejected, *, beta, label_smoothing=0.0):
    """Mean over pairs of answers of one token each, and the gradient for the chosen ones."""
    import torch

    trainer = peer("trl.trainer.dpo_trainer").DPOTrainer
    chosen, rejected, ref_chosen, ref_rejected = _doubles(chosen, rejected, reference_chosen, reference_rejected)
    chosen.requires_grad_()
    ids = torch.zeros(2 * len(chosen), 2, dtype=torch.int64)
    mask = torch.tensor([[0, 1]]).expand_as(ids)
    self = types.SimpleNamespace(
        model=types.SimpleNamespace(training=True),
        accelerator=_Accelerator(),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[name],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=label_smoothing,
        use_weighting=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "completion_mask": mask,
        "ref_chosen_logps": ref_chosen,
        "ref_rejected_logps": ref_rejected,
    }
    loss = trainer._compute_loss(self, lambda **_: _outputs(torch.cat([chosen, rejected])[:, None]), inputs, False)
    loss.backward()
    return float(loss.detach()), chosen.grad.numpy()


def trl_kto_loss(logprobs, reference, desirable, kl: float, *, beta, desirable_weight, undesirable_weight):
    import torch

    trainer = peer("trl.trainer.kto_trainer").KTOTrainer
    logprobs, reference = _doubles(logprobs, reference)
    logprobs.requires_grad_()
    ids = torch.zeros(len(logprobs), 2, dtype=torch.int64)
    self = types.SimpleNamespace(
        model=types.SimpleNamespace(training=True),
        accelerator=_Accelerator(),
        aux_loss_enabled=False,
        calculate_KL=True,
        precompute_ref_logps=True,
        _compute_kl_logps=lambda *_: torch.tensor([kl], dtype=torch.float64),
        loss_type="kto",
        beta=beta,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "completion_mask": torch.tensor([[0, 1]]).expand_as(ids),
        "label": torch.tensor(desirable),
        "ref_logps": reference,
        "ref_KL_logps": torch.zeros(1, dtype=torch.float64),
    }
    loss = trainer._compute_loss(self, lambda **_: _outputs(logprobs[:, None]), inputs, False)
    loss.backward()
    return float(loss.detach()), logprobs.grad.numpy()
