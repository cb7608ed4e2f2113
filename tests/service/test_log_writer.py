"""Lines are written in order by a thread, and dropped where nobody reads them."""

import contextlib
import logging
import os
import threading
from collections.abc import Iterator

import pytest

from lean_selector.service.logs import LineWriter, QueuedLines
from tests.support.running_service import DEADLINE_S

BOUND = 100_000


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    os.close(read)
    os.close(write)


def logger_on(writer: LineWriter) -> logging.Logger:
    logger = logging.Logger("test")
    handler = QueuedLines(writer)
    handler.setFormatter(Shown())
    logger.addHandler(handler)
    return logger


class Shown(logging.Formatter):
    """The message, and how many were dropped before it."""

    def format(self, record: logging.LogRecord) -> str:
        dropped = vars(record).get("dropped")
        return record.getMessage() + (f" dropped={dropped}" if dropped else "")


def fill(descriptor: int) -> int:
    """Writes until there is no room; returns how much that was."""
    os.set_blocking(descriptor, False)
    filled = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            filled += os.write(descriptor, b"#" * 512)
    os.set_blocking(descriptor, True)
    return filled


def read_to_end(descriptor: int, end: bytes) -> bytes:
    read = b""
    while not read.endswith(end):
        read += os.read(descriptor, 65536)
    return read


def test_lines_come_out_whole_and_in_order(pipe: tuple[int, int]) -> None:
    logger = logger_on(LineWriter(pipe[1]))
    expected = "".join(f"line {i} é\ud800\n" for i in range(5000)).encode(
        "utf-8", "backslashreplace"
    )
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(read_to_end(pipe[0], expected[-20:])))
    reader.start()
    for i in range(5000):
        logger.error("line %d é\ud800", i)
    reader.join(DEADLINE_S)
    assert got == [expected]


def test_a_reader_that_sleeps_holds_nobody_and_is_told_what_it_missed(
    pipe: tuple[int, int],
) -> None:
    filled = fill(pipe[1])
    writer = LineWriter(pipe[1], BOUND)
    logger = logger_on(writer)
    room = BOUND // len(b"0000000000\n")
    for number in range(room + 50):  # to a pipe that blocks, one would take for ever
        logger.error("%010d", number)
    assert writer.dropped == 50
    assert not writer.flush(0.0)
    read = read_to_end(pipe[0], b"%010d\n" % (room - 1))
    assert read[filled:].splitlines() == [b"%010d" % number for number in range(room)]
    assert writer.flush(DEADLINE_S)
    logger.error("after")
    logger.error("and then")
    assert read_to_end(pipe[0], b"then\n") == b"after dropped=50\nand then\n"
    assert writer.dropped == 50


def test_a_pipe_that_does_not_block_gets_all_lines_too(pipe: tuple[int, int]) -> None:
    os.set_blocking(pipe[1], False)
    writer = LineWriter(pipe[1])
    for number in range(50_000):
        assert writer.write(f"{number:010d}")
    read = read_to_end(pipe[0], b"0000049999\n")
    assert read.splitlines() == [b"%010d" % number for number in range(50_000)]


def test_a_reader_that_has_gone_costs_nothing() -> None:
    read, write = os.pipe()
    os.close(read)
    writer = LineWriter(write, BOUND)
    for _ in range(BOUND):  # many times what may wait
        assert writer.write("x") or writer.flush(DEADLINE_S)
    assert writer.flush(DEADLINE_S)
    os.close(write)
