"""Streams end where the engine says so, and leave connections fit for more."""

from lean_selector.client import KvRouter, SyncKvRouter, Timeouts
from lean_selector.client.transport import DRAIN_S
from tests.client.fleet import MODEL, Fleet
from tests.client.test_router import TOKENS, run

NOTHING = (0, 0, 0)
NEVER_ENDS = {"fake": {"never_ends": True}}
WHOLE = [[1000], [1001], None]


def test_a_stream_ends_at_the_engines_last_word(fleet: Fleet) -> None:
    async def main() -> None:
        async with KvRouter(fleet.endpoint, 4, timeouts=Timeouts(worker_s=None)) as router:
            stream = await router.generate(TOKENS, MODEL, {"max_tokens": 2}, extra_args=NEVER_ENDS)
            assert [chunk.get("token_ids") async for chunk in stream] == WHOLE
            assert fleet.total() == NOTHING

    run(main())


def test_a_synchronous_stream_ends_at_the_engines_last_word(fleet: Fleet) -> None:
    with SyncKvRouter(fleet.endpoint, 4, timeouts=Timeouts(worker_s=None)) as router:
        stream = router.generate(TOKENS, MODEL, {"max_tokens": 2}, extra_args=NEVER_ENDS)
        assert [chunk.get("token_ids") for chunk in stream] == WHOLE
        assert fleet.total() == NOTHING


def test_a_connection_whose_answer_ended_serves_a_slower_one_afterwards(fleet: Fleet) -> None:
    with SyncKvRouter(fleet.endpoint, 4) as router:
        for fake in ({}, {"step_s": 2 * DRAIN_S}):
            with router.generate(
                TOKENS, MODEL, {"max_tokens": 2}, extra_args={"fake": fake}, worker_id=1
            ) as stream:
                assert [chunk.get("token_ids") for chunk in stream] == WHOLE
    assert fleet.workers[1].connections == 1
