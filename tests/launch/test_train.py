"""`nearpolicy train` from the command line: a whole run of a tiny model, what it leaves behind, and how it ends."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nearpolicy.config import load_recipe
from nearpolicy.launch import cli
from nearpolicy.launch.supervised import Supervised
from nearpolicy.launch.train import closing_words
from nearpolicy.models.loading import resolve
from nearpolicy.records import Fate
from nearpolicy.store.folder import SUMMARY_KEYS
from nearpolicy.store.reader import RunReader
from nearpolicy.telemetry.metrics import unknown_names

RECIPE = """\
run: {steps: 3}
model: {path: random:llama, init: {initializer_range: 0.15}}
sampling: {max_prompt_length: 16, max_completion_length: 5, num_generations: 4}
queue: {prompts_per_step: 2, max_staleness: 1}
learner: {learning_rate: 1e-3}
evaluation: {prompts: 3, pass_k: [2], every: 2}
tasks:
  - name: sums
    source: {kind: jsonl, path: ROWS}
    prompt_column: question
    chat: false
    rewards:
      - {kind: regex, pattern: '[0-9a-zA-Z]'}
      - {kind: number, weight: 0.5}
    held_out: 3
"""


def write_recipe(folder: Path) -> Path:
    rows = [{"question": f"{a} + {b} =", "answer": str(a + b)} for a in range(5) for b in range(5)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = folder / "demo.yaml"
    file.write_text(RECIPE.replace("ROWS", str(folder / "rows.jsonl")))
    return file


def command_line(*arguments: object) -> tuple[int, str, str]:
    """Run it in this process: (exit status, stdout, stderr)."""
    out, err = io.StringIO(), io.StringIO()
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
            cli.run([str(argument) for argument in arguments])
    finally:
        signal.signal(signal.SIGINT, interrupt)
    return int(end.value.code or 0), out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def finished(recipe) -> tuple[Path, str]:
    """(run folder, what was printed) of one undisturbed run."""
    folder = recipe.parent / "run"
    status, out, err = command_line("train", recipe, f"run.dir={folder}")
    assert (status, err) == (0, "")
    return folder, out


def strict_lines(folder: Path) -> list[dict]:
    def refuse(word: str):
        raise ValueError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_prints_its_folder_a_line_per_step_and_what_it_reached(finished):
    folder, out = finished
    assert f"run folder: {folder}" in out
    assert re.findall(r"^ +(\d) +(\d)/3 ", out, re.M) == [("0", "1"), ("1", "2"), ("2", "3")]
    assert max(len(line) for line in out.splitlines() if re.match(" *step| +[0-9]", line)) <= 80
    assert "evaluating version 0 on 3 questions: 3 greedy + 6 samples for pass@2\n" in out
    assert re.search(r"held out before: .*\(\d of 3, 95 % interval", out)
    assert re.search(r"held out after: .*pass@2 \d\.\d", out)
    assert f"report: {folder / 'report.html'}" in out


def test_closing_words_say_what_was_not_judged_and_what_memory_each_kind_of_process_took():
    some = {"accuracy": 0.5, "correct": 1, "count": 2, "not_judged": 3}
    none = {"accuracy": None, "correct": 0, "count": 0, "not_judged": 5}
    words = closing_words(
        {
            "steps": 1,
            "wall_s": 1.0,
            "setup_s": 1.0,
            "peak_memory_mb": 9.0,
            "roles_peak_memory_mb": {"learner 0": 1021.0, "learner 1": 20.0, "generator 0": 12.4},
            "numerics": "exact",
            "held_out": {"before": some, "after": none},
            "ledger": {"trained": 300, "masked": 100, "lost": 0, "replayed": 20},
            "lost_groups": 1,
            "undone_tokens": 50,
            "steps_s": 3.0,
        }
    )
    assert "peak memory 9 MB, " in words
    assert "peak memory of other processes: learner 1,021 MB, generator 12 MB" in words
    assert re.search(r"held out before: 50\.0% \(1 of 2, .*\), 3 not judged$", words, re.M)
    assert "held out after:  no answer could be judged, 5 not judged" in words
    assert [line.split() for line in words.splitlines()[-8:-1]] == [
        ["fate", "tokens", "share"],
        ["trained", "300", "75.0%"],
        ["masked", "100", "25.0%"],
        ["sampled", "400"],
        ["replayed", "20", "once", "more,", "in", "later", "steps"],
        ["undone", "50", "of", "the", "trained", "ones,", "in", "steps", "that", "were", "rolled", "back"],
        ["lost", "?", "1", "attempt", "that", "was", "under", "way", "when", "a", "process", "ended"],
    ]
    assert words.endswith("a token that moved the weights cost 1.60 sampled tokens and 12.00 ms of training")


def test_a_run_folder_holds_everything_that_is_promised(finished, recipe):
    from transformers import AutoModelForCausalLM

    folder, _ = finished
    for name in ("config.yaml", "store.sqlite", "metrics.jsonl", "summary.json", "report.html"):
        assert (folder / name).is_file(), name
    resolved, wanted = load_recipe(folder / "config.yaml"), load_recipe(recipe, [f"run.dir={folder}"])
    assert resolved == wanted
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-3"]
    AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / "step-3")
    assert "<html" in (folder / "report.html").read_text()[:200].lower()


def test_the_summary_has_the_promised_keys_and_numbers(finished):
    folder, _ = finished
    summary = json.loads((folder / "summary.json").read_text())
    assert set(SUMMARY_KEYS) <= set(summary)
    assert summary["steps"] == summary["steps_asked"] == 3
    assert (summary["run"], summary["model"], summary["ended"]) == ("run", "random:llama", "finished")
    assert (summary["seed"], summary["max_staleness"]) == (0, 1)
    for when in ("before", "after"):
        found = summary["held_out"][when]
        assert {"accuracy", "correct", "count", "pass_at_2"} <= set(found)
        assert (found["count"], found["accuracy"]) == (3, found["correct"] / 3)
    assert 0 <= summary["staleness"]["max"] <= 1
    assert set(summary["mismatch"]) == {"mean", "p99", "max"}
    assert set(summary["ledger"]) == {fate.value for fate in Fate}
    assert summary["wall_s"] > 0
    assert summary["peak_memory_mb"] > 100
    assert summary["packages"]["torch"].startswith("2.")


def test_every_metric_line_is_strict_json_under_canonical_names(finished):
    folder, _ = finished
    lines = strict_lines(folder)
    names = {name for line in lines for name in line} - {"step", "time", "not_finite"}
    assert unknown_names(names) == []
    training = [line for line in lines if "policy/loss" in line]
    assert [line["step"] for line in training] == [0, 1, 2]
    assert {"reward/regex/mean", "reward/number/mean", "task/sums/reward", "staleness/max", "time/wait_s"} <= names
    scored = [line for line in lines if "evaluation/sums/accuracy" in line]
    assert [line["step"] for line in scored] == [0, 2, 3]
    assert "evaluation/sums/pass@2" in scored[0] and "evaluation/sums/pass@2" not in scored[1]
    for line in training:
        assert line["reward/mean"] == pytest.approx(line["reward/regex/mean"] + 0.5 * line["reward/number/mean"])


def test_the_recipe_in_a_finished_runs_folder_can_be_evaluated(finished):
    folder, _ = finished
    last = folder / "checkpoints" / "step-3"
    status, out, err = command_line("eval", folder / "config.yaml", "--checkpoint", last)
    assert (status, err) == (0, "")
    found = json.loads(out.splitlines()[-1])["sums"]
    summary = json.loads((folder / "summary.json").read_text())["held_out"]["after"]
    assert (found["correct"], found["count"]) == (summary["correct"], summary["count"])
    assert out.startswith("evaluating on 3 questions: 3 greedy + 6 samples for pass@2\n")


def test_rewards_that_can_judge_nothing_end_the_run_at_its_first_evaluation(recipe):
    (recipe.parent / "mine.py").write_text("def score(completions, **columns):\n    raise ValueError('my bug')\n")
    function = f"tasks.0.rewards=[{{kind: function, path: '{recipe.parent / 'mine.py'}:score'}}]"
    folder = recipe.parent / "unjudged"
    status, _, err = command_line("train", recipe, f"run.dir={folder}", function)
    assert status == 2
    assert "9 of 9 not judged, because: the function raised ValueError: my bug" in err
    assert "Traceback" not in err
    status, _, err = command_line("eval", recipe, function)
    assert (status, "9 of 9 not judged" in err) == (2, True)


def test_every_sampled_token_has_one_fate_and_those_of_evaluation_are_kept_apart(finished):
    folder, _ = finished
    ledger = json.loads((folder / "summary.json").read_text())["ledger"]
    with RunReader(folder) as run:
        rollouts = list(run.rollouts())
        asked = run.evaluations()
        sampled = sum(e.numbers["sampled"] for e in run.events(role="generator") if "sampled" in e.numbers)
        probed = sum(event.numbers["tokens"] for event in run.events(kind="probe"))
        assert run.unfinished() == []
        steps = [run.batch(step) for step in range(3)]
    assert len(rollouts) == 3 * 2 * 4
    stored = sum(item.rollout.num_sampled for item in rollouts)
    assert sum(ledger.values()) == stored
    assert ledger["trained"] + ledger["zero_advantage"] == stored  # nothing failed, nothing is left over
    assert sampled == stored + probed + sum(sample.num_tokens for sample in asked)
    assert {(sample.version, sample.mode) for sample in asked} == {
        (0, "accuracy"),
        (0, "pass"),
        (2, "accuracy"),
        (3, "accuracy"),
        (3, "pass"),
    }
    trained = sum(int((row.trained & (row.advantages != 0)).sum()) for batch in steps for row in batch.rows)
    assert ledger["trained"] == trained > 0


def test_greedy_evaluation_of_the_same_weights_gives_the_same_answers_whatever_is_trained_meanwhile(finished, recipe):
    folder, _ = finished
    other = recipe.parent / "hot"
    assert command_line("train", recipe, f"run.dir={other}", "run.steps=1", "sampling.temperature=0.7")[0] == 0
    answers = []
    for path in (folder, other):
        with RunReader(path) as run:
            answers.append([s.text for s in run.evaluations(version=0) if s.mode == "accuracy"])
    assert answers[0] == answers[1]
    assert len(answers[0]) == 3


def test_the_same_recipe_and_seed_at_staleness_zero_give_the_same_bits(recipe):
    tokens, prints = [], []
    for name in ("first", "second"):
        folder = recipe.parent / name
        options = (f"run.dir={folder}", "queue.max_staleness=0", "run.steps=2", "run.keep_versions=true")
        assert command_line("train", recipe, *options)[0] == 0
        with RunReader(folder) as run:
            tokens.append([item.rollout.segments[0].token_ids.tolist() for item in run.rollouts()])
            prints.append([(v.version, v.parent, v.fingerprint) for v in run.versions()])
        assert sorted(p.name for p in (folder / "weights").iterdir()) == [f"version-{v}.safetensors" for v in range(3)]
        summary = json.loads((folder / "summary.json").read_text())
        assert (summary["staleness"]["max"], summary["mismatch"]["max"]) == (0, 0)
    assert tokens[0] == tokens[1]
    assert prints[0] == prints[1]
    assert [(version, parent) for version, parent, _ in prints[0]] == [(0, None), (1, 0), (2, 1)]
    assert len({fingerprint for _, _, fingerprint in prints[0]}) == 3


def test_a_run_whose_steps_are_no_multiple_of_the_publication_period_ends_with_its_last_weights(recipe):
    folder = recipe.parent / "period"
    options = (f"run.dir={folder}", "sync.weight_sync_steps=2", "learner.minibatches=2", "learner.num_iterations=2")
    assert command_line("train", recipe, *options, "queue.order=ready")[0] == 0
    with RunReader(folder) as run:
        assert [v.version for v in run.versions()] == [0, 2, 3]
        assert run.versions()[-1].updates == run.steps()[-1].updates > 0
        assert {sample.version for sample in run.evaluations()} == {0, 2, 3}


# Refusals: one message, exit status 2, no traceback, nothing loaded.


def refused(result: tuple[int, str, str], *parts: str) -> None:
    status, out, err = result
    assert (status, out) == (2, "")
    assert "Traceback" not in err
    for part in parts:
        assert part in err


def test_a_folder_that_holds_a_run_is_refused_by_name(finished, recipe):
    folder, _ = finished
    before = sorted(folder.iterdir())
    refused(command_line("train", recipe, f"run.dir={folder}"), str(folder), "already holds a run", "run.dir")
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    "where",
    [
        "/dev/null/run",
        "/proc/nearpolicy-run",
    ],
)
def test_a_folder_that_cannot_be_made_is_refused_by_name(recipe, where):
    refused(command_line("train", recipe, f"run.dir={where}"), where, "run.dir")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("learner.learning_rat=1e-5", ("learner.learning_rat", "learning_rate")),
        ("learner.max_staleness=1", ("learner.max_staleness", "queue.max_staleness")),
        ("sampling.temperature=0", ("sampling.temperature",)),
        ("sync.weight_sync_steps=4", ("weight_sync_steps", "max_staleness")),
        ("tasks.0.source.path=missing.jsonl", ("missing.jsonl",)),
        ("tasks.0.prompt_column=quest", ("quest", "question")),
        ("tasks.0.held_out=1000", ("held_out",)),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(recipe, tmp_path, override, parts):
    status, _, err = result = command_line("train", recipe, override, f"run.dir={tmp_path / 'run'}")
    assert (status, "Traceback" in err) == (2, False), result
    assert all(part in err for part in parts), err


def test_a_recipe_that_is_not_there_is_refused_by_name(tmp_path):
    refused(command_line("train", tmp_path / "none.yaml"), "none.yaml", "cannot be read")


def test_a_name_that_no_file_can_have_is_a_message_in_every_command(recipe):
    long = "a" * 300
    for arguments in (("inspect", long), ("report", long), ("check", long), ("eval", recipe, "--checkpoint", long)):
        refused(command_line(*arguments), long)


def test_a_reward_function_of_the_wrong_shape_leaves_no_folder(recipe, tmp_path):
    (tmp_path / "mine.py").write_text("def score(a, b): return 1.0\n")
    reward = f"tasks.0.rewards=[{{kind: function, path: '{tmp_path / 'mine.py'}:score'}}]"
    refused(command_line("train", recipe, reward, f"run.dir={tmp_path / 'run'}"), "fits neither shape")
    assert not (tmp_path / "run").exists()


def test_a_broken_model_folder_leaves_no_run_folder(recipe, tmp_path):
    whole = resolve("random:llama")
    for name, damage in (
        ("no-weights", lambda folder: (folder / "model.safetensors").unlink()),
        ("unknown", lambda folder: change(folder / "config.json", model_type="nosuch")),
        ("more-layers", lambda folder: change(folder / "config.json", num_hidden_layers=5)),
        ("end-token", lambda folder: change(folder / "generation_config.json", eos_token_id="x")),
    ):
        folder = Path(shutil.copytree(whole, tmp_path / name))
        damage(folder)
        options = ("model.init={}", f"model.path={folder}", f"run.dir={tmp_path / 'run'}")
        refused(command_line("train", recipe, *options), name)
        assert not (tmp_path / "run").exists()


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


# Ctrl-C.


def start(recipe: Path, folder: Path, *overrides: str) -> subprocess.Popen:
    arguments = ["train", recipe, f"run.dir={folder}", "run.steps=500", *overrides]
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "nearpolicy.launch.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(stream, pattern: str) -> str:
    seen = ""
    for line in stream:
        seen += line
        if re.search(pattern, line):
            return seen
    raise AssertionError(f"{pattern!r} never came; found:\n{seen}")


def test_ctrl_c_once_finishes_the_step_saves_and_ends_with_130(recipe):
    folder = recipe.parent / "interrupted"
    run = start(recipe, folder)
    try:
        wait_for(run.stdout, r"^ +0 +1/500 ")
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=120)
    finally:
        run.kill()
    assert run.returncode == 130, (out, err)
    assert "stopping after this step" in err and f"go on with: nearpolicy train --resume {folder}" in out
    assert "Traceback" not in err + out
    summary = json.loads((folder / "summary.json").read_text())
    assert 1 <= summary["steps"] < summary["steps_asked"] == 500
    assert summary["ended"] == "stopped"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{summary['steps']}"]
    with RunReader(folder) as reader:
        assert len(reader.steps()) == summary["steps"]
        assert sum(reader.ledger().values()) == sum(item.rollout.num_sampled for item in reader.rollouts())


def test_ctrl_c_that_comes_when_all_steps_are_done_changes_nothing(recipe, monkeypatch):
    whole = Supervised.run

    def run(self):
        summary = whole(self)
        self.session.stop()
        return summary

    monkeypatch.setattr(Supervised, "run", run)
    status, out, err = command_line("train", recipe, f"run.dir={recipe.parent / 'late'}", "run.steps=1")
    assert (status, "go on with" in out) == (0, False), (out, err)


def test_ctrl_c_twice_ends_at_once(recipe):
    folder = recipe.parent / "interrupted-twice"
    long = ("sampling.max_completion_length=120", "sampling.num_generations=8", "queue.prompts_per_step=4")
    run = start(recipe, folder, *long, "evaluation.max_completion_length=5")
    try:
        wait_for(run.stdout, r"^ +0 +1/500 ")
        run.send_signal(signal.SIGINT)
        wait_for(run.stderr, "press Ctrl-C again")
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=20)
    finally:
        run.kill()
    assert run.returncode == 130
    assert "Traceback" not in err + out
    assert not (folder / "summary.json").exists()
    assert not (folder / "checkpoints").exists()


@pytest.mark.parametrize("after_s", [0.15, 1.0])
def test_ctrl_c_while_the_run_is_set_up_ends_it_soon_and_leaves_nothing(recipe, after_s):
    folder = recipe.parent / "never-begun"
    run = start(recipe, folder)
    try:
        time.sleep(after_s)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=60)
    finally:
        run.kill()
    assert "Traceback" not in err + out
    assert run.returncode == 130, (out, err)
    assert "stopp" in err
    assert not folder.exists()


def test_ctrl_c_in_the_warm_start_says_that_nothing_is_kept_and_keeps_nothing(recipe):
    folder = recipe.parent / "warm"
    run = start(recipe, folder, "warm_start.steps=100000", "tasks.0.answer_column=answer")
    try:
        wait_for(run.stdout, "^run folder: ")
        time.sleep(0.5)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=30)
    finally:
        run.kill()
    assert (run.returncode, "Traceback" in err + out) == (130, False), (out, err)
    assert "stopping before the first step; nothing is kept" in err
    assert not folder.exists()


def test_ctrl_c_during_the_evaluation_before_training_leaves_it_and_ends(recipe):
    folder = recipe.parent / "evaluating"
    slow = ("evaluation.max_completion_length=400", "evaluation.pass_samples=500", "sampling.max_prompt_length=16")
    run = start(recipe, folder, *slow)
    try:
        wait_for(run.stdout, "^evaluating version 0 ")
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=60)
    finally:
        run.kill()
    assert (run.returncode, "Traceback" in err + out) == (130, False), (out, err)
    assert "the evaluation was left" in out
    assert json.loads((folder / "summary.json").read_text())["ended"] == "stopped"
    assert not (folder / "checkpoints").exists()


@pytest.mark.parametrize("gap_s", [0.0, 0.02, 0.5])
def test_two_ctrl_cs_while_the_run_is_set_up_end_it_at_once_however_close_they_are(recipe, gap_s):
    run = start(recipe, recipe.parent / f"twice-{gap_s}", "warm_start.steps=100000", "tasks.0.answer_column=answer")
    try:
        time.sleep(1.0)
        run.send_signal(signal.SIGINT)
        time.sleep(gap_s)
        begin = time.monotonic()
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode in (130, -signal.SIGINT), (out, err)  # at the very end the interpreter listens no more
    assert "Traceback" not in err + out
    assert gap_s == 0 or time.monotonic() - begin < 10  # of two at the same moment the system delivers one


# What is left when nothing could be said any more.


def children(pid: int) -> list[int]:
    done = subprocess.run(["ps", "--no-headers", "-o", "pid", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(line) for line in done.stdout.split()]


def gone(pid: int) -> bool:
    """Ended, whether or not anybody has reaped it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_run_killed_in_the_middle_of_training_leaves_a_readable_folder_and_no_process(recipe):
    folder = recipe.parent / "killed"
    run = start(recipe, folder, "checkpoint.every=1")
    try:
        wait_for(run.stdout, r"^ +3 +4/500 ")
        workers = children(run.pid)
        run.kill()
        run.communicate(timeout=30)
    finally:
        run.kill()
    assert workers
    deadline = time.monotonic() + 10
    while not all(map(gone, workers)):
        assert time.monotonic() < deadline, "a worker outlived the run"
        time.sleep(0.05)
    assert not (folder / "summary.json").exists()
    with RunReader(folder) as reader:
        steps = [step.step for step in reader.steps()]
        assert len(steps) >= 2 and steps == list(range(len(steps)))  # the last moments may not be committed
        assert sum(reader.ledger().values()) == sum(item.rollout.num_sampled for item in reader.rollouts())
    assert command_line("inspect", folder, "--step", 1)[0] == 0
    status, out, err = command_line("report", folder)
    assert (status, err) == (0, "") and (folder / "report.html").is_file()
    saved = sorted((folder / "checkpoints").glob("step-*"))
    status, out, err = command_line("eval", folder / "config.yaml", "--checkpoint", saved[-1])
    assert (status, err) == (0, "")
    assert json.loads(out.splitlines()[-1])["sums"]["count"] == 3
    refused(command_line("train", recipe, f"run.dir={folder}"), "already holds a run")


def test_a_run_killed_before_its_first_checkpoint_says_that_there_is_none(recipe):
    folder = recipe.parent / "killed-early"
    run = start(recipe, folder)
    try:
        wait_for(run.stdout, r"^ +0 +1/500 ")
    finally:
        run.kill()
        run.communicate(timeout=30)
    result = command_line("eval", folder / "config.yaml", "--checkpoint", folder / "checkpoints" / "step-1")
    refused(result, "step-1", "no config.json")


def test_of_two_runs_started_into_one_folder_one_has_it_and_the_other_is_refused(recipe):
    folder = recipe.parent / "contested"
    runs = [start(recipe, folder, "run.steps=2", f"learner.learning_rate={rate}") for rate in ("1e-3", "2e-3")]
    try:
        results = [run.communicate(timeout=240) for run in runs]
    finally:
        for run in runs:
            run.kill()
    won, lost = sorted(range(2), key=lambda place: runs[place].returncode)
    assert [runs[won].returncode, runs[lost].returncode] == [0, 2], results
    assert "Traceback" not in results[lost][1]
    assert re.search(r"contested (is being written by another run|already holds a run)", results[lost][1])
    resolved = load_recipe(folder / "config.yaml")
    assert resolved.learner.learning_rate == [1e-3, 2e-3][won]
    with RunReader(folder) as reader:
        assert len(reader.steps()) == 2 and reader.config["learner"]["learning_rate"] == [1e-3, 2e-3][won]
