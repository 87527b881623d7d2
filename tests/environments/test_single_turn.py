"""The default environment and the bounds around any: samples keep their own scores, failures cost their group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

import numpy as np
import pytest

from nearpolicy.environments.single_turn import Bounded, SingleTurn
from nearpolicy.errors import ConfigError, EngineError
from nearpolicy.objectives.assign import assign_advantages
from nearpolicy.objectives.config import ObjectiveConfig
from nearpolicy.records import Admission, Finish, Group, Outcome, Prompt, Rollout, Segment, Verdict
from nearpolicy.roles import Capabilities, Completion, Request, Sampling

ADMISSION = Admission(index=17, prompt=Prompt(id="q", task="sums", text="2 + 2 ="), seed=5, version=3)


class Generator:
    """Gives sample i the tokens [10 + i, 99], in the order it is told; what is in ``failing`` fails. The greedy
    completion is sample -1."""

    def __init__(self, order=(0, 1, 2, 3), *, failing=(), empty=(), never=()) -> None:
        self.order, self.failing, self.empty, self.never = order, failing, empty, never
        self.requests: list[Request] = []
        self.left_early = 0
        self.aborted = asyncio.Event()

    async def submit(self, request: Request) -> AsyncIterator[Completion]:
        self.requests.append(request)
        try:
            greedy = request.sampling.temperature == 0
            for sample in (-1,) if greedy else self.order:
                if sample in self.never:
                    await self.aborted.wait()
                await asyncio.sleep(0)
                failed = sample in self.failing
                tokens = [] if failed or sample in self.empty else [10 + sample, 99]
                aborted = sample in self.never
                yield Completion(
                    request=request.id,
                    sample=0 if greedy else sample,
                    token_ids=np.array(tokens, dtype=np.int32),
                    logprobs=-np.ones(len(tokens), dtype=np.float32),
                    versions=np.full(len(tokens), 3, dtype=np.int32),
                    finish=Finish.FAILED if failed else Finish.ABORTED if aborted else Finish.STOP,
                    reason="no page of memory" if failed else "",
                )
        except (asyncio.CancelledError, GeneratorExit):
            self.left_early += 1
            raise

    async def abort(self, request_ids) -> None:
        attempt = self.requests[-1].id.removesuffix(".baseline")
        assert list(request_ids) == [r.id for r in self.requests if r.id.removesuffix(".baseline") == attempt]
        self.aborted.set()

    def capabilities(self) -> Capabilities:
        names = ("seeded", "batch_invariant", "resumable", "in_flight_update", "prefix_cache", "adapters")
        return Capabilities(numerics="exact", proof="fingerprint", **dict.fromkeys(names, True))


class Verifier:
    """Scores sample i with i / 10; sample ``order[0]`` answers first, then ``order[1]``, and so on."""

    def __init__(self, order=(0, 1, 2, 3), *, failing=(), raising=(), silent=()) -> None:
        self.order, self.failing, self.raising, self.silent = order, failing, raising, silent
        self.answered: list[int] = []
        self.asked: list[str] = []

    async def score(self, prompt: Prompt, rollout: Rollout, *, admission: int | None = None) -> Mapping[str, Verdict]:
        sample = rollout.sample
        self.asked.append(rollout.text)
        if sample in self.silent:
            await asyncio.Event().wait()
        if sample in self.raising:
            raise ZeroDivisionError("user code")
        while len(self.answered) < len(self.order) and self.order[len(self.answered)] != sample:
            await asyncio.sleep(0)
        self.answered.append(sample)
        if sample in self.failing:
            return {"number": Verdict.failed("worker died")}
        return {"number": Verdict.scored(sample / 10)}


def reward_of(verdicts: Mapping[str, Verdict], task: str) -> float | None:
    assert task == "sums"
    return verdicts["number"].value


def single_turn(
    generator: Generator, verifier: Verifier, n: int = 4, timeout_s: float | None = None, **options
) -> SingleTurn:
    return SingleTurn(
        generator,
        verifier,
        render=lambda prompt: np.array([1, 2, 3], dtype=np.int32),
        decode=lambda ids: "".join(chr(i + 55) for i in ids if i != 99),
        reward_of=reward_of,
        sampling=Sampling(stop_token_ids=(99,)),
        n=n,
        timeout_s=timeout_s,
        **options,
    )


def remax(generator: Generator, verifier: Verifier, **options) -> SingleTurn:
    return single_turn(generator, verifier, smallest_group=1, with_baseline=True, **options)


def run(environment, admission: Admission = ADMISSION) -> Group:
    async def bounded() -> Group:
        async with asyncio.timeout(20):
            return await environment.run(admission)

    return asyncio.run(bounded())


def test_scores_are_matched_by_sample_whatever_order_generation_and_scoring_end_in():
    verifier = Verifier(order=(3, 1, 0, 2))
    group = run(single_turn(Generator(order=(2, 0, 3, 1)), verifier))
    assert verifier.answered == [3, 1, 0, 2]
    assert group.rewards == (0.0, 0.1, 0.2, 0.3)
    assert [rollout.sample for rollout in group.rollouts] == [0, 1, 2, 3]
    assert [rollout.segments[0].token_ids.tolist() for rollout in group.rollouts] == [[10 + i, 99] for i in range(4)]
    assert [rollout.text for rollout in group.rollouts] == ["A", "B", "C", "D"]
    assert [verdicts["number"].value for verdicts in group.verdicts] == [0.0, 0.1, 0.2, 0.3]
    assert group.failure is None


def test_the_request_carries_what_decides_the_random_numbers():
    generator = Generator()
    run(Bounded(single_turn(generator, Verifier()), timeout_s=10, retries=0))
    [request] = generator.requests
    assert (request.seed, request.admission, request.turn, request.purpose, request.n) == (5, 17, 0, "rollout", 4)
    assert request.token_ids.tolist() == [1, 2, 3]


def test_what_was_sampled_is_what_is_kept_the_stop_token_included():
    segment = run(single_turn(Generator(), Verifier())).rollouts[2].segments[0]
    assert segment.context_ids.tolist() == [1, 2, 3]
    assert segment.token_ids.tolist() == [12, 99]
    assert segment.mask.tolist() == [True, True]
    assert segment.behavior_logprobs.tolist() == [-1.0, -1.0]
    assert segment.versions.tolist() == [3, 3]
    assert segment.finish is Finish.STOP


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 1, 2, 2), (0, 1, 2, 3, 4)])
def test_a_generator_that_does_not_answer_each_sample_once_is_an_error_not_a_group(order):
    environment = Bounded(single_turn(Generator(order), Verifier(order=())), timeout_s=10, retries=3)
    with pytest.raises(EngineError, match=r"request '17.0' of 4 samples with \[0, 1, 2"):
        run(environment)


def test_a_failed_completion_has_no_reward_and_the_others_are_used():
    verifier = Verifier(order=(0, 1, 3))
    generator = Generator(failing={2})
    group = run(Bounded(single_turn(generator, verifier), timeout_s=10, retries=2))
    assert group.rewards == (0.0, 0.1, None, 0.3)
    assert group.failure is None
    assert len(generator.requests) == 1
    assert verifier.asked == ["A", "B", "D"]  # nobody was asked to judge what does not exist


def test_only_samples_that_are_there_are_trained_and_compared():
    """K30: one generation of four fails every time; the mean of the group is that of the other three."""
    group = run(Bounded(single_turn(Generator(failing={2}), Verifier(order=(0, 1, 3))), timeout_s=10, retries=2))
    rows = assign_advantages([group], ObjectiveConfig(scale_rewards="none"))
    trained = {row.sample: row.advantages[row.trained].tolist() for row in rows if row.trained.any()}
    mean = (0.0 + 0.1 + 0.3) / 3
    assert trained == {sample: pytest.approx([reward - mean] * 2) for sample, reward in ((0, 0.0), (1, 0.1), (3, 0.3))}


def test_an_empty_completion_is_not_judged_and_has_no_reward():
    verifier = Verifier(order=(1, 2, 3))
    group = run(single_turn(Generator(empty={0}), verifier))
    assert group.rewards == (None, 0.1, 0.2, 0.3)
    assert group.verdicts[0] == {}


def test_a_failed_verdict_is_never_a_number():
    group = run(single_turn(Generator(), Verifier(failing={1})))
    assert group.rewards == (0.0, None, 0.2, 0.3)
    assert group.verdicts[1]["number"].outcome is Outcome.FAILED


def test_a_group_with_one_survivor_is_retried_with_the_same_index_and_then_dropped():
    generator = Generator(failing={0, 1, 3})
    told: list[Group] = []
    verifier = Verifier(order=(2,))
    environment = Bounded(single_turn(generator, verifier), timeout_s=10, retries=2, on_retry=told.append)
    group = run(environment)
    assert group.failure == "fewer than two of 4 rollouts were scored (no page of memory)"
    assert (group.admission.index, group.admission.attempt) == (17, 2)
    assert [request.id for request in generator.requests] == ["17.0", "17.1", "17.2"]
    assert {(request.admission, request.seed) for request in generator.requests} == {(17, 5)}
    assert [(g.admission.attempt, g.num_sampled) for g in told] == [(0, 2), (1, 2)]
    assert [rollout.num_sampled for rollout in group.rollouts] == [0, 0, 2, 0]  # its tokens keep a fate


def test_a_group_whose_verifier_fails_says_which_source_and_why():
    group = run(single_turn(Generator(), Verifier(failing={0, 1, 2})))
    assert group.failure == "fewer than two of 4 rollouts were scored (number: worker died)"


class Flaky:
    """A user's environment that raises in its first attempts."""

    def __init__(self, error: Exception, times: int) -> None:
        self.error, self.times = error, times
        self.admissions: list[Admission] = []

    async def run(self, admission: Admission) -> Group:
        self.admissions.append(admission)
        if len(self.admissions) <= self.times:
            raise self.error
        return Group(admission=admission, rewards=(0.0, 1.0))


def test_an_environment_that_raises_once_is_asked_again_under_the_same_index():
    flaky = Flaky(KeyError("answer"), times=1)
    group = run(Bounded(flaky, timeout_s=10, retries=1))
    assert group.failure is None
    assert [(a.index, a.attempt, a.seed, a.version) for a in flaky.admissions] == [(17, 0, 5, 3), (17, 1, 5, 3)]
    assert group.admission.attempt == 1


def test_an_environment_that_always_raises_costs_its_group_only():
    flaky = Flaky(KeyError("answer"), times=100)
    group = run(Bounded(flaky, timeout_s=10, retries=2))
    assert group.failure == "the environment raised KeyError: 'answer'"
    assert (len(flaky.admissions), group.rollouts, group.admission.attempt) == (3, (), 2)


def test_a_users_own_timeout_is_told_apart_from_ours():
    group = run(Bounded(Flaky(TimeoutError("the tool server is slow"), times=100), timeout_s=10, retries=0))
    assert group.failure == "the environment raised TimeoutError: the tool server is slow"


def test_the_first_error_inside_concurrent_parts_is_the_reason():
    group = run(Bounded(single_turn(Generator(), Verifier(order=(), raising={1})), timeout_s=10, retries=0))
    assert group.failure == "the environment raised ZeroDivisionError: user code"


def test_a_dead_engine_ends_the_run_instead_of_failing_every_group():
    flaky = Flaky(EngineError("the engine stopped"), times=100)
    with pytest.raises(EngineError, match="the engine stopped"):
        run(Bounded(flaky, timeout_s=10, retries=5))
    assert len(flaky.admissions) == 1


def test_a_rollout_that_never_ends_is_named_and_its_group_retried():
    generator = Generator(order=(0, 1, 2, 3, 4, 6, 7, 5), never={5})
    environment = Bounded(single_turn(generator, Verifier(order=()), n=8), timeout_s=0.05, retries=1, grace_s=0)
    group = run(environment)
    assert group.failure == ("no group within 0.05 s (queue.rollout_timeout_s): samples [5] of 8 were not generated")
    assert len(generator.requests) == 2
    assert generator.left_early == 2  # the generator is told to stop


def test_a_request_out_of_time_is_aborted_and_its_tokens_stay_for_the_ledger():
    generator = Generator(never=(2,))
    group = run(single_turn(generator, Verifier(order=(0, 1, 3), silent=(1,)), timeout_s=0.05))
    assert generator.aborted.is_set() and generator.left_early == 0
    assert group.failure == (
        "no group within 0.05 s (queue.rollout_timeout_s): "
        "samples [2, 3] of 4 were not generated and samples [1] of 4 were not judged"
    )
    assert [rollout.finish for rollout in group.rollouts] == [Finish.STOP, Finish.STOP, Finish.ABORTED, Finish.STOP]
    assert group.num_sampled == 8
    assert group.rewards[1] is None and group.rewards[2] is None


def test_an_environment_that_keeps_the_same_limit_itself_has_time_to_hand_over_what_was_sampled():
    generator = Generator(never=(2,))
    inner = single_turn(generator, Verifier(order=(0, 1, 3)), timeout_s=0.05)
    group = run(Bounded(inner, timeout_s=0.05, retries=0))
    assert "samples [2, 3] of 4 were not generated" in group.failure
    assert (group.num_sampled, generator.left_early) == (8, 0)


def test_a_verifier_that_never_answers_is_named():
    silent = single_turn(Generator(), Verifier(order=(), silent={2}))
    environment = Bounded(silent, timeout_s=0.05, retries=0, grace_s=0)
    assert run(environment).failure == (
        "no group within 0.05 s (queue.rollout_timeout_s): samples [2] of 4 were not judged"
    )


def test_at_the_end_of_a_run_what_is_running_comes_back_with_its_tokens_and_is_not_tried_again():
    async def scenario() -> Group:
        generator = Generator(never=(2,))
        environment = Bounded(
            single_turn(generator, Verifier(order=(0, 1), silent=(1,)), timeout_s=20), timeout_s=20, retries=3
        )
        running = asyncio.create_task(environment.run(ADMISSION))
        for _ in range(20):
            await asyncio.sleep(0)
        await environment.stop()
        group = await running
        assert len(generator.requests) == 1
        return group

    group = asyncio.run(scenario())
    assert group.failure == "the run ended: samples [2, 3] of 4 were not generated and samples [1] of 4 were not judged"
    assert group.num_sampled == 8


def test_a_group_given_up_while_it_is_generated_and_judged_comes_back_with_its_tokens_and_is_not_tried_again():
    async def scenario() -> Group:
        generator = Generator(never=(2,))
        environment = Bounded(single_turn(generator, Verifier(order=(0, 1), silent=(1,))), timeout_s=20, retries=3)
        running = asyncio.create_task(environment.run(ADMISSION))
        for _ in range(20):
            await asyncio.sleep(0)
        environment.give_up(ADMISSION.index, "too old")
        environment.give_up(ADMISSION.index, "twice")
        group = await running
        assert len(generator.requests) == 1
        return group

    group = asyncio.run(scenario())
    assert group.failure == "too old: samples [2, 3] of 4 were not generated and samples [1] of 4 were not judged"
    assert group.num_sampled == 8


def test_a_group_given_up_while_its_engine_dies_leaves_the_engines_error_to_speak():
    class Dies(Generator):
        async def submit(self, request):
            async for completion in super().submit(request):
                yield completion
                await asyncio.sleep(0)
                if completion.sample == 1:
                    raise EngineError("the engine stopped")

    class SlowToStop(Verifier):
        async def score(self, prompt, rollout, *, admission=None):
            try:
                await asyncio.Event().wait()
            finally:
                environment.give_up(ADMISSION.index, "too old")  # what it raises would end the run instead
                told.append(rollout.sample)

    told: list[int] = []
    environment = Bounded(single_turn(Dies(), SlowToStop()), timeout_s=20, retries=0)
    with pytest.raises(EngineError, match="the engine stopped"):
        run(environment)
    assert sorted(told) == [0, 1]


@pytest.mark.parametrize("turns", range(6))
def test_a_group_that_completes_just_as_the_run_ends_is_kept(turns):
    class Telling(Verifier):
        async def score(self, prompt, rollout, *, admission=None):
            verdicts = await super().score(prompt, rollout, admission=admission)
            if len(self.answered) == 4:
                self.stopping = asyncio.create_task(end_soon())
            return verdicts

    async def end_soon():
        for _ in range(turns):
            await asyncio.sleep(0)
        await environment.stop()

    verifier = Telling()
    environment = single_turn(Generator(), verifier)

    async def both() -> Group:
        group = await environment.run(ADMISSION)
        await verifier.stopping  # what it raises ends a run
        return group

    assert len(asyncio.run(both()).rollouts) == 4


def test_ending_the_run_is_not_taken_for_a_failure():
    async def scenario() -> None:
        environment = Bounded(single_turn(Generator(never={1}), Verifier(order=())), timeout_s=10, retries=5)
        task = asyncio.create_task(environment.run(ADMISSION))
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())


def test_a_generator_that_returns_text_only_is_refused_for_training():
    """K17."""

    class TextOnly(Generator):
        def capabilities(self) -> Capabilities:
            return replace(super().capabilities(), returns_token_ids=False)

    with pytest.raises(ConfigError, match="returns text only"):
        single_turn(TextOnly(), Verifier())


def test_a_greedy_completion_is_asked_for_beside_the_samples_judged_like_them_and_kept_apart():
    generator, verifier = Generator(), Verifier(order=(-1, 0, 1, 2, 3))
    environment = SingleTurn(
        generator,
        verifier,
        render=lambda prompt: np.array([1, 2, 3], dtype=np.int32),
        decode=lambda ids: "",
        reward_of=reward_of,
        sampling=Sampling(
            temperature=1.3,
            top_p=0.9,
            top_k=5,
            min_p=0.1,
            max_tokens=7,
            stop_token_ids=(99,),
            stop=("x",),
            record_support=True,
        ),
        n=4,
        smallest_group=1,
        with_baseline=True,
    )
    group = run(environment)
    samples, greedy = generator.requests
    assert (samples.id, samples.n, samples.sampling.temperature, samples.sampling.top_k) == ("17.0", 4, 1.3, 5)
    assert (greedy.id, greedy.n, greedy.admission, greedy.purpose) == ("17.0.baseline", 1, 17, "baseline")
    assert greedy.version == samples.version
    assert greedy.sampling == Sampling(temperature=0.0, max_tokens=7, stop_token_ids=(99,), stop=("x",))
    assert greedy.token_ids.tolist() == [1, 2, 3]
    assert group.failure is None
    assert [rollout.sample for rollout in group.rollouts] == [0, 1, 2, 3]
    assert group.rewards == (0.0, 0.1, 0.2, 0.3)
    assert group.baseline.rollout.sample == -1
    assert group.baseline.rollout.segments[0].token_ids.tolist() == [9, 99]
    assert (group.baseline.reward, group.baseline.verdicts["number"].value) == (-0.1, -0.1)
    assert (group.num_sampled, len(group.everything)) == (10, 5)


def test_an_objective_without_a_baseline_asks_for_no_greedy_completion():
    generator = Generator()
    assert run(single_turn(generator, Verifier())).baseline is None
    assert len(generator.requests) == 1


@pytest.mark.parametrize(
    ("generator", "verifier", "reason"),
    [
        (Generator(failing={-1}), Verifier(), " (no page of memory)"),
        (Generator(empty={-1}), Verifier(), ""),
        (Generator(), Verifier(failing={-1}), " (number: worker died)"),
    ],
)
def test_without_the_greedy_reward_there_is_no_baseline_the_group_is_retried_and_then_dropped(
    generator, verifier, reason
):
    told: list[Group] = []
    verifier.order = ()
    group = run(Bounded(remax(generator, verifier), timeout_s=10, retries=1, on_retry=told.append))
    assert group.failure == f"the greedy completion was not scored, so there is no baseline{reason}"
    assert [request.id for request in generator.requests] == ["17.0", "17.0.baseline", "17.1", "17.1.baseline"]
    for each in (group, *told):
        assert each.baseline.reward is None  # never replaced by a number
        assert each.rewards == (0.0, 0.1, 0.2, 0.3)
        assert each.num_sampled == 8 + each.baseline.rollout.num_sampled  # for the ledger


def test_one_scored_sample_is_enough_to_compare_with_a_baseline_and_none_is_too_few():
    group = run(remax(Generator(failing={0, 1, 3}), Verifier(order=())))
    assert (group.failure, group.rewards, group.baseline.reward) == (None, (None, None, 0.2, None), -0.1)
    group = run(remax(Generator(failing={0, 1, 2, 3}), Verifier(order=())))
    assert group.failure == "none of 4 rollouts were scored (no page of memory)"
    group = run(remax(Generator(order=(0,)), Verifier(order=()), n=1))
    assert (group.failure, group.rewards) == (None, (0.0,))


def test_both_requests_out_of_time_are_aborted_and_what_was_missing_is_named():
    generator = Generator(never=(2, -1))
    group = run(remax(generator, Verifier(order=(0, 1, 3)), timeout_s=0.05))
    assert group.failure == (
        "no group within 0.05 s (queue.rollout_timeout_s): "
        "samples [2, 3] of 4 were not generated and the greedy completion was not generated"
    )
    assert group.baseline.rollout.finish is Finish.ABORTED
    assert (group.baseline.reward, group.baseline.rollout.num_sampled, group.num_sampled) == (None, 2, 10)
    group = run(remax(Generator(), Verifier(order=(), silent=(-1,)), timeout_s=0.05))
    assert group.failure == "no group within 0.05 s (queue.rollout_timeout_s): the greedy completion was not judged"


def test_a_greedy_completion_that_runs_when_the_run_ends_comes_back_with_its_tokens():
    async def scenario() -> Group:
        environment = Bounded(remax(Generator(never=(-1,)), Verifier(), timeout_s=20), timeout_s=20, retries=3)
        running = asyncio.create_task(environment.run(ADMISSION))
        for _ in range(50):
            await asyncio.sleep(0)
        await environment.stop()
        return await running

    group = asyncio.run(scenario())
    assert group.failure == "the run ended: the greedy completion was not generated"
    assert (group.num_sampled, group.baseline.rollout.finish) == (10, Finish.ABORTED)


def test_a_greedy_request_that_is_not_answered_once_is_an_error_not_a_group():
    class Silent(Generator):
        async def submit(self, request: Request) -> AsyncIterator[Completion]:
            if request.purpose != "baseline":
                async for completion in super().submit(request):
                    yield completion

    with pytest.raises(EngineError, match=r"request '17.0.baseline' of 1 samples with \[\]"):
        run(Bounded(remax(Silent(), Verifier()), timeout_s=10, retries=3))


# Going on from an earlier attempt


def earlier_group(admission: Admission, context=(1, 2, 3)) -> Group:
    """Sample 0 had ended and was judged, 1 had ended, 2 was under way, 3 had not begun."""

    def rollout(sample: int, tokens: list[int], finish: Finish) -> Rollout:
        segment = Segment(
            context_ids=np.array(context),
            token_ids=np.array(tokens),
            mask=np.ones(len(tokens), bool),
            behavior_logprobs=-np.arange(1.0, len(tokens) + 1),
            versions=np.full(len(tokens), 1),
            finish=finish,
        )
        return Rollout(sample=sample, segments=(segment,), text="", numerics="fast")

    return Group(
        admission=replace(admission, attempt=0),
        rollouts=(
            rollout(0, [10, 99], Finish.STOP),
            rollout(1, [11, 99], Finish.STOP),
            rollout(2, [12], Finish.ABORTED),
        ),
        verdicts=({"number": Verdict.scored(0.75)}, {}, {}),
        rewards=(0.75, None, None),
        failure="the run ended",
    )


NEXT = replace(ADMISSION, attempt=1)


def test_samples_that_had_begun_are_asked_for_with_their_tokens_and_those_judged_are_not_judged_again():
    generator, verifier, asked = Generator(), Verifier(order=(1, 2, 3)), []
    earlier = lambda admission: asked.append(admission.attempt) or earlier_group(admission)  # noqa: E731
    group = run(single_turn(generator, verifier, earlier=earlier), NEXT)
    [request] = generator.requests
    assert {s: begun.token_ids.tolist() for s, begun in request.begun.items()} == {0: [10, 99], 1: [11, 99], 2: [12]}
    assert request.begun[1].logprobs.tolist() == [-1.0, -2.0] and request.begun[1].versions.tolist() == [1, 1]
    assert (request.id, request.n, asked) == ("17.1", 4, [1])
    assert sorted(verifier.answered) == [1, 2, 3]
    assert group.rewards == (0.75, 0.1, 0.2, 0.3)


def test_a_verdict_that_is_a_failure_is_asked_for_again():
    def earlier(admission: Admission) -> Group:
        of = earlier_group(admission)
        return replace(of, verdicts=({"number": Verdict.failed("worker died")}, {}, {}))

    verifier = Verifier()
    assert run(single_turn(Generator(), verifier, earlier=earlier), NEXT).rewards == (0.0, 0.1, 0.2, 0.3)
    assert sorted(verifier.answered) == [0, 1, 2, 3]


def test_tokens_behind_another_prompt_are_not_gone_on_from():
    generator = Generator()
    run(single_turn(generator, Verifier(), earlier=lambda admission: earlier_group(admission, context=(1, 2))), NEXT)
    assert generator.requests[0].begun == {}


def test_a_generator_that_cannot_go_on_begins_anew():
    class Forgetful(Generator):
        def capabilities(self) -> Capabilities:
            return replace(super().capabilities(), resumable=False)

    generator = Forgetful()
    run(single_turn(generator, Verifier(), earlier=earlier_group), NEXT)
    assert generator.requests[0].begun == {}
