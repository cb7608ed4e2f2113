"""Sessions as their users see them: over HTTP, with the frames that peers exchange."""

import contextlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from lean_selector.core.sessions.shapes import SessionEvent
from lean_selector.wire.replica_frames import SESSION_TOPIC, decode_session, encode_session
from tests.support.prometheus_tools import scrape
from tests.support.running_service import DEADLINE_S, RunningService, free_port, wait_until

ON = ("--session-affinity-ttl-secs", "60", "--use-kv-events", "false")
VECTORS = json.loads(
    (Path(__file__).parents[1] / "data" / "session_affinity_frames.json").read_text()
)


class Fleet(RunningService):
    """A service with workers 1 (ranks 0 and 1, with much to prefill) and 2."""

    def __enter__(self) -> "Fleet":
        super().__enter__()
        self.add_workers()
        for dp_rank in (0, 1):
            self.done(
                "POST",
                "/reservations",
                {
                    **{"model_name": "m", "reservation_id": f"load {dp_rank}", "worker_id": 1},
                    **{"dp_rank": dp_rank, "sequence_hashes": [], "isl_tokens": 90},
                    "effective_prefill_tokens": 90,
                },
            )
        return self

    def add_workers(self) -> None:
        for worker_id, size in ((1, 2), (2, 1)):
            body = {"worker_id": worker_id, "model_name": "m", "block_size": 4}
            more = {"endpoint": f"http://w{worker_id}", "data_parallel_size": size}
            self.done("POST", "/workers", {**body, **more})

    def done(self, method: str, path: str, body: object = None) -> Any:
        status, answer = self.request(method, path, body)
        assert status in (200, 201), (status, answer)
        return answer

    def select(self, session_id: object = None, **fields: Any) -> tuple[int, int]:
        body = {"model_name": "m", "token_ids": [1, 2, 3, 4, 5], **fields}
        if session_id is not None:
            body["session_id"] = session_id
        answer = self.done("POST", "/select", body)
        return answer["worker_id"], answer["dp_rank"]

    def book(self, name: str, session_id: str, **fields: Any) -> tuple[int, Any]:
        body = {"model_name": "m", "token_ids": [1, 2, 3, 4, 5], "reservation_id": name}
        return self.request(
            "POST", "/select_and_reserve", {**body, "session_id": session_id, **fields}
        )


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(*ON) as service:
        yield service


def test_a_session_stays_where_it_was_booked(fleet: Fleet) -> None:
    assert fleet.select("s") == (2, 0)
    assert fleet.book("a", "s", allowed_worker_ids=[1])[0] == 200
    there = fleet.select("s")
    assert there[0] == 1
    assert fleet.select("another") == (2, 0)
    context = {"session_id": "s", "parent_session_id": "p", "session_final": True}
    assert fleet.select("another", session_context=context) == there
    assert fleet.select("s", pinned_worker={"worker_id": 2, "dp_rank": 0}) == (2, 0)
    assert fleet.select("s", affinity_target={"worker_id": 2}) == (2, 0)
    fleet.done("DELETE", "/reservations/a")
    assert fleet.select("s") == there


def test_booking_by_its_id_what_a_select_chose_binds_its_session(fleet: Fleet) -> None:
    def book_chosen(selection_id: str) -> tuple[int, Any]:
        body = {"model_name": "m", "selection_id": selection_id}
        return fleet.request("POST", "/reservations", body)

    there = fleet.select("later", selection_id="k", allowed_worker_ids=[1])
    assert fleet.select("later") == (2, 0)
    assert book_chosen("k")[0] == 201
    assert fleet.select("later") == there
    fleet.select("later", selection_id="l", allowed_worker_ids=[2])
    assert book_chosen("l") == (400, {"error": "session later is bound to worker 1, not 2"})
    assert book_chosen("l")[0] == 404  # it was used up
    assert fleet.select("later") == (2, 0)
    pin = {"worker_id": 1, "dp_rank": 0}
    fleet.select("pinned", selection_id="m", pinned_worker=pin)
    assert book_chosen("m")[0] == 201
    assert fleet.select("pinned") == (2, 0)


@pytest.mark.parametrize("route", ["/select", "/select_and_reserve"])
def test_an_id_that_is_too_long_is_refused_before_all_else_that_is_wrong(
    fleet: Fleet, route: str
) -> None:
    refused = 400, {"error": "session affinity ID must not exceed 256 bytes"}
    too_long = "é" * 129
    body = {"model_name": "m", "token_ids": [], "session_id": too_long}
    assert fleet.request("POST", route, body) == refused
    context = {"session_id": "short", "session_context": {"session_id": too_long}}
    assert fleet.request("POST", route, {**body, **context}) == refused
    # With a pin or a target the session is left alone.
    assert fleet.select(too_long, pinned_worker={"worker_id": 2, "dp_rank": 0}) == (2, 0)
    assert fleet.select(too_long, affinity_target={"worker_id": 2}) == (2, 0)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"session_id": 5}, "session_id"),
        ({"session_context": "s"}, "session_context"),
        ({"session_context": {}}, "session_id"),
        ({"session_context": {"session_id": None}}, "session_context.session_id"),
        ({"session_context": {"session_id": "a", "input_trigger": "typed"}}, "input_trigger"),
        ({"session_context": {"session_id": "a", "agent_headers": {"k": "v"}}}, "agent_headers"),
        ({"affinity_target": {}}, "worker_id"),
        ({"affinity_target": {"worker_id": 2**64}}, "worker_id"),
        ({"affinity_target": {"worker_id": 1, "dp_rank": -1}}, "dp_rank"),
    ],
)
def test_a_field_of_the_wrong_shape_is_named(
    fleet: Fleet, fields: dict[str, object], named: str
) -> None:
    body = {"model_name": "m", "token_ids": [1], **fields}
    status, answer = fleet.request("POST", "/select", body)
    assert status == 422
    assert named in answer["error"]


def test_the_explanation_and_the_metrics_tell_of_a_session(fleet: Fleet) -> None:
    assert fleet.book("e", "explained", allowed_worker_ids=[2])[0] == 200
    body = {"model_name": "m", "token_ids": [1], "session_id": "explained", "explain": True}
    why = fleet.done("POST", "/select", body)["explain"]
    assert why["session"] == {
        **{"session_id": "explained", "mode": "hard", "bound": True},
        **{"worker_id": 2, "dp_rank": 0, "reservations": 1},
    }
    assert [row["filtered"] for row in why["ranks"]] == ["affinity", "affinity", None]
    text = scrape(fleet.port)
    scope = 'model="m",tenant_id="default"'
    assert f'lean_selector_session_bookings_total{{{scope},result="followed"}} 0' in text
    assert f'lean_selector_sessions{{{scope},state="held"}}' in text


# -- peers ----------------------------------------------------------------------------------------


class Peer:
    """A PUB that the service hears, and a SUB that hears it."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", sync_port: int) -> None:
        self.pub = context.socket(zmq.PUB)
        self.endpoint = f"tcp://127.0.0.1:{self.pub.bind_to_random_port('tcp://127.0.0.1')}"
        self.sub = context.socket(zmq.SUB)
        self.sub.subscribe(b"dynamo.")
        self.sub.connect(f"tcp://127.0.0.1:{sync_port}")

    def hears_anything(self) -> bool:
        """True when something of sessions came within a moment."""
        while self.sub.poll(100):
            if self.sub.recv_multipart()[0] == SESSION_TOPIC:
                return True
        return False

    def heard_before(self, mark: str) -> list[list[bytes]]:
        """What was told of sessions before a session that is called so was booked."""
        messages: list[list[bytes]] = []
        while True:
            assert self.sub.poll(int(1000 * DEADLINE_S)), "the mark comes"
            frames = self.sub.recv_multipart()
            if frames[0] == SESSION_TOPIC:
                if decode_session(frames).session_id == mark:
                    return messages
                messages.append(frames)


@contextmanager
def peered(*flags: str) -> Iterator[tuple[Fleet, Peer]]:
    """A service and a peer that hear each other."""
    sync_port = free_port()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = Peer(context, sync_port)
    try:
        binds = ("--replica-sync-port", str(sync_port), "--replica-sync-peers", peer.endpoint)
        with Fleet(*ON, *binds, *flags) as service:

            def is_heard() -> bool:
                peer.pub.send_multipart([SESSION_TOPIC, encode_session(told("hello", 1))])
                return 'replica_sessions_total{result="bound"} 1' in scrape(service.port)

            wait_until(is_heard, "the service hears its peer")
            tries = iter(range(10_000))

            def hears() -> bool:
                service.book(f"try {next(tries)}", "tries")
                return peer.hears_anything()

            wait_until(hears, "the peer hears the service")
            service.book("began", "began")
            peer.heard_before("began")
            yield service, peer
    finally:
        context.destroy(linger=0)


def told(session_id: str, worker_id: int, dp_rank: int | None = 0) -> SessionEvent:
    return SessionEvent("m", "default", session_id, worker_id, dp_rank, 5, 77)


def test_bookings_and_releases_are_told_in_the_frames_of_the_reference() -> None:
    """The captured calls again: which messages each causes, by topic, session and version."""
    with peered() as (service, peer):
        steps = [step for step in VECTORS["captured"] if "/workers" not in step["caused_by"]]
        numbers: dict[int, int] = {}  # of the reference's sequences, in order
        ours: dict[int, int] = {}
        compared = 0
        for number, step in enumerate(steps[:10]):
            method, path, *body = step["caused_by"].split(" ", 2)
            sent = json.loads(body[0]) if body else None
            if sent and path == "/select_and_reserve":
                sent["reservation_id"] = sent.pop("selection_id")
            service.request(method, path, sent)
            service.book(f"mark {number}", f"mark {number}")
            messages = peer.heard_before(f"mark {number}")
            expected = [
                message["decoded"]
                for message in step["messages"]
                if message["topic"] == VECTORS["topic"]
            ]
            events = [decode_session(frames) for frames in messages]
            assert [
                (e.session_id, e.worker_id, ours.setdefault(e.sequence, len(ours))) for e in events
            ] == [
                (e["session_id"], e["worker_id"], numbers.setdefault(e["sequence"], len(numbers)))
                for e in expected
            ], step["caused_by"]
            for event, frames in zip(events, messages, strict=True):
                assert encode_session(event) == frames[1]
            compared += len(events)
        assert compared >= 5


def test_who_catches_up_takes_the_sessions_over_also_of_workers_that_come_later() -> None:
    ports = free_port(), free_port()
    first_flags = ("--replica-sync-port", str(ports[0]))
    with Fleet(*ON, *first_flags) as first:
        assert first.book("a", "s", allowed_worker_ids=[1])[0] == 200
        there = first.select("s")
        status, listed = first.request("GET", "/replica_sync/sessions")
        assert status == 200
        (session,) = listed["sessions"]
        assert (session["session_id"], session["worker_id"], session["idle_s"]) == ("s", 1, 0.0)
        second_flags = (
            *("--replica-sync-port", str(ports[1])),
            *("--replica-sync-peers", f"tcp://127.0.0.1:{ports[0]}"),
            *("--replica-sync-catch-up", f"http://127.0.0.1:{first.port}"),
        )
        with contextlib.ExitStack() as stack:
            second = Fleet(*ON, *second_flags)
            stack.callback(second.stop)
            RunningService.__enter__(second)
            wait_until(lambda: "1 sessions at" in second.log(), "the list was taken")
            second.add_workers()
            load = {"model_name": "m", "worker_id": 1, "sequence_hashes": [], "isl_tokens": 900}
            where = {"dp_rank": there[1], "effective_prefill_tokens": 900}
            second.done("POST", "/reservations", {**load, **where, "reservation_id": "busy"})
            wait_until(lambda: second.select("s") == there, "the session is known")


def test_a_replica_without_sessions_lists_none() -> None:
    flags = ("--use-kv-events", "false", "--replica-sync-port", str(free_port()))
    with RunningService(*flags) as service:
        empty = {"version": 1, "sessions": []}
        assert service.request("GET", "/replica_sync/sessions") == (200, empty)
    with RunningService(*ON) as service:
        assert service.request("GET", "/replica_sync/sessions")[0] == 409
