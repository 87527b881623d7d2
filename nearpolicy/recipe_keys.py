"""What to say about a key that does not exist: the nearest one, its right section, or its name here if it is a
foreign one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from nearpolicy.errors import nearest

FOREIGN = {
    "rollout.n": "sampling.num_generations",
    "n_samples_per_prompt": "sampling.num_generations",
    "num_generations_per_prompt": "sampling.num_generations",
    "repeat_times": "sampling.num_generations",
    "attempts": "sampling.num_generations",
    "max_response_length": "sampling.max_completion_length",
    "max_tokens": "sampling.max_completion_length",
    "rollout_max_response_len": "sampling.max_completion_length",
    "train_batch_size": "queue.prompts_per_step",
    "num_prompts_per_step": "queue.prompts_per_step",
    "rollout_batch_size": "queue.prompts_per_step",
    "groups_per_batch": "queue.prompts_per_step",
    "max_off_policy_steps": "queue.max_staleness",
    "staleness_threshold": "queue.max_staleness",
    "max_head_offpolicyness": "queue.max_staleness",
    "max_staleness_steps": "queue.max_staleness",
    "max_trajectory_age_steps": "queue.max_staleness",
    "max_steps_off_policy": "queue.max_staleness",
    "max_lag": "queue.max_staleness",
    "async_steps": "queue.max_staleness",
    "partial_rollout": "generator.on_sync",
    "over_sampling_batch_size": "generator.oversample",
    "inflight_updates": "generator.on_sync",
    "recompute_kv_cache_after_weight_updates": "generator.on_sync",
    "lr": "learner.learning_rate",
    "ppo_epochs": "learner.num_iterations",
    "ppo_mini_batch_size": "learner.minibatches",
    "use_dynamic_bsz": "learner.max_tokens_per_microbatch",
    "ppo_max_token_len_per_gpu": "learner.max_tokens_per_microbatch",
    "trigger_parameter_sync_step": "sync.weight_sync_steps",
    "sync_interval": "sync.weight_sync_steps",
    "adv_estimator": "objective.advantage",
    "advantage_estimator": "objective.advantage",
    "norm_adv_by_std_in_grpo": "objective.scale_rewards",
    "normalize_rewards": "objective.scale_rewards",
    "loss_type": "objective.loss",
    "policy_loss": "objective.loss",
    "epsilon": "objective.clip_low",
    "clip_ratio_low": "objective.clip_low",
    "eps_clip": "objective.clip_low",
    "epsilon_high": "objective.clip_high",
    "clip_ratio_high": "objective.clip_high",
    "loss_agg_mode": "objective.loss_agg",
    "vllm_importance_sampling_mode": "objective.correction",
    "rollout_is": "objective.correction",
    "use_tis": "objective.correction",
    "rollout_is_threshold": "objective.correction_cap",
    "kl_loss_coef": "objective.kl_coef",
    "kl_ctl": "objective.kl_coef",
    "init_kl_coef": "objective.kl_coef",
    "ref_policy": "objective.reference",
    "delta": "objective.dual_clip",
    "clip_ratio_c": "objective.dual_clip",
    "c_clip": "objective.dual_clip",
    "lam": "objective.gae_lambda",
    "lambd": "objective.gae_lambda",
    "critic_learning_rate": "critic.learning_rate",
    "critic_warmup": "critic.pretraining_steps",
    "cliprange_value": "critic.clip",
    "value_clip": "critic.clip",
    "filter_groups": "queue.dynamic_sampling",
    "filter_zero_std_samples": "queue.drop_zero_variance_groups",
    "remove_constant_reward_groups": "queue.drop_zero_variance_groups",
    "overlong_buffer.len": "objective.overlong_buffer",
    "overlong_buffer.penalty_factor": "objective.overlong_penalty",
    "soft_overlong_punishment": "objective.overlong_buffer",
    "entropy_coeff": "objective.entropy_coef",
    "overlong_filter": "objective.mask_truncated_completions",
    "lora_rank": "learner.lora.rank",
    "lora_r": "learner.lora.rank",
    "lora_target_modules": "learner.lora.target_modules",
    "test_freq": "evaluation.every",
    "eval_steps": "evaluation.every",
    "val_kwargs.n": "evaluation.num_samples",
}
"""Spellings of other trainers -> the key that means it here."""

ALIASES = {
    "group_size": "sampling.num_generations",
    "num_generations": "sampling.num_generations",
    "max_new_tokens": "sampling.max_completion_length",
    "max_completion_length": "sampling.max_completion_length",
    "beta": "objective.kl_coef",
    "kl_coef": "objective.kl_coef",
    "r": "learner.lora.rank",
    "rank": "learner.lora.rank",
    "lora_alpha": "learner.lora.alpha",
    "alpha": "learner.lora.alpha",
}
"""Second names that are accepted; one is unknown only where both are given."""

ABSENT = {
    "lora_dropout": "dropout in adapters",
    "vf_coef": "weight of the value loss (the critic has an optimizer of its own)",
}
"""Spellings for what this version cannot do -> what that is."""


def other_names(path: str) -> list[str]:
    """Names of the same setting beside this one; empty for nearly all keys."""
    section, _, key = path.rpartition(".")
    target = ALIASES.get(key)
    if target is None or target.rpartition(".")[0] != section:
        return []
    return [name for name, same in ALIASES.items() if same == target and name != key]


def explain_unknown_key(root: type[BaseModel], path: tuple[Any, ...]) -> str:
    """One sentence: `` `learner.learning_rat` is not a key; did you mean `learner.learning_rate`? ``"""
    name = ".".join(map(str, path))
    key, opening = str(path[-1]), f"`{name}` is not a key"
    if key in ALIASES:
        if ".".join(map(str, path[:-1])) == ALIASES[key].rpartition(".")[0]:
            return f"`{name}` is given twice, under its name and its alias; keep `{ALIASES[key]}`"
        return f"{opening}; it belongs to `{ALIASES[key]}`"
    for spelling in (".".join(map(str, path[-2:])), key):
        if spelling in FOREIGN:
            return f"{opening}; `{spelling}` is called `{FOREIGN[spelling]}` here"
        if spelling in ABSENT:
            return f"{opening}; this version has no {ABSENT[spelling]}, leave it out"
    known = list(keys_of(root))
    siblings = keys_beside(root, path)
    section = nearest(str(path[0]), list(root.model_fields))
    if len(path) > 1 and path[0] not in root.model_fields and section and f"{section}.{key}" in known:
        return f"{opening}; did you mean `{section}.{key}`?"
    close = nearest(key, siblings)
    if close:
        return f"{opening}; did you mean `{'.'.join(map(str, (*path[:-1], close)))}`?"
    elsewhere = [candidate for candidate in known if candidate.rsplit(".", 1)[-1] == key]
    if elsewhere:
        return f"{opening}; it belongs to {' or '.join(f'`{candidate}`' for candidate in elsewhere)}"
    last_words = {candidate.rsplit(".", 1)[-1]: candidate for candidate in reversed(known)}
    close = nearest(key, list(last_words))
    if close:
        return f"{opening}; did you mean `{last_words[close]}`?"
    return f"{opening}; here are {', '.join(siblings)}"


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key a recipe may hold, dotted; list entries as ``tasks.N.name``, named ones as ``NAME``."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        between = {list: "N.", tuple: "N.", dict: "NAME."}.get(get_origin(field.annotation), "")
        for inner in models_in(field.annotation):
            yield from keys_of(inner, f"{prefix}{name}.{between}")


def keys_beside(root: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    """Names allowed where the last part of ``path`` stands."""
    models, by_name = [root], False
    for part in path[:-1]:
        if isinstance(part, int) or by_name:  # the place in a list, the name in a mapping
            by_name = False
            continue
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        by_name = any(get_origin(field.annotation) is dict for field in fields)
        models = [inner for field in fields for inner in models_in(field.annotation)]
    return list(dict.fromkeys(name for model in models for name in model.model_fields)) or list(root.model_fields)


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The config models an annotation mentions, through unions, lists and Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    found = [model for part in get_args(annotation) for model in models_in(part)]
    return list(dict.fromkeys(found))
