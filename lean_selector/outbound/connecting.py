"""Connections to others: to the first address of a name that takes us, with TLS where it is asked.

Knows nothing of what is said on them. Names are looked up by whom the caller is given (D29).
"""

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from lean_selector.outbound.allowed_endpoints import AllowedEndpoints
from lean_selector.outbound.url import Url

# (ip, port), or more of IPv6; with the family. As `sockets.resolver` gives them.
SocketAddress = tuple[int, tuple[Any, ...] | bytes]
Resolve = Callable[[str, int], Awaitable[list[SocketAddress]]]
P = TypeVar("P", bound=asyncio.BaseProtocol)


async def connected(
    resolve: Resolve,
    to: Url,
    context: ssl.SSLContext | None,
    timeout_s: float,
    new_protocol: Callable[[], P],
    allowed: AllowedEndpoints | None = None,
    tls_name: str | None = None,
) -> P:
    """`new_protocol` on a connection to `to`, if it is `allowed`. One address that is silent leaves
    some time to the others. `tls_name` is what its certificate must be for, in place of its host.
    Raises OSError."""
    ends = time.monotonic() + timeout_s
    if allowed is not None:
        allowed.check(to.origin)
    addresses = await resolve(to.host, to.port)
    if allowed is not None:
        addresses = allowed.among(to.origin, addresses)
    failure: Exception = OSError("the name has no addresses")
    for at, address in enumerate(addresses):
        share_s = max(0.0, ends - time.monotonic()) / (len(addresses) - at)
        try:
            async with asyncio.timeout(share_s):
                return await _connect(address, tls_name or to.host, context, new_protocol)
        except TimeoutError:
            failure = OSError(f"no connection in {share_s:.1f} s")
        except OSError as error:
            failure = error
    raise failure


async def _connect(
    address: SocketAddress,
    host: str,
    context: ssl.SSLContext | None,
    new_protocol: Callable[[], P],
) -> P:
    loop = asyncio.get_running_loop()
    family, where = address
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        await loop.sock_connect(connection, where)
        protocol = new_protocol()
        await loop.create_connection(
            lambda: protocol,
            sock=connection,
            ssl=context,
            server_hostname=host if context is not None else None,
        )
    except BaseException:
        connection.close()
        raise
    return protocol


def reason(error: Exception) -> str:
    """Why there is no connection, in a few words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError | socket.gaierror):  # numbers of their own
        return error.strerror or str(error)
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__
