"""What is injected, and whether it was felt and healed: one after the other, by a seed.

Each fault is done to real processes and sockets, waits until the measured process shows that it met
it, takes it back, and waits until that shows too. What cannot be done here is skipped.
"""

import asyncio
import contextlib
import http.client
import os
import resource
import signal
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime
from random import Random
from typing import Any

import msgspec

from lean_selector.tools.service_process import ServiceError
from loadtest.child_service import JSON
from loadtest.soaking.fleet import MODEL, TOTAL_BLOCKS, Engine, Fleet, Preload, Service, stopped

HEAL_S = 90.0  # generous: a pause before an attempt to connect is 5 s at most
POLL_S = 0.05
PAUSE_S = 2.0  # between two faults
SPARE_DESCRIPTORS = 8
IDLE_CONNECTIONS = 64
PASSING_WORKER = 1_100
HANGING_WORKERS = (1_101, 1_102)
ROUTED = 10  # requests, while one of them hangs
_TOKENIZED = b'HTTP/1.1 200 OK\r\ncontent-length: 28\r\n\r\n{"count":3,"tokens":[1,2,3]}'


class NotFelt(Exception):
    """What should have shown did not. A readable line."""


class Injected(msgspec.Struct):
    """One kind of fault: how often it was done, what went otherwise than it should."""

    name: str
    done: int = 0
    failed: list[str] = []
    skipped: str = ""


async def until(condition: Callable[[], bool], what: str) -> None:
    """Polls an observable. Raises NotFelt; what cannot be asked just now is asked again."""
    deadline = time.monotonic() + HEAL_S
    while True:
        with contextlib.suppress(ServiceError, OSError, http.client.HTTPException, StopIteration):
            if condition():
                return
        if time.monotonic() > deadline:
            raise NotFelt(f"{what}: not within {HEAL_S:.0f} s")
        await asyncio.sleep(POLL_S)


class Faults:
    """All kinds, on one fleet. Where `preload` could not be had, it is the reason."""

    def __init__(self, fleet: Fleet, preload: Preload | str, seed: int) -> None:
        self.stops: list[tuple[float, float]] = []  # when the measured process itself stood still
        self.times: list[tuple[str, float, float]] = []  # what was injected, from when to when
        self.rest = asyncio.Lock()  # whoever holds it sees the process without a fault
        self._fleet, self._preload = fleet, preload
        self._drawn = Random(f"faults/{seed}")
        kinds: dict[str, Callable[[], Awaitable[None]]] = {
            # First those whose traces last longest: copies outlive a reservation's expiry.
            "second selector killed": self._kill_second,
            "slot tracker killed": self._kill_tracker,
            "second selector stopped": self._stop_second,
            "engine killed": self._kill_engine,
            "engine stopped": self._stop_engine,
            "descriptors exhausted": self._exhaust_descriptors,
            "all workers busy": self._overload,
            "ejected worker hangs": self._hang_ejected,
            "measured process stopped": self._stop_measured,
            "wall clock stepped": self._step_clock,
            "DNS hangs": self._hang_names,
            "disk full": self._fill_disk,
        }
        self._kinds = kinds
        self.injected = {name: Injected(name) for name in kinds}
        for name in ("wall clock stepped", "DNS hangs"):
            if isinstance(preload, str):
                self.injected[name].skipped = preload

    async def run(self, enough: Callable[[], bool], only: list[str]) -> None:
        """All kinds (of `only`, if it names any) in order, then shuffled, again and again until it
        is enough; each at least once. Raises ServiceError when the measured process ended."""
        order = [name for name in self._kinds if not only or name in only]
        while True:
            for name in order:
                injected = self.injected[name]
                if injected.skipped:
                    continue
                async with self.rest:
                    began = time.monotonic()
                    try:
                        await self._kinds[name]()
                    except (NotFelt, ServiceError, OSError, http.client.HTTPException) as error:
                        injected.failed.append(f"{type(error).__name__}: {error}")
                injected.done += 1
                self.times.append((name, began, time.monotonic()))
                self._fleet.measured.check()
                await asyncio.sleep(PAUSE_S)
                found = [self.injected[each] for each in order]
                if enough() and all(each.done or each.skipped for each in found):
                    return
            self._drawn.shuffle(order)

    # -- peers -------------------------------------------------------------------------------------

    async def _kill_second(self) -> None:
        await self._killed(self._fleet.second, 1)
        self._fleet.register_with_second()

    async def _kill_tracker(self) -> None:
        await self._killed(self._fleet.tracker, 2)
        self._fleet.register_with_tracker()

    async def _killed(self, peer: Service, at: int) -> None:
        endpoint = f"tcp://127.0.0.1:{self._fleet.sync_ports[at]}"

        def state() -> str:
            peers = self._fleet.measured.call("GET", "/replica_sync/peers?detail=true")["peers"]
            return str(next(each["state"] for each in peers if each["endpoint"] == endpoint))

        peer.stop()
        await until(lambda: state() != "connected", "a killed peer is missed")
        await asyncio.sleep(self._drawn.uniform(0.0, 2.0))
        await asyncio.to_thread(peer.start)
        await until(lambda: state() == "connected", "it is connected to again")

    async def _stop_second(self) -> None:
        second, measured = self._fleet.second, self._fleet.measured
        path = "/replica_sync/peers?detail=true"
        its_id = second.call("GET", path)["router_id"]

        def heard_s() -> float:
            heard = measured.call("GET", path)["publishers"]
            return float(next(each["heard_s"] for each in heard if each["router_id"] == its_id))

        await until(lambda: heard_s() < 1.5, "it is heard once a second")
        with stopped(second.pid):
            await until(lambda: heard_s() > 2.0, "it is not heard")
            await asyncio.sleep(self._drawn.uniform(0.0, 2.0))
        await until(lambda: heard_s() < 1.5, "it is heard again")

    # -- engines -----------------------------------------------------------------------------------

    def _source(self, engine: Engine) -> dict[str, Any]:
        rows = self._fleet.measured.call("GET", "/kv_sources")
        return next(row for row in rows if row["worker_id"] == engine.worker_id)

    def _is_connected(self, engine: Engine) -> bool:
        return bool(self._source(engine)["connection"] == "connected")

    async def _kill_engine(self) -> None:
        engine = self._drawn.choice(self._fleet.engines)
        before = self._source(engine)["restarts"]
        engine.kill()
        await until(lambda: not self._is_connected(engine), "a killed engine is missed")
        await asyncio.sleep(self._drawn.uniform(0.0, 2.0))
        engine.start()
        await until(lambda: self._source(engine)["restarts"] > before, "its restart is seen")
        await until(lambda: self._source(engine)["state"] == "live", "it is heard again")

    async def _stop_engine(self) -> None:
        engine = self._drawn.choice(self._fleet.engines)
        with stopped(engine.process.pid):
            await until(lambda: self._source(engine)["last_message_age_s"] > 1.0, "it is silent")
            await asyncio.sleep(self._drawn.uniform(0.0, 2.0))
        await until(lambda: self._source(engine)["last_message_age_s"] < 1.0, "it is heard again")

    # -- the measured process and what it stands on ------------------------------------------------

    async def _exhaust_descriptors(self) -> None:
        measured = self._fleet.measured
        name = "lean_selector_http_accept_failures_total"
        before = measured.metric(name)
        limits = resource.prlimit(measured.pid, resource.RLIMIT_NOFILE)
        used = measured.descriptors()
        resource.prlimit(
            measured.pid, resource.RLIMIT_NOFILE, (used + SPARE_DESCRIPTORS, limits[1])
        )
        with contextlib.ExitStack() as stack:
            stack.callback(resource.prlimit, measured.pid, resource.RLIMIT_NOFILE, limits)
            for _ in range(IDLE_CONNECTIONS):
                idle = stack.enter_context(socket.socket())
                idle.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    idle.connect(("127.0.0.1", measured.port))
            await until(
                lambda: measured.metric(name) > before, "it has no descriptor to accept with"
            )
            await asyncio.sleep(self._drawn.uniform(0.5, 2.0))

    async def _stop_measured(self) -> None:
        """An injected stall: the probe must see it."""
        began = time.monotonic()
        with stopped(self._fleet.measured.pid):
            await asyncio.sleep(self._drawn.uniform(0.2, 0.6))
        self.stops.append((began, time.monotonic()))

    async def _overload(self) -> None:
        """Until selections are refused; those who behave are answered 503 meanwhile."""
        measured = self._fleet.measured
        ids = [f"hog-{engine.worker_id}" for engine in self._fleet.engines]
        try:
            for name, engine in zip(ids, self._fleet.engines, strict=True):
                measured.call("POST", "/reservations", _hogging(name, engine.worker_id))
            body = msgspec.json.encode({"model_name": MODEL, "token_ids": [1]})

            def refuses() -> bool:
                return measured.request("POST", "/select", body, JSON)[0] == 503

            await until(refuses, "it refuses work while all workers are busy")
        finally:
            for name in ids:
                measured.request("DELETE", f"/reservations/{name}")
        await until(lambda: not refuses(), "it takes work again")

    async def _hang_ejected(self) -> None:
        """Two engines that tokenize, of which one failed and hangs: the other alone is asked."""
        measured, asked = self._fleet.measured, Counter[int]()

        async def tokenize(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            port = writer.get_extra_info("sockname")[1]
            with contextlib.suppress(OSError), contextlib.closing(writer):
                while await reader.read(1 << 16):
                    asked[port] += 1
                    if port != ports[0]:
                        writer.write(_TOKENIZED)

        async with contextlib.AsyncExitStack() as stack:
            servers = [await asyncio.start_server(tokenize, "127.0.0.1", 0) for _ in range(2)]
            ports = [each.sockets[0].getsockname()[1] for each in servers]
            for server, port, worker_id in zip(servers, ports, HANGING_WORKERS, strict=True):
                stack.callback(server.close)
                worker = {"worker_id": worker_id, "model_name": "hangs", "block_size": 16}
                worker |= {"kv_events_endpoint": "tcp://127.0.0.1:1"}
                worker |= {"endpoint": f"http://127.0.0.1:{port}"}
                measured.call("POST", "/workers", worker)
                stack.callback(measured.request, "DELETE", f"/workers/{worker_id}")
            report = f"/workers/{HANGING_WORKERS[0]}/report"
            for _ in range(3):
                measured.call("POST", report, {"outcome": "failed"})
            await until(lambda: "ejected" in measured.call("GET", "/ready"), "it is ejected")
            for _ in range(ROUTED):
                prompt = self._drawn.randbytes(4_000).hex()
                body = msgspec.json.encode({"model": "hangs", "prompt": prompt})
                path = "/route/v1/completions"
                if (await asyncio.to_thread(measured.request, "POST", path, body, JSON))[0] != 200:
                    raise NotFelt("a request is not routed")
            if [asked[port] for port in ports] != [0, ROUTED]:
                raise NotFelt(f"questions by port: {asked}, of which {ports[0]} hangs")

    async def _step_clock(self) -> None:
        assert isinstance(self._preload, Preload)
        step = self._drawn.choice((-86_400, -3_600, -60, 60, 3_600, 86_400))
        self._preload.step_clock(step)
        try:
            await until(lambda: abs(self._ahead_s() - step) < 30.0, "its clock has stepped")
            await asyncio.sleep(self._drawn.uniform(0.5, 3.0))
        finally:
            self._preload.step_clock(0)
        await until(lambda: abs(self._ahead_s()) < 30.0, "its clock has stepped back")

    def _ahead_s(self) -> float:
        connection = http.client.HTTPConnection("127.0.0.1", self._fleet.measured.port, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", "/health")
            told = connection.getresponse().getheader("date")
        return 0.0 if told is None else parsedate_to_datetime(told).timestamp() - time.time()

    async def _hang_names(self) -> None:
        """An engine dies and comes back while nobody answers for its name."""
        assert isinstance(self._preload, Preload)
        preload, engine = self._preload, self._drawn.choice(self._fleet.engines)
        before = preload.hung
        preload.hang_names(True)
        try:
            engine.kill()
            await until(lambda: preload.hung > before, "it asks for the name")
            engine.start()
            await asyncio.sleep(self._drawn.uniform(1.0, 4.0))
        finally:
            preload.hang_names(False)
        await until(lambda: self._is_connected(engine), "it connects once names are answered")
        await until(lambda: self._source(engine)["state"] == "live", "it hears the engine again")

    async def _fill_disk(self) -> None:
        """No file of its may grow, so that its state cannot be written, while the catalog changes;
        it cannot log meanwhile either."""
        measured = self._fleet.measured
        worker = {"worker_id": PASSING_WORKER, "model_name": "come-and-go", "block_size": 16}

        def is_faulty() -> bool:
            worker["endpoint"] = f"http://127.0.0.1:9/{time.monotonic_ns()}"
            measured.request("POST", "/workers", msgspec.json.encode(worker), JSON)
            return "state_fault" in measured.call("GET", "/ready")

        limits = resource.prlimit(measured.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(measured.pid, resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            await until(is_faulty, "it says that its state cannot be written")
            await asyncio.sleep(self._drawn.uniform(0.5, 2.0))
        finally:
            resource.prlimit(measured.pid, resource.RLIMIT_FSIZE, limits)
        await until(lambda: not is_faulty(), "it writes its state again")
        measured.call("DELETE", f"/workers/{PASSING_WORKER}")

    async def settle(self) -> None:
        """All that was done is taken back: every engine is heard."""
        for engine in self._fleet.engines:
            await until(lambda: self._is_connected(engine), "every engine is heard at the end")  # noqa: B023 - asked before the next


def _hogging(name: str, worker_id: int) -> dict[str, object]:
    first = worker_id * 1_000_000
    return {
        "reservation_id": name,
        "model_name": MODEL,
        "worker_id": worker_id,
        "dp_rank": 0,
        "isl_tokens": 16,
        "effective_prefill_tokens": 1,
        "sequence_hashes": list(range(first, first + TOTAL_BLOCKS)),
    }


def continue_all(fleet: Fleet) -> None:
    """Whatever was stopped goes on, so that it can end."""
    pids = [fleet.second.pid, fleet.measured.pid, *(each.process.pid for each in fleet.engines)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
