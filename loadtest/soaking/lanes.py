"""The clients of the soak that behave, a program of its own: whole lifecycles, every answer judged.

    python -m loadtest.soaking.lanes PORT [--uds PATH] [--lifecycles N] [--pause S] [--tolerant] ...

Each lane is a kept connection that lives a handful of lifecycles at a time: it selects and reserves
for all of them in one write, completes their prefills, reports output blocks, frees them. Requests
are prepared bytes, so that one core keeps a service of one core busy. Prints a line of JSON each
second and at the end; SIGTERM lets those under way come to their end first. `--tolerant` is for a
service that is killed meanwhile: what it lets down is no loss.
"""

import argparse
import inspect
import select
import signal
import socket
import sys
import time
from collections.abc import Generator, Iterator
from random import Random

import msgspec

from loadtest.http_client import Malformed, answer_at, connected
from loadtest.soaking.fleet import FRESH_TOKENS, MODEL, authorized, families

ANSWER_S = 60.0  # what takes longer is lost
AGAIN_S = 0.5  # before a lane connects again that was let down
BATCHES = 2_000  # of a connection, about; then the lane makes another
DEPTHS = (1, 1, 1, 1, 4, 8, 16, 16)  # lifecycles at a time of the lanes over TCP
UDS_DEPTHS = (1, 8)
MOST_TROUBLES = 20
ID_DIGITS = 12
SELECT, PREFILL, OUTPUT, FREE, REST = "select", "prefill", "output", "free", "rest"


class Placement(msgspec.Struct):
    """What a selection's answer must have."""

    reservation_id: str
    model_name: str
    worker_id: int
    dp_rank: int
    endpoint: str
    effective_prefill_tokens: int


class Refusal(msgspec.Struct):
    error: str


class Done(msgspec.Struct):
    status: str


decode_placement = msgspec.json.Decoder(Placement).decode
decode_refusal = msgspec.json.Decoder(Refusal).decode
decode_done = msgspec.json.Decoder(Done).decode


class Report(msgspec.Struct):
    """What a run came to so far. lost: requests without an answer; wrong: answers that are not
    one of those expected; shed: selections refused because all workers were busy."""

    lifecycles: int = 0
    requests: int = 0
    answers: int = 0
    lost: int = 0
    wrong: int = 0
    shed: int = 0
    let_down: int = 0  # of a tolerant run: what a killed service left unanswered
    connections: int = 0
    troubles: list[str] = []
    ended: bool = False


class Book:
    """What all lanes of a run share: numbers, requests, the tally."""

    def __init__(self, seed: int, prefix: str, goal: int | None, tolerant: bool) -> None:
        self.report = Report()
        self.tolerant = tolerant
        self.known: dict[str, bytes] = {}  # the last good answer of each step but selection
        self.draining = False
        self.drawn = Random()
        self._goal = goal
        self._begun = 0
        self._prefix = prefix.encode()
        self._selects = [_select(prompt) for family in families(seed) for prompt in family]

    def begin(self, count: int) -> list[bytes]:
        """Ids of that many lifecycles that shall begin now, or of as many as are left."""
        left = count if self._goal is None else self._goal - self.report.lifecycles
        if left <= 0:
            self.draining = True
        if self.draining:
            return []
        ids = [b"%s%012d" % (self._prefix, self._begun + at) for at in range(min(count, left))]
        self._begun += len(ids)
        return ids

    def request(self, step: str, lifecycle: bytes) -> bytes:
        if step != SELECT:
            return _LATER[step] % lifecycle
        drawn = self.drawn.random
        template = self._selects[int(drawn() * len(self._selects))]
        return template % (lifecycle, FRESH_TOKENS.start + int(drawn() * len(FRESH_TOKENS)))

    def outputs(self) -> int:
        return self.drawn.randrange(3)

    def trouble(self, text: str) -> None:
        if len(self.report.troubles) < MOST_TROUBLES:
            self.report.troubles.append(text)

    def told(self, *, ended: bool = False) -> str:
        """A line of JSON."""
        self.report.ended = ended
        return msgspec.json.encode(self.report).decode() + "\n"


def _select(prompt: list[int]) -> bytes:
    """A selection's bytes with places for an id and for the last token, both of fixed length."""
    tokens = ",".join(map(str, prompt)).encode()
    body = b'{"reservation_id":"%%s","model_name":"%b","token_ids":[%b,%%d]}' % (
        MODEL.encode(),
        tokens,
    )
    whole = authorized(
        "POST", "/select_and_reserve", body % (bytes(ID_DIGITS + 2), FRESH_TOKENS.start)
    )
    return whole.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" + body


_LATER = {
    PREFILL: authorized("POST", "/reservations/%b/prefill_complete"),
    OUTPUT: authorized("POST", "/reservations/%b/output_block", b"{}"),
    FREE: authorized("DELETE", "/reservations/%b"),
}

# What a lane asks next, of which lifecycles; it is sent those that were answered with 200.
Steps = Generator[tuple[str, list[bytes]], list[bytes], None]


class Lane:
    """One connection and the lifecycles on it, `depth` at a time. `address`: a port or a path."""

    def __init__(self, book: Book, address: int | str, depth: int, pause_s: float) -> None:
        self._book, self._address, self._depth = book, address, depth
        self._pause_s = pause_s
        self.due = 0.0  # when to go on, while nothing is under way
        self.waits_since: float | None = None
        self._socket: socket.socket | None = None
        self._live: list[bytes] = []  # lifecycles that this step asked for
        self._placed: list[bytes] = []  # those of them whose answer was good
        self._taken = 0  # answers of this step that were read
        self._received = b""
        self._closing = False
        self._step = FREE

    @property
    def is_done(self) -> bool:
        return self._socket is None and self._book.draining

    def fileno(self) -> int:
        return -1 if self._socket is None else self._socket.fileno()

    def _steps(self) -> Steps:
        """Of the life of a connection; then the lane makes another."""
        book = self._book
        for _ in range(book.drawn.randrange(BATCHES // 2, BATCHES * 3 // 2)):
            if not (ids := book.begin(self._depth)):
                return
            for step in (SELECT, PREFILL, *[OUTPUT] * book.outputs(), FREE):
                ids = yield step, ids
                if not ids:
                    break
            else:
                book.report.lifecycles += len(ids)
            if self._pause_s:
                yield REST, []

    def connect(self) -> None:
        """Raises OSError. A local connection is made at once, or not at all."""
        self._socket = connected(self._address, ANSWER_S)
        self._received, self._closing = b"", False
        self._life = self._steps()
        self._book.report.connections += 1

    def go_on(self) -> None:
        """Take the next step; none is left: close the connection, as the other end must then."""
        assert self._socket is not None
        book = self._book
        placed, self._placed, self._taken = self._placed, [], 0
        begun = inspect.getgeneratorstate(self._life) != inspect.GEN_CREATED
        try:
            self._step, self._live = self._life.send(placed) if begun else next(self._life)
        except StopIteration:
            self._closing = True  # and whatever comes before the end was asked for by nobody
            self._socket.shutdown(socket.SHUT_WR)
        if self._step == REST and not self._closing:
            self.due, self.waits_since = time.monotonic() + self._pause_s, None
            return
        self.waits_since = time.monotonic()
        if not self._closing:
            book.report.requests += len(self._live)
            self._socket.sendall(b"".join([book.request(self._step, each) for each in self._live]))

    def receive(self) -> bool:
        """Read what is there; whether the connection has ended, which is closed then."""
        assert self._socket is not None
        try:
            piece = self._socket.recv(1 << 18)
            if piece:
                self._received = self._received + piece if self._received else piece
                self._judge()
                return False
        except ValueError as error:  # no answer, or not the one that was asked for
            return self.lose(str(error), wrong=1)
        except OSError as error:
            return self.lose(str(error))
        if self._closing and not self._received:
            self.close()
            return True
        return self.lose("the connection was closed")

    def _judge(self) -> None:
        """Count the answers that have come; behind the last of a step, take the next."""
        if self._closing or self.waits_since is None:
            raise Malformed(f"nobody asked for {self._received[:120]!r}")
        book, step, data, at = self._book, self._step, self._received, 0
        known = book.known.get(step)
        if known is not None and not self._taken and data == known * len(self._live):
            book.report.answers += len(self._live)
            self._placed = self._live
        else:
            while self._taken < len(self._live) and (found := answer_at(data, at)):
                status, begin, end = found
                self._take(step, self._live[self._taken], status, data[begin:end])
                if step != SELECT and status == 200:
                    book.known[step] = data[at:end]
                self._taken += 1
                at = end
            self._received = data[at:]
            if self._taken < len(self._live):
                return
            if self._received:
                raise Malformed(f"an answer more than was asked for: {self._received[:120]!r}")
        self._received = b""
        self.go_on()

    def _take(self, step: str, lifecycle: bytes, status: int, body: bytes) -> None:
        book = self._book
        book.report.answers += 1
        if status == 503 and step == SELECT:
            decode_refusal(body)
            book.report.shed += 1
        elif status != 200:
            book.report.wrong += not book.tolerant
            book.trouble(f"{lifecycle.decode()}, {step}: {status} {body[:200]!r}")
        else:
            if step != SELECT:
                decode_done(body)
            elif decode_placement(body).reservation_id != lifecycle.decode():
                raise Malformed(f"{lifecycle!r} was answered {body!r}")
            self._placed.append(lifecycle)

    def lose(self, why: str, wrong: int = 0) -> bool:
        """The connection is of no use any more: what waits for an answer has lost it."""
        report = self._book.report
        asked = 0 if self._closing or self.waits_since is None else len(self._live)
        unanswered = max(0, asked - self._taken)
        if self._book.tolerant:
            report.let_down += unanswered
        else:
            report.lost += unanswered
            # A connection that we keep and that is closed on us, without a request: no answer is
            # lost, but nobody asked for that either.
            report.wrong += wrong or not unanswered
            self._book.trouble(f"{self._step}, {unanswered} unanswered: {why}")
        self.close()
        return True

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self.waits_since, self._live, self._placed = None, None, [], []
        self.due = time.monotonic() + (AGAIN_S if self._book.tolerant else 0.0)


class Run:
    """All lanes of a process, on one poll."""

    def __init__(self, book: Book, lanes: list[Lane]) -> None:
        self._book, self._lanes = book, lanes
        self._poll = select.epoll()
        self._of: dict[int, Lane] = {}

    def play(self) -> Iterator[str]:
        """Until all lanes have come to their end; yields what to print, once a second."""
        told_at = time.monotonic()
        self._look()
        while not all(lane.is_done for lane in self._lanes):
            for descriptor, _ in self._poll.poll(0.01):
                if self._of[descriptor].receive():
                    del self._of[descriptor]  # closing it took it off the poll
            self._look()
            if time.monotonic() >= told_at + 1.0:
                told_at += 1.0
                yield self._book.told()
        yield self._book.told(ended=True)

    def _look(self) -> None:
        """Lanes that rest and are due go on; those that wait for too long have lost."""
        now = time.monotonic()
        for lane in self._lanes:
            try:
                if lane.waits_since is not None:
                    if now - lane.waits_since > ANSWER_S:
                        raise TimeoutError(f"no answer within {ANSWER_S:.0f} s")
                elif now >= lane.due and not lane.is_done:
                    if lane.fileno() < 0:
                        lane.connect()
                        self._poll.register(lane, select.EPOLLIN)
                        self._of[lane.fileno()] = lane
                    lane.go_on()
            except OSError as error:
                self._of.pop(lane.fileno(), None)
                lane.lose(f"cannot go on: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("port", type=int)
    parser.add_argument("--uds")
    parser.add_argument("--lifecycles", type=int)
    parser.add_argument("--prefix", default="s-", help="two characters, of the ids")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lanes", type=int, default=len(DEPTHS), help="over TCP")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between lifecycles")
    parser.add_argument("--tolerant", action="store_true")
    args = parser.parse_args()
    book = Book(args.seed, args.prefix, args.lifecycles, args.tolerant)
    depths = [DEPTHS[at % len(DEPTHS)] for at in range(args.lanes)]
    lanes = [Lane(book, args.port, depth, args.pause) for depth in depths]
    if args.uds:
        lanes += [Lane(book, args.uds, depth, args.pause) for depth in UDS_DEPTHS]

    def drain(*_: object) -> None:
        book.draining = True

    signal.signal(signal.SIGTERM, drain)
    for line in Run(book, lanes).play():
        sys.stdout.write(line)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
