"""`nearpolicy check` of learned rewards: who judges and for how much, and what is missing, without asking anybody."""

from __future__ import annotations

import json

import pytest

from nearpolicy.launch import cli

RECIPE = """\
run: {steps: 1}
model: {path: random:llama}
sampling: {max_prompt_length: 40, max_completion_length: 20}
tasks:
  - name: a
    source: {kind: jsonl, path: ROWS}
    prompt_column: question
    chat: false
    rewards: [REWARD]
"""


@pytest.fixture
def check(tmp_path, capsys):
    def run(reward: dict) -> tuple[int, str, str]:
        (tmp_path / "rows.jsonl").write_text('{"question": "2 + 2?"}\n')
        recipe = RECIPE.replace("ROWS", str(tmp_path / "rows.jsonl")).replace("REWARD", json.dumps(reward))
        (tmp_path / "recipe.yaml").write_text(recipe)
        with pytest.raises(SystemExit) as end:
            cli.run(["check", str(tmp_path / "recipe.yaml")])
        out, err = capsys.readouterr()
        return int(end.value.code or 0), " ".join(out.split()), err

    return run


JUDGE = {"kind": "judge", "models": ["m", "n"], "endpoint": {"base_url": "http://h/v1", "api_key_env": "NOT_SET_HERE"}}


def test_a_missing_key_is_refused_without_asking(check, monkeypatch):
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    status, _, err = check(JUDGE)
    assert (
        status == 2 and "task 'a', reward 'judge'" in err and "NOT_SET_HERE, which api_key_env names, is not set" in err
    )
    items = [{"kind": "judge", "question": "?"}]
    rubric = {"kind": "rubric", "items": items, "judge": {key: JUDGE[key] for key in ("models", "endpoint")}}
    assert "NOT_SET_HERE" in check(rubric)[2]


def test_who_judges_is_told(check, monkeypatch):
    monkeypatch.setenv("NOT_SET_HERE", "key")
    endpoint = JUDGE["endpoint"] | {"price_in": 1.0, "budget": 2.5}
    status, out, err = check(JUDGE | {"endpoint": endpoint})
    assert status == 0, err
    assert "reward judge m, n at http://h/v1, 2 requests per completion, at most 2.5 spent" in out


def test_a_folder_that_is_not_there_is_refused(check):
    for reward in ({"kind": "reward_model", "path": "/no/such/model"}, {"kind": "judge", "models": ["./nowhere"]}):
        status, _, err = check(reward)
        assert status == 2 and "there is no model folder" in err
