"""Every error a user can see, as one tree.

    DeepdraftError
      ConfigError            a setting or a config.json value (says the key's path)
      CheckpointError        files of a checkpoint: missing, corrupt, left over, wrong shape, dtype
      StateError             a sequence cannot be rolled back, resumed or placed as asked
      RequestError           a request is wrong (HTTP 400)
        PromptTooLong        prompt and answer do not fit the context (HTTP 400)
        UnknownModel         no such model is served here (HTTP 404)
      Overloaded             the queue is full or the server is draining (HTTP 503)
      EngineError            the engine failed while serving (HTTP 500)
        RankError            a process of a tensor-parallel model died, failed or hung

A message says what was wrong, where, and what to do.
"""

_MOST_QUOTED = 2000


class DeepdraftError(Exception):
    """Base of all errors of deepdraft. `http_status`, `kind` and `code` shape the HTTP answer."""

    http_status = 500
    kind = "server_error"
    code = "internal_error"
    exit_code = 2
    """Of a command that ends with this error."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ConfigError(DeepdraftError):
    """A setting is wrong, unknown or contradicts another one."""


class CheckpointError(DeepdraftError):
    """A checkpoint's files do not hold what they must."""


class StateError(DeepdraftError):
    """A sequence's state does not allow the operation; nothing was changed."""


class RequestError(DeepdraftError):
    """The request is wrong; the client must change it.

    A message that quotes the client's own megabytes is cut to its ends.
    """

    http_status = 400
    kind = "invalid_request_error"
    code = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        if len(message) > _MOST_QUOTED:
            half = _MOST_QUOTED // 2
            message = f"{message[:half]} [...] {message[-half:]}"
        super().__init__(message, param=param)


class PromptTooLong(RequestError):
    """The prompt, or the prompt with the requested answer, does not fit the context."""

    code = "context_length_exceeded"


class UnknownModel(RequestError):
    """No model of that name is served here."""

    http_status = 404
    code = "model_not_found"


class Overloaded(DeepdraftError):
    """The server takes no more work now; try again later."""

    http_status = 503
    kind = "overloaded_error"
    code = "overloaded"


class EngineError(DeepdraftError):
    """The engine failed while it worked on a request."""


class RankError(EngineError):
    """One of the processes of a tensor-parallel model died, failed or hung; all were ended."""

    exit_code = 3

    def __init__(self, message: str, *, exit_code: int = 3) -> None:
        super().__init__(message)
        self.exit_code = exit_code
