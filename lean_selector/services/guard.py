"""Routes that ask for a token: each endpoint behind the role that its route names.

Stands in front of the endpoints only where tokens are asked for; without them a service has its
routes as they are. Whose token has which role is `access.token_file`'s.
"""

from lean_selector.access.refusals import refusal_of
from lean_selector.access.roles import OPEN, READ, Role
from lean_selector.access.token_file import AccessTokens
from lean_selector.http1.reader import Request
from lean_selector.services.replies import Answer, error_reply
from lean_selector.services.routes import Abridged, Endpoint, Route


class Guard:
    """What stands before the routes of one service."""

    def __init__(self, tokens: AccessTokens) -> None:
        self._tokens = tokens

    def routes(self, routes: tuple[Route, ...]) -> tuple[Route, ...]:
        """The same, guarded; those that are open to everybody are left as they are, or abridged."""
        return tuple(
            (method, path, role, self._behind(role, endpoint))
            for method, path, role, endpoint in routes
        )

    def _behind(self, role: Role, endpoint: Endpoint) -> Endpoint:
        if role != OPEN:
            return self._guarded(endpoint, role)
        return self._abridged(endpoint) if isinstance(endpoint, Abridged) else endpoint

    def _abridged(self, endpoint: Abridged) -> Endpoint:
        tokens = self._tokens

        def answer(request: Request, param: bytes | None) -> Answer:
            knows = tokens.role_of(request.credential) >= READ
            return (endpoint.whole if knows else endpoint.brief)(request, param)

        return answer

    def unrouted(self, request: Request) -> bytes | None:
        """The answer to a request of no route, so that nobody without a token learns which there
        are; None for whoever has one."""
        role = self._tokens.role_of(request.credential)
        return None if role >= READ else _refused(request, role, READ)

    def _guarded(self, endpoint: Endpoint, needed: Role) -> Endpoint:
        tokens, seen = self._tokens, self._tokens.seen

        def answer(request: Request, param: bytes | None) -> Answer:
            role = seen.get(request.credential)
            if role is None:
                role = tokens.role_of(request.credential)
            if role < needed:
                return _refused(request, role, needed)
            return endpoint(request, param)

        return answer


def _refused(request: Request, role: Role, needed: Role) -> bytes:
    refusal = refusal_of(request.credential, role, needed)
    return error_reply(request, refusal.status, refusal.text, refusal.line)
