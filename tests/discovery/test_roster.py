"""The workers that discoveries name: who is registered, who leaves when, and what HTTP decides."""

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lean_selector.core.selection.shapes import Source, WorkerSpec
from lean_selector.discovery.particulars import Found, Particulars, worker_id_of
from lean_selector.discovery.roster import KnownWorker, Roster, WorkerState, by_state
from tests.support.driven_selector import DrivenSelector

A, B = "http://a:8000", "http://b:8000"
GRACE_S = 10.0
ENGINE = Particulars(model_name="m", block_size=4, kv_events_endpoints={0: "tcp://a:5557"})


class Driven:
    """A roster before a selector, whose engines say what the test has them say."""

    def __init__(self, defaults: Particulars | None = None, use_kv_events: bool = True) -> None:
        self.selecting = DrivenSelector(use_kv_events=use_kv_events)
        selector = self.selecting.selector
        self.catalog = selector.catalog
        self.sources = self.selecting.sources
        self.asked: list[str] = []
        self.gone: list[str] = []
        self.registered: list[int] = []
        self.warnings: list[str] = []  # of whatever is registered

        def register(spec: WorkerSpec, anew: bool) -> list[str]:
            self.registered.append(spec.worker_id)
            selector.upsert_worker(spec, self.selecting.now, anew=anew)
            return list(self.warnings)

        self.roster = Roster(
            selector.catalog,
            register,
            lambda worker_id: selector.remove_worker(worker_id, self.selecting.now),
            defaults=defaults or Particulars(),
            grace_s=GRACE_S,
            use_kv_events=use_kv_events,
            on_new=lambda known: self.asked.append(known.key),
            on_gone=lambda known: self.gone.append(known.key),
        )

    def find(
        self,
        *found: str | Particulars,
        by: str = "one",
        leaving: tuple[str, ...] = (),
        uids: dict[str, str] | None = None,
    ) -> None:
        entries = tuple(
            Particulars(endpoint=each) if isinstance(each, str) else each for each in found
        )
        self.roster.found(by, Found(entries, frozenset(leaving), uids or {}), self.selecting.now)

    def known(self, key: str) -> KnownWorker:
        return next(each for each in self.roster if each.key == key)

    def hear(self, key: str, engine: Particulars = ENGINE) -> None:
        self.roster.engine_answered(self.known(key), engine)

    def later(self, seconds: float) -> None:
        self.selecting.now += seconds
        self.roster.sweep(self.selecting.now)

    def post(self, worker_id: int, **fields: Any) -> None:
        """As POST /workers."""
        fields = {"model_name": "m", "block_size": 4, "kv_events_endpoint": "tcp://h:1", **fields}
        self.catalog.upsert(WorkerSpec(worker_id=worker_id, **fields))

    def book(self, key: str) -> None:
        """Reserve `r` on the worker of this endpoint."""
        self.selecting.reserve("r", (worker_id_of(key), 0), key=("m", "default"))

    def endpoints(self) -> list[str]:
        return sorted(worker.spec.endpoint or "" for worker in self.catalog.workers.values())


def entry(endpoint: str = A, **fields: Any) -> Particulars:
    """All that a worker cannot do without."""
    fields = {"model_name": "m", "block_size": 4, "events_port": 5557, **fields}
    return Particulars(endpoint=endpoint, **fields)


# -- registering -----------------------------------------------------------------------------------


def test_an_engine_that_was_found_is_registered_when_it_says_what_it_is() -> None:
    driven = Driven()
    driven.find(A)
    assert (driven.asked, driven.endpoints()) == ([A], [])
    assert by_state(driven.roster)[WorkerState.ASKING] == 1
    driven.hear(A)
    assert {state: n for state, n in by_state(driven.roster).items() if n} == {
        WorkerState.REGISTERED: 1
    }
    worker = driven.catalog.workers[worker_id_of(A)]
    assert (worker.lifecycle, worker.spec.endpoint, worker.spec.block_size) == ("schedulable", A, 4)
    assert driven.sources.subscribed == {(worker_id_of(A), 0): Source("tcp://a:5557", None)}


def test_an_entry_that_says_everything_is_registered_unasked() -> None:
    driven = Driven()
    driven.find(entry(worker_id=7, data_parallel_size=2, replay_port=6000))
    assert driven.asked == []
    assert driven.sources.subscribed == {
        (7, 0): Source("tcp://a:5557", "tcp://a:6000"),
        (7, 1): Source("tcp://a:5558", "tcp://a:6001"),
    }


def test_without_events_model_and_block_size_are_everything() -> None:
    driven = Driven(use_kv_events=False)
    driven.find(Particulars(endpoint=A, model_name="m", block_size=4))
    assert (driven.asked, driven.endpoints()) == ([], [A])


def test_an_entry_goes_before_the_engine_and_that_before_the_defaults() -> None:
    driven = Driven(
        Particulars(tenant_id="t", block_size=1, events_port=1, taints=frozenset({"x"}))
    )
    driven.find(Particulars(endpoint=A, model_name="mine", replay_endpoint="tcp://r:1"))
    driven.hear(A, Particulars(model_name="its", block_size=4, replay_endpoints={0: "tcp://s:1"}))
    spec = driven.catalog.workers[worker_id_of(A)].spec
    assert (spec.model_name, spec.tenant_id, spec.block_size) == ("mine", "t", 4)
    assert spec.taints == {"x"}
    assert spec.kv_events_endpoints == {0: "tcp://a:1"}
    assert (spec.replay_endpoint, spec.replay_endpoints) == ("tcp://r:1", {})


def test_what_nobody_says_leaves_a_worker_incomplete_for_all_to_see() -> None:
    driven = Driven()
    driven.find(A)
    driven.hear(A, Particulars(model_name="m", block_size=4))
    worker = driven.catalog.workers[worker_id_of(A)]
    assert worker.reasons == ["kv_events endpoint is required for dp_rank 0"]
    assert driven.known(A).state is WorkerState.REGISTERED


def test_a_block_size_that_nobody_tells_is_assumed_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    driven = Driven(Particulars(block_size=16))
    driven.find(Particulars(endpoint=A))
    driven.find(Particulars(endpoint=B))
    driven.hear(A, Particulars(model_name="m"))
    driven.hear(B, Particulars(model_name="m", block_size=16))
    lines = [each.getMessage() for each in caplog.records if "assumed" in each.getMessage()]
    assert [A in line and "16 tokens" in line for line in lines] == [True]


def test_what_is_probably_wrong_with_a_worker_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def logged() -> list[str]:
        return [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]

    driven = Driven()
    driven.warnings = ["one", "two"]
    for _ in range(3):
        driven.find(entry())
        driven.later(1)
    assert logged() == [f"discovered worker {A}: one; two"]
    driven.find(entry(total_kv_blocks=9))
    assert len(driven.registered) == 2
    assert len(logged()) == 1
    driven.warnings = []
    driven.find(entry(total_kv_blocks=10))
    driven.warnings = ["one"]
    driven.find(entry(total_kv_blocks=11))
    assert logged()[1:] == [f"discovered worker {A}: one"]
    assert driven.known(A).error is None


def test_a_field_that_was_dropped_is_ignored_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    for driven in (Driven(), Driven(Particulars(load_endpoint="tcp://a:1"))):
        caplog.clear()
        of_file = None if driven.roster.defaults.load_endpoint else "tcp://a:1"
        driven.find(entry(load_endpoint=of_file))
        assert driven.endpoints() == [A]
        assert "load_endpoint is ignored" in caplog.text


def test_an_endpoint_without_a_scheme_is_one_with_that_of_http() -> None:
    driven = Driven()
    driven.find(entry("a:8000", replay_port=6000))
    worker_id = worker_id_of(A)
    assert driven.sources.subscribed == {(worker_id, 0): Source("tcp://a:5557", "tcp://a:6000")}
    driven.post(5, endpoint="A:8000/")
    driven.post(6, endpoint="b:8000")
    driven.find(entry("a:8000"), entry(B))
    assert list(driven.catalog.workers) == [5, 6]
    assert [driven.known(key).state for key in (A, B)] == [WorkerState.BY_HTTP, WorkerState.BY_HTTP]


def test_what_cannot_be_registered_says_why_and_is_tried_again() -> None:
    driven = Driven()
    driven.find(Particulars(endpoint=A, tenant_id="t", routing_group="g"))
    driven.hear(A)
    assert driven.known(A).state is WorkerState.REFUSED
    assert "two names of one thing" in (driven.known(A).error or "")
    driven.find(A)
    assert driven.known(A).state is WorkerState.REGISTERED
    driven.hear(A, Particulars(model_name="m", block_size=4, data_parallel_size=5000))
    assert "exceeds the maximum" in (driven.known(A).error or "")
    assert driven.catalog.workers[worker_id_of(A)].spec.data_parallel_size is None, "it holds"


def test_the_same_answer_changes_nothing_and_another_one_does() -> None:
    driven = Driven()
    driven.find(A)
    for _ in range(3):
        driven.hear(A)
        driven.find(A)
    assert driven.registered == [worker_id_of(A)]
    driven.hear(A, msgspec.structs.replace(ENGINE, total_kv_blocks=9))
    assert driven.registered == 2 * [worker_id_of(A)]
    assert driven.sources.changes == [("subscribe", worker_id_of(A), 0)]
    driven.hear(A, msgspec.structs.replace(ENGINE, block_size=8))
    assert driven.catalog.workers[worker_id_of(A)].spec.block_size == 8


def test_an_engine_that_is_silent_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    driven = Driven()
    driven.find(A)
    driven.hear(A)
    driven.roster.failed(driven.known(A), "no answer")
    assert [each.levelname for each in caplog.records if "no answer" in each.message] == ["WARNING"]
    driven.later(1e6)
    assert (driven.endpoints(), driven.known(A).error) == ([A], "no answer")


def test_another_id_in_the_entry_is_another_worker() -> None:
    driven = Driven()
    driven.find(entry(worker_id=1))
    driven.find(entry(worker_id=2))
    assert list(driven.catalog.workers) == [2]
    driven.find(entry())
    assert list(driven.catalog.workers) == [worker_id_of(A)]


def test_of_two_with_one_id_the_first_has_it() -> None:
    driven = Driven()
    driven.find(entry(A, worker_id=1))
    driven.find(entry(B, worker_id=1), by="two")
    assert driven.endpoints() == [A]
    assert driven.known(B).error == f"worker_id 1 is that of {A}"


def test_an_id_goes_to_another_endpoint_when_its_holder_has_left() -> None:
    driven = Driven()
    driven.find(entry(A, worker_id=1))
    driven.find(entry(B, worker_id=1))
    assert (driven.known(B).state, driven.endpoints()) == (WorkerState.REFUSED, [A])
    driven.later(GRACE_S)
    assert (driven.known(B).error, driven.endpoints()) == (None, [B])


@pytest.mark.parametrize("shift", [1, 2])
def test_ids_change_hands_within_one_file(shift: int) -> None:
    hosts = [A, B, "http://c:8000"]
    driven = Driven()
    driven.find(*(entry(host, worker_id=at) for at, host in enumerate(hosts)))
    turned = {(at + shift) % 3: host for at, host in enumerate(hosts)}
    driven.find(*(entry(host, worker_id=at) for at, host in turned.items()))
    workers = driven.catalog.workers
    assert {each: workers[each].spec.endpoint for each in workers} == turned


# -- restarted engines -----------------------------------------------------------------------------


def test_a_fleet_restarts_with_other_blocks_one_engine_after_the_other() -> None:
    """The last one that had the old size takes it along, and its load goes like that of all."""
    driven = Driven()
    driven.find(A, B)
    driven.hear(A)
    driven.hear(B)
    driven.book(A)
    anew = msgspec.structs.replace(ENGINE, block_size=8)
    driven.hear(A, anew)
    a, b = (driven.catalog.workers[worker_id_of(host)] for host in (A, B))
    assert (a.lifecycle, b.lifecycle) == ("incomplete", "schedulable")
    driven.hear(B, anew)
    partition = driven.catalog.partitions["m", "default"]
    assert (partition.block_size, sorted(partition.workers)) == (8, sorted(partition.members))
    assert len(partition.workers) == 2
    assert not partition.slots.reservations


def test_a_restart_with_eagle_is_applied_and_a_draining_worker_still_drains() -> None:
    driven = Driven()
    driven.find(A)
    driven.hear(A)
    driven.catalog.patch(worker_id_of(A), {"lifecycle": "draining"})
    driven.hear(A, msgspec.structs.replace(ENGINE, is_eagle=True))
    worker = driven.catalog.workers[worker_id_of(A)]
    assert (worker.spec.is_eagle, worker.lifecycle) == (True, "draining")
    assert driven.catalog.partitions["m", "default"].is_eagle


def test_what_cannot_be_registered_leaves_the_old_size_and_load() -> None:
    driven = Driven()
    driven.find(A)
    driven.hear(A)
    driven.book(A)
    bad = msgspec.structs.replace(ENGINE, block_size=8, data_parallel_size=5000)
    driven.hear(A, bad)
    partition = driven.catalog.partitions["m", "default"]
    assert (partition.block_size, list(partition.slots.reservations)) == (4, ["r"])


def test_another_pod_at_the_same_endpoint_is_another_worker() -> None:
    driven = Driven()
    driven.find(A, uids={A: "first"})
    driven.hear(A)
    driven.book(A)
    partition = driven.catalog.partitions["m", "default"]
    for same in ({A: "first"}, {}, {A: "first"}):  # a uid that is not reported is no other uid
        driven.find(A, uids=same)
        assert list(partition.slots.reservations) == ["r"]
    driven.find()  # the pod ends, and its successor comes within the grace
    driven.find(A, by="two")
    driven.find(A, uids={A: "second"})
    assert (driven.endpoints(), driven.asked, driven.gone) == ([], [A, A], [A])
    driven.hear(A)
    assert not driven.catalog.partitions["m", "default"].slots.reservations


def test_another_pod_is_registered_where_the_last_one_was_deleted_but_not_over_http() -> None:
    driven = Driven()
    driven.find(entry(A), entry(B), uids={A: "1", B: "2"})
    driven.catalog.remove(worker_id_of(A))
    driven.post(worker_id_of(B), endpoint=B)
    driven.find(entry(A), entry(B), uids={A: "3", B: "4"})
    assert driven.known(A).state is WorkerState.REGISTERED
    assert driven.known(B).state is WorkerState.BY_HTTP


# -- leaving ---------------------------------------------------------------------------------------


def test_who_is_found_no_more_leaves_after_the_grace() -> None:
    driven = Driven()
    driven.find(entry(A), entry(B))
    driven.find()
    driven.later(GRACE_S - 1)
    assert driven.endpoints() == [A, B]
    driven.find(entry(B))  # in time: it was never away
    driven.later(1)
    assert (driven.endpoints(), driven.gone) == ([B], [A])
    assert len(driven.registered) == 2
    assert list(driven.sources.subscribed) == [(worker_id_of(B), 0)]


def test_who_is_said_to_end_leaves_at_once() -> None:
    driven = Driven()
    driven.find(entry(A), entry(B))
    driven.find(entry(B), leaving=(A,))
    assert driven.endpoints() == [B]


def test_who_is_found_twice_leaves_when_neither_finds_it() -> None:
    driven = Driven()
    driven.find(entry(A), by="one")
    driven.find(entry(A, taints=frozenset({"second"})), by="two")
    assert driven.catalog.workers[worker_id_of(A)].spec.taints == set(), "the first has the word"
    driven.find(by="one", leaving=(A,))
    driven.later(GRACE_S)
    assert driven.catalog.workers[worker_id_of(A)].spec.taints == {"second"}
    driven.find(by="two")
    driven.later(GRACE_S)
    assert driven.endpoints() == []


# -- HTTP has the last word ------------------------------------------------------------------------


def test_who_is_deleted_over_http_stays_away_until_it_is_found_anew() -> None:
    driven = Driven()
    driven.find(entry(A))
    driven.catalog.remove(worker_id_of(A))
    driven.later(1)
    driven.find(entry(A, taints=frozenset({"new"})))
    driven.later(1)
    assert (driven.known(A).state, driven.endpoints()) == (WorkerState.REMOVED, [])
    driven.find()
    driven.later(GRACE_S)
    driven.find(entry(A))
    assert driven.endpoints() == [A]


# -- whatever happens ------------------------------------------------------------------------------

HOSTS = [f"http://{name}:8000" for name in "abcd"]
SOME = st.sets(st.sampled_from(HOSTS))


class Story(RuleBasedStateMachine):
    """Two discoveries, a control plane over HTTP, and time."""

    def __init__(self) -> None:
        super().__init__()
        self.driven = Driven()
        self.named: dict[str, set[str]] = {"one": set(), "two": set()}
        self.by_http: dict[int, WorkerSpec] = {}

    @rule(by=st.sampled_from(["one", "two"]), hosts=SOME, size=st.sampled_from([4, 8]))
    def finds(self, by: str, hosts: set[str], size: int) -> None:
        self.named[by] = hosts
        self.driven.find(*(entry(host, block_size=size) for host in sorted(hosts)), by=by)

    @rule(ids=st.lists(st.sampled_from(range(2, 6)), max_size=4, unique=True))
    def gives_ids(self, ids: list[int]) -> None:
        """A file gives ids, and later the same ids to others."""
        hosts = HOSTS[: len(ids)]
        self.named["one"] = set(hosts)
        found = zip(hosts, ids, strict=True)
        self.driven.find(*(entry(host, worker_id=number) for host, number in found))

    @rule(host=st.sampled_from(HOSTS), worker_id=st.sampled_from([1, None]))
    def is_posted(self, host: str, worker_id: int | None) -> None:
        self.driven.post(worker_id or worker_id_of(host), endpoint=host)
        worker = self.driven.catalog.workers[worker_id or worker_id_of(host)]
        self.by_http[worker.spec.worker_id] = worker.spec

    @precondition(lambda self: self.driven.catalog.workers)
    @rule(data=st.data())
    def is_deleted(self, data: st.DataObject) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.driven.catalog.workers)))
        self.driven.catalog.remove(worker_id)
        self.by_http.pop(worker_id, None)

    @rule(seconds=st.sampled_from([0.5, GRACE_S]))
    def time_passes(self, seconds: float) -> None:
        self.driven.later(seconds)

    @invariant()
    def what_http_said_stands(self) -> None:
        workers = self.driven.catalog.workers
        assert all(workers[each].spec is spec for each, spec in self.by_http.items())

    @invariant()
    def every_source_is_that_of_a_schedulable_worker(self) -> None:
        workers = self.driven.catalog.workers.values()
        wanted = {(worker.spec.worker_id, rank) for worker in workers for rank in worker.sources}
        assert self.driven.sources.subscribed.keys() == wanted

    @invariant()
    def nobody_else_is_registered_than_who_is_named_or_leaves(self) -> None:
        known = {each.worker_id for each in self.driven.roster}
        assert self.driven.catalog.workers.keys() <= known | self.by_http.keys()

    def teardown(self) -> None:
        """When nothing more happens, who is named is there, unless HTTP has said otherwise."""
        self.driven.later(1)
        self.driven.later(GRACE_S)
        named = set().union(*self.named.values())
        assert {each.key for each in self.driven.roster} == named
        for each in self.driven.roster:
            worker = self.driven.catalog.workers.get(each.worker_id)
            ours = worker is not None and worker.spec is each.spec
            assert ours == (each.state is WorkerState.REGISTERED)
            assert each.state is not WorkerState.REFUSED
            if each.state is WorkerState.REMOVED:
                assert worker is None


test_whatever_happens = Story.TestCase
test_whatever_happens.settings = settings(max_examples=50, stateful_step_count=25)


# -- what outlives the process ---------------------------------------------------------------------


def restarted(before: Driven) -> Driven:
    """Another process with the same catalog."""
    after = Driven()
    for worker in before.catalog.workers.values():
        after.catalog.upsert(worker.spec)
    for kept in before.roster.kept():
        spec = None if kept.is_removed else after.catalog.workers[kept.worker_id].spec
        after.roster.take_back(kept, spec)
    return after


def test_after_a_restart_workers_are_the_discoverys_that_named_them() -> None:
    before = Driven()
    before.find(entry(A), entry(B))
    after = restarted(before)
    assert after.endpoints() == [A, B]
    after.later(1000.0)  # it fails to look for long
    assert after.endpoints() == [A, B]
    after.find(entry(A))
    assert after.endpoints() == [A, B]
    after.later(GRACE_S)
    assert after.endpoints() == [A]
    assert after.registered == []  # nothing was to be changed
    after.find(entry(A, block_size=8))
    worker = after.catalog.workers[worker_id_of(A)]
    assert (worker.spec.block_size, worker.lifecycle) == (8, "schedulable")


def test_a_pod_that_was_replaced_during_a_restart_is_another_worker() -> None:
    before = Driven()
    before.find(entry(A), uids={A: "first"})
    for uid, registered in (("first", []), ("second", [worker_id_of(A)])):
        after = restarted(before)
        after.find(entry(A), uids={A: uid})
        assert after.registered == registered


@pytest.mark.parametrize("worker_id", [None, 7])
def test_after_a_restart_an_engine_is_asked_what_it_is_now(worker_id: int | None) -> None:
    """Also where its entry says no more than was kept."""
    named = Particulars(endpoint=A, worker_id=worker_id)
    before = Driven()
    before.find(named)
    before.hear(A)
    after = restarted(before)
    after.find(B, by="another")  # which knows nothing of it
    assert after.asked == [B]
    for _ in range(2):
        after.find(named)
        assert (after.asked, after.endpoints()) == ([B, A], [A])
    after.hear(A)
    assert after.registered == []


def test_after_a_restart_what_was_said_over_http_stands() -> None:
    before = Driven()
    before.find(entry(A), entry(B))
    before.catalog.remove(worker_id_of(A))
    before.post(worker_id_of(B), endpoint=B)
    after = restarted(before)
    assert after.endpoints() == [B]
    after.find(entry(A), entry(B))
    assert after.endpoints() == [B]
    assert after.known(A).state is WorkerState.REMOVED
    assert after.known(B).state is WorkerState.BY_HTTP
    after.find(entry(B))
    after.later(GRACE_S)
    after.find(entry(A), entry(B))  # anew
    assert after.endpoints() == [A, B]
