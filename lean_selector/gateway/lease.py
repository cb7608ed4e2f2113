"""What a request holds of its worker, from the choice to its end: freed once, whatever happens."""

from lean_selector.http.client import Upstream


class WorkerLease:
    """Of one worker. This one books nothing; others do in their `_begun`, `_touched`, `_freed`.

    Tokens are of the prompt: those that are thought to be cached there, and all of them.
    """

    def __init__(
        self,
        endpoint: Upstream,
        worker_id: int | None = None,
        dp_rank: int | None = None,
        overlap_tokens: int | None = None,
    ) -> None:
        """`dp_rank` where the worker has several; `overlap_tokens` is None where nobody chose."""
        self.endpoint = endpoint
        endpoint.users += 1
        self.worker_id = worker_id
        self.dp_rank = dp_rank
        self.overlap_tokens = overlap_tokens
        self.is_over = False

    def prefill_complete(self) -> None:
        """The first byte of the answer came."""
        if not self.is_over:
            self._begun()

    def touch(self) -> None:
        """It still runs: said now and then, or it would be taken for forgotten."""
        if not self.is_over:
            self._touched()

    def end(self, outcome: str | None, cached_tokens: int | None = None) -> None:
        """It is over; only the first call counts. `outcome` is `ok`, `failed` or `refused` of the
        worker; None where the worker is not to be judged by it."""
        if not self.is_over:
            self.is_over = True
            self.endpoint.users -= 1
            self._freed(outcome, cached_tokens)

    def _begun(self) -> None:
        pass

    def _touched(self) -> None:
        pass

    def _freed(self, outcome: str | None, cached_tokens: int | None) -> None:
        pass
