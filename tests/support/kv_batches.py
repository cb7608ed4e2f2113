"""Whole batches from payloads, by both readers, and windows so small that small payloads are read
in many slices."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lean_selector.core.index.shapes import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    EventPart,
    SkippedEvent,
)
from lean_selector.wire import kv_event_records, kv_events
from lean_selector.wire.kv_events import NotABatch, batch_slices, decode_small
from lean_selector.wire.packed_events import packed_batch
from tests.support.kv_records import hashes_of, tokens_of


def decode_batch(payload: bytes) -> EventBatch:
    """A whole batch at once, however large, as a source would apply it. Raises NotABatch.

    Where the reader of ordinary batches takes it, that says the same: whatever a test reads is held
    against both."""
    packed = packed_batch(payload)
    try:
        whole = _whole_batch(payload)
    except NotABatch:
        assert packed is None, "the other reader takes it for no batch"
        raise
    if packed is not None:
        assert not whole.skipped
        assert packed.dp_rank == whole.dp_rank
        assert told(packed) == told(whole)
    return whole


def _whole_batch(payload: bytes) -> EventBatch:
    small = decode_small(payload)
    slices = [small] if small is not None else list(batch_slices(payload))
    whole = EventBatch(slices[0].dp_rank, [], [])
    skipped: dict[tuple[str, str], SkippedEvent] = {}
    for part in slices:
        assert part.dp_rank == whole.dp_rank
        whole.events += part.events
        for event in part.skipped:
            kind = event.event_type, event.reason
            if kind in skipped:
                skipped[kind].count += event.count
            else:
                skipped[kind] = event
    whole.skipped += skipped.values()
    return whole


def told(batch: EventBatch) -> list[tuple[Any, ...]]:
    """What the events say, in one form; blocks beyond names or tokens left out, parts joined."""
    told: list[tuple[Any, ...]] = []
    for event in batch.events:
        one = told_of(event)
        last = told[-1] if told else None
        is_part = isinstance(event, BlockStored) and event.part > EventPart.FIRST
        if is_part and last is not None:
            assert one[2] == last[1][-1], "the chain goes on"
            told[-1] = (last[0], last[1] + one[1], last[2], last[3] + one[3], *last[4:])
        elif last is not None and one[0] == last[0] == "removed" and one[2:-1] == last[2:-1]:
            # One reader joins removals by what their medium is, the other by its name.
            told[-1] = (*last[:1], last[1] + one[1], *last[2:-1], last[-1] + one[-1])
        else:
            told.append(one)
    return told


def told_of(event: Event) -> tuple[Any, ...]:
    if isinstance(event, BlockStored):
        assert (event.is_eagle, event.is_remote, event.unknown_keys) == (False, False, None)
        assert not any(event.mm_hashes or ())
        assert event.fault is None
        size, hashes, tokens = event.block_size, hashes_of(event), tokens_of(event)
        blocks = min(len(hashes), len(tokens) // size)
        names, tokens_in = tuple(hashes[:blocks]), tuple(tokens[: blocks * size])
        hashed = event.lora_name, event.cache_salt
        rest = size, event.tier, event.group_idx, event.kind, hashed
        return "stored", names, event.parent_hash, tokens_in, *rest
    if isinstance(event, BlockRemoved):
        assert not event.is_remote
        removed = tuple(hashes_of(event))
        return "removed", removed, event.tier, event.group_idx, event.kind, event.events
    assert isinstance(event, AllBlocksCleared)
    return ("cleared",)


@contextmanager
def small_windows(window: int, events: int = 4, blocks: int = 4) -> Iterator[pytest.MonkeyPatch]:
    """What is large begins at `window` bytes, and a slice holds so many of each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_events, "WINDOW_BYTES", window)
        patch.setattr(kv_events, "SLICE_EVENTS", events)
        for module in (kv_events, kv_event_records):
            patch.setattr(module, "PART_BLOCKS", blocks)
        yield patch
