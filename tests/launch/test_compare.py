"""Comparing objectives on a recording: the recorded one reproduces itself, equal policies make most of them one."""

from __future__ import annotations

import json

import pytest

from nearpolicy.config import load_recipe
from nearpolicy.errors import UserError
from nearpolicy.launch.compare import choose, full_importance_sampling, load_objective
from nearpolicy.launch.compare import command as compare
from nearpolicy.launch.session import Session, run_session
from nearpolicy.objectives.config import ObjectiveConfig
from nearpolicy.store.reader import RunReader

RECIPE = """\
run: {steps: 4, keep_versions: true}
model: {path: random:llama, init: {initializer_range: 0.15}}
sampling: {max_prompt_length: 16, max_completion_length: 4, num_generations: 6}
queue: {prompts_per_step: 4, max_staleness: 2}
learner: {learning_rate: 0.003}
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
        ("loss=gspo", {"at": 9}, "--at 9: the run holds steps 0, 1, 2, 3"),
        ("loss=gspo", {"at": 1, "weights": 7}, "--weights 7: the run kept the versions 0, 1, 2, 3, 4"),
        ("loss=gspo", {"at": 3, "weights": 0}, "these weights are older than the data"),
        ("advantage=grpo_passk,pass_k=20", {}, "asks for more completions than a group has"),
        ("advantage=gae", {}, "advantage=gae: objective.advantage=gae needs a critic, and no recording holds"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_weights_are_loaded(recording, objective, options, named):
    with pytest.raises(UserError) as error:
        compare(recording, [objective], **options)
    assert named in str(error.value)


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
