"""Whose turn it is, and what stays of a worker that is no more."""

from lean_selector.core.settings import EjectionSettings
from lean_selector.gateway.upstreams import Rotation, WorkerLease
from lean_selector.http.client import ClientConnection
from tests.gateway.test_proxied_request import Transport

URL = "http://a:1"


def test_a_connection_that_opens_after_its_worker_has_gone_is_swept() -> None:
    rotation = Rotation(EjectionSettings(), 0.0)
    rotation.set([URL])
    lease = WorkerLease(rotation.endpoint(URL))
    rotation.set([])  # while it is being connected to
    connection, transport = ClientConnection(lease.endpoint), Transport()
    connection.connection_made(transport)
    lease.end(None)
    rotation.sweep(1_000.0, 600.0)
    assert transport.state == "aborted"
    rotation.set([])
    assert not rotation.endpoints


def test_a_worker_that_has_gone_is_forgotten_with_the_last_that_is_leased_of_it() -> None:
    rotation = Rotation(EjectionSettings(), 0.0)
    rotation.set([URL])
    leases = [WorkerLease(rotation.endpoint(URL)) for _ in range(2)]
    for lease in leases:
        rotation.set([])
        assert rotation.endpoint(URL) is lease.endpoint
        lease.end(None)
        lease.end(None)
    rotation.set([])
    assert not rotation.endpoints
