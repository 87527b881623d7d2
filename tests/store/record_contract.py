"""What every record of a run promises, wherever it is written: nothing confirmed is lost, I2 holds, errors are told.

A test module makes a class of `RecordContract`, and a fixture `records` with what creates one and opens it again.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from synthetic_run import CONFIG, NASTY, admission, batch, group, segment, trained

from nearpolicy.errors import NearpolicyError, RunFolderError
from nearpolicy.records import (
    BASELINE,
    REMADE,
    ROLLBACK,
    Baseline,
    Branch,
    Event,
    Fate,
    Finish,
    Group,
    Outcome,
    Prompt,
    Rollout,
    StepReport,
    Verdict,
    VersionRecord,
)
from nearpolicy.store.export import export_run, import_run
from nearpolicy.store.folder import RunFolder, create_run_folder
from nearpolicy.store.payload import encode_group
from nearpolicy.store.position import position_of
from nearpolicy.store.reader import RunReader
from nearpolicy.store.record import RunRecord
from nearpolicy.store.recycled import can_go_on
from nearpolicy.store.retention import next_portion

REPORT = StepReport(version=1, updates=2, metrics={})


def read(folder: RunFolder) -> RunReader:
    return RunReader(folder.path)


def bits(segments) -> bytes:
    return encode_group([Rollout(sample=0, segments=tuple(segments), text="", numerics="exact")])


def assert_same_group(got: Group, sent: Group) -> None:
    assert got.admission == sent.admission
    assert (got.rewards, got.verdicts, got.failure) == (sent.rewards, sent.verdicts, sent.failure)
    assert [r.text for r in got.rollouts] == [r.text for r in sent.rollouts]
    for a, b in zip(got.rollouts, sent.rollouts, strict=True):
        assert (a.sample, a.numerics, a.lineage) == (b.sample, b.numerics, b.lineage)
        assert bits(a.segments) == bits(b.segments)


def with_baseline(of_group: Group, reward: float | None = 0.25) -> Group:
    greedy = segment(5, of_group.admission.version, np.random.default_rng(99))
    rollout = Rollout(sample=BASELINE, segments=(greedy,), text="greedy", numerics="exact")
    verdicts = {"answer": Verdict.scored(0.25, exact=1.0), "late": Verdict.failed("worker died")}
    return replace(of_group, baseline=Baseline(rollout=rollout, verdicts=verdicts, reward=reward))


def stopped_group(index: int = 0) -> Group:
    """Samples 0 and 1 had ended and were judged, 2 was under way, 3 had failed."""
    whole = group(index, version=1)
    ends = {2: Finish.ABORTED, 3: Finish.FAILED}
    rollouts = [
        replace(r, segments=(replace(r.segments[0], finish=ends.get(r.sample, Finish.STOP)),)) for r in whole.rollouts
    ]
    verdicts = tuple({} if sample in ends else of for sample, of in enumerate(whole.verdicts))
    rewards = tuple(None if sample in ends else reward for sample, reward in enumerate(whole.rewards))
    return replace(whole, rollouts=tuple(rollouts), verdicts=verdicts, rewards=rewards, failure="the run ended")


def continued(of: Group, version: int = 2, more: int = 3) -> Group:
    """The next attempt: sample 2 goes on, 3 is drawn anew."""
    of = replace(of, admission=replace(of.admission, attempt=of.admission.attempt + 1), failure=None)
    rollouts = list(of.rollouts)
    old, new = rollouts[2].segments[0], segment(more, version, np.random.default_rng(5))
    names = ("token_ids", "mask", "behavior_logprobs", "versions")
    both = {name: np.concatenate([getattr(old, name), getattr(new, name)]) for name in names}
    rollouts[2] = replace(rollouts[2], segments=(replace(old, **both, finish=Finish.STOP),))
    rollouts[3] = replace(rollouts[3], segments=(segment(4, version, np.random.default_rng(6)),))
    scored = {"answer": Verdict.scored(1.0)}
    return replace(
        of,
        rollouts=tuple(rollouts),
        verdicts=tuple(verdicts or scored for verdicts in of.verdicts),
        rewards=tuple(1.0 if reward is None else reward for reward in of.rewards),
    )


def require_balance(store: RunRecord, folder: RunFolder, **expected: int) -> None:
    """What the running store has counted is what is stored, and each token that was sampled is there once."""
    store.flush()
    with read(folder) as run:
        told = {fate.value: tokens for fate, tokens in run.ledger().items()}
        assert {fate.value: tokens for fate, tokens in store.ledger().items()} == told == expected
        assert sum(told.values()) == run.query("SELECT sum(sampled) FROM rollouts")[0][0]
        by_rollout = Counter()
        for item in run.rollouts():
            assert sum(item.fates.values()) == item.rollout.num_sampled
            by_rollout.update({fate.value: tokens for fate, tokens in item.fates.items()})
        assert by_rollout == Counter(expected)


def take_up(store: RunRecord, folder: RunFolder, *, goes_on: bool = True) -> Group | None:
    """As a run does; the next attempt's admission is that of the last one, plus one."""
    with read(folder) as run:
        found = position_of(run)
    kept = [g for g in map(can_go_on, found.stopped) if g is not None] if goes_on else []
    store.lost(found.unfinished, "under way", stopped=found.stopped, recycled=kept)
    assert store.recycled.oldest_versions() == {g.index: 1 for g in kept}
    [admission] = found.unfinished
    return store.recycled.take(replace(admission, attempt=admission.attempt + 1))


class RecordContract:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> RunFolder:
        return create_run_folder("run", parent=tmp_path)

    @pytest.fixture
    def store(self, records, folder: RunFolder):
        store = records.create(folder, config=CONFIG)
        yield store
        with contextlib.suppress(NearpolicyError):  # the test made it fail and has looked at it
            store.close()

    @pytest.fixture
    def stopped(self, records, folder) -> Group:
        of = stopped_group()
        with records.create(folder, config={}) as store:
            store.admitted(of.admission)
            store.discarded(of, Fate.ABORTED, "the run ended")
            require_balance(store, folder, aborted=of.num_sampled)
        return of

    def test_a_group_comes_back_as_it_was_filled(self, store, folder):
        sent = group(7, version=3)
        store.admitted(sent.admission)
        store.filled(sent)
        store.flush()
        assert_same_group(read(folder).group(7), sent)

    @pytest.mark.parametrize("reward", [0.25, None])
    def test_a_greedy_completion_comes_back_beside_its_group_with_its_verdicts(self, store, folder, reward):
        sent = with_baseline(group(7, version=3), reward)
        store.admitted(sent.admission)
        store.filled(sent)
        store.flush()
        run = read(folder)
        got = run.group(7)
        assert_same_group(got, sent)
        assert (got.baseline.reward, got.baseline.verdicts) == (sent.baseline.reward, sent.baseline.verdicts)
        assert (got.baseline.rollout.sample, got.baseline.rollout.text) == (BASELINE, "greedy")
        assert bits(got.baseline.rollout.segments) == bits(sent.baseline.rollout.segments)
        assert run.ledger() == {Fate.IN_FLIGHT: sent.num_sampled}
        assert [item.is_baseline for item in run.rollouts(group=7)] == [True, False, False, False, False]

    def test_a_consumed_greedy_completion_is_in_the_ledger_and_in_no_row_of_the_batch(self, store, folder):
        groups = [with_baseline(group(0)), group(1)]
        sent = batch(0, groups)
        fates = trained(groups) | {(0, BASELINE): {Fate.BASELINE: 5}}
        store.consumed(sent, REPORT, fates)
        store.flush()
        run = read(folder)
        got = run.batch(0)
        assert [(row.group, row.sample) for row in got.rows] == [(g, s) for g in range(2) for s in range(4)]
        assert (got.groups[0].baseline.reward, got.groups[1].baseline) == (0.25, None)
        assert run.ledger()[Fate.BASELINE] == 5
        assert sum(run.ledger().values()) == sum(each.num_sampled for each in groups)
        [greedy] = run.rollouts(sample=BASELINE)
        assert (greedy.fates, greedy.rows, greedy.reward, greedy.step) == ({Fate.BASELINE: 5}, {}, 0.25, 0)

    def test_tokens_of_a_greedy_completion_without_a_fate_are_refused(self, store):
        groups = [with_baseline(group(0))]
        store.consumed(batch(0, groups), REPORT, trained(groups))
        with pytest.raises(NearpolicyError, match=r"fates of group 0 do not add up \(sample -1: 5 sampled, 0 told"):
            store.flush()

    def test_a_greedy_completion_shares_the_fate_of_a_group_that_is_given_up(self, store, folder):
        lost = with_baseline(group(0), None)
        store.discarded(replace(lost, failure="no baseline"), Fate.FAILED, "no baseline")
        store.flush()
        run = read(folder)
        assert run.ledger() == {Fate.FAILED: lost.num_sampled}
        assert (run.group(0).failure, run.group(0).baseline.reward) == ("no baseline", None)

    def test_nul_lone_surrogates_and_line_separators_survive_everywhere(self, store, folder):
        prompt = Prompt(
            id=NASTY, task=NASTY, messages=({"role": "user", "content": NASTY},), columns={NASTY: [NASTY, None]}
        )
        verdicts = {
            NASTY: Verdict(outcome=Outcome.SCORED, value=0.1, parts={NASTY: 1.5}, arrays={"process": np.arange(3.0)}),
            "late": Verdict.failed(NASTY),
        }
        rollout = Rollout(sample=0, segments=(segment(3, 0, np.random.default_rng(0)),), text=NASTY, numerics="fast")
        sent = Group(
            admission=admission(0, prompt=prompt),
            rollouts=(rollout,),
            verdicts=(verdicts,),
            rewards=(0.1,),
            failure=NASTY,
        )
        store.discarded(sent, Fate.FAILED, NASTY)
        store.flush()
        run = read(folder)
        got = run.group(0)
        assert got.admission == sent.admission and got.failure == NASTY and got.rollouts[0].text == NASTY
        assert got.verdicts[0]["late"] == verdicts["late"] and list(got.verdicts[0]) == [NASTY, "late"]
        assert got.verdicts[0][NASTY].parts == {NASTY: 1.5}
        assert got.verdicts[0][NASTY].arrays["process"].tolist() == [0.0, 1.0, 2.0]
        assert next(run.rollouts()).reason == NASTY

    def test_the_batch_of_a_step_comes_back_with_the_same_rows_and_bits(self, store, folder):
        groups = [group(index) for index in (2, 0, 1)]  # ready order: not that of the indices
        sent = batch(5, groups)
        store.consumed(sent, REPORT, trained(groups))
        store.flush()
        run = read(folder)
        got = run.batch(5)
        assert [each.index for each in got.groups] == [2, 0, 1]
        assert [c.place for c in run.consumption(5)] == [0, 1, 2]
        by_key = {(row.group, row.sample): row for row in sent.rows}
        assert [(row.group, row.sample) for row in got.rows] == sorted(by_key)
        for row in got.rows:
            expected = by_key[row.group, row.sample]
            assert row.advantages.tobytes() == expected.advantages.tobytes()
            assert row.trained.tobytes() == expected.trained.tobytes()
            assert bits([row.segment]) == bits([expected.segment])

    def test_a_group_that_leaves_its_place_empty_is_consumed_but_not_in_the_batch(self, store, folder):
        kept, filtered = group(0), group(1)
        store.filled(filtered)
        fates = trained([kept]) | {(1, r.sample): {Fate.FILTERED: r.num_sampled} for r in filtered.rollouts}
        store.consumed(replace(batch(0, [kept]), places=2), REPORT, fates)
        store.flush()
        run = read(folder)
        assert [(c.admission, c.place) for c in run.consumption()] == [(0, 0), (1, None)]
        assert [each.index for each in run.batch(0).groups] == [0]
        assert run.ledger()[Fate.FILTERED] == filtered.num_sampled

    def test_fates_that_do_not_add_up_are_refused_with_the_sample(self, store, folder):
        groups = [group(0)]
        fates = trained(groups)
        del fates[0, 2]
        store.consumed(batch(0, groups), REPORT, fates)
        with pytest.raises(NearpolicyError, match=r"fates of group 0 do not add up \(sample 2: \d+ sampled, 0 told"):
            store.flush()
        assert read(folder).steps() == []  # nothing of the call is there

    def test_an_admission_ends_once(self, store):
        store.discarded(group(0), Fate.EXPIRED, "too old")
        store.consumed(batch(0, [group(0)]), REPORT, trained([group(0)]))
        with pytest.raises(NearpolicyError, match=r"admission 0 .* ended as expired and again as consumed"):
            store.flush()

    def test_a_retry_keeps_both_attempts_apart(self, store, folder):
        first = replace(group(4), failure="worker died")
        again = replace(group(4), admission=replace(first.admission, attempt=1))
        store.admitted(first.admission)
        store.discarded(first, Fate.FAILED, "worker died")
        store.admitted(again.admission)
        store.filled(again)
        store.consumed(batch(0, [again]), REPORT, trained([again]))
        store.flush()
        run = read(folder)
        assert run.group(4).failure is None and run.group(4, attempt=0).failure == "worker died"
        assert sum(run.ledger().values()) == 2 * again.num_sampled

    def test_k31_verdicts_follow_the_sample_not_the_place(self, store, folder):
        sent = group(0)
        order = (3, 1, 0, 2)
        rewards = tuple(sample / 10 for sample in order)
        shuffled = replace(
            sent,
            rollouts=tuple(sent.rollouts[sample] for sample in order),
            verdicts=tuple({"score": Verdict.scored(sample / 10)} for sample in order),
            rewards=rewards,
        )
        store.filled(shuffled)
        store.flush()
        stored = list(read(folder).rollouts(group=0))
        assert [item.rollout.sample for item in stored] == [0, 1, 2, 3]
        assert [item.reward for item in stored] == [0.0, 0.1, 0.2, 0.3]
        assert [item.verdicts["score"].value for item in stored] == [0.0, 0.1, 0.2, 0.3]

    def test_k31_three_verdicts_for_four_samples_are_an_error(self, store):
        store.filled(replace(group(0), verdicts=group(0).verdicts[:3]))
        with pytest.raises(NearpolicyError, match="shorter"):
            store.flush()

    def test_one_name_never_stands_for_two_weights(self, store, folder):
        record = VersionRecord(lineage=0, version=1, updates=1, fingerprint="aa", parent=0)
        store.published(record, 0.1)
        store.published(record, 0.1)
        store.flush()
        assert read(folder).versions() == [record]
        store.published(replace(record, fingerprint="bb"), 0.1)
        with pytest.raises(NearpolicyError, match=r"fingerprint aa.*open a new lineage"):
            store.flush()

    def test_numpy_counters_are_taken_as_numbers(self, store, folder):
        store.event(
            Event(time=np.float64(1.5), role="generator", kind="finish", sample=np.int64(3), numbers={"n": np.int32(2)})
        )
        store.flush()
        (event,) = read(folder).events()
        assert (event.time, event.sample, event.numbers) == (1.5, 3, {"n": 2})

    def test_an_error_in_the_thread_surfaces_on_the_next_call_and_earlier_calls_are_kept(self, store, folder):
        store.filled(group(0))
        store.discarded(group(1), Fate.IN_FLIGHT, "nonsense")
        with pytest.raises(NearpolicyError, match="in flight"):
            store.filled(group(2))  # by then it may have been met
            store.flush()
        with pytest.raises(NearpolicyError, match="in flight"):
            store.filled(group(3))
        with pytest.raises(NearpolicyError, match="in flight"):
            store.close()
        assert [each.index for each in read(folder).groups()] == [0]

    def test_a_closed_store_takes_nothing_more(self, store):
        store.close()
        store.close()
        with pytest.raises(NearpolicyError, match="is closed"):
            store.filled(group(0))

    def test_a_second_writer_in_the_same_process_is_refused(self, records, store, folder):
        with pytest.raises(RunFolderError, match="being written by another run"):
            records.open(folder, lock_within_s=0.1)
        store.close()
        with pytest.raises(RunFolderError, match="already holds a run"):
            records.create(folder, config=CONFIG)
        records.open(folder).close()

    def test_a_reader_sees_the_run_grow(self, store, folder):
        run = read(folder)
        assert run.config == CONFIG and run.steps() == [] and run.metrics() == [] and run.summary() is None
        for step in range(3):
            groups = [group(step)]
            store.consumed(batch(step, groups), REPORT, trained(groups))
            store.flush()
            assert len(run.steps()) == step + 1

    @pytest.mark.parametrize("what", ["removed", "replaced", "moved away"])
    def test_a_folder_that_is_removed_or_replaced_while_it_is_written_is_named_soon(self, records, tmp_path, what):
        folder = create_run_folder("x", directory=tmp_path / "mine")
        store = records.create(folder, config=CONFIG)
        store.filled(group(0))
        store.flush()
        if what == "moved away":
            folder.path.rename(tmp_path / "elsewhere")
        else:
            shutil.rmtree(folder.path)
        if what == "replaced":
            records.create(create_run_folder("x", directory=tmp_path / "mine"), config=CONFIG).close()
        with pytest.raises(RunFolderError, match=r"mine was removed or replaced while the run wrote it"):
            store.filled(group(1))
            store.flush()
        with pytest.raises(RunFolderError):
            store.close()

    def test_the_counts_of_a_running_store_are_those_of_its_database(self, records, folder):
        """I2, also after it was opened again."""
        with records.create(folder, config={}) as store:
            for index in range(6):
                store.filled(group(index))
            in_flight = sum(group(index).num_sampled for index in range(6))
            assert store.ledger() == {Fate.IN_FLIGHT: in_flight}
            store.discarded(group(0), Fate.EXPIRED, "old")
            store.discarded(group(7), Fate.FAILED, "never filled")
            store.retried(group(1), Fate.ABORTED, "cut off")
            two, three, four = group(2), group(3), group(4)
            store.consumed(batch(0, [two, three]), REPORT, trained([two, three]))
            store.flush()
            assert store.ledger() == read(folder).ledger()
            old = tuple(replace(row, replayed=True) for row in batch(1, [two]).rows)
            again = replace(batch(1, [four]), replayed=(two,), rows=(*batch(1, [four]).rows, *old))
            store.consumed(again, REPORT, trained([four]))
            store.flush()
            assert store.ledger() == read(folder).ledger()
            assert store.ledger()[Fate.REPLAYED] == sum(int(row.trained.sum()) for row in again.rows if row.replayed)
        with records.open(folder) as store:
            assert store.ledger() == read(folder).ledger()
            branch = Branch(lineage=1, parent=0, first=2, kind=ROLLBACK, reason="a spike")
            store.branched(branch, [group(5)])
            store.flush()
            assert store.ledger() == read(folder).ledger()
            assert set(store.ledger()) >= {Fate.TRAINED, Fate.EXPIRED} and Fate.REPLAYED not in store.ledger()
            assert Fate.IN_FLIGHT not in store.ledger()

    def test_recycled_tokens_are_in_flight_and_then_in_the_attempt_that_goes_on_from_them(
        self, records, folder, stopped
    ):
        """I2."""
        failed = stopped.rollouts[3].num_sampled
        with records.open(folder) as store:
            kept = take_up(store, folder)
            assert [rollout.sample for rollout in kept.rollouts] == [0, 1, 2]
            assert [bits(r.segments) for r in kept.rollouts] == [bits(r.segments) for r in stopped.rollouts[:3]]
            require_balance(store, folder, aborted=failed, in_flight=kept.num_sampled)
            now = continued(stopped)
            store.filled(now)
            require_balance(store, folder, aborted=failed, in_flight=now.num_sampled)
            assert now.num_sampled == kept.num_sampled + 3 + 4
            store.consumed(batch(0, [now]), REPORT, trained([now]))
            require_balance(store, folder, aborted=failed, trained=now.num_sampled)
        with read(folder) as run:
            assert_same_group(run.group(0), now)
            assert [rollout.sample for rollout in run.group(0, 0).rollouts] == [3]
            endings = run.query("SELECT attempt, ending FROM endings ORDER BY attempt")
            assert [tuple(row) for row in endings] == [(0, "recycled"), (1, "consumed")]

    def test_what_was_recycled_is_found_again_when_the_process_dies_before_it_is_stored(self, records, folder, stopped):
        for attempt in (1, 2):
            with records.open(folder) as store:  # closed without a word about the attempt
                kept = take_up(store, folder)
                assert kept.admission.attempt == 0
                require_balance(store, folder, aborted=stopped.rollouts[3].num_sampled, in_flight=kept.num_sampled)
                with read(folder) as run:
                    assert run.admission(0).attempt == attempt
        with records.open(folder) as store:
            assert take_up(store, folder, goes_on=False) is None
            require_balance(store, folder, aborted=stopped.num_sampled)
        with read(folder) as run:
            assert position_of(run).stopped == ()

    def test_an_attempt_that_is_stopped_again_holds_what_it_went_on_from(self, records, folder, stopped):
        with records.open(folder) as store:
            take_up(store, folder)
            store.discarded(replace(continued(stopped), failure="the run ended"), Fate.ABORTED, "the run ended")
            require_balance(store, folder, aborted=stopped.num_sampled + 3 + 4)
        with records.open(folder) as store:
            kept = take_up(store, folder)
            assert (kept.admission.attempt, kept.num_sampled) == (1, continued(stopped).num_sampled)

    def test_an_attempt_that_holds_nothing_of_it_leaves_it_aborted(self, records, folder, stopped):
        with records.open(folder) as store:
            take_up(store, folder)
            nothing = Group(admission=replace(stopped.admission, attempt=1), failure="the environment raised")
            store.retried(nothing)
            require_balance(store, folder, aborted=stopped.num_sampled)
            assert store.recycled.take(replace(stopped.admission, attempt=2)) is None

    @pytest.mark.parametrize("kind", [ROLLBACK, REMADE])
    @pytest.mark.parametrize("is_taken", [True, False])
    def test_nothing_goes_on_from_tokens_of_weights_that_do_not_count_any_more(
        self, records, folder, stopped, kind, is_taken
    ):
        with records.open(folder) as store:
            if is_taken:
                take_up(store, folder)
            else:
                store.lost([stopped.admission], "under way", stopped=[stopped], recycled=[can_go_on(stopped)])
            later = Branch(lineage=1, parent=0, first=2, kind=kind, reason="later")
            store.branched(later, [])
            failed = stopped.rollouts[3].num_sampled
            if kind == REMADE:  # versions below the first that differs count
                require_balance(store, folder, aborted=failed, in_flight=stopped.num_sampled - failed)
                store.branched(Branch(lineage=2, parent=1, first=1, kind=kind, reason="earlier"), [])
            require_balance(store, folder, aborted=stopped.num_sampled)
            assert store.recycled.take(replace(stopped.admission, attempt=1)) is None
            now = continued(stopped)
            store.retried(now, Fate.ABORTED, "cut off")
            anew = 0 if is_taken else now.num_sampled - 3 - 4  # as if drawn again
            require_balance(store, folder, aborted=now.num_sampled + failed + anew)

    def test_retention_leaves_what_was_recycled_until_the_next_attempt_is_stored(self, records, folder, stopped):
        def may_go() -> set[tuple[int, int]]:
            store.flush()
            with contextlib.closing(sqlite3.connect(folder.store)) as connection:
                return {(row.admission, row.attempt) for row in next_portion(connection, oldest=2, steps=0)}

        with records.open(folder) as store:
            take_up(store, folder)
            store.consumed(batch(0, [group(1)]), REPORT, trained([group(1)]))
            assert may_go() == {(1, 0)}
            now = continued(stopped)
            store.consumed(batch(1, [now]), REPORT, trained([now]))
            store.filled(group(2))
            failed, used = stopped.rollouts[3].num_sampled, group(1).num_sampled + now.num_sampled
            require_balance(store, folder, aborted=failed, trained=used, in_flight=group(2).num_sampled)
            assert may_go() == {(1, 0), (0, 1), (0, 0)}

    def test_recycled_tokens_survive_export_and_import(self, records, folder, stopped, tmp_path):
        with records.open(folder) as store:
            kept = take_up(store, folder)
            expected = {Fate.ABORTED: stopped.rollouts[3].num_sampled, Fate.IN_FLIGHT: kept.num_sampled}
        for form in ("parquet", "jsonl"):
            export_run(folder.path, tmp_path / form, form)
            import_run(tmp_path / form, tmp_path / f"again-{form}")
            with RunReader(tmp_path / f"again-{form}") as run:
                assert run.ledger() == expected
                [group_again] = position_of(run).stopped
                assert bits(can_go_on(group_again).rollouts[2].segments) == bits(stopped.rollouts[2].segments)
