"""The page at `/`: static files, and the headers that fence it and its preview in.

Owns: which files there are, their content types, caching, Content-Security-Policy.
Knows nothing of: what the page does, the API. Runs without torch.

The files lie in `deepdraft/page`; there is no build step. `preview.html` is the document in which
HTML of an answer runs. It is a document of its own because a frame filled from the page itself
would inherit the page's policy, under which no inline script runs.
"""

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

DIRECTORY = Path(__file__).resolve().parent.parent / "page"
PREFIX = "/page/"
"""Where the files are served; `/` itself is index.html. Both are open without an API key."""

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def _policy(**directives: str) -> str:
    return "; ".join(f"{name.replace('_', '-')} {value}" for name, value in directives.items())


# Nothing but the server's own files; no inline script or style, and no string ever becomes markup
# (the last two directives), so text of a model cannot run here whatever the page's code does.
_PAGE_POLICY = _policy(
    default_src="'none'",
    script_src="'self'",
    style_src="'self'",
    img_src="'self'",
    connect_src="'self'",
    frame_src="'self'",
    base_uri="'none'",
    form_action="'none'",
    frame_ancestors="'none'",
    require_trusted_types_for="'script'",
    trusted_types="'none'",
)

# The other way round: inline code runs, and reaches nothing. The sandbox makes the origin opaque
# even where the document is opened outside the page's frame.
_PREVIEW_POLICY = _policy(
    default_src="'none'",
    script_src="'unsafe-inline'",
    style_src="'unsafe-inline'",
    img_src="data: blob:",
    media_src="data: blob:",
    font_src="data:",
    base_uri="'none'",
    form_action="'none'",
    frame_ancestors="'self'",
    sandbox="allow-scripts",
)

_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-dns-prefetch-control": "off",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=(), usb=(), serial=(), midi=()",
    # Asked for anew each time, and answered 304 while it is the same.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page with everything that its answer needs."""

    content: bytes
    headers: dict[str, str]


@functools.cache
def page_files() -> dict[str, PageFile]:
    """The files by name. They are part of the package, so they are read once."""
    files = {}
    for path in sorted(DIRECTORY.iterdir()):
        if path.suffix not in _TYPES:
            continue
        content = path.read_bytes()
        headers = {
            **_HEADERS,
            "content-type": _TYPES[path.suffix],
            "etag": f'"{hashlib.sha256(content).hexdigest()[:20]}"',
        }
        policy = _PREVIEW_POLICY if path.name == "preview.html" else _PAGE_POLICY
        headers["content-security-policy"] = policy
        files[path.name] = PageFile(content, headers)
    return files


def is_page(path: str) -> bool:
    """Whether a path belongs to the page."""
    return path == "/" or path.startswith(PREFIX)


def page_response(request: Request) -> Response | None:
    """The answer for `/` or a file of the page; None where there is no such file."""
    name = request.path_params.get("name", "index.html")
    file = page_files().get(name)
    if file is None:
        return None
    if request.headers.get("if-none-match") == file.headers["etag"]:
        return Response(status_code=304, headers=file.headers)
    return Response(file.content, headers=file.headers)
