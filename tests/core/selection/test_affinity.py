"""Where sessions and targets take a request: hard and soft, with and without room there."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from lean_selector.core.errors import AllWorkersBusy, BadRequest, Conflict, Unavailable
from lean_selector.core.load.shapes import BusyThreshold, ReservationSpec
from lean_selector.core.selection.peer_sessions import PeerSessions
from lean_selector.core.selection.queue import Waiting
from lean_selector.core.selection.shapes import EXPLANATION, AffinityTarget, Placement
from lean_selector.core.sessions.shapes import SessionEvent, SessionVerdict
from lean_selector.core.sessions.table import SessionTable
from lean_selector.core.settings import SessionSettings
from lean_selector.wire.replica_frames import SESSION_TOPIC, UndecodableFrames, decode_session
from tests.support.driven_selector import DrivenSelector
from tests.support.reservations import session_event

TTL_S = 10.0


def fleet(*, soft: float | None = None, **settings: Any) -> DrivenSelector:
    """Worker 1 with much to prefill and ranks 0 and 1, worker 2 with nothing."""
    kind = SessionSettings(ttl_s=TTL_S, is_soft=soft is not None, bonus_blocks=soft or 0.0)
    driven = DrivenSelector(sessions=kind, **settings)
    driven.register(1, data_parallel_size=2)
    driven.register(2)
    driven.reserve("load 0", (1, 0), isl_tokens=100, prefill=100)
    driven.reserve("load 1", (1, 1), isl_tokens=90, prefill=90)
    return driven


@pytest.fixture
def driven() -> DrivenSelector:
    return fleet()


def sessions_of(driven: DrivenSelector) -> SessionTable:
    sessions = driven.partition.sessions
    assert sessions is not None
    return sessions


def rank_of(outcome: Placement | Waiting) -> tuple[int, int]:
    assert isinstance(outcome, Placement)
    return outcome.worker_id, outcome.dp_rank


def select(driven: DrivenSelector, session_id: str | None = "s", **changes: Any) -> tuple[int, int]:
    request = driven.request([], 16, session_id=session_id, **changes)
    return rank_of(driven.submit("select", request))


def book(driven: DrivenSelector, name: str, session_id: str = "s", **changes: Any) -> Any:
    return rank_of(driven.book(name, session_id=session_id, **changes))


# -- hard ------------------------------------------------------------------------------------------


def test_an_id_that_a_peer_booked_binds_no_session(driven: DrivenSelector) -> None:
    driven.partition.slots.book(ReservationSpec("a", 1, 0), b"", driven.now, router_id=77)
    with pytest.raises(Conflict, match="Request a already exists"):
        book(driven, "a")
    assert len(sessions_of(driven)) == 0


def test_a_rank_that_vanished_is_ignored_until_a_booking_binds_anew(driven: DrivenSelector) -> None:
    book(driven, "a", allowed={1})
    driven.register(1)  # one rank
    assert select(driven) == (2, 0)
    driven.register(1, data_parallel_size=2)
    assert select(driven) == (1, 1)  # it came back first
    driven.remove(1)
    assert select(driven) == book(driven, "b") == (2, 0)
    driven.register(1, data_parallel_size=2)
    driven.reserve("load", (2, 0), prefill=16)
    assert select(driven) == (2, 0)


def test_a_hard_session_goes_to_its_rank_though_that_is_busy_and_is_shed_with_all_others() -> None:
    driven = fleet()
    book(driven, "a", allowed={1})
    driven.partition.set_threshold(BusyThreshold(active_prefill_tokens=50))
    assert select(driven) == (1, 1)
    driven.reserve("load 2", (2, 0), isl_tokens=100, prefill=100)
    with pytest.raises(AllWorkersBusy):
        select(driven)


def test_a_session_does_not_enter_the_question_whether_to_wait() -> None:
    driven = fleet(queue_threshold=50.0)
    driven.selector.reservations.free("load 1", driven.now)
    assert book(driven, "a", allowed={1}) == (1, 1)
    driven.reserve("load 1", (1, 1), isl_tokens=90, prefill=90)
    assert book(driven, "b") == (1, 1)  # worker 2 is idle
    driven.reserve("load 2", (2, 0), isl_tokens=100, prefill=100)
    assert isinstance(driven.book("c", session_id="s"), Waiting)
    driven.selector.reservations.free("load 2", driven.now)
    assert driven.placed("c") == (1, 1)


def test_who_waits_goes_where_its_session_was_bound_meanwhile() -> None:
    driven = fleet(queue_threshold=50.0)
    driven.reserve("load 2", (2, 0), isl_tokens=100, prefill=100)
    assert isinstance(driven.book("a", session_id="s"), Waiting)
    assert isinstance(driven.book("b", session_id="s"), Waiting)
    driven.selector.reservations.free("load 1", driven.now)
    assert driven.placed("a") == driven.placed("b") == (1, 1)


def test_while_they_are_off_a_session_counts_for_nothing() -> None:
    driven = DrivenSelector()
    driven.register(1)
    assert driven.partition.sessions is None
    assert driven.partition.slots.on_ended is None
    assert book(driven, "a") == (1, 0)


def test_a_booking_on_another_rank_of_the_worker_is_named_so(driven: DrivenSelector) -> None:
    sessions = sessions_of(driven)
    book(driven, "a", allowed={1})
    driven.register(1, data_parallel_size=2, taints=frozenset({"t"}))
    sessions.apply(session_event("default", "default", "s", 1, 0, 2**40, 9), driven.now)
    pinned = driven.request([], 16, session_id="s", pin=(1, 1))
    pinned.books, pinned.reservation_id = True, "b"
    with pytest.raises(BadRequest, match=r"^session s is bound to DP rank 0, not 1$"):
        driven.submit("b", pinned)


def test_a_target_is_gone_to_if_that_is_allowed_and_else_ignored(driven: DrivenSelector) -> None:
    assert select(driven, None, target=AffinityTarget(1, 0)) == (1, 0)
    assert select(driven, None, target=AffinityTarget(1, None)) == (1, 1)
    assert select(driven, None, target=AffinityTarget(1, 9)) == (2, 0)
    assert select(driven, None, target=AffinityTarget(9, None)) == (2, 0)
    assert select(driven, None, target=AffinityTarget(1, None), allowed={2}) == (2, 0)


def test_a_target_elsewhere_than_the_pin_is_refused(driven: DrivenSelector) -> None:
    with pytest.raises(BadRequest, match=r"^pinned worker 2 is not in allowed worker set$"):
        select(driven, None, target=AffinityTarget(1, None), pin=(2, 0))
    assert select(driven, None, target=AffinityTarget(9, None), pin=(2, 0)) == (2, 0)
    with pytest.raises(Unavailable):
        select(driven, None, target=AffinityTarget(1, 0), pin=(1, 1))
    assert select(driven, None, target=AffinityTarget(1, None), pin=(1, 0)) == (1, 0)
    assert select(driven, None, target=AffinityTarget(1, 7), pin=(1, 1)) == (1, 1)


# -- soft ------------------------------------------------------------------------------------------


def test_a_soft_session_stays_until_another_rank_is_cheaper_by_more_than_the_bonus() -> None:
    driven = fleet(soft=30.0)  # blocks of 4 tokens: 90 of them are 22.5
    assert book(driven, "a", allowed={1}) == (1, 1)
    assert select(driven) == (1, 1)
    driven.reserve("more", (1, 1), isl_tokens=40, prefill=40)
    assert select(driven) == book(driven, "b") == (2, 0)
    driven.selector.reservations.free("load 1", driven.now)
    assert select(driven) == (2, 0)  # there it is bound now
    assert sessions_of(driven).counts.moved == 1


def test_under_latency_the_bonus_is_worth_as_much_prefill() -> None:
    driven = fleet(soft=30.0, policy="latency")
    assert book(driven, "a", allowed={1}) == (1, 1)
    assert select(driven) == (1, 1)


def test_a_soft_session_is_never_refused_and_never_goes_to_a_busy_rank() -> None:
    driven = fleet(soft=1e9)
    assert book(driven, "a", allowed={1}) == (1, 1)
    driven.partition.set_threshold(BusyThreshold(active_prefill_tokens=50))
    assert select(driven) == (2, 0)
    assert book(driven, "b", allowed={2}) == (2, 0)
    assert sessions_of(driven).counts.refused == 0


# -- explained -------------------------------------------------------------------------------------


def explanation(driven: DrivenSelector, **changes: Any) -> Any:
    outcome = driven.submit("why", driven.request([], 16, adds=EXPLANATION, **changes))
    assert isinstance(outcome, Placement)
    return outcome.explain


def test_an_explanation_says_where_the_session_is_bound_and_whom_that_leaves_out(
    driven: DrivenSelector,
) -> None:
    book(driven, "a", allowed={1})
    why = explanation(driven, session_id="s")
    session = why.session
    assert (session.session_id, session.mode, session.bound) == ("s", "hard", True)
    assert (session.worker_id, session.dp_rank, session.reservations) == (1, 1, 1)
    assert [row.filtered for row in why.ranks] == ["affinity", None, "affinity"]
    assert why.drawn == "only_candidate"
    unbound = explanation(driven, session_id="t").session
    assert (unbound.bound, unbound.worker_id, unbound.reservations) == (False, None, 0)


def test_an_explanation_has_the_bonus_in_the_cost() -> None:
    driven = fleet(soft=30.0)
    book(driven, "a", allowed={1})
    plain = explanation(driven).ranks
    favoured = explanation(driven, session_id="s").ranks
    assert [row.session_bonus_blocks for row in favoured] == [0.0, 30.0, 0.0]
    assert [row.cost for row in favoured] == [
        plain[0].cost,
        pytest.approx(plain[1].cost - 30.0),
        plain[2].cost,
    ]


# -- peers -----------------------------------------------------------------------------------------


def of_peer(
    worker_id: int,
    *,
    scope: tuple[str, str] = ("default", "default"),
    session_id: str = "p",
    dp_rank: int = 0,
    writer_id: int = 9,
) -> SessionEvent:
    return session_event(*scope, session_id, worker_id, dp_rank, 5, writer_id)


def test_what_a_peer_tells_counts_where_its_worker_is_registered(driven: DrivenSelector) -> None:
    peers = PeerSessions(driven.selector.catalog, writer_id=4)
    driven.register(3, endpoint=None)
    driven.register(5, model_name="other")
    told = [
        (of_peer(1), SessionVerdict.BOUND),
        (of_peer(1, writer_id=4), SessionVerdict.OWN),
        (of_peer(9), SessionVerdict.UNKNOWN_WORKER),
        (of_peer(5), SessionVerdict.UNKNOWN_WORKER),
        (of_peer(5, scope=("other", "default")), SessionVerdict.BOUND),
        (of_peer(1, scope=("default", "x")), SessionVerdict.UNKNOWN_PARTITION),
        (of_peer(3, session_id="q"), SessionVerdict.BOUND),  # incomplete: of no use yet
        (of_peer(1, session_id="r", dp_rank=7), SessionVerdict.BOUND),
    ]
    for event, verdict in told:
        assert peers.apply(event, driven.now) is verdict
    assert select(driven, "p") == (1, 0)
    assert select(driven, "q") == select(driven, "r") == (2, 0)
    assert peers.counts[SessionVerdict.BOUND] == 4


def test_sessions_of_peers_are_listed_until_they_expire(driven: DrivenSelector) -> None:
    peers = PeerSessions(driven.selector.catalog, writer_id=4)
    driven.register(7)
    for number in range(3):
        peers.apply(of_peer(7, session_id=f"{number}"), driven.now, 2.0)
    assert len(list(peers.live(driven.now))) == 3
    driven.now = TTL_S - 1.0  # two seconds it had been idle at the peer
    peers.expire_and_republish(driven.now, 10)
    assert len(sessions_of(driven)) == 0


def test_a_replica_without_sessions_keeps_none_of_a_peers_and_has_none_to_list() -> None:
    driven = DrivenSelector()
    driven.register(1)
    peers = PeerSessions(driven.selector.catalog, writer_id=4)
    assert peers.apply(of_peer(1), driven.now) is SessionVerdict.OFF
    peers.expire_and_republish(driven.now, 10)
    assert list(peers.live(driven.now)) == []


# -- what the reference did with frames of a peer --------------------------------------------------

VECTORS = json.loads(
    (Path(__file__).parents[2] / "data" / "session_affinity_frames.json").read_text()
)
# Seconds that pass before a case; the time to live was 3.
PASSES = {
    "2 s later, older version of the same binding: does not refresh": 2.0,
    "3.4 s after the first: gone": 1.4,
    "2 s later, same version again: refreshes": 2.0,
    "1.7 s after the refresh: still bound": 1.7,
    "3.6 s after it: gone": 1.9,
}
OTHERWISE = (
    "sequence 2^64-1: accepted, and from then on",  # D39
    "bytes after the map: accepted",  # which no sender writes
)


def test_sessions_go_where_frames_of_a_peer_sent_them_at_the_reference() -> None:
    injected = VECTORS["injected"]
    own = next(case for case in injected if "messages_published" in case)["messages_published"][0]
    writer_id, first = own["decoded"]["writer_id"], own["decoded"]["sequence"]
    told: list[SessionEvent] = []
    driven = DrivenSelector(sessions=SessionSettings(ttl_s=3.0))
    assert driven.selector.sessions is not None
    driven.selector.sessions.publish(writer_id, lambda: first, told.append)
    driven.register(1, data_parallel_size=2, model_name="m")
    driven.register(2, model_name="m")
    driven.register(3, model_name="m", tenant_id="g")
    driven.register(9, model_name="m", endpoint=None)
    partition = driven.selector.catalog.ready_partition("m", "default")
    for dp_rank in (0, 1):
        name = f"load {dp_rank}"
        driven.reserve(name, (1, dp_rank), isl_tokens=90, prefill=90, key=("m", "default"))
    peers = PeerSessions(driven.selector.catalog, writer_id)
    played = 0

    def goes_to(session_id: str, scope: str, **changes: Any) -> list[int]:
        partition = driven.selector.catalog.ready_partition("m", scope)
        request = driven.request([], 16, session_id=session_id, **changes)
        outcome = driven.selector.select_now(partition, request, driven.now)
        return [outcome.worker_id, outcome.dp_rank]

    for case in injected:
        what = case["what"]
        driven.now += PASSES.get(what, 0.0)
        told.clear()
        if what == "local booking binds session loc (lease held)":
            goes_to("loc", "default", books=True, reservation_id="loc")
        elif what.startswith("DELETE of the booking"):
            driven.selector.reservations.free("loc", driven.now)
        elif what.startswith("next local binding"):
            goes_to("loc2", "default", books=True, reservation_id="loc2")
        if "messages_published" in case and not what.startswith("(defect)"):
            played += 1
            published = [each["decoded"] for each in case["messages_published"]]
            assert [(e.session_id, e.sequence, e.writer_id) for e in told] == [
                (e["session_id"], e["sequence"], e["writer_id"]) for e in published
            ], what
        if "went_to" not in case or what in OTHERWISE:
            continue
        played += 1
        frames = [bytes.fromhex(frame) for frame in case["frames_hex"]]
        if frames[0] == SESSION_TOPIC:
            with contextlib.suppress(UndecodableFrames):
                peers.apply(decode_session(frames), driven.now)
        if "drawn" in what:  # either rank of worker 1
            assert goes_to(case["then_select_with_session"], "default")[0] == 1, what
            continue
        scope = "g" if what == "other partition" else "default"
        assert goes_to(case["then_select_with_session"], scope) == case["went_to"], what
    assert played > 40
    assert partition.sessions is not None
