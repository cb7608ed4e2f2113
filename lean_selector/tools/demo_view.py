"""What the demo shows while it runs: a screen redrawn in place, or plain lines.

Fits 80 columns by 24 lines and never writes beyond the terminal's size.
"""

import shutil
from collections.abc import Sequence
from typing import TextIO

import msgspec


class WorkerRow(msgspec.Struct, frozen=True):
    """One worker: the first three as the service counts them, the rest as the engine does."""

    worker_id: int
    prefill_tokens: int
    decode_blocks: int
    requests: int
    cached_blocks: int
    capacity_blocks: int


class Snapshot(msgspec.Struct, frozen=True):
    """Everything that one drawing shows. Rates are over the time since the last drawing."""

    elapsed_s: float
    seconds: float
    workers: Sequence[WorkerRow]
    calls_per_s: float
    finished: int
    hit_rate: float
    select_p50_s: float
    select_p99_s: float
    errors: int


_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_CLEAR_LINE_END = "\x1b[K"
_CLEAR_BELOW = "\x1b[J"
_BAR_WIDTH = 16


def overall(shot: Snapshot) -> str:
    """The totals in one line."""
    return (
        f"{shot.calls_per_s:6.0f} calls/s  {shot.finished:6} turns  cache hits {shot.hit_rate:5.1%}"
        f"  select p50 {shot.select_p50_s * 1e3:.2f} ms  p99 {shot.select_p99_s * 1e3:.2f} ms"
    )


def render(shot: Snapshot, columns: int, lines: int) -> list[str]:
    """The screen as text lines, at most `lines` of at most `columns` characters."""
    head = [
        f"lean-selector demo   {shot.elapsed_s:5.1f} of {shot.seconds:.0f} s"
        f"   errors {shot.errors}   Ctrl-C ends it early",
        "",
        overall(shot),
        "",
        "worker   prefill tokens   decode blocks   requests   cached blocks",
    ]
    room = max(1, lines - len(head) - 1)  # the cursor rests on a line of its own
    rows = [_worker_line(row) for row in shot.workers]
    if len(rows) > room:
        rows[room - 1 :] = [f"... and {len(rows) - room + 1} more workers"]
    return [line[:columns] for line in [*head, *rows]][: lines - 1]


def _worker_line(row: WorkerRow) -> str:
    full = row.cached_blocks * _BAR_WIDTH // row.capacity_blocks
    bar = "#" * full + "." * (_BAR_WIDTH - full)
    return (
        f"{row.worker_id:>6} {row.prefill_tokens:>16} {row.decode_blocks:>15}"
        f" {row.requests:>10}   {bar} {row.cached_blocks}/{row.capacity_blocks}"
    )


class ScreenView:
    """Redraws in place on a terminal. close() gives the cursor back below the last drawing."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._drawn = 0  # lines of the last drawing, above the cursor
        self._cursor_hidden = False

    def draw(self, shot: Snapshot) -> None:
        """Replace the last drawing."""
        columns, lines = shutil.get_terminal_size()
        text = render(shot, columns, lines)
        back = f"\x1b[{self._drawn}A\r" if self._drawn else ""
        body = "".join(f"{line}{_CLEAR_LINE_END}\n" for line in text)
        self._out.write(f"{_HIDE_CURSOR}{back}{body}{_CLEAR_BELOW}")
        self._out.flush()
        self._drawn = len(text)
        self._cursor_hidden = True

    def close(self) -> None:
        """Show the cursor again."""
        if self._cursor_hidden:
            self._out.write(_SHOW_CURSOR)
            self._out.flush()


class LineView:
    """One line a second, for logs and pipes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._next_s = 1.0

    def draw(self, shot: Snapshot) -> None:
        """Write a line if a second has passed since the last."""
        if shot.elapsed_s >= self._next_s:
            self._next_s = shot.elapsed_s + 1.0
            self._out.write(f"{shot.elapsed_s:5.1f} s {overall(shot)}  errors {shot.errors}\n")
            self._out.flush()

    def close(self) -> None:
        """Nothing to restore."""
