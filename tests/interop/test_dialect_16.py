"""The 1.6 dialect held against the real 1.6.1: random operations on both, side by side.

Run by itself for longer, with fresh seeds: `pytest tests/interop/test_dialect_16.py --long`.
"""

import functools
import random
import sys
from pathlib import Path

import pytest

from tests.conftest import Rounds
from tests.support.random_play import RandomPlay, quoted
from tests.support.side_by_side import BLOCK_SIZE, SideBySide, engine, play, side_by_side

pytestmark = pytest.mark.reference

IDS = [f"s{number}" for number in range(12)] + ["", "a/b", "ä"]
SESSIONS = ["", "one", "two", "three", "ä" * 128, "x" * 257]
# Of each worker what may change, and its ranks. The first of each group is never removed, because a
# partition without workers is another thing here (D3).
GROUPS: dict[str, list[int]] = {"default": [1, 2, 3], "g": [11, 12]}
RANKS = {1: 1, 2: 1, 3: 3, 11: 1, 12: 2}
ENGINES = (1, 2)  # the workers that publish, where there are events


class Play(RandomPlay):
    weights = {
        **{"select": 22, "select_and_reserve": 22, "replay": 14, "reserve": 12, "lifecycle": 16},
        **{"look": 6, "project": 4, "change_worker": 3, "remove_worker": 2, "err": 4},
    }
    event_weights = {"store": 4}

    def __init__(self, seed: int, pair: SideBySide, *, has_events: bool) -> None:
        super().__init__(seed, pair, ENGINES if has_events else ())
        self._size = dict(RANKS)
        self._booked: dict[str, tuple[str, int, int]] = {}  # id -> group, worker, rank
        self._ids = list(IDS)
        self._chains = [self._chain() for _ in range(5)]

    def _begin(self) -> None:
        for group in GROUPS:
            for worker_id in GROUPS[group]:
                self._register(group, worker_id)

    # -- workers -----------------------------------------------------------------------------------

    def _register(self, group: str, worker_id: int, **more: object) -> None:
        size = self._size[worker_id]
        body: dict[str, object] = {
            "worker_id": worker_id,
            "routing_group": group,
            "endpoint": f"http://w{worker_id}",
            "block_size": BLOCK_SIZE,
            "data_parallel_size": size,
            **more,
        }
        if worker_id in self._engines:
            body["kv_events_endpoint"] = engine(worker_id)
            body["router_hint_worker_type"] = "decode"
            if worker_id == 1:  # one alone, for of several equals either may be named
                body["router_hint_source_control_endpoints"] = {"0": "tcp://w1:5600"}
        elif self._has_events:
            nobody = "tcp://127.0.0.1:9"
            body["kv_events_endpoints"] = {str(rank): nobody for rank in range(8)}
        self._both("POST", "/workers", body)

    def _change_worker(self) -> None:
        group = self._rng.choice(list(GROUPS))
        worker_id = self._rng.choice(GROUPS[group])
        changes: list[dict[str, object]] = [
            # More than all prompts have: beyond it is forgotten here (D40).
            {"total_kv_blocks": self._rng.choice([1000, 2000, 4000])},
            {"max_num_batched_tokens": self._rng.choice([0, 50, 1000])},
            {"taints": self._rng.sample(["a", "b", "c"], self._rng.randrange(4))},
            {"endpoint": f"http://w{worker_id}/{self._rng.randrange(9)}"},
            {"kv_event_source_mode": "framework_v1", "stable_routing_id": "x"},
            {"data_parallel_size": 4097},
            {},
        ]
        self._both("PATCH", f"/workers/{worker_id}", self._rng.choice(changes))
        # What was believed of ranks that are cut off is still listed there (D40).
        if self._has_events and RANKS[worker_id] > 1 and self._rng.random() < 0.5:
            before, after = self._size[worker_id], self._rng.randrange(1, RANKS[worker_id] + 1)
            self._size[worker_id] = after
            self._both("PATCH", f"/workers/{worker_id}", {"data_parallel_size": after})
            self._lost(worker_id, set(range(after, before)))
        self._settle()

    def _remove_worker(self) -> None:
        group = self._rng.choice(list(GROUPS))
        worker_id = self._rng.choice(GROUPS[group][1:])
        self._both("DELETE", f"/workers/{worker_id}")
        self._both("DELETE", f"/workers/{worker_id}")
        self._both("PATCH", f"/workers/{worker_id}", {})
        sizes, self._size[worker_id] = dict(self._size), 0
        self._settle()
        self._lost(worker_id, set(range(8)))
        for _ in range(self._rng.randrange(3)):
            self._replay()
            self._select()
        self._size[worker_id] = sizes[worker_id]
        self._register(group, worker_id)
        self._settle()
        if worker_id in self._engines:
            self._hear(worker_id)

    def _lost(self, worker_id: int, ranks: set[int]) -> None:
        """Ids that went with a rank are taken there until somebody asks for them; here they are
        free at once (D3)."""
        self._settle()
        for selection_id, (_, worker, rank) in list(self._booked.items()):
            if worker == worker_id and rank in ranks:
                del self._booked[selection_id]
                if selection_id:
                    self._both("DELETE", f"/reservations/{quoted(selection_id)}")
                else:  # nobody can ask for it
                    self._ids.remove(selection_id)

    # -- prompts -----------------------------------------------------------------------------------

    def _chain(self) -> list[int]:
        return [self._rng.randrange(1000) for _ in range(44)]

    def _prompt(self) -> dict[str, object]:
        chain = self._rng.randrange(len(self._chains))
        tokens = self._chains[chain][: self._rng.randrange(44)]
        prompt: dict[str, object]
        if self._rng.random() < 0.7:
            prompt = {"token_ids": tokens}
            if self._rng.random() < 0.1:
                prompt["lora_name"] = "l"
            if self._rng.random() < 0.1:
                prompt["cache_salt"] = "s"
            return prompt
        hashes = [chain * 100 + position + 1 for position in range(len(tokens) // BLOCK_SIZE)]
        isl = max(1, len(tokens) + self._rng.randrange(-3, 4))
        return {
            "block_hashes": hashes,
            "sequence_hashes": [-each for each in hashes],
            "isl_tokens": isl,
        }

    def _scope(self) -> dict[str, object]:
        return {"routing_group": self._group()}

    def _group(self) -> str:
        return "g" if self._rng.random() < 0.3 else "default"

    def _choice(self, group: str) -> dict[str, object]:
        """The body of a select, without its id."""
        draw = self._rng.random
        workers = [1, 2, 3, 11, 12, 99]
        body = {"routing_group": group, **self._prompt(), **self._narrowed(workers, 0.15, [0.5])}
        if draw() < 0.15:
            body["router_config_override"] = {"track_prefill_tokens": draw() < 0.3}
        if draw() < 0.1:
            body["expected_output_tokens"] = self._rng.randrange(100)
        if draw() < 0.35:
            body["session_id"] = self._rng.choice(SESSIONS)
        if draw() < 0.05:
            body["session_context"] = {
                "session_id": self._rng.choice(SESSIONS),
                "parent_session_id": "one",
                "session_final": True,
                "input_trigger": "tool_result",
                "agent_headers": {"h": ["v"]},
            }
        if draw() < 0.1:
            body["affinity_target"] = {
                "worker_id": self._rng.choice(workers),
                **({"dp_rank": self._rng.randrange(3)} if draw() < 0.5 else {}),
            }
        return body

    # -- operations --------------------------------------------------------------------------------

    def _select(self) -> None:
        group = self._group()
        body = self._pinned(self._choice(group))
        if self._rng.random() < 0.25:
            body["advisory"] = True
        if self._rng.random() < 0.7:
            body["selection_id"] = self._rng.choice(self._ids)
        self._both("POST", "/select", body)

    def _select_and_reserve(self) -> None:
        group = self._group()
        selection_id, answer = self._booked_as("selection_id", self._ids, self._choice(group))
        if answer is not None:
            self._booked[selection_id] = (group, answer["worker_id"], answer["dp_rank"])
            # What was selected under the id before is dropped here (D43), and there with the next
            # attempt to book a worker under it.
            again = {"selection_id": selection_id, "routing_group": group, "token_ids": []}
            self._both("POST", "/reservations", {**again, "worker_id": GROUPS[group][0]})

    def _replay(self) -> None:
        group = self._group()
        selection_id = self._rng.choice(self._ids)
        body = {"selection_id": selection_id, "routing_group": group, "dp_rank": 7}
        status, answer = self._both("POST", "/reservations", body)
        if status == 201:
            self._booked[selection_id] = (group, answer["worker_id"], answer["dp_rank"])

    def _reserve(self) -> None:
        group = self._group()
        selection_id = self._rng.choice(self._ids)
        body: dict[str, object] = {
            "selection_id": selection_id,
            "routing_group": group,
            "worker_id": self._rng.choice([1, 2, 3, 11, 12]),
            "dp_rank": self._rng.choice([None, 0, 1, 2]),
            **self._prompt(),
        }
        if self._rng.random() < 0.6:
            body["effective_prefill_tokens"] = self._rng.randrange(20)
        if self._rng.random() < 0.4:
            body["track_prefill_tokens"] = self._rng.choice([True, False, None])
        if self._rng.random() < 0.2:
            body["router_config_override"] = {"track_prefill_tokens": False}
        status, answer = self._both("POST", "/reservations", body)
        if status == 201:
            self._booked[selection_id] = (group, answer["worker_id"], answer["dp_rank"])

    def _lifecycle(self) -> None:
        named = [each for each in IDS if each]
        held = [each for each in self._booked if each]
        selection_id = self._rng.choice(held if held and self._rng.random() < 0.8 else named)
        path = f"/reservations/{quoted(selection_id)}"
        draw = self._rng.random()
        if draw < 0.35:
            self._both("POST", f"{path}/prefill_complete")
        elif draw < 0.6:
            fraction = self._rng.choice([None, 0.0, 0.25, 0.5, 1.0, 1.5])
            self._both("POST", f"{path}/output_block", {"decay_fraction": fraction})
        else:
            self._both("DELETE", path)
            self._booked.pop(selection_id, None)

    def _look(self) -> None:
        group = self._group()
        paths = ["/loads", f"/loads?routing_group={group}", "/workers", "/ready", "/health"]
        self._both("GET", self._rng.choice([*paths, f"/workers?routing_group={group}"]))

    def _project(self) -> None:
        path = self._rng.choice(["/potential_loads", "/overlap_scores"])
        self._both("POST", path, {**self._scope(), **self._prompt()})

    def _err(self) -> None:
        bad: list[tuple[str, dict[str, object]]] = [
            ("/select", {"token_ids": "x"}),
            ("/select", {"advisory": None, "token_ids": [1]}),
            ("/select", {"routing_group": None, "token_ids": [1]}),
            ("/select", {"routing_group": "nowhere", "token_ids": [1]}),
            ("/select", {"block_hashes": [1]}),
            ("/select", {"block_hashes": [1], "sequence_hashes": [1, 2], "isl_tokens": 4}),
            ("/select", {"block_hashes": [1], "sequence_hashes": [1], "isl_tokens": 0}),
            ("/select_and_reserve", {"selection_id": 5, "token_ids": [1]}),
            ("/select_and_reserve", {"selection_id": "s0"}),
            ("/reservations", {"worker_id": 1, "token_ids": [1]}),
            ("/reservations", {"selection_id": "s1", "worker_id": -1}),
            ("/reservations", {"selection_id": "s1", "routing_group": "nowhere"}),
            ("/workers", {"worker_id": 2**64}),
            ("/workers", {"worker_id": 77, "data_parallel_size": 5000}),
            ("/overlap_scores", {"router_config_override": {"router_temperature": -1.0}}),
            ("/potential_loads", {"token_ids": [1], "cache_salt": 5}),
        ]
        path, body = self._rng.choice(bad)
        self._both("POST", path, body)

    # -- events ------------------------------------------------------------------------------------

    def _store(self) -> None:
        """An engine stores the beginning of a prompt."""
        worker_id = self._rng.choice(self._engines)
        chain = self._rng.randrange(len(self._chains))
        blocks = self._rng.randrange(1, 11)
        hashes = [1000 * (chain + 1) + position for position in range(blocks)]
        tokens = self._chains[chain][: blocks * BLOCK_SIZE]
        self._tell(worker_id, "stored", hashes, tokens, blocks)


OURS = [sys.executable, "-m", "lean_selector", "--log-level", "error", "--api", "1.6"]
FLAGS = {
    "few selections": ["--selection-cache-max-entries", "7", "--selection-cache-max-bytes", "700"],
    "plenty": [],
}
OPERATIONS = 500
BUSY = {
    "DYN_ROUTER_CONDITIONAL_DISAGG_DECODE_BUSY_THRESHOLD": "0.01",
    "DYN_ROUTER_CONDITIONAL_DISAGG_PREFILL_BUSY_THRESHOLD": "0.5",
}
# The temperature stays 0: each service draws for itself. The credit stays above 0: at 0 1.6.1 costs
# a prompt that says fewer tokens than are cached of it by those tokens, and ours by what is cached.
ROUTER = {
    "DYN_ROUTER_TRACK_PREFILL_TOKENS": ["true", "false"],
    "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT": ["1.0", "0.3", "0.6", "1.7"],
    "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY": ["0.0", "0.3", "2.0"],
    "DYN_ROUTER_PREFILL_LOAD_SCALE": ["1.0", "0.0", "0.7", "3.0"],
    "DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT": ["0.0", "1.5", "0.1"],
    "DYN_ROUTER_HOST_CACHE_HIT_WEIGHT": ["0.75", "0.0", "1.0"],
    "DYN_ROUTER_DISK_CACHE_HIT_WEIGHT": ["0.25", "0.1", "1.0"],
}


def router_of(seed: int) -> dict[str, str]:
    """What a seed's routers weigh, and how; each setting is the default or left out at times."""
    draws = random.Random(seed)
    drawn = {name: draws.choice(values) for name, values in ROUTER.items()}
    return {name: value for name, value in drawn.items() if draws.random() < 0.8}


@pytest.mark.parametrize(
    ("seed", "events", "limits"),
    [
        (1, True, "plenty"),
        (2, False, "few selections"),
        (3, True, "few selections"),
        (5, False, "plenty"),  # prefill is not tracked
        (11, True, "plenty"),  # nor is it here
    ],
)
def test_random_operations_are_answered_as_1_6_1_answers_them(
    reference_161: Path, rounds: Rounds, seed: int, events: bool, limits: str
) -> None:
    for each in rounds(seed):
        opened = functools.partial(
            side_by_side,
            [str(reference_161), "-m", "dynamo.select_service"],
            OURS,
            {"DYN_USE_KV_EVENTS": str(events).lower(), **BUSY, **router_of(each)},
            *FLAGS[limits],
            *("--session-affinity-ttl-secs", "3600"),
            engines=ENGINES if events else (),
        )

        def run(pair: SideBySide, each: int = each) -> None:
            Play(each, pair, has_events=events).run(OPERATIONS)

        assert play(each, opened, run) > OPERATIONS
