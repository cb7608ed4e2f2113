"""A rank that is recovered from a peer's dump, at any point of its events, and goes on with them.

It then holds what the peer holds, for which it saw all events; or the dump gives no watermark for
it, and the rank starts over. Drawn are what events teach besides blocks (salts, groups, copies,
further hashes of a block, hits that are reported), and events that come while the dump is made."""

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from lean_selector.core.hashing import hash_seed, local_hashes
from lean_selector.core.index import kv_dump
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.kv_ingest import KvIngest
from lean_selector.core.index.out_of_turn import Delivery, Turn
from lean_selector.core.index.shapes import Event, EventBatch, Tier, Watermark
from lean_selector.core.rank_bits import RankKey
from lean_selector.replicas.recovery import Recovery
from lean_selector.wire import dump as dumps
from lean_selector.wire.dump_shapes import PartitionDump
from tests.conftest import Rounds
from tests.properties.test_vllm_model import Vllm
from tests.support.blocks import matches
from tests.support.kv_records import removed_blocks, stored_blocks

SIZE, KEY = 2, (1, 0)
SALTS = (None, "s")
Path = tuple[int, ...]


def name_of(path: Path, salt: str | None, form: int) -> int:
    """The engine's hash of the block at the end of a path; each has two."""
    name = 1 + form + 2 * SALTS.index(salt)
    for block in path:
        name = name * 7 + block
    return name


class Source:
    """An index and what feeds it."""

    def __init__(self, index: KvIndex) -> None:
        self.index = index
        self.ingest = KvIngest(index, *KEY)

    def held(self) -> dict[tuple[Path, str | None], tuple[int, int]]:
        found = {}
        for number in range(16):
            path = tuple(1 + (number >> at & 1) for at in range(4))
            for salt in SALTS:
                tokens = [block for block in path for _ in range(SIZE)]
                hit = matches(self.index, local_hashes(tokens, SIZE, hash_seed(None, salt))).get(
                    KEY
                )
                found[path, salt] = (0, 0) if hit is None else (hit.device, hit.host)
        return found


# Some of a prompt's blocks are stored, or one is removed, under a form of its hash, by a group.
# Only a prompt's first event names its salt; only some events tell a group's kind.
PATH = st.integers(0, 15).map(lambda number: tuple(1 + (number >> at & 1) for at in range(4)))
TIER = st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.DEVICE, Tier.HOST_PINNED])
GROUP = st.sampled_from([None, None, (0, None), (3, "full_attention"), (3, None), (5, "mamba")])
OPERATION = st.tuples(
    st.sampled_from(["store", "store", "store", "remove"]),
    PATH,
    st.integers(0, 3),
    st.integers(1, 4),
    st.sampled_from(SALTS),
    st.sampled_from([0, 0, 0, 1]),
    TIER,
    GROUP,
)
Operation = tuple[str, Path, int, int, str | None, int, Tier, tuple[int, str | None] | None]


def batch(operation: Operation) -> EventBatch:
    kind, path, start, blocks, salt, form, tier, group = operation
    end = min(4, start + blocks)
    names = [name_of(path[: at + 1], salt, form) for at in range(start, end)]
    group_idx, group_kind = group or (None, None)
    told: Event = removed_blocks(names[:1], tier, group_idx, group_kind)
    if kind == "store":
        told = stored_blocks(
            names,
            name_of(path[:start], salt, 0) if start else None,
            [block for block in path[start:end] for _ in range(SIZE)],
            SIZE,
            tier,
            cache_salt=None if start else salt,
            group_idx=group_idx,
            kind=group_kind,
        )
    return EventBatch(None, [told], [])


class Peers:
    """Stands for the catalog and the subscriptions of a replica that recovers."""

    def __init__(self) -> None:
        self.index = KvIndex(SIZE)
        self.watermarks: dict[RankKey, Watermark] = {}

    def recovered_partition(self, key: object, block_size: int) -> "Peers":
        return self

    def is_ahead(self, rank: RankKey) -> bool:
        return False

    is_listening = is_ahead


def recovered(text: bytes) -> Peers:
    async def recover() -> Peers:
        replica = Peers()
        of = Recovery(cast(Any, replica), cast(Any, replica), (), cast(Any, None))
        for dumped, ranks in await of._read("peer", *dumps.split_dump(text)):
            await of._apply(dumped, ranks)
        return replica

    return asyncio.run(recover())


def dump_with_events(
    source: Source, batches: list[EventBatch], seq: int, pauses: list[int]
) -> tuple[bytes, int]:
    """Dump the source while it applies `batches` from number `seq` on. Return the text, and the
    number after the last."""

    def mark(key: RankKey) -> Watermark | None:
        return Watermark(seq - 1, seq - 1) if seq else None

    marks = {KEY: Watermark(seq - 1, seq - 1)} if seq else {}
    runs = source.index.dump(watermarks=marks, watermark=mark)
    parts: Iterator[bytes] = dumps.encode_dump(
        [PartitionDump("m", "t", SIZE, runs, marks, source.index.learned)]
    )
    text = b""
    for at, part in enumerate(parts):
        text += part
        for _ in range(pauses[at % len(pauses)]):
            if seq < len(batches):
                source.ingest.apply(batches[seq])
                seq += 1
    return text, seq


OPERATIONS = st.lists(OPERATION, min_size=1, max_size=30)
HOST = Tier.HOST_PINNED
HEAD = (1, 1, 1, 1), 0, 1, None, 0
OF_GROUP_3 = ("store", *HEAD, Tier.DEVICE, (3, "full_attention"))
SALTED = ("store", (1, 1, 1, 1), 0, 2, "s", 0, Tier.DEVICE, None)
SALTED_CHILD = ("store", (1, 1, 1, 1), 2, 2, "s", 0, Tier.DEVICE, None)
STORED_TWICE = ("store", (1, 1, 1, 1), 0, 2, None, 0, Tier.DEVICE, None)


@settings(max_examples=300)
@given(OPERATIONS, st.integers(0, 30), st.lists(st.integers(0, 2), min_size=1, max_size=4))
@example([STORED_TWICE] * 4, 2, [1])
@example([SALTED, SALTED_CHILD], 1, [0])
@example([*[("store", *HEAD, HOST, None)] * 2, ("remove", *HEAD, HOST, None)], 2, [0])
@example([OF_GROUP_3, ("remove", *HEAD, Tier.DEVICE, (3, None))], 1, [0])
def test_a_recovered_rank_goes_on_as_its_peer_or_starts_over(
    operations: list[Operation], at: int, pauses: list[int]
) -> None:
    batches = [batch(operation) for operation in operations]
    peer = Source(KvIndex(SIZE))
    for each in batches[:at]:
        peer.ingest.apply(each)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_dump, "_SLICE_BLOCKS", 1)
        patch.setattr(dumps, "_PART_BLOCKS", 1)
        text, came = dump_with_events(peer, batches, min(at, len(batches)), pauses)
    for each in batches[came:]:
        peer.ingest.apply(each)

    replica = recovered(text)
    ours = Source(replica.index)
    mark = replica.watermarks.get(KEY)
    event("goes on" if mark is not None else "starts over")
    if mark is None:
        mark = Watermark(-1, -1)
        assert replica.index.is_empty or ours.ingest.is_tentative
        ours.ingest.clear()
    assert not ours.ingest.is_tentative
    for number in range(mark.seq + 1, len(batches)):
        copied = Delivery(number, Turn.IN_ORDER, is_copied=number <= mark.until)
        ours.ingest.apply(batches[number], copied)
    assert ours.held() == peer.held()

    while not peer.index.is_empty:  # what the engine evicts at last goes from both
        for runs in list(peer.index.dump()):
            for run in runs:
                gone = EventBatch(None, [removed_blocks(list(run.block_hashes), run.tier)], [])
                peer.ingest.apply(gone)
                ours.ingest.apply(gone)
        if not any(runs for runs in peer.index.dump()):
            break  # the rest is out of reach
        assert ours.held() == peer.held()


@settings(max_examples=100)
@given(st.lists(OPERATION.filter(lambda each: each[0] == "store"), min_size=1, max_size=20))
def test_a_dump_during_which_nothing_changes_lets_every_rank_go_on(
    operations: list[Operation],
) -> None:
    peer = Source(KvIndex(SIZE))
    batches = [batch(operation) for operation in operations]
    for each in batches:
        peer.ingest.apply(each)
    replica = recovered(dump_with_events(peer, batches, len(batches), [0])[0])
    assert replica.watermarks == {KEY: Watermark(len(batches) - 1, len(batches) - 1)}
    assert Source(replica.index).held() == peer.held()


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("reports", [False, True], ids=["silent", "reports"])
@pytest.mark.parametrize("looks_ahead", [False, True], ids=["plain", "lookahead"])
def test_a_replica_that_recovers_again_and_again_holds_what_one_that_never_did_holds(
    looks_ahead: bool, reports: bool, groups: int, rounds: Rounds
) -> None:
    for seed in rounds(1):
        engine = Vllm(looks_ahead, reports, groups, seed)
        never, often, recoveries = Source(KvIndex(SIZE)), Source(KvIndex(SIZE)), 0
        for number in range(400):
            told = EventBatch(None, engine.step(), [])
            for source in (never, often):
                source.ingest.is_eagle = looks_ahead
                source.ingest.apply(told)
            replica = recovered(dump_with_events(often, [], number + 1, [0])[0])
            if replica.watermarks and not replica.index.is_empty:
                often, recoveries = Source(replica.index), recoveries + 1
            prompt = tuple(engine.draw.choices((1, 2), k=9))
            local = local_hashes(prompt, SIZE, is_eagle=looks_ahead)
            assert matches(often.index, local) == matches(never.index, local), prompt
        assert recoveries
