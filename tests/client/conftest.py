"""A fleet for each test that asks for one."""

from collections.abc import Iterator

import pytest

from tests.client.fleet import Fleet


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet() as running:
        yield running
