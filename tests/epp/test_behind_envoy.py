"""The endpoint picker behind a real Envoy: each body mode, and each way in which a request ends."""

import http.client
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.epp.behind_envoy import DUPLEX, MODES, RECIPE, SILENT_MODE, Picked
from tests.recipes.gateways import CHAT, chat
from tests.support.openai_worker import MODEL
from tests.support.prometheus_tools import parsed, scrape
from tests.support.running_service import wait_until

STREAMS = 1_000
PREFILL_COMPLETE = "/reservations/{reservation_id}/prefill_complete"


@pytest.fixture(scope="module", params=MODES)
def picked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Picked]:
    """One for all requests of a mode."""
    flags = ["--epp-fallbacks", "1"]
    with Picked(tmp_path_factory.mktemp("envoy"), MODES[request.param], *flags) as started:
        started.name = request.param
        yield started


def raw(picked: Picked, body: bytes, size: int | None = None) -> socket.socket:
    """A client that has sent a request, with less of its body than `size` if that is given."""
    client = socket.create_connection(("127.0.0.1", picked.gateway.port), timeout=60)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    client.sendall(f"{head}content-length: {size or len(body)}\r\n\r\n".encode() + body)
    return client


def metric(picked: Picked, name: str) -> int:
    lines = scrape(picked.selector.port, None).splitlines()
    return int(next(line for line in lines if line.startswith(f"lean_selector_{name} ")).split()[1])


def test_answers_are_whole_and_reservations_end(picked: Picked) -> None:
    for streams in (True, False):
        direct = picked.workers[0]
        body = chat("hello " * 40, stream=streams, max_tokens=20)
        connection = http.client.HTTPConnection("127.0.0.1", direct.port, timeout=60)
        with closing(connection):
            connection.request("POST", CHAT, json.dumps(body), {"content-type": "application/json"})
            expected = connection.getresponse().read()
        status, _, text = picked.ask(body)
        assert status == 200

        def shape(answer: bytes) -> bytes:
            return b"\n".join(
                line[-60:] if line.startswith(b"data: ") else b"" for line in answer.split(b"\n")
            )

        assert len(shape(text)) == len(shape(expected))
        assert text[-12:] == expected[-12:]
        picked.wait_until_free()
    assert picked.ask(b"", "/v1/models", "GET")[0] == 200
    assert picked.ask(b"", "/v1/models", "HEAD")[0] == 200


@pytest.mark.parametrize("size", [100_000, 1_100_000, 10_000_000])
def test_bodies_arrive_as_they_were_sent(picked: Picked, size: int) -> None:
    body = json.dumps(chat(f"{size:x}" * (size // 8))).encode()
    status, _, text = picked.ask(body)
    assert status == 200, text
    arrived = [each["body"] for each in picked.requests() if len(each["body"]) == len(body)]
    assert body.decode() in arrived
    picked.wait_until_free()


def test_trailers_and_empty_bodies_of_requests_pass(picked: Picked) -> None:
    body = json.dumps(chat("trailers")).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n".encode()
    head += b"transfer-encoding: chunked\r\n"
    trailers = b"trailer: x-sum\r\n\r\n%x\r\n%b\r\n0\r\nx-sum: 1\r\n\r\n" % (len(body), body)
    for rest, status in ((trailers, b"200"), (b"\r\n0\r\n\r\n", b"400")):  # the worker's own
        address = "127.0.0.1", picked.gateway.port
        with closing(socket.create_connection(address, timeout=60)) as client:
            client.sendall(head + rest)
            assert client.recv(65536)[9:12] == status
    picked.wait_until_free()


def test_a_client_that_leaves_frees_its_worker(picked: Picked) -> None:
    for more in ({"stall_after": 0}, {"stall_after": 3}, {}):
        body = json.dumps(chat("leaves", stream=True, max_tokens=2000, fake=more)).encode()
        client = raw(picked, body)
        wait_until(lambda: picked.selector.active() > 0, "it is reserved")
        if more != {"stall_after": 0}:
            assert client.recv(10)
        client.close()
        picked.wait_until_free()
    with closing(raw(picked, b'{"model": "m", "messages": [', size=10_000)):
        pass  # before its body is whole
    picked.wait_until_free()


def test_an_engine_that_fails_frees_its_reservation(picked: Picked) -> None:
    assert picked.ask(chat("fails", fake={"status": 500}))[0] == 500
    picked.wait_until_free()
    assert picked.ask(chat("breaks", fake={"breaks": True}))[0] == 503
    picked.wait_until_free()
    body = json.dumps(chat("dies", stream=True, fake={"stall_after": 3})).encode()
    with closing(raw(picked, body)) as client:
        assert client.recv(10)
        for worker in picked.workers:
            worker.kill()
        while client.recv(65536):
            pass  # it breaks off
        picked.wait_until_free()
    for worker in picked.workers:
        worker.start()
    assert picked.ask(chat("well"))[0] == 200
    picked.wait_until_free()


def test_many_streams_at_once(picked: Picked) -> None:
    """They wait for their second token together. A third of the clients leave then, and the workers
    of all others die: nothing stays."""
    if picked.name not in (RECIPE, DUPLEX):
        return  # these two are what gateways send
    fake = {"stall_after": 1}
    clients = [
        raw(picked, json.dumps(chat(f"many {number}", stream=True, fake=fake)).encode())
        for number in range(STREAMS)
    ]
    wait_until(lambda: picked.selector.active() == STREAMS, "all are reserved")
    assert metric(picked, "epp_streams") == STREAMS
    for client in clients:
        assert client.recv(10)[9:] == b"2"
    for client in clients[::3]:
        client.close()
    left = len(clients) - len(clients[::3])
    wait_until(lambda: picked.selector.active() == left, "those who left are free")
    for worker in picked.workers:
        worker.kill()
    picked.wait_until_free()
    for client in clients:
        client.close()
    for worker in picked.workers:
        worker.start()
    wait_until(lambda: picked.ask(chat("well"))[0] == 200, "they serve again")
    picked.wait_until_free()
    assert metric(picked, "epp_streams") == 0
    assert metric(picked, 'epp_events_total{event="malformed"}') == 0


def test_one_of_two_workers_down(picked: Picked) -> None:
    """The second choice behind the comma answers; the reservation follows where a head is sent."""
    picked.workers[0].kill()
    try:
        for number in range(4):
            assert picked.ask(chat(f"down {number}"))[0] == 200
        picked.wait_until_free()
    finally:
        picked.workers[0].start()


def test_refusals_are_openai_errors(picked: Picked) -> None:
    if "STREAMED, t" in picked.name or "NONE" in picked.name:
        return  # the body is not known when the worker is chosen
    status, headers, text = picked.ask({"model": MODEL, "messages": [], "kv_transfer_params": {}})
    assert status == 400
    assert headers["content-type"] == "application/json"
    assert json.loads(text)["error"]["message"].startswith("kv_transfer_params")
    assert picked.ask(b"no JSON")[0] == 400
    assert picked.ask({"model": "unknown", "messages": []})[0] == 503


def test_the_recipe_survives_the_death_of_the_picker(tmp_path: Path) -> None:
    with Picked(tmp_path, MODES[RECIPE]) as picked:
        client = raw(picked, json.dumps(chat("lives on", stream=True, max_tokens=400)).encode())
        wait_until(lambda: picked.selector.active() > 0, "it is reserved")
        picked.selector.stop(signal.SIGKILL)
        text = b""
        while not text.endswith(b"0\r\n\r\n"):
            more = client.recv(65536)
            assert more, text
            text += more
        assert b"[DONE]" in text
        client.close()
        assert picked.ask(chat("without"))[0] == 200
        with picked.selector:
            picked.wait_until_found()
            wait_until(
                lambda: (
                    picked.ask(chat("again"))[0] == 200
                    and 'epp_events_total{event="reserved"} 0'
                    not in scrape(picked.selector.port, None)
                ),
                "it is asked again",
            )


def test_where_nothing_of_responses_is_sent_the_log_says_so(tmp_path: Path) -> None:
    mode = {
        **SILENT_MODE,
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SEND",
    }
    with Picked(tmp_path, mode, "--reservation-expiry-secs", "1000") as picked:
        for _ in range(2):
            assert picked.ask(chat("held"))[0] == 200
        wait_until(lambda: metric(picked, 'epp_events_total{event="held"}') == 2, "they are held")
        assert picked.selector.active() == 2
        assert picked.selector.log().count("sends no part of responses") == 1


def test_buffered_without_any_response_is_exact_too(tmp_path: Path) -> None:
    with Picked(tmp_path, SILENT_MODE) as picked:
        client = raw(picked, json.dumps(chat("x", stream=True, fake={"stall_after": 1})).encode())
        wait_until(lambda: picked.selector.active() == 1, "it is reserved")
        assert client.recv(10)
        time.sleep(0.1)
        assert picked.selector.active() == 1
        client.close()
        picked.wait_until_free()


def test_workers_have_ipv6_addresses(tmp_path: Path) -> None:
    with Picked(tmp_path, MODES[RECIPE], host="::1") as picked:
        for number in range(4):
            assert picked.ask(chat(f"six {number}"))[0] == 200
        asked = [worker.seen()["requests"] for worker in picked.workers]
        assert all(any(CHAT in each["line"] for each in requests) for requests in asked)
        assert metric(picked, 'epp_events_total{event="reserved"}') == 4
        picked.wait_until_free()


def test_the_recipe_s_lua_tells_the_first_token(tmp_path: Path) -> None:
    with Picked(tmp_path, MODES[RECIPE], tells_first_token=True) as behind:

        def told() -> int:
            samples = parsed(scrape(behind.selector.port, None))[
                "lean_selector_http_requests_total"
            ]
            wanted = {("route", PREFILL_COMPLETE), ("status", "200")}
            return sum(int(count) for labels, count in samples.items() if wanted <= labels)

        body = chat("first", stream=True, fake={"stall_after": 1})
        for count in (1, 2):
            with closing(raw(behind, json.dumps(body).encode())) as client:
                assert client.recv(10)
                wait_until(lambda count=count: told() == count, "it is told")  # type: ignore[misc]
                assert behind.selector.active() == 1
            behind.wait_until_free()
        assert behind.ask(chat("fails", fake={"status": 500}))[0] == 500
        behind.wait_until_free()
        assert told() == 2, "an error is no token"


def test_a_drain_turns_readiness_waits_and_resets(tmp_path: Path) -> None:
    with Picked(tmp_path, MODES[DUPLEX], "--drain-secs", "60") as picked:
        body = json.dumps(chat("drains", stream=True, max_tokens=1500)).encode()
        client = raw(picked, body)
        assert client.recv(10)
        stopped: list[tuple[int, str]] = []
        stopping = threading.Thread(target=lambda: stopped.append(picked.selector.stop()))
        stopping.start()
        text = b""
        while not text.endswith(b"0\r\n\r\n"):
            more = client.recv(65536)
            assert more, text[-200:]
            text += more
        assert b"[DONE]" in text
        stopping.join()
        assert stopped[0][0] == 0
        assert "were reset" not in stopped[0][1]
        client.close()


def test_learning_and_usage_work_with_duplex_responses(tmp_path: Path) -> None:
    """Token ids are asked for and taken out again, as by `lean-selector gateway`."""
    with Picked(tmp_path, MODES[DUPLEX], "--prompts", "learn") as picked:
        body = chat("learn this " * 30, stream=True, max_tokens=8)
        for _ in range(2):
            status, _, text = picked.ask(body)
            assert status == 200
            assert b'prompt_token_ids":[' not in text
            assert b'"usage"' not in text
            picked.wait_until_free()
        asked = [json.loads(each["body"]) for each in picked.requests()]
        assert all(each["return_token_ids"] for each in asked)
        assert all(each["stream_options"] == {"include_usage": True} for each in asked)
