"""Which class of error a refusal is, and that all are one tree."""

import pytest

from lean_selector.client.errors import (
    AlreadyExists,
    ClientError,
    InvalidRequest,
    NotFound,
    NoWorkerAvailable,
    ServiceRefused,
    service_refusal,
)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidRequest),
        (422, InvalidRequest),
        (404, NotFound),
        (409, AlreadyExists),
        (503, NoWorkerAvailable),
        (429, NoWorkerAvailable),
        (500, ServiceRefused),
    ],
)
def test_each_status_has_its_class(status: int, kind: type[ServiceRefused]) -> None:
    error = service_refusal(status, "why")
    assert type(error) is kind
    assert str(error) == f"{status}: why"


def test_every_error_of_the_client_is_a_client_error() -> None:
    import lean_selector.client as client

    errors = [kind for kind in vars(client).values() if isinstance(kind, type)]
    raised = [kind for kind in errors if issubclass(kind, Exception)]
    assert len(raised) == 14
    assert all(issubclass(kind, ClientError) for kind in raised)
