"""Ejections against a naive model, and what the model does not look at."""

from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lean_selector.core.health.ejections import (
    EJECTED,
    FAILED,
    IN_SERVICE,
    OK,
    POLL,
    PROBATION,
    REFUSED,
    Ejections,
    outcome_of_status,
)
from lean_selector.core.settings import EjectionSettings

A, B = (1, 0), (2, 0)
FOUR = 4


def ejections(**changes: Any) -> Ejections:
    return Ejections(EjectionSettings(**{"failures": 3, "base_s": 10.0, **changes}))


def fail(of: Ejections, *keys: tuple[int, int], times: int = 3) -> None:
    for _ in range(times):
        of.record_outcome(keys, FAILED, FOUR, 0.0)


def test_an_ejected_rank_has_the_reason_and_when_it_returns() -> None:
    some = ejections(failed_polls=2)
    fail(some, A)
    assert some.ranks[A].reason == "3 consecutive requests failed, the last: it failed"
    assert some.ranks[A].returns_at == 10.0
    for _ in range(2):
        some.poll([B], "status 503", FOUR, 0.0)
    assert some.ranks[B].reason == "2 consecutive polls failed: status 503"


def test_without_a_limit_reports_eject_nobody() -> None:
    some = ejections(failures=0)
    fail(some, A, times=100)
    assert some.out == set()


def test_a_fleet_that_works_is_nothing_to_remember() -> None:
    some = ejections()
    some.record_outcome([A], OK, FOUR, 0.0)
    some.poll([A], None, FOUR, 0.0)
    fail(some, A, times=1)
    some.record_outcome([A], OK, FOUR, 0.0)
    assert some.ranks == {}


@pytest.mark.parametrize(
    ("statuses", "outcome"),
    [
        ((200, 204, 302, 400, 401, 404, 413, 422, 499), "ok"),
        ((429, 503, 529), None),
        ((500, 501, 502, 504, 528, 530, 599), "failed"),
    ],
)
def test_who_answers_is_well_unless_it_says_that_it_failed_or_is_full(
    statuses: tuple[int, ...], outcome: str | None
) -> None:
    assert {outcome_of_status(each) for each in statuses} == {outcome}


# -- the naive model -------------------------------------------------------------------------------

WORKERS = {1: [0, 1], 2: [0, 1], 3: [0]}
KEYS = [(worker_id, dp_rank) for worker_id, ranks in WORKERS.items() for dp_rank in ranks]
BASE, LONGEST, LIMIT, POLLS = 4, 10, 2, 2


class Naive(msgspec.Struct):
    """A rank as it counts down second by second; it knows no moments, only what is left."""

    failures: int = 0
    polls: int = 0
    times: int = 0
    sentence: int = 0  # seconds of the ejection by reports
    left: int = 0  # of it
    down: bool = False
    trial: int = 0  # seconds of probation left
    served: int = 0  # seconds in service since it was healed
    refused: bool = False

    @property
    def out(self) -> bool:
        return self.down or self.left > 0

    def second(self) -> None:
        was_out = self.out
        if self.left:
            self.left -= 1
        if was_out and not self.out:
            self.trial, self.failures = self.sentence, 0
        elif self.trial and not was_out:
            if self.trial == 1:
                self.heal()
            else:
                self.trial -= 1
        elif not was_out:
            self.served += 1

    def heal(self) -> None:
        if self.trial or self.out:
            self.served = 0
        self.failures = self.trial = self.left = 0
        self.refused = False


class EjectionMachine(RuleBasedStateMachine):
    @initialize(share=st.sampled_from([30.0, 60.0, 100.0]))
    def begin(self, share: float) -> None:
        self.now, self.share = 0, share
        self.is_current = True  # the real one was told the time, at least by some event
        self.real = Ejections(
            EjectionSettings(
                failures=LIMIT,
                failed_polls=POLLS,
                base_s=float(BASE),
                longest_s=float(LONGEST),
                most_percent=share,
            )
        )
        self.naive = {key: Naive() for key in KEYS}
        self.ejected, self.spared = dict.fromkeys((REFUSED, FAILED, POLL), 0), 0

    def out(self) -> set[tuple[int, int]]:
        return {key for key, each in self.naive.items() if each.out}

    def may_go(self, due: list[tuple[int, int]]) -> bool:
        after = self.out() | set(due)
        may = len({key[0] for key in after}) == 1 or len(after) / len(KEYS) * 100 <= self.share
        self.spared += 0 if may else len(due)
        return may

    def told(self, changed: bool, before: set[tuple[int, int]]) -> None:
        """Whoever is out changes with a word of it."""
        assert changed or self.real.out == before
        self.is_current = True

    @rule(seconds=st.integers(1, 6), looks=st.booleans())
    def time_passes(self, seconds: int, looks: bool) -> None:
        for _ in range(seconds):
            self.now += 1
            for each in self.naive.values():
                each.second()
        self.is_current = looks
        if looks:
            before = set(self.real.out)
            self.told(self.real.settle(float(self.now)), before)

    @rule(
        rank=st.sampled_from(KEYS),
        whole=st.booleans(),
        outcome=st.sampled_from([OK, FAILED, FAILED, REFUSED]),
    )
    def record_outcome(self, rank: tuple[int, int], whole: bool, outcome: str) -> None:
        keys = [key for key in KEYS if key[0] == rank[0]] if whole else [rank]
        before = set(self.real.out)
        self.told(self.real.record_outcome(keys, outcome, len(KEYS), float(self.now)), before)
        if outcome == OK:
            panic = len(self.out()) == len(KEYS)
            for each in (self.naive[key] for key in keys):
                if each.out and not panic:
                    continue
                if each.out:
                    each.polls, each.down = 0, False
                    each.served = 0
                each.heal()
            return
        due = []
        for key in keys:
            each = self.naive[key]
            each.failures += 1
            each.refused = outcome == REFUSED
            if not each.out and (each.trial or each.failures >= LIMIT):
                due.append(key)
        if due and self.may_go(due):
            self.ejected[outcome] += len(due)
            for each in (self.naive[key] for key in due):
                if not each.trial:
                    each.times = max(0, each.times - each.served // BASE)
                each.times += 1
                each.sentence = each.left = min(LONGEST, BASE * each.times)
                each.trial = 0

    @rule(worker_id=st.sampled_from(sorted(WORKERS)), is_well=st.booleans())
    def poll(self, worker_id: int, is_well: bool) -> None:
        keys = [key for key in KEYS if key[0] == worker_id]
        fault, before = None if is_well else "no answer", set(self.real.out)
        self.told(self.real.poll(keys, fault, len(KEYS), float(self.now)), before)
        due = []
        for key in keys:
            each = self.naive[key]
            if is_well:
                was_out, each.down, each.polls = each.out, False, 0
                if was_out and each.refused:
                    each.left = 0
                if was_out and not each.out:
                    each.trial, each.failures = BASE, 0
                continue
            each.polls += 1
            if each.polls >= POLLS and not each.down:
                if each.out:
                    each.down = True
                else:
                    due.append(key)
        if due and self.may_go(due):
            self.ejected[POLL] += len(due)
            for each in (self.naive[key] for key in due):
                each.down, each.trial = True, 0

    @rule(worker_id=st.sampled_from(sorted(WORKERS)))
    def forget(self, worker_id: int) -> None:
        keys = [key for key in KEYS if key[0] == worker_id]
        before = set(self.real.out)
        assert self.real.forget(keys) or self.real.out == before
        self.naive.update((key, Naive()) for key in keys)

    @invariant()
    def the_same_are_out_and_on_probation(self) -> None:
        if not self.is_current:
            return
        assert self.real.out == self.out()
        assert (self.real.ejected, self.real.spared) == (self.ejected, self.spared)
        for key, each in self.naive.items():
            health = self.real.ranks.get(key)
            state = IN_SERVICE if health is None else health.state
            assert state == (EJECTED if each.out else PROBATION if each.trial else IN_SERVICE)

    @invariant()
    def some_are_left_or_those_that_are_out_are_one_workers(self) -> None:
        out = self.real.out
        assert len({key[0] for key in out}) <= 1 or len(out) * 100 <= self.share * len(KEYS)


TestEjectionsAgainstTheModel = EjectionMachine.TestCase
