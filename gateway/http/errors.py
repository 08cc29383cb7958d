"""Errors as OpenAI clients expect them, from the one table of errors.

The one rule: nothing but the table decides status, type and code, and no exception's own text leaves.
"""

from __future__ import annotations

import logging
import math
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from gateway.http.requests import json_name
from shared.errors import Reason, TrunklineError, Violation

_log = logging.getLogger(__name__)

JSON: Final = "application/json"


def body(error: TrunklineError) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`, with the violations by the client's own field names."""
    violations = [Violation(json_name(item.field), item.description) for item in error.violations]
    message = error.message
    if violations:
        message = "; ".join(
            f"{item.field}: {item.description}" if item.field else item.description for item in violations
        )
    param = violations[0].field if violations else json_name(error.metadata.get("field", ""))
    told: dict[str, Any] = {
        "message": message,
        "type": error.row.openai_type,
        "param": param or None,
        "code": error.reason.value,
    }
    if violations:
        told["violations"] = [{"field": item.field, "description": item.description} for item in violations]
    return {"error": told}


def response(error: TrunklineError, headers: dict[str, str] | None = None) -> Response:
    """The HTTP answer of an error."""
    limits = {name: value for name, value in error.metadata.items() if name.startswith("x-ratelimit-")}
    headers = {**(headers or {}), **limits}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
        headers["retry-after-ms"] = str(math.ceil(error.retry_after_s * 1000))
    if error.row.http == 401:
        headers["www-authenticate"] = "Bearer"
    if not error.row.retryable:
        headers["x-should-retry"] = "false"  # what OpenAI's own clients look at first
    return Response(msgspec.json.encode(body(error)), error.row.http, headers, JSON)


def from_unknown(error: Exception) -> TrunklineError:
    """An exception that nobody foresaw: logged here, without a word of it outside."""
    _log.error("a request failed with an exception nobody foresaw", exc_info=error)
    return TrunklineError(Reason.INTERNAL, "The server failed.")


async def on_http_exception(_request: Request, error: Exception) -> Response:
    """Paths and methods that do not exist."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    message = "There is nothing at this path." if status == 404 else "This method is not served at this path."
    told = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return Response(msgspec.json.encode(told), status, media_type=JSON)
