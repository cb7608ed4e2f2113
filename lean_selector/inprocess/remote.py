"""RemoteSelectionService: SelectionService as a client of a remote selector.

Uses HTTP or a UNIX socket, with fields that both API versions read. Owns the connections, and the
background requests of methods that must not wait.
"""

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeVar
from urllib.parse import urlencode
from weakref import WeakKeyDictionary

import msgspec

from lean_selector.client import calls
from lean_selector.client.calls import Call, post, post_prompt
from lean_selector.client.client_settings import Access, Cert, Timeouts, Token, Verify
from lean_selector.client.drivers import Driver, SyncDriver
from lean_selector.client.errors import (
    AlreadyExists,
    ClientClosed,
    ClientError,
    NotFound,
    ServiceRefused,
)
from lean_selector.client.reservation import Reservation
from lean_selector.client.routing import Flow, HandOver, Release, Routing, ask, book
from lean_selector.client.transport import ServiceConnection
from lean_selector.inprocess.dialect import (
    NOT_FOUND,
    Done,
    Fields,
    SelectionServiceError,
    fields_of,
    for_both,
    record,
    refusal_of,
    renamed,
    scores,
    selected_and_booked,
    selection_id_of,
    shut_down,
    worker_fields,
    worker_id_of,
)
from lean_selector.tasks import watched

T = TypeVar("T")

_read = msgspec.json.Decoder().decode
# Most output blocks queued to be sent. During a long outage further ones are lost; their load ends
# with their requests.
MAX_UNTOLD = 4096
_log = logging.getLogger("lean_selector.inprocess")


class Side:
    """One loop's connections to a service, and its background requests."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.lost = 0  # output blocks that were never sent
        self._untold: deque[tuple[str, Call[None]]] = deque()
        self._telling: asyncio.Task[None] | None = None

    def tell(self, selection_id: str, call: Call[None]) -> None:
        """Send in the background, in the order of the calls; an unknown id is not an error."""
        if len(self._untold) >= MAX_UNTOLD:
            self.lost += 1
            return
        self._untold.append((selection_id, call))
        if self._telling is None or self._telling.done():
            self._telling = watched("telling the service", self._tell())

    async def _tell(self) -> None:
        while self._untold:
            _, call = self._untold.popleft()
            try:
                await self.driver.drive(ask(call))
            except NotFound:
                pass  # it has ended meanwhile
            except ClientError as error:
                self.lost += 1
                _log.debug("an output block was not sent: %s", error)

    def forget(self, selection_id: str) -> None:
        """Send no more output blocks of a request that ends."""
        if self._untold:
            self._untold = deque(each for each in self._untold if each[0] != selection_id)

    async def close(self) -> None:
        """Wait for background requests, then close the connections."""
        if self._telling is not None:
            await asyncio.wait({self._telling})
        await self.driver.close()


class RemoteSelectionService:
    """The methods of SelectionService, as requests to the service at `url`.

    Each event loop that uses it has its own connections. The synchronous methods `list_workers`,
    `loads`, `ready` and `list_replica_peers` block the loop for one exchange; `add_output_block`
    does not: it is sent in the background, in order. Raises the errors of SelectionService, and
    SelectionServiceError of kind `unreachable` if there is no response.
    """

    def __init__(
        self,
        url: str,
        *,
        timeouts: Timeouts | None = None,
        verify: Verify = True,
        cert: Cert | None = None,
        token: Token | None = None,
    ) -> None:
        """url: http://host:port, https://host:port, or unix:PATH. verify, cert, token: as of
        KvRouter. Raises ValueError for any other URL, and OSError for unusable files."""
        self._url = url
        self._timeouts = timeouts or Timeouts()
        self._access = Access(verify, cert, token)
        ServiceConnection(url, self._timeouts, self._access)  # raises ValueError and OSError
        self._blocking: SyncDriver | None = None  # made when first needed
        self._sides: WeakKeyDictionary[asyncio.AbstractEventLoop, Side] = WeakKeyDictionary()
        self._are_eagle: dict[tuple[str, str], bool] = {}  # by partition, if looked up
        self._is_shut_down = False

    @property
    def lost_output_blocks(self) -> int:
        """Output blocks that never reached the service."""
        return sum(side.lost for side in list(self._sides.values()))

    def _side(self) -> Side:
        """Connections of the running loop."""
        loop = asyncio.get_running_loop()
        side = self._sides.get(loop)
        if side is None:
            driver = Driver(self._url, Routing(), self._timeouts, None, self._access)
            side = self._sides[loop] = Side(driver)
        return side

    async def _asked(self, call: Call[T]) -> T:
        return await self._driven(ask(call))

    async def _driven(self, flow: Flow[T]) -> T:
        if self._is_shut_down:
            raise shut_down()
        try:
            return await self._side().driver.drive(flow)
        except ClientError as error:
            raise _refusal(error) from error

    def _asked_at_once(self, call: Call[T]) -> T:
        if self._is_shut_down:
            raise shut_down()
        if self._blocking is None:
            self._blocking = SyncDriver(self._url, Routing(), self._timeouts, None, self._access)
        try:
            return self._blocking.drive(ask(call))
        except ClientError as error:
            raise _refusal(error) from error

    # -- workers -------------------------------------------------------------------------------

    async def upsert_worker(self, worker: object) -> Fields:
        """Register or replace a worker; return its record."""
        fields = for_both(worker_fields("worker", worker))
        return _record(await self._asked(post("/workers", fields, _read)))

    async def patch_worker(self, worker_id: int, patch: object) -> Fields:
        """Change the given fields that are not None; return the record."""
        path = f"/workers/{worker_id_of(worker_id)}"
        fields = worker_fields("patch", patch)
        return _record(await self._asked(Call("PATCH", path, _read, fields)))

    async def delete_worker(self, worker_id: int) -> Fields:
        """Remove a worker, its blocks and its reservations; return its last record."""
        call: Call[Any] = Call("DELETE", f"/workers/{worker_id_of(worker_id)}", _read)
        return _record(await self._asked(call))

    def list_workers(
        self, *, model_name: str | None = None, routing_group: str | None = None
    ) -> list[Fields]:
        """The records of all workers, or of exact matches."""
        path = _filtered("/workers", model_name, routing_group)
        return list(map(_record, self._asked_at_once(Call("GET", path, _read))))

    def ready(self) -> Fields:
        """Whether at least one worker can be chosen, and all records."""
        workers = self.list_workers()
        schedulable = sum(worker["lifecycle"] == "schedulable" for worker in workers)
        return {
            "ready": schedulable > 0,
            "schedulable_workers": schedulable,
            "workers": workers,
        }

    # -- selections and reservations -----------------------------------------------------------

    async def select(self, request: object) -> Fields:
        """Choose a rank. With a selection_id, the choice is kept for create_reservation."""
        fields = for_both(fields_of("request", request))
        fields.pop("reservation_id", None)
        return renamed(await self._asked(post_prompt("/select", fields, _read, waits=True)))

    async def select_and_reserve(self, request: object) -> Fields:
        """Choose a rank and reserve it, in one step.

        The reservation is freed if the caller is cancelled, or the response lost.
        """
        fields = for_both({"selection_id": None, **fields_of("request", request)})
        if fields["selection_id"] is None:
            fields["selection_id"] = fields["reservation_id"] = str(uuid.uuid4())
        return await self._driven(self._select_and_reserve(fields))

    def _select_and_reserve(self, fields: Fields) -> Flow[Fields]:
        call: Call[Fields] = post_prompt("/select_and_reserve", fields, _read, waits=True)
        reservation = Reservation(0, reservation_id=fields["selection_id"])
        answer = yield from book(call, reservation)
        is_eagle = fields.get("is_eagle")
        if "sequence_hashes" not in answer and is_eagle is None:
            try:
                is_eagle = yield from self._is_eagle(answer["model_name"], answer["tenant_id"])
            except BaseException:
                yield Release(reservation)
                raise
        yield HandOver(reservation)
        return selected_and_booked(answer, fields, bool(is_eagle))

    def _is_eagle(self, model_name: str, tenant_id: str) -> Flow[bool]:
        """Whether a partition's blocks are hashed for EAGLE, which 1.3 does not report."""
        key = model_name, tenant_id
        if key not in self._are_eagle:
            workers = yield from ask(calls.workers(model_name, tenant_id))
            if not workers:
                return False
            self._are_eagle[key] = any(worker.is_eagle for worker in workers)
        return self._are_eagle[key]

    async def create_reservation(self, request: object) -> Fields:
        """Reserve the selection with this selection_id; or, with a worker_id and the prompt, the
        caller's rank. Freed if the response is lost."""
        fields = for_both(fields_of("request", request))
        call: Call[Fields] = post_prompt("/reservations", fields, _read)
        selection_id = fields.get("selection_id")
        if not isinstance(selection_id, str):
            return renamed(await self._asked(call))
        return renamed(await self._driven(_booked(call, selection_id)))

    async def prefill_complete(self, selection_id: str) -> Done:
        """Report the first token: the prefill is complete."""
        await self._asked(calls.prefill_complete(selection_id_of(selection_id)))
        return ()

    def add_output_block(self, selection_id: str, *, decay_fraction: float | None = None) -> None:
        """Report one more block of output; `decay_fraction` (0 to 1) scales all blocks of the
        request.

        Sent in the background, so an unknown id raises nothing; without a running loop it is sent
        at once.
        """
        if self._is_shut_down:
            raise shut_down()
        if decay_fraction is not None and not 0.0 <= decay_fraction <= 1.0:
            raise ValueError("decay_fraction must be between 0.0 and 1.0")
        call = calls.output_block(selection_id_of(selection_id), decay_fraction)
        try:
            side = self._side()
        except RuntimeError:  # no loop runs here
            self._asked_at_once(call)
        else:
            side.tell(selection_id, call)

    async def free_reservation(self, selection_id: str) -> Done:
        """The request has ended."""
        call = calls.free(selection_id_of(selection_id))
        self._side().forget(selection_id)
        await self._asked(call)
        return ()

    # -- inspection ----------------------------------------------------------------------------

    def loads(
        self, *, model_name: str | None = None, routing_group: str | None = None
    ) -> list[Fields]:
        """The active load of every rank, by model and routing group."""
        path = _filtered("/loads", model_name, routing_group)
        return list(map(renamed, self._asked_at_once(Call("GET", path, _read))))

    async def potential_loads(self, request: object) -> list[Fields]:
        """The load of every rank if it got this prompt."""
        fields = for_both(fields_of("request", request))
        rows: list[Fields] = await self._asked(post_prompt("/potential_loads", fields, _read))
        return rows

    async def overlap_scores(self, request: object) -> Fields:
        """How many blocks of this prompt each rank has cached, by tier."""
        fields = for_both(fields_of("request", request))
        return scores(await self._asked(post_prompt("/overlap_scores", fields, _read)))

    async def indexer_snapshot(self) -> Fields:
        """The index, in the form of GET /dump."""
        return await self._asked(calls.dump())

    # -- replicas ------------------------------------------------------------------------------

    async def register_replica_peer(self, endpoint: str) -> bool:
        """Subscribe the service to a replica; return whether that is new. Raises ValueError, or
        RuntimeError while replica sync is off."""
        known = endpoint in await self._asked(_PEERS)
        await self._peer("/replica_sync/register_peer", endpoint)
        return not known

    async def deregister_replica_peer(self, endpoint: str) -> bool:
        """Remove a peer of the remote selector; False if it was not a peer."""
        try:
            await self._peer("/replica_sync/deregister_peer", endpoint)
        except SelectionServiceError as error:
            if error.status_code != NOT_FOUND:
                raise
            return False
        return True

    async def _peer(self, path: str, endpoint: str) -> None:
        try:
            await self._side().driver.drive(ask(post(path, {"endpoint": endpoint}, _read)))
        except AlreadyExists as error:
            raise RuntimeError(error.error) from error
        except ClientError as error:
            raise _refusal(error) from error

    def list_replica_peers(self) -> list[str]:
        """The endpoints of the replicas that the service subscribes to."""
        return self._asked_at_once(_PEERS)

    async def recover_indexer_from_peers(self, peers: Sequence[str]) -> bool:
        """Not supported: a service recovers at its start, from --indexer-peers. Raises
        NotImplementedError."""
        raise NotImplementedError("a service recovers at its start: --indexer-peers")

    # -- the end -------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Send no more requests; the service continues. `shutdown_async` closes the connections."""
        self._is_shut_down = True
        if self._blocking is not None:
            self._blocking.close()

    async def shutdown_async(self) -> Done:
        """Wait for this loop's background requests, and close its connections."""
        self.shutdown()
        await self.disconnect()
        return ()

    async def disconnect(self) -> None:
        """Close the connections of the running loop, which may make new ones later. For a loop that
        ends before the others."""
        side = self._sides.pop(asyncio.get_running_loop(), None)
        if side is not None:
            await side.close()


_PEERS: Call[list[str]] = Call("GET", "/replica_sync/peers", msgspec.json.Decoder(list[str]).decode)


def _booked(call: Call[Fields], selection_id: str) -> Flow[Fields]:
    reservation = Reservation(0, reservation_id=selection_id)
    answer = yield from book(call, reservation)
    yield HandOver(reservation)
    return answer


def _record(answer: Fields) -> Fields:
    for name in ("replay_endpoints", "load_endpoint"):  # which 1.6 lacks
        answer.pop(name, None)
    return record(renamed(answer))


def _filtered(path: str, model_name: str | None, routing_group: str | None) -> str:
    """The path with its filters. The routing group is sent under the names of both dialects."""
    given = {"model_name": model_name, "tenant_id": routing_group, "routing_group": routing_group}
    query = urlencode({name: value for name, value in given.items() if value is not None})
    return f"{path}?{query}" if query else path


def _refusal(error: ClientError) -> ValueError | SelectionServiceError:
    if isinstance(error, ServiceRefused):
        return refusal_of(error.status, error.error)
    if isinstance(error, ClientClosed):
        return shut_down()
    return SelectionServiceError(str(error), 503, "unreachable")
