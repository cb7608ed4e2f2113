"""The clients of the soak that behave, a program of its own: whole lifecycles, every answer judged.

    python -m loadtest.soaking.lanes PORT [--uds PATH] [--lifecycles N] [--pause S] [--tolerant] ...

Each lane is a thread with a kept connection that lives a handful of lifecycles at a time: it
selects and reserves for all of them in one write, completes their prefills, reports output blocks,
frees them. Requests are prepared bytes, so that one core keeps a service of one core busy. Prints a
line of JSON each second and at the end; SIGTERM lets those under way come to their end first.
`--tolerant` is for a service that is killed meanwhile: what it lets down is no loss.
"""

import argparse
import signal
import socket
import threading
import time
from contextlib import closing
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
SELECT, PREFILL, OUTPUT, FREE = "select", "prefill", "output", "free"


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


_COUNTS = ("lifecycles", "requests", "answers", "lost", "wrong", "shed", "let_down", "connections")


class Book:
    """What all lanes of a run share."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.tolerant, self.pause_s, self.prefix = args.tolerant, args.pause, args.prefix.encode()
        self.draining = threading.Event()
        self.lanes: list[Lane] = []
        self.selects = [_select(prompt) for family in families(args.seed) for prompt in family]
        self._goal: int | None = args.lifecycles

    def left(self) -> int:
        """How many lifecycles may begin."""
        done = sum(lane.report.lifecycles for lane in self.lanes)
        left = 1 << 30 if self._goal is None else self._goal - done
        if left <= 0:
            self.draining.set()
        return 0 if self.draining.is_set() else left

    def told(self, *, ended: bool = False) -> str:
        """A line of JSON: the sum of what the lanes came to."""
        whole = Report(ended=ended)
        for lane in self.lanes:
            for name in _COUNTS:
                setattr(whole, name, getattr(whole, name) + getattr(lane.report, name))
            whole.troubles += lane.report.troubles
        del whole.troubles[MOST_TROUBLES:]
        return msgspec.json.encode(whole).decode() + "\n"


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


class Lane(threading.Thread):
    """One connection at a time and the lifecycles on it, up to `depth` at once. `address`: a port
    or a path."""

    def __init__(self, book: Book, address: int | str, depth: int) -> None:
        super().__init__()
        self.report = Report()
        self._book, self._address, self._depth = book, address, depth
        self._drawn = Random()
        self._name = b"%b%02d" % (book.prefix, len(book.lanes))
        self._begun = 0
        self._known: dict[str, bytes] = {}  # the last good answer of each step but selection
        self._step, self._asked, self._taken = FREE, 0, 0  # requests under way, answers so far

    def run(self) -> None:
        while not self._book.draining.is_set():
            self._asked = self._taken = 0
            try:
                with closing(connected(self._address, ANSWER_S)) as connection:
                    self.report.connections += 1
                    self._live_on(connection)
            except ValueError as error:  # no answer, or not the one that was asked for
                self._lose(str(error), wrong=1)
            except OSError as error:
                self._lose(str(error))

    def _live_on(self, connection: socket.socket) -> None:
        """For the life of a connection, which we close, and the other end must then."""
        drawn = self._drawn
        for _ in range(drawn.randrange(BATCHES // 2, BATCHES * 3 // 2)):
            count = min(self._depth, self._book.left())
            ids = [b"%b%010d" % (self._name, self._begun + at) for at in range(count)]
            if not ids:
                break
            self._begun += count
            for step in (SELECT, PREFILL, *[OUTPUT] * drawn.randrange(3), FREE):
                ids = ids and self._ask(connection, step, ids)
            self.report.lifecycles += len(ids)
            if self._book.pause_s:
                time.sleep(self._book.pause_s)
        connection.shutdown(socket.SHUT_WR)
        if rest := connection.recv(1 << 18):
            raise Malformed(f"nobody asked for {rest[:120]!r}")

    def _request(self, step: str, lifecycle: bytes) -> bytes:
        if step != SELECT:
            return _LATER[step] % lifecycle
        drawn, selects = self._drawn.random, self._book.selects
        template = selects[int(drawn() * len(selects))]
        return template % (lifecycle, FRESH_TOKENS.start + int(drawn() * len(FRESH_TOKENS)))

    def _ask(self, connection: socket.socket, step: str, ids: list[bytes]) -> list[bytes]:
        """Send a step of these lifecycles. Return those that were answered with 200."""
        report = self.report
        self._step, self._asked, self._taken = step, len(ids), 0
        report.requests += len(ids)
        connection.sendall(b"".join([self._request(step, each) for each in ids]))
        known, data, good = self._known.get(step), b"", list[bytes]()
        while self._taken < len(ids):
            piece = connection.recv(1 << 18)
            if not piece:
                raise ConnectionError("the connection was closed")
            data = data + piece if data else piece
            if known is not None and not self._taken and data == known * len(ids):
                self._taken = len(ids)
                report.answers += len(ids)
                return ids
            at = 0
            while self._taken < len(ids) and (found := answer_at(data, at)):
                status, begin, end = found
                if self._is_good(step, ids[self._taken], status, data[begin:end]):
                    good.append(ids[self._taken])
                    if step != SELECT:
                        self._known[step] = data[at:end]
                self._taken += 1
                at = end
            data = data[at:]
        if data:
            raise Malformed(f"an answer more than was asked for: {data[:120]!r}")
        return good

    def _is_good(self, step: str, lifecycle: bytes, status: int, body: bytes) -> bool:
        self.report.answers += 1
        if status == 503 and step == SELECT:
            decode_refusal(body)
            self.report.shed += 1
        elif status != 200:
            self.report.wrong += not self._book.tolerant
            self._trouble(f"{lifecycle.decode()}, {step}: {status} {body[:200]!r}")
        elif step != SELECT:
            decode_done(body)
        elif decode_placement(body).reservation_id != lifecycle.decode():
            raise Malformed(f"{lifecycle!r} was answered {body!r}")
        return status == 200

    def _lose(self, why: str, wrong: int = 0) -> None:
        """The connection is of no use any more: what waits for an answer has lost it."""
        unanswered = self._asked - self._taken
        if self._book.tolerant:
            self.report.let_down += unanswered
            time.sleep(AGAIN_S)
            return
        self.report.lost += unanswered
        # A connection that we keep and that is closed on us, without a request: no answer is
        # lost, but nobody asked for that either.
        self.report.wrong += wrong or not unanswered
        self._trouble(f"{self._step}, {unanswered} unanswered: {why}")

    def _trouble(self, text: str) -> None:
        if len(self.report.troubles) < MOST_TROUBLES:
            self.report.troubles.append(text)


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
    book = Book(args)
    depths = [(args.port, DEPTHS[at % len(DEPTHS)]) for at in range(args.lanes)]
    depths += [(args.uds, depth) for depth in UDS_DEPTHS] if args.uds else []
    for address, depth in depths:
        book.lanes.append(Lane(book, address, depth))
    signal.signal(signal.SIGTERM, lambda *_: book.draining.set())
    for lane in book.lanes:
        lane.start()
    told_at = time.monotonic()
    for lane in book.lanes:
        while lane.is_alive():
            lane.join(max(0.0, told_at + 1.0 - time.monotonic()))
            if time.monotonic() >= told_at + 1.0:
                told_at += 1.0
                print(book.told(), end="", flush=True)
    print(book.told(ended=True), end="", flush=True)


if __name__ == "__main__":
    main()
