"""The findings as lines for people."""

from lean_selector.tools.check import table
from lean_selector.tools.check_judgements import Finding, Level

FOUND = [
    Finding(Level.OK, "selector", "ready"),
    Finding(Level.ERROR, "worker 1", "its engine does not tell what it is", "check the engine"),
    Finding(Level.NOTE, "engines", "they differ"),
]


def test_what_is_wrong_stands_first_with_what_mends_it_below() -> None:
    assert list(table(FOUND, 80)) == [
        "error    worker 1  its engine does not tell what it is",
        "                   -> check the engine",
        "note     engines   they differ",
        "ok       selector  ready",
        "1 errors, 0 warnings, 1 notes, 1 ok",
    ]


def test_long_lines_go_on_below_themselves() -> None:
    [first, second, _] = table([Finding(Level.WARNING, "x", "word " * 14)], 60)
    assert first == "warning  x  " + " ".join(["word"] * 9)
    assert second == " " * 12 + " ".join(["word"] * 5)


def test_nothing_found_is_a_summary_alone() -> None:
    assert list(table([], 80)) == ["0 errors, 0 warnings, 0 notes, 0 ok"]
