"""The view: what fits a small terminal, and how it is redrawn."""

import io

import pytest

from lean_selector.tools.demo import DemoView, LineView, ScreenView, WorkerRow, render


def snapshot(workers: int, elapsed_s: float = 2.5) -> DemoView:
    rows = [WorkerRow(i, 2_345, 678, 9, 500 * i % 2_000, 2_000) for i in range(1, workers + 1)]
    return DemoView(elapsed_s, 20.0, rows, 1_234.5, 99_999, 0.613, 0.00028, 0.0123, 0)


def test_every_worker_has_a_row_with_its_five_figures() -> None:
    lines = render(snapshot(4), 80, 24)
    assert lines[6].split() == ["2", "2345", "678", "9", "########........", "1000/2000"]
    assert "1234 calls/s" in lines[2]
    assert "cache hits 61.3%" in lines[2]
    assert "p50 0.28 ms" in lines[2]


@pytest.mark.parametrize("workers", [1, 18, 19, 64])
def test_it_fits_80_by_24_without_cutting_a_line(workers: int) -> None:
    lines = render(snapshot(workers), 80, 24)
    assert len(lines) <= 23
    assert lines == render(snapshot(workers), 200, 24)
    assert max(map(len, lines)) <= 80


def test_workers_without_room_are_counted() -> None:
    lines = render(snapshot(64), 80, 24)
    shown = len(lines) - 6
    assert lines[-1] == f"... and {64 - shown} more workers"


def test_it_never_writes_more_than_a_tiny_terminal_holds() -> None:
    lines = render(snapshot(4), 20, 5)
    assert len(lines) <= 4
    assert max(map(len, lines)) <= 20


def test_the_screen_is_redrawn_in_place_and_the_cursor_comes_back() -> None:
    out = io.StringIO()
    view = ScreenView(out)
    view.close()
    assert out.getvalue() == ""
    view.draw(snapshot(2))
    first = out.getvalue()
    assert "\x1b[7A" not in first
    view.draw(snapshot(2))
    assert "\x1b[7A\r" in out.getvalue()[len(first) :]
    view.close()
    assert out.getvalue().endswith("\x1b[?25h")


def test_without_a_terminal_there_is_a_plain_line_a_second() -> None:
    out = io.StringIO()
    view = LineView(out)
    for elapsed_s in (0.5, 1.0, 1.5, 1.75, 2.0):
        view.draw(snapshot(2, elapsed_s))
    view.close()
    lines = out.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["1.0", "2.0"]
    assert "\x1b" not in out.getvalue()
