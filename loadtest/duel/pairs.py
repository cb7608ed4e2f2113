"""What one option costs: this service with it and without it, in interleaved pairs of rounds.

Both processes have the same workers and get the same requests, a hundred at a time in turns of some
milliseconds, so that whatever else the machine does hits both alike; on one CPU, which their client
does not use, where there are two; and each is the one that was started first in every second pair.
Of each pair the ratio counts, not the figures. `nothing` compares the service with itself, and so
tells the noise.
"""

import os
import secrets
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import comb
from pathlib import Path

import msgspec

from loadtest.child_service import JSON
from loadtest.duel.client import Connection
from loadtest.duel.engines import Engines
from loadtest.duel.prompts import Prompt, Prompts, select_request
from loadtest.duel.targets import Service, Target

ROUNDS = 20
WORKERS = 16
REQUESTS = 4_000  # of a round, to each
_SLICE = 100  # of them in a turn
_CONNECTIONS = 8  # at once, as a gateway has them
_CAPACITY = 8_192
_CONFIDENCE = 0.95
_FLAGS = ("--use-kv-events", "false", "--log-level", "warning")


class Option(msgspec.Struct, frozen=True):
    """Flags of the second service, and what header lines the requests to each have more."""

    flags: list[str] = []
    lines: tuple[bytes, bytes] = (b"", b"")
    headers: dict[str, str] = {}  # of our own calls to the second


class Figures(msgspec.Struct, frozen=True):
    """Of one kind of requests: CPU per request without the option in us, and the ratios."""

    name: str
    without_us: float
    ratio: float
    low: float
    high: float


def options(folder: Path) -> dict[str, Option]:
    """By name. `folder` is for what they need in files."""
    token = secrets.token_hex(32)
    file = folder / "tokens"
    file.write_text(f"read {token[::-1]}\nadmin {token}\n")
    flags = ["--auth-token-file", str(file)]
    line = b"authorization: Bearer %b\r\n" % token.encode()
    headers = {"authorization": f"Bearer {token}"}
    return {
        "nothing": Option(),
        "tokens": Option(flags, (b"", line), headers),
        "asking": Option(flags, (line, line), headers),
        "thresholds": Option(["--active-decode-blocks-threshold", "0.9"]),
    }


# Requests with a token that is asked for, over requests without; and the asking alone, where all
# requests have one.
OPTIONS = ("nothing", "tokens", "asking", "thresholds")


def kinds(prompts: Prompts) -> dict[str, Callable[[int], Prompt]]:
    """Prompts by their number. Bodies of many lengths are what header sections differ by."""
    return {
        "select, 8 blocks": lambda number: prompts.cut(number, 8, 1),
        "select, 8 to 512 blocks": lambda number: prompts.cut(number, 8 + number % 505, 1),
    }


def measure(
    target: Target, name: str, folder: Path, rounds: int, say: Callable[[str], None]
) -> list[Figures]:
    """Raises TargetError and LoadFailed."""
    option = options(folder)[name]
    prompts = Prompts(None, 16)
    bodies = kinds(prompts)
    taken: dict[str, list[tuple[float, float]]] = {kind: [] for kind in bodies}
    for number in range(rounds):
        say(f"{target.name}, with {name}: pair {number + 1} of {rounds}")
        # Fresh processes each time: of two alike one is often a percent faster, by its memory.
        with _cpus() as cpus, _running(target, option, prompts, cpus, number) as pair:
            for kind, prompt in bodies.items():
                some = [prompt(at) for at in range(number * REQUESTS, (number + 1) * REQUESTS)]
                taken[kind].append(_round(pair, option, some, number))
    figures = []
    for kind, costs in taken.items():
        ratios = sorted(one[1] / one[0] for one in costs)
        low, high = interval(ratios)
        without = statistics.median(one[0] for one in costs)
        figures.append(Figures(kind, without, statistics.median(ratios), low, high))
    return figures


@contextmanager
def _cpus() -> Iterator[list[int]]:
    """The CPU of both services, while this process keeps to the others. None where there is one."""
    all_of_them = sorted(os.sched_getaffinity(0))
    if len(all_of_them) == 1:
        yield []
        return
    os.sched_setaffinity(0, all_of_them[:-1])
    try:
        yield all_of_them[-1:]
    finally:
        os.sched_setaffinity(0, all_of_them)


@contextmanager
def _running(
    target: Target, option: Option, prompts: Prompts, cpus: list[int], number: int
) -> Iterator[list[Service]]:
    """The service without the option, and with it. `number`: of the pair."""
    flags = (_FLAGS, (*_FLAGS, *option.flags))
    with ExitStack() as stack:
        begun = {
            which: stack.enter_context(Service(target, flags[which], cpus))
            for which in _turn(number)
        }
        pair = [begun[0], begun[1]]
        pair[1].headers = {**JSON, **option.headers}
        engines = stack.enter_context(Engines(prompts, WORKERS, _CAPACITY, listened=False))
        for service in pair:
            service.wait()
            engines.register(service)
        yield pair


def _turn(number: int) -> tuple[int, int]:
    """Which goes first: every second time the other."""
    return (0, 1) if number % 2 else (1, 0)


def _round(
    pair: Sequence[Service],
    option: Option,
    prompts: list[Prompt],
    number: int,
) -> tuple[float, float]:
    """CPU in us per request, without the option and with it."""
    plain = [select_request(prompt) for prompt in prompts]
    requests = [[_with_line(each, line) for each in plain] for line in option.lines]
    taken = [0, 0]
    connections = [[Connection(str(one.port)) for _ in range(_CONNECTIONS)] for one in pair]
    for which in _turn(number):  # uncounted: a process that has just begun
        _send(connections[which], requests[which])
    for at in range(0, len(plain), _SLICE):
        for which in _turn(number + at // _SLICE):
            before = pair[which].cpu_ns()
            _send(connections[which], requests[which][at : at + _SLICE])
            taken[which] += pair[which].cpu_ns() - before
    for each in (*connections[0], *connections[1]):
        each.socket.close()
    return taken[0] / 1e3 / len(plain), taken[1] / 1e3 / len(plain)


def _send(connections: Sequence[Connection], requests: Sequence[bytes]) -> None:
    """One on each connection at a time, until all are answered."""
    for at in range(0, len(requests), len(connections)):
        some = list(zip(connections, requests[at : at + len(connections)], strict=False))
        for connection, request in some:
            connection.send(request, 0.0)
        for connection, _ in some:
            while (status := connection.receive()) is None:
                pass
            if status != 200:
                raise ValueError(f"a request was answered with {status}")


def _with_line(request: bytes, line: bytes) -> bytes:
    head, _, body = request.partition(b"\r\n\r\n")
    return b"%b\r\n%b\r\n%b" % (head, line, body)


def interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Where their median is with 95 %, whatever the distribution: between two of the values.

    All of them where there are too few for that.
    """
    count = len(ordered)
    below, rank = 0.0, 0
    while rank < count // 2 and (below + comb(count, rank) / 2**count) * 2 <= 1 - _CONFIDENCE:
        below += comb(count, rank) / 2**count
        rank += 1
    return ordered[max(rank - 1, 0)], ordered[count - max(rank, 1)]


def lines(target: Target, name: str, rounds: int, figures: Sequence[Figures]) -> str:
    """As a table."""
    rows = [
        f"{target.name}, with {name} over without, {rounds} interleaved pairs:",
        *(
            f"  {each.name:26s} {100 * (each.ratio - 1):+5.1f} %  "
            f"({100 * (each.low - 1):+.1f} to {100 * (each.high - 1):+.1f})  "
            f"of {each.without_us:.1f} us"
            for each in figures
        ),
    ]
    return "\n".join(rows)
