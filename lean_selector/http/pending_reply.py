"""An answer that comes later, between the app that makes it and the connection that waits for it.

Owns who is told of its end, and in which order. Knows neither bytes of HTTP nor transports.
"""

from collections.abc import Callable

from lean_selector.http.response import Response


class PendingReply:
    """An answer that comes later. The app keeps it, returns it, and calls `resolve` once.

    `on_disconnect` is called, at most once, if the client hangs up first; `resolve` then does
    nothing.

    A client that closes only its sending side, as `nc -N` does after its request, is taken to have
    hung up, unless the answer `is_being_made`: that it gets, as it gets one that is made at once.
    """

    __slots__ = (
        "_observers",
        "_send",
        "is_being_made",
        "on_disconnect",
        "response",
    )

    def __init__(
        self, on_disconnect: Callable[[], None] | None = None, *, is_being_made: bool = False
    ) -> None:
        """`is_being_made`: the answer waits for nothing but the turns of the loop."""
        self.on_disconnect = on_disconnect
        self.is_being_made = is_being_made
        self.response: Response | None = None
        self._observers: list[tuple[Callable[[Response], None], Callable[[], None]]] = []
        self._send: Callable[[Response], None] | None = None

    def observe(
        self, on_answer: Callable[[Response], None], on_hang_up: Callable[[], None]
    ) -> None:
        """Hear of the end, once: of the response, at once if it is there, or of a hang-up.

        Observers hear in the order in which they came, and of a hang-up before `on_disconnect`.
        """
        if self.response is not None:
            on_answer(self.response)
        else:
            self._observers.append((on_answer, on_hang_up))

    def resolve(self, response: Response) -> None:
        """Send the complete response. Requests queued behind it are handled later, not in here."""
        assert self.response is None, "a reply is resolved once"
        self.response = response
        self.on_disconnect = None
        observers, self._observers = self._observers, []
        for on_answer, _ in observers:
            on_answer(response)
        send, self._send = self._send, None
        if send is not None:
            send(response)

    def park(self, send: Callable[[Response], None]) -> None:
        """For the protocol: where the response goes."""
        self._send = send

    def hang_up(self) -> None:
        """For the protocol: the client is gone."""
        self._send = None
        on_disconnect, self.on_disconnect = self.on_disconnect, None
        observers, self._observers = self._observers, []
        for _, on_hang_up in observers:
            on_hang_up()
        if on_disconnect is not None:
            on_disconnect()
