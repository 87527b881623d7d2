"""`nearpolicy verify`: the verdict of training on one text, as a JSON object; bad usage by name, and nothing hangs."""

from __future__ import annotations

import io
import json
import sys
import time
from types import SimpleNamespace

import pytest

from nearpolicy.launch import cli, verify
from nearpolicy.verifier import workers

ROW = {
    "key": 1,
    "prompt": "Say something.",
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [{}, {"relation": "at least", "num_words": 3}],
}
NO_COMMA = '["punctuation:no_comma"]'


@pytest.fixture
def run(capfd):
    """Run a command line in this process: (exit status, stdout, stderr)."""

    def run_command(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.run(["verify", *map(str, arguments)])
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return int(end.value.code or 0), out, err

    return run_command


@pytest.fixture
def verdict(run):
    """The verdict that a command line ends with."""

    def last_line(*arguments: object) -> dict:
        status, out, err = run(*arguments)
        assert (status, err) == (0, "")
        found = json.loads(out.splitlines()[-1])
        assert list(found) == ["outcome", "reward", "reason", "parts", "seconds"]
        assert found["seconds"] >= 0
        return found

    return last_line


def refused(result: tuple[int, str, str], *parts: str) -> None:
    status, out, err = result
    assert (status, out) == (2, "")
    for part in parts:
        assert part in err


def piped(monkeypatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))


# math


def test_an_answer_is_compared_as_in_training(verdict):
    found = verdict("math", "--gold", "1/2", "--answer", "0.5")
    assert (found["outcome"], found["reward"]) == ("scored", 1.0)
    assert verdict("math", "--gold", "-1/2", "--answer", "-0.25")["reward"] == 0.0


def test_a_right_answer_that_cannot_be_read_is_a_failed_verdict_not_bad_usage(verdict):
    found = verdict("math", "--gold", " ", "--answer", "0.5")
    assert (found["outcome"], found["reward"]) == ("failed", None)
    assert found["reason"] == "the right answer is empty"


def test_an_answer_that_never_ends_ends_at_the_time_limit(verdict):
    begin = time.monotonic()
    endless = r"\boxed{\sum_{k=1}^{2} 9^{9^{9^{9}}}}"
    found = verdict("math", "--gold", "1/2", "--answer", endless, "--timeout-s", "1")
    assert (found["outcome"], found["reward"], found["reason"]) == ("scored", 0.0, "time_limit")
    assert time.monotonic() - begin < 60
    told = verdict("math", "--gold", "1/2", "--answer", "$9^{9^{9^{9}}}$")["reason"]
    assert told.startswith("time_limit: ")  # from its size, before anything is computed


def test_an_answer_may_come_from_a_file_or_a_pipe(verdict, tmp_path, monkeypatch):
    file = tmp_path / "answer.txt"
    file.write_text("so it is\n0.50\n")
    assert verdict("math", "--gold", "1/2", "--answer-file", file)["reward"] == 1.0
    piped(monkeypatch, b"\xff so it is \\boxed{\\frac12}")
    assert verdict("math", "--gold", "1/2", "--answer-file", "-")["reward"] == 1.0


# ifeval


def test_a_row_a_mapping_and_a_list_are_instructions(verdict):
    found = verdict("ifeval", "--instructions", json.dumps(ROW), "--response", "a, b")
    assert (found["outcome"], found["reward"], found["parts"]["share"]) == ("scored", 0.0, 0.0)
    assert "punctuation:no_comma (commas: 1); length_constraints:number_words (words: 2" in found["reason"]
    mapping = json.dumps({"length_constraints:number_words": {"relation": "at least", "num_words": 3}})
    assert verdict("ifeval", "--instructions", mapping, "--response", "a b c")["reward"] == 1.0
    assert verdict("ifeval", "--instructions", f" {NO_COMMA}", "--response", "a b c")["reward"] == 1.0


def test_a_row_of_a_file_is_chosen_by_its_number(verdict, run, tmp_path):
    file = tmp_path / "rows.jsonl"
    other = ROW | {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    file.write_text(json.dumps(ROW) + "\n\n" + json.dumps(other) + "\n")
    assert set(verdict("ifeval", "--instructions", file, "--row", 2, "--response", "a")["parts"]) == {
        "all",
        "share",
        "punctuation:no_comma",
    }
    refused(run("ifeval", "--instructions", file, "--response", "a"), "has 2 rows; choose one with --row N, from 1")
    refused(run("ifeval", "--instructions", file, "--row", 3, "--response", "a"), "has 2 rows, so there is no --row 3")
    file.write_text(json.dumps(ROW, indent=2))
    assert verdict("ifeval", "--instructions", file, "--response", "a b c")["reward"] == 1.0


def test_settings_of_the_reward_are_those_of_a_recipe(verdict, run, monkeypatch):
    arguments = ["ifeval", "--instructions", json.dumps(ROW), "--response", "Sure, so:\na b"]
    assert verdict(*arguments)["reward"] == 0.0
    assert verdict(*arguments, "form=loose", "credit=share")["reward"] == 1.0
    assert verdict(*arguments, "credit=share")["reward"] == 0.5
    refused(run(*arguments, "credit=some"), "setting credit of the reward ifeval", "'all' or 'share'")
    refused(run(*arguments, "credits=all"), "setting credits of the reward ifeval: there is no such setting")
    refused(run(*arguments, "credit"), "credit: write a setting of the reward as key=value")
    refused(run(*arguments, "credit=["), "setting credit=[", "not valid YAML")
    refused(run(*arguments, "requires=[form]"), "'ifeval' requires 'form', which is no source")


def test_an_instruction_that_does_not_exist_is_what_training_would_be_told(verdict):
    found = verdict("ifeval", "--instructions", '["punctuation:no_coma"]', "--response", "a")
    assert (found["outcome"], found["reward"]) == ("failed", None)
    assert "did you mean 'punctuation:no_comma'?" in found["reason"]


@pytest.mark.parametrize("text", ["", "\ud800", "\x1b[31m", "a" * 100_000])
def test_any_response_is_judged_and_the_last_line_stays_json(verdict, text):
    assert verdict("ifeval", "--instructions", NO_COMMA, "--response", text)["outcome"] == "scored"


# Bad usage


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["math", "--gold", "1"], "give --answer TEXT or --answer-file FILE (- for standard input), not neither"),
        (["math", "--gold", "1", "--answer", "1", "--answer-file", "x"], "not both"),
        (
            ["math", "--gold", "1", "--answer-file", "no/such/file"],
            "--answer-file no/such/file: cannot be read (No such",
        ),
        (["math", "--gold", "1", "--answer-file", "."], "--answer-file .: cannot be read (Is a directory)"),
        (["math", "--gold", "1", "--answer-file", "a\0b"], "cannot be read"),
        (["math", "--answer", "1"], "--gold"),
        (["math", "--gold", "1", "--answer", "1", "--timeout-s", "0"], "--timeout-s is 0"),
        (["math", "--gold", "1", "--answer", "1", "--timeout-s", "nan"], "--timeout-s is nan"),
        (["ifeval", "--instructions", "no/such", "--response", "a"], "--instructions no/such: cannot be read"),
        (["ifeval", "--instructions", "[", "--response", "a"], "--instructions: is no JSON"),
        (["ifeval", "--instructions", "[" * 100_000, "--response", "a"], "is no JSON"),
        (["ifeval", "--instructions", NO_COMMA, "--row", "0", "--response", "a"], "--row"),
        (["ifeval", "--response", "a"], "--instructions"),
        (["poem"], "poem"),
    ],
)
def test_bad_usage_is_named(run, arguments, says):
    refused(run(*arguments), says)


def test_a_file_that_is_no_row_is_named(run, tmp_path):
    file = tmp_path / "row.json"
    file.write_text('"punctuation:no_comma"')
    refused(run("ifeval", "--instructions", file, "--response", "a"), "should be a row with instruction_id_list and")


def test_a_worker_that_cannot_be_started_is_a_message(run, monkeypatch):
    monkeypatch.setattr(workers.sys, "executable", "/no/such/python")
    refused(run("math", "--gold", "1", "--answer", "1"), "could not be started", "nothing could be judged")


# For people


def test_on_a_terminal_a_person_reads_parts_and_reason_first(verdict, monkeypatch, capfd):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    reward = verify.reward_from("ifeval", [])
    columns = {name: ROW[name] for name in reward.columns}
    found = verify.judged(reward, "a, b", columns, timeout_s=10.0)
    verify.show(found)
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("scored 0 in ")
    assert any(line.split() == ["punctuation:no_comma", "0"] for line in lines)
    assert json.loads(lines[-1])["outcome"] == "scored"
