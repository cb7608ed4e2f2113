"""The prompts of the comparison, the requests made of them, and the engines that hold them."""

import json
import struct
from pathlib import Path

import msgspec
import pytest

from lean_selector.core.hashing import sequence_hashes_bytes
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.kv_ingest import KvIngest
from lean_selector.core.index.shapes import Tier
from lean_selector.wire.packed_events import packed_batch
from loadtest.duel.engines import LAYOUTS, Engines, Layout
from loadtest.duel.prompts import (
    FREE_LAG,
    Prompts,
    lifecycle_requests,
    msgpack_select_request,
    select_request,
)
from tests.loadtest.conftest import WriteTrace


@pytest.fixture
def trace(write_trace: WriteTrace) -> Path:
    """Six prompts of two or three 512-token blocks over one first block."""
    return write_trace([(at, [0, at, 100], 1_024 + at) for at in range(1, 7)])


def body_of(request: bytes) -> bytes:
    head, _, body = request.partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head
    return body


def test_prompts_keep_the_trace_s_order_and_count_what_is_used_twice(trace: Path) -> None:
    prompts = Prompts(trace, 16)
    assert [prompts.at(number).isl_tokens for number in range(6)] == list(range(1_025, 1_031))
    assert prompts.repeats(6) == 0
    assert prompts.at(7) is prompts.at(1)
    assert prompts.repeats(8) == 2


def test_a_prompt_is_hashed_as_the_engines_and_the_service_do(trace: Path) -> None:
    prompt = Prompts(trace, 16).at(0)
    assert prompt.blocks == 64
    assert prompt.sequence == sequence_hashes_bytes(prompt.local)
    fields = json.loads(body_of(select_request(prompt)))
    assert struct.pack("<64q", *fields["block_hashes"]) == prompt.local
    assert struct.pack("<64q", *fields["sequence_hashes"]) == prompt.sequence
    packed = msgspec.msgpack.decode(body_of(msgpack_select_request(prompt)))
    assert packed == {
        "model_name": fields["model_name"],
        "isl_tokens": 1_025,
        "block_hashes": prompt.local,
        "sequence_hashes": prompt.sequence,
    }


def test_prompts_of_a_chosen_length_all_differ_behind_beginnings_that_engines_hold(
    trace: Path,
) -> None:
    prompts = Prompts(trace, 16)
    cut = [prompts.cut(number, 8, known=2) for number in range(40)]
    assert len({prompt.sequence for prompt in cut}) == 40
    assert {(prompt.blocks, prompt.isl_tokens) for prompt in cut} == {(8, 128)}
    assert all(prompt.sequence == sequence_hashes_bytes(prompt.local) for prompt in cut)
    shared = [prompt.local[:32] == prompts.at(0).local[:32] for prompt in cut]
    assert shared == [bool(number % 2) for number in range(40)]


@pytest.mark.parametrize(
    ("count", "id_field"), [(2, "reservation_id"), (FREE_LAG + 5, "selection_id")]
)
def test_a_connection_lives_its_reservations_in_order_and_many_at_a_time(
    trace: Path, count: int, id_field: str
) -> None:
    prompts = Prompts(trace, 16)
    requests = lifecycle_requests([prompts.at(n) for n in range(count)], "r", id_field)
    calls = []
    for request in requests:
        method, path, _ = request.split(b"\r\n", 1)[0].decode().split(" ")
        if path == "/select_and_reserve":
            path = f"/reservations/{json.loads(body_of(request))[id_field]}"
        calls.append((method, path))
    alive, most = set[str](), 0
    for method, path in calls:
        if path.endswith("/prefill_complete"):
            assert path.removesuffix("/prefill_complete") in alive
        elif method == "DELETE":
            assert (("POST", f"{path}/prefill_complete")) in calls[: calls.index((method, path))]
            alive.remove(path)
        else:
            assert path not in alive
            alive.add(path)
            most = max(most, len(alive))
    assert not alive
    assert most == min(count, FREE_LAG + 1)
    assert len(calls) == 3 * count


def test_full_caches_evict_as_much_as_they_store(trace: Path) -> None:
    with Engines(Prompts(trace, 16), 1, 100) as engines:
        list(engines.fill(90))
        before = engines.holdings
        messages = engines.churn(300)
        stored = sum(message.stored for message in messages)
        removed = sum(message.removed for message in messages)
        assert stored >= 300
        assert stored - removed == engines.holdings - before


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.title)
@pytest.mark.parametrize(("event_blocks", "least"), [(None, 1), (8, 8), (1, 32)])
def test_each_layout_tells_the_same_blocks(
    trace: Path, layout: Layout, event_blocks: int | None, least: int
) -> None:
    told = Engines(Prompts(trace, 16), 2, 10_000, event_blocks, layout=layout, batch_events=32)
    with told as engines:
        index = KvIndex(16)
        sources = [KvIngest(index, engine, 0) for engine in range(2)]
        most = 0

        def held() -> int:
            return sum(index.blocks(engine, 0, Tier.DEVICE) for engine in range(2))

        for message in engines.fill(200):
            batch = packed_batch(message.payload)
            assert batch is not None
            most = max(most, len(batch.events))
            sources[message.engine].apply(batch)
        assert (most, held()) == (least, engines.holdings)
        for message in engines.empty([0, 1]):
            batch = packed_batch(message.payload)
            assert batch is not None
            sources[message.engine].apply(batch)
        assert held() == 0
