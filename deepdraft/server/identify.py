"""The id of an HTTP request: the client's own, or one made for it.

Owns: what a given id may look like. Knows nothing of: what the request asks for.
"""

import re
import secrets

from starlette.requests import Request

_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:/+=@\-]{1,128}\Z")


def given_id(request: Request) -> str | None:
    """The X-Request-Id that the client gave, if it is one that a log can hold."""
    given = request.headers.get("x-request-id", "")
    return given if _REQUEST_ID.match(given) else None


def trace_id(request: Request) -> str | None:
    """The id of the trace that the client's request belongs to (W3C `traceparent`)."""
    found = _TRACE_PARENT.match(request.headers.get("traceparent", ""))
    return found[1] if found and found[1].strip("0") else None


def request_id(request: Request) -> str:
    """The client's own id of a request, or one made for it."""
    known = request.scope.get("deepdraft.request_id")
    if known is None:
        known = given_id(request) or f"req-{secrets.token_hex(12)}"
        request.scope["deepdraft.request_id"] = known
    return known
