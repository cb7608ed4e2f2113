"""The sessions of one partition: to which rank each is bound, and until when.

When a request is booked, its session is bound to the request's rank. The binding does not expire
while this replica has a live reservation of the session. After the last reservation has ended, the
binding lasts for the configured time to live. A newer binding from a peer replaces the known one.
Follows selection_16.md section 6. Time is an argument, in monotonic seconds."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from lean_selector.core.errors import BadRequest
from lean_selector.core.sessions.shapes import (
    Binding,
    LiveSession,
    SessionEvent,
    SessionReservation,
    SessionVerdict,
)
from lean_selector.core.settings import SessionSettings

MAX_ID_BYTES: Final = 256
# As in the reference. A session with an id of 36 bytes takes 320 bytes: 21 MB when full.
MAX_SESSIONS = 65_536
# Sequences start at the nanoseconds since 1970, which reach this value in 2262. A higher sequence,
# or the one after it, would overflow the wire format.
MAX_SEQUENCE: Final = 2**63 - 1
# A peer's sequence may be ahead of our clock and of our own sequence by this much. That is more
# than clocks differ, or than bindings are made. To accept a higher sequence would raise our own
# above what peers accept.
MAX_AHEAD: Final = 24 * 60 * 60 * 10**9
# entries of a full table that are checked for expiry, to make room
_SWEEP_FOR_ROOM: Final = 16


class SessionCounts:
    """The number of session reservations by result, and the number of expired bindings."""

    def __init__(self) -> None:
        self.followed = 0  # reservations on the rank to which the session was bound
        self.bound = 0  # reservations of sessions that were not bound
        self.moved = 0  # reservations that moved the binding
        self.refused = 0  # reservations that could not use the session's rank
        self.unbound = 0  # reservations that made no binding, because the table was full
        self.expired = 0  # expired bindings


class SessionTables:
    """What the session tables of all partitions share: settings, and how to publish bindings."""

    def __init__(self, settings: SessionSettings) -> None:
        self.settings = settings
        self.writer_id = 0
        self.first_sequence: Callable[[], int] = lambda: 1
        self.tell: Callable[[SessionEvent], None] | None = None

    def publish(
        self,
        writer_id: int,
        first_sequence: Callable[[], int],
        tell: Callable[[SessionEvent], None],
    ) -> None:
        """Publish the bindings of all tables that are made from now on. They are numbered upwards
        from `first_sequence()`: the time in ns, so that no number recurs after a restart."""
        self.writer_id, self.first_sequence, self.tell = writer_id, first_sequence, tell

    def new_table(self, model_name: str, tenant_id: str) -> "SessionTable":
        return SessionTable(model_name, tenant_id, self)


class SessionTable:
    """The sessions of one partition, and the ranks to which the sessions are bound."""

    def __init__(self, model_name: str, tenant_id: str, shared: SessionTables) -> None:
        self._model_name = model_name
        self._tenant_id = tenant_id
        self._shared = shared
        self.is_soft = shared.settings.is_soft
        self.ttl_s = shared.settings.ttl_s
        self.bonus_blocks = shared.settings.bonus_blocks
        self.counts = SessionCounts()
        self._next_sequence = shared.first_sequence()
        self._bindings: dict[str, Binding] = {}
        # Each binding is in one of these. OrderedDicts, because finding the oldest key of a plain
        # dict steps over the holes that removed keys leave.
        # Bindings without reservations; the next to expire first.
        self._idle: OrderedDict[str, Binding] = OrderedDict()
        # Bindings with reservations; the least recently published first.
        self._held: OrderedDict[str, Binding] = OrderedDict()
        self._reservations: dict[str, SessionReservation] = {}  # by reservation id

    def __len__(self) -> int:
        """Number of bindings, including expired ones that were not removed yet."""
        return len(self._bindings)

    @property
    def held(self) -> int:
        """Number of sessions that have a live reservation on this replica."""
        return len(self._held)

    def check_id(self, session_id: str) -> None:
        """Raise BadRequest for an id with more than MAX_ID_BYTES bytes as UTF-8."""
        if _is_too_long(session_id):
            raise BadRequest(f"session affinity ID must not exceed {MAX_ID_BYTES} bytes")

    def bound(self, session_id: str, now: float) -> Binding | None:
        """Return a session's binding; None if the session is unbound or the binding has expired."""
        binding = self._bindings.get(session_id)
        if binding is None or (not binding.reservations and binding.expires_at <= now):
            return None
        return binding

    def book(
        self, session_id: str, reservation_id: str, worker_id: int, dp_rank: int, now: float
    ) -> None:
        """Bind a session to the rank on which a request of the session was booked. The binding does
        not expire before the reservation ends. If the table is full, new sessions stay unbound."""
        self.release(reservation_id, now, tells=False)  # an earlier use of the id, if any
        counts = self.counts
        binding = self.bound(session_id, now)
        if binding is None:
            if not self._make_room(session_id, now):
                counts.unbound += 1
                return
            counts.bound += 1
            binding = Binding(
                worker_id, dp_rank, self._new_sequence(), self._shared.writer_id, now, now
            )
            self._bindings[session_id] = binding
        elif binding.is_at(worker_id, dp_rank):
            counts.followed += 1
        else:
            counts.moved += 1
            binding.worker_id, binding.dp_rank = worker_id, dp_rank
            binding.sequence, binding.writer_id = self._new_sequence(), self._shared.writer_id
        binding.reservations += 1
        self._idle.pop(session_id, None)
        self._held[session_id] = binding
        reservation = SessionReservation(session_id, binding, binding.sequence, binding.writer_id)
        self._reservations[reservation_id] = reservation
        self._publish_binding(session_id, binding, now)

    def release(self, reservation_id: str, now: float, *, tells: bool = True) -> None:
        """Record the end of a reservation. If the session's binding has not changed since the
        booking, renew the binding and, if `tells`, publish it."""
        reservation = self._reservations.pop(reservation_id, None)
        if reservation is None:
            return
        session_id, binding = reservation.session_id, reservation.binding
        binding.reservations -= 1
        if self._bindings.get(session_id) is not binding:
            return  # the binding was dropped meanwhile
        is_current = (
            binding.sequence == reservation.sequence and binding.writer_id == reservation.writer_id
        )
        if is_current:
            binding.expires_at = now + self.ttl_s
        if not binding.reservations:
            del self._held[session_id]
            self._rest(session_id, binding)
        if tells and is_current:
            self._publish_binding(session_id, binding, now)

    def refuse(self, session_id: str) -> None:
        """Count that a reservation on another rank was refused, and end the session's binding."""
        self.counts.refused += 1
        self._drop(session_id)

    def apply(self, event: SessionEvent, now: float, idle_s: float = 0.0) -> SessionVerdict:
        """Apply a binding that another replica published, without publishing it again. The binding
        was last used `idle_s` seconds ago."""
        sequence = event.sequence
        if sequence >= MAX_SEQUENCE or self._is_far_ahead(sequence):
            return SessionVerdict.SEQUENCE
        session_id = event.session_id
        if _is_too_long(session_id):
            return SessionVerdict.TOO_LONG
        expires_at = now - idle_s + self.ttl_s
        if expires_at <= now:
            return SessionVerdict.EXPIRED
        if sequence >= self._next_sequence:
            self._next_sequence = sequence + 1
        version = sequence, event.writer_id
        binding = self.bound(session_id, now)
        if binding is None:
            if not self._make_room(session_id, now):
                return SessionVerdict.FULL
            binding = Binding(event.worker_id, event.dp_rank, *version, expires_at, now)
            self._bindings[session_id] = binding
            self._rest(session_id, binding)
            return SessionVerdict.BOUND
        known = binding.sequence, binding.writer_id
        verdict = SessionVerdict.RENEWED
        if (binding.worker_id, binding.dp_rank) != (event.worker_id, event.dp_rank):
            verdict = SessionVerdict.REPLACED
            if version == known:
                return SessionVerdict.OUTDATED
        if version < known:
            return SessionVerdict.OUTDATED
        binding.worker_id, binding.dp_rank = event.worker_id, event.dp_rank
        binding.sequence, binding.writer_id = version
        binding.expires_at = max(expires_at, binding.expires_at)
        if not binding.reservations:
            self._rest(session_id, binding)
        return verdict

    def _is_far_ahead(self, sequence: int) -> bool:
        if sequence - MAX_AHEAD <= self._next_sequence:
            return False
        return sequence - MAX_AHEAD > self._shared.first_sequence()

    def sweep(self, now: float, max_steps: int) -> None:
        """Remove at most `max_steps` expired bindings. This only frees memory: expired bindings are
        ignored anyway."""
        for _ in range(max_steps):
            if not self._idle:
                return
            session_id = next(iter(self._idle))
            if self._idle[session_id].expires_at > now:
                return
            self._drop(session_id)
            self.counts.expired += 1

    def keep_alive(self, now: float, max_steps: int) -> None:
        """Publish again at most `max_steps` bindings of sessions with live reservations. Other
        replicas do not know these reservations, and would let the bindings expire."""
        if self._shared.tell is None:
            return
        for _ in range(max_steps):
            if not self._held:
                return
            session_id = next(iter(self._held))
            binding = self._held[session_id]
            if now - binding.told_at < 0.5 * self.ttl_s:
                return
            self._publish_binding(session_id, binding, now)

    def live(self, now: float) -> Iterator[LiveSession]:
        """Yield the live bindings for a snapshot. Bindings with reservations come last."""
        for session_id, binding in [*self._idle.items(), *self._held.items()]:
            if self._bindings.get(session_id) is not binding:
                continue  # the binding was dropped meanwhile
            idle_s = (
                0.0 if binding.reservations else max(0.0, now - binding.expires_at + self.ttl_s)
            )
            if idle_s < self.ttl_s:
                fields = msgspec.structs.asdict(self._event(session_id, binding))
                yield LiveSession(**fields, idle_s=round(idle_s, 3))

    def _make_room(self, session_id: str, now: float) -> bool:
        """Make room for a new binding of this session. Return False if the table is full."""
        if session_id in self._bindings:  # its binding has expired
            self._drop(session_id)
            self.counts.expired += 1
        elif len(self._bindings) >= MAX_SESSIONS:
            self.sweep(now, _SWEEP_FOR_ROOM)
        return len(self._bindings) < MAX_SESSIONS

    def _new_sequence(self) -> int:
        sequence = self._next_sequence
        self._next_sequence += 1
        return sequence

    def _rest(self, session_id: str, binding: Binding) -> None:
        """Move a binding without live reservations to the end of `_idle`. `sweep` removes expired
        bindings from the start of `_idle`."""
        self._idle[session_id] = binding
        self._idle.move_to_end(session_id)

    def _drop(self, session_id: str) -> None:
        binding = self._bindings.pop(session_id, None)
        if binding is not None:
            del (self._held if binding.reservations else self._idle)[session_id]

    def _publish_binding(self, session_id: str, binding: Binding, now: float) -> None:
        binding.told_at = now
        if session_id in self._held:
            self._held.move_to_end(session_id)
        if self._shared.tell is not None:
            self._shared.tell(self._event(session_id, binding))

    def _event(self, session_id: str, binding: Binding) -> SessionEvent:
        return SessionEvent(
            model_name=self._model_name,
            routing_group=self._tenant_id,
            session_id=session_id,
            worker_id=binding.worker_id,
            dp_rank=binding.dp_rank,
            sequence=binding.sequence,
            writer_id=binding.writer_id,
        )


def _is_too_long(session_id: str) -> bool:
    return 4 * len(session_id) > MAX_ID_BYTES and len(session_id.encode()) > MAX_ID_BYTES
