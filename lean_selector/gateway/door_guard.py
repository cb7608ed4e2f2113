"""The gateway's door where tokens are asked for: nobody gets to a worker without one.

Listing models needs `read`, everything else `write`, for it makes a worker work. The token is for
us, so no worker is sent it. Refusals have OpenAI's shape.
"""

from collections.abc import Callable

from lean_selector.gateway.counts import Counts
from lean_selector.gateway.header_lines import without_authorization
from lean_selector.gateway.refusals import refusal
from lean_selector.gateway.request_ids import RequestIds, id_line, id_of
from lean_selector.http.head import Request
from lean_selector.http.response import PendingReply
from lean_selector.service.access import READ, WRITE, AccessTokens, refusal_of

Door = Callable[[Request], bytes | PendingReply]


def guarded(door: Door, tokens: AccessTokens, counts: Counts) -> Door:
    """The same door for those who have a token."""
    ids = RequestIds()

    def app(request: Request) -> bytes | PendingReply:
        role = tokens.role_of(request.credential)
        needed = READ if request.path == b"/v1/models" and request.method == b"GET" else WRITE
        if role < needed:
            refused = refusal_of(request.credential, role, needed)
            counts.answers[refused.status] += 1
            line = id_line(id_of(request.section, ids.new())) + refused.line
            return refusal(refused.status, refused.text, refused.code, line)
        if request.credential is not None:
            request.section = without_authorization(request.section)
        return door(request)

    return app
