"""What was missed of what each replica published: a publisher numbers its events from 1 on.

A PUB socket drops what a subscriber does not take in time, and what is published while a connection
is down is never sent. So a number that does not follow the last one tells how many events were
missed, and a publisher that falls silent after a loss tells by its heartbeat. Beyond the reference,
which numbers nothing (decision D24). Knows nothing of sockets; time is an argument, in seconds.
"""

from collections import OrderedDict

from lean_selector.core.replication.records import Publisher

# A replica that restarts is another publisher. Twice as many as there may be peers; the one that
# was silent longest is forgotten first.
MAX_PUBLISHERS = 512
# A peer subscribed to under two names delivers everything twice, one copy late by what its queues
# hold. A number further back than that was counted by somebody else.
MAX_LATE = 1_000_000
# 30 years of 1 000 events a second: what jumps further ahead was not counted.
MAX_JUMP = 2**40


class ReplicaSequences:
    """The numbers of all publishers that are heard; those of the reference have none."""

    def __init__(self) -> None:
        self.missed = 0  # events, ever
        self._publishers: OrderedDict[int, Publisher] = OrderedDict()  # the last heard at the end

    def publishers(self) -> list[Publisher]:
        """Those that number what they publish, by router id."""
        return sorted(self._publishers.values(), key=lambda publisher: publisher.router_id)

    def behind(self) -> list[Publisher]:
        """Those whose events were missed, and not mended since."""
        return [publisher for publisher in self._publishers.values() if publisher.gap_at]

    def event(self, router_id: int, sequence: int, now: float) -> int:
        """An event arrived; returns how many were missed before it."""
        return self._heard(router_id, sequence, sequence - 1, now)

    def heartbeat(self, router_id: int, sequence: int, now: float) -> int:
        """So many were published so far; returns how many of them were missed at the end."""
        return self._heard(router_id, sequence, sequence, now)

    def mended(self, router_id: int, sequence: int) -> bool:
        """Everything up to a number is known by other means; True: that closed a gap."""
        publisher = self._publishers.get(router_id)
        if publisher is None or not 0 < publisher.gap_at <= sequence:
            return False
        publisher.gap_at = 0
        return True

    def is_followed(self, router_id: int, since: float) -> bool:
        """True when a publisher was heard after `since`, and nothing of it is missing."""
        publisher = self._publishers.get(router_id)
        return publisher is not None and not publisher.gap_at and publisher.heard_at >= since

    def is_numbered(self, router_id: int) -> bool:
        """True when a publisher is known here, and numbers what it tells."""
        return router_id in self._publishers

    def _heard(self, router_id: int, sequence: int, before: int, now: float) -> int:
        """`before`: what ought to have been heard before this."""
        publisher = self._publishers.get(router_id)
        if publisher is None:
            if len(self._publishers) >= MAX_PUBLISHERS:
                self._publishers.popitem(last=False)
            self._publishers[router_id] = Publisher(router_id, sequence, now)
            return 0  # what came before our subscription is not ours to miss
        self._publishers.move_to_end(router_id)
        publisher.heard_at = now
        last = publisher.sequence
        if sequence <= last and last - sequence <= MAX_LATE:
            return 0
        publisher.sequence = sequence
        if sequence < last or before - last > MAX_JUMP or before == last:
            return 0
        missed = before - last
        publisher.missed += missed
        publisher.gap_at = sequence
        self.missed += missed
        return missed
