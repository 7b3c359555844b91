"""API keys: which requests may pass, how many of them, and whose they are.

Owns: the check of `Authorization: Bearer` and `x-api-key`, answers to requests that do not pass.
Knows nothing of: bodies, models, how limits are counted (`limits`). Keys are held as digests and
never logged. Runs without torch.
"""

import hashlib
import hmac
import math
from collections.abc import Iterable, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from deepdraft.config import ApiKey
from deepdraft.errors import DeepdraftError
from deepdraft.server.identify import request_id
from deepdraft.server.limits import Limits, TooManyRequests
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


def tenant(request: Request) -> str | None:
    """The name of the key that a request came with; None where the server asks for none."""
    return request.scope.get("deepdraft.tenant")


def named_keys(plain: Sequence[str], keys: Sequence[ApiKey] = ()) -> tuple[ApiKey, ...]:
    """All keys with names: those given as they are get `key-1`, `key-2`, ..."""
    numbered = (
        ApiKey(name=f"key-{i}", sha256=_digest(key.encode()).hex())
        for i, key in enumerate(dict.fromkeys(plain), 1)
    )
    return (*numbered, *keys)


class KeyGate:
    """Lets a request through to `app` if one of its keys is valid, else answers 401 or 429."""

    def __init__(self, app: ASGIApp, keys: Sequence[ApiKey], limits: Limits | None = None) -> None:
        """`keys`: the valid ones, at least one; `limits`: theirs, by default counted here."""
        if not keys:
            raise ValueError("a gate without keys would let nobody in")
        self._app, self._limits = app, limits or Limits(keys)
        self._keys = tuple((bytes.fromhex(key.sha256), key) for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] == "http" and not _is_open(scope["path"]):
            given = presented_keys(scope["headers"])
            match = self._match(given)
            if match is None:
                what = "the API key is not valid" if given else "the request has no API key"
                error: DeepdraftError = Unauthorized(
                    f"{what}; send one as `Authorization: Bearer KEY` or as `x-api-key: KEY`"
                )
                headers = {"www-authenticate": "Bearer"}
                await refusal(error, scope, headers)(scope, receive, send)
                return
            scope["deepdraft.owner"], key = match
            scope["deepdraft.tenant"] = key.name
            wait_s = await self._limits.request(key.name)
            if wait_s:
                error = TooManyRequests(
                    f"this key may send {key.requests_per_minute:g} requests a minute; "
                    f"the next one in {wait_s:.0f} s"
                )
                headers = {"retry-after": str(math.ceil(wait_s))}
                await refusal(error, scope, headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _match(self, given: Sequence[bytes]) -> tuple[bytes, ApiKey] | None:
        """A valid key with its digest. Every pair is compared, so that time tells nothing."""
        found = None
        for key in given:
            digest = _digest(key)
            for valid in self._keys:
                if hmac.compare_digest(digest, valid[0]):
                    found = valid
        return found


def refusal(error: DeepdraftError, scope: Scope, headers: dict[str, str]) -> Response:
    """The answer for a request that does not pass."""
    headers["x-request-id"] = request_id(Request(scope))
    return Response(
        msgspec.json.encode(body_for_path(error, scope["path"])),
        error.http_status,
        headers,
        media_type="application/json",
    )


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or is_page(path)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
