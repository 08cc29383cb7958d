"""The table of errors is total, and an error keeps everything over the wire."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2

from shared.errors import (
    DOMAIN,
    MAX_STATUS_BYTES,
    STATUS_DETAILS_KEY,
    TABLE,
    Reason,
    Row,
    TrunklineError,
    Violation,
    from_rpc,
    to_status,
)

# The published table: (gRPC, HTTP, OpenAI type) of each reason's group.
PUBLISHED = {
    ("INVALID_ARGUMENT", 400, "invalid_request_error"): "BAD_FIELD PROMPT_TOO_LONG TOO_LARGE",
    ("UNAUTHENTICATED", 401, "authentication_error"): "KEY_UNKNOWN KEY_EXPIRED",
    ("PERMISSION_DENIED", 403, "permission_error"): "MODEL_FORBIDDEN SCOPE_FORBIDDEN",
    ("NOT_FOUND", 404, "not_found_error"): "MODEL_UNKNOWN REQUEST_UNKNOWN",
    ("ALREADY_EXISTS", 409, "conflict_error"): "IDEMPOTENCY_CONFLICT",
    ("ABORTED", 409, "conflict_error"): "RESUME_DIVERGED OWNER_MOVED",
    ("RESOURCE_EXHAUSTED", 429, "rate_limit_error"): "RPM TPM CONCURRENCY QUEUE_FULL SLOW_READER",
    ("CANCELLED", 499, "cancelled"): "CLIENT_GONE CLIENT_CANCEL",
    ("INTERNAL", 500, "server_error"): "ENGINE_FAULT NAN_LOGITS POISON_SUSPECTED INTERNAL",
    ("UNIMPLEMENTED", 501, "invalid_request_error"): "FEATURE_OFF PROTOCOL_MISMATCH",
    ("UNAVAILABLE", 503, "server_error"): (
        "NO_REPLICA DRAINING VERSION_GONE OWNER_LOST MOVED STATE_AWAY OUTCOME_UNKNOWN WORKER_LOST"
    ),
    ("DEADLINE_EXCEEDED", 504, "timeout_error"): "QUEUE_EXPIRED WOULD_MISS RUN_EXPIRED",
}


def rpc_error(code: grpc.StatusCode, status: status_pb2.Status | None, details: str = "") -> grpc.aio.AioRpcError:
    trailers = [] if status is None else [(STATUS_DETAILS_KEY, status.SerializeToString())]
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details)


def through_the_wire(error: TrunklineError) -> TrunklineError:
    return from_rpc(rpc_error(error.row.code, to_status(error)))


def details(status: status_pb2.Status, kind: Callable[[], object]) -> list[object]:
    found = []
    for detail in status.details:
        message = kind()
        if detail.Unpack(message):
            found.append(message)
    return found


def test_every_reason_has_the_row_that_is_published() -> None:
    expected = {name: group for group, names in PUBLISHED.items() for name in names.split()}
    actual = {reason.value: (row.code.name, row.http, row.openai_type) for reason, row in TABLE.items()}
    assert actual == expected
    assert set(TABLE) == set(Reason)


def test_only_what_may_succeed_later_unchanged_is_retryable() -> None:
    retryable = {reason for reason, row in TABLE.items() if row.retryable}
    unavailable = {reason for reason, row in TABLE.items() if row.http == 503}
    limited = {Reason.RPM, Reason.TPM, Reason.CONCURRENCY, Reason.QUEUE_FULL}
    assert retryable == unavailable | limited | {Reason.OWNER_MOVED}


@pytest.mark.parametrize("reason", list(Reason))
def test_an_error_keeps_everything_over_the_wire(reason: Reason) -> None:
    violations = [Violation("sampling.top_p", "must be in (0, 1]"), Violation("n", "must be at most 16")]
    sent = TrunklineError(
        reason, "A sentence.", metadata={"incarnation": "00ff"}, violations=violations, retry_after_s=1.25
    )
    got = through_the_wire(sent)
    assert (got.reason, got.message, got.metadata) == (reason, "A sentence.", {"incarnation": "00ff"})
    assert got.violations == tuple(violations)
    assert got.retry_after_s == 1.25
    assert got.row == TABLE[reason]


@pytest.mark.parametrize("reason", list(Reason))
def test_a_status_has_exactly_one_error_info_and_only_the_details_that_apply(reason: Reason) -> None:
    status = to_status(TrunklineError(reason, "A sentence."))
    (info,) = details(status, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain) == (reason.value, DOMAIN)
    assert status.code == TABLE[reason].code.value[0]
    quota = details(status, error_details_pb2.QuotaFailure)
    assert len(quota) == (reason in {Reason.RPM, Reason.TPM, Reason.CONCURRENCY, Reason.QUEUE_FULL})
    assert not details(status, error_details_pb2.RetryInfo)
    assert not details(status, error_details_pb2.BadRequest)


def test_no_retry_time_is_not_a_retry_time_of_zero() -> None:
    assert through_the_wire(TrunklineError(Reason.RPM, "Later.")).retry_after_s is None
    assert through_the_wire(TrunklineError(Reason.RPM, "Now.", retry_after_s=0)).retry_after_s == 0


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_a_bare_status_becomes_an_error_of_that_code_without_the_transports_text(code: grpc.StatusCode) -> None:
    error = from_rpc(rpc_error(code, None, "failed to connect to all addresses; last error: ipv4:10.0.0.7:50051"))
    assert error.metadata == {"grpc": code.name}
    assert "10.0.0.7" not in str(error)
    same_code = {"UNKNOWN", "FAILED_PRECONDITION", "OUT_OF_RANGE", "DATA_LOSS", "RESOURCE_EXHAUSTED"}
    assert error.row.code is code or code.name in same_code


@pytest.mark.parametrize(("domain", "reason"), [("trunkline", "FROM_A_NEWER_PEER"), ("envoy.example", "RPM")])
def test_an_error_of_another_world_is_named_by_its_code(domain: str, reason: str) -> None:
    packed = AnyMessage()
    packed.Pack(error_details_pb2.ErrorInfo(domain=domain, reason=reason))
    status = status_pb2.Status(code=14, message="10.0.0.7 is gone", details=[packed])
    error = from_rpc(rpc_error(grpc.StatusCode.UNAVAILABLE, status))
    assert error.reason is Reason.NO_REPLICA
    assert "10.0.0.7" not in error.message


def test_garbage_in_the_status_trailer_is_survived() -> None:
    trailers = grpc.aio.Metadata((STATUS_DETAILS_KEY, b"\xff\xff\xff garbage"))
    error = from_rpc(grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), trailers))
    assert error.reason is Reason.INTERNAL


@pytest.mark.parametrize("count", [1, 10, 100, 5000])
def test_a_status_fits_into_trailers_and_says_how_many_violations_it_left_out(count: int) -> None:
    violations = [Violation(f"stop[{i}]", "must be at most 256 bytes " * 20) for i in range(count)]
    status = to_status(TrunklineError(Reason.BAD_FIELD, "sentence " * 1000, violations=violations))
    assert status.ByteSize() <= MAX_STATUS_BYTES
    (bad,) = details(status, error_details_pb2.BadRequest)
    named = [v for v in bad.field_violations if v.field]
    left_out = [v for v in bad.field_violations if not v.field]
    assert len(named) >= min(count, 5)
    assert len(named) == count or left_out[0].description == f"{count - len(named)} more fields are not valid"


def test_metadata_is_not_shared_between_errors() -> None:
    given = {"a": "1"}
    error = TrunklineError(Reason.INTERNAL, "x", metadata=given)
    error.metadata["b"] = "2"
    assert given == {"a": "1"}
    assert TrunklineError(Reason.INTERNAL, "y").metadata == {}
    assert isinstance(error.row, Row)
