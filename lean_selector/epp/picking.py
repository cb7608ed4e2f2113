"""Chooses workers for the endpoint picker, by the steps and objects of `lean-selector gateway`.

A worker is offered as `IP:port`, which is all that data planes take. So a worker that is registered
by name is offered under its resolved address, and is not chosen while its name does not resolve."""

import asyncio
import ipaddress
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Final, NamedTuple, Protocol

import msgspec

from lean_selector.core.errors import BadRequest, SelectorError, Unavailable, UnknownModel
from lean_selector.core.health.ejections import FAILED
from lean_selector.gateway.fleet import GatewayFleet
from lean_selector.gateway.headers import QueueHeaders, new_id, read_session
from lean_selector.gateway.placing import Chooser, NoPair, NotChosen, Shed, peeked_model
from lean_selector.gateway.prompts import Prompts, Routed
from lean_selector.gateway.route import OF_PREFILL, SHED, prefill_headers, refusal_fields
from lean_selector.gateway.upstreams import Rotation, WorkerUse
from lean_selector.http.outbound import Resolve
from lean_selector.http.urls import Url
from lean_selector.tasks import Steps, stepped, watched

log = logging.getLogger("lean_selector.epp")

RESOLVE_AGAIN_S: Final = 5.0
# Bodies that wait for their end. Above it, further ones are routed by load, as they arrive.
MOST_HELD_BYTES: Final = 128 << 20
_NOBODY: Final = frozenset[int]()
_ID: Final = b"x-reservation-id"
_WORKER: Final = b"x-worker-id"
_RANK: Final = b"x-data-parallel-rank"
_OWN: Final = (_ID, _WORKER, _RANK, *OF_PREFILL)
# The last four: the reservation has moved to the worker that has answered; the stream ended before
# the response; it broke the protocol; the data plane does not tell the response's end.
EVENTS: Final = ("reserved", "no_body", "moved", "broken", "malformed", "held")
_NO_WORKER: Final = "no worker is available"
_NOT_OURS: Final = "none of the endpoints of the subset is a worker of this selector"


class Refused(NamedTuple):
    """No worker was chosen: what the client gets."""

    status: int
    message: str
    code: str | None = None


@dataclass(eq=False, slots=True)
class Picked:
    """The chosen worker: what the data plane is told, and the reservation."""

    endpoints: bytes  # `IP:port`, perhaps with a second choice behind a comma
    use: WorkerUse  # without a reservation, if `routed` is None: the request has no body
    routed: Routed | None = None
    headers: dict[bytes, bytes] = field(default_factory=dict)  # that the request gets
    body: bytes | None = None  # replaces the request's, if given

    @property
    def removed(self) -> list[bytes]:
        """The headers that the request must not keep, since a client may have sent them."""
        removed = [name for name in _OWN if name not in self.headers]
        if self.body is not None and self.routed and self.routed.additions.change_answer:
            removed.append(b"accept-encoding")  # so that the answer can be read
        return removed


@dataclass(eq=False, slots=True)
class RequestToRoute:
    """What is known of a request when its worker is chosen."""

    path: str
    body: bytes | None  # None without one; empty if it is not known
    section: bytes  # the header lines, between CRLFs
    credential: bytes | None  # of the data plane
    subset: list[bytes] | None  # the only endpoints that may be chosen
    forwards: bool  # the body can be replaced, and its effects on the answer removed
    awaits_prompt: bool = True  # False once it is read, or if it is not to count


class Live(Protocol):
    """A request in progress."""

    def touch(self) -> None: ...


class Addresses:
    """The addresses of the workers, by base URL, and the other way round."""

    def __init__(self, fleet: GatewayFleet, resolve: Resolve) -> None:
        self._fleet = fleet
        self._resolve = resolve
        self._revision = -1
        self._urls: dict[str, Url] = {}  # by base URL
        self._ips: dict[str, str] = {}  # by name; empty if it does not resolve
        self._ask_after = 0.0
        self._asking: asyncio.Task[None] | None = None
        self.by_base: dict[str, bytes] = {}
        self._by_spelling: dict[bytes, list[str]] = {}

    @property
    def unresolved(self) -> int:
        """How many workers cannot be chosen, because their names do not resolve."""
        self.follow()
        return len(self._urls) - len(self.by_base)

    def follow(self) -> None:
        """Reads the workers again, if they have changed."""
        if self._revision != self._fleet.revision:
            self._revision = self._fleet.revision
            self._urls = {base: Url(base) for base in self._fleet.bases()}
            self._spell()
            self._ask_after = 0.0
            self.tick(monotonic())

    def _spell(self) -> None:
        self.by_base, self._by_spelling = {}, {}
        for base, url in self._urls.items():
            ip = _ip_of(self._ips.get(url.host, url.host))
            if ip is None:
                continue
            bare, port = str(ip).encode(), b":%d" % url.port
            host = bare if ip.version == 4 else b"[%b]" % bare
            self.by_base[base] = host + port
            # Data planes may leave the port or the brackets away.
            for spelling in {host + port, bare + port, host, bare}:
                self._by_spelling.setdefault(spelling, []).append(base)

    def tick(self, now: float) -> None:
        """Looks up the names again, if that is due."""
        is_asking = self._asking is not None and not self._asking.done()
        if now >= self._ask_after and not is_asking:
            self._ask_after = now + RESOLVE_AGAIN_S
            self._asking = watched("addresses", self._ask())

    async def _ask(self) -> None:
        names = {url.host: url.port for url in self._urls.values() if _ip_of(url.host) is None}
        found = await asyncio.gather(*[self._found(*each) for each in names.items()])
        self._ips = dict(zip(names, found, strict=True))
        self._spell()

    async def _found(self, name: str, port: int) -> str:
        try:
            addresses = await self._resolve(name, port)
        except OSError:
            return ""
        return next((each[0] for _, each in addresses if isinstance(each, tuple)), "")

    def among(self, subset: list[bytes] | None) -> list[str] | None:
        """Return the base URLs of the workers that may be offered; None: all of them."""
        self.follow()
        if subset is None:
            return list(self.by_base) if self.unresolved else None
        return list(dict.fromkeys(base for each in subset for base in self.bases_at(each)))

    def bases_at(self, address: bytes) -> list[str]:
        return self._by_spelling.get(address.lower(), [])

    def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()


def _ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that a host is, without its zone; None if the host is a name."""
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


def _model_alone(body: bytes) -> bytes:
    """Return a request for the same model, which has no prompt."""
    model = peeked_model(body) if body else None
    return b"{}" if model is None else msgspec.json.encode({"model": model})


@dataclass(eq=False)
class Picker:
    """Chooses a worker for each request of a data plane. Used only on the loop's thread.

    `fallbacks`: how many further workers a choice names. `queue_headers`: None without a queue."""

    prompts: Prompts
    chooser: Chooser
    rotation: Rotation
    fleet: GatewayFleet
    addresses: Addresses
    tenant_id: str
    fallbacks: int
    max_wait_s: float
    queue_headers: QueueHeaders | None

    def __post_init__(self) -> None:
        self.held_bytes = 0  # of bodies
        self.live: set[Live] = set()
        self.counts = Counter(dict.fromkeys(EVENTS, 0))
        self.refused = Counter[str]()  # by status

    @property
    def is_full(self) -> bool:
        return self.held_bytes > MOST_HELD_BYTES

    def pick(
        self, request: RequestToRoute, tell: Callable[[Picked | Refused], None]
    ) -> "asyncio.Task[None] | None":
        """Calls `tell` with the worker at once, or returns a task that does so."""
        return stepped(self._pick(request, tell))

    def _pick(
        self, request: RequestToRoute, tell: Callable[[Picked | Refused], None]
    ) -> Steps[None]:
        found: Picked | Refused
        try:
            found = yield from self._found(request)
        except Shed as shed:
            found = Refused(SHED, str(shed), "overloaded")
        except NoPair as unpaired:
            found = Refused(503, unpaired.message, "no_pair")
        except NotChosen:
            found = Refused(503, _NO_WORKER, "no_worker")
        except SelectorError as error:
            if isinstance(error, UnknownModel):
                self.chooser.knows_no(error)
            found = Refused(*refusal_fields(error))
        except Exception:
            log.exception("a request could not be routed")
            found = Refused(500, "internal error")
        tell(found)

    def _found(self, request: RequestToRoute) -> Steps[Picked]:
        self.rotation.follow(self.fleet)
        among = self.addresses.among(request.subset)
        if among is not None and not among:
            raise Unavailable(_NO_WORKER if request.subset is None else _NOT_OURS)
        if request.body is None:
            return self._any(among)
        is_by_load = not (request.body and request.awaits_prompt)
        body = _model_alone(request.body) if is_by_load else request.body
        forwards = request.forwards and not is_by_load
        try:
            routed = yield from self.prompts.read(request.path, body, self.tenant_id, forwards)
        except BadRequest:
            if request.body:
                raise
            return self._any(among)  # there are several models, and nothing tells which
        request.awaits_prompt = False
        if self.queue_headers is not None:
            self.queue_headers.read(routed, request.section, request.credential)
        read_session(routed, request.section)
        if among is not None:
            ids = self.fleet.ids_of(among)
            routed.worker_ids = ids if routed.worker_ids is None else routed.worker_ids & ids
            if not routed.worker_ids:
                raise Unavailable("no worker of the subset has this model")
        reservation_id = new_id()
        use = yield from self.chooser.choose(routed, reservation_id, _NOBODY)
        endpoint = self.addresses.by_base.get(use.endpoint.text)
        if endpoint is None:  # registered while the request waited
            use.end(None)
            raise Unavailable(_NO_WORKER)
        headers = {_ID: reservation_id.encode(), _WORKER: b"%d" % (use.worker_id or 0)}
        if use.dp_rank is not None:
            headers[_RANK] = b"%d" % use.dp_rank
        if (leg := use.leg) is not None:
            headers |= prefill_headers(leg.endpoint.text, leg.worker_id or 0, leg.dp_rank)
        choice = Picked(endpoint + self._fallback(use, routed), use, routed, headers)
        if forwards:
            choice.body = routed.body
        routed.body = b""
        self.counts["reserved"] += 1
        return choice

    def _any(self, among: list[str] | None) -> Picked:
        """Return the next worker, for a request that needs no choice and is not reserved."""
        endpoint = self.rotation.next((), among)
        if endpoint is None:
            raise Unavailable(_NO_WORKER)
        self.counts["no_body"] += 1
        return Picked(self.addresses.by_base[endpoint.text], WorkerUse(endpoint))

    def _fallback(self, use: WorkerUse, routed: Routed) -> bytes:
        """Return another worker for the request, behind a comma, if one is to be named."""
        if not self.fallbacks:
            return b""
        serving = self.fleet.may_serve(routed.model_name)
        if routed.worker_ids is not None:
            serving = self.fleet.bases_of(routed.worker_ids)
        other = self.rotation.next({use.endpoint.text}, serving)
        address = None if other is None else self.addresses.by_base.get(other.text)
        return b"" if address is None else b"," + address

    def follow(self, choice: Picked, served: bytes) -> None:
        """Moves the reservation to the worker that has answered, if it is another one."""
        routed, bases = choice.routed, self.addresses.bases_at(served)
        if routed is None or choice.use.endpoint.text in bases:
            return
        self.counts["moved"] += 1
        choice.use.end(FAILED)
        routed.worker_ids = self.fleet.ids_of(bases)
        steps = self.chooser.choose(routed, new_id(), _NOBODY)
        try:
            if routed.worker_ids:
                steps.send(None)
        except StopIteration as end:
            choice.use = end.value
        except (NotChosen, Shed, SelectorError):
            pass  # it is busy, so it is not reserved
        steps.close()
