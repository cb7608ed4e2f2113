"""One source's batches, applied slice by slice: order, what ends one, and what it costs."""

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_selector.core.index.kv_cursor import KvCursor
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.kv_ingest import KvIngest
from lean_selector.core.index.shapes import BlockStored, EventBatch, Tier
from lean_selector.events.batch_work import BatchWork, Reader
from lean_selector.wire import kv_events
from lean_selector.wire.kv_event_shapes import MAX_BATCH_EVENTS, SLICE_EVENTS
from lean_selector.wire.kv_events import WINDOW_BYTES
from lean_selector.wire.packed_events import packed_batch
from tests.support.blocks import remove_blocks
from tests.support.kv_batches import small_windows

encode = msgspec.msgpack.encode
NEVER = 0.0  # a deadline that is always over: one slice a call


class Source:
    """The work of a source, and what it tells people. Mostly without the quick reader, which leaves
    no slices of a batch this small."""

    def __init__(self, reader: Reader | None = None) -> None:
        self.index = KvIndex(2)
        self.ingest = KvIngest(self.index, 7, 0)
        self.cursor = KvCursor(can_replay=False)
        self.lines: list[str] = []
        self.work = BatchWork(self.ingest, self.cursor, self.report, reader)

    def report(self, kind: str, level: int, text: str) -> None:
        self.lines.append(text)

    def take(self, *events: object, rank: object = None) -> int:
        """Take a batch and apply it to its end; how many calls that took."""
        self.work.take(encode([1.5, events, rank]))
        calls = 0
        while self.work.is_under_way:
            calls += 1
            assert self.work.go_on(NEVER) is not self.work.is_under_way
        return calls

    @property
    def skipped(self) -> dict[tuple[str, str], int]:
        return self.ingest.counts.skipped


def stored(*blocks: int) -> list[Any]:
    tokens = [block for block in blocks for _ in range(2)]
    return ["BlockStored", list(blocks), None, tokens, 2, None, "GPU"]


def test_an_ordinary_batch_is_applied_as_it_is_taken() -> None:
    source = Source()
    assert source.take(stored(1, 2, 3)) == 0
    assert source.index.total_blocks == 3
    assert source.work.go_on(NEVER)


def test_a_large_batch_is_applied_in_calls_of_one_slice() -> None:
    """Ten times the events are ten times the calls, none of which sees more than the first did."""
    calls = {}
    for count in (1_000, 10_000):
        source = Source()
        calls[count] = source.take(*[stored(block) for block in range(1, count + 1)])
        assert source.index.total_blocks == count
        assert count // SLICE_EVENTS <= source.work.slices
    assert calls[10_000] <= 11 * calls[1_000]
    assert calls[10_000] >= 5 * calls[1_000]


def test_slices_are_applied_in_order() -> None:
    source = Source()
    events = [stored(block) for block in range(1, 2001)]
    source.take(*events, ["AllBlocksCleared"], stored(1), ["BlockRemoved", [1]], stored(2))
    assert source.index.total_blocks == 1
    source.take(*events, ["BlockRemoved", [2, *range(1, 2000)]])  # 2 was held
    assert source.index.total_blocks == 1


def test_many_slices_fit_into_one_call_before_its_deadline() -> None:
    source = Source()
    source.work.take(encode([1.5, [stored(block) for block in range(1, 2001)], None]))
    assert source.work.go_on(float("inf"))
    assert source.index.total_blocks == 2000


def test_the_rest_of_a_batch_can_be_dropped() -> None:
    source = Source()
    source.work.take(encode([1.5, [stored(block) for block in range(1, 2001)], None]))
    while not source.index.total_blocks:
        source.work.go_on(NEVER)
    source.work.drop()
    assert not source.work.is_under_way
    assert source.work.go_on(NEVER)
    assert source.index.total_blocks < 2000
    source.take(stored(5000))


def test_what_is_over_a_bound_is_counted_and_marks_the_source() -> None:
    for payload, skipped, said in (
        (
            b"." * (kv_events.MAX_BATCH_BYTES + 1),
            "message:oversize",
            "it has more than 4194304 bytes",
        ),
        (
            encode([1.5, [None] * (MAX_BATCH_EVENTS + 1), None]),
            "message:not_a_batch",
            "Expected `array` of length <= 65536",
        ),
    ):
        source = Source()
        source.cursor.live(0, b"")
        source.work.take(payload)
        source.work.go_on(float("inf"))
        assert [":".join(kind) for kind in source.skipped] == [skipped]
        assert source.cursor.state.value == "degraded"
        assert source.cursor.lost == 1
        assert said in source.lines[-1]
        assert source.lines[-1].startswith("batch lost, ")


def test_junk_is_told_of_a_few_times_however_much_there_is() -> None:
    source = Source()
    source.take(*[1] * 50_000)
    assert source.skipped == {("unknown", "malformed"): 50_000}
    assert len(source.lines) <= 50_000 // SLICE_EVENTS + 8
    assert source.cursor.state.value == "connecting"


def test_a_message_that_stops_making_sense_late_is_lost_whole() -> None:
    source = Source()
    payload = encode([1.5, [stored(block) for block in range(1, 2001)], None])
    source.work.take(payload[:-20])
    while source.work.is_under_way:
        source.work.go_on(NEVER)
    assert source.skipped == {("message", "not_a_batch"): 1}
    assert source.index.is_empty
    assert source.lines[-1].startswith("batch lost, it cannot be decoded: ")


def test_a_bug_ends_the_batch_alone() -> None:
    tokens: Any = None  # what no reader says

    def buggy(payload: bytes) -> EventBatch | None:
        event = BlockStored(b"12345678", None, tokens, 2, Tier.DEVICE)
        return EventBatch(None, [event], []) if len(payload) > WINDOW_BYTES else None

    source = Source(buggy)
    source.work.take(bytes(WINDOW_BYTES + 1))
    with pytest.raises(TypeError):
        source.work.go_on(float("inf"))
    assert not source.work.is_under_way
    source.take(stored(1))
    assert source.index.total_blocks == 1


EVENTS = st.sampled_from(
    [
        *(stored(1), stored(2, 3), stored(*range(40))),
        *(["BlockRemoved", [1]], ["BlockRemoved", [2] * 90]),
        *(["AllBlocksCleared"], ["Ignored"], ["Moved"], {"type": 1}, None, []),
        *("x" * 300, [[None]] * 90),
    ]
)
PAYLOADS = st.one_of(
    st.binary(max_size=300),
    st.builds(
        lambda events, rank: encode([1.5, events, rank]),
        st.lists(EVENTS, max_size=12),
        st.sampled_from((None, 0, 5, -1, 2**31, "x", [0] * 300)),
    ),
)


@settings(deadline=None)
@given(st.lists(PAYLOADS, max_size=6), st.data())
def test_any_messages_leave_the_source_in_order_and_its_counts_right(
    payloads: list[bytes], data: st.DataObject
) -> None:
    """Mangled or not: every event of a batch is counted once, and the next batch is applied."""
    source = Source()
    with small_windows(240):
        for at, whole in enumerate(payloads):
            payload = bytearray(whole)
            for _ in range(data.draw(st.integers(0, 2))):
                if payload:
                    payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(
                        st.integers(0, 7)
                    )
            before = sum(count for _, _, count in source.ingest.counts.results())
            lost = source.cursor.lost
            source.work.take(bytes(payload))
            while source.work.is_under_way:
                source.work.go_on(NEVER)
            counted = sum(count for _, _, count in source.ingest.counts.results()) - before
            events: object = None
            with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
                batch = msgspec.msgpack.decode(bytes(payload))
                events = batch["events"] if isinstance(batch, dict) else batch[1]
            if source.cursor.lost > lost:
                assert counted == 1, "the message, and nothing of it"
            elif isinstance(events, list):
                ignored = sum(
                    isinstance(event, list) and event[:1] == ["Ignored"] for event in events
                )
                assert counted == len(events) - ignored
            mark = 10_000 + at
            source.take(stored(mark), rank=77)
            strays = source.index.of_strays(0)  # what a source of rank 0 stores for others
            assert remove_blocks(strays, (7, 77), Tier.DEVICE, [mark]) == 1


# What one rank hears of: chains below other chains, names that come again, removals of what is
# there and what is not; and of each some that the quick reader leaves to the other.
CHAIN = st.tuples(
    st.integers(0, 12),  # the parent, if any
    st.lists(st.integers(0, 12), max_size=4),
    st.integers(-1, 1),  # tokens beyond the blocks'
    st.sampled_from(["GPU", "CPU", "tape"]),
    st.sampled_from([None, [["dynamo-cache-salt:pepper"]], [None]]),
    st.sampled_from([None, 0, 1]),
    st.sampled_from([None, "full_attention", "mamba"]),
    st.sampled_from([None, None, "adapter", "other"]),
)
GONE = st.tuples(st.lists(st.integers(0, 12), max_size=4), st.sampled_from(["GPU", "CPU"]))
HEARD = st.lists(st.lists(st.one_of(CHAIN, CHAIN, GONE, st.none()), max_size=6), max_size=6)


def event_of(heard: tuple[Any, ...] | None) -> list[Any]:
    if heard is None:
        return ["AllBlocksCleared"]
    if len(heard) == 2:
        return ["BlockRemoved", *heard]
    parent, names, more, medium, keys, group, kind, adapter = heard
    tokens = [name for name in names for _ in range(2)]
    tokens = tokens[:-1] if more < 0 else tokens + [3] * more
    tail = [medium, adapter, keys, group, kind]
    return ["BlockStored", names, parent or None, tokens, 2, None, *tail]


@settings(max_examples=200)
@given(HEARD)
def test_what_is_applied_is_the_same_with_the_quick_reader_and_without(
    batches: list[list[tuple[Any, ...] | None]],
) -> None:
    sources = Source(), Source(packed_batch)
    for batch in batches:
        for source in sources:
            source.take(*map(event_of, batch))
        told = [[list(runs) for runs in source.index.dump()] for source in sources]
        assert told[0] == told[1]
        plain, quick = ([*source.ingest.counts.results()] for source in sources)
        assert sorted(plain) == sorted(quick)
        blocks = [
            (source.ingest.counts.blocks_stored, source.ingest.counts.blocks_removed)
            for source in sources
        ]
        assert blocks[0] == blocks[1]


def test_a_large_batch_that_the_quick_reader_takes_is_applied_part_by_part() -> None:
    names = [name << 40 for name in range(1, 20_001)]
    large = ["BlockStored", names, None, [7] * (2 * len(names)), 2, None, "GPU"]
    source = Source(packed_batch)
    source.take(large)
    assert source.work.slices == 40
    assert source.index.total_blocks == 20_000
    assert source.ingest.counts.stored == 1


def test_the_rest_of_a_large_event_is_refused_with_its_first_part() -> None:
    names = [name << 40 for name in range(1, 20_001)]
    source = Source(packed_batch)
    source.take(["BlockStored", names, 77, [7] * (2 * len(names)), 2, None, "GPU"], stored(1))
    assert source.skipped == {("stored", "unknown_parent"): 1}
    assert source.index.total_blocks == 1
