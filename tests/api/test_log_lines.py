"""How a line looks, how many there may be, and how a thread writes them: in order, and dropped when
they are not read."""

import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator

import pytest

from lean_selector.api.logs import (
    ACCESS_LOG,
    MAX_KINDS,
    JsonLines,
    LineWriter,
    QueuedLines,
    RateLimit,
    TextLines,
)
from tests.support.running_service import DEADLINE_S


def record(
    event: str = "worker registered",
    *args: object,
    name: str = "lean_selector.x",
    created: float = 1_700_000_000.25,
    **fields: object,
) -> logging.LogRecord:
    made = logging.LogRecord(name, logging.INFO, __file__, 1, event, args, None)
    made.created = created
    vars(made).update(fields)
    return made


def test_a_text_line_has_utc_time_level_logger_event_and_fields() -> None:
    line = TextLines().format(record(worker_id=7, model="m", tenant_id=None, ok=True))
    assert line == (
        "2023-11-14T22:13:20.250Z INFO lean_selector.x worker registered "
        "worker_id=7 model=m tenant_id=null ok=true"
    )


def test_a_json_line_has_the_same() -> None:
    line = JsonLines().format(record("%s of %d", "one", 2, worker_id=7, reasons=["a", "b"]))
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "info",
        "logger": "lean_selector.x",
        "event": "one of 2",
        "worker_id": 7,
        "reasons": ["a", "b"],
    }


@pytest.mark.parametrize("lines", [TextLines(), JsonLines()], ids=["text", "json"])
@pytest.mark.parametrize(
    "nasty",
    [
        *("two\nlines", "cr\r", "nul\x00", "esc\x1b[31m", 'quote"', "\u2028", "\x85", "\ud800"),
        "\U000e0041",
    ],
)
def test_whatever_a_client_sent_stays_on_one_line(lines: logging.Formatter, nasty: str) -> None:
    line = lines.format(record(nasty, field=nasty, nested=[nasty]))
    assert len(line.splitlines()) == 1
    assert "\x1b" not in line
    line.encode()


def test_text_that_looks_like_another_field_is_quoted() -> None:
    assert TextLines().format(record(model="a b=c")).endswith(' model="a b=c"')
    assert TextLines().format(record(model="")).endswith(' model=""')


def test_an_exception_is_a_field_of_the_line() -> None:
    failed = record("a handler failed")
    try:
        raise ValueError("why")
    except ValueError:
        failed.exc_info = sys.exc_info()
    assert json.loads(JsonLines().format(failed))["exception"].endswith("ValueError: why")
    (line,) = TextLines().format(failed).splitlines()
    assert "ValueError: why" in line


def test_a_burst_passes_and_then_one_line_a_second_that_says_how_many_were_kept_back() -> None:
    limit = RateLimit(burst=3, lines_per_s=1.0)
    passed = [limit.filter(record(created=100.0)) for _ in range(5)]
    assert passed == [True, True, True, False, False]
    assert limit.suppressed == 2
    later = record(created=101.0)
    assert limit.filter(later)
    assert vars(later)["suppressed"] == 2
    assert not limit.filter(record(created=101.0))


def test_each_kind_has_a_burst_of_its_own_and_the_access_log_no_limit() -> None:
    limit = RateLimit(burst=1)
    assert limit.filter(record("a"))
    assert limit.filter(record("b"))
    assert limit.filter(record("a", name="other"))
    assert not limit.filter(record("a"))
    assert all(limit.filter(record("request", name=ACCESS_LOG)) for _ in range(100))


def test_messages_made_of_data_share_one_allowance_when_there_are_too_many() -> None:
    limit = RateLimit(burst=1)
    passed = sum(limit.filter(record(f"kind {number}")) for number in range(2 * MAX_KINDS))
    assert passed == MAX_KINDS + 1


def test_a_clock_that_steps_back_gives_nothing_away() -> None:
    limit = RateLimit(burst=1, lines_per_s=1.0)
    assert limit.filter(record(created=100.0))
    assert not limit.filter(record(created=50.0))
    assert not limit.filter(record(created=50.5))


# -- the thread that writes them -------------------------------------------------------------------

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


def test_a_reader_that_has_gone_costs_nothing() -> None:
    read, write = os.pipe()
    os.close(read)
    writer = LineWriter(write, BOUND)
    for _ in range(BOUND):  # many times what may wait
        assert writer.write("x") or writer.flush(DEADLINE_S)
    assert writer.flush(DEADLINE_S)
    os.close(write)
