"""`--allow-endpoint` on every road by which somebody else's word makes a service connect out."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import Authority
from tests.support.fake_engine import BLOCK_SIZE, FakeEngine
from tests.support.kube_api import NAMESPACE, SERVICE, KubeApi, slice_of
from tests.support.running_service import RunningService, free_port, wait_until

# What is registered may be in this network only, events on two ports; no connection is made to what
# is refused, so nothing listens there.
ALLOWED = "127.0.0.1:9-10"
INSIDE = "tcp://127.0.0.1:9"
OUTSIDE = "tcp://198.51.100.1:5557"
TRACKER = "lean_selector.slot_tracker"
QUICK = ("--discover-interval-secs", "0.05", "--discover-refresh-secs", "0.1")


def worker(**fields: object) -> dict[str, object]:
    return {
        "worker_id": 7,
        "endpoint": "http://127.0.0.1:9",
        "block_size": BLOCK_SIZE,
        "kv_events_endpoint": INSIDE,
        "replay_endpoint": INSIDE,
        **fields,
    }


def a_sync_port() -> tuple[str, str]:
    return "--replica-sync-port", str(free_port())


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with RunningService("--allow-endpoint", ALLOWED, *a_sync_port()) as running:
        yield running


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("endpoint", "http://198.51.100.1:8000", "endpoint"),
        ("kv_events_endpoint", OUTSIDE, "kv_events_endpoint"),
        ("kv_events_endpoints", {"0": INSIDE, "1": OUTSIDE}, "kv_events_endpoints[1]"),
        ("replay_endpoint", OUTSIDE, "replay_endpoint"),
        ("replay_endpoints", {"0": OUTSIDE}, "replay_endpoints[0]"),
    ],
)
def test_no_registration_and_no_change_names_an_endpoint_that_is_not_allowed(
    service: RunningService, field: str, value: Any, named: str
) -> None:
    endpoint = value if isinstance(value, str) else max(value.values())
    refusal = {"error": f"{named}: `{endpoint}` is not allowed by --allow-endpoint"}
    assert service.post("/workers", worker(**{field: value})) == (400, refusal)
    assert service.get("/workers") == (200, [])
    assert service.get("/kv_sources") == (200, [])
    status, registered = service.post("/workers", worker())
    assert (status, registered["lifecycle"]) == (201, "schedulable")
    try:
        change = {field: value, "max_num_batched_tokens": 5}
        assert service.request("PATCH", "/workers/7", change) == (400, refusal)
        assert service.post("/workers", worker(**{field: value})) == (400, refusal)
        assert service.get("/workers") == (200, [registered])
        sources = service.get("/kv_sources")[1]
        assert [source["endpoint"] for source in sources] == [INSIDE]
    finally:
        assert service.request("DELETE", "/workers/7")[0] == 200


def test_the_ports_of_further_ranks_are_judged_as_well(service: RunningService) -> None:
    ranks = {"0": INSIDE, "1": INSIDE, "2": INSIDE}
    body = worker(kv_events_endpoints=ranks, kv_events_endpoint=None, data_parallel_size=3)
    refusal = "replay_endpoint: `tcp://127.0.0.1:11` is not allowed by --allow-endpoint"
    assert service.post("/workers", body) == (400, {"error": refusal})


def test_no_peer_is_registered_that_is_not_allowed(service: RunningService) -> None:
    with RunningService("--allow-endpoint", ALLOWED, *a_sync_port(), module=TRACKER) as tracker:
        for each in (service, tracker):
            status, answer = each.post("/replica_sync/register_peer", {"endpoint": OUTSIDE})
            refusal = f"endpoint: `{OUTSIDE}` is not allowed by --allow-endpoint"
            assert (status, answer) == (400, {"error": refusal})
            assert each.get("/replica_sync/peers") == (200, [])
            assert each.post("/replica_sync/register_peer", {"endpoint": INSIDE})[0] == 201


# -- what is found ---------------------------------------------------------------------------------


def test_a_found_worker_that_is_not_allowed_is_shown_as_refused_and_never_asked(
    tmp_path: Path,
) -> None:
    listed = tmp_path / "workers.json"
    with FakeEngine() as engine, FakeEngine() as other, FakeEngine() as elsewhere:
        rows = [
            {"endpoint": engine.url},
            {"endpoint": other.url},
            {"endpoint": elsewhere.url, "kv_events_endpoint": OUTSIDE},
        ]
        listed.write_text(json.dumps(rows))
        ports = [engine.port, engine.events_port, elsewhere.port]
        allowed = ",".join(f"127.0.0.1:{port}" for port in ports)
        flags = ("--discover", f"file:{listed}", *QUICK, "--allow-endpoint", allowed)
        with RunningService(*flags) as service:
            wait_until(lambda: _is(service, engine.url, "registered"), "one is registered")
            error = f"`{other.url}` is not allowed by --allow-endpoint"
            assert _states(service)[other.url] == ("refused", error)
            wait_until(lambda: _is(service, elsewhere.url, "refused"), "the third has told all")
            error = f"kv_events_endpoint: `{OUTSIDE}` is not allowed by --allow-endpoint"
            assert _states(service)[elsewhere.url] == ("refused", error)
            asked = engine.asked.total()
            wait_until(lambda: engine.asked.total() > asked, "engines are asked again")
            assert not other.asked
            assert [each["endpoint"] for each in service.get("/workers")[1]] == [engine.url]


def _states(service: RunningService) -> dict[str, tuple[str, str | None]]:
    """Of each found worker: how far it has come, and why not further."""
    workers = service.get("/discovery")[1]["workers"]
    return {each["endpoint"]: (each["state"], each["last_error"]) for each in workers}


def _is(service: RunningService, endpoint: str, state: str) -> bool:
    return _states(service).get(endpoint, ("", None))[0] == state


# -- names that resolve to what is not allowed -----------------------------------------------------


@contextlib.contextmanager
def listener() -> Iterator[tuple[int, list[object]]]:
    """A port of this machine, and who connected to it."""
    seen: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, who = server.accept()
                    seen.append(who)
                    connection.close()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield server.getsockname()[1], seen
        finally:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)


def test_a_name_is_connected_to_only_at_addresses_that_are_allowed() -> None:
    """`localhost` may be registered, for it might be in the network; it is not."""
    flags = ("--allow-endpoint", "10.0.0.0/8", "--worker-health-interval-secs", "0.05")
    with (
        listener() as (http, http_seen),
        listener() as (events, events_seen),
        RunningService(*flags, *a_sync_port()) as service,
    ):
        endpoint = f"tcp://localhost:{events}"
        body = worker(
            endpoint=f"http://localhost:{http}",
            kv_events_endpoint=endpoint,
            replay_endpoint=endpoint,
        )
        assert service.post("/workers", body)[0] == 201
        assert service.post("/replica_sync/register_peer", {"endpoint": endpoint})[0] == 201
        words = "which is not allowed by --allow-endpoint"

        def source() -> Any:
            return service.get("/kv_sources")[1][0]

        wait_until(lambda: words in (source()["last_error"] or ""), "the source tells why")

        def peer() -> Any:
            return service.get("/replica_sync/peers?detail=true")[1]["peers"][0]

        wait_until(lambda: words in (peer()["last_error"] or ""), "the peer tells why")

        def polled() -> Any:
            health = service.get("/workers?detail=true")[1][0]["health"]
            return json.dumps(health)

        wait_until(lambda: words in polled(), "the poll tells why")
        assert not http_seen
        assert not events_seen


def test_a_found_peer_with_a_name_is_caught_up_from_only_at_addresses_that_are_allowed(
    tmp_path: Path,
) -> None:
    """A slice may name it. Whom a flag names is the operator's word."""
    authority = Authority()
    (tmp_path / "ca.crt").write_bytes(authority.pem)
    (tmp_path / "token").write_text("secret")
    with (
        KubeApi(authority.server("127.0.0.1")) as api,
        listener() as (found, found_seen),
        listener() as (given, given_seen),
    ):
        port = free_port()
        api.put(slice_of("peers", ["localhost"], port=port, port_name="replica-sync"))
        flags = (
            *a_sync_port(),
            *("--replica-sync-discover", f"kubernetes:{NAMESPACE}/{SERVICE}:replica-sync"),
            *("--replica-sync-discover-http-port", str(found)),
            *("--replica-sync-catch-up", f"http://localhost:{given}"),
            *("--kubernetes-api", api.url),
            *("--kubernetes-token-file", str(tmp_path / "token")),
            *("--kubernetes-ca-file", str(tmp_path / "ca.crt")),
            *("--allow-endpoint", f"localhost:{port}", "--allow-endpoint", "10.0.0.0/8"),
        )
        with NotAsked(*flags) as service:
            words = "which is not allowed by --allow-endpoint"
            wait_until(lambda: words in service.log(), "it tells why it does not ask")
            assert not found_seen
            assert given_seen


class NotAsked(RunningService):
    """Is not up before it has caught up."""

    def _is_up(self) -> bool:
        return True
