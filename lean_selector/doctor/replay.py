"""Asks engines' replay endpoints, as the service does, for their last batches or for an end."""

import asyncio
from typing import Final

from lean_selector.core.index.kv_batch import BlockStored
from lean_selector.sockets.ingest_turns import IngestTurns
from lean_selector.sockets.kv_replay import KvReplay, ReplayEnd
from lean_selector.sockets.kv_sockets import replay_frames
from lean_selector.sockets.links import Links
from lean_selector.wire.kv_events import NotABatch, batch_slices

# No engine has numbered so many batches: the answer is the end alone.
BEYOND_ALL: Final = 1 << 62
_MOST_BATCHES: Final = 10_000


class NoReplay(Exception):
    """No end of a replay came; the message says why in a few words."""


class Replays:
    """Over links of its own. From the thread of the loop only."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._turns = IngestTurns()

    async def stored_since(self, endpoint: str, first: int, idle_s: float) -> list[BlockStored]:
        """What batches from number `first` on stored; the engine may be silent for `idle_s`.

        Raises NoReplay.
        """
        payloads: list[bytes] = []

        def on_reply(frames: list[bytes]) -> bool:
            reply = replay_frames(frames)
            if reply is not None and reply[1]:
                payloads.append(reply[1])
                return len(payloads) == _MOST_BATCHES
            return reply is not None

        replay = KvReplay(
            self._links,
            self._turns,
            endpoint,
            first,
            may_go_on=lambda deadline: True,
            on_reply=on_reply,
        )
        end = await replay.run(idle_s)
        closing = replay.link.close()
        if closing is not None:
            await asyncio.gather(closing, return_exceptions=True)
        if end is ReplayEnd.STOPPED:
            raise NoReplay(replay.why_not())
        return [event for payload in payloads for event in _stored_in(payload)]


def _stored_in(payload: bytes) -> list[BlockStored]:
    try:
        return [
            event
            for batch in batch_slices(payload)
            if batch is not None
            for event in batch.events
            if isinstance(event, BlockStored)
        ]
    except NotABatch:
        return []
