"""The client library with a selector that speaks 1.6: it books and frees under its own id."""

import asyncio
from typing import Any

from lean_selector import KvRouter
from tests.support.running_service import RunningService

TOKENS = [1, 2, 3, 4, 5, 6, 7, 8]


def requests_on(service: RunningService) -> int:
    status, rows = service.get("/loads")
    assert status == 200
    return int(rows[0]["loads"][0]["active_requests"])


def test_what_the_client_books_of_a_1_6_selector_it_can_free() -> None:
    async def book_and_free(service: RunningService) -> tuple[Any, int]:
        async with KvRouter(f"http://127.0.0.1:{service.port}", block_size=4) as router:
            chosen = await router.best_worker(TOKENS, request_id="mine")
            booked = requests_on(service)
            await router.mark_prefill_complete("mine")
            await router.free("mine")
            return chosen, booked

    with RunningService("--api", "1.6", "--use-kv-events=off") as service:
        service.post("/workers", {"worker_id": 1, "endpoint": "http://w", "block_size": 4})
        assert asyncio.run(book_and_free(service)) == ((1, 0, 0), 1)
        assert requests_on(service) == 0
