"""Binding an endpoint again whose socket was closed: libzmq lets go of it a moment later."""

import zmq


def bound_again(socket: "zmq.Socket[bytes]", endpoint: str) -> bool:
    """False: not yet, try again soon. Raises zmq.ContextTerminated."""
    try:
        socket.bind(endpoint)
    except zmq.ContextTerminated:
        raise
    except zmq.ZMQError:
        return False
    return True
