"""What a route asks of whoever calls it. Each role may do what those before it may."""

from enum import IntEnum
from typing import Final


class Role(IntEnum):
    """OPEN is everybody's, the others are a token's."""

    OPEN = 0  # whether the service is up
    READ = 1  # inspection
    WRITE = 2  # also selecting, reserving and lifecycles
    ADMIN = 3  # also registration, thresholds and peers


OPEN: Final = Role.OPEN
READ: Final = Role.READ
WRITE: Final = Role.WRITE
ADMIN: Final = Role.ADMIN

ROLES: Final = {b"read": READ, b"write": WRITE, b"admin": ADMIN}  # as a token file names them
NAMES: Final = {READ: "read", WRITE: "write", ADMIN: "admin"}
