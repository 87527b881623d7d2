"""Data errors stop at the start and name file, row and column (K47); lengths are those the engine sees (K48)."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from nearpolicy.errors import DataError
from nearpolicy.models.tokenizer import Renderer, byte_tokenizer
from nearpolicy.tasks import patterns
from nearpolicy.tasks.check import Reads
from nearpolicy.tasks.config import TaskConfig
from nearpolicy.tasks.mixture import TaskData, load_mixture, load_task
from nearpolicy.tasks.sources import read_rows


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(byte_tokenizer())


@pytest.fixture(scope="module")
def plain_renderer() -> Renderer:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    return Renderer(tokenizer)


@pytest.fixture
def data(tmp_path: Path):
    """Write rows (or raw lines) to a JSONL file and load them as a task."""

    def load(rows: list[Any], renderer: Renderer | None = None, limit: int | None = None, **settings: Any) -> TaskData:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
        return load_task(config(file, **settings), seed=0, renderer=renderer, max_prompt_length=limit)

    return load


def config(file: Path | str, **settings: Any) -> TaskConfig:
    usual = {"name": "t", "source": {"kind": "jsonl", "path": str(file)}, "rewards": [{"kind": "number"}]}
    return TaskConfig.model_validate(usual | settings)


def rows(*prompts: Any) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "answer": str(number)} for number, prompt in enumerate(prompts)]


def test_missing_answer_column_is_named_with_who_needs_it(data):
    with pytest.raises(DataError, match=r"rows\.jsonl has no column `answer` \(needed by rewards\.0, number\)"):
        data([{"prompt": "a", "gold": 1}])


def test_misspelt_column_is_named_with_the_nearest(data):
    with pytest.raises(DataError, match=r"no column `promt` \(needed by prompt_column\); did you mean `prompt`\?"):
        data(rows("a"), prompt_column="promt")


def test_null_answer_stops_with_row_and_column(data):
    bad = rows("a", "b", "c", "d")
    bad[2]["answer"] = None
    with pytest.raises(DataError, match=r"rows\.jsonl row 3 column `answer`: no value; fix it or set on_null: skip"):
        data(bad)


def test_null_answer_is_skipped_and_counted_on_request(data):
    bad = rows("a", "b", "c", "d")
    bad[2]["answer"] = None
    loaded = data(bad, on_null="skip")
    assert loaded.skipped == {"null": 1}
    assert [prompt.columns["answer"] for prompt in loaded.training] == ["0", "1", "3"]


def test_every_bad_row_is_named_and_many_are_counted(data):
    with pytest.raises(DataError) as error:
        data([{"prompt": None, "answer": "1"}] * 25)
    lines = str(error.value).splitlines()
    assert "row 1 " in lines[0]
    assert "row 20 " in lines[19]
    assert lines[20] == "... and 5 more"


def test_invalid_json_names_the_line(data):
    with pytest.raises(DataError, match=r"rows\.jsonl row 2: not valid JSON"):
        data([{"prompt": "a", "answer": 1}, "{oops\n"])


def test_compressed_rows_are_rows_and_a_broken_file_is_named(data, tmp_path):
    made = data(rows("a", "b"))
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "rows.jsonl").read_bytes()))
    assert [row.values for row in read_rows(config(packed).source)] == [prompt.columns for prompt in made.training]
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz: cannot be read"):
        read_rows(config(packed).source)


def test_a_corrupted_compressed_file_is_named_with_the_last_row_that_could_be_read(tmp_path):
    packed = tmp_path / "rows.jsonl.gz"
    good = gzip.compress("".join(json.dumps(row) + "\n" for row in rows("a", "b")).encode())
    bad = bytearray(good)
    bad[10] = 0b111  # a kind of block that does not exist
    packed.write_bytes(good + bad)
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz: cannot be read beyond row 2: error: .*invalid block type"):
        read_rows(config(packed).source)


@pytest.mark.parametrize("depth", [101, 5000, 200_000])
def test_a_row_nested_without_end_is_named(data, depth):
    with pytest.raises(DataError, match=r"row 2: lists and objects lie more than 100 deep in one another"):
        data([*rows("a"), '{"prompt": "b", "answer": 1, "x": ' + "[" * depth + "]" * depth + "}\n"])


def test_many_brackets_side_by_side_are_no_depth(data):
    assert len(data([{"prompt": "a", "answer": 1, "x": [[]] * 500}]).training) == 1


def test_half_a_character_is_named_with_its_row(data):
    for broken in ({"prompt": "b\ud800", "answer": 1}, {"prompt": "b", "answer": "\udfff"}):
        with pytest.raises(
            DataError, match=r"rows\.jsonl row 2: the (question|answer) holds \\ud\w+, half of a character"
        ):
            data([*rows("a"), broken], answer_column="answer")


def test_a_pattern_that_never_ends_is_named_with_the_row_it_hangs_on(data, monkeypatch):
    monkeypatch.setattr(patterns, "LIMIT_S", 0.5)
    hard = "a" * 60 + "!"
    with pytest.raises(DataError, match=r"rows\.jsonl row 2: match '\(a\|aa\)\+\$': no answer after 0\.5 s"):
        data(rows("a", hard), match="(a|aa)+$")
    extract = {"cut": {"column": "prompt", "pattern": "(a|aa)+$"}}
    with pytest.raises(DataError, match=r"row 2 column `prompt`: extract\.cut\.pattern '.*': no answer after 0\.5 s"):
        data(rows("a", hard), extract=extract)


def test_what_a_pattern_finds_is_what_pythons_re_finds(data):
    loaded = data(rows("x {e<=1} 5", "x y 5", "none"), match=r"x \{e<=1}|y")
    assert [prompt.columns["prompt"] for prompt in loaded.training] == ["x {e<=1} 5", "x y 5"]
    assert loaded.skipped == {"no match": 1}
    extract = {"last": {"column": "prompt", "pattern": r"(\d)\d*"}, "whole": {"column": "prompt", "pattern": r"\d+"}}
    made = data(rows("12 and 34", "none"), extract=extract)
    assert [(p.columns["last"], p.columns["whole"]) for p in made.training] == [("3", "34"), (None, None)]


def test_rows_that_a_reward_cannot_read_are_named(tmp_path):
    def unfit(reward, given):
        return [(place, "answer", "is odd") for place, row in enumerate(given) if int(row["answer"]) % 2]

    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows(*"abcd")))
    with pytest.raises(DataError) as error:
        load_task(config(file), seed=0, renderer=None, max_prompt_length=None, reads=Reads(unfit=unfit))
    assert str(error.value).splitlines() == [
        f"task t: {file} row {number} column `answer`: is odd (reward number)" for number in (2, 4)
    ]


def test_missing_and_empty_files_are_named(data, tmp_path):
    with pytest.raises(DataError, match=r"absent\.jsonl: no such file \(looked for /"):
        read_rows(config(tmp_path / "absent.jsonl").source)
    with pytest.raises(DataError, match=r"rows\.jsonl: holds no rows"):
        data([])


def test_messages_without_a_chat_template_stop_and_name_the_setting(data, plain_renderer):
    with pytest.raises(DataError, match=r"row 1: prompts are chat messages, .* set model\.tokenizer"):
        data(rows([{"role": "user", "content": "hi"}]), plain_renderer)


def test_insisting_on_chat_without_a_template_names_the_setting(data, plain_renderer):
    for settings in ({"chat": True}, {"system": "Be brief."}):
        with pytest.raises(DataError, match=r"needs a chat template and the tokenizer has none; set chat: false"):
            data(rows("hi"), plain_renderer, **settings)


def test_plain_prompts_without_a_template_work(data, plain_renderer):
    loaded = data(rows("hi"), plain_renderer)
    assert loaded.training[0].text == "hi"
    assert plain_renderer.prompt_ids(loaded.training[0]).tolist() == [256, *b"hi"]


def test_plain_prompts_with_a_template_become_a_user_message(data, renderer):
    (prompt,) = data(rows("hi"), renderer, system="Be brief.").training
    assert prompt.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"})
    (prompt,) = data(rows("hi"), renderer, chat=False).training
    assert (prompt.text, prompt.messages) == ("hi", None)


def test_malformed_messages_name_row_and_message(data, renderer):
    with pytest.raises(DataError, match=r"row 2 column `prompt`: message 0 needs `role` and `content`"):
        data(rows("fine", [{"content": "hi"}]), renderer)
    with pytest.raises(DataError, match=r"row 1 column `prompt`: a prompt is text or a list of messages, found int"):
        data(rows(7), renderer)


def test_template_refusal_is_a_message_not_a_traceback(data, renderer):
    with pytest.raises(DataError, match=r"row 1: the chat template refuses it"):
        data(rows([{"role": "user", "content": None}]), renderer)


def test_length_is_counted_with_template_and_limit_itself_is_kept(data, renderer):
    # begin, role, text, opening of the assistant's turn: 3 tokens beside the text
    kept, over = "x" * 13, "y" * 17
    assert len(renderer.prompt_ids(data(rows(kept), renderer, limit=16).training[0])) == 16
    with pytest.raises(DataError, match=r"rows\.jsonl row 2: 20 tokens with template, .*max_prompt_length is 16"):
        data(rows(kept, over), renderer, limit=16)
    loaded = data(rows(kept, over), renderer, limit=16, on_overlong="skip")
    assert loaded.skipped == {"overlong": 1}
    assert [prompt.columns["prompt"] for prompt in loaded.training] == [kept]


def test_nothing_left_is_refused(data, renderer):
    with pytest.raises(DataError, match=r"no row of .* is left: \{'overlong': 1\}"):
        data(rows("x" * 99), renderer, limit=16, on_overlong="skip")


def test_template_fills_columns_and_leaves_their_braces_alone(data):
    made = data([{"a": "{b}", "b": 2, "answer": "1"}], template="{{q}} {a} + {b}", chat=False)
    assert made.training[0].text == "{q} {b} + 2"


@pytest.mark.parametrize("template", ["{a.b}", "{0}", "{a!r}", "{a:>3}", "{a", "{}"])
def test_template_with_more_than_column_names_is_refused(data, template):
    with pytest.raises(DataError, match="template"):
        data([{"a": 1, "answer": "1"}], template=template)


def test_repeated_questions_are_left_out_and_counted(data):
    loaded = data(rows("What is 1 + 2?", "what is 2 + 1?", "What is 3 + 4?"), held_out=1)
    assert (len(loaded.training), len(loaded.held_out), loaded.repeated) == (1, 1, 1)


def test_parquet_rows_equal_jsonl_rows(tmp_path, data):
    import pyarrow
    from pyarrow import parquet

    made = rows("a", [{"role": "user", "content": "b"}])[1:]
    parquet.write_table(pyarrow.Table.from_pylist(made), tmp_path / "rows.parquet")
    source = {"kind": "parquet", "path": str(tmp_path / "rows.parquet")}
    loaded = load_task(config("", source=source), seed=0, renderer=None, max_prompt_length=None)
    assert loaded.training[0].messages == data(made).training[0].messages
    (tmp_path / "rows.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"rows\.parquet: cannot be read as Parquet"):
        read_rows(config("", source=source).source)


def gym(**settings: Any) -> TaskConfig:
    return config("", source={"kind": "reasoning_gym", "dataset": "chain_sum", "size": 20, **settings})


def test_reasoning_gym_keeps_what_its_scorer_needs():
    import reasoning_gym

    task = load_task(gym(params={"max_terms": 3}), seed=0, renderer=None, max_prompt_length=None)
    entry = dict(task.training[0].columns)
    assert entry["metadata"]["source_dataset"] == "chain_sum"
    assert reasoning_gym.get_score_answer_fn("chain_sum")(entry["answer"], entry) == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "chain_sums"}, r"no generator `chain_sums`; did you mean `chain_sum`\?"),
        ({"params": {"max_termz": 3}}, r"reasoning_gym:chain_sum: refuses its params"),
        ({"params": {"min_terms": 5, "max_terms": 2}}, r"refuses its params .*max_terms must be"),
        ({"params": {"seed": 3}}, r"`seed` belongs to the source itself"),
    ],
)
def test_reasoning_gym_refusals_name_the_generator_and_the_setting(settings, message):
    with pytest.raises(DataError, match=message):
        read_rows(gym(**settings).source)


def test_all_tasks_report_together(tmp_path):
    bad = [config(tmp_path / f"{name}.jsonl", name=name) for name in "ab"]
    with pytest.raises(DataError) as error:
        load_mixture(bad, seed=0, renderer=None, max_prompt_length=None)
    assert len(str(error.value).splitlines()) == 2


def test_no_task_trains_on_what_another_holds_out(tmp_path):
    made = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(5) for b in range(5)]
    turned = [{"prompt": f"what is {b} + {a}?", "answer": str(a + b)} for a in range(5) for b in range(5)]
    for name, content in (("a", made), ("b", turned)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    tasks = [config(tmp_path / "a.jsonl", name="a", held_out=6), config(tmp_path / "b.jsonl", name="b")]
    mixture = load_mixture(tasks, seed=0, renderer=None, max_prompt_length=None)
    assert len(mixture.held_out("a")) == 6
    assert len(mixture.tasks["b"].training) == len(mixture.tasks["a"].training) == 9
    assert mixture.tasks["b"].skipped == {"held out by another task": 6}


def test_huggingface_source_says_how_to_get_its_package(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'nearpolicy\[datasets\]'"):
        read_rows(config("", source={"kind": "huggingface", "path": "x/y"}).source)
