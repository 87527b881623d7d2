"""A run whose reward is a judge: its scores are the rewards, its failures leave samples out, its end of money ends the
run with what was learnt."""

from __future__ import annotations

import json
import threading

import pytest
from fake_endpoint import KEY, blocks, failure, fields_of, is_probe, serving, verdict

from nearpolicy.config import load_recipe
from nearpolicy.errors import ConfigError, UserError
from nearpolicy.launch.session import Session, run_session
from nearpolicy.store.reader import RunReader

RECIPE = """\
run: {steps: STEPS, dir: DIR}
model: {path: random:llama, init: {initializer_range: 0.15}}
sampling: {max_prompt_length: 16, max_completion_length: 3, num_generations: 4}
queue: {prompts_per_step: 2}
tasks:
  - name: sums
    source: {kind: jsonl, path: ROWS}
    prompt_column: question
    chat: false
    rewards: [REWARD]
"""


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Train with a judge that responds so; the metrics of each step, and the run."""
    monkeypatch.setenv("NEARPOLICY_TEST_JUDGE_KEY", KEY)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"question": f"{a} + 1 ="}) + "\n" for a in range(8)))

    def run(respond, steps=1, **endpoint):
        with serving(respond) as fake:
            where = {"base_url": fake.url, "api_key_env": "NEARPOLICY_TEST_JUDGE_KEY", "backoff_s": 0.01} | endpoint
            reward = {"kind": "judge", "endpoint": where, "models": ["m"], "max_answer_tokens": 20}
            text = RECIPE.replace("REWARD", json.dumps(reward)).replace("ROWS", str(tmp_path / "rows.jsonl"))
            (tmp_path / "r.yaml").write_text(text.replace("STEPS", str(steps)).replace("DIR", str(tmp_path / "run")))
            metrics = []
            session = Session(
                config=load_recipe(tmp_path / "r.yaml"),
                say=lambda _: None,
                on_step=lambda _, m: metrics.append(dict(m)),
            )
            run_session(session)
        return metrics

    return run


def test_scores_are_rewards_and_failures_leave_samples_out(trained, tmp_path):
    lock, asked = threading.Lock(), []

    def respond(request, _):
        if is_probe(request):
            return verdict(request, True)
        with lock:
            asked.append(blocks(request)["ANSWER"])
        assert fields_of(request)
        return failure(400) if len(asked) % 4 == 0 else verdict(request, 1 + len(asked) % 10)

    [metrics] = trained(respond)
    assert 0.0 <= metrics["reward/judge/mean"] <= 1.0 and metrics["reward/unscored"] >= 1
    with RunReader(tmp_path / "run") as run:
        verdicts = [verdicts["judge"] for group in run.groups() for verdicts in group.verdicts]
    assert any("answered 400" in v.reason and v.value is None for v in verdicts)


def test_the_end_of_the_money_ends_the_run_and_is_told(trained, tmp_path):
    def respond(request, _):
        return verdict(request, 1 + hash(blocks(request).get("ANSWER", "")) % 10)

    with pytest.raises(UserError, match="budget of 10 for"):
        trained(respond, steps=500, price_in=1000.0, price_out=1000.0, budget=10.0)
    with RunReader(tmp_path / "run") as run:
        assert "budget" in {event.kind for event in run.events()}


def test_a_run_without_its_key_makes_no_folder(trained, tmp_path, monkeypatch):
    monkeypatch.delenv("NEARPOLICY_TEST_JUDGE_KEY")
    with pytest.raises(ConfigError, match="NEARPOLICY_TEST_JUDGE_KEY"):
        trained(lambda r, _: verdict(r, 5))
    assert not (tmp_path / "run").exists()
