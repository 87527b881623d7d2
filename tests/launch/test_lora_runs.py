"""Recipes with `learner.lora`: a whole run that learns, what it holds and leaves behind, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from nearpolicy.config import load_recipe
from nearpolicy.errors import ConfigError, ModelError
from nearpolicy.launch.adapter_sizes import adapter_size
from nearpolicy.launch.check import _trained, refuse
from nearpolicy.launch.compare import command as compare
from nearpolicy.launch.session import Session, run_session
from nearpolicy.launch.sizes import memory_by_owner, model_shape
from nearpolicy.models.config import ModelConfig
from nearpolicy.models.loading import load_policy, resolve
from nearpolicy.models.lora import LoraPolicy
from nearpolicy.store.reader import RunReader

RECIPE = """\
run: {steps: 3, keep_versions: true}
model: {path: random:llama, init: {initializer_range: 0.15}}
sampling: {max_prompt_length: 16, max_completion_length: 4, num_generations: 6}
queue: {prompts_per_step: 4, max_staleness: 0}
learner: {learning_rate: 0.01, lora: {rank: 4, alpha: 8}}
tasks:
  - name: words
    source: {kind: jsonl, path: ROWS}
    prompt_column: question
    chat: false
    held_out: 3
    rewards: [{kind: regex, pattern: '[a-z]'}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"question": f"word {i}:"}) + "\n" for i in range(12)))
    (folder / "words.yaml").write_text(RECIPE.replace("ROWS", str(folder / "rows.jsonl")))
    return folder


def train(folder: Path, name: str, *overrides: str) -> tuple[dict, Path]:
    config = load_recipe(folder / "words.yaml", [f"run.dir={folder / name}", *overrides])
    session = Session(config=config, say=lambda text: None)
    return run_session(session), session.folder.path


@pytest.fixture(scope="module")
def merged(folder) -> tuple[dict, Path]:
    """(summary, run folder)"""
    return train(folder, "merged")


def test_a_run_with_an_adapter_learns_asynchronously(folder):
    summary, path = train(folder, "long", "run.steps=25", "queue.max_staleness=1", "learner.learning_rate=0.02")
    with RunReader(path) as run:
        rewards = [line["reward/mean"] for line in run.metrics() if "reward/mean" in line]
    assert (summary["steps"], summary["staleness"]["max"]) == (25, 1)
    assert sum(rewards[-5:]) > 1.5 * sum(rewards[:5])


def test_engine_and_learner_agree_bit_for_bit_through_a_whole_run(merged):
    summary, path = merged
    assert summary["mismatch"] == {"mean": 0.0, "p99": 0.0, "max": 0.0}
    with RunReader(path) as run:
        assert len({record.fingerprint for record in run.versions()}) == 4


def test_sending_the_adapter_alone_gives_the_same_weights_in_fewer_bytes(folder, merged):
    _, path = train(folder, "alone", "sync.adapters=adapter_only")
    fingerprints, sent = [], []
    for each in (path, merged[1]):
        with RunReader(each) as run:
            fingerprints.append([record.fingerprint for record in run.versions()])
            sent.append({event.numbers["bytes"] for event in run.events(kind="export")})
    assert fingerprints[0] == fingerprints[1]
    [few], [all_of_them] = sent
    assert few < 0.3 * all_of_them


def test_the_checkpoint_is_the_last_version_and_the_adapter_lies_inside(merged):
    from transformers import AutoModelForCausalLM

    checkpoint = merged[1] / "checkpoints" / "step-3"
    AutoModelForCausalLM.from_pretrained(checkpoint)
    assert {file.name for file in (checkpoint / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert not (checkpoint / "adapter_config.json").exists()  # transformers would apply it to weights that contain it


@pytest.mark.parametrize("sending", ["merged", "adapter_only"])
def test_memory_that_was_held_is_what_check_estimates_under_the_same_names(folder, sending):
    overrides = [f"sync.adapters={sending}", "objective={kl_coef: 0.1, reference: adapter_off}"]
    held = train(folder, f"memory-{sending}", "run.steps=1", *overrides)[0]["memory_mb"]
    config = load_recipe(folder / "words.yaml", overrides)
    estimated = memory_by_owner(config, model_shape(config.model))
    assert set(estimated) - set(held) == {"learner: activations", "learner: merged copies", "engine: activations"}
    for owner in set(held) - {"engine: keys and values"}:
        assert held[owner] == pytest.approx(estimated[owner], abs=0.06), owner
    assert held["learner: AdamW"] < 0.3 * held["learner: weights"]


def test_a_second_copy_of_the_model_is_kept_only_where_the_reference_is_another_one(folder):
    def memory(*overrides: str) -> dict[str, float]:
        config = load_recipe(folder / "words.yaml", overrides)
        return memory_by_owner(config, model_shape(config.model))

    whole, kl = "learner.lora=null", "objective={kl_coef: 0.1, reference: initial}"
    assert "learner: reference" in memory(kl, whole)
    assert "learner: reference" not in memory(kl)
    warm = ("tasks.0.answer_column=question", "warm_start.steps=1")
    assert "learner: reference" in memory(kl, *warm)
    assert "learner: reference" not in memory(kl.replace("initial", "adapter_off"), *warm)
    assert memory()["learner: AdamW"] < 0.3 * memory(whole)["learner: AdamW"]


def test_without_a_warm_start_the_initial_policy_is_the_base_and_a_run_shows_it(folder):
    metrics = {}
    for name in ("initial", "adapter_off"):
        _, path = train(folder, f"kl-{name}", f"objective={{kl_coef: 0.1, reference: {name}}}")
        with RunReader(path) as run:
            metrics[name] = [line["policy/kl_reference"] for line in run.metrics() if "policy/kl_reference" in line]
    assert metrics["initial"] == metrics["adapter_off"]
    assert metrics["initial"][0] == pytest.approx(0.0, abs=1e-9)
    assert metrics["initial"][-1] > 1e-4


def test_objectives_are_compared_on_a_recording_of_an_adapter(capsys, merged):
    compare(merged[1], ["loss=gspo", "kl_coef=0.1,reference=adapter_off", "kl_coef=0.1"], at=2, train=1)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    with RunReader(merged[1]) as run:
        logged = next(line for line in run.metrics() if line["step"] == 2 and "policy/loss" in line)
    row = found["objectives"]["recorded"]
    assert row["gradient_norm"] == pytest.approx(logged["policy/grad_norm"], rel=1e-5)
    assert row["loss"] == pytest.approx(logged["policy/loss"], rel=1e-5, abs=1e-7)
    off, initial = (found["objectives"][name] for name in ("kl_coef=0.1,reference=adapter_off", "kl_coef=0.1"))
    assert off["gradient_norm_by_part"]["kl"] == initial["gradient_norm_by_part"]["kl"] > 0
    assert found["trained"]["recorded"]["steps"][0]["policy/loss"] == logged["policy/loss"]


def test_check_says_what_is_trained(folder):
    config = load_recipe(folder / "words.yaml")
    shape = model_shape(config.model)
    policy = LoraPolicy(
        load_policy(resolve(config.model.path, config.model.init), known_to_fit=True).model,
        **config.learner.lora.model_dump(),
    )
    count = sum(factor.numel() for factor in policy.factors().values())
    assert adapter_size(config.learner.lora, shape).trained == count
    assert re.fullmatch(
        rf"an adapter of about {count:,} parameters, .*\(rank 4, alpha 8, 14 layers\)", _trained(config, shape)
    )
    of_folder = config.model_copy(update={"model": ModelConfig(path=str(resolve("random:qwen3", {})))})
    shape = model_shape(of_folder.model)
    lora = LoraPolicy(load_policy(of_folder.model.path, known_to_fit=True).model, **config.learner.lora.model_dump())
    assert shape.names_from_file
    assert adapter_size(config.learner.lora, shape).trained == sum(f.numel() for f in lora.factors().values())
    assert _trained(load_recipe(folder / "words.yaml", ["learner.lora=null"]), shape) == "all of them"
    odd = load_recipe(folder / "words.yaml", ["learner.lora.target_modules=query_key_value"])
    assert "unknown until the model is loaded" in _trained(odd, model_shape(odd.model))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("learner.lora.rank=0", "learner.lora.rank is 0"),
        ("learner.lora.alpha=0", "learner.lora.alpha is 0"),
        ("learner.lora={rank: 4, r: 4}", "given twice, under its name and its alias; keep `learner.lora.rank`"),
        ("learner.lora.target_modules=[]", "learner.lora.target_modules is empty, so that nothing would be trained"),
        ("learner.lora.target_modules=[q_proj, q_proj]", "names 'q_proj', which is empty or there twice"),
        ("learner.lora.lora_dropout=0.1", "this version has no dropout in adapters"),
        ("learner.lora=true", "learner.lora is true; should be a mapping of keys"),
        ("learner.lora_rank=4", "`lora_rank` is called `learner.lora.rank` here"),
        ("model.lora={rank: 4}", "`model.lora` is not a key; it belongs to `learner.lora`"),
        ("learner.alpha=3", "`learner.alpha` is not a key; it belongs to `learner.lora.alpha`"),
        ("sync.adapters=both", "should be 'merged' or 'adapter_only'"),
        ("objective={loss: opd, reference: adapter_off}", "needs a teacher other than the policy"),
    ],
)
def test_wrong_settings_of_an_adapter_are_refused_by_name(folder, override, says):
    with pytest.raises(ConfigError) as raised:
        load_recipe(folder / "words.yaml", [override])
    assert says in str(raised.value)


def test_what_belongs_to_an_adapter_is_refused_without_one(folder):
    without = "learner.lora=null"
    with pytest.raises(ConfigError, match=r"sync.adapters=.adapter_only., but no adapter is trained; set learner.lora"):
        load_recipe(folder / "words.yaml", [without, "sync.adapters=adapter_only"])
    with pytest.raises(ConfigError, match=r"reference=adapter_off is the model without its adapter.*learner\.lora"):
        load_recipe(folder / "words.yaml", [without, "objective={kl_coef: 0.1, reference: adapter_off}"])


def test_other_spellings_are_taken(folder):
    lora = load_recipe(
        folder / "words.yaml", ["learner.lora={r: 2, lora_alpha: 5, target_modules: q_proj}"]
    ).learner.lora
    assert (lora.rank, lora.alpha, lora.target_modules) == (2, 5.0, ("q_proj",))
    assert load_recipe(folder / "words.yaml", ["learner.lora.r=3"]).learner.lora.rank == 3
    assert load_recipe(folder / "words.yaml", ["learner.lora={}"]).learner.lora.target_modules == ("all-linear",)


def test_a_target_that_does_not_exist_is_refused_before_there_is_a_run_folder(folder):
    with pytest.raises(ModelError, match=r"no module `q_porj`; its linear layers are down_proj, gate_proj, k_proj"):
        train(folder, "never", "learner.lora.target_modules=[q_proj, q_porj]")
    assert not (folder / "never").exists()


def test_check_refuses_a_target_that_a_models_files_do_not_have(folder):
    overrides = [f"model.path={resolve('random:qwen3', {})}", "model.init={}", "learner.lora.target_modules=q_porj"]
    with pytest.raises(ConfigError, match=r"the model has no matrix `q_porj`; it has down_proj, embed_tokens, gate_"):
        refuse(load_recipe(folder / "words.yaml", overrides), makes_run=False)
