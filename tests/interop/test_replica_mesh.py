"""One mesh of all that speak the wire: ours, and the reference of both generations.

1.3.x and 1.6.1 name the group differently and cannot hear each other; ours hears and is heard by
all (decisions D2 and D17).
"""

import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.replica_member import (
    BOOKED,
    IDLE,
    PAIR_BOOKED,
    PAIR_DECODES,
    PAIR_IDLE,
    Loads,
    Member,
    hear_each_other,
    mesh,
    shown_everywhere,
)

pytestmark = pytest.mark.reference

OURS = ("selector", "tracker")
LIFECYCLES = 200
LIVE = 40  # at a time


@pytest.fixture(scope="module")
def members(reference_131: Path, reference_161: Path) -> Iterator[dict[str, Member]]:
    kinds: dict[str, tuple[str, Path | None]] = {
        "selector": ("selector", None),
        "tracker": ("tracker", None),
        "1.3.1 selector": ("selector", reference_131),
        "1.3.1 tracker": ("tracker", reference_131),
        "1.6.1 selector": ("selector", reference_161),
        "1.6.1 tracker": ("tracker", reference_161),
    }
    with mesh(*kinds.values()) as running:
        named = dict(zip(kinds, running, strict=True))
        for speaker in named:
            for hearer in hearers(speaker):
                if hearer != speaker:
                    named[hearer].hears(named[speaker])
        shown_everywhere(running, IDLE)
        yield named


def hearers(speaker: str) -> list[str]:
    """Members that what one says or books shows on, itself among them."""
    old, new = (["1.3.1 selector", "1.3.1 tracker"], ["1.6.1 selector", "1.6.1 tracker"])
    if speaker in OURS:
        return [*OURS, *old, *new]
    return [*OURS, *(old if speaker in old else new)]


NAMES = (*OURS, "1.3.1 selector", "1.3.1 tracker", "1.6.1 selector", "1.6.1 tracker")


@pytest.mark.parametrize("name", NAMES)
def test_what_one_does_shows_on_all_that_can_hear_it(members: dict[str, Member], name: str) -> None:
    def shown(loads: Loads) -> None:
        for other, member in members.items():
            member.shows(loads if other in hearers(name) else IDLE)

    request_id = f"by-{NAMES.index(name)}"
    members[name].add(request_id, 1)
    shown([(0, 0), BOOKED])
    members[name].complete(request_id)
    shown([(0, 0), (0, BOOKED[1])])
    members[name].free(request_id)
    shown(IDLE)


def test_many_lifecycles_through_random_members_leave_no_load(members: dict[str, Member]) -> None:
    rng = random.Random(7)
    live: list[tuple[Member, str, bool]] = []  # where it was admitted, its id, prefill completed
    begun = 0
    while begun < LIFECYCLES or live:
        if begun < LIFECYCLES and len(live) < LIVE and rng.random() < 0.5:
            member = rng.choice(list(members.values()))
            request_id = f"many-{begun}"
            start = rng.randrange(50)
            member.add(request_id, rng.randrange(2), [start * 100 + n for n in range(1, 9)])
            live.append((member, request_id, False))
            begun += 1
        elif live:
            at = rng.randrange(len(live))
            member, request_id, completed = live[at]
            if completed:
                member.free(request_id)
                del live[at]
            else:
                member.complete(request_id)
                live[at] = member, request_id, True
    shown_everywhere(members.values(), IDLE)
    for name in OURS:
        dropped = members[name].detail()["dropped"]
        assert dropped["undecodable"] == 0
        assert dropped["worker_mismatch"] == 0


# -- pairs: only ours know that a reservation has a leg --------------------------------------------


@pytest.fixture(scope="module")
def pair_members(reference_131: Path) -> Iterator[list[Member]]:
    """Two selectors of ours, and a selector and a tracker of 1.3.1."""
    theirs = [("selector", reference_131), ("tracker", reference_131)]
    with mesh(("selector", None), ("selector", None), *theirs) as members:
        hear_each_other(members)
        for member in members:
            member.register_pair()
        yield members


@contextmanager
def stopped(member: Member) -> Iterator[None]:
    member.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        member.process.send_signal(signal.SIGCONT)


def test_both_legs_count_at_1_3_1_and_end_there_as_ours_end_them(
    pair_members: list[Member],
) -> None:
    booker, other, *_ = pair_members
    for completer in (booker, other):
        for freer in (booker, other):
            shown_everywhere(pair_members, PAIR_IDLE)
            booker.book_pair("both calls")
            shown_everywhere(pair_members, PAIR_BOOKED)
            completer.complete("both calls")
            shown_everywhere(pair_members, PAIR_DECODES)
            freer.free("both calls")
    for freer in (booker, other):
        shown_everywhere(pair_members, PAIR_IDLE)
        booker.book_pair("freed at once")
        shown_everywhere(pair_members, PAIR_BOOKED)
        freer.free("freed at once")
    shown_everywhere(pair_members, PAIR_IDLE)


@pytest.mark.parametrize("kind", ["selector", "tracker"])
@pytest.mark.parametrize("call", ["complete", "free"])
def test_a_call_at_1_3_1_ends_the_leg_at_ours_and_there_once_the_booker_says_so(
    pair_members: list[Member], kind: str, call: str
) -> None:
    """While the booker is stopped nobody says so, and the reference counts the leg."""
    booker, other, *theirs = pair_members
    name = "a pair"  # in each of these tests: nothing is left of the one before
    (asked,) = (member for member in theirs if member.kind == kind)
    shown_everywhere(pair_members, PAIR_IDLE)
    booker.book_pair(name)
    shown_everywhere(pair_members, PAIR_BOOKED)
    left = PAIR_DECODES if call == "complete" else PAIR_IDLE
    with stopped(booker):
        if call == "complete":
            asked.complete(name)
        else:
            asked.free(name)
        other.shows(left)
        other.add("after it", 0)  # so all that it had to say before has arrived
        other.shows([BOOKED, *left[1:]])
        shown_everywhere(theirs, [BOOKED, left[1], PAIR_BOOKED[2]])
        other.free("after it")
    shown_everywhere(pair_members, left)
    if call == "complete":
        asked.free(name)
        shown_everywhere(pair_members, PAIR_IDLE)


def test_a_call_at_1_3_1_that_names_the_leg_ends_it_alone(pair_members: list[Member]) -> None:
    booker, _, selector, _ = pair_members
    booker.book_pair("leg alone")
    shown_everywhere(pair_members, PAIR_BOOKED)
    selector.free("leg alone#prefill")
    shown_everywhere(pair_members, PAIR_DECODES)
    booker.free("leg alone")
    shown_everywhere(pair_members, PAIR_IDLE)
