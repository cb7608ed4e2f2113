"""Three selectors, one of them a 1.6.1, that share sessions and loads."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.replica_member import (
    BOOKED,
    IDLE,
    SCOPE,
    Member,
    hear_each_other,
    mesh,
    shown_everywhere,
)
from tests.support.running_service import wait_until

pytestmark = pytest.mark.reference

NAMES = ("ours", "another of ours", "1.6.1")
HEAVY = list(range(1000, 1400))  # blocks


@pytest.fixture(scope="module")
def members(reference_161: Path) -> Iterator[dict[str, Member]]:
    kinds = (("selector", None), ("selector", None), ("selector", reference_161))
    with mesh(*kinds, everywhere=("--session-affinity-ttl-secs", "600")) as running:
        hear_each_other(running)
        for speaker, hearer in itertools.permutations(running, 2):
            hears_sessions(hearer, speaker)
        shown_everywhere(running, IDLE)
        yield dict(zip(NAMES, running, strict=True))


def hears_sessions(hearer: Member, speaker: Member) -> None:
    """Waits until a session that one books is followed by the other."""
    session_id = f"{speaker.port}-is-heard-by-{hearer.port}"
    load = f"load of {session_id}"  # the third may not have heard yet that another one's has ended

    def heard() -> bool:
        rank = book(speaker, session_id, session_id)
        speaker.add(load, rank, HEAVY)
        hearer.shows(speaker.loads())
        seen = select(hearer, session_id) == rank
        speaker.free(load)
        speaker.free(session_id)
        return seen

    wait_until(heard, f"{speaker.endpoint} tells of sessions")
    hearer.shows(IDLE)
    speaker.shows(IDLE)


def body_of(session_id: str | None, tokens: int) -> dict[str, object]:
    return {**SCOPE, "token_ids": list(range(tokens)), "session_id": session_id}


def select(member: Member, session_id: str | None) -> int:
    """The rank that a request would go to."""
    status, answer = member.post("/select", body_of(session_id, 16))
    assert status == 200, answer
    rank = answer["dp_rank"]
    assert isinstance(rank, int)
    return rank


def book(member: Member, request_id: str, session_id: str, tokens: int = 48) -> int:
    ids = {"selection_id": request_id, "reservation_id": request_id}
    body = {**body_of(session_id, tokens), **ids}
    status, answer = member.post("/select_and_reserve", body)
    assert status == 200, answer
    rank = answer["dp_rank"]
    assert isinstance(rank, int)
    return rank


@pytest.mark.parametrize("speaker", NAMES)
@pytest.mark.parametrize("ending", NAMES)
def test_a_session_booked_at_one_is_followed_by_all_whoever_ends_its_request(
    members: dict[str, Member], speaker: str, ending: str
) -> None:
    session_id = f"{speaker} {ending}"
    everyone = members.values()
    rank = book(members[speaker], session_id, session_id)
    where = [BOOKED if dp_rank == rank else (0, 0) for dp_rank in (0, 1)]
    for member in everyone:
        member.shows(where)
    members[ending].free(session_id)
    for member in everyone:
        member.shows(IDLE)
    load = f"load of {session_id}"
    members[speaker].add(load, rank, HEAVY)
    for member in everyone:
        wait_until(lambda: member.loads() != IDLE, "the load shows")  # noqa: B023 - at once
        assert select(member, None) == 1 - rank
        assert select(member, session_id) == rank
    members[speaker].free(load)
    for member in everyone:
        member.shows(IDLE)
