"""A selector with a state directory, killed again and again while it is changed and booked on.

    python -m loadtest.kill_points [--points N] [--seed N] [--interval S]

Each time it is killed (SIGKILL) after a random while, and started again. Then its catalog must be
what was answered, give or take the one change that was under way; what is live must be what was
live at some moment before, for half of the kills no more than an interval before; and nothing is
older than expiry allows. Ends with a table, and with status 1 where something was not so.
"""

import argparse
import contextlib
import http.client
import json
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lean_selector.server.state_files import opened
from tests.running_service import DEADLINE_S, RunningService, free_port

BOOKERS = 3
WORKER_IDS = range(1, 7)
STEADY = {98: "m", 99: "steady"}  # workers that stay: one has a threshold, one is booked on
EXPIRY_S = 6.0
# Beside the interval: for a snapshot that was under way, on a machine that does other things.
SLACK_S = 3.0
# A file says to the millisecond when it was written, and an answer may come within one.
ROUNDED_S = 0.001
_ENDED = OSError, http.client.HTTPException


class Call:
    """One answered call, or one that was under way at the end: `after` is infinite then."""

    def __init__(self) -> None:
        self.before = time.time()
        self.after = float("inf")

    def is_answered(self) -> bool:
        return self.after != float("inf")


class Life:
    """Of one reservation."""

    def __init__(self, booked: Call) -> None:
        self.booked = booked
        self.freed: Call | None = None

    def may_be_live(self, since: float, until: float) -> bool:
        """At some moment between the two."""
        is_over = self.freed is not None and self.freed.after < since
        return self.booked.before <= until and not is_over

    def must_be_live(self, since: float, until: float) -> bool:
        """All the time between the two."""
        is_under_way = self.freed is not None and self.freed.before <= until
        return self.booked.after < since and not is_under_way


class Client(threading.Thread):
    """Calls one after another on one connection, until the service is gone."""

    def __init__(self, port: int, rng: random.Random) -> None:
        super().__init__(daemon=True)
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        self._rng = rng
        self.error: BaseException | None = None
        self.calls = 0

    def run(self) -> None:
        try:
            with contextlib.suppress(*_ENDED), contextlib.closing(self._connection):
                while True:
                    self.step()
        except BaseException as error:
            self.error = error

    def step(self) -> None:
        raise NotImplementedError

    def ask(self, method: str, path: str, body: object, *expected: int) -> int:
        text = None if body is None else json.dumps(body)
        self._connection.request(method, path, text, {"content-type": "application/json"})
        response = self._connection.getresponse()
        answer = response.read()
        assert response.status in expected, (method, path, response.status, answer)
        self.calls += 1
        return response.status


class Registrar(Client):
    """Changes workers and a threshold. `known` is what was answered, `under_way` what it would be
    with the call that was not."""

    def __init__(self, port: int, rng: random.Random, known: dict[str, Any]) -> None:
        super().__init__(port, rng)
        self.known = known
        self.under_way = known

    def step(self) -> None:
        worker_id, new = self._rng.choice(WORKER_IDS), dict(self.known)
        key, number = str(worker_id), self._rng.randrange(10**6)
        kind = self._rng.random()
        if kind < 0.2:
            new["threshold"] = number
            self._change(new, "POST", "/busy_threshold", _threshold(number), 200)
        elif kind < 0.4 and key in self.known:
            del new[key]
            self._change(new, "DELETE", f"/workers/{worker_id}", None, 200)
        elif kind < 0.7 and key in self.known:
            new[key] = number
            changes = {"total_kv_blocks": number}
            self._change(new, "PATCH", f"/workers/{worker_id}", changes, 200)
        else:
            new[key] = number
            self._change(new, "POST", "/workers", _worker(worker_id, "m", number), 201)

    def _change(
        self, new: dict[str, Any], method: str, path: str, body: object, status: int
    ) -> None:
        self.under_way = new
        self.ask(method, path, body, status)
        self.known = new


def _worker(worker_id: int, model_name: str, number: int) -> dict[str, Any]:
    fields = {"worker_id": worker_id, "model_name": model_name, "total_kv_blocks": number}
    return {**fields, "endpoint": "http://w", "block_size": 16}


def _threshold(number: int) -> dict[str, Any]:
    return {"model": "m", "active_prefill_tokens_threshold": 10**9 + number}


class Booker(Client):
    """Books on a worker that nobody deletes, completes, and ends what it booked."""

    def __init__(self, port: int, rng: random.Random, name: str) -> None:
        super().__init__(port, rng)
        self._name = name
        self.lives: dict[str, Life] = {}
        self._live: list[str] = []

    def step(self) -> None:
        if self._rng.random() < 0.05:
            time.sleep(0.01 * self._rng.random())
        if self._live and self._rng.random() < 0.5:
            request_id = self._live.pop(self._rng.randrange(len(self._live)))
            call = self.lives[request_id].freed = Call()
            self.ask("DELETE", f"/reservations/{request_id}", None, 200)
        else:
            request_id = f"{self._name}-{len(self.lives)}"
            call = Call()
            self.lives[request_id] = Life(call)
            hashes = [self._rng.randrange(2**40) for _ in range(4)]
            body = {"model_name": "steady", "reservation_id": request_id, "isl_tokens": 64}
            prompt = {"block_hashes": hashes, "sequence_hashes": hashes}
            self.ask("POST", "/select_and_reserve", {**body, **prompt}, 200)
            self._live.append(request_id)
        call.after = time.time()


class Point:
    """What was found after one kill."""

    def __init__(self, calls: int, live: int, lost: int, doubled: int, lost_s: float) -> None:
        self.calls = calls
        self.live = live  # after the start
        self.lost = lost  # booked and not live any more, of those that were not ended
        self.doubled = doubled  # ended, and live again
        self.lost_s = lost_s  # what was done since the last file, or the start, before the kill


class Play:
    """`problems` is what should not be."""

    def __init__(self, path: Path, seed: int, interval_s: float, longest_s: float = 1.0) -> None:
        """A kill comes at most `longest_s` after a start."""
        self._path = path
        self._rng = random.Random(seed)
        self._interval_s = interval_s
        self._longest_s = longest_s
        self._service = RunningService(
            *("--state-dir", str(path), "--state-interval-secs", f"{interval_s:g}"),
            *("--reservation-expiry-secs", f"{EXPIRY_S:g}", "--log-level", "warning"),
            *("--replica-sync-bind", f"tcp://127.0.0.1:{free_port()}"),
            env={"DYN_USE_KV_EVENTS": "false"},
        )
        self._known: dict[str, Any] = {}
        self._lives: dict[str, Life] = {}
        self.problems: list[str] = []
        self.points: list[Point] = []

    def run(self, points: int) -> None:
        with self._service as service:
            for worker_id, model_name in STEADY.items():
                assert service.post("/workers", _worker(worker_id, model_name, 1))[0] == 201
            for number in range(points):
                registrar, bookers = self._until_killed(number)
                service.__enter__()
                self._judge(number, registrar, bookers)
            self._judge_interval()
            self._wait_for_expiry()
            assert service.stop()[0] == 0

    def _until_killed(self, number: int) -> tuple[Registrar, list[Booker]]:
        port, rng = self._service.port, self._rng
        registrar = Registrar(port, random.Random(rng.random()), self._known)
        bookers = [
            Booker(port, random.Random(rng.random()), f"{number}-{each}") for each in range(BOOKERS)
        ]
        for client in (registrar, *bookers):
            client.start()
        time.sleep(self._longest_s * rng.random())
        self._service.process.send_signal(signal.SIGKILL)
        self._killed_at = time.time()
        self._service.stop(signal.SIGKILL)
        for client in (registrar, *bookers):
            client.join(DEADLINE_S)
            assert not client.is_alive(), "a client hangs"
            if client.error is not None:
                raise client.error
        # Before the next process writes: what was there when this one ended.
        self._snapshot = self._path / "reservations"
        self._sealed = self._snapshot.read_bytes() if self._snapshot.exists() else b""
        return registrar, bookers

    # -- what must be so -------------------------------------------------------------------------

    def _judge(self, number: int, registrar: Registrar, bookers: list[Booker]) -> None:
        found = self._catalog()
        if found not in (registrar.known, registrar.under_way):
            self.problems.append(f"point {number}: {found} is neither what was answered, nor more")
        self._known = found
        mine: dict[str, Life] = {}
        for booker in bookers:
            mine.update(booker.lives)
        self._lives.update(mine)
        live, now = self._live_ids(), time.time()
        since = until = 0.0
        if self._sealed:
            since = opened(self._sealed)[1].wall_s - ROUNDED_S
            until = min(self._killed_at, since + SLACK_S)
        calls = sum(client.calls for client in (registrar, *bookers))
        first = min((life.booked.before for life in mine.values()), default=self._killed_at)
        lost_s = self._killed_at - max(since, first)
        if lost_s > self._interval_s + SLACK_S:
            self.problems.append(f"point {number}: {lost_s:.2f} s are lost")
        for request_id, life in mine.items():
            if life.must_be_live(since, until) and request_id not in live:
                self.problems.append(f"point {number}: {request_id} is lost")
            if request_id in live and not life.may_be_live(since, until):
                ended_s = since - life.freed.after if life.freed is not None else 0.0
                self.problems.append(f"point {number}: {request_id} is live, {ended_s:.4f} s after")
        for request_id in live:
            touched = self._lives[request_id].booked.after
            if now - min(touched, self._killed_at) > EXPIRY_S + SLACK_S and request_id not in mine:
                self.problems.append(f"point {number}: {request_id} has not expired")
        held = {i for i, life in mine.items() if life.freed is None and life.booked.is_answered()}
        ended = {i for i, life in mine.items() if life.freed and life.freed.is_answered()}
        self.points.append(Point(calls, len(live), len(held - live), len(ended & live), lost_s))

    def _judge_interval(self) -> None:
        """Each kill may have come while the machine did something else; not half of them."""
        lost_s = statistics.median(point.lost_s for point in self.points)
        if lost_s > self._interval_s:
            self.problems.append(f"half of the kills lost {lost_s:.3f} s or more")

    def _catalog(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for worker in self._service.get("/workers")[1]:
            if worker["worker_id"] in WORKER_IDS:
                found[str(worker["worker_id"])] = worker["total_kv_blocks"]
        for row in self._service.get("/busy_threshold")[1]["thresholds"]:
            if row["model"] == "m" and row["active_prefill_tokens_threshold"] is not None:
                found["threshold"] = row["active_prefill_tokens_threshold"] - 10**9
        return found

    def _live_ids(self) -> set[str]:
        snapshot = self._service.get("/replica_sync/snapshot")[1]
        return {each["request_id"] for each in snapshot["reservations"]}

    def _wait_for_expiry(self) -> None:
        deadline = time.monotonic() + EXPIRY_S + DEADLINE_S
        while live := self._live_ids():
            if time.monotonic() > deadline:
                self.problems.append(f"{len(live)} reservations never expire")
                return
            time.sleep(0.1)

    # -- what is said ----------------------------------------------------------------------------

    def table(self) -> str:
        def row(name: str, of: Callable[[Point], float], form: str) -> str:
            values = sorted(of(point) for point in self.points)
            return (
                f"| {name} | {sum(values):{form}} | {values[len(values) // 2]:{form}} "
                f"| {values[-1]:{form}} |"
            )

        return "\n".join(
            [
                f"{len(self.points)} kills, interval {self._interval_s:g} s",
                "",
                "| | all | median | most |",
                "|---|---|---|---|",
                row("calls answered", lambda point: point.calls, ".0f"),
                row("live after the start", lambda point: point.live, ".0f"),
                row("bookings lost", lambda point: point.lost, ".0f"),
                row("ended and live again", lambda point: point.doubled, ".0f"),
                row("seconds lost", lambda point: point.lost_s, ".3f"),
                "",
                f"problems: {len(self.problems)}",
                *self.problems[:20],
            ]
        )


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--interval", type=float, default=0.2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kill-points-") as path:
        play = Play(Path(path), given.seed, given.interval)
        play.run(given.points)
    print(play.table())
    sys.exit(1 if play.problems else 0)


if __name__ == "__main__":
    main()
