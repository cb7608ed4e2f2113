"""Workers of its own for each test, in a service that all tests of a run share."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lean_selector.client import KvRouter
from tests.client.both_kinds import Blocking
from tests.client.fleet import NO_EVENTS, Fleet
from tests.support.running_service import RunningService


@pytest.fixture(scope="session")
def uds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uds") / "selector.sock"


@pytest.fixture(scope="session")
def selector(uds: Path) -> Iterator[RunningService]:
    with RunningService("--prompts", "off", "--uds", str(uds), env=NO_EVENTS) as running:
        yield running


@pytest.fixture
def fleet(selector: RunningService) -> Iterator[Fleet]:
    with Fleet(service=selector) as running:
        yield running


@pytest.fixture(scope="session")
def selector_that_queues() -> Iterator[RunningService]:
    with RunningService("--queue-threshold", "1", env=NO_EVENTS) as running:
        yield running


@pytest.fixture
def queueing(selector_that_queues: RunningService) -> Iterator[Fleet]:
    """One worker that takes one request at a time; others wait in the queue of the service."""
    with Fleet(1, service=selector_that_queues, max_num_batched_tokens=8) as running:
        yield running


@pytest.fixture(params=[KvRouter, Blocking], ids=["on a loop", "without a loop"])
def router_of(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Either kind of router, to be used as KvRouter is."""
    kind: Callable[..., Any] = request.param
    return kind
