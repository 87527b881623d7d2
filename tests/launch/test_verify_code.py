"""`nearpolicy verify code`: a program and its tests from the shell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nearpolicy.launch import cli

CASES = Path(__file__).parents[1] / "verifier" / "sandbox" / "cases" / "handed"
ADD = "def add(a, b):\n    return a + b\n"
CALLS = [{"args": [2, 3], "result": 5}, {"args": [1, 1], "result": 2}]


@pytest.fixture
def verify(tmp_path, monkeypatch, capsys):
    """(exit status, the JSON of the last line or None, stderr) of `nearpolicy verify code ...`."""
    monkeypatch.chdir(tmp_path)
    Path("add.py").write_text(ADD)

    def run(*arguments: str):
        with pytest.raises(SystemExit) as end:
            cli.run(["verify", "code", *arguments])
        out, err = capsys.readouterr()
        return int(end.value.code or 0), json.loads(out.splitlines()[-1]) if out else None, err

    return run


def test_a_verdict_is_one_json_object_and_status_0(verify):
    status, found, _ = verify("add.py", "--tests", json.dumps(CALLS))
    assert status == 0
    assert (found["outcome"], found["verdict"], found["reward"], found["reason"]) == ("scored", "passed", 1.0, "")
    assert (found["passed"], found["tests"]) == (2, 2) and found["isolation"] in ("namespaces", "landlock")
    assert found["usage"]["runs"] == 2 and 0 < found["usage"]["cpu_s"] < 1
    assert "stdout" not in found


def test_a_wrong_program_is_a_verdict_too_and_names_a_test_by_number(verify):
    Path("add.py").write_text("def add(a, b):\n    print('debug')\n    return 5\n")
    status, found, _ = verify("add.py", "--tests", json.dumps(CALLS), "--output")
    assert status == 0
    assert (found["verdict"], found["reward"], found["reason"], found["stdout"]) == (
        "wrong_answer",
        0.0,
        "test 2",
        "debug\n",
    )
    status, found, _ = verify("add.py", "--tests", json.dumps(CALLS), "--every-test")
    assert (found["verdict"], found["passed"], found["tests"]) == ("wrong_answer", 1, 2)


@pytest.mark.parametrize(
    "case", ["h01_early_exit_zero", "h02_os_exit_on_import", "h14_memory_hog", "h25_fake_infra_error"]
)
def test_a_case_file_holds_everything(verify, case):
    file = CASES / f"{case}.py"
    expected = next(line for line in file.read_text().splitlines() if line.startswith("# expected verdict: "))
    status, found, _ = verify("--case", str(file))
    assert status == 0
    assert found["verdict"] in expected.removeprefix("# expected verdict: ").split(" or ")
    assert found["reward"] == 0.0


def test_tests_may_be_an_object_with_all_that_belongs_to_them_in_a_file(verify):
    asked = {
        "tests": ["assert plus(1, 2) == 3", "assert plus(SEVEN, 1) == 8"],
        "kind": "tests",
        "setup": "SEVEN = 7",
        "limits": {"cpu_s": 1},
    }
    Path("tests.json").write_text(json.dumps(asked))
    Path("plus.py").write_text("def plus(a, b): return a + b\ndef other(): pass\n")
    status, found, _ = verify("plus.py", "--tests", "tests.json")
    assert (status, found["verdict"]) == (0, "passed")


def test_a_completion_is_taken_apart_as_in_training(verify):
    Path("completion.md").write_text(f"Here it is:\n```python\n{ADD}```\nand in a shell:\n```sh\necho 5\n```\n")
    assert (
        verify("completion.md", "--extract", "--entry", "add", "--tests", json.dumps(CALLS))[1]["verdict"] == "passed"
    )
    assert verify("completion.md", "--entry", "add", "--tests", json.dumps(CALLS))[1]["verdict"] == "runtime_error"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("add.py",), "give a program and --tests TESTS, or --case FILE"),
        (("nowhere.py", "--tests", json.dumps(CALLS)), "nowhere.py: cannot be read"),
        (("add.py", "--tests", "{"), "--tests: is no JSON"),
        (("add.py", "--tests", "nowhere.json"), "--tests nowhere.json: cannot be read"),
        (("add.py", "--tests", "[]"), "at least one"),
        (("add.py", "--tests", '[{"args": [1]}]'), "a test is {stdin, stdout}, {args, result} or text"),
        (("add.py", "--tests", '[{"args": 1, "result": 1}]'), "args of a test are a list"),
        (("add.py", "--tests", '[{"stdin": 1, "stdout": "1"}]'), "stdin and stdout of a test are text"),
        (("add.py", "--tests", '[{"stdin": "", "stdout": ""}, {"args": [], "result": 1}]'), "all must be of a kind"),
        (("add.py", "--tests", '{"tests": ["1"], "limit": {}}'), "knows no limit"),
        (("add.py", "--tests", '{"tests": ["1"], "limits": {"cpu_s": -1}}'), "limits.cpu_s"),
        (("add.py", "--tests", '{"tests": ["1"], "kind": "pytest"}'), "use stdin, function or tests"),
        (("add.py", "--tests", json.dumps(CALLS), "--isolation", "docker"), "isolation"),
        (("add.py", "--tests", json.dumps(CALLS), "--isolation", "none"), "allow_unisolated"),
        (("add.py", "--tests", json.dumps(CALLS), "--package", "no_such_package"), "no_such_package"),
        (("add.py", "--tests", '["assert add(len, 1)"]'), "need --allow-weak-trust"),
        (("add.py", "--tests", '["x = 1"]'), "never calls the program"),
        (("add.py", "--tests", json.dumps(CALLS), "--case", "add.py"), "give nothing else"),
        (("--case", "add.py"), "`# tests: [...]`"),
    ],
)
def test_bad_input_is_named_with_status_2(verify, arguments, message):
    status, found, err = verify(*arguments)
    assert (status, found) == (2, None)
    assert message in err and "Traceback" not in err


def test_two_functions_need_the_name_of_one(verify):
    Path("two.py").write_text(ADD + "def other(): pass\n")
    status, _, err = verify("two.py", "--tests", json.dumps(CALLS))
    assert status == 2 and "need its name, in `entry`" in err
    assert verify("two.py", "--entry", "add", "--tests", json.dumps(CALLS))[1]["verdict"] == "passed"
