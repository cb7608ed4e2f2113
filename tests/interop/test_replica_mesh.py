"""One mesh of all that speak the wire: ours, and the reference of both generations.

1.3.x and 1.6.1 name the group differently and cannot hear each other; ours hears and is heard by
all (decisions D2 and D17).
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.replica_member import BOOKED, IDLE, Loads, Member, mesh

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
        for member in running:
            member.shows(IDLE)
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
    for member in members.values():
        member.shows(IDLE)
    for name in OURS:
        dropped = members[name].detail()["dropped"]
        assert dropped["undecodable"] == 0
        assert dropped["worker_mismatch"] == 0
