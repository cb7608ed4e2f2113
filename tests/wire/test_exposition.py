"""The text of families of metrics."""

from collections.abc import Iterable

import pytest

from lean_selector.wire.exposition import Family, FamilyGroup, HistogramFamily, escaped, labels


def group(things: Iterable[int]) -> FamilyGroup[int]:
    return FamilyGroup(
        lambda: ((f'{{n="{n}"}}', n) for n in things),
        [
            ("twice", "gauge", "Two of each.", lambda n: 2 * n),
            ("odd", "counter", "The odd ones.", lambda n: n if n % 2 else None),
        ],
    )


def test_a_family_says_its_help_its_kind_and_its_samples() -> None:
    family = Family("held", "gauge", "What is held.", lambda: [('{a="1"}', 2), None, ("", 0.5)])
    assert "".join(family.text()) == (
        '# HELP held What is held.\n# TYPE held gauge\nheld{a="1"} 2\nheld 0.5\n'
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *(('x"y', r"x\"y"), ("back\\slash", r"back\\slash"), ("two\nlines", r"two\nlines")),
        *(("höchst \U0001f600", "höchst \U0001f600"), ("half \ud800", "half ?")),
        *((each, rf"\\u{ord(each):04x}") for each in "\x1b\x1c\x00\r\t\x7f\x85\u2028\u202e\u200f"),
        ("tag \U000e0041", r"tag \\udb40\\udc41"),
    ],
)
def test_a_label_has_no_control_characters(text: str, shown: str) -> None:
    assert labels(a=text) == f'{{a="{shown}"}}'
    assert escaped(text) == shown


def test_buckets_of_a_histogram_count_all_below_their_bound() -> None:
    family = HistogramFamily("took", "How long.", lambda: [("", (0.1, 1.0), [3, 0, 2], 4.5)])
    assert list(family.text())[1] == (
        'took_bucket{le="0.1"} 3\ntook_bucket{le="1.0"} 3\ntook_bucket{le="+Inf"} 5\n'
        "took_sum 4.5\ntook_count 5\n"
    )


def test_metrics_of_the_same_things_stand_one_after_another() -> None:
    assert "".join(group([1, 2, 3]).text()) == (
        "# HELP twice Two of each.\n# TYPE twice gauge\n"
        'twice{n="1"} 2\ntwice{n="2"} 4\ntwice{n="3"} 6\n'
        "# HELP odd The odd ones.\n# TYPE odd counter\n"
        'odd{n="1"} 1\nodd{n="3"} 3\n'
    )


def test_things_are_gathered_once_for_all_their_metrics() -> None:
    assert "".join(group(iter([1, 2])).text()).endswith('counter\nodd{n="1"} 1\n')


def test_a_scrape_amid_another_has_things_of_its_own() -> None:
    things = [1, 2, 3]
    metrics = group(things)
    begun = metrics.text()
    first = [next(begun) for _ in range(4)]
    things[:] = [5]
    assert "".join(metrics.text()).endswith('counter\nodd{n="5"} 5\n')
    assert "".join([*first, *begun]).endswith('odd{n="1"} 1\nodd{n="3"} 3\n')
