"""``random:FAMILY``: a tiny model of a family with weights from a seed, and every option of it used or refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nearpolicy.errors import ModelError, described, nearest
from nearpolicy.models.config import TINY

_OLD_ROPE = ("rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq")
"""Spellings that transformers still turns into ``rope_parameters``."""


def known_options(family: str, init: Mapping[str, Any]) -> dict[str, Any]:
    """`TINY` with ``init`` over it; `ModelError` for a key that the family's config does not have.

    transformers takes any key and never looks at those it does not know.
    """
    config = _config_of(family)
    known = _keys_of(config)
    for key in init:
        if key not in known:
            close = nearest(key, sorted(known))
            hint = f"did you mean `{close}`?" if close else f"it has {', '.join(sorted(known))}"
            raise ModelError(f"model.init.{key} is not a value of the config of `{family}`; {hint}")
    own_name = config.attribute_map.get  # gpt2 calls num_hidden_layers n_layer
    given = {own_name(key, key) for key in init}
    return {key: value for key, value in TINY.items() if own_name(key, key) not in given} | dict(init)


def _config_of(family: str) -> Any:
    from transformers import CONFIG_MAPPING

    if family not in CONFIG_MAPPING:
        close = nearest(family, list(CONFIG_MAPPING.keys()))
        hint = f"did you mean random:{close}?" if close else "name a family as in the model_type of a config.json"
        raise ModelError(f"model.path 'random:{family}' cannot be made: transformers knows no such family; {hint}")
    return CONFIG_MAPPING[family]


def _keys_of(config: Any) -> set[str]:
    from transformers import PreTrainedConfig

    own = {field.name for field in dataclasses.fields(config)}
    general = {field.name for field in dataclasses.fields(PreTrainedConfig)}  # files and outputs, not the weights
    return own - general | set(config.attribute_map) | (set(_OLD_ROPE) if "rope_parameters" in own else set())


def name_of_random_model(family: str, options: Mapping[str, Any], seed: int) -> str:
    """One name for one set of weights."""
    recipe = json.dumps([family, options, seed, torch.__version__], sort_keys=True)
    return f"random-{family}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"


def make_random_model(family: str, options: Mapping[str, Any], seed: int, out: Path) -> None:
    """Make, try and save the model and the byte tokenizer; `ModelError` for options that make no model."""
    from nearpolicy.models.tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    ids = {f"{n}_token_id": getattr(tokenizer, f"{n}_token_id") for n in ("bos", "eos", "pad")}
    try:
        model = _tried({"model_type": family, **ids, **options}, len(tokenizer), seed)
    except ModelError:
        raise
    except Exception as error:  # each family checks its numbers in its own way, some only by running into them
        raise ModelError(
            f"model.path 'random:{family}' cannot be made from {dict(options)}: {described(error)}; change model.init"
        ) from error
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _tried(options: Mapping[str, Any], least_vocabulary: int, seed: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**options)
    if config.vocab_size < least_vocabulary:
        raise ModelError(f"model.init.vocab_size is {config.vocab_size}; the byte tokenizer needs {least_vocabulary}")
    if config.get_text_config() is not config:
        raise ModelError(
            f"model.path 'random:{config.model_type}' has several parts with sizes of their own, which model.init does "
            f"not reach; name a family of text alone, such as random:{config.get_text_config().model_type}"
        )
    for size in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
        if getattr(config, size, 1) < 1:
            raise ModelError(f"model.init.{size} is {getattr(config, size)}; a model needs at least 1")
    _refuse_larger_than_memory(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():  # heads that do not divide, odd rotary sizes and the like are met here
        logits = model(input_ids=torch.arange(4)[None], use_cache=False).logits
    if not torch.isfinite(logits).all():
        raise ModelError("model.init makes a model whose outputs are not finite numbers; change it")
    return model


def _refuse_larger_than_memory(config: Any) -> None:
    """A family may have sizes that model.init says nothing of; the system would kill whoever makes such a model."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        needed = 4 * sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > have:
        raise ModelError(
            f"model.path 'random:{config.model_type}' would take {needed / 2**20:,.0f} MB and this machine has "
            f"{have / 2**20:,.0f} MB; set smaller sizes in model.init"
        )
