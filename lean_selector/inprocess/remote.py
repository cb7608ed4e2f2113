"""RemoteSelectionService: SelectionService in front of a selector that runs elsewhere.

Speaks to it over HTTP or a UNIX socket, in the fields that both dialects read. Owns the
connections, and what is sent in the background because its method must not wait.
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
# Output blocks that wait to be sent. While a service is away for longer, more are lost; their load
# ends with their requests.
MAX_UNTOLD = 4096
_log = logging.getLogger("lean_selector.inprocess")


class Side:
    """What one loop has of a service: connections, and what it tells beside its calls."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.lost = 0  # output blocks that were never sent
        self._untold: deque[tuple[str, Call[None]]] = deque()
        self._telling: asyncio.Task[None] | None = None

    def tell(self, selection_id: str, call: Call[None]) -> None:
        """Ask in the background, in the order of the calls; an unknown id is no error."""
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
        """Wait for what is sent in the background, then close the connections."""
        if self._telling is not None:
            await asyncio.wait({self._telling})
        await self.driver.close()


class RemoteSelectionService:
    """The methods of SelectionService, asked of the service at `url`.

    Each event loop that uses it has connections of its own. The methods that do not wait,
    `list_workers`, `loads`, `ready` and `list_replica_peers`, stop the loop for one exchange;
    `add_output_block` does not: it is sent in the background, in order. Raises what
    SelectionService does, and SelectionServiceError of the kind `unreachable` without an answer.
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
        KvRouter. Raises ValueError for anything else, and OSError for files that cannot be used."""
        self._url = url
        self._timeouts = timeouts or Timeouts()
        self._access = Access(verify, cert, token)
        ServiceConnection(url, self._timeouts, self._access)  # raises ValueError and OSError
        self._blocking: SyncDriver | None = None  # made when first needed
        self._sides: WeakKeyDictionary[asyncio.AbstractEventLoop, Side] = WeakKeyDictionary()
        self._are_eagle: dict[tuple[str, str], bool] = {}  # by partition, where it had to be asked
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
        """Register a worker, or change it whole; its record."""
        fields = for_both(worker_fields("worker", worker))
        return _record(await self._asked(post("/workers", fields, _read)))

    async def patch_worker(self, worker_id: int, patch: object) -> Fields:
        """Change what is given and not None; the record."""
        path = f"/workers/{worker_id_of(worker_id)}"
        fields = worker_fields("patch", patch)
        return _record(await self._asked(Call("PATCH", path, _read, fields)))

    async def delete_worker(self, worker_id: int) -> Fields:
        """Remove a worker, its blocks and its reservations; the record that it had."""
        call: Call[Any] = Call("DELETE", f"/workers/{worker_id_of(worker_id)}", _read)
        return _record(await self._asked(call))

    def list_workers(
        self, *, model_name: str | None = None, routing_group: str | None = None
    ) -> list[Fields]:
        """The records, of all or of those that match exactly."""
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
        """Choose a rank and book it, in one step.

        What was booked for a caller that was cancelled, or whose answer was lost, is freed.
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
        """How a partition's prompts are cut into blocks, of which 1.3 says nothing."""
        key = model_name, tenant_id
        if key not in self._are_eagle:
            workers = yield from ask(calls.workers(model_name, tenant_id))
            if not workers:
                return False
            self._are_eagle[key] = any(worker.is_eagle for worker in workers)
        return self._are_eagle[key]

    async def create_reservation(self, request: object) -> Fields:
        """Book what `select` chose under this selection_id; or, with a worker_id and the prompt,
        the rank that the caller chose. Freed if its answer is lost."""
        fields = for_both(fields_of("request", request))
        call: Call[Fields] = post_prompt("/reservations", fields, _read)
        selection_id = fields.get("selection_id")
        if not isinstance(selection_id, str):
            return renamed(await self._asked(call))
        return renamed(await self._driven(_booked(call, selection_id)))

    async def prefill_complete(self, selection_id: str) -> Done:
        """The first token is there: no prefill waits any more."""
        await self._asked(calls.prefill_complete(selection_id_of(selection_id)))
        return ()

    def add_output_block(self, selection_id: str, *, decay_fraction: float | None = None) -> None:
        """One more block of output; `decay_fraction` (0 to 1) weighs all blocks of the request.

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
        """What the load of every rank would be with this prompt."""
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
        """Let the service listen to a replica; whether that is new. Raises ValueError, or
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
        """The endpoints of the replicas that the service listens to."""
        return self._asked_at_once(_PEERS)

    async def recover_indexer_from_peers(self, peers: Sequence[str]) -> bool:
        """A service recovers at its start, by its flag --indexer-peers. Raises
        NotImplementedError."""
        raise NotImplementedError("a service recovers at its start: --indexer-peers")

    # -- the end -------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Ask it nothing more; the service goes on. `shutdown_async` closes the connections."""
        self._is_shut_down = True
        if self._blocking is not None:
            self._blocking.close()

    async def shutdown_async(self) -> Done:
        """Waits for what this loop tells in the background, and closes its connections."""
        self.shutdown()
        await self.disconnect()
        return ()

    async def disconnect(self) -> None:
        """Closes the connections of the running loop, which may make others later. For a loop that
        ends before the last one."""
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
    for name in ("replay_endpoints", "load_endpoint"):  # which 1.6 has not
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
