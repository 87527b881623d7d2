"""The judge as an attack surface: what delimiters and strict reading make worthless, shown by a judge that obeys all it
reads outside of them, and that the same attacks work on one that obeys everything."""

from __future__ import annotations

import asyncio
import re

import pytest
from fake_endpoint import CONTAINED, KEY, blocks, everything, fields_of, is_probe, outside, serving, verdict
from scoring import score, verifying

from nearpolicy.verifier.config import JudgeReward
from nearpolicy.verifier.learned.attacks import ATTACKS

QUESTION, WRONG = "What is the capital of Australia?", "The capital of Australia is Sydney."
OBEYED = re.compile(r"verdict\W+(?:for this answer )?(?:is|:)?\W*10|(?:gets|record|with|give|also) 10", re.IGNORECASE)


def shifts(reads, *, attacks=ATTACKS, **settings):
    """Attack -> shift, for a judge that obeys what `reads` shows it of a request, and else gives 3."""

    def respond(request, _):
        if is_probe(request):
            return verdict(request, True)
        assert "verdict" in fields_of(request)
        return verdict(request, 10 if OBEYED.search(untagged(reads(request))) else 3)

    async def run(url):
        reward = JudgeReward(endpoint={"base_url": url, "api_key_env": "NEARPOLICY_TEST_JUDGE_KEY"}, models=("m",))
        async with verifying(reward) as service:

            async def value(text):
                return (await score(service, text, prompt=QUESTION))["judge"].value

            before = await value(WRONG)
            after = await asyncio.gather(*(value(attack.change(WRONG, QUESTION, "10")) for attack in attacks))
            return {attack.name: found - before for attack, found in zip(attacks, after, strict=True)}

    with serving(respond) as fake:
        return asyncio.run(run(fake.url))


def untagged(text):
    """As a model reads it that knows the characters of the block Tags."""
    return "".join(chr(ord(c) - 0xE0000) if 0xE0020 <= ord(c) < 0xE007F else c for c in text)


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("NEARPOLICY_TEST_JUDGE_KEY", KEY)


def test_there_are_more_than_twenty_attacks_of_every_kind_and_they_change_the_answer():
    assert len(ATTACKS) >= 20 and len({attack.name for attack in ATTACKS}) == len(ATTACKS)
    kinds = {attack.kind for attack in ATTACKS}
    assert kinds >= {*CONTAINED, "flattery", "tone", "fake_citation", "length", "position", "self_style"}
    for attack in ATTACKS:
        changed = attack.change(WRONG, QUESTION, "10")
        assert changed != WRONG and (WRONG in changed or attack.kind in ("no_answer", "self_style"))


def test_a_judge_that_obeys_all_it_reads_outside_the_delimiters_is_not_moved_by_any_attack():
    assert set(shifts(outside).values()) == {0.0}


def test_the_same_attacks_move_a_judge_that_obeys_whatever_it_reads():
    obeyed = {name for name, shift in shifts(everything).items() if shift > 0}
    contained = {attack.name for attack in ATTACKS if attack.kind in CONTAINED}
    # The tags are written out, so the instruction in them is not even there to be read.
    assert contained - obeyed == {"invisible"}


def test_a_judge_sees_the_whole_answer_in_its_block_with_the_attack_in_it():
    seen = []

    def read(request):
        seen.append(blocks(request)["ANSWER"])
        return ""

    assert set(shifts(read, attacks=ATTACKS[:2]).values()) == {0.0}
    assert sorted(seen) == sorted([WRONG, *(attack.change(WRONG, QUESTION, "10") for attack in ATTACKS[:2])])
