"""A rank of several says what it can compute, and refuses what does not fit, without loading the model."""

from __future__ import annotations

import pytest

from nearpolicy.config import RunConfig, config_from_dict
from nearpolicy.errors import ModelError
from nearpolicy.launch import build
from nearpolicy.launch.diagnosis import bound_of
from nearpolicy.launch.ray.hosts import LearnerHost

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
RECIPE = {
    "run": {"steps": 1},
    "model": {"path": "random:qwen3_moe", "init": MIXTURE},
    "tasks": [
        {"name": "t", "source": {"kind": "reasoning_gym", "dataset": "chain_sum"}, "rewards": [{"kind": "number"}]}
    ],
    "learner": {"ranks": 2},
    "runtime": "ray",
}


def config(*settings: str) -> RunConfig:
    return config_from_dict(RECIPE, where="test", overrides=settings)


def test_it_finds_the_rule_of_numerics_and_the_bound_of_a_whole_model():
    words = build.Words.of(config())
    whole, ours = (build.load_model(config(), words, print, in_pieces=in_pieces) for in_pieces in (False, True))
    assert (ours.mode, ours.numerics) == (whole.mode, whole.numerics)
    assert bound_of(ours.mode, ours.policy) == bound_of(whole.mode, whole.policy)
    assert all(p.is_meta for p in ours.policy.parameters())


@pytest.mark.parametrize(("ranks", "loads"), [(1, True), (2, False)])
def test_only_one_that_is_alone_loads_it(ranks, loads):
    host = LearnerHost(config(f"learner.ranks={ranks}"), 0, ranks)
    assert host.load_model().error is None
    assert {p.is_meta for p in host._model.policy.parameters()} == {not loads}


def test_an_adapter_that_does_not_fit_is_refused_there_too():
    ours = config("learner.lora={target_modules: [nowhere]}")
    with pytest.raises(ModelError, match="it has no module `nowhere`"):
        build.load_model(ours, build.Words.of(ours), print, in_pieces=True)
