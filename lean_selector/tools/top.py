"""`lean-selector top URL`: shows the fleet of a running selector in a terminal, worst ranks first.

It shows the same data as the web page at /ui, from `GET /fleet`. If stdout is not a terminal, it
prints all ranks once."""

import argparse
import asyncio
import re
import shutil
import sys
from collections.abc import Sequence
from itertools import accumulate, takewhile
from textwrap import wrap
from typing import Final, TextIO

import uvloop

from lean_selector.api.judgements import Level
from lean_selector.http.outbound import OutboundClient
from lean_selector.http.trust import Credentials
from lean_selector.links.names import Resolver
from lean_selector.tools.check import add_selector_arguments, patience, selector_credentials
from lean_selector.tools.check_questions import AskedSelector, NotASelector
from lean_selector.wire.findings import Finding
from lean_selector.wire.fleet import Fleet, FleetRank, FleetWorker

_LEVELS: Final = (Level.ERROR, Level.WARNING, Level.NOTE, Level.OK)
_COLOURS: Final = {Level.ERROR: "\x1b[31m", Level.WARNING: "\x1b[33m"}
_PLAIN: Final = "\x1b[0m"
_SUBJECT: Final = re.compile(r"worker (\d+)(?: rank (\d+))?")
# Heading, and whether its column holds numbers; the endpoint's is as wide as the longest.
_COLUMNS: Final = (
    *(("worker", False), ("endpoint", False), ("state", False), ("prefill", True)),
    *(("requests", True), ("blocks", True), ("cached", True), ("ttft", True), ("events", False)),
)
_WIDEST: Final = 160  # of a sentence, in characters
_INDENT: Final = 4  # of what is wrong with a rank, below its row
_PATIENCE_S: Final = 10.0
_HIDE_CURSOR: Final = "\x1b[?25l"
_SHOW_CURSOR: Final = "\x1b[?25h"
_CLEAR_LINE_END: Final = "\x1b[K"
_CLEAR_BELOW: Final = "\x1b[J"

RankKey = tuple[int, int]


class Screen:
    """Lines on a terminal that are redrawn in place. While they are shown, the cursor is hidden."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._drawn = 0  # lines of the last drawing

    def draw(self, text: Sequence[str]) -> None:
        """Replaces the previous drawing by the lines `text`, which must fit into the terminal."""
        back = f"\x1b[{self._drawn}A\r" if self._drawn else ""
        body = "".join(f"{line}{_CLEAR_LINE_END}\n" for line in text)
        self._out.write(f"{_HIDE_CURSOR}{back}{body}{_CLEAR_BELOW}")
        self._out.flush()
        self._drawn = len(text)

    def close(self) -> None:
        if self._drawn:
            self._out.write(_SHOW_CURSOR)
            self._out.flush()


def printed(text: str) -> str:
    """Replaces characters of a received text that a terminal might take for commands."""
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def verdicts(findings: Sequence[Finding]) -> dict[tuple[int, int | None], Finding]:
    """Return the worst finding by (worker, rank). Findings about a whole worker have rank None."""
    found: dict[tuple[int, int | None], Finding] = {}
    for finding in sorted(findings, key=lambda each: _LEVELS.index(each.level), reverse=True):
        if about := _SUBJECT.fullmatch(finding.subject):
            rank = None if about[2] is None else int(about[2])
            found[int(about[1]), rank] = finding
    return found


def level_of(rank: FleetRank, finding: Finding | None) -> str:
    if rank.state not in ("in_service", "probation", "draining"):
        return Level.ERROR
    if finding is not None and finding.level != Level.NOTE:
        return finding.level
    return Level.OK if rank.state == "in_service" else Level.WARNING


def drawing(
    fleet: Fleet, before: dict[RankKey, FleetRank], columns: int, lines: int | None, colours: bool
) -> list[str]:
    """Return the fleet as lines of at most `columns` characters. If `lines` is given, there are at
    most `lines` - 1. Hit rates and TTFTs count the requests since the earlier state `before`."""
    worst = verdicts(fleet.findings)
    workers = {worker.worker_id: worker for worker in fleet.workers}
    rows: list[tuple[tuple[int, int, int, int], str, list[str], str]] = []
    for rank in fleet.ranks:
        of_worker, of_rank = worst.get((rank.worker_id, None)), worst.get((*_key(rank),))
        both = [each for each in (of_rank, of_worker) if each is not None]
        finding = min(both, key=lambda each: _LEVELS.index(each.level), default=None)
        level = level_of(rank, finding)
        cells = _cells(rank, before.get(_key(rank)), workers.get(rank.worker_id))
        place = _LEVELS.index(level), -rank.prefill_tokens, *_key(rank)
        rows.append((place, level, cells, "" if finding is None else printed(finding.what)))
    rows.sort()
    shown = {rank.worker_id for rank in fleet.ranks}
    able = sum(rank.state in ("in_service", "probation") for rank in fleet.ranks)
    running = sum(rank.requests for rank in fleet.ranks)
    waiting = sum(model.pending_count for model in fleet.models)
    asked, found, _, _ = _sums(fleet.ranks, before)
    widths = [
        max([len(name), *(len(cells[at]) for _, _, cells, _ in rows)])
        for at, (name, _) in enumerate(_COLUMNS)
    ]
    texts = [
        f"{able} of {len(fleet.ranks)} ranks can be chosen, "
        f"{running} request{'s' * (running != 1)}, {waiting} waiting, "
        f"{_share(found, asked)} of prompt tokens cached",
        *(
            f"{finding.level}: {printed(finding.subject)}: {printed(finding.what)}"
            for finding in fleet.findings
            if (about := _SUBJECT.fullmatch(finding.subject)) is None or int(about[1]) not in shown
        ),
    ]
    head = [line for text in texts for line in wrap(text, min(columns, _WIDEST))]
    head += ["", _row([name for name, _ in _COLUMNS], widths)]
    body = [
        [(level, line[:columns]) for line in [_row(cells, widths), *_below(what, columns)]]
        for _, level, cells, what in rows
    ]
    room = sys.maxsize if lines is None else lines - 1 - len(head)
    kept = list(takewhile(lambda used: used <= room, accumulate(map(len, body))))
    if len(kept) < len(body):  # the last line tells how many are missing
        kept = [used for used in kept if used < room]
        body[len(kept) :] = [[(Level.OK, f"... and {len(body) - len(kept)} more ranks"[:columns])]]
    drawn = [
        f"{_COLOURS[level]}{text}{_PLAIN}" if colours and level in _COLOURS else text
        for each in body
        for level, text in each
    ]
    return [*(line[:columns] for line in head), *drawn][: None if lines is None else lines - 1]


def _below(what: str, columns: int) -> list[str]:
    margin = " " * _INDENT
    width = max(min(columns, _WIDEST), 2 * _INDENT)
    return wrap(what, width, initial_indent=margin, subsequent_indent=margin)


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(
        f"{cell:>{width}}" if is_number else f"{cell:<{width}}"
        for cell, width, (_, is_number) in zip(cells, widths, _COLUMNS, strict=True)
    ).rstrip()


def _cells(rank: FleetRank, before: FleetRank | None, worker: FleetWorker | None) -> list[str]:
    asked, found, ttft_s, ttft_count = _sums([rank], {} if before is None else {_key(rank): before})
    total = None if worker is None else worker.total_kv_blocks
    endpoint = "-" if worker is None else worker.endpoint or "-"
    return [
        str(rank.worker_id) + (f"/{rank.dp_rank}" if rank.dp_rank else ""),
        printed(endpoint.removeprefix("http://")),
        rank.state if worker is None or worker.role == "both" else f"{rank.state} {worker.role}",
        f"{rank.prefill_tokens}",
        f"{rank.requests}",
        f"{rank.cached_blocks}" + (f"/{total}" if total else ""),
        _share(found, asked),
        f"{1e3 * ttft_s / ttft_count:.0f} ms" if ttft_count else "-",
        rank.source or "-",
    ]


def _sums(
    ranks: Sequence[FleetRank], before: dict[RankKey, FleetRank]
) -> tuple[int, int, float, int]:
    """Return prompt tokens, cached prompt tokens, sum of TTFTs in s, and number of TTFTs. Counts
    what was added since the state `before`; if no prompt tokens were added, counts everything."""
    now = _total(ranks)
    then = _total([before[_key(rank)] for rank in ranks if _key(rank) in before])
    if now[0] <= then[0]:
        return now
    return now[0] - then[0], now[1] - then[1], now[2] - then[2], now[3] - then[3]


def _total(ranks: Sequence[FleetRank]) -> tuple[int, int, float, int]:
    return (
        sum(rank.prompt_tokens for rank in ranks),
        sum(rank.overlap_tokens for rank in ranks),
        sum(rank.ttft_s for rank in ranks),
        sum(rank.ttft_count for rank in ranks),
    )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _key(rank: FleetRank) -> RankKey:
    return rank.worker_id, rank.dp_rank


# -- the command line ------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selector_arguments(parser)
    parser.add_argument(
        "--seconds", type=patience, default=2.0, help="refresh interval; default: 2"
    )
    parser.add_argument("--once", action="store_true", help="print the fleet once and exit")


def main(argv: Sequence[str]) -> int:
    """Shows the fleet until Ctrl-C, or once. Return 0, or 2 if no selector answers."""
    parser = argparse.ArgumentParser(
        prog="lean-selector top",
        description="Show the fleet of a running selector, the worst ranks first; Ctrl-C ends it.",
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        credentials = selector_credentials(args)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_show(args, credentials))
    except NotASelector as error:
        sys.stderr.write(f"lean-selector top: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


async def _show(args: argparse.Namespace, credentials: Credentials) -> None:
    client = OutboundClient(Resolver().resolve, credentials)
    selector = AskedSelector(client, args.url, _PATIENCE_S)
    first: dict[RankKey, FleetRank] = {}
    if args.once or not sys.stdout.isatty():
        lines = drawing(await selector.fleet(), first, sys.maxsize, None, colours=False)
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        return
    screen = Screen(sys.stdout)
    try:
        while True:
            fleet = await selector.fleet()
            first = first or {_key(rank): rank for rank in fleet.ranks}
            columns, lines_ = shutil.get_terminal_size()
            screen.draw(drawing(fleet, first, columns, lines_, colours=True))
            await asyncio.sleep(args.seconds)
    finally:
        screen.close()
