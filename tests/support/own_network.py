"""A network of its own for a test: what it starts takes its default ports, and meets nobody.

    with own_network(): ...

holds for the thread that enters it, and for what that starts meanwhile, threads and processes. In
there is the loopback device and nothing else.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1
_REFUSED = (errno.EPERM, errno.ENOSYS, errno.EINVAL, errno.ENOSPC)
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def own_network() -> Iterator[None]:
    """Skips the test where the machine lets nobody make one, as it does whoever is not root."""
    before = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY)
    try:
        if _libc.unshare(_CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            if number in _REFUSED:
                pytest.skip(f"no network namespace can be made here: {os.strerror(number)}")
            raise OSError(number, os.strerror(number))
        try:
            _set_up("lo")
            yield
        finally:
            if _libc.setns(before, _CLONE_NEWNET) != 0:
                os._exit(70)  # no later test is to run where it does not belong
    finally:
        os.close(before)


def _set_up(device: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", device.encode(), _IFF_UP)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)
