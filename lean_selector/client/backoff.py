"""When to try again: exponential backoff with jitter, bounded in number and length.

The formula is that of "Client Retry Strategy" in the load-shedding document, with a first step that
fits a router in front of engines. Pure: draws from the generator it is given, never sleeps.
"""

import random

import msgspec


class Backoff(msgspec.Struct, frozen=True):
    """The n-th wait (from 0) is first_s * 2^n plus up to first_s of jitter, at most longest_s."""

    max_retries: int = 5
    first_s: float = 0.25
    longest_s: float = 60.0

    def wait_s(
        self, attempt: int, rng: random.Random, retry_after_s: float | None = None
    ) -> float | None:
        """Seconds before retry number `attempt` (from 0), or None when there is to be no more.

        A longer retry_after_s of the service is honoured, up to longest_s.
        """
        if attempt >= self.max_retries:
            return None
        wait = self.first_s * 2.0**attempt + rng.uniform(0.0, self.first_s)
        return min(self.longest_s, max(wait, retry_after_s or 0.0))
