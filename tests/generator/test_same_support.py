"""Under top-k, top-p and min-p engine and learner speak of the same distribution: that over what could be drawn."""

from __future__ import annotations

import families
import numpy as np
import pytest
import torch
from driving import make_engine, make_request, run
from transformers import AutoModelForCausalLM

from nearpolicy.errors import NearpolicyError
from nearpolicy.learner.config import LearnerConfig
from nearpolicy.learner.report import TokenStats
from nearpolicy.learner.step import PolicyLearner
from nearpolicy.learner.tokens import NOTHING_KNOWN
from nearpolicy.objectives.config import ObjectiveConfig
from nearpolicy.objectives.objective import Objective
from nearpolicy.records import Finish, Row, Segment

CUTS = {
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.05},
    "all": {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
}


def sampled_rows(policy, numerics, **cut) -> list[Row]:
    requests = [
        make_request(
            7 + 30 * i, id=f"r{i}", n=4, admission=i, max_tokens=12, temperature=0.8, record_support=True, **cut
        )
        for i in range(3)
    ]
    outcome = run(make_engine(policy, numerics), requests)
    numbers = np.random.default_rng(0)
    rows = []
    for i, request in enumerate(requests):
        for sample in range(4):
            c = outcome[request.id, sample]
            everywhere = np.ones(len(c.token_ids), dtype=bool)
            segment = Segment(
                context_ids=request.token_ids,
                token_ids=c.token_ids,
                mask=everywhere,
                behavior_logprobs=c.logprobs,
                versions=c.versions,
                finish=Finish.STOP,
                extras=c.extras,
            )
            advantages = np.full(len(everywhere), numbers.normal())
            rows.append(Row(group=i, sample=sample, segment=segment, trained=everywhere, advantages=advantages))
    return rows


def learner_of(policy, numerics, *, same_support: bool = True, reference=None, **objective) -> PolicyLearner:
    return PolicyLearner(
        policy,
        Objective(ObjectiveConfig(same_support=same_support, **objective), 12),
        LearnerConfig(max_tokens_per_microbatch=60),
        numerics,
        temperature=0.8,
        total_steps=1,
        reference=reference,
    )


@pytest.mark.parametrize("cut", CUTS)
def test_engine_and_learner_agree_bit_for_bit_where_tokens_are_left_out(cut):
    policy = families.shared("llama")
    numerics = families.exact_numerics(policy, 1)
    rows = sampled_rows(policy, numerics, **CUTS[cut])
    for row, found in zip(rows, learner_of(policy, numerics).annotate(rows), strict=True):
        assert found.tobytes() == row.segment.behavior_logprobs.tobytes()
        sizes, ids = row.segment.extras["support_sizes"], row.segment.extras["support_ids"]
        assert len(sizes) == len(row.segment.token_ids) and sizes.sum() == len(ids)
        starts = np.cumsum(sizes) - sizes
        for token, start, size in zip(row.segment.token_ids, starts, sizes, strict=True):
            assert token in ids[start : start + size]
    without = learner_of(policy, numerics, same_support=False).annotate(rows)
    assert max(np.abs(f - r.segment.behavior_logprobs).max() for f, r in zip(without, rows, strict=True)) > 0.01


def test_the_gradient_is_that_of_the_renormalised_distribution():
    policy = families.fresh("llama")
    numerics = families.exact_numerics(policy, 1)
    rows = sampled_rows(policy, numerics, top_k=5)
    learner = learner_of(policy, numerics, loss="pg", correction="none", entropy_coef=0.1)
    learner.forward_backward(range(len(rows)), learner.objective, rows, NOTHING_KNOWN, TokenStats())
    learner.normalise()
    ours = torch.cat([p.grad.flatten() for p in policy.parameters()])
    model = AutoModelForCausalLM.from_pretrained(
        families.folder("llama"), dtype=torch.float64, attn_implementation="eager"
    )
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        context, tokens = row.segment.context_ids.tolist(), row.segment.token_ids.tolist()
        logits = model(torch.tensor([context + tokens])).logits[0, len(context) - 1 : -1] / 0.8
        offset = 0
        for t, size in enumerate(row.segment.extras["support_sizes"].tolist()):
            ids = torch.from_numpy(row.segment.extras["support_ids"][offset : offset + size].astype(np.int64))
            offset += size
            logp = torch.log_softmax(logits[t][ids], -1)
            place = ids.tolist().index(tokens[t])
            total = total - float(row.advantages[t]) * logp[place] + 0.1 * (logp.exp() * logp).sum()
            count += 1
    (total / count).backward()
    right = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (ours - right).norm() <= 1e-4 * right.norm()


def test_the_reference_is_renormalised_too_so_that_a_policy_is_at_distance_0_from_itself():
    policy = families.shared("llama")
    numerics = families.exact_numerics(policy, 1)
    rows = sampled_rows(policy, numerics, top_p=0.7)
    for estimator in ("k3", "full"):
        learner = learner_of(policy, numerics, reference=policy, kl_coef=0.1, kl_estimator=estimator)
        stats = TokenStats()
        learner.forward_backward(range(12), learner.objective, rows, learner.known_at_start(rows), stats)
        assert stats.means()["policy/kl_reference"] == pytest.approx(0.0, abs=1e-6)
        assert np.isfinite(stats.means()["policy/entropy"])
        learner.forget_gradient()


def test_data_without_a_recorded_support_is_refused():
    policy = families.shared("llama")
    numerics = families.exact_numerics(policy, 1)
    [row, *_] = sampled_rows(policy, numerics, top_k=5)
    bare = Segment(
        **{
            n: getattr(row.segment, n)
            for n in ("context_ids", "token_ids", "mask", "behavior_logprobs", "versions", "finish")
        }
    )
    bad = Row(group=3, sample=1, segment=bare, trained=row.trained, advantages=row.advantages)
    with pytest.raises(NearpolicyError, match=r"group 3, sample 1 has no recorded support"):
        learner_of(policy, numerics).annotate([bad])
