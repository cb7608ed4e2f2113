"""Access logs of gateways: what their lines say, where they are read from, and whom they free.

Lines end reservations of a real selector, over real datagram sockets.
"""

import contextlib
import logging
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_selector.app.gateway_routes import AccessLogReaders
from lean_selector.app.selector_flags import AccessLogsFlags
from lean_selector.gateway import access_logs
from lean_selector.gateway.access_logs import (
    EARLY_MEMORY_S,
    LINES_PER_TURN,
    LONGEST_LINE,
    BadLine,
    LineReader,
    LogAddress,
    LogEnds,
    Senders,
    address_of,
    ended_of,
    networks_of,
)
from lean_selector.http.listener import UnixPath, inet_socket
from loadtest.child_service import free_port
from tests.support.driven_selector import DrivenSelector
from tests.support.on_loop import on_loop, until

# -- what lines say --------------------------------------------------------------------------------

NGINX = b"<190>Nov 22 08:30:00 lean_selector: lean-end reservation=%b worker=7 rank=1"
HAPROXY = b"<134>Nov 22 08:30:00 haproxy[812]: lean-end reservation=%b worker=7 rank=1"
ENVOY = b"<13>Nov 22 08:30:00 gateway envoy: lean-end reservation=%b worker=7 rank=1"


def outcome(line: bytes) -> str | None:
    ended = ended_of(line % b"r-1" if b"%b" in line else line)
    assert (ended.reservation_id, ended.worker_id, ended.dp_rank) == ("r-1", 7, 1)
    return ended.outcome


@pytest.mark.parametrize(
    ("gateway", "fields", "expected"),
    [
        (NGINX, b'status=200 upstream="200" connect="0.001" done=OK', "ok"),
        (NGINX, b'status=404 upstream="404" connect="0.001" done=OK', "ok"),
        (NGINX, b'status=200 upstream="200" connect="0.001" done=', None),  # who broke it off?
        (NGINX, b'status=499 upstream="-" connect="-" done=', None),
        (NGINX, b'status=499 upstream="200" connect="0.000" done=', None),
        (NGINX, b'status=502 upstream="502" connect="-" done=OK', "refused"),
        (NGINX, b'status=504 upstream="504" connect="-" done=OK', "refused"),
        (NGINX, b'status=502 upstream="502" connect="0.001" done=OK', "failed"),
        (NGINX, b'status=500 upstream="500" connect="0.001" done=OK', "failed"),
        (NGINX, b'status=503 upstream="503" connect="0.001" done=OK', None),
        (NGINX, b'status=429 upstream="429" connect="0.001" done=OK', None),
        (NGINX, b'status=529 upstream="529" connect="0.001" done=OK', None),
        # The first is the one that was booked, whoever answered in the end.
        (NGINX, b'status=200 upstream="502, 200" connect="-, 0.000" done=OK', "refused"),
        (NGINX, b'status=200 upstream="502, 200" connect="0.000, 0.000" done=OK', "failed"),
        (NGINX, b'status=200 upstream="502 : 200" connect="- : 0.000" done=OK', "refused"),
        (HAPROXY, b"status=200 termination=-- retries=0", "ok"),
        (HAPROXY, b"status=503 termination=SC retries=3", "refused"),
        (HAPROXY, b"status=503 termination=sC retries=3", "refused"),
        # Whether the first took no connection or ended a kept one, the line does not say.
        (HAPROXY, b"status=200 termination=-- retries=+1", "failed"),
        (HAPROXY, b"status=200 termination=CD retries=+1", "failed"),
        (HAPROXY, b"status=503 termination=SC retries=+2", "refused"),
        (HAPROXY, b"status=200 termination=SD retries=0", "failed"),
        (HAPROXY, b"status=502 termination=SH retries=0", "failed"),
        (HAPROXY, b"status=504 termination=sH retries=0", "failed"),
        (HAPROXY, b"status=503 termination=sQ retries=0", None),
        (HAPROXY, b"status=200 termination=CD retries=0", None),
        (HAPROXY, b"status=-1 termination=CC retries=0", None),
        (HAPROXY, b"status=400 termination=PR retries=0", None),
        (HAPROXY, b"status=500 termination=-- retries=0", "failed"),
        (HAPROXY, b"status=200 termination=CDVN retries=0", None),
        (ENVOY, b"status=200 flags=- attempts=1", "ok"),
        (ENVOY, b"status=503 flags=UF attempts=1", "refused"),
        (ENVOY, b"status=503 flags=UF,URX attempts=3", "failed"),
        (ENVOY, b"status=200 flags=UC attempts=1", "failed"),
        (ENVOY, b"status=504 flags=UT attempts=1", "failed"),
        (ENVOY, b"status=200 flags=- attempts=2", "failed"),
        (ENVOY, b"status=200 flags=DC attempts=1", None),
        (ENVOY, b"status=0 flags=DC attempts=-", None),
        (ENVOY, b"status=429 flags=UAEX attempts=-", None),
        (ENVOY, b"status=503 flags=UH attempts=-", None),
        (ENVOY, b"status=500 flags=- attempts=1", "failed"),
    ],
)
def test_what_a_line_says_of_the_worker(
    gateway: bytes, fields: bytes, expected: str | None
) -> None:
    assert outcome(gateway + b" " + fields) == expected


def test_a_status_alone_says_whether_the_worker_failed() -> None:
    def said(status: bytes) -> str | None:
        return outcome(b"lean-end rank=1 worker=7 reservation=r-1 status=" + status)

    assert [said(each) for each in (b"200", b"500", b"503", b"499", b"000")] == [
        *("ok", "failed", None, None, None)
    ]


def test_what_is_not_there_is_absent_and_other_fields_are_ignored() -> None:
    ended = ended_of(b'lean-end reservation=a worker=- rank= agent="x y" status=200 n=3\n')
    assert (ended.reservation_id, ended.worker_id, ended.dp_rank) == ("a", None, None)
    assert ended_of(b"lean-end reservation=- worker=3 status=200").reservation_id is None


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"", "the word lean-end"),
        (b"GET /lean-end HTTP/1.1", "the word lean-end"),
        (b"lean-end", "the word lean-end"),
        (b"lean-end reservation", "byte 0 "),
        (b'lean-end reservation="a', "byte 13 "),
        (b"lean-end reservation=a b", "byte 14 "),
        (b"lean-end reservation=a reservation=b", "reservation twice"),
        (b"lean-end reservation=\xff", "reservation is not UTF-8"),
        (b"lean-end reservation=" + b"a" * 257, "longer than 256"),
        (b"lean-end worker=x", "worker is not a number from 0 to 18446744073709551615"),
        (b"lean-end worker=1 rank=-1", "rank is not a number from 0 to 4294967295"),
        (b"lean-end reservation=a status=2000", "status"),
        (b"lean-end reservation=a upstream=x", "upstream"),
        (b"lean-end reservation=a termination=?", "termination"),
        (b'lean-end reservation=a flags="U F"', "flags"),
        (b"lean-end reservation=a attempts=x", "attempts"),
        (b"lean-end reservation=a".ljust(LONGEST_LINE + 1), "8192"),
    ],
)
def test_a_bad_line_is_told_why(line: bytes, why: str) -> None:
    with pytest.raises(BadLine) as refused:
        ended_of(line)
    assert why in str(refused.value)


@given(st.binary(max_size=200), st.sampled_from([b"", b"lean-end ", b"lean-end reservation=a "]))
def test_no_datagram_does_more_than_be_refused(garbage: bytes, start: bytes) -> None:
    with contextlib.suppress(BadLine):
        ended_of(start + garbage)


# -- places and senders ----------------------------------------------------------------------------


def test_places_are_addresses_or_paths() -> None:
    assert address_of("syslog:127.0.0.1:5140") == LogAddress(host="127.0.0.1", port=5140)
    assert address_of("syslog:[::1]:5140") == LogAddress(host="::1", port=5140)
    assert address_of("unixgram:/run/a:b.sock") == LogAddress(path="/run/a:b.sock")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *(("", "not ``"), ("tcp:127.0.0.1:1", "not `tcp:127.0.0.1:1`")),
        *(("unixgram:", "not `unixgram:`"), ("syslog:5140", "a host or a port")),
        *(("syslog::1", "a host or a port"), ("syslog:::1:1", "brackets")),
        *(("syslog:h:0", "from 1 to 65535"), ("syslog:h:x", "from 1 to 65535")),
        ("syslog:h:65536", "from 1 to 65535"),
    ],
)
def test_what_is_no_place_is_told_why(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        address_of(text)


def test_loopback_may_write_and_others_by_name() -> None:
    assert networks_of("10.0.0.0/8, 192.168.1.7,10.0.0.0/8") == ["10.0.0.0/8", "192.168.1.7/32"]
    senders = Senders(["10.0.0.0/8", "fd00::/8"])
    may = ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "10.1.2.3", "::ffff:10.1.2.3")
    assert [each for each in (*may, "fd00::7") if not senders.may_write(each)] == []
    assert [each for each in ("11.0.0.1", "fe80::1", "::") if senders.may_write(each)] == []


@pytest.mark.parametrize("text", ["10.0.0.0/33", "10.0.0.1/8", "host", "10.0.0.0/8/8"])
def test_what_is_no_network_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        networks_of(text)


# -- whom they free --------------------------------------------------------------------------------


class Books(DrivenSelector):
    """With one worker of two ranks, and the ends that lines bring it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register(7, data_parallel_size=2)
        self.ends = LogEnds(self.selector, lambda: self.now)

    @property
    def live(self) -> set[str]:
        return set(self.partition.slots.reservations)

    def results(self) -> dict[str, int]:
        return {name: count for name, count in self.ends.results.items() if count}


def test_a_line_frees_its_reservation() -> None:
    books = Books()
    books.reserve("a", (7, 0))
    books.reserve("b", (7, 0))
    books.ends.take(b"lean-end reservation=a status=499")
    assert books.live == {"b"}
    assert books.results() == {"freed": 1}


@pytest.mark.parametrize(
    ("status", "outcome"), [(b"200", "ok"), (b"500", "failed"), (b"503", None), (b"-", None)]
)
def test_a_line_may_say_what_the_prefill_worker_of_a_pair_did(
    status: bytes, outcome: str | None
) -> None:
    books = Books()
    books.reserve("a", (7, 0))
    books.ends.take(b"lean-end reservation=a prefill_worker=7 prefill_status=" + status)
    counts = [rank.counts for rank in books.partition.slots.ranks.values()]
    told = {"ok": sum(each.ok for each in counts), "failed": sum(each.failed for each in counts)}
    assert [name for name, count in told.items() if count] == ([] if outcome is None else [outcome])
    books.ends.take(b"lean-end reservation=a prefill_worker=7 prefill_status=x")
    assert books.results() == {"freed": 1, "malformed": 1}


@pytest.mark.parametrize(
    ("fields", "is_believed"),
    [
        *(("", True), ("status=200", True), ("status=499", True), ("status=400", True)),
        *(("status=502", False), ("status=503", False), ("status=429", False)),
        ('upstream="503, 200" connect="0.001, 0.001" status=200', False),
        ('upstream="502, 200" connect="-, 0.001" status=200', False),
        *(("termination=SC-- status=503", False), ("flags=UF status=503", False)),
    ],
)
def test_a_prompt_that_the_first_worker_did_not_compute_is_not_believed_cached(
    fields: str, is_believed: bool
) -> None:
    books = Books(ttl_s=100.0)
    books.reserve("a", (7, 0), hashes=[1, 2])
    books.ends.take(f"lean-end reservation=a worker=7 {fields}".encode().strip())
    assert books.results() == {"freed": 1}
    assert books.partition.index.total_blocks == 2 * is_believed


def test_an_end_that_overtakes_its_beginning_is_remembered_for_a_while() -> None:
    books = Books()
    books.ends.take(b"lean-end reservation=a status=499")
    books.ends.take(b"lean-end reservation=b status=499")
    assert books.results() == {"unknown": 2}
    assert books.ends.has_ended("a")
    assert not books.ends.has_ended("a")  # it may be booked again, by an id that is used twice
    assert not books.ends.has_ended("c")
    books.now += EARLY_MEMORY_S + 1
    assert not books.ends.has_ended("b")


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_logs, "MAX_EARLY", 3)
    books = Books()
    for n in range(5):
        books.ends.take(b"lean-end reservation=r%d" % n)
    assert [n for n in range(5) if books.ends.has_ended(f"r{n}")] == [2, 3, 4]


def test_three_failures_eject_the_worker_that_is_named_and_only_that() -> None:
    books = Books()
    for n in range(3):
        books.reserve(f"r{n}", (7, 0))
        books.ends.take(b"lean-end reservation=r%d status=502" % n)
    assert not books.partition.health.out
    for n in range(3):
        books.ends.take(b"lean-end reservation=r%d worker=7 rank=1 status=502" % n)
    assert books.partition.health.out == {(7, 1)}
    for n in range(3):
        books.ends.take(b"lean-end reservation=r%d worker=7 rank=0 flags=UF status=503" % n)
    assert books.partition.health.out == {(7, 0), (7, 1)}  # refused: the whole worker


def test_a_worker_may_be_named_without_a_reservation_and_be_unknown() -> None:
    books = Books()
    books.ends.take(b"lean-end worker=7 rank=0 status=200")
    books.ends.take(b"lean-end worker=8 status=200")
    books.ends.take(b"lean-end worker=7 rank=9 status=200")
    books.ends.take(b"lean-end reservation=- worker=- status=200")
    assert books.results() == {"reported": 3, "empty": 1}
    assert books.ends.unknown_workers == 2
    assert books.partition.slots.ranks[7, 0].counts.ok == 1


NOTICE = (
    b"<139>Nov 22 08:30:00 haproxy[812]: Lua function 'lean_route': aborting Lua processing on "
    b"expired timeout."
)


def test_what_is_no_line_is_counted_and_shown_in_part(caplog: pytest.LogCaptureFixture) -> None:
    """A notice of the gateway itself is counted apart, and not logged."""
    books = Books()
    with caplog.at_level(logging.DEBUG):
        books.ends.take(NOTICE)
        books.ends.take(b"lean-end " + b"x" * 5000)
        books.ends.refuse("10.0.0.1")
    assert books.results() == {"other": 1, "malformed": 1, "not_allowed": 1}
    malformed, refused = (vars(record) for record in caplog.records)
    assert malformed["line"] == "lean-end " + "x" * 191
    assert refused["address"] == "10.0.0.1"


@on_loop
async def test_lines_are_read_from_udp_and_from_a_unix_socket(tmp_path: Path) -> None:
    books, path = Books(), UnixPath(str(tmp_path / "s"), socket.SOCK_DGRAM)
    udp, unix = inet_socket("127.0.0.1", 0, socket.SOCK_DGRAM), path.take()
    address = udp.getsockname()
    senders = Senders([])
    readers = [LineReader(bound, books.ends, senders) for bound in (udp, unix)]
    count = 3 * LINES_PER_TURN
    for n in range(2 * count):
        books.reserve(f"r{n}", (7, 0))
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as by_udp,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as by_path,
    ):
        by_path.connect(str(tmp_path / "s"))
        for n in range(count):
            by_udp.sendto(b"lean-end reservation=r%d" % n, address)
            by_path.send(b"lean-end reservation=r%d" % (n + count), socket.MSG_DONTWAIT)
            if n % 8 == 7:  # the kernel queues no more than that for a path
                await until(lambda: f"r{n + count}" not in books.live)  # noqa: B023
        await until(lambda: not books.live)
        by_udp.sendto(b"lean-end reservation=" + b"x" * 20_000, address)
        await until(lambda: books.ends.results["malformed"] == 1)
    for reader in readers:
        reader.close()
    path.let_go()


@pytest.mark.parametrize(("shown", "warns"), [("10\n", True), ("512\n", False), (None, False)])
@on_loop
async def test_a_queue_that_is_short_is_told_of_at_the_start(
    shown: str | None,
    warns: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if shown is not None:
        (tmp_path / "length").write_text(shown)
    monkeypatch.setattr(access_logs, "_QUEUE_LENGTH", tmp_path / "length")
    places = [f"unixgram:{tmp_path}/s", f"syslog:127.0.0.1:{free_port()}"]
    with caplog.at_level(logging.WARNING):
        AccessLogReaders(AccessLogsFlags(addresses=places), Books().selector, lambda: 0.0).close()
    assert ["net.unix.max_dgram_qlen is 10" in each for each in caplog.messages] == [True] * warns
    assert [vars(each)["place"] for each in caplog.records] == [f"unixgram:{tmp_path}/s"] * warns


@on_loop
async def test_others_than_loopback_may_not_write() -> None:
    books = Books()
    bound = inet_socket("127.0.0.1", 0, socket.SOCK_DGRAM)
    address = bound.getsockname()

    class Nobody(Senders):
        def may_write(self, host: str) -> bool:
            assert host == "127.0.0.1"
            return False

    reader = LineReader(bound, books.ends, Nobody([]))
    books.reserve("a", (7, 0))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"lean-end reservation=a", address)
        await until(lambda: books.ends.results["not_allowed"] == 1)
    reader.close()
    assert books.live == {"a"}


@on_loop
async def test_a_reader_that_closes_takes_what_has_come_and_counts_what_was_dropped() -> None:
    books, bound = Books(), inet_socket("127.0.0.1", 0, socket.SOCK_DGRAM)
    address = bound.getsockname()
    reader = LineReader(bound, books.ends, Senders([]))
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the kernel's least
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for n in range(200):
            sender.sendto(b"lean-end reservation=r%d" % n, address)
        await until(lambda: books.ends.results["unknown"] > 0)
        sender.sendto(b"lean-end reservation=last", address)
    reader.close()
    assert reader.dropped + books.ends.results["unknown"] == 201
    assert reader.dropped > 0
