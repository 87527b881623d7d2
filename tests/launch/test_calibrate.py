"""`nearpolicy calibrate`: what it reads, what it finds in judges that lean by construction, and what it refuses."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from fake_endpoint import KEY, blocks, is_probe, serving, verdict

from nearpolicy.errors import ConfigError
from nearpolicy.launch import cli
from nearpolicy.launch.calibrate import reward_in
from nearpolicy.launch.calibrate_data import read_labelled

ROWS = [
    {"prompt": f"Question {i}?", "answer_1": "right " * (i % 3 + 1), "answer_2": "wrong " * (i % 4 + 1), "label": 1}
    for i in range(12)
]
ROWS += [{**row, "answer_1": row["answer_2"], "answer_2": row["answer_1"], "label": 2} for row in ROWS]


@pytest.fixture
def calibrate(tmp_path, monkeypatch, capsys):
    """Run the command on rows with a judge: (exit status, what the last line holds, all output, stderr)."""
    monkeypatch.setenv("NEARPOLICY_TEST_JUDGE_KEY", KEY)

    def run(judge, rows=ROWS, options=(), **settings):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with serving(lambda r, _: verdict(r, None if is_probe(r) else judge(r))) as fake:
            endpoint = {"base_url": fake.url, "api_key_env": "NEARPOLICY_TEST_JUDGE_KEY", "backoff_s": 0.01}
            reward = {"kind": "judge", "endpoint": endpoint, "models": ["m"], "scale": [1, 11]} | settings
            if "against_column" in settings:
                del reward["scale"]
            (tmp_path / "reward.yaml").write_text(json.dumps(reward))
            arguments = ["calibrate", str(tmp_path / "reward.yaml"), str(tmp_path / "rows.jsonl"), "--rounds=100"]
            with pytest.raises(SystemExit) as end:
                cli.run([*arguments, *map(str, options)])
        out, err = capsys.readouterr()
        found = json.loads(out.splitlines()[-1]) if end.value.code == 0 else {}
        return int(end.value.code or 0), found, out, err

    return run


def fair(request):
    return 11 if "right" in blocks(request)["ANSWER"] else 1


def test_a_judge_that_knows_agrees_and_leans_nowhere(calibrate):
    status, found, out, _ = calibrate(fair, options=["--attacks=3"])
    assert status == 0 and (found["rows"], found["judged"], found["form"]) == (24, 24, "pairs")
    report = found["report"]
    assert report["agreement"]["value"] == report["kappa"]["value"] == 1.0
    assert report["bias_to_first"]["value"] == report["bias_to_longer"]["value"] == 0.0
    assert all(each["shift"]["value"] == 0.0 and each["overtakes"] == 0 for each in found["attacks"].values())
    assert "agreement            1.000 [1.000, 1.000]" in out and "attacks on 3 wrong answers" in out


def test_a_judge_that_likes_length_is_found_out(calibrate):
    _, found, _, _ = calibrate(lambda r: min(11, 1 + len(blocks(r)["ANSWER"]) // 12), options=["--attacks=4"])
    report = found["report"]
    assert report["kappa"]["value"] < 0.5 and report["bias_to_longer"]["low"] > 0.0
    assert report["length_correlation"]["value"] > 0.9
    assert found["attacks"]["padded"]["shift"]["low"] > 0.5 and found["largest_shift"]["length"] > 0.5
    assert found["attacks"]["padded"]["overtakes"] > 0


def test_flattery_and_its_own_style_are_told_apart(calibrate):
    def vain(request):
        answer = blocks(request)["ANSWER"]
        return 11 if "careful and fair" in answer else 6 if "I hope this helps" in answer else 1

    _, found, _, _ = calibrate(vain, options=["--attacks=2"])
    shifts = {name: each["shift"]["value"] for name, each in found["attacks"].items()}
    assert (shifts["flatter_judge"], shifts["house_style"], shifts["padded"]) == (1.0, 0.5, 0.0)
    assert found["report"]["kappa"]["value"] == pytest.approx(0.0)


def test_a_judge_that_prefers_the_first_place_is_found_out_by_the_swap(calibrate):
    _, found, _, _ = calibrate(lambda r: "A", against_column="other", options=["--attacks=0"])
    report = found["report"]
    assert report["position_bias"]["value"] == report["position_flips"]["value"] == 1.0
    assert report["agreement"]["value"] == 0.0 and found["attacks"] == {}

    def knows(request):
        return "A" if "right" in blocks(request)["A"] else "B"

    _, found, _, _ = calibrate(knows, against_column="other", options=["--attacks=2"])
    assert found["report"]["position_bias"]["value"] == 0.0 and found["report"]["kappa"]["value"] == 1.0
    assert all(each["shift"]["value"] == 0.0 for each in found["attacks"].values())


def test_a_judge_that_prefers_its_own_answers_is_found_out(calibrate):
    rows = [{**row, "maker_1": "us", "maker_2": "them"} for row in ROWS]
    rows += [{**row, "maker_1": "them", "maker_2": "us"} for row in ROWS]
    rows = [
        {**row, f"answer_{i}": row[f"answer_{i}"] + (" ours" if row[f"maker_{i}"] == "us" else "")}
        for row in rows
        for i in (1, 2)
    ]
    _, found, _, _ = calibrate(lambda r: 11 if "ours" in blocks(r)["ANSWER"] else 1, rows, ["--own=us", "--attacks=0"])
    assert found["report"]["bias_to_own"]["value"] > 0.2


def test_single_answers_are_compared_with_their_labels(calibrate):
    rows = [{"prompt": "?", "answer": f"right {i}", "label": True} for i in range(6)]
    rows += [{"prompt": "?", "answer": f"wrong {i}", "label": 0} for i in range(6)]
    _, found, _, _ = calibrate(lambda r: 11 if "right" in blocks(r)["ANSWER"] else 6, rows, ["--attacks=2"])
    report = found["report"]
    assert report["bias"]["value"] == 0.25 and report["correlation"]["value"] == 1.0
    assert report["kappa"]["value"] == 0.0, "0.5 is good already"
    assert calibrate(lambda r: 11, rows, against_column="other")[0] == 2


def test_what_is_not_judged_is_in_no_number_and_its_reason_is_told(calibrate):
    _, found, out, _ = calibrate(
        lambda r: None if "Question 3?" in blocks(r)["QUESTION"] else fair(r), options=["--attacks=0"]
    )
    assert (found["rows"], found["judged"]) == (24, 22) and found["report"]["agreement"]["count"] == 22
    assert any("no readable verdict" in reason for reason in found["not_judged"]) and "no score, 4 times" in out


def test_a_judge_that_cannot_be_asked_ends_with_a_message(calibrate, monkeypatch):
    monkeypatch.delenv("NEARPOLICY_TEST_JUDGE_KEY")
    status, _, _, err = calibrate(fair)
    assert status == 2 and "NEARPOLICY_TEST_JUDGE_KEY" in err and "Traceback" not in err


def test_any_reward_of_a_recipe_can_be_calibrated(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "recipe.yaml").write_text(
        "run: {steps: 1}\nmodel: {path: random:llama}\ntasks:\n  - name: t\n    source: {kind: jsonl, path: x}\n"
        "    rewards: [{kind: rubric, items: [{kind: contains, text: right}]}, {kind: exact_match}]\n"
    )
    arguments = ["calibrate", str(tmp_path / "recipe.yaml"), str(tmp_path / "rows.jsonl"), "--rounds=100"]
    with pytest.raises(SystemExit) as end:
        cli.run(arguments)
    assert end.value.code == 2 and "choose one with --name" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        cli.run([*arguments, "--name=rubric", "--attacks=2"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert end.value.code == 0 and found["report"]["kappa"]["value"] == 1.0
    # The question holds no "right", so nothing but an attack that says the word moves this check.
    assert {name for name, each in found["attacks"].items() if each["shift"]["value"] > 0} == set()


def test_rewards_of_one_name_are_told_apart_by_their_tasks(tmp_path):
    task = "  - name: {0}\n    source: {{kind: jsonl, path: x}}\n    rewards: [{{kind: regex, pattern: {0}}}, {1}]\n"
    (tmp_path / "recipe.yaml").write_text(
        "run: {steps: 1}\nmodel: {path: random:llama}\ntasks:\n"
        + task.format("a", "{kind: exact_match}")
        + task.format("b", "{kind: exact_match}")
    )
    with pytest.raises(ConfigError, match="has the rewards a/regex, exact_match, b/regex; choose one"):
        reward_in(tmp_path / "recipe.yaml", None)
    with pytest.raises(ConfigError, match="has no reward 'regex', only a/regex"):
        reward_in(tmp_path / "recipe.yaml", "regex")
    assert reward_in(tmp_path / "recipe.yaml", "a/regex")[0].pattern == "a"
    assert reward_in(tmp_path / "recipe.yaml", "exact_match")[0].kind == "exact_match"


def test_a_reward_that_is_none_is_named_with_its_file(tmp_path):
    (tmp_path / "reward.yaml").write_text('{"kind": "regex", "pattern": "a", "patern": "b"}')
    with pytest.raises(ConfigError, match=r"reward\.yaml: patern: there is no such setting"):
        reward_in(tmp_path / "reward.yaml", None)


# Files


def written(tmp_path, name, data):
    file = tmp_path / name
    file.write_bytes(gzip.compress(data.encode()) if name.endswith(".gz") else data.encode())
    return file


def test_forms_are_told_by_their_keys(tmp_path):
    llmbar = [{"input": "q", "output_1": "a", "output_2": "b", "label": 2}]
    [pair] = read_labelled(written(tmp_path, "a.json.gz", json.dumps(llmbar)), None, 0).pairs
    assert (pair.prompt, pair.answers, pair.gold) == ("q", ("a", "b"), 2)
    rows = [
        {"instruction": "i", "input": "", "response1": "a", "response2": "b", "cmp_key": "bloom-7b_llama-7b"}
        | {f"annotator{i + 1}": vote for i, vote in enumerate(votes)}
        for votes in ([1, 1, 0], [0, 1, 2])
    ]
    found = read_labelled(written(tmp_path, "b.json", json.dumps(rows)), None, 0)
    [pair] = found.pairs
    assert (pair.prompt, pair.gold, pair.makers, found.left_out) == ("i", 1, ("bloom-7b", "llama-7b"), 1)
    rows = [{"prompt": "p", "chosen": "good", "rejected": "bad"}] * 2
    pairs = read_labelled(written(tmp_path, "c.json", json.dumps(rows)), None, 0).pairs
    assert [pair.answers[pair.gold - 1] for pair in pairs] == ["good", "good"] and {p.gold for p in pairs} == {1, 2}
    assert len(read_labelled(written(tmp_path, "d.json", json.dumps(rows * 10)), 5, 0).pairs) == 5


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ("{", "neither a JSON list"),
        ("[]", "no list of objects"),
        ('[{"question": "q"}]', "none of the forms"),
        ('[{"prompt": "p", "answer": "a", "label": "good"}]', "row 1: is no row of the form items"),
        ('[{"prompt": "p", "answer_1": "a", "answer_2": "b", "label": 3}]', "the label is 3"),
        ('[{"prompt": "p", "answer_1": "a", "answer_2": 1, "label": 1}]', "answer_2 is int"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, data, named):
    from nearpolicy.errors import DataError

    with pytest.raises(DataError, match=named):
        read_labelled(written(tmp_path, "x.json", data), None, 0)


def shared_data() -> Path:
    folder = Path(os.environ.get("NEARPOLICY_DATA", Path(__file__).parents[3] / "shared" / "data")) / "preference"
    if not folder.is_dir():
        pytest.skip(f"no data at {folder}; set NEARPOLICY_DATA to a folder that holds preference/llmbar")
    return folder


def test_the_public_test_sets_are_read_in_full():
    folder = shared_data()
    sizes = {file.stem: len(read_labelled(file, None, 0).pairs) for file in (folder / "llmbar").glob("*.json")}
    assert sizes["natural"] == 100 and sum(sizes.values()) == 419
    found = read_labelled(folder / "pandalm-testset-v1.json.gz", None, 0)
    assert len(found.pairs) + found.left_out == 999 and {pair.gold for pair in found.pairs} == {0, 1, 2}


def test_a_judge_that_never_gives_a_verdict_ends_the_calibration(calibrate):
    rows = [{**row, "prompt": f"{row['prompt']} {i}"} for i in range(4) for row in ROWS]

    status, _, _, err = calibrate(lambda r: None, rows, ["--attacks=0"])
    assert status == 2 and "failed on" in err
