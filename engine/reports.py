"""Small conversions between what happened and what a message says of it."""

import msgspec

from twopool.protocol.errors import ContextLengthError, InvalidRequestError, TransferError, TwopoolError
from twopool.protocol.messages import ErrorInfo, ErrorKind, HandoverReport, PrefillReport, TokenDelta


def error_info(error: Exception) -> ErrorInfo:
    """An error as the message field that peers and routers understand."""
    kind: ErrorKind = "internal"
    match error:
        case ContextLengthError():
            kind = "context_length"
        case InvalidRequestError() | ValueError():
            kind = "invalid_request"
        case TransferError():
            kind = "transfer"
        case TimeoutError():
            kind = "timeout"
    message = error.message if isinstance(error, TwopoolError) else str(error) or type(error).__name__
    param = error.param if isinstance(error, TwopoolError) else None
    return ErrorInfo(kind=kind, message=message[:4096], param=param, retryable=kind == "transfer")


def with_reports(
    delta: TokenDelta, *, prefill: PrefillReport | None = None, handover: HandoverReport | None = None
) -> TokenDelta:
    """``delta`` carrying the reports given, its own where none is."""
    return msgspec.structs.replace(delta, prefill=prefill or delta.prefill, handover=handover or delta.handover)
