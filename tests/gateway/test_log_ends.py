"""Lines that end reservations of a real selector, over real datagram sockets."""

import asyncio
import logging
import random
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from lean_selector.core.load.shapes import Booking
from lean_selector.core.selection.prompt import Prompt
from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.shapes import WorkerSpec
from lean_selector.gateway import access_logs
from lean_selector.gateway.access_logs import (
    EARLY_MEMORY_S,
    LINES_PER_TURN,
    LineReader,
    LogEnds,
    Senders,
)
from lean_selector.http.listener import UnixPath, inet_socket
from lean_selector.server.gateway_routes import AccessLogReaders
from lean_selector.server.selector_flags import AccessLogs
from loadtest.child_service import free_port
from tests.support.gates import NoEngines
from tests.support.on_loop import until

NOW = 1000.0


class Books:
    """A selector with one worker of two ranks, and the ends that lines bring it."""

    def __init__(self) -> None:
        self.now = NOW
        settings = RouterSettings(use_kv_events=False)
        self.selector = Selector(settings, NoEngines(), random.Random(7))
        spec = WorkerSpec(
            worker_id=7,
            model_name="m",
            tenant_id="default",
            endpoint="http://w",
            block_size=16,
            data_parallel_size=2,
        )
        self.selector.upsert_worker(spec, NOW)
        self.partition = self.selector.ready_partition("m", "default")
        self.ends = LogEnds(self.selector.free, self.selector.health.report, lambda: self.now)

    def book(self, reservation_id: str) -> None:
        prompt = Prompt(16, b"12345678", 1, b"87654321", b"87654321")
        booking = Booking(reservation_id, 7, 0, None, True, 16, None, None)
        self.selector.bookings.book(self.partition, booking, prompt, self.now)

    @property
    def live(self) -> set[str]:
        return set(self.partition.slots.reservations)

    def results(self) -> dict[str, int]:
        return {name: count for name, count in self.ends.results.items() if count}


def test_a_line_frees_its_reservation() -> None:
    books = Books()
    books.book("a")
    books.book("b")
    books.ends.take(b"lean-end reservation=a status=499")
    assert books.live == {"b"}
    assert books.results() == {"freed": 1}


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
        books.book(f"r{n}")
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


def test_a_notice_of_the_gateway_is_counted_apart_and_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    books = Books()
    with caplog.at_level(logging.DEBUG):
        books.ends.take(NOTICE)
    assert (books.results(), caplog.records) == ({"other": 1}, [])


def test_what_is_no_line_is_counted_and_shown_in_part(caplog: pytest.LogCaptureFixture) -> None:
    books = Books()
    with caplog.at_level(logging.WARNING):
        books.ends.take(b"lean-end " + b"x" * 5000)
        books.ends.refuse("10.0.0.1")
    assert books.results() == {"malformed": 1, "not_allowed": 1}
    lines = [vars(record) for record in caplog.records]
    assert lines[0]["line"] == "lean-end " + "x" * 191
    assert lines[1]["address"] == "10.0.0.1"


Story = Callable[[], Coroutine[Any, Any, None]]


def told(story: Story) -> None:
    async def run() -> None:
        await asyncio.wait_for(story(), 60)

    uvloop.run(run())


def test_lines_are_read_from_udp_and_from_a_unix_socket(tmp_path: Path) -> None:
    async def story() -> None:
        books, path = Books(), UnixPath(str(tmp_path / "s"), socket.SOCK_DGRAM)
        udp, unix = inet_socket("127.0.0.1", 0, socket.SOCK_DGRAM), path.take()
        address = udp.getsockname()
        senders = Senders([])
        readers = [
            LineReader(bound, books.ends.take, books.ends.refuse, senders) for bound in (udp, unix)
        ]
        count = 3 * LINES_PER_TURN
        for n in range(2 * count):
            books.book(f"r{n}")
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

    told(story)


def test_over_a_unix_socket_a_burst_loses_what_the_kernel_does_not_queue(tmp_path: Path) -> None:
    queued = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text()) + 1

    async def story() -> None:
        books, path = Books(), UnixPath(str(tmp_path / "s"), socket.SOCK_DGRAM)
        reader = LineReader(path.take(), books.ends.take, books.ends.refuse, Senders([]))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.connect(str(tmp_path / "s"))
            for n in range(queued):
                books.book(f"r{n}")
                sender.send(b"lean-end reservation=r%d" % n, socket.MSG_DONTWAIT)
            books.book("lost")
            with pytest.raises(BlockingIOError):  # gateways do not try again
                sender.send(b"lean-end reservation=lost", socket.MSG_DONTWAIT)
            await until(lambda: books.live == {"lost"})
            sender.send(b"lean-end reservation=lost", socket.MSG_DONTWAIT)
            await until(lambda: not books.live)
        reader.close()
        path.let_go()

    told(story)


@pytest.mark.parametrize(("shown", "warns"), [("10\n", True), ("512\n", False), (None, False)])
def test_a_queue_that_is_short_is_told_of_at_the_start(
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
    config = AccessLogs(places=places)

    async def story() -> None:
        AccessLogReaders(config, Books().selector, lambda: NOW).close()

    with caplog.at_level(logging.WARNING):
        told(story)
    assert ["net.unix.max_dgram_qlen is 10" in each for each in caplog.messages] == [True] * warns
    assert [vars(each)["place"] for each in caplog.records] == [f"unixgram:{tmp_path}/s"] * warns


def test_others_than_loopback_may_not_write() -> None:
    async def story() -> None:
        books = Books()
        bound = inet_socket("127.0.0.1", 0, socket.SOCK_DGRAM)
        address = bound.getsockname()

        class Nobody(Senders):
            def may_write(self, host: str) -> bool:
                assert host == "127.0.0.1"
                return False

        reader = LineReader(bound, books.ends.take, books.ends.refuse, Nobody([]))
        books.book("a")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"lean-end reservation=a", address)
            await until(lambda: books.ends.results["not_allowed"] == 1)
        reader.close()
        assert books.live == {"a"}

    told(story)


def test_a_reader_that_closes_takes_what_has_come_and_counts_what_was_dropped() -> None:
    async def story() -> None:
        books, bound = Books(), inet_socket("127.0.0.1", 0, socket.SOCK_DGRAM)
        address = bound.getsockname()
        reader = LineReader(bound, books.ends.take, books.ends.refuse, Senders([]))
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the kernel's least
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for n in range(200):
                sender.sendto(b"lean-end reservation=r%d" % n, address)
            await until(lambda: books.ends.results["unknown"] > 0)
            sender.sendto(b"lean-end reservation=last", address)
        reader.close()
        assert reader.dropped + books.ends.results["unknown"] == 201
        assert reader.dropped > 0

    told(story)
