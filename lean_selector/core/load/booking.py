"""What a request is booked as: the one record that slots, events and snapshots share."""

import msgspec


class Booking(msgspec.Struct, frozen=True, gc=False):
    """A request on a rank, as it was booked. All of it is told to replicas.

    Beside it travel its prompt, whose blocks live in the slots' trie, once for all requests that
    share them, and the replica that admitted it, which a holder knows from whom it heard.
    """

    request_id: str
    worker_id: int
    dp_rank: int
    lora_name: str | None = None
    track_prefill_tokens: bool = True  # False: `prefill_tokens` count for nothing
    prefill_tokens: int | None = None  # None: not given, which counts as 0
    prefill_duration_s: float | None = None  # means nothing without tokens
    expected_output_tokens: int | None = None
