"""Whole batches from payloads, and windows so small that small payloads are read in many slices."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lean_selector.core.index.shapes import EventBatch, SkippedEvent
from lean_selector.wire import kv_events, messagepack
from lean_selector.wire.kv_events import batch_slices, decode_small
from lean_selector.wire.messagepack import Bytes


def decode_batch(payload: Bytes) -> EventBatch:
    """A whole batch at once, however large, as a source would apply it. Raises NotABatch."""
    small = decode_small(payload)
    slices = [small] if small is not None else [part for part in batch_slices(payload) if part]
    whole = EventBatch(slices[0].dp_rank if slices else None, [], [])
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


@contextmanager
def small_windows(
    window: int, events: int = 4, blocks: int = 4, tokens: int = 16
) -> Iterator[pytest.MonkeyPatch]:
    """What is large begins at `window` bytes, and a slice holds so many of each."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (messagepack, kv_events):
            patch.setattr(module, "WINDOW_BYTES", window)
        patch.setattr(kv_events, "SLICE_EVENTS", events)
        patch.setattr(kv_events, "PART_BLOCKS", blocks)
        patch.setattr(kv_events, "PART_BLOCKS_WITH_KEYS", 1)
        patch.setattr(kv_events, "PART_TOKENS", tokens)
        yield patch
