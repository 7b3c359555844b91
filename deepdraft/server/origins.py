"""Web pages that may not use a server which no API key guards.

Owns: which requests of browsers are refused there, by the page that sent them (`Origin`) and by the
name that they were sent to (`Host`).
Knows nothing of: keys, bodies, the headers that let a page read an answer. Runs without torch.

A browser sends a page's simple requests to any address, this machine's own too, without asking
first; that the page may not read the answer does not stop the work. And a name that its owner
points at this machine (DNS rebinding) makes a hostile page one of the server's own.
"""

import ipaddress
import re
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from deepdraft.errors import DeepdraftError
from deepdraft.server.auth import OPEN_PATHS, refusal

_ONLY_READ = ("GET", "HEAD", "OPTIONS")
_AUTHORITY = re.compile(r"(\[[^\]]*\]|[^:]*)(:\d*)?\Z")
_LOCAL_ENDS = (".localhost", ".local", ".internal")
"""Names that nobody can register."""


class PageRefused(DeepdraftError):
    """A web page may not use this server (HTTP 403)."""

    http_status = 403
    kind = "permission_error"
    code = "origin_not_allowed"


class PageGate:
    """Lets a request through to `app` unless a page of another origin sent it, else answers 403."""

    def __init__(self, app: ASGIApp, origins: Sequence[str], host: str) -> None:
        """`origins`: of the pages that may, "*" for all; `host`: the address listened on."""
        self._app, self._origins = app, frozenset(origins)
        self._names = {socket.gethostname().lower(), host.lower()}
        self._names |= {urlsplit(origin).hostname or "" for origin in origins}
        self._checks_host = _is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] == "http" and "*" not in self._origins:
            message = self._refused(scope)
            if message is not None:
                await refusal(PageRefused(message), scope, {})(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refused(self, scope: Scope) -> str | None:
        headers = {n.decode("latin-1"): v.decode("latin-1") for n, v in scope["headers"]}
        host, origin = headers.get("host", "").lower(), headers.get("origin", "")
        if self._checks_host and scope["path"] not in OPEN_PATHS and not self._is_own(host):
            return (
                f"this server is for its own machine and has no API key, so it does not answer to "
                f"the name {host[:100]!r}; add https://NAME to server.cors_origins, or set a key"
            )
        # Programs with a window (`app://`, `vscode-webview://`) are no web pages.
        is_page = origin == "null" or origin.startswith(("http://", "https://"))
        if scope["method"] in _ONLY_READ or not is_page or origin in self._origins:
            return None
        # Behind a proxy the page's origin need not be the name that comes here; a browser knows.
        if headers.get("sec-fetch-site") == "same-origin":
            return None
        if origin.partition("://")[2].lower() == host:
            return None
        return (
            f"this server has no API key, so pages of {origin[:100]!r} may not use it; add that "
            "origin to server.cors_origins, or set a key"
        )

    def _is_own(self, host: str) -> bool:
        match = _AUTHORITY.match(host)
        if match is None:
            return False
        name = match[1].strip("[]").rstrip(".")
        return "." not in name or name in self._names or name.endswith(_LOCAL_ENDS) or _is_ip(name)


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_ip(host) and ipaddress.ip_address(host).is_loopback)
