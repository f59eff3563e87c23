"""The one tree of errors.

    OctavoError
    ├── ClientError            the request is wrong; maps to a 4xx answer
    │   ├── NotFoundError      404: no such model, route or adapter
    │   ├── OverloadedError    429: the queue is full; try again later
    │   └── ContextLengthError 400 with code context_length_exceeded
    └── ServerError            we are at fault, or the machine is
        ├── ConfigError        a setting is wrong or impossible; ends start-up
        │   └── UsageError     of a command line: options that do not go together
        ├── LoadError          a model's files are missing, damaged or not supported
        ├── RequestFailed      one request failed inside the engine; the others go on
        └── EngineDead         the engine is gone; every open stream gets this

Promises: a message names what is wrong, where, and what to do, in one sentence.
Does not know: HTTP (see `http.errors`).
"""


class OctavoError(Exception):
    """Root of every error Octavo raises on purpose."""


class ClientError(OctavoError, ValueError):
    """The caller's mistake. `param` is the field's name as the caller wrote it.

    Also a `ValueError`, which is what scripts catch for a wrong argument.
    """

    status = 400
    default_code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code


class NotFoundError(ClientError):
    """What was named does not exist here."""

    status = 404
    default_code = "not_found"


class OverloadedError(ClientError):
    """The engine takes no more work now (OPS-10)."""

    status = 429
    default_code = "overloaded"


class ContextLengthError(ClientError):
    """The prompt does not fit the model's context."""

    default_code = "context_length_exceeded"


class ServerError(OctavoError):
    """Our side's fault: configuration, files, memory, a crash."""


class ConfigError(ServerError):
    """A setting is wrong, misspelled or impossible on this machine."""


class UsageError(ConfigError):
    """Options that do not go together: ends the command with the exit code of wrong usage."""


class LoadError(ServerError):
    """Model files are missing, damaged, or of a kind that is not supported."""


class RequestFailed(ServerError):
    """One request failed inside the engine."""


class EngineDead(ServerError):
    """The engine process or its worker is gone; nothing more will come."""
