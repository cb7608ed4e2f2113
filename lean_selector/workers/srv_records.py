"""SRV records, which the system's resolver does not know: dnspython asks for them.

In daemon threads that nobody waits for, as other look-ups (D29): its coroutines do not end when
they are cancelled.
"""

import asyncio
import contextlib
import threading
from typing import Final

import dns.exception
import dns.resolver

_LIFETIME_S: Final = 10.0


class SrvRecords:
    """Asks the name servers of the system, or those that it is given."""

    def __init__(self, servers: list[str] | None = None, port: int = 53) -> None:
        self._resolver = dns.resolver.Resolver(configure=servers is None)
        if servers is not None:
            self._resolver.nameservers = list(servers)
            self._resolver.port = port

    async def ask(self, name: str) -> list[tuple[str, int]]:
        """Target and port of each record. Raises OSError.

        Priorities and weights are for those who send requests; here all are candidates.
        """
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[list[tuple[str, int]] | OSError] = loop.create_future()

        def run() -> None:
            result: list[tuple[str, int]] | OSError
            try:
                result = self._ask(name)
            except OSError as error:
                result = error
            except Exception as error:  # whatever it is, it is asked again
                result = OSError(f"SRV of {name}: {type(error).__name__}: {error}")
            with contextlib.suppress(RuntimeError):  # the loop is closed: the service has stopped
                loop.call_soon_threadsafe(_answer, answered, result)

        threading.Thread(target=run, name="srv look-up", daemon=True).start()
        result = await answered
        if isinstance(result, OSError):
            raise result
        return result

    def _ask(self, name: str) -> list[tuple[str, int]]:
        try:
            answer = self._resolver.resolve(name, "SRV", lifetime=_LIFETIME_S)
        except dns.exception.DNSException as error:
            raise OSError(f"SRV of {name}: {error}") from None
        return [
            (record.target.to_text(omit_final_dot=True).lower(), record.port)
            for record in answer
            if record.target.to_text() != "."  # decidedly nobody (RFC 2782)
        ]


def _answer(
    answered: "asyncio.Future[list[tuple[str, int]] | OSError]",
    result: list[tuple[str, int]] | OSError,
) -> None:
    if not answered.done():
        answered.set_result(result)
