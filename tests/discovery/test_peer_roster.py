"""The peers that discoveries name: who joins the mesh, who leaves it, and who is ourselves."""

import pytest

from lean_selector.core.errors import BadRequest, Conflict
from lean_selector.discovery.particulars import FoundEndpoint
from lean_selector.discovery.peer_roster import PeerRoster, is_own_address_here

GRACE_S = 10.0
OURS, A, B = (
    FoundEndpoint("10.0.0.9", 9092),
    FoundEndpoint("10.0.0.1", 9092),
    FoundEndpoint("10.0.0.2", 9092),
)


class Mesh:
    """Stands where the sockets would."""

    def __init__(self) -> None:
        self.registered: list[str] = []
        self.urls: list[str] = []
        self.room = 99

    def register_peer(self, endpoint: str) -> bool:
        if "refused" in endpoint:
            raise BadRequest("no")
        if endpoint in self.registered:
            return False
        if len(self.registered) == self.room:
            raise Conflict("full")
        self.registered.append(endpoint)
        return True

    def deregister_peer(self, endpoint: str) -> bool:
        self.registered.remove(endpoint)
        return True

    def peers(self) -> list[str]:
        return self.registered

    def catch_up_from(self, urls: list[str]) -> None:
        self.urls = urls


@pytest.fixture
def mesh() -> Mesh:
    return Mesh()


@pytest.fixture
def roster(mesh: Mesh) -> PeerRoster:
    return PeerRoster(mesh, 9092, None, 8092, GRACE_S, lambda host: host == OURS.host)


def states(roster: PeerRoster) -> list[str]:
    return [known.state for known in roster.known()]


def test_who_is_found_joins_and_is_caught_up_from(mesh: Mesh, roster: PeerRoster) -> None:
    roster.found("one", [A, B], [], 0.0)
    assert mesh.registered == ["tcp://10.0.0.1:9092", "tcp://10.0.0.2:9092"]
    assert mesh.urls == ["http://10.0.0.1:8092", "http://10.0.0.2:8092"]


def test_a_replica_does_not_join_itself(mesh: Mesh, roster: PeerRoster) -> None:
    neighbour = FoundEndpoint(OURS.host, 9093)
    roster.found("one", [OURS, neighbour, A], [], 0.0)
    assert mesh.registered == ["tcp://10.0.0.1:9092", "tcp://10.0.0.9:9093"]
    assert "http://10.0.0.9:8092" in mesh.urls, "another process of this machine is another"
    assert states(roster) == ["registered", "itself", "registered"]


def test_what_a_replica_is_advertised_as_is_itself(mesh: Mesh) -> None:
    roster = PeerRoster(mesh, 1, "tcp://selector-a:9092", 8092, GRACE_S, lambda _: False)
    roster.found(
        "one", [FoundEndpoint("selector-a", 9092), FoundEndpoint("selector-b", 9092)], [], 0.0
    )
    assert mesh.registered == ["tcp://selector-b:9092"]


def test_who_is_found_no_more_leaves_after_the_grace(mesh: Mesh, roster: PeerRoster) -> None:
    roster.found("one", [A, B], [], 0.0)
    roster.found("one", [B], [], 1.0)
    roster.sweep(GRACE_S)
    assert len(mesh.registered) == 2
    roster.sweep(1.0 + GRACE_S)
    assert (mesh.registered, mesh.urls) == (["tcp://10.0.0.2:9092"], ["http://10.0.0.2:8092"])
    roster.found("one", [], [B], 20.0)
    assert (mesh.registered, mesh.urls) == ([], [])


def test_who_is_found_twice_stays_while_one_finds_it(mesh: Mesh, roster: PeerRoster) -> None:
    roster.found("one", [A], [], 0.0)
    roster.found("two", [A], [], 0.0)
    roster.found("one", [], [A], 0.0)
    roster.sweep(2 * GRACE_S)
    assert mesh.registered == ["tcp://10.0.0.1:9092"]


def test_peers_by_flag_or_over_http_are_left_alone(mesh: Mesh, roster: PeerRoster) -> None:
    mesh.register_peer("tcp://10.0.0.1:9092")
    roster.found("one", [A], [], 0.0)
    assert states(roster) == ["known"]
    roster.found("one", [], [A], 0.0)
    assert mesh.registered == ["tcp://10.0.0.1:9092"]


def test_who_is_removed_over_http_stays_away_until_found_anew(
    mesh: Mesh, roster: PeerRoster
) -> None:
    roster.found("one", [A], [], 0.0)
    mesh.deregister_peer("tcp://10.0.0.1:9092")
    roster.found("one", [A], [], 1.0)
    assert (states(roster), mesh.registered, mesh.urls) == (["removed"], [], [])
    roster.found("one", [], [], 2.0)
    roster.sweep(2.0 + GRACE_S)
    roster.found("one", [A], [], 20.0)
    assert mesh.registered == ["tcp://10.0.0.1:9092"]


def test_a_peer_that_the_mesh_refuses_is_shown(mesh: Mesh, roster: PeerRoster) -> None:
    roster.found("one", [FoundEndpoint("refused", 1), A], [], 0.0)
    assert states(roster) == ["registered", "refused"]


def test_who_is_refused_for_too_many_joins_when_another_has_left(
    mesh: Mesh, roster: PeerRoster, caplog: pytest.LogCaptureFixture
) -> None:
    mesh.room = 1
    roster.found("one", [A, B], [], 0.0)
    assert states(roster) == ["registered", "refused"]
    roster.found("one", [B], [], 1.0)
    roster.sweep(1.0 + GRACE_S)
    assert (states(roster), mesh.urls) == (["registered"], ["http://10.0.0.2:8092"])
    assert roster.known()[0].error is None
    assert caplog.text.count("full") == 1


def test_an_address_is_our_own_if_it_can_be_bound() -> None:
    assert is_own_address_here("127.0.0.1")
    assert not is_own_address_here("192.0.2.1")  # of documents alone
    assert not is_own_address_here("2001:db8::1")
    assert not is_own_address_here("selector-a")
