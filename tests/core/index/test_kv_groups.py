"""Reports of several groups, against a model that counts each group's reports of each block."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_selector.core.index import kv_groups
from lean_selector.core.index.kv_groups import GroupReports

GROUPS = range(3)
STEP = st.tuples(
    st.sampled_from(GROUPS),
    st.integers(0, 1),
    st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True),
)


def packed(names: list[int]) -> bytes:
    return b"".join(name.to_bytes(8, "little") for name in names)


class Model:
    def __init__(self) -> None:
        self.counts: dict[tuple[int, int], Counter[int]] = {}
        self.known: set[int] = set()

    def most(self, kind: int, name: int) -> int:
        counts = self.counts.get((kind, name), Counter())
        return max([counts[group] for group in self.known])

    def report(self, group: int, kind: int, names: list[int]) -> list[int]:
        """The names of which no group had so many reports before."""
        leading = []
        for name in names:
            most = self.most(kind, name)
            counts = self.counts.setdefault((kind, name), Counter())
            counts[group] += 1
            if counts[group] > most:
                leading.append(name)
        return leading

    def is_following(self, group: int, kind: int, names: list[int]) -> bool:
        return all(
            self.counts.get((kind, name), Counter())[group] < self.most(kind, name)
            for name in names
        )


@given(st.lists(STEP, max_size=40), st.lists(st.integers(0, 40), max_size=3), st.integers(0, 40))
def test_of_the_groups_reports_the_first_counts(
    steps: list[tuple[int, int, list[int]]], restarts: list[int], joined: int
) -> None:
    """Also for a group that is known only later, and after what is known was copied."""
    reports, model = GroupReports(), Model()
    for group in GROUPS[:2]:
        reports.join(group)
        model.known.add(group)
    for number, (group, kind, names) in enumerate(steps):
        if number >= joined:
            reports.join(2)
            model.known.add(2)
        if number in restarts:
            state = reports.state()
            reports = GroupReports()
            reports.restore(state)
        if group in model.known:
            expected = model.is_following(group, kind, names)
            assert reports.is_following(group, kind, packed(names)) is expected
        leading = model.report(group, kind, names)
        found = reports.leading(group, kind, packed(names))
        assert found == packed(leading if group in model.known else names)
        unequal = [
            len({counts[each] for each in model.known}) > 1 for counts in model.counts.values()
        ]
        assert reports.unequal == sum(unequal)


def test_what_is_known_is_copied_also_before_another_group_shows() -> None:
    reports = GroupReports()
    reports.leading(0, 1, packed([1]))
    reports.join(0)
    reports.leading(0, 0, packed([1]))
    assert (reports.only, reports.unequal) == (-1, 0)
    copied = GroupReports()
    assert copied.only == -1
    copied.restore(reports.state())
    assert copied.only == -1
    copied.join(1)
    assert [copied.is_following(1, kind, packed([1])) for kind in (0, 1)] == [True, True]
    both = GroupReports()
    both.restore(copied.state())
    assert both.only == -1


def test_a_group_that_is_alone_for_long_need_not_be_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_groups, "_MOST_FIRST", 2)
    reports = GroupReports()
    reports.join(5)
    for only in (-1, -1, 5, 5):
        assert reports.leading(5, 0, packed([1])) == packed([1])
        assert reports.only == only
    reports.restore(reports.state())
    assert (reports.only, reports.is_open, reports.unequal) == (5, False, 0)
    reports.join(6)
    assert (reports.only, reports.is_open) == (-1, True)
    assert reports.leading(6, 0, packed([1])) == packed([1])  # it never followed
    assert not reports.is_following(6, 0, packed([1]))
    assert reports.is_following(5, 0, packed([1]))
    assert not reports.is_following(7, 0, packed([1]))
    assert reports.unequal == 1


def test_a_group_that_leaves_takes_along_what_was_unequal() -> None:
    reports = GroupReports()
    for group in (0, 1):
        reports.join(group)
    reports.leading(0, 0, packed([1, 2]))
    reports.leave(2)
    assert reports.unequal == 2
    reports.leave(1)
    assert reports.unequal == 0
    assert reports.leading(1, 0, packed([1])) == packed([1])


def test_what_is_unequal_is_bounded_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_groups, "_MOST_BLOCKS", 2)
    reports = GroupReports()
    for group in (0, 1):
        reports.join(group)
    reports.leading(0, 0, packed([1, 2]))
    assert reports.unequal == 2
    reports.leading(0, 0, packed([3]))
    assert [reports.is_following(1, 0, packed([name])) for name in (1, 2, 3)] == [0, 1, 1]
