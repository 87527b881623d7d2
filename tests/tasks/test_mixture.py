"""Prompts by admission index: pure, in proportion, every prompt once per epoch (K33)."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearpolicy.records import Prompt
from nearpolicy.tasks.config import TaskConfig
from nearpolicy.tasks.mixture import Mixture, TaskData


def task(name: str, size: int, *, weight: float = 1.0, shuffle: bool = True) -> TaskData:
    config = TaskConfig.model_validate(
        {
            "name": name,
            "weight": weight,
            "shuffle": shuffle,
            "source": {"kind": "jsonl", "path": "unused"},
            "rewards": [{"kind": "number"}],
        }
    )
    prompts = tuple(Prompt(id=f"{name}/{number}", task=name, text=str(number)) for number in range(size))
    return TaskData(config=config, training=prompts, held_out=(), rows=size, skipped={}, repeated=0, lengths="")


def ids(mixture: Mixture, start: int, end: int) -> list[str]:
    return [mixture.prompt(index).id for index in range(start, end)]


def test_without_shuffling_prompts_come_in_the_order_of_the_file_epoch_after_epoch():
    mixture = Mixture([task("a", 6, shuffle=False)], seed=0)
    assert ids(mixture, 0, 12) == [f"a/{number}" for number in range(6)] * 2


@pytest.mark.parametrize("prompts_per_step", [1, 3, 4])
def test_one_epoch_shows_every_prompt_once_whatever_the_size_of_a_step(prompts_per_step):
    mixture = Mixture([task("a", 12)], seed=3)
    seen = [name for start in range(0, 12, prompts_per_step) for name in ids(mixture, start, start + prompts_per_step)]
    assert sorted(seen) == sorted(f"a/{number}" for number in range(12))


def test_epochs_differ_in_order_and_seeds_too():
    mixture = Mixture([task("a", 50)], seed=0)
    assert ids(mixture, 0, 50) != ids(mixture, 50, 100)
    assert ids(mixture, 0, 50) != ids(Mixture([task("a", 50)], seed=1), 0, 50)


@settings(deadline=None)
@given(st.lists(st.integers(0, 300), max_size=30), st.integers(0, 2**40))
def test_prompt_is_a_function_of_seed_and_index_alone(indices, seed):
    tasks = [task("a", 7), task("b", 5, weight=2.5), task("c", 1, weight=0.3)]
    used, straight = Mixture(tasks, seed=seed), Mixture(tasks, seed=seed)
    expected = ids(straight, 0, 301)
    assert [used.prompt(index).id for index in indices] == [expected[index] for index in indices]


def test_weights_hold_in_every_stretch_and_each_task_keeps_its_own_epochs():
    mixture = Mixture([task("a", 6), task("b", 4, weight=3)], seed=0)
    seen = ids(mixture, 0, 400)
    assert Counter(name[0] for name in seen) == {"a": 100, "b": 300}
    for start in range(0, 400, 8):
        assert abs(Counter(name[0] for name in seen[start : start + 8])["a"] - 2) <= 1
    of_a = [name for name in seen if name[0] == "a"]
    assert all(len(set(of_a[start : start + 6])) == 6 for start in range(0, 96, 6))


def test_order_of_an_epoch_never_changes_between_releases():
    order = [int(name[2:]) for name in ids(Mixture([task("a", 8)], seed=0), 0, 8)]
    assert order == [7, 2, 0, 3, 5, 1, 6, 4]
