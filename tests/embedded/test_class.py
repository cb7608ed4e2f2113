"""SelectionService: requests, bookings, workers and what is refused."""

import asyncio
import struct
from array import array
from collections import UserDict, UserList, deque
from collections.abc import Awaitable, Callable
from ctypes import c_uint32
from typing import Any

import pytest

from lean_selector import SelectionService, SelectionServiceError
from lean_selector.publisher import KvEventPublisher
from tests.embedded.services import (
    BLOCK_SIZE,
    FIRST,
    SECOND,
    TOKENS,
    ask,
    in_process,
    rows,
    shows,
    worker,
)
from tests.support.on_loop import until

BOOKED_HASHES = [9143094415614847814, -8936425687869117083]  # signed, as the reference tells them


async def refusal(asked: Awaitable[Any]) -> tuple[int, str, str]:
    with pytest.raises(SelectionServiceError) as caught:
        await asked
    return caught.value.status_code, caught.value.kind, str(caught.value)


@in_process
async def test_a_request_goes_through_its_life_and_leaves_nothing(
    service: SelectionService,
) -> None:
    record = await service.upsert_worker(worker())
    assert record["worker_id"] == FIRST
    assert record["lifecycle"] == "schedulable"
    assert record["routing_group"] == "default"
    assert list(record["kv_events_endpoints"]) == [0]
    assert service.ready()["schedulable_workers"] == 1
    assert [each["worker_id"] for each in service.list_workers(model_name="default")] == [FIRST]
    assert service.list_workers(routing_group="elsewhere") == []
    (row,) = await service.potential_loads({"token_ids": TOKENS, "model_name": "default"})
    assert (row["potential_prefill_tokens"], row["active_requests"]) == (10, 0)

    asked = ask("r", allowed_worker_ids=[FIRST], expected_output_tokens=8)
    selection = await service.select_and_reserve(asked)
    assert selection["selection_id"] == "r"
    assert selection["sequence_hashes"] == BOOKED_HASHES
    assert selection["isl_tokens"] == len(TOKENS)
    assert (selection["worker_id"], selection["dp_rank"]) == (FIRST, 0)
    assert selection["overlap"]["longest_matched"] == 0
    assert selection["effective_prefill_tokens"] == len(TOKENS)
    await shows(service, {FIRST: (10, 2, 1)})

    assert await service.prefill_complete("r") == ()
    service.add_output_block("r")
    await shows(service, {FIRST: (0, 3, 1)})
    assert await service.free_reservation("r") == ()
    made = (await service.select_and_reserve(ask()))["selection_id"]
    await service.free_reservation(made)
    await shows(service, {FIRST: (0, 0, 0)})


@in_process
async def test_what_an_engine_publishes_is_found(service: SelectionService) -> None:
    with KvEventPublisher(kv_block_size=BLOCK_SIZE, endpoint="tcp://127.0.0.1:0") as publisher:
        await service.upsert_worker(worker(kv_events_endpoints={0: publisher.endpoint}))
        await service.upsert_worker(worker(SECOND))
        blocks = 0
        while blocks < 2:
            publisher.publish_stored(
                token_ids=TOKENS[:8], num_block_tokens=[4, 4], block_hashes=[1, 2]
            )
            await asyncio.sleep(0.05)
            scores = await service.overlap_scores({"token_ids": TOKENS})
            blocks = max(int(row["device_blocks"]) for row in scores["workers"])
        selection = await service.select(ask())
        assert selection["worker_id"] == FIRST
        assert selection["overlap"]["longest_matched"] == 8
        snapshot = await service.indexer_snapshot()
        assert len(snapshot["default:default"]["events"]) == 1


@in_process
async def test_what_makes_no_sense_is_a_value_error_that_names_it(
    service: SelectionService,
) -> None:
    await service.upsert_worker(worker())
    for asked, named in (
        (service.upsert_worker(worker(block_size="large")), "block_size"),
        (service.upsert_worker(worker(kv_events_endpoints={"0": "tcp://h:1"})), "kv_events"),
        (service.upsert_worker([1]), "worker"),
        (service.patch_worker(FIRST, {"total_kv_blocks": -1}), "total_kv_blocks"),
        (service.select(ask(token_ids=[-1])), "token_ids"),
        (service.select_and_reserve(ask("a", worker_id=1, token_ids="text")), "token_ids"),
        (service.create_reservation({"worker_id": FIRST, "token_ids": [1]}), "_id"),
        (service.overlap_scores({"token_ids": "text"}), "token_ids"),
        (service.potential_loads(None), "request"),
    ):
        with pytest.raises(ValueError, match=named):
            await asked
    with pytest.raises(ValueError, match="decay_fraction"):
        service.add_output_block("a", decay_fraction=2.0)
    for bad in ("7", None, True):
        with pytest.raises(TypeError, match="worker_id"):
            await service.delete_worker(bad)  # type: ignore[arg-type]
    with pytest.raises(OverflowError, match="worker_id"):
        await service.delete_worker(-1)
    with pytest.raises(TypeError, match="selection_id"):
        await service.free_reservation(7)  # type: ignore[arg-type]
    assert rows(service) == {FIRST: (0, 0, 0)}


class Token(int):
    """As an enumeration or an array's item is one."""


LISTS: tuple[Callable[[], object], ...] = (
    lambda: tuple(TOKENS),
    lambda: range(len(TOKENS)),
    lambda: array("I", TOKENS),
    lambda: deque(TOKENS),
    lambda: UserList(TOKENS),
    lambda: memoryview(array("I", TOKENS)),
    lambda: memoryview(bytes(TOKENS)),
    lambda: [Token(each) for each in TOKENS],
    lambda: [0, *(Token(each) for each in TOKENS[1:])],
)


@in_process
async def test_any_sequence_may_stand_for_a_list_as_in_the_reference(
    service: SelectionService,
) -> None:
    await service.upsert_worker(worker(taints=deque(["a"])))
    assert service.list_workers()[0]["taints"] == ["a"]
    for number, tokens in enumerate(LISTS):
        asked = UserDict(
            ask(
                f"r{number}",
                token_ids=tokens(),
                allowed_worker_ids=deque([FIRST]),
                routing_constraints=UserDict(required_taints=UserList(["a"])),
            )
        )
        selection = await service.select_and_reserve(asked)
        assert selection["sequence_hashes"] == BOOKED_HASHES
        assert selection["isl_tokens"] == len(TOKENS)
    infos = (None, UserDict[str, object](mm_objects=deque[object]()))
    prompt = {"routing_token_ids": range(10), "block_mm_infos": infos}
    assert await service.overlap_scores({"mm_routing_info": prompt})


HASHES: tuple[Callable[[], object], ...] = (
    lambda: array("q", BOOKED_HASHES),
    lambda: deque(BOOKED_HASHES),
    lambda: memoryview(array("q", BOOKED_HASHES)),
    lambda: struct.pack("<2q", *BOOKED_HASHES),
    lambda: bytearray(struct.pack("<2q", *BOOKED_HASHES)),
    lambda: memoryview(struct.pack("<2q", *BOOKED_HASHES)),
    lambda: memoryview(struct.pack("<2q", *BOOKED_HASHES)[::-1])[::-1],  # not contiguous
)


@in_process
async def test_so_may_it_for_hashes_and_bytes_are_packed_ones(service: SelectionService) -> None:
    await service.upsert_worker(worker())
    for hashes in HASHES:
        asked = ask(token_ids=None, block_hashes=hashes(), sequence_hashes=hashes(), isl_tokens=8)
        selection = await service.select_and_reserve(asked)
        assert selection["sequence_hashes"] == BOOKED_HASHES


NO_LISTS: tuple[Callable[[], object], ...] = (
    lambda: (each for each in TOKENS),
    lambda: dict.fromkeys(TOKENS).keys(),
    lambda: memoryview((c_uint32 * 2)(1, 2)),  # a format that nothing unpacks
    lambda: [object()],
    lambda: array("d", [1.0]),
    lambda: [True],
    lambda: b"1234",
)


@in_process
async def test_what_is_no_sequence_of_integers_is_refused_by_name(
    service: SelectionService,
) -> None:
    await service.upsert_worker(worker())
    for tokens in NO_LISTS:
        with pytest.raises(ValueError, match="token_ids"):
            await service.select(ask(token_ids=tokens()))
    with pytest.raises(ValueError, match="object"):  # behind what is an integer
        await service.select(ask(token_ids=[1, object()]))


@in_process
async def test_other_threads_and_their_loops_are_served(service: SelectionService) -> None:
    """Ray Serve asks from its router's loop, and reports from its replica's."""
    await service.upsert_worker(worker())

    async def elsewhere() -> dict[int, tuple[int, int, int]]:
        await service.select_and_reserve(ask("a"))
        service.add_output_block("a")
        await service.prefill_complete("a")
        with pytest.raises(ValueError, match="token_ids"):
            await service.select(ask(token_ids="text"))
        assert (await refusal(service.free_reservation("never")))[0] == 404
        await until(lambda: rows(service) == {FIRST: (0, 3, 1)})
        return rows(service)

    assert await asyncio.to_thread(lambda: asyncio.run(elsewhere())) == {FIRST: (0, 3, 1)}
    await service.free_reservation("a")
    await shows(service, {FIRST: (0, 0, 0)})
