"""Each recipe of `deploy/` on its gateway, before a selector and two workers: what users see."""

import json
import os
import re
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.recipes.gateways import CHAT, GATEWAYS, Behind, Nginx, Places, chat
from tests.support.openai_worker import MODEL, OpenAiWorker
from tests.support.prometheus_tools import scrape
from tests.support.running_service import wait_until
from tests.support.threaded_server import ThreadedServer, body_of, send

OF_PREFILL = ("x-prefiller-host-port", "x-prefill-data-parallel-rank", "x-prefill-worker-id")


class Fleet(Behind):
    """With a recipe's gateway."""

    def __init__(self, folder: Path, gateway: str, kind: str, *flags: str) -> None:
        self.places = places = Places(folder, kind)
        super().__init__(*places.flags(), *flags)
        self.selector.port = places.selector_port
        self.gateway = GATEWAYS[gateway](folder, places, [worker.port for worker in self.workers])
        self._lines_before: Counter[str] = Counter()
        self._served_before = [0, 0]

    def begin(self) -> None:
        """From here on the next test counts.

        Gateways write their lines when they like, and in order: behind one that is heard of, none
        of an earlier test comes.
        """
        self.wait_until_free()
        self._lines_before, self._served_before = Counter(), [0, 0]
        freed = self.lines().get("freed", 0)
        assert self.ask(chat("between two tests", max_tokens=1))[0] == 200
        wait_until(lambda: self.lines().get("freed", 0) > freed, "the last line is heard of")
        self.wait_until_free()
        self._lines_before, self._served_before = Counter(self.lines()), self.served()

    def wait_until_found(self, count: int = 2) -> None:
        super().wait_until_found(count)
        # Or the first events of an engine are asked for once more, which takes its time.
        wait_until(
            lambda: all(
                row["state"] in ("live", "silent") for row in self.selector.get("/kv_sources")[1]
            ),
            "the workers' events are heard",
        )

    def wait_until_known(self) -> None:
        """What the workers hold: the next choice counts with it."""

        def is_known() -> bool:
            told = sorted(worker.seen()["published_batches"] for worker in self.workers)
            rows = self.selector.get("/kv_sources")[1]
            heard = sorted(0 if row["last_seq"] is None else row["last_seq"] + 1 for row in rows)
            return heard == told and all(row["lag_batches"] == 0 for row in rows)

        wait_until(is_known, "the workers' events are applied")

    def lines(self) -> dict[str, int]:
        """Lines of the access log, by what became of them."""
        found = re.findall(
            r'^lean_selector_lifecycle_lines_total\{result="(\w+)"\} (\d+)',
            scrape(self.selector.port, self.selector.token),
            re.M,
        )
        every = Counter({result: int(count) for result, count in found})
        return dict(every - self._lines_before)

    def served(self) -> list[int]:
        """Completions that each worker was asked for."""
        return [
            sum("completions " in request["line"] for request in worker.seen()["requests"]) - before
            for worker, before in zip(self.workers, self._served_before, strict=True)
        ]


# Those over UNIX sockets first, for the tests that take these alone: pytest groups by the index.
UNIX = [(gateway, "unix") for gateway in GATEWAYS]
BOTH = [*UNIX, *((gateway, "tcp") for gateway in GATEWAYS)]


@pytest.fixture(params=BOTH, ids="-".join)
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    """Of a test that kills something."""
    with Fleet(tmp_path, *request.param) as fleet:
        yield fleet


@pytest.fixture(scope="module", params=BOTH, ids="-".join)
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("f"), *request.param) as fleet:
        yield fleet


@pytest.fixture
def peaceful(running: Fleet) -> Fleet:
    """Shared by the tests that leave it as it was."""
    running.begin()
    return running


on_unix = pytest.mark.parametrize("running", UNIX, ids="-".join, indirect=True)


def test_a_conversation_stays_with_the_worker_that_has_it_cached_and_ends_free(
    peaceful: Fleet,
) -> None:
    fleet = peaceful
    for number in range(2):
        before = fleet.served()
        text = f"{number}, a conversation " * 20
        for _ in range(4):
            status, _, body = fleet.ask(chat(text, max_tokens=4))
            assert status == 200
            answer = json.loads(body)
            fleet.wait_until_free()
            fleet.wait_until_known()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert sorted(a - b for a, b in zip(fleet.served(), before, strict=True)) == [0, 4]
    assert fleet.lines() == {"freed": 8}


# Requests that gateways refuse, or that reach no worker: some are logged before any rule has run.
REFUSED = {
    "HTTP/1.0": b"POST /v1/chat/completions HTTP/1.0\r\nhost: x\r\ncontent-length: 2\r\n",
    "no host": b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 2\r\n",
    "upgrade": b"GET /v1/chat HTTP/1.1\r\nhost: x\r\nupgrade: a\r\nconnection: upgrade\r\n",
    "connect": b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n",
    "bad target": b"POST foo HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n",
    "other path": b"GET /v1/models HTTP/1.1\r\nhost: x\r\n",
}


@on_unix
def test_a_clients_own_headers_end_nothing(peaceful: Fleet) -> None:
    """Whatever a client sends, no line of the log names a reservation or a worker of its choice."""
    fleet = peaceful
    booking = {"reservation_id": "mine", "model_name": MODEL, "token_ids": [1, 2, 3]}
    status, chosen = fleet.selector.post("/select_and_reserve", booking)
    assert status == 200
    worker = b"%d" % chosen["worker_id"]
    headers = [
        b"x-reservation-id: mine\r\nx-worker-id: %b\r\nx-data-parallel-rank: 0\r\n" % worker,
        b"x-request-id: mine\r\n",
        # Values that are fields of a line; UF is how Envoy calls a worker that refuses connections.
        b'x-reservation-id: z worker=%b flags=UF q="\r\nx-data-parallel-rank: "\r\n' % worker,
    ]
    for head in REFUSED.values():
        for own in (*headers, headers[-1], headers[-1]):  # three failures eject a worker
            with socket.create_connection(("127.0.0.1", fleet.gateway.port), 10) as client:
                client.sendall(head + own + b"\r\n{}")
                client.shutdown(socket.SHUT_WR)
                with suppress(ConnectionError):
                    while client.recv(65_536):
                        pass
    # The line of a good request comes behind all of theirs.
    freed = fleet.lines().get("freed", 0)
    assert fleet.ask(chat("behind them", max_tokens=1))[0] == 200
    wait_until(lambda: fleet.lines().get("freed", 0) > freed, "the last line is heard of")
    wait_until(lambda: fleet.selector.active() == 1, "only the client's own reservation is live")
    assert all(not row.get("ejected_ranks") for row in fleet.selector.get("/workers")[1])
    assert fleet.selector.end("mine") == 200


def test_what_needs_no_choice_passes_through(peaceful: Fleet) -> None:
    fleet = peaceful
    with fleet.gateway.connection() as connection:
        connection.request("GET", "/v1/models")
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())["data"][0]["id"]) == (200, MODEL)
    assert fleet.ask(b"abc", "/echo")[2] == b"abc"
    assert fleet.lines() == {}


@on_unix
def test_long_prompts_are_routed_too(peaceful: Fleet) -> None:
    fleet = peaceful
    text = "a long prompt, and longer still. " * 6_000  # 200 kB
    for _ in range(3):
        assert fleet.ask(chat(text, max_tokens=1))[0] == 200
        fleet.wait_until_free()
        fleet.wait_until_known()
    assert sorted(fleet.served()) == [0, 3]
    assert fleet.lines() == {"freed": 3}


def test_whoever_hangs_up_frees_and_is_held_against_no_worker(peaceful: Fleet) -> None:
    fleet = peaceful
    for number in range(6):
        body = chat(f"{number}", stream=True, max_tokens=2_000, fake={"stall_after": 1})
        with fleet.gateway.connection() as connection:
            connection.request("POST", CHAT, json.dumps(body))
            if number % 2:
                connection.getresponse().read(1)
            else:
                wait_until(lambda: fleet.selector.active() > 0, "it is booked")
        fleet.wait_until_free()
    lines = fleet.lines()
    lines.pop("other", None)  # HAProxy tells of scripts that it gave up
    assert lines == {"freed": 6}
    workers = fleet.selector.get("/workers?detail=true")[1]
    assert [worker["health"]["state"] for worker in workers] == ["in_service"] * 2


def test_without_a_selector_the_gateway_balances_by_itself_and_believes_no_client(
    fleet: Fleet,
) -> None:
    fleet.selector.stop(signal.SIGKILL)
    nowhere = {"x-gateway-destination-endpoint": "127.0.0.1:1", "x-data-parallel-rank": "7"}
    nowhere |= dict.fromkeys(OF_PREFILL, "127.0.0.1:1")
    with ExitStack() as stack:
        # Several at a time: who counts connections or requests has none to tell workers apart by.
        connections = [stack.enter_context(fleet.gateway.connection()) for _ in range(8)]
        for number, connection in enumerate(connections):
            body = json.dumps(chat(f"{number}", max_tokens=200, stream=True))
            connection.request("POST", CHAT, body, nowhere)
        for connection in connections:
            answer = connection.getresponse()
            assert answer.status == 200
            answer.read(1)
    assert all(fleet.served())
    if isinstance(fleet.gateway, Nginx):  # the others say it in their figures
        assert re.search(r"connect\(\) .*failed|could not be asked", fleet.gateway.log())
    for worker in fleet.workers:
        for request in worker.seen()["requests"]:
            for name in ("x-data-parallel-rank", *OF_PREFILL):
                assert request["headers"].get(name, "") == ""
    with fleet.selector:
        fleet.wait_until_found()

        def is_asked_again() -> bool:
            return fleet.ask(chat("again"))[0] == 200 and "freed" in fleet.lines()

        wait_until(is_asked_again, "the gateway comes back to the selector")
        # Over UDP a process of nginx hears of a closed port with its next line, and loses that.
        most = 0 if fleet.gateway.places.is_unix else os.cpu_count() or 1
        wait_until(lambda: fleet.selector.active() <= most, "what was asked for again is freed")


def test_what_a_selector_says_to_the_gateway_alone_never_reaches_a_client(
    tmp_path: Path, gateway: str
) -> None:
    """An id that ended already, a selector that is told no --prompts or fails, and so on."""
    statuses = [404, 405, 409, 500, 503]
    asked = 0

    def answer(handler: BaseHTTPRequestHandler) -> None:
        nonlocal asked
        body_of(handler)
        if "transfer-encoding" in handler.headers:
            while handler.rfile.readline() != b"0\r\n":
                pass
            handler.rfile.readline()
        asked += 1
        send(handler, statuses[asked - 1])

    places = Places(tmp_path, "tcp")
    with ExitStack() as stack:
        workers = [stack.enter_context(OpenAiWorker()) for _ in range(2)]
        stack.enter_context(ThreadedServer(answer, port=places.selector_port))
        running = GATEWAYS[gateway](tmp_path, places, [worker.port for worker in workers])
        stack.enter_context(running)
        for number, status in enumerate(statuses, 1):
            with running.connection() as connection:
                connection.request("POST", CHAT, json.dumps(chat("hello")))
                assert connection.getresponse().status == 200, status
            assert asked == number


def test_who_prefills_is_told_to_the_decode_worker_and_never_by_a_client(
    tmp_path: Path, gateway: str
) -> None:
    with Fleet(tmp_path, gateway, "unix") as fleet:
        ids = {row["endpoint"]: row["worker_id"] for row in fleet.selector.get("/workers")[1]}
        prefill, decode = fleet.workers
        for worker, role in ((prefill, "prefill"), (decode, "decode")):
            path = f"/workers/{ids[worker.url]}"
            assert fleet.selector.request("PATCH", path, {"worker_role": role})[0] == 200
        own = dict.fromkeys(OF_PREFILL, "127.0.0.1:1")
        assert fleet.ask(chat("a pair " * 20), **own)[0] == 200
        assert fleet.ask(chat("and no pair", prompt_logprobs=1), **own)[0] == 200
        fleet.wait_until_free()
        assert fleet.served() == [0, 2]
        asked = [
            each["headers"] for each in decode.seen()["requests"] if "completions " in each["line"]
        ]
        told = [{name: headers.get(name, "") for name in OF_PREFILL} for headers in asked]
        named = (f"127.0.0.1:{prefill.port}", "0", str(ids[prefill.url]))
        assert told == [dict(zip(OF_PREFILL, named, strict=True)), dict.fromkeys(OF_PREFILL, "")]
        body = chat("it decodes for long", stream=True, fake={"stall_after": 1})
        with fleet.gateway.connection() as connection:
            connection.request("POST", CHAT, json.dumps(body))
            connection.getresponse().read(1)

            def active() -> dict[int, int]:
                (loads,) = fleet.selector.get("/loads")[1]
                return {row["worker_id"]: row["active_requests"] for row in loads["loads"]}

            left = {ids[prefill.url]: 0, ids[decode.url]: 1}
            wait_until(lambda: active() == left, "the prefill is taken to be over")
        fleet.wait_until_free()


def test_what_is_shed_is_told_to_come_back(tmp_path: Path, gateway: str) -> None:
    flags = "--active-prefill-tokens-threshold", "100"
    with Fleet(tmp_path, gateway, "unix", *flags) as fleet:
        for worker_id in (row["worker_id"] for row in fleet.selector.get("/workers")[1]):
            fleet.selector.reserve(f"held-{worker_id}", worker_id, 200, model_name=MODEL)
        status, headers, body = fleet.ask(chat("hello"))
        assert (status, headers["retry-after"]) == (429, "1")
        assert json.loads(body)["error"]["type"] == "rate_limit_error"
        assert fleet.served() == [0, 0]
        wait_until(lambda: fleet.lines() != {}, "the line of a request that was shed")
        assert fleet.lines() == {"unknown": 1}


def test_nginx_with_njs_tells_the_rank_to_the_worker_that_was_booked_only(tmp_path: Path) -> None:
    with Fleet(tmp_path, "nginx-njs", "unix") as fleet:
        fleet.ask(chat("hello", fake={"breaks": True}))  # every worker breaks off
        seen = [each for worker in fleet.workers for each in worker.seen()["requests"]]
        asked = [each["headers"] for each in seen if "completions " in each["line"]]
        ranks = sorted(headers.get("x-data-parallel-rank", "") for headers in asked)
        assert (ranks[0], ranks.count("0"), len(ranks) > 1) == ("", 1, True)
        assert {headers["host"] for headers in asked} == {"127.0.0.1"}
        assert all(headers["x-request-id"] for headers in asked)


@pytest.mark.parametrize("gateway", ["nginx-lua", "envoy"])
def test_lua_tells_when_the_first_byte_comes(gateway: str, tmp_path: Path) -> None:
    with Fleet(tmp_path, gateway, "unix") as fleet:
        body = chat("hello", stream=True, max_tokens=2_000, fake={"stall_after": 1})
        with fleet.gateway.connection() as connection:
            connection.request("POST", CHAT, json.dumps(body))
            connection.getresponse().read(1)

            def prefill() -> int:
                rows = fleet.selector.get("/loads")[1]
                return sum(r["potential_prefill_tokens"] for row in rows for r in row["loads"])

            wait_until(lambda: prefill() == 0, "its prompt counts as computed")
            assert fleet.selector.active() == 1
        fleet.wait_until_free()


@pytest.mark.parametrize("fleet", UNIX, ids="-".join, indirect=True)
def test_a_worker_that_is_gone_costs_no_request_and_is_reported(fleet: Fleet) -> None:
    assert fleet.ask(chat("a conversation " * 20))[0] == 200
    fleet.wait_until_free()
    gone = fleet.workers[fleet.served().index(1)]
    gone.kill()
    for _ in range(5):
        assert fleet.ask(chat("a conversation " * 20))[0] == 200
        fleet.wait_until_free()
    ejected = fleet.selector.get("/ready")[1].get("ejected", [])
    counts = scrape(fleet.selector.port)
    assert re.search(
        r'lean_selector_worker_reports_total\{.*outcome="(refused|failed)".*\} [1-5]', counts
    ), counts
    assert len(ejected) <= 1
