"""Locust users for both services: routers that select, book, report and free, with real prompts.

    locust -f loadtest/locustfile.py                 --host http://127.0.0.1:8092 --trace FILE
    locust -f loadtest/locustfile.py SlotTrackerUser --host http://127.0.0.1:8091 --trace FILE

Owns the fleet that it registers when the service knows no worker of its model: engines with caches
and real KV events, so that selections find overlaps. Their ids are random and high, none is taken
that the service knows, and only they are removed at the end. Prompts are a Mooncake-format trace's,
in its order and then again, or made up. Statistics are by route template.
"""

import itertools
import logging
import random
import sys
import time
import uuid
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent
import httpx
import msgspec
from locust import FastHttpUser, between, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import WorkerRunner

from lean_selector.tools.service_process import ServiceError
from lean_selector.tools.simulated_engines import EngineRequest, EngineSpeed, SimulatedEngine
from lean_selector.tools.traffic import BLOCK_SIZE, conversations
from loadtest.traces import read_trace

logging.getLogger("httpx").setLevel(logging.WARNING)  # a line per request, between the tables

TENANT = "default"
SELECTOR, SLOT_TRACKER = "selection service", "slot tracker"
MOST_OUTPUT_BLOCKS = 4  # reports of one request; the trace's requests have 21 in the mean
SETUP_TIMEOUT_S = 30.0
# Where ids of our workers are drawn from: above what people number their workers with, and below
# what a JSON reader with doubles would round.
WORKER_IDS = range(1 << 48, 1 << 53)


def requests(trace: Path | None) -> Iterator[EngineRequest]:
    """Of the trace, over and over; without one those of 64 people in turns, each in conversations
    of its own."""
    people = [conversations(0, person) for person in range(64)]
    while True:
        if trace is None:
            yield from (next(person).request for person in people)
        else:
            yield from (request for _, request in read_trace(trace, BLOCK_SIZE))


class Run:
    """What the users of one test share."""

    def __init__(self, options: Namespace) -> None:
        self.model_name: str = options.model_name
        self.worker_count: int = options.fleet
        self.capacity_blocks: int = options.capacity_blocks
        self.requests = requests(Path(options.trace) if options.trace else None)
        self.engines: dict[int, SimulatedEngine] = {}  # by id, if the fleet is ours
        self.tracked: list[int] = []  # workers that we registered at a slot tracker
        # Ids must differ between runs and between locust's own processes.
        self.ids = (f"{uuid.uuid4().hex[:12]}-{number}" for number in itertools.count())

    def prompt_fields(self, request: EngineRequest) -> dict[str, object]:
        blocks = request.prompt_blocks
        return {
            "model_name": self.model_name,
            "block_hashes": request.block_hashes[:blocks],
            "sequence_hashes": request.sequence_hashes[:blocks],
            "isl_tokens": request.isl_tokens,
        }


class RouterUser(FastHttpUser):
    """What users of both services have in common: the run, and calls that name their route."""

    abstract = True
    wait_time = between(0.0, 0.02)  # seconds; load is set by the number of users
    connection_timeout = network_timeout = 30.0
    run_: Run  # of all users, from the start of a test

    def call(self, method: str, route: str, body: object = None, reservation: str = "") -> Any:
        """The decoded answer; None, and a failure in the statistics, when it is not 2xx."""
        with self.client.request(
            method,
            route.replace("{reservation_id}", reservation),
            data=None if body is None else msgspec.json.encode(body).decode(),
            headers={} if body is None else {"content-type": "application/json"},
            name=route,
            catch_response=True,
        ) as response:
            if response.status_code is None or not 200 <= response.status_code < 300:
                response.failure(f"{response.status_code} {(response.text or '')[:200]}")
                return None
            return msgspec.json.decode(response.content)


class SelectionUser(RouterUser):
    """A router in front of the selection service."""

    host = "http://127.0.0.1:8092"

    @task(8)
    def select_and_reserve(self) -> None:
        """Choose and book in one step, then the whole life of the request."""
        request, name = next(self.run_.requests), next(self.run_.ids)
        body = {"reservation_id": name, **self.run_.prompt_fields(request)}
        chosen = self.call("POST", "/select_and_reserve", body)
        if chosen is not None:
            self._live(request, name, chosen["worker_id"])

    @task(1)
    def select(self) -> None:
        """Only ask."""
        self.call("POST", "/select", self.run_.prompt_fields(next(self.run_.requests)))

    @task(1)
    def select_then_reserve(self) -> None:
        """Choose, then book the rank that was chosen."""
        request, name = next(self.run_.requests), next(self.run_.ids)
        body = self.run_.prompt_fields(request)
        chosen = self.call("POST", "/select", body)
        if chosen is None:
            return
        chosen_fields = ("worker_id", "dp_rank", "effective_prefill_tokens")
        body |= {"reservation_id": name, **{field: chosen[field] for field in chosen_fields}}
        if self.call("POST", "/reservations", body) is not None:
            self._live(request, name, chosen["worker_id"])

    def _live(self, request: EngineRequest, name: str, worker_id: int) -> None:
        try:
            if (engine := self.run_.engines.get(worker_id)) is not None:
                engine.finish(engine.begin(request, time.monotonic()))
            self.call("POST", "/reservations/{reservation_id}/prefill_complete", None, name)
            for _ in range(min(request.output_blocks, MOST_OUTPUT_BLOCKS)):
                self.call("POST", "/reservations/{reservation_id}/output_block", {}, name)
        finally:
            self.call("DELETE", "/reservations/{reservation_id}", None, name)


class SlotTrackerUser(RouterUser):
    """A router that chooses by itself, and keeps its books in the slot tracker."""

    host = "http://127.0.0.1:8091"

    @task(4)
    def lifecycle(self) -> None:
        """Take the worker with the least work, book it, complete, free."""
        request, name = next(self.run_.requests), next(self.run_.ids)
        rows = self.call("POST", "/potential_loads", self._prompt(request))
        if not rows:
            return
        best = min(rows, key=lambda row: row["potential_prefill_tokens"])
        booking = {"request_id": name, "worker_id": best["worker_id"], "dp_rank": best["dp_rank"]}
        if self.call("POST", "/add", self._prompt(request) | booking) is None:
            return
        named = {"model_name": self.run_.model_name, "tenant_id": TENANT, "request_id": name}
        try:
            self.call("POST", "/prefill_complete", named)
        finally:
            self.call("POST", "/free", named)

    @task(1)
    def potential_loads(self) -> None:
        """Only look."""
        self.call("POST", "/potential_loads", self._prompt(next(self.run_.requests)))

    def _prompt(self, request: EngineRequest) -> dict[str, object]:
        return {
            "model_name": self.run_.model_name,
            "tenant_id": TENANT,
            "sequence_hashes": request.sequence_hashes[: request.prompt_blocks],
            "new_isl_tokens": request.isl_tokens,
        }


# -- before and after ------------------------------------------------------------------------------


def host_of(environment: Environment) -> str:
    """Where the service is: --host, or the default of the users' class."""
    return environment.host or environment.user_classes[0].host or ""


def ask(host: str, method: str, path: str, body: object = None) -> tuple[int, bytes]:
    """One call outside the statistics. Raises ServiceError when there is no answer."""
    try:
        answer = httpx.request(
            method, host + path, json=body, timeout=SETUP_TIMEOUT_S, trust_env=False
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServiceError(f"{host}: {error}") from error
    return answer.status_code, answer.content


def new_ids(count: int, known: list[dict[str, Any]]) -> Iterator[int]:
    """Random ids that no worker has, so that no registration replaces a worker of another."""
    taken = {record["worker_id"] for record in known}
    drawn = random.sample(WORKER_IDS, count + len(taken))
    return itertools.islice((id_ for id_ in drawn if id_ not in taken), count)


def register_fleet(run: Run, host: str, service: str) -> None:
    """Workers of our own, with events, unless the service has workers of the model: those serve
    then, which is said, for their books get our load."""
    status, answer = ask(host, "GET", "/workers")
    if status != 200:
        raise ServiceError(f"{host} is no {service}: GET /workers answers {status}")
    known: list[dict[str, Any]] = msgspec.json.decode(answer)
    # The reference keeps workers that were deleted, as unschedulable.
    count = sum(
        record["model_name"] == run.model_name
        and record.get("lifecycle", "schedulable") == "schedulable"
        for record in known
    )
    if count:
        print(
            f"locustfile: warning: model {run.model_name} already has {count} workers: they get "
            "this load, and are left alone; --model-name NAME gives a fleet of our own",
            file=sys.stderr,  # --json has the other
        )
        return
    for worker_id in new_ids(run.worker_count, known):
        body: dict[str, object] = {"worker_id": worker_id, "model_name": run.model_name}
        if service == SLOT_TRACKER:
            body |= {"tenant_id": TENANT, "block_size": BLOCK_SIZE, "dp_start": 0, "dp_size": 1}
            status, answer = ask(host, "POST", "/register", body)
            run.tracked.append(worker_id)
        else:
            # It computes nothing: its cache holds what it was given, its events say so. Without a
            # replay endpoint: its thread would be a greenlet here, and stop all others.
            engine = run.engines[worker_id] = SimulatedEngine(
                *(worker_id, run.capacity_blocks, BLOCK_SIZE, EngineSpeed(), None),
                replay_endpoint=None,
            )
            endpoint = f"http://engine-{worker_id}.invalid"  # named, never contacted
            body |= engine.registration()
            body |= {"endpoint": endpoint, "max_num_batched_tokens": 1_000_000}
            status, answer = ask(host, "POST", "/workers", body)
        is_ready = service == SLOT_TRACKER or b'"schedulable"' in answer
        if status not in (200, 201) or not is_ready:
            raise ServiceError(f"worker {worker_id}: {status} {answer.decode()[:300]}")


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]  # locust's
def add_options(parser: LocustArgumentParser) -> None:
    """Options of this file, shown in the web interface too."""
    parser.add_argument("--trace", env_var="LEAN_SELECTOR_TRACE", default="", help="prompts")
    parser.add_argument("--model-name", default="locust", help="keeps our workers apart")
    parser.add_argument("--fleet", type=int, default=16, help="workers to register if none are")
    parser.add_argument(
        "--capacity-blocks", type=int, default=20_000, help="of the cache of each of them"
    )


@events.init.add_listener  # type: ignore[untyped-decorator]  # locust's
def choose(environment: Environment, **_: object) -> None:
    """Without a class on the command line the users are the selector's."""
    options = environment.parsed_options
    if options is not None and not options.user_classes:
        environment.user_classes[:] = [SelectionUser]


@events.test_start.add_listener  # type: ignore[untyped-decorator]  # locust's
def begin(environment: Environment, **_: object) -> None:
    """Make what the users share; one process of a distributed test registers the workers."""
    assert environment.parsed_options is not None, "locust was started without its command line"
    assert environment.runner is not None, "a test has started"
    run = RouterUser.run_ = Run(environment.parsed_options)
    chosen = environment.user_classes
    try:
        if len(chosen) != 1:
            raise ServiceError("name one class of users: SelectionUser or SlotTrackerUser")
        if not isinstance(environment.runner, WorkerRunner):
            service = SELECTOR if chosen[0] is SelectionUser else SLOT_TRACKER
            register_fleet(run, host_of(environment), service)
    except ServiceError as error:
        print(f"locustfile: {error}")
        environment.process_exit_code = 1
        gevent.spawn(environment.runner.quit)  # once the start that we are in has ended


@events.test_stop.add_listener  # type: ignore[untyped-decorator]  # locust's
def end(environment: Environment, **_: object) -> None:
    """Take our workers away again, from a service that may live on."""
    run, host = RouterUser.run_, host_of(environment)
    for worker_id, engine in run.engines.items():
        ask(host, "DELETE", f"/workers/{worker_id}")
        engine.close()
    for worker_id in run.tracked:
        body = {"worker_id": worker_id, "model_name": run.model_name, "tenant_id": TENANT}
        ask(host, "POST", "/unregister", body)
    run.engines.clear()
    run.tracked.clear()
