"""API keys: which requests may pass.

Owns: the check of `Authorization: Bearer` and `x-api-key`, the answer to a request without a key.
Knows nothing of: bodies, models. Keys are held as digests and never logged. Runs without torch.
"""

import hashlib
import hmac
from collections.abc import Iterable, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from deepdraft.errors import DeepdraftError
from deepdraft.server.page import is_page
from deepdraft.server.wire_errors import body_for_path

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
"""Paths that need no key: a load balancer and a scraper have none. The page's files need none
either: a browser that opens the page has nothing to send yet, and they hold no data."""

_BEARER = b"bearer "


class Unauthorized(DeepdraftError):
    """No valid API key came with the request (HTTP 401)."""

    http_status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


def presented_keys(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """Every key that a request's headers hold; clients may send both spellings."""
    keys = []
    for name, value in headers:
        if name == b"x-api-key":
            keys.append(value.strip())
        elif name == b"authorization" and value[: len(_BEARER)].lower() == _BEARER:
            keys.append(value[len(_BEARER) :].strip())
    return keys


def owner(request: Request) -> bytes:
    """The digest of the key that a request came with; empty where the server asks for none."""
    return request.scope.get("deepdraft.owner", b"")


class KeyGate:
    """Lets a request through to `app` if one of its keys is valid, else answers 401."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        """`keys`: the valid ones, at least one."""
        if not keys:
            raise ValueError("a gate without keys would let nobody in")
        self._app = app
        self._digests = tuple(_digest(key.encode()) for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] == "http" and not _is_open(scope["path"]):
            given = presented_keys(scope["headers"])
            match = self._match(given)
            if match is None:
                await self._refuse(given, scope["path"])(scope, receive, send)
                return
            scope["deepdraft.owner"] = match
        await self._app(scope, receive, send)

    def _match(self, given: Sequence[bytes]) -> bytes | None:
        """The digest of a valid key. Every pair is compared, so that time tells nothing."""
        found = None
        for key in given:
            digest = _digest(key)
            for valid in self._digests:
                if hmac.compare_digest(digest, valid):
                    found = valid
        return found

    def _refuse(self, given: Sequence[bytes], path: str) -> Response:
        what = "the API key is not valid" if given else "the request has no API key"
        error = Unauthorized(
            f"{what}; send one as `Authorization: Bearer KEY` or as `x-api-key: KEY`"
        )
        return Response(
            msgspec.json.encode(body_for_path(error, path)),
            error.http_status,
            {"www-authenticate": "Bearer"},
            media_type="application/json",
        )


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or is_page(path)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
