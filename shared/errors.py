"""The total table of errors: every refusal and failure of the mesh is one `Reason`, and every reason has one row.

Owns the mapping between domain errors, gRPC status (with google.rpc details) and HTTP. The one rule: raise
`TrunklineError` with a message that is safe to show to a client: no prompt text, no token ids, no addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final, cast

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

DOMAIN: Final = "trunkline"
STATUS_DETAILS_KEY: Final = "grpc-status-details-bin"

# A status travels in HTTP/2 trailers, whose default limit at clients is 8 KiB, base64 and percent-encoding included.
MAX_MESSAGE_CHARS: Final = 500
MAX_STATUS_BYTES: Final = 4000


class Reason(StrEnum):
    """Why a request was refused or failed. Names are public: clients see them in ErrorInfo and in HTTP bodies."""

    BAD_FIELD = "BAD_FIELD"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    TOO_LARGE = "TOO_LARGE"
    KEY_UNKNOWN = "KEY_UNKNOWN"
    KEY_EXPIRED = "KEY_EXPIRED"
    MODEL_FORBIDDEN = "MODEL_FORBIDDEN"
    SCOPE_FORBIDDEN = "SCOPE_FORBIDDEN"
    MODEL_UNKNOWN = "MODEL_UNKNOWN"
    REQUEST_UNKNOWN = "REQUEST_UNKNOWN"
    IDEMPOTENCY_CONFLICT = "IDEMPOTENCY_CONFLICT"
    RESUME_DIVERGED = "RESUME_DIVERGED"
    OWNER_MOVED = "OWNER_MOVED"
    RPM = "RPM"
    TPM = "TPM"
    CONCURRENCY = "CONCURRENCY"
    QUEUE_FULL = "QUEUE_FULL"
    SLOW_READER = "SLOW_READER"
    CLIENT_GONE = "CLIENT_GONE"
    CLIENT_CANCEL = "CLIENT_CANCEL"
    ENGINE_FAULT = "ENGINE_FAULT"
    NAN_LOGITS = "NAN_LOGITS"
    POISON_SUSPECTED = "POISON_SUSPECTED"
    INTERNAL = "INTERNAL"
    FEATURE_OFF = "FEATURE_OFF"
    PROTOCOL_MISMATCH = "PROTOCOL_MISMATCH"
    NO_REPLICA = "NO_REPLICA"
    DRAINING = "DRAINING"
    VERSION_GONE = "VERSION_GONE"
    OWNER_LOST = "OWNER_LOST"
    MOVED = "MOVED"
    STATE_AWAY = "STATE_AWAY"
    OUTCOME_UNKNOWN = "OUTCOME_UNKNOWN"
    WORKER_LOST = "WORKER_LOST"
    QUEUE_EXPIRED = "QUEUE_EXPIRED"
    WOULD_MISS = "WOULD_MISS"
    RUN_EXPIRED = "RUN_EXPIRED"


@dataclass(frozen=True)
class Row:
    """How one reason looks outside. `retryable`: the same request may succeed later without being changed."""

    code: grpc.StatusCode
    http: int
    openai_type: str
    retryable: bool


_INVALID = Row(grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error", False)
_UNAUTHENTICATED = Row(grpc.StatusCode.UNAUTHENTICATED, 401, "authentication_error", False)
_FORBIDDEN = Row(grpc.StatusCode.PERMISSION_DENIED, 403, "permission_error", False)
_NOT_FOUND = Row(grpc.StatusCode.NOT_FOUND, 404, "not_found_error", False)
_CONFLICT = Row(grpc.StatusCode.ALREADY_EXISTS, 409, "conflict_error", False)
_LIMITED = Row(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error", True)
_CANCELLED = Row(grpc.StatusCode.CANCELLED, 499, "cancelled", False)
_INTERNAL = Row(grpc.StatusCode.INTERNAL, 500, "server_error", False)
_UNIMPLEMENTED = Row(grpc.StatusCode.UNIMPLEMENTED, 501, "invalid_request_error", False)
_UNAVAILABLE = Row(grpc.StatusCode.UNAVAILABLE, 503, "server_error", True)
_LATE = Row(grpc.StatusCode.DEADLINE_EXCEEDED, 504, "timeout_error", False)

TABLE: Final[Mapping[Reason, Row]] = MappingProxyType(
    {
        Reason.BAD_FIELD: _INVALID,
        Reason.PROMPT_TOO_LONG: _INVALID,
        Reason.TOO_LARGE: _INVALID,
        Reason.KEY_UNKNOWN: _UNAUTHENTICATED,
        Reason.KEY_EXPIRED: _UNAUTHENTICATED,
        Reason.MODEL_FORBIDDEN: _FORBIDDEN,
        Reason.SCOPE_FORBIDDEN: _FORBIDDEN,
        Reason.MODEL_UNKNOWN: _NOT_FOUND,
        Reason.REQUEST_UNKNOWN: _NOT_FOUND,
        Reason.IDEMPOTENCY_CONFLICT: _CONFLICT,
        Reason.RESUME_DIVERGED: Row(grpc.StatusCode.ABORTED, 409, "conflict_error", False),
        Reason.OWNER_MOVED: Row(grpc.StatusCode.ABORTED, 409, "conflict_error", True),
        Reason.RPM: _LIMITED,
        Reason.TPM: _LIMITED,
        Reason.CONCURRENCY: _LIMITED,
        Reason.QUEUE_FULL: _LIMITED,
        # The work is done and lost: trying again pays twice, so it is not offered.
        Reason.SLOW_READER: Row(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error", False),
        Reason.CLIENT_GONE: _CANCELLED,
        Reason.CLIENT_CANCEL: _CANCELLED,
        Reason.ENGINE_FAULT: _INTERNAL,
        Reason.NAN_LOGITS: _INTERNAL,
        Reason.POISON_SUSPECTED: _INTERNAL,
        Reason.INTERNAL: _INTERNAL,
        Reason.FEATURE_OFF: _UNIMPLEMENTED,
        Reason.PROTOCOL_MISMATCH: _UNIMPLEMENTED,
        Reason.NO_REPLICA: _UNAVAILABLE,
        Reason.DRAINING: _UNAVAILABLE,
        Reason.VERSION_GONE: _UNAVAILABLE,
        Reason.OWNER_LOST: _UNAVAILABLE,
        Reason.MOVED: _UNAVAILABLE,
        Reason.STATE_AWAY: _UNAVAILABLE,
        Reason.OUTCOME_UNKNOWN: _UNAVAILABLE,
        Reason.WORKER_LOST: _UNAVAILABLE,
        Reason.QUEUE_EXPIRED: _LATE,
        Reason.WOULD_MISS: _LATE,
        Reason.RUN_EXPIRED: _LATE,
    }
)

_QUOTA: Final = frozenset({Reason.RPM, Reason.TPM, Reason.CONCURRENCY, Reason.QUEUE_FULL})


@dataclass(frozen=True)
class Violation:
    """One bad field: its path (`sampling.top_p`) and what is wrong with it."""

    field: str
    description: str


class TrunklineError(Exception):
    """A refusal or failure with a reason from the table. `message` is a sentence that a client may read."""

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        violations: Sequence[Violation] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message
        self.metadata: dict[str, str] = dict(metadata or {})
        self.violations = tuple(violations)
        self.retry_after_s = retry_after_s

    @property
    def row(self) -> Row:
        """This reason's row of the table."""
        return TABLE[self.reason]


class StartError(Exception):
    """A process cannot start; the text is one plain sentence. `lifecycle.run` prints it and exits with 1."""


def to_status(err: TrunklineError) -> status_pb2.Status:
    """The google.rpc.Status of an error: one ErrorInfo, then BadRequest, QuotaFailure, RetryInfo where they apply.

    Never larger than `MAX_STATUS_BYTES`: violations that do not fit are counted in the last one that does.
    """
    status = _status(err, err.violations)
    shown = len(err.violations)
    while shown and status.ByteSize() > MAX_STATUS_BYTES:
        shown //= 2
        more = Violation("", f"{len(err.violations) - shown} more fields are not valid")
        status = _status(err, (*err.violations[:shown], more))
    return status


def _status(err: TrunklineError, violations: Sequence[Violation]) -> status_pb2.Status:
    status = status_pb2.Status(code=err.row.code.value[0], message=err.message[:MAX_MESSAGE_CHARS])
    status.details.add().Pack(
        error_details_pb2.ErrorInfo(reason=err.reason.value, domain=DOMAIN, metadata=err.metadata)
    )
    if violations:
        bad = error_details_pb2.BadRequest()
        for violation in violations:
            bad.field_violations.add(field=violation.field[:128], description=violation.description[:256])
        status.details.add().Pack(bad)
    if err.reason in _QUOTA:
        quota = error_details_pb2.QuotaFailure()
        quota.violations.add(subject=err.metadata.get("subject", err.reason.value), description=status.message)
        status.details.add().Pack(quota)
    if err.retry_after_s is not None:
        delay = Duration()
        delay.FromMilliseconds(max(0, round(err.retry_after_s * 1000)))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def from_status(status: status_pb2.Status) -> TrunklineError | None:
    """The error that `to_status` packed; None where the status carries no ErrorInfo of ours."""
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    has_info = has_retry = False
    for detail in status.details:
        has_info = detail.Unpack(info) or has_info
        has_retry = detail.Unpack(retry) or has_retry
        detail.Unpack(bad)
    if not has_info or info.domain != DOMAIN or info.reason not in Reason.__members__:
        return None
    return TrunklineError(
        Reason(info.reason),
        status.message,
        metadata=info.metadata,
        violations=[Violation(v.field, v.description) for v in bad.field_violations],
        retry_after_s=retry.retry_delay.ToMilliseconds() / 1000 if has_retry else None,
    )


# What a status without our ErrorInfo means: it comes from the transport, a proxy, or a newer peer.
_BARE: Final[Mapping[grpc.StatusCode, tuple[Reason, str]]] = MappingProxyType(
    {
        grpc.StatusCode.CANCELLED: (Reason.CLIENT_CANCEL, "the call was cancelled"),
        grpc.StatusCode.UNKNOWN: (Reason.INTERNAL, "the peer failed without saying why"),
        grpc.StatusCode.INVALID_ARGUMENT: (Reason.BAD_FIELD, "the peer did not accept the request"),
        grpc.StatusCode.DEADLINE_EXCEEDED: (Reason.RUN_EXPIRED, "the call's deadline passed"),
        grpc.StatusCode.NOT_FOUND: (Reason.REQUEST_UNKNOWN, "the peer does not know it"),
        grpc.StatusCode.ALREADY_EXISTS: (Reason.IDEMPOTENCY_CONFLICT, "the peer has another one of this name"),
        grpc.StatusCode.PERMISSION_DENIED: (Reason.SCOPE_FORBIDDEN, "the peer does not allow it"),
        grpc.StatusCode.UNAUTHENTICATED: (Reason.KEY_UNKNOWN, "the peer does not know the caller"),
        # The transport says this of messages beyond its limits.
        grpc.StatusCode.RESOURCE_EXHAUSTED: (Reason.TOO_LARGE, "the message is larger than the peer takes"),
        grpc.StatusCode.FAILED_PRECONDITION: (Reason.INTERNAL, "the peer is in another state than expected"),
        grpc.StatusCode.ABORTED: (Reason.OWNER_MOVED, "the peer broke the call off"),
        grpc.StatusCode.OUT_OF_RANGE: (Reason.BAD_FIELD, "the peer did not accept a value"),
        grpc.StatusCode.UNIMPLEMENTED: (Reason.FEATURE_OFF, "the peer does not offer this call"),
        grpc.StatusCode.INTERNAL: (Reason.INTERNAL, "the peer failed"),
        grpc.StatusCode.UNAVAILABLE: (Reason.NO_REPLICA, "the peer cannot be reached"),
        grpc.StatusCode.DATA_LOSS: (Reason.INTERNAL, "the peer lost data"),
    }
)


def from_rpc(exc: grpc.aio.AioRpcError) -> TrunklineError:
    """The error a peer sent. Without ErrorInfo of ours it is named by its code, and `metadata["grpc"]` holds the code.

    The transport's own text (it names addresses) is left out: raise `from exc` to keep it for the log.
    """
    error = from_status(_details(exc))
    if error is not None:
        return error
    reason, message = _BARE.get(exc.code(), _BARE[grpc.StatusCode.UNKNOWN])
    return TrunklineError(reason, message, metadata={"grpc": exc.code().name})


def _details(exc: grpc.aio.AioRpcError) -> status_pb2.Status:
    status = status_pb2.Status()
    trailers = cast("tuple[tuple[str, str | bytes], ...]", exc.trailing_metadata() or ())
    for key, value in trailers:
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            try:
                status.ParseFromString(value)
            except DecodeError:
                # A proxy's garbage: the code alone names the error then.
                return status_pb2.Status()
    return status
