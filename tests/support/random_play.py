"""What random plays of all references have in common: workers, prompts, choices and events.

What a decision makes differ is kept out of a play, or put right in it where it is noted: each such
place cites its decision. Of equals each service draws one for itself: then what is drawn must be
among them, and what is booked is pinned to one.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.support.side_by_side import BLOCK_SIZE, SideBySide

Body = dict[str, object]


class RandomPlay:
    """One seed's operations, on both sides."""

    weights: dict[str, int]  # of the methods that a play chooses among
    event_weights: dict[str, int]  # of those that it has besides, where there are events

    def __init__(self, seed: int, pair: SideBySide, engines: Sequence[int]) -> None:
        """`engines`: the workers that publish; none where there are no events."""
        self._rng = random.Random(seed)
        self._pair = pair
        self._both = pair.ask
        self._engines = engines
        self._has_events = bool(engines)

    def run(self, operations: int) -> None:
        self._begin()
        self._settle()
        for worker_id in self._engines:
            self._hear(worker_id)
        weights = self.weights | (self.event_weights if self._has_events else {})
        calls: list[Callable[[], None]] = [getattr(self, f"_{name}") for name in weights]
        for _ in range(operations):
            self._rng.choices(calls, list(weights.values()))[0]()

    def _begin(self) -> None:
        """Registers the workers."""
        raise NotImplementedError

    def _settle(self) -> None:
        self._pair.take({"do": "settle"})

    def _tokens(self, many: int) -> list[int]:
        return [self._rng.randrange(2**32) for _ in range(many)]

    def _hear(self, worker_id: int) -> None:
        step = {"do": "hear", "engine": worker_id, "tokens": self._tokens(BLOCK_SIZE)}
        self._pair.take(step)

    def _tell(
        self, worker_id: int, event: str, hashes: list[int], tokens: list[int], blocks: int
    ) -> None:
        """An engine's event, after which it holds so many blocks of the tokens."""
        told = {"event": event, "hashes": hashes, "tokens": tokens, "blocks": blocks}
        self._pair.take({"do": "publish", "engine": worker_id, **told})

    def _narrowed(self, workers: list[int], taints: float, weights: list[float]) -> Body:
        """What a select may say of workers; `taints` is how often it says that."""
        draw = self._rng.random
        body: Body = {}
        if draw() < 0.15:
            body["pinned_worker"] = {
                "worker_id": self._rng.choice(workers),
                "dp_rank": self._rng.choice([0, 0, 1, 2, 7]),
            }
        if draw() < 0.25:
            body["allowed_worker_ids"] = self._rng.sample(workers, self._rng.randrange(6))
        if draw() < taints:
            body["routing_constraints"] = {
                "required_taints": self._rng.sample(["a", "b"], self._rng.randrange(2)),
                "preferred_taints": {"b": self._rng.choice(weights), "c": -1.5},
            }
        return body

    def _pinned(self, body: Body) -> Body:
        """The same, pinned to one of the ranks that are equally good, if several are."""
        tied = self._pair.tied(body)
        if not tied:
            return body
        worker_id, dp_rank = self._rng.choice(tied)
        return {**body, "pinned_worker": {"worker_id": worker_id, "dp_rank": dp_rank}}

    def _booked_as(self, field: str, ids: list[str], body: Body) -> tuple[str, Any]:
        """POST /select_and_reserve under one of these ids or, at times, under none; the id and the
        answer, where it is booked."""
        body = self._pinned(body)
        if self._rng.random() < 0.1:
            self._pair.take({"do": "unnamed", "body": body})
            return "", None
        body[field] = name = self._rng.choice(ids)
        status, answer = self._both("POST", "/select_and_reserve", body)
        return name, answer if status == 200 else None


def quoted(name: str) -> str:
    return "".join(f"%{byte:02x}" for byte in name.encode())
