"""How long the client waits before it tries again."""

import random

from lean_selector.client.client_settings import Backoff


def test_waits_double_have_jitter_and_end() -> None:
    backoff, rng = Backoff(max_retries=4, first_s=1.0, longest_s=6.0), random.Random(1)
    waits = [backoff.wait_s(attempt, rng) for attempt in range(5)]
    assert waits[4] is None
    for wait, base in zip(waits[:3], (1, 2, 4), strict=True):
        assert wait is not None
        assert base <= wait <= base + 1
    assert waits[3] == 6.0


def test_retry_after_is_honoured_up_to_the_longest_wait() -> None:
    backoff, rng = Backoff(first_s=1.0, longest_s=30.0), random.Random(1)
    assert backoff.wait_s(0, rng, 7.0) == 7.0
    assert backoff.wait_s(0, rng, 3600.0) == 30.0
    wait = backoff.wait_s(0, rng, 0.0)
    assert wait is not None
    assert wait >= 1.0
