"""A bearer token that stands in a file, and is replaced there from time to time."""

import logging
import re
from typing import Final

from lean_selector.outbound.watched_file import WatchedFile

log = logging.getLogger("lean_selector.outbound")

_TOKEN: Final = re.compile(rb"[!-~]+")  # what a header can carry; the rest is not for us to judge
_MOST_BYTES: Final = 64 * 1024


class TokenFile:
    """The token of now. While a file cannot be read, the token that it held last is used."""

    def __init__(self, path: str) -> None:
        """Raises OSError or ValueError, in one clear line, where there is no token at first."""
        self._file = WatchedFile(path, _MOST_BYTES)
        self._complains = False
        self._token = _token(path, self._file.read()[0])

    def token(self) -> bytes:
        try:
            text, is_new = self._file.read()
            if is_new:
                self._token = _token(self._file.path, text)
            self._complains = False
        except (OSError, ValueError) as error:
            if not self._complains:
                log.warning("the last token is used: %s", error)
            self._complains = True
        return self._token


def _token(path: str, text: bytes) -> bytes:
    token = text.strip()
    if _TOKEN.fullmatch(token) is None:
        raise ValueError(f"{path} holds no bearer token")
    return token
