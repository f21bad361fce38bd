"""The one error hierarchy: each error knows its HTTP status and its OpenAI error code.

Raised where the fact is known, translated to HTTP once, at the router's edge.
"""

from typing import ClassVar


class TwopoolError(Exception):
    """Base of every error twopool raises on purpose.

    ``message`` is one sentence for the user; ``param`` names the request field or command-line flag at fault.
    """

    http_status: ClassVar[int] = 500
    error_type: ClassVar[str] = "internal_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ConfigError(TwopoolError):
    """A flag or configuration value is wrong; ``param`` is the flag."""


class ModelError(TwopoolError):
    """A model cannot be found, read or served."""


class ProtocolError(TwopoolError):
    """A message from a peer is malformed, oversized, unknown or of another protocol version."""


class TransferError(TwopoolError):
    """KV blocks could not be moved; another source, or computing again, may succeed. ``kind`` is what metrics say."""

    kind: ClassVar[str] = "read"


class PairRefusedError(TransferError):
    """KV can never move between these two workers as they are: trying again is of no use while both live."""


class TransferTimeoutError(TransferError):
    """A READ or an answer that belongs to it did not come in time."""

    kind = "timeout"


class PeerLostError(TransferError):
    """The worker read from is gone."""

    kind = "peer_lost"


class TicketError(TransferError):
    """What a source offered is not what was asked of it."""

    kind = "ticket"


class StaleKvError(TransferError):
    """The source reused its blocks before the reader had confirmed them."""

    kind = "stale"


class CorruptKvError(TransferError):
    """Bytes that arrived are not those the source has: their checksums differ."""

    kind = "corrupt"


class KvConversionError(TransferError):
    """A number that was read does not fit the dtype of the pool it was read for."""

    kind = "conversion"


class CollectiveError(TwopoolError):
    """The ranks of a tensor-parallel group can no longer compute together: one is gone, late, or at another step.

    The group cannot go on; its worker has to end.
    """


class InvalidRequestError(TwopoolError):
    """The client's request is wrong; ``param`` names the field."""

    http_status = 400
    error_type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """Prompt and requested tokens do not fit the model's context."""

    code = "context_length_exceeded"


class AuthenticationError(TwopoolError):
    """No valid API key came with the request."""

    http_status = 401
    error_type = "invalid_request_error"
    code = "invalid_api_key"


class ModelNotFoundError(TwopoolError):
    """The request names a model that is not served here."""

    http_status = 404
    error_type = "invalid_request_error"
    code = "model_not_found"


class NotFoundError(TwopoolError):
    """No such path."""

    http_status = 404
    error_type = "invalid_request_error"
    code = "not_found"


class RequestTooLargeError(TwopoolError):
    """The body or the headers exceed their limit."""

    http_status = 413
    error_type = "invalid_request_error"
    code = "request_too_large"


class _RetryLater(TwopoolError):
    """The same request may succeed later; ``retry_after_s`` becomes the Retry-After header (whole seconds)."""

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int = 1) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class OverloadedError(_RetryLater):
    """Queues are full."""

    http_status = 429
    error_type = "rate_limit_error"
    code = "overloaded"


class UnavailableError(_RetryLater):
    """No worker can serve the request now."""

    http_status = 503
    error_type = "service_unavailable_error"
    code = "no_workers"


class WorkerFailedError(TwopoolError):
    """A worker failed the request and it cannot be resumed."""

    http_status = 500
    error_type = "internal_error"
    code = "worker_failed"


class DeadlineError(TwopoolError):
    """The request did not finish within its deadline."""

    http_status = 504
    error_type = "timeout_error"
    code = "deadline_exceeded"
