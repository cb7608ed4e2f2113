"""Authentication: roles, refusals of requests without the required role, and the token file."""

import logging
import re
from enum import IntEnum
from typing import Final

from lean_selector.http.head import digest_of


class Role(IntEnum):
    """Roles of tokens, lowest first. Each role includes the lower ones. OPEN needs no token."""

    OPEN = 0  # whether the service is up
    READ = 1  # inspect
    WRITE = 2  # also select, reserve, and report lifecycles
    ADMIN = 3  # also register workers and peers, and set thresholds


OPEN: Final = Role.OPEN
READ: Final = Role.READ
WRITE: Final = Role.WRITE
ADMIN: Final = Role.ADMIN

ROLES: Final = {b"read": READ, b"write": WRITE, b"admin": ADMIN}  # their names in a token file
NAMES: Final = {READ: "read", WRITE: "write", ADMIN: "admin"}


# -- refusals --------------------------------------------------------------------------------------
# RFC 6750 section 3: the header has no error code if the request had no bearer token.

_CHALLENGE: Final = b'www-authenticate: Bearer realm="lean-selector"%b\r\n'


class Refusal:
    """A 401 or 403. `line` is the header `www-authenticate`; `code` is OpenAI's error code."""

    def __init__(self, status: int, text: str, attributes: bytes = b"") -> None:
        self.status = status
        self.text = text
        self.code = "invalid_api_key" if status == 401 else "insufficient_permissions"
        self.line = _CHALLENGE % attributes


NO_TOKEN: Final = Refusal(401, "a bearer token is required")
UNKNOWN_TOKEN: Final = Refusal(401, "the bearer token is unknown", b', error="invalid_token"')


def refusal_of(credential: bytes | None, role: Role, needed: Role) -> Refusal:
    """Return the 401 or 403 for a request whose `role` is below the `needed` role."""
    if role == OPEN:
        return UNKNOWN_TOKEN if credential else NO_TOKEN
    name = NAMES[needed]
    return Refusal(
        403,
        f"the token's role is {NAMES[role]}, and this needs {name}",
        b', error="insufficient_scope", scope="%b"' % name.encode(),
    )


# -- the token file --------------------------------------------------------------------------------
# Each line is `ROLE TOKEN [NAME] [max-priority=high]`. The file is read at the start and again when
# it changes. Only digests are stored (`http.head`), and no message repeats a token.

log = logging.getLogger("lean_selector.access")

_MOST_BYTES: Final = 1 << 20
_TOKEN: Final = re.compile(rb"[A-Za-z0-9._~+/-]+=*")  # RFC 6750 section 2.1
_URGENT: Final = b"max-priority=high"
_NAME: Final = re.compile(rb"[A-Za-z0-9._~-]{1,32}")  # too short for a token written by mistake


class AccessTokens:
    """The roles of the current tokens, read from the token file. If the file becomes invalid, the
    tokens read last stay valid.

    `roles` maps the digest of a token to its role, `names` to the name of its client, if it has
    one; `urgent` are those whose requests may have high priority. Other objects keep references to
    `roles`, so a reload changes it in place."""

    def __init__(self, path: str) -> None:
        """Reads the token file. Raises OSError or ValueError, with a message of one line, if the
        file is unreadable or invalid."""
        from lean_selector.http.trust import WatchedFile

        self._file = WatchedFile(path, _MOST_BYTES, keeps=False)
        self._complains = False
        self.roles, self.names, self.urgent = _read(path, self._file.read()[0])

    def role_of(self, credential: bytes | None) -> Role:
        """Return the role of the token with the digest `credential`, or OPEN if no token has it.
        The digest is keyed, so the duration of the look-up reveals nothing about the token."""
        return self.roles.get(credential, OPEN)

    def reload(self, again: bool = False) -> None:
        """Reads the token file again if the file has changed or `again` is true."""
        if again:
            self._file.forget()
        try:
            text, is_new = self._file.read()
            if is_new:
                roles, self.names, self.urgent = _read(self._file.path, text)
                self.roles.clear()
                self.roles.update(roles)
                log.info("tokens were read again", extra={"tokens": len(roles)})
            self._complains = False
        except (OSError, ValueError) as error:
            if again or not self._complains:
                log.warning("token file is invalid, the last tokens stay in use: %s", error)
            self._complains = True


def _read(
    path: str, text: bytes
) -> tuple[dict[bytes | None, Role], dict[bytes | None, str], set[bytes | None]]:
    """Map tokens' digests to roles, and to names; the third are the urgent ones. Raises ValueError
    with the number of an invalid line."""
    roles: dict[bytes | None, Role] = {}
    names: dict[bytes | None, str] = {}
    urgent: set[bytes | None] = set()
    lines: dict[bytes, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith(b"#"):
            continue
        where = f"{path}, line {number}"
        if words[0] not in ROLES:  # not quoted, because it may be a token
            raise ValueError(f"{where}: the first word is not one of {', '.join(NAMES.values())}")
        is_urgent = words[-1] == _URGENT
        if is_urgent:
            words.pop()
        if len(words) not in (2, 3):
            raise ValueError(
                f"{where}: expected only a role, one token, and perhaps a name and "
                "max-priority=high"
            )
        if len(words) == 3 and _NAME.fullmatch(words[2]) is None:  # not quoted either
            raise ValueError(
                f"{where}: the word after the token is not max-priority=high, nor a name of 1 to "
                "32 letters, digits and -._~"
            )
        if _TOKEN.fullmatch(words[1]) is None:
            raise ValueError(
                f"{where}: the token has characters other than letters, digits and -._~+/, with ="
                " at its end"
            )
        digest = digest_of(words[1])
        if digest in roles:
            raise ValueError(f"{where}: the same token as on line {lines[digest]}")
        roles[digest], lines[digest] = ROLES[words[0]], number
        if len(words) == 3:
            names[digest] = words[2].decode("ascii")
        if is_urgent:
            urgent.add(digest)
    if not roles:
        raise ValueError(f"{path} has no tokens: expected lines `ROLE TOKEN`")
    return roles, names, urgent
