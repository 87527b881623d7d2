"""Calls on their way to another process: the same records come out, and nothing goes that is not needed there."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
from record_contract import REPORT, bits, with_baseline
from synthetic_run import admission, batch, group, segment, trained

from nearpolicy.messages import unpack
from nearpolicy.records import Event, Prompt, Rollout, Verdict, VersionRecord
from nearpolicy.store.calls import Call, Said, prompt_data
from nearpolicy.store.folder import RunFolder
from nearpolicy.store.record import RunRecord
from nearpolicy.store.tokens import TokenCounts
from nearpolicy.store.wire import pack_calls


def arrived(calls: list[Said]) -> list[Said]:
    message = pack_calls(calls)
    return unpack(message.head, message.parcels)


class Listening:
    """A writer that keeps what is said."""

    def __init__(self) -> None:
        self.said: list[Said] = []
        self.say = self.said.append


def test_a_group_arrives_as_it_was_and_cannot_be_written_to():
    sent = with_baseline(group(3))
    extras = segment(4, 0, np.random.default_rng(0), process=np.arange(4.0))
    masked = replace(sent.rollouts[0].segments[0], mask=np.arange(len(sent.rollouts[0].segments[0].mask)) > 0)
    first = replace(sent.rollouts[0], segments=(masked, extras), text="\ud800")
    sent = replace(sent, rollouts=(first, *sent.rollouts[1:]))
    [got] = arrived([sent])
    assert (got.verdicts, got.rewards, got.failure) == (sent.verdicts, sent.rewards, sent.failure)
    assert (got.baseline.reward, got.baseline.verdicts) == (sent.baseline.reward, sent.baseline.verdicts)
    for one, other in zip(got.everything, sent.everything, strict=True):
        assert (one.sample, one.text, one.numerics, one.lineage) == (
            other.sample,
            other.text,
            other.numerics,
            other.lineage,
        )
        assert bits(one.segments) == bits(other.segments)
        assert not any(part.token_ids.flags.writeable or part.mask.flags.writeable for part in one.segments)


def test_what_does_not_leave_its_process_stays_there():
    prompt = Prompt(
        id="a", task="t", text="?", columns=MappingProxyType({"b": 1}), attachments={"own": threading.Lock()}
    )
    [got] = arrived([admission(0, prompt=prompt)])
    assert prompt_data(got.prompt) == prompt_data(prompt) and got.prompt.task == "t"


def test_events_arrive_together_behind_what_else_was_said():
    first = Event(time=1.5, role="queue", kind="ready", sample=2, numbers=MappingProxyType({"n": 1}))
    second = Event(time=2.5, role="verifier", kind="verify", instance=3, seconds=0.5)
    [asked, told] = arrived([first, admission(7), second])
    assert asked.index == 7
    assert told.verb == "happened"
    assert [Event(*values) for values in told.arguments[0]] == [first, second]


def test_read_only_mappings_arrive():
    record = VersionRecord(
        lineage=0, version=1, updates=1, fingerprint="f", parent=0, digests=MappingProxyType({"w": "d"})
    )
    verdict = Verdict(outcome=Verdict.scored(1.0).outcome, value=1.0, arrays={"by_step": np.arange(2.0)})
    judged = replace(group(0), verdicts=tuple({"v": verdict} for _ in range(4)))
    published, got = arrived([Call("published", (record, 0.1)), judged])
    assert published.arguments[0] == record and published.arguments[0].digests == {"w": "d"}
    assert [verdicts["v"].arrays["by_step"].tolist() for verdicts in got.verdicts] == 4 * [[0.0, 1.0]]


def test_tokens_that_were_said_before_do_not_go_again():
    writer = Listening()
    record = RunRecord(RunFolder(Path("run")), writer, wall_anchor=0.0, tokens=TokenCounts({}, {}, {}))
    filled, unfilled = group(0), group(1)
    record.filled(filled)
    record.consumed(batch(0, [filled, unfilled]), REPORT, trained([filled, unfilled]))
    data = pack_calls(writer.said[-1:]).head
    sampled = [each.rollouts[0].segments[0].behavior_logprobs.tobytes() for each in (filled, unfilled)]
    assert [tokens in data for tokens in sampled] == [False, True]


def test_a_prompt_of_many_calls_goes_once():
    long = admission(0, prompt=Prompt(id="a", task="t", text="why? " * 1000))
    one = pack_calls([long])
    rollout = Rollout(sample=0, segments=(), text="", numerics="exact")
    both = pack_calls([long, replace(group(0), admission=long, rollouts=(rollout,), verdicts=(), rewards=())])
    assert len(both.head) < len(one.head) + 500
