"""How completions end, which version each token carries, and that nothing outlives the weights it was computed with."""

from __future__ import annotations

import math
from dataclasses import replace

import families
import numpy as np
import pytest
import torch
from driving import assert_same_bits, learner_logprobs, make_engine, make_request, run, weights_of

from nearpolicy.generator.engine import EngineLimits
from nearpolicy.models.attention import PAGE
from nearpolicy.models.shapes import attention_shapes
from nearpolicy.models.weights import digests, named_weights
from nearpolicy.records import Finish


def text_of(ids: list[int]) -> str:
    """Token b is the letter b."""
    return "".join(map(chr, ids))


@pytest.fixture(scope="module")
def free_run():
    """One completion of 40 tokens that nothing stops."""
    return run(make_engine(families.shared()), [make_request(9, max_tokens=40)])["r", 0]


def stopped(**sampling):
    engine = make_engine(families.shared(), decode=text_of)
    return run(engine, [make_request(9, **{"max_tokens": 40} | sampling)])["r", 0]


# Endings


def test_a_completion_cut_by_the_limit_has_exactly_that_many_tokens(free_run):
    """K18 (a): nothing is added that was not sampled."""
    assert free_run.finish is Finish.LENGTH
    assert len(free_run.token_ids) == len(free_run.logprobs) == len(free_run.versions) == 40


def test_a_chosen_stop_token_is_kept_with_its_own_logprob(free_run):
    """K18 (b), K21 (c)."""
    tokens = free_run.token_ids.tolist()
    stop = tokens[12]
    first = tokens.index(stop)
    completion = stopped(stop_token_ids=(1, stop))
    assert completion.finish is Finish.STOP
    assert completion.token_ids.tolist() == tokens[: first + 1]
    np.testing.assert_allclose(completion.logprobs, free_run.logprobs[: first + 1], atol=1e-5)
    assert completion.logprobs[-1] < 0


def test_a_completion_of_the_stop_token_alone_is_an_ordinary_one(free_run):
    """K21 (a)."""
    completion = stopped(stop_token_ids=(int(free_run.token_ids[0]),))
    assert completion.finish is Finish.STOP
    assert completion.token_ids.tolist() == free_run.token_ids[:1].tolist()


def test_a_stop_token_as_the_last_allowed_one_is_a_stop_not_a_cut(free_run):
    completion = stopped(stop_token_ids=(int(free_run.token_ids[0]),), max_tokens=1)
    assert completion.finish is Finish.STOP


def test_a_limit_of_one_token_gives_one(free_run):
    completion = stopped(max_tokens=1)
    assert (completion.finish, completion.token_ids.tolist()) == (Finish.LENGTH, free_run.token_ids[:1].tolist())


def test_a_stop_string_ends_with_the_token_that_completes_it(free_run):
    tokens = free_run.token_ids.tolist()
    stop = text_of(tokens[20:24])
    completion = stopped(stop=("never", stop))
    assert completion.finish is Finish.STOP
    assert completion.token_ids.tolist() == tokens[:24]


def test_a_stop_string_that_lies_in_the_prompt_does_not_stop():
    request = make_request(9)
    assert stopped(stop=(text_of(request.token_ids.tolist()),)).finish is Finish.LENGTH


def test_stop_strings_without_a_tokenizer_fail_instead_of_being_ignored():
    (completion,) = make_engine(families.shared()).submit(make_request(9, stop=("x",)))
    assert completion.finish is Finish.FAILED
    assert "stop strings need an engine with a tokenizer" in completion.reason


def test_an_empty_prompt_fails_every_sample_at_once():
    """K21 (b)."""
    completions = make_engine(families.shared()).submit(make_request([], n=3))
    assert [(c.sample, c.finish, len(c.token_ids)) for c in completions] == [(i, Finish.FAILED, 0) for i in range(3)]
    assert completions[0].reason == "the prompt has no token"


def test_a_request_that_can_never_fit_fails_at_once_and_names_the_setting():
    engine = make_engine(families.shared(), num_pages=2)
    (completion,) = engine.submit(make_request(100, max_tokens=29))
    assert completion.finish is Finish.FAILED
    assert "100 + 29 tokens does not fit into 2 pages" in completion.reason
    assert "generator.kv_memory_mb" in completion.reason
    assert engine.submit(make_request(100, max_tokens=28)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_memory_bound_is_kept_by_the_pages_it_buys(dtype):
    policy = families.fresh().to(dtype)
    limits = EngineLimits.sized(policy, max_running=4, prefill_chunk=64, max_length=200, kv_memory_mb=2)
    engine = make_engine(policy, num_pages=limits.num_pages)
    page = sum(shape.page_bytes(dtype) for shape in attention_shapes(policy).values())
    assert engine.kv_bytes <= 2 * 2**20 < engine.kv_bytes + page


def test_memory_of_free_pages_goes_back_when_pages_elsewhere_need_it():
    """Samples short and then long: free pages of the lower levels must not hold memory beside those of the upper."""
    engine = make_engine(families.shared(), num_pages=12, max_running=8)
    most = 0

    def watch(step: int) -> None:
        nonlocal most
        most = max(most, int(engine._store.touched.sum()))

    many = [make_request(3, id=f"m{i}", admission=i, max_tokens=4) for i in range(8)]
    run(engine, many, between=watch)
    long = [make_request(200, id=f"l{i}", admission=9 + i, max_tokens=150) for i in range(2)]
    outcome = run(engine, long, between=watch)
    assert most <= 12
    assert_same_bits(outcome, run(make_engine(families.shared()), long))


def test_an_abort_keeps_what_was_sampled_and_ends_each_sample_once(free_run):
    engine = make_engine(families.shared())
    engine.submit(make_request(9, n=2, max_tokens=40))
    engine.submit(make_request(9, id="waits", n=1, max_tokens=40))
    for _ in range(5):
        engine.step()
    ended = engine.abort(["r", "unknown"])
    assert [(c.sample, c.finish, len(c.token_ids)) for c in ended] == [(i, Finish.ABORTED, 5) for i in range(2)]
    assert ended[0].token_ids.tolist() == free_run.token_ids[:5].tolist()
    assert engine.abort(["r"]) == []
    assert run(engine)["waits", 0].finish is Finish.LENGTH
    assert engine.scheduler.budget.free == 200


# Randomness


def test_completions_of_a_group_are_independent_draws_decided_by_the_seed():
    """K32: two engines, one prompt, seeds 0, 0 and 1."""

    def drawn(seed: int) -> list[tuple[int, ...]]:
        engines = [make_engine(families.shared(std=0.02)) for _ in range(2)]
        requests = [make_request([5, 6, 7], n=4, seed=seed, admission=i, max_tokens=20) for i in range(2)]
        return [
            tuple(c.token_ids.tolist())
            for engine, request in zip(engines, requests, strict=True)
            for c in run(engine, [request]).values()
        ]

    assert len(set(drawn(0))) == 8
    assert drawn(0) == drawn(0)
    assert not set(drawn(0)) & set(drawn(1))


def test_evaluation_at_temperature_zero_repeats_itself_and_changes_no_training_completion():
    """K51."""
    training = make_request(9, id="t", n=2, max_tokens=20)
    greedy = make_request(9, id="e", temperature=0, purpose="evaluation", max_tokens=20)
    policy = families.shared()
    numerics = families.exact_numerics(policy)
    alone = run(make_engine(policy, numerics), [training])
    both = run(make_engine(policy, numerics), [training, greedy])
    assert_same_bits({k: c for k, c in both.items() if k[0] == "t"}, alone)
    again = run(make_engine(policy, numerics), [make_request(9, id="e", temperature=0, seed=7, max_tokens=20)])
    assert both["e", 0].token_ids.tolist() == again["e", 0].token_ids.tolist()
    assert both["e", 0].logprobs.tolist() == [0.0] * 20


def test_logprobs_kept_are_of_the_filtered_distribution():
    """With top_k = 1 every token is certain; with top_k = 2 no token is below the smaller of two."""
    assert run(make_engine(families.shared()), [make_request(9, top_k=1)])["r", 0].logprobs.tolist() == [0.0] * 16
    engine = make_engine(families.shared())
    outcome = run(engine, [make_request(9, n=16, top_k=2, max_tokens=1)])
    values = {float(c.logprobs[0]) for c in outcome.values()}
    assert len(values) == 2
    assert math.fsum(map(math.exp, values)) == pytest.approx(1, abs=1e-6)


# Numbers that are not finite


def poisoned(policy):
    """Token 271, in no random prompt, has an embedding that is not a number."""
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[271] = math.nan
    return policy


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logits_that_are_not_finite_fail_the_sequence_and_do_not_raise(temperature):
    policy = families.fresh(tie_word_embeddings=False)
    outcome = run(make_engine(poisoned(policy)), [make_request([5, 271, 9], n=2, temperature=temperature)])
    assert [c.finish for c in outcome.values()] == [Finish.FAILED] * 2
    assert all("no finite log-probability" in c.reason and not len(c.token_ids) for c in outcome.values())


@pytest.mark.parametrize("max_running", [1, 8])
def test_a_sequence_of_nans_spoils_neither_its_neighbours_nor_those_who_take_its_memory(max_running):
    """The bad one comes first; the others are longer than a page, beside it and after it."""
    policy = poisoned(families.fresh(tie_word_embeddings=False))
    numerics = families.exact_numerics(policy)
    bad = make_request([271] * 90, id="bad", n=2, max_tokens=4)
    good = [make_request(length, id=f"good{length}", n=2, admission=length, max_tokens=4) for length in (3, 70, 130)]
    options = {"max_running": max_running, "num_pages": 5, "prefill_chunk": 64}
    outcome = run(make_engine(policy, numerics, **options), [bad, *good])
    expected = run(make_engine(policy, numerics, **options), good)
    assert {outcome["bad", i].finish for i in range(2)} == {Finish.FAILED}
    assert {c.finish for c in expected.values()} == {Finish.LENGTH}
    assert_same_bits({k: c for k, c in outcome.items() if k[0] != "bad"}, expected)


def test_good_weights_after_weights_of_nans_give_good_tokens_again():
    good, bad = families.shared(), families.fresh()
    with torch.no_grad():
        for tensor in bad.parameters():
            tensor.fill_(math.nan)
    numerics = families.exact_numerics(good)
    requests = [make_request(length, id=str(length), n=2, max_tokens=5) for length in (5, 100)]
    engine = make_engine(families.fresh(), numerics, num_pages=9, prefill_chunk=40)
    engine.load(weights_of(bad, 1))
    assert {c.finish for c in run(engine, requests).values()} == {Finish.FAILED}
    engine.submit(make_request(100, id="half", admission=9, max_tokens=5))
    engine.step()  # its prompt is half computed when the weights change
    engine.load(weights_of(good, 2))
    after = run(engine, requests)
    del after["half", 0]
    assert_same_bits(after, run(make_engine(good, numerics), requests))


def test_a_prompt_may_start_in_a_pass_that_completes_nothing_else():
    """A sample waits for room with its prompt computed; when room comes, the pass holds half of another prompt only."""
    engine = make_engine(families.shared(), max_running=1, prefill_chunk=40)
    outcome = run(engine, [make_request(30, id="a", n=2, max_tokens=2), make_request(100, id="b", max_tokens=2)])
    assert {key: c.finish for key, c in outcome.items()} == {
        ("a", 0): Finish.LENGTH,
        ("a", 1): Finish.LENGTH,
        ("b", 0): Finish.LENGTH,
    }


# Weights


def published(seed: int, version: int):
    return weights_of(families.shared(seed=seed), version)


def test_every_token_carries_the_version_that_sampled_it():
    engine = make_engine(families.fresh(), version=3)
    engine.submit(make_request(9, n=2, max_tokens=6))
    for _ in range(4):
        engine.step()
    engine.load(published(seed=1, version=5))
    outcome = run(engine)
    assert {tuple(c.versions.tolist()) for c in outcome.values()} == {(3, 3, 3, 3, 5, 5)}


def test_a_swap_in_the_middle_gives_logprobs_of_the_new_weights_on_the_old_prefix():
    """The prefix that was sampled under the old weights is computed again under the new ones: K26 within a sequence."""
    old, new = families.shared(), families.shared(seed=1)
    numerics = families.exact_numerics(old)
    request = make_request(PAGE + 9, n=3, max_tokens=12)
    engine = make_engine(families.fresh(), numerics)
    engine.submit(request)
    for _ in range(5):
        engine.step()
    engine.load(published(seed=1, version=1))
    outcome = run(engine)
    with torch.no_grad():
        completions = [outcome["r", i] for i in range(3)]
        under_old = learner_logprobs(old, numerics, 1, request, completions).reshape(3, 12)
        under_new = learner_logprobs(new, numerics, 1, request, completions).reshape(3, 12)
    engine_logprobs = torch.from_numpy(np.stack([c.logprobs for c in completions]))
    assert torch.equal(engine_logprobs[:, :5], under_old[:, :5])
    assert torch.equal(engine_logprobs[:, 5:], under_new[:, 5:])
    assert float((under_old - under_new).abs().mean()) > 0.1


def test_what_runs_may_go_on_under_new_weights_without_being_computed_again():
    events = []
    engine = make_engine(families.fresh(), on_event=lambda kind, **numbers: events.append((kind, numbers)))
    engine.submit(make_request(PAGE + 9, n=3, max_tokens=12))
    for _ in range(5):
        engine.step()
    events.clear()
    engine.load(published(seed=1, version=1), keep_running=True)
    outcome = run(engine)
    assert {tuple(c.versions.tolist()) for c in outcome.values()} == {(0,) * 5 + (1,) * 7}
    assert {kind for kind, _ in events} == {"decode_step"}
    # the first token behind the swap was drawn by the new weights from the old keys: neither's own distribution
    request, completions = make_request(PAGE + 9, n=3, max_tokens=12), [outcome["r", i] for i in range(3)]
    numerics = families.exact_numerics(families.shared())
    for seed in (0, 1):
        with torch.no_grad():
            alone = learner_logprobs(families.shared(seed=seed), numerics, 1, request, completions).reshape(3, 12)
        assert all(abs(float(alone[i, 5]) - float(completions[i].logprobs[5])) > 1e-4 for i in range(3))


def test_weights_that_are_the_same_change_no_bit_of_what_goes_on_under_them():
    numerics = families.exact_numerics(families.shared())
    request = make_request(PAGE + 9, n=3, max_tokens=40)
    engine = make_engine(families.fresh(), numerics)
    outcome = run(
        engine,
        [request],
        between=lambda step: engine.load(published(seed=0, version=step), keep_running=True) if step % 9 == 0 else None,
    )
    assert_same_bits(outcome, run(make_engine(families.shared(), numerics), [request]))
    assert outcome["r", 0].versions.tolist() == [9 * (i // 9) for i in range(40)]


def test_a_prompt_that_arrives_after_such_a_load_reads_nothing_of_the_older_weights():
    """K26: its beginning lies there, computed under the older weights, and still in use."""
    numerics = families.exact_numerics(families.shared())
    running, later = make_request(2 * PAGE + 9, id="a", max_tokens=30), make_request(2 * PAGE + 9, id="b", max_tokens=9)
    engine = make_engine(families.fresh(), numerics)
    engine.submit(running)
    engine.step()
    engine.load(published(seed=1, version=1), keep_running=True)
    outcome = run(engine, [later])
    assert_same_bits({("b", 0): outcome["b", 0]}, run(make_engine(families.shared(seed=1), numerics), [later]))


def test_after_a_load_everything_equals_a_fresh_engine_bit_for_bit():
    """K26, with prompts that were computed, half computed, and used before."""
    numerics = families.exact_numerics(families.shared())
    requests = [make_request(length, id=str(length), n=3, admission=length, max_tokens=7) for length in (5, 64, 130)]
    engine = make_engine(families.fresh(), numerics, max_running=4, prefill_chunk=50)
    run(engine, requests)
    for request in requests:
        engine.submit(request)
    engine.step()
    engine.step()
    engine.abort(["5"])
    assert engine.scheduler.budget.free < 200
    engine.load(published(seed=1, version=1))
    engine.submit(requests[0])
    outcome = run(engine)
    expected = run(make_engine(families.shared(seed=1), numerics), requests)
    started_before = {key for key, c in outcome.items() if 0 in c.versions}
    assert len(started_before) <= 4
    for key in started_before:
        del outcome[key], expected[key]
    assert_same_bits(outcome, expected)


def test_load_shows_the_digests_of_the_memory_it_computes_from():
    """K22: equal to the learner's, and the engine then samples as the learner scores."""
    policy = families.fresh()
    engine = make_engine(policy)
    weights = published(seed=1, version=1)
    shown = engine.load(weights)
    assert shown == weights.digests == digests(named_weights(policy.model))
    assert shown != published(seed=0, version=0).digests


def test_a_version_that_has_gone_is_refused_and_a_later_one_waits():
    engine = make_engine(families.fresh(), version=4)
    (completion,) = engine.submit(make_request(9, id="gone", version=3))
    assert (completion.finish, completion.reason) == (
        Finish.FAILED,
        "version 3 was asked for, but the engine holds 4",
    )
    engine.submit(make_request(9, id="later", version=5, max_tokens=2))
    assert engine.step() == []
    engine.load(published(seed=0, version=5))
    assert run(engine)["later", 0].versions.tolist() == [5, 5]


def test_samples_left_over_from_a_version_that_has_gone_come_back_failed():
    engine = make_engine(families.fresh(), max_running=1)
    engine.submit(make_request(9, n=2, version=0, max_tokens=3))
    engine.step()
    engine.load(published(seed=0, version=1))
    outcome = run(engine)
    assert outcome["r", 0].finish is Finish.LENGTH
    assert (outcome["r", 1].finish, outcome["r", 1].reason) == (
        Finish.FAILED,
        "version 0 was asked for, but the engine holds 1",
    )


# Events


def test_events_count_every_sampled_token_and_every_prompt_token():
    events = []
    engine = make_engine(families.shared(), on_event=lambda kind, **numbers: events.append((kind, numbers)))
    run(engine, [make_request(30, n=3, max_tokens=8)])
    assert sum(numbers["sampled"] for _, numbers in events) == 3 * 8
    assert [numbers["tokens"] for kind, numbers in events if kind == "prefill"] == [30]
    steps = [numbers for kind, numbers in events if kind == "decode_step"]
    assert [step["batch"] for step in steps] == [3] * 7
    assert [step["context_sum"] for step in steps] == [3 * (30 + i) for i in range(1, 8)]


def test_a_long_queue_of_prompts_leaves_the_pages_to_sequences_that_decode_together():
    """Prompts computed far ahead once took all pages, and a memory for sixteen decoded one sequence at a time."""
    passes = []
    engine = make_engine(families.shared(), max_running=16, num_pages=20, on_event=lambda *_, **n: passes.append(n))
    run(engine, [make_request(40, id=str(i), n=1 + 3 * (i % 2), admission=i, max_tokens=6) for i in range(40)])
    sampled = sum(numbers["sampled"] for numbers in passes)
    assert sampled == 20 * 6 + 20 * 4 * 6
    assert sampled / len(passes) > 12


def test_token_ids_outside_the_vocabulary_fail_their_request_only():
    engine = make_engine(families.shared())
    (completion,) = engine.submit(make_request([5, 100_000]))
    assert completion.finish is Finish.FAILED
    assert "100000" in completion.reason
    assert len(run(engine, [make_request(5, id="good", max_tokens=3)])["good", 0].token_ids) == 3


def test_a_policy_that_is_not_served_fails_by_name():
    engine = make_engine(families.shared())
    (completion,) = engine.submit(replace(make_request(5), policy="critic"))
    assert (completion.finish, "'critic'" in completion.reason) == (Finish.FAILED, True)
