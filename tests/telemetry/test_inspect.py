"""`inspect`: what one rollout was, for people and for programs."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from synthetic_run import CONFIG, NASTY, group, make_run

from nearpolicy.errors import UserError
from nearpolicy.launch.inspect import _in_the_loss, command, inspect_held_out, inspect_run, runs
from nearpolicy.records import Prompt, Row
from nearpolicy.store.folder import create_run_folder
from nearpolicy.store.schema import prompt_text
from nearpolicy.store.writer import SqliteStore
from nearpolicy.visible import visible


def test_people_see_text_rewards_versions_mask_advantage_and_fate(tmp_path, capsys):
    inspect_run(make_run(tmp_path).path, step=2, limit=1)
    shown = capsys.readouterr().out
    for text in ("What is 9 + 27?", "answer", "format", "scored", "versions", "1×", "advantage", "trained", "step 2"):
        assert text in shown
    for text in ("expected answer: 36", "9 prompt tokens, ", "in the loss  all sampled tokens", "ended by a stop"):
        assert text in shown


def test_held_out_questions_are_shown_under_every_version(tmp_path, capsys):
    folder = make_run(tmp_path).path
    inspect_held_out(folder, limit=2)
    shown = capsys.readouterr().out
    assert shown.count("held-out question") == 2
    for text in ("What is 0 + 3?", "What is 1 + 4?", "right", "wrong"):
        assert text in shown
    inspect_held_out(folder, limit=1, as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["row"], line["version"], line["mode"]) for line in lines] == [(0, 0, "accuracy"), (0, 4, "accuracy")]


def test_a_run_without_evaluations_says_so(tmp_path):
    folder = create_run_folder("young", parent=tmp_path)
    with SqliteStore.create(folder, config=CONFIG), pytest.raises(UserError, match="holds no evaluation"):
        inspect_held_out(folder.path)


def test_choices_of_rollouts_do_not_go_with_held_out_questions(tmp_path):
    with pytest.raises(UserError, match="leave them out with --held-out"):
        command(make_run(tmp_path).path, step=1, held_out=True)


def test_tokens_outside_the_loss_and_of_the_environment_are_told_apart(tmp_path, capsys):
    folder = create_run_folder("turns", parent=tmp_path)
    plain = group(0, size=2)
    segments = [rollout.segments[0] for rollout in plain.rollouts]
    mask = np.arange(len(segments[0].token_ids)) != 1
    turned = replace(segments[0], mask=mask, versions=np.where(mask, 0, -1))
    rollouts = (replace(plain.rollouts[0], segments=(turned,)), plain.rollouts[1])
    with SqliteStore.create(folder, config=CONFIG) as store:
        store.filled(replace(plain, rollouts=rollouts))
    inspect_run(folder.path, limit=1)
    shown = capsys.readouterr().out
    assert f"{mask.sum()} sampled" in shown
    assert f"sampled   1×1 0×1 1×{len(mask) - 2} (1: by the policy, 0: by the environment)" in " ".join(
        shown.split(" ")
    )


def test_of_the_loss_it_is_said_which_tokens_count():
    of_group = group(0, size=1).rollouts[0].segments[0]
    row = Row(group=0, sample=0, segment=of_group, trained=of_group.mask, advantages=np.ones(len(of_group.mask)))
    first_only = np.arange(len(of_group.mask)) == 0
    assert _in_the_loss(row) == "all sampled tokens"
    assert _in_the_loss(replace(row, advantages=0 * row.advantages)) == "all sampled tokens, but their advantage is 0"
    assert _in_the_loss(replace(row, trained=~of_group.mask)) == "none"
    others = len(first_only) - 1
    assert _in_the_loss(replace(row, trained=first_only)) == f"1 of {others + 1} sampled tokens: 1×1 0×{others}"


def test_programs_get_the_names_of_exported_rollouts(tmp_path, capsys):
    inspect_run(make_run(tmp_path).path, group=8, as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["sample"] for line in lines] == [0, 1, 2, 3]
    first = lines[0]
    names = {"prompt_ids", "completion_ids", "completion_mask", "behavior_logprobs", "versions", "reward", "rewards"}
    assert names | {"advantage", "finish_reason", "group_id", "task"} <= first.keys()
    assert len(first["advantage"][0]) == len(first["completion_ids"][0]) == first["fates"]["trained"]
    assert sum(line["advantage"][0][0] for line in lines) == pytest.approx(0, abs=1e-6)


def test_nothing_found_says_what_there_is(tmp_path):
    with pytest.raises(UserError, match=r"no rollout of step 99; it holds steps 0 to 3 and groups 0 to 17"):
        inspect_run(make_run(tmp_path).path, step=99)


@pytest.mark.parametrize("as_json", [True, False])
def test_text_that_no_terminal_takes_is_shown_escaped(tmp_path, capsys, as_json):
    folder = create_run_folder("nasty", parent=tmp_path)
    with SqliteStore.create(folder, config=CONFIG) as store:
        plain = group(0, size=1)
        store.filled(replace(plain, rollouts=(replace(plain.rollouts[0], text=NASTY),)))
    inspect_run(folder.path, as_json=as_json)
    shown = capsys.readouterr().out
    assert not {"\x1b", "\x00", "\x9b", "\u202e"} & set(shown) and "\\ud800" in shown
    assert not as_json or json.loads(shown)["completion"].encode("utf-16", "surrogatepass") == NASTY.encode(
        "utf-16", "surrogatepass"
    )


def test_equal_neighbours_are_counted():
    assert runs([3, 3, 3, 4]) == "3×3 4×1" and runs([]) == ""


def test_text_that_would_turn_hide_or_command_is_seen_and_does_nothing():
    assert visible("a\tb\n\x1b\u2028é") == "a\tb\n\\x1b\u2028é"
    assert visible("\x9b31m\r\x7f") == "\\x9b31m\\r\\x7f"
    assert visible("1\u202e2\u2066\u200f") == "1\\u202e2\\u2066\\u200f"
    assert visible("half \ud800, tag \U000e0041") == "half \\ud800, tag \\U000e0041"
    family = "👩‍👩‍👧 ñ 漢 العربية"
    assert visible(family) == family


def test_a_prompt_reads_the_same_wherever_it_is_shown():
    messages = ({"role": "system", "content": "Be kind."}, {"role": "user", "content": "Say hi."})
    assert prompt_text(Prompt(id="a", task="t", messages=messages)) == "Be kind.\nSay hi."
    assert prompt_text(Prompt(id="a", task="t", text="Say hi.")) == "Say hi."
