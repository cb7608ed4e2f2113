"""The soak: its judgement of answers and of stalls. `.ci/compiled` runs the whole."""

import contextlib
import socket
import threading

import pytest

from loadtest.soaking.lanes import Book, Lane, Report, Run
from loadtest.soaking.verdict import Memory, growth, stalls
from loadtest.soaking.watch import Late

OK = b'HTTP/1.1 200 OK\r\ndate: x\r\ncontent-length:   15\r\n\r\n{"status":"ok"}'


def test_a_stall_is_the_services_unless_the_machine_kept_it_or_we_stopped_it() -> None:
    probe = [
        Late("answer", 1.0, 1.2),  # its own
        Late("answer", 2.0, 2.3),  # the control was not woken either
        Late("answer", 3.0, 3.3),  # the process wanted a CPU
        Late("answer", 4.0, 4.3, waited=0.29),  # the probe did
        Late("answer", 5.0, 5.5),  # stopped
    ]
    control = [Late("woken", 1.9, 2.29), Late("starved", 3.0, 3.3, waited=0.28)]
    found = stalls(probe, control, [(5.0, 5.4)], [("disk full", 0.9, 1.1)])
    assert found.outside == pytest.approx(0.2)
    assert found.during == "disk full"
    assert found.raw == pytest.approx(0.3)
    assert found.injected == pytest.approx(0.5)
    assert found.answers_lost == 0
    assert stalls([Late("lost", 1.0, 2.0, why="closed")], [], []).answers_lost == 1


def test_memory_grows_by_what_is_held_and_not_by_what_is_kept_for_later() -> None:
    marks = [Memory(1, 100.0, 60.0), Memory(5, 120.0, 61.2), Memory(10, 90.0, 58.8)]
    assert growth(marks) == pytest.approx(0.02)
    assert growth([*marks, Memory(11, 100.0, 54.0)]) == pytest.approx(0.1)
    # Where the C library cannot be asked all that is resident counts.
    assert growth([Memory(1, 100.0, None), Memory(5, 104.0, None)]) == pytest.approx(0.04)
    assert growth([]) == 0.0


class OddServer:
    """Answers each request with the next of `answers`; behind one before None, it closes."""

    def __init__(self, *answers: bytes | None) -> None:
        self._answers = list(answers)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            with connection:
                while connection.recv(1 << 16) and self._answers:
                    answer = self._answers.pop(0)
                    connection.sendall(answer or b"")
                    if answer is None or self._answers[:1] == [None]:
                        return

    def close(self) -> None:
        self._listener.close()


def _answer(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


PLACED = _answer(
    b'{"reservation_id":"s-000000000000","model_name":"soak","worker_id":1,"dp_rank":0,'
    b'"endpoint":"http://a","effective_prefill_tokens":5}'
)


class UntilTrouble(Book):
    """Begins nothing more once something was wrong, and reports no output blocks."""

    def trouble(self, text: str) -> None:
        self.draining = True

    def outputs(self) -> int:
        return 0


def _lived(*answers: bytes | None) -> Report:
    """What one lane makes of a server that answers so, in one lifecycle."""
    server = OddServer(*answers)
    book = UntilTrouble(seed=0, prefix="s-", goal=1, tolerant=False)
    for _ in Run(book, [Lane(book, server.port, 1, 0.0)]).play():
        pass
    server.close()
    return book.report


def test_a_lifecycle_that_is_answered_is_no_loss() -> None:
    report = _lived(PLACED, OK, OK)
    assert (report.lifecycles, report.requests, report.answers) == (1, 3, 3)
    assert (report.lost, report.wrong) == (0, 0)


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param((None,), id="closed before the first answer"),
        pytest.param((PLACED,), id="closed before a later one"),
        pytest.param((PLACED, OK[:-3], None), id="closed within one"),
    ],
)
def test_an_answer_that_does_not_come_is_lost(answers: tuple[bytes | None, ...]) -> None:
    report = _lived(*answers)
    assert (report.lost, report.requests - report.answers) == (1, 1)


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param((PLACED + OK,), id="two answers to one request"),
        pytest.param((PLACED.replace(b"s-0", b"s-1"),), id="the answer to another"),
        pytest.param((PLACED, _answer(b"{}")), id="a body without its field"),
        pytest.param((PLACED, _answer(b'{"error":"x"}', b"404 Not Found")), id="another status"),
        pytest.param((b"nonsense\r\n\r\n",), id="no answer at all"),
    ],
)
def test_an_answer_that_is_not_the_one_is_wrong(answers: tuple[bytes, ...]) -> None:
    assert _lived(*answers).wrong == 1
