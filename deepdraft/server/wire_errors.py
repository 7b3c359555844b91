"""Errors as JSON bodies, in the shape that a client of each API reads.

Owns: the error objects of OpenAI's APIs and of the Messages API, and which paths get which.
Knows nothing of: request bodies, the engine. Runs without torch.
"""

import asyncio
import re
from typing import Any

from deepdraft.errors import DeepdraftError

STOPS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
"""What ends a task or the process. Any other BaseException is a fault, such as the panic of a
library written in Rust, and is answered like one."""
_MESSAGES_PATH = re.compile(r"/anthropic(/.*)?\Z|(/v1|/beta)?/messages(/.*)?\Z", re.DOTALL)
_MESSAGES_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def shown_error(error: BaseException) -> DeepdraftError:
    """What a client may see of an error: of a foreign one nothing."""
    if isinstance(error, DeepdraftError):
        return error
    return DeepdraftError("internal error; the server's log has the details")


def error_body(error: BaseException) -> dict[str, Any]:
    """The nested error object of OpenAI's APIs."""
    shown = shown_error(error)
    fields = {
        "message": shown.message,
        "type": shown.kind,
        "param": shown.param,
        "code": shown.code,
    }
    return {"error": fields}


def messages_error_body(error: BaseException, request_id: str | None = None) -> dict[str, Any]:
    """The error object of the Messages API, which has no place for a field's path."""
    shown = shown_error(error)
    return messages_error_object(shown.http_status, shown.message, request_id)


def messages_error_object(
    status: int, message: str, request_id: str | None = None
) -> dict[str, Any]:
    """The same, from a status and a message."""
    kind = _MESSAGES_TYPES.get(status, "api_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": request_id,
    }


def speaks_messages(path: str) -> bool:
    """Whether a path belongs to the Messages API."""
    return _MESSAGES_PATH.match(path) is not None


def body_for_path(error: BaseException, path: str) -> dict[str, Any]:
    """The error object in the shape of the API that `path` belongs to."""
    return messages_error_body(error) if speaks_messages(path) else error_body(error)
