"""A member of a mesh of replicas, ours or the reference's, spoken to as its kind is.

Both kinds of service and both generations of the reference take the same bodies, so that a test
can say "add" and "loads" to any of them. All have worker 7 with ranks 0 and 1.
"""

import contextlib
import itertools
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from loadtest.child_service import free_port
from tests.support.running_service import RunningService, wait_until

OURS = {"selector": "lean_selector", "tracker": "lean_selector.slot_tracker"}
THEIRS = {"selector": "dynamo.select_service", "tracker": "dynamo.slot_tracker"}
MODEL = "llama"
SCOPE = {"model_name": MODEL, "tenant_id": "t1", "routing_group": "t1"}
HASHES = [101, -22, 303]
TOKENS = 48
BOOKED = (TOKENS, len(HASHES))
IDLE = [(0, 0), (0, 0)]
# After register_pair() there is rank 2.
PAIR_IDLE = [*IDLE, (0, 0)]
PAIR_BOOKED = [(0, 0), (0, BOOKED[1]), BOOKED]
PAIR_DECODES = [(0, 0), (0, BOOKED[1]), (0, 0)]

Loads = list[tuple[int, int]]  # prefill tokens and decode blocks of each rank


class Member(RunningService):
    """One process; `python` is that of a reference, ours without. Starts on entering."""

    shares_connection = True

    def __init__(
        self,
        kind: str,
        *flags: str,
        python: Path | None = None,
        peers: Sequence[str] = (),
        sync_port: int | None = None,
        port: int | None = None,
    ) -> None:
        super().__init__(env={"DYN_LOG": "error"})
        self.kind = kind
        self.is_ours = python is None
        self.port = port or self.port
        sync_port = sync_port or free_port()
        self.endpoint = f"tcp://127.0.0.1:{sync_port}"
        module = OURS[kind] if python is None else THEIRS[kind]
        told = ["--replica-sync-peers", ",".join(peers)] if peers else []
        self.words = [
            *(str(python or sys.executable), "-m", module, "--port", str(self.port)),
            *("--replica-sync-port", str(sync_port), *told, *flags),
        ]

    def _command(self) -> list[str]:
        return self.words

    def stop(self, signal_number: int = signal.SIGTERM) -> tuple[int, str]:
        """Exit status, and what it logged."""
        # A reference may wait for its connections.
        return super().stop(signal_number if self.is_ours else signal.SIGKILL)

    def _done(self, method: str, path: str, body: object = None) -> None:
        status, answer = self.request(method, path, body)
        assert status in (200, 201), (path, status, answer)

    def register(self) -> None:
        body: dict[str, object] = {**SCOPE, "worker_id": 7, "block_size": 16}
        if self.kind == "tracker":
            self._done("POST", "/register", {**body, "dp_start": 0, "dp_size": 2})
        else:
            ranks = {"data_parallel_start_rank": 0, "data_parallel_size": 2}
            sizes = {"max_num_batched_tokens": 8192, "total_kv_blocks": 1000}
            events = {"kv_events_endpoints": {"0": "tcp://127.0.0.1:1", "1": "tcp://127.0.0.1:1"}}
            where = {"endpoint": "http://worker:8000"}
            self._done("POST", "/workers", {**body, **ranks, **sizes, **events, **where})

    def register_pair(self) -> None:
        """Worker 7 only decodes from now on, and worker 8, with rank 2, does the prefill. Trackers
        and references know no roles."""
        worker: dict[str, object] = {**SCOPE, "worker_id": 8, "block_size": 16}
        if self.kind == "tracker":
            self._done("POST", "/register", {**worker, "dp_start": 2, "dp_size": 1})
            return
        self._done("PATCH", "/workers/7", {"worker_role": "decode"})
        rank = {"data_parallel_start_rank": 2, "kv_events_endpoints": {"2": "tcp://127.0.0.1:1"}}
        sizes = {"max_num_batched_tokens": 8192, "total_kv_blocks": 1000}
        role = {"endpoint": "http://p:8000", "worker_role": "prefill"}
        self._done("POST", "/workers", {**worker, **rank, **sizes, **role})

    def book_pair(self, request_id: str) -> None:
        """The request on rank 1, its leg on rank 2: one of ours is asked, a selector."""
        prompt = {"block_hashes": HASHES, "sequence_hashes": HASHES, "isl_tokens": TOKENS}
        how = {"pinned_worker": {"worker_id": 7, "dp_rank": 1}, "disaggregate": "always"}
        body = {**SCOPE, **prompt, **how, "reservation_id": request_id}
        self._done("POST", "/select_and_reserve", body)

    def add(self, request_id: str, dp_rank: int = 0, hashes: Sequence[int] = HASHES) -> None:
        where = {**SCOPE, "worker_id": 7, "dp_rank": dp_rank, "sequence_hashes": list(hashes)}
        if self.kind == "tracker":
            body = {**where, "request_id": request_id, "new_isl_tokens": TOKENS}
            self._done("POST", "/add", body)
        else:
            tokens = {"isl_tokens": TOKENS, "effective_prefill_tokens": TOKENS}
            names = {"reservation_id": request_id, "selection_id": request_id}
            self._done("POST", "/reservations", {**where, **tokens, **names})

    def complete(self, request_id: str) -> None:
        if self.kind == "tracker":
            self._done("POST", "/prefill_complete", {**SCOPE, "request_id": request_id})
        else:
            self._done("POST", f"/reservations/{quote(request_id)}/prefill_complete", {})

    def free(self, request_id: str) -> None:
        if self.kind == "tracker":
            self._done("POST", "/free", {**SCOPE, "request_id": request_id})
        else:
            self._done("DELETE", f"/reservations/{quote(request_id)}")

    def loads(self) -> Loads:
        status, rows = self.get(f"/loads?model_name={MODEL}")
        assert status == 200
        kind = "active"
        if self.kind == "selector":
            rows, kind = rows[0]["loads"] if rows else [], "potential"
        return [
            (row[f"{kind}_prefill_tokens"], row[f"{kind}_decode_blocks"])
            for row in sorted(rows, key=lambda row: int(row["dp_rank"]))
        ]

    def shows(self, loads: Loads) -> None:
        """Waits until it does."""
        try:
            wait_until(lambda: self.loads() == loads, f"{loads}")
        except AssertionError:
            raise AssertionError(f"{self.words[2]}: {self.loads()}, not {loads}") from None

    def detail(self) -> dict[str, Any]:
        """Of one of ours: the state of its peers, and what was dropped why."""
        status, body = self.get("/replica_sync/peers?detail=true")
        assert status == 200
        assert isinstance(body, dict)
        return body

    def hears(self, other: "Member", loads: Loads = IDLE) -> None:
        """Waits until what another publishes arrives here; before and after it shows `loads`."""
        tries = itertools.count()
        self.shows(loads)

        def heard() -> bool:
            # Unlike any other, for an end without a beginning is kept, and may be on its way still.
            request_id = f"{self.port}-hears-{other.port}-{next(tries)}"
            other.add(request_id, 1)
            deadline = time.monotonic() + 0.2
            seen = False
            while not seen and time.monotonic() < deadline:
                seen = self.loads() != loads
            other.free(request_id)
            return seen

        wait_until(heard, f"{other.endpoint} is heard")
        self.shows(loads)


@contextmanager
def mesh(
    *members: tuple[str, Path | None], flags: Sequence[str] = (), everywhere: Sequence[str] = ()
) -> Iterator[list[Member]]:
    """Members (kind, python of the reference) that know all others, worker 7 registered with each.

    `flags` are those of ours, `everywhere` those that a reference is given, too.
    Who cannot hear whom is for the caller to know: nothing is waited for.
    """
    ports = [free_port() for _ in members]
    endpoints = [f"tcp://127.0.0.1:{port}" for port in ports]
    with contextlib.ExitStack() as stack:
        running = []
        for (kind, python), port, own in zip(members, ports, endpoints, strict=True):
            others = [endpoint for endpoint in endpoints if endpoint != own]
            told = (*everywhere, *(() if python else flags))
            member = Member(kind, *told, python=python, peers=others, sync_port=port)
            running.append(stack.enter_context(member))
            running[-1].register()
        yield running


def hear_each_other(members: Sequence[Member]) -> None:
    """Waits until they do."""
    for speaker, hearer in itertools.permutations(members, 2):
        hearer.hears(speaker)


def shown_everywhere(members: Iterable[Member], loads: Loads) -> None:
    for member in members:
        member.shows(loads)
