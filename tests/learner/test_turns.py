"""A conversation as records: every sampled token is trained once, after what the engine really saw before it (K16).

Turn 1 samples ``<think>a</think>x``, turn 2 samples ``y``; a template may take the thoughts out of earlier turns.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from learner_cases import batch_of, learner, model_folder, random_rows, reference_logprobs

from nearpolicy.objectives.assign import assign_advantages
from nearpolicy.objectives.config import ObjectiveConfig
from nearpolicy.records import Admission, Batch, Fate, Finish, Group, Prompt, Rollout, Segment
from nearpolicy.store.folder import create_run_folder
from nearpolicy.store.reader import RunReader
from nearpolicy.store.writer import SqliteStore
from nearpolicy.telemetry.batch import token_fates

QUESTION, NEXT = b"<u>1+1?</u>", b"<u>sure?</u>"
THOUGHT, KEPT, ANSWER = b"<think>a</think>x", b"x", b"y"


def segment(context: bytes, *pieces: tuple[bytes, bool]) -> Segment:
    """Pieces the policy chose, and pieces of the environment between them."""
    tokens = b"".join(piece for piece, _ in pieces)
    mask = np.concatenate([np.full(len(piece), chosen) for piece, chosen in pieces])
    return Segment(
        context_ids=list(context),
        token_ids=list(tokens),
        mask=mask,
        behavior_logprobs=np.zeros(len(tokens)),
        versions=np.where(mask, 0, -1),
        finish=Finish.STOP,
    )


CONVERSATIONS = {
    "history kept": [segment(QUESTION, (THOUGHT, True), (NEXT, False), (ANSWER, True))],
    "history rewritten": [segment(QUESTION, (THOUGHT, True)), segment(QUESTION + KEPT + NEXT, (ANSWER, True))],
}


def scored(segments: list[Segment]) -> list[Segment]:
    """With the log-probabilities that an engine would have sampled them with: of a plain forward pass."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder())
    row = random_rows(0)[0]
    found = [reference_logprobs(model, replace(row, segment=s)).detach().numpy() for s in segments]
    return [
        replace(s, behavior_logprobs=np.where(s.mask, logprobs, 0.0))
        for s, logprobs in zip(segments, found, strict=True)
    ]


def group_of(segments: list[Segment]) -> Group:
    """The conversation, and one that said something else for less reward."""
    admission = Admission(index=0, prompt=Prompt(id="q", task="t", text="1+1?"), seed=0, version=0)
    other = scored([segment(QUESTION, (b"z", True))])
    rollouts = tuple(
        Rollout(sample=i, segments=tuple(of), text="", numerics="exact") for i, of in enumerate((segments, other))
    )
    return Group(admission=admission, rollouts=rollouts, verdicts=({}, {}), rewards=(1.0, 0.0))


@pytest.mark.parametrize("history", CONVERSATIONS)
def test_every_sampled_byte_is_trained_once_after_what_the_engine_saw_before_it(history, tmp_path):
    segments = scored(CONVERSATIONS[history])
    group = group_of(segments)
    assert group.rollouts[0].num_sampled == 18
    rows = assign_advantages([group], ObjectiveConfig(scale_rewards="none"))
    own = [row for row in rows if row.sample == 0]
    assert len(own) == {"history kept": 1, "history rewritten": 2}[history]
    trained = b"".join(bytes(row.segment.token_ids[row.trained].tolist()) for row in own)
    assert trained == THOUGHT + ANSWER
    assert all(set(row.advantages[row.trained]) == {0.5} for row in own)

    policy = learner()
    for row, logprobs in zip(rows, policy.annotate(rows), strict=True):  # after the same history
        np.testing.assert_allclose(logprobs[row.trained], row.segment.behavior_logprobs[row.trained], atol=1e-5)

    folder = create_run_folder("talk", directory=str(tmp_path / "run"))
    batch = Batch(step=0, places=1, groups=(group,), rows=rows)
    report = policy.step(batch)
    assert report.metrics["mismatch/logprob_diff_max"] < 1e-5
    assert report.metrics["learner/forward_tokens"] == 19
    fates = token_fates(batch, report)
    assert fates == {(0, 0): {Fate.TRAINED: 18}, (0, 1): {Fate.TRAINED: 1}}
    with SqliteStore.create(folder, config={}, packages={}) as store:
        store.admitted(group.admission)
        store.filled(group)
        store.consumed(batch, report, fates)
    with RunReader(folder.path) as run:
        again = run.batch(0).rows
        assert run.ledger() == {Fate.TRAINED: 19}
    for before, after in zip(rows, again, strict=True):
        for name in ("context_ids", "token_ids", "mask", "behavior_logprobs", "versions"):
            assert np.array_equal(getattr(before.segment, name), getattr(after.segment, name))


def test_the_second_turn_depends_on_the_history_it_was_sampled_after():
    kept, rewritten = (scored(CONVERSATIONS[name])[-1].behavior_logprobs[-1] for name in CONVERSATIONS)
    assert abs(kept - rewritten) > 0.01


def test_a_rewritten_history_counts_as_one_rollout_in_its_group_and_in_a_mean_over_sequences():
    """The loss of a mean over sequences is that of one sequence of 18 tokens, not of two."""
    rows = assign_advantages([group_of(scored(CONVERSATIONS["history rewritten"]))], ObjectiveConfig())
    objective = ObjectiveConfig(loss="pg", loss_agg="seq_mean_token_mean", correction="none")
    policy = learner(objective=objective)
    means = {0: [], 1: []}
    for row in rows:
        means[row.sample] += (row.advantages * row.segment.behavior_logprobs)[row.trained].tolist()
    report = policy.step(batch_of(rows))
    assert report.metrics["policy/loss"] == pytest.approx(-np.mean([np.mean(m) for m in means.values()]), rel=1e-4)
