"""Ours held against the real 1.3.1: random operations on both, side by side.

Run by itself for longer, with fresh seeds: `pytest tests/interop/test_reference_131.py --long`.
"""

import functools
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Rounds
from tests.support.random_play import RandomPlay, quoted
from tests.support.side_by_side import BLOCK_SIZE, SideBySide, Step, engine, play, side_by_side

pytestmark = pytest.mark.reference

# -- requests that are refused, and workers that nobody can choose ---------------------------------

NOBODY = "tcp://127.0.0.1:9"
HASHES: dict[str, object] = {"block_hashes": [1], "sequence_hashes": [1]}
BAD: list[tuple[str, str, object]] = [
    ("POST", "/select", {"token_ids": "x"}),
    ("POST", "/select", {"token_ids": [-1]}),
    ("POST", "/select", {"token_ids": [2**32]}),
    ("POST", "/select", {"tenant_id": "nowhere", "token_ids": [1]}),
    ("POST", "/select", {"tenant_id": None, "token_ids": [1]}),
    ("POST", "/select", {}),
    ("POST", "/select", {"block_hashes": [1]}),
    ("POST", "/select", {**HASHES}),
    ("POST", "/select", {**HASHES, "isl_tokens": 0}),
    ("POST", "/select", {**HASHES, "isl_tokens": -1}),
    ("POST", "/select", {**HASHES, "sequence_hashes": [1, 2], "isl_tokens": 4}),
    ("POST", "/select", {**HASHES, "block_hashes": [2**64], "isl_tokens": 4}),
    ("POST", "/select", {"token_ids": [1], "pinned_worker": {"worker_id": 1}}),
    ("POST", "/select", {"token_ids": [1], "strict_priority": -1}),
    ("POST", "/overlap_scores", {"token_ids": [1], "router_config_override": {"x": 1}}),
    ("POST", "/select_and_reserve", {"reservation_id": 5, "token_ids": [1]}),
    ("POST", "/select_and_reserve", []),
    ("POST", "/reservations", {"worker_id": 1, "token_ids": [1]}),
    ("POST", "/reservations", {"reservation_id": "r1", "worker_id": -1}),
    ("POST", "/reservations", {"reservation_id": "r1", "worker_id": 2**64}),
    ("POST", "/reservations", {"reservation_id": "z", "worker_id": 1}),
    ("POST", "/potential_loads", {"token_ids": [1], "lora_name": 5}),
    ("POST", "/overlap_scores", {"router_config_override": {"router_temperature": -1.0}}),
    ("POST", "/workers", {}),
    ("POST", "/workers", {"worker_id": "1"}),
    ("DELETE", "/workers/77", None),
    ("PATCH", "/workers/x", {}),
    ("PATCH", "/workers/18446744073709551616", {}),
    ("GET", "/nowhere", None),
    ("GET", "/select", None),
    ("POST", "/loads", {}),
    ("GET", "/loads?model_name=a&model_name=b", None),
    ("POST", "/replica_sync/register_peer", {"endpoint": "tcp://127.0.0.1:1"}),
    ("POST", "/replica_sync/deregister_peer", {"endpoint": "tcp://127.0.0.1:1"}),
]

# Of a worker, but for its id.
INCOMPLETE: list[dict[str, object]] = [
    {},
    {"endpoint": "", "block_size": 0},
    {"endpoint": "http://o", "block_size": BLOCK_SIZE, "data_parallel_size": 0},
    {"endpoint": "http://o", "block_size": 2**32 - 1},
    {"model_name": "", "tenant_id": "", "is_eagle": True},
    {"tenant_id": "other", "data_parallel_size": 3, "kv_events_endpoint": NOBODY},
    {"block_size": -1},
    {"kv_transfer_enforcement": "never"},
    {"taints": None},
    {"kv_events_endpoints": {"0": 5}},
    {"total_kv_blocks": 2**64},
    {"max_num_batched_tokens": 1.0},
]

# -- the play: every route that both have ----------------------------------------------------------

IDS = [f"r{number}" for number in range(12)] + ["a/b", "ä", "%", "x" * 300]
# The first is never removed, because a partition without workers is another thing here (D3).
WORKERS = [1, 2, 3, 4]
RANKS = {1: 1, 2: 1, 3: 3, 4: 2}
ENGINES = (1, 2)
ODD = [50, 51, 52]  # workers that are never complete
PROMPT_TOKENS = 44


def amended(step: Step, status: int, text: str) -> tuple[int, str]:
    """A deleted worker stays as a tombstone there, and is gone here (D3)."""
    if step["do"] != "ask" or step["method"] != "GET":
        return status, text
    if step["path"].startswith("/workers"):
        return status, json.dumps(_alive(json.loads(text)))
    if step["path"] == "/ready":
        answer = json.loads(text)
        return status, json.dumps({**answer, "workers": _alive(answer["workers"])})
    return status, text


def _alive(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in records if each["lifecycle"] != "unschedulable"]


class Play(RandomPlay):
    weights = {
        **{"select": 22, "select_and_reserve": 20, "reserve": 14, "lifecycle": 22, "look": 6},
        **{"project": 8, "change_worker": 3, "remove_worker": 2, "register_oddly": 4, "err": 5},
    }
    event_weights = {"publish": 8}

    def __init__(self, seed: int, pair: SideBySide, *, has_events: bool) -> None:
        super().__init__(seed, pair, ENGINES if has_events else ())
        self._booked: dict[str, int] = {}  # id -> worker
        self._gone: set[int] = set()
        # Prompts are chains (D20); some share a beginning.
        trunk = self._tokens(PROMPT_TOKENS)
        self._chains = [trunk, *(self._branch(trunk) for _ in range(3)), self._tokens(200)]
        self._names: dict[tuple[int, ...], int] = {}  # of each beginning, as engines name its end
        self._stored: dict[int, dict[int, int]] = {each: {} for each in ENGINES}
        self._copies: dict[int, Counter[int]] = {each: Counter() for each in ENGINES}

    def _begin(self) -> None:
        for worker_id in WORKERS:
            self._register(worker_id)

    # -- workers -----------------------------------------------------------------------------------

    def _register(self, worker_id: int, **more: object) -> None:
        body: dict[str, object] = {
            "worker_id": worker_id,
            "endpoint": f"http://w{worker_id}",
            "block_size": BLOCK_SIZE,
            "data_parallel_size": RANKS[worker_id],
            "max_num_batched_tokens": 10**6,  # so much that nobody waits
            "taints": ["a"] if worker_id % 2 else ["a", "b"],
            **more,
        }
        if worker_id in self._engines:
            body["kv_events_endpoint"] = engine(worker_id)
        elif self._has_events:
            body["kv_events_endpoints"] = {str(rank): NOBODY for rank in range(RANKS[worker_id])}
        self._both("POST", "/workers", body)

    def _leave_alone(self, worker_id: int) -> None:
        """Nothing runs on it and nothing is cached: any change forgets both there (D10)."""
        for name in [name for name, on in self._booked.items() if on == worker_id]:
            self._free(name)
        if worker_id in self._engines:
            self._clear(worker_id)

    def _back(self, worker_id: int) -> None:
        self._settle()
        if worker_id in self._engines:
            self._hear(worker_id)

    def _change_worker(self) -> None:
        worker_id = self._rng.choice([each for each in WORKERS if each not in self._gone])
        self._leave_alone(worker_id)
        changes: list[dict[str, object]] = [
            # More than all prompts have: few bound what is held here (the guide of operations).
            {"total_kv_blocks": self._rng.choice([1000, 2**64 - 1])},
            {"max_num_batched_tokens": self._rng.choice([10**6, 2**40])},
            {"taints": self._rng.sample(["a", "b", "c"], self._rng.randrange(4))},
            {"endpoint": f"http://w{worker_id}/{self._rng.randrange(9)}"},
            {"stable_routing_id": self._rng.choice(["x", ""])},
            {"topology_domains": {"zone": "z", "": "ä"}, "kv_transfer_domain": "zone"},
            {"kv_transfer_enforcement": "preferred", "kv_transfer_preferred_weight": 0.1},
            {"worker_id": 99, "model_name": "n", "unknown": [1]},
            {"data_parallel_start_rank": None, "is_eagle": None},
            {},
        ]
        if self._rng.random() < 0.5:
            self._both("PATCH", f"/workers/{worker_id}", self._rng.choice(changes))
        else:
            self._register(worker_id, **self._rng.choice(changes[:7]))
        self._back(worker_id)

    def _remove_worker(self) -> None:
        worker_id = self._rng.choice(WORKERS[1:])
        self._leave_alone(worker_id)
        if self._rng.random() < 0.5:
            self._both("DELETE", f"/workers/{worker_id}")
        else:  # it cannot be chosen for a while
            missing = self._rng.choice([{"endpoint": ""}, {"block_size": 0}])
            self._both("PATCH", f"/workers/{worker_id}", missing)
        self._gone.add(worker_id)
        self._settle()
        for _ in range(self._rng.randrange(4)):
            self._rng.choice([self._select, self._select_and_reserve, self._project, self._look])()
        self._gone.remove(worker_id)
        self._register(worker_id)
        self._back(worker_id)

    def _register_oddly(self) -> None:
        """Workers that cannot be chosen, or that are refused."""
        worker_id = self._rng.choice(ODD)
        if self._rng.random() < 0.3:
            body = self._rng.choice(INCOMPLETE)
            self._both("PATCH", f"/workers/{worker_id + self._rng.choice([0, 100])}", body)
        else:
            body = {"worker_id": worker_id, **self._rng.choice(INCOMPLETE)}
            if not self._has_events or body.get("block_size") != BLOCK_SIZE:
                body.pop("block_size", None)  # complete it would be
            self._both("POST", "/workers", body)

    # -- prompts -----------------------------------------------------------------------------------

    def _branch(self, trunk: list[int]) -> list[int]:
        shared = self._rng.randrange(0, len(trunk), BLOCK_SIZE)
        return trunk[:shared] + self._tokens(len(trunk) - shared)

    def _prompt(self) -> dict[str, object]:
        chain = self._rng.choice(self._chains)
        tokens = chain[: self._rng.randrange(1, len(chain) + 1)]  # none is refused (D7)
        if self._rng.random() < 0.7:
            prompt: dict[str, object] = {"token_ids": tokens}
            if self._rng.random() < 0.1:
                prompt["lora_name"] = self._rng.choice(["l", ""])
            if self._rng.random() < 0.1:
                prompt["is_eagle"] = self._rng.choice([True, False, None])
            if self._rng.random() < 0.1:
                mm = {"routing_token_ids": tokens, "block_mm_infos": []}
                prompt = {"mm_routing_info": mm, "token_ids": [1]}
            return prompt
        named = [self._name(tokens[:end]) for end in range(BLOCK_SIZE, len(tokens), BLOCK_SIZE)]
        return {
            "block_hashes": named,
            "sequence_hashes": [-each for each in named],
            "isl_tokens": max(1, len(tokens) + self._rng.randrange(-3, 4)),
        }

    def _name(self, tokens: list[int]) -> int:
        return self._names.setdefault(tuple(tokens), 1000 + len(self._names))

    def _override(self) -> dict[str, object]:
        choices: list[dict[str, object]] = [
            {"overlap_score_credit": self._rng.choice([0, 0.5, 1.0])},
            {"prefill_load_scale": self._rng.choice([0.0, 0.3, 7])},
            {"overlap_score_weight": self._rng.choice([0, 2.5])},
            {"track_prefill_tokens": self._rng.choice([True, False, None])},
            {"assume_kv_reuse": False, "shared_cache_multiplier": 0.5},
            {},
        ]
        return {"router_config_override": self._rng.choice(choices)}

    def _choice(self) -> dict[str, object]:
        """The body of a select, without its ids."""
        draw = self._rng.random
        body = self._prompt() | self._narrowed([*WORKERS, 50, 99], 0.25, [0.5, -0.1, 3])
        if draw() < 0.25:
            body.update(self._override())
        if draw() < 0.1:
            body["expected_output_tokens"] = self._rng.randrange(100)
        if draw() < 0.1:
            body["priority_jump"] = self._rng.choice([0, 1.5, -2])
            body["strict_priority"] = self._rng.randrange(3)
        return body

    # -- operations --------------------------------------------------------------------------------

    def _select(self) -> None:
        body = self._choice()
        if self._pair.tied(body):
            self._pair.take({"do": "tie", "body": body})
            body = self._pinned(body)
        if self._rng.random() < 0.5:
            body["selection_id"] = self._rng.choice(["s", "", "ä"])
        self._both("POST", "/select", body)

    def _select_and_reserve(self) -> None:
        name, answer = self._booked_as("reservation_id", IDS, self._choice())
        if answer is not None:
            self._booked[name] = answer["worker_id"]

    def _reserve(self) -> None:
        name, worker_id = self._rng.choice(IDS), self._rng.choice([*WORKERS, 50, 99])
        body: dict[str, object] = {"reservation_id": name, "worker_id": worker_id}
        # A rank that there is not would be booked there (D5).
        rank = self._rng.choice([None, *range(RANKS.get(worker_id, 1))])
        body |= {"dp_rank": rank, **self._prompt()}
        if self._rng.random() < 0.6:
            body["effective_prefill_tokens"] = self._rng.randrange(300)
        if self._rng.random() < 0.3:
            body.update(self._override())
        if self._rng.random() < 0.2:
            body["expected_output_tokens"] = self._rng.randrange(100)
        status, answer = self._both("POST", "/reservations", body)
        if status == 201:
            self._booked[name] = answer["worker_id"]

    def _lifecycle(self) -> None:
        draw = self._rng.random()
        held = list(self._booked)
        # An unknown one is freed with 200 there (D4).
        if held and draw < 0.4:
            self._free(self._rng.choice(held))
            return
        name = self._rng.choice(held if held and self._rng.random() < 0.9 else IDS)
        if draw < 0.65:
            self._both("POST", f"/reservations/{quoted(name)}/prefill_complete")
        else:
            fraction = self._rng.choice([None, None, 0.0, 0.25, 0.5, 0.8, 1.0, 1.5, -1, "x"])
            body = {} if fraction is None else {"decay_fraction": fraction}
            self._both("POST", f"/reservations/{quoted(name)}/output_block", body)

    def _free(self, name: str) -> None:
        self._both("DELETE", f"/reservations/{quoted(name)}")
        del self._booked[name]

    def _look(self) -> None:
        scope = "model_name=default&tenant_id=default"
        paths = ["/loads", f"/loads?{scope}", "/loads?tenant_id=none", "/workers", "/health"]
        more = [f"/workers?{scope}", "/workers?model_name=", "/ready", "/replica_sync/peers"]
        self._both("GET", self._rng.choice(paths + more))

    def _project(self) -> None:
        path = self._rng.choice(["/potential_loads", "/overlap_scores"])
        more = self._override() if self._rng.random() < 0.3 else {}
        self._both("POST", path, {**self._prompt(), **more})

    def _err(self) -> None:
        self._both(*self._rng.choice(BAD))

    # -- events ------------------------------------------------------------------------------------

    def _publish(self) -> None:
        worker_id = self._rng.choice(self._engines)
        held = self._stored[worker_id]
        draw = self._rng.random()
        if held and draw < 0.1:
            self._clear(worker_id)
        elif held and draw < 0.35:
            self._evict(worker_id)
        else:
            self._store(worker_id)

    def _store(self, worker_id: int) -> None:
        """An engine stores the beginning of a prompt."""
        number = self._rng.randrange(len(self._chains))
        blocks = self._rng.randrange(1, 11)
        held = self._stored[worker_id]
        held[number] = max(held.get(number, 0), blocks)
        hashes = self._engine_hashes(number, blocks)
        self._copies[worker_id].update(hashes)
        self._tell_of(worker_id, "stored", number, hashes, blocks, blocks)

    def _evict(self, worker_id: int) -> None:
        """It drops the end of one, and whatever hangs below that, as engines do: of what loses only
        its beginning theirs forgets the rest (D16). With each block go its copies, which theirs
        does not count."""
        held = self._stored[worker_id]
        number = self._rng.choice(list(held))
        left = self._rng.randrange(held[number])
        first = self._engine_hashes(number, held[number])[left]
        lost: dict[int, None] = {}
        for other, blocks in list(held.items()):
            hashes = self._engine_hashes(other, blocks)
            if first in hashes:
                lost |= dict.fromkeys(reversed(hashes[left:]))
                held[other] = left
                if not left:
                    del held[other]
        copies = self._copies[worker_id]
        further = [name for name in lost for _ in range(copies.pop(name) - 1)]
        self._tell_of(worker_id, "removed", number, [*lost, *further], left + 1, left)

    def _clear(self, worker_id: int) -> None:
        self._stored[worker_id] = {}
        self._copies[worker_id].clear()
        self._tell_of(worker_id, "cleared", 0, [], 1, 0)

    def _tell_of(
        self, worker_id: int, event: str, number: int, hashes: list[int], end: int, left: int
    ) -> None:
        self._tell(worker_id, event, hashes, self._chains[number][: end * BLOCK_SIZE], left)

    def _engine_hashes(self, number: int, blocks: int) -> list[int]:
        chain = self._chains[number]
        return [self._name(chain[: (at + 1) * BLOCK_SIZE]) for at in range(blocks)]


OURS = [sys.executable, "-m", "lean_selector", "--log-level", "error"]
OPERATIONS = 500


@pytest.mark.parametrize(
    ("seed", "events", "threshold"), [(1, True, "16.0"), (2, False, "inf"), (3, True, "inf")]
)
def test_random_operations_are_answered_as_1_3_1_answers_them(
    reference_131: Path, rounds: Rounds, seed: int, events: bool, threshold: str
) -> None:
    opened = functools.partial(
        side_by_side,
        [str(reference_131), "-m", "dynamo.select_service"],
        OURS,
        # Ours queues when it is told to (D1), theirs always.
        {"DYN_USE_KV_EVENTS": str(events).lower(), "DYN_ROUTER_QUEUE_THRESHOLD": threshold},
        *("--threads", "1"),  # with more theirs counts blocks twice (docs/spec/indexer.md)
        engines=ENGINES if events else (),
        amend=amended,
    )
    for each in rounds(seed):

        def run(pair: SideBySide, each: int = each) -> None:
            Play(each, pair, has_events=events).run(OPERATIONS)

        assert play(each, opened, run) > OPERATIONS
