"""What is said to whoever may not do what they ask: status, words, and the header line.

RFC 6750 section 3: who sends no bearer token is told of no error in the line.
"""

from typing import Final

from lean_selector.access.roles import NAMES, OPEN, Role

_CHALLENGE: Final = b'www-authenticate: Bearer realm="lean-selector"%b\r\n'


class Refusal:
    """One answer; `line` is a whole header line, `code` the word for programs in OpenAI's shape."""

    __slots__ = ("code", "line", "status", "text")

    def __init__(self, status: int, text: str, attributes: bytes = b"") -> None:
        self.status = status
        self.text = text
        self.code = "invalid_api_key" if status == 401 else "insufficient_permissions"
        self.line = _CHALLENGE % attributes


NO_TOKEN: Final = Refusal(401, "a bearer token is required")
UNKNOWN_TOKEN: Final = Refusal(401, "the bearer token is not known", b', error="invalid_token"')


def refusal_of(credential: bytes | None, role: Role, needed: Role) -> Refusal:
    """To a request with this credential, whose `role` is below the one that is needed."""
    if role == OPEN:
        return UNKNOWN_TOKEN if credential else NO_TOKEN
    name = NAMES[needed]
    return Refusal(
        403,
        f"the token's role is {NAMES[role]}, and this needs {name}",
        b', error="insufficient_scope", scope="%b"' % name.encode(),
    )
