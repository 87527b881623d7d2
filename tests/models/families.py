"""Tiny random models of the families the engine must fit, and of the kinds it must refuse."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from nearpolicy.models.loading import load_policy, resolve
from nearpolicy.models.numerics import Numerics, probe_model
from nearpolicy.models.policy import PolicyModel

DENSE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 32},
    "gemma2": {
        "sliding_window": 32,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 10.0,
    },
    "gemma3_text": {
        "sliding_window": 32,
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
_LATENT = {  # compressed keys and values
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 64,
}
DENSE["deepseek_v3-dense"] = {**_LATENT, "first_k_dense_replace": 2}
MIXTURES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"sliding_window": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {**_LATENT, "first_k_dense_replace": 1},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}
FIT = {**DENSE, **MIXTURES}
UNFIT: dict[str, dict[str, Any]] = {
    "qwen3_next": {  # recurrent and full attention in turn
        "num_hidden_layers": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},  # short convolutions
    "falcon_h1": {  # Mamba beside attention
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
    },
    "llama4_text": {  # attention in chunks, by a mask of its own
        "attention_chunk_size": 32,
        "num_local_experts": 2,
        "intermediate_size_mlp": 64,
        "num_experts_per_tok": 1,
        "no_rope_layers": [1, 1],
        "interleave_moe_layer_step": 1,
        "use_qk_norm": False,
    },
    "bloom": {"n_head": 4, "n_layer": 2},  # attention outside transformers' interface
}
LOUD = 0.15
"""Standard deviation of weights with which every token feels its context."""


def folder(family: str, *, std: float = LOUD, seed: int = 0, **more: Any) -> str:
    """A Hugging Face folder with random weights."""
    options = {**FIT, **UNFIT}[family] | {"initializer_range": std} | more
    return str(resolve(f"random:{family.partition('-')[0]}", options, seed))


def fresh(family: str = "llama", **options: Any) -> PolicyModel:
    """A model of one's own, to be changed at will."""
    return load_policy(folder(family, **options), known_to_fit=True)


@functools.cache
def shared(family: str = "llama", **options: Any) -> PolicyModel:
    """A model that several tests read and none changes."""
    return fresh(family, **options)


def exact_numerics(policy: PolicyModel, threads: int = 1) -> Numerics:
    found = probe_model(policy, threads)
    if found is None or found.max_threads < threads:
        pytest.skip(f"no exact matrix products with {threads} threads on this machine")
    return found


def random_ids(length: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 256, (length,), generator=torch.Generator().manual_seed(seed))
