"""Receives the load that an engine publishes per rank: SGLang's `LoadStat`.

A report is a gauge: a rank's newest report replaces the previous one. Sequence numbers of reports
are ignored, and lost reports are not requested again. The socket on which a report arrives tells
the rank. Imported when a worker with a `load_endpoint` is registered."""

import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import Final

import msgspec

from lean_selector.core.load.shapes import EngineLoad
from lean_selector.core.load.slots import Slots
from lean_selector.core.rank_bits import RankKey
from lean_selector.events.kv_sockets import live_frames, open_load
from lean_selector.events.links import Links
from lean_selector.wire.kv_event_shapes import LoadStat

logger = logging.getLogger(__name__)

APPLIED: Final = "applied"
MALFORMED: Final = "malformed"

_decode = msgspec.msgpack.Decoder(LoadStat).decode


def engine_load(payload: bytes) -> EngineLoad:
    """Decode an engine's load report. Raises msgspec.DecodeError if the payload is not a report."""
    told = _decode(payload)
    busy_us = told.prefill_busy_us
    return EngineLoad(
        told.running_requests,
        told.waiting_requests,
        told.kv_tokens,
        told.kv_token_capacity or None,
        told.waiting_uncached_tokens,
        told.total_tokens,
        told.max_running_requests,
        told.prefilled_tokens,
        None if busy_us is None else busy_us / 1e6,
    )


class LoadStream:
    """The subscription to one rank's load reports, from start() to close()."""

    def __init__(
        self,
        links: Links,
        endpoint: str,
        rank: RankKey,
        slots: Slots,
        counts: Counter[str],
    ) -> None:
        """`slots` tracks the load of all ranks of a model and tenant, and stores the reports."""
        self.endpoint = endpoint
        self.slots = slots
        self._rank = rank
        self._counts = counts
        self._is_warned = False
        self._link = open_load(links, endpoint, self._receive)

    def start(self) -> None:
        self._link.start()

    def close(self) -> None:
        """End the subscription, and delete the rank's last load report."""
        self._link.close()
        self.slots.forget_report(self._rank)

    def _receive(self) -> None:
        newest = frames = self._link.take()
        while frames is not None:
            newest, frames = frames, self._link.take()
        message = None if newest is None else live_frames(newest)
        try:
            if message is None:
                raise msgspec.DecodeError("expected the frames topic, number and report")
            report = engine_load(message[1])
        except (msgspec.DecodeError, RecursionError) as error:
            self._refuse(error)
            return
        self._counts[APPLIED] += 1
        self.slots.report_load(self._rank, report, time.monotonic())

    def _refuse(self, error: Exception) -> None:
        self._counts[MALFORMED] += 1
        if self._is_warned:
            return
        self._is_warned = True
        worker_id, dp_rank = self._rank
        fields = {"worker_id": worker_id, "dp_rank": dp_rank, "endpoint": self.endpoint}
        text = "worker %d dp_rank %d: load_endpoint %s publishes no load report: %s"
        logger.warning(text, worker_id, dp_rank, self.endpoint, error, extra=fields)


class LoadStreams:
    """The subscriptions to load reports, one per rank. Used only on the event loop's thread."""

    def __init__(self, links: Links) -> None:
        self.counts = Counter[str]({APPLIED: 0, MALFORMED: 0})
        self._links = links
        self._streams: dict[int, dict[int, LoadStream]] = {}  # worker id -> rank -> stream

    def follow(self, worker_id: int, endpoints: Mapping[int, str], slots: Slots | None) -> None:
        """Subscribe to a worker's load reports at `endpoints` (by rank), and nowhere else."""
        streams = self._streams.pop(worker_id, {})
        for dp_rank, stream in list(streams.items()):
            if endpoints.get(dp_rank) != stream.endpoint or stream.slots is not slots:
                stream.close()
                del streams[dp_rank]
        for dp_rank, endpoint in endpoints.items():
            if dp_rank not in streams and slots is not None:
                rank = worker_id, dp_rank
                stream = LoadStream(self._links, endpoint, rank, slots, self.counts)
                streams[dp_rank] = stream
                stream.start()
        if streams:
            self._streams[worker_id] = streams

    def close(self) -> None:
        for worker_id in list(self._streams):
            self.follow(worker_id, {}, None)
