"""One source's batches, applied slice by slice: order, what ends one, and what it costs."""

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_selector.core.index.kv_cursor import KvCursor
from lean_selector.core.index.kv_index import KvIndex, Tier
from lean_selector.core.index.kv_ingest import KvIngest
from lean_selector.sockets import batch_work
from lean_selector.sockets.batch_work import BatchWork
from lean_selector.wire import kv_event_parts, kv_events
from tests.kv_batches import small_windows

encode = msgspec.msgpack.encode
NEVER = 0.0  # a deadline that is always over: one slice a call


class Source:
    """The work of a source, and what it tells people."""

    def __init__(self) -> None:
        self.index = KvIndex(2)
        self.ingest = KvIngest(self.index, 7, 0)
        self.cursor = KvCursor(can_replay=False)
        self.lines: list[str] = []
        self.work = BatchWork(self.ingest, self.cursor, self.report)

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
        assert count // kv_events.SLICE_EVENTS <= source.work.slices
    assert calls[10_000] <= 11 * calls[1_000]
    assert calls[10_000] >= 5 * calls[1_000]


def test_slices_are_applied_in_order() -> None:
    source = Source()
    events = [stored(block) for block in range(1, 2001)]
    source.take(*events, ["AllBlocksCleared"], stored(1), ["BlockRemoved", [1]], stored(2))
    assert source.index.total_blocks == 1
    source.take(*events, ["BlockRemoved", list(range(1, 2000))])
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
    blocks = list(range(1, kv_event_parts.MAX_EVENT_BLOCKS + 2))
    for payload, skipped, said in (
        (
            b"." * (batch_work.MAX_BATCH_BYTES + 1),
            "message:oversize",
            "it has more than 33554432 bytes",
        ),
        (
            encode([1.5, [None] * (kv_events.MAX_BATCH_EVENTS + 1), None]),
            "message:too_many_events",
            "it has 262145 events",
        ),
        (
            encode([1.5, [["BlockStored", blocks, None, blocks, 1]], None]),
            "stored:too_many_blocks",
            "it has 262145 blocks",
        ),
        (
            encode([1.5, [["BlockRemoved", blocks]], None]),
            "removed:too_many_blocks",
            "it has 262145 blocks",
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


def test_a_batch_is_lost_once_however_much_of_it_is_over_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Source()
    with small_windows(240):
        monkeypatch.setattr(kv_event_parts, "MAX_EVENT_BLOCKS", 20)
        source.take(stored(*range(300, 330)), stored(*range(400, 430)), stored(1))
    assert source.skipped == {("stored", "too_many_blocks"): 2}
    assert (source.cursor.lost, source.index.total_blocks) == (1, 1)


def test_junk_is_told_of_a_few_times_however_much_there_is() -> None:
    source = Source()
    source.take(*[1] * 100_000)
    assert source.skipped == {("unknown", "malformed"): 100_000}
    assert len(source.lines) <= 100_000 // kv_events.SLICE_EVENTS + 8
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


def test_a_bug_in_the_index_ends_the_batch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source()

    def fails(batch: object) -> bool:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(source.ingest, "apply", fails)
        source.work.take(encode([1.5, [stored(block) for block in range(1, 2001)], None]))
        with pytest.raises(RuntimeError, match="a bug"):
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
            assert source.index.remove(7, 77, Tier.DEVICE, [mark]) == 1
