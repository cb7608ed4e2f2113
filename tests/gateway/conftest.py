"""Two workers and a gateway before them, which all tests of a run share and leave as they are."""

from collections.abc import Iterator

import pytest

from tests.gateway.running_gateway import RunningGateway
from tests.support.openai_worker import OpenAiWorker


@pytest.fixture(scope="session")
def workers() -> Iterator[list[OpenAiWorker]]:
    with OpenAiWorker() as first, OpenAiWorker() as second:
        yield [first, second]


@pytest.fixture(scope="session")
def gateway(workers: list[OpenAiWorker]) -> Iterator[RunningGateway]:
    urls = (each.url for each in workers)
    flags = ("--pass-through", "all", "--max-body-mb", "1")
    queue = ("--queue-threshold", "1", "--discover-defaults", '{"max_num_batched_tokens": 1000000}')
    with RunningGateway(*urls, *flags, *queue, knows=2) as running:
        yield running
