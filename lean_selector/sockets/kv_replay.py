"""One replay: asked for on a link of its own, read until its end, its time-out or its bounds.

Knows when a replay is over, not what its batches mean: `on_reply` judges each. Spec: indexer.md
1.5.
"""

import asyncio
import time
from collections.abc import Callable
from enum import Enum, auto

from lean_selector.sockets.ingest_turns import IngestTurns
from lean_selector.sockets.kv_sockets import open_replay
from lean_selector.sockets.link import LinkState
from lean_selector.sockets.links import Links

# Engines answer a replay between batches, about every 0.1 s (vLLM).
REPLAY_IDLE_S = 1.5
# Even a trickle ends: live batches wait while a replay answers. A full buffer takes seconds.
REPLAY_LIMIT_S = 60.0
# A source gives way to the next after this many messages of its turn, whatever they cost.
MESSAGES_PER_TURN = 64


class ReplayEnd(Enum):
    COMPLETE = auto()  # the end marker came, or no more of it is wanted
    STOPPED = auto()
    OVERFLOWED = auto()  # more came than may wait; what did is applied, and the rest is there still


class KvReplay:
    """Asks once. From the thread of the loop only."""

    def __init__(
        self,
        links: Links,
        turns: IngestTurns,
        endpoint: str,
        start: int,
        *,
        may_go_on: Callable[[float], bool],
        on_reply: Callable[[list[bytes]], bool],
    ) -> None:
        """`may_go_on(deadline)`: the reply before is in to its end. `on_reply(frames)`: True when
        no more is wanted."""
        self._news = asyncio.Event()
        self._turns = turns
        self._may_go_on = may_go_on
        self._on_reply = on_reply
        self._has_ended = False
        self.has_answered = False
        self.link = open_replay(links, endpoint, start, self._news.set)

    async def run(self, idle_s: float) -> ReplayEnd:
        """`idle_s`: how long it may say nothing."""
        link = self.link
        give_up_at = time.monotonic() + REPLAY_LIMIT_S
        link.start()
        try:
            while not self._has_ended and time.monotonic() < give_up_at:
                self._news.clear()
                if link.waiting:
                    await self._turns.run(self._drain)
                elif link.state is LinkState.CLOSED:
                    break
                else:
                    try:
                        async with asyncio.timeout(idle_s):
                            await self._news.wait()
                    except TimeoutError:
                        if link.state is not LinkState.RESOLVING:
                            break
        finally:
            link.close()
        if self._has_ended:
            return ReplayEnd.COMPLETE
        return ReplayEnd.OVERFLOWED if link.has_overflowed else ReplayEnd.STOPPED

    def why_not(self) -> str:
        """Why it did not end, in a few words."""
        if self.link.was_connected:
            return "no end of it" if self.has_answered else "no answer"
        return "no answer" if self.link.error is None else f"no connection: {self.link.error}"

    def _drain(self, deadline: float) -> bool:
        for _ in range(MESSAGES_PER_TURN):
            if not self._may_go_on(deadline):
                return True
            frames = self.link.take()
            if frames is None:
                return False
            self.has_answered = True
            self._has_ended = self._on_reply(frames)
            if self._has_ended or time.perf_counter() >= deadline:
                break
        return not self._has_ended
