"""Comparing objectives on a recording: the recorded one reproduces itself, equal policies make most of them one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from nearpolicy.config import load_recipe
from nearpolicy.errors import UserError
from nearpolicy.launch.compare import choose, full_importance_sampling, load_objective
from nearpolicy.launch.compare import command as compare
from nearpolicy.launch.compare_page import AGAINST_IS, COLUMNS, comparison_page, print_table
from nearpolicy.launch.session import Session, run_session
from nearpolicy.objectives.config import ObjectiveConfig
from nearpolicy.store.reader import RunReader

RECIPE = """\
run: {steps: 4, keep_versions: true}
model: {path: random:llama, init: {initializer_range: 0.15}}
sampling: {max_prompt_length: 16, max_completion_length: 4, num_generations: 6}
queue: {prompts_per_step: 4, max_staleness: 2}
learner: {learning_rate: 0.003, lr_schedule: linear}
tasks:
  - name: words
    source: {kind: jsonl, path: ROWS}
    prompt_column: question
    chat: false
    held_out: 3
    rewards: [{kind: regex, pattern: '[a-z]'}]
"""


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """A run of four steps whose groups are up to two steps old, with the weights of every version."""
    folder = tmp_path_factory.mktemp("recording")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"question": f"word {i}:"}) + "\n" for i in range(12)))
    (folder / "words.yaml").write_text(RECIPE.replace("ROWS", str(folder / "rows.jsonl")))
    session = Session(config=load_recipe(folder / "words.yaml", [f"run.dir={folder / 'run'}"]), say=lambda text: None)
    run_session(session)
    return session.folder.path


@pytest.fixture
def copied(recording, tmp_path):
    """The recording once more, to be damaged."""
    return Path(shutil.copytree(recording, tmp_path / "copied"))


def refusal(run, *objectives: str, **options) -> str:
    with pytest.raises(UserError) as error:
        compare(run, list(objectives), **options)
    return str(error.value)


def compared(capsys, recording, *objectives: str, **options) -> dict:
    compare(recording, list(objectives), **options)
    return json.loads(capsys.readouterr().out.splitlines()[-1])


SAME_AT_EQUAL_POLICIES = [
    "loss=pg",
    "loss=cispo",
    "loss=aipo",
    "loss=sapo",
    "loss=dppo",
    "loss=decoupled_ppo",
    "correction=none",
    "loss=pg,advantage=vtrace",
]


def test_under_the_weights_that_sampled_most_objectives_are_one_and_have_no_bias(capsys, recording):
    found = compared(capsys, recording, *SAME_AT_EQUAL_POLICIES, at=0)
    assert (found["step"], found["weights"], found["staleness"]) == (0, 0, {"mean": 0.0, "max": 0})
    for name, row in found["objectives"].items():
        assert row["ess"] == pytest.approx(1.0)
        assert row["cosine_to_importance_sampling"] == pytest.approx(1.0, abs=1e-6), name
        assert row["importance_sampling"]["bias"] == pytest.approx(0.0, abs=1e-5)
        assert row["importance_sampling"]["variance"] == pytest.approx(
            row["importance_sampling"]["reference_variance"], rel=1e-4
        )
        if "vtrace" not in name:  # which does not divide by the group's spread
            assert found["cosines"]["recorded"][name] == pytest.approx(1.0, abs=1e-6)


def test_the_recorded_objective_gives_the_loss_and_the_gradient_that_the_run_logged(capsys, recording):
    with RunReader(recording) as run:
        logged = run.metrics()
    for step in (0, 2, 3):
        row = compared(capsys, recording, "loss=gspo", at=step)["objectives"]["recorded"]
        assert row["gradient_norm"] == pytest.approx(logged[step]["policy/grad_norm"], rel=1e-5)
        assert row["loss"] == pytest.approx(logged[step]["policy/loss"], rel=1e-5, abs=1e-7)
        assert row["ess"] == pytest.approx(logged[step]["mismatch/ess"], rel=1e-6)


def test_older_data_has_a_smaller_effective_sample_and_the_correction_less_bias_than_none(capsys, recording):
    found = compared(
        capsys,
        recording,
        "correction=none",
        "loss=pg,correction=sequence_truncate,correction_cap=1e20",
        at=0,
        weights=4,
    )
    none, full = (row for name, row in found["objectives"].items() if name != "recorded")
    assert found["staleness"] == {"mean": 4.0, "max": 4}
    assert found["objectives"]["recorded"]["ess"] < 0.99
    assert none["importance_sampling"]["bias"] > 0.01
    assert full["importance_sampling"]["bias"] == pytest.approx(0.0, abs=1e-6)
    assert full["cosine_to_importance_sampling"] == pytest.approx(1.0, abs=1e-6)


def test_training_on_the_recording_from_the_start_repeats_the_run(capsys, recording):
    with RunReader(recording) as run:
        logged = run.metrics()
    found = compared(capsys, recording, "loss=gspo", at=0, train=3)["trained"]
    for step in range(3):
        for name in ("policy/loss", "policy/grad_norm", "policy/entropy"):
            assert found["recorded"]["steps"][step][name] == logged[step][name]  # bit for bit
    assert found["loss=gspo"]["steps"][2]["policy/loss"] != logged[2]["policy/loss"]
    assert found["recorded"]["held_out"]["before"]["count"] == found["loss=gspo"]["held_out"]["after"]["count"] == 3


def test_a_reference_and_a_file_may_be_compared_too_and_a_page_is_written(capsys, recording, tmp_path):
    (tmp_path / "near.yaml").write_text("objective: {kl_coef: 0.1, kl_estimator: full, entropy_coef: 0.1}\n")
    found = compared(capsys, recording, str(tmp_path / "near.yaml"), at=1, out=tmp_path / "out")
    near = found["objectives"]["near"]
    assert near["gradient_norm"] > 0 and set(near["gradient_norm_by_part"]) == {"kl", "entropy"}
    assert all(norm > 0 for norm in near["gradient_norm_by_part"].values())
    assert found["objectives"]["recorded"]["gradient_norm_by_part"] == {}
    page = (tmp_path / "out" / "step-1-weights-1.html").read_text()
    assert "near" in page and "Cosine between gradients" in page
    assert json.loads((tmp_path / "out" / "step-1-weights-1.json").read_text()) == found


@pytest.mark.parametrize(
    ("objective", "options", "named"),
    [
        ("loss=gspq", {}, "loss=gspq: objective.loss"),
        ("loss=pg,clip_low=0.1", {}, "objective.clip_low=0.1 has no effect with objective.loss=pg"),
        ("clip_hihg=0.1", {}, "did you mean `objective.clip_high`"),
        ("nowhere.yaml", {}, "nowhere.yaml: cannot be read as an objective"),
        ("", {}, "cannot be read as an objective"),
        ("loss=gspo,clip", {}, "loss=gspo,clip: cannot be read as an objective; write key=value,key=value"),
        ("x" * 300 + "=1", {}, "is not a key"),
        ("reference=./nowhere,kl_coef=0.1", {}, "objective.reference ./nowhere"),
        ("loss=gspo", {"at": 9}, "--at 9: the run holds the steps 0 to 3"),
        ("loss=gspo", {"at": -1}, "--at -1: the run holds the steps 0 to 3"),
        ("loss=gspo", {"at": 1, "weights": 7}, "--weights 7: the run kept the versions 0 to 4"),
        ("loss=gspo", {"at": 2, "train": 3}, "--train 3: the run holds 2 steps from step 2 on"),
        ("loss=gspo", {"at": 3, "weights": 0}, "these weights are older than the data"),
        ("advantage=grpo_passk,pass_k=20", {}, "objective.pass_k=20 takes the whole group"),
        ("advantage=gae", {}, "advantage=gae: objective.advantage=gae needs a critic, and no recording holds"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(recording, objective, options, named):
    assert named in refusal(recording, objective, **options)


def test_objectives_that_cannot_be_told_apart_are_refused(recording, tmp_path):
    for name in ("recorded", "mine", "other/mine"):
        file = tmp_path / f"{name}.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text("loss: gspo\n")
    assert "rename the file" in refusal(recording, str(tmp_path / "recorded.yaml"))
    both = refusal(recording, str(tmp_path / "mine.yaml"), str(tmp_path / "other" / "mine.yaml"))
    assert "another objective is called mine too" in both
    assert "loss=pg: another objective is called loss=pg too" in refusal(recording, "loss=pg", "loss=pg")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("objective: {loss: gspo}\nlearner: {learning_rate: 1}\n", "holds learner"),
        ("run: {steps: 4}\nmodel: {path: random:llama}\n", "holds run, model"),
        ("objective: null\n", "objective should be a mapping of keys"),
        ("", "should be a mapping of keys"),
        ("loss: [\n", "not valid YAML"),
        ("x" * 1_000_001, "longer than 1,000,000 bytes"),
    ],
)
def test_a_file_that_is_not_one_objective_is_refused(recording, tmp_path, text, named):
    (tmp_path / "mine.yaml").write_text(text)
    message = refusal(recording, str(tmp_path / "mine.yaml"))
    assert "mine.yaml" in message and named in message


def test_weights_that_the_run_did_not_publish_are_refused(copied):
    weights = copied / "weights"
    shutil.copy(weights / "version-0.safetensors", weights / "version-9.safetensors")
    assert "--weights 9: the run kept the versions 0 to 4" in refusal(copied, "loss=gspo", weights=9)
    shutil.copy(weights / "version-0.safetensors", weights / "version-2.safetensors")
    assert "holds weights with the fingerprint" in refusal(copied, "loss=gspo", at=2)
    (weights / "version-3.safetensors").write_bytes(b"")
    assert "version-3.safetensors cannot be read" in refusal(copied, "loss=gspo", at=3)
    (weights / "version-0.safetensors").unlink()
    assert "objective.reference=initial is version 0" in refusal(copied, "kl_coef=0.1", at=1)
    assert "choose --weights among 1 to 4" in refusal(copied, "loss=gspo", at=0)


def test_a_place_that_cannot_be_written_is_refused_and_no_earlier_comparison_is_lost(capsys, recording, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "choose another --out" in refusal(recording, "loss=gspo", out=tmp_path / "file")
    found = [compared(capsys, recording, loss, at=1, out=tmp_path / "out") for loss in ("loss=pg", "loss=gspo")]
    kept = [json.loads((tmp_path / "out" / f"step-1-weights-1{n}.json").read_text()) for n in ("", "-2")]
    assert kept == found and "loss=gspo" in (tmp_path / "out" / "step-1-weights-1-2.html").read_text()


def test_a_step_in_which_nothing_was_left_to_train_on_is_passed_over_or_refused(recording):
    with RunReader(recording) as run:
        filled = run.consumption
        run.consumption = lambda step=None: [] if step == 3 else filled(step)
        assert choose(run, None, None) == (2, 2)
        assert choose(run, None, 1) == (1, 1)
        with pytest.raises(UserError, match="--at 3: no group was left for step 3"):
            choose(run, 3, None)


def test_a_run_that_kept_no_weights_says_how_to_keep_them(recording, tmp_path):
    with RunReader(recording) as run:
        run.folder = type(run.folder)(tmp_path)
        with pytest.raises(UserError, match=r"run\.keep_versions=true"):
            choose(run, None, None)


def test_objectives_come_from_files_with_or_without_their_section_and_from_words(tmp_path):
    (tmp_path / "a.yaml").write_text("objective: {loss: gspo}\n")
    (tmp_path / "b.yaml").write_text("loss: gspo\n")
    assert load_objective(str(tmp_path / "a.yaml")) == ("a", {"loss": "gspo"})
    assert load_objective(str(tmp_path / "b.yaml")) == ("b", {"loss": "gspo"})
    assert load_objective("objective.loss=gspo") == ("objective.loss=gspo", {"loss": "gspo"})
    assert load_objective("loss=pg,correction_cap=3.5") == (
        "loss=pg,correction_cap=3.5",
        {"loss": "pg", "correction_cap": 3.5},
    )


def test_full_importance_sampling_keeps_advantages_and_divisor_alone():
    config = ObjectiveConfig(
        advantage="rloo", loss="cispo", loss_agg="seq_mean_token_sum", length_cost=0.1, kl_coef=0.1
    )
    found = full_importance_sampling(config)
    assert (found.advantage, found.loss_agg, found.length_cost) == ("rloo", "seq_mean_token_sum", 0.1)
    assert (found.loss, found.correction, found.kl_coef) == ("pg", "sequence_truncate", 0.0)


def test_full_importance_sampling_keeps_what_advantages_are_made_of():
    in_reward = ObjectiveConfig(kl_coef=0.1, kl_in="reward", diversity_bonus=0.2, loss="cispo")
    found = full_importance_sampling(in_reward)
    assert (found.kl_coef, found.kl_in, found.reference, found.diversity_bonus) == (0.1, "reward", "initial", 0.2)
    teacher = full_importance_sampling(ObjectiveConfig(loss="opd", reference="random:llama"))
    assert (teacher.advantage, teacher.reference) == ("teacher", "random:llama")
    assert (teacher.correction, teacher.correction_cap) == ("sequence_truncate", 1e20)


def test_distillation_under_equal_policies_has_no_bias_against_the_same_teacher(capsys, recording):
    row = compared(capsys, recording, "loss=opd,reference=random:llama", at=0)["objectives"][
        "loss=opd,reference=random:llama"
    ]
    assert row["gradient_norm"] > 0 and row["importance_sampling"]["bias"] == pytest.approx(0.0, abs=1e-5)


def test_a_recorded_step_is_trained_on_with_the_rate_it_had_whatever_the_weights(capsys, recording):
    with RunReader(recording) as run:
        logged = run.metrics()
    steps = compared(capsys, recording, "loss=gspo", at=1, weights=4, train=2)["trained"]["loss=gspo"]["steps"]
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert line["learner/learning_rate"] == logged[line["step"]]["learner/learning_rate"] > 0


def test_an_objective_that_finds_nothing_to_learn_is_shown_with_dashes(capsys, recording):
    nothing = "mask_truncated_completions=true"  # no completion of the recording ends by itself
    compare(recording, [nothing], at=1, train=1)
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1])["objectives"][nothing]["importance_sampling"] is None
    assert sum(line.startswith("2 mask_truncated") and " - " in line for line in lines) == 4


def test_the_tables_fit_a_terminal_and_every_column_is_explained(capsys, recording):
    names = ["loss=pg", "loss=pg,correction=token_mask,correction_cap=3.5"]
    result = compared(capsys, recording, *names, at=1)
    assert result["settings"][names[0]]["loss"] == "pg"
    print_table(result)
    tables = capsys.readouterr().out.splitlines()[1:]
    assert max(map(len, tables)) <= 80 and any("3 loss=pg,correction=tok…" in line for line in tables)
    explained = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text()
    explained = explained[explained.index("## Comparing") :]
    for column in (*COLUMNS, *AGAINST_IS):
        assert column.heading in explained
    assert "correction=token_mask, correction_cap=3.5" in comparison_page(result)
