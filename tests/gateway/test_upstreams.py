"""Where the gateway's workers are: those that are known, whose turn it is, and who has gone."""

from lean_selector.core.settings import EjectionSettings
from lean_selector.gateway.fleet import GatewayFleet
from lean_selector.gateway.upstreams import Rotation, WorkerUse
from lean_selector.http.client import ClientConnection
from tests.http.test_protocol import Transport
from tests.support.driven_selector import DrivenSelector

ONE, TWO = "http://a:1", "http://b:1"


class Known:
    """A fleet and the selector whose catalog it reads."""

    def __init__(self, *named: str) -> None:
        self.selector = DrivenSelector(use_kv_events=False)
        self.rotation = Rotation(EjectionSettings(), 0.0)
        self.fleet = GatewayFleet(self.selector.selector.catalog, named)

    def register(self, worker_id: int, model: str, url: str, block_size: int | None = 16) -> None:
        """Without a block size it cannot be chosen."""
        self.selector.register(worker_id, model_name=model, endpoint=url, block_size=block_size)
        self.rotation.follow(self.fleet)


def test_a_worker_that_cannot_be_chosen_yet_serves_its_model_in_turn() -> None:
    known = Known(ONE, TWO)
    known.register(1, "m", ONE, None)
    known.register(2, "n", TWO)
    assert not known.fleet.is_complete
    assert known.fleet.may_serve("m") == [ONE]
    known.register(1, "m", ONE)
    assert known.fleet.is_complete


def test_base_urls_of_workers_are_known_by_their_ids() -> None:
    known = Known(ONE)
    for worker_id, url in ((1, ONE + "/v1"), (2, TWO), (3, TWO), (4, "http://user:word@c")):
        known.register(worker_id, "m", url)
    assert known.fleet.bases() == [ONE, TWO]  # the gateway cannot use the last one
    assert known.fleet.bases_of({2, 3}) == [TWO]
    assert known.fleet.bases_of({1, 2}) == [ONE, TWO]
    assert known.fleet.bases_of({9}) == []


def test_workers_that_were_only_found_may_be_joined_by_others() -> None:
    known = Known()
    known.register(1, "m", ONE)
    assert not known.fleet.is_complete
    assert known.fleet.may_serve("another") is None


def test_a_worker_that_the_selector_has_ejected_is_passed_over_while_there_are_others() -> None:
    known = Known()
    for worker_id, url in ((1, "a:1/v1"), (2, TWO)):
        known.register(worker_id, "m", url)
    selector, fleet = known.selector.selector, known.fleet

    def in_turn() -> set[str]:
        known.rotation.ejected = fleet.ejected()
        return {each.text for _ in range(4) if (each := known.rotation.next((), None))}

    assert in_turn() == {ONE, TWO}
    for _ in range(EjectionSettings().failed_polls):
        selector.health.polled(1, "it is silent", 0.0)
    assert in_turn() == {TWO}
    assert fleet.ejected() == {ONE}
    assert fleet.healthy({1: ONE, 2: TWO}) == {2: TWO}
    assert fleet.healthy({1: ONE}) == {1: ONE}
    known.rotation.ejected = frozenset({ONE, TWO})
    assert known.rotation.next((), None) is not None


def test_a_connection_that_opens_after_its_worker_has_gone_is_swept() -> None:
    rotation = Rotation(EjectionSettings(), 0.0)
    rotation.set([ONE])
    use = WorkerUse(rotation.endpoint(ONE))
    rotation.set([])  # while it is being connected to
    connection, transport = ClientConnection(use.endpoint), Transport()
    connection.connection_made(transport)
    use.end(None)
    rotation.sweep(1_000.0, 600.0)
    assert transport.state == "aborted"
    rotation.set([])
    assert not rotation.endpoints


def test_a_worker_that_has_gone_is_forgotten_with_the_last_that_is_leased_of_it() -> None:
    rotation = Rotation(EjectionSettings(), 0.0)
    rotation.set([ONE])
    uses = [WorkerUse(rotation.endpoint(ONE)) for _ in range(2)]
    for use in uses:
        rotation.set([])
        assert rotation.endpoint(ONE) is use.endpoint
        use.end(None)
        use.end(None)
    rotation.set([])
    assert not rotation.endpoints
