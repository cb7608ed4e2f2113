"""What stands before the routes of a service that asks for tokens.

The gate holds each route's role against that of the token; whoever was not seen before, or may not,
comes here. Whose token has which role is `access.token_file`'s.
"""

from lean_selector.access.refusals import refusal_of
from lean_selector.access.roles import READ, Role
from lean_selector.access.token_file import AccessTokens
from lean_selector.http.head import Request
from lean_selector.services.replies import Answer, error_reply
from lean_selector.services.routes import Abridged, Endpoint, Handed


class Guard:
    """One for all routes of a service. `seen` are roles by credential, as the tokens have them."""

    def __init__(self, tokens: AccessTokens) -> None:
        self._tokens = tokens
        self.seen = tokens.seen

    def refused(
        self, request: Request, needed: int, endpoint: Endpoint | None = None
    ) -> bytes | None:
        """The answer to a request of this endpoint whose token has not the role; None where it
        has."""
        role = self._tokens.role_of(request.credential)
        if role >= needed:
            return None
        refusal = refusal_of(request.credential, role, Role(needed))
        if isinstance(endpoint, Handed):
            return endpoint.refused(refusal)
        return error_reply(request, refusal.status, refusal.text, refusal.line)

    def endpoint(self, endpoint: Endpoint) -> Endpoint:
        """The same, but where it tells whoever has no token less."""
        return self._abridged(endpoint) if isinstance(endpoint, Abridged) else endpoint

    def _abridged(self, endpoint: Abridged) -> Endpoint:
        tokens = self._tokens

        def answer(request: Request, param: bytes | None) -> Answer:
            knows = tokens.role_of(request.credential) >= READ
            return (endpoint.whole if knows else endpoint.brief)(request, param)

        return answer
