"""Binding an endpoint again whose socket was closed: libzmq lets go of it a moment later."""

import time
from collections.abc import Callable
from typing import Final

import zmq

BIND_AGAIN_S: Final = 0.02


def bound_again(socket: "zmq.Socket[bytes]", endpoint: str) -> bool:
    """False: not yet, try again soon. Raises zmq.ContextTerminated."""
    try:
        socket.bind(endpoint)
    except zmq.ContextTerminated:
        raise
    except zmq.ZMQError:
        return False
    return True


def bound_in_time(
    make: Callable[[], "zmq.Socket[bytes]"], endpoint: str, is_over: Callable[[], bool]
) -> "zmq.Socket[bytes] | None":
    """What `make` makes, bound; blocks until there is a port, and a descriptor, for it. None, and
    nothing left open, where `is_over` or its context has ended."""
    made: zmq.Socket[bytes] | None = None
    while not is_over():
        try:
            if made is None:
                made = make()
            if bound_again(made, endpoint):
                return made
        except zmq.ContextTerminated:
            break
        except zmq.ZMQError:  # too many descriptors, most likely
            pass
        time.sleep(BIND_AGAIN_S)
    if made is not None:
        made.close(0)
    return None
