"""Why the blocks of a prompt are not known, or not all of them."""

from enum import StrEnum
from typing import NamedTuple


class Why(StrEnum):
    """In a word, for headers, the access log and the metric: docs/guide/prompts.md has them."""

    OFF = "off"
    PATH = "path"
    FORM = "form"
    SEVERAL = "several"
    MEDIA = "media"
    CHANGED = "changed"
    SALT = "salt"
    NEW = "new"
    BEGINNING = "beginning"
    TIMEOUT = "timeout"
    BUSY = "busy"
    REFUSED = "refused"
    FAILED = "failed"


class Unknown(NamedTuple):
    """The word, and what exactly it was in this request, for people."""

    why: Why
    text: str
