"""What a service declares of each of its routes."""

from collections.abc import Callable

from lean_selector.access.refusals import Refusal
from lean_selector.access.roles import Role
from lean_selector.http.head import Request
from lean_selector.services.replies import Answer

Endpoint = Callable[[Request, bytes | None], Answer]


class Abridged:
    """An endpoint of everybody's that, where tokens are asked for, tells whoever has none less."""

    __slots__ = ("brief", "whole")

    def __init__(self, whole: Endpoint, brief: Endpoint) -> None:
        self.whole = whole
        self.brief = brief

    def __call__(self, request: Request, param: bytes | None) -> Answer:
        return self.whole(request, param)


class Handed:
    """An endpoint whose errors its caller hands on to clients of its own: they have the shape that
    those read, and so has what is said to a caller who may not ask."""

    __slots__ = ("_answer", "refused")

    def __init__(self, answer: Endpoint, refused: Callable[[Refusal], bytes]) -> None:
        self._answer = answer
        self.refused = refused

    def __call__(self, request: Request, param: bytes | None) -> Answer:
        return self._answer(request, param)


# Method, path template, whose it is where tokens are asked for, what answers. There is no default
# for the role: whoever adds a route has to say it.
Route = tuple[str, str, Role, Endpoint]
