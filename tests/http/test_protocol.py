"""One connection driven by hand: bytes and events in, bytes and closing out. No socket, no loop."""

import asyncio
import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest

from lean_selector.http.connections import Connections
from lean_selector.http.head import Limits, Request
from lean_selector.http.protocol import HttpProtocol
from lean_selector.http.response import PendingReply, Response, encode_response

GET = b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n"
PARK = b"GET /park HTTP/1.1\r\nhost: x\r\n\r\n"
MADE = PARK.replace(b"park", b"made")
MIB = 1024 * 1024


def post(body: bytes, *lines: bytes, path: bytes = b"/a") -> bytes:
    length = b"content-length: %d" % len(body)
    return b"\r\n".join((b"POST %b HTTP/1.1" % path, b"host: x", length, *lines, b"", body))


def ok(path: bytes) -> bytes:
    return encode_response(200, b'"%b"' % path)


def closing(response: bytes) -> bytes:
    return response.replace(b"OK\r\n", b"OK\r\nconnection: close\r\n")


class FakeTransport(asyncio.Transport):
    """Remembers what is done to it. `high_water` bytes of unsent output pause the writer."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: HttpProtocol | None = None
        self.writes: list[bytes] = []
        self.reads = True
        self.state = "open"
        self.half_closes = True
        self.unsent = 0
        self.high_water: int | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert self.state == "open", "nothing is written after the end"
        self.writes.append(bytes(data))
        if self.high_water is not None:
            self.unsent += len(data)
            if self.unsent > self.high_water:
                assert self.protocol is not None
                self.protocol.pause_writing()

    def take(self) -> bytes:
        taken = b"".join(self.writes)
        self.writes.clear()
        return taken

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def pause_reading(self) -> None:
        assert self.reads
        self.reads = False

    def resume_reading(self) -> None:
        assert not self.reads
        self.reads = True

    def can_write_eof(self) -> bool:
        return self.half_closes

    def write_eof(self) -> None:
        assert self.state == "open"
        self.state = "half closed"

    def close(self) -> None:
        self.state = "closed"

    def abort(self) -> None:
        self.state = "aborted"

    def is_closing(self) -> bool:
        return self.state in ("closed", "aborted")


class Transport(FakeTransport):
    """Of either side; what is written to one that is closed is dropped, as the loop does."""

    def write(self, data: Any) -> None:
        if self.state == "open":
            super().write(data)

    def pause_reading(self) -> None:
        if self.state == "open":
            super().pause_reading()

    def resume_reading(self) -> None:
        if self.state == "open":
            super().resume_reading()

    def is_closing(self) -> bool:
        return self.state != "open"


class Client:
    """The far end of one connection, and an app: /park waits, /raise fails, others echo."""

    def __init__(
        self,
        limits: Limits | None = None,
        connections: Connections | None = None,
        kind: type[HttpProtocol] = HttpProtocol,
    ) -> None:
        self.soon: list[Callable[[], None]] = []
        self.connections = connections or Connections(self.soon.append, limits, clock=lambda: 0.0)
        self.handled: list[Request] = []
        self.parked: list[PendingReply] = []
        self.hang_ups = 0
        self.transport = FakeTransport()
        self.protocol = kind(self.app, self.connections)
        self.transport.protocol = self.protocol
        self.protocol.connection_made(self.transport)

    def app(self, request: Request) -> bytes | PendingReply:
        self.handled.append(request)
        if request.path == b"/raise":
            raise RuntimeError("a fault of ours")
        if request.path == b"/large":
            return encode_response(200, b"x" * (200 * 1024))
        reply = PendingReply(self.count_hang_up)
        if request.path == b"/resolved":
            reply.resolve(ok(request.path))
        elif request.path == b"/made":
            reply.is_being_made = True
            self.parked.append(reply)
        elif request.path == b"/park":
            self.parked.append(reply)
        else:
            return ok(request.path)
        return reply

    def count_hang_up(self) -> None:
        self.hang_ups += 1

    def send(self, data: bytes) -> bytes:
        """What is written in the same pass."""
        self.protocol.data_received(data)
        return self.transport.take()

    def run_soon(self) -> bytes:
        """One turn of the loop."""
        due, self.soon[:] = list(self.soon), []
        for callback in due:
            callback()
        return self.transport.take()

    def is_read(self) -> bool:
        return self.transport.reads

    @property
    def state(self) -> str:
        return self.transport.state


@pytest.fixture
def client() -> Client:
    return Client()


# Order, and one write per pass.


def test_pipelined_requests_are_answered_in_one_write(client: Client) -> None:
    client.protocol.data_received(GET + post(b"{}", path=b"/b") + GET)
    assert client.transport.writes == [ok(b"/a") + ok(b"/b") + ok(b"/a")]
    assert client.state == "open"
    assert not client.protocol.eof_received(), "the transport closes it"


def test_a_reply_resolved_at_once_needs_no_parking(client: Client) -> None:
    assert client.send(b"GET /resolved HTTP/1.1\r\nhost: x\r\n\r\n" + GET) == ok(b"/resolved") + ok(
        b"/a"
    )


def test_requests_behind_a_waiting_one_wait_their_turn(client: Client) -> None:
    assert client.send(GET + PARK + PARK + GET) == ok(b"/a")
    assert client.send(b"GET /b HTTP/1.1\r\nhost: x\r\n\r\n") == b""
    client.parked[0].resolve(ok(b"/1"))
    assert client.transport.take() == ok(b"/1")
    assert len(client.handled) == 2, "not handled inside resolve"
    assert client.run_soon() == b""
    client.parked[1].resolve(ok(b"/2"))
    assert client.run_soon() == ok(b"/2") + ok(b"/a")
    assert client.run_soon() == ok(b"/b")
    assert not client.soon


def test_many_requests_in_one_read_are_answered_over_several_turns(client: Client) -> None:
    first = client.send(GET * 150)
    assert client.send(b"GET /b HTTP/1.1\r\nhost: x\r\n\r\n") == b""
    assert first.count(b"HTTP/1.1 200") == 64
    assert client.run_soon().count(b"HTTP/1.1 200") == 64
    assert client.run_soon() == ok(b"/a") * 22 + ok(b"/b")
    assert not client.soon


def test_no_more_is_taken_in_while_much_waits_to_be_answered(client: Client) -> None:
    client.send(GET * 3000)
    assert not client.is_read()
    while client.soon:
        client.run_soon()
    assert client.is_read()
    assert len(client.handled) == 3000


def test_large_answers_end_a_pass_early(client: Client) -> None:
    client.send(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n" * 4)
    assert len(client.handled) == 2
    client.run_soon()
    assert len(client.handled) == 4


# What the protocol adds to an answer.


def test_head_gets_no_body(client: Client) -> None:
    answer = client.send(b"HEAD /a HTTP/1.1\r\nhost: x\r\n\r\n" + GET)
    assert answer == ok(b"/a").removesuffix(b'"/a"') + ok(b"/a")


@pytest.mark.parametrize(
    ("head", "line"),
    [
        pytest.param(b"1.1\r\nhost: x\r\nconnection: close", b"close", id="asked to close"),
        pytest.param(
            b"1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c", b"close", id="upgrade"
        ),
        pytest.param(b"1.0", b"close", id="HTTP/1.0"),
        pytest.param(b"1.0\r\nconnection: keep-alive", b"keep-alive", id="HTTP/1.0 asks to stay"),
    ],
)
def test_a_connection_closes_with_an_answer_that_says_so(
    client: Client, head: bytes, line: bytes
) -> None:
    answer = client.send(b"GET /a HTTP/%b\r\n\r\n" % head)
    assert answer == closing(ok(b"/a")).replace(b"close", line)
    assert client.state == ("closed" if line == b"close" else "open")


def test_a_waiting_request_may_be_the_last(client: Client) -> None:
    client.send(b"GET /park HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    client.parked[0].resolve(ok(b"/park"))
    assert client.transport.take() == closing(ok(b"/park"))
    assert client.state == "closed"


def test_a_fault_of_the_app_is_answered_500_and_logged(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        answer = client.send(b"GET /raise HTTP/1.1\r\nhost: x\r\n\r\n" + GET)
    assert answer == encode_response(500, b'{"error":"internal error"}') + ok(b"/a")
    assert "a fault of ours" in caplog.text


# Errors of the HTTP level.


def test_good_requests_before_a_bad_one_are_answered_first(client: Client) -> None:
    answer = client.send(GET + b"nonsense\r\n\r\n")
    assert answer.startswith(
        ok(b"/a") + b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json"
    )
    assert answer.endswith(
        b'connection: close\r\ncontent-length: 34\r\n\r\n{"error":"malformed request line"}'
    )


def test_an_error_waits_behind_a_waiting_request(client: Client) -> None:
    assert client.send(PARK + b"nonsense\r\n\r\n") == b""
    client.parked[0].resolve(ok(b"/park"))
    assert client.transport.take().startswith(ok(b"/park") + b"HTTP/1.1 400 ")


def test_an_error_lingers_so_that_its_answer_can_be_read(client: Client) -> None:
    client.send(b"nonsense\r\n\r\n")
    assert client.state == "half closed"
    assert client.send(GET * 10) == b""
    assert client.handled == []
    assert not client.protocol.eof_received(), "the transport may close"


@pytest.mark.parametrize("bound", ["bytes", "time", "time while draining"])
def test_lingering_is_bounded_in_bytes_and_in_time(client: Client, bound: str) -> None:
    client.send(b"nonsense\r\n\r\n")
    if bound == "bytes":
        for _ in range(64):
            client.send(bytes(MIB))
    elif bound != "time":
        client.connections.start_draining()
    client.connections.sweep(5.0)
    assert client.state == "half closed"
    if bound == "bytes":
        client.send(b"x")
    else:
        client.connections.sweep(5.1)
    assert client.state == "aborted"


def test_a_transport_that_cannot_half_close_is_closed(client: Client) -> None:
    client.transport.half_closes = False
    client.send(b"nonsense\r\n\r\n")
    assert client.state == "closed"


def test_an_oversize_body_reaches_the_app_marked_as_such() -> None:
    client = Client(Limits(max_body_bytes=10))
    assert client.send(post(b"x" * 11) + GET) == ok(b"/a") * 2
    assert [r.body_too_large for r in client.handled] == [True, False]


def test_an_endless_body_is_answered_early_with_lingering() -> None:
    client = Client(Limits(max_body_bytes=10, max_discard_bytes=20))
    assert client.send(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 21\r\n\r\nxxx") == closing(
        ok(b"/a")
    )
    assert client.state == "half closed"


# Expect: 100-continue.

EXPECT = b"POST /a HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def test_100_continue(client: Client) -> None:
    assert client.send(GET + EXPECT) == ok(b"/a") + CONTINUE
    assert client.send(b"{}") == ok(b"/a")
    assert client.send(EXPECT + b"{}") == ok(b"/a")


def test_100_continue_comes_after_the_answers_before_it(client: Client) -> None:
    assert client.send(PARK + EXPECT) == b""
    client.parked[0].resolve(ok(b"/park"))
    assert client.transport.take() == ok(b"/park") + CONTINUE


# The client goes away.


@pytest.mark.parametrize("is_heard", [True, False])
def test_a_hang_up_while_waiting_is_told_once_if_it_is_to_be_heard(
    client: Client, is_heard: bool
) -> None:
    client.send(PARK + GET)
    if not is_heard:
        client.parked[0].on_disconnect = None
    assert not client.protocol.eof_received()
    client.protocol.connection_lost(ConnectionResetError())
    assert (client.hang_ups, len(client.connections.open)) == (is_heard, 0)
    client.parked[0].resolve(ok(b"/park"))
    assert client.transport.take() == client.run_soon() == b""
    assert len(client.handled) == 1


def heard(reply: PendingReply, name: str) -> list[tuple[str, Response]]:
    """What an observer of `reply` has heard, from now on."""
    told: list[tuple[str, Response]] = []
    reply.observe(
        lambda response: told.append((name, response)), lambda: told.append((name, b"hung up"))
    )
    return told


@pytest.mark.parametrize("answered", [True, False], ids=["answered", "hung up"])
def test_all_observers_of_a_reply_hear_its_first_end_alone(client: Client, answered: bool) -> None:
    client.send(PARK)
    told = [heard(client.parked[0], name) for name in ("meter", "log")]
    assert told == [[], []]
    if answered:
        client.parked[0].resolve(ok(b"/park"))
        assert heard(client.parked[0], "late") == [("late", ok(b"/park"))]
    client.protocol.connection_lost(None)
    if not answered:
        client.parked[0].resolve(ok(b"/park"))
    end = ok(b"/park") if answered else b"hung up"
    assert told == [[("meter", end)], [("log", end)]]
    assert client.hang_ups == (not answered)


def test_observers_hear_of_a_hang_up_also_where_on_disconnect_fails(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    client.send(PARK)
    told = heard(client.parked[0], "meter")

    def fail() -> None:
        raise RuntimeError("a fault of ours")

    client.parked[0].on_disconnect = fail
    client.protocol.connection_lost(None)
    assert told == [("meter", b"hung up")]
    assert "a fault of ours" in caplog.text


def test_an_answer_for_a_connection_that_is_closing_is_dropped(client: Client) -> None:
    client.send(PARK)
    client.connections.abort()
    client.parked[0].resolve(ok(b"/park"))
    assert client.transport.take() == b""


@pytest.mark.parametrize(("behind", "answer", "hang_ups"), [(GET, ok(b"/a"), 0), (PARK, b"", 1)])
def test_a_half_closed_client_gets_the_answers_it_waits_for_and_cannot_wait(
    client: Client, behind: bytes, answer: bytes, hang_ups: int
) -> None:
    client.send(GET * 64 + behind)
    assert client.protocol.eof_received(), "the transport stays open"
    assert client.run_soon() == answer
    assert (client.state, client.hang_ups) == ("closed", hang_ups)


@pytest.mark.parametrize("before", [b"", GET * 64], ids=["at once", "in the next turn"])
def test_a_half_closed_client_gets_an_answer_that_is_being_made(
    client: Client, before: bytes
) -> None:
    client.send(before + MADE + GET)
    assert client.protocol.eof_received(), "the transport stays open"
    client.run_soon()
    client.parked[0].resolve(ok(b"/made"))
    assert client.transport.take() == ok(b"/made")
    assert client.state == "open"
    assert client.run_soon() == ok(b"/a")
    assert (client.state, client.hang_ups) == ("closed", 0)


def test_a_lost_connection_is_a_hang_up_also_while_an_answer_is_being_made(client: Client) -> None:
    client.send(MADE)
    assert client.protocol.eof_received()
    client.protocol.connection_lost(None)
    assert client.hang_ups == 1


# Back-pressure.


def test_a_client_that_does_not_read_is_not_served(client: Client) -> None:
    client.transport.high_water = 0
    client.send(GET * 65)
    assert not client.is_read()
    assert client.run_soon() == client.send(GET) == b""
    client.transport.high_water = None
    client.protocol.resume_writing()
    assert client.transport.take() == ok(b"/a") * 2
    assert client.is_read()


def test_writing_that_pauses_and_resumes_while_waiting(client: Client) -> None:
    client.send(PARK)
    client.protocol.pause_writing()
    assert not client.is_read()
    client.protocol.resume_writing()
    assert client.is_read(), "a hang-up must be noticed"
    client.parked[0].resolve(ok(b"/park"))
    assert client.transport.take() == ok(b"/park")


def test_what_waits_behind_a_waiting_request_is_bounded(client: Client) -> None:
    client.send(PARK)
    for _ in range(3):
        assert client.is_read()
        client.send(post(b"x" * 400_000))
    assert not client.is_read()
    client.parked[0].resolve(ok(b"/park"))
    while client.soon:
        client.run_soon()
    assert len(client.handled) == 4
    assert client.is_read()


# What a turn of the loop takes for the input of all connections together.

CHUNKED = b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


class Ticking:
    """A clock that goes on by a millisecond at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def test_chunks_of_a_byte_are_read_over_several_turns(client: Client) -> None:
    client.send(CHUNKED + b"1\r\nx\r\n" * 3000)
    turns = 0
    while client.soon:
        assert client.handled == []
        client.run_soon()
        turns += 1
    assert turns == 3000 // 512
    assert client.send(b"0\r\n\r\n" + GET) == ok(b"/a") * 2
    assert len(client.handled[0].body) == 3000


def test_all_connections_together_have_the_time_of_one_turn() -> None:
    soon: list[Callable[[], None]] = []
    connections = Connections(soon.append, clock=Ticking())
    clients = [Client(connections=connections) for _ in range(8)]
    for each in clients:
        each.send(CHUNKED)
        each.send(b"1\r\nx\r\n" * 600 + b"0\r\n\r\n")
    assert len(soon) == 1
    turns = 0
    while soon:
        soon.pop()()
        turns += 1
        assert sum(len(each.handled) for each in clients) <= 2 * turns
        assert len(soon) <= 1
    assert [len(each.handled) for each in clients] == [1] * 8


def test_a_small_request_does_not_wait_for_what_was_put_off() -> None:
    soon: list[Callable[[], None]] = []
    connections = Connections(soon.append, clock=Ticking())
    busy = [Client(connections=connections) for _ in range(8)]
    for each in busy:
        each.send(CHUNKED)
        each.send(b"1\r\nx\r\n" * 6000)
    assert connections.spent_s >= 0.002
    assert Client(connections=connections).send(GET) == ok(b"/a")


def test_what_is_put_off_goes_with_its_connection() -> None:
    soon: list[Callable[[], None]] = []
    connections = Connections(soon.append)
    client = Client(connections=connections)
    client.send(CHUNKED + b"1\r\nx\r\n" * 6000)
    assert connections.held_bytes > 30_000
    client.protocol.connection_lost(None)
    soon.pop()()
    assert connections.held_bytes == 0
    assert client.handled == []
    assert not soon


@pytest.mark.parametrize("line", [b"transfer-encoding: chunked", b"content-length: 1000000"])
def test_what_is_refused_at_its_head_is_answered_before_its_body(line: bytes) -> None:
    connections = Connections(lambda callback: None)
    connections.refuses = lambda request: request.path == b"/a"
    client = Client(connections=connections)
    assert client.send(b"POST /a HTTP/1.1\r\nhost: x\r\n%b\r\n\r\n1\r\nx" % line) == closing(
        ok(b"/a")
    )
    assert client.state == "half closed"
    assert client.send(b"x" * MIB) == b""
    assert connections.held_bytes == 0
    asks = b"POST /a HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n%b\r\n\r\n" % line
    assert Client(connections=connections).send(asks) == closing(ok(b"/a"))


# Time-outs. The sweep brings the time.


def test_an_idle_connection_closes_after_its_time(client: Client) -> None:
    client.connections.sweep(70.0)
    client.send(GET)
    client.connections.sweep(145.0)
    assert client.state == "open"
    client.connections.sweep(145.1)
    assert client.state == "closed"
    assert client.transport.take() == b""


UNFINISHED = b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 8000000\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "limit_s"),
    [
        pytest.param([(10.0, b"GET /a")], 40.0, id="a head"),
        pytest.param([(10.0, UNFINISHED)], 40.0, id="a body"),
        pytest.param([(2.0 * at, GET[at : at + 1]) for at in range(16)], 30.0, id="dripping"),
        # 30 s, and 64 s for 1 MiB at 16 KiB/s
        pytest.param([(0.0, UNFINISHED + bytes(MIB))], 94.0, id="a large body, in proportion"),
    ],
)
def test_an_unfinished_request_gets_408(
    client: Client, sent: list[tuple[float, bytes]], limit_s: float
) -> None:
    for at, piece in sent:
        client.connections.sweep(at)
        client.send(piece)
    client.connections.sweep(limit_s)
    assert client.state == "open"
    client.connections.sweep(limit_s + 0.1)
    assert client.transport.take().startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert client.state == "half closed"


def test_a_waiting_request_may_wait_as_long_as_the_app_likes(client: Client) -> None:
    client.send(PARK + b"GET /unfin")
    client.connections.sweep(1e6)
    assert client.state == "open"
    client.parked[0].resolve(ok(b"/park"))
    client.connections.sweep(1e6 + 30.0)
    assert client.send(b"ished HTTP/1.1\r\nhost: x\r\n\r\n") == ok(b"/park") + ok(b"/unfinished")


def test_a_client_that_takes_nothing_is_dropped(client: Client) -> None:
    client.transport.high_water = 10
    client.send(GET)
    client.transport.unsent = 50
    client.connections.sweep(29.0)
    client.connections.sweep(58.0)
    assert client.state == "open", "it took something before the first sweep"
    client.connections.sweep(59.1)
    assert client.state == "aborted"


def test_an_answer_that_closes_has_the_time_of_writing(client: Client) -> None:
    client.transport.high_water = 10_000
    client.send(b"GET /a HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    client.connections.sweep(30.0)
    assert client.state == "closed"
    client.connections.sweep(30.1)
    assert client.state == "aborted"


# Draining.


def test_draining_answers_what_still_comes_and_closes_with_the_answer(client: Client) -> None:
    client.send(GET)
    client.connections.start_draining()
    assert client.state == "open", "a request may be on its way"
    for each in (client, Client(connections=client.connections)):
        assert each.send(GET) == closing(ok(b"/a"))
        assert each.state == "half closed", "one behind it must not reset what was answered"
        assert each.send(GET) == b""
    client.protocol.eof_received()


def test_draining_lets_the_busy_finish() -> None:
    parked = Client()
    halfway, both = (Client(connections=parked.connections) for _ in range(2))
    parked.send(PARK + GET)
    halfway.send(GET[:5])
    both.send(PARK + GET[:5])
    parked.connections.start_draining()
    parked.connections.sweep(2.0)
    assert [c.state for c in (parked, halfway, both)] == ["open", "open", "open"]

    parked.parked[0].resolve(ok(b"/park"))
    assert parked.transport.take() == ok(b"/park")
    assert parked.run_soon() == closing(ok(b"/a"))
    assert parked.state == "half closed"

    assert halfway.send(GET[5:]) == closing(ok(b"/a"))
    assert halfway.state == "half closed"

    both.parked[0].resolve(ok(b"/park"))
    assert both.transport.take() == ok(b"/park")
    assert both.send(GET[5:]) == closing(ok(b"/a"))
    assert both.state == "half closed"


def test_draining_closes_a_connection_once_it_is_quiet(client: Client) -> None:
    client.connections.sweep(50.0)
    client.connections.start_draining()
    client.connections.sweep(51.0)
    assert client.state == "open", "quiet is counted from the beginning of the drain"
    client.connections.sweep(51.1)
    assert client.state == "half closed"
    client.connections.sweep(52.1)
    assert client.state == "half closed"
    client.connections.sweep(52.2)
    assert client.state == "aborted"


# How many, and how much they may hold together (D27).

HALF_POST = b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"
NO_ROOM = b'{"error":"too many incomplete requests"}'


def held_by(*clients: Client) -> list[int]:
    return [client.protocol.held_bytes for client in clients]


def test_one_connection_too_many_is_told_so() -> None:
    connections = Connections(lambda callback: None, max_connections=2)
    first, second, third = (Client(connections=connections) for _ in range(3))
    answer = third.transport.take()
    assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"\r\nconnection: close\r\n" in answer
    assert answer.endswith(b'{"error":"too many connections"}')
    assert third.state == "half closed"
    assert third.send(GET) == b"", "it is not served"
    assert (connections.accepted, connections.refused, len(connections.open)) == (2, 1, 2)
    assert first.send(GET) == second.send(GET) == ok(b"/a")

    first.protocol.connection_lost(None)
    assert Client(connections=connections).send(GET) == ok(b"/a")


def test_of_very_many_refused_only_some_are_told_why() -> None:
    connections = Connections(lambda callback: None, max_connections=0)
    refused = [Client(connections=connections) for _ in range(300)]
    assert [client.state for client in refused] == ["half closed"] * 256 + ["aborted"] * 44
    assert connections.refused == 300
    refused[0].protocol.connection_lost(None)
    assert Client(connections=connections).state == "half closed"


def test_what_is_held_is_counted_and_given_back(client: Client) -> None:
    connections = client.connections
    client.send(GET)
    assert connections.held_bytes == 0
    client.send(b"GET /a HT")
    assert connections.held_bytes == client.protocol.held_bytes == 9
    client.send(GET[9:])
    assert connections.held_bytes == 0
    body = post(b"x" * 1000)
    client.send(body[:-10])
    assert connections.held_bytes == 990
    client.send(body[-10:])
    assert connections.held_bytes == 0
    head = b"GET /?%b HTTP/1.1\r\nhost: x\r\ny: %b\r\n\r\n" % (b"q" * 30_000, b"z" * 30_000)
    client.send(PARK + body + body + head)
    assert connections.held_bytes > 62_000
    client.parked[0].resolve(ok(b"/park"))
    client.run_soon()
    assert connections.held_bytes == 0


@pytest.mark.parametrize("end", ["lost", "timed out", "bad request", "half close"])
def test_what_is_held_is_given_back_however_a_connection_ends(client: Client, end: str) -> None:
    client.send(PARK + post(b"x" * 1000) + HALF_POST + b"x" * 1000)
    assert client.connections.held_bytes > 2000
    if end == "lost":
        client.protocol.connection_lost(ConnectionResetError())
    elif end == "half close":
        client.protocol.eof_received()
        client.protocol.connection_lost(None)
    else:
        client.parked[0].resolve(ok(b"/park"))
        client.run_soon()
        assert client.connections.held_bytes == 1000
        if end == "timed out":
            client.connections.sweep(1000.0)
        else:
            client.send(b"x" * 999_000 + b"nonsense\r\n\r\n")
    assert client.connections.held_bytes == 0
    assert client.protocol.held_bytes == 0


def test_who_has_held_the_most_for_the_longest_makes_room() -> None:
    connections = Connections(lambda callback: None, max_held_bytes=10_000)
    stalled, small, fresh, newest = (Client(connections=connections) for _ in range(4))
    stalled.send(HALF_POST + b"x" * 6000)
    small.send(HALF_POST + b"x" * 100)
    connections.sweep(10.0)
    fresh.send(HALF_POST + b"x" * 3000)
    assert connections.held_bytes == 9100
    newest.send(HALF_POST + b"x" * 901)
    assert held_by(stalled, small, fresh, newest) == [0, 100, 3000, 901]
    answer = stalled.transport.take()
    assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert answer.endswith(NO_ROOM)
    assert stalled.state == "half closed"
    assert [c.state for c in (small, fresh, newest)] == ["open"] * 3
    assert connections.held_bytes == 4001
    assert connections.bodies_refused == 1


def test_of_newcomers_the_largest_makes_room_even_if_it_is_the_one_that_asks() -> None:
    connections = Connections(lambda callback: None, max_held_bytes=10_000)
    one, two = (Client(connections=connections) for _ in range(2))
    one.send(HALF_POST + b"x" * 4000)
    answer = two.send(HALF_POST + b"x" * 7000)
    assert answer.endswith(NO_ROOM)
    assert held_by(one, two) == [4000, 0]


def test_room_is_made_for_many_at_once() -> None:
    """Looking at all connections costs, so it is not done for every piece of a body."""
    connections = Connections(lambda callback: None, max_held_bytes=8_000)
    clients = [Client(connections=connections) for _ in range(81)]
    for client in clients:
        client.send(HALF_POST + b"x" * 100)
    assert connections.bodies_refused == 11
    assert connections.held_bytes == 7_000


def test_what_waits_behind_a_waiting_request_makes_room_too() -> None:
    connections = Connections(lambda callback: None, max_held_bytes=10_000)
    waiting, other = (Client(connections=connections) for _ in range(2))
    waiting.send(PARK + post(b"x" * 8000))
    connections.sweep(10.0)
    other.send(HALF_POST + b"x" * 5000)
    assert waiting.hang_ups == 1
    assert waiting.transport.take().endswith(NO_ROOM)
    assert held_by(waiting, other) == [0, 5000]
    waiting.parked[0].resolve(ok(b"/park"))
    assert waiting.transport.take() == b""


def test_what_the_app_keeps_of_a_waiting_request_is_counted(client: Client) -> None:
    def app(request: Request) -> PendingReply:
        reply = PendingReply()
        reply.held_bytes = 5000
        client.parked.append(reply)
        return reply

    protocol = HttpProtocol(app, client.connections)
    protocol.connection_made(FakeTransport())
    protocol.data_received(GET)
    assert client.connections.held_bytes == 5000
    client.parked[0].resolve(ok(b"/a"))
    assert client.connections.held_bytes == 0
    protocol.data_received(GET)
    protocol.connection_lost(None)
    assert client.connections.held_bytes == 0


def test_the_body_of_a_waiting_request_is_not_kept(client: Client) -> None:
    client.send(post(b"x" * 100_000, path=b"/park"))
    assert client.connections.held_bytes == 0
    body = client.handled.pop().body
    assert not any(isinstance(holder, Request) for holder in gc.get_referrers(body))
